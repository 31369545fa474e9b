"""What a run keeps on disk: its states, how many of them, which one it resumes from, and which weights it publishes.

`states.py` is the format on disk; here is what goes into it. All ranks call these methods together. Rank 0 writes, or each
rank its share of a model that is cut (FSDP2); rank 0 alone decides which state is the newest good one.
"""

from typing import Any

import torch
from torch import Tensor, nn

from pipeline.errors import ConfigError
from pipeline.learning import states
from pipeline.learning.course import Course
from pipeline.learning.optim import Optimizers
from pipeline.learning.ranks import Ranks
from pipeline.learning.slices import Stored
from pipeline.learning.states import State
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
        ranks, job = self.ranks, self.job
        first = ranks.rank == 0
        tensors = {"weights": weights_of(self.model), "optimizer": self.optimizers.state_tensors()}
        part = states.begin(job.folder, course.step, tensors) if first else states.part_of(job.folder, course.step)
        ranks.barrier()
        files = states.write(part, tensors, ranks.rank, ranks.world) if first or ranks.sharding else {}
        written = ranks.gather(files)
        if first:
            meta = {**vars(course), **self.settings, "window": window.state(), "fingerprint": self.fingerprint,
                    "stream": stream}  # fmt: skip
            files = {name: facts for share in written for name, facts in share.items()}
            states.complete(part, course.step, files, meta=meta, curve=job.tracker.rows)
            protect = [course.best_step] if self.publishes_best else []
            states.retain(job.folder, keep=job.runtime.keep, protect=protect)
            job.tracker.flush()
        ranks.barrier()

    def resume(self) -> tuple[Course, Window, dict[str, Any]] | None:
        """Put the newest whole state into model, optimisers and tracker; returns the rest of it, None without one.

        Raises ConfigError for a state of other data, or one that not all ranks see.
        """
        state = self._newest()
        if state is None:
            return None
        if state.meta["fingerprint"] != self.fingerprint:
            raise ConfigError(f"{state.folder}: was trained on other data; set runtime.fresh=true to start over")
        load_weights(self.model, state.weights())
        stored, parameters = state.optimizer(), dict(self.model.named_parameters())
        self.optimizers.load_state_tensors(
            {name: stored.like(name, parameters[name.rpartition("/")[0]]) for name in stored.names()}
        )
        self.job.tracker.restore(state.curve)
        changed = {k: (state.meta[k], v) for k, v in self.settings.items() if state.meta[k] != v}
        if changed:
            say(f"{self.job.name}: not bit-exact with an uninterrupted run: changed {changed}")
        known = {k: v for k, v in state.meta.items() if k in vars(Course())}
        return Course(**known), Window.of(state.meta["window"]), state.meta["stream"]

    def load_best(self, course: Course) -> None:
        """Load the weights of the best step into the model."""
        load_weights(self.model, states.at(self.job.folder, course.best_step).weights())

    def _newest(self) -> State | None:
        """The newest good state, the same one on all ranks: hashes are read once."""
        found = states.newest(self.job.folder) if self.ranks.rank == 0 else None
        step = self.ranks.gather(found and found.step)[0]
        if step is None or found is not None:
            return found
        try:
            return states.at(self.job.folder, step)
        except OSError as error:
            raise ConfigError(
                f"rank {self.ranks.rank} does not see {self.job.folder / states.name_of(step)}, which rank 0 goes on from: "
                "expected the work directory (STAGECOACH_WORK) on a file system that all machines share"
            ) from error


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
