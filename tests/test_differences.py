"""pipeline/report/{differences,claims,compare,costs}.py: what changed between two runs, and whether it is more than
chance.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.report import card, claims, compare, metrics
from pipeline.report.claims import Measured
from pipeline.report.metrics import HEADLINES, MetricsRun, read
from tests import results

BY_KEY = {headline.key: headline for headline in HEADLINES}
DATA = {"data/problems": "d1", "models/tools": "any"}
EXPORT = {"max_difference": 0.0, "divergence": 1e-6, "greedy_equal": 6, "greedy_tokens": 64}


def solved(right: list[int], data: dict[str, str] = DATA) -> Measured:
    rate = float(np.mean(right))
    rows = [{"suite": "problems", "id": f"p{n}", "group": "medium", "sampled": r} for n, r in enumerate(right)]
    numbers = {"problems": {"medium": {"pass_at_1": rate, "pass_at_1_low": rate - 0.1, "pass_at_1_high": rate + 0.1}}}
    return Measured(numbers | {"lineage": {"inputs": data}}, rows)


def test_items_that_both_were_asked_are_paired_so_a_small_steady_gain_shows() -> None:
    before = [1, 0] * 50
    after = [1, 0] * 40 + [1, 1] * 10  # ten problems gained, none lost
    told = claims.change(BY_KEY["medium"], solved(before), solved(after))
    assert told is not None and told.items == 100 and told.kind == "better"
    assert told.low is not None and told.high is not None and 0 < told.low < 0.1 < told.high
    assert told.shown.startswith("+10.0 points (4.") or told.shown.startswith("+10.0 points (5.")
    worse = claims.change(BY_KEY["medium"], solved(after), solved(before))
    assert worse is not None and worse.kind == "worse" and worse.shown.startswith("−10.0 points (−1")


@pytest.mark.parametrize("other", [{"data/problems": "d2"}, {}])
def test_items_of_other_data_are_refused_even_if_their_ids_are_equal(other: dict[str, str]) -> None:
    told = claims.change(BY_KEY["medium"], solved([1, 0] * 50), solved([1, 1] * 50, other))
    assert told is not None and (told.items, told.low, told.kind) == (0, None, "")
    assert told.shown == told.refused == "measured on different items: different contents of data/problems"
    unread = claims.change(BY_KEY["medium"], solved([1, 0] * 50), solved([1, 1] * 50, DATA | {"data/facts": "f2"}))
    assert unread is not None and unread.kind == "better", "data that the suite does not read change nothing"


def asked(right: list[int], *, data_seed: int = 42, hashes: str = "h", **settings: int) -> Measured:
    """Problems whose rows say what was asked, from data with their own digest."""
    found = solved(right, {"data/problems": f"{data_seed}{hashes}{settings}"})
    rows = [row | {"item": f"{hashes}{n}"} for n, row in enumerate(found.rows)]
    return Measured(found.numbers | {"settings": {"data_seed": data_seed, **settings}}, rows)


def test_the_same_items_are_paired_though_the_data_around_them_have_changed() -> None:
    told = claims.change(BY_KEY["medium"], asked([1, 0] * 50), asked([1, 1] * 50, samples=3))
    assert told is not None and (told.items, told.kind, told.refused) == (100, "better", "")


def test_other_items_are_refused_by_name_whatever_the_values_are() -> None:
    told = claims.change(BY_KEY["medium"], asked([0] * 100), asked([1] * 100, data_seed=1, hashes="x"))
    assert told is not None and (told.kind, told.low) == ("", None)
    assert told.shown == "measured on different items: data_seed 42 and 1"
    assert told.apart == "0 of 100 and 100 items are the same; only in one run: p0, p1, p2, ..."
    one_seed = Measured(asked([0] * 100).numbers | {"settings": {"seed": 1}}, asked([0] * 100, hashes="x").rows)
    told = claims.change(BY_KEY["medium"], asked([0] * 100), one_seed)
    assert told is not None and told.refused == "measured on different items: data_seed 42 and 1", "a run of one seed"


def test_a_part_of_the_items_is_compared_over_that_part_alone() -> None:
    """Of 40 of the 100 problems, 20 were solved before and 30 after, whatever became of the other 60."""
    before, after = asked([1, 0] * 20 + [1] * 60), asked([1, 1, 1, 0] * 10, canvas_problems=40)
    for first, second, change in ((before, after, 0.25), (after, before, -0.25)):
        told = claims.change(BY_KEY["medium"], first, second)
        assert told is not None and told.items == 40 and told.after - told.before == pytest.approx(change)
        assert told.kind == ("better" if change > 0 else "worse")
    crossed = Measured(before.numbers, before.rows[1:])
    told = claims.change(BY_KEY["medium"], crossed, asked([1] * 30, problems=30))
    assert told is not None and told.refused == "measured on different items: evaluate.problems None and 30"
    assert told.apart == "29 of 99 and 30 items are the same; only in one run: p30, p31, p32, ..."


def test_under_twenty_items_nothing_is_better_or_worse() -> None:
    for count, kind in ((20, "worse"), (19, "")):
        told = claims.change(BY_KEY["medium"], asked([1] * count), asked([0] * count))
        assert told is not None and (told.items, told.kind) == (count, kind)
        assert told.shown.endswith(", too few items: 19") == (count == 19)
    rows = [{"suite": "tools", "id": f"d{n}", "item": f"h{n}", "wanted": ("call", "nothing")[n % 2]} for n in range(30)]
    numbers = {"ast": 0.5, "ast_low": 0.4, "ast_high": 0.6}
    calls = [Measured({"tools": {key: value + 0.3 * more for key, value in numbers.items()}}, rows) for more in (0, 1)]
    told = claims.change(BY_KEY["ast"], *calls)
    assert told is not None and (told.items, told.kind, told.low) == (15, "", None), (
        "the turns that want a call are counted"
    )
    told = claims.change(
        BY_KEY["ast"], *(Measured(one.numbers, rows + [row | {"id": f"{row['id']}+"} for row in rows]) for one in calls)
    )
    assert told is not None and (told.items, told.kind) == (30, "better")


def test_bits_per_byte_are_ratios_of_sums_and_less_is_better() -> None:
    def measured(bits: list[float]) -> Measured:
        rows = [{"suite": "code", "id": str(n), "bits": b, "bytes": 10 * (n + 1)} for n, b in enumerate(bits)]
        bpb = sum(bits) / sum(10 * (n + 1) for n in range(len(bits)))
        return Measured({"code": {"bpb": bpb, "bpb_low": bpb, "bpb_high": bpb}, "lineage": {}}, rows)

    first = [20.0 * (n + 1) for n in range(20)]
    told = claims.change(BY_KEY["code_bpb"], measured(first), measured([b - 1 for b in first]))
    assert told is not None and told.kind == "better" and told.after - told.before == pytest.approx(-20 / 2100)
    assert told.high is not None and told.high < 0


def test_a_measure_that_one_side_lacks_has_no_difference() -> None:
    assert claims.change(BY_KEY["ast"], solved([1]), solved([0])) is None


@pytest.fixture
def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A run, and another in which the learning rate of `code` was changed."""
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
    edit(
        second / "eval/tools.json",
        lambda told: (
            told
            | {
                "problems": told["problems"]
                | {"medium": {"pass_at_1": 0.5, "pass_at_1_low": 0.4, "pass_at_1_high": 0.6}}
            }
        ),
    )
    return first, second


def edit(path: Path, change: Any) -> None:
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


def test_a_stage_differs_because_of_a_parameter_or_of_what_it_reads(two: tuple[Path, Path]) -> None:
    first, second = read(two[0]), read(two[1])
    told = {one.stage: one for one in claims.stages(first, second)}
    assert list(told) == ["code", "tools", "deploy"]
    assert told["code"].why == ["fit.learning_rate: 0.1 → 0.2"]
    assert told["tools"].why == ["its inputs from code"] and told["tools"].keys[1] == "follows"
    assert claims.stages(first, first) == []
    without = MetricsRun({k: v for k, v in second.stages.items() if k != "deploy"}, {}, {})
    assert claims.stages(second, without)[0].why == ["built only in the first run"]


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
        and "12.5%" in moved[0]
        and "50.0%" in moved[0]
        and "better" in moved[0]
        and moved[0].endswith("intervals")
    )
    assert "Running text" not in text and "Running text" in compare.render(
        read(two[0]), read(two[1]), ("a", "b"), every=True
    )
    table = compare.render(read(two[0]), read(two[1]), ("a", "b"), markdown=True)
    assert "| --- |" in table and table.count("| code |") == 1
    assert "the same run" in compare.render(read(two[0]), read(two[0]), ("a", "a"))


@pytest.fixture
def two_seeds(tmp_path: Path) -> tuple[Path, Path]:
    """A run, and another with a different data_seed whose models are worse at everything; 4 documents, 40 problems."""
    first, second = results.write(tmp_path / "a"), results.write(tmp_path / "b")
    for folder, seed, right in ((first, 42, 1), (second, 1, 0)):
        for model in results.MODELS:
            rows = [
                {"suite": "text", "id": f"t{n}", "item": f"{seed}{n}", "bits": 9.0 - right, "bytes": 8}
                for n in range(4)
            ]
            rows += [
                {"suite": "problems", "id": f"p{n}", "item": f"h{n}", "group": "easy", "sampled": right}
                for n in range(40)
            ]
            rows += [
                {"suite": "code", "id": f"c{n}", "item": f"h{n}", "bits": 9.0 - right, "bytes": 8} for n in range(19)
            ]
            (folder / f"eval/{model}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
            bits, told = {"bpb": (9.0 - right) / 8}, json.loads((folder / f"eval/{model}.json").read_text())
            told |= {"text": bits, "code": bits, "settings": {"data_seed": seed}}
            (folder / f"eval/{model}.json").write_text(json.dumps(told | {"problems": {"easy": {"pass_at_1": right}}}))
        edit(
            folder / "corpus.json",
            lambda told, seed=seed: (
                told | {"params": {"data_seed": seed}, "lineage": told["lineage"] | {"key": f"k{seed}"}}
            ),
        )
    return first, second


def test_a_comparison_of_two_data_seeds_gives_no_verdict_on_their_own_items(two_seeds: tuple[Path, Path]) -> None:
    text = compare.render(read(two_seeds[0]), read(two_seeds[1]), ("a", "b"))
    assert "data_seed: 42 → 1" in text
    of_tools = [line for line in text.splitlines() if line.startswith("tools ")]
    running, solved_ones, source = (
        next(line for line in of_tools if title in line)
        for title in ("Running text", "Easy problems, pass@1", "Source code")
    )
    assert "measured on different items: data_seed 42 and 1" in running and running.endswith("not compared")
    assert "WORSE" in solved_ones and solved_ones.endswith("40 items, paired")
    assert "too few items: 19" in source and "WORSE" not in source
    assert (
        "  text: 0 of 4 and 4 items are the same; only in one run: t0, t1, t2, ... (language, code, tools)"
        in text.splitlines()
    )


def test_the_report_says_of_its_baseline_what_it_was_measured_over(two_seeds: tuple[Path, Path]) -> None:
    page = card.render(two_seeds[1], baseline=("before", read(two_seeds[0])))
    assert (
        page.count('<td>1.000</td><td>1.125</td><td class="">measured on different items: data_seed 42 and 1</td>') == 3
    )
    assert "too few items: 19" in page and '<td class="worse">−100.0 points' in page
    assert "too few items: 4</small>" in card.render(two_seeds[1]), "a change from the model before, within the run"


def test_a_claim_holds_or_fails_by_its_interval_and_says_when_nothing_was_shown_or_measured() -> None:
    stages = {
        "reward": {"lineage": {}, "test": {"accuracy": 0.6, "accuracy_low": 0.51, "accuracy_high": 0.7}},
        "kto": {"lineage": {}, "pairs": {"accuracy": 0.4, "accuracy_low": 0.31, "accuracy_high": 0.49}},
        "rlhf": {
            "lineage": {},
            "held_out": {"gain": 0.1, "gain_low": -0.01, "gain_high": 0.2},
            "alarms": {"entropy": 40},
        },
        "deploy": {"lineage": {}, "parity": {"q8_0": EXPORT | {"divergence": 6e-3}, "f16": EXPORT}},
    }
    tools = solved([1, 0] * 50).numbers
    run = MetricsRun(
        stages,
        {},
        {"tools": tools, "grpo": solved([1, 1] * 50).numbers},
        {"tools": solved([1, 0] * 50).rows, "grpo": solved([1, 1] * 50).rows},
    )
    told = {one.title: one for one in claims.claims(run)}
    assert told["The reward model ranks better than chance"].state == claims.HOLDS
    assert told["Reinforcement learning from the reward model raises the true score"].state == claims.NOT_SHOWN
    assert told["KTO's implicit rewards rank held-out pairs better than chance"].state == claims.FAILS
    assert told["GRPO raises pass@1 on held-out problems"].state == claims.UNKNOWN
    assert told["GRPO solves more unseen compositions than its base model"].state == claims.HOLDS
    for grpo, state in (([1, 0] * 50, claims.NOT_SHOWN), ([0, 0] * 50, claims.FAILS)):
        run.evaluations["grpo"], run.items["grpo"] = solved(grpo).numbers, solved(grpo).rows
        again = {one.title: one for one in claims.claims(run)}
        assert again["GRPO solves more unseen compositions than its base model"].state == state
    assert "grpo 100.0%, tools 50.0%" in told["GRPO solves more unseen compositions than its base model"].measured
    export = told["Every export matches the model that was evaluated, up to the rounding of its format"]
    assert export.state == claims.FAILS
    assert export.measured == "q8_0: the divergence is 6.00e-03 nats per token (at most 0.005)"
    assert claims.alarms(run) == [("rlhf", 40, "entropy")]
    skipped = MetricsRun({}, {}, {"tools": {"problems": {"skipped": "skipped: no sandbox"}}})
    assert claims.skipped(skipped) == [("tools", "problems", "skipped: no sandbox")]


@pytest.mark.parametrize(
    ("parity", "state", "measured"),
    [
        ({"q8_0": EXPORT | {"divergence": 2.1e-3}}, claims.HOLDS, "mean divergence in nats per token: q8_0 2.1e-03"),
        ({"huggingface": EXPORT}, claims.FAILS, "only 6/64 greedy tokens agree"),
        ({"huggingface": {"max_difference": 0.0}}, claims.HOLDS, "huggingface 0.0e+00"),  # a reward model
    ],
)
def test_an_export_is_judged_by_the_limit_of_its_format(
    parity: dict[str, dict[str, float]], state: str, measured: str
) -> None:
    """A token that 8-bit rounding changes is not a fault, but in an exact copy it is."""
    (export,) = (
        one for one in claims.claims(MetricsRun({"deploy": {"parity": parity}}, {}, {})) if "export" in one.title
    )
    assert export.state == state and measured in export.measured


@pytest.mark.parametrize(
    ("tools", "grpo", "said"),
    [
        (asked([0] * 19), asked([1] * 19), "too few items: 19"),
        (
            asked([0] * 40),
            asked([1] * 40, hashes="x", problems=40),
            "measured on different items: evaluate.problems None and 40",
        ),
    ],
)
def test_a_claim_over_few_or_other_items_has_no_verdict(tools: Measured, grpo: Measured, said: str) -> None:
    run = MetricsRun({}, {}, {"tools": tools.numbers, "grpo": grpo.numbers}, {"tools": tools.rows, "grpo": grpo.rows})
    (one,) = [
        one for one in claims.claims(run) if one.title == "GRPO solves more unseen compositions than its base model"
    ]
    assert one.state == claims.UNDECIDED and said in one.measured


def test_money_is_hours_of_cores_and_gpus_and_a_sum_is_of_what_is_known(two: tuple[Path, Path], tmp_path: Path) -> None:
    for name, key, speed in (
        (
            "code",
            "changed",
            {
                "seconds": 1800,
                "cores": 2,
                "cpu_seconds": 3000,
                "host_memory_gb": 1.5,
                "device": "a CPU (cpu)",
                "joules": 500,
            },
        ),
        ("tools", "follows", {"seconds": 3600, "cores": 8, "device": "H100 (cuda)", "joules": "not measured"}),
    ):
        (tmp_path / ".work" / name / key).mkdir(parents=True)
        (tmp_path / ".work" / name / key / "speed.json").write_text(json.dumps(speed))
    edit(two[1] / "deploy.json", lambda told: told | {"lineage": told["lineage"] | {"key": "elsewhere"}})
    rows = metrics.rows(read(two[1]), metrics.Prices(core=0.1, gpu=2.0))
    found = {row.stage: row for row in rows}
    assert found["code"].price == pytest.approx(0.1) and found["tools"].price == pytest.approx(0.8 + 2.0)
    assert found["deploy"].price is None and found["deploy"].device == "built elsewhere"
    whole = metrics.total(rows)
    assert (whole["known"], whole["seconds"], whole["joules"], whole["memory"]) == (2, 5400, 500, 1.5)
    assert whole["price"] == pytest.approx(2.9)
    assert metrics.total(metrics.rows(read(two[1])))["price"] is None
    with pytest.raises(ValueError, match="prices: expected non-negative numbers"):
        metrics.Prices(core=-1)


def test_packages_that_differ_are_named_with_the_stages_that_they_computed(tmp_path: Path) -> None:
    runs = []
    for torch, lock in (("2.13.0", "aa"), ("2.14.0", "bb")):
        folder = tmp_path / torch
        folder.mkdir()
        for stage in ("language", "code"):
            versions = {"numpy": "2.4", "torch": torch if stage == "code" else "2.13.0", "requirements.lock": lock}
            told = {"lineage": {"key": f"{stage}{torch}", "code": "c", "inputs": {}, "versions": versions}}
            (folder / f"{stage}.json").write_text(json.dumps(told))
        runs.append(read(folder))
    assert claims.packages(*runs) == ["requirements.lock: aa → bb (language, code)", "torch: 2.13.0 → 2.14.0 (code)"]
    assert claims.packages(runs[0], runs[0]) == []
    assert "The runs used different package versions" in compare.render(*runs, ("a", "b"))
