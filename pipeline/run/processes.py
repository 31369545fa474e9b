"""Starts our own processes: data workers, the training processes of a stage, helper modules.

    pool_map(function, items, workers)          ordered results from worker processes
    beside(module, arguments, log)              one of our modules in the background while a block runs
    output_of(command)                          the output of an external program, bounded in bytes and time
    plan()                                      the processes that a stage trains in: STAGECOACH_LAUNCH
    run_workers(plan, module, argv)             run these processes; returns their common exit code

STAGECOACH_LAUNCH is empty or 1 (one process), `4` (four processes on this machine, each with the full model: DDP),
`fsdp2:4` (four, each with a shard) or an Accelerate config file (conf/launch/*.yaml), the only option for several
machines; MACHINE_RANK is this machine's index. Workers read their settings from the environment variables that
`accelerate launch` sets, so running it directly works too. On GPUs, Accelerate starts the workers. On a CPU it would
silently turn FSDP into DDP and start one process, so torch.distributed.run starts the workers instead, even for
`accelerate launch --cpu --num_processes 2 -m stages.language`.

Not supported: restarting a failed worker (rerun the same command to resume), an elastic number of machines.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import psutil

from pipeline.run import device
from pipeline.run.errors import ConfigError
from pipeline.run.types import JsonObject

if TYPE_CHECKING:
    from accelerate.commands.config.config_args import ClusterConfig

Item = TypeVar("Item")
Result = TypeVar("Result")
Process: TypeAlias = "subprocess.Popen[bytes]"
PR_SET_PDEATHSIG = 1
END_SECONDS = 30
SAVE_SECONDS = 300  # how long workers have to save a checkpoint after a termination signal
KINDS = ("MULTI_GPU", "MULTI_CPU", "FSDP")
FSDP_KEYS: dict[str, tuple[object, ...]] = {  # the keys of fsdp_config and their supported values
    "fsdp_version": (2,),
    "fsdp_auto_wrap_policy": ("TRANSFORMER_BASED_WRAP",),
    "fsdp_transformer_layer_cls_to_wrap": ("Block",),
    "fsdp_reshard_after_forward": (True, False),
    "fsdp_offload_params": (True, False),
    "fsdp_state_dict_type": ("SHARDED_STATE_DICT",),
}
# What `beside` runs: `python -m MODULE ARGUMENTS`, tied to its parent process
BESIDE = (
    "import runpy, sys; from pipeline.run.processes import die_with_parent; die_with_parent(int(sys.argv.pop(1))); "
    "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)


def die_with_parent(parent: int) -> None:
    """Have the kernel send this process SIGTERM when its parent dies, so that killing DVC leaves no orphaned stage.

    Raises SystemExit if the parent is already gone (it died between the fork and this call).
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        raise SystemExit(128 + signal.SIGTERM)


def _start_worker(parent: int) -> None:
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends the pool; a worker traceback would hide the cause


def pool_map(function: Callable[[Item], Result], items: Iterable[Item], workers: int) -> Iterator[Result]:
    """Apply `function` (defined at module level) to the items in worker processes; yield results in input order.

    At most 3 items per worker are in flight, so memory does not grow with the number of items. An exception in a worker
    is raised here; a killed worker raises concurrent.futures.process.BrokenProcessPool.
    """
    if workers <= 1:
        yield from map(function, items)
        return
    context = multiprocessing.get_context("spawn")
    pool = concurrent.futures.ProcessPoolExecutor(workers, context, _start_worker, (os.getpid(),))
    futures: collections.deque[concurrent.futures.Future[Result]] = collections.deque()
    try:
        for item in items:
            futures.append(pool.submit(function, item))
            if len(futures) >= 3 * workers:
                yield futures.popleft().result()
        while futures:
            yield futures.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The processes of a training stage."""

    processes: int  # per machine
    machines: int = 1
    machine: int = 0  # index of this machine; machine 0 has rank 0, which writes the results
    address: str = ""  # of machine 0
    port: int = 0
    on_cpu: bool
    sharded: bool = False  # FSDP2
    reshard: bool = True
    offload: bool = False
    file: Path | None = None

    def environment(self) -> dict[str, str]:
        """The workers' settings as Accelerate's environment variables."""
        variables = {"ACCELERATE_USE_FSDP": str(self.sharded).lower()}
        if self.sharded:
            variables |= {
                "FSDP_VERSION": "2",
                "FSDP_RESHARD_AFTER_FORWARD": str(self.reshard).lower(),
                "FSDP_OFFLOAD_PARAMS": str(self.offload).lower(),
            }
        if self.on_cpu:
            variables |= {"ACCELERATE_USE_CPU": "true"}
        cores = device.workers("auto") if self.on_cpu else 1
        return variables | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, cores // self.processes)))}


def plan() -> Plan | None:
    """The plan set by STAGECOACH_LAUNCH; None for one process, and inside a worker. Raises ConfigError."""
    launch = "" if "LOCAL_RANK" in os.environ else os.environ.get("STAGECOACH_LAUNCH") or _asked_of_accelerate()
    kind, _, count = launch.rpartition(":")
    if launch == "":
        return None
    if kind in ("", "fsdp2") and count.isdecimal() and int(count) > 0:
        workers = Plan(processes=int(count), on_cpu=not device.num_gpus(), sharded=kind == "fsdp2")
    elif Path(launch).is_file():
        workers = _read_plan(Path(launch))
    else:
        files = ", ".join(sorted(str(p) for p in Path("conf/launch").glob("*.yaml"))) or "none"
        raise ConfigError(
            "STAGECOACH_LAUNCH: expected a number of processes (such as 4, or fsdp2:4 to shard the model) or an"
            f" Accelerate config file, got {launch!r}; files: {files}"
        )
    if workers.processes * workers.machines > 1:
        return workers
    if workers.sharded:
        raise ConfigError(
            f"STAGECOACH_LAUNCH: {launch} requests one process, which has nothing to shard"
            f"{' and offloads nothing' if workers.offload else ''}; request at least 2, or unset STAGECOACH_LAUNCH"
        )
    return None


def _asked_of_accelerate() -> str:
    """The equivalent STAGECOACH_LAUNCH value if `accelerate launch` started only one of several processes; else "".

    On a CPU, Accelerate sets the address of the process group and leaves it to mpirun to start the others.
    Raises ConfigError if its command line does not give the number of processes.
    """
    by_accelerate = {"MASTER_ADDR", "ACCELERATE_MIXED_PRECISION"} <= os.environ.keys()
    if not by_accelerate or any(name in os.environ for name in ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")):
        return ""
    parent = psutil.Process().parent()
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--num_processes", "--num-processes", default="")
    parser.add_argument("--config_file", "--config-file", default="")
    options, _ = parser.parse_known_args(parent.cmdline() if parent else [])
    if not (options.num_processes or options.config_file):
        raise ConfigError(
            "accelerate launch started only one of several processes: on a CPU it needs mpirun for the others; add"
            " --num_processes to its command line, or use STAGECOACH_LAUNCH=2 without accelerate"
        )
    return options.num_processes or options.config_file


def _read_plan(path: Path) -> Plan:
    """The plan of an Accelerate config file. Raises ConfigError if it is invalid or not supported."""
    from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file
    from yaml import YAMLError

    try:
        config = load_config_from_file(str(path))
        kind = str(config.distributed_type.value)
        sections = {name: value for name, value in vars(config).items() if isinstance(value, dict) and value}
    except (ValueError, TypeError, AttributeError, KeyError, YAMLError) as error:
        raise ConfigError(f"{path}: not an Accelerate config file: {error}") from error
    if kind == "DEEPSPEED":
        raise ConfigError(
            f"{path}: DeepSpeed is not supported: it clips and steps inside its own backward pass, so the training loop"
            " could not skip a bad step or save a checkpoint that loads with a different number of processes."
            " conf/launch/fsdp2.yaml shards weights, gradients and moments as ZeRO-3 does; `fsdp_offload_params: true`"
            " keeps them in CPU memory"
        )
    expected = {"distributed_type": (kind, KINDS), "mixed_precision": (config.mixed_precision or "no", ("no",))}
    for key, value in sections.items():
        if key != "fsdp_config" or kind != "FSDP":
            raise ConfigError(f"{path}: {key} has no effect here; remove it")
        for name, entry in value.items():
            expected[name] = (entry, FSDP_KEYS.get(name, ()))
    if kind == "FSDP":
        expected.setdefault("fsdp_version", (None, (2,)))
    for name, (value, allowed) in expected.items():
        if not allowed:
            raise ConfigError(f"{path}: unknown key {name}; valid keys: {', '.join(FSDP_KEYS)}")
        if value not in allowed:
            why = " (set runtime.precision instead)" if name == "mixed_precision" else ""
            raise ConfigError(f"{path}: {name}: expected {' or '.join(map(str, allowed))}, got {value}{why}")
    assert isinstance(config, ClusterConfig)  # Amazon SageMaker's kinds are not in KINDS
    return _plan_of(path, config, sections.get("fsdp_config", {}), sharded=kind == "FSDP")


def _plan_of(path: Path, config: ClusterConfig, fsdp: JsonObject, *, sharded: bool) -> Plan:
    gpus = 0 if config.use_cpu else device.num_gpus()
    machines, rank = config.num_machines, os.environ.get("MACHINE_RANK", str(config.machine_rank))
    if not rank.isdecimal() or int(rank) >= machines:
        raise ConfigError(f"MACHINE_RANK: expected a number below {machines}, the num_machines of {path}, got {rank!r}")
    total = gpus * machines if config.num_processes == -1 else config.num_processes
    if total < 1 or total % machines:
        raise ConfigError(
            f"{path}: num_processes: expected a multiple of num_machines ({machines}), got {config.num_processes}"
            + ("; -1 means all GPUs, and this machine has none" if config.num_processes == -1 else "")
        )
    if machines > 1 and not (config.main_process_ip and config.main_process_port):
        raise ConfigError(
            f"{path}: num_machines is {machines}, so main_process_ip and main_process_port must be those of machine 0"
        )
    return Plan(
        processes=total // machines,
        machines=machines,
        machine=int(rank),
        address=config.main_process_ip or "",
        port=config.main_process_port or 0,
        on_cpu=not gpus,
        sharded=sharded,
        file=path,
        reshard=fsdp.get("fsdp_reshard_after_forward", True),
        offload=fsdp.get("fsdp_offload_params", False),
    )


def run_workers(workers: Plan, module: str, argv: list[str]) -> int:
    """Run `python -m module argv` in all processes of this machine; returns 0, or the `exit_code` of the failed ones.

    The processes die with this one, receive its signals, and have SAVE_SECONDS to save a checkpoint.
    """
    import logging

    from torch.distributed import run as launcher
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    for name in logging.root.manager.loggerDict:
        if name.startswith(launcher.__name__.rpartition(".")[0]):  # the worker reports its own error, once
            logging.getLogger(name).setLevel(logging.CRITICAL)
    os.environ.update(workers.environment())
    sys.stdout.flush()
    try:
        if workers.on_cpu or workers.file is None:
            _torch_workers(workers, module, argv)
        else:
            _accelerate_workers(workers, module, argv)
    except ChildFailedError as error:
        return exit_code({rank: failure.exitcode for rank, failure in error.failures.items()})
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


def _torch_workers(workers: Plan, module: str, argv: list[str]) -> None:
    from torch.distributed import run

    rendezvous = ["--standalone"]
    if workers.machines > 1:
        rendezvous = [
            "--nnodes",
            str(workers.machines),
            "--node_rank",
            str(workers.machine),
            "--master_addr",
            workers.address,
            "--master_port",
            str(workers.port),
        ]
    run.run(
        run.parse_args(
            [
                *rendezvous,
                "--nproc_per_node",
                str(workers.processes),
                "--shutdown_timeout",
                str(SAVE_SECONDS),
                "-m",
                module,
                *argv,
            ]
        )
    )


def _accelerate_workers(workers: Plan, module: str, argv: list[str]) -> None:
    """Start the workers on GPUs from an Accelerate config file. Untested: no machine with GPUs was available."""
    from accelerate.commands import launch

    arguments = [
        "--config_file",
        str(workers.file),
        "--num_processes",
        str(workers.processes * workers.machines),
        "--machine_rank",
        str(workers.machine),
        "--module",
        module,
        *argv,
    ]
    args = launch.launch_command_parser().parse_args(arguments)
    args.shutdown_timeout = SAVE_SECONDS
    launch.launch_command(args)


def exit_code(codes: dict[int, int]) -> int:
    """A single exit code for failed processes (rank -> code, negative for a signal); reports a killed one on stderr.

    A failed gate or invalid input is assumed to be the root cause; failing that, a killed process, then any error.
    """
    killed = {rank: -code for rank, code in codes.items() if code < 0}
    causes = sorted(code for code in codes.values() if code in (2, 3))
    if killed and not causes:
        rank, number = min(killed.items())
        sys.stderr.write(
            f"process {rank} was killed by {signal.Signals(number).name}"
            + (" (the kernel does this when memory runs out)" if number == signal.SIGKILL else "")
            + "; the others were stopped. Rerun the same command to resume from the newest checkpoint\n"
        )
        return 128 + number
    others = sorted(code for code in codes.values() if code > 0)
    return (causes or others)[0]


@contextmanager
def beside(module: str, arguments: list[str], log: Path, handed: Sequence[int] = ()) -> Iterator[Process]:
    """Run one of our modules in its own process while the block runs, with its output in `log`.

    At the end of the block, it gets SIGTERM, then SIGKILL if it has not exited within END_SECONDS. It also gets SIGTERM
    when this process dies for any reason, or when the thread that entered the block ends. It inherits the file
    descriptors `handed`.
    """
    command = [sys.executable, "-c", BESIDE, str(os.getpid()), module, *arguments]
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, pass_fds=handed)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


# --- external programs ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Output:
    """A program's output and exit code; `code` is None if it was stopped at a limit."""

    output: bytes
    errors: str
    code: int | None


def output_of(command: Sequence[str], *, environment: dict[str, str], most_bytes: int, seconds: float) -> Output:
    """Run a program until it exits, has written `most_bytes`, or `seconds` have passed. Raises FileNotFoundError."""
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, env=environment
        )
        assert process.stdout is not None
        stopped = threading.Event()

        def stop() -> None:
            stopped.set()
            process.kill()

        timer = threading.Timer(seconds, stop)
        timer.start()
        try:
            output = process.stdout.read(most_bytes)
            if process.stdout.read(1):
                stop()
        finally:
            timer.cancel()
            process.stdout.close()
            code = process.wait()
        errors.seek(0)
        return Output(output, errors.read(10_000).decode("utf-8", "replace"), None if stopped.is_set() else code)
