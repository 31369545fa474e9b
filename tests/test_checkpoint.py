"""Model directories: what is saved is what is loaded, by us and by transformers; what is incomplete is refused
by name.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.generation.sampling import Sampling, generate
from pipeline.model import checkpoint
from pipeline.model.config import ModelConfig
from pipeline.model.transformer import Transformer
from pipeline.run import workdir
from pipeline.run.errors import ModelError, StagecoachError
from pipeline.text import chat
from pipeline.text.tokenizer import Tokenizer

MESSAGES = [{"role": "user", "content": "Add 1 and 2, s'il vous plaît."}]


@pytest.fixture
def folder(tmp_path: Path, tiny_model: Transformer, byte_tokenizer: Tokenizer) -> Path:
    checkpoint.save(tmp_path / "tiny", tiny_model, byte_tokenizer, {"key": "k"})
    return tmp_path / "tiny"


def test_what_was_saved_is_loaded_bit_for_bit(folder: Path, tiny_model: Transformer, byte_tokenizer: Tokenizer) -> None:
    model, tokenizer = checkpoint.load(folder)
    assert model.config == tiny_model.config
    assert tokenizer.hash == byte_tokenizer.hash
    mine, theirs = tiny_model.state_dict(), model.state_dict()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert checkpoint.weights_digest(model) == checkpoint.weights_digest(tiny_model)
    with torch.no_grad():
        model.model.norm.weight[3] = torch.nextafter(model.model.norm.weight[3], torch.tensor(9.0))
    assert checkpoint.weights_digest(model) != checkpoint.weights_digest(tiny_model)


def test_a_directory_holds_these_files_and_equal_runs_give_equal_bytes(
    folder: Path, tiny_model: Transformer, byte_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    checkpoint.save(tmp_path / "again", tiny_model, byte_tokenizer, {"key": "k"})
    names = [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "lineage.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert sorted(p.name for p in folder.iterdir()) == names
    assert all((folder / name).read_bytes() == (tmp_path / "again" / name).read_bytes() for name in names)


def test_the_lineage_names_the_tokenizer_and_is_empty_elsewhere(folder: Path, byte_tokenizer: Tokenizer) -> None:
    assert checkpoint.lineage(folder) == {"key": "k", "tokenizer": byte_tokenizer.hash}
    assert checkpoint.lineage(folder.parent) == {}


def test_an_answer_ends_where_the_turn_ends(folder: Path, byte_tokenizer: Tokenizer) -> None:
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [byte_tokenizer.turn_end, byte_tokenizer.end_of_text]
    config = json.loads((folder / "config.json").read_text())
    assert config["eos_token_id"] == byte_tokenizer.turn_end != config["pad_token_id"] == byte_tokenizer.pad


def test_a_tokenizer_with_more_ids_than_rows_is_refused_in_both_directions(
    folder: Path, tiny_model: Transformer, tmp_path: Path
) -> None:
    larger = Tokenizer.train(iter(["one two three"]), 384)
    message = r"the tokenizer has 384 ids, but the embedding has 320 rows; use the model's own tokenizer"
    with pytest.raises(ModelError, match=message):
        checkpoint.save(tmp_path / "new", tiny_model, larger, {})
    assert not (tmp_path / "new").exists()
    larger.save(folder)
    with pytest.raises(ModelError, match=message):
        checkpoint.load(folder)


def damaged(folder: Path, what: str) -> None:
    weights = folder / "model.safetensors"
    tensors = load_file(weights)
    if what == "cut":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif what == "header":
        weights.write_bytes(b"\xff" * 8 + weights.read_bytes()[8:])
    elif what == "empty":
        weights.write_bytes(b"")
    elif what == "no weights":
        weights.unlink()
    elif what == "tensor missing":
        del tensors["model.norm.weight"]
        save_file(tensors, weights)
    elif what == "shape":
        save_file(tensors | {"model.norm.weight": torch.ones(5)}, weights)
    elif what == "config":
        (folder / "config.json").write_text("{")
    elif what == "no config":
        (folder / "config.json").unlink()
    elif what == "no tokenizer":
        (folder / "tokenizer.json").unlink()


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("cut", r"model\.safetensors: damaged \(.*\); fetch or build it again"),
        ("header", r"model\.safetensors: damaged"),
        ("empty", r"model\.safetensors: damaged"),
        ("no weights", r"model\.safetensors is missing"),
        ("tensor missing", r"1 keys missing \(model\.norm\.weight\)"),
        ("shape", r"model\.norm\.weight has shape \[5\], but config\.json requires \[32\]"),
        ("config", r"config\.json: not JSON"),
        ("no config", r"config\.json is missing: .* is not a model directory"),
        ("no tokenizer", r"tokenizer\.json: expected a tokenizer here"),
    ],
)
def test_a_directory_that_is_not_whole_is_refused_by_name(folder: Path, what: str, message: str) -> None:
    damaged(folder, what)
    with pytest.raises(ModelError, match=message):
        checkpoint.load(folder)


def test_a_disk_too_full_is_found_before_a_weight_is_written(
    tiny_model: Transformer, byte_tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(workdir.shutil, "disk_usage", lambda path: usage._replace(free=1_000_000))
    with pytest.raises(StagecoachError, match=r"no space: 20\.1 MB needed, 1\.0 MB free"):
        checkpoint.save(tmp_path / "new", tiny_model, byte_tokenizer, {})
    assert list((tmp_path / "new").iterdir()) == []


@pytest.mark.oracle
@pytest.mark.parametrize("tied", [True, False])
def test_transformers_computes_and_says_the_same(tied: bool, byte_tokenizer: Tokenizer, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = ModelConfig(
        vocab_size=384,
        width=64,
        layers=3,
        heads=4,
        kv_heads=2,
        head_dim=32,
        d_ff=96,
        max_context=256,
        rope_theta=50_000.0,
        tied=tied,
    )
    model = Transformer(config, torch.Generator().manual_seed(1)).train(False)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(2)
    checkpoint.save(tmp_path, model, byte_tokenizer, {})
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, local_files_only=True)
    assert type(theirs).__name__ == "Qwen3ForCausalLM"
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    rendered = chat.render(byte_tokenizer, MESSAGES, generation_prompt=True).ids
    prompt = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    assert prompt["input_ids"][0].tolist() == rendered
    with torch.no_grad():
        difference = model(prompt["input_ids"]).log_softmax(-1) - theirs(**prompt).logits.log_softmax(-1)
    assert difference.abs().max() <= 1e-5
    greedy = generate(model, [rendered], Sampling(64), stop=(), seeds=[0])[0].ids
    answer = theirs.generate(**prompt, max_new_tokens=64, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert answer[0, len(rendered) :].tolist() == greedy
    stops = generate(model, [rendered], Sampling(200), stop=(greedy[20],), seeds=[0])[0].ids
    answer = theirs.generate(**prompt, max_new_tokens=200, do_sample=False, eos_token_id=[greedy[20]], pad_token_id=0)
    assert answer[0, len(rendered) :].tolist() == [*stops, greedy[20]]


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": 3}'])
def test_a_broken_index_of_shards_is_refused_by_name(folder: Path, text: str) -> None:
    (folder / checkpoint.WHOLE).unlink()  # otherwise this file would be read
    (folder / checkpoint.INDEX).write_text(text)
    with pytest.raises(ModelError, match=r"index\.json: expected JSON with `weight_map`"):
        checkpoint.load(folder)


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_weights_may_be_saved_in_half_precision_and_load_in_float32(
    tmp_path: Path, tiny_model: Transformer, byte_tokenizer: Tokenizer, precision: str, dtype: torch.dtype
) -> None:
    checkpoint.save(tmp_path / "half", tiny_model, byte_tokenizer, {}, precision=precision)
    saved, written = (
        load_file(tmp_path / "half/model.safetensors"),
        json.loads((tmp_path / "half/config.json").read_text()),
    )
    assert {tensor.dtype for tensor in saved.values()} == {dtype}
    assert written["dtype"] == written["torch_dtype"] == str(dtype).removeprefix("torch.")
    loaded = checkpoint.load(tmp_path / "half")[0].state_dict()
    for name, tensor in tiny_model.state_dict().items():
        assert torch.equal(loaded[name], tensor.to(dtype).float()), name


def test_a_masked_diffusion_model_is_no_causal_one(
    tiny_model: Transformer, byte_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    model = Transformer(replace(tiny_model.config, attention="bidirectional"), torch.Generator().manual_seed(0))
    checkpoint.save(tmp_path, model, byte_tokenizer, {})
    with pytest.raises(ModelError, match="expected a causal model, found a masked-diffusion one; use models/code"):
        checkpoint.load(tmp_path)
    with pytest.raises(ModelError, match="masked-diffusion"):
        checkpoint.load_frozen(tmp_path)
    assert checkpoint.load_any(tmp_path)[0].config == model.config
