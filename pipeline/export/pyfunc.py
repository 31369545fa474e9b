"""A registered version as an MLflow model: `mlflow.pyfunc.load_model("models:/stagecoach@champion")`.

    model.predict(["Write a story about a cat."], params={"temperature": 0.7, "max_new_tokens": 200, "seed": 1})

A prompt is one user message; the result is the text of the assistant's turn, including raw tool calls. The model folder
contains a copy of this package and lists its dependencies (torch, tokenizers and a few small packages), so loading it
does not require a clone of this repository. Models that do not generate text from left to right raise ModelError.

Not here: conversations, tools, batching across users; for these, use `python -m pipeline.serve` with the same folder.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.generation.sampling import Sampling, generate
from pipeline.model import checkpoint
from pipeline.run.types import JsonObject
from pipeline.text import chat

if TYPE_CHECKING:
    from pandas import DataFrame


class Assistant:
    """The object that MLflow loads: a model that answers prompts."""

    def __init__(self, folder: Path) -> None:
        self.model, self.tokenizer = checkpoint.load(folder)

    def predict(self, model_input: DataFrame | Iterable[str], params: JsonObject | None = None) -> list[str]:
        """One answer per prompt. MLflow passes the prompts as a table with one column."""
        given = params or {}
        table = getattr(model_input, "to_numpy", None)
        prompts = model_input if table is None else table()[:, 0]
        messages = [[{"role": "user", "content": str(prompt)}] for prompt in prompts]
        ids = [chat.render(self.tokenizer, turn, generation_prompt=True).ids for turn in messages]
        sampling = Sampling(int(given.get("max_new_tokens", 256)), temperature=float(given.get("temperature", 0.0)))
        first = int(given.get("seed", 0))
        completions = generate(
            self.model,
            ids,
            sampling,
            stop=(self.tokenizer.turn_end, self.tokenizer.end_of_text),
            seeds=list(range(first, first + len(ids))),
        )
        return [self.tokenizer.decode(completion.ids) for completion in completions]


def _load_pyfunc(data_path: str) -> Assistant:
    """MLflow's entry point for a loader module."""
    return Assistant(Path(data_path))
