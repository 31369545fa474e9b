"""Each gate fires for its fault, names what to do, and is silent for a healthy run."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from pipeline.learning import gates
from pipeline.learning.optim import groups
from pipeline.model.config import ModelConfig
from pipeline.model.transformer import Transformer
from pipeline.run.errors import GateError


class Leaky(nn.Module):
    """Logits that see the mean over the whole row."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.table = nn.Embedding(config.vocab_size, config.vocab_size)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        return x + x.mean(dim=1, keepdim=True)


def test_a_batch_without_targets_is_refused() -> None:
    gates.trainable_tokens(1, "tools")
    with pytest.raises(GateError, match=r"tools: .* no tokens to train on; check the loss masks of the data"):
        gates.trainable_tokens(0, "tools")


def test_a_model_that_sees_the_future_is_refused_and_ours_is_not(tiny_model: Transformer) -> None:
    gates.causal(tiny_model)
    assert tiny_model.training
    with pytest.raises(GateError, match=r"leaks future tokens; check pipeline/model/layers\.py"):
        gates.causal(Leaky(tiny_model.config))
    with torch.no_grad():
        dict(tiny_model.named_parameters())["model.layers.1.mlp.down_proj.weight"][0, :2] = math.nan
    with pytest.raises(GateError, match=r"2 of the \d+ values of \S*layers\.1\.mlp\.down_proj\.weight are not finite"):
        gates.causal(tiny_model)


def test_a_context_shorter_than_the_probe_is_probed_too(tiny_model: Transformer) -> None:
    from dataclasses import replace

    gates.causal(Transformer(replace(tiny_model.config, max_context=8), torch.Generator().manual_seed(0)))


def test_a_bidirectional_model_may_see_the_future(tiny_model: Transformer) -> None:
    from dataclasses import replace

    gates.causal(Leaky(replace(tiny_model.config, attention="bidirectional")))


def test_reading_the_data_more_than_four_times_is_said_of_causal_models(
    tiny_model: Transformer, capsys: pytest.CaptureFixture[str]
) -> None:
    from dataclasses import replace

    masked = Transformer(replace(tiny_model.config, attention="bidirectional"), torch.Generator().manual_seed(0))
    gates.repeated(4.0, tiny_model, "code")
    gates.repeated(8.0, masked, "diffusion")  # masked models gain from more passes
    assert capsys.readouterr().err == ""
    gates.repeated(6.25, tiny_model, "code")
    assert "warning: code: the run makes 6.2 passes over its data; beyond 4" in capsys.readouterr().err


def test_the_first_loss_from_scratch_is_that_of_a_uniform_guess(
    tiny_model: Transformer, capsys: pytest.CaptureFixture[str]
) -> None:
    uniform = math.log(320)  # 5.768
    for nats in (uniform - 0.49, uniform + 0.49):
        gates.first_loss(nats, tiny_model, from_scratch=True)
    for nats in (uniform - 0.51, uniform + 0.51, 0.0):
        with pytest.raises(
            GateError, match=r"must start within 0\.5 of ln V = 5\.768: the initialization or the targets"
        ):
            gates.first_loss(nats, tiny_model, from_scratch=True)
    gates.first_loss(0.1, tiny_model, from_scratch=False)
    assert capsys.readouterr().err == ""
    gates.first_loss(6.0, tiny_model, from_scratch=False)
    assert "does the base model use this tokenizer?" in capsys.readouterr().err


def test_an_untrained_model_of_ours_passes_the_first_loss() -> None:
    config = ModelConfig(
        vocab_size=512,
        width=64,
        layers=2,
        heads=2,
        kv_heads=1,
        head_dim=32,
        d_ff=96,
        max_context=64,
        rope_theta=1e4,
        tied=True,
    )
    model = Transformer(config, torch.Generator().manual_seed(3))
    ids = torch.randint(0, 512, (4, 64), generator=torch.Generator().manual_seed(0))
    targets = torch.randint(0, 512, (4, 64), generator=torch.Generator().manual_seed(1))
    nats = -model(ids).log_softmax(-1).gather(2, targets[..., None]).mean().detach()
    gates.first_loss(float(nats), model, from_scratch=True)


def with_gradients(model: nn.Module, value: float = 1.0) -> nn.Module:
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, value)
    return model


def test_gradients_everywhere_pass(tiny_model: Transformer) -> None:
    model = with_gradients(tiny_model)
    gates.gradients(groups(model), model)


def test_a_group_without_gradient_is_named(tiny_model: Transformer) -> None:
    model = with_gradients(tiny_model)
    members = groups(model)
    for parameter in members["hidden"].values():
        parameter.grad = None
    with pytest.raises(GateError, match=r"group hidden: no gradient reaches model\.layers\.0\..*freeze it"):
        gates.gradients(members, model)


def test_an_infinite_gradient_is_named_also_when_clipping_made_zeros_of_the_others(tiny_model: Transformer) -> None:
    model = with_gradients(tiny_model)
    members = groups(model)
    next(iter(members["norm_bias"].values())).grad = torch.full((32,), math.inf)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert list(members).index("embedding") < list(members).index("norm_bias")
    assert not torch.stack([p.grad.abs().max() for p in members["embedding"].values() if p.grad is not None]).any()
    with pytest.raises(
        GateError, match=r"group norm_bias: the first gradient is not finite; try runtime\.precision=fp32"
    ):
        gates.gradients(members, model)


def test_a_frozen_weight_with_a_gradient_is_named(tiny_model: Transformer) -> None:
    model = with_gradients(tiny_model)
    model.get_parameter("model.norm.weight").requires_grad_(False)
    with pytest.raises(GateError, match=r"model\.norm\.weight is frozen but has a gradient; freeze it before"):
        gates.gradients(groups(model), model)


def rows(*losses: tuple[int, float]) -> list[dict[str, Any]]:
    return [{"step": step, "loss": loss} for step, loss in losses] + [{"step": 999, "val/loss": 0.0}]


@pytest.mark.parametrize(
    ("losses", "warned"),
    [
        (rows((1, 5.0), (50, 4.95), (100, 4.91)), True),  # fell by 1.8% at a tenth of 1,000
        (rows((1, 5.0), (50, 4.95), (100, 4.89)), False),  # 2.2%
        (rows((1, 5.0), (95, 5.0), (105, 5.0)), True),  # the row that crosses the tenth
        (rows((1, 5.0), (100, 5.0), (110, 5.0)), False),  # warned before
        (rows((1, 5.0), (50, 5.0)), False),  # not there yet
    ],
)
def test_a_loss_that_does_not_fall_is_said_once(
    losses: list[dict[str, Any]], warned: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    gates.falling(losses, 1000, "language")
    assert ("warning: language: the loss fell by less than 2%" in capsys.readouterr().err) == warned
