"""POST /v1/chat/completions: takes a conversation and returns assistant turns, either complete or in chunks.

    request = await prepare(body, served, engine, sender, pools)
    complete(request, answers) -> the JSON object       stream(request, answers) -> the chunks

A stream follows OpenAI's order: a delta with the role; deltas of content or calls; an empty delta with the finish
reason; if requested, a chunk without choices that has the token counts; and [DONE]. For a masked-diffusion model, the
deltas are the text to the left of the first mask. With stream_options.include_denoising, the canvas after each step is
also sent as a chunk. As an extension, `return_token_ids` adds the prompt's ids to the very first chunk, the answer's
ids to each choice, and an `id` to each log-probability.

Required tool calls and JSON are decoded under a grammar. The worker process checks it first (`workshop.py`); this
process compiles it only if it proved cheap. Before an answer is reported as a call, it is parsed and validated by code
other than the code that constrained it. So an incorrect grammar leads to a 500 error, which is counted, and never to
an invalid call.
"""

import asyncio
import functools
import json
import math
import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass

from starlette.requests import Request

from pipeline.generation import grammars, schemas
from pipeline.generation.constrain import Constraint
from pipeline.generation.sampling import Sampling
from pipeline.generation.schemas import SchemaError
from pipeline.run.device import stable_hash
from pipeline.run.errors import InputError
from pipeline.run.types import JsonObject
from pipeline.serve.answers import Answers, Assembler, Delta, Finished, Frame, PartialCall, Ping, unheard
from pipeline.serve.guard import ThreadPlaces
from pipeline.serve.loop import GenerationRequest, Loop, SampledToken
from pipeline.serve.models import Served, never_said
from pipeline.serve.protocol import ApiFault, ChatBody, GenerationBody, NamedTool, ResponseFormat, dumps, invalid
from pipeline.serve.workshop import JobRefused, Workshop
from pipeline.text import chat
from pipeline.text.tokenizer import Tokenizer

INVALID_STRUCTURE = "invalid_structure"
# conversations of up to this many characters (with tools) are encoded on the event loop: a thread switch costs as much
INLINE_CHARACTERS = 8_000
MIN_TEMPERATURE = 1e-5


@dataclass(frozen=True)
class Sender:
    """Who sent a request."""

    owner: str  # whose rows the request uses: a key's digest, or ""
    asker: str  # who occupies places (`guard.py`): the owner, or an address
    identity: str  # the request's id

    @classmethod
    def of(cls, request: Request) -> "Sender":
        """The sender, as identified by the guard."""
        return cls(request.scope["owner"], request.scope["asker"], request.scope["identity"])


class Pools:
    """Thread pools for work that needs no engine, one per kind of work."""

    def __init__(self, workshop: Workshop) -> None:
        self.workshop = workshop
        self.grammars = ThreadPlaces("grammars", running=1, waiting=64)
        self.texts = ThreadPlaces("texts to encode", running=2, waiting=32)
        self.scores = ThreadPlaces("conversations to score", running=1, waiting=32)
        self.feedback = ThreadPlaces("preferences and labels", running=1, waiting=16)


@dataclass(frozen=True)
class ChatRequest:
    """A validated chat request, which has passed every check that can run early."""

    body: ChatBody
    served: Served
    engine: Loop
    prompt: list[int]
    requests: list[GenerationRequest]
    id: str
    created: int

    def answers(self, identity: str) -> Answers:
        """The answers; their requests have not been submitted yet."""
        tools = bool(self.body.tools) and self.body.tool_choice != "none"
        assemblers = [Assembler(self.served.tokenizer, self.body.stops, tools=tools) for _ in self.requests]
        return Answers(self.engine, self.requests, assemblers, n=len(self.requests), identity=identity)

    def envelope(self, kind: str) -> JsonObject:
        """The first fields of a response and of each chunk."""
        return envelope(self.id, kind, self.created, self.served)


async def prepare(body: ChatBody, served: Served, engine: Loop, sender: Sender, pools: Pools) -> ChatRequest:
    """Render the prompt, compile the grammar, and compute the budget. Raises ApiFault."""
    tokenizer, masked = served.tokenizer, served.kind != "causal"
    if masked:
        refuse_unsupported(body)
    else:
        refuse_frames(body, served)
    messages = [message.plain() for message in body.messages]
    tools = [tool.plain() for tool in body.tools or []]
    prompt = await encode(served, messages, tools, sender, pools, generation_prompt=True)
    budget = token_budget(prompt, served, body.budget, "messages")
    constraints = await make_constraints(body, served, budget, sender.asker, pools)
    bias = (
        {}
        if masked
        else check_biases(body.biases, served)
        | ban_control_tokens(tokenizer, with_calls=bool(tools) and body.tool_choice != "none")
    )
    if body.ignore_eos:
        bias |= dict.fromkeys((tokenizer.turn_end, tokenizer.end_of_text), -math.inf)
    requests = [
        GenerationRequest(
            ids=prompt,
            sampling=make_sampling(body.temperature, body.top_p, body.top_k, budget),
            seed=seed,
            listener=unheard,
            stop=(tokenizer.turn_end, tokenizer.end_of_text),
            bias=bias,
            top=(body.top_logprobs or 0) if body.logprobs else 0,
            owner=sender.owner,
            constraint=constraint,
            frames=body.with_frames,
        )
        for seed, constraint in zip(make_seeds(body.seed, body.n or 1), constraints, strict=True)
    ]
    return ChatRequest(body, served, engine, prompt, requests, f"chatcmpl-{secrets.token_hex(12)}", int(time.time()))


async def complete(request: ChatRequest, answers: Answers) -> JsonObject:
    """All answers in one JSON object. Raises ApiFault."""
    tokens: list[list[SampledToken]] = [[] for _ in request.requests]
    reasons = [""] * len(request.requests)
    async for event in answers:
        if isinstance(event, Finished):
            reasons[event.index] = await finish_reason(request, answers, event)
        elif not isinstance(event, Ping | Frame):
            tokens[event[0]] += event[1].tokens
    choices = []
    for index, assembler in enumerate(answers.assemblers):
        calls = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in assembler.calls
        ]
        message: JsonObject = {
            "role": "assistant",
            "content": assembler.content or (None if calls else ""),
            "refusal": None,
        }
        if calls:
            message["tool_calls"] = calls
        choice: JsonObject = {"index": index, "message": message, "logprobs": None, "finish_reason": reasons[index]}
        choices.append(choice | token_fields(request, tuple(tokens[index])))
    prompt = {"prompt_token_ids": request.prompt} if request.body.return_token_ids else {}
    return request.envelope("chat.completion") | {"choices": choices, "usage": answers.usage.body()} | prompt


async def stream(request: ChatRequest, answers: Answers) -> AsyncIterator[bytes]:
    """Yield the chunks as lines of an event stream, without [DONE]. Raises ApiFault."""
    envelope = request.envelope("chat.completion.chunk")
    prompt: JsonObject = {"prompt_token_ids": request.prompt} if request.body.return_token_ids else {}
    for index in range(len(request.requests)):
        first = {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        yield event_line(envelope | {"choices": [first]} | prompt)
        prompt = {}
    async for event in answers:
        if isinstance(event, Ping):
            yield b": ping\n\n"
        elif isinstance(event, Finished):
            reason = await finish_reason(request, answers, event)
            last = {"index": event.index, "delta": {}, "logprobs": None, "finish_reason": reason}
            yield event_line(envelope | {"choices": [last]})
        elif isinstance(event, Frame):
            yield event_line(envelope | {"choices": [], "denoising": {"index": event.index} | asdict(event.canvas)})
        elif event[1].content or event[1].call or request.body.logprobs or request.body.return_token_ids:
            index, delta = event
            choice = {"index": index, "delta": _delta_body(delta), "logprobs": None, "finish_reason": None}
            yield event_line(envelope | {"choices": [choice | token_fields(request, delta.tokens)]})
    if request.body.with_usage:
        yield event_line(envelope | {"choices": [], "usage": answers.usage.body()})


# -- prompt and settings -----------------------------------------------------------------------------------------------


async def encode(
    served: Served,
    messages: list[JsonObject],
    tools: list[JsonObject],
    sender: Sender,
    pools: Pools,
    *,
    generation_prompt: bool,
) -> list[int]:
    """A conversation's token ids; a long conversation is encoded on another thread. Raises ApiFault."""
    served.refuse_overlong("".join(message["content"] for message in messages), "messages")
    length = len(json.dumps([messages, tools], ensure_ascii=False))
    render = functools.partial(chat.render, served.tokenizer, messages, tools, generation_prompt=generation_prompt)
    try:
        rendered = render() if length <= INLINE_CHARACTERS else await pools.texts.run(sender.asker, render)
    except InputError as error:
        raise invalid("messages", str(error)) from None
    return rendered.ids


def refuse_unsupported(body: ChatBody) -> None:
    """Raise ApiFault for parameters that a masked-diffusion model cannot support, since it writes all positions at
    once.
    """
    shaped = body.response_format is not None and body.response_format.type != "text"
    parameters = {
        "logprobs": body.logprobs,
        "logit_bias": body.biases,
        "top_k": body.top_k,
        "ignore_eos": body.ignore_eos,
        "response_format": shaped,
        "tool_choice": body.tool_choice not in (None, "none", "auto"),
    }
    if wrong := next((name for name, value in parameters.items() if value), None):
        raise invalid(
            wrong,
            f"{wrong}: not supported by a masked-diffusion model; leave it out, or use a causal model",
            "unsupported_parameter",
        )


def refuse_frames(body: GenerationBody, served: Served) -> None:
    """Raise ApiFault if a request wants canvases from a causal model, which has none."""
    if body.with_frames:
        raise invalid(
            "stream_options",
            f"stream_options.include_denoising: {served.id!r} is a causal model; only masked-diffusion models"
            " have canvases",
        )


def token_budget(prompt: list[int], served: Served, requested: int | None, param: str) -> int:
    """How many tokens an answer may have. Raises ApiFault for a prompt that fills the context."""
    room = served.context - len(prompt)
    if room < 1:
        # starts like OpenAI's message: litellm and others recognize the error by these words
        raise invalid(
            param,
            f"This model's maximum context length is {served.context} tokens, but the prompt has {len(prompt)};"
            " shorten it",
            "context_length_exceeded",
        )
    return min(room, requested) if requested is not None else room


def make_sampling(temperature: float | None, top_p: float | None, top_k: int | None, budget: int) -> Sampling:
    """Sampling with OpenAI's defaults: temperature 1, no truncation. Greedy below MIN_TEMPERATURE, which gives the
    same result in float32.
    """
    temperature = 1.0 if temperature is None else temperature
    temperature = temperature if temperature >= MIN_TEMPERATURE else 0.0
    return Sampling(budget, temperature, 1.0 if top_p is None else top_p, top_k=top_k or 0)


def make_seeds(seed: int | None, count: int) -> list[int]:
    """A seed for each answer; the first is the requested seed, or a random one for None."""
    first = secrets.randbits(63) if seed is None else seed
    return [first if number == 0 else stable_hash(first, "answer", number) for number in range(count)]


def ban_control_tokens(tokenizer: Tokenizer, *, with_calls: bool) -> dict[int, float]:
    """Biases against the control tokens that an assistant must not generate, including those of tool calls unless
    `with_calls`.
    """
    calling = () if with_calls else (tokenizer.tool_call, tokenizer.tool_call_end)
    return dict.fromkeys((*never_said(tokenizer), *calling), -math.inf)


def check_biases(biases: dict[int, float], served: Served) -> dict[int, float]:
    """Return the biases unchanged. Raises ApiFault if a token is outside the vocabulary."""
    if wrong := next((token for token in biases if token >= served.vocab_size), None):
        raise invalid("logit_bias", f"logit_bias: token {wrong} is not in the vocabulary of {served.vocab_size}")
    return biases


# -- parts of an answer ------------------------------------------------------------------------------------------------


def envelope(id_: str, kind: str, created: int, served: Served) -> JsonObject:
    """The first fields of a response and of each chunk."""
    first = {"id": id_, "object": kind, "created": created, "model": served.id}
    return first | {"system_fingerprint": served.fingerprint}


def event_line(chunk: JsonObject) -> bytes:
    """A chunk as one server-sent event."""
    return b"data: " + dumps(chunk) + b"\n\n"


def _delta_body(delta: Delta) -> JsonObject:
    if delta.call is None:
        return {"content": delta.content}
    piece = delta.call
    call: JsonObject = {"index": piece.index, "function": {"arguments": piece.arguments}}
    if piece.id is not None:
        call = {
            "index": piece.index,
            "id": piece.id,
            "type": "function",
            "function": {"name": piece.name, "arguments": piece.arguments},
        }
    return {"tool_calls": [call]}


async def finish_reason(request: ChatRequest, answers: Answers, event: Finished) -> str:
    """OpenAI's finish reason. Raises ApiFault if a call or an object does not match its schema.

    The check runs on another thread: a schema can require ten thousand checks of an answer.
    """
    assembler, form = answers.assemblers[event.index], request.body.response_format
    if assembler.calls:
        await asyncio.to_thread(check_calls, request.body, assembler)
        return "tool_calls"
    if form is None or form.type == "text":
        return event.reason
    await asyncio.to_thread(check_format, form, assembler)
    return "stop"  # a complete object was not truncated, even if it used the entire budget


def token_fields(request: ChatRequest, tokens: tuple[SampledToken, ...]) -> JsonObject:
    """A choice's log-probabilities and token ids, if requested."""
    fields: JsonObject = {}
    if request.body.logprobs:
        fields["logprobs"] = {"content": [_logprob(request, event) for event in tokens], "refusal": None}
    if request.body.return_token_ids:
        fields["token_ids"] = [event.token for event in tokens]
    return fields


def _logprob(request: ChatRequest, event: SampledToken) -> JsonObject:
    """A token with its log-probability and the most likely alternatives."""
    top = [_token_logprob(request, token, logprob) for token, logprob in event.top]
    return _token_logprob(request, event.token, event.logprob) | {"top_logprobs": top}


def _token_logprob(request: ChatRequest, token: int, logprob: float) -> JsonObject:
    raw, text = decode_token(request.served.tokenizer, token)
    entry: JsonObject = {"token": text, "logprob": max(logprob, -9999.0), "bytes": list(raw)}
    return entry | {"id": token} if request.body.return_token_ids else entry


def decode_token(tokenizer: Tokenizer, token: int) -> tuple[bytes, str]:
    """A token's bytes and its text, with incomplete characters replaced."""
    if token >= tokenizer.vocab_size:
        return b"", ""
    raw = tokenizer.token_bytes[token] or tokenizer.decode([token], skip_special=False).encode()
    return raw, raw.decode("utf-8", "replace")


# -- grammars ----------------------------------------------------------------------------------------------------------


async def make_constraints(
    body: ChatBody, served: Served, budget: int, asker: str, pools: Pools
) -> list[Constraint | None]:
    """A constraint for each of the `n` answers, or None. Raises ApiFault: 400 for an invalid schema, 429 if busy."""
    count, job = body.n or 1, _grammar_job(body)
    if job is None:
        return [None] * count
    param = "tools" if body.tools else "response_format"
    try:
        verdict = await pools.workshop.grammar(served.id, job, asker)
        grammar = await pools.grammars.run(asker, lambda: served.grammars.take(verdict.written, verdict.plan))
        return [grammar.constraint(budget) for _ in range(count)]
    except (SchemaError, JobRefused) as error:
        raise invalid("max_tokens" if error.code == "budget_too_small" else param, str(error), error.code) from None


def _grammar_job(body: ChatBody) -> JsonObject | None:
    """The worker job that builds a request's grammar; None if it needs no grammar."""
    choice, form = body.tool_choice or "auto", body.response_format
    if body.tools and choice != "none":
        name = choice.function.name if isinstance(choice, NamedTool) else choice
        tools = [tool.plain() for tool in body.tools]
        # a tool that the request names is called once
        parallel = body.parallel_tool_calls is not False and not isinstance(choice, NamedTool)
        return {"kind": "tools", "tools": tools, "choice": name, "parallel": parallel}
    if form is None or form.type == "text":
        return None
    return {"kind": "schema", "schema": grammars.ANY_OBJECT if form.json_schema is None else form.json_schema.rules}


def check_calls(body: ChatBody, assembler: Assembler) -> None:
    """Raise ApiFault 500 if a call is incomplete or does not match its tool's schema."""
    rules = {tool.function.name: tool.function.parameters or {} for tool in body.tools or []}
    if any(not _fits(call, rules) for call in assembler.calls):
        raise ApiFault(500, "the model's call does not match its tool's schema", code=INVALID_STRUCTURE)


def _fits(call: PartialCall, rules: dict[str, JsonObject]) -> bool:
    if not call.closed or call.name not in rules:
        return False
    return schemas.mistake({**rules[call.name], "type": "object"}, call.arguments) is None


def check_format(form: ResponseFormat, assembler: Assembler) -> None:
    """Raise ApiFault 500 if the answer does not match the requested format."""
    rules = {"type": "object"} if form.json_schema is None else form.json_schema.rules
    if schemas.mistake(rules, assembler.content) is not None:
        raise ApiFault(500, "the model's answer does not match the response_format", code=INVALID_STRUCTURE)
