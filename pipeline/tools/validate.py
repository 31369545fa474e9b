"""Check your own data files without building anything.

    python -m pipeline.tools.validate data/own/dialogues/*.jsonl
    python -m pipeline.tools.validate pairs.csv --kind preferences --tokenizer models/tools
    python -m pipeline.tools.validate tickets.csv --columns question=prompt,reply=completion --encoding latin-1

The table has a line per file: its kind, the shapes of its rows, the number of rows read, accepted, duplicate and
rejected (the last three add up to the first), their tokens, the tokens that are trained on, and the number of rows that
share 13 consecutive words with a file in data/benchmarks. Below the table are the first few rejections, as
`file:line: field: reason`, and one conversation as the model sees it, with the trained parts marked.

The kind is the one that fits most of the first 100 rows; a file that is not a table is code or text, depending on its
suffix. Rows are read as in `stage_corpus` and `stage_tasks` (ingest/own_files.py). Exits with 1 if a row is rejected,
with 2 if a file cannot be read.

Checked only in `stage_corpus` and `stage_tasks`: what cleaning drops (short, generated or near-duplicate
documents), and whether the problems' tests pass.
"""

import argparse
import itertools
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.ingest import files, own_files, shapes
from pipeline.ingest.duplicates import Index, benchmark_items
from pipeline.ingest.intake import NUM_PRINTED, Intake
from pipeline.ingest.own_files import RenamedRows, TableReading
from pipeline.ingest.records import Dialogue, Label, Message, Pair, Problem, SourceRecord, Text
from pipeline.ingest.tool_calls import RowError
from pipeline.run.errors import ConfigError, StagecoachError
from pipeline.run.tracking import progress
from pipeline.text import chat
from pipeline.text.tokenizer import Tokenizer

KINDS = ("problems", "preferences", "labels", "dialogues", "text")  # of tables; in a tie, the first one wins
PROSE = (".txt", ".md", ".rst", ".adoc", ".html", "")  # suffixes of text files; all others are code
COLUMNS = ("file", "kind", "shapes", "rows", "accepted", "duplicate", "rejected", "tokens", "trained", "benchmarks")
OPEN, CLOSE = "[[", "]]"  # mark what is trained on
TOKENIZERS = (Path("data/tokenizer"), Path("models/deploy"), Path("models/tools"))
LONGEST = 2000  # characters of the example to show


@dataclass
class FileReport:
    """What was found in one file."""

    name: str
    kind: str
    shapes: Counter[str] = field(default_factory=Counter)
    num_rows: int = 0
    num_accepted: int = 0
    num_duplicates: int = 0
    num_rejected: int = 0
    num_tokens: int = 0
    num_trained: int = 0
    num_benchmarks: int = 0
    reasons: list[str] = field(default_factory=list)
    example: str = ""

    def cells(self, *, tokens: bool) -> list[str]:
        """The file's table row, in the order of COLUMNS."""
        found = ", ".join(f"{name} {count}" for name, count in self.shapes.most_common())
        counts = [self.num_rows, self.num_accepted, self.num_duplicates, self.num_rejected]
        counted = [f"{self.num_tokens:,}", f"{self.num_trained:,}"] if tokens else ["-", "-"]
        return [self.name, self.kind, found, *(f"{n:,}" for n in counts), *counted, f"{self.num_benchmarks:,}"]


def report(
    path: Path, kind: str | None, tokenizer: Tokenizer | None, benchmarks: Index, reading: TableReading | None = None
) -> FileReport:
    """Read a file as the stages would. Raises ConfigError if it is missing or binary, DataError for a bad header or
    missing columns.
    """
    reading = reading or TableReading()
    if not path.is_file():
        raise ConfigError(f"{path}: expected a file, found {'a folder' if path.is_dir() else 'nothing'}")
    is_table = path.suffix.lower() in files.TABLES
    if not is_table and files.is_binary(path):
        raise ConfigError(f"{path}: expected text or one of {', '.join(files.TABLES)}, found a binary file")
    if reading.columns and not is_table:
        raise ConfigError(f"{path}: --columns: expected a table ({', '.join(files.TABLES)})")
    found = FileReport(str(path), kind or _kind_of(path, reading))
    with tempfile.TemporaryDirectory() as folder, Intake(Path(folder) / "rejected.jsonl", None, path.name) as intake:
        rows = _rows(path, found.kind, reading)
        for line, row in rows:
            found.num_rows += 1
            try:
                if isinstance(row, RowError):
                    raise row
                records = intake.accept(_record(row, found, is_table=is_table), path.name, line, "train")
                for _, record in records:
                    _measure(record, found, tokenizer, benchmarks)
            except RowError as error:
                found.num_rejected += 1
                if len(found.reasons) < NUM_PRINTED:
                    found.reasons.append(f"{path}:{line}: {error.field}: {error.reason}")
        found.num_accepted, found.num_duplicates = intake.num_accepted, intake.num_duplicates
    if isinstance(rows, RenamedRows):
        rows.check_columns()
    return found


def _kind_of(path: Path, reading: TableReading) -> str:
    """The kind whose shapes fit most of the first rows; for other files, code or text, depending on the suffix."""
    if path.suffix.lower() not in files.TABLES:
        return "text" if path.suffix.lower() in PROSE else "code"
    rows = [row for _, row in itertools.islice(_rows(path, "", reading), shapes.SAMPLE_ROWS)]
    objects = [row for row in rows if isinstance(row, dict)]

    def fitting(kind: str) -> int:
        return sum(shapes.detect([row], kind, shapes.Columns()) is not None for row in objects)

    return max(KINDS, key=fitting)


def _rows(path: Path, kind: str, reading: TableReading) -> Iterable[tuple[int, object]]:
    if path.suffix.lower() in files.TABLES:
        return RenamedRows(path.name, reading.columns, files.rows(path, reading.encoding))
    if path.suffix.lower() == files.NOTEBOOK:
        return [files.notebook(path, reading.encoding, code=kind == "code")]
    return files.document(path, reading.encoding)


def parse_columns(text: str) -> dict[str, str]:
    """`question=prompt,reply=completion` -> file's column: our field. Raises ArgumentTypeError."""
    pairs = [part.partition("=") for part in text.split(",")]
    if not all(theirs and ours for theirs, _, ours in pairs):
        raise argparse.ArgumentTypeError(f"expected COLUMN=FIELD,COLUMN=FIELD, got {text!r}")
    return {theirs: ours for theirs, _, ours in pairs}


def _record(row: object, found: FileReport, *, is_table: bool) -> SourceRecord:
    if not is_table:
        text = row["text"] if isinstance(row, dict) else ""
        if not text.strip():
            raise RowError("text", "is blank")
        found.shapes["document"] += 1
        return Text(text=text, source=found.name, path="", license=own_files.OWN_LICENSE)
    shape = shapes.detect([row], found.kind, shapes.Columns()) if isinstance(row, dict) else None
    if shape is None:
        content = ", ".join(map(str, row)) if isinstance(row, dict) else type(row).__name__
        expected = ", ".join(shapes.names(found.kind))
        raise RowError("row", f"fits no shape of {found.kind} ({expected}); it contains: {content[:200]}")
    record = shapes.convert(shape, row, shapes.Columns())
    found.shapes[shape.name] += 1
    return record


def _measure(record: SourceRecord, found: FileReport, tokenizer: Tokenizer | None, benchmarks: Index) -> None:
    """Add a record's tokens and overlap; keep the first conversation as the example."""
    conversation = _conversation(record)
    text = record.text if isinstance(record, Text) else chat.render_text(conversation)
    found.num_benchmarks += bool(benchmarks.hits(text))
    if tokenizer is None:
        return
    if isinstance(record, Text):
        num_tokens = len(tokenizer.encode(record.text))
        found.num_tokens += num_tokens
        found.num_trained += num_tokens
        return
    tools = record.tools if isinstance(record, Dialogue | Pair | Label) else []
    rendered = chat.render(tokenizer, conversation, tools)
    found.num_tokens += len(rendered.ids)
    found.num_trained += sum(rendered.trained)
    if not found.example:
        found.example = marked(tokenizer, rendered)


def _conversation(record: SourceRecord) -> list[Message]:
    """The messages that are trained on; for a pair, those of the better answer."""
    if isinstance(record, Dialogue):
        return list(record.messages)
    if isinstance(record, Pair):
        return [*record.prompt, *record.chosen]
    if isinstance(record, Label):
        return [*record.prompt, *record.answer]
    if isinstance(record, Problem):
        answer: list[Message] = [{"role": "assistant", "content": record.answer}] if record.answer else []
        return [{"role": "user", "content": record.question}, *answer]
    return []


def marked(tokenizer: Tokenizer, rendered: chat.Rendered) -> str:
    """A conversation as text, with trained parts between OPEN and CLOSE."""
    runs = itertools.groupby(zip(rendered.ids, rendered.trained, strict=True), key=lambda pair: pair[1])
    parts = [(trained, tokenizer.decode([token for token, _ in run])) for trained, run in runs]
    return "".join(f"{OPEN}{text}{CLOSE}" if trained else text for trained, text in parts)


def table(rows: Sequence[Sequence[str]]) -> str:
    """Columns of equal width, numbers right-aligned."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if index < 3 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """Print the table, the reasons and an example. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m pipeline.tools.validate", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--kind", choices=(*KINDS, "code"), help="kind of all files; default: the best fit")
    parser.add_argument("--columns", type=parse_columns, default={}, help="rename columns: COLUMN=FIELD,COLUMN=FIELD")
    parser.add_argument(
        "--encoding", default="utf-8", help="encoding of files that are neither UTF-8 nor marked as UTF-16"
    )
    parser.add_argument("--tokenizer", type=Path, help="tokenizer or model folder, to count tokens and show an example")
    parser.add_argument("--benchmarks", type=Path, default=Path("data/benchmarks"), help="benchmark files")
    chosen = parser.parse_args(arguments)
    try:
        folder = chosen.tokenizer or next((path for path in TOKENIZERS if path.is_dir()), None)
        tokenizer = Tokenizer.load(folder) if folder is not None else None
        reading = TableReading(encoding=chosen.encoding, columns=chosen.columns)
        index = Index(benchmark_items(chosen.benchmarks))
        with progress(total=len(chosen.files), desc="validate", unit="file") as bar:
            reports = []
            for path in chosen.files:
                reports.append(report(path, chosen.kind, tokenizer, index, reading))
                bar.update()
    except StagecoachError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(table([COLUMNS, *(one.cells(tokens=tokenizer is not None) for one in reports)]) + "\n")
    for one in reports:
        sys.stdout.write("".join(f"{reason}\n" for reason in one.reasons))
    example = next((one for one in reports if one.example), None)
    if example is not None:
        cut = " ..." if len(example.example) > LONGEST else ""
        title = f"\nThe first conversation of {example.name}; {OPEN} {CLOSE} mark what is trained on\n"
        sys.stdout.write(f"{title}{example.example[:LONGEST]}{cut}\n")
    if tokenizer is None:
        sys.stdout.write("\nno tokenizer: to count tokens, pass --tokenizer data/tokenizer (or a model's folder)\n")
    return 1 if any(one.num_rejected for one in reports) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
