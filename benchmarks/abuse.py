"""Stress test of the server: thousands of odd requests, and an attack with one key while other users get answers.

    python benchmarks/abuse.py [--requests 10000] [--answers 1000] [--users 8] [--only odd attack masked] [--kinds ...]
        [--seed 0] [--json FILE]

odd     `--requests` requests of the kinds in `odd_requests.py`, four at a time. Passes if none gets a 5xx (except 503
        with Retry-After) or takes more than HANG_SECONDS, every error is an OpenAI error object, and memory grows by at
        most MOST_GROWTH after the first tenth.
attack  `--answers` chats by `--users` users, each with a key; half run undisturbed, half while one client with its own
        key sends hostile and valid schemas, Markdown and prompts to score, and others send large bodies without a key.
        Passes if no chat fails, and the 95th percentile of the response times at most doubles.
masked  the same attack, while the users chat with a masked-diffusion model.

A server with untrained two-layer models runs as a process on 127.0.0.1; the attacker is a separate process
(`attacker.py`). The quiet half and the attacked half alternate in ROUNDS, so that a slowdown of the machine affects
both. Each attack is bounded: ATTACK sets the number of concurrent requests of each kind, and each is sent again once it
is answered.

Not measured: models of realistic size, networks.
"""

import argparse
import asyncio
import json
import random
import subprocess
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

from benchmarks.attacker import ASK, ATTACK, OTHER, Heard, post, send
from benchmarks.odd_requests import Maker, Odd
from pipeline import wings
from pipeline.text.tokenizer import Tokenizer
from tests.server import Running, random_model, save_models, serving

USERS = 8
KEYS = [f"a-key-of-user-number-{number}" for number in range(USERS)]
WARM_SECONDS = 1.0  # how long an attack runs before answers count
HANG_SECONDS, MOST_GROWTH, MOST_TIMES = 5.0, 50.0, 2.0
ROUNDS = 5  # each with a quiet and an attacked part
AT_ONCE = 4  # concurrent odd requests
MASKED = "diffusion" in wings.names()  # whether a masked-diffusion model is served too
MODELS = ("nano", "masked") if MASKED else ("nano",)
PARTS = ("odd", "attack", "masked") if MASKED else ("odd", "attack")
TOKENS = 16  # per chat
SENTENCES = (
    "The pilot asked the girl which way the ferry would go.\n",
    "def add(left, right):\n    return left + right\n",
)


# -- the server --------------------------------------------------------------------------------------------------------


@contextmanager
def server(folder: Path) -> Iterator[Running]:
    """A server with untrained models, keys for all users and the attacker, the default rate limit and enough rows."""
    tokenizer = Tokenizer.train(iter(SENTENCES), 320)
    models = save_models(folder, tokenizer)
    if MASKED:
        from pipeline.diffusion import files

        files.save(folder / "masked", files.from_causal(random_model(tokenizer), tokenizer), tokenizer, {})
        models.append(folder / "masked")
    (folder / "keys").write_text("\n".join([*KEYS, OTHER]))
    options = (
        "--api-key-file",
        str(folder / "keys"),
        "--feedback",
        str(folder / "preferences.jsonl"),
        "--rows",
        str(2 * USERS),
    )
    with serving(models, *options, log=folder / "log") as running:
        yield running


def memory(running: Running) -> float:
    """Resident MiB of the server's processes, except short-lived job processes."""
    process = psutil.Process(running.process.pid)
    family = [process, *process.children(), *(inner for child in process.children() for inner in child.children())]
    return sum(one.memory_info().rss for one in family if one.is_running()) / 2**20


# -- odd requests ------------------------------------------------------------------------------------------------------


@dataclass
class Borne:
    """Results of the odd requests."""

    statuses: Counter[str] = field(default_factory=Counter)  # "kind status"
    wrong: list[str] = field(default_factory=list)
    slowest: float = 0.0
    growth: float = 0.0  # MiB, after the first tenth

    @property
    def fine(self) -> bool:
        """Whether every check passed."""
        return not self.wrong and self.growth <= MOST_GROWTH


def wrong(odd: Odd, heard: Heard) -> str:
    """What is wrong with an answer, or an empty string."""
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
    """Send `count` requests, AT_ONCE at a time."""
    maker, found, began = Maker(random.Random(seed)), Borne(), 0.0

    async def some(share: int, key: str) -> None:
        for _ in range(share):
            odd = maker.make()
            heard = await send(running.url, odd, key)
            found.statuses[f"{odd.kind} {heard.status}"] += 1
            found.slowest = max(found.slowest, heard.seconds)
            if problem := wrong(odd, heard):
                found.wrong.append(
                    f"{problem}: {odd.kind} {odd.method} {odd.path} {odd.headers} {odd.body[:600]!r} ->"
                    f" {heard.body[:200]!r}"
                )

    async def all_of(number: int) -> None:
        await asyncio.gather(*(some(number // AT_ONCE, key) for key in KEYS[:AT_ONCE]))

    asyncio.run(all_of(count // 10))
    began = memory(running)
    asyncio.run(all_of(count - count // 10))
    found.growth = memory(running) - began
    alive = asyncio.run(send(running.url, Odd("health", "GET", "/health"), ""))
    if alive.status != 200 or "Traceback" in running.log.read_text():
        found.wrong.append(f"/health returned {alive.status}, or the log {running.log} has a traceback")
    return found


# -- an attack during answers ------------------------------------------------------------------------------------------


@contextmanager
def attacked(url: str, kinds: Sequence[str], counts: Counter[str]) -> Iterator[None]:
    """Run an attack while the block runs."""
    command = [sys.executable, str(Path(__file__).with_name("attacker.py")), url, *kinds]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        time.sleep(WARM_SECONDS)
        try:
            yield
        finally:
            process.stdin.close()
            counts.update(json.loads(process.stdout.read() or "{}"))


def chats(running: Running, model: str, count: int, users: int) -> list[Heard]:
    """Get `count` answers for `users` concurrent users."""
    left = iter(range(count))

    async def user(key: str) -> list[Heard]:
        body = {"model": model, "messages": ASK, "max_tokens": TOKENS} | (
            {"ignore_eos": True} if model == "nano" else {}
        )
        return [await send(running.url, post("/v1/chat/completions", body | {"seed": number}), key) for number in left]

    async def run() -> list[Heard]:
        lists = await asyncio.gather(*(user(KEYS[number % USERS]) for number in range(users)))
        return [heard for found in lists for heard in found]

    return asyncio.run(run())


def percentile(values: Sequence[float], share: float) -> float:
    """The value that a fraction `share` of the values does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


@dataclass(frozen=True)
class Beside:
    """Answers without and during an attack."""

    model: str
    quiet: list[Heard]
    attacked: list[Heard]
    sent: dict[str, int]  # the attacker's requests, by "kind status"
    growth: float

    @property
    def failures(self) -> list[str]:
        """The failed answers to regular users."""
        return [f"{one.status} {one.body[:200]!r}" for one in (*self.quiet, *self.attacked) if one.status != 200]

    @property
    def times(self) -> float:
        """The 95th percentile of response times under attack, divided by that of the quiet parts."""
        return self.tail(self.attacked) / self.tail(self.quiet)

    @staticmethod
    def tail(heard: Sequence[Heard]) -> float:
        """Seconds that 95% of the answers do not exceed."""
        return percentile([one.seconds for one in heard], 0.95)

    @property
    def fine(self) -> bool:
        """Whether no answer failed, and neither waiting times nor memory grew too much."""
        return not self.failures and self.times <= MOST_TIMES and self.growth <= MOST_GROWTH


def beside(
    running: Running, model: str, count: int, users: int, rounds: int = ROUNDS, kinds: Sequence[str] = tuple(ATTACK)
) -> Beside:
    """Alternate quiet and attacked parts; `count` is the total number of answers."""
    part = max(users, count // (2 * rounds))
    chats(running, model, 2 * users, users)
    quiet, disturbed, sent = list[Heard](), list[Heard](), Counter[str]()
    with attacked(running.url, kinds, sent):
        chats(running, model, users, users)
    before = memory(running)
    for _ in range(rounds):
        quiet += chats(running, model, part, users)
        with attacked(running.url, kinds, sent):
            disturbed += chats(running, model, part, users)
    return Beside(model, quiet, disturbed, dict(sent), memory(running) - before)


def main() -> int:
    """The command line; returns 1 if a check failed."""
    parser = argparse.ArgumentParser(description="Stress test of the server.")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--answers", type=int, default=1_000)
    parser.add_argument("--users", type=int, default=USERS)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--kinds", nargs="+", choices=ATTACK, default=list(ATTACK), help="kinds of attack requests")
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
                f"odd: {options.requests} requests, {len(borne.wrong)} wrong, slowest {borne.slowest:.2f} s, memory"
                f" {borne.growth:+.1f} MiB"
            )
            told("\n".join(borne.wrong[:20]))
        for model in [name for name, part in (("nano", "attack"), ("masked", "masked")) if part in options.only]:
            found = beside(running, model, options.answers, options.users, kinds=options.kinds)
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
                f"{model}: {len(found.quiet)} + {len(found.attacked)} answers for {options.users} users,"
                f" {len(found.failures)} failures, p95 {1000 * tails['quiet']:.0f} ms, under attack"
                f" {1000 * tails['attacked']:.0f} ms ({found.times:.2f} times); memory {found.growth:+.1f} MiB"
            )
            told(f"  sent by the attacker: {dict(sorted(found.sent.items()))}")
            told("\n".join(found.failures[:5]))
    if options.json:
        options.json.write_text(json.dumps(numbers, indent=2) + "\n", encoding="utf-8")
    return 0 if fine else 1


def told(text: str) -> None:
    """Print the text unless it is empty."""
    if text:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main())
