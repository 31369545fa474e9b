"""Stage tools: supervised fine-tuning on dialogues with tool calls, programming problems and stories.

    models/code + data/dialogues -> models/tools

The loss covers only the assistant's tokens: text, calls, end of turn.
"""

from dataclasses import dataclass, field
from pathlib import Path

from pipeline.batches.batch import TokenBatch
from pipeline.batches.dialogues import DialogueStream
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
    """The block `tools`; its keys are those of FitConfig, FullTraining and Neftune."""

    base: str = "code"
    """Where training begins: a model of models/; base: a checkpoint of your own (stage base)."""
    fit: FitConfig
    full: FullTraining = field(default_factory=FullTraining)
    neftune: Neftune = field(default_factory=Neftune)


def run(params: Params, job: Job, *, base: Path, dialogues: Path, out: Path) -> None:
    """Fine-tune `base` on the assistant's turns and save the model directory `out`."""
    if records.is_empty(dialogues / "train.jsonl"):
        return checkpoint.pass_through(base, out, job, dialogues)
    model, tokenizer = checkpoint.load(base)
    model.dropout = params.full.dropout
    model.neftune_alpha = params.neftune.neftune_alpha
    stream = DialogueStream(
        dialogues, tokenizer, context=params.fit.context, tokens_per_step=params.fit.tokens_per_step, seed=job.seed
    )
    gates.first_mask(stream.batch(0, params.fit.context, stream.rows(0, params.fit.context)), tokenizer)

    def loss(model: Transformer, batch: TokenBatch) -> Loss:
        return Loss([Term("loss", losses.read_out(model, batch, losses.next_token))])

    def save(folder: Path) -> None:
        checkpoint.save(folder, model, tokenizer, job.lineage, precision=params.full.save_precision)

    fit(model, stream, loss, params.fit, job, watchers=Watchers(save=save))
    save(out)


if __name__ == "__main__":
    main(
        run, inputs={"base": "models/{base}", "dialogues": "data/dialogues"}, outs={"out": "models/tools"}, trains=True
    )
