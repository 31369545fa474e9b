"""The stage exports the requested model with the lineage of both, and formats for causal models from those alone."""

import json
import subprocess
from pathlib import Path

import pytest
import torch

from pipeline.export import huggingface, onnx
from pipeline.model import checkpoint
from pipeline.model.heads import RewardModel
from pipeline.model.transformer import Transformer
from pipeline.run.errors import InputError, ModelError
from pipeline.text.tokenizer import Tokenizer
from stages import deploy
from tests.deployment import both_manifests as both_manifests
from tests.deployment import deployed, files_of

TOOLS = deploy.Params(model="tools")


@pytest.fixture
def base(tiny_model: Transformer, byte_tokenizer: Tokenizer, tmp_path: Path) -> Path:
    lineage = {"key": "base-key", "code": "c0de", "inputs": {"models/code": "88"}}
    checkpoint.save(tmp_path / "base", tiny_model, byte_tokenizer, lineage)
    return tmp_path / "base"


@pytest.fixture(autouse=True)
def unserved(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> list[Path]:
    """In all but the slow tests, collect the folders to be smoke-tested instead of serving them."""
    asked: list[Path] = []
    if request.node.get_closest_marker("slow") is None:
        monkeypatch.setattr(deploy.smoke, "check", lambda folder, *_: asked.append(folder) or 6)
    return asked


def test_the_export_names_its_maker_and_passes_its_proof(
    base: Path, tiny_model: Transformer, corpora: dict[str, Path], tmp_path: Path, unserved: list[Path]
) -> None:
    out = tmp_path / "out"
    told = deployed(TOOLS, base, out, corpora, {"key": "deploy-key", "inputs": {"models/tools": "77"}})
    lineage = checkpoint.lineage(out)
    assert (lineage["key"], lineage["made_by"], lineage["model"]) == ("deploy-key", "base-key", "tools")
    assert (told["model"], told["parameters"], told["smoke_calls"]) == ("tools", tiny_model.num_parameters(), 6)
    assert unserved == [out]
    assert told["parity"].keys() == {"huggingface", "f16", "q8_0"}
    assert (told["parity"]["huggingface"]["max_difference"], told["parity"]["huggingface"]["greedy_equal"]) == (0.0, 64)
    assert 0 < told["parity"]["f16"]["max_difference"] < told["parity"]["q8_0"]["max_difference"]
    assert (out / "model.safetensors").read_bytes() == (base / "model.safetensors").read_bytes()
    ggufs = {f"gguf/stagecoach-tools-{kind}.gguf" for kind in ("f16", "q8_0")}
    assert ggufs | {"ollama/Modelfile", "SHA256SUMS", "README.md", "config.json", "tokenizer.json"} <= files_of(out)
    assert subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=out).returncode == 0
    start = (out / "ollama/Modelfile").read_text().splitlines()[0].removeprefix("FROM ")
    assert (out / "ollama" / start).samefile(out / "gguf/stagecoach-tools-q8_0.gguf")


def test_the_card_states_the_facts_and_leaves_no_gap(
    base: Path, tiny_model: Transformer, byte_tokenizer: Tokenizer, corpora: dict[str, Path], tmp_path: Path
) -> None:
    deployed(TOOLS, base, tmp_path / "out", corpora, {"key": "deploy-key", "inputs": {"models/tools": "77"}})
    text = (tmp_path / "out/README.md").read_text()
    assert "@" not in text and huggingface.NOT_RUN_BY_OTHERS not in text and "onnxruntime" not in text
    for fact in (
        "# stagecoach-tools",
        f"{tiny_model.num_parameters():,} parameters",
        "context 256",
        "BPE of 320 tokens",
        byte_tokenizer.hash[:16],
        "| stagecoach-tools: key | `deploy-key` |",
        "| its model: key | `base-key` |",
        "| stagecoach-tools: from models/tools | `77` |",
        "| its model: from models/code | `88` |",
        "| its model: code | `c0de` |",
        "python -m pipeline.serve models/deploy ",
        "vllm serve",
        "mlx_lm.chat",
        "-m models/deploy/gguf/stagecoach-tools-q8_0.gguf",
        "ollama create stagecoach-tools -f",
        "| this directory | 0.0e+00 | 0 | +0.000% | 64 of 64 | difference 0 |",
        "| divergence 0.005 |",
        "**text** (machine: prose, stories): 10 documents, 1,000 bytes. Licenses: CC0-1.0 60.00%, MIT 40.00%.",
        "Licenses: a b 66.67%, PSF-2.0 33.33%.",
    ):
        assert fact in text, fact


def test_two_exports_have_the_same_bytes(base: Path, corpora: dict[str, Path], tmp_path: Path) -> None:
    for name in ("one", "two"):
        deployed(deploy.Params(model="tools", gguf=("bf16",)), base, tmp_path / name, corpora)
    sums = [(tmp_path / name / "SHA256SUMS").read_text() for name in ("one", "two")]
    assert sums[0] == sums[1] and "gguf/stagecoach-tools-bf16.gguf" in sums[0]


def test_without_gguf_there_is_no_modelfile(base: Path, corpora: dict[str, Path], tmp_path: Path) -> None:
    deployed(deploy.Params(model="tools", gguf=()), base, tmp_path / "out", corpora)
    assert not (tmp_path / "out/gguf").exists() and not (tmp_path / "out/ollama").exists()
    text = (tmp_path / "out/README.md").read_text()
    assert "llama-cli" not in text and "ollama" not in text and "vllm serve" in text


@pytest.fixture
def reward(tiny_model: Transformer, byte_tokenizer: Tokenizer, tmp_path: Path) -> RewardModel:
    """A reward model, saved in `tmp_path`/reward."""
    model = RewardModel(Transformer(tiny_model.config, torch.Generator().manual_seed(3)))
    with torch.no_grad():
        model.score.weight.copy_(torch.randn(model.score.weight.shape, generator=torch.Generator().manual_seed(4)))
    model.reward_mean, model.reward_std = 0.25, 1.5
    checkpoint.save_reward(tmp_path / "reward", model, byte_tokenizer, {"key": "reward-key"})
    return model.train(False)


def test_a_reward_model_is_a_directory_alone(
    reward: RewardModel, corpora: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = deployed(deploy.Params(model="reward"), tmp_path / "reward", tmp_path / "out", corpora)
    assert "reward does not generate left to right: skipping GGUF, ONNX and Modelfile" in capsys.readouterr().err
    assert not {name for name in files_of(tmp_path / "out") if name.startswith(("gguf", "onnx", "ollama"))}
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["architectures"] == ["Qwen3ForSequenceClassification"]
    assert (config["num_labels"], config["reward_mean"], config["reward_std"]) == (1, 0.25, 1.5)
    assert told["parity"] == {
        "huggingface": {"max_difference": 0.0, "probe_tokens": told["parity"]["huggingface"]["probe_tokens"]}
    }
    text = (tmp_path / "out/README.md").read_text()
    assert "@" not in text and "vllm" not in text
    for fact in (
        "# stagecoach-reward",
        "A reward model trained with",
        "comparable only within a prompt",
        "no GGUF file, ONNX",
        "its mean is 0.250 and its standard deviation 1.500",
        "pipeline_tag: text-classification",
    ):
        assert fact in text, fact


def test_a_model_with_code_in_its_directory_is_not_deployed(
    base: Path, corpora: dict[str, Path], tmp_path: Path
) -> None:
    (base / "modeling.py").write_text("")
    with pytest.raises(ModelError, match=r"modeling\.py: found code"):
        deployed(TOOLS, base, tmp_path / "out", corpora)


def test_onnx_without_its_extra_fails_before_anything_is_written(
    base: Path, corpora: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnx, "PACKAGES", ("json", "surely_not_installed"))
    with pytest.raises(
        InputError, match=r"are missing: surely_not_installed; install them \(pip install 'stagecoach\[onnx\]'"
    ):
        deployed(deploy.Params(model="tools", onnx="fp32"), base, tmp_path / "out", corpora)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_real_server_is_asked(base: Path, corpora: dict[str, Path], tmp_path: Path) -> None:
    assert deployed(deploy.Params(model="tools", gguf=()), base, tmp_path / "out", corpora)["smoke_calls"] == 6


@pytest.mark.oracle
@pytest.mark.parametrize("name", ["tools", "reward"])
def test_the_commands_of_the_card_work_in_transformers(
    name: str,
    base: Path,
    reward: RewardModel,
    byte_tokenizer: Tokenizer,
    corpora: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("transformers")
    out = tmp_path / "exported"
    deployed(deploy.Params(model=name), base if name == "tools" else tmp_path / "reward", out, corpora)
    monkeypatch.chdir(tmp_path)
    code = (
        (out / "README.md").read_text().split("```python\n")[1].split("```")[0].replace("models/deploy", "./exported")
    )
    capsys.readouterr()
    exec(compile(code.replace("max_new_tokens=200", "max_new_tokens=8"), "README.md", "exec"), {})
    said = capsys.readouterr().out
    if name == "tools":
        assert "<|im_start|>user\nWrite a function" in said
        return
    ends, start = byte_tokenizer.turn_end, byte_tokenizer.turn_start
    ids = [start, *byte_tokenizer.encode("user\nWhat is 2 + 2?"), ends, *byte_tokenizer.encode("\n")]
    ids += [start, *byte_tokenizer.encode("assistant\n4"), ends]
    with torch.no_grad():
        assert float(said) == pytest.approx(float(reward(torch.tensor([ids]))[0, -1]), abs=1e-4)


@pytest.mark.parametrize(
    ("kinds", "message"),
    [(("q4_0",), "types from f32, f16, bf16, q8_0, got 'q4_0'"), (("f16", "f16"), "duplicate type in f16, f16")],
)
def test_unknown_types_of_gguf_are_refused(kinds: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        deploy.Params(model="tools", gguf=kinds)


def test_unknown_kinds_of_onnx_are_refused() -> None:
    with pytest.raises(ValueError, match="onnx: expected `none`, fp32 or int4, got 'fp16'"):
        deploy.Params(model="tools", onnx="fp16")


@pytest.mark.parametrize("kind", [None, "fp32", "int4"])
def test_onnx_is_built_and_proved_in_the_kind_that_was_asked_for(
    kind: str | None, base: Path, corpora: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a builder that only records its calls; test_onnx.py tests the real one."""
    asked: list[tuple[str, str]] = []
    proof = {"divergence": 0.0, "max_difference": 0.0, "perplexity": 0.0, "greedy_equal": 9, "greedy_tokens": 9}
    monkeypatch.setattr(onnx, "need", lambda: asked.append(("needed", "")))
    monkeypatch.setattr(onnx, "build", lambda base, out, *, kind: asked.append(("built", kind)))
    monkeypatch.setattr(onnx, "verify", lambda *_, kind: asked.append(("proved", kind)) or proof)
    params = deploy.Params(model="tools", gguf=(), onnx=kind)
    told = deployed(params, base, tmp_path / "out", corpora)
    assert asked == ([("needed", ""), ("built", kind), ("proved", kind)] if kind else [])
    assert told["parity"].keys() == {"huggingface"} | ({f"onnx {kind}"} if kind else set())


@pytest.mark.parametrize("name", ["", "deploy", "a/b", "..", "."])
def test_only_a_folder_of_models_can_be_deployed(name: str) -> None:
    with pytest.raises(ValueError, match=r"expected the name of a folder in models/, such as tools"):
        deploy.Params(model=name)
