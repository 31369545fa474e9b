"""No candidate earns anything with another candidate's answer: thieves are paid like wrong programs (`thieves.py`)."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests import thieves
from tests.sandbox import WHO, ended, started, unprivileged_python

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")


def paid(groups: int, workers: int, who: str, *url: str) -> list[tuple[str, str, float | None]]:
    """What every candidate scored, run as this process's user or as another."""
    if who != "nobody":
        return thieves.judged(groups, workers, *url)
    python = unprivileged_python()
    if python is None:
        pytest.skip("no Python 3.11 that another user may execute")
    script = [python, "-B", str(ROOT / "tests" / "thieves.py"), str(ROOT), str(groups), str(workers), *url]
    return json.loads(subprocess.check_output(script, user=65534, group=65534, extra_groups=[], cwd="/"))


def stolen(scores: list[tuple[str, str, float | None]]) -> dict[str, float]:
    """What was paid to thieves, by name and kind. The honest must have been paid in full, the wrong ones nothing."""
    assert {score for name, _, score in scores if name == "honest"} == {1.0}
    assert {score for name, _, score in scores if name == "wrong"} == {0.0}
    loot = Counter[str]()
    for name, kind, score in scores:
        assert score is not None
        loot[f"{name} ({kind})"] += score if name not in ("honest", "wrong") else 0
    return {name: score for name, score in loot.items() if score}


@pytest.mark.parametrize(
    "name", [*(f"{where} by a write oracle" for where in ("heap", "arenas")), "frames", "gc", "modules"]
)
def test_a_thief_finds_an_answer_that_lies_in_its_own_process(name: str) -> None:
    left = "import random\nLEFT = f'answer-100000001-{random.Random(1).getrandbits(64):016x}'\nprint(LEFT)\n"
    left += "LONG = LEFT * 99\n"  # too long for the interpreter's own arenas, so it lies on the heap
    code = left + thieves.COMMON + thieves.HUNTS[name] + "\nprint(f(100000001))"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert len(set(ended.stdout.split())) == 1 and ended.stdout.count("\n") == 2, ended


@pytest.mark.slow
def test_in_a_few_groups_thieves_are_paid_as_wrong_programs_are() -> None:
    assert not stolen(paid(10, 1, "root"))


@pytest.mark.slow
def test_through_the_service_the_second_tenant_finds_nothing_of_the_first() -> None:
    process, url = started("--workers", "1")
    try:
        assert not stolen(paid(5, 1, "root", url))
    finally:
        ended(process)


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize("workers", [1, 2, 8])
@pytest.mark.parametrize("who", ["root", "nobody"] if "nobody" in str(WHO) else ["user"])
def test_in_forty_groups_thieves_are_paid_as_wrong_programs_are(who: str, workers: int) -> None:
    scores = paid(40, workers, who)
    assert len(scores) == 320 and not stolen(scores)
