"""Talk to a model in the terminal, with streaming.

    python -m pipeline.serve.chat models/deploy [--system TEXT] [--tools FILE] [--temperature 0] [--seed 0]

A line is a turn, and one that ends in a backslash goes on in the next; `/quit`, an empty line or Ctrl-D ends. `/new` forgets
the conversation, `/tool TEXT` answers the model's call with a result, `/help` lists these; another word after a slash is
refused, not said. `--tools` names a JSON file with the tools the model may call (OpenAI form); calls are shown, not run.
Ctrl-C stops an answer, and forgets it with its question; so does an answer that only repeats itself. Not promised: that a small model knows anything.
"""

import argparse
import codecs
import json
import re
import sys
from pathlib import Path
from typing import Any, TextIO

from pipeline import checkpoint, device
from pipeline.errors import InputError, StagecoachError
from pipeline.generation.sampling import Sampling, generate
from pipeline.model.transformer import Transformer
from pipeline.text import chat
from pipeline.text.tokenizer import Tokenizer

COMMAND = re.compile(r"/[a-z]+(?=\s|$)")  # a path such as /etc/hosts is no command
ENDS = ("/quit", "/exit", "/bye")
HELP = """a line that ends in \\ goes on in the next
/new forgets the conversation
/tool TEXT answers the model's call with a result
/quit, an empty line or Ctrl-D ends
"""
REPEATED, PERIOD = 48, 8  # an answer whose last 48 tokens are one piece of at most 8, over and over, says no more


class Repeats(Exception):
    """The model goes round in a circle."""


class Conversation:
    """The messages so far, and the model that continues them."""

    def __init__(self, model: Transformer, tokenizer: Tokenizer, tools: list[dict[str, Any]], system: str) -> None:
        self.model, self.tokenizer, self.tools, self.system = model, tokenizer, tools, system
        self.messages: list[dict[str, Any]] = []
        self.start_over()

    def start_over(self) -> None:
        """Forget everything but the system message."""
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def answer(self, message: dict[str, Any], sampling: Sampling, seed: int, screen: TextIO) -> dict[str, Any]:
        """Add a user or tool message, stream the assistant's turn to `screen`, add it and return it.

        Raises InputError when the conversation no longer fits the context, and Repeats; nothing is added then.
        """
        prompt = chat.render(self.tokenizer, [*self.messages, message], self.tools, generation_prompt=True).ids
        room = self.model.config.max_context - len(prompt)
        if room < 16:
            raise InputError(
                f"the conversation has {len(prompt)} tokens, the context {self.model.config.max_context}: /new"
            )
        stream = Stream(self.tokenizer, screen)
        limit = Sampling(min(sampling.max_new_tokens, room), sampling.temperature, sampling.top_p, sampling.top_k)
        stop = (self.tokenizer.turn_end, self.tokenizer.end_of_text)
        done = generate(self.model, [prompt], limit, stop=stop, seeds=[seed], on_token=stream.token)[0]
        stream.close()
        reply = chat.parse(self.tokenizer.decode(done.ids))
        said: dict[str, Any] = {"role": "assistant", "content": reply.content}
        if reply.tool_calls:
            said["tool_calls"] = [
                {"id": f"call_{n}", "type": "function",
                 "function": {"name": call["name"], "arguments": json.dumps(call["arguments"], ensure_ascii=False)}}
                for n, call in enumerate(reply.tool_calls)
            ]  # fmt: skip
        if reply.error:
            screen.write(printable(f" [{reply.error}]"))
        if done.stop == "length":
            screen.write(" [cut: token limit]")
        self.messages += [message, said]
        return said


class Stream:
    """Writes tokens as they come, holding back bytes that do not yet make a character."""

    def __init__(self, tokenizer: Tokenizer, screen: TextIO) -> None:
        self.tokenizer, self.screen = tokenizer, screen
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.last: list[int] = []

    def token(self, _row: int, token: int) -> None:
        """Show one more token of the answer. Raises Repeats when the last ones are one short piece over and over."""
        self.screen.write(printable(self.decoder.decode(self.tokenizer.token_bytes[token])))
        self.screen.flush()
        self.last = [*self.last[1 - REPEATED :], token]
        if len(self.last) == REPEATED and any(self.last[p:] == self.last[:-p] for p in range(1, PERIOD + 1)):
            raise Repeats

    def close(self) -> None:
        """Show what is left: a character that was cut."""
        self.screen.write(printable(self.decoder.decode(b"", final=True)))


def printable(text: str) -> str:
    """The text without control characters: what a model writes must not steer the terminal."""
    return "".join(c for c in text if c in "\n\t" or c.isprintable())


def load_tools(path: Path | None) -> list[dict[str, Any]]:
    """The tools of a JSON file. Raises InputError when it is not a list of function tools."""
    if path is None:
        return []
    try:
        tools = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: expected a JSON list of tools: {error}") from error
    if not isinstance(tools, list) or not all(isinstance(t, dict) and t.get("type") == "function" for t in tools):
        raise InputError(f'{path}: expected [{{"type": "function", "function": {{...}}}}, ...]')
    return tools


def read(keyboard: TextIO) -> str:
    """A turn: a line, and those that follow a backslash at its end."""
    line = keyboard.readline()
    while line.endswith("\\\n"):
        line = f"{line[:-2]}\n{keyboard.readline()}"
    return line


def talk(conversation: Conversation, sampling: Sampling, seed: int, keyboard: TextIO, screen: TextIO) -> None:
    """The loop of turns, until the input ends."""
    turn = 0
    while True:
        screen.write("\n> ")
        screen.flush()
        try:
            line = read(keyboard)
        except KeyboardInterrupt:
            line = ""
        found = COMMAND.match(line)
        command = found[0] if found else ""
        if not line.strip() or command in ENDS:
            screen.write("\n")
            return
        if command == "/new":
            conversation.start_over()
            continue
        if command and (command != "/tool" or not line[6:].strip()):
            screen.write(HELP)
            continue
        message: dict[str, Any] = {"role": "user", "content": line.rstrip("\n")}
        if command == "/tool":
            message = {"role": "tool", "tool_call_id": "call_0", "name": "tool", "content": line[6:].rstrip("\n")}
        try:
            conversation.answer(message, sampling, device.stable_hash(seed, turn) % 2**32, screen)
        except KeyboardInterrupt:
            screen.write(" [stopped]")
        except Repeats:
            screen.write(" [stopped: it repeats itself; the question is forgotten]")
        except InputError as error:
            screen.write(f"{error}\n")
        turn += 1  # also after an answer that was stopped: asked again, it is drawn anew


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m pipeline.serve.chat", description="Talk to a model in the terminal."
    )
    parser.add_argument("model", type=Path, help="a model directory, such as models/deploy")
    parser.add_argument("--system", default="", help="system message")
    parser.add_argument("--tools", type=Path, help="JSON file with tools the model may call")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: greedy")
    parser.add_argument("--top-p", type=float, default=0.95)
    parser.add_argument("--max-new-tokens", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    try:
        sampling = Sampling(options.max_new_tokens, temperature=options.temperature, top_p=options.top_p)
    except ValueError as error:
        parser.error(str(error))
    try:
        model, tokenizer = checkpoint.load(options.model)
        tools = load_tools(options.tools)
    except StagecoachError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    model.train(False)
    sys.stdout.write(
        f"{options.model}: {model.num_parameters() / 1e6:.1f} M parameters. /new starts over, /quit or an empty line ends, /help.\n"
    )
    talk(Conversation(model, tokenizer, tools, options.system), sampling, options.seed, sys.stdin, sys.stdout)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
