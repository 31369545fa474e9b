"""Starts our own processes: data workers, the training processes of a stage, one of our modules beside another.

    pool_map(function, items, workers)          ordered results from worker processes
    beside(module, arguments, log)              one of our modules while a block runs
    plan()                                      in how many processes a stage trains: STAGECOACH_LAUNCH
    run_workers(plan, module, argv)             these processes, and the exit code that they agree on

STAGECOACH_LAUNCH is empty or 1 (one process), `4` (processes of this machine, each with the whole model: DDP),
`fsdp2:4` (each with its rows of it) or an Accelerate config file (conf/launch/*.yaml), the only form for several
machines; MACHINE_RANK says which one this is. Workers find their settings in the variables that `accelerate launch`
sets, so that works by hand too. It starts them where there are GPUs. On a CPU it would turn FSDP into DDP and start one
process, in silence, so there torch.distributed.run starts them.

Not promised: restarts of a worker that failed (the same command resumes), elastic numbers of machines.
"""

import collections
import concurrent.futures
import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from pipeline.run import device
from pipeline.run.errors import ConfigError

Item = TypeVar("Item")
Result = TypeVar("Result")
Process: TypeAlias = "subprocess.Popen[bytes]"
PR_SET_PDEATHSIG = 1
END_SECONDS = 30
SAVE_SECONDS = 300  # that workers have to save a state when they are told to end
KINDS = ("MULTI_GPU", "MULTI_CPU", "FSDP")
FSDP_KEYS: dict[str, tuple[Any, ...]] = {  # what may stand in fsdp_config, and which values we mean what we say by
    "fsdp_version": (2,),
    "fsdp_auto_wrap_policy": ("TRANSFORMER_BASED_WRAP",),
    "fsdp_transformer_layer_cls_to_wrap": ("Block",),
    "fsdp_reshard_after_forward": (True, False),
    "fsdp_offload_params": (True, False),
    "fsdp_state_dict_type": ("SHARDED_STATE_DICT",),
}
# what `beside` starts: `python -m MODULE ARGUMENTS`, bound to the process that asked
BESIDE = (
    "import runpy, sys; from pipeline.run.processes import die_with_parent; die_with_parent(int(sys.argv.pop(1))); "
    "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)


def die_with_parent(parent: int) -> None:
    """Ask the kernel for SIGTERM when the parent dies, so that killing DVC leaves no orphan that trains on.

    Raises SystemExit when the parent is gone already (it died between fork and here).
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        raise SystemExit(128 + signal.SIGTERM)


def _start_worker(parent: int) -> None:
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends the pool; a worker's traceback would only hide why


def pool_map(function: Callable[[Item], Result], items: Iterable[Item], workers: int) -> Iterator[Result]:
    """Apply `function` (module level) to the items in worker processes; yield results in the items' order.

    At most 3 items a worker are in flight, so memory stays flat however many items there are. An exception in a worker
    is raised here; a killed worker raises concurrent.futures.process.BrokenProcessPool.
    """
    if workers <= 1:
        yield from map(function, items)
        return
    context = multiprocessing.get_context("spawn")
    pool = concurrent.futures.ProcessPoolExecutor(workers, context, _start_worker, (os.getpid(),))
    waiting: collections.deque[concurrent.futures.Future[Result]] = collections.deque()
    try:
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) >= 3 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The processes of a training stage."""

    processes: int  # of each machine
    machines: int = 1
    machine: int = 0  # which of them this is; 0 has rank 0, which writes
    address: str = ""  # of machine 0
    port: int = 0
    on_cpu: bool
    sharded: bool = False  # FSDP2
    reshard: bool = True
    offload: bool = False
    file: Path | None = None

    def environment(self) -> dict[str, str]:
        """What the workers are told, in Accelerate's variables."""
        told = {"ACCELERATE_USE_FSDP": str(self.sharded).lower()}
        if self.sharded:
            told |= {
                "FSDP_VERSION": "2",
                "FSDP_RESHARD_AFTER_FORWARD": str(self.reshard).lower(),
                "FSDP_OFFLOAD_PARAMS": str(self.offload).lower(),
            }
        if self.on_cpu:
            told |= {"ACCELERATE_USE_CPU": "true"}
        cores = device.workers("auto") if self.on_cpu else 1
        return told | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, cores // self.processes)))}


def plan() -> Plan | None:
    """What STAGECOACH_LAUNCH asks for; None for one process, and inside a worker. Raises ConfigError."""
    asked = "" if "LOCAL_RANK" in os.environ else os.environ.get("STAGECOACH_LAUNCH", "")
    kind, _, count = asked.rpartition(":")
    if asked == "":
        return None
    if kind in ("", "fsdp2") and count.isdecimal() and int(count) > 0:
        found = Plan(processes=int(count), on_cpu=not device.num_gpus(), sharded=kind == "fsdp2")
    elif Path(asked).is_file():
        found = _read(Path(asked))
    else:
        have = ", ".join(sorted(str(p) for p in Path("conf/launch").glob("*.yaml"))) or "none"
        raise ConfigError(
            "STAGECOACH_LAUNCH: expected a number of processes (4), fsdp2 and a number (fsdp2:4), or an Accelerate"
            f" config file, got {asked!r}; files: {have}"
        )
    return found if found.processes * found.machines > 1 else None


def _read(path: Path) -> Plan:
    """The plan of an Accelerate config file. Raises ConfigError for what it cannot be, or what we would not do."""
    from accelerate.commands.config.config_args import load_config_from_file
    from yaml import YAMLError

    try:
        config: Any = load_config_from_file(str(path))
        kind = str(config.distributed_type.value)
        sections = {name: value for name, value in vars(config).items() if isinstance(value, dict) and value}
    except (ValueError, TypeError, AttributeError, KeyError, YAMLError) as error:
        raise ConfigError(f"{path}: not an Accelerate config file: {error}") from error
    if kind == "DEEPSPEED":
        raise ConfigError(
            f"{path}: DeepSpeed is not carried through: it clips and steps inside its own backward pass, so the loop"
            " could neither skip a bad step nor save a state that other numbers of processes read."
            " conf/launch/fsdp2.yaml cuts weights, gradients and moments as ZeRO-3 does; fsdp_offload_params: true"
            " keeps them in the machine's memory"
        )
    expected = {"distributed_type": (kind, KINDS), "mixed_precision": (config.mixed_precision or "no", ("no",))}
    for key, value in sections.items():
        if key != "fsdp_config" or kind != "FSDP":
            raise ConfigError(f"{path}: {key} changes nothing here; remove it")
        for name, entry in value.items():
            expected[name] = (entry, FSDP_KEYS.get(name, ()))
    if kind == "FSDP":
        expected.setdefault("fsdp_version", (None, (2,)))
    for name, (value, allowed) in expected.items():
        if not allowed:
            raise ConfigError(f"{path}: unknown key {name}; expected some of {', '.join(FSDP_KEYS)}")
        if value not in allowed:
            why = " (precision is runtime.precision)" if name == "mixed_precision" else ""
            raise ConfigError(f"{path}: {name}: expected {' or '.join(map(str, allowed))}, got {value}{why}")
    return _plan_of(path, config, sections.get("fsdp_config", {}), sharded=kind == "FSDP")


def _plan_of(path: Path, config: Any, fsdp: dict[str, Any], *, sharded: bool) -> Plan:
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
            f"{path}: num_machines is {machines}: main_process_ip and main_process_port must be those of machine 0"
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


def run_workers(asked: Plan, module: str, argv: list[str]) -> int:
    """Run `python -m module argv` in all processes of this machine; the exit code of the one that failed first, or 0.

    They die with this process (running.py), get what signals it gets, and have SAVE_SECONDS to save a state.
    """
    import logging

    from torch.distributed import run as launcher
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    for name in logging.root.manager.loggerDict:
        if name.startswith(launcher.__name__.rpartition(".")[0]):  # what went wrong is said once, by who knows it
            logging.getLogger(name).setLevel(logging.CRITICAL)
    os.environ.update(asked.environment())
    sys.stdout.flush()
    try:
        if asked.on_cpu or asked.file is None:
            _torch_workers(asked, module, argv)
        else:
            _accelerate_workers(asked, module, argv)
    except ChildFailedError as error:
        return exit_code({rank: failure.exitcode for rank, failure in error.failures.items()})
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


def _torch_workers(asked: Plan, module: str, argv: list[str]) -> None:
    from torch.distributed import run

    meeting = ["--standalone"]
    if asked.machines > 1:
        meeting = [
            "--nnodes",
            str(asked.machines),
            "--node_rank",
            str(asked.machine),
            "--master_addr",
            asked.address,
            "--master_port",
            str(asked.port),
        ]
    run.run(
        run.parse_args(
            [
                *meeting,
                "--nproc_per_node",
                str(asked.processes),
                "--shutdown_timeout",
                str(SAVE_SECONDS),
                "-m",
                module,
                *argv,
            ]
        )
    )


def _accelerate_workers(asked: Plan, module: str, argv: list[str]) -> None:
    """On GPUs, by an Accelerate config file. Untested: no machine with GPUs was at hand."""
    from accelerate.commands import launch

    arguments = [
        "--config_file",
        str(asked.file),
        "--num_processes",
        str(asked.processes * asked.machines),
        "--machine_rank",
        str(asked.machine),
        "--module",
        module,
        *argv,
    ]
    args = launch.launch_command_parser().parse_args(arguments)
    args.shutdown_timeout = SAVE_SECONDS
    launch.launch_command(args)


def exit_code(codes: dict[int, int]) -> int:
    """What processes that failed (rank -> code, below 0 for a signal) say together; a killed one is told of.

    A gate or a wrong input is the cause of what else happens, then a killed process, then an error; who only stopped
    was told to.
    """
    killed = {rank: -code for rank, code in codes.items() if code < 0}
    known = sorted(code for code in codes.values() if code in (2, 3))
    if killed and not known:
        rank, number = min(killed.items())
        sys.stderr.write(
            f"process {rank} was killed by {signal.Signals(number).name}"
            + (" (the kernel does so when memory runs out)" if number == signal.SIGKILL else "")
            + "; the others were ended. The same command resumes from the newest state\n"
        )
        return 128 + number
    rest = sorted(code for code in codes.values() if code > 0)
    return (known or rest)[0]


@contextmanager
def beside(module: str, arguments: list[str], log: Path, handed: Sequence[int] = ()) -> Iterator[Process]:
    """One of our modules as a process of its own, output into `log`, until the block ends: SIGTERM, and SIGKILL if that
    does not help.

    It gets SIGTERM too when this process dies, however it dies, or the thread that began the block ends. `handed` are
    descriptors that it inherits.
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
