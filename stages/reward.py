"""Stage reward: a model that says which of two answers is better.

    models/tools + data/preferences -> models/reward        (Bradley-Terry; Ouyang et al. 2022, eq. 1)

One linear head on the last token of an answer, starting at zero. What it gives over answers of the base model decides mean
and spread, by which later stages normalise it. Accuracy is measured per kind of pair on pairs that nothing was chosen by.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from pipeline import checkpoint, device
from pipeline.evaluation import ranking
from pipeline.generation.sampling import Sampling, sampler
from pipeline.learning import first_steps, objectives_pairs, scoring_pairs
from pipeline.learning.fit import fit
from pipeline.learning.objectives import Loss, Term
from pipeline.learning.protocols import Watchers
from pipeline.learning.settings import PairConfig
from pipeline.model.heads import RewardModel
from pipeline.params import main
from pipeline.reinforcement import answers
from pipeline.streams.preferences import PairBatch, PairSplit, PairStream
from pipeline.work import Job


@dataclass(frozen=True, kw_only=True)
class Params:
    """The block `reward`; its training keys are those of PairConfig."""

    dense: float = 0.0  # weight of the same ranking by the mean over all prefixes: a fault is felt where it stands
    centring: float  # weight of the squared sum of both rewards, which keeps their mean near 0
    label_flip: float  # share of the training pairs whose labels are swapped, to measure what noise costs
    calibration_answers: int  # answers of the base model over which mean and spread are taken
    calibration_tokens: int  # of each of them at most
    fit: PairConfig

    def __post_init__(self) -> None:
        """Refuse shares and counts that cannot be."""
        if not 0 <= self.label_flip < 0.5 or min(self.centring, self.dense) < 0 or self.calibration_answers < 2:
            raise ValueError("expected label_flip in [0, 0.5), centring and dense >= 0, calibration_answers >= 2")


def run(params: Params, job: Job, *, base: Path, pairs: Path, out: Path) -> None:
    """Train a reward model on `base` and save the model directory `out`."""
    trunk, tokenizer = checkpoint.load(base)
    policy, model = checkpoint.load_frozen(base), RewardModel(trunk)
    where = device.hardware(job.runtime.precision).device
    config = params.fit
    stream = PairStream(pairs, tokenizer, max_prompt=config.max_prompt, max_length=config.max_length,
                        pairs=config.pairs, seed=job.seed, label_flip=params.label_flip)  # fmt: skip

    def loss(model: RewardModel, batch: PairBatch) -> Loss:
        chosen, rejected, means = scoring_pairs.pair_rewards(model, batch, dense=params.dense > 0)
        found = objectives_pairs.bradley_terry(chosen, rejected, margin=batch.margins, centring=params.centring)
        if means is None:
            return found
        term = Term("dense", objectives_pairs.ranking(means[0] - means[1]), "pairs", params.dense)
        return replace(found, terms=[*found.terms, term])

    # The head starts at zero, so all rewards are 0 and no gradient reaches the trunk before the second step.
    first = stream.batch(0, config.row_length, stream.rows(0, config.row_length))
    gate = first_steps.first_reward(objectives_pairs.untrained_loss(first.margins))
    fit(model, stream, loss, config, job, watchers=Watchers(first=gate, gradients_at=1))

    prompts = answers.pair_prompts(stream.train, params.calibration_tokens)
    sampled = answers.sample(
        sampler(policy.to(where), Sampling(params.calibration_tokens, temperature=1.0), {tokenizer.turn_end}),
        answers.repeated(prompts, params.calibration_answers), tokenizer, job.seed,
    )  # fmt: skip
    model.calibrate(answers.raw_rewards(model, sampled, tokenizer.pad))
    test = PairSplit(pairs / "test.jsonl", tokenizer, config.max_prompt, config.max_length)
    job.report(dropped={"train": dict(stream.train.dropped), "test": dict(test.dropped)},
               reward_mean=model.reward_mean, reward_std=model.reward_std,
               test=ranking.measure(model, test, tokenizer.pad))  # fmt: skip
    checkpoint.save_reward(out, model, tokenizer, job.lineage)


if __name__ == "__main__":
    main(run, inputs={"base": "models/tools", "pairs": "data/preferences"}, outs={"out": "models/reward"}, trains=True)
