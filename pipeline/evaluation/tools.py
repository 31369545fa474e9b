"""Scores for tool conversations: correct calls, no call when none is needed, the state after the calls.

    score((dialogue, turn, reply text), ...) -> a row per item, and the summary
    summarize(rows) -> the summary of any subset of rows, such as a bootstrap resample, so intervals can recompute the
                       ratios

The turns come from `synthetic.tools.turns`; the reply is the text of one assistant turn. Ratios with a denominator of 0
are omitted. The summary:

    ast_{simple,multiple,parallel,parallel_multiple}   correct by the rules of `bfcl.py`; ast: their unweighted mean
    ast_unseen_tool, ast_<tool>_<template>             the same mean over a subset of the items
    greedy_disagreements                               number of items misjudged by BFCL's greedy matching
    irrelevance, relevance                             the reply has no call / at least one call
    false_call_rate                                    a call although no tool fits or no call is requested
    ask_back_rate                                      no call but a question when a required value is missing
    multi_turn                                         dialogues whose calls together have the outcome of the true calls
    json_valid schema_valid name_accuracy              turns that need calls: every call is valid JSON / matches its
                                                       schema / the names are correct
    argument_f1                                        micro-averaged over (call, parameter, value), without defaults
    hallucinated_parameter_rate                        parameters in calls that are not in the schema
    execution_match                                    results and state match those of the true calls; toolbox tools

`called` is the suite: every scored turn of the test dialogues, given the true conversation so far, answered greedily.
`ast_constrained` and `schema_valid_constrained` cover the same turns with calls constrained to the tools' schemas
(generation/constrain.py). Intervals come from a bootstrap over dialogues.

Not guaranteed: that no other call would have served the request equally well.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from pipeline.evaluation import bfcl
from pipeline.evaluation.intervals import wilson
from pipeline.evaluation.suites import Subject, SuiteResult, last
from pipeline.generation.constrain import Grammars, guided
from pipeline.generation.sampling import Completion
from pipeline.generation.schemas import SchemaError
from pipeline.ingest.records import Dialogue, Pair
from pipeline.run.device import stable_hash
from pipeline.run.types import JsonObject
from pipeline.synthetic import toolbox
from pipeline.synthetic.tool_schemas import Result, ToolWorld, problems
from pipeline.synthetic.tools import calls, canonical, facets, is_unserved, stated, tools_at, truth, turns
from pipeline.text import chat

Item = tuple[Dialogue, int, str]  # dialogue, index of the assistant message, the model's text for it
Row = JsonObject  # of one item
NamedCall = tuple[str, bfcl.Value]  # name and arguments
AST = ("simple", "multiple", "parallel", "parallel_multiple")
MULTI_TURN = ("missing", "later", "dependent", "repair")


def score(items: Sequence[Item]) -> tuple[list[Row], dict[str, float]]:
    """A row per item, in order, and the summary. Raises ValueError for a non-assistant turn."""
    rows = [_row_of_reply(dialogue, turn, chat.parse(text)) for dialogue, turn, text in items]
    _add_multi_turn(items, rows)
    return rows, summarize(rows)


def summarize(rows: Sequence[Row]) -> dict[str, float]:
    """The metrics over the given rows."""
    summary = {f"ast_{name}": _mean([r["valid"] for r in rows if r["category"] == name and r["needs"]]) for name in AST}
    summary["ast"] = _ast(rows)
    summary["ast_unseen_tool"] = _ast([row for row in rows if row["tool"] == "unseen"])
    for tool in ("seen", "unseen"):
        for template in ("seen", "unseen"):
            part = [row for row in rows if row["tool"] == tool and row["template"] == template]
            summary[f"ast_{tool}_tool_{template}_template"] = _ast(part)
    without_call = [row for row in rows if not row["needs"]]
    missing_value = [row for row in without_call if row["category"] == "missing"]
    with_call = [row for row in rows if row["needs"]]
    summary |= {
        "irrelevance": _mean([not row["calls"] for row in without_call if row["category"] == "irrelevance"]),
        "relevance": _mean([bool(row["calls"]) for row in with_call if row["category"] == "relevance"]),
        "false_call_rate": _mean([bool(row["calls"]) for row in without_call if row["category"] != "missing"]),
        "ask_back_rate": _mean([row["valid"] for row in missing_value]),
        "multi_turn": _mean([row["multi_turn"] for row in rows if "multi_turn" in row]),
        "json_valid": _mean([row["json_valid"] for row in with_call]),
        "schema_valid": _mean([row["schema_valid"] for row in with_call]),
        "name_accuracy": _mean([row["name_right"] for row in with_call]),
        "argument_f1": _ratio(
            2 * sum(row["arguments_right"] for row in with_call),
            sum(row["arguments_given"] + row["arguments_wanted"] for row in with_call),
        ),
        "hallucinated_parameter_rate": _ratio(
            sum(row["parameters_unknown"] for row in with_call), sum(row["parameters_given"] for row in with_call)
        ),
        "execution_match": _mean([row["execution_match"] for row in with_call if "execution_match" in row]),
    }
    counts = {"greedy_disagreements": float(sum(row["greedy_disagrees"] for row in rows)), "n": float(len(rows))}
    return {name: value for name, value in summary.items() if not math.isnan(value)} | counts


def _ast(rows: Sequence[Row]) -> float:
    """Unweighted mean over the AST categories present; NaN if there are none."""
    means = [_mean([row["valid"] for row in rows if row["category"] == name and row["needs"]]) for name in AST]
    return _mean([mean for mean in means if not math.isnan(mean)])


def _row_of_reply(dialogue: Dialogue, turn: int, reply: chat.Reply) -> Row:
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
    return (
        row
        | _form_measures(functions, reply, right, calls(dialogue.messages[turn]))
        | _execution_match(dialogue, turn, reply)
    )


def _form_measures(
    functions: list[JsonObject], reply: chat.Reply, right: list[bfcl.Truth], wanted: list[NamedCall]
) -> Row:
    """The metrics on JSON, schemas, names and arguments."""
    schemas = {function["name"]: function.get("parameters", {}) for function in functions}
    reply_calls = [(call["name"], call["arguments"]) for call in reply.tool_calls]
    json_valid = bool(reply_calls) and reply.error is None
    given_arguments, true_arguments = _triples(schemas, reply_calls), _triples(schemas, wanted)
    unknown = [
        key
        for name, arguments in reply_calls
        for key in arguments
        if name not in schemas or key not in schemas[name].get("properties", {})
    ]
    return {
        "json_valid": json_valid,
        "schema_valid": json_valid and all(n in schemas and not problems(schemas[n], a) for n, a in reply_calls),
        "name_right": sorted(name for name, _ in reply_calls) == sorted(name for call in right for name in call),
        "arguments_given": given_arguments.total(),
        "arguments_wanted": true_arguments.total(),
        "arguments_right": (given_arguments & true_arguments).total(),
        "parameters_given": sum(len(arguments) for _, arguments in reply_calls),
        "parameters_unknown": len(unknown),
    }


def _triples(schemas: dict[str, JsonObject], named_calls: list[NamedCall]) -> Counter[tuple[str, str, str]]:
    """(call, parameter, value) for every non-default value."""
    return Counter(
        (name, key, value)
        for name, arguments in named_calls
        for key, value in stated(schemas.get(name, {}).get("properties", {}), arguments).items()
    )


def call_reward(pair: Pair, text: str) -> float:
    """The reward `tool_call`: correctness of an answer to a prompt with a known correct answer.

    1 if BFCL's rules accept it (or if it correctly makes no call), else 0.1 * (calls parse) + 0.4 * (names correct) *
    F1 of values.
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
    form = _form_measures(functions, reply, right, calls(dialogue.messages[turn]))
    asked = form["arguments_given"] + form["arguments_wanted"]
    f1 = 2 * form["arguments_right"] / asked if asked else 1.0
    return 0.1 * form["json_valid"] + 0.4 * form["name_right"] * f1


def _execution_match(dialogue: Dialogue, turn: int, reply: chat.Reply) -> Row:
    """Whether the reply has the same outcome as the true reply, after the true earlier calls; empty if not runnable."""
    wanted = calls(dialogue.messages[turn])
    if not wanted or not _runnable(dialogue):
        return {}
    before = [call for message in dialogue.messages[:turn] for call in calls(message)]
    reply_calls = [(call["name"], call["arguments"]) for call in reply.tool_calls]
    return {"execution_match": _outcome(before, wanted) == _outcome(before, reply_calls)}


def _runnable(dialogue: Dialogue) -> bool:
    return all(name in toolbox.tools() for message in dialogue.messages for name, _ in calls(message))


def _outcome(before: list[NamedCall], last: list[NamedCall]) -> tuple[list[str], JsonObject]:
    """The results of the last calls (in any order) and the world's state after them."""
    world = ToolWorld()
    for name, arguments in before:
        toolbox.run(world, name, arguments)
    results: list[Result] = [toolbox.run(world, name, arguments) for name, arguments in last]
    return sorted(map(canonical, results)), _state(world)


def _state(world: ToolWorld) -> JsonObject:
    """The public attributes. Lists are sorted, since parallel calls have no order."""
    state = dataclasses.asdict(world)
    return {name: sorted(map(canonical, v)) if isinstance(v, list) else canonical(v) for name, v in state.items()}


def _add_multi_turn(items: Sequence[Item], rows: list[Row]) -> None:
    """Add `multi_turn` to the last row of each multi-turn conversation whose scored turns are all among the items."""
    by_id: dict[str, list[int]] = {}
    for i, (dialogue, _, _) in enumerate(items):
        if facets(dialogue).category in MULTI_TURN:
            by_id.setdefault(dialogue.id, []).append(i)
    for indices in by_id.values():
        dialogue = items[indices[0]][0]
        indices.sort(key=lambda i: items[i][1])
        if [items[i][1] for i in indices] != turns(dialogue) or not _runnable(dialogue):
            continue
        *earlier, last = [[(c["name"], c["arguments"]) for c in chat.parse(items[i][2]).tool_calls] for i in indices]
        *before, wanted = [calls(dialogue.messages[items[i][1]]) for i in indices]
        no_false_call = all(rows[i]["valid"] for i in indices if not rows[i]["needs"])
        outcome = _outcome([call for reply in earlier for call in reply], last)
        same_outcome = outcome == _outcome([call for true in before for call in true], wanted)
        rows[indices[-1]]["multi_turn"] = no_false_call and same_outcome


def _mean(values: Sequence[float | bool]) -> float:
    return sum(values) / len(values) if values else math.nan


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else math.nan


# -- suite -------------------------------------------------------------------------------------------------------------


def called(subject: Subject, dialogues: Sequence[Dialogue]) -> SuiteResult:
    """Score the greedy reply to every scored turn, given the true conversation so far.

    Uses the configured number of `dialogues`, and the same number in which no offered tool fits.
    """
    result, limit = SuiteResult(), subject.settings.dialogues
    unserved = [d for d in dialogues if is_unserved(d)]
    chosen = [d for d in dialogues if not is_unserved(d)][:limit] + unserved[:limit]
    items: list[tuple[Dialogue, int]] = [(d, turn) for d in chosen for turn in turns(d)]
    prompts = {
        f"{d.id}#{turn}": chat.render(subject.tokenizer, d.messages[:turn], d.tools, generation_prompt=True).ids
        for d, turn in items
    }
    if not prompts:
        return result
    completions = subject.complete("tools", prompts, tokens=subject.settings.max_new_tokens, temperature=0.0)
    result.numbers["left_out"] = len(prompts) - len(completions)
    if not completions:
        return result
    answered = [(d, turn) for d, turn in items if f"{d.id}#{turn}" in completions]
    replies = [subject.tokenizer.decode(completions[f"{d.id}#{turn}"].ids) for d, turn in answered]
    rows, summary = score([(d, turn, reply) for (d, turn), reply in zip(answered, replies, strict=True)])
    result.numbers |= summary
    for name, interval in _intervals(rows, subject).items():
        result.numbers |= {f"{name}_low": interval[0], f"{name}_high": interval[1]}
    constrained_ids = list(dict.fromkeys(d.id for d, _ in answered))[: subject.settings.constrained]
    result.numbers |= _constrained_scores(subject, answered, prompts, completions, constrained_ids)
    for (dialogue, turn), row, reply in zip(answered, rows, replies, strict=True):
        name = f"{dialogue.id}#{turn}"
        wanted = "call" if row["needs"] else "question" if row["category"] == "missing" else "nothing"
        result.item(
            "tools",
            name,
            completions[name],
            reply,
            asked=[dialogue.messages[: turn + 1], dialogue.tools],
            prompt=last(dialogue.messages[:turn]),
            category=row["category"],
            tool=row["tool"],
            wanted=wanted,
            constrained=int(dialogue.id in constrained_ids),
            verdict="right" if row["valid"] else row["error"],
            right=int(row["valid"]),
        )
    return result


def _constrained_scores(
    subject: Subject,
    items: Sequence[tuple[Dialogue, int]],
    prompts: dict[str, list[int]],
    free: dict[str, Completion],
    ids: Sequence[str],
) -> dict[str, float]:
    """`ast_constrained` and `schema_valid_constrained` for the turns of the dialogues `ids` under their tools' grammar;
    `free` are the unconstrained completions.
    """
    if not ids:
        return {}
    grammars = Grammars(subject.tokenizer, subject.model.config.vocab_size, search=False)
    chosen, left_out = [], 0
    for dialogue, turn in items:
        if dialogue.id in ids:
            try:
                chosen.append((dialogue, turn, grammars.tool_calls(dialogue.tools)))
            except SchemaError:  # user-supplied tools may have schemas that no grammar covers
                left_out += 1
    completions = guided(
        subject.model,
        [prompts[f"{d.id}#{turn}"] for d, turn, _ in chosen],
        [grammar for *_, grammar in chosen],
        max_new_tokens=subject.settings.max_new_tokens,
        stop={subject.tokenizer.turn_end, subject.tokenizer.end_of_text},
        drafts=[free[f"{d.id}#{turn}"] for d, turn, _ in chosen],
    )
    replies = [subject.tokenizer.decode(completion.ids) for completion in completions]
    rows, summary = score([(d, turn, reply) for (d, turn, _), reply in zip(chosen, replies, strict=True)])
    intervals = _intervals(rows, subject)
    numbers: dict[str, float] = {"constrained_left_out": left_out}
    for name in ("ast", "schema_valid"):
        if name in summary:
            numbers |= {f"{name}_constrained": summary[name]}
            numbers |= {
                f"{name}_constrained_{side}": value
                for side, value in zip(("low", "high"), intervals[name], strict=True)
            }
    return numbers


def _intervals(rows: list[Row], subject: Subject) -> dict[str, tuple[float, float]]:
    """Intervals by percentile bootstrap over dialogues; each resample recomputes every metric.

    A proportion that is 0 in every resample, or 1 in every resample, has no spread; its interval is Wilson's, over the
    dialogues that have the metric.
    """
    by_dialogue: dict[str, list[Row]] = {}
    for row in rows:
        by_dialogue.setdefault(row["id"], []).append(row)
    groups = list(by_dialogue.values())
    random = np.random.default_rng(stable_hash(subject.seed, "tools bootstrap") % 2**63)
    values_by_name: dict[str, list[float]] = {}
    for _ in range(min(subject.settings.bootstrap, 500)):  # 1 ms each; 500 suffice for 2.5% quantiles
        resample = [row for index in random.integers(len(groups), size=len(groups)) for row in groups[index]]
        for name, value in summarize(resample).items():
            values_by_name.setdefault(name, []).append(value)
    num_dialogues = Counter(name for group in groups for name in summarize(group))
    return {
        name: _interval(values, num_dialogues[name])
        for name, values in values_by_name.items()
        if name not in ("n", "greedy_disagreements")
    }


def _interval(values: list[float], n: int) -> tuple[float, float]:
    if set(values) in ({0.0}, {1.0}):
        share = wilson(n if values[0] else 0, n)
        return share.low, share.high
    return float(np.percentile(values, 2.5)), float(np.percentile(values, 97.5))
