"""Oracle A, trl 1.12.0: reward, DPO family, KTO, GRPO family, RLOO.

The trainers are never built. Their methods run on stubs that hold the attributes they read; the model answers with
given logits, over a vocabulary of two where only the token's log-probability matters. The seeds of the clipped losses
are chosen so that tokens (or answers) are clipped on both sides.
"""

from __future__ import annotations

from collections import defaultdict
from types import MethodType, SimpleNamespace
from typing import Any

import torch
from case import Case, draw, logprobs, near
from distillation import distill_cases
from stand_in import Model, metrics_of, stand_in, two_tokens
from torch import Tensor
from trl import DPOTrainer, GRPOTrainer, KTOTrainer, RewardTrainer, RLOOTrainer

VERSION = "1.12.0"
NAN = float("nan")

# 4 pairs, 7 tokens: a prompt before the answer, a tool's tokens inside it, padding behind it, an answer of one token
CHOSEN = [[0, 1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 0, 0], [1, 1, 0, 0, 1, 1, 0], [0, 0, 0, 0, 1, 0, 0]]
REJECTED = [[0, 1, 1, 1, 0, 0, 0], [0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 0, 1, 0, 0], [0, 0, 0, 0, 1, 1, 1]]
# 4 answers of at most 7 tokens, the third with a tool's tokens inside it
ANSWERS = [[1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0, 0], [1, 1, 0, 0, 1, 1, 0], [1, 0, 0, 0, 0, 0, 0]]


# ---- reward


def reward(rewards: Tensor, margin: Tensor | None, coefficient: float | None) -> tuple[Tensor, SimpleNamespace]:
    """The loss of chosen and rejected rewards (2, B)."""
    stub = stand_in(model=Model(rewards), args=SimpleNamespace(center_rewards_coefficient=coefficient))
    inputs = {"attention_mask": torch.ones(rewards.numel(), 1)} | ({} if margin is None else {"margin": margin})
    return RewardTrainer.compute_loss(stub, Model(rewards.reshape(-1, 1)), inputs), stub


def reward_case(name: str, seed: int, *, margin: bool, coefficient: float | None) -> Case:
    generator = torch.Generator().manual_seed(seed)
    rewards, margins = draw(generator, 2, 5, low=-2, high=2), draw(generator, 5, low=0, high=1.5)
    given = margins if margin else None
    leaf = rewards.clone().requires_grad_()
    loss, stub = reward(leaf, given, coefficient)
    loss.backward()
    pairs = [reward(rewards[:, [i]], margins[[i]] if margin else None, coefficient)[0] for i in range(5)]
    assert leaf.grad is not None
    names = ("accuracy", "margin", "min_reward", "mean_reward", "max_reward")
    return Case(
        name=name,
        oracle="A",
        version=VERSION,
        call="RewardTrainer.compute_loss",
        seed=seed,
        settings={"center_rewards_coefficient": coefficient},
        inputs={
            "chosen": rewards[0],
            "rejected": rewards[1],
            "margin": margins if margin else [0.0] * 5,
            "centering": coefficient or 0.0,
        },
        expected={
            "losses": torch.stack(pairs),
            "loss": loss.detach(),
            "grad_chosen": leaf.grad[0],
            "grad_rejected": leaf.grad[1],
            **metrics_of(stub, *names),
        },
    )


def reward_cases() -> list[Case]:
    return [
        reward_case("plain", 1, margin=False, coefficient=None),
        reward_case("margin", 2, margin=True, coefficient=None),
        reward_case("centered", 3, margin=False, coefficient=0.01),
        reward_case("margin_centered", 4, margin=True, coefficient=0.01),
    ]


# ---- the DPO family

PAIR_METRICS = tuple(f"{what}/{side}" for what in ("rewards", "logps") for side in ("chosen", "rejected"))
PAIR_METRICS += ("rewards/margins", "rewards/accuracies")


def dpo(
    policy: Tensor, reference: Tensor, ids: Tensor, mask: Tensor, settings: dict[str, Any]
) -> tuple[Tensor, SimpleNamespace]:
    """The loss of logits (2B, T+1, V), the chosen half first; ids and mask are (2B, T), of the predicted tokens."""
    stub = stand_in(
        model=Model(policy),
        ref_model=Model(reference),
        args=SimpleNamespace(gradient_checkpointing_kwargs=None),
        f_divergence_type="reverse_kl",
        ld_alpha=None,
        use_weighting=False,
        precompute_ref_logps=False,
        **{"label_smoothing": 0.0, "loss_weights": [1.0]} | settings,
    )
    first = torch.zeros(len(ids), 1, dtype=torch.long)  # a first token, which nothing predicts
    inputs = {"input_ids": torch.cat([first, ids], 1), "completion_mask": torch.cat([first, mask], 1)}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    return DPOTrainer._compute_loss(stub, Model(policy), inputs, False), stub


def pairs(seed: int) -> dict[str, Tensor]:
    """The inputs of a case: per-token log-probabilities (B, T) and masks."""
    generator = torch.Generator().manual_seed(seed)
    chosen, rejected = torch.tensor(CHOSEN), torch.tensor(REJECTED)
    reference = logprobs(generator, 2, *chosen.shape)
    policy = near(generator, reference, 0.8)
    return {
        "chosen_mask": chosen,
        "rejected_mask": rejected,
        "policy_chosen": policy[0],
        "policy_rejected": policy[1],
        "reference_chosen": reference[0],
        "reference_rejected": reference[1],
    }


def dpo_case(name: str, seed: int, knobs: dict[str, float], settings: dict[str, Any], *, alone: bool = False) -> Case:
    """With `alone`, each pair is its own batch and the loss is their mean: TRL's `sft` term is a mean over tokens."""
    drawn = pairs(seed)
    mask = torch.cat([drawn["chosen_mask"], drawn["rejected_mask"]])
    reference = two_tokens(torch.cat([drawn["reference_chosen"], drawn["reference_rejected"]]))
    leaf = torch.cat([drawn["policy_chosen"], drawn["policy_rejected"]]).requires_grad_()
    ids, half = torch.zeros_like(mask), len(mask) // 2
    losses = []
    for i in range(half):
        rows = [i, half + i]
        losses.append(dpo(two_tokens(leaf[rows]), reference[rows], ids[rows], mask[rows], settings)[0])
    whole, stub = dpo(two_tokens(leaf), reference, ids, mask, settings)
    loss = torch.stack(losses).mean() if alone else whole
    (gradient,) = torch.autograd.grad(loss, leaf)
    by_sum = (gradient * mask).sum(1) / mask.sum(1)  # the same at every token of an answer, because it enters as a sum
    return Case(
        name=name,
        oracle="A",
        version=VERSION,
        call="DPOTrainer._compute_loss",
        seed=seed,
        settings=settings,
        inputs={**knobs, **drawn},
        expected={
            "losses": torch.stack(losses).detach(),
            "loss": loss.detach(),
            "grad_chosen": by_sum[:half],
            "grad_rejected": by_sum[half:],
            **metrics_of(stub, *PAIR_METRICS),
        },
    )


def dpo_logits_case(seed: int) -> Case:
    """From logits over five tokens, so that the token metrics have values too."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, (4, 5), generator=generator)
    mask = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 0, 1, 0], [0, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    policy, reference = draw(generator, 2, 4, 5, 5, low=-2, high=2)
    padded = [torch.cat([logits, torch.zeros(4, 1, 5)], 1) for logits in (policy, reference)]
    settings = {"loss_types": ["sigmoid"], "beta": 0.1}
    loss, stub = dpo(*padded, ids, mask, settings)
    names = (*PAIR_METRICS, "logits/chosen", "logits/rejected", "entropy", "mean_token_accuracy")
    return Case(
        name="logits",
        oracle="A",
        version=VERSION,
        call="DPOTrainer._compute_loss",
        seed=seed,
        settings=settings,
        inputs={
            "beta": 0.1,
            "chosen_ids": ids[:2],
            "rejected_ids": ids[2:],
            "chosen_mask": mask[:2],
            "rejected_mask": mask[2:],
            "policy_chosen_logits": policy[:2],
            "policy_rejected_logits": policy[2:],
            "reference_chosen_logits": reference[:2],
            "reference_rejected_logits": reference[2:],
        },
        expected={"loss": loss, **metrics_of(stub, *names)},
    )


def dpo_cases() -> list[Case]:
    def plain(name: str, seed: int, beta: float) -> Case:
        kind = {"norm": "sigmoid_norm"}.get(name, name)
        return dpo_case(name, seed, {"beta": beta}, {"loss_types": [kind], "beta": beta})

    def robust(name: str, seed: int, smoothing: float) -> Case:
        settings = {"loss_types": ["robust"], "beta": 0.3, "label_smoothing": smoothing}
        return dpo_case(name, seed, {"beta": 0.3, "label_smoothing": smoothing}, settings)

    nll = {"loss_types": ["sigmoid", "sft"], "loss_weights": [1.0, 0.2], "beta": 0.1}
    return [
        plain("sigmoid", 11, 0.1),
        robust("robust_0.1", 12, 0.1),
        robust("robust_0.4", 13, 0.4),
        plain("ipo", 14, 0.2),
        plain("hinge", 15, 0.7),
        plain("norm", 16, 5.0),
        plain("apo_zero", 17, 0.3),
        plain("apo_down", 18, 0.3),
        dpo_case("sigmoid_nll", 19, {"beta": 0.1, "nll_weight": 0.2}, nll, alone=True),
        dpo_logits_case(20),
    ]


# ---- KTO

# 4 answers of at most 7 tokens after a prompt of 1 to 4, and the same prompts with the previous row's answer
MATCHED = [[0, 1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 0, 0], [1, 1, 0, 0, 1, 1, 0], [0, 0, 0, 0, 1, 0, 0]]
MISMATCHED = [[0, 1, 0, 0, 0, 0, 0], [0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0, 0], [0, 0, 0, 0, 1, 1, 1]]


class Judged(Model):
    """Answers mismatched rows, whose first token is 1, with other logits."""

    def __init__(self, logits: Tensor, mismatched: Tensor) -> None:
        super().__init__(logits)
        self.mismatched = mismatched

    def forward(self, input_ids: Tensor, **_: Any) -> SimpleNamespace:
        return SimpleNamespace(logits=self.mismatched if input_ids[0, 0] else self.logits)


def kto(given: dict[str, Tensor], policy: Tensor, settings: dict[str, Any]) -> tuple[Tensor, SimpleNamespace]:
    """The loss of log-probabilities (B, T) of the matched answers."""
    models = [
        Judged(two_tokens(matched), two_tokens(given[f"{who}_mismatched"]))
        for who, matched in (("policy", policy), ("reference", given["reference"]))
    ]
    stub = stand_in(
        model=models[0],
        ref_model=models[1],
        args=SimpleNamespace(gradient_checkpointing_kwargs=None),
        calculate_KL=settings["loss_type"] != "apo_zero_unpaired",
        precompute_ref_logps=False,
        use_liger_kernel=False,
        **settings,
    )
    stub._compute_kl_logps = MethodType(KTOTrainer._compute_kl_logps, stub)
    inputs: dict[str, Tensor] = {"label": given["desirable_mask"].bool()}
    for prefix, mask, first in (("", given["mask"], 0), ("KL_", given["mismatched_mask"], 1)):
        ids = torch.zeros(len(mask), mask.shape[1] + 1, dtype=torch.long)
        ids[:, 0] = first  # which nothing predicts
        inputs |= {f"{prefix}input_ids": ids, f"{prefix}attention_mask": torch.ones_like(ids)}
        inputs[f"{prefix}completion_mask"] = torch.cat([torch.zeros_like(mask[:, :1]), mask], 1)
    return KTOTrainer._compute_loss(stub, models[0], inputs, False), stub


def kto_case(name: str, seed: int, labels: list[int], *, above: bool = True, **knobs: Any) -> Case:
    """`above`: mismatched answers are likelier under the policy than the reference, so the reference point is not 0."""
    generator = torch.Generator().manual_seed(seed)
    mask, mismatched = torch.tensor(MATCHED), torch.tensor(MISMATCHED)
    reference, other = logprobs(generator, 2, *mask.shape)
    policy = near(generator, reference, 0.8)
    shifted = near(generator, other + (0.2 if above else -0.5), 0.1)
    given = {
        "mask": mask,
        "mismatched_mask": mismatched,
        "desirable_mask": torch.tensor(labels),
        "policy": policy,
        "reference": reference,
        "policy_mismatched": shifted,
        "reference_mismatched": other,
    }
    settings = {"loss_type": "kto", "desirable_weight": 1.0, "undesirable_weight": 1.0} | knobs
    leaf = policy.clone().requires_grad_()
    loss, stub = kto(given, leaf, settings)
    (gradient,) = torch.autograd.grad(loss, leaf)
    sides = [side for side, label in (("chosen", 1), ("rejected", 0)) if label in labels]
    metrics = ["kl", "entropy", *(f"{what}/{side}" for what in ("rewards", "logps", "logits") for side in sides)]
    return Case(
        name=name,
        oracle="A",
        version=VERSION,
        call="KTOTrainer._compute_loss",
        seed=seed,
        settings=settings,
        inputs={**{key: value for key, value in settings.items() if key != "loss_type"}, **given},
        expected={
            "loss": loss.detach(),
            "grad": (gradient * mask).sum(1) / mask.sum(1),  # the same at every token, because it enters as a sum
            **metrics_of(stub, *metrics),
        },
    )


def kto_cases() -> list[Case]:
    mixed = [1, 0, 0, 1]
    return [
        kto_case("kto", 61, mixed, beta=0.1),
        kto_case("kto_weights", 62, mixed, beta=0.3, desirable_weight=1.5, undesirable_weight=0.7),
        kto_case("kto_below", 63, mixed, above=False, beta=0.3),
        kto_case("kto_good_alone", 64, [1, 1, 1, 1], beta=0.3),
        kto_case("kto_bad_alone", 65, [0, 0, 0, 0], beta=0.3, undesirable_weight=2.0),
        kto_case("apo_zero_unpaired", 66, mixed, beta=0.3, loss_type="apo_zero_unpaired", desirable_weight=1.5),
    ]


# ---- the GRPO family and RLOO: the loss


def answers(seed: int) -> dict[str, Tensor]:
    """Masks, advantages of both signs and log-probabilities: policy l, rollout o, reference f (spec: alignment)."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.tensor(ANSWERS)
    old = logprobs(generator, *mask.shape)
    return {
        "mask": mask,
        "advantages": torch.tensor([0.8, -1.3, -0.6, 1.1]),
        "policy": near(generator, old, 0.5),
        "old": old,
        "reference": near(generator, old, 0.5),
    }


def group_stub(trainer: type, **attributes: Any) -> SimpleNamespace:
    stub = stand_in(model_kwarg_keys=(), **{"temperature": 1.0} | attributes)
    stub._get_per_token_logps_and_entropies = MethodType(trainer._get_per_token_logps_and_entropies, stub)
    return stub


def tokens_of(mask: Tensor) -> dict[str, Tensor]:
    """Token ids of answers and a prompt of one token."""
    prompt, ids = torch.zeros(len(mask), 1, dtype=torch.long), torch.zeros_like(mask)
    return {"prompt_ids": prompt, "prompt_mask": prompt + 1, "completion_ids": ids}


def grpo_case(name: str, seed: int, *, beta: float, low: float, high: float, **settings: Any) -> Case:
    drawn = answers(seed)
    settings = {
        "importance_sampling_level": "token",
        "beta": beta,
        "epsilon_low": low,
        "epsilon_high": high,
        "use_bias_correction_kl": False,
        "max_completion_length": 9,
        **settings,
    }
    leaf = drawn["policy"].clone().requires_grad_()
    stub = group_stub(
        GRPOTrainer,
        model=Model(leaf),
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        vllm_importance_sampling_correction=False,
        current_gradient_accumulation_steps=1,
        _entropy_bonus_enabled=False,
        **settings,
    )
    stub.args = SimpleNamespace(
        use_bias_correction_kl=settings["use_bias_correction_kl"], delta=None, steps_per_generation=1, report_to=[]
    )
    inputs = {
        **tokens_of(drawn["mask"]),
        "completion_mask": torch.ones_like(drawn["mask"]),
        "tool_mask": drawn["mask"],
        "advantages": drawn["advantages"],
        "old_per_token_logps": drawn["old"],
        "ref_per_token_logps": drawn["reference"],
        "num_items_in_batch": drawn["mask"].sum(),
    }
    loss = GRPOTrainer._compute_loss(stub, Model(two_tokens(leaf)), inputs)
    loss.backward()
    names = [f"clip_ratio/{side}_mean" for side in ("low", "high", "region")] + (["kl"] if beta else [])
    return Case(
        name=name,
        oracle="A",
        version=VERSION,
        call="GRPOTrainer._compute_loss",
        seed=seed,
        settings=settings,
        inputs={"beta": beta, "clip_low": low, "clip_high": high, "max_new": 9, **drawn},
        expected={"loss": loss.detach(), "grad_policy": leaf.grad, **metrics_of(stub, *names)},
    )


def rloo_case(name: str, seed: int, *, low: float, high: float) -> Case:
    drawn = answers(seed)
    leaf = drawn["policy"].clone().requires_grad_()
    settings = {"epsilon_low": low, "epsilon_high": high}
    stub = group_stub(RLOOTrainer, model=Model(leaf), **settings)
    inputs = {
        **tokens_of(drawn["mask"]),
        "completion_mask": drawn["mask"],
        "advantages": drawn["advantages"],
        "old_logps": (drawn["old"] * drawn["mask"]).sum(1),
    }
    loss = RLOOTrainer._compute_loss(stub, Model(two_tokens(leaf)), inputs)
    loss.backward()
    names = [f"clip_ratio/{side}_mean" for side in ("low", "high", "region")]
    del drawn["reference"]
    return Case(
        name=name,
        oracle="A",
        version=VERSION,
        call="RLOOTrainer._compute_loss",
        seed=seed,
        settings=settings,
        inputs={"clip_low": low, "clip_high": high, **drawn},
        expected={"loss": loss.detach(), "grad_policy": leaf.grad, **metrics_of(stub, *names)},
    )


def temperature_case(seed: int, temperature: float) -> Case:
    """Log-probabilities and entropies of logits at a temperature, as l, o and f are in RL."""
    generator = torch.Generator().manual_seed(seed)
    logits, ids = draw(generator, 2, 4, 5, low=-3, high=3), torch.randint(5, (2, 4), generator=generator)
    stub = group_stub(GRPOTrainer, temperature=temperature, _entropy_bonus_enabled=False)
    padded, rows = torch.cat([logits, torch.zeros(2, 1, 5)], 1), torch.cat([ids[:, :1], ids], 1)
    logps, entropies, _ = stub._get_per_token_logps_and_entropies(
        Model(padded), rows, torch.ones_like(rows), 4, compute_entropy=True
    )
    return Case(
        name=f"temperature_{temperature}",
        oracle="A",
        version=VERSION,
        call="GRPOTrainer._get_per_token_logps_and_entropies",
        seed=seed,
        settings={"temperature": temperature},
        inputs={"temperature": temperature, "logits": logits, "ids": ids},
        expected={"logprobs": logps, "entropies": entropies},
    )


# ---- the GRPO family and RLOO: the advantages


def advantages(
    trainer: type, rewards: Tensor, weights: Tensor, stub: SimpleNamespace, lengths: list[int]
) -> dict[str, Tensor]:
    """Run `_generate_and_score_completions` with sampled answers of these lengths and rewards (N, K)."""
    count = len(rewards)
    ids, texts = [[0] * length for length in lengths], [""] * count
    sampled = (
        ([[0]] * count, ids, texts)
        if trainer is RLOOTrainer
        else ([[0]] * count, ids, None, texts, None, {}, None, None)
    )
    fixed = SimpleNamespace(
        _generate=lambda _: sampled,
        _calculate_rewards=lambda *_: rewards.clone(),
        reward_weights=weights,
        reward_func_names=[str(k) for k in range(rewards.shape[1])],
        num_iterations=1,
        args=SimpleNamespace(
            per_device_train_batch_size=count,
            gradient_checkpointing_kwargs=None,
            steps_per_generation=1,
            gradient_accumulation_steps=1,
        ),
        processing_class=SimpleNamespace(batch_decode=lambda ids, **_: [""] * len(ids)),
        _tokenizer=SimpleNamespace(pad_token_id=0),
        pad_to_multiple_of=None,
        mask_truncated_completions=False,
        environment_factories=None,
        environments=None,
        tools=None,
        use_vllm=False,
        log_multimodal=False,
        _pending_extra_logs={},
        _pending_metrics={},
        _logs=defaultdict(list, rewards=defaultdict(list)),
    )
    vars(stub).update(vars(fixed))
    return trainer._generate_and_score_completions(stub, [{"prompt": "x"}] * count)


GROUP_METRICS = ("reward", "reward_std", "frac_reward_zero_std")
# four groups of four: spread out; all equal; one answer that could not be scored; only one that could
SCORES = [[1.0, 0.0, 0.5, 2.5], [1.0, 1.0, 1.0, 1.0], [0.3, NAN, -0.2, 0.9], [NAN, NAN, 0.7, NAN]]


def group_case(name: str, scale: str, scores: list[list[float]], weights: list[float]) -> Case:
    """A row of `scores` is a group of answers or, with several weights, an answer's parts; four answers per group."""
    parts = torch.tensor(scores).reshape(-1, len(weights))
    settings = {"scale_rewards": scale, "num_generations": 4, "multi_objective_aggregation": "sum_then_normalize"}
    stub = group_stub(GRPOTrainer, model=Model(torch.zeros(1)), beta=0.0, **settings)
    found = advantages(GRPOTrainer, parts, torch.tensor(weights), stub, [2] * len(parts))
    total = {"parts": parts, "weights": weights} if len(weights) > 1 else {"rewards": parts[:, 0]}
    return Case(
        name=name,
        oracle="A",
        version=VERSION,
        call="GRPOTrainer._generate_and_score_completions",
        seed=None,
        settings=settings,
        inputs={"samples": 4, **total},
        expected={"advantages": found["advantages"], **metrics_of(stub, *GROUP_METRICS)},
    )


def leave_one_out_case(name: str, seed: int, beta: float) -> Case:
    generator = torch.Generator().manual_seed(seed)
    lengths = [5, 3, 1, 4, 2, 5, 5, 3]
    old = logprobs(generator, len(lengths), 5)
    reference = near(generator, old, 0.6)
    rewards = torch.tensor([1.0, 0.0, NAN, 2.5, 0.5, 0.5, 0.5, -1.0])
    settings = {"beta": beta, "num_generations": 4, "normalize_advantages": False, "reward_clip_range": None}
    models = {"model": Model(two_tokens(old)), "ref_model": Model(two_tokens(reference))}
    stub = group_stub(RLOOTrainer, **models, **settings)
    found = advantages(RLOOTrainer, rewards[:, None], torch.ones(1), stub, lengths)
    given = {"old": old, "reference": reference, "mask": found["completion_mask"]} if beta else {}
    names = (*GROUP_METRICS, "kl") if beta else GROUP_METRICS
    return Case(
        name=name,
        oracle="A",
        version=VERSION,
        call="RLOOTrainer._generate_and_score_completions",
        seed=seed,
        settings=settings,
        inputs={"samples": 4, "beta": beta, "rewards": rewards, **given},
        expected={"advantages": found["advantages"], **metrics_of(stub, *names)},
    )


def grpo_cases() -> list[Case]:
    parts = [[1.0, -0.5], [0.0, 1.0], [0.5, 0.2], [1.0, 1.0], [0.25, -1.0], [0.75, 0.0], [0.0, 0.4], [0.0, -0.8]]
    return [
        grpo_case("grpo", 31, beta=0.01, low=0.2, high=0.2, loss_type="grpo"),
        grpo_case("grpo_no_kl", 32, beta=0.0, low=0.2, high=0.2, loss_type="grpo"),
        grpo_case("dr_grpo", 33, beta=0.0, low=0.2, high=0.2, loss_type="dr_grpo"),
        grpo_case("dapo", 34, beta=0.0, low=0.2, high=0.28, loss_type="dapo"),
        grpo_case("dapo_kl", 35, beta=0.05, low=0.2, high=0.28, loss_type="dapo"),
        grpo_case("bnpo", 36, beta=0.0, low=0.2, high=0.2, loss_type="bnpo"),
        grpo_case("gspo", 55, beta=0.0, low=0.03, high=0.04, loss_type="grpo", importance_sampling_level="sequence"),
        grpo_case(
            "gspo_kl", 56, beta=0.05, low=0.03, high=0.04, loss_type="grpo", importance_sampling_level="sequence"
        ),
        group_case("advantages_group", "group", SCORES, [1.0]),
        group_case("advantages_none", "none", SCORES, [1.0]),
        group_case("advantages_weighted", "group", parts, [2.0, 0.5]),
        temperature_case(41, 0.7),
        temperature_case(42, 1.0),
    ]


def rloo_cases() -> list[Case]:
    return [
        rloo_case("loss", 57, low=0.2, high=0.2),
        rloo_case("loss_asymmetric", 82, low=0.1, high=0.6),
        leave_one_out_case("advantages", 53, 0.05),
        leave_one_out_case("advantages_no_kl", 54, 0.0),
    ]


def cases() -> dict[str, list[Case]]:
    return {
        "distill": distill_cases(),
        "reward": reward_cases(),
        "dpo": dpo_cases(),
        "kto": kto_cases(),
        "grpo": grpo_cases(),
        "rloo": rloo_cases(),
    }
