"""What a run keeps on disk: its states, how many of them, which one it resumes from, and which weights it publishes.

`states.py` is the format on disk; here is what goes into it. All ranks call these methods together; rank 0 writes.
"""

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

    def save(self, course: Course, window: Window, rest: dict[str, Any]) -> None:
        """Write a state, then drop all but the `runtime.keep` newest, the best, and those that a rollback may load."""
        if self.ranks.rank == 0:
            meta = {**vars(course), **self.settings, "window": window.state(), "fingerprint": self.fingerprint, **rest}
            optimizer = self.optimizers.state_tensors()
            if self.averages:
                meta["averaged"] = self.averages.updates
                optimizer |= {f"{name}/{AVERAGE}": value for name, value in self.averages.values.items()}
            states.save(self.job.folder, course.step, weights=weights_of(self.model), optimizer=optimizer, meta=meta,
                        curve=self.job.tracker.rows)  # fmt: skip
            protect = [course.best_step] if self.publishes_best else []
            protect += verdict.rollback_targets(course) if self.rolls_back else []
            states.retain(self.job.folder, keep=self.job.runtime.keep, protect=protect)
            self.job.tracker.flush()
        self.ranks.barrier()

    def wait(self) -> None:
        """Until what is being written is on disk."""

    def resume(self) -> tuple[Course, Window, dict[str, Any]] | None:
        """Put the newest whole state into model, optimisers, averages and tracker; returns the rest of it, None without one.

        Raises ConfigError for a state of other data.
        """
        state = states.newest(self.job.folder)
        if state is None:
            return None
        if state.meta["fingerprint"] != self.fingerprint:
            raise ConfigError(f"{state.folder}: was trained on other data; set runtime.fresh=true to start over")
        changed = {k: (state.meta.get(k), v) for k, v in self.settings.items() if state.meta.get(k) != v}
        if changed:
            say(f"{self.job.name}: not bit-exact with an uninterrupted run: changed {changed}")
        return self._take(state)

    def load(self, step: int) -> tuple[Course, Window, dict[str, Any]]:
        """As `resume`, from the state after `step` batches."""
        return self._take(states.at(self.job.folder, step))

    def _take(self, state: states.State) -> tuple[Course, Window, dict[str, Any]]:
        load_weights(self.model, state.weights())
        moments, averages = _split(state.optimizer())
        self.optimizers.load_state_tensors(moments)
        if self.averages:
            self.averages.restore(averages, state.meta["averaged"])
        self.job.tracker.restore(state.curve)
        known = {k: v for k, v in state.meta.items() if k in vars(Course())}
        return Course(**known), Window.of(state.meta["window"]), state.meta

    def forget_after(self, step: int) -> None:
        """Drop the states of later steps: a rollback has made them void."""
        self.ranks.barrier()
        if self.ranks.rank == 0:
            states.drop_after(self.job.folder, step)
        self.ranks.barrier()

    def load_weights(self, step: int) -> None:
        """Load the weights of that step's state into the model, averaged ones where there are some."""
        if self.averages:
            weights = _split(states.at(self.job.folder, step).optimizer())[1]
            self.averages.restore(weights, self.averages.updates)
            self.averages.load()
        else:
            load_weights(self.model, states.weights_at(self.job.folder, step))


def _split(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The optimiser's states, and the averaged weights by their names."""
    end = f"/{AVERAGE}"
    averages = {name.removesuffix(end): tensor for name, tensor in tensors.items() if name.endswith(end)}
    return {name: tensor for name, tensor in tensors.items() if not name.endswith(end)}, averages


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
