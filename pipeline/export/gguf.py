"""GGUF, the file format of llama.cpp, Ollama and related programs: written from a model, then read back for
verification.

    model, tokenizer  --write-->  <name>-<kind>.gguf      kind: f32, f16, bf16 or q8_0
    file  --read-->  Contents: the dequantized weights, the vocabulary, all keys
    GGUF file  --write_modelfile-->  Modelfile            ollama create mine -f models/deploy/ollama/Modelfile

llama.cpp's converter rejects tokenizers that it does not know, so this module writes the file with the `gguf` package.
Queries and keys are not permuted: Qwen's rotary embedding pairs halves in both implementations. Models of the `llama`
family, whose files pair neighbors, are rejected. Matrices get the requested type, except that with q8_0, a matrix whose
row length is not divisible by the block size of 32 is stored as f16; vectors stay f32.

Ollama's Modelfile contains the path of the GGUF file, the context length, the stop string and a template. Ollama does
not support Jinja: OLLAMA_TEMPLATE expresses in Go's text/template what `text/tokenizer.py` expresses in Jinja, plus
fill-in-the-middle with a prefix and a suffix. Ollama's variables are `.System`, the joined system messages;
`.Messages`, all messages; `.Tools`; and `.Prompt` and `.Suffix` of a completion. A tool's `.Function` prints as JSON,
and Ollama's `json` function prints its argument unchanged.

Not here: what other programs compute from the file (`benchmarks/exports.py`). Not guaranteed: reading files written by
other programs; JSON spacing, since Ollama writes no spaces after commas and colons, while the model was trained on JSON
with spaces there.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from gguf import TokenType
from torch import Tensor

from pipeline.export import smoke
from pipeline.model.config import ModelConfig
from pipeline.model.transformer import Transformer
from pipeline.run.errors import GateError, ModelError
from pipeline.run.types import JsonObject
from pipeline.text.chat import CALL, CALL_END, END, RESPONSE, RESPONSE_END, START
from pipeline.text.tokenizer import PATTERN, SPECIAL, TEMPLATE, Tokenizer

TYPES = {"f32": Type.F32, "f16": Type.F16, "bf16": Type.BF16, "q8_0": Type.Q8_0}
FILE_TYPES = {
    "f32": gguf.LlamaFileType.ALL_F32,
    "f16": gguf.LlamaFileType.MOSTLY_F16,
    "bf16": gguf.LlamaFileType.MOSTLY_BF16,
    "q8_0": gguf.LlamaFileType.MOSTLY_Q8_0,
}
ARCHITECTURES = {"qwen3": gguf.MODEL_ARCH.QWEN3, "qwen2": gguf.MODEL_ARCH.QWEN2}
# (split pattern, `ignore_merges`) -> the name that implies both in llama.cpp (src/llama-vocab.cpp). The pattern must be
# exact, since a similar one splits some text differently
SPLITS = {(PATTERN, False): "qwen2", (PATTERN.replace(r"\p{N}| ?", r"\p{N}{1,3}| ?"), True): "llama-bpe"}
FILLER = "<|unused_"
BLOCK = 32  # numbers per scale in q8_0


def write(path: Path, model: Transformer, tokenizer: Tokenizer, serialized: str, *, kind: str, name: str) -> None:
    """Write a causal model; `serialized` is the text of its tokenizer.json.

    Raises ModelError for a model that llama.cpp would interpret differently.
    """
    _check_supported(model, kind)
    config = model.config
    writer = gguf.GGUFWriter(path, config.family)
    try:
        _add_shape(writer, config, kind, name)
        _add_tokenizer(writer, tokenizer, vocabulary(serialized, config.vocab_size))
        for label, tensor in tensors(model):
            _add_tensor(writer, label, tensor, TYPES[kind])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def _check_supported(model: Transformer, kind: str) -> None:
    config = model.config
    if kind not in TYPES:
        raise ModelError(f"gguf: expected one of {', '.join(TYPES)}, got {kind!r}")
    if config.attention != "causal" or config.family not in ARCHITECTURES:
        kind_of_model = config.family if config.attention == "causal" else "bidirectional"
        raise ModelError(
            f"gguf: expected a causal model of the family {' or '.join(ARCHITECTURES)}, found {kind_of_model}; set"
            " deploy.gguf to []"
        )
    if model.hook is not None:
        raise ModelError(
            "gguf: llama.cpp does not support the memory and would load only the base model; set deploy.gguf to []"
        )
    if config.family == "qwen2" and config.heads * config.head_dim != config.width:
        raise ModelError(
            f"gguf: llama.cpp loads qwen2 only if heads * head_dim equals the width, found {config.heads} *"
            f" {config.head_dim} and {config.width}; set deploy.gguf to []"
        )


def _add_shape(writer: gguf.GGUFWriter, config: ModelConfig, kind: str, name: str) -> None:
    writer.add_type("model")
    writer.add_name(name)
    writer.add_file_type(FILE_TYPES[kind])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_context_length(config.max_context)
    writer.add_embedding_length(config.width)
    writer.add_block_count(config.layers)
    writer.add_feed_forward_length(config.d_ff)
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_vocab_size(config.vocab_size)


def _add_tokenizer(writer: gguf.GGUFWriter, tokenizer: Tokenizer, words: "Vocabulary") -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(words.split)
    writer.add_token_list(words.tokens)
    writer.add_token_types(words.types)
    writer.add_token_merges(words.merges)
    for key, id_ in roles(tokenizer).items():
        writer.add_uint32(key, id_)
    writer.add_add_bos_token(False)
    writer.add_chat_template(words.template)


def roles(tokenizer: Tokenizer) -> dict[str, int]:
    """The ids of tokens with a special role in llama.cpp: end of turn, padding and fill-in-the-middle."""
    ids = {
        "eos": tokenizer.turn_end,
        "eot": tokenizer.turn_end,
        "padding": tokenizer.pad,
        "fim_pre": tokenizer.fim_prefix,
        "fim_suf": tokenizer.fim_suffix,
        "fim_mid": tokenizer.fim_middle,
        "fim_pad": tokenizer.fim_pad,
    }
    return {f"tokenizer.ggml.{role}_token_id": id_ for role, id_ in ids.items()}


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer in llama.cpp's terms."""

    tokens: list[str]  # by id, with bytes written as GPT-2's characters
    types: list[int]  # gguf.TokenType of each token
    merges: list[str]  # "a b"
    split: str  # the name of the split pattern
    template: str  # chat template, in Jinja


def vocabulary(serialized: str, rows: int) -> Vocabulary:
    """The vocabulary of a tokenizer.json; unused ids below `rows` get a filler token.

    Raises ModelError for a split pattern or a normalizer that llama.cpp does not know.
    """
    state = json.loads(serialized)
    parts = state["pre_tokenizer"].get("pretokenizers", [])
    splits = [part["pattern"].get("Regex") for part in parts if part["type"] == "Split"]
    ignored = bool(state["model"].get("ignore_merges"))
    split = SPLITS.get((splits[0], ignored)) if len(splits) == 1 else None
    if split is None or state["normalizer"] is not None:
        raise ModelError(
            f"gguf: expected a split pattern that llama.cpp has a name for, and no normalizer; found {splits},"
            f" ignore_merges {ignored} and normalizer {state['normalizer']}; add the pattern's name to SPLITS in"
            " pipeline/export/gguf.py, or set deploy.gguf to []"
        )
    tokens = [f"{FILLER}{id_}|>" for id_ in range(rows)]
    types = [int(TokenType.UNUSED)] * rows
    for content, id_ in state["model"]["vocab"].items():
        tokens[id_], types[id_] = content, int(TokenType.NORMAL)
    for entry in state["added_tokens"]:
        is_filler = entry["content"].startswith(FILLER)
        kind = TokenType.UNUSED if is_filler else TokenType.CONTROL if entry["special"] else TokenType.USER_DEFINED
        tokens[entry["id"]], types[entry["id"]] = entry["content"], int(kind)
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in state["model"]["merges"]]
    return Vocabulary(tokens, types, merges, split, TEMPLATE)


def tensors(model: Transformer) -> list[tuple[str, Tensor]]:
    """The GGUF name of each weight, and the weight in float32; a tied head is omitted."""
    config = model.config
    names = gguf.get_tensor_name_map(ARCHITECTURES[config.family], config.layers)
    weights = []
    for name, tensor in model.state_dict().items():
        label = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if label is None:
            raise ModelError(f"gguf: the tensor {name} has no GGUF name; expected a plain {config.family} model")
        if not (config.tied and name == "lm_head.weight"):
            weights.append((label, tensor.detach().float().cpu()))
    return weights


def _add_tensor(writer: gguf.GGUFWriter, label: str, tensor: Tensor, type_of_matrices: Type) -> None:
    values = tensor.contiguous().numpy()
    kind = Type.F32 if values.ndim == 1 else type_of_matrices
    if kind is Type.Q8_0 and values.shape[-1] % BLOCK:
        kind = Type.F16
    if kind is Type.F32:
        writer.add_tensor(label, values)
    elif kind is Type.F16:
        if np.abs(values).max() > np.finfo(np.float16).max:
            raise ModelError(f"gguf: {label} has values above 65,504, which f16 cannot hold; use bf16 or f32")
        writer.add_tensor(label, values.astype(np.float16))
    else:
        writer.add_tensor(label, gguf.quants.quantize(values, kind), raw_dtype=kind)


def verify(
    path: Path, model: Transformer, tokenizer: Tokenizer, serialized: str, *, kind: str
) -> dict[str, float | int]:
    """Read a file back, compare its vocabulary, weights and outputs with the model's, and return the differences.

    Raises GateError. The expected weights are rounded by `rounded`, not by the package that wrote the file.
    """
    contents = read(path)
    if contents.vocabulary != vocabulary(serialized, model.config.vocab_size):
        raise GateError(f"{path}: the vocabulary in the file differs from the tokenizer's")
    for key, value in {**roles(tokenizer), "tokenizer.ggml.add_bos_token": False}.items():
        if contents.keys.get(key) != value:
            raise GateError(f"{path}: {key} in the file is {contents.keys.get(key)!r}, expected {value!r}")
    expected_config = replace(
        model.config,
        norm_eps=float(np.float32(model.config.norm_eps)),
        rope_theta=float(np.float32(model.config.rope_theta)),
    )
    if contents.model.config != expected_config:
        raise GateError(f"{path}: the model in the file is {contents.model.config}, expected {expected_config}")
    stored = contents.model.state_dict()
    for name, value in model.state_dict().items():
        if not torch.equal(stored[name], rounded(value.detach().float().cpu(), kind)):
            raise GateError(f"{path}: {name} in the file is not the model's weight rounded to {kind}")
    ids = tokenizer.encode(smoke.probe())
    return smoke.check_parity(smoke.compare(model, smoke.Ours(contents.model), ids), kind, path)


def rounded(values: Tensor, kind: str) -> Tensor:
    """A weight with the values it has in the file. q8_0: blocks of 32 integers up to 127, times an f16 scale (ggml,
    quantize_row_q8_0).
    """
    if values.ndim == 1 or kind == "f32":
        return values
    if kind == "bf16":
        return values.bfloat16().float()
    if kind == "f16" or values.shape[-1] % BLOCK:
        return values.half().float()
    blocks = values.reshape(-1, BLOCK)
    scale = blocks.abs().amax(1, keepdim=True) / 127
    scaled = blocks * torch.where(scale > 0, 1 / scale, 0.0)
    integers = torch.trunc(scaled + torch.copysign(torch.tensor(0.5), scaled))  # rounds halves away from zero
    return (integers * scale.half().float()).view_as(values)


@dataclass(frozen=True)
class Contents:
    model: Transformer
    vocabulary: Vocabulary
    keys: JsonObject


def read(path: Path) -> Contents:
    """Read a file written by `write`. Raises ModelError if a key or weight is missing or a shape differs."""
    try:
        reader = gguf.GGUFReader(path)
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: not a GGUF file ({error})") from error
    keys = {name: field.contents() for name, field in reader.fields.items()}
    try:
        model = _model(keys, {tensor.name: tensor for tensor in reader.tensors}, path)
        ggml = "tokenizer.ggml."
        words = Vocabulary(
            keys[f"{ggml}tokens"],
            keys[f"{ggml}token_type"],
            keys[f"{ggml}merges"],
            keys[f"{ggml}pre"],
            keys["tokenizer.chat_template"],
        )
    except KeyError as error:
        raise ModelError(f"{path}: {error} is missing") from error
    return Contents(model, words, keys)


def _model(keys: JsonObject, stored: dict[str, gguf.ReaderTensor], path: Path) -> Transformer:
    family = keys["general.architecture"]
    if family not in ARCHITECTURES:
        raise ModelError(f"{path}: expected one of {', '.join(ARCHITECTURES)}, found {family!r}")
    config = ModelConfig(
        vocab_size=keys[f"{family}.vocab_size"],
        width=keys[f"{family}.embedding_length"],
        layers=keys[f"{family}.block_count"],
        heads=keys[f"{family}.attention.head_count"],
        kv_heads=keys[f"{family}.attention.head_count_kv"],
        head_dim=keys[f"{family}.attention.key_length"],
        d_ff=keys[f"{family}.feed_forward_length"],
        max_context=keys[f"{family}.context_length"],
        rope_theta=keys[f"{family}.rope.freq_base"],
        tied="output.weight" not in stored,
        bias=family == "qwen2",
        norm_eps=keys[f"{family}.attention.layer_norm_rms_epsilon"],
    )
    model = Transformer(config)
    with torch.no_grad():
        names = gguf.get_tensor_name_map(ARCHITECTURES[family], config.layers)
        for name, parameter in model.state_dict().items():
            if config.tied and name == "lm_head.weight":
                continue
            tensor = stored[names.get_name(name, try_suffixes=(".weight", ".bias")) or name]
            values = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32))
            if values.shape != parameter.shape:
                raise ModelError(
                    f"{path}: {tensor.name} has shape {tuple(values.shape)}, expected {tuple(parameter.shape)}"
                )
            parameter.copy_(values)
    return model.train(False)


# -- Ollama ------------------------------------------------------------------------------------------------------------


_PREFIX, _SUFFIX, _MIDDLE = (SPECIAL[name] for name in ("fim_prefix", "fim_suffix", "fim_middle"))
OLLAMA_TEMPLATE = "".join(
    (
        "{{ if .Suffix }}",
        _PREFIX,
        "{{ .Prompt }}",
        _SUFFIX,
        "{{ .Suffix }}",
        _MIDDLE,
        "{{ else }}",
        "{{ if or .System .Tools }}",
        START,
        "system\n{{ .System }}",
        "{{ if .Tools }}{{ if .System }}\n\n{{ end }}Tools you can call:\n<tools>\n",
        "{{ range .Tools }}{{ .Function }}\n{{ end }}</tools>{{ end }}",
        END,
        "\n{{ end }}",
        "{{ range .Messages }}",
        '{{ if eq .Role "user" }}',
        START,
        "user\n{{ .Content }}",
        END,
        "\n",
        '{{ else if eq .Role "assistant" }}',
        START,
        "assistant\n{{ .Content }}{{ $said := .Content }}",
        "{{ range $number, $call := .ToolCalls }}{{ if or $number $said }}\n{{ end }}",
        CALL,
        '\n{"name": "{{ .Function.Name }}", "arguments": {{ .Function.Arguments }}}\n',
        CALL_END,
        "{{ end }}",
        END,
        "\n",
        '{{ else if eq .Role "tool" }}',
        START,
        "tool\n",
        RESPONSE,
        "\n{{ .Content }}\n",
        RESPONSE_END,
        END,
        "\n",
        "{{ end }}{{ end }}",
        START,
        "assistant\n{{ end }}",
    )
)


def write_modelfile(path: Path, weights: str, context: int, *, temperature: float) -> None:
    """Write the Modelfile for the GGUF file `weights`, a path relative to the Modelfile."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [
        f"FROM {weights}",
        f"PARAMETER num_ctx {context}",
        f"PARAMETER temperature {temperature:g}",
        f'PARAMETER stop "{END}"',
        f'TEMPLATE """{OLLAMA_TEMPLATE}"""',
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
