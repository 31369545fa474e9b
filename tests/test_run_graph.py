"""Our reading of dvc.yaml agrees with DVC's."""

import subprocess
from pathlib import Path, PurePosixPath

import pytest

from pipeline.run import graph

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_stages_inputs_and_outs_are_those_that_dvc_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    from dvc.repo import Repo

    monkeypatch.chdir(ROOT)
    with Repo() as repo:
        known = {stage.addressing: stage for stage in repo.index.stages if stage.addressing}
        ours = graph.stages(ROOT)
        assert ours.keys() == known.keys()
        for name, stage in ours.items():
            assert set(stage.outs) == {str(out) for out in known[name].outs}, name
            deps = {str(dep) for dep in known[name].deps if type(dep).__name__ != "ParamsDependency"}
            assert set(stage.deps) == deps and len(deps) == len(stage.deps), name


def test_git_ignores_what_stages_write_except_small_files_for_git() -> None:
    """Otherwise DVC writes a .gitignore of its own, and a run leaves an untracked file."""
    import yaml

    uncached = {
        path
        for stage in yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"].values()
        for out in stage.get("outs", []) + stage.get("metrics", [])
        if isinstance(out, dict)
        for path in out
    }
    outs = sorted({out for stage in graph.stages(ROOT).values() for out in stage.outs} - uncached)
    command = ["git", "-C", str(ROOT), "check-ignore", "--no-index", *outs]
    ignored = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(outs) > 40 and sorted(set(outs) - set(ignored)) == []


def test_a_path_is_made_by_the_stage_with_it_or_with_a_part_of_it(tmp_path: Path) -> None:
    (tmp_path / "dvc.yaml").write_text(
        "stages:\n"
        "  raw: {cmd: x, outs: [data/raw/text, data/raw/code: {cache: false}], params: [seed, a.b, f.yaml: [c]]}\n"
        "  each: {matrix: {of: [one, two]}, cmd: x, deps: [data/raw], outs: ['models/${item.of}']}\n"
    )
    made = {path: graph.maker(tmp_path, PurePosixPath(path)) for path in ("data/raw/text/a.txt", "data/raw", "data")}
    assert made == {"data/raw/text/a.txt": "raw", "data/raw": "raw", "data": None}
    assert graph.maker(tmp_path, PurePosixPath("models/two")) == "each"
    assert graph.maker(tmp_path, PurePosixPath("models/tw")) is None
    assert graph.stages(tmp_path)["raw"].tracked == {"seed", "a"}
    assert graph.stages(tmp_path)["each@two"].outs == ("models/two",)
    assert graph.stages(tmp_path / "nowhere") == {}
