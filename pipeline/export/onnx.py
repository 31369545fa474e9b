"""ONNX for onnxruntime-genai: its own builder converts the exported directory, and its own runtime verifies the result.

    models/deploy --build--> models/deploy/onnx: model.onnx, model.onnx.data, genai_config.json, tokenizer

Requires the extra `onnx`: pip install 'stagecoach[onnx]'. The builder, `python -m onnxruntime_genai.models.builder`,
runs inside this process, without network access. It imports transformers; our code does not. int4 is the builder's own
rounding, in blocks of 32 with one scale each.

Not here: serving the directory (`serve/`). Not guaranteed: any accuracy for int4, whose distance from the model is only
reported; identical bytes from another version of the builder.
"""

import contextlib
import importlib
import importlib.util
import io
import runpy
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeline.export import smoke
from pipeline.model.transformer import Transformer
from pipeline.run.errors import GateError, InputError, ModelError
from pipeline.text.tokenizer import Tokenizer

KINDS = ("fp32", "int4")
BUILDER = "onnxruntime_genai.models.builder"
PACKAGES = ("onnxruntime_genai", "onnxruntime", "onnx", "onnx_ir", "transformers")
OURS = ("tokenizer.json", "chat_template.jinja")  # the builder rewrites both, so ours are copied over


def need() -> None:
    """Raise InputError if a package of the extra `onnx` is missing; call this before any long computation."""
    if missing := [name for name in PACKAGES if importlib.util.find_spec(name) is None]:
        raise InputError(
            f"deploy.onnx: packages of the extra `onnx` are missing: {', '.join(missing)}; "
            "install them (pip install 'stagecoach[onnx]') or set deploy.onnx to none"
        )


def build(model: Path, out: Path, *, kind: str) -> None:
    """Build `out` from the model directory `model`. Raises InputError without the extra, and ModelError if the
    builder fails.
    """
    need()
    assert kind in KINDS, kind
    with tempfile.TemporaryDirectory() as cache:
        arguments = ["-i", str(model), "-o", str(out), "-p", kind, "-e", "cpu", "-c", cache]
        output = io.StringIO()
        try:
            with _as_program(arguments), contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
                runpy.run_module(BUILDER, run_name="__main__", alter_sys=True)
        except (Exception, SystemExit) as error:  # not our code: any exception means the export failed
            last = " | ".join(output.getvalue().split("\n")[-5:])
            raise ModelError(f"{out}: {BUILDER} failed: {error!r:.500}. Last output: {last:.500}") from error
    for name in OURS:
        shutil.copyfile(model / name, out / name)


@contextlib.contextmanager
def _as_program(arguments: list[str]) -> Iterator[None]:
    """Run the `with` body like a script with these arguments, without warnings or network access; restore sys.path."""
    import huggingface_hub.constants as hub

    argv, path, offline = sys.argv, list(sys.path), hub.HF_HUB_OFFLINE
    sys.argv, hub.HF_HUB_OFFLINE = [BUILDER, *arguments], True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        sys.argv, sys.path[:], hub.HF_HUB_OFFLINE = argv, path, offline


class Genai:
    """onnxruntime-genai with an export loaded, as a `smoke.ExportProgram`."""

    def __init__(self, folder: Path) -> None:
        """Raises InputError without the extra."""
        need()
        self.library: Any = importlib.import_module("onnxruntime_genai")
        if hasattr(self.library, "disable_telemetry_events"):
            self.library.disable_telemetry_events()
        self.model = self.library.Model(str(folder))
        self.tokenizer = self.library.Tokenizer(self.model)

    def _generator(self, ids: list[int], max_length: int) -> Any:
        options = self.library.GeneratorParams(self.model)
        options.set_search_options(do_sample=False, max_length=max_length)
        generator = self.library.Generator(self.model, options)
        generator.append_tokens(np.array(ids, dtype=np.int32))
        return generator

    def logits(self, ids: list[int]) -> Tensor:
        """The logits (T, V) after each of the ids."""
        return torch.from_numpy(np.array(self._generator(ids, len(ids)).get_output("logits")))[0]

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """The greedy ids after the prompt, decoded with a cache; the library's own search would end at a stop token."""
        generator = self._generator(prompt, len(prompt) + count)
        tokens: list[int] = []
        for _ in range(count):
            tokens.append(int(np.array(generator.get_logits()).reshape(-1).argmax()))
            if len(tokens) < count:
                generator.append_tokens(np.array(tokens[-1:], dtype=np.int32))
        return tokens

    def encode(self, text: str) -> list[int]:
        """The ids of a text, by the library's own tokenizer; control tokens in the text are recognized."""
        return [int(id_) for id_ in self.tokenizer.encode(text)]


def verify(folder: Path, model: Transformer, tokenizer: Tokenizer, *, kind: str) -> dict[str, float | int]:
    """Load an export in onnxruntime-genai, compare it with its model, and return the differences. Raises GateError."""
    program, text = Genai(folder), smoke.probe()
    ids = tokenizer.encode(text)
    if program.encode(text) != ids:
        raise GateError(f"{folder}: onnxruntime-genai splits the probe differently from the model's tokenizer")
    return smoke.check_parity(smoke.compare(model, program, ids), f"onnx {kind}", folder)
