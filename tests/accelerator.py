"""A second kind of device, `fake:0`. Its tensors compute on the CPU but, like CUDA's, refuse CPU operands.

    python -m tests.accelerator '{"stage": ["key=value", ...], ...}'     runs these stages on it, in this directory
    python -m tests.accelerator '{"serve": ["tools", ...]}'              serves these models on it

Prints {"stage": {"code": exit code, "said": stderr, "there": matrix products there, "cpu": those on the CPU}}. A tensor
that a stage leaves on the CPU fails the first operation that mixes both devices, or shows up in the "cpu" count.
Indices and scalars may come from the CPU, as on CUDA. Precision is fp32: the device has no autocast.
"""

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from pipeline.generation.sampling import Sampling
from pipeline.ingest.records import write
from pipeline.run import device
from pipeline.serve import models
from pipeline.serve.loop import Ended, GenerationRequest
from pipeline.synthetic import programs, stories, tools
from tests import corpora, workspace
from tests.conftest import ROOT
from tests.suites import FEW
from tests.workspace import Workspace

NAME = "fake"
aten = torch.ops.aten
TAKE_INDICES = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
MULTIPLY = ("mm", "bmm", "addmm", "baddbmm", "_scaled_dot_product", "convolution")


class Elsewhere(Tensor):
    """A tensor on the device. `inside` is the CPU tensor with its numbers; a view of one wraps a view of the other."""

    inside: Tensor

    @staticmethod
    def __new__(cls, inside: Tensor) -> "Elsewhere":
        made = Tensor._make_wrapper_subclass(
            cls,
            inside.size(),
            strides=inside.stride(),
            storage_offset=inside.storage_offset(),
            dtype=inside.dtype,
            device=torch.device(NAME, 0),
        )
        made.inside = inside
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"Elsewhere({self.inside})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(func, args, kwargs or {})

    # Methods that PyTorch does not support for subclasses but that real devices have.

    def tolist(self) -> Any:
        return self.inside.tolist()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Elsewhere":
        if id(self) not in memo:
            memo[id(self)] = made = Elsewhere(self.inside.clone())
            if isinstance(self, torch.nn.Parameter):
                made._is_param = True  # type: ignore[attr-defined]  # what isinstance reads
            made.requires_grad_(self.requires_grad)
        return memo[id(self)]

    def data_ptr(self) -> int:
        return self.inside.data_ptr()

    def untyped_storage(self) -> Any:
        return self.inside.untyped_storage()

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError(f"can't convert a tensor of {NAME}:0 to numpy; copy it to the CPU first")


def compute(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operation on the CPU tensors inside its operands. Raises RuntimeError if an operand is on the CPU."""
    given = [value for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
    copies = func in (aten._to_copy.default, aten.copy_.default, aten._copy_from.default)
    if not copies and func not in TAKE_INDICES:
        for value in given:
            if not isinstance(value, Elsewhere) and value.dim():
                raise RuntimeError(
                    f"{func}: expected tensors on {NAME}:0, found {tuple(value.shape)} on {value.device}"
                )
    args, kwargs = pytree.tree_map_only(Elsewhere, lambda tensor: tensor.inside, (args, kwargs))
    to = kwargs.get("device")
    if to is not None:
        kwargs = kwargs | {"device": torch.device("cpu")}
    result = func(*args, **kwargs)
    if func is aten._local_scalar_dense.default or (to is not None and torch.device(to).type == "cpu"):
        return result
    if func is aten.copy_.default:
        return given[0]
    known = {id(value.inside): value for value in given if isinstance(value, Elsewhere)}  # for in-place operations
    return pytree.tree_map_only(
        Tensor, lambda tensor: known[id(tensor)] if id(tensor) in known else Elsewhere(tensor), result
    )


def factories() -> Iterator[Any]:
    """The operations that create a tensor on a device without taking one."""
    for full in torch._C._dispatch_get_all_op_names():
        if not full.startswith("aten::"):
            continue
        name, _, overload = full.removeprefix("aten::").partition(".")
        try:
            op = getattr(getattr(aten, name), overload or "default")
        except (AttributeError, RuntimeError):
            continue
        schema = op._schema
        placed = any(argument.name == "device" for argument in schema.arguments)
        takes = any("Tensor" in str(argument.type) for argument in schema.arguments)
        makes = len(schema.returns) == 1 and "Tensor" in str(schema.returns[0].type)
        composite = torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd")
        if placed and makes and not takes and not composite:
            yield op


def on_cpu(op: Any) -> Any:
    """A kernel that runs a factory on the CPU and wraps the result."""

    def kernel(*args: Any, **kwargs: Any) -> Tensor:
        return Elsewhere(op(*args, **kwargs | {"device": "cpu", "pin_memory": False}))

    return kernel


def register() -> torch.library.Library:
    """Make `fake:0` a device of this process for as long as the returned object lives."""
    module = SimpleNamespace(
        is_available=lambda: True,
        is_initialized=lambda: True,
        current_device=lambda: 0,
        device_count=lambda: 1,
        _is_in_bad_fork=lambda: False,
        manual_seed_all=lambda seed: None,
        get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16],
    )
    _setup_privateuseone_for_python_backend(NAME, backend_module=module)
    torch.__future__.set_swap_module_params_on_conversion(True)  # so that tied weights stay tied
    library = torch.library.Library("aten", "IMPL")
    for op in factories():
        library.impl(op.name().removeprefix("aten::"), on_cpu(op), "PrivateUse1")

    def copied(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
        inside = [value.inside if isinstance(value, Elsewhere) else value for value in (target, source)]
        inside[0].copy_(inside[1])
        return target

    library.impl("_copy_from", copied, "PrivateUse1")
    return library


class Multiplications(TorchDispatchMode):
    """Counts matrix products with a tensor on the device, and those without."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func).removeprefix("aten.").startswith(MULTIPLY):
            self.count["there" if any(issubclass(kind, Elsewhere) for kind in types) else "cpu"] += 1
        return func(*args, **(kwargs or {}))


def served(names: list[str]) -> None:
    """Load models from models/ as the server does, and let each answer or score once."""
    ids = [300, 301, 302]
    for one in models.load([Path("models") / name for name in names], rows=2, queue=2, weights=None):
        if one.reward_model is not None:
            one.score([{"role": "user", "content": "go"}, {"role": "assistant", "content": "left"}], [])
            continue
        assert one.engine is not None
        heard: list[Any] = []
        for sampling in (Sampling(6), Sampling(6, temperature=1.0, top_p=0.9)):
            one.engine.submit(GenerationRequest(ids=ids, sampling=sampling, seed=1, listener=heard.append))
        for _ in range(150):  # a canvas of 64 tokens for each of them
            one.engine.step()
        assert sum(isinstance(event, Ended) and not event.message for event in heard) == 2, heard


def on_accelerator(stages: dict[str, list[str]]) -> None:
    """Check that each stage succeeds, with all of its matrix products on the device."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.accelerator", json.dumps(stages)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    ended = json.loads(done.stdout.splitlines()[-1])
    assert {stage: told["said"] for stage, told in ended.items() if told["code"]} == {}
    assert all(told["there"] > 10 for told in ended.values()), ended
    assert {stage: told["cpu"] for stage, told in ended.items()} == dict.fromkeys(stages, 0)


def to_measure(work: Workspace) -> list[str]:
    """Write the data that `stages.evaluate` reads; returns keys for a few items of every suite."""
    data = work.folder / "data"
    shutil.rmtree(data / "dialogues")
    shutil.rmtree(data / "problems")
    write(data / "dialogues/test.jsonl", tools.dialogues("test", 24, 1))
    write(data / "problems/test.jsonl", programs.problems("test", 8, 1))
    told = [(stories.story(f"stories/{family}/50"), family, f"stories/{family}/50") for family in ("gift", "trade")]
    for name in ("raw", "benchmarks"):
        (data / name).mkdir()
    corpora.write_raw(data / "raw/text", val_0=[("Prose. " * 40, "docs", "docs/1"), *told])
    corpora.write_raw(data / "raw/code", val_0=[("def f(x):\n    return x + 1\n" * 6, "package", "a.py")])
    (data / "overlap.json").write_text('{"dialogues": [], "problems": []}')
    few = [f"evaluate.{key}={json.dumps(value)}" for key, value in asdict(FEW).items() if value is not None]
    return [*few, "evaluate.every_suite=true", "runtime.precision=fp32"]


def main() -> None:
    """Run the stages."""
    kept = register()
    hardware = device.Hardware(device=torch.device(NAME, 0), precision="fp32", threads=1)
    device.hardware = lambda *_: hardware
    device.matmul_gflops = lambda *_: 1.0
    ended = {}
    for stage, arguments in json.loads(sys.argv[1]).items():
        with Multiplications() as made:
            done = workspace.Ended(0, "")
            if stage == "serve":
                served(arguments)
            else:
                done = workspace.command(stage, arguments)
        ended[stage] = {"code": done.code, "said": done.said, "there": made.count["there"], "cpu": made.count["cpu"]}
    print(json.dumps(ended))
    del kept
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
