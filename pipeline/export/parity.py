"""Whether an export is the model: both read the same text, and their distance must be within what rounding explains.

    model, a program that reads its export  --compare-->  Found  --check-->  GateError if it is too large

An export without rounding must be equal. With rounded weights, the change of a log-probability depends on how certain
the model is: f16 changes the demo model's by up to 0.03 nats on this probe, most of which is unlike its training data,
and the probe's perplexity goes up or down by a percent at random. So the limit is on the mean divergence
KL(model || export), which is the increase of the export's log-perplexity on text that the model itself would write:
q8_0 may lose 0.5 %. That the weights are the model's, rounded, is proved separately (`gguf.verify`). A merged adapter
is proved where it is merged (`model/lora.py`).

`Program` is the interface to what reads an export: our own model here, other programs in `onnx.py` and
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
WINDOW = 256  # tokens of one forward pass


class Program(Protocol):
    """A program with an export loaded."""

    def logits(self, ids: list[int]) -> Tensor:
        """The logits (T, V) after each of the ids."""
        ...

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """The `count` greedy ids after the prompt; no stop token ends them."""
        ...


@dataclass(frozen=True)
class Ours:
    """Our own model as a program. It is set to evaluation mode."""

    model: Transformer

    @torch.no_grad()
    def logits(self, ids: list[int]) -> Tensor:
        """The logits (T, V) after each of the ids."""
        return self.model.train(False)(torch.tensor([ids]))[0]

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """The greedy ids after the prompt."""
        return generate(self.model.train(False), [prompt], Sampling(count), stop=(), seeds=[0])[0].ids


@dataclass(frozen=True)
class Limit:
    """The largest distance of an export from its model."""

    max_difference: float = math.inf  # nats, of the log-probability of any token of the probe
    divergence: float = math.inf  # nats, the mean over the probe
    equal_greedy: bool = False


LIMITS = {
    "huggingface": Limit(max_difference=0.0, equal_greedy=True),
    "f32": Limit(max_difference=0.0, equal_greedy=True),
    "f16": Limit(divergence=1e-4),
    "bf16": Limit(divergence=2e-3),
    "q8_0": Limit(divergence=math.log(1.005)),
    "onnx fp32": Limit(max_difference=1e-3, equal_greedy=True),
    "onnx int4": Limit(),  # only recorded: the loss by four bits depends on the model's size
}


@dataclass(frozen=True)
class Found:
    max_difference: float  # nats, the largest of the log-probabilities of the probe's tokens
    divergence: float  # nats, the mean of KL(model || export) over the probe's positions
    perplexity: float  # the export's divided by the model's, minus 1
    probe_tokens: int
    greedy_equal: int  # of `greedy_tokens`, before the first that differs
    greedy_tokens: int  # 0 for a bidirectional model, which does not decode from left to right


def probe() -> str:
    """The text of the comparison, with its carriage return and odd spaces."""
    return PROBE.read_bytes().decode("utf-8")


def compare(model: Transformer, other: Program, ids: list[int]) -> Found:
    """Compare a model and a program on the same ids. NaN counts as an infinite difference."""
    own, window = Ours(model), min(WINDOW, model.config.max_context)
    differences, divergences, changes = [], [], []
    for first in range(0, len(ids), window):
        batch = answered([Piece(np.array(ids[first : first + window]), True)], pad=0)
        is_target = batch.targets[0] >= 0
        if not is_target.any():
            continue
        inputs, targets = batch.input_ids[0].tolist(), batch.targets[0][is_target]
        p, q = (program.logits(inputs)[is_target].double().log_softmax(-1) for program in (own, other))
        change = (p - q).gather(1, targets[:, None])
        differences.append(change.abs().nan_to_num(nan=math.inf))
        divergences.append((p.exp() * (p - q)).sum(-1).nan_to_num(nan=math.inf))
        changes.append(change)
    prompt = ids[: min(PROMPT, model.config.max_context // 2)]
    causal = model.config.attention == "causal"
    num_greedy = min(GREEDY, model.config.max_context - len(prompt)) if causal else 0
    greedy = [program.greedy(prompt, num_greedy) if num_greedy else [] for program in (own, other)]
    return Found(
        max_difference=float(torch.cat(differences).max()),
        divergence=float(torch.cat(divergences).mean()),
        perplexity=float(torch.cat(changes).mean().exp()) - 1,
        probe_tokens=len(ids),
        greedy_equal=next((n for n, (a, b) in enumerate(zip(*greedy, strict=True)) if a != b), num_greedy),
        greedy_tokens=num_greedy,
    )


def check(result: Found, kind: str, where: Path) -> dict[str, float | int]:
    """The numbers to report. Raises GateError if the export is beyond the limit of its kind."""
    limit, faults = LIMITS[kind], []
    if not result.max_difference <= limit.max_difference:
        faults.append(f"log-probabilities differ by {result.max_difference:.2e} (at most {limit.max_difference:g})")
    if limit.equal_greedy and result.greedy_equal != result.greedy_tokens:
        faults.append(f"{result.greedy_equal}/{result.greedy_tokens} greedy tokens agree")
    if not result.divergence <= limit.divergence:
        faults.append(f"the divergence is {result.divergence:.2e} nats a token (at most {limit.divergence:.2g})")
    if faults:
        raise GateError(f"{where}: read back, {' and '.join(faults)}: the export is not the model")
    return asdict(result)


@torch.no_grad()
def check_rewards(model: RewardModel, other: RewardModel, ids: list[int], where: Path) -> dict[str, float | int]:
    """The numbers to report of two reward models on the same ids. Raises GateError unless all rewards are equal."""
    window = min(WINDOW, model.config.max_context)
    rows = [torch.tensor([ids[first : first + window]]) for first in range(0, len(ids), window)]
    differences = [(model.train(False)(row) - other.train(False)(row)).abs().nan_to_num(nan=math.inf) for row in rows]
    largest = max(float(difference.max()) for difference in differences)
    if largest != 0.0 or (model.reward_mean, model.reward_std) != (other.reward_mean, other.reward_std):
        raise GateError(
            f"{where}: read back, rewards differ by {largest:.2e}, or their mean and spread do: not the model"
        )
    return {"max_difference": largest, "probe_tokens": len(ids)}
