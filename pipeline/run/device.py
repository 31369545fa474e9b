"""What this process runs on: device, precision, threads, ranks, seeds. The only place that asks torch what it has.

Nothing here is a parameter of an experiment: it is decided from the machine and the `runtime` block, and recorded by
`tracking`. torch is imported inside the functions because the data stages start worker processes that hash and seed but
never touch a tensor, and the import costs each of them seconds.

Not promised: equal bits between machines, or between thread counts. Equal runs on one machine with the same thread
count are bit-equal on CPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.run.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator


def stable_hash(*parts: int | str) -> int:
    """64 bits of blake2b over the parts, each with its type: equal for any process, locale or hash seed."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(f"{type(part).__name__}:{part}\0".encode())
    return int.from_bytes(digest.digest(), "little")


def generator(*parts: int | str) -> torch.Generator:
    """A CPU generator seeded by the parts, so that what it draws is a function of their values alone."""
    import torch

    return torch.Generator().manual_seed(stable_hash(*parts) % 2**63)


def seed_step(seed: int, step: int, micro: int, rank: int) -> None:
    """Seed the global generators for one micro-batch (dropout): no generator state outlives a step, none is saved."""
    import torch

    torch.manual_seed(stable_hash("step", seed, step, micro, rank) % 2**63)


def rank() -> int:
    """This process's rank among the workers of a stage; 0 when there is one."""
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """How many processes work on this stage."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def num_gpus() -> int:
    """CUDA devices of this machine."""
    import torch

    return torch.cuda.device_count() if asked() in ("auto", "cuda") else 0


ASKED = "STAGECOACH_DEVICE"  # `runtime.device` of this process and those below it


def ask(kind: str) -> None:
    """Have this process, and those that it starts, compute on `kind`: auto, cpu, cuda or mps."""
    os.environ[ASKED] = kind


def asked() -> str:
    """What `ask` was told, here or in the process that started this one."""
    return os.environ.get(ASKED, "auto")


def kind() -> str:
    """The type of the device to compute on: cuda, mps or cpu. Raises ConfigError for one that this machine lacks."""
    import torch

    found = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if asked() == "auto":
        return "cuda" if found["cuda"] else "cpu"
    if not found.get(asked(), False):
        here = ", ".join(name for name, there in found.items() if there)
        raise ConfigError(f"runtime.device: expected one of this machine's devices ({here}) or auto, got {asked()!r}")
    return asked()


def lost_peer(error: RuntimeError) -> bool:
    """Whether a collective failed because another process of this run is gone."""
    import torch.distributed as dist

    told = ("gloo", "Connection closed by peer", "Connection reset by peer", "NCCL", "Broken pipe")
    return world_size() > 1 and (isinstance(error, dist.DistError) or any(text in str(error) for text in told))


def workers(asked: int | str) -> int:
    """Worker processes for data preparation: what the runtime block asks, else one per usable core."""
    if asked == "auto":
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, int(asked))


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """What was chosen for a stage that trains or generates."""

    device: torch.device
    precision: str  # "fp32", "bf16", "fp16": the dtype of autocast; weights stay fp32
    threads: int

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """The context for a forward pass in `precision`; a null context for fp32."""
        import torch

        if self.precision == "fp32":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, {"bf16": torch.bfloat16, "fp16": torch.float16}[self.precision])


TOP_PAD = 64 << 20  # bytes by which the heap grows beyond what is asked


@functools.cache
def keep_freed_memory() -> None:
    """Tell glibc not to give large blocks back to the system: the 33 MB of logits would be mapped afresh every step."""
    if platform.libc_ver()[0] != "glibc":
        return
    libc = ctypes.CDLL(None)
    for option, value in ((-3, 1 << 30), (-1, 2**31 - 1), (-2, TOP_PAD)):  # M_MMAP_THRESHOLD, M_TRIM_..., M_TOP_PAD
        libc.mallopt(option, value)


def hardware(precision: str = "auto") -> Hardware:
    """Choose device and precision (`auto`: CUDA bf16 or fp16; CPU bf16 only where the CPU computes in it, else
    fp32).
    """
    import torch

    keep_freed_memory()
    if kind() == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        best = "bf16" if torch.cuda.is_bf16_supported() else "fp16"
        torch.set_float32_matmul_precision("high")
    elif kind() == "mps":
        device, best = torch.device("mps"), "fp32"
    else:
        device, best = torch.device("cpu"), "bf16" if has_fast_bf16() else "fp32"
    return Hardware(
        device=device, precision=best if precision == "auto" else precision, threads=torch.get_num_threads()
    )


def has_fast_bf16() -> bool:
    """Whether this CPU multiplies bf16 in hardware (AVX512-BF16 or AMX, ARM bf16); emulated bf16 is 50 times slower."""
    import torch

    if platform.machine() in ("aarch64", "arm64"):
        with contextlib.suppress(OSError), Path("/proc/cpuinfo").open() as file:
            return " bf16" in file.read()
        return False
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def accelerator(precision: str, folder: str) -> Accelerator:
    """Accelerate with everything that could change the mathematics switched off (specs: process groups and
    wrapping).
    """
    from accelerate import Accelerator

    chosen = hardware(precision)
    mixed = "no" if chosen.precision == "fp32" else chosen.precision
    return Accelerator(mixed_precision=mixed, cpu=chosen.device.type == "cpu", project_dir=folder, log_with=None)


def describe(precision: str = "auto") -> dict[str, str]:
    """Versions and device for the tracker: facts about the run that never enter an out."""
    import torch

    chosen = hardware(precision)
    name = torch.cuda.get_device_name() if chosen.device.type == "cuda" else cpu_name()
    return {
        "device": f"{name} ({chosen.device.type})",
        "precision": chosen.precision,
        "threads": str(chosen.threads),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }


def cpu_name() -> str:
    """The processor's name as the system gives it."""
    with contextlib.suppress(OSError), Path("/proc/cpuinfo").open() as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


# Dense bf16 FLOP/s of tensor cores, from NVIDIA's data sheets (SXM modules; without sparsity).
DATA_SHEET = {"A100": 312e12, "H100": 989e12, "H200": 989e12}


def data_sheet_flops(where: torch.device) -> float | None:
    """What the maker says the device computes in bf16, FLOP/s; None where it is not in DATA_SHEET."""
    import torch

    if where.type != "cuda":
        return None
    name = torch.cuda.get_device_name(where)
    return next((flops for part, flops in DATA_SHEET.items() if part in name and "PCIe" not in name), None)


def gpu_utilisation(where: torch.device) -> float | None:
    """The share of the last second in which a GPU worked, by its driver; None on a CPU or without nvidia-ml-py."""
    import torch

    if where.type != "cuda":
        return None
    try:
        return torch.cuda.utilization(where) / 100
    except (ModuleNotFoundError, RuntimeError):  # the extra `gpu` is not installed, or the driver does not tell
        return None


def pins(asked: bool | str, where: torch.device) -> bool:
    """Whether batches go through page-locked memory. Raises ConfigError where it is asked for without a GPU."""
    if asked is True and where.type != "cuda":
        raise ConfigError(f"runtime.pin_memory: true needs a CUDA device, this run is on {where.type}; set it to auto")
    return where.type == "cuda" and asked is not False


def move(batch: Any, where: torch.device, *, pin: bool) -> Any:
    """A batch (a dataclass of tensors with `to`) on the device; through page-locked memory the copy does not wait."""
    import torch

    if pin:
        locked = {
            f.name: v.pin_memory() for f in fields(batch) if isinstance(v := getattr(batch, f.name), torch.Tensor)
        }
        batch = replace(batch, **locked)
    return batch.to(where)


def matmul_gflops(precision: str = "fp32", size: int = 1024, repeats: int = 8) -> float:
    """Measured speed of a square matrix product in GFLOP/s: the yardstick beside every reported time."""
    import time

    import torch

    device = hardware().device
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    size = size if device.type == "cpu" else 8 * size
    a = torch.randn(size, size, device=device).to(dtype)
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        b = a @ a
        b.sum().item()
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best / 1e9


def total_memory(where: torch.device) -> int:
    """Bytes of the device's or the cgroup's memory: the total, not what is free, so that equal runs choose alike."""
    import psutil
    import torch

    if where.type == "cuda":
        return torch.cuda.get_device_properties(where).total_memory
    limits = [psutil.virtual_memory().total]
    for path in (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")):
        with contextlib.suppress(OSError, ValueError):
            limits.append(int(path.read_text()))
    return min(limits)


def peak_memory(where: torch.device) -> int:
    """The most bytes this process has held: allocated on the GPU, resident on a CPU."""
    import resource

    import torch

    if where.type == "cuda":
        return torch.cuda.max_memory_allocated(where)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def held_memory(where: torch.device) -> int:
    """Bytes of tensors that this process has on a GPU now; 0 on a CPU, where nobody counts them."""
    import torch

    return torch.cuda.memory_allocated(where) if where.type == "cuda" else 0


def give_back(where: torch.device) -> None:
    """Give what the allocator keeps of a GPU's memory back, after a try that needed too much of it in other pieces."""
    import gc

    import torch

    gc.collect()
    if where.type == "cuda":
        torch.cuda.empty_cache()


def need_memory(num_bytes: int, what: str) -> None:
    """Raise ConfigError for more than this machine has in all; `what` takes it."""
    import psutil

    room = psutil.virtual_memory().total + psutil.swap_memory().total
    if num_bytes > room:
        raise ConfigError(
            f"{what}: {num_bytes / 1e9:,.1f} GB needed, this machine has {room / 1e9:,.1f} GB; take a smaller model"
        )
