"""Whole scripts for other trainers: the requests and answers of huggingface/open-r1's `scripts/e2b_router.py`.

    {"scripts": [text], "languages": [python], "timeout": s, "request_timeout": s}             ("language" for all: too)
    -> [{"execution": {"results", "logs", "error", "execution_count"} or null, "exception_str": text or null}]

As in a notebook cell, the result of a script is the value of its last expression, as text: open-r1 reads its reward
there. Each is one job of one test.

Not promised: that the result was not forged. Script and candidate share a sandbox here, as they do in the router;
`/run_batch` and the judge exist because of it. No processes and no files, as for every candidate; neither pictures nor
other displays; no language but Python.
"""

import json
import os
from typing import Any

from pipeline.sandbox.config import Limits
from pipeline.sandbox.pool import job_limits

MAX_SCRIPT = 64 << 10  # characters
DISPLAY: dict[str, Any] = dict.fromkeys(
    ("text", "html", "markdown", "svg", "png", "jpeg", "pdf", "latex", "json", "javascript", "data", "chart", "extra")
)

# Runs SCRIPT as a notebook cell: `run` returns the text of its last expression, or None.
CELL = """
import ast, sys, types
SCRIPT = {script!r}
def run():
    try:
        tree = ast.parse(SCRIPT, "<script>")
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        module = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(tree, "<script>", "exec"), module.__dict__)
        if last is None:
            return None
        value = eval(compile(ast.Expression(last.value), "<script>", "eval"), module.__dict__)
        return None if value is None else repr(value)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
"""


def jobs(batch: Any) -> list[dict[str, Any] | str]:
    """A job for each script, or why it cannot run. Raises ValueError for a batch that is none."""
    if not isinstance(batch, dict) or not _texts(batch.get("scripts")):
        raise ValueError("scripts: expected a list of texts")
    languages = batch.get("languages") or [batch.get("language") or "python"] * len(batch["scripts"])
    if not _texts(languages) or len(languages) != len(batch["scripts"]):
        raise ValueError("languages: expected one for each script")
    times = [batch.get("timeout", 300), batch.get("request_timeout", 30)]
    if not all(type(seconds) in (int, float) and seconds > 0 for seconds in times):
        raise ValueError("timeout, request_timeout: expected positive numbers")
    return [_job(text, lang, float(times[0])) for text, lang in zip(batch["scripts"], languages, strict=True)]


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _job(script: str, language: str, seconds: float) -> dict[str, Any] | str:
    if language != "python":
        return f"language: expected python, found {language[:40]!r}"
    if len(script) > MAX_SCRIPT:
        return f"expected a script of at most {MAX_SCRIPT} characters, found {len(script)}"
    nonce = os.urandom(16).hex()
    limits = job_limits(Limits(wall_extra_seconds=0.001), seconds, seconds, seconds)
    return {
        "id": nonce,
        "nonce": nonce,
        "source": CELL.format(script=script),
        "entry": "run",
        "tests": [{"args": "[]", "kwargs": "{}"}],
        "limits": limits | {"wall": seconds, "memory": 1 << 30},
    }


def result(answer: dict[str, Any] | str) -> dict[str, Any]:
    """What the router would answer: the execution, or why there is none."""
    if isinstance(answer, str) or "fault" in answer:
        return {"execution": None, "exception_str": answer if isinstance(answer, str) else answer["fault"]}
    if answer["cut"] in ("cpu", "wall"):
        return {"execution": None, "exception_str": f"timeout: {answer['cut']} limit"}
    if answer["cut"] is not None:
        return {"execution": None, "exception_str": f"stopped: {answer['cut']}"}
    text, error = _outcome(answer)
    shown = [DISPLAY | {"text": text, "is_main_result": True}] if text is not None else []
    failure = None if error is None else {"name": error[0], "value": error[1], "traceback": ": ".join(error)}
    logs = {name: [out] if out else [] for name, out in (("stdout", answer["stdout"]), ("stderr", answer["stderr"]))}
    execution = {"results": shown, "logs": logs, "error": failure, "execution_count": 1}
    return {"execution": execution, "exception_str": None}


def _outcome(answer: dict[str, Any]) -> tuple[str | None, list[str] | None]:
    """The text of the cell's result, and [type, message] of what was raised or of how its process ended."""
    if answer["signal"] is not None:
        return None, ["Crash", f"signal {answer['signal']}"]
    if answer["status"]:
        return None, ["ExitStatus", str(answer["status"])]
    for frame in answer["frames"]:
        tree = dict(json.loads(frame))
        if "e" in tree:
            return None, [str(part) for part in tree["e"]]
        value = tree.get("v")
        return (value if isinstance(value, str) else None), None
    return None, None
