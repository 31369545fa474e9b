"""Two seeds: `seed` trains other models on the same data, measured on the same items; `data_seed` rebuilds
everything.
"""

import runpy
import sys
from pathlib import Path
from typing import Any

import networkx
import pytest
from dvc.repo import Repo

from pipeline.run.config import SEEDS, Settings, stage_names
from pipeline.run.errors import ConfigError

ROOT = Path(__file__).parents[1]
DATA = {"stage_corpus", "stage_tasks", "stage_tokenizer", "stage_encode@text", "stage_encode@code"}


@pytest.fixture(scope="module")
def graph() -> tuple[dict[str, set[str]], "networkx.DiGraph[str]"]:
    """The seeds that each stage of dvc.yaml depends on, and an edge from each stage to those that it needs, as DVC
    loads them.
    """
    with Repo(str(ROOT)) as repository:
        index = repository.index
        seeds = {
            stage.addressing: {key for dep in stage.params for key in dep.params if key in SEEDS}
            for stage in index.stages
        }
        edges = [(after.addressing, before.addressing) for after, before in index.graph.edges]
    needs = networkx.DiGraph()
    needs.add_nodes_from(seeds)
    needs.add_edges_from(edges)
    return seeds, needs


def rebuilt(graph: tuple[dict[str, set[str]], "networkx.DiGraph[str]"], key: str) -> set[str]:
    """The stages that depend on the key, and all that need one of them."""
    seeds, needs = graph
    first = {stage for stage, keys in seeds.items() if key in keys}
    return first | {stage for one in first for stage in networkx.ancestors(needs, one)}


def test_another_seed_of_training_rebuilds_no_data(graph: Any) -> None:
    found = rebuilt(graph, "seed")
    assert not DATA & found and {"stage_language", "stage_rlhf", "stage_evaluate@tools", "stage_report"} <= found
    assert set(graph[0]) - found == {*DATA, "stage_overlap", "stage_base", "code_versions"}


def test_another_seed_of_the_data_rebuilds_everything(graph: Any) -> None:
    assert rebuilt(graph, "data_seed") == set(graph[0]) - {"code_versions", "stage_base"}


def test_no_stage_depends_on_both_seeds_and_measuring_depends_on_that_of_the_data(graph: Any) -> None:
    seeds, _ = graph
    assert all(len(keys) <= 1 for keys in seeds.values())
    measuring = {keys for stage, found in seeds.items() if stage.startswith("stage_evaluate") for keys in found}
    assert measuring == {"data_seed"}
    assert seeds["stage_corpus"] == seeds["stage_tasks"] == {"data_seed"} and seeds["stage_language"] == {"seed"}


def test_both_seeds_are_42_and_are_set_apart(in_repository: Path) -> None:
    assert [Settings(Path(), []).seed(key) for key in SEEDS] == [42, 42]
    assert [Settings(Path(), ["seed=1"]).seed(key) for key in SEEDS] == [1, 42]
    assert [Settings(Path(), ["data_seed=2"]).seed(key) for key in SEEDS] == [42, 2]
    with pytest.raises(ConfigError, match='command line: data_seed: expected int, got "many"'):
        Settings(Path(), ["data_seed=many"]).seed("data_seed")


def test_params_without_a_seed_say_which_is_missing(tmp_path: Path) -> None:
    (tmp_path / "conf").symlink_to(ROOT / "conf")
    (tmp_path / "stages").symlink_to(ROOT / "stages")
    (tmp_path / "params.yaml").write_text("seed: 1\nmodel: nano\nscale: smoke\ndata: files\n")
    with pytest.raises(ConfigError, match=r"params\.yaml: data_seed: missing; add it"):
        Settings(tmp_path, [])


def test_every_stage_is_wired_to_the_seed_that_the_graph_tracks_for_it(
    graph: Any, in_repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even where DVC tracks none (tokenizer, encode): their keys do not change with the training seed."""
    wired: dict[str, str] = {}

    def main(_run: Any, **wiring: Any) -> None:
        wired[Path(sys.argv[0]).stem] = wiring.get("seed", "seed")

    monkeypatch.setattr("pipeline.run.stage.main", main)
    for stage in stage_names(Path()):
        loaded = sys.modules.pop(f"stages.{stage}", None)
        runpy.run_module(f"stages.{stage}", run_name="__main__", alter_sys=True)
        if loaded is not None:
            sys.modules[f"stages.{stage}"] = loaded
    assert {stage for stage, key in wired.items() if key == "data_seed"} == {
        "corpus",
        "tasks",
        "tokenizer",
        "encode",
        "evaluate",
        "overlap",
        "base",
    }
    for stage, keys in graph[0].items():
        name = stage.removeprefix("stage_").partition("@")[0].replace("evaluate_reward", "evaluate")
        assert keys <= {wired.get(name)}, stage
