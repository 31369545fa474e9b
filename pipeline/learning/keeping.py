"""What a run keeps on disk: its states, how many of them, which one it resumes from, and which weights it publishes.

`states.py` is the format on disk; here is what goes into it. All ranks call these methods together. Rank 0 writes, or each
rank its share of a model that is cut (FSDP2); rank 0 alone decides which state is the newest good one.
"""

import copy
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.errors import ConfigError
from pipeline.learning import states, verdict
from pipeline.learning.averages import Averages
from pipeline.learning.course import Course
from pipeline.learning.optim import Optimizers
from pipeline.learning.ranks import Ranks
from pipeline.learning.settings import TrainingConfig
from pipeline.learning.slices import Stored
from pipeline.learning.states import State
from pipeline.learning.window import Window
from pipeline.tracking import say
from pipeline.work import Job

AVERAGE = "average"  # `<parameter>/average` among the optimiser's states


class Keeper:
    """The states of one run. `settings` are facts of this process that a bit-exact resume needs unchanged."""

    def __init__(
        self, job: Job, ranks: Ranks, model: nn.Module, optimizers: Optimizers, averages: Averages | None,
        fingerprint: str, settings: dict[str, Any], config: TrainingConfig,
    ) -> None:  # fmt: skip
        self.job, self.ranks, self.model, self.optimizers, self.averages = job, ranks, model, optimizers, averages
        self.fingerprint, self.settings = fingerprint, settings
        self.publishes_best = config.publish == "best"
        self.rolls_back = "rollback" in (config.on_nonfinite, config.on_spike)
        if job.runtime.async_save and ranks.sharding:
            raise ConfigError(
                "runtime.async_save: a model that is cut (FSDP2) is written by all its processes together; set it to false"
            )
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="state")
        self._writing: Future[None] | None = None

    def save(self, course: Course, window: Window, rest: dict[str, Any]) -> None:
        """Write a state, then drop all but the `runtime.keep` newest, the best, and those that a rollback may load.

        With `runtime.async_save` a thread writes a copy; one at a time, so the next save waits for it, and so does the end.
        """
        self.wait()
        optimizer = self.optimizers.state_tensors()
        meta = {**vars(course), **self.settings, "window": window.state(), "fingerprint": self.fingerprint, **rest}
        if self.averages:
            optimizer |= {f"{name}/{AVERAGE}": value for name, value in self.averages.values.items()}
            meta["averaged"] = self.averages.updates
        tensors = {"weights": weights_of(self.model), "optimizer": optimizer}
        if not self.job.runtime.async_save:
            self._write(course.step, tensors, meta, self.job.tracker.rows, self._protected(course))
            self.job.tracker.flush()
        elif self.ranks.rank == 0:
            copies = {kind: {n: t.to("cpu", copy=True) for n, t in named.items()} for kind, named in tensors.items()}
            rows = copy.deepcopy(self.job.tracker.rows)
            self._writing = self._thread.submit(
                self._write, course.step, copies, copy.deepcopy(meta), rows, self._protected(course)
            )

    def _protected(self, course: Course) -> list[int]:
        """Steps whose states outlive retention."""
        targets = verdict.rollback_targets(course) if self.rolls_back else []
        best = (
            [course.best_step, *(verdict.best_before(course, step) for step in targets)] if self.publishes_best else []
        )
        return best + targets

    def _write(
        self,
        step: int,
        tensors: dict[str, dict[str, Tensor]],
        meta: dict[str, Any],
        rows: list[Any],
        protect: list[int],
    ) -> None:
        """One state on disk. In a thread rank 0 is alone, and no rank waits for another."""
        ranks, folder = self.ranks, self.job.folder
        first, alone = ranks.rank == 0, self.job.runtime.async_save
        part = states.begin(folder, step, tensors) if first else states.part_of(folder, step)
        if not alone:
            ranks.barrier()
        files = states.write(part, tensors, ranks.rank, ranks.world) if first or ranks.sharding else {}
        written = [files] if alone else ranks.gather(files)
        if first:
            files = {name: facts for share in written for name, facts in share.items()}
            states.complete(part, step, files, meta=meta, curve=rows)
            states.retain(folder, keep=self.job.runtime.keep, protect=protect)
        if not alone:
            ranks.barrier()

    def wait(self) -> None:
        """Until what is being written is on disk. Raises what the writing raised."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()
            self.job.tracker.flush()
        if self.job.runtime.async_save:
            self.ranks.barrier()

    def close(self) -> None:
        """End the thread, after what it is writing; also when the run has failed."""
        self._thread.shutdown(wait=True)

    def resume(self) -> tuple[Course, Window, dict[str, Any]] | None:
        """Put the newest whole state into model, optimisers, averages and tracker; returns the rest of it, None without one.

        Raises ConfigError for a state of other data, or one that not all ranks see.
        """
        state = self._newest()
        if state is None:
            return None
        if state.meta["fingerprint"] != self.fingerprint:
            raise ConfigError(f"{state.folder}: was trained on other data; set runtime.fresh=true to start over")
        changed = {k: (state.meta.get(k), v) for k, v in self.settings.items() if state.meta.get(k) != v}
        if changed:
            say(f"{self.job.name}: not bit-exact with an uninterrupted run: changed {changed}")
        return self._take(state)

    def _newest(self) -> State | None:
        """The newest good state, the same one on all ranks: hashes are read once."""
        found = None
        if self.ranks.rank == 0:
            found = states.newest(self.job.folder)
            last = found.step if found else -1
            states.drop_after(self.job.folder, last)  # damaged ones: they would count as the newest
        step = self.ranks.gather(found and found.step)[0]
        if step is None or found is not None:
            return found
        try:
            return states.opened(self.job.folder / states.name_of(step))
        except OSError as error:
            raise ConfigError(
                f"rank {self.ranks.rank} does not see {self.job.folder / states.name_of(step)}, which rank 0 goes on from: "
                "expected the work directory (STAGECOACH_WORK) on a file system that all machines share"
            ) from error

    def load(self, step: int) -> tuple[Course, Window, dict[str, Any]]:
        """As `resume`, from the state after `step` batches."""
        self.wait()
        self.job.tracker.back_to(step)
        return self._take(states.at(self.job.folder, step))

    def _take(self, state: State) -> tuple[Course, Window, dict[str, Any]]:
        load_weights(self.model, state.weights())
        moments, averages = self._moments(state)
        self.optimizers.load_state_tensors(moments)
        if self.averages:
            self.averages.restore(averages, state.meta["averaged"])
        self.job.tracker.restore(state.curve)
        known = {k: v for k, v in state.meta.items() if k in vars(Course())}
        return Course(**known), Window.of(state.meta["window"]), state.meta

    def _moments(self, state: State) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The optimiser's states, and the averaged weights by their names: of each what this rank holds of the parameter."""
        stored, parameters = state.optimizer(), dict(self.model.named_parameters())
        tensors = {name: stored.like(name, parameters[name.rpartition("/")[0]]) for name in sorted(stored.names())}
        end = f"/{AVERAGE}"
        averages = {name.removesuffix(end): tensor for name, tensor in tensors.items() if name.endswith(end)}
        return {name: tensor for name, tensor in tensors.items() if not name.endswith(end)}, averages

    def forget_after(self, step: int) -> None:
        """Drop the states of later steps: a rollback has made them void."""
        self.wait()
        self.ranks.barrier()
        if self.ranks.rank == 0:
            states.drop_after(self.job.folder, step)
        self.ranks.barrier()

    def load_weights(self, step: int) -> None:
        """Load the weights of that step's state into the model, averaged ones where there are some."""
        self.wait()
        state = states.at(self.job.folder, step, remedy="the best weights are lost: publish the last ones "
                          f"({self.job.stage}.publish=last), or start over (runtime.fresh=true)")  # fmt: skip
        if self.averages:
            self.averages.restore(self._moments(state)[1], self.averages.updates)
            self.averages.load()
        else:
            load_weights(self.model, state.weights())


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters by name, each storage once (a tied head is the embedding)."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@torch.no_grad()
def load_weights(model: nn.Module, weights: Stored) -> None:
    """Copy the weights of a state back into the model, each rank the rows that it holds; every name must match."""
    parameters = dict(model.named_parameters())
    assert parameters.keys() == weights.names(), sorted(parameters.keys() ^ weights.names())
    for name, parameter in parameters.items():
        parameter.copy_(weights.like(name, parameter))
