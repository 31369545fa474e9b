"""Tool calls and JSON that were promised: the grammar that holds an answer to them, and the proof before it is told.

Grammars are judged in another process (`workshop.py`), and compiled here only when that was found to be cheap; where
none is asked for nothing is done. What comes out is read again and checked by another program than the one that made
it, before an answer says that it is a call: a grammar that was wrong is our failure, a 500 and a counter, and never the
client's surprise.

Who asks, and where what he asks for is done: the rooms that the routes share, each with places of its own
(`places.py`).

POST /v1/chat/completions: a conversation in, one assistant's turn or several out, whole or as a stream of chunks.

The order of a stream is OpenAI's: a delta with the role; deltas of content or of calls; an empty one with the reason it
ended; where asked for, a chunk without choices that holds the counts; [DONE]. A masked-diffusion model says what stands
to the left of its first mask; with stream_options.include_denoising each step's canvas is a chunk too. Extensions:
`return_token_ids` adds the prompt's ids to the first chunk of all, the answer's ids to each choice, and `id` to each
log-probability.
"""

import asyncio
import functools
import json
import math
import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from typing import Any

from starlette.requests import Request

from pipeline.generation import grammars, schemas
from pipeline.generation.constrain import Constraint
from pipeline.generation.sampling import Sampling
from pipeline.generation.schemas import SchemaError
from pipeline.run.device import stable_hash
from pipeline.run.errors import InputError
from pipeline.serve.answers import Assembler, Call, Delta
from pipeline.serve.asking import Answers, Finished, Frame, Ping, unheard
from pipeline.serve.limits import Pool
from pipeline.serve.loop import GenerationRequest, Loop, Said
from pipeline.serve.models import Served, never_said
from pipeline.serve.protocol import ApiFault, ChatBody, Generation, NamedTool, ResponseFormat, dumps
from pipeline.serve.workshop import Refused, Workshop
from pipeline.text import chat
from pipeline.text.tokenizer import Tokenizer

INVALID = "invalid_structure"


class Makers:
    """What makes grammars: the workshop, and a thread for those that it let pass."""

    def __init__(self, workshop: Workshop) -> None:
        self.workshop = workshop
        self._thread = Pool("grammars", running=1, waiting=64)

    async def constraints(self, body: ChatBody, served: Served, budget: int, asker: str) -> list[Constraint | None]:
        """What holds each of the `n` answers, or nothing. Raises ApiFault: 400 for what cannot be promised, 429."""
        count, job = body.n or 1, _job(body)
        if job is None:
            return [None] * count
        param = "tools" if body.tools else "response_format"
        try:
            verdict = await self.workshop.grammar(served.id, job, asker)
            grammar = await self._thread.run(asker, lambda: served.grammars.take(verdict.written, verdict.plan))
            return [grammar.constraint(budget) for _ in range(count)]
        except (SchemaError, Refused) as error:
            raise ApiFault(
                400, str(error), param="max_tokens" if error.code == "budget_too_small" else param, code=error.code
            ) from None


def _job(body: ChatBody) -> dict[str, Any] | None:
    """What the workshop is to judge, or nothing."""
    choice, wanted = body.tool_choice or "auto", body.response_format
    if body.tools and choice != "none":
        name = choice.function.name if isinstance(choice, NamedTool) else choice
        tools = [tool.plain() for tool in body.tools]
        # a model that was told which tool to call calls it once
        parallel = body.parallel_tool_calls is not False and not isinstance(choice, NamedTool)
        return {"kind": "tools", "tools": tools, "choice": name, "parallel": parallel}
    if wanted is None or wanted.type == "text":
        return None
    return {"kind": "schema", "schema": grammars.ANY_OBJECT if wanted.json_schema is None else wanted.json_schema.rules}


def check(body: ChatBody, assembler: Assembler) -> None:
    """Raises ApiFault 500 where a call is not whole, or does not fit its tool."""
    rules = {tool.function.name: tool.function.parameters or {} for tool in body.tools or []}
    if any(not _fits(call, rules) for call in assembler.calls):
        raise ApiFault(500, "the model's call does not fit its tool", code=INVALID)


def _fits(call: Call, rules: dict[str, dict[str, Any]]) -> bool:
    if not call.closed or call.name not in rules:
        return False
    return schemas.mistake({**rules[call.name], "type": "object"}, call.arguments) is None


def check_format(wanted: ResponseFormat, assembler: Assembler) -> None:
    """Raises ApiFault 500 where the answer is not of the form that was asked for."""
    rules = {"type": "object"} if wanted.json_schema is None else wanted.json_schema.rules
    if schemas.mistake(rules, assembler.content) is not None:
        raise ApiFault(500, "the model's answer does not fit the response_format", code=INVALID)


# -- rooms -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Who:
    """One request's sender."""

    owner: str  # of its rows: a key's digest, or nobody
    asker: str  # of its places: the owner, or an address
    identity: str  # of the request

    @classmethod
    def of(cls, request: Request) -> "Who":
        """As the guard found it."""
        return cls(request.scope["owner"], request.scope["asker"], request.scope["identity"])


class Rooms:
    """Where work is done that takes no engine."""

    def __init__(self, workshop: Workshop) -> None:
        self.workshop = workshop
        self.makers = Makers(workshop)
        self.texts = Pool("texts to encode", running=2, waiting=32)
        self.scores = Pool("conversations to score", running=1, waiting=32)
        self.choices = Pool("preferences", running=1, waiting=16)


# -- chats -------------------------------------------------------------------------------------------------------------


# characters of a conversation and its tools that the event loop encodes itself: a thread's turn takes as long
AT_ONCE = 8_000
COLDEST = 1e-5  # a temperature


@dataclass(frozen=True)
class Talk:
    """A request to chat, understood: everything that can be refused was."""

    body: ChatBody
    served: Served
    engine: Loop
    prompt: list[int]
    requests: list[GenerationRequest]
    id: str
    created: int

    def answers(self, identity: str) -> Answers:
        """To be entered."""
        tools = bool(self.body.tools) and self.body.tool_choice != "none"
        assemblers = [Assembler(self.served.tokenizer, self.body.stops, tools=tools) for _ in self.requests]
        return Answers(self.engine, self.requests, assemblers, n=len(self.requests), identity=identity)

    def frame(self, kind: str) -> dict[str, Any]:
        """What an answer and each chunk begin with."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.served.id,
            "system_fingerprint": self.served.fingerprint,
        }


async def understand(body: ChatBody, served: Served, engine: Loop, who: Who, rooms: Rooms) -> Talk:
    """Render the prompt, make the grammar, count the budget. Raises ApiFault."""
    tokenizer, masked = served.tokenizer, served.kind == "diffusion"
    if masked:
        refuse_of_canvases(body)
    else:
        refuse_frames(body, served)
    messages = [message.plain() for message in body.messages]
    tools = [tool.plain() for tool in body.tools or []]
    prompt = await render(served, messages, tools, who, rooms, generation_prompt=True)
    budget = room(prompt, served, body.budget, "messages")
    constraints = await rooms.makers.constraints(body, served, budget, who.asker)
    bias = (
        {}
        if masked
        else known(body.biases, served) | banned(tokenizer, with_calls=bool(tools) and body.tool_choice != "none")
    )
    if body.ignore_eos:
        bias |= dict.fromkeys((tokenizer.turn_end, tokenizer.end_of_text), -math.inf)
    requests = [
        GenerationRequest(
            ids=prompt,
            sampling=sampling(body.temperature, body.top_p, body.top_k, budget),
            seed=seed,
            listener=unheard,
            stop=(tokenizer.turn_end, tokenizer.end_of_text),
            bias=bias,
            top=(body.top_logprobs or 0) if body.logprobs else 0,
            owner=who.owner,
            constraint=constraint,
            frames=body.with_frames,
        )
        for seed, constraint in zip(seeds(body.seed, body.n or 1), constraints, strict=True)
    ]
    return Talk(body, served, engine, prompt, requests, f"chatcmpl-{secrets.token_hex(12)}", int(time.time()))


async def render(
    served: Served,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]],
    who: Who,
    rooms: Rooms,
    *,
    generation_prompt: bool,
) -> list[int]:
    """A conversation's ids; a long one's are made on a thread of their own. Raises ApiFault."""
    served.refuse_endless("".join(message["content"] for message in messages), "messages")
    length = len(json.dumps([messages, tools], ensure_ascii=False))
    make = functools.partial(chat.render, served.tokenizer, messages, tools, generation_prompt=generation_prompt)
    try:
        rendered = make() if length <= AT_ONCE else await rooms.texts.run(who.asker, make)
    except InputError as error:
        raise ApiFault(400, str(error), param="messages") from None
    return rendered.ids


def refuse_of_canvases(body: ChatBody) -> None:
    """What a model that writes all places at once cannot do. Raises ApiFault."""
    shaped = body.response_format is not None and body.response_format.type != "text"
    asked = {
        "logprobs": body.logprobs,
        "logit_bias": body.biases,
        "top_k": body.top_k,
        "ignore_eos": body.ignore_eos,
        "response_format": shaped,
        "tool_choice": body.tool_choice not in (None, "none", "auto"),
    }
    if wrong := next((name for name, value in asked.items() if value), None):
        raise ApiFault(
            400,
            f"{wrong}: a masked-diffusion model does not have it; leave it out, or ask a causal model",
            param=wrong,
            code="unsupported_parameter",
        )


def refuse_frames(body: Generation, served: Served) -> None:
    """A causal model has no canvas to show. Raises ApiFault."""
    if body.with_frames:
        raise ApiFault(
            400,
            f"stream_options.include_denoising: {served.id!r} is a causal model, only a masked-diffusion one has"
            " canvases",
            param="stream_options",
        )


def room(prompt: list[int], served: Served, wanted: int | None, param: str) -> int:
    """Tokens that an answer may have. Raises ApiFault for a prompt that fills the context."""
    left = served.context - len(prompt)
    if left < 1:
        # begins as OpenAI's does: litellm and others know the error by these words
        raise ApiFault(
            400,
            f"This model's maximum context length is {served.context} tokens, the prompt has {len(prompt)}; shorten it",
            param=param,
            code="context_length_exceeded",
        )
    return min(left, wanted) if wanted is not None else left


def sampling(temperature: float | None, top_p: float | None, top_k: int | None, budget: int) -> Sampling:
    """OpenAI's defaults: temperature 1, everything kept. Below COLDEST it is greedy: no float32 tells them apart."""
    temperature = 1.0 if temperature is None else temperature
    temperature = temperature if temperature >= COLDEST else 0.0
    return Sampling(budget, temperature, 1.0 if top_p is None else top_p, top_k=top_k or 0)


def seeds(seed: int | None, count: int) -> list[int]:
    """A seed for each answer; the first one is the asked-for seed itself."""
    first = secrets.randbits(63) if seed is None else seed
    return [first if number == 0 else stable_hash(first, "answer", number) for number in range(count)]


def banned(tokenizer: Tokenizer, *, with_calls: bool) -> dict[int, float]:
    """Control tokens that an assistant does not say; those of calls too where none may be made."""
    calling = () if with_calls else (tokenizer.tool_call, tokenizer.tool_call_end)
    return dict.fromkeys((*never_said(tokenizer), *calling), -math.inf)


def known(biases: dict[int, float], served: Served) -> dict[int, float]:
    """The biases, all of tokens that there are. Raises ApiFault."""
    if wrong := next((token for token in biases if token >= served.rows), None):
        raise ApiFault(400, f"logit_bias: token {wrong} is not in the vocabulary of {served.rows}", param="logit_bias")
    return biases


# -- answers -----------------------------------------------------------------------------------------------------------


async def whole(talk: Talk, answers: Answers) -> dict[str, Any]:
    """The answer in one piece. Raises ApiFault."""
    said: list[list[Said]] = [[] for _ in talk.requests]
    reasons = [""] * len(talk.requests)
    async for event in answers:
        if isinstance(event, Finished):
            reasons[event.index] = await reason(talk, answers, event)
        elif not isinstance(event, Ping | Frame):
            said[event[0]] += event[1].tokens
    choices = []
    for index, assembler in enumerate(answers.assemblers):
        made = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in assembler.calls
        ]
        message: dict[str, Any] = {
            "role": "assistant",
            "content": assembler.content or (None if made else ""),
            "refusal": None,
        }
        if made:
            message["tool_calls"] = made
        choice: dict[str, Any] = {"index": index, "message": message, "logprobs": None, "finish_reason": reasons[index]}
        choices.append(choice | extras(talk, tuple(said[index])))
    prompt = {"prompt_token_ids": talk.prompt} if talk.body.return_token_ids else {}
    return talk.frame("chat.completion") | {"choices": choices, "usage": answers.usage.body()} | prompt


async def stream(talk: Talk, answers: Answers) -> AsyncIterator[bytes]:
    """The chunks, as lines of an event stream, [DONE] not with them. Raises ApiFault."""
    frame = talk.frame("chat.completion.chunk")
    prompt: dict[str, Any] = {"prompt_token_ids": talk.prompt} if talk.body.return_token_ids else {}
    for index in range(len(talk.requests)):
        first = {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        yield event_line(frame | {"choices": [first]} | prompt)
        prompt = {}
    async for event in answers:
        if isinstance(event, Ping):
            yield b": ping\n\n"
        elif isinstance(event, Finished):
            why = await reason(talk, answers, event)
            ended = {"index": event.index, "delta": {}, "logprobs": None, "finish_reason": why}
            yield event_line(frame | {"choices": [ended]})
        elif isinstance(event, Frame):
            yield event_line(frame | {"choices": [], "denoising": {"index": event.index} | asdict(event.shown)})
        elif event[1].content or event[1].call or talk.body.logprobs or talk.body.return_token_ids:
            index, delta = event
            new = {"index": index, "delta": _delta(delta), "logprobs": None, "finish_reason": None}
            yield event_line(frame | {"choices": [new | extras(talk, delta.tokens)]})
    if talk.body.with_usage:
        yield event_line(frame | {"choices": [], "usage": answers.usage.body()})


def event_line(chunk: dict[str, Any]) -> bytes:
    """One event of a stream."""
    return b"data: " + dumps(chunk) + b"\n\n"


def _delta(delta: Delta) -> dict[str, Any]:
    if delta.call is None:
        return {"content": delta.content}
    piece = delta.call
    call: dict[str, Any] = {"index": piece.index, "function": {"arguments": piece.arguments}}
    if piece.id is not None:
        call = {
            "index": piece.index,
            "id": piece.id,
            "type": "function",
            "function": {"name": piece.name, "arguments": piece.arguments},
        }
    return {"tool_calls": [call]}


async def reason(talk: Talk, answers: Answers, event: Finished) -> str:
    """Why an answer ended, in OpenAI's words. Raises ApiFault where a call or an object is not what was promised.

    What was promised is checked on a thread: a schema can ask for ten thousand looks at an answer.
    """
    assembler, form = answers.assemblers[event.index], talk.body.response_format
    if assembler.calls:
        await asyncio.to_thread(check, talk.body, assembler)
        return "tool_calls"
    if form is None or form.type == "text":
        return event.reason
    await asyncio.to_thread(check_format, form, assembler)
    return "stop"  # what is whole was not cut, also where its last token was the budget's last


def extras(talk: Talk, tokens: tuple[Said, ...]) -> dict[str, Any]:
    """Log-probabilities and ids, as far as they were asked for."""
    found: dict[str, Any] = {}
    if talk.body.logprobs:
        found["logprobs"] = {"content": [entry(talk, one) for one in tokens], "refusal": None}
    if talk.body.return_token_ids:
        found["token_ids"] = [one.token for one in tokens]
    return found


def entry(talk: Talk, said: Said) -> dict[str, Any]:
    """A token with its log-probability and the most likely others."""
    top = [_one(talk, token, logprob) for token, logprob in said.top]
    return _one(talk, said.token, said.logprob) | {"top_logprobs": top}


def _one(talk: Talk, token: int, logprob: float) -> dict[str, Any]:
    raw, text = spelled(talk.served.tokenizer, token)
    found: dict[str, Any] = {"token": text, "logprob": max(logprob, -9999.0), "bytes": list(raw)}
    return found | {"id": token} if talk.body.return_token_ids else found


def spelled(tokenizer: Tokenizer, token: int) -> tuple[bytes, str]:
    """A token's bytes and its text; half a character has no text of its own."""
    if token >= tokenizer.vocab_size:
        return b"", ""
    raw = tokenizer.token_bytes[token] or tokenizer.decode([token], skip_special=False).encode()
    return raw, raw.decode("utf-8", "replace")
