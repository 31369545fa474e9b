"""docs/tutorial.md: every command, in the order of the page, and the output that the page shows."""

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.graph import ROOT, Repository, ran

PAGE = ROOT / "docs/tutorial.md"
ELSEWHERE = ("make setup", ". .venv/bin/activate")  # the tests' own environment is used instead
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
ANY = "..."  # in a line of expected output: any text; alone: any lines


def steps() -> Iterator[tuple[list[str], list[str]]]:
    """The commands of each `sh` block, and the lines of the `text` block that follows it, if one does."""
    blocks = BLOCK.findall(PAGE.read_text(encoding="utf-8"))
    for number, (kind, text) in enumerate(blocks):
        if kind == "sh":
            after = blocks[number + 1] if number + 1 < len(blocks) else ("", "")
            yield text.splitlines(), after[1].splitlines() if after[0] == "text" else []


def missing(expected: list[str], output: str) -> list[str]:
    """The expected lines that the output lacks, in this order; runs of spaces count as one."""
    lines = iter([" ".join(line.split()) for line in output.splitlines()])
    lacking = []
    for wanted in (" ".join(line.split()) for line in expected if line.strip()):
        pattern = ".*".join(map(re.escape, wanted.split(ANY)))
        if wanted != ANY and not any(re.fullmatch(pattern, line) for line in lines):
            lacking.append(wanted)
            break
    return lacking


def wait_for_queue(repository: Repository) -> None:
    """Wait until no task in DVC's queue is queued or running; both must then have succeeded."""
    for _ in range(600):
        status = repository.dvc("queue", "status")
        if not re.search(r"\b(Queued|Running)\b", status):
            assert status.count("Success") == 2, status
            return
        time.sleep(1)
    pytest.fail(repository.dvc("queue", "status"))


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.timeout(2400)
def test_every_command_of_the_tutorial_works_and_shows_what_the_page_says(tmp_path: Path) -> None:
    repository = Repository.copy_of_ours(tmp_path / "repository")
    # make would set up an environment of its own; its other recipes run unchanged
    repository.edit("Makefile", "$(READY): pyproject.toml", "$(READY):")
    (repository.folder / ".venv").mkdir()
    (repository.folder / ".venv/.ready").touch()
    repository.edit("params.yaml", "scale: smoke", "scale: demo")  # as in a fresh clone
    repository.commit("the environment is here")

    def run(command: str) -> str:
        done = repository.run("env", "-u", "STAGECOACH_MLFLOW", "bash", "-c", f"set -e; {command}", check=False)
        assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}"
        return done.stdout

    said: dict[str, str] = {}
    for commands, expected in steps():
        for command in commands:
            said[command] = "" if command in ELSEWHERE else run(command)
            if command.startswith("dvc queue start"):
                wait_for_queue(repository)
        output = "".join(said[command] for command in commands)
        assert not missing(expected, output), f"{missing(expected, output)} is not in\n{output[-4000:]}"
    longer = next(text for command, text in said.items() if "-n longer" in command)
    assert ran(longer) == {"stage_rlhf", "stage_evaluate@rlhf"}
    compared = said["make compare A=main B=longer"]
    assert re.search(r"^rlhf .* [0-9a-f]{16} +[0-9a-f]{16} +[0-9a-f]{32} ", compared, re.MULTILINE), compared
    assert "| rlhf |" in said["python -m pipeline.report.compare main longer --md"]
    assert 'id="changes"' in (repository.folder / "reports/index.html").read_text()
    assert max(map(len, said["make experiments"].splitlines())) <= 120
    ((_, program),) = [block for block in BLOCK.findall(PAGE.read_text(encoding="utf-8")) if block[0] == "python"]
    (repository.folder / "champion.py").write_text(program)
    assert run("python champion.py").splitlines()[-1].startswith("[")  # after `prune`


def test_an_expected_line_is_looked_for_after_the_one_before() -> None:
    output = "one 1\ntwo  2\nthree\n"
    assert missing(["one ...", ANY, "three"], output) == [] and missing(["two 2"], output) == []
    assert missing(["three", "one 1"], output) == ["one 1"] and missing(["four"], output) == ["four"]


def test_the_pages_of_docs_link_to_pages_that_exist() -> None:
    for page in sorted((ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\(([^)#:]+\.md)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).is_file(), f"{page.name} links to {target}"
