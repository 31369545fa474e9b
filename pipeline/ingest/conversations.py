"""Convert conversations from the formats of public datasets to the message lists of `records`.

In: lists of role/content or from/value messages, and transcripts (Glaive, hh-rlhf). Out: messages with the roles
system, user, assistant and tool. Calls become `tool_calls` numbered from call_0, with arguments as JSON text. A result
goes to the call whose id it names, else to the first call without a result; a JSON list with one entry per open call is
split among those calls. Consecutive assistant text and calls are merged into one turn. Unreadable input raises
`RowError`.

Not guaranteed: that every call has a result, or that user and assistant alternate.
"""

import json
import re
from collections.abc import Sequence

from pipeline.ingest.records import Message
from pipeline.ingest.tool_calls import Call, RowError, bracket_calls, from_json, glaive_call, json_calls, to_json, tools
from pipeline.run.types import JsonObject

_ROLES = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "model", "chatgpt", "bot"), "assistant"),
    **dict.fromkeys(("function_call", "tool_call"), "call"),
    **dict.fromkeys(("tool", "function", "observation", "tool_response", "ipython"), "tool"),
}


class MessageBuilder:
    """Builds a message list and tracks the calls that have no result yet."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._num_calls = 0
        self._open_calls: list[tuple[str, JsonObject]] = []  # (id in the source, our entry in tool_calls)

    def add_turn(self, role: str, content: str) -> None:
        if role == "assistant":
            self._open_calls = []
        self.messages.append({"role": role, "content": content})

    def add_calls(self, calls: Sequence[Call], field: str, ids: Sequence[str] = (), content: str = "") -> None:
        """Add assistant calls, merged into the preceding assistant turn if there is one."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.messages.append({"role": "assistant", "content": ""})
            self._open_calls = []
        last = self.messages[-1]
        last["content"] = "\n".join(part for part in (last["content"], content) if part.strip())
        for index, call in enumerate(calls):
            entry = {
                "id": f"call_{self._num_calls}",
                "type": "function",
                "function": {"name": call.name, "arguments": to_json(call.arguments, f"{field}.arguments")},
            }
            self._num_calls += 1
            last.setdefault("tool_calls", []).append(entry)
            self._open_calls.append((ids[index] if index < len(ids) else "", entry))

    def add_result(self, content: str, field: str, source_id: str = "") -> None:
        """Add the result of one open call, or of all open calls if it is a JSON list with one entry per call."""
        if not self._open_calls:
            raise RowError(field, "a result without a preceding call")
        if not source_id and len(self._open_calls) > 1 and content.lstrip().startswith("["):
            try:
                entries = from_json(content, field)
            except RowError:
                entries = []
            if isinstance(entries, list) and len(entries) == len(self._open_calls):
                for entry in entries:
                    self._close_call(entry if isinstance(entry, str) else to_json(entry, field), 0)
                return
        ids = [call_id for call_id, _ in self._open_calls]
        self._close_call(content, ids.index(source_id) if source_id in ids else 0)

    def _close_call(self, content: str, index: int) -> None:
        _, call = self._open_calls.pop(index)
        name = call["function"]["name"]
        self.messages.append({"role": "tool", "tool_call_id": call["id"], "name": name, "content": content})


def check(messages: Sequence[Message], tool_list: Sequence[JsonObject]) -> None:
    """Raise RowError unless the dialogue can be trained on: it needs an assistant turn, no assistant turn may be empty,
    and only listed tools may be called.
    """
    if not any(message["role"] == "assistant" for message in messages):
        raise RowError("messages", "no assistant turn")
    names = {tool["function"]["name"] for tool in tool_list}
    for index, message in enumerate(messages):
        for entry in message.get("tool_calls", ()):
            if entry["function"]["name"] not in names:
                raise RowError(
                    f"messages[{index}]", f"calls {entry['function']['name']!r}, which is not in the tool list"
                )
        if message["role"] == "assistant" and not message["content"].strip() and not message.get("tool_calls"):
            raise RowError(f"messages[{index}].content", "the assistant turn is empty")


def question(text: str, answer: str, system: str = "") -> list[Message]:
    """The messages for one question and its answer."""
    first = [{"role": "system", "content": system}] if system else []
    return [*first, {"role": "user", "content": text}, {"role": "assistant", "content": answer}]


def from_list(entries: Sequence[object], field: str) -> list[Message]:
    """Parse role/content (OpenAI) or from/value (ShareGPT) messages, with calls and results in either form."""
    if not entries:
        raise RowError(field, "no messages")
    builder = MessageBuilder()
    for index, entry in enumerate(entries):
        _add_entry(builder, entry, f"{field}[{index}]")
    return builder.messages


def _add_entry(builder: MessageBuilder, value: object, field: str) -> None:
    entry = _require_object(value, field)
    role, content = _role_and_content(entry, field)
    if role == "call":
        builder.add_calls(json_calls(content, field), field)
    elif role == "tool":
        call_id = entry.get("tool_call_id")
        builder.add_result(content, field, call_id if isinstance(call_id, str) else "")
    elif role == "assistant" and (entry.get("tool_calls") or entry.get("function_call")):
        calls = entry.get("tool_calls") or [entry["function_call"]]
        if not isinstance(calls, list):
            raise RowError(f"{field}.tool_calls", f"expected a list, found {type(calls).__name__}")
        ids = [call["id"] if isinstance(call, dict) and isinstance(call.get("id"), str) else "" for call in calls]
        builder.add_calls(json_calls(calls, f"{field}.tool_calls"), field, ids, content)
    else:
        builder.add_turn(role, content)


def _require_object(entry: object, field: str) -> JsonObject:
    if not isinstance(entry, dict):
        raise RowError(field, f"expected a message, found {type(entry).__name__}")
    return entry


def _role_and_content(entry: JsonObject, field: str) -> tuple[str, str]:
    names = ("role", "content") if entry.get("role") is not None else ("from", "value")
    word, content = entry.get(names[0]), entry.get(names[1])
    role = _ROLES.get(word.strip().lower()) if isinstance(word, str) else None
    if role is None:
        raise RowError(f"{field}.{names[0]}", f"expected system, user, assistant or tool, found {word!r}"[:120])
    if isinstance(content, list):  # OpenAI content parts: text only, no images or audio
        if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
            raise RowError(f"{field}.{names[1]}", "expected text parts only")
        content = "".join(part["text"] for part in content)
    if role in ("call", "tool") and isinstance(content, dict):
        content = to_json(content, f"{field}.{names[1]}")
    if content is None and role == "assistant":
        content = ""
    if not isinstance(content, str):
        raise RowError(f"{field}.{names[1]}", f"expected a string, found {type(content).__name__}")
    return role, content


def xlam(query: str, answers: object, field: str) -> list[Message]:
    """xLAM: one question and its calls as JSON text. `[]` (no tool fits) is rejected: it leaves nothing to train on."""
    calls = json_calls(answers, field)
    if not calls:
        raise RowError(field, "expected a call or an answer, found neither")
    builder = MessageBuilder()
    builder.add_turn("user", query)
    builder.add_calls(calls, field)
    return builder.messages


# --- Glaive ----------------------------------------------------------------------------------------------------------

_GLAIVE_TURN = re.compile(r"(?:^|\n)\s*(USER|ASSISTANT|FUNCTION RESPONSE):", re.MULTILINE)
_END_MARK = re.compile(r"<\|\w+\|>\s*$")  # Glaive writes a different model's end token as text
_GLAIVE_OFFER = re.compile(r",?\s*with access to the following functions\.\s*Use them if required\s*-?\s*$")


def glaive_system(text: str, field: str) -> tuple[str, list[JsonObject]]:
    """`SYSTEM: <instruction> <function JSON> <function JSON> ...` -> (instruction, tools)."""
    text = text.strip().removeprefix("SYSTEM:").strip()
    start = text.find("{")
    if start < 0:
        return text, []
    instruction = _GLAIVE_OFFER.sub(".", text[:start].strip()).strip()
    functions: list[object] = []
    while start < len(text):
        function, start = _decode_at(text, start, field)
        functions.append(function)
        while start < len(text) and text[start] in " \n\t\r,":
            start += 1
    return instruction, tools(functions, field)


def glaive(chat: str, field: str) -> list[Message]:
    """A Glaive transcript -> messages."""
    pieces = _GLAIVE_TURN.split(chat)
    if pieces[0].strip() or len(pieces) < 3:
        raise RowError(field, f"expected `USER:`, found {pieces[0].strip()[:40]!r}")
    builder = MessageBuilder()
    for number, (speaker, text) in enumerate(zip(pieces[1::2], pieces[2::2], strict=True)):
        turn_field, text = f"{field}[{number}]", _END_MARK.sub("", text.strip()).strip()
        if speaker == "USER":
            builder.add_turn("user", text)
        elif speaker == "FUNCTION RESPONSE":
            builder.add_result(text, turn_field)
        else:
            content, *calls = text.split("<functioncall>")
            if calls:
                parsed = [glaive_call(_END_MARK.sub("", call.strip()), turn_field) for call in calls]
                builder.add_calls(parsed, turn_field, content=content.strip())
            else:
                builder.add_turn("assistant", text)
    return builder.messages


# --- ToolACE ---------------------------------------------------------------------------------------------------------

_FUNCTIONS = re.compile(r'\[\s*\{\s*"(?:name|type|description)"')
_TODAY = re.compile(r"(?:Today is|The current (?:time|date)\b)[^\n]*?(?:\.(?=\s|$|[A-Z])|\n|$)")


def find_functions(system: str) -> int:
    """Offset of the JSON list of functions in a system prompt; -1 if there is none."""
    match = _FUNCTIONS.search(system)
    return match.start() if match else -1


def toolace_system(system: str) -> tuple[str, list[JsonObject]]:
    """(date, tools) of a system prompt. The rest, which describes ToolACE's call syntax, is dropped."""
    start = find_functions(system)
    functions, end = _decode_at(system, start, "system")
    today = _TODAY.search(system[:start] + "\n" + system[end:])
    return today.group().strip() if today else "", tools(functions, "system")


def toolace(entries: Sequence[object], field: str) -> list[Message]:
    """ToolACE turns: like ShareGPT, but calls are assistant text of the form `[Name(a=1), ...]`."""
    if not entries:
        raise RowError(field, "no messages")
    builder = MessageBuilder()
    for index, entry in enumerate(entries):
        turn_field = f"{field}[{index}]"
        role, content = _role_and_content(_require_object(entry, turn_field), turn_field)
        calls = bracket_calls(content, turn_field) if role == "assistant" else []
        if calls:
            builder.add_calls(calls, turn_field)
        elif role == "tool":
            builder.add_result(_bare_results(content), turn_field)
        else:
            builder.add_turn(role, content)
    return builder.messages


def _bare_results(content: str) -> str:
    """`[{"name": "f", "results": {...}}]` -> only the results, since the names just repeat those of the calls."""
    try:
        entries = json.loads(content)
    except (ValueError, RecursionError):
        return content
    if not isinstance(entries, list) or not all(isinstance(e, dict) and "results" in e for e in entries) or not entries:
        return content
    results = [entry["results"] for entry in entries]
    return to_json(results if len(results) > 1 else results[0], "results")


def _decode_at(text: str, start: int, field: str) -> tuple[object, int]:
    try:
        return json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError) as error:
        raise RowError(field, f"the functions are not JSON ({error})") from error


# --- transcripts -----------------------------------------------------------------------------------------------------

_SPEAKER = re.compile(r"(?:^|\n\n)(Human|Assistant):")


def transcript(text: str, field: str) -> list[Message]:
    """hh-rlhf: `Human: ...`, `Assistant: ...` after blank lines -> messages; an empty turn is an error."""
    pieces = _SPEAKER.split(text)
    if pieces[0].strip() or len(pieces) < 3:
        raise RowError(field, f"expected `Human:` or `Assistant:`, found {text.strip()[:40]!r}")
    messages: list[Message] = []
    for speaker, content in zip(pieces[1::2], pieces[2::2], strict=True):
        if not content.strip():
            raise RowError(field, f"empty turn: {speaker}")
        messages.append({"role": "user" if speaker == "Human" else "assistant", "content": content.strip()})
    return messages
