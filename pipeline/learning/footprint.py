"""Bytes that a training step holds on one device, by arithmetic from the shapes: nothing is allocated for it.

    weights + gradients + optimiser + copies + activations + logits + update = total

The parts are those of this code, checked against the measured peak (tests/test_footprint.py), not a textbook's:

- trained weights, gradients and moments are float32: 4 + 4 + 8 bytes a parameter with AdamW, 4 + 4 + 4 with Muon; EMA 4;
  frozen weights as they are stored (frozen.py); `copies`: what autocast casts, 2 a parameter of a matrix product, until the backward pass
- activations a token and layer: what `Block` saves for the backward pass (`layer_bytes`), and one layer more that is being
  worked on. Checkpointed layers keep their input alone, 4d bytes: the residual stream is float32 also under autocast
- logits: four float32 arrays of V at each position that the head computes: logits, their log-softmax, both gradients
- update: what Muon stacks and multiplies besides its momentum; AdamW needs nothing

An update begins when a pass is over, so the total has the greater of a pass (copies, activations, logits) and the update. Gradients
are counted beside the activations even where one pass makes them: glibc, told to keep what is freed (device.keep_freed_memory),
finds an aligned block again only when its neighbours are free too, so on a CPU hardly anything of another size is used again.
The heap grows by a margin there, of which a quarter is touched at its peak, and Muon's stacks of different shapes add up.

Not counted: the interpreter and its libraries (0.3 to 0.5 GB), CUDA's context, the caches of sampling. Not measured: CUDA.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from torch import nn

from pipeline import device
from pipeline.learning.optim import BY_MUON, groups
from pipeline.model.attention import KEPT_PROBABILITIES
from pipeline.model.config import ModelConfig
from pipeline.model.kernels import QUERY_BLOCK

Shape = tuple[int, int]  # rows, columns of a matrix


@dataclass(frozen=True, kw_only=True)
class Work:
    """How a model is trained, as far as memory knows."""

    row: int  # tokens of a row of the batch
    context: int  # tokens that a model reads at once: a row, or one answer of a pair
    selected: int  # of a row, those whose logits are computed
    kind: str = "cuda"  # of device: cuda, cpu, mps
    precision: str = "bf16"  # fp32, bf16, fp16
    optimizer: str = "adamw"  # or muon
    checkpointing: str = "none"  # none, full, every_2, selective
    accumulates: bool = True  # an update takes more than one micro-batch, so gradients stand while another pass runs
    packed: bool = True  # a row holds several documents: on a GPU each layer keeps a mask
    ema: bool = False  # a float32 average of the weights is kept


@dataclass(frozen=True, kw_only=True)
class Weights:
    """The weights of all models on the device."""

    trained: int  # parameters
    frozen: int = 0  # bytes
    cast: int = 0  # parameters that autocast copies
    twice: int = 0  # parameters whose gradient comes from two places: a tied embedding
    hidden: Counter[Shape] = field(default_factory=Counter)  # how many trained matrices of each shape Muon may take

    def __add__(self, other: "Weights") -> "Weights":
        return Weights(
            trained=self.trained + other.trained, frozen=self.frozen + other.frozen, cast=self.cast + other.cast,
            twice=self.twice + other.twice, hidden=self.hidden + other.hidden,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Bytes on one device, by part."""

    weights: float
    gradients: float
    optimizer: float
    copies: float
    activations: float
    logits: float
    update: float
    margin: float = 0.0  # of the heap

    @property
    def total(self) -> float:
        """The most that is held at once."""
        states = self.weights + self.gradients + self.optimizer
        return states + max(self.copies + self.activations + self.logits, self.update) + self.margin


# -- weights -----------------------------------------------------------------------------------------------------------


def full(config: ModelConfig, *, head: bool = True) -> Weights:
    """A model that trains whole. `head` false: a reward model's trunk with its one row."""
    table = config.vocab_size * config.width
    lost = 0 if head or config.tied else table
    cast = config.matmul_parameters - (0 if head else table)
    trained = config.num_parameters - lost + (0 if head else config.width)
    return Weights(trained=trained, cast=cast, twice=table if config.tied and head else 0, hidden=matrices(config))


def frozen(config: ModelConfig, *, head: bool = True, narrow: bool) -> Weights:
    """A model that only computes. `narrow`: matrices lie in the 2 bytes that autocast would cast them to anyhow."""
    whole = full(config, head=head)
    table = config.vocab_size * config.width
    matmul = whole.cast - (table if config.tied and head else 0)  # an embedding that is looked up stays float32
    size = 4 * whole.trained - (2 * matmul if narrow else 0)
    return Weights(trained=0, frozen=size, cast=whole.cast - (matmul if narrow else 0))


def adapted(config: ModelConfig, *, rank: int, targets: Sequence[str]) -> Weights:
    """A frozen model, stored in float32, with a low-rank adapter."""
    width, ff = config.width, config.d_ff
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    shapes = {"q_proj": (q, width), "k_proj": (kv, width), "v_proj": (kv, width), "o_proj": (width, q),
              "gate_proj": (ff, width), "up_proj": (ff, width), "down_proj": (width, ff)}  # fmt: skip
    pairs: Counter[Shape] = Counter()
    for name in targets:
        out, into = shapes[name]
        pairs += Counter({(rank, into): config.layers}) + Counter({(out, rank): config.layers})
    trained = sum(rows * columns * count for (rows, columns), count in pairs.items())
    return frozen(config, narrow=False) + Weights(trained=trained, cast=trained, hidden=pairs)


def matrices(config: ModelConfig) -> Counter[Shape]:
    """The hidden matrices by shape."""
    width, ff, layers = config.width, config.d_ff, config.layers
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    found: Counter[Shape] = Counter()
    for shape, count in (((q, width), 1), ((kv, width), 2), ((width, q), 1), ((ff, width), 2), ((width, ff), 1)):
        found[shape] += count * layers
    return found


def weights_of(model: nn.Module) -> Weights:
    """Those of a model that exists; what `full`, `frozen` and `adapted` tell from a configuration."""
    found = groups(model)
    matrices = (p for group in BY_MUON for p in found.get(group, {}).values() if p.ndim == 2)
    hidden = Counter((p.shape[0], p.shape[1]) for p in matrices)
    trained = stored = cast = twice = 0
    for name, parameter in model.named_parameters():
        size, lookup = parameter.numel(), "embed_tokens" in name
        tied = lookup and getattr(getattr(model, "config", None), "tied", False)
        if parameter.requires_grad:
            trained, twice = trained + size, twice + (size if tied else 0)
        else:
            stored += size * parameter.element_size()
        if parameter.ndim > 1 and parameter.element_size() == 4 and (tied or not lookup):
            cast += size
    return Weights(trained=trained, frozen=stored, cast=cast, twice=twice, hidden=hidden)


# -- a pass ------------------------------------------------------------------------------------------------------------


def layer_bytes(config: ModelConfig, work: Work) -> float:
    """What one layer keeps of one token for its backward pass. d width, Q and K the widths of all queries and keys."""
    d, ff = config.width, config.d_ff
    q, k = config.heads * config.head_dim, config.kv_heads * config.head_dim
    half, cpu = work.precision != "fp32", work.kind == "cpu"
    if half:  # two residuals; what enters q, k, v, gate and up is cast for each anew; SwiGLU
        kept = 8 * d + 10 * d + 8 * ff
        # inputs of the head norms in float32, then q, k, v, out: float32 on a CPU, where out is cast for o_proj too
        kept += (14 * q + 12 * k) if cpu else (8 * q + 8 * k)
    else:
        kept = 16 * d + 16 * ff + ((16 * q + 12 * k) if cpu else (12 * q + 12 * k))
    if not cpu:
        mask = 0 if not work.packed else (2 if half else 4) * work.context
        return kept + mask
    seen = min(work.context, KEPT_PROBABILITIES)  # the ragged kernel keeps every probability of documents up to this
    return kept + 4 * config.heads * (seen + min(seen, QUERY_BLOCK)) / 2


def token_bytes(config: ModelConfig, work: Work) -> float:
    """What all layers keep of one token, the embedding and the last norm with them, and the layer that is worked on."""
    kept, entry = layer_bytes(config, work), 4 * config.width
    again = {"none": 0, "full": config.layers, "every_2": -(-config.layers // 2), "selective": config.layers}[
        work.checkpointing
    ]
    if work.checkpointing == "selective":
        entry += product_bytes(config, work)
    within = kept * (config.layers - again) + entry * again
    return within + kept + 8 * config.width + 4 * config.head_dim


def product_bytes(config: ModelConfig, work: Work) -> float:
    """What selective checkpointing keeps of one token in one layer: its matrix products and, on a GPU, what attention gives."""
    q, k = config.heads * config.head_dim, config.kv_heads * config.head_dim
    numbers = q + 2 * k + 2 * config.width + 2 * config.d_ff + (0 if work.kind == "cpu" else q)
    return (4 if work.precision == "fp32" else 2) * numbers


def one_pass(configs: Sequence[ModelConfig], work: Work, micro_batch: int) -> tuple[float, float]:
    """Bytes of (activations, logits) of a micro-batch. Of several models (an actor and its critic) the first has a head."""
    tokens = micro_batch * work.row
    activations = tokens * sum(token_bytes(config, work) for config in configs)
    return activations, 16.0 * configs[0].vocab_size * micro_batch * work.selected


# -- all of it ---------------------------------------------------------------------------------------------------------


def update_bytes(hidden: Counter[Shape], work: Work) -> float:
    """What Muon's update holds besides its states: the directions of all matrices of a shape, stacked, and their products."""
    if work.optimizer != "muon":
        return 0.0
    # bf16: the updates and their stack 4 bytes each, then x and the next x 2 each; two Gram matrices. fp32 (on CPUs): all 4,
    # of which a part comes out of what was freed: between 14 and 24 bytes were measured where 16 + 8 are held at once
    fixed, gram = (14, 6) if work.precision == "fp32" else (12, 4)
    stacks = [r * c * n * (fixed + gram * min(r, c) / max(r, c)) for (r, c), n in hidden.items()]
    return sum(stacks) if work.kind == "cpu" else max(stacks, default=0.0)


def footprint(weights: Weights, configs: Sequence[ModelConfig], work: Work, micro_batch: int) -> Footprint:
    """One process that trains these weights, `micro_batch` rows at a time."""
    activations, logits = one_pass(configs, work, micro_batch)
    muon = sum(r * c * n for (r, c), n in weights.hidden.items()) if work.optimizer == "muon" else 0
    return Footprint(
        weights=4.0 * weights.trained + weights.frozen + (4.0 * weights.trained if work.ema else 0.0),
        gradients=4.0 * weights.trained,
        optimizer=8.0 * weights.trained - 4.0 * muon,
        copies=0.0 if work.precision == "fp32" else 2.0 * weights.cast,
        # a tied embedding's two gradients meet before they join the sum of the micro-batches before
        activations=activations + 4.0 * weights.twice * (2 if work.accumulates else 1),
        logits=logits,
        update=update_bytes(weights.hidden, work),
        margin=device.TOP_PAD / 4 if work.kind == "cpu" else 0.0,
    )  # fmt: skip


def data_parallel(one: Footprint, weights: Weights) -> Footprint:
    """The same beside other processes: DistributedDataParallel holds the gradients a second time, in its buckets."""
    return replace(one, gradients=one.gradients + 4.0 * weights.trained)


def sharded(one: Footprint, config: ModelConfig, work: Work, processes: int) -> Footprint:
    """The states of FSDP2 divided over the processes; whole are the block that computes, and embedding and head."""
    block = sum(r * c * n for (r, c), n in matrices(config).items()) / config.layers
    table = config.vocab_size * config.width * (1 if config.tied else 2)
    whole = block + table
    return replace(
        one, weights=one.weights / processes + 4.0 * whole, gradients=one.gradients / processes + 4.0 * whole,
        optimizer=one.optimizer / processes, copies=0.0 if work.precision == "fp32" else 2.0 * whole,
        update=one.update / processes,
    )  # fmt: skip


def largest(limit: float, total: Callable[[int], float], most: int) -> int:
    """The largest power of two, or all `most` rows, whose `total` is within `limit` bytes; 0 where not even one row is."""
    if total(most) <= limit:
        return most
    found = 0
    while total(max(1, 2 * found)) <= limit:
        found = max(1, 2 * found)
    return found
