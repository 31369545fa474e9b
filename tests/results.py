"""A metrics folder of a made-up run, shared by the tests of the report."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from pipeline.run.tracking import write_curve, write_json

HOSTILE = "</pre><script>alert(1)</script>\N{LINE SEPARATOR}\x85<img src=x onerror=y> & \"'"
MODELS = ("language", "code", "tools")
STAGES = ("corpus", "tasks", "tokenizer", "encode_text", "encode_code", *MODELS, "deploy")


def measured(value: float, width: float) -> dict[str, float]:
    return {"": value, "_low": max(0.0, value - width), "_high": value + width}


def evaluation(place: int) -> dict[str, Any]:
    """Numbers for the first, second or third model."""
    found: dict[str, Any] = {}

    def put(suite: str, name: str, values: list[float], width: float) -> None:
        block = found
        for key in suite.split("/"):
            block = block.setdefault(key, {})
        block |= {f"{name}{end}": number for end, number in measured(values[place], width).items()}

    put("text", "bpb", [1.8123, 1.8301, 1.9], 0.03)
    put("stories", "bpb", [0.9, 0.95, 1.1], 0.02)
    put("stories", "story_rate", [0.62, 0.48, 0.41], 0.06)
    put("stories", "coherent_rate", [0.2, 0.1, 0.05], 0.04)
    put("stories", "end_rate", [0.91, 0.88, 0.9], 0.03)
    put("code", "bpb", [2.2, 1.1, 1.2], 0.04)
    put("code", "bpb_files", [2.3, 1.7, 1.8], 0.2)
    put("problems/phrasing", "pass_at_1", [0.0, 0.02, 0.3], 0.05)
    put("problems/easy", "pass_at_1", [0.0, 0.05, 0.44], 0.04)
    put("problems/medium", "pass_at_1", [0.0, 0.01, 0.125], 0.01)
    put("requests", "pass_at_1_greedy", [0.0, 0.01, 0.55], 0.05)
    put("tools", "ast", [0.0, 0.0, 0.58], 0.0)
    if place == 2:
        found["tools"] |= {"ast_low": 0.51, "ast_high": 0.65, "ast_unseen_tool": 0.31, "false_call_rate": 0.08}
    found["problems"] |= {"parse_rate": [0.02, 0.61, 0.82][place], "n": 200}  # without an interval
    found["stories"]["perplexity"] = math.nan
    return found | {"settings": {"documents": 100, "data_seed": 42}, "lineage": {"key": f"{place:016x}"}}


def write(folder: Path) -> Path:
    """Write the folder as the graph would leave it."""
    before = "data/raw/text"
    for number, name in enumerate(STAGES):
        lineage = {"key": f"{number:08d}abcdef00", "code": f"c0de{number:012d}", "inputs": {before: f"{number:016x}"}}
        write_json(
            folder / f"{name}.json", {"parameters": 2_361_536, "best": {"val_bpb": 1.2345678}, "lineage": lineage}
        )
        before = f"models/{name}"
    for number, name in enumerate(MODELS):
        rows: list[dict[str, float | int | str]] = []
        for step in range(10, 401, 10):
            rows.append({"step": step, "loss": 2 + 6 * math.exp(-step / (60 + 40 * number)), "lr": 1e-3})
            if step % 100 == 0:
                rows[-1]["val/bpb"] = 1 + 2 * math.exp(-step / (90 + 30 * number))
        rows[3]["loss"] = "not finite"
        write_curve(folder / f"{name}.csv", rows)
        write_json(folder / "eval" / f"{name}.json", evaluation(number))
        items = [
            {
                "suite": "stories",
                "id": "stories/wish/50",
                "prompt": "Once there was a pilot.",
                "output": f"Once, by {name}. " * 12,
                "verdict": "ending",
            },
            {
                "suite": "problems",
                "id": "p-1",
                "prompt": "Write `solve(x)`: double each number.",
                "output": "```python\ndef solve(x):\n    return [n * 2 for n in x]\n```",
                "verdict": "passed",
            },
            {
                "suite": "tools",
                "id": "t-1#2",
                "prompt": "What is the weather in Oslo?",
                "output": HOSTILE,
                "verdict": "right",
                "reference": HOSTILE,
            },
            {
                "suite": "tools",
                "id": "t-2#2",
                "prompt": HOSTILE,
                "output": '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>',
                "verdict": "",
            },
        ]
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in items)
        (folder / "eval" / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    return folder


@pytest.fixture(name="metrics")
def metrics_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STAGECOACH_WORK", str(tmp_path / ".work"))
    return write(tmp_path / "metrics")
