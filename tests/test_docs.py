"""Every command shown in README.md, CONTRIBUTING.md and docs/commands.md exists: make targets, modules and their
options, stages, keys, files. The README's table holds the measured numbers.
"""

import importlib.util
import itertools
import json
import os
import re
import shlex
import shutil
from pathlib import Path

import pytest
import yaml

from pipeline.run.config import Settings, stage_names, stage_params

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "CONTRIBUTING.md", "docs/commands.md")
DVC = {"repro", "exp", "dag", "metrics", "push", "checkout", "queue"}


def blocks(page: str) -> list[str]:
    """The commands of the shell blocks: without comments, with continued lines joined."""
    text = (ROOT / page).read_text()
    found = "\n".join(re.findall(r"^```(?:sh)?\n(.*?)^```", text, re.MULTILINE | re.DOTALL)).replace("\\\n", " ")
    words = (line.split("   #")[0].split("  #")[0].strip() for line in found.splitlines())
    return [line for line in words if re.match(r"(make|dvc|python|curl|[A-Z_]+=\S+ )", line)]


COMMANDS = [
    pytest.param(page, line, id=f"{page}: {line[:60]}") for page in PAGES for line in dict.fromkeys(blocks(page))
]


@pytest.mark.parametrize(("page", "line"), COMMANDS)
def test_a_command_of_the_docs_exists(in_repository: Path, page: str, line: str) -> None:
    words = shlex.split(line)
    while "=" in words[0]:  # an environment variable
        name = words.pop(0).partition("=")[0]
        assert name in Path("docs/reference.md").read_text(), f"{page}: {name} is explained nowhere"
    head, rest = words[0], words[1:]
    if head == "make":
        names = [word for word in rest if "=" not in word]
        assert all(f"\n{name}:" in Path("Makefile").read_text() for name in names), line
    elif head == "dvc":
        assert rest[0] in DVC, line
        stages = yaml.safe_load(Path("dvc.yaml").read_text())["stages"]
        assert all(word.partition("@")[0] in stages for word in rest if word.startswith("stage_")), line
        check_values([after for before, after in itertools.pairwise(rest) if before in ("-S", "--set-param")])
    elif head == "python":
        path = Path(rest[0]) if rest[0] != "-m" else module(rest[1])
        assert path.is_file(), line
        options = [word for word in rest if word.startswith("--") and word != "--help"]
        assert all(f'"{option}"' in path.read_text() for option in options), line
        if rest[0] == "-m" and rest[1].startswith(("stages.", "pipeline.tools.plan")):
            check_values([word for word in rest[2:] if "=" in word and not word.startswith("processes=")], added=True)
    else:
        assert head == "curl", line


def module(name: str) -> Path:
    """The file that `python -m NAME` runs."""
    path = Path(name.replace(".", "/"))
    return path.with_suffix(".py") if path.with_suffix(".py").is_file() else path / "__main__.py"


def check_values(values: list[str], *, added: bool = False) -> None:
    """Check that the keys exist and take these values, and that keys without a plus are in params.yaml. Of a sweep,
    only the first value is checked.
    """
    first = [re.sub(r"choice\(([^,]*),.*\)", r"\1", value) for value in values]
    settings = Settings(Path(), [value.lstrip("+") for value in first])
    given = yaml.safe_load(Path("params.yaml").read_text())
    for value in first:
        block, _, key = value.partition("=")[0].lstrip("+").partition(".")
        assert block in given, value
        if key and block in stage_names(Path()):
            assert added or value.startswith("+") == (key not in given[block]), (
                f"{value}: a plus adds what params.yaml lacks"
            )
            stage_params(block, settings)


@pytest.mark.parametrize("page", PAGES)
def test_what_the_text_names_exists(page: str) -> None:
    text = (ROOT / page).read_text()
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"`make ([a-z-]+)", text):
        assert f"\n{target}:" in makefile, target
    for name in re.findall(r"python -m ((?:pipeline|stages)\.[a-z_.]+)", text):
        assert importlib.util.find_spec(name) is not None, name
    graph = (ROOT / "dvc.yaml").read_text()
    for stage in re.findall(r"\bstage_[a-z_]+", text):
        assert f"  {stage}:" in graph, stage
    for link in re.findall(r"\]\(([^)#:]+)\)", text):
        assert ((ROOT / page).parent / link).exists(), link


MEASURES = {
    "easy problems solved": "Easy problems, pass@1",
    "new combinations of learned operations solved": "Unseen compositions, pass@1",
    "one operation, requested in everyday words": "Requests in everyday words",
    "answers whose code parses": "Answers whose code parses",
    "stories that contain everything requested": "Stories that pass every clause",
    "correct calls to tools not seen in training": "Correct calls of unseen tools",
}


def test_the_table_of_the_readme_is_what_was_measured() -> None:
    rows = json.loads((ROOT / "benchmarks/results/seeds.json").read_text())["rows"]
    measured = {(row["model"], row["measure"]): row for row in rows}
    text = (ROOT / "README.md").read_text().partition("## What you get")[2].partition("##")[0]
    lines = [line for line in text.splitlines() if line.startswith("|") and "%" in line]
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert [row[0] for row in table[1:]] == list(MEASURES)
    for name, result, other in table[1:]:
        row = measured["rlhf", MEASURES[name]]
        low, high = (round(100 * end) for end in row["items"])
        assert result == f"{100 * row['mean']:.0f}% ({low}-{high})", name
        model = other.split("`")[1]
        assert other == f"`{model}` {100 * measured[model, row['measure']]['mean']:.0f}%", name


def test_the_python_of_the_docs_compiles() -> None:
    found = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs/commands.md").read_text(), re.MULTILINE | re.DOTALL)
    assert len(found) == 1
    compile(found[0], "docs/commands.md", "exec")


def test_the_hooks_and_the_workflow_run_what_is_there() -> None:
    (local,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    for hook in local["hooks"]:
        program, *rest = hook["entry"].split()
        assert shutil.which(Path(program).name), hook["id"]
        if rest[:1] == ["-m"]:
            assert (ROOT / module(rest[1])).is_file(), hook["id"]
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    assert {"run": ".ci/run"} in workflow["jobs"]["test"]["steps"] and os.access(ROOT / ".ci/run", os.X_OK)
    for form in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"):
        asked = yaml.safe_load(form.read_text())["body"]
        assert len({one["id"] for one in asked}) == len(asked) > 0
