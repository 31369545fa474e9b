"""The grammar of a request as a text, and what is compiled of it. Without torch: a process that only compiles starts at
once.

    tool_calls(tokenizer, tools, choice="required") -> Written      or json_schema(schema): a text that llguidance reads
    Compiler(tokenizer).matcher(text) -> LLMatcher               at its beginning; shortest(matcher) -> the closing plan

llguidance (guidance-ai, MIT) says which tokens a grammar allows: byte for byte the form in which `text/chat.py` renders
what the model is trained on. Everything here raises SchemaError for what cannot be promised.

Not promised: that a text compiles in time, or in the memory there is (`bounds.py`).

The closing plan: tokens that end a constrained output from where it stands, in as few tokens as can be found.

    Closer(tokenizer).follow(matcher, place, plan, token, most)   the plan behind a sampled token: what is left, or a
                                                                  new one
    Closer(tokenizer).close(matcher, place, most)   a greedy plan; what sampling asks for after a token that leaves the
                                                    plan
    Closer(tokenizer).shortest(matcher)      the best of a search; what decides whether a request fits its budget at all

Both walk a copy of the matcher byte by byte: forced bytes; in a string its quotation mark, outside the closing bracket,
else the cheapest value; where none of those may stand, the longest token of those that begin with the byte used least,
so that `minLength` is met in few tokens and a pattern such as `x*y` comes to its end. The text is then cut into the
fewest tokens that spell it.

`shortest` is a best-first search over bytes: a prefix is valued by its greedy plan, and dropped where the tokens that
cover it already are as many as the best plan's. Not promised: the minimum everywhere. Prefixes that look like one state
(equal mask, equal greedy rest) are taken for one; of more than FEW next bytes with equal masks and forced bytes only
the first is followed, none but the quotation mark where a string may end; and the search ends with its probes or time.
"""

import heapq
import json
import re
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from pipeline.generation.schemas import SchemaError, check, reason, refuse, strict
from pipeline.text.tokenizer import Tokenizer

MAX_STEPS = 2000  # of one walk
MAX_PROBES = 2000  # states that `shortest` looks at
MAX_SECONDS = 1.5  # of its thread, whatever else the machine does; only a hostile grammar needs them
FEW = 16  # next bytes that are all followed
CLOSERS = b'}]"0,:ntf123456789-[{'  # outside a string, in this order: what may nest without end comes last
CONTROL = re.compile(rb"\xff\[(\d+)\]")  # how llguidance writes a forced control token; no text holds that byte

Step = bytes | int  # bytes of text, or a control token


@dataclass(frozen=True)
class Place:
    """Where a text stands."""

    quoted: bool = False  # in a string
    escaped: bool = False  # behind a backslash in it
    digit: bool = False  # behind a digit outside of one: another lengthens the number

    def after(self, step: Step) -> "Place":
        """The place behind a text; behind a control token there is no string."""
        if isinstance(step, int):
            return Place()
        quoted, escaped = self.quoted, self.escaped
        for byte in step:
            if escaped:
                escaped = False
            elif byte == ord("\\"):
                escaped = quoted
            elif byte == ord('"'):
                quoted = not quoted
        return Place(quoted, escaped, not quoted and step[-1:].isdigit())


@dataclass(order=True)
class _Node:
    """A prefix that may be continued. Nodes are popped by the length of their greedy plan, the longest prefix first."""

    cost: float
    minus_said: int
    number: int
    said: list[Step] = field(compare=False)
    state: LLMatcher = field(compare=False)
    place: Place = field(compare=False)


class Closer:
    """Plans for one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.bytes = tokenizer.token_bytes
        self.byte_ids = tokenizer.byte_ids
        self.controls = frozenset(tokenizer.control_ids.values())
        self.ends = np.array([tokenizer.turn_end, tokenizer.end_of_text])
        self._control_ids = np.array(sorted(self.controls.difference(self.ends.tolist())))
        self._cutter = Cutter({text: id_ for id_, text in enumerate(self.bytes) if text and id_ not in self.controls})
        size = np.array([0 if id_ in self.controls else _characters(text) for id_, text in enumerate(self.bytes)])
        self._rank = np.empty(len(size), dtype=np.int64)  # (V,) 0 for the longest token
        self._rank[np.lexsort((np.arange(len(size)), -size))] = np.arange(len(size))
        self._first = np.array(
            [text[0] if text else 0 for text in self.bytes]
        )  # (V,) the byte that a token begins with

    def step(self, token: int) -> Step:
        """What a token adds to the text."""
        return token if token in self.controls else self.bytes[token]

    def close(self, matcher: LLMatcher, place: Place, most: int) -> list[int] | None:
        """A greedy plan of about `most` tokens at most, the matcher left as it is; None where there is none."""
        steps = self._walk(matcher, place, min(MAX_STEPS, 4 * most + 16), None)
        return None if steps is None else self._cutter.cut(steps)

    def follow(self, matcher: LLMatcher, place: Place, plan: list[int], token: int, most: int) -> list[int] | None:
        """A plan from behind `token`: none if the end stands there, what is left of `plan`, or a new one; None if
        there is none.
        """
        if plan and token == plan[0]:
            return plan[1:]
        end = int(self.ends[0])
        for rest in ([], plan, plan[1:]):
            tokens = [token, *rest, end]
            if matcher.validate_tokens(tokens) == len(tokens):
                return rest
        after = matcher.deep_copy()
        if not after.consume_token(token):
            return None
        return self.close(after, place.after(self.step(token)), most)

    def shortest(self, matcher: LLMatcher) -> list[int] | None:
        """The shortest output of a grammar at its beginning that the search finds; None where it finds no end at
        all.
        """
        deadline = time.thread_time() + MAX_SECONDS
        best: list[int] | None = None
        longest_walk, probes = MAX_STEPS, MAX_PROBES
        heap: list[_Node] = []
        known: dict[tuple[bytes, tuple[Step, ...]], float] = {}  # (mask, greedy rest) -> the least cost it was met with
        children: Iterator[tuple[list[Step], LLMatcher, Place]] = iter([([], matcher.deep_copy(), Place())])
        while True:
            for said, state, place in children:
                probes -= 1
                if best is not None and self._cutter.cover(said) >= len(best):
                    continue
                rest = self._walk(state, place, longest_walk, deadline)
                plan = None if rest is None else self._cutter.cut([*said, *rest])
                if plan is not None and (best is None or len(plan) < len(best)):
                    best = plan
                    longest_walk = min(MAX_STEPS, 16 + 2 * sum(len(self.bytes[id_]) or 1 for id_ in plan))
                cost = float("inf") if plan is None else len(plan)
                mark = (state.compute_bitmask(), tuple(rest or said))
                if mark in known and known[mark] <= cost:
                    continue
                known[mark] = cost
                heapq.heappush(heap, _Node(cost, -len(said), probes, said, state, place))
            if not heap or probes <= 0 or time.thread_time() > deadline:
                return best
            children = self._children(heapq.heappop(heap))

    def _children(self, node: _Node) -> Iterator[tuple[list[Step], LLMatcher, Place]]:
        """What a prefix may be continued to, the way of the walk first; nothing where the output may end: longer is
        not shorter.
        """
        if node.state.is_accepting():
            return
        steps = list(self._steps(node.state, node.place))
        if len(steps) > FEW and node.place.quoted and steps[0] == b'"':
            steps = steps[:1]  # free text that may end, ends
        seen: set[tuple[bytes, bytes]] = set()
        for step in steps:
            after = node.state.deep_copy()
            if not self._feed(after, step):
                continue
            mark = (
                (after.compute_bitmask(), after.compute_ff_bytes())
                if len(steps) > FEW
                else (b"", bytes(str(step), "ascii"))
            )
            if mark not in seen:
                seen.add(mark)
                yield [*node.said, step], after, node.place.after(step)

    def _walk(self, matcher: LLMatcher, place: Place, most: int, deadline: float | None) -> list[Step] | None:
        """At most `most` greedy steps to the nearest end; None where it is not reached."""
        state = matcher.deep_copy()
        said: list[Step] = []
        used: Counter[int] = Counter()
        for _ in range(most):
            if state.is_accepting():
                return said
            step = self._forced(state) or self._closer(state, place) or self._filler(state, used)
            if step is None or not self._feed(state, step) or (deadline and time.thread_time() > deadline):
                return None
            said.append(step)
            place = place.after(step)
        return None

    def _feed(self, state: LLMatcher, step: Step) -> bool:
        tokens = [step] if isinstance(step, int) else [self.byte_ids[byte] for byte in step]
        return state.try_consume_tokens(tokens) == len(tokens)

    def _forced(self, state: LLMatcher) -> Step | None:
        """The bytes, or the control token, that alone may follow."""
        forced = state.compute_ff_bytes()
        control = CONTROL.match(forced)
        return int(control[1]) if control else forced.split(b"\xff")[0] or None

    def _closer(self, state: LLMatcher, place: Place) -> bytes | None:
        """The first byte of those that lead to an end which may stand here."""
        if place.escaped:
            return None
        for byte in b'"' if place.quoted else CLOSERS:
            if not (place.digit and 48 <= byte < 58) and state.validate_tokens([self.byte_ids[byte]]) == 1:
                return bytes([byte])
        return None

    def _filler(self, state: LLMatcher, used: Counter[int]) -> Step | None:
        """A control token if one may stand; else the longest token of those whose first byte was used least."""
        allowed = self._allowed(state)
        if len(control := self._control_ids[allowed[self._control_ids]]):
            return int(control[0])
        ids = np.flatnonzero(allowed)
        if not len(ids):
            return None
        often = np.array([used[byte] for byte in range(256)])
        text = self.bytes[ids[np.argmin(often[self._first[ids]] * len(self._rank) + self._rank[ids])]]
        used[text[0]] += 1
        return text

    def _steps(self, state: LLMatcher, place: Place) -> Iterator[Step]:
        """Every next step: what is forced, or the walk's, then each control token and byte that may stand."""
        if forced := self._forced(state):
            yield forced
            return
        first = self._closer(state, place) or self._filler(state, Counter())
        if first is not None:
            yield first
        allowed = self._allowed(state)
        yield from (int(id_) for id_ in self._control_ids[allowed[self._control_ids]] if id_ != first)
        yield from (bytes([byte]) for byte, id_ in enumerate(self.byte_ids) if allowed[id_] and bytes([byte]) != first)

    def _allowed(self, state: LLMatcher) -> np.ndarray:
        """(V,) what may stand, but for the ends; nothing where the grammar gave out."""
        allowed = bits(state.compute_bitmask())
        allowed[self.ends] = False
        return allowed & (not state.is_error())


class Cutter:
    """Cuts bytes into tokens, by shortest paths over the places between bytes. Threads may share it."""

    def __init__(self, id_of: dict[bytes, int]) -> None:
        self.id_of = id_of
        self._texts = sorted(id_of)
        self._longest = max(map(len, id_of))
        self._lengths: dict[
            bytes, list[int]
        ] = {}  # the last two bytes (or the only one) -> lengths of such tokens, rising
        for text in sorted(id_of, key=len):
            known = self._lengths.setdefault(text[-2:], [])
            if len(text) not in known:
                known.append(len(text))
        self._recent: tuple[bytes, list[int], list[int]] = (
            b"",
            [0],
            [0],
        )  # a text and its paths: the next begins like it

    def cut(self, said: list[Step]) -> list[int]:
        """The fewest tokens that spell a text with control tokens; of several ways the one whose last tokens are
        longest.
        """
        ids: list[int] = []
        for text, control in _runs(said):
            _, lengths = self._paths(text)
            end, run = len(text), list[int]()
            while end:
                run.append(self.id_of[text[end - lengths[end] : end]])
                end -= lengths[end]
            ids += run[::-1] + ([] if control is None else [control])
        return ids

    def cover(self, said: list[Step]) -> int:
        """The fewest tokens of any text that begins so: the last of them may reach beyond."""
        total = 0
        for text, control in _runs(said):
            costs, _ = self._paths(text)
            least = costs[-1]
            if control is None:
                for start in range(max(0, len(text) - self._longest), len(text)):
                    if costs[start] + 1 < least and self._begins(text[start:]):
                        least = costs[start] + 1
            total += least + (control is not None)
        return total

    def _begins(self, text: bytes) -> bool:
        """Whether a token begins with `text`."""
        place = bisect_left(self._texts, text)
        return place < len(self._texts) and self._texts[place].startswith(text)

    def _paths(self, text: bytes) -> tuple[list[int], list[int]]:
        """For each place of `text`: the fewest tokens that reach it, and the length of the last of them."""
        known, costs, lasts = self._recent
        same = next((n for n, (old, new) in enumerate(zip(known, text)) if old != new), min(len(known), len(text)))
        costs, lasts = costs[: same + 1], lasts[: same + 1]
        for end in range(same + 1, len(text) + 1):
            best, last = costs[end - 1] + 1, 1
            for length in self._lengths.get(text[max(0, end - 2) : end], ()):
                if length > end:
                    break
                if costs[end - length] < best and text[end - length : end] in self.id_of:
                    best, last = costs[end - length] + 1, length
            costs.append(best)
            lasts.append(last)
        self._recent = (text, costs, lasts)
        return costs, lasts


def _runs(said: list[Step]) -> Iterator[tuple[bytes, int | None]]:
    """Steps as runs of text, each with the control token behind it; none behind the last."""
    text = b""
    for step in said:
        if isinstance(step, int):
            yield text, step
            text = b""
        else:
            text += step
    yield text, None


def bits(packed: bytes) -> np.ndarray:
    """A matcher's mask, a bit for each token, as booleans: (V,) or a few more."""
    return np.unpackbits(np.frombuffer(packed, np.uint8), bitorder="little").view(np.bool_)


def _characters(text: bytes) -> int:
    """Characters of a token; none where it is part of one, which would need its other parts."""
    try:
        return len(text.decode())
    except UnicodeDecodeError:
        return 0


# -- grammars ----------------------------------------------------------------------------------------------------------


FORM = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}  # as json.dumps writes
LIMITS = LLParserLimits(max_lexer_states=10_000, verbose_errors=False)  # a state is about 2 KB
ANY_OBJECT: dict[str, Any] = {"type": "object", "additionalProperties": True}


@dataclass(frozen=True)
class Written:
    """A grammar as llguidance reads it."""

    text: str
    free: bool = False  # free text may stand before it, or instead of it


def tool_calls(
    tokenizer: Tokenizer, tools: Sequence[dict[str, Any]], *, choice: str = "auto", parallel: bool = True
) -> Written:
    """Calls of the tools, in the form in which `text/chat.py` renders them.

    `choice`: "auto" lets free text stand before the calls or instead of them, "required" demands a call, a tool's name
    a call of that tool. `parallel` lets more calls follow. Raises SchemaError.
    """
    functions = {}
    for tool in tools:
        function = tool.get("function", tool)
        name = function.get("name")
        if not isinstance(name, str) or not name or not name.isprintable():
            raise SchemaError("tool_invalid", f"a tool needs a name, found {name!r}")
        if name in functions:
            raise SchemaError("tool_invalid", f"two tools have the name {name!r}; give each its own")
        functions[name] = function.get("parameters") or {}
    if choice not in ("auto", "required"):
        if choice not in functions:
            raise SchemaError("tool_unknown", f"tool_choice {choice!r}: valid names: {', '.join(functions)}")
        functions = {choice: functions[choice]}
    if not functions:
        raise SchemaError("tool_invalid", "expected at least one tool, found none")
    check(*functions.values())
    calls = [_call(name, _arguments(name, parameters)) for name, parameters in functions.items()]
    lines = [
        'start: call ("\\n" call)*' if parallel else "start: call",
        (
            f'call: <[{tokenizer.tool_call}]> "\\n" ({" | ".join(f"call{n}" for n in range(len(calls)))}) "\\n" '
            f"<[{tokenizer.tool_call_end}]>"
        ),
        *(f"call{number}: {call}" for number, call in enumerate(calls)),
    ]
    return Written("\n".join(lines), free=choice == "auto")


def json_schema(schema: dict[str, Any]) -> Written:
    """An instance of the schema and nothing else. Raises SchemaError."""
    check(schema)
    return Written(f"start: json\njson: {_json(schema)}")


class Compiler:
    """Compiles for one tokenizer. Threads may share it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer, ends = tokenizer, [tokenizer.turn_end, tokenizer.end_of_text]
        self._tokenizer = LLTokenizer(TokenizerWrapper(_Vocabulary(tokenizer)), eos_token=ends)
        self.closer = Closer(tokenizer)

    def matcher(self, text: str) -> LLMatcher:
        """A matcher at its beginning. Raises SchemaError."""
        matcher = LLMatcher(self._tokenizer, text, log_level=0, limits=LIMITS)
        if matcher.is_error():
            raise SchemaError("schema_refused", f"the schema cannot be promised: {reason(matcher.get_error())}")
        return matcher

    def shortest(self, matcher: LLMatcher) -> tuple[int, ...]:
        """The shortest output that is found. Raises SchemaError where there is none."""
        plan = self.closer.shortest(matcher)
        if plan is None:
            raise SchemaError(
                "schema_unclosable", "no output was found that ends: the schema demands too much, or is too large"
            )
        return tuple(plan)


class _Vocabulary:
    """The tokenizer as llguidance takes it in: control tokens are special, so no text spells them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokens = list(tokenizer.token_bytes)
        for content, id_ in tokenizer.control_ids.items():
            self.tokens[id_] = content.encode()
        self.special_token_ids = sorted(tokenizer.control_ids.values())
        self.eos_token_id = tokenizer.turn_end
        self.bos_token_id = None
        self._tokenizer = tokenizer

    def __call__(self, text: str | bytes) -> list[int]:
        return self._tokenizer.encode(text if isinstance(text, str) else text.decode(errors="replace"))


def _arguments(name: str, parameters: dict[str, Any]) -> dict[str, Any]:
    """The schema of a tool's arguments: an object, an empty one where no parameter is named. Raises SchemaError."""
    kinds = parameters.get("type", "object")
    if "object" not in ([kinds] if isinstance(kinds, str) else kinds):
        raise SchemaError("schema_refused", f"tool {name}: its parameters must be an object, found type {kinds!r}")
    if not set(parameters) & {
        "properties",
        "required",
        "additionalProperties",
        "patternProperties",
        "minProperties",
        "allOf",
        "anyOf",
        "oneOf",
        "$ref",
        "const",
        "enum",
    }:
        parameters = {**parameters, "properties": {}}
    return {**parameters, "type": "object"}


def _call(name: str, arguments: dict[str, Any]) -> str:
    """A rule's body for `{"name": ..., "arguments": ...}`."""
    opening = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": '
    return f'{json.dumps(opening, ensure_ascii=False)} {_json(arguments)} "}}"'


def _json(schema: dict[str, Any]) -> str:
    try:
        closed = strict(schema)
        refuse(schema, closed)
    except RecursionError as error:
        raise SchemaError("schema_too_large", "the references of the schema lead too deep; simplify it") from error
    return f"%json {json.dumps({**closed, 'x-guidance': FORM})}"
