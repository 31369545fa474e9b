"""The server over HTTP vs. `transformers serve`: same weights, prompts, lengths, threads and dtype, interleaved.

    python benchmarks/serving.py [--quick] [--rounds 5] [--threads 1] [--json FILE]

Five servers run as processes, each stopped (SIGSTOP) while another is measured: ours with float32 and with int8
weights, `transformers serve` in float32 without and with continuous batching, and ours with a tiny model. All but the
last serve the same directory: a randomly initialized Qwen3 model with 82 M parameters, and a BPE of 8,192 tokens
trained on this repository's sources. Tokens are sampled at temperature 1, so that no text repeats and our drafts never
match. No answer ends early: our servers use `ignore_eos`, and transformers has no end token in its
generation_config.json. Token counts come from `usage`; an answer with a different length is a failure.

Each round sends every server the same new prompts, with 1, 4 and 8 concurrent users, each with one streamed request.
Before the rounds, each server answers 3 requests that do not count. Reported with medians and quartiles:

    tok/s   tokens of a round over its wall time, including prefill        TTFT  time to first text, over all requests
    TPOT    (last text - first text) / (tokens - 1) per request    ITL   time between texts: median, 99th percentile
    MBU     steps per second (tok/s over the rows of a step) x bytes of weights, keys and values read per step /
            measured bandwidth
    CPU     CPU seconds used by the server per token               RSS   memory of its processes after the last round

Other programs on the machine slow all servers, but not evenly; in that case the rounds differ, and CPU is more reliable
than tok/s. The median of the rounds' ratios decides whether a goal is met; anything not measured is marked "not run".
`--quick` skips the prompts of 1,024 tokens and starts no turn that, judging by its last duration, would run past five
minutes; rounds are counted separately for each kind of turn.
"""

import argparse
import asyncio
import dataclasses
import json
import math
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks import engine as inside
from benchmarks.servers import (
    BATCHED,
    NARROW,
    NATIVE,
    PLAIN,
    QUEUE,
    ROWS,
    TINY,
    Heard,
    Server,
    Texts,
    ask,
    knock,
    make_models,
    started,
    together,
)
from pipeline.generation.sampling import Sampling
from pipeline.run import device
from pipeline.serve.engine import Ended, Engine, Event, SampledToken
from pipeline.serve.engine import GenerationRequest as Request

QUICK_SECONDS = 285
USERS = (8, 1, 4)  # the number that a goal refers to comes first
SHORT, LONG = (128, 64), (1024, 128)  # tokens per prompt and per answer
REFUSALS, REQUESTS = 100, 1000


# -- the rounds --------------------------------------------------------------------------------------------------------


@dataclass
class Cell:
    """Results of one server for one number of users and one prompt length, round by round."""

    server: str
    users: int
    prompt: int
    tokens: int
    rates: list[float] = field(default_factory=list)  # tokens per second, one per round
    costs: list[float] = field(default_factory=list)  # CPU seconds per token, one per round
    heard: list[Heard] = field(default_factory=list)  # the answers that fit
    failures: int = 0

    def add(self, heard: Sequence[Heard], seconds: float, processor: float) -> None:
        """Add a round: its answers, its time, and its CPU time."""
        fit = [one for one in heard if one.fits(self.prompt, self.tokens)]
        said = sum(one.tokens for one in fit)
        self.rates.append(said / seconds)
        self.costs.append(processor / said if said else math.inf)
        self.heard += fit
        self.failures += len(heard) - len(fit)

    def row(self, step_bytes: int, rows: int, speed: float, memory: float) -> dict[str, Any]:
        """The cell's numbers: [first quartile, median, third quartile], times in milliseconds, memory in MiB."""
        gaps = [gap for one in self.heard for gap in one.gaps]
        return {
            "server": self.server,
            "users": self.users,
            "prompt": self.prompt,
            "tokens": self.tokens,
            "rounds": len(self.rates),
            "failures": self.failures,
            "tokens_per_second": quartiles(self.rates),
            "ttft": quartiles([1000 * one.first for one in self.heard]),
            "tpot": quartiles([1000 * one.each for one in self.heard]),
            "cpu": quartiles([1000 * cost for cost in self.costs]),
            "itl": [1000 * percentile(gaps, 50), 1000 * percentile(gaps, 99)],
            "mbu": mbu(statistics.median(self.rates), min(self.users, rows), step_bytes, speed),
            "rss": memory,
        }


def percentile(values: Sequence[float], share: float) -> float:
    """The value that `share` percent of the values do not exceed, interpolated linearly; NaN if there are none."""
    if not values:
        return math.nan
    place = (len(values) - 1) * share / 100
    low, ordered = int(place), sorted(values)
    return ordered[low] + (place - low) * (ordered[min(low + 1, len(values) - 1)] - ordered[low])


def quartiles(values: Sequence[float]) -> list[float]:
    """First quartile, median, third quartile."""
    return [percentile(values, share) for share in (25, 50, 75)]


def mbu(rate: float, rows: int, step_bytes: int, speed: float) -> float:
    """Share of the bandwidth (bytes/s) needed for `rate` tokens/s if a step generates `rows` tokens and reads
    `step_bytes`.
    """
    return rate / rows * step_bytes / speed


def ratios(own: Sequence[float], other: Sequence[float]) -> list[float]:
    """Ratios round by round, without the rounds in which the other side has no value."""
    return [mine / theirs for mine, theirs in zip(own, other, strict=True) if theirs > 0]


def measure(
    servers: dict[str, Server], texts: Texts, lengths: Sequence[tuple[int, int]], rounds: int, until: float
) -> list[Cell]:
    """Run the rounds; starts no turn that, judging by its last duration, would end after `until`."""
    cells: dict[tuple[str, int, int], Cell] = {}
    took: dict[tuple[int, int], float] = {}
    for server in servers.values():
        with server.awake():
            together(server, [texts.take(16) for _ in range(3)], 8)
    for _ in range(rounds):
        for prompt, tokens in lengths:
            for users in USERS:
                # before its first run: the time for 8 users, scaled
                guess = took.get((prompt, users), took.get((prompt, USERS[0]), 0.0) * users / USERS[0])
                if (began := time.monotonic()) + guess > until:
                    continue
                prompts = [texts.take(prompt) for _ in range(users)]
                for name, server in servers.items():
                    with server.awake():
                        before = server.processor()
                        heard, seconds = together(server, prompts, tokens)
                        used = server.processor() - before
                    cell = cells.setdefault((name, prompt, users), Cell(name, users, prompt, tokens))
                    cell.add(heard, seconds, used)
                took[prompt, users] = time.monotonic() - began
    return list(cells.values())


# -- the goals ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Goal:
    """A number and the bounds it has to meet."""

    what: str
    found: float | None  # None: not run
    note: str
    at_least: float | None = None
    at_most: float | None = None

    @property
    def verdict(self) -> str:
        """One of `met`, `missed` and `not run`."""
        if self.found is None:
            return "not run"
        low = self.at_least is None or self.found >= self.at_least
        return "met" if low and (self.at_most is None or self.found <= self.at_most) else "missed"

    def line(self) -> str:
        """The goal as a line for the screen."""
        bound = f"<= {self.at_most:g}" if self.at_least is None else f">= {self.at_least:g}"
        found = "" if self.found is None else f"{self.found:.2f}"
        return f"  {self.verdict:8} {self.what:70} {bound:7} {found:>8}  {self.note}".rstrip()


def against(cells: Sequence[Cell], other: str, at_least: float) -> Goal:
    """Our server with float32 weights compared with another one, for 8 users and short prompts."""
    found = {cell.server: cell for cell in cells if (cell.users, cell.prompt) == (8, SHORT[0])}
    own, theirs = found.get(NATIVE), found.get(other)
    times = ratios(own.rates, theirs.rates) if own and theirs else []
    what = f"8 users, float32: tokens/s vs. {PLAIN}{' with batching' if other == BATCHED else ''}"
    if not (own and theirs and times):
        return Goal(what, None, "no round was completed", at_least=at_least)
    (low, middle, high), cheaper = quartiles(times), percentile(ratios(theirs.costs, own.costs), 50)
    return Goal(
        what,
        middle,
        f"({low:.2f}-{high:.2f}), rounds: {len(times)}; tokens per CPU second: {cheaper:.2f} times",
        at_least=at_least,
    )


def many_requests(tiny: Server, texts: Texts) -> Goal:
    """Requests from 8 users, each of whom sends the next one as soon as the last one is answered."""
    prompts = [texts.take(16) for _ in range(REQUESTS)]

    async def user(number: int) -> int:
        return sum([not (await ask(tiny, prompt, 8)).fits(16, 8) for prompt in prompts[number::8]])

    async def users() -> int:
        return sum(await asyncio.gather(*(user(number) for number in range(8))))

    began = time.perf_counter()
    with tiny.awake():
        failures = asyncio.run(users())
    return Goal(
        f"{REQUESTS} requests from 8 users: failures",
        failures,
        f"{time.perf_counter() - began:.0f} s, tiny model",
        at_most=0,
    )


def full_queue(server: Server, texts: Texts) -> list[Goal]:
    """Measure refusals while all rows are busy and the queue is full, and the time from connecting to the response
    head.

    The refused client is a separate process: in the process that reads the streams, reading would add to the times.
    """
    prompts = [texts.take(16) for _ in range(ROWS + QUEUE)]
    payload = json.dumps(server.body(prompts[0], 1)).encode()

    async def refused(apart: ProcessPoolExecutor) -> list[Heard]:
        streams = [asyncio.create_task(ask(server, prompt, 1500)) for prompt in prompts]
        for name, full in (("num_requests_running", ROWS), ("num_requests_waiting", QUEUE)):  # the queue may fill first
            while await asyncio.to_thread(server.gauge, name) < full:
                pass
        heard = await asyncio.get_running_loop().run_in_executor(apart, knock, server.port, payload, REFUSALS)
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
        while await asyncio.to_thread(server.gauge, "num_requests_(?:running|waiting)"):  # wait until all are canceled
            pass
        return heard

    with server.awake(), ProcessPoolExecutor(1, get_context("spawn")) as apart:
        apart.submit(knock, server.port, payload, 0).result()  # wait until the process has started
        heard = asyncio.run(refused(apart))
    times = [1000 * (one.ended - one.began) for one in heard]
    wrong = sum(one.status != 429 or one.retry_after is None for one in heard)
    return [
        Goal(f"{REFUSALS} requests to a full queue: not 429 with Retry-After", wrong, "", at_most=0),
        Goal(
            "time to refusal, ms, 99th percentile",
            percentile(times, 99),
            f"median {percentile(times, 50):.1f}",
            at_most=10,
        ),
    ]


def known_prompt(server: Server, texts: Texts, rounds: int) -> Goal:
    """The time to the first text of a cached long prompt, as a percentage of the uncached time."""
    cold, known = [], []
    with server.awake():
        for prompt in [texts.take(LONG[0]) for _ in range(rounds)]:
            for times in (cold, known):
                (heard,), _ = together(server, [prompt], 8)
                assert heard.fits(LONG[0], 8), heard
                times.append(heard.first)
    share = [100 * again / first for again, first in zip(known, cold)]
    note = f"{1000 * statistics.median(known):.0f} of {1000 * statistics.median(cold):.0f} ms, {rounds} prompts"
    return Goal("TTFT of a cached 1,024-token prompt, % of uncached TTFT", statistics.median(share), note, at_most=5)


def cost_of_http(server: Server, engine: Engine, texts: Texts, rounds: int) -> Goal:
    """The loss in tokens per second for one user relative to the engine, in percent; the engine runs in this process,
    on the same prompts.
    """
    lost, more, told = [], [], []
    with engine:
        for turn in range(-1, rounds):  # the first turn is a warm-up
            prompt = texts.take(SHORT[0])
            with server.awake():
                before = server.processor()
                (heard,), _ = together(server, [prompt], SHORT[1])
                used = server.processor() - before
            assert heard.fits(*SHORT), heard
            before = time.process_time()
            own = answered(engine, texts.tokenizer.encode(prompt), SHORT[1])
            alone = time.process_time() - before
            if turn >= 0:
                lost.append(100 * (1 - own / (heard.ended - heard.began)))
                more.append(100 * (used / alone - 1))
                told.append(SHORT[1] / own)
    low, middle, high = quartiles(lost)
    note = f"({low:.1f}-{high:.1f}), {rounds} pairs, of {statistics.median(told):.1f}; CPU {percentile(more, 50):+.1f}%"
    return Goal("loss through HTTP with 1 user, % of the engine's tokens/s", middle, note, at_most=5)


def answered(engine: Engine, ids: Sequence[int], tokens: int) -> float:
    """Seconds until the engine has generated everything."""
    said: list[Event] = []
    done = threading.Event()

    def hear(event: Event) -> None:
        said.append(event)
        if isinstance(event, Ended):
            done.set()

    began = time.perf_counter()
    engine.submit(Request(ids=ids, sampling=Sampling(tokens, temperature=1.0), seed=0, listener=hear, owner=""))
    done.wait()
    seconds = time.perf_counter() - began
    assert sum(isinstance(event, SampledToken) for event in said) == tokens
    return seconds


HEAD = (
    "users",
    "tokens",
    "server",
    "tokens/s",
    "TTFT ms",
    "TPOT ms",
    "CPU ms",
    "ITL ms 50, 99%",
    "MBU",
    "RSS MiB",
    "failed",
    "rounds",
)
WIDTHS = (7, 10, 20, 20, 24, 22, 20, 17, 6, 9, 8, 6)


def line(row: dict[str, Any]) -> tuple[str, ...]:
    """A row of the table, as text."""

    def told(name: str, digits: int = 0) -> str:
        low, middle, high = row[name]
        return f"{middle:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"

    return (
        f"{row['users']}",
        f"{row['prompt']}/{row['tokens']}",
        row["server"],
        told("tokens_per_second", 1),
        told("ttft"),
        told("tpot", 1),
        told("cpu", 1),
        ", ".join(f"{value:.0f}" for value in row["itl"]),
        f"{row['mbu']:.0%}",
        f"{row['rss']:.0f}",
        f"{row['failures']}",
        f"{row['rounds']}",
    )


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as a table for the screen."""
    lines = [HEAD, *map(line, rows)]
    return "".join(
        "  " + "".join(f"{text:{width}}" for text, width in zip(one, WIDTHS, strict=True)).rstrip() + "\n"
        for one in lines
    )


def numbers(
    cells: Sequence[Cell], servers: dict[str, Server], engines: dict[str, Engine], speed: float
) -> list[dict[str, Any]]:
    """The rows, fewest users first; bytes read per step are those of our engine with the same weights."""
    rows = []
    for cell in sorted(cells, key=lambda cell: (cell.prompt, cell.users)):
        server = servers[cell.server]
        together = min(cell.users, server.batch)
        step = inside.bytes_a_step(engines.get(cell.server, engines[NATIVE]), together, cell.prompt + cell.tokens // 2)
        rows.append(cell.row(step, together, speed, server.memory()))
    return rows


def main() -> None:
    """Print the table and the goals."""
    began = time.monotonic()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="finish within five minutes")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="threads per server")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    device.keep_freed_memory()
    lengths, until = ([SHORT], began + QUICK_SECONDS) if arguments.quick else ([SHORT, LONG], math.inf)
    speed, pairs = inside.bandwidth(), 3 if arguments.quick else arguments.rounds

    def step(what: str) -> None:
        sys.stderr.write(f"{time.monotonic() - began:5.0f} s  {what}\n")

    with tempfile.TemporaryDirectory() as held:
        step("making the models")
        large, tiny, texts = make_models(Path(held))
        engines = {NATIVE: inside.served("float32", large), NARROW: inside.served("int8", large)}
        step("starting the servers")
        with started(large, tiny, arguments.threads, Path(held)) as servers:
            step(f"{REQUESTS} requests")
            goals = [many_requests(servers[TINY], texts)]
            step("a full queue")
            goals += full_queue(servers[NARROW], texts)
            step("a cached prompt")
            goals += [known_prompt(servers[NARROW], texts, pairs)]
            step("the cost of HTTP")
            goals += [cost_of_http(servers[NARROW], engines[NARROW], texts, 2 * pairs)]
            step("rounds")
            compared = {name: server for name, server in servers.items() if name != TINY}
            cells = measure(compared, texts, lengths, arguments.rounds, until)
            rows = numbers(cells, servers, engines, speed)
    goals = [
        against(cells, PLAIN, 2),
        against(cells, BATCHED, 1),
        Goal("1 row, int8: tokens/s vs. transformers.generate", None, "benchmarks/engine.py measures it", at_least=2),
        *goals,
    ]
    million = engines[NATIVE].model.num_parameters() / 1e6
    sys.stdout.write(
        f"{million:.1f} M parameters, {arguments.threads} threads, {device.cpu_name()}, {speed / 1e9:.1f} GB/s\n\n"
    )
    sys.stdout.write(
        f"{table(rows)}\n{''.join(goal.line() + chr(10) for goal in goals)}\n{time.monotonic() - began:.0f} s\n"
    )
    if arguments.json:
        told = {
            "cpu": device.cpu_name(),
            "threads": arguments.threads,
            "bandwidth": speed,
            "seconds": time.monotonic() - began,
            "rows": rows,
            "goals": [dataclasses.asdict(goal) | {"verdict": goal.verdict} for goal in goals],
        }
        arguments.json.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
