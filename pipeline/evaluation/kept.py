"""Finished suites of an evaluation, kept so that none is measured twice.

    .work/evaluate@<model>/suites/<digest>.json        numbers and rows of one suite

The digest covers the suite's name, the model, the data, the settings and the code, but of the files in `data/benchmarks` only the
one that the suite scores, by its contents. A damaged file is measured again. Files that nobody used for 30 days are removed.
"""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline import work
from pipeline.evaluation import benchmarks
from pipeline.evaluation.suites import Result
from pipeline.tracking import clean

BENCHMARKS = "data/benchmarks"


def suite(job: work.Job, name: str, settings: dict[str, Any], measure: Callable[[], Result]) -> Result:
    """The suite's result: what was kept, or else what `measure` finds."""
    path = job.folder.parent / "suites" / f"{digest(job, name, settings)}.json"
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        result = Result(told["numbers"], told["rows"])
        os.utime(path)
    except (OSError, ValueError, KeyError, TypeError):
        found = measure()
        result = Result(clean(found.numbers), found.rows)
        if not _skipped(result.numbers):  # for want of a sandbox, which may be there next time
            path.parent.mkdir(parents=True, exist_ok=True)
            _forget(path.parent)
            work.write_atomically(path, json.dumps({"numbers": result.numbers, "rows": result.rows}))
    return result


def _skipped(numbers: dict[str, Any]) -> bool:
    return "skipped" in numbers or any(_skipped(part) for part in numbers.values() if isinstance(part, dict))


def digest(job: work.Job, name: str, settings: dict[str, Any]) -> str:
    """What a suite's result depends on."""
    inputs = {path: value for path, value in job.lineage.get("inputs", {}).items() if path != BENCHMARKS}
    brought = {}
    if name.startswith("benchmarks "):
        mine = name.partition(" ")[2]
        files = sorted(p for p in Path(BENCHMARKS).rglob("*") if p.is_file() and benchmarks.stem(p) == mine)
        brought = {str(p.relative_to(BENCHMARKS)): work.digest(p) for p in files}
    return work.canonical_hash([name, inputs, brought, settings, job.seed, job.lineage.get("code", job.key)])


def _forget(folder: Path) -> None:
    for path in folder.glob("*.json"):
        if time.time() - path.stat().st_mtime > work.KEEP_SECONDS:
            path.unlink(missing_ok=True)
