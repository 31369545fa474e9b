"""Messages between the processes of the sandbox: JSON frames, and a candidate's plain Python values as JSON.

A frame is 4 bytes of little-endian length, then JSON in ASCII. `read_frame` reads only what our own processes send;
`watch.py` reads what a candidate sends.

The child calls `encode`. It accepts only exact built-in types, so a subclass, or an object whose `__eq__` always
returns True, becomes an opaque marker. The judge calls `decode` and `equal`, which never run the child's code and never
hash its keys. Sets and dicts are compared as sorted lists of canonical strings, so colliding keys cost nothing.

    null true false "text" [list] 12        as they are (integers below 2^53)
    {"i": hex} {"f": float.hex} {"c": [re, im]} {"b": base64} {"t": tuple} {"s": set} {"z": frozenset} {"d": [[k, v]]}
    {"o": type}                             opaque: everything else; a value that is too deep, too long or cyclic

Standard library only, no project imports: `jail.py` loads this file by its path.

Not guaranteed: a bound on the size of a frame. Not preserved: the order of dict keys, identity (one list referenced
twice), or the sign and payload of a NaN.
"""

import base64
import binascii
import cmath
import json
import math
import os
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn, TypedDict, TypeVar

MAX_DEPTH = 32
MAX_NODES = 100_000
MAX_BYTES = 1 << 20  # of encoded text
MAX_FRAME = MAX_BYTES + 4096  # a frame has one value, or an exception of at most 200 characters
MAX_INT_BITS = 1 << 20  # larger integers are opaque: 10^6 digits are an attack on the comparison, not an answer
PLAIN_INT = 1 << 53  # JSON parsers agree on integers below this
RELATIVE, ABSOLUTE = 1e-6, 1e-9  # tolerances of mode "close"
MODES = ("strict", "python", "close")
Item = TypeVar("Item")
Bytes = TypeVar("Bytes", str, bytes)
_HEX = re.compile(r"-?0x[0-9a-f]+")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_MAX_COMMAS = 2 * MAX_NODES  # outside strings: a node has at most two


class Malformed(ValueError):
    """The text was not written by `encode`: it is forged."""


class _TooLarge(Exception):
    """The value exceeds a limit of the encoding."""


class Incomparable(Exception):
    """The value equals nothing: it is opaque, or a NaN in mode `python`."""


@dataclass(frozen=True)
class Bag:
    """A set or frozenset with unhashed elements."""

    items: list[Any]
    frozen: bool


@dataclass(frozen=True)
class Mapping:
    """A dict with unhashed keys: its pairs in the order of arrival."""

    pairs: list[tuple[Any, Any]]


@dataclass(frozen=True)
class Opaque:
    """A value that is not plain data; equals nothing."""

    type: str


def encode(value: object) -> str:
    """A value as ASCII JSON, at most MAX_BYTES long; `{"o": type}` if it exceeds the limits."""
    try:
        text = json.dumps(_tree(value, [MAX_NODES, MAX_BYTES], 0), separators=(",", ":"))
    except _TooLarge:
        text = ""
    if 0 < len(text) <= MAX_BYTES:
        return text
    return json.dumps({"o": _type_name(value)})


def _tree(value: Any, budget: list[int], depth: int) -> object:
    """The JSON tree of a value. `budget` counts down the allowed nodes and bytes. Raises _TooLarge."""
    budget[0] -= 1
    if budget[0] < 0 or depth > MAX_DEPTH:
        raise _TooLarge
    kind = type(value)
    if value is None or kind is bool:
        return value
    if kind is int:
        if -PLAIN_INT < value < PLAIN_INT:
            return value
        if value.bit_length() > MAX_INT_BITS:
            raise _TooLarge
        return {"i": _spend(hex(value), budget)}
    if kind is str:
        return _spend(value, budget)
    if kind is float:
        return {"f": value.hex()}
    if kind is list:
        return [_tree(item, budget, depth + 1) for item in value]
    if kind is tuple:
        return {"t": [_tree(item, budget, depth + 1) for item in value]}
    if kind is dict:
        return {"d": [[_tree(k, budget, depth + 1), _tree(v, budget, depth + 1)] for k, v in value.items()]}
    if kind is set or kind is frozenset:
        return {"s" if kind is set else "z": [_tree(item, budget, depth + 1) for item in value]}
    if kind is complex:
        return {"c": [value.real.hex(), value.imag.hex()]}
    if kind is bytes:
        return {"b": base64.b64encode(_spend(value, budget)).decode("ascii")}
    return {"o": _type_name(value)}


def _spend(data: Bytes, budget: list[int]) -> Bytes:
    budget[1] -= len(data)
    if budget[1] < 0:
        raise _TooLarge
    return data


def _type_name(value: object) -> str:
    name = type(value).__name__  # a metaclass may forge it: use only in messages for humans
    return name[:80] if type(name) is str else "?"


def parse(text: str) -> Any:
    """Parse JSON, with objects as tuples of (key, value) pairs to avoid hashing. Raises Malformed."""

    def refuse(word: str) -> NoReturn:
        raise Malformed(f"{word[:20]!r} is not a value of this protocol")

    if len(text) > MAX_FRAME or not text.isascii():
        raise Malformed("not ASCII, or too long")
    # Count before parsing, which would create the objects.
    if text.count(",") > _MAX_COMMAS and _STRING.sub("", text).count(",") > _MAX_COMMAS:
        raise Malformed("more nodes than encode writes")
    try:
        return json.loads(text, object_pairs_hook=tuple, parse_float=refuse, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise Malformed("not JSON") from error


def decode(tree: Any) -> Any:
    """The value of a parsed tree: plain Python, with Bag, Mapping and Opaque for what must not be hashed.

    Raises Malformed, including for a tree that is deeper or larger than `encode` writes.
    """
    return _decode(tree, [MAX_NODES], 0)


def _decode(tree: Any, budget: list[int], depth: int) -> Any:
    """Like `decode`; `budget` counts down the allowed nodes."""
    budget[0] -= 1
    if budget[0] < 0 or depth > MAX_DEPTH:
        raise Malformed("larger or deeper than encode writes")
    if tree is None or isinstance(tree, bool | str):
        return tree
    if isinstance(tree, int):
        if not -PLAIN_INT < tree < PLAIN_INT:
            raise Malformed("an integer that needs its tag")
        return tree
    if isinstance(tree, list):
        return [_decode(item, budget, depth + 1) for item in tree]
    if len(tree) != 1:
        raise Malformed("an object that does not have exactly one tag")
    tag, content = tree[0]
    if tag in ("i", "f", "b", "o"):
        return _decode_text(tag, content)
    if not isinstance(content, list):
        raise Malformed(f"tag {tag!r} without a list")
    if tag == "t":
        return tuple([_decode(item, budget, depth + 1) for item in content])
    if tag in ("s", "z"):
        return Bag([_decode(item, budget, depth + 1) for item in content], frozen=tag == "z")
    if tag == "c" and len(content) == 2:
        return complex(_decode_text("f", content[0]), _decode_text("f", content[1]))
    if tag == "d" and all(isinstance(pair, list) and len(pair) == 2 for pair in content):
        return Mapping([(_decode(k, budget, depth + 1), _decode(v, budget, depth + 1)) for k, v in content])
    raise Malformed("an unknown tag")


def _decode_text(tag: str, content: Any) -> Any:
    if not isinstance(content, str):
        raise Malformed(f"tag {tag!r} without a string")
    try:
        if tag == "i":
            if not _HEX.fullmatch(content):
                raise Malformed("not a hexadecimal integer")
            return int(content, 16)
        if tag == "f":
            value = float.fromhex(content)
            if value.hex() != content:
                raise Malformed("not the canonical form of a float")
            return value
        return base64.b64decode(content, validate=True) if tag == "b" else Opaque(content[:80])
    except (ValueError, OverflowError, binascii.Error) as error:
        raise Malformed("not a valid string for its tag") from error


def bag(items: list[Any]) -> Bag:
    """Build a set of values without duplicates; hashes only canonical strings. Raises ValueError for opaque values."""
    return Bag([item for item, _ in mapping([(item, None) for item in items]).pairs], frozen=False)


def mapping(pairs: list[tuple[Any, Any]]) -> Mapping:
    """Build a dict from pairs: equal keys keep the first key and the last value. Raises ValueError for opaque keys."""
    pair_of_text: dict[str, tuple[Any, Any]] = {}
    for key, value in pairs:
        text = _key_text(key)
        pair_of_text[text] = (pair_of_text[text][0] if text in pair_of_text else key, value)
    return Mapping(list(pair_of_text.values()))


def _key_text(value: object) -> str:
    try:
        return canonical(value, "python")
    except Incomparable as error:
        raise ValueError("expected plain data in a set or as a dict key") from error


def check(value: Item) -> Item:
    """Return a decoded value if it is within the limits of an answer. Raises ValueError."""
    budget = [MAX_NODES, MAX_BYTES]

    def visit(value: object, depth: int) -> None:
        budget[0] -= 1
        if isinstance(value, str | bytes):
            budget[1] -= len(value)
        elif isinstance(value, int):
            budget[1] -= value.bit_length() // 4 if value.bit_length() <= MAX_INT_BITS else MAX_BYTES + 1
        if min(budget) < 0 or depth > MAX_DEPTH:
            raise ValueError("expected a value within the sandbox's limits")
        if isinstance(value, Mapping):
            for pair in value.pairs:
                visit(pair[0], depth + 1)
                visit(pair[1], depth + 1)
        elif isinstance(value, Bag | list | tuple):
            for item in value.items if isinstance(value, Bag) else value:
                visit(item, depth + 1)
        elif value is not None and not isinstance(value, bool | int | float | complex | str | bytes):
            raise ValueError(f"expected plain data, found {type(value).__name__}")

    visit(value, 0)
    return value


def has_opaque(value: object) -> bool:
    """Whether any part of a decoded value is opaque."""
    if isinstance(value, Opaque):
        return True
    if isinstance(value, Mapping):
        return any(has_opaque(k) or has_opaque(v) for k, v in value.pairs)
    items = value.items if isinstance(value, Bag) else value
    return isinstance(items, list | tuple) and any(has_opaque(item) for item in items)


def equal(expected: object, actual: object, mode: str = "strict") -> bool:
    """Whether two decoded values are equal.

    `strict`: equal types at every level, a NaN equals a NaN, -0.0 differs from 0.0. `python`: like `==` on plain data.
    `close`: like `strict`, but a float also equals a float or int within 1e-6 relative or 1e-9 absolute, never a bool.
    Opaque values equal nothing.
    """
    assert mode in MODES, mode
    try:
        if mode == "close":
            return _close(expected, actual)
        return canonical(expected, mode) == canonical(actual, mode)
    except Incomparable:
        return False


def canonical(value: object, mode: str = "strict") -> str:
    """A string that is the same for two values if and only if they are equal in this mode (`strict` or `python`).

    Raises Incomparable.
    """
    if value is None:
        return "N"
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, bytes):
        return "b" + value.hex()
    if isinstance(value, bool | int | float | complex):
        return _canonical_number(value, mode)
    if isinstance(value, list | tuple):
        inner = ",".join(canonical(item, mode) for item in value)
        return f"[{inner}]" if isinstance(value, list) else f"({inner})"
    if isinstance(value, Bag):
        inner = ",".join(sorted(canonical(item, mode) for item in value.items))
        return f"{'z' if value.frozen and mode == 'strict' else 's'}{{{inner}}}"
    if isinstance(value, Mapping):
        pairs = sorted((canonical(k, mode), canonical(v, mode)) for k, v in value.pairs)
        return f"d{{{','.join(f'{k}:{v}' for k, v in pairs)}}}"
    raise Incomparable


def _canonical_number(value: complex, mode: str) -> str:
    if mode == "python":
        if value != value:
            raise Incomparable
        if isinstance(value, complex) and value.imag == 0:
            value = value.real
        if isinstance(value, float) and value.is_integer():
            value = int(value)  # exact, so 2.0 equals 2 and 1e23 does not equal 10**23
        value = int(value) if isinstance(value, bool) else value
    if isinstance(value, bool):
        return "T" if value else "F"
    if isinstance(value, int):
        return hex(value)
    if isinstance(value, complex):
        real, imag = (0.0 if mode == "python" and part == 0 else part for part in (value.real, value.imag))
        return f"c{real.hex()},{imag.hex()}"
    return "f" + value.hex()


def _close(expected: object, actual: Any) -> bool:
    if isinstance(expected, float | complex) and isinstance(actual, int | float | complex):
        return _close_numbers(expected, actual)
    if type(expected) is not type(actual):
        return False
    if isinstance(expected, list | tuple):
        return len(expected) == len(actual) and all(map(_close, expected, actual))
    if isinstance(expected, Bag):
        ordered = map(_close, sorted(expected.items, key=_sort_key), sorted(actual.items, key=_sort_key))
        return expected.frozen == actual.frozen and len(expected.items) == len(actual.items) and all(ordered)
    if isinstance(expected, Mapping):
        if len(expected.pairs) != len(actual.pairs):
            return False
        expected_keys, actual_keys = (
            sorted((canonical(key), i) for i, (key, _) in enumerate(m.pairs)) for m in (expected, actual)
        )
        return all(
            key == other and _close(expected.pairs[i][1], actual.pairs[j][1])
            for (key, i), (other, j) in zip(expected_keys, actual_keys, strict=True)
        )
    return canonical(expected) == canonical(actual)


def _close_numbers(expected: float | complex, actual: complex) -> bool:
    if isinstance(actual, bool) or (isinstance(actual, complex) and isinstance(expected, float)):
        return False
    if expected != expected or actual != actual:
        return expected != expected and actual != actual
    try:
        if isinstance(expected, complex):
            return cmath.isclose(actual, expected, rel_tol=RELATIVE, abs_tol=ABSOLUTE)
        assert not isinstance(actual, complex)
        return math.isclose(actual, expected, rel_tol=RELATIVE, abs_tol=ABSOLUTE)
    except OverflowError:  # an integer too large for a float
        return False


def _sort_key(value: object) -> tuple[int, float, str]:
    """Sort numbers by size, so that `_close` compares close elements of two sets; everything else by string."""
    if isinstance(value, int | float) and not isinstance(value, bool) and value == value:
        try:
            return 0, float(value), ""
        except OverflowError:
            return 1, 0.0, hex(int(value))
    return 2, 0.0, canonical(value)


class JobLimits(TypedDict):
    """Limits of one child: seconds per test and per job, bytes of memory and of output."""

    cpu: float
    wall: float
    job_cpu: float
    job_wall: float
    memory: int
    stdout: int
    stderr: int
    results: int


class ChildJob(TypedDict):
    """What a server runs in one child; tests are `{"args", "kwargs"}` for a function, `{"stdin"}` for a program."""

    id: str
    nonce: str
    source: str
    entry: str | None
    tests: list[dict[str, str]]
    limits: JobLimits


class ChildResult(TypedDict):
    """What a child did. `status` and `signal` are set if it ended on its own, `cut` if the server killed it."""

    id: str
    frames: list[str]
    status: int | None
    signal: int | None
    cpu_ms: int
    wall_ms: int
    max_rss_kb: int
    stdout: str
    stderr: str
    cut: str | None


class Fault(TypedDict):
    """The answer when the sandbox itself failed; it says nothing about the candidate."""

    id: str
    fault: str


def read_frame(fd: int) -> Any:
    """Read one message; None at the end of the stream."""
    head = read_exactly(fd, 4)
    if head is None:
        return None
    body = read_exactly(fd, struct.unpack("<I", head)[0])
    return None if body is None else json.loads(body)


def read_exactly(fd: int, size: int) -> bytes | None:
    """Read exactly `size` bytes; None if the stream ends early."""
    parts = bytearray()
    while len(parts) < size:
        chunk = os.read(fd, min(size - len(parts), 1 << 20))
        if not chunk:
            return None
        parts += chunk
    return bytes(parts)


def frame(message: object) -> bytes:
    """Encode a message."""
    body = json.dumps(message, separators=(",", ":")).encode("ascii")
    return struct.pack("<I", len(body)) + body


def write_frame(fd: int, message: object) -> None:
    """Send one complete message."""
    write_all(fd, frame(message))


def write_all(fd: int, data: bytes, write: Callable[[int, memoryview], int] = os.write) -> None:
    """Write all of `data`."""
    view = memoryview(data)
    while view:
        view = view[write(fd, view) :]
