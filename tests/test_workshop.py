"""Work in another process: judged as in this one, ended when it takes too much, and started again after it dies."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipeline.generation.constrain import Grammars
from pipeline.generation.grammars import Compiler
from pipeline.generation.schemas import SchemaError
from pipeline.serve import worker, workshop
from pipeline.serve.protocol import ApiFault
from pipeline.serve.workshop import GrammarVerdict, JobRefused, Workshop
from pipeline.text.tokenizer import Tokenizer
from tests.schemas import EXAMPLES, ROWS

TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": EXAMPLES["flat"].schema if "flat" in EXAMPLES else {}},
}
EATS = {"allOf": [{"type": "integer", "multipleOf": 9973}, {"type": "integer", "multipleOf": 9967}]}  # 10^8 states


@pytest.fixture
def nano(tmp_path: Path, byte_tokenizer: Tokenizer) -> Path:
    byte_tokenizer.save(tmp_path / "nano")
    return tmp_path / "nano"


def inside(nano: Path, play: Callable[[Workshop], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        with Workshop([nano]) as shop:
            await play(shop)

    asyncio.run(run())


def schema(rules: Any) -> dict[str, Any]:
    return {"kind": "schema", "schema": rules}


def test_a_verdict_is_what_compiling_here_finds(nano: Path, byte_tokenizer: Tokenizer) -> None:
    grammars = Grammars(byte_tokenizer, ROWS)

    async def play(shop: Workshop) -> None:
        for name in ("enum", "tuple", "array", "formats"):
            found = await shop.grammar("nano", schema(EXAMPLES[name].schema), "a")
            assert found.plan == grammars.json_schema(EXAMPLES[name].schema).plan
            assert (
                grammars.take(found.written, found.plan).matcher is grammars.json_schema(EXAMPLES[name].schema).matcher
            )
        job = {"kind": "tools", "tools": [TOOL], "choice": "auto", "parallel": True}
        found = await shop.grammar("nano", job, "a")
        assert found.written.free and found.plan == grammars.tool_calls([TOOL]).plan
        assert await shop.html("**a** <b>", "a") == worker.render("**a** <b>")

    inside(nano, play)


def test_a_refusal_is_what_it_is_here_and_is_kept(nano: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def play(shop: Workshop) -> None:
        for rules, code in (
            ({"not": {}}, "schema_refused"),
            ({"type": 5}, "schema_invalid"),
            ({"multipleOf": 9999991}, "schema_too_large"),
        ):
            with pytest.raises(JobRefused) as refused:
                await shop.grammar("nano", schema(rules), "a")
            assert refused.value.code == code
        monkeypatch.setattr(shop, "_ask", None)  # no worker is asked again
        with pytest.raises(JobRefused):
            await shop.grammar("nano", schema({"not": {}}), "b")
        monkeypatch.setattr(workshop, "KEPT_SECONDS", -1.0)
        with pytest.raises(TypeError):
            await shop.grammar("nano", schema({"not": {}}), "b")

    inside(nano, play)


def test_what_is_kept_is_bounded(nano: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workshop, "MOST_KEPT", 3)

    async def play(shop: Workshop) -> None:
        for value in range(5):
            await shop.grammar("nano", schema({"const": value}), "a")
        assert len(shop._kept) == 3
        monkeypatch.setattr(workshop, "KEPT_BYTES", 150)
        await shop.grammar("nano", schema({"const": 6}), "a")
        assert len(shop._kept) == 1

    inside(nano, play)


@pytest.mark.slow
def test_a_job_that_takes_too_long_is_ended_and_others_are_done_meanwhile(nano: Path) -> None:
    async def play(shop: Workshop) -> None:
        parts = EATS["allOf"]
        hostile = [asyncio.create_task(shop.grammar("nano", schema({"allOf": x}), "a")) for x in (parts, parts[::-1])]
        await asyncio.sleep(0.2)
        began = time.monotonic()
        found = await shop.grammar("nano", schema({"type": "integer"}), "b")
        assert isinstance(found, GrammarVerdict) and time.monotonic() - began < 2
        for task in hostile:
            with pytest.raises(JobRefused) as refused:
                await task
            assert refused.value.code == "schema_too_slow"
        assert await childless(shop)

    inside(nano, play)


async def childless(shop: Workshop) -> bool:
    """Whether the worker's job process soon ends."""
    [process] = [one for one in psutil.Process().children() if "pipeline.serve.worker" in " ".join(one.cmdline())]
    for _ in range(100):
        if not process.children():
            return True
        await asyncio.sleep(0.02)
    return False


def test_a_worker_that_is_gone_is_started_again(nano: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def play(shop: Workshop) -> None:
        await shop.html("a", "a")
        [process] = [one for one in psutil.Process().children() if "pipeline.serve.worker" in " ".join(one.cmdline())]
        process.kill()
        process.wait(5)
        monkeypatch.setattr(workshop, "RESTART_SECONDS", 1000.0)
        with pytest.raises(ApiFault) as fault:  # it began less than that ago
            await shop.html("a", "a")
        assert fault.value.status == 503 and fault.value.retry
        monkeypatch.setattr(workshop, "RESTART_SECONDS", 0.0)
        assert "<p>b</p>" in await shop.html("b", "a")

    inside(nano, play)


def test_a_failure_of_ours_is_a_500_whose_cause_is_logged(nano: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def play(shop: Workshop) -> None:
        with pytest.raises(ApiFault) as fault:
            await shop.grammar("nano", {"kind": "tools", "tools": [5], "choice": "auto", "parallel": True}, "a")
        assert fault.value.status == 500

    inside(nano, play)
    assert "AttributeError" in caplog.text


def workers() -> set[psutil.Process]:
    """The workers below this process, including those of servers that other tests share."""
    below = psutil.Process().children(recursive=True)
    return {one for one in below if "pipeline.serve.worker" in " ".join(one.cmdline())}


def test_nothing_is_left_behind(nano: Path) -> None:
    before, during = workers(), set[psutil.Process]()

    async def play(shop: Workshop) -> None:
        await shop.html("a", "a")
        during.update(workers() - before)

    inside(nano, play)
    assert during and not workers() - before


def test_a_grammar_that_would_cost_the_server_is_refused(
    byte_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler, text = Compiler(byte_tokenizer), 'start: json\njson: %json {"type": "integer"}'
    assert worker.compiled(compiler, text) == compiler.shortest(compiler.matcher(text))
    for name, value in (("BUILD_SECONDS", 0.0), ("TOKEN_SECONDS", 0.0), ("HELD_BYTES", -(2**40))):
        with monkeypatch.context() as patch:
            patch.setattr(worker, name, value)
            with pytest.raises(SchemaError, match="simplify it"):
                worker.compiled(compiler, text)


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_rehearsal_of_what_people_ask_for_is_cheap(byte_tokenizer: Tokenizer, name: str) -> None:
    assert worker.compiled(Compiler(byte_tokenizer), f"start: json\njson: {grammar_of(name)}")


def grammar_of(name: str) -> str:
    from pipeline.generation import grammars as generation_grammars

    return generation_grammars.json_schema(EXAMPLES[name].schema).text.split("json: ", 1)[1]
