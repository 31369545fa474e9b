"""The server's worker process: compiles schemas and renders Markdown, each job in a child process with hard limits.

    python -m pipeline.serve.worker DESCRIPTOR MODEL ...        started by workshop.py

DESCRIPTOR is a socket. Each byte on it is the number of a model, and comes with the socket of a job. The process forks
for each: the child reads the job (JSON up to the end of the stream), runs it and writes its answer (JSON). A child has
SECONDS of processor time, WALL_SECONDS by the clock, and BYTES of memory more than it began with. The kernel ends a
child that takes more, and `workshop.py` reads the end of the stream. So nothing outlives its job, and this process,
which only forks, stays small.

    {"kind": "tools" | "schema", ...}   -> {"text": grammar, "free": bool, "plan": ids} | {"refused": [code, message]}
    {"kind": "render", "markdown": ...} -> {"html": ...} | {"refused": ...}             any: {"failed": traceback}

A schema is also refused where it would cost the server too much later. The server compiles the grammar again, in the
time that it took here, and queries it for each token (`rehearse`). The plan is searched here alone.

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
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import psutil
from llguidance import LLMatcher

from pipeline.generation import grammars
from pipeline.generation.grammars import Closer, Compiler, Place, bits
from pipeline.generation.schemas import SchemaError
from pipeline.run.errors import InputError
from pipeline.run.processes import die_with_parent
from pipeline.run.types import JsonObject
from pipeline.serve import markdown
from pipeline.text.tokenizer import Tokenizer

SECONDS = {"tools": 2.0, "schema": 2.0, "render": 3.0}  # of processor time
WALL_SECONDS = 15.0
BYTES = 256 * 2**20
NICENESS = 10  # the engines go first
BUILD_SECONDS = 0.25  # of processor time that compiling may take in the server
HELD_BYTES = 32 * 2**20  # of memory that a compiled grammar may take there
TOKENS, TOKEN_SECONDS = 32, 0.01  # tokens of a rehearsal, and the mean time that each may take


def main() -> None:
    """Fork for each job until the server closes the socket."""
    control, folders = socket.socket(fileno=int(sys.argv[1])), [Path(name) for name in sys.argv[2:]]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server ends this process
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the children
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
            _serve_job(socket.socket(fileno=descriptors[0]), partial(compilers.__getitem__, model), os.getppid())
        os.close(descriptors[0])


def _serve_job(connection: socket.socket, compiler: Callable[[], Compiler], parent: int) -> None:
    """Read a job, run it, write its answer, and exit the child process."""
    code = 1
    try:
        _set_limits(parent)
        with connection.makefile("rb") as stream:
            job = json.load(stream)
        signal.setitimer(signal.ITIMER_PROF, SECONDS[job["kind"]])
        answer = json.dumps(run_job(job, compiler)).encode()
        signal.setitimer(signal.ITIMER_PROF, 0)
        connection.sendall(answer)
        code = 0
    finally:
        os._exit(code)


def _set_limits(parent: int) -> None:
    """Make the kernel end this process where it takes too much."""
    die_with_parent(parent)
    os.nice(NICENESS)
    most = psutil.Process().memory_info().vms + BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for number in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, WALL_SECONDS)


def run_job(job: JsonObject, compiler: Callable[[], Compiler]) -> JsonObject:
    """The answer to a job; `compiler()` is its model's. Raises MemoryError."""
    try:
        if job["kind"] == "render":
            return {"html": markdown.render(job["markdown"])}
        if job["kind"] == "tools":
            tokenizer = compiler().tokenizer
            written = grammars.tool_calls(tokenizer, job["tools"], choice=job["choice"], parallel=job["parallel"])
        else:
            written = grammars.json_schema(job["schema"])
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
    """The shortest output of a grammar. Raises SchemaError where the grammar would cost the server too much."""
    memory, began = psutil.Process().memory_info().rss, time.process_time()
    matcher = compiler.matcher(text)
    seconds = time.process_time() - began
    plan = compiler.shortest(matcher)
    token_seconds = rehearse(compiler.closer, matcher, plan)
    if seconds > BUILD_SECONDS or token_seconds > TOKEN_SECONDS:
        raise SchemaError("schema_too_slow", "the schema takes too long to compile or to follow; make it simpler")
    if psutil.Process().memory_info().rss - memory > HELD_BYTES:
        raise SchemaError("schema_too_large", "the schema takes too much memory to compile; make it simpler")
    return plan


def rehearse(closer: Closer, matcher: LLMatcher, plan: tuple[int, ...]) -> float:
    """Generate an answer of random allowed tokens; returns the mean processor time of a token, in seconds."""
    state, place, rest, rng = matcher.deep_copy(), Place(), list(plan), np.random.default_rng(0)
    began = time.process_time()
    for num_generated in range(TOKENS):
        allowed = bits(state.compute_bitmask()).copy()
        allowed[closer.ends] = False
        choices = np.flatnonzero(allowed)
        if not len(choices) or state.is_error():
            break
        token = int(rng.choice(choices))
        next_rest = closer.follow(state, place, rest, token, TOKENS * 8 - num_generated)
        if next_rest is None:
            if not rest:
                break
            token, next_rest = rest[0], rest[1:]
        state.consume_token(token)
        rest, place = next_rest, place.after(closer.step(token))
    return (time.process_time() - began) / TOKENS


if __name__ == "__main__":
    main()
