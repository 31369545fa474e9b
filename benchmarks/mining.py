"""Tasks mined from local repositories: how many, how long it takes, why functions are rejected, and whether a candidate
can find the answer.

    python benchmarks/mining.py FOLDER ... [--seconds 240]

FOLDER: a package's sources with its tests, as in its source distribution. Prints for each folder: minutes, tasks,
reasons for rejected functions, mean test strength. Then judges all tasks with the function's own body (expected: all
tests pass), three stubs (none passes), and each attack in attacks.txt, which looks for the function's body or its
results wherever they could be (none passes a task).
"""

import argparse
import sys
import time
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from pipeline.evaluation import mining
from pipeline.ingest import repository
from pipeline.ingest.records import Problem
from pipeline.sandbox.judge import Candidate, Judge, SandboxConfig
from pipeline.text import chat

MOST_BYTES = 50_000_000  # per repository
ATTACKS = dict(  # name -> source
    section.split("\n", 1) for section in (ROOT / "benchmarks/attacks.txt").read_text().split("\n### ")[1:]
)


def main(arguments: list[str]) -> int:
    """Mine, attack and print. Returns 1 if a function's own body fails, or a stub or an attack succeeds."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folders", type=Path, nargs="+", metavar="FOLDER")
    parser.add_argument("--seconds", type=float, default=mining.TEST_SECONDS, help="test time limit per repository")
    chosen = parser.parse_args(arguments)
    wrong = 0
    for folder in chosen.folders:
        with Judge(SandboxConfig(), 2) as judge:
            began = time.monotonic()
            found = mining.mine(repository.read(folder, MOST_BYTES), judge, chosen.seconds)
            minutes = (time.monotonic() - began) / 60
            print(f"{minutes:.1f} min  {found.shown(folder.name)}", flush=True)
            if not found.problems:
                continue
            own = passes(
                judge, found.problems, [chat.extract(problem.answer or "") or "" for problem in found.problems]
            )
            stubs = [sum(passes(judge, found.problems, sources)) for sources in stub_sources(found.problems)]
            print(
                f"  strength {found.summary()['strength']:.2f}; own body {sum(own)} of {len(own)}; stubs {sum(stubs)}"
            )
            wrong += len(own) - sum(own) + sum(stubs)
            for name, attack in ATTACKS.items():
                sources = [attacking(attack, problem, folder) for problem in found.problems]
                succeeded = [p.id for p, ok in zip(found.problems, passes(judge, found.problems, sources)) if ok]
                wrong += len(succeeded)
                print(f"  {name}: {len(succeeded)} of {len(sources)} {' '.join(succeeded[:3])}", flush=True)
    return int(wrong > 0)


def passes(judge: Judge, problems: Iterable[Problem], sources: Iterable[str]) -> list[bool]:
    """Whether each source passes all tests of its problem."""
    candidates = [
        Candidate(source=problem.program(source) or "", entry_point=problem.entry_point, tests=problem.tests)
        for problem, source in zip(problems, sources, strict=True)
    ]
    return [verdict.verdict == "passed" for verdict in judge.judge(candidates)]


def stub_sources(problems: Iterable[Problem]) -> list[list[str]]:
    """Three bodies that do nothing, each for all problems."""
    return [list(bodies) for bodies in zip(*(mining.stubs(p.signature, p.tests) for p in problems), strict=True)]


def attacking(attack: str, problem: Problem, folder: Path) -> str:
    """An attack on a problem, given the paths of the repository and the installed packages."""
    path = problem.id.partition("/")[2].partition("::")[0]
    inside = path.removeprefix("src/")
    module = inside.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
    places = [str(folder.resolve()), str(folder.resolve() / "src"), *(p for p in sys.path if p.endswith("-packages"))]
    words = {"FUNCTION": problem.entry_point, "MODULE": module, "FILE": inside, "TOP": module.partition(".")[0]}
    for word, value in (words | {"PLACES": repr(places)}).items():
        attack = attack.replace(word, value)
    return attack


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
