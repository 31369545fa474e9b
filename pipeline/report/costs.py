"""What each stage cost: time, speed, memory, energy, money; and where its numbers can be looked up.

    lineage keys + speed.json of the work folder + `report.prices`  -> a row per stage

Times come from the work folder of this machine, by key: a stage that was restored from a cache or pulled was built elsewhere. Money is
processor and GPU hours by the prices that `report.prices` names; without prices none is shown.
"""

import json
from dataclasses import dataclass
from typing import Any

from pipeline import tracking, work
from pipeline.report.run import Run


@dataclass(frozen=True, kw_only=True)
class Prices:
    """`report.prices`: what an hour costs."""

    core: float = 0.0  # an hour of a processor core that the stage may use
    gpu: float = 0.0  # an hour of each GPU
    currency: str = "EUR"  # as it is shown

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
        folder = next(iter(sorted(work.root().glob(f"*/{key}"))), work.root() / "none")
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
    """Sums over the stages whose cost is known: seconds, cpu_seconds, joules, price; `known` of `all`; the highest memory."""
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
