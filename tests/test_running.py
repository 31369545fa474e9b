"""What surrounds a stage: exit codes, one-line messages, publishing whole or not at all, resuming, starting over."""

import errno
import hashlib
import importlib.util
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from pipeline.run import config, tracking, workdir
from pipeline.run import stage as run_stage
from pipeline.run.errors import DataError, GateError, StagecoachError
from pipeline.run.mlflow_store import Description

ROOT = Path(__file__).parents[1]
SOURCE = '''"""Stage toy: doubles a file."""

from dataclasses import dataclass

@dataclass(frozen=True, kw_only=True)
class Params:
    times: int = 2
    """how often"""

    def __post_init__(self):
        if self.times < 1:
            raise ValueError("times: expected at least 1")

def run(params, job, *, source, out):
    HOOK(job, out)
    out.write_text(source.read_text() * params.times)
    job.report(bytes=out.stat().st_size)
'''
WIRING: dict[str, Any] = {"inputs": {"source": "data/raw/a.txt"}, "outs": {"out": "data/toy"}}
Stage = Callable[..., int]


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A repository with one stage, as a module; its HOOK runs inside `run`."""
    for name in ("DVC_ROOT", "DVC_STAGE", "STAGECOACH_WORK", "STAGECOACH_LOCKED", "STAGECOACH_LAUNCH"):
        monkeypatch.delenv(name, raising=False)
    for name in ("stages", "conf/model", "conf/scale", "conf/data", "data/raw"):
        (tmp_path / name).mkdir(parents=True)
    shutil.copy(ROOT / "conf/config.yaml", tmp_path / "conf/config.yaml")
    (tmp_path / "conf/model/nano.yaml").write_text("width: 8\n")
    (tmp_path / "conf/scale/demo.yaml").write_text("# @package _global_\ntoy: {times: 3}\n")
    (tmp_path / "conf/data/machine.yaml").write_text("source: machine\n")
    (tmp_path / "params.yaml").write_text(
        "seed: 1\ndata_seed: 1\nmodel: nano\nscale: demo\ndata: machine\ntoy: {times: null}\n"
    )
    (tmp_path / "data/raw/a.txt").write_text("ab")
    (tmp_path / "stages/__init__.py").write_text("")
    (tmp_path / "stages/toy.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    groups = {"model": {"width": 8}, "data": {"source": "machine"}, "toy": {"times": 3}}
    monkeypatch.setattr(config.Settings, "_compose", lambda self: groups)  # instead of Hydra, which takes 0.1 s
    spec = importlib.util.spec_from_file_location("toy", tmp_path / "stages/toy.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "toy", module)
    spec.loader.exec_module(module)
    module.HOOK = lambda job, out: None  # type: ignore[attr-defined]
    return module


def main(stage: ModuleType, *argv: str, **wiring: Any) -> int:
    """The exit code of the stage's command."""
    before = sys.argv
    sys.argv = ["toy", *argv]
    try:
        run_stage.main(stage.run, **(WIRING | wiring))
    except SystemExit as done:
        return int(done.code or 0)
    finally:
        sys.argv = before
    raise AssertionError("a command ends in SystemExit")


def test_a_stage_that_makes_data_is_keyed_by_the_seed_of_the_data_alone(
    stage: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    main(stage, seed="data_seed")
    assert json.loads(Path("metrics/toy.json").read_text())["params"]["data_seed"] == 1
    main(stage, "seed=2", seed="data_seed")
    assert "already computed" in capsys.readouterr().err
    seen: list[int] = []
    stage.HOOK = lambda job, out: seen.append(job.seed)  # type: ignore[attr-defined]
    main(stage, "data_seed=2", seed="data_seed")
    main(stage, "seed=3", "data_seed=9")
    assert seen == [2, 3]
    assert json.loads(Path("metrics/toy.json").read_text())["params"]["seed"] == 3


def raising(error: BaseException) -> Callable[..., None]:
    def hook(_job: workdir.Job, out: Path) -> None:
        out.write_text("half")
        raise error

    return hook


def test_a_run_publishes_out_and_metrics_with_their_lineage(
    stage: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(stage) == 0
    assert Path("data/toy").read_text() == "ababab"
    metrics = json.loads(Path("metrics/toy.json").read_text())
    assert metrics["bytes"] == 6
    assert set(metrics["lineage"]) == {"key", "code", "inputs", "versions"} and list(metrics["lineage"]["inputs"]) == [
        "data/raw/a.txt"
    ]
    assert set(metrics["lineage"]["versions"]) == {"numpy", "safetensors", "tokenizers", "torch"}  # no lock file here
    assert f" s (key {metrics['lineage']['key']})\n  bytes  6\n" in capsys.readouterr().err
    assert json.loads(Path(f".work/toy/{metrics['lineage']['key']}/speed.json").read_text())["seconds"] >= 0


def test_other_packages_are_told_and_invalidate_nothing(
    stage: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    main(stage)
    first = json.loads(Path("metrics/toy.json").read_text())["lineage"]
    Path("requirements.lock").write_text("numpy==1.0\n")
    monkeypatch.setattr(workdir.importlib.metadata, "version", lambda name: "9.9")
    assert workdir.versions() == dict.fromkeys(workdir.COMPUTING, "9.9") | {
        "requirements.lock": hashlib.sha256(b"numpy==1.0\n").hexdigest()[:16]
    }
    assert main(stage) == 0 and "already computed" in capsys.readouterr().err
    assert json.loads(Path("metrics/toy.json").read_text())["lineage"] == first


def test_a_finished_key_is_only_exported(stage: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    main(stage)
    stage.HOOK = raising(AssertionError("ran again"))  # type: ignore[attr-defined]
    Path("data/toy").unlink()
    assert main(stage) == 0
    assert Path("data/toy").read_text() == "ababab"
    assert "already computed" in capsys.readouterr().err
    with pytest.raises(AssertionError, match="ran again"):
        main(stage, "toy.times=4")


def test_a_finished_out_that_was_damaged_is_computed_again(stage: ModuleType) -> None:
    main(stage)
    (out,) = Path(".work/toy").glob("*/out/data/toy")
    out.unlink()
    out.write_text("ababax")
    assert main(stage) == 0
    assert Path("data/toy").read_text() == "ababab"


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (DataError("data/x.jsonl:3: no field `text`"), 2, "stage_toy: data/x.jsonl:3: no field `text`\n"),
        (GateError("the first loss is 9"), 3, "stage_toy: the first loss is 9\n"),
        (StagecoachError("no space: 3 MB needed"), 1, "stage_toy: no space: 3 MB needed\n"),
        (KeyboardInterrupt(), 130, "stage_toy: interrupted; rerun to resume\n"),
    ],
)
def test_an_error_of_a_person_is_one_line_an_exit_code_and_no_out(
    stage: ModuleType, error: BaseException, code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("data/toy").write_text("old")
    stage.HOOK = raising(error)  # type: ignore[attr-defined]
    assert main(stage) == code
    assert capsys.readouterr().err == message
    assert Path("data/toy").read_text() == "old"
    assert not Path("metrics").exists()


def test_a_full_disk_is_one_line_and_exit_1(stage: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    stage.HOOK = raising(OSError(errno.ENOSPC, "No space left on device", "/disk/x"))  # type: ignore[attr-defined]
    assert main(stage) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert error.startswith("stage_toy: no space left on the device of /disk/x. Nothing was published; free some space")


def test_a_full_disk_while_publishing_keeps_the_older_out(
    stage: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("data/toy").write_text("old")

    def full(source: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(target))

    with monkeypatch.context() as patch:
        patch.setattr(workdir, "publish", full)
        assert main(stage) == 1
    assert "no space left on the device of data/toy" in capsys.readouterr().err
    assert Path("data/toy").read_text() == "old"
    assert main(stage) == 0
    assert Path("data/toy").read_text() == "ababab"


@pytest.mark.parametrize("error", [OSError(errno.EACCES, "denied"), ZeroDivisionError()])
def test_a_defect_of_ours_keeps_its_traceback(stage: ModuleType, error: Exception) -> None:
    stage.HOOK = raising(error)  # type: ignore[attr-defined]
    with pytest.raises(type(error)):
        main(stage)


def test_bad_input_exits_2_and_says_what_to_do(stage: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    cases = {
        "toy.time=3": "stage_toy: command line: toy: unknown key 'time' (did you mean 'times'?); valid keys: times\n",
        "toy.times=high": 'stage_toy: command line: toy.times: expected int, got "high"\n',
        "toy.times=0": "stage_toy: command line: toy: times: expected at least 1\n",
        "three": "stage_toy: usage: python -m stages.toy [key=value ...]; got 'three'\n",
    }
    for argument, message in cases.items():
        assert main(stage, argument) == 2
        assert capsys.readouterr().err == message
    Path("data/raw/a.txt").unlink()
    Path("dvc.yaml").write_text("stages: {stage_corpus: {cmd: x, outs: [data/raw]}}")
    assert main(stage) == 2
    assert capsys.readouterr().err == "stage_toy: data/raw/a.txt does not exist; make it with: dvc repro stage_corpus\n"
    assert main(stage, inputs={}, optional=("source",), outs={"out": "x"}, items=("a", "b")) == 2
    assert "usage: python -m stages.toy {a|b} [key=value ...]; got []" in capsys.readouterr().err


def test_a_missing_input_names_the_stage_that_makes_it_or_what_there_is(stage: ModuleType) -> None:
    shutil.copy(ROOT / "dvc.yaml", "dvc.yaml")
    Path("models/code").mkdir(parents=True)
    cases = {
        "models/language": "make it with: dvc repro stage_language",
        "models/lnaguage": "models/ contains: code",
        "data/tokens/text": "make it with: dvc repro stage_encode",
        "data/tokenizer": "make it with: dvc repro stage_tokenizer",
        "data/preferences": "make it with: dvc repro stage_tasks",
        "metrics": "make it with: dvc repro",
        "data/own": "it is part of the repository: restore it with git checkout",
        "feedback": "it is part of the repository: restore it with git checkout",
    }
    assert {path: run_stage.remedy(Path(path)) for path in cases} == cases


def test_a_killed_run_finds_its_parts_and_its_half_written_out_is_gone(stage: ModuleType) -> None:
    def first(job: workdir.Job, out: Path) -> None:
        (job.folder / "parts").mkdir()
        (job.folder / "parts/1").write_text("done")
        out.write_text("half")
        raise KeyboardInterrupt

    def second(job: workdir.Job, out: Path) -> None:
        assert (job.folder / "parts/1").read_text() == "done"
        assert not out.exists()

    stage.HOOK = first  # type: ignore[attr-defined]
    assert main(stage) == 130
    stage.HOOK = second  # type: ignore[attr-defined]
    assert main(stage) == 0
    assert list(Path(".work/toy").glob("*/parts")) == []


def test_fresh_starts_over_before_a_run_is_opened_in_mlflow(stage: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """An old run id would make the new run continue the finished one and leave out every step it holds."""
    opened: list[list[str]] = []

    class Recorded(tracking.MlflowRun):
        def __init__(self, description: Description, folder: Path, *rest: Any) -> None:
            opened.append(sorted(path.name for path in folder.iterdir()))
            super().__init__(description, folder, *rest)
            (folder / "mlflow.json").write_text('{"run_id": "old"}')

    monkeypatch.setattr(tracking, "MlflowRun", Recorded)
    assert main(stage) == 0
    assert main(stage) == 0  # finished: no run is opened
    assert main(stage, "runtime.fresh=true") == 0
    assert opened == [["lock"], ["lock"]]


@pytest.mark.parametrize(
    ("error", "status"), [(GateError("x"), "FAILED"), (SystemExit(143), "KILLED"), (KeyboardInterrupt(), "KILLED")]
)
def test_mlflow_is_told_how_a_run_ended(
    stage: ModuleType, monkeypatch: pytest.MonkeyPatch, error: BaseException, status: str
) -> None:
    told: list[str] = []
    monkeypatch.setattr(tracking.Tracker, "abandon", lambda self, status: told.append(status))
    stage.HOOK = raising(error)  # type: ignore[attr-defined]
    assert main(stage) != 0
    assert told == [status]


@pytest.fixture
def handlers() -> Iterator[None]:
    """Restore the signal handlers afterwards."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.usefixtures("handlers")
def test_a_signal_before_or_after_the_loop_ends_a_training_stage_at_once(
    stage: ModuleType, number: signal.Signals, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(tracking.Tracker, "abandon", lambda self, status: told.append(status))

    def before(job: workdir.Job, out: Path) -> None:
        out.write_text("half")
        signal.raise_signal(number)
        pytest.fail("it went on")

    def after(job: workdir.Job, out: Path) -> None:
        with job.stop.heeded():
            pass
        before(job, out)

    for hook in (before, after):
        stage.HOOK = hook  # type: ignore[attr-defined]
        assert main(stage, trains=True) == 128 + number
        assert capsys.readouterr().err == (
            f"stage_toy: stopped by {number.name} outside the training loop; rerun to resume\n"
        )
    assert told == ["KILLED", "KILLED"] and not Path("data/toy").exists()


@pytest.mark.usefixtures("handlers")
def test_a_signal_in_the_loop_is_left_to_the_loop_and_one_in_its_last_step_ends_the_stage(stage: ModuleType) -> None:
    seen: list[int] = []

    def hook(job: workdir.Job, out: Path) -> None:
        with job.stop.heeded():
            signal.raise_signal(signal.SIGTERM)
            seen.append(job.stop.signal)
        pytest.fail("it went on")

    stage.HOOK = hook  # type: ignore[attr-defined]
    assert main(stage, trains=True) == 128 + signal.SIGTERM and seen == [signal.SIGTERM]


@pytest.mark.usefixtures("handlers")
def test_a_stage_that_trains_publishes_its_curve(stage: ModuleType) -> None:
    def hook(job: workdir.Job, out: Path) -> None:
        job.tracker.log(1, {"loss": 2.5})
        job.report(best={"step": 1, "val_loss": 2.25, "val_bpb": 1.5}, tokens=64, steps=1)

    stage.HOOK = hook  # type: ignore[attr-defined]
    assert main(stage, trains=True) == 0
    assert Path("metrics/toy.csv").read_text() == "step,loss\n1,2.5\n"
    compared = json.loads(Path("metrics/training/toy.json").read_text())
    assert compared == {"val_loss": 2.25, "val_bpb": 1.5, "tokens": 64}


def test_the_job_has_the_workers_and_the_trackers_of_the_runtime_block(
    stage: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, jobs = [], []

    class Recorded:
        def __init__(self, names: tuple[str, ...], run: str, folder: Path, parameters: dict[str, Any]) -> None:
            opened.append((names, run, folder))

        def log(self, rows: list[dict[str, Any]]) -> None:
            pass

        def finish(self) -> None:
            opened.append("closed")

    monkeypatch.setattr(tracking, "Others", Recorded)
    stage.HOOK = lambda job, out: jobs.append(job)  # type: ignore[attr-defined]
    assert main(stage, "runtime.workers=3") == 0
    assert (jobs[0].workers, opened) == (3, [])
    assert main(stage, "runtime.workers=1", "runtime.trackers=[tensorboard, wandb]", "runtime.fresh=true") == 0
    assert (jobs[1].workers, opened) == (1, [(("tensorboard", "wandb"), "toy", jobs[1].folder), "closed"])


def test_an_item_of_a_matrix_has_its_own_key_and_files(stage: ModuleType) -> None:
    wiring: dict[str, Any] = {"items": ("a", "b"), "outs": {"out": "data/toy/{item}"}}
    assert main(stage, "a", **wiring) == main(stage, "b", **wiring) == 0
    assert sorted(p.name for p in Path("data/toy").iterdir()) == ["a", "b"]
    assert sorted(p.name for p in Path(".work").glob("toy@*")) == ["toy@a", "toy@b"]
    assert sorted(p.name for p in Path("metrics").iterdir()) == ["toy_a.json", "toy_b.json"]


def test_help_lists_keys_with_value_origin_and_meaning(stage: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(stage, "--help") == 0
    text = capsys.readouterr().out
    assert "Stage toy: doubles a file." in text
    assert "  toy.times = 3                              int, conf/scale/demo.yaml: how often\n" in text
    assert "runtime.fresh = False" in text
    assert not Path("data/toy").exists()


def test_the_commit_is_read_from_loose_and_packed_references(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DVC_ROOT", str(tmp_path))
    assert run_stage.git_commit() == ""
    (tmp_path / ".git/refs/heads").mkdir(parents=True)
    (tmp_path / ".git/HEAD").write_text("ref: refs/heads/main\n")
    assert run_stage.git_commit() == ""
    (tmp_path / ".git/packed-refs").write_text("# pack-refs\n1111 refs/heads/other\n2222 refs/heads/main\n")
    assert run_stage.git_commit() == "2222"
    (tmp_path / ".git/refs/heads/main").write_text("3333\n")
    assert run_stage.git_commit() == "3333"
    (tmp_path / ".git/HEAD").write_text("4444\n")
    assert run_stage.git_commit() == "4444"


@pytest.mark.parametrize("locked", ["models", ".work"])
def test_a_folder_that_cannot_be_written_is_found_before_anything_is_computed(
    stage: ModuleType, locked: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As on a file system that is mounted read-only, where even root may not write."""
    stage.HOOK = raising(AssertionError("it ran"))  # type: ignore[attr-defined]
    Path(locked).mkdir()
    original = os.access
    monkeypatch.setattr(workdir.os, "access", lambda path, mode: Path(path).name != locked and original(path, mode))
    assert main(stage, outs={"out": "models/toy"}) == 2
    said = capsys.readouterr().err
    assert (
        said.startswith("stage_toy: ")
        and f"{locked} is not writable; nothing was computed. Make it a writable folder" in said
    )
    assert said.count("\n") == 1


def test_an_out_whose_folder_is_a_file_is_found_before_anything_is_computed(
    stage: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("models").write_text("")
    assert main(stage, outs={"out": "models/toy"}) == 2
    assert "models is not a folder; nothing was computed" in capsys.readouterr().err
