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
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pipeline import device
from pipeline.errors import ConfigError, GateError
from pipeline.learning import gates
from pipeline.learning.course import Course
from pipeline.learning.keeping import Keeper
from pipeline.learning.optim import Optimizers
from pipeline.learning.protocols import LossFunction, Stream, Watchers
from pipeline.learning.ranks import Ranks
from pipeline.learning.settings import TrainingConfig
from pipeline.learning.window import Totals, Window
from pipeline.tracking import progress, say
from pipeline.work import Job


def fit(
    model: nn.Module,
    stream: Stream,
    loss: LossFunction,
    config: TrainingConfig,
    job: Job,
    *,
    from_scratch: bool = False,
    watchers: Watchers | None = None,
) -> None:
    """Train `model` in place and leave it with the best (or last) weights.

    Raises ConfigError for a batch that cannot be formed or read, GateError when a health gate fails, SystemExit(128 + signal) when
    asked to stop (a state is saved first).
    """
    Run(model, stream, loss, config, job, from_scratch, watchers or Watchers()).go()


class Run:
    """One call of fit: the pieces it works with, and the steps of the loop as methods."""

    def __init__(
        self, model: nn.Module, stream: Stream, loss: LossFunction, config: TrainingConfig, job: Job,
        from_scratch: bool, watchers: Watchers,
    ) -> None:  # fmt: skip
        self.stream, self.loss, self.config, self.job = stream, loss, config, job
        self.from_scratch, self.watchers = from_scratch, watchers
        self.rolling: Any = stream if hasattr(stream, "fill") else None
        self.hardware = device.hardware(job.runtime.precision)
        self.ranks = Ranks(job.runtime.precision, str(job.folder))
        config.check_context(model)
        self.plain = self.ranks.place(model, self.hardware.device)
        self.model = self.ranks.wrap(self.plain)
        if hasattr(self.plain, "checkpointing"):
            self.plain.checkpointing = job.runtime.gradient_checkpointing  # type: ignore[assignment]
        self.optimizers = Optimizers(self.plain, config, fast_bf16=self.hardware.precision == "bf16")
        self.steps = config.resolve_steps(stream.tokens_per_epoch)
        self.course, self.window = Course(), Window()
        self.last_save = time.monotonic()
        self.save_due = False
        self.seen = 0  # positions that this call has trained on, over all ranks
        self.micro_batch = self._micro_batch()
        self.keeper = Keeper(job, self.ranks, self.plain, self.optimizers, stream.fingerprint,
                             config.publish == "best", {
            "micro_batch": self.micro_batch, "threads": torch.get_num_threads(), "world": self.ranks.world,
            "precision": self.hardware.precision})  # fmt: skip

    def go(self) -> None:
        """Resume or start, train to the end, load what is published."""
        self._resume()
        if self.course.step == 0 and not self.course.done:
            self._check_before()
        say(self._headline())
        start, first_step, tokens = time.monotonic(), self.course.step, self.course.tokens
        with progress(total=self.steps, desc=self.job.name, unit="step", initial=self.course.step) as bar:
            if self.course.step == 0 and self.watchers.evaluate:
                self._evaluate()
            while self.course.step < self.steps and not self.course.done:
                self._one_step()
                bar.update()
                if self.job.tracker.rows:
                    last = self.job.tracker.rows[-1]
                    bar.note(" ".join(f"{k} {last[k]:.3f}" for k in ("loss", "val/loss", "reward") if k in last))
        self._speed(time.monotonic() - start, self.course.step - first_step, self.course.tokens - tokens)
        self._publish()
        self.ranks.finish(self.plain, self.hardware.device)

    # -- one step ------------------------------------------------------------------------------------------------------

    def _one_step(self) -> None:
        course, length = self.course, self.config.row_length
        # 1. what this rank works on, and what all ranks know before the forward pass
        filled: dict[str, float] = {}
        if self.rolling and course.step % self.rolling.steps_per_rollout == 0:
            filled = self.rolling.fill(course.step)
            self.job.tracker.log(course.step, filled)
        rows = self.stream.rows(course.step, length)
        mine = rows[self.ranks.rank :: self.ranks.world]
        batches = [
            self.stream.batch(course.step, length, mine[first : first + self.micro_batch])
            for first in range(0, len(mine), self.micro_batch)
        ]
        names = batches[0].counts if batches else {"tokens": 0}
        counts = {name: sum(b.counts[name] for b in batches) for name in names}
        elapsed = time.monotonic() - self.last_save > 60 * self.job.runtime.save_minutes and self.ranks.rank == 0
        stop, save, counts = self.ranks.control(self.job.stop.signal, elapsed, counts)
        if stop:
            self._stop(stop)
        # 2. forward and backward per micro-batch
        totals = self._backward(batches, counts)
        # 3. norm, verdict, update
        norm = self.ranks.gradient_norm(self.plain, self.config.max_grad_norm)
        totals.reduce(self.ranks)
        self._check_step(totals, filled)
        if batches:
            self._update(totals, norm, rows)
        course.step += 1
        course.tokens += counts["tokens"]
        self.seen += counts.get("positions", counts["tokens"])
        self.window.add(totals, norm)
        # 4. log, evaluate, save
        self._after_step(save)

    def _backward(self, batches: list[Any], counts: dict[str, int]) -> Totals:
        """Gradients of sum_k c_k S_k / G_k over all ranks; returns this rank's sums."""
        totals = Totals(counts)
        evened = self.ranks.evened(batches)
        for micro, (batch, mine) in enumerate(evened):
            device.seed_step(self.job.seed, self.course.step, micro, self.ranks.rank)
            with self.ranks.no_sync(self.model, skip=micro < len(evened) - 1):
                with self.hardware.autocast():
                    loss = self.loss(self.model, batch.to(self.hardware.device))
                parts = [
                    t.coefficient * t.sum * (self.ranks.world / counts[t.per]) for t in loss.terms if counts[t.per]
                ]
                objective = sum(parts, start=loss.terms[0].sum * 0)  # a rank without targets still runs backward
                assert isinstance(objective, Tensor)
                (objective if mine else objective * 0).backward()
            if mine:
                totals.add(loss)
        return totals

    def _check_step(self, totals: Totals, filled: dict[str, float]) -> None:
        """The gates of the first steps, before their update. A policy's first iterations may give nothing to learn from."""
        if self.course.step == self.watchers.gradients_at:
            gates.gradients(self.optimizers.members, self.plain)
        if self.course.tokens == 0 and self.watchers.first and totals.terms:
            self.watchers.first(filled | totals.values())

    def _update(self, totals: Totals, norm: float, rows: np.ndarray) -> None:
        course, value = self.course, totals.value
        if math.isfinite(value) and math.isfinite(norm) and not totals.veto:
            self.optimizers.step(self.config.factor(course.step, self.steps))
            course.skipped_in_row = 0
            return
        self.optimizers.zero_grad()
        course.skipped += 1
        course.skipped_in_row += 1
        if self.config.on_nonfinite == "stop" or course.skipped_in_row >= 3 or course.skipped >= 10:
            why = totals.veto or "not finite"
            raise GateError(
                f"step {course.step}: loss {value}, gradient norm {norm}: {why} ({course.skipped_in_row} in a row, "
                f"rows {rows[:8].tolist()}). Lower {self.job.stage}.learning_rate or lengthen the warm-up; "
                f"the newest state is in {self.job.folder}"
            )

    def _after_step(self, save: bool) -> None:
        course, config, runtime = self.course, self.config, self.job.runtime
        last = course.step == self.steps
        between = not self.rolling or course.step % self.rolling.steps_per_rollout == 0
        every = self.rolling.steps_per_rollout if self.rolling else runtime.logging_steps
        if course.step % every == 0 or last or course.step == 1:
            self._log()
        evaluate = course.step % config.eval_steps == 0 or last
        if evaluate:
            self._evaluate()
        self.save_due |= evaluate or save or course.step % runtime.save_steps == 0 or course.done
        if self.save_due and between:
            self._save()

    # -- numbers -------------------------------------------------------------------------------------------------------

    def _log(self) -> None:
        course, window = self.course, self.window
        if not window.steps:
            return
        values = window.totals.values()
        run: dict[str, float | int] = {
            "grad_norm": window.norm / window.steps,
            "lr": self.config.learning_rate * self.config.factor(course.step - 1, self.steps),
            "tokens": course.tokens,
            "skipped": course.skipped,
        }
        self.job.tracker.log(course.step, values | run)
        if course.step == 1:
            gates.first_loss(values["loss"], self.plain, from_scratch=self.from_scratch)
        if course.step >= self.steps // 10 > 20 and not self.rolling:
            gates.falling(self.job.tracker.rows, self.steps, self.job.name)
        self.window = Window()
        if self.watchers.logged:
            self.watchers.logged(self.job.tracker.rows)

    @torch.no_grad()
    def _evaluate(self) -> None:
        """Loss over the fixed slice of the validation split, which moves `best` and the anchor; the stage's own numbers."""
        self.model.train(False)
        totals = Totals({})
        for batch, mine in self.ranks.dealt(self.stream.evaluation(self.config.eval_tokens)):
            with self.hardware.autocast():
                part = Totals(batch.counts)
                part.add(self.loss(self.plain, batch.to(self.hardware.device)))
            if mine:
                totals.merge(part)
        if self.watchers.evaluate:
            self.job.tracker.log(self.course.step, self.watchers.evaluate(self.course.step))
        self.model.train(True)
        parts, totals = self.ranks.gather(totals), Totals({})  # a rank that had no batch knows no names
        for part in parts:
            totals.merge(part)
        if totals.terms and self.course.step:
            values = totals.values()
            self.course.compare(values["loss"], threshold=self.config.threshold, patience=self.config.patience)
            self.job.tracker.log(self.course.step, {f"val/{name}": value for name, value in values.items()})

    # -- states --------------------------------------------------------------------------------------------------------

    def _save(self) -> None:
        self.last_save, self.save_due = time.monotonic(), False
        self.keeper.save(self.course, self.window, self.rolling.state() if self.rolling else {})

    def _resume(self) -> None:
        found = self.keeper.resume()
        if found is None:
            return
        self.course, self.window, stream = found
        if self.rolling:
            self.rolling.load_state(stream)
        say(f"{self.job.name}: resumed at step {self.course.step} of {self.steps}")

    def _stop(self, number: int) -> None:
        inside = self.rolling and self.course.step % self.rolling.steps_per_rollout
        if not inside:
            self._save()
        where = "at the rollout before it" if inside else "here"
        say(f"{self.job.name}: stopped by signal {number} at step {self.course.step}; the same command resumes {where}")
        raise SystemExit(128 + number)

    def _publish(self) -> None:
        best = self.config.publish == "best" and self.course.best_step >= 0
        if best and self.course.best_step != self.course.step:
            self.keeper.load_best(self.course)
        rows = [row for row in self.job.tracker.rows if "loss" in row]
        published = self.course.best_step if best else self.course.step
        self.job.report(steps=self.course.step, tokens=self.course.tokens, published_step=published)
        if rows:
            self.job.report(final={name: rows[-1][name] for name in ("loss", "bpb") if name in rows[-1]})
        if math.isfinite(self.course.best):
            chosen = [r for r in self.job.tracker.rows if r["step"] == self.course.best_step and "val/bpb" in r]
            best = {"val_loss": self.course.best, "step": self.course.best_step}
            self.job.report(best=best | ({"val_bpb": chosen[-1]["val/bpb"]} if chosen else {}))

    # -- before and around ---------------------------------------------------------------------------------------------

    def _micro_batch(self) -> int:
        """Rows of one forward pass: as asked, else the largest power of two that a quarter of the memory holds."""
        rows = -(-self.config.rows // self.ranks.world)
        if self.config.rows < self.ranks.world:
            raise ConfigError(
                f"{self.job.stage}: {self.config.rows} rows a step for {self.ranks.world} processes; make the batch larger"
            )
        asked = self.job.runtime.micro_batch
        if asked != "auto":
            return min(int(asked), rows)
        bytes_per_row = self.config.row_length * gates.activation_bytes_per_token(self.plain)
        fitting = max(1, int(device.total_memory(self.hardware.device) / 4 / bytes_per_row))
        return min(rows, 2 ** int(math.log2(fitting)))

    def _check_before(self) -> None:
        if not self.rolling:  # what the policy fills is checked when it is full
            rows = self.stream.rows(0, self.config.row_length)
            batch = self.stream.batch(0, self.config.row_length, rows[: self.micro_batch])
            gates.trainable_tokens(batch.counts["tokens"], self.job.name)
        gates.causal(self.plain)
        self.ranks.check_equal_weights(self.plain)

    def _headline(self) -> str:
        size = sum(p.numel() for p in self.plain.parameters())
        precision = f"{self.hardware.device.type} {self.hardware.precision}"
        return (
            f"{self.job.name}: {size / 1e6:.2f} M parameters, {self.steps} steps of {self.config.rows} rows of at most "
            f"{self.config.row_length} tokens (micro-batch {self.micro_batch}), {precision}, "
            f"{self.ranks.world} process{'es' if self.ranks.world > 1 else ''}"
        )

    def _speed(self, seconds: float, steps: int, targets: int) -> None:
        if not steps:
            return
        tokens = self.seen
        per_token: Any = getattr(self.plain, "flops_per_token", None)
        flops = tokens * per_token(self.config.row_length) if per_token else 0
        self.job.tracker.speed.update(
            tokens_per_second=tokens / seconds, targets_per_second=targets / seconds,
            samples_per_second=steps * self.config.rows / seconds, step_seconds=seconds / steps,
            gflops=flops / seconds / 1e9, memory_gb=device.peak_memory(self.hardware.device) / 1e9,
            **device.describe(self.job.runtime.precision),
        )  # fmt: skip
        say(f"{self.job.name}: {tokens / seconds:,.0f} tokens/s, {flops / seconds / 1e9:,.0f} GFLOP/s")
