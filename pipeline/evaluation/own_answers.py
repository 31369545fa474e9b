"""Pairs of a model's own answers, ordered by truth: what a reward model must rank when a policy is trained against it.

Pairs of made-up mistakes alone leave it blind to the mistakes that the policy makes, and a policy finds such blind spots within
a few hundred answers (docs/LOG.md). So some prompts are answered a few times by the model itself, the known-truth functions of
`gold.py` say how good each answer is, and the best and the worst that differ enough make a pair, as do the next best and the
next worst.

Not here: answers to prompts whose truth nobody knows; those are left out.
"""

from collections.abc import Sequence
from dataclasses import replace

from pipeline.device import stable_hash
from pipeline.evaluation import gold
from pipeline.reinforcement import answers
from pipeline.reinforcement.answers import Answer, Generate, Prompt
from pipeline.sandbox.judge import Judge
from pipeline.streams.preferences import Encoded, PairSplit
from pipeline.streams.records import Pair
from pipeline.synthesis.preferences import MIN_GAP
from pipeline.text.tokenizer import Tokenizer
from pipeline.tracking import progress

SAMPLES = 4  # answers to each prompt
PROMPTS = 128  # answered at a time


def prompts(split: PairSplit, answer_tokens: int, most: int) -> list[Prompt]:
    """The first `most` prompts, shuffled, whose truth is known and whose better answer has room."""
    if not most:
        return []
    known = [one for one in answers.pair_prompts(split, answer_tokens) if gold.known(one.record)]  # type: ignore[arg-type]
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
            given = answers.sample(generate, asked, tokenizer, seed)
            told = list(zip(gold.gold(given, judge), given, strict=True))
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
        pair, id=f"own-{pair.id}-{number}", source="own answers", kind=f"own {pair.kind}", gold_chosen=best[0],
        gold_rejected=worst[0], chosen=[gold.message_of(best[1].text)], rejected=[gold.message_of(worst[1].text)],
    )  # fmt: skip
    return Encoded(mine, answers.piece_of(best[1]), answers.piece_of(worst[1]))
