"""Tools invented for one training conversation, so that a model learns to read schemas instead of memorizing tools.

`invent` combines a verb, a noun and one to four parameters; names, types, enums, defaults and wordings follow from
them. `sibling` is a near-duplicate (same verb or same noun). `renamed` gives any tool and its parameters random names;
the old names remain as descriptions. An invented tool executes by writing to `World.ledger`. Not promised: sense.
"""

import dataclasses
from dataclasses import dataclass
from random import Random

from pipeline.synthetic.drills import made_up, phrase
from pipeline.synthetic.story_world import COMMON
from pipeline.synthetic.tool_values import (
    ADJECTIVES,
    AMOUNT,
    CITY,
    CODE,
    DATE,
    EMAIL,
    FIRST,
    LABEL,
    NOUNS,
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
    Param,
    Tool,
    array,
    integer,
    nested,
    one_of,
    optional,
    param,
    several,
    word_list,
)

VERBS = word_list(
    """add archive approve arrange assign attach balance block build calculate cancel check clean close collect
    compress copy crop cut deliver describe download draft draw edit encrypt estimate export fetch filter fix format
    freeze get import inspect install join label list load lock log mark measure merge mount notify open pack paint
    park plan plot prepare print publish query rank record refresh register release repair report request reset
    resize restart restore scan search sell share show sign sort split stop store submit sync test translate update
    upload verify watch water weigh wrap"""
)
PHRASE = Kind(phrase, 0.9)
SINGLE = Kind(lambda rng: rng.choice(COMMON), 0.6)
HYPHENED = Kind(lambda rng: f"{rng.choice(COMMON)}-{rng.choice(COMMON)}", 0.4)
NUM_PARAMS = (1, 1, 1, 2, 2, 2, 3, 3)  # a pair adds one more: binding values to parameters needs the most practice
FINDERS = ("find", "get", "search", "fetch")


@dataclass(frozen=True)
class Concept:
    """A meaning of a parameter: its names, its type and kind, and the cues that introduce it in a request."""

    names: tuple[str, ...]
    type: str
    kind: Kind
    cues: tuple[str, ...]  # {} is the value, <> the parameter's name; "with <> {}" is always added


CONCEPTS = (
    Concept(("city", "place", "town"), "string", CITY, ("in {}", "in {}", "for {}", "in the <> {}")),
    Concept(("name", "owner", "person", "user", "customer"), "string", PERSON, ("for {}", "of {}", "for the <> {}")),
    Concept(("guest", "friend", "member", "author"), "string", FIRST, ("for {}", "with {}", "for the <> {}")),
    Concept(("title", "subject", "topic", "name"), "string", TITLE, ("called {}", "about {}", "<> {}")),
    Concept(("text", "content", "message", "note", "body"), "string", TEXT, ("saying {}", "with the <> {}", ": {}")),
    Concept(("text", "content", "message", "note", "body"), "string", PHRASE, ("saying {}", "with the <> {}", ": {}")),
    Concept(("title", "subject", "topic", "name"), "string", PHRASE, ("called {}", "about {}", "<> {}")),
    Concept(("word", "keyword", "query"), "string", WORD, ("for {}", "by {}", "with the <> {}")),
    Concept(("word", "keyword", "query"), "string", SINGLE, ("for {}", "by {}", "with the <> {}")),
    Concept(("label", "tag", "channel", "group", "account"), "string", HYPHENED, ("in {}", "under {}", "in the <> {}")),
    Concept(("label", "tag", "channel", "group", "account"), "string", LABEL, ("in {}", "under {}", "in the <> {}")),
    Concept(
        ("minutes", "days", "seats", "pages", "hours", "weeks", "pieces"),
        "integer",
        integer(2, 120),
        ("for {} <>", "with {} <>", "for {} <>"),
    ),
    Concept(
        ("count", "quantity", "number", "level", "size", "limit"),
        "integer",
        integer(2, 99),
        ("<> {}", "with the <> {}"),
    ),
    Concept(("amount", "price", "weight", "value"), "number", AMOUNT, ("of {}", "for {}", "with the <> {}")),
    Concept(("length", "width", "rate", "speed"), "number", NUMBER, ("at <> {}", "<> {}")),
    Concept(("date", "day", "deadline"), "string", DATE, ("on {}", "by {}", "on the <> {}")),
    Concept(("time", "start_time"), "string", TIME, ("at {}", "for {}", "at the <> {}")),
    Concept(("id", "code", "reference", "key", "account_id", "ticket"), "string", CODE, ("{}", "{}", "<> {}")),
    Concept(("path", "file", "folder_path"), "string", PATH, ("in {}", "from {}", "at the <> {}")),
    Concept(("email", "recipient", "to"), "string", EMAIL, ("for {}", "to {}", "to the <> {}")),
    Concept(("phone", "fax", "contact"), "string", PHONE, ("to {}", "for {}", "to the <> {}")),
)
PAIRS = (
    (("from_{}", "to_{}"), "from {} to {}"),
    (("old_{}", "new_{}"), "from {} to {}"),
    (("start_{}", "end_{}"), "from {} to {}"),
    (("first_{}", "second_{}"), "with {} and {}"),
    (("source_{}", "target_{}"), "from {} to {}"),
)
PAIR_KINDS = (
    ("city", CITY),
    ("code", CODE),
    ("path", PATH),
    ("date", DATE),
    ("label", LABEL),
    ("word", WORD),
    ("time", TIME),
)
LISTS = (
    ("tags", WORD),
    ("cities", CITY),
    ("names", FIRST),
    ("people", FIRST),
    ("codes", CODE),
    ("files", PATH),
    ("labels", LABEL),
)
CHOICES = ("mode", "color", "priority", "format", "style", "unit", "kind", "shape", "quality")
FLAGS = ("urgent", "public", "active", "silent", "gift", "strict", "fast")
SIZES = ("width", "height", "depth", "number", "row", "column", "light", "volume")

Part = tuple[dict[str, Param], str]  # parameters and the phrase of a wording that states them


def invent(rng: Random, verb: str | None = None, noun: str | None = None) -> Tool:
    """A new tool with one to four parameters; without `verb` or `noun` they are drawn."""
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
    return Tool(
        name=_join(rng, verb, noun),
        domain=f"{verb} {noun}",
        description=_description(rng, verb, noun),
        params=params,
        wordings=(*wordings, wordings[0]),
        missing=tuple(missing),
        answer=rng.choice(("Done.", f"The {noun} is done.", f"The {noun} has id {{{noun}_id}}.")),
    )


def _verb(rng: Random) -> str:
    return rng.choice(VERBS if rng.random() < 0.6 else COMMON)


def _noun(rng: Random) -> str:
    form = rng.random()
    return rng.choice(COMMON) if form < 0.5 else rng.choice(NOUNS) if form < 0.75 else made_up(rng)


def sibling(tool: Tool, rng: Random) -> Tool:
    """A near-duplicate of an invented tool, with another verb or another noun."""
    verb, noun = tool.domain.split(" ")
    other = verb
    while other in (verb, noun):
        other = (_verb if (swap_verb := rng.random() < 0.5) else _noun)(rng)
    return invent(rng, verb=other, noun=noun) if swap_verb else invent(rng, verb=verb, noun=other)


def lookup(rng: Random, noun: str) -> Tool:
    """A tool that finds the id of a thing by its name: the first of two calls."""
    kind = rng.choice((PERSON, CITY, TITLE, WORD, DATE))
    verb = rng.choice(FINDERS)
    key = rng.choice(("name", "query", "title", "owner"))
    wording = f"{verb} the {noun} of {{{key}}}"
    return Tool(
        name=_join(rng, verb, noun),
        domain=f"{verb} {noun}",
        description=f"{verb.capitalize()} a {noun}.",
        params={key: param("string", kind)},
        wordings=(wording, wording, f"{verb} the {noun} with {key} {{{key}}}", wording, wording),
    )


def user_of(rng: Random, noun: str) -> Tool:
    """A tool that needs the id which `lookup` finds: the second of two calls."""
    tool = invent(rng, verb=rng.choice([verb for verb in VERBS if verb not in FINDERS]), noun=noun)
    verb = tool.domain.split(" ")[0]
    extra = {name: p for name, p in tool.params.items() if name != f"{noun}_id" and not isinstance(p.kind, dict)}
    name = next(iter(extra), None)
    params = {f"{noun}_id": param("string", CODE), **({name: extra[name]} if name else {})}
    tail = f"{verb} it" + (f" with {_spoken(name)} {{{name}}}" if name else "")
    return dataclasses.replace(tool, params=params, wordings=(tail,) * 5, missing=(), answer="Done.")


def renamed(tool: Tool, rng: Random) -> Tool:
    """The tool with random names for itself and its parameters; only the descriptions tell their meaning."""
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
    return dataclasses.replace(
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
        word, kind = rng.choice(PAIR_KINDS)
        names = (before.format(word), after.format(word))
        return {name: param("string", kind) for name in names}, cue.format(*(f"{{{name}}}" for name in names))
    if form < 0.22:
        name, kind = rng.choice(LISTS)
        return {name: array("string", several(kind, 2, 3))}, rng.choice(
            (f"with {{{name}}}", f"with {name} {{{name}}}", f"for the {name} {{{name}}}")
        )
    if form < 0.34:
        name, options = rng.choice(CHOICES), tuple(rng.sample(rng.choice((ADJECTIVES, COMMON)), rng.choice((2, 3))))
        choice = param("string", one_of(*options), enum=options)
        cue = rng.choice((f"with {name} {{{name}}}", f"in {name} {{{name}}}", f"with {{{name}}} {name}"))
        return {name: optional(choice, options[0]) if rng.random() < 0.5 else choice}, cue
    if form < 0.38:
        name = rng.choice(FLAGS)
        return {name: optional(param("boolean", YES), False)}, f"with {name} {{{name}}}"
    if form < 0.44:
        first, second = rng.sample(SIZES, 2)
        leaves = {first: ("integer", integer(2, 300)), second: ("integer", integer(2, 300))}
        name = rng.choice(("size", "settings", "options", "address"))
        return {name: nested(leaves)}, f"with {first} {{{first}}} and {second} {{{second}}}"
    concept = rng.choice(CONCEPTS)
    name = rng.choice(concept.names)
    cues = (*concept.cues, "with <> {}")
    if rng.random() < 0.35:  # any word may be a parameter; the request names the one that a value belongs to
        name, cues = rng.choice(COMMON), ("with <> {}", "with the <> {}", "<> {}")
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
    """The names of parameters and of leaves: both are placeholders in a wording."""
    leaves = [set(p.kind) for p in part[0].values() if isinstance(p.kind, dict)]
    return set(part[0]).union(*leaves)


def _is_optional(part: Part) -> bool:
    return all("default" in p.schema for p in part[0].values())


def _wording(wish: str, parts: list[Part], without: str | None) -> str:
    phrases = [phrase for _, phrase in parts if phrase != without]
    return " ".join((wish, *phrases)).replace(" : ", ": ")


def _fronted_wording(wish: str, parts: list[Part], rng: Random) -> str:
    """A wording that, in half of the draws, puts one part before the wish."""
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
    return f"{word}_{rng.choice(NOUNS)}" if form < 0.5 else f"{rng.choice(COMMON)}_{rng.choice(COMMON)}"
