"""Stage deploy: export the chosen model and verify that every export matches it.

    models/<deploy.model>, manifests of data/raw -> models/deploy

Writes a Hugging Face directory with a model card and checksums. For a causal model, the stage also writes GGUF files
for llama.cpp and its derivatives, an Ollama Modelfile and, on request, an ONNX model. Each export is loaded and
compared with the model on a probe text. The stage fails if the difference is larger than the number format can explain,
so a published model always answers like the one that was evaluated. Finally, a real server answers six requests. Reward
models, and a wing's model kinds that no other program can run, are exported only as directories.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from pipeline.export import gguf, huggingface, onnx, smoke
from pipeline.model import checkpoint
from pipeline.model.transformer import Transformer
from pipeline.run.errors import ModelError
from pipeline.run.stage import main
from pipeline.run.tracking import say
from pipeline.run.workdir import Job
from pipeline.text.tokenizer import Tokenizer

Proofs = dict[str, dict[str, float | int]]


@dataclass(frozen=True, kw_only=True)
class Params:
    """The `deploy` block."""

    model: str
    """Model to deploy: a folder in models/."""
    gguf: tuple[str, ...] = ("f16", "q8_0")
    """GGUF types to write, from f32, f16, bf16, q8_0; the Ollama Modelfile uses the last type in the list."""
    onnx: str | None = None
    """ONNX export: none, fp32 or int4; fp32 and int4 need the extra `onnx`."""

    def __post_init__(self) -> None:
        if not self.model or "/" in self.model or self.model.startswith(".") or self.model == "deploy":
            raise ValueError(f"model: expected the name of a folder in models/, such as tools, got {self.model!r}")
        if unknown := [kind for kind in self.gguf if kind not in gguf.TYPES]:
            raise ValueError(f"gguf: expected types from {', '.join(gguf.TYPES)}, got {', '.join(map(repr, unknown))}")
        if len(set(self.gguf)) != len(self.gguf):
            raise ValueError(f"gguf: duplicate type in {', '.join(self.gguf)}")
        if self.onnx not in (None, *onnx.KINDS):
            raise ValueError(f"onnx: expected `none`, {' or '.join(onnx.KINDS)}, got {self.onnx!r}")


def run(params: Params, job: Job, *, base: Path, text: Path, code: Path, out: Path) -> None:
    """Export `base` to `out` and compare the two. `text` and `code` are the corpus manifests for the model card."""
    if params.onnx is not None:
        onnx.need()
    model, tokenizer = huggingface.load(base)
    if isinstance(model, Transformer) and model.hook is not None and model.hook.leaky:
        raise ModelError(
            f"{base}: this memory routes on future tokens (`routing: sequence`), so the model cannot generate;"
            " train a memory with `routing: chunk`"
        )
    name = f"stagecoach-{params.model}"
    made_by = checkpoint.lineage(base)
    lineage = job.lineage | {"model": params.model, "made_by": made_by.get("key", "elsewhere")}
    huggingface.export(model, tokenizer, lineage, out)
    proofs: Proofs = {"huggingface": huggingface.verify(model, tokenizer, out)}
    gguf_file = None
    if isinstance(model, Transformer) and model.hook is None:
        proofs |= _write_other_formats(params, model, tokenizer, out, name)
        if params.gguf:
            gguf_file = f"gguf/{name}-{params.gguf[-1]}.gguf"
            context = model.config.max_context
            gguf.write_modelfile(out / "ollama/Modelfile", f"../{gguf_file}", context, temperature=0.7)
    elif params.gguf or params.onnx:
        say(f"stage_deploy: {params.model} {_reason_for_no_export(model)}: skipping GGUF, ONNX and Modelfile")
    data = {
        corpus: json.loads(path.read_text(encoding="utf-8")) for corpus, path in {"text": text, "code": code}.items()
    }
    huggingface.write(
        out,
        huggingface.Exported(
            name=name,
            model=model,
            tokenizer=tokenizer,
            parity=proofs,
            lineage=lineage,
            made_by=made_by,
            data=data,
            gguf=gguf_file,
            onnx=(out / "onnx").is_dir(),
        ),
    )
    huggingface.seal(out)  # last: the checksums cover all files
    calls = smoke.check(out, model, tokenizer)
    job.register(out, model=params.model)
    parameters = smoke.trunk(model).num_parameters()
    job.report(model=params.model, parameters=parameters, parity=proofs, smoke_calls=calls)


def _reason_for_no_export(model: smoke.Exportable) -> str:
    """The reason why no other program can run a model, as text for a message."""
    if isinstance(model, Transformer):
        return "has an external memory, which only our engine supports"
    return "does not generate left to right"


def _write_other_formats(params: Params, model: Transformer, tokenizer: Tokenizer, out: Path, name: str) -> Proofs:
    """Write a causal model in other programs' formats, and compare each export with it."""
    proofs = {kind: _write_gguf(model, tokenizer, out, kind=kind, name=name) for kind in params.gguf}
    if params.onnx is not None:
        onnx.build(out, out / "onnx", kind=params.onnx)
        proofs[f"onnx {params.onnx}"] = onnx.verify(out / "onnx", model, tokenizer, kind=params.onnx)
    return proofs


def _write_gguf(model: Transformer, tokenizer: Tokenizer, out: Path, *, kind: str, name: str) -> dict[str, float | int]:
    """Write a GGUF file into the export `out`, and compare it with the model."""
    path = out / "gguf" / f"{name}-{kind}.gguf"
    path.parent.mkdir(exist_ok=True)
    serialized = (out / "tokenizer.json").read_text(encoding="utf-8")
    gguf.write(path, model, tokenizer, serialized, kind=kind, name=name)
    return gguf.verify(path, model, tokenizer, serialized, kind=kind)


if __name__ == "__main__":
    main(
        run,
        inputs={"base": "models/{model}", "text": "data/raw/text/manifest.json", "code": "data/raw/code/manifest.json"},
        outs={"out": "models/deploy"},
    )
