"""What the server is asked to do: made from the command line, sent to the worker's process. Without torch, so that
it starts at once.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pipeline.run.errors import ConfigError

Weights = Literal["int8", "native"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is served, and to whom."""

    models: tuple[Path, ...]
    engine: Literal["torch", "onnx"] = "torch"
    weights: Weights | None = None  # None: by size; of the engine torch alone
    rows: int = 8
    queue: int = 32
    rate: float = 200.0  # requests a second of a key, or of an address without one (`rates.py`); 0: no limit
    api_key_file: Path | None = None
    feedback: Path | None = None
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    failure: Path | None = None  # where the worker says why it cannot start; its parent reads it

    def check(self) -> None:
        """Find what would fail in the worker. Raises ConfigError."""
        for model in self.models:
            if not (model / "config.json").is_file():
                raise ConfigError(f"{model}: expected a model directory with config.json; build one with dvc repro")
