"""The rows of a parquet file that somebody brought, in bounded memory.

    rows(path, most) -> (number, row); a row over `most` bytes, and a row group that expands like a bomb, is a RowError

A kilobyte of parquet can mean gigabytes: a text is stored once and repeated by number, zeros and nulls are stored as a count, and
compression does the rest. So texts stay numbers into their dictionary until a single row is made of them, whose size is added up
before; and a row group whose footer tells of columns that expand is not read at all.

Not promised: protection from a footer that lies about the sizes of pages (2 GB a page is the format's most), nor speed: texts
through dictionaries are read at about 100 MB/s.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.streams.calls import RowError

BATCH_ROWS = 256
MOST_EXPANSION = 200  # bytes of a column for a stored one, where it is large; text compresses to a tenth
MOST_VALUES = 1000  # of a list's column for a byte of its pages
MOST_ROWS = 100  # of a file for a byte of it; rows that say something take more than one each
Rows = Iterator[tuple[int, Any]]


def rows(path: Path, most: int) -> Rows:
    """The rows in their order with their numbers from 1. A file that is no parquet is one rejected row."""
    number = 0
    try:
        metadata = pq.read_metadata(path)
        if metadata.num_rows > MOST_ROWS * path.stat().st_size:
            yield (
                1,
                RowError(
                    "row", f"the footer tells of {metadata.num_rows} rows in {path.stat().st_size} bytes; not read"
                ),
            )
            return
        with pq.ParquetFile(path, read_dictionary=_texts(metadata), metadata=metadata) as file:
            for group in range(metadata.num_row_groups):
                if fault := _expands(metadata, group, most):
                    yield (
                        number + 1,
                        RowError("row", f"{fault}; {metadata.row_group(group).num_rows} rows are not read"),
                    )
                    number += metadata.row_group(group).num_rows
                    continue
                for batch in file.iter_batches(batch_size=BATCH_ROWS, row_groups=[group]):
                    small = _num_bytes(batch) <= most
                    for index in range(batch.num_rows):
                        number += 1
                        yield number, _row(batch.slice(index, 1), None if small else most)
    except (pa.ArrowException, OSError) as error:
        yield number + 1, RowError("row", f"not parquet ({str(error)[:120]}); the rest is not read")


def _texts(metadata: pq.FileMetaData) -> list[str]:
    """Columns whose values are bytes of any length, those inside of lists and structs too."""
    columns = (metadata.schema.column(index) for index in range(metadata.num_columns))
    return [column.path for column in columns if column.physical_type == "BYTE_ARRAY"]


def _expands(metadata: pq.FileMetaData, group: int, most: int) -> str:
    """What is wrong with a row group by its footer, if anything."""
    for index in range(metadata.num_columns):
        column, found = metadata.schema.column(index), metadata.row_group(group).column(index)
        whole, stored = found.total_uncompressed_size, found.total_compressed_size
        if whole > most and whole > MOST_EXPANSION * stored:
            return f"column {column.path} expands from {stored} to {whole} bytes"
        if column.max_repetition_level and found.num_values > most // 4 and found.num_values > MOST_VALUES * whole:
            return f"column {column.path} expands from {whole} bytes to {found.num_values} values"
    return ""


def _row(row: pa.RecordBatch, most: int | None) -> Any:
    """A row as a dict, unless it has more than `most` bytes."""
    if most is not None and _num_bytes(row) > most:
        return RowError("row", f"over {most >> 20} MB")
    try:
        return row.to_pylist()[0]
    except (pa.ArrowException, ValueError, OverflowError) as error:  # dates out of range, bytes that are not UTF-8
        return RowError("row", f"a value cannot be read ({error})")


def _num_bytes(batch: pa.RecordBatch) -> int:
    return sum(_bytes_of(column) for column in batch.columns)


def _bytes_of(array: Any) -> int:
    """Bytes of an array once its dictionaries are written out."""
    if isinstance(array, pa.DictionaryArray):
        lengths = pc.call_function("binary_length", [array.dictionary]).take(array.indices)
        return pc.call_function("sum", [lengths]).as_py() or 0
    if isinstance(array, pa.ListArray | pa.LargeListArray | pa.FixedSizeListArray):  # a map is one too
        return 8 * len(array) + _bytes_of(array.flatten())
    if isinstance(array, pa.StructArray):
        return sum(_bytes_of(child) for child in array.flatten())
    return array.nbytes
