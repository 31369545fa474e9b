"""A pretrained checkpoint as the first model, against transformers: logits, what is saved back, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.export import gguf, huggingface
from pipeline.generation.sampling import Sampling, generate
from pipeline.model import checkpoint, initialization
from pipeline.model.transformer import Transformer
from pipeline.run.errors import ModelError
from pipeline.text import chat
from pipeline.text.tokenizer import Tokenizer, adopt
from tests import checkpoints, probes

pytestmark = pytest.mark.oracle
transformers = pytest.importorskip("transformers")
IDS = torch.randint(0, 500, (2, 80), generator=torch.Generator().manual_seed(3))


def taken_in(folder: Path) -> tuple[Transformer, Tokenizer]:
    model, tokenizer = initialization.load(folder)
    return model.train(False), tokenizer


@pytest.mark.parametrize("shape", checkpoints.SHAPES)
@torch.no_grad()
def test_logits_are_those_of_transformers_and_what_is_saved_back_loads_there(shape: str, tmp_path: Path) -> None:
    theirs = checkpoints.write(tmp_path / "base", shape)
    model, tokenizer = taken_in(tmp_path / "base")
    assert model.config.family == shape.partition("-")[0]
    assert model.config.tied == checkpoints.SHAPES[shape]["tie_word_embeddings"]
    logits = model(IDS)
    assert float((logits[..., :500] - theirs(IDS).logits[..., :500]).abs().max()) <= 1e-5
    checkpoint.save(tmp_path / "saved", model, tokenizer, {})
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32).eval()
    assert again.config.vocab_size == tokenizer.vocab_size
    assert float((again(IDS).logits - logits).abs().max()) <= 1e-5
    prompt = IDS[0, :12].tolist()
    ours = generate(model, [prompt], Sampling(40), stop=(), seeds=[0])[0].ids
    given = {"input_ids": torch.tensor([prompt]), "attention_mask": torch.ones(1, 12, dtype=torch.long)}
    said = again.generate(**given, max_new_tokens=40, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert said[0, 12:].tolist() == ours and len(set(ours)) > 3


@pytest.mark.parametrize("family", checkpoints.CONTROL)
def test_the_tokenizer_that_is_saved_gives_the_same_ids_in_transformers(family: str, tmp_path: Path) -> None:
    checkpoints.write(tmp_path / "base", family)
    model, tokenizer = taken_in(tmp_path / "base")
    checkpoint.save(tmp_path / "saved", model, tokenizer, {})
    theirs, text = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved"), probes.long_text()[:20_000]
    assert theirs(text)["input_ids"] == tokenizer.encode(text)  # without LLaMA's begin of text and Qwen's NFC
    assert theirs.decode(tokenizer.encode(text)) == text
    for messages, tools in probes.CONVERSATIONS:
        options: dict[str, Any] = {"tools": tools or None, "add_generation_prompt": True}
        said = theirs.apply_chat_template(messages, tokenize=False, **options)
        assert theirs(said)["input_ids"] == chat.render(tokenizer, messages, tools, generation_prompt=True).ids


@pytest.mark.parametrize("shape", ["qwen3", "llama"])
@torch.no_grad()
def test_rows_of_new_control_tokens_are_the_mean_in_the_embedding_and_in_the_head(shape: str, tmp_path: Path) -> None:
    checkpoints.write(tmp_path, shape)
    model, tokenizer = taken_in(tmp_path)
    adopted = adopt(tmp_path, 512)
    stored = initialization.checkpoint.read_weights(tmp_path)
    tables = {"model.embed_tokens.weight": stored["model.embed_tokens.weight"]}
    if not model.config.tied:
        tables["lm_head.weight"] = stored["lm_head.weight"]
    for name, before in tables.items():
        now = model.state_dict()[name]
        assert torch.equal(now[:500], before[:500])
        assert torch.allclose(now[list(adopted.fresh)], before[:500].mean(0), atol=1e-6)
        kept = [id_ for id_ in range(500, 512) if id_ not in adopted.fresh]
        assert torch.equal(now[kept], before[kept])
    logits = model(IDS[:1, :9])[0]
    assert torch.allclose(logits[:, tokenizer.mask], logits[:, :500].mean(-1), atol=1e-5)


@torch.no_grad()
def test_configurations_of_transformers_4_and_5_and_half_precision_shards_give_one_model(tmp_path: Path) -> None:
    theirs = checkpoints.write(tmp_path / "five", "qwen2-untied")
    model, _ = taken_in(tmp_path / "five")
    checkpoints.write(tmp_path / "four", "qwen2-untied")
    checkpoints.edit(
        tmp_path / "four/config.json",
        rope_parameters=None,
        rope_theta=50_000.0,
        dtype=None,
        torch_dtype="float32",
        layer_types=None,
        head_dim=None,
    )
    four, _ = taken_in(tmp_path / "four")
    assert four.config == model.config and torch.equal(four(IDS), model(IDS))
    theirs.to(torch.bfloat16).save_pretrained(tmp_path / "four", max_shard_size="60KB")
    assert torch.equal(taken_in(tmp_path / "four")[0](IDS), model(IDS))  # the whole file is still there
    (tmp_path / "four/model.safetensors").unlink()
    half = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "four", dtype=torch.float32).eval()
    sharded, _ = taken_in(tmp_path / "four")
    assert len(list((tmp_path / "four").glob("*.safetensors"))) > 1
    assert float((sharded(IDS)[..., :500] - half(IDS).logits[..., :500]).abs().max()) <= 1e-5


def test_a_stored_copy_of_a_tied_head_is_dropped_and_one_that_differs_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    checkpoints.write(tmp_path, "llama-tied")  # has to grow: 512 rows, 515 ids
    model, _ = taken_in(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    save_file(state, tmp_path / "model.safetensors")
    again, _ = taken_in(tmp_path)
    assert torch.equal(again.model.embed_tokens.weight, model.model.embed_tokens.weight)
    state["lm_head.weight"][3, 3] += 1
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"ties the head to the embedding, but lm_head\.weight differs"):
        taken_in(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model_type": "mistral", "sliding_window": 4096},
            r"model_type 'mistral' is unsupported; expected one of qwen3",
        ),
        ({"use_sliding_window": True}, r"use_sliding_window = True is not supported"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 32.0}}, r"rope_type = 'llama3' is not supported"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 5e4, "factor": 4.0}}, r"rope_type = 'yarn'"),
        ({"model_type": "stagecoach_mdm", "base_model_type": "qwen3"}, r"expected a causal model, found a bidir"),
        ({"vocab_size": 640}, r"embed_tokens\.weight has shape \[512, 64\], but config\.json requires \[640, 64\]"),
        ({"num_hidden_layers": 3}, r"num_hidden_layers is 3, but .*model\.safetensors has 2 layers"),
        (
            {"intermediate_size": 128},
            r"mlp\.gate_proj\.weight has shape \[96, 64\], but config\.json requires \[128, 64\]",
        ),
    ],
)
def test_what_the_weights_do_not_mean_here_is_refused_by_name(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    checkpoints.write(tmp_path, "qwen3")
    checkpoints.edit(tmp_path / "config.json", **changes)
    with pytest.raises(ModelError, match=message):
        taken_in(tmp_path)


def test_a_checkpoint_of_pickles_alone_is_refused_unread(tmp_path: Path) -> None:
    checkpoints.write(tmp_path, "qwen3")
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"model\.safetensors is missing; expected safetensors \(a \.bin checkpoint"):
        taken_in(tmp_path)


def test_gguf_names_the_split_of_the_checkpoints_tokenizer_or_says_that_it_cannot(tmp_path: Path) -> None:
    checkpoints.write(tmp_path, "qwen3")
    model, tokenizer = taken_in(tmp_path)
    gguf.write(tmp_path / "a.gguf", model, tokenizer, tokenizer.serialized, kind="f32", name="a")
    assert gguf.read(tmp_path / "a.gguf").keys["tokenizer.ggml.pre"] == "qwen2"
    (tmp_path / "tokenizer.json").write_text(checkpoints.bpe("llama", 500).to_str())
    threes = adopt(tmp_path, 512).tokenizer
    assert gguf.vocabulary(threes.serialized, 576).split == "llama-bpe"
    state = json.loads(threes.serialized)
    state["model"]["ignore_merges"] = (
        False  # under that name, llama.cpp treats whole words as tokens, whatever the file says
    )
    with pytest.raises(ModelError, match=r"split pattern that llama\.cpp has a name for.*ignore_merges False"):
        gguf.vocabulary(json.dumps(state), 576)


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_the_export_is_proved_and_llama_has_no_gguf_and_says_so(family: str, tmp_path: Path) -> None:
    checkpoints.write(tmp_path / "base", family)
    model, tokenizer = taken_in(tmp_path / "base")
    huggingface.export(model, tokenizer, {}, tmp_path / "out")
    assert huggingface.verify(model, tokenizer, tmp_path / "out")["max_difference"] == 0.0  # the probe is not in NFC
    if family == "llama":
        with pytest.raises(ModelError, match=r"family qwen3 or qwen2, found llama; set deploy\.gguf to \[\]"):
            gguf.write(tmp_path / "a.gguf", model, tokenizer, tokenizer.serialized, kind="f32", name="a")
    else:
        gguf.write(tmp_path / "a.gguf", model, tokenizer, tokenizer.serialized, kind="q8_0", name="a")
        gguf.verify(tmp_path / "a.gguf", model, tokenizer, tokenizer.serialized, kind="q8_0")
