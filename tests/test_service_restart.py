"""A model whose engine dies is back within seconds; the other models do not notice."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from pipeline.serve import api
from pipeline.serve.guard import Options
from pipeline.text.tokenizer import Tokenizer
from tests.clients import ASK
from tests.server import save_models

BODY = {"model": "nano", "messages": ASK, "max_tokens": 8, "seed": 1}


def test_a_dead_engine_fails_its_requests_and_is_restarted(
    tmp_path: Path, byte_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "WATCH_SECONDS", 0.01)
    services: list[Any] = []
    made = api.Service
    monkeypatch.setattr(api, "Service", lambda options: services.append(made(options)) or services[-1])
    app = api.make(Options(models=tuple(save_models(tmp_path, byte_tokenizer)[:2])))
    service = services[0]
    service.start()

    async def run() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            ask = lambda **change: client.post("/v1/chat/completions", json=BODY | change)  # noqa: E731
            first = (await ask()).json()["choices"]
            engine = service.catalogue.served["nano"].engine
            broken = lambda *_: 1 / 0  # noqa: E731
            with monkeypatch.context() as patch:
                patch.setattr(engine.decoder, "advance", broken)
                failed = await ask()
                assert failed.status_code == 500 and "ZeroDivision" not in failed.text
                engine._thread.join()
                assert (await client.get("/health")).json() == {"status": "restarting"}
                assert (await ask()).status_code == 503
                assert (await ask(model="other")).status_code == 200
            watching = asyncio.create_task(service.watch())
            while (await client.get("/health")).status_code == 503:
                await asyncio.sleep(0.01)
            watching.cancel()
            assert (await ask()).json()["choices"] == first
            assert 'stagecoach:engine_restarts_total{model_name="nano"} 1.0' in (await client.get("/metrics")).text

    try:
        asyncio.run(run())
    finally:
        service.stop()


def test_until_models_are_loaded_the_server_says_so(tmp_path: Path, byte_tokenizer: Tokenizer) -> None:
    app = api.make(Options(models=tuple(save_models(tmp_path, byte_tokenizer)[:1])))  # it is never started

    async def run() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            assert (await client.get("/health")).json() == {"status": "loading"}
            answer = await client.post("/v1/chat/completions", json=BODY)
            assert answer.status_code == 503 and answer.json()["error"]["code"] == "model_loading"
            assert int(answer.headers["retry-after"]) >= 1

    asyncio.run(run())
