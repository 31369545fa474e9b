"""Runs of `fit` with a tiny transformer, in this process or in several (`python -m tests.training CASES`).

CASES is a JSON file: a list of `Case` fields. Each case leaves `rank<r>.json` in its folder: exit code, the rows seen
at each step, the curve; rank 0 leaves the weights too. Several cases share the processes, because starting those takes
seconds.
"""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState
from safetensors.torch import load_file, save_file

from pipeline.learning import losses
from pipeline.learning.fit import fit
from pipeline.learning.losses import Loss, Term
from pipeline.learning.processes import Ranks
from pipeline.learning.settings import FitConfig, Validation
from pipeline.model import lora
from pipeline.model.config import ModelConfig
from pipeline.model.lora import AdapterConfig
from pipeline.model.transformer import Transformer
from pipeline.run import device
from pipeline.run.config import Runtime
from pipeline.run.errors import StagecoachError
from pipeline.run.tracking import Tracker
from pipeline.run.workdir import Job, StopRequest

ROOT = Path(__file__).parents[1]
VOCABULARY, CONTEXT = 67, 8


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call of fit."""

    folder: str
    sharding: str = ""  # "": DDP; "true", "false": FSDP2 with that reshard_after_forward
    optimizer: str = "adamw"
    rows: int = 6
    micro_batch: int = 6
    steps: int = 4
    adapter: str = ""  # "", lora, dora
    tied: bool = True
    publish: str = "last"
    ema_decay: float = 0.0
    save_steps: int = 100
    keep: int = 3
    compile: bool = False
    precision: str = "fp32"
    dropout: float = 0.0
    stop: tuple[int, int] = (-1, -1)  # (step, rank): a signal arrives there
    poison: tuple[int, int] = (-1, -1)  # the loss is not a number there


class Batch:
    def __init__(self, ids: torch.Tensor, targets: torch.Tensor) -> None:
        self.ids, self.targets = ids, targets
        self.counts = {"tokens": int((targets >= 0).sum())}

    def to(self, where: Any) -> "Batch":
        return self


class Rows:
    """Rows with a pattern, of which unequal shares are trained on. There are three batches to evaluate, so two
    processes have unequal counts.
    """

    fingerprint, tokens_per_epoch = "toy", 640

    def __init__(self, case: Case, job: Job) -> None:
        self.case, self.job, self.step = case, job, 0
        self.seen: dict[int, list[int]] = {}

    def rows(self, step: int, context: int) -> np.ndarray:
        self.step = step
        if (step, device.rank()) == tuple(self.case.stop):
            self.job.stop.signal = signal.SIGTERM
        return np.arange(self.case.rows) + self.case.rows * step

    def batch(self, step: int, context: int, rows: np.ndarray) -> Batch:
        self.seen.setdefault(step, []).extend(int(row) for row in rows if row not in self.seen.get(step, []))
        made = [self._row(int(row)) for row in rows]
        return Batch(torch.stack([a for a, _ in made]), torch.stack([b for _, b in made]))

    def evaluation(self, tokens: int) -> Iterator[Batch]:
        for number in range(3):
            ids, targets = self._row(10_000 + number)
            yield Batch(ids[None], targets[None])

    def _row(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.randint(0, VOCABULARY, (CONTEXT,), generator=device.generator("toy", row))
        targets = (ids * 3 + 1) % VOCABULARY
        targets[: row % 5] = -100
        return ids, targets


def model_of(case: Case) -> Transformer:
    """The same weights in every process. 67 rows and 2 layers: nothing divides by the number of processes."""
    shape = ModelConfig(
        vocab_size=VOCABULARY,
        width=32,
        layers=2,
        heads=2,
        kv_heads=1,
        head_dim=16,
        d_ff=49,
        max_context=64,
        rope_theta=1e4,
        tied=case.tied,
    )
    model = Transformer(shape, torch.Generator().manual_seed(0))
    if case.adapter:
        attached = AdapterConfig(rank=3, alpha=6.0, dropout=0.0, dora=case.adapter == "dora", trained_tokens=(1, 5))
        lora.attach(model, attached, torch.Generator().manual_seed(1))
    return model


def job_of(folder: Path, case: Case) -> Job:
    """A job as running.py makes it."""
    folder.mkdir(parents=True, exist_ok=True)
    runtime = Runtime(
        logging_steps=1,
        precision=case.precision,
        save_steps=case.save_steps,
        micro_batch=case.micro_batch,
        keep=case.keep,
        compile=case.compile,
    )
    return Job(
        stage="toy",
        item=None,
        key="k",
        seed=1,
        folder=folder,
        workers=1,
        runtime=runtime,
        tracker=Tracker("toy", folder, {}, {}, quiet=True),
        lineage={},
        stop=StopRequest(),
    )


def run(case: Case) -> None:
    """Train as the case says."""
    folder = Path(case.folder)
    job, model = job_of(folder, case), model_of(case)
    stream, model.dropout = Rows(case, job), case.dropout
    config = FitConfig(
        steps=case.steps,
        tokens_per_step=case.rows * CONTEXT,
        context=CONTEXT,
        learning_rate=0.005,
        eval_steps=3,
        warmup_steps=2,
        optimizer=case.optimizer,
        validation=Validation(publish=case.publish, ema_decay=case.ema_decay),
        eps=1e-6,
    )  # AdamW turns rounding in gradients near eps into steps

    def loss(model: Transformer, batch: Batch) -> Loss:
        chosen = batch.targets >= 0
        total = model(
            batch.ids,
            select=chosen,
            head=lambda hidden, table, _: losses.next_token(hidden, table, batch.targets[chosen]),
        )
        if (stream.step, device.rank()) == tuple(case.poison) and model.training:
            total = total * float("nan")
        return Loss([Term("loss", total)])

    code: Any = 0
    try:
        fit(model, stream, loss, config, job)
        if device.rank() == 0:
            save_file({k: v.detach().contiguous() for k, v in model.named_parameters()}, folder / "model.safetensors")
    except SystemExit as stopped:
        code = stopped.code
    except StagecoachError as error:
        code = str(error)
    told: dict[str, Any] = {"code": code, "seen": stream.seen, "curve": job.tracker.rows, "kind": type(model).__name__}
    (folder / f"rank{device.rank()}.json").write_text(json.dumps(told))


def together(cases: list[Case], folder: Path, *, processes: int = 2) -> None:
    """Run cases one after another in several processes on this machine, without a launcher, which takes seconds."""
    (folder / "cases.json").write_text(json.dumps([asdict(case) for case in cases]))
    command = [sys.executable, "-m", "tests.training", str(folder / "cases.json")]
    shared = environment() | {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    started = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(processes)
    ]
    try:
        outputs = [process.communicate(timeout=300)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0] * processes, "\n".join(text[-3000:] for text in outputs)


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


def environment() -> dict[str, str]:
    """The environment of a process that computes on a CPU with one thread."""
    own = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true", "PYTHONPATH": str(ROOT)}
    return {k: v for k, v in os.environ.items() if not k.startswith("STAGECOACH_LAUNCH")} | own


def told(folder: Path, rank: int = 0) -> dict[str, Any]:
    """The results that a rank of a case left."""
    return json.loads((folder / f"rank{rank}.json").read_text())


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """The weights of a finished case."""
    return load_file(folder / "model.safetensors")


def main() -> None:
    """Run the cases in the file named on the command line, and leave together: the first to leave would break what the
    other still reads.
    """
    Ranks.leave = lambda self: None  # type: ignore[method-assign]  # the processes have more cases to run
    for fields in json.loads(Path(sys.argv[1]).read_text()):
        case = Case(**fields)
        AcceleratorState._reset_state()  # cases differ in precision
        os.environ["ACCELERATE_USE_FSDP"] = "true" if case.sharding else "false"
        os.environ |= {"FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": case.sharding}
        run(case)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
