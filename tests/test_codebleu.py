"""CodeBLEU against sacrebleu and hand-computed numbers, and its interval against resampling the pairs themselves."""

import numpy as np
import pytest
import sacrebleu
import torch

from pipeline.evaluation.codebleu import codebleu, corpus_bleu, edges, gram_counts, tokens, with_interval
from pipeline.text.chat import tree

ADD = "def add(a, b):\n    total = a + b\n    return total\n"


def bleu(pairs: list[tuple[list[str], list[str]]], *, weighted: bool) -> float:
    """BLEU over tokens."""
    counts = np.array([gram_counts(*pair, weighted=weighted) for pair in pairs]).sum(0)
    return corpus_bleu(counts, np.array([[len(side) for side in pair] for pair in pairs]).sum(0))


def test_codebleu_of_identical_code_is_one() -> None:
    result = codebleu([ADD, "x = 1\n"], [ADD, "x = 1\n"])
    assert result.score == pytest.approx(1.0) and result.parts == 4


def test_renaming_variables_keeps_syntax_and_dataflow() -> None:
    renamed = "def add(first, second):\n    s = first + second\n    return s\n"
    result = codebleu([renamed], [ADD])
    assert result.syntax == result.dataflow == 1.0
    assert result.bleu < 0.9
    other = codebleu([ADD.replace("a + b", "a + a")], [ADD])
    assert other.syntax == 1.0 and other.dataflow is not None and other.dataflow < 1.0


def test_dataflow_edges_of_a_small_function() -> None:
    """v0 = a, v1 = b by first appearance; total is v2."""
    module = tree(ADD)
    assert module is not None
    assert dict(edges(module)) == {"v2<-v0": 1, "v2<-v1": 1, "Return<-v2": 1}


def test_unparsable_code_earns_nothing_in_syntax_and_dataflow() -> None:
    result = codebleu([ADD + "\nreturn ("], [ADD])
    assert result.syntax == 0.0 and result.dataflow == 0.0
    assert result.bleu > 0.3


def test_without_edges_in_any_reference_the_mean_is_of_three() -> None:
    result = codebleu(["print(1)\n"], ["print(1)\n"])
    assert result.dataflow is None and result.parts == 3 and result.score == pytest.approx(1.0)


@pytest.mark.parametrize("change", [("total", "result"), ("a + b", "b * a - 1"), ("return total", "print(total)")])
def test_part_one_equals_sacrebleu_on_the_tokens(change: tuple[str, str]) -> None:
    sources = [ADD.replace(*change), "for i in range(3):\n    print(i)\n"]
    references = [ADD, "for k in range(4):\n    print(k, k)\n"]
    joined = [[" ".join(tokens(s)) for s in side] for side in (sources, references)]
    expected = sacrebleu.BLEU(tokenize="none", force=True).corpus_score(joined[0], [joined[1]]).score
    assert 100 * codebleu(sources, references).bleu == pytest.approx(expected)


def test_keywords_weigh_five_times_as_much() -> None:
    """Candidate `return x`, reference `return y`: 1 of 1.2 by weight, 1 of 2 by count."""
    pair = [(["return", "x"], ["return", "y"])]
    # Order 2 has no match, so exponential smoothing counts half a match of one. Longer orders do not exist.
    assert bleu(pair, weighted=True) == pytest.approx((1 / 1.2 * 0.5) ** 0.5)
    assert bleu(pair, weighted=False) == pytest.approx((1 / 2 * 0.5) ** 0.5)


def test_nothing_in_common_is_zero() -> None:
    assert bleu([(["a", "b", "c", "d"], ["e", "f"])], weighted=False) == 0.0
    assert bleu([([], ["e"])], weighted=False) == 0.0


def test_the_interval_is_that_of_scores_of_resampled_pairs() -> None:
    sources = [ADD, ADD.replace("a + b", "a - b"), "x = 1\n", "print(ADD)\n", "return ("]
    references = [ADD, ADD, "x = 1\n", "print(1)\n", "y = f(x)\n"]
    whole, found = with_interval(sources, references, generator=torch.Generator().manual_seed(3), resamples=400)
    assert whole == codebleu(sources, references)
    assert found.value == whole.score and found.n == 5
    items = torch.randint(5, (400, 5), generator=torch.Generator().manual_seed(3)).tolist()
    scores = [codebleu([sources[i] for i in row], [references[i] for i in row]).score for row in items]
    assert (found.low, found.high) == pytest.approx(tuple(np.quantile(scores, (0.025, 0.975))))
    assert found.low < found.value < found.high
