"""Oracle B, trl 0.11.4: PPO, and what 1.12.0 lacks of the DPO family: cdpo, simpo, no reference.

The trainers are never built; their methods run on stubs that hold the attributes they read. That version does not
support masked tokens inside an answer: its advantages would be discounted once more at each. It is therefore given the
rows without their masked tokens, and its numbers are put back where the policy's tokens were, with 0 elsewhere.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from case import Case, draw, logprobs, near
from torch import Tensor
from trl import CPOTrainer, DPOTrainer, PPOTrainer
from trl.core import masked_whiten
from trl.trainer.utils import AdaptiveKLController

VERSION = "0.11.4"
ALONE = SimpleNamespace(device=torch.device("cpu"))

CHOSEN = [[0, 1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 0, 0], [1, 1, 0, 0, 1, 1, 0], [0, 0, 0, 0, 1, 0, 0]]
REJECTED = [[0, 1, 1, 1, 0, 0, 0], [0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 0, 1, 0, 0], [0, 0, 0, 0, 1, 1, 1]]
RAGGED = [[1, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0, 0, 0], [1, 0, 0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1, 0, 0]]
# a prompt before the answer, a tool's tokens inside it, both, and padding
HOLES = [[0, 0, 1, 1, 1, 1, 1, 1], [1, 1, 0, 0, 1, 1, 0, 0], [0, 1, 1, 0, 1, 0, 0, 1], [1, 0, 1, 0, 0, 0, 0, 0]]


def policy_only(mask: Tensor, *rows: Tensor) -> tuple[Tensor, ...]:
    """The mask and rows with the policy's tokens moved to the front, in order."""
    order = mask.argsort(dim=1, descending=True, stable=True)
    return tuple(row.gather(1, order) for row in (mask, *rows))


def put_back(mask: Tensor, front: Tensor) -> Tensor:
    """The inverse, for results: 0 where the mask is 0."""
    order = mask.argsort(dim=1, descending=True, stable=True)
    return torch.zeros_like(front).scatter(1, order, front) * mask


# ---- PPO


def rewards_case(name: str, seed: int, masks: list[list[int]], beta: float) -> Case:
    generator, mask = torch.Generator().manual_seed(seed), torch.tensor(masks)
    old = logprobs(generator, *mask.shape)
    reference, scores = near(generator, old, 0.6), draw(generator, len(mask), low=-2, high=2)
    config = SimpleNamespace(kl_penalty="kl")
    stub = SimpleNamespace(config=config, kl_ctl=SimpleNamespace(value=beta))
    stub._kl_penalty = lambda *pair: PPOTrainer._kl_penalty(stub, *pair)
    front, *rows = policy_only(mask, old, reference)
    rewards, penalties, kls = PPOTrainer.compute_rewards(stub, scores, *rows, front)
    return Case(
        name=name,
        oracle="B",
        version=VERSION,
        call="PPOTrainer.compute_rewards",
        seed=seed,
        settings={"kl_penalty": "kl"},
        inputs={"beta": beta, "scores": scores, "old": old, "reference": reference, "mask": mask},
        expected={
            "rewards": put_back(mask, rewards),
            "penalties": put_back(mask, penalties),
            "kl": (kls * front).sum(1),
        },
    )


def advantages_case(name: str, seed: int, masks: list[list[int]], gamma: float, lam: float) -> Case:
    generator, mask = torch.Generator().manual_seed(seed), torch.tensor(masks)
    rewards, values = draw(generator, *mask.shape), draw(generator, *mask.shape)
    config = SimpleNamespace(gamma=gamma, lam=lam, whiten_rewards=False)
    front, *rows = policy_only(mask, values, rewards)
    _, advantages, returns = PPOTrainer.compute_advantages(SimpleNamespace(config=config), *rows, front)
    return Case(
        name=name,
        oracle="B",
        version=VERSION,
        call="PPOTrainer.compute_advantages",
        seed=seed,
        settings=vars(config),
        inputs={"gamma": gamma, "lam": lam, "rewards": rewards, "values": values, "mask": mask},
        expected={"advantages": put_back(mask, advantages), "returns": put_back(mask, returns)},
    )


def whiten_case(name: str, seed: int, masks: list[list[int]]) -> Case:
    generator, mask = torch.Generator().manual_seed(seed), torch.tensor(masks)
    values = draw(generator, *mask.shape, low=-1, high=3)
    return Case(
        name=name,
        oracle="B",
        version=VERSION,
        call="core.masked_whiten",
        seed=seed,
        settings={"shift_mean": True},
        inputs={"values": values, "mask": mask},
        expected={"whitened": masked_whiten(values, mask) * mask},
    )


def loss_case(name: str, seed: int, masks: list[list[int]], *, moved: float, offset: float = 0.0) -> Case:
    """`moved`: how far the policy is from the rollout, per token; `offset` is added to it (mean ratio above 10)."""
    generator, mask = torch.Generator().manual_seed(seed), torch.tensor(masks)
    old = torch.round(logprobs(generator, *mask.shape) - offset, decimals=4)
    drawn = {
        "old": old,
        "policy": near(generator, torch.round(old + offset, decimals=4), moved),
        "old_values": draw(generator, *mask.shape),
    }
    drawn["values"] = torch.round(drawn["old_values"] + draw(generator, *mask.shape, low=-0.5, high=0.5), decimals=4)
    drawn |= {"advantages": draw(generator, *mask.shape, low=-2, high=2), "returns": draw(generator, *mask.shape)}
    policy, values = drawn["policy"].clone().requires_grad_(), drawn["values"].clone().requires_grad_()
    config = SimpleNamespace(cliprange=0.2, cliprange_value=0.2, vf_coef=0.1, ratio_threshold=10.0)
    policy_loss, value_term, stats = PPOTrainer.loss(
        SimpleNamespace(config=config),
        drawn["old"],
        drawn["old_values"],
        torch.zeros(*mask.shape, 2),
        values,
        policy,
        mask,
        drawn["advantages"],
        drawn["returns"],
    )
    (policy_loss + value_term).backward()
    ratio = torch.exp(policy.detach() - old)
    return Case(
        name=name,
        oracle="B",
        version=VERSION,
        call="PPOTrainer.loss",
        seed=seed,
        settings=vars(config),
        inputs={"clip": 0.2, "clip_value": 0.2, "value_coefficient": 0.1, "max_ratio": 10.0, "mask": mask, **drawn},
        expected={
            "policy_loss": stats["loss/policy"],
            "value_loss": stats["loss/value"],
            "loss": stats["loss/total"],
            "grad_policy": policy.grad,
            "grad_values": values.grad,
            "approxkl": stats["policy/approxkl"],
            "policy_clipfrac": stats["policy/clipfrac"],
            "value_clipfrac": stats["val/clipfrac"],
            "ratio": (ratio * mask).sum() / mask.sum(),
            "value_error": stats["val/error"],
            "return_var": stats["returns/var"],
        },
    )


def controller_case() -> Case:
    controller = AdaptiveKLController(0.05, 6.0, 2000)
    kls, values = [6.0, 6.6, 12.0, 5.1, 0.5, -0.3, 7.0], []
    for kl in kls:
        controller.update(kl, 64)
        values.append(float(controller.value))
    return Case(
        name="controller",
        oracle="B",
        version=VERSION,
        call="AdaptiveKLController.update",
        seed=None,
        settings={},
        inputs={"beta": 0.05, "target": 6.0, "horizon": 2000, "episodes": 64, "kl": kls},
        expected={"beta": values},
    )


def ppo_cases() -> list[Case]:
    return [
        rewards_case("rewards", 61, RAGGED, 0.05),
        rewards_case("rewards_holes", 62, HOLES, 0.2),
        advantages_case("advantages", 63, RAGGED, 1.0, 0.95),
        advantages_case("advantages_holes", 64, HOLES, 1.0, 0.95),
        advantages_case("advantages_discounted", 65, HOLES, 0.9, 0.8),
        whiten_case("whiten", 66, RAGGED),
        whiten_case("whiten_holes", 67, HOLES),
        loss_case("loss", 68, RAGGED, moved=0.5),
        loss_case("loss_holes", 69, HOLES, moved=0.5),
        loss_case("loss_skipped", 70, RAGGED, moved=0.3, offset=3.0),
        controller_case(),
    ]


# ---- the DPO family


def pairs(seed: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The inputs of a case, as with oracle A, and their sums over the answers, which this oracle takes."""
    generator = torch.Generator().manual_seed(seed)
    masks = {"chosen": torch.tensor(CHOSEN), "rejected": torch.tensor(REJECTED)}
    reference = logprobs(generator, 2, *masks["chosen"].shape)
    policy = near(generator, reference, 0.8)
    drawn = {f"{side}_mask": mask for side, mask in masks.items()}
    for who, both in (("policy", policy), ("reference", reference)):
        drawn |= {f"{who}_{side}": row for side, row in zip(masks, both, strict=True)}
    sums = {name: (row * masks[name.split("_")[1]]).sum(1) for name, row in drawn.items() if "mask" not in name}
    return drawn, sums


def result(losses: Tensor, leaves: list[Tensor], rewards: dict[str, Tensor]) -> dict[str, Any]:
    chosen, rejected = torch.autograd.grad(losses.mean(), leaves)
    found: dict[str, Any] = {"losses": losses.detach(), "loss": losses.mean().detach()}
    found |= {"grad_chosen": chosen, "grad_rejected": rejected}
    if rewards:
        found |= {f"rewards/{side}": row.mean() for side, row in rewards.items()}
        found["rewards/margins"] = (rewards["chosen"] - rewards["rejected"]).mean()
        found["rewards/accuracies"] = (rewards["chosen"] > rewards["rejected"]).float().mean()
    return found


def dpo_case(name: str, seed: int, knobs: dict[str, Any]) -> Case:
    """With `reference_free`, that version still subtracts the reference in its reported rewards: left out."""
    drawn, sums = pairs(seed)
    settings = {
        "loss_type": "sigmoid",
        "f_divergence_type": "reverse_kl",
        "label_smoothing": 0.0,
        "reference_free": False,
    }
    settings |= knobs
    leaves = [sums[f"policy_{side}"].requires_grad_() for side in ("chosen", "rejected")]
    losses, chosen, rejected = DPOTrainer.dpo_loss(
        SimpleNamespace(accelerator=ALONE, **settings), *leaves, sums["reference_chosen"], sums["reference_rejected"]
    )
    rewards = {} if settings["reference_free"] else {"chosen": chosen, "rejected": rejected}
    return Case(
        name=name,
        oracle="B",
        version=VERSION,
        call="DPOTrainer.dpo_loss",
        seed=seed,
        settings=settings,
        inputs={**knobs, **drawn},
        expected=result(losses, leaves, rewards),
    )


def simpo_case(seed: int, beta: float, gap: float) -> Case:
    """The oracle takes means per token, and beta times the gap; gradients are with respect to the sums."""
    drawn, sums = pairs(seed)
    settings = {"loss_type": "simpo", "beta": beta, "simpo_gamma": beta * gap, "label_smoothing": 0.0}
    leaves = [sums[f"policy_{side}"].requires_grad_() for side in ("chosen", "rejected")]
    means = [leaf / drawn[f"{side}_mask"].sum(1) for leaf, side in zip(leaves, ("chosen", "rejected"), strict=True)]
    losses, chosen, rejected = CPOTrainer.cpo_loss(SimpleNamespace(accelerator=ALONE, **settings), *means)
    policy = {name: row for name, row in drawn.items() if not name.startswith("reference")}
    return Case(
        name="simpo",
        oracle="B",
        version=VERSION,
        call="CPOTrainer.cpo_loss",
        seed=seed,
        settings=settings,
        inputs={"beta": beta, "gap": gap, **policy},
        expected=result(losses, leaves, {"chosen": chosen, "rejected": rejected}),
    )


def cases() -> dict[str, list[Case]]:
    dpo = [
        dpo_case("cdpo_0.1", 21, {"beta": 0.3, "label_smoothing": 0.1}),
        dpo_case("cdpo_0.4", 22, {"beta": 0.3, "label_smoothing": 0.4}),
        dpo_case("sigmoid_reference_free", 23, {"beta": 0.1, "reference_free": True}),
        simpo_case(24, 2.0, 0.3),
    ]
    return {"ppo": ppo_cases(), "dpo": dpo}
