"""Generated requests to the routes in the server's own OpenAPI description: none may break it.

`make test` sends the same few hundred each time; `make test-all` sends two thousand from a new seed, which it prints.
STAGECOACH_FUZZ_SEED repeats a seed.

schemathesis makes bodies that fit the description and bodies that do not (wrong types, missing fields, odd text). In
every case the status is below 500, the answer comes in time, and an error is OpenAI's object.
"""

import contextlib
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, seed, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode

from pipeline.model import checkpoint
from pipeline.text.tokenizer import Tokenizer
from tests.server import Running, random_model, save_models, serving

pytestmark = pytest.mark.slow
# for each of nine routes with parameters or a body; bodies that do not fit take ten times as long to generate
CASES = {GenerationMode.POSITIVE: 170, GenerationMode.NEGATIVE: 60}
FEW = 8
SEED = int(os.environ.get("STAGECOACH_FUZZ_SEED", "0")) or random.SystemRandom().randrange(1, 2**32)
SECONDS = 30.0


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory, byte_tokenizer: Tokenizer) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("fuzzed")
    models = save_models(folder, byte_tokenizer)
    checkpoint.save(folder / "nano", random_model(byte_tokenizer, context=128), byte_tokenizer, {})  # short answers
    with serving(models, "--feedback", str(folder / "preferences.jsonl"), log=folder / "log") as running:
        yield running


@pytest.fixture(scope="module")
def operations(fuzzed: Running) -> list[Any]:
    """The routes as the server describes them, with the names of its models, which cannot be guessed."""
    found = httpx.get(f"{fuzzed.url}/openapi.json").json()
    for body in found["components"]["schemas"].values():
        if "model" in body.get("properties", {}):
            body["properties"]["model"] = {"enum": ["nano", "judge", "unknown"]}
    return [result.ok() for result in schemathesis.openapi.from_dict(found).get_all_operations()]


def ask_all(fuzzed: Running, operations: list[Any], mode: GenerationMode, cases: int, new: bool) -> Counter[str]:
    """Send `cases` requests to each route; returns counts, in all and by status. `new`: from SEED, not a fixed set."""
    asked = Counter[str]()
    for operation in operations:

        @given(case=operation.as_strategy(generation_mode=mode))
        @settings(
            max_examples=cases if operation.body or operation.path_parameters else 2,
            deadline=None,
            derandomize=not new,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        def ask(case: Any) -> None:
            began = time.monotonic()
            answer = case.call(base_url=fuzzed.url, timeout=SECONDS)
            asked.update(["all", str(answer.status_code)])
            assert answer.status_code < 500, (case.as_curl_command(), answer.text)
            assert time.monotonic() - began < SECONDS
            if answer.status_code >= 400:
                assert set(answer.json()["error"]) == {"message", "type", "param", "code"}

        with contextlib.suppress(Unsatisfiable):  # without a body, nothing can be wrong
            (seed(SEED)(ask) if new else ask)()
    assert httpx.get(f"{fuzzed.url}/health").status_code == 200
    assert "Traceback" not in fuzzed.log.read_text()
    assert fuzzed.falls_idle()
    return asked


@pytest.mark.parametrize("mode", GenerationMode)
def test_no_request_of_a_fixed_set_breaks_the_server(
    fuzzed: Running, operations: list[Any], mode: GenerationMode
) -> None:
    asked = ask_all(fuzzed, operations, mode, FEW, new=False)
    assert asked["all"] >= 5 * FEW, asked
    assert asked["200" if mode == GenerationMode.POSITIVE else "400"] >= FEW, asked


@pytest.mark.full
@pytest.mark.parametrize("mode", GenerationMode)
def test_no_request_of_a_new_seed_breaks_the_server(
    fuzzed: Running, operations: list[Any], mode: GenerationMode, capsys: pytest.CaptureFixture[str]
) -> None:
    with capsys.disabled():
        sys.stderr.write(f"generated requests: STAGECOACH_FUZZ_SEED={SEED}\n")
    asked = ask_all(fuzzed, operations, mode, CASES[mode], new=True)
    assert asked["all"] >= 5 * CASES[mode], asked
    assert asked["200" if mode == GenerationMode.POSITIVE else "400"] >= 50, asked
