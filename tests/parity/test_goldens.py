"""The stored golden numbers, computed again by their oracles: a stale file or a different oracle fails.

Each oracle runs in its own process (`tests/golden/make.py`), with this interpreter if it has trl 1.12.0, or with the
one that STAGECOACH_TRL_A or STAGECOACH_TRL_B names; otherwise the test is skipped.
"""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.goldens import VERSIONS, interpreter

GOLDEN = Path(__file__).parents[1] / "golden"
TOLERANCE = 1e-6  # other processors round float32 sums differently


def cases(folder: Path, oracle: str) -> dict[str, dict[str, Any]]:
    """File and name -> case, of one oracle."""
    files = sorted(set(folder.glob("*.json")) - {folder / "peft.json"})  # written by make_peft.py
    records = [(path.stem, case) for path in files for case in json.loads(path.read_text(encoding="utf-8"))]
    return {f"{stem}/{case['name']}": case for stem, case in records if case["oracle"] == oracle}


def leaves(value: Any, where: str) -> Iterator[tuple[str, Any]]:
    """Every number in nested lists and dicts, with its path."""
    if isinstance(value, dict):
        for key, part in value.items():
            yield from leaves(part, f"{where}.{key}")
    elif isinstance(value, list):
        for index, part in enumerate(value):
            yield from leaves(part, f"{where}[{index}]")
    else:
        yield where, value


@pytest.mark.oracle
@pytest.mark.extra
@pytest.mark.parametrize("oracle", ["A", "B", "hand"])
def test_the_oracle_gives_the_stored_numbers_again(oracle: str, tmp_path: Path) -> None:
    command = [interpreter(oracle), "-W", "ignore", str(GOLDEN / "make.py"), oracle.lower(), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    stored, made = cases(GOLDEN, oracle), cases(tmp_path, oracle)
    assert stored.keys() == made.keys()
    for name, case in made.items():
        expected = dict(leaves(stored[name].pop("expected"), name))
        found = dict(leaves(case.pop("expected"), name))
        assert case == stored[name], "the case itself changed: run make.py"
        assert found == pytest.approx(expected, rel=TOLERANCE, abs=TOLERANCE), name


def test_every_golden_file_is_small_and_names_its_cases_once() -> None:
    files = sorted(set(GOLDEN.glob("*.json")) - {GOLDEN / "peft.json"})
    assert {path.stem for path in files} == {"reward", "distill", "dpo", "kto", "ppo", "grpo", "rloo", "reinforce_pp"}
    for path in files:
        records = json.loads(path.read_text(encoding="utf-8"))
        names = [case["name"] for case in records]
        assert len(set(names)) == len(names), path.name
        assert all(case["version"] == VERSIONS[case["oracle"]] for case in records), path.name
        assert path.stat().st_size < 40_000, path.name
