"""Stories with a plot from a small simulated world: text without a network, whose coherence can be checked.

In: a path `stories/<family>/<number>`. Out: the story, a pure function of it: no clock, no order of sets, no seed.
`records` walks the numbers of many families in turn until enough bytes are there. `check` (in `story_check`) says from
the text alone whether a story holds together, so it also judges what a model sampled.

Three of the fourteen families are held out, and every fiftieth number of the others: both are validation data, reported
apart, because the second asks for known plots in new words and the first for new plots.

It does not promise literature: the sentences are short and regular, so that a model of two million parameters can
learn who wanted what. Measured on 197 kB: see `tests/test_stories.py`.
"""

import random
from collections.abc import Collection, Iterator

from pipeline.errors import DataError
from pipeline.streams.records import Text
from pipeline.synthesis.story_check import check, sentences
from pipeline.synthesis.story_edits import edits
from pipeline.synthesis.story_plots import PLOTS, tell

__all__ = ["FAMILIES", "HELD_OUT", "check", "edits", "is_held_out", "opening", "records", "story"]

FAMILIES: tuple[str, ...] = tuple(PLOTS)
HELD_OUT: tuple[str, ...] = ("grow", "deliver", "mystery")
VALIDATION_EVERY = 50  # numbers that this divides are validation data in every family
DIALOGUE = 0.4  # share of stories in which somebody speaks
LICENCE = "CC0-1.0"


def story(path: str) -> str:
    """The story of a path, `stories/<family>/<number>`. Raises DataError for any other form."""
    family, _ = _split(path)
    attempt = 0
    speaks = random.Random(path).random() < DIALOGUE  # a str seeds through sha512: the same everywhere
    while (text := tell(family, random.Random(f"{path}#{attempt}"), speaks=speaks)) is None:
        attempt += 1
    return text


def records(families: Collection[str], target_bytes: int, *, held_out: bool | None = None) -> Iterator[Text]:
    """Stories of the given families in turn, until their UTF-8 texts fill `target_bytes`.

    Numbers go up from 0 through all families; `held_out` keeps only validation paths (True), only training paths
    (False) or both (None). The source of a record is its family.
    """
    order = [family for family in FAMILIES if family in families]
    if len(order) != len(set(families)) or not order:
        raise DataError(f"expected one or more of the families {', '.join(FAMILIES)}; found {sorted(families)}")
    if held_out is False and all(family in HELD_OUT for family in order):
        raise DataError(f"the families {', '.join(order)} are held out: they have no training stories")
    filled, number = 0, 0
    while filled < target_bytes:
        for family in order:
            path = f"stories/{family}/{number}"
            if filled >= target_bytes or (held_out is not None and is_held_out(path) is not held_out):
                continue
            text = story(path)
            filled += len(text.encode())
            yield Text(text=text, source=family, path=path, licence=LICENCE)
        number += 1


def is_held_out(path: str) -> bool:
    """Whether a path is validation data: a held-out family, or a number that 50 divides."""
    family, number = _split(path)
    return family in HELD_OUT or number % VALIDATION_EVERY == 0


def opening(text: str) -> str:
    """The first sentence of a story: a prompt."""
    return sentences(text)[0]


def _split(path: str) -> tuple[str, int]:
    parts = path.split("/")
    if len(parts) != 3 or parts[0] != "stories" or parts[1] not in PLOTS or not parts[2].isdecimal():
        raise DataError(
            f"expected a path stories/<family>/<number> with a family of {', '.join(PLOTS)}; found {path!r}"
        )
    return parts[1], int(parts[2])
