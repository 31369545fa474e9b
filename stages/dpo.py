"""Stage dpo: direct preference optimization on answer pairs, without a reward model.

    models/tools + data/preferences -> models/dpo        (Rafailov et al. 2023, arXiv:2305.18290, eq. 7)

`dpo.loss` selects one of nine related losses. The reference is the initial model; its log-probabilities can be
precomputed once (`precompute_reference`). With an adapter, the reference is the model with the adapter disabled.
"""

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from pipeline.batches.pairs import PairBatch, PairSplit, PairStream
from pipeline.evaluation import preferences
from pipeline.ingest import records
from pipeline.learning import gates, pair_losses, reference
from pipeline.learning.fit import Watchers, fit
from pipeline.learning.losses import Loss
from pipeline.learning.pair_losses import PairLoss
from pipeline.learning.settings import PairConfig
from pipeline.model import checkpoint
from pipeline.model.lora import AdapterConfig
from pipeline.model.transformer import Transformer
from pipeline.rl.models import judge_or_none
from pipeline.run import device
from pipeline.run.stage import main
from pipeline.run.workdir import Job
from pipeline.sandbox.judge import SandboxConfig


@dataclass(frozen=True, kw_only=True)
class Params:
    """The `dpo` block; its training keys are those of PairConfig."""

    base: str = "tools"
    """Model to start from: a folder in models/, or `base` for your own checkpoint (stage base)."""
    loss: PairLoss = field(default_factory=PairLoss)
    precompute_reference: bool
    """Compute the reference's log-probabilities once, before training."""
    adapter: AdapterConfig | None = None
    """{rank, alpha, ...}: train only an adapter and merge it at the end."""
    fit: PairConfig


def run(params: Params, job: Job, *, base: Path, pairs: Path, out: Path) -> None:
    """Train `base` on the pairs and save the model directory `out`."""
    if records.is_empty(pairs / "train.jsonl"):
        return checkpoint.pass_through(base, out, job, pairs)
    hardware = device.hardware(job.runtime.precision, job.runtime.base_weights)
    start = reference.begin(base, params.adapter, job.seed, hardware)
    config, losses = params.fit, params.loss
    config.check_context(start.policy)  # before the reference scores the pairs
    stream = PairStream(
        pairs,
        start.tokenizer,
        max_prompt=config.max_prompt,
        max_length=config.max_length,
        pairs=config.pairs,
        seed=job.seed,
    )
    if losses.uses_reference and params.precompute_reference:
        # The reference runs in the policy's precision.
        with start.reference.model(hardware.device) as reference_model, hardware.autocast():
            stream.references = pair_losses.reference_sums(reference_model, stream, hardware.device)
        start.reference.release()

    def loss(model: Transformer, batch: PairBatch) -> Loss:
        policy = pair_losses.pair_logprobs(model, batch)
        if not losses.uses_reference:
            return pair_losses.dpo(policy, None, losses)
        if batch.reference is not None:
            return pair_losses.dpo(policy, pair_losses.pairs_of(batch.reference, batch.targets >= 0), losses)
        with start.reference.model(batch.input_ids.device) as reference_model:  # records no gradients
            reference_logprobs = pair_losses.pair_logprobs(reference_model, batch)
        return pair_losses.dpo(policy, reference_logprobs, losses)

    test = PairSplit(pairs / "test.jsonl", start.tokenizer, config.max_prompt, config.max_length)
    before = preferences.likelihoods(start.policy, test.pairs, start.tokenizer.pad, hardware.device)
    gate = gates.first_dpo(losses.at_start, hardware.precision, losses.beta)
    fit(
        start.policy,
        stream,
        loss,
        config,
        job,
        watchers=Watchers(first=gate, save=partial(reference.save_merged, start.policy, start.tokenizer, job, base)),
    )
    with judge_or_none(SandboxConfig(), job.workers, job.runtime.sandbox_url) as judge:
        job.report(**preferences.compare_answers(start, base, test, hardware, judge, job.seed))
    after = preferences.likelihoods(start.policy, test.pairs, start.tokenizer.pad, hardware.device)
    job.report(test=preferences.measure_pairs(test, before, after, job.seed))
    job.report(
        **reference.finish(start, base), dropped={"train": dict(stream.train.dropped), "test": dict(test.dropped)}
    )
    checkpoint.save(out, start.policy, start.tokenizer, job.lineage)


if __name__ == "__main__":
    main(run, inputs={"base": "models/{base}", "pairs": "data/preferences"}, outs={"out": "models/dpo"}, trains=True)
