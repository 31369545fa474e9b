"""Loss scaling in fp16: gradients are unscaled, overflows halve the scale, and its state is carried over."""

import torch
from torch import nn

from pipeline.learning.update import Scaler

CPU = torch.device("cpu")


def test_other_precisions_are_left_alone() -> None:
    scaler, x = Scaler("bf16", CPU), torch.ones(1, requires_grad=True)
    assert scaler.scale(x.sum()) == 1 and scaler.scale_now == 1.0 and not scaler.update() and scaler.state() == {}


def test_gradients_come_back_at_their_own_size_and_an_overflow_halves_the_scale() -> None:
    scaler, weight = Scaler("fp16", CPU), nn.Parameter(torch.ones(3))
    unused = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    optimizers = [torch.optim.SGD([weight], lr=0.1), unused]
    scaler.scale((2.5 * weight).sum()).backward()
    assert weight.grad is not None and float(weight.grad[0]) == 2.5 * 65536
    scaler.unscale(optimizers)
    assert torch.equal(weight.grad, torch.full((3,), 2.5))
    assert not scaler.update() and scaler.scale_now == 65536
    weight.grad = torch.full((3,), torch.inf)
    scaler.unscale(optimizers)
    assert scaler.update() and scaler.scale_now == 32768
    other = Scaler("fp16", CPU)
    other.load_state(scaler.state())
    assert other.scale_now == 32768


def test_at_the_least_scale_an_overflow_is_a_fault_of_the_run() -> None:
    scaler, weight = Scaler("fp16", CPU), nn.Parameter(torch.ones(3))
    cured = 0
    scaler.scale(weight.sum()).backward()
    for _ in range(20):
        weight.grad = torch.full((3,), torch.inf)
        scaler.unscale([torch.optim.SGD([weight], lr=0.1)])
        cured += scaler.update()
    assert cured == 16  # 65,536 to 1
