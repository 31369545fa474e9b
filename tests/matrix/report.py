"""The outcomes of each client's rows, and their table in docs/clients.md."""

import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

TESTS = Path(__file__).parents[1]
PYTHON_TESTS = (TESTS / "test_clients.py", TESTS / "test_clients_tools.py")
BEGIN, END = "<!-- begin: written by make clients -->\n", "<!-- end -->"
HARNESSES_BEGIN = "<!-- begin: harnesses, written by make clients -->\n"


@dataclass(frozen=True)
class Outcome:
    """A row's outcome for a client. `why`: why it did not pass, or a note on a row that passed."""

    state: Literal["pass", "absent", "FAIL"]
    why: str = ""


@dataclass(frozen=True)
class Column:
    """A client's rows, by number."""

    client: str
    versions: str
    outcomes: dict[int, Outcome]


def titles() -> dict[int, str]:
    """The titles of the rows, by number, from the names of the Python tests."""
    found = [
        match
        for path in PYTHON_TESTS
        for match in re.findall(r"^def test_(\d\d)_(\w+)", path.read_text(), re.MULTILINE)
    ]
    return {int(number): words.replace("_", " ") for number, words in found}


def heard(output: str, rows: Sequence[int]) -> dict[int, Outcome]:
    """Outcomes from the lines that a client's script printed. A row that is not printed exactly once has failed."""
    told: dict[int, list[Outcome]] = {row: [] for row in rows}
    for line in output.splitlines():
        if line.startswith("{"):
            fields = json.loads(line)
            told[fields["row"]].append(Outcome(fields["state"], fields["why"]))
    return {
        row: once[0] if len(once) == 1 else Outcome("FAIL", f"reported {len(once)} times") for row, once in told.items()
    }


def junit(file: Path, rows: Sequence[int]) -> dict[int, Outcome]:
    """Outcomes of the tests in a JUnit report, named `test_<row>_...`. A skipped or missing test did not pass."""
    outcomes = {row: Outcome("FAIL", "not run") for row in rows}
    for case in ET.parse(file).iter("testcase"):
        bad = [child for child in case if child.tag in ("failure", "error", "skipped")]
        row = int(case.attrib["name"].split("_")[1])
        outcomes[row] = Outcome("FAIL", bad[0].attrib.get("message", bad[0].tag)) if bad else Outcome("pass")
    return outcomes


def failures(columns: Sequence[Column]) -> list[str]:
    """One line for each row that failed."""
    return [
        f"{column.client}, row {row}: {outcome.why}"
        for column in columns
        for row, outcome in column.outcomes.items()
        if outcome.state == "FAIL"
    ]


def table(columns: Sequence[Column], rows: dict[int, str]) -> str:
    """A table of rows by client, with numbered notes below it."""
    notes: list[str] = []

    def mark(outcome: Outcome) -> str:
        shown = {"pass": "pass", "absent": "not offered", "FAIL": "FAIL"}[outcome.state]
        if not outcome.why or outcome.state == "FAIL":
            return shown
        if outcome.why not in notes:
            notes.append(outcome.why)
        return f"{shown} ({notes.index(outcome.why) + 1})"

    lines = [
        f"| row | | {' | '.join(column.client for column in columns)} |",
        "|---" * (len(columns) + 2) + "|",
        f"| | version | {' | '.join(column.versions for column in columns)} |",
    ]
    for row, title in rows.items():
        lines.append(f"| {row} | {title} | {' | '.join(mark(column.outcomes[row]) for column in columns)} |")
    passed = [str(sum(outcome.state == "pass" for outcome in column.outcomes.values())) for column in columns]
    lines += [f"| | **passed, out of {len(rows)}** | {' | '.join(passed)} |", ""]
    return "\n".join([*lines, *(f"{number}. {note}" for number, note in enumerate(notes, start=1))]) + "\n"


def put(text: str, section: str, mark: str = BEGIN) -> str:
    """A document with the section after `mark` replaced. Raises ValueError if a mark is missing."""
    head, begin, rest = text.partition(mark)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"expected {mark.strip()} and {END} in the document")
    return head + begin + "\n" + section + "\n" + end + tail
