"""Published masked-diffusion checkpoints: Dream and DiffuCoder (`model_type` Dream), LLaDA (llada), from a local directory.

    folder -> Denoiser, its tokenizer taken in (text/adoption.py)

Sizes and ids come from config.json and the tokenizer, never from a literal. Dream has Qwen2's names and biases and keeps the shift of
the causal model that it was; LLaDA names its tensors in its own way and has none. Where the two files disagree about an id the
tokenizer wins (DiffuCoder's config.json has another padding).

Not promised: their own conversation templates: a prompt is rendered as everywhere here, so fine-tune before you talk to it. Code
that a checkpoint brings along is never run.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from pipeline.errors import ModelError
from pipeline.model import convert, stored
from pipeline.model.config import ModelConfig, number, read_values, whole
from pipeline.model.denoiser import Denoiser, Traits
from pipeline.model.pretrained import TABLES, grown
from pipeline.model.transformer import Transformer
from pipeline.text.adoption import adopt
from pipeline.text.control import BEGINS, END_OF_TEXT, MASKS, PADS, TURN_ENDS
from pipeline.text.tokenizer import Tokenizer

LLADA_SIZES = {
    "width": "d_model", "layers": "n_layers", "heads": "n_heads", "d_ff": "mlp_hidden_size", "max_context": "max_sequence_length",
    "rope_theta": "rope_theta",
}  # fmt: skip
LLADA_TOP = {"wte": "model.embed_tokens", "ln_f": "model.norm", "ff_out": "lm_head"}
LLADA_BLOCK = {
    "q_proj": "self_attn.q_proj", "k_proj": "self_attn.k_proj", "v_proj": "self_attn.v_proj", "attn_out": "self_attn.o_proj",
    "attn_norm": "input_layernorm", "ff_norm": "post_attention_layernorm", "ff_proj": "mlp.gate_proj",
    "up_proj": "mlp.up_proj", "ff_out": "mlp.down_proj",
}  # fmt: skip
Named = TypeVar("Named")


@dataclass(frozen=True)
class Published:
    """A checkpoint's shape, whether it is shifted, and what config.json says of its ids."""

    shape: ModelConfig
    shift: bool
    ids: dict[str, int | None]  # mask, eos, pad, bos


def load(folder: Path) -> tuple[Denoiser, Tokenizer]:
    """The model in float32 and its tokenizer, with rows for the control tokens that were added.

    Raises ModelError for another family, a missing or unknown tensor, and ids that the tokenizer does not have.
    """
    told = read(folder)
    found, keys = stored.headers(folder), stored.KEYS
    if any(name.startswith("model.transformer.") for name in found):
        found, keys = renamed(found), keys | LLADA_SIZES
    stored.check(told.shape, folder, found, keys)
    adopted = adopt(folder, told.shape.vocab_size)
    tokenizer = adopted.tokenizer
    state = convert.read_weights(folder)
    state = renamed(state) if any(name.startswith("model.transformer.") for name in state) else dict(state)
    for name in TABLES:
        if name in state:
            state[name] = grown(state[name], tokenizer.vocab_size, adopted.known, adopted.fresh)
    trunk = Transformer(replace(told.shape, vocab_size=tokenizer.vocab_size))
    convert.load_state(trunk, state, source=str(folder))
    return Denoiser(trunk, traits(folder, told, tokenizer, adopted.fresh)), tokenizer


def read(folder: Path) -> Published:
    """What config.json says. Raises ModelError."""
    path, values = folder / "config.json", read_values(folder)
    kind = values.get("model_type")
    ids = {name: values.get(f"{name}_token_id") for name in ("mask", "eos", "pad", "bos")}
    if kind == "Dream":
        shape = ModelConfig.from_hf(values | {"model_type": "qwen2"})
        return Published(replace(shape, attention="bidirectional"), True, ids)
    if kind == "llada":
        return Published(_llada(values, path), False, ids)
    raise ModelError(f"{path}: model_type {kind!r}; expected Dream (Dream, DiffuCoder) or llada. A causal checkpoint goes into stage_language: language.start=pretrained")  # fmt: skip


def _llada(values: dict[str, Any], path: Path) -> ModelConfig:
    try:
        sizes: dict[str, Any] = {name: whole(values, key) for name, key in LLADA_SIZES.items() if name != "rope_theta"}
        heads = whole(values, "n_heads")
        return ModelConfig(
            **sizes, rope_theta=number(values, "rope_theta", 0.0),
            vocab_size=whole(values, "embedding_size" if values.get("embedding_size") else "vocab_size"),
            kv_heads=whole(values, "n_kv_heads", heads), head_dim=whole(values, "d_model") // heads,
            tied=bool(values.get("weight_tying", False)), norm_eps=number(values, "rms_norm_eps", 1e-5), qk_norm=False,
            attention="bidirectional",
        )  # fmt: skip
    except KeyError as error:
        raise ModelError(f"{path}: key {error} is missing; it is not a whole llada configuration") from error
    except ModelError:
        raise
    except ValueError as error:
        raise ModelError(f"{path}: {error}") from error


def renamed(state: Mapping[str, Named]) -> dict[str, Named]:
    """LLaDA's tensors, or their shapes, under our names: its ff_proj is the gate. Raises ModelError for a name that it does not have."""
    found = {}
    for name, tensor in state.items():
        parts = name.removeprefix("model.transformer.").split(".")
        if parts[0] == "blocks" and len(parts) == 4 and parts[2] in LLADA_BLOCK:
            found[f"model.layers.{parts[1]}.{LLADA_BLOCK[parts[2]]}.{parts[3]}"] = tensor
        elif parts[0] in LLADA_TOP and len(parts) == 2:
            found[f"{LLADA_TOP[parts[0]]}.{parts[1]}"] = tensor
        else:
            raise ModelError(f"{name}: no tensor of a llada checkpoint")
    return found


def original(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our names back to LLaDA's."""
    top, block = ({ours: theirs for theirs, ours in table.items()} for table in (LLADA_TOP, LLADA_BLOCK))
    found = {}
    for name, tensor in state.items():
        stem, _, kind = name.rpartition(".")
        if stem.startswith("model.layers."):
            _, _, number, rest = stem.split(".", 3)
            found[f"model.transformer.blocks.{number}.{block[rest]}.{kind}"] = tensor
        else:
            found[f"model.transformer.{top[stem]}.{kind}"] = tensor
    return found


def traits(folder: Path, told: Published, tokenizer: Tokenizer, fresh: tuple[int, ...]) -> Traits:
    """Mask, fill, ends and banned ids, by the tokenizer's own tokens, then by config.json. Raises ModelError without a mask."""
    own = {text: id_ for text, id_ in tokenizer.control_ids.items() if id_ not in fresh}

    def known(names: tuple[str, ...]) -> int | None:
        return next((own[name] for name in names if name in own), None)

    mask = known(MASKS)
    mask = told.ids["mask"] if mask is None else mask
    if mask is None or mask not in own.values():
        raise ModelError(
            f"{folder}: expected a mask token in the tokenizer ({' or '.join(MASKS)}), found none; config.json names "
            f"{told.ids['mask']}"
        )
    fill = told.ids["eos"] if told.ids["eos"] in own.values() else own.get(END_OF_TEXT, tokenizer.turn_end)
    assert fill is not None
    turn = known(TURN_ENDS)
    pad, begin = known(PADS), known(BEGINS)
    spare = {tokenizer.pad, tokenizer.mask} & set(fresh)  # ours that it does not know
    banned = {id_ for id_ in (mask, begin, pad, *spare) if id_ is not None and id_ != fill}
    ends = {id_ for id_ in (turn, tokenizer.turn_end) if id_ is not None and id_ != fill}
    return Traits(mask=mask, fill=fill, banned=tuple(sorted(banned)), shift=told.shift, ends=tuple(sorted(ends)))
