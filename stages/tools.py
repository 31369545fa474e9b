"""Stage tools: supervised fine-tuning on dialogues with tool calls, programming problems and stories.

    models/code + data/dialogues (+ data/tokens) -> models/tools

The loss covers only the assistant's tokens: text, calls, end of turn. In the last steps, while the rate decays, some of
the rows are rehearsal: text and code of the stages before, with a loss on every token, so that the model keeps what it
learned from them.
"""

from dataclasses import dataclass, field
from pathlib import Path

from pipeline.batches.batch import TokenBatch
from pipeline.batches.corpus import AnnealedStream, CorpusStream, MixtureStream, read_meta
from pipeline.batches.dialogues import DialogueStream
from pipeline.ingest import records
from pipeline.learning import gates, losses
from pipeline.learning.fit import Watchers, fit
from pipeline.learning.losses import Loss, Term
from pipeline.learning.settings import FitConfig, FullTraining, Neftune
from pipeline.model import checkpoint
from pipeline.model.transformer import Transformer
from pipeline.run.errors import ModelError
from pipeline.run.stage import main
from pipeline.run.tracking import say
from pipeline.run.workdir import Job
from pipeline.text.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Params:
    """The block `tools`; its keys are those of FitConfig, FullTraining and Neftune."""

    base: str = "code"
    """Where training begins: a model of models/; base: a checkpoint of your own (stage base)."""
    rehearse: str = "tokens"
    """tokens: mix in rows of data/tokens; none: dialogues alone."""
    rehearse_from: float
    """Share of the steps after which they are mixed in; 0: from the start."""
    dialogue_weight: int
    """Then rows of dialogues."""
    text_weight: int
    """For so many rows of text; 0: no text."""
    code_weight: int
    """And so many rows of code; 0: no code."""
    fit: FitConfig
    full: FullTraining = field(default_factory=FullTraining)
    neftune: Neftune = field(default_factory=Neftune)

    def __post_init__(self) -> None:
        if self.dialogue_weight < 1 or self.text_weight < 0 or self.code_weight < 0:
            raise ValueError("expected dialogue_weight >= 1, text_weight >= 0, code_weight >= 0")
        if not 0 <= self.rehearse_from <= 1:
            raise ValueError(f"rehearse_from: expected a share in [0, 1], got {self.rehearse_from}")


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
    corpora = [(text, params.text_weight), (code, params.code_weight)]
    if rehearsed := _rehearsed(params, job, corpora, tokenizer):
        at = round(params.rehearse_from * params.fit.resolve_steps(conversations.tokens_per_epoch))
        mixed = MixtureStream([(params.dialogue_weight, conversations), *rehearsed])
        stream = AnnealedStream(conversations, mixed, at=at)

    def loss(model: Transformer, batch: TokenBatch) -> Loss:
        return Loss([Term("loss", losses.read_out(model, batch, losses.next_token))])

    def save(folder: Path) -> None:
        checkpoint.save(folder, model, tokenizer, job.lineage, precision=params.full.save_precision)

    fit(model, stream, loss, params.fit, job, watchers=Watchers(save=save, new_level_at=at))
    save(out)


def _rehearsed(
    params: Params, job: Job, corpora: list[tuple[Path, int]], tokenizer: Tokenizer
) -> list[tuple[int, CorpusStream]]:
    """The corpora to mix in, with their weights: those that there are and that fill a batch.

    Raises ModelError where they are encoded with another tokenizer.
    """
    rehearsed: list[tuple[int, CorpusStream]] = []
    for folder, weight in corpora:
        if not weight or not (folder / "meta.json").is_file():
            continue  # data/none has none
        meta = read_meta(folder)
        tokens = int(meta["splits"]["train"]["tokens"])
        if tokens < params.fit.tokens_per_step:
            say(f"{job.name}: {folder} is not rehearsed: {tokens} tokens do not fill a batch")
            continue
        if meta["tokenizer"] != tokenizer.hash:
            raise ModelError(
                f"{folder} cannot be rehearsed: it was encoded with another tokenizer than that of the model"
                f" {params.base}; set tools.rehearse=none, or for a checkpoint of your own language.base=base"
            )
        stream = CorpusStream(
            folder,
            tokenizer,
            context=params.fit.context,
            tokens_per_step=params.fit.tokens_per_step,
            seed=job.seed,
            cache=job.folder.parent,
        )
        rehearsed.append((weight, stream))
    return rehearsed


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
