"""docs/tutorial.md: every command, in the order of the page, in a copy of the built graph."""

import re
import time
from pathlib import Path

import pytest

from tests.graph import ROOT, Repository, copy_of_built, ran

ELSEWHERE = ("make setup", ". .venv/bin/activate")  # the environment is the one that runs the tests


def commands(page: Path) -> list[str]:
    """The lines of its `sh` blocks."""
    blocks = re.findall(r"^```sh\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line]


def wait_for_queue(repository: Repository) -> None:
    """Until no task of DVC's queue is queued or running; both have succeeded then."""
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
def test_every_command_of_the_tutorial_works_and_shows_what_the_page_says(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    repository, _ = copy_of_built(tmp_path_factory.mktemp("tutorial") / "repository", tmp_path_factory)
    # make would set up an environment of its own; its other recipes are run as they stand
    repository.edit("Makefile", "$(READY): pyproject.toml", "$(READY):")
    (repository.folder / ".venv").mkdir()
    (repository.folder / ".venv/.ready").touch()
    repository.edit("params.yaml", "scale: smoke", "scale: demo")  # as a clone has it
    repository.commit("the environment is here")
    said: dict[str, str] = {}
    for command in commands(ROOT / "docs/tutorial.md"):
        if command in ELSEWHERE:
            continue
        done = repository.run("bash", "-c", f"set -e; {command}", check=False, STAGECOACH_MLFLOW="on")
        assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}"
        said[command] = done.stdout
        if command.startswith("dvc queue start"):
            wait_for_queue(repository)
    longer = next(text for command, text in said.items() if "-n longer" in command)
    assert ran(longer) == {"stage_lora", "stage_evaluate@lora", "stage_report"}
    compared = said["make compare A=main B=longer"]
    assert re.search(r"^lora +steps: 12 → 24", compared, re.MULTILINE), compared
    assert re.search(r"^lora .* [0-9a-f]{16} +[0-9a-f]{16} +[0-9a-f]{32} ", compared, re.MULTILINE), (
        "work keys and MLflow run"
    )
    assert "| lora |" in said["python -m pipeline.report.compare main longer --md"]
    page = (repository.folder / "reports/index.html").read_text()
    assert 'id="changes"' in page
    sweep = said["make experiments"]
    assert "dpo.beta 0.1" in sweep or "→ 0.1" in sweep, sweep
    assert "→ 0.5" in sweep and max(map(len, sweep.splitlines())) <= 120, sweep
    crowned = next(text for command, text in said.items() if "champion crown" in command)
    assert "is now the champion" in crowned
    program = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs/tutorial.md").read_text(), re.MULTILINE | re.DOTALL)
    (repository.folder / "champion.py").write_text(program[0])
    repository.run("python", "-m", "pipeline.run.workdir", "prune")
    answer = repository.run("python", "champion.py", check=False)
    assert answer.returncode == 0 and answer.stdout.splitlines()[-1].startswith("["), answer.stdout
    assert any(text.endswith("stopped\n") for command, text in said.items() if command.startswith("timeout"))


def test_the_pages_of_docs_link_to_pages_that_exist() -> None:
    for page in sorted((ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\(([^)#:]+\.md)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).is_file(), f"{page.name} links to {target}"
