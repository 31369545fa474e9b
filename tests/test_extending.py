"""docs/extending.md: each section, applied to a copy of the repository as a person would, touches as many files as it
says, and works.

New files are written, diffs given to `git apply`, commands run. Fast: the count, the format, each section's own test.
Slow: the checks of the project, and every other command, on a copy of the built graph at smoke scale.
"""

import csv
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from tests.graph import ROOT, Repository, copy_of_built, ran

PAGE = ROOT / "docs/extending.md"
HEADING = re.compile(r"^## (?P<title>.+): (?P<promised>\d) files?(?P<tested> and a test)?$")
BLOCK = re.compile(
    r"(?:^New file `(?P<path>[^`\n]+)`:\n\n)?^```(?P<kind>\w+)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)
OWN_TEST = "python -m pytest "
MORE = (  # these show that parameters resolve and that the model is built
    "tests/test_params.py::test_parameters_of_every_stage_resolve_for_every_scale_and_model[smoke-mini]",
    "tests/test_params.py::test_what_each_stage_reads_is_what_dvc_tracks",
    "tests/test_reference_keys.py::test_the_sizes_are_those_that_the_model_files_say",
)


@dataclass(frozen=True)
class Section:
    """One section of the page."""

    title: str
    promised: int  # files, besides the test
    tested: bool
    new: dict[str, str]  # path -> text
    diffs: list[str]
    commands: list[str]

    @property
    def tests(self) -> list[str]:
        """The test files that it writes."""
        return [path for path in self.new if path.startswith("tests/")]

    def put_into(self, repository: Repository) -> None:
        """Write its files and apply its diffs."""
        for path, text in self.new.items():
            assert not (repository.folder / path).exists(), f"{path} is not new"
            (repository.folder / path).parent.mkdir(exist_ok=True)  # the built graph has no tests/
            (repository.folder / path).write_text(text)
        for diff in self.diffs:
            subprocess.run(["git", "apply", "-"], cwd=repository.folder, input=diff, text=True, check=True)


def sections(page: Path) -> dict[str, Section]:
    """The sections that promise a number of files, by title."""
    found = {}
    for part in re.split(r"^(?=## )", page.read_text(encoding="utf-8"), flags=re.MULTILINE):
        heading = HEADING.match(part.split("\n")[0])
        if heading is None:
            continue
        blocks = list(BLOCK.finditer(part))
        assert len(blocks) == part.count("\n```") // 2, f"{heading['title']}: a block without a language"
        assert all(block["path"] or block["kind"] in ("diff", "sh") for block in blocks), heading["title"]
        commands = [line for b in blocks if b["kind"] == "sh" for line in b["text"].splitlines()]
        found[heading["title"]] = Section(
            heading["title"],
            int(heading["promised"]),
            bool(heading["tested"]),
            {b["path"]: b["text"] for b in blocks if b["path"]},
            [b["text"] for b in blocks if b["kind"] == "diff"],
            commands,
        )
    return found


SECTIONS = sections(PAGE)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Repository:
    """A copy of the repository with its tests, committed."""
    repository = Repository.copy_of_ours(tmp_path_factory.mktemp("extending") / "repository")
    shutil.copytree(ROOT / "tests", repository.folder / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    repository.commit("with tests")
    return repository


@pytest.fixture
def fresh(whole: Repository) -> Iterator[Repository]:
    """The copy as it was committed."""
    yield whole
    whole.git("reset", "-q", "--hard")
    whole.git("clean", "-qfd")


def test_the_page_has_what_a_newcomer_brings() -> None:
    assert {section.title: section.promised for section in SECTIONS.values()} == {
        "A model size": 1,
        "A data source": 2,
        "A knob": 2,
        "An environment": 1,
        "A tool": 2,
        "A reward": 1,
        "A training method": 1,
        "A stage": 3,
    }


@pytest.mark.parametrize("title", SECTIONS)
def test_a_section_touches_as_many_files_as_it_says(title: str, fresh: Repository) -> None:
    section = SECTIONS[title]
    section.put_into(fresh)
    fresh.git("add", "--intent-to-add", ".")
    print(f"{title}\n{fresh.git('diff', '--stat')}")
    touched = fresh.git("diff", "--name-only").split()
    tests = [path for path in touched if path.startswith("tests/")]
    assert len(touched) - len(tests) == section.promised
    assert tests == section.tests and len(tests) == section.tested
    own = [command for command in section.commands if command.startswith(OWN_TEST)]
    assert all(any(test in command.split() for command in own) for test in tests), (
        "its own test is not among its commands"
    )


@pytest.mark.slow
@pytest.mark.full
def test_all_sections_together_pass_their_own_tests_and_the_formatter(fresh: Repository, tmp_path: Path) -> None:
    for section in SECTIONS.values():
        section.put_into(fresh)
    for command in ("format --check", "check"):
        fresh.run("ruff", *command.split(), *(path for path in changed(fresh) if path.endswith(".py")))
    tests = [test for section in SECTIONS.values() for test in section.tests]
    said = fresh.run(
        "python", "-m", "pytest", "-p", "no:cacheprovider", f"--basetemp={tmp_path / 'pytest'}", *tests, *MORE
    )
    assert "[100%]" in said.stdout and "skipped" not in said.stdout


def changed(repository: Repository) -> list[str]:
    """Paths of changed and new files."""
    return [line[3:] for line in repository.git("status", "--porcelain", "--untracked-files=all").splitlines()]


# -- slow: the commands ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.full
def test_all_sections_together_pass_the_checks_of_the_project(fresh: Repository, tmp_path: Path) -> None:
    for section in SECTIONS.values():
        section.put_into(fresh)
    fresh.run(
        "pyright",
        *(path for path in changed(fresh) if path.startswith(("pipeline/", "stages/")) and path.endswith(".py")),
    )
    fresh.run("python", "-m", "pipeline.tools.reference")
    for row in ("| `share` |", "| `groups` |", "| `mini` |", "apo_down, dpop. |"):
        assert row in (fresh.folder / "docs/reference.md").read_text()
    fresh.run(
        "python",
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-m",
        "not slow",
        f"--basetemp={tmp_path / 'pytest'}",
        "tests/test_params.py",
        "tests/test_architecture.py",
        "tests/test_objectives_pairs.py",
        "tests/test_toolbox.py",
    )


@pytest.fixture
def built(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Repository]:
    """A copy of the built graph, at smoke scale."""
    repository, _ = copy_of_built(tmp_path / "built", tmp_path_factory)
    yield repository
    shutil.rmtree(repository.folder)


def try_out(title: str, repository: Repository) -> str:
    """Apply a section, run its commands except the tests, and return what the last one printed."""
    SECTIONS[title].put_into(repository)
    said = ""
    for command in SECTIONS[title].commands:
        if not command.startswith(OWN_TEST):
            said = repository.run("bash", "-c", command).stdout
    return said


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.timeout(2400)
def test_a_stage_of_ones_own_runs_is_evaluated_and_stands_in_the_report_and_nothing_trains(built: Repository) -> None:
    assert ran(try_out("A stage", built)) == {"code_versions", "stage_soup", "stage_evaluate@soup", "stage_report"}
    first, second, soup = (
        load_file(built.folder / f"models/{name}/model.safetensors") for name in ("dpo", "grpo", "soup")
    )
    for name, weights in soup.items():
        assert abs(weights - (first[name] + second[name]) / 2).max() < 1e-6, name
    headlines = json.loads((built.folder / "reports/headlines/soup.json").read_text())
    assert headlines["text_bpb"] > 0
    page = (built.folder / "reports/index.html").read_text()
    assert re.search(r"<th[^>]*>soup", page) and ">soup</text>" in page  # a column of the table, a box of the graph
    assert built.changed() == set()


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.timeout(2400)
def test_a_tool_of_ones_own_is_called_in_the_dialogues_that_are_made(built: Repository) -> None:
    try_out("A tool", built)
    talks = [json.loads(line) for line in (built.folder / "data/dialogues/train.jsonl").read_text().splitlines()]
    calls = [
        call["function"] for talk in talks for message in talk["messages"] for call in message.get("tool_calls", ())
    ]
    mine = [json.loads(call["arguments"]) for call in calls if call["name"] == "remainder"]
    assert mine and all({*arguments} == {"number", "divisor"} for arguments in mine)


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.timeout(2400)
def test_a_reward_a_knob_and_a_loss_of_ones_own_are_trained_with(built: Repository) -> None:
    try_out("A reward", built)
    with (built.folder / "metrics/grpo.csv").open() as file:
        assert any(row["rewards/docstring/mean"] for row in csv.DictReader(file))
    try_out("A knob", built)
    problems = [json.loads(line) for line in (built.folder / "data/problems/rl.jsonl").read_text().splitlines()]
    medium = sum(problem["group"] == "medium" for problem in problems)
    assert json.loads((built.folder / "metrics/grpo.json").read_text())["prompts"] == medium < len(problems)
    try_out("A training method", built)
    told = json.loads((built.folder / "metrics/dpo.json").read_text())
    assert told["params"]["loss"] == "dpop" and told["final"]["loss"] > 0


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.timeout(2400)
def test_a_size_of_ones_own_is_trained_and_a_data_source_resolves(built: Repository) -> None:
    try_out("A model size", built)
    assert json.loads((built.folder / "models/language/config.json").read_text())["hidden_size"] == 128
    try_out("A data source", built)
