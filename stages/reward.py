"""Stage reward: train a model that predicts which of two answers is better.

    models/tools + data/preferences -> models/reward        (Bradley-Terry; Ouyang et al. 2022, eq. 1)

The model has one linear head, initialized to zero, on the last token of an answer. The mean and standard deviation of
its scores over the base model's answers are stored with the model; later stages use them to normalize rewards. In
addition to the pairs in data/preferences, the model learns from pairs sampled from the base model, ranked by ground
truth, and from each token's likelihood under the base model (`model/heads.py`). Accuracy is reported for each kind of
pair, on pairs not used for model selection, next to the accuracy of ranking by the base model's likelihood.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn

from pipeline.batches.pairs import PairBatch, PairSplit, PairStream
from pipeline.evaluation import preferences
from pipeline.generation.sampling import Sampling, sampler
from pipeline.ingest import records
from pipeline.learning import gates, losses, pair_losses, reference
from pipeline.learning.fit import Watchers, fit
from pipeline.learning.losses import Loss
from pipeline.learning.performance import load_operators
from pipeline.learning.settings import PairConfig
from pipeline.model import checkpoint
from pipeline.model.heads import GuessingModel, RewardModel, deepened
from pipeline.model.transformer import Transformer
from pipeline.rl import answers
from pipeline.rl.models import judge_or_none
from pipeline.run import device
from pipeline.run.config import block
from pipeline.run.stage import main
from pipeline.run.tracking import say
from pipeline.run.workdir import Job
from pipeline.sandbox.judge import SandboxConfig


@dataclass(frozen=True, kw_only=True)
class Params:
    """The `reward` block; its training keys are those of PairConfig."""

    base: str = "tools"
    """Model to start from: a folder in models/, or `base` for your own checkpoint (stage base)."""
    centering: float
    """Weight of the squared sum of a pair's two rewards, which keeps their mean near 0."""
    label_flip: float
    """Fraction of training pairs whose labels are swapped, to measure the effect of label noise."""
    extra_layers: int = 0
    """Layers added on top of the base model's, to compare the answer with what the base model expects."""
    likelihood_weight: float = 0.0
    """Weight of predicting each answer token's likelihood under the base model."""
    own_prompts: int
    """Number of prompts for which answer pairs are sampled from the base model; 0: none."""
    calibration_answers: int
    """Number of answers sampled from the base model to estimate the mean and standard deviation of the scores."""
    answer_tokens: int
    """Maximum tokens per answer sampled from the base model."""
    sandbox: SandboxConfig = block("sandbox")
    fit: PairConfig

    def __post_init__(self) -> None:
        if (
            not 0 <= self.label_flip < 0.5
            or self.centering < 0
            or min(self.calibration_answers - 2, self.own_prompts, self.likelihood_weight) < 0
        ):
            raise ValueError(
                "expected label_flip in [0, 0.5), centering >= 0, calibration_answers >= 2, own_prompts >= 0,"
                " likelihood_weight >= 0"
            )


def run(params: Params, job: Job, *, base: Path, pairs: Path, out: Path) -> None:
    """Train a reward model on `base` and save the model directory `out`."""
    trunk, tokenizer = checkpoint.load(base)
    policy, model = checkpoint.load_frozen(base), RewardModel(deepened(trunk, params.extra_layers))
    if records.is_empty(pairs / "train.jsonl"):
        say(f"{job.name}: {pairs} has nothing to train on; the reward of every answer is 0")
        job.report(passed_through=str(pairs))
        return checkpoint.save_reward(out, model, tokenizer, job.lineage)
    config = params.fit
    hardware = device.hardware(job.runtime.precision, job.runtime.base_weights)
    reference.narrowed(policy, hardware).to(hardware.device)
    load_operators(job.runtime.compile, hardware=hardware, name=job.name)
    generate = sampler(policy, Sampling(params.answer_tokens, temperature=1.0), {tokenizer.turn_end})
    splits = {
        name: PairSplit(pairs / f"{name}.jsonl", tokenizer, config.max_prompt, config.max_length)
        for name in ("train", "test")
    }
    own_prompts = {
        name: preferences.own_prompts(split, params.answer_tokens, limit)
        for (name, split), limit in zip(splits.items(), (params.own_prompts, params.own_prompts // 4), strict=True)
    }
    with judge_or_none(params.sandbox, job.workers, job.runtime.sandbox_url) as judge, hardware.autocast():
        own_pairs = {
            name: preferences.own_pairs(generate, prompts, tokenizer, judge, job.seed)
            for name, prompts in own_prompts.items()
        }
    stream = PairStream(
        pairs,
        tokenizer,
        max_prompt=config.max_prompt,
        max_length=config.max_length,
        pairs=config.pairs,
        seed=job.seed,
        label_flip=params.label_flip,
        more=own_pairs["train"],
    )

    learner = GuessingModel(model) if params.likelihood_weight else model

    # The head starts at zero, so all rewards are 0 and no gradient reaches the trunk before the second step.
    first = stream.batch(0, config.row_length, stream.rows(0, config.row_length))
    gate = gates.first_reward(pair_losses.untrained_loss(first.margins))
    ranked = partial(loss, policy=policy, centering=params.centering, likelihood_weight=params.likelihood_weight)
    fit(learner, stream, ranked, config, job, watchers=Watchers(first=gate, gradients_at=1))

    calibration_prompts = answers.repeated(
        answers.pair_prompts(splits["train"], params.answer_tokens), params.calibration_answers
    )
    with hardware.autocast():
        calibration_answers = answers.sample(generate, calibration_prompts, tokenizer, job.seed)
    model.calibrate(answers.raw_rewards(model, calibration_answers, tokenizer.pad))
    job.report(
        dropped={name: dict(split.dropped) for name, split in splits.items()},
        own_pairs=len(own_pairs["train"]),
        reward_mean=model.reward_mean,
        reward_std=model.reward_std,
    )
    for name, told in (("test", splits["test"].pairs), ("own_answers", own_pairs["test"])):
        if told:
            with hardware.autocast():
                ranking = preferences.measure_ranking(model, told, tokenizer.pad)
                by_likelihood = preferences.likelihood_ranking(policy, told, tokenizer.pad, hardware.device)
            job.report(**{name: ranking | {"likelihood": by_likelihood}})
    checkpoint.save_reward(out, model, tokenizer, job.lineage)


def loss(
    model: nn.Module, batch: PairBatch, *, policy: Transformer, centering: float, likelihood_weight: float
) -> Loss:
    """The loss on a batch of pairs for a RewardModel or, with a `likelihood_weight`, for a GuessingModel with the
    log-probabilities of `policy` as targets.

    In evaluation, only the ranking loss is used, so that the best step is the one that ranks best.
    """
    with_likelihood = model.training and likelihood_weight > 0
    selected = batch.said if with_likelihood else batch.ends
    outputs = model(batch.input_ids, positions=batch.positions, documents=batch.documents, select=selected)
    scores = outputs.view(len(outputs), -1)  # (n, 1), or (n, 2) with predicted likelihoods
    chosen, rejected = scores[batch.ends[selected], 0].chunk(2)
    ranking = pair_losses.bradley_terry(
        chosen, rejected, margin=batch.margins, centering=centering if model.training else 0.0
    )
    if not with_likelihood:
        return ranking
    with torch.no_grad():
        logprobs, _ = losses.token_logprobs(policy, batch)
    return pair_losses.with_likelihood(ranking, scores[:, 1], logprobs, weight=likelihood_weight)


if __name__ == "__main__":
    main(run, inputs={"base": "models/{base}", "pairs": "data/preferences"}, outs={"out": "models/reward"}, trains=True)
