"""What the phases of a stage report, combined."""

from pathlib import Path

from pipeline.learning.pretraining import PhaseTracker
from pipeline.run.tracking import Tracker


def test_a_stage_of_phases_has_headlines_without_those_that_have_a_prefix(tmp_path: Path) -> None:
    whole = Tracker("stage", tmp_path, {}, {}, quiet=True)
    first, second = PhaseTracker(whole, "adapt", 0, ""), PhaseTracker(whole, "sft", 10, "")
    control = PhaseTracker(whole, "control", 20, "control/")
    first.report(best={"step": 5, "val_loss": 3.0, "val_bpb": 1.5}, tokens=100)
    first.report(steps=10)
    assert whole.headlines() == {"val_loss": 3.0, "val_bpb": 1.5, "tokens": 100}
    second.report(best={"step": 9, "val_loss": 0.5}, tokens=40)
    second.report(tokens=50)  # replaces the 40 instead of adding to it
    control.report(best={"step": 1, "val_loss": 0.1}, tokens=1000)
    assert whole.headlines() == {"val_loss": 0.5, "tokens": 150}
    assert whole.final["control"]["tokens"] == 1000 and whole.final["adapt"]["steps"] == 10
