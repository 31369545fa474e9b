"""The smoke test of an export asks a real server, quotes what it says is wrong, and leaves no process behind."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import psutil
import pytest
import torch

from pipeline.export import huggingface, smoke
from pipeline.model import checkpoint
from pipeline.model.heads import RewardModel
from pipeline.model.transformer import Transformer
from pipeline.run import processes
from pipeline.run.errors import GateError
from pipeline.text.tokenizer import Tokenizer

ROOT = Path(__file__).parents[1]


@pytest.fixture
def model(tiny_model: Transformer) -> Transformer:
    """A model with room for a tool's description in bytes."""
    return Transformer(replace(tiny_model.config, max_context=512), torch.Generator().manual_seed(0)).train(False)


def servers() -> list[int]:
    return [child.pid for child in psutil.Process().children(recursive=True)]


@pytest.mark.slow
def test_a_causal_export_answers_six_calls(model: Transformer, byte_tokenizer: Tokenizer, tmp_path: Path) -> None:
    huggingface.export(model, byte_tokenizer, {}, tmp_path / "deploy")
    huggingface.seal(tmp_path / "deploy")
    before = servers()
    assert smoke.check(tmp_path / "deploy", model, byte_tokenizer) == 6
    assert servers() == before
    huggingface.check(tmp_path / "deploy")  # the server wrote nothing there


@pytest.mark.slow
@pytest.mark.full
def test_a_reward_export_answers_six_calls(model: Transformer, byte_tokenizer: Tokenizer, tmp_path: Path) -> None:
    judge = RewardModel(model)
    with torch.no_grad():
        judge.score.weight.normal_(generator=torch.Generator().manual_seed(3))
    huggingface.export(judge, byte_tokenizer, {}, tmp_path / "deploy")
    assert smoke.check(tmp_path / "deploy", judge, byte_tokenizer) == 6
    with torch.no_grad():
        judge.score.weight.mul_(2)
    with pytest.raises(GateError, match="/score: expected the model's"):
        smoke.check(tmp_path / "deploy", judge, byte_tokenizer)


@pytest.mark.slow
@pytest.mark.full
def test_a_server_that_refuses_the_export_is_quoted(
    model: Transformer, byte_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    checkpoint.save(tmp_path / "deploy", model, byte_tokenizer, {})
    huggingface.seal(tmp_path / "deploy")
    (tmp_path / "deploy/lineage.json").write_text("{ }")
    before = servers()
    with pytest.raises(GateError, match=r"(?s)it exited with code 2.*Its last output:.*lineage\.json: expected sha256"):
        smoke.check(tmp_path / "deploy", model, byte_tokenizer)
    assert servers() == before


class Wrong(BaseHTTPRequestHandler):
    """Gives every call the same answer."""

    answer: tuple[int, dict[str, Any]] = (200, {})

    def do_GET(self) -> None:
        """Send the answer, except that health is always good."""
        status, body = (200, {}) if self.path == "/health" else self.answer
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    do_POST = do_GET

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


LISTED = {"id": "deploy", "meta": {"kind": "causal", "context": 512, "parameters": 1}}


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((500, {"error": "gone"}), "/v1/models: expected status 200, found '500"),
        ((200, {"data": []}), "/v1/models: expected deploy"),
        ((200, {"data": [LISTED]}), "/v1/models: expected deploy"),
        ((200, {"nothing": 1}), r"KeyError\('data'\)"),
    ],
)
def test_wrong_answers_fail_the_gate(
    answer: tuple[int, dict[str, Any]],
    message: str,
    model: Transformer,
    byte_tokenizer: Tokenizer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Wrong, "answer", answer)
    with HTTPServer(("127.0.0.1", 0), Wrong) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        (tmp_path / "pretender.py").write_text(
            f"import time; print('http://127.0.0.1:{server.server_port}  serves', flush=True); time.sleep(60)"
        )
        beside = processes.beside
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        monkeypatch.setattr(processes, "beside", lambda _, arguments, log: beside("pretender", arguments, log))
        with pytest.raises(GateError, match=message):
            smoke.check(tmp_path / "deploy", model, byte_tokenizer)
        server.shutdown()


def test_a_process_beside_ends_with_its_block_and_with_its_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sleeper.py").write_text("import sys, time; print(sys.argv[1:], __name__, flush=True); time.sleep(60)")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    with processes.beside("sleeper", ["one", "two"], tmp_path / "log") as process:
        _until(lambda: (tmp_path / "log").read_text() == "['one', 'two'] __main__\n")
        assert process.poll() is None
    assert process.returncode == -signal.SIGTERM
    code = f"""
import os
from pathlib import Path
from pipeline.run import processes
with processes.beside("sleeper", [], Path({str(tmp_path / "log2")!r})) as process:
    print(process.pid, flush=True)
    while not Path({str(tmp_path / "log2")!r}).read_text():
        pass
    os.kill(os.getpid(), 9)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL
    _until(lambda: not psutil.pid_exists(int(done.stdout)) or psutil.Process(int(done.stdout)).status() == "zombie")


def _until(holds: Any) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        os.sched_yield()
