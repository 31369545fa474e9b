"""Stage deploy: export the chosen model and prove that every export is the model.

    models/<deploy.model> -> models/deploy

A Hugging Face directory with card and checksums; in it GGUF files for llama.cpp and its relatives, and Ollama's Modelfile. Each is
read back and compared on a probe text; a difference beyond what its number format explains fails the stage, so what is published
always answers as the model that was evaluated.
"""

from dataclasses import dataclass
from pathlib import Path

from pipeline import checkpoint
from pipeline.export import card, gguf, huggingface, ollama
from pipeline.model.transformer import Transformer
from pipeline.params import main
from pipeline.text.tokenizer import Tokenizer
from pipeline.work import Job


@dataclass(frozen=True, kw_only=True)
class Params:
    """The block `deploy`."""

    model: str  # a folder of models/
    gguf: tuple[str, ...] = ("f16", "q8_0")  # types of GGUF files: f32, f16, bf16, q8_0; the last one is Ollama's

    def __post_init__(self) -> None:
        if not self.model or "/" in self.model or self.model.startswith(".") or self.model == "deploy":
            raise ValueError(f"model: expected the name of a folder of models/ such as tools, got {self.model!r}")
        if unknown := [kind for kind in self.gguf if kind not in gguf.TYPES]:
            raise ValueError(f"gguf: expected types of {', '.join(gguf.TYPES)}, got {', '.join(map(repr, unknown))}")
        if len(set(self.gguf)) != len(self.gguf):
            raise ValueError(f"gguf: a type stands there twice: {', '.join(self.gguf)}")


def run(params: Params, job: Job, *, base: Path, out: Path) -> None:
    """Export `base` into `out` and compare the two."""
    model, tokenizer = checkpoint.load(base)
    name = f"stagecoach-{params.model}"
    lineage = job.lineage | {"model": params.model, "made_by": checkpoint.lineage(base).get("key", "elsewhere")}
    huggingface.export(model, tokenizer, lineage, out)
    parity = {"huggingface": huggingface.verify(model, tokenizer, out)}
    parity |= {kind: write_gguf(model, tokenizer, out, kind=kind, name=name) for kind in params.gguf}
    shown = f"gguf/{name}-{params.gguf[-1]}.gguf" if params.gguf else None
    if shown is not None:
        ollama.write(out / "ollama/Modelfile", f"../{shown}", model.config.max_context, temperature=0.7)
    card.write(out, model, tokenizer, lineage, parity, name=name, gguf=shown)
    huggingface.seal(out)  # last: the sums are of everything
    job.report(model=params.model, parameters=model.num_parameters(), parity=parity)


def write_gguf(model: Transformer, tokenizer: Tokenizer, out: Path, *, kind: str, name: str) -> dict[str, float | int]:
    """Write a GGUF file into the export `out`, and prove it."""
    path = out / "gguf" / f"{name}-{kind}.gguf"
    path.parent.mkdir(exist_ok=True)
    serialized = (out / "tokenizer.json").read_text(encoding="utf-8")
    gguf.write(path, model, tokenizer, serialized, kind=kind, name=name)
    return gguf.verify(path, model, tokenizer, serialized, kind=kind)


if __name__ == "__main__":
    main(run, inputs={"base": "models/{model}"}, outs={"out": "models/deploy"})
