"""Stage diffusion: turn the causal code model into a masked-diffusion one, and teach it to answer; beside it a causal control.

    models/code + data/tokens/code + data/problems -> models/diffusion, models/diffusion_control
        (Gong et al. 2024, arXiv:2410.17891; Nie et al. 2025, arXiv:2502.09992)

First windows of code under masks, while attention grows from causal to full; then problems, of which only the answers are masked.
The control is the causal model on the same windows and examples under cross-entropy, so that both have read as much. `init:
scratch` starts from fresh weights, `block_size` makes a block-diffusion model of them (arXiv:2503.09573).
"""

from dataclasses import dataclass, field
from pathlib import Path

from pipeline import checkpoint, denoisers, device
from pipeline.generation import traces
from pipeline.generation.traces import Asked
from pipeline.learning import first_steps_masked, objectives, objectives_masked, scoring, scoring_masked
from pipeline.learning.fit import fit
from pipeline.learning.objectives import Loss, Term
from pipeline.learning.phases import Phases
from pipeline.learning.protocols import Watchers
from pipeline.learning.settings_masked import DiffusionConfig
from pipeline.model.denoiser import Denoiser
from pipeline.model.transformer import Transformer
from pipeline.params import main
from pipeline.streams import records
from pipeline.streams.batch import TokenBatch
from pipeline.streams.corpus import CorpusStream
from pipeline.streams.examples import ExampleStream, PlainExamples, encoded
from pipeline.streams.noised import Noise, NoisedBatch, WindowStream
from pipeline.streams.records import Problem
from pipeline.text.tokenizer import Tokenizer
from pipeline.work import Job

INITS = ("code", "scratch")


@dataclass(frozen=True, kw_only=True)
class Params:
    """The block `diffusion`; its training keys are those of DiffusionConfig."""

    init: str = "code"  # the causal model; or scratch: fresh weights in its shape
    noise: Noise = field(default_factory=Noise)
    fit: DiffusionConfig

    def __post_init__(self) -> None:
        """Refuse an unknown start, and blocks of a model that was causal."""
        if self.init not in INITS:
            raise ValueError(f"init: expected one of {', '.join(INITS)}, got {self.init!r}")
        if self.noise.block_size and self.init != "scratch":
            raise ValueError(
                f"block_size: expected 0 with init {self.init}; block diffusion is trained from init: scratch"
            )
        if self.noise.block_size and self.fit.max_new_tokens % self.noise.block_size:
            raise ValueError(f"block_size: expected a divisor of max_new_tokens ({self.fit.max_new_tokens}), got {self.noise.block_size}")  # fmt: skip


def run(
    params: Params, job: Job, *, base: Path, code: Path, problems: Path, out: Path, control: Path, trace: Path
) -> None:
    """Train both models and save the directories `out` and `control`."""
    config = params.fit
    causal, tokenizer = checkpoint.load(base)
    model = begin(params, causal, tokenizer, job.seed)
    anneal = config.anneal_steps if params.init == "code" else 0
    corpus = CorpusStream(code, tokenizer, context=config.context, tokens_per_step=config.tokens_per_step, seed=job.seed,
                          cache=job.folder.parent) if config.adapt_steps else None  # fmt: skip
    windows = corpus and WindowStream(corpus, params.noise, name=code.name, seed=job.seed, anneal_steps=anneal,
                                      byte_lengths=tokenizer.byte_lengths)  # fmt: skip
    examples = ExampleStream(problems, tokenizer, model.traits, params.noise, rows=config.sft_examples, seed=job.seed,
                             max_prompt=config.max_prompt, max_new=config.max_new_tokens,
                             norm=config.sft_norm) if config.sft_epochs else None  # fmt: skip
    per = "tokens" if config.sft_norm == "tokens" else "rows"
    phases = Phases(job)
    if windows:
        gate = first_steps_masked.first_scratch(model.config.vocab_size) if params.init == "scratch" else None
        fit(
            model,
            windows,
            adapt_loss,
            config.adapting,
            phases.begin("adapt"),
            watchers=Watchers(first=gate),
            last=False,
        )
    if examples:
        fit(model, examples, lambda m, b: masked_loss(m, b, per=per), config.tuning, phases.begin("sft"), last=False)
    if corpus:
        fit(causal, corpus, causal_loss, config.adapting, phases.begin("control_adapt", prefix="control/"),
            last=not examples)  # fmt: skip
    if examples:
        fit(causal, PlainExamples(examples, tokenizer), causal_loss, config.tuning,
            phases.begin("control_sft", prefix="control/"))  # fmt: skip
    denoisers.save(out, model, tokenizer, job.lineage)
    traces.write([out / "trace.json", trace], model, tokenizer, held_out(problems, tokenizer), length=traced(params),
                 block=params.noise.block_size or None)  # fmt: skip
    checkpoint.save(control, causal, tokenizer, job.lineage)


def begin(params: Params, causal: Transformer, tokenizer: Tokenizer, seed: int) -> Denoiser:
    """The model that is trained."""
    if params.init == "scratch":
        return denoisers.from_scratch(causal, tokenizer, device.generator("diffusion", seed),
                                      block_size=params.noise.block_size)  # fmt: skip
    return denoisers.from_causal(causal, tokenizer)


def held_out(problems: Path, tokenizer: Tokenizer) -> list[Asked]:
    """The problems of the validation split, as prompts."""
    found = records.read(problems / "val.jsonl", Problem)
    return [
        Asked(problem.id, problem.question, encoded(problem, tokenizer).prompt) for problem in found if problem.answer
    ]


def traced(params: Params) -> int:
    """The canvas of the trace: a short one, of whole blocks."""
    size = params.noise.block_size or 1
    return max(size, min(traces.CANVAS, params.fit.max_new_tokens) // size * size)


def masked_loss(model: Denoiser, batch: NoisedBatch, *, per: str) -> Loss:
    """Cross-entropy under the masks."""
    return objectives_masked.masked_cross_entropy(scoring_masked.masked_logprobs(model, batch.noised), batch.weights, per=per)  # fmt: skip


def adapt_loss(model: Denoiser, batch: NoisedBatch) -> Loss:
    """The same, a mean over all tokens that might have been masked."""
    return masked_loss(model, batch, per="tokens")


def causal_loss(model: Transformer, batch: TokenBatch) -> Loss:
    """The control's: next tokens."""
    return Loss([Term("loss", scoring.read_out(model, batch, objectives.next_token))])


if __name__ == "__main__":
    main(run, inputs={"base": "models/code", "code": "data/tokens/code", "problems": "data/problems"},
         outs={"out": "models/diffusion", "control": "models/diffusion_control", "trace": "metrics/traces/diffusion.json"}, trains=True)  # fmt: skip
