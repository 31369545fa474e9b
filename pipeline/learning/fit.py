"""The one training loop: a stream of batches, a loss, and everything that is common to all stages.

    fit(model, stream, loss, config, job)       trains in place; the model ends with the published weights

One step (specs: training, 1): a control reduce of stop request, save request and the terms' counts; per micro-batch
seed, forward, backward; global gradient norm; a verdict; clip; update. What a batch holds is a pure function of (seed,
step), so the state is weights, moments, one integer and the curve, and a killed run ends with the bits of an
uninterrupted one (CPU, same threads and world size). Not promised: equal bits across world sizes or devices (same data
order, loss within 1e-6). Beside it: `course.py` what is saved of a run, `keeping.py` when and where, `verdict.py` steps
that go wrong, `averages.py`, `scaling.py`, `compiling.py`, `profiling.py`, `lr_finder.py`, `speed.py` each what its
name says.

What the loop asks of a batch, a stream and a stage: the shapes that `fit` works with.

`Stream` is a stream of given data (streams/), `Rolling` one that the policy fills itself (rl/rollout.py).
"""

from __future__ import annotations

import contextlib
import copy
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from pipeline.learning import footprint, gates, lr_finder, performance, update
from pipeline.learning.losses import Loss
from pipeline.learning.optim import Optimizers
from pipeline.learning.performance import Profile
from pipeline.learning.processes import Ranks
from pipeline.learning.settings import TrainingConfig
from pipeline.learning.states import Keeper
from pipeline.learning.update import Averages, Course, Scaler, Totals, Window
from pipeline.run import device as run_device
from pipeline.run.errors import GateError
from pipeline.run.tracking import progress, say
from pipeline.run.workdir import Job


class Batch(Protocol):
    """What fit needs to know of a batch; the loss knows the rest."""

    @property
    def counts(self) -> dict[str, int]: ...  # what sums are divided by; always "tokens", the trained targets
    def to(self, device: torch.device) -> Any: ...


class Stream(Protocol):
    """Batches as a pure function of (seed, step); see batches/corpus.py."""

    fingerprint: str
    tokens_per_epoch: int

    def rows(self, step: int, context: int) -> np.ndarray: ...
    def batch(self, step: int, context: int, rows: np.ndarray) -> Any: ...
    def evaluation(self, tokens: int) -> Iterator[Any]: ...


class Rolling(Stream, Protocol):
    """A stream that the policy itself fills, once every `steps_per_rollout` steps; states are saved between fills
    only.
    """

    steps_per_rollout: int

    def fill(self, step: int) -> dict[str, float]:
        """Sample and score the answers of the next `steps_per_rollout` steps; what is to be logged of them."""
        ...

    def state(self) -> dict[str, Any]: ...
    def load_state(self, state: dict[str, Any]) -> None: ...


LossFunction = Callable[[Any, Any], Loss]  # of the model and a batch, whose types the stage knows
Values = dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Watchers:
    """What a stage looks at besides the loss. Each may raise GateError."""

    first: Callable[[Values], None] | None = None  # the first fill, loss and metrics, before an update
    evaluate: Callable[[int], Values] | None = None  # at step 0, every eval_steps, and at the end
    logged: Callable[[list[dict[str, Any]]], None] | None = None  # the curve, after each new row
    micro: Callable[[int, bool], None] | None = (
        None  # before each micro-batch of a step: its number, and whether it counts
    )
    gradients_at: int | None = 0  # the step whose gradients must reach every group; a zero head lets none through at 0


# -- fit ---------------------------------------------------------------------------------------------------------------


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
    """Train `model` in place and leave it with the best (or last) weights. After the `last` run of a stage rank 0 goes
    on alone.

    Raises ConfigError for a batch that cannot be formed or read, GateError when a health gate fails, SystemExit(128 +
    signal) when asked to stop (a state is saved first), SystemExit(0) after looking for a learning rate
    (`runtime.find_lr`).
    """
    run = Run(model, stream, loss, config, job, from_scratch, watchers or Watchers())
    try:
        if job.runtime.find_lr:
            lr_finder.look(run)
        run.go(last=last)
    finally:
        run.keeper.close()


class Run:
    """One call of fit: the pieces it works with, and the steps of the loop as methods."""

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
        self.rolling: Any = stream if hasattr(stream, "fill") else None
        self.hardware = run_device.hardware(job.runtime.precision)
        self.ranks = Ranks(job.runtime.precision, str(job.folder))
        config.check_context(model)
        self.steps = config.resolve_steps(stream.tokens_per_epoch)
        compiled = self._settle(model)
        self.plain = self.ranks.place(model, self.hardware.device)
        self.model = self.ranks.wrap(self.plain)
        self.optimizers = Optimizers(self.plain, config, fast_bf16=self.hardware.precision == "bf16")
        self.scaler = Scaler(self.hardware.precision, self.hardware.device)
        self.averages = Averages(self.plain, config.ema_decay) if config.ema_decay else None
        self.course, self.window = Course(), Window()
        self.last_save = time.monotonic()
        self.save_due = False
        self.seen = 0  # positions that this call has trained on, over all ranks
        self.postponed = False  # the gate on the first gradients met an overflow
        self.unfilled: dict[str, Any] | None = None  # the rolling stream's state before a fill, until its first update
        self.pin = run_device.pins(job.runtime.pin_memory, self.hardware.device)
        self.tried = footprint.of(self)  # sizes of micro-batches, of which the last one serves
        self.micro_batch = self.tried[-1]
        self.profile = Profile(job.runtime.profile, job.folder, self.ranks.rank, self.hardware.device)
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

    def _settle(self, model: nn.Module) -> bool:
        """Tell the model the settings of this run; returns whether its layers are compiled."""
        runtime, config = self.job.runtime, self.config
        if hasattr(model, "checkpointing"):
            model.checkpointing = runtime.gradient_checkpointing  # type: ignore[assignment]
        if config.dropout:
            model.dropout = config.dropout  # type: ignore[assignment]
        per_token: Any = getattr(model, "flops_per_token", None) if config.even_rows else None
        flops = self.steps * config.rows * config.row_length * per_token(config.row_length) if per_token else 0
        return performance.compiled(model, runtime.compile, flops=flops, hardware=self.hardware, name=self.job.name)

    def go(self, *, last: bool = True) -> None:
        """Resume or start, train to the end, load what is published."""
        self._resume()
        if self.course.step == 0 and not self.course.done:
            self._check_before()
        say(performance.headline(self))
        start, first, tokens = time.monotonic(), self.course.step, self.course.tokens
        with self.job.stop.heeded(), progress(total=self.steps, desc=self.job.name, unit="step", initial=first) as bar:
            if self.course.owes_evaluation:
                self._finish_step(evaluate=True)
            elif self.course.step == 0 and self.watchers.evaluate:
                self._evaluate()
            while self.course.step < self.steps and not self.course.done:
                with footprint.explained(self.job, self.config, self.course.step, self.tried):
                    self._one_step()
                self.profile.step()
                bar.update()
                if self.job.tracker.rows:
                    row = self.job.tracker.rows[-1]
                    bar.note(" ".join(f"{k} {row[k]:.3f}" for k in ("loss", "val/loss", "reward") if k in row))
        self.profile.stop()
        self.keeper.wait()
        performance.report(self, time.monotonic() - start, self.course.step - first, self.course.tokens - tokens)
        self._publish()
        self.ranks.finish(self.plain, self.hardware.device, last=last)

    # -- one step ------------------------------------------------------------------------------------------------------

    def batches(self, step: int, index: int) -> tuple[np.ndarray, list[Any]]:
        """The rows of the global batch number `index`, and this rank's micro-batches of them at `step`'s context."""
        length = self.config.context_at(step)
        rows = self.stream.rows(index, length)
        mine = rows[self.ranks.rank :: self.ranks.world]
        size = self.micro_batch * (self.config.row_length // length)
        return rows, [self.stream.batch(index, length, mine[at : at + size]) for at in range(0, len(mine), size)]

    def _one_step(self) -> None:
        course = self.course
        # 1. what this rank works on, and what all ranks know before the forward pass
        filled: dict[str, float] = {}
        if self.rolling and course.step % self.rolling.steps_per_rollout == 0:
            if stop := self.ranks.control(self.job.stop.signal, False, {})[0]:
                self._stop(stop)
            self.unfilled = copy.deepcopy(self.rolling.state())
            filled = self.rolling.fill(course.step)
            self.job.tracker.log(course.step, filled)
        rows, batches = self.batches(course.step, course.index)
        names = batches[0].counts if batches else {"tokens": 0}
        counts = {name: sum(b.counts[name] for b in batches) for name in names}
        elapsed = time.monotonic() - self.last_save > 60 * self.job.runtime.save_minutes and self.ranks.rank == 0
        stop, save, counts = self.ranks.control(self.job.stop.signal, elapsed, counts)
        if stop:
            self._stop(stop)
        # 2. forward and backward per micro-batch
        totals = self.backward(batches, counts)
        # 3. norm, verdict, update
        self.scaler.unscale(self.optimizers.optimizers)
        norm = self.ranks.gradient_norm(self.plain, self.config.max_grad_norm)
        totals.reduce(self.ranks)
        self._check_step(totals, norm, filled)
        if batches and not self._update(totals, norm, rows, batches):
            return  # rolled back: this step will be another one
        course.step += 1
        self.unfilled = None
        course.tokens += counts["tokens"]
        self.seen += counts.get("positions", counts["tokens"])
        self.window.add(totals, norm)
        # 4. log, evaluate, save
        self._after_step(save)

    def backward(self, batches: list[Any], counts: dict[str, int]) -> Totals:
        """Gradients of sum_k c_k S_k / G_k over all ranks; returns this rank's sums."""
        totals = Totals(counts)
        evened = self.ranks.evened(batches)
        for micro, (batch, mine) in enumerate(evened):
            run_device.seed_step(self.job.seed, self.course.index, micro, self.ranks.rank)
            if self.watchers.micro:
                self.watchers.micro(micro, mine)
            with self.ranks.no_sync(self.model, skip=micro < len(evened) - 1):
                with self.hardware.autocast():
                    loss = self.loss(self.model, run_device.move(batch, self.hardware.device, pin=self.pin))
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

    def _check_step(self, totals: Totals, norm: float, filled: dict[str, float]) -> None:
        """The gates of the first steps, before their update. A policy's first iterations may give nothing to learn
        from.
        """
        overflow = self.hardware.precision == "fp16" and not math.isfinite(norm)  # the scale is still being found
        if self.course.step == 0 and len(totals.terms) == 1:  # a sum of things has no ln V
            gates.first_loss(totals.values()["loss"], self.plain, from_scratch=self.from_scratch)
        due = self.postponed or self.course.step == self.watchers.gradients_at
        self.postponed = due and overflow
        if due and not overflow:
            gates.gradients(self.optimizers.members, self.plain)
        if self.course.tokens == 0 and self.watchers.first and totals.terms:
            self.watchers.first(filled | totals.values())

    def _update(self, totals: Totals, norm: float, rows: np.ndarray, batches: list[Any]) -> bool:
        """Apply the step's gradients, or do what the settings say about a step that went wrong; False after a
        rollback.
        """
        course, value = self.course, totals.value
        if risen := update.risen(course, value, self.config.on_spike):
            raise self._ended(value, norm, risen, rows)
        why = totals.veto or update.fault(course, value, norm, self.config.on_spike)
        spike = why != update.NOT_FINITE and not totals.veto
        left_out = course.spikes_at if spike else course.broken_at
        policy = self.config.on_spike if spike else self.config.on_nonfinite
        target = update.rollback_target(course) if why and policy == "rollback" else None
        back = target is not None and len(course.windows) < update.ROLLBACKS
        if not why or (spike and policy != "stop" and not back and update.too_many(left_out, course.step)):
            self.optimizers.step(self.config.factor(course.step, self.steps))
            self.scaler.update()
            update.applied(course, value, new_level=bool(why))
            if self.averages:
                self.averages.update()
            return True
        if self.scaler.update() and not math.isfinite(norm):  # fp16 overflowed: the next scale is smaller
            self.optimizers.zero_grad()
            return True
        bad = f" Not finite first: {update.blamed(self, batches)}." if why == update.NOT_FINITE else ""
        self.optimizers.zero_grad()
        if target is not None and back:
            self._roll_back(target, why)
            return False
        if policy == "stop" or (target is not None and not spike) or update.too_many(left_out, course.step):
            after = f", after {update.ROLLBACKS} rollbacks"
            after = after if target is not None else f" ({update.in_row(left_out, course.step)} in a row)"
            raise self._ended(value, norm, why + after, rows, bad)
        update.skipped(course, left_out)
        return True

    def _ended(self, loss: float, norm: float, why: str, rows: np.ndarray, more: str = "") -> GateError:
        """What is said of a run that must not go on."""
        return GateError(
            f"step {self.course.step}: loss {loss}, gradient norm {norm}: {why}; rows {rows[:8].tolist()}.{more} "
            f"Lower {self.job.stage}.learning_rate or lengthen the warm-up; the newest state is in {self.job.folder}"
        )

    def _roll_back(self, target: int, why: str) -> None:
        """Go on from the state after `target` steps, with other batches than those from there to here."""
        step, index, name = self.course.step, self.course.index, self.job.name
        say(f"{name}: step {step}: {why}; back to step {target}, without the batches from there to here")
        self.course, self.window, _ = self.keeper.load(target)
        update.give_up(self.course, step, index)
        self.keeper.forget_after(target)
        self._save()

    def _after_step(self, save: bool) -> None:
        course, runtime = self.course, self.job.runtime
        last = course.step == self.steps
        every = self.rolling.steps_per_rollout if self.rolling else runtime.logging_steps
        if course.step % every == 0 or last or course.step == 1:
            self._log()
        self.save_due |= save or course.step % runtime.save_steps == 0
        self._finish_step(evaluate=course.step % self.config.eval_steps == 0 or last)

    def _finish_step(self, *, evaluate: bool) -> None:
        """Evaluate and save. A signal during the evaluation leaves it to the resumed run."""
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
        values, factor = window.totals.values(), self.config.factor(course.step - 1, self.steps)
        run: dict[str, float | int] = {
            "grad_norm": window.norm / window.steps,
            "lr": self.config.learning_rate * factor,
            "tokens": course.tokens,
            "skipped": course.skipped,
        }
        if not self.rolling:
            run["epoch"] = self._passes(course.index)
        own = {
            f"lr/{group}": rate * factor for group, rate in self.optimizers.rates.items() if self.config.learning_rates
        }
        scale = {"loss_scale": self.scaler.scale_now} if self.hardware.precision == "fp16" else {}
        context = {"context": self.config.context_at(course.step - 1)} if self.config.curriculum else {}
        self.job.tracker.log(course.step, values | run | own | scale | context)
        if course.step >= self.steps // 10 > 20 and self.from_scratch:  # a continued model may be near its floor
            gates.falling(self.job.tracker.rows, self.steps, self.job.name)
        self.window = Window()
        if self.watchers.logged:
            self.watchers.logged(self.job.tracker.rows)

    def _passes(self, batches: int) -> float:
        """How often so many batches read the data."""
        return batches * self.config.rows * self.config.row_length / self.stream.tokens_per_epoch

    def _evaluate(self) -> None:
        """Loss over the fixed slice of the validation split, which moves `best` and the anchor; the stage's own
        numbers.

        Of the averaged weights where there are some. Exits when all ranks agree on a signal between two batches.
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
            values = totals.values()
            self.course.compare(values["loss"], threshold=self.config.threshold, patience=self.config.patience)
            self.job.tracker.log(self.course.step, {f"val/{name}": value for name, value in values.items()})

    def _held_out(self) -> tuple[Totals, int]:
        """The sums over the validation slice and all ranks, and the signal that cut it (0: none)."""
        totals = Totals({})
        for batch, mine in self.ranks.dealt(self.stream.evaluation(self.config.eval_tokens)):
            if stop := self.ranks.control(self.job.stop.signal, False, {})[0]:
                return totals, stop
            if batch is None:
                continue
            with self.hardware.autocast():
                part = Totals(batch.counts)
                part.add(self.loss(self.plain, batch.to(self.hardware.device)))
            if mine:
                totals.merge(part.settle())
        parts, totals = self.ranks.gather(totals), Totals({})  # a rank that had no batch knows no names
        for part in parts:
            totals.merge(part)
        return totals, 0

    # -- states --------------------------------------------------------------------------------------------------------

    def _save(self) -> None:
        self.last_save, self.save_due = time.monotonic(), False
        stream = self.unfilled or (self.rolling.state() if self.rolling else {})
        self.keeper.save(self.course, self.window, {"stream": stream, "scaler": self.scaler.state()})

    def _resume(self) -> None:
        found = self.keeper.resume()
        if found is None:
            return
        self.course, self.window, rest = found
        self.scaler.load_state(rest["scaler"])
        if self.rolling:
            self.rolling.load_state(rest["stream"])
        say(f"{self.job.name}: resumed at step {self.course.step} of {self.steps}")

    def _stop(self, number: int) -> None:
        if not self._inside_rollout():
            self._save()
        self.keeper.wait()
        where = "at the rollout before it" if self._inside_rollout() else "here"
        say(f"{self.job.name}: stopped by signal {number} at step {self.course.step}; the same command resumes {where}")
        raise SystemExit(128 + number)

    def _publish(self) -> None:
        best = self.config.publish == "best" and self.course.best_step >= 0
        if best and self.course.best_step != self.course.step:
            self.keeper.load_weights(self.course.best_step)
        elif self.averages:
            self.averages.load()
        published = self.course.best_step if best else self.course.step
        self.job.report(**self.course.results(self.job.tracker.rows, published))

    # -- before and around ---------------------------------------------------------------------------------------------

    def _check_before(self) -> None:
        if not self.rolling:  # what the policy fills is checked when it is full
            gates.repeated(self._passes(self.steps), self.plain, self.job.name)
            rows = self.stream.rows(0, self.config.row_length)
            self.ranks.check_different_rows(rows[self.ranks.rank :: self.ranks.world])
            batch = self.stream.batch(0, self.config.row_length, rows[: self.micro_batch])
            gates.trainable_tokens(batch.counts["tokens"], self.job.name)
        gates.causal(self.plain)
        self.ranks.check_equal_weights(self.plain)
