"""From corpus files to token shards: read parquet, sample for the tokenizer, encode, join.

    data/raw/<corpus>/{train,val}-*.parquet (text, source, path, license)
      -> <split>.bin     little-endian uint16 (uint32 above 65,536 ids), an end-of-text token after each document
         <split>.idx     n + 1 uint64: where each document begins, and the end
         <split>.ctx     n uint64: the number of leading context tokens of each document (text/repositories.py), if any
         meta.json       tokenizer hash, counts, bytes, sha256

Each parquet file is one work unit: one process encodes it in batches (memory does not grow with the file) into a part
that is reused after a crash. Parts are joined in file order, so the number of workers does not affect the result.
Documents without text are left out and counted.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.run.device import stable_hash
from pipeline.run.errors import DataError, GateError
from pipeline.run.types import JsonObject
from pipeline.text import repositories
from pipeline.text.tokenizer import Tokenizer

ROWS = 64  # documents in memory at a time; cleaning has dropped documents over 1 MB
COPY_BYTES = 1 << 20
SPLITS = ("train", "val")
SUFFIXES = (".bin", ".idx", ".ctx")


def files(folder: Path, split: str) -> list[Path]:
    """The split's parquet files in name order. Raises DataError if there are none."""
    paths = sorted(folder.glob(f"{split}-*.parquet"))
    if not paths:
        raise DataError(f"{folder}: expected {split}-*.parquet, found none; run dvc repro stage_corpus")
    return paths


def _batches(path: Path, columns: list[str]) -> Iterator[pa.RecordBatch]:
    with pq.ParquetFile(path, buffer_size=COPY_BYTES, pre_buffer=False) as file:
        missing = set(columns) - set(file.schema_arrow.names)
        if missing:
            raise DataError(f"{path}: expected the columns {', '.join(columns)}; missing: {', '.join(sorted(missing))}")
        yield from file.iter_batches(batch_size=ROWS, columns=columns)


def has_contexts(folder: Path) -> bool:
    """Whether the documents of a corpus have contexts. Raises DataError like `files`."""
    return any("context" in pq.read_schema(path).names for split in SPLITS for path in files(folder, split))


def check_apart(folder: Path) -> None:
    """Raise GateError if a document is in both splits, because the evaluation would then measure memorization."""

    def documents(split: str) -> Iterator[tuple[bytes, str]]:
        for path in files(folder, split):
            for batch in _batches(path, ["text", "path"]):
                for text, name in zip(batch.column("text").to_pylist(), batch.column("path").to_pylist(), strict=True):
                    if text:
                        yield hashlib.blake2b(text.encode(), digest_size=8).digest(), f"{path.name}: {name}"

    held_out = dict(documents("val"))
    for key, name in documents("train"):
        if key in held_out:
            raise GateError(
                f"{folder}: the document {name} is also in the val split ({held_out[key]}); remove it from one"
                " of the splits, or let stage_corpus split the data"
            )


def texts(folder: Path, split: str, num_bytes: int, characters: int) -> Iterator[str]:
    """An even sample of a split: about `num_bytes` bytes, at most the first `characters` characters of each document.

    Documents are chosen by a hash of their source and path, so the sample is spread over the corpus and does not depend
    on the file layout. A smaller split is returned in full.
    """
    total_bytes = 0
    for path in files(folder, split):
        for batch in _batches(path, ["text"]):
            start = pc.utf8_slice_codeunits(batch.column("text"), 0, characters)  # type: ignore[attr-defined]
            total_bytes += pc.sum(pc.binary_length(start)).as_py() or 0  # type: ignore[attr-defined]
    threshold = min(1.0, num_bytes / max(1, total_bytes)) * 2.0**64
    for path in files(folder, split):
        for batch in _batches(path, ["text", "source", "path"]):
            names = zip(batch.column("source").to_pylist(), batch.column("path").to_pylist(), strict=True)
            for row, (source, name) in enumerate(names):
                if stable_hash("sample", source, name) < threshold:
                    yield batch.column("text")[row].as_py()[:characters]


@dataclass(frozen=True)
class EncodeTask:
    """One parquet file to encode, and the folder for its part."""

    parquet: Path
    tokenizer: Path  # the tokenizer's folder
    parts: Path
    contexts: bool = False  # the corpus has contexts

    @property
    def part(self) -> Path:
        """The path of the part without its suffix (`.bin`, `.idx`, `.ctx`, `.json`)."""
        return self.parts / self.parquet.stem


@dataclass(frozen=True)
class Counts:
    """The size of a part or of a split."""

    documents: int
    tokens: int
    bytes: int  # UTF-8, end-of-text tokens not counted
    empty: int  # documents left out because they have no text


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest little-endian type that can hold every id."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def encode_file(task: EncodeTask) -> Counts:
    """Encode one parquet file into a part and return its counts; complete parts are reused. Runs in a worker."""
    marker = task.part.with_name(task.part.name + ".json")
    if marker.is_file():
        return Counts(**json.loads(marker.read_text()))
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # of an adopted tokenizer: the workers use all cores
    tokenizer = Tokenizer.load(task.tokenizer)
    dtype = token_dtype(tokenizer.vocab_size)
    end = np.array([tokenizer.end_of_text], dtype=dtype)
    documents = tokens = num_bytes = empty = 0
    task.parts.mkdir(parents=True, exist_ok=True)
    columns = ["text", *(["context"] if task.contexts else [])]
    with contextlib.ExitStack() as opened:
        tokens_file, lengths_file, *contexts_file = (
            opened.enter_context(task.part.with_name(task.part.name + suffix).open("wb"))
            for suffix in SUFFIXES[: 3 if task.contexts else 2]
        )
        for batch in _batches(task.parquet, columns):
            column = batch.column("text").to_pylist()
            non_empty = [text for text in column if text]
            empty += len(column) - len(non_empty)
            encoded = tokenizer.encode_batch(non_empty)
            if task.contexts:
                contexts = batch.column("context").to_pylist()
                leads = _leads(tokenizer, [context for text, context in zip(column, contexts, strict=True) if text])
                encoded = [[*lead, *ids] for lead, ids in zip(leads, encoded, strict=True)]
                contexts_file[0].write(np.array([len(lead) for lead in leads], dtype="<u8").tobytes())
            for ids in encoded:
                tokens_file.write(np.array(ids, dtype=dtype).tobytes())
                tokens_file.write(end.tobytes())
            lengths = np.array([len(ids) + 1 for ids in encoded], dtype="<u8")
            lengths_file.write(lengths.tobytes())
            documents += len(non_empty)
            tokens += int(lengths.sum())
            num_bytes += sum(len(text.encode()) for text in non_empty)
    counts = Counts(documents, tokens, num_bytes, empty)
    temporary = marker.with_suffix(".tmp")
    temporary.write_text(json.dumps(asdict(counts)))
    temporary.replace(marker)  # last, so that a part with a marker is complete
    return counts


def _leads(tokenizer: Tokenizer, contexts: list[str]) -> list[list[int]]:
    """The ids of each context; [] for an empty one."""
    given = [number for number, context in enumerate(contexts) if context]
    ids = repositories.encode(tokenizer, [repositories.Context.from_json(contexts[number]) for number in given])
    leads: list[list[int]] = [[] for _ in contexts]
    for number, lead in zip(given, ids, strict=True):
        leads[number] = lead
    return leads


def join(split: str, tasks: list[EncodeTask], counts: list[Counts], out: Path) -> JsonObject:
    """Join the parts of a split into `<split>.bin` and `<split>.idx`; return the split's entry for meta.json."""
    out.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    offset = np.zeros(1, dtype="<u8")
    with (out / f"{split}.bin").open("wb") as bin_file, (out / f"{split}.idx").open("wb") as idx_file:
        idx_file.write(offset.tobytes())
        for task in tasks:
            with task.part.with_name(task.part.name + ".bin").open("rb") as part:
                for chunk in _chunks(part):
                    digest.update(chunk)
                    bin_file.write(chunk)
            with task.part.with_name(task.part.name + ".idx").open("rb") as part:
                for chunk in _chunks(part):
                    offsets = offset + np.cumsum(np.frombuffer(chunk, dtype="<u8"))
                    digest.update(offsets.tobytes())
                    idx_file.write(offsets.tobytes())
                    offset = offsets[-1:]
    if any(task.contexts for task in tasks):
        with (out / f"{split}.ctx").open("wb") as contexts_file:
            for task in tasks:
                lengths = task.part.with_name(task.part.name + ".ctx").read_bytes()
                digest.update(lengths)
                contexts_file.write(lengths)
    total = {name: sum(getattr(part, name) for part in counts) for name in Counts.__dataclass_fields__}
    assert int(offset[0]) == total["tokens"], "parts and counts disagree"
    return total | {"sha256": digest.hexdigest()}


def _chunks(file: BinaryIO) -> Iterator[bytes]:
    while chunk := file.read(COPY_BYTES):
        yield chunk


def write_meta(out: Path, tokenizer: Tokenizer, splits: dict[str, JsonObject]) -> None:
    """Write meta.json, the last file, next to the joined shards."""
    dtype = token_dtype(tokenizer.vocab_size).name
    meta = {"tokenizer": tokenizer.hash, "vocab_size": tokenizer.vocab_size, "dtype": dtype, "splits": splits}
    (out / "meta.json").write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")
