"""What the metrics folder of a run holds, read once for all who show it: the report card, the table of `make`,
comparisons.

    metrics/*.json, *.csv, eval/*, traces/*, routing/*  -> Run

Everything stands in pipeline order, stages of a person's own behind ours. A file without a lineage is nobody's: it
changes nothing.

The numbers that stand at the top of the report and in the table at the end of `make`.

What each stage cost: time, speed, memory, energy, money; and where its numbers can be looked up.

    lineage keys + speed.json of the work folder + `report.prices`  -> a row per stage

Times come from the work folder of this machine, by key: a stage that was restored from a cache or pulled was built
elsewhere. Money is processor and GPU hours by the prices that `report.prices` names; without prices none is shown.
"""

import csv
import json
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from pipeline.run import tracking, workdir

ORDER = (
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
    "grpo",
    "reward",
    "rlhf",
    "diffusion",
    "diffusion_control",
    "diffusion_dpo",
    "diffusion_grpo",
    "memory",
    "memory_baseline",
    "deploy",
)
# What a model was made from, and so is compared with, where that is not the model that its lineage names: lora does the
# work of tools; the masked-diffusion model is compared with its control, the causal model at its best on the same data;
# a memory with a wider model.
COMPARED = {
    "lora": "tools",
    "diffusion": "diffusion_control",
    "diffusion_control": "code",
    "memory": "memory_baseline",
    "memory_baseline": "code",
    "reward": "",
}  # "": it answers nothing, so there is nothing to compare
SECOND = {
    "diffusion_control": "diffusion",
    "memory_baseline": "memory",
}  # model -> the stage that makes it beside its own
MADE_BY = {
    "raw": "corpus",
    "dialogues": "tasks",
    "problems": "tasks",
    "preferences": "tasks",
    "facts": "tasks",
    "tokenizer": "tokenizer",
}


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


# -- headlines ---------------------------------------------------------------------------------------------------------


Row = dict[str, Any]


@dataclass(frozen=True)
class Headline:
    """One number of metrics/eval/<model>.json, with its `_low` and `_high` beside it."""

    path: tuple[str, ...]
    title: str
    axis: str
    unit: str  # "share" is shown in per cent
    higher_is_better: bool
    key: str  # its name in reports/headlines/, which `dvc metrics show` and `dvc exp show` print
    chart: bool = False
    rows: tuple[str, str] | None = None  # of metrics/eval/<model>.jsonl: the suite, and what each item counts
    group: str | None = None  # of these rows
    asked: dict[str, str | int] = field(
        default_factory=dict, hash=False
    )  # of a number that no row counts: which rows it is over

    def show(self, value: float) -> str:
        """The value as people read it."""
        return f"{100 * value:.1f} %" if self.unit == "share" else f"{value:.3f}"

    def show_change(self, difference: float) -> str:
        """A difference of two values; of shares in percentage points."""
        sign = "+" if difference >= 0 else "−"
        amount = abs(difference)
        return f"{sign}{100 * amount:.1f} points" if self.unit == "share" else f"{sign}{amount:.3f}"

    @property
    def suite(self) -> str:
        """Whose items it is measured over."""
        return self.rows[0] if self.rows else self.path[0]

    def items(self, rows: list[Row]) -> dict[str, Row]:
        """The rows that it is measured over, by what makes an item: its id, and the hash of what was asked where a
        row has it.
        """
        wanted = {"suite": self.suite} | self.asked | ({"group": self.group} if self.group else {})
        mine = (r for r in rows if wanted.items() <= r.items())
        if self.rows:
            mine = (r for r in mine if isinstance(r.get(self.rows[1]), int | float))
        return {f"{r['id']} {r['item']}" if "item" in r else str(r["id"]): r for r in mine}

    def counted(self, row: Row) -> tuple[float, float]:
        """What an item adds above and below the line: bits and bytes, or right and 1."""
        assert self.rows, "only a number that rows count is a sum over them"
        key = self.rows[1]
        return float(row[key]), float(row["bytes"]) if key.endswith("bits") else 1.0


BITS = "bits per byte, lower is better"
STORIES, SOLVED = "share of sampled stories", "share of problems solved"
HEADLINES = (
    Headline(("text", "bpb"), "Running text", BITS, "bits per byte", False, "text_bpb", True, rows=("text", "bits")),
    Headline(("stories", "bpb"), "Stories", BITS, "bits per byte", False, "stories_bpb", rows=("stories", "bits")),
    Headline(
        ("stories", "story_rate"),
        "Stories that pass every clause",
        STORIES,
        "share",
        True,
        "stories_pass",
        rows=("stories", "right"),
    ),
    Headline(
        ("stories", "end_rate"), "Stories that end", STORIES, "share", True, "stories_end", rows=("stories", "ended")
    ),
    Headline(("code", "bpb"), "Source code", BITS, "bits per byte", False, "code_bpb", True, rows=("code", "bits")),
    Headline(
        ("code", "bpb_bound"),
        "Source code, upper bound",
        BITS,
        "bits per byte",
        False,
        "code_bpb_bound",
        rows=("code", "bound_bits"),
    ),
    Headline(
        ("problems", "parse_rate"),
        "Answers whose code parses",
        "share of problems",
        "share",
        True,
        "parse",
        rows=("problems", "parses"),
    ),
    Headline(
        ("problems", "easy", "pass_at_1"),
        "Easy problems, pass@1",
        SOLVED,
        "share",
        True,
        "easy",
        True,
        rows=("problems", "sampled"),
        group="easy",
    ),
    Headline(
        ("problems", "medium", "pass_at_1"),
        "Unseen compositions, pass@1",
        SOLVED,
        "share",
        True,
        "medium",
        rows=("problems", "sampled"),
        group="medium",
    ),
    Headline(
        ("tools", "ast"),
        "Tool calls right (AST)",
        "share of calls right",
        "share",
        True,
        "ast",
        True,
        asked={"wanted": "call"},
    ),
    Headline(
        ("tools", "ast_constrained"),
        "The same under the tools' grammar",
        "share of calls right",
        "share",
        True,
        "ast_grammar",
        asked={"wanted": "call", "constrained": 1},
    ),
    Headline(
        ("tools", "ast_unseen_tool"),
        "Calls of unseen tools right",
        "share of calls right",
        "share",
        True,
        "ast_unseen",
        asked={"wanted": "call", "tool": "unseen"},
    ),
    Headline(
        ("tools", "false_call_rate"),
        "False calls",
        "share of prompts without a fitting tool",
        "share",
        False,
        "false_calls",
        asked={"wanted": "nothing"},
    ),
    Headline(
        ("facts", "exact_match"),
        "Facts by heart",
        "share of questions answered right",
        "share",
        True,
        "facts",
        rows=("facts", "right"),
    ),
    Headline(
        ("reward", "accuracy"),
        "The better of two answers",
        "share of pairs told right",
        "share",
        True,
        "pairs",
        rows=("reward", "right"),
    ),
)


def short(numbers: dict[str, Any]) -> dict[str, float]:
    """key -> value of the headlines that a model has: a file that people read as one line of a table."""
    found = ((headline.key, lookup(numbers, headline)) for headline in HEADLINES)
    return {key: round(measured["value"], 4) for key, measured in found if measured is not None}


def lookup(numbers: dict[str, Any], headline: Headline) -> dict[str, float] | None:
    """{"value"} of a headline, with {"low", "high"} where it has an interval; None where the model has no such
    number.
    """
    place: Any = numbers
    for key in headline.path[:-1]:
        place = place.get(key) if isinstance(place, dict) else None
    last = headline.path[-1]
    if not isinstance(place, dict) or not isinstance(place.get(last), int | float):
        return None
    low, high = (place.get(f"{last}_{side}") for side in ("low", "high"))  # may be "not finite"
    interval = {"low": low, "high": high} if isinstance(low, int | float) and isinstance(high, int | float) else {}
    return {name: float(number) for name, number in ({"value": place[last]} | interval).items()}


# -- costs -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Prices:
    """`report.prices`: what an hour costs."""

    core: float = 0.0
    """An hour of a processor core that the stage may use."""
    gpu: float = 0.0
    """An hour of each GPU."""
    currency: str = "EUR"
    """As it is shown."""

    def __post_init__(self) -> None:
        if min(self.core, self.gpu) < 0:
            raise ValueError(f"prices: expected numbers from 0 on, got {self.core} a core, {self.gpu} a GPU")


@dataclass(frozen=True)
class Cost:
    """A stage's row."""

    stage: str
    key: str
    speed: dict[str, Any]  # speed.json; empty where it was built elsewhere
    mlflow: str  # id of its MLflow run, "" where this machine has none
    price: float | None

    @property
    def device(self) -> str:
        """What it ran on."""
        return str(self.speed.get("device", "")) if self.speed else "built elsewhere"

    @property
    def memory(self) -> float | None:
        """Peak of all its processes, GB."""
        return self.speed.get("host_memory_gb", self.speed.get("memory_gb"))


def rows(run: Run, prices: Prices | None = None) -> list[Cost]:
    """Stages in pipeline order, then the evaluations."""
    keyed = {name: told["lineage"] for name, told in run.stages.items()}
    keyed |= {f"evaluate@{model}": told["lineage"] for model, told in run.evaluations.items()}
    found = []
    for name, lineage in keyed.items():
        key = str(lineage.get("key") or "none")
        folder = next(iter(sorted(workdir.root().glob(f"*/{key}"))), workdir.root() / "none")
        path = folder / "speed.json"
        speed = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        found.append(Cost(name, key, speed, tracking.known_run(folder), _price(speed, prices)))
    return found


def _price(speed: dict[str, Any], prices: Prices | None) -> float | None:
    if prices is None or "seconds" not in speed:
        return None
    gpus = int(speed.get("gpus", 1 if "(cuda)" in str(speed.get("device", "")) else 0))
    return speed["seconds"] / 3600 * (prices.core * speed.get("cores", 1) + prices.gpu * gpus)


def total(costs: list[Cost]) -> dict[str, Any]:
    """Sums over the stages whose cost is known: seconds, cpu_seconds, joules, price; `known` of `all`; the highest
    memory.
    """
    known = [one for one in costs if "seconds" in one.speed]
    joules = [one.speed["joules"] for one in known if isinstance(one.speed.get("joules"), int | float)]
    prices = [one.price for one in known if one.price is not None]
    return {
        "known": len(known),
        "all": len(costs),
        "seconds": sum(one.speed["seconds"] for one in known),
        "cpu_seconds": sum(one.speed.get("cpu_seconds", 0.0) for one in known),
        "memory": max((one.memory for one in known if one.memory is not None), default=None),
        "joules": sum(joules) if joules else None,
        "price": sum(prices) if prices else None,
    }
