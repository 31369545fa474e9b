"""The `runtime` block of params.yaml: how a run is carried out. All stages read it and none tracks it, because none of it changes
more of a result than its rounding.

Not promised: equal bits between two precisions, micro-batches or process counts, or between compiled and eager layers; a resumed run
that changes one of them says so.
"""

import re
from dataclasses import dataclass

CHECKPOINTING = ("none", "full", "every_2", "selective")
DEVICES = ("auto", "cpu", "cuda", "mps")
TRACKERS = ("tensorboard", "wandb")


def without_password(url: str) -> str:
    """An address as messages show it: what stands before its last @ is left out."""
    return re.sub(r"^([A-Za-z][\w+.-]*://)?.*@", r"\1", url, flags=re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class SandboxAddress:
    """`runtime.sandbox`: where generated code runs."""

    url: str | None = None  # of a sandbox service (python -m pipeline.sandbox.service); none: this machine


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """The `runtime` block: read by all stages, tracked by none, because none of it changes more of a result than its rounding."""

    device: str = "auto"  # auto: CUDA where there is one, else the CPU; cpu, cuda, mps (Apple's GPU: untested)
    precision: str = "auto"  # auto, fp32, bf16, fp16
    micro_batch: int | str = "auto"  # rows in one forward pass; auto: what fits the memory
    workers: int | str = "auto"  # processes of the data stages; auto: one per core
    gradient_checkpointing: str = "none"  # none, full, every_2, selective: recompute activations to save memory
    compile: bool | str = "auto"  # the layers; auto: where it pays (learning/compiling.py)
    pin_memory: bool | str = "auto"  # batches in page-locked memory on their way to a GPU; auto: where there is one
    logging_steps: int = 10  # a row of the curve every so many steps
    save_steps: int = 500  # a resumable state every so many steps,
    save_minutes: float = 2.0  # and every so many minutes
    keep: int = 3  # how many states are kept besides the best
    async_save: bool = False  # write states in a thread, from a copy in memory, while training goes on
    profile: bool = False  # record some steps with torch.profiler (learning/profiling.py)
    find_lr: bool = False  # train nothing: look for a learning rate, write a plot and a line for params.yaml
    trackers: tuple[str, ...] = ()  # besides DVC and MLflow: tensorboard, wandb (the extra `trackers`)
    fresh: bool = False  # throw away the state and the finished result of this key first
    sandbox: SandboxAddress | None = None  # {url: http://machine:8801}: judge generated code on another machine

    @property
    def sandbox_url(self) -> str | None:
        """`runtime.sandbox.url`; None: generated code runs on this machine."""
        return None if self.sandbox is None else self.sandbox.url

    def __post_init__(self) -> None:
        if self.device not in DEVICES:
            raise ValueError(f"device: expected one of {', '.join(DEVICES)}, got {self.device!r}")
        if self.precision not in ("auto", "fp32", "bf16", "fp16"):
            raise ValueError(f"precision: expected auto, fp32, bf16 or fp16, got {self.precision!r}")
        if self.gradient_checkpointing not in CHECKPOINTING:
            raise ValueError(
                f"gradient_checkpointing: expected one of {', '.join(CHECKPOINTING)}, got {self.gradient_checkpointing!r}"
            )
        for name in ("compile", "pin_memory"):
            if getattr(self, name) not in (True, False, "auto"):
                raise ValueError(f"{name}: expected auto, true or false, got {getattr(self, name)!r}")
        for name in ("micro_batch", "workers"):
            value = getattr(self, name)
            if value != "auto" and (isinstance(value, str) or value < 1):
                raise ValueError(f"{name}: expected auto or a number from 1 on, got {value!r}")
        if odd := sorted(set(self.trackers) - set(TRACKERS)):
            raise ValueError(f"trackers: expected some of {', '.join(TRACKERS)}, got {odd[0]!r}")
        for name, least in {"keep": 1, "logging_steps": 1, "save_steps": 1, "save_minutes": 0}.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name}: expected at least {least}, got {getattr(self, name)}")
