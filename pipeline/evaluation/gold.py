"""Gold: the true worth of an answer, by the functions that ordered the preference pairs. Training never sees it.

    code 0.2 parses + 0.8 hidden tests passed    tools `synthesis.tools.gold`    story mean of the checker's clauses

`curve_row` is one point of gold against proxy (Gao et al. 2022, arXiv:2210.10760); `best_of_n` is the line beside it: what
choosing the best of n answers by the proxy would give, at KL = ln n - (n - 1) / n nats.
"""

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from pipeline.device import generator
from pipeline.evaluation.intervals import ratio
from pipeline.reinforcement.answers import Answer
from pipeline.reinforcement.rewards import program_of
from pipeline.sandbox.judge import Judge
from pipeline.streams.records import Message, Pair
from pipeline.synthesis.preferences import code_gold, story_gold, tool_gold
from pipeline.text import chat, fenced


def known(pair: Pair) -> bool:
    """Whether any answer to the pair's prompt can be scored truly."""
    return pair.truth is not None and pair.kind in ("code", "tools", "story")


def gold(answers: Sequence[Answer], judge: Judge | None) -> list[float | None]:
    """True scores in [0, 1]; None where nobody knows (or no sandbox can tell)."""
    found: list[float | None] = [None] * len(answers)
    code: list[int] = []
    for place, answer in enumerate(answers):
        pair = answer.prompt.record
        if not isinstance(pair, Pair) or not known(pair):
            continue
        if pair.kind == "code":
            code.append(place)
        elif pair.kind == "tools":
            found[place] = tool_gold(pair, message_of(answer.text))
        else:
            found[place] = story_gold(answer.text)
    run = [place for place in code if judge is not None and fenced.extract(answers[place].text)]
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
    made = [{"id": f"call_{n}", "type": "function",
             "function": {"name": call["name"], "arguments": json.dumps(call["arguments"])}}
            for n, call in enumerate(reply.tool_calls)]  # fmt: skip
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

    `proxies` and `scores` (P, N) of N answers to each prompt. The mean over all choices of n of the N (Nakano et al. 2021,
    arXiv:2112.09332, appendix I): the i-th worst is the best of n with chance C(i - 1, n - 1) / C(N, n).
    """
    total = proxies.shape[1]
    order = np.argsort(proxies, axis=1, kind="stable")
    sorted_proxies, sorted_scores = (np.take_along_axis(x, order, axis=1) for x in (proxies, scores))
    rows, n = [], 1
    while n <= total:
        chance = np.array([math.comb(i, n - 1) for i in range(total)]) / math.comb(total, n)
        rows.append({"n": n, "kl": math.log(n) - (n - 1) / n, "proxy": float((sorted_proxies @ chance).mean()),
                     "gold": float((sorted_scores @ chance).mean())})  # fmt: skip
        n *= 2
    return rows
