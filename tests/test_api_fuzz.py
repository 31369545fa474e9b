"""Two thousand generated requests to the routes of the interface that the server describes itself: none may break it.

schemathesis makes bodies that fit the description and bodies that do not (wrong types, missing fields, odd text); whatever comes, the
answer is below 500, comes in time, and every error is OpenAI's object.
"""

import contextlib
import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode

from pipeline import checkpoint
from pipeline.text.tokenizer import Tokenizer
from tests.server import Running, random_model, save_models, serving

pytestmark = pytest.mark.slow
# for each of nine routes with parameters or a body; bodies that do not fit cost ten times as much to make
CASES = {GenerationMode.POSITIVE: 170, GenerationMode.NEGATIVE: 60}
SECONDS = 30.0
ASKED = Counter[str]()


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory, byte_tokenizer: Tokenizer) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("fuzzed")
    models = save_models(folder, byte_tokenizer)
    checkpoint.save(folder / "nano", random_model(byte_tokenizer, context=128), byte_tokenizer, {})  # short answers
    with serving(models, "--feedback", str(folder / "preferences.jsonl"), log=folder / "log") as running:
        yield running


@pytest.fixture(scope="module")
def operations(fuzzed: Running) -> list[Any]:
    """The routes as the server describes them, with the names of its models, which nobody would guess."""
    found = httpx.get(f"{fuzzed.url}/openapi.json").json()
    for body in found["components"]["schemas"].values():
        if "model" in body.get("properties", {}):
            body["properties"]["model"] = {"enum": ["nano", "judge", "unknown"]}
    return [result.ok() for result in schemathesis.openapi.from_dict(found).get_all_operations()]


@pytest.mark.parametrize("mode", GenerationMode)
def test_no_generated_request_breaks_the_server(fuzzed: Running, operations: list[Any], mode: GenerationMode) -> None:
    for operation in operations:
        asked = CASES[mode] if operation.body or operation.path_parameters else 2

        @given(case=operation.as_strategy(generation_mode=mode))
        @settings(
            max_examples=asked, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
        )
        def ask(case: Any) -> None:
            began = time.monotonic()
            answer = case.call(base_url=fuzzed.url, timeout=SECONDS)
            ASKED.update(["all", str(answer.status_code)])
            assert answer.status_code < 500, (case.as_curl_command(), answer.text)
            assert time.monotonic() - began < SECONDS
            if answer.status_code >= 400:
                assert set(answer.json()["error"]) == {"message", "type", "param", "code"}

        with contextlib.suppress(Unsatisfiable):  # a route without a body has nothing that could be wrong
            ask()


def test_so_many_were_asked_and_the_server_is_well(fuzzed: Running) -> None:
    assert httpx.get(f"{fuzzed.url}/health").status_code == 200
    assert ASKED["all"] >= 2000, ASKED
    assert ASKED["200"] >= 100 and ASKED["400"] >= 100, ASKED
    assert "Traceback" not in fuzzed.log.read_text()
    assert fuzzed.falls_idle()
    sys.stderr.write(f"{dict(ASKED)}\n")
