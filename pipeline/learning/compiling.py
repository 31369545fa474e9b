"""What is compiled of a model's layers, where it pays.

On a CPU in bf16, where the layers are written by hand, it is the pieces between their matrix products, in C++ (`model/pieces.cpp`): two
seconds, so `auto` does it wherever there is a compiler. Anywhere else, and for layers with adapters or biases, it is torch.compile:
each block in place (`layer.compile()`), so all layers share one compilation and no name in the state dict changes. There `auto` is a
rule without a clock, so that equal runs choose alike: a run of more than 1e14 training FLOPs on a CPU, 5e16 on a GPU, in rows of one
length: pairs and a policy's own answers have another shape in every batch. Sampling never runs compiled layers. Both are kept in
`.work/compile` between runs. A compiled step rounds otherwise than an eager one, and a state says which it was.

Not promised: that torch.compile is faster than eager for every shape; `benchmarks/train_speed.py` measures it.
"""

import os
import shutil

import torch
from torch import nn

from pipeline import work
from pipeline.device import Hardware
from pipeline.errors import ConfigError
from pipeline.model import native
from pipeline.tracking import say

PAYS = {"cpu": 1e14, "cuda": 5e16}  # training FLOPs of the whole run
SHAPES = 64  # compilations of a block: forward and backward, training and evaluation, contexts of a curriculum


def compiled(model: nn.Module, asked: bool | str, *, flops: float, hardware: Hardware, name: str) -> bool:
    """Compile the layers if `wanted`; returns whether it was. Raises ConfigError as `wanted`."""
    native.unload()  # what a run before this one in the process asked for
    layers = blocks(model)
    by_hand = hardware.device.type == "cpu" and hardware.precision == "bf16" and bool(layers)
    if by_hand and all(getattr(layer, "plain", False) for layer in layers):
        return wanted(asked, flops=float("inf"), device=hardware.device) and _in_cpp(required=asked is True, name=name)
    if not wanted(asked, flops=flops, device=hardware.device):
        return False
    _prepare(name)
    if asked is not True and (why := _fails(hardware.device)):
        say(f"{name}: goes on without torch.compile, which does not work here: {why}")
        return False
    for layer in layers:
        layer.compile()
    return True


def _in_cpp(*, required: bool, name: str) -> bool:
    """Load the pieces; a compiler that fails is an error only where it was asked for."""
    try:
        native.load(work.root() / "compile")
    except ConfigError as error:
        if required:
            raise
        say(f"{name}: goes on with PyTorch's operators, which are slower: {error}")
        return False
    return True


def wanted(asked: bool | str, *, flops: float, device: torch.device) -> bool:
    """Whether to compile: as asked, or by the rule. Raises ConfigError where it is asked for and cannot be."""
    if asked is False:
        return False
    missing = lacking(device)
    if asked is True and missing:
        raise ConfigError(f"runtime.compile: true needs {missing}; install it, or set runtime.compile=false")
    return asked is True or (not missing and flops > PAYS.get(device.type, float("inf")))


def lacking(device: torch.device) -> str:
    """What torch.compile would need here and does not find; empty when it can work."""
    if device.type == "cpu" and native.compiler() is None:
        return "a C++ compiler (g++ or clang++)"
    if device.type == "cuda" and not any(shutil.which(name) for name in (os.environ.get("CC", "cc"), "gcc", "clang")):
        return "a C compiler (gcc or clang)"  # Triton's launchers are built with it
    return "" if device.type in PAYS else f"a CPU or a CUDA device, not {device.type}"


def blocks(model: nn.Module) -> list[nn.Module]:
    """The layers of a model, or of both models of an actor and its critic."""
    return [
        layer for name, found in model.named_modules() if name.split(".")[-1] == "layers" for layer in found.children()
    ]


def _fails(device: torch.device) -> str:
    """Why a trivial function cannot be compiled and run here (a header that is missing, for example); empty when it can."""
    try:
        torch.compile(torch.sin, dynamic=False)(torch.ones(8, device=device))
    except Exception as error:  # the backends raise many types, and the run can go on without them
        return (str(error).splitlines() or [type(error).__name__])[0][:200]
    return ""


def _prepare(name: str) -> None:
    """Say it, because the first step takes the time; choose where it is kept."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir  # here: the import takes seconds

    if os.environ.get("TORCHINDUCTOR_CACHE_DIR") in (None, default_cache_dir()):  # torch sets its own where none is set
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(work.root() / "compile")
    torch._dynamo.config.recompile_limit = SHAPES
    say(f"{name}: compiling the layers (torch.compile, kept in {os.environ['TORCHINDUCTOR_CACHE_DIR']})")
