"""The planner: from a plot to a sequence of 7-10 events whose preconditions hold, and from these to text.

In: a family and a random stream. Out: one story as text, or None where a bound was missed (the caller draws again).

The planner walks forward. At each step it takes, among the events whose needs hold and whose bars do not, one at
random; optional events (a reason, a setback, a wrong guess, a friend) are in the plan only if drawn beforehand. The
order of a story is therefore not a template: a friend may come before the first attempt or after the setback.
"""

import random
import re
from functools import cache

from pipeline.synthesis.story_bonds import BONDS
from pipeline.synthesis.story_crafts import CRAFTS
from pipeline.synthesis.story_events import (
    ADVICE,
    CODA,
    GUESS,
    IDEA,
    INTRODUCTION,
    MEETING,
    MOMENTS,
    REASON,
    SETBACK,
    Event,
    Plot,
)
from pipeline.synthesis.story_quests import QUESTS
from pipeline.synthesis.story_words import COLOURS, DEEDS, FEELINGS, LISTS, MANNERS, PRONOUNS, THINGS, TRAITS
from pipeline.synthesis.story_world import PHRASES, World, new_world, realise

PLOTS: dict[str, Plot] = {plot.family: plot for plot in QUESTS + CRAFTS + BONDS}

SPOKEN = 0.55  # share of the events of such a story that are told in speech
MOMENT = 0.12  # how often an event is followed by a sentence about the state
OPTIONAL = ((REASON, 0.4), (SETBACK, 0.5), (GUESS, 0.4), (MEETING, 0.3))
MAX_OPTIONAL = 3  # seven events are always there: ten at most
MIN_WORDS, MAX_WORDS = 64, 260
_PRONOUN = re.compile(rf"\b({'|'.join(PRONOUNS)})\b", re.IGNORECASE)


def tell(family: str, rng: random.Random, *, speaks: bool) -> str | None:
    """One story of a family, or None where it misses the bounds on words, has no pronoun or repeats a sentence."""
    plot = PLOTS[family]
    things = tuple(word for key in plot.things for word in THINGS[key])
    world = new_world(rng, things, plot.aims)
    world.holder = plot.holder
    events = plan(plot, world)
    sentences = _narrate(world, events, speaks=speaks)
    text = " ".join(sentences)
    if not MIN_WORDS <= text.count(" ") + 1 <= MAX_WORDS or not _PRONOUN.search(text):
        return None
    return text if len(set(sentences)) == len(sentences) else None


def plan(plot: Plot, world: World) -> list[Event]:
    """Events from the introduction to the coda, each applicable in the state that the earlier ones leave."""
    rng = world.rng
    optional = [event for event, share in OPTIONAL if rng.random() < share and not (plot.partner and event is MEETING)]
    while len(optional) > MAX_OPTIONAL:
        optional.remove(rng.choice(optional))
    waiting = [INTRODUCTION, plot.goal, plot.attempt, plot.deed, plot.ending, CODA, *optional]
    waiting.append(ADVICE if plot.partner or MEETING in optional else IDEA)
    facts: set[str] = set()
    events: list[Event] = []
    while "done" not in facts:
        ready = [event for event in waiting if event.needs <= facts and not event.bars & facts]
        ready = _in_time(ready, facts)
        event = rng.choice(ready)
        waiting.remove(event)
        events.append(event)
        facts |= event.gives
    return events


def _in_time(ready: list[Event], facts: set[str]) -> list[Event]:
    """Of the applicable events, leave out those that would make a drawn option impossible."""
    if "introduced" not in facts:
        return [INTRODUCTION]
    late = [event for event in ready if event.name in ("reason", "setback", "guess", "meeting")]
    closing = {"attempt": {"reason"}, "idea": {"setback", "guess", "meeting"}}
    names = {event.name for event in late}
    kept = [
        event
        for event in ready
        if not ("tried" in event.gives and names & closing["attempt"])
        and not ("idea" in event.gives and names & closing["idea"])
    ]
    return kept or ready


def _narrate(world: World, events: list[Event], *, speaks: bool) -> list[str]:
    """Tell the events one after the other; each changes the state before it is told."""
    rng = world.rng
    sentences: list[str] = []
    moments = list(MOMENTS)
    for number, event in enumerate(events):
        world.facts |= event.gives
        if event.mood:
            world.mood = event.mood
            world.hero.feeling = rng.choice(FEELINGS[event.mood])
            if event.mood == "glad":
                world.friend.feeling = rng.choice(FEELINGS["glad"])
        must_speak = speaks and number == len(events) - 1 and not any('"' in sentence for sentence in sentences)
        told = event.spoken if speaks and event.spoken and (must_speak or rng.random() < SPOKEN) else event.plain
        sentences.append(realise(world, rng.choice(told)))
        if 1 < number < len(events) - 3 and rng.random() < MOMENT:
            moment = rng.choice(moments)
            moments.remove(moment)
            sentences.append(realise(world, moment))
    return sentences


@cache
def vocabulary() -> frozenset[str]:
    """Every word that a wording or a list can put into a story, in lower case, names left out."""
    events = [INTRODUCTION, REASON, SETBACK, GUESS, MEETING, ADVICE, IDEA, CODA]
    lines = [*MOMENTS, *PHRASES]
    for plot in PLOTS.values():
        events += [plot.goal, plot.attempt, plot.deed, plot.ending]
        lines += plot.aims
    for event in events:
        lines += event.plain + event.spoken
    words = {word for line in lines for word in re.findall(r"[a-z'-]+", re.sub(r"\{[^}]*\}", " ", line).lower())}
    for group in (LISTS, THINGS, FEELINGS, DEEDS, MANNERS):
        words |= {part.lower() for entries in group.values() for entry in entries for part in entry.split()}
    words |= set(TRAITS + COLOURS + ("a", "an") + tuple(PRONOUNS))
    return frozenset(words)
