"""The world that the tools act on: its state, its refusals, and what it knows.

Worlds are compared by their public attributes (`==`). A request that the world cannot serve raises `ToolError`, whose
message names what would work. What a lookup finds (a telephone number, a temperature) comes from `chance`, a pure
function of what was asked. Not promised: that any of it is true of the real world.
"""

import datetime
import difflib
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline.synthesis.tool_values import FIRST_NAMES, LAST_NAMES

Result = dict[str, Any]


class ToolError(Exception):
    """The tool ran and refused; the message says what it would accept."""


@dataclass
class World:
    """All state that tools can change; a new one is empty."""

    contacts: dict[str, Result] = field(default_factory=dict)
    removed: list[str] = field(default_factory=list)
    tasks: list[Result] = field(default_factory=list)
    due: dict[str, str] = field(default_factory=dict)
    timers: list[Result] = field(default_factory=list)
    rooms: dict[str, Result] = field(default_factory=dict)
    scenes: dict[str, Result] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    orders: list[Result] = field(default_factory=list)
    bookings: list[Result] = field(default_factory=list)
    transfers: list[Result] = field(default_factory=list)
    sent: list[Result] = field(default_factory=list)
    ledger: list[Result] = field(default_factory=list)  # what invented tools were asked to do


def chance(*parts: object) -> int:
    """A number below 2**32 that depends on the parts alone."""
    return int.from_bytes(hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=4).digest(), "big")


def known(what: str, name: str, names: Sequence[str]) -> str:
    """The name itself, or ToolError with the nearest one that exists."""
    if name in names:
        return name
    near = difflib.get_close_matches(name, names, 1, 0.0)
    raise ToolError(f'unknown {what} "{name}", did you mean "{near[0]}"?')


def person(name: str) -> str:
    """A first and a last name that the address book knows."""
    words = name.split(" ", 1)
    if len(words) == 2 and words[0] in FIRST_NAMES and words[1] in LAST_NAMES:
        return name
    near = [difflib.get_close_matches(w, p, 1, 0.0)[0] for w, p in zip(words, (FIRST_NAMES, LAST_NAMES), strict=False)]
    raise ToolError(f'unknown person "{name}", did you mean "{" ".join(near)}"?')


def day(text: str) -> datetime.date:
    """The date written as YYYY-MM-DD, or ToolError."""
    try:
        return datetime.date.fromisoformat(text)
    except ValueError as error:
        raise ToolError(f'"{text}" is no date, write it like 2025-03-14') from error


def number(value: float) -> float | int:
    """Four decimals at most, and no `.0`."""
    value = round(value, 4)
    return int(value) if value == int(value) else value
