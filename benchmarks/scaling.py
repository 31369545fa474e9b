"""How training scales: tokens/s and memory by model size, row length, corpus size and number of processes.

    python benchmarks/scaling.py [--panels sizes contexts corpora processes] [--precision bf16] [--folder DIR] [--quick]

    sizes       `fit` at 1 M to 50 M parameters: tokens/s, TFLOP/s, peak memory compared with the plan
                (learning/footprint.py)
    contexts    rows of 128 to 4,096 tokens, 4,096 tokens per step
    corpora     1 M to 1,000 M tokens: shards written by shards.join and read by CorpusStream. A reader's memory is
                constant once the packing index is built; only building it takes memory per document
    processes   one; two with a complete model each (DDP); two with half a model each (FSDP2); started like a stage,
                through STAGECOACH_LAUNCH. Weak scaling: equal rows per process

Each measurement is a separate process with one thread (`train_arms.py`, `scaling_arms.py`). Memory is private memory
(RssAnon, sampled every 20 ms); for comparison with a plan, that of a process that trains 2,000 parameters is
subtracted. CPU time is reported along with wall time, which on shared cores depends on other load. Processes that share
the cores of one machine, as these do, show the cost of communication, not the gain from another machine.

Results: `results/scaling-<device>.json` and `.png`, and a table. `--quick` measures only the smallest cases and
writes nothing.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.train_speed import SIZES, Side, anonymous_peak, started

MODELS: dict[str, dict[str, int]] = {
    "1M": {"vocab_size": 4096, "width": 128, "layers": 3, "heads": 2, "kv_heads": 2, "head_dim": 64, "d_ff": 320},
    "2M": SIZES["2M"],
    "6M": SIZES["6M"],
    "12M": SIZES["12M"],
    "25M": {"vocab_size": 8192, "width": 448, "layers": 9, "heads": 7, "kv_heads": 7, "head_dim": 64, "d_ff": 1216},
    "50M": SIZES["50M"],
}
ROWS, CONTEXT, TOKENS = 8, 256, 4096  # rows per batch, tokens per row; tokens per step in panel `contexts`
CONTEXTS = (128, 256, 512, 1024, 2048, 4096)
CORPORA = (10**6, 10**7, 10**8, 10**9)
DOCUMENTS = (1500, 15_000)
PROCESSES = {"1": "", "2, DDP": "2", "2, FSDP2": "fsdp2:2"}
WARMUP, ROUNDS, MOST_STEPS = 3, 3, 8
Row = dict[str, Any]


def environment(**more: str) -> dict[str, str]:
    """Environment variables for one thread per process and no tracker."""
    return os.environ | {"STAGECOACH_MLFLOW": "off", "OMP_NUM_THREADS": "1", "STAGECOACH_LAUNCH": ""} | more


# training


def spec_of(size: dict[str, int], rows: int, context: int, precision: str) -> Row:
    """The specification for train_arms.py."""
    return {"size": size, "rows": rows, "context": context, "warmup": WARMUP, "precision": precision, "threads": 1}


def trained(spec: Row, steps: int, rounds: int) -> Row:
    """A model's speed by wall and CPU time (medians of the rounds), and the peak memory of its process."""
    from pipeline.run import device

    where = device.hardware().device
    with started(["ours"], spec, None) as (side,):
        taken = [side.train(steps) for _ in range(rounds)]
        # a heap does not shrink; steps of the smallest model end before they can be sampled
        peak = side.peak if where.type == "cuda" else max(side.peak, anonymous(side.process.pid))
    tokens, flops = spec["rows"] * spec["context"] * steps, model_of(spec).flops_per_token(spec["context"])
    clock, cpu = (statistics.median(tokens / each[place] for each in taken) for place in (0, 1))
    return {
        "parameters": model_of(spec).num_parameters,
        "tokens_per_second": round(clock),
        "per_cpu_second": round(cpu),
        "gflops": round(flops * clock / 1e9, 1),
        "gflops_per_cpu_second": round(flops * cpu / 1e9, 1),
        "peak": peak,
    }


def model_of(spec: Row) -> Any:
    """The model configuration of a specification."""
    from pipeline.model.config import ModelConfig

    return ModelConfig(**spec["size"], max_context=max(spec["context"], 256), rope_theta=1e4, tied=True)


def planned(spec: Row, processes: int = 1, *, sharded: bool = False) -> int:
    """Bytes per process according to the plan."""
    from pipeline.learning import footprint
    from pipeline.run import device

    config = model_of(spec)
    work = footprint.Work(
        row=spec["context"],
        context=spec["context"],
        selected=spec["context"],
        precision=spec["precision"],
        kind=device.hardware().device.type,
        accumulates=False,
        packed=False,
    )
    weights = footprint.full(config)
    one = footprint.footprint(weights, [config], work, spec["rows"] // processes)
    if sharded:
        one = footprint.sharded(one, config, work, processes)
    elif processes > 1:
        one = footprint.data_parallel(one, weights)
    return round(one.total)


def without_model(precision: str) -> int:
    """Memory of a process that trains next to nothing."""
    return trained(spec_of(SIZES["tiny"], 1, 8, precision), 2, 1)["peak"]


def sizes(names: list[str], steps: int, rounds: int, precision: str) -> list[Row]:
    """A row for each size."""
    bare, found = without_model(precision), []
    for name in names:
        spec = spec_of(MODELS[name], ROWS, CONTEXT, precision)
        row = trained(spec, max(2, steps * 2_000_000 // model_of(spec).num_parameters), rounds)
        memory = beside(row.pop("peak"), bare, planned(spec))
        found.append(told({"size": name} | row | memory))
    return found


def contexts(lengths: list[int], steps: int, rounds: int, precision: str) -> list[Row]:
    """A row for each length, with the same number of tokens per step."""
    bare, found = without_model(precision), []
    for length in lengths:
        spec = spec_of(MODELS["6M"], TOKENS // length, length, precision)
        row = trained(spec, steps, rounds)
        memory = beside(row.pop("peak"), bare, planned(spec))
        found.append(told({"context": length} | row | memory))
    return found


def beside(peak: int, bare: int, plan: int) -> Row:
    """The measured and the planned memory of a model, in MiB."""
    held = peak - bare
    return {
        "held_mib": round(held / 2**20),
        "plan_mib": round(plan / 2**20),
        "plan_over_held": round(plan / max(1, held), 2),
    }


# the corpus


def worked(name: str, folder: Path, spec: Row) -> Row:
    """The output of an arm, its peak memory, and the increase over its memory before it started to work."""
    command = [sys.executable, str(ROOT / "benchmarks/scaling_arms.py"), name, str(folder), json.dumps(spec)]
    side = Side(
        name,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
        ),
    )
    try:
        side.hear()
        before = anonymous(side.process.pid)
        assert side.process.stdin
        with anonymous_peak(side.process.pid) as peak:
            side.process.stdin.write("\n")
            side.process.stdin.flush()
            heard = side.hear()
        after = anonymous(side.process.pid)
    finally:
        side.process.kill()
        side.process.communicate()
    return heard | {
        "peak_mib": round(max(peak[0], after) / 2**20, 1),
        "more_mib": round((max(peak[0], after) - before) / 2**20, 1),
    }


def anonymous(process: int) -> int:
    """Current RssAnon of a process, in bytes."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def corpora(tokens: list[int], batches: int, scratch: Path) -> list[Row]:
    """A row for each corpus size: the corpus is written, opened for the first time and opened again."""
    found = []
    for number in tokens:
        with tempfile.TemporaryDirectory(dir=scratch) as folder:
            written = worked("write", Path(folder), {"tokens": number})
            first = worked("read", Path(folder), {"batches": 0})
            again = worked("read", Path(folder), {"batches": batches})
        found.append(
            told(
                {
                    "tokens": number,
                    "documents": written["documents"],
                    "write_more_mib": written["more_mib"],
                    "index_seconds": round(first["start_seconds"], 2),
                    "index_peak_mib": first["peak_mib"],
                    "start_seconds": round(again["start_seconds"], 2),
                    "batch_ms": round(again["batch_ms"], 2),
                    "peak_mib": again["peak_mib"],
                }
            )
        )
    return found


def prepared(documents: list[int], scratch: Path) -> list[Row]:
    """A row for each number of tokenized documents."""
    found = []
    for number in documents:
        with tempfile.TemporaryDirectory(dir=scratch) as folder:
            row = worked("encode", Path(folder), {"documents": number})
        found.append(told({"documents": number, "tokens": row["tokens"], "peak_mib": row["peak_mib"]}))
    return found


# processes


def processes(kinds: list[str], steps: int, precision: str) -> list[Row]:
    """A row for each way to start processes. Memory is that of the largest process, minus that of the smallest model
    started in the same way.
    """
    found: list[Row] = []
    for kind in kinds:
        count = 2 if PROCESSES[kind] else 1
        spec = spec_of(MODELS["6M"], ROWS * count, CONTEXT, precision)
        bare = max(rank["peak"] for rank in launched(kind, spec_of(SIZES["tiny"], count, 8, precision), 2))
        ranks, tokens = launched(kind, spec, steps), spec["rows"] * CONTEXT * steps
        assert len(ranks) == count, f"{kind}: {len(ranks)} processes instead of {count}"
        found.append(
            told(
                {
                    "processes": kind,
                    "tokens_per_second": round(tokens / max(rank["seconds"] for rank in ranks)),
                    "per_cpu_second": round(tokens / sum(rank["cpu_seconds"] for rank in ranks)),
                }
                | beside(max(rank["peak"] for rank in ranks), bare, planned(spec, count, sharded="FSDP" in kind))
            )
        )
    return found


def launched(kind: str, spec: Row, steps: int) -> list[Row]:
    """The results of each process of a run. Raises RuntimeError if the run fails."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "benchmarks.scaling_arms",
            "train",
            folder,
            json.dumps(spec | {"steps": steps}),
        ]
        told_by = environment(STAGECOACH_LAUNCH=PROCESSES[kind], ACCELERATE_USE_CPU="true")
        done = subprocess.run(command, cwd=ROOT, env=told_by, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{kind}: {done.stderr[-2000:]}")
        return [json.loads(path.read_text()) for path in sorted(Path(folder).glob("rank-*.json"))]


# output


def told(row: Row) -> Row:
    """Print the row and return it."""
    sys.stdout.write(json.dumps(row) + "\n")
    sys.stdout.flush()
    return row


def table(rows: list[Row]) -> str:
    """A table with columns as wide as needed."""
    cells = [
        list(rows[0]),
        *([f"{x:,}" if isinstance(x, int | float) else str(x) for x in row.values()] for row in rows),
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells)


def plot(found: dict[str, list[Row]], path: Path, title: str) -> None:
    """Four panels: speed on the left axis, memory on the right one."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 8), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=10)
    panels = [
        ("sizes", "parameters", "parameters", "gflops_per_cpu_second", "GFLOP/CPU second", ("held_mib", "plan_mib")),
        ("contexts", "context", "tokens per row", "per_cpu_second", "tokens per CPU second", ("held_mib", "plan_mib")),
        ("corpora", "tokens", "tokens in the corpus", "batch_ms", "ms per batch", ("peak_mib", "index_peak_mib")),
        ("processes", "processes", "processes", "tokens_per_second", "tokens/s", ("held_mib", "plan_mib")),
    ]
    names = {
        "held_mib": "measured, minus a bare process",
        "plan_mib": "plan",
        "peak_mib": "used by a process",
        "index_peak_mib": "building the index",
    }
    for axis, (panel, x, x_name, speed, speed_name, memory) in zip(figure.subplots(2, 2).flat, panels, strict=True):
        rows = found.get(panel, [])
        places = [row[x] for row in rows]
        axis.plot(places, [row[speed] for row in rows], "o-", color="C0")
        axis.set(xlabel=x_name, ylim=(0, None), title=panel)
        axis.set_ylabel(speed_name, color="C0")
        other = axis.twinx()
        for name, style in zip(memory, ("s-", "x--"), strict=True):
            other.plot(places, [row[name] for row in rows], style, color="C1", label=names[name])
        other.set_ylabel("MiB", color="C1")
        other.set_ylim(0, None)
        other.legend(loc="lower right", fontsize=8)
        if panel != "processes" and rows:
            axis.set_xscale("log", base=2 if panel == "contexts" else 10)
    figure.savefig(path, dpi=110)


def measured(panels: list[str], precision: str, scratch: Path, *, quick: bool) -> dict[str, list[Row]]:
    """The rows of each panel; `quick` takes only the first case of each panel and few steps."""
    few = 1 if quick else None
    steps, rounds = (2, 1) if quick else (MOST_STEPS, ROUNDS)
    found: dict[str, list[Row]] = {}
    if "sizes" in panels:
        found["sizes"] = sizes(list(MODELS)[:few], steps, rounds, precision)
    if "contexts" in panels:
        found["contexts"] = contexts(list(CONTEXTS)[:few], max(2, steps // 3), rounds, precision)
    if "corpora" in panels:
        found["corpora"] = corpora(list(CORPORA)[:few], 20 if quick else 200, scratch)
        found["documents"] = prepared([200] if quick else list(DOCUMENTS), scratch)
    if "processes" in panels:
        found["processes"] = processes(list(PROCESSES)[: 2 if quick else None], max(2, 2 * steps), precision)
    return found


def main(given: list[str] | None = None) -> dict[str, list[Row]]:
    """Measure, print and save."""
    from pipeline.run import device

    panels = ["sizes", "contexts", "corpora", "processes"]
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--panels", nargs="+", choices=panels, default=panels)
    parser.add_argument("--precision", choices=["bf16", "fp32"], default=device.hardware().precision)
    parser.add_argument("--folder", type=Path, help="temporary folder for 5 GB of corpora (default: the system's)")
    parser.add_argument("--quick", action="store_true", help="only the smallest cases; nothing is written")
    arguments = parser.parse_args(given)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as scratch:
        found = measured(arguments.panels, arguments.precision, Path(scratch), quick=arguments.quick)
    for name, rows in found.items():
        sys.stdout.write(f"\n{name}\n{table(rows)}\n")
    if not arguments.quick:
        where, head = device.hardware().device.type, device.describe(arguments.precision)
        file = ROOT / "benchmarks/results" / f"scaling-{where}.json"
        kept = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        found = {name: kept[name] for name in kept if name != "machine"} | found
        machine = head | {"threads": 1, "cores": len(os.sched_getaffinity(0))}
        file.write_text(json.dumps({"machine": machine} | found, indent=1) + "\n", encoding="utf-8")
        plot(
            found,
            file.with_suffix(".png"),
            f"{head['device']}, {arguments.precision}, one thread per process, {machine['cores']} cores",
        )
    return found


if __name__ == "__main__":
    main()
