"""The stage lora: which embeddings it trains beside the adapters."""

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
    moved = (workspace.weights("lora")[table] - workspace.weights("code")[table]).abs().amax(1)
    assert moved[workspace.tokenizer.turn_start] > 0  # no dialogue of the workspace has a call
    assert not moved[[row for row in range(len(moved)) if row not in ids]].any()
