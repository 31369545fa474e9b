"""Tokens as they come, turned into what a client hears: text without broken characters or stop texts, and pieces of
tool calls.

    Assembler(tokenizer, stops).hear(Said) -> Deltas, `.close()` -> the rest

Held back until more is known: bytes that do not yet make a character, a beginning of a stop text, white space that may
stand before a call, and the bracket that may close a call. A call is told from its control tokens, never from text that
spells them:

    <tool_call> {"name": "f", "arguments": {...}} </tool_call>      the tags are single tokens

Joined, the deltas are the answer, however it was cut into tokens. Not here: whether a call fits its schema
(`calls.py`).
"""

import codecs
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field

from pipeline.serve.engine import Said
from pipeline.text.tokenizer import Tokenizer

NAMED = re.compile(r'\s*\{"name": "([^"\\]*)", "arguments": ')  # names need no escapes (`protocol.py`, NAME)
CLOSING = re.compile(r"\}?\s*\Z")  # what may be the end of a call behind its arguments


@dataclass(frozen=True)
class CallPiece:
    """More of a call; the first piece has its id and name, the others more of the arguments."""

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


@dataclass(frozen=True)
class Delta:
    """What is new in an answer, and the tokens that said it."""

    content: str = ""
    call: CallPiece | None = None
    tokens: tuple[Said, ...] = ()


@dataclass
class Call:
    """A call as it grows."""

    id: str
    text: str = ""  # all between its tags
    name: str | None = None
    given: int = 0  # characters of `text` that were told, or are known not to be arguments
    closed: bool = False
    arguments: str = ""


@dataclass
class Assembler:
    """One answer. `stopped` says that a stop text was found: what comes behind it is not heard."""

    tokenizer: Tokenizer
    stops: Sequence[str] = ()
    tools: bool = False  # whether calls are looked for
    content: str = ""  # told so far
    calls: list[Call] = field(default_factory=list)
    stopped: bool = False

    def __post_init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""  # decoded, not yet told
        self._tokens: list[Said] = []
        self._call: Call | None = None  # the open one

    def hear(self, said: Said) -> list[Delta]:
        """One more token."""
        if self.stopped:
            return []
        self._tokens.append(said)
        if self.tools and said.token == self.tokenizer.tool_call and self._call is None:
            return self._open()
        if self._call is not None:
            if said.token == self.tokenizer.tool_call_end:
                return self._close_call()
            return self._more_of_call(self._decoder.decode(self.tokenizer.token_bytes[said.token]))
        return self._more_text(self._decoder.decode(self.tokenizer.token_bytes[said.token]))

    def close(self) -> list[Delta]:
        """The answer has ended: what was held back, and the tokens that have not been told."""
        if self.stopped:
            return self._tell("")
        rest = self._decoder.decode(b"", final=True)
        if self._call is not None:
            return self._more_of_call(rest)
        cut = self._find_stop(self._held + rest)
        return self._tell(self._spaces(self._held + rest, last=True) if cut is None else cut)

    # -- text ----------------------------------------------------------------------------------------------------------

    def _more_text(self, text: str) -> list[Delta]:
        self._held += text
        if self.calls and not self._held.strip():  # the line feed between two calls is no content
            return []
        cut = self._find_stop(self._held)
        if cut is not None:
            self.stopped = True
            return self._tell(cut)
        ready = len(self._held) - self._possible()
        text, self._held = self._held[:ready], self._held[ready:]
        return self._tell(text) if text else []

    def _find_stop(self, text: str) -> str | None:
        """The text before the first stop text in it, or nothing."""
        found = [place for stop in self.stops if (place := text.find(stop)) >= 0]
        return text[: min(found)] if found else None

    def _possible(self) -> int:
        """How many last characters may belong to what is not told: a stop text, or space before a call."""
        most = 0
        for stop in self.stops:
            for size in range(min(len(stop) - 1, len(self._held)), most, -1):
                if self._held.endswith(stop[:size]):
                    most = size
                    break
        spaces = len(self._held) - len(self._held.rstrip()) if self.tools else 0
        return max(most, spaces)

    def _spaces(self, text: str, *, last: bool) -> str:
        """What is told of held text: space before or behind a call is layout."""
        return text.rstrip() if (self.tools and (not last or self.calls)) else text

    def _tell(self, text: str) -> list[Delta]:
        self.content += text
        tokens, self._tokens = tuple(self._tokens), []
        return [Delta(content=text, tokens=tokens)] if text or tokens else []

    # -- calls ---------------------------------------------------------------------------------------------------------

    def _open(self) -> list[Delta]:
        rest = self._spaces(self._held + self._decoder.decode(b"", final=True), last=False)
        self._held = ""
        self._decoder.reset()
        self._call = Call(f"call_{secrets.token_hex(12)}")
        self.calls.append(self._call)
        if not rest:
            return []
        opening = self._tokens.pop()
        deltas = self._tell(rest)
        self._tokens.append(opening)
        return deltas

    def _more_of_call(self, text: str) -> list[Delta]:
        call = self._call
        assert call is not None
        call.text += text
        deltas = []
        if call.name is None and (found := NAMED.match(call.text)):
            call.name, call.given = found[1], found.end()
            deltas.append(self._call_delta(call, name=found[1]))
        if call.name is not None:
            ready = CLOSING.search(call.text, call.given)
            end = ready.start() if ready else len(call.text)
            if end > call.given:
                piece = call.text[call.given : end]
                call.given = end
                call.arguments += piece
                deltas.append(self._call_delta(call, arguments=piece))
        return deltas

    def _close_call(self) -> list[Delta]:
        deltas = self._more_of_call(self._decoder.decode(b"", final=True))
        assert self._call is not None
        self._call.closed = self._call.text.rstrip().endswith("}") and self._call.name is not None
        self._call = None
        self._decoder.reset()
        return deltas

    def _call_delta(self, call: Call, *, name: str | None = None, arguments: str = "") -> Delta:
        tokens, self._tokens = tuple(self._tokens), []
        number = len(self.calls) - 1
        return Delta(call=CallPiece(number, arguments, call.id if name is not None else None, name), tokens=tokens)
