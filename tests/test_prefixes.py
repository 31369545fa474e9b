"""Which row a prompt takes, and how many rows a machine may have."""

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from pipeline.generation.sampling import Sampling
from pipeline.model.cache import KVCache
from pipeline.model.config import ModelConfig
from pipeline.model.transformer import Transformer
from pipeline.run.errors import InputError
from pipeline.serve import engine
from pipeline.serve.engine import SHARED, Engine, Slot, check_memory, free_memory, take_row
from pipeline.serve.engine import GenerationRequest as Request
from pipeline.serve.loop import Ticket

CONFIG = ModelConfig(
    vocab_size=64,
    width=16,
    layers=3,
    heads=2,
    kv_heads=2,
    head_dim=8,
    d_ff=16,
    max_context=128,
    rope_theta=1e4,
    tied=True,
)
CPU = torch.device("cpu")
TEXT = list(range(100))


def cache_of(*held: int) -> KVCache:
    """A cache whose rows hold this many positions, each filled with the row's number."""
    cache = KVCache(CONFIG, len(held), dtype=torch.float32, device=CPU)
    cache.reserve(128)
    for tensor in cache.keys + cache.values:
        tensor.copy_(torch.arange(len(held))[:, None, None, None].expand_as(tensor))
    cache.own = list(held)
    return cache


def busy() -> Ticket:
    return Ticket(Request(ids=[1], sampling=Sampling(1), seed=0, listener=lambda event: None))


def test_the_free_row_that_begins_alike_is_taken_else_the_one_that_is_idle_longest() -> None:
    slots = [Slot(held=TEXT[:30], used=3), Slot(held=TEXT[:50], used=2), Slot(held=[9] * 50, used=1)]
    assert take_row(slots, cache := cache_of(30, 50, 50), TEXT, "") == (1, 50)
    assert cache.own == [30, 50, 50]
    assert take_row(slots, cache := cache_of(30, 50, 50), TEXT[:40], "") == (1, 39)  # the last token is always read
    assert cache.own == [30, 39, 50]  # what follows it is forgotten
    assert take_row(slots, cache_of(30, 50, 50), [5, *TEXT], "") == (2, 0)
    assert take_row(slots, cache_of(30, 50, 50), [*TEXT[: SHARED - 1], 63, 63], "") == (2, 0)  # too short to be reused
    assert take_row(slots, cache_of(30, 50, 50), [*TEXT[:SHARED], 63, 63], "")[1] == SHARED


def test_rows_of_another_owner_are_not_looked_at() -> None:
    slots = [Slot(held=TEXT[:50], owner="a", used=2), Slot(held=TEXT[:20], owner="b", used=1)]
    assert take_row(slots, cache_of(50, 20), TEXT, "b") == (1, 20)
    assert take_row(slots, cache_of(50, 20), TEXT, "c") == (1, 0)


def test_of_a_busy_row_the_common_beginning_is_copied() -> None:
    slots = [Slot(held=TEXT[:60], ticket=busy()), Slot(held=TEXT[:20], used=4), Slot(held=[9] * 50, used=1)]
    cache = cache_of(60, 20, 50)
    assert take_row(slots, cache, [*TEXT[:40], 63, 63], "") == (2, 40)
    assert cache.own == [60, 20, 40]
    for layer in range(CONFIG.layers):
        keys, values = cache.keys[layer], cache.values[layer]
        for tensor in (keys.transpose(2, 3), values):  # (R, K, S, h)
            assert (
                (tensor[2, :, :40] == 0).all()
                and (tensor[2, :, 40:] == 2).all()
                and (tensor[:2, 0, 0, 0] == torch.tensor([0, 1])).all()
            )


def test_rows_may_take_a_quarter_of_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    row = 2 * 3 * 2 * 8 * 128 * 4  # keys and values, layers, heads, their size, positions, bytes
    cache = cache_of(1)
    assert sum(tensor.nbytes for tensor in cache.keys + cache.values) == row
    monkeypatch.setattr(engine, "free_memory", lambda device: 4 * 5 * row)
    check_memory(CONFIG, 5, torch.float32, CPU)
    check_memory(CONFIG, 10, torch.bfloat16, CPU)
    with pytest.raises(
        InputError, match=r"--rows 6: .* of 128 tokens .* a quarter of the free memory .* use at most --rows 5"
    ):
        check_memory(CONFIG, 6, torch.float32, CPU)
    monkeypatch.setattr(engine, "free_memory", lambda device: 4 * row - 1)
    with pytest.raises(InputError, match="use a larger machine, or a model with a shorter context"):
        check_memory(CONFIG, 1, torch.float32, CPU)


def test_an_engine_of_too_many_rows_is_not_made(tiny_model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    row = 2 * 2 * 1 * 16 * 256 * 4
    monkeypatch.setattr(engine, "free_memory", lambda device: 4 * 7 * row)
    assert Engine(tiny_model, rows=7).rows == 7
    with pytest.raises(InputError, match="at most --rows 7"):
        Engine(tiny_model, rows=8)


def test_free_is_what_the_control_group_leaves_of_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "CGROUP", tmp_path)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=5000))
    assert free_memory(CPU) == 5000
    (tmp_path / "memory.current").write_text("300\n")
    (tmp_path / "memory.max").write_text("1000\n")
    assert free_memory(CPU) == 700
    (tmp_path / "memory.max").write_text("max\n")
    assert free_memory(CPU) == 5000
