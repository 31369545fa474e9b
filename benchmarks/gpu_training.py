"""Training speed, model FLOPs utilization and memory of our training loop on one GPU, setting by setting.

    python benchmarks/gpu_training.py [--models medium large] [--rows 8] [--context 2048] [--rounds 3] [--steps 10]

Trains the models in conf/model/ in bf16 with AdamW on random tokens: eager, compiled, compiled with activation
checkpointing (`selective`, `full`), and compiled under FSDP2 on one rank, each in its own process, one after another
(two do not fit into memory). `mfu` divides by the peak in the vendor's data sheet (device.DATA_SHEET), as in
karpathy/nanochat; `mfu_measured` divides by the speed of a large matrix product. A setting that runs out of memory is
marked in its row. Goal: an `mfu` of 55% at 1 to 3 billion parameters on an H100. Writes
`results/gpu_training-<device>.json`. Without a GPU, it exits with 2; `--anyway` runs it on the CPU (for tests) and
writes nothing.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.train_speed import SIZES, WARMUP, Side

SHAPE = ("vocab_size", "width", "layers", "heads", "kv_heads", "head_dim", "d_ff")
FSDP2 = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29511",
}
SETTINGS: dict[str, tuple[str, dict[str, Any], dict[str, str]]] = {  # name -> (arm, runtime, environment)
    "plain": ("ours", {}, {}),
    "compiled": ("ours compiled", {}, {}),
    "compiled, selective": ("ours compiled", {"gradient_checkpointing": "selective"}, {}),
    "compiled, full": ("ours compiled", {"gradient_checkpointing": "full"}, {}),
    "compiled, FSDP2": ("ours compiled", {}, FSDP2),
}


def shape_of(name: str) -> dict[str, int]:
    """The model sizes from a file in conf/model/ or from `train_speed.SIZES`."""
    if name in SIZES:
        return SIZES[name]
    given = yaml.safe_load((ROOT / "conf/model" / f"{name}.yaml").read_text(encoding="utf-8"))
    return {key: given[key] for key in SHAPE}


@contextlib.contextmanager
def started(arm: str, spec: dict[str, Any], environment: dict[str, str]) -> Iterator[Side]:
    """A warmed-up process that trains as specified. Raises RuntimeError if it dies."""
    command = [sys.executable, str(ROOT / "benchmarks/train_arms.py"), arm, json.dumps(spec)]
    own = os.environ | {"STAGECOACH_MLFLOW": "off"} | environment
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=own
    )
    side = Side(arm, process)
    try:
        side.hear()
        yield side
    finally:
        process.kill()
        process.communicate()


def row(model: str, setting: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure one setting of one model."""
    from pipeline.model.config import ModelConfig
    from pipeline.run import device

    arm, runtime, environment = SETTINGS[setting]
    shape: dict[str, Any] = dict(shape_of(model))
    spec = {
        "size": shape,
        "rows": arguments.rows,
        "context": arguments.context,
        "warmup": WARMUP,
        "precision": "bf16",
        "threads": arguments.threads,
        "runtime": {"micro_batch": arguments.micro_batch or arguments.rows} | runtime,
    }
    found: dict[str, Any] = {"model": model, "setting": setting}
    try:
        with started(arm, spec, environment) as side:
            seconds = [side.train(arguments.steps)[0] for _ in range(arguments.rounds)]
    except RuntimeError as error:
        if "out of memory" not in str(error).lower():
            raise
        return found | {"out of memory": True}
    tokens = arguments.rows * arguments.context * arguments.steps
    speeds = [tokens / one for one in seconds]
    config = ModelConfig(**shape, max_context=max(arguments.context, 256), rope_theta=1e4, tied=True)
    flops = statistics.median(speeds) * config.flops_per_token(arguments.context)
    where = device.hardware("bf16").device
    sheet = device.data_sheet_flops(where)
    return found | {
        "parameters": config.num_parameters,
        "tokens_per_second": round(statistics.median(speeds)),
        "range": [round(min(speeds)), round(max(speeds))],
        "mfu": sheet and round(flops / sheet, 3),
        "mfu_measured": round(flops / (1e9 * device.matmul_gflops("bf16")), 3),
        "peak_gb": round(side.peak / 1e9, 2),
    }


def main(given: list[str] | None = None) -> list[dict[str, Any]]:
    """Print a line of JSON for each model and setting."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["medium", "large"])
    parser.add_argument("--settings", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--micro-batch", type=int, default=0, help="rows per micro-batch; 0: all of them")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--anyway", action="store_true", help="run without a GPU; nothing is written")
    arguments = parser.parse_args(given)
    from pipeline.run import device

    hardware = device.hardware("bf16")
    if hardware.device.type != "cuda" and not arguments.anyway:
        parser.error("expected a GPU, found none; benchmarks/train_speed.py measures on a CPU")
    rows = []
    for model in arguments.models:
        for setting in arguments.settings:
            rows.append(row(model, setting, arguments))
            sys.stdout.write(json.dumps(rows[-1]) + "\n")
            sys.stdout.flush()
    if not arguments.anyway:
        head = device.describe("bf16")
        name = "".join(c if c.isalnum() else "-" for c in str(head["device"])).strip("-").lower()
        told = {"machine": head, "rows": arguments.rows, "context": arguments.context, "found": rows}
        file = ROOT / "benchmarks/results" / f"gpu_training-{name}.json"
        file.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    return rows


if __name__ == "__main__":
    main()
