"""What a run keeps on disk: its states, how many of them, which one it resumes from, and which weights it publishes.

`states.py` is the format on disk; here is what goes into it. All ranks call these methods together; rank 0 writes.
"""

from typing import Any

import torch
from torch import Tensor, nn

from pipeline.errors import ConfigError
from pipeline.learning import states
from pipeline.learning.course import Course
from pipeline.learning.optim import Optimizers
from pipeline.learning.ranks import Ranks
from pipeline.learning.window import Window
from pipeline.tracking import say
from pipeline.work import Job


class Keeper:
    """The states of one run. `settings` are facts of this process that a bit-exact resume needs unchanged."""

    def __init__(
        self, job: Job, ranks: Ranks, model: nn.Module, optimizers: Optimizers, fingerprint: str, publishes_best: bool,
        settings: dict[str, Any],
    ) -> None:  # fmt: skip
        self.job, self.ranks, self.model, self.optimizers = job, ranks, model, optimizers
        self.fingerprint, self.publishes_best, self.settings = fingerprint, publishes_best, settings

    def save(self, course: Course, window: Window, stream: dict[str, Any]) -> None:
        """Write a state, then drop what is older than `runtime.keep` newest and not the best."""
        if self.ranks.rank == 0:
            meta = {**vars(course), **self.settings, "window": window.state(), "fingerprint": self.fingerprint,
                    "stream": stream}  # fmt: skip
            states.save(self.job.folder, course.step, weights=weights_of(self.model),
                        optimizer=self.optimizers.state_tensors(), meta=meta, curve=self.job.tracker.rows)  # fmt: skip
            protect = [course.best_step] if self.publishes_best else []
            states.retain(self.job.folder, keep=self.job.runtime.keep, protect=protect)
            self.job.tracker.flush()
        self.ranks.barrier()

    def resume(self) -> tuple[Course, Window, dict[str, Any]] | None:
        """Put the newest whole state into model, optimisers and tracker; returns the rest of it, None without one.

        Raises ConfigError for a state of other data.
        """
        state = states.newest(self.job.folder)
        if state is None:
            return None
        if state.meta["fingerprint"] != self.fingerprint:
            raise ConfigError(f"{state.folder}: was trained on other data; set runtime.fresh=true to start over")
        load_weights(self.model, state.weights())
        self.optimizers.load_state_tensors(state.optimizer())
        self.job.tracker.restore(state.curve)
        changed = {k: (state.meta[k], v) for k, v in self.settings.items() if state.meta[k] != v}
        if changed:
            say(f"{self.job.name}: not bit-exact with an uninterrupted run: changed {changed}")
        known = {k: v for k, v in state.meta.items() if k in vars(Course())}
        return Course(**known), Window.of(state.meta["window"]), state.meta["stream"]

    def load_best(self, course: Course) -> None:
        """Load the weights of the best step into the model."""
        load_weights(self.model, states.weights_at(self.job.folder, course.best_step))


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
