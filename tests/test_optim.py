"""Muon against torch's own, groups, and states by name."""

import copy
import dataclasses

import pytest
import torch
from torch import nn

from pipeline.learning.optim import Muon, OptimizerConfig, Optimizers, group_of, groups, layer_factor, orthogonalise
from pipeline.model.transformer import Transformer
from pipeline.run.errors import ConfigError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(11, 8)
        self.hidden = nn.ModuleList([nn.Linear(8, 8, bias=False), nn.Linear(8, 16), nn.Linear(16, 8, bias=False)])
        self.lm_head = nn.Linear(8, 11, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(ids)
        for layer in self.hidden:
            x = torch.tanh(layer(x))
        return self.lm_head(x)


def config(name: str) -> OptimizerConfig:
    return OptimizerConfig(optimizer=name, learning_rate=0.01, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-8)


def train(model: Net, optimizers: Optimizers, steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        ids = (torch.arange(20) * (step + 3)) % 11
        model(ids).square().mean().backward()
        optimizers.step(1.0)


def test_each_parameter_is_in_exactly_one_group() -> None:
    model = Net()
    found = groups(model)
    names = [name for members in found.values() for name in members]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    assert list(found["norm_bias"]) == ["hidden.1.bias"]
    assert set(found["hidden"]) == {"hidden.0.weight", "hidden.1.weight", "hidden.2.weight"}


def test_batched_muon_equals_torch_muon() -> None:
    torch.manual_seed(0)
    shapes = [(6, 6), (6, 6), (4, 9), (9, 4)]
    mine = [nn.Parameter(torch.randn(s)) for s in shapes]
    theirs = [nn.Parameter(p.detach().clone()) for p in mine]
    ours = Muon(mine, lr=0.02, weight_decay=0.1, dtype=torch.bfloat16)
    oracle = torch.optim.Muon(theirs, lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for _ in range(3):
        for a, b in zip(mine, theirs, strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        ours.step()
        oracle.step()
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=2e-3, rtol=0)  # bf16 sums in another order


def test_orthogonalise_brings_every_singular_value_near_one() -> None:
    matrices = torch.randn(3, 8, 20, generator=torch.Generator().manual_seed(1))
    values = torch.linalg.svdvals(orthogonalise(matrices, steps=5, coefficients=(3.4445, -4.775, 2.0315), eps=1e-7))
    assert values.min() > 0.5 and values.max() < 1.5


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_restored_states_continue_bit_for_bit(name: str) -> None:
    torch.manual_seed(0)
    whole, part = Net(), Net()
    part.load_state_dict(whole.state_dict())
    a, b = Optimizers(whole, config(name), fast_bf16=False), Optimizers(part, config(name), fast_bf16=False)
    train(whole, a, 5)
    train(part, b, 3)
    again = Net()
    again.load_state_dict(part.state_dict())
    c = Optimizers(again, config(name), fast_bf16=False)
    c.load_state_tensors(b.state_tensors())
    train(again, c, 2, first=3)
    for x, y in zip(whole.parameters(), again.parameters(), strict=True):
        assert torch.equal(x, y)


def test_a_state_of_another_parameter_is_refused() -> None:
    optimizers = Optimizers(Net(), config("adamw"), fast_bf16=False)
    with pytest.raises(ValueError, match=r"layers\.9"):
        optimizers.load_state_tensors({"layers.9/exp_avg": torch.zeros(2)})


def test_zero_rate_moves_nothing() -> None:
    model = Net()
    before = [p.detach().clone() for p in model.parameters()]
    optimizers = Optimizers(model, config("muon"), fast_bf16=False)
    model(torch.arange(11)).square().mean().backward()
    optimizers.step(0.0)
    assert all(torch.equal(x, y) for x, y in zip(before, model.parameters(), strict=True))


def test_a_group_may_have_a_rate_of_its_own() -> None:
    model = torch.nn.Linear(4, 4)
    whole = OptimizerConfig(
        optimizer="adamw",
        learning_rate=0.1,
        weight_decay=0.0,
        betas=(0.9, 0.95),
        eps=1e-8,
        learning_rates={"norm_bias": 0.3},
    )
    optimizers = Optimizers(model, whole, fast_bf16=False)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizers.step(0.5)
    steps = {name: (before[name] - p).abs().max().item() for name, p in model.named_parameters()}
    assert steps["weight"] == pytest.approx(0.05, rel=1e-4) and steps["bias"] == pytest.approx(0.15, rel=1e-4)


@pytest.mark.parametrize("rates", [{"hiden": 0.1}, {"hidden": -0.1}])
def test_a_rate_of_no_group_or_below_zero_is_an_error(rates: dict[str, float]) -> None:
    wrong = OptimizerConfig(
        optimizer="adamw", learning_rate=0.1, weight_decay=0.0, betas=(0.9, 0.95), eps=1e-8, learning_rates=rates
    )
    with pytest.raises(ValueError, match="learning_rates"):
        Optimizers(torch.nn.Linear(2, 2), wrong, fast_bf16=False)


def test_a_rate_of_a_group_that_the_model_does_not_train_is_an_error() -> None:
    """With tied weights the head is the embedding: a rate for it would do nothing."""
    rates = OptimizerConfig(
        optimizer="adamw",
        learning_rate=0.1,
        weight_decay=0.0,
        betas=(0.9, 0.95),
        eps=1e-8,
        learning_rates={"head": 0.1},
    )
    with pytest.raises(ConfigError, match=r"that the model trains \(norm_bias, hidden\), got head; the head is tied"):
        Optimizers(torch.nn.Linear(2, 2), rates, fast_bf16=False)


@pytest.mark.parametrize(
    ("name", "ndim", "group"),
    [
        ("critic.model.norm.weight", 1, "critic"),
        ("model.layers.0.memory.bank.weight", 2, "bank"),
        ("model.layers.0.memory.router.weight", 2, "router"),
        ("model.layers.0.memory.gate.bias", 1, "memory"),
        ("model.layers.0.self_attn.q_proj.lora_A.weight", 2, "lora"),
        ("model.layers.0.self_attn.q_proj.lora_magnitude_vector.weight", 1, "lora"),
        ("model.embed_tokens.lora_rows", 2, "embedding"),
        ("model.embed_tokens.weight", 2, "embedding"),
        ("lm_head.weight", 2, "head"),
        ("score.weight", 2, "head"),
        ("model.layers.1.input_layernorm.weight", 1, "norm_bias"),
        ("model.layers.1.mlp.up_proj.weight", 2, "hidden"),
    ],
)
def test_the_first_rule_that_fits_gives_the_group(name: str, ndim: int, group: str) -> None:
    assert group_of(name, nn.Parameter(torch.zeros([2] * ndim))) == group


class Remembering(nn.Module):
    """A model with the parameter names of a base model, its adapters and a memory."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(5, 4)
        self.mlp = nn.Linear(4, 4)
        self.q_proj = nn.ModuleDict({"lora_A": nn.Linear(4, 2, bias=False), "lora_B": nn.Linear(2, 4, bias=False)})
        self.memory = nn.ModuleDict(
            {"bank": nn.Embedding(6, 4), "router": nn.Linear(4, 6, bias=False), "o_proj": nn.Linear(4, 4, bias=False)}
        )


def test_beside_adapters_and_memory_the_base_is_one_group_and_bank_and_router_follow_memory() -> None:
    model = Remembering()
    rates = {"memory": 2e-4, "lora": 1e-4, "base": 1e-5}
    settings = OptimizerConfig(
        optimizer="adamw", learning_rate=1.0, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-8, learning_rates=rates
    )
    optimizers = Optimizers(model, settings, fast_bf16=False)
    assert set(optimizers.members) == {"bank", "router", "memory", "lora", "base"}
    assert optimizers.rates == {"bank": 2e-4, "router": 2e-4, "memory": 2e-4, "lora": 1e-4, "base": 1e-5}
    decays = {g["name"]: g["weight_decay"] for g in optimizers.optimizers[0].param_groups if g["params"][0].ndim > 1}
    assert decays == {"bank": 0.0, "router": 0.0, "memory": 0.1, "lora": 0.1, "base": 0.1}
    for name in ("bank", "router", "memory", "lora", "base"):
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        for parameter in model.parameters():
            parameter.grad = None
        for parameter in optimizers.members[name].values():
            parameter.grad = torch.ones_like(parameter)
        optimizers.step(1.0)
        moved = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
        assert moved == set(optimizers.members[name]), name


def remembering() -> nn.Module:
    model = Remembering()
    del model.q_proj
    return model


def test_a_memory_that_was_added_makes_the_base_one_group_and_one_of_the_model_s_own_does_not() -> None:
    model = remembering()
    assert set(groups(model)) == {"bank", "router", "memory", "embedding", "hidden", "norm_bias"}
    model.memory.added = True
    assert set(groups(model)) == {"bank", "router", "memory", "base"}


def test_muon_takes_a_bank_and_the_matrices_of_a_memory_but_not_its_router() -> None:
    settings = OptimizerConfig(optimizer="muon", learning_rate=1.0, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-8)
    muon, adamw = Optimizers(remembering(), settings, fast_bf16=False).optimizers
    assert [g["name"] for g in muon.param_groups] == ["bank", "memory", "hidden"]
    assert {g["name"] for g in adamw.param_groups} == {"router", "embedding", "norm_bias"}


def test_layer_decay_is_gamma_to_the_distance_from_the_top() -> None:
    def factor(name: str, tied: bool = False) -> float:
        return layer_factor(name, layers=3, tied=tied, gamma=0.5)

    assert [factor(f"model.layers.{n}.mlp.up_proj.weight") for n in range(3)] == [0.25, 0.5, 1.0]
    assert (factor("model.embed_tokens.weight"), factor("model.embed_tokens.weight", tied=True)) == (0.125, 1.0)
    assert factor("lm_head.weight") == factor("model.norm.weight") == 1.0


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3, bias=False) for _ in range(3))


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_decayed_layer_moves_less_by_its_factor(optimizer: str) -> None:
    model = Stack()
    settings = OptimizerConfig(
        optimizer=optimizer, learning_rate=0.01, weight_decay=0.0, betas=(0.9, 0.95), eps=1e-8, layer_decay=0.5
    )
    optimizers = Optimizers(model, settings, fast_bf16=False)
    gradient = torch.randn(3, 3, generator=torch.Generator().manual_seed(0))
    before = [layer.weight.detach().clone() for layer in model.layers]
    for layer in model.layers:
        layer.weight.grad = gradient.clone()
    optimizers.step(1.0)
    moved = [layer.weight.detach() - old for layer, old in zip(model.layers, before, strict=True)]
    torch.testing.assert_close(4 * moved[0], moved[2], rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(2 * moved[1], moved[2], rtol=1e-3, atol=1e-6)


def test_a_layer_decay_outside_its_range_is_an_error() -> None:
    for gamma in (0.0, 1.1):
        with pytest.raises(ValueError, match=r"layer_decay: expected a number in \(0, 1\]"):
            OptimizerConfig(
                optimizer="adamw", learning_rate=1.0, weight_decay=0.0, betas=(0.9, 0.95), eps=1e-8, layer_decay=gamma
            ).check_groups()


def test_the_arithmetic_of_muons_iterations() -> None:
    model = Net()  # 8 x 8, 16 x 8 and 8 x 16; biases and tables are AdamW's
    square, wide = 4 * 8**2 * 8 + 2 * 8**3, 4 * 8**2 * 16 + 2 * 8**3
    assert Optimizers(model, config("muon"), fast_bf16=False).iteration_flops() == 5 * (square + 2 * wide)
    assert Optimizers(model, config("adamw"), fast_bf16=False).iteration_flops() == 0


@pytest.mark.parametrize(
    (
        "changes",
        "moved",
    ),  # a weight of 1 whose gradient is 0.5, at a rate of 0.01: AdamW's first step is g / (|g| + eps)
    [({}, 0.01), ({"eps": 0.5}, 0.005), ({"weight_decay": 0.2}, 0.012), ({"learning_rate": 0.1}, 0.1)],
)
def test_the_first_step_of_adamw_is_the_one_worked_out_by_hand(changes: dict[str, float], moved: float) -> None:
    values = {"optimizer": "adamw", "learning_rate": 0.01, "weight_decay": 0.0, "betas": (0.9, 0.95), "eps": 1e-8}
    model = nn.Linear(3, 2, bias=False)
    nn.init.ones_(model.weight)
    optimizers = Optimizers(model, OptimizerConfig(**(values | changes)), fast_bf16=False)  # type: ignore[arg-type]
    model.weight.grad = torch.full_like(model.weight, 0.5)
    optimizers.step(1.0)
    torch.testing.assert_close(model.weight.detach(), torch.full((2, 3), 1 - moved))


def test_weight_decay_shrinks_what_muon_moves() -> None:
    shrunk = {}
    for decay in (0.0, 0.2):
        model = nn.Linear(3, 2, bias=False)
        nn.init.ones_(model.weight)
        settings = OptimizerConfig(
            optimizer="muon", learning_rate=0.01, weight_decay=decay, betas=(0.9, 0.95), eps=1e-8
        )
        optimizers = Optimizers(model, settings, fast_bf16=False)
        model.weight.grad = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))
        optimizers.step(1.0)
        shrunk[decay] = model.weight.detach()
    torch.testing.assert_close(shrunk[0.0] - shrunk[0.2], torch.full((2, 3), 0.002))


@pytest.mark.parametrize(("optimizer", "share"), [("adamw", 0.25), ("muon", 0.5)])
def test_a_rate_found_at_another_width_is_carried_over_for_the_matrices_of_layers(
    optimizer: str, share: float, tiny_model: Transformer
) -> None:
    """A rate found at a quarter of the width moves matrices a quarter as far under AdamW, half as far under Muon."""
    width = tiny_model.config.width

    def moved(rate_width: int | None) -> dict[str, torch.Tensor]:
        model = copy.deepcopy(tiny_model)
        settings = dataclasses.replace(config(optimizer), weight_decay=0.0, rate_width=rate_width)
        optimizers = Optimizers(model, settings, fast_bf16=False)
        for number, parameter in enumerate(model.parameters()):
            parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
        optimizers.step(1.0)
        old = dict(tiny_model.named_parameters())
        return {name: parameter.detach() - old[name] for name, parameter in model.named_parameters()}

    plain, carried = moved(None), moved(width // 4)
    for name, distance in plain.items():
        expected = share if "layers" in name and distance.ndim == 2 else 1.0
        torch.testing.assert_close(carried[name], distance * expected, rtol=1e-3, atol=1e-7)
    assert all(torch.equal(a, b) for a, b in zip(plain.values(), moved(width).values(), strict=True))
    with pytest.raises(ValueError, match="rate_width: expected at least 1, got 0"):
        dataclasses.replace(config("adamw"), rate_width=0).check_groups()
