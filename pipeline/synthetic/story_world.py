"""The small world behind a story: its state, the event planner, and how a wording is filled in from that state.

In: a family and a random generator. Out (`tell`): one story, or None if it violates a bound and the caller should
redraw. `plan` builds a sequence of 7-10 events with valid preconditions; `_narrate` turns it into text.

The planner works forward. At each step it picks a random event whose `needs` hold and whose `bars` do not; optional
events (a reason, a setback, a wrong guess, a friend) are in the plan only if drawn beforehand. So a story's order
follows no template: a friend may come before the first attempt or after the setback.

Each plot has four events of its own: goal, attempt, deed and ending. A wording (in `plots.yaml`; words are in
`stories.yaml`) is a line with slots in braces. `realize` fills the slots from left to right and tracks who was named
last, so that a pronoun always agrees with the last name before it; `stories.check` requires this of any text.

    {P} {P:him} {P:his}     the protagonist: the name, or, if this name was the last one, possibly a pronoun
    {P:name}                always the name;  {F...} the friend, {H...} whoever has the wanted thing at the end
    {P.kind} {P.trait} {P.feeling}   from the entity;  {place} where the protagonist is;  {new place} the next one
    {obj} {a obj} {noun} {full}      "the kite" or "the red kite"; "a red kite"; "kite" or "red kite"; "red kite"
    {aim}                   the plot's goal as an infinitive, "find the kite"
    {why}                   a clause with a cause that is true in this state
    {spot} {gear} {mishap}  phrases of several words
    {list} {a list} {same list}      a word from `lists` not yet used in this story; the last such word

A wanted thing is in `things` and in no other list or wording, so that the checker can distinguish it from everything
else in a story; a name has one pronoun, so that the checker can resolve "she". No shared wording matches an ending
pattern; otherwise a story without its ending could pass. The tests check all three rules.

Not guaranteed: correct English beyond the given wordings, which are in the past tense, so that no verb depends on its
subject.
"""

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

from pipeline.synthetic.wording import lines, table, word_list

NAME_AGAIN = 0.85  # how often the name is used where a pronoun would do: a small model needs frequent names
NOUN_ALONE = 0.88  # how often "the kite" is used rather than "the red kite"
SPOKEN = 0.55  # fraction of events told in direct speech, in a story with speech
MOMENT = 0.12  # fraction of events followed by a sentence about the state
OPTIONAL = (("reason", 0.4), ("setback", 0.5), ("guess", 0.4), ("meeting", 0.3))
MAX_OPTIONAL = 3  # in addition to the seven events of every story
MIN_WORDS, MAX_WORDS = 64, 260

# subject, object and possessive forms of each pronoun
CASES = {"he": {"he": "he", "him": "him", "his": "his"}, "she": {"he": "she", "him": "her", "his": "her"}}
PRONOUNS = {"he": "he", "him": "he", "his": "he", "himself": "he"} | dict.fromkeys(
    ("she", "her", "hers", "herself"), "she"
)
PLURAL_PRONOUNS = frozenset(("they", "them", "their", "both"))

_SENTENCE_START = re.compile(r'(?:^"?|(?<=[.!?] )"?)[a-z]')
_PRONOUN = re.compile(rf"\b({'|'.join(PRONOUNS)})\b", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that can happen once in a story."""

    name: str
    needs: frozenset[str]  # facts that must be true beforehand
    bars: frozenset[str]  # facts that must be false beforehand
    gives: frozenset[str]  # facts that are true afterward
    mood: str | None  # the protagonist's feeling afterward, a key of `feelings`
    plain: tuple[str, ...]
    spoken: tuple[str, ...]  # only in stories with dialogue


@dataclass(frozen=True, kw_only=True)
class Plot:
    """A family of stories: its goal, obstacle and ending."""

    family: str
    things: tuple[str, ...]  # keys of `things`: what the story can be about
    aims: tuple[str, ...]  # the goal as an infinitive
    goal_sign: str  # regular expression that matches only this family's goal
    ending_sign: str  # regular expression that matches this family's ending, and nothing before it
    goal: Event
    attempt: Event
    deed: Event
    ending: Event
    holder: str  # "P" or "F": who has the thing at the end
    partner: bool  # the goal itself introduces the friend


@dataclass(slots=True)
class Entity:
    """A character in a story. The pronoun follows from the name."""

    name: str
    kind: str
    trait: str
    feeling: str
    pronoun: str = ""

    def __post_init__(self) -> None:
        self.pronoun = lexicon().pronoun_of[self.name]


@dataclass(slots=True)
class World:
    """The state of one story; events change it, and wordings use it."""

    rng: random.Random
    hero: Entity
    friend: Entity
    noun: str  # the wanted thing
    colour: str
    place: str  # where the protagonist is
    aims: tuple[str, ...]
    facts: set[str] = field(default_factory=set)
    holder: str = "P"  # who has the wanted thing at the end: "P" or "F"
    last: Entity | None = None  # the character named last, to whom a pronoun refers
    since_name: int = 0  # sentences since that name
    mood: str = "keen"
    mentioned: bool = False  # the entity named last already occurs in this sentence
    used: set[str] = field(default_factory=set)
    recent: dict[str, str] = field(default_factory=dict)  # name of a list -> the word drawn last


def tell(family: str, rng: random.Random, *, speaks: bool) -> str | None:
    """One story from a family; None if its word count is out of bounds, it has no pronoun or it repeats a sentence."""
    plot = plots()[family]
    things = tuple(word for key in plot.things for word in lexicon().things[key])
    world = new_world(rng, things, plot.aims)
    world.holder = plot.holder
    events = plan(plot, world)
    sentences = _narrate(world, events, speaks=speaks)
    text = " ".join(sentences)
    if not MIN_WORDS <= text.count(" ") + 1 <= MAX_WORDS or not _PRONOUN.search(text):
        return None
    return text if len(set(sentences)) == len(sentences) else None


def plan(plot: Plot, world: World) -> list[Event]:
    """The events from the introduction to the coda; each one is possible in the state that the earlier ones leave."""
    rng, shared = world.rng, shared_events()
    optional = [name for name, share in OPTIONAL if rng.random() < share and not (plot.partner and name == "meeting")]
    while len(optional) > MAX_OPTIONAL:
        optional.remove(rng.choice(optional))
    waiting = [shared["introduction"], plot.goal, plot.attempt, plot.deed, plot.ending, shared["coda"]]
    waiting += [shared[name] for name in optional]
    waiting.append(shared["advice" if plot.partner or "meeting" in optional else "idea"])
    facts: set[str] = set()
    events: list[Event] = []
    while "done" not in facts:
        ready = [event for event in waiting if event.needs <= facts and not event.bars & facts]
        ready = _drop_closing_events(ready, facts)
        event = rng.choice(ready)
        waiting.remove(event)
        events.append(event)
        facts |= event.gives
    return events


def _drop_closing_events(ready: list[Event], facts: set[str]) -> list[Event]:
    """The possible events, minus those that would rule out an optional event that was drawn."""
    if "introduced" not in facts:
        return [shared_events()["introduction"]]
    names = {event.name for event in ready}
    remaining = [
        event
        for event in ready
        if not ("tried" in event.gives and "reason" in names)
        and not ("idea" in event.gives and names & {"setback", "guess", "meeting"})
    ]
    return remaining or ready


def _narrate(world: World, events: list[Event], *, speaks: bool) -> list[str]:
    """Write a sentence for each event, after applying its effects to the state."""
    rng = world.rng
    sentences: list[str] = []
    unused = list(moments())
    for number, current in enumerate(events):
        world.facts |= current.gives
        if current.mood:
            world.mood = current.mood
            world.hero.feeling = rng.choice(lexicon().feelings[current.mood])
            if current.mood == "glad":
                world.friend.feeling = rng.choice(lexicon().feelings["glad"])
        must_speak = speaks and number == len(events) - 1 and not any('"' in sentence for sentence in sentences)
        is_spoken = speaks and current.spoken and (must_speak or rng.random() < SPOKEN)
        sentences.append(realize(world, rng.choice(current.spoken if is_spoken else current.plain)))
        if 1 < number < len(events) - 3 and rng.random() < MOMENT:
            moment = rng.choice(unused)
            unused.remove(moment)
            sentences.append(realize(world, moment))
    return sentences


# -- wordings ----------------------------------------------------------------------------------------------------------


def new_world(rng: random.Random, things: tuple[str, ...], aims: tuple[str, ...]) -> World:
    """Draw a protagonist, a friend with a different name and kind, a thing and a place."""

    words = lexicon()

    def draw_entity(kind: str, trait: str) -> Entity:
        names = words.names["he" if rng.random() < 0.5 else "she"]
        return Entity(name=rng.choice(names), kind=kind, trait=trait, feeling=rng.choice(words.feelings["keen"]))

    kinds, traits = rng.sample(words.kinds, 2), rng.sample(words.traits, 2)
    hero, friend = draw_entity(kinds[0], traits[0]), draw_entity(kinds[1], traits[1])
    while friend.name == hero.name:
        friend = draw_entity(kinds[1], traits[1])
    world = World(
        rng=rng,
        hero=hero,
        friend=friend,
        noun=rng.choice(things),
        colour=rng.choice(words.colours),
        place=rng.choice(words.lists["where"]),
        aims=aims,
    )
    world.used.update(kinds, (world.place, world.colour))
    return world


def realize(world: World, wording: str) -> str:
    """Fill a wording (one or more sentences) from the current state. Updates the last name and the used words."""
    world.mentioned = False
    world.since_name += 1
    text = _fill(world, wording)
    return _SENTENCE_START.sub(lambda match: match[0].upper(), text)


@cache
def _compile(wording: str) -> tuple[tuple[str, str], ...]:
    """Split a wording into (fixed text, slot) pairs; the last slot is empty."""
    parts = re.split(r"\{([^}]*)\}", wording)
    return tuple(zip(parts[::2], [*parts[1::2], ""], strict=True))


def _fill(world: World, wording: str) -> str:
    parts: list[str] = []
    for fixed, slot in _compile(wording):
        parts.append(fixed)
        if slot:
            has_article = slot.startswith("a ")
            word = _fill_slot(world, slot[2:] if has_article else slot)
            parts.append(_article(word) + word if has_article else word)
    return "".join(parts)


def _article(word: str) -> str:
    return "an " if word.startswith(("a", "e", "i", "o", "honest", "ugly", "un")) else "a "


def _fill_slot(world: World, slot: str) -> str:
    rng, words = world.rng, lexicon()
    if slot[0] in "PFH":
        return _person(world, slot)
    if slot in words.lists or slot in ("did", "manner"):
        return _draw_word(world, slot)
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
            world.place = _draw_word(world, "where")
            return world.place
        case "aim":
            return _fill(world, rng.choice(world.aims))
        case "spot" | "gear" | "mishap":
            return _fill(world, rng.choice(words.phrases[slot]))
        case "why":
            with_friend = words.phrases["why with friend"] if "friend" in world.facts else ()
            return _fill(world, rng.choice(words.phrases["why"] + with_friend))
        case "knee":
            return rng.choice(words.knees)
        case "stuff:pieces":
            return f"{rng.choice(words.pieces)} {_draw_word(world, 'stuff')}"
    assert slot.startswith("same "), f"unknown slot {slot!r}"
    return world.recent[slot[5:]]


def _draw_word(world: World, list_name: str) -> str:
    words = lexicon()
    by_mood = words.deeds if list_name == "did" else words.manners
    choices = words.lists[list_name] if list_name in words.lists else by_mood[world.mood]
    word = world.rng.choice(choices)
    for _ in range(8):
        if word not in world.used:
            break
        word = world.rng.choice(choices)
    world.used.add(word)
    world.recent[list_name] = word
    return word


def _person(world: World, slot: str) -> str:
    """A name or a pronoun, depending on who was named last, or an attribute of the character."""
    entity = {"P": world.hero, "F": world.friend, "H": world.hero if world.holder == "P" else world.friend}[slot[0]]
    suffix = slot[1:]
    if suffix.startswith("."):
        return getattr(entity, suffix[1:])
    case = suffix[1:] or "he"
    repeat_name = not world.mentioned and (world.since_name > 2 or world.rng.random() < NAME_AGAIN)
    world.mentioned = True
    if case == "name" or world.last is not entity or repeat_name:
        world.last, world.since_name = entity, 0
        return f"{entity.name}'s" if case == "his" else entity.name
    return CASES[entity.pronoun][case]


# -- the tables --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lexicon:
    """The words of the stories."""

    names: Mapping[str, tuple[str, ...]]  # by pronoun
    kinds: tuple[str, ...]
    traits: tuple[str, ...]
    colours: tuple[str, ...]
    knees: tuple[str, ...]
    pieces: tuple[str, ...]
    things: Mapping[str, tuple[str, ...]]  # what a story can be about
    feelings: Mapping[str, tuple[str, ...]]  # by mood, as are deeds and manners
    deeds: Mapping[str, tuple[str, ...]]
    manners: Mapping[str, tuple[str, ...]]
    lists: Mapping[str, tuple[str, ...]]  # lists referenced in braces by wordings
    phrases: Mapping[str, tuple[str, ...]]
    pronoun_of: Mapping[str, str]  # name -> "he" or "she"
    wanted: frozenset[str]  # all things

    @property
    def all_phrases(self) -> tuple[str, ...]:
        return (*(line for group in self.phrases.values() for line in group), *self.knees, *self.pieces)


@cache
def lexicon() -> Lexicon:
    """The words in `stories.yaml`."""
    rows = table("stories.yaml")

    def words(key: str) -> tuple[str, ...]:
        return word_list("stories.yaml", key)

    def groups(key: str) -> dict[str, tuple[str, ...]]:
        return {name: word_list("stories.yaml", key, name) for name in rows[key]}

    names, things = groups("names"), groups("things")
    return Lexicon(
        names=names,
        kinds=words("kinds"),
        traits=words("traits"),
        colours=words("colours"),
        knees=words("knees"),
        pieces=words("pieces"),
        things=things,
        feelings=groups("feelings"),
        deeds=groups("deeds"),
        manners=groups("manners"),
        lists=groups("lists") | {"animal": words("kinds")},
        phrases={name: lines("stories.yaml", "phrases", name) for name in rows["phrases"]},
        pronoun_of={name: pronoun for pronoun, group in names.items() for name in group},
        wanted=frozenset(thing for group in things.values() for thing in group),
    )


@cache
def moments() -> tuple[str, ...]:
    """Sentences that may follow an event and depend only on the state."""
    return lines("plots.yaml", "moments")


@cache
def shared_events() -> dict[str, Event]:
    """The events shared by all plots, by name."""
    return {name: _event(name, **row) for name, row in table("plots.yaml")["shared"].items()}


@cache
def plots() -> dict[str, Plot]:
    """The plots, by family."""
    return {family: _plot(family, **row) for family, row in table("plots.yaml")["plots"].items()}


def _plot(
    family: str,
    *,
    things: str,
    aims: str,
    goal_sign: str,
    ending_sign: str,
    goal: dict[str, str],
    attempt: str,
    deed: str,
    ending: str,
    holder: str = "P",
    partner: bool = False,
) -> Plot:
    """A plot from its table row: wordings are separated by newlines, words by spaces."""
    return Plot(
        family=family,
        things=tuple(things.split()),
        aims=tuple(aims.splitlines()),
        goal_sign=goal_sign,
        ending_sign=ending_sign,
        goal=_event("goal", **goal, gives="wanting friend" if partner else "wanting"),
        attempt=_event("attempt", attempt, needs="wanting", gives="tried"),
        deed=_event("deed", deed, needs="idea", gives="solved"),
        ending=_event("ending", ending, needs="solved", gives="ended", mood="glad"),
        holder=holder,
        partner=partner,
    )


def _event(
    name: str, wordings: str, *, needs: str = "", bars: str = "", gives: str = "", mood: str | None = None
) -> Event:
    """An event from its table row; wordings that contain a quotation mark are spoken."""
    rows = wordings.splitlines()
    return Event(
        name=name,
        needs=frozenset(needs.split()),
        bars=frozenset(bars.split()),
        gives=frozenset(gives.split()),
        mood=mood,
        plain=tuple(row for row in rows if '"' not in row),
        spoken=tuple(row for row in rows if '"' in row),
    )


@cache
def vocabulary() -> frozenset[str]:
    """Every word that can occur in a story, in lower case and without names."""
    words = lexicon()
    events = list(shared_events().values())
    wordings = [*moments(), *words.all_phrases]
    for plot in plots().values():
        events += [plot.goal, plot.attempt, plot.deed, plot.ending]
        wordings += plot.aims
    wordings += [wording for event in events for wording in event.plain + event.spoken]
    vocabulary = {
        word for line in wordings for word in re.findall(r"[a-z'-]+", re.sub(r"\{[^}]*\}", " ", line).lower())
    }
    for group in (words.lists, words.things, words.feelings, words.deeds, words.manners):
        vocabulary |= {part.lower() for entries in group.values() for entry in entries for part in entry.split()}
    return frozenset(vocabulary | {*words.traits, *words.colours, "a", "an", *PRONOUNS})
