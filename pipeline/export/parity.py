"""Is the export the model? Both read the same text, and how far they are apart is held against what rounding explains.

    model, a program that reads its export  --compare-->  Found  --check-->  GateError where it is too far

What rounds nothing must be equal. Where weights are rounded, how far a log-probability moves depends on how sure the
model is of itself: f16 moves the demo's by up to 0.03 nats on this probe, most of which it has never seen the like of,
and the probe's perplexity goes up or down by a percent as it happens. So the limit is on the mean divergence KL(model
|| export), which is by how much the export's log-perplexity is worse on text that the model itself would write: q8_0
may lose 0.5 %. That the weights are the model's, rounded, is proved by itself (`gguf.verify`). A merged adapter is
proved where it is merged (`model/lora.py`).

`Program` is the seam: the exports are read by our own model here, and by other programs in `onnx.py` and
`benchmarks/exports.py`.
"""

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from pipeline.batches.batch import Piece, answered
from pipeline.generation.sampling import Sampling, generate
from pipeline.model.heads import RewardModel
from pipeline.model.transformer import Transformer
from pipeline.run.errors import GateError

PROBE = Path(__file__).parent / "probe.txt"
GREEDY, PROMPT = 64, 32  # tokens
WINDOW = 256  # tokens that are read at once


class Program(Protocol):
    """Something that has read an export."""

    def logits(self, ids: list[int]) -> Tensor:
        """(T, V), after each of the ids."""
        ...

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """The `count` most likely ids behind the prompt, one after the other; no stop token ends them."""
        ...


@dataclass(frozen=True)
class Ours:
    """Our own model as a program. It is put into evaluation mode."""

    model: Transformer

    @torch.no_grad()
    def logits(self, ids: list[int]) -> Tensor:
        """(T, V), after each of the ids."""
        return self.model.train(False)(torch.tensor([ids]))[0]

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """The most likely ids behind the prompt."""
        return generate(self.model.train(False), [prompt], Sampling(count), stop=(), seeds=[0])[0].ids


@dataclass(frozen=True)
class Limit:
    """How far an export may be from its model."""

    max_difference: float = math.inf  # nats, of any log-probability of the probe's own tokens
    divergence: float = math.inf  # nats, the mean over the probe
    equal_greedy: bool = False


LIMITS = {
    "huggingface": Limit(max_difference=0.0, equal_greedy=True),
    "f32": Limit(max_difference=0.0, equal_greedy=True),
    "f16": Limit(divergence=1e-4),
    "bf16": Limit(divergence=2e-3),
    "q8_0": Limit(divergence=math.log(1.005)),
    "onnx fp32": Limit(max_difference=1e-3, equal_greedy=True),
    "onnx int4": Limit(),  # recorded: how much four bits cost depends on the model's size
}


@dataclass(frozen=True)
class Found:
    """What the comparison gave."""

    max_difference: float  # nats, the largest of the log-probabilities of the probe's own tokens
    divergence: float  # nats, the mean of KL(model || export) over the probe's places
    perplexity: float  # the export's over the model's, less 1
    probe_tokens: int
    greedy_equal: int  # of `greedy_tokens`, until the first that differs
    greedy_tokens: int  # 0 for a bidirectional model, which has no left to right


def probe() -> str:
    """The text that is read, its carriage return and odd spaces too."""
    return PROBE.read_bytes().decode("utf-8")


def compare(model: Transformer, other: Program, ids: list[int]) -> Found:
    """A model and a program on the same ids. A difference that is no number counts as infinite."""
    own, window = Ours(model), min(WINDOW, model.config.max_context)
    differences, divergences, drops = [], [], []
    for first in range(0, len(ids), window):
        batch = answered([Piece(np.array(ids[first : first + window]), True)], pad=0)
        chosen = batch.targets[0] >= 0
        if not chosen.any():
            continue
        row, targets = batch.input_ids[0].tolist(), batch.targets[0][chosen]
        p, q = (program.logits(row)[chosen].double().log_softmax(-1) for program in (own, other))
        change = (p - q).gather(1, targets[:, None])
        differences.append(change.abs().nan_to_num(nan=math.inf))
        divergences.append((p.exp() * (p - q)).sum(-1).nan_to_num(nan=math.inf))
        drops.append(change)
    prompt = ids[: min(PROMPT, model.config.max_context // 2)]
    causal = model.config.attention == "causal"
    room = min(GREEDY, model.config.max_context - len(prompt)) if causal else 0
    said = [program.greedy(prompt, room) if room else [] for program in (own, other)]
    return Found(
        max_difference=float(torch.cat(differences).max()),
        divergence=float(torch.cat(divergences).mean()),
        perplexity=float(torch.cat(drops).mean().exp()) - 1,
        probe_tokens=len(ids),
        greedy_equal=next((n for n, (a, b) in enumerate(zip(*said, strict=True)) if a != b), room),
        greedy_tokens=room,
    )


def check(found: Found, kind: str, where: Path) -> dict[str, float | int]:
    """What is to be reported. Raises GateError where the export is further from its model than its kind explains."""
    limit, wrong = LIMITS[kind], []
    if not found.max_difference <= limit.max_difference:
        wrong.append(f"log-probabilities differ by {found.max_difference:.2e} (at most {limit.max_difference:g})")
    if limit.equal_greedy and found.greedy_equal != found.greedy_tokens:
        wrong.append(f"{found.greedy_equal}/{found.greedy_tokens} greedy tokens agree")
    if not found.divergence <= limit.divergence:
        wrong.append(f"the divergence is {found.divergence:.2e} nats a token (at most {limit.divergence:.2g})")
    if wrong:
        raise GateError(f"{where}: read back, {' and '.join(wrong)}: the export is not the model")
    return asdict(found)


@torch.no_grad()
def check_rewards(model: RewardModel, other: RewardModel, ids: list[int], where: Path) -> dict[str, float | int]:
    """What is to be reported of two reward models on the same ids. Raises GateError unless all rewards are equal."""
    window = min(WINDOW, model.config.max_context)
    rows = [torch.tensor([ids[first : first + window]]) for first in range(0, len(ids), window)]
    apart = [(model.train(False)(row) - other.train(False)(row)).abs().nan_to_num(nan=math.inf) for row in rows]
    most = max(float(difference.max()) for difference in apart)
    if most != 0.0 or (model.reward_mean, model.reward_std) != (other.reward_mean, other.reward_std):
        raise GateError(f"{where}: read back, rewards differ by {most:.2e}, or their mean and spread do: not the model")
    return {"max_difference": most, "probe_tokens": len(ids)}
