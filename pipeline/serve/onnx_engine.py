"""A decoder on onnxruntime-genai for the engine: each row is a generator of an ONNX export. Queue, sampling,
constraints and drafts stay ours.

    models/deploy/onnx -> Export -> Engine(model, decoder=export.decoder)

A generator is rewound to the end of the prefix it shares with the next prompt, so a request reuses its row's prefix. A
busy row cannot be copied. Rows are fed one after another: many of them are no faster together than in turns. Only the
logits come from the runtime, so sampling follows the same rules on every engine.

int4 rounds activations to 8 bits, and its kernel for a single token sums in another order than the one for many: a
difference in the seventh digit then grows to some 0.05 of log-probability. With int4 a token is therefore fed together
with the one before it, which costs next to nothing. An answer is then the same however its prefix was fed, with drafts
and without.

Needs the package onnxruntime-genai (extra `onnx`). Telemetry is off. Not here: making the export (`export/onnx.py`).
"""

import hashlib
import importlib
import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from pipeline.model.config import ModelConfig
from pipeline.run.errors import ConfigError, ModelError
from pipeline.run.workdir import sha256
from pipeline.serve.engine import Lengths

PACKAGE = "onnxruntime_genai"
QUANTIZED = b"MatMulNBits"  # the operator of int4 products: a graph without it is fp32
MIN_TOKENS = {"fp32": 1, "int4": 2}  # that are fed together, see above
FILES = ("genai_config.json", "model.onnx", "model.onnx.data")
HARMLESS = {"log_id", "provider_options"}  # of the session's options; others name libraries to load, or files to write


class Generator(Protocol):
    """What we use of onnxruntime_genai.Generator."""

    def token_count(self) -> int: ...

    def get_sequence(self, index: int, /) -> np.ndarray: ...

    def rewind_to(self, length: int, /) -> None: ...

    def append_tokens(self, tokens: np.ndarray, /) -> None: ...

    def get_logits(self) -> np.ndarray: ...

    def get_output(self, name: str, /) -> np.ndarray: ...


class Export:
    """An export loaded by onnxruntime-genai. `kind` is fp32 or int4, `fingerprint` a hash of its files."""

    def __init__(self, folder: Path, config: ModelConfig) -> None:
        """`config` is the exported model's.

        Raises ConfigError without the package or the export, ModelError for one of another model, or one that would
        load code.
        """
        if importlib.util.find_spec(PACKAGE) is None:
            raise ConfigError("--engine onnx: expected the package onnxruntime-genai; pip install 'stagecoach[onnx]'")
        if missing := [name for name in FILES if not (folder / name).is_file()]:
            raise ConfigError(
                f"--engine onnx: expected an export in {folder}, {missing[0]} is missing; set deploy.onnx to fp32 or"
                " int4 and run dvc repro stage_deploy, then serve models/deploy"
            )
        check(folder, config)
        self.context, self.vocabulary = config.max_context, config.vocab_size
        self.kind = "int4" if QUANTIZED in (folder / "model.onnx").read_bytes() else "fp32"
        self.fingerprint = hashlib.sha256("".join(sha256(folder / name) for name in FILES).encode()).hexdigest()
        self.library: ModuleType = importlib.import_module(PACKAGE)
        self.library.disable_telemetry_events()
        genai_config = self.library.Config(str(folder))
        session = {"intra_op_num_threads": torch.get_num_threads()}
        genai_config.overlay(json.dumps({"model": {"decoder": {"session_options": session}}}))
        self.model = self.library.Model(genai_config)

    def decoder(self, rows: int) -> "OnnxDecoder":
        """A decoder with so many empty rows."""
        return OnnxDecoder(self, rows)

    def generator(self) -> Generator:
        """An empty row: a generator with room for the whole context. Its own search and sampling are not used."""
        options = self.library.GeneratorParams(self.model)
        options.set_search_options(do_sample=False, max_length=self.context)
        return self.library.Generator(self.model, options)


class OnnxDecoder:
    """A `BatchDecoder` over the generators of an export. What a generator holds behind `cache.own` is rewound when its
    row is next fed.
    """

    def __init__(self, export: Export, rows: int) -> None:
        self.export, self.cache = export, Lengths([0] * rows)
        # each is made when first fed: it takes the memory of a whole context
        self.generators: list[Generator | None] = [None] * rows

    def advance(self, rows: Sequence[int], tokens: Sequence[Sequence[int]], wanted: Sequence[int]) -> Tensor:
        """As `RowDecoder.advance`: logits (sum of wanted, V), in float32."""
        own = self.cache.own
        totals = [own[row] + len(row_tokens) for row, row_tokens in zip(rows, tokens, strict=True)]
        if max(totals) > self.export.context:
            raise ValueError(
                f"a row of {max(totals)} tokens is longer than the model's context of {self.export.context}"
            )
        logits = []
        for row, row_tokens, total, want in zip(rows, tokens, totals, wanted, strict=True):
            logits.append(self._feed(row, list(row_tokens), want))
            own[row] = total
        return torch.cat(logits)

    def rewind(self, row: int, length: int) -> None:
        """As `RowDecoder.rewind`."""
        assert length <= self.cache.own[row], "a row cannot be rewound to what it does not hold"
        self.cache.own[row] = length

    def _feed(self, row: int, tokens: list[int], want: int) -> Tensor:
        """Append tokens to a row: logits (want, V) after the last of them."""
        generator, past = self.generators[row], self.cache.own[row]
        if generator is None:
            generator = self.generators[row] = self.export.generator()
        if past and len(tokens) < MIN_TOKENS[self.export.kind]:
            past -= 1
            tokens = [int(generator.get_sequence(0)[past]), *tokens]
        if generator.token_count() != past:
            generator.rewind_to(past)
        generator.append_tokens(np.array(tokens, dtype=np.int32))
        if want == 0:
            return torch.empty(0, self.export.vocabulary)
        logits = generator.get_logits() if want == 1 else generator.get_output("logits")  # (1, 1 or len(tokens), V)
        return torch.from_numpy(logits)[0, -want:]


def check(folder: Path, config: ModelConfig) -> None:
    """Raise ModelError where genai_config.json belongs to another model, or names more than the graph beside it and
    the CPU.
    """
    path = folder / FILES[0]
    try:
        model = json.loads(path.read_text(encoding="utf-8"))["model"]
        decoder = model["decoder"]
        sizes = (model["vocab_size"], model["context_length"], decoder["num_hidden_layers"])
        parts = [name for name, value in model.items() if isinstance(value, dict) and name != "decoder"]
        options = dict(decoder["session_options"])
        file = decoder["filename"]
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(
            f"{path}: expected what stage_deploy writes ({error!r:.200}); export the model again"
        ) from error
    if sizes != (expected := (config.vocab_size, config.max_context, config.layers)):
        raise ModelError(
            f"{path}: expected vocabulary, context and layers {expected} as {folder.parent / 'config.json'} says, found"
            f" {sizes}; export the model again"
        )
    suspects = [*parts, *sorted(options.keys() - HARMLESS)]
    suspects += ["provider_options"] if options.get("provider_options") else []
    suspects += [] if file == FILES[1] else ["filename"]
    if suspects:
        raise ModelError(
            f"{path}: {suspects[0]} may name code to load; expected what stage_deploy writes; export the model again"
        )
