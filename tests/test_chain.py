"""pipeline/report/chain.py: the report's first figure, over a made-up run."""

from pathlib import Path

import pytest

from pipeline.report import chain, metrics
from pipeline.report.metrics import HEADLINES, Cost, MetricsRun
from tests import results


@pytest.fixture
def run(tmp_path: Path) -> MetricsRun:
    made = metrics.read(results.write(tmp_path / "metrics"))
    made.stages["corpus"] |= {"text": {"bytes": {"train": 8_492_649}}, "code": {"bytes": {"train": 6_800_417}}}
    made.stages["rlhf"] = {"held_out": {"gain": 0.3161, "gain_low": 0.2981, "gain_high": 0.3312}, "lineage": {}}
    return made


def test_each_stage_has_its_own_measure_its_change_and_its_time(run: MetricsRun) -> None:
    costs = [Cost("language", "k", {"seconds": 120.0}, "", None), Cost("code", "k", {"seconds": 60.0}, "", None)]
    steps = {step.stage: step for step in chain.steps(run, costs)}
    assert list(steps) == ["corpus", "tokenizer", "language", "code", "tools", "rlhf", "deploy"]
    assert steps["corpus"].value == "8.5 MB of text, 6.8 MB of code"
    language, code = steps["language"], steps["code"]
    assert (language.title, language.value, language.interval) == (
        "Stories that pass every clause",
        "62.0%",
        "56.0% to 68.0%",
    )
    assert language.change == "" and 'cx="74.4"' in language.bar  # 0.62 of 120 pixels
    assert (code.value, code.bar) == ("1.100", "") and code.against.endswith("vs. language")
    assert 'width="120.0"' in language.spent and 'width="60.0"' in code.spent and steps["tools"].spent == ""
    assert (steps["rlhf"].value, steps["rlhf"].interval) == ("+0.316", "+0.298 to +0.331")


def test_a_row_of_what_is_kept_is_shaded_by_the_best_of_its_models(run: MetricsRun) -> None:
    kept = chain.kept(run)
    assert kept["models"] == ["language", "code", "tools"]
    rows = {row["title"]: [(cell["text"], cell["shade"]) for cell in row["cells"]] for row in kept["rows"]}
    assert rows["Source code"] == [("2.200", 2), ("1.100", 4), ("1.200", 3)]  # half as good, the best, 0.92 of it
    assert rows["Stories that pass every clause"] == [("62.0%", 4), ("48.0%", 2), ("41.0%", 2)]
    assert rows["Easy problems, pass@1"][0] == ("0.0%", 1)
    assert "False calls" not in rows


def test_the_measures_of_the_figure_exist() -> None:
    keys = {headline.key for headline in HEADLINES}
    assert set(chain.MEASURES.values()) | set(chain.KEPT) <= keys
