"""Parameter groups and optimizers: AdamW for everything, or Muon for hidden matrices and AdamW for the rest.

A parameter belongs to the first of these groups that matches (`group_of`): `critic` (all of PPO's value model), `bank`,
`router`, `memory` (of a memory-augmented model), `lora`, `embedding` (including tied embeddings, and rows trained by an
adapter), `head`, `norm_bias` (fewer than two dimensions), `hidden`. With adapters, or a memory added to a trained
model, the trained weights of the base model form one group, `base`. `norm_bias`, `bank`, `router` and tensors with
fewer than two dimensions get no weight decay.

The rate of layer l of L (from 1) is multiplied by gamma^(L-l) (`layer_decay`), that of an untied embedding by gamma^L,
and those of the head and a tied embedding by 1 (ULMFiT's discriminative rates, Howard & Ruder 2018, arXiv:1801.06146,
3.2, with a geometric rule).

`rate_width` is the width at which the rates were tuned. For another width, AdamW multiplies the rates of the layers'
matrices by rate_width / width (Yang et al. 2022, muP, arXiv:2203.03466, table 8: a hidden matrix). Muon's updates have
a spectral norm of 0.2 sqrt(width) times the rate, so Muon multiplies these rates by sqrt(rate_width / width).
Embedding, norms, head and adapters keep their rates. A rate tuned on a small model thus transfers to a wider one
(benchmarks/rate_transfer.py). muP's initialization and multipliers are not used, so a model stays a plain Hugging Face
model.

Muon (Jordan 2024; Liu et al. 2025, arXiv:2502.16982) follows torch.optim.Muon with `match_rms_adamw`, so AdamW's rates
apply. It handles the matrices of `hidden`, of adapters, and of a memory and its bank: with AdamW, all rows of a bank
would move together for a long time, since each row gets a similar share of the first reads. This version computes
the same updates in a different way: it orthogonalizes same-shape matrices together, and iterates in fp32 where bf16 is
only emulated and 50 times slower.

Under FSDP2 each matrix is gathered once per step, in the iteration dtype, and every rank then iterates as a single
process would; torch's Muon on DTensors communicates at every matmul. AdamW works on the local rows.
"""

import inspect
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.learning import processes
from pipeline.run.errors import ConfigError

MOST_GATHERED = 2**28  # elements that Muon orthogonalizes together: 1 GiB in float32
GROUPS = ("critic", "bank", "router", "memory", "lora", "embedding", "head", "norm_bias", "hidden", "base")
BY_MUON = ("hidden", "lora", "memory", "bank")
NO_DECAY = ("norm_bias", "bank", "router")
KEPT = ("bank", "router", "memory", "lora")  # groups with width-independent rates
LAYER = re.compile(r"\blayers\.(\d+)\.")
ParamGroup = dict[str, Any]  # torch's: "params", and options of any type


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimizer settings of a TrainingConfig."""

    optimizer: str
    learning_rate: float
    weight_decay: float
    betas: tuple[float, ...]
    eps: float
    learning_rates: dict[str, float] = field(default_factory=dict)
    """Learning rate per group; the default is `learning_rate` (for `bank` and `router`: the rate of `memory`)."""
    layer_decay: float = 1.0
    """Layer-wise decay: the rate of layer l of L is multiplied by this to the power L - l."""
    rate_width: int | None = None
    """The model width at which the rates were tuned; they are rescaled to this model's width. None: no rescaling."""

    def check_groups(self) -> None:
        """Raise ValueError for an unknown group, a negative rate, or a layer decay outside (0, 1]."""
        if not 0 < self.layer_decay <= 1:
            raise ValueError(f"layer_decay: expected a number in (0, 1], got {self.layer_decay}")
        if self.rate_width is not None and self.rate_width < 1:
            raise ValueError(f"rate_width: expected at least 1, got {self.rate_width}")
        for name, rate in self.learning_rates.items():
            if name not in GROUPS or rate < 0:
                raise ValueError(f"learning_rates: expected rates >= 0 for {', '.join(GROUPS)}; got {name}: {rate}")


def group_of(name: str, parameter: nn.Parameter) -> str:
    """The group of a trainable parameter, by its state-dict name. `groups` moves some parameters to `base`."""
    parts = name.split(".")
    if parts[0] == "critic":
        return "critic"
    for group in ("bank", "router", "memory"):
        if group in parts:
            return group
    if any(part in ("lora_A", "lora_B", "lora_magnitude_vector") for part in parts):
        return "lora"
    if "embed_tokens" in name:
        return "embedding"
    if "lm_head" in name or "score" in name:
        return "head"
    return "norm_bias" if parameter.ndim < 2 else "hidden"


def groups(model: nn.Module) -> dict[str, dict[str, nn.Parameter]]:
    """group -> {name: parameter} over the trainable parameters, each in exactly one group."""
    by_group: dict[str, dict[str, nn.Parameter]] = {name: {} for name in GROUPS}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            by_group[group_of(name, parameter)][name] = parameter
    if by_group["lora"] or any(getattr(module, "added", False) for module in model.modules()):
        for group in ("embedding", "head", "norm_bias", "hidden"):
            base = {name: p for name, p in by_group[group].items() if "lora_" not in name}
            by_group["base"] |= base
            by_group[group] = {name: p for name, p in by_group[group].items() if name not in base}
    return {name: members for name, members in by_group.items() if members}


def layer_factor(name: str, *, layers: int, tied: bool, gamma: float) -> float:
    """The layer-decay factor of the parameter `name` in a model with `layers` layers."""
    match = LAYER.search(name)
    if match is not None:
        return gamma ** (layers - 1 - int(match[1]))
    return gamma**layers if "embed_tokens" in name and not tied else 1.0


def width_factor(name: str, parameter: nn.Parameter, *, by_muon: bool, found: int | None, width: int) -> float:
    """The rate factor of the parameter `name` in a model of width `width`, for rates tuned at width `found`."""
    if found is None or LAYER.search(name) is None or parameter.ndim < 2 or group_of(name, parameter) in KEPT:
        return 1.0
    return (found / width) ** (0.5 if by_muon else 1.0)


def orthogonalise(matrices: Tensor, *, steps: int, coefficients: tuple[float, float, float], eps: float) -> Tensor:
    """Newton-Schulz iteration toward U V^T for each matrix of a stack (n, rows, columns), in the stack's dtype."""
    a, b, c = coefficients
    tall = matrices.size(-2) > matrices.size(-1)
    x = matrices.mT if tall else matrices
    x = x / x.flatten(1).norm(dim=1).clamp(min=eps)[:, None, None]
    for _ in range(steps):
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class Eager(torch.optim.Optimizer):
    """Skips torch.compile's guard, which imports the compiler on first use (0.7 CPU seconds per training stage)."""

    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)


class AdamW(Eager, torch.optim.AdamW):
    """torch.optim.AdamW without torch.compile's guard."""

    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))  # drops the guard of `step` as well


class Muon(Eager, torch.optim.Muon):
    """torch.optim.Muon with batched iterations in a configurable dtype."""

    def __init__(self, params: Iterable[ParamGroup], *, lr: float, weight_decay: float, dtype: torch.dtype) -> None:
        super().__init__(params, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        assert closure is None
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape[parameter.shape].append(parameter)
            for shape, parameters in by_shape.items():
                most = max(1, MOST_GATHERED // shape.numel())
                for first in range(0, len(parameters), most):
                    self._update(group, shape, parameters[first : first + most])

    def _update(self, group: ParamGroup, shape: torch.Size, parameters: list[nn.Parameter]) -> None:
        momentum = group["momentum"]
        updates = []
        for parameter in parameters:
            state = self.state[parameter]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
            assert parameter.grad is not None
            gradient, average = processes.local(parameter.grad), processes.local(state["momentum_buffer"])
            average.lerp_(gradient, 1 - momentum)
            update = gradient.lerp(average, momentum) if group["nesterov"] else average
            updates.append(processes.full(processes.like(update.to(self.dtype), parameter)))
        stack = torch.stack(updates)
        directions = orthogonalise(
            stack, steps=group["ns_steps"], coefficients=group["ns_coefficients"], eps=group["eps"]
        )
        rate = group["lr"] * 0.2 * max(shape) ** 0.5  # Liu et al. 2025, eq. 4: the update's RMS is AdamW's
        for parameter, direction in zip(parameters, directions, strict=True):
            rows = direction[slice(*processes.rows(parameter))].to(parameter.dtype)
            processes.local(parameter).mul_(1 - group["lr"] * group["weight_decay"]).add_(rows, alpha=-rate)


def _rate_of(group: str, config: OptimizerConfig) -> float:
    """The configured rate of a group, before layer decay and schedule."""
    rates = config.learning_rates
    if group in ("bank", "router") and group not in rates:
        group = "memory"
    return rates.get(group, config.learning_rate)


class Optimizers:
    """One or two torch optimizers that step together, with states keyed by parameter name."""

    def __init__(self, model: nn.Module, config: OptimizerConfig, *, fast_bf16: bool) -> None:
        if config.optimizer not in ("adamw", "muon"):
            raise ValueError(f"optimizer: expected adamw or muon, got {config.optimizer!r}")
        self.members = groups(model)
        self._names = {id(p): name for members in self.members.values() for name, p in members.items()}
        config.check_groups()
        valid = {*self.members} | ({"memory"} if {"bank", "router"} & {*self.members} else set())
        if unused := sorted(set(config.learning_rates) - valid):
            raise ConfigError(
                f"learning_rates: expected groups that the model trains ({', '.join(self.members)}), got {unused[0]}"
                + ("; the head is tied to the embedding" if unused == ["head"] else "")
            )
        self.rates = {name: _rate_of(name, config) for name in self.members}
        muon, adamw = self._param_groups(model, config)
        self.optimizers: list[torch.optim.Optimizer] = []
        if muon:
            dtype = torch.bfloat16 if fast_bf16 else torch.float32
            decay = config.weight_decay
            self.optimizers.append(Muon(muon, lr=config.learning_rate, weight_decay=decay, dtype=dtype))
        if adamw:
            betas = (config.betas[0], config.betas[1])
            adam = AdamW(adamw, lr=config.learning_rate, betas=betas, eps=config.eps, fused=True)
            self.optimizers.append(adam)

    def _param_groups(self, model: nn.Module, config: OptimizerConfig) -> tuple[list[ParamGroup], list[ParamGroup]]:
        """torch's parameter groups for Muon and AdamW, one per rate and decay."""
        names = [name for name, _ in model.named_parameters()]
        layers = 1 + max((int(match[1]) for name in names if (match := LAYER.search(name))), default=-1)
        tied = not any("lm_head" in name for name in names)
        width = next((p.shape[1] for name, p in model.named_parameters() if "embed_tokens" in name), 1)
        param_groups: dict[tuple[bool, str, float, bool], ParamGroup] = {}
        for group, members in self.members.items():
            for name, parameter in members.items():
                by_muon = config.optimizer == "muon" and group in BY_MUON and parameter.ndim == 2
                decays = group not in NO_DECAY and parameter.ndim >= 2
                factor = layer_factor(name, layers=layers, tied=tied, gamma=config.layer_decay)
                factor *= width_factor(name, parameter, by_muon=by_muon, found=config.rate_width, width=width)
                empty: ParamGroup = {
                    "params": [],
                    "lr": self.rates[group],
                    "rate": self.rates[group] * factor,
                    "weight_decay": config.weight_decay if decays else 0.0,
                    "name": group,
                }
                param_groups.setdefault((by_muon, group, factor, decays), empty)["params"].append(parameter)
        muon = [param_group for (by_muon, *_), param_group in param_groups.items() if by_muon]
        return muon, [param_group for (by_muon, *_), param_group in param_groups.items() if not by_muon]

    def iteration_flops(self) -> float:
        """FLOPs of Muon's iterations per update; 0 without Muon. Each iteration has three matmuls."""
        flops = 0.0
        for optimizer in self.optimizers:
            for group in optimizer.param_groups if isinstance(optimizer, Muon) else []:
                for small, large in (sorted(parameter.shape) for parameter in group["params"]):
                    flops += group["ns_steps"] * (4 * small**2 * large + 2 * small**3)
        return flops

    def step(self, factor: float) -> None:
        """One update at `factor` times the configured rates. Drops the gradients."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["rate"] * factor
            optimizer.step()
        self.zero_grad()

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for members in self.members.values():
            for parameter in members.values():
                parameter.grad = None

    def state_tensors(self) -> dict[str, Tensor]:
        """`<parameter>/<state>` -> tensor, for safetensors."""
        tensors: dict[str, Tensor] = {}
        for optimizer in self.optimizers:
            for parameter, state in optimizer.state.items():
                for key, value in state.items():
                    if isinstance(value, Tensor):
                        tensors[f"{self._names[id(parameter)]}/{key}"] = value
        return tensors

    def load_state_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Load the result of `state_tensors()`. Raises ValueError for a parameter that is not trained here."""
        by_name = {name: p for members in self.members.values() for name, p in members.items()}
        owner = {id(p): o for o in self.optimizers for g in o.param_groups for p in g["params"]}
        for full_name, value in tensors.items():
            name, _, key = full_name.rpartition("/")
            if name not in by_name:
                raise ValueError(f"the optimizer state contains {name!r}, which is not trained here")
            parameter = by_name[name]
            owner[id(parameter)].state[parameter][key] = value.to(parameter.device).clone()
