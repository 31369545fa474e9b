"""benchmarks/seeds.py: numbers worked out by hand, and what it refuses to compare."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import seeds
from pipeline.report.metrics import MetricsRun
from pipeline.run.errors import InputError

NAMES = ("a", "b", "c")
DATA = {"data/problems": "d1", "data/raw/text": "t1"}


def made(
    seed: int, right: list[int], *, base: list[int] | None = None, data: dict[str, str] | None = None, **settings: Any
) -> MetricsRun:
    """A run with `tools`, which solved the problems marked in `right`, and its base `code`, which solved those in
    `base`.
    """
    stages: dict[str, dict[str, Any]] = {
        "corpus": {"params": {"data_seed": 42}, "lineage": {"inputs": {"data/own": "o1"}, "code": "c"}},
        "tools": {
            "params": {"seed": seed, "steps": 10},
            "lineage": {"inputs": {"models/code": f"m{seed}", "data/dialogues": "l1"}, "code": "c"},
        },
    }
    solved = {"code": base if base is not None else [0] * len(right), "tools": right}
    numbers, items = {}, {}
    for model, each in solved.items():
        rate = sum(each) / len(each)
        easy = {"pass_at_1": rate, "pass_at_1_low": max(0.0, rate - 0.2), "pass_at_1_high": min(1.0, rate + 0.2)}
        numbers[model] = {
            "problems": {"easy": easy},
            "settings": {"data_seed": 42} | settings,
            "lineage": {"inputs": DATA | (data or {}) | {f"models/{model}": f"{model}{seed}"}},
        }
        items[model] = [
            {"suite": "problems", "id": f"p{n}", "item": f"h{n}", "group": "easy", "sampled": one}
            for n, one in enumerate(each)
        ]
    calls = {"ast": 0.1 * seed, "ast_low": 0.1 * seed - 0.05, "ast_high": 0.1 * seed + 0.05}
    numbers["tools"] |= {"tools": calls}
    return MetricsRun(stages, {}, numbers, items)


def row(found: dict[str, Any], model: str, measure: str) -> seeds.Spread:
    (one,) = [one for one in found["rows"] if (one.model, one.measure) == (model, measure)]
    return one


def test_mean_range_and_students_interval_are_those_worked_out_by_hand() -> None:
    """0.5, 0.6, 0.7: s = 0.1, so 0.6 +- 4.303 x 0.1 / sqrt(3) = 0.6 +- 0.24843; of 0.5 and 0.6 alone, 0.55 +- 12.706
    x 0.05.
    """
    assert seeds.over_seeds([0.5, 0.6, 0.7]) == pytest.approx((0.35157, 0.84843), abs=1e-5)
    assert seeds.over_seeds([0.5, 0.6]) == pytest.approx((0.55 - 0.6353, 0.55 + 0.6353), abs=1e-4)
    assert seeds.over_seeds([0.5, 0.5, 0.5, 0.5]) == (0.5, 0.5)
    found = seeds.measured(NAMES, [made(seed, [1] * n + [0] * (10 - n)) for seed, n in ((1, 5), (2, 6), (3, 7))])
    one = row(found, "tools", "Easy problems, pass@1")
    assert (one.values, one.lowest, one.highest, one.n) == ([0.5, 0.6, 0.7], 0.5, 0.7, 10)
    assert one.mean == pytest.approx(0.6) and one.seeds == pytest.approx([0.35157, 0.84843], abs=1e-5)
    with pytest.raises(InputError, match="expected 2 to 10 runs, found 1"):
        seeds.measured(("a",), [made(1, [1])])


def test_the_interval_over_items_is_of_the_mean_over_runs() -> None:
    """Each of three runs solves a different third of the items, so every item averages 1/3, and resampling them changes
    nothing.
    """
    thirds = [[int(n % 3 == place) for n in range(30)] for place in range(3)]
    found = seeds.measured(NAMES, [made(seed, right) for seed, right in enumerate(thirds)])
    one = row(found, "tools", "Easy problems, pass@1")
    assert one.items == pytest.approx([1 / 3, 1 / 3]) and one.pooled and one.seeds == pytest.approx([1 / 3, 1 / 3])
    same = [[int(n % 3 == 0) for n in range(30)]] * 3
    one = row(
        seeds.measured(NAMES, [made(seed, right) for seed, right in enumerate(same)]), "tools", "Easy problems, pass@1"
    )
    assert one.items is not None
    # the items of all runs are the same, so three runs say no more than one: about 1/3 +- 1.96 sqrt(2/9 / 30) = +-
    # 0.169
    assert one.items == pytest.approx([1 / 3 - 0.169, 1 / 3 + 0.169], abs=0.02)


def test_a_share_of_nothing_in_every_run_is_not_sure_to_be_nothing() -> None:
    """Wilson's upper bound for 0 of 30: 1.96^2 / (30 + 1.96^2) = 3.8415 / 33.8415 = 0.11351."""
    one = row(seeds.measured(NAMES, [made(seed, [0] * 30) for seed in (1, 2, 3)]), "tools", "Easy problems, pass@1")
    assert one.items == pytest.approx([0.0, 0.11351], abs=1e-5)


def test_a_number_that_is_no_sum_has_the_mean_of_the_runs_own_intervals() -> None:
    found = seeds.measured(NAMES, [made(seed, [1, 0]) for seed in (1, 2, 6)])
    one = row(found, "tools", "Correct tool calls (AST)")
    assert one.values == pytest.approx([0.1, 0.2, 0.6]) and not one.pooled and one.n == 0
    assert one.items == pytest.approx([0.25, 0.35])  # means of 0.05, 0.15, 0.55 and of 0.15, 0.25, 0.65
    assert one.seeds[0] == 0.0, "a share is not below 0"
    assert one.row()[2:6] == ["10.0%, 20.0%, 60.0%", "30.0%", "10.0% to 60.0%", "25.0% to 35.0% *"]
    assert "the mean of the runs' own intervals" in seeds.markdown(found)


def test_the_difference_from_the_model_before_is_paired_within_each_run() -> None:
    """Each run solves exactly five more of twenty than its base, different ones each time: +0.25 whatever the seed."""
    runs = []
    for seed, first in ((1, 0), (2, 5), (3, 10)):
        base = [int(n < first) for n in range(20)]
        runs.append(made(seed, [int(n < first + 5) for n in range(20)], base=base))
    one = row(seeds.measured(NAMES, runs), "tools", "Easy problems, pass@1, less code")
    assert one.values == [0.25, 0.25, 0.25] and one.seeds == [0.25, 0.25] and one.n == 20
    assert one.row()[3] == "+25.0 points" and one.items is not None and one.items[0] < 0.25 < one.items[1]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            made(2, [1, 0], data={"data/problems": "d2"}),
            r"a and b differ in more than .* seed: data/problems is d1 and d2$",
        ),
        (made(2, [1, 0], data_seed=1), r"differ in more than the training seed: data_seed 42 and 1$"),
        (
            made(2, [1, 0], temperature=0.5),
            r"evaluation of code: temperature absent and 0\.5; evaluation of tools: temp",
        ),
        (made(1, [1, 0]), r"a and b were both trained with seed 1; expected a different seed for each run"),
        (
            made(2, [1, 0, 1]),
            r"a and b measured on different items: Easy problems, pass@1 of code: 2 and 3 items, only in one run: p2",
        ),
    ],
)
def test_runs_over_other_data_items_or_parameters_are_refused_by_name(other: MetricsRun, message: str) -> None:
    with pytest.raises(InputError, match=message):
        seeds.measured(NAMES[:2], [made(1, [1, 0]), other])


def test_a_teachers_answers_may_differ_because_training_wrote_them() -> None:
    runs = [made(seed, [1, 0], data={"data/taught": f"answers of grpo {seed}"}) for seed in (1, 2)]
    assert seeds.check(NAMES[:2], runs) == [1, 2]


def test_a_run_of_mixed_seeds_is_refused_and_other_parameters_are_named() -> None:
    mixed = made(2, [1, 0])
    mixed.stages["language"] = {"params": {"seed": 1}, "lineage": {"inputs": {}, "code": "c"}}
    with pytest.raises(InputError, match="b: expected stages trained with one seed, found tools 2, language 1"):
        seeds.measured(NAMES[:2], [made(1, [1, 0]), mixed])
    longer = made(2, [1, 0])
    longer.stages["tools"]["params"]["steps"] = 11
    with pytest.raises(InputError, match=r"differ in more than the training seed: tools: steps 10 and 11$"):
        seeds.measured(NAMES[:2], [made(1, [1, 0]), longer])


def test_what_not_all_runs_have_and_other_code_is_noted() -> None:
    short = made(2, [1, 0])
    del short.evaluations["code"]
    short.stages["tools"]["lineage"]["code"] = "other"
    found = seeds.measured(NAMES[:2], [made(1, [1, 0]), short])
    assert found["notes"] == [
        "code is left out: not evaluated in b",
        "the code of these stages differs between the runs: tools",
    ]
    assert {one.model for one in found["rows"]} == {"tools"}


def test_the_command_reads_folders_prints_a_table_and_writes_its_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed, solved in ((1, 5), (2, 6), (3, 7)):
        one, folder = made(seed, [1] * solved + [0] * (10 - solved)), tmp_path / str(seed)
        (folder / "eval").mkdir(parents=True)
        for name, told in one.stages.items():
            (folder / f"{name}.json").write_text(json.dumps(told))
        for name, told in one.evaluations.items():
            (folder / f"eval/{name}.json").write_text(json.dumps(told))
            (folder / f"eval/{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in one.items[name]))
    folders, out = [str(tmp_path / str(seed)) for seed in (1, 2, 3)], tmp_path / "seeds.json"
    assert seeds.main([*folders, "--out", str(out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("| model | measure | seeds 1, 2, 3 | mean |")
    (line,) = [line for line in lines if line.startswith("| tools | Easy problems, pass@1 |")]
    assert line.startswith(
        "| tools | Easy problems, pass@1 | 50.0%, 60.0%, 70.0% | 60.0% | 50.0% to 70.0% |"
    ) and line.endswith("| 35.2% to 84.8% | 10 |")
    told = json.loads(out.read_text())
    assert told["student_t"] == 4.303 and list(told["runs"].values()) == [1, 2, 3]
    assert {"model": "tools", "measure": "Easy problems, pass@1", "mean": pytest.approx(0.6)}.items() <= told["rows"][
        1
    ].items()
    assert seeds.main([folders[0], folders[0], "--out", str(tmp_path / "none.json")]) == 2
    assert "both trained with seed 1" in capsys.readouterr().err and not (tmp_path / "none.json").exists()
