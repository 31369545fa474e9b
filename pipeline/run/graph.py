"""dvc.yaml as data: each stage's inputs, outputs and tracked parameters. The graph is defined only in that file.

    stages(root)              every stage, one entry per matrix item
    maker(root, path)         the stage that makes a path, or part of it
    waits()                   the dependencies between stages, as DVC resolves them

Templates that refer to a matrix (`${item.<name>}`) or to params.yaml (`${tools.base}`) are resolved. `foreach` and
`vars` are not supported; our dvc.yaml uses neither.
"""

import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ruamel.yaml import YAML

from pipeline.run.types import JsonObject

TEMPLATE = re.compile(r"\$\{([\w.]+)\}")


@dataclass(frozen=True)
class GraphStage:
    """A stage of dvc.yaml, or one item of its matrix."""

    name: str  # stage_encode@text
    deps: tuple[str, ...]
    outs: tuple[str, ...]  # including metrics and plots
    tracked: frozenset[str]  # top-level keys of params.yaml


def stages(root: Path) -> dict[str, GraphStage]:
    """All stages, in file order; empty if there is no dvc.yaml."""
    path = root / "dvc.yaml"
    if not path.is_file():
        return {}
    written, values = (
        YAML(typ="safe", pure=True).load(file.read_text(encoding="utf-8")) if file.is_file() else {}
        for file in (path, root / "params.yaml")
    )
    found = (_stage(name, stage, item, values) for name, stage in written["stages"].items() for item in _items(stage))
    return {stage.name: stage for stage in found}


def maker(root: Path, path: PurePosixPath) -> str | None:
    """The stage, without its matrix item, whose out is this path, contains it or lies in it; None if there is none."""
    for stage in stages(root).values():
        for out in map(PurePosixPath, stage.outs):
            if path == out or out in path.parents or (path in out.parents and len(path.parts) > 1):
                return stage.name.partition("@")[0]
    return None


def waits() -> dict[str, set[str]]:
    """Every stage and the stages it depends on, in topological order, according to DVC."""
    from dvc.repo import Repo  # here because importing it takes a second

    with Repo() as repo:
        nodes = repo.index.graph
        needs = {s.addressing: {u.addressing for u in nodes.successors(s)} for s in nodes.nodes}
    ordered: dict[str, set[str]] = {}
    while len(ordered) < len(needs):
        ordered |= {
            name: needs[name] for name in sorted(needs) if name not in ordered and needs[name] <= ordered.keys()
        }
    return ordered


def _items(stage: JsonObject) -> Iterable[dict[str, str]]:
    """The items of a stage's matrix; a single empty item if it has none."""
    matrix = stage.get("matrix", {})
    return [dict(zip(matrix, values, strict=True)) for values in itertools.product(*matrix.values())]


def _stage(name: str, stage: JsonObject, item: dict[str, str], values: JsonObject) -> GraphStage:
    def value(match: re.Match[str]) -> str:
        found: object = {"item": item} | values
        for key in match[1].split("."):
            found = found.get(key, match[0]) if isinstance(found, dict) else match[0]
        return str(found)

    def paths(kind: str) -> list[str]:
        names = [next(iter(entry)) if isinstance(entry, dict) else entry for entry in stage.get(kind, ())]
        return [TEMPLATE.sub(value, entry) for entry in names]

    keys = (key for entry in stage.get("params", ()) if isinstance(entry, str) for key in [entry.partition(".")[0]])
    return GraphStage(
        "@".join([name, "-".join(item.values())] if item else [name]),
        tuple(paths("deps")),
        tuple(path for kind in ("outs", "metrics", "plots") for path in paths(kind)),
        frozenset(keys),
    )
