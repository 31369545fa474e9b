"""config.json against the headers of the weights: sizes that the file does not bear out cost no memory."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.model import checkpoint, initialization
from pipeline.model.config import ModelConfig
from pipeline.model.heads import RewardModel
from pipeline.model.transformer import Transformer
from pipeline.run.errors import ModelError
from pipeline.text.tokenizer import Tokenizer

HUGE = 100_000_000


@pytest.fixture
def folder(tmp_path: Path, tiny_model: Transformer, byte_tokenizer: Tokenizer) -> Path:
    checkpoint.save(tmp_path / "tiny", tiny_model, byte_tokenizer, {})
    return tmp_path / "tiny"


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail the test if a model is built."""

    def built(*_: Any, **__: Any) -> None:
        raise AssertionError("a model was built")

    for module in (checkpoint, initialization):
        monkeypatch.setattr(module, "Transformer", built)


def rewrite(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": HUGE}, rf"config\.json: num_hidden_layers is {HUGE}, .*model\.safetensors has 2 layers"),
        ({"num_hidden_layers": 1}, r"num_hidden_layers is 1, .* has 2 layers"),
        (
            {"hidden_size": HUGE},
            (
                rf"model\.embed_tokens\.weight has shape \[320, 32\], but config\.json requires \[320, {HUGE}\]"
                r" \(vocab_size, hidden_size\)"
            ),
        ),
        (
            {"vocab_size": HUGE},
            (
                rf"model\.embed_tokens\.weight has shape \[320, 32\], but config\.json requires \[{HUGE}, 32\]"
                r" \(vocab_size, hidden_size\)"
            ),
        ),
        (
            {"intermediate_size": HUGE},
            r"mlp\.\w+_proj\.weight has shape .* \((hidden_size, )?intermediate_size(, hidden_size)?\)",
        ),
        (
            {"num_attention_heads": 10**9},
            r"q_proj\.weight has shape .* \(num_attention_heads \* head_dim, hidden_size\)",
        ),
        ({"head_dim": 10**9}, r"q_(proj|norm)\.weight has shape .*head_dim"),
        ({"tie_word_embeddings": False, "vocab_size": 320}, r"lm_head\.weight"),
        ({"hidden_size": 10**30}, rf"config\.json requires \[320, {10**30}\]"),
    ],
)
@pytest.mark.usefixtures("no_model")
def test_a_config_that_asks_for_more_than_the_file_has_is_refused_before_a_model_is_built(
    folder: Path, changes: dict[str, Any], message: str
) -> None:
    rewrite(folder, **changes)
    for load in (checkpoint.load, checkpoint.load_causal):
        with pytest.raises(ModelError, match=message) as caught:
            load(folder)
        assert str(folder) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.usefixtures("no_model")
def test_a_pretrained_checkpoint_is_compared_before_its_tokenizer_grows(
    folder: Path, byte_tokenizer: Tokenizer
) -> None:
    rewrite(folder, vocab_size=HUGE)
    with pytest.raises(ModelError, match=r"config\.json requires \[100000000, 32\]"):
        initialization.load(folder)


def test_a_reward_model_is_compared_too(
    tmp_path: Path, tiny_model: Transformer, byte_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    reward = RewardModel(tiny_model)
    reward.reward_mean, reward.reward_std = 0.0, 1.0
    checkpoint.save_reward(tmp_path, reward, byte_tokenizer, {})
    checkpoint.load_reward(tmp_path)
    rewrite(tmp_path, num_hidden_layers=HUGE)
    monkeypatch.setattr(checkpoint, "Transformer", None)
    with pytest.raises(ModelError, match=r"num_hidden_layers is 100000000"):
        checkpoint.load_reward(tmp_path)


def test_many_empty_layers_do_not_vouch_for_large_ones(
    folder: Path, tiny_model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A header may name thousands of empty layers, so every shape counts, not only that of the first layer."""
    tensors = load_file(folder / "model.safetensors")
    more = {f"model.layers.{n}.input_layernorm.weight": torch.empty(0) for n in range(2, 3000)}
    save_file(tensors | more, folder / "model.safetensors")
    rewrite(folder, num_hidden_layers=3000)
    monkeypatch.setattr(checkpoint, "Transformer", None)
    with pytest.raises(ModelError, match=r"keys missing"):
        checkpoint.load(folder)


@pytest.mark.parametrize("changes", [{}, {"tied": False}, {"bias": True}, {"qk_norm": False, "tied": False}])
def test_the_shapes_are_those_of_the_model(tiny_model: Transformer, changes: dict[str, Any]) -> None:
    config: ModelConfig = replace(tiny_model.config, kv_heads=1, layers=3, **changes)
    expected = {name: tuple(p.shape) for name, p in Transformer(config).named_parameters()}
    assert {name: shape for name, (shape, _) in checkpoint.expected(config)} == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", r"config\.json: expected a JSON object, found list"),
        ("3", r"config\.json: expected a JSON object, found int"),
        ("null", r"config\.json: expected a JSON object"),
        ("[" * 100_000, r"config\.json: (not JSON|nested too deeply)"),
    ],
)
def test_a_config_that_is_no_object_is_refused_by_name(folder: Path, text: str, message: str) -> None:
    (folder / "config.json").write_text(text)
    for load in (checkpoint.load, checkpoint.load_reward):
        with pytest.raises(ModelError, match=message):
            load(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": "32"}, r"hidden_size: expected a whole number of at least 1, found '32'"),
        ({"hidden_size": 32.5}, r"hidden_size: expected a whole number"),
        ({"num_hidden_layers": True}, r"num_hidden_layers: expected a whole number"),
        ({"num_hidden_layers": [2]}, r"num_hidden_layers: expected a whole number"),
        ({"num_attention_heads": 0}, r"num_attention_heads: expected a whole number"),
        ({"head_dim": -2}, r"head_dim: expected a whole number"),
        ({"rope_theta": "wide"}, r"rope_theta: expected a number"),
        ({"rope_theta": float("nan"), "rope_parameters": None}, r"rope_theta: expected a number"),
        ({"rope_parameters": [1]}, r"rope_parameters: expected an object"),
        ({"rope_scaling": "linear"}, r"rope_scaling: expected an object"),
        ({"rms_norm_eps": "small"}, r"rms_norm_eps: expected a number"),
        ({"tie_word_embeddings": "yes"}, r"tie_word_embeddings: expected true or false"),
        ({"model_type": ["qwen3"]}, r"model_type \['qwen3'\] is unsupported"),
    ],
)
def test_a_value_of_the_wrong_kind_is_named_with_its_key(folder: Path, changes: dict[str, Any], message: str) -> None:
    rewrite(folder, **changes)
    with pytest.raises(ModelError, match=rf"config\.json: {message}"):
        checkpoint.load(folder)


@pytest.mark.parametrize(
    "name", ["../model.safetensors", "/etc/passwd", "..", ".", "", "a/b.safetensors", "weights.bin", 3, None, ["x"]]
)
def test_an_index_names_safetensors_of_its_own_folder_alone(folder: Path, name: Any) -> None:
    (folder / "model.safetensors").rename(folder.parent / "model.safetensors")
    names = dict.fromkeys(load_file(folder.parent / "model.safetensors"), name)
    (folder / checkpoint.INDEX).write_text(json.dumps({"weight_map": names}))
    with pytest.raises(ModelError, match=r"index\.json names .*; expected safetensors files in the same folder"):
        checkpoint.load(folder)


def test_weights_that_are_a_folder_or_cannot_be_read_are_refused_by_name(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()
    with pytest.raises(ModelError, match=r"model\.safetensors: (damaged|cannot be read)"):
        checkpoint.load(folder)


def test_a_vocabulary_far_beyond_the_tokenizer_is_refused_before_spares_are_made(folder: Path) -> None:
    """The tokenizer's stage fetches no weights from the hub, so there is no header to check."""
    from pipeline.text.tokenizer import adopt

    with pytest.raises(ModelError, match=r"vocab_size 100000000, .*tokenizer\.json has \d+ tokens"):
        adopt(folder, HUGE)
