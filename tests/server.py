"""A real server with tiny models, in its own process, for the tests that use HTTP."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import torch

from pipeline.model import checkpoint
from pipeline.model.config import ModelConfig
from pipeline.model.heads import RewardModel
from pipeline.model.transformer import Transformer
from pipeline.text.tokenizer import Tokenizer

ROOT = Path(__file__).parents[1]
SECONDS = 120  # for a start on a slow machine


@dataclass(frozen=True)
class Running:
    """A server that answers at `url`."""

    url: str
    process: subprocess.Popen[str]
    log: Path

    def running(self) -> float:
        """The number of rows that are generating now, over all models."""
        text = httpx.get(f"{self.url}/metrics").text
        return sum(float(n) for n in re.findall(r"^stagecoach:num_requests_running\{[^}]*\} (\S+)", text, re.MULTILINE))

    def reaches(self, rows: int, seconds: float = 5) -> bool:
        """Whether `rows` rows soon generate; a step takes milliseconds, but the machine may be busy."""
        deadline = time.monotonic() + seconds
        while self.running() != rows and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.running() == rows

    def falls_idle(self) -> bool:
        """Whether all rows soon become free."""
        return self.reaches(0)


def random_model(tokenizer: Tokenizer, *, context: int = 2048, seed: int = 0, layers: int = 2) -> Transformer:
    """An untrained model with weights so large that its text varies."""
    config = ModelConfig(
        vocab_size=tokenizer.vocab_size,
        width=32,
        layers=layers,
        heads=2,
        kv_heads=1,
        head_dim=16,
        d_ff=48,
        max_context=context,
        rope_theta=1e4,
        tied=True,
    )
    model = Transformer(config, torch.Generator().manual_seed(seed))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3.2)
    return model.train(False)


def save_models(folder: Path, tokenizer: Tokenizer) -> list[Path]:
    """Two causal models, `nano` and `other`, and a reward model, `judge`."""
    for name, seed in (("nano", 0), ("other", 1)):
        checkpoint.save(folder / name, random_model(tokenizer, seed=seed), tokenizer, {})
    judge = RewardModel(random_model(tokenizer, seed=2))
    with torch.no_grad():
        judge.score.weight.normal_(generator=torch.Generator().manual_seed(3))
    checkpoint.save_reward(folder / "judge", judge, tokenizer, {})
    return [folder / name for name in ("nano", "other", "judge")]


@contextmanager
def serving(
    models: list[Path], *options: str, log: Path, environment: dict[str, str] | None = None, folder: Path = ROOT
) -> Iterator[Running]:
    """`python -m pipeline.serve` in a copy of the repository on a free port, ready when the block begins."""
    command = [sys.executable, "-m", "pipeline.serve", *map(str, models), "--port", "0", *options]
    with log.open("w") as stderr:
        process = subprocess.Popen(
            command,
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"} | (environment or {}),
        )
    try:
        assert process.stdout is not None
        first = process.stdout.readline()
        assert first.startswith("http://"), f"{first}{log.read_text()}"
        url = first.split()[0]
        ready(url, process, log)
        yield Running(url, process, log)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        assert process.stdout is not None
        process.stdout.close()


def ready(url: str, process: subprocess.Popen[str], log: Path) -> None:
    """Wait until /health answers 200. Raises AssertionError with the server's log."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(f"{url}/health").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.05)
    raise AssertionError(f"the server is not ready:\n{log.read_text()}")
