"""Check that an export works: `check_parity` compares it with the model; `check` serves it and makes requests.

**Parity**: the model and its export run on the same text, and their outputs may differ only as far as rounding
explains.

    model, a program that loads its export  --compare-->  Parity  --check_parity-->  GateError if too large

Without rounding, outputs must be equal. With rounded weights, the change in a log-probability depends on how certain
the model is: f16 changes the demo model's log-probabilities by up to 0.03 nats on this probe text, which is mostly
unlike the training data, and the perplexity goes up or down by 1% at random. The limit therefore applies to the mean
divergence KL(model || export), which is how much higher the export's log-perplexity is on text that the model itself
would write: 0.5% for q8_0. `gguf.verify` checks separately that the weights are the model's, rounded. A merged adapter
is verified when it is merged (`model/lora.py`).

`ExportProgram` is the interface to a program that runs an export: our own model here, other programs in `onnx.py` and
`benchmarks/exports.py`.

**Smoke test**: six requests to a real server over HTTP.

    models/deploy  --python -m pipeline.serve-->  six answers, or GateError with the last lines of the server's log

The server runs in a separate process on a free local port with a temporary API key, and is stopped afterwards. The
test checks the form of the answers (not their content), that ids and rewards match the model's, and that the same
request gives the same text twice. A wing with its own kind of model provides an `OwnFormat`, which reads and writes the
model directory, compares the parts outside the `Transformer`, and makes the requests for this test.

Not here: everything else about the server (`tests/test_server.py`), including its speed.
"""

import json
import math
import re
import secrets
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import httpx
import numpy as np
import torch
from torch import Tensor

from pipeline import wings
from pipeline.batches.batch import Piece, answered
from pipeline.generation.sampling import Sampling, generate
from pipeline.model.heads import RewardModel, TrunkModel
from pipeline.model.transformer import Transformer
from pipeline.run import processes
from pipeline.run.errors import GateError
from pipeline.run.types import JsonObject
from pipeline.text import chat
from pipeline.text.tokenizer import Tokenizer

PROBE = Path(__file__).parent / "probe.txt"
GREEDY, PROMPT = 64, 32  # tokens
WINDOW = 256  # tokens per forward pass


class ExportProgram(Protocol):
    """A program with an export loaded."""

    def logits(self, ids: list[int]) -> Tensor:
        """The logits (T, V) after each of the ids."""
        ...

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """The `count` greedy ids after the prompt; stop tokens do not end generation."""
        ...


@dataclass(frozen=True)
class Ours:
    """Our own model as an `ExportProgram`. Sets the model to evaluation mode."""

    model: Transformer

    @torch.no_grad()
    def logits(self, ids: list[int]) -> Tensor:
        """The logits (T, V) after each of the ids."""
        return self.model.train(False)(torch.tensor([ids]))[0]

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """The greedy ids after the prompt."""
        return generate(self.model.train(False), [prompt], Sampling(count), stop=(), seeds=[0])[0].ids


@dataclass(frozen=True)
class Limit:
    """The largest allowed distance between an export and its model."""

    max_difference: float = math.inf  # nats, in the log-probability of any token of the probe
    divergence: float = math.inf  # nats, mean over the probe
    equal_greedy: bool = False


LIMITS = {
    "huggingface": Limit(max_difference=0.0, equal_greedy=True),
    "f32": Limit(max_difference=0.0, equal_greedy=True),
    "f16": Limit(divergence=1e-4),
    "bf16": Limit(divergence=2e-3),
    "q8_0": Limit(divergence=math.log(1.005)),
    "onnx fp32": Limit(max_difference=1e-3, equal_greedy=True),
    "onnx int4": Limit(),  # only recorded: the quality lost to 4-bit rounding depends on the model's size
}


@dataclass(frozen=True)
class Parity:
    max_difference: float  # nats, largest difference in the log-probability of a token of the probe
    divergence: float  # nats, mean KL(model || export) over the probe's positions
    perplexity: float  # the export's divided by the model's, minus 1
    probe_tokens: int
    greedy_equal: int  # how many of `greedy_tokens` come before the first difference
    greedy_tokens: int  # 0 for a bidirectional model, which does not decode from left to right


def probe() -> str:
    """The text used for the comparison, including its carriage return and unusual spaces."""
    return PROBE.read_bytes().decode("utf-8")


def compare(model: Transformer, other: ExportProgram, ids: list[int]) -> Parity:
    """Compare a model and a program on the same ids. NaN is treated as an infinite difference."""
    own, window = Ours(model), min(WINDOW, model.config.max_context)
    differences, divergences, changes = [], [], []
    for first in range(0, len(ids), window):
        batch = answered([Piece(np.array(ids[first : first + window]), True)], pad=0)
        is_target = batch.targets[0] >= 0
        if not is_target.any():
            continue
        inputs, targets = batch.input_ids[0].tolist(), batch.targets[0][is_target]
        p, q = (program.logits(inputs)[is_target].double().log_softmax(-1) for program in (own, other))
        change = (p - q).gather(1, targets[:, None])
        differences.append(change.abs().nan_to_num(nan=math.inf))
        divergences.append((p.exp() * (p - q)).sum(-1).nan_to_num(nan=math.inf))
        changes.append(change)
    prompt = ids[: min(PROMPT, model.config.max_context // 2)]
    causal = model.config.attention == "causal"
    num_greedy = min(GREEDY, model.config.max_context - len(prompt)) if causal else 0
    greedy = [program.greedy(prompt, num_greedy) if num_greedy else [] for program in (own, other)]
    return Parity(
        max_difference=float(torch.cat(differences).max()),
        divergence=float(torch.cat(divergences).mean()),
        perplexity=float(torch.cat(changes).mean().exp()) - 1,
        probe_tokens=len(ids),
        greedy_equal=next((n for n, (a, b) in enumerate(zip(*greedy, strict=True)) if a != b), num_greedy),
        greedy_tokens=num_greedy,
    )


def check_parity(result: Parity, kind: str, where: Path) -> dict[str, float | int]:
    """The numbers to report. Raises GateError if the export exceeds the limit for its kind."""
    numbers = asdict(result)
    if found := faults(numbers, kind):
        raise GateError(f"{where}: the export does not match the model: {' and '.join(found)}")
    return numbers


def faults(numbers: Mapping[str, float], kind: str) -> list[str]:
    """How an export exceeds the limit for its kind. `numbers`: what `check_parity` or `check_rewards` returned."""
    limit, found = LIMITS[kind], []
    if not numbers["max_difference"] <= limit.max_difference:
        found.append(f"log-probabilities differ by {numbers['max_difference']:.2e} (at most {limit.max_difference:g})")
    if limit.equal_greedy and numbers.get("greedy_equal") != numbers.get("greedy_tokens"):
        found.append(f"only {numbers['greedy_equal']}/{numbers['greedy_tokens']} greedy tokens agree")
    if not numbers.get("divergence", 0.0) <= limit.divergence:
        found.append(f"the divergence is {numbers['divergence']:.2e} nats per token (at most {limit.divergence:.2g})")
    return found


@torch.no_grad()
def check_rewards(model: RewardModel, other: RewardModel, ids: list[int], where: Path) -> dict[str, float | int]:
    """The numbers to report for two reward models on the same ids. Raises GateError unless all rewards are equal."""
    window = min(WINDOW, model.config.max_context)
    rows = [torch.tensor([ids[first : first + window]]) for first in range(0, len(ids), window)]
    differences = [(model.train(False)(row) - other.train(False)(row)).abs().nan_to_num(nan=math.inf) for row in rows]
    largest = max(float(difference.max()) for difference in differences)
    if largest != 0.0 or (model.reward_mean, model.reward_std) != (other.reward_mean, other.reward_std):
        raise GateError(
            f"{where}: the export does not match the model: rewards differ by {largest:.2e}, or the stored means or"
            " standard deviations differ"
        )
    return {"max_difference": largest, "probe_tokens": len(ids)}


# -- smoke -------------------------------------------------------------------------------------------------------------


Exportable = Transformer | TrunkModel

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
MAX_TOKENS = 16  # per answer


@dataclass(frozen=True)
class ServedModel:
    """A model on a ready server, and a client to call it."""

    client: httpx.Client
    name: str  # of the model
    tokenizer: Tokenizer

    def ask(self, path: str, body: JsonObject | None = None, *, status: int = 200) -> JsonObject:
        """Send a request and return the JSON of the response. Raises GateError for a status other than `status`."""
        response = self.client.get(path) if body is None else self.client.post(path, json={"model": self.name} | body)
        expect(response.status_code == status, path, f"status {status}", f"{response.status_code} {response.text:.300}")
        return response.json()

    def events(self, body: JsonObject) -> list[str]:
        """The events of a streamed chat completion."""
        request = {
            "model": self.name,
            "messages": TALK,
            "max_completion_tokens": MAX_TOKENS,
            "temperature": 0,
            "stream": True,
        }
        with self.client.stream("POST", "/v1/chat/completions", json=request | body) as response:
            return [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]


def check(folder: Path, model: Exportable, tokenizer: Tokenizer) -> int:
    """Serve a model directory and make six requests; returns the number of requests. Raises GateError."""
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch) / "log"
        try:
            with _serve(folder, tokenizer, Path(scratch), log) as server:
                return _make_calls(server, model)
        except (GateError, httpx.HTTPError, json.JSONDecodeError, KeyError, IndexError, TypeError) as error:
            message = str(error) if isinstance(error, GateError) else repr(error)
            last = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-12:])
            raise GateError(
                f"{folder}: the server does not respond as expected: {message:.800}. Its last output:\n{last}"
            ) from error


@contextmanager
def _serve(folder: Path, tokenizer: Tokenizer, scratch: Path, log: Path) -> Iterator[ServedModel]:
    key = secrets.token_hex(24)
    (scratch / "key").write_text(key + "\n")
    arguments = [str(folder), "--port", "0", "--api-key-file", str(scratch / "key"), "--weights", "native"]
    headers = {"Authorization": f"Bearer {key}"}
    with processes.beside("pipeline.serve", arguments, log) as process:
        address = _wait_until_ready(process, log)
        with httpx.Client(base_url=address, headers=headers, timeout=ANSWER_SECONDS, trust_env=False) as client:
            yield ServedModel(client, folder.resolve().name, tokenizer)


def _wait_until_ready(process: processes.Process, log: Path) -> str:
    """The server's address, once /health returns status 200. Raises GateError if the server exits or takes too long."""
    deadline = time.monotonic() + READY_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        address = re.match(r"(http://\S+) ", log.read_text(encoding="utf-8", errors="replace"))
        try:
            if address and httpx.get(f"{address[1]}/health", trust_env=False).status_code == 200:
                return address[1]
        except httpx.TransportError:
            pass
        time.sleep(0.05)
    code = process.poll()
    raise GateError(f"not ready after {READY_SECONDS} s" if code is None else f"it exited with code {code}")


def expect(holds: bool, path: str, expected: str, found: object) -> None:
    """Raise GateError unless `holds` is true."""
    if not holds:
        raise GateError(f"{path}: expected {expected}, found {found!r:.300}")


def check_models(server: ServedModel, kind: str, model: Transformer | RewardModel) -> None:
    """Request the list of models, which must contain only the served model."""
    listed = server.ask("/v1/models")["data"]
    meta = {"kind": kind, "context": model.config.max_context, "parameters": model.num_parameters()}
    matches = [entry["id"] for entry in listed] == [server.name] and meta.items() <= listed[0]["meta"].items()
    expect(matches, "/v1/models", f"{server.name}, {meta}", listed)


def check_tokenize(server: ServedModel) -> None:
    """Request the ids of a text, which must be the tokenizer's."""
    ids = server.ask("/tokenize", {"prompt": TEXT})["tokens"]
    expect(ids == server.tokenizer.encode(TEXT), "/tokenize", "the tokenizer's ids", ids)


def _make_calls(server: ServedModel, model: Exportable) -> int:
    if isinstance(model, RewardModel):
        return _reward_calls(server, model)
    if isinstance(model, Transformer):
        return _causal_calls(server, model)
    own = own_format(model)
    assert own is not None, type(model)
    return own.smoke_calls(server, model)


def _causal_calls(server: ServedModel, model: Transformer) -> int:
    check_models(server, "causal", model)
    text = answer(server)
    check_stream(server, text)
    _check_completion(server)
    check_tokenize(server)
    _check_tool_call(server)
    return 6


def answer(server: ServedModel) -> str:
    """Request an answer and return its text."""
    path = "/v1/chat/completions"
    response = server.ask(path, {"messages": TALK, "max_completion_tokens": MAX_TOKENS, "temperature": 0})
    choice, used = response["choices"][0], response["usage"]
    expect(
        choice["message"]["role"] == "assistant" and choice["finish_reason"] in ("stop", "length", "tool_calls"),
        path,
        "a finished assistant message",
        choice,
    )
    num_prompt_tokens = len(chat.render(server.tokenizer, TALK, generation_prompt=True).ids)
    expect(
        used["prompt_tokens"] == num_prompt_tokens and 0 < used["completion_tokens"] <= MAX_TOKENS,
        path,
        f"{num_prompt_tokens} and 1-{MAX_TOKENS} tokens",
        used,
    )
    return choice["message"]["content"] or ""


def check_stream(server: ServedModel, text: str) -> None:
    """Request the same answer as a stream, which must have the same text."""
    path = "/v1/chat/completions"
    events = server.events({})
    expect(events[-1:] == ["[DONE]"], path, "a stream that ends with [DONE]", events[-1:])
    deltas = [choice["delta"] for event in events[:-1] for choice in json.loads(event)["choices"]]
    joined = "".join(delta.get("content") or "" for delta in deltas)
    expect(joined == text, path, f"the text {text!r}", joined)


def _check_completion(server: ServedModel) -> None:
    """Request a completion of an exact number of tokens."""
    path, prompt = "/v1/completions", server.tokenizer.encode(TEXT)
    body = {"prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    response = server.ask(path, body)
    ids = response["choices"][0]["token_ids"]
    expect(
        len(ids) == MAX_TOKENS and response["usage"]["prompt_tokens"] == len(prompt),
        path,
        f"{MAX_TOKENS} tokens",
        response,
    )


def _check_tool_call(server: ServedModel) -> None:
    """Require a tool call: whatever the weights, it must be complete and valid, or the server rejects the budget."""
    path = "/v1/chat/completions"
    body = {
        "model": server.name,
        "messages": TALK,
        "tools": [TOOL],
        "tool_choice": "required",
        "max_completion_tokens": 64,
    }
    response = server.client.post(path, json=body)
    answer = response.json()
    if response.status_code == 400:
        code = answer["error"]["code"]
        expect(code in ("budget_too_small", "context_length_exceeded"), path, "a call, or that no call fits", answer)
        return
    expect(response.status_code == 200, path, "status 200 or 400", f"{response.status_code} {response.text:.300}")
    function = answer["choices"][0]["message"]["tool_calls"][0]["function"]
    arguments = json.loads(function["arguments"])
    expect(
        function["name"] == "look" and isinstance(arguments, dict) and list(map(type, arguments.values())) == [bool],
        path,
        'look({"deep": true or false})',
        function,
    )


def _reward_calls(server: ServedModel, model: RewardModel) -> int:
    check_models(server, "reward", model)
    response = server.ask(
        "/score", {"conversations": [{"messages": ANSWERED}, {"messages": [*TALK, ANSWERED[1] | {"content": TEXT}]}]}
    )
    rewards = [score["reward"] for score in response["data"]]
    expect(len(rewards) == 2 and all(map(math.isfinite, rewards)), "/score", "two numbers", response)
    ids = chat.render(server.tokenizer, ANSWERED).ids
    ids = ids[: len(ids) - ids[::-1].index(server.tokenizer.turn_end)]
    with torch.no_grad():
        expected = float(model.train(False)(torch.tensor([ids]))[0, -1])
    expect(abs(rewards[0] - expected) <= 1e-4, "/score", f"the model's {expected}", rewards[0])
    check_tokenize(server)
    text = server.ask("/apply-template", {"messages": TALK})["prompt"]
    expect(text == chat.render_text(TALK, generation_prompt=True), "/apply-template", "the model's template", text)
    server.ask(f"/v1/models/{server.name}")
    refused = server.ask("/v1/chat/completions", {"messages": TALK}, status=400)["error"]
    expect(refused["code"] == "wrong_kind", "/v1/chat/completions", "the error wrong_kind", refused)
    return 6


class OwnFormat(Protocol):
    """What a wing offers as `export`, for its own kind of model, which no other program can run."""

    WHAT: str  # what the model card calls this kind

    def opens(self, folder: Path) -> bool:
        """Whether a directory contains this kind of model."""
        ...

    def owns(self, model: object) -> bool:
        """Whether a model is of this kind."""
        ...

    def load(self, folder: Path) -> tuple[TrunkModel, Tokenizer]:
        """The model in a directory and its tokenizer."""
        ...

    def save(self, folder: Path, model: Any, tokenizer: Tokenizer, lineage: JsonObject) -> None:
        """Write a model directory."""
        ...

    def check_same(self, model: Any, exported: Any, out: Path) -> None:
        """Raise GateError if two models differ outside their trunks."""
        ...

    def smoke_calls(self, server: ServedModel, model: Any) -> int:
        """Make requests to a server with the model; returns the number of requests. Raises GateError."""
        ...


def own_formats() -> list[OwnFormat]:
    """The wings' own formats."""
    return [offer() for offer in wings.each("export")]


def own_format(model: object) -> OwnFormat | None:
    """The format of the wing that defines a model's kind; None if no wing does."""
    return next((own for own in own_formats() if own.owns(model)), None)


def trunk(model: Exportable) -> Transformer | RewardModel:
    """A model without the parts that a wing wraps around it."""
    return model if isinstance(model, Transformer | RewardModel) else model.trunk
