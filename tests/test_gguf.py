"""GGUF files: what is written is read back, bit for bit in f32, and what another program would misread is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from pipeline.export import gguf as export_gguf
from pipeline.export import smoke
from pipeline.model import checkpoint
from pipeline.model.config import ModelConfig
from pipeline.model.transformer import Transformer
from pipeline.run.errors import GateError, ModelError
from pipeline.text.tokenizer import TEMPLATE, Tokenizer

SHAPE: dict[str, Any] = {
    "vocab_size": 320,
    "width": 64,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 16,
    "d_ff": 96,
    "max_context": 128,
    "rope_theta": 1e6,
}
SHAPES = {
    "tied": ModelConfig(tied=True, **SHAPE),
    "head of its own": ModelConfig(tied=False, **SHAPE),
    "qwen2": ModelConfig(tied=True, bias=True, **SHAPE),
}
IDS = torch.arange(40)[None] * 7 % 320


def fresh(shape: ModelConfig = SHAPES["tied"]) -> Transformer:
    """A model whose weights are all random, including norms and biases."""
    generator = torch.Generator().manual_seed(0)
    model = Transformer(shape, generator)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator) / 5)
    return model.train(False)


def written(tokenizer: Tokenizer, path: Path, model: Transformer, kind: str) -> Path:
    """Write the model as a GGUF file to `path`, and return it."""
    tokenizer.save(path.parent / "tokenizer")
    serialized = (path.parent / "tokenizer/tokenizer.json").read_text(encoding="utf-8")
    export_gguf.write(path, model, tokenizer, serialized, kind=kind, name="stagecoach-test")
    return path


@pytest.mark.parametrize("shape", SHAPES)
def test_f32_gives_back_every_bit(shape: str, byte_tokenizer: Tokenizer, tmp_path: Path) -> None:
    model = fresh(SHAPES[shape])
    found = export_gguf.read(written(byte_tokenizer, tmp_path / "a.gguf", model, "f32"))
    assert found.model.config == replace(model.config, norm_eps=found.model.config.norm_eps)
    assert found.model.config.norm_eps == pytest.approx(model.config.norm_eps, rel=1e-7)  # a float32 in the file
    assert found.model.state_dict().keys() == model.state_dict().keys()
    for name, value in model.state_dict().items():
        assert torch.equal(found.model.state_dict()[name], value), name
    with torch.no_grad():
        assert torch.equal(found.model(IDS), model(IDS))


@pytest.mark.parametrize(("kind", "most"), [("f16", 2.0**-11), ("bf16", 2.0**-8), ("q8_0", 1 / 127)])
def test_smaller_kinds_round_no_more_than_they_must(
    kind: str, most: float, byte_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """f16 and bf16 round each number to 11 and 8 bits. q8_0 rounds each number to within half a step; a block of 32 has
    one step, its greatest number over 127, which is stored as f16."""
    model = fresh()
    path = written(byte_tokenizer, tmp_path / "a.gguf", model, kind)
    found = export_gguf.read(path).model.state_dict()
    moved = 0
    for name, value in model.state_dict().items():
        error = (found[name] - value).abs()
        if value.ndim == 1:
            assert torch.equal(found[name], value), name
            continue
        scale = value.abs().view(-1, 32).amax(1, keepdim=True).expand(-1, 32).reshape(value.shape)
        bound = 1.01 * (most / 2 + 2**-11) * scale if kind == "q8_0" else most * value.abs() + 6e-8
        assert bool((error <= bound).all()), name
        moved += int((error > 0).sum())
    assert moved > 1000  # and they do round
    stored = {str(t.tensor_type.name) for t in gguf.GGUFReader(path).tensors if len(t.shape) > 1}
    assert stored == {kind.upper()}


def test_rows_that_no_block_divides_are_f16_in_a_q8_0_file(byte_tokenizer: Tokenizer, tmp_path: Path) -> None:
    model = fresh(replace(SHAPES["tied"], d_ff=40))
    path = written(byte_tokenizer, tmp_path / "a.gguf", model, "q8_0")
    kinds = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors}
    assert kinds["blk.0.ffn_down.weight"] == "F16"  # rows of 40
    assert kinds["blk.0.ffn_up.weight"] == kinds["token_embd.weight"] == "Q8_0"  # rows of 64
    assert kinds["blk.1.attn_q_norm.weight"] == kinds["output_norm.weight"] == "F32"
    torch.testing.assert_close(export_gguf.read(path).model(IDS), model(IDS), atol=0.2, rtol=0)


def test_the_keys_are_llama_cpp_s(byte_tokenizer: Tokenizer, tmp_path: Path) -> None:
    keys = export_gguf.read(written(byte_tokenizer, tmp_path / "a.gguf", fresh(), "q8_0")).keys
    expected = {
        "general.architecture": "qwen3",
        "general.type": "model",
        "general.name": "stagecoach-test",
        "general.file_type": 7,
        "general.quantization_version": 2,
        "qwen3.context_length": 128,
        "qwen3.embedding_length": 64,
        "qwen3.block_count": 2,
        "qwen3.feed_forward_length": 96,
        "qwen3.attention.head_count": 4,
        "qwen3.attention.head_count_kv": 2,
        "qwen3.attention.key_length": 16,
        "qwen3.attention.value_length": 16,
        "qwen3.rope.freq_base": 1e6,
        "qwen3.vocab_size": 320,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.eos_token_id": byte_tokenizer.turn_end,
        "tokenizer.ggml.eot_token_id": byte_tokenizer.turn_end,
        "tokenizer.ggml.padding_token_id": byte_tokenizer.pad,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.fim_pre_token_id": byte_tokenizer.fim_prefix,
        "tokenizer.ggml.fim_suf_token_id": byte_tokenizer.fim_suffix,
        "tokenizer.ggml.fim_mid_token_id": byte_tokenizer.fim_middle,
        "tokenizer.ggml.fim_pad_token_id": byte_tokenizer.fim_pad,
        "tokenizer.chat_template": TEMPLATE,
    }
    assert {name: keys.get(name) for name in expected} == expected


def test_every_id_has_its_token_its_type_and_the_merges_their_order(byte_tokenizer: Tokenizer, tmp_path: Path) -> None:
    model = fresh(replace(SHAPES["tied"], vocab_size=384))  # more rows than the tokenizer has ids
    found = export_gguf.read(written(byte_tokenizer, tmp_path / "a.gguf", model, "f32")).vocabulary
    assert (len(found.tokens), len(found.types), len(set(found.tokens))) == (384, 384, 384)
    state = json.loads((tmp_path / "tokenizer/tokenizer.json").read_text(encoding="utf-8"))
    assert found.merges == [" ".join(pair) for pair in state["model"]["merges"]]
    assert {found.tokens[id_]: id_ for id_ in range(320)} == {
        **state["model"]["vocab"],
        **{entry["content"]: entry["id"] for entry in state["added_tokens"]},
    }
    assert found.types[byte_tokenizer.turn_end] == found.types[byte_tokenizer.pad] == 3
    assert found.types[byte_tokenizer.tool_call] == 4  # an added token, which is part of the text
    assert set(found.types[320:]) == {5}
    plain = [id_ for id_ in range(320) if id_ not in byte_tokenizer.control_ids.values()]
    assert {found.types[id_] for id_ in plain} == {1}


def test_a_model_on_disk_and_its_file_say_the_same(byte_tokenizer: Tokenizer, tmp_path: Path) -> None:
    model = fresh()
    checkpoint.save(tmp_path / "model", model, byte_tokenizer, {})
    again, tokenizer = checkpoint.load(tmp_path / "model")
    found = export_gguf.read(written(tokenizer, tmp_path / "a.gguf", again, "f32"))
    assert torch.equal(found.model(IDS), model(IDS))


def test_twice_gives_the_same_bytes(byte_tokenizer: Tokenizer, tmp_path: Path) -> None:
    first, second = (
        written(byte_tokenizer, tmp_path / name, fresh(), "q8_0").read_bytes() for name in ("a.gguf", "b.gguf")
    )
    assert first == second


def test_what_cannot_be_said_is_refused(byte_tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    with pytest.raises(ModelError, match="expected one of f32, f16, bf16, q8_0, got 'q4_k'"):
        written(byte_tokenizer, path, fresh(), "q4_k")
    with pytest.raises(ModelError, match="expected a causal model of the family qwen3 or qwen2, found llama"):
        written(byte_tokenizer, path, fresh(replace(SHAPES["tied"], qk_norm=False)), "f32")
    with pytest.raises(ModelError, match="found bidirectional"):
        written(byte_tokenizer, path, fresh(replace(SHAPES["tied"], attention="bidirectional")), "f32")
    with pytest.raises(ModelError, match=r"qwen2 only if heads \* head_dim equals the width, found 4 \* 32 and 64"):
        written(byte_tokenizer, path, fresh(replace(SHAPES["qwen2"], head_dim=32)), "f32")
    assert not path.exists()
    loud = fresh()
    with torch.no_grad():
        loud.model.embed_tokens.weight[3, 3] = 1e6
    with pytest.raises(
        ModelError, match=r"token_embd\.weight has values above 65,504, which f16 cannot hold; use bf16"
    ):
        written(byte_tokenizer, path, loud, "f16")
    assert not path.exists()


def test_an_unknown_split_pattern_is_refused_by_name(byte_tokenizer: Tokenizer, tmp_path: Path) -> None:
    byte_tokenizer.save(tmp_path)
    serialized = (tmp_path / "tokenizer.json").read_text(encoding="utf-8")
    state = json.loads(serialized)
    state["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = r"\p{L}+"
    with pytest.raises(ModelError, match=r"expected a split pattern that llama\.cpp has a name for"):
        export_gguf.vocabulary(json.dumps(state), 320)
    state = json.loads(serialized) | {"normalizer": {"type": "NFC"}}
    with pytest.raises(ModelError, match="no normalizer"):
        export_gguf.vocabulary(json.dumps(state), 320)


def test_files_that_are_not_ours_are_refused(byte_tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "text.gguf").write_bytes(b"no model at all, only text that is long enough")
    with pytest.raises(ModelError, match="not a GGUF file"):
        export_gguf.read(tmp_path / "text.gguf")
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "gemma")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match="expected one of qwen3, qwen2, found 'gemma'"):
        export_gguf.read(tmp_path / "other.gguf")


@pytest.mark.parametrize("kind", ["f32", "f16", "bf16", "q8_0"])
@pytest.mark.parametrize("d_ff", [96, 40])
def test_a_file_is_the_model_rounded(kind: str, d_ff: int, byte_tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Compared with our own rounding, also for blocks of zeros and halves between two integers."""
    model = fresh(replace(SHAPES["tied"], d_ff=d_ff))
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[:, :32] = 0
        model.model.layers[0].mlp.up_proj.weight[0, 32:64] = torch.arange(32) / 2 - 6
        model.model.layers[0].mlp.up_proj.weight[0, 63] = 127.0  # its block's scale is 1
    path = written(byte_tokenizer, tmp_path / "a.gguf", model, kind)
    found = export_gguf.read(path).model.state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(found[name], export_gguf.rounded(value, kind)), name
    if kind == "q8_0" and d_ff == 96:
        assert found["model.layers.0.mlp.up_proj.weight"][0, 32:37].tolist() == [-6.0, -6.0, -5.0, -5.0, -4.0]


@pytest.mark.parametrize("kind", ["f32", "q8_0"])
def test_a_permuted_weight_fails_the_proof(kind: str, byte_tokenizer: Tokenizer, tmp_path: Path) -> None:
    """As left by a converter that expects the rotation to pair neighboring dimensions."""
    model, other = fresh(), fresh()
    with torch.no_grad():
        weight = other.model.layers[1].self_attn.q_proj.weight
        weight.copy_(weight.view(4, 2, 8, 64).transpose(1, 2).reshape(64, 64))
    path = written(byte_tokenizer, tmp_path / "a.gguf", other, kind)
    serialized = (tmp_path / "tokenizer/tokenizer.json").read_text(encoding="utf-8")
    with pytest.raises(
        GateError, match=rf"1\.self_attn\.q_proj\.weight in the file is not the model's weight rounded to {kind}"
    ):
        export_gguf.verify(path, model, byte_tokenizer, serialized, kind=kind)
    assert export_gguf.verify(path, other, byte_tokenizer, serialized, kind=kind)["probe_tokens"] > 1000


@pytest.mark.parametrize("what", ["merge", "type", "token", "template"])
def test_another_vocabulary_in_the_file_fails_the_proof(
    what: str, byte_tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = fresh()
    byte_tokenizer.save(tmp_path)
    serialized = (tmp_path / "tokenizer.json").read_text(encoding="utf-8")
    right = export_gguf.vocabulary(serialized, 320)
    first, second, *merges = right.merges
    wrong = {
        "merge": replace(right, merges=[second, first, *merges]),
        "type": replace(right, types=[1 if n == byte_tokenizer.turn_end else t for n, t in enumerate(right.types)]),
        "token": replace(right, tokens=[*right.tokens[:20], right.tokens[21], right.tokens[20], *right.tokens[22:]]),
        "template": replace(right, template=right.template.replace("assistant", "model")),
    }[what]
    assert wrong != right
    with monkeypatch.context() as patch:
        patch.setattr(export_gguf, "vocabulary", lambda *_: wrong)
        export_gguf.write(tmp_path / "a.gguf", model, byte_tokenizer, serialized, kind="f32", name="a")
    with pytest.raises(GateError, match="the vocabulary in the file differs from the tokenizer's"):
        export_gguf.verify(tmp_path / "a.gguf", model, byte_tokenizer, serialized, kind="f32")


@pytest.mark.parametrize(("key", "wrong"), [("eos", 0), ("fim_mid", 2), ("padding", 3)])
def test_another_role_of_a_token_fails_the_proof(
    key: str, wrong: int, byte_tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, right = f"tokenizer.ggml.{key}_token_id", export_gguf.roles(byte_tokenizer)
    with monkeypatch.context() as patch:
        patch.setattr(export_gguf, "roles", lambda _: right | {name: wrong})
        path = written(byte_tokenizer, tmp_path / "a.gguf", model := fresh(), "f32")
    serialized = (tmp_path / "tokenizer/tokenizer.json").read_text(encoding="utf-8")
    with pytest.raises(GateError, match=rf"{name} in the file is {wrong}, expected {right[name]}"):
        export_gguf.verify(path, model, byte_tokenizer, serialized, kind="f32")


@pytest.mark.parametrize("changed", [{"rope_theta": 1e4}, {"norm_eps": 1e-5}, {"max_context": 64}])
def test_another_shape_in_the_file_fails_the_proof(
    changed: dict[str, Any], byte_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Even where the weights are equal and rounding would hide the difference."""
    model = fresh()
    other = fresh(replace(SHAPES["tied"], **changed))
    path = written(byte_tokenizer, tmp_path / "a.gguf", other, "q8_0")
    serialized = (tmp_path / "tokenizer/tokenizer.json").read_text(encoding="utf-8")
    with pytest.raises(GateError, match="the model in the file is ModelConfig"):
        export_gguf.verify(path, model, byte_tokenizer, serialized, kind="q8_0")


def test_a_model_that_rounding_changes_too_much_is_refused(
    byte_tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = fresh()
    path = written(byte_tokenizer, tmp_path / "a.gguf", model, "q8_0")
    serialized = (tmp_path / "tokenizer/tokenizer.json").read_text(encoding="utf-8")
    found = export_gguf.verify(path, model, byte_tokenizer, serialized, kind="q8_0")["divergence"]
    assert found > 0
    monkeypatch.setitem(smoke.LIMITS, "q8_0", smoke.Limit(divergence=found / 2))
    with pytest.raises(GateError, match=r"the divergence is \S+ nats per token \(at most "):
        export_gguf.verify(path, model, byte_tokenizer, serialized, kind="q8_0")
