"""Gold against proxy: is what the reward model likes really better, and at what divergence does that end?

Every evaluation answers the same held-out prompts with the same seeds; a row says proxy, gold with its interval, the divergence
from the reference (k1 and k3, nats an answer) and the length (Gao et al. 2022, arXiv:2210.10760). At the end the policy is
compared with its reference answer by answer (paired bootstrap), and best-of-n of the reference stands beside it.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.device import generator, stable_hash
from pipeline.evaluation import gold
from pipeline.evaluation.intervals import paired_difference
from pipeline.reinforcement.answers import Answer, Prompt
from pipeline.reinforcement.rewards import Scorer
from pipeline.reinforcement.setting import Setting
from pipeline.sandbox.judge import Judge
from pipeline.text import chat

SHOWN = 16  # sample answers that are kept


@dataclass(frozen=True, kw_only=True)
class HeldOutConfig:
    """What is measured beside training."""

    eval_prompts: int = 200  # held-out prompts that every evaluation answers
    report_samples: int = 1  # answers to each of them at the end, where policy and reference are compared
    best_of: int = 16  # answers of the reference for the best-of-n line, to
    best_of_prompts: int = 64  # so many of them; 0: no such line

    def __post_init__(self) -> None:
        if self.eval_prompts < 2 or min(self.best_of, self.report_samples) < 1 or not self.best_of_prompts >= 0:
            raise ValueError("expected eval_prompts >= 2, report_samples >= 1, best_of >= 1, best_of_prompts >= 0")


class HeldOut:
    """Held-out prompts and what their answers are worth."""

    def __init__(self, prompts: list[Prompt], setting: Setting, judge: Judge | None, scorer: Scorer,
                 config: HeldOutConfig) -> None:  # fmt: skip
        """`scorer` is the one that training asks: its totals are the proxy."""
        order = sorted(prompts, key=lambda prompt: stable_hash("held out", prompt.id))
        self.prompts = order[: config.eval_prompts]
        self.setting, self.judge, self.scorer, self.config = setting, judge, scorer, config

    def row(self, step: int) -> dict[str, float]:
        """A point of the curve."""
        return self._row(self.setting.held_out([(prompt, 0) for prompt in self.prompts]))

    def report(self) -> dict[str, Any]:
        """The policy against its reference at the end, and best-of-n."""
        samples = self.config.report_samples
        asked = [(prompt, sample) for prompt in self.prompts for sample in range(samples)]
        after, before = (self.setting.held_out(asked, of_reference=frozen) for frozen in (False, True))
        columns = [_by_prompt(gold.gold(answers, self.judge), samples) for answers in (before, after)]
        report: dict[str, Any] = {"held_out": {"prompts": len(self.prompts), "samples": samples}}
        for kind in ("", *sorted({prompt.kind for prompt in self.prompts})):
            mine = np.array([kind in ("", prompt.kind) for prompt in self.prompts])
            told = mine & ~np.isnan(columns[0]) & ~np.isnan(columns[1])
            if not told.any():
                continue
            first, last = (column[told].tolist() for column in columns)
            moved = paired_difference((first, None), (last, None), generator=generator("gold", kind))
            part = {"gold_before": float(np.mean(first)), "gold": float(np.mean(last)), "gain": moved.value,
                    "gain_low": moved.low, "gain_high": moved.high, "n": int(told.sum())}  # fmt: skip
            report["held_out"] |= {kind: part} if kind else part
        row = self._row(after)
        report["held_out"] |= {name: row[name] for name in ("kl", "kl_k3", "length", "proxy")}
        if self.config.best_of_prompts:
            report["best_of_n"] = self._best_of_n()
        return report

    def write_samples(self, path: Path) -> None:
        """Some prompts with the answers from before and after, a JSON line each."""
        path.parent.mkdir(parents=True, exist_ok=True)
        asked = [(prompt, 0) for prompt in self.prompts[:SHOWN]]
        pairs = zip(self.setting.held_out(asked, of_reference=True), self.setting.held_out(asked), strict=True)
        lines = []
        for before, after in pairs:
            scores = gold.gold([before, after], self.judge)
            record = before.prompt.record
            shown = chat.render_text(record.prompt, record.tools) if hasattr(record, "prompt") else record.question  # type: ignore[union-attr]
            lines.append({"id": before.prompt.id, "kind": before.prompt.kind, "prompt": shown, "before": before.text,
                          "after": after.text, "gold_before": scores[0], "gold_after": scores[1],
                          "finished": after.finished})  # fmt: skip
        path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")

    def _row(self, answers: list[Answer]) -> dict[str, float]:
        scores = self.scorer(answers)
        row = gold.curve_row(gold.gold(answers, self.judge), [score.total for score in scores], self.setting.seed)
        for name in self.scorer.weights:
            row[f"held_out/{name}"] = gold.mean([score.parts[name] for score in scores])
        kl, k3 = self.setting.divergence(answers)
        return row | {"kl": kl, "kl_k3": k3, "length": float(np.mean([len(answer.ids) for answer in answers]))}

    def _best_of_n(self) -> list[dict[str, Any]]:
        prompts = [prompt for prompt in self.prompts if gold.known(prompt.record)][: self.config.best_of_prompts]  # type: ignore[arg-type]
        asked = [(prompt, sample) for prompt in prompts for sample in range(self.config.best_of)]
        answers = self.setting.held_out(asked, of_reference=True)
        scores = np.array([np.nan if s is None else s for s in gold.gold(answers, self.judge)])
        shape = (len(prompts), self.config.best_of)
        totals = np.array([np.nan if score.total is None else score.total for score in self.scorer(answers)])
        proxies, table = totals.reshape(shape), scores.reshape(shape)
        whole = ~np.isnan(table + proxies).any(1)
        return gold.best_of_n(proxies[whole], table[whole]) if whole.any() else []


def _by_prompt(scores: list[float | None], samples: int) -> np.ndarray:
    """The mean score of each prompt's answers, NaN where one of them is not known."""
    return np.array([np.nan if score is None else score for score in scores]).reshape(-1, samples).mean(1)
