"""The first twenty steps of a tiny transformer, against a stored curve: a change in the numbers shows even where all
parts agree.

python -m tests.test_golden_curve       rewrites the curve, after a change that is meant to alter it
"""

import json
import tempfile
from pathlib import Path

import pytest

from tests.training import Case, run, told

FILE = Path(__file__).parent / "loss_curve.json"


def curve(folder: Path, optimizer: str) -> list[float]:
    """The losses of 20 steps in float32."""
    run(Case(folder=str(folder), steps=20, optimizer=optimizer))
    return [row["loss"] for row in told(folder)["curve"] if "loss" in row]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_losses_of_twenty_steps_are_the_stored_ones(tmp_path: Path, optimizer: str) -> None:
    stored = json.loads(FILE.read_text())[optimizer]
    assert len(stored) == 20 and stored[-1] < stored[0]
    assert curve(tmp_path, optimizer) == pytest.approx(stored, abs=1e-5)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        FILE.write_text(
            json.dumps({name: curve(Path(folder) / name, name) for name in ("adamw", "muon")}, indent=1) + "\n"
        )
