"""A user's masked-diffusion checkpoint as models/base: Dream and LLaDA."""

from pathlib import Path

import pytest

from pipeline.diffusion import files
from pipeline.model import checkpoint
from pipeline.run.errors import ModelError
from tests import workspace
from tests.bases import causal_given, take_in, trained
from tests.diffusion_models import DREAM, LLADA
from tests.diffusion_models import checkpoint as masked_checkpoint
from tests.diffusion_workspace import SETTINGS, STAGES
from tests.diffusion_workspace import masked_workspace as masked_workspace
from tests.workspace import Workspace, command

MASKED = {
    "dream": (DREAM | {"max_position_embeddings": 256}, "<|mask|>"),
    "llada": (LLADA | {"max_sequence_length": 256}, "<|mdm_mask|>"),
}


def masked_given(folder: Path, masked: Workspace, name: str) -> None:
    """A small masked-diffusion checkpoint, taken in as models/base."""
    values, mask = MASKED[name]
    masked_checkpoint(folder, masked.tokenizer, values, mask=mask)
    ended = take_in(folder)
    assert ended.code == 0, ended.said


@pytest.mark.parametrize("name", ["dream", "llada"])
def test_a_masked_diffusion_checkpoint_is_fine_tuned_and_aligned(
    name: str, masked: Workspace, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workspace, "SETTINGS", workspace.SETTINGS | SETTINGS)
    masked_given(tmp_path_factory.mktemp("given") / name, masked, name)
    trained(masked, "diffusion", adapt_steps=0)
    for stage in ("diffusion_dpo", "diffusion_grpo"):
        trained(masked, stage)
    for stage in STAGES:
        model, tokenizer = files.load(Path(f"models/{stage}"))
        assert model.traits.shift is (name == "dream") and model.traits.ends == (tokenizer.turn_end,)
    assert [path.name for path in Path("models/diffusion_control").iterdir()] == ["README.md"]
    with pytest.raises(ModelError, match="No causal control"):
        checkpoint.load(Path("models/diffusion_control"))


def test_a_stage_refuses_a_checkpoint_of_the_other_kind(
    masked: Workspace, tmp_path_factory: pytest.TempPathFactory
) -> None:
    def said(stage: str) -> str:
        ended = command(stage, [f"{stage}.base=base"])
        assert ended.code == 2
        return ended.said

    causal_given(tmp_path_factory.mktemp("given") / "qwen2", "qwen2")
    assert "expected a masked-diffusion model, found a causal one" in said("diffusion_dpo")
    masked_given(tmp_path_factory.mktemp("given") / "llada", masked, "llada")
    assert "expected a causal model, found a masked-diffusion one" in said("dpo")
    assert "init: expected `base`" in command("diffusion", ["diffusion.base=base", "diffusion.init=scratch"]).said


def test_a_masked_model_passes_through_without_pairs_and_problems(masked: Workspace) -> None:
    for data in ("preferences/train", "problems/rl", "problems/train"):
        Path(f"data/{data}.jsonl").write_text("")
    for stage in ("diffusion_dpo", "diffusion_grpo"):
        ended = command(stage, [])
        assert ended.code == 0 and "has nothing to train on" in ended.said, ended.said
        weights = (Path("models") / stage / "model.safetensors").read_bytes()
        assert weights == Path("models/diffusion/model.safetensors").read_bytes()
        assert files.load(Path("models") / stage)[0].traits == files.load(Path("models/diffusion"))[0].traits
    ended = command("diffusion", ["diffusion.adapt_steps=0"])
    assert ended.code == 0, ended.said
    assert files.opens(Path("models/diffusion")) and not files.opens(Path("models/diffusion_control"))
