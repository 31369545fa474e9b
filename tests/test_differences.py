"""pipeline/report/{differences,claims,compare,costs}.py: what changed between two runs, and whether it is more than chance."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.report import claims, compare, costs, differences
from pipeline.report.differences import Measured
from pipeline.report.headlines import HEADLINES
from pipeline.report.run import Run, read
from tests import results

BY_KEY = {headline.key: headline for headline in HEADLINES}
DATA = {"data/problems": "d1", "models/tools": "any"}


def solved(right: list[int], data: dict[str, str] = DATA) -> Measured:
    rate = float(np.mean(right))
    rows = [{"suite": "problems", "id": f"p{n}", "group": "medium", "sampled": r} for n, r in enumerate(right)]
    numbers = {"problems": {"medium": {"pass_at_1": rate, "pass_at_1_low": rate - 0.1, "pass_at_1_high": rate + 0.1}}}
    return Measured(numbers | {"lineage": {"inputs": data}}, rows)


def test_items_that_both_were_asked_are_paired_so_a_small_steady_gain_shows() -> None:
    before = [1, 0] * 50
    after = [1, 0] * 40 + [1, 1] * 10  # ten problems more, none fewer
    told = differences.change(BY_KEY["medium"], solved(before), solved(after))
    assert told is not None and told.items == 100 and told.kind == "better"
    assert told.low is not None and told.high is not None and 0 < told.low < 0.1 < told.high
    assert told.shown.startswith("+10.0 points (4.") or told.shown.startswith("+10.0 points (5.")
    worse = differences.change(BY_KEY["medium"], solved(after), solved(before))
    assert worse is not None and worse.kind == "worse" and worse.shown.startswith("−10.0 points (−1")


@pytest.mark.parametrize("other", [{"data/problems": "d2"}, {}])
def test_other_data_is_never_paired_even_if_ids_are_equal(other: dict[str, str]) -> None:
    told = differences.change(BY_KEY["medium"], solved([1, 0] * 50), solved([1, 0] * 40 + [1, 1] * 10, other))
    assert told is not None and (told.items, told.low, told.kind) == (0, None, "")  # the intervals overlap


def test_bits_per_byte_are_ratios_of_sums_and_less_is_better() -> None:
    def measured(bits: list[float]) -> Measured:
        rows = [{"suite": "code", "id": str(n), "bits": b, "bytes": 10 * (n + 1)} for n, b in enumerate(bits)]
        bpb = sum(bits) / sum(10 * (n + 1) for n in range(len(bits)))
        return Measured({"code": {"bpb": bpb, "bpb_low": bpb, "bpb_high": bpb}, "lineage": {}}, rows)

    first = [20.0 * (n + 1) for n in range(12)]
    told = differences.change(BY_KEY["code_bpb"], measured(first), measured([b - 1 for b in first]))
    assert told is not None and told.kind == "better" and told.after - told.before == pytest.approx(-12 / 780)
    assert told.high is not None and told.high < 0


def test_a_measure_that_one_side_lacks_has_no_difference() -> None:
    assert differences.change(BY_KEY["ast"], solved([1]), solved([0])) is None


@pytest.fixture
def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A run, and one in which the rate of `code` was changed."""
    monkeypatch.setenv("STAGECOACH_WORK", str(tmp_path / ".work"))
    first, second = results.write(tmp_path / "a"), results.write(tmp_path / "b")
    for folder, rate in ((first, 0.1), (second, 0.2)):
        edit(
            folder / "code.json", lambda told, rate=rate: told | {"params": {"fit": {"learning_rate": rate}, "seed": 1}}
        )
    edit(second / "code.json", lambda told: told | {"lineage": told["lineage"] | {"key": "changed"}})
    for name, path in (("tools", "models/code"), ("deploy", "models/tools")):
        edit(
            second / f"{name}.json",
            lambda told, path=path: told | {"lineage": told["lineage"] | {"key": "follows", "inputs": {path: "new"}}},
        )
    edit(second / "eval/tools.json", lambda told: told | {"problems": told["problems"] | {"medium": {"pass_at_1": 0.5, "pass_at_1_low": 0.4, "pass_at_1_high": 0.6}}})  # fmt: skip
    return first, second


def edit(path: Path, change: Any) -> None:
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


def test_a_stage_differs_because_of_a_parameter_or_of_what_it_reads(two: tuple[Path, Path]) -> None:
    first, second = read(two[0]), read(two[1])
    told = {one.stage: one for one in differences.stages(first, second)}
    assert list(told) == ["code", "tools", "deploy"]
    assert told["code"].why == ["fit.learning_rate: 0.1 → 0.2"]
    assert told["tools"].why == ["what it reads from code"] and told["tools"].keys[1] == "follows"
    assert differences.stages(first, first) == []
    without = Run({k: v for k, v in second.stages.items() if k != "deploy"}, {}, {})
    assert differences.stages(second, without)[0].why == ["built only before"]


def test_the_comparison_names_keys_runs_and_what_moved(two: tuple[Path, Path], tmp_path: Path) -> None:
    folder = tmp_path / ".work/code/changed"
    folder.mkdir(parents=True)
    (folder / "mlflow.json").write_text('{"run_id": "run-7"}')
    (folder / "speed.json").write_text('{"seconds": 61.4}')
    text = compare.render(read(two[0]), read(two[1]), ("main", "workspace"))
    (line,) = [line for line in text.splitlines() if line.startswith("code ")]
    assert line.split() == [
        "code",
        "fit.learning_rate:",
        "0.1",
        "→",
        "0.2",
        "00000006abcdef00",
        "changed",
        "run-7",
        "61",
    ]
    moved = [line for line in text.splitlines() if "Unseen compositions" in line]
    assert (
        len(moved) == 1
        and "12.5 %" in moved[0]
        and "50.0 %" in moved[0]
        and "better" in moved[0]
        and moved[0].endswith("intervals")
    )
    assert "Running text" not in text and "Running text" in compare.render(
        read(two[0]), read(two[1]), ("a", "b"), every=True
    )
    table = compare.render(read(two[0]), read(two[1]), ("a", "b"), markdown=True)
    assert "| --- |" in table and table.count("| code |") == 1
    assert "the same run" in compare.render(read(two[0]), read(two[0]), ("a", "a"))


def test_a_claim_holds_by_its_interval_fails_without_one_and_says_when_nothing_was_measured() -> None:
    stages = {
        "reward": {"lineage": {}, "test": {"accuracy": 0.6, "accuracy_low": 0.51, "accuracy_high": 0.7}},
        "rlhf": {
            "lineage": {},
            "held_out": {"gain": 0.1, "gain_low": -0.01, "gain_high": 0.2},
            "alarms": {"entropy": 40},
        },
        "deploy": {"lineage": {}, "parity": {"f16": {"greedy_equal": 63, "greedy_tokens": 64}}},
        "memory": {"lineage": {}, "router": {"0": {"chapters_unused": 0.0}, "1": {"chapters_unused": 2.0}}},
    }
    tools = solved([1, 0] * 50).numbers
    run = Run(stages, {}, {"tools": tools, "grpo": solved([1, 1] * 50).numbers}, {"tools": solved([1, 0] * 50).rows, "grpo": solved([1, 1] * 50).rows})  # fmt: skip
    told = {one.title: one for one in claims.claims(run)}
    assert told["The reward model ranks better than chance"].state == claims.HOLDS
    assert told["PPO raises the true score of held-out answers"].state == claims.FAILS
    assert told["GRPO raises pass@1 on held-out problems"].state == claims.UNKNOWN
    assert told["GRPO solves more unseen compositions than its start"].state == claims.HOLDS
    assert "grpo 100.0 %, tools 50.0 %" in told["GRPO solves more unseen compositions than its start"].measured
    assert told["Every export answers as the model that was evaluated"].state == claims.FAILS
    assert told["No chapter of the memory is dead"].state == claims.FAILS
    assert claims.alarms(run) == [("rlhf", 40, "entropy")]
    skipped = Run({}, {}, {"tools": {"problems": {"skipped": "skipped: no sandbox"}}})
    assert claims.skipped(skipped) == [("tools", "problems", "skipped: no sandbox")]


def test_money_is_hours_of_cores_and_gpus_and_a_sum_is_of_what_is_known(two: tuple[Path, Path], tmp_path: Path) -> None:
    for name, key, speed in (
        ("code", "changed", {"seconds": 1800, "cores": 2, "cpu_seconds": 3000, "host_memory_gb": 1.5, "device": "a CPU (cpu)", "joules": 500}),
        ("tools", "follows", {"seconds": 3600, "cores": 8, "device": "H100 (cuda)", "joules": "not measured"}),
    ):  # fmt: skip
        (tmp_path / ".work" / name / key).mkdir(parents=True)
        (tmp_path / ".work" / name / key / "speed.json").write_text(json.dumps(speed))
    edit(two[1] / "deploy.json", lambda told: told | {"lineage": told["lineage"] | {"key": "elsewhere"}})
    rows = costs.rows(read(two[1]), costs.Prices(core=0.1, gpu=2.0))
    found = {row.stage: row for row in rows}
    assert found["code"].price == pytest.approx(0.1) and found["tools"].price == pytest.approx(0.8 + 2.0)
    assert found["deploy"].price is None and found["deploy"].device == "built elsewhere"
    whole = costs.total(rows)
    assert (whole["known"], whole["seconds"], whole["joules"], whole["memory"]) == (2, 5400, 500, 1.5)
    assert whole["price"] == pytest.approx(2.9)
    assert costs.total(costs.rows(read(two[1])))["price"] is None
    with pytest.raises(ValueError, match="prices: expected numbers from 0 on"):
        costs.Prices(core=-1)
