"""The keyed work directory: keys, digests, locks, publishing, pruning."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeline.run import workdir
from pipeline.run.errors import StagecoachError

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def own_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAGECOACH_WORK", str(tmp_path / ".work"))
    monkeypatch.delenv("STAGECOACH_LOCKED", raising=False)


def key(**changes: object) -> str:
    values = {
        "stage": "code",
        "item": None,
        "seed": 1,
        "parameters": {"a": 1.0},
        "inputs": {"x": "h"},
        "code": {"m": "c"},
    }
    return workdir.make_key(**(values | changes))  # type: ignore[arg-type]


def test_the_key_depends_on_everything_and_on_no_order() -> None:
    keys = {
        key(),
        key(stage="x"),
        key(item="a"),
        key(seed=2),
        key(parameters={"a": 2.0}),
        key(inputs={"x": "i"}),
        key(code={"m": "d"}),
    }
    assert len(keys) == 7
    assert key(parameters={"a": 1, "b": 2}) == key(parameters={"b": 2, "a": 1})


def test_a_digest_sees_contents_and_names_but_not_times(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "a").write_text("1")
    first = workdir.digest(folder)
    os.utime(folder / "a", (1, 1))
    assert workdir.digest(folder) == first
    (folder / "a").write_text("2")
    assert workdir.digest(folder) != first
    (folder / "a").write_text("1")
    (folder / "a").rename(folder / "b")
    assert workdir.digest(folder) != first


def finished(folder: Path, text: str = "model") -> Path:
    out = folder / "out/models/x"
    out.mkdir(parents=True)
    (out / "weights").write_text(text)
    workdir.mark_finished(folder)
    return out


def test_finished_means_every_file_has_its_hash(tmp_path: Path) -> None:
    folder = tmp_path / "k"
    out = finished(folder)
    assert workdir.is_finished(folder)
    (out / "weights").write_text("modem")
    assert not workdir.is_finished(folder)


def test_publish_replaces_the_whole_folder(tmp_path: Path) -> None:
    out = finished(tmp_path / "k")
    target = tmp_path / "models/x"
    target.mkdir(parents=True)
    (target / "stale").write_text("old")
    leftover = tmp_path / "models/.x.999999999.part"
    leftover.mkdir()
    workdir.publish(out, target)
    assert [p.name for p in target.iterdir()] == ["weights"]
    assert [p.name for p in target.parent.iterdir()] == ["x"]


def test_publishing_again_never_writes_through_a_link(tmp_path: Path) -> None:
    first, second = finished(tmp_path / "k1", "one"), finished(tmp_path / "k2", "two")
    target, cached = tmp_path / "models/x", tmp_path / "cache"
    workdir.publish(first, target)
    os.link(target / "weights", cached)
    workdir.publish(second, target)
    assert (cached.read_text(), (target / "weights").read_text()) == ("one", "two")
    assert workdir.is_finished(tmp_path / "k1")


def test_a_second_holder_of_a_lock_waits_and_a_killed_holder_frees_it(tmp_path: Path) -> None:
    folder = tmp_path / "k"
    program = (
        "from pipeline.run import workdir; from pathlib import Path\n"
        f"with workdir.locked(Path({str(folder)!r})): print('in', flush=True); input()"
    )
    holder = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT)
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"in\n"
    waiter = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT
    )
    assert waiter.stderr is not None
    assert waiter.stdout is not None
    assert str(holder.pid) in waiter.stderr.readline().decode()
    holder.kill()
    assert waiter.stdout.readline() == b"in\n"
    for process in (holder, waiter):
        process.communicate()


def test_pruning_keeps_the_newest_the_current_and_speed(tmp_path: Path) -> None:
    stage = workdir.root() / "code"
    for number in range(7):
        finished(stage / f"k{number}")
        (stage / f"k{number}/speed.json").write_text("{}")
        old = time.time() - 40 * 86400 + number
        os.utime(stage / f"k{number}/finished.json", (old, old))
    workdir.prune_finished(stage, "k0")
    left = {p.parent.name for p in stage.glob("*/finished.json")}
    assert left == {"k0", "k3", "k4", "k5", "k6"}
    assert len(list(stage.glob("*/speed.json"))) == 7


def test_prune_removes_unfinished_work_that_nobody_holds(tmp_path: Path) -> None:
    for name in ("done", "left", "held"):
        folder = workdir.root() / "code" / name
        folder.mkdir(parents=True)
        (folder / "lock").write_text("")
    (workdir.root() / "code/done/finished.json").write_text(json.dumps({}))
    with workdir.locked(workdir.root() / "code/held"):
        assert [p.name for p, _ in workdir.prune()] == ["left"]


def test_prune_of_finished_runs_frees_what_it_says_and_leaves_outs_and_seconds(tmp_path: Path) -> None:
    key = workdir.root() / "code/done"
    (key / "out/models/code").mkdir(parents=True)
    for name, size in (("lock", 0), ("speed.json", 10), ("finished.json", 10), ("out/models/code/weights", 200_000)):
        (key / name).write_bytes(b"1" * size)
    (key / "parts").mkdir()
    (key / "parts/rows").write_bytes(b"1" * 300_000)
    os.link(key / "out/models/code/weights", tmp_path / "published")
    assert list(workdir.prune()) == []
    told = {path.name: num_bytes for path, num_bytes in workdir.prune(finished=True)}
    assert told["out"] == 0 and 300_000 <= told["parts"] < 310_000
    assert {path.name for path in key.iterdir()} == {"lock", "speed.json"}
    assert (tmp_path / "published").stat().st_nlink == 1 and not workdir.is_finished(key)


def test_digests_are_remembered_until_the_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "f"
    path.write_text("1")
    first = workdir.digest(path)
    monkeypatch.setattr(workdir, "sha256", lambda _: pytest.fail("read again"))
    assert workdir.digest(path) == first


def test_a_worker_leaves_the_lock_to_its_launcher_or_to_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = workdir.root() / "code/shared"
    with workdir.locked(folder):
        with monkeypatch.context() as patch:
            patch.setenv("RANK", "1")
            with workdir.locked(folder):
                pass
        monkeypatch.setenv("STAGECOACH_LOCKED", str(folder))
        with workdir.locked(folder):
            pass


def test_a_worker_that_finds_another_key_than_its_launcher_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAGECOACH_LOCKED", str(workdir.root() / "code/before"))
    with (
        pytest.raises(StagecoachError, match="started for key before, but its key is now now"),
        workdir.locked(workdir.root() / "code/now"),
    ):
        pass
