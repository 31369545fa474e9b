"""The server's side of the worker process (`worker.py`), which compiles schemas and renders Markdown.

    with Workshop(models) as workshop:
        await workshop.grammar("nano", job, asker) -> GrammarVerdict;  await workshop.html(text, asker)

Each job runs in its own child process, which the kernel kills if it takes too much time or memory. So no job can block
the server's threads or run forever. Only a few jobs run or wait at a time (`guard.py`). Results for a schema are
cached for a while, including refusals, so a hostile schema costs CPU time only once. If the worker has died, the
next job restarts it, at most once every RESTART_SECONDS.
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
from typing import Self

from pipeline.generation.grammars import Written
from pipeline.run.processes import beside
from pipeline.run.types import JsonObject
from pipeline.serve.guard import Places
from pipeline.serve.protocol import ApiFault

LOG = logging.getLogger(__name__)
JOB_SECONDS = 20.0  # longer than a job's own limits
RESTART_SECONDS = 1.0
MOST_KEPT, KEPT_BYTES, KEPT_SECONDS = 512, 8 * 2**20, 600.0


@dataclass(frozen=True)
class GrammarVerdict:
    """A grammar cheap enough for the server to compile, and its shortest output."""

    written: Written
    plan: tuple[int, ...]


class JobRefused(Exception):
    """The worker refused or killed a job; `code` is machine-readable."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Workshop:
    """Sends jobs to a worker. Enter and use it on the event loop's thread; the worker exits with that thread."""

    def __init__(self, models: Sequence[Path]) -> None:
        self.models = list(models)
        self.compiling = Places("schemas", running=2, waiting=16)
        self.rendering = Places("texts to render", running=2, waiting=16)
        self._model_numbers = {folder.resolve().name: number for number, folder in enumerate(self.models)}
        self._kept: OrderedDict[bytes, tuple[float, int, GrammarVerdict | JobRefused]] = (
            OrderedDict()
        )  # time, size, result
        self._resources = ExitStack()
        self._control: socket.socket | None = None
        self._started = 0.0

    def __enter__(self) -> Self:
        self._start_worker()
        return self

    def __exit__(self, *_: object) -> None:
        self._resources.close()

    async def grammar(self, model: str, job: JsonObject, asker: str) -> GrammarVerdict:
        """The grammar for a job of kind "tools" or "schema" (`worker.py`). Raises JobRefused, and ApiFault if all
        places are taken.
        """
        number = self._model_numbers[model]
        key = hashlib.sha256(json.dumps([number, job], sort_keys=True).encode()).digest()
        result = self._cached(key)
        if result is None:
            async with self.compiling.place(asker):
                result = self._cached(key)  # another request may have run the same job in the meantime
                if result is None:
                    result = await self._compile(number, job)
                    self._cache(key, result)
        if isinstance(result, JobRefused):
            raise result
        return result

    async def html(self, markdown: str, asker: str) -> str:
        """Render Markdown as sanitized HTML. Raises the same errors as `grammar`."""
        async with self.rendering.place(asker):
            answer = await self._ask(0, {"kind": "render", "markdown": markdown})
        if "html" not in answer:
            raise JobRefused(
                *answer.get("refused", ("markdown_too_slow", "the text takes too long to render; shorten it"))
            )
        return answer["html"]

    async def _compile(self, number: int, job: JsonObject) -> GrammarVerdict | JobRefused:
        answer = await self._ask(number, job)
        if "refused" in answer:
            return JobRefused(*answer["refused"])
        if "text" not in answer:
            return JobRefused("schema_too_slow", "the schema takes too much time or memory to compile; simplify it")
        return GrammarVerdict(Written(answer["text"], answer["free"]), tuple(answer["plan"]))

    # -- cache ---------------------------------------------------------------------------------------------------------

    def _cached(self, key: bytes) -> GrammarVerdict | JobRefused | None:
        since, _, result = self._kept.get(key, (0.0, 0, None))
        if result is None or time.monotonic() - since > KEPT_SECONDS:
            return None
        self._kept.move_to_end(key)
        return result

    def _cache(self, key: bytes, result: GrammarVerdict | JobRefused) -> None:
        size = (
            len(result.written.text) + 8 * len(result.plan) if isinstance(result, GrammarVerdict) else len(str(result))
        )
        self._kept[key] = (time.monotonic(), size, result)
        self._kept.move_to_end(key)
        while len(self._kept) > MOST_KEPT or sum(size for _, size, _ in self._kept.values()) > KEPT_BYTES:
            self._kept.popitem(last=False)

    # -- worker --------------------------------------------------------------------------------------------------------

    async def _ask(self, number: int, job: JsonObject) -> JsonObject:
        """The worker's answer to a job, empty if the job was killed. Raises ApiFault: 503 if there is no worker, 500
        for an internal error.
        """
        reader, writer = await asyncio.open_connection(sock=self._open_job(number))
        try:
            async with asyncio.timeout(JOB_SECONDS):
                writer.write(json.dumps(job).encode())
                writer.write_eof()
                data = await reader.read(-1)
        except (TimeoutError, ConnectionError):
            data = b""
        finally:
            writer.close()
        answer = json.loads(data) if data else {}
        if "failed" in answer:
            LOG.error("a %s job failed\n%s", job["kind"], answer["failed"])
            raise ApiFault(500, "the server failed", code="internal_error")
        return answer

    def _open_job(self, number: int) -> socket.socket:
        """Create a socket pair for a job, send one end to the worker, and return the other. Raises ApiFault."""
        ours, theirs = socket.socketpair()
        with theirs:
            for _ in range(2):  # the second attempt goes to a restarted worker
                try:
                    assert self._control is not None
                    socket.send_fds(self._control, [bytes([number])], [theirs.fileno()])
                    return ours
                except (BrokenPipeError, ConnectionResetError):
                    if time.monotonic() - self._started < RESTART_SECONDS:
                        break
                    LOG.error(
                        "the worker died and is being restarted; its output: %.2000s",
                        self._log.read_text("utf-8", "replace"),
                    )
                    self._start_worker()
                except BlockingIOError:
                    break
        ours.close()
        raise ApiFault(503, "the worker process is starting; try again", code="worker_starting", retry=2)

    def _start_worker(self) -> None:
        self._resources.close()
        self._control, theirs = socket.socketpair()
        self._resources.callback(self._control.close)
        self._control.setblocking(False)
        folder = self._resources.enter_context(tempfile.TemporaryDirectory(prefix="stagecoach-worker-"))
        self._log = Path(folder) / "log"
        with theirs:
            arguments = [str(theirs.fileno()), *map(str, self.models)]
            self._resources.enter_context(beside("pipeline.serve.worker", arguments, self._log, [theirs.fileno()]))
        self._started = time.monotonic()
