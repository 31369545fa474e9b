"""Turns the tokens of an answer into deltas for the client: text without broken characters or stop strings, and pieces
of tool calls.

    Assembler(tokenizer, stops).hear(Said) -> deltas     .close() -> the rest

Some text is held back until more is known: bytes that do not yet make a character, a possible beginning of a stop
string, white space that may precede a call, and the bracket that may close a call. A call is recognized by its control
tokens, never by text that spells them:

    <tool_call> {"name": "f", "arguments": {...}} </tool_call>      the tags are single tokens

Joined, the deltas are the answer, however it was cut into tokens. Not here: whether a call fits its schema
(`chats.py`).
"""

import codecs
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field

from pipeline.serve.loop import Said
from pipeline.text.tokenizer import Tokenizer

CALL_BEGIN = re.compile(r'\s*\{"name": "([^"\\]*)", "arguments": ')  # names need no escapes (`protocol.py`, NAME)
CALL_END = re.compile(r"\}?\s*\Z")  # what may be the end of a call behind its arguments


@dataclass(frozen=True)
class CallPiece:
    """More of a call; the first piece has its id and name, the others more of the arguments."""

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


@dataclass(frozen=True)
class Delta:
    """The next part of an answer, and the tokens it was made from."""

    content: str = ""
    call: CallPiece | None = None
    tokens: tuple[Said, ...] = ()


@dataclass
class Call:
    """A call as far as it was generated."""

    id: str
    text: str = ""  # everything between its tags
    name: str | None = None
    num_parsed: int = 0  # characters of `text` that were sent as arguments, or belong to the name
    closed: bool = False
    arguments: str = ""


@dataclass
class Assembler:
    """Assembles one answer. `stopped`: a stop string was found; later tokens are ignored."""

    tokenizer: Tokenizer
    stops: Sequence[str] = ()
    tools: bool = False  # whether to look for calls
    content: str = ""  # sent so far
    calls: list[Call] = field(default_factory=list)
    stopped: bool = False

    def __post_init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._buffer = ""  # decoded, not yet sent
        self._tokens: list[Said] = []  # not yet sent
        self._call: Call | None = None  # the open one

    def hear(self, event: Said) -> list[Delta]:
        """Add a token; the deltas that are now certain."""
        if self.stopped:
            return []
        self._tokens.append(event)
        if self.tools and event.token == self.tokenizer.tool_call and self._call is None:
            return self._open_call()
        if self._call is not None:
            if event.token == self.tokenizer.tool_call_end:
                return self._close_call()
            return self._add_call_text(self._decoder.decode(self.tokenizer.token_bytes[event.token]))
        return self._add_text(self._decoder.decode(self.tokenizer.token_bytes[event.token]))

    def close(self) -> list[Delta]:
        """End the answer: the text that was held back, and the tokens not yet sent."""
        if self.stopped:
            return self._make_delta("")
        rest = self._decoder.decode(b"", final=True)
        if self._call is not None:
            return self._add_call_text(rest)
        cut = self._cut_at_stop(self._buffer + rest)
        return self._make_delta(self._strip_layout(self._buffer + rest, last=True) if cut is None else cut)

    # -- text ----------------------------------------------------------------------------------------------------------

    def _add_text(self, text: str) -> list[Delta]:
        self._buffer += text
        if self.calls and not self._buffer.strip():  # the line feed between two calls is no content
            return []
        cut = self._cut_at_stop(self._buffer)
        if cut is not None:
            self.stopped = True
            return self._make_delta(cut)
        ready = len(self._buffer) - self._num_uncertain()
        text, self._buffer = self._buffer[:ready], self._buffer[ready:]
        return self._make_delta(text) if text else []

    def _cut_at_stop(self, text: str) -> str | None:
        """The text before its first stop string; None where it has none."""
        positions = [position for stop in self.stops if (position := text.find(stop)) >= 0]
        return text[: min(positions)] if positions else None

    def _num_uncertain(self) -> int:
        """How many last characters may belong to a stop string, or are space that may precede a call."""
        most = 0
        for stop in self.stops:
            for size in range(min(len(stop) - 1, len(self._buffer)), most, -1):
                if self._buffer.endswith(stop[:size]):
                    most = size
                    break
        spaces = len(self._buffer) - len(self._buffer.rstrip()) if self.tools else 0
        return max(most, spaces)

    def _strip_layout(self, text: str, *, last: bool) -> str:
        """Text without the space before or behind a call, which is layout."""
        return text.rstrip() if (self.tools and (not last or self.calls)) else text

    def _make_delta(self, text: str) -> list[Delta]:
        self.content += text
        tokens, self._tokens = tuple(self._tokens), []
        return [Delta(content=text, tokens=tokens)] if text or tokens else []

    # -- calls ---------------------------------------------------------------------------------------------------------

    def _open_call(self) -> list[Delta]:
        rest = self._strip_layout(self._buffer + self._decoder.decode(b"", final=True), last=False)
        self._buffer = ""
        self._decoder.reset()
        self._call = Call(f"call_{secrets.token_hex(12)}")
        self.calls.append(self._call)
        if not rest:
            return []
        opening = self._tokens.pop()
        deltas = self._make_delta(rest)
        self._tokens.append(opening)
        return deltas

    def _add_call_text(self, text: str) -> list[Delta]:
        call = self._call
        assert call is not None
        call.text += text
        deltas = []
        if call.name is None and (match := CALL_BEGIN.match(call.text)):
            call.name, call.num_parsed = match[1], match.end()
            deltas.append(self._make_call_delta(call, name=match[1]))
        if call.name is not None:
            closing = CALL_END.search(call.text, call.num_parsed)
            end = closing.start() if closing else len(call.text)
            if end > call.num_parsed:
                piece = call.text[call.num_parsed : end]
                call.num_parsed = end
                call.arguments += piece
                deltas.append(self._make_call_delta(call, arguments=piece))
        return deltas

    def _close_call(self) -> list[Delta]:
        deltas = self._add_call_text(self._decoder.decode(b"", final=True))
        assert self._call is not None
        self._call.closed = self._call.text.rstrip().endswith("}") and self._call.name is not None
        self._call = None
        self._decoder.reset()
        return deltas

    def _make_call_delta(self, call: Call, *, name: str | None = None, arguments: str = "") -> Delta:
        tokens, self._tokens = tuple(self._tokens), []
        number = len(self.calls) - 1
        return Delta(call=CallPiece(number, arguments, call.id if name is not None else None, name), tokens=tokens)
