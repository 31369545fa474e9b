"""Each gate of alignment, broken on purpose in the real stage: exit 3, a line that names it, no update, nothing
published.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.learning import pair_losses, reference
from pipeline.learning.optim import Optimizers
from pipeline.learning.reference import Start
from pipeline.model import checkpoint, lora
from pipeline.model.heads import RewardModel
from pipeline.model.lora import AdaptedLinear
from pipeline.model.transformer import Transformer
from pipeline.rl.answers import Answer
from pipeline.rl.models import CausalSetting, Setting
from pipeline.rl.rollout import RolloutStream
from pipeline.text import chat
from pipeline.text.chat import Rendered
from pipeline.text.tokenizer import Tokenizer
from tests.workspace import SETTINGS, Workspace

pytestmark = [pytest.mark.slow, pytest.mark.full]  # each test runs a stage
ADAPTER = {"rank": 2, "alpha": 4}
TRUE_OF_THE_UNTRAINED = (
    r"above ln V|completions/clipped_ratio is above"  # this workspace's base has learned no language and no end
)


@pytest.fixture
def updates(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The factors of the updates that were made."""
    made: list[float] = []
    original = Optimizers.step

    def step(self: Optimizers, factor: float) -> None:
        made.append(factor)
        original(self, factor)

    monkeypatch.setattr(Optimizers, "step", step)
    return made


def assert_refused(workspace: Workspace, stage: str, message: str, **changes: Any) -> None:
    """The stage exits 3 with the message in its last line, and publishes nothing."""
    before = workspace.published()
    ended = workspace.command(stage, **({"runtime.save_steps": 1} | changes))
    assert ended.code == 3, ended.said
    last = ended.said.strip().splitlines()[-1]
    assert last.startswith(f"stage_{stage}: ")
    assert re.search(message, last), last
    assert workspace.published() == before


@pytest.mark.parametrize("seed", [42, 1, 2, 3, 4])
@pytest.mark.parametrize("stage", SETTINGS)
def test_a_healthy_run_passes_its_gates_without_an_alarm(
    stage: str, seed: int, workspace: Workspace, updates: list[float]
) -> None:
    """Otherwise the tests below would prove nothing."""
    params = workspace.folder / "params.yaml"
    params.write_text(params.read_text().replace("seed: 1\n", f"seed: {seed}\n", 1))
    assert f"seed: {seed}\n" in params.read_text()
    ended = workspace.command(stage)
    assert ended.code == 0, ended.said
    alarms = [line for line in ended.said.splitlines() if re.search("warning|alarm", line.lower())]
    untrained = [line for line in alarms if re.search(TRUE_OF_THE_UNTRAINED, line)]
    assert len(updates) == 4 and alarms == untrained


# before the first update


def mask_all(rendered: Rendered, end: int) -> list[bool]:
    return [True] * len(rendered.ids)


def mask_no_end(rendered: Rendered, end: int) -> list[bool]:
    return [trained and id_ != end for id_, trained in zip(rendered.ids, rendered.trained, strict=True)]


@pytest.mark.parametrize("fault", [mask_all, mask_no_end])
def test_a_mask_that_trains_more_or_less_than_the_assistant_says_stops(
    fault: Callable[[Rendered, int], list[bool]],
    workspace: Workspace,
    updates: list[float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original, end = chat.render, workspace.tokenizer.turn_end

    def render(*given: Any, **more: Any) -> Rendered:
        rendered = original(*given, **more)
        return replace(rendered, trained=fault(rendered, end))

    monkeypatch.setattr(chat, "render", render)
    assert_refused(
        workspace, "lora", r"gate mask: expected the first batch to train on the assistant's text: '.*left.*'; found '"
    )
    assert updates == [] == workspace.states("lora")


def test_a_reward_head_that_does_not_start_at_zero_stops(
    workspace: Workspace, updates: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = RewardModel.__init__

    def drawn(self: RewardModel, trunk: Transformer) -> None:
        original(self, trunk)
        torch.nn.init.constant_(self.score.weight, 0.1)

    monkeypatch.setattr(RewardModel, "__init__", drawn)
    assert_refused(
        workspace, "reward", r"gate ranking: expected 0\.69314718 to within 1e-05, found .*head does not start at zero"
    )
    assert updates == [] == workspace.states("reward")


@pytest.mark.parametrize(("chosen", "rejected"), [(1.0, 0.0), (0.5, 0.5)])
@pytest.mark.parametrize("loss", ["sigmoid", "ipo", "apo_zero"])
def test_stale_sums_of_the_reference_stop_dpo(
    loss: str,
    chosen: float,
    rejected: float,
    workspace: Workspace,
    updates: list[float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From another model: off by a nat in one answer, or by half a nat in both, which the loss alone may not show."""
    original = pair_losses.reference_sums

    def stale(*given: Any) -> dict[str, np.ndarray]:
        return {name: sums + np.array([chosen, rejected], dtype=np.float32) for name, sums in original(*given).items()}

    monkeypatch.setattr(pair_losses, "reference_sums", stale)
    assert_refused(
        workspace,
        "dpo",
        r"gate (preference|rewards/chosen): expected .* precomputed sums are stale",
        loss=loss,
        nll_weight=0.2,
        precompute_reference=True,
    )
    assert updates == [] == workspace.states("dpo")


def dropping(monkeypatch: pytest.MonkeyPatch) -> None:
    load = checkpoint.load

    def with_dropout(folder: Path) -> tuple[Transformer, Tokenizer]:
        model, tokenizer = load(folder)
        model.dropout = 0.2
        return model, tokenizer

    monkeypatch.setattr(checkpoint, "load", with_dropout)


@pytest.mark.parametrize("stage", ["dpo", "kto", "grpo"])
def test_a_policy_with_dropout_stops(
    stage: str, workspace: Workspace, updates: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    dropping(monkeypatch)
    assert_refused(
        workspace, stage, r"gate (preference|loss|rewards/chosen|sampling/sampling_logp_difference/max): .* dropout"
    )
    assert updates == [] == workspace.states(stage)


def hotter(original: Callable[..., list[Answer]]) -> Callable[..., list[Answer]]:
    def answers(self: CausalSetting, *given: Any) -> list[Answer]:
        config = self.config
        self.config = replace(config, temperature=1.25 * config.temperature)
        try:
            return original(self, *given)
        finally:
            self.config = config

    return answers


def stale(original: Callable[..., list[Answer]]) -> Callable[..., list[Answer]]:
    def answers(self: CausalSetting, *given: Any) -> list[Answer]:
        found = original(self, *given)
        return [replace(one, logprobs=[value - 2e-4 for value in one.logprobs]) for one in found]

    return answers


@pytest.mark.parametrize("fault", [hotter, stale])
@pytest.mark.parametrize("stage", ["rlhf", "grpo"])
def test_log_probabilities_of_another_temperature_or_another_policy_stop(
    stage: str, fault: Any, workspace: Workspace, updates: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CausalSetting, "_answers", fault(CausalSetting._answers))
    assert_refused(
        workspace,
        stage,
        r"gate sampling/sampling_logp_difference/max: expected 0 to within 0\.0001, found .*temperature",
        temperature=0.8,
    )
    assert updates == [] == workspace.states(stage)


@pytest.mark.parametrize(("stage", "name"), [("rlhf", "objective/kl"), ("grpo", "kl/rollout")])
def test_a_reference_that_is_not_the_policy_s_start_stops(
    stage: str, name: str, workspace: Workspace, updates: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = CausalSetting.reference

    def other(self: CausalSetting, given: Sequence[Answer]) -> list[np.ndarray]:
        return [found - 1e-3 for found in original(self, given)]

    monkeypatch.setattr(CausalSetting, "reference", other)
    assert_refused(
        workspace, stage, rf"gate {name}: expected 0 to within 0\.001, found .* reference is not the initial policy"
    )
    assert updates == [] == workspace.states(stage)


def test_a_gate_waits_for_the_first_iteration_that_teaches_something(
    workspace: Workspace, updates: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dynamic sampling may find nothing at first; the fault shows two steps later, still before an update."""
    monkeypatch.setattr(CausalSetting, "_answers", stale(CausalSetting._answers))
    original = RolloutStream.fill

    def fill(self: RolloutStream, step: int) -> dict[str, float]:
        numbers = original(self, step)
        if step == 0:
            self.rollouts = []
        return numbers

    monkeypatch.setattr(RolloutStream, "fill", fill)
    assert_refused(workspace, "grpo", r"gate sampling/sampling_logp_difference/max")
    assert updates == []
    assert workspace.states("grpo")[-1] == "step-00000002"


# before anything is published


@pytest.mark.parametrize("adapter", [None, ADAPTER], ids=["copy", "adapter"])
@pytest.mark.parametrize("stage", ["dpo", "kto", "rlhf", "grpo"])
def test_a_reference_whose_weights_changed_is_not_compared_with(
    stage: str, adapter: dict[str, int] | None, workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an adapter the reference is the base model beneath it."""
    original = reference.finish

    def finish(start: Start, base: Path) -> dict[str, float | str]:
        with start.reference.model() as frozen, torch.no_grad():
            frozen.model.layers[0].mlp.up_proj.weight[0, 0] += 1e-3  # type: ignore[union-attr, operator, index]
        return original(start, base)

    monkeypatch.setattr(reference, "finish", finish)
    changes: dict[str, Any] = {"adapter": adapter} if adapter else {}
    if stage == "dpo":
        changes["precompute_reference"] = False  # otherwise the reference is checked and freed before training
    assert_refused(
        workspace, stage, r"the reference must stay frozen, but the hash of its weights changed from \w{16}", **changes
    )


@pytest.mark.parametrize("stage", ["lora", "dpo", "kto", "rlhf", "grpo", "distill"])
def test_a_merged_model_that_says_something_else_is_not_published(
    stage: str, workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = AdaptedLinear.folded
    merge = lora.merge

    def worse(model: Transformer) -> None:  # only here: sampling folds adapters in too, and has a gate of its own
        with monkeypatch.context() as patch:
            patch.setattr(AdaptedLinear, "folded", lambda self: 1.01 * original(self))
            merge(model)

    monkeypatch.setattr(lora, "merge", worse)
    changes = {} if stage == "lora" else {"adapter": ADAPTER}
    assert_refused(workspace, stage, r"merge gate: .* the logits of 64 rows by at most 0\.0\d+, found", **changes)


# a rate of 0


@pytest.mark.parametrize("stage", ["dpo", "kto", "grpo", "distill", "rlhf", "lora"])
def test_a_rate_of_0_moves_nothing(stage: str, workspace: Workspace, updates: list[float]) -> None:
    """In RL, every later update also finds the policy where it sampled, to 1e-4."""
    rates = {"learning_rate": 0.0} | ({"learning_rates": {"critic": 0.0}} if stage == "rlhf" else {})
    ended = workspace.command(stage, weight_decay=0.1, **rates)
    assert ended.code == 0 and len(updates) == 4, ended.said
    base = workspace.weights("code" if stage == "lora" else "tools")
    after = workspace.weights(stage)
    assert after.keys() == base.keys()
    assert all(torch.equal(value, base[name]) for name, value in after.items())
    if stage in ("rlhf", "grpo"):
        ratio = "val/ratio" if stage == "rlhf" else "ratio"
        rows = [row for row in workspace.curve(stage) if row.get(ratio)]
        assert len(rows) >= 2
        assert all(float(row[ratio]) == pytest.approx(1, abs=1e-4) for row in rows)
        found = [float(text) for row in rows if (text := row["sampling/sampling_logp_difference/max"])]
        assert len(found) == 2 and max(found) <= 1e-4


def test_a_reward_model_with_a_rate_of_0_is_told_that_its_trunk_never_trains(
    workspace: Workspace, updates: list[float]
) -> None:
    """Its head stays at zero, which lets no gradient through; the gate of its second step finds that."""
    assert_refused(workspace, "reward", r"group \w+: no gradient reaches model\.trunk\.", learning_rate=0.0)
    assert len(updates) == 1


@pytest.mark.parametrize("stage", ["rlhf", "grpo"])
def test_an_adapted_policy_is_compared_with_its_base_before_the_adapter_is_merged(
    stage: str, workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Merged, it would be compared with itself, and every gain would be 0."""
    original, compared = Setting.held_out, []

    def held_out(self: Setting, asked: Sequence[Any], *, of_reference: bool = False) -> list[Answer]:
        if of_reference:
            compared.append(any("lora_" in name for name, _ in self.policy.named_parameters()))
        return original(self, asked, of_reference=of_reference)

    monkeypatch.setattr(Setting, "held_out", held_out)
    ended = workspace.command(stage, adapter=ADAPTER, learning_rate=0.05)
    assert ended.code == 0, ended.said
    assert compared and all(compared)
