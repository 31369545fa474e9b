"""Preference metrics on held-out pairs, and on a model's own answers scored against ground truth.

They show how well a reward model ranks held-out pairs, and what preference learning changed:

    a reward model and pairs -> accuracy, overall and by kind of pair; calibration_error; length_correlation
                                a suite adds margin_mean, margin_std, ties, and a row per pair with its margin
    log-probabilities before and after training -> accuracy, likelihood, gain, overall and by kind of pair; chosen_nats
                                for labels -> accuracy, overall, for good and bad answers, and by kind; desirable_nats

    accuracy       fraction of pairs where the log-ratio of the policy to the initial model is larger for the better
                   answer (DPO's implicit reward); fraction of labels where it is > 0 (good answer) or < 0 (bad answer)
    likelihood     fraction of pairs where the better answer is more likely, before and after: needs no reference
    kl             divergence from the initial model per complete answer, on held-out prompts, in nats
    win_rate       fraction of held-out prompts where the policy's own answer has the higher true score
    chosen_nats    change in the better answers' log-probability per token: a large drop means that the policy unlearned
                   both answers

If the data has true scores, the better answer is the one with the higher score (a flipped label is then ignored);
else the label decides. Proportions have Wilson intervals; the gain in `likelihood` has a paired-bootstrap interval.

Gold is the true score, in [0, 1], of a model's own answer, computed by the functions that ranked the preference pairs.
It is never used in training.

    code: half hidden tests passed, half style    tools: `synthetic.tools.gold`    story: the checker's clauses

`own_pairs` builds pairs from a model's own answers, ranked by gold: the kind of pair that a reward model must rank when
a policy is trained against it. A reward model trained only on synthetic mistakes is blind to the policy's own mistakes,
and a policy finds such blind spots within a few hundred answers (docs/LOG.md). So the policy answers some prompts
several times, and a prompt's best and worst answers form a pair if they differ enough, as do the second best and second
worst.

`HeldOutPrompts` measures overoptimization (Gao et al. 2022, arXiv:2210.10760): whether a higher reward still means a
better answer, and up to what divergence. Every evaluation answers the same held-out prompts with the same seeds. A row
of the curve has the proxy, gold with its interval, the divergence from the reference (k1 and k3, nats per answer) and
the length. At the end, the policy is compared with its reference answer by answer (paired bootstrap). `best_of_n` is
the baseline curve: the best of n reference answers according to the proxy, at KL = ln n - (n - 1) / n nats.

Answers to prompts without ground truth are excluded. Not guaranteed: that equal accuracy on two kinds of pairs means
equal usefulness in reinforcement learning.
"""

import json
import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import nn

from pipeline.batches.batch import Answered, answered
from pipeline.batches.labels import LabelSplit
from pipeline.batches.pairs import Encoded, PairSplit, batch_of
from pipeline.evaluation.intervals import paired_difference, ratio, wilson
from pipeline.evaluation.suites import SuiteResult
from pipeline.generation.sampling import Sampling, sampler
from pipeline.ingest.records import Message, Pair, Problem
from pipeline.learning import label_losses, pair_losses
from pipeline.learning.reference import Start
from pipeline.model import checkpoint, lora
from pipeline.model.heads import RewardModel
from pipeline.model.transformer import Transformer
from pipeline.rl import answers as rl_answers
from pipeline.rl.answers import Answer, Generate, Prompt, Task
from pipeline.rl.models import Setting
from pipeline.rl.rewards import Scorer, program_of
from pipeline.run.device import Hardware, generator, stable_hash
from pipeline.run.tracking import progress
from pipeline.run.types import JsonObject
from pipeline.run.workdir import canonical_hash
from pipeline.sandbox.judge import Judge
from pipeline.synthetic.preferences import MIN_GAP, code_gold, story_gold, tool_gold
from pipeline.text import chat
from pipeline.text.tokenizer import Tokenizer

PAIRS = 32  # in one forward pass
BINS = 10  # for the calibration error
COMPARED, COMPARED_TOKENS = 64, 128  # prompts and answer tokens in `compare_answers`
JUDGED = 240  # prompts in `compare_answers` if the truth is known


@torch.no_grad()
def rewards_of(model: RewardModel, pairs: Sequence[Encoded], pad: int) -> np.ndarray:
    """Normalized rewards (n, 2) of the chosen and rejected answers."""
    device, parts = next(model.parameters()).device, []
    model.train(False)
    for first in range(0, len(pairs), PAIRS):
        batch = batch_of(pairs[first : first + PAIRS], pad).to(device)
        rewards = model(batch.input_ids, positions=batch.positions, documents=batch.documents, select=batch.ends)
        parts.append(model.normalized(rewards).float().cpu().numpy().reshape(2, -1).T)
    return np.concatenate(parts)


def measure_ranking(model: RewardModel, pairs: Sequence[Encoded], pad: int) -> JsonObject:
    """The metrics of `ranking`, computed with a model."""
    return ranking(rewards_of(model, pairs, pad), model.reward_std, pairs)


def ranking(rewards: np.ndarray, std: float, pairs: Sequence[Encoded]) -> JsonObject:
    """Accuracy with a 95% interval over all pairs, by kind and, for code, by what distinguishes the answers;
    calibration error; correlation of reward and length.

    `rewards` (n, 2) are normalized by `std`.
    """
    swap = np.array([truly_swapped(encoded) for encoded in pairs])
    margins = np.where(swap, -1, 1) * (rewards[:, 0] - rewards[:, 1]) * std
    numbers: JsonObject = {"calibration_error": calibration_error(margins)}
    for kind, members in by_kind(pairs).items():
        of_kind = margins[members]
        right = wilson(int((of_kind > 0).sum()), len(of_kind))
        part: JsonObject = right.named("accuracy") | {"n": len(of_kind)}
        numbers |= {kind: part} if kind else part
    lengths = np.array([[int(np.sum(p.trained)) for p in (e.chosen, e.rejected)] for e in pairs], dtype=float)
    numbers["length_correlation"] = correlation(rewards.reshape(-1), lengths.reshape(-1))
    return numbers


def by_kind(pairs: Sequence[Encoded]) -> dict[str, np.ndarray]:
    """A mask (n,) of the pairs of each kind; "" is all pairs, and "code style" and "code tests" are generated code
    pairs whose answers differ in style or in tests passed.
    """
    names = [("", encoded.pair.kind, _told_by(encoded.pair)) for encoded in pairs]
    found = sorted({name for of_pair in names for name in of_pair})
    return {name: np.array([name in of_pair for of_pair in names]) for name in found}


def _told_by(pair: Pair) -> str:
    if pair.kind != "code" or pair.source != "generated":
        return ""
    styles = {code_gold(answer[0]["content"], 0.0) for answer in (pair.chosen, pair.rejected)}
    return "code style" if len(styles) > 1 else "code tests"


def truly_swapped(encoded: Encoded) -> bool:
    """Whether the rejected answer has the higher true score."""
    pair = encoded.pair
    return (pair.gold_chosen or 0.0) < (pair.gold_rejected or 0.0)


def calibration_error(margins: np.ndarray) -> float:
    """Expected calibration error (Naeini et al. 2015): |accuracy - confidence| over ten bins of sigmoid(|margin|)."""
    confidence, right = 1 / (1 + np.exp(-np.abs(margins))), margins > 0
    bins = np.minimum(((confidence - 0.5) * 2 * BINS).astype(int), BINS - 1)
    total = 0.0
    for bin_number in range(BINS):
        in_bin = bins == bin_number
        if in_bin.any():
            total += in_bin.mean() * abs(right[in_bin].mean() - confidence[in_bin].mean())
    return float(total)


def correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Pearson correlation; 0 if either is constant."""
    return float(np.corrcoef(a, b)[0, 1]) if a.std() > 0 and b.std() > 0 else 0.0


def pairs_told(folder: Path, pairs: Path, where: torch.device) -> SuiteResult:
    """Evaluate the reward model in `folder` on the file `pairs`. Raises ModelError or DataError if one is invalid."""
    model, tokenizer = checkpoint.load_reward(folder)
    model.to(where)
    longest = model.trunk.config.max_context
    split = PairSplit(pairs, tokenizer, longest, longest)
    rewards = rewards_of(model, split.pairs, tokenizer.pad)
    result = SuiteResult({"left_out": split.dropped.total(), **ranking(rewards, model.reward_std, split.pairs)})
    margins = rewards[:, 0] - rewards[:, 1]
    for number, (encoded, margin) in enumerate(zip(split.pairs, margins.tolist(), strict=True)):
        true_margin = -margin if truly_swapped(encoded) else margin
        result.rows.append(
            {
                "suite": "reward",
                "id": f"{encoded.pair.kind}/{number}",
                "group": encoded.pair.kind,
                "item": canonical_hash(asdict(encoded.pair)),
                "margin": round(true_margin, 4),
                "right": int(true_margin > 0),
                "verdict": "right" if true_margin > 0 else "wrong",
            }
        )
    result.numbers |= {
        "margin_mean": float(abs(margins).mean()),
        "margin_std": float(margins.std()),
        "ties": int((margins == 0).sum()),
    }
    return result


@torch.no_grad()
def likelihoods(model: nn.Module, pairs: Sequence[Encoded], pad: int, where: torch.device) -> np.ndarray:
    """Summed log-probabilities (n, 2) of the chosen and rejected answers."""
    was_training, parts = model.training, []
    model.to(where).train(False)
    for first in range(0, len(pairs), PAIRS):
        sums = pair_losses.pair_logprobs(model, batch_of(pairs[first : first + PAIRS], pad).to(where))
        parts.append(torch.stack([sums.chosen, sums.rejected], 1).cpu().numpy())
    model.train(was_training)
    return np.concatenate(parts)


def likelihood_ranking(model: nn.Module, pairs: Sequence[Encoded], pad: int, where: torch.device) -> JsonObject:
    """Accuracy of ranking by a model's per-token log-probability: the baseline for a reward model built on it."""
    lengths = np.array([[np.sum(p.trained) for p in (encoded.chosen, encoded.rejected)] for encoded in pairs])
    means = likelihoods(model, pairs, pad, where) / lengths
    sign = np.where([truly_swapped(encoded) for encoded in pairs], -1.0, 1.0)
    right = sign * (means[:, 0] - means[:, 1]) > 0
    numbers: JsonObject = {}
    for kind, members in by_kind(pairs).items():
        part: JsonObject = wilson(int(right[members].sum()), int(members.sum())).named("accuracy")
        numbers |= {kind: part} if kind else part
    return numbers


def measure_pairs(split: PairSplit, before: np.ndarray, after: np.ndarray, seed: int) -> JsonObject:
    """Preference-learning metrics over all pairs and by kind, from `likelihoods` before and after training."""
    sign = np.where([truly_swapped(encoded) for encoded in split.pairs], -1.0, 1.0)
    implicit_rewards, after_margins, before_margins = (
        sign * (x[:, 0] - x[:, 1]) for x in (after - before, after, before)
    )
    lengths = np.array([np.sum(encoded.chosen.trained) for encoded in split.pairs], dtype=np.float64)
    numbers: JsonObject = {"chosen_nats": float((after - before)[:, 0].sum() / lengths.sum())}
    for kind, of_kind in by_kind(split.pairs).items():
        part: JsonObject = {"n": int(of_kind.sum())}
        for name, margins in (
            ("accuracy", implicit_rewards),
            ("likelihood", after_margins),
            ("likelihood_before", before_margins),
        ):
            share = wilson(int((margins[of_kind] > 0).sum()), int(of_kind.sum()))
            part |= share.named(name)
        rows = [((margins[of_kind] > 0).astype(float).tolist(), None) for margins in (before_margins, after_margins)]
        change = paired_difference(rows[0], rows[1], generator=generator("pairs", seed))
        part |= change.named("gain")
        numbers |= {kind: part} if kind else part
    return numbers


def compare_answers(
    start: Start, base: Path, split: PairSplit, hardware: Hardware, judge: Judge | None, seed: int
) -> JsonObject:
    """Compare the policy's answers with those of its reference: `divergence`, and `wins` if the truth is known.

    Samples answers to COMPARED prompts (JUDGED if the truth is known) at temperature 1, up to COMPARED_TOKENS each.
    `kl` is KL(policy || reference) per complete answer, in nats: the mean of log pi(y | x) - log ref(y | x) over the
    policy's answers (k1 of Schulman 2020, "Approximating KL divergence"). `win_rate` is the fraction of prompts where
    the policy's answer has the higher true score, ties counting half. A released reference is reloaded from `base`.
    Call this before merging an adapter.
    """
    policy, pad = start.policy, start.tokenizer.pad
    room = policy.config.max_context - COMPARED_TOKENS
    prompts = [p for p in rl_answers.pair_prompts(split, policy.config.max_context) if len(p.ids) <= room]
    judged = any(is_known(prompt.record) for prompt in prompts)
    prompts = prompts[: JUDGED if judged else COMPARED]
    if not prompts:
        return {"divergence": {"prompts": 0}}
    was_training, requests = policy.training, [(prompt, 0) for prompt in prompts]
    policy.to(hardware.device).train(False)

    def answers_of(model: Transformer) -> list[Answer]:
        generate = sampler(model, Sampling(COMPARED_TOKENS, temperature=1.0), {start.tokenizer.turn_end})
        return rl_answers.sample(generate, requests, start.tokenizer, stable_hash("compared", seed) % 2**62)

    frozen = nullcontext(checkpoint.load_frozen(base).to(hardware.device)) if start.reference.released else None
    with hardware.autocast():
        with lora.folded_in(policy):
            answers = answers_of(policy)
        own = rl_answers.logprobs_of(policy, answers, pad, 1.0)
        with frozen or start.reference.model(hardware.device) as reference:
            theirs = rl_answers.logprobs_of(reference, answers, pad, 1.0)
            reference_answers = answers_of(reference) if judged else []
    policy.train(was_training)
    nats = [float((a.astype(np.float64) - b).sum()) for a, b in zip(own, theirs, strict=True)]
    tokens = sum(len(answer.ids) for answer in answers) / len(answers)
    divergence = ratio(nats, generator=generator("kl", seed)).named("kl") | {"prompts": len(prompts), "tokens": tokens}
    wins = win_rate(gold(answers, judge), gold(reference_answers, judge), seed) if judged else {}
    return {"divergence": divergence} | ({"wins": wins} if wins else {})


def win_rate(ours: Sequence[float | None], theirs: Sequence[float | None], seed: int) -> JsonObject:
    """The fraction of answers with the higher score, ties counting half; empty if no pair of scores is known."""
    known = [(a, b) for a, b in zip(ours, theirs, strict=True) if a is not None and b is not None]
    wins = [0.5 * (a > b) + 0.5 * (a >= b) for a, b in known]
    if not wins:
        return {}
    return ratio(wins, generator=generator("wins", seed)).named("win_rate") | {"prompts": len(wins)}


def label_likelihoods(model: nn.Module, split: LabelSplit, pad: int, where: torch.device) -> np.ndarray:
    """Summed log-probabilities (n,) of the answers."""
    was_training, parts = model.training, []
    model.to(where).train(False)
    for first in range(0, len(split.labels), 2 * PAIRS):
        rows = answered([encoded.piece for encoded in split.labels[first : first + 2 * PAIRS]], pad)
        rows = Answered(*(tensor.to(where) for tensor in rows))
        parts.append(label_losses.likelihoods(model, rows).cpu().numpy())
    model.train(was_training)
    return np.concatenate(parts)


def measure_labels(split: LabelSplit, before: np.ndarray, after: np.ndarray) -> JsonObject:
    """The fraction of correctly classified labels: overall, for good and bad answers, and by kind, from
    `label_likelihoods` before and after training.
    """
    desirable = np.array([encoded.label.desirable for encoded in split.labels])
    kinds = np.array([encoded.label.kind for encoded in split.labels])
    lengths = np.array([np.sum(encoded.piece.trained) for encoded in split.labels], dtype=np.float64)
    change = after - before
    right = np.where(desirable, change, -change) > 0

    def share(rows: np.ndarray) -> JsonObject:
        return {"n": int(rows.sum())} | wilson(int(right[rows].sum()), int(rows.sum())).named("accuracy")

    numbers = share(np.ones_like(desirable))
    for name, rows in (("desirable", desirable), ("undesirable", ~desirable)):
        if rows.any():
            numbers |= {name: share(rows), f"{name}_nats": float(change[rows].sum() / lengths[rows].sum())}
    return numbers | {kind: share(kinds == kind) for kind in sorted(set(kinds.tolist()))}


def is_known(record: Pair | Problem | Task) -> bool:
    """Whether answers to this prompt have a true score."""
    return isinstance(record, Pair) and record.truth is not None and record.kind in ("code", "tools", "story")


def gold(answers: Sequence[Answer], judge: Judge | None) -> list[float | None]:
    """True scores in [0, 1]; None if the truth is unknown, or for code if there is no sandbox."""
    scores: list[float | None] = [None] * len(answers)
    code: list[int] = []
    for index, answer in enumerate(answers):
        record = answer.prompt.record
        if not isinstance(record, Pair) or not is_known(record):
            continue
        if record.kind == "code":
            code.append(index)
        elif record.kind == "tools":
            scores[index] = tool_gold(record, message_of(answer.text))
        else:
            scores[index] = story_gold(answer.text)
    runnable = [index for index in code if judge is not None and chat.extract(answers[index].text)]
    for index in code:
        scores[index] = 0.0 if judge is not None else None
    if judge is not None:
        verdicts = judge.judge([program_of(answers[index]) for index in runnable])
        for index, verdict in zip(runnable, verdicts, strict=True):
            scores[index] = None if verdict.score is None else code_gold(answers[index].text, verdict.score)
    return scores


def message_of(text: str) -> Message:
    """An answer as an assistant message in OpenAI's format."""
    reply = chat.parse(text)
    tool_calls = [
        {
            "id": f"call_{n}",
            "type": "function",
            "function": {"name": call["name"], "arguments": json.dumps(call["arguments"])},
        }
        for n, call in enumerate(reply.tool_calls)
    ]
    content = reply.content if reply.error is None else text
    return {"role": "assistant", "content": content} | ({"tool_calls": tool_calls} if tool_calls else {})


def curve_row(scores: Sequence[float | None], proxies: Sequence[float | None], seed: int) -> dict[str, float]:
    """`proxy`, and `gold` with its 95% interval if the truth is known."""
    row = {"proxy": mean(proxies)}
    known = [score for score in scores if score is not None]
    if known:
        interval = ratio(known, generator=generator("gold", seed))
        row |= interval.named("gold")
    return row


def mean(values: Sequence[float | None]) -> float:
    """The mean of the known values; NaN if there are none."""
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else math.nan


def best_of_n(proxies: np.ndarray, scores: np.ndarray) -> list[dict[str, float]]:
    """For n = 1, 2, 4, ...: KL, mean proxy and mean gold of the answer with the highest proxy among n.

    `proxies` and `scores` are (P, N), for N answers per prompt. The means are over all choices of n of the N answers
    (Nakano et al. 2021, arXiv:2112.09332, appendix I): the i-th worst is the best of n with probability
    C(i - 1, n - 1) / C(N, n).
    """
    total = proxies.shape[1]
    order = np.argsort(proxies, axis=1, kind="stable")
    sorted_proxies, sorted_scores = (np.take_along_axis(x, order, axis=1) for x in (proxies, scores))
    rows, n = [], 1
    while n <= total:
        probabilities = np.array([math.comb(i, n - 1) for i in range(total)]) / math.comb(total, n)
        rows.append(
            {
                "n": n,
                "kl": math.log(n) - (n - 1) / n,
                "proxy": float((sorted_proxies @ probabilities).mean()),
                "gold": float((sorted_scores @ probabilities).mean()),
            }
        )
        n *= 2
    return rows


# -- training pairs ----------------------------------------------------------------------------------------------------


OWN_SAMPLES = 4  # answers per prompt
OWN_PROMPTS = 128  # prompts sampled at a time


def own_prompts(split: PairSplit, answer_tokens: int, most: int) -> list[Prompt]:
    """At most `most` shuffled prompts with a known truth and a better answer of at most `answer_tokens` tokens."""
    if not most:
        return []
    known = [prompt for prompt in rl_answers.pair_prompts(split, answer_tokens) if is_known(prompt.record)]
    return sorted(known, key=lambda prompt: stable_hash("own answers", prompt.id))[:most]


def own_pairs(
    generate: Generate, prompts: Sequence[Prompt], tokenizer: Tokenizer, judge: Judge | None, seed: int
) -> list[Encoded]:
    """At most two pairs per prompt, with no shared answers, in prompt order."""
    encoded: list[Encoded] = []
    if not prompts:
        return encoded
    with progress(total=len(prompts), desc="own answers", unit="prompt") as bar:
        for first in range(0, len(prompts), OWN_PROMPTS):
            chunk = prompts[first : first + OWN_PROMPTS]
            requests = [(prompt, sample) for prompt in chunk for sample in range(OWN_SAMPLES)]
            answers = rl_answers.sample(generate, requests, tokenizer, seed)
            scored = list(zip(gold(answers, judge), answers, strict=True))
            groups = [scored[n : n + OWN_SAMPLES] for n in range(0, len(scored), OWN_SAMPLES)]
            encoded += [pair for group in groups for pair in _extreme_pairs(group)]
            bar.update(len(chunk))
    return encoded


def _extreme_pairs(scored: Sequence[tuple[float | None, Answer]]) -> list[Encoded]:
    """Pairs of a prompt's best and worst answers, and of its second best and second worst, if they differ enough."""
    known = [(score, answer) for score, answer in scored if score is not None]
    ranked = sorted(known, key=lambda entry: entry[0], reverse=True)  # stable: earlier answers first among ties
    ends = zip(ranked[: len(ranked) // 2], reversed(ranked), strict=False)
    far = [(best, worst) for best, worst in ends if best[0] - worst[0] >= MIN_GAP - 1e-9]
    return [_encode_pair(best, worst, number) for number, (best, worst) in enumerate(far, 1)]


def _encode_pair(best: tuple[float, Answer], worst: tuple[float, Answer], number: int) -> Encoded:
    pair = best[1].prompt.record
    assert isinstance(pair, Pair)
    own = replace(
        pair,
        id=f"own-{pair.id}-{number}",
        source="own answers",
        kind=f"own {pair.kind}",
        gold_chosen=best[0],
        gold_rejected=worst[0],
        chosen=[message_of(best[1].text)],
        rejected=[message_of(worst[1].text)],
    )
    return Encoded(own, rl_answers.piece_of(best[1]), rl_answers.piece_of(worst[1]))


# -- overoptimization --------------------------------------------------------------------------------------------------


SHOWN = 16  # prompts in the samples file


@dataclass(frozen=True, kw_only=True)
class HeldOutConfig:
    """Settings for evaluation during training and at the end."""

    eval_prompts: int = 200
    """Held-out prompts per evaluation."""
    report_samples: int = 1
    """Answers per held-out prompt in the final comparison of policy and reference."""
    best_of: int = 16
    """Reference answers per prompt for the best-of-n curve."""
    best_of_prompts: int = 64
    """Prompts for the best-of-n curve; 0 disables it."""

    def __post_init__(self) -> None:
        if self.eval_prompts < 2 or min(self.best_of, self.report_samples) < 1 or not self.best_of_prompts >= 0:
            raise ValueError("expected eval_prompts >= 2, report_samples >= 1, best_of >= 1, best_of_prompts >= 0")


class HeldOutPrompts:
    """Scores the policy's answers to held-out prompts by proxy and gold."""

    def __init__(
        self, prompts: list[Prompt], setting: Setting, judge: Judge | None, scorer: Scorer, config: HeldOutConfig
    ) -> None:
        """`scorer` is the training scorer; its totals are the proxy."""
        order = sorted(prompts, key=lambda prompt: stable_hash("held out", prompt.id))
        self.prompts = order[: config.eval_prompts]
        self.setting, self.judge, self.scorer, self.config = setting, judge, scorer, config

    def row(self, step: int) -> dict[str, float]:
        """The metrics at one point of the curve."""
        return self._row(self.setting.held_out([(prompt, 0) for prompt in self.prompts]))

    def report(self) -> JsonObject:
        """The final comparison of policy and reference, and the best-of-n curve."""
        samples = self.config.report_samples
        requests = [(prompt, sample) for prompt in self.prompts for sample in range(samples)]
        after, before = (self.setting.held_out(requests, of_reference=of_reference) for of_reference in (False, True))
        columns = [_mean_by_prompt(gold(answers, self.judge), samples) for answers in (before, after)]
        report: JsonObject = {"held_out": {"prompts": len(self.prompts), "samples": samples}}
        for kind in ("", *sorted({prompt.kind for prompt in self.prompts})):
            of_kind = np.array([kind in ("", prompt.kind) for prompt in self.prompts])
            known = of_kind & ~np.isnan(columns[0]) & ~np.isnan(columns[1])
            if not known.any():
                continue
            first, last = (column[known].tolist() for column in columns)
            gain = paired_difference((first, None), (last, None), generator=generator("gold", kind))
            part: JsonObject = {"gold_before": float(np.mean(first)), "gold": float(np.mean(last))}
            part |= gain.named("gain") | {"n": int(known.sum())}
            report["held_out"] |= {kind: part} if kind else part
        row = self._row(after)
        report["held_out"] |= {name: row[name] for name in ("kl", "kl_k3", "length", "proxy")}
        if self.config.best_of_prompts:
            report["best_of_n"] = self._best_of_n()
        return report

    def write_samples(self, path: Path) -> None:
        """Write some prompts with the reference's and policy's answers, one JSON line each."""
        path.parent.mkdir(parents=True, exist_ok=True)
        requests = [(prompt, 0) for prompt in self.prompts[:SHOWN]]
        pairs = zip(self.setting.held_out(requests, of_reference=True), self.setting.held_out(requests), strict=True)
        lines = []
        for before, after in pairs:
            scores = gold([before, after], self.judge)
            record = before.prompt.record
            is_pair = isinstance(record, Pair)
            shown = chat.render_text(record.prompt, record.tools) if is_pair else record.question
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

    def _best_of_n(self) -> list[dict[str, float]]:
        prompts = [prompt for prompt in self.prompts if is_known(prompt.record)][: self.config.best_of_prompts]
        requests = [(prompt, sample) for prompt in prompts for sample in range(self.config.best_of)]
        answers = self.setting.held_out(requests, of_reference=True)
        scores = np.array([np.nan if s is None else s for s in gold(answers, self.judge)])
        shape = (len(prompts), self.config.best_of)
        totals = np.array([np.nan if score.total is None else score.total for score in self.scorer(answers)])
        proxies, gold_table = totals.reshape(shape), scores.reshape(shape)
        complete = ~np.isnan(gold_table + proxies).any(1)
        return best_of_n(proxies[complete], gold_table[complete]) if complete.any() else []


def _mean_by_prompt(scores: list[float | None], samples: int) -> np.ndarray:
    """The mean score of each prompt's answers; NaN if any score is unknown."""
    return np.array([np.nan if score is None else score for score in scores]).reshape(-1, samples).mean(1)
