"""Messages between the processes of the sandbox: 4 bytes of little-endian length, then JSON in ASCII.

Standard library only, and nothing of the project: `jail.py` loads this file by its path.

Not promised: a bound on a message. Only what our own processes send is read with these; what a candidate sends is read
by `watch.py`.
"""

import json
import os
import struct
from collections.abc import Callable
from typing import Any


def read_frame(fd: int) -> Any:
    """One message, or None at the end of the stream."""
    head = read_exactly(fd, 4)
    if head is None:
        return None
    body = read_exactly(fd, struct.unpack("<I", head)[0])
    return None if body is None else json.loads(body)


def read_exactly(fd: int, size: int) -> bytes | None:
    """So many bytes, or None if the stream ends before."""
    parts = bytearray()
    while len(parts) < size:
        piece = os.read(fd, min(size - len(parts), 1 << 20))
        if not piece:
            return None
        parts += piece
    return bytes(parts)


def frame(message: object) -> bytes:
    """A message as it is sent."""
    body = json.dumps(message, separators=(",", ":")).encode("ascii")
    return struct.pack("<I", len(body)) + body


def write_frame(fd: int, message: object) -> None:
    """One message, whole."""
    write_all(fd, frame(message))


def write_all(fd: int, data: bytes, write: Callable[[int, memoryview], int] = os.write) -> None:
    """Write until nothing is left."""
    view = memoryview(data)
    while view:
        view = view[write(fd, view) :]
