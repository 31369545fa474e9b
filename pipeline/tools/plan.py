"""Estimates the memory of a training run before anything is allocated.

    python -m pipeline.tools.plan                                         the model in params.yaml
    python -m pipeline.tools.plan model=7b gradient_checkpointing=full    any file in conf/model/, any key below
    python -m pipeline.tools.plan model=large model.layers=24 strategy=fsdp2 processes=4 micro_batch=2

Prints bytes per device by strategy and part, and the largest micro-batch (a power of two) that fits in 30% of this
machine's memory (80% of its GPU's), and in 80% of the memory of cards with 16, 24, 40 and 80 GB (10^9 bytes; these
columns always assume CUDA). `learning/footprint.py` has the arithmetic and lists what it leaves out;
`runtime.micro_batch: auto` uses the same estimate.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from pipeline.generation import sampling
from pipeline.learning import footprint
from pipeline.learning.footprint import CPU_SHARE, SHARE, Footprint, Work
from pipeline.model.config import ModelConfig
from pipeline.model.lora import AdapterConfig
from pipeline.run import device
from pipeline.run.config import (
    BASE_WEIGHTS,
    CHECKPOINTING,
    Settings,
    Value,
    build,
    group,
    listing,
    parse_override,
    suggest,
)
from pipeline.run.errors import ConfigError

STRATEGIES = {
    "one": "one device",
    "ddp": "DDP",
    "fsdp2": "FSDP2",
    "lora": "LoRA",
    "dpo": "DPO, with its reference",
    "dpo_lora": "DPO, LoRA",
    "grpo": "GRPO, with its reference",
    "grpo_lora": "GRPO, LoRA",
    "grpo_fsdp2": "GRPO, FSDP2",
    "ppo": "PPO, four models",
    "diffusion": "masked diffusion",
    "diffusion_dpo": "Diffusion-DPO, with its reference",
    "diffusion_dpo_lora": "Diffusion-DPO, LoRA",
}
ALIGNED = ("dpo", "grpo", "ppo", "diffusion_dpo")  # use a reference: a copy, or the model without its adapter
SAMPLED = ("grpo", "ppo")
CARDS = (16, 24, 40, 80)  # GB
NF4_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)  # per weight: 4 bits, 8-bit scales per 64 weights, 32-bit ones per 256 scales
MAX_ROWS = 4096  # in a micro-batch
PARTS = ("weights", "gradients", "optimizer", "copies", "activations", "logits", "update", "sampling")


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """The keys of a plan. Raises ValueError for an invalid value."""

    model: ModelConfig = group("model")
    strategy: str | None = None  # a name in STRATEGIES; none: all
    context: int | None = None  # tokens per row; none: 2,048, or the model's context if that is shorter
    micro_batch: int = 1  # rows per forward pass, or answers for methods that train on pairs
    samples: int = 64  # answers per iteration, if answers are sampled
    processes: int = 8  # for ddp, fsdp2 and grpo_fsdp2
    device: str = "auto"  # for the table of parts: cpu, cuda; auto: this machine's
    precision: str = "auto"  # fp32, bf16, fp16; auto: this machine's, and bf16 for cards
    optimizer: str = "adamw"  # adamw, muon
    gradient_checkpointing: str = "none"  # none, full, every_2, selective
    base_weights: str = "auto"  # frozen matrices: fp32, bf16, nf4 (under an adapter); auto: bf16 on cuda in bf16
    ema: bool = False  # keep a moving average of the weights
    rank: int = 16  # LoRA rank
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")  # LoRA targets, or all-linear

    def __post_init__(self) -> None:
        choices = {
            "strategy": (None, *STRATEGIES),
            "device": ("auto", "cpu", "cuda"),
            "precision": ("auto", "fp32", "bf16", "fp16"),
            "optimizer": ("adamw", "muon"),
            "base_weights": BASE_WEIGHTS,
            "gradient_checkpointing": CHECKPOINTING,
        }
        for key, allowed in choices.items():
            if getattr(self, key) not in allowed:
                names = ", ".join(name for name in allowed if name)
                raise ValueError(f"{key}: expected one of {names}, got {getattr(self, key)!r}")
        assert self.adapter  # building it runs its checks
        if min(self.micro_batch, self.processes, self.samples) < 1:
            raise ValueError("micro_batch, processes, samples: expected at least 1 each")
        if not 1 <= self.tokens <= self.model.max_context:
            raise ValueError(f"context: expected 1 to {self.model.max_context} (the model's limit), got {self.tokens}")

    @property
    def tokens(self) -> int:
        return min(2048, self.model.max_context) if self.context is None else self.context

    @property
    def adapter(self) -> AdapterConfig:
        return AdapterConfig(rank=self.rank, alpha=2 * self.rank, targets=self.targets)


def configured(argv: list[str]) -> PlanConfig:
    """The plan for a command line. Raises ConfigError for an unknown key, file or value."""
    known = sorted(field.name for field in fields(PlanConfig))
    model_overrides, values = [], {}
    for text in argv:
        key, raw = parse_override(text)
        if key.split(".")[0] == "model":
            model_overrides.append(text)
        elif key in known:
            values[key] = Value(raw, "command line")
        else:
            raise ConfigError(
                f"command line: unknown key {key!r}{suggest(key, known)}; valid keys: {listing(known)}, model.<key of"
                " its file>"
            )
    return build(PlanConfig, values, "plan", Settings(Path(), model_overrides))


def work_of(config: PlanConfig, kind: str, precision: str) -> Work:
    """A plan's training step on a kind of device, assuming several micro-batches per update (more memory than one)."""
    return Work(
        row=config.tokens,
        context=config.tokens,
        selected=config.tokens,
        kind=kind,
        precision=precision,
        optimizer=config.optimizer,
        checkpointing=config.gradient_checkpointing,
        ema=config.ema,
    )


def plan(config: PlanConfig, strategy: str, work: Work, micro_batch: int) -> Footprint:
    """Bytes per device for a strategy."""
    model, method = config.model, strategy.removesuffix("_lora").removesuffix("_fsdp2")
    narrow = config.base_weights in ("bf16", "nf4")
    if config.base_weights == "auto":
        narrow = (work.kind, work.precision) == ("cuda", "bf16")
    masked = method.startswith("diffusion")
    work = replace(work, answers=method in ALIGNED and not masked, masked=masked)
    models, whole = [model], footprint.full(model)
    weights = whole
    if strategy.endswith("lora"):
        work = replace(work, adapted=frozenset(config.adapter.modules))
        weights = footprint.adapted(model, rank=config.rank, targets=config.adapter.modules, narrow=narrow)
        if config.base_weights == "nf4":  # instead of 2 bytes per weight
            quantized = sum(rows * columns * count for (rows, columns), count in footprint.matrices(model).items())
            weights = replace(weights, frozen=int(weights.frozen - (2 - NF4_BYTES) * quantized))
    elif method in ALIGNED and not strategy.endswith("fsdp2"):
        weights += footprint.frozen(model, narrow=narrow)
    if method == "ppo":
        weights += footprint.full(model, head=False) + footprint.frozen(model, head=False, narrow=narrow)
        models = [model, model]
    single = footprint.footprint(weights, models, work, micro_batch)
    if strategy.endswith("fsdp2"):
        single = footprint.sharded(single, model, work, config.processes)
    if strategy == "grpo_fsdp2":  # each process has the full reference, and a copy of the policy for sampling
        beside = footprint.frozen(model, narrow=narrow)
        cast = 2.0 * beside.cast if work.precision != "fp32" else 0.0
        single = replace(single, weights=single.weights + 2 * beside.frozen, copies=single.copies + cast)
    if method in SAMPLED:
        single = replace(single, sampling=sampling_bytes(model, work, config.samples))
    return footprint.data_parallel(single, whole) if strategy == "ddp" else single


def sampling_bytes(config: ModelConfig, work: Work, answers: int) -> float:
    """Bytes for decoding `answers` rows, as many at once as `sampling.rows_within` allows, plus the folded adapters."""
    row = 8 * config.layers * config.kv_heads * config.head_dim * work.row  # float32
    budget = sampling.CACHE_BYTES["cpu" if work.kind == "cpu" else "accelerator"]
    shapes, size = footprint.projections(config), 4 if work.precision == "fp32" else 2
    folded = size * config.layers * sum(math.prod(shapes[name]) for name in work.adapted or ())
    return float(row * min(answers, max(8, min(512, budget // row))) + folded)


def render(config: PlanConfig, hardware: device.Hardware) -> str:
    """The title and the two tables."""
    kind = hardware.device.type if config.device == "auto" else config.device
    precision = config.precision if config.precision != "auto" else hardware.precision
    card_precision = config.precision if config.precision != "auto" else "bf16"
    shown_work = work_of(config, kind, precision if kind == hardware.device.type else card_precision)
    memory = device.total_memory(hardware.device)
    strategies = [config.strategy] if config.strategy else list(STRATEGIES)
    several = {s: f" ({config.processes})" if s.endswith(("ddp", "fsdp2")) else "" for s in strategies}
    names = {s: STRATEGIES[s] + number for s, number in several.items()}
    plans = {s: plan(config, s, shown_work, config.micro_batch) for s in strategies}
    parts = [[names[s], *(gigabytes(getattr(p, part)) for part in PARTS), gigabytes(p.total)] for s, p in plans.items()]
    machines = [(memory, work_of(config, hardware.device.type, precision))]
    machines += [(card * 10**9, work_of(config, "cuda", card_precision)) for card in CARDS]
    limits = [[names[s], *(rows_in(config, s, work, total) for total, work in machines)] for s in strategies]
    title = (
        f"{footprint.full(config.model).trained:,} parameters; rows of {config.tokens:,} tokens, micro-batch"
        f" {config.micro_batch}, {config.optimizer}, gradient checkpointing {config.gradient_checkpointing}"
    )
    part_table = f"GB per device ({shown_work.kind}, {shown_work.precision})\n" + table(
        ["strategy", *PARTS, "total"], parts
    )
    columns = ["strategy", f"this machine, {memory / 1e9:.0f} GB", *(f"{card} GB" for card in CARDS)]
    limit_table = (
        f"largest micro-batch within {SHARE:.0%} of a card's memory, {CPU_SHARE:.0%} of a machine's (-: not"
        f" even one row; this machine: {hardware.device.type}, {precision}; cards: cuda, {card_precision})\n"
        + table(columns, limits)
    )
    return "\n\n".join([title, part_table, limit_table]) + "\n"


def rows_in(config: PlanConfig, strategy: str, work: Work, memory: float) -> str:
    """The largest micro-batch that fits in memory; `-` if not even one row fits."""
    share = CPU_SHARE if work.kind == "cpu" else SHARE
    num_rows = footprint.largest(share * memory, lambda rows: plan(config, strategy, work, rows).total, MAX_ROWS)
    return f"{num_rows:,}" if num_rows else "-"


def gigabytes(size: float) -> str:
    """Bytes as GB with one decimal, or three for small sizes."""
    return f"{size / 1e9:,.1f}" if size >= 5e7 or not size else f"{size / 1e9:.3f}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns: the first left-aligned, the others right-aligned."""
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    lines = [[cell.rjust(width) for cell, width in zip(row, widths, strict=True)] for row in (head, *rows)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *line[1:]]) for row, line in zip((head, *rows), lines, strict=True)
    )


def main(argv: list[str]) -> int:
    """Print the plan; returns an exit code from `errors.py`."""
    try:
        config = configured(argv)
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    sys.stdout.write(render(config, device.hardware(config.precision)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
