"""The small world behind a story: who is there, what they feel and hold, and how a wording is read in that state.

A wording is a line with slots in braces. Realising it walks from left to right and keeps who was named last, so that a
pronoun always agrees with the last name before it: that rule is what `story_check` asks of any text.

    {P} {P:him} {P:his}     the protagonist: a pronoun when named last (and then now and again the name), else the name
    {P:name}                always the name;  {F...} the friend, {H...} who holds the wanted thing at the end
    {P.kind} {P.trait} {P.feeling}   read from the entity;  {place} where the protagonist is;  {new place} moves
    {obj} {a obj} {noun} {full}      "the kite" or "the red kite"; "a red kite"; "kite" or "red kite"; "red kite"
    {aim}                   the plot's goal as an infinitive, "find the kite"
    {why}                   a clause that gives a cause that holds in this state
    {spot} {gear} {mishap}  phrases of several words
    {list} {a list} {same list}      a word of `story_words.LISTS`, not yet used in this story; the last one again

It does not promise English beyond the wordings it is given: they are in the past tense, which needs no agreement.
"""

import random
import re
from dataclasses import dataclass, field
from functools import cache

from pipeline.synthesis.story_words import (
    CASES,
    COLOURS,
    DEEDS,
    FEELINGS,
    HE_NAMES,
    KINDS,
    LISTS,
    MANNERS,
    PRONOUN_OF,
    SHE_NAMES,
    TRAITS,
)

NAME_AGAIN = 0.85  # how often a sentence repeats the name where a pronoun would do: a small model needs names at hand
NOUN_ALONE = 0.88  # how often "the kite" rather than "the red kite"

SPOTS = ("{prep} the {fixture}", "{prep} {a fixture}", "{prep} the {age} {fixture}")
GEAR = ("{a tool}", "{a make} {tool}", "some {stuff}")
MISHAPS = (
    "the wind took the {stuff}",
    "{P} slipped on some {stuff}",
    "{a animal} ran off with the {tool}",
    "the {tool} broke with {a sound}",
    "the {fixture} fell over with {a sound}",
    "{a sound} from the {where} made {P:him} jump",
    "{a animal} ate the {food}",
    "rain fell on the {stuff}",
    "{P} got lost at the {where}",
    "the {relative} locked the {fixture}",
    "there was no {stuff} left",
    "{P} hit the {fixture} and hurt one {knee}",
)
WHYS = ("because {P} felt {P.feeling}", "because {P} was so {P.trait}", "because {obj} was so {fine}")
WHYS_WITH_FRIEND = ("because {F} was so {F.trait}",)
KNEES = (
    "ankle",
    "arm",
    "back",
    "chin",
    "ear",
    "elbow",
    "foot",
    "knee",
    "leg",
    "nose",
    "paw",
    "shoulder",
    "tail",
    "toe",
)
PIECES = (
    "bits of",
    "boxes of",
    "buckets of",
    "bundles of",
    "handfuls of",
    "heaps of",
    "lumps of",
    "pieces of",
    "rolls of",
)
PHRASES = SPOTS + GEAR + MISHAPS + WHYS + WHYS_WITH_FRIEND + KNEES + PIECES

_SENTENCE_START = re.compile(r'(?:^"?|(?<=[.!?] )"?)[a-z]')


@dataclass(slots=True)
class Entity:
    """Somebody with a name. The pronoun follows from the name."""

    name: str
    kind: str
    trait: str
    feeling: str
    pronoun: str = ""

    def __post_init__(self) -> None:
        self.pronoun = PRONOUN_OF[self.name]


@dataclass(slots=True)
class World:
    """The state of one story; events change it, wordings read it."""

    rng: random.Random
    hero: Entity
    friend: Entity
    noun: str  # the wanted thing
    colour: str
    place: str  # where the protagonist is
    aims: tuple[str, ...]
    facts: set[str] = field(default_factory=set)
    holder: str = "P"  # who has the wanted thing at the end: "P" or "F"
    last: Entity | None = None  # whom a pronoun would mean
    since_name: int = 0  # sentences since the last name
    mood: str = "keen"
    mentioned: bool = False  # the one named last stands in this sentence already
    used: set[str] = field(default_factory=set)
    recent: dict[str, str] = field(default_factory=dict)  # list -> the word drawn last


def new_world(rng: random.Random, things: tuple[str, ...], aims: tuple[str, ...]) -> World:
    """Draw a protagonist, a friend of another name and kind, a thing and a place."""

    def somebody(kind: str, trait: str) -> Entity:
        names = HE_NAMES if rng.random() < 0.5 else SHE_NAMES
        return Entity(name=rng.choice(names), kind=kind, trait=trait, feeling=rng.choice(FEELINGS["keen"]))

    kinds, traits = rng.sample(KINDS, 2), rng.sample(TRAITS, 2)
    hero, friend = somebody(kinds[0], traits[0]), somebody(kinds[1], traits[1])
    while friend.name == hero.name:
        friend = somebody(kinds[1], traits[1])
    world = World(
        rng=rng,
        hero=hero,
        friend=friend,
        noun=rng.choice(things),
        colour=rng.choice(COLOURS),
        place=rng.choice(LISTS["where"]),
        aims=aims,
    )
    world.used.update(kinds, (world.place, world.colour))
    return world


def realise(world: World, wording: str) -> str:
    """Read a wording in the present state, as one or more sentences. Changes who was named last and what was used."""
    world.mentioned = False
    world.since_name += 1
    text = _read(world, wording)
    return _SENTENCE_START.sub(lambda match: match[0].upper(), text)


@cache
def _compile(wording: str) -> tuple[tuple[str, str], ...]:
    """Split a wording into (fixed text, slot) pairs; the last slot is empty."""
    parts = re.split(r"\{([^}]*)\}", wording)
    return tuple(zip(parts[::2], [*parts[1::2], ""], strict=True))


def _read(world: World, wording: str) -> str:
    out: list[str] = []
    for fixed, slot in _compile(wording):
        out.append(fixed)
        if slot:
            article = slot.startswith("a ")
            word = _slot(world, slot[2:] if article else slot)
            out.append(_article(word) + word if article else word)
    return "".join(out)


def _article(word: str) -> str:
    return "an " if word.startswith(("a", "e", "i", "o", "honest", "ugly", "un")) else "a "


def _slot(world: World, slot: str) -> str:
    rng = world.rng
    if slot[0] in "PFH":
        return _person(world, slot)
    if slot in LISTS or slot in ("did", "manner"):
        return _draw(world, slot)
    match slot:
        case "obj" | "noun":
            noun = world.noun if rng.random() < NOUN_ALONE else f"{world.colour} {world.noun}"
            return f"the {noun}" if slot == "obj" else noun
        case "full":
            return f"{world.colour} {world.noun}"
        case "colour":
            return world.colour
        case "place":
            return world.place
        case "new place":
            world.place = _draw(world, "where")
            return world.place
        case "aim":
            return _read(world, rng.choice(world.aims))
        case "spot":
            return _read(world, rng.choice(SPOTS))
        case "gear":
            return _read(world, rng.choice(GEAR))
        case "mishap":
            return _read(world, rng.choice(MISHAPS))
        case "why":
            choices = WHYS + WHYS_WITH_FRIEND if "friend" in world.facts else WHYS
            return _read(world, rng.choice(choices))
        case "knee":
            return rng.choice(KNEES)
        case "stuff:pieces":
            return f"{rng.choice(PIECES)} {_draw(world, 'stuff')}"
    assert slot.startswith("same "), f"unknown slot {slot!r}"
    return world.recent[slot[5:]]


def _draw(world: World, name: str) -> str:
    by_mood = DEEDS if name == "did" else MANNERS
    words = LISTS[name] if name in LISTS else by_mood[world.mood]
    word = world.rng.choice(words)
    for _ in range(8):
        if word not in world.used:
            break
        word = world.rng.choice(words)
    world.used.add(word)
    world.recent[name] = word
    return word


def _person(world: World, slot: str) -> str:
    """A name or a pronoun; who was named last decides which are possible."""
    who = {"P": world.hero, "F": world.friend, "H": world.hero if world.holder == "P" else world.friend}[slot[0]]
    rest = slot[1:]
    if rest.startswith("."):
        return getattr(who, rest[1:])
    case = rest[1:] or "he"
    again = not world.mentioned and (world.since_name > 2 or world.rng.random() < NAME_AGAIN)
    world.mentioned = True
    if case == "name" or world.last is not who or again:
        world.last, world.since_name = who, 0
        return f"{who.name}'s" if case == "his" else who.name
    return CASES[who.pronoun][case]
