"""The benchmarks' n-gram model against a slow version with dictionaries, against numbers worked out by hand, and as a
distribution.
"""

from collections import Counter, defaultdict

import numpy as np
import pytest

from benchmarks.ngram import FALLBACK, Ngram, discounts

END = 0


class Slow:
    """Modified Kneser-Ney by its definition: tuples in dictionaries, one probability at a time."""

    def __init__(self, tokens: list[int], order: int, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        raw: list[Counter[tuple[int, ...]]] = [Counter() for _ in range(order + 1)]
        before = defaultdict(set)  # n-gram -> tokens seen before it
        for document in split(tokens):
            read = [END, *document]
            for last in range(1, len(read)):
                for n in range(1, min(order, last + 1) + 1):
                    gram = tuple(read[last - n + 1 : last + 1])
                    raw[n][gram] += 1
                    if last - n >= 0:
                        before[gram].add(read[last - n])
        self.adjusted = [
            {g: count if n == order or (n > 1 and g[0] == END) else len(before[g]) for g, count in raw[n].items()}
            for n in range(order + 1)
        ]
        self.discounts = [
            discounts([sum(a == k for a in counts.values()) for k in (1, 2, 3, 4)]) for counts in self.adjusted
        ]

    def p(self, token: int, context: tuple[int, ...]) -> float:
        n = len(context) + 1
        lower = self.p(token, context[1:]) if context else 1 / self.vocab_size
        children = {g: a for g, a in self.adjusted[n].items() if g[:-1] == context}
        if not children:
            return lower
        total = sum(children.values())
        taken = sum(self.discounts[n][min(a, 3) - 1] for a in children.values())
        own = children.get((*context, token), 0)
        kept = own - self.discounts[n][min(own, 3) - 1] if own else 0.0
        return kept / total + taken / total * lower


def split(tokens: list[int]) -> list[list[int]]:
    """The documents, each with its final end-of-text token; the last may lack it."""
    documents: list[list[int]] = [[]]
    for token in tokens:
        documents[-1].append(token)
        if token == END:
            documents.append([])
    return [document for document in documents if document]


def corpus(seed: int, size: int, vocab_size: int) -> list[int]:
    """Tokens of short documents, a few of them frequent."""
    random = np.random.default_rng(seed)
    return np.minimum(random.geometric(0.3, size) - 1 + (random.random(size) < 0.8), vocab_size - 1).tolist()


@pytest.mark.parametrize(("size", "order"), [(1, 5), (7, 5), (60, 2), (400, 1), (400, 3), (1500, 5)])
def test_probabilities_equal_the_slow_version_in_dictionaries(size: int, order: int) -> None:
    tokens = corpus(size, size, 12)
    model = Ngram.train(np.array(tokens, dtype="<u2"), order=order, vocab_size=12, end_of_text=END)
    slow = Slow(tokens, order, 12)
    for document in [[1, 1, 2, 3, 1, 2], [11, 10, 11], [2], [1, END, 1, 2, 1], *split(tokens)[:5], corpus(9, 40, 12)]:
        read = [END, *document]
        expected = []
        for place in range(1, len(read)):
            start = max(i for i in range(place) if read[i] == END)
            expected.append(slow.p(read[place], tuple(read[max(start, place - order + 1) : place])))
        assert model.probabilities(document) == pytest.approx(expected, rel=1e-12)


def test_the_discounts_of_a_larger_corpus_are_estimated_not_fallen_back_to() -> None:
    model = Ngram.train(np.array(corpus(3, 20_000, 40)), order=4, vocab_size=40, end_of_text=END)
    assert all(level.discounts != FALLBACK for level in model.levels[2:])


@pytest.mark.parametrize("size", [1, 50, 3000])
def test_the_vocabulary_sums_to_one_after_any_context(size: int) -> None:
    tokens = corpus(size, size, 30)
    model = Ngram.train(np.array(tokens), order=5, vocab_size=30, end_of_text=END)
    contexts = [[], [END], [END, 1], [1], [29], [29, 28, 27, 26], [1, 2, 1, 1], [2, END, 1, 2], [1, 1, 1, 1, 1, 1, 1]]
    contexts += [tokens[start : start + 4] for start in range(0, min(size, 200), 7)]
    for context in contexts:
        found = model.distribution(context)
        assert found.shape == (30,) and found.min() > 0
        assert found.sum() == pytest.approx(1, abs=1e-12)


def test_a_documents_probabilities_are_those_of_the_distributions_after_its_beginnings() -> None:
    model = Ngram.train(np.array(corpus(5, 2000, 20)), order=5, vocab_size=20, end_of_text=END)
    document = corpus(6, 60, 20)
    read = [END, *document]
    expected = [model.distribution(read[:place])[read[place]] for place in range(1, len(read))]
    assert model.probabilities(document) == pytest.approx(expected, rel=1e-12)


def test_a_bigram_model_gives_the_numbers_worked_out_by_hand() -> None:
    """Documents 1 2, 1 2, 1 3; V = 5; every order falls back to the discounts 1/2, 1, 3/2.

    Bigrams: E1 3, 12 2, 2E 2, 13 1, 3E 1. Different tokens before: E 2 (2 and 3), 1 1 (E), 2 1, 3 1; 5 in all.
    p(2) = (1 - 1/2)/5 + (1 + 3/2)/5 / 5 = 0.2; p(2 | 1) = (2 - 1)/3 + (1 + 1/2)/3 p(2) = 13/30.
    p(1 | E) = (3 - 3/2)/3 + (3/2)/3 p(1) = 1/2 + 0.2/2 = 0.6.  p(4) = (5/2)/5 / 5 = 0.1; p(4 | 1) = 0.1/2.
    """
    model = Ngram.train(np.array([1, 2, 0, 1, 2, 0, 1, 3, 0]), order=2, vocab_size=5, end_of_text=END)
    assert [level.discounts for level in model.levels] == [FALLBACK, FALLBACK]
    assert model.probabilities([1, 2]) == pytest.approx([0.6, 13 / 30])
    assert model.probabilities([1, 4, 4]) == pytest.approx([0.6, 0.05, 0.1])


def test_discounts_follow_chen_and_goodman() -> None:
    # Y = 10 / (10 + 2 * 5) = 1/2; 1 - 2 Y 5/10, 2 - 3 Y 4/5, 3 - 4 Y 3/4
    assert discounts([10, 5, 4, 3]) == pytest.approx((0.5, 0.8, 1.5))
    assert discounts([10, 5, 0, 3]) == FALLBACK
    assert discounts([1, 5, 4, 3]) == pytest.approx((1 - 10 / 11, 2 - 12 / 55, 3 - 3 / 11))
    assert discounts([10, 5, 4, 90]) == FALLBACK, "a negative discount"


def test_nothing_is_seen_across_a_documents_end() -> None:
    """The same documents in another order give the same model."""
    documents = split([*corpus(7, 600, 9), END])
    one, other = (
        Ngram.train(np.concatenate([np.array(d) for d in order]), order=4, vocab_size=9, end_of_text=END)
        for order in (documents, documents[::-1])
    )
    for context in ([END], [1, 2], [END, 1, 2], [3, 1, 1]):
        assert (one.distribution(context) == other.distribution(context)).all()


def test_tokens_that_cannot_be_counted_are_refused() -> None:
    for tokens, order in (([], 2), ([1], 0), ([5], 2)):
        with pytest.raises(ValueError, match="n-gram: expected"):
            Ngram.train(np.array(tokens, dtype=np.int64), order=order, vocab_size=5, end_of_text=END)
