"""A registered version as an MLflow model: `mlflow.pyfunc.load_model("models:/stagecoach@champion")`.

    model.predict(["Write a story about a cat."], params={"temperature": 0.7, "max_new_tokens": 200, "seed": 1})

A prompt is one message of a user, the result the text of the assistant's turn; calls of tools stand in it as the model
writes them. The model's folder has a copy of this package, and names the packages that it needs (torch, tokenizers and
a few small ones): the program that loads it needs no clone of this repository. Raises ModelError for what writes no
text from left to right.

Not here: conversations, tools, batches of many users: `python -m pipeline.serve` on the same folder.
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
    """What MLflow loads: a model that answers prompts."""

    def __init__(self, folder: Path) -> None:
        self.model, self.tokenizer = checkpoint.load(folder)

    def predict(self, model_input: DataFrame | Iterable[str], params: JsonObject | None = None) -> list[str]:
        """An answer to each prompt. MLflow gives the prompts as a table of one column."""
        given = params or {}
        prompts = [str(row[0]) for row in model_input.to_numpy()] if hasattr(model_input, "to_numpy") else model_input
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
    """MLflow's entry to a loader module."""
    return Assistant(Path(data_path))
