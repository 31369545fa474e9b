"""How a server starts and ends: what it refuses to start with, what it does when a model dies, and how it stops when
asked.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from pipeline.model import checkpoint
from pipeline.text.tokenizer import Tokenizer
from tests.clients import ASK
from tests.server import ROOT, random_model, save_models, serving

pytestmark = [pytest.mark.slow, pytest.mark.full]  # a server of its own

BODY = {"model": "nano", "messages": ASK, "seed": 1, "max_tokens": 400, "ignore_eos": True}


def refused(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A start that must fail."""
    command = [sys.executable, "-m", "pipeline.serve", *arguments]
    return subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=120)


def test_an_open_address_needs_a_key(tmp_path: Path, byte_tokenizer: Tokenizer) -> None:
    nano = str(save_models(tmp_path, byte_tokenizer)[0])
    found = refused(nano, "--host", "0.0.0.0", "--port", "0")
    assert found.returncode == 2 and "STAGECOACH_API_KEYS" in found.stderr


def test_bad_starts_say_what_is_wrong(tmp_path: Path, byte_tokenizer: Tokenizer) -> None:
    nano = str(save_models(tmp_path, byte_tokenizer)[0])
    (tmp_path / "empty").mkdir()
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        cases = [
            ((str(tmp_path / "empty"),), "config.json"),
            ((nano, "--host", "here"), "--host"),
            ((nano, "--port", str(taken.getsockname()[1])), "--port"),
            ((nano, "--port", "80000"), "--port: expected 0 (a free port) to 65535, got 80000"),
            ((nano, "--api-key-file", str(tmp_path / "none")), "none"),
            ((nano, nano, "--port", "0"), "two models are called 'nano'"),
        ]
        for arguments, words in cases:
            found = refused(*arguments)
            assert found.returncode == 2 and words in found.stderr and "Traceback" not in found.stderr, found.stderr


def test_a_damaged_model_ends_the_server_with_the_reason(tmp_path: Path, byte_tokenizer: Tokenizer) -> None:
    nano = save_models(tmp_path, byte_tokenizer)[0]
    weights = nano / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    found = refused(str(nano), "--port", "0")
    assert found.returncode == 2 and "damaged" in found.stderr


@pytest.mark.parametrize("trap", ["auto_map", "code.py", "pytorch_model.bin"])
def test_a_model_directory_with_code_is_refused(tmp_path: Path, byte_tokenizer: Tokenizer, trap: str) -> None:
    nano = save_models(tmp_path, byte_tokenizer)[0]
    if trap == "auto_map":
        config = nano / "config.json"
        config.write_text(config.read_text().replace("{", '{"auto_map": {"AutoModel": "code.Model"},', 1))
    else:
        (nano / trap).write_bytes(b"import os")
    found = refused(str(nano), "--port", "0")
    assert found.returncode == 2 and trap in found.stderr


def test_a_gguf_file_is_never_read(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + b"\xff" * 100)
    found = refused(str(tmp_path / "model.gguf"), "--port", "0")
    assert found.returncode == 2 and "expected a model directory" in found.stderr


def test_the_template_of_a_model_directory_is_never_run_and_one_socket_listens(
    tmp_path: Path, byte_tokenizer: Tokenizer
) -> None:
    import psutil

    nano, other, _ = save_models(tmp_path, byte_tokenizer)
    hostile = "{{ cycler.__init__.__globals__.os.system('touch " + str(tmp_path / "owned") + "') }}"
    (other / "chat_template.jinja").write_text(hostile)
    config = other / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": hostile}))
    with serving([nano, other], log=tmp_path / "log") as running:
        prompts = [
            httpx.post(f"{running.url}/apply-template", json={"model": name, "messages": ASK}).json()["prompt"]
            for name in ("nano", "other")
        ]
        family = psutil.Process(running.process.pid)
        ports = {
            connection.laddr.port
            for process in (family, *family.children(recursive=True))
            for connection in process.net_connections()
            if connection.status == psutil.CONN_LISTEN
        }
    assert prompts[0] == prompts[1] and "cycler" not in prompts[1] and not (tmp_path / "owned").exists()
    assert ports == {int(running.url.rsplit(":", 1)[1])}


def test_a_signal_lets_answers_end(tmp_path: Path, byte_tokenizer: Tokenizer) -> None:
    found: list[Any] = []
    with serving(save_models(tmp_path, byte_tokenizer)[:1], log=tmp_path / "log") as running:
        whole = httpx.post(f"{running.url}/v1/chat/completions", json=BODY, timeout=60).json()
        asking = threading.Thread(
            target=lambda: found.append(httpx.post(f"{running.url}/v1/chat/completions", json=BODY, timeout=60))
        )
        asking.start()
        while not running.running():
            time.sleep(0.005)
        running.process.send_signal(signal.SIGTERM)
        asking.join()
        assert running.process.wait(30) == 0
    assert found[0].status_code == 200 and found[0].json()["choices"] == whole["choices"]


def test_a_worker_that_is_killed_is_started_again(tmp_path: Path, byte_tokenizer: Tokenizer) -> None:
    import psutil

    with serving(save_models(tmp_path, byte_tokenizer)[:1], log=tmp_path / "log") as running:
        first = httpx.post(f"{running.url}/v1/chat/completions", json=BODY, timeout=60).json()["choices"]
        [worker] = [
            child
            for child in psutil.Process(running.process.pid).children()
            if "resource_tracker" not in " ".join(child.cmdline())
        ]
        worker.kill()
        deadline = time.monotonic() + 60
        again = None
        while time.monotonic() < deadline:
            try:
                again = httpx.post(f"{running.url}/v1/chat/completions", json=BODY, timeout=60)
                if again.status_code == 200:
                    break
            except httpx.TransportError:
                time.sleep(0.1)
        assert again is not None and again.json()["choices"] == first


def test_a_client_that_does_not_read_is_dropped(tmp_path: Path, byte_tokenizer: Tokenizer) -> None:
    """Its answers would be 128,000 tokens and about 200 MB of events; the kernel's buffers hold about 3 MB."""
    checkpoint.save(tmp_path / "endless", random_model(byte_tokenizer, context=16_384, layers=4), byte_tokenizer, {})
    asked = {"model": "endless", "messages": ASK, "max_tokens": 16_000, "n": 8, "stream": True, "ignore_eos": True}
    body = json.dumps(asked | {"logprobs": True, "top_logprobs": 20}).encode()
    request = (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length:"
        b" %d\r\n\r\n" % len(body)
    )
    with serving([tmp_path / "endless"], log=tmp_path / "log") as server, closing(socket.socket()) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        address, port = server.url.removeprefix("http://").split(":")
        connection.connect((address, int(port)))
        connection.sendall(request + body)
        assert server.reaches(8, 30)
        assert server.reaches(0, 120)
        text = httpx.get(f"{server.url}/metrics").text
        said = re.search(r'generation_tokens_total\{model_name="endless"\} (\S+)', text)
        assert said and float(said[1]) < 8 * 16_000, "it was told to the end, into a buffer without an end"
