"""What a memory stores in a key-value cache: the states and means used to choose chapters, and the projected bank.

For each reading layer, it stores the normed states of the source spans, and the mean that a row's current unit used for
its choice. A new mean is computed when a unit begins, and after a row is rewound. Running sums would be smaller, but
the server truncates rows to arbitrary lengths (drafts, common prefixes), and a sum cannot be split into its parts. The
keys and values of the bank are projected once per cache.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from pipeline.memory.config import MemoryConfig
from pipeline.model.cache import KVCache
from pipeline.model.config import ModelConfig


class MemoryCache:
    """A `model.hooks.HookCache`: normed states (R, S, D) and means (R, D) of each reading layer, for R rows."""

    def __init__(
        self, config: MemoryConfig, shape: ModelConfig, rows: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        layers = config.placed(shape.layers)
        self.reads_at_once = config.routing == "prompt"  # the prompt determines what is read
        self.states = {layer: torch.zeros(rows, 0, shape.width, dtype=dtype, device=device) for layer in layers}
        self.chose = {layer: torch.zeros(rows, shape.width, dtype=dtype, device=device) for layer in layers}
        self.unit_of = [-1] * rows  # the unit that the mean in `chose` belongs to
        self.question_lengths = [0] * rows  # length of the block before the answer, for routing by prompt
        self.banks: dict[int, tuple[Tensor, Tensor]] = {}  # keys and values of the bank, by layer

    def reserve(self, more: int) -> None:
        self.states = {layer: pad(tensor, (0, 0, 0, more)) for layer, tensor in self.states.items()}

    def add_rows(self, more: int) -> None:
        self.states = {layer: pad(tensor, (0, 0, 0, 0, 0, more)) for layer, tensor in self.states.items()}
        self.chose = {layer: pad(tensor, (0, 0, 0, more)) for layer, tensor in self.chose.items()}
        self.unit_of += [-1] * more
        self.question_lengths += [0] * more

    def select(self, rows: list[int], index: Tensor) -> None:
        for tensors in (self.states, self.chose):
            tensors.update({layer: tensor.index_select(0, index) for layer, tensor in tensors.items()})
        self.unit_of = [self.unit_of[row] for row in rows]
        self.question_lengths = [self.question_lengths[row] for row in rows]

    def clear(self, row: int) -> None:
        self.unit_of[row], self.question_lengths[row] = -1, 0

    def rewind(self, row: int) -> None:
        self.unit_of[row] = -1  # the mean was computed for a different text

    def copy(self, source: int, target: int, length: int) -> None:
        for tensor in self.states.values():
            tensor[target, :length].copy_(tensor[source, :length])

    def zero(self, row: int) -> None:
        for tensor in (*self.states.values(), *self.chose.values()):
            tensor[row].zero_()


def memory_cache(cache: KVCache) -> MemoryCache:
    """The memory's part of a cache."""
    assert isinstance(cache.hook, MemoryCache), "expected the cache of a model with a memory"
    return cache.hook


def state(cache: KVCache, layer: int, row: int, begin: int, end: int) -> Tensor:
    """Normed states (end - begin, D) of a row's positions, in a reading layer."""
    before = cache.before(row)
    own = memory_cache(cache).states[layer][row, max(0, begin - before) : max(0, end - before)]
    prompt = cache.prompt_of[row]
    if begin >= before or prompt is None or cache.prompts is None:
        return own
    return torch.cat([state(cache.prompts, layer, prompt, begin, min(end, before)), own])


def question_length(cache: KVCache, row: int) -> int:
    """The number of positions in the block before the row's answer."""
    prompt = cache.prompt_of[row]
    if prompt is None or cache.prompts is None:
        return memory_cache(cache).question_lengths[row]
    return memory_cache(cache.prompts).question_lengths[prompt]
