"""The grammar of a request as a text, and what is compiled of it. Without torch: a process that only compiles starts at once.

    tool_calls(tokenizer, tools, choice="required") -> Written      or json_schema(schema): a text that llguidance reads
    Compiler(tokenizer).matcher(text) -> LLMatcher                  at its beginning; shortest(matcher) -> the closing plan

llguidance (guidance-ai, MIT) says which tokens a grammar allows: byte for byte the form in which `text/chat.py` renders what the
model is trained on. Everything here raises SchemaError for what cannot be promised.

Not promised: that a text compiles in time, or in the memory there is (`bounds.py`).
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from pipeline.generation.closing import Closer
from pipeline.generation.schemas import SchemaError, check, reason, refuse, strict
from pipeline.text.tokenizer import Tokenizer

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

    `choice`: "auto" lets free text stand before the calls or instead of them, "required" demands a call, a tool's name a
    call of that tool. `parallel` lets more calls follow. Raises SchemaError.
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
        f'call: <[{tokenizer.tool_call}]> "\\n" ({" | ".join(f"call{n}" for n in range(len(calls)))}) "\\n" '
        f"<[{tokenizer.tool_call_end}]>",
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
    if not set(parameters) & {"properties", "required", "additionalProperties", "patternProperties", "minProperties",
                              "allOf", "anyOf", "oneOf", "$ref", "const", "enum"}:  # fmt: skip
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
