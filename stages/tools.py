"""Stage tools: supervised fine-tuning on dialogues with tool calls, programming problems and stories.

    models/code + data/dialogues -> models/tools

The loss runs over what the assistant says (text, calls, end of turn) and over nothing else.
"""

from dataclasses import dataclass
from pathlib import Path

from pipeline import checkpoint
from pipeline.learning import first_steps, objectives, scoring
from pipeline.learning.fit import fit
from pipeline.learning.objectives import Loss, Term
from pipeline.learning.settings import TuneConfig
from pipeline.model.transformer import Transformer
from pipeline.params import main
from pipeline.streams.batch import TokenBatch
from pipeline.streams.dialogues import DialogueStream
from pipeline.work import Job


@dataclass(frozen=True, kw_only=True)
class Params:
    """The block `tools`; its training keys are those of TuneConfig."""

    fit: TuneConfig


def run(params: Params, job: Job, *, base: Path, dialogues: Path, out: Path) -> None:
    """Fine-tune `base` on the assistant's turns and save the model directory `out`."""
    model, tokenizer = checkpoint.load(base)
    model.neftune_alpha = params.fit.neftune_alpha
    stream = DialogueStream(dialogues, tokenizer, context=params.fit.context, tokens_per_step=params.fit.tokens_per_step,
                            seed=job.seed)  # fmt: skip
    first_steps.first_mask(stream.batch(0, params.fit.context, stream.rows(0, params.fit.context)), tokenizer)

    def loss(model: Transformer, batch: TokenBatch) -> Loss:
        return Loss([Term("loss", scoring.read_out(model, batch, objectives.next_token))])

    fit(model, stream, loss, params.fit, job)
    checkpoint.save(out, model, tokenizer, job.lineage, precision=params.fit.save_precision)


if __name__ == "__main__":
    main(run, inputs={"base": "models/code", "dialogues": "data/dialogues"}, outs={"out": "models/tools"}, trains=True)
