"""What the report shows of a memory: shares that match the choices, maps whose pieces make up the text, charts
with axis names.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.batches.batch import Piece, token_batch
from pipeline.memory import report
from pipeline.memory.measure import routing
from pipeline.memory.model import Reading
from pipeline.model.transformer import Transformer
from pipeline.report import card
from pipeline.report.claims import FAILS
from pipeline.report.metrics import MetricsRun
from pipeline.text.tokenizer import Tokenizer
from tests import results
from tests.memory_models import TINY, opened
from tests.memory_models import memory as shape

ROWS = [
    {
        "step": str(step),
        "loss": "2",
        "memory/2/chapter_entropy": f"0.{step}",
        "memory/2/largest_share": "0.3",
        "memory/2/chapters_unused": "1",
        "memory/10/chapter_entropy": "0.8",
        "memory/10/largest_share": "0.2",
        "memory/10/chapters_unused": "0",
        "memory/gain_bpb": "0.01",
        "memory/random_costs_bpb": "0.2",
        "memory/constant_costs_bpb": "",
    }
    for step in (5, 7)
]
TOLD: dict[str, Any] = {
    "chapters": 4,
    "top_k": 2,
    "routing": "prompt",
    "use": [
        {"layer": 3, "source": "facts", "shares": [0.0, 0.1, 0.3, 0.6]},
        {"layer": 3, "source": "code", "shares": [1.0, 0.0, 0.0, 0.0]},
    ],
    "maps": [
        {"layer": 3, "source": "facts", "pieces": [{"text": "<b>who</b>", "chapters": [1, 2], "weights": [0.5, 1.5]}]}
    ],
}


def test_charts_have_a_line_a_layer_in_the_order_of_the_layers_and_leave_out_what_was_not_measured() -> None:
    found = report.figures(MetricsRun({}, {"memory": ROWS}, {}))
    heads = {one["title"]: one["head"] for one in found}
    assert heads["Evenness of chapter usage"] == ["step", "layer 2", "layer 10"]
    assert heads["Cost of using less of the memory"] == ["step", "without the memory", "chapters drawn at random"]
    assert found[0]["rows"] == [["5", "0.5000", "0.8000"], ["7", "0.7000", "0.8000"]]
    assert all("step" in one["svg"] for one in found) and "bits per byte" in found[-1]["svg"]
    assert report.figures(MetricsRun({}, {}, {})) == []
    assert report.points(ROWS, "memory/gain_bpb", "a") == card.Series("a", [(5.0, 0.01), (7.0, 0.01)])


def test_a_chapter_that_no_text_reads_is_a_claim_that_fails() -> None:
    router = {"0": {"chapters_unused": 0.0}, "1": {"chapters_unused": 2.0}}
    (claim,) = report.claims(MetricsRun({"memory": {"lineage": {}, "router": router}}, {}, {}))
    assert claim.title == "No memory chapter is dead" and claim.state == FAILS


def test_cells_darken_with_the_share_and_a_part_is_numbered_by_its_heaviest_chapter() -> None:
    shown = report.shown(TOLD)
    assert [cell["strength"] for cell in shown["tables"][0]["rows"][0]["cells"]] == [0, 1, 2, 3]
    assert [cell["text"] for cell in shown["tables"][0]["rows"][1]["cells"]] == ["100", "0", "0", "0"]
    assert shown["tables"][0]["rows"][1]["cells"][0]["strength"] == 4
    assert shown["maps"][0]["pieces"] == [
        {"text": "<b>who</b>", "chapter": 2, "hue": 180, "title": "chapters 2 (1.50), 1 (0.50)"}
    ]


def test_the_page_has_tables_maps_and_charts_of_a_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAGECOACH_WORK", str(tmp_path / ".work"))
    metrics = results.write(tmp_path / "metrics")
    assert "Which texts choose" not in card.render(metrics)
    (metrics / "memory.json").write_text(json.dumps({"layers": [3], "lineage": {"key": "k"}}))
    lines = [",".join(ROWS[0]), *(",".join(row.values()) for row in ROWS)]
    (metrics / "memory.csv").write_text("\n".join(lines) + "\n")
    (metrics / "routing").mkdir()
    (metrics / "routing/memory.json").write_text(json.dumps(TOLD))
    page = card.render(metrics)
    for text in (
        "Which texts choose which chapters of the memory",
        "Chapters by source, layer 3",
        "&lt;b&gt;who&lt;/b&gt;<sub>2</sub>",
        "Each text chooses 2 of 4 chapters, by prompt",
        "Evenness of chapter usage",
    ):
        assert text in page
    assert "<b>who</b>" not in page


@pytest.mark.parametrize("way", ["chunk", "prompt", "token"])
def test_shares_are_those_of_the_choices_and_pieces_are_the_text(way: str, byte_tokenizer: Tokenizer) -> None:
    vocabulary = replace(TINY, vocab_size=byte_tokenizer.vocab_size)
    model: Transformer = opened(shape(routing=way, layers="all"), shape=vocabulary)
    texts = ["Who owns the harbour?\nTheo", "def f(x):\n    return x + 1\n"]
    ids = [np.array(byte_tokenizer.encode(text)) for text in texts]
    half = [np.arange(len(one)) >= len(one) // 2 for one in ids]
    row = [Piece(one, trained) for one, trained in zip(ids, half, strict=True)]
    batch = token_batch(
        [row], np.array([0]), packed=65, context=65, pad=byte_tokenizer.pad, byte_lengths=byte_tokenizer.byte_lengths
    )
    told = routing(model, byte_tokenizer, {"all": [batch, batch], "none": []})
    reading = Reading(trained=batch.targets >= 0)
    with torch.no_grad():
        model(batch.input_ids, positions=batch.positions, documents=batch.documents, reading=reading)
    assert [(one["layer"], one["source"]) for one in told["use"]] == [(0, "all"), (1, "all"), (2, "all")]
    for one in told["use"]:
        chosen = reading.routed[one["layer"]].chosen
        assert one["shares"] == pytest.approx((torch.bincount(chosen.flatten(), minlength=5) / chosen.numel()).tolist())
    (drawn,) = told["maps"]
    shown = batch.input_ids[batch.documents >= 0].tolist()
    assert "".join(piece["text"] for piece in drawn["pieces"]) == byte_tokenizer.decode(shown, skip_special=False)
    assert [piece["chapters"] for piece in drawn["pieces"]] == reading.routed[2].chosen.tolist()
    assert all(sum(piece["weights"]) == pytest.approx(2, abs=2e-3) for piece in drawn["pieces"]), "top_k in all"
    assert not model.training
