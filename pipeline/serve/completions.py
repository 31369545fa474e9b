"""POST /v1/completions: text goes on, or is filled in between a beginning and an end (`suffix`); the prompt as text or as ids.

`echo` puts the prompt before the answer, with `logprobs` its log-probabilities too, as plain teacher forcing gives them; with
`max_tokens: 0` there is nothing but the prompt: what a benchmark asks to score a text. Such a prompt waits in the engine's queue as
any other and is read beside its answers, before one of its own begins. Stop strings, `n`, streams as in a chat.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import to_json

from pipeline.generation.sampling import Sampling
from pipeline.serve.answers import Assembler
from pipeline.serve.asking import Answers, Finished, Frame, Ping, Usage, unheard
from pipeline.serve.chats import event_line, known, refuse_frames, room, sampling, seeds, spelled
from pipeline.serve.engine import Engine, Request, Said
from pipeline.serve.faults import ApiFault, dumps
from pipeline.serve.models import Served
from pipeline.serve.protocol import CompletionBody
from pipeline.text.tokenizer import Tokenizer

DEFAULT_TOKENS = 16  # OpenAI's


@dataclass
class Told:
    """Tokens with their log-probabilities in the old form, and how many characters were told before them."""

    tokenizer: Tokenizer
    characters: int = 0
    names: dict[int, tuple[str, str]] = field(default_factory=dict)  # of tokens: their texts and labels, spelled once
    fields: dict[str, list[Any]] = field(default_factory=lambda: {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []})  # fmt: skip

    def add(self, token: int, logprob: float | None, top: tuple[tuple[int, float], ...]) -> None:
        """Count a token in."""
        text, _ = self._named(token)
        self.fields["tokens"].append(text)
        self.fields["token_logprobs"].append(None if logprob is None else max(logprob, -9999.0))
        named = {self._named(other)[1]: max(value, -9999.0) for other, value in top}
        self.fields["top_logprobs"].append(None if logprob is None else named)
        self.fields["text_offset"].append(self.characters)
        self.characters += len(text)

    def _named(self, token: int) -> tuple[str, str]:
        """A token's text and its label."""
        if token not in self.names:
            self.names[token] = (spelled(self.tokenizer, token)[1], label(self.tokenizer, token))
        return self.names[token]

    def take(self) -> dict[str, list[Any]]:
        """What was added since the last time."""
        fields, self.fields = self.fields, {name: [] for name in self.fields}
        return fields


def label(tokenizer: Tokenizer, token: int) -> str:
    """A token as a key of `top_logprobs`: its text, or its bytes where they are half a character, since halves look all alike as text."""
    raw, text = spelled(tokenizer, token)
    return text if text.encode() == raw else "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


@dataclass(frozen=True)
class Text:
    """A request to complete, understood."""

    body: CompletionBody
    served: Served
    engine: Engine
    owner: str
    prompts: list[list[int]]
    requests: list[Request]
    id: str
    created: int

    @property
    def n(self) -> int:
        """Answers to each prompt."""
        return self.body.n or 1

    def answers(self, identity: str) -> Answers:
        """To be entered."""
        assemblers = [Assembler(self.served.tokenizer, self.body.stops) for _ in self.requests]
        return Answers(self.engine, self.requests, assemblers, n=self.n, identity=identity)

    def frame(self) -> dict[str, Any]:
        """What an answer and each chunk begin with."""
        return {
            "id": self.id, "object": "text_completion", "created": self.created, "model": self.served.id,
            "system_fingerprint": self.served.fingerprint,
        }  # fmt: skip


def understand(body: CompletionBody, served: Served, engine: Engine, owner: str) -> Text:
    """Encode the prompts and count the budget. Raises ApiFault."""
    refuse_frames(body, served)
    tokenizer = served.tokenizer
    prompts = [_ids(prompt, body.suffix, served) for prompt in body.prompts]
    asked = DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens
    stop = () if body.ignore_eos else (tokenizer.end_of_text, tokenizer.turn_end)
    for ids in prompts:
        if asked == 0 and not body.echo:
            raise ApiFault(400, "max_tokens: 0 is for echo, which returns the prompt with its log-probabilities", param="max_tokens")  # fmt: skip
        if len(ids) + (asked > 0) > served.context:
            room([*ids, 0], served, None, "prompt")
    first = seeds(body.seed, len(prompts) * (body.n or 1))
    requests = [
        Request(
            ids=ids, sampling=sampling(body.temperature, body.top_p, body.top_k, room(ids, served, asked, "prompt")),
            seed=first[place * (body.n or 1) + number], listener=unheard, stop=stop, bias=known(body.biases, served),
            top=body.logprobs or 0, owner=owner,
        )
        for place, ids in enumerate(prompts)
        for number in range(body.n or 1)
        if asked
    ]  # fmt: skip
    return Text(body, served, engine, owner, prompts, requests, f"cmpl-{secrets.token_hex(12)}", int(time.time()))


def _ids(prompt: str | list[int], suffix: str | None, served: Served) -> list[int]:
    tokenizer = served.tokenizer
    for part in (prompt if isinstance(prompt, str) else "", suffix or ""):
        served.refuse_endless(part, "prompt")
    if isinstance(prompt, list) and (wrong := next((id_ for id_ in prompt if id_ >= served.rows), None)):
        raise ApiFault(400, f"prompt: token {wrong} is not in the vocabulary of {served.rows}", param="prompt")
    ids = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    if suffix is not None:
        return [tokenizer.fim_prefix, *ids, tokenizer.fim_suffix, *tokenizer.encode(suffix), tokenizer.fim_middle]
    return ids or [tokenizer.end_of_text]  # behind nothing stands what begins a document


Score = tuple[float | None, tuple[tuple[int, float], ...]]  # a token's log-probability, and the most likely ones


async def scores(text: Text, identity: str) -> list[list[Score]]:
    """Of each prompt the score of each token where they are to be told; nothing of the first: nothing stands before it.

    Raises ApiFault, as an answer's.
    """
    top = text.body.logprobs if text.body.echo else None
    if top is None:
        return []
    asked = [
        Request(ids=ids, sampling=Sampling(1), seed=0, listener=unheard, owner=text.owner, score=top)
        for ids in text.prompts
    ]
    async with Answers(
        text.engine, asked, [Assembler(text.served.tokenizer) for _ in asked], identity=identity
    ) as heard:
        async for _ in heard:
            pass
    none: Score = (None, ())
    return [[none, *(pair for one in read for pair in zip(one.logprobs, one.top, strict=True))] for read in heard.read]


async def whole(text: Text, found: list[list[Score]], answers: Answers) -> bytes:
    """All choices in one piece, as JSON; `found` are the prompts' scores. Raises ApiFault."""
    said: list[list[Said]] = [[] for _ in text.requests]
    reasons = ["length"] * len(text.prompts) * text.n
    async for event in answers:
        if isinstance(event, Finished):
            reasons[event.index] = event.reason
        elif not isinstance(event, Ping | Frame):
            said[event[0]] += event[1].tokens
    if found:  # up to a hundred thousand scores are written: others are told meanwhile
        return await asyncio.to_thread(_written, text, found, answers, said, reasons)
    return _written(text, found, answers, said, reasons)


def _written(
    text: Text, found: list[list[Score]], answers: Answers, said: list[list[Said]], reasons: list[str]
) -> bytes:
    choices, names = [], dict[int, tuple[str, str]]()
    for index, finish in enumerate(reasons):
        told, before = _echo(text, found, index, names)
        content = answers.assemblers[index].content if text.requests else ""
        for one in said[index] if text.requests else ():
            told.add(one.token, one.logprob, one.top)
        choice: dict[str, Any] = {"index": index, "text": before + content, "logprobs": None, "finish_reason": finish}
        if text.body.logprobs is not None:
            choice["logprobs"] = told.take()
        if text.body.return_token_ids:
            choice["token_ids"] = [one.token for one in said[index]] if text.requests else []
            choice["prompt_token_ids"] = text.prompts[index // text.n]
        choices.append(to_json(choice))  # one by one: nothing else of Python runs while one is written
    usage = answers.usage if text.requests else Usage(sum(map(len, text.prompts)), 0, 0)
    end = dumps(text.frame() | {"usage": usage.body()})
    return b'{"choices":[' + b",".join(choices) + b"]," + end[1:]


async def stream(text: Text, found: list[list[Score]], answers: Answers) -> AsyncIterator[bytes]:
    """The chunks, as lines of an event stream, [DONE] not with them. Raises ApiFault."""
    told, names = [], dict[int, tuple[str, str]]()
    for index in range(len(text.prompts) * text.n):
        if found:
            own, before = await asyncio.to_thread(_echo, text, found, index, names)
        else:
            own, before = _echo(text, found, index, names)
        told.append(own)
        first: dict[str, Any] = {"index": index, "text": before, "logprobs": None, "finish_reason": None}
        if text.body.logprobs is not None and before:
            first["logprobs"] = own.take()
        if text.body.return_token_ids:
            first |= {"prompt_token_ids": text.prompts[index // text.n], "token_ids": []}
        if not text.requests:
            first["finish_reason"] = "length"
        if before or text.body.return_token_ids or not text.requests:
            yield event_line(text.frame() | {"choices": [first]})
    async for event in answers:
        if isinstance(event, Ping):
            yield b": ping\n\n"
        elif isinstance(event, Finished):
            ended = {"index": event.index, "text": "", "logprobs": None, "finish_reason": event.reason}
            yield event_line(text.frame() | {"choices": [ended]})
        elif not isinstance(event, Frame):
            index, delta = event
            new: dict[str, Any] = {"index": index, "text": delta.content, "logprobs": None, "finish_reason": None}
            for one in delta.tokens:
                told[index].add(one.token, one.logprob, one.top)
            if text.body.logprobs is not None:
                new["logprobs"] = told[index].take()
            if text.body.return_token_ids:
                new["token_ids"] = [one.token for one in delta.tokens]
            yield event_line(text.frame() | {"choices": [new]})
    if text.body.with_usage:
        usage = answers.usage if text.requests else Usage(sum(map(len, text.prompts)), 0, 0)
        yield event_line(text.frame() | {"choices": [], "usage": usage.body()})


def _echo(text: Text, found: list[list[Score]], index: int, names: dict[int, tuple[str, str]]) -> tuple[Told, str]:
    """What stands before a choice's answer where it was asked for."""
    told = Told(text.served.tokenizer, names=names)
    if not text.body.echo:
        return told, ""
    ids = text.prompts[index // text.n]
    for token, (logprob, top) in zip(ids, found[index // text.n], strict=True) if found else ():
        told.add(token, logprob, top)
    return told, text.served.tokenizer.decode(ids)
