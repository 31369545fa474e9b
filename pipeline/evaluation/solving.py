"""What reinforcement learning from executed code did to held-out problems: pass@1 before and after, and at what
divergence.

Every evaluation answers the same problems with the same seeds. At the end policy and reference are compared problem by
problem (paired bootstrap). The problems are those that no training and no test sees (`data/problems/val.jsonl`).

Which problems a policy learns most from: those that it solves sometimes.

A group whose completions all pass, or all fail, has no advantages. `frontier` measures how often the policy solves each
problem before training and keeps those between 20 and 80 % of 8 samples. A problem whose first 4 samples all pass, or
all fail, is asked no further and counts as solved always, or never: of the problems that 8 samples would keep, this
leaves out 3 to 21 % (those solved 4 times, and 2 or 6 times), and it spares half the samples of all that are too easy
or too hard. What is kept is what 8 samples would keep. The measurement is kept in the work folder: a resumed run asks
nothing again.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.evaluation.intervals import paired_difference, ratio
from pipeline.rl.answers import Answer, Prompt
from pipeline.rl.models import Setting
from pipeline.rl.rewards import judged
from pipeline.run.device import generator, stable_hash
from pipeline.run.errors import DataError
from pipeline.run.tracking import progress, say
from pipeline.run.workdir import write_atomically
from pipeline.sandbox.judge import Judge

More = Callable[[list[Answer]], dict[str, Any]]
SHOWN = 16  # sample answers that are kept


@dataclass(frozen=True, kw_only=True)
class SolvingConfig:
    """What is measured beside training."""

    eval_problems: int = 100
    """Held-out problems that every evaluation answers."""
    eval_samples: int = 1
    """Answers to each."""

    def __post_init__(self) -> None:
        if self.eval_problems < 1 or self.eval_samples < 1:
            raise ValueError("expected eval_problems and eval_samples of at least 1")


class HeldOut:
    """Held-out problems and how many of them the answers solve."""

    def __init__(
        self,
        prompts: list[Prompt],
        setting: Setting,
        judge: Judge | None,
        config: SolvingConfig,
        more: More | None = None,
    ) -> None:
        """`more` is what else the end tells of the policy's answers: dear, and of no use to the curve."""
        self.more = more
        self.prompts = sorted(prompts, key=lambda p: stable_hash("held out", p.id))[: config.eval_problems]
        self.setting, self.judge, self.config = setting, judge, config

    def row(self, step: int) -> dict[str, float]:
        """A point of the curve: pass@1 with its interval, divergence from the reference, length."""
        answers = self._answered()
        row: dict[str, float] = {}
        if self.judge is not None:
            passed = ratio(self._passed(answers), generator=generator("solving", self.setting.seed))
            row |= {"gold": passed.value, "gold_low": passed.low, "gold_high": passed.high}
        kl, k3 = self.setting.divergence(answers)
        length = float(np.mean([len(answer.ids) for answer in answers]))
        return row | {"kl_held_out": kl, "kl_k3": k3, "length": length}

    def report(self) -> dict[str, Any]:
        """The policy against its reference at the end, by group of problems, and `more`."""
        mine = self._answered() if self.judge is not None or self.more else []
        told = self.more(mine) if self.more else {}
        if self.judge is None:
            return told
        sides = [self._passed(self._answered(of_reference=True)), self._passed(mine)]
        groups = [getattr(prompt.record, "group", prompt.kind) for prompt in self.prompts]
        found: dict[str, Any] = {}
        for group in ("", *sorted(set(groups))):
            places = [n for n, own in enumerate(groups) if group in ("", own)]
            before, after = ([side[n] for n in places] for side in sides)
            moved = paired_difference((before, None), (after, None), generator=generator("solving", group))
            part = {
                "pass_at_1_before": float(np.mean(before)),
                "pass_at_1": float(np.mean(after)),
                "gain": moved.value,
                "gain_low": moved.low,
                "gain_high": moved.high,
                "n": len(places),
            }
            found |= {group: part} if group else part
        return told | {"held_out": found}

    def write_samples(self, path: Path) -> None:
        """Some problems with the answers from before and after, a JSON line each."""
        path.parent.mkdir(parents=True, exist_ok=True)
        asked = [(prompt, 0) for prompt in self.prompts[:SHOWN]]
        lines = []
        for before, after in zip(
            self.setting.held_out(asked, of_reference=True), self.setting.held_out(asked), strict=True
        ):
            line = {"id": before.prompt.id, "before": before.text, "after": after.text, "finished": after.finished}
            if self.judge is not None:
                line |= {"verdict_before": self._verdicts([before])[0], "verdict_after": self._verdicts([after])[0]}
            lines.append(line | {"prompt": getattr(before.prompt.record, "question", "")})
        path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")

    def _answered(self, *, of_reference: bool = False) -> list[Answer]:
        asked = [(prompt, sample) for prompt in self.prompts for sample in range(self.config.eval_samples)]
        return self.setting.held_out(asked, of_reference=of_reference)

    def _passed(self, answers: list[Answer]) -> list[float]:
        """Share of each problem's answers that pass all hidden tests."""
        passed = [float(verdict == "passed") for verdict in self._verdicts(answers)]
        return np.array(passed).reshape(len(self.prompts), -1).mean(1).tolist()

    def _verdicts(self, answers: list[Answer]) -> list[str]:
        assert self.judge is not None
        return ["no_code" if verdict is None else verdict.verdict for verdict in judged(self.judge, answers)]


# -- frontier ----------------------------------------------------------------------------------------------------------


FIRST, SAMPLES = 4, 8
LOW, HIGH = 0.2, 0.8
AT_ONCE = 32  # problems


def chosen(
    prompts: Sequence[Prompt], difficulty: str, most: int, setting: Any, judge: Judge | None, folder: Path
) -> list[Prompt]:
    """The prompts of a difficulty: all, frontier (of the first `most` by hash), or one of the problems' groups.

    Raises DataError where none is left, or there is no sandbox to tell the frontier.
    """
    if difficulty == "all":
        return list(prompts)
    if difficulty != "frontier":
        groups = {getattr(prompt.record, "group", "") for prompt in prompts}
        if difficulty not in groups:
            raise DataError(
                f"difficulty: expected frontier, all, or a group of the problems ({', '.join(sorted(groups))}), got"
                f" {difficulty!r}"
            )
        return [prompt for prompt in prompts if getattr(prompt.record, "group", "") == difficulty]
    if judge is None:
        raise DataError(
            "difficulty: frontier needs the sandbox, to see which problems the policy solves; expected all or a group"
        )
    some = sorted(prompts, key=lambda prompt: stable_hash("frontier", prompt.id))[:most]
    rates = _rates(some, setting, judge, folder / "parts" / "frontier.json")
    found = [prompt for prompt in some if LOW <= rates[prompt.id] <= HIGH]
    told = f"{len(found)} of {len(some)} problems are solved by {LOW:.0%} to {HIGH:.0%} of {SAMPLES} samples"
    if not found:
        raise DataError(
            f"difficulty: {told}, none to learn from (mean {np.mean(list(rates.values())):.2f}); use easier or harder"
            " problems, or difficulty=all"
        )
    say(f"frontier: {told}")
    return found


def _rates(prompts: Sequence[Prompt], setting: Any, judge: Judge, kept: Path) -> dict[str, float]:
    """How often each problem is solved, by id; each process asks its share."""
    ids = [prompt.id for prompt in prompts]
    if kept.is_file():
        told = json.loads(kept.read_text())
        if list(told) == ids:
            return told
    mine: dict[str, float] = {}
    share = prompts[setting.ranks.rank :: setting.ranks.world]
    with progress(total=len(share), desc="frontier", unit="problem") as bar:
        for first in range(0, len(share), AT_ONCE):
            some = share[first : first + AT_ONCE]
            passed = _passed(some, range(FIRST), setting, judge)  # (P, FIRST)
            sure = np.isin(passed.sum(1), (0, FIRST))  # (P,)
            open_ = [prompt for prompt, decided in zip(some, sure, strict=True) if not decided]
            more = _passed(open_, range(FIRST, SAMPLES), setting, judge)
            rates = passed.mean(1)
            rates[~sure] = np.concatenate([passed[~sure], more], axis=1).mean(1)
            mine |= dict(zip([p.id for p in some], rates.tolist(), strict=True))
            bar.update(len(some))
    together: dict[str, float] = {}
    for part in setting.ranks.gather(mine):
        together |= part
    found = {id_: together[id_] for id_ in ids}
    if setting.ranks.rank == 0:
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(kept, json.dumps(found))
    return found


def _passed(prompts: Sequence[Prompt], numbers: range, setting: Any, judge: Judge) -> np.ndarray:
    """Whether the samples of these numbers pass: (P, len(numbers)) bool. A sample hangs on its prompt and number
    alone.
    """
    if not prompts:
        return np.zeros((0, len(numbers)), dtype=bool)
    given = setting.held_out([(prompt, n) for prompt in prompts for n in numbers], purpose="frontier")
    passed = [verdict is not None and verdict.verdict == "passed" for verdict in judged(judge, given)]
    return np.array(passed).reshape(-1, len(numbers))
