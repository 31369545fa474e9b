"""The rows of a test set that a person brought by path: JSON lines, a JSON list or one object, plain or gzip.

Out: `Row`s, each with the place it stands at, whose fields are read with a check. Everything that cannot be read is a
DataError `file:line: field: expected ..., found ...; repair the file or take it away`.

Not promised: little memory; a file is read whole.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import DataError
from pipeline.streams import formats

GZIP = b"\x1f\x8b"  # how every gzip file begins, whatever its name says


@dataclass(frozen=True)
class Row:
    """One row. `where`: `file:line`, or `file, row n` in a JSON list."""

    where: str
    fields: dict[str, Any]

    def wrong(self, field: str, expected: str) -> DataError:
        """The error to raise for a field."""
        found = repr(self.fields[field])[:80] if field in self.fields else "nothing"
        return DataError(
            f"{self.where}: {field}: expected {expected}, found {found}; repair the file or take it off evaluate.benchmarks"
        )

    def text(self, field: str) -> str:
        """A text that is not blank."""
        value = self.fields.get(field)
        if not isinstance(value, str) or not value.strip():
            raise self.wrong(field, "a text")
        return value

    def texts(self, field: str) -> list[str]:
        """A list of texts; empty where the field is absent or null."""
        value = self.fields.get(field)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
            raise self.wrong(field, "a list of texts")
        return value

    def has(self, *fields: str) -> bool:
        """Whether all these fields are there."""
        return all(field in self.fields for field in fields)


def read(path: Path) -> list[Row]:
    """The rows of a file, at least one. Raises DataError."""
    try:
        with path.open("rb") as file:
            is_gzip = file.read(len(GZIP)) == GZIP
        text = (formats.unzipped(path) if is_gzip else path.read_bytes()).decode("utf-8-sig")
    except OSError as error:  # gzip.BadGzipFile is one
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error
    except (EOFError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: expected UTF-8 text, plain or gzip ({error}); fetch or convert it again") from error
    found = _list(path, text) if text.lstrip().startswith("[") else _lines(path, text)
    if not found:
        raise DataError(f"{path}: the file holds no row; fetch it again or take it off evaluate.benchmarks")
    return found


def _lines(path: Path, text: str) -> list[Row]:
    """A row on each line; a file that is one object over several lines is one row."""
    try:
        whole = json.loads(text)
    except ValueError:
        numbered = [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
        return [_row(f"{path}:{number}", _parse(f"{path}:{number}", line)) for number, line in numbered]
    return [_row(f"{path}:1", whole)]


def _list(path: Path, text: str) -> list[Row]:
    return [_row(f"{path}, row {number}", row) for number, row in enumerate(_parse(str(path), text), start=1)]


def _parse(where: str, text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        place = where if ":" in where.rpartition("/")[2] else f"{where}:{error.lineno}"
        raise DataError(f"{place}: not JSON ({error.msg}); repair or fetch the file again") from error
    except RecursionError as error:
        raise DataError(f"{where}: not JSON that can be read (nested too deeply)") from error


def _row(where: str, value: Any) -> Row:
    if not isinstance(value, dict):
        raise DataError(f"{where}: expected an object, found {type(value).__name__}; repair the file")
    return Row(where, value)
