"""Stage memory: a memory beside a frozen model, and a wider model of as many weights to compare it with.

    models/code + data/facts + data/tokens/code -> models/memory, models/memory_baseline, metrics/routing/memory.json
    (memory/measure.py)

Both learn the same batches: invented facts, with a loss on the answers, and code. Half of what a memory gains may be
its weights and not its form, so `baseline` has a parallel SwiGLU at the same layers instead, its way out zero at the
start as the memory's. Asked at the end are facts in a wording that was not trained, facts that nobody has seen, and
code. The memory: `memory/model.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipeline.batches.batch import TokenBatch
from pipeline.batches.corpus import CorpusStream
from pipeline.batches.dialogues import Asked, FactStream
from pipeline.batches.mixture import MixtureStream
from pipeline.evaluation.intervals import paired_difference
from pipeline.learning import reference
from pipeline.learning.fit import Watchers, fit
from pipeline.learning.phases import Phases
from pipeline.learning.settings import FitConfig
from pipeline.memory import files, measure, training
from pipeline.memory.baseline import WiderConfig
from pipeline.memory.config import LEAK, MemoryConfig
from pipeline.memory.losses import RouterWeights
from pipeline.memory.model import Memory, Reading
from pipeline.memory.training import UnitBatch, UnitStream
from pipeline.model import checkpoint, lora
from pipeline.model.lora import AdapterConfig
from pipeline.model.transformer import Transformer
from pipeline.run import device
from pipeline.run.config import main
from pipeline.run.errors import ConfigError, GateError
from pipeline.run.tracking import say, write_json
from pipeline.run.workdir import Job
from pipeline.text.tokenizer import Tokenizer

BITS = {"none": 0, "int8": 8, "int4": 4}
MOST_LOST = 0.005  # of the bits per byte, by a bank in few bits


@dataclass(frozen=True, kw_only=True)
class Params:
    """The block `memory`; its keys are also those of MemoryConfig, RouterWeights and FitConfig."""

    facts_weight: int = 1
    """Batches of facts."""
    code_weight: int = 1
    """For so many of code."""
    adapter: AdapterConfig | None = None
    """{rank, ...}: adapters in the base train too, and are merged at the end."""
    train_base: bool = False
    """The base trains too."""
    quantise: str = "none"
    """The bank after training: none, int8, int4."""
    questions: int = 400
    """Of each kind that are asked at the end."""
    baseline_learning_rate: float | None = None
    """Of the wider model; None: learning_rate."""
    memory: MemoryConfig
    router: RouterWeights
    fit: FitConfig

    def __post_init__(self) -> None:
        """Refuse what cannot be."""
        if self.memory.leaky and not self.memory.allow_leak:
            raise ValueError(LEAK)
        if min(self.facts_weight, self.code_weight, self.questions) < 1:
            raise ValueError("facts_weight, code_weight, questions: expected at least 1")
        if self.quantise not in BITS:
            raise ValueError(f"quantise: expected one of {', '.join(BITS)}, got {self.quantise!r}")
        if self.baseline_learning_rate is not None and not self.baseline_learning_rate > 0:
            raise ValueError(f"baseline_learning_rate: expected above 0, got {self.baseline_learning_rate}")
        if self.adapter is not None and self.train_base:
            raise ValueError("adapter, train_base: expected one of them; an adapter freezes the base")


def run(
    params: Params, job: Job, *, base: Path, facts: Path, code: Path, out: Path, baseline: Path, routes: Path
) -> None:
    """Train both, save the model directories `out` and `baseline`, and write what chooses what into `routes`."""
    config = params.fit
    model, tokenizer = checkpoint.load(base)
    try:
        config.check_context(model)
        shape = params.memory.placed(model.config.layers)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    stream = streams(params, job, facts, code, tokenizer)
    slices = {"facts": stream.facts, "code": stream.code}
    asked = {
        kind: measure.questions(facts / f"{kind}.jsonl", tokenizer, params.questions) for kind in ("test", "control")
    }
    before = examined(model, tokenizer, slices, asked, params)
    digest, phases = checkpoint.weights_digest(model), Phases(job)
    beside = begun(model, params.memory, params, job.seed)
    wider, _ = checkpoint.load(base)
    assert isinstance(beside, Memory)
    begun(wider, WiderConfig.like(params.memory, beside.num_parameters(), wider.config), params, job.seed)
    trained = {
        name: sum(p.numel() for p in one.parameters() if p.requires_grad)
        for name, one in (("memory", model), ("baseline", wider))
    }
    loss, watchers = training.watched_loss(model, [*stream.facts, *stream.code], params.router, job)
    fit(model, stream.both, loss, config, phases.begin("memory"), watchers=watchers, last=False)
    rates = {
        name: rate for name, rate in config.learning_rates.items() if name not in ("bank", "router")
    }  # it has none
    own = replace(config, learning_rate=params.baseline_learning_rate or config.learning_rate, learning_rates=rates)
    fit(
        wider,
        stream.both,
        training.plain_loss,
        own,
        phases.begin("baseline", prefix="baseline/"),
        watchers=Watchers(gradients_at=1),
    )
    settled(model, params, digest)
    settled(wider, params, digest)
    told = training.diagnostics(
        model, [*stream.facts, *stream.code], device.hardware(job.runtime.precision), seed=job.seed
    )
    for complaint in training.verdicts(told, params.memory.chapters):
        say(f"warning: {complaint}")
    after = {
        name: examined(one, tokenizer, slices, asked, params) for name, one in (("memory", model), ("baseline", wider))
    }
    job.report(router=training.summary(told), leaky=int(params.memory.leaky), layers=shape, trained_parameters=trained)
    job.report(**compared({"base": before} | after))
    write_json(routes, measure.routing(model, tokenizer, slices))
    if params.quantise != "none":
        job.report(quantised=narrowed(model, stream.code, params))
    checkpoint.save(out, model, tokenizer, job.lineage)
    checkpoint.save(baseline, wider, tokenizer, job.lineage)


@dataclass(frozen=True)
class Read:
    """What is read: the mixture, and fixed slices of the validation splits."""

    both: UnitStream
    facts: Sequence[UnitBatch]
    code: Sequence[UnitBatch]


def streams(params: Params, job: Job, facts: Path, code: Path, tokenizer: Tokenizer) -> Read:
    """Raises DataError."""
    config = params.fit
    sizes: dict[str, Any] = {"context": config.context, "tokens_per_step": config.tokens_per_step, "seed": job.seed}
    known = FactStream(facts, tokenizer, **sizes)
    text = CorpusStream(code, tokenizer, cache=job.folder.parent, **sizes)
    both = UnitStream(MixtureStream([(params.facts_weight, known), (params.code_weight, text)]), params.memory)
    slices = (list(UnitStream(one, params.memory).evaluation(config.eval_tokens)) for one in (known, text))
    return Read(both, *slices)


def begun(model: Transformer, config: MemoryConfig | WiderConfig, params: Params, seed: int) -> Any:
    """Put a memory, or what it is compared with, beside the model; freeze what is not to be trained. Raises
    ConfigError where it does not fit.
    """
    if params.adapter is not None:
        lora.attach(model, params.adapter, device.generator("adapter", seed))
    try:
        beside = files.attach(model, config, device.generator("memory", seed))
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if params.adapter is not None:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("lora_" in name or name.startswith(files.PREFIX))
    elif params.train_base:
        model.requires_grad_(True)
    return beside


def settled(model: Transformer, params: Params, digest: str) -> None:
    """Merge what was adapted. Raises GateError where a frozen base has moved."""
    if params.adapter is not None:
        lora.merged_with_gate(model, reference.gate_rows(model))
    elif not params.train_base and checkpoint.weights_digest(model, leave_out=files.PREFIX) != digest:
        raise GateError(
            "gate frozen base: its weights are not those before training. Likely cause: something trains them in"
            " memory/files.py"
        )


def examined(
    model: Transformer,
    tokenizer: Tokenizer,
    slices: dict[str, Sequence[UnitBatch]],
    asked: dict[str, list[Asked]],
    params: Params,
) -> dict[str, Any]:
    """Facts, and bits per byte of code."""
    model.train(False)
    bpb = training.bits_per_byte(model, slices["code"], lambda batch: Reading(trained=batch.targets >= 0))
    known = {kind: measure.recall(model, tokenizer, questions) for kind, questions in asked.items()}
    model.train(True)
    return {"code_bpb": bpb, **known}


def compared(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The numbers of all, and the memory beside each of the others with the interval of the paired difference."""
    told: dict[str, Any] = {}
    for name, one in found.items():
        told[name] = {"code_bpb": one["code_bpb"], "facts": one["test"].measure(), "control": one["control"].measure()}
    for name in ("base", "baseline"):
        rights = ((found[one]["test"].right.astype(float).tolist(), None) for one in (name, "memory"))
        moved = paired_difference(*rights, generator=device.generator("facts", 0))
        told[f"over_{name}"] = {"facts": moved.value, "facts_low": moved.low, "facts_high": moved.high}
        told[f"over_{name}"]["says"] = (
            "more facts" if moved.low > 0 else "fewer facts" if moved.high < 0 else "no advantage found"
        )
    return told


def narrowed(model: Transformer, batches: Sequence[UnitBatch], params: Params) -> dict[str, float]:
    """Put the bank into few bits. Raises GateError where code costs more than half a hundredth more bits."""
    assert isinstance(model.memory, Memory)

    def told(batch: TokenBatch) -> Reading:
        return Reading(trained=batch.targets >= 0)

    model.train(False)
    before = training.bits_per_byte(model, batches, told)
    files.quantised(model.memory, BITS[params.quantise])
    after = training.bits_per_byte(model, batches, told)
    if after > before * (1 + MOST_LOST):
        raise GateError(
            f"gate quantise: the bank in {params.quantise} costs {after / before - 1:.2%} more bits per byte of code,"
            f" more than {MOST_LOST:.1%}; use int8 or none"
        )
    return {"bpb_before": before, "bpb_after": after}


if __name__ == "__main__":
    main(
        run,
        inputs={"base": "models/code", "facts": "data/facts", "code": "data/tokens/code"},
        outs={"out": "models/memory", "baseline": "models/memory_baseline", "routes": "metrics/routing/memory.json"},
        trains=True,
    )
