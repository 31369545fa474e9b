"""primitives.cpp against PyTorch's operators, with extreme values and any number of threads, and how it is built."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pipeline.model.cpu import native, primitives
from pipeline.model.cpu.primitives import BF16
from pipeline.run.errors import ConfigError

pytestmark = pytest.mark.skipif(native.compiler() is None, reason="no C++ compiler")
EXTREMES = [
    0.0,
    -0.0,
    1e-30,
    -1e-30,
    1.0,
    -1.0,
    20.0,
    -20.0,
    87.0,
    -87.0,
    200.0,
    -200.0,
    3e38,
    -3e38,
    math.inf,
    -math.inf,
    math.nan,
]


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield tmp_path_factory.getbasetemp() / "native"
    native.unload()


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def in_both(folder: Path, run: Callable[[], tuple[Tensor, ...]]) -> Iterator[tuple[Tensor, Tensor]]:
    native.unload()
    expected = run()
    native.load(folder)
    yield from zip(run(), expected, strict=True)


def test_rounding_to_bf16_is_that_of_pytorch_for_every_kind_of_number(folder: Path) -> None:
    random = torch.randint(-(2**31), 2**31, (4096,), generator=torch.Generator().manual_seed(0), dtype=torch.int64)
    ties = (torch.arange(64) << 16 | 0x8000) + (0x3F80 << 16)
    numbers = torch.cat([random, ties]).to(torch.int32).view(torch.float32)
    numbers = torch.cat([numbers, torch.tensor(EXTREMES)])
    native.load(folder)
    found = primitives.fold(torch.ones(len(numbers)), numbers[None])[0]
    assert torch.equal(found.isnan(), numbers.isnan())
    assert torch.equal(found[~found.isnan()], numbers.to(BF16)[~numbers.isnan()])


@pytest.mark.parametrize("size", [1, 7, 16, 40, 333])
def test_every_piece_is_within_rounding_of_its_other_form(folder: Path, size: int) -> None:
    x, grad = drawn(0, 5, size), drawn(1, 5, size).to(BF16)
    matrices, weight = (drawn(2, 3, size), drawn(3, 4, size)), drawn(4, size)
    pair, part = drawn(5, 5, 2 * size).to(BF16), drawn(6, 7, size).to(BF16)

    def run() -> tuple[Tensor, ...]:
        whole, scale = primitives.unit(x, 1e-6)
        folded, of_weight = primitives.unfold(part, weight, *matrices)
        return (
            whole,
            scale,
            primitives.unit_back(grad, whole, scale),
            primitives.fold(weight, *matrices),
            *folded,
            of_weight,
            primitives.gated(pair),
            primitives.gated_back(grad, pair),
        )

    for found, expected in in_both(folder, run):
        assert found.dtype == expected.dtype
        atol = 0.05 if found.dtype == BF16 else 1e-5
        torch.testing.assert_close(found.float(), expected.float(), atol=atol, rtol=0.02)


def test_a_softmax_with_its_norm_and_entropy_and_sums_of_rows_are_those_of_pytorch(folder: Path) -> None:
    logits, rows, index = (20 * drawn(0, 9, 200)).to(BF16), drawn(1, 40, 32).to(BF16), torch.arange(40) % 7

    def run() -> tuple[Tensor, ...]:
        total = torch.ones(8, 32)
        primitives.add_rows(total, index, rows)
        return *primitives.softmax(logits.clone(), 0.7), total

    for found, expected in in_both(folder, run):
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=2**-7 if found.dtype == BF16 else 1e-5)


def test_a_gate_at_the_edges_is_what_the_formula_says(folder: Path) -> None:
    gate = torch.tensor(EXTREMES).to(BF16)
    native.load(folder)
    found = primitives.gated(torch.cat([gate, torch.ones_like(gate)])[None])[0].double()
    expected = gate.double() * torch.sigmoid(gate.double())
    expected[gate == -math.inf] = math.nan  # -inf times 0, as in PyTorch
    torch.testing.assert_close(found, expected, atol=1e-30, rtol=2**-8, equal_nan=True)


@pytest.mark.parametrize("edge", [math.inf, math.nan])
def test_what_is_not_a_number_reaches_the_loss(folder: Path, edge: float) -> None:
    logits = drawn(0, 4, 40)
    logits[2, 5] = edge
    native.load(folder)
    _, _, total = primitives.exponentials(logits.to(BF16), torch.arange(4))
    assert not total.isfinite()


def test_a_hidden_key_has_probability_zero(folder: Path) -> None:
    mask = torch.zeros(2, 1, 128, 1, 128, dtype=BF16)
    mask[..., 100:] = -math.inf
    scores = drawn(0, 2, 3, 128, 2, 256).to(BF16)
    found, expected = next(in_both(folder, lambda: (primitives.probabilities(scores.clone(), mask),)))
    assert not found[..., 228:].any()
    torch.testing.assert_close(found.float(), expected.float(), atol=2**-9, rtol=2**-7)


@pytest.mark.parametrize("shape", [(6, 40), (40, 6), (9, 9), (3, 64)])
def test_the_outer_product_is_the_same_with_a_side_turned(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int]
) -> None:
    left, right = drawn(0, 32, shape[0]).to(BF16), drawn(1, 32, shape[1]).to(BF16)
    expected = primitives.outer(left, right)
    monkeypatch.setattr(primitives, "PAYS_TO_TURN", 0)
    found = primitives.outer(left, right)
    assert found.is_contiguous() and found.shape == shape
    torch.testing.assert_close(found, expected)


def test_threads_share_the_rows_and_change_rounding_of_sums_over_rows_alone(folder: Path) -> None:
    x, weights, angles = drawn(0, 37, 6, 16).to(BF16), drawn(1, 4, 16), drawn(2, 37, 1, 8)
    grad = drawn(3, 37, 6, 16)
    native.load(folder)

    def run() -> tuple[Tensor, ...]:
        turned, scale = primitives.heads(x, weights, angles.cos(), angles.sin(), 1e-6)
        result, sums = primitives.heads_back(grad, x, scale, weights, angles.cos(), angles.sin(), True)
        return turned, scale, result, primitives.gated(x.flatten(1)), sums

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        *one, sums_of_one = run()
        torch.set_num_threads(3)
        *three, sums_of_three = run()
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(one, three, strict=True))
    torch.testing.assert_close(sums_of_one, sums_of_three)


def test_wrong_input_is_refused_before_memory_is_touched(folder: Path) -> None:
    native.load(folder)
    with pytest.raises(IndexError, match="expected targets from 0 to 39, got 3 to 40"):
        primitives.exponentials(drawn(0, 2, 40).to(BF16), torch.tensor([3, 40]))
    with pytest.raises(ValueError, match="expected contiguous tensors"):
        primitives.gated(drawn(0, 8, 4).to(BF16).t())


def test_it_is_built_once_and_a_compiler_that_fails_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    native.load(tmp_path)
    (built,) = tmp_path.iterdir()
    made = built.stat().st_mtime_ns
    native._built.cache_clear()
    native.load(tmp_path)
    assert [file.stat().st_mtime_ns for file in tmp_path.iterdir()] == [made]
    native.unload()
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho no such machine >&2; exit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    native._built.cache_clear()
    with pytest.raises(ConfigError, match=r"runtime.compile=false(?s:.*)no such machine"):
        native.load(tmp_path)
    assert not native.loaded()
    assert sorted(tmp_path.iterdir()) == sorted([built, broken])
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(native.shutil, "which", lambda name: None)
    native._built.cache_clear()
    with pytest.raises(ConfigError, match="needs a C\\+\\+ compiler"):
        native.load(tmp_path)
    native._built.cache_clear()
