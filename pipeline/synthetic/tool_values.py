"""Tools of the synthetic conversations: the values that requests contain, the world that tools act on, a tool's shape.

A `Kind` draws a value that a person would name in a request (people, places, numbers, dates, identifiers, short texts)
from a `random.Random`, and formats it as a request would. The pools are large, and many values are composed by rule, so
that a model has to copy them and cannot memorize them. A share of the strings is quoted.

A `World` is the state of the tools; worlds are compared by their public attributes (`==`). A request that the world
cannot serve raises `ToolError`, whose message names what would work. The result of a lookup (a telephone number, a
temperature) comes from `hash_of`, a pure function of the request.

A `Tool` has everything that a conversation needs: its JSON schema, the function behind it, and its wordings. Wordings
are imperative and contain `{parameter}` placeholders (for nested objects the names of the leaves); the last of the five
wordings belongs to the held-out template families. A parameter is optional exactly if its schema has a default.

Not promised: that the values are real (telephone numbers, accounts and paths are invented), or that any result is true
of the real world.
"""

import datetime
import difflib
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from random import Random
from string import Formatter
from typing import Any

from jsonschema import Draft202012Validator

from pipeline.run.types import JsonObject

Value = Any  # a JSON value


def word_list(text: str, separator: str | None = None) -> tuple[str, ...]:
    """The words of a text, or its trimmed pieces between separators."""
    return tuple(word.strip() for word in text.split(separator))


FIRST_NAMES = word_list(
    """Anna Ben Clara David Emma Felix Grace Henry Ida Jack Karin Leo Maria Noah Olga Paul Rosa Samuel Tina Victor
    Wanda Yusuf Zoë Søren Łukasz José Chloé Björn Aisha Bruno Carmen Diego Elena Fatima George Hanna Igor Julia Kenji
    Laura Marco Nadia Oscar Priya Quinn Rafael Sofia Tomas Uma Vera William Xenia Yara Adam Bella Cyrus Dora Ethan
    Fiona Gustav Helen Ivan Jasmine Kofi Lina Mateo Nora Omar Petra Ruth Simon Tara Umberto Viola Walter Ximena Agnes
    Boris Cecilia Dmitri Edith Farid Greta Hugo Irene Jonas Kamal Lucia Martin Nina Otto Paula Ravi Stella Theo Ursula
    Vincent Yvonne Alma Bernard Celia Daniel Esther Frank Gloria Hiro Ingrid Joel Kira Louis Mona Nils Ophelia Peter
    Rania Sven Thea Wilma Amir Beatrice Carl Delia Erik Flora Gabriel Hilda"""
)
LAST_NAMES = word_list(
    """Adams Becker Costa Dubois Evans Fischer García Hansen Ivanov Jensen Kowalski Lopez Müller Novak O'Brien Patel
    Quist Rossi Silva Tanaka Ueda Vargas Weber Xu Young Zhang Andersson Bauer Castro Duarte Eriksen Ferrari Greene
    Huber Ito Jansen Khan Larsen Moreau Nguyen Okafor Petrov Reyes Schmidt Torres Urban Vogel Walker Yilmaz Zimmer
    Abbott Bianchi Carter Diaz Farmer Gallo Hughes Kaplan Lindqvist Mendes Norton Olsen Parker Ramos Santos Turner
    Vidal Watson Bright Collins Dixon Fowler Grant Hill Kemp Lane Mason Nash Pope Reed Stone Webb"""
)
CITIES = word_list(
    """Paris,Rome,Berlin,Madrid,Lisbon,Vienna,Prague,Warsaw,Dublin,Oslo,Helsinki,Athens,Budapest,Zürich,
    München,São Paulo,Tokyo,Osaka,Seoul,Delhi,Mumbai,Cairo,Nairobi,Lagos,Accra,Tunis,Lima,Bogotá,Quito,Havana,Toronto,
    Montreal,Boston,Chicago,Denver,Dallas,Austin,Seattle,Portland,Phoenix,Miami,Atlanta,Detroit,Houston,New York,
    San Diego,Sydney,Perth,Auckland,Manila,Jakarta,Hanoi,Bangkok,Singapore,Dubai,Riyadh,Beirut,Amman,Ankara,Istanbul,
    Sofia,Bucharest,Belgrade,Zagreb,Tallinn,Riga,Vilnius,Minsk,Tbilisi,Baku,Porto,Seville,Valencia,Bilbao,Lyon,Nantes,
    Bordeaux,Marseille,Milan,Naples,Turin,Venice,Florence,Geneva,Basel,Hamburg,Bremen,Dresden,Leipzig,Cologne,Ghent,
    Antwerp,Rotterdam,Utrecht,Malmö,Bergen,Aarhus,Turku,Reykjavik,Glasgow,Leeds,Bristol,Cardiff,Belfast,Cork,Galway,
    Krakow,Gdansk,Brno,Graz,Linz,Split,Patras,Izmir,Haifa,Kyoto,Nagoya,Busan,Taipei,Hobart,Darwin,Calgary,
    Halifax,Tampa,Omaha,Tucson,Fresno,Memphis,Nashville,Cusco,Rosario,Medellín,Recife,Durban,Rabat,Dakar""",
    ",",
)
ROOMS = word_list("kitchen bedroom bathroom hall office garage attic cellar library nursery studio pantry")
ADJECTIVES = word_list(
    """red blue green small large old new quick silent bright dark warm cold soft heavy light round sharp sweet plain
    early late final second urgent weekly monthly northern golden wooden broken clean dry empty fresh gentle hidden
    narrow open paper quiet rapid simple sturdy tall thin wild yellow zesty lucky modern"""
)
NOUNS = word_list(
    """lamp river garden window letter bridge engine forest mirror pencil basket button camera desert feather guitar
    hammer island jacket kettle ladder market needle orange pepper rocket saddle ticket violin wagon anchor blanket
    candle dragon eagle fountain glacier harbour insect jungle kitten lantern meadow notebook oyster palace quilt
    robot sailor tunnel umbrella valley walnut yacht zebra apple barrel castle dinner error folder invoice journal
    keyboard lesson magnet network owner parcel quarter report server table update version widget budget contract
    deadline exam fence gallery holiday image"""
)
VERBS = word_list(
    """call paint visit clean order fix read water pack send print check book wash plan write buy test review cook
    mend sort move draw open close count weigh ship label"""
)
PRODUCTS = tuple(f"{a} {n}" for a in ("red", "blue", "small", "wooden", "paper", "modern") for n in NOUNS[:24])
FOLDERS = word_list("src docs data notes tests build logs assets drafts backup")
SUFFIXES = word_list("txt md py csv json log html yaml")


@dataclass(frozen=True)
class Kind:
    """How values of one meaning are drawn and formatted."""

    draw: Callable[[Random], Value]
    quotes: float = 0.0  # share of the requests that put the value in quotes
    show: Callable[[Value], str] | None = None  # formats values other than text, numbers and lists of these


def format_value(kind: Kind, value: Value, rng: Random) -> str:
    """The value as words of a request; every leaf of the value is a substring of the result."""
    if kind.show is not None:
        return kind.show(value)
    if isinstance(value, list):
        quote = rng.random() < kind.quotes
        return conjunction([_quoted(item) if quote and isinstance(item, str) else str(item) for item in value])
    if isinstance(value, str) and rng.random() < kind.quotes:
        return _quoted(value)
    return "true" if value is True else "false" if value is False else str(value)


def conjunction(words: list[str]) -> str:
    """["a", "b", "c"] -> "a, b and c"."""
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]


def _quoted(text: str) -> str:
    return f"'{text}'" if '"' in text else f'"{text}"'


def misspelt(name: str, rng: Random) -> str:
    """The name with one typo in a word of three letters or more; never the name itself."""
    positions = [i for i in range(1, len(name) - 1) if name[i].isalpha() and name[i + 1].isalpha()]
    for _ in range(20):
        i = rng.choice(positions)
        typo = rng.choice(("double", "drop", "swap"))
        if typo == "double":
            result = name[:i] + name[i] + name[i:]
        elif typo == "drop":
            result = name[:i] + name[i + 1 :]
        else:
            result = name[:i] + name[i + 1] + name[i] + name[i + 2 :]
        if result != name:
            return result
    return name + name[-1]


def _name(rng: Random) -> str:
    return f"{rng.choice(FIRST_NAMES)} {rng.choice(LAST_NAMES)}"


def _text(rng: Random) -> str:
    form = rng.random()
    if form < 0.35:
        return f"{rng.choice(VERBS)} the {rng.choice(NOUNS)}"
    if form < 0.70:
        return f"{rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}"
    if form < 0.85:
        return f"{rng.choice(NOUNS)} and {rng.choice(NOUNS)}"
    if form < 0.97:
        return f"{rng.choice(VERBS)} {rng.choice(FIRST_NAMES)}"
    return f'the "{rng.choice(NOUNS)}" {rng.choice(NOUNS)}'


def _code(rng: Random) -> str:
    letters = "".join(rng.choice("ABCDEFGHKLMNPRSTVWXZ") for _ in range(rng.choice((1, 2, 2, 3))))
    return f"{letters}{rng.choice(('-', '-', ''))}{rng.randint(10, 9999)}"


def _path(rng: Random) -> str:
    return f"{rng.choice(FOLDERS)}/{rng.choice(NOUNS)}.{rng.choice(SUFFIXES)}"


def _phone(rng: Random) -> str:
    return f"{rng.randint(200, 999)}-{rng.randint(1000, 9999)}"


def _date(rng: Random) -> str:
    return f"{rng.randint(2019, 2031)}-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}"


def _time(rng: Random) -> str:
    return f"{rng.randint(6, 22):02d}:{rng.choice((0, 5, 10, 15, 20, 30, 40, 45, 50)):02d}"


def _decimal(rng: Random) -> float | int:
    return rng.randint(2, 400) if rng.random() < 0.5 else round(rng.uniform(1, 90), rng.choice((1, 2))) + 0.0


def _word(rng: Random) -> str:
    return rng.choice(NOUNS)


def integer(low: int, high: int) -> Kind:
    """Whole numbers in [low, high]."""
    return Kind(lambda rng: rng.randint(low, high))


def one_of(*options: str) -> Kind:
    """One of a few words (the values of an enum)."""
    return Kind(lambda rng: rng.choice(options))


def several(kind: Kind, low: int = 2, high: int = 4) -> Kind:
    """A list of different values of a kind."""

    def draw(rng: Random) -> list[Value]:
        size, values = rng.randint(low, high), []
        while len(values) < size:
            value = kind.draw(rng)
            if value not in values:
                values.append(value)
        return values

    return Kind(draw, kind.quotes)


PERSON = Kind(_name, 0.3)
FIRST = Kind(lambda rng: rng.choice(FIRST_NAMES), 0.3)
CITY = Kind(lambda rng: rng.choice(CITIES), 0.3)
ROOM = Kind(lambda rng: rng.choice(ROOMS), 0.2)
TEXT = Kind(_text, 1.0)
TITLE = Kind(_text, 1.0)
WORD = Kind(_word, 0.6)
LABEL = Kind(lambda rng: f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}", 0.4)
CODE = Kind(_code, 0.3)
PATH = Kind(_path, 0.3)
PHONE = Kind(_phone, 0.2)
EMAIL = Kind(lambda rng: f"{rng.choice(FIRST_NAMES[:22]).lower()}.{rng.choice(NOUNS)}@{rng.choice(NOUNS)}.org", 0.2)
DATE = Kind(_date)
TIME = Kind(_time)
NUMBER = Kind(_decimal)
AMOUNT = Kind(lambda rng: rng.randint(5, 2500) if rng.random() < 0.6 else round(rng.uniform(1, 500), 2))
PRODUCT = Kind(lambda rng: rng.choice(PRODUCTS), 0.8)
YES = Kind(lambda rng: True)


# -- world -------------------------------------------------------------------------------------------------------------


Result = JsonObject


class ToolError(Exception):
    """The tool refused the request; the message names what it would accept."""


@dataclass
class World:
    """All state that tools can change; a new one is empty."""

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
    """A number below 2**32 that depends only on the parts."""
    return int.from_bytes(hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=4).digest(), "big")


def require_known(what: str, name: str, names: Sequence[str]) -> str:
    """Return the name if it exists. Raises ToolError with the nearest name."""
    if name in names:
        return name
    nearest = difflib.get_close_matches(name, names, 1, 0.0)
    raise ToolError(f'unknown {what} "{name}", did you mean "{nearest[0]}"?')


def require_person(name: str) -> str:
    """Return the name if first and last name exist. Raises ToolError with the nearest name."""
    parts = name.split(" ", 1)
    if len(parts) == 2 and parts[0] in FIRST_NAMES and parts[1] in LAST_NAMES:
        return name
    pools = (FIRST_NAMES, LAST_NAMES)
    nearest = [difflib.get_close_matches(part, pool, 1, 0.0)[0] for part, pool in zip(parts, pools, strict=False)]
    raise ToolError(f'unknown person "{name}", did you mean "{" ".join(nearest)}"?')


def parse_date(text: str) -> datetime.date:
    """Parse a date written as YYYY-MM-DD. Raises ToolError."""
    try:
        return datetime.date.fromisoformat(text)
    except ValueError as error:
        raise ToolError(f'"{text}" is no date, write it like 2025-03-14') from error


def round_number(value: float) -> float | int:
    """Round to four decimals, without `.0`."""
    value = round(value, 4)
    return int(value) if value == int(value) else value


# -- shape of a tool ---------------------------------------------------------------------------------------------------


Schema = JsonObject


@dataclass(frozen=True)
class Param:
    """One parameter: its JSON schema and the kind of its values in requests."""

    schema: Schema
    kind: Kind | dict[str, Kind]  # a dict for a nested object: leaf name -> kind


@dataclass(frozen=True, kw_only=True)
class Tool:
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


def param(type_: str | list[str], kind: Kind, about: str = "", enum: tuple[str, ...] = ()) -> Param:
    """A required parameter of a simple type."""
    schema: Schema = {"type": type_}
    if enum:
        schema["enum"] = list(enum)
    if about:
        schema["description"] = about
    return Param(schema, kind)


def optional(required: Param, default: Value) -> Param:
    """The same parameter with a default."""
    return Param({**required.schema, "default": default}, required.kind)


def array(item_type: str, kind: Kind, about: str = "") -> Param:
    """A list of simple values; `kind` draws the whole list."""
    schema: Schema = {"type": "array", "items": {"type": item_type}}
    return Param({**schema, "description": about} if about else schema, kind)


def nested(leaves: dict[str, tuple[str, Kind]]) -> Param:
    """An object whose leaves are all required: name -> (type, kind)."""
    properties = {name: {"type": type_} for name, (type_, _) in leaves.items()}
    schema: Schema = {"type": "object", "properties": properties, "required": list(leaves)}
    return Param(schema, {name: kind for name, (_, kind) in leaves.items()})


def function(tool: Tool) -> JsonObject:
    """The tool's schema in the OpenAI form."""
    properties = {name: parameter.schema for name, parameter in tool.params.items()}
    required = [name for name, schema in properties.items() if "default" not in schema]
    parameters = {"type": "object", "properties": properties, "required": required}
    description = {"name": tool.name, "description": tool.description, "parameters": parameters}
    return {"type": "function", "function": description}


def problems(parameters: Schema, arguments: Value) -> list[str]:
    """What is wrong with the arguments: JSON schema's messages, and parameters that the schema does not define."""
    messages = [error.message for error in Draft202012Validator(parameters).iter_errors(arguments)]
    if isinstance(arguments, dict):
        messages += [f"unknown parameter {key!r}" for key in arguments if key not in parameters.get("properties", {})]
    return messages


@cache
def placeholders(wording: str) -> tuple[str, ...]:
    """The names in braces, in order."""
    return tuple(name for _, name, _, _ in Formatter().parse(wording) if name)


def draw(tool: Tool, rng: Random) -> dict[str, Value]:
    """Draw a value for every parameter; no two texts or numbers of one request are equal."""
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


def told(tool: Tool, wording: str, values: dict[str, Value]) -> dict[str, Value]:
    """The arguments that a wording states, in the schema's order; the others take their defaults."""
    named = placeholders(wording)
    return {
        name: values[name]
        for name, parameter in tool.params.items()
        if name in named or (isinstance(parameter.kind, dict) and set(parameter.kind) & set(named))
    }


def words(tool: Tool, wording: str, values: dict[str, Value], rng: Random) -> str:
    """The wording with its placeholders filled."""
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


def execute(tool: Tool, world: World, arguments: dict[str, Value]) -> Result:
    """Run the tool; an invented one only writes to the ledger. `arguments` must fit the schema. Raises ToolError."""
    arguments = {tool.old_names.get(name, name): value for name, value in arguments.items()}
    if tool.run is not None:
        return tool.run(world, **arguments)
    world.ledger.append({"tool": tool.domain, "arguments": arguments})
    noun = tool.domain.split(" ")[1]
    return {f"{noun}_id": f"{noun[0].upper()}{hash_of(tool.domain, sorted(arguments.items())) % 90000 + 1000}"}
