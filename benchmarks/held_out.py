"""Bits per byte on the documents that stage_evaluate scores, for a compressor, an n-gram model and our models.

    python benchmarks/held_out.py                   the n-gram model counts all training tokens of a corpus
    python benchmarks/held_out.py --tokens 819200   only the first N (sources are mixed): as many as a model was
                                                    trained on

Reads data/raw, data/tokens, data/tokenizer, params.yaml, and metrics/eval/*.json if models were evaluated. Prints a
Markdown table (lower is better) with 95% intervals over documents, and writes the numbers to
benchmarks/results/held_out.json (held_out-<N>.json with --tokens N). The rows:

* xz: each document compressed separately with LZMA preset 9e, including about 60 bytes for the .xz container. xz learns
  only from the document, so it does poorly on short ones; it is a baseline, not a competitor.
* xz after the training text: how much the .xz file of the corpus grows when the documents are appended. Each document
  benefits from those before it, so the number covers all documents together and has no interval.
* n-gram: order 5, interpolated modified Kneser-Ney (see ngram.py), over the models' own token ids, counted on
  data/tokens of the same corpus: text for prose and stories, code for code. As in pipeline/evaluation/likelihood.py,
  each document follows one end-of-text token; the document's tokens are scored, the separators are not.
* models: as measured by stage_evaluate, in windows of its `context`. `code` and `tools` continue `language`.

Stops if a model was scored on other documents. Equal inputs give identical files. Not guaranteed: that the intervals
cover the choice of training data or seeds.
"""

import argparse
import json
import lzma
import sys
from dataclasses import asdict
from math import fsum
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.ngram import Ngram
from pipeline.batches.corpus import read_meta
from pipeline.evaluation.intervals import Interval, ratio
from pipeline.evaluation.suites import SuiteSettings
from pipeline.run.config import Settings as Written
from pipeline.run.config import stage_params
from pipeline.run.device import generator
from pipeline.run.errors import DataError, ModelError, StagecoachError
from pipeline.run.tracking import write_json
from pipeline.text.tokenizer import Tokenizer
from stages.evaluate import held_out, split_texts

ORDER = 5
SMALLEST_DICTIONARY = 4096  # bytes; the minimum that LZMA2 accepts
CORPUS = {"text": "text", "stories": "text", "stories_held_out": "text", "code": "code"}  # kind of document -> corpus
TITLES = {
    "text": "running prose",
    "stories": "stories",
    "stories_held_out": "held-out families of stories",
    "code": "code",
}
MODELS = ("language", "code", "tools")  # in the order of the graph
Row = dict[str, Interval]  # by kind


def main(arguments: list[str]) -> int:
    """Measure, write and print the numbers. Returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tokens", type=int, metavar="N", help="count only the first N training tokens")
    most: int | None = parser.parse_args(arguments).tokens
    try:
        written = Written(ROOT, [])
        settings: SuiteSettings = stage_params("evaluate", written).settings
        tokenizer = Tokenizer.load(ROOT / "data" / "tokenizer")
        documents = {kind: spelled(tokenizer, texts) for kind, texts in scored(ROOT / "data" / "raw", settings).items()}
        models = evaluated(ROOT / "metrics", documents)
        bits, counted = ngram_bits(ROOT / "data" / "tokens", tokenizer, documents, most)
    except StagecoachError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code

    def row(bits: dict[str, list[float]]) -> Row:
        return {
            kind: interval(bits[kind], documents[kind], settings, written.seed("data_seed"))
            for kind in bits
            if bits[kind]
        }

    rows = {
        "xz -9e, each document alone": row({k: [xz_bits(text) for text in documents[k]] for k in documents}),
        "xz -9e, after the training text": primed(ROOT / "data" / "raw", documents),
        "5-gram of " + ", ".join(f"{n:,} {corpus}" for corpus, n in counted.items()) + " tokens": row(bits),
    } | {f"`{name}`": found for name, found in models.items()}
    write_json(
        ROOT / "benchmarks" / "results" / (f"held_out-{most}.json" if most else "held_out.json"),
        {
            "bpb": {
                name: {kind: asdict(value) for kind, value in found.items()}
                for name, found in zip(("xz", "xz primed", "ngram", *models), rows.values(), strict=True)
            },
            "bytes": {kind: sum(len(text.encode()) for text in texts) for kind, texts in documents.items()},
            "ngram": {"order": ORDER, "smoothing": "interpolated modified Kneser-Ney", "tokens": counted},
            "settings": {
                "bootstrap": settings.bootstrap,
                "data_seed": written.seed("data_seed"),
                "tokenizer": tokenizer.hash[:16],
            },
        },
    )
    sys.stdout.write(table(rows, documents))
    return 0


def scored(raw: Path, settings: SuiteSettings) -> dict[str, list[str]]:
    """The documents of each kind that stage_evaluate scores."""
    prose, told, unseen = split_texts(held_out(raw / "text"))
    found = {"text": prose, "stories": told, "stories_held_out": unseen, "code": held_out(raw / "code")}
    return {kind: [document.text for document in found[kind][: settings.documents]] for kind in CORPUS}


def spelled(tokenizer: Tokenizer, texts: list[str]) -> list[str]:
    """Drop what likelihood.py skips: empty texts, and texts that the tokenizer's normalizer changes."""
    encoded = tokenizer.encode_batch(texts)
    return [t for t, ids in zip(texts, encoded) if t and b"".join(tokenizer.token_bytes[i] for i in ids) == t.encode()]


def interval(bits: list[float], texts: list[str], settings: SuiteSettings, seed: int) -> Interval:
    """Bits per byte with an interval over documents, as in `suites.Subject.bootstrap`."""
    draws = generator("bootstrap", seed, len(texts))
    return ratio(bits, [len(text.encode()) for text in texts], generator=draws, resamples=settings.bootstrap)


def xz_bits(text: str) -> float:
    """Bits of the text compressed with `xz -9e`.

    The dictionary is reduced to the size of the text, which gives the same output but saves 0.1 s of clearing memory.
    """
    return 8.0 * xz_bytes(text.encode())


def xz_bytes(data: bytes) -> int:
    """The size of the data compressed with `xz -9e`."""
    window = max(SMALLEST_DICTIONARY, 1 << len(data).bit_length())
    chain = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": window}]
    return len(lzma.compress(data, format=lzma.FORMAT_XZ, filters=chain))


def primed(raw: Path, documents: dict[str, list[str]]) -> Row:
    """Bits per byte of all documents of a kind, compressed after the training text of their corpus."""
    found: Row = {}
    for corpus in dict.fromkeys(CORPUS.values()):
        paths = sorted((raw / corpus).glob("train-*.parquet"))
        texts = [
            text for path in paths for text in pyarrow.parquet.read_table(path, columns=["text"])["text"].to_pylist()
        ]
        train = "\n".join(texts).encode()
        alone = xz_bytes(train)
        for kind in (kind for kind in CORPUS if CORPUS[kind] == corpus and documents[kind]):
            more = "\n".join(documents[kind]).encode()
            value = 8 * (xz_bytes(train + b"\n" + more) - alone) / len(more)
            found[kind] = Interval(value, value, value, len(documents[kind]))
    return found


def ngram_bits(
    tokens: Path, tokenizer: Tokenizer, documents: dict[str, list[str]], most: int | None
) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Bits of each document under its corpus's n-gram model, and the number of tokens counted in each corpus.

    Raises DataError if a corpus has fewer than `most` tokens, ModelError if it was encoded with another tokenizer.
    """
    bits, counted = {}, {}
    for corpus in dict.fromkeys(CORPUS.values()):
        train = training_tokens(tokens / corpus, tokenizer, most)
        model = Ngram.train(train, order=ORDER, vocab_size=tokenizer.vocab_size, end_of_text=tokenizer.end_of_text)
        counted[corpus] = len(train)
        for kind in (kind for kind in CORPUS if CORPUS[kind] == corpus):
            encoded = tokenizer.encode_batch(documents[kind])
            bits[kind] = [-fsum(np.log2(model.probabilities(ids)).tolist()) for ids in encoded]
        del model  # frees its memory before the next corpus is counted
    return bits, counted


def training_tokens(folder: Path, tokenizer: Tokenizer, most: int | None) -> np.ndarray:
    """The first `most` training tokens of a corpus, or all of them, mapped into memory."""
    meta = read_meta(folder)
    if meta["tokenizer"] != tokenizer.hash:
        raise ModelError(f"{folder}: encoded with a tokenizer other than data/tokenizer; run dvc repro stage_encode")
    held = int(meta["splits"]["train"]["tokens"])
    if most is not None and not 1 <= most <= held:
        raise DataError(f"--tokens: expected 1 to {held} (the training tokens in {folder}), found {most}")
    return np.memmap(folder / "train.bin", dtype=np.dtype(meta["dtype"]).newbyteorder("<"), mode="r")[:most]


def evaluated(metrics: Path, documents: dict[str, list[str]]) -> dict[str, Row]:
    """The models' bits per byte from metrics/eval, in the order of the graph, then by name; {} if there are none.

    Raises DataError if a model was measured on other documents.
    """
    models: dict[str, Row] = {}
    paths = {path.stem: path for path in sorted((metrics / "eval").glob("*.json"))}
    for name in [*(name for name in MODELS if name in paths), *(name for name in paths if name not in MODELS)]:
        numbers = read(paths[name])
        found: Row = {}
        for kind, texts in documents.items():
            if "documents" not in numbers.get(kind, {}):  # a kind that is not relevant to the model
                continue
            corpus = CORPUS[kind]
            raw = f"data/raw/{corpus}"
            encoded = read(metrics / f"encode_{corpus}.json")["lineage"]["inputs"][raw]
            measured = numbers[kind].get("documents", 0)
            if numbers["lineage"]["inputs"][raw] != encoded or measured != len(texts):
                raise DataError(
                    f"{paths[name]}: {kind}: expected {len(texts)} documents of the current {raw}, found {measured} of "
                    f"{numbers['lineage']['inputs'][raw]}; run dvc repro stage_evaluate"
                )
            if texts:
                found[kind] = Interval(
                    numbers[kind]["bpb"], numbers[kind]["bpb_low"], numbers[kind]["bpb_high"], measured
                )
        if found:
            models[name] = found
    return models


def read(path: Path) -> dict[str, Any]:
    """Read a metrics file."""
    return json.loads(path.read_text(encoding="utf-8"))


def shown(found: Interval) -> str:
    """The value, with its interval if it has one."""
    return f"{found.value:.3f}" + (f" ({found.low:.3f}-{found.high:.3f})" if found.low < found.high else "")


def table(rows: dict[str, Row], documents: dict[str, list[str]]) -> str:
    """The rows as a Markdown table of `value (low-high)`."""
    heads = [f"{title}, {len(documents[kind])} documents" for kind, title in TITLES.items()]
    lines = [["bits per byte", *heads], ["---"] * (len(heads) + 1)]
    for name, row in rows.items():
        cells = [shown(row[kind]) if kind in row else "" for kind in TITLES]
        lines.append([name, *cells])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
