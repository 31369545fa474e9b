"""Stories with a plot, generated from a small simulated world without a neural network; their coherence can be checked.

`story(path)` returns the story for a path `stories/<family>/<number>`, as a pure function of the path: it uses no
clock, set order or seed. `records` cycles through several families, counting up the numbers, until there are enough
bytes. Three of the fourteen families are held out, as is every fiftieth number of the others. Both are validation data,
reported separately: the former test new plots, the latter known plots in new words.

`check(text)` answers eight yes-no questions about whether a text is a coherent story, using only the text, so it also
works on model samples. It expects the generator's grammar: each name has one pronoun; a pronoun agrees with the last
name before it; the first name is introduced as "Tom was a brave fox", others by "named", "called" or "friend"; each
plot has its own goal and ending. `follows_plot(text)` is stricter: the sentences must be events in a possible order.

`edits` damages a passing story, for preference pairs, in six ways, all of which the checker must notice. Damage that
leaves a good story (such as swapping two events that may occur in either order) is not used: a damaged version that
fails no more questions than the story is redrawn.

Not guaranteed: literary quality. The sentences are short and regular, so that a model with two million parameters can
learn who wanted what (measured on 197 kB, see `tests/test_stories.py`). Nor is it guaranteed that a damaged story fails
only one question, or that `check` understands a text: styles other than the generator's fail, one unknown name or one
wrong "she" makes the answer False, and nonsense between correct sentences passes (1 time in 400 with `follows_plot`).
"""

import random
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from pipeline.ingest.records import Text
from pipeline.run.errors import DataError
from pipeline.synthetic.story_world import (
    PLURAL_PRONOUNS,
    PRONOUNS,
    Event,
    lexicon,
    moments,
    plots,
    shared_events,
    tell,
    vocabulary,
)

if TYPE_CHECKING:
    import torch

FAMILIES = (
    *("lost", "rescue", "trade", "return", "deliver", "build", "repair", "grow", "learn"),
    *("gift", "share", "contest", "brave", "mystery"),
)
HELD_OUT = ("grow", "deliver", "mystery")
VALIDATION_EVERY = 50  # numbers divisible by this are validation data in every family
DIALOGUE = 0.4  # fraction of stories with direct speech
LICENSE = "CC0-1.0"


def story(path: str) -> str:
    """The story for a path `stories/<family>/<number>`. Raises DataError for any other path."""
    family, _ = _parse_path(path)
    attempt = 0
    speaks = random.Random(path).random() < DIALOGUE  # Random hashes a str with SHA-512: the same on every machine
    while (text := tell(family, random.Random(f"{path}#{attempt}"), speaks=speaks)) is None:
        attempt += 1
    return text


def records(families: Collection[str], target_bytes: int, *, held_out: bool | None = None) -> Iterator[Text]:
    """Stories from the given families in turn, until their UTF-8 texts fill `target_bytes`.

    Numbers count up from 0, and each is used for all families; `held_out` selects only validation paths (True), only
    training paths (False) or both (None). A record's source is its family.
    """
    order = [family for family in FAMILIES if family in families]
    if len(order) != len(set(families)) or not order:
        raise DataError(f"expected one or more of the families {', '.join(FAMILIES)}; found {sorted(families)}")
    if held_out is False and all(family in HELD_OUT for family in order):
        raise DataError(f"the families {', '.join(order)} are held out: they have no training stories")
    filled, number = 0, 0
    while filled < target_bytes:
        for family in order:
            path = f"stories/{family}/{number}"
            if filled >= target_bytes or (held_out is not None and is_held_out(path) is not held_out):
                continue
            text = story(path)
            filled += len(text.encode())
            yield Text(text=text, source=family, path=path, license=LICENSE)
        number += 1


def fresh_records(count: int, seed: int) -> list[Text]:
    """Validation stories from the families in the training data, with numbers beyond those of any corpus."""
    families, first = [family for family in FAMILIES if family not in HELD_OUT], (1 + seed) * 10_000_000
    paths = [f"stories/{families[n % len(families)]}/{first + 50 * (n // len(families))}" for n in range(count)]
    return [Text(text=story(path), source=path.split("/")[1], path=path, license=LICENSE) for path in paths]


def is_held_out(path: str) -> bool:
    """Whether a path is validation data: its family is held out, or its number is divisible by 50."""
    family, number = _parse_path(path)
    return family in HELD_OUT or number % VALIDATION_EVERY == 0


def opening(text: str) -> str:
    """The first sentence of a story, as a prompt."""
    return sentences(text)[0]


def _parse_path(path: str) -> tuple[str, int]:
    parts = path.split("/")
    if len(parts) != 3 or parts[0] != "stories" or parts[1] not in FAMILIES or not parts[2].isdecimal():
        raise DataError(
            f"expected a path stories/<family>/<number> with one of the families {', '.join(FAMILIES)}; found {path!r}"
        )
    return parts[1], int(parts[2])


# -- check -------------------------------------------------------------------------------------------------------------

QUESTIONS = (
    "protagonist_introduced",
    "pronouns_resolve",
    "names_known",
    "wanted_object_in_resolution",
    "no_sentence_twice",
    "quotes_balanced",
    "length",
    "family_ending",
)
MIN_WORDS, MAX_WORDS = 60, 400
RESOLUTION = 2  # number of sentences: the ending and the coda
GOAL_WITHIN = 4  # the goal is within this many sentences of the start

# A sentence ends at . ! ? (plus any closing quote) before a space and a capital letter or an opening quote.
_BORDER = re.compile(r'(?<=[.!?])\s+(?=["A-Z])|(?<=[.!?]")\s+(?=["A-Z])')
_WORD = re.compile(r"[A-Za-z]+(?:-[A-Za-z]+)*")
_SLOT = re.compile(r"\{([^}]*)\}")
_INTRODUCES = re.compile(r"\b(?:named|called|friend) ([A-Z][a-z]+)")
_STARTS = re.compile(
    r'(?:^|[.!?]"?\s+|(?:^|\s)")"?$'
)  # the text before a word that is capitalized because of its position


def check(text: str) -> dict[str, bool]:
    """One boolean per question in QUESTIONS; a story is coherent if all are True."""
    parts = sentences(text)
    words = [(match[0], match.start()) for match in _WORD.finditer(text)]
    return {
        "protagonist_introduced": bool(parts) and _introduces_protagonist(parts[0]),
        "pronouns_resolve": _pronouns_resolve(text, words),
        "names_known": _names_known(text, words),
        "wanted_object_in_resolution": _wanted_in_resolution(parts),
        "no_sentence_twice": bool(parts) and len({part.lower() for part in parts}) == len(parts),
        "quotes_balanced": _quotes_balanced(text),
        "length": MIN_WORDS <= len(text.split()) <= MAX_WORDS,
        "family_ending": _ends_like_its_family(parts),
    }


def sentences(text: str) -> list[str]:
    """The sentences of a text, without the space between them."""
    return [part for part in _BORDER.split(text.strip()) if part]


def family_of(text: str) -> str | None:
    """The family whose goal the first sentences state; None if none or several match."""
    for part in sentences(text)[1:GOAL_WITHIN]:
        families = [family for family, (goal_sign, _) in _signs().items() if goal_sign.search(part)]
        if families:
            return families[0] if len(families) == 1 else None
    return None


def follows_plot(text: str) -> bool:
    """Whether a text is a sequence of its family's events: each sentence matches a known form, no event precedes its
    requirements, and the right character has the thing at the end.

    The forms are the generator's wordings; any one to ten words may fill a slot. So nonsense between correct sentences
    fails, and so does a story in another style.
    """
    family, first = family_of(text), _first().search(text)
    if family is None or first is None:
        return False
    friends = [name for name in _INTRODUCES.findall(text) if name != first[1]]
    things = [word for word in _WORD.findall(text) if word in lexicon().wanted]
    roles = dict.fromkeys(things[:1], "xthing") | dict.fromkeys(friends[:1], "Fname") | {first[1]: "Pname"}
    told = _WORD.sub(lambda match: roles.get(match[0], match[0]), text)  # the placeholders used in the forms
    return _is_told(tuple(sentences(told)), _forms(family), frozenset())


@dataclass(frozen=True)
class _Form:
    """A wording of an event as a pattern that matches complete sentences."""

    event: Event | None  # None: a moment, which changes nothing
    num_sentences: int
    literal: str  # the longest fixed text, in lower case
    pattern: re.Pattern[str]


@cache
def _forms(family: str) -> tuple[_Form, ...]:
    plot = plots()[family]
    events = [*shared_events().values(), plot.goal, plot.attempt, plot.deed, plot.ending]
    wordings = [(event, wording) for event in events for wording in (*event.plain, *event.spoken)]
    return tuple(_form(event, wording, plot.holder) for event, wording in [*wordings, *((None, m) for m in moments())])


def _form(event: Event | None, wording: str, holder: str) -> _Form:
    fixed, slots = _SLOT.split(wording)[::2], _SLOT.split(wording)[1::2]
    pattern = re.escape(fixed[0]) + "".join(
        _slot_pattern(slot, holder) + re.escape(text) for slot, text in zip(slots, fixed[1:], strict=True)
    )
    num_sentences = len(sentences(_SLOT.sub("X", wording)))
    return _Form(event, num_sentences, max(fixed, key=len).lower(), re.compile(pattern, re.IGNORECASE))


def _slot_pattern(slot: str, holder: str) -> str:
    """A pattern for what may fill a slot: the expected person or thing, otherwise one to ten words."""
    article = "an? " if slot.startswith("a ") else ""
    slot = slot.removeprefix("a ")
    if slot[0] in "PFH" and "." not in slot:
        name = f"{holder if slot[0] == 'H' else slot[0]}name"
        return {"name": name, "him": f"(?:{name}|him|her)", "his": f"(?:{name}'s|his|her)"}.get(
            slot[2:], f"(?:{name}|he|she)"
        )
    if slot in ("obj", "noun", "full"):
        return article + ("the " if slot == "obj" else "") + "(?:[a-z-]+ )?xthing"
    return article + r"(?:[\w'-]+,? ){0,9}[\w'-]+"


def _is_told(parts: tuple[str, ...], forms: tuple[_Form, ...], facts: frozenset[str]) -> bool:
    """Whether the sentences are a possible sequence of events after `facts`, up to the coda."""
    if not parts:
        return "done" in facts
    ways: set[tuple[int, frozenset[str]]] = set()  # a set: several matching forms may lead to the same state
    for form in forms:
        event = form.event
        if event is None and ("tried" not in facts and "wanting" not in facts):
            continue
        if event is not None and (not event.needs <= facts or event.bars & facts or f"told {event.name}" in facts):
            continue
        text = " ".join(parts[: form.num_sentences])
        if form.literal not in text.lower() or not form.pattern.fullmatch(text):
            continue
        ways.add((form.num_sentences, facts if event is None else facts | event.gives | {f"told {event.name}"}))
    return any(_is_told(parts[count:], forms, after) for count, after in ways)


@cache
def _signs() -> dict[str, tuple[re.Pattern[str], re.Pattern[str]]]:
    """The goal and ending patterns of each family."""
    return {
        family: (re.compile(plot.goal_sign, re.IGNORECASE), re.compile(plot.ending_sign, re.IGNORECASE))
        for family, plot in plots().items()
    }


@cache
def _first() -> re.Pattern[str]:
    """The introduction of the protagonist, at the beginning of a story."""
    return re.compile(rf"^([A-Z][a-z]+) was an? (?:[a-z]+ )?(?:{'|'.join(lexicon().kinds)})\b")


def _introduces_protagonist(first: str) -> bool:
    match = _first().search(first)
    return match is not None and match[1] in lexicon().pronoun_of


def _pronouns_resolve(text: str, words: list[tuple[str, int]]) -> bool:
    """Whether "he" and "she" agree with the last name, "they" follows two names, and "it" follows the wanted thing in
    the same sentence.
    """
    last: str | None = None
    names: set[str] = set()
    thing_start = None  # position of the last mention of the wanted thing
    for word, start in words:
        if word in lexicon().pronoun_of:
            last = word
            names.add(word)
        elif (pronoun := PRONOUNS.get(word.lower())) is not None:
            if last is None or lexicon().pronoun_of[last] != pronoun:
                return False
        elif word.lower() in PLURAL_PRONOUNS:
            if len(names) < 2:
                return False
        elif word.lower() in lexicon().wanted:
            thing_start = start
        elif word.lower() == "it" and (thing_start is None or re.search(r"[.!?]", text[thing_start:start])):
            return False
    return True


def _names_known(text: str, words: list[tuple[str, int]]) -> bool:
    """Each name is introduced at its first occurrence; every other capitalized word is known and starts a sentence."""
    introduced = {match.start(1): match[1] for match in _INTRODUCES.finditer(text)}
    first = _first().search(text)
    if first is not None:
        introduced[0] = first[1]
    known: set[str] = set()
    for word, start in words:
        if start in introduced and word in lexicon().pronoun_of:
            known.add(word)
        elif word[0].isupper() and word not in known and word not in ("I", *lexicon().lists["weekday"]):
            begins = _STARTS.search(text[max(0, start - 6) : start]) is not None or start == 0
            if word in lexicon().pronoun_of or not begins or word.lower() not in vocabulary():
                return False
    return bool(known)


def _wanted_in_resolution(parts: list[str]) -> bool:
    """Exactly one wanted thing occurs in the story, both near the start and in the resolution."""
    things_by_sentence = [{word for word in _WORD.findall(part.lower()) if word in lexicon().wanted} for part in parts]
    things = set().union(*things_by_sentence)
    early = set().union(*things_by_sentence[:GOAL_WITHIN])
    late = set().union(*things_by_sentence[-RESOLUTION:])
    return len(things) == 1 and things == early and len(parts) > RESOLUTION and things == late


def _quotes_balanced(text: str) -> bool:
    """Straight quotes come in pairs; one opens after a space, the other closes before a space."""
    marks = [match.start() for match in re.finditer('"', text)]
    opens = all(i == 0 or text[i - 1].isspace() for i in marks[::2])
    closes = all(i > 0 and text[i - 1] in ".,!?" and (i + 1 == len(text) or text[i + 1].isspace()) for i in marks[1::2])
    return len(marks) % 2 == 0 and opens and closes


def _ends_like_its_family(parts: list[str]) -> bool:
    """The ending or the coda matches the goal's family, and the text ends with a complete sentence."""
    family = family_of(" ".join(parts))
    if family is None or len(parts) <= GOAL_WITHIN or not re.search(r'[.!?]"?$', parts[-1]):
        return False
    return _signs()[family][1].search(" ".join(parts[-RESOLUTION:])) is not None


# -- damage ------------------------------------------------------------------------------------------------------------

TRIES = 40
_HE_TO_SHE = {"he": "she", "him": "her", "his": "her", "himself": "herself"}
_SHE_TO_HE = {"she": "he", "her": "his", "hers": "his", "herself": "himself"}


def edits(text: str, path: str, generator: "torch.Generator") -> dict[str, str]:
    """Damaged versions of a story, by kind of damage.

    The same text, path and generator state give the same result. A kind is absent only if it cannot damage the text.
    """
    import torch  # imported lazily: a process that only writes stories does not need it

    seed = int(torch.randint(2**62, (), generator=generator).item())
    num_passed = sum(check(text).values())
    damaged: dict[str, str] = {}
    for kind, damage in (
        ("pronoun changed", _change_pronoun),
        ("name changed", _change_name),
        ("object changed", _change_object),
        ("events swapped", _swap_events),
        ("ending cut", _cut_ending),
        ("sentence repeated", _repeat_sentence),
    ):
        for candidate in damage(text, random.Random(f"{seed}/{path}/{kind}")):
            if sum(check(candidate).values()) < num_passed:
                damaged[kind] = candidate
                break
    return damaged


def _replace(text: str, match: re.Match[str], word: str) -> str:
    word = word.capitalize() if match[0][0].isupper() else word
    return text[: match.start()] + word + text[match.end() :]


def _shuffled(matches: list[re.Match[str]], rng: random.Random) -> list[re.Match[str]]:
    return rng.sample(matches, len(matches))


def _change_pronoun(text: str, rng: random.Random) -> Iterator[str]:
    matches = [match for match in re.finditer(r"[A-Za-z]+", text) if match[0].lower() in PRONOUNS]
    for match in _shuffled(matches, rng):
        yield _replace(text, match, (_HE_TO_SHE | _SHE_TO_HE)[match[0].lower()])


def _change_name(text: str, rng: random.Random) -> Iterator[str]:
    matches = [match for match in re.finditer(r"[A-Z][a-z]+", text) if match[0] in lexicon().pronoun_of]
    for match in _shuffled(matches[1:], rng):
        names = lexicon().names[lexicon().pronoun_of[match[0]]]
        yield _replace(text, match, rng.choice([name for name in names if name not in text]))


def _change_object(text: str, rng: random.Random) -> Iterator[str]:
    matches = [match for match in re.finditer(r"[a-z]+(?:-[a-z]+)*", text) if match[0] in lexicon().wanted]
    for match in _shuffled(matches, rng):
        alternatives = next(words for words in lexicon().things.values() if match[0] in words)
        yield _replace(text, match, rng.choice([word for word in alternatives if word != match[0]]))


def _swap_events(text: str, rng: random.Random) -> Iterator[str]:
    parts = sentences(text)
    for _ in range(TRIES):
        first, second = sorted(rng.sample(range(len(parts)), 2))
        swapped = list(parts)
        swapped[first], swapped[second] = parts[second], parts[first]
        yield " ".join(swapped)


def _cut_ending(text: str, rng: random.Random) -> Iterator[str]:
    parts = sentences(text)
    for extra in rng.sample(range(3), 3):
        yield " ".join(parts[: len(parts) - RESOLUTION - extra])


def _repeat_sentence(text: str, rng: random.Random) -> Iterator[str]:
    parts = sentences(text)
    source = rng.randrange(len(parts))
    target = rng.randrange(source + 1, len(parts) + 1)
    yield " ".join([*parts[:target], parts[source], *parts[target:]])
