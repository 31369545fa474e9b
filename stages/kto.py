"""Stage kto: learn from answers labeled good or bad, without pairs.

    models/tools + data/labels -> models/kto        (Ethayarajh et al. 2024, arXiv:2402.01306, eq. 7)

A thumbs up or down is easier to collect than a choice between two answers to the same prompt. Without human labels, the
preference pairs are split into single labels (`stages/tasks.py`), so, like stage dpo, this stage also reports how well
the model separates held-out pairs. The reference is the initial model; with an adapter, it is the model with the
adapter disabled. The reference point z0 is estimated before each step, over the step's entire batch.
"""

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from pipeline.batches.labels import LabelBatch, LabelSplit, LabelStream
from pipeline.batches.pairs import PairSplit
from pipeline.evaluation import preferences
from pipeline.ingest import records
from pipeline.learning import gates, label_losses, reference
from pipeline.learning.fit import Watchers, fit
from pipeline.learning.label_losses import LabelLoss
from pipeline.learning.losses import Loss
from pipeline.learning.settings import LabelConfig
from pipeline.model import checkpoint
from pipeline.model.lora import AdapterConfig
from pipeline.model.transformer import Transformer
from pipeline.rl.models import judge_or_none
from pipeline.run import device
from pipeline.run.stage import main
from pipeline.run.tracking import say
from pipeline.run.workdir import Job
from pipeline.sandbox.judge import SandboxConfig


@dataclass(frozen=True, kw_only=True)
class Params:
    """The `kto` block; its training keys are those of LabelConfig."""

    base: str = "tools"
    """Model to start from: a folder in models/, or `base` for your own checkpoint (stage base)."""
    loss: LabelLoss = field(default_factory=LabelLoss)
    adapter: AdapterConfig | None = None
    """{rank, alpha, ...}: train only an adapter and merge it at the end."""
    fit: LabelConfig


def run(params: Params, job: Job, *, base: Path, labels: Path, pairs: Path, out: Path) -> None:
    """Train `base` on the labels and save the model directory `out`; `pairs` are used only for testing."""
    if records.is_empty(labels / "train.jsonl"):
        return checkpoint.pass_through(base, out, job, labels)
    hardware = device.hardware(job.runtime.precision, job.runtime.base_weights)
    start = reference.begin(base, params.adapter, job.seed, hardware)
    config, losses, tokenizer = params.fit, params.loss, start.tokenizer
    config.check_context(start.policy)
    stream = LabelStream(
        labels,
        tokenizer,
        max_prompt=config.max_prompt,
        max_length=config.max_length,
        answers=config.answers,
        seed=job.seed,
    )
    num_good = stream.train.num_good
    if advice := losses.unbalanced(num_good, len(stream.train.labels) - num_good):
        say(f"warning: {job.name}: {advice}")

    def loss(model: Transformer, batch: LabelBatch) -> Loss:
        policy = label_losses.answer_logprobs(model, batch)
        with start.reference.model(batch.desirable.device) as frozen:  # records no gradients
            reference_logprobs = label_losses.likelihoods(frozen, batch.matched)
        divergence = 0.0
        if losses.uses_divergence:
            divergence = batch.divergence
            if divergence is None:  # during evaluation
                divergence = label_losses.divergence_of(model, start.reference, batch)
        return label_losses.kto(policy, reference_logprobs, batch.desirable, divergence, losses)

    test = LabelSplit(labels / "test.jsonl", tokenizer, config.max_prompt, config.max_length)
    test_pairs = PairSplit(pairs / "test.jsonl", tokenizer, config.max_prompt, config.max_length)
    before = preferences.label_likelihoods(start.policy, test, tokenizer.pad, hardware.device)
    pairs_before = preferences.likelihoods(start.policy, test_pairs.pairs, tokenizer.pad, hardware.device)
    first = stream.batch(0, config.row_length, stream.rows(0, config.row_length)).desirable
    gate = gates.first_kto(losses.at_start(first), hardware.precision, losses.beta)
    divergence = partial(label_losses.with_divergence, reference=start.reference, where=hardware.device)
    watchers = Watchers(
        first=gate,
        complete=divergence if losses.uses_divergence else None,
        save=partial(reference.save_merged, start.policy, tokenizer, job, base),
    )
    fit(start.policy, stream, loss, config, job, watchers=watchers)
    with judge_or_none(SandboxConfig(), job.workers, job.runtime.sandbox_url) as judge:
        job.report(**preferences.compare_answers(start, base, test_pairs, hardware, judge, job.seed))
    after = preferences.label_likelihoods(start.policy, test, tokenizer.pad, hardware.device)
    pairs_after = preferences.likelihoods(start.policy, test_pairs.pairs, tokenizer.pad, hardware.device)
    job.report(
        test=preferences.measure_labels(test, before, after),
        pairs=preferences.measure_pairs(test_pairs, pairs_before, pairs_after, job.seed),
        dropped={"train": dict(stream.train.dropped), "test": dict(test.dropped)},
    )
    job.report(**reference.finish(start, base))
    checkpoint.save(out, start.policy, tokenizer, job.lineage)


if __name__ == "__main__":
    main(
        run,
        inputs={"base": "models/{base}", "labels": "data/labels", "pairs": "data/preferences"},
        outs={"out": "models/kto"},
        trains=True,
    )
