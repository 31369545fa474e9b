"""How a masked-diffusion model writes: for a few held-out prompts, which tokens each step uncovered, and how sure it was of them.

    models/<stage>/trace.json     settings, and for each prompt its canvas and its steps: [place, id, text, probability] each

At temperature 0, so a trace is a function of the weights. The report shows it, and the web page plays it.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipeline.generation.denoising import Denoising, Generation, denoise
from pipeline.model.denoiser import Denoiser
from pipeline.text.tokenizer import Tokenizer

PROMPTS = 8
CANVAS = 64  # tokens, where nothing else is said


@dataclass(frozen=True)
class Asked:
    """A prompt as a person reads it, and as ids."""

    id: str
    text: str
    ids: list[int]


def write(paths: Sequence[Path], model: Denoiser, tokenizer: Tokenizer, asked: Sequence[Asked], *, length: int = CANVAS,
          block: int | None = None) -> None:  # fmt: skip
    """Uncover a canvas behind each of the first prompts that leave room for it, a token a step, and write what happened."""
    settings = Denoising(length=length, steps=length, block=block)
    fitting = [one for one in asked if len(one.ids) <= model.config.max_context - length][:PROMPTS]
    found = denoise(model, [one.ids for one in fitting], settings, [0] * len(fitting))
    told = {
        "settings": asdict(settings),
        "prompts": [row(one, done, tokenizer) for one, done in zip(fitting, found, strict=True)],
    }
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(told, ensure_ascii=False) + "\n", encoding="utf-8")


def row(asked: Asked, done: Generation, tokenizer: Tokenizer) -> dict[str, Any]:
    """One prompt's part of a trace."""

    def text(id_: int) -> str:
        return tokenizer.decode([id_], skip_special=False)

    steps = [{"committed": [[place, id_, text(id_), round(sure, 4)] for place, id_, sure in step.committed],
              "remasked": step.remasked} for step in done.steps]  # fmt: skip
    return {"id": asked.id, "prompt": asked.text, "answer": tokenizer.decode(done.ids), "forwards": done.forwards,
            "canvas": [text(id_) for id_ in done.canvas], "length": len(done.ids), "steps": steps}  # fmt: skip
