"""The configuration of a memory: its bank, how texts choose from it, and which layers read it. Values and checks only.

Input: the `memory` block of a model file or of stage_memory, or a model directory's `memory.json`. Output:
`MemoryConfig`.
"""

import re
from dataclasses import asdict, dataclass, fields

from pipeline.run.errors import ModelError
from pipeline.run.types import JsonObject

STORAGES = ("full", "factorized", "reduced")
ROUTINGS = ("chunk", "prompt", "token", "sequence")
PLACEMENT = re.compile(r"(first|last|every)_(\d+)")
MODEL_TYPE = "stagecoach_memory"  # in config.json
LEAK = (
    "routing: `sequence` chooses chapters from all positions of a text, so a causal loss would see the future; "
    "use `chunk`, `prompt` or `token`, or set `allow_leak` to compare with other results that leak"
)


@dataclass(frozen=True, kw_only=True)
class MemoryConfig:
    """The configuration of a `Memory`. Raises ValueError for inconsistent values."""

    rows: int
    """Rows of the bank, N, in chapters of equal length, shared chapters first."""
    chapters: int
    """Number of routed chapters, C."""
    top_k: int
    """Routed chapters each unit reads, at least 2: with only one, the router would not learn."""
    shared: int = 0
    """Additional chapters read by every unit."""
    storage: str = "full"
    """full: rows of the model's width; factorized: a product of two matrices; reduced: narrow rows."""
    bank_rank: int | None = None
    """Width of a row with factorized or reduced storage."""
    bank_std: float = 0.02
    """Standard deviation of fresh rows; if small, attention starts out uniform and separates the rows slowly."""
    qk_norm: bool = False
    """Normalize queries and keys, so that rows are distinguishable from the first step."""
    gated: bool = False
    """Gate the read by silu(W_g norm(x)): Memory+ (Berges et al. 2024, arXiv:2412.09764, section 3)."""
    rank: int | None = None
    """Rank of the four projections in a reading layer; None: full matrices."""
    layers: str | tuple[int, ...] = "last_2"
    """Layers that read: all, none, first_3, last_2, every_4, or a list of layers, counted from 0."""
    share: str = "all"
    """Which layers share a bank: all, each (no sharing), or every_2 (every two consecutive layers)."""
    routing: str = "chunk"
    """What chooses the chapters: chunk (the previous chunk), prompt (the block before an answer), token or sequence."""
    window: int = 64
    """Tokens in a chunk."""
    centered: bool = False
    """Route by a unit's mean minus the mean over all units, scaled to an RMS of 1. Requires a trained base."""
    allow_leak: bool = False
    """Allow `routing: sequence` with a causal loss, which then depends on the future."""

    def __post_init__(self) -> None:
        for name in ("rows", "chapters", "top_k", "window"):
            if getattr(self, name) < 1:
                raise ValueError(f"memory.{name}: expected at least 1, got {getattr(self, name)}")
        if not self.bank_std > 0:
            raise ValueError(f"memory.bank_std: expected more than 0, got {self.bank_std}")
        if self.shared < 0:
            raise ValueError(f"memory.shared: expected at least 0, got {self.shared}")
        if self.rows % (self.shared + self.chapters):
            raise ValueError(
                f"memory.rows: expected a multiple of the {self.shared + self.chapters} chapters (shared and routed),"
                f" got {self.rows}"
            )
        if self.top_k > self.chapters:
            raise ValueError(
                f"memory.top_k: expected at most {self.chapters}, the number of chapters, got {self.top_k}"
            )
        if self.top_k == 1:
            raise ValueError(
                "memory.top_k: expected at least 2; a single chapter always has weight 1, so the router would"
                " learn nothing"
            )
        for name, options in (("storage", STORAGES), ("routing", ROUTINGS)):
            if getattr(self, name) not in options:
                raise ValueError(f"memory.{name}: expected one of {', '.join(options)}, got {getattr(self, name)!r}")
        if (self.bank_rank is None) != (self.storage == "full") or (self.bank_rank or 1) < 1:
            raise ValueError(
                "memory.bank_rank: required with factorized or reduced storage, not allowed with full storage; got"
                f" {self.bank_rank} with {self.storage} storage"
            )
        if self.rank is not None and self.rank < 1:
            raise ValueError(f"memory.rank: expected at least 1, got {self.rank}")
        if self.share not in ("all", "each") and not re.fullmatch(r"every_[1-9]\d*", self.share):
            raise ValueError(f"memory.share: expected `all`, `each` or `every_N`, got {self.share!r}")
        if isinstance(self.layers, str) and self.layers not in ("all", "none") and not PLACEMENT.fullmatch(self.layers):
            raise ValueError(
                f"memory.layers: expected `all`, `none`, `first_N`, `last_N`, `every_N` or a list, got {self.layers!r}"
            )

    @property
    def chapter_rows(self) -> int:
        """Rows of a chapter, T."""
        return self.rows // (self.shared + self.chapters)

    @property
    def leaky(self) -> bool:
        """Whether a position may depend on later ones through the choice of chapters."""
        return self.routing == "sequence"

    def placed(self, num_layers: int) -> list[int]:
        """The reading layers among `num_layers`, ascending. Raises ValueError for a nonexistent layer."""
        if isinstance(self.layers, str):
            match = PLACEMENT.fullmatch(self.layers)
            if match is None:
                return list(range(num_layers)) if self.layers == "all" else []
            word, number = match[1], int(match[2])
            if not 1 <= number <= num_layers:
                raise ValueError(f"memory.layers: expected {word}_1 to {word}_{num_layers}, got {self.layers}")
            layers = {
                "first": range(number),
                "last": range(num_layers - number, num_layers),
                "every": range(number - 1, num_layers, number),
            }
            return list(layers[word])
        outside = [layer for layer in self.layers if not 0 <= layer < num_layers]
        if outside or len(set(self.layers)) < len(self.layers):
            raise ValueError(
                f"memory.layers: expected distinct layers from 0 to {num_layers - 1}, got {list(self.layers)}"
            )
        return sorted(self.layers)

    def banks(self, num_reading: int) -> list[int]:
        """The bank index of each reading layer, in order."""
        if self.share == "all":
            return [0] * num_reading
        layers_per_bank = 1 if self.share == "each" else int(self.share.removeprefix("every_"))
        return [number // layers_per_bank for number in range(num_reading)]

    def to_json(self) -> JsonObject:
        """The configuration as memory.json stores it."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: JsonObject) -> "MemoryConfig":
        """The configuration stored in memory.json. Raises ModelError."""
        names = {field.name for field in fields(cls)}
        if unknown := sorted(set(values) - names):
            raise ModelError(f"memory: unknown key {unknown[0]}; valid keys: {', '.join(sorted(names))}")
        try:
            layers = values.get("layers", "last_2")
            arguments: JsonObject = values | {"layers": layers if isinstance(layers, str) else tuple(layers)}
            return cls(**arguments)
        except (TypeError, ValueError) as error:
            raise ModelError(str(error)) from error


@dataclass(frozen=True, kw_only=True)
class ModelKeys:
    """The memory keys of a model file."""

    memory: MemoryConfig | None = None
    """{rows, chapters, top_k, ...}: a memory bank read by some layers (memory/config.py)."""


@dataclass(frozen=True, kw_only=True)
class RouterWeights:
    """Weights of the router's losses relative to the text's loss. Raises ValueError for a negative weight."""

    load_balance: float = 0.01
    """Weight of the loss that balances the use of a memory's chapters."""
    auxiliary: float = 0.0
    """Weight of a second balancing loss; its gradient differs only in scale."""
    z: float = 0.001
    """Weight of the loss that keeps router logits small."""

    def __post_init__(self) -> None:
        for name in ("load_balance", "auxiliary", "z"):
            if getattr(self, name) < 0:
                raise ValueError(f"router.{name}: expected at least 0, got {getattr(self, name)}")
