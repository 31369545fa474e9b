"""Memory planner: the bytes a training step needs on one device, computed from shapes.

    weights + gradients + optimizer + copies + activations + logits + update + sampling = total

The plan models this code, not a textbook model, and is checked against measured peaks (tests/test_footprint.py):

- Trained weights, gradients and moments are float32: 4 + 4 + 8 bytes per parameter with AdamW, 4 + 4 + 4 with Muon. An
  EMA takes 4 more. Frozen weights are counted at their stored size (learning/reference.py). `copies` are in half
  precision: 2 bytes per matmul parameter, kept until the backward pass.
- Activations per token and layer: what `Block` saves for the backward pass (`layer_bytes`), plus one more layer, the
  one being computed. A checkpointed layer keeps only its input, 4d bytes: the residual stream stays float32 under
  autocast.
- Logits of `losses.next_token`: those alive at once, the gradient of the hidden states, and tensors the size of the
  head matrix (`head_bytes`). Log-probabilities of answers: V probabilities at each position (`answer_bytes`).
- Log-probabilities of a masked-diffusion model: its head without the banned ids, and logits in chunks (`masked_bytes`).
- Update: Muon's temporary stacks and products, in addition to its momentum. AdamW needs none.
- Sampling: the KV cache of the rows decoded together, and each adapted matrix with its adapter merged.

Sampling, a pass and an update never overlap, so the total uses the largest of a pass (copies, activations, logits), the
update and sampling. On a CPU, gradients of a single pass reuse the memory of half-precision activations (measured with
AMX). Otherwise all terms add up: glibc is configured to keep freed memory (device.keep_freed_memory) and reuses an
aligned block only if its neighbors are free too, so blocks are rarely reused for a different size. The heap then grows
by a margin, a quarter of which is touched at the peak. Muon's stacks of different shapes add up, and so do the
head's several gradients. A recomputed layer reuses only part of the previous layer's memory (LOST, measured), and
adapter temporaries fragment the heap (LEFT, measured).

Hooks are counted (`hook_bytes`), with an error of at most 20% on a CPU. Not counted: the interpreter and its libraries
(0.3 to 0.5 GB), the CUDA context. Not checked against measurements: CUDA.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from pipeline import wings
from pipeline.learning.losses import EVEN_ROWS, MOST_LOGITS
from pipeline.learning.optim import BY_MUON, MOST_GATHERED, groups
from pipeline.model.config import ModelConfig
from pipeline.model.cpu import native
from pipeline.model.cpu.attention import KEPT_REACH, TILE
from pipeline.model.cpu.layers import QUERY_BLOCK
from pipeline.model.layers import KEPT_PROBABILITIES, layer_hook
from pipeline.model.lora import TARGETS, AdaptedLinear
from pipeline.run import device

ATTENTION, MLP = TARGETS[:4], TARGETS[4:]
MOST_MASKED_LOGITS = 2**26  # as in `diffusion/model.py`, which the core does not import
SHARE = 0.8  # of a GPU's total memory that a plan may fill
CPU_SHARE = 0.3  # of a machine's memory: other programs run there, and larger micro-batches are no faster
# Measured on a CPU: the share of recomputed tensors that cannot reuse freed memory, and the bytes per output element
# that an adapted projection leaves in fragments too small for the next tensor.
LOST = {"fp32": 0.4, "bf16": 0.15, "fp16": 0.15}
LEFT = {"fp32": 4, "bf16": 3, "fp16": 3}  # bf16: 0 bytes on Zen 5, 6 bytes with AMX
Shape = tuple[int, int]  # rows, columns of a matrix


@dataclass(frozen=True, kw_only=True)
class Work:
    """The training settings that affect memory."""

    row: int  # tokens per row of the batch
    context: int  # tokens per sequence: a row, or one answer of a pair
    selected: int  # tokens per row that need logits
    kind: str = "cuda"  # kind of device: cuda, cpu, mps
    precision: str = "bf16"  # fp32, bf16, fp16
    optimizer: str = "adamw"  # or muon
    checkpointing: str = "none"  # none, full, every_2, selective
    accumulates: bool = True  # several micro-batches per update, so gradients persist across passes
    packed: bool = True  # a row contains several documents of any length: on a GPU each layer keeps a mask
    # the loss needs log-probabilities of answers (pairs, rollouts): all logits coexist, and answers may share a prefix
    answers: bool = False
    masked: bool = False  # masked diffusion: log-probabilities of `selected` masked tokens, in chunks
    adapted: frozenset[str] | None = None  # the projections with adapters on a frozen base; None: all weights train
    dropped: bool = False  # adapters have dropout
    dora: bool = False  # adapters have DoRA's magnitudes
    ema: bool = False  # a float32 average of the weights is kept


@dataclass(frozen=True, kw_only=True)
class Weights:
    """The weights of all models on the device."""

    trained: int  # parameters
    frozen: int = 0  # bytes
    cast: int = 0  # parameters that autocast copies
    narrow: int = 0  # parameters stored in bf16, which the CPU operators copy when folding in a norm
    tied: int = 0  # parameters of a tied embedding, which gets two gradients
    head: int = 0  # parameters of the head matrix, if it gets a gradient
    hidden: Counter[Shape] = field(default_factory=Counter)  # trained matrices eligible for Muon: shape -> number

    def __add__(self, other: "Weights") -> "Weights":
        return Weights(
            trained=self.trained + other.trained,
            frozen=self.frozen + other.frozen,
            cast=self.cast + other.cast,
            narrow=self.narrow + other.narrow,
            tied=self.tied + other.tied,
            head=self.head + other.head,
            hidden=self.hidden + other.hidden,
        )


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Bytes on one device, by purpose."""

    weights: float
    gradients: float
    optimizer: float
    copies: float
    activations: float
    logits: float
    update: float
    sampling: float = 0.0
    margin: float = 0.0  # of the heap

    @property
    def total(self) -> float:
        """The peak, in bytes."""
        states, work = self.weights + self.gradients + self.optimizer, self.copies + self.activations + self.logits
        if self.margin:  # the heap does not reuse the blocks of the KV cache
            return states + max(work + self.sampling, self.update) + self.margin
        return states + max(work, self.update, self.sampling)


def footprint(weights: Weights, configs: Sequence[ModelConfig], work: Work, micro_batch: int) -> Footprint:
    """The footprint of one process training these weights, `micro_batch` rows at a time."""
    copies, activations, logits = pass_bytes(configs, weights, work, micro_batch)
    gradients = 4.0 * weights.trained
    if work.kind == "cpu" and work.precision != "fp32" and not work.accumulates:
        gradients -= min(gradients, activations)
    muon = sum(r * c * n for (r, c), n in weights.hidden.items()) if work.optimizer == "muon" else 0
    return Footprint(
        weights=4.0 * weights.trained + weights.frozen + (4.0 * weights.trained if work.ema else 0.0),
        gradients=gradients,
        optimizer=8.0 * weights.trained - 4.0 * muon,
        copies=copies,
        activations=activations,
        logits=logits,
        update=update_bytes(weights.hidden, work),
        margin=device.TOP_PAD / 4 if work.kind == "cpu" else 0.0,
    )


def data_parallel(single: Footprint, weights: Weights) -> Footprint:
    """The footprint with DistributedDataParallel, whose buckets hold a second copy of the gradients during a pass."""
    return replace(single, gradients=8.0 * weights.trained)


def sharded(single: Footprint, config: ModelConfig, work: Work, processes: int) -> Footprint:
    """The footprint with FSDP2, which shards all but the active block, embedding, head and what Muon gathers."""
    block = sum(r * c * n for (r, c), n in matrices(config).items()) / config.layers
    table = config.vocab_size * config.width * (1 if config.tied else 2)
    whole = block + table
    return replace(
        single,
        weights=single.weights / processes + 4.0 * whole,
        gradients=single.gradients / processes + 4.0 * whole,
        optimizer=single.optimizer / processes,
        copies=0.0 if work.precision == "fp32" else 2.0 * whole,
    )


def largest(limit: float, total: Callable[[int], float], most: int) -> int:
    """`most` rows if their `total` fits in `limit` bytes, else the largest power of two that fits; 0 if none does."""
    if total(most) <= limit:
        return most
    rows = 0
    while total(max(1, 2 * rows)) <= limit:
        rows = max(1, 2 * rows)
    return rows


# -- weights -----------------------------------------------------------------------------------------------------------


def full(config: ModelConfig, *, head: bool = True) -> Weights:
    """The weights of a model that is trained in full. Without `head`: a reward model's trunk and its single row."""
    table = config.vocab_size * config.width
    missing = 0 if head or config.tied else table
    cast = config.matmul_parameters - (0 if head else table)
    trained = config.num_parameters - missing + (0 if head else config.width)
    tied, logits = (table if config.tied and head else 0), (table if head else 0)
    return Weights(trained=trained, cast=cast, tied=tied, head=logits, hidden=matrices(config)) + hook_weights(config)


def hook_weights(config: ModelConfig) -> Weights:
    """The weights of the model's hook, if it has one."""
    with torch.device("meta"):
        hook = layer_hook(config)
        return Weights(trained=0) if hook is None else weights_of(nn.ModuleDict({hook.name: hook}))


def frozen(config: ModelConfig, *, head: bool = True, narrow: bool) -> Weights:
    """The weights of an inference-only model. `narrow`: matrices are stored in bf16, as autocast would cast them."""
    whole = full(config, head=head)
    table = config.vocab_size * config.width
    matmul = whole.cast - (table if config.tied and head else 0)  # a lookup embedding stays float32
    size = 4 * whole.trained - (2 * matmul if narrow else 0)
    moved = matmul if narrow else 0
    return Weights(trained=0, frozen=size, cast=whole.cast - moved, narrow=moved)


def adapted(config: ModelConfig, *, rank: int, targets: Sequence[str], narrow: bool) -> Weights:
    """The weights of a frozen model with a low-rank adapter."""
    pairs: Counter[Shape] = Counter()
    for name in targets:
        out, into = projections(config)[name]
        pairs += Counter({(rank, into): config.layers}) + Counter({(out, rank): config.layers})
    trained = sum(rows * columns * count for (rows, columns), count in pairs.items())
    return frozen(config, narrow=narrow) + Weights(trained=trained, cast=trained, hidden=pairs)


def projections(config: ModelConfig) -> dict[str, Shape]:
    """The shapes of a layer's matrices by name."""
    width, ff = config.width, config.d_ff
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    shapes = ((q, width), (kv, width), (kv, width), (width, q), (ff, width), (ff, width), (width, ff))
    return dict(zip(TARGETS, shapes, strict=True))


def matrices(config: ModelConfig) -> Counter[Shape]:
    """The number of hidden matrices of each shape."""
    return Counter({shape: n * config.layers for shape, n in Counter(projections(config).values()).items()})


def weights_of(model: nn.Module) -> Weights:
    """The weights of an existing model, as `full`, `frozen` and `adapted` derive them from a config."""
    members = groups(model)
    by_muon = (p for group in BY_MUON for p in members.get(group, {}).values() if p.ndim == 2)
    hidden = Counter((p.shape[0], p.shape[1]) for p in by_muon)
    trained = stored = cast = narrow = tied_size = head = 0
    for name, parameter in model.named_parameters():
        size, lookup = parameter.numel(), "embed_tokens" in name
        tied = lookup and getattr(getattr(model, "config", None), "tied", False)
        if parameter.requires_grad:
            trained, tied_size = trained + size, tied_size + (size if tied else 0)
            if (tied and hasattr(model, "logits")) or "lm_head" in name:  # a few trained rows produce a full gradient
                head = model.get_parameter(name.replace("lora_rows", "weight")).numel()
        else:
            stored += size * parameter.element_size()
        if parameter.ndim > 1 and parameter.element_size() == 4 and (tied or not lookup):
            cast += size
        narrow += size if parameter.element_size() == 2 else 0
    return Weights(trained=trained, frozen=stored, cast=cast, narrow=narrow, tied=tied_size, head=head, hidden=hidden)


def adapters_of(model: nn.Module) -> tuple[frozenset[str] | None, bool]:
    """`Work.adapted` and `Work.dropped` for an existing model."""
    layers = {
        name.rpartition(".")[2]: layer for name, layer in model.named_modules() if isinstance(layer, AdaptedLinear)
    }
    return frozenset(layers) or None, any(layer.config.dropout > 0 for layer in layers.values())


# -- a pass and an update ----------------------------------------------------------------------------------------------


def pass_bytes(
    configs: Sequence[ModelConfig], weights: Weights, work: Work, micro_batch: int
) -> tuple[float, float, float]:
    """Bytes of (copies, activations, logits) for a micro-batch. Of an actor and a critic, only the first has a head."""
    tokens, chosen, first = micro_batch * work.row, micro_batch * work.selected, configs[0]
    half, rows = work.precision != "fp32", max(EVEN_ROWS, MOST_LOGITS // first.vocab_size)
    activations = sum(tokens * token_bytes(config, work) + hook_bytes(config, work, tokens) for config in configs)
    # the two gradients of a tied embedding are added up before they join the sum of earlier micro-batches
    tied = 4.0 * weights.tied * (2 if work.accumulates else 1)
    cast = weights.cast - weights.head  # the losses cast the head, and next_token frees it before the backward pass
    cast += weights.narrow if work.kind == "cpu" else 0
    if work.masked or work.answers or not chosen:
        copies = 2.0 * (cast if chosen else weights.cast) * half + folded_bytes(first, work)
        of_tokens = masked_bytes if work.masked else answer_bytes
        return copies, activations + tied, of_tokens(first, weights, work, chosen) if chosen else 0.0
    if _uses_cpu_operators(first, work, ATTENTION):  # a layer's copies are freed with its activations
        cast *= min(1.0, (first.layers - recomputed_layers(first, work) + 1) / first.layers)
    size = (2 if work.kind == "cpu" else 6) if half else 4  # a CPU upcasts only a few logits at a time
    logits = size * first.vocab_size * min(rows, chosen) + (6.0 if half else 4.0) * first.width * chosen
    copies = 2.0 * cast * half + folded_bytes(first, work)
    return copies, activations, logits + head_bytes(weights, work, chosen > rows)


def answer_bytes(config: ModelConfig, weights: Weights, work: Work, chosen: int) -> float:
    """Bytes of the log-probabilities of `chosen` tokens: the head as autocast casts it, all probabilities, and in the
    backward pass the gradients of the head and of one chunk of logits (`losses.token_logprobs`).
    """
    table, size = config.vocab_size * config.width, 2.0 if work.precision != "fp32" else 4.0
    part = min(chosen, max(EVEN_ROWS, MOST_LOGITS // config.vocab_size))
    gradients = 8.0 * table if weights.head else 0.0
    return (size * table if size < 4 else 0.0) + size * config.vocab_size * (chosen + part) + gradients


def masked_bytes(config: ModelConfig, weights: Weights, work: Work, chosen: int) -> float:
    """Bytes of the log-probabilities of `chosen` masked tokens: the head's rows for predictable ids, in float32 and as
    cast by autocast, the logits of one chunk, and in the backward pass their gradient (`diffusion/model.py`).
    """
    table, half = config.vocab_size * config.width, work.precision != "fp32"
    rows = min(chosen, max(1, MOST_MASKED_LOGITS // config.vocab_size))
    gradients = 8.0 * table if weights.head else 0.0
    return (6.0 if half else 4.0) * table + (2.0 if half else 4.0) * config.vocab_size * rows + gradients


def head_bytes(weights: Weights, work: Work, several: bool) -> float:
    """Bytes of head-sized tensors in `next_token`, without `.grad`. `several`: there are several chunks of logits."""
    accumulated = 4 if work.accumulates else 0  # the running sum of earlier micro-batches is a separate tensor
    if work.kind != "cpu":  # the gradient, and its product in the backward pass
        return (4.0 + accumulated) * weights.head
    # no memory is reused: the gradient; in bf16 the head, a chunk and its float32 copy; another chunk; the embedding's
    # gradient
    added = (8 if work.precision == "fp32" else 12) + (4 if several else 0)
    return float(added + accumulated) * weights.head


def layer_bytes(config: ModelConfig, work: Work) -> float:
    """Bytes that a layer saves per token for its backward pass."""
    return attention_bytes(config, work) + mlp_bytes(config, work)


def attention_bytes(config: ModelConfig, work: Work) -> float:
    """Bytes saved by norm and attention. d is the model width, q and k the total widths of queries and keys."""
    d, q, k = config.width, config.heads * config.head_dim, config.kv_heads * config.head_dim
    half, cpu = work.precision != "fp32", work.kind == "cpu"
    if _uses_cpu_operators(config, work, ATTENTION):
        kept = 2 * d + 2 * (q + 2 * k) + 2 * q  # the normed input, its products, the result
        if native.has_attention_blocks():  # rotated queries and keys; a sum for each query
            return kept + 2 * (q + k) + 4 * config.heads
        key_tiles, probability_tiles = reaches(work)  # queries in tiles; keys and values; probabilities
        return kept + 2 * q + 4 * k * key_tiles + 2 * TILE * config.heads * probability_tiles
    saved = 4 * d + input_bytes(config, work, ATTENTION)
    if not cpu:
        mask = 0 if not work.packed else (2 if half else 4) * work.context
        return saved + ((8 * q + 8 * k) if half else (12 * q + 12 * k)) + mask
    # inputs of the head norms, then q, k, v, out: float32 even under autocast
    return saved + 12 * q + 12 * k + score_bytes(config, work)


def mlp_bytes(config: ModelConfig, work: Work) -> float:
    """Bytes saved by norm and SwiGLU."""
    d, ff = config.width, config.d_ff
    if _uses_cpu_operators(config, work, MLP):  # the normed input; gate and up; their product
        return 2 * d + 4 * ff + 2 * ff
    return 4 * d + (6 if work.precision != "fp32" else 12) * ff + input_bytes(config, work, MLP)


def _uses_cpu_operators(config: ModelConfig, work: Work, names: Sequence[str]) -> bool:
    """Whether the operators of model/cpu/layers.py run these projections: in bf16 on a CPU, with one matmul each."""
    plain = work.adapted is None or not (work.dropped or work.dora) or not work.adapted & set(names)
    unbiased = names != ATTENTION or not config.bias
    return work.kind == "cpu" and work.precision == "bf16" and plain and unbiased


def folded_bytes(config: ModelConfig, work: Work) -> float:
    """Bytes of the matrices with their adapters merged, in float32. Counted twice, because the heap does not reuse the
    previous pass's memory (measured).
    """
    shapes = projections(config)
    names = [name for part in (ATTENTION, MLP) if _uses_cpu_operators(config, work, part) for name in part]
    return 8.0 * config.layers * sum(math.prod(shapes[name]) for name in names if name in (work.adapted or ()))


def input_bytes(config: ModelConfig, work: Work, names: Sequence[str]) -> float:
    """Bytes of inputs saved by projections that train or have an adapter."""
    cpu, size = work.kind == "cpu", 4 if work.precision == "fp32" else 2
    saved = 0
    for index, name in enumerate(names if work.adapted is None else [x for x in names if x in work.adapted]):
        out, width = projections(config)[name]
        if work.adapted is not None and cpu:
            saved += LEFT[work.precision] * out
        if work.dropped:
            saved += width * (size + (4 if cpu else 1))  # the input after dropout, and a mask
        elif name == "o_proj":
            saved += width * size if cpu else 0  # on a GPU, attention saves this input
        elif size == 2 or index == 0 or name == "down_proj":  # cast per projection by autocast; shared in float32
            saved += width * size
    return saved


def reaches(work: Work) -> tuple[float, float]:
    """The mean number of tiles whose keys a query tile keeps, and whose probabilities (model/cpu/attention.py)."""
    tiles = -(-work.context // TILE)
    if work.packed and tiles > KEPT_REACH:  # assume shorter documents, of the length that keeps the most
        return (tiles + 1) / 2, (KEPT_REACH + 1) / 2
    reach = min(tiles, KEPT_REACH)
    return (tiles + 1) / 2, reach * (reach + 1) / 2 / tiles


def score_bytes(config: ModelConfig, work: Work) -> float:
    """Bytes of CPU attention beyond q, k, v, output: probabilities for short documents, repeated keys for long ones."""
    seen = min(work.context, KEPT_PROBABILITIES)
    short = 4 * config.heads * (seen + min(seen, QUERY_BLOCK)) / 2
    if work.context <= KEPT_PROBABILITIES:
        return short
    long = 8 * (config.heads - config.kv_heads) * config.head_dim if config.kv_heads > 1 else 0
    return max(short, long) if work.packed else long


def recomputed_layers(config: ModelConfig, work: Work) -> int:
    """The number of layers recomputed in the backward pass."""
    layers = config.layers
    return {"none": 0, "full": layers, "every_2": -(-layers // 2), "selective": layers}[work.checkpointing]


def token_bytes(config: ModelConfig, work: Work) -> float:
    """Bytes per token of all layers, the embedding, the last norm and the layer being computed."""
    saved, layer_input, num_recomputed = layer_bytes(config, work), 4 * config.width, recomputed_layers(config, work)
    products = product_bytes(config, work) if work.checkpointing == "selective" else 0
    lost = LOST[work.precision] * num_recomputed * max(0, saved - products) if work.kind == "cpu" else 0
    layers = saved * (config.layers - num_recomputed) + (layer_input + products) * num_recomputed
    return layers + lost + saved + 8 * config.width + 4 * config.head_dim


def hook_bytes(config: ModelConfig, work: Work, tokens: int) -> float:
    """Bytes saved by the model's hook in a pass over `tokens`."""
    return sum(offer(config, work.kind, work.precision, tokens) for offer in wings.each("hook_bytes"))


def product_bytes(config: ModelConfig, work: Work) -> float:
    """Bytes per token and layer kept by selective checkpointing: matmul outputs and, on a GPU, the attention output."""
    q, k = config.heads * config.head_dim, config.kv_heads * config.head_dim
    numbers = q + 2 * k + 2 * config.width + 2 * config.d_ff + (0 if work.kind == "cpu" else q)
    return (4 if work.precision == "fp32" else 2) * numbers


def update_bytes(hidden: Counter[Shape], work: Work) -> float:
    """Bytes that Muon's update needs beyond its states: stacked directions of same-shape matrices, and products."""
    if work.optimizer != "muon":
        return 0.0
    # bf16: the updates and their stack, 4 bytes each; x and the next x, 2 each; two Gram matrices. fp32 (on CPUs): 4
    # bytes each, partly in reused memory: 14 to 24 bytes measured, although 16 + 8 exist at once
    fixed, gram = (14, 6) if work.precision == "fp32" else (12, 4)
    at_once = {(r, c): min(n, max(1, MOST_GATHERED // (r * c))) for (r, c), n in hidden.items()}
    stacks = [r * c * n * (fixed + gram * min(r, c) / max(r, c)) for (r, c), n in at_once.items()]
    return sum(stacks) if work.kind == "cpu" else max(stacks, default=0.0)
