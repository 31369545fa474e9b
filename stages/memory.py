"""Stage memory: add a memory to a frozen model, and train a wider model of equal size for comparison.

    models/code + data/facts + data/tokens/code -> models/memory, models/memory_baseline, metrics/routing/memory.json
    (memory/measure.py)

Both models train on the same batches: invented facts, with a loss on the answers, and code. Half of a memory's gain may
come from its extra parameters rather than its structure. The baseline therefore adds a parallel SwiGLU at the same
layers instead, with the output projection initialized to zero like the memory's. At the end, both models are measured
on facts in an unseen wording, on facts that occur nowhere in the training data, and on code. `memory/model.py` defines
the memory itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline.batches.batch import TokenBatch
from pipeline.batches.corpus import CorpusStream, MixtureStream, is_empty
from pipeline.batches.dialogues import FactQuestion, FactStream
from pipeline.evaluation.intervals import paired_difference
from pipeline.learning import pretraining, reference
from pipeline.learning.fit import Watchers, fit
from pipeline.learning.pretraining import Phases
from pipeline.learning.settings import FitConfig
from pipeline.memory import files, measure, training
from pipeline.memory.config import LEAK, MemoryConfig, RouterWeights
from pipeline.memory.files import Wider, WiderConfig
from pipeline.memory.measure import Recall
from pipeline.memory.model import Memory, Reading
from pipeline.memory.training import UnitBatch, UnitStream
from pipeline.model import checkpoint, lora
from pipeline.model.lora import AdapterConfig
from pipeline.model.transformer import Transformer
from pipeline.run import device
from pipeline.run.errors import ConfigError, GateError
from pipeline.run.stage import main
from pipeline.run.tracking import say, write_json
from pipeline.run.types import JsonObject
from pipeline.run.workdir import Job
from pipeline.text.tokenizer import Tokenizer

BITS = {"none": 0, "int8": 8, "int4": 4}
MAX_LOSS = 0.005  # largest allowed relative increase in bits per byte of code from quantizing the bank


@dataclass(frozen=True, kw_only=True)
class Params:
    """The `memory` block; it also has the keys of MemoryConfig, RouterWeights and FitConfig."""

    base: str = "code"
    """Model to start from: a folder in models/, or `base` for your own checkpoint (stage base)."""
    facts_weight: int = 1
    """Fact batches per `code_weight` batches of code."""
    code_weight: int = 1
    """Code batches per `facts_weight` batches of facts."""
    adapter: AdapterConfig | None = None
    """{rank, ...}: also train adapters in the base model and merge them at the end."""
    train_base: bool = False
    """Also train the base model's weights."""
    quantize: str = "none"
    """Quantization of the bank after training: none, int8, int4."""
    questions: int = 400
    """Number of facts of each kind to test at the end."""
    baseline_learning_rate: float | None = None
    """Learning rate of the wider model; none: the same as `learning_rate`."""
    memory: MemoryConfig
    router: RouterWeights
    fit: FitConfig

    def __post_init__(self) -> None:
        if self.memory.leaky and not self.memory.allow_leak:
            raise ValueError(LEAK)
        if min(self.facts_weight, self.code_weight, self.questions) < 1:
            raise ValueError("facts_weight, code_weight, questions: expected at least 1 each")
        if self.quantize not in BITS:
            raise ValueError(f"quantize: expected one of {', '.join(BITS)}, got {self.quantize!r}")
        if self.baseline_learning_rate is not None and not self.baseline_learning_rate > 0:
            raise ValueError(f"baseline_learning_rate: expected more than 0, got {self.baseline_learning_rate}")
        if self.adapter is not None and self.train_base:
            raise ValueError(
                "adapter, train_base: expected at most one of the two, because an adapter freezes the base"
            )


def run(
    params: Params, job: Job, *, base: Path, facts: Path, code: Path, out: Path, baseline: Path, routes: Path
) -> None:
    """Train both models, save them to `out` and `baseline`, and write the routing of each text to `routes`."""
    if is_empty(code):
        write_json(routes, {})
        checkpoint.pass_through(base, baseline, job, code)
        return checkpoint.pass_through(base, out, job, code)
    config, hardware = params.fit, device.hardware(job.runtime.precision)
    model, tokenizer = checkpoint.load(base)
    try:
        config.check_context(model)
        layers = params.memory.placed(model.config.layers)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    stream = streams(params, job, facts, code, tokenizer)
    slices = {"facts": stream.facts, "code": stream.code}
    questions = {
        kind: measure.questions(facts / f"{kind}.jsonl", tokenizer, params.questions) for kind in ("test", "control")
    }
    base_measurement = _measure(model.to(hardware.device), tokenizer, stream.code, questions)
    digest, phases = checkpoint.weights_digest(model), Phases(job)
    memory = _attach(model, params.memory, params, job.seed)
    wider, _ = checkpoint.load(base)
    assert isinstance(memory, Memory)
    _attach(wider, WiderConfig.like(params.memory, memory.num_parameters(), wider.config), params, job.seed)
    training.measure_centers(model.to(hardware.device), stream.both, config.context, hardware)
    models = {"memory": model, "baseline": wider}
    trained = {name: sum(p.numel() for p in m.parameters() if p.requires_grad) for name, m in models.items()}
    loss, watchers = training.watched_loss(model, [*stream.facts, *stream.code], params.router, job)
    fit(model, stream.both, loss, config, phases.begin("memory"), watchers=watchers, last=False)
    # The baseline has no bank and no router.
    baseline_config = replace(
        config,
        learning_rate=params.baseline_learning_rate or config.learning_rate,
        learning_rates={k: rate for k, rate in config.learning_rates.items() if k not in ("bank", "router")},
    )
    fit(
        wider,
        stream.both,
        pretraining.plain_loss,
        baseline_config,
        phases.begin("baseline", prefix="baseline/"),
        watchers=Watchers(gradients_at=1),
    )
    _merge_or_check(model, params, digest)
    _merge_or_check(wider, params, digest)
    diagnostics = training.diagnostics(model, [*stream.facts, *stream.code], hardware, seed=job.seed)
    for warning in training.verdicts(diagnostics, params.memory.chapters):
        say(f"warning: {warning}")
    measurements = {name: _measure(m, tokenizer, stream.code, questions) for name, m in models.items()}
    job.report(
        router=training.summary(diagnostics), leaky=int(params.memory.leaky), layers=layers, trained_parameters=trained
    )
    job.report(**_compare({"base": base_measurement} | measurements))
    write_json(routes, measure.routing(model, tokenizer, slices))
    if params.quantize != "none":
        job.report(quantized=_quantize_bank(model, stream.code, params))
    checkpoint.save(out, model, tokenizer, job.lineage)
    checkpoint.save(baseline, wider, tokenizer, job.lineage)


@dataclass(frozen=True)
class MemoryStreams:
    """The training mixture, and fixed slices of the validation splits."""

    both: UnitStream
    facts: Sequence[UnitBatch]
    code: Sequence[UnitBatch]


def streams(params: Params, job: Job, facts: Path, code: Path, tokenizer: Tokenizer) -> MemoryStreams:
    """Build the streams of facts and code. Raises DataError for invalid data."""
    config = params.fit
    sizes: JsonObject = {"context": config.context, "tokens_per_step": config.tokens_per_step, "seed": job.seed}
    fact_stream = FactStream(facts, tokenizer, **sizes)
    code_stream = CorpusStream(code, tokenizer, cache=job.folder.parent, **sizes)
    mixture = UnitStream(
        MixtureStream([(params.facts_weight, fact_stream), (params.code_weight, code_stream)]), params.memory
    )
    slices = (
        list(UnitStream(s, params.memory).evaluation(config.validation.eval_tokens)) for s in (fact_stream, code_stream)
    )
    return MemoryStreams(mixture, *slices)


def _attach(model: Transformer, config: MemoryConfig | WiderConfig, params: Params, seed: int) -> Memory | Wider:
    """Add a memory or its baseline to the model, and freeze the weights that are not trained. Raises ConfigError if
    the module does not fit the model.
    """
    if params.adapter is not None:
        lora.attach(model, params.adapter, device.generator("adapter", seed))
    try:
        module = files.attach(model, config, device.generator("memory", seed))
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if params.adapter is not None:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("lora_" in name or name.startswith(files.PREFIX))
    elif params.train_base:
        model.requires_grad_(True)
    return module


def _merge_or_check(model: Transformer, params: Params, digest: str) -> None:
    """Merge the adapter. Raises GateError if the merge is not exact, or if a frozen base has changed."""
    if params.adapter is not None:
        lora.merged_with_gate(model, reference.gate_rows(model))
    elif not params.train_base and checkpoint.weights_digest(model, leave_out=files.PREFIX) != digest:
        raise GateError(
            "gate frozen base: the base's weights changed during training. Likely cause: memory/files.py leaves some"
            " weights trainable"
        )


@dataclass(frozen=True)
class Measurement:
    """Final measurements of a model."""

    code_bpb: float  # bits per byte of code
    test: Recall  # on facts trained with a different wording
    control: Recall  # on facts that are not in the training data


def _measure(
    model: Transformer, tokenizer: Tokenizer, code: Sequence[UnitBatch], questions: dict[str, list[FactQuestion]]
) -> Measurement:
    model.train(False)
    bpb = training.bits_per_byte(model, code, plain_reading)
    recalls = {kind: measure.recall(model, tokenizer, facts) for kind, facts in questions.items()}
    model.train(True)
    return Measurement(bpb, **recalls)


def plain_reading(batch: TokenBatch) -> Reading:
    """A reading of the memory with default options."""
    return Reading(trained=batch.targets >= 0)


def _compare(measurements: dict[str, Measurement]) -> JsonObject:
    """Each model's numbers, and the paired difference between the memory and each other model, with its interval."""
    comparison: JsonObject = {}
    for name, m in measurements.items():
        comparison[name] = {"code_bpb": m.code_bpb, "facts": m.test.measure(), "control": m.control.measure()}
    for name in ("base", "baseline"):
        correct = ((measurements[n].test.right.astype(float).tolist(), None) for n in (name, "memory"))
        difference = paired_difference(*correct, generator=device.generator("facts", 0))
        comparison[f"over_{name}"] = {
            "facts": difference.value,
            "facts_low": difference.low,
            "facts_high": difference.high,
        }
        comparison[f"over_{name}"]["says"] = (
            "more facts" if difference.low > 0 else "fewer facts" if difference.high < 0 else "no advantage found"
        )
    return comparison


def _quantize_bank(model: Transformer, batches: Sequence[UnitBatch], params: Params) -> dict[str, float]:
    """Quantize the bank. Raises GateError if bits per byte of code rise by more than MAX_LOSS."""
    memory = model.hook
    assert isinstance(memory, Memory)
    model.train(False)
    before = training.bits_per_byte(model, batches, plain_reading)
    files.quantized(memory, BITS[params.quantize])
    after = training.bits_per_byte(model, batches, plain_reading)
    if after > before * (1 + MAX_LOSS):
        raise GateError(
            f"gate quantize: the bank in {params.quantize} raises bits per byte of code by {after / before - 1:.2%},"
            f" more than the allowed {MAX_LOSS:.1%}; use `int8` or `none`"
        )
    return {"bpb_before": before, "bpb_after": after}


if __name__ == "__main__":
    main(
        run,
        inputs={"base": "models/{base}", "facts": "data/facts", "code": "data/tokens/code"},
        outs={"out": "models/memory", "baseline": "models/memory_baseline", "routes": "metrics/routing/memory.json"},
        trains=True,
    )
