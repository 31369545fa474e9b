"""Training states on disk: whole or absent, the newest good one wins, the best is kept."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pipeline.learning import processes, states
from pipeline.run.errors import StagecoachError


def save(folder: Path, step: int) -> None:
    tensors = {"w": torch.full((50, 3), float(step))}
    states.save(
        folder,
        step,
        weights=tensors,
        optimizer={"w/exp_avg": tensors["w"] / 2},
        meta={"tokens": step},
        curve=[{"step": s, "loss": 1.0} for s in range(step)],
    )


def test_a_saved_state_comes_back(tmp_path: Path) -> None:
    save(tmp_path, 3)
    state = states.newest(tmp_path)
    assert state is not None
    assert (state.step, state.meta["tokens"], len(state.curve)) == (3, 3, 3)
    assert torch.equal(state.weights().read("w"), torch.full((50, 3), 3.0))
    assert torch.equal(state.optimizer().read("w/exp_avg"), torch.full((50, 3), 1.5))


@pytest.mark.parametrize(
    "name", ["weights.safetensors", "optimizer.safetensors", "state.json", "curve.jsonl", "manifest.json"]
)
@pytest.mark.parametrize("damage", ["truncate", "flip", "delete"])
def test_a_damaged_newest_state_gives_the_one_before(tmp_path: Path, name: str, damage: str) -> None:
    save(tmp_path, 3)
    save(tmp_path, 5)
    path = tmp_path / states.name_of(5) / name
    content = path.read_bytes()
    if damage == "delete":
        path.unlink()
    else:
        changed = (
            content[: len(content) // 2]
            if damage == "truncate"
            else content[:-2] + bytes([content[-2] ^ 1, content[-1]])
        )
        path.write_bytes(changed)
    state = states.newest(tmp_path)
    assert state is not None
    assert state.step == 3


def test_no_good_state_is_none(tmp_path: Path) -> None:
    assert states.newest(tmp_path) is None
    (tmp_path / states.name_of(9)).mkdir()
    assert states.newest(tmp_path) is None


def test_retention_keeps_newest_and_best_and_sweeps_leftovers(tmp_path: Path) -> None:
    for step in range(1, 7):
        save(tmp_path, step)
    (tmp_path / "step-00000099.part").mkdir()
    states.retain(tmp_path, keep=2, protect=[3])
    assert sorted(p.name for p in tmp_path.iterdir()) == [states.name_of(s) for s in (3, 5, 6)]


class Killed(BaseException):
    pass


def test_a_state_that_was_put_aside_serves_until_the_new_one_is_in_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old state of the same step is never removed before the new one is there."""
    save(tmp_path, 5)
    rename = Path.rename

    def killed(self: Path, target: Path) -> Path:
        if self.suffix == ".part":
            raise Killed
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", killed)
        with pytest.raises(Killed):
            save(tmp_path, 5)
    assert not (tmp_path / states.name_of(5)).exists()
    found = states.newest(tmp_path)
    assert found is not None and found.step == 5
    save(tmp_path, 5)
    assert [path.name for path in tmp_path.iterdir()] == [states.name_of(5)]


def save_in_shares(folder: Path, step: int) -> None:
    """Save as two ranks do: 50 rows, 25 each."""
    whole = {"w": torch.full((50, 3), float(step)), "count": torch.tensor(float(step))}
    tensors = {"weights": whole, "optimizer": whole}
    part = states.begin(folder, step, tensors)
    files: states.Files = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "is_sharded", lambda tensor: tensor.ndim > 0)
        for rank in (0, 1):
            begin = 25 * rank
            patch.setattr(processes, "rows", lambda _, begin=begin: (begin, begin + 25))
            patch.setattr(processes, "local", lambda t, begin=begin: t[begin : begin + 25] if t.ndim else t)
            files |= states.write(part, tensors, rank, 2)
    states.complete(part, step, files, meta={"tokens": step}, curve=[])


@pytest.mark.parametrize("write", [save, save_in_shares])
def test_a_kill_at_any_write_leaves_the_old_or_the_new_state(
    write: Callable[[Path, int], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every fsync, rename and removal of a save is a place where the process may die."""
    (tmp_path / "model").mkdir()
    write(tmp_path / "model", 1)
    at, died = 0, True
    seen = set()
    while died:
        work = tmp_path / f"try{at}"
        shutil.copytree(tmp_path / "model", work)
        calls = 0

        def hook(original, at=at):  # type: ignore[no-untyped-def]
            def wrapped(*arguments, **named):  # type: ignore[no-untyped-def]
                nonlocal calls
                calls += 1
                if calls > at:
                    raise Killed
                return original(*arguments, **named)

            return wrapped

        with monkeypatch.context() as patch:
            for owner, name in (
                (os, "fsync"),
                (Path, "rename"),
                (Path, "write_text"),
                (states, "save_file"),
                (states, "remove"),
            ):
                patch.setattr(owner, name, hook(getattr(owner, name)))
            try:
                write(work, 2)
                died = False
            except Killed:
                pass
        state = states.newest(work)
        assert state is not None
        assert torch.equal(state.weights().read("w"), torch.full((50, 3), float(state.step)))
        seen.add(state.step)
        write(work, 2)  # and a second try always works
        assert states.newest(work).step == 2  # type: ignore[union-attr]
        at += 1
    assert at > 10
    assert seen == {1, 2}


def test_a_damaged_or_missing_share_gives_the_state_before(tmp_path: Path) -> None:
    save_in_shares(tmp_path, 3)
    for step, damage in ((5, b"x"), (7, None)):
        save_in_shares(tmp_path, step)
        path = tmp_path / states.name_of(step) / "optimizer-00001-of-00002.safetensors"
        path.unlink() if damage is None else path.write_bytes(path.read_bytes()[:-1] + damage)
    state = states.newest(tmp_path)
    assert state is not None and state.step == 3
    assert float(state.optimizer().read("count")) == 3.0


def test_rows_are_read_across_the_borders_of_files_and_none_is_none(tmp_path: Path) -> None:
    save_in_shares(tmp_path, 3)
    stored = states.at(tmp_path, 3).weights()
    shapes = {
        cut: tuple(stored.read("w", *cut).shape) for cut in ((20, 30), (24, 26), (0, 25), (25, 50), (50, 50), (7, 7))
    }
    assert {cut: rows for cut, (rows, _) in shapes.items()} == {cut: cut[1] - cut[0] for cut in shapes}
    assert {width for _, width in shapes.values()} == {3}
    assert stored.names() == {"w", "count"} and len(stored.whole()["w"]) == 50


def test_no_space_is_found_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=10))
    with pytest.raises(StagecoachError, match=r"no space: .* MB needed"):
        save(tmp_path, 2)
    assert [p.name for p in tmp_path.iterdir()] == [states.name_of(1)]
