"""Write and compile the grammars of requests; find closing plans, which complete an output in a few tokens.

    tool_calls(tokenizer, tools, choice="required") -> Written      or json_schema(schema): a grammar for llguidance
    Compiler(tokenizer).matcher(text) -> LLMatcher                  in its initial state
    Compiler(tokenizer).shortest(matcher) -> ids                    the shortest output found

llguidance (guidance-ai, MIT) computes the tokens that a grammar allows; our grammars match, byte for byte, how
`text/chat.py` renders the training data. All functions raise SchemaError for a grammar that cannot be guaranteed.
Nothing here imports torch, so a compile-only process starts fast.

Not guaranteed: that a grammar compiles in time, or in the available memory (`schemas.py` sets the limits that it can).

**A closing plan** is a list of tokens that completes an output from its current state.

    Closer(tokenizer).follow(matcher, lexer, plan, token, most)  the plan after a sampled token: the rest, or a new one
    Closer(tokenizer).close(matcher, lexer, most)                a greedy plan, after a token that is not the plan's
    Closer(tokenizer).shortest(matcher)                          the best plan that a search finds

A plan comes from walking a copy of the matcher byte by byte: forced bytes first; then the quotation mark inside a
string, or the closing bracket outside one; then the cheapest value. If none of those is allowed, the longest token that
starts with the least-used byte is taken, so that `minLength` is met in a few tokens and patterns such as `x*y` end.
The text is then split into as few tokens as possible.

`shortest` is a best-first search over bytes: a prefix is scored by its greedy plan, and dropped if covering it already
takes as many tokens as the best plan. Not guaranteed: the minimum. Prefixes that seem to share a state (same mask, same
greedy rest) are treated as one. If more than FEW next bytes are allowed, only the quotation mark is followed where a
string may end; elsewhere, only the first of the bytes that lead to the same mask and forced bytes. Probes and time are
limited.
"""

import heapq
import json
import re
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from pipeline.generation.schemas import SchemaError, check, reason, refuse, strict
from pipeline.run.types import JsonObject
from pipeline.text.tokenizer import Tokenizer

FORM = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}  # the format of json.dumps
LIMITS = LLParserLimits(max_lexer_states=10_000, verbose_errors=False)  # a state is about 2 KB
ANY_OBJECT: JsonObject = {"type": "object", "additionalProperties": True}


@dataclass(frozen=True)
class Written:
    """A grammar in llguidance's syntax."""

    text: str
    free: bool = False  # whether free text is allowed before or instead of the constrained output


def tool_calls(
    tokenizer: Tokenizer, tools: Sequence[JsonObject], *, choice: str = "auto", parallel: bool = True
) -> Written:
    """A grammar for calls of the tools, in the form rendered by `text/chat.py`.

    `choice`: "auto" allows free text before or instead of calls, "required" requires a call, a tool's name requires a
    call to that tool. `parallel` allows several calls. Raises SchemaError.
    """
    functions = {}
    for tool in tools:
        function = tool.get("function", tool)
        name = function.get("name")
        if not isinstance(name, str) or not name or not name.isprintable():
            raise SchemaError("tool_invalid", f"a tool needs a name, found {name!r}")
        if name in functions:
            raise SchemaError("tool_invalid", f"two tools have the name {name!r}; names must be unique")
        functions[name] = function.get("parameters") or {}
    if choice not in ("auto", "required"):
        if choice not in functions:
            raise SchemaError("tool_unknown", f"tool_choice {choice!r}: expected one of {', '.join(functions)}")
        functions = {choice: functions[choice]}
    if not functions:
        raise SchemaError("tool_invalid", "expected at least one tool, found none")
    check(*functions.values())
    calls = [_call_rule(name, _arguments_schema(name, parameters)) for name, parameters in functions.items()]
    lines = [
        'start: call ("\\n" call)*' if parallel else "start: call",
        (
            f'call: <[{tokenizer.tool_call}]> "\\n" ({" | ".join(f"call{n}" for n in range(len(calls)))}) "\\n" '
            f"<[{tokenizer.tool_call_end}]>"
        ),
        *(f"call{number}: {call}" for number, call in enumerate(calls)),
    ]
    return Written("\n".join(lines), free=choice == "auto")


def json_schema(schema: JsonObject) -> Written:
    """A grammar for an instance of the schema and nothing else. Raises SchemaError."""
    check(schema)
    return Written(f"start: json\njson: {_json_rule(schema)}")


def _arguments_schema(name: str, parameters: JsonObject) -> JsonObject:
    """The schema of a tool's arguments: an object, empty if there are no named parameters. Raises SchemaError."""
    kinds = parameters.get("type", "object")
    if "object" not in ([kinds] if isinstance(kinds, str) else kinds):
        raise SchemaError("schema_refused", f"tool {name}: parameters must be an object, found type {kinds!r}")
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


def _call_rule(name: str, arguments: JsonObject) -> str:
    """The grammar rule for `{"name": ..., "arguments": ...}`."""
    opening = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": '
    return f'{json.dumps(opening, ensure_ascii=False)} {_json_rule(arguments)} "}}"'


def _json_rule(schema: JsonObject) -> str:
    """The grammar rule for an instance of the schema."""
    try:
        closed = strict(schema)
        refuse(schema, closed)
    except RecursionError as error:
        raise SchemaError(
            "schema_too_large", "references in the schema are nested too deeply; simplify the schema"
        ) from error
    return f"%json {json.dumps({**closed, 'x-guidance': FORM})}"


class Compiler:
    """Compiles grammars for one tokenizer. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer, ends = tokenizer, [tokenizer.turn_end, tokenizer.end_of_text]
        self._tokenizer = LLTokenizer(TokenizerWrapper(_Vocabulary(tokenizer)), eos_token=ends)
        self.closer = Closer(tokenizer)

    def matcher(self, text: str) -> LLMatcher:
        """A matcher in its initial state. Raises SchemaError."""
        matcher = LLMatcher(self._tokenizer, text, log_level=0, limits=LIMITS)
        if matcher.is_error():
            raise SchemaError("schema_refused", f"the schema cannot be enforced: {reason(matcher.get_error())}")
        return matcher

    def shortest(self, matcher: LLMatcher) -> tuple[int, ...]:
        """The shortest output found. Raises SchemaError if there is none."""
        plan = self.closer.shortest(matcher)
        if plan is None:
            raise SchemaError(
                "schema_unclosable", "no complete output was found: the schema is too demanding or too large"
            )
        return tuple(plan)

    def first(self, matcher: LLMatcher) -> tuple[int, ...]:
        """The output of a greedy walk, or the shortest one if the walk does not end. Same errors as
        `shortest`.
        """
        plan = self.closer.close(matcher, LexerState(), MAX_STEPS)
        return self.shortest(matcher) if plan is None else tuple(plan)


class _Vocabulary:
    """The tokenizer as llguidance expects it: control tokens are special, so no text can spell them."""

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


# -- closing plans -----------------------------------------------------------------------------------------------------

MAX_STEPS = 2000  # of one walk
MAX_PROBES = 2000  # states that `shortest` visits
MAX_SECONDS = 1.5  # of thread time, independent of machine load; only a hostile grammar needs this long
FEW = 16  # up to this many next bytes are all followed
CLOSERS = b'}]"0,:ntf123456789-[{'  # outside a string, in this order; values that can nest endlessly come last
CONTROL = re.compile(rb"\xff\[(\d+)\]")  # llguidance's form of a forced control token; no text contains the byte ff
Step = bytes | int  # bytes of text, or a control token


@dataclass(frozen=True)
class LexerState:
    """The lexical state of a JSON text."""

    quoted: bool = False  # in a string
    escaped: bool = False  # after a backslash in a string
    digit: bool = False  # after a digit outside a string: another digit would extend the number

    def after(self, step: Step) -> "LexerState":
        """The state after more text; a control token ends any string."""
        if isinstance(step, int):
            return LexerState()
        quoted, escaped = self.quoted, self.escaped
        for byte in step:
            if escaped:
                escaped = False
            elif byte == ord("\\"):
                escaped = quoted
            elif byte == ord('"'):
                quoted = not quoted
        return LexerState(quoted, escaped, not quoted and step[-1:].isdigit())


@dataclass(order=True)
class _Node:
    """A prefix to extend. The node with the shortest greedy plan is popped first; among equals, the longest prefix."""

    cost: float
    minus_length: int
    number: int
    prefix: list[Step] = field(compare=False)
    state: LLMatcher = field(compare=False)
    lexer: LexerState = field(compare=False)


class Closer:
    """Finds closing plans for one tokenizer."""

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
        self._first = np.array([text[0] if text else 0 for text in self.bytes])  # (V,) the first byte of each token

    def step(self, token: int) -> Step:
        return token if token in self.controls else self.bytes[token]

    def close(self, matcher: LLMatcher, lexer: LexerState, most: int) -> list[int] | None:
        """A greedy plan of at most about `most` tokens, or None; does not change the matcher."""
        steps = self._walk(matcher, lexer, min(MAX_STEPS, 4 * most + 16), None)
        return None if steps is None else self._cutter.cut(steps)

    def follow(self, matcher: LLMatcher, lexer: LexerState, plan: list[int], token: int, most: int) -> list[int] | None:
        """A plan after `token`: empty if the output may end there, the rest of `plan`, or a new one; None if there is
        none.
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
        return self.close(after, lexer.after(self.step(token)), most)

    def shortest(self, matcher: LLMatcher) -> list[int] | None:
        """The shortest output of a matcher in its initial state that the search finds; None if it finds none."""
        deadline = time.thread_time() + MAX_SECONDS
        best: list[int] | None = None
        longest_walk, probes = MAX_STEPS, MAX_PROBES
        heap: list[_Node] = []
        costs: dict[tuple[bytes, tuple[Step, ...]], float] = {}  # (mask, greedy rest) -> the least cost so far
        children: Iterator[tuple[list[Step], LLMatcher, LexerState]] = iter([([], matcher.deep_copy(), LexerState())])
        while True:
            for prefix, state, lexer in children:
                probes -= 1
                if best is not None and self._cutter.cover(prefix) >= len(best):
                    continue
                rest = self._walk(state, lexer, longest_walk, deadline)
                plan = None if rest is None else self._cutter.cut([*prefix, *rest])
                if plan is not None and (best is None or len(plan) < len(best)):
                    best = plan
                    longest_walk = min(MAX_STEPS, 16 + 2 * sum(len(self.bytes[id_]) or 1 for id_ in plan))
                cost = float("inf") if plan is None else len(plan)
                signature = (state.compute_bitmask(), tuple(rest or prefix))
                if signature in costs and costs[signature] <= cost:
                    continue
                costs[signature] = cost
                heapq.heappush(heap, _Node(cost, -len(prefix), probes, prefix, state, lexer))
            if not heap or probes <= 0 or time.thread_time() > deadline:
                return best
            children = self._children(heapq.heappop(heap))

    def _children(self, node: _Node) -> Iterator[tuple[list[Step], LLMatcher, LexerState]]:
        """The continuations of a prefix, the walk's first; none if the output may end, since ending it is shorter."""
        if node.state.is_accepting():
            return
        steps = list(self._steps(node.state, node.lexer))
        if len(steps) > FEW and node.lexer.quoted and steps[0] == b'"':
            steps = steps[:1]  # free text ends as soon as it may
        seen: set[tuple[bytes, bytes]] = set()
        for step in steps:
            after = node.state.deep_copy()
            if not self._feed(after, step):
                continue
            if len(steps) > FEW:
                signature = (after.compute_bitmask(), after.compute_ff_bytes())
            else:
                signature = (b"", bytes(str(step), "ascii"))
            if signature not in seen:
                seen.add(signature)
                yield [*node.prefix, step], after, node.lexer.after(step)

    def _walk(self, matcher: LLMatcher, lexer: LexerState, most: int, deadline: float | None) -> list[Step] | None:
        """At most `most` greedy steps to the nearest end; None if it is not reached."""
        state = matcher.deep_copy()
        steps: list[Step] = []
        used: Counter[int] = Counter()
        for _ in range(most):
            if state.is_accepting():
                return steps
            step = self._forced_step(state) or self._closing_byte(state, lexer) or self._filler(state, used)
            if step is None or not self._feed(state, step) or (deadline and time.thread_time() > deadline):
                return None
            steps.append(step)
            lexer = lexer.after(step)
        return None

    def _feed(self, state: LLMatcher, step: Step) -> bool:
        tokens = [step] if isinstance(step, int) else [self.byte_ids[byte] for byte in step]
        return state.try_consume_tokens(tokens) == len(tokens)

    def _forced_step(self, state: LLMatcher) -> Step | None:
        """The bytes or the control token that must come next; None if there is a choice."""
        forced = state.compute_ff_bytes()
        control = CONTROL.match(forced)
        return int(control[1]) if control else forced.split(b"\xff")[0] or None

    def _closing_byte(self, state: LLMatcher, lexer: LexerState) -> bytes | None:
        """The first allowed closing byte."""
        if lexer.escaped:
            return None
        for byte in b'"' if lexer.quoted else CLOSERS:
            if not (lexer.digit and 48 <= byte < 58) and state.validate_tokens([self.byte_ids[byte]]) == 1:
                return bytes([byte])
        return None

    def _filler(self, state: LLMatcher, used: Counter[int]) -> Step | None:
        """A control token if one is allowed; else the longest token with the least-used first byte."""
        allowed = self._allowed(state)
        if len(control := self._control_ids[allowed[self._control_ids]]):
            return int(control[0])
        ids = np.flatnonzero(allowed)
        if not len(ids):
            return None
        counts = np.array([used[byte] for byte in range(256)])
        text = self.bytes[ids[np.argmin(counts[self._first[ids]] * len(self._rank) + self._rank[ids])]]
        used[text[0]] += 1
        return text

    def _steps(self, state: LLMatcher, lexer: LexerState) -> Iterator[Step]:
        """All next steps: only the forced one, if any; else the walk's, then each allowed control token and byte."""
        if forced := self._forced_step(state):
            yield forced
            return
        first = self._closing_byte(state, lexer) or self._filler(state, Counter())
        if first is not None:
            yield first
        allowed = self._allowed(state)
        yield from (int(id_) for id_ in self._control_ids[allowed[self._control_ids]] if id_ != first)
        yield from (bytes([byte]) for byte, id_ in enumerate(self.byte_ids) if allowed[id_] and bytes([byte]) != first)

    def _allowed(self, state: LLMatcher) -> np.ndarray:
        """(V,) bool, the allowed tokens without end tokens; none after a matcher error."""
        allowed = bits(state.compute_bitmask())
        allowed[self.ends] = False
        return allowed & (not state.is_error())


# -- splitting text into tokens ----------------------------------------------------------------------------------------


class Cutter:
    """Splits bytes into tokens by shortest paths over the positions between bytes. Thread-safe."""

    def __init__(self, id_of: dict[bytes, int]) -> None:
        self.id_of = id_of
        self._texts = sorted(id_of)
        self._longest = max(map(len, id_of))
        # the last two bytes (or the only one) -> lengths of tokens ending in them, ascending
        self._lengths: dict[bytes, list[int]] = {}
        for text in sorted(id_of, key=len):
            lengths = self._lengths.setdefault(text[-2:], [])
            if len(text) not in lengths:
                lengths.append(len(text))
        # the previous text and its paths: the next text often shares a prefix with it
        self._recent: tuple[bytes, list[int], list[int]] = (b"", [0], [0])

    def cut(self, steps: list[Step]) -> list[int]:
        """Split a text with control tokens into the fewest tokens; ties go to the longest last token."""
        ids: list[int] = []
        for text, control in _runs(steps):
            _, lengths = self._paths(text)
            end, run = len(text), list[int]()
            while end:
                run.append(self.id_of[text[end - lengths[end] : end]])
                end -= lengths[end]
            ids += run[::-1] + ([] if control is None else [control])
        return ids

    def cover(self, steps: list[Step]) -> int:
        """The minimum number of tokens of a text that starts with these steps; the last may extend beyond them."""
        total = 0
        for text, control in _runs(steps):
            costs, _ = self._paths(text)
            least = costs[-1]
            if control is None:
                for start in range(max(0, len(text) - self._longest), len(text)):
                    if costs[start] + 1 < least and self._begins(text[start:]):
                        least = costs[start] + 1
            total += least + (control is not None)
        return total

    def _begins(self, text: bytes) -> bool:
        """Whether any token begins with `text`."""
        index = bisect_left(self._texts, text)
        return index < len(self._texts) and self._texts[index].startswith(text)

    def _paths(self, text: bytes) -> tuple[list[int], list[int]]:
        """For each position of `text`: the minimum number of tokens up to it, and the length of the last one."""
        recent, costs, lasts = self._recent
        same = next((n for n, (old, new) in enumerate(zip(recent, text)) if old != new), min(len(recent), len(text)))
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


def _runs(steps: list[Step]) -> Iterator[tuple[bytes, int | None]]:
    """Steps as runs of text, each with the control token after it; None after the last run."""
    text = b""
    for step in steps:
        if isinstance(step, int):
            yield text, step
            text = b""
        else:
            text += step
    yield text, None


def bits(packed: bytes) -> np.ndarray:
    """A matcher's mask, one bit per token, as booleans: (V,) or slightly longer."""
    return np.unpackbits(np.frombuffer(packed, np.uint8), bitorder="little").view(np.bool_)


def _characters(text: bytes) -> int:
    """Number of characters in a token; 0 for a partial character."""
    try:
        return len(text.decode())
    except UnicodeDecodeError:
        return 0
