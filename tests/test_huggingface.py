"""The exported directory: checksums, card, and the proof that it is the model it was made from."""

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline import checkpoint
from pipeline.errors import GateError
from pipeline.export import card, huggingface, parity
from pipeline.model.transformer import Transformer
from pipeline.text.tokenizer import Tokenizer

LINEAGE = {"key": "0123456789abcdef", "made_by": "fedcba", "inputs": {"models/tools": "77"}}


@pytest.fixture
def out(tiny_model: Transformer, byte_tokenizer: Tokenizer, tmp_path: Path) -> Path:
    out = tmp_path / "deploy"
    huggingface.export(tiny_model, byte_tokenizer, LINEAGE, out)
    proof = {"huggingface": huggingface.verify(tiny_model, byte_tokenizer, out)}
    card.write(out, tiny_model, byte_tokenizer, LINEAGE, proof, name="stagecoach-tools", gguf="gguf/a.gguf")
    (out / "gguf").mkdir()
    (out / "gguf/a.gguf").write_bytes(b"GGUF")
    huggingface.seal(out)
    return out


def test_every_file_has_its_checksum(out: Path) -> None:
    lines = (out / "SHA256SUMS").read_text().splitlines()
    sums = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    assert sums == {
        str(p.relative_to(out)): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in out.rglob("*") if p.is_file() and p.name != "SHA256SUMS"
    }  # fmt: skip
    assert {"README.md", "model.safetensors", "gguf/a.gguf"} <= sums.keys()
    huggingface.seal(out)  # again: its own sum is not in it
    assert (out / "SHA256SUMS").read_text().splitlines() == lines


def test_the_card_states_the_facts_and_leaves_no_gap(
    out: Path, tiny_model: Transformer, byte_tokenizer: Tokenizer
) -> None:
    text = (out / "README.md").read_text()
    assert "@" not in text
    for fact in ("# stagecoach-tools", f"{tiny_model.num_parameters():,} parameters", "context 256", "BPE of 320 tokens",
                 byte_tokenizer.hash[:16], "| key | `0123456789abcdef` |", "| made_by | `fedcba` |", "-m models/deploy/gguf/a.gguf",
                 "ollama create stagecoach-tools -f", "| this directory | 0.0e+00 | 0 | +0.000% | 64 of 64 |"):  # fmt: skip
        assert fact in text


def test_the_export_equals_its_model(out: Path, tiny_model: Transformer, byte_tokenizer: Tokenizer) -> None:
    proof = huggingface.verify(tiny_model, byte_tokenizer, out)
    tokens = len(byte_tokenizer.encode(parity.PROBE.read_text(encoding="utf-8")))
    assert proof == {
        "max_difference": 0.0,
        "divergence": 0.0,
        "perplexity": 0.0,
        "probe_tokens": tokens,
        "greedy_equal": 64,
        "greedy_tokens": 64,
    }
    assert tokens > 1000


@pytest.mark.parametrize("value", [1e-3, float("nan")])
def test_one_changed_weight_fails_the_proof(
    value: float, out: Path, tiny_model: Transformer, byte_tokenizer: Tokenizer
) -> None:
    tensors = load_file(out / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][0, 0] += value
    save_file(tensors, out / "model.safetensors")
    with pytest.raises(GateError, match="read back, log-probabilities differ by"):
        huggingface.verify(tiny_model, byte_tokenizer, out)


def test_another_tokenizer_fails_the_proof(out: Path, tiny_model: Transformer, byte_tokenizer: Tokenizer) -> None:
    Tokenizer.train(iter(["xxx yyy xxx yyy"]), 320).save(out)
    with pytest.raises(GateError, match="the exported tokenizer splits the probe differently"):
        huggingface.verify(tiny_model, byte_tokenizer, out)


def test_a_short_context_is_proved_over_what_it_holds(
    tiny_model: Transformer, byte_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    short = Transformer(replace(tiny_model.config, max_context=48), torch.Generator().manual_seed(0))
    huggingface.export(short, byte_tokenizer, {}, tmp_path / "short")
    assert huggingface.verify(short, byte_tokenizer, tmp_path / "short")["greedy_equal"] == 24


@pytest.mark.oracle
def test_the_commands_of_the_card_work_in_transformers(
    out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.chdir(out.parent)
    code = (out / "README.md").read_text().split("```python\n")[1].split("```")[0].replace("models/deploy", "./deploy")
    code = code.replace("max_new_tokens=200", "max_new_tokens=8")
    exec(compile(code, "README.md", "exec"), {})
    assert "<|im_start|>user\nWrite a function" in capsys.readouterr().out
    assert checkpoint.lineage(out)["key"] == LINEAGE["key"]
