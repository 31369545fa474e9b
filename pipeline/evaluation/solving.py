"""What reinforcement learning from executed code did to held-out problems: pass@1 before and after, and at what divergence.

Every evaluation answers the same problems with the same seeds. At the end policy and reference are compared problem by problem
(paired bootstrap). The problems are those that no training and no test sees (`data/problems/val.jsonl`).
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.device import generator, stable_hash
from pipeline.evaluation.intervals import paired_difference, ratio
from pipeline.reinforcement.answers import Answer, Prompt
from pipeline.reinforcement.rewards import judged
from pipeline.reinforcement.setting import Setting
from pipeline.sandbox.judge import Judge

More = Callable[[list[Answer]], dict[str, Any]]
SHOWN = 16  # sample answers that are kept


@dataclass(frozen=True, kw_only=True)
class SolvingConfig:
    """What is measured beside training."""

    eval_problems: int = 100  # held-out problems that every evaluation answers
    eval_samples: int = 1  # answers to each

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
            part = {"pass_at_1_before": float(np.mean(before)), "pass_at_1": float(np.mean(after)), "gain": moved.value,
                    "gain_low": moved.low, "gain_high": moved.high, "n": len(places)}  # fmt: skip
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
