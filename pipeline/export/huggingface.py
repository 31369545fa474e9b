"""The Hugging Face directory of a chosen model: weights, tokenizer, template, checksums, and their proof.

    models/<name> -> models/deploy, read back and compared on probe.txt

The directory is what transformers, vLLM and the converters read. `verify` loads it again and compares log-probabilities
and greedy tokens with the model it was made from: for this export the difference must be exactly 0.
"""

import hashlib
from pathlib import Path
from typing import Any

from pipeline import checkpoint
from pipeline.errors import GateError
from pipeline.export import parity
from pipeline.model.transformer import Transformer
from pipeline.text.tokenizer import Tokenizer

SUMS = "SHA256SUMS"


def export(model: Transformer, tokenizer: Tokenizer, lineage: dict[str, Any], out: Path) -> None:
    """Write the directory, without its card."""
    checkpoint.save(out, model, tokenizer, lineage)


def seal(out: Path) -> None:
    """Write SHA256SUMS, as `sha256sum --check` reads it, of every file below `out`."""
    files = sorted(p for p in out.rglob("*") if p.is_file() and p != out / SUMS)
    sums = "".join(f"{hashlib.sha256(p.read_bytes()).hexdigest()}  {p.relative_to(out)}\n" for p in files)
    (out / SUMS).write_text(sums, encoding="utf-8")


def verify(model: Transformer, tokenizer: Tokenizer, out: Path) -> dict[str, float | int]:
    """Read `out` back and compare it with `model`. Raises GateError when anything differs. See `parity.Found`."""
    again, their_tokenizer = checkpoint.load(out)
    text = parity.PROBE.read_text(encoding="utf-8")
    ids = tokenizer.encode(text)
    if their_tokenizer.encode(text) != ids or tokenizer.decode(ids) != text:
        raise GateError(f"{out}: the exported tokenizer splits the probe differently or does not give it back")
    return parity.check(parity.compare(model, again, ids), "huggingface", out)
