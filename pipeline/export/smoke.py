"""Six calls to a real server: does what was exported answer over HTTP?

    models/deploy  --python -m pipeline.serve-->  six answers, or GateError with the server's last words

The server is a process of its own on a free port of this machine, with a key made for it, and is gone afterwards. What
an answer says is not judged: its shape is, and that ids, the same text twice and rewards are the model's.

Not here: everything else about the server (`tests/test_server.py`), and its speed.
"""

import json
import math
import re
import secrets
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch

from pipeline.model.heads import RewardModel
from pipeline.model.transformer import Transformer
from pipeline.run import processes
from pipeline.run.errors import GateError
from pipeline.text import chat
from pipeline.text.tokenizer import Tokenizer

READY_SECONDS, ANSWER_SECONDS = 600, 300
TEXT = "def f(x): return x  # 你好 🙂"
TALK = [{"role": "user", "content": "Say hi"}]
ANSWERED = [*TALK, {"role": "assistant", "content": "hi"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {"type": "object", "properties": {"deep": {"type": "boolean"}}, "required": ["deep"]},
    },
}
SAID = 16  # tokens of an answer


@dataclass(frozen=True)
class Door:
    """A server that is ready, and what it serves."""

    client: httpx.Client
    name: str  # of the model
    tokenizer: Tokenizer

    def ask(self, path: str, body: dict[str, Any] | None = None, *, status: int = 200) -> dict[str, Any]:
        """The JSON of an answer. Raises GateError for another status."""
        answer = self.client.get(path) if body is None else self.client.post(path, json={"model": self.name} | body)
        _expect(answer.status_code == status, path, f"status {status}", f"{answer.status_code} {answer.text:.300}")
        return answer.json()

    def events(self, body: dict[str, Any]) -> list[str]:
        """What a chat's stream tells, a string each."""
        asked = {"model": self.name, "messages": TALK, "max_completion_tokens": SAID, "temperature": 0, "stream": True}
        with self.client.stream("POST", "/v1/chat/completions", json=asked | body) as answer:
            return [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]


def check(folder: Path, model: Transformer | RewardModel, tokenizer: Tokenizer) -> int:
    """Serve a directory and ask six times; the number of calls. Raises GateError."""
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch) / "log"
        try:
            with _serving(folder, tokenizer, Path(scratch), log) as door:
                calls = _calls(door, model)
        except (GateError, httpx.HTTPError, json.JSONDecodeError, KeyError, IndexError, TypeError) as error:
            what = str(error) if isinstance(error, GateError) else repr(error)
            last = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-12:])
            raise GateError(
                f"{folder}: the server does not answer as it should: {what:.800}. Its last words:\n{last}"
            ) from error
    return calls


@contextmanager
def _serving(folder: Path, tokenizer: Tokenizer, scratch: Path, log: Path) -> Iterator[Door]:
    key = secrets.token_hex(24)
    (scratch / "key").write_text(key + "\n")
    arguments = [str(folder), "--port", "0", "--api-key-file", str(scratch / "key"), "--weights", "native"]
    headers = {"Authorization": f"Bearer {key}"}
    with processes.beside("pipeline.serve", arguments, log) as process:
        address = _ready(process, log)
        with httpx.Client(base_url=address, headers=headers, timeout=ANSWER_SECONDS, trust_env=False) as client:
            yield Door(client, folder.resolve().name, tokenizer)


def _ready(process: processes.Process, log: Path) -> str:
    """The server's address, once /health says 200. Raises GateError where it ends or is not ready in time."""
    deadline = time.monotonic() + READY_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        told = re.match(r"(http://\S+) ", log.read_text(encoding="utf-8", errors="replace"))
        try:
            if told and httpx.get(f"{told[1]}/health", trust_env=False).status_code == 200:
                return told[1]
        except httpx.TransportError:
            pass
        time.sleep(0.05)
    code = process.poll()
    raise GateError(f"not ready after {READY_SECONDS} s" if code is None else f"it ended with exit code {code}")


def _expect(holds: bool, path: str, expected: str, found: object) -> None:
    if not holds:
        raise GateError(f"{path}: expected {expected}, found {found!r:.300}")


def _listed(door: Door, kind: str, model: Transformer | RewardModel) -> None:
    found = door.ask("/v1/models")["data"]
    meta = {"kind": kind, "context": model.config.max_context, "parameters": model.num_parameters()}
    same = [one["id"] for one in found] == [door.name] and meta.items() <= found[0]["meta"].items()
    _expect(same, "/v1/models", f"{door.name}, {meta}", found)


def _tokenized(door: Door) -> None:
    ids = door.ask("/tokenize", {"prompt": TEXT})["tokens"]
    _expect(ids == door.tokenizer.encode(TEXT), "/tokenize", "the tokenizer's ids", ids)


def _calls(door: Door, model: Transformer | RewardModel) -> int:
    if isinstance(model, RewardModel):
        return _reward_calls(door, model)
    return _causal_calls(door, model) if model.config.attention == "causal" else _masked_calls(door, model)


def _masked_calls(door: Door, model: Transformer) -> int:
    _listed(door, "diffusion", model)
    said = _said(door)
    _streamed(door, said)
    _uncovered(door)
    _tokenized(door)
    refused = door.ask("/v1/completions", {"prompt": TEXT}, status=400)["error"]
    _expect(refused["code"] == "wrong_kind", "/v1/completions", "the error wrong_kind", refused)
    return 6


def _uncovered(door: Door) -> None:
    """Steps of a canvas: each one leaves fewer masks than the one before."""
    path = "/v1/chat/completions"
    events = door.events({"stream_options": {"include_denoising": True}})[:-1]
    steps = [chunk["denoising"] for chunk in map(json.loads, events) if "denoising" in chunk]
    masks = [step["tokens"].count(None) for step in steps if step["offset"] == 0]
    _expect(bool(masks) and masks == sorted(set(masks), reverse=True), path, "canvases with fewer masks each", masks)


def _causal_calls(door: Door, model: Transformer) -> int:
    _listed(door, "causal", model)
    said = _said(door)
    _streamed(door, said)
    _completed(door)
    _tokenized(door)
    _called(door)
    return 6


def _said(door: Door) -> str:
    """An answer's text."""
    path = "/v1/chat/completions"
    found = door.ask(path, {"messages": TALK, "max_completion_tokens": SAID, "temperature": 0})
    choice, used = found["choices"][0], found["usage"]
    _expect(
        choice["message"]["role"] == "assistant" and choice["finish_reason"] in ("stop", "length", "tool_calls"),
        path,
        "an assistant's message that ended",
        choice,
    )
    asked = len(chat.render(door.tokenizer, TALK, generation_prompt=True).ids)
    _expect(
        used["prompt_tokens"] == asked and 0 < used["completion_tokens"] <= SAID,
        path,
        f"{asked} and 1-{SAID} tokens",
        used,
    )
    return choice["message"]["content"] or ""


def _streamed(door: Door, said: str) -> None:
    """The same answer in pieces."""
    path = "/v1/chat/completions"
    events = door.events({})
    _expect(events[-1:] == ["[DONE]"], path, "a stream that ends with [DONE]", events[-1:])
    deltas = [choice["delta"] for event in events[:-1] for choice in json.loads(event)["choices"]]
    joined = "".join(delta.get("content") or "" for delta in deltas)
    _expect(joined == said, path, f"the text {said!r}", joined)


def _completed(door: Door) -> None:
    """A text that goes on for as many tokens as were asked for."""
    path, prompt = "/v1/completions", door.tokenizer.encode(TEXT)
    body = {"prompt": prompt, "max_tokens": SAID, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    found = door.ask(path, body)
    ids = found["choices"][0]["token_ids"]
    _expect(len(ids) == SAID and found["usage"]["prompt_tokens"] == len(prompt), path, f"{SAID} tokens", found)


def _called(door: Door) -> None:
    """A tool call that was asked for is whole and valid, whatever the weights; or the budget is refused."""
    path = "/v1/chat/completions"
    body = {
        "model": door.name,
        "messages": TALK,
        "tools": [TOOL],
        "tool_choice": "required",
        "max_completion_tokens": 64,
    }
    answer = door.client.post(path, json=body)
    found = answer.json()
    if answer.status_code == 400:
        code = found["error"]["code"]
        _expect(code in ("budget_too_small", "context_length_exceeded"), path, "a call, or that it does not fit", found)
        return
    _expect(answer.status_code == 200, path, "status 200 or 400", f"{answer.status_code} {answer.text:.300}")
    function = found["choices"][0]["message"]["tool_calls"][0]["function"]
    given = json.loads(function["arguments"])
    _expect(
        function["name"] == "look" and isinstance(given, dict) and list(map(type, given.values())) == [bool],
        path,
        'look({"deep": true or false})',
        function,
    )


def _reward_calls(door: Door, model: RewardModel) -> int:
    _listed(door, "reward", model)
    found = door.ask(
        "/score", {"conversations": [{"messages": ANSWERED}, {"messages": [*TALK, ANSWERED[1] | {"content": TEXT}]}]}
    )
    rewards = [one["reward"] for one in found["data"]]
    _expect(len(rewards) == 2 and all(map(math.isfinite, rewards)), "/score", "two numbers", found)
    ids = chat.render(door.tokenizer, ANSWERED).ids
    ids = ids[: len(ids) - ids[::-1].index(door.tokenizer.turn_end)]
    with torch.no_grad():
        ours = float(model.train(False)(torch.tensor([ids]))[0, -1])
    _expect(abs(rewards[0] - ours) <= 1e-4, "/score", f"the model's {ours}", rewards[0])
    _tokenized(door)
    text = door.ask("/apply-template", {"messages": TALK})["prompt"]
    _expect(text == chat.render_text(TALK, generation_prompt=True), "/apply-template", "the model's template", text)
    door.ask(f"/v1/models/{door.name}")
    refused = door.ask("/v1/chat/completions", {"messages": TALK}, status=400)["error"]
    _expect(refused["code"] == "wrong_kind", "/v1/chat/completions", "the error wrong_kind", refused)
    return 6
