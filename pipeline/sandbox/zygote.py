"""The process that every candidate is a copy of. It never sees a job.

    trainer -- jobs, answers -->  watcher  -- one byte, four descriptors -->  zygote
                                     |                                          | clone
                                     +--------- job, "go", answers ---------> child

Creating a `Zygote` splits a prepared server: this process goes on as the watcher, which alone reads jobs and keeps
answers; the other half becomes the zygote, and the zygote's whole life is to wait for a byte and to copy itself. A
candidate's job goes from the watcher to the copy alone, over the copy's own channel. So there is nothing of an earlier
job in the memory that a candidate inherits: no frame, no object, no freed block, no buffer, no descriptor.

A copy is a child of the watcher, not of the zygote (CLONE_PARENT). The watcher waits for it, so that no pid is used
twice while somebody means it, and not even an exit status reaches the zygote. Zygote and children die with the watcher.
Standard library and the neighbours only: `jail.py` loads this file by its path.

Not promised: any of this elsewhere than on Linux, where the only profile is `unsafe`: there the server copies itself.
"""

import os
import socket
import struct
import sys
from typing import NoReturn

import child
import kernel

CONTROL = child.CHANNEL + 1  # the zygote's descriptor towards the watcher; a child closes it


class Zygote:
    """The watcher's side. `cell` is what closes every child off."""

    def __init__(self, cell: child.Cell) -> None:
        self.cell, self.pid = cell, 0
        self.control, inside = socket.socketpair()
        if sys.platform != "linux":
            return
        self.pid = os.fork()
        if self.pid == 0:
            _copy_for_ever(inside.detach(), cell)
        inside.close()

    def fork(self, ends: tuple[int, int, int, int]) -> int:
        """The pid of a new child, whose descriptors 0 to 3 are `ends`; it waits for its job. Raises OSError."""
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


def _copy_for_ever(control: int, cell: child.Cell) -> NoReturn:
    """The zygote's life: until the watcher closes its end."""
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
