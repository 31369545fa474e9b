"""Directories of masked-diffusion models: as in `model/checkpoint.py`, plus the model's traits in config.json.

    config.json: "model_type": "stagecoach_mdm", "shift", "mask_token_id", "fill_token_id", "banned_ids", "block_size",
    "end_ids"

Tensors use Qwen3's names; the `model_type` makes causal engines refuse the directory instead of generating nonsense.
There is no generation_config.json, because these models do not decode left to right.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from pipeline.diffusion.model import PUBLISHED, Denoiser, Traits, load_published
from pipeline.model import checkpoint
from pipeline.model.config import BIDIRECTIONAL, ModelConfig, read_config
from pipeline.model.transformer import Transformer
from pipeline.run.errors import GateError, ModelError
from pipeline.run.types import JsonObject
from pipeline.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from pipeline.export.smoke import ServedModel

KEYS = {
    "mask": "mask_token_id",
    "fill": "fill_token_id",
    "banned": "banned_ids",
    "shift": "shift",
    "block_size": "block_size",
    "ends": "end_ids",
}
WHAT: str = "A masked-diffusion code model"  # in the model card of an export
REMEDY = "run dvc repro stage_diffusion to make a masked-diffusion model"


def traits(tokenizer: Tokenizer, *, shift: bool, block_size: int = 0) -> Traits:
    """The traits of our own models: the fill is the end of turn; mask and padding are never predicted."""
    return Traits(
        mask=tokenizer.mask,
        fill=tokenizer.turn_end,
        banned=(tokenizer.pad, tokenizer.mask),
        shift=shift,
        block_size=block_size,
    )


def save(folder: Path, model: Denoiser, tokenizer: Tokenizer, lineage: JsonObject, *, precision: str = "fp32") -> None:
    """Write a model directory. Same errors as `checkpoint.save`."""
    checkpoint.save(folder, model.trunk, tokenizer, lineage, precision=precision)
    (folder / "generation_config.json").unlink()
    path = folder / "config.json"
    values = json.loads(path.read_text(encoding="utf-8"))
    own = {key: getattr(model.traits, name) for name, key in KEYS.items()}
    lists = {"banned_ids": list(model.traits.banned), "end_ids": list(model.traits.ends)}
    values |= own | lists | {"eos_token_id": model.traits.fill, "use_cache": False}
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def opens(folder: Path) -> bool:
    """Whether a directory contains a masked-diffusion model. Raises ModelError if config.json is invalid."""
    return read_config(folder).attention != "causal"


def load(folder: Path) -> tuple[Denoiser, Tokenizer]:
    """The model (float32, training mode) and its tokenizer.

    Raises ModelError for a causal model, missing traits, or ids that the tokenizer does not have; otherwise the same
    errors as `checkpoint.load`.
    """
    config = read_config(folder)
    if config.attention != "bidirectional":
        raise ModelError(f"{folder}: expected a masked-diffusion model, found a causal one ({config.family}); {REMEDY}")
    trunk, tokenizer = checkpoint.load_any(folder)
    return Denoiser(trunk, _traits(folder, tokenizer)), tokenizer


def load_frozen(folder: Path) -> Denoiser:
    """The model in evaluation mode with frozen weights. Same errors as `load`."""
    model, _ = load(folder)
    return model.train(False).requires_grad_(False)


def _traits(folder: Path, tokenizer: Tokenizer) -> Traits:
    values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    missing = sorted(key for key in KEYS.values() if key not in values)
    if missing:
        raise ModelError(f"{folder}/config.json: missing keys: {', '.join(missing)}; {REMEDY}")
    ids = [values["mask_token_id"], values["fill_token_id"], *values["banned_ids"], *values["end_ids"]]
    if not all(isinstance(id_, int) and 0 <= id_ < tokenizer.vocab_size for id_ in ids):
        raise ModelError(
            f"{folder}/config.json: expected ids below {tokenizer.vocab_size}, the tokenizer's vocabulary size, as the"
            f" mask, fill, banned and end ids; found {ids}"
        )
    if values["mask_token_id"] not in tokenizer.special_ids:
        raise ModelError(
            f"{folder}: mask_token_id {values['mask_token_id']} is not a special token of the tokenizer, so texts may"
            " contain it; use the tokenizer that the model was trained with"
        )
    return Traits(
        mask=values["mask_token_id"],
        fill=values["fill_token_id"],
        banned=tuple(values["banned_ids"]),
        shift=values["shift"],
        block_size=values["block_size"],
        ends=tuple(values["end_ids"]),
    )


def is_masked(folder: Path) -> bool:
    """Whether a checkpoint, published or our own, is a masked-diffusion model."""
    return checkpoint.kind(folder) in (*PUBLISHED, BIDIRECTIONAL)


def take_in(folder: Path, out: Path, lineage: JsonObject, precision: str) -> None:
    """Convert a published checkpoint, or one of ours, to a model directory. Raises ModelError."""
    model, tokenizer = load(folder) if checkpoint.kind(folder) == BIDIRECTIONAL else load_published(folder)
    save(out, model, tokenizer, lineage, precision=precision)


@torch.no_grad()
def from_causal(model: Transformer, tokenizer: Tokenizer, *, block_size: int = 0) -> Denoiser:
    """A bidirectional copy of a causal model, with the same shift; the mask's embedding starts as the mean embedding.

    Gong et al. 2024 (DiffuLLaMA, arXiv:2410.17891), section 3. No weights are shared. Raises ModelError for a model
    with a memory.
    """
    trunk = Transformer(_bidirectional(model))
    trunk.load_state_dict(model.state_dict())
    table = trunk.model.embed_tokens.weight
    table[tokenizer.mask] = table.mean(0)
    return Denoiser(trunk, traits(tokenizer, shift=True, block_size=block_size))


def from_scratch(
    shape: Transformer, tokenizer: Tokenizer, generator: torch.Generator, *, block_size: int = 0
) -> Denoiser:
    """A model of the same shape with fresh weights and no shift. Raises ModelError if `shape` has a memory."""
    trunk = Transformer(_bidirectional(shape), generator)
    return Denoiser(trunk, traits(tokenizer, shift=False, block_size=block_size))


def _bidirectional(model: Transformer) -> ModelConfig:
    if model.hook is not None:
        raise ModelError(
            "a masked-diffusion model cannot start from a model with a memory, because a memory routes left to right;"
            " use a model without a memory, such as model: nano"
        )
    return replace(model.config, attention="bidirectional")


# -- export ------------------------------------------------------------------------------------------------------------


def owns(model: object) -> bool:
    """Whether a model is a masked-diffusion model."""
    return isinstance(model, Denoiser)


def check_same(model: Denoiser, exported: Denoiser, out: Path) -> None:
    """Raise GateError if the traits of two models differ."""
    if exported.traits != model.traits:
        raise GateError(f"{out}: the exported model has the traits {exported.traits}, expected {model.traits}")


def smoke_calls(server: "ServedModel", model: Denoiser) -> int:
    """Make the six calls of the export's smoke test; returns their number. Raises GateError."""
    from pipeline.export.smoke import TEXT, answer, check_models, check_stream, check_tokenize, expect

    check_models(server, "diffusion", model.trunk)
    text = answer(server)
    check_stream(server, text)
    _check_denoising(server)
    check_tokenize(server)
    refused = server.ask("/v1/completions", {"prompt": TEXT}, status=400)["error"]
    expect(refused["code"] == "wrong_kind", "/v1/completions", "the error wrong_kind", refused)
    return 6


def _check_denoising(server: "ServedModel") -> None:
    """Check that each denoising step leaves fewer masks than the one before."""
    from pipeline.export.smoke import expect

    path = "/v1/chat/completions"
    events = server.events({"stream_options": {"include_denoising": True}})[:-1]
    steps = [chunk["denoising"] for chunk in map(json.loads, events) if "denoising" in chunk]
    masks = [step["tokens"].count(None) for step in steps if step["offset"] == 0]
    expect(bool(masks) and masks == sorted(set(masks), reverse=True), path, "fewer masks after each step", masks)
