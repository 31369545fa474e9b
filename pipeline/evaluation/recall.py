"""What a model knows by heart: exact match of greedy answers to questions about invented facts.

    test     facts that were trained, asked in a wording that was not
    control  facts of the same kind that nobody has seen: what guessing gives

Intervals are Wilson's, 95 %; two models are compared on the same questions by a paired bootstrap.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.errors import DataError
from pipeline.evaluation.intervals import wilson
from pipeline.evaluation.suites import Result, Subject
from pipeline.generation.sampling import Completion, Sampling, generate
from pipeline.model.transformer import Transformer
from pipeline.streams import records
from pipeline.streams.facts import Asked, encoded
from pipeline.streams.records import Fact
from pipeline.text.tokenizer import Tokenizer

MORE = 4  # tokens that an answer may be longer than the right one


@dataclass(frozen=True)
class Recall:
    """Which answers were right."""

    asked: list[Asked]
    said: list[Completion]
    right: np.ndarray  # (n,) bool

    def measure(self) -> dict[str, Any]:
        """Exact match with its interval, and by attribute."""
        share = wilson(int(self.right.sum()), len(self.right))
        attributes = np.array([one.fact.attribute for one in self.asked])
        each = {str(name): float(self.right[attributes == name].mean()) for name in np.unique(attributes)}
        return {"n": len(self.right), "exact_match": share.value, "exact_match_low": share.low, "exact_match_high": share.high} | each  # fmt: skip


def questions(path: Path, tokenizer: Tokenizer, most: int) -> list[Asked]:
    """The first `most` facts of a split. Raises DataError."""
    if not path.is_file():
        raise DataError(f"{path}: expected facts here, found none; run dvc repro stage_tasks")
    return [encoded(fact, tokenizer) for fact in records.read(path, Fact)][:most]


def known(subject: Subject, folder: Path) -> Result:
    """The suite: facts that were trained in other words, and as `control` facts that nobody has seen."""
    result = Result()
    for split in ("test", "control"):
        asked = questions(folder / f"{split}.jsonl", subject.tokenizer, subject.settings.problems)
        found = recall(subject.model, subject.tokenizer, asked)
        result.numbers |= found.measure() if split == "test" else {split: found.measure()}
        for one, said, right in zip(asked, found.said, found.right, strict=True):
            text = subject.tokenizer.decode(said.ids)
            suite = "facts" if split == "test" else f"facts {split}"
            result.item(
                suite,
                f"{split}/{one.fact.id}",
                said,
                text,
                asked=asdict(one.fact),
                reference=one.fact.answer,
                right=int(right),
            )
    return result


def recall(model: Transformer, tokenizer: Tokenizer, asked: Sequence[Asked]) -> Recall:
    """Ask each question. The model is in evaluation mode."""
    longest = max((len(one.answer) for one in asked), default=1) + MORE
    said = generate(model, [one.prompt for one in asked], Sampling(max_new_tokens=longest), stop={tokenizer.end_of_text}, seeds=[0] * len(asked))  # fmt: skip
    right = [one.ids == asked[n].answer[:-1] and one.stop == "stop" for n, one in enumerate(said)]
    return Recall(list(asked), said, np.array(right, dtype=bool))
