"""Read the rows of JSONL, JSON, CSV and parquet files; a plain text, source file or notebook is one row
`{"text": ...}`.

Out: (line, row) in file order. An unreadable row is a `RowError` with the reason, so a broken row does not affect the
others (`datasets` aborts without naming the location). `line` counts from 1: the line where the row begins, or the row
number in parquet. Encodings: UTF-8 with or without BOM, UTF-16 and UTF-32 by their BOM, else `encoding`; the error for
an invalid byte gives its offset in the file. A row over 64 MB is discarded while being read, so it takes no memory.

The CSV delimiter is whichever of `,` `;` tab `|` occurs most often in the header. Only the cells of a notebook are
read: for code, its code cells with the prose as comments; for text, only the prose. Outputs are skipped.

Parquet is read in bounded memory, because a kilobyte of it can expand to gigabytes: a text is stored once and repeated
by index, zeros and nulls are stored as a count, and compression does the rest. Texts therefore stay dictionary indices
until a single row is materialized, and the row's size is computed before that. A row group whose footer suggests a
decompression bomb is not read at all.

Not guaranteed: low memory use for `.json`, which is read whole and rejected if over 256 MB (use `.jsonl`). Rows after
the first error in a `.json` list or a UTF-16 or UTF-32 file, or after 64 MB of CSV without the end of a row, become one
rejected row. Nothing protects against a parquet footer that lies about page sizes (the format allows 2 GB per page),
and dictionary-encoded texts in parquet are read at only about 100 MB/s.
"""

import codecs
import csv
import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.ingest.tool_calls import RowError, from_json, refuse_constant
from pipeline.run.errors import DataError

Rows = Iterator[tuple[int, object]]  # (line, row)


ROW_BYTES = 64 * 1024 * 1024  # a longer row is a mistake (an unclosed quote, a file without line feeds)
DOCUMENT_BYTES = 32 * 1024 * 1024  # a longer plain text is split into rows at blank lines
JSON_BYTES = 256 * 1024 * 1024  # the largest file that is read whole (a list of rows, a notebook)
CHUNK_BYTES = 1024 * 1024
UNZIPPED_BYTES = 256 * 1024 * 1024  # the most that a gzip file may expand to

TABLES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")
OBJECTS = (".jsonl", ".ndjson", ".json")  # columns may differ from row to row
NOTEBOOK = ".ipynb"
DELIMITERS = ",;\t|"
_MARKS = (  # UTF-32 before UTF-16, whose BOM is a prefix of the UTF-32 one
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)


class BadByte(RowError):
    """A line that cannot be decoded; `text` is the line decoded as Latin-1, so that its quotes can be counted."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__("text", reason)
        self.text = text


def rows(path: Path, encoding: str) -> Rows:
    """The rows of a table, whose suffix names the format. Raises DataError for a bad header or an unknown encoding."""
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        return parquet_rows(path, ROW_BYTES)
    if suffix in (".csv", ".tsv"):
        return _csv(path, encoding)
    if suffix == ".json":
        return _json(path, encoding)
    return _jsonl(path, encoding)


def document(path: Path, encoding: str) -> Iterator[tuple[int, dict[str, str] | RowError]]:
    """A plain text as one row, or as several if it exceeds 32 MB: it is then cut at the next blank line, or at any line
    after 64 MB. Windows line endings become line feeds.
    """
    first, size, parts = 1, 0, []
    failure: RowError | None = None
    for number, text in lines(path, encoding):
        if isinstance(text, RowError):
            failure = failure or text
            continue
        if size > DOCUMENT_BYTES and (not text.strip() or size > 2 * DOCUMENT_BYTES):
            yield first, failure or {"text": "".join(parts)}
            first, size, parts, failure = number, 0, [], None
        parts.append(text)
        size += len(text)
    if parts or failure:
        yield first, failure or {"text": "".join(parts)}


def notebook(path: Path, encoding: str, *, code: bool) -> tuple[int, dict[str, str] | RowError]:
    """The cells of a Jupyter notebook (nbformat 4) as a row: code with the prose as comments, or only the prose."""
    row = next((row for _, row in _json(path, encoding)), None)
    if isinstance(row, RowError):
        return 1, row
    cells = row.get("cells") if isinstance(row, dict) else None
    if not isinstance(cells, list) or not all(isinstance(cell, dict) for cell in cells):
        return 1, RowError("cells", "expected an nbformat 4 notebook with a list of cells; open and save it in Jupyter")
    parts = []
    for cell in cells:
        source, kind = cell.get("source", ""), cell.get("cell_type")
        source = "".join(source) if isinstance(source, list) else source
        if not isinstance(source, str) or not source.strip():
            continue
        if kind == "code" and code:
            parts.append(source)
        elif kind == "markdown":
            parts.append("\n".join(f"# {line}".rstrip() for line in source.splitlines()) if code else source)
    return 1, {"text": "\n\n".join(part.strip("\n") for part in parts) + "\n"}


def unzipped(path: Path) -> bytes:
    """The content of a gzip file. Raises DataError if it expands to more than 256 MB, and `gzip`'s errors if it is
    damaged.
    """
    with gzip.open(path) as file:
        raw = file.read(UNZIPPED_BYTES + 1)
    if len(raw) > UNZIPPED_BYTES:
        raise DataError(f"{path}: expands to more than {UNZIPPED_BYTES >> 20} MB; unpack only what you need")
    return raw


def is_binary(path: Path) -> bool:
    """Whether the first 8 kB contain a NUL and no UTF-16 or UTF-32 BOM: git's rule for binary files."""
    with path.open("rb") as file:
        head = file.read(8192)
    return b"\0" in head and not any(head.startswith(mark) for mark, _ in _MARKS)


# --- lines -----------------------------------------------------------------------------------------------------------


def lines(path: Path, encoding: str) -> Iterator[tuple[int, str | RowError]]:
    """The lines of a file with their numbers, each with its `\\n`; a line that cannot be decoded is a RowError."""
    codec, start = _detect_codec(path, encoding)
    with path.open("rb") as file:
        file.seek(start)
        by_bytes = _encodes_line_feed_as_ascii(codec)
        yield from _byte_lines(file, codec, start) if by_bytes else _decoded_lines(file, codec, start)


def _detect_codec(path: Path, encoding: str) -> tuple[str, int]:
    """The codec of a file and the offset at which its text begins."""
    try:
        name = codecs.lookup(encoding).name
        "\n".encode(name)
    except (LookupError, UnicodeError) as error:
        raise DataError(f"encoding: expected a text encoding such as utf-8 or latin-1, got {encoding!r}") from error
    with path.open("rb") as file:
        head = file.read(4)
        for mark, codec in _MARKS:
            if head.startswith(mark):
                return codec, len(mark)
        if name == "utf-8":
            return name, 0
        # Text with non-ASCII letters that decodes as UTF-8 is almost always UTF-8; `encoding` is for other files.
        decoder = codecs.getincrementaldecoder("utf-8")()
        file.seek(0)
        try:
            while chunk := file.read(CHUNK_BYTES):
                decoder.decode(chunk)
            decoder.decode(b"", final=True)
        except UnicodeDecodeError:
            return name, 0
    return "utf-8", 0


def _encodes_line_feed_as_ascii(codec: str) -> bool:
    return "\n".encode(codec) == b"\n"


def _byte_lines(file: BinaryIO, codec: str, offset: int) -> Iterator[tuple[int, str | RowError]]:
    number = 0
    while raw := file.readline(ROW_BYTES + 1):
        number, size = number + 1, len(raw)
        if size > ROW_BYTES:
            while not raw.endswith(b"\n") and (raw := file.readline(CHUNK_BYTES)):
                size += len(raw)
            yield number, _too_long_error()
        else:
            try:
                text = raw.decode(codec)
                yield number, text[:-2] + "\n" if text.endswith("\r\n") else text
            except UnicodeError as error:
                start = getattr(error, "start", 0)
                yield number, _bad_byte_error(raw[start : start + 1], offset + start, codec, raw.decode("latin-1"))
        offset += size


def _decoded_lines(file: BinaryIO, codec: str, offset: int) -> Iterator[tuple[int, str | RowError]]:
    """The lines of a file whose codec has multi-byte line feeds: decode first, then split. Reading stops at the first
    error, because later lines cannot be recovered.
    """
    decoder = codecs.getincrementaldecoder(codec)()
    number, pending, too_long = 1, "", False
    failure: RowError | None = None
    chunk = b"first"
    while chunk and failure is None:
        chunk = file.read(CHUNK_BYTES)
        offset += len(chunk)
        try:
            pending += decoder.decode(chunk, final=not chunk)
        except UnicodeError as error:
            start, data = getattr(error, "start", 0), getattr(error, "object", b"")
            pending += data[:start].decode(codec)
            failure = _bad_byte_error(data[start : start + 1], offset - len(data) + start, codec)
        *complete, pending = pending.split("\n")
        for text in complete:
            yield number, _too_long_error() if too_long or len(text) > ROW_BYTES else text.removesuffix("\r") + "\n"
            number, too_long = number + 1, False
        if len(pending) > ROW_BYTES:
            pending, too_long = "", True
    if failure or pending or too_long:
        yield number, failure or (_too_long_error() if too_long else pending)


def _bad_byte_error(byte: bytes, offset: int, codec: str, text: str = "") -> BadByte:
    location = f"byte 0x{byte.hex()} at offset {offset}" if byte else f"the end of the file at offset {offset}"
    return BadByte(f"{location} is not {codec}; save the file as UTF-8 or set `encoding`", text)


def _too_long_error() -> RowError:
    return RowError("row", f"over {ROW_BYTES >> 20} MB")


# --- tables ----------------------------------------------------------------------------------------------------------


def _jsonl(path: Path, encoding: str) -> Rows:
    for number, text in lines(path, encoding):
        if isinstance(text, RowError):
            yield number, text
        elif text.strip():
            yield number, _parse_json(text)


def _parse_json(text: str) -> object:
    try:
        return from_json(text, "row")
    except RowError as error:
        return error


def _json(path: Path, encoding: str) -> Rows:
    """A list of rows, one object, or one row per line (as in many .json datasets)."""
    if path.stat().st_size > JSON_BYTES:
        yield (
            1,
            RowError("row", f"over {JSON_BYTES >> 20} MB, which is too large for .json; convert the file to .jsonl"),
        )
        return
    codec, start = _detect_codec(path, encoding)
    raw = path.read_bytes()[start:]
    try:
        content = raw.decode(codec)
    except UnicodeError as error:
        position = getattr(error, "start", 0)
        yield raw.count(b"\n", 0, position) + 1, _bad_byte_error(raw[position : position + 1], start + position, codec)
        return
    if content.lstrip().startswith("["):
        yield from _json_list(content)
    elif content.strip():
        row = _parse_json(content)
        if isinstance(row, RowError):
            yield from _jsonl(path, encoding)
        else:
            yield 1, row


def _json_list(text: str) -> Rows:
    decoder = json.JSONDecoder(parse_constant=refuse_constant)
    position, line = text.index("[") + 1, 1 + text.count("\n", 0, text.index("["))
    while True:
        start = _skip_space(text, position)
        line += text.count("\n", position, start)
        if text.startswith("]", start):
            if text[start + 1 :].strip():
                yield line, RowError("row", "text after the end of the list")
            return
        try:
            row, position = decoder.raw_decode(text, start)
        except (ValueError, RecursionError) as error:
            yield line, RowError("row", f"not JSON ({error}); the rest of the list is not read")
            return
        yield line, row if position - start <= ROW_BYTES else _too_long_error()
        line += text.count("\n", start, position)
        after = _skip_space(text, position)
        line += text.count("\n", position, after)
        position = after + text.startswith(",", after)
        if position == after and not text.startswith("]", after):
            yield line, RowError("row", "expected `,` or `]` after a row; the rest of the list is not read")
            return


def _skip_space(text: str, position: int) -> int:
    while position < len(text) and text[position] in " \t\n\r":
        position += 1
    return position


class _CsvLines:
    """Feeds lines to csv.reader, which takes as many as a row needs. Keeps the first error among these lines."""

    def __init__(self, path: Path, encoding: str) -> None:
        self.number = 0  # of the last line
        self.size = 0  # of the row so far
        self.failure: RowError | None = None
        self.ended = False
        self._lines = lines(path, encoding)

    def __iter__(self) -> "_CsvLines":
        return self

    def __next__(self) -> str:
        if self.ended or self.size > ROW_BYTES:
            self.failure = self.failure or (
                None if self.ended else RowError("row", "over 64 MB: is a quote left open?")
            )
            self.ended = True
            raise StopIteration
        self.number, text = next(self._lines)
        if isinstance(text, BadByte):
            self.failure = self.failure or text
            text = text.text
        elif isinstance(text, RowError):  # too long: it may or may not have contained a quote
            self.failure, self.ended = text, True
            raise StopIteration
        self.size += len(text)
        return text


def _csv(path: Path, encoding: str) -> Rows:
    csv.field_size_limit(2 * ROW_BYTES)  # the default, 128 kB, is shorter than many texts
    feed = _CsvLines(path, encoding)
    reader = csv.reader(feed, strict=True, delimiter=_delimiter(path, encoding))
    header: list[str] | None = None
    while True:
        first, feed.size, feed.failure = feed.number + 1, 0, None
        row: list[str] | RowError
        try:
            row = next(reader)
        except StopIteration:
            if feed.failure:
                yield first, feed.failure
            return
        except csv.Error as error:
            row = RowError("row", f"not CSV ({error})")
        row = feed.failure or row
        if header is None and row:
            if isinstance(row, RowError) or len(set(row)) < len(row):
                raise DataError(f"{path}:1: header: expected distinct column names, found {row}")
            header = row
        elif isinstance(row, RowError):
            yield first, row
        elif header and row and len(row) != len(header):
            yield first, RowError("row", f"expected {len(header)} cells, found {len(row)}")
        elif header and row:
            yield first, {name: cell or None for name, cell in zip(header, row, strict=True)}


def _delimiter(path: Path, encoding: str) -> str:
    """The most frequent delimiter in the header, outside quotes; a comma if there is none."""
    header = next((text for _, text in lines(path, encoding) if isinstance(text, str) and text.strip()), "")
    bare = "".join(header.split('"')[::2])
    return max(DELIMITERS, key=bare.count) if any(map(bare.count, DELIMITERS)) else ","


# --- parquet ---------------------------------------------------------------------------------------------------------


BATCH_ROWS = 256
MAX_EXPANSION = 200  # bytes of a large column per stored byte; text compresses to about a tenth of its size
MAX_VALUES = 1000  # of a list column per byte of its pages
MAX_ROWS = 100  # per byte of the file; rows with content take more than one byte each


def parquet_rows(path: Path, max_bytes: int) -> Rows:
    """The rows in order, numbered from 1. A row over `max_bytes` becomes a RowError, and so does a row group that
    looks like a decompression bomb; a file that is not parquet is one rejected row.
    """
    number = 0
    try:
        metadata = pq.read_metadata(path)
        if metadata.num_rows > MAX_ROWS * path.stat().st_size:
            fault = f"the footer claims {metadata.num_rows} rows in {path.stat().st_size} bytes; the file is not read"
            yield 1, RowError("row", fault)
            return
        with pq.ParquetFile(path, read_dictionary=_text_columns(metadata), metadata=metadata) as file:
            for group in range(metadata.num_row_groups):
                if fault := _expansion_fault(metadata, group, max_bytes):
                    num_rows = metadata.row_group(group).num_rows
                    yield number + 1, RowError("row", f"{fault}; {num_rows} rows are not read")
                    number += num_rows
                    continue
                for batch in file.iter_batches(batch_size=BATCH_ROWS, row_groups=[group]):
                    small = _num_bytes(batch) <= max_bytes
                    for index in range(batch.num_rows):
                        number += 1
                        yield number, _convert_row(batch.slice(index, 1), None if small else max_bytes)
    except (pa.ArrowException, OSError) as error:
        yield number + 1, RowError("row", f"not parquet ({str(error)[:120]}); the rest is not read")


def _text_columns(metadata: pq.FileMetaData) -> list[str]:
    """Paths of the variable-length byte columns, including those inside lists and structs."""
    columns = (metadata.schema.column(index) for index in range(metadata.num_columns))
    return [column.path for column in columns if column.physical_type == "BYTE_ARRAY"]


def _expansion_fault(metadata: pq.FileMetaData, group: int, max_bytes: int) -> str:
    """The reason not to read a row group, from its footer metadata; empty if there is none."""
    for index in range(metadata.num_columns):
        column, chunk = metadata.schema.column(index), metadata.row_group(group).column(index)
        expanded, stored = chunk.total_uncompressed_size, chunk.total_compressed_size
        if expanded > max_bytes and expanded > MAX_EXPANSION * stored:
            return f"column {column.path} expands from {stored} to {expanded} bytes"
        num_values = chunk.num_values
        if column.max_repetition_level and num_values > max_bytes // 4 and num_values > MAX_VALUES * expanded:
            return f"column {column.path} expands from {expanded} bytes to {num_values} values"
    return ""


def _convert_row(row: pa.RecordBatch, max_bytes: int | None) -> object:
    """A row as a dict, or a RowError if it exceeds `max_bytes` bytes (None: no limit)."""
    if max_bytes is not None and _num_bytes(row) > max_bytes:
        return RowError("row", f"over {max_bytes >> 20} MB")
    try:
        return row.to_pylist()[0]
    except (pa.ArrowException, ValueError, OverflowError) as error:  # dates out of range, bytes that are not UTF-8
        return RowError("row", f"a value cannot be read ({error})")


def _num_bytes(batch: pa.RecordBatch) -> int:
    return sum(_bytes_of(column) for column in batch.columns)


def _bytes_of(array: pa.Array) -> int:
    """The size of an array in bytes, with its dictionaries expanded."""
    if isinstance(array, pa.DictionaryArray):
        lengths = pc.call_function("binary_length", [array.dictionary]).take(array.indices)
        return pc.call_function("sum", [lengths]).as_py() or 0
    if isinstance(array, pa.ListArray | pa.LargeListArray | pa.FixedSizeListArray):  # a map is also a list
        return 8 * len(array) + _bytes_of(array.flatten())
    if isinstance(array, pa.StructArray):
        return sum(_bytes_of(child) for child in array.flatten())
    return array.nbytes
