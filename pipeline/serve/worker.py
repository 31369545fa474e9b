"""The process beside the server that compiles schemas and renders Markdown: each job in a child that ends, whatever it
is asked.

    python -m pipeline.serve.worker DESCRIPTOR MODEL ...        started by workshop.py, which asks and hears

Over DESCRIPTOR, a socket, come bytes that number a model, each with a socket of its job. For each the process forks:
the child reads a job (JSON up to the end of the stream), does it and writes its answer (JSON). The child has SECONDS of
processor time, WALL_SECONDS by the clock and BYTES of memory more than it began with; what takes more is ended by the
kernel, and the other side hears the end of the stream. So nothing of a job outlives it, and this process, which only
forks, stays small.

    {"kind": "tools" | "schema", ...}   -> {"text": grammar, "free": bool, "plan": ids} | {"refused": [code, message]}
    {"kind": "render", "markdown": ...} -> {"html": ...} | {"refused": ...}             any: {"failed": traceback}

A schema is refused that would cost the server too much behind this: it compiles the grammar again, within the time that
it took here, and asks it for each token (`rehearsed`). A plan is searched here alone.

Not promised: a sandbox. A job is data, and runs no code of its own.
"""

import gc
import json
import os
import resource
import signal
import socket
import sys
import time
import traceback
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from llguidance import LLMatcher

from pipeline.generation import grammars
from pipeline.generation.grammars import Closer, Compiler, Place, bits
from pipeline.generation.schemas import SchemaError
from pipeline.run.errors import InputError
from pipeline.run.processes import die_with_parent
from pipeline.serve import markdown
from pipeline.text.tokenizer import Tokenizer

SECONDS = {"tools": 2.0, "schema": 2.0, "render": 3.0}  # of processor time
WALL_SECONDS = 15.0
BYTES = 256 * 2**20
NICENESS = 10  # answers come first
BUILD_SECONDS = 0.25  # of processor time: what compiling may take on the server's side
HELD_BYTES = 32 * 2**20  # and what may be kept of it
TOKENS, TOKEN_SECONDS = 32, 0.01  # tokens of a rehearsal, and what each may take at the mean


def main() -> None:
    """Fork for each job until the server is gone."""
    control, folders = socket.socket(fileno=int(sys.argv[1])), [Path(name) for name in sys.argv[2:]]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server ends this process
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a child
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # threads do not survive a fork
    compilers: dict[int, Compiler] = {}
    markdown.render("```python\n1\n```")
    gc.freeze()
    while True:
        number, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not number:
            return
        model = number[0]
        if model < len(folders) and model not in compilers:
            compilers[model] = Compiler(Tokenizer.load(folders[model]))
        if os.fork() == 0:
            control.close()
            _child(socket.socket(fileno=descriptors[0]), partial(compilers.__getitem__, model), os.getppid())
        os.close(descriptors[0])


def _child(job: socket.socket, compiler: Any, parent: int) -> None:
    """Do one job and end."""
    code = 1
    try:
        _limit(parent)
        with job.makefile("rb") as stream:
            asked = json.load(stream)
        signal.setitimer(signal.ITIMER_PROF, SECONDS[asked["kind"]])
        answer = json.dumps(done(asked, compiler)).encode()
        signal.setitimer(signal.ITIMER_PROF, 0)
        job.sendall(answer)
        code = 0
    finally:
        os._exit(code)


def _limit(parent: int) -> None:
    """Let the kernel end this process where it takes too much."""
    die_with_parent(parent)
    os.nice(NICENESS)
    most = psutil.Process().memory_info().vms + BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for number in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, WALL_SECONDS)


def done(asked: dict[str, Any], compiler: Any) -> dict[str, Any]:
    """The answer to a job; `compiler()` is its model's. Raises MemoryError."""
    try:
        if asked["kind"] == "render":
            return {"html": markdown.render(asked["markdown"])}
        if asked["kind"] == "tools":
            tokenizer = compiler().tokenizer
            written = grammars.tool_calls(tokenizer, asked["tools"], choice=asked["choice"], parallel=asked["parallel"])
        else:
            written = grammars.json_schema(asked["schema"])
        return {"text": written.text, "free": written.free, "plan": compiled(compiler(), written.text)}
    except SchemaError as error:
        return {"refused": [error.code, str(error)]}
    except InputError as error:
        return {"refused": ["invalid_value", str(error)]}
    except MemoryError:
        raise
    except Exception:
        return {"failed": traceback.format_exc()}


def compiled(compiler: Compiler, text: str) -> tuple[int, ...]:
    """The shortest output of a grammar that the server can afford. Raises SchemaError."""
    memory, began = psutil.Process().memory_info().rss, time.process_time()
    matcher = compiler.matcher(text)
    seconds = time.process_time() - began
    plan = compiler.shortest(matcher)
    each = rehearsed(compiler.closer, matcher, plan)
    if seconds > BUILD_SECONDS or each > TOKEN_SECONDS:
        raise SchemaError("schema_too_slow", "the schema takes too long to compile or to follow; make it simpler")
    if psutil.Process().memory_info().rss - memory > HELD_BYTES:
        raise SchemaError("schema_too_large", "the schema takes too much memory to compile; make it simpler")
    return plan


def rehearsed(closer: Closer, matcher: LLMatcher, plan: tuple[int, ...]) -> float:
    """Seconds of processor time that a token takes at the mean, in an answer of any tokens that are allowed."""
    state, place, rest, draw = matcher.deep_copy(), Place(), list(plan), np.random.default_rng(0)
    began = time.process_time()
    for said in range(TOKENS):
        allowed = bits(state.compute_bitmask()).copy()
        allowed[closer.ends] = False
        choices = np.flatnonzero(allowed)
        if not len(choices) or state.is_error():
            break
        token = int(draw.choice(choices))
        after = closer.follow(state, place, rest, token, TOKENS * 8 - said)
        if after is None:
            if not rest:
                break
            token, after = rest[0], rest[1:]
        state.consume_token(token)
        rest, place = after, place.after(closer.step(token))
    return (time.process_time() - began) / TOKENS


if __name__ == "__main__":
    main()
