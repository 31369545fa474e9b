"""The process that every candidate is a copy of. It never sees a job.

    trainer -- jobs, answers -->  watcher  -- one byte, four descriptors -->  zygote
                                     |                                          | clone
                                     +--------- job, "go", answers ---------> child

Creating a `Zygote` splits a prepared server in two. This process continues as the watcher, the only one that reads jobs
and keeps answers. The other half becomes the zygote, which only waits for a byte and copies itself. A candidate's job
goes from the watcher straight to the copy, over the copy's own channel. So the memory that a candidate inherits
contains nothing of an earlier job: no frame, no object, no freed block, no buffer, no descriptor.

A copy is a child of the watcher, not of the zygote (CLONE_PARENT). The watcher waits for it, so no pid is reused while
it still refers to a child, and not even an exit status reaches the zygote. Zygote and children die with the watcher.
Standard library and neighboring modules only: `jail.py` loads this file by its path.

Not promised: any of this outside of Linux, where the only profile is `unsafe`: there the server forks itself.
"""

import os
import socket
import struct
import sys
from typing import NoReturn

import child
import kernel

CONTROL = child.CHANNEL + 1  # the zygote's descriptor of its socket to the watcher; a child closes it


class Zygote:
    """The watcher's handle on the zygote. `cell` is the isolation of every child."""

    def __init__(self, cell: child.Cell) -> None:
        self.cell, self.pid = cell, 0
        self.control, inside = socket.socketpair()
        if sys.platform != "linux":
            return
        self.pid = os.fork()
        if self.pid == 0:
            _serve_forks(inside.detach(), cell)
        inside.close()

    def fork(self, ends: tuple[int, int, int, int]) -> int:
        """Start a child with descriptors 0 to 3 from `ends`; it waits for its job. Returns its pid. Raises OSError."""
        if self.pid == 0:
            return os.fork() or child.run(ends, self.cell)
        socket.send_fds(self.control, [b"f"], ends)
        answer = self.control.recv(4)
        if len(answer) < 4:
            raise OSError("the zygote is gone")
        return struct.unpack("<i", answer)[0]

    def stop(self) -> None:
        """End the zygote and wait for it."""
        self.control.close()
        if self.pid:
            os.waitpid(self.pid, 0)


def _serve_forks(control: int, cell: child.Cell) -> NoReturn:
    """Copy this process for each message, until the watcher closes its end."""
    try:
        kernel.die_with(cell.parent)
        os.dup2(control, CONTROL)
        os.closerange(CONTROL + 1, 256)
        watcher = socket.socket(fileno=CONTROL)
        while (ends := tuple(socket.recv_fds(watcher, 1, 4)[1])) != ():
            pid = kernel.fork_sibling()
            if pid == 0:
                child.run(ends, cell)
            for fd in ends:
                os.close(fd)
            watcher.send(struct.pack("<i", pid))
    finally:
        os._exit(0)
