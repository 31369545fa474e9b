"""Evaluation of a memory: which chapters texts from each source choose, and the recall of trained facts.

**Routing** (`routing`), written once by the stage that trained the memory and drawn by the report:

    chapters, top_k
    use      per layer and source: the share of choices that went to each chapter
    maps     per source, for the last reading layer: a text in pieces, one per unit, each with the chapters that
             it chose and their weights

If all sources use the chapters in the same way, the chapters are not specialized by source.

**Recall** (`known`): exact match of greedy answers to questions about invented facts.

    test     questions about trained facts, in an unseen wording
    control  questions about untrained facts of the same kind: the chance level

Intervals are Wilson's, 95%; two models are compared on the same questions by a paired bootstrap.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path

import numpy as np
import torch

from pipeline.batches.batch import TokenBatch
from pipeline.batches.dialogues import FactQuestion, encoded
from pipeline.evaluation.intervals import wilson
from pipeline.evaluation.suites import Subject, SuiteResult
from pipeline.generation.sampling import Completion, Sampling, generate
from pipeline.ingest import records
from pipeline.ingest.records import Fact
from pipeline.learning import losses
from pipeline.memory.model import Memory, Reading, cut
from pipeline.memory.training import chosen_counts
from pipeline.model.transformer import Transformer
from pipeline.run.errors import DataError
from pipeline.run.types import JsonObject
from pipeline.text.tokenizer import Tokenizer

MAPPED = 240  # tokens shown per text


@torch.no_grad()
def routing(model: Transformer, tokenizer: Tokenizer, sources: Mapping[str, Sequence[TokenBatch]]) -> JsonObject:
    """The object described in the module docstring; a source without batches is left out."""
    memory = model.hook
    assert isinstance(memory, Memory)
    was_training = model.training
    model.train(False)
    use: list[JsonObject] = []
    maps: list[JsonObject] = []
    for source, batches in sources.items():
        readings = [_read(model, batch) for batch in batches]
        for layer in readings[0].routed if readings else ():
            counts = torch.stack([chosen_counts(reading.routed[layer]) for reading in readings]).sum(0)
            use.append({"layer": layer, "source": source, "shares": (counts / counts.sum().clamp_min(1)).tolist()})
        if readings and readings[0].routed:
            maps.append(_map_text(memory, tokenizer, source, batches[0], readings[0]))
    model.train(was_training)
    return {
        "chapters": memory.config.chapters,
        "top_k": memory.config.top_k,
        "routing": memory.config.routing,
        "use": use,
        "maps": maps,
    }


def _read(model: Transformer, batch: TokenBatch) -> Reading:
    """The reading of a batch, with the chapters that its units chose."""
    moved = batch.to(model.model.embed_tokens.weight.device)
    reading = Reading(trained=moved.targets >= 0)
    losses.read_out(model, moved, losses.next_token, reading)
    return reading


def _map_text(memory: Memory, tokenizer: Tokenizer, source: str, batch: TokenBatch, reading: Reading) -> JsonObject:
    """The first tokens of a batch by unit, with the chapters that each unit chose."""
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
    in_unit = [index for index in range(min(len(ids), MAPPED)) if unit_of[index] < len(chosen)]
    pieces = []
    for unit, indices in groupby(in_unit, key=lambda index: unit_of[index]):
        text = tokenizer.decode([ids[index] for index in indices], skip_special=False)
        pieces.append(
            {"text": text, "chapters": chosen[unit], "weights": [round(weight, 3) for weight in weights[unit]]}
        )
    return {"layer": layer, "source": source, "pieces": pieces}


# -- recall ------------------------------------------------------------------------------------------------------------


SPARE_TOKENS = 4  # an answer may be this many tokens longer than the correct one


@dataclass(frozen=True)
class Recall:
    """Questions, the model's answers, and which answers were correct."""

    asked: list[FactQuestion]
    completions: list[Completion]
    right: np.ndarray  # (n,) bool

    def measure(self) -> dict[str, float]:
        """Exact match: overall, with its interval, and by attribute."""
        share = wilson(int(self.right.sum()), len(self.right))
        attributes = np.array([question.fact.attribute for question in self.asked])
        by_attribute = {str(name): float(self.right[attributes == name].mean()) for name in np.unique(attributes)}
        return {
            "n": len(self.right),
            "exact_match": share.value,
            "exact_match_low": share.low,
            "exact_match_high": share.high,
        } | by_attribute


def questions(path: Path, tokenizer: Tokenizer, most: int) -> list[FactQuestion]:
    """Questions about the first `most` facts of a split. Raises DataError if the file is missing."""
    if not path.is_file():
        raise DataError(f"{path}: expected facts here, found none; run dvc repro stage_tasks")
    return [encoded(fact, tokenizer) for fact in records.read(path, Fact)][:most]


def known(subject: Subject, folder: Path) -> SuiteResult:
    """The suite: questions about facts trained in other wordings and, as `control`, about untrained facts."""
    result = SuiteResult()
    for split in ("test", "control"):
        asked = questions(folder / f"{split}.jsonl", subject.tokenizer, subject.settings.problems)
        recalled = recall(subject.model, subject.tokenizer, asked)
        result.numbers |= recalled.measure() if split == "test" else {split: recalled.measure()}
        for question, completion, right in zip(asked, recalled.completions, recalled.right, strict=True):
            text = subject.tokenizer.decode(completion.ids)
            suite = "facts" if split == "test" else f"facts {split}"
            result.item(
                suite,
                f"{split}/{question.fact.id}",
                completion,
                text,
                asked=asdict(question.fact),
                reference=question.fact.answer,
                right=int(right),
            )
    return result


def recall(model: Transformer, tokenizer: Tokenizer, asked: Sequence[FactQuestion]) -> Recall:
    """The model's answers to the questions, compared with the facts. The model must be in evaluation mode."""
    longest = max((len(question.answer) for question in asked), default=1) + SPARE_TOKENS
    completions = generate(
        model,
        [question.prompt for question in asked],
        Sampling(max_new_tokens=longest),
        stop={tokenizer.end_of_text},
        seeds=[0] * len(asked),
    )
    right = [
        completion.ids == question.answer[:-1] and completion.stop == "stop"
        for question, completion in zip(asked, completions, strict=True)
    ]
    return Recall(list(asked), completions, np.array(right, dtype=bool))
