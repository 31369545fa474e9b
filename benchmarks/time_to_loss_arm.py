"""One run of `time_to_loss.py`, as a process: trains to the end, or step by step on request.

    python benchmarks/time_to_loss_arm.py '{"side": "ours", "overrides": ["language.steps=300", ...], ...}'

`nanogpt` is the baseline's loop (`nanogpt.py`); `ours` is `fit` as called by stage language, with the settings of
params.yaml, conf/ and `overrides`, and three ablations that are not settings: `windows` (the baseline's random windows
instead of packed documents), `unmasked` (attention across the documents of a row) and `gpt2` (the baseline's
architecture in our loop).

With "steps" in the specification, it trains that many steps and prints the curve: validation bits per byte by training
time (wall and CPU, excluding evaluations). Otherwise, it is one side of interleaved rounds (`train_arms.Metronome`).
All sides are evaluated in float32 on the same packed rows with the same targets, and attend as in training: ours to
earlier tokens of the same document, the baseline to all earlier tokens of the row.
"""

import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.nanogpt import GPT, Recipe, Shape, train, windows
from benchmarks.train_arms import Metronome, say
from pipeline.batches.batch import Piece, TokenBatch, token_batch
from pipeline.batches.corpus import CorpusStream, read_meta
from pipeline.learning import losses
from pipeline.text.tokenizer import Tokenizer

COMPILING = 3  # number of first steps whose excess time is attributed to compilation
ENDLESS = 10**6  # steps of a run that ends when no more steps are requested


class Clock:
    """Training time in wall and CPU seconds, excluding evaluations."""

    def __init__(self) -> None:
        self.began: list[tuple[float, float]] = []  # start of each step, without evaluations
        self.left_out = (0.0, 0.0)

    def now(self) -> tuple[float, float]:
        """Seconds since an origin, without excluded time."""
        return time.perf_counter() - self.left_out[0], time.process_time() - self.left_out[1]

    def tick(self, step: int) -> None:
        """Record that a step begins; the last call with step 0 counts as the first step."""
        if step == 0:
            self.began = []
        self.began.append(self.now())

    def leave_out(self, since: tuple[float, float]) -> None:
        """Exclude the time between `since` and now."""
        now = self.now()
        self.left_out = (self.left_out[0] + now[0] - since[0], self.left_out[1] + now[1] - since[1])

    def taken(self, now: tuple[float, float]) -> tuple[float, float]:
        """Seconds from the first step to `now`."""
        return (now[0] - self.began[0][0], now[1] - self.began[0][1]) if self.began else (0.0, 0.0)

    def compiling(self) -> tuple[float, float]:
        """How many seconds longer the first steps took than the usual ones."""
        if len(self.began) < 4 * COMPILING:
            return 0.0, 0.0
        gaps = [(b[0] - a[0], b[1] - a[1]) for a, b in zip(self.began, self.began[1:], strict=False)]
        usual = [statistics.median(gap[i] for gap in gaps[COMPILING:]) for i in (0, 1)]
        above = [max(0.0, sum(gap[i] for gap in gaps[:COMPILING]) - COMPILING * usual[i]) for i in (0, 1)]
        return above[0], above[1]


class Curve:
    """Bits per byte by steps and seconds: on a slice of the validation split during training, all of it at the end."""

    def __init__(self, spec: dict[str, Any], clock: Clock, batches: list[TokenBatch], *, whole_rows: bool) -> None:
        self.clock, self.steps = clock, int(spec.get("steps", 0))
        self.every = every(spec)
        self.batches, self.whole_rows = batches, whole_rows
        self.points: list[dict[str, float]] = []
        tokens = np.cumsum([batch.num_targets for batch in batches])
        self.slice = batches[: int(np.searchsorted(tokens, spec.get("slice", 16384))) + 1]

    def evaluate(self, step: int, model: nn.Module) -> float | None:
        """Add a point if one is due; the evaluation is excluded from the clock."""
        last = step == self.steps
        if not self.steps or (step % self.every and not last):
            return None
        now = self.clock.now()
        wall, worked = self.clock.taken(now)
        chosen = self.batches if last else self.slice
        point = {
            "step": step,
            "bpb": bits_per_byte(model, chosen, whole_rows=self.whole_rows),
            "seconds": wall,
            "cpu_seconds": worked,
        }
        self.points.append(point)
        self.clock.leave_out(now)
        return point["bpb"]


def every(spec: dict[str, Any]) -> int:
    """Steps between two evaluations."""
    return max(1, -(-spec.get("steps", ENDLESS) // spec.get("points", 10)))


@torch.no_grad()
def bits_per_byte(model: nn.Module, batches: list[TokenBatch], *, whole_rows: bool) -> float:
    """Bits per byte of the targets of packed rows, in float32. `whole_rows`: the model sees earlier documents, as in
    training.
    """
    training = model.training
    model.train(False)
    nats = 0.0
    for batch in batches:
        if whole_rows:
            batch = seen_whole(batch)
        nats += float(losses.read_out(model, batch, losses.next_token))
    model.train(training)
    return nats / math.log(2) / sum(batch.num_bytes for batch in batches)


def seen_whole(batch: TokenBatch) -> TokenBatch:
    """The batch with each row as one document for attention; the targets are unchanged."""
    places = torch.arange(batch.input_ids.shape[1]).expand(batch.input_ids.shape)
    return TokenBatch(batch.input_ids, batch.targets, torch.zeros_like(batch.documents), places, batch.num_bytes)


def validation(spec: dict[str, Any], text: Tokenizer, context: int, cache: Path) -> list[TokenBatch]:
    """The validation split packed into rows of `context`, the same for all sides; the specification can limit its
    length.
    """
    stream = CorpusStream(Path(spec["tokens"]), text, context=context, tokens_per_step=8 * context, seed=0, cache=cache)
    return list(stream.evaluation(spec.get("most", 2**40)))


def token_line(folder: Path) -> np.ndarray:
    """The training split as one sequence of tokens."""
    dtype = np.dtype(read_meta(folder)["dtype"]).newbyteorder("<")
    return np.memmap(folder / "train.bin", dtype=dtype, mode="r")


# the baseline


def nanogpt(spec: dict[str, Any], clock: Any, cache: Path) -> dict[str, Any]:
    """Train the baseline with its own loop."""
    text = Tokenizer.load(Path(spec["tokenizer"]))
    recipe = Recipe(**(spec["recipe"] | {"steps": spec.get("steps", ENDLESS), "betas": tuple(spec["recipe"]["betas"])}))
    shape = Shape(**spec["shape"], vocab_size=text.vocab_size, context=recipe.context)
    model = GPT(shape, torch.Generator().manual_seed(recipe.seed))
    curve = Curve(spec, clock, validation(spec, text, recipe.context, cache), whole_rows=True)
    train(model, token_line(Path(spec["tokens"])), recipe, clock.tick, lambda step: void(curve.evaluate(step, model)))
    return {"points": curve.points, "parameters": model.num_parameters()}


def void(_: object) -> None:
    """Discard a value."""


# ours


def ours(spec: dict[str, Any], clock: Any, cache: Path) -> dict[str, Any]:
    """Train with `fit` as called by stage language."""
    from pipeline.learning.fit import Watchers, fit
    from pipeline.learning.losses import Loss, Term
    from pipeline.run.config import Settings, resolve
    from pipeline.run.tracking import Tracker
    from pipeline.run.workdir import Job, StopRequest
    from stages import language

    text, without = Tokenizer.load(Path(spec["tokenizer"])), spec.get("without", "")
    given = [
        f"model.vocab_size={text.vocab_size}",
        f"language.steps={spec.get('steps', ENDLESS)}",
        f"language.eval_steps={every(spec)}",
        "language.publish=last",
        "language.eval_tokens=1",
        "runtime.save_steps=1000000",
        "runtime.save_minutes=1000000",
        *spec["overrides"],
    ]
    settings = Settings(ROOT, given)
    params, runtime = resolve(language.Params, settings, "language")
    shape = spec["shape"] | {"vocab_size": text.vocab_size, "context": params.fit.context}
    model: Any = language.fresh(params, text, spec["seed"])
    if without == "architecture":
        model = GPT(Shape(**shape), torch.Generator().manual_seed(spec["seed"]))
    (cache / "job").mkdir()
    job = Job(
        stage="language",
        item=None,
        key="k",
        seed=spec["seed"],
        folder=cache / "job",
        workers=1,
        runtime=runtime,
        tracker=Tracker("language", cache, {}, {}, quiet=True),
        lineage={},
        stop=StopRequest(),
    )
    stream = CorpusStream(
        Path(spec["tokens"]),
        text,
        context=params.fit.context,
        tokens_per_step=params.fit.tokens_per_step,
        seed=spec["seed"],
        cache=cache,
        document_mask=without != "mask",
    )
    whole_rows = without in ("mask", "packing")
    curve = Curve(spec, clock, validation(spec, text, params.fit.context, cache), whole_rows=whole_rows)

    def loss(model: Any, batch: Any) -> Loss:
        return Loss([Term("loss", losses.read_out(model, batch, losses.next_token))])

    def evaluate(step: int) -> dict[str, float]:
        found = curve.evaluate(step, model)
        return {} if found is None else {"bits_per_byte": found}

    ticking = Ticking(stream, clock)
    if without == "packing":
        ticking = RandomWindows(stream, clock, token_line(Path(spec["tokens"])), spec["seed"], text)
    fit(model, ticking, loss, params.fit, job, from_scratch=True, watchers=Watchers(evaluate=evaluate))
    return {"points": curve.points, "parameters": model.num_parameters()}


class Ticking:
    """A stream that reports when a step begins."""

    def __init__(self, stream: CorpusStream, clock: Any) -> None:
        self.stream, self.clock = stream, clock
        self.fingerprint, self.tokens_per_epoch = stream.fingerprint, stream.tokens_per_epoch

    def rows(self, step: int, context: int) -> np.ndarray:
        """The stream's rows; reports the step to the clock."""
        self.clock.tick(step)
        return self.stream.rows(step, context)

    def batch(self, step: int, context: int, rows: np.ndarray) -> TokenBatch:
        """The stream's batch."""
        return self.stream.batch(step, context, rows)

    def evaluation(self, tokens: int) -> Iterator[TokenBatch]:
        """The stream's evaluation batches."""
        return self.stream.evaluation(tokens)


class RandomWindows(Ticking):
    """The baseline's rows as batches for our loop, without masking between documents."""

    def __init__(self, stream: CorpusStream, clock: Any, line: np.ndarray, seed: int, text: Tokenizer) -> None:
        super().__init__(stream, clock)
        self.line, self.seed, self.text, self.num_rows = line, seed, text, stream.tokens_per_step // stream.context

    def rows(self, step: int, context: int) -> np.ndarray:
        """Indices of the rows of a step; reports the step to the clock."""
        self.clock.tick(step)
        return np.arange(self.num_rows)

    def batch(self, step: int, context: int, rows: np.ndarray) -> TokenBatch:
        """The batch of a step."""
        ids = windows(self.line, rows=self.num_rows, context=context, seed=self.seed, step=step).numpy()
        pieces = [[Piece(ids[row], True)] for row in rows]
        return token_batch(
            pieces,
            np.arange(len(rows)),
            packed=context,
            context=context,
            pad=self.text.pad,
            byte_lengths=self.text.byte_lengths,
        )


class Asked:
    """`Metronome` with the interface of a clock; ignores step 0, which the checks before training draw too."""

    def __init__(self) -> None:
        self.metronome = Metronome(5)

    def tick(self, step: int) -> None:
        """Count a step as it begins."""
        if step:
            self.metronome.tick()


SIDES = {"nanogpt": nanogpt, "ours": ours}


def main() -> None:
    """Print the run's curve as a line of JSON, or the lines of `Metronome`."""
    spec = json.loads(sys.argv[1])
    torch.set_num_threads(spec["threads"])
    os.dup2(1, 3)  # libraries may print to stdout; the caller reads from descriptor 3
    os.dup2(2, 1)
    os.environ["TRAIN_ARMS_FD"] = "3"
    clock = Clock() if "steps" in spec else Asked()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = spec.get("compiled_in") or folder + "/compiled"
        found = SIDES[spec["side"]](spec, clock, Path(folder))
    if isinstance(clock, Clock):
        wall, worked = clock.compiling()
        say(found | {"compiling": wall, "compiling_cpu": worked})


if __name__ == "__main__":
    main()
