"""The training loop shared by all stages.

    fit(model, stream, loss, config, job)       trains in place; the model ends up with the published weights

In each step, all ranks first agree on whether to stop or save and on the loss denominators. Each micro-batch is seeded
and goes through a forward and a backward pass. Then come the global gradient norm, a check for spikes and non-finite
values, clipping and the update. A batch is a pure function of (seed, step), so a checkpoint consists of the weights,
moments, step, curve, fp16 scaler and stream state, without random state. A killed and resumed run is bitwise identical
to an uninterrupted one (CPU, same threads and world size).

Related modules: `update.py` decides whether to apply an update, `states.py` saves and resumes, `processes.py` handles
communication between ranks, and `performance.py` covers everything else: micro-batch size, compilation, profiling,
speed and the learning-rate finder.

Not guaranteed: bitwise equality across world sizes or devices (the data order is the same; the loss agrees to 1e-6).
"""

from __future__ import annotations

import contextlib
import copy
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

import numpy as np
import torch
from torch import Tensor, nn

from pipeline.learning import gates, update
from pipeline.learning.optim import Optimizers
from pipeline.learning.performance import Instruments, find_learning_rate, prepared
from pipeline.learning.processes import Ranks
from pipeline.learning.protocols import Batch, LossFunction, Rolling, Stream
from pipeline.learning.settings import TrainingConfig
from pipeline.learning.states import Keeper
from pipeline.learning.update import Averages, Course, LoggingWindow, Scaler, Totals
from pipeline.run import device
from pipeline.run.errors import GateError, SamplerError
from pipeline.run.tracking import progress, say
from pipeline.run.types import JsonObject
from pipeline.run.workdir import Job, remove


@dataclass(frozen=True, kw_only=True)
class Watchers:
    """A stage's callbacks for measurements and checks during training. Each may raise GateError."""

    step: Callable[[int], None] | None = None  # before each step, with the number of steps so far
    # before the passes: (model, this rank's micro-batches, ranks) -> micro-batches with per-step values for the loss
    complete: Callable[..., Sequence[Batch]] | None = None
    first: Callable[[dict[str, float]], None] | None = None  # gets the first step's loss and metrics before any update
    evaluate: Callable[[int], dict[str, float]] | None = None  # at step 0, every eval_steps, and at the end
    logged: Callable[[list[JsonObject]], None] | None = None  # gets the curve after each new row
    micro: Callable[[int, bool], None] | None = None  # before each micro-batch, with its index and whether it counts
    save: Callable[[Path], None] | None = None  # writes the current model, for runtime.keep_models
    new_level_at: int | None = None  # the batch where the data changes: earlier losses are not comparable
    gradients_at: int | None = 0  # the step at which each group must get a gradient; a zero head prevents it at step 0


def fit(
    model: nn.Module,
    stream: Stream,
    loss: LossFunction,
    config: TrainingConfig,
    job: Job,
    *,
    from_scratch: bool = False,
    watchers: Watchers | None = None,
    last: bool = True,
) -> None:
    """Train `model` in place, ending with the best (or last) weights.

    After a stage's `last` run only rank 0 returns. Raises ConfigError for a batch that cannot be formed or read,
    GateError when a health gate fails, SystemExit(128 + signal) after a stop request (a checkpoint is saved first),
    and SystemExit(0) after the learning-rate finder (`runtime.find_lr`).
    """
    run = Run(model, stream, loss, config, job, from_scratch, watchers or Watchers())
    try:
        if job.runtime.find_lr:
            find_learning_rate(run)
        run.go(last=last)
    finally:
        run.keeper.close()


class Run:
    """One call to `fit`: its parts, and the steps of the loop as methods."""

    def __init__(
        self,
        model: nn.Module,
        stream: Stream,
        loss: LossFunction,
        config: TrainingConfig,
        job: Job,
        from_scratch: bool,
        watchers: Watchers,
    ) -> None:
        self.stream, self.loss, self.config, self.job = stream, loss, config, job
        self.from_scratch, self.watchers = from_scratch, watchers
        self.rolling: Rolling | None = stream if _is_rolling(stream) else None
        self.hardware = device.hardware(job.runtime.precision)
        self.ranks = Ranks(job.runtime.precision, str(job.folder))
        config.check_context(model)
        self.steps = config.resolve_steps(stream.tokens_per_epoch)
        free = min(
            config.free_steps(self.steps), self.steps if watchers.new_level_at is None else watchers.new_level_at
        )
        self.free = free - free % self.rolling.steps_per_rollout if self.rolling else free
        compiled = prepared(model, job, config, self.steps, self.hardware)
        self.plain = self.ranks.place(model, self.hardware.device)
        self.model = self.ranks.wrap(self.plain)
        self.optimizers = Optimizers(self.plain, config, fast_bf16=self.hardware.precision == "bf16")
        self.scaler = Scaler(self.hardware.precision, self.hardware.device)
        decay = config.validated.ema_decay
        self.averages = Averages(self.plain, decay) if decay else None
        self.course, self.window = Course(), LoggingWindow()
        self.last_save = time.monotonic()
        self.save_due, self.saved_step = False, 0
        self.seen = 0  # positions trained on in this call to fit, over all ranks
        self.postponed = False  # the first-gradient gate is deferred because of an fp16 overflow
        self.unfilled: JsonObject | None = None  # the rolling stream's state before a fill; None after an update
        self.pin = device.pins(job.runtime.pin_memory, self.hardware.device)
        self.instruments = Instruments(self)
        self.micro_batch = self.instruments.micro_batch
        self.keeper = Keeper(
            job,
            self.ranks,
            self.plain,
            self.optimizers,
            self.averages,
            stream.fingerprint,
            {
                "micro_batch": self.micro_batch,
                "threads": torch.get_num_threads(),
                "world": self.ranks.world,
                "precision": self.hardware.precision,
                "compile": compiled,
            },
            config,
        )
        self.keeper.free = self.free if job.family else 0
        if job.runtime.keep_models and (watchers.save is None or self.ranks.sharding):
            why = "shards its model (FSDP2)" if self.ranks.sharding else "writes a model only at the end"
            say(f"warning: runtime.keep_models is ignored because stage_{job.stage} {why}")
        elif late := [step for step in job.runtime.keep_models if step > self.steps]:
            say(
                f"warning: runtime.keep_models: stage_{job.stage} has {self.steps} steps, so"
                f" step {late[0]} is never reached"
            )

    def go(self, *, last: bool = True) -> None:
        """Resume or start, train to the end, and load the weights to publish."""
        self._resume()
        if self.course.step == 0 and not self.course.done:
            self._check_start()
        first = self.course.step
        self.instruments.begin(first, self.course.tokens)
        with self.job.stop.heeded(), progress(total=self.steps, desc=self.job.name, unit="step", initial=first) as bar:
            if self.course.owes_evaluation:
                self._finish_step(evaluate=True)
            elif self.course.step == 0 and self.watchers.evaluate:
                self._evaluate()
            while self.course.step < self.steps and not self.course.done:
                with self.instruments.step(self.course.step):
                    self._one_step()
                bar.update()
                if self.job.tracker.rows:
                    row = self.job.tracker.rows[-1]
                    shown = [f"{k} {row[k]:.3f}" for k in ("loss", "val/loss", "reward") if k in row]
                    if rate := self.instruments.tokens_per_second:
                        shown.append(f"{rate:,.0f} tokens/s")
                    bar.note(", ".join(shown))
        self.keeper.wait()
        self.keeper.keep_for_longer_runs(self.course)
        self.instruments.end(self.course.step, self.course.tokens)
        self._publish()
        self.ranks.finish(self.plain, self.hardware.device, last=last)

    def _check_start(self) -> None:
        if not self.rolling:  # a stream filled by the policy is checked once it is full
            gates.repeated(self._epochs(self.steps), self.plain, self.job.name)
            rows = self.stream.rows(0, self.config.row_length)
            self.ranks.check_different_rows(rows[self.ranks.rank :: self.ranks.world])
            batch = self.stream.batch(0, self.config.row_length, rows[: self.micro_batch])
            gates.trainable_tokens(batch.counts["tokens"], self.job.name)
        gates.causal(self.plain)
        self.ranks.check_equal_weights(self.plain)

    # -- one step ------------------------------------------------------------------------------------------------------

    def batches(self, step: int, index: int) -> tuple[np.ndarray, list[Batch]]:
        """The rows of global batch `index`, and this rank's micro-batches of them at the context length of `step`."""
        length = self.config.context_at(step)
        rows = self.stream.rows(index, length)
        mine = rows[self.ranks.rank :: self.ranks.world]
        size = self.micro_batch * (self.config.row_length // length)
        return rows, [
            self.stream.batch(index, length, mine[first : first + size]) for first in range(0, len(mine), size)
        ]

    def _one_step(self) -> None:
        course = self.course
        if self.watchers.step:
            self.watchers.step(course.step)
        # 1. take this rank's micro-batches; all ranks agree on stopping, saving and counts
        fill_metrics: dict[str, float] = {}
        if self.rolling and course.step % self.rolling.steps_per_rollout == 0:
            if stop := self.ranks.control(self.job.stop.signal, False, {})[0]:
                self._stop(stop)
            self.unfilled = copy.deepcopy(self.rolling.state())
            try:
                fill_metrics = self.rolling.fill(course.step)
            except SamplerError:  # raised on all ranks
                self._save()
                self.keeper.wait()
                raise
            self.job.tracker.log(course.step, fill_metrics)
        rows, batches = self.batches(course.step, course.index)
        names = batches[0].counts if batches else {"tokens": 0}
        counts = {name: sum(b.counts[name] for b in batches) for name in names}
        overdue = time.monotonic() - self.last_save > 60 * self.job.runtime.save_minutes and self.ranks.rank == 0
        stop, save, counts = self.ranks.control(self.job.stop.signal, overdue, counts)
        if stop:
            self._stop(stop)
        # 2. forward and backward per micro-batch
        totals = self.backward(batches, counts)
        # 3. norm, checks, update
        self.scaler.unscale(self.optimizers.optimizers)
        norm = self.ranks.gradient_norm(self.plain, self.config.max_grad_norm)
        totals.reduce(self.ranks)
        self._check_step(totals, norm, fill_metrics)
        if batches and not self._update(totals, norm, rows, batches):
            return  # rolled back: training resumes at an earlier step
        course.step += 1
        self.unfilled = None
        course.tokens += counts["tokens"]
        self.seen += counts.get("positions", counts["tokens"])
        self.window.add(totals, norm)
        # 4. log, evaluate, save
        self._after_step(save)

    def backward(self, batches: list[Batch], counts: dict[str, int]) -> Totals:
        """Accumulate gradients of sum_k c_k S_k / G_k over all ranks. Returns this rank's sums."""
        if self.watchers.complete:
            with self.hardware.autocast():
                batches = list(self.watchers.complete(self.plain, batches, self.ranks))
        totals = Totals(counts)
        passes = self.ranks.evened(batches)
        for micro, (batch, mine) in enumerate(passes):
            self._seed(micro)
            if self.watchers.micro:
                self.watchers.micro(micro, mine)
            with self.ranks.no_sync(self.model, skip=micro < len(passes) - 1):
                with self.hardware.autocast():
                    loss = self.loss(self.model, device.move(batch, self.hardware.device, pin=self.pin))
                parts = [
                    t.coefficient * t.sum * (self.ranks.world / counts[t.per]) for t in loss.terms if counts[t.per]
                ]
                objective = sum(parts, start=loss.terms[0].sum * 0)  # a rank without targets still runs backward
                assert isinstance(objective, Tensor)
                self.scaler.scale(objective if mine else objective * 0).backward()
            if mine:
                totals.add(loss)
        totals.settle()
        return totals

    def _seed(self, micro: int) -> None:
        """Seed the generators for a micro-batch of this step and rank."""
        device.seed_step(self.job.seed, self.course.index, micro, self.ranks.rank)

    def _check_step(self, totals: Totals, norm: float, fill_metrics: dict[str, float]) -> None:
        """Run the first-step gates before the update. A policy's first iterations may have no loss terms."""
        overflow = self.hardware.precision == "fp16" and not math.isfinite(norm)  # the loss scale is still adapting
        if self.course.step == 0 and len(totals.terms) == 1:  # a sum of several terms need not start at ln V
            gates.first_loss(totals.values()["loss"], self.plain, from_scratch=self.from_scratch)
        due = self.postponed or self.course.step == self.watchers.gradients_at
        self.postponed = due and overflow
        if due and not overflow:
            gates.gradients(self.optimizers.members, self.plain)
        if self.course.tokens == 0 and self.watchers.first and totals.terms:
            self.watchers.first(fill_metrics | totals.values())

    def _update(self, totals: Totals, norm: float, rows: np.ndarray, batches: list[Batch]) -> bool:
        """Apply the step's gradients, or handle a faulty step as configured. Returns False after a rollback."""
        course, value = self.course, totals.value
        if self.watchers.new_level_at is not None and course.index >= self.watchers.new_level_at:
            update.new_level(course)
        if reason := update.risen(course, value, self.config.on_spike):
            raise self._failure(value, norm, reason, rows)
        fault = totals.veto or update.fault(course, value, norm, self.config.on_spike)
        spike = fault != update.NOT_FINITE and not totals.veto
        skipped_steps = course.spikes_at if spike else course.broken_at  # those skipped for the same reason
        action = self.config.on_spike if spike else self.config.on_nonfinite
        target = update.rollback_target(course) if fault and action == "rollback" else None
        may_roll_back = target is not None and len(course.windows) < update.ROLLBACKS
        new_level = spike and action != "stop" and not may_roll_back and update.too_many(skipped_steps, course.step)
        if not fault or new_level:
            self.optimizers.step(self.config.factor(course.step, self.steps))
            self.scaler.update()
            update.applied(course, value, new_level=bool(fault))
            if self.averages:
                self.averages.update()
            return True
        if self.scaler.update() and not math.isfinite(norm):  # fp16 overflowed: the next scale is smaller
            self.optimizers.zero_grad()
            return True
        origin = f" First non-finite value: {self._first_not_finite(batches)}." if fault == update.NOT_FINITE else ""
        self.optimizers.zero_grad()
        if target is not None and may_roll_back:
            self._roll_back(target, fault)
            return False
        if action == "stop" or (target is not None and not spike) or update.too_many(skipped_steps, course.step):
            in_row = f" ({update.in_row(skipped_steps, course.step)} in a row)"
            history = in_row if target is None else f", after {update.ROLLBACKS} rollbacks"
            raise self._failure(value, norm, fault + history, rows, origin)
        update.skipped(course, skipped_steps)
        return True

    def _failure(self, loss: float, norm: float, reason: str, rows: np.ndarray, origin: str = "") -> GateError:
        """The error that ends the run."""
        return GateError(
            f"step {self.course.step}: loss {loss}, gradient norm {norm}: {reason}; rows {rows[:8].tolist()}.{origin} "
            f"Lower {self.job.stage}.learning_rate or use a longer warmup; latest checkpoint: {self.job.folder}"
        )

    def _first_not_finite(self, batches: list[Batch]) -> str:
        """This step's first non-finite module output, or else gradient, on the first rank that has one."""

        def forward() -> None:
            for micro, (batch, _) in enumerate(self.ranks.evened(batches)):
                self._seed(micro)
                with torch.no_grad(), self.hardware.autocast():
                    self.loss(self.plain, batch.to(self.hardware.device))

        culprits = self.ranks.gather(update.culprit(self.plain, forward))
        return next((name for name in culprits if name != update.NOTHING), culprits[0])

    def _roll_back(self, target: int, fault: str) -> None:
        """Resume from the checkpoint at step `target` and skip the batches since then."""
        step, index, name = self.course.step, self.course.index, self.job.name
        say(f"{name}: step {step}: {fault}; rolling back to step {target} and skipping the batches since then")
        self.course, self.window, _ = self.keeper.load(target)
        update.give_up(self.course, step, index)
        self.keeper.forget_after(target)
        self._save()

    def _after_step(self, save: bool) -> None:
        course, runtime = self.course, self.job.runtime
        last = course.step == self.steps
        every = self.rolling.steps_per_rollout if self.rolling else runtime.logging_steps
        logged = course.step % every == 0 or last or course.step == 1
        if logged:
            self._log()
        self.save_due |= save or course.step % runtime.save_steps == 0 or course.step == self.free
        if course.step in runtime.keep_models and not self.ranks.sharding:
            self._keep_model()
        self._finish_step(evaluate=course.step % self.config.eval_steps == 0 or last)
        if logged:
            self.job.tracker.beat(self.instruments.live(course.step))

    def _finish_step(self, *, evaluate: bool) -> None:
        """Evaluate and save. If a signal interrupts the evaluation, the resumed run repeats it."""
        course = self.course
        if evaluate:
            course.owes_evaluation = True
            self._evaluate()
            course.owes_evaluation = False
            course.evaluated = [*course.evaluated, course.step]
        self.save_due |= evaluate or course.done
        if self.save_due and not self._inside_rollout():
            self._save()

    def _inside_rollout(self) -> bool:
        return bool(self.rolling and self.course.step % self.rolling.steps_per_rollout)

    # -- numbers -------------------------------------------------------------------------------------------------------

    def _log(self) -> None:
        course, window = self.course, self.window
        if not window.steps:
            return
        factor = self.config.factor(course.step - 1, self.steps)
        values: dict[str, float | int] = {
            **window.totals.values(),
            "grad_norm": window.norm / window.steps,
            "lr": self.config.learning_rate * factor,
            "tokens": course.tokens,
            "skipped": course.skipped,
        }
        if not self.rolling:
            values["epoch"] = self._epochs(course.index)
        if self.config.learning_rates:
            values |= {f"lr/{group}": rate * factor for group, rate in self.optimizers.rates.items()}
        if self.hardware.precision == "fp16":
            values["loss_scale"] = self.scaler.scale_now
        if self.config.context_at(0) < self.config.row_length:  # the context grows
            values["context"] = self.config.context_at(course.step - 1)
        self.job.tracker.log(course.step, values)
        if course.step >= self.steps // 10 > 20 and self.from_scratch:  # a pretrained model may be near its minimum
            gates.falling(self.job.tracker.rows, self.steps, self.job.name)
        self.window = LoggingWindow()
        if self.watchers.logged:
            self.watchers.logged(self.job.tracker.rows)

    def _epochs(self, batches: int) -> float:
        """The number of epochs in `batches` batches."""
        return batches * self.config.rows * self.config.row_length / self.stream.tokens_per_epoch

    def _evaluate(self) -> None:
        """Compute the validation loss on a fixed slice and the stage's metrics. Updates `best` and the anchor.

        Evaluates the averaged weights if there are any. On a stop signal, all ranks exit between two batches.
        """
        self.model.train(False)
        with torch.no_grad(), self.averages.in_place() if self.averages else contextlib.nullcontext():
            totals, stop = self._held_out()
            if not stop and self.watchers.evaluate:
                self.job.tracker.log(self.course.step, self.watchers.evaluate(self.course.step))
        self.model.train(True)
        if stop:
            self._stop(stop)
        if totals.terms and self.course.step:
            values, settings = totals.values(), self.config.validated
            self.course.compare(values["loss"], threshold=settings.threshold, patience=settings.patience)
            self.job.tracker.log(self.course.step, {f"val/{name}": value for name, value in values.items()})

    def _held_out(self) -> tuple[Totals, int]:
        """The validation slice's sums over all ranks, and the signal that interrupted the evaluation (0: none)."""
        totals = Totals({})
        for batch, mine in self.ranks.dealt(self.stream.evaluation(self.config.validated.eval_tokens)):
            if stop := self.ranks.control(self.job.stop.signal, False, {})[0]:
                return totals, stop
            if batch is None:
                continue
            with self.hardware.autocast():
                batch_totals = Totals(batch.counts)
                batch_totals.add(self.loss(self.plain, batch.to(self.hardware.device)))
            if mine:
                totals.merge(batch_totals.settle())
        all_totals = Totals({})
        for rank_totals in self.ranks.gather(totals):  # not `reduce`: a rank without a batch has no names
            all_totals.merge(rank_totals)
        return all_totals, 0

    # -- states --------------------------------------------------------------------------------------------------------

    def _save(self) -> None:
        self.last_save, self.save_due, self.saved_step = time.monotonic(), False, self.course.step
        stream = self.unfilled or (self.rolling.state() if self.rolling else {})
        self.keeper.save(self.course, self.window, {"stream": stream, "scaler": self.scaler.state()})

    def _keep_model(self) -> None:
        """Write the model at this step next to the stage's own model, with averaged weights if there are any."""
        if self.ranks.rank == 0 and self.watchers.save:
            name = f"{self.job.name.replace('@', '_')}-{self.course.step}"
            target = self.job.folder / "out/models" / name
            part = target.with_name(f".{name}.part")
            remove(part)
            with self.averages.in_place() if self.averages else contextlib.nullcontext():
                self.watchers.save(part)
            remove(target)
            part.rename(target)
            say(f"{self.job.name}: saved models/{name}")
        self.ranks.barrier()

    def _resume(self) -> None:
        state = self.keeper.resume()
        if state is None:
            return
        self.course, self.window, rest = state
        self.saved_step = self.course.step
        self.scaler.load_state(rest["scaler"])
        if self.rolling:
            self.rolling.load_state(rest["stream"])
        say(f"{self.job.name}: resumed at step {self.course.step} of {self.steps}")

    def _stop(self, number: int) -> None:
        if not self._inside_rollout():
            self._save()
        self.keeper.wait()
        say(
            f"{self.job.name}: stopped by signal {number} at step {self.course.step}; rerun the same command to resume"
            f" at step {self.saved_step}"
        )
        raise SystemExit(128 + number)

    def _publish(self) -> None:
        best = self.config.validated.publish == "best" and self.course.best_step >= 0
        if best and self.course.best_step != self.course.step:
            self.keeper.load_weights(self.course.best_step)
        elif self.averages:
            self.averages.load()
        published = self.course.best_step if best else self.course.step
        self.job.report(**self.course.results(self.job.tracker.rows, published))


def _is_rolling(stream: Stream) -> TypeGuard[Rolling]:
    return hasattr(stream, "fill")
