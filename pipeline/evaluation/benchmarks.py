"""Public test sets that a person brought by path, known by their content and scored whole.

    HumanEval   JSON lines, plain or gzip                     pass@k of programs, judged in the sandbox
    MBPP        JSON lines, or the sanitized JSON list        the same
    BFCL        a category's JSON lines, v3 or v4             accuracy of calls; truth in possible_answer/ beside it

`evaluate.benchmarks` lists files of data/benchmarks/, whose numbers stand under `benchmarks.<file stem>`; a file from
elsewhere is scored by `python -m pipeline.evaluation.benchmarks MODEL_DIR FILE...`, which prints the numbers and keeps them in MLflow.

A model named in COMPLETES has never seen a conversation, so it completes HumanEval and MBPP; the others are asked in a
chat turn (`exercises.py`); `form` says which it was. A model's calls are always asked for in the chat format.

Every reference must pass first. A problem whose reference does not pass here, or none of whose asserts can be judged
safely, is left out and counted (`reference_fails`, `unjudged`); one some of whose asserts cannot is judged by the others
(`partly_judged`). All three are named among the items.

Not promised: the numbers of another harness; time limits, prompts and the length of answers are ours.
"""

import contextlib
import dataclasses
import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline import checkpoint, params, work
from pipeline.errors import ConfigError, DataError, StagecoachError
from pipeline.evaluation import bfcl_files, code, exercises, references, rows, suites, unrolling
from pipeline.evaluation.bfcl_files import Questions
from pipeline.evaluation.exercises import Exercise
from pipeline.evaluation.intervals import wilson
from pipeline.evaluation.rows import Row
from pipeline.evaluation.suites import CUT, Result, Settings, Subject
from pipeline.evaluation.unrolling import CPU_SECONDS
from pipeline.sandbox.judge import Judge, Program, SandboxConfig
from pipeline.streams.records import Problem
from pipeline.tracking import Tracker, say

COMPLETES = ("language", "code", "memory")  # folders of models/ that were trained on documents alone
HUMANEVAL = ("task_id", "prompt", "entry_point", "canonical_solution", "test")
MBPP = ("task_id", "code", "test_list")


@dataclass(frozen=True)
class TestSet:
    """A file that was read and found in order."""

    __test__ = False  # no test class, whatever pytest thinks of the name

    name: str  # what its numbers stand under
    kind: str  # humaneval, mbpp, bfcl
    exercises: list[Exercise] = field(default_factory=list)
    questions: Questions | None = None  # of bfcl


def stem(path: Path) -> str:
    """A file's name without its endings and without dots, which DVC reads as a path: what its numbers stand under."""
    return re.sub(r"\.jsonl?$", "", path.name.removesuffix(".gz")).replace(".", "_")


def load(path: Path) -> TestSet:
    """Read a file whole. Raises DataError for one that is none of the three, and for a row that is wrong."""
    found = rows.read(path)
    kind = _kind(found[0])
    for row in found:
        if _kind(row) != kind:
            raise DataError(f"{row.where}: expected a row of {kind} as the first one is, found the keys {_keys(row)}")
    if kind == "bfcl":
        return TestSet(stem(path), kind, questions=bfcl_files.load(path, found))
    read = exercises.humaneval if kind == "humaneval" else exercises.mbpp
    return TestSet(stem(path), kind, exercises=read(found))


def _kind(row: Row) -> str:
    if row.has(*HUMANEVAL):
        return "humaneval"
    if row.has(*MBPP) and (row.has("text") or row.has("prompt")):
        return "mbpp"
    if bfcl_files.is_question(row):
        return "bfcl"
    raise DataError(
        f"{row.where}: expected a row of HumanEval ({', '.join(HUMANEVAL)}), MBPP ({', '.join(MBPP)}, text or prompt) or "
        f"BFCL (id, question, function), found the keys {_keys(row)}; take the file off evaluate.benchmarks"
    )


def _keys(row: Row) -> str:
    return ", ".join(map(str, row.fields))[:200]


def score(subject: Subject, sets: Sequence[TestSet], *, completes: bool, sandbox: Callable[[], Judge]) -> Result:
    """The numbers of each file under its name, and all items. Without a sandbox HumanEval and MBPP say "skipped"."""
    result = Result()
    with contextlib.ExitStack() as stack:
        judge = None
        if any(test_set.exercises for test_set in sets):
            try:
                judge = stack.enter_context(sandbox())
            except ConfigError as error:
                say(f"HumanEval and MBPP are skipped: {error}")
        for test_set in sets:
            suite = f"benchmarks/{test_set.name}"
            if test_set.questions is not None:
                part = bfcl_files.score(subject, suite, test_set.questions)
            elif judge is None:
                part = Result({"skipped": "skipped: no sandbox"})
            else:
                part = solved(subject, suite, test_set.exercises, judge, completes=completes)
            result.numbers[test_set.name] = {"kind": test_set.kind} | part.numbers
            result.rows += part.rows
    return result


def solved(subject: Subject, suite: str, asked: Sequence[Exercise], judge: Judge, *, completes: bool) -> Result:
    """pass@k of the exercises that can be judged, how many cannot, and a row for each exercise."""
    result = Result({"form": "completion" if completes else "chat", "problems": len(asked)})
    problems = _judged(result, suite, asked, judge)
    chosen = [exercise for exercise in asked if exercise.id in problems]
    prompts = {e.id: _prompt(subject, e, completes) for e in chosen}
    attempts = suites.attempt(subject, suite, prompts)
    result.numbers["left_out"] = len(prompts) - len(attempts.greedy)
    chosen = [exercise for exercise in chosen if exercise.id in attempts.greedy]
    if not chosen:
        return result

    def judged(answers: list[dict[str, Any]], first: int) -> list[code.Judged]:
        programs = []
        for exercise in chosen:
            for sample, done in enumerate(answers, start=first):
                text = subject.tokenizer.decode(done[exercise.id].ids)
                source = exercise.completed(text) if completes else exercise.answered(text)
                program = Program(source=source, entry_point=exercise.entry_point, tests=problems[exercise.id].tests,
                                  cpu_seconds=CPU_SECONDS)  # fmt: skip
                programs.append((exercise.id, sample, text, program))
        return code.judge_sources(judge, programs)

    greedy, sampled = judged([attempts.greedy], 0), judged(attempts.drawn, 1)
    result.numbers |= code.rates(greedy)
    result.measure("parse_rate", wilson(sum(j.parses for j in greedy), len(greedy)))
    if completes:
        del result.numbers["format_rate"]  # a completion has no code block to be in form
    result.numbers |= suites.pass_rates(subject, greedy, sampled).numbers
    for exercise, one in zip(chosen, greedy, strict=True):
        done = attempts.greedy[exercise.id]
        shown = (exercise.continued if completes else exercise.asked)[-CUT:]
        result.item(suite, exercise.id, done, subject.tokenizer.decode(done.ids),
                    asked=[exercise.asked, exercise.continued, exercise.reference], prompt=shown, verdict=one.verdict,
                    score=one.score)  # fmt: skip
    return result


def _judged(result: Result, suite: str, asked: Sequence[Exercise], judge: Judge) -> dict[str, Problem]:
    """The exercises that can be judged and whose reference passes, by id; the others are counted and named."""
    protected = unrolling.protect(judge, [exercise.check for exercise in asked])
    problems = [
        Problem(id=e.id, level=3, group="benchmark", key=e.id, question=e.asked, entry_point=e.entry_point, signature="",
                tests=tests.tests, answer=e.reference)
        for e, tests in zip(asked, protected, strict=True)
    ]  # fmt: skip
    found = references.faults(judge, ((p, p.answer) for p in problems), CPU_SECONDS)
    counts = {"unjudged": 0, "reference_fails": 0, "partly_judged": 0}
    kept = {}
    for problem, tests, (place, reason) in zip(problems, protected, found, strict=True):
        if not reason:
            kept[problem.id] = problem
        if tests.unprotected and not reason:
            place, reason = "partly", f"{len(tests.unprotected)} of its asserts cannot be judged safely"
        if reason:
            counts[{"tests": "unjudged", "answer": "reference_fails", "partly": "partly_judged"}[place]] += 1
            result.rows.append({"suite": f"{suite}/tests", "id": problem.id, "output": "\n".join(tests.unprotected)[:CUT],
                                "stop": "", "tokens": 0, "verdict": reason})  # fmt: skip
    result.numbers |= counts | {
        "asserts": sum(len(tests.tests) + len(tests.unprotected) for tests in protected),
        "asserts_unprotected": sum(len(tests.unprotected) for tests in protected),
    }
    return kept


def _prompt(subject: Subject, exercise: Exercise, completes: bool) -> list[int]:
    if completes:
        return [subject.tokenizer.end_of_text, *subject.tokenizer.encode(exercise.continued)]
    return suites.user(subject.tokenizer, exercise.asked)


def main(arguments: list[str]) -> int:
    """Score a model directory on files and print the numbers, under the block `evaluate` of params.yaml."""
    if len(arguments) < 2:
        sys.stderr.write("usage: python -m pipeline.evaluation.benchmarks MODEL_DIR FILE...\n")
        return ConfigError.exit_code
    try:
        values = params.Settings(Path(), [])
        mine = {f.name for f in dataclasses.fields(Settings)}
        layers = {name: value for name, value in values.layers("evaluate").items() if name in mine}
        settings = params.build(Settings, layers, "evaluate")
        limits = params.build(SandboxConfig, values.layers("sandbox"), "sandbox")
        url = params.build(params.Runtime, values.layers("runtime"), "runtime").sandbox_url
        sets = [load(Path(name)) for name in arguments[1:]]
        model, tokenizer = checkpoint.load(Path(arguments[0]))
        subject = Subject(model.train(False), tokenizer, settings, values.seed("data_seed"))
        completes = Path(arguments[0]).resolve().name in COMPLETES
        result = score(subject, sets, completes=completes, sandbox=lambda: Judge(limits, 1, url=url))
    except StagecoachError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    sys.stdout.write(json.dumps(result.numbers, indent=2) + "\n")
    keep(Path(arguments[0]), [Path(name) for name in arguments[1:]], settings, result)
    return 0


def keep(model: Path, files: Sequence[Path], settings: Settings, result: Result) -> None:
    """A run in MLflow, tagged with the work key of the model, with the numbers under `final/`."""
    asked = [model.name, *(work.sha256(path) for path in files), dataclasses.asdict(settings)]
    folder = work.root() / "benchmarks" / work.canonical_hash(asked)
    folder.mkdir(parents=True, exist_ok=True)
    tags = {
        "stage": "benchmarks",
        "model": model.name,
        "work.key": str(checkpoint.lineage(model).get("key", "elsewhere")),
    }
    tracker = Tracker(
        f"benchmarks@{model.name}",
        folder,
        tags,
        {"files": [path.name for path in files]} | dataclasses.asdict(settings),
        quiet=False,
    )
    tracker.report(**result.numbers)
    tracker.finish()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
