"""The one training loop: a stream of batches, a loss, and everything that is common to all stages.

    fit(model, stream, loss, config, job)       trains in place; the model ends with the published weights

One step (specs: training, 1): a control reduce of stop request, save request and the terms' counts; per micro-batch seed,
forward, backward; global gradient norm; a verdict; clip; update. What a batch holds is a pure function of (seed, step), so
the state is weights, moments, one integer and the curve, and a killed run ends with the bits of an uninterrupted one (CPU,
same threads and world size). Not promised: equal bits across world sizes or devices (same data order, loss within 1e-6).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from pipeline import device
from pipeline.errors import ConfigError, GateError
from pipeline.learning import gates, states
from pipeline.learning.objectives import Loss
from pipeline.learning.optim import Optimizers
from pipeline.learning.ranks import Ranks
from pipeline.learning.settings import FitConfig
from pipeline.tracking import progress, say
from pipeline.work import Job


class Batch(Protocol):
    """What fit needs to know of a batch; the loss knows the rest."""

    @property
    def num_targets(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    def to(self, device: torch.device) -> Any: ...


class Stream(Protocol):
    """Batches as a pure function of (seed, step); see streams/corpus.py."""

    fingerprint: str
    tokens_per_epoch: int

    def rows(self, step: int, context: int) -> np.ndarray: ...
    def batch(self, step: int, context: int, rows: np.ndarray) -> Any: ...
    def evaluation(self, tokens: int) -> Iterator[Any]: ...


LossFunction = Callable[[Any, Any], Loss]  # of the model and a batch, whose types the stage knows


@dataclass
class Course:
    """Where the run is: everything besides weights and moments that a resumed run needs."""

    step: int = 0  # batches done
    tokens: int = 0  # trained targets so far
    skipped: int = 0
    skipped_in_row: int = 0
    best: float = math.inf
    best_step: int = -1
    anchor: float = math.inf  # early stopping: moves only on a gain above `threshold`
    stale: int = 0  # evaluations since the anchor moved
    done: bool = False
    window_loss: float = 0.0  # sums since the last logged row
    window_targets: int = 0
    window_bytes: int = 0
    window_norm: float = 0.0
    window_steps: int = 0


def fit(
    model: nn.Module, stream: Stream, loss: LossFunction, config: FitConfig, job: Job, *, from_scratch: bool = False
) -> None:
    """Train `model` in place and leave it with the best (or last) weights.

    Raises ConfigError for a batch that cannot be formed, GateError when a health gate fails, SystemExit(128 + signal) when
    asked to stop (a state is saved first).
    """
    Run(model, stream, loss, config, job, from_scratch).go()


class Run:
    """One call of fit: the pieces it works with, and the steps of the loop as methods."""

    def __init__(
        self, model: nn.Module, stream: Stream, loss: LossFunction, config: FitConfig, job: Job, from_scratch: bool
    ) -> None:
        self.stream, self.loss, self.config, self.job = stream, loss, config, job
        self.from_scratch = from_scratch
        self.hardware = device.hardware(job.runtime.precision)
        self.ranks = Ranks(job.runtime.precision, str(job.folder))
        self.plain = model.to(self.hardware.device)
        self.model = self.ranks.wrap(self.plain)
        if hasattr(self.plain, "checkpointing"):
            self.plain.checkpointing = job.runtime.gradient_checkpointing  # type: ignore[assignment]
        self.optimizers = Optimizers(self.plain, config, fast_bf16=self.hardware.precision == "bf16")
        self.steps = config.resolve_steps(stream.tokens_per_epoch)
        self.course = Course()
        self.last_save = time.monotonic()
        self.micro_batch = self._micro_batch()

    def go(self) -> None:
        """Resume or start, train to the end, load what is published."""
        self._resume()
        if self.course.step == 0 and not self.course.done:
            self._check_before()
        say(self._headline())
        start, first_step, tokens = time.monotonic(), self.course.step, self.course.tokens
        with progress(total=self.steps, desc=self.job.name, unit="step", initial=self.course.step) as bar:
            while self.course.step < self.steps and not self.course.done:
                self._one_step()
                bar.update()
                if self.job.tracker.rows:
                    last = self.job.tracker.rows[-1]
                    bar.note(" ".join(f"{k} {last[k]:.3f}" for k in ("loss", "val/loss") if k in last))
        self._speed(time.monotonic() - start, self.course.step - first_step, self.course.tokens - tokens)
        self._publish()

    # -- one step ------------------------------------------------------------------------------------------------------

    def _one_step(self) -> None:
        course, context = self.course, self.config.context
        # 1. what this rank works on, and what all ranks know before the forward pass
        rows = self.stream.rows(course.step, context)
        mine = rows[self.ranks.rank :: self.ranks.world]
        batches = [
            self.stream.batch(course.step, context, mine[first : first + self.micro_batch])
            for first in range(0, len(mine), self.micro_batch)
        ]
        counts = [sum(b.num_targets for b in batches), sum(b.num_bytes for b in batches)]
        elapsed = time.monotonic() - self.last_save > 60 * self.job.runtime.save_minutes and self.ranks.rank == 0
        stop, save, targets, num_bytes = self.ranks.control(self.job.stop.signal, elapsed, counts)
        if stop:
            self._stop(stop)
        # 2. forward and backward per micro-batch
        total = self._backward(batches, targets)
        # 3. norm, verdict, update
        norm = self.ranks.gradient_norm(self.plain, self.config.max_grad_norm)
        total = self.ranks.sum_float(total)
        if course.step == 0:
            gates.gradients(self.optimizers.members, self.plain)
        self._update(total, norm, rows)
        course.step += 1
        course.tokens += targets
        course.window_loss += total
        course.window_targets += targets
        course.window_bytes += num_bytes
        course.window_norm += norm
        course.window_steps += 1
        # 4. log, evaluate, save
        self._after_step(save)

    def _backward(self, batches: list[Any], targets: int) -> float:
        """Gradients of sum_k c_k S_k / G_k over all ranks; returns this rank's sum of nats."""
        total = torch.zeros((), dtype=torch.float64)
        for micro, batch in enumerate(batches):
            device.seed_step(self.job.seed, self.course.step, micro, self.ranks.rank)
            with self.ranks.no_sync(self.model, skip=micro < len(batches) - 1):
                with self.hardware.autocast():
                    loss = self.loss(self.model, batch.to(self.hardware.device))
                parts = [t.coefficient * t.sum * (self.ranks.world / targets) for t in loss.terms if t.count]
                objective = sum(parts, start=loss.terms[0].sum * 0)  # a rank without targets still runs backward
                assert isinstance(objective, Tensor)
                objective.backward()
            total += sum(float(t.coefficient) * t.sum.detach().double().cpu() for t in loss.terms)
        return float(total)

    def _update(self, total: float, norm: float, rows: np.ndarray) -> None:
        course = self.course
        if math.isfinite(total) and math.isfinite(norm):
            self.optimizers.step(self.config.factor(course.step, self.steps))
            course.skipped_in_row = 0
            return
        self.optimizers.zero_grad()
        course.skipped += 1
        course.skipped_in_row += 1
        if self.config.on_nonfinite == "stop" or course.skipped_in_row >= 3 or course.skipped >= 10:
            raise GateError(
                f"step {course.step}: loss {total}, gradient norm {norm}: not finite ({course.skipped_in_row} in a row, "
                f"rows {rows[:8].tolist()}). Lower {self.job.stage}.learning_rate or lengthen the warm-up; "
                f"the newest state is in {self.job.folder}"
            )

    def _after_step(self, save: bool) -> None:
        course, config, runtime = self.course, self.config, self.job.runtime
        last = course.step == self.steps
        if course.step % runtime.logging_steps == 0 or last or course.step == 1:
            self._log()
        evaluate = course.step % config.eval_steps == 0 or last
        if evaluate:
            self._evaluate()
        if evaluate or save or course.step % runtime.save_steps == 0 or course.done:
            self._save()

    # -- numbers -------------------------------------------------------------------------------------------------------

    def _log(self) -> None:
        course = self.course
        if not course.window_steps:
            return
        nats = course.window_loss / max(1, course.window_targets)
        values: dict[str, float | int] = {
            "loss": nats,
            "bpb": course.window_loss / math.log(2) / max(1, course.window_bytes),
            "grad_norm": course.window_norm / course.window_steps,
            "lr": self.config.learning_rate * self.config.factor(course.step - 1, self.steps),
            "tokens": course.tokens,
            "skipped": course.skipped,
        }
        self.job.tracker.log(course.step, values)
        if course.step == 1:
            gates.first_loss(nats, self.plain, from_scratch=self.from_scratch)
        if course.step >= self.steps // 10 > 20:
            gates.falling(self.job.tracker.rows, self.steps, self.job.name)
        course.window_loss = course.window_norm = 0.0
        course.window_targets = course.window_bytes = course.window_steps = 0

    @torch.no_grad()
    def _evaluate(self) -> None:
        """Token-weighted loss over the fixed slice of the validation split; moves `best` and the anchor."""
        course, config = self.course, self.config
        self.model.train(False)
        sums = torch.zeros(3, dtype=torch.float64)  # nats, targets, bytes
        for number, batch in enumerate(self.stream.evaluation(config.eval_tokens)):
            if number % self.ranks.world != self.ranks.rank:
                continue
            with self.hardware.autocast():
                loss = self.loss(self.plain, batch.to(self.hardware.device))
            sums += torch.tensor([float(loss.terms[0].sum), batch.num_targets, batch.num_bytes], dtype=torch.float64)
        self.model.train(True)
        nats, targets, num_bytes = self.ranks.sum_tensor(sums).tolist()
        if not targets:
            return
        value = nats / targets
        if value < course.best:
            course.best, course.best_step = value, course.step
        if value < course.anchor - config.threshold:
            course.anchor, course.stale = value, 0
        else:
            course.stale += 1
        course.done = config.patience > 0 and course.stale >= config.patience
        bpb = nats / math.log(2) / max(1.0, num_bytes)
        self.job.tracker.log(course.step, {"val/loss": value, "val/bpb": bpb})

    # -- states --------------------------------------------------------------------------------------------------------

    def _save(self) -> None:
        self.last_save = time.monotonic()
        if self.ranks.rank == 0:
            meta = {**vars(self.course), "fingerprint": self.stream.fingerprint, "micro_batch": self.micro_batch,
                    "threads": torch.get_num_threads(), "precision": self.hardware.precision,
                    "world": self.ranks.world}  # fmt: skip
            states.save(self.job.folder, self.course.step, weights=weights_of(self.plain),
                        optimizer=self.optimizers.state_tensors(), meta=meta,
                        curve=self.job.tracker.rows)  # fmt: skip
            protect = [self.course.best_step] if self.config.publish == "best" else []
            states.retain(self.job.folder, keep=self.job.runtime.keep, protect=protect)
            self.job.tracker.flush()
        self.ranks.barrier()

    def _resume(self) -> None:
        state = states.newest(self.job.folder)
        if state is None:
            return
        if state.meta["fingerprint"] != self.stream.fingerprint:
            raise ConfigError(f"{state.folder}: was trained on other data; set runtime.fresh=true to start over")
        load_weights(self.plain, state.weights())
        self.optimizers.load_state_tensors(state.optimizer())
        self.course = Course(**{k: v for k, v in state.meta.items() if k in vars(self.course)})
        self.job.tracker.restore(state.curve)
        say(f"{self.job.name}: resumed at step {state.step} of {self.steps}")
        now = {"micro_batch": self.micro_batch, "threads": torch.get_num_threads(), "world": self.ranks.world,
               "precision": self.hardware.precision}  # fmt: skip
        changed = {k: (state.meta[k], v) for k, v in now.items() if state.meta[k] != v}
        if changed:
            say(f"{self.job.name}: not bit-exact with an uninterrupted run: changed {changed}")

    def _stop(self, number: int) -> None:
        self._save()
        say(f"{self.job.name}: stopped by signal {number} at step {self.course.step}; the same command resumes here")
        raise SystemExit(128 + number)

    def _publish(self) -> None:
        best = self.config.publish == "best" and self.course.best_step >= 0
        if best and self.course.best_step != self.course.step:
            load_weights(self.plain, states.weights_at(self.job.folder, self.course.best_step))
        rows = [row for row in self.job.tracker.rows if "loss" in row]
        published = self.course.best_step if best else self.course.step
        self.job.report(steps=self.course.step, tokens=self.course.tokens, published_step=published)
        if rows:
            self.job.report(final={"loss": rows[-1]["loss"], "bpb": rows[-1]["bpb"]})
        if math.isfinite(self.course.best):
            chosen = [r for r in self.job.tracker.rows if r["step"] == self.course.best_step and "val/bpb" in r]
            self.job.report(best={"val_loss": self.course.best, "step": self.course.best_step,
                                  "val_bpb": chosen[-1]["val/bpb"] if chosen else "not kept"})  # fmt: skip

    # -- before and around ---------------------------------------------------------------------------------------------

    def _micro_batch(self) -> int:
        """Rows of one forward pass: as asked, else the largest power of two that a quarter of the memory holds."""
        rows = -(-self.config.rows // self.ranks.world)
        if self.config.rows < self.ranks.world:
            raise ConfigError(
                f"{self.job.stage}: {self.config.rows} rows a step for {self.ranks.world} processes; raise tokens_per_step"
            )
        asked = self.job.runtime.micro_batch
        if asked != "auto":
            return min(int(asked), rows)
        bytes_per_row = self.config.context * gates.activation_bytes_per_token(self.plain)
        fitting = max(1, int(device.total_memory(self.hardware.device) / 4 / bytes_per_row))
        return min(rows, 2 ** int(math.log2(fitting)))

    def _check_before(self) -> None:
        rows = self.stream.rows(0, self.config.context)
        batch = self.stream.batch(0, self.config.context, rows[: self.micro_batch]).to(self.hardware.device)
        gates.trainable_tokens(batch, self.job.name)
        gates.causal(self.plain)
        self.ranks.check_equal_weights(self.plain)

    def _headline(self) -> str:
        size = sum(p.numel() for p in self.plain.parameters())
        precision = f"{self.hardware.device.type} {self.hardware.precision}"
        return (
            f"{self.job.name}: {size / 1e6:.2f} M parameters, {self.steps} steps of {self.config.tokens_per_step} tokens "
            f"({self.config.rows} rows of {self.config.context}, micro-batch {self.micro_batch}), {precision}, "
            f"{self.ranks.world} process{'es' if self.ranks.world > 1 else ''}"
        )

    def _speed(self, seconds: float, steps: int, targets: int) -> None:
        if not steps:
            return
        tokens = steps * self.config.tokens_per_step
        per_token: Any = getattr(self.plain, "flops_per_token", None)
        flops = tokens * per_token(self.config.context) if per_token else 0
        self.job.tracker.speed.update(
            tokens_per_second=tokens / seconds, targets_per_second=targets / seconds,
            samples_per_second=steps * self.config.rows / seconds, step_seconds=seconds / steps,
            gflops=flops / seconds / 1e9, memory_gb=device.peak_memory(self.hardware.device) / 1e9,
            **device.describe(self.job.runtime.precision),
        )  # fmt: skip
        say(f"{self.job.name}: {tokens / seconds:,.0f} tokens/s, {flops / seconds / 1e9:,.0f} GFLOP/s")


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters by name, each storage once (a tied head is the embedding)."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@torch.no_grad()
def load_weights(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Copy weights that `weights_of` gave back into the model; every name must match."""
    parameters = dict(model.named_parameters())
    assert parameters.keys() == weights.keys(), sorted(parameters.keys() ^ weights.keys())
    for name, parameter in parameters.items():
        parameter.copy_(weights[name])
