"""Our reading of dvc.yaml agrees with DVC's."""

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
