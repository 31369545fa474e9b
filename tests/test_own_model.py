"""The six ways in docs/own-model.md: the commands on that page, run as a newcomer would, on a small checkpoint."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import checkpoints
from tests.graph import ROOT, Repository

pytestmark = [pytest.mark.full, pytest.mark.slow, pytest.mark.oracle]
pytest.importorskip("transformers")
ROWS = 300
RATES = "".join(
    f"def rate_{n}(x, y):\n    if x > y + {n}:\n        return x * {n + 2} - y\n    return [x + {n}, y - x]\n\n\n"
    for n in range(6)
)
TESTS = "import rates\n\n\ndef test_rates():\n    for n in range(6):\n        rate = getattr(rates, f'rate_{n}')\n" + (
    "        assert [rate(a, b) for a in range(-3, 12, 2) for b in (0, 1, 5)]\n"
)


def write(path: Path, rows: list[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Repository]:
    """A repository with the files that the page mentions, and a checkpoint beside it."""
    home = tmp_path_factory.mktemp("own")
    repository = Repository.copy_of_ours(home / "repository")
    checkpoints.write(home / "models/Qwen3-0.6B", "qwen3", max_position_embeddings=4096)
    write(
        repository.folder / "support.jsonl",
        [{"prompt": f"Where is parcel {n}?", "completion": f"In depot {n % 7}."} for n in range(ROWS)],
    )
    write(
        repository.folder / "pairs.jsonl",
        [{"prompt": f"Where is parcel {n}?", "chosen": f"In depot {n % 7}.", "rejected": "No."} for n in range(ROWS)],
    )
    write(
        repository.folder / "labels.jsonl",
        [
            {"prompt": f"Greet guest {n}.", "completion": "Hello." if n % 3 else "No.", "label": n % 3 > 0}
            for n in range(ROWS)
        ],
    )
    write(
        repository.folder / "problems.jsonl",
        [
            {
                "question": f"Write f(x) that adds {n} to x.",
                "entry_point": "f",
                "tests": [{"args": f"[{k}]", "expected": str(k + n)} for k in range(3)],
            }
            for n in range(60)
        ],
    )
    code = repository.folder / "work/myproject"
    for path in sorted((ROOT / "pipeline/ingest").glob("[a-z]*.py")):
        code.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, code / path.name)
    (code / "rates.py").write_text(RATES, encoding="utf-8")
    (code / "test_rates.py").write_text(TESTS, encoding="utf-8")
    articles = repository.folder / "articles"
    articles.mkdir()
    for path in sorted((ROOT / "docs").glob("*.md")):
        for number, part in enumerate(path.read_text(encoding="utf-8").split("\n## ")):
            (articles / f"{path.stem}-{number}.txt").write_text(part, encoding="utf-8")
    shutil.copytree(code, repository.folder / "src")
    yield repository
    shutil.rmtree(home)


def commands(way: int) -> str:
    """The commands of one way, except the server's."""
    page = (ROOT / "docs/own-model.md").read_text(encoding="utf-8")
    section = page.split(f"\n## {way}. ")[1].split("\n## ")[0]
    (script,) = re.findall(r"```sh\n(.*?)```", section, re.S)
    lines = script.splitlines()
    assert len(lines) <= 10
    return "\n".join(line for line in lines if "pipeline.serve" not in line)


def follow(repository: Repository, way: int) -> str:
    """Run the commands of one way and return their output."""
    home = repository.folder.parent
    script = commands(way).replace("/models/", f"{home}/models/").replace("~/work", f"{repository.folder}/work")
    for kind in ("dialogues", "preferences", "labels", "problems", "code", "text", "myproject"):
        shutil.rmtree(repository.folder / "data/own" / kind, ignore_errors=True)
        if kind != "myproject":
            (repository.folder / "data/own" / kind).mkdir()
    environment = repository.environment | {"PATH": f"{Path(sys.executable).parent}:{repository.environment['PATH']}"}
    done = subprocess.run(
        ["bash", "-euc", script],
        cwd=repository.folder,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


def started(output: str) -> set[str]:
    """The stages that ran."""
    return set(re.findall(r"Running stage '(?:stage_)?([\w@]+)'", output)) - {"code_versions"}


@pytest.mark.parametrize(
    ("way", "stages"),
    [
        (1, {"tasks", "base", "tools"}),
        (2, {"tasks", "dpo", "kto"}),
        (3, {"corpus", "tokenizer", "encode@text", "encode@code", "code"}),
        (4, {"tasks", "grpo"}),
        (5, {"tasks", "grpo"}),
    ],
)
def test_a_way_builds_what_it_needs_and_nothing_else(way: int, stages: set[str], repository: Repository) -> None:
    output = follow(repository, way)
    assert stages <= started(output) <= {*stages, "base"}
    repository.git("checkout", "-q", "params.yaml", "conf")


def test_the_whole_chain_goes_from_scratch_on_own_text_and_code(repository: Repository) -> None:
    output = follow(repository, 6)
    assert {"corpus", "language", "code", "tools", "reward", "rlhf", "deploy"} & started(output) >= {
        "language",
        "deploy",
    }
    assert (repository.folder / "models/deploy/config.json").is_file()
