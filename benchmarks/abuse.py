"""What a server bears: odd requests by the thousand, and one key's attack beside another key's answers.

    python benchmarks/abuse.py [--requests 10000] [--answers 1000] [--users 8] [--only odd attack masked] [--seed 0] [--json FILE]

odd     `--requests` of the kinds of `odd_requests.py`, four at a time: none is answered by 5xx (but 503 that says when to come back)
        or takes more than HANG_SECONDS, every error is OpenAI's object, and behind the first tenth memory grows by at most MOST_GROWTH.
attack  `--answers` chats by `--users` users of one key, half of them quiet, half while another key sends hostile and good schemas,
        Markdown and prompts to score, and others bodies without a key: no chat fails, and the 95th percentile at most doubles.
masked  the same for a masked-diffusion model, beside the same attack.

A server of untrained models of two layers runs as a process on 127.0.0.1; the attacker is a process of its own, which gives way
(nice 19) since it stands for other machines. The quiet and the attacked half alternate in ROUNDS, so that a machine that slows
down slows both. Each attack is bounded: as many requests at a time as in ATTACK, each kind again when it was answered.

Not measured: models of a size that is used; networks.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import psutil

from benchmarks.odd_requests import Maker, Odd
from pipeline import denoisers
from pipeline.text.tokenizer import Tokenizer
from tests.server import Running, random_model, save_models, serving

KEY, OTHER = "a-key-of-those-who-work", "a-key-of-one-who-does-not"
HANG_SECONDS, MOST_GROWTH, MOST_TIMES = 5.0, 50.0, 2.0
ROUNDS = 5  # of a quiet and an attacked part
AT_ONCE = 4  # odd requests
TOKENS = 16  # of a chat
ATTACK = {
    "schemas": 6,
    "multiples": 6,
    "texts": 12,
    "echoes": 24,
    "keyless": 4,
    "fits": 4,
}  # kinds, and how many at a time
PAUSE = 0.05  # seconds between an answer and the attacker's next request of the kind
ASK = [{"role": "user", "content": "Which way would the ferry go?"}]
SENTENCES = (
    "The pilot asked the girl which way the ferry would go.\n",
    "def add(left, right):\n    return left + right\n",
)


# -- a client ------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Heard:
    """An answer; status 0 where the connection broke, or the client left."""

    status: int
    seconds: float
    head: str = ""
    body: bytes = b""


async def send(url: str, odd: Odd, key: str, seconds: float = 60.0) -> Heard:
    """One request on a connection of its own."""
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
    """JSON to a path."""
    return Odd("post", "POST", path, json.dumps(body).encode(), {"content-type": "application/json"})


# -- the server ----------------------------------------------------------------------------------------------------------------


@contextmanager
def server(folder: Path) -> Iterator[Running]:
    """Untrained models behind two keys, and no rate that would slow the measurement itself."""
    tokenizer = Tokenizer.train(iter(SENTENCES), 320)
    models = save_models(folder, tokenizer)
    denoisers.save(folder / "masked", denoisers.from_causal(random_model(tokenizer), tokenizer), tokenizer, {})
    (folder / "keys").write_text(f"{KEY}\n{OTHER}\n")
    options = (
        "--api-key-file",
        str(folder / "keys"),
        "--feedback",
        str(folder / "preferences.jsonl"),
        "--rate",
        "1000",
    )
    with serving([*models, folder / "masked"], *options, log=folder / "log") as running:
        yield running


def memory(running: Running) -> float:
    """Resident MiB of the server's processes but those of jobs, which end."""
    process = psutil.Process(running.process.pid)
    family = [process, *process.children(), *(inner for child in process.children() for inner in child.children())]
    return sum(one.memory_info().rss for one in family if one.is_running()) / 2**20


# -- odd requests --------------------------------------------------------------------------------------------------------------


@dataclass
class Borne:
    """What became of odd requests."""

    statuses: Counter[str] = field(default_factory=Counter)  # "kind status"
    wrong: list[str] = field(default_factory=list)
    slowest: float = 0.0
    growth: float = 0.0  # MiB, behind the first tenth

    @property
    def fine(self) -> bool:
        """Whether all of it is as it is to be."""
        return not self.wrong and self.growth <= MOST_GROWTH


def wrong(odd: Odd, heard: Heard) -> str:
    """What is wrong with an answer, or nothing."""
    if heard.seconds > HANG_SECONDS:
        return f"took {heard.seconds:.1f} s"
    if heard.status >= 500 and not (heard.status == 503 and "retry-after" in heard.head):
        return f"status {heard.status}"
    if heard.status == 0 and odd.cut is None and odd.kind != "headed":
        return "no answer"
    if b'"error"' in heard.body and odd.kind != "headed" and heard.status >= 400:
        error = json.loads(heard.body)["error"]
        if set(error) != {"message", "type", "param", "code"}:
            return f"its error has the keys {sorted(error)}"
    return ""


def odd_requests(running: Running, count: int, seed: int) -> Borne:
    """So many, AT_ONCE at a time."""
    maker, found, began = Maker(random.Random(seed)), Borne(), 0.0

    async def some(share: int) -> None:
        for _ in range(share):
            odd = maker.make()
            heard = await send(running.url, odd, KEY)
            found.statuses[f"{odd.kind} {heard.status}"] += 1
            found.slowest = max(found.slowest, heard.seconds)
            if problem := wrong(odd, heard):
                found.wrong.append(
                    f"{problem}: {odd.kind} {odd.method} {odd.path} {odd.headers} {odd.body[:600]!r} -> {heard.body[:200]!r}"
                )

    async def all_of(number: int) -> None:
        await asyncio.gather(*(some(number // AT_ONCE) for _ in range(AT_ONCE)))

    asyncio.run(all_of(count // 10))
    began = memory(running)
    asyncio.run(all_of(count - count // 10))
    found.growth = memory(running) - began
    alive = asyncio.run(send(running.url, Odd("health", "GET", "/health"), ""))
    if alive.status != 200 or "Traceback" in running.log.read_text():
        found.wrong.append(f"/health says {alive.status}, or the log {running.log} has a fault")
    return found


# -- an attack beside answers --------------------------------------------------------------------------------------------------


def attacks(draw: random.Random) -> dict[str, tuple[Odd, str]]:
    """A request of each kind of ATTACK, with its key."""

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
        "echoes": (post("/v1/completions", {"model": "nano", "prompt": prompt, "max_tokens": 0, "echo": True, "logprobs": 5}), OTHER),
        "keyless": (Odd("keyless", "POST", "/v1/completions", b'{"model": "nano", "prompt": [' + b"[]," * 340_000 + b"[]]}", {"content-type": "application/json"}), ""),
        "fits": (shaped({"type": "object", "properties": {"a": {"type": "integer", "minimum": low, "maximum": low + 50}}, "required": ["a"]}), OTHER),
    }  # fmt: skip


def attack(url: str, until: Any, told: Any) -> None:
    """Send every kind until the event is set; the counts of "kind status" go into a queue. For a process of its own."""
    os.nice(19)
    draw, found = random.Random(1), Counter[str]()

    async def again(kind: str) -> None:
        while not until.is_set():
            odd, key = attacks(draw)[kind]
            heard = await send(url, odd, key, 30.0)
            found[f"{kind} {heard.status}"] += 1
            await asyncio.sleep(PAUSE)

    async def run() -> None:
        await asyncio.gather(*(again(kind) for kind, count in ATTACK.items() for _ in range(count)))

    asyncio.run(run())
    told.put(dict(found))


@contextmanager
def attacked(url: str, counts: Counter[str]) -> Iterator[None]:
    """An attack while the block runs."""
    context = multiprocessing.get_context("spawn")
    until, told = context.Event(), context.Queue()
    process = context.Process(target=attack, args=(url, until, told), daemon=True)
    process.start()
    time.sleep(3.0)  # until it has begun
    try:
        yield
    finally:
        until.set()
        counts.update(told.get(timeout=60))
        process.join(10)


def chats(running: Running, model: str, count: int, users: int) -> list[Heard]:
    """So many answers, by so many users at a time."""
    left = iter(range(count))

    async def user() -> list[Heard]:
        body = {"model": model, "messages": ASK, "max_tokens": TOKENS} | (
            {"ignore_eos": True} if model == "nano" else {}
        )
        return [await send(running.url, post("/v1/chat/completions", body | {"seed": number}), KEY) for number in left]

    async def run() -> list[Heard]:
        return [heard for found in await asyncio.gather(*(user() for _ in range(users))) for heard in found]

    return asyncio.run(run())


def percentile(values: Sequence[float], share: float) -> float:
    """The value that a share does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


@dataclass(frozen=True)
class Beside:
    """Answers without an attack, and with one."""

    model: str
    quiet: list[Heard]
    attacked: list[Heard]
    sent: dict[str, int]  # by the attacker, "kind status"
    growth: float

    @property
    def failures(self) -> list[str]:
        """Of those who work."""
        return [f"{one.status} {one.body[:200]!r}" for one in (*self.quiet, *self.attacked) if one.status != 200]

    @property
    def times(self) -> float:
        """The 95th percentile, how many times the quiet one."""
        return self.tail(self.attacked) / self.tail(self.quiet)

    @staticmethod
    def tail(heard: Sequence[Heard]) -> float:
        """Seconds that 95% of the answers do not exceed."""
        return percentile([one.seconds for one in heard], 0.95)

    @property
    def fine(self) -> bool:
        """Whether nobody failed or waited for long."""
        return not self.failures and self.times <= MOST_TIMES and self.growth <= MOST_GROWTH


def beside(running: Running, model: str, count: int, users: int, rounds: int = ROUNDS) -> Beside:
    """Quiet and attacked parts in turns; `count` is of both together."""
    part = max(users, count // (2 * rounds))
    chats(running, model, 2 * users, users)
    quiet, disturbed, sent = list[Heard](), list[Heard](), Counter[str]()
    with attacked(running.url, sent):
        chats(running, model, users, users)
    before = memory(running)
    for _ in range(rounds):
        quiet += chats(running, model, part, users)
        with attacked(running.url, sent):
            disturbed += chats(running, model, part, users)
    return Beside(model, quiet, disturbed, dict(sent), memory(running) - before)


def main() -> int:
    """Command line; 1 where something was not borne."""
    parser = argparse.ArgumentParser(description="What a server bears.")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--answers", type=int, default=1_000)
    parser.add_argument("--users", type=int, default=8)
    parser.add_argument("--only", nargs="+", choices=("odd", "attack", "masked"), default=["odd", "attack", "masked"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    fine, numbers = True, dict[str, Any]()
    with tempfile.TemporaryDirectory() as name, server(Path(name)) as running:
        if "odd" in options.only:
            borne = odd_requests(running, options.requests, options.seed)
            fine &= borne.fine
            numbers["odd"] = {
                "requests": options.requests,
                "wrong": borne.wrong,
                "slowest": borne.slowest,
                "growth": borne.growth,
                "statuses": borne.statuses,
            }
            told(
                f"odd: {options.requests} requests, {len(borne.wrong)} wrong, slowest {borne.slowest:.2f} s, memory {borne.growth:+.1f} MiB"
            )
            told("\n".join(borne.wrong[:20]))
        for model in [name for name, part in (("nano", "attack"), ("masked", "masked")) if part in options.only]:
            found = beside(running, model, options.answers, options.users)
            fine &= found.fine
            tails = {name: found.tail(heard) for name, heard in (("quiet", found.quiet), ("attacked", found.attacked))}
            numbers[model] = {
                "p95": tails,
                "times": found.times,
                "failures": found.failures,
                "growth": found.growth,
                "sent": found.sent,
            }
            told(
                f"{model}: {len(found.quiet)} + {len(found.attacked)} answers at {options.users} users, {len(found.failures)} failures, p95 "
                f"{1000 * tails['quiet']:.0f} ms, {1000 * tails['attacked']:.0f} ms attacked: {found.times:.2f} times; memory {found.growth:+.1f} MiB"
            )
            told(f"  the attacker: {dict(sorted(found.sent.items()))}")
            told("\n".join(found.failures[:5]))
    if options.json:
        options.json.write_text(json.dumps(numbers, indent=2) + "\n", encoding="utf-8")
    return 0 if fine else 1


def told(text: str) -> None:
    """Write a line, if there is something to say."""
    if text:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main())
