"""The servers that `serving.py` compares, as processes, and the client that sends them requests.

    with started(large, tiny, threads, logs) as servers, servers[NATIVE].awake():
        together(servers[NATIVE], prompts, 64)

A server is stopped (SIGSTOP) except inside its `awake` block. The client uses HTTP/1.1 over asyncio streams, one
connection per request, and records when each piece of text arrived; its own overhead is about 0.1 ms per request.
"""

import asyncio
import contextlib
import dataclasses
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks import engine as inside
from pipeline.model import checkpoint
from pipeline.model.transformer import Transformer
from pipeline.run import device
from pipeline.text.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[1]
HOST = "127.0.0.1"
START_SECONDS, ANSWER_SECONDS = 180, 300
NATIVE, NARROW, PLAIN, BATCHED, TINY = "ours float32", "ours int8", "transformers serve", "... with batching", "tiny"
ROWS, QUEUE = 8, 32


@dataclass(frozen=True)
class Heard:
    """An answer as seen by the client; times in seconds on one clock."""

    status: int  # HTTP status; 0: the connection broke
    began: float
    ended: float
    texts: tuple[float, ...] = ()  # when each piece of text arrived
    prompt: int = 0
    tokens: int = 0
    retry_after: str | None = None

    @property
    def first(self) -> float:
        """Seconds to the first piece of text."""
        return self.texts[0] - self.began

    @property
    def gaps(self) -> list[float]:
        """Seconds between consecutive pieces of text."""
        return [late - early for early, late in zip(self.texts, self.texts[1:])]

    @property
    def each(self) -> float:
        """Seconds per token after the first piece of text (TPOT)."""
        return (self.texts[-1] - self.texts[0]) / (self.tokens - 1)

    def fits(self, prompt: int, tokens: int) -> bool:
        """Whether the answer has the requested lengths and did not fail."""
        return self.status == 200 and (self.prompt, self.tokens) == (prompt, tokens) and len(self.texts) > 0


@dataclass
class Server:
    """A process that answers on `port`."""

    name: str
    process: psutil.Popen
    port: int
    model: str  # the model's name on the server
    more: dict[str, Any] = field(default_factory=dict)  # extra fields of requests to this server
    batch: int = ROWS  # requests that can share a step

    def body(self, prompt: str, tokens: int) -> dict[str, Any]:
        """The body of a request."""
        return {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 1.0,
            "stream": True,
        } | self.more

    def family(self) -> list[psutil.Process]:
        """The server's processes."""
        return [self.process, *self.process.children(recursive=True)]

    def gauge(self, name: str) -> float:
        """One of our metrics from /metrics, summed over all models."""
        text = httpx.get(f"http://{HOST}:{self.port}/metrics").text
        return sum(float(n) for n in re.findall(rf"^stagecoach:{name}\{{[^}}]*\}} (\S+)", text, re.MULTILINE))

    def memory(self) -> float:
        """Resident MiB."""
        return sum(one.memory_info().rss for one in self.family()) / 2**20

    def processor(self) -> float:
        """CPU seconds used so far."""
        return sum(sum(one.cpu_times()[:2]) for one in self.family())

    @contextmanager
    def awake(self) -> Iterator["Server"]:
        """Let the server run within the block, and stop it afterward."""
        for one in self.family():
            one.resume()
        try:
            yield self
        finally:
            for one in self.family():
                one.suspend()

    def end(self) -> None:
        """End the server, whatever its state."""
        family = self.family() if self.process.is_running() else []
        for one in family:
            one.resume()
        self.process.terminate()
        _, left = psutil.wait_procs(family, 15)
        for one in left:
            one.kill()


# -- the client --------------------------------------------------------------------------------------------------------


async def ask(server: Server, prompt: str, tokens: int) -> Heard:
    """Send one request on its own connection. A broken connection is an answer with status 0."""
    payload = json.dumps(server.body(prompt, tokens)).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {HOST}:{server.port}\r\nContent-Type: application/json\r\n"
    began, texts, usage = time.perf_counter(), [], {}
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            reader, writer = await asyncio.open_connection(HOST, server.port)
            try:
                writer.write(f"{head}Content-Length: {len(payload)}\r\nConnection: close\r\n\r\n".encode() + payload)
                status, headers = await _head(reader)
                if status != 200:
                    return Heard(status, began, time.perf_counter(), retry_after=headers.get("retry-after"))
                async for line in _lines(reader):
                    now = time.perf_counter()
                    if line.startswith(b"data: {"):
                        event = json.loads(line[6:])
                        if event.get("choices") and event["choices"][0].get("text"):
                            texts.append(now)
                        usage = event.get("usage") or usage
            finally:
                writer.close()
    except (OSError, asyncio.IncompleteReadError):
        return Heard(0, began, time.perf_counter())
    return Heard(
        200, began, time.perf_counter(), tuple(texts), usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0)
    )


def knock(port: int, payload: bytes, times: int) -> list[Heard]:
    """The response heads for a request sent `times` times in sequence. Run it in a process that does nothing else."""
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {HOST}:{port}\r\nContent-Type: application/json\r\n"
    request = f"{head}Content-Length: {len(payload)}\r\nConnection: close\r\n\r\n".encode() + payload
    heard = []
    for _ in range(times):
        began, answer = time.perf_counter(), b""
        with contextlib.suppress(OSError), socket.create_connection((HOST, port), ANSWER_SECONDS) as connection:
            connection.sendall(request)
            while b"\r\n\r\n" not in answer and (more := connection.recv(65536)):
                answer += more
        ended = time.perf_counter()
        status, *lines = (answer or b"none 0").decode("latin-1").split("\r\n")  # status 0: as in `ask`
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        heard.append(Heard(int(status.split()[1]), began, ended, retry_after=headers.get("retry-after")))
    return heard


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    """Status and headers, with lowercase names."""
    status, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    pairs = (line.partition(":") for line in lines if line)
    return int(status.split()[1]), {name.lower(): value.strip() for name, _, value in pairs}


async def _lines(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """The lines of a chunked body, regardless of chunk boundaries."""
    held = b""
    while size := int(await reader.readline(), 16):
        held += (await reader.readexactly(size + 2))[:-2]
        *whole, held = held.split(b"\n")
        for line in whole:
            yield line


def together(server: Server, prompts: Sequence[str], tokens: int) -> tuple[list[Heard], float]:
    """Send all prompts at once, one per user: returns the answers and the seconds until the last one."""

    async def ask_all() -> tuple[list[Heard], float]:
        began = time.perf_counter()
        return await asyncio.gather(*(ask(server, prompt, tokens) for prompt in prompts)), time.perf_counter() - began

    return asyncio.run(ask_all())


# -- the servers -------------------------------------------------------------------------------------------------------


class Texts:
    """Prompts with an exact number of tokens, cut from a text one after another, so that no two start alike."""

    def __init__(self, tokenizer: Tokenizer, text: str) -> None:
        self.tokenizer, self.ids, self.place = tokenizer, tokenizer.encode(text), 0

    def take(self, length: int) -> str:
        """The next prompt that still has `length` tokens after decoding and encoding."""
        while True:
            if self.place + length > len(self.ids):
                self.place = 1  # cut at different places than last time
            text = self.tokenizer.decode(self.ids[self.place : self.place + length])
            self.place += length
            if len(self.tokenizer.encode(text)) == length:
                return text


def make_models(folder: Path) -> tuple[Path, Path, Texts]:
    """The directory of the model to compare, that of a tiny model, and prompts for both."""
    sources = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "pipeline").rglob("*.py"))]
    tokenizer = Tokenizer.train(iter(sources), inside.SHAPE.vocab_size)
    shape = dataclasses.replace(inside.SHAPE, width=32, layers=2, heads=2, kv_heads=1, head_dim=16, d_ff=48)
    tiny = Transformer(shape, device.generator("tiny"))
    for name, model in (("large", inside.weights(None)), ("tiny", tiny)):
        checkpoint.save(folder / name, model, tokenizer, {})
        endless = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "pad_token_id": tokenizer.pad}
        (folder / name / "generation_config.json").write_text(json.dumps(endless), encoding="utf-8")
    return folder / "large", folder / "tiny", Texts(tokenizer, "".join(sources))


def start(name: str, model: Path, threads: int, log: Path) -> Server | str:
    """The server with this name, ready and stopped; or the reason why `transformers serve` cannot run here."""
    theirs = name in (PLAIN, BATCHED)
    with socket.socket() as found:
        found.bind((HOST, 0))
        port = found.getsockname()[1]
    if theirs:
        command = [
            str(Path(sys.executable).with_name("transformers")),
            "serve",
            str(model),
            "--device",
            "cpu",
            "--dtype",
            "float32",
        ]
        if name == BATCHED:  # a pool as large as our cache; the default takes most of the machine's memory
            pool = {"block-size": 256, "num-blocks": ROWS * inside.SHAPE.max_context // 256, "max-batch-tokens": 2048}
            command += ["--continuous-batching", *(f"--cb-{key}={value}" for key, value in pool.items())]
        if not Path(command[0]).is_file():
            return "transformers is not installed"
    else:
        weights = "int8" if name == NARROW else "native"
        command = [
            sys.executable,
            "-m",
            "pipeline.serve",
            str(model),
            "--weights",
            weights,
            f"--rows={ROWS}",
            f"--queue={QUEUE}",
            "--rate=0",
        ]
    environment = os.environ | {
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    with log.open("w") as file:
        process = psutil.Popen(
            [*command, f"--host={HOST}", f"--port={port}"],
            cwd=ROOT,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment,
        )
    ours = {"ignore_eos": True, "stream_options": {"include_usage": True}}
    server = Server(
        name, process, port, str(model) if theirs else model.name, {} if theirs else ours, 1 if name == PLAIN else ROWS
    )
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(f"http://{HOST}:{port}/health").status_code == 200:
                for one in server.family():
                    one.suspend()
                return server
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    server.end()
    last = (log.read_text().strip().splitlines() or ["nothing was logged"])[-1]
    if theirs:
        return last
    raise SystemExit(f"{name} did not start: {last}")


@contextmanager
def started(large: Path, tiny: Path, threads: int, logs: Path) -> Iterator[dict[str, Server]]:
    """All servers that can run, by name; they load in parallel and stop when the block ends."""
    places = {NATIVE: large, NARROW: large, PLAIN: large, BATCHED: large, TINY: tiny}
    with ThreadPoolExecutor() as pool:
        futures = {
            name: pool.submit(start, name, model, threads, logs / f"{place}.log")
            for place, (name, model) in enumerate(places.items())
        }
    servers = [future.result() for future in futures.values() if not future.exception()]
    try:
        for name, future in futures.items():
            if isinstance(reason := future.result(), str):
                sys.stdout.write(f"{name}: not run, {reason}\n")
        yield {server.name: server for server in servers if isinstance(server, Server)}
    finally:
        for server in servers:
            if isinstance(server, Server):
                server.end()
