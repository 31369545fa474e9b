"""What texts of each source choose from a memory: shares of the chapters, and a map of one text of each.

    chapters, top_k
    use      per layer and source: the share of its choices that fell on each chapter
    maps     per source, of the last layer that reads: the text in pieces, one of each unit, with its chapters and their
             weights

Chapters that all sources use alike know nothing of sources. Written once by the stage that trained the memory; the
report draws it.

What a model knows by heart: exact match of greedy answers to questions about invented facts.

    test     facts that were trained, asked in a wording that was not
    control  facts of the same kind that nobody has seen: what guessing gives

Intervals are Wilson's, 95 %; two models are compared on the same questions by a paired bootstrap.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pipeline.batches.batch import TokenBatch
from pipeline.batches.dialogues import Asked, encoded
from pipeline.evaluation.intervals import wilson
from pipeline.evaluation.suites import Subject, SuiteResult
from pipeline.generation.sampling import Completion, Sampling, generate
from pipeline.ingest import records
from pipeline.ingest.records import Fact
from pipeline.learning import losses
from pipeline.memory.losses import chosen_counts
from pipeline.memory.model import Memory, Reading, cut
from pipeline.model.transformer import Transformer
from pipeline.run.errors import DataError
from pipeline.text.tokenizer import Tokenizer

MAPPED = 240  # tokens of a text that are shown


@torch.no_grad()
def routing(model: Transformer, tokenizer: Tokenizer, sources: Mapping[str, Sequence[TokenBatch]]) -> dict[str, Any]:
    """As in the module; a source without batches is left out."""
    memory = model.memory
    assert isinstance(memory, Memory)
    was_training = model.training
    model.train(False)
    use: list[dict[str, Any]] = []
    maps: list[dict[str, Any]] = []
    for source, batches in sources.items():
        readings = [read(model, batch) for batch in batches]
        for layer in readings[0].routed if readings else ():
            counts = torch.stack([chosen_counts(one.routed[layer]) for one in readings]).sum(0)
            use.append({"layer": layer, "source": source, "shares": (counts / counts.sum().clamp_min(1)).tolist()})
        if readings and readings[0].routed:
            maps.append(mapped(memory, tokenizer, source, batches[0], readings[0]))
    model.train(was_training)
    return {
        "chapters": memory.config.chapters,
        "top_k": memory.config.top_k,
        "routing": memory.config.routing,
        "use": use,
        "maps": maps,
    }


def read(model: Transformer, batch: TokenBatch) -> Reading:
    """What a batch chooses."""
    moved = batch.to(model.model.embed_tokens.weight.device)
    reading = Reading(trained=moved.targets >= 0)
    losses.read_out(model, moved, losses.next_token, reading)
    return reading


def mapped(memory: Memory, tokenizer: Tokenizer, source: str, batch: TokenBatch, reading: Reading) -> dict[str, Any]:
    """The first tokens of a batch, by units."""
    config, layer = memory.config, max(reading.routed)
    units = cut(
        batch.positions.flatten(),
        routing=config.routing,
        window=config.window,
        padding=batch.documents.flatten() < 0,
        trained=batch.targets.flatten() >= 0,
    )
    unit_of = (units.back // units.places.shape[1]).tolist()
    ids, routed = batch.input_ids.flatten().tolist(), reading.routed[layer]
    chosen, weights = routed.chosen.tolist(), routed.log_weights.float().exp().tolist()
    kept = [place for place in range(min(len(ids), MAPPED)) if unit_of[place] < len(chosen)]
    pieces = []
    for unit, places in groupby(kept, key=lambda place: unit_of[place]):
        text = tokenizer.decode([ids[place] for place in places], skip_special=False)
        pieces.append(
            {"text": text, "chapters": chosen[unit], "weights": [round(weight, 3) for weight in weights[unit]]}
        )
    return {"layer": layer, "source": source, "pieces": pieces}


# -- recall ------------------------------------------------------------------------------------------------------------


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
        return {
            "n": len(self.right),
            "exact_match": share.value,
            "exact_match_low": share.low,
            "exact_match_high": share.high,
        } | each


def questions(path: Path, tokenizer: Tokenizer, most: int) -> list[Asked]:
    """The first `most` facts of a split. Raises DataError."""
    if not path.is_file():
        raise DataError(f"{path}: expected facts here, found none; run dvc repro stage_tasks")
    return [encoded(fact, tokenizer) for fact in records.read(path, Fact)][:most]


def known(subject: Subject, folder: Path) -> SuiteResult:
    """The suite: facts that were trained in other words, and as `control` facts that nobody has seen."""
    result = SuiteResult()
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
    said = generate(
        model,
        [one.prompt for one in asked],
        Sampling(max_new_tokens=longest),
        stop={tokenizer.end_of_text},
        seeds=[0] * len(asked),
    )
    right = [one.ids == asked[n].answer[:-1] and one.stop == "stop" for n, one in enumerate(said)]
    return Recall(list(asked), said, np.array(right, dtype=bool))
