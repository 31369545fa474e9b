"""The engine tells each request what it would hear alone, shares common beginnings, and fails no request for another's
fault.
"""

import threading
import time
from collections.abc import Iterator

import pytest
import torch

from pipeline.generation.sampling import Sampling, choose, uniforms
from pipeline.model.transformer import Transformer
from pipeline.run.errors import InputError
from pipeline.serve.engine import CHUNK, Ended, Engine, EngineStopped, Event, QueueFull
from pipeline.serve.engine import GenerationRequest as Request
from tests.engine import WARM, Heard, alone, ask, finished, prompt


@pytest.fixture
def engine(tiny_model: Transformer) -> Engine:
    return Engine(tiny_model, rows=4, queue=8)


def test_every_request_hears_what_it_would_hear_alone(engine: Engine, tiny_model: Transformer) -> None:
    """200 requests of every length and kind of sampling, four at a time, coming and going."""
    ways = [
        Sampling(8, temperature=0.9, top_p=0.95),
        Sampling(5),
        Sampling(6, temperature=1.3, top_k=40),
        Sampling(1, temperature=0.7),
    ]
    cases = [(prompt(n // 6, 1 + 7 * n % 90), ways[n % 4], n // 2) for n in range(200)]
    asked: list[Heard] = []
    for ids, sampling, seed in cases:
        while len(engine.waiting) > 6:
            engine.step()
        asked.append(ask(engine, ids, sampling, seed)[0])
    finished(engine, *asked)
    for (ids, sampling, seed), heard in zip(cases, asked, strict=True):
        assert heard.ids == alone(tiny_model, ids, sampling, seed)
        assert heard.end is not None and (heard.end.reason, heard.end.new_tokens) == ("length", sampling.max_new_tokens)
    assert sum(heard.end.cached_tokens for heard in asked if heard.end) > 1000  # and beginnings were shared


def test_logprobs_are_the_model_s_own(engine: Engine, tiny_model: Transformer) -> None:
    """With prompts read in chunks, shared beginnings and ragged rows, they equal one forward pass at temperature 1."""
    long = prompt(1, 200)
    first, second = ask(engine, long, top=5)[0], ask(engine, prompt(2, 3), top=5)[0]
    finished(engine, first, second)
    third = ask(engine, [*long[:150], *prompt(3, 20)], top=5)[0]
    finished(engine, third)
    assert third.end is not None and third.end.cached_tokens == 150
    for ids, heard in ((long, first), (prompt(2, 3), second), ([*long[:150], *prompt(3, 20)], third)):
        with torch.no_grad():
            whole = tiny_model(torch.tensor([ids + heard.ids]))[0].log_softmax(-1)
        for place, said in enumerate(heard.said):
            row = whole[len(ids) - 1 + place]
            assert said.logprob == pytest.approx(float(row[said.token]), abs=1e-5)
            assert [token for token, _ in said.top] == row.topk(5).indices.tolist()
            assert [value for _, value in said.top] == pytest.approx(row.topk(5).values.tolist(), abs=1e-5)


def test_a_long_prompt_stops_no_neighbor(tiny_model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.serve.engine.CHUNK", 16)
    engine = Engine(tiny_model, rows=2)
    first = ask(engine, prompt(1, 5))[0]
    engine.step()
    long = ask(engine, prompt(2, 160))[0]
    for step in range(1, 11):
        engine.step()
        assert len(first.said) == 1 + step and len(long.said) == (step == 10)
    finished(engine, first, long)
    assert long.ids == alone(tiny_model, prompt(2, 160), WARM, 0)
    assert CHUNK == 256


def test_a_conversation_reads_only_what_is_new_and_a_busy_row_is_copied(
    engine: Engine, tiny_model: Transformer
) -> None:
    ids = prompt(5, 60)
    first = ask(engine, ids)[0]
    finished(engine, first)
    longer = ids + first.ids + prompt(6, 10)
    second = ask(engine, longer)[0]
    engine.step()
    third = ask(engine, [*longer[:70], *prompt(7, 9)])[0]  # while the row is still generating
    finished(engine, second, third)
    assert (
        second.end is not None and second.end.cached_tokens == len(ids) + len(first.ids) - 1
    )  # its last token was not fed
    assert third.end is not None and third.end.cached_tokens == 70
    for given, heard in ((longer, second), ([*longer[:70], *prompt(7, 9)], third)):
        assert heard.ids == alone(tiny_model, given, WARM, 0)
    again = ask(engine, longer)[0]  # all of it is cached, but its last token is read again
    finished(engine, again)
    assert again.end is not None and again.end.cached_tokens == len(longer) - 1 and again.ids == second.ids


def test_rows_of_another_owner_are_not_read(engine: Engine) -> None:
    finished(engine, first := ask(engine, prompt(5, 60), owner="a")[0])
    finished(engine, other := ask(engine, prompt(5, 60), owner="b")[0])
    assert other.end is not None and other.end.cached_tokens == 0 and other.ids == first.ids


def test_stop_tokens_end_and_are_not_said(engine: Engine, tiny_model: Transformer) -> None:
    free = alone(tiny_model, prompt(3, 9), WARM, 0)
    stop = free[7]
    finished(engine, heard := ask(engine, prompt(3, 9), stop=(stop,))[0])
    assert heard.ids == free[: free.index(stop)]
    assert heard.end is not None and (heard.end.reason, heard.end.new_tokens) == ("stop", len(heard.ids))


def test_bias_moves_the_choice_and_not_the_logprob(engine: Engine, tiny_model: Transformer) -> None:
    ids = prompt(3, 9)
    finished(engine, heard := ask(engine, ids, Sampling(3), bias={77: 100.0})[0])
    assert heard.ids == [77, 77, 77]
    with torch.no_grad():
        logprobs = tiny_model(torch.tensor([ids]))[0, -1].log_softmax(-1)
    assert heard.said[0].logprob == pytest.approx(float(logprobs[77]), abs=1e-5)


class Plan:
    """A constraint that allows a set of tokens and records how it was asked."""

    def __init__(self, allowed: list[int] | None, say: dict[int, int] | None = None) -> None:
        self.mask = None if allowed is None else torch.zeros(320, dtype=torch.bool)
        if self.mask is not None:
            self.mask[allowed] = True
        self.say = say or {}  # tokens left -> the token that replaces the chosen one
        self.asked: list[tuple[str, int]] = []

    def allowed(self, remaining: int) -> torch.Tensor | None:
        self.asked.append(("allowed", remaining))
        return self.mask

    def take(self, token: int, remaining: int) -> int:
        self.asked.append(("take", remaining))
        return self.say.get(remaining, token)


def test_a_constraint_is_what_is_chosen_from_and_the_logprob_stays_the_model_s(
    engine: Engine, tiny_model: Transformer
) -> None:
    ids, among = prompt(3, 9), [40, 50, 60, 70]
    heard = [ask(engine, ids, sampling, constraint=Plan(among), top=2)[0] for sampling in (Sampling(6), WARM)]
    finished(engine, *heard)
    for one, sampling in zip(heard, (Sampling(6), WARM), strict=True):
        text = list(ids)
        for place, said in enumerate(one.said):
            with torch.no_grad():
                logits = tiny_model(torch.tensor([text]))[0, -1]
            masked = torch.full_like(logits, float("-inf"))
            masked[among] = logits[among]
            number = torch.tensor([uniforms(0, place, 1)[0]])
            assert said.token == int(choose(masked[None], number, sampling)[0])
            assert said.logprob == pytest.approx(float(logits.log_softmax(-1)[said.token]), abs=1e-5)
            assert [token for token, _ in said.top] == logits.topk(2).indices.tolist()
            text.append(said.token)
    assert set(heard[1].ids) > {heard[1].ids[0]}  # sampled: more than one token occurs


def test_a_constraint_says_another_token_than_the_chosen_and_knows_how_many_are_left(
    engine: Engine, tiny_model: Transformer
) -> None:
    ids = prompt(3, 9)
    plan = Plan(None, say={3: 99, 1: 7})
    finished(engine, heard := ask(engine, ids, Sampling(4), stop=(7,), constraint=plan)[0])
    first = alone(tiny_model, ids, Sampling(1), 0)
    third = alone(tiny_model, [*ids, *first, 99], Sampling(1), 0)  # the replacement is what is fed
    assert heard.ids == [*first, 99, *third]
    assert heard.end is not None and (heard.end.reason, heard.end.new_tokens) == ("stop", 3)
    assert plan.asked == [(what, left) for left in (4, 3, 2, 1) for what in ("allowed", "take")]


class Broken(Plan):
    """Fails in the named method."""

    def __init__(self, where: str) -> None:
        super().__init__(None)
        self.where = where

    def allowed(self, remaining: int) -> torch.Tensor | None:
        if self.where == "allowed" and remaining == WARM.max_new_tokens - 2:
            raise OverflowError
        return super().allowed(remaining)

    def take(self, token: int, remaining: int) -> int:
        if self.where == "take" and remaining == WARM.max_new_tokens - 2:
            raise OverflowError
        return token


@pytest.mark.parametrize(
    ("constraint", "said", "message"),
    [
        (Broken("allowed"), 2, "OverflowError"),
        (Broken("take"), 2, "OverflowError"),
        (Plan([]), 0, "ValueError"),
        (Plan(None, say={WARM.max_new_tokens: 320}), 0, "ValueError"),
    ],
)
def test_a_constraint_that_fails_loses_its_own_request_alone(
    engine: Engine, tiny_model: Transformer, constraint: Plan, said: int, message: str
) -> None:
    others = [ask(engine, prompt(n, 5))[0] for n in range(3)]
    failed = ask(engine, prompt(9, 5), constraint=constraint)[0]
    finished(engine, failed, *others)
    assert failed.end is not None
    assert (failed.end.reason, failed.end.message, len(failed.said)) == ("error", message, said)
    assert [heard.ids for heard in others] == [alone(tiny_model, prompt(n, 5), WARM, 0) for n in range(3)]


@pytest.mark.parametrize("length", [1, 2, 64, 65, 200, 256])
def test_a_prompt_that_is_scored_hears_what_one_forward_pass_says_beside_those_that_speak(
    engine: Engine, tiny_model: Transformer, length: int
) -> None:
    ids = prompt(9, length)
    finished(engine, ask(engine, ids[:60])[0])  # tokens that a row has cached are scored all the same
    others = [ask(engine, prompt(n, 5))[0] for n in range(2)]
    scored = ask(engine, ids, score=3)[0]
    finished(engine, scored, *others)
    assert scored.end == Ended("length", length, 0, 0) and not scored.said
    with torch.no_grad():
        expected = tiny_model(torch.tensor([ids]))[0].log_softmax(-1)
    found = [pair for read in scored.read for pair in zip(read.logprobs, read.top, strict=True)]
    assert len(found) == length - 1 and len(scored.read) == -(-length // 64)
    for place, (logprob, top) in enumerate(found):
        assert logprob == pytest.approx(float(expected[place, ids[place + 1]]), abs=1e-5)
        assert [token for token, _ in top] == expected[place].topk(3).indices.tolist()
    assert [heard.ids for heard in others] == [alone(tiny_model, prompt(n, 5), WARM, 0) for n in range(2)]


def test_scoring_takes_its_share_of_the_time_while_others_speak(
    tiny_model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(tiny_model, rows=4, drafts=False)
    now, advance = [0.0], engine.decoder.advance
    fed: list[int] = []

    def slow(rows: list[int], tokens: list[list[int]], wanted: list[int]) -> torch.Tensor:
        longest = max(map(len, tokens))
        fed.append(longest)
        now[0] += 8.0 if longest == 64 else 1.0
        return advance(rows, tokens, wanted)

    monkeypatch.setattr(engine.decoder, "advance", slow)
    monkeypatch.setattr("pipeline.serve.engine.time.monotonic", lambda: now[0])
    ask(engine, prompt(1, 5), Sampling(100), seconds=1e9)
    ask(engine, prompt(2, 192), score=0, seconds=1e9)
    for _ in range(60):
        engine.step()
    assert [place for place, longest in enumerate(fed) if longest == 64] == [0, 25, 50]


def test_scoring_gives_way_to_another_engine_that_speaks(engine: Engine, tiny_model: Transformer) -> None:
    other = Engine(tiny_model, rows=1)
    engine.others = [other]
    speaks = ask(other, prompt(1, 5), Sampling(4))[0]
    other.step()
    scored = ask(engine, prompt(2, 250), score=0)[0]
    engine.step()
    engine._scored_until = time.monotonic() + 1000
    for _ in range(3):
        engine.step()
    assert len(scored.read) == 1
    finished(other, speaks)
    finished(engine, scored)
    assert len(scored.read) == 4


def test_one_prompt_is_scored_at_a_time_and_answers_pass_by(engine: Engine) -> None:
    scored = [ask(engine, prompt(n, 200), score=0)[0] for n in range(4)]
    other = ask(engine, prompt(9, 5))[0]
    engine.step()
    assert engine.busy == 2 and other.said
    finished(engine, *scored, other)


def poisoned(sampling: Sampling, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `choose` fail on rows sampled this way if one of them has a huge logit for token 77."""

    def fails(logits: torch.Tensor, numbers: torch.Tensor, way: Sampling) -> tuple[torch.Tensor, torch.Tensor]:
        if way.top_k == sampling.top_k and bool((logits[:, 77] > 1e6).any()):
            raise IndexError("index 320 is out of bounds")
        return choose(logits, numbers, way)

    monkeypatch.setattr("pipeline.serve.engine.choose", fails)


def test_a_row_that_cannot_be_sampled_ends_alone_and_its_cause_is_logged(
    engine: Engine, tiny_model: Transformer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Rows that sample alike share one call of `choose`, which fails because of a row in the middle."""
    poisoned(WARM, monkeypatch)
    others = [ask(engine, prompt(n, 5))[0] for n in (0, 1)]
    failed = ask(engine, prompt(9, 5), bias={77: 1e9}, identity="req-9")[0]
    others.append(ask(engine, prompt(2, 5))[0])
    finished(engine, failed, *others)
    assert failed.end is not None and (failed.end.reason, failed.end.message) == ("error", "IndexError")
    assert [heard.ids for heard in others] == [alone(tiny_model, prompt(n, 5), WARM, 0) for n in range(3)]
    assert "req-9" in caplog.text and "index 320 is out of bounds" in caplog.text


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_row_whose_logits_are_no_numbers_ends_alone(
    engine: Engine, tiny_model: Transformer, monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    advance = engine.decoder.advance

    def broken(rows: list[int], tokens: list[list[int]], wanted: list[int]) -> torch.Tensor:
        logits = advance(rows, tokens, wanted)
        for row, piece in zip(torch.tensor(rows).repeat_interleave(torch.tensor(wanted)), logits):
            if engine.slots[int(row)].owner == "broken":
                piece[:] = value
        return logits

    monkeypatch.setattr(engine.decoder, "advance", broken)
    failed = [ask(engine, prompt(9, 5), way, owner="broken")[0] for way in (WARM, Sampling(24))]
    others = [ask(engine, prompt(n, 5))[0] for n in range(2)]
    finished(engine, *failed, *others)
    assert [one.end.reason for one in failed if one.end] == ["error", "error"] and not failed[0].said
    assert [heard.ids for heard in others] == [alone(tiny_model, prompt(n, 5), WARM, 0) for n in range(2)]
    monkeypatch.undo()
    finished(engine, again := ask(engine, prompt(9, 5), owner="broken")[0])
    assert again.ids == alone(tiny_model, prompt(9, 5), WARM, 0)


@pytest.mark.parametrize("where", ["guess", "hear", "judge"])
def test_a_row_whose_draft_fails_ends_alone(
    engine: Engine, tiny_model: Transformer, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    failed = ask(engine, prompt(9, 5) * 3)[0]
    other = ask(engine, prompt(0, 5))[0]
    engine.step()
    drafter = next(slot.drafter for slot in engine.slots if slot.ticket and slot.ticket.request.listener is failed)
    monkeypatch.setattr(drafter, where, lambda *_: 1 // 0)
    if where == "judge":
        monkeypatch.setattr(drafter, "guess", lambda most: [5] * min(most, 2))
    finished(engine, failed, other)
    assert failed.end is not None and failed.end.reason == "error"
    assert other.ids == alone(tiny_model, prompt(0, 5), WARM, 0)


class Panics(Plan):
    """Fails as a Rust library does, with a BaseException that is not an Exception."""

    class Panic(BaseException):
        pass

    def allowed(self, remaining: int) -> torch.Tensor | None:
        raise self.Panic("called `Option::unwrap()` on a `None` value")


def test_a_panic_of_a_grammar_ends_its_own_request_alone(running: Engine, tiny_model: Transformer) -> None:
    failed, other = ask(running, prompt(9, 5), constraint=Panics(None))[0], ask(running, prompt(0, 5))[0]
    assert in_time(failed).reason == "error" and in_time(other).reason == "length"
    assert other.ids == alone(tiny_model, prompt(0, 5), WARM, 0) and running.alive


def test_a_grammar_that_takes_too_long_ends_its_own_request_alone(
    engine: Engine, tiny_model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.serve.engine.CONSTRAINT_SECONDS", 0.05)

    class Slow(Plan):
        def allowed(self, remaining: int) -> torch.Tensor | None:
            end = time.thread_time() + 0.02
            while time.thread_time() < end:
                pass
            return None

    failed, other = ask(engine, prompt(9, 5), constraint=Slow(None))[0], ask(engine, prompt(0, 5))[0]
    finished(engine, failed, other)
    assert failed.end is not None and failed.end.reason == "slow" and 1 < len(failed.said) < 10
    assert other.ids == alone(tiny_model, prompt(0, 5), WARM, 0)


def test_the_context_ends_an_answer(engine: Engine) -> None:
    finished(engine, heard := ask(engine, prompt(1, 250))[0])
    assert heard.end is not None and (heard.end.reason, heard.end.new_tokens) == ("length", 6)


def test_cancelled_requests_are_gone_by_the_next_step(engine: Engine, tiny_model: Transformer) -> None:
    running = [ask(engine, prompt(n, 5)) for n in range(4)]
    engine.step()
    waiting = [ask(engine, prompt(n, 5)) for n in range(10, 13)]
    running[1][1].cancel()
    waiting[0][1].cancel()
    engine.step()
    for heard, count in ((running[1][0], 1), (waiting[0][0], 0)):
        assert heard.end is not None and (heard.end.reason, len(heard.said)) == ("cancelled", count)
    assert waiting[1][0].said and not waiting[2][0].said  # the free row went to the next
    finished(engine, *(heard for heard, _ in running + waiting))
    assert running[2][0].ids == alone(tiny_model, prompt(2, 5), WARM, 0)


def test_time_is_up_for_running_and_waiting_requests(tiny_model: Transformer) -> None:
    engine = Engine(tiny_model, rows=1)
    running, waiting = (ask(engine, prompt(n, 5), seconds=0.0)[0] for n in range(2))
    engine.step()
    assert [heard.end.reason if heard.end else None for heard in (running, waiting)] == ["timeout", "timeout"]


def test_a_listener_that_fails_loses_its_own_request_alone(engine: Engine, tiny_model: Transformer) -> None:
    def poisoned(event: Event) -> None:
        raise OSError("gone")

    others = [ask(engine, prompt(n, 5))[0] for n in range(3)]
    engine.submit(Request(ids=prompt(9, 5), sampling=WARM, seed=0, listener=poisoned))
    engine.step()
    assert engine.busy == 3
    finished(engine, *others)
    assert [heard.ids for heard in others] == [alone(tiny_model, prompt(n, 5), WARM, 0) for n in range(3)]


def test_a_full_queue_refuses_and_a_free_one_takes(tiny_model: Transformer) -> None:
    engine = Engine(tiny_model, rows=1, queue=2)
    heard = [ask(engine, prompt(n, 5))[0] for n in range(3)]
    with pytest.raises(QueueFull):
        ask(engine, prompt(4, 5))
    finished(engine, heard[0])
    ask(engine, prompt(4, 5))


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "the prompt has 0 tokens; expected 1 to 255"),
        ([1] * 256, "the prompt has 256 tokens"),
        ([3, 320], "token 320 is not"),
        ([-1], "token -1 is not"),
    ],
)
def test_what_can_never_be_served_is_refused(engine: Engine, ids: list[int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        ask(engine, ids)


def test_counters_and_gauges(tiny_model: Transformer) -> None:
    engine = Engine(tiny_model, rows=2, queue=3)
    ids = prompt(1, 40)
    heard = [ask(engine, given, Sampling(4))[0] for given in (ids, prompt(2, 10), ids)]
    engine.step()
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.cache_share, stats.steps) == (2, 1, 50 / 512, 1)
    assert (stats.prompt_tokens, stats.cached_tokens, stats.generated_tokens) == (50, 0, 2)
    finished(engine, *heard)
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.cache_share) == (0, 0, 0.0)
    assert (stats.prompt_tokens, stats.cached_tokens, stats.generated_tokens) == (90, 39, 12)


# the thread


@pytest.fixture
def running(tiny_model: Transformer) -> Iterator[Engine]:
    with Engine(tiny_model, rows=2, queue=100) as engine:
        yield engine


def in_time(heard: Heard) -> Ended:
    assert heard.done.wait(30), "no answer in 30 seconds"
    assert heard.end is not None
    return heard.end


def test_many_threads_ask_at_once(running: Engine, tiny_model: Transformer) -> None:
    found: dict[int, Heard] = {}

    def one(number: int) -> None:
        for n in range(number, number + 5):
            found[n], _ = ask(running, prompt(n, 1 + n % 30), seed=n)
            in_time(found[n])

    threads = [threading.Thread(target=one, args=(number,)) for number in range(0, 40, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {n: heard.ids for n, heard in found.items()} == {
        n: alone(tiny_model, prompt(n, 1 + n % 30), WARM, n) for n in range(40)
    }


def test_a_fault_of_the_loop_ends_all_and_is_told_and_a_restart_serves_again(
    tiny_model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine(tiny_model, rows=1) as engine:
        in_time(ask(engine, prompt(1, 30))[0])
        with pytest.raises(RuntimeError, match="only a dead engine can be restarted"):
            engine.restart()
        asked = threading.Event()

        def broken(*_: object) -> None:
            assert asked.wait(30)
            raise MemoryError("no room")

        monkeypatch.setattr(engine.decoder, "advance", broken)
        heard = [ask(engine, prompt(n, 5))[0] for n in range(2)]  # one runs, one waits
        asked.set()
        assert [in_time(one).reason for one in heard] == ["error", "error"]
        assert not engine.alive
        with pytest.raises(EngineStopped, match="the engine has stopped"):
            ask(engine, prompt(1, 5))
        before = engine.stats()
        engine.restart()
        again = ask(engine, prompt(1, 30))[0]
        assert in_time(again).cached_tokens == 0  # nothing in the old rows is trusted
        assert again.ids == alone(tiny_model, prompt(1, 30), WARM, 0) and engine.alive
        assert engine.stats().generated_tokens == before.generated_tokens + len(again.ids)


def test_the_end_of_the_engine_ends_its_requests(tiny_model: Transformer) -> None:
    with Engine(tiny_model, rows=1) as engine:
        heard = [ask(engine, prompt(1, 5), Sampling(250))[0] for _ in range(3)]
    assert {in_time(one).reason for one in heard} <= {"cancelled", "length"} and in_time(heard[2]).reason == "cancelled"


def test_a_free_row_goes_to_the_owner_with_the_fewest(tiny_model: Transformer) -> None:
    engine = Engine(tiny_model, rows=4, queue=20)
    for n in range(8):
        ask(engine, prompt(n, 4), owner="a")
    engine.step()
    late = [ask(engine, prompt(n, 4), owner="b")[0] for n in range(20, 23)]
    while not late[1].said:
        engine.step()
    assert sorted(slot.owner for slot in engine.slots if slot.ticket) == ["a", "a", "b", "b"]


def test_a_queue_that_one_owner_filled_takes_another_s_requests(tiny_model: Transformer) -> None:
    engine = Engine(tiny_model, rows=2, queue=6)
    for n in range(8):
        ask(engine, prompt(n, 4), owner="a")
    assert engine.full("a") and not engine.full("b")
    for n in range(4):
        ask(engine, prompt(n, 4), owner="b")
    for owner in "ab":
        with pytest.raises(QueueFull):
            ask(engine, prompt(9, 4), owner=owner)


def test_one_owner_has_eight_rows_at_most_and_others_pass_by(tiny_model: Transformer) -> None:
    engine = Engine(tiny_model, rows=10)
    greedy = [ask(engine, prompt(n, 4), owner="a")[0] for n in range(12)]
    other, _ = ask(engine, prompt(50, 4), owner="b")
    engine.step()
    assert [slot.owner for slot in engine.slots if slot.ticket].count("a") == 8 and engine.busy == 9
    finished(engine, *greedy, other)
