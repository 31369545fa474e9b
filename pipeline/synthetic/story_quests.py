"""Plots of getting something: lost, rescue, trade, return and deliver.

In: nothing. Out: `QUESTS`. A block is one event, a line one wording (the slots are in `story_world`). Every goal
wording names the wanted thing and matches its `goal_sign`; every ending wording names the thing and matches its
`ending_sign`.
"""

from pipeline.synthetic.story_events import Plot, event

LOST = Plot(
    family="lost",
    things=("treasure", "instrument"),
    aims=("find {obj}", "find the lost {noun}"),
    goal_sign=r"\b(lost|missing)\b",
    ending_sign=r"\bfound\b",
    goal=event(
        "loss",
        """
        {P} had lost {a full} {spot} and wanted to find the {noun} by {clock}.
        One {weather} {time}, {a full} was missing, and {P} wanted to find {obj}.
        {P} had {a full}, but now the {noun} was lost, so {P} felt {P.feeling}.
        The {full} of {P:name} was lost {near} the {where}, and {P} wanted {obj} back.
        {P} looked {spot}, but {a full} was missing from the {fixture}, and {P} wanted {obj} back.
        The {relative} gave {P:him} {a full}, but {P} lost {obj} {spot}.
        {P} {went} home from the {where} and saw that {a full} was missing.
        "I have lost my {full}!" cried {P:name}, who {did} {spot}.
        "My {full} is missing," said {P:name}. "I want to look {spot}."
        """,
        gives="wanting",
        mood="low",
    ),
    attempt=event(
        "search",
        """
        {P} looked {spot}, but {obj} was not there.
        {P} searched the {new place}, but there was only {stuff} and no {noun}.
        First {P} looked {spot} and then {spot}, but saw no {noun}.
        {P} {went} to the {where} and asked {a animal} about {obj}, but the {same animal} {did}.
        {P} lifted {a fixture} to look for {obj}, but there was just some {stuff}.
        {P} pulled {a tool} out of the {fixture}, but that was not {obj}.
        "Have you seen my {noun}?" {P:name} asked {a animal}, but the {same animal} {did}.
        "Is there {a noun} at the {where}?" {P:name} asked the {relative}.
        """,
        needs="wanting",
        gives="tried",
    ),
    deed=event(
        "trail",
        """
        So {P} used {gear} to look {spot}, and something {colour} shone.
        {P} followed a trail of {stuff} from the {where} to look for {obj}.
        {P} opened {a fixture} to look for {obj}.
        {P} heard {a sound} {spot} and thought of {obj}.
        {P} dug for {obj} {spot} until {stuff} flew up.
        {P} {went} back to the {new place} to look for {obj} {spot}.
        """,
        needs="idea",
        gives="solved",
    ),
    ending=event(
        "finding",
        """
        There {P} found {obj} {spot}, and {P} {did}.
        At last {P} found {obj}, because {P} had looked {spot}.
        {P} found {obj} under some {stuff} and {did}.
        So {obj} was found {spot}, and {P} felt {P.feeling}.
        Behind {a fixture}, {P} found {obj} and {did}.
        {P} {did} with joy, for {P} had found {obj} {near} the {where}.
        "I have found my {noun}!" cried {P:name}, and {a animal} {did}.
        "Look, I found {obj} {spot}!" said {P:name} to the {relative}.
        """,
        needs="solved",
        gives="ended",
        mood="glad",
    ),
)

RESCUE = Plot(
    family="rescue",
    things=("treasure", "craft"),
    aims=("free {obj}", "set {obj} free"),
    goal_sign=r"\b(stuck|trapped)\b",
    ending_sign=r"\b(safe|at last free)\b",
    goal=event(
        "trap",
        """
        One {time}, {a full} got stuck {spot}, and {P} wanted to free {obj}.
        {P} saw that {a full} was trapped {spot} and wanted to pull {obj} loose.
        {a weather} wind left {a full} stuck {near} the {where}, so {P} wanted to help.
        The {relative}'s {full} was stuck in some {stuff}, and {P} wanted to get {obj} out.
        {P} was playing with {a full}, but {obj} got stuck {spot}.
        At the {where}, {a full} was trapped in {a fixture}, and {P} wanted to free {obj}.
        With {a sound}, {a full} fell and got stuck {spot}, so {P} felt {P.feeling}.
        "My {full} is stuck {spot}!" cried {P:name} at the {where}.
        "Help, my {full} is trapped!" cried {P:name} {manner}.
        """,
        gives="wanting",
        mood="low",
    ),
    attempt=event(
        "pull",
        """
        {P} pulled at {obj} with {a tool}, but {obj} did not move.
        {P} climbed on {a fixture} to reach {obj}, but the {same fixture} was too low.
        {P} pushed {obj}, but there was only {a sound}.
        {P} threw {a tool} at {obj}, but missed and {did}.
        {P} shook the {fixture} until some {stuff} fell, but {obj} stayed there.
        {P} reached for {obj} {number} times, but {obj} was too far away.
        "Come loose, {noun}!" said {P:name}, but {obj} stayed {spot}.
        "If I pull {manner}, the {noun} will move," said {P:name}, but nothing happened.
        """,
        needs="wanting",
        gives="tried",
    ),
    deed=event(
        "lever",
        """
        So {P} pushed {gear} under {obj} and counted to {number}.
        {P} tied {a tool} to {obj} and pulled.
        {P} rubbed {food} on the {fixture}, so {obj} began to slip.
        {P} cut some {stuff} with {a tool} and held {obj}.
        With {gear}, {P} lifted {obj} bit by bit over the {fixture}.
        {P} put some {stuff}, and {obj} moved with {a sound}.
        """,
        needs="idea",
        gives="solved",
    ),
    ending=event(
        "freedom",
        """
        With {a sound}, {obj} came down and was safe {spot}.
        At last {obj} was safe, and {P} {did}.
        {P} held {obj}, for {obj} was safe again {near} the {where}.
        Soon {obj} was safe in the {place}, so {P} felt {P.feeling}.
        Now {obj} was at last free, and {P} {did}.
        {P} carried {obj} to a safe place {spot} and {did}.
        "The {noun} is safe!" cried {P:name}, and the {relative} {did}.
        "You are safe now, little {noun}," said {P:name} {spot}.
        """,
        needs="solved",
        gives="ended",
        mood="glad",
    ),
)

TRADE = Plot(
    family="trade",
    things=("treasure", "instrument", "craft"),
    aims=("trade for {obj}", "make a trade for {obj}"),
    goal_sign=r"\b(buy|cost|price)\b",
    ending_sign=r"\b(traded|swapped)\b",
    goal=event(
        "shop",
        """
        At the {where}, {P} saw {a full} and wanted to buy {obj}, but had no money.
        The {relative} had {a full}, and {P} wanted to buy {obj} with {food}.
        {P} wanted to buy {a full} at the {where}, but the price was {number} coins.
        {a animal} sold {a full}, which {P} wanted, but {obj} cost {number} coins.
        {P} wanted {a full} so much, but the {relative} said that {obj} cost too much.
        In {a age} shop, {P} saw {a full} and asked the price {manner}.
        {P} dreamed that one could buy {a full} at the {where} for some {stuff}.
        "What is the price of that {full}?" {P:name} asked the {relative}.
        "I want to buy the {full}," said {P:name} at the {where}, but had only {food}.
        """,
        gives="wanting",
    ),
    attempt=event(
        "offer",
        """
        {P} offered some {food} for {obj}, but the {relative} {did}.
        {P} held out {a tool}, but that was not enough for {obj}.
        {P} counted the coins for {obj}, but there were only {number}.
        {P} promised to sweep the {where} for {obj}, but the {relative} did not agree.
        {P} tried to sell some {stuff} for {obj}, but nobody at the {where} wanted any.
        {P} asked the {relative} for coins to get {obj}, but the {same relative} {did}.
        "Will you take {food} for {obj}?" asked {P:name}, but the {relative} said no.
        "I can give you {gear} for {obj}," said {P:name}, but that was not enough.
        """,
        needs="wanting",
        gives="tried",
    ),
    deed=event(
        "work",
        """
        So {P} worked {spot} for {number} days to earn {obj}.
        {P} cooked {food} and {food} for the {relative} who had {obj}.
        {P} carried {stuff:pieces} to the {where}, which was hard but earned enough for {obj}.
        {P} asked what the {relative} needed for {obj}, and that was some {stuff}.
        {P} gathered {stuff} {spot} and {went} to where {obj} was.
        {P} brought {gear} to the {where}, because the {relative} with {obj} liked such things.
        """,
        needs="idea",
        gives="solved",
    ),
    ending=event(
        "bargain",
        """
        So {P} traded some {stuff} for {obj} and {did}.
        The {relative} {did} and traded {obj} for {food}.
        At last {P} swapped {gear} for {obj} at the {where}.
        {P} and the {relative} shook hands and swapped {obj} for {food}.
        The {relative} was {P.trait} too and traded {obj} {why}.
        {P} traded {food} for {obj}, so {P} felt {P.feeling}.
        "I traded {stuff} for {a noun}!" cried {P:name}, who {did}.
        "We have traded well," said the {relative}, and {P:name} took {obj}.
        """,
        needs="solved",
        gives="ended",
        mood="glad",
    ),
)

RETURN = Plot(
    family="return",
    things=("treasure", "instrument", "craft"),
    aims=("return {obj}", "return {obj} to {F:name}"),
    goal_sign=r"\bborrowed\b",
    ending_sign=r"\breturned\b",
    holder="F",
    partner=True,
    goal=event(
        "loan",
        """
        {P} had borrowed {a full} from {a F.kind} named {F:name} and wanted to give {obj} back by {clock}.
        The {full} was borrowed from {P:his} friend {F:name}, {a F.trait} {F.kind}.
        {P} borrowed {a full} from {a F.trait} {F.kind} called {F:name} and kept {obj} {spot}.
        One {weather} {time}, {P} borrowed {a full} from {P:his} friend {F:name} the {F.kind}.
        {P} had promised to bring back {a full} borrowed from {a F.trait} {F.kind} named {F:name}.
        For {number} days {P} had {a full}, borrowed from {a F.kind} called {F:name}.
        "I borrowed this {full}," said {P:name}, who wanted to bring {obj} back to {P:his} friend {F:name}.
        "May I have my borrowed {full} back?" asked {a F.trait} {F.kind} named {F:name}.
        """,
        gives="wanting friend",
    ),
    attempt=event(
        "way back",
        """
        {P} {went} to the {where} with {obj}, but {F} was not at home.
        {P} took {obj} out of {a fixture} and saw some {stuff} on the {noun}.
        {P} put {obj} in {a fixture} and {went} toward the {where}.
        {P} looked at {obj} and saw some {food} on one side.
        {P} knocked at the {where} to bring {obj} back, but heard only {a sound}.
        {P} {went} past the {where} with {obj} and a bag of {food}.
        "Is {F:name} at the {where}?" {P:name} asked {a animal}, and held {obj}.
        "This {noun} must go back," said {P:name} to the {relative}.
        """,
        needs="wanting",
        gives="tried",
    ),
    deed=event(
        "care",
        """
        So {P} wiped some {stuff} off {obj} with {a tool}.
        {P} packed {obj} in some {stuff} and {went} to see {F:name}.
        {P} washed {obj} {spot} and dried {obj} with some {stuff}.
        With {gear}, {P} made {obj} look {fine} and {went} to the {where}.
        {P} carried {obj} past the {where} and the {where}.
        {P} put some {food} beside {obj} as a thank-you for {F:name}.
        """,
        needs="idea",
        gives="solved",
    ),
    ending=event(
        "handing back",
        """
        So {P} returned {obj} to {F:name}, who {did} {spot}.
        At last {obj} was returned to {F:name}, and both of them {did}.
        {P} returned {obj}, and {F} {did} with joy.
        When {P} returned {obj}, {F} gave {P:name} some {food}.
        {P} kept the promise and returned {obj} to {F:name} at the {where}.
        That {time} {P} returned {obj}, because {F} was such {a F.trait} friend.
        "You returned my {noun}!" cried {F:name}, and {P:name} {did}.
        "I have returned your {noun}," said {P:name}, so {F:name} {did}.
        """,
        needs="solved",
        gives="ended",
        mood="glad",
    ),
)

DELIVER = Plot(
    family="deliver",
    things=("treasure", "instrument", "prize"),
    aims=("deliver {obj}", "deliver {obj} to {F:name}"),
    goal_sign=r"\b(message|parcel|errand)\b",
    ending_sign=r"\b(arrived|delivered)\b",
    holder="F",
    partner=True,
    goal=event(
        "errand",
        """
        The {relative} sent {P:name} on an errand: {a full} had to go to {a F.kind} named {F:name}.
        {P} had a parcel with {a full} for {P:his} friend {F:name}, {a F.trait} {F.kind}.
        One {weather} {time}, {P} took a parcel with {a full} to {a F.kind} called {F:name}.
        A message came: {a F.trait} {F.kind} named {F:name} needed {a full} by {clock}.
        {P} went on an errand with {a full} for {a F.trait} {F.kind} called {F:name}.
        In a parcel lay {a full} for {a F.kind} named {F:name}, who lived {near} the {where}.
        "This parcel holds {a full}," said the {relative}. "Bring {obj} to your friend {F:name}!"
        "I have an errand," said {P:name}. "My {full} must go to {a F.kind} named {F:name}."
        """,
        gives="wanting friend",
        mood="keen",
    ),
    attempt=event(
        "road",
        """
        {P} {went} along the {where} with {obj}, but the {age} road was closed.
        {P} carried {obj} past the {where}, but took the wrong road.
        {P} put {obj} in {a fixture} and {went} toward the {where}.
        {P} {went} to the {new place} with {obj} and {did} there.
        {P} held {obj} and {went} by {number} {age} houses.
        {P} tied {obj} up with some {stuff} and {went} to the {where}.
        "Which way to {F:name}?" {P:name} asked {a animal}, and held {obj}.
        "The {noun} must not get wet," said {P:name}, who {went} past the {where}.
        """,
        needs="wanting",
        gives="tried",
    ),
    deed=event(
        "crossing",
        """
        So {P} crossed the {where} with {gear} and held {obj} up high.
        {P} {went} through the {where} and kept {obj} dry under some {stuff}.
        With {gear}, {P} pulled {obj} over the {age} road to the {where}.
        {P} {went} on with {obj} until a light shone {near} the {where}.
        {P} followed {a animal} with {obj} as far as the {where}.
        {P} took {obj} down the {age} steps of the {where}.
        """,
        needs="idea",
        gives="solved",
    ),
    ending=event(
        "arrival",
        """
        So {obj} was delivered to {F:name}, who {did} {spot}.
        At last {P} arrived with {obj}, and {F} {did}.
        {P} delivered {obj} to {F:name} at the {where}, and both of them {did}.
        When {P} arrived, {F} took {obj} and {did} with joy.
        That {time} {P} delivered {obj}, and {F} shared some {food}.
        {P} arrived {near} the {where} and gave {obj} to {F:name}.
        "My {noun} has arrived!" cried {F:name}, and {P:name} {did}.
        "I have delivered your {noun}," said {P:name}, so {F:name} {did}.
        """,
        needs="solved",
        gives="ended",
        mood="glad",
    ),
)

QUESTS = (LOST, RESCUE, TRADE, RETURN, DELIVER)
