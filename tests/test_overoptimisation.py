"""Policy against reference on held-out prompts: means over a prompt's answers, paired by prompt, separate by kind."""

from collections.abc import Sequence
from typing import Any

import pytest

from pipeline.evaluation import preferences
from pipeline.evaluation.preferences import HeldOutConfig, HeldOutPrompts
from pipeline.ingest.records import Pair
from pipeline.rl.answers import Answer, Prompt
from pipeline.rl.rewards import Resources, Scorer

# true scores of the answers: prompt -> (the reference's, the policy's); None is unknown
SCORES: dict[str, tuple[list[float | None], list[float | None]]] = {
    "a": ([0.0, 0.5], [1.0, 1.0]),
    "b": ([0.5, 0.5], [0.5, 1.0]),
    "c": ([1.0, 0.0], [0.0, 0.0]),
    "d": ([0.5, None], [1.0, 1.0]),
}
KINDS = {"a": "code", "b": "code", "c": "tools", "d": "tools"}


def prompts() -> list[Prompt]:
    found = []
    for name, kind in KINDS.items():
        pair = Pair(id=name, source="made", kind=kind, prompt=[], chosen=[], rejected=[], truth={})
        found.append(Prompt(name, [1], kind, pair))
    return found


class Setting:
    """Answers whose text says where they come from."""

    seed = 1

    def held_out(self, asked: Sequence[tuple[Prompt, int]], *, of_reference: bool = False) -> list[Answer]:
        who = 0 if of_reference else 1
        return [
            Answer(prompt, n, [5] * (2 + who), [-1.0] * (2 + who), True, f"{prompt.id}{who}{n}") for prompt, n in asked
        ]

    def divergence(self, given: Sequence[Answer]) -> tuple[float, float]:
        return 0.25 * len(given), 0.5


def held_out(monkeypatch: pytest.MonkeyPatch, **config: Any) -> HeldOutPrompts:
    def truth(answers: Sequence[Answer], judge: Any) -> list[float | None]:
        return [SCORES[one.text[0]][int(one.text[1])][int(one.text[2])] for one in answers]

    monkeypatch.setattr(preferences, "gold", truth)
    resources = Resources(max_new_tokens=8, preferred=lambda given: [len(one.ids) / 10 for one in given])
    scorer = Scorer({"preferred": 2.0}, resources)
    setting: Any = Setting()
    return HeldOutPrompts(prompts(), setting, None, scorer, HeldOutConfig(**{"best_of_prompts": 0} | config))


def test_each_prompt_counts_once_by_the_mean_of_its_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """a: 0.25 -> 1, b: 0.5 -> 0.75, c: 0.5 -> 0; d has an answer of unknown worth and is left out."""
    told = held_out(monkeypatch, report_samples=2).report()["held_out"]
    assert (told["prompts"], told["samples"], told["n"]) == (4, 2, 3)
    assert (told["gold_before"], told["gold"]) == (pytest.approx(1.25 / 3), pytest.approx(1.75 / 3))
    assert told["gain"] == pytest.approx(0.5 / 3)
    assert told["gain_low"] < told["gain"] < told["gain_high"]
    assert {name: told["code"][name] for name in ("gold_before", "gold", "n")} == {
        "gold_before": 0.375,
        "gold": 0.875,
        "n": 2,
    }
    assert told["tools"]["gain"] == -0.5
    assert (told["kl"], told["length"], told["proxy"]) == (
        2.0,
        3.0,
        pytest.approx(0.6),
    )  # over all 8 answers of the policy


def test_a_point_of_the_curve_has_what_training_is_paid_by(monkeypatch: pytest.MonkeyPatch) -> None:
    row = held_out(monkeypatch).row(0)
    assert row["gold"] == pytest.approx((1.0 + 0.5 + 0.0 + 1.0) / 4)  # the first answer to each
    assert (row["proxy"], row["held_out/preferred"]) == (pytest.approx(0.6), pytest.approx(0.3))


@pytest.mark.parametrize("wrong", [{"report_samples": 0}, {"eval_prompts": 1}, {"best_of": 0}])
def test_counts_that_measure_nothing_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="report_samples >= 1"):
        HeldOutConfig(**wrong)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[tuple[str, int]], bool]]:
    """What was asked in each call, and whether of the reference; a later answer to a prompt is longer."""
    found: list[tuple[list[tuple[str, int]], bool]] = []

    def held_out(self: Setting, given: Sequence[tuple[Prompt, int]], *, of_reference: bool = False) -> list[Answer]:
        found.append(([(prompt.id, n) for prompt, n in given], of_reference))
        return [Answer(prompt, n, [5] * (n + 1), [-1.0] * (n + 1), True, f"{prompt.id}00") for prompt, n in given]

    monkeypatch.setattr(Setting, "held_out", held_out)
    return found


@pytest.mark.parametrize("count", [2, 3, 100])
def test_every_evaluation_asks_the_same_first_prompts(
    count: int, asked: list[tuple[list[tuple[str, int]], bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = [prompt.id for prompt in held_out(monkeypatch).prompts]
    found = held_out(monkeypatch, eval_prompts=count)
    found.row(0)
    found.row(100)
    assert sorted(whole) == ["a", "b", "c", "d"]
    assert asked == [([(name, 0) for name in whole[:count]], False)] * 2
    assert found.report()["held_out"]["prompts"] == min(count, 4)


@pytest.mark.parametrize(("answers", "prompts"), [(1, 3), (2, 3), (4, 1), (4, 0)])
def test_best_of_n_has_so_many_answers_of_the_reference_to_so_many_prompts(
    answers: int, prompts: int, asked: list[tuple[list[tuple[str, int]], bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Longer answers have higher proxy rewards. If the true score is an answer's number, the best of n is the last."""
    found = held_out(monkeypatch, best_of=answers, best_of_prompts=prompts)
    monkeypatch.setattr(preferences, "gold", lambda given, judge: [float(one.sample) for one in given])
    report = found.report()
    if not prompts:
        assert "best_of_n" not in report and len(asked) == 2
        return
    known = [prompt.id for prompt in found.prompts if preferences.is_known(prompt.record)]  # type: ignore[arg-type]
    assert asked[2:] == [([(name, n) for name in known[:prompts] for n in range(answers)], True)]
    assert [row["n"] for row in report["best_of_n"]] == [n for n in (1, 2, 4) if n <= answers]
    assert report["best_of_n"][-1]["gold"] == pytest.approx(answers - 1)
