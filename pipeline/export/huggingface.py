"""The Hugging Face directory of a chosen model: weights, tokenizer, template, model card, checksums, and their proof.

    models/<name> -> models/deploy, read back and compared on probe.txt

The directory is what transformers, vLLM and the converters read. `verify` loads it again and compares log-probabilities
and greedy tokens with the model it was made from: for this export the difference must be exactly 0.
"""

import hashlib
from pathlib import Path
from typing import Any

import torch

from pipeline import checkpoint
from pipeline.errors import GateError
from pipeline.generation.sampling import Sampling, generate
from pipeline.model.transformer import Transformer
from pipeline.text.tokenizer import Tokenizer

PROBE = Path(__file__).parent / "probe.txt"
CARD = Path(__file__).parent / "card.md"


def export(model: Transformer, tokenizer: Tokenizer, lineage: dict[str, Any], out: Path, *, name: str) -> None:
    """Write the directory with its card and SHA256SUMS."""
    checkpoint.save(out, model, tokenizer, lineage)
    rows = "\n".join(f"| {key} | `{value}` |" for key, value in sorted(lineage.items()) if not isinstance(value, dict))
    facts = {"NAME": name, "PARAMETERS": f"{model.num_parameters():,}", "CONTEXT": str(model.config.max_context),
             "VOCABULARY": str(tokenizer.vocab_size), "TOKENIZER": tokenizer.hash[:16], "LINEAGE": rows}  # fmt: skip
    card = CARD.read_text(encoding="utf-8")
    for key, value in facts.items():
        card = card.replace(f"@{key}@", value)
    (out / "README.md").write_text(card, encoding="utf-8")
    files = sorted(p for p in out.rglob("*") if p.is_file())
    sums = "".join(f"{hashlib.sha256(p.read_bytes()).hexdigest()}  {p.relative_to(out)}\n" for p in files)
    (out / "SHA256SUMS").write_text(sums)


@torch.no_grad()
def verify(model: Transformer, tokenizer: Tokenizer, out: Path, *, greedy_tokens: int = 64) -> dict[str, float | int]:
    """Read `out` back and compare it with `model`. Raises GateError when anything differs.

    Returns the largest difference of log-probabilities over the probe, its token count, and the greedy tokens compared.
    """
    again, their_tokenizer = checkpoint.load(out)
    text = PROBE.read_text(encoding="utf-8")
    ids = tokenizer.encode(text)
    if their_tokenizer.encode(text) != ids or tokenizer.decode(ids) != text:
        raise GateError(f"{out}: the exported tokenizer splits the probe differently or does not give it back")
    model.train(False)
    again.train(False)
    difference = 0.0
    window = min(256, model.config.max_context)
    for first in range(0, len(ids), window):
        batch = torch.tensor([ids[first : first + window]])
        mine, theirs = (torch.log_softmax(m(batch).float(), dim=-1) for m in (model, again))
        difference = max(difference, float((mine - theirs).abs().nan_to_num(nan=float("inf")).max()))
    prompt = ids[: min(32, model.config.max_context // 2)]
    greedy_tokens = min(greedy_tokens, model.config.max_context - len(prompt))
    greedy = [
        generate(m, [prompt], Sampling(max_new_tokens=greedy_tokens), stop=(), seeds=[0])[0].ids for m in (model, again)
    ]
    same = sum(a == b for a, b in zip(*greedy, strict=True))
    if difference != 0.0 or same != greedy_tokens:
        raise GateError(
            f"{out}: read back, log-probabilities differ by {difference:.2e} and {same}/{greedy_tokens} greedy tokens agree"
        )
    return {"max_difference": difference, "probe_tokens": len(ids), "greedy_equal": same}
