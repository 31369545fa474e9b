"""FSDP2: every weight, gradient and moment is cut by rows over the processes (Zhao et al. 2023, arXiv:2304.11277, version 2).

    shard(model, ...)       in place: each block a group, the rest the root's; weights are gathered for each pass
    whole_again(...)        in place back to a plain model, on rank 0 alone, one tensor at a time
    local, full, rows       what of a weight lies here, all of it, and which rows these are

One call of torch's `fully_shard` for CPU (gloo) and CUDA (NCCL). It is asked for by the variables that `accelerate launch`
sets from conf/launch/fsdp2.yaml, and launch.py for `STAGECOACH_LAUNCH=fsdp2:2`. The mathematics is that of one process: weights
travel in float32 and autocast casts them where it would, so there is no MixedPrecisionPolicy: with one, norms and embeddings
would compute in half precision. Frozen models apart (a reference) are not cut: each process holds them whole.

Not promised: fp16 (the scaler is lost, huggingface/accelerate #4289: refused), streams that the policy fills itself, models
that run other methods than `forward`. Tried on a CPU with gloo; CUDA, NCCL and `fsdp_offload_params` are untested.
"""

import copy
import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from pipeline.errors import ConfigError
from pipeline.model.layers import Block

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks",
         "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
         "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs", "_forward_hooks_always_called")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """How weights are cut: `fsdp_config` of the launch file."""

    reshard: (
        bool  # free a block's weights after its forward pass (ZeRO-3); false keeps them for the backward pass (ZeRO-2)
    )
    offload: bool  # shards and optimiser live in the machine's memory

    @property
    def reduces_each_pass(self) -> bool:
        """Whether gradients are cut after every micro-batch. Where memory is no matter they are summed whole and cut once."""
        return self.reshard


def asked() -> Sharding | None:
    """What Accelerate's variables ask for. Raises ConfigError for FSDP's first version."""
    if not _flag("ACCELERATE_USE_FSDP"):
        return None
    version = os.environ.get("FSDP_VERSION", "1")
    if version != "2":
        raise ConfigError(f"fsdp_config: expected fsdp_version: 2, got {version}; use conf/launch/fsdp2.yaml")
    return Sharding(reshard=_flag("FSDP_RESHARD_AFTER_FORWARD", "true"), offload=_flag("FSDP_OFFLOAD_PARAMS"))


def _flag(name: str, default: str = "false") -> bool:
    return os.environ.get(name, default).lower() in ("true", "1")


@dataclass(frozen=True)
class Plain:
    """What a module was before it was cut: its class, its hooks, the names of its attributes."""

    module: nn.Module
    kind: type[nn.Module]
    hooks: dict[str, Any]
    names: frozenset[str]


def shard(model: nn.Module, settings: Sharding, device: torch.device) -> list[Plain]:
    """Cut the weights of `model` in place, block by block, so that no device ever holds all; what `whole_again` needs."""
    owners = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    assert len(owners) == len(list(model.named_parameters())), (
        "a weight under two names would be cut twice: tie by reading"
    )
    before = [
        Plain(module, type(module), {h: copy.copy(module.__dict__[h]) for h in HOOKS}, frozenset(module.__dict__))
        for module in model.modules()
    ]
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = CPUOffloadPolicy() if settings.offload and device.type != "cpu" else OffloadPolicy()
    for module in [*(m for m in model.modules() if isinstance(m, Block)), model]:
        fully_shard(module, mesh=mesh, reshard_after_forward=settings.reshard, offload_policy=policy)
    if not settings.reshard:
        model.register_forward_hook(_put_back)
    return before


def _put_back(model: nn.Module, _inputs: Any, _output: Any) -> None:
    """No backward pass frees what a pass without gradients has gathered, and the next one would compute with old weights."""
    if not torch.is_grad_enabled():
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def synchronise(model: nn.Module, reduce: bool) -> None:
    """Whether the backward passes to come reduce and cut the gradients, or keep them whole on this rank."""
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(reduce)


@torch.no_grad()
def whole_again(model: nn.Module, before: list[Plain], *, keep: bool) -> None:
    """Plain modules with whole weights in the machine's memory where `keep`; elsewhere empty ones. All ranks call it.

    One tensor is gathered at a time: no device ever holds all. Modules stay the objects they were.
    """
    for plain in before:
        module = plain.module
        whole: dict[str, nn.Parameter] = {}
        for name, parameter in module.named_parameters(recurse=False):
            gathered = full(parameter.detach())
            data = gathered.cpu() if keep else gathered.new_empty(0, device="cpu")
            whole[name] = nn.Parameter(data, requires_grad=parameter.requires_grad)
        module.__class__ = plain.kind
        module.__dict__.update({name: copy.copy(hooks) for name, hooks in plain.hooks.items()})
        for name in set(module.__dict__) - plain.names:
            del module.__dict__[name]
        for name, parameter in whole.items():
            module.register_parameter(name, parameter)


def is_sharded(tensor: Tensor) -> bool:
    """Whether only some rows of it lie here."""
    return isinstance(tensor, DTensor)


def local(tensor: Tensor) -> Tensor:
    """The part that lies here, sharing its memory; all of a plain tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full(tensor: Tensor) -> Tensor:
    """All of a tensor: one collective for one that is cut, which all ranks must call."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def rows(tensor: Tensor) -> tuple[int, int]:
    """[first, last) of the rows that lie here; of a plain tensor all."""
    if not isinstance(tensor, DTensor):
        return 0, len(tensor) if tensor.ndim else 1
    share = -(-len(tensor) // tensor.device_mesh.size())  # as torch.chunk cuts: the last ranks may have fewer, or none
    first = min(len(tensor), tensor.device_mesh.get_local_rank() * share)
    last = min(len(tensor), first + share)
    assert last - first == len(tensor.to_local()), (tensor.shape, first, last)
    return first, last


def like(part: Tensor, parameter: Tensor) -> Tensor:
    """This rank's rows of something that has the shape of `parameter`, as it is cut."""
    if not isinstance(parameter, DTensor):
        return part
    return DTensor.from_local(part, parameter.device_mesh, parameter.placements, run_check=False, shape=parameter.shape,
                              stride=parameter.stride())  # fmt: skip
