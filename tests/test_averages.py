"""The moving average of the weights: its formula, its warm-up, its way into the model and back."""

import pytest
import torch
from torch import nn

from pipeline.learning.update import Averages


def test_the_average_follows_the_formula_with_its_warm_up() -> None:
    model = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    averages = Averages(model, 0.5)
    expected = 1.0
    for step, value in enumerate((2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0)):
        with torch.no_grad():
            model.weight.fill_(value)
        averages.update()
        decay = min(0.5, (1 + step) / (10 + step))  # 0.1, 2/11, 0.25, ... 0.5
        expected = decay * expected + (1 - decay) * value
        assert float(averages.values["weight"]) == pytest.approx(expected, rel=1e-6)


def test_the_averages_stand_in_the_model_for_a_block_only() -> None:
    model = nn.Linear(2, 2)
    averages, first = Averages(model, 0.9), model.weight.detach().clone()
    with torch.no_grad():
        model.weight.add_(1.0)
    own = model.weight.detach().clone()
    with averages.in_place():
        assert torch.equal(model.weight, first)
    assert torch.equal(model.weight, own)
    averages.load()
    assert torch.equal(model.weight, first)


def test_a_frozen_weight_has_no_average_and_others_are_refused() -> None:
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    averages = Averages(model, 0.9)
    assert set(averages.values) == {"weight"}
    with pytest.raises(ValueError, match="'bias' is in the saved averages or in the trained weights, but not in both"):
        averages.restore({"weight": torch.zeros(2, 2), "bias": torch.zeros(2)}, 3)
    averages.restore({"weight": torch.zeros(2, 2)}, 3)
    assert averages.updates == 3 and not averages.values["weight"].any()
