"""Steps that go wrong: what a spike is, when too many are skipped, where a rollback goes, and what first became
non-finite.
"""

import math
from collections.abc import Iterable

import pytest
import torch
from torch import nn

from pipeline.learning import update
from pipeline.learning.update import Course


def settled(loss: float = 2.0, spread: float = 0.1) -> Course:
    """128 applied steps whose losses lie `spread` above and below a mean."""
    course = Course()
    for step in range(128):
        update.applied(course, loss + (spread if step % 2 else -spread))
    return course


def followed(losses: Iterable[float], on_spike: str = "skip") -> tuple[Course, int, str]:
    """What fit does with the losses of a run, one after another: its course, the steps it made, and why it ended."""
    course = Course()
    for loss in losses:
        if why := update.risen(course, loss, on_spike):
            return course, course.step, why
        fault = update.fault(course, loss, 1.0, on_spike)
        left_out = course.broken_at if fault == update.NOT_FINITE else course.spikes_at
        if fault and not update.too_many(left_out, course.step):
            update.skipped(course, left_out)
        elif fault == update.NOT_FINITE:
            return course, course.step, fault
        else:
            update.applied(course, loss, new_level=bool(fault))
        course.step += 1
    return course, course.step, ""


def test_a_spike_is_a_loss_six_deviations_above_the_mean() -> None:
    course = settled()  # mean 2, deviation 0.1: the limit is 2.6
    assert update.fault(course, 2.59, 1.0, "skip") == ""
    assert "a spike: loss above 2.6" in update.fault(course, 2.61, 1.0, "skip")
    assert update.fault(course, -50.0, 0.0, "skip") == ""  # a fall is no spike
    assert update.fault(course, 2.61, 1.0, "ignore") == ""


def test_a_gradient_norm_alone_is_no_fault() -> None:
    """The recorded case: loss 0.0214, three norms of 1.80 in a row where the mean of the last 128 was 0.525."""
    course = settled(loss=0.0214, spread=0.002)
    for course.step in range(3):
        assert update.fault(course, 0.0214, 1.8, "skip") == ""
        assert update.risen(course, 0.0214, "skip") == ""
    assert update.fault(course, 0.0214, 1e9, "skip") == ""


def test_a_steady_loss_may_move_by_six_hundredths_of_itself() -> None:
    course = settled(spread=0.0)
    assert update.fault(course, 2.0 * 1.059, 1.0, "skip") == ""
    assert update.fault(course, 2.0 * 1.061, 1.0, "skip") != ""


def test_what_is_small_in_itself_is_no_spike() -> None:
    known_by_heart = settled(loss=3e-4, spread=1e-4)  # as for a causal model after 8 passes over its data
    assert update.fault(known_by_heart, 0.0135, 0.5, "skip") == ""
    assert "a spike: loss above 0.1003" in update.fault(known_by_heart, 0.101, 0.5, "skip")


def test_fewer_than_128_steps_make_no_spike_but_no_number_is_always_a_fault() -> None:
    course = settled()
    course.applied = course.applied[1:]
    assert update.fault(course, 1e9, 1.0, "skip") == ""
    for loss, norm in ((math.nan, 1.0), (math.inf, 1.0), (1.0, math.nan), (1.0, -math.inf)):
        assert update.fault(course, loss, norm, "ignore") == "not finite"


def test_only_the_last_128_steps_count() -> None:
    course = settled()
    for _ in range(128):
        update.applied(course, 20.0)
    assert len(course.applied) == 128 and update.fault(course, 20.5, 10.0, "skip") == ""


def test_the_third_in_a_row_or_the_tenth_in_a_thousand_is_one_too_many() -> None:
    assert [update.too_many(list(range(7, step)), step) for step in (7, 8, 9)] == [False, False, True]
    assert not update.too_many([7, 8], 10)
    course = Course()
    for number in range(30):  # one in 101 steps: nine or ten in a thousand
        course.step = 101 * number
        assert update.too_many(course.spikes_at, course.step) == (number >= 9), number
        update.skipped(course, course.spikes_at)
    course = Course()
    for course.step in range(0, 3600, 120):
        assert not update.too_many(course.broken_at, course.step)
        update.skipped(course, course.broken_at)
    assert course.skipped == 30 and course.spikes_at == []


def test_a_loss_that_rises_by_two_nats_and_stays_ends_the_run_after_a_hundred_steps() -> None:
    course, step, why = followed([2.0] * 300 + [4.0] * 200)
    assert "the loss rose and stayed high: 100 steps in a row more than 1 nat above 2," in why
    assert step == 399 and len(course.spikes_at) == 2  # the third in a row is the new level, which is trained on
    assert followed([2.0] * 300 + [2.9] * 500)[1:] == (800, "")
    assert followed([2.0] * 300 + [4.0] * 200, "ignore")[1:] == (500, "")  # a policy's loss has no unit


def test_a_loss_that_creeps_up_ends_the_run_too() -> None:
    """The running median follows a slow rise; the lowest median does not."""
    step, why = followed([2.0] * 200 + [2.0 + 0.01 * n for n in range(600)])[1:]
    assert why and step == 200 + 100 + 100


def test_a_loss_that_rises_for_a_while_and_comes_back_goes_on() -> None:
    course, step, why = followed(([2.0] * 300 + [4.0] * 99) * 4)
    assert (step, why) == (4 * 399, "") and course.skipped == 4 * 2


def test_steps_that_are_not_finite_end_the_run_at_the_third_and_never_with_spikes_together() -> None:
    nan = math.nan
    assert followed([2.0, nan, nan, 2.0, nan, nan, nan])[1:] == (6, "not finite")
    course, step, why = followed([2.0] * 200 + [9.0, 9.0, nan, nan, 2.0])
    assert (step, why) == (205, "") and (course.spikes_at, course.broken_at) == ([200, 201], [202, 203])


def test_a_rollback_goes_to_the_newest_evaluation_sixteen_steps_old() -> None:
    course = Course(step=100, evaluated=[40, 84, 85])
    assert update.rollback_target(course) == 84
    assert update.rollback_targets(course) == [84, 85]
    course.step = 50
    assert update.rollback_target(course) is None and update.rollback_targets(course) == [40, 84, 85]


def test_a_second_rollback_goes_to_the_state_of_the_first_and_never_behind_it() -> None:
    course = Course(step=110, evaluated=[40, 84], windows=[[84, 17]])
    assert update.rollback_target(course) == 84
    course.step = 90  # six steps after a rollback: the state of 40 may be gone, and would bring the window back
    assert update.rollback_target(course) == 84 and update.rollback_targets(course) == [84]
    course.step, course.evaluated = 120, [40, 84, 100, 110]
    assert update.rollback_target(course) == 100


def test_the_best_of_a_rollback_is_the_best_that_was_known_there() -> None:
    course = Course()
    for course.step, loss in ((10, 3.0), (20, 2.0), (30, 2.5), (40, 1.0)):
        course.compare(loss, threshold=0.0, patience=0)
    assert course.bests == [10, 20, 40] and course.best_step == 40
    assert [update.best_before(course, step) for step in (5, 10, 35, 40, 99)] == [-1, 10, 20, 40, 40]


def test_after_a_rollback_the_batches_of_the_window_are_never_read_again() -> None:
    course = Course(step=84)
    update.give_up(course, step=100, index=100)
    read = []
    for step in range(84, 120):
        course.step = step
        read.append(course.index)
    assert read == list(range(101, 137))
    update.give_up(Course(step=90, windows=course.windows), 95, 112)
    course.step = 90
    update.give_up(course, step=95, index=112)  # a second one, from inside the steps after the first
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

    assert update.culprit(model, forward) == update.NOTHING
    with torch.no_grad():
        model.second.weight[0, 0] = math.inf
    assert update.culprit(model, forward) == "the output of second"
    with torch.no_grad():
        model.first.bias[1] = math.nan
    assert update.culprit(model, forward) == "the output of first"
    model = Net()
    model.first.weight.grad = torch.full((3, 3), math.nan)
    assert update.culprit(model, forward) == "the gradient of first.weight"
    assert not model.first._forward_hooks


@pytest.mark.parametrize("name", ["on_nonfinite", "on_spike"])
def test_the_choices_are_refused_by_name(name: str) -> None:
    from pipeline.learning.settings import FitConfig

    with pytest.raises(ValueError, match=f"{name}: expected one of skip, stop, rollback"):
        FitConfig(**{"steps": 1, "learning_rate": 0.1, name: "panic"})  # type: ignore[arg-type]


def test_of_equal_validation_losses_the_first_one_is_the_best() -> None:
    course = Course()
    for course.step, loss in ((10, 2.0), (20, 1.5), (30, 1.5), (40, 1.5)):
        course.compare(loss, threshold=0.0, patience=0)
    assert course.best_step == 20 and course.bests == [10, 20] and course.stale == 2


def test_losses_before_a_planned_change_of_data_are_no_measure() -> None:
    course = Course()
    for _ in range(update.HISTORY):
        assert update.risen(course, 0.2, "skip") == "" and not update.fault(course, 0.2, 1.0, "skip")
        update.applied(course, 0.2)
    assert update.fault(course, 3.0, 1.0, "skip")
    for step in range(2 * update.STAYED):
        update.new_level(course)  # called at each step; only the first call counts
        assert not update.fault(course, 3.0, 1.0, "skip") and update.risen(course, 3.0, "skip") == ""
        update.applied(course, 3.0)
        assert len(course.applied) == min(step + 1, update.HISTORY)
    assert update.fault(course, 9.0, 1.0, "skip")  # spikes are faults again
