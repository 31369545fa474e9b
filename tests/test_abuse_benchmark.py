"""What the server withstands, on a small scale: odd requests, and answers during an attack. The full numbers come from
`benchmarks/abuse.py`.
"""

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import abuse
from benchmarks.abuse import Beside, Heard
from benchmarks.odd_requests import Maker, Odd
from tests.server import Running


def test_odd_requests_are_drawn_from_the_seed_and_of_every_kind() -> None:
    made = [[maker.make() for _ in range(400)] for maker in (Maker(random.Random(3)), Maker(random.Random(3)))]
    assert made[0] == made[1]
    assert {odd.kind for odd in made[0]} == {
        "sampled",
        "shaped",
        "called",
        "completed",
        "mutated",
        "raw",
        "headed",
        "rendered",
        "told",
        "judged",
        "unread",
        "denoised",
        "scored",
    }
    assert all(json.loads(odd.body) for odd in made[0] if odd.kind not in ("raw", "headed"))


@pytest.mark.parametrize(
    ("heard", "problem"),
    [
        (Heard(500, 0.1), "status 500"),
        (Heard(503, 0.1, "http/1.1 503"), "status 503"),
        (Heard(503, 0.1, "retry-after: 2"), ""),
        (Heard(0, 0.1), "no answer"),
        (Heard(200, 5.1), "took 5.1 s"),
        (Heard(400, 0.1, "", b'{"error": {"message": "a"}}'), "its error has the keys ['message']"),
        (Heard(200, 0.1), ""),
    ],
)
def test_what_is_wrong_with_an_answer(heard: Heard, problem: str) -> None:
    assert abuse.wrong(Odd("shaped", "POST", "/render"), heard) == problem


def test_answers_beside_an_attack_are_judged_by_failures_and_the_tail() -> None:
    quiet = [Heard(200, n / 100) for n in range(1, 101)]
    found = Beside("nano", quiet, [Heard(200, 2 * one.seconds) for one in quiet], {}, 1.0)
    assert found.tail(quiet) == 0.96 and found.times == 2.0 and found.fine
    assert not Beside("nano", quiet, [Heard(200, 2.1 * one.seconds) for one in quiet], {}, 1.0).fine
    assert not Beside("nano", quiet, [*quiet[1:], Heard(429, 0.01)], {}, 1.0).fine
    assert not Beside("nano", quiet, quiet, {}, 51.0).fine


@pytest.fixture(scope="module")
def bearing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder: Path = tmp_path_factory.mktemp("bearing")
    with abuse.server(folder) as running:
        yield running


@pytest.mark.slow
@pytest.mark.full
def test_a_thousand_odd_requests_are_borne(bearing: Running) -> None:
    found = abuse.odd_requests(bearing, 1000, seed=random.SystemRandom().randrange(10**6))
    assert not found.wrong, "\n".join(found.wrong)
    assert found.growth <= abuse.MOST_GROWTH


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize("model", abuse.MODELS)
def test_nobody_fails_beside_an_attack(bearing: Running, model: str) -> None:
    """How long they wait depends on the machine, which other tests use too; the benchmark measures it."""
    found = abuse.beside(bearing, model, {"nano": 160, "masked": 48}[model], 8, rounds=1)
    assert not found.failures and found.growth <= abuse.MOST_GROWTH
    assert {kind.split()[0] for kind in found.sent} == set(abuse.ATTACK), found.sent
    statuses = {kind.split()[1] for kind in found.sent}
    assert statuses <= {"200", "400", "401", "429", "503"}, found.sent
