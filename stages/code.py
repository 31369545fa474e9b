"""Stage code: continue training the language model on source code, with fill-in-the-middle.

    models/language + data/tokens/code (+ data/tokens/text) -> models/code      (Bavarian et al. 2022, arXiv:2207.14255)

A fraction of the code pieces is split into three parts and reordered, so that the model learns to fill in code between
a prefix and a suffix. A fraction of the batches is text from the language stage, so that the model does not forget the
stories.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path

from pipeline.batches.corpus import CorpusStream, FillInMiddle, MixtureStream, is_empty
from pipeline.learning.fit import fit
from pipeline.learning.pretraining import LossWeights, next_tokens
from pipeline.learning.settings import FitConfig, FullTraining
from pipeline.model import checkpoint
from pipeline.run.stage import main
from pipeline.run.workdir import Job


@dataclass(frozen=True, kw_only=True)
class Params:
    """The `code` block; it also has the keys of FitConfig, FullTraining and LossWeights."""

    base: str = "language"
    """Model to start from: a folder in models/, or `base` for your own checkpoint (stage base)."""
    fim_rate: float
    """Fraction of code pieces turned into fill-in-the-middle examples."""
    fim_syntax: float | None = None
    """Fraction of these whose middle is a function body, statement or full lines; none: 0.5 in repositories, else 0."""
    code_weight: int
    """Code batches per `text_weight` batches of text."""
    text_weight: int
    """Text batches per `code_weight` batches of code; 0: code only."""
    weights: LossWeights = field(default_factory=LossWeights)
    fit: FitConfig
    full: FullTraining = field(default_factory=FullTraining)

    def __post_init__(self) -> None:
        shares = (self.fim_rate, self.fim_syntax or 0.0)
        if not all(0 <= share <= 1 for share in shares) or self.code_weight < 1 or self.text_weight < 0:
            raise ValueError("expected fim_rate and fim_syntax in [0, 1], code_weight >= 1, text_weight >= 0")


def run(params: Params, job: Job, *, base: Path, code: Path, text: Path, out: Path) -> None:
    """Continue training `base` on code and save the model directory `out`."""
    if is_empty(code):
        return checkpoint.pass_through(base, out, job, code)
    model, tokenizer = checkpoint.load(base)
    model.dropout = params.full.dropout

    def corpus(folder: Path, fim: FillInMiddle) -> CorpusStream:
        return CorpusStream(
            folder,
            tokenizer,
            context=params.fit.context,
            tokens_per_step=params.fit.tokens_per_step,
            seed=job.seed,
            fim=fim,
            cache=job.folder.parent,
        )

    stream = corpus(code, FillInMiddle(params.fim_rate, params.fim_syntax))
    if params.text_weight and not is_empty(text):
        stream = MixtureStream([(params.code_weight, stream), (params.text_weight, corpus(text, FillInMiddle()))])
    batches, loss, watchers = next_tokens(model, stream, params.weights, job, tokens=params.fit.validation.eval_tokens)

    def save(folder: Path) -> None:
        checkpoint.save(folder, model, tokenizer, job.lineage, precision=params.full.save_precision)

    fit(model, batches, loss, params.fit, job, watchers=replace(watchers, save=save))
    save(out)


if __name__ == "__main__":
    main(
        run,
        inputs={"base": "models/{base}", "code": "data/tokens/code", "text": "data/tokens/text"},
        outs={"out": "models/code"},
        trains=True,
    )
