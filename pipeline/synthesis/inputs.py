"""The values that generated programs are run on, and the random numbers that choose them.

In: a type of `operation.py`. Out: `pool(kind)`, the values that tests are drawn from, and `probes(kind)`, the 48 fixed
values on which two programs are called the same. Both are the same on every machine and in every Python version:
`Draw` uses only `random.Random.random()`, whose sequence the Python documentation promises to keep.

It does not promise that a pool covers all that a type can hold: no word is longer than ten letters, no number in a
list larger than 99.
"""

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

from pipeline.synthesis.operation import COUNTS, NUMBER, NUMBERS, TEXT, WORDS

Item = TypeVar("Item")

_NOUNS = """
a ant apple bag ball banana bee bird blue boat book bus butterfly cake car cat chair cloud code cup dog door egg
elephant fire fish garden go green hat home ice it key kitchen lamp leaf map milk moon morning mountain note oak ocean
on owl paper pear pen picture rain red river road sandwich sea see ship sky snow song star stone sun tea tree triangle
umbrella up water window yellow
"""
VOCABULARY = tuple(_NOUNS.split())


class Draw:
    """Random choices that are a pure function of the parts they are seeded with."""

    def __init__(self, *parts: int | str) -> None:
        digest = hashlib.blake2b("|".join(str(part) for part in parts).encode(), digest_size=8).digest()
        self._random = random.Random(int.from_bytes(digest, "big")).random

    def below(self, limit: int) -> int:
        """An integer from 0 to limit - 1."""
        return int(self._random() * limit)

    def between(self, low: int, high: int) -> int:
        """An integer from low to high, both included."""
        return low + int(self._random() * (high - low + 1))

    def pick(self, items: Sequence[Item]) -> Item:
        """One item."""
        return items[int(self._random() * len(items))]

    def chance(self, share: float) -> bool:
        """True with that probability."""
        return self._random() < share

    def sample(self, items: Sequence[Item], count: int) -> list[Item]:
        """Different items in random order: `count` of them, or all."""
        left = list(items)
        for place in range(min(count, len(left))):
            other = place + int(self._random() * (len(left) - place))
            left[place], left[other] = left[other], left[place]
        return left[:count]


@dataclass(frozen=True)
class Pool:
    """Values of one type. Nobody changes them: operations are pure."""

    edges: tuple[tuple[Any, ...], ...]  # one tuple a kind of edge: empty, one, negative, repeated, long
    short: tuple[Any, ...]  # for visible tests: a few tokens each
    plain: tuple[Any, ...]  # for hidden tests


@cache
def pool(kind: str) -> Pool:
    """The values of a type, built once. Raises KeyError for an unknown type."""
    build = {NUMBERS: _numbers, WORDS: _words, TEXT: _texts, COUNTS: _counts, NUMBER: _number}[kind]
    return build(Draw("pool", kind))


@cache
def probes(kind: str) -> tuple[Any, ...]:
    """48 fixed values: some of each edge, the rest plain."""
    values = pool(kind)
    edges = [value for group in values.edges for value in group[:2]]
    return tuple([*edges, *values.plain][:48])


def _list_of(draw: Draw, low: int, high: int, count: int) -> list[int]:
    return [draw.between(low, high) for _ in range(count)]


def _numbers(draw: Draw) -> Pool:
    one = tuple([n] for n in (7, 4, -3, 0, 12, 9))
    negative = tuple(_list_of(draw, -30, -1, draw.between(3, 7)) for _ in range(8))
    repeated = tuple([draw.between(-4, 9)] * draw.between(3, 5) + _list_of(draw, 0, 5, 3) for _ in range(8))
    long = tuple(_list_of(draw, -20, 40, draw.between(12, 16)) for _ in range(10))
    # Small numbers in `short`: a digit is a token, and constants are 2-9.
    short = [_list_of(draw, -5, 14, draw.between(3, 5)) for _ in range(60)]
    short += [draw.sample(_list_of(draw, 1, 9, 3) * 2, 5) for _ in range(20)]
    plain = [_list_of(draw, -12, 30, draw.between(2, 11)) for _ in range(80)]
    plain += [_list_of(draw, -3, 10, draw.between(4, 11)) for _ in range(60)]
    plain += [draw.sample(_list_of(draw, -9, 99, 4) * 2, draw.between(5, 8)) for _ in range(20)]
    return Pool((([],), one, negative, repeated, long), tuple(short), tuple(draw.sample(plain, len(plain))))


def _cased(draw: Draw, word: str) -> str:
    return draw.pick((word, word, word, word.capitalize(), word.upper()))


def _words(draw: Draw) -> Pool:
    def some(low: int, high: int) -> list[str]:
        return [_cased(draw, draw.pick(VOCABULARY)) for _ in range(draw.between(low, high))]

    one = tuple([word] for word in ("sun", "Apple", "a", "WATER", "moon"))
    # The empty word stands where a list of numbers has its negative ones.
    hollow = tuple(["", *some(1, 4), ""] for _ in range(4))
    repeated = tuple([draw.pick(VOCABULARY)] * draw.between(2, 4) + some(1, 3) for _ in range(8))
    long = tuple(some(11, 14) for _ in range(8))
    short = [[draw.pick(VOCABULARY) for _ in range(draw.between(2, 4))] for _ in range(60)]
    short += [draw.sample([draw.pick(VOCABULARY), draw.pick(VOCABULARY)] * 2, 3) for _ in range(20)]
    plain = [some(2, 9) for _ in range(110)] + [draw.sample(some(3, 4) * 2, 6) for _ in range(40)]
    return Pool((([],), one, hollow, repeated, long), tuple(short), tuple(draw.sample(plain, len(plain))))


def _texts(draw: Draw) -> Pool:
    def some(low: int, high: int) -> str:
        return " ".join(_cased(draw, draw.pick(VOCABULARY)) for _ in range(draw.between(low, high)))

    one = ("x", "A", "7", " ", "e")
    # Odd spaces and no letters stand where a list of numbers has its negative ones.
    odd = ("  two  spaces ", "...", "12 34", "a-b_c", "Tab\there", "END.")
    repeated = ("aaaa", "abab abab", "zzz ZZZ", "go go go", "mississippi", "oooh no")
    long = tuple(some(9, 12) for _ in range(8))
    short = [" ".join(draw.pick(VOCABULARY) for _ in range(draw.between(1, 3))) for _ in range(60)]
    short += [some(1, 3) for _ in range(30)]
    plain = [some(1, 6) for _ in range(130)] + [some(2, 3) + draw.pick(("!", "?", "..", " 42")) for _ in range(20)]
    return Pool((("",), one, odd, repeated, long), tuple(short), tuple(draw.sample(plain, len(plain))))


def _counts(draw: Draw) -> Pool:
    def some(low: int, high: int, least: int, most: int) -> dict[str, int]:
        words = draw.sample(VOCABULARY, draw.between(low, high))
        return {word: draw.between(least, most) for word in words}

    one = tuple({word: n} for word, n in (("sun", 5), ("a", 1), ("key", 9), ("Sky", 3)))
    negative = tuple(some(2, 5, -9, -1) for _ in range(6))
    repeated = tuple(some(3, 5, 4, 4) for _ in range(6))
    long = tuple(some(10, 12, -5, 30) for _ in range(6))
    short = [some(2, 3, 0, 12) for _ in range(80)]
    plain = [some(2, 7, -4, 20) for _ in range(100)] + [some(3, 6, 0, 10) for _ in range(50)]
    return Pool((({},), one, negative, repeated, long), tuple(short), tuple(draw.sample(plain, len(plain))))


def _number(draw: Draw) -> Pool:
    negative = tuple(draw.between(-99, -2) for _ in range(8))
    repeated = (11, 77, 333, 5555, 1001, 2020)
    long = tuple(draw.between(10_000, 999_999) for _ in range(8))
    plain = [draw.between(2, 99) for _ in range(80)] + [draw.between(100, 999) for _ in range(50)]
    plain += [draw.between(-500, -1) for _ in range(20)]
    plain = list(dict.fromkeys(plain))
    short = tuple(range(2, 60))
    return Pool(((0,), (1, -1), negative, repeated, long), short, tuple(draw.sample(plain, len(plain))))
