"""Chat with a model in the terminal, with streaming.

    python -m pipeline.serve.chat models/deploy [--system TEXT] [--tools FILE] [--temperature 0] [--seed 0]

Each line is a turn; end a line with a backslash to continue on the next. `/quit`, an empty line or Ctrl-D quits;
`/help` lists the other commands; unknown commands are rejected, not sent. `--tools` takes a JSON file with the tools
the model may call (OpenAI format). Calls are always complete and match their tools (`generation/constrain.py`); they
are shown, not run. Ctrl-C stops an answer and drops it together with its question; the same happens when an answer
keeps repeating itself. Decoding uses the server's engine, so earlier turns are not reprocessed. Not guaranteed: that a
small model knows anything.
"""

import argparse
import codecs
import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TextIO

from pipeline.export import huggingface
from pipeline.export.inference import Fused
from pipeline.generation.constrain import Grammars, reply
from pipeline.generation.sampling import Completion, Sampling
from pipeline.model import checkpoint
from pipeline.model.transformer import Transformer
from pipeline.run import device
from pipeline.run.errors import InputError, StagecoachError
from pipeline.run.types import JsonObject
from pipeline.serve.engine import Engine
from pipeline.serve.loop import Ended, Event, GenerationRequest, OutputConstraint, SampledToken
from pipeline.text import chat
from pipeline.text.tokenizer import Tokenizer

COMMAND = re.compile(r"/[a-z]+(?=\s|$)")  # a path such as /etc/hosts is not a command
ENDS = ("/quit", "/exit", "/bye")
NEW = ("/new", "/clear")
HELP = """end a line with \\ to continue on the next
/new or /clear starts a new conversation
/regenerate answers the last question again
/temperature X and /seed N set the sampling of the next answers; temperature 0 is greedy
/tool TEXT sends TEXT as the result of the model's call
/quit, an empty line or Ctrl-D quits
"""
REPEATED, PERIOD = 48, 8  # an answer is stopped when its last 48 tokens repeat a piece of at most 8 tokens


class Repetition(Exception):
    """The model keeps repeating itself."""


class Conversation:
    """The messages so far and the model that continues them."""

    def __init__(self, model: Transformer, tokenizer: Tokenizer, tools: list[JsonObject], system: str) -> None:
        self.model, self.tokenizer, self.tools, self.system = model, tokenizer, tools, system
        self.engine = Engine(Fused(model).trace(), rows=1, queue=0)  # stepped here, not in a thread, so Ctrl-C works
        self.grammar = Grammars(tokenizer, model.config.vocab_size).tool_calls(tools) if tools else None
        self.messages: list[JsonObject] = []
        self.start_over()

    def start_over(self) -> None:
        """Drop everything but the system message."""
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def answer(self, message: JsonObject, sampling: Sampling, seed: int, screen: TextIO) -> JsonObject:
        """Add a user or tool message, stream the assistant's turn to `screen`, then add and return that turn.

        Raises InputError if the conversation no longer fits the context, and Repetition; in both cases nothing is
        added.
        """
        prompt = chat.render(self.tokenizer, [*self.messages, message], self.tools, generation_prompt=True).ids
        room = self.model.config.max_context - len(prompt)
        if room < 16:
            raise InputError(
                f"the conversation has {len(prompt)} tokens, too many for a context of"
                f" {self.model.config.max_context}; start over with /new"
            )
        stream = TokenWriter(self.tokenizer, screen)
        limit = replace(sampling, max_new_tokens=min(sampling.max_new_tokens, room))
        stop = (self.tokenizer.turn_end, self.tokenizer.end_of_text)
        constraint = self.grammar.constraint(limit.max_new_tokens) if self.grammar is not None else None
        completion = speak(
            self.engine, prompt, limit, stop=stop, seed=seed, constraint=constraint, on_token=stream.token
        )
        stream.close()
        answer = reply(self.tokenizer, completion.ids)
        turn: JsonObject = {"role": "assistant", "content": answer.content}
        if answer.tool_calls:
            turn["tool_calls"] = [
                {
                    "id": f"call_{n}",
                    "type": "function",
                    "function": {"name": call["name"], "arguments": json.dumps(call["arguments"], ensure_ascii=False)},
                }
                for n, call in enumerate(answer.tool_calls)
            ]
        if answer.error:
            screen.write(printable(f" [{answer.error}]"))
        if completion.stop == "length":
            screen.write(" [cut: token limit]")
        self.messages += [message, turn]
        return turn

    def take_back(self) -> JsonObject | None:
        """Remove the last question and its answer; returns the question, or None if there is none."""
        if len(self.messages) < 2 or self.messages[-1]["role"] != "assistant":
            return None
        question = self.messages[-2]
        del self.messages[-2:]
        return question


def speak(
    engine: Engine,
    prompt: list[int],
    sampling: Sampling,
    *,
    stop: tuple[int, ...],
    seed: int,
    constraint: OutputConstraint | None,
    on_token: Callable[[int], None],
) -> Completion:
    """Generate one answer; `on_token` receives each token. Any exception, even from `on_token`, cancels the answer."""
    tokens: list[SampledToken] = []
    ends: list[Ended] = []

    def listen(event: Event) -> None:
        if isinstance(event, SampledToken):
            tokens.append(event)
        elif isinstance(event, Ended):
            ends.append(event)

    ticket = engine.submit(
        GenerationRequest(ids=prompt, sampling=sampling, seed=seed, listener=listen, stop=stop, constraint=constraint)
    )
    num_shown = 0
    try:
        while not ends:
            engine.step()
            for event in tokens[num_shown:]:
                num_shown += 1
                on_token(event.token)
    finally:
        ticket.cancel()
        engine.step()
    assert ends[0].reason in ("stop", "length"), ends[0]
    return Completion(
        [event.token for event in tokens],
        [event.logprob for event in tokens],
        "stop" if ends[0].reason == "stop" else "length",
    )


class TokenWriter:
    """Writes tokens as they arrive, buffering the bytes of incomplete characters."""

    def __init__(self, tokenizer: Tokenizer, screen: TextIO) -> None:
        self.tokenizer, self.screen = tokenizer, screen
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.last: list[int] = []

    def token(self, token: int) -> None:
        """Show one more token. Raises Repetition when the last tokens repeat a short piece."""
        self.screen.write(printable(self.decoder.decode(self.tokenizer.token_bytes[token])))
        self.screen.flush()
        self.last = [*self.last[1 - REPEATED :], token]
        if len(self.last) == REPEATED and any(self.last[n:] == self.last[:-n] for n in range(1, PERIOD + 1)):
            raise Repetition

    def close(self) -> None:
        """Show the remaining bytes: an incomplete character."""
        self.screen.write(printable(self.decoder.decode(b"", final=True)))


def printable(text: str) -> str:
    """The text without control characters: model output must not control the terminal."""
    return "".join(character for character in text if character in "\n\t" or character.isprintable())


def load_tools(path: Path | None) -> list[JsonObject]:
    """Load tools from a JSON file. Raises InputError if it is not a list of function tools."""
    if path is None:
        return []
    try:
        tools = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: expected a JSON list of tools: {error}") from error
    if not isinstance(tools, list) or not all(
        isinstance(tool, dict) and tool.get("type") == "function" for tool in tools
    ):
        raise InputError(f'{path}: expected [{{"type": "function", "function": {{...}}}}, ...]')
    return tools


def read(keyboard: TextIO) -> str:
    """Read a turn: one line, plus the next after each trailing backslash."""
    line = keyboard.readline()
    while line.endswith("\\\n"):
        line = f"{line[:-2]}\n{keyboard.readline()}"
    return line


def talk(conversation: Conversation, sampling: Sampling, seed: int, keyboard: TextIO, screen: TextIO) -> None:
    """Take turns until the input ends."""
    turn = 0
    while True:
        screen.write("\n> ")
        screen.flush()
        try:
            line = read(keyboard)
        except KeyboardInterrupt:
            line = ""
        match = COMMAND.match(line)
        command = match[0] if match else ""
        argument = line[len(command) :].strip()
        if not line.strip() or command in ENDS:
            screen.write("\n")
            return
        message: JsonObject | None = {"role": "user", "content": line.rstrip("\n")}
        if command in NEW:
            conversation.start_over()
            continue
        if command in ("/temperature", "/seed"):
            sampling, seed, problem = _change_sampling(sampling, seed, command, argument)
            screen.write(problem)
            continue
        if command == "/regenerate":
            message = conversation.take_back()
        elif command == "/tool" and argument:
            message = {"role": "tool", "tool_call_id": "call_0", "name": "tool", "content": line[6:].rstrip("\n")}
        elif command:
            message = None
        if message is None:
            screen.write(HELP)
            continue
        try:
            conversation.answer(message, sampling, device.stable_hash(seed, turn) % 2**32, screen)
        except KeyboardInterrupt:
            screen.write(" [stopped]")
        except Repetition:
            screen.write(" [stopped: repetition; the question was dropped]")
        except InputError as error:
            screen.write(f"{error}\n")
        turn += 1  # even after a stopped answer, so the same question gets a different seed


def _change_sampling(sampling: Sampling, seed: int, command: str, value: str) -> tuple[Sampling, int, str]:
    """Sampling and seed after `/temperature X` or `/seed N`, and an error message or ""."""
    try:
        if command == "/seed":
            return sampling, int(value), ""
        return replace(sampling, temperature=float(value)), seed, ""
    except ValueError:
        expected = "a whole number" if command == "/seed" else "a number of at least 0"
        return sampling, seed, f"{command}: expected {expected}, found {value!r}\n"


def main() -> int:
    """The command line; returns an exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m pipeline.serve.chat", description="Chat with a model in the terminal."
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
        huggingface.check(options.model)
        model, tokenizer = checkpoint.load(options.model)
        tools = load_tools(options.tools)
    except StagecoachError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    model = device.placed(model.train(False))
    sys.stdout.write(
        f"{options.model}: {model.num_parameters() / 1e6:.1f} M parameters. /help lists commands, /quit or an empty"
        " line quits.\n"
    )
    talk(Conversation(model, tokenizer, tools, options.system), sampling, options.seed, sys.stdin, sys.stdout)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
