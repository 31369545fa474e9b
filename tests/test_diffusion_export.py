"""A masked-diffusion model as an export: proved, honest about what runs it, and smoke-tested with canvases."""

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.diffusion import files
from pipeline.diffusion import model as diffusion_model
from pipeline.export import huggingface
from pipeline.model import checkpoint
from pipeline.model.transformer import Transformer
from pipeline.run.errors import GateError, ModelError
from pipeline.text.tokenizer import Tokenizer
from stages import deploy
from tests.deployment import both_manifests as both_manifests
from tests.deployment import deployed, files_of


def test_a_masked_diffusion_model_is_proved_without_greedy_text_and_keeps_its_traits(
    tiny_model: Transformer, byte_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    model = files.from_causal(tiny_model, byte_tokenizer)
    huggingface.export(model, byte_tokenizer, {}, tmp_path / "diffusion")
    found = huggingface.verify(model, byte_tokenizer, tmp_path / "diffusion")
    assert (found["max_difference"], found["greedy_tokens"]) == (0.0, 0)
    config = json.loads((tmp_path / "diffusion/config.json").read_text())
    assert (config["model_type"], config["mask_token_id"]) == ("stagecoach_mdm", byte_tokenizer.mask)
    (tmp_path / "diffusion/config.json").write_text(json.dumps(config | {"shift": False}))
    with pytest.raises(GateError, match=r"the exported model has the traits .*shift=False"):
        huggingface.verify(model, byte_tokenizer, tmp_path / "diffusion")


def test_a_masked_diffusion_model_has_the_honest_sentence_and_no_gguf(
    tiny_model: Transformer,
    byte_tokenizer: Tokenizer,
    corpora: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(deploy.smoke, "check", lambda *_: 6)
    model = files.from_causal(tiny_model, byte_tokenizer)
    files.save(tmp_path / "diffusion", model, byte_tokenizer, {})
    told = deployed(deploy.Params(model="diffusion"), tmp_path / "diffusion", tmp_path / "out", corpora)
    assert told["smoke_calls"] == 6
    assert not {name for name in files_of(tmp_path / "out") if name.startswith(("gguf", "onnx", "ollama"))}
    text = (tmp_path / "out/README.md").read_text()
    assert "No third-party program can run this architecture. Serve it with `python -m pipeline.serve`." in text
    assert "transformers import" not in text and "llama-cli" not in text and "@" not in text
    again, _ = files.load(tmp_path / "out")
    assert again.config == model.config and again.traits == model.traits


@pytest.mark.slow
def test_a_real_server_is_asked_for_canvases(
    tiny_model: Transformer, byte_tokenizer: Tokenizer, corpora: dict[str, Path], tmp_path: Path
) -> None:
    files.save(tmp_path / "diffusion", files.from_causal(tiny_model, byte_tokenizer), byte_tokenizer, {})
    told = deployed(deploy.Params(model="diffusion"), tmp_path / "diffusion", tmp_path / "out", corpora)
    assert told["smoke_calls"] == 6


def test_a_published_checkpoint_is_compared_with_its_weights_before_a_model_is_built(
    tmp_path: Path, tiny_model: Transformer, byte_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint.save(tmp_path, tiny_model, byte_tokenizer, {})
    path = tmp_path / "config.json"
    changes: dict[str, Any] = {"model_type": "Dream", "attention_bias": True, "num_hidden_layers": 10**8}
    path.write_text(json.dumps(json.loads(path.read_text()) | changes | {"mask_token_id": 3}))
    monkeypatch.setattr(diffusion_model, "Transformer", None)
    with pytest.raises(ModelError, match=r"num_hidden_layers is 100000000"):
        diffusion_model.load_published(tmp_path)


@pytest.mark.parametrize("text", ["[]", "3", "not json"])
def test_a_published_config_that_is_no_object_is_refused_by_name(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"config\.json"):
        diffusion_model.read(tmp_path)
