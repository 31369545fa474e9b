"""Distributed training: how the processes of a run split the work and communicate. A no-op with a single process.

`Ranks` represents one of `world` processes. Accelerate creates the process group and wraps the model to average
gradients (DDP), or `shard` shards it (FSDP2). Control values use a gloo side group, so they never wait behind a GPU
queue. A sharded model's forward pass is a collective, so all ranks must make the same number of passes (`evened`,
`dealt`), and in the end only rank 0 has the complete model (`finish`).

FSDP2 shards every weight, gradient and moment by rows across the processes (Zhao et al. 2023, arXiv:2304.11277, version
2), with one call to torch's `fully_shard` for CPU (gloo) and CUDA (NCCL):

    shard(model, ...)       in place: one group per block, the rest in a root group; each pass gathers the weights
    whole_again(...)        in place, back to a plain model on rank 0 only, one tensor at a time
    published(model)        complete weights by name, one at a time; `Copies` of a policy are refreshed from them
    local, full, rows       of a weight: this rank's rows, the complete tensor, and the range of this rank's rows

FSDP2 is configured by Accelerate's environment variables: `accelerate launch` sets them from conf/launch/fsdp2.yaml,
and run/processes.py sets them for `STAGECOACH_LAUNCH=fsdp2:2`. The math is that of a single process: weights are
communicated in float32 and cast by autocast as usual. There is no MixedPrecisionPolicy, which would run norms and
embeddings in half precision. Separate frozen models (a reference) are not sharded: each process has a full copy.

If a process dies silently, the others exit too, even if no collective notices (`watch_peers`). Not guaranteed: that
they notice before gloo or NCCL does when a machine loses its network. Not supported with FSDP2: fp16 (rejected, because
the scaler is lost: huggingface/accelerate #4289), and models that run methods other than `forward`. Tested on a CPU
with gloo; CUDA, NCCL and `fsdp_offload_params` are untested.
"""

import atexit
import contextlib
import copy
import hmac
import itertools
import math
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, TypeGuard, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._foreach_utils import _device_has_foreach_support

from pipeline.model.heads import ActorCritic
from pipeline.model.layers import Block
from pipeline.run import device as run_device
from pipeline.run.errors import ConfigError, GateError

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch.distributed.tensor import DTensor

T = TypeVar("T")
M = TypeVar("M", bound=nn.Module)
CONNECT_SECONDS = 10.0
GRACE_SECONDS = 30.0  # from a peer's death to the exit of processes that no collective has notified
ON_DEVICE = 0.5  # share of a device's memory; a smaller model returns to the device after training


class Ranks:
    """This process, one of `world`."""

    is_watched: ClassVar[bool] = False  # once per process, regardless of the number of runs

    def __init__(self, precision: str, folder: str) -> None:
        """`folder` is the keyed work folder. Raises ConfigError if the ranks disagree on the key."""
        self.rank, self.world = run_device.rank(), run_device.world_size()
        self.accelerator: Accelerator | None = None
        self.side: dist.ProcessGroup | None = None
        self.sharding = asked() if self.world > 1 else None
        self._backups: list[ModuleBackup] = []
        if self.sharding and run_device.hardware(precision).precision == "fp16":
            raise ConfigError(
                "runtime.precision: FSDP2 cannot train in fp16 (the loss scaler would be lost); use bf16 or fp32"
            )
        if self.world > 1:
            self.accelerator = run_device.accelerator(precision, folder)
            side = dist.new_group(backend="gloo")
            assert isinstance(side, dist.ProcessGroup)  # every rank is a member
            self.side = side
            if not Ranks.is_watched:
                Ranks.is_watched = True
                watch_peers(self)
            self._check_key(Path(folder).name)

    def _check_key(self, key: str) -> None:
        keys = self.gather(key)
        if set(keys) != {key}:
            other = next(rank for rank, other_key in enumerate(keys) if other_key != key)
            raise ConfigError(
                f"rank {self.rank} computes key {key}, but rank {other} computes {keys[other]}; expected the same"
                " parameters, code and input files on all processes. With several machines, use one checkout on a"
                " shared file system, and start the other machines once the stage's inputs exist"
            )

    def share_of(self, rows: int, stage: str) -> int:
        """The maximum rows per step on a rank. Raises ConfigError if some rank would have none."""
        if rows < self.world:
            raise ConfigError(
                f"{stage}: {rows} rows per step are too few for {self.world} processes; use a larger batch"
            )
        return -(-rows // self.world)

    def place(self, model: nn.Module, device: torch.device) -> nn.Module:
        """Move the model, or this rank's shard, to its device. Raises GateError like `check_equal_weights`."""
        if self.sharding is None:
            return model.to(device)
        self.check_equal_weights(model)  # once sharded, unequal ranks would silently form a wrong model
        self._backups = shard(model, self.sharding, device)
        return model

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model, wrapped so that its backward pass averages gradients over the ranks."""
        return model if self.accelerator is None or self.sharding else self.accelerator.prepare(model)

    def no_sync(self, model: nn.Module, *, skip: bool) -> contextlib.AbstractContextManager[object]:
        """Keep gradients local for this micro-batch if `skip`."""
        if self.sharding:
            from torch.distributed.fsdp import FSDPModule  # imported locally: takes 0.4 s, needed only for sharding

            assert isinstance(model, FSDPModule)
            model.set_requires_gradient_sync(self.sharding.reduces_each_pass or not skip)
            return contextlib.nullcontext()
        if self.accelerator is None or not skip:
            return contextlib.nullcontext()
        return self.accelerator.no_sync(model)

    def evened(self, batches: list[T]) -> list[tuple[T, bool]]:
        """A step's micro-batches, and whether each counts. Sharded ranks must make the same number of passes."""
        counted = [(batch, True) for batch in batches]
        if self.sharding is None:
            return counted
        missing = int(self.greatest(len(batches))) - len(batches)
        return counted + [(batches[-1], False)] * missing

    def dealt(self, batches: Iterable[T]) -> Iterator[tuple[T | None, bool]]:
        """Deal evaluation batches in rounds of `world`: this rank's batch per round, and whether it counts.

        A rank without a batch in the last round gets None or, with a sharded model, another rank's batch for a pass
        that does not count.
        """
        remaining = iter(batches)
        while group := list(itertools.islice(remaining, self.world)):
            mine = self.rank < len(group)
            yield group[self.rank] if mine else group[0] if self.sharding else None, mine

    def control(self, stop: int, save: bool, counts: dict[str, int]) -> tuple[int, bool, dict[str, int]]:
        """Agree on (stop signal, save now, summed counts) before a step. Every rank passes the same count names."""
        names = sorted(counts)
        values = torch.tensor([int(save), *(counts[name] for name in names)], dtype=torch.int64)
        signal = torch.tensor([stop], dtype=torch.int64)
        if self.world > 1:
            dist.all_reduce(values, group=self.side)
            dist.all_reduce(signal, op=dist.ReduceOp.MAX, group=self.side)
        return int(signal), bool(values[0]), dict(zip(names, values[1:].tolist(), strict=True))

    def greatest(self, value: float) -> float:
        """The maximum of a number over all ranks."""
        if self.world == 1:
            return value
        tensor = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.side)
        return float(tensor)

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, in order. Also used for rollouts (ids and log-probabilities, no weights)."""
        values = [value] * self.world
        if self.world > 1:
            dist.all_gather_object(values, value, group=self.side)
        return values

    def sum_tensor(self, values: Tensor) -> Tensor:
        """A CPU tensor, summed over all ranks."""
        if self.world > 1:
            dist.all_reduce(values, group=self.side)
        return values

    def sum_float(self, value: float) -> float:
        """A number, summed over all ranks."""
        return value if self.world == 1 else float(self.sum_tensor(torch.tensor(value, dtype=torch.float64)))

    def gradient_norm(self, model: nn.Module, limit: float) -> float:
        """The global gradient norm. Clips the gradients to `limit` if `limit` is above 0."""
        parameters = [p for p in model.parameters() if p.grad is not None]
        gradients = [p.grad for p in parameters if p.grad is not None]
        foreach = all(_device_has_foreach_support(gradient.device) for gradient in gradients)  # else torch raises
        total = nn.utils.get_total_norm(gradients, foreach=foreach)
        norm = float(full(total))
        if limit > 0 and math.isfinite(norm):  # else one bad gradient would corrupt all others
            nn.utils.clip_grads_with_norm_(parameters, limit, total, foreach=foreach)
        return norm

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.world > 1:
            dist.barrier(group=self.side)

    def check_equal_weights(self, model: nn.Module) -> None:
        """Raise GateError if the ranks start from different weights. Sharded models are checked earlier (`place`)."""
        if self.world == 1 or any(is_sharded(p) for p in model.parameters()):
            return
        mine = torch.stack([p.detach().double().sum().cpu() for p in model.parameters()])
        first = mine.clone()
        dist.broadcast(first, src=0, group=self.side)
        if not torch.equal(first, mine):
            raise GateError(
                f"rank {self.rank} starts from different weights than rank 0; check the model files on each node"
            )

    def check_different_rows(self, mine: np.ndarray) -> None:
        """Raise GateError if two ranks would train on the same row in the first step."""
        seen: dict[int, int] = {}
        for rank, rows in enumerate(self.gather(mine.tolist())):
            for row in rows:
                if seen.setdefault(row, rank) != rank:
                    raise GateError(
                        f"ranks {seen[row]} and {rank} both read row {row}: was each process launched with its own"
                        " rank?"
                    )

    def finish(self, model: nn.Module, device: torch.device, *, last: bool = True) -> None:
        """End all processes except rank 0; only rank 0, with a complete model, evaluates and writes outputs.

        A sharded model is gathered in rank 0's host memory, and moved to the device if it takes less than half of the
        device's memory. After a run that is not the `last`, all ranks continue, each with a complete model.
        """
        if self.sharding:
            keep = self.rank == 0 or not last
            whole_again(model, self._backups, keep=keep)
            num_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
            if keep and num_bytes < ON_DEVICE * run_device.total_memory(device):
                model.to(device)
        if self.world > 1:
            self.barrier()
            if last:
                self.leave()

    def leave(self) -> None:
        """Destroy the process group. Raises SystemExit(0) on all ranks but the first."""
        dist.destroy_process_group()
        if self.rank:
            raise SystemExit(0)


# -- peers that die ----------------------------------------------------------------------------------------------------


_connections: list[socket.socket] = []  # connections to other processes, open until this one exits


def watch_peers(ranks: Ranks) -> None:
    """Exit this process with code 1 if another dies silently. All ranks must call this once.

    Each rank keeps a connection to rank 0 and announces a clean exit on it; the system closes the connection of a
    process that dies. The others then have GRACE_SECONDS to fail with a collective's error, which is more informative.
    If a firewall blocks connections, nothing is watched.
    """
    server, offer = None, (0, b"")
    if ranks.rank == 0:
        with contextlib.suppress(OSError):  # the address may be valid only on other machines
            server = socket.create_server((os.environ["MASTER_ADDR"], 0))
            offer = (server.getsockname()[1], secrets.token_bytes(16))
    port, token = ranks.gather(offer)[0]
    atexit.register(_say_farewell)
    if server is not None:
        threading.Thread(target=_accept_peers, args=(server, token, ranks.world - 1), daemon=True).start()
    elif port:
        threading.Thread(target=_join_first, args=(port, token), daemon=True).start()


def _accept_peers(server: socket.socket, token: bytes, count: int) -> None:
    """Accept connections until `count` of them have presented the token."""
    with server:
        while count:
            connection, _ = server.accept()
            connection.settimeout(CONNECT_SECONDS)
            with contextlib.suppress(OSError):
                if hmac.compare_digest(connection.recv(len(token), socket.MSG_WAITALL), token):
                    count -= 1
                    threading.Thread(target=_wait_on, args=(connection,), daemon=True).start()
                    continue
            connection.close()


def _join_first(port: int, token: bytes) -> None:
    with contextlib.suppress(OSError):
        connection = socket.create_connection((os.environ["MASTER_ADDR"], port), CONNECT_SECONDS)
        connection.sendall(token)
        _wait_on(connection)


def _wait_on(connection: socket.socket) -> None:
    connection.settimeout(None)
    _connections.append(connection)
    try:
        farewell = connection.recv(1)
    except OSError:
        farewell = b""
    if not farewell:
        time.sleep(GRACE_SECONDS)
        sys.stderr.write(
            f"another process of this run is gone: it closed its connection to rank {run_device.rank()}."
            " Rerun the same command to resume\n"
        )
        sys.stderr.flush()
        os._exit(1)  # the main thread is blocked on the dead process


def _say_farewell() -> None:
    for connection in _connections:
        with contextlib.suppress(OSError):
            connection.sendall(b".")


# -- sharding ----------------------------------------------------------------------------------------------------------


HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called",
)


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """How weights are sharded: `fsdp_config` in the launch file."""

    # free a block's weights after its forward pass (ZeRO-3); false: keep them for the backward pass (ZeRO-2)
    reshard: bool
    offload: bool  # keep shards and optimizer states in host memory

    @property
    def reduces_each_pass(self) -> bool:
        """Whether gradients are reduce-scattered after every micro-batch. Otherwise they accumulate unsharded, which
        takes more memory, and are reduce-scattered once.
        """
        return self.reshard


def asked() -> Sharding | None:
    """The sharding set by Accelerate's environment variables, if any. Raises ConfigError for FSDP1."""
    if not _flag("ACCELERATE_USE_FSDP"):
        return None
    version = os.environ.get("FSDP_VERSION", "1")
    if version != "2":
        raise ConfigError(f"fsdp_config: expected `fsdp_version: 2`, got {version}; use conf/launch/fsdp2.yaml")
    return Sharding(reshard=_flag("FSDP_RESHARD_AFTER_FORWARD", "true"), offload=_flag("FSDP_OFFLOAD_PARAMS"))


def _flag(name: str, default: str = "false") -> bool:
    return os.environ.get(name, default).lower() in ("true", "1")


@dataclass(frozen=True)
class ModuleBackup:
    """A module before sharding: its class, hooks and attribute names."""

    module: nn.Module
    kind: type[nn.Module]
    hooks: dict[str, object]
    names: frozenset[str]


def shard(model: nn.Module, settings: Sharding, device: torch.device) -> list[ModuleBackup]:
    """Shard the weights of `model` in place, block by block, so no device ever has all weights.

    Returns the backups for `whole_again`.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

    if any(not parameter.is_floating_point() for parameter in model.parameters()):
        raise ConfigError("runtime.base_weights: FSDP2 cannot shard weights in NF4; use bf16")
    owners = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    assert len(owners) == len(list(model.named_parameters())), (
        "a weight with two names would be sharded twice: tie it on read"
    )
    backups = [
        ModuleBackup(
            module, type(module), {h: copy.copy(module.__dict__[h]) for h in HOOKS}, frozenset(module.__dict__)
        )
        for module in model.modules()
    ]
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = CPUOffloadPolicy() if settings.offload and device.type != "cpu" else OffloadPolicy()
    own = [model.actor, model.critic] if isinstance(model, ActorCritic) else []  # each of the two also runs separately
    for module in [*(m for m in model.modules() if isinstance(m, Block)), *own, model]:
        fully_shard(module, mesh=mesh, reshard_after_forward=settings.reshard, offload_policy=policy)
    if not settings.reshard:
        model.register_forward_hook(_reshard_after_inference)
    return backups


def _reshard_after_inference(model: nn.Module, _inputs: object, _output: object) -> None:
    """Free the weights gathered by a no-grad pass: no backward pass does, and the next pass would use stale weights."""
    if not torch.is_grad_enabled():
        from torch.distributed.fsdp import FSDPModule

        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


@torch.no_grad()
def whole_again(model: nn.Module, backups: list[ModuleBackup], *, keep: bool) -> None:
    """Restore plain modules, with complete weights in host memory if `keep`, else empty ones. All ranks must call this.

    Gathers one tensor at a time, so no device ever has all weights. Modules stay the same objects.
    """
    for backup in backups:
        module = backup.module
        whole: dict[str, nn.Parameter] = {}
        for name, parameter in module.named_parameters(recurse=False):
            gathered = full(parameter.detach())
            data = gathered.new_empty(gathered.shape if keep else 0, device="cpu")
            if keep:
                data.copy_(gathered)  # may be a view of a larger storage, with padding rows for the last rank
            whole[name] = nn.Parameter(data, requires_grad=parameter.requires_grad)
        module.__class__ = backup.kind
        module.__dict__.update({name: copy.copy(hooks) for name, hooks in backup.hooks.items()})
        for name in set(module.__dict__) - backup.names:
            del module.__dict__[name]
        for name, parameter in whole.items():
            module.register_parameter(name, parameter)


def published(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield complete weights by name. A collective for a sharded model, so all ranks must iterate to the end."""
    for name, parameter in model.named_parameters():
        yield name, full(parameter.detach())


class Copies:
    """Complete local copies that track the weights of FSDP2-sharded models. Passes through them are not collectives,
    so ranks may sample and score different numbers of rows. Without sharding, the models themselves are used.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._needed = ranks.sharding is not None
        self._pairs: list[tuple[nn.Module, nn.Module]] = []  # copy, trained

    def of(self, model: M, prepare: Callable[[M], M] = lambda copied: copied) -> M:
        """The copy that tracks `model`, which must not be sharded yet; `prepare` may change a copy's dtypes."""
        if not self._needed:
            return model
        whole = prepare(copy.deepcopy(model).requires_grad_(False))
        self._pairs.append((whole, model))
        return whole

    @torch.no_grad()
    def refresh(self) -> None:
        """Update the copies to the current weights. While the models are sharded, all ranks must call it together."""
        for whole, trained in self._pairs:
            own = dict(whole.named_parameters())
            for name, weight in published(trained):
                own[name].copy_(weight)


def is_sharded(tensor: Tensor) -> "TypeGuard[DTensor]":
    """Whether this rank has only some of the tensor's rows."""
    if type(tensor) in (Tensor, nn.Parameter):
        return False
    from torch.distributed.tensor import DTensor  # imported locally: takes a second, needed only for sharding

    return isinstance(tensor, DTensor)


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor, sharing its memory; a plain tensor is returned as is."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def full(tensor: Tensor) -> Tensor:
    """The complete tensor. For a sharded tensor this is a collective, so all ranks must call it."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def rows(tensor: Tensor) -> tuple[int, int]:
    """[first, last) of this rank's rows; all rows of a plain tensor."""
    if not is_sharded(tensor):
        return 0, len(tensor) if tensor.ndim else 1
    share = -(-len(tensor) // tensor.device_mesh.size())  # like torch.chunk: the last ranks may have fewer, or none
    first = min(len(tensor), tensor.device_mesh.get_local_rank() * share)
    last = min(len(tensor), first + share)
    assert last - first == len(tensor.to_local()), (tensor.shape, first, last)
    return first, last


def like(part: Tensor, parameter: Tensor) -> Tensor:
    """Wrap `part`, this rank's rows of a tensor shaped like `parameter`, with the sharding of `parameter`."""
    if not is_sharded(parameter):
        return part
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        part,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
