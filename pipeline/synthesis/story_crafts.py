"""Plots of making something: build, repair, grow and learn.

In: nothing. Out: `CRAFTS`. A block is one event, a line one wording (`story_world` gives the slots). Every goal wording
names the wanted thing and matches its `goal_sign`; every ending wording names the thing and matches its `ending_sign`.
"""

from pipeline.synthesis.story_events import Plot, event

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
