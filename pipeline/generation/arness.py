"""In which order a canvas was uncovered: how far from left to right (DiffuCoder, arXiv:2506.20639, section 3.1)."""

from collections.abc import Sequence

from pipeline.generation.denoising import Step


def order_of(steps: Sequence[Step]) -> list[int]:
    """The places of a canvas in the order in which they were uncovered for good, those of one step from the left."""
    when: dict[int, int] = {}
    for number, step in enumerate(steps):
        when |= {place: number for place, *_ in step.committed}
    return sorted(when, key=lambda place: (when[place], place))


def local_ar(order: Sequence[int], k: int) -> float:
    """AR-ness local@k: the share of tokens p before which p - 1, ..., p - k were uncovered, each one step before the last.

    Places before the completion count as uncovered in time (DiffuCoder, arXiv:2506.20639, section 3.1). `order` is a permutation.
    """
    hits = 0
    for at, place in enumerate(order):
        hits += all(place < back or (at >= back and order[at - back] == place - back) for back in range(1, k + 1))
    return hits / len(order)


def global_ar(order: Sequence[int], k: int) -> float:
    """AR-ness global@k: the share of tokens that were among the k leftmost masks when they were uncovered."""
    left, hits = sorted(order), 0
    for place in order:
        hits += place in left[:k]
        left.remove(place)
    return hits / len(order)
