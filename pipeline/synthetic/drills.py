"""Exercises: drills for copying from context, invented facts that must be memorized, and a new skill.

A drill is a short text in which everything occurs twice, so that a small model learns early to copy from its context.

In: a byte target and a seed. Out: `Text` records with source "drills"; `drill` is a pure function of (seed, number).
Four forms also come as conversations (`dialogue`); otherwise a model would forget during fine-tuning how to copy
anything that it never sees in a conversation. Forms:

    again    a row of items, then the same row
    recall   key-value pairs, then the keys in a different order, each with its value
    record   lines `field: value`, then the same record as a JSON object
    request  a sentence that contains the values, then a JSON object with them
    schema   function schemas in the format in which tools are offered, a request for one of them, and the call
    choose   functions with only a name and a description, then requests, each followed by the matching name

The items are names, places, words, numbers, dates, codes, paths and words made up of syllables, so that the second
mention can only be inferred from the first. Drills contain no tool names from the toolbox and no sentences from the
stories. In-context copying (the induction heads of Olsson et al. 2022, arXiv:2209.11895) emerges in one sudden drop of
the loss. With only prose and stories, that drop comes late or, within the few steps of a small run, not at all
(measurements in docs/LOG.md).

Facts are four attributes of each invented service; a model can learn them only by memorizing them:

    services x (port, owner, region, runtime) x wordings -> records.Fact

    train    three wordings of every fact
    val      a fourth wording of a quarter of the facts
    test     the fourth wording of the other facts
    control  the fourth wording, for services that never occur in training: answers can only be guessed

Values are drawn from the same distribution for all services, so control answers are correct only by chance.

The skill (`queries`) is SQL, which appears nowhere else in the data: in one sentence, a user names a table and its
columns and asks for rows; the answer is one SELECT statement. This shows what an adapter learns from a few hundred
examples (stages/lora.py). A record is a pure function of (split, seed, number); each table belongs to one split, chosen
by a hash of its name and columns.

Not guaranteed: that drills make sense; that services are consistent with each other (two may have the same port); SQL
beyond one table, sorting, a condition, a limit and an aggregate.
"""

import itertools
import json
from collections.abc import Callable, Iterator
from random import Random

import numpy as np

from pipeline.ingest.records import Dialogue, Fact, Text
from pipeline.run.device import stable_hash
from pipeline.synthetic import wording
from pipeline.synthetic.wording import (
    Kind,
    Value,
    conjunction,
    integer,
    lines,
    made_up,
    open_word,
    phrase,
    word_list,
    words,
)

SOURCE = "drills"


def _words(kind: str) -> tuple[str, ...]:
    return word_list("drills.yaml", kind)


def _lines(*keys: str) -> tuple[str, ...]:
    return lines("drills.yaml", *keys)


def _letters(rng: Random) -> str:
    return "".join(rng.choice("abcdefghijklmnopqrstuvwxyz0123456789") for _ in range(rng.randint(2, 6)))


def _compound(rng: Random) -> str:
    return rng.choice("_-. ").join(rng.choice((made_up, _noun))(rng) for _ in range(2))


def _noun(rng: Random) -> str:
    return open_word(rng) if rng.random() < 0.8 else rng.choice(words("nouns"))


MADE_UP = Kind(made_up)
KINDS: tuple[Kind, ...] = (
    *(MADE_UP, MADE_UP, Kind(_letters), Kind(_compound), Kind(_compound), Kind(_noun), Kind(phrase), Kind(phrase)),
    *(wording.PERSON, wording.FIRST, wording.CITY, wording.TEXT, wording.WORD, wording.LABEL, wording.CODE),
    *(wording.PATH, wording.PHONE, wording.EMAIL, wording.DATE, wording.TIME, wording.NUMBER, wording.AMOUNT),
    integer(2, 9999),
)


def drill(seed: int, number: int) -> str:
    """The text of drill `number`."""
    rng = Random(f"drills/{seed}/{number}")
    return rng.choice(FORMS)(rng)


def path(seed: int, number: int) -> str:
    """The path in the record of drill `number`."""
    return f"{SOURCE}/{seed}/{number}"


def record(seed: int, number: int) -> Text:
    """The record of drill `number`."""
    return Text(text=drill(seed, number), source=SOURCE, path=path(seed, number), license="CC0-1.0")


def records(target_bytes: int, seed: int) -> Iterator[Text]:
    """The records of drills 0, 1 and so on, until their UTF-8 texts fill `target_bytes`."""
    written = number = 0
    while written < target_bytes:
        drill_record = record(seed, number)
        written += len(drill_record.text.encode())
        number += 1
        yield drill_record


def dialogue(split: str, seed: int, number: int) -> Dialogue:
    """A drill as a conversation: a row to repeat, a record or request to write as JSON, or functions to choose from.

    A pure function of (split, seed, number).
    """
    id_ = f"copy/{split}/{seed}/{number}"
    rng = Random(id_)
    form = rng.choice(("again", "record", "request", "choose", "choose"))
    if form == "choose":
        functions, choices = _draw_choices(rng, 12)
        messages = [{"role": "system", "content": "\n".join(functions)}]
        for request, answer in choices:
            messages += [{"role": "user", "content": request}, {"role": "assistant", "content": answer}]
        return Dialogue(id=id_, kind="copy", category=form, messages=messages)
    if form == "again":
        content = answer = rng.choice((", ", " ", "\n")).join(
            str(rng.choice(KINDS).draw(rng)) for _ in range(rng.randint(1, 10))
        )
        lead = rng.choice(_lines("repeat"))
    else:
        fields = _draw_fields(rng)
        content, answer = "\n".join(f"{name}: {value}" for name, value in fields.items()), _json(fields)
        if form == "request":
            phrases = [f"{name} {value}" for name, value in fields.items()]
            content = f"{rng.choice(_lines('leads'))} {conjunction(phrases)}."
        lead = rng.choice(_lines("as_json"))
    messages = [{"role": "user", "content": f"{lead}:\n{content}"}, {"role": "assistant", "content": answer}]
    return Dialogue(id=id_, kind="copy", category=form, messages=messages)


def _again(rng: Random) -> str:
    size = rng.randint(6, 24)
    if rng.random() < 0.5:
        kind = rng.choice(KINDS)
        items = [kind.draw(rng) for _ in range(size)]
    else:
        items = [rng.choice(KINDS).draw(rng) for _ in range(size)]
    row = rng.choice((", ", " ", "; ", "\n")).join(map(str, items))
    return f"{rng.choice(_lines('rows'))} {row}\n{rng.choice(_lines('again'))} {row}\n"


def _recall(rng: Random) -> str:
    size, key, value = rng.randint(4, 12), rng.choice(KINDS), rng.choice(KINDS)
    pairs = {str(key.draw(rng)): value.draw(rng) for _ in range(size)}
    link = rng.choice((": ", " = ", " -> ", " is "))
    lines = [f"{left}{link}{right}" for left, right in pairs.items()]
    shuffled = rng.sample(lines, len(lines))
    return "\n".join((*lines, rng.choice(_lines("again")), *shuffled, ""))


def _draw_fields(rng: Random) -> dict[str, Value]:
    return {_draw_field_name(rng): rng.choice(KINDS).draw(rng) for _ in range(rng.randint(1, 5))}


def _draw_field_name(rng: Random) -> str:
    form = rng.random()
    if form < 0.3:
        return rng.choice(_words("fields"))
    if form < 0.6:
        return _noun(rng)
    return made_up(rng) if form < 0.75 else f"{_noun(rng)}_{_noun(rng)}"


def _json(fields: dict[str, Value]) -> str:
    return json.dumps(fields, ensure_ascii=False)


def _record(rng: Random) -> str:
    lines = []
    for _ in range(rng.randint(1, 4)):
        fields = _draw_fields(rng)
        lines += [*(f"{name}: {value}" for name, value in fields.items()), _json(fields)]
    return "\n".join((*lines, ""))


def _request(rng: Random) -> str:
    lines = []
    for _ in range(rng.randint(1, 4)):
        fields = _draw_fields(rng)
        phrases = [f"{name} {value}" for name, value in fields.items()]
        phrases = rng.sample(phrases, len(phrases)) if rng.random() < 0.3 else phrases
        lines += [f"{rng.choice(_lines('leads'))} {conjunction(phrases)}.", _json(fields)]
    return "\n".join((*lines, ""))


def _draw_function(rng: Random) -> tuple[dict[str, Value], str, dict[str, Value]]:
    """A function's schema, a request to call it, and the arguments of the request."""
    verb, thing, arguments = rng.choice(_words("verbs")), rng.choice((made_up, _noun))(rng), _draw_fields(rng)
    properties = {name: {"type": TYPES[type(value)]} for name, value in arguments.items()}
    schema = {
        "name": f"{verb}_{thing}" if rng.random() < 0.7 else f"{made_up(rng)}_{thing}",
        "description": f"{verb.capitalize()} the {thing}.",
        "parameters": {"type": "object", "properties": properties, "required": list(arguments)},
    }
    phrases = [f"{name} {value}" for name, value in arguments.items()]
    return schema, f"{verb} the {thing} with {conjunction(phrases)}", arguments


def _schema(rng: Random) -> str:
    functions = {f[0]["name"]: f for f in (_draw_function(rng) for _ in range(rng.randint(1, 3)))}
    lines = [_json(schema) for schema, _, _ in functions.values()]
    for name in rng.sample(sorted(functions), rng.randint(1, len(functions))):
        _, request, arguments = functions[name]
        lines += [f"{request[0].upper()}{request[1:]}.", _json({"name": name, "arguments": arguments})]
    return "\n".join((*lines, ""))


def _draw_choices(rng: Random, max_requests: int) -> tuple[list[str], list[tuple[str, str]]]:
    """Functions with a name and a description, and up to `max_requests` requests, each with the right function."""
    things: dict[str, tuple[str, str]] = {}
    for _ in range(rng.randint(2, 6)):
        verb = rng.choice(_words("verbs")) if rng.random() < 0.3 else open_word(rng)
        thing = rng.choice((made_up, _noun))(rng)
        name = f"{verb}_{thing}" if rng.random() < 0.7 else f"{made_up(rng)}_{_noun(rng)}"
        things[name] = verb, thing
    functions = [_json({"name": n, "description": f"{v.capitalize()} the {t}."}) for n, (v, t) in things.items()]
    choices = []
    for name in rng.choices(sorted(things), k=rng.randint(3, max_requests)):
        request = rng.choice(_lines("requests")).format(" the ".join(things[name]))
        choices.append((f"{request[0].upper()}{request[1:]}", _json({"name": name})))
    return functions, choices


def _choose(rng: Random) -> str:
    functions, choices = _draw_choices(rng, 10)
    return "\n".join((*functions, *(line for choice in choices for line in choice), ""))


TYPES = {str: "string", int: "integer", float: "number"}
FORMS: tuple[Callable[[Random], str], ...] = (_again, _recall, _record, _request, _schema, _choose)


# -- invented facts ----------------------------------------------------------------------------------------------------

ATTRIBUTES = ("port", "owner", "region", "runtime")
PORTS = (1000, 10000)  # four digits
HELD_OUT = 3  # the index of the wording that never occurs in training
CONTROLS = 4  # trained services per control service


def facts(num_services: int, seed: int) -> dict[str, list[Fact]]:
    """The facts of each split. Raises ValueError if there are more services than names."""
    names = services(num_services + max(1, num_services // CONTROLS), seed)
    trained, controls = names[:num_services], names[num_services:]
    values = {name: _values(name, seed) for name in names}
    splits: dict[str, list[Fact]] = {"train": [], "val": [], "test": [], "control": []}
    for name, attribute in itertools.product(trained, ATTRIBUTES):
        wordings = [_fact(name, attribute, wording, values[name][attribute]) for wording in range(HELD_OUT + 1)]
        splits["train"] += wordings[:HELD_OUT]
        is_val = stable_hash("facts", seed, name, attribute) % 4 == 0
        splits["val" if is_val else "test"].append(wordings[HELD_OUT])
    splits["control"] = [
        _fact(name, attribute, HELD_OUT, values[name][attribute])
        for name, attribute in itertools.product(controls, ATTRIBUTES)
    ]
    return splits


def services(count: int, seed: int) -> list[str]:
    """`count` distinct service names. Raises ValueError if there are not enough names."""
    parts = map(_words, ("beginnings", "middles", "endings"))
    names = list(map("".join, itertools.product(*parts)))
    if count > len(names):
        raise ValueError(f"facts: expected at most {len(names) * CONTROLS // (CONTROLS + 1)} services, got more")
    order = np.random.default_rng(stable_hash("services", seed) % 2**63).permutation(len(names))
    return [names[index] for index in order[:count]]


def _values(name: str, seed: int) -> dict[str, str]:
    draws = np.random.default_rng(stable_hash("facts", seed, name) % 2**63)
    return {
        "port": str(draws.integers(*PORTS)),
        "owner": str(draws.choice(words("first_names"))),
        "region": str(draws.choice(_words("regions"))),
        "runtime": str(draws.choice(_words("runtimes"))),
    }


def _fact(name: str, attribute: str, wording: int, answer: str) -> Fact:
    return Fact(
        id=f"{name}-{attribute}-{wording}",
        service=name,
        attribute=attribute,
        question=_lines("facts", attribute)[wording].format(name),
        answer=answer,
    )


# -- a skill -----------------------------------------------------------------------------------------------------------

TABLES_OF = {"train": (0, 6), "val": (6, 7), "test": (7, 10)}  # each split's range, in tenths of the table hashes
COMPARISONS = {
    ">": ("is above", "is more than", "is over"),
    "<": ("is below", "is less than", "is under"),
    "=": ("is", "equals", "is exactly"),
}
AGGREGATES = {"AVG": "average", "SUM": "total", "MAX": "largest", "MIN": "smallest"}


def queries(split: str, count: int, seed: int) -> Iterator[Dialogue]:
    """`count` single-request conversations. Raises KeyError for a split other than train, val and test."""
    for number in range(count):
        yield _query(f"sql/{split}/{seed}/{number}", *TABLES_OF[split])


def _query(id_: str, low: int, high: int) -> Dialogue:
    rng = Random(id_)
    while True:
        table = f"{rng.choice(words('nouns'))}s"
        numbers, texts = (rng.sample(_words(kind), rng.randint(1, 3)) for kind in ("number_columns", "text_columns"))
        columns = rng.sample([*numbers, *texts], len(numbers) + len(texts))
        if low <= stable_hash("table", table, *sorted(columns)) % 10 < high:
            break
    form = rng.choice(("rows", "rows", "rows", "count", "aggregate"))
    wish, statement = {"rows": _rows, "count": _count, "aggregate": _aggregate}[form](table, numbers, texts, rng)
    prompt = f"Table {table}: {', '.join(columns)}.\nWrite the SQL to {wish}."
    messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": f"{statement};"}]
    return Dialogue(id=id_, kind="sql", category=form, messages=messages)


def _rows(table: str, numbers: list[str], texts: list[str], rng: Random) -> tuple[str, str]:
    """Some columns of the rows, optionally with a condition, an order or a limit."""
    shown = rng.sample([*numbers, *texts], rng.randint(1, 2))
    wish = f"{rng.choice(('show', 'list', 'get', 'find'))} the {conjunction(shown)} of the {table}"
    statement = f"SELECT {', '.join(shown)} FROM {table}"
    if rng.random() < 0.6:
        condition, clause = _condition(numbers, texts, rng)
        wish, statement = f"{wish} {condition}", f"{statement} {clause}"
    if rng.random() < 0.5:
        column, falls = rng.choice(numbers), rng.random() < 0.5
        wish += f", {'largest' if falls else 'smallest'} {column} first"
        statement += f" ORDER BY {column}{' DESC' if falls else ''}"
        if rng.random() < 0.5:
            most = rng.randint(2, 20)
            wish, statement = f"{wish}, only {most} rows", f"{statement} LIMIT {most}"
    return wish, statement


def _count(table: str, numbers: list[str], texts: list[str], rng: Random) -> tuple[str, str]:
    """How many rows meet a condition."""
    condition, clause = _condition(numbers, texts, rng)
    return f"count the {table} {condition}", f"SELECT COUNT(*) FROM {table} {clause}"


def _aggregate(table: str, numbers: list[str], texts: list[str], rng: Random) -> tuple[str, str]:
    """An aggregate of a column, for each value of a text column or over all rows."""
    name, column = rng.choice(sorted(AGGREGATES)), rng.choice(numbers)
    wish, statement = f"find the {AGGREGATES[name]} {column} of the {table}", f"{name}({column}) FROM {table}"
    if rng.random() < 0.5:
        group = rng.choice(texts)
        return f"{wish} for each {group}", f"SELECT {group}, {statement} GROUP BY {group}"
    return wish, f"SELECT {statement}"


def _condition(numbers: list[str], texts: list[str], rng: Random) -> tuple[str, str]:
    """A condition in words, and its WHERE clause."""
    if rng.random() < 0.5:
        column, value = rng.choice(texts), rng.choice(words(rng.choice(("cities", "first_names", "adjectives"))))
        quoted = "'" + value.replace("'", "''") + "'"
        return f"whose {column} {rng.choice(COMPARISONS['='])} {value}", f"WHERE {column} = {quoted}"
    column, comparison, limit = rng.choice(numbers), rng.choice(sorted(COMPARISONS)), rng.randint(2, 500)
    return f"whose {column} {rng.choice(COMPARISONS[comparison])} {limit}", f"WHERE {column} {comparison} {limit}"
