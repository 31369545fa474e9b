"""The tables of words and sentences stored next to the code, and the values used in requests.

`table` reads a YAML file in this folder once, on first use; `lines` and `word_list` parse its leaves: one wording per
line, and words separated by whitespace or, if the text contains a comma, by commas.

A `Kind` draws a value that a person would use in a request (people, places, numbers, dates, identifiers, short texts)
from a `random.Random`, and formats it as in a request. The pools (`words.yaml`) are large, and many values are composed
by rule, so that a model has to copy values and cannot memorize them. A fraction of the strings are quoted.

Values to copy must be drawn from far more words than a toolbox has: a token that is never an answer in training is
never an answer afterward (docs/LOG.md). The pool "common" has English words that are in no list of the toolbox, and
the pool "pieces" has the other letter tokens of the demo's vocabulary. `open_word` builds words from both; these may
also occur in held-out tools, but are never a held-out tool's name or wording.

The sentences in `tools.yaml` are frames around a wording, requests that no tool can serve, and the assistant's plain
sentences. The last fifth of each list (`HELD_OUT_SHARE`) is held out: training and validation draw from the rest, and
test items with an unseen template only from the held-out fifth.

Not guaranteed: that the values are real (phone numbers, accounts and paths are invented), that word frequencies are
natural, or that common words fit their context or never occur in descriptions and values of held-out tools.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from ruamel.yaml import YAML

HELD_OUT_SHARE = 0.2  # fraction of every list of sentences and wordings that is held out

Value = Any  # a JSON value


@cache
def table(file: str) -> dict[str, Any]:
    """The table in a YAML file in this folder. Raises YAMLError, including for duplicate keys."""
    return YAML(typ="safe").load(Path(__file__).with_name(file).read_text(encoding="utf-8"))


def _text(file: str, keys: tuple[str, ...]) -> str:
    value = table(file)
    for key in keys:
        value = value[key]
    assert isinstance(value, str), f"{file}: {'.'.join(keys)} must be a string"
    return value


@cache
def lines(file: str, *keys: str) -> tuple[str, ...]:
    """The lines of a text in a table. Raises KeyError if a key is unknown."""
    return tuple(_text(file, keys).splitlines())


@cache
def word_list(file: str, *keys: str) -> tuple[str, ...]:
    """The words of a text in a table. Raises KeyError if a key is unknown."""
    text = _text(file, keys)
    return tuple(word.strip() for word in text.split("," if "," in text else None))


def words(pool: str) -> tuple[str, ...]:
    """The words of a pool in `words.yaml`. Raises KeyError if the pool is unknown."""
    return word_list("words.yaml", pool)


@cache
def products() -> tuple[str, ...]:
    """The products of the shop, such as "red lamp"."""
    return tuple(f"{a} {n}" for a in ("red", "blue", "small", "wooden", "paper", "modern") for n in words("nouns")[:24])


# -- values ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """How to draw and format values with one meaning, such as dates."""

    draw: Callable[[Random], Value]
    quotes: float = 0.0  # fraction of requests that quote the value
    show: Callable[[Value], str] | None = None  # formats values other than strings, numbers and lists of them


def format_value(kind: Kind, value: Value, rng: Random) -> str:
    """The value as worded in a request; every leaf of the value is a substring of the result."""
    if kind.show is not None:
        return kind.show(value)
    if isinstance(value, list):
        quote = rng.random() < kind.quotes
        return conjunction([_quoted(item) if quote and isinstance(item, str) else str(item) for item in value])
    if isinstance(value, str) and rng.random() < kind.quotes:
        return _quoted(value)
    return "true" if value is True else "false" if value is False else str(value)


def conjunction(parts: list[str]) -> str:
    """["a", "b", "c"] -> "a, b and c"."""
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]


def _quoted(text: str) -> str:
    return f"'{text}'" if '"' in text else f'"{text}"'


def misspelt(name: str, rng: Random) -> str:
    """The name with one typo in a word of at least three letters; never the name itself."""
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
    return f"{rng.choice(words('first_names'))} {rng.choice(words('last_names'))}"


def _short_text(rng: Random) -> str:
    form = rng.random()
    if form < 0.35:
        return f"{rng.choice(words('verbs'))} the {rng.choice(words('nouns'))}"
    if form < 0.70:
        return f"{rng.choice(words('adjectives'))} {rng.choice(words('nouns'))}"
    if form < 0.85:
        return f"{rng.choice(words('nouns'))} and {rng.choice(words('nouns'))}"
    if form < 0.97:
        return f"{rng.choice(words('verbs'))} {rng.choice(words('first_names'))}"
    return f'the "{rng.choice(words("nouns"))}" {rng.choice(words("nouns"))}'


def _code(rng: Random) -> str:
    letters = "".join(rng.choice("ABCDEFGHKLMNPRSTVWXZ") for _ in range(rng.choice((1, 2, 2, 3))))
    return f"{letters}{rng.choice(('-', '-', ''))}{rng.randint(10, 9999)}"


def _path(rng: Random) -> str:
    return f"{rng.choice(words('folders'))}/{rng.choice(words('nouns'))}.{rng.choice(words('suffixes'))}"


def _phone(rng: Random) -> str:
    return f"{rng.randint(200, 999)}-{rng.randint(1000, 9999)}"


def _date(rng: Random) -> str:
    return f"{rng.randint(2019, 2031)}-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}"


def _time(rng: Random) -> str:
    return f"{rng.randint(6, 22):02d}:{rng.choice((0, 5, 10, 15, 20, 30, 40, 45, 50)):02d}"


def _decimal(rng: Random) -> float | int:
    return rng.randint(2, 400) if rng.random() < 0.5 else round(rng.uniform(1, 90), rng.choice((1, 2))) + 0.0


def _word(rng: Random) -> str:
    return rng.choice(words("nouns"))


def made_up(rng: Random) -> str:
    """A made-up word of two or three syllables."""
    syllables = (
        rng.choice(words("onsets"))
        + rng.choice(words("vowels"))
        + rng.choice(("", "", "", "l", "n", "r", "s", "t", "m"))
        for _ in range(rng.choice((2, 2, 3)))
    )
    return "".join(syllables)


def open_word(rng: Random) -> str:
    """A common word, or one or two word pieces; any letter token may occur in it."""
    if rng.random() < 0.4:
        return rng.choice(words("common"))
    return "".join(rng.choice(words("pieces")) for _ in range(rng.choice((1, 1, 2))))


def phrase(rng: Random) -> str:
    """One to four words."""
    return " ".join(open_word(rng) for _ in range(rng.randint(1, 4)))


def integer(low: int, high: int) -> Kind:
    """Integers in [low, high]."""
    return Kind(lambda rng: rng.randint(low, high))


def one_of(*options: str) -> Kind:
    """One of a few words (the values of an enum)."""
    return Kind(lambda rng: rng.choice(options))


def several(kind: Kind, low: int = 2, high: int = 4) -> Kind:
    """A list of distinct values of a kind."""

    def draw(rng: Random) -> list[Value]:
        size, values = rng.randint(low, high), []
        while len(values) < size:
            value = kind.draw(rng)
            if value not in values:
                values.append(value)
        return values

    return Kind(draw, kind.quotes)


PERSON = Kind(_name, 0.3)
FIRST = Kind(lambda rng: rng.choice(words("first_names")), 0.3)
CITY = Kind(lambda rng: rng.choice(words("cities")), 0.3)
ROOM = Kind(lambda rng: rng.choice(words("rooms")), 0.2)
TEXT = Kind(_short_text, 1.0)
TITLE = Kind(_short_text, 1.0)
WORD = Kind(_word, 0.6)
LABEL = Kind(lambda rng: f"{rng.choice(words('adjectives'))}-{rng.choice(words('nouns'))}", 0.4)
CODE = Kind(_code, 0.3)
PATH = Kind(_path, 0.3)
PHONE = Kind(_phone, 0.2)
EMAIL = Kind(
    lambda rng: (
        f"{rng.choice(words('first_names')[:22]).lower()}.{rng.choice(words('nouns'))}@{rng.choice(words('nouns'))}.org"
    ),
    0.2,
)
DATE = Kind(_date)
TIME = Kind(_time)
NUMBER = Kind(_decimal)
AMOUNT = Kind(lambda rng: rng.randint(5, 2500) if rng.random() < 0.6 else round(rng.uniform(1, 500), 2))
PRODUCT = Kind(lambda rng: rng.choice(products()), 0.8)
FOLDER = Kind(lambda rng: rng.choice(words("folders")), 0.4)
SENTENCE = Kind(lambda rng: " ".join(WORD.draw(rng) for _ in range(rng.randint(2, 4))), 1.0)
STREET = Kind(lambda rng: f"{rng.choice(words('last_names'))} Street", 0.3)
YES = Kind(lambda rng: True)


# -- sentences ---------------------------------------------------------------------------------------------------------


def sentences(kind: str) -> tuple[str, ...]:
    """The sentences of a kind (`frames`, `refusals` and so on)."""
    return lines("tools.yaml", kind)


def pick_family(families: Sequence[str], unseen: bool, rng: Random) -> str:
    """A random family from the training split or, if `unseen`, from the held-out split."""
    border = len(families) - max(1, round(HELD_OUT_SHARE * len(families)))
    return rng.choice(families[border:] if unseen else families[:border])


def frame_request(wording: str, unseen: bool, rng: Random) -> str:
    """A filled wording inside a frame, with the first letter capitalized."""
    text = pick_family(sentences("frames"), unseen, rng).replace("{}", wording)
    return text[0].upper() + text[1:]


def fill_template(template: str, rng: Random) -> str:
    """A sentence with its placeholders filled in."""
    noun, other = rng.sample(words("nouns"), 2)
    names = {
        "first": rng.choice(words("first_names")),
        "city": rng.choice(words("cities")),
        "adjective": rng.choice(words("adjectives")),
    }
    return template.format_map({**names, "noun": noun, "other": other})


def join_wishes(parts: list[str], rng: Random) -> str:
    """Several wordings in one sentence."""
    link = rng.choice((" and ", ", then ", " and also "))
    return link.join((", ".join(parts[:-1]), parts[-1])) if len(parts) > 1 else parts[0]
