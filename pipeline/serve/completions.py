"""POST /v1/completions: continues text, or fills in the middle between a prompt and a `suffix`.

The prompt is text or token ids. `echo` prepends it to the answer; with `logprobs` it also returns the prompt's
log-probabilities, as under teacher forcing. `max_tokens: 0` returns only the prompt, which is how benchmarks score
text. A prompt to score waits in the engine's queue like any other request and is scored while the engine generates
other answers; its own answers begin afterward. With `echo`, the token that ended an answer also has a log-probability,
though it adds no text: a client that scores a prompt with `max_tokens: 1`, as lm-evaluation-harness does, drops the
last entry as the generated one. Stop strings, `n` and streams work as in chat.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from pydantic_core import to_json

from pipeline.generation.sampling import Sampling
from pipeline.run.types import JsonObject
from pipeline.serve.answers import Answers, Assembler, Finished, Frame, Ping, TokenUsage, unheard
from pipeline.serve.chat_completions import (
    check_biases,
    decode_token,
    envelope,
    event_line,
    make_sampling,
    make_seeds,
    refuse_frames,
    token_budget,
)
from pipeline.serve.engine import Engine
from pipeline.serve.loop import GenerationRequest, SampledToken
from pipeline.serve.models import Served
from pipeline.serve.protocol import CompletionBody, dumps, invalid
from pipeline.text.tokenizer import Tokenizer

DEFAULT_TOKENS = 16  # OpenAI's default

Score = tuple[float | None, tuple[tuple[int, float], ...]]  # a token's log-probability, and the most likely tokens


@dataclass
class Told:
    """Collects tokens with their log-probabilities in the format of OpenAI's completions."""

    tokenizer: Tokenizer
    offset: int = 0  # characters of text before the next token
    names: dict[int, tuple[str, str]] = field(default_factory=dict)  # cache: token -> its text and label
    fields: dict[str, list[object]] = field(
        default_factory=lambda: {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    )

    def add(self, token: int, logprob: float | None, top: tuple[tuple[int, float], ...]) -> None:
        """Append a token; `logprob` is None for a prompt's first token."""
        text, _ = self._name(token)
        self.fields["tokens"].append(text)
        self.fields["token_logprobs"].append(None if logprob is None else max(logprob, -9999.0))
        top_logprobs = {self._name(other)[1]: max(value, -9999.0) for other, value in top}
        self.fields["top_logprobs"].append(None if logprob is None else top_logprobs)
        self.fields["text_offset"].append(self.offset)
        self.offset += len(text)

    def _name(self, token: int) -> tuple[str, str]:
        if token not in self.names:
            self.names[token] = (decode_token(self.tokenizer, token)[1], label(self.tokenizer, token))
        return self.names[token]

    def take(self) -> dict[str, list[object]]:
        """Return the fields of all tokens added since the last call."""
        fields, self.fields = self.fields, {name: [] for name in self.fields}
        return fields


def label(tokenizer: Tokenizer, token: int) -> str:
    """A token as a key of `top_logprobs`: its text, or its bytes if they form an incomplete character,
    since all incomplete characters have the same text.
    """
    raw, text = decode_token(tokenizer, token)
    return text if text.encode() == raw else "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


@dataclass(frozen=True)
class CompletionRequest:
    body: CompletionBody
    served: Served
    engine: Engine
    owner: str
    prompts: list[list[int]]
    requests: list[GenerationRequest]
    id: str
    created: int

    @property
    def n(self) -> int:
        """The number of answers to each prompt."""
        return self.body.n or 1

    @property
    def num_choices(self) -> int:
        """The total number of answers to all prompts."""
        return len(self.prompts) * self.n

    def answers(self, identity: str) -> Answers:
        """The answers; their requests have not been submitted yet."""
        assemblers = [Assembler(self.served.tokenizer, self.body.stops) for _ in self.requests]
        return Answers(self.engine, self.requests, assemblers, n=self.n, identity=identity)

    def usage(self, answers: Answers) -> TokenUsage:
        """The token counts, even if nothing was generated."""
        return answers.usage if self.requests else TokenUsage(sum(map(len, self.prompts)), 0, 0)

    def envelope(self) -> JsonObject:
        """The first fields of a response and of each chunk."""
        return envelope(self.id, "text_completion", self.created, self.served)


def prepare(body: CompletionBody, served: Served, engine: Engine, owner: str) -> CompletionRequest:
    """Encode the prompts and compute the budgets. Raises ApiFault."""
    refuse_frames(body, served)
    tokenizer = served.tokenizer
    prompts = [_encode(prompt, body.suffix, served) for prompt in body.prompts]
    max_tokens = DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens
    ends = () if body.ignore_eos else (tokenizer.end_of_text, tokenizer.turn_end)
    stop = (*ends, *(body.stop_token_ids or ()))
    for ids in prompts:
        if max_tokens == 0 and not body.echo:
            raise invalid(
                "max_tokens", "max_tokens: 0 requires echo, which returns the prompt with its log-probabilities"
            )
        if len(ids) + (max_tokens > 0) > served.context:
            token_budget([*ids, 0], served, None, "prompt")
    n = body.n or 1
    seeds = make_seeds(body.seed, len(prompts) * n)
    requests = [
        GenerationRequest(
            ids=ids,
            sampling=make_sampling(
                body.temperature, body.top_p, body.top_k, token_budget(ids, served, max_tokens, "prompt")
            ),
            seed=seeds[index * n + number],
            listener=unheard,
            stop=stop,
            say_stop=bool(body.echo) and body.logprobs is not None,
            bias=check_biases(body.biases, served),
            top=body.logprobs or 0,
            owner=owner,
        )
        for index, ids in enumerate(prompts)
        for number in range(n)
        if max_tokens
    ]
    id_ = f"cmpl-{secrets.token_hex(12)}"
    return CompletionRequest(body, served, engine, owner, prompts, requests, id_, int(time.time()))


def _encode(prompt: str | list[int], suffix: str | None, served: Served) -> list[int]:
    tokenizer = served.tokenizer
    for part in (prompt if isinstance(prompt, str) else "", suffix or ""):
        served.refuse_overlong(part, "prompt")
    if isinstance(prompt, list) and (wrong := next((id_ for id_ in prompt if id_ >= served.vocab_size), None)):
        raise invalid("prompt", f"prompt: token {wrong} is not in the vocabulary of size {served.vocab_size}")
    ids = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    if suffix is not None:
        return [tokenizer.fim_prefix, *ids, tokenizer.fim_suffix, *tokenizer.encode(suffix), tokenizer.fim_middle]
    return ids or [tokenizer.end_of_text]  # this token begins a document


async def score_prompts(request: CompletionRequest, identity: str) -> list[list[Score]]:
    """The scores of all prompt tokens, or [] if the request needs none; a prompt's first token has no score.

    Raises ApiFault like `Answers`.
    """
    top = request.body.logprobs if request.body.echo else None
    if top is None:
        return []
    requests = [
        GenerationRequest(ids=ids, sampling=Sampling(1), seed=0, listener=unheard, owner=request.owner, score=top)
        for ids in request.prompts
    ]
    assemblers = [Assembler(request.served.tokenizer) for _ in requests]
    async with Answers(request.engine, requests, assemblers, identity=identity) as answers:
        async for _ in answers:
            pass
    first: Score = (None, ())
    return [
        [first, *(score for event in events for score in zip(event.logprobs, event.top, strict=True))]
        for events in answers.prompt_scores
    ]


async def complete(request: CompletionRequest, scores: list[list[Score]], answers: Answers) -> bytes:
    """All choices in one JSON object; `scores` are those of the prompts. Raises ApiFault."""
    tokens: list[list[SampledToken]] = [[] for _ in request.requests]
    reasons = ["length"] * request.num_choices
    async for event in answers:
        if isinstance(event, Finished):
            reasons[event.index] = event.reason
        elif not isinstance(event, Ping | Frame):
            tokens[event[0]] += event[1].tokens
    if scores:  # up to a hundred thousand: serializing them must not block the event loop
        return await asyncio.to_thread(_write_completion, request, scores, answers, tokens, reasons)
    return _write_completion(request, scores, answers, tokens, reasons)


def _write_completion(
    request: CompletionRequest,
    scores: list[list[Score]],
    answers: Answers,
    tokens: list[list[SampledToken]],
    reasons: list[str],
) -> bytes:
    choices, names = [], dict[int, tuple[str, str]]()
    for index, reason in enumerate(reasons):
        logprobs, echo = _echo(request, scores, index, names)
        content = answers.assemblers[index].content if request.requests else ""
        for event in tokens[index] if request.requests else ():
            logprobs.add(event.token, event.logprob, event.top)
        choice: JsonObject = {"index": index, "text": echo + content, "logprobs": None, "finish_reason": reason}
        if request.body.logprobs is not None:
            choice["logprobs"] = logprobs.take()
        if request.body.return_token_ids:
            choice["token_ids"] = [event.token for event in tokens[index]] if request.requests else []
            choice["prompt_token_ids"] = request.prompts[index // request.n]
        choices.append(to_json(choice))  # one at a time, since serializing blocks other Python threads
    end = dumps(request.envelope() | {"usage": request.usage(answers).body()})
    return b'{"choices":[' + b",".join(choices) + b"]," + end[1:]


async def stream(request: CompletionRequest, scores: list[list[Score]], answers: Answers) -> AsyncIterator[bytes]:
    """Yield the chunks as lines of an event stream, without [DONE]. Raises ApiFault."""
    logprobs, names = [], dict[int, tuple[str, str]]()
    for index in range(request.num_choices):
        if scores:
            own, echo = await asyncio.to_thread(_echo, request, scores, index, names)
        else:
            own, echo = _echo(request, scores, index, names)
        logprobs.append(own)
        first: JsonObject = {"index": index, "text": echo, "logprobs": None, "finish_reason": None}
        if request.body.logprobs is not None and echo:
            first["logprobs"] = own.take()
        if request.body.return_token_ids:
            first |= {"prompt_token_ids": request.prompts[index // request.n], "token_ids": []}
        if not request.requests:
            first["finish_reason"] = "length"
        if echo or request.body.return_token_ids or not request.requests:
            yield event_line(request.envelope() | {"choices": [first]})
    async for event in answers:
        if isinstance(event, Ping):
            yield b": ping\n\n"
        elif isinstance(event, Finished):
            last = {"index": event.index, "text": "", "logprobs": None, "finish_reason": event.reason}
            yield event_line(request.envelope() | {"choices": [last]})
        elif not isinstance(event, Frame):
            index, delta = event
            choice: JsonObject = {"index": index, "text": delta.content, "logprobs": None, "finish_reason": None}
            for token in delta.tokens:
                logprobs[index].add(token.token, token.logprob, token.top)
            if request.body.logprobs is not None:
                choice["logprobs"] = logprobs[index].take()
            if request.body.return_token_ids:
                choice["token_ids"] = [token.token for token in delta.tokens]
            yield event_line(request.envelope() | {"choices": [choice]})
    if request.body.with_usage:
        yield event_line(request.envelope() | {"choices": [], "usage": request.usage(answers).body()})


def _echo(
    request: CompletionRequest, scores: list[list[Score]], index: int, names: dict[int, tuple[str, str]]
) -> tuple[Told, str]:
    """A choice's initial log-probabilities and text: the prompt's if it is echoed, else empty."""
    logprobs = Told(request.served.tokenizer, names=names)
    if not request.body.echo:
        return logprobs, ""
    ids = request.prompts[index // request.n]
    for token, (logprob, top) in zip(ids, scores[index // request.n], strict=True) if scores else ():
        logprobs.add(token, logprob, top)
    return logprobs, request.served.tokenizer.decode(ids)
