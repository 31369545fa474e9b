"""One process of `scaling.py`: writes, reads or trains, and prints its results as lines of JSON.

    python benchmarks/scaling_arms.py write FOLDER '{"tokens": 1000000}'  token shards by shards.join, from random parts
    python benchmarks/scaling_arms.py encode FOLDER '{"documents": 1500}'   a parquet file of made-up text by
                                                                            shards.encode_file
    python benchmarks/scaling_arms.py read FOLDER '{"batches": 200}'        CorpusStream over those shards
    python benchmarks/scaling_arms.py train FOLDER '{"size": {...}, ...}'   `fit`, in the processes set by
                                                                            STAGECOACH_LAUNCH

The first three print `ready` when everything is imported, then wait for a line, so that the memory of the work can be
separated from that of the process. Processes of `train` write `rank-<n>.json` into the folder.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import train_arms
from benchmarks.train_speed import anonymous_peak
from pipeline.batches.corpus import CorpusStream
from pipeline.ingest import shards
from pipeline.ingest.shards import Counts, EncodeTask
from pipeline.text.tokenizer import Tokenizer

PART = 10_000_000  # tokens per part; encode_file writes one for each parquet file
PIECE = 1_000_000  # tokens in memory while making a part
SHORTEST, LONGEST = 50, 550  # tokens per document
VAL = 200_000  # tokens
CONTEXT, STEP = 512, 8192  # tokens per row and per step of the stream
WORDS = [
    f"{a}{b}{c}" for a in "bdfglmnprst" for b in ("a", "e", "i", "o", "ou") for c in ("n", "st", "ve", "ly", "r", "me")
]


def tokenizer_of(folder: Path) -> Tokenizer:
    """A small tokenizer, created once."""
    if not (folder / "tokenizer").is_dir():
        Tokenizer.train(iter([" ".join(WORDS)]), 512).save(folder / "tokenizer")
    return Tokenizer.load(folder / "tokenizer")


def write(folder: Path, spec: dict[str, Any]) -> dict[str, Any]:
    """A token folder of random tokens: the parts are made up, but joined by our code."""
    tokenizer, splits = tokenizer_of(folder), {}
    for split, tokens in (("train", spec["tokens"]), ("val", VAL)):
        sizes = [min(PART, tokens - begin) for begin in range(0, tokens, PART)]
        tasks = [
            EncodeTask(Path(f"{split}-{n:05d}.parquet"), folder / "tokenizer", folder / "parts")
            for n in range(len(sizes))
        ]
        counts = [part(task, size, tokenizer, n) for n, (task, size) in enumerate(zip(tasks, sizes, strict=True))]
        splits[split] = shards.join(split, tasks, counts, folder / "tokens")
    shards.write_meta(folder / "tokens", tokenizer, splits)
    return {"documents": splits["train"]["documents"]}


def part(task: EncodeTask, tokens: int, tokenizer: Tokenizer, number: int) -> Counts:
    """What `encode_file` would write for a parquet file with `tokens` tokens."""
    draws, dtype = np.random.default_rng(number), shards.token_dtype(tokenizer.vocab_size)
    task.parts.mkdir(parents=True, exist_ok=True)
    documents = 0
    with task.part.with_suffix(".bin").open("wb") as ids_file, task.part.with_suffix(".idx").open("wb") as lengths_file:
        for begin in range(0, tokens, PIECE):
            size = min(PIECE, tokens - begin)
            ids = draws.integers(tokenizer.vocab_size - 200, tokenizer.vocab_size, size, dtype=dtype)
            ends = np.append(np.cumsum(draws.integers(SHORTEST, LONGEST, size // SHORTEST)), size)
            ends = np.unique(ends[ends <= size])
            ids[ends - 1] = tokenizer.end_of_text
            ids_file.write(ids.tobytes())
            lengths_file.write(np.diff(ends, prepend=0).astype("<u8").tobytes())
            documents += len(ends)
    return Counts(documents, tokens, 3 * tokens, 0)


def encode(folder: Path, spec: dict[str, Any]) -> dict[str, Any]:
    """Tokenize one parquet file of made-up text."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    tokenizer_of(folder)
    draws, file = np.random.default_rng(0), folder / "train-0.parquet"
    schema = pa.schema([(name, pa.string()) for name in ("text", "source", "path", "license")])
    with pq.ParquetWriter(file, schema) as out:
        for begin in range(0, spec["documents"], shards.ROWS):
            number = min(shards.ROWS, spec["documents"] - begin)
            texts = [" ".join(np.array(WORDS)[draws.integers(0, len(WORDS), 300)]) for _ in range(number)]
            out.write_table(
                pa.table([texts, ["made"] * number, [str(begin)] * number, ["MIT"] * number], schema=schema)
            )
    return {"tokens": shards.encode_file(EncodeTask(file, folder / "tokenizer", folder / "encoded")).tokens}


def read(folder: Path, spec: dict[str, Any]) -> dict[str, Any]:
    """Open the stream and read batches from the entire corpus; builds the packing index if it is not cached."""
    began = time.perf_counter()
    stream = CorpusStream(
        folder / "tokens",
        Tokenizer.load(folder / "tokenizer"),
        context=CONTEXT,
        tokens_per_step=STEP,
        seed=1,
        cache=folder / "cache",
    )
    stream.batch(0, CONTEXT, stream.rows(0, CONTEXT))
    start = time.perf_counter() - began
    for step in range(spec["batches"]):
        stream.batch(step, CONTEXT, stream.rows(step, CONTEXT))
    each = (time.perf_counter() - began - start) / max(1, spec["batches"])
    return {"start_seconds": start, "batch_ms": 1e3 * each, "rows": stream.rows_per_epoch}


class Clock:
    """Replaces train_arms.Metronome: times the steps between the warm-up and the last one."""

    def __init__(self, warmup: int, steps: int) -> None:
        self.first, self.last, self.count = warmup, warmup + steps, 0
        self.found: dict[str, float] = {}

    def tick(self) -> None:
        """Count a step as it begins."""
        self.count += 1
        if self.count == self.first:
            self.began = time.perf_counter(), time.process_time()
        if self.count == self.last:
            self.found = {
                "seconds": time.perf_counter() - self.began[0],
                "cpu_seconds": time.process_time() - self.began[1],
            }


def train(folder: Path, spec: dict[str, Any]) -> None:
    """Run steps of `fit`; each process writes its own measurements."""
    import torch

    from pipeline.learning import losses
    from pipeline.learning.fit import Watchers, fit
    from pipeline.learning.losses import Loss, Term
    from pipeline.learning.settings import FitConfig, Validation
    from pipeline.run import device
    from pipeline.run.config import Runtime
    from pipeline.run.tracking import Tracker
    from pipeline.run.workdir import Job, StopRequest

    torch.set_num_threads(1)
    clock: Any = Clock(spec["warmup"], spec["steps"])
    config = FitConfig(
        steps=spec["warmup"] + spec["steps"] + 1,
        tokens_per_step=spec["rows"] * spec["context"],
        context=spec["context"],
        learning_rate=1e-3,
        schedule="constant",
        eval_steps=10**6,
        validation=Validation(publish="last"),
    )
    runtime = Runtime(
        precision=spec["precision"], micro_batch=spec["rows"] // device.world_size(), save_steps=10**6, save_minutes=1e6
    )
    job = Job(
        stage="scaling",
        item=None,
        key="k",
        seed=1,
        folder=folder,
        workers=1,
        runtime=runtime,
        tracker=Tracker("scaling", folder, {}, {}, quiet=True),
        lineage={},
        stop=StopRequest(),
    )

    def loss(model: Any, batch: Any) -> Loss:
        return Loss([Term("loss", losses.read_out(model, batch, losses.next_token))])

    model, stream = train_arms.our_model(spec), train_arms.full_rows(spec, clock)
    with anonymous_peak(os.getpid()) as peak:
        try:
            fit(model, stream, loss, config, job, from_scratch=True, watchers=Watchers())
        finally:  # only rank 0 returns from `fit`
            if clock.found:
                (folder / f"rank-{device.rank()}.json").write_text(json.dumps(clock.found | {"peak": peak[0]}))


ARMS = {"write": write, "encode": encode, "read": read}


def main(given: list[str]) -> int:
    """Run the command in the first argument; returns the exit code."""
    name, folder, spec = given[0], Path(given[1]), json.loads(given[2])
    if name == "train":
        from pipeline.run import processes

        plan = processes.plan()
        if plan:
            return processes.run_workers(plan, "benchmarks.scaling_arms", given)
        train(folder, spec)
        return 0
    os.dup2(1, 3)  # libraries may print to stdout; the caller reads from descriptor 3
    os.dup2(2, 1)
    os.environ["TRAIN_ARMS_FD"] = "3"
    train_arms.say({"ready": True})
    sys.stdin.readline()
    train_arms.say(ARMS[name](folder, spec))
    sys.stdin.readline()  # keeps the process alive until its memory has been measured
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
