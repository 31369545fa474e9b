"""Messages between the processes of the sandbox: 4 bytes of little-endian length, then JSON in ASCII.

Standard library only, nothing of the project: `jail.py` loads this file by its path.

Not promised: a bound on the size of a message. These functions read only what our own processes send; `watch.py` reads
what a candidate sends.
"""

import json
import os
import struct
from collections.abc import Callable
from typing import Any, TypedDict


class JobLimits(TypedDict):
    """Limits of one child: seconds of a test and of the whole job, bytes of memory and of what it sends."""

    cpu: float
    wall: float
    job_cpu: float
    job_wall: float
    memory: int
    stdout: int
    stderr: int
    results: int


class Job(TypedDict):
    """What a server runs in one child; tests are `{"args", "kwargs"}` for a function, `{"stdin"}` for a program."""

    id: str
    nonce: str
    source: str
    entry: str | None
    tests: list[dict[str, str]]
    limits: JobLimits


class Answer(TypedDict):
    """What a child did. `status` and `signal` only if it ended by itself, `cut` if the server ended it."""

    id: str
    frames: list[str]
    status: int | None
    signal: int | None
    cpu_ms: int
    wall_ms: int
    max_rss_kb: int
    stdout: str
    stderr: str
    cut: str | None


class Fault(TypedDict):
    """The answer where the sandbox failed; it is no evidence about the candidate."""

    id: str
    fault: str


def read_frame(fd: int) -> Any:
    """Read one message; None at the end of the stream."""
    head = read_exactly(fd, 4)
    if head is None:
        return None
    body = read_exactly(fd, struct.unpack("<I", head)[0])
    return None if body is None else json.loads(body)


def read_exactly(fd: int, size: int) -> bytes | None:
    """Read exactly `size` bytes; None if the stream ends before."""
    parts = bytearray()
    while len(parts) < size:
        chunk = os.read(fd, min(size - len(parts), 1 << 20))
        if not chunk:
            return None
        parts += chunk
    return bytes(parts)


def frame(message: object) -> bytes:
    """Encode a message."""
    body = json.dumps(message, separators=(",", ":")).encode("ascii")
    return struct.pack("<I", len(body)) + body


def write_frame(fd: int, message: object) -> None:
    """Send one whole message."""
    write_all(fd, frame(message))


def write_all(fd: int, data: bytes, write: Callable[[int, memoryview], int] = os.write) -> None:
    """Write all of `data`."""
    view = memoryview(data)
    while view:
        view = view[write(fd, view) :]
