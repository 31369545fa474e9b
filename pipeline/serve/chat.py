"""Talk to a model in the terminal, with streaming.

    python -m pipeline.serve.chat models/deploy [--system TEXT] [--tools FILE] [--temperature 0] [--seed 0]

A line is a turn, and one that ends in a backslash goes on in the next; `/quit`, an empty line or Ctrl-D ends; `/help`
lists the other commands, and another word after a slash is refused, not said. `--tools` names a JSON file with the
tools the model may call (OpenAI form); calls are whole and fit their tools (`generation/constrain.py`); they are shown,
not run. Ctrl-C stops an answer, and forgets it with its question; so does an answer that only repeats itself. It is the
server's engine that speaks: what was read of a conversation is not read again. Not promised: that a small model knows
anything.
"""

import argparse
import codecs
import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from pipeline.export import huggingface
from pipeline.export.inference import Fused
from pipeline.generation.constrain import Grammars, reply
from pipeline.generation.sampling import Completion, Sampling
from pipeline.model import checkpoint
from pipeline.model.transformer import Transformer
from pipeline.run import device
from pipeline.run.errors import InputError, StagecoachError
from pipeline.serve.engine import Constraint, Ended, Engine, Event, GenerationRequest, Said
from pipeline.text import chat
from pipeline.text.tokenizer import Tokenizer

COMMAND = re.compile(r"/[a-z]+(?=\s|$)")  # a path such as /etc/hosts is no command
ENDS = ("/quit", "/exit", "/bye")
NEW = ("/new", "/clear")
HELP = """a line that ends in \\ goes on in the next
/new or /clear forgets the conversation
/regenerate answers the last question anew
/temperature X, /seed N: how the next answers are drawn; temperature 0 is greedy
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
        self.engine = Engine(Fused(model).trace(), rows=1, queue=0)  # stepped here, not by a thread: Ctrl-C finds it
        self.grammar = Grammars(tokenizer, model.config.vocab_size).tool_calls(tools) if tools else None
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
        limit = replace(sampling, max_new_tokens=min(sampling.max_new_tokens, room))
        stop = (self.tokenizer.turn_end, self.tokenizer.end_of_text)
        constraint = self.grammar.constraint(limit.max_new_tokens) if self.grammar is not None else None
        done = speak(self.engine, prompt, limit, stop=stop, seed=seed, constraint=constraint, on_token=stream.token)
        stream.close()
        answer = reply(self.tokenizer, done.ids)
        said: dict[str, Any] = {"role": "assistant", "content": answer.content}
        if answer.tool_calls:
            said["tool_calls"] = [
                {
                    "id": f"call_{n}",
                    "type": "function",
                    "function": {"name": call["name"], "arguments": json.dumps(call["arguments"], ensure_ascii=False)},
                }
                for n, call in enumerate(answer.tool_calls)
            ]
        if answer.error:
            screen.write(printable(f" [{answer.error}]"))
        if done.stop == "length":
            screen.write(" [cut: token limit]")
        self.messages += [message, said]
        return said

    def forget_last(self) -> dict[str, Any] | None:
        """Take the last question and its answer back; the question, or None where there is none."""
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
    constraint: Constraint | None,
    on_token: Callable[[int], None],
) -> Completion:
    """One answer, each token told as it comes. Whatever is raised meanwhile gives the answer up."""
    said: list[Said] = []
    ends: list[Ended] = []

    def hear(event: Event) -> None:
        if isinstance(event, Said):
            said.append(event)
        elif isinstance(event, Ended):
            ends.append(event)

    ticket = engine.submit(
        GenerationRequest(ids=prompt, sampling=sampling, seed=seed, listener=hear, stop=stop, constraint=constraint)
    )
    told = 0
    try:
        while not ends:
            engine.step()
            for one in said[told:]:
                told += 1
                on_token(one.token)
    finally:
        ticket.cancel()
        engine.step()
    assert ends[0].reason in ("stop", "length"), ends[0]
    return Completion(
        [one.token for one in said], [one.logprob for one in said], "stop" if ends[0].reason == "stop" else "length"
    )


class Stream:
    """Writes tokens as they come, holding back bytes that do not yet make a character."""

    def __init__(self, tokenizer: Tokenizer, screen: TextIO) -> None:
        self.tokenizer, self.screen = tokenizer, screen
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.last: list[int] = []

    def token(self, token: int) -> None:
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
        rest = line[len(command) :].strip()
        if not line.strip() or command in ENDS:
            screen.write("\n")
            return
        message: dict[str, Any] | None = {"role": "user", "content": line.rstrip("\n")}
        if command in NEW:
            conversation.start_over()
            continue
        if command in ("/temperature", "/seed"):
            sampling, seed, problem = _drawn_otherwise(sampling, seed, command, rest)
            screen.write(problem)
            continue
        if command == "/regenerate":
            message = conversation.forget_last()
        elif command == "/tool" and rest:
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
        except Repeats:
            screen.write(" [stopped: it repeats itself; the question is forgotten]")
        except InputError as error:
            screen.write(f"{error}\n")
        turn += 1  # also after an answer that was stopped: asked again, it is drawn anew


def _drawn_otherwise(sampling: Sampling, seed: int, command: str, value: str) -> tuple[Sampling, int, str]:
    """Sampling and seed after `/temperature X` or `/seed N`, and what was wrong with it."""
    try:
        if command == "/seed":
            return sampling, int(value), ""
        return replace(sampling, temperature=float(value)), seed, ""
    except ValueError:
        wanted = "a whole number" if command == "/seed" else "a number of at least 0"
        return sampling, seed, f"{command}: expected {wanted}, found {value!r}\n"


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
        huggingface.check(options.model)
        model, tokenizer = checkpoint.load(options.model)
        tools = load_tools(options.tools)
    except StagecoachError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    model.train(False)
    sys.stdout.write(
        f"{options.model}: {model.num_parameters() / 1e6:.1f} M parameters. /new starts over, /quit or an empty line"
        " ends, /help.\n"
    )
    talk(Conversation(model, tokenizer, tools, options.system), sampling, options.seed, sys.stdin, sys.stdout)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
