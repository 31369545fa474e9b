"""The server's options: made from the command line, and sent to the worker process. Imports no torch, so that the
command starts at once.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pipeline.run.errors import ConfigError

Weights = Literal["int8", "native"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the server serves, and to whom."""

    models: tuple[Path, ...]
    weights: Weights | None = None  # None: by size
    rows: int = 8  # requests that run at a time
    queue: int = 32  # requests that wait
    rate: float = 200.0  # requests a second of a key, or of an address without one (`limits.py`); 0: no limit
    api_key_file: Path | None = None
    feedback: Path | None = None
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    failure: Path | None = None  # where the worker writes why it cannot start; its parent reads it

    def check(self) -> None:
        """Raise ConfigError for models that would fail to load in the worker."""
        for model in self.models:
            if not (model / "config.json").is_file():
                raise ConfigError(f"{model}: expected a model directory with config.json; build one with dvc repro")
