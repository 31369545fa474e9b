"""Shared by the Python clients: questions, expected values from the server itself, and the reporting of rows.

Runs in the clients' environments, so it imports only packages that both have. argv[1] is JSON from the driver: {url,
key, control: {name: id}}. Each row is reported as one line of JSON: {row, state: "pass" | "absent" | "FAIL", why}.
"""

import json
import re
import sys
import threading
import time
import traceback
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

from pydantic import BaseModel

FACTS: dict[str, Any] = json.loads(sys.argv[1])
BASE, KEY, CONTROL = f"{FACTS['url']}/v1", FACTS["key"], FACTS["control"]
WRONG_KEYS = ("wrong", f"{KEY}-not", KEY.upper())
QUESTION = "Which way would the ferry go?"
ASK: list[dict[str, Any]] = [{"role": "user", "content": QUESTION}]
PARTS = [{"type": "text", "text": "Which way would "}, {"type": "text", "text": "the ferry go?"}]
WEATHER_RULES: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "unit": {"enum": ["C", "F"]}},
    "required": ["city"],
}
NUMBER_RULES: dict[str, Any] = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
NESTED_RULES: dict[str, Any] = {
    "type": "object",
    "properties": {
        "place": {
            "type": "object",
            "properties": {"zip": {"type": "string", "pattern": "^[0-9]{5}$"}, "side": {"enum": ["left", "right"]}},
            "required": ["zip", "side"],
        },
        "days": {
            "type": "array",
            "items": {"type": "integer", "minimum": 1, "maximum": 7},
            "minItems": 1,
            "maxItems": 3,
        },
    },
    "required": ["place", "days"],
}
UNIQUE_RULES: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}},
}
BAD_RULES: list[dict[str, Any]] = [{"type": "nothing"}, {"$ref": "https://example.com/schema.json"}, {"properties": 3}]
CALLED: list[dict[str, Any]] = [
    *ASK,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "get_time", "arguments": "{}"}}],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "noon"},
]
PATIENCE = 5  # tries after a 429


class Step(BaseModel):
    """A step of a plan."""

    kind: Literal["go", "stop"]
    metres: int


class Plan(BaseModel):
    """The object that row 34 requests."""

    steps: list[Step]
    note: str | None


def tool(name: str, parameters: dict[str, Any]) -> dict[str, Any]:
    """A tool to offer to the model."""
    return {"type": "function", "function": {"name": name, "description": f"It is {name}", "parameters": parameters}}


WEATHER, TIME = tool("get_weather", WEATHER_RULES), tool("get_time", {"type": "object", "properties": {}})
NUMBER, BOOK = tool("f", NUMBER_RULES), tool("book", NESTED_RULES)


def shaped(rules: dict[str, Any]) -> dict[str, Any]:
    """A `response_format` with the schema `rules`."""
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": rules, "strict": True}}


# -- the server, without a client --------------------------------------------------------------------------------------


def _request(path: str, body: dict[str, Any] | None = None) -> bytes:
    headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(FACTS["url"] + path, data, headers), timeout=60) as answer:
        return answer.read()


def tokens(text: str) -> list[int]:
    """The token ids of a text."""
    return json.loads(_request("/tokenize", {"model": "nano", "prompt": text}))["tokens"]


def middle(before: str, after: str) -> list[int]:
    """The token ids of a prompt to fill in the middle between `before` and `after`."""
    return [CONTROL["fim_prefix"], *tokens(before), CONTROL["fim_suffix"], *tokens(after), CONTROL["fim_middle"]]


def _becomes(count: int, seconds: float) -> None:
    deadline, found = time.monotonic() + seconds, -1.0
    while found != count and time.monotonic() < deadline:
        told = re.findall(rb"^stagecoach:num_requests_running\{[^}]*\} (\S+)", _request("/metrics"), re.MULTILINE)
        found = sum(map(float, told))
        time.sleep(0.01)
    assert found == count, f"{found} rows generate, not {count}"


def speak(count: int) -> None:
    """Wait until `count` rows generate: a new stream sends its role before it gets a row."""
    _becomes(count, 5)


def falls_idle() -> None:
    """Check that all rows are free within a second; a step takes a few milliseconds."""
    _becomes(0, 1)


@contextmanager
def open_streams(streams: list[Iterator[Any]], shut: Callable[[Any], None]) -> Iterator[Callable[[], None]]:
    """Read the first chunk of each stream; yields a function that closes all of them, as the end of the block does."""

    def close() -> None:
        while streams:
            shut(streams.pop())

    try:
        for stream in streams:
            next(stream)
        yield close
    finally:
        close()


@contextmanager
def soon(action: Callable[[], None]) -> Iterator[None]:
    """Run `action` 0.3 seconds from now; the end of the block waits for it."""
    timer = threading.Timer(0.3, action)
    timer.start()
    try:
        yield
    finally:
        timer.join()


# -- checks of an answer, for every client -----------------------------------------------------------------------------


def is_weather(value: dict[str, Any]) -> None:
    """Check that `value` matches WEATHER_RULES."""
    assert set(value) <= {"city", "unit"} and isinstance(value["city"], str) and value.get("unit", "C") in ("C", "F")


def is_call(name: str, value: dict[str, Any]) -> None:
    """Check that the arguments match the tool's rules."""
    if name == "get_weather":
        is_weather(value)
    else:
        assert (name, value) == ("get_time", {})


def is_booking(value: dict[str, Any]) -> None:
    """Check that `value` matches NESTED_RULES."""
    assert set(value) == {"place", "days"} and set(value["place"]) == {"zip", "side"}
    assert re.fullmatch(r"[0-9]{5}", value["place"]["zip"]) and value["place"]["side"] in ("left", "right")
    assert 1 <= len(value["days"]) <= 3 and all(type(day) is int and 1 <= day <= 7 for day in value["days"])


def near(found: Iterable[float], expected: Iterable[float]) -> None:
    """Check that two lists of log-probabilities agree."""
    found, expected = list(found), list(expected)
    assert len(found) == len(expected) and all(abs(a - b) <= 1e-4 for a, b in zip(found, expected)), (found, expected)


def falls(values: list[float]) -> None:
    """Check that there are twenty values, the highest first."""
    assert len(values) == 20 and values == sorted(values, reverse=True)


def is_scored(text: str, logprobs: Any, prompt: str, top: int) -> None:
    """Check a prompt's log-probabilities as /v1/completions returns them."""
    assert text == prompt and "".join(logprobs["tokens"]) == prompt
    assert logprobs["token_logprobs"][0] is None and all(value < 0 for value in logprobs["token_logprobs"][1:])
    assert all(len(entry) == top for entry in logprobs["top_logprobs"][1:])
    offsets = [0]
    for token in logprobs["tokens"][:-1]:
        offsets.append(offsets[-1] + len(token))
    assert logprobs["text_offset"] == offsets


def is_scored_as_said(say: Callable[[int], tuple[str, Any]], score: Callable[[str], Any]) -> None:
    """Check that a token has the same log-probability when generated as when its text is scored, if the text is again
    a single token.
    """
    compared = 0
    for seed in range(8):
        text, logprobs = say(seed)
        if tokens(f"The pilot asked{text}")[:-1] == tokens("The pilot asked"):
            near(score(f"The pilot asked{text}")["token_logprobs"][-1:], logprobs["token_logprobs"])
            compared += 1
    assert compared, "none of eight tokens is a single token again when its text is encoded"


# -- reporting ---------------------------------------------------------------------------------------------------------


def _tell(row: int, state: str, why: str) -> None:
    sys.stdout.write(json.dumps({"row": row, "state": state, "why": why}) + "\n")


def run(rows: object, absent: dict[int, str]) -> None:
    """Run the methods named `row_<number>`; a method may return a note, such as what the client does not show."""
    for row, why in absent.items():
        _tell(row, "absent", why)
    for name in (name for name in dir(rows) if name.startswith("row_")):
        try:
            _tell(int(name.removeprefix("row_")), "pass", getattr(rows, name)() or "")
        except Exception as error:  # whatever a client raises is this row's failure
            steps = traceback.extract_tb(error.__traceback__)
            ours = next(step for step in reversed(steps) if step.name == name)
            _tell(int(name.removeprefix("row_")), "FAIL", f"{ours.line}: {type(error).__name__}: {error}")
