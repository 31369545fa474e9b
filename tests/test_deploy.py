"""The stage exports the model that it was asked for, with the lineage of both."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline import checkpoint
from pipeline.model.transformer import Transformer
from pipeline.text.tokenizer import Tokenizer
from stages import deploy


def test_the_export_names_its_maker_and_passes_its_proof(
    tiny_model: Transformer, byte_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    checkpoint.save(tmp_path / "base", tiny_model, byte_tokenizer, {"key": "base-key"})
    told: dict[str, Any] = {}
    job: Any = SimpleNamespace(lineage={"key": "deploy-key", "inputs": {"models/tools": "77"}}, report=told.update)
    deploy.run(deploy.Params(model="tools"), job, base=tmp_path / "base", out=tmp_path / "out")
    lineage = checkpoint.lineage(tmp_path / "out")
    assert (lineage["key"], lineage["made_by"], lineage["model"]) == ("deploy-key", "base-key", "tools")
    assert (told["model"], told["parameters"]) == ("tools", tiny_model.num_parameters())
    assert (told["parity"]["max_difference"], told["parity"]["greedy_equal"]) == (0.0, 64)
    assert "stagecoach-tools" in (tmp_path / "out/README.md").read_text()
    weights = "model.safetensors"
    assert (tmp_path / "out" / weights).read_bytes() == (tmp_path / "base" / weights).read_bytes()


@pytest.mark.parametrize("name", ["", "deploy", "a/b", "..", "."])
def test_only_a_folder_of_models_can_be_deployed(name: str) -> None:
    with pytest.raises(ValueError, match=r"expected the name of a folder of models/ such as tools"):
        deploy.Params(model=name)
