"""What a run should show, each claim with what was measured, and what went wrong on the way.

    claims(run)     a model is better than what it was made from, a reward model ranks, exports answer as their model ...
    gates(run, gate)  whether the deployed model may be champion
    alarms(run)     what reinforcement learning said about its own curve (reinforcement/alarms.py)
    skipped(run)    what was not measured, and why

A claim holds where its 95 % interval lies on the right side; a miss is shown as one. Not promised: that a claim that holds here holds
for another seed (benchmarks/seeds.py puts runs of several side by side).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pipeline.report import differences
from pipeline.report.headlines import HEADLINES, lookup
from pipeline.report.run import Run, flat

HOLDS, FAILS, UNKNOWN = "holds", "does not hold", "not measured"
UNDECIDED = "no verdict"  # the two sides were asked other items, or too few
# a measure, the model that should be better at it, and than which
BETTER = (
    ("code_bpb", "code", "language", "Learning code lowers the bits per byte of code"),
    ("ast", "tools", "code", "Fine-tuning teaches tool calls"),
    ("easy", "tools", "code", "Fine-tuning teaches answering with programs"),
    ("medium", "grpo", "tools", "GRPO solves more unseen compositions than its start"),
    ("facts", "memory", "code", "A memory knows more facts than the model beside which it stands"),
    ("facts", "memory", "memory_baseline", "A memory knows more facts than as many weights in a wider model"),
)
# title, stage, path of an interval's lower end, what it must be above
ABOVE = (
    ("The reward model ranks better than chance", "reward", ("test", "accuracy"), 0.5),
    ("DPO tells held-out pairs apart, against its start", "dpo", ("test", "accuracy"), 0.5),
    ("PPO raises the true score of held-out answers", "rlhf", ("held_out", "gain"), 0.0),
    ("GRPO raises pass@1 on held-out problems", "grpo", ("held_out", "gain"), 0.0),
    ("Diffusion-DPO tells more held-out pairs apart than its start", "diffusion_dpo", ("test", "gain"), 0.0),
    ("Coupled-GRPO raises pass@1 on held-out problems", "diffusion_grpo", ("held_out", "gain"), 0.0),
)


@dataclass(frozen=True)
class Claim:
    """A claim and what was measured."""

    title: str
    measured: str
    state: str  # HOLDS, FAILS, UNKNOWN or UNDECIDED


def claims(run: Run) -> list[Claim]:
    """All of them, in pipeline order of their models."""
    return [*_better(run), *_above(run), *_exports(run), *_chapters(run)]


def _better(run: Run) -> Iterator[Claim]:
    by_key = {headline.key: headline for headline in HEADLINES}
    for key, model, base, title in BETTER:
        before, after = differences.of_model(run, base), differences.of_model(run, model)
        told = differences.change(by_key[key], before, after) if before and after else None
        if told is None:
            yield Claim(title, "", UNKNOWN)
            continue
        show = told.headline.show
        text = f"{model} {show(told.after)}, {base} {show(told.before)}: {told.shown}"
        judged = HOLDS if told.kind == "better" else FAILS
        yield Claim(title, text, UNDECIDED if told.refused or told.few else judged)


def _above(run: Run) -> Iterator[Claim]:
    for title, stage, path, least in ABOVE:
        place: Any = run.stages.get(stage, {})
        for key in path[:-1]:
            place = place.get(key, {})
        value, low, high = (place.get(f"{path[-1]}{end}") for end in ("", "_low", "_high"))
        if not all(isinstance(number, int | float) for number in (value, low, high)):
            yield Claim(title, "", UNKNOWN)
            continue
        text = f"{value:.3f} ({low:.3f} to {high:.3f}), more than {least:g} is claimed"
        yield Claim(title, text, HOLDS if low > least else FAILS)


def _exports(run: Run) -> Iterator[Claim]:
    title, parity = "Every export answers as the model that was evaluated", run.stages.get("deploy", {}).get("parity")
    if not parity:
        yield Claim(title, "", UNKNOWN)
        return
    told = ", ".join(f"{kind} {one['greedy_equal']} of {one['greedy_tokens']} tokens" for kind, one in parity.items())
    exact = all(one["greedy_equal"] == one["greedy_tokens"] for one in parity.values())
    yield Claim(title, told, HOLDS if exact else FAILS)


def _chapters(run: Run) -> Iterator[Claim]:
    title, router = "No chapter of the memory is dead", run.stages.get("memory", {}).get("router")
    unused = {name: n for name, n in flat(router or {}).items() if name.endswith("chapters_unused")}
    if not unused:
        yield Claim(title, "", UNKNOWN)
        return
    told = ", ".join(f"{n:g}" for n in unused.values())
    yield Claim(title, f"never chosen, by layer: {told}", FAILS if any(unused.values()) else HOLDS)


def gates(run: Run, gate: dict[str, float]) -> list[Claim]:
    """What the deployed model must reach to be champion (`report.gate`), by the worse end of each interval."""
    by_key = {headline.key: headline for headline in HEADLINES}
    model = str(run.stages.get("deploy", {}).get("model", ""))
    found = []
    for key, least in gate.items():
        headline, measured = by_key[key], lookup(run.evaluations.get(model, {}), by_key[key])
        title = f"{headline.title} of {model or 'the deployed model'}: at {'least' if headline.higher_is_better else 'most'} {headline.show(least)}"
        if measured is None:
            found.append(Claim(title, "", UNKNOWN))
            continue
        worst = measured.get("low" if headline.higher_is_better else "high", measured["value"])
        reached = worst >= least if headline.higher_is_better else worst <= least
        found.append(
            Claim(
                title,
                f"{headline.show(measured['value'])}, at worst {headline.show(worst)}",
                HOLDS if reached else FAILS,
            )
        )
    return found


def alarms(run: Run) -> list[tuple[str, int, str]]:
    """(stage, step, what) of each alarm."""
    return [
        (name, int(step), what)
        for name, numbers in run.stages.items()
        for what, step in (numbers.get("alarms") or {}).items()
    ]


def skipped(run: Run) -> list[tuple[str, str, str]]:
    """(model, suite, reason) of each measurement that was left out."""
    return [
        (model, name.removesuffix(" / skipped"), value)
        for model, numbers in run.evaluations.items()
        for name, value in flat(numbers).items()
        if isinstance(value, str) and value.startswith("skipped")
    ]
