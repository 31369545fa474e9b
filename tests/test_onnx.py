"""ONNX built and run by onnxruntime-genai: our log-probabilities, our tokens, the same bytes, and no network.

Needs the extra `onnx`; without it, only the message about missing packages is tested.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.exports import Genai
from pipeline.export import huggingface, onnx
from pipeline.model import checkpoint
from pipeline.model.transformer import Transformer
from pipeline.run.errors import GateError, InputError, ModelError
from pipeline.text import chat
from pipeline.text.tokenizer import Tokenizer
from tests import probes

try:
    onnx.need()
    ABSENT = False
except InputError:
    ABSENT = True


def extra(test: Callable[..., None]) -> Callable[..., None]:
    """A test that needs the packages: `make test-extras`."""
    return pytest.mark.extra(pytest.mark.skipif(ABSENT, reason="needs the extra onnx")(test))


def test_the_missing_packages_of_the_extra_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(onnx, "PACKAGES", ("json", "surely_not_installed", "nor_this"))
    for needs in (
        onnx.need,
        lambda: onnx.build(tmp_path, tmp_path / "onnx", kind="fp32"),
        lambda: onnx.Genai(tmp_path),
    ):
        with pytest.raises(InputError, match="are missing: surely_not_installed, nor_this; install them"):
            needs()
    assert not (tmp_path / "onnx").exists()


@pytest.fixture
def exported(tiny_model: Transformer, byte_tokenizer: Tokenizer, tmp_path: Path) -> Path:
    """A model directory whose tokenizer has bytes and a few merges."""
    huggingface.export(tiny_model, byte_tokenizer, {}, tmp_path / "model")
    return tmp_path / "model"


OPENED: list[str] = []
LISTENING: list[bool] = []


@pytest.fixture
def no_network() -> Iterator[list[str]]:
    """Connections opened while the test runs; an audit hook cannot be removed, only told to stop listening."""

    def listen(event: str, arguments: tuple[Any, ...]) -> None:
        if LISTENING and event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname"):
            OPENED.append(f"{event} {arguments!r:.100}")

    sys.addaudithook(listen)
    OPENED.clear()
    LISTENING.append(True)
    yield OPENED
    LISTENING.clear()


@extra
@pytest.mark.parametrize("tied", [True, False])
def test_fp32_is_the_model_and_its_tokenizer(
    tied: bool, tiny_model: Transformer, byte_tokenizer: Tokenizer, tmp_path: Path, no_network: list[str]
) -> None:
    model = Transformer(replace(tiny_model.config, tied=tied), torch.Generator().manual_seed(2)).train(False)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3.2)
    huggingface.export(model, byte_tokenizer, {}, tmp_path / "model")
    onnx.build(tmp_path / "model", tmp_path / "onnx", kind="fp32")
    assert no_network == []
    found = onnx.verify(tmp_path / "onnx", model, byte_tokenizer, kind="fp32")
    assert found["max_difference"] <= 1e-4  # a tenth of the gate's bound
    assert (found["greedy_equal"], found["greedy_tokens"]) == (64, 64)
    program, text = Genai(tmp_path / "onnx"), probes.long_text()
    assert program.encode(text) == byte_tokenizer.encode(text)
    for messages, tools in probes.CONVERSATIONS:
        rendered = program.rendered(messages, tools)
        assert rendered == chat.render_text(messages, tools, generation_prompt=True)
        assert program.encode(rendered) == chat.render(byte_tokenizer, messages, tools, generation_prompt=True).ids


@extra
@pytest.mark.parametrize("kind", onnx.KINDS)
def test_twice_gives_the_same_bytes_and_leaves_no_trace(kind: str, exported: Path, tmp_path: Path) -> None:
    arguments, path = list(sys.argv), list(sys.path)
    before = {p.name: p.read_bytes() for p in exported.iterdir()}
    for name in ("one", "two"):
        onnx.build(exported, tmp_path / name, kind=kind)
    one, two = (
        {p.name: p.read_bytes() for p in (tmp_path / name).rglob("*") if p.is_file()} for name in ("one", "two")
    )
    assert one == two and {"model.onnx", "model.onnx.data", "genai_config.json", "tokenizer.json"} <= one.keys()
    assert one["tokenizer.json"] == before["tokenizer.json"]
    assert not any(str(tmp_path).encode() in content for content in one.values())
    assert (sys.argv, sys.path) == (arguments, path)
    assert {p.name: p.read_bytes() for p in exported.iterdir()} == before


@extra
def test_int4_is_recorded_and_rounds(
    exported: Path, tiny_model: Transformer, byte_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    onnx.build(exported, tmp_path / "onnx", kind="int4")
    found = onnx.verify(tmp_path / "onnx", tiny_model, byte_tokenizer, kind="int4")
    assert 1e-3 < found["divergence"] < 10
    with pytest.raises(GateError, match="log-probabilities differ by"):
        onnx.verify(tmp_path / "onnx", tiny_model, byte_tokenizer, kind="fp32")


@extra
def test_another_model_or_tokenizer_fails_the_proof(
    exported: Path, tiny_model: Transformer, byte_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    onnx.build(exported, tmp_path / "onnx", kind="fp32")
    with torch.no_grad():
        tiny_model.model.layers[1].mlp.down_proj.weight[0, 0] += 0.5
    with pytest.raises(GateError, match="log-probabilities differ by"):
        onnx.verify(tmp_path / "onnx", tiny_model, byte_tokenizer, kind="fp32")
    other = Tokenizer.train(iter(["xxx yyy xxx yyy"]), 320)
    with pytest.raises(GateError, match="onnxruntime-genai splits the probe differently"):
        onnx.verify(tmp_path / "onnx", tiny_model, other, kind="fp32")


@extra
def test_what_the_builder_refuses_is_told_in_its_words(exported: Path, tmp_path: Path) -> None:
    config = (exported / "config.json").read_text().replace("Qwen3ForCausalLM", "OtherForCausalLM")
    (exported / "config.json").write_text(config)
    with pytest.raises(ModelError, match=r"onnxruntime_genai\.models\.builder failed: .*"):
        onnx.build(exported, tmp_path / "onnx", kind="fp32")


@extra
def test_the_stage_writes_and_proves_onnx(
    exported: Path,
    byte_tokenizer: Tokenizer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from stages import deploy
    from tests.deployment import deployed, manifests

    monkeypatch.setattr(deploy.smoke, "check", lambda *_: 6)
    params = deploy.Params(model="tools", gguf=(), onnx="fp32")
    told = deployed(params, exported, tmp_path / "out", manifests(tmp_path))
    assert told["parity"]["onnx fp32"]["greedy_equal"] == 64
    text, sums = ((tmp_path / "out" / name).read_text() for name in ("README.md", "SHA256SUMS"))
    assert "| ONNX FP32 |" in text and "difference 0.001" in text and "@" not in text
    assert "onnx/model.onnx.data" in sums
    huggingface.check(tmp_path / "out")
    assert checkpoint.load(tmp_path / "out")[1].hash == byte_tokenizer.hash
    monkeypatch.chdir(tmp_path)
    code = (
        text.split("With onnxruntime-genai:")[1].split("```python\n")[1].split("```")[0].replace("models/deploy", "out")
    )
    capsys.readouterr()
    exec(compile(code, "README.md", "exec"), {})
    assert "user\nWrite a function" in capsys.readouterr().out
