"""Pairs of a model's own answers, ordered by truth: what a reward model must rank when a policy is trained against it.

Pairs of made-up mistakes alone leave it blind to the mistakes that the policy makes, and a policy finds such blind
spots within a few hundred answers (docs/LOG.md). So some prompts are answered a few times by the model itself, the
known-truth functions of `gold.py` say how good each answer is, and the best and the worst that differ enough make a
pair, as do the next best and the next worst.

Not here: answers to prompts whose truth nobody knows; those are left out.

Gold: the true worth of an answer, by the functions that ordered the preference pairs. Training never sees it.

    code 0.2 parses + 0.8 hidden tests passed    tools `synthesis.tools.gold`    story mean of the checker's clauses

`curve_row` is one point of gold against proxy (Gao et al. 2022, arXiv:2210.10760); `best_of_n` is the line beside it:
what choosing the best of n answers by the proxy would give, at KL = ln n - (n - 1) / n nats.

Gold against proxy: is what the reward model likes really better, and at what divergence does that end?

Every evaluation answers the same held-out prompts with the same seeds; a row says proxy, gold with its interval, the
divergence from the reference (k1 and k3, nats an answer) and the length (Gao et al. 2022, arXiv:2210.10760). At the end
the policy is compared with its reference answer by answer (paired bootstrap), and best-of-n of the reference stands
beside it.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.batches.pairs import Encoded, PairSplit
from pipeline.evaluation.intervals import paired_difference, ratio
from pipeline.ingest.records import Message, Pair
from pipeline.rl import answers as rl_answers
from pipeline.rl.answers import Answer, Generate, Prompt
from pipeline.rl.models import Setting
from pipeline.rl.rewards import Scorer, program_of
from pipeline.run.device import generator, stable_hash
from pipeline.run.tracking import progress
from pipeline.sandbox.judge import Judge
from pipeline.synthetic.preferences import MIN_GAP, code_gold, story_gold, tool_gold
from pipeline.text import chat
from pipeline.text.tokenizer import Tokenizer


def is_known(pair: Pair) -> bool:
    """Whether any answer to the pair's prompt can be scored truly."""
    return pair.truth is not None and pair.kind in ("code", "tools", "story")


def gold(answers: Sequence[Answer], judge: Judge | None) -> list[float | None]:
    """True scores in [0, 1]; None where nobody knows (or no sandbox can tell)."""
    found: list[float | None] = [None] * len(answers)
    code: list[int] = []
    for place, answer in enumerate(answers):
        pair = answer.prompt.record
        if not isinstance(pair, Pair) or not is_known(pair):
            continue
        if pair.kind == "code":
            code.append(place)
        elif pair.kind == "tools":
            found[place] = tool_gold(pair, message_of(answer.text))
        else:
            found[place] = story_gold(answer.text)
    run = [place for place in code if judge is not None and chat.extract(answers[place].text)]
    for place in code:
        found[place] = 0.0 if judge is not None else None
    if judge is not None:
        verdicts = judge.judge([program_of(answers[place]) for place in run])
        for place, verdict in zip(run, verdicts, strict=True):
            found[place] = None if verdict.score is None else code_gold(answers[place].text, verdict.score)
    return found


def message_of(text: str) -> Message:
    """An answer as an assistant message in the OpenAI form."""
    reply = chat.parse(text)
    made = [
        {
            "id": f"call_{n}",
            "type": "function",
            "function": {"name": call["name"], "arguments": json.dumps(call["arguments"])},
        }
        for n, call in enumerate(reply.tool_calls)
    ]
    content = reply.content if reply.error is None else text
    return {"role": "assistant", "content": content} | ({"tool_calls": made} if made else {})


def curve_row(scores: Sequence[float | None], proxies: Sequence[float | None], seed: int) -> dict[str, float]:
    """`proxy`, and `gold` with its 95 % interval where truth is known."""
    row = {"proxy": mean(proxies)}
    told = [score for score in scores if score is not None]
    if told:
        interval = ratio(told, generator=generator("gold", seed))
        row |= {"gold": interval.value, "gold_low": interval.low, "gold_high": interval.high}
    return row


def mean(values: Sequence[float | None]) -> float:
    """Of those that are known; NaN where none is."""
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else math.nan


def best_of_n(proxies: np.ndarray, scores: np.ndarray) -> list[dict[str, Any]]:
    """For n = 1, 2, 4, ...: KL, mean proxy and mean gold of the answer that the proxy likes best among n.

    `proxies` and `scores` (P, N) of N answers to each prompt. The mean over all choices of n of the N (Nakano et al.
    2021, arXiv:2112.09332, appendix I): the i-th worst is the best of n with chance C(i - 1, n - 1) / C(N, n).
    """
    total = proxies.shape[1]
    order = np.argsort(proxies, axis=1, kind="stable")
    sorted_proxies, sorted_scores = (np.take_along_axis(x, order, axis=1) for x in (proxies, scores))
    rows, n = [], 1
    while n <= total:
        chance = np.array([math.comb(i, n - 1) for i in range(total)]) / math.comb(total, n)
        rows.append(
            {
                "n": n,
                "kl": math.log(n) - (n - 1) / n,
                "proxy": float((sorted_proxies @ chance).mean()),
                "gold": float((sorted_scores @ chance).mean()),
            }
        )
        n *= 2
    return rows


# -- own_answers -------------------------------------------------------------------------------------------------------


SAMPLES = 4  # answers to each prompt
PROMPTS = 128  # answered at a time


def prompts(split: PairSplit, answer_tokens: int, most: int) -> list[Prompt]:
    """The first `most` prompts, shuffled, whose truth is known and whose better answer has room."""
    if not most:
        return []
    known = [one for one in rl_answers.pair_prompts(split, answer_tokens) if is_known(one.record)]  # type: ignore[arg-type]
    return sorted(known, key=lambda prompt: stable_hash("own answers", prompt.id))[:most]


def pairs(
    generate: Generate, prompts: Sequence[Prompt], tokenizer: Tokenizer, judge: Judge | None, seed: int
) -> list[Encoded]:
    """At most two pairs a prompt, no answer in both, in the order of the prompts."""
    found: list[Encoded] = []
    if not prompts:
        return found
    with progress(total=len(prompts), desc="own answers", unit="prompt") as bar:
        for first in range(0, len(prompts), PROMPTS):
            some = prompts[first : first + PROMPTS]
            asked = [(prompt, sample) for prompt in some for sample in range(SAMPLES)]
            given = rl_answers.sample(generate, asked, tokenizer, seed)
            told = list(zip(gold(given, judge), given, strict=True))
            groups = [told[n : n + SAMPLES] for n in range(0, len(told), SAMPLES)]
            found += [pair for group in groups for pair in _pairs(group)]
            bar.update(len(some))
    return found


def _pairs(given: Sequence[tuple[float | None, Answer]]) -> list[Encoded]:
    """The best and the worst of a prompt's answers, the next best and the next worst, where they differ enough."""
    known = [(score, answer) for score, answer in given if score is not None]
    told = sorted(known, key=lambda one: one[0], reverse=True)  # of equal ones the earlier first
    ends = zip(told[: len(told) // 2], reversed(told), strict=False)
    far = [(best, worst) for best, worst in ends if best[0] - worst[0] >= MIN_GAP - 1e-9]
    return [_encoded(best, worst, number) for number, (best, worst) in enumerate(far, 1)]


def _encoded(best: tuple[float, Answer], worst: tuple[float, Answer], number: int) -> Encoded:
    pair = best[1].prompt.record
    assert isinstance(pair, Pair)
    mine = replace(
        pair,
        id=f"own-{pair.id}-{number}",
        source="own answers",
        kind=f"own {pair.kind}",
        gold_chosen=best[0],
        gold_rejected=worst[0],
        chosen=[message_of(best[1].text)],
        rejected=[message_of(worst[1].text)],
    )
    return Encoded(mine, rl_answers.piece_of(best[1]), rl_answers.piece_of(worst[1]))


# -- overoptimisation --------------------------------------------------------------------------------------------------


SHOWN = 16  # sample answers that are kept


@dataclass(frozen=True, kw_only=True)
class HeldOutConfig:
    """What is measured beside training."""

    eval_prompts: int = 200
    """Held-out prompts that every evaluation answers."""
    report_samples: int = 1
    """Answers to each of them at the end, where policy and reference are compared."""
    best_of: int = 16
    """Answers of the reference for the best-of-n line."""
    best_of_prompts: int = 64
    """Prompts of the best-of-n line; 0: no such line."""

    def __post_init__(self) -> None:
        if self.eval_prompts < 2 or min(self.best_of, self.report_samples) < 1 or not self.best_of_prompts >= 0:
            raise ValueError("expected eval_prompts >= 2, report_samples >= 1, best_of >= 1, best_of_prompts >= 0")


class HeldOut:
    """Held-out prompts and what their answers are worth."""

    def __init__(
        self, prompts: list[Prompt], setting: Setting, judge: Judge | None, scorer: Scorer, config: HeldOutConfig
    ) -> None:
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
        columns = [_by_prompt(gold(answers, self.judge), samples) for answers in (before, after)]
        report: dict[str, Any] = {"held_out": {"prompts": len(self.prompts), "samples": samples}}
        for kind in ("", *sorted({prompt.kind for prompt in self.prompts})):
            mine = np.array([kind in ("", prompt.kind) for prompt in self.prompts])
            told = mine & ~np.isnan(columns[0]) & ~np.isnan(columns[1])
            if not told.any():
                continue
            first, last = (column[told].tolist() for column in columns)
            moved = paired_difference((first, None), (last, None), generator=generator("gold", kind))
            part = {
                "gold_before": float(np.mean(first)),
                "gold": float(np.mean(last)),
                "gain": moved.value,
                "gain_low": moved.low,
                "gain_high": moved.high,
                "n": int(told.sum()),
            }
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
            scores = gold([before, after], self.judge)
            record = before.prompt.record
            shown = chat.render_text(record.prompt, record.tools) if hasattr(record, "prompt") else record.question  # type: ignore[union-attr]
            lines.append(
                {
                    "id": before.prompt.id,
                    "kind": before.prompt.kind,
                    "prompt": shown,
                    "before": before.text,
                    "after": after.text,
                    "gold_before": scores[0],
                    "gold_after": scores[1],
                    "finished": after.finished,
                }
            )
        path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")

    def _row(self, answers: list[Answer]) -> dict[str, float]:
        scores = self.scorer(answers)
        row = curve_row(gold(answers, self.judge), [score.total for score in scores], self.setting.seed)
        for name in self.scorer.weights:
            row[f"held_out/{name}"] = mean([score.parts[name] for score in scores])
        kl, k3 = self.setting.divergence(answers)
        return row | {"kl": kl, "kl_k3": k3, "length": float(np.mean([len(answer.ids) for answer in answers]))}

    def _best_of_n(self) -> list[dict[str, Any]]:
        prompts = [prompt for prompt in self.prompts if is_known(prompt.record)][: self.config.best_of_prompts]  # type: ignore[arg-type]
        asked = [(prompt, sample) for prompt in prompts for sample in range(self.config.best_of)]
        answers = self.setting.held_out(asked, of_reference=True)
        scores = np.array([np.nan if s is None else s for s in gold(answers, self.judge)])
        shape = (len(prompts), self.config.best_of)
        totals = np.array([np.nan if score.total is None else score.total for score in self.scorer(answers)])
        proxies, table = totals.reshape(shape), scores.reshape(shape)
        whole = ~np.isnan(table + proxies).any(1)
        return best_of_n(proxies[whole], table[whole]) if whole.any() else []


def _by_prompt(scores: list[float | None], samples: int) -> np.ndarray:
    """The mean score of each prompt's answers, NaN where one of them is not known."""
    return np.array([np.nan if score is None else score for score in scores]).reshape(-1, samples).mean(1)
