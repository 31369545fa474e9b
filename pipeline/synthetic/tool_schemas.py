"""The structure of a tool, the world that tools act on, and tools invented for one training conversation.

A `ToolWorld` is the state of the tools; worlds are compared by their public attributes (`==`). A request that the world
cannot fulfill raises `ToolError`, with a message that says what would work. The result of a lookup (a phone number, a
temperature) comes from `hash_of`, a pure function of the request.

A `ToolSpec` has everything a conversation needs: a tool's JSON schema, its function, and its wordings. Wordings are
imperative and contain `{parameter}` placeholders (for nested objects, the names of the leaves); the last of the five
wordings belongs to the held-out template families. A parameter is optional if and only if its schema has a default.

Tools are invented so that a model learns to read schemas instead of memorizing tools. `invent` combines a verb, a noun
and one to four parameters; names, types, enums, defaults and wordings follow from them. `sibling` is a near-duplicate
(same verb or same noun). `renamed` gives any tool and its parameters random names; the parameters' old names remain
as descriptions. An invented tool executes by writing to `ToolWorld.ledger`.

Not guaranteed: that any result is true in the real world, or that invented tools make sense.
"""

import datetime
import difflib
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from random import Random
from string import Formatter

from jsonschema import Draft202012Validator

from pipeline.run.types import JsonObject
from pipeline.synthetic import wording
from pipeline.synthetic.wording import (
    AMOUNT,
    CITY,
    CODE,
    DATE,
    EMAIL,
    FIRST,
    LABEL,
    NUMBER,
    PATH,
    PERSON,
    PHONE,
    TEXT,
    TIME,
    TITLE,
    WORD,
    YES,
    Kind,
    Value,
    format_value,
    integer,
    lines,
    made_up,
    one_of,
    open_word,
    phrase,
    several,
    word_list,
    words,
)

Result = JsonObject


class ToolError(Exception):
    """The tool refused the request; the message says what it would accept."""


@dataclass
class ToolWorld:
    """All state that tools can change; initially empty."""

    contacts: dict[str, Result] = field(default_factory=dict)
    removed: list[str] = field(default_factory=list)
    tasks: list[Result] = field(default_factory=list)
    due: dict[str, str] = field(default_factory=dict)
    timers: list[Result] = field(default_factory=list)
    rooms: dict[str, Result] = field(default_factory=dict)
    scenes: dict[str, Result] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    orders: list[Result] = field(default_factory=list)
    bookings: list[Result] = field(default_factory=list)
    transfers: list[Result] = field(default_factory=list)
    sent: list[Result] = field(default_factory=list)
    ledger: list[Result] = field(default_factory=list)  # the calls of invented tools


def hash_of(*parts: object) -> int:
    """A number below 2**32 that depends only on `parts`."""
    return int.from_bytes(hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=4).digest(), "big")


def require_known(what: str, name: str, names: Sequence[str]) -> str:
    """Return the name if it exists. Raises ToolError naming the closest match."""
    if name in names:
        return name
    nearest = difflib.get_close_matches(name, names, 1, 0.0)
    raise ToolError(f'unknown {what} "{name}", did you mean "{nearest[0]}"?')


def require_person(name: str) -> str:
    """Return the name if its first and last names exist. Raises ToolError naming the closest match."""
    parts = name.split(" ", 1)
    if len(parts) == 2 and parts[0] in words("first_names") and parts[1] in words("last_names"):
        return name
    pools = (words("first_names"), words("last_names"))
    nearest = [difflib.get_close_matches(part, pool, 1, 0.0)[0] for part, pool in zip(parts, pools, strict=False)]
    raise ToolError(f'unknown person "{name}", did you mean "{" ".join(nearest)}"?')


def parse_date(text: str) -> datetime.date:
    """Parse a date written as YYYY-MM-DD. Raises ToolError for any other text."""
    try:
        return datetime.date.fromisoformat(text)
    except ValueError as error:
        raise ToolError(f'"{text}" is no date, write it like 2025-03-14') from error


def round_number(value: float) -> float | int:
    """Round to four decimal places; integral values become integers."""
    value = round(value, 4)
    return int(value) if value == int(value) else value


@dataclass(frozen=True)
class Param:
    """One parameter: its JSON schema and the kind of its values in requests."""

    schema: JsonObject
    kind: Kind | dict[str, Kind]  # a dict for a nested object: leaf name -> kind


def declared(line: str) -> tuple[str, Param]:
    """Parse a name and a parameter from a table line: `days: 3 to 60`, `book_id: CODE`, `beds: some LABEL`; kinds are
    named as in wording.py.
    """
    name, _, kind = line.partition(": ")
    if " to " in kind:
        low, high = map(int, kind.split(" to "))
        return name, whole(low, high)
    drawn: Kind = getattr(wording, kind.removeprefix("some "))
    return name, array("string", several(drawn, 2, 3)) if kind.startswith("some ") else string(drawn)


@dataclass(frozen=True, kw_only=True)
class ToolSpec:
    """One tool, its function and its wordings."""

    name: str
    domain: str
    description: str
    params: dict[str, Param]
    wordings: tuple[str, ...]
    run: Callable[..., Result] | None = None  # (World, <the parameters>) -> result; None: an invented tool
    missing: tuple[tuple[str, str], ...] = ()  # (required parameter, wording without it)
    answer: str = "Done."  # the assistant's closing words, with {placeholders} of arguments and result
    fragile: str | None = None  # the parameter in which a typo makes the call fail
    old_names: dict[str, str] = field(default_factory=dict)  # of a renamed tool: name -> the name that `answer` uses


@dataclass(frozen=True, kw_only=True)
class Chain:
    """Two tools; the second needs a value from the first tool's result."""

    first: str
    key: str  # of the value in the first result
    second: str
    param: str  # of the second tool
    tails: tuple[str, ...]  # wordings of the second request; the last is held out


def param(type_: str | list[str], kind: Kind, about: str = "", enum: tuple[str, ...] = ()) -> Param:
    """A required parameter of a simple type."""
    schema: JsonObject = {"type": type_}
    if enum:
        schema["enum"] = list(enum)
    if about:
        schema["description"] = about
    return Param(schema, kind)


def string(kind: Kind, about: str = "") -> Param:
    """A required string."""
    return param("string", kind, about)


def whole(low: int, high: int, about: str = "") -> Param:
    """A required integer; in requests it ranges from `low` to `high`."""
    return param("integer", integer(low, high), about)


def choice(*options: str) -> Param:
    """A required string from a few options."""
    return param("string", one_of(*options), enum=options)


def optional(required: Param, default: Value) -> Param:
    """The same parameter with a default."""
    return Param({**required.schema, "default": default}, required.kind)


def array(item_type: str, kind: Kind, about: str = "") -> Param:
    """A list of simple values; `kind` draws the entire list."""
    schema: JsonObject = {"type": "array", "items": {"type": item_type}}
    return Param({**schema, "description": about} if about else schema, kind)


def nested(leaves: dict[str, tuple[str, Kind]]) -> Param:
    """An object whose leaves are all required: name -> (type, kind)."""
    properties = {name: {"type": type_} for name, (type_, _) in leaves.items()}
    schema: JsonObject = {"type": "object", "properties": properties, "required": list(leaves)}
    return Param(schema, {name: kind for name, (_, kind) in leaves.items()})


def function(tool: ToolSpec) -> JsonObject:
    """The tool's schema in OpenAI format."""
    properties = {name: parameter.schema for name, parameter in tool.params.items()}
    required = [name for name, schema in properties.items() if "default" not in schema]
    parameters = {"type": "object", "properties": properties, "required": required}
    description = {"name": tool.name, "description": tool.description, "parameters": parameters}
    return {"type": "function", "function": description}


def problems(parameters: JsonObject, arguments: Value) -> list[str]:
    """Problems with the arguments: JSON schema messages, and parameters not defined in the schema."""
    messages = [error.message for error in Draft202012Validator(parameters).iter_errors(arguments)]
    if isinstance(arguments, dict):
        messages += [f"unknown parameter {key!r}" for key in arguments if key not in parameters.get("properties", {})]
    return messages


@cache
def placeholders(wording: str) -> tuple[str, ...]:
    """The placeholder names, in order."""
    return tuple(name for _, name, _, _ in Formatter().parse(wording) if name)


def draw(tool: ToolSpec, rng: Random) -> dict[str, Value]:
    """Draw a value for every parameter; no two strings or numbers in a request are equal."""
    while True:
        values: dict[str, Value] = {}
        for name, parameter in tool.params.items():
            kind = parameter.kind
            if isinstance(kind, dict):
                values[name] = {leaf: leaf_kind.draw(rng) for leaf, leaf_kind in kind.items()}
            else:
                values[name] = kind.draw(rng)
        leaves = [leaf for value in values.values() for leaf in leaf_values(value) if not isinstance(leaf, bool)]
        if len({str(leaf) for leaf in leaves}) == len(leaves):
            return values


def arguments_in(tool: ToolSpec, wording: str, values: dict[str, Value]) -> dict[str, Value]:
    """The arguments stated in a wording, in schema order; the other parameters take their defaults."""
    named = placeholders(wording)
    return {
        name: values[name]
        for name, parameter in tool.params.items()
        if name in named or (isinstance(parameter.kind, dict) and set(parameter.kind) & set(named))
    }


def fill(tool: ToolSpec, wording: str, values: dict[str, Value], rng: Random) -> str:
    """The wording with its placeholders filled in."""
    texts: dict[str, str] = {}
    for name, value in values.items():
        kind = tool.params[name].kind
        if isinstance(kind, dict):
            texts |= {leaf: format_value(kind[leaf], item, rng) for leaf, item in value.items()}
        else:
            texts[name] = format_value(kind, value, rng)
    return wording.format_map(texts)


def leaf_values(value: Value) -> list[Value]:
    """The scalars in a JSON value, in order."""
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in leaf_values(item)]
    if isinstance(value, list):
        return [leaf for item in value for leaf in leaf_values(item)]
    return [value]


def execute(tool: ToolSpec, world: ToolWorld, arguments: dict[str, Value]) -> Result:
    """Run the tool; an invented one only writes to the ledger. `arguments` must fit the schema. Raises ToolError."""
    arguments = {tool.old_names.get(name, name): value for name, value in arguments.items()}
    if tool.run is not None:
        return tool.run(world, **arguments)
    world.ledger.append({"tool": tool.domain, "arguments": arguments})
    noun = tool.domain.split(" ")[1]
    return {f"{noun}_id": f"{noun[0].upper()}{hash_of(tool.domain, sorted(arguments.items())) % 90000 + 1000}"}


def noted(world: ToolWorld, **arguments: Value) -> Result:
    """Record a request in the ledger; the result repeats its arguments."""
    world.ledger.append({"arguments": arguments})
    return arguments


# -- invented tools ----------------------------------------------------------------------------------------------------

PHRASE = Kind(phrase, 0.9)
SINGLE = Kind(open_word, 0.6)
HYPHENED = Kind(lambda rng: f"{open_word(rng)}-{open_word(rng)}", 0.4)
NUM_PARAMS = (1, 1, 1, 2, 2, 2, 3, 3)  # a pair may add one more: assigning values to parameters needs the most practice


@dataclass(frozen=True)
class Concept:
    """A possible meaning of a parameter: its key in `tools.yaml`, its type and its kind."""

    key: str
    type: str
    kind: Kind

    @property
    def names(self) -> tuple[str, ...]:
        return word_list("tools.yaml", "concepts", self.key, "names")

    @property
    def cues(self) -> tuple[str, ...]:
        """The words that introduce the value in a request."""
        return lines("tools.yaml", "concepts", self.key, "cues")


CONCEPTS = (
    Concept("city", "string", CITY),
    Concept("person", "string", PERSON),
    Concept("guest", "string", FIRST),
    Concept("title", "string", TITLE),
    Concept("text", "string", TEXT),
    Concept("text", "string", PHRASE),
    Concept("title", "string", PHRASE),
    Concept("word", "string", WORD),
    Concept("word", "string", SINGLE),
    Concept("label", "string", HYPHENED),
    Concept("label", "string", LABEL),
    Concept("duration", "integer", integer(2, 120)),
    Concept("count", "integer", integer(2, 99)),
    Concept("amount", "number", AMOUNT),
    Concept("measure", "number", NUMBER),
    Concept("date", "string", DATE),
    Concept("time", "string", TIME),
    Concept("code", "string", CODE),
    Concept("path", "string", PATH),
    Concept("email", "string", EMAIL),
    Concept("phone", "string", PHONE),
)
PAIRS = (
    (("from_{}", "to_{}"), "from {} to {}"),
    (("old_{}", "new_{}"), "from {} to {}"),
    (("start_{}", "end_{}"), "from {} to {}"),
    (("first_{}", "second_{}"), "with {} and {}"),
    (("source_{}", "target_{}"), "from {} to {}"),
)
PAIR_KINDS = {"city": CITY, "code": CODE, "path": PATH, "date": DATE, "label": LABEL, "word": WORD, "time": TIME}
LISTS = {"tags": WORD, "cities": CITY, "names": FIRST, "people": FIRST, "codes": CODE, "files": PATH, "labels": LABEL}

Part = tuple[dict[str, Param], str]  # parameters, and the phrase of a wording that states them


def _words(kind: str) -> tuple[str, ...]:
    return word_list("tools.yaml", kind)


def invent(rng: Random, verb: str | None = None, noun: str | None = None) -> ToolSpec:
    """A new tool with one to four parameters; `verb` and `noun` are drawn if not given."""
    verb, noun = verb or _verb(rng), noun or _noun(rng)
    parts: list[Part] = []
    taken: set[str] = set()
    num_params = rng.choice(NUM_PARAMS)
    while len(taken) < num_params:
        part = _draw_part(rng, noun)
        if taken & _names(part):
            continue
        parts.append(part)
        taken |= _names(part)
    params = {name: p for part, _ in parts for name, p in part.items()}
    if rng.random() < 0.5:  # so that the schema's order often differs from the request's
        params = dict(rng.sample(list(params.items()), len(params)))
    wish = f"{verb} the {noun}"
    required = [part for part in parts if not _is_optional(part)]
    wordings = [
        _wording(wish, parts, None),
        _wording(wish, required, None),
        _wording(wish, rng.sample(parts, len(parts)), None),
        _fronted_wording(wish, rng.sample(parts, len(parts)), rng),
    ]
    missing = [(next(iter(p)), _wording(wish, parts, phrase)) for p, phrase in required if len(p) == 1]
    return ToolSpec(
        name=_join(rng, verb, noun),
        domain=f"{verb} {noun}",
        description=_description(rng, verb, noun),
        params=params,
        wordings=(*wordings, wordings[0]),
        missing=tuple(missing),
        answer=rng.choice(("Done.", f"The {noun} is done.", f"The {noun} has id {{{noun}_id}}.")),
    )


def _verb(rng: Random) -> str:
    return rng.choice(_words("verbs")) if rng.random() < 0.4 else open_word(rng)


def _noun(rng: Random) -> str:
    form = rng.random()
    return open_word(rng) if form < 0.6 else rng.choice(words("nouns")) if form < 0.8 else made_up(rng)


def sibling(tool: ToolSpec, rng: Random) -> ToolSpec:
    """A near-duplicate of an invented tool, with a different verb or noun."""
    verb, noun = tool.domain.split(" ")
    other = verb
    while other in (verb, noun):
        other = (_verb if (swap_verb := rng.random() < 0.5) else _noun)(rng)
    return invent(rng, verb=other, noun=noun) if swap_verb else invent(rng, verb=verb, noun=other)


def lookup(rng: Random, noun: str) -> ToolSpec:
    """A tool that finds the id of a thing by its name: the first of two calls."""
    kind = rng.choice((PERSON, CITY, TITLE, WORD, DATE))
    verb = rng.choice(_words("finders"))
    key = rng.choice(("name", "query", "title", "owner"))
    wording = f"{verb} the {noun} of {{{key}}}"
    return ToolSpec(
        name=_join(rng, verb, noun),
        domain=f"{verb} {noun}",
        description=f"{verb.capitalize()} a {noun}.",
        params={key: string(kind)},
        wordings=(wording, wording, f"{verb} the {noun} with {key} {{{key}}}", wording, wording),
    )


def user_of(rng: Random, noun: str) -> ToolSpec:
    """A tool that needs the id found by `lookup`: the second of two calls."""
    tool = invent(rng, verb=rng.choice([verb for verb in _words("verbs") if verb not in _words("finders")]), noun=noun)
    verb = tool.domain.split(" ")[0]
    extra = {name: p for name, p in tool.params.items() if name != f"{noun}_id" and not isinstance(p.kind, dict)}
    name = next(iter(extra), None)
    params = {f"{noun}_id": string(CODE), **({name: extra[name]} if name else {})}
    tail = f"{verb} it" + (f" with {_spoken(name)} {{{name}}}" if name else "")
    return replace(tool, params=params, wordings=(tail,) * 5, missing=(), answer="Done.")


def renamed(tool: ToolSpec, rng: Random) -> ToolSpec:
    """The tool with random names for itself and its parameters; only the descriptions reveal their meaning."""
    new_names = {name: _gibberish(rng) if rng.random() < 0.7 else name for name in tool.params}
    if len(set(new_names.values())) < len(new_names):
        new_names = {name: f"{name}_{i}" for i, name in enumerate(tool.params)}

    def rename_placeholders(wording: str) -> str:
        for old, new in new_names.items():
            wording = wording.replace(f"{{{old}}}", f"{{\0{new}}}")
        return wording.replace("\0", "")

    params = {
        new: p if new == old else Param({**p.schema, "description": _spoken(old)}, p.kind)
        for (old, p), new in zip(tool.params.items(), new_names.values(), strict=True)
    }
    return replace(
        tool,
        name=_gibberish(rng),
        params=params,
        wordings=tuple(map(rename_placeholders, tool.wordings)),
        missing=tuple((new_names[name], rename_placeholders(wording)) for name, wording in tool.missing),
        fragile=new_names[tool.fragile] if tool.fragile else None,
        old_names={new: old for old, new in new_names.items()},
    )


def _draw_part(rng: Random, noun: str) -> Part:
    form = rng.random()
    if form < 0.14:
        (before, after), cue = rng.choice(PAIRS)
        word, kind = rng.choice(tuple(PAIR_KINDS.items()))
        names = (before.format(word), after.format(word))
        return {name: string(kind) for name in names}, cue.format(*(f"{{{name}}}" for name in names))
    if form < 0.22:
        name, kind = rng.choice(tuple(LISTS.items()))
        return {name: array("string", several(kind, 2, 3))}, rng.choice(
            (f"with {{{name}}}", f"with {name} {{{name}}}", f"for the {name} {{{name}}}")
        )
    if form < 0.34:
        name, options = (
            rng.choice(_words("choices")),
            tuple(rng.sample(rng.choice((words("adjectives"), words("common"))), rng.choice((2, 3)))),
        )
        parameter = choice(*options)
        cue = rng.choice((f"with {name} {{{name}}}", f"in {name} {{{name}}}", f"with {{{name}}} {name}"))
        return {name: optional(parameter, options[0]) if rng.random() < 0.5 else parameter}, cue
    if form < 0.38:
        name = rng.choice(_words("flags"))
        return {name: optional(param("boolean", YES), False)}, f"with {name} {{{name}}}"
    if form < 0.44:
        first, second = rng.sample(_words("sizes"), 2)
        leaves = {first: ("integer", integer(2, 300)), second: ("integer", integer(2, 300))}
        name = rng.choice(("size", "settings", "options", "address"))
        return {name: nested(leaves)}, f"with {first} {{{first}}} and {second} {{{second}}}"
    concept = rng.choice(CONCEPTS)
    name = rng.choice(concept.names)
    cues = (*concept.cues, "with <> {}")
    if rng.random() < 0.35:  # any word may be a parameter; the request says which one a value belongs to
        name, cues = open_word(rng), ("with <> {}", "with the <> {}", "<> {}")
        name = f"{name}_{rng.choice(concept.names)}" if rng.random() < 0.4 else name
    if name in ("id", "name") and rng.random() < 0.7:
        name = f"{noun}_{name}"
    about = f"{_spoken(name)} of the {noun}" if rng.random() < 0.15 else ""
    parameter = param(concept.type, concept.kind, about)
    if rng.random() < 0.15:
        default = rng.randint(1, 9) if concept.type != "string" else rng.choice((None, "", "any"))
        if default is None:
            parameter = param(["string", "null"], concept.kind, about)
        parameter = optional(parameter, default)
    cue = rng.choice(cues).replace("<>", _spoken(name)).replace("{}", f"{{{name}}}")
    return {name: parameter}, cue


def _names(part: Part) -> set[str]:
    """The names of parameters and leaves: both are placeholders in a wording."""
    leaves = [set(p.kind) for p in part[0].values() if isinstance(p.kind, dict)]
    return set(part[0]).union(*leaves)


def _is_optional(part: Part) -> bool:
    return all("default" in p.schema for p in part[0].values())


def _wording(wish: str, parts: list[Part], without: str | None) -> str:
    phrases = [phrase for _, phrase in parts if phrase != without]
    return " ".join((wish, *phrases)).replace(" : ", ": ")


def _fronted_wording(wish: str, parts: list[Part], rng: Random) -> str:
    """A wording that, in half of the draws, puts one part before the request."""
    if len(parts) < 2 or rng.random() < 0.5 or parts[0][1].startswith((":", "{")):
        return _wording(wish, parts, None)
    return f"{parts[0][1]} {_wording(wish, parts[1:], None)}"


def _join(rng: Random, verb: str, noun: str) -> str:
    style = rng.random()
    if style < 0.7:
        return f"{verb}_{noun}"
    if style < 0.8:
        return f"{noun}_{verb}"
    return verb + noun.capitalize() if style < 0.9 else f"{verb}_{rng.choice(('a', 'the', 'my', 'one'))}_{noun}"


def _description(rng: Random, verb: str, noun: str) -> str:
    article = "an" if noun[0] in "aeiou" else "a"
    form = rng.choice(("{} {} {}.", "{} {} {}.", "{} the given {n}.", "{} one {n} of the user."))
    return form.format(verb.capitalize(), article, noun, n=noun)


def _spoken(name: str | None) -> str:
    return (name or "").replace("_", " ")


def _gibberish(rng: Random) -> str:
    form = rng.random()
    word = made_up(rng)
    if form < 0.25:
        return word
    return f"{word}_{rng.choice(words('nouns'))}" if form < 0.5 else f"{open_word(rng)}_{open_word(rng)}"
