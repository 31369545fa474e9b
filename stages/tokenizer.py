"""Stage tokenizer: train a byte-level BPE tokenizer on the code and text corpora, or adopt a checkpoint's.

    data/raw/{text,code} (+ models/base) -> data/tokenizer  (Sennrich et al. 2016, arXiv:1508.07909; bytes as in GPT-2)

If the code corpus has repositories, the tokenizer gets the control tokens that separate their files.

A model continued from a checkpoint (`language.base: base`) keeps the checkpoint's tokenizer, with the missing control
tokens added by stage base. In this case, nothing is trained here, and `vocab_size` is the checkpoint's.

The stage reports bytes per token on held-out documents of each corpus: the more bytes per token, the fewer tokens to
read and to generate. Only `vocab_size` of the model file is tracked, so changing width or depth does not retrain the
tokenizer.
"""

import itertools
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.ingest import shards
from pipeline.model.config import SCRATCH
from pipeline.run.errors import DataError
from pipeline.run.stage import main
from pipeline.run.workdir import Job
from pipeline.text.tokenizer import Tokenizer

CHARACTERS = 10_000  # per document, so that a few giant files do not dominate the vocabulary
HELD_OUT_BYTES = 2_000_000  # per val split of a corpus, for the report


@dataclass(frozen=True, kw_only=True)
class Params:
    """Block `tokenizer` of params.yaml."""

    vocab_size: int = field(metadata={"from": "model.vocab_size"})
    """Number of token ids, a multiple of 64; set in the model file."""
    sample_mb: float
    """Size of the text sample for learning the merges, in 10^6 bytes."""
    text_share: float
    """Fraction of the sample from the text corpus; the rest is code."""
    base: str = field(metadata={"from": "language.base"})
    """scratch: train a tokenizer; base: use your own checkpoint's tokenizer."""

    def __post_init__(self) -> None:
        """Raises ValueError for an empty sample or an invalid share."""
        if self.sample_mb <= 0:
            raise ValueError(f"sample_mb: expected more than 0, found {self.sample_mb}")
        if not 0 <= self.text_share <= 1:
            raise ValueError(f"text_share: expected a fraction in [0, 1], found {self.text_share}")


def run(params: Params, job: Job, *, base: Path, text: Path, code: Path, out: Path) -> None:
    """Train on a sample of both corpora, or use the tokenizer of `base`; write the folder `out`."""
    tokenizer = learnt(params, text, code) if params.base == SCRATCH else Tokenizer.load(base)
    tokenizer.save(out)
    ratios = {name: bytes_per_token(tokenizer, folder) for name, folder in (("text", text), ("code", code))}
    job.report(
        vocab_size=tokenizer.vocab_size,
        spare_tokens=sum(not literal for literal in tokenizer.token_bytes),
        bytes_per_token={name: ratio for name, ratio in ratios.items() if ratio is not None},
    )


def learnt(params: Params, text: Path, code: Path) -> Tokenizer:
    """Train a new tokenizer on a sample of both corpora. Raises DataError if both are empty."""
    size = params.sample_mb * 1e6
    sample = itertools.chain(
        shards.texts(text, "train", int(size * params.text_share), CHARACTERS),
        shards.texts(code, "train", int(size * (1 - params.text_share)), CHARACTERS),
    )
    first = next(sample, None)
    if first is None:
        raise DataError(
            "there is no text to train a tokenizer on: text and code are both empty. List files for one of them in "
            "conf/data/files.yaml, or `packages` (dvc exp run -S 'conf/data/files.yaml:code=[packages]'), or start "
            "from a checkpoint, which has its own tokenizer (language.base=base)"
        )
    repositories = shards.has_contexts(code)
    return Tokenizer.train(itertools.chain([first], sample), params.vocab_size, repositories=repositories)


def bytes_per_token(tokenizer: Tokenizer, corpus: Path) -> float | None:
    """UTF-8 bytes per token over (the beginning of) the corpus's val split; None if the split is empty."""
    num_bytes = num_tokens = 0
    for text in shards.texts(corpus, "val", HELD_OUT_BYTES, CHARACTERS):
        num_bytes += len(text.encode())
        num_tokens += len(tokenizer.encode(text))
    return num_bytes / num_tokens if num_tokens else None


if __name__ == "__main__":
    main(
        run,
        inputs={"base": "models/{base}", "text": "data/raw/text", "code": "data/raw/code"},
        outs={"out": "data/tokenizer"},
        seed="data_seed",
    )
