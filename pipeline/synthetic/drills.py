"""Drills: short texts in which everything occurs twice, so that a small model learns early to copy from its context.

In: a byte target and a seed. Out: `Text` records of source "drills"; `drill` is a pure function of (seed, number). Four
forms also come as conversations (`dialogue`), because fine-tuning would otherwise unlearn copying what it never saw in
a conversation. Forms:

    again    a row of items, then the same row
    recall   pairs of a key and a value, then the keys in another order, each with its value
    record   lines `field: value`, then the same record as a JSON object
    request  a sentence that contains the values, then the JSON object of them
    schema   function schemas in the form in which tools are offered, a request for one of them, and the call
    choose   functions with only name and description, then requests, each followed by the name that it means

The items are names, places, words, numbers, dates, codes, paths and made-up words of syllables, so that the second
mention follows from the first and from nothing else. Copying in context (the induction heads of Olsson et al. 2022,
arXiv:2209.11895) appears in one sudden drop of the loss. With only prose and stories that drop comes late or, within
the few steps of a small run, not at all (docs/LOG.md has the measurements).

Not promised: sense. No tool name of the toolbox occurs here, and no sentence of the stories.
"""

import json
from collections.abc import Callable, Iterator
from random import Random

from pipeline.ingest.records import Dialogue, Text
from pipeline.synthetic import tool_values
from pipeline.synthetic.story_world import COMMON
from pipeline.synthetic.tool_values import Kind, Value, word_list

SOURCE = "drills"
ONSETS = word_list("b br c cl d dr f fl g gr h j k l m n p pl qu r s st t tr v w z")
VOWELS = word_list("a e i o u ai ea oo")
ENDS = ("", "", "", "l", "n", "r", "s", "t", "m")
FIELDS = word_list(
    """area author batch block branch case chapter city colour cost day depth end event field file floor from gate
    goal group guest height host hour item job key label lane length level limit line list lot mark message minute
    month name number office order owner page part path person phone place plan plate point port price range rank rate
    reason region room route row score seat section shelf side size slot source speed stage start state step stop
    street style subject table tag target team term text time title to token tone topic total town track type unit
    user value volume weight width word year zone"""
)
VERBS = word_list(
    "add ask bring call close count draw file give hold join keep lend look make move open pick put read send"
)
LEADS = ("The record is", "Write down", "Please note", "Take", "Store", "Here we have", "Add", "Send")
REPEAT = ("Repeat", "Say again", "Copy this", "Write once more")
AS_JSON = ("Write this as JSON", "Give me this as JSON", "Make a JSON object of this")
AGAIN = ("Again:", "Once more:", "The same:", "Repeat:", "And again:")
ROWS = ("Row:", "List:", "Items:", "Say:", "Read:", "Line:")


def made_up(rng: Random) -> str:
    """A made-up word of two or three syllables."""
    syllables = (rng.choice(ONSETS) + rng.choice(VOWELS) + rng.choice(ENDS) for _ in range(rng.choice((2, 2, 3))))
    return "".join(syllables)


def _letters(rng: Random) -> str:
    return "".join(rng.choice("abcdefghijklmnopqrstuvwxyz0123456789") for _ in range(rng.randint(2, 6)))


def _compound(rng: Random) -> str:
    return rng.choice("_-. ").join(rng.choice((made_up, _noun))(rng) for _ in range(2))


def _noun(rng: Random) -> str:
    return rng.choice(COMMON if rng.random() < 0.7 else tool_values.NOUNS)


def phrase(rng: Random) -> str:
    """One to four common words."""
    return " ".join(rng.choice(COMMON) for _ in range(rng.randint(1, 4)))


MADE_UP = Kind(made_up)
KINDS: tuple[Kind, ...] = (
    *(MADE_UP, MADE_UP, Kind(_letters), Kind(_compound), Kind(_compound), Kind(_noun), Kind(phrase), Kind(phrase)),
    *(
        tool_values.PERSON,
        tool_values.FIRST,
        tool_values.CITY,
        tool_values.TEXT,
        tool_values.WORD,
        tool_values.LABEL,
        tool_values.CODE,
        tool_values.PATH,
    ),
    *(
        tool_values.PHONE,
        tool_values.EMAIL,
        tool_values.DATE,
        tool_values.TIME,
        tool_values.NUMBER,
        tool_values.AMOUNT,
        tool_values.integer(2, 9999),
    ),
)


def drill(seed: int, number: int) -> str:
    """The text of drill `number`."""
    rng = Random(f"drills/{seed}/{number}")
    return rng.choice(FORMS)(rng)


def path(seed: int, number: int) -> str:
    """The path of drill `number` in its record."""
    return f"{SOURCE}/{seed}/{number}"


def record(seed: int, number: int) -> Text:
    """The record of drill `number`."""
    return Text(text=drill(seed, number), source=SOURCE, path=path(seed, number), licence="CC0-1.0")


def records(target_bytes: int, seed: int) -> Iterator[Text]:
    """Drills from number 0 on, until their UTF-8 texts fill `target_bytes`."""
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
        lead = rng.choice(REPEAT)
    else:
        fields = _draw_fields(rng)
        content, answer = "\n".join(f"{name}: {value}" for name, value in fields.items()), _json(fields)
        if form == "request":
            phrases = [f"{name} {value}" for name, value in fields.items()]
            content = f"{rng.choice(LEADS)} {tool_values.conjunction(phrases)}."
        lead = rng.choice(AS_JSON)
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
    return f"{rng.choice(ROWS)} {row}\n{rng.choice(AGAIN)} {row}\n"


def _recall(rng: Random) -> str:
    size, key, value = rng.randint(4, 12), rng.choice(KINDS), rng.choice(KINDS)
    pairs = {str(key.draw(rng)): value.draw(rng) for _ in range(size)}
    link = rng.choice((": ", " = ", " -> ", " is "))
    lines = [f"{left}{link}{right}" for left, right in pairs.items()]
    shuffled = rng.sample(lines, len(lines))
    return "\n".join((*lines, rng.choice(AGAIN), *shuffled, ""))


def _draw_fields(rng: Random) -> dict[str, Value]:
    return {_draw_field_name(rng): rng.choice(KINDS).draw(rng) for _ in range(rng.randint(1, 5))}


def _draw_field_name(rng: Random) -> str:
    form = rng.random()
    if form < 0.3:
        return rng.choice(FIELDS)
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
        lines += [f"{rng.choice(LEADS)} {tool_values.conjunction(phrases)}.", _json(fields)]
    return "\n".join((*lines, ""))


def _draw_function(rng: Random) -> tuple[dict[str, Value], str, dict[str, Value]]:
    """A function's schema, a request for it, and the arguments of the request."""
    verb, thing, arguments = rng.choice(VERBS), rng.choice((made_up, _noun))(rng), _draw_fields(rng)
    properties = {name: {"type": TYPES[type(value)]} for name, value in arguments.items()}
    schema = {
        "name": f"{verb}_{thing}" if rng.random() < 0.7 else f"{made_up(rng)}_{thing}",
        "description": f"{verb.capitalize()} the {thing}.",
        "parameters": {"type": "object", "properties": properties, "required": list(arguments)},
    }
    phrases = [f"{name} {value}" for name, value in arguments.items()]
    return schema, f"{verb} the {thing} with {tool_values.conjunction(phrases)}", arguments


def _schema(rng: Random) -> str:
    functions = {f[0]["name"]: f for f in (_draw_function(rng) for _ in range(rng.randint(1, 3)))}
    lines = [_json(schema) for schema, _, _ in functions.values()]
    for name in rng.sample(sorted(functions), rng.randint(1, len(functions))):
        _, request, arguments = functions[name]
        lines += [f"{request[0].upper()}{request[1:]}.", _json({"name": name, "arguments": arguments})]
    return "\n".join((*lines, ""))


def _draw_choices(rng: Random, max_requests: int) -> tuple[list[str], list[tuple[str, str]]]:
    """Functions with name and description, and up to `max_requests` requests, each with the name that it means."""
    things: dict[str, tuple[str, str]] = {}
    for _ in range(rng.randint(2, 6)):
        verb, thing = rng.choice(VERBS if rng.random() < 0.3 else COMMON), rng.choice((made_up, _noun))(rng)
        name = f"{verb}_{thing}" if rng.random() < 0.7 else f"{made_up(rng)}_{_noun(rng)}"
        things[name] = verb, thing
    functions = [_json({"name": n, "description": f"{v.capitalize()} the {t}."}) for n, (v, t) in things.items()]
    choices = []
    for name in rng.choices(sorted(things), k=rng.randint(3, max_requests)):
        request = rng.choice(REQUESTS).format(" the ".join(things[name]))
        choices.append((f"{request[0].upper()}{request[1:]}", _json({"name": name})))
    return functions, choices


def _choose(rng: Random) -> str:
    functions, choices = _draw_choices(rng, 10)
    return "\n".join((*functions, *(line for choice in choices for line in choice), ""))


REQUESTS = ("{}.", "please {}.", "can you {}?", "I need you to {}.", "{}, please.", "{} now.", "you should {}.")
TYPES = {str: "string", int: "integer", float: "number"}
FORMS: tuple[Callable[[Random], str], ...] = (_again, _recall, _record, _request, _schema, _choose)
