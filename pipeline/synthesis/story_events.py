"""Events: what has to hold before one, what it changes, and its wordings; and the events that all plots share.

In: nothing. Out: `Event`, `Plot`, and the shared events. A line of a wording block is one wording (see `story_world`);
a wording with a quotation mark is used only in stories with dialogue. A plot gives the events of its own: goal, attempt,
deed, ending. The checker's patterns for goal and ending stand beside the plot, so that the two cannot drift apart.

No shared wording matches an ending pattern, or a story without its ending could pass; the tests hold that.
"""

from dataclasses import dataclass


def wordings(block: str) -> tuple[str, ...]:
    """The wordings of a block, one a line."""
    return tuple(line.strip() for line in block.strip().splitlines())


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that can happen once in a story."""

    name: str
    needs: frozenset[str] = frozenset()  # facts that must hold before
    bars: frozenset[str] = frozenset()  # facts that must not hold before
    gives: frozenset[str] = frozenset()  # facts that hold after
    mood: str | None = None  # the protagonist's feeling after, a key of FEELINGS
    plain: tuple[str, ...]
    spoken: tuple[str, ...] = ()


def event(name: str, block: str, *, needs: str = "", bars: str = "", gives: str = "", mood: str | None = None) -> Event:
    """An event from its wording block and its facts as words."""
    lines = wordings(block)
    return Event(
        name=name,
        needs=frozenset(needs.split()),
        bars=frozenset(bars.split()),
        gives=frozenset(gives.split()),
        mood=mood,
        plain=tuple(line for line in lines if '"' not in line),
        spoken=tuple(line for line in lines if '"' in line),
    )


@dataclass(frozen=True, kw_only=True)
class Plot:
    """A family of stories: goal and obstacle, and how such a story ends."""

    family: str
    things: tuple[str, ...]  # keys of THINGS: what the story can be about
    aims: tuple[str, ...]  # the goal as an infinitive
    goal_sign: str  # regular expression that only this family's goal matches
    ending_sign: str  # regular expression that this family's ending matches, and nothing before it
    goal: Event
    attempt: Event
    deed: Event
    ending: Event
    holder: str = "P"  # who has the thing at the end
    partner: bool = False  # the goal itself brings the friend in


# The name is the first word of a story: a small model finds it there again. With the name in mid-sentence it had not
# begun to copy names after 300 steps, with the name first it had.
INTRODUCTION = event(
    "introduction",
    """
    {P:name} was {a P.trait} {P.kind} who lived {near} the {place}.
    {P:name} was {a P.trait} {P.kind}.
    {P:name} was {a P.kind} who sold {food} {near} the {place}.
    {P:name} was {a P.trait} {P.kind} who loved {food}.
    {P:name} was {a P.kind} in {a age} house {near} the {place}.
    {P:name} was {a P.trait} {P.kind} who worked for the {relative}.
    {P:name} was {a P.kind} and everyone at the {place} knew {P:him}.
    """,
    gives="introduced",
)

REASON = event(
    "reason",
    """
    {P} wanted to {aim}, because nothing else was so {fine}.
    {P} liked {obj} more than {food}, so {P} wanted to {aim} by {clock}.
    Every {time}, {P} dreamed of {obj} and wanted to {aim}.
    The {relative} said that {a noun} was {fine}, so {P} had to {aim}.
    {P} {did} and wanted to {aim} {why}.
    For {number} days {P} wanted to {aim}, {why}.
    {P} told the {relative} about {obj} and wanted to {aim}.
    To {aim} meant a lot to {P:name}, {why}.
    "I have to {aim}," {P:name} told the {relative}.
    "To {aim} would be {fine}," said {P:name}.
    "I would give all my {food} to {aim}," said {P:name} to {a animal}.
    """,
    needs="wanting",
    bars="tried",
    mood="keen",
)

SETBACK = event(
    "setback",
    """
    But {mishap}, so {P} felt {P.feeling} and could not {aim}.
    Then {mishap}, and {P} {did} because {P} could not {aim}.
    But {mishap}, and {P} was too {P.feeling} to {aim}.
    {P} could not {aim}, because {mishap}.
    Just then {mishap}, so {P} did not {aim} and {did}.
    {P} had almost begun to {aim}, but {mishap}.
    {P} tried to {aim} again, but {mishap}.
    But {mishap}. "Now I will never {aim}!" cried {P:name} {manner}.
    "Oh no, I cannot {aim}!" cried {P:name}, because {mishap}.
    Then {mishap}. "I am too {P.feeling} to {aim}," said {P:name}.
    """,
    needs="tried",
    bars="solved idea",
    gives="failed",
    mood="low",
)

GUESS = event(
    "guess",
    """
    {P} guessed that {gear} would help to {aim}, but that was wrong.
    First {P} thought that {a animal} could {aim}, but the {same animal} only {did}.
    {P} was sure that the {relative} knew how to {aim}, but the {same relative} only {did}.
    {P} believed that {food} would help to {aim}, but that was wrong.
    {P} saw a sign that said how to {aim}, but {P} read the sign wrong and felt {P.feeling}.
    {P} followed {a animal} to {aim}, but the {same animal} {went} the wrong way.
    {P} {went} to the {where} to {aim}, but there was only {a fixture}.
    {P} tried {gear}, but that was the wrong way to {aim}.
    "Surely {a animal} can {aim}," said {P:name}, but the {same animal} just {did}.
    "I bet that {gear} will help to {aim}," said {P:name}, but that was wrong.
    "The {relative} can {aim}," said {P:name}, but the {same relative} only {did}.
    """,
    needs="wanting",
    bars="solved idea",
    gives="guessed",
    mood="low",
)

MEETING = event(
    "meeting",
    """
    Then {a F.trait} {F.kind} named {F:name} came by with {food} and wanted to help {P:name} {aim}.
    {P} met {a F.trait} {F.kind} called {F:name} by the {fixture}, who also wanted to {aim}.
    A neighbor named {F:name}, {a F.trait} {F.kind}, {went} over from the {where} to help {P:name} {aim}.
    On the way to the {new place}, {P} met {a F.trait} {F.kind} named {F:name}, who could help to {aim}.
    Just then {a F.trait} {F.kind} called {F:name} {went} past with {gear} and saw {P:name}.
    Near the {where}, {a F.kind} named {F:name} shared {food} with {P:name} and wanted to help {aim}.
    At {clock}, {a F.trait} {F.kind} named {F:name} {went} out of the {where} to help {P:name} {aim}.
    Luckily, {a F.trait} {F.kind} called {F:name} knew how to {aim} and told {P:name}.
    "Can I help you to {aim}?" asked {a F.trait} {F.kind} named {F:name}.
    "Why do you look so {P.feeling}?" asked {a F.kind} called {F:name}, who carried {gear}.
    "I know how to {aim}," said {a F.trait} {F.kind} named {F:name} to {P:name}.
    "Please help me to {aim}," said {P:name} to {a F.trait} {F.kind} called {F:name}.
    """,
    needs="wanting",
    bars="friend solved idea",
    gives="friend",
)

ADVICE = event(
    "advice",
    """
    {F} {did} and showed {P:name} how {gear} could help to {aim}.
    {F} brought {gear} from the {where}, so that {P} could {aim}.
    {F} gave {P:name} some {food} and {gear}, because one must be strong to {aim}.
    Then {F} remembered {gear} {spot}, which was just right to {aim}.
    {F} knew that {gear} might help to {aim}, so {F} {went} to the {where}.
    {F} told {P:name} about {gear} and how to {aim}.
    Because {F} was {F.trait}, {F} lent {P:name} {gear} to {aim}.
    {F} and {P:name} sat {spot} and made a plan to {aim}.
    "We need {gear}," said {F:name}, "and then we can {aim}."
    "Do not give up," said {F:name}, who held {gear} to {aim}.
    "Have you tried {gear} to {aim}?" asked {F:name}, and {P:name} {did}.
    "With {gear} we can {aim}," said {F:name} to {P:name}.
    """,
    needs="friend tried",
    bars="solved",
    gives="idea",
    mood="keen",
)

IDEA = event(
    "idea",
    """
    {P} sat {spot} and thought, until {gear} gave {P:him} an idea how to {aim}.
    Then {P} saw {gear} {spot} and knew at last how to {aim}.
    {P} ate some {food} and {did}, and then a plan to {aim} came to mind.
    {P} saw {gear} in the {where} and had an idea how to {aim}.
    {P} asked the {relative} for {gear}, because that might help to {aim}.
    {a sound} from the {where} gave {P:him} {a fine} idea how to {aim}.
    {P} was {P.trait}, so {P} took {gear} and made a new plan to {aim}.
    {P} remembered what the {relative} said and got {gear} to {aim}.
    "I know how to {aim}!" cried {P:name}, who saw {gear} {spot}.
    "Take {gear}," said the {relative}, "and you can {aim}."
    "If I use {gear}, I can {aim}," said {P:name}.
    """,
    needs="tried",
    bars="friend solved",
    gives="idea",
    mood="keen",
)

CODA = event(
    "coda",
    """
    From that {time} on, {H} kept {obj} {spot}.
    That {time}, {H} fell asleep {spot} with {obj} {near} the {fixture}.
    {H} was {H.feeling}, because {obj} was so {fine}.
    Now {H} smiles at {obj} every {weather} {time}.
    After that, {H} showed {obj} to {a animal} at the {where}, and the {same animal} {did}.
    {H} ate {food} with the {relative} and looked at {obj}.
    So {H} put {obj} {spot} and {did}.
    Never again did {H} forget {obj}, {why}.
    At {clock}, {H} sat {spot} with {obj} and some {food}.
    Even the {relative} {did} at {obj}, and {H} felt {H.feeling}.
    "What {a fine} {noun}," said {H:name}, and the {relative} {did}.
    "This {noun} is {fine}," said {H:name}, and {a animal} {did}.
    "I will never forget this {noun}," said {H:name} at the {where}.
    """,
    needs="ended",
    gives="done",
)

# One more sentence after an event, read from the state alone. Each has at least two lists, or it would come back.
MOMENTS = wordings(
    """
    The {weather} {where} smelled of {smell}, and {P} felt {P.feeling} about {obj}.
    {P} was {P.feeling}, so {P} {did} {spot} and thought of {obj}.
    {P} {went} past {a fixture} and thought of how to {aim}.
    {P} felt {P.feeling}, but still wanted to {aim}.
    All {time} long, {P} {did} and thought of {obj} {why}.
    {P} {went} from the {place} to the {new place} to {aim}.
    {a sound} came from the {where}, but {P} still wanted to {aim}.
    {P} ate some {food} {spot} and thought of {obj}.
    {P} hummed a song about {obj} and {went} along the {where}.
    """
)
