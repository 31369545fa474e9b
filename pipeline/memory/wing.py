"""What the memory offers to the rest of the house; see `pipeline.wings`."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipeline.evaluation.suites import Plan, Subject
    from pipeline.report.metrics import Section


def causal_suites(subject: "Subject", *, facts: Path) -> "Plan":
    """The suite of trained facts, which every causal model can be asked."""
    from pipeline.memory import measure

    return {"facts": lambda: measure.known(subject, facts)}


def report() -> "Section":
    """The section of the report."""
    from pipeline.memory import report

    return report
