"""Wings: the packages in `pipeline/` that have a `wing.py`. Only their own stages import them by name.

`pipeline/<name>/wing.py` defines what the wing offers, as functions that import the wing's other modules only when
called. Code with an extension point looks up offers by name and also works if there are none:

    for offer in wings.each("report"): ...

    claims, models, report                    sections of the report: report/metrics.py (`Section`), report/claims.py
    causal_suites, purposes                   suites for causal models, and each model's suites: evaluation/suites.py
    base, evaluation, evaluation_keys,        a kind of model that does not write from left to right:
    export, serving                           model/checkpoint.py, evaluation/suites.py, export/smoke.py,
                                              serve/models.py
    the rest                                  a layer hook and its training: model/layers.py, learning/pretraining.py

To remove a wing, delete its folder, its stages and its tests. The code hash finds offers by name too (run/codehash.py).
"""

import importlib
from functools import cache
from pathlib import Path
from typing import Any


def each(offer: str) -> list[Any]:
    """All wings' offers with this name, ordered by wing. The caller knows their type."""
    modules = [importlib.import_module(f"pipeline.{name}.wing") for name in names()]
    return [getattr(module, offer) for module in modules if hasattr(module, offer)]


@cache
def names() -> tuple[str, ...]:
    """The packages that are wings, sorted."""
    return tuple(sorted(path.parent.name for path in Path(__file__).parent.glob("*/wing.py")))
