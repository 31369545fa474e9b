"""Steps that go wrong: what a spike is, when skipping is too much, where a rollback goes, and what is not finite first."""

import math

import pytest
import torch
from torch import nn

from pipeline.learning import verdict
from pipeline.learning.course import Course


def settled(loss: float = 2.0, norm: float = 1.0, spread: float = 0.1) -> Course:
    """128 applied steps whose losses and norms lie `spread` around a mean."""
    course = Course()
    for step in range(128):
        sign = 1 if step % 2 else -1
        verdict.applied(course, loss + sign * spread, norm + sign * spread)
    return course


def test_a_spike_is_six_deviations_above_the_mean_of_loss_or_norm() -> None:
    course = settled()  # mean 2, deviation 0.1: the limit is 2.6
    assert verdict.fault(course, 2.59, 1.59, "skip") == ""
    assert "a spike: loss above 2.6" in verdict.fault(course, 2.61, 1.0, "skip")
    assert "a spike: gradient norm above 1.6" in verdict.fault(course, 2.0, 1.61, "skip")
    assert verdict.fault(course, -50.0, 0.0, "skip") == ""  # a fall is none
    assert verdict.fault(course, 2.61, 1.0, "ignore") == ""


def test_a_steady_loss_may_move_by_six_hundredths_of_itself() -> None:
    course = settled(spread=0.0)
    assert verdict.fault(course, 2.0 * 1.059, 1.0, "skip") == ""
    assert verdict.fault(course, 2.0 * 1.061, 1.0, "skip") != ""


def test_what_is_small_in_itself_is_no_spike() -> None:
    known_by_heart = settled(
        loss=3e-4, norm=0.01, spread=1e-4
    )  # as the causal control of stage_diffusion is at the end of 8 passes
    assert verdict.fault(known_by_heart, 0.0135, 0.5, "skip", clip=1.0) == ""
    assert "a spike: loss above 0.1003" in verdict.fault(known_by_heart, 0.101, 0.5, "skip", clip=1.0)
    assert "a spike: gradient norm above 1," in verdict.fault(known_by_heart, 0.0135, 1.01, "skip", clip=1.0)
    assert "a spike: gradient norm above 0.0106" in verdict.fault(known_by_heart, 0.0, 0.011, "skip", clip=0.0)


def test_fewer_than_128_steps_make_no_spike_but_no_number_is_always_a_fault() -> None:
    course = settled()
    course.applied = course.applied[1:]
    assert verdict.fault(course, 1e9, 1.0, "skip") == ""
    for loss, norm in ((math.nan, 1.0), (math.inf, 1.0), (1.0, math.nan), (1.0, -math.inf)):
        assert verdict.fault(course, loss, norm, "ignore") == "not finite"


def test_only_the_last_128_steps_count() -> None:
    course = settled()
    for _ in range(128):
        verdict.applied(course, 20.0, 10.0)
    assert len(course.applied) == 128 and verdict.fault(course, 20.5, 10.0, "skip") == ""


def test_three_in_a_row_or_ten_in_a_thousand_are_too_many() -> None:
    course, answers = Course(), []
    for _ in range(3):
        answers.append(verdict.skipped(course))
    assert answers == [False, False, True]
    course = Course()
    for number in range(30):  # one in 101 steps: nine or ten in a thousand
        course.step = 101 * number
        verdict.applied(course, 1.0, 1.0)
        assert verdict.skipped(course) == (number >= 9), number
    course = Course()
    for number in range(30):
        course.step = 120 * number
        verdict.applied(course, 1.0, 1.0)
        assert not verdict.skipped(course)
    assert course.skipped == 30


def test_a_rollback_goes_to_the_newest_evaluation_sixteen_steps_old() -> None:
    course = Course(step=100, evaluated=[40, 84, 85])
    assert verdict.rollback_target(course) == 84
    assert verdict.rollback_targets(course) == [84, 85]
    course.step = 50
    assert verdict.rollback_target(course) is None and verdict.rollback_targets(course) == [40, 84, 85]


def test_a_second_rollback_goes_to_the_state_of_the_first_and_never_behind_it() -> None:
    course = Course(step=110, evaluated=[40, 84], windows=[[84, 17]])
    assert verdict.rollback_target(course) == 84
    course.step = 90  # six steps after it went back: the state of 40 may be gone, and would bring the window back
    assert verdict.rollback_target(course) == 84 and verdict.rollback_targets(course) == [84]
    course.step, course.evaluated = 120, [40, 84, 100, 110]
    assert verdict.rollback_target(course) == 100


def test_the_best_of_a_rollback_is_the_best_that_was_known_there() -> None:
    course = Course()
    for course.step, loss in ((10, 3.0), (20, 2.0), (30, 2.5), (40, 1.0)):
        course.compare(loss, threshold=0.0, patience=0)
    assert course.bests == [10, 20, 40] and course.best_step == 40
    assert [verdict.best_before(course, step) for step in (5, 10, 35, 40, 99)] == [-1, 10, 20, 40, 40]


def test_after_a_rollback_the_batches_of_the_window_are_never_read_again() -> None:
    course = Course(step=84)
    verdict.give_up(course, step=100, index=100)
    read = []
    for step in range(84, 120):
        course.step = step
        read.append(course.index)
    assert read == list(range(101, 137))
    verdict.give_up(Course(step=90, windows=course.windows), 95, 112)
    course.step = 90
    verdict.give_up(course, step=95, index=112)  # a second one, from inside what followed the first
    assert [Course(step=s, windows=course.windows).index for s in (83, 84, 89, 90, 91)] == [83, 101, 106, 113, 114]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def test_the_culprit_is_the_first_module_or_else_the_gradient() -> None:
    model, x = Net(), torch.ones(2, 3)

    def forward() -> None:
        model(x)

    assert verdict.culprit(model, forward) == verdict.NOTHING
    with torch.no_grad():
        model.second.weight[0, 0] = math.inf
    assert verdict.culprit(model, forward) == "the output of second"
    with torch.no_grad():
        model.first.bias[1] = math.nan
    assert verdict.culprit(model, forward) == "the output of first"
    model = Net()
    model.first.weight.grad = torch.full((3, 3), math.nan)
    assert verdict.culprit(model, forward) == "the gradient of first.weight"
    assert not model.first._forward_hooks


@pytest.mark.parametrize("name", ["on_nonfinite", "on_spike"])
def test_the_choices_are_refused_by_name(name: str) -> None:
    from pipeline.learning.settings import FitConfig

    with pytest.raises(ValueError, match=f"{name}: expected one of skip, stop, rollback"):
        FitConfig(**{"steps": 1, "learning_rate": 0.1, name: "panic"})  # type: ignore[arg-type]
