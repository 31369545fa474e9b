"""What the server has done by another process: schemas compiled, Markdown rendered. The process is `worker.py`; this is
its counter.

    with Workshop(models) as workshop:
        await workshop.grammar("nano", job, asker) -> Verdict;  await workshop.html(text, asker)

A job gets a child process of its own that the kernel ends when it takes too long or too much, so no job holds up the
server's threads, and none can be left running. Few run at a time and few wait (`places.py`). What became of a schema is
kept for a while, refusals too: a hostile one costs its seconds once.

A worker that is gone is started again with the next job, at most once a RESTART_SECONDS.
"""

import asyncio
import hashlib
import json
import logging
import socket
import tempfile
import time
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from pipeline.generation.grammars import Written
from pipeline.run.processes import beside
from pipeline.serve.limits import Places
from pipeline.serve.protocol import ApiFault

LOG = logging.getLogger(__name__)
PATIENCE = 20.0  # seconds; a job's own limits end it before
RESTART_SECONDS = 1.0
MOST_KEPT, KEPT_BYTES, KEPT_SECONDS = 512, 8 * 2**20, 600.0


@dataclass(frozen=True)
class Verdict:
    """A schema that can be compiled here, and the shortest output of its grammar."""

    written: Written
    plan: tuple[int, ...]


class Refused(Exception):
    """A job that was not done, with a code for programs."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Workshop:
    """See the module. Entered and used on the event loop's thread, whose end ends the worker too."""

    def __init__(self, models: Sequence[Path]) -> None:
        self.models = list(models)
        self.compiling = Places("schemas", running=2, waiting=16)
        self.rendering = Places("texts to render", running=2, waiting=16)
        self._numbers = {folder.resolve().name: number for number, folder in enumerate(self.models)}
        self._kept: OrderedDict[bytes, tuple[float, int, Verdict | Refused]] = OrderedDict()
        self._open = ExitStack()
        self._control: socket.socket | None = None
        self._started = 0.0

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    async def grammar(self, model: str, job: dict[str, Any], asker: str) -> Verdict:
        """A grammar to be compiled, of a job as `worker.py` has it. Raises Refused, and ApiFault where there is no
        room.
        """
        number = self._numbers[model]
        key = hashlib.sha256(json.dumps([number, job], sort_keys=True).encode()).digest()
        found = self._known(key)
        if found is None:
            async with self.compiling.place(asker):
                found = self._known(key)  # it may have been another's job meanwhile
                if found is None:
                    found = await self._judged(number, job)
                    self._keep(key, found)
        if isinstance(found, Refused):
            raise found
        return found

    async def html(self, markdown: str, asker: str) -> str:
        """Clean HTML. Raises as `grammar`."""
        async with self.rendering.place(asker):
            answer = await self._ask(0, {"kind": "render", "markdown": markdown})
        if "html" not in answer:
            raise Refused(
                *answer.get("refused", ("markdown_too_slow", "the text takes too long to render; shorten it"))
            )
        return answer["html"]

    async def _judged(self, number: int, job: dict[str, Any]) -> Verdict | Refused:
        answer = await self._ask(number, job)
        if "refused" in answer:
            return Refused(*answer["refused"])
        if "text" not in answer:
            return Refused("schema_too_slow", "the schema takes too much time or memory to compile; make it simpler")
        return Verdict(Written(answer["text"], answer["free"]), tuple(answer["plan"]))

    # -- what is kept --------------------------------------------------------------------------------------------------

    def _known(self, key: bytes) -> Verdict | Refused | None:
        since, _, found = self._kept.get(key, (0.0, 0, None))
        if found is None or time.monotonic() - since > KEPT_SECONDS:
            return None
        self._kept.move_to_end(key)
        return found

    def _keep(self, key: bytes, found: Verdict | Refused) -> None:
        size = len(found.written.text) + 8 * len(found.plan) if isinstance(found, Verdict) else len(str(found))
        self._kept[key] = (time.monotonic(), size, found)
        self._kept.move_to_end(key)
        while len(self._kept) > MOST_KEPT or sum(one[1] for one in self._kept.values()) > KEPT_BYTES:
            self._kept.popitem(last=False)

    # -- the worker ----------------------------------------------------------------------------------------------------

    async def _ask(self, number: int, job: dict[str, Any]) -> dict[str, Any]:
        """A job's answer; empty where it was ended. Raises ApiFault 503 while there is no worker, 500 for a failure
        of ours.
        """
        ours = self._hand_over(number)
        reader, writer = await asyncio.open_connection(sock=ours)
        try:
            async with asyncio.timeout(PATIENCE):
                writer.write(json.dumps(job).encode())
                writer.write_eof()
                heard = await reader.read(-1)
        except (TimeoutError, ConnectionError):
            heard = b""
        finally:
            writer.close()
        answer = json.loads(heard) if heard else {}
        if "failed" in answer:
            LOG.error("a job of the kind %s failed\n%s", job["kind"], answer["failed"])
            raise ApiFault(500, "the server failed", code="internal_error")
        return answer

    def _hand_over(self, number: int) -> socket.socket:
        """Our end of a new job's sockets. Raises ApiFault."""
        ours, theirs = socket.socketpair()
        with theirs:
            for _ in range(2):
                try:
                    assert self._control is not None
                    socket.send_fds(self._control, [bytes([number])], [theirs.fileno()])
                    return ours
                except (BrokenPipeError, ConnectionResetError):
                    if time.monotonic() - self._started < RESTART_SECONDS:
                        break
                    LOG.error(
                        "the worker is gone and is started again; it left: %.2000s",
                        self._log.read_text("utf-8", "replace"),
                    )
                    self._start()
                except BlockingIOError:
                    break
        ours.close()
        raise ApiFault(503, "the process for this work is being started; try again", code="worker_starting", retry=2)

    def _start(self) -> None:
        """Start the worker, with an end of a pair of sockets."""
        self._open.close()
        self._control, theirs = socket.socketpair()
        self._open.callback(self._control.close)
        self._control.setblocking(False)
        self._log = Path(self._open.enter_context(tempfile.TemporaryDirectory(prefix="stagecoach-worker-"))) / "log"
        with theirs:
            arguments = [str(theirs.fileno()), *map(str, self.models)]
            self._open.enter_context(beside("pipeline.serve.worker", arguments, self._log, [theirs.fileno()]))
        self._started = time.monotonic()
