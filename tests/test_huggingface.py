"""The exported directory: checksums, the proof that it is the model it was made from, and what is refused on
loading.
"""

import hashlib
import json
import pickle
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.export import huggingface, smoke
from pipeline.model import checkpoint
from pipeline.model.config import ModelConfig
from pipeline.model.heads import RewardModel
from pipeline.model.transformer import Transformer
from pipeline.run.errors import GateError, ModelError
from pipeline.text import chat
from pipeline.text.tokenizer import Tokenizer
from tests import probes

LINEAGE = {"key": "0123456789abcdef", "made_by": "fedcba", "inputs": {"models/tools": "77"}}


@pytest.fixture
def out(tiny_model: Transformer, byte_tokenizer: Tokenizer, tmp_path: Path) -> Path:
    out = tmp_path / "deploy"
    huggingface.export(tiny_model, byte_tokenizer, LINEAGE, out)
    (out / "gguf").mkdir()
    (out / "gguf/a.gguf").write_bytes(b"GGUF")
    huggingface.seal(out)
    return out


def reward_model(config: ModelConfig) -> RewardModel:
    """A reward model whose weights are all random, the head's too."""
    model = RewardModel(Transformer(config, torch.Generator().manual_seed(3)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and "score" not in name:
                parameter.mul_(3.2)
        model.score.weight.copy_(torch.randn(model.score.weight.shape, generator=torch.Generator().manual_seed(4)))
    model.reward_mean, model.reward_std = 0.25, 1.5
    return model.train(False)


def test_every_file_has_its_checksum(out: Path) -> None:
    lines = (out / "SHA256SUMS").read_text().splitlines()
    sums = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    assert sums == {
        str(p.relative_to(out)): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in out.rglob("*")
        if p.is_file() and p.name != "SHA256SUMS"
    }
    assert {"config.json", "model.safetensors", "gguf/a.gguf"} <= sums.keys()
    huggingface.seal(out)  # sealed again: SHA256SUMS does not list itself
    assert (out / "SHA256SUMS").read_text().splitlines() == lines


def test_the_export_equals_its_model(out: Path, tiny_model: Transformer, byte_tokenizer: Tokenizer) -> None:
    proof = huggingface.verify(tiny_model, byte_tokenizer, out)
    tokens = len(byte_tokenizer.encode(smoke.probe()))
    assert proof == {
        "max_difference": 0.0,
        "divergence": 0.0,
        "perplexity": 0.0,
        "probe_tokens": tokens,
        "greedy_equal": 64,
        "greedy_tokens": 64,
    }
    assert tokens > 6000


def test_the_probe_is_eight_kilobytes_of_odd_text() -> None:
    text = smoke.probe()
    assert 7_500 <= len(text.encode()) <= 9_000
    for odd in (
        "\r\n",
        "\t",
        "\u00a0",
        "\u3000",
        "\u200b",
        "\ufeff",
        "👩‍💻",
        "def ",
        "#include",
        "#!/bin/sh",
        "你" if "你" in text else "我们",
    ):
        assert odd in text, odd
    assert max(map(ord, text)) > 0x1F000


@pytest.mark.parametrize("value", [1e-3, float("nan")])
def test_one_changed_weight_fails_the_proof(
    value: float, out: Path, tiny_model: Transformer, byte_tokenizer: Tokenizer
) -> None:
    tensors = load_file(out / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][0, 0] += value
    save_file(tensors, out / "model.safetensors")
    huggingface.seal(out)
    with pytest.raises(GateError, match="the export does not match the model: log-probabilities differ by"):
        huggingface.verify(tiny_model, byte_tokenizer, out)


def test_another_tokenizer_fails_the_proof(out: Path, tiny_model: Transformer, byte_tokenizer: Tokenizer) -> None:
    Tokenizer.train(iter(["xxx yyy xxx yyy"]), 320).save(out)
    huggingface.seal(out)
    with pytest.raises(GateError, match="the exported tokenizer splits the probe differently"):
        huggingface.verify(tiny_model, byte_tokenizer, out)


def test_a_short_context_is_proved_over_what_it_holds(
    tiny_model: Transformer, byte_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    short = Transformer(replace(tiny_model.config, max_context=48), torch.Generator().manual_seed(0))
    huggingface.export(short, byte_tokenizer, {}, tmp_path / "short")
    assert huggingface.verify(short, byte_tokenizer, tmp_path / "short")["greedy_equal"] == 24


def test_what_is_measured_is_what_a_slow_walk_measures(tiny_model: Transformer, byte_tokenizer: Tokenizer) -> None:
    other = Transformer(tiny_model.config, torch.Generator().manual_seed(0))
    other.load_state_dict(tiny_model.state_dict())
    with torch.no_grad():
        other.model.layers[1].mlp.down_proj.weight.mul_(0.9)
    ids = byte_tokenizer.encode(smoke.probe())[:300]  # a window of 256 and one of 44
    found = smoke.compare(tiny_model, smoke.Ours(other.train(False)), ids)
    changes, divergences = [], []
    for window in (ids[:256], ids[256:]):
        for place in range(1, len(window)):
            with torch.no_grad():
                p, q = (m(torch.tensor([window[:place]]))[0, -1].double().log_softmax(0) for m in (tiny_model, other))
            changes.append(float(p[window[place]] - q[window[place]]))
            divergences.append(float((p.exp() * (p - q)).sum()))
    assert len(changes) == 298
    assert found.max_difference == pytest.approx(max(map(abs, changes)), abs=1e-5)
    assert found.divergence == pytest.approx(sum(divergences) / 298, abs=1e-6)
    assert found.perplexity == pytest.approx(2.718281828459045 ** (sum(changes) / 298) - 1, abs=1e-6)


class Stammering(smoke.Ours):
    """The model, but with another eleventh greedy token."""

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        said = super().greedy(prompt, count)
        return [*said[:10], said[10] ^ 1, *said[11:]]


def test_greedy_tokens_count_until_the_first_that_differs(
    tiny_model: Transformer, byte_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    found = smoke.compare(tiny_model, Stammering(tiny_model), byte_tokenizer.encode(smoke.probe())[:300])
    assert (found.max_difference, found.greedy_equal, found.greedy_tokens) == (0.0, 10, 64)
    for kind in ("huggingface", "f32", "onnx fp32"):
        with pytest.raises(GateError, match="10/64 greedy tokens agree"):
            smoke.check_parity(found, kind, tmp_path)
    assert (
        smoke.check_parity(found, "q8_0", tmp_path)["greedy_equal"] == 10
    )  # rounded weights may choose differently, so this is only recorded


def test_a_reward_model_is_proved_by_its_rewards(
    byte_tokenizer: Tokenizer, tiny_model: Transformer, tmp_path: Path
) -> None:
    model = reward_model(tiny_model.config)
    huggingface.export(model, byte_tokenizer, LINEAGE, tmp_path / "reward")
    assert huggingface.verify(model, byte_tokenizer, tmp_path / "reward")["max_difference"] == 0.0
    with torch.no_grad():
        model.score.weight[0, 0] += 1e-4
    with pytest.raises(GateError, match="rewards differ by"):
        huggingface.verify(model, byte_tokenizer, tmp_path / "reward")
    with pytest.raises(GateError, match="the export is a RewardModel, expected a Transformer"):
        huggingface.verify(tiny_model, byte_tokenizer, tmp_path / "reward")


def test_a_sound_directory_is_loaded(out: Path, byte_tokenizer: Tokenizer) -> None:
    huggingface.check(out)
    (out / "SHA256SUMS").unlink()
    huggingface.check(out)
    assert huggingface.load(out)[1].hash == byte_tokenizer.hash


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "gguf/a.gguf"])
def test_a_file_that_is_not_as_it_was_sealed_is_named(name: str, out: Path) -> None:
    with (out / name).open("ab") as file:
        file.write(b" ")
    with pytest.raises(ModelError, match=rf"{name}: expected sha256 .* from SHA256SUMS"):
        huggingface.load(out)
    (out / name).unlink()
    with pytest.raises(ModelError, match=rf"{name}: expected sha256 .* found nothing"):
        huggingface.check(out)


def test_a_file_that_nobody_sealed_is_refused(out: Path) -> None:
    (out / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ModelError, match=r"index\.json: not listed in SHA256SUMS"):
        huggingface.check(out)


@pytest.mark.parametrize(
    "line", ["no sum", f"{'0' * 64}  ../config.json", f"{'0' * 64}  /etc/passwd", f"{'0' * 63}  config.json"]
)
def test_sums_of_files_elsewhere_are_refused(line: str, out: Path) -> None:
    with (out / "SHA256SUMS").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(ModelError, match=r"SHA256SUMS: line \d+ is not"):
        huggingface.check(out)


@pytest.mark.parametrize(
    "name", ["modeling.py", "pytorch_model.bin", "a/optimizer.pt", "x.pkl", "y.PTH", "a/b/last.ckpt"]
)
@pytest.mark.parametrize("sealed", [True, False])
def test_code_and_pickles_are_refused(name: str, sealed: bool, out: Path) -> None:
    (out / name).parent.mkdir(parents=True, exist_ok=True)
    (out / name).write_bytes(b"")
    if sealed:
        huggingface.seal(out)
    with pytest.raises(ModelError, match=rf"{name}: found (code|a pickle)"):
        huggingface.load(out)


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "generation_config.json"])
def test_auto_map_is_refused(name: str, out: Path) -> None:
    values = json.loads((out / name).read_text())
    asked = json.dumps(values | {"text_config": {"auto_map": {"AutoModel": "modeling.Mine"}}}).replace(
        "auto", "\\u0061uto"
    )
    (out / name).write_text(asked)
    huggingface.seal(out)
    with pytest.raises(ModelError, match=rf"{name}: auto_map would run code"):
        huggingface.load(out)


def test_a_missing_directory_and_broken_json_are_named(tmp_path: Path, out: Path) -> None:
    with pytest.raises(ModelError, match="nowhere: expected a model directory, found nothing"):
        huggingface.load(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        huggingface.load(tmp_path / "empty")
    (out / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json: expected JSON"):
        huggingface.load(out)


HEARD: list[str] = []


def test_loading_unpickles_nothing(out: Path) -> None:
    """An audit hook, which cannot be removed, hears of unpickled classes, loaded code objects and new processes."""

    def listen(event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("pickle.find_class", "subprocess.Popen", "os.system", "marshal.loads"):
            HEARD.append(f"{event} {arguments!r:.100}")

    huggingface.load(out)  # makes late imports happen before the hook listens
    sys.addaudithook(listen)
    pickle.loads(pickle.dumps(Path))
    assert [heard.split()[0] for heard in HEARD] == ["pickle.find_class"]  # the hook works
    HEARD.clear()
    huggingface.load(out)
    assert HEARD == []


@pytest.mark.oracle
def test_transformers_tokenizes_20_000_tokens_as_we_do(out: Path, byte_tokenizer: Tokenizer) -> None:
    transformers = pytest.importorskip("transformers")
    theirs, text = transformers.AutoTokenizer.from_pretrained(out), probes.long_text()
    ids = byte_tokenizer.encode(text)
    assert len(ids) >= 20_000 and not any(control in text for control in byte_tokenizer.control_ids)
    assert theirs(text)["input_ids"] == ids
    assert theirs.decode(ids) == text
    for messages, tools in probes.CONVERSATIONS:
        rendered = chat.render(byte_tokenizer, messages, tools, generation_prompt=True)
        options: dict[str, Any] = {"tools": tools or None, "add_generation_prompt": True}
        said = theirs.apply_chat_template(messages, tokenize=False, **options)
        assert said == chat.render_text(messages, tools, generation_prompt=True)
        assert theirs(said)["input_ids"] == rendered.ids


@pytest.mark.oracle
def test_the_tokenizer_gives_what_generate_takes(out: Path) -> None:
    """Unless told not to, transformers 4 also gives token types, and then rejects its own tokenizer's output."""
    transformers = pytest.importorskip("transformers")
    given = transformers.AutoTokenizer.from_pretrained(out)("a word", return_tensors="pt")
    assert set(given) == {"input_ids", "attention_mask"}
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert model.generate(**given, max_new_tokens=3).shape[1] > given["input_ids"].shape[1]


@pytest.mark.oracle
def test_transformers_computes_what_we_do(out: Path, tiny_model: Transformer, byte_tokenizer: Tokenizer) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out).eval()
    assert type(theirs).__name__ == "Qwen3ForCausalLM"
    ids = torch.tensor([byte_tokenizer.encode(smoke.probe())[:256]])
    with torch.no_grad():
        apart = theirs(ids).logits.log_softmax(-1) - tiny_model(ids).log_softmax(-1)
    assert float(apart.abs().max()) <= 1e-5


@pytest.mark.oracle
def test_transformers_rewards_the_last_token_that_is_no_padding_as_we_do(
    tiny_model: Transformer, byte_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    model = reward_model(tiny_model.config)
    huggingface.export(model, byte_tokenizer, LINEAGE, tmp_path)
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    assert (type(theirs).__name__, theirs.config.num_labels) == ("Qwen3ForSequenceClassification", 1)
    assert theirs.config.pad_token_id == byte_tokenizer.pad
    rows = [
        byte_tokenizer.encode(smoke.probe())[start : start + length]
        for start, length in ((0, 200), (500, 120), (900, 7))
    ]
    padded = torch.tensor([[*row, *[byte_tokenizer.pad] * (200 - len(row))] for row in rows])
    mask = (padded != byte_tokenizer.pad).long()
    with torch.no_grad():
        found = theirs(padded, attention_mask=mask).logits[:, 0]
        ours = torch.stack([model(torch.tensor([row]))[0, -1] for row in rows])
    assert float(ours.std()) > 0.1
    torch.testing.assert_close(found, ours, atol=1e-4, rtol=0)


def test_a_merged_adapter_is_the_model_with_its_adapter(
    tiny_model: Transformer, byte_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    from pipeline.model import lora

    model = Transformer(tiny_model.config, torch.Generator().manual_seed(0))
    model.load_state_dict(tiny_model.state_dict())
    lora.attach(model, lora.AdapterConfig(rank=4, alpha=8), torch.Generator().manual_seed(1))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.normal_(0, 0.05, generator=torch.Generator().manual_seed(len(name)))
    ids = torch.tensor([byte_tokenizer.encode(smoke.probe())[:256]])
    with torch.no_grad():
        attached = model.train(False)(ids).log_softmax(-1)
        lora.merge(model)
        huggingface.export(model, byte_tokenizer, {}, tmp_path / "lora")
        exported, _ = checkpoint.load(tmp_path / "lora")
        found = exported.train(False)(ids).log_softmax(-1)
        plain = tiny_model(ids).log_softmax(-1)
    assert float((found - attached).abs().max()) <= 1e-5
    assert float((plain - attached).abs().max()) > 1e-2  # the adapter makes a difference
