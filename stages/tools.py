"""Stage tools: supervised fine-tuning on dialogues with tool calls, programming problems and stories.

    models/code + data/dialogues (+ data/tokens) -> models/tools

The loss covers only the assistant's tokens: text, calls, end of turn. In the last steps, while the learning rate
decays, some rows contain rehearsal data: text and code from earlier stages, with a loss on every token, to prevent
forgetting.
"""

from dataclasses import dataclass, field
from pathlib import Path

from pipeline.batches.batch import TokenBatch
from pipeline.batches.corpus import AnnealedStream
from pipeline.batches.dialogues import DialogueStream, Shares, rehearsing
from pipeline.ingest import records
from pipeline.learning import gates, losses
from pipeline.learning.fit import Watchers, fit
from pipeline.learning.losses import Loss, Term
from pipeline.learning.settings import FitConfig, FullTraining, Neftune
from pipeline.model import checkpoint
from pipeline.model.transformer import Transformer
from pipeline.run.stage import main
from pipeline.run.workdir import Job


@dataclass(frozen=True, kw_only=True)
class Params:
    """The `tools` block; it also has the keys of FitConfig, FullTraining and Neftune."""

    base: str = "code"
    """Model to start from: a folder in models/, or `base` for your own checkpoint (stage base)."""
    rehearse: str = "tokens"
    """tokens: mix in rows of data/tokens; none: only dialogues."""
    rehearse_from: float
    """Fraction of the steps after which these rows are mixed in; 0: from the start."""
    shares: Shares = field(default_factory=Shares)
    fit: FitConfig
    full: FullTraining = field(default_factory=FullTraining)
    neftune: Neftune = field(default_factory=Neftune)

    def __post_init__(self) -> None:
        if not 0 <= self.rehearse_from <= 1:
            raise ValueError(f"rehearse_from: expected a fraction in [0, 1], got {self.rehearse_from}")


def run(params: Params, job: Job, *, base: Path, dialogues: Path, text: Path, code: Path, out: Path) -> None:
    """Fine-tune `base` on the assistant's turns and save the model directory `out`."""
    if records.is_empty(dialogues / "train.jsonl"):
        return checkpoint.pass_through(base, out, job, dialogues)
    model, tokenizer = checkpoint.load(base)
    model.dropout = params.full.dropout
    model.neftune_alpha = params.neftune.neftune_alpha
    conversations = DialogueStream(
        dialogues, tokenizer, context=params.fit.context, tokens_per_step=params.fit.tokens_per_step, seed=job.seed
    )
    first = conversations.batch(0, params.fit.context, conversations.rows(0, params.fit.context))
    gates.first_mask(first, tokenizer)
    stream: DialogueStream | AnnealedStream = conversations
    at = None
    if mixed := rehearsing(conversations, params.shares, job, tokenizer, text=text, code=code, base=params.base):
        at = round(params.rehearse_from * params.fit.resolve_steps(conversations.tokens_per_epoch))
        stream = AnnealedStream(conversations, mixed, at=at)

    def loss(model: Transformer, batch: TokenBatch) -> Loss:
        return Loss([Term("loss", losses.read_out(model, batch, losses.next_token))])

    def save(folder: Path) -> None:
        checkpoint.save(folder, model, tokenizer, job.lineage, precision=params.full.save_precision)

    fit(model, stream, loss, params.fit, job, watchers=Watchers(save=save, new_level_at=at))
    save(out)


if __name__ == "__main__":
    main(
        run,
        inputs={
            "base": "models/{base}",
            "dialogues": "data/dialogues",
            "text": "data/{rehearse}/text",
            "code": "data/{rehearse}/code",
        },
        outs={"out": "models/tools"},
        trains=True,
    )
