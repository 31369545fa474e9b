"""Damaged stories for preference pairs: six kinds of damage, each of which the checker must notice.

In: a story that passes. Out: `edits`, a damaged text by kind of damage. Damage that leaves a good story (two events
that may stand in either order) is no damage: a candidate that answers every question as before is drawn again.

It does not promise that a damaged story differs in one question only.
"""

import random
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pipeline.synthesis.story_check import RESOLUTION, check, sentences
from pipeline.synthesis.story_words import HE_NAMES, PRONOUN_OF, PRONOUNS, SHE_NAMES, THINGS, WANTED

if TYPE_CHECKING:
    import torch

TRIES = 40
_HE_TO_SHE = {"he": "she", "him": "her", "his": "her", "himself": "herself"}
_SHE_TO_HE = {"she": "he", "her": "his", "hers": "his", "herself": "himself"}


def edits(text: str, path: str, generator: "torch.Generator") -> dict[str, str]:
    """The story with its pronoun, name, object changed, events swapped, ending cut, a sentence repeated.

    Same text, path and generator state: same result. A kind is absent only where the text offers nothing to damage.
    """
    import torch  # here, so that a process that only writes stories need not load it

    seed = int(torch.randint(2**62, (), generator=generator).item())
    whole = sum(check(text).values())
    damaged: dict[str, str] = {}
    for kind, candidates in (
        ("pronoun changed", _pronoun_changed),
        ("name changed", _name_changed),
        ("object changed", _object_changed),
        ("events swapped", _events_swapped),
        ("ending cut", _ending_cut),
        ("sentence repeated", _sentence_repeated),
    ):
        for candidate in candidates(text, random.Random(f"{seed}/{path}/{kind}")):
            if sum(check(candidate).values()) < whole:
                damaged[kind] = candidate
                break
    return damaged


def _replaced(text: str, match: re.Match[str], word: str) -> str:
    word = word.capitalize() if match[0][0].isupper() else word
    return text[: match.start()] + word + text[match.end() :]


def _shuffled(matches: list[re.Match[str]], rng: random.Random) -> list[re.Match[str]]:
    return rng.sample(matches, len(matches))


def _pronoun_changed(text: str, rng: random.Random) -> Iterator[str]:
    matches = [match for match in re.finditer(r"[A-Za-z]+", text) if match[0].lower() in PRONOUNS]
    for match in _shuffled(matches, rng):
        yield _replaced(text, match, (_HE_TO_SHE | _SHE_TO_HE)[match[0].lower()])


def _name_changed(text: str, rng: random.Random) -> Iterator[str]:
    matches = [match for match in re.finditer(r"[A-Z][a-z]+", text) if match[0] in PRONOUN_OF]
    for match in _shuffled(matches[1:], rng):
        names = HE_NAMES if PRONOUN_OF[match[0]] == "he" else SHE_NAMES
        yield _replaced(text, match, rng.choice([name for name in names if name not in text]))


def _object_changed(text: str, rng: random.Random) -> Iterator[str]:
    matches = [match for match in re.finditer(r"[a-z]+(?:-[a-z]+)*", text) if match[0] in WANTED]
    for match in _shuffled(matches, rng):
        kin = next(words for words in THINGS.values() if match[0] in words)
        yield _replaced(text, match, rng.choice([word for word in kin if word != match[0]]))


def _events_swapped(text: str, rng: random.Random) -> Iterator[str]:
    parts = sentences(text)
    for _ in range(TRIES):
        first, second = sorted(rng.sample(range(len(parts)), 2))
        swapped = list(parts)
        swapped[first], swapped[second] = parts[second], parts[first]
        yield " ".join(swapped)


def _ending_cut(text: str, rng: random.Random) -> Iterator[str]:
    parts = sentences(text)
    for extra in rng.sample(range(3), 3):
        yield " ".join(parts[: len(parts) - RESOLUTION - extra])


def _sentence_repeated(text: str, rng: random.Random) -> Iterator[str]:
    parts = sentences(text)
    which = rng.randrange(len(parts))
    where = rng.randrange(which + 1, len(parts) + 1)
    yield " ".join([*parts[:where], parts[which], *parts[where:]])
