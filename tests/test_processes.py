"""Worker processes: results in order, workers that die, launchers, parallel stages."""

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import pytest

from pipeline.run import device, processes
from pipeline.run.errors import ConfigError
from pipeline.run.processes import Plan, pool_map

ROOT = Path(__file__).parents[1]


def square(number: int) -> int:
    """Earlier numbers take more work, so results arrive out of order."""
    assert sum(range((20 - number) * 20_000)) >= 0
    return number * number


def process(_: int) -> int:
    return os.getpid()


def fails_at_two(number: int) -> int:
    if number == 2:
        raise ValueError("row 2 is bad")
    return number


def dies_at_two(number: int) -> int:
    if number == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def test_one_worker_is_this_process() -> None:
    assert set(pool_map(process, range(3), 1)) == {os.getpid()}


def test_results_come_in_order_from_other_processes_with_few_items_in_flight() -> None:
    taken = 0

    def items() -> Iterator[int]:
        nonlocal taken
        for number in range(20):
            taken += 1
            yield number

    results = pool_map(square, items(), 2)
    assert next(results) == 0
    assert taken == 3 * 2
    assert [0, *results] == [number * number for number in range(20)]
    assert os.getpid() not in set(pool_map(process, range(2), 2))


def test_an_exception_is_raised_in_its_turn_and_the_pool_ends() -> None:
    import multiprocessing

    results = pool_map(fails_at_two, range(6), 2)
    assert [next(results), next(results)] == [0, 1]
    with pytest.raises(ValueError, match="row 2 is bad"):
        next(results)
    assert multiprocessing.active_children() == []


def test_a_killed_worker_is_an_error_and_no_hang() -> None:
    with pytest.raises(BrokenProcessPool):
        list(pool_map(dies_at_two, range(6), 2))


CHILD = (
    "import os, signal, sys; from pipeline.run.processes import die_with_parent; die_with_parent(int(sys.argv[1]));"
    " print('ready', flush=True); signal.pause()"
)


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_a_child_dies_with_its_parent() -> None:
    code = (
        f"import os, signal, subprocess, sys; subprocess.Popen([sys.executable, '-c', {CHILD!r}, str(os.getpid())]);"
        " signal.pause()"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"ready\n"
        parent.kill()
        readable, _, _ = select.select([parent.stdout], [], [], 20)
        assert readable, "the child lives on"
        assert parent.stdout.read() == b""  # end of file: nobody holds the pipe open any more


def test_a_parent_that_is_gone_already_ends_the_child_at_once() -> None:
    done = subprocess.run([sys.executable, "-c", CHILD, "1"], cwd=ROOT, capture_output=True)
    assert (done.returncode, done.stdout) == (143, b"")


@pytest.fixture(autouse=True)
def no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOCAL_RANK", "MACHINE_RANK", "OMP_NUM_THREADS", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)


def with_gpus(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "num_gpus", lambda: count)


def planned(asked: str, monkeypatch: pytest.MonkeyPatch) -> Plan | None:
    monkeypatch.setenv("STAGECOACH_LAUNCH", asked)
    return processes.plan()


@pytest.mark.parametrize("asked", ["", "1"])
def test_one_process_is_launched_by_nobody(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert planned(asked, monkeypatch) is None


def test_one_process_that_shall_shard_or_offload_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="fsdp2:1 requests one process, which has nothing to shard; request at least 2"
    ):
        planned("fsdp2:1", monkeypatch)
    text = (ROOT / "conf/launch/fsdp2.yaml").read_text()
    alone = text.replace("num_processes: -1", "num_processes: 1").replace(
        "# fsdp_offload_params", "fsdp_offload_params"
    )
    (tmp_path / "alone.yaml").write_text(alone)
    with pytest.raises(ConfigError, match="nothing to shard and offloads nothing"):
        planned(str(tmp_path / "alone.yaml"), monkeypatch)


def test_a_worker_is_not_launched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert planned("2", monkeypatch) is None


def test_a_number_asks_for_copies_and_fsdp2_for_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(0, monkeypatch)
    assert planned("3", monkeypatch) == Plan(processes=3, on_cpu=True)
    cut = planned("fsdp2:2", monkeypatch)
    assert cut == Plan(processes=2, on_cpu=True, sharded=True)
    told = cut.environment()
    assert (told["ACCELERATE_USE_FSDP"], told["FSDP_VERSION"], told["FSDP_RESHARD_AFTER_FORWARD"]) == (
        "true",
        "2",
        "true",
    )
    assert told["ACCELERATE_USE_CPU"] == "true" and int(told["OMP_NUM_THREADS"]) >= 1
    with_gpus(2, monkeypatch)
    on_gpus = planned("2", monkeypatch)
    assert on_gpus is not None and "ACCELERATE_USE_CPU" not in on_gpus.environment()


@pytest.mark.parametrize("asked", ["0", "two", "-1", "no/such.yaml", "ddp:2", "fsdp2:", "fsdp2:0"])
def test_another_launch_is_refused_with_the_files_that_exist(
    asked: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "conf/launch").mkdir(parents=True)
    (tmp_path / "conf/launch/fsdp2.yaml").write_text("{}")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=rf"fsdp2:4.*'{asked}'; files: conf/launch/fsdp2\.yaml"):
        planned(asked, monkeypatch)


@pytest.mark.parametrize("name", ["ddp", "fsdp2", "deepspeed"])
def test_our_files_are_what_accelerates_own_class_and_launcher_read(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And its launcher derives the same variables from them as ours."""
    from accelerate.commands import launch as theirs
    from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file
    from accelerate.utils.launch import prepare_multi_gpu_env

    file = str(ROOT / f"conf/launch/{name}.yaml")
    config = load_config_from_file(file)
    assert isinstance(config, ClusterConfig)
    if name == "deepspeed":
        return
    with_gpus(4, monkeypatch)
    plan = planned(file, monkeypatch)
    assert plan is not None and (plan.processes, plan.machines, plan.on_cpu, plan.sharded) == (
        4,
        1,
        False,
        name == "fsdp2",
    )
    started: list[Any] = []
    monkeypatch.setattr(theirs, "launch_command", started.append)
    with monkeypatch.context() as patch:  # run_workers sets environment variables
        patch.setattr(os, "environ", dict(os.environ))
        assert processes.run_workers(plan, "stages.language", ["language.steps=3"]) == 0
    args, _, _ = theirs._validate_launch_command(started[0])
    assert (args.training_script, args.training_script_args) == ("stages.language", ["language.steps=3"])
    assert args.module and args.shutdown_timeout == processes.SAVE_SECONDS and not args.cpu
    made = prepare_multi_gpu_env(args)
    assert {k: v for k, v in made.items() if k.startswith(("FSDP_RESHARD", "FSDP_OFFLOAD", "FSDP_VERSION"))} == {
        k: v for k, v in plan.environment().items() if k.startswith("FSDP_")
    }
    assert made.get("FSDP_TRANSFORMER_CLS_TO_WRAP") == ("Block" if plan.sharded else None)
    assert made.get("ACCELERATE_USE_FSDP", "false") == str(plan.sharded).lower()


GOOD = "distributed_type: FSDP\nnum_processes: 2\nfsdp_config:\n  fsdp_version: 2\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "not an Accelerate config file: A `distributed_type` must be specified"),
        ("[", "not an Accelerate config file"),
        ("nonsense", "not an Accelerate config file"),
        (GOOD + "colour: red", "unknown keys .*colour"),
        (GOOD + "  fsdp_colour: red", "unknown key fsdp_colour; valid keys: fsdp_version"),
        (GOOD + "  fsdp_transformer_layer_cls_to_wrap: GPT2Block", "expected Block, got GPT2Block"),
        (GOOD.replace("version: 2", "version: 1"), "fsdp_version: expected 2, got 1"),
        ("distributed_type: FSDP\nnum_processes: 2", "fsdp_version: expected 2, got None"),
        (GOOD + "mixed_precision: bf16", "mixed_precision: expected no, got bf16 .set runtime.precision instead"),
        (GOOD + "dynamo_config:\n  dynamo_backend: INDUCTOR", "dynamo_config has no effect here"),
        (GOOD.replace("FSDP", "MEGATRON_LM"), "fsdp_config has no effect here"),
        (
            "distributed_type: XLA\nnum_processes: 2",
            "distributed_type: expected MULTI_GPU or MULTI_CPU or FSDP, got XLA",
        ),
        (GOOD.replace("es: 2", "es: -1"), "num_processes: .* -1 means all GPUs, and this machine has none"),
        (GOOD + "num_machines: 3", r"expected a multiple of num_machines \(3\), got 2"),
        (GOOD + "num_machines: 2", "main_process_ip and main_process_port must be those of machine 0"),
        (GOOD + "machine_rank: 1", "MACHINE_RANK: expected a number below 1"),
        ("distributed_type: DEEPSPEED\nnum_processes: 2", "DeepSpeed is not supported: .*fsdp2.yaml shards"),
    ],
)
def test_a_file_that_asks_for_what_we_do_not_do_is_refused(
    text: str, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with_gpus(0, monkeypatch)
    (tmp_path / "own.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        planned(str(tmp_path / "own.yaml"), monkeypatch)


def test_a_file_may_name_machines_and_the_variable_says_which_one_this_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with_gpus(8, monkeypatch)
    file = tmp_path / "own.yaml"
    file.write_text(
        GOOD.replace("es: 2", "es: 4") + "  fsdp_reshard_after_forward: false\nnum_machines: 2\n"
        "main_process_ip: 10.0.0.1\nmain_process_port: 29500\nuse_cpu: true"
    )
    monkeypatch.setenv("MACHINE_RANK", "1")
    assert planned(str(file), monkeypatch) == Plan(
        processes=2,
        machines=2,
        machine=1,
        address="10.0.0.1",
        port=29500,
        on_cpu=True,
        sharded=True,
        reshard=False,
        file=file,
    )
    monkeypatch.setenv("MACHINE_RANK", "2")
    with pytest.raises(
        ConfigError, match=r"MACHINE_RANK: expected a number below 2, the num_machines of .*own\.yaml, got '2'"
    ):
        planned(str(file), monkeypatch)


@pytest.mark.parametrize(
    ("codes", "code", "said"),
    [
        ({0: 143, 1: 143}, 143, ""),  # all saved and stopped
        ({0: 3, 1: 3}, 3, ""),
        ({0: 143, 1: 2}, 2, ""),  # the others were told to end
        ({0: 1, 1: 3}, 3, ""),  # they noticed that rank 1 was gone
        ({0: 143, 1: 1}, 1, ""),
        (
            {0: 1, 1: -9},
            137,
            "process 1 was killed by SIGKILL (the kernel does this when memory runs out); the others were stopped",
        ),
        ({0: -11, 1: 1}, 139, "process 0 was killed by SIGSEGV; the others"),
    ],
)
def test_the_cause_decides_the_exit_code(
    codes: dict[int, int], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert processes.exit_code(codes) == code
    told = capsys.readouterr().err
    assert said in told and bool(told) == bool(said)


def test_a_group_that_accelerate_did_not_start_is_refused_where_nobody_says_how_large(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    with pytest.raises(ConfigError, match=r"started only one of several processes.*STAGECOACH_LAUNCH=2"):
        planned("", monkeypatch)
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")  # mpirun started this one
    assert planned("", monkeypatch) is None
