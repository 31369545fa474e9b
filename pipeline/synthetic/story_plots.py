"""The planner of the stories, and the plots of making something: build, repair, grow and learn.

In: a family and a random stream. Out (`tell`): one story as text, or None if it misses a bound and the caller should
draw again. `plan` makes a sequence of 7-10 events whose preconditions hold, `_narrate` turns it into text.

The planner works forward. At each step it takes a random event among those whose needs hold and whose bars do not;
optional events (a reason, a setback, a wrong guess, a friend) are in the plan only if drawn beforehand. So the order of
a story is no template: a friend may come before the first attempt or after the setback.

In a plot (`CRAFTS`; others in `story_quests` and `story_events`) a block is one event, a line one wording (the slots
are in `story_world`). Every goal wording names the wanted thing and matches its `goal_sign`; every ending wording names
the thing and matches its `ending_sign`.
"""

import random
import re
from functools import cache

from pipeline.synthetic.story_events import (
    ADVICE,
    BONDS,
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
    event,
)
from pipeline.synthetic.story_quests import QUESTS
from pipeline.synthetic.story_world import (
    COLOURS,
    DEEDS,
    FEELINGS,
    LISTS,
    MANNERS,
    PHRASES,
    PRONOUNS,
    THINGS,
    TRAITS,
    World,
    new_world,
    realize,
)

SPOKEN = 0.55  # share of the events told in direct speech, in a story with speech
MOMENT = 0.12  # share of the events followed by a sentence about the state
OPTIONAL = ((REASON, 0.4), (SETBACK, 0.5), (GUESS, 0.4), (MEETING, 0.3))
MAX_OPTIONAL = 3  # besides the seven events of every story
MIN_WORDS, MAX_WORDS = 64, 260
_PRONOUN = re.compile(rf"\b({'|'.join(PRONOUNS)})\b", re.IGNORECASE)


def tell(family: str, rng: random.Random, *, speaks: bool) -> str | None:
    """One story of a family; None if it misses the bounds on words, has no pronoun or repeats a sentence."""
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
    """Events from the introduction to the coda, each applicable in the state after the earlier ones."""
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
        ready = _drop_closing_events(ready, facts)
        event = rng.choice(ready)
        waiting.remove(event)
        events.append(event)
        facts |= event.gives
    return events


def _drop_closing_events(ready: list[Event], facts: set[str]) -> list[Event]:
    """The applicable events without those that would make a drawn optional event impossible."""
    if "introduced" not in facts:
        return [INTRODUCTION]
    names = {event.name for event in ready}
    remaining = [
        event
        for event in ready
        if not ("tried" in event.gives and "reason" in names)
        and not ("idea" in event.gives and names & {"setback", "guess", "meeting"})
    ]
    return remaining or ready


def _narrate(world: World, events: list[Event], *, speaks: bool) -> list[str]:
    """Write a sentence for each current, after applying its effect to the state."""
    rng = world.rng
    sentences: list[str] = []
    moments = list(MOMENTS)
    for number, current in enumerate(events):
        world.facts |= current.gives
        if current.mood:
            world.mood = current.mood
            world.hero.feeling = rng.choice(FEELINGS[current.mood])
            if current.mood == "glad":
                world.friend.feeling = rng.choice(FEELINGS["glad"])
        must_speak = speaks and number == len(events) - 1 and not any('"' in sentence for sentence in sentences)
        is_spoken = speaks and current.spoken and (must_speak or rng.random() < SPOKEN)
        sentences.append(realize(world, rng.choice(current.spoken if is_spoken else current.plain)))
        if 1 < number < len(events) - 3 and rng.random() < MOMENT:
            moment = rng.choice(moments)
            moments.remove(moment)
            sentences.append(realize(world, moment))
    return sentences


@cache
def vocabulary() -> frozenset[str]:
    """Every word that can occur in a story, in lower case, without names."""
    events = [INTRODUCTION, REASON, SETBACK, GUESS, MEETING, ADVICE, IDEA, CODA]
    lines = [*MOMENTS, *PHRASES]
    for plot in PLOTS.values():
        events += [plot.goal, plot.attempt, plot.deed, plot.ending]
        lines += plot.aims
    lines += [line for event in events for line in event.plain + event.spoken]
    words = {word for line in lines for word in re.findall(r"[a-z'-]+", re.sub(r"\{[^}]*\}", " ", line).lower())}
    for group in (LISTS, THINGS, FEELINGS, DEEDS, MANNERS):
        words |= {part.lower() for entries in group.values() for entry in entries for part in entry.split()}
    words |= set(TRAITS + COLOURS + ("a", "an") + tuple(PRONOUNS))
    return frozenset(words)


# -- plots of making something -----------------------------------------------------------------------------------------

BUILD = Plot(
    family="build",
    things=("craft",),
    aims=("build {obj}", "build such {a noun}"),
    goal_sign=r"\bbuild\b",
    ending_sign=r"\b(finished|built)\b",
    goal=event(
        "plan",
        """
        {P} wanted to build {a full} out of {stuff} and {stuff}.
        One {weather} {time}, {P} planned to build {a full} {near} the {where}.
        {P} saw {a full} at the {where} and wanted to build one too.
        The {relative} needed {a full}, so {P} wanted to build one from {stuff}.
        {P} wished for {a full}, but there was none, so {P} had to build one.
        To build {a full} for the {relative} was what {P} wanted most.
        {P} read about {a full} and wanted to build such a thing {spot}.
        "I want to build {a full}," said {P:name} to {a animal}.
        "Let me build {a full} {spot}!" said {P:name}, who {did}.
        """,
        gives="wanting",
        mood="keen",
    ),
    attempt=event(
        "first pieces",
        """
        {P} put {stuff} on some {stuff}, but {obj} fell over with {a sound}.
        {P} gathered {stuff:pieces} for {obj} at the {new place}, but that was not enough.
        {P} started {obj} with {a tool}, but one side was too {age}.
        {P} drew {obj} on {a fixture} and cut some {stuff}.
        {P} joined {stuff} and {stuff} for {obj}, but there was {a sound}.
        {P} {went} to the {where} for {stuff}, because {obj} needed some.
        "First the {noun} needs some {stuff}," said {P:name}.
        "Where can I get {stuff} for {obj}?" {P:name} asked the {relative}.
        """,
        needs="wanting",
        gives="tried",
    ),
    deed=event(
        "joining",
        """
        So {P} used {gear} and put {obj} together bit by bit.
        {P} cut some {stuff} and tied {obj} together.
        With {a tool}, {P} fixed {stuff} to {obj} until {clock}.
        {P} worked on {obj} with {stuff} for {number} days.
        {P} rubbed {obj} with {stuff} until each side was {fine}.
        {P} hit the {fixture} {number} times until {obj} stood there.
        """,
        needs="idea",
        gives="solved",
    ),
    ending=event(
        "finish",
        """
        At last {obj} was finished and stood {spot}.
        {P} had built {a full} at the {where}, and {a animal} {did}.
        By {clock}, {obj} was finished, so {P} {did}.
        So {P} finished {obj} with some {stuff} and felt {P.feeling}.
        The {relative} {did}, because {P} had built such {a fine} {noun}.
        {P} finished {obj} and {went} to show the {relative}.
        "The {noun} is finished!" cried {P:name}, who {did} {spot}.
        "I built this {noun} with {stuff}," said {P:name}.
        """,
        needs="solved",
        gives="ended",
        mood="glad",
    ),
)

REPAIR = Plot(
    family="repair",
    things=("craft", "treasure", "instrument"),
    aims=("mend {obj}", "mend the broken {noun}"),
    goal_sign=r"\bbroken\b",
    ending_sign=r"\b(mended|as good as new)\b",
    goal=event(
        "damage",
        """
        {P} had {a full}, but {obj} was broken, so {P} wanted to repair {obj}.
        One {time} {a full} fell with {a sound} and was broken, and {P} wanted to fix {obj}.
        The {relative}'s {full} was broken, and {P} wanted to make {obj} work.
        {P} saw {a full} {spot}, but {obj} was broken on one side.
        At the {where} was a broken {full}, which {P} wanted to fix.
        {P} sat on {a full}, and with {a sound} {obj} was broken.
        {a animal} had broken {a full}, so {P} wanted to fix {obj} by {clock}.
        "My {full} is broken!" cried {P:name}, who {did} {spot}.
        "Can I fix this broken {full}?" {P:name} asked the {relative}.
        """,
        gives="wanting",
        mood="low",
    ),
    attempt=event(
        "patch",
        """
        {P} rubbed some {stuff} on {obj}, but that did not hold.
        {P} tied {obj} up with {stuff}, but the {same stuff} fell off with {a sound}.
        {P} took {obj} to the {new place}, but nobody there could fix {a noun}.
        {P} hit {obj} with {a tool}, but there was just {a sound}.
        {P} looked inside {obj} and saw {stuff} and {a tool}.
        {P} put {obj} {spot} and pushed the bits together.
        "Some {stuff} may help," said {P:name}, but {obj} made {a sound}.
        "How do I fix {a noun}?" {P:name} asked the {relative} at the {where}.
        """,
        needs="wanting",
        gives="tried",
    ),
    deed=event(
        "fixing",
        """
        So {P} used {gear} on {obj} and worked.
        {P} put {stuff} and {stuff} into {obj} until there was {a sound}.
        {P} cleaned {obj} with {a tool} and {stuff}.
        With {gear}, {P} joined the bits of {obj} {spot}.
        {P} took some {stuff} out of {obj} and used {a tool}.
        {P} pressed {obj} into some {stuff} and waited for {number} hours.
        """,
        needs="idea",
        gives="solved",
    ),
    ending=event(
        "mending",
        """
        At last {obj} was mended, and {P} {did}.
        Now {obj} was as good as new and stood {spot}.
        {P} had mended {obj} with {stuff}, so the {relative} {did}.
        By {clock}, {obj} was as good as new, and {P} felt {P.feeling}.
        So {P} mended {obj} and {went} to the {where}.
        With {a sound}, {obj} was mended, and {a animal} {did}.
        "The {noun} is as good as new!" cried {P:name} {manner}.
        "You have mended {obj}," said the {relative}, so {P:name} {did}.
        """,
        needs="solved",
        gives="ended",
        mood="glad",
    ),
)

GROW = Plot(
    family="grow",
    things=("plant",),
    aims=("grow {obj}", "grow such {a noun}"),
    goal_sign=r"\b(plant|seed)\b",
    ending_sign=r"\b(ripe|in bloom|fully grown)\b",
    goal=event(
        "seed",
        """
        {P} had one seed and wanted to grow {a full} {near} the {where}.
        The {relative} gave {P:him} a seed, so {P} wanted to grow {a full}.
        One {weather} {time}, {P} wanted to plant {a full} {spot}.
        {P} wished for {a full}, so {P} went to plant a seed {spot}.
        {P} put a seed into some {stuff}, because {P} wanted {a full}.
        From {a animal} {P} got a seed and wanted to grow {a full}.
        {P} saw {a full} at the {where} and wanted to plant one too.
        "I will plant {a full} {spot}," said {P:name}.
        "This seed will be {a full}," said the {relative}, and {P:name} {did}.
        """,
        gives="wanting",
        mood="keen",
    ),
    attempt=event(
        "waiting",
        """
        {P} put water on {obj} {manner}, but nothing came up.
        {P} waited {number} days for {obj}, but there was only {stuff}.
        {P} sang to {obj} {spot}, but {obj} stayed tiny.
        {P} gave {obj} some {food}, but that made {obj} droop.
        {P} sat by {obj} at the {new place} and {did}.
        {P} dug round {obj} with {a tool}, but some {stuff} was in the way.
        "Why is the {noun} so little?" {P:name} asked {a animal}.
        "Drink, little {noun}," said {P:name}, but {obj} stayed tiny.
        """,
        needs="wanting",
        gives="tried",
    ),
    deed=event(
        "care",
        """
        So {P} put {stuff} round {obj} and used {gear}.
        {P} moved {obj} to {a fixture} in the sun.
        With {a tool}, {P} kept {a animal} away from {obj}.
        {P} gave {obj} rain water and {stuff} for {number} days.
        {P} made a roof of {stuff} over {obj} {near} the {fixture}.
        {P} pulled the weeds round {obj} {manner} until {clock}.
        """,
        needs="idea",
        gives="solved",
    ),
    ending=event(
        "harvest",
        """
        At last {obj} was ripe, and {P} {did} {spot}.
        Soon {obj} was fully grown, so {P} felt {P.feeling}.
        By {clock}, {obj} was in bloom {near} the {fixture}.
        {P} saw that {obj} was fully grown and {did}.
        In the {weather} sun {obj} was ripe, and the {relative} {did}.
        So {obj} was fully grown at the {where}, and {a animal} {did}.
        "The {noun} is ripe!" cried {P:name}, who {did}.
        "Your {noun} is fully grown," said the {relative}, so {P:name} {did}.
        """,
        needs="solved",
        gives="ended",
        mood="glad",
    ),
)

LEARN = Plot(
    family="learn",
    things=("instrument",),
    aims=("play {obj}", "play a song on {obj}"),
    goal_sign=r"\blearn\b",
    ending_sign=r"\b(could play|had learned)\b",
    goal=event(
        "wish",
        """
        {P} had {a full} and wanted to learn a song by {clock}.
        The {relative} gave {P:him} {a full}, so {P} wanted to learn to play.
        {P} heard {a full} at the {where} and wanted to learn to play one.
        To learn the {full} was what {P} wanted most of all.
        One {weather} {time}, {P} took {a full} {spot} to learn a song.
        {P} saw {a animal} with {a full} and wanted to learn that too.
        {P} wanted to learn the {full}, because the {relative} loved a song.
        "I want to learn the {full}," said {P:name} to the {relative}.
        "Can I learn to play this {full}?" asked {P:name} {manner}.
        """,
        gives="wanting",
        mood="keen",
    ),
    attempt=event(
        "practice",
        """
        {P} tried {obj} {spot}, but {obj} made only {a sound}.
        {P} played {obj} so that {a animal} {went} away.
        {P} practiced on {obj} at the {new place}, but all was {age}.
        {P} held {obj} the wrong way round, so the {relative} {did}.
        For {number} days {P} practiced on {obj}, but {a animal} {did}.
        {P} put some {stuff} on {obj}, but there was just {a sound}.
        "That was {a sound}," said {P:name}, and put {obj} {spot}.
        "{a noun} is hard," said {P:name} to {a animal}.
        """,
        needs="wanting",
        gives="tried",
    ),
    deed=event(
        "lesson",
        """
        So {P} practiced on {obj} with {gear} each {time}.
        {P} tapped on {a fixture} and then played {obj}.
        {P} played one note on {obj} {number} times {spot}.
        With {a tool}, {P} kept time and played {obj}.
        {P} listened to the {sound} of the {where} and held {obj}.
        {P} wrote the song on {a fixture} and practiced on {obj}.
        """,
        needs="idea",
        gives="solved",
    ),
    ending=event(
        "song",
        """
        At last {P} could play {obj}, and {a animal} {did}.
        By {clock}, {P} could play {obj}, so the {relative} {did}.
        {P} had learned {a fine} song on {obj} and felt {P.feeling}.
        Everyone at the {where} {did}, because {P} could play {obj} so.
        So {P} had learned to play {obj} {near} the {fixture}.
        Now {P} could play {number} songs on {obj}.
        "I could play the {noun} all {time}!" cried {P:name} {manner}.
        "You could play {obj} for the {relative}," said {a animal}.
        """,
        needs="solved",
        gives="ended",
        mood="glad",
    ),
)

CRAFTS = (BUILD, REPAIR, GROW, LEARN)
PLOTS: dict[str, Plot] = {plot.family: plot for plot in QUESTS + CRAFTS + BONDS}
