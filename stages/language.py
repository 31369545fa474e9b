"""Stage language: pre-train a transformer from scratch on running text.

    data/tokenizer + data/tokens/text -> models/language

Next-token cross-entropy over documents packed into rows; nothing is predicted across a document border. The model's size
is a file of conf/model/ (`model: nano` in params.yaml).
"""

from dataclasses import dataclass
from pathlib import Path

from pipeline import checkpoint
from pipeline.device import generator
from pipeline.learning import objectives, scoring
from pipeline.learning.fit import fit
from pipeline.learning.objectives import Loss, Term
from pipeline.learning.settings import FitConfig
from pipeline.model.config import ModelConfig
from pipeline.model.induction import induction_heads, relate_variants
from pipeline.model.transformer import Transformer
from pipeline.params import group, main
from pipeline.streams.batch import TokenBatch
from pipeline.streams.corpus import CorpusStream
from pipeline.text.tokenizer import Tokenizer
from pipeline.work import Job


@dataclass(frozen=True, kw_only=True)
class Params:
    """The block `language`; its training keys are those of FitConfig."""

    induction_heads: bool  # fresh weights that can copy from the context (pipeline/model/induction.py); false: GPT-2's
    model: ModelConfig = group("model")
    fit: FitConfig


def run(params: Params, job: Job, *, tokenizer: Path, tokens: Path, out: Path) -> None:
    """Train from random weights and save the model directory `out`."""
    text = Tokenizer.load(tokenizer)
    weights = generator("language", "weights", job.seed)
    model = Transformer(params.model, weights)
    if params.induction_heads:
        relate_variants(model, text.token_bytes, weights)
        induction_heads(model, weights)
    stream = CorpusStream(tokens, text, context=params.fit.context, tokens_per_step=params.fit.tokens_per_step,
                          seed=job.seed, cache=job.folder.parent)  # fmt: skip

    def loss(model: Transformer, batch: TokenBatch) -> Loss:
        return Loss([Term("loss", scoring.read_out(model, batch, objectives.next_token))])

    fit(model, stream, loss, params.fit, job, from_scratch=True)
    job.report(parameters=model.num_parameters())
    checkpoint.save(out, model, text, job.lineage)


if __name__ == "__main__":
    main(run, inputs={"tokenizer": "data/tokenizer", "tokens": "data/tokens/text"}, outs={"out": "models/language"},
         trains=True)  # fmt: skip
