"""benchmarks/paired.py: what it says about two models on the same problems, and when it refuses to."""

import pytest

from benchmarks.paired import compared
from pipeline.ingest.records import Problem
from pipeline.run.errors import InputError


def problem(name: str, level: int) -> Problem:
    return Problem(
        id=name, level=level, group="medium", key=name, question=name, entry_point="f", signature="f(x)", tests=[]
    )


PROBLEMS = [problem(f"p{n}", 3 if n < 19 else 4) for n in range(40)]


def test_levels_of_few_problems_get_no_verdict() -> None:
    first, second = {p.id: 0.0 for p in PROBLEMS}, {p.id: float(p.level == 4) for p in PROBLEMS}
    whole, three, four = compared(first, second, PROBLEMS, "greedy")
    assert (whole["level"], whole["n"], whole["difference"]) == ("all", 40, 0.525) and "verdict" not in whole
    assert (three["n"], three["difference"], three["verdict"]) == (19, 0.0, "none, too few items: 19")
    assert (four["n"], four["difference"]) == (21, 1.0) and "verdict" not in four


def test_models_with_room_for_other_problems_are_refused_by_name() -> None:
    first = {p.id: 1.0 for p in PROBLEMS}
    with pytest.raises(
        InputError, match=r"different items: 40 and 38 problems.*room for p0, p1; compare models with the same context"
    ):
        list(compared(first, {p.id: 1.0 for p in PROBLEMS[2:]}, PROBLEMS, "greedy"))
    held = compared({p.id: 1.0 for p in PROBLEMS[:30]}, {p.id: 1.0 for p in PROBLEMS[:30]}, PROBLEMS, "greedy")
    assert [told["n"] for told in held] == [30, 19, 11], "problems without room on both sides are left out"
