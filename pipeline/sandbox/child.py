"""The child of the fork server: closes itself off, loads one source, calls it, and reports the values.

`run` is entered right after the fork, in a process that knows no job, and never returns. On its channel it reads two
numbers, closes itself off, says R, and only then reads its job; once it has read the arguments of the tests it says A.
From there on everything in this process belongs to the candidate, and what it sends is a claim that the judge checks.
Standard library and the neighbours only: `jail.py` loads this file by its path.

Not promised: that the candidate leaves this process as it was. It may replace every function named here; it then
answers for itself, and still knows no expected value.
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
from typing import Any, NoReturn

import kernel
import values
from frames import read_exactly, read_frame, write_all

LAYERS = {"sealed": ("landlock", "seccomp"), "unsafe": ()}  # unsafe: resource limits only, where a person allowed it
CHANNEL = 3  # the descriptor of the answers, a socket: the job and "go" come in, frames go out
ALLOWANCE = struct.Struct("<Qd")  # what comes first: bytes of memory, seconds of CPU
CLOSED_OFF, READ = b"R", b"A"  # what a child says before its first frame
LOST = 70  # exit code of a child that could not close itself off


@dataclass(frozen=True)
class Cell:
    """What closes every child of a server off."""

    layers: tuple[str, ...]
    memory: int  # bytes of address space that a child begins with
    parent: int  # the process that it must not outlive
    alone: bool  # its user has no other processes than this server's


def enter(cell: Cell, memory: int, cpu_seconds: float) -> None:
    """Close this process off. `memory` and `cpu_seconds` are the candidate's own.

    Raises OSError or Refused if a layer cannot be had; then nothing foreign may run.
    """
    kernel.isolate(cell.memory + memory, cpu_seconds, cell.parent, alone=cell.alone)
    if "landlock" in cell.layers and kernel.landlock_version():
        kernel.install_landlock()
    if "seccomp" in cell.layers:
        kernel.install_seccomp()


def prepare_streams() -> list[Any]:
    """Text streams on descriptors 0 to 2, made in the server because that is dear: children fill the descriptors in.

    Pipes stand there meanwhile, so that the streams learn that they cannot seek.
    """
    source, sink = os.pipe()
    for fd, end in ((0, source), (1, sink), (2, sink)):
        os.dup2(end, fd)
    streams = [
        open(fd, mode, encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
        for fd, mode in ((0, "r"), (1, "w"), (2, "w"))
    ]
    os.close(source)
    os.close(sink)
    return streams


def run(ends: tuple[int, ...], cell: Cell) -> NoReturn:
    """The whole life of a child; `ends` become its descriptors 0 to 3."""
    try:
        for place, fd in enumerate(ends):
            os.dup2(fd, place)
        os.closerange(CHANNEL + 1, 256)
        random.seed(0)
        enter(cell, *ALLOWANCE.unpack(read_exactly(CHANNEL, ALLOWANCE.size) or b""))
        os.write(CHANNEL, CLOSED_OFF)
    except BaseException:
        os._exit(LOST)
    try:
        job = read_frame(CHANNEL)
        if job["entry"] is None:
            _program(job)
        else:
            _function(job)
    finally:
        os._exit(1)


def _framer(nonce: str) -> Callable[[str], bytes]:
    start = f'{{"n":"{nonce}",'

    def frame(rest: str) -> bytes:
        body = f"{start}{rest}}}".encode("ascii")
        return struct.pack("<I", len(body)) + body

    return frame


def _function(job: dict[str, Any]) -> NoReturn:
    """Load the source as a module, then call its entry point once per test, each time after a "go"."""
    read, write, leave, encode, frame = os.read, os.write, os._exit, values.encode, _framer(job["nonce"])
    entry, last, describe = job["entry"], frame('"end":true'), _describe
    arguments, failure = [], None
    try:
        arguments = [(ast.literal_eval(test["args"]), ast.literal_eval(test["kwargs"])) for test in job["tests"]]
    except BaseException as error:  # they are no literals, or too large for the memory
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


def _program(job: dict[str, Any]) -> NoReturn:
    """Run the source as a program; its answer is what it wrote on stdout."""
    write, leave, frame, out = os.write, os._exit, _framer(job["nonce"]), sys.stdout
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
        except (ValueError, OSError, AttributeError):  # it closed or replaced the stream: what it wrote so far counts
            continue
    answer = '"i":0,"v":null' if failure is None else f'"i":0,"e":{failure[1]}'
    write_all(CHANNEL, frame(answer) + last, write)
    leave(0)


def _load(source: str, module: types.ModuleType) -> tuple[str, str] | None:
    """Compile and run the source in the module. None, or the stage that failed and the JSON of what was raised."""
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
    """The exception's type and the beginning of its message, as JSON. Its frames are let go first: they hold memory."""
    error.__traceback__ = error.__context__ = None
    name, message = type(error).__name__, ""
    try:
        text = str(error)
        message = text[:200] if type(text) is str else ""
    except BaseException:  # a hostile __str__
        message = ""
    return json.dumps([name if type(name) is str else "?", message])
