"""Where the sandbox is, who attacks it, and its service in its own process."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from pipeline.sandbox import remote
from tests.training import free_port

ROOT = Path(__file__).parents[1]
SANDBOX = ROOT / "pipeline" / "sandbox"
# `make test` attacks the jail as the user who runs it, `make test-all` as another user too
WHO = ["root", pytest.param("nobody", marks=pytest.mark.full)] if os.getuid() == 0 else ["user"]


def unprivileged_python() -> str | None:
    """A Python 3.11 or newer that another user may execute; ours, unless it is in somebody's home."""
    for name in [sys.executable, *(shutil.which(n, path="/usr/local/bin:/usr/bin") or "" for n in ("python3",))]:
        if name:
            code = "import sys; sys.exit(sys.version_info < (3, 11))"
            try:
                if (
                    subprocess.run([name, "-c", code], user=65534, group=65534, extra_groups=[], cwd="/").returncode
                    == 0
                ):
                    return name
            except OSError:
                continue
    return None


def started(*arguments: str, token: str | None = None) -> tuple[subprocess.Popen[str], str]:
    """Start a service; returns its process and its address. Its first line says that it is about to listen."""
    port = free_port()
    environment = {key: value for key, value in os.environ.items() if key != remote.TOKEN}
    environment |= {} if token is None else {remote.TOKEN: token}
    command = [sys.executable, "-m", "pipeline.sandbox.service", "--port", str(port), "--workers", "2", *arguments]
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("sandbox service at"):
            break
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            httpx.get(f"{url}/health", trust_env=False)
            return process, url
        except httpx.ConnectError:
            continue
    raise AssertionError("the service does not listen")


def ended(process: subprocess.Popen[str]) -> None:
    process.terminate()
    process.communicate(timeout=60)
