"""An n-gram language model over token ids: interpolated modified Kneser-Ney, counted in sorted arrays.

    token ids with end of text after each document  ->  Ngram.train  ->  p(token | up to order - 1 tokens before it)

Source: Chen & Goodman 1999, "An empirical study of smoothing techniques for language modeling", section 3; written as
in Heafield et al. 2013, "Scalable modified Kneser-Ney language model estimation", section 2 (`lmplz`). For a context h
of n - 1 tokens, and h' for h without its first token:

    p(w | h) = (a(hw) - D_n(a(hw))) / sum_x a(hx) + b(h) p(w | h')      p(w | h) = p(w | h') if no token ever followed h
    a(hw)    = occurrences, at the highest order or where h begins at a document's start;
               else the number of different tokens seen before hw ("continuation count")
    D_n(k)   = k - (k + 1) t_1 t_{k+1} / ((t_1 + 2 t_2) t_k), k = 1, 2, 3 and more; t_k: n-grams whose a is k
    b(h)     = sum_x D_n(a(hx)) / sum_x a(hx), the discounted mass; below the unigrams p is 1 / V

Each document follows one end-of-text token, and no n-gram crosses it; the end-of-text token after a document is
predicted as well. So p is a distribution over all V ids; if only text tokens are scored, the model pays for ids that
cannot occur, as a neural model does. If an order has too few n-grams for its discounts (some t_k is 0, or D is outside
[0, k]), they are set to 0.5, 1, 1.5, as in `lmplz --discount_fallback`; `Level.discounts` shows the values used.

An n-gram's key is the index of its context, times V, plus its last token: one int64, found by bisection. Counting takes
about 110 bytes of memory per training token at order 5. Not supported: pruning, or training on data that does not fit
in memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

FALLBACK = (0.5, 1.0, 1.5)
ABSENT = -1  # the index of an n-gram that was never seen


@dataclass(frozen=True)
class Level:
    """The n-grams of one order: U n-grams in C contexts, which are the n-grams of the order below."""

    keys: np.ndarray  # (U,) int64, sorted: context * V + token
    counts: np.ndarray  # (U,) int32: a(hw)
    totals: np.ndarray  # (C,) int32: sum of `counts` by context; 0 if nothing ever followed the context
    backoff: np.ndarray  # (C,) float64: b(h), 0 where the total is 0
    discounts: tuple[float, float, float]  # D_n(1), D_n(2), D_n(3 and more)

    def find(self, contexts: np.ndarray, tokens: np.ndarray, vocab_size: int) -> np.ndarray:
        """Indices (n,) int64 of the n-grams (context, token); ABSENT if never seen or if the context is ABSENT."""
        wanted = contexts * vocab_size + tokens
        places = np.minimum(np.searchsorted(self.keys, wanted), len(self.keys) - 1)
        return np.where((contexts >= 0) & (self.keys[places] == wanted), places, ABSENT)

    def interpolate(self, contexts: np.ndarray, numbers: np.ndarray, lower: np.ndarray) -> np.ndarray:
        """p (n,) at this order for n-grams with indices `numbers` in `contexts`; `lower` is p at the order below."""
        known = (contexts >= 0) & (self.totals[contexts] > 0)
        counts = np.where(numbers >= 0, self.counts[numbers], 0)
        kept = counts - np.array((0.0, *self.discounts))[np.minimum(counts, 3)]
        share = kept / np.maximum(self.totals[contexts], 1)
        return np.where(known, share + self.backoff[contexts] * lower, lower)


@dataclass(frozen=True)
class Ngram:
    """A trained model; `levels[n - 1]` is order n."""

    levels: tuple[Level, ...]
    vocab_size: int
    end_of_text: int

    @classmethod
    def train(cls, tokens: np.ndarray, *, order: int, vocab_size: int, end_of_text: int) -> "Ngram":
        """Count `tokens`, (n,) of an integer type, with end of text after each document (the last may be truncated).

        Raises ValueError for an order below 1, no tokens, or an id outside the vocabulary.
        """
        if order < 1 or not len(tokens):
            raise ValueError(
                f"n-gram: expected an order of at least 1 and some tokens, found order {order}, {len(tokens)} tokens"
            )
        if not 0 <= tokens.min() <= tokens.max() < vocab_size:
            raise ValueError(f"n-gram: expected ids below {vocab_size}, found {tokens.min()} to {tokens.max()}")
        read = np.concatenate([[end_of_text], tokens]).astype(np.int32)
        behind = _tokens_behind(read == end_of_text)
        grams = read  # index of the n-gram that ends here; ABSENT if it would cross a document's start
        keys = np.arange(vocab_size, dtype=np.int64)
        counts = np.bincount(read[1:], minlength=vocab_size).astype(np.int32)  # without the first end of text
        at_start = np.zeros(vocab_size, dtype=bool)  # n-grams that begin at a document's start
        levels, num_contexts = [], 1
        for n in range(2, order + 1):
            ends = np.flatnonzero(behind >= n - 1)
            if not len(ends):  # no document is long enough; all n-grams of order n - 1 keep their counts
                break
            longer, numbers = np.unique(grams[ends - 1].astype(np.int64) * vocab_size + read[ends], return_inverse=True)
            suffixes = np.empty(len(longer), dtype=np.int32)
            suffixes[numbers] = grams[ends]
            continuations = np.bincount(suffixes, minlength=len(keys)).astype(np.int32)
            levels.append(_level(keys, np.where(at_start, counts, continuations), num_contexts, vocab_size))
            num_contexts = len(keys)
            contexts = longer // vocab_size
            at_start = contexts == end_of_text if n == 2 else at_start[contexts]
            grams = np.full(len(read), ABSENT, dtype=np.int32)
            grams[ends] = numbers
            keys, counts = longer, np.bincount(numbers, minlength=len(longer)).astype(np.int32)
        levels.append(_level(keys, counts, num_contexts, vocab_size))
        return cls(tuple(levels), vocab_size, end_of_text)

    def probabilities(self, document: Sequence[int]) -> np.ndarray:
        """p (n,) float64 of each token of a document (n,) that follows one end of text; the latter has no p."""
        read = np.array([self.end_of_text, *document], dtype=np.int64)
        tokens, behind = read[1:], _tokens_behind(read == self.end_of_text)[1:]
        contexts = np.zeros(len(tokens), dtype=np.int64)  # the only context without tokens
        numbers, result = tokens, np.full(len(tokens), 1 / self.vocab_size)
        for n, level in enumerate(self.levels, start=1):
            if n > 1:
                contexts = np.concatenate([read[:1] if n == 2 else [ABSENT], numbers[:-1]])
                contexts[behind < n - 1] = ABSENT
                numbers = level.find(contexts, tokens, self.vocab_size)
            result = level.interpolate(contexts, numbers, result)
        return result

    def distribution(self, context: Sequence[int]) -> np.ndarray:
        """p (V,) float64 of every next token. Of `context`, only tokens after the last end of text are used, at most
        the last order - 1.
        """
        tokens = np.arange(self.vocab_size)
        seen = list(context)
        if self.end_of_text in seen:
            seen = seen[len(seen) - 1 - seen[::-1].index(self.end_of_text) :]
        numbers, result = tokens, np.full(self.vocab_size, 1 / self.vocab_size)
        for n, level in enumerate(self.levels, start=1):
            if n - 1 > len(seen):
                break
            contexts = np.full(self.vocab_size, self._number(seen[len(seen) - n + 1 :]))
            if n > 1:
                numbers = level.find(contexts, tokens, self.vocab_size)
            result = level.interpolate(contexts, numbers, result)
        return result

    def _number(self, gram: list[int]) -> int:
        """The index of an n-gram, or ABSENT; 0 for the empty n-gram, the context of unigrams."""
        if not gram:
            return 0
        number = np.array([gram[0]])
        for level, token in zip(self.levels[1:], gram[1:]):
            number = level.find(number, np.array([token]), self.vocab_size)
        return int(number[0])


def _tokens_behind(is_end: np.ndarray) -> np.ndarray:
    """How many tokens each token can look back at, including its document's start; 0 for the first. (n,) bool ->
    (n,).
    """
    places = np.arange(len(is_end), dtype=np.int32)
    starts = np.maximum.accumulate(np.where(is_end, places, 0))
    return places - np.concatenate([starts[:1], starts[:-1]])


def _level(keys: np.ndarray, counts: np.ndarray, num_contexts: int, vocab_size: int) -> Level:
    """The totals, discounts and back-off weights of an order from its adjusted counts."""
    contexts = keys // vocab_size
    found = discounts(np.bincount(np.minimum(counts, 5), minlength=6)[1:5].tolist())
    totals = np.bincount(contexts, weights=counts, minlength=num_contexts)
    taken = np.bincount(contexts, np.array((0.0, *found))[np.minimum(counts, 3)], num_contexts)
    return Level(keys, counts, totals.astype(np.int32), taken / np.maximum(totals, 1), found)


def discounts(counts_of_counts: Sequence[int]) -> tuple[float, float, float]:
    """D(1), D(2), D(3 and more) from t_1 to t_4 (Chen & Goodman 1999, equation 17), or FALLBACK if they are
    invalid.
    """
    if 0 in counts_of_counts:
        return FALLBACK
    t = (0, *counts_of_counts)
    share = t[1] / (t[1] + 2 * t[2])
    one, two, three = (k - (k + 1) * share * t[k + 1] / t[k] for k in (1, 2, 3))
    if not (0 <= one <= 1 and 0 <= two <= 2 and 0 <= three <= 3):
        return FALLBACK
    return one, two, three
