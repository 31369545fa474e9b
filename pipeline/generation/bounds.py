"""What one JSON schema may ask for: the sizes from which a small schema becomes a large automaton, read before it is compiled.

    measures(schema) -> (what, found, most), ...        of the schema itself, not of those inside it

A grammar is compiled to automata, and their size follows numbers that cost a client a few bytes: `multipleOf` has a state for each
remainder (9,999,991 took 38 s and 851 MiB), a range of numbers one for each digit, a repetition one for each time. Values of a
wrong type are passed over here: the meta-schema refuses them.

Not promised: that a schema within these bounds compiles in time. What several of them make together is only known by compiling
(the server does so in a process that it can end, `serve/workshop.py`).
"""

import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any, TypeGuard

MOST_DIGITS = 40  # of a number that bounds others, written out
MOST_REMAINDERS = 10_000  # of multipleOf: the number times the power of ten that makes it whole
MOST_LEAST = 512  # of minLength, minItems, minProperties: an answer must have so many
MOST_COUNT = 1_000_000  # of maxLength, maxItems, maxProperties
MOST_NAMES = 512  # of an object's properties
MOST_WRITTEN = 2_000  # characters of a pattern whose repetitions are written out

RANGES = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
REPEATED = re.compile(r"\{(\d+)(?:,(\d*))?\}")


def measures(schema: dict[str, Any]) -> Iterator[tuple[str, int, int]]:
    """What is counted, how many there are, and the most that may be."""
    for key in RANGES:
        if _is_number(value := schema.get(key)):
            yield f"the digits of {key}", _digits(value), MOST_DIGITS
    if _is_number(multiple := schema.get("multipleOf")) and _digits(multiple) <= MOST_DIGITS:
        yield "the remainders of multipleOf", _remainders(multiple), MOST_REMAINDERS
    for key, value in schema.items():
        if key in ("minLength", "minItems", "minProperties") and _is_number(value):
            yield key, int(min(value, 10**18)), MOST_LEAST
        if key in ("maxLength", "maxItems", "maxProperties") and _is_number(value):
            yield key, int(min(value, 10**18)), MOST_COUNT
        if key in ("properties", "patternProperties", "required") and isinstance(value, dict | list):
            yield f"the names in {key}", len(value), MOST_NAMES
    named = schema.get("patternProperties")
    for pattern in (schema.get("pattern"), *(named if isinstance(named, dict) else ())):
        if isinstance(pattern, str):
            yield "a pattern with its repetitions written out, in characters", written_out(pattern), MOST_WRITTEN


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value


def _digits(value: float) -> int:
    """Digits of a number without an exponent, of both sides of its point."""
    parts = Decimal(str(value)).as_tuple() if abs(value) < 10**400 else None
    if parts is None or not isinstance(parts.exponent, int):  # infinite, or an integer that takes long to write
        return 10**6
    return max(1, len(parts.digits) + parts.exponent) + max(0, -parts.exponent)


def _remainders(value: float) -> int:
    number = abs(Decimal(str(value))).normalize()
    _, digits, exponent = number.as_tuple()
    assert isinstance(exponent, int)
    whole = int("".join(map(str, digits)))
    return whole * 10 ** max(0, exponent)


def written_out(pattern: str) -> int:
    """About the characters of a pattern whose counted repetitions are written out; those without an end count once."""
    totals, last, place = [0], 0, 0
    while place < len(pattern):
        found = REPEATED.match(pattern, place)
        if found:
            times = max(1, int(found[1][:9]), int((found[2] or "1")[:9]))
            totals[-1] += last * (times - 1)
            last, place = last * times, found.end()
            continue
        character = pattern[place]
        if character == "(":
            totals.append(0)
        elif character == ")" and len(totals) > 1:
            last = totals.pop()
            totals[-1] += last
        else:
            place = _end_of_set(pattern, place) if character == "[" else place + (character == "\\")
            last = 1
            totals[-1] += 1
        place += 1
    return sum(totals)


def _end_of_set(pattern: str, place: int) -> int:
    """The place of the bracket that closes the one at `place`; the last character where none does."""
    place += 1 + pattern.startswith("[^", place)
    first = place
    while place < len(pattern) and (pattern[place] != "]" or place == first):
        place += 1 + (pattern[place] == "\\")
    return min(place, len(pattern) - 1)
