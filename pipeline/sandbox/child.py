"""The fork server's child: isolates itself, loads one source, calls it, and reports the values.

`run` starts right after the fork, in a process with no job in its memory, and never returns. It reads two numbers from
its channel, isolates itself, writes R, and only then reads its job; after reading the arguments of the tests it writes
A. From then on everything in this process belongs to the candidate, and what it sends is a claim that the judge checks.
Standard library and neighboring modules only: `jail.py` loads this file by its path.

Not guaranteed: that the candidate leaves this process intact. It may replace any function defined here; it can then
only forge its own answers, and still has no access to expected values.
"""

import ast
import json
import os
import random
import struct
import sys
import threading
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, NoReturn

import kernel
import messages
from messages import ChildJob, read_exactly, read_frame, write_all

LAYERS = {"sealed": ("landlock", "seccomp"), "unsafe": ()}  # unsafe: resource limits only, if the user allows it
CHANNEL = 3  # socket descriptor: the job and "go" come in, frames go out
ALLOWANCE = struct.Struct("<Qd")  # the first message to a child: bytes of memory, seconds of CPU
ISOLATED, READ = b"R", b"A"  # what a child writes before its first frame
NOT_ISOLATED = 70  # exit code of a child that could not isolate itself


@dataclass(frozen=True)
class Cell:
    """The isolation of every child of a server."""

    layers: tuple[str, ...]
    memory: int  # bytes of address space when a child starts
    parent: int  # pid of the process that a child must not outlive
    alone: bool  # its user runs only this server's processes


def enter(cell: Cell, memory: int, cpu_seconds: float) -> None:
    """Isolate this process. `memory` and `cpu_seconds` are the candidate's own allowance.

    Raises OSError or Refused if a layer cannot be installed; in that case no untrusted code may run.
    """
    kernel.isolate(cell.memory + memory, cpu_seconds, cell.parent, alone=cell.alone)
    if "landlock" in cell.layers and kernel.landlock_version():
        kernel.install_landlock()
    if "seccomp" in cell.layers:
        kernel.install_seccomp()


def prepare_streams() -> list[IO[str]]:
    """Text streams on descriptors 0 to 2, created once in the server to save time; children set the descriptors.

    Until then the descriptors are pipes, so that the streams are created as non-seekable.
    """
    source, sink = os.pipe()
    for fd, pipe_end in ((0, source), (1, sink), (2, sink)):
        os.dup2(pipe_end, fd)
    streams = [
        open(fd, mode, encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
        for fd, mode in ((0, "r"), (1, "w"), (2, "w"))
    ]
    os.close(source)
    os.close(sink)
    return streams


def run(ends: tuple[int, ...], cell: Cell) -> NoReturn:
    """Run one job in this new child and exit; `ends` become its descriptors 0 to 3."""
    try:
        for target, fd in enumerate(ends):
            os.dup2(fd, target)
        os.closerange(CHANNEL + 1, 256)
        random.seed(0)
        enter(cell, *ALLOWANCE.unpack(read_exactly(CHANNEL, ALLOWANCE.size) or b""))
        os.write(CHANNEL, ISOLATED)
    except BaseException:
        os._exit(NOT_ISOLATED)
    try:
        job: ChildJob = read_frame(CHANNEL)
        if job["entry"] is None:
            _run_program(job)
        else:
            _run_function(job)
    finally:
        os._exit(1)


def _make_framer(nonce: str) -> Callable[[str], bytes]:
    start = f'{{"n":"{nonce}",'

    def frame(rest: str) -> bytes:
        body = f"{start}{rest}}}".encode("ascii")
        return struct.pack("<I", len(body)) + body

    return frame


def _run_function(job: ChildJob) -> NoReturn:
    """Load the source as a module, then call its entry point once per test, after a "go" each time."""
    read, write, leave, encode, frame = os.read, os.write, os._exit, messages.encode, _make_framer(job["nonce"])
    entry, last, describe = job["entry"], frame('"end":true'), _describe
    arguments, failure = [], None
    try:
        arguments = [(ast.literal_eval(test["args"]), ast.literal_eval(test["kwargs"])) for test in job["tests"]]
    except BaseException as error:  # not literals, or too large for the memory
        failure = "run", describe(error)
    module = types.ModuleType("candidate")
    write(CHANNEL, READ)
    read(CHANNEL, 1)
    failure = failure or _load(job["source"], module)
    if failure is not None:
        write_all(CHANNEL, frame(f'"load":"{failure[0]}","e":{failure[1]}'), write)
        leave(0)
    for index, (positional, named) in enumerate(arguments):
        if index:
            read(CHANNEL, 1)
        try:
            if entry not in module.__dict__:
                raise NameError(f"the source defines no {entry}")
            answer = f'"i":{index},"v":{encode(module.__dict__[entry](*positional, **named))}'
        except BaseException as error:
            answer = f'"i":{index},"e":{describe(error)}'
        write_all(CHANNEL, frame(answer) + (last if index == len(arguments) - 1 else b""), write)
    leave(0)


def _run_program(job: ChildJob) -> NoReturn:
    """Run the source as a program; its answer is its stdout."""
    write, leave, frame, out = os.write, os._exit, _make_framer(job["nonce"]), sys.stdout
    last = frame('"end":true')
    write(CHANNEL, READ)
    os.read(CHANNEL, 1)
    failure = _load(job["source"], types.ModuleType("__main__"))
    if failure is not None and failure[0] == "compile":
        write_all(CHANNEL, frame(f'"load":"compile","e":{failure[1]}'), write)
        leave(0)
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and not thread.daemon:
            thread.join()
    for stream in {id(s): s for s in (sys.stdout, out)}.values():
        try:
            stream.flush()
        except (ValueError, OSError, AttributeError):  # the candidate closed or replaced it; earlier output counts
            continue
    answer = '"i":0,"v":null' if failure is None else f'"i":0,"e":{failure[1]}'
    write_all(CHANNEL, frame(answer) + last, write)
    leave(0)


def _load(source: str, module: types.ModuleType) -> tuple[str, str] | None:
    """Compile and run the source in the module. Returns None, or the failed step and the exception as JSON."""
    sys.modules[module.__name__] = module
    stage, describe = "compile", _describe
    try:
        code = compile(source, "<candidate>", "exec", dont_inherit=True)
        stage = "run"
        exec(code, module.__dict__)
    except BaseException as error:
        if isinstance(error, SystemExit) and error.code in (None, 0) and module.__name__ == "__main__":
            return None
        return stage, describe(error)
    return None


def _describe(error: BaseException) -> str:
    """The exception's type and the start of its message, as JSON. First drops its frames, which keep memory in use."""
    error.__traceback__ = error.__context__ = None
    name, message = type(error).__name__, ""
    try:
        text = str(error)
        message = text[:200] if type(text) is str else ""
    except BaseException:  # a hostile __str__
        message = ""
    return json.dumps([name if type(name) is str else "?", message])
