"""The suite of tool calls: every scored turn of the test dialogues, given the true conversation before it, scored as BFCL scores them.

    ast, ast_*, schema_valid, argument_f1, ...     greedy (evaluation/tools.py)
    ast_constrained, schema_valid_constrained      the same turns when a call can only be one of the tools' schemas (generation/guided.py)

Intervals are a bootstrap over whole dialogues.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from pipeline.device import stable_hash
from pipeline.evaluation import tools
from pipeline.evaluation.intervals import wilson
from pipeline.evaluation.suites import Result, Subject, last
from pipeline.generation.constrain import Grammars
from pipeline.generation.guided import guided
from pipeline.generation.schemas import SchemaError
from pipeline.streams.records import Dialogue
from pipeline.synthesis import tools as tool_synthesis
from pipeline.text import chat


def called(subject: Subject, dialogues: Sequence[Dialogue]) -> Result:
    """Tool calls of every scored turn, given the true conversation before it; greedy."""
    result = Result()
    asked: list[tuple[Dialogue, int]] = [
        (d, turn) for d in dialogues[: subject.settings.dialogues] for turn in tool_synthesis.turns(d)
    ]
    prompts = {
        f"{d.id}#{turn}": chat.render(subject.tokenizer, d.messages[:turn], d.tools, generation_prompt=True).ids
        for d, turn in asked
    }
    if not prompts:
        return result
    done = subject.complete("tools", prompts, tokens=subject.settings.max_new_tokens, temperature=0.0)
    result.numbers["left_out"] = len(prompts) - len(done)
    if not done:
        return result
    kept = [(d, turn) for d, turn in asked if f"{d.id}#{turn}" in done]
    replies = [subject.tokenizer.decode(done[f"{d.id}#{turn}"].ids) for d, turn in kept]
    rows, summary = tools.score([(d, turn, reply) for (d, turn), reply in zip(kept, replies, strict=True)])
    result.numbers |= summary
    for name, low_high in _tool_intervals(rows, subject).items():
        result.numbers |= {f"{name}_low": low_high[0], f"{name}_high": low_high[1]}
    narrowed = list(dict.fromkeys(d.id for d, _ in kept))[: subject.settings.constrained]
    result.numbers |= _under_grammars(subject, kept, prompts, narrowed)
    for (dialogue, turn), row, reply in zip(kept, rows, replies, strict=True):
        name = f"{dialogue.id}#{turn}"
        wanted = "call" if row["needs"] else "question" if row["category"] == "missing" else "nothing"
        result.item("tools", name, done[name], reply, asked=[dialogue.messages[: turn + 1], dialogue.tools],
                    prompt=last(dialogue.messages[:turn]), category=row["category"], tool=row["tool"], wanted=wanted,
                    constrained=int(dialogue.id in narrowed), verdict="right" if row["valid"] else row["error"], right=int(row["valid"]))  # fmt: skip
    return result


def _under_grammars(
    subject: Subject, asked: Sequence[tuple[Dialogue, int]], prompts: dict[str, list[int]], ids: Sequence[str]
) -> dict[str, float]:
    """`ast_constrained` and `schema_valid_constrained`: turns of the dialogues `ids` when a call can only be one of the schemas."""
    if not ids:
        return {}
    known = Grammars(subject.tokenizer, subject.model.config.vocab_size)
    chosen, left_out = [], 0
    for dialogue, turn in asked:
        if dialogue.id in ids:
            try:
                chosen.append((dialogue, turn, known.tool_calls(dialogue.tools)))
            except SchemaError:  # one's own tools may be more than can be promised
                left_out += 1
    given = [prompts[f"{d.id}#{turn}"] for d, turn, _ in chosen]
    stop = {subject.tokenizer.turn_end, subject.tokenizer.end_of_text}
    done = guided(
        subject.model,
        given,
        [grammar for *_, grammar in chosen],
        max_new_tokens=subject.settings.max_new_tokens,
        stop=stop,
    )
    rows, summary = tools.score(
        [(d, turn, subject.tokenizer.decode(one.ids)) for (d, turn, _), one in zip(chosen, done, strict=True)]
    )
    intervals = _tool_intervals(rows, subject)
    found: dict[str, float] = {"constrained_left_out": left_out}
    for name in ("ast", "schema_valid"):
        if name in summary:
            found |= {f"{name}_constrained": summary[name]}
            found |= {
                f"{name}_constrained_{side}": value
                for side, value in zip(("low", "high"), intervals[name], strict=True)
            }
    return found


def _tool_intervals(rows: list[dict[str, Any]], subject: Subject) -> dict[str, tuple[float, float]]:
    """Percentile bootstrap over whole dialogues; every measure is formed anew in each resample.

    A share that is 0, or 1, in every resample has no spread to draw from; there it is Wilson's over the dialogues that
    have the measure.
    """
    by_dialogue: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_dialogue.setdefault(row["id"], []).append(row)
    groups = list(by_dialogue.values())
    draws = np.random.default_rng(stable_hash(subject.seed, "tools bootstrap") % 2**63)
    found: dict[str, list[float]] = {}
    for _ in range(min(subject.settings.bootstrap, 500)):  # a summary costs a millisecond; 500 give the 2.5 % point
        drawn = [row for place in draws.integers(len(groups), size=len(groups)) for row in groups[place]]
        for name, value in tools.summarise(drawn).items():
            found.setdefault(name, []).append(value)
    having = Counter(name for group in groups for name in tools.summarise(group))
    return {
        name: _tool_interval(values, having[name])
        for name, values in found.items()
        if name not in ("n", "greedy_disagreements")
    }


def _tool_interval(values: list[float], n: int) -> tuple[float, float]:
    if set(values) in ({0.0}, {1.0}):
        share = wilson(n if values[0] else 0, n)
        return share.low, share.high
    return float(np.percentile(values, 2.5)), float(np.percentile(values, 97.5))
