"""Places for work: how many run, how many wait, at most half of the queue for one client, and the last free place for
another.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from pipeline.serve.guard import Places, ThreadPlaces
from pipeline.serve.protocol import ApiFault


class Jobs:
    """Jobs that hold a place until they are told to end, and the order in which they began."""

    def __init__(self, places: Places) -> None:
        self.places, self.began, self.full = places, list[str](), list[str]()
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.ends: dict[str, asyncio.Event] = {}

    async def add(self, *names: str) -> None:
        """The first letter of a name identifies the client."""
        for name in names:
            self.ends[name] = asyncio.Event()
            self.tasks[name] = asyncio.create_task(self._run(name))
            await asyncio.sleep(0)
        await asyncio.sleep(0.001)

    async def _run(self, name: str) -> None:
        try:
            async with self.places.place(name[0]):
                self.began.append(name)
                await self.ends[name].wait()
        except ApiFault as fault:
            self.full.append(name if (fault.status, fault.code, fault.retry) == (429, "queue_full", 1) else str(fault))

    async def end(self, *names: str) -> None:
        for name in names:
            self.ends[name].set()
        await asyncio.sleep(0.001)


def with_jobs(running: int, waiting: int, play: Callable[[Jobs], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        await play(Jobs(Places("jobs", running=running, waiting=waiting)))

    asyncio.run(run())


def test_one_who_asks_for_much_leaves_a_place_and_half_of_the_queue() -> None:
    async def play(jobs: Jobs) -> None:
        await jobs.add("a1", "a2", "a3", "a4", "a5", "a6")
        assert jobs.began == ["a1"] and jobs.full == ["a6"], "half of ten places"
        await jobs.add("b1", "b2")
        assert jobs.began == ["a1", "b1"]
        await jobs.end("a1")
        assert jobs.began == ["a1", "b1", "a2"]
        await jobs.end("b1")
        assert jobs.began[-1] == "b2"

    with_jobs(2, 8, play)


def test_a_full_queue_refuses_and_a_free_place_goes_to_who_has_the_fewest() -> None:
    async def play(jobs: Jobs) -> None:
        await jobs.add("a1", "a2", "b1", "c1", "c2", "d1")
        assert jobs.began == ["a1", "a2", "b1"] and jobs.full == ["d1"], "two wait"
        await jobs.end("a1")
        assert jobs.began[-1] == "c1"

    with_jobs(3, 2, play)


def test_who_gives_up_frees_its_place_waiting_or_running() -> None:
    async def play(jobs: Jobs) -> None:
        await jobs.add("a1", "b1", "c1")
        for name in ("b1", "a1"):
            jobs.tasks[name].cancel()
            await asyncio.sleep(0.001)
        assert jobs.began == ["a1", "c1"]
        await jobs.end("c1")
        await jobs.add("d1")
        assert jobs.began[-1] == "d1"

    with_jobs(1, 4, play)


def test_who_waits_for_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.serve.guard.WAIT_SECONDS", 0.02)

    async def play(jobs: Jobs) -> None:
        await jobs.add("a1", "b1")
        await asyncio.sleep(0.05)
        assert jobs.began == ["a1"] and jobs.full == ["b1"]
        await jobs.end("a1")
        await jobs.add("c1")
        assert jobs.began == ["a1", "c1"]

    with_jobs(1, 4, play)


def test_a_pool_runs_on_threads_of_its_own_and_hands_on_what_is_raised() -> None:
    async def run() -> None:
        pool = ThreadPlaces("texts to read", running=1, waiting=2)
        assert (await pool.run("a", lambda: threading.current_thread().name)).startswith("texts")
        with pytest.raises(ZeroDivisionError):
            await pool.run("a", lambda: 1 // 0)
        assert await pool.run("a", int, "17") == 17

    asyncio.run(run())
