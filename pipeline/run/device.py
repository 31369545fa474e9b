"""What this process runs on: device, precision, threads, ranks, seeds. The only module that queries torch for these.

None of this is an experiment parameter: it follows from the machine and the `runtime` block, and is recorded by
`tracking`. torch is imported inside the functions because data stages start worker processes that hash and seed but
never touch a tensor, and the import would cost each of them seconds.

Not guaranteed: bit-identical results across machines or thread counts. On CPU, identical runs on one machine with the
same thread count are bit-identical.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import importlib.util
import os
import platform
import tempfile
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from pipeline.run.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator

M = TypeVar("M", bound="torch.nn.Module")
ASKED = "STAGECOACH_DEVICE"  # `runtime.device` of this process and its children
TOP_PAD = 64 << 20  # bytes by which the heap grows beyond a request
# Dense bf16 tensor-core FLOP/s from NVIDIA's data sheets (SXM modules; without sparsity).
DATA_SHEET = {"A100": 312e12, "H100": 989e12, "H200": 989e12}


def stable_hash(*parts: int | str) -> int:
    """64 bits of blake2b over the parts, each with its type: independent of process, locale and hash seed."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(f"{type(part).__name__}:{part}\0".encode())
    return int.from_bytes(digest.digest(), "little")


def generator(*parts: int | str) -> torch.Generator:
    """A CPU generator seeded by the parts, so that its draws depend only on their values."""
    import torch

    return torch.Generator().manual_seed(stable_hash(*parts) % 2**63)


def seed_step(seed: int, step: int, micro: int, rank: int) -> None:
    """Seed the global generators for one micro-batch (dropout); their state never outlives a step and is not saved."""
    import torch

    torch.manual_seed(stable_hash("step", seed, step, micro, rank) % 2**63)


def rank() -> int:
    """This process's rank among the processes of a stage; 0 if it is the only one."""
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """The number of processes of this stage."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def num_gpus() -> int:
    """The number of usable CUDA devices."""
    import torch

    return torch.cuda.device_count() if requested_kind() in ("auto", "cuda") else 0


def claim_gpus(number: int = 1, locks: Path | None = None) -> str:
    """Restrict this process and its children to `number` GPUs that no other stage of this user has claimed, so that
    concurrent stages use different GPUs. The claim ends with the process.

    Does nothing without a GPU, or in a worker rank, whose parent has already claimed GPUs. Returns a message for the
    user, or "". Call it before CUDA is initialized.
    """
    if "LOCAL_RANK" in os.environ or not (count := num_gpus()):
        return ""
    names = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(",")[:count]
    locks = locks or Path(tempfile.gettempdir()) / f"stagecoach-gpus-{os.getuid()}"
    mine, others = list[str](), list[str]()
    for name in names:
        if len(mine) == number:
            break
        try:
            locks.mkdir(mode=0o700, exist_ok=True)
            held = os.open(locks / name.strip().replace("/", "-"), os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            return f"{locks} cannot be used ({error.strerror}): concurrent stages may use the same GPU"
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(held)
            others.append(name)
        else:
            mine.append(name)  # `held` stays open until the process exits
    first = os.getpid() % max(1, len(others))
    shared = (others[first:] + others[:first])[: number - len(mine)]
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(mine + shared)
    return f"no other GPU is free: sharing {', '.join(shared)} with another stage, which slows both" if shared else ""


def request_kind(kind: str) -> None:
    """Make this process and its children compute on `kind`: auto, cpu, cuda or mps."""
    os.environ[ASKED] = kind


def requested_kind() -> str:
    """The device kind that `request_kind` set, here or in a parent process."""
    return os.environ.get(ASKED, "auto")


def device_kind() -> str:
    """The kind of device to compute on: cuda, mps or cpu. Raises ConfigError if this machine does not have it."""
    import torch

    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if requested_kind() == "auto":
        return "cuda" if available["cuda"] else "cpu"
    if not available.get(requested_kind(), False):
        devices = ", ".join(name for name, is_available in available.items() if is_available)
        raise ConfigError(
            f"runtime.device: expected one of this machine's devices ({devices}) or auto, got {requested_kind()!r}"
        )
    return requested_kind()


def is_lost_peer(error: RuntimeError) -> bool:
    """Whether a collective failed because another process of this run died."""
    import torch.distributed as dist

    messages = ("gloo", "Connection closed by peer", "Connection reset by peer", "NCCL", "Broken pipe")
    return world_size() > 1 and (isinstance(error, dist.DistError) or any(text in str(error) for text in messages))


def workers(setting: int | str) -> int:
    """Number of worker processes for data preparation: `runtime.workers`, or one per usable core for `auto`."""
    if setting == "auto":
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, int(setting))


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Device, precision and threads of a stage that trains or generates."""

    device: torch.device
    precision: str  # "fp32", "bf16", "fp16": the dtype of autocast; trained weights stay fp32
    threads: int
    base_weights: str = "fp32"  # "fp32", "bf16", "nf4": the dtype of frozen matrices

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """The context for a forward pass in `precision`; a null context for fp32."""
        import torch

        if self.precision == "fp32":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, {"bf16": torch.bfloat16, "fp16": torch.float16}[self.precision])


@functools.cache
def keep_freed_memory() -> None:
    """Keep glibc from returning large blocks to the system: otherwise, 33 MB of logits are remapped at every step."""
    if platform.libc_ver()[0] != "glibc":
        return
    libc = ctypes.CDLL(None)
    for option, value in ((-3, 1 << 30), (-1, 2**31 - 1), (-2, TOP_PAD)):  # M_MMAP_THRESHOLD, M_TRIM_..., M_TOP_PAD
        libc.mallopt(option, value)


def hardware(precision: str = "auto", base_weights: str = "auto") -> Hardware:
    """Device and precision of this process. `precision: auto` is bf16 or fp16 on CUDA, bf16 on a CPU that has bf16
    instructions, else fp32. `base_weights: auto` is bf16 on a GPU that computes in bf16, else fp32: on a CPU, memory is
    rarely scarce.

    Raises ConfigError if frozen matrices are bf16 or NF4 but forward passes are not in bf16, and for NF4 without CUDA
    and bitsandbytes.
    """
    import torch

    keep_freed_memory()
    if device_kind() == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        best = "bf16" if torch.cuda.is_bf16_supported() else "fp16"
        torch.set_float32_matmul_precision("high")
    elif device_kind() == "mps":
        device, best = torch.device("mps"), "fp32"
    else:
        device, best = torch.device("cpu"), "bf16" if has_fast_bf16() else "fp32"
    precision = best if precision == "auto" else precision
    if base_weights in ("bf16", "nf4") and precision != "bf16":
        raise ConfigError(
            f"runtime.base_weights: {base_weights} requires forward passes in bf16, but they are in {precision}; set"
            " runtime.base_weights to auto or fp32"
        )
    if base_weights == "nf4" and (device.type != "cuda" or importlib.util.find_spec("bitsandbytes") is None):
        raise ConfigError(
            f"runtime.base_weights: nf4 needs CUDA and bitsandbytes (pip install -e '.[gpu]'); the device is"
            f" {device.type}, and bitsandbytes is {'' if importlib.util.find_spec('bitsandbytes') else 'not '}"
            "installed; use bf16 instead"
        )
    if base_weights == "auto":
        base_weights = "bf16" if device.type == "cuda" and precision == "bf16" else "fp32"
    return Hardware(device=device, precision=precision, threads=torch.get_num_threads(), base_weights=base_weights)


def placed(model: M) -> M:
    """Move the model to where inference is fastest: to a GPU, in 16-bit precision. On a CPU, it stays unchanged."""
    import torch

    config = hardware()
    if config.device.type == "cpu":
        return model
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    return model.to(config.device, dtypes[config.precision])


def has_fast_bf16() -> bool:
    """Whether this CPU multiplies bf16 in hardware (AVX512-BF16 or AMX, ARM bf16); emulated bf16 is 50x slower."""
    import torch

    if platform.machine() in ("aarch64", "arm64"):
        with contextlib.suppress(OSError), Path("/proc/cpuinfo").open() as file:
            return " bf16" in file.read()
        return False
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def accelerator(precision: str, folder: str) -> Accelerator:
    """An Accelerator with every feature that could change the math disabled."""
    from accelerate import Accelerator

    config = hardware(precision)
    mixed = "no" if config.precision == "fp32" else config.precision
    return Accelerator(mixed_precision=mixed, cpu=config.device.type == "cpu", project_dir=folder, log_with=None)


def describe(precision: str = "auto") -> dict[str, str]:
    """Device and versions for the tracker: facts about the run that never go into an out."""
    import torch

    config = hardware(precision)
    name = torch.cuda.get_device_name() if config.device.type == "cuda" else cpu_name()
    return {
        "device": f"{name} ({config.device.type})",
        "precision": config.precision,
        "threads": str(config.threads),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }


def cpu_name() -> str:
    """The CPU's name as reported by the system."""
    with contextlib.suppress(OSError), Path("/proc/cpuinfo").open() as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def data_sheet_flops(device: torch.device) -> float | None:
    """The device's bf16 FLOP/s according to its manufacturer; None if it is not in DATA_SHEET."""
    import torch

    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((flops for part, flops in DATA_SHEET.items() if part in name and "PCIe" not in name), None)


def gpu_utilisation(device: torch.device) -> float | None:
    """The fraction of the last second a GPU was busy; None on a CPU or without nvidia-ml-py."""
    import torch

    if device.type != "cuda":
        return None
    try:
        return torch.cuda.utilization(device) / 100
    except (ModuleNotFoundError, RuntimeError):  # the extra `gpu` is not installed, or the driver does not report it
        return None


def pins(setting: bool | str, device: torch.device) -> bool:
    """Whether batches go through pinned memory. Raises ConfigError for `true` without a GPU."""
    if setting is True and device.type != "cuda":
        raise ConfigError(f"runtime.pin_memory: `true` needs CUDA, but the device is {device.type}; use `auto` instead")
    return device.type == "cuda" and setting is not False


class Movable(Protocol):
    """A batch: a dataclass of tensors."""

    def to(self, device: torch.device) -> Movable: ...


def move(batch: Movable, device: torch.device, *, pin: bool) -> Movable:
    """Move a batch to the device; with `pin`, asynchronously through pinned memory."""
    import torch

    if pin:
        assert is_dataclass(batch) and not isinstance(batch, type)
        locked = {
            f.name: v.pin_memory() for f in fields(batch) if isinstance(v := getattr(batch, f.name), torch.Tensor)
        }
        batch = replace(batch, **locked)
    return batch.to(device)


@functools.cache
def matmul_gflops(precision: str = "fp32", size: int = 1024, repeats: int = 8) -> float:
    """Measured speed of a square matmul in GFLOP/s: the yardstick for every reported time."""
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


def total_memory(device: torch.device) -> int:
    """Memory of the device or the cgroup in bytes: total, not free, so that identical runs make the same choices."""
    import psutil
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    limits = [psutil.virtual_memory().total]
    for path in (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")):
        with contextlib.suppress(OSError, ValueError):
            limits.append(int(path.read_text()))
    return min(limits)


def peak_memory(device: torch.device) -> int:
    """This process's peak memory, bytes: allocated on the GPU, resident on a CPU."""
    import resource

    import torch

    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def resident_memory() -> int:
    """This process's current resident memory, bytes."""
    import psutil

    return psutil.Process().memory_info().rss


def held_memory(device: torch.device) -> int:
    """Bytes of this process's tensors on a GPU; 0 on a CPU, where torch does not track them."""
    import torch

    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def give_back(device: torch.device) -> None:
    """Release the allocator's cached memory: the sizes of its blocks differ from those needed from now on."""
    import gc

    import torch

    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def need_memory(num_bytes: int, what: str) -> None:
    """Raise ConfigError if `what` needs more memory than this machine has in total."""
    import psutil

    total = psutil.virtual_memory().total + psutil.swap_memory().total
    if num_bytes > total:
        raise ConfigError(
            f"{what}: needs {num_bytes / 1e9:,.1f} GB, but this machine has {total / 1e9:,.1f} GB; use a smaller model"
        )
