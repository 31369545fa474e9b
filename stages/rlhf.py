"""Stage rlhf: reinforcement learning from the reward model, with a KL penalty toward the initial policy.

    models/tools + models/reward + data/preferences (prompts) (+ data/dialogues + data/tokens) -> models/rlhf

    rlhf.method = rloo    baseline: the other answers to the prompt          (Ahmadian et al. 2024, arXiv:2402.14740)
                  ppo     baseline: a critic initialized from models/reward  (Ziegler et al. 2019; Ouyang et al. 2022)

The policy starts from models/tools. Each update also includes rows of earlier training data (PPO-ptx, Ouyang et al.
2022), because optimizing a single reward erodes everything else. At every evaluation, the policy answers the same
held-out prompts. `proxy` is the training reward (`rlhf.rewards`); `gold` is the true score, never used in training.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from torch import nn

from pipeline.batches.batch import TokenStream
from pipeline.batches.dialogues import DialogueStream, Shares, rehearsing
from pipeline.batches.pairs import PairSplit
from pipeline.evaluation import preferences
from pipeline.evaluation.tools import call_reward
from pipeline.ingest import records
from pipeline.learning import gates, losses, policy_losses, reference
from pipeline.learning.fit import Watchers, fit
from pipeline.learning.losses import Loss
from pipeline.learning.policy_losses import METHODS, Clip
from pipeline.model import checkpoint
from pipeline.model.heads import ActorCritic, RewardModel
from pipeline.model.lora import AdapterConfig
from pipeline.rl import advantages, answers
from pipeline.rl.advantages import PPOConfig
from pipeline.rl.models import CausalSetting
from pipeline.rl.rewards import Scorer
from pipeline.rl.rollout import (
    Method,
    RolloutBatch,
    RolloutConfig,
    RolloutStream,
    alarms_of,
    group_loss,
    rehearsed_too,
    watch_alarms,
)
from pipeline.run import device
from pipeline.run.config import block
from pipeline.run.errors import DataError
from pipeline.run.stage import main
from pipeline.run.tracking import say
from pipeline.run.workdir import Job
from pipeline.sandbox.judge import SandboxConfig
from pipeline.text.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Params:
    """The `rlhf` block; it also has the keys of RolloutConfig and PPOConfig (of the latter, rloo uses `beta`)."""

    base: str = "tools"
    """Model to start from: a folder in models/, or `base` for your own checkpoint (stage base)."""
    method: str
    """rloo or ppo."""
    kinds: tuple[str, ...] = ()
    """Kinds of prompts to train on; empty: all. Prompts without room for the better answer are left out."""
    rewards: dict[str, float] = field(default_factory=lambda: {"learned": 1.0})
    """Weight of each reward, by name; tool_call needs kinds: [tools], code needs kinds: [code]."""
    rehearse: str = "tokens"
    """tokens: mix in rows of data/tokens; none: only dialogues."""
    rehearsal_rows: int = 0
    """Rows of dialogues, text and code added to each update; 0: none."""
    rehearsal_coef: float = 20.0
    """Weight of the per-token loss on these rows relative to the loss on the answers (InstructGPT: 27.8)."""
    shares: Shares = field(default_factory=Shares)
    held_out: preferences.HeldOutConfig = field(default_factory=preferences.HeldOutConfig)
    adapter: AdapterConfig | None = None
    """{rank, alpha, ...}: train only an adapter and merge it at the end."""
    ppo: PPOConfig
    sandbox: SandboxConfig = block("sandbox")
    fit: RolloutConfig

    def __post_init__(self) -> None:
        """Raises ValueError for an unknown method, for groups of size one, and for a horizon so short that beta could
        change sign within one iteration.
        """
        if self.method not in ("rloo", "ppo"):
            raise ValueError(f"method: expected rloo or ppo, got {self.method!r}")
        if self.method == "rloo" and self.fit.samples < 2:
            raise ValueError(
                "samples: expected at least 2, got 1; rloo compares each prompt's answers with one another"
            )
        if self.fit.prompts * self.fit.samples > 5 * self.ppo.horizon:
            raise ValueError(
                f"horizon: expected at least a fifth of the {self.fit.prompts * self.fit.samples} answers of an"
                f" iteration, got {self.ppo.horizon}; otherwise, the KL coefficient would turn negative"
            )
        if self.rehearsal_rows < 0 or self.rehearsal_coef < 0:
            raise ValueError("expected rehearsal_rows >= 0, rehearsal_coef >= 0")


def run(
    params: Params,
    job: Job,
    *,
    base: Path,
    reward: Path,
    pairs: Path,
    dialogues: Path,
    text: Path,
    code: Path,
    out: Path,
    samples: Path,
) -> None:
    """Train the actor, track the gold score and the proxy reward, and save the model directory `out`."""
    if records.is_empty(pairs / "train.jsonl"):
        samples.touch()
        return checkpoint.pass_through(base, out, job, pairs)
    config = params.fit
    start = reference.begin(
        base, params.adapter, job.seed, device.hardware(job.runtime.precision, job.runtime.base_weights)
    )
    reward_model, reward_tokenizer = checkpoint.load_reward(reward)
    checkpoint.same_tokenizer(start.tokenizer, reward_tokenizer, str(base), str(reward))
    # Only the prompts of the pairs are used, so their answers can have any length; prompts that leave no room for an
    # answer are skipped.
    splits = {
        name: PairSplit(pairs / f"{name}.jsonl", start.tokenizer, config.max_prompt, start.policy.config.max_context)
        for name in ("train", "test")
    }
    prompts = {name: answers.pair_prompts(split, config.max_new_tokens, params.kinds) for name, split in splits.items()}
    setting = CausalSetting(start, config, job, reward_model.train(False).requires_grad_(False))
    preferred = None
    if "preferred" in params.rewards:
        preferred = setting.preferred([*prompts["train"], *prompts["test"]])
    with setting.judge(params.sandbox, wanted=params.rewards) as judge:
        scorer = Scorer(params.rewards, setting.resources(judge, call_reward, preferred))
        learner = (_rloo if params.method == "rloo" else _ppo)(params, setting, scorer, reward)
        rehearsal = _rehearsal(params, job, start.tokenizer, dialogues, text, code)
        stream = RolloutStream(
            prompts["train"],
            config,
            learner.method,
            pad=start.tokenizer.pad,
            seed=job.seed,
            ranks=setting.ranks,
            state=learner.carried,
            rehearsal=rehearsal,
        )
        loss = rehearsed_too(learner.loss, setting.policy, params.rehearsal_coef) if rehearsal else learner.loss
        held_out = preferences.HeldOutPrompts(prompts["test"], setting, judge, scorer, params.held_out)
        watchers = Watchers(
            first=gates.first_policy(*learner.gated, setting.precision),
            evaluate=held_out.row,
            logged=watch_alarms(job.name, target_kl=params.ppo.target_kl),
            # the first gate checks the losses instead; equal scores give the actor no gradient
            gradients_at=None,
            save=partial(reference.save_merged, start.policy, start.tokenizer, job, base),
        )
        fit(learner.model, stream, loss, learner.config, job, watchers=watchers)
        held_out_report = held_out.report()  # before `finish`, which also merges an adapter into the reference
        held_out.write_samples(samples)
        job.report(
            **reference.finish(start, base),
            **held_out_report,
            prompts=len(prompts["train"]),
            dropped={name: dict(split.dropped) for name, split in splits.items()},
            alarms=alarms_of(job.tracker.rows, target_kl=params.ppo.target_kl),
        )
    checkpoint.save(out, start.policy, start.tokenizer, job.lineage)


def _rehearsal(
    params: Params, job: Job, tokenizer: Tokenizer, dialogues: Path, text: Path, code: Path
) -> TokenStream | None:
    """Earlier training data, in rows as long as those of the answers. None if rehearsal is off, or (with a log message)
    if the dialogues do not fill the rows of an update.
    """
    if not params.rehearsal_rows or records.is_empty(dialogues / "train.jsonl"):
        return None
    length = params.fit.row_length
    tokens = length * params.rehearsal_rows
    try:
        conversations = DialogueStream(dialogues, tokenizer, context=length, tokens_per_step=tokens, seed=job.seed)
    except DataError as error:
        say(f"{job.name}: rehearsal disabled: {error}")
        return None
    mixed = rehearsing(conversations, params.shares, job, tokenizer, text=text, code=code, base=params.base)
    return mixed or conversations


@dataclass(frozen=True, kw_only=True)
class Learner:
    """What `fit` trains for a method: the model, its settings and the loss."""

    model: nn.Module
    config: RolloutConfig
    method: Method
    loss: Callable[..., Loss]
    gated: tuple[str, str, str]  # names of the metrics for the ratio, divergence and clipped share of an update
    carried: dict[str, float] = field(default_factory=dict)  # state kept from one iteration to the next


def _rloo(params: Params, setting: CausalSetting, scorer: Scorer, _: Path) -> Learner:
    """A learner for the policy, without a critic."""
    method = replace(METHODS["rloo"], beta=params.ppo.beta)
    return Learner(
        model=setting.policy,
        config=params.fit,
        method=Method(
            sample=setting.sample,
            score=scorer,
            annotate=partial(advantages.annotate_group, reference=setting.reference),
            estimate=partial(advantages.estimate_group, method=method, samples=params.fit.samples, must_end=True),
        ),
        loss=partial(group_loss, method=method, config=params.fit),
        gated=("ratio", "approxkl", "clip_ratio/region_mean"),
    )


def _ppo(params: Params, setting: CausalSetting, scorer: Scorer, reward: Path) -> Learner:
    """A learner for the policy and a critic; the critic is discarded after training."""
    critic: RewardModel
    critic, _ = checkpoint.load_reward(reward)
    if "learned" not in params.rewards:  # the reward model's scores would be poor initial values
        nn.init.zeros_(critic.score.weight)
        critic.reward_mean, critic.reward_std = 0.0, 1.0
    carried, config = {"beta": params.ppo.beta}, params.fit
    if params.ppo.critic_rate is not None:
        config = replace(config, learning_rates=config.learning_rates | {"critic": params.ppo.critic_rate})
    return Learner(
        model=ActorCritic(setting.policy, critic),
        config=config,
        method=Method(
            sample=setting.sample,
            score=scorer,
            annotate=partial(
                advantages.annotate_ppo,
                reference=setting.reference,
                values=partial(setting.values, setting.copied(critic.to(setting.hardware.device))),
            ),
            estimate=partial(advantages.estimate_ppo, config=params.ppo, carried=carried),
        ),
        loss=partial(loss, temperature=params.fit.temperature, ppo=params.ppo),
        gated=("val/ratio", "policy/approxkl_avg", "policy/clipfrac_avg"),
        carried=carried,
    )


def loss(model: ActorCritic, batch: RolloutBatch, *, temperature: float, ppo: PPOConfig) -> Loss:
    """The PPO loss on a minibatch."""
    logprobs, entropy, values = losses.actor_critic(model, batch, temperature)
    result = policy_losses.ppo(
        logprobs,
        entropy,
        values,
        old=batch.old,
        advantages=batch.arrays["advantages"],
        old_values=batch.arrays["old_values"],
        returns=batch.arrays["returns"],
        clip=Clip(ppo.clip, ppo.clip),
        value_clip=ppo.value_clip,
        value_weight=ppo.value_weight,
    )
    return policy_losses.with_agreement(result, logprobs, batch.old) if batch.fresh else result


if __name__ == "__main__":
    main(
        run,
        inputs={
            "base": "models/{base}",
            "reward": "models/reward",
            "pairs": "data/preferences",
            "dialogues": "data/dialogues",
            "text": "data/{rehearse}/text",
            "code": "data/{rehearse}/code",
        },
        outs={"out": "models/rlhf", "samples": "metrics/samples/rlhf.jsonl"},
        trains=True,
    )
