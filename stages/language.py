"""Stage language: pretrain a transformer on text from scratch, or continue from a pretrained checkpoint.

    data/tokenizer + data/tokens/text (+ models/base) -> models/language

Next-token cross-entropy over documents packed into rows; nothing is predicted across document boundaries. From scratch,
a file in conf/model/ sets the model size (`model: nano` in params.yaml). `base: base` continues your own checkpoint,
with the tokenizer that stage tokenizer adopted from it; for this, use the learning rates of the `full` scale.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path

from pipeline.batches.corpus import CorpusStream, is_empty
from pipeline.learning.fit import fit
from pipeline.learning.pretraining import LossWeights, next_tokens
from pipeline.learning.settings import FitConfig, FullTraining
from pipeline.model import checkpoint
from pipeline.model.config import SCRATCH, ModelConfig
from pipeline.model.initialization import induction_heads, relate_variants
from pipeline.model.transformer import Transformer
from pipeline.run.config import group
from pipeline.run.device import generator, need_memory
from pipeline.run.stage import main
from pipeline.run.tracking import say
from pipeline.run.workdir import Job
from pipeline.text.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Params:
    """The `language` block; it also has the keys of FitConfig, FullTraining and LossWeights."""

    base: str = "scratch"
    """Model to start from: scratch for fresh weights, or `base` for your own checkpoint (stage base)."""
    induction_heads: bool
    """Initialize with an induction-head circuit (pipeline/model/initialization.py); false: as in GPT-2."""
    model: ModelConfig = group("model")
    weights: LossWeights = field(default_factory=LossWeights)
    fit: FitConfig
    full: FullTraining = field(default_factory=FullTraining)


def run(params: Params, job: Job, *, base: Path, tokenizer: Path, tokens: Path, out: Path) -> None:
    """Train fresh weights or the weights of `base`, and save the model directory `out`."""
    from_scratch, text = params.base == SCRATCH, Tokenizer.load(tokenizer)
    if not from_scratch and is_empty(tokens):
        return checkpoint.pass_through(base, out, job, tokens)
    if from_scratch:
        model = fresh(params, text, job.seed)
        if is_empty(tokens):
            say(f"{job.name}: {tokens} has nothing to train on; the weights stay random")
            job.report(passed_through=str(tokens))
            return checkpoint.save(out, model, text, job.lineage, precision=params.full.save_precision)
    else:
        model, own_tokenizer = checkpoint.load(base)
        checkpoint.same_tokenizer(own_tokenizer, text, str(base), str(tokenizer))
    model.dropout = params.full.dropout
    stream = CorpusStream(
        tokens,
        text,
        context=params.fit.context,
        tokens_per_step=params.fit.tokens_per_step,
        seed=job.seed,
        cache=job.folder.parent,
    )
    batches, loss, watchers = next_tokens(model, stream, params.weights, job, tokens=params.fit.validation.eval_tokens)

    def save(folder: Path) -> None:
        checkpoint.save(folder, model, text, job.lineage, precision=params.full.save_precision)

    fit(model, batches, loss, params.fit, job, from_scratch=from_scratch, watchers=replace(watchers, save=save))
    job.report(parameters=model.num_parameters())
    save(out)


def fresh(params: Params, text: Tokenizer, seed: int) -> Transformer:
    """Return a randomly initialized model of the selected size. Raises ConfigError if there is too little memory."""
    need_memory(4 * params.model.num_parameters, f"a model of {params.model.num_parameters:,} weights in float32")
    weights = generator("language", "weights", seed)
    model = Transformer(params.model, weights)
    if params.induction_heads:
        relate_variants(model, text.token_bytes, weights)
        induction_heads(model, weights)
    return model


if __name__ == "__main__":
    main(
        run,
        inputs={"base": "models/{base}", "tokenizer": "data/tokenizer", "tokens": "data/tokens/text"},
        outs={"out": "models/language"},
        trains=True,
    )
