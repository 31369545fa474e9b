"""Render conversations as text and ids: ChatML turns, Hermes tool calls, and the assistant's loss mask.

    <|im_start|>system ... Tools you can call: <tools> one function JSON per line </tools><|im_end|>
    <|im_start|>user ...<|im_end|>
    <|im_start|>assistant content <tool_call> {"name": "f", "arguments": {...}} </tool_call><|im_end|>
    <|im_start|>tool <tool_response> ... </tool_response><|im_end|>

`render` returns ids and mask together, so no later code has to search for substrings. Its contract: every part of the
messages appears; a prefix of the messages renders to a prefix of the ids, including with the generation prompt; control
tokens come only from here, never from a message's text; the stop token is trained, the line feed after it is not.

The code of an answer is its single fenced Python block, at the end. The judge accepts a single block anywhere, or
a bare answer that parses and defines something. Nothing here runs code.

Limitation: `parse` works on text, so it cannot distinguish a control token from text that spells it.
"""

import ast
import json
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, NoReturn

from pipeline.run.errors import DataError
from pipeline.run.types import JsonObject
from pipeline.text.tokenizer import ADDED, SPECIAL, Tokenizer

Message = JsonObject
START, END = SPECIAL["turn_start"], SPECIAL["turn_end"]
CALL, CALL_END = ADDED["tool_call"], ADDED["tool_call_end"]
RESPONSE, RESPONSE_END = ADDED["tool_response"], ADDED["tool_response_end"]
HEADER = "assistant\n"  # opens the assistant's turn, after START
ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True)
class Rendered:
    """A conversation as the model sees it; `trained[i]`: whether the model is trained to produce `ids[i]`."""

    ids: list[int]  # (T,)
    trained: list[bool]  # (T,)


@dataclass(frozen=True)
class Reply:
    """One parsed assistant turn; `error`: the reason why a call could not be parsed."""

    content: str
    tool_calls: list[JsonObject] = field(default_factory=list)  # {"name": str, "arguments": dict}
    error: str | None = None


class _Part(NamedTuple):
    text: str
    control: bool = False  # one added token, not text
    trained: bool = False


def render(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    tools: Sequence[JsonObject] = (),
    *,
    generation_prompt: bool = False,
) -> Rendered:
    """Ids and loss mask of a conversation in OpenAI format; `generation_prompt` opens an assistant turn.

    Raises DataError for an unknown role, non-string content, or arguments that are not a JSON object.
    """
    parts = list(_parts(messages, tools, generation_prompt))
    encoded = iter(tokenizer.encode_batch([part.text for part in parts if not part.control]))
    ids: list[int] = []
    trained: list[bool] = []
    for part in parts:
        new = [tokenizer.control_ids[part.text]] if part.control else next(encoded)
        ids += new
        trained += [part.trained] * len(new)
    return Rendered(ids, trained)


def results(tokenizer: Tokenizer, contents: Sequence[str]) -> list[int]:
    """The ids between an assistant turn with calls and the next assistant turn: one result per call.

    Appended to the ids of the first turn, they equal what `render` returns for the same messages.
    """
    messages = [{"role": "tool", "content": content} for content in contents]
    return tokenizer.encode("\n") + render(tokenizer, messages, generation_prompt=True).ids


def spoken(tokenizer: Tokenizer, ids: Sequence[int]) -> list[bool]:
    """The mask of assistant ids in rendered conversations, including end-of-turn tokens, based only on the ids.

    An independent check of `Rendered.trained`, for a gate. Every turn must be complete.
    """
    header, mask = tokenizer.encode(HEADER), [False] * len(ids)
    starts = [index for index, id_ in enumerate(ids) if id_ == tokenizer.turn_start]
    ends = [index for index, id_ in enumerate(ids) if id_ == tokenizer.turn_end]
    for start, end in zip(starts, ends, strict=True):
        first = start + 1 + len(header)
        if list(ids[start + 1 : first]) == header:
            mask[first : end + 1] = [True] * (end + 1 - first)
    return mask


def render_text(
    messages: Sequence[Message], tools: Sequence[JsonObject] = (), *, generation_prompt: bool = False
) -> str:
    """What `render` returns, as text; equals the output of `tokenizer.TEMPLATE`. Raises DataError like `render`."""
    return "".join(part.text for part in _parts(messages, tools, generation_prompt))


def _parts(messages: Sequence[Message], tools: Sequence[JsonObject], generation_prompt: bool) -> Iterator[_Part]:
    """The conversation, split where the ids must be split: at control tokens and where assistant content begins."""
    messages = list(messages)
    has_system = bool(messages) and messages[0].get("role") in ("system", "developer")
    if has_system or tools:
        opening = _content(messages.pop(0)) if has_system else ""
        yield from _turn("system", "\n\n".join(text for text in (opening, _tool_list(tools)) if text))
    for message in _in_call_order(messages):
        role, content = message.get("role"), _content(message)
        if role not in ROLES:
            raise DataError(f"a message has role {role!r}; valid roles: {', '.join(ROLES)}")
        if role == "assistant":
            yield from _assistant_turn(content.strip(), message.get("tool_calls") or [])
        elif role == "tool":
            body = (_Part(RESPONSE, control=True), _Part(f"\n{content}\n"), _Part(RESPONSE_END, control=True))
            yield from _turn("tool", "", *body)
        else:
            yield from _turn("system" if role == "developer" else role, content)
    if generation_prompt:
        yield _Part(START, control=True)
        yield _Part(HEADER)


def _turn(role: str, text: str, *body: _Part) -> Iterator[_Part]:
    yield _Part(START, control=True)
    # One part, not two: the split pattern joins leading whitespace of the text to the line feed.
    yield _Part(f"{role}\n{text}")
    yield from body
    yield _Part(END, control=True)
    yield _Part("\n")


def _assistant_turn(content: str, calls: list[JsonObject]) -> Iterator[_Part]:
    yield _Part(START, control=True)
    yield _Part(HEADER)  # a separate part: with stripped content, the end of the prompt is a token boundary
    if content:
        yield _Part(content + ("\n" if calls else ""), trained=True)
    for number, call in enumerate(calls):
        if number:
            yield _Part("\n", trained=True)
        yield _Part(CALL, control=True, trained=True)
        yield _Part(f"\n{_call_json(call)}\n", trained=True)
        yield _Part(CALL_END, control=True, trained=True)
    yield _Part(END, control=True, trained=True)
    yield _Part("\n")


def _content(message: Message) -> str:
    content = message.get("content")
    if content is None:
        return ""
    if not isinstance(content, str):
        raise DataError(
            f"the content of a {message.get('role')} message must be a string, found {type(content).__name__}"
        )
    return content


def _tool_list(tools: Sequence[JsonObject]) -> str:
    if not tools:
        return ""
    lines = [_dumps(tool.get("function", tool)) for tool in tools]
    return "\n".join(["Tools you can call:", "<tools>", *lines, "</tools>"])


def _call_json(call: JsonObject) -> str:
    """A call as `{"name": ..., "arguments": {...}}`; arguments given as JSON text are parsed and re-serialized."""
    function = call.get("function", call)
    name, arguments = function.get("name"), function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = _decoder.decode(arguments)
        except ValueError as error:
            raise DataError(f"the arguments of a call to {name!r} are not JSON ({error}): {arguments[:200]}") from error
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise DataError(f"a call needs a name and an arguments object, found {function!r:.200}")
    return _dumps({"name": name, "arguments": arguments})


def _in_call_order(messages: list[Message]) -> list[Message]:
    """Sort the results after an assistant turn into call order; ids are not rendered, so order is the only link."""
    ordered: list[Message] = []
    call_order: dict[str, int] = {}
    results: list[Message] = []
    for message in messages:
        if message.get("role") == "tool":
            results.append(message)
            continue
        ordered += sorted(results, key=lambda m: call_order.get(str(m.get("tool_call_id")), len(call_order)))
        results = []
        call_order = {str(call.get("id")): n for n, call in enumerate(message.get("tool_calls") or [])}
        ordered.append(message)
    return ordered + sorted(results, key=lambda m: call_order.get(str(m.get("tool_call_id")), len(call_order)))


def parse(text: str) -> Reply:
    """Parse one assistant turn into the content outside the call blocks, the calls, and the first error.

    Calls are parsed as JSON from the opening marker, so a closing marker inside a string argument does not end a call.
    """
    content: list[str] = []
    calls: list[JsonObject] = []
    error: str | None = None
    rest = text
    while CALL in rest:
        before, _, rest = rest.partition(CALL)
        content.append(before.strip())
        try:
            call, rest = _read_call(rest)
            calls.append(call)
        except (ValueError, RecursionError) as failure:
            error = error or f"a call that cannot be read: {failure}"
            broken = rest.partition(CALL)[0]
            _, closed, after = broken.partition(CALL_END)
            rest = (after if closed else "") + rest[len(broken) :]
    content.append(rest.strip())
    return Reply("\n".join(piece for piece in content if piece), calls, error)


def _read_call(rest: str) -> tuple[JsonObject, str]:
    """The call at the start of `rest`, and what follows its closing marker. Raises ValueError."""
    call, end = _decoder.raw_decode(rest, len(rest) - len(rest.lstrip()))
    after = rest[end:].lstrip()
    if not after.startswith(CALL_END):
        raise ValueError(f"expected {CALL_END} after its JSON, found {after[:20]!r}")
    if not isinstance(call, dict) or set(call) != {"name", "arguments"}:
        raise ValueError(f"expected an object with name and arguments, found {call!r:.80}")
    if not isinstance(call["name"], str) or not isinstance(call["arguments"], dict):
        raise ValueError(f"expected a name and an arguments object, found {call!r:.80}")
    return call, after[len(CALL_END) :]


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


_decoder = json.JSONDecoder(parse_constant=_refuse_constant)


def _dumps(value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError) as error:
        raise DataError(f"not strict JSON ({error}): {value!r:.200}") from error


# --- code in an answer -----------------------------------------------------------------------------------------------


# A fence of three or more backticks at the start of a line, its language, the code, and the same fence again.
FENCE = re.compile(
    r"^(?P<fence>`{3,})[ \t]*(?P<language>[\w+-]*)[ \t]*\n(?P<code>.*?)^(?P=fence)[ \t]*$", re.DOTALL | re.MULTILINE
)
PYTHON = ("python", "py", "python3", "")
MAX_CHARACTERS = 65_536  # characters; longer answers are not parsed


def extract(answer: str) -> str | None:
    """The code to judge: the only fenced Python block, or a bare answer that is Python with a definition; else None.

    Models write bare code before they have learned to chat; a definition is required because "no" parses too.
    """
    blocks = [match for match in FENCE.finditer(answer) if match["language"].lower() in PYTHON]
    if len(blocks) == 1:
        return blocks[0]["code"]
    module = tree(answer) if not blocks and "```" not in answer else None
    defines = module is not None and any(isinstance(node, ast.FunctionDef | ast.ClassDef) for node in module.body)
    return answer if defines else None


def formatted(answer: str) -> bool:
    """Whether the answer has exactly one fenced block, which is Python and ends the answer."""
    blocks = list(FENCE.finditer(answer))
    if len(blocks) != 1 or blocks[0]["language"].lower() not in ("python", "py", "python3"):
        return False
    block = blocks[0]
    outside = answer[: block.start()] + answer[block.end() :]
    return "```" not in outside and not answer[block.end() :].strip()


def tree(source: str) -> ast.Module | None:
    """The syntax tree, or None if the source does not parse (or is too long or too deeply nested)."""
    if len(source) > MAX_CHARACTERS:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # about the candidate's strings, not our concern
        try:
            return ast.parse(source)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None
