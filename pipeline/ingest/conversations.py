"""Conversations in the dialects of public data sets -> the message lists of `streams.records`.

In: lists of role/content or from/value, and whole transcripts (Glaive's, hh-rlhf's). Out: messages of the roles system,
user, assistant, tool, with calls as `tool_calls` numbered from call_0, arguments as JSON text, and each result tied to
its call: by the id it names, else to the first call without a result; a JSON list as long as the open calls is one
result each. Text and a call that follow one another become one turn of the assistant. What cannot be read raises
`RowError`.

Not promised: that every call has a result, or that user and assistant take turns.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

from pipeline.ingest.records import Message
from pipeline.ingest.tool_calls import Call, RowError, bracket_calls, from_json, glaive_call, json_calls, to_json, tools

_ROLES = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "model", "chatgpt", "bot"), "assistant"),
    **dict.fromkeys(("function_call", "tool_call"), "call"),
    **dict.fromkeys(("tool", "function", "observation", "tool_response", "ipython"), "tool"),
}


class Turns:
    """A message list being built; keeps which calls still wait for their result."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._num_calls = 0
        self._open: list[tuple[str, dict[str, Any]]] = []  # (id in the source, our call)

    def say(self, role: str, content: str) -> None:
        """A turn without calls."""
        if role == "assistant":
            self._open = []
        self.messages.append({"role": role, "content": content})

    def call(self, calls: Sequence[Call], field: str, ids: Sequence[str] = (), content: str = "") -> None:
        """Calls of the assistant, joined to the turn of the assistant just before, if there is one."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.messages.append({"role": "assistant", "content": ""})
            self._open = []
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
            self._open.append((ids[index] if index < len(ids) else "", entry))

    def result(self, content: str, field: str, source_id: str = "") -> None:
        """The result of one open call, or of all of them when it is a JSON list of as many entries."""
        if not self._open:
            raise RowError(field, "a result without a call before it")
        if not source_id and len(self._open) > 1 and content.lstrip().startswith("["):
            try:
                entries = from_json(content, field)
            except RowError:
                entries = []
            if len(entries) == len(self._open):
                for entry in entries:
                    self._result(entry if isinstance(entry, str) else to_json(entry, field), 0)
                return
        ids = [known for known, _ in self._open]
        self._result(content, ids.index(source_id) if source_id in ids else 0)

    def _result(self, content: str, index: int) -> None:
        _, call = self._open.pop(index)
        name = call["function"]["name"]
        self.messages.append({"role": "tool", "tool_call_id": call["id"], "name": name, "content": content})


def check(messages: Sequence[Message], tool_list: Sequence[dict[str, Any]]) -> None:
    """A dialogue that can be trained on: an assistant that says something, calls only of tools that are listed."""
    if not any(message["role"] == "assistant" for message in messages):
        raise RowError("messages", "no turn of the assistant")
    names = {tool["function"]["name"] for tool in tool_list}
    for index, message in enumerate(messages):
        for entry in message.get("tool_calls", ()):
            if entry["function"]["name"] not in names:
                raise RowError(
                    f"messages[{index}]", f"calls {entry['function']['name']!r}, which is not among the tools"
                )
        if message["role"] == "assistant" and not message["content"].strip() and not message.get("tool_calls"):
            raise RowError(f"messages[{index}].content", "the assistant says nothing")


def question(asked: str, answer: str, system: str = "") -> list[Message]:
    """One question and its answer."""
    first = [{"role": "system", "content": system}] if system else []
    return [*first, {"role": "user", "content": asked}, {"role": "assistant", "content": answer}]


def from_list(entries: Sequence[Any], field: str) -> list[Message]:
    """Messages as role/content (OpenAI) or from/value (ShareGPT), with calls and results in either's form."""
    if not entries:
        raise RowError(field, "no message")
    turns = Turns()
    for index, entry in enumerate(entries):
        _add(turns, entry, f"{field}[{index}]")
    return turns.messages


def _add(turns: Turns, entry: Any, field: str) -> None:
    role, content = _role_and_content(entry, field)
    if role == "call":
        turns.call(json_calls(content, field), field)
    elif role == "tool":
        named = entry.get("tool_call_id")
        turns.result(content, field, named if isinstance(named, str) else "")
    elif role == "assistant" and (entry.get("tool_calls") or entry.get("function_call")):
        calls = entry.get("tool_calls") or [entry["function_call"]]
        if not isinstance(calls, list):
            raise RowError(f"{field}.tool_calls", f"expected a list, found {type(calls).__name__}")
        ids = [call["id"] if isinstance(call, dict) and isinstance(call.get("id"), str) else "" for call in calls]
        turns.call(json_calls(calls, f"{field}.tool_calls"), field, ids, content)
    else:
        turns.say(role, content)


def _role_and_content(entry: Any, field: str) -> tuple[str, str]:
    if not isinstance(entry, dict):
        raise RowError(field, f"expected a message, found {type(entry).__name__}")
    names = ("role", "content") if entry.get("role") is not None else ("from", "value")
    word, content = entry.get(names[0]), entry.get(names[1])
    role = _ROLES.get(word.strip().lower()) if isinstance(word, str) else None
    if role is None:
        raise RowError(f"{field}.{names[0]}", f"expected system, user, assistant or tool, found {word!r}"[:120])
    if isinstance(content, list):  # OpenAI's parts: text is read, pictures and sound cannot be
        if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
            raise RowError(f"{field}.{names[1]}", "expected parts of text only")
        content = "".join(part["text"] for part in content)
    if role in ("call", "tool") and isinstance(content, dict):
        content = to_json(content, f"{field}.{names[1]}")
    if content is None and role == "assistant":
        content = ""
    if not isinstance(content, str):
        raise RowError(f"{field}.{names[1]}", f"expected a text, found {type(content).__name__}")
    return role, content


def xlam(query: str, answers: Any, field: str) -> list[Message]:
    """xLAM: one question, its calls as JSON text; `[]` means that no tool fits, which leaves nothing to train on."""
    calls = json_calls(answers, field)
    if not calls:
        raise RowError(field, "no call and no answer")
    turns = Turns()
    turns.say("user", query)
    turns.call(calls, field)
    return turns.messages


# --- Glaive ----------------------------------------------------------------------------------------------------------

_GLAIVE_TURN = re.compile(r"(?:^|\n)\s*(USER|ASSISTANT|FUNCTION RESPONSE):", re.MULTILINE)
_END_MARK = re.compile(r"<\|\w+\|>\s*$")  # Glaive writes another model's end token as text
_GLAIVE_OFFER = re.compile(r",?\s*with access to the following functions\.\s*Use them if required\s*-?\s*$")


def glaive_system(text: str, field: str) -> tuple[str, list[dict[str, Any]]]:
    """`SYSTEM: <instruction> <function JSON> <function JSON> ...` -> (instruction, tools)."""
    text = text.strip().removeprefix("SYSTEM:").strip()
    opened = text.find("{")
    if opened < 0:
        return text, []
    instruction = _GLAIVE_OFFER.sub(".", text[:opened].strip()).strip()
    functions: list[Any] = []
    while opened < len(text):
        function, opened = _decode_at(text, opened, field)
        functions.append(function)
        while opened < len(text) and text[opened] in " \n\t\r,":
            opened += 1
    return instruction, tools(functions, field)


def glaive(chat: str, field: str) -> list[Message]:
    """A Glaive transcript -> messages."""
    pieces = _GLAIVE_TURN.split(chat)
    if pieces[0].strip() or len(pieces) < 3:
        raise RowError(field, f"expected `USER:`, found {pieces[0].strip()[:40]!r}")
    turns = Turns()
    for number, (speaker, text) in enumerate(zip(pieces[1::2], pieces[2::2], strict=True)):
        where, text = f"{field}[{number}]", _END_MARK.sub("", text.strip()).strip()
        if speaker == "USER":
            turns.say("user", text)
        elif speaker == "FUNCTION RESPONSE":
            turns.result(text, where)
        else:
            content, *calls = text.split("<functioncall>")
            if calls:
                parsed = [glaive_call(_END_MARK.sub("", call.strip()), where) for call in calls]
                turns.call(parsed, where, content=content.strip())
            else:
                turns.say("assistant", text)
    return turns.messages


# --- ToolACE ---------------------------------------------------------------------------------------------------------

_FUNCTIONS = re.compile(r'\[\s*\{\s*"(?:name|type|description)"')
_TODAY = re.compile(r"(?:Today is|The current (?:time|date)\b)[^\n]*?(?:\.(?=\s|$|[A-Z])|\n|$)")


def find_functions(system: str) -> int:
    """Where the JSON list of functions begins in a system text; -1: nowhere."""
    match = _FUNCTIONS.search(system)
    return match.start() if match else -1


def toolace_system(system: str) -> tuple[str, list[dict[str, Any]]]:
    """The tools in the system text, and what else to keep of it: the date. The rest tells of ToolACE's call syntax."""
    start = find_functions(system)
    functions, end = _decode_at(system, start, "system")
    today = _TODAY.search(system[:start] + "\n" + system[end:])
    return today.group().strip() if today else "", tools(functions, "system")


def toolace(entries: Sequence[Any], field: str) -> list[Message]:
    """ToolACE's turns: as ShareGPT, but a call is an assistant's text of the form `[Name(a=1), ...]`."""
    if not entries:
        raise RowError(field, "no message")
    turns = Turns()
    for index, entry in enumerate(entries):
        where = f"{field}[{index}]"
        role, content = _role_and_content(entry, where)
        calls = bracket_calls(content, where) if role == "assistant" else []
        if calls:
            turns.call(calls, where)
        elif role == "tool":
            turns.result(_results_only(content), where)
        else:
            turns.say(role, content)
    return turns.messages


def _results_only(content: str) -> str:
    """`[{"name": "f", "results": {...}}]` -> the results alone, as ToolACE's names repeat those of the calls."""
    try:
        entries = json.loads(content)
    except (ValueError, RecursionError):
        return content
    if not isinstance(entries, list) or not all(isinstance(e, dict) and "results" in e for e in entries) or not entries:
        return content
    results = [entry["results"] for entry in entries]
    return to_json(results if len(results) > 1 else results[0], "results")


def _decode_at(text: str, start: int, field: str) -> tuple[Any, int]:
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
    for speaker, said in zip(pieces[1::2], pieces[2::2], strict=True):
        if not said.strip():
            raise RowError(field, f"an empty turn of {speaker}")
        messages.append({"role": "user" if speaker == "Human" else "assistant", "content": said.strip()})
    return messages
