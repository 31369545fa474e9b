"""Is the export the model? Both read the same text, and how far they are apart is held against what rounding explains.

    model, the export read back  --compare-->  Found  --check-->  GateError where it is too far

What rounds nothing must be equal. Where weights are rounded, how far a log-probability moves depends on how sure the model is of
itself: f16 moves the demo's by up to 0.02 nats on this probe, most of which it has never seen the like of. So the limit is on the mean
divergence, KL(model || export), and that the weights are the model's, rounded, is proved by itself (`gguf.verify`).
A merged adapter is proved where it is merged (`model/lora.py`).
"""

from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from pipeline.errors import GateError
from pipeline.generation.sampling import Sampling, generate
from pipeline.learning.scoring import trained_logits
from pipeline.model.transformer import Transformer
from pipeline.streams.batch import Piece, answered

PROBE = Path(__file__).parent / "probe.txt"
GREEDY, PROMPT = 64, 32  # tokens
WINDOW = 256  # tokens that are read at once


@dataclass(frozen=True)
class Limit:
    """How far an export may be from its model."""

    divergence: float  # nats, the mean over the probe
    equal: bool = False  # no log-probability differs, and no greedy token


LIMITS = {
    "huggingface": Limit(0.0, equal=True),
    "f32": Limit(0.0, equal=True),
    "f16": Limit(1e-4),
    "bf16": Limit(2e-3),
    "q8_0": Limit(1e-2),
}


@dataclass(frozen=True)
class Found:
    """What the comparison gave."""

    max_difference: float  # nats, the largest of the log-probabilities of the probe's own tokens
    divergence: float  # nats, the mean of KL(model || export) over the probe's places
    perplexity: float  # the export's over the model's, less 1
    probe_tokens: int
    greedy_equal: int  # of `greedy_tokens`
    greedy_tokens: int


def compare(model: Transformer, other: Transformer, ids: list[int]) -> Found:
    """Two models on the same ids, in evaluation mode from here on. A difference that is no number counts as infinite."""
    window = min(WINDOW, model.config.max_context)
    differences, divergences, drops = [], [], []
    with torch.no_grad():
        for first in range(0, len(ids), window):
            batch = answered([Piece(np.array(ids[first : first + window]), True)], pad=0)
            (own, targets), (theirs, _) = (trained_logits(m.train(False), batch) for m in (model, other))
            if not len(targets):
                continue
            p, q = (logits.double().log_softmax(-1) for logits in (own, theirs))
            change = (p - q).gather(1, targets[:, None])
            differences.append(change.abs().nan_to_num(nan=float("inf")))
            divergences.append((p.exp() * (p - q)).sum(-1).nan_to_num(nan=float("inf")))
            drops.append(change)
    prompt = ids[: min(PROMPT, model.config.max_context // 2)]
    room = min(GREEDY, model.config.max_context - len(prompt))
    greedy = [generate(m, [prompt], Sampling(room), stop=(), seeds=[0])[0].ids for m in (model, other)]
    return Found(
        max_difference=float(torch.cat(differences).max()),
        divergence=float(torch.cat(divergences).mean()),
        perplexity=float(torch.cat(drops).mean().exp()) - 1,
        probe_tokens=len(ids),
        greedy_equal=sum(a == b for a, b in zip(*greedy, strict=True)),
        greedy_tokens=room,
    )


def check(found: Found, kind: str, where: Path) -> dict[str, float | int]:
    """What is to be reported. Raises GateError where the export is further from its model than its kind explains."""
    limit, wrong = LIMITS[kind], []
    if limit.equal and found.max_difference != 0.0:
        wrong.append(f"log-probabilities differ by {found.max_difference:.2e}")
    if limit.equal and found.greedy_equal != found.greedy_tokens:
        wrong.append(f"{found.greedy_equal}/{found.greedy_tokens} greedy tokens agree")
    if not limit.equal and not found.divergence <= limit.divergence:
        wrong.append(f"the divergence is {found.divergence:.2e} nats a token (at most {limit.divergence:g})")
    if wrong:
        raise GateError(f"{where}: read back, {' and '.join(wrong)}: the export is not the model")
    return asdict(found)
