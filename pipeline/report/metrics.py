"""A run's metrics, for the report card, the table printed by `make` and comparisons; headline numbers and costs.

    metrics/*.json, *.csv, eval/*, folders of the wings                      -> MetricsRun
    metrics/eval/<model>.json                                                -> HEADLINES, the top of the report
    work keys of the lineage + speed.json of the work folder + report.prices -> a Cost per stage: time, speed, memory,
                                                                                energy, money

Everything is in pipeline order; user-defined stages come after the built-in ones. A file without a lineage is ignored.
Times come from this machine's work folder, by work key: a stage that was pulled or restored from a cache was built
elsewhere. Costs are CPU core hours and GPU hours at `report.prices`; without prices, there are no costs.
"""

import csv
import json
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Protocol

from pipeline import wings
from pipeline.run import graph, mlflow_store, workdir
from pipeline.run.types import JsonObject

BEFORE_WINGS = (
    "corpus",
    "tasks",
    "tokenizer",
    "encode_text",
    "encode_code",
    "language",
    "code",
    "tools",
    "lora",
    "dpo",
    "kto",
    "grpo",
    "teach",
    "distill",
    "reward",
    "rlhf",
)
# What a model is compared with, if that is not the model in its lineage. "": the model generates no answers, so it is
# not compared.
COMPARED = {"reward": ""}


@dataclass(frozen=True)
class WingModel:
    """A wing's model, for the tables: the stage that makes it, and the model it is compared with."""

    stage: str
    compared: str | None = None  # None: the model in its lineage


def wing_models() -> dict[str, WingModel]:
    """The wings' models, in pipeline order."""
    return {name: model for offer in wings.each("models") for name, model in offer().items()}


def order() -> tuple[str, ...]:
    """The names of stages and models in pipeline order."""
    return (*BEFORE_WINGS, *wing_models(), "deploy")


def compared() -> dict[str, str]:
    """COMPARED, plus the wings' models."""
    return COMPARED | {name: model.compared for name, model in wing_models().items() if model.compared is not None}


def stage_of_model(name: str) -> str:
    """The stage that makes a model; their names may differ."""
    model = wing_models().get(name)
    return name if model is None else model.stage


Row = JsonObject  # one item: a line of metrics/eval/<model>.jsonl


@dataclass(frozen=True)
class MetricsRun:
    """The contents of a metrics folder."""

    stages: dict[str, JsonObject]  # name -> metrics/<name>.json
    curves: dict[str, list[dict[str, str]]]  # name -> rows of metrics/<name>.csv
    evaluations: dict[str, JsonObject]  # model -> metrics/eval/<model>.json
    items: dict[str, list[Row]] = field(default_factory=dict)  # model -> rows of metrics/eval/<model>.jsonl
    # wings' folders in metrics/: folder -> model -> metrics/<folder>/<model>.json
    of_wings: dict[str, dict[str, JsonObject]] = field(default_factory=dict)

    @cached_property
    def bases(self) -> dict[str, str]:
        """model -> the model its results are compared with, if there is one."""
        bases, known = {}, compared()
        for model in self.evaluations:
            lineage = self.stages.get(stage_of_model(model), {}).get("lineage", {})
            made_from = [Path(path).name for path in lineage.get("inputs", {}) if path.startswith("models/")]
            answering = [name for name in made_from if name in self.evaluations and known.get(name) != ""]
            base = known.get(model, next(iter(answering), ""))
            if base in self.evaluations:
                bases[model] = base
        return bases


class Section(Protocol):
    """What a wing offers as `report`: charts, and a section of the page."""

    BETTER: tuple[tuple[str, str, str, str], ...]  # added to `claims.BETTER`
    ABOVE: tuple[tuple[str, str, tuple[str, ...], float], ...]  # added to `claims.ABOVE`
    FOLDER: str  # in metrics/, with a file for each model that the section shows
    TEMPLATE: str  # jinja2, rendered with `values`

    def figures(self, run: MetricsRun) -> list[JsonObject]:
        """The charts, as in `card.figures`."""
        ...

    def values(self, files: dict[str, JsonObject]) -> JsonObject:
        """The template's variables, from the files in FOLDER by model."""
        ...


def sections() -> list[Section]:
    """The wings' sections."""
    return [offer() for offer in wings.each("report")]


def read(metrics: Path) -> MetricsRun:
    """The contents of the folder `metrics`, in pipeline order."""
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
    models = {*evaluations, *stages}
    of_wings = {section.FOLDER: _by_model(metrics / section.FOLDER, models) for section in sections()}
    return MetricsRun(stages, curves, evaluations, items, of_wings)


def _in_order(files: dict[str, object]) -> dict[str, JsonObject]:
    places = {name: number for number, name in enumerate(order())}
    ours = {name: content for name, content in files.items() if isinstance(content, dict) and "lineage" in content}
    return dict(sorted(ours.items(), key=lambda entry: (places.get(entry[0], len(places)), entry[0])))


def _by_model(folder: Path, models: set[str]) -> dict[str, JsonObject]:
    paths = {name: folder / f"{name}.json" for name in (*order(), *sorted(models - {*order()}))}
    return {name: json.loads(path.read_text(encoding="utf-8")) for name, path in paths.items() if path.is_file()}


def lines(path: Path) -> list[Row]:
    """The rows of a JSON Lines file; empty if there is no file."""
    if not path.is_file():
        return []
    text = path.read_text(encoding="utf-8")
    return [json.loads(line) for line in text.split("\n") if line]  # splitlines would split at U+2028 in an answer


def flat(values: JsonObject, prefix: str = "") -> JsonObject:
    """Nested numbers, flattened to names like `a / b`, without the lineage."""
    flattened: JsonObject = {}
    for key, value in values.items():
        if not prefix and key == "lineage":
            continue
        flattened |= flat(value, f"{prefix}{key} / ") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flattened


def stage_of_input(path: str, stages: dict[str, JsonObject]) -> str | None:
    """Which stage makes the input at this path; None if no stage does."""
    top, *rest = Path(path).parts
    if top == "data" and len(rest) > 1 and rest[0] == "tokens":
        name = f"encode_{rest[1]}"
    else:
        name = (graph.maker(Path(), PurePosixPath(path)) or "").removeprefix("stage_")
    return name if name in stages else None


# -- headlines ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Headline:
    """One number in metrics/eval/<model>.json, with its `_low` and `_high`."""

    path: tuple[str, ...]
    title: str
    axis: str
    key: str  # in reports/headlines/, shown by `dvc metrics show` and `dvc exp show`
    higher_is_better: bool = True
    unit: str = "share"  # shown as a percentage
    chart: bool = False
    rows: tuple[str, str] | None = None  # the suite and the key to sum over its rows; None: not a sum over rows
    group: str | None = None  # only the rows in this group
    # selects the rows that the number is measured on, if it is not a sum over rows
    asked: dict[str, str | int] = field(default_factory=dict, hash=False)

    def show(self, value: float) -> str:
        return f"{100 * value:.1f}%" if self.unit == "share" else f"{value:.3f}"

    def show_change(self, difference: float) -> str:
        """The difference between two values as text; for shares, in percentage points."""
        sign = "+" if difference >= 0 else "−"
        amount = abs(difference)
        return f"{sign}{100 * amount:.1f} points" if self.unit == "share" else f"{sign}{amount:.3f}"

    @property
    def suite(self) -> str:
        """The suite whose items the number is measured on."""
        return self.rows[0] if self.rows else self.path[0]

    def items(self, rows: list[Row]) -> dict[str, Row]:
        """The rows the number is measured on, by item identity: its id, plus the question's hash if the row has one."""
        conditions = {"suite": self.suite} | self.asked | ({"group": self.group} if self.group else {})
        matching = (r for r in rows if conditions.items() <= r.items())
        if self.rows:
            matching = (r for r in matching if isinstance(r.get(self.rows[1]), int | float))
        return {f"{r['id']} {r['item']}" if "item" in r else str(r["id"]): r for r in matching}

    def counted(self, row: Row) -> tuple[float, float]:
        """What an item adds to the numerator and denominator: bits and bytes, or 1 if correct (else 0) and 1."""
        assert self.rows, "only a headline with `rows` is a sum over rows"
        key = self.rows[1]
        return float(row[key]), float(row["bytes"]) if key.endswith("bits") else 1.0


STORIES, ANSWERS, SOLVED = "share of sampled stories", "share of problems", "share of problems solved"
CALLS, QUESTIONS, PAIRS = (
    "share of correct calls",
    "share of questions answered correctly",
    "share of pairs ranked correctly",
)
NO_TOOL = "share of prompts without a suitable tool"


def _bits(suite: str, title: str, measure: str = "bpb", row: str = "bits", *, chart: bool = False) -> Headline:
    axis, unit = "bits per byte, lower is better", "bits per byte"
    return Headline((suite, measure), title, axis, f"{suite}_{measure}", False, unit, chart, rows=(suite, row))


HEADLINES = (
    _bits("text", "Running text", chart=True),
    _bits("stories", "Stories"),
    Headline(
        ("stories", "story_rate"), "Stories that pass every clause", STORIES, "stories_pass", rows=("stories", "right")
    ),
    Headline(
        ("stories", "coherent_rate"),
        "Stories that also follow a plot",
        STORIES,
        "stories_coherent",
        rows=("stories", "told"),
    ),
    Headline(("stories", "end_rate"), "Stories that end", STORIES, "stories_end", rows=("stories", "ended")),
    _bits("code", "Source code", chart=True),
    Headline(
        ("code", "bpb_files"),
        "Source files of other projects",
        "bits per byte, lower is better",
        "code_bpb_files",
        False,
        "bits per byte",
        rows=("code", "bits"),
        group="files",
    ),
    _bits("code", "Source code, upper bound", "bpb_bound", "bound_bits"),
    Headline(("problems", "parse_rate"), "Answers whose code parses", ANSWERS, "parse", rows=("problems", "parses")),
    Headline(
        ("problems", "easy", "pass_at_1"),
        "Easy problems, pass@1",
        SOLVED,
        "easy",
        chart=True,
        rows=("problems", "sampled"),
        group="easy",
    ),
    Headline(
        ("problems", "medium", "pass_at_1"),
        "Unseen compositions, pass@1",
        SOLVED,
        "medium",
        rows=("problems", "sampled"),
        group="medium",
    ),
    Headline(
        ("problems", "phrasing", "pass_at_1"),
        "Rephrased problems, pass@1",
        SOLVED,
        "phrasing",
        rows=("problems", "sampled"),
        group="phrasing",
    ),
    Headline(
        ("requests", "pass_at_1_greedy"),
        "Requests in everyday words",
        SOLVED,
        "requests",
        chart=True,
        rows=("requests", "right"),
    ),
    Headline(("tools", "ast"), "Correct tool calls (AST)", CALLS, "ast", chart=True, asked={"wanted": "call"}),
    Headline(
        ("tools", "ast_constrained"),
        "Correct tool calls under the tools' grammar",
        CALLS,
        "ast_grammar",
        asked={"wanted": "call", "constrained": 1},
    ),
    Headline(
        ("tools", "ast_unseen_tool"),
        "Correct calls of unseen tools",
        CALLS,
        "ast_unseen",
        asked={"wanted": "call", "tool": "unseen"},
    ),
    Headline(("tools", "false_call_rate"), "False calls", NO_TOOL, "false_calls", False, asked={"wanted": "nothing"}),
    Headline(("facts", "exact_match"), "Facts recalled", QUESTIONS, "facts", rows=("facts", "right")),
    Headline(("reward", "accuracy"), "Pairs ranked correctly", PAIRS, "pairs", rows=("reward", "right")),
)


def short(numbers: JsonObject) -> dict[str, float]:
    """key -> value for the headlines that a model has: one table row."""
    measures = ((headline.key, lookup(numbers, headline)) for headline in HEADLINES)
    return {key: round(measured["value"], 4) for key, measured in measures if measured is not None}


def with_intervals(evaluations: dict[str, JsonObject]) -> dict[str, float]:
    """The headlines of all models as `model/key`, those with an interval also as `model/key_low`, `model/key_high`."""
    ends = {"value": "", "low": "_low", "high": "_high"}
    return {
        f"{model}/{headline.key}{ends[name]}": number
        for model, numbers in evaluations.items()
        for headline in HEADLINES
        for name, number in (lookup(numbers, headline) or {}).items()
    }


def lookup(numbers: JsonObject, headline: Headline) -> dict[str, float] | None:
    """A headline's {"value"}, with {"low", "high"} if it has an interval; None if the model does not have it."""
    parent: object = numbers
    for key in headline.path[:-1]:
        parent = parent.get(key) if isinstance(parent, dict) else None
    last = headline.path[-1]
    if not isinstance(parent, dict) or not isinstance(parent.get(last), int | float):
        return None
    low, high = (parent.get(f"{last}_{side}") for side in ("low", "high"))  # may be "not finite"
    interval = {"low": low, "high": high} if isinstance(low, int | float) and isinstance(high, int | float) else {}
    return {name: float(number) for name, number in ({"value": parent[last]} | interval).items()}


# -- costs -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Prices:
    """The `report.prices` block: hourly prices."""

    core: float = 0.0
    """Hourly price of each CPU core available to the stage."""
    gpu: float = 0.0
    """Hourly price of each GPU."""
    currency: str = "EUR"
    """Currency shown in the report."""

    def __post_init__(self) -> None:
        if min(self.core, self.gpu) < 0:
            raise ValueError(f"prices: expected non-negative numbers, got {self.core} per core, {self.gpu} per GPU")


@dataclass(frozen=True)
class Cost:
    stage: str
    key: str
    speed: JsonObject  # speed.json; empty if the stage was built elsewhere
    mlflow: str  # id of its MLflow run; "" if this machine has none
    price: float | None

    @property
    def device(self) -> str:
        return str(self.speed.get("device", "")) if self.speed else "built elsewhere"

    @property
    def memory(self) -> float | None:
        """Peak memory across all the stage's processes, GB."""
        return self.speed.get("host_memory_gb", self.speed.get("memory_gb"))


def rows(run: MetricsRun, prices: Prices | None = None) -> list[Cost]:
    """The costs of the stages, in pipeline order, then those of the evaluations."""
    lineages = {name: content["lineage"] for name, content in run.stages.items()}
    lineages |= {f"evaluate@{model}": content["lineage"] for model, content in run.evaluations.items()}
    costs = []
    for name, lineage in lineages.items():
        key = str(lineage.get("key") or "none")
        folder = next(iter(sorted(workdir.root().glob(f"*/{key}"))), workdir.root() / "none")
        path = folder / "speed.json"
        speed = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        costs.append(Cost(name, key, speed, mlflow_store.known_run(folder), _price(speed, prices)))
    return costs


def _price(speed: JsonObject, prices: Prices | None) -> float | None:
    if prices is None or "seconds" not in speed:
        return None
    gpus = int(speed.get("gpus", 1 if "(cuda)" in str(speed.get("device", "")) else 0))
    return speed["seconds"] / 3600 * (prices.core * speed.get("cores", 1) + prices.gpu * gpus)


def total(costs: list[Cost]) -> JsonObject:
    """Sums (seconds, cpu_seconds, joules, price) and peak memory over the stages with known cost, and their number."""
    known = [cost for cost in costs if "seconds" in cost.speed]
    joules = [cost.speed["joules"] for cost in known if isinstance(cost.speed.get("joules"), int | float)]
    prices = [cost.price for cost in known if cost.price is not None]
    return {
        "known": len(known),
        "all": len(costs),
        "seconds": sum(cost.speed["seconds"] for cost in known),
        "cpu_seconds": sum(cost.speed.get("cpu_seconds", 0.0) for cost in known),
        "memory": max((cost.memory for cost in known if cost.memory is not None), default=None),
        "joules": sum(joules) if joules else None,
        "price": sum(prices) if prices else None,
    }
