"""Scores of tool conversations: is every call right, is there no call where none is right, does the state come out.

`score(items)` takes (dialogue, turn, reply text) and gives a row per item and the summary; `summarise(rows)` forms the
summary from any choice of rows (a resample, one quadrant), so intervals can re-form the ratios. A share whose
denominator is empty is left out. Turns come from `synthesis.tools.turns`; the reply is the text of one assistant turn.

    ast_{simple,multiple,parallel,parallel_multiple}   right by the rules of `bfcl.py`; ast: their unweighted mean
    ast_unseen_tool, ast_<tool>_<template>             the same mean over a part of the items
    greedy_disagreements                               items that the original's order of matching gets wrong (count)
    irrelevance, relevance                             nothing / something decodes to a call
    false_call_rate                                    a call although none fits or none is asked for
    ask_back_rate                                      no call and a question, where a required value is missing
    multi_turn                                        dialogues whose replies together leave the world as the truth does
    json_valid schema_valid name_accuracy            of the turns that need calls: every call is JSON / fits its schema,
                                                       the names are right
    argument_f1                                        micro, over (call, parameter, value), without defaults
    hallucinated_parameter_rate                        given parameters that the schema does not know
    execution_match                                    results and state equal the truth's; tools of the toolbox only

Not promised: that another call could not have served the wish as well.

The suite of tool calls: every scored turn of the test dialogues, given the true conversation before it, scored as BFCL
scores them.

    ast, ast_*, schema_valid, argument_f1, ...     greedy (evaluation/tools.py)
    ast_constrained, schema_valid_constrained      the same turns when a call can only be one of the tools' schemas
                                                   (generation/constrain.py)

Intervals are a bootstrap over whole dialogues.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from pipeline.evaluation import bfcl
from pipeline.evaluation.intervals import wilson
from pipeline.evaluation.suites import Subject, SuiteResult, last
from pipeline.generation.constrain import Grammars, guided
from pipeline.generation.schemas import SchemaError
from pipeline.ingest.records import Dialogue, Pair
from pipeline.run.device import stable_hash
from pipeline.synthetic import toolbox
from pipeline.synthetic import tools as synthetic_tools
from pipeline.synthetic.tool_values import Result, World, problems
from pipeline.synthetic.tools import calls, canonical, facets, stated, tools_at, truth, turns
from pipeline.text import chat

Item = tuple[Dialogue, int, str]  # dialogue, index of the assistant message, the model's text for it
Row = dict[str, Any]
AST = ("simple", "multiple", "parallel", "parallel_multiple")
MULTI_TURN = ("missing", "later", "dependent", "repair")


def score(items: Sequence[Item]) -> tuple[list[Row], dict[str, float]]:
    """A row per item, in order, and the summary. Raises ValueError for a turn that is not the assistant's."""
    rows = [_row(dialogue, turn, chat.parse(text)) for dialogue, turn, text in items]
    _add_multi_turn(items, rows)
    return rows, summarise(rows)


def summarise(rows: Sequence[Row]) -> dict[str, float]:
    """The measures over some rows."""
    found = {f"ast_{name}": _mean([r["valid"] for r in rows if r["category"] == name and r["needs"]]) for name in AST}
    found["ast"] = _ast(rows)
    found["ast_unseen_tool"] = _ast([row for row in rows if row["tool"] == "unseen"])
    for tool in ("seen", "unseen"):
        for template in ("seen", "unseen"):
            part = [row for row in rows if row["tool"] == tool and row["template"] == template]
            found[f"ast_{tool}_tool_{template}_template"] = _ast(part)
    quiet = [row for row in rows if not row["needs"]]
    asked = [row for row in quiet if row["category"] == "missing"]
    called = [row for row in rows if row["needs"]]
    found |= {
        "irrelevance": _mean([not row["calls"] for row in quiet if row["category"] == "irrelevance"]),
        "relevance": _mean([bool(row["calls"]) for row in called if row["category"] == "relevance"]),
        "false_call_rate": _mean([bool(row["calls"]) for row in quiet if row["category"] != "missing"]),
        "ask_back_rate": _mean([row["valid"] for row in asked]),
        "multi_turn": _mean([row["multi_turn"] for row in rows if "multi_turn" in row]),
        "json_valid": _mean([row["json_valid"] for row in called]),
        "schema_valid": _mean([row["schema_valid"] for row in called]),
        "name_accuracy": _mean([row["name_right"] for row in called]),
        "argument_f1": _ratio(
            2 * sum(row["arguments_right"] for row in called),
            sum(row["arguments_given"] + row["arguments_wanted"] for row in called),
        ),
        "hallucinated_parameter_rate": _ratio(
            sum(row["parameters_unknown"] for row in called), sum(row["parameters_given"] for row in called)
        ),
        "execution_match": _mean([row["execution_match"] for row in called if "execution_match" in row]),
    }
    counts = {"greedy_disagreements": float(sum(row["greedy_disagrees"] for row in rows)), "n": float(len(rows))}
    return {name: value for name, value in found.items() if not math.isnan(value)} | counts


def _ast(rows: Sequence[Row]) -> float:
    """Unweighted mean over the AST categories that occur; NaN where none does."""
    means = [_mean([row["valid"] for row in rows if row["category"] == name and row["needs"]]) for name in AST]
    return _mean([mean for mean in means if not math.isnan(mean)])


def _row(dialogue: Dialogue, turn: int, reply: chat.Reply) -> Row:
    """All that is known of one reply."""
    about, right = facets(dialogue), truth(dialogue, turn)
    functions = [tool["function"] for tool in tools_at(dialogue, turn)]
    verdict = bfcl.check(functions, reply.tool_calls, right)
    valid = verdict.valid
    if not right:
        valid = not reply.tool_calls and (about.category != "missing" or "?" in reply.content)
    elif about.category == "relevance":
        valid = bool(reply.tool_calls)
    row: Row = {
        "id": dialogue.id,
        "turn": turn,
        "category": about.category,
        "tool": "unseen" if about.unseen_tool else "seen",
        "template": "unseen" if about.unseen_template else "seen",
        "needs": len(right),
        "calls": len(reply.tool_calls),
        "valid": valid,
        "error": "" if valid else verdict.error or "not_asked",
        "greedy_disagrees": verdict.greedy_disagrees,
    }
    return row | _form(functions, reply, right, calls(dialogue.messages[turn])) | _execution(dialogue, turn, reply)


def _form(
    functions: list[dict[str, Any]], reply: chat.Reply, right: list[bfcl.Truth], wanted: list[tuple[str, Any]]
) -> Row:
    """JSON, schema, names, arguments."""
    schemas = {function["name"]: function.get("parameters", {}) for function in functions}
    made = [(call["name"], call["arguments"]) for call in reply.tool_calls]
    json_valid = bool(made) and reply.error is None
    given, expected = _triples(schemas, made), _triples(schemas, wanted)
    unknown = [
        key
        for name, arguments in made
        for key in arguments
        if name not in schemas or key not in schemas[name].get("properties", {})
    ]
    return {
        "json_valid": json_valid,
        "schema_valid": json_valid and all(n in schemas and not problems(schemas[n], a) for n, a in made),
        "name_right": sorted(name for name, _ in made) == sorted(name for call in right for name in call),
        "arguments_given": given.total(),
        "arguments_wanted": expected.total(),
        "arguments_right": (given & expected).total(),
        "parameters_given": sum(len(arguments) for _, arguments in made),
        "parameters_unknown": len(unknown),
    }


def _triples(schemas: dict[str, Any], made: list[tuple[str, Any]]) -> Counter[tuple[str, str, str]]:
    """(call, parameter, value) for every value that is not the default."""
    return Counter(
        (name, key, value)
        for name, arguments in made
        for key, value in stated(schemas.get(name, {}).get("properties", {}), arguments).items()
    )


def call_reward(pair: Pair, text: str) -> float:
    """How right an answer is to a prompt whose right answer is known: the reward `tool_call` (alignment spec, section
    9).

    1 if BFCL's rules accept it (no call where none is right), else 0.1 * its calls parse + 0.4 * (names right) * F1 of
    values.
    """
    assert pair.truth is not None
    dialogue = Dialogue(
        id=pair.id, kind="tools", category="", messages=[*pair.prompt, pair.truth["right"]], tools=pair.tools
    )
    turn, reply = len(pair.prompt), chat.parse(text)
    right, functions = truth(dialogue, turn), [tool["function"] for tool in tools_at(dialogue, turn)]
    if not right:
        return float(not reply.tool_calls and reply.error is None and bool(reply.content.strip()))
    if reply.error is None and bfcl.check(functions, reply.tool_calls, right).valid:
        return 1.0
    form = _form(functions, reply, right, calls(dialogue.messages[turn]))
    asked = form["arguments_given"] + form["arguments_wanted"]
    f1 = 2 * form["arguments_right"] / asked if asked else 1.0
    return 0.1 * form["json_valid"] + 0.4 * form["name_right"] * f1


# execution


def _execution(dialogue: Dialogue, turn: int, reply: chat.Reply) -> Row:
    """Does the reply leave what the truth leaves, after the true calls before it? Empty where it cannot be run."""
    wanted = calls(dialogue.messages[turn])
    if not wanted or not _runnable(dialogue):
        return {}
    before = [call for message in dialogue.messages[:turn] for call in calls(message)]
    made = [(call["name"], call["arguments"]) for call in reply.tool_calls]
    return {"execution_match": _outcome(before, wanted) == _outcome(before, made)}


def _runnable(dialogue: Dialogue) -> bool:
    return all(name in toolbox.TOOLS for message in dialogue.messages for name, _ in calls(message))


def _outcome(before: list[tuple[str, Any]], now: list[tuple[str, Any]]) -> tuple[list[str], dict[str, Any]]:
    """Results of the last calls (in any order) and the world after them."""
    world = World()
    for name, arguments in before:
        toolbox.run(world, name, arguments)
    results: list[Result] = [toolbox.run(world, name, arguments) for name, arguments in now]
    return sorted(map(canonical, results)), _state(world)


def _state(world: World) -> dict[str, Any]:
    """The public attributes; parallel calls have no order, so the entries of a list have none."""
    state = dataclasses.asdict(world)
    return {name: sorted(map(canonical, v)) if isinstance(v, list) else canonical(v) for name, v in state.items()}


def _add_multi_turn(items: Sequence[Item], rows: list[Row]) -> None:
    """`multi_turn` on the last row of every conversation all of whose scored turns are among the items."""
    by_id: dict[str, list[int]] = {}
    for i, (dialogue, _, _) in enumerate(items):
        if facets(dialogue).category in MULTI_TURN:
            by_id.setdefault(dialogue.id, []).append(i)
    for places in by_id.values():
        dialogue = items[places[0]][0]
        places.sort(key=lambda i: items[i][1])
        if [items[i][1] for i in places] != turns(dialogue) or not _runnable(dialogue):
            continue
        *early, last = [[(c["name"], c["arguments"]) for c in chat.parse(items[i][2]).tool_calls] for i in places]
        *before, wanted = [calls(dialogue.messages[items[i][1]]) for i in places]
        quiet = all(rows[i]["valid"] for i in places if not rows[i]["needs"])
        same = _outcome([c for made in early for c in made], last) == _outcome([c for w in before for c in w], wanted)
        rows[places[-1]]["multi_turn"] = quiet and same


def _mean(values: Sequence[float | bool]) -> float:
    return sum(values) / len(values) if values else math.nan


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else math.nan


# -- suites_tools ------------------------------------------------------------------------------------------------------


def called(subject: Subject, dialogues: Sequence[Dialogue]) -> SuiteResult:
    """Tool calls of every scored turn, given the true conversation before it; greedy."""
    result = SuiteResult()
    asked: list[tuple[Dialogue, int]] = [
        (d, turn) for d in dialogues[: subject.settings.dialogues] for turn in synthetic_tools.turns(d)
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
    rows, summary = score([(d, turn, reply) for (d, turn), reply in zip(kept, replies, strict=True)])
    result.numbers |= summary
    for name, low_high in _tool_intervals(rows, subject).items():
        result.numbers |= {f"{name}_low": low_high[0], f"{name}_high": low_high[1]}
    narrowed = list(dict.fromkeys(d.id for d, _ in kept))[: subject.settings.constrained]
    result.numbers |= _under_grammars(subject, kept, prompts, narrowed)
    for (dialogue, turn), row, reply in zip(kept, rows, replies, strict=True):
        name = f"{dialogue.id}#{turn}"
        wanted = "call" if row["needs"] else "question" if row["category"] == "missing" else "nothing"
        result.item(
            "tools",
            name,
            done[name],
            reply,
            asked=[dialogue.messages[: turn + 1], dialogue.tools],
            prompt=last(dialogue.messages[:turn]),
            category=row["category"],
            tool=row["tool"],
            wanted=wanted,
            constrained=int(dialogue.id in narrowed),
            verdict="right" if row["valid"] else row["error"],
            right=int(row["valid"]),
        )
    return result


def _under_grammars(
    subject: Subject, asked: Sequence[tuple[Dialogue, int]], prompts: dict[str, list[int]], ids: Sequence[str]
) -> dict[str, float]:
    """`ast_constrained` and `schema_valid_constrained`: turns of the dialogues `ids` when a call can only be one of
    the schemas.
    """
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
    rows, summary = score(
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
        for name, value in summarise(drawn).items():
            found.setdefault(name, []).append(value)
    having = Counter(name for group in groups for name in summarise(group))
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
