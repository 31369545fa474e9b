"""The report of the client matrix, and the blocks of docs/clients.md that need no other environment."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.model import checkpoint
from pipeline.text.tokenizer import Tokenizer
from tests.matrix import report, snippets
from tests.matrix.report import Column, Outcome
from tests.server import random_model, serving

SCRIPTS = ("with_openai.mjs", "with_ai.mjs", "with_langchain.py", "with_litellm.py")


def test_the_rows_are_numbered_one_to_forty_nine() -> None:
    assert list(report.titles()) == list(range(1, 50))
    assert report.titles()[21] == "a repeated prompt is counted as cached"


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_has_each_row_once_as_a_test_or_as_a_reason(script: str) -> None:
    text = (Path(report.__file__).parent / script).read_text()
    numbers = re.findall(r"^  (\d+): ", text, re.MULTILINE)
    if script.endswith(".py"):
        nodes = list(ast.walk(ast.parse(text)))
        numbers = [
            node.name.removeprefix("row_")
            for node in nodes
            if isinstance(node, ast.FunctionDef) and node.name.startswith("row_")
        ]
        absent = next(
            node for node in nodes if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "ABSENT"
        )
        numbers += [
            node.value for node in ast.walk(absent) if isinstance(node, ast.Constant) and isinstance(node.value, int)
        ]
    assert Counter(map(int, numbers)) == Counter(range(1, 50))


def test_a_row_that_was_not_told_or_told_twice_failed() -> None:
    output = (
        'npm said something\n{"row": 1, "state": "pass", "why": ""}\n' + 2 * '{"row": 2, "state": "pass", "why": ""}\n'
    )
    assert report.heard(output, [1, 2, 3]) == {
        1: Outcome("pass"),
        2: Outcome("FAIL", "reported 2 times"),
        3: Outcome("FAIL", "reported 0 times"),
    }


def test_a_test_that_failed_was_skipped_or_did_not_run_did_not_pass(tmp_path: Path) -> None:
    (tmp_path / "junit.xml").write_text(
        '<testsuites><testsuite><testcase name="test_01_a"/><testcase name="test_02_b"><failure'
        ' message="no"/></testcase><testcase name="test_03_c"><skipped message="none'
        ' here"/></testcase></testsuite></testsuites>'
    )
    assert report.junit(tmp_path / "junit.xml", [1, 2, 3, 4]) == {
        1: Outcome("pass"),
        2: Outcome("FAIL", "no"),
        3: Outcome("FAIL", "none here"),
        4: Outcome("FAIL", "not run"),
    }


def test_the_table_shows_every_outcome_and_says_each_reason_once() -> None:
    columns = [
        Column("left", "left 1.0", {1: Outcome("pass"), 2: Outcome("absent", "no way")}),
        Column("right", "right 2.0", {1: Outcome("pass", "in part"), 2: Outcome("absent", "no way")}),
        Column("third", "third 3.0", {1: Outcome("pass"), 2: Outcome("FAIL", "TypeError: a | b")}),
    ]
    assert (
        report.table(columns, {1: "one", 2: "two"}) == "| row | | left | right | third |\n"
        "|---|---|---|---|---|\n"
        "| | version | left 1.0 | right 2.0 | third 3.0 |\n"
        "| 1 | one | pass | pass (1) | pass |\n"
        "| 2 | two | not offered (2) | not offered (2) | FAIL |\n"
        "| | **passed, out of 2** | 1 | 1 | 1 |\n"
        "\n"
        "1. in part\n"
        "2. no way\n"
    )
    assert report.failures(columns) == ["third, row 2: TypeError: a | b"]


def test_only_the_written_section_of_the_document_is_replaced() -> None:
    document = f"above\n{report.BEGIN}old\n{report.END}\nbelow\n"
    assert report.put(document, "new\n") == f"above\n{report.BEGIN}\nnew\n\n{report.END}\nbelow\n"
    with pytest.raises(ValueError, match="expected"):
        report.put("no marks", "new\n")


def test_the_document_has_all_rows_of_all_clients_and_none_failed() -> None:
    lines = snippets.DOCUMENT.read_text().split(report.BEGIN)[1].splitlines()
    cells = {int(found[1]): line.split(" | ")[1:] for line in lines if (found := re.match(r"\| (\d+) \|", line))}
    assert sorted(cells) == list(range(1, 50)) and {len(row) for row in cells.values()} == {6}
    assert {row: cells[row][0] for row in cells} == report.titles(), "tests were renamed: run make clients"
    assert all(re.fullmatch(r"(pass|not offered)( \(\d+\))?( \|)?", mark) for row in cells.values() for mark in row[1:])


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory, byte_tokenizer: Tokenizer) -> Iterator[str]:
    """The address of a server for an untrained model with the name that the document uses."""
    folder = tmp_path_factory.mktemp("deployed")
    checkpoint.save(folder / snippets.MODEL, random_model(byte_tokenizer), byte_tokenizer, {})
    with serving([folder / snippets.MODEL], log=folder / "log") as running:
        yield running.url


@pytest.mark.parametrize("heading", ["curl", "openai for Python"])
def test_a_block_of_the_document_runs_as_it_stands(deployed: str, tmp_path: Path, heading: str) -> None:
    code = snippets.blocks(snippets.DOCUMENT.read_text())[heading]
    assert snippets.run(heading, code, deployed, tmp_path).strip()
    with pytest.raises(AssertionError, match=heading):
        snippets.run(heading, code.replace(snippets.MODEL, "nobody"), deployed, tmp_path)
