"""Is the export the model? Both read the same text, and how far they are apart is held against what rounding explains.

    model, the export read back  --compare-->  Found  --check-->  GateError where it is too far

Limits: specs, serving, 2. A merged adapter is proved where it is merged (`model/lora.py`).
"""

from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from pipeline.errors import GateError
from pipeline.generation.sampling import Sampling, generate
from pipeline.learning.scoring import token_logprobs
from pipeline.model.transformer import Transformer
from pipeline.streams.batch import Piece, answered

PROBE = Path(__file__).parent / "probe.txt"
GREEDY, PROMPT = 64, 32  # tokens
WINDOW = 256  # tokens that are read at once


@dataclass(frozen=True)
class Limit:
    """How far an export may be from its model."""

    difference: float  # nats, at any token of the probe
    perplexity: float | None = None  # as a share of the model's
    greedy: bool = False  # every greedy token the same


LIMITS = {
    "huggingface": Limit(0.0, greedy=True),
    "f32": Limit(0.0, greedy=True),
    "f16": Limit(5e-3),
    "bf16": Limit(3e-2),
    "q8_0": Limit(0.15, perplexity=0.005),
}


@dataclass(frozen=True)
class Found:
    """What the comparison gave."""

    max_difference: float  # nats, the largest of the log-probabilities of the probe's own tokens
    perplexity: float  # the export's over the model's, less 1
    probe_tokens: int
    greedy_equal: int  # of `greedy_tokens`
    greedy_tokens: int


def compare(model: Transformer, other: Transformer, ids: list[int]) -> Found:
    """Two models on the same ids, in evaluation mode from here on. A difference that is no number counts as infinite."""
    window = min(WINDOW, model.config.max_context)
    chunks = [ids[first : first + window] for first in range(0, len(ids), window)]
    differences, drops = [], []
    with torch.no_grad():
        for chunk in chunks:
            batch = answered([Piece(np.array(chunk), True)], pad=0)
            own, theirs = (token_logprobs(m.train(False), batch)[0].double() for m in (model, other))
            differences.append((own - theirs).abs().nan_to_num(nan=float("inf")))
            drops.append(own - theirs)
    prompt = ids[: min(PROMPT, model.config.max_context // 2)]
    room = min(GREEDY, model.config.max_context - len(prompt))
    greedy = [generate(m, [prompt], Sampling(room), stop=(), seeds=[0])[0].ids for m in (model, other)]
    return Found(
        max_difference=float(torch.cat(differences).max()),
        perplexity=float(torch.cat(drops).mean().exp()) - 1,
        probe_tokens=len(ids),
        greedy_equal=sum(a == b for a, b in zip(*greedy, strict=True)),
        greedy_tokens=room,
    )


def check(found: Found, kind: str, where: Path) -> dict[str, float | int]:
    """What is to be reported. Raises GateError where the export is further from its model than its kind explains."""
    limit, wrong = LIMITS[kind], []
    if not found.max_difference <= limit.difference:
        wrong.append(f"log-probabilities differ by {found.max_difference:.2e} (at most {limit.difference:g})")
    if limit.perplexity is not None and not abs(found.perplexity) <= limit.perplexity:
        wrong.append(f"perplexity differs by {found.perplexity:+.2%} (at most {limit.perplexity:.1%})")
    if limit.greedy and found.greedy_equal != found.greedy_tokens:
        wrong.append(f"{found.greedy_equal}/{found.greedy_tokens} greedy tokens agree")
    if wrong:
        raise GateError(f"{where}: read back, {' and '.join(wrong)}: the export is not the model")
    return asdict(found)
