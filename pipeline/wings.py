"""The wings: the packages of `pipeline/` that have a `wing.py`. Nothing but their own stages imports one by name.

`pipeline/<name>/wing.py` defines what a wing offers, as functions that import its other modules only when called. Code
that has a place for an offer asks for it by name, and works without one:

    for offer in wings.each("report"): ...

    claims, models, report                    sections of the report: report/metrics.py (`Section`), report/claims.py
    causal_suites, purposes                   suites of causal models, and who needs them: evaluation/suites.py
    base, evaluation, evaluation_keys,        a kind of model that does not write from left to right:
    export, serving                           model/checkpoint.py, evaluation/suites.py, export/smoke.py,
                                              serve/models.py
    the rest                                  a layer hook and its training: model/layers.py, learning/pretraining.py

So a wing goes by deleting its folder, its stages and its tests. The code hash knows this rule (run/codehash.py).
"""

import importlib
from functools import cache
from pathlib import Path
from typing import Any


def each(offer: str) -> list[Any]:
    """The offers of this name, in the order of the wings' names. Which type they have says who asks."""
    modules = [importlib.import_module(f"pipeline.{name}.wing") for name in names()]
    return [getattr(module, offer) for module in modules if hasattr(module, offer)]


@cache
def names() -> tuple[str, ...]:
    """The packages that are wings, sorted."""
    return tuple(sorted(path.parent.name for path in Path(__file__).parent.glob("*/wing.py")))
