"""The stage exports the model that it was asked for, with the lineage of both."""

import subprocess
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
    assert told["parity"].keys() == {"huggingface", "f16", "q8_0"}
    assert (told["parity"]["huggingface"]["max_difference"], told["parity"]["huggingface"]["greedy_equal"]) == (0.0, 64)
    assert 0 < told["parity"]["f16"]["max_difference"] < told["parity"]["q8_0"]["max_difference"]
    assert "stagecoach-tools" in (tmp_path / "out/README.md").read_text()
    weights = "model.safetensors"
    assert (tmp_path / "out" / weights).read_bytes() == (tmp_path / "base" / weights).read_bytes()
    files = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if path.is_file()}
    ggufs = {f"gguf/stagecoach-tools-{kind}.gguf" for kind in ("f16", "q8_0")}
    assert ggufs | {"ollama/Modelfile", "SHA256SUMS", "README.md", "config.json", "tokenizer.json"} <= files
    assert subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=tmp_path / "out").returncode == 0
    start = (tmp_path / "out/ollama/Modelfile").read_text().splitlines()[0].removeprefix("FROM ")
    assert (tmp_path / "out/ollama" / start).samefile(tmp_path / "out/gguf/stagecoach-tools-q8_0.gguf")


def test_two_exports_have_the_same_bytes(tiny_model: Transformer, byte_tokenizer: Tokenizer, tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "base", tiny_model, byte_tokenizer, {"key": "base-key"})
    job: Any = SimpleNamespace(lineage={"key": "deploy-key"}, report=lambda **_: None)
    for name in ("one", "two"):
        deploy.run(deploy.Params(model="tools", gguf=("bf16",)), job, base=tmp_path / "base", out=tmp_path / name)
    sums = [(tmp_path / name / "SHA256SUMS").read_text() for name in ("one", "two")]
    assert sums[0] == sums[1] and "gguf/stagecoach-tools-bf16.gguf" in sums[0]


def test_without_gguf_there_is_no_modelfile(tiny_model: Transformer, byte_tokenizer: Tokenizer, tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "base", tiny_model, byte_tokenizer, {"key": "base-key"})
    job: Any = SimpleNamespace(lineage={"key": "deploy-key"}, report=lambda **_: None)
    deploy.run(deploy.Params(model="tools", gguf=()), job, base=tmp_path / "base", out=tmp_path / "out")
    assert not (tmp_path / "out/gguf").exists() and not (tmp_path / "out/ollama").exists()


@pytest.mark.parametrize(("kinds", "message"), [(("q4_0",), "expected types of f32, f16, bf16, q8_0, got 'q4_0'"),
                                                (("f16", "f16"), "a type stands there twice")])  # fmt: skip
def test_unknown_types_of_gguf_are_refused(kinds: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        deploy.Params(model="tools", gguf=kinds)


@pytest.mark.parametrize("name", ["", "deploy", "a/b", "..", "."])
def test_only_a_folder_of_models_can_be_deployed(name: str) -> None:
    with pytest.raises(ValueError, match=r"expected the name of a folder of models/ such as tools"):
        deploy.Params(model=name)
