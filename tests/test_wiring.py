"""What a stage reads and writes, as its module gives it to `main`, is what dvc.yaml tracks; otherwise an edit would
rerun nothing.
"""

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.run import stage as run_stage

ROOT = Path(__file__).parents[1]
GRAPH: dict[str, Any] = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]
STAGES = sorted(path.stem for path in (ROOT / "stages").glob("*.py") if path.stem != "__init__")


def wiring_of(stage: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The keyword arguments of the stage's call to `main`."""
    told: dict[str, Any] = {}
    monkeypatch.setattr(run_stage, "main", lambda run, **wiring: told.update(wiring))
    runpy.run_path(str(ROOT / f"stages/{stage}.py"), run_name="__main__")
    return told


def paths(entries: list[Any]) -> set[str]:
    """The names in deps or outs of dvc.yaml, without their options, and with `${item.x}` and other parameters as `main`
    writes them.
    """
    names = [next(iter(entry)) if isinstance(entry, dict) else entry for entry in entries]
    return {name.replace("${item.corpus}", "{item}").replace("${item.model}", "{item}") for name in names}


@pytest.mark.parametrize("stage", STAGES)
def test_dvc_tracks_what_a_stage_reads_and_writes(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wiring, node = wiring_of(stage, monkeypatch), GRAPH[f"stage_{stage}"]
    deps = paths(node["deps"]) - {f"build/code/{stage}.txt"}
    assert f"build/code/{stage}.txt" in paths(node["deps"])
    known = {re.sub(r"/\$\{\w+\.(\w+)\}", r"/{\1}", dep) for dep in deps}  # models/${deploy.model}
    chosen = {dep for dep in known if dep.startswith("${")}  # an input that only some parameters ask for
    assert chosen == ({"${base.folder}"} if wiring.get("chosen") else set())
    inputs = set(wiring["inputs"].values())
    if stage == "evaluate":  # its items read different inputs; the reward model has a separate stage
        mine = {key for key in wiring["inputs"] if key in wiring["of_item"]("tools")}
        assert known == {wiring["inputs"][key] for key in mine}
        alone = {wiring["inputs"][key].replace("{item}", "reward") for key in wiring["of_item"]("reward")}
        assert paths(GRAPH["stage_evaluate_reward"]["deps"]) - {"build/code/evaluate.txt"} == alone
    else:
        assert known - chosen == inputs
    name = f"{stage}_{{item}}" if stage == "encode" else stage
    metrics = wiring.get("metrics", "metrics/{name}.json")
    outs = set(wiring["outs"].values()) | ({metrics.replace("{name}", name)} if metrics else set())
    assert paths(node["outs"]) == outs
    assert paths(node.get("metrics", [])) == ({f"metrics/training/{name}.json"} if wiring.get("trains") else set())
    assert paths(node.get("plots", [])) == ({f"metrics/{name}.csv"} if wiring.get("trains") else set())
