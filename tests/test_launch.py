"""The launcher: order, what a failure leaves out, what is printed, and signals, with fake stages and with real ones at
smoke scale.
"""

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from pipeline.run import graph
from pipeline.run.config import Settings
from pipeline.run.errors import ConfigError
from pipeline.tools import launch
from pipeline.tools.launch import Build, Launcher, Stage
from tests.graph import Repository

WAITS: dict[str, set[str]] = {"a": set(), "b": {"a"}, "c": {"a"}, "d": {"a"}, "e": {"b", "c", "d"}}


def build_of(waits: dict[str, set[str]], jobs: int = 2, **seconds: float) -> Build:
    return Build({name: Stage(name, set(needs), seconds.get(name, 1.0)) for name, needs in waits.items()}, jobs)


class Repro:
    """A fake of `dvc repro -s STAGE` that ends when polled a second time and writes the stage's own exit code to the
    given file.
    """

    started: list[str]
    alive: int
    most: int
    codes: dict[str, int]
    cached: set[str]  # stages whose command does not run
    threads: dict[str, str]

    def __init__(self, target: Callable[..., None], args: tuple[str, dict[str, str], int], daemon: bool) -> None:
        assert target is launch.reproduce and args[2] == os.getpid() and daemon
        self.name, self.looks, self.pid = args[0], 0, 2**30
        self.exitcode: int | None = None
        self.told = Path(args[1][launch.ENDED])
        Repro.threads[self.name] = args[1]["OMP_NUM_THREADS"]

    def start(self) -> None:
        Repro.started.append(self.name)
        Repro.alive += 1
        Repro.most = max(Repro.most, Repro.alive)

    def join(self, timeout: float) -> None:
        self.looks += 1
        if self.looks < 2:
            return
        Repro.alive -= 1
        code = Repro.codes.get(self.name, 0)
        if self.name not in Repro.cached:
            self.told.write_text(str(code))
        self.exitcode = 255 if code else 0  # as DVC does, whatever the stage's own code


@pytest.fixture
def repros(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> type[Repro]:
    Repro.started, Repro.alive, Repro.most, Repro.codes, Repro.threads, Repro.cached = [], 0, 0, {}, {}, set()
    monkeypatch.setattr(launch.PROCESSES, "Process", Repro)
    monkeypatch.setattr(launch.device, "workers", lambda asked: 4)
    monkeypatch.setenv("STAGECOACH_WORK", str(tmp_path))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    return Repro


def states(build: Build) -> dict[str, str]:
    return {name: one.state for name, one in build.stages.items()}


def test_stages_start_when_what_they_wait_for_is_done(repros: type[Repro]) -> None:
    build = build_of(WAITS)
    assert Launcher(build, "make").run() == 0
    assert (repros.started[0], repros.started[-1], sorted(repros.started)) == ("a", "e", ["a", "b", "c", "d", "e"])
    assert (repros.most, repros.alive, set(states(build).values())) == (2, 0, {"built"})


def test_the_longest_chain_in_seconds_goes_first_and_no_stage_has_other_threads_for_its_neighbors(
    repros: type[Repro], monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = {"corpus": set(), "alone": {"corpus"}, "tools": {"corpus"}, "reward": {"tools"}, "rlhf": {"reward"}}
    assert build_of(waits, alone=9.0).ready() == ["corpus"]
    build = build_of(waits, alone=9.0)
    build.ended("corpus", "built")
    assert build.ready() == ["alone", "tools"]  # 9 s against a chain of three stages of 1 s
    assert Launcher(build_of(waits), "make").run() == 0
    assert repros.started == ["corpus", "tools", "alone", "reward", "rlhf"]
    assert set(repros.threads.values()) == {"2"}  # 4 cores for 2 jobs, even where a stage is alone
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert Launcher(build_of(waits), "make").run() == 0 and set(repros.threads.values()) == {"3"}


def test_deploy_goes_before_all_else_and_its_end_is_told(
    repros: type[Repro], capsys: pytest.CaptureFixture[str]
) -> None:
    waits = {"tools": set(), "stage_deploy": {"tools"}, "reward": {"tools"}, "rlhf": {"reward"}}
    assert Launcher(build_of(waits, jobs=1, reward=99.0), "make").run() == 0
    assert repros.started == ["tools", "stage_deploy", "reward", "rlhf"]
    said = capsys.readouterr().err
    assert said.count("you can talk to the model now: make chat") == 1
    assert said.index("talk to the model now") < said.index("launch: reward starts")


def test_a_failure_takes_with_it_only_what_needs_it_and_its_own_code_is_ours(
    repros: type[Repro], capsys: pytest.CaptureFixture[str]
) -> None:
    waits = {
        "tools": set(),
        "dpo": {"tools"},
        "evaluate@dpo": {"dpo"},
        "reward": {"tools"},
        "rlhf": {"reward"},
        "stage_report": {"tools", "dpo", "evaluate@dpo", "reward", "rlhf"},
    }
    repros.codes, repros.cached = {"dpo": 3, "rlhf": 2}, {"tools"}
    build = build_of(waits, dpo=50.0)
    assert Launcher(build, "make all").run() == 3
    assert states(build) == {
        "tools": "up to date",
        "dpo": "failed",
        "evaluate@dpo": "not built",
        "reward": "built",
        "rlhf": "failed",
        "stage_report": "built",
    }
    said = capsys.readouterr().err
    assert "evaluate@dpo  not built             needs dpo" in said and "exit 3" in said
    assert said.endswith("launch: dpo, rlhf failed, see above; everything else was built. Continue with: make all\n")


def test_progress_counts_stages_and_minutes_of_the_longest_chain_or_of_all_work() -> None:
    build = build_of(WAITS, jobs=2, a=60.0, b=120.0, c=300.0, d=60.0, e=60.0)
    assert build.left({}) == 420.0  # a, c, e
    assert build.progress({}) == "0 of 5, about 7 min left"
    build.ended("a", "built")
    build.stages["a"].took = 60.0
    build.stages["c"].state = "running"
    assert build.left({"c": 200.0}) == 180.0  # b, e against c's rest, e, and (120 + 100 + 60 + 60) / 2
    assert build.progress({"c": 200.0}) == "1 of 5, about 3 min left"


def test_what_is_built_tells_how_fast_this_machine_is() -> None:
    build = build_of(WAITS, jobs=2, a=60.0, b=120.0, c=300.0, d=60.0, e=60.0)
    build.ended("a", "built")
    build.stages["a"].took = 150.0
    assert build.left({}) == 2.5 * 360  # c, e
    build.stages["a"].seconds = 20.0  # so short a guess says nothing
    assert build.left({}) == 360.0
    build.ended("b", "up to date")
    assert build.left({}) == 360.0


def test_a_stage_with_little_beside_it_trains_on_all_cores_with_nothing_beside_it(
    repros: type[Repro], monkeypatch: pytest.MonkeyPatch
) -> None:
    build = build_of(WAITS, d=300.0)
    build.alone = frozenset("d")
    assert Launcher(build, "make").run() == 0
    assert repros.started == ["a", "d", "b", "c", "e"]
    assert repros.threads == {"a": "2", "b": "2", "c": "2", "d": "4", "e": "2"}
    build = build_of(WAITS, b=300.0, c=200.0, d=100.0)
    build.alone = frozenset("c")
    build.ended("a", "built")
    assert build.next() == ["b"]  # c waits for it, and d for c
    build.stages["b"].state = "running"
    assert build.next() == []
    build.ended("b", "up to date")
    build.ended("a", "up to date")
    assert build.next() == ["c"]
    build.stages["c"].state = "running"
    assert build.next() == []
    assert build.left({"c": 0.0}) == 200.0 + (100.0 + 1.0) / 2  # d and e while c has both


def test_a_signal_asks_each_stage_once_and_starts_no_more(
    repros: type[Repro], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[int] = []

    class Process:
        def __init__(self, pid: int) -> None:
            self.pid = pid

        def children(self) -> list["Process"]:
            return [Process(7)]

        def send_signal(self, number: int) -> None:
            assert number == signal.SIGINT
            asked.append(self.pid)

    original = Repro.join

    def join(self: Repro, timeout: float) -> None:
        if self.name == "b" and self.looks == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGINT)  # a second one changes nothing
        Repro.codes = {"b": 130, "c": 130}
        original(self, timeout)

    monkeypatch.setattr(launch.psutil, "Process", Process)
    monkeypatch.setattr(Repro, "join", join)
    build = build_of(WAITS)
    assert Launcher(build, "make").run() == 128 + signal.SIGTERM
    assert (repros.started, repros.alive, asked) == (["a", "b", "c"], 0, [7])
    assert states(build) == {"a": "built", "b": "stopped", "c": "stopped", "d": "not built", "e": "not built"}
    assert "stopped by SIGTERM; continue with: make" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_the_spine_is_the_chain_with_its_evaluations_and_a_report_that_waits_for_no_branch() -> None:
    waits = launch.chosen(graph.waits(), launch.SPINE)
    branches = ("lora", "dpo", "kto", "grpo", "distill", "teach", "diffusion", "memory", "base")
    assert not [name for name in waits if any(branch in name for branch in branches)]
    chain = {
        "corpus",
        "tasks",
        "overlap",
        "tokenizer",
        "encode@text",
        "encode@code",
        "language",
        "code",
        "tools",
        "reward",
        "rlhf",
    }
    chain |= {"deploy", "report", "evaluate_reward", *(f"evaluate@{model}" for model in launch.CHAIN)}
    assert {name.removeprefix("stage_") for name in waits} == chain | {"code_versions"}
    assert waits["stage_report"] == waits.keys() - {
        "stage_report",
        *(n for n in waits if n not in waits["stage_report"]),
    }
    assert {"stage_rlhf", "stage_evaluate@tools"} <= waits["stage_report"]


def test_a_target_that_is_not_there_is_refused() -> None:
    assert list(launch.chosen(WAITS, "b")) == ["a", "b"] and launch.chosen(WAITS, None) == WAITS
    with pytest.raises(ConfigError, match="no stage 'x'"):
        launch.chosen(WAITS, "x")


def test_seconds_are_those_of_the_last_run_here_then_of_the_scale_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STAGECOACH_WORK", str(tmp_path / "work"))
    (tmp_path / "conf/scale").mkdir(parents=True)
    (tmp_path / "conf/scale/demo.yaml").write_text("seconds: {language: 140, evaluate: 60}\n")
    for number, (key, seconds) in enumerate({"old": 7.0, "new": 9.5}.items()):
        folder = tmp_path / "work/evaluate@tools" / key
        folder.mkdir(parents=True)
        (folder / "speed.json").write_text(json.dumps({"seconds": seconds}))
        os.utime(folder / "speed.json", (number, number))
    names = ["stage_language", "stage_evaluate@tools", "stage_evaluate_reward", "stage_new"]
    assert launch.seconds_of(names, "demo") == dict(zip(names, (140.0, 9.5, 60.0, launch.UNKNOWN_SECONDS), strict=True))


def test_what_trains_alone_is_decided_by_what_could_run_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = launch.chosen(graph.waits(), launch.SPINE)
    seconds = dict.fromkeys(waits, 10.0) | {"stage_language": 100.0, "stage_tools": 300.0, "stage_deploy": 300.0}
    assert launch.alone(waits, seconds) == {"stage_language", "stage_tools"}
    assert launch.alone(waits, seconds | {"stage_tasks": 60.0}) == {"stage_tools"}
    long = seconds | {"stage_code": 100.0}  # the tasks run beside `language`, so nothing is left to run beside `code`
    assert launch.alone(waits, long | {"stage_tasks": 60.0}) == {"stage_code", "stage_tools"}
    assert launch.alone(waits, long | {"stage_tasks": 160.0}) == {"stage_tools"}
    monkeypatch.setattr(launch.device, "workers", lambda _: 2)
    assert launch.prepare(launch.SPINE, 2).alone == {"stage_code", "stage_tools"}
    assert launch.prepare(None, 2).alone >= {"stage_code"}
    monkeypatch.setattr(launch.device, "workers", lambda _: 4)
    assert not launch.prepare(launch.SPINE, 2).alone  # two threads each suffice


def test_without_a_sandbox_what_learns_from_sampled_programs_is_left_out_and_the_rest_is_built(
    repros: type[Repro], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launch.jail, "probe", lambda: {"refused": "no seccomp"})
    build = launch.prepare(None, 2)
    assert Launcher(build, "make all").run() == 0
    left_out = {one.name for one in build.stages.values() if one.state == "left out"}
    there = build.stages.keys()
    assert left_out == {"stage_grpo", "stage_diffusion_grpo"} & there
    follow = {"stage_evaluate@grpo", "stage_teach", "stage_distill", "stage_evaluate@distill"}
    assert set(build.named("not built")) == (follow | {"stage_evaluate@diffusion_grpo"}) & there
    assert build.stages["stage_rlhf"].state == build.stages["stage_deploy"].state == "built"
    assert build.stages["stage_report"].state == "built"
    assert "there is no sandbox here (no seccomp)" in capsys.readouterr().err
    settings = Settings(Path(), ["rlhf.rewards={code: 1.0}"])
    assert launch.rewarded_by_code(settings, ("stage_rlhf", "stage_grpo")) == ["stage_grpo", "stage_rlhf"]


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ('{"write": {"data/raw": {"pid": PID, "cmd": "dvc repro"}}, "read": {}}', True),
        ('{"write": {"data/raw": {"pid": 999999999, "cmd": "dvc repro"}}, "read": {}}', False),
        ('{"write": {}, "read": {"data/raw": [{"pid": 999999999, "cmd": "dvc"}, {"pid": PID, "cmd": "dvc"}]}}', True),
        ('{"write": {"data/r', False),  # killed while it was written
        ("{}", True),
    ],
)
def test_locks_of_processes_that_are_gone_are_removed(text: str, kept: bool, tmp_path: Path) -> None:
    launch.tidy_locks(tmp_path)  # there is no lock file yet
    (tmp_path / "rwlock").write_text(text.replace("PID", str(os.getpid())))
    launch.tidy_locks(tmp_path)
    assert (tmp_path / "rwlock").exists() == kept


def test_no_job_at_a_time_is_refused_and_one_core_has_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["launch", "-j", "0"])
    with pytest.raises(SystemExit) as refused:
        launch.main()
    assert refused.value.code == 2
    assert "expected at least 1" in capsys.readouterr().err
    jobs: list[int] = []

    def prepare(target: str | None, count: int) -> Build:
        jobs.append(count)
        raise ConfigError("enough")

    monkeypatch.setattr(launch, "prepare", prepare)
    monkeypatch.setattr(sys, "argv", ["launch"])
    for cores in (1, 2, 8):
        monkeypatch.setattr(launch.device, "workers", lambda asked, cores=cores: cores)
        launch.main()
    assert jobs == [1, 2, 2]


# -- real stages -------------------------------------------------------------------------------------------------------


def ours(folder: Path) -> list[psutil.Process]:
    """Processes whose working directory is in a folder."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and Path(process.cwd()).is_relative_to(folder):
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


def until(happened: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def encoded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Repository]:
    """A repository whose data are built, but not yet `models/code` and the model it needs."""
    repository = Repository.copy_of_ours(tmp_path_factory.mktemp("launch") / "repository")
    repository.edit("params.yaml", "language:\n  steps:", "language:\n  steps: 60")
    repository.edit("params.yaml", "code:\n  steps:", "code:\n  steps: 60")
    repository.edit("params.yaml", "save_steps: 500", "save_steps: 10")
    repository.run("python", "-m", "pipeline.tools.launch", "stage_encode")
    yield repository
    shutil.rmtree(repository.folder)


@pytest.fixture(scope="module")
def whole(encoded: Repository, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Hashes of the weights of an uninterrupted run."""
    repository = copied(encoded, tmp_path_factory.mktemp("whole") / "repository")
    repository.run("python", "-m", "pipeline.tools.launch", "stage_code", OMP_NUM_THREADS="1")
    found = {model: repository.sha(model) for model in ("language", "code")}
    shutil.rmtree(repository.folder)
    return found


def copied(repository: Repository, folder: Path) -> Repository:
    shutil.copytree(repository.folder, folder, symlinks=True)
    return Repository(folder)


MOMENTS: dict[str, Callable[[Path], bool]] = {
    "at the start": lambda folder: len(ours(folder)) > 1,  # DVC is being loaded
    "in training": lambda folder: bool(list(folder.glob(".work/language/*/step-*"))),
    "in the second stage": lambda folder: bool(list(folder.glob(".work/code/*"))),
}


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
@pytest.mark.parametrize(
    ("number", "moment"),
    [
        *((signal.SIGKILL, moment) for moment in MOMENTS),
        *zip((signal.SIGTERM, signal.SIGINT, signal.SIGHUP), MOMENTS, strict=True),
    ],
    ids=str,
)
def test_a_signal_to_the_launcher_ends_all_and_the_same_command_resumes_to_the_same_bits(
    number: signal.Signals, moment: str, encoded: Repository, whole: dict[str, str], tmp_path: Path
) -> None:
    repository = copied(encoded, tmp_path / "repository")
    command = ["python", "-m", "pipeline.tools.launch", "stage_code"]
    with repository.started(*command, OMP_NUM_THREADS="1") as process:
        until(lambda: MOMENTS[moment](repository.folder))
        process.send_signal(number)
        assert process.wait(30) == (-number if number == signal.SIGKILL else 128 + number)
        until(lambda: not ours(repository.folder), 30.0)
    repository.dvc("status")
    repository.run(*command, OMP_NUM_THREADS="1")
    assert {model: repository.sha(model) for model in whole} == whole
    shutil.rmtree(repository.folder)


def test_the_end_says_how_idle_the_jobs_were_and_which_chain_took_longest() -> None:
    build = build_of(WAITS)
    for name, took in {"a": 60.0, "b": 30.0, "c": 120.0, "d": 0.2, "e": 60.0}.items():
        build.stages[name].took = took
    assert build.use(240.0) == "4.0 min, 2 jobs, idle 44% of the time; longest chain 4.0 min: a > c > e\n"
    alone = build_of({"stage_a": set()}, jobs=1)
    alone.stages["stage_a"].took = 90.0
    assert alone.use(90.0) == "1.5 min, 1 job; longest chain 1.5 min: a\n"


def makespan(build: Build) -> float:
    """Seconds of a build in which every stage takes as long as estimated."""
    now, running = 0.0, dict[str, float]()
    while running or build.ready():
        for name in build.ready()[: build.jobs - len(running)]:
            build.stages[name].state, running[name] = "running", now + build.stages[name].seconds
        first = min(running, key=lambda name: running[name])
        now = running.pop(first)
        build.ended(first, "built")
    return now


def shortest(build: Build) -> float:
    """A lower bound in seconds for any order: the longest chain, or a chain to a stage plus the time of all that needs
    that stage divided by the jobs.
    """
    before: dict[str, float] = {}  # stage -> seconds of the longest chain that ends with it
    needs: dict[str, set[str]] = {}  # stage -> all that it needs, directly or indirectly
    for name, stage in build.stages.items():  # in topological order
        before[name] = stage.seconds + max((before[other] for other in stage.waits), default=0.0)
        needs[name] = stage.waits.union(*(needs[other] for other in stage.waits))

    def after(name: str) -> float:
        return sum(stage.seconds for stage in build.stages.values() if name in needs[stage.name])

    return max(*before.values(), *(before[name] + after(name) / build.jobs for name in build.stages))


@pytest.mark.parametrize("target", ["spine", None])
def test_two_jobs_take_hardly_longer_than_any_order_could(
    target: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the stage times of the demo."""
    monkeypatch.setenv("STAGECOACH_WORK", str(tmp_path))
    waits = launch.chosen(graph.waits(), target)
    seconds = launch.seconds_of(list(waits), "demo")
    build = build_of(waits, **seconds)
    assert makespan(build) < 1.01 * shortest(build_of(waits, **seconds))


def test_the_bound_is_the_time_of_a_graph_whose_order_is_known() -> None:
    assert shortest(build_of({"a": set(), "b": {"a"}, "c": {"a"}, "d": {"a"}}, a=10.0, b=4.0, c=6.0, d=2.0)) == 16.0
    assert shortest(build_of({"a": set(), "b": {"a"}, "c": set()}, a=10.0, b=4.0, c=1.0)) == 14.0
