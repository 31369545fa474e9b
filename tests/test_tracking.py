"""Files without timestamps, the progress line, and MLflow: four concurrent first users, a resumed run, a store that
does not answer.
"""

import json
import math
import os
import re
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline.run import mlflow_store, tracking
from pipeline.run.tracking import Tracker, clean, flatten, progress, say, write_curve, write_json

ROOT = Path(__file__).parents[1]


def test_a_value_becomes_what_dvc_can_show() -> None:
    given = {"a": math.nan, "b": {"c": -math.inf, 3: 1 / 3}, "d": True, "e": None, "f": 7, "g": "text", "h": 1234567.89}
    expected = {
        "a": "not finite",
        "b": {"c": "not finite", "3": 0.3333333},
        "d": "true",
        "e": "none",
        "f": 7,
        "g": "text",
        "h": 1234568.0,
    }
    assert clean(given) == expected


def test_a_metrics_file_is_sorted_and_ends_in_one_line_feed(tmp_path: Path) -> None:
    write_json(tmp_path / "deep" / "a.json", {"z": 1.0, "a": {"é": 2}})
    assert (tmp_path / "deep/a.json").read_bytes() == '{\n  "a": {\n    "é": 2\n  },\n  "z": 1.0\n}\n'.encode()


def test_a_curve_has_step_first_and_holes_where_a_row_has_no_value(tmp_path: Path) -> None:
    write_curve(
        tmp_path / "a.csv", [{"step": 1, "loss": 8.0}, {"step": 2, "val/bpb": 1 / 3, "loss": math.nan}, {"step": 3}]
    )
    assert (tmp_path / "a.csv").read_bytes() == b"step,loss,val/bpb\n1,8.0,\n2,not finite,0.3333333\n3,,\n"


def test_flat_names_are_paths() -> None:
    assert flatten({"a": {"b": 1, "c": {"d": 2}}, "e": 3, "f": {}}) == {"a/b": 1, "a/c/d": 2, "e": 3}


def test_without_a_terminal_progress_is_a_line_in_ten_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 0.0
    monkeypatch.setattr(tracking.time, "monotonic", lambda: now)
    with progress(total=100, desc="encode", unit="doc", initial=20) as bar:
        for now in (9.0, 10.0, 19.0, 220.0):
            bar.note(f"loss {now}")
            bar.update(10)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "encode: 40/100 doc, loss 10.0, 10 s, about 30 s left",
        "encode: 60/100 doc, loss 220.0, 4 min, about 4 min left",
    ]


def test_only_rank_0_talks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    say("one")
    monkeypatch.setenv("RANK", "1")
    say("two")
    assert capsys.readouterr().err == "one\n"


def tracker(folder: Path, *, quiet: bool = False) -> Tracker:
    return Tracker("toy", folder, {"stage": "toy"}, {"fit": {"lr": 0.1}}, quiet=quiet)


def test_numbers_of_one_step_share_a_row_and_speed_stays_in_the_work_folder(tmp_path: Path) -> None:
    one = tracker(tmp_path)
    one.log(1, {"loss": 2.0})
    one.log(2, {"loss": 1.0})
    one.log(2, {"val/loss": 1.5})
    one.speed["device"] = "cpu"
    one.finish()
    assert one.rows == [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0, "val/loss": 1.5}]
    assert [p.name for p in tmp_path.iterdir()] == ["speed.json"]
    assert json.loads((tmp_path / "speed.json").read_text()) == {"device": "cpu"}


def test_a_quiet_tracker_and_another_rank_write_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracker(tmp_path, quiet=True).finish()
    monkeypatch.setenv("RANK", "1")
    tracker(tmp_path).finish()
    assert list(tmp_path.iterdir()) == []


START = (
    "import os, sys; from pathlib import Path; from pipeline.run.tracking import Tracker; folder = Path(sys.argv[1]);"
    " folder.mkdir(exist_ok=True)\n"
)
OPEN = (
    "one = Tracker('toy', folder, {'stage': 'toy', 'dvc.exp': ''}, {'fit': {f'k{n}': n for n in range(120)}},"
    " quiet=False)\n"
)
LOG = """
def log(first, last):
    for step in range(first, last):
        one.log(step, {"loss": 1 / step})
"""


def started(root: Path, folder: str, code: str, **environment: str) -> subprocess.Popen[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("STAGECOACH_", "MLFLOW_", "DVC_"))}
    variables = clean | {"DVC_ROOT": str(root), "OMP_NUM_THREADS": "1"} | environment
    command = [sys.executable, "-c", START + OPEN + LOG + code, str(root / folder)]
    return subprocess.Popen(command, cwd=ROOT, env=variables, stderr=subprocess.PIPE, text=True)


def stored(root: Path, query: str) -> list[Any]:
    with sqlite3.connect(root / "mlflow.db") as connection:
        return connection.execute(query).fetchall()


@pytest.mark.slow
@pytest.mark.full
def test_four_first_users_of_one_store_give_no_error(tmp_path: Path) -> None:
    code = "log(1, 5); one.report(best={'loss': 0.25, 'note': 'text'}, **{'below 20%, (a)': 3}); one.finish()"
    running = [started(tmp_path, f"w{n}", code) for n in range(4)]
    errors = [process.communicate()[1] for process in running]
    assert [process.returncode for process in running] == [0] * 4
    assert errors == [""] * 4
    runs = stored(tmp_path, "select name, status from runs order by name")
    assert runs == [("workspace", "FINISHED")] + [("workspace/toy", "FINISHED")] * 4
    ((parent,),) = stored(tmp_path, "select run_uuid from runs where name = 'workspace'")
    assert stored(tmp_path, "select value from tags where key = 'mlflow.parentRunId'") == [(parent,)] * 4
    assert stored(tmp_path, "select count(*) from metrics where key = 'loss'") == [(16,)]
    assert stored(tmp_path, "select count(*) from metrics where key = 'final/best/loss'") == [(4,)]
    assert stored(tmp_path, "select count(*) from metrics where key = 'final/below 20__ _a_'") == [(4,)]  # valid there
    assert stored(tmp_path, "select count(*) from params") == [(4 * 120,)]
    assert stored(tmp_path, "select count(*) from experiments where name = 'stagecoach'") == [(1,)]
    assert stored(tmp_path, "select artifact_location from experiments where name = 'stagecoach'") == [
        ((tmp_path / "mlartifacts").as_uri(),)
    ]


@pytest.mark.slow
@pytest.mark.full
def test_runs_that_open_at_the_same_time_log_the_same_data_sets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DVC_ROOT", str(tmp_path))
    monkeypatch.delenv("STAGECOACH_MLFLOW", raising=False)
    mlflow_store.connect()
    warnings: list[str] = []
    described = mlflow_store.Description("toy", {"dvc.exp": ""}, {}, {f"data/{n}": str(n) for n in range(99)})
    runs = []
    for number in range(8):
        (tmp_path / str(number)).mkdir()
        runs.append(mlflow_store.MlflowRun(described, tmp_path / str(number), warnings.append))
    for run in runs:
        run.finish({})
    assert not warnings
    assert stored(tmp_path, "select count(*) from datasets") == [(99,)]
    assert stored(tmp_path, "select count(*) from inputs where source_type = 'DATASET'") == [(8 * 99,)]


@pytest.mark.slow
@pytest.mark.full
def test_a_resumed_stage_is_one_finished_run_without_a_step_twice(tmp_path: Path) -> None:
    killed = "log(1, 21); one.flush(); log(21, 41); one.flush(); log(41, 50); os._exit(9)"
    stopped = (
        "one.restore([{'step': s, 'loss': 1 / s} for s in range(1, 21)]); log(21, 45); one.flush();"
        " one.abandon('KILLED')"
    )
    done = "one.restore([{'step': s, 'loss': 1 / s} for s in range(1, 45)]); log(45, 61); one.finish()"
    for code, exit_code, status in ((killed, 9, "RUNNING"), (stopped, 0, "KILLED"), (done, 0, "FINISHED")):
        process = started(tmp_path, "w", code)
        assert process.communicate()[1] == ""
        assert process.returncode == exit_code
        assert stored(tmp_path, "select status from runs") == [(status,)] * 2  # the experiment's run too
    rows = stored(tmp_path, "select step, value from metrics where key = 'loss' order by step")
    assert rows == [(step, pytest.approx(1 / step)) for step in range(1, 61)]


@pytest.mark.slow
@pytest.mark.full
def test_what_waits_for_delivery_becomes_the_run_that_the_stage_itself_would_log(tmp_path: Path) -> None:
    code = (
        "log(1, 21); one.flush(); one.back_to(10); log(21, 31); one.report(best={'loss': 0.25}, nan=float('nan'));"
        " one.finish([(7, {'system/cpu': 0.5})])\n"
    )
    deliver = (
        "assert 'mlflow' not in sys.modules; from pipeline.run.mlflow_store import deliver;"
        " deliver(Path(ROOT), iter([False, True]).__next__, print)"
    )
    found = []
    for root, after, environment in (
        (tmp_path / "now", "", {}),
        (tmp_path / "later", deliver, {"STAGECOACH_MLFLOW": "later"}),
    ):
        (root / "work/toy").mkdir(parents=True)
        process = started(root, "work/toy/key", code + after.replace("ROOT", repr(str(root / "work"))), **environment)
        assert (process.communicate()[1], process.returncode) == ("", 0)
        queries = (
            "select name, status from runs order by name",
            "select key, value, step from metrics order by key, step, value",
            "select key, value from params order by key",
            "select key, value from tags where key != 'mlflow.parentRunId' order by key, value",
        )
        found.append([stored(root, query) for query in queries])
    assert found[0] == found[1]
    assert found[0][0] == [("workspace", "FINISHED"), ("workspace/toy", "FINISHED")] and len(found[0][1]) > 30
    assert (tmp_path / "later/work/toy/key/mlflow.jsonl").read_text() == ""


@pytest.mark.slow
@pytest.mark.full
def test_a_store_that_does_not_answer_costs_one_warning(tmp_path: Path) -> None:
    code = "log(1, 5); one.flush(); log(5, 9); one.speed['seconds'] = 3; one.finish()"
    process = started(tmp_path, "w", code, MLFLOW_TRACKING_URI="http://127.0.0.1:9")
    error = process.communicate()[1]
    assert process.returncode == 0
    assert len(error.splitlines()) == 1
    assert error.startswith("warning: MLflow failed")
    assert json.loads((tmp_path / "w/speed.json").read_text()) == {"seconds": 3}


def test_a_store_that_never_answers_is_waited_for_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import threading

    release = threading.Event()
    monkeypatch.setenv("STAGECOACH_MLFLOW", "on")
    monkeypatch.setattr(mlflow_store, "WAIT", 0.05)
    monkeypatch.setattr(tracking.MlflowRun, "_open", lambda self: release.wait(20))
    one = tracker(tmp_path)
    one.log(1, {"loss": 2.0})
    one.flush()
    one.finish()
    release.set()
    assert capsys.readouterr().err.splitlines() == [
        "warning: MLflow failed (TimeoutError: no answer within 0 s); continuing without it"
    ]
    assert (tmp_path / "speed.json").is_file()


@pytest.mark.parametrize(
    ("kind", "found"), [("folder", "a folder"), ("text", r"a file that SQLite cannot open \(file is not a database\)")]
)
def test_a_store_that_is_no_database_costs_one_warning_and_no_time(
    kind: str, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """MLflow would try to open it for 100 seconds."""
    if kind == "folder":
        (tmp_path / "mlflow.db").mkdir()
    else:
        (tmp_path / "mlflow.db").write_text("no database" * 100)
    monkeypatch.setenv("STAGECOACH_MLFLOW", "on")
    monkeypatch.setenv("DVC_ROOT", str(tmp_path))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr(mlflow_store, "WAIT", 10.0)
    one = tracker(tmp_path)
    one.log(1, {"loss": 2.0})
    one.flush()
    one.finish()
    (warning,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(
        rf"warning: MLflow failed \(ConfigError: .*mlflow\.db: expected MLflow's database, found {found}; .*", warning
    )


def test_a_run_that_is_being_stopped_does_not_wait_for_its_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import threading

    release = threading.Event()
    monkeypatch.setenv("STAGECOACH_MLFLOW", "on")
    monkeypatch.setattr(tracking, "SHORT_WAIT", 0.05)
    monkeypatch.setattr(tracking.MlflowRun, "_open", lambda self: release.wait(20))
    tracker(tmp_path).abandon("KILLED")
    release.set()
    assert "no answer within 0 s" in capsys.readouterr().err


def test_deliver_makes_the_calls_in_order_also_those_of_a_run_that_another_process_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[Any, ...]] = []

    class Run:
        def __init__(self, description: mlflow_store.Description, folder: Path, *_: Any) -> None:
            self.name = description.name
            calls.append((self.name, "open", folder))

        def __getattr__(self, method: str) -> Any:
            return lambda *arguments: calls.append((self.name, method, *arguments))

    monkeypatch.setenv("STAGECOACH_MLFLOW", "later")
    folder = tmp_path / "toy" / "key"
    folder.mkdir(parents=True)
    one = tracker(folder)
    one.log(1, {"loss": 2.0})
    one.log(2, {"loss": 1.0})
    monkeypatch.setattr(mlflow_store, "MlflowRun", Run)
    mlflow_store.deliver(tmp_path, lambda: True, print)
    assert calls == [("toy", "open", folder)]  # the last row may still grow, and the one before was not sent
    one.flush()
    one.abandon("KILLED")

    def more() -> bool:  # what is written after the next-to-last look is delivered too
        one.register(folder, model="tools")
        one.finish()
        return True

    calls.clear()
    mlflow_store.deliver(tmp_path, more, print)
    assert [call[:2] for call in calls] == [
        ("toy", name) for name in ("open", "log", "end", "log", "system", "register", "finish")
    ]
    assert calls[1][2] == [{"step": 1, "loss": 2.0}] and calls[3][2] == [{"step": 2, "loss": 1.0}]
    assert calls[5][2:] == (folder, {"model": "tools"})
    mlflow_store.deliver(tmp_path, lambda: True, print)
    assert len(calls) == 7


class Held:
    """Records what an outer tracker is given."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.last = -1

    def log(self, rows: list[dict[str, Any]]) -> None:
        self.rows += [dict(row) for row in rows if row["step"] > self.last]
        self.last = max([self.last, *(row["step"] for row in self.rows)])

    def back_to(self, step: int) -> None:
        self.last = step

    def finish(self, *_: Any) -> None:
        pass


def test_a_row_that_still_grows_is_sent_when_it_is_whole(tmp_path: Path) -> None:
    """An iteration's rewards are logged at the step after which a state was saved."""
    one, held = tracker(tmp_path, quiet=True), Held()
    one._others = held  # type: ignore[assignment]
    one.log(4, {"loss": 1.0})
    one.flush()
    one.log(4, {"reward": 0.5})
    one.log(8, {"loss": 0.9})
    one.flush()
    one.log(8, {"reward": 0.7})
    one.finish()
    assert held.rows == [{"step": 4, "loss": 1.0, "reward": 0.5}, {"step": 8, "loss": 0.9, "reward": 0.7}]


def test_after_a_rollback_the_steps_are_sent_again(tmp_path: Path) -> None:
    one, held = tracker(tmp_path, quiet=True), Held()
    one._others = held  # type: ignore[assignment]
    for step in (1, 2, 3, 4):
        one.log(step, {"loss": 9.0})
    one.flush()
    one.back_to(1)
    one.restore([{"step": 1, "loss": 9.0}])
    for step in (2, 3):
        one.log(step, {"loss": 1.0})
    one.finish()
    assert [(row["step"], row["loss"]) for row in held.rows] == [(1, 9), (2, 9), (3, 9), (2, 1), (3, 1)]


def test_trackers_remember_that_they_went_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pipeline.run.tracking import Others

    given: list[int] = []
    monkeypatch.setattr(Others, "_start", lambda self: self._open.append(self))
    others = Others((), "toy", tmp_path, {})
    sink = type("Sink", (), {"log": lambda self, numbers, step: given.append(step)})()
    others._open.append(sink)
    others.log([{"step": 5, "loss": 1.0}])
    others.back_to(2)
    assert json.loads(others.note.read_text())["step"] == 2
    others.log([{"step": 2, "loss": 1.0}, {"step": 3, "loss": 1.0}])
    assert given == [5, 3]


class Sent:
    """Records what a tracker is given."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def log(self, rows: list[dict[str, Any]]) -> None:
        self.rows += rows


def test_a_row_is_sent_with_its_speed_within_seconds_and_no_out_has_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now: list[float] = []
    monkeypatch.setattr(tracking.time, "monotonic", lambda: now[-1])
    one = Tracker("toy", tmp_path, {}, {}, quiet=True)
    one._mlflow, one._live = Sent(), tmp_path / "logs/toy.jsonl"  # type: ignore[assignment]
    sent: list[list[int]] = []
    for step, seconds in enumerate((100.0, 102.0, 104.0, 106.0, 120.0, 121.0), 1):
        now.append(seconds)
        one.log(step, {"loss": 9.0 - step})
        one.beat({"tokens_per_second": 10.0 * step})
        sent.append([row["step"] for row in one._mlflow.rows])  # type: ignore[union-attr]
    assert sent == [[1], [1], [1], [1, 2, 3, 4], [1, 2, 3, 4, 5], [1, 2, 3, 4, 5]]
    assert one._mlflow.rows[3] == {"step": 4, "loss": 5.0, "speed/tokens_per_second": 40.0}  # type: ignore[union-attr]
    live = [json.loads(line) for line in (tmp_path / "logs/toy.jsonl").read_text().splitlines()]
    assert [row["step"] for row in live] == [1, 2, 3, 4, 5, 6] and live[5]["speed/tokens_per_second"] == 60.0
    assert one.rows[3] == {"step": 4, "loss": 5.0}


def test_what_a_row_gets_later_is_sent_alone_and_a_step_that_was_sent_is_not_sent_again() -> None:
    rows: list[dict[str, tracking.Number]] = [{"step": 3, "loss": 1.0, "val/loss": 2.0}, {"step": 4, "loss": 0.5}]
    assert tracking.unknown(rows, 3, {"loss"}) == [{"step": 3, "val/loss": 2.0}, {"step": 4, "loss": 0.5}]
    assert tracking.unknown(rows, 4, {"loss"}) == []
    assert tracking.unknown(rows, -1, set()) == rows
    assert tracking.names_at(rows[0], 3, {"grad_norm"}) == {"loss", "val/loss", "grad_norm"}
    assert tracking.names_at(rows[1], 3, {"grad_norm"}) == {"loss"}


def test_the_log_has_what_was_said_with_the_time_and_a_folder_that_cannot_be_written_ends_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tracking.log_to(tmp_path / "logs/toy.log")
    say("one")
    tracking.log_to(tmp_path / "logs/other.log")
    say("two")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d one\n", (tmp_path / "logs/toy.log").read_text())
    assert (tmp_path / "logs/other.log").read_text().endswith(" two\n")
    (tmp_path / "taken").write_text("")
    tracking.log_to(tmp_path / "taken/toy.log")
    (tmp_path / "folder.log").mkdir()
    tracking.log_to(tmp_path / "folder.log")
    say("three")
    say("four")
    assert capsys.readouterr().err == "one\ntwo\nthree\nfour\n"


def test_without_a_log_what_is_said_reaches_no_other_logger(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking.LOG, "handlers", [])
    monkeypatch.setattr(tracking.LOG, "propagate", True)
    with caplog.at_level("INFO"):
        say("once")
    assert caplog.text == ""
