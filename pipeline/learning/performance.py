"""Training performance: micro-batch size, compiled layers, profiling, throughput, and the learning-rate finder.

    instruments = Instruments(run)      chooses the micro-batch
    with instruments.step(number): ...  a step: explains out-of-memory errors, advances the profiler
    instruments.report(...)             at the end

**Micro-batch** (`runtime.micro_batch: auto`): the rows in one forward pass. Its size changes the order of sums, so it
is part of a run's identity.

    kept        the size from the run's newest checkpoint, so a resumed run stays exact
    planned     else all rows, or the largest power of two planned to fit in 80% of a GPU's memory or, on a
                CPU, 30% of main memory, which other programs need too
    proved      on a GPU, a dry step of that size follows: a real forward and backward pass; if it runs out of memory,
                the size is halved

The limits are shares of total, not free, memory, so identical runs choose the same size. The dry step leaves weights,
moments and random generators unchanged. On a CPU the system kills a process that exhausts memory instead of raising an
error, so only the plan decides there. The same goes for batches that do not exist yet (rollouts). Running out of memory
later ends the run with a list of remedies.

**Compilation** (`compiled`). On a CPU in bf16, the hand-written layers run the operations between matmuls (and, with
AMX, attention) in C++ (`model/cpu`). Compiling this takes five seconds, so `auto` does so whenever a compiler is
available. Everywhere else, and for layers with adapters or biases, torch.compile is used: each block in place
(`layer.compile()`), so all layers share one compilation and state-dict names stay the same. In that case `auto` does
not depend on timings, so identical runs decide the same way: it compiles runs of more than 1e14 training FLOPs on a
CPU, or 5e16 on a GPU, if all rows have the same length. Pairs and policy rollouts do not: every batch has a new shape.
Sampling never runs compiled layers, but decodes with the same C++ operations (`load_operators`, model/decoding.py).
Compiled layers and operations are cached in `.work/compile` between runs. Compiled and eager steps round differently,
so a checkpoint records whether its run was compiled.

**Profile** (`runtime.profile: true`) records a few steps with torch.profiler:

    <work folder>/profile/trace-rank0.json      for chrome://tracing or ui.perfetto.dev
    <work folder>/profile/top-rank0.txt         the twenty slowest operations

It skips the first steps of a run, which compile, allocate and warm up. Profiling slows training, so ignore the reported
speed of a profiled run.

**Throughput** (`report`). These numbers go only to MLflow and `speed.json`: they are not results. `mfu` is model FLOPs
utilization (Chowdhery et al. 2022, arXiv:2204.02311, appendix B): training FLOPs of the tokens, as counted by
`ModelConfig.flops_per_token`, over the device's data-sheet peak, if listed in `device.DATA_SHEET`. `mfu_measured` is
relative to the speed of a large matmul in the run's precision, timed after the run.

Not guaranteed: that torch.compile is faster than eager for every shape; `benchmarks/train_speed.py` measures it.
"""

import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule

from pipeline.learning import footprint, lr_finder
from pipeline.learning.processes import Ranks
from pipeline.learning.protocols import TrainingRun
from pipeline.learning.settings import FitConfig, TrainingConfig
from pipeline.model.cpu import native
from pipeline.model.layers import Block
from pipeline.model.lora import AdaptedLinear
from pipeline.run import device as run_device
from pipeline.run import workdir
from pipeline.run.config import Runtime
from pipeline.run.device import Hardware
from pipeline.run.errors import ConfigError, InputError
from pipeline.run.tracking import say
from pipeline.run.workdir import Job


class Instruments:
    """The performance instruments of one call to `fit`."""

    def __init__(self, run: TrainingRun) -> None:
        self._run, job = run, run.job
        self._tried = micro_batches(run)
        self._profile = Profile(job.runtime.profile, job.folder, run.ranks.rank, run.hardware.device)
        self._began, self._first_step, self._first_tokens = 0.0, 0, 0
        self._last = (0.0, 0, 0)  # time, step and tokens seen at the last call of `live`
        self.tokens_per_second = 0.0  # at the last call of `live`

    @property
    def micro_batch(self) -> int:
        """Rows in one forward pass."""
        return self._tried[-1]

    def begin(self, step: int, tokens: int) -> None:
        """Print the headline before step `step`, after `tokens` trained targets, and start the clock."""
        say(headline(self._run))
        self._began, self._first_step, self._first_tokens = time.monotonic(), step, tokens
        self._last = (self._began, step, self._run.seen)

    def live(self, step: int) -> dict[str, float]:
        """Speed since the last call or the start, and current memory use. Includes evaluation time."""
        run, now = self._run, time.monotonic()
        (before, first, seen), self._last = self._last, (now, step, run.seen)
        seconds, tokens, where = max(now - before, 1e-9), run.seen - seen, run.hardware.device
        self.tokens_per_second = tokens / seconds
        values = {
            "tokens_per_second": self.tokens_per_second,
            "samples_per_second": (step - first) * run.config.rows / seconds,
            "memory_gb": run_device.resident_memory() / 1e9,
        }
        if held := run_device.held_memory(where):
            values["gpu_memory_gb"] = held / 1e9
        if flops := _flops(run, tokens, step - first) / seconds:
            values |= {"gflops": flops / 1e9} | utilization(flops / run.ranks.world, run.hardware)
        return values

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Run a step of the loop. Raises InputError with remedies when the GPU runs out of memory."""
        with explained(self._run.job, self._run.config, number, self._tried):
            yield
        self._profile.step()

    def end(self, step: int, tokens: int) -> None:
        """End profiling and report speed, after `step` steps and `tokens` targets of the entire run."""
        self._profile.stop()
        seconds = time.monotonic() - self._began
        report(self._run, seconds, step - self._first_step, tokens - self._first_tokens)


def find_learning_rate(run: TrainingRun) -> NoReturn:
    """Search for a learning rate instead of training (lr_finder.py)."""
    lr_finder.look(run)


# -- micro-batch -------------------------------------------------------------------------------------------------------


def micro_batches(run: TrainingRun) -> list[int]:
    """The micro-batch sizes tried; the last one is used. Raises ConfigError if there are fewer rows than processes."""
    config, ranks = run.config, run.ranks
    # No dry step for a sharded model: a rank that ran out of memory inside a collective would leave the others waiting.
    provable = run.hardware.device.type == "cuda" and not run.rolling and not ranks.sharding
    rows = ranks.share_of(config.rows, run.job.stage)
    return chosen(run.plain, config, run.job, run.hardware, ranks, rows, partial(dry_step, run) if provable else None)


def dry_step(run: TrainingRun, micro: int) -> None:
    """Run forward and backward on the first two micro-batches of this size. Leaves only gradients behind."""
    length = run.config.row_length
    mine = run.stream.rows(0, length)[run.ranks.rank :: run.ranks.world]
    batches = [run.stream.batch(0, length, rows) for rows in (mine[:micro], mine[micro : 2 * micro]) if len(rows)]
    counts = {name: sum(batch.counts[name] for batch in batches) for name in batches[0].counts}
    with run.ranks.no_sync(run.model, skip=True):
        run.backward(batches, counts)


def chosen(
    model: nn.Module,
    config: TrainingConfig,
    job: Job,
    hardware: Hardware,
    ranks: Ranks,
    rows: int,
    dry: Callable[[int], object] | None,
) -> list[int]:
    """The micro-batch sizes tried for the `rows` of a step on this process. All processes use the last one.

    `dry` runs forward and backward on that many rows; None: only the plan decides. Raises InputError if no size fits.
    """
    setting, before = job.runtime.micro_batch, kept(job.folder, ranks.world)
    if setting != "auto" or before is not None:
        return [min(rows, int(before or 1) if setting == "auto" else int(setting))]
    plan = plan_of(model, config, hardware, job.runtime, rows=rows, ranks=ranks)
    if plan is None:
        return [rows]
    tried = [-int(ranks.greatest(-planned(plan, hardware, rows)))]
    if dry is not None:
        with explained(job, config, 0, tried):
            tried = proved(model, hardware.device, tried[0], dry, plan(1).optimizer)
    return [*tried[:-1], -int(ranks.greatest(-tried[-1]))]


def kept(folder: Path, world: int) -> int | None:
    """The micro-batch size in the newest readable state, if the number of processes is the same."""
    for path in sorted(folder.glob("step-????????/state.json"), reverse=True):
        with suppress(OSError, ValueError, KeyError):  # a damaged state: the previous one has the same size
            meta = json.loads(path.read_text())
            return int(meta["micro_batch"]) if meta["world"] == world else None
    return None


def planned(plan: Callable[[int], footprint.Footprint], hardware: Hardware, rows: int) -> int:
    """All `rows`, or the largest power of two planned to fit in the usable share of memory; at least 1.

    Raises InputError if a single row is planned to need more than the total memory.
    """
    total = run_device.total_memory(hardware.device)
    others = max(0.0, run_device.held_memory(hardware.device) - plan(1).weights)  # e.g. a reward model already loaded
    share = footprint.CPU_SHARE if hardware.device.type == "cpu" else footprint.SHARE
    micro_batch = footprint.largest(share * total - others, lambda size: plan(size).total, rows)
    if not micro_batch:
        needs = plan(1).total + others
        said = (
            f"one row needs an estimated {needs / 1e9:.1f} GB, and {hardware.device.type} has {total / 1e9:.1f} GB;"
            " see python -m pipeline.tools.plan"
        )
        if needs > total:
            raise InputError(f"{said} for what fits, or try anyway with runtime.micro_batch=1")
        say(f"warning: {said}")
    return max(1, micro_batch)


def plan_of(
    model: nn.Module, config: TrainingConfig, hardware: Hardware, runtime: Runtime, *, rows: int, ranks: Ranks
) -> Callable[[int], footprint.Footprint] | None:
    """micro-batch -> the footprint of a step of `rows`; None for a model without a config."""
    configs = [shape for shape in (getattr(part, "config", None) for part in _models(model)) if shape is not None]
    if not configs:
        return None
    weights = footprint.weights_of(model)
    adapted, dropped = footprint.adapters_of(model)
    # a reward model has no token head
    selected = config.trained_length if hasattr(_models(model)[0], "logits") else 0
    work = footprint.Work(
        row=config.row_length,
        context=config.longest,
        selected=selected,
        kind=hardware.device.type,
        precision=hardware.precision,
        optimizer=config.optimizer,
        checkpointing=runtime.gradient_checkpointing,
        answers=not isinstance(config, FitConfig) and configs[0].attention == "causal",
        masked=configs[0].attention != "causal",
        adapted=adapted,
        dropped=dropped,
        dora=any(isinstance(layer, AdaptedLinear) and layer.config.dora for layer in model.modules()),
    )

    def plan(micro_batch: int) -> footprint.Footprint:
        single = footprint.footprint(weights, configs, replace(work, accumulates=micro_batch < rows), micro_batch)
        if ranks.sharding:
            return footprint.sharded(single, configs[0], work, ranks.world)
        return footprint.data_parallel(single, weights) if ranks.world > 1 else single

    return plan


def _models(model: nn.Module) -> list[nn.Module]:
    """An actor and its critic, or the model itself."""
    return [getattr(model, name) for name in ("actor", "critic") if hasattr(model, name)] or [model]


def proved(
    model: nn.Module, where: torch.device, first: int, dry: Callable[[int], object], reserve: float
) -> list[int]:
    """The micro-batch sizes tried; the last one fit in memory in `dry` (forward and backward on that many rows).

    `reserve` bytes are set aside for the moments that the first update allocates. Drops the gradients and restores the
    random generators. Raises torch.OutOfMemoryError if a single row does not fit.
    """
    tried = [first]
    while not _fits(model, where, tried[-1], dry, reserve):
        half = 2 ** math.ceil(math.log2(tried[-1]) - 1)
        say(f"out of memory in a dry step of {tried[-1]} rows; trying {half}")
        tried.append(half)
    return tried


def _fits(model: nn.Module, where: torch.device, rows: int, dry: Callable[[int], object], reserve: float) -> bool:
    """Whether a dry step fits. The error must be freed before the next try: its frames keep the activations alive."""
    with torch.random.fork_rng([where] if where.type == "cuda" else []):
        try:
            moments = torch.empty(int(reserve), dtype=torch.uint8, device=where)
            dry(rows)
            del moments
            return True
        except torch.OutOfMemoryError:
            if rows == 1:
                raise
        finally:
            for parameter in model.parameters():
                parameter.grad = None
    run_device.give_back(where)
    return False


@contextmanager
def explained(job: Job, config: TrainingConfig, step: int, tried: list[int]) -> Iterator[None]:
    """Turn a GPU out-of-memory error inside the block into an InputError with remedies."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        first = str(error).splitlines()[0] if str(error) else "no details"
        raise InputError(
            f"{job.stage}: out of memory in step {step}, with rows of {config.row_length} tokens; micro-batches tried:"
            f" {', '.join(map(str, tried))} ({first}). Recompute activations (runtime.gradient_checkpointing=full), use"
            f" a smaller micro-batch (runtime.micro_batch={max(1, tried[-1] // 2)}), use a smaller model (model: a file"
            " in conf/model/), or shard across processes (STAGECOACH_LAUNCH=conf/launch/fsdp2.yaml)."
            " To see what fits: python -m pipeline.tools.plan"
        ) from error


# -- compiled layers ---------------------------------------------------------------------------------------------------


PAYS = {"cpu": 1e14, "cuda": 5e16}  # minimum training FLOPs of the entire run
SHAPES = 64  # maximum compilations of a block: forward and backward, training and evaluation, contexts of a curriculum


def prepared(model: nn.Module, job: Job, config: TrainingConfig, steps: int, hardware: Hardware) -> bool:
    """Apply the runtime settings to a model that trains for `steps` steps. Returns whether its layers are compiled."""
    if hasattr(model, "checkpointing"):
        model.checkpointing = job.runtime.gradient_checkpointing  # type: ignore[assignment]
    per_token = flops_per_token(model) if config.even_rows else None
    flops = steps * config.rows * config.row_length * per_token(config.row_length) if per_token else 0
    return compiled(model, job.runtime.compile, flops=flops, hardware=hardware, name=job.name)


def compiled(model: nn.Module, asked: bool | str, *, flops: float, hardware: Hardware, name: str) -> bool:
    """Compile the layers if `wanted`. Returns whether they were compiled. Raises ConfigError like `wanted`."""
    layers = _layers(model)
    hand_written = all(isinstance(layer, Block) and layer.self_attn.plain and layer.mlp.plain for layer in layers)
    loaded = load_operators(asked, hardware=hardware, name=name)
    if hardware.device.type == "cpu" and hardware.precision == "bf16" and layers and hand_written:
        return loaded
    if not wanted(asked, flops=flops, device=hardware.device):
        return False
    _prepare_inductor(name)
    if asked is not True and (failure := _compile_failure(hardware.device)):
        say(f"{name}: continuing without torch.compile, which does not work here: {failure}")
        return False
    for layer in layers:
        layer.compile()
    return True


def load_operators(asked: bool | str, *, hardware: Hardware, name: str) -> bool:
    """Compile and load the C++ operations, for training and decoding in bf16 on a CPU. Elsewhere unload them, since an
    earlier run in this process may have loaded them. Returns whether they are loaded.

    Raises ConfigError if `asked` is true and the compiler is missing or fails.
    """
    native.unload()
    if hardware.device.type != "cpu" or hardware.precision != "bf16":
        return False
    if not wanted(asked, flops=float("inf"), device=hardware.device):
        return False
    try:
        native.load(workdir.root() / "compile")
    except ConfigError as error:
        if asked is True:
            raise
        say(f"{name}: falling back to PyTorch's operators, which are slower: {error}")
        return False
    return True


def wanted(asked: bool | str, *, flops: float, device: torch.device) -> bool:
    """Whether to compile: as configured, or by the rule for `auto`.

    Raises ConfigError if `asked` is true but this machine cannot compile.
    """
    if asked is False:
        return False
    missing = lacking(device)
    if asked is True and missing:
        raise ConfigError(f"runtime.compile=true needs {missing}; install it, or set runtime.compile=false")
    return asked is True or (not missing and flops > PAYS.get(device.type, float("inf")))


def lacking(device: torch.device) -> str:
    """What torch.compile is missing on this machine; empty if nothing."""
    if device.type == "cpu" and native.compiler() is None:
        return "a C++ compiler (g++ or clang++)"
    if device.type == "cuda" and not any(shutil.which(name) for name in (os.environ.get("CC", "cc"), "gcc", "clang")):
        return "a C compiler (gcc or clang)"  # Triton's launchers are built with it
    return "" if device.type in PAYS else f"a CPU or a CUDA device, not {device.type}"


def _layers(model: nn.Module) -> list[nn.Module]:
    """The layers of a model, or of an actor and its critic."""
    return [
        layer for name, stack in model.named_modules() if name.split(".")[-1] == "layers" for layer in stack.children()
    ]


def _compile_failure(device: torch.device) -> str:
    """The reason why a trivial function fails to compile and run here (such as a missing header); empty if it works."""
    try:
        torch.compile(torch.sin, dynamic=False)(torch.ones(8, device=device))
    except Exception as error:  # backends raise many types of errors, and the run can continue without them
        return (str(error).splitlines() or [type(error).__name__])[0][:200]
    return ""


def _prepare_inductor(name: str) -> None:
    """Choose the torch.compile cache, and announce the compilation, because the first step is slow."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir  # here, since the import takes seconds

    if os.environ.get("TORCHINDUCTOR_CACHE_DIR") in (None, default_cache_dir()):  # torch sets its default if unset
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(workdir.root() / "compile")
    torch._dynamo.config.recompile_limit = SHAPES
    say(f"{name}: compiling the layers (torch.compile, cached in {os.environ['TORCHINDUCTOR_CACHE_DIR']})")


# -- profile -----------------------------------------------------------------------------------------------------------


SKIPPED, WARM_UP, RECORDED = 2, 1, 3


class Profile:
    """Records steps 3 to 5 of this call to `fit`. Does nothing when inactive."""

    def __init__(self, active: bool, folder: Path, rank: int, device: torch.device) -> None:
        self.folder, self.rank, self.device = folder / "profile", rank, device
        self._profiler: profile | None = None
        if active:
            activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
            plan = schedule(skip_first=SKIPPED, wait=0, warmup=WARM_UP, active=RECORDED, repeat=1)
            self._profiler = profile(activities=activities, schedule=plan, on_trace_ready=self._write, acc_events=True)
            self._profiler.start()

    def step(self) -> None:
        """Count a completed training step."""
        if self._profiler is not None:
            self._profiler.step()

    def stop(self) -> None:
        """Stop recording. Prints a message if the run was too short to record anything."""
        if self._profiler is None:
            return
        self._profiler.stop()
        self._profiler = None
        if not (self.folder / f"top-rank{self.rank}.txt").is_file():
            say(f"runtime.profile: nothing recorded; a run needs more than {SKIPPED + WARM_UP} steps")

    def _write(self, profiler: profile) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        by = "self_cuda_time_total" if self.device.type == "cuda" else "self_cpu_time_total"
        table = profiler.key_averages().table(sort_by=by, row_limit=20)
        (self.folder / f"top-rank{self.rank}.txt").write_text(table)
        profiler.export_chrome_trace(str(self.folder / f"trace-rank{self.rank}.json"))
        say(f"{table}\nprofile of at most {RECORDED} steps: {self.folder}")


# -- throughput --------------------------------------------------------------------------------------------------------


def flops_per_token(model: nn.Module) -> Callable[[int], float] | None:
    """Training FLOPs per token, as a function of the row length; None if the model does not define them."""
    return getattr(model, "flops_per_token", None)


def headline(run: TrainingRun) -> str:
    """The line printed before the first step: model, steps, rows, device, processes."""
    size = sum(p.numel() for p in run.plain.parameters())
    precision = f"{run.hardware.device.type} {run.hardware.precision}"
    return (
        f"{run.job.name}: {size / 1e6:.2f} M parameters, {run.steps} steps of {run.config.rows} rows of at most "
        f"{run.config.row_length} tokens (micro-batch {run.micro_batch}), {precision}, "
        f"{run.ranks.world} process{'es' if run.ranks.world > 1 else ''}"
    ) + "".join(f"\nwarning: {doubt}" for doubt in _doubts(run))


def _doubts(run: TrainingRun) -> list[str]:
    """Settings that are valid but rarely intended."""
    doubts = []
    if run.hardware.device.type == "cpu" and run.hardware.precision == "fp16":
        doubts.append("fp16 is several times slower than bf16 and fp32 on a CPU; leave runtime.precision at auto")
    if (top := run.config.factor(run.steps - 1, run.steps)) < 1 and run.config.warmup_steps >= run.steps:
        doubts.append(
            f"all {run.steps} steps are warmup: the learning rate ends at {100 * top:.0f}% of learning_rate; lower"
            " warmup_steps"
        )
    return doubts


def _flops(run: TrainingRun, tokens: int, steps: int) -> float:
    """Training FLOPs of `tokens` tokens in `steps` steps; 0 if not counted. The context is the mean row, which is often
    much shorter than the limit on its length.
    """
    per_token = flops_per_token(run.plain)
    row = min(run.config.row_length, math.ceil(tokens / max(1, steps * run.config.rows)))
    return tokens * per_token(row) if per_token else 0.0


def report(run: TrainingRun, seconds: float, steps: int, targets: int) -> None:
    """Report tokens per second, utilization and memory for the `steps` steps of this call to fit."""
    if not steps:
        return
    tokens, device = run.seen, run.hardware.device
    flops = _flops(run, tokens, steps) / seconds
    values: dict[str, float | str] = {
        "tokens_per_second": tokens / seconds,
        "targets_per_second": targets / seconds,
        "samples_per_second": steps * run.config.rows / seconds,
        "step_seconds": seconds / steps,
        "gflops": flops / 1e9,
        "memory_gb": run_device.peak_memory(device) / 1e9,
    }
    used = utilization(flops / run.ranks.world, run.hardware)
    values |= used | run_device.describe(run.job.runtime.precision)
    run.job.tracker.speed.update(values)
    share = f", {100 * used['mfu_measured']:.0f}% of peak matmul throughput" if "mfu_measured" in used else ""
    if flops and (iterations := steps * run.optimizers.iteration_flops()):
        share += f"; Muon's iterations added {100 * iterations / (seconds * flops):.1f}% to the FLOPs"
    say(f"{run.job.name}: {tokens / seconds:,.0f} tokens/s, {flops / 1e9:,.0f} GFLOP/s{share}")


def utilization(flops: float, hardware: Hardware) -> dict[str, float]:
    """`mfu` if the data sheet is known, `mfu_measured`, and `gpu_utilisation` as reported by the driver.

    `flops` is per second; if it is 0, the result is empty.
    """
    if not flops:
        return {}
    shares = {"mfu_measured": flops / (1e9 * run_device.matmul_gflops(hardware.precision))}
    if (peak := run_device.data_sheet_flops(hardware.device)) is not None:
        shares["mfu"] = flops / peak
    if (busy := run_device.gpu_utilisation(hardware.device)) is not None:
        shares["gpu_utilisation"] = busy
    return shares
