"""Does a story hold together? Eight questions, answered from the text alone.

In: any text, most often sampled from a model. Out: `check(text)`, a boolean per question. The grammar asked for is the
generator's: a name has one pronoun, a pronoun agrees with the last name before it, the first name is introduced
as "Tom was a brave fox", others by "named", "called" or "friend", a plot has a goal and an ending of its own.

It does not promise to understand: a text in another style than the generator's fails, and nonsense between right
sentences passes. It is strict where it looks: one foreign name, one wrong "she" and the answer is False.
"""

import re
from functools import cache

from pipeline.synthesis.story_plots import PLOTS, vocabulary
from pipeline.synthesis.story_words import KINDS, LISTS, PLURAL_PRONOUNS, PRONOUN_OF, PRONOUNS, WANTED

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
RESOLUTION = 2  # sentences: the ending and the coda
GOAL_WITHIN = 4  # the goal stands in the first sentences

# A sentence ends at . ! ? (and a closing quotation mark) before a space and a capital or an opening quotation mark.
_BORDER = re.compile(r'(?<=[.!?])\s+(?=["A-Z])|(?<=[.!?]")\s+(?=["A-Z])')
_WORD = re.compile(r"[A-Za-z]+(?:-[A-Za-z]+)*")
_INTRODUCES = re.compile(r"\b(?:named|called|friend) ([A-Z][a-z]+)")
_FIRST = re.compile(rf"^([A-Z][a-z]+) was an? (?:[a-z]+ )?(?:{'|'.join(KINDS)})\b")
_STARTS = re.compile(r'(?:^|[.!?]"?\s+|(?:^|\s)")"?$')  # what stands before a word that is capital by its place
_CAPITAL = frozenset(("I", *LISTS["weekday"]))


def check(text: str) -> dict[str, bool]:
    """One boolean per question of QUESTIONS; a story holds together when all are True."""
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
    """The family whose goal the first sentences state, or None where it is none or not only one."""
    for part in sentences(text)[1:GOAL_WITHIN]:
        found = [family for family, (sign, _) in _signs().items() if sign.search(part)]
        if found:
            return found[0] if len(found) == 1 else None
    return None


@cache
def _signs() -> dict[str, tuple[re.Pattern[str], re.Pattern[str]]]:
    return {
        family: (re.compile(plot.goal_sign, re.IGNORECASE), re.compile(plot.ending_sign, re.IGNORECASE))
        for family, plot in PLOTS.items()
    }


def _introduces_protagonist(first: str) -> bool:
    match = _FIRST.search(first)
    return match is not None and match[1] in PRONOUN_OF


def _pronouns_resolve(text: str, words: list[tuple[str, int]]) -> bool:
    """he and she agree with the last name; they needs two names; it needs the wanted thing in this sentence."""
    last: str | None = None
    named: set[str] = set()
    since_thing = None  # where the wanted thing was named last
    for word, start in words:
        if word in PRONOUN_OF:
            last = word
            named.add(word)
        elif (pronoun := PRONOUNS.get(word.lower())) is not None:
            if last is None or PRONOUN_OF[last] != pronoun:
                return False
        elif word.lower() in PLURAL_PRONOUNS:
            if len(named) < 2:
                return False
        elif word.lower() in WANTED:
            since_thing = start
        elif word.lower() == "it" and (since_thing is None or re.search(r"[.!?]", text[since_thing:start])):
            return False
    return True


def _names_known(text: str, words: list[tuple[str, int]]) -> bool:
    """Each name is introduced where it first stands, and each other capital begins a sentence with a known word."""
    introduced = {match.start(1): match[1] for match in _INTRODUCES.finditer(text)}
    first = _FIRST.search(text)
    if first is not None:
        introduced[0] = first[1]
    known: set[str] = set()
    for word, start in words:
        if start in introduced and word in PRONOUN_OF:
            known.add(word)
        elif word[0].isupper() and word not in known and word not in _CAPITAL:
            begins = _STARTS.search(text[max(0, start - 6) : start]) is not None or start == 0
            if word in PRONOUN_OF or not begins or word.lower() not in vocabulary():
                return False
    return bool(known)


def _wanted_in_resolution(parts: list[str]) -> bool:
    """One thing is wanted from the goal on, and it alone stands in the resolution."""
    seen = [{word for word in _WORD.findall(part.lower()) if word in WANTED} for part in parts]
    things = set().union(*seen)
    early = set().union(*seen[:GOAL_WITHIN])
    return (
        len(things) == 1 and things == early and len(parts) > RESOLUTION and things == set().union(*seen[-RESOLUTION:])
    )


def _quotes_balanced(text: str) -> bool:
    """Straight quotes come in pairs, open after a space and close before one."""
    marks = [match.start() for match in re.finditer('"', text)]
    opens = all(i == 0 or text[i - 1].isspace() for i in marks[::2])
    closes = all(i > 0 and text[i - 1] in ".,!?" and (i + 1 == len(text) or text[i + 1].isspace()) for i in marks[1::2])
    return len(marks) % 2 == 0 and opens and closes


def _ends_like_its_family(parts: list[str]) -> bool:
    """The ending or the coda matches what the goal's family asks for, and the text ends with a sentence's end."""
    family = family_of(" ".join(parts))
    if family is None or len(parts) <= GOAL_WITHIN or not re.search(r'[.!?]"?$', parts[-1]):
        return False
    return _signs()[family][1].search(" ".join(parts[-RESOLUTION:])) is not None
