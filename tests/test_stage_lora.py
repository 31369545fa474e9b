"""The stage lora: which embeddings it trains besides the adapters."""

import json

import pytest

from tests.workspace import Workspace


@pytest.mark.slow
def test_control_tokens_named_by_role_train_whatever_their_ids(workspace: Workspace) -> None:
    roles = ["turn_start", "tool_call"]
    ended = workspace.command("lora", **{"trained_roles": roles, "rank": 2, "alpha": 4})
    assert ended.code == 0, ended.said
    written = json.loads((workspace.folder / "models/lora/adapter/adapter_config.json").read_text())
    ids = [getattr(workspace.tokenizer, role) for role in roles]
    assert written["trainable_token_indices"] == {"embed_tokens": ids}
    table = "model.embed_tokens.weight"
    moved = (workspace.weights("lora")[table] - workspace.weights("tools")[table]).abs().amax(1)
    assert moved[workspace.tokenizer.turn_start] > 0  # no dialogue of the workspace has a call
    assert not moved[[row for row in range(len(moved)) if row not in ids]].any()


@pytest.mark.slow
def test_a_copy_whose_weights_all_train_learns_from_the_same_examples_and_is_not_kept(workspace: Workspace) -> None:
    alone = workspace.command("lora")
    assert alone.code == 0, alone.said
    before = workspace.weights("lora")
    ended = workspace.command("lora", control_rate=1e-2, steps=12)
    assert ended.code == 0, ended.said
    found = workspace.numbers("lora")["exact_match"]
    assert set(found) == {"base", "control", "adapter"} and all(one["n"] == 6 for one in found.values())
    losses = [row["control/loss"] for row in workspace.curve("lora") if row.get("control/loss")]
    assert len(losses) > 1 and float(losses[-1]) < float(losses[0])
    ended = workspace.command("lora", control_rate=1e-2)
    assert ended.code == 0, ended.said
    after = workspace.weights("lora")
    assert all((before[name] == after[name]).all() for name in before)  # the adapter does not notice the copy
