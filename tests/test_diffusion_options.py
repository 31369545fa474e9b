"""Keys of the masked-diffusion stages: each changes what it should, and presets are what they claim to be."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.diffusion.training import DiffusionConfig, Following
from pipeline.evaluation import solving
from pipeline.learning.pretraining import Phases
from pipeline.rl.answers import Prompt
from pipeline.run.config import Settings, stage_params
from pipeline.run.device import stable_hash
from pipeline.run.errors import DataError
from pipeline.run.tracking import Tracker
from stages import diffusion_grpo
from tests.conftest import ROOT
from tests.diffusion_models import model
from tests.diffusion_rollouts import PROBLEM
from tests.diffusion_workspace import arguments
from tests.diffusion_workspace import masked_workspace as masked_workspace
from tests.loop import job
from tests.settings import flat
from tests.workspace import Workspace, command

pytestmark = [pytest.mark.slow, pytest.mark.full]  # nearly all of them train


def ran(masked: Workspace, stage: str, **changes: Any) -> list[dict[str, str]]:
    ended = command(stage, arguments(stage, {"runtime.logging_steps": 1} | changes))
    assert ended.code == 0, ended.said
    return masked.curve(stage)


def told(rows: list[dict[str, str]], name: str, phase: str = "") -> list[float]:
    return [float(row[name]) for row in rows if row.get(name) and (not phase or row["phase"] == phase)]


# -- diffusion ---------------------------------------------------------------------------------------------------------


def test_fine_tuning_may_have_rates_and_a_warm_up_of_its_own(masked: Workspace) -> None:
    rows = ran(
        masked,
        "diffusion",
        schedule="constant",
        sft_learning_rate=5e-4,
        sft_learning_rates={"embedding": 2e-4},
        sft_warmup_steps=2,
        learning_rates={"embedding": 3e-3},
    )
    assert told(rows, "lr", "adapt") == [1e-3] * 3 and told(rows, "lr", "sft") == [2.5e-4, 5e-4, 5e-4]
    assert told(rows, "lr/embedding", "adapt") == [3e-3] * 3 and told(rows, "lr/embedding", "sft") == [1e-4, 2e-4, 2e-4]
    assert told(rows, "control/lr", "control_sft") == [2.5e-4, 5e-4, 5e-4]


@pytest.mark.parametrize(
    ("key", "value", "phase"),
    [
        ("anneal_fraction", 0.0, "adapt"),
        ("t_scope", "batch", "adapt"),
        ("token_weight", "cart", "adapt"),
        ("sft_norm", "tokens", "sft"),
        ("sft_norm", "batch", "sft"),
        ("sft_examples", 6, "sft"),
        ("tokens_per_step", 512, "adapt"),
        ("max_new_tokens", 160, "sft"),
    ],
)
def test_a_key_changes_the_loss_of_its_phase(masked: Workspace, key: str, value: Any, phase: str) -> None:
    before, after = (told(ran(masked, "diffusion", **more), "loss", phase) for more in ({}, {key: value}))
    assert before[0] != after[0]


def test_the_reach_of_cart_weights_changes_them(masked: Workspace) -> None:
    one, two = (told(ran(masked, "diffusion", token_weight="cart", cart_p=p), "loss", "adapt") for p in (0.3, 0.6))
    assert one[0] != two[0]


# -- diffusion_dpo -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value", "name"),
    [
        ("diffusion_steps", 1, "nelbo/chosen"),
        ("timesteps", "independent", "nelbo/chosen"),
        ("beta", 1.0, "rewards/margins"),
        ("sft_weight", 1.0, "loss"),
        ("dpo_reduction", "mean", "rewards/margins"),
    ],
)
def test_a_key_of_dpo_changes_what_it_should(masked: Workspace, key: str, value: Any, name: str) -> None:
    before, after = (told(ran(masked, "diffusion_dpo", **more), name) for more in ({}, {key: value}))
    assert before != after


def test_held_out_pairs_are_measured_by_as_many_masks_as_asked(masked: Workspace) -> None:
    found = []
    for draws in (1, 4):
        ran(masked, "diffusion_dpo", eval_draws=draws)
        found.append(masked.numbers("diffusion_dpo")["test"]["margin"])
    assert found[0] != found[1]


def test_pairs_of_some_kinds_alone_are_read(masked: Workspace) -> None:
    ran(masked, "diffusion_dpo", kinds=["story"])
    assert masked.numbers("diffusion_dpo")["test"]["n"] == 6


# -- diffusion_grpo ----------------------------------------------------------------------------------------------------


def params(**changes: Any) -> diffusion_grpo.Params:
    settings = Settings(
        ROOT, ["scale=smoke", *(f"diffusion_grpo.{key}={json.dumps(value)}" for key, value in changes.items())]
    )
    return stage_params("diffusion_grpo", settings)


@pytest.mark.parametrize(
    ("key", "value", "field", "expected"),
    [
        ("denoising_steps", 12, "steps", 12),
        ("top_p", 0.5, "top_p", 0.5),
        ("order", "margin", "order", "margin"),
        ("denoising_schedule", "dream", "schedule", "dream"),
        ("confidence", "tempered", "confidence", "tempered"),
        ("temperature", 0.7, "temperature", 0.7),
        ("max_new_tokens", 48, "length", 48),
        ("threshold", 0.9, "threshold", 0.9),
    ],
)
def test_completions_are_sampled_as_the_block_says(
    key: str, value: Any, field: str, expected: Any, in_repository: Path
) -> None:
    before, after = params().sampling, params(**{key: value}).sampling
    assert getattr(after, field) == expected != getattr(before, field)
    assert {k for k, v in asdict(before).items() if v != getattr(after, k)} == {field}


@pytest.mark.parametrize(
    ("key", "value", "path", "expected"),
    [
        ("advantage", "mean", "advantage", "centered"),
        ("clip_low", 0.1, "clip.low", 0.1),
        ("clip_high", 0.3, "clip.high", 0.3),
        ("beta", 0.2, "beta", 0.2),
    ],
)
def test_the_loss_is_formed_as_the_block_says(
    key: str, value: Any, path: str, expected: Any, in_repository: Path
) -> None:
    found: Any = params(**{key: value}).method
    for name in path.split("."):
        found = getattr(found, name)
    assert found == expected
    assert params().method.normalizer == "tokens" and params().method.advantage == "others"


@pytest.mark.parametrize(
    ("key", "value"), [("estimator", "released"), ("t_scope", "batch"), ("ref_sync", 0), ("epochs", 1)]
)
def test_a_key_of_grpo_changes_what_it_learns(masked: Workspace, key: str, value: Any) -> None:
    # `ref_sync` shows only in the divergence, and only from the second iteration on
    def learnt(**more: Any) -> dict[str, str]:
        ran(masked, "diffusion_grpo", **{"iterations": 3} | more)
        return {path: digest for path, digest in masked.published().items() if "models/diffusion_grpo/model" in path}

    assert learnt() != learnt(**{key: value})


def prompts(count: int) -> list[Prompt]:
    return [
        Prompt(str(n), [4, 5], "code", replace(PROBLEM, id=str(n), group="easy" if n % 2 else "hard"))
        for n in range(count)
    ]


class Solves:
    """A setting whose policy solves problem n in n of its 8 samples, spread out, and which counts its requests."""

    def __init__(self) -> None:
        self.ranks = type("Ranks", (), {"rank": 0, "world": 1, "gather": staticmethod(lambda value: [value])})
        self.asked = 0

    def held_out(self, asked: list[tuple[Prompt, int]], *, purpose: str) -> list[Any]:
        assert purpose == "frontier"
        self.asked += len(asked)
        return [type("Answer", (), {"passes": number * 5 % 8 < int(prompt.id)}) for prompt, number in asked]


@pytest.fixture
def verdicts(monkeypatch: pytest.MonkeyPatch) -> Any:
    def judged(judge: Any, given: list[Any]) -> list[Any]:
        return [type("Verdict", (), {"verdict": "passed" if one.passes else "wrong"}) for one in given]

    monkeypatch.setattr(solving, "judged", judged)
    return object()


def test_the_frontier_is_what_is_solved_sometimes_and_is_asked_once(tmp_path: Path, verdicts: Any) -> None:
    setting = Solves()
    for _ in range(2):  # the second time like a resumed run, which finds what it had
        found = solving.chosen(prompts(9), "frontier", 100, setting, verdicts, tmp_path)
        assert sorted(int(prompt.id) for prompt in found) == [2, 3, 4, 5, 6]  # 0.25 to 0.75
        assert setting.asked == 2 * 4 + 7 * 8  # four show what is never or always solved
    few = solving.chosen(prompts(9), "frontier", 4, setting, verdicts, tmp_path / "other")
    first = sorted(prompts(9), key=lambda prompt: stable_hash("frontier", prompt.id))[:4]
    assert {p.id for p in few} == {p.id for p in first if 2 <= int(p.id) <= 6}


def test_what_four_samples_decide_is_asked_no_further_and_left_out(tmp_path: Path, verdicts: Any) -> None:
    """Solved in 4 of 8 samples but in none of the first four: one in 35 such problems is given up like this."""

    class Late(Solves):
        def held_out(self, asked: list[tuple[Prompt, int]], *, purpose: str) -> list[Any]:
            super().held_out(asked, purpose=purpose)
            late = {"2": lambda number: number > 3, "5": lambda number: number % 2}
            return [type("Answer", (), {"passes": bool(late[prompt.id](number))}) for prompt, number in asked]

    setting = Late()
    some = [prompt for prompt in prompts(9) if prompt.id in ("2", "5")]
    assert [p.id for p in solving.chosen(some, "frontier", 9, setting, verdicts, tmp_path)] == ["5"]
    assert setting.asked == 4 + 8


def test_other_difficulties_are_all_or_a_group(tmp_path: Path, verdicts: Any) -> None:
    assert len(solving.chosen(prompts(5), "all", 1, None, None, tmp_path)) == 5
    assert [p.id for p in solving.chosen(prompts(5), "easy", 1, None, None, tmp_path)] == ["1", "3"]
    with pytest.raises(DataError, match="`frontier` needs the sandbox"):
        solving.chosen(prompts(5), "frontier", 1, None, None, tmp_path)
    with pytest.raises(DataError, match="0 of 2 problems are solved by 20% to 80% of 8 samples"):
        solving.chosen(prompts(2), "frontier", 10, Solves(), verdicts, tmp_path)


def test_a_reference_follows_the_policy_and_comes_back_from_its_file(tmp_path: Path) -> None:
    policy, reference = model(seed=1), model(seed=0)
    start = [p.detach().clone() for p in reference.parameters()]
    follows = Following(reference, policy, every=4, folder=tmp_path)
    for step in (0, 2):
        follows.before(step)
    assert all(torch.equal(a, b) for a, b in zip(start, reference.parameters(), strict=True))
    follows.before(4)
    follows.before(6)
    for before, own, theirs in zip(start, reference.parameters(), policy.parameters(), strict=True):
        torch.testing.assert_close(own, 0.4 * before + 0.6 * theirs)
    again = Following(model(seed=0), policy, every=4, folder=tmp_path)
    again.load(follows.state())
    assert all(torch.equal(a, b) for a, b in zip(again.model.parameters(), reference.parameters(), strict=True))
    for step in (8, 12, 16):
        follows.before(step)
    (tmp_path / "step-00000012").mkdir()
    follows.before(20)
    kept = sorted(path.name for path in (tmp_path / "parts").iterdir())
    assert kept == [f"reference-{step:08d}.safetensors" for step in (12, 16, 20)]


# -- the control, presets, phases --------------------------------------------------------------------------------------

TABLE: dict[tuple[str, str], dict[str, Any]] = {
    ("diffusion", "paper"): {
        "adapt_steps": 100_000,
        "learning_rate": 2e-5,
        "warmup_steps": 20_000,
        "schedule": "cosine",
        "min_ratio": 0.1,
        "sft_learning_rate": 1e-5,
        "sft_epochs": 5,
    },
    ("diffusion", "document"): {
        "sft_learning_rate": 1e-6,
        "sft_epochs": 3,
        "sft_examples": 16,
        "schedule": "cosine",
        "betas": [0.9, 0.999],
        "weight_decay": 0.1,
        "max_grad_norm": 1.0,
    },
    ("diffusion_dpo", "paper"): {
        "diffusion_steps": 8,
        "beta": 0.2,
        "sft_weight": 0.05,
        "learning_rate": 5e-7,
        "warmup_steps": 15,
        "schedule": "cosine",
        "epochs": 1.0,
        "pairs": 64,
        "betas": [0.9, 0.95],
        "weight_decay": 0.01,
    },
    ("diffusion_dpo", "document"): {
        "diffusion_steps": 20,
        "beta": 0.1,
        "sft_weight": 0.0,
        "learning_rate": 5e-6,
        "epochs": 3.0,
        "pairs": 16,
    },
    ("diffusion_grpo", "paper"): {
        "learning_rate": 1e-6,
        "schedule": "cosine",
        "min_ratio": 0.1,
        "warmup_ratio": 1e-4,
        "betas": [0.9, 0.99],
        "weight_decay": 0.1,
        "max_grad_norm": 0.2,
        "prompts": 8,
        "samples": 10,
        "epochs": 2,
        "beta": 0.01,
        "clip_low": 0.5,
        "clip_high": 0.5,
        "max_prompt": 200,
        "max_new_tokens": 256,
        "denoising_steps": 256,
        "temperature": 1.2,
        "top_p": 0.95,
        "order": "entropy",
        "ref_sync": 64,
        "passes": 1.0,
        "estimator": "released",
        "t_scope": "batch",
        "advantage": "mean",
        "denoising_schedule": "dream",
        "confidence": "tempered",
    },
    ("diffusion_grpo", "document"): {
        "learning_rate": 1e-6,
        "schedule": "cosine",
        "warmup_ratio": 0.1,
        "betas": [0.9, 0.999],
        "weight_decay": 0.1,
        "max_grad_norm": 1.0,
        "prompts": 2,
        "samples": 10,
        "epochs": 2,
        "beta": 0.01,
        "max_prompt": 512,
        "max_new_tokens": 512,
        "denoising_steps": 512,
        "temperature": 1.2,
        "top_p": 0.95,
        "ref_sync": 64,
        "passes": 1.0,
        "estimator": "normalized",
    },
}


def diffusion_config(**changes: Any) -> DiffusionConfig:
    values: dict[str, Any] = {
        "adapt_steps": 700,
        "context": 64,
        "tokens_per_step": 128,
        "sft_epochs": 8,
        "sft_examples": 16,
        "max_prompt": 32,
        "max_new_tokens": 32,
        "learning_rate": 1e-3,
        "warmup_steps": 20,
    }
    return flat(DiffusionConfig, **values | changes)


def test_the_control_has_at_most_its_own_steps_and_a_whole_schedule_over_them() -> None:
    config = diffusion_config(control_steps=300)
    epoch = 5_000 * 64  # tokens of 5,000 problems: 2,500 steps are eight passes
    assert config.adapting.resolve_steps(0) == 700 and config.tuning.resolve_steps(epoch) == 2_500
    for own in (config.control_adapting, config.control_tuning):
        assert own.resolve_steps(epoch) == 300
        assert own.factor(0, 300) < own.factor(19, 300) == 1.0  # the warm-up is as long
        assert own.factor(299, 300) == pytest.approx(0.1, abs=1e-3)
    assert config.control_tuning.resolve_steps(100 * 64) == 50  # fewer if an epoch has fewer


def test_without_a_bound_the_control_trains_as_the_masked_model_does() -> None:
    config = diffusion_config()
    assert config.control_adapting == config.adapting and config.control_tuning == config.tuning


def test_a_long_warm_up_leaves_the_control_half_of_its_steps() -> None:
    config = diffusion_config(warmup_steps=20_000, sft_warmup_steps=5, control_steps=300)
    assert config.adapting.warmup_steps == 20_000
    assert config.control_adapting.warmup_steps == 150 and config.control_tuning.warmup_steps == 5


def test_a_control_without_steps_is_refused() -> None:
    with pytest.raises(
        ValueError, match="control_steps: expected at least 1, or `none` for as many steps as the masked model, got 0"
    ):
        diffusion_config(control_steps=0)


@pytest.mark.parametrize(("stage", "preset"), TABLE)
@pytest.mark.parametrize("scale", ["demo", "cluster"])
def test_a_preset_builds_and_has_the_numbers_of_its_table(
    stage: str, preset: str, scale: str, in_repository: Path
) -> None:
    built = asdict(stage_params(stage, Settings(ROOT, [f"scale={scale}", f"{stage}.preset={preset}"])))
    flat = {
        key: value
        for entry in (built, *(v for v in built.values() if isinstance(v, dict)))
        for key, value in entry.items()
    }
    for key, expected in TABLE[stage, preset].items():
        found = list(flat[key]) if isinstance(flat[key], tuple) else flat[key]
        assert found == pytest.approx(expected) if isinstance(expected, float) else found == expected, key


def test_phases_count_their_steps_on_and_keep_their_own_numbers(tmp_path: Path) -> None:
    whole = replace(job(tmp_path), tracker=Tracker("toy", tmp_path, {}, {}, quiet=True))
    phases = Phases(whole)
    first = phases.begin("adapt")
    first.tracker.log(0, {"val/loss": 3.0})
    first.tracker.log(2, {"loss": 2.0})
    first.report(steps=2)
    second = phases.begin("sft", prefix="control/")
    second.tracker.log(0, {"val/loss": 5.0})
    second.tracker.log(3, {"loss": 1.0})
    second.report(steps=3)
    assert [(row["step"], row["phase"]) for row in whole.tracker.rows] == [(0, "adapt"), (2, "adapt"), (5, "sft")]
    assert whole.tracker.rows[1]["loss"] == 2.0 and whole.tracker.rows[1]["control/val/loss"] == 5.0
    assert whole.tracker.rows[2]["control/loss"] == 1.0
    assert whole.tracker.final == {"adapt": {"steps": 2}, "sft": {"steps": 3}}
    assert (
        first.folder != second.folder
        and second.name.endswith("sft")
        and np.isfinite(float(second.tracker.rows[0]["step"]))
    )
    second.tracker.restore([{"step": 0, "val/loss": 5.0}])  # type: ignore[attr-defined]
    assert [row["step"] for row in whole.tracker.rows] == [0, 2]
