"""Reward model and actor-critic: the score at a place, what is saved is what scores, transformers agrees."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pipeline.learning import gates
from pipeline.model import checkpoint
from pipeline.model.config import ModelConfig
from pipeline.model.heads import ActorCritic, RewardModel, deepened
from pipeline.model.transformer import Transformer
from pipeline.run.errors import ConfigError, ModelError
from pipeline.text.tokenizer import Tokenizer

CONFIGS = {
    "qwen3-tied": ModelConfig(
        vocab_size=320,
        width=32,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=16,
        d_ff=48,
        max_context=64,
        rope_theta=1e4,
        tied=True,
    ),
    "qwen3-untied": ModelConfig(
        vocab_size=320,
        width=32,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=16,
        d_ff=48,
        max_context=64,
        rope_theta=1e4,
        tied=False,
    ),
    "qwen2": ModelConfig(
        vocab_size=320,
        width=32,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=8,
        d_ff=48,
        max_context=64,
        rope_theta=1e4,
        tied=True,
        bias=True,
    ),
    "llama": ModelConfig(
        vocab_size=320,
        width=32,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=8,
        d_ff=48,
        max_context=64,
        rope_theta=1e4,
        tied=False,
        qk_norm=False,
    ),
}
LENGTHS = [7, 19, 1, 12]


def rewarding(config: ModelConfig = CONFIGS["qwen3-tied"], seed: int = 0) -> RewardModel:
    """A reward model with a head away from zero."""
    generator = torch.Generator().manual_seed(seed)
    model = RewardModel(Transformer(config, generator))
    with torch.no_grad():
        model.score.weight.normal_(generator=generator)
    model.reward_mean, model.reward_std = 0.625, 1.5
    return model.train(False)


def padded(pad: int) -> tuple[Tensor, Tensor]:
    """Rows of LENGTHS tokens, padding on the right, and their document ids (-1 on padding)."""
    ids = torch.randint(40, 300, (4, 19), generator=torch.Generator().manual_seed(1))
    past = torch.arange(19) >= torch.tensor(LENGTHS)[:, None]
    return ids.masked_fill(past, pad), torch.zeros_like(ids).masked_fill(past, -1)


@torch.no_grad()
def test_a_reward_is_the_product_of_head_and_hidden_state_at_the_selected_places() -> None:
    model = rewarding()
    ids, documents = padded(0)
    select = torch.zeros_like(ids, dtype=torch.bool)
    select[torch.arange(4), torch.tensor(LENGTHS) - 1] = True
    select[1, 3] = True  # a second one in row 1
    found = model(ids, documents=documents, select=select)
    alone = [(row, length - 1) for row, length in enumerate(LENGTHS)]
    alone.insert(1, (1, 3))
    for value, (row, place) in zip(found, alone, strict=True):
        hidden = model.trunk.hidden(ids[row : row + 1, : place + 1])[0, -1]
        assert float(value) == pytest.approx(float((hidden * model.score.weight[0]).sum()), abs=1e-5)
    everywhere = model(ids, documents=documents)
    assert everywhere.shape == (4, 19)
    torch.testing.assert_close(everywhere[select], found)


@torch.no_grad()
def test_rewards_are_float32_under_autocast_and_in_half_precision() -> None:
    model, (ids, _) = rewarding(), padded(0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(ids).dtype == torch.float32
    found = model.to(torch.bfloat16)(ids)
    assert found.dtype == torch.float32 and not torch.equal(found, found.bfloat16().float())


def test_the_first_rewards_are_zero_and_the_trunk_learns_from_the_second_step() -> None:
    model = RewardModel(Transformer(CONFIGS["qwen3-tied"], torch.Generator().manual_seed(0)))
    ids, _ = padded(0)
    rewards = model(ids)
    assert not rewards.any()
    rewards.sum().backward()
    assert model.score.weight.grad is not None and model.score.weight.grad.abs().min() > 0
    assert not any(p.grad is not None and p.grad.any() for p in model.trunk.parameters())
    with torch.no_grad():
        model.score.weight -= 0.1 * model.score.weight.grad
    model(ids).sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in model.parameters())


def test_no_parameter_is_left_without_use() -> None:
    for config in CONFIGS.values():
        model = rewarding(config)
        model(padded(0)[0]).sum().backward()
        assert all(p.grad is not None for p in model.parameters())
        head = 0 if config.tied else config.vocab_size * config.width
        assert model.num_parameters() == config.num_parameters - head + config.width


def test_training_flops_count_one_row_in_place_of_the_vocabulary() -> None:
    model = rewarding()
    body = 2 * (2 * 32 * 64 + 2 * 32 * 32 + 3 * 32 * 48)  # two layers: q and o, k and v, SwiGLU
    assert model.flops_per_token(10) == 6 * (body + 32) + 12 * 2 * 4 * 16 * 10


def test_normalized_by_hand() -> None:
    assert rewarding().normalized(torch.tensor([0.625, 2.125, -2.375])).tolist() == [0.0, 1.0, -2.0]


@pytest.mark.parametrize("change", ["bidirectional", "dropout"])
def test_a_trunk_whose_scores_depend_on_more_than_the_text_is_refused(change: str) -> None:
    config = CONFIGS["qwen3-tied"]
    trunk = Transformer(replace(config, attention="bidirectional") if change == "bidirectional" else config)
    trunk.dropout = 0.1 if change == "dropout" else 0.0
    with pytest.raises(ValueError, match=f"needs a causal trunk without dropout, found .*{change}"):
        RewardModel(trunk)
    trunk = Transformer(config)
    trunk.dropout = 0.1
    with pytest.raises(ValueError, match=r"expected an actor without dropout, found dropout 0.1"):
        ActorCritic(trunk, rewarding())


def test_actor_and_critic_give_logits_and_normalized_values_of_the_same_places() -> None:
    actor, critic = Transformer(CONFIGS["qwen3-untied"], torch.Generator().manual_seed(3)), rewarding()
    both = ActorCritic(actor, critic)
    ids, documents = padded(0)
    select = torch.rand(ids.shape, generator=torch.Generator().manual_seed(2)) < 0.4
    select &= documents == 0
    logits, values = both(ids, documents=documents, select=select)
    torch.testing.assert_close(logits, actor(ids, documents=documents)[select])
    torch.testing.assert_close(values, (critic(ids, documents=documents)[select] - 0.625) / 1.5)
    values.square().sum().backward()
    assert all(p.grad is None for p in actor.parameters()) and all(p.grad is not None for p in critic.parameters())
    both.checkpointing = "full"
    assert actor.checkpointing == critic.trunk.checkpointing == both.checkpointing == "full"
    gates.causal(both)  # the gates know neither its shape nor its logits, and let it pass


def test_checkpointing_gives_the_same_gradients() -> None:
    gradients = []
    for mode in ("none", "full"):
        model = rewarding().train()
        model.checkpointing = mode
        model(padded(0)[0]).square().mean().backward()
        gradients.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(*gradients)


def test_the_gates_of_the_loop_accept_a_reward_model() -> None:
    model = rewarding()
    gates.causal(model)


@pytest.fixture
def folder(tmp_path: Path, byte_tokenizer: Tokenizer) -> Path:
    checkpoint.save_reward(tmp_path / "reward", rewarding(), byte_tokenizer, {"key": "k"})
    return tmp_path / "reward"


@pytest.mark.parametrize("kind", CONFIGS)
@torch.no_grad()
def test_what_was_saved_is_loaded_bit_for_bit(kind: str, tmp_path: Path, byte_tokenizer: Tokenizer) -> None:
    """Bug museum: unloadable reward model (hiyouga/LLaMA-Factory 947). Its head was saved where PPO did not look."""
    model = rewarding(CONFIGS[kind])
    checkpoint.save_reward(tmp_path / "a", model, byte_tokenizer, {"key": "k"})
    again, tokenizer = checkpoint.load_reward(tmp_path / "a")
    assert (again.config, again.reward_mean, again.reward_std) == (model.config, 0.625, 1.5)
    assert tokenizer.hash == byte_tokenizer.hash and again.training
    assert checkpoint.weights_digest(again) == checkpoint.weights_digest(model)
    assert torch.equal(again(padded(0)[0]), model(padded(0)[0]))
    checkpoint.save_reward(tmp_path / "b", again, tokenizer, {"key": "k"})
    names = [
        "chat_template.jinja",
        "config.json",
        "lineage.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == names
    assert all((tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes() for name in names)
    assert checkpoint.lineage(tmp_path / "a") == {"key": "k", "tokenizer": byte_tokenizer.hash}


def test_the_file_holds_the_names_of_transformers(folder: Path) -> None:
    names = set(load_file(folder / "model.safetensors"))
    trunk = {name for name, _ in Transformer(CONFIGS["qwen3-tied"]).named_parameters()}
    assert names == trunk | {"score.weight"}


def test_a_language_model_is_not_taken_for_a_reward_model(
    tmp_path: Path, tiny_model: Transformer, byte_tokenizer: Tokenizer
) -> None:
    checkpoint.save(tmp_path, tiny_model, byte_tokenizer, {})
    message = (
        r"expected a reward model \(Qwen3ForSequenceClassification\), found Qwen3ForCausalLM; .*dvc repro stage_reward"
    )
    with pytest.raises(ModelError, match=message):
        checkpoint.load_reward(tmp_path)


def test_a_reward_model_is_not_taken_for_a_language_model(folder: Path) -> None:
    with pytest.raises(ModelError, match=r"1 keys unknown \(score.weight\)"):
        checkpoint.load(folder)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"reward_mean": None},
            "expected numbers `reward_mean` and `reward_std` > 0, found None and 1.5; for a reward model from",
        ),
        ({"reward_std": 0}, "found 0.625 and 0"),
        ({"reward_mean": math.nan}, "found nan and 1.5"),
        ({"architectures": None}, "found no architecture"),
    ],
)
def test_a_reward_model_without_its_scale_is_refused(values: dict[str, Any], message: str, folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    with pytest.raises(ModelError, match=message):
        checkpoint.load_reward(folder)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("score.weight", None, r"expected score.weight of shape \[1, 32\], found nothing"),
        ("score.weight", torch.zeros(2, 32), r"expected score.weight of shape \[1, 32\], found \[2, 32\]"),
        ("model.norm.weight", None, r"1 keys missing \(model.norm.weight\)"),
        ("score.bias", torch.zeros(1), r"1 keys unknown \(score.bias\)"),
    ],
)
def test_weights_that_do_not_match_are_refused_by_name(
    name: str, tensor: Tensor | None, message: str, folder: Path
) -> None:
    state = load_file(folder / "model.safetensors")
    state.pop(name, None)
    save_file(state | ({} if tensor is None else {name: tensor}), folder / "model.safetensors")
    with pytest.raises(ModelError, match=message):
        checkpoint.load_reward(folder)


def test_a_frozen_model_answers_as_the_saved_one_and_trains_nothing(
    tmp_path: Path, tiny_model: Transformer, byte_tokenizer: Tokenizer
) -> None:
    checkpoint.save(tmp_path, tiny_model, byte_tokenizer, {})
    frozen = checkpoint.load_frozen(tmp_path)
    assert not frozen.training and not any(p.requires_grad for p in frozen.parameters())
    ids = padded(0)[0]
    with torch.no_grad():
        assert torch.equal(frozen(ids), tiny_model(ids))


def test_two_tokenizers_are_named_where_they_differ(byte_tokenizer: Tokenizer) -> None:
    other = Tokenizer.train(iter(["xxx yyy xxx yyy"]), 320)
    checkpoint.same_tokenizer(byte_tokenizer, byte_tokenizer, "models/tools", "models/reward")
    message = (
        f"models/tools and models/reward have different tokenizers .{byte_tokenizer.hash[:12]} and {other.hash[:12]}"
    )
    with pytest.raises(ModelError, match=message):
        checkpoint.same_tokenizer(byte_tokenizer, other, "models/tools", "models/reward")


@pytest.mark.oracle
@pytest.mark.parametrize("kind", CONFIGS)
@torch.no_grad()
def test_transformers_gives_the_same_scores_on_padded_rows(
    kind: str, tmp_path: Path, byte_tokenizer: Tokenizer
) -> None:
    transformers = pytest.importorskip("transformers")
    model = rewarding(CONFIGS[kind])
    checkpoint.save_reward(tmp_path, model, byte_tokenizer, {})
    theirs, loading = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path, output_loading_info=True
    )
    assert not any(loading.values()), loading
    assert type(theirs).__name__ == json.loads((tmp_path / "config.json").read_text())["architectures"][0]
    assert theirs.config.num_labels == 1 and theirs.config.id2label == {0: "REWARD"}
    ids, documents = padded(byte_tokenizer.pad)
    select = torch.arange(19) == torch.tensor(LENGTHS)[:, None] - 1
    found = model(ids, documents=documents, select=select)
    expected = theirs.eval()(ids, attention_mask=(documents == 0).long()).logits
    assert expected.shape == (4, 1) and found.std() > 0.1
    assert (found - expected[:, 0]).abs().max() <= 1e-5
    theirs.save_pretrained(tmp_path)  # and what transformers saves loads here
    again, _ = checkpoint.load_reward(tmp_path)
    assert checkpoint.weights_digest(again) == checkpoint.weights_digest(model)


@pytest.mark.parametrize("name", CONFIGS)
def test_more_layers_change_nothing_before_training_and_all_of_them_train(name: str) -> None:
    trunk = Transformer(CONFIGS[name], torch.Generator().manual_seed(0))
    deeper = deepened(trunk, 1)
    ids, documents = padded(0)
    assert deeper.config.layers == 3 and trunk.config.layers == 2
    torch.testing.assert_close(deeper(ids, documents=documents), trunk(ids, documents=documents))
    assert torch.equal(
        deeper.get_parameter("model.layers.2.self_attn.q_proj.weight"),
        trunk.get_parameter("model.layers.0.self_attn.q_proj.weight"),
    )
    deeper(ids, documents=documents).square().sum().backward()
    outputs = [
        deeper.get_parameter(f"model.layers.2.{part}.weight").grad for part in ("self_attn.o_proj", "mlp.down_proj")
    ]
    assert all(grad is not None and bool(grad.any()) for grad in outputs)


def test_a_deeper_reward_model_is_saved_and_loaded(tmp_path: Path, byte_tokenizer: Tokenizer) -> None:
    model = RewardModel(deepened(Transformer(CONFIGS["qwen3-tied"], torch.Generator().manual_seed(0)), 2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01)
    checkpoint.save_reward(tmp_path / "reward", model, byte_tokenizer, {})
    again, _ = checkpoint.load_reward(tmp_path / "reward")
    ids, documents = padded(0)
    assert again.config.layers == 4
    with torch.no_grad():
        assert torch.equal(again(ids, documents=documents), model(ids, documents=documents))


def test_no_more_layers_than_there_are_to_copy() -> None:
    trunk = Transformer(CONFIGS["llama"], torch.Generator().manual_seed(0))
    assert deepened(trunk, 0) is trunk
    for count in (-1, 3):
        with pytest.raises(ConfigError, match=f"extra_layers: expected 0 to 2 .*got {count}"):
            deepened(trunk, count)
