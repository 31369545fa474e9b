"""One run of `time_to_loss.py`, as a process: it trains to its end, or step by step as it is asked.

    python benchmarks/time_to_loss_arm.py '{"side": "ours", "overrides": ["language.steps=300", ...], ...}'

`nanogpt` is the baseline's loop (`nanogpt.py`); `ours` is `fit` as stage language calls it, with the settings that
params.yaml, conf/ and `overrides` give, and three ablations that are no settings: `windows` (the baseline's random
windows in place of packed documents), `unmasked` (documents of a row see each other) and `gpt2` (the baseline's
architecture in our loop).

With "steps" in the specification it trains so many and says the curve: bits per byte of the validation split against
seconds of training, of the clock and of CPU time, evaluations left out. Without, it is a side of interleaved rounds
(`train_arms.Metronome`). All sides are evaluated alike, in float32: on the same packed rows with the same targets, each
seeing them as it was trained, ours its own document alone, the baseline the whole row before.
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

COMPILING = 3  # first steps whose time above the usual is called compiling
ENDLESS = 10**6  # steps of a run that ends when nobody asks for more


class Clock:
    """Seconds of training, of the clock and of CPU time; evaluations are left out."""

    def __init__(self) -> None:
        self.began: list[tuple[float, float]] = []  # of each step, evaluations taken off
        self.left_out = (0.0, 0.0)

    def now(self) -> tuple[float, float]:
        """Seconds since an origin, without what was left out."""
        return time.perf_counter() - self.left_out[0], time.process_time() - self.left_out[1]

    def tick(self, step: int) -> None:
        """A step begins; the last one that says it is step 0 is the first."""
        if step == 0:
            self.began = []
        self.began.append(self.now())

    def leave_out(self, since: tuple[float, float]) -> None:
        """What lies between `since` and now does not count."""
        now = self.now()
        self.left_out = (self.left_out[0] + now[0] - since[0], self.left_out[1] + now[1] - since[1])

    def taken(self, now: tuple[float, float]) -> tuple[float, float]:
        """Seconds from the first step to `now`."""
        return (now[0] - self.began[0][0], now[1] - self.began[0][1]) if self.began else (0.0, 0.0)

    def compiling(self) -> tuple[float, float]:
        """Seconds that the first steps took above as many usual ones."""
        if len(self.began) < 4 * COMPILING:
            return 0.0, 0.0
        gaps = [(b[0] - a[0], b[1] - a[1]) for a, b in zip(self.began, self.began[1:], strict=False)]
        usual = [statistics.median(gap[i] for gap in gaps[COMPILING:]) for i in (0, 1)]
        above = [max(0.0, sum(gap[i] for gap in gaps[:COMPILING]) - COMPILING * usual[i]) for i in (0, 1)]
        return above[0], above[1]


class Curve:
    """Bits per byte against steps and seconds: a slice of the validation split along the way, all of it at the end."""

    def __init__(self, spec: dict[str, Any], clock: Clock, batches: list[TokenBatch], *, whole_rows: bool) -> None:
        self.clock, self.steps = clock, int(spec.get("steps", 0))
        self.every = every(spec)
        self.batches, self.whole_rows = batches, whole_rows
        self.points: list[dict[str, float]] = []
        tokens = np.cumsum([batch.num_targets for batch in batches])
        self.slice = batches[: int(np.searchsorted(tokens, spec.get("slice", 16384))) + 1]

    def evaluate(self, step: int, model: nn.Module) -> float | None:
        """Add a point where one is due; the clock does not see it."""
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
    """Of the targets of packed rows, in float32. `whole_rows`: the model sees documents before its own, as it was
    trained.
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
    """The batch with rows that are one document each, for attention; the targets stay."""
    places = torch.arange(batch.input_ids.shape[1]).expand(batch.input_ids.shape)
    return TokenBatch(batch.input_ids, batch.targets, torch.zeros_like(batch.documents), places, batch.num_bytes)


def validation(spec: dict[str, Any], text: Tokenizer, context: int, cache: Path) -> list[TokenBatch]:
    """The validation split packed in rows of `context`, the same for all sides; a limit in the specification
    shortens it.
    """
    stream = CorpusStream(Path(spec["tokens"]), text, context=context, tokens_per_step=8 * context, seed=0, cache=cache)
    return list(stream.evaluation(spec.get("most", 2**40)))


def token_line(folder: Path) -> np.ndarray:
    """The training split as one line of tokens."""
    dtype = np.dtype(read_meta(folder)["dtype"]).newbyteorder("<")
    return np.memmap(folder / "train.bin", dtype=dtype, mode="r")


# the baseline


def nanogpt(spec: dict[str, Any], clock: Any, cache: Path) -> dict[str, Any]:
    """The baseline's loop."""
    text = Tokenizer.load(Path(spec["tokenizer"]))
    recipe = Recipe(**(spec["recipe"] | {"steps": spec.get("steps", ENDLESS), "betas": tuple(spec["recipe"]["betas"])}))
    shape = Shape(**spec["shape"], vocab_size=text.vocab_size, context=recipe.context)
    model = GPT(shape, torch.Generator().manual_seed(recipe.seed))
    curve = Curve(spec, clock, validation(spec, text, recipe.context, cache), whole_rows=True)
    train(model, token_line(Path(spec["tokens"])), recipe, clock.tick, lambda step: void(curve.evaluate(step, model)))
    return {"points": curve.points, "parameters": model.num_parameters()}


def void(_: object) -> None:
    """Nothing."""


# ours


def ours(spec: dict[str, Any], clock: Any, cache: Path) -> dict[str, Any]:
    """`fit` as stage language calls it."""
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
    """A stream that says when a step begins."""

    def __init__(self, stream: CorpusStream, clock: Any) -> None:
        self.stream, self.clock = stream, clock
        self.fingerprint, self.tokens_per_epoch = stream.fingerprint, stream.tokens_per_epoch

    def rows(self, step: int, context: int) -> np.ndarray:
        """Those of the stream."""
        self.clock.tick(step)
        return self.stream.rows(step, context)

    def batch(self, step: int, context: int, rows: np.ndarray) -> TokenBatch:
        """That of the stream."""
        return self.stream.batch(step, context, rows)

    def evaluation(self, tokens: int) -> Iterator[TokenBatch]:
        """That of the stream."""
        return self.stream.evaluation(tokens)


class RandomWindows(Ticking):
    """The baseline's rows as batches of our loop; documents see each other."""

    def __init__(self, stream: CorpusStream, clock: Any, line: np.ndarray, seed: int, text: Tokenizer) -> None:
        super().__init__(stream, clock)
        self.line, self.seed, self.text, self.num_rows = line, seed, text, stream.tokens_per_step // stream.context

    def rows(self, step: int, context: int) -> np.ndarray:
        """Their numbers."""
        self.clock.tick(step)
        return np.arange(self.num_rows)

    def batch(self, step: int, context: int, rows: np.ndarray) -> TokenBatch:
        """Those of a step."""
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
    """`Metronome` behind the interface of a clock: the checks before the first step draw step 0 once more."""

    def __init__(self) -> None:
        self.metronome = Metronome(5)

    def tick(self, step: int) -> None:
        """A step begins."""
        if step:
            self.metronome.tick()


SIDES = {"nanogpt": nanogpt, "ours": ours}


def main() -> None:
    """A line of JSON: the run's curve; or lines as `Metronome` says them."""
    spec = json.loads(sys.argv[1])
    torch.set_num_threads(spec["threads"])
    os.dup2(1, 3)  # the libraries may print; who asks reads from here
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
