"""Conversations as text and as ids: ChatML turns, Hermes tool calls, and which tokens the assistant is trained on.

    <|im_start|>system ... Tools you can call: <tools> a function JSON per line </tools><|im_end|>
    <|im_start|>user ...<|im_end|>
    <|im_start|>assistant content <tool_call> {"name": "f", "arguments": {...}} </tool_call><|im_end|>
    <|im_start|>tool <tool_response> ... </tool_response><|im_end|>

`render` gives ids and mask together, so nothing searches for substrings later. Its contract: every part of the messages
appears; a prefix of the messages renders to a prefix of the ids, also with the generation prompt; control tokens come
from here alone, never from a message's text; the stop token is trained, the line feed after it is not.

The code of an answer is the one fenced Python block that ends it; for judging, a lone block anywhere counts, else a
bare answer that parses and defines something. Nothing here runs code.

Not promised: `parse` cannot distinguish a control token from text that spells it; it reads text.
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
    """A conversation as the model sees it; `trained[i]`: the assistant is trained to say `ids[i]`."""

    ids: list[int]  # (T,)
    trained: list[bool]  # (T,)


@dataclass(frozen=True)
class Reply:
    """One assistant turn, parsed; `error`: why a call could not be read."""

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
    """Ids and trained-on mask of a conversation in the OpenAI form; `generation_prompt` opens an assistant turn.

    Raises DataError when a message has another role, a content that is no string, or arguments that are no JSON object.
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
    """The ids between the end of an assistant's turn with calls and its next turn: a result for each call.

    After the ids of the turn they are what `render` gives for the same messages.
    """
    messages = [{"role": "tool", "content": content} for content in contents]
    return tokenizer.encode("\n") + render(tokenizer, messages, generation_prompt=True).ids


def spoken(tokenizer: Tokenizer, ids: Sequence[int]) -> list[bool]:
    """Which ids of rendered conversations the assistant says, with the ends of its turns: computed from the ids alone.

    A second opinion on `Rendered.trained`, for a gate. Every turn must be whole.
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
    """The same conversation as text, equal to what `tokenizer.TEMPLATE` gives. Raises DataError as `render` does."""
    return "".join(part.text for part in _parts(messages, tools, generation_prompt))


def _parts(messages: Sequence[Message], tools: Sequence[JsonObject], generation_prompt: bool) -> Iterator[_Part]:
    """The conversation, cut where the ids must be cut: at control tokens and where the assistant begins to speak."""
    messages = list(messages)
    has_system = bool(messages) and messages[0].get("role") in ("system", "developer")
    if has_system or tools:
        opening = _content(messages.pop(0)) if has_system else ""
        yield from _turn("system", "\n\n".join(text for text in (opening, _tool_list(tools)) if text))
    for message in _in_call_order(messages):
        role, content = message.get("role"), _content(message)
        if role not in ROLES:
            raise DataError(f"a message has the role {role!r}; valid roles: {', '.join(ROLES)}")
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
    # One part, not two: white space that a text begins with is joined to the line feed by the split pattern.
    yield _Part(f"{role}\n{text}")
    yield from body
    yield _Part(END, control=True)
    yield _Part("\n")


def _assistant_turn(content: str, calls: list[JsonObject]) -> Iterator[_Part]:
    yield _Part(START, control=True)
    yield _Part(HEADER)  # its own part: stripped content makes the prompt's border a token border
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
    """A call as `{"name": ..., "arguments": {...}}`; arguments given as JSON text are parsed and written again."""
    function = call.get("function", call)
    name, arguments = function.get("name"), function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = _decoder.decode(arguments)
        except ValueError as error:
            raise DataError(f"the arguments of a call to {name!r} are not JSON ({error}): {arguments[:200]}") from error
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise DataError(f"a call needs a name and an object of arguments, found {function!r:.200}")
    return _dumps({"name": name, "arguments": arguments})


def _in_call_order(messages: list[Message]) -> list[Message]:
    """Results that follow one assistant turn, in the order of its calls; ids are not rendered, so order is the link."""
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
    """Read one assistant turn back: content outside the call blocks, the calls, and the first error among them.

    A call is read as JSON from its opening, so a closing marker inside an argument's string does not end it.
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
        raise ValueError(f"expected a name and an object of arguments, found {call!r:.80}")
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


# A fence of three or more backticks on its own line, its language, and the same fence closing it.
FENCE = re.compile(
    r"^(?P<fence>`{3,})[ \t]*(?P<language>[\w+-]*)[ \t]*\n(?P<code>.*?)^(?P=fence)[ \t]*$", re.DOTALL | re.MULTILINE
)
PYTHON = ("python", "py", "python3", "")
MAX_CHARACTERS = 65_536  # characters; longer answers are not parsed


def extract(answer: str) -> str | None:
    """The code to judge: the only fenced Python block, else a bare answer that is Python with a definition; or None.

    Bare code is what a model writes before it has learned to chat; a definition is required because "no" parses too.
    """
    blocks = [match for match in FENCE.finditer(answer) if match["language"].lower() in PYTHON]
    if len(blocks) == 1:
        return blocks[0]["code"]
    module = tree(answer) if not blocks and "```" not in answer else None
    defines = module is not None and any(isinstance(node, ast.FunctionDef | ast.ClassDef) for node in module.body)
    return answer if defines else None


def formatted(answer: str) -> bool:
    """Whether the answer has exactly one fenced block, of Python, and ends with it."""
    blocks = list(FENCE.finditer(answer))
    if len(blocks) != 1 or blocks[0]["language"].lower() not in ("python", "py", "python3"):
        return False
    block = blocks[0]
    outside = answer[: block.start()] + answer[block.end() :]
    return "```" not in outside and not answer[block.end() :].strip()


def tree(source: str) -> ast.Module | None:
    """The syntax tree, or None where the source does not parse (or is too long, or too deep for the parser)."""
    if len(source) > MAX_CHARACTERS:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # of the candidate's strings, no concern of ours
        try:
            return ast.parse(source)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None
