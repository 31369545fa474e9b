"""Attacks a server with one key, or none: the client of `abuse.py` and, run as a program, its attacker.

    python benchmarks/attacker.py URL KIND ...      attacks until its input ends, then prints counts as JSON

Counts are keyed by "kind status". The attacker imports little and runs at nice 19, since it stands in for other
machines. ATTACK sets the number of concurrent requests per kind; each is repeated PAUSE seconds after its answer.
"""

import asyncio
import json
import os
import random
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import time

from benchmarks.odd_requests import Odd

OTHER = "a-key-of-one-who-does-not"
ATTACK = {
    "schemas": 6,
    "multiples": 6,
    "texts": 12,
    "echoes": 24,
    "keyless": 4,
    "fits": 4,
}  # number of concurrent requests of each kind
PAUSE = 0.05  # seconds between an answer and the attacker's next request of the same kind
ASK = [{"role": "user", "content": "Which way would the ferry go?"}]


@dataclass(frozen=True)
class Heard:
    """An answer; status 0 if the connection broke or the client left."""

    status: int
    seconds: float
    head: str = ""
    body: bytes = b""


async def send(url: str, odd: Odd, key: str, seconds: float = 60.0) -> Heard:
    """Send one request on its own connection."""
    host, _, port = url.removeprefix("http://").partition(":")
    headers = {"host": f"{host}:{port}", "content-length": str(len(odd.body)), "connection": "close"}
    headers |= ({"authorization": f"Bearer {key}"} if key else {}) | odd.headers
    head = f"{odd.method} {odd.path} HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    began, heard = time.monotonic(), b""
    try:
        async with asyncio.timeout(seconds):
            reader, writer = await asyncio.open_connection(host, int(port))
            try:
                writer.write(head.encode() + b"\r\n" + odd.body)
                while (odd.cut is None or len(heard) < odd.cut) and (more := await reader.read(65536)):
                    heard += more
            finally:
                writer.close()
    except (OSError, asyncio.IncompleteReadError):
        pass
    except TimeoutError:
        return Heard(0, seconds)
    first, _, body = heard.partition(b"\r\n\r\n")
    words = first.split(None, 2)
    return Heard(
        int(words[1]) if len(words) > 1 else 0, time.monotonic() - began, first.decode("latin-1").lower(), body
    )


def post(path: str, body: Any) -> Odd:
    """POST JSON to a path."""
    return Odd("post", "POST", path, json.dumps(body).encode(), {"content-type": "application/json"})


def attacks(draw: random.Random) -> dict[str, tuple[Odd, str]]:
    """A request of each kind in ATTACK, with its key."""

    def shaped(rules: Any) -> Odd:
        form = {"type": "json_schema", "json_schema": {"schema": rules}}
        return post(
            "/v1/chat/completions", {"model": "nano", "messages": ASK, "max_tokens": 40, "response_format": form}
        )

    primes = draw.sample([9973, 9967, 9949, 9941, 9931, 9929, 9923, 9907, 9901, 9887], 2)
    together = {"allOf": [{"type": "integer", "multipleOf": one} for one in primes]}
    prompt = [[draw.randrange(20, 300)] * 1900 for _ in range(8)]
    low = draw.randrange(10**6)
    return {
        "schemas": (shaped(together), OTHER),
        "multiples": (shaped({"type": "integer", "multipleOf": draw.randrange(10**6, 10**7)}), OTHER),
        "texts": (post("/render", {"markdown": "[" * draw.randrange(40_000, 49_000)}), OTHER),
        "echoes": (
            post("/v1/completions", {"model": "nano", "prompt": prompt, "max_tokens": 0, "echo": True, "logprobs": 5}),
            OTHER,
        ),
        "keyless": (
            Odd(
                "keyless",
                "POST",
                "/v1/completions",
                b'{"model": "nano", "prompt": [' + b"[]," * 340_000 + b"[]]}",
                {"content-type": "application/json"},
            ),
            "",
        ),
        "fits": (
            shaped(
                {
                    "type": "object",
                    "properties": {"a": {"type": "integer", "minimum": low, "maximum": low + 50}},
                    "required": ["a"],
                }
            ),
            OTHER,
        ),
    }


def main() -> None:
    """Attack until standard input ends."""
    os.nice(19)
    url, kinds = sys.argv[1], sys.argv[2:]
    draw, found = random.Random(1), Counter[str]()

    async def again(kind: str, ended: asyncio.Event) -> None:
        while not ended.is_set():
            odd, key = attacks(draw)[kind]
            heard = await send(url, odd, key, 30.0)
            found[f"{kind} {heard.status}"] += 1
            await asyncio.sleep(PAUSE)

    async def run() -> None:
        ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(sys.stdin, ended.set)
        await asyncio.gather(*(again(kind, ended) for kind in kinds for _ in range(ATTACK[kind])))

    sys.stdout.write("begun\n")
    sys.stdout.flush()
    asyncio.run(run())
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
