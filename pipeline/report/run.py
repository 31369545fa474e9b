"""What the metrics folder of a run holds, read once for all who show it: the report card, the table of `make`, comparisons.

    metrics/*.json, *.csv, eval/*, traces/*, routing/*  -> Run

Everything stands in pipeline order, stages of a person's own behind ours. A file without a lineage is nobody's: it changes nothing.
"""

import csv
import json
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

ORDER = ("corpus", "tasks", "tokenizer", "encode_text", "encode_code", "language", "code", "tools", "lora", "dpo", "grpo",
         "reward", "rlhf", "diffusion", "diffusion_control", "diffusion_dpo", "diffusion_grpo", "memory", "memory_baseline", "deploy")  # fmt: skip
# What a model was made from, and so is compared with, where that is not the model that its lineage names: lora does the work of
# tools; the masked-diffusion model is compared with its control, the causal model at its best on the same data; a memory with a wider model.
COMPARED = {"lora": "tools", "diffusion": "diffusion_control", "diffusion_control": "code", "memory": "memory_baseline",
            "memory_baseline": "code", "reward": ""}  # "": it answers nothing, so there is nothing to compare  # fmt: skip
SECOND = {
    "diffusion_control": "diffusion",
    "memory_baseline": "memory",
}  # model -> the stage that makes it beside its own
MADE_BY = {"raw": "corpus", "dialogues": "tasks", "problems": "tasks", "preferences": "tasks", "facts": "tasks", "tokenizer": "tokenizer"}  # fmt: skip


@dataclass(frozen=True)
class Run:
    """What the metrics folder holds."""

    stages: dict[str, dict[str, Any]]  # name -> metrics/<name>.json
    curves: dict[str, list[dict[str, str]]]  # name -> rows of metrics/<name>.csv
    evaluations: dict[str, dict[str, Any]]  # model -> metrics/eval/<model>.json
    items: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # model -> rows of metrics/eval/<model>.jsonl
    traces: dict[str, dict[str, Any]] = field(default_factory=dict)  # model -> metrics/traces/<model>.json
    routes: dict[str, dict[str, Any]] = field(default_factory=dict)  # model -> metrics/routing/<model>.json

    @cached_property
    def bases(self) -> dict[str, str]:
        """model -> the model that its results are compared with; models that are compared with none are left out."""
        found = {}
        for model in self.evaluations:
            facts = self.stages.get(SECOND.get(model, model), {}).get("lineage", {})
            made_from = [Path(path).name for path in facts.get("inputs", {}) if path.startswith("models/")]
            answering = [name for name in made_from if name in self.evaluations and COMPARED.get(name) != ""]
            base = COMPARED.get(model, next(iter(answering), ""))
            if base in self.evaluations:
                found[model] = base
        return found


def read(metrics: Path) -> Run:
    """Everything below `metrics`, in pipeline order."""
    stages = _in_order({p.stem: json.loads(p.read_text(encoding="utf-8")) for p in metrics.glob("*.json")})
    curves = {}
    for name in stages:
        path = metrics / f"{name}.csv"
        if path.is_file():
            with path.open(encoding="utf-8", newline="") as file:
                curves[name] = list(csv.DictReader(file))
    evaluations = _in_order(
        {p.stem: json.loads(p.read_text(encoding="utf-8")) for p in (metrics / "eval").glob("*.json")}
    )
    items = {model: lines(metrics / "eval" / f"{model}.jsonl") for model in evaluations}
    traces, routes = (_by_model(metrics / folder, {*evaluations, *stages}) for folder in ("traces", "routing"))
    return Run(stages, curves, evaluations, items, traces, routes)


def _in_order(files: dict[str, Any]) -> dict[str, dict[str, Any]]:
    order = {name: number for number, name in enumerate(ORDER)}
    ours = {name: told for name, told in files.items() if isinstance(told, dict) and "lineage" in told}
    return dict(sorted(ours.items(), key=lambda entry: (order.get(entry[0], len(order)), entry[0])))


def _by_model(folder: Path, models: set[str]) -> dict[str, dict[str, Any]]:
    paths = {name: folder / f"{name}.json" for name in (*ORDER, *sorted(models - {*ORDER}))}
    return {name: json.loads(path.read_text(encoding="utf-8")) for name, path in paths.items() if path.is_file()}


def lines(path: Path) -> list[dict[str, Any]]:
    """The rows of a file of JSON lines; none where there is no file."""
    if not path.is_file():
        return []
    text = path.read_text(encoding="utf-8")
    return [json.loads(line) for line in text.split("\n") if line]  # splitlines would cut at U+2028 in an answer


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested numbers by the names `a / b`, without the lineage."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if not prefix and key == "lineage":
            continue
        found |= flat(value, f"{prefix}{key} / ") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def maker(path: str, stages: dict[str, Any]) -> str | None:
    """The stage of the run that made an input, by where it lies; None for what no stage makes."""
    top, *rest = Path(path).parts
    if top == "models" and rest:
        name = SECOND.get(rest[0], rest[0])
    elif top == "data" and len(rest) > 1 and rest[0] == "tokens":
        name = f"encode_{rest[1]}"
    else:
        name = MADE_BY.get(rest[0], "") if top == "data" and rest else ""
    return name if name in stages else None
