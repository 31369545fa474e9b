"""Events: their preconditions, effects and wordings; and the events that all plots share.

In: nothing. Out: `Event`, `Plot`, the shared events, and `BONDS`, plots between two or with oneself: gift, share,
contest, brave and mystery. A line of a wording block is one wording (see `story_world`); a wording with a quotation
mark is used only in stories with dialogue. A plot has four events of its own: goal, attempt, deed, ending. The
checker's patterns for goal and ending are next to the plot, so that the two cannot drift apart: every goal wording
names the wanted thing and matches its `goal_sign`; every ending wording names the thing and matches its `ending_sign`.

No shared wording matches an ending pattern, or a story without its ending could pass; the tests check that.
"""

from dataclasses import dataclass


def wordings(block: str) -> tuple[str, ...]:
    """The wordings of a block, one a line."""
    return tuple(line.strip() for line in block.strip().splitlines())


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that can happen once in a story."""

    name: str
    needs: frozenset[str] = frozenset()  # facts that must be true before
    bars: frozenset[str] = frozenset()  # facts that must be false before
    gives: frozenset[str] = frozenset()  # facts that are true after
    mood: str | None = None  # the protagonist's feeling after, a key of FEELINGS
    plain: tuple[str, ...]
    spoken: tuple[str, ...] = ()


def event(name: str, block: str, *, needs: str = "", bars: str = "", gives: str = "", mood: str | None = None) -> Event:
    """An event from its wording block, with its facts as space-separated words."""
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
    """A family of stories: its goal, obstacle and ending."""

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
    partner: bool = False  # the goal itself introduces the friend


# The name is the first word of a story, where a small model finds it again. With the name in mid-sentence it had not
# begun to copy names after 300 steps; with the name first it had.
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

# Sentences after an event that depend only on the state. Each has at least two lists, or it would be repeated.
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


# -- plots between two, or with oneself --------------------------------------------------------------------------------


GIFT = Plot(
    family="gift",
    things=("treasure", "instrument", "plant"),
    aims=("give {obj} to {F:name}", "give {F:name} {obj}"),
    goal_sign=r"\b(birthday|present)\b",
    ending_sign=r"\b(thanked|thank you)\b",
    holder="F",
    partner=True,
    goal=event(
        "birthday",
        """
        Soon {P:his} friend {F:name}, {a F.trait} {F.kind}, had a birthday and wanted {a full}.
        {P} needed a present for {a F.trait} {F.kind} named {F:name}, and thought of {a full}.
        On {weekday} was the birthday of {a F.kind} called {F:name}, who wanted {a full}.
        {P} wanted to give {a full} as a present to {P:his} friend {F:name} the {F.kind}.
        The best present for {a F.trait} {F.kind} called {F:name} was {a full}.
        {P} saw {a full} at the {where}, {a fine} present for {a F.kind} named {F:name}.
        "What birthday present do you want?" {P:name} asked {P:his} friend {F:name}. "I want {a full}!"
        "My friend {F:name} wants {a full} as a birthday present," said {P:name} {manner}.
        """,
        gives="wanting friend",
        mood="keen",
    ),
    attempt=event(
        "shopping",
        """
        {P} {went} to the {where} for {obj}, but there was just some {stuff}.
        {P} saved {number} coins for {obj}, but that was not enough.
        {P} asked the {relative} for {obj}, but the {same relative} {did}.
        {P} looked for {obj} {spot}, because {F} loved {a noun}.
        {P} wanted to hide {obj} {spot}, but {a animal} saw everything.
        {P} began to wrap {obj} in some {stuff}, but the {same stuff} was too {age}.
        "Do you have {a noun}?" {P:name} asked {a animal} at the {where}.
        "The {noun} must stay a secret," said {P:name} to the {relative}.
        """,
        needs="wanting",
        gives="tried",
    ),
    deed=event(
        "wrapping",
        """
        So {P} put {obj} into {a age} box with some {stuff}.
        {P} carried {obj} to the {where} of {F:name}.
        {P} wrapped {obj} in {stuff} and tied a bow of {stuff}.
        {P} cleaned {obj} with {a tool} until {obj} was {fine}.
        {P} hid {obj} {spot} and called {F:name}.
        With {gear}, {P} made {obj} ready and {went} to {F:name}.
        """,
        needs="idea",
        gives="solved",
    ),
    ending=event(
        "giving",
        """
        {F} saw {obj} and thanked {P:name}, who {did}.
        At last {F} held {obj} and thanked {P:name} {manner}.
        {F} {did} at {obj}, thanked {P:name} and shared some {food}.
        So {F} got {obj} {spot} and thanked {P:name} with some {food}.
        {F} thanked {P:name} for {obj}, because {a noun} was what {F} wanted.
        With {obj} {spot}, {F} {did} and thanked {P:name}.
        "Oh, thank you for {obj}!" cried {F:name}, and {P:name} {did}.
        "{a noun}! I thank you, {P:name}," said {F:name}, who thanked the {relative} too.
        """,
        needs="solved",
        gives="ended",
        mood="glad",
    ),
)

SHARE = Plot(
    family="share",
    things=("treasure", "craft", "instrument"),
    aims=("share {obj}", "share {obj} with {F:name}"),
    goal_sign=r"\b(quarrel|argued)\b",
    ending_sign=r"\b(turns|shared the)\b",
    partner=True,
    goal=event(
        "quarrel",
        """
        {P} wanted {a full}, but {a F.trait} {F.kind} named {F:name} wanted {obj} too, so they argued.
        One {time}, {P} argued with {P:his} friend {F:name}, {a F.trait} {F.kind}, about {a full}.
        There was a quarrel about {a full}, for {a F.kind} named {F:name} wanted {obj} as well.
        {P} saw {a full} {spot} and argued about {obj} with {a F.kind} called {F:name}.
        There was just one {full}, so {P} argued with {a F.trait} {F.kind} named {F:name}.
        The {relative} brought {a full}, and {P} argued with {P:his} friend {F:name} the {F.kind}.
        A quarrel began, because {P} and {P:his} friend {F:name}, {a F.kind}, both wanted {a full}.
        "The {full} is mine!" cried {P:name}, and argued with {a F.kind} called {F:name}.
        "I want that {full}!" {P:name} argued. "No, I do," said {P:his} friend {F:name}, {a F.kind}.
        """,
        gives="wanting friend",
        mood="low",
    ),
    attempt=event(
        "tug",
        """
        {P} pulled {obj} to one side, and {F} pulled {obj} to the other.
        {P} hid {obj} {spot}, but {F} saw everything and {did}.
        {P} {went} to the {new place} with {obj}, so {F} {did}.
        {F} took {obj} and {went} {spot}, so {P} {did}.
        {P} asked the {relative} who could have {obj}, but the {same relative} {did}.
        {P} offered {F:name} some {food} for {obj}, but {F} {did}.
        "Give me {obj}!" said {F:name}, but {P:name} held {obj} {manner}.
        "I saw {obj} first," said {P:name}, and {F:name} {did}.
        """,
        needs="wanting",
        gives="tried",
    ),
    deed=event(
        "peace",
        """
        So {P} gave {F:name} some {food} and said sorry.
        {P} put {obj} {spot}, and they looked at {obj}.
        {P} and {F:name} sat {spot} and talked about {obj}.
        {F} brought {gear}, so they could use {obj} as a team.
        {P} {went} to {F:name} with {obj}, because a friend is worth more than {a noun}.
        With {gear}, {P} marked a time for each of them on the {fixture} by {obj}.
        """,
        needs="idea",
        gives="solved",
    ),
    ending=event(
        "turns",
        """
        So {P} and {F:name} took turns with {obj} {spot}.
        From then on they took turns with {obj}, and the {relative} {did}.
        At last {P} and {F:name} shared the {noun} and some {food}.
        {P} shared the {full} with {F:name}, and both of them {did}.
        {P} had {obj} at {clock} and then {F} had {obj}, so both took turns.
        They shared the {noun} at the {where} and felt {P.feeling}.
        "Let us take turns with {obj}," said {P:name}, and {F:name} {did}.
        "To take turns is fair," said {F:name}, so {P:name} held {obj} {manner}.
        """,
        needs="solved",
        gives="ended",
        mood="glad",
    ),
)

CONTEST = Plot(
    family="contest",
    things=("prize",),
    aims=("win {obj}", "win the {full}"),
    goal_sign=r"\b(contest|race)\b",
    ending_sign=r"\b(won|winner)\b",
    goal=event(
        "call",
        """
        There was a contest at the {where}, and {P} wanted to win {a full}.
        In the {weather} race to the {where}, {P} wanted to win {a full}.
        The {relative} held a contest for the best {food}, with {a full} as the reward.
        {P} heard of a race on {weekday} and wanted to win {a full}.
        {a animal} said that {a full} was the reward of a race, so {P} wanted to run.
        Each {weather} {time} there was a contest, and {P} wanted to win {a full}.
        {P} wanted to win {a full} in the {tool} contest of the {relative}.
        "I want to win {a full} in the race," said {P:name} {manner}.
        "Come to the contest and win {a full}!" cried the {relative}, so {P:name} {did}.
        """,
        gives="wanting",
        mood="keen",
    ),
    attempt=event(
        "training",
        """
        {P} trained for {obj} at the {new place}, but {a animal} was faster.
        {P} ran {number} times round the {where} for {obj} and {did}.
        {P} lifted {a fixture} to get strong for {obj}.
        {P} ate {food} each {time} to get {obj}, but fell {spot}.
        {P} practiced with {a tool}, because {obj} was hard to get.
        {P} {went} past the {where} and thought of {obj}, but {a animal} was there first.
        "Who else wants {obj}?" asked {P:name}, and {a animal} {did}.
        "For the {noun} I must be fast," said {P:name} {manner}.
        """,
        needs="wanting",
        gives="tried",
    ),
    deed=event(
        "run",
        """
        So {P} took {gear} and ran for {obj}.
        {P} {went} past {a animal} and past {a fixture} with eyes on {obj}.
        With {gear}, {P} jumped over {a fixture} toward {obj}.
        {P} ran past the {where} until {obj} was near.
        {P} gave the {relative} with {obj} the best {food} of all.
        {P} {went} to the end of the {where} where {obj} was.
        """,
        needs="idea",
        gives="solved",
    ),
    ending=event(
        "victory",
        """
        At last {P} won {obj}, and {a animal} {did}.
        So {P} was the winner of {obj} and {did} {spot}.
        The {relative} gave {obj} to the winner, and that was {P:name}.
        {P} won {obj}, so the {relative} {did}.
        Everyone at the {where} {did}, because {P} had won {obj}.
        {P} held {obj} up, for {P} had won with {gear}.
        "I have won {obj}!" cried {P:name}, who {did} {spot}.
        "The winner of {obj} is {P:name}," said the {relative}.
        """,
        needs="solved",
        gives="ended",
        mood="glad",
    ),
)

BRAVE = Plot(
    family="brave",
    things=("treasure", "instrument"),
    aims=("fetch {obj}", "go and fetch {obj}"),
    goal_sign=r"\b(afraid|scared)\b",
    ending_sign=r"\b(no longer|courage)\b",
    goal=event(
        "fear",
        """
        {P} wanted {a full} from the {where}, but {P} was afraid of the dark there.
        The {full} lay {spot}, but {P} was too scared to fetch {obj}.
        {P} wanted to fetch {a full} {spot}, but was afraid of {a animal}.
        The {relative} asked for {a full} from the {where}, but {P} was scared of the {sound} there.
        In {a fixture} lay {a full}, which {P} wanted, but {P} was afraid.
        {P} was scared of the {where}, but {a full} was there, and {P} wanted {obj}.
        At {clock}, {P} wanted {a full} {spot}, but {a sound} made {P:him} afraid.
        "I want the {full}, but I am afraid," said {P:name} {spot}.
        "I am scared of the {sound}," said {P:name}, who wanted {a full} {spot}.
        """,
        gives="wanting",
        mood="low",
    ),
    attempt=event(
        "first steps",
        """
        {P} {went} toward {obj}, but {a sound} came from the {where}.
        {P} took {number} steps to {obj}, but {a animal} {did} in the dark.
        {P} looked at {obj} from {a fixture} and {did}.
        {P} {went} to the {new place} for {obj}, but turned back at the {fixture}.
        {P} held {a tool} and {went} toward {obj}, but the {same tool} fell with {a sound}.
        {P} {went} to {obj} in the dark, but hit {a fixture}.
        "Who is there?" called {P:name} near {obj}, but heard only {a sound}.
        "The {noun} is just over there," said {P:name}, and {did}.
        """,
        needs="wanting",
        gives="tried",
    ),
    deed=event(
        "walk",
        """
        So {P} took {gear} and {went} into the dark for {obj}.
        {P} sang and {went} past {a fixture} to {obj}.
        With {gear}, {P} saw that the {sound} was only {a animal} near {obj}.
        {P} counted to {number} and {went} toward {obj}.
        {P} thought of {food} and {went} on past the {where} to {obj}.
        {P} lit {a tool} and looked for {obj} {spot}.
        """,
        needs="idea",
        gives="solved",
    ),
    ending=event(
        "courage",
        """
        {P} took {obj} and was no longer afraid of the {where}.
        At last {P} had {obj}, for {P} had shown courage {spot}.
        With {obj} {spot}, {P} {did} and no longer feared the {sound}.
        So {P} got {obj} with much courage, and the {relative} {did}.
        {P} held {obj} and was no longer scared of {a animal}.
        The {relative} {did} at {obj}, because {P} had such courage.
        "I have {obj} and am no longer afraid!" cried {P:name} {manner}.
        "You had the courage to get {obj}," said the {relative}, so {P:name} {did}.
        """,
        needs="solved",
        gives="ended",
        mood="glad",
    ),
)

MYSTERY = Plot(
    family="mystery",
    things=("treasure", "instrument", "prize", "plant"),
    aims=("solve the case of {obj}", "solve the case of the {noun}"),
    goal_sign=r"\b(vanished|thief)\b",
    ending_sign=r"\b(solved|mystery)\b",
    goal=event(
        "theft",
        """
        One {weather} {time}, {a full} vanished from the {where}, and {P} wanted to know why.
        {P} had {a full} {spot}, but {obj} vanished with {a sound}.
        A thief had taken {a full} from the {relative}, so {P} wanted to help.
        The {full} of the {relative} vanished, and {P} wanted to get {obj} back.
        {P} saw that {a full} had vanished from {a fixture}.
        At {clock}, a thief took {a full} {spot}, so {P} wanted to get {obj} back.
        {P} heard that {a full} had vanished {near} the {where}.
        "A thief has taken my {full}!" cried {P:name}, who {did} {spot}.
        "Where is the {full}?" asked the {relative}, for {obj} had vanished, and {P:name} {did}.
        """,
        gives="wanting",
        mood="keen",
    ),
    attempt=event(
        "clues",
        """
        {P} looked for clues to {obj} {spot} and saw some {stuff}.
        {P} asked {a animal} about {obj}, but the {same animal} {did}.
        {P} followed {number} prints from {a fixture} to the {where}.
        {P} wrote down who had been near {obj}: the {relative} and {a animal}.
        {P} smelled {smell} where {obj} had been and {went} to the {new place}.
        {P} looked at {obj} in a picture and {did} {spot}.
        "Where were you at {clock}?" {P:name} asked {a animal} about {obj}.
        "This {stuff} is a clue to {obj}," said {P:name}.
        """,
        needs="wanting",
        gives="tried",
    ),
    deed=event(
        "trap",
        """
        So {P} put {gear} {spot} and waited for {obj}.
        {P} followed the {smell} to {a fixture} and saw {obj} there.
        With {gear}, {P} opened {a fixture} and saw {a animal} with {obj}.
        {P} {went} behind {a animal} to the {where}, and there was {obj}.
        {P} put some {food}, and {a animal} came with {obj}.
        {P} heard {a sound} and saw {obj} under some {stuff}.
        """,
        needs="idea",
        gives="solved",
    ),
    ending=event(
        "answer",
        """
        So {P} solved the mystery: {a animal} had borne {obj} off to the {where}.
        The mystery of {obj} was over, because {a animal} said sorry.
        At last {P} solved the case and gave {obj} to the {relative}.
        {P} had solved the mystery of {obj}, and the {relative} {did}.
        There was just {a animal} who liked {obj}, so the mystery was solved.
        The {relative} got {obj} back and {did}, for {P} had solved the case.
        "The mystery of {obj} is solved!" cried {P:name} {manner}.
        "You have solved the case of {obj}," said the {relative}, so {P:name} {did}.
        """,
        needs="solved",
        gives="ended",
        mood="glad",
    ),
)

BONDS = (GIFT, SHARE, CONTEST, BRAVE, MYSTERY)
