"""Stage kto on a tiny model: it learns the labels, reports it, and stops if policy and reference disagree."""

from typing import Any

import pytest
import torch

from pipeline.ingest import records
from pipeline.learning import label_losses
from tests import workspace as builder
from tests.workspace import Workspace

pytestmark = pytest.mark.slow  # each test runs a stage
LONGER: dict[str, Any] = {"steps": 12, "learning_rate": 3e-3, "eval_steps": 12, "beta": 0.5}


@pytest.mark.parametrize("changes", [{}, {"adapter": {"rank": 4, "alpha": 8}}, {"loss": "apo_zero_unpaired"}])
def test_it_learns_which_answers_are_good(changes: dict[str, Any], workspace: Workspace) -> None:
    ended = workspace.command("kto", **LONGER, **changes)
    assert ended.code == 0, ended.said
    told = workspace.numbers("kto")
    test, pairs = told["test"], told["pairs"]
    assert test["n"] == 12 == 2 * pairs["n"] and test["accuracy"] > 0.9 and test["accuracy_low"] > 0.5
    assert {test[side]["n"] for side in ("desirable", "undesirable")} == {6}
    assert pairs["accuracy"] > 0.9 and test["undesirable_nats"] < 0 < test["desirable_nats"]
    first, last = (workspace.curve("kto")[n] for n in (0, -1))
    assert float(first["loss"]) == pytest.approx(0.5, abs=1e-4)
    assert float(last["val/loss"]) < 0.4
    rows = [row for row in workspace.curve("kto") if row.get("rewards/chosen")]
    assert float(rows[-1]["rewards/chosen"]) > 0 > float(rows[-1]["rewards/rejected"])
    assert float(rows[0]["kl"]) == 0
    base = workspace.weights("tools")
    assert any(not torch.equal(value, base[name]) for name, value in workspace.weights("kto").items())


def test_equal_counts_are_not_advised_on_and_unequal_ones_are(workspace: Workspace) -> None:
    assert "good and" not in workspace.command("kto", steps=1).said
    labels = list(records.unpaired(builder.pair(n) for n in range(20)))
    path = workspace.folder / "data/labels/train.jsonl"
    records.write(path, [label for n, label in enumerate(labels) if label.desirable or n % 4 == 1])
    ended = workspace.command("kto", steps=1)
    assert ended.code == 0 and "stage_kto: 20 good and 10 bad answers weigh 2.00 to 1" in ended.said.replace(
        "warning: kto", "stage_kto"
    )


@pytest.mark.parametrize("shift", [1.0, -1.0])
def test_a_divergence_that_is_not_0_at_the_start_stops(
    shift: float, workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As from another reference in the pass over mismatched answers; equal label weights hide this from the loss."""
    original = label_losses.mismatched_ratios
    monkeypatch.setattr(label_losses, "mismatched_ratios", lambda *given: original(*given) + shift)
    ended = workspace.command("kto")
    if shift > 0:
        assert ended.code != 0 and "gate kl: expected 0 to within 0.001, found 1" in ended.said, ended.said
    else:
        assert ended.code == 0, ended.said  # a mean below 0 counts as 0
