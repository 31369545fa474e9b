"""Stage diffusion: convert the causal code model into a masked-diffusion model and fine-tune it on problems, along with
a causal control.

    models/code + data/tokens/code + data/problems -> models/diffusion, models/diffusion_control
        (Gong et al. 2024, arXiv:2410.17891; Nie et al. 2025, arXiv:2502.09992)

The model first trains on masked windows of code, while attention is annealed from causal to full, then on problems with
only the answers masked. The control is the causal model trained on the same windows and examples, in the same order,
with cross-entropy. A causal model learns this data in far fewer passes (Prabhudesai et al. 2025, arXiv:2507.15857), so
each control run ends after `control_steps` steps and keeps the weights with the lowest validation loss: the models are
compared at their best on this data, not at equal compute. `init: scratch` starts from random weights; with a
`block_size`, it trains a block-diffusion model (arXiv:2503.09573). A base that is already a masked-diffusion model
(Dream, DiffuCoder, LLaDA as models/base) is trained further, without a causal control.
"""

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from pipeline.batches.batch import TokenBatch
from pipeline.batches.corpus import CorpusStream, is_empty
from pipeline.diffusion import files, sampling, training
from pipeline.diffusion.batches import (
    ExampleSplit,
    ExampleStream,
    Noise,
    NoisedBatch,
    PlainExamples,
    WindowStream,
    encoded,
)
from pipeline.diffusion.model import Denoiser, Traits
from pipeline.diffusion.sampling import EncodedPrompt
from pipeline.diffusion.training import DiffusionConfig
from pipeline.ingest import records
from pipeline.ingest.records import Problem
from pipeline.learning import losses
from pipeline.learning.fit import Watchers, fit
from pipeline.learning.losses import Loss, Term
from pipeline.learning.pretraining import Phases
from pipeline.model import checkpoint
from pipeline.model.transformer import Transformer
from pipeline.run import device
from pipeline.run.errors import ConfigError
from pipeline.run.stage import main
from pipeline.run.tracking import say
from pipeline.run.workdir import Job
from pipeline.text.tokenizer import Tokenizer

INITS = ("base", "scratch")
NO_CONTROL = "No causal control: the model that stage diffusion started from is itself a masked-diffusion model.\n"


@dataclass(frozen=True, kw_only=True)
class Params:
    """The `diffusion` block; its training keys are those of DiffusionConfig."""

    base: str = "code"
    """Model to start from: a folder in models/, or `base` for your own checkpoint (stage base)."""
    init: str = "base"
    """base: start from the base model's weights; scratch: from random weights of the same shape."""
    noise: Noise = field(default_factory=Noise)
    fit: DiffusionConfig

    def __post_init__(self) -> None:
        """Raises ValueError for an unknown `init`, and for a block size that does not suit the other keys."""
        if self.init not in INITS:
            raise ValueError(f"init: expected one of {', '.join(INITS)}, got {self.init!r}")
        if self.noise.block_size and self.init != "scratch":
            raise ValueError(
                f"block_size: expected 0 with `init: {self.init}`, because block diffusion needs `init: scratch`"
            )
        if self.noise.block_size and self.fit.max_new_tokens % self.noise.block_size:
            raise ValueError(
                f"block_size: expected a divisor of max_new_tokens ({self.fit.max_new_tokens}), got"
                f" {self.noise.block_size}"
            )


def run(
    params: Params, job: Job, *, base: Path, code: Path, problems: Path, out: Path, control: Path, trace: Path
) -> None:
    """Train both models and save the directories `out` and `control`."""
    config = params.fit
    causal = None
    if files.opens(base):
        model, tokenizer = files.load(base)
        if params.init == "scratch":
            raise ConfigError(
                f"init: expected `base`, because {base} is already a masked-diffusion model; got `scratch`"
            )
    else:
        causal, tokenizer = checkpoint.load(base)
        model = _masked(params, causal, tokenizer, job.seed)
    streams = Streams.of(params, job, code, problems, tokenizer, model.traits, anneal=causal is not None)
    if not (streams.windows or streams.examples):
        job.report(passed_through=str(problems))
        say(f"{job.name}: {code} and {problems} have nothing to train on; {base} is converted as is")
    per = "tokens" if config.sft_norm == "tokens" else "rows"
    phases = Phases(job)
    if streams.windows:
        gate = training.first_scratch(model.config.vocab_size) if params.init == "scratch" else None
        fit(
            model,
            streams.windows,
            adapt_loss,
            config.adapting,
            phases.begin("adapt"),
            watchers=Watchers(first=gate),
            last=causal is None and not streams.examples,
        )
    if streams.examples:
        last = causal is None
        fit(model, streams.examples, partial(masked_loss, per=per), config.tuning, phases.begin("sft"), last=last)
    if causal is not None:
        train_control(causal, tokenizer, streams, config, phases)
    files.save(out, model, tokenizer, job.lineage)
    sampling.write(
        [out / "trace.json", trace],
        model,
        tokenizer,
        _validation_prompts(problems, tokenizer),
        length=_trace_length(params),
        block=params.noise.block_size or None,
    )
    if causal is not None:
        checkpoint.save(control, causal, tokenizer, job.lineage)
    else:
        control.mkdir()
        (control / "README.md").write_text(NO_CONTROL, encoding="utf-8")


def train_control(
    model: Transformer, tokenizer: Tokenizer, streams: "Streams", config: DiffusionConfig, phases: Phases
) -> None:
    """Train the causal control on the same windows and examples."""
    if streams.corpus:
        fit(
            model,
            streams.corpus,
            causal_loss,
            config.control_adapting,
            phases.begin("control_adapt", prefix="control/"),
            last=not streams.examples,
        )
    if streams.examples:
        fit(
            model,
            PlainExamples(streams.examples, tokenizer),
            causal_loss,
            config.control_tuning,
            phases.begin("control_sft", prefix="control/"),
        )


@dataclass(frozen=True)
class Streams:
    """The training data, encoded with one tokenizer; None for a phase without steps."""

    corpus: CorpusStream | None
    windows: WindowStream | None
    examples: ExampleStream | None

    @classmethod
    def of(
        cls, params: Params, job: Job, code: Path, problems: Path, tokenizer: Tokenizer, traits: Traits, *, anneal: bool
    ) -> "Streams":
        """Build the streams. `anneal`: change attention gradually from causal to full. Raises ModelError if the
        code was encoded with a different tokenizer, and DataError for invalid data.
        """
        config, corpus, windows, examples = params.fit, None, None, None
        if config.adapt_steps and not is_empty(code):
            corpus = CorpusStream(
                code,
                tokenizer,
                context=config.context,
                tokens_per_step=config.tokens_per_step,
                seed=job.seed,
                cache=job.folder.parent,
            )
            anneal_steps = config.anneal_steps if anneal and params.init == "base" else 0
            windows = WindowStream(
                corpus,
                params.noise,
                name=code.name,
                seed=job.seed,
                anneal_steps=anneal_steps,
                byte_lengths=tokenizer.byte_lengths,
            )
        if config.sft_epochs and not records.is_empty(problems / "train.jsonl"):
            lengths = {"max_prompt": config.max_prompt, "max_new": config.max_new_tokens}
            train, val = (
                ExampleSplit(problems / f"{split}.jsonl", tokenizer, traits, **lengths) for split in ("train", "val")
            )
            examples = ExampleStream(
                train, val, traits, params.noise, rows=config.sft_examples, norm=config.sft_norm, seed=job.seed
            )
        return cls(corpus, windows, examples)


def _masked(params: Params, causal: Transformer, tokenizer: Tokenizer, seed: int) -> Denoiser:
    """Convert a causal model into the masked-diffusion model to train; with `init: scratch`, only its shape is kept."""
    if params.init == "scratch":
        draws = device.generator("diffusion", seed)
        return files.from_scratch(causal, tokenizer, draws, block_size=params.noise.block_size)
    return files.from_causal(causal, tokenizer)


def _validation_prompts(problems: Path, tokenizer: Tokenizer) -> list[EncodedPrompt]:
    """The validation problems as prompts."""
    validation = records.read(problems / "val.jsonl", Problem)
    return [EncodedPrompt(p.id, p.question, encoded(p, tokenizer).prompt) for p in validation if p.answer]


def _trace_length(params: Params) -> int:
    """The length of the trace's canvas: short, and a multiple of the block size."""
    size = params.noise.block_size or 1
    return max(size, min(sampling.CANVAS, params.fit.max_new_tokens) // size * size)


def masked_loss(model: Denoiser, batch: NoisedBatch, *, per: str) -> Loss:
    """Cross-entropy of the masked tokens."""
    return training.masked_cross_entropy(training.masked_logprobs(model, batch.noised), batch.weights, per=per)


def adapt_loss(model: Denoiser, batch: NoisedBatch) -> Loss:
    """Cross-entropy of the masked tokens, averaged over all tokens that could have been masked."""
    return masked_loss(model, batch, per="tokens")


def causal_loss(model: Transformer, batch: TokenBatch) -> Loss:
    """Next-token cross-entropy, for the control."""
    return Loss([Term("loss", losses.read_out(model, batch, losses.next_token))])


if __name__ == "__main__":
    main(
        run,
        inputs={"base": "models/{base}", "code": "data/tokens/code", "problems": "data/problems"},
        outs={
            "out": "models/diffusion",
            "control": "models/diffusion_control",
            "trace": "metrics/traces/diffusion.json",
        },
        trains=True,
    )
