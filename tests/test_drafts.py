"""Drafts change how fast an answer comes, never what it is."""

import pytest
import torch

from pipeline.generation.sampling import Sampling
from pipeline.model.transformer import Transformer
from pipeline.serve.engine import DRAFT, LONGEST_WAIT, PAYS, Drafter, Ended, Engine, Event, Ticket
from pipeline.serve.engine import GenerationRequest as Request
from tests.engine import alone, ask, finished, prompt

# the drafter alone


def test_what_followed_three_tokens_last_is_guessed_and_else_what_followed_two() -> None:
    assert Drafter([1, 2, 3, 4, 5, 6, 1, 2, 3]).guess(3) == [4, 5, 6]
    assert Drafter([9, 2, 3, 7, 8, 1, 1, 2, 3]).guess(2) == [7, 8]
    assert Drafter([1, 2, 3, 4, 9, 2, 3, 5, 1, 2, 3]).guess(1) == [4]  # not 5: it came later, but after a shorter match
    assert Drafter([1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3]).guess(1) == [5]  # the later one of two
    assert Drafter([1, 2, 3, 4]).guess(8) == Drafter([7]).guess(8) == Drafter([1, 2, 1, 2]).guess(0) == []


def test_a_piece_that_is_repeated_is_guessed_to_go_on_round_and_round() -> None:
    assert Drafter([5, 1, 2, 3, 1, 2, 3]).guess(20) == [1, 2, 3, 1, 2, 3, 1, 2]
    assert Drafter([4, 4, 4]).guess(3) == [4, 4, 4]


def test_the_index_is_what_a_search_of_the_whole_text_finds() -> None:
    text = torch.randint(0, 4, (300,), generator=torch.Generator().manual_seed(0)).tolist()
    drafter, found = Drafter([]), 0
    for end in range(1, len(text) + 1):
        drafter.hear(text[end - 1])
        begins = [
            begin
            for length in (3, 2)
            for begin in range(end - 1, length - 1, -1)
            if end > length and text[begin - length : begin] == text[end - length : end]
        ]
        expected = [text[begins[0] + place % (end - begins[0])] for place in range(DRAFT)] if begins else []
        assert drafter.guess(DRAFT) == expected
        found += bool(begins)
    assert found > 250


def test_after_guesses_that_fail_the_row_waits_longer_and_longer() -> None:
    drafter = Drafter([1, 2] * 10)
    waits = []
    for _ in range(9):
        drafter.judge(right=PAYS - 1)
        waits.append(0)
        while not drafter.guess(8):
            drafter.hear(1 + len(drafter.ids) % 2)
            waits[-1] += 1
    assert waits == [1, 2, 4, 8, 16, 32, LONGEST_WAIT, LONGEST_WAIT, LONGEST_WAIT]
    drafter.judge(right=PAYS)
    assert drafter.guess(8) and not drafter.failures


# within the engine

COPYING = Sampling(60)  # the tiny model's greedy text repeats itself, and changes three times


def test_guesses_that_are_right_save_steps_and_say_the_same(tiny_model: Transformer) -> None:
    ids = prompt(5, 9)
    for sampling in (COPYING, Sampling(60, temperature=0.3)):
        texts, ends, steps = [], [], []
        for drafts in (False, True):
            engine = Engine(tiny_model, rows=2, drafts=drafts)
            finished(engine, heard := ask(engine, ids, sampling, top=3)[0])
            stats = engine.stats()
            texts.append(heard.ids)
            ends.append(heard.end)
            steps.append(stats.steps)
            assert stats.generated_tokens == 60 == stats.steps + stats.accepted_tokens
            assert (stats.drafted_tokens > stats.accepted_tokens > 10) if drafts else stats.drafted_tokens == 0
            with torch.no_grad():
                whole = tiny_model(torch.tensor([ids + heard.ids]))[0].log_softmax(-1)
            for place, said in enumerate(heard.said):
                row = whole[len(ids) - 1 + place]
                assert said.logprob == pytest.approx(float(row[said.token]), abs=1e-5)
                assert [token for token, _ in said.top] == row.topk(3).indices.tolist()
        assert texts[0] == texts[1] == alone(tiny_model, ids, sampling, 0)
        assert ends[0] == ends[1] and steps[1] < steps[0] == 60


def test_an_answer_that_ends_within_a_guess_ends_there(tiny_model: Transformer) -> None:
    """It ends by length, at the end of the context, or at a stop token; its row then holds exactly what was said."""
    ids = prompt(5, 9)
    whole = alone(tiny_model, ids, COPYING, 0)
    for most in range(30, 50):
        engine = Engine(tiny_model, rows=1)
        finished(engine, heard := ask(engine, ids, Sampling(most))[0])
        assert heard.ids == whole[:most] and heard.end is not None and heard.end.new_tokens == most
        assert engine.slots[0].held == [*ids, *whole[: most - 1]] and engine.decoder.cache.own == [len(ids) + most - 1]
        finished(engine, second := ask(engine, [*ids, *whole[:most]], Sampling(60 - most))[0])
        assert second.ids == whole[most:] and second.end is not None and second.end.cached_tokens == len(ids) + most - 1
    assert engine.stats().accepted_tokens > 10
    long = prompt(5, 9) + alone(tiny_model, ids, Sampling(200), 0)
    finished(engine, end := ask(engine, long, Sampling(100))[0])
    assert end.end is not None and end.end.new_tokens == tiny_model.config.max_context - len(long) == 47
    late = list(dict.fromkeys(whole))[2]
    assert 15 < whole.index(late) < 40
    finished(engine, stopped := ask(engine, ids, COPYING, stop=(late,))[0])
    assert stopped.ids == whole[: whole.index(late)]


def test_a_bias_is_on_every_place_of_a_guess(tiny_model: Transformer) -> None:
    texts = []
    for drafts in (False, True):
        engine = Engine(tiny_model, rows=1, drafts=drafts)
        finished(engine, heard := ask(engine, prompt(5, 9), COPYING, bias={77: 6.0, 78: 5.5})[0])
        texts.append(heard.ids)
    assert texts[0] == texts[1] != alone(tiny_model, prompt(5, 9), COPYING, 0)
    assert engine.stats().accepted_tokens > 10


def test_a_listener_that_cancels_hears_no_more_of_a_guess(tiny_model: Transformer) -> None:
    ids, said, tickets = prompt(5, 9), list[int](), list[Ticket]()
    whole = alone(tiny_model, ids, COPYING, 0)

    def listener(event: Event) -> None:
        if isinstance(event, Ended):
            assert (event.reason, event.new_tokens) == ("cancelled", 12)
            ends.append(event)
            return
        said.append(event.token)
        if len(said) == 12:
            tickets[0].cancel()

    ends: list[Ended] = []
    engine = Engine(tiny_model, rows=1)
    tickets.append(engine.submit(Request(ids=ids, sampling=COPYING, seed=0, listener=listener)))
    while len(said) < 12:
        engine.step()
    assert said == whole[:12] and not ends  # that step's guess was longer: up to here the text is one repeated token
    assert engine.stats().steps < 10 and whole[:20] == whole[:1] * 20
    engine.step()
    assert len(ends) == 1 and len(said) == 12 and engine.busy == 0
    assert engine.slots[0].held == [*ids, *whole[:11]] and engine.decoder.cache.own == [len(ids) + 11]


def test_more_rows_than_two_are_not_guessed_for_and_constrained_ones_never(tiny_model: Transformer) -> None:
    class Anything:
        def allowed(self, remaining: int) -> None:
            return None

        def take(self, token: int, remaining: int) -> int:
            return token

    engine = Engine(tiny_model, rows=3)
    heard = [ask(engine, prompt(5, 9), COPYING)[0] for _ in range(3)]
    finished(engine, *heard)
    assert engine.stats().drafted_tokens == 0 and engine.stats().steps == 60
    finished(engine, held := ask(engine, prompt(5, 9), COPYING, constraint=Anything())[0])
    assert engine.stats().drafted_tokens == 0 and held.ids == heard[0].ids


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_200_seeded_requests_say_the_same_alone_among_seven_and_with_drafts_on_and_off(
    tiny_model: Transformer, temperature: float
) -> None:
    """In float32, with a model so sure of itself that guesses can be right even at higher temperatures."""
    with torch.no_grad():
        tiny_model.model.norm.weight.mul_(5.0)
    sampling = Sampling(16, temperature=temperature)
    cases = [(prompt(n, 4 + n % 40), n) for n in range(200)]
    expected = [alone(tiny_model, ids, sampling, seed) for ids, seed in cases]
    for rows, drafts in ((8, False), (1, True), (2, True)):
        engine = Engine(tiny_model, rows=rows, queue=200, drafts=drafts)
        heard = [ask(engine, ids, sampling, seed)[0] for ids, seed in cases]
        while not all(one.end for one in heard):
            engine.step()
        assert [one.ids for one in heard] == expected, (rows, drafts)
        assert (engine.stats().accepted_tokens > 100) == drafts
