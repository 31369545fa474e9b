"""The HTTP API's request bodies, validated field by field, and its errors.

Names and meanings follow OpenAI (platform.openai.com, API reference), with a few extensions that other servers also
support. Every number has a range and every list a maximum length, so that no body can request an unreasonable amount of
work. A list is validated up to its first mistake (`fail_fast`); otherwise a body with 300,000 mistakes would produce
300,000 error messages. If an unsupported OpenAI field has a value that would have an effect, the request is refused
with an error that names the field (`REFUSED`). Unknown fields are ignored, because clients add new ones every month.

Errors are OpenAI error objects, with the status codes that OpenAI's SDKs expect:

    {"error": {"message": str, "type": str, "param": str | null, "code": str | null}}

A message states what was expected, what was found, and what to do. It never contains an internal exception: a 500
contains only a request id to look up in the log.

The docstrings and names of the body classes are part of /openapi.json. Not here: body sizes and JSON parsing
(`guard.py`), and checks that need a model: prompt length, schema keywords (`generation/constrain.py`).
"""

import json
import re
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from starlette.responses import Response

from pipeline.run.types import JsonObject

MOST_MESSAGES, MOST_TOOLS, MOST_BIASES = 512, 64, 300
NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
MOST_CHARACTERS = 1_000_000  # the guard already limits the body's size

# unsupported fields of chat and completions, with the values accepted because they have no effect
REFUSED: dict[str, tuple[object, ...]] = {
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "functions": (None, []),
    "function_call": (None, "none"),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "web_search_options": (None,),
    "best_of": (None, 1),
    "repetition_penalty": (None, 1),
    "min_p": (None, 0),
    "reasoning_effort": (None, "none"),
    "guided_json": (None,),
    "guided_regex": (None,),
    "guided_grammar": (None,),
}

Text = Annotated[str, Field(max_length=MOST_CHARACTERS)]
Id = Annotated[int, Field(ge=0, lt=2**31)]
Ids = Annotated[list[Id], Field(fail_fast=True, max_length=200_000)]
Name = Annotated[str, Field(max_length=256)]


class RequestBody(BaseModel):
    """Base class of all request bodies. Unknown fields are ignored; numbers must be JSON numbers, not strings."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)


class TextPart(RequestBody):
    """A text part of a message's content."""

    type: Literal["text"]
    text: Text


class FunctionCall(RequestBody):
    """The called function; `arguments` is a string of JSON."""

    name: Name
    arguments: Text


class ToolCall(RequestBody):
    """A tool call in an assistant message."""

    id: Name
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(RequestBody):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Annotated[list[TextPart], Field(fail_fast=True, max_length=256)] | None = None
    name: Name | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True, max_length=64)] | None = None
    tool_call_id: Name | None = None

    @model_validator(mode="after")
    def _check_fields(self) -> "Message":
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise ValueError(
                f"content: expected text in a {self.role} message; only assistant messages with tool calls may omit it"
            )
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"tool_calls: allowed only in an assistant message, found in a {self.role} message")
        if self.role == "tool" and self.tool_call_id is None:
            raise ValueError("tool_call_id: expected the id of the call that this result belongs to")
        return self

    def plain(self) -> JsonObject:
        """The message as `text/chat.py` expects it, with its content parts joined."""
        content = "".join(part.text for part in self.content) if isinstance(self.content, list) else self.content
        message: JsonObject = {"role": self.role, "content": content or ""}
        if self.tool_calls:
            message["tool_calls"] = [call.model_dump() for call in self.tool_calls]
        if self.role == "tool":
            message |= {"tool_call_id": self.tool_call_id, "name": self.name or "tool"}
        return message


class Function(RequestBody):
    """A tool's name and the schema of its arguments."""

    name: str
    description: Text | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if not NAME.fullmatch(name):
            raise ValueError("expected 1 to 64 letters, digits, underscores, dots or dashes")
        return name


class Tool(RequestBody):
    """A function that the model may call."""

    type: Literal["function"]
    function: Function

    def plain(self) -> JsonObject:
        """The tool as `text/chat.py` expects it."""
        return {"type": "function", "function": self.function.model_dump(exclude_none=True, exclude={"strict"})}


Messages = Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=MOST_MESSAGES)]
Tools = Annotated[list[Tool], Field(fail_fast=True, max_length=MOST_TOOLS)]


class NamedFunction(RequestBody):
    """The function's name in a `tool_choice`."""

    name: Name


class NamedTool(RequestBody):
    """A `tool_choice` that names the function to call."""

    type: Literal["function"]
    function: NamedFunction


class Schema(RequestBody):
    """The `json_schema` of a `response_format`. In JSON, the field `rules` is called `schema`."""

    name: str | None = None
    description: str | None = None
    rules: JsonObject = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(RequestBody):
    """Text, any JSON object, or JSON that matches a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: Schema | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema: required if `type` is `json_schema`, not allowed otherwise")
        return self


class StreamOptions(RequestBody):
    """What a stream includes in addition to the text."""

    include_usage: bool = False
    include_denoising: bool = False


class GenerationBody(RequestBody):
    """Fields shared by chat and completions."""

    model: Name
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, le=1_000_000)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    n: Annotated[int, Field(ge=1, le=8)] | None = None
    stop: Text | Annotated[list[Text], Field(fail_fast=True, max_length=4)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    user: Name | None = None
    return_token_ids: bool = False
    ignore_eos: bool = False

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, data: object) -> object:
        if isinstance(data, dict):
            for name, harmless in REFUSED.items():
                if name in data and data[name] not in harmless:
                    raise ValueError(f"{name}: not supported by this server; leave it out")
        return data

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _check_bias_count(cls, value: object) -> object:
        if isinstance(value, dict) and len(value) > MOST_BIASES:
            raise ValueError(f"expected at most {MOST_BIASES} tokens, found {len(value)}")
        return value

    @field_validator("logit_bias")
    @classmethod
    def _check_bias_keys(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        if wrong := [key for key in value or {} if not re.fullmatch(r"[0-9]{1,9}", key)]:
            raise ValueError(f"expected token ids as keys, found {wrong[0][:20]!r}")
        return value

    @field_validator("stop")
    @classmethod
    def _check_stops(cls, value: str | list[str] | None) -> str | list[str] | None:
        stops = [value] if isinstance(value, str) else value or []
        if any(not 0 < len(stop) <= 256 for stop in stops):
            raise ValueError("expected strings of 1 to 256 characters")
        return value

    @property
    def stops(self) -> list[str]:
        """The strings that end an answer."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or [])

    @property
    def biases(self) -> dict[int, float]:
        """The value added to each token's logit; 100 practically forces a token, -100 forbids it (e^100 is 10^43)."""
        return {int(key): value for key, value in (self.logit_bias or {}).items()}

    @property
    def with_frames(self) -> bool:
        """Whether to send the canvas after each step; possible only in a stream."""
        return bool(self.stream and self.stream_options and self.stream_options.include_denoising)

    @property
    def with_usage(self) -> bool:
        """Whether a stream ends with the token counts."""
        return self.stream_options is not None and self.stream_options.include_usage


Budget = Annotated[int, Field(ge=1, le=1_000_000)]


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    messages: Messages
    max_tokens: Budget | None = None
    max_completion_tokens: Budget | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None

    @model_validator(mode="after")
    def _check_combinations(self) -> "ChatBody":
        names = [tool.function.name for tool in self.tools or []]
        if len(set(names)) != len(names):
            raise ValueError("tools: two tools have the same name")
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in names:
            raise ValueError(f"tool_choice: no tool is named {self.tool_choice.function.name!r:.80}")
        if self.tool_choice == "required" and not names:
            raise ValueError("tool_choice: 'required' needs at least one tool")
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: requires `logprobs: true`")
        shaped = self.response_format is not None and self.response_format.type != "text"
        if shaped and names and self.tool_choice != "none":
            raise ValueError("response_format: cannot be combined with tools; set tool_choice to 'none'")
        if self.ignore_eos and (shaped or (names and self.tool_choice != "none")):
            raise ValueError(
                "ignore_eos: cannot be combined with tools or a response_format: such answers end when complete"
            )
        if shaped and self.stops:
            raise ValueError("stop: cannot be combined with a response_format: such answers end when complete")
        return self

    @property
    def budget(self) -> int | None:
        """The maximum number of tokens in an answer; `max_completion_tokens` overrides the older `max_tokens`."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: (
        Text
        | Annotated[list[Text], Field(fail_fast=True, min_length=1, max_length=8)]
        | Annotated[Ids, Field(min_length=1)]
        | Annotated[list[Annotated[Ids, Field(min_length=1)]], Field(fail_fast=True, min_length=1, max_length=8)]
    )
    suffix: Text | None = None
    max_tokens: Annotated[int, Field(ge=0, le=1_000_000)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    stop_token_ids: Annotated[Ids, Field(max_length=8)] | None = None

    @model_validator(mode="after")
    def _check_combinations(self) -> "CompletionBody":
        if self.suffix is not None and self.echo:
            raise ValueError("suffix: cannot be combined with echo")
        if len(self.prompts) * (self.n or 1) > 8:
            raise ValueError(
                f"n: expected at most 8 answers in total, found {len(self.prompts)} prompts with n = {self.n}; lower n"
            )
        return self

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """One or more prompts, all as text or all as token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        return [self.prompt] if isinstance(self.prompt[0], int) else self.prompt  # type: ignore[return-value]


class WeightsBody(RequestBody):
    """POST /update_weights_from_disk: a model directory below the --rollouts folder."""

    model_path: Annotated[str, Field(min_length=1, max_length=4096)]


class TokenizeBody(RequestBody):
    """POST /tokenize."""

    model: Name
    prompt: Annotated[str, Field(max_length=100_000)]  # the response is ten times as long: it has each token's text


class DetokenizeBody(RequestBody):
    """POST /detokenize."""

    model: Name
    tokens: Ids


class ConversationBody(RequestBody):
    """Messages and the available tools."""

    messages: Messages
    tools: Tools | None = None


class TemplateBody(ConversationBody):
    """POST /apply-template."""

    model: Name
    add_generation_prompt: bool = True


class ScoreBody(RequestBody):
    """POST /score: each conversation ends with the answer to score."""

    model: Name
    conversations: Annotated[list[ConversationBody], Field(fail_fast=True, min_length=1, max_length=16)]


class RenderBody(RequestBody):
    """POST /render."""

    markdown: Annotated[str, Field(max_length=50_000)]


class PreferenceBody(RequestBody):
    """POST /preferences: one answer is better than the other."""

    model: Name
    prompt: Messages
    chosen: Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=1)]
    rejected: Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=1)]
    tools: Tools | None = None

    @model_validator(mode="after")
    def _check_answers(self) -> "PreferenceBody":
        if any(side[0].role != "assistant" for side in (self.chosen, self.rejected)):
            raise ValueError("chosen, rejected: expected one assistant message each")
        if self.chosen[0].plain() == self.rejected[0].plain():
            raise ValueError("chosen, rejected: expected two different answers")
        if self.prompt[-1].role not in ("user", "tool"):
            raise ValueError("prompt: expected the last message to be a user or tool message")
        return self


class LabelBody(RequestBody):
    """POST /labels: an answer is good or bad."""

    model: Name
    prompt: Messages
    answer: Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=1)]
    desirable: bool
    tools: Tools | None = None

    @model_validator(mode="after")
    def _check_answer(self) -> "LabelBody":
        answer = self.answer[0].plain()
        if answer["role"] != "assistant" or not (answer["content"].strip() or answer.get("tool_calls")):
            raise ValueError("answer: expected one assistant message with content or tool calls")
        if self.prompt[-1].role not in ("user", "tool"):
            raise ValueError("prompt: expected the last message to be a user or tool message")
        return self


# -- errors ------------------------------------------------------------------------------------------------------------


TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}


class ApiFault(Exception):
    """An error in the form sent to the client. `retry`: seconds after which a retry may succeed."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, retry: int | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.retry = status, message, param, code, retry

    @property
    def body(self) -> JsonObject:
        """OpenAI's error object."""
        kind = TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """The HTTP response, with Retry-After if a retry may succeed."""
        headers = {} if self.retry is None else {"Retry-After": str(self.retry)}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return JsonResponse(self.body, self.status, headers)


def invalid(param: str | None, message: str, code: str | None = None) -> ApiFault:
    """The error for a request with an invalid field `param`."""
    return ApiFault(400, message, param=param, code=code)


class JsonResponse(Response):
    """JSON in UTF-8; a lone surrogate becomes a question mark instead of an error. Bytes are assumed to be JSON."""

    media_type = "application/json"

    def render(self, content: object) -> bytes:
        return content if isinstance(content, bytes) else dumps(content)


def dumps(content: object) -> bytes:
    """Compact JSON in UTF-8. Raises ValueError for NaN and infinity."""
    return json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode("utf-8", "replace")


def internal(identity: str) -> ApiFault:
    """The error sent after an internal failure; the log has the cause, under the request's id."""
    return ApiFault(500, f"the server failed; look for request {identity} in its log", code="internal_error")
