"""What texts of each source choose from a memory: shares of the chapters, and a map of one text of each.

    chapters, top_k
    use      per layer and source: the share of its choices that fell on each chapter
    maps     per source, of the last layer that reads: the text in pieces, one of each unit, with its chapters and their weights

Chapters that all sources use alike know nothing of sources. Written once by the stage that trained the memory; the report draws it.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import torch

from pipeline.learning import objectives, scoring
from pipeline.learning.objectives_memory import chosen_counts
from pipeline.model.memory import Memory, Reading
from pipeline.model.memory_units import cut
from pipeline.model.transformer import Transformer
from pipeline.streams.batch import TokenBatch
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
    return {"chapters": memory.config.chapters, "top_k": memory.config.top_k, "routing": memory.config.routing, "use": use, "maps": maps}  # fmt: skip


def read(model: Transformer, batch: TokenBatch) -> Reading:
    """What a batch chooses."""
    moved = batch.to(model.model.embed_tokens.weight.device)
    reading = Reading(trained=moved.targets >= 0)
    scoring.read_out(model, moved, objectives.next_token, reading)
    return reading


def mapped(memory: Memory, tokenizer: Tokenizer, source: str, batch: TokenBatch, reading: Reading) -> dict[str, Any]:
    """The first tokens of a batch, by units."""
    config, layer = memory.config, max(reading.routed)
    units = cut(batch.positions.flatten(), routing=config.routing, window=config.window,
                padding=batch.documents.flatten() < 0, trained=batch.targets.flatten() >= 0)  # fmt: skip
    unit_of = (units.back // units.places.shape[1]).tolist()
    ids, routed = batch.input_ids.flatten().tolist(), reading.routed[layer]
    chosen, weights = routed.chosen.tolist(), routed.log_weights.float().exp().tolist()
    kept = [place for place in range(min(len(ids), MAPPED)) if unit_of[place] < len(chosen)]
    pieces = []
    for unit, places in groupby(kept, key=lambda place: unit_of[place]):
        text = tokenizer.decode([ids[place] for place in places], skip_special=False)
        pieces.append({"text": text, "chapters": chosen[unit], "weights": [round(weight, 3) for weight in weights[unit]]})  # fmt: skip
    return {"layer": layer, "source": source, "pieces": pieces}
