"""Compiles the C++ sources for this processor with the local compiler, and calls them.

This is optional: without a compiler, or before `load` is called, PyTorch's operators do the work (primitives.py).
Building takes about five seconds; the library's name is a hash of the sources, the compiler and the processor, so each
combination has its own build.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from pipeline.run.errors import ConfigError

FOLDER = Path(__file__).parent
SOURCES, HEADER = (FOLDER / "primitives.cpp", FOLDER / "attention.cpp"), FOLDER / "lanes.hpp"
FLAGS = (
    *["-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-shared", "-fPIC", "-std=c++17"],
)
WIDE = {"x86_64": ("-mprefer-vector-width=512",)}

_library: ctypes.CDLL | None = None


def compiler() -> str | None:
    """The path of a C++ compiler: $CXX, g++ or clang++."""
    names = (os.environ.get("CXX", "g++"), "clang++")
    return next((path for name in names if (path := shutil.which(name))), None)


def loaded() -> bool:
    """Whether the primitives run in C++."""
    return _library is not None


def has_attention_blocks() -> bool:
    """Whether attention.cpp is loaded, the processor has AMX, and the kernel lets this process use it."""
    return _library is not None and bool(_library["has_attention_blocks"]())


def load(folder: Path) -> None:
    """Run the primitives in C++ from now on; builds the library in `folder` if needed. Raises ConfigError."""
    global _library
    _library = _built(folder)


def unload() -> None:
    """Go back to PyTorch's operators."""
    global _library
    _library = None


@functools.cache
def _built(folder: Path) -> ctypes.CDLL:
    name = compiler()
    if name is None:
        raise ConfigError("model/cpu needs a C++ compiler (g++ or clang++); install one, or set runtime.compile=false")
    version = subprocess.run([name, "--version"], capture_output=True, text=True).stdout
    command = [name, *FLAGS, *WIDE.get(platform.machine(), ())]
    sources = [path.read_text() for path in (*SOURCES, HEADER)]
    key = hashlib.sha256("\n".join([*command, version, _processor(), *sources]).encode()).hexdigest()[:16]
    file = folder / f"pieces-{key}.so"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as part:
            built = Path(part, "pieces.so")
            result = subprocess.run([*command, *map(str, SOURCES), "-o", str(built)], capture_output=True, text=True)
            if result.returncode:
                raise ConfigError(
                    f"{name} could not build the sources of model/cpu; set runtime.compile=false to run"
                    f" without them:\n{result.stderr[-2000:]}"
                )
            built.replace(file)
    try:
        return ctypes.CDLL(str(file))
    except OSError as error:
        raise ConfigError(
            f"{file} cannot be loaded ({error}); delete the file to rebuild it, or set runtime.compile=false"
        ) from error


def _processor() -> str:
    """The features of the processor, which determine the effect of `-march=native`."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())


def call(name: str, *values: Tensor | float | None) -> None:
    """Call a C++ function with contiguous tensors (None: a null pointer), then sizes (int), numbers (float) and flags
    (bool).
    """
    assert _library is not None
    arguments: list[ctypes.c_void_p | ctypes.c_int64 | ctypes.c_float | ctypes.c_int] = []
    for value in values:
        if isinstance(value, Tensor):
            if not value.is_contiguous():
                raise ValueError(
                    f"{name}: expected contiguous tensors, got strides {value.stride()} with shape {tuple(value.shape)}"
                )
            arguments.append(ctypes.c_void_p(value.data_ptr()))
        elif value is None:
            arguments.append(ctypes.c_void_p(None))
        elif isinstance(value, bool):
            arguments.append(ctypes.c_int(value))
        else:
            arguments.append(ctypes.c_float(value) if isinstance(value, float) else ctypes.c_int64(value))
    _library[name](*arguments, ctypes.c_int(torch.get_num_threads()))
