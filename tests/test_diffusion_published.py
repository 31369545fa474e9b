"""Tiny random checkpoints under the names of Dream, DiffuCoder and LLaDA: every tensor finds its place, and logits are
those of a plain reference.
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from pipeline.diffusion import model
from pipeline.diffusion.model import LLADA_BLOCK, Noised, original, renamed
from pipeline.run.errors import ModelError
from pipeline.text.tokenizer import Tokenizer
from tests.diffusion_models import DREAM, LLADA, checkpoint, dream_tensors, llada_tensors


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def turned(x: Tensor, theta: float) -> Tensor:
    """RoPE, half split: (T, H, h)."""
    time, _, size = x.shape
    angles = torch.arange(time)[:, None] / theta ** (torch.arange(0, size, 2) / size)[None]
    cos, sin = (torch.cat([f(angles)] * 2, 1)[:, None] for f in (torch.cos, torch.sin))
    half = torch.cat([-x[..., size // 2 :], x[..., : size // 2]], -1)
    return x * cos + half * sin


def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Full attention, head by head: (T, H, h)."""
    group = q.shape[1] // k.shape[1]
    out = []
    for head in range(q.shape[1]):
        scores = q[:, head] @ k[:, head // group].T / math.sqrt(q.shape[-1])
        out.append(scores.softmax(-1) @ v[:, head // group])
    return torch.stack(out, 1)


def plain_dream(w: dict[str, Tensor], ids: Tensor, c: dict[str, Any]) -> Tensor:
    x, size = w["model.embed_tokens.weight"][ids], c["hidden_size"] // c["num_attention_heads"]
    for n in range(c["num_hidden_layers"]):
        p = f"model.layers.{n}."
        h = norm(x, w[p + "input_layernorm.weight"], c["rms_norm_eps"])
        q, k, v = (
            (h @ w[f"{p}self_attn.{m}_proj.weight"].T + w[f"{p}self_attn.{m}_proj.bias"]).unflatten(-1, (-1, size))
            for m in "qkv"
        )
        x = (
            x
            + attended(turned(q, c["rope_theta"]), turned(k, c["rope_theta"]), v).flatten(1)
            @ w[p + "self_attn.o_proj.weight"].T
        )
        h = norm(x, w[p + "post_attention_layernorm.weight"], c["rms_norm_eps"])
        x = (
            x
            + (functional.silu(h @ w[p + "mlp.gate_proj.weight"].T) * (h @ w[p + "mlp.up_proj.weight"].T))
            @ w[p + "mlp.down_proj.weight"].T
        )
    return norm(x, w["model.norm.weight"], c["rms_norm_eps"]) @ w["lm_head.weight"].T


def plain_llada(w: dict[str, Tensor], ids: Tensor, c: dict[str, Any]) -> Tensor:
    """A reference like LLaDA's own LLaMA block, where the gate is ff_proj."""
    w = {name.removeprefix("model.transformer.").removesuffix(".weight"): tensor for name, tensor in w.items()}
    x, size = w["wte"][ids], c["d_model"] // c["n_heads"]
    for n in range(c["n_layers"]):
        p = f"blocks.{n}."
        h = norm(x, w[p + "attn_norm"], c["rms_norm_eps"])
        q, k, v = ((h @ w[f"{p}{m}_proj"].T).unflatten(-1, (-1, size)) for m in "qkv")
        x = x + attended(turned(q, c["rope_theta"]), turned(k, c["rope_theta"]), v).flatten(1) @ w[p + "attn_out"].T
        h = norm(x, w[p + "ff_norm"], c["rms_norm_eps"])
        x = x + (functional.silu(h @ w[p + "ff_proj"].T) * (h @ w[p + "up_proj"].T)) @ w[p + "ff_out"].T
    return norm(x, w["ln_f"], c["rms_norm_eps"]) @ w["ff_out"].T


@pytest.mark.parametrize(
    ("values", "plain", "shift"), [(DREAM, plain_dream, True), (LLADA, plain_llada, False)], ids=["dream", "llada"]
)
def test_logits_are_those_of_a_plain_reference(
    values: dict[str, Any], plain: Any, shift: bool, tmp_path: Path, byte_tokenizer: Tokenizer
) -> None:
    weights = checkpoint(tmp_path / "model", byte_tokenizer, values)
    own, tokenizer = model.load_published(tmp_path / "model")
    assert own.traits.shift is shift and tokenizer.vocab_size == byte_tokenizer.vocab_size
    ids = torch.randint(20, 300, (1, 20), generator=torch.Generator().manual_seed(1))
    masks = torch.zeros(1, 20, dtype=torch.bool)
    masks[0, [3, 7, 12]] = True
    noised = Noised(ids, masks, torch.zeros_like(ids, dtype=torch.int32), torch.arange(20)[None])
    found = own.train(False).logits(noised).detach()
    expected = plain(weights, ids.masked_fill(masks, own.traits.mask)[0], values)[[2, 6, 11] if shift else [3, 7, 12]]
    allowed = [n for n in range(expected.shape[1]) if n not in own.traits.banned]
    torch.testing.assert_close(found[:, allowed], expected[:, allowed], atol=1e-5, rtol=1e-5)
    assert (found[:, list(own.traits.banned)] == float("-inf")).all()


def test_every_tensor_of_a_llada_checkpoint_goes_there_and_back() -> None:
    names = llada_tensors(64, LLADA)
    state = {name: torch.randn(shape) for name, shape in names.items()}
    back = original(renamed(state))
    assert back.keys() == state.keys() and all(torch.equal(back[name], state[name]) for name in state)
    assert len(names) == 3 + 2 * len(LLADA_BLOCK) == 3 + 9 * 2


def test_real_sizes_have_the_number_of_tensors_that_was_published() -> None:
    assert len(llada_tensors(8, LLADA | {"n_layers": 32})) == 291
    assert len(dream_tensors(8, DREAM | {"num_hidden_layers": 28})) == 339


def test_the_tokenizer_wins_where_config_json_names_another_id(tmp_path: Path, byte_tokenizer: Tokenizer) -> None:
    """For the padding, DiffuCoder's config.json says 151643 and its tokenizer 151667."""
    checkpoint(tmp_path / "model", byte_tokenizer, DREAM)
    path = tmp_path / "model/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"mask_token_id": 30, "pad_token_id": 31}))
    own, tokenizer = model.load_published(tmp_path / "model")
    assert own.traits.mask == tokenizer.mask and own.traits.fill == tokenizer.end_of_text
    assert set(own.traits.banned) == {tokenizer.mask, tokenizer.pad} and own.traits.ends == (tokenizer.turn_end,)


def test_a_checkpoint_without_a_mask_is_refused(tmp_path: Path, byte_tokenizer: Tokenizer) -> None:
    checkpoint(tmp_path / "model", byte_tokenizer, DREAM, mask="<|other|>")
    path = tmp_path / "model/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"mask_token_id": 40}))
    with pytest.raises(ModelError, match="expected a mask token in the tokenizer"):
        model.load_published(tmp_path / "model")


def test_a_mask_under_another_name_is_taken_from_config_json(tmp_path: Path, byte_tokenizer: Tokenizer) -> None:
    checkpoint(tmp_path / "model", byte_tokenizer, LLADA, mask="<|mdm_mask|>")
    own, tokenizer = model.load_published(tmp_path / "model")
    assert own.traits.mask == byte_tokenizer.mask != tokenizer.mask
    assert {own.traits.mask, tokenizer.mask} <= set(own.traits.banned)  # the added one too


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model_type": "qwen2"}, "expected Dream .* or llada"),
        ({**LLADA, "d_model": None}, "d_model"),
        ({k: v for k, v in LLADA.items() if k != "n_heads"}, "'n_heads' is missing"),
    ],
)
def test_another_configuration_is_refused_by_name(values: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({k: v for k, v in values.items() if v is not None} | {"vocab_size": 64})
    )
    with pytest.raises(ModelError, match=message):
        model.read(tmp_path)


def test_a_tensor_too_many_or_too_few_is_named(tmp_path: Path, byte_tokenizer: Tokenizer) -> None:
    with pytest.raises(
        ModelError, match=r"model\.transformer\.blocks\.0\.gate\.weight: not a tensor of a llada checkpoint"
    ):
        renamed({"model.transformer.blocks.0.gate.weight": torch.zeros(1)})
    weights = checkpoint(tmp_path / "model", byte_tokenizer, DREAM)
    weights.pop("model.layers.1.self_attn.k_proj.bias")
    save_file(weights, tmp_path / "model/model.safetensors")
    with pytest.raises(ModelError, match=r"1 keys missing \(model.layers.1.self_attn.k_proj.bias\)"):
        model.load_published(tmp_path / "model")
