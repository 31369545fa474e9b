"""Code and text scores against enumeration, the libraries themselves, and cases worked out by hand."""

import json
import subprocess
import sys
from itertools import combinations

import pytest
import sacrebleu

from pipeline.evaluation import likelihood
from pipeline.evaluation.code import Judged, exact_match, judge_answers, pass_at_k, pass_rows, rates
from pipeline.text.chat import extract, formatted
from tests.judges import ReturnJudge, problem

ADD = "def add(a, b):\n    total = a + b\n    return total\n"


def fenced(source: str, language: str = "python") -> str:
    return f"Here it is:\n\n```{language}\n{source}```"


def test_pass_at_k_gives_the_known_numbers() -> None:
    assert [pass_at_k(5, 2, k) for k in (1, 2, 3, 4)] == pytest.approx([0.4, 0.7, 0.9, 1.0])


def test_pass_at_k_equals_enumeration() -> None:
    for n in range(1, 9):
        for c in range(n + 1):
            for k in range(1, n + 1):
                draws = list(combinations([True] * c + [False] * (n - c), k))
                assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, draws)) / len(draws))


@pytest.mark.parametrize(("n", "c", "k"), [(3, 4, 1), (3, 1, 4), (3, 1, 0), (3, -1, 1)])
def test_pass_at_k_refuses_the_impossible(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match=r"pass@k"):
        pass_at_k(n, c, k)


@pytest.mark.parametrize(
    ("answer", "source", "form"),
    [
        (fenced(ADD), ADD, True),
        (fenced(ADD) + "\n\n", ADD, True),
        (fenced(ADD, "py"), ADD, True),
        (fenced(ADD, ""), ADD, False),  # no language: judged, but not in the right form
        (fenced(ADD) + "\nIt adds.", ADD, False),  # does not end the answer
        (fenced(ADD) + "\n" + fenced(ADD), None, False),  # which one?
        (fenced("echo hi\n", "bash"), None, False),
        (fenced(ADD)[:-3], None, False),  # never closed
        (ADD, ADD, False),  # bare code
        ("I cannot do that.", None, False),
        ("no", None, False),  # parses, but is not code
        ("", None, False),
        ("```python\n```", "", True),
        ("````python\ns = '''\n```\n'''\n````", "s = '''\n```\n'''\n", True),
    ],
)
def test_the_code_of_an_answer(answer: str, source: str | None, form: bool) -> None:
    assert extract(answer) == source
    assert formatted(answer) is form


@pytest.mark.parametrize(
    ("mine", "theirs", "equal"),
    [
        (ADD, "def add(a,b):\n  # sum\n  total = (a+b)\n  return total", True),
        ('def f():\n    """Doc."""\n    return 1\n', "def f():\n    return 1\n", True),
        ('def f():\n    """Doc."""\n', "def f():\n    pass\n", True),
        ('"""Module."""\nx = "a"\n', "x = 'a'\n", True),
        (ADD, ADD.replace("total", "result"), False),
        ("x = 1", "x = 1.0", False),
        ("x = ", "x = ", False),
        ("x = 1\0", "x = 1", False),
        ("(" * 5000, "(" * 5000, False),
    ],
)
def test_exact_match_compares_trees_without_docstrings(mine: str, theirs: str, equal: bool) -> None:
    assert exact_match(mine, theirs) is equal


def test_answers_are_judged_in_order_and_counted() -> None:
    answers = [[fenced(ADD), "no"], [fenced("x = (\n"), fenced("x = 1\n")]]
    judged = judge_answers(ReturnJudge(), [problem("p"), problem("q")], answers)  # type: ignore[arg-type]
    assert [(j.problem, j.sample, j.verdict) for j in judged] == [
        ("p", 0, "passed"),
        ("p", 1, "no_code"),
        ("q", 0, "wrong"),
        ("q", 1, "wrong"),
    ]
    assert [j.parses for j in judged] == [True, False, False, True]
    assert pass_rows(judged, 1) == {"p": 0.5, "q": 0.0}
    assert pass_rows(judged, 2) == {"p": 1.0, "q": 0.0}
    expected = {
        "parse_rate": 0.5,
        "format_rate": 0.75,
        "verdicts/no_code": 1,
        "verdicts/passed": 1,
        "verdicts/wrong": 2,
    }
    assert rates(judged) == expected


def test_unscorable_samples_count_neither_way() -> None:
    one = Judged("p", 0, ADD, True, True, "passed", "", 1.0)
    lost = Judged("p", 1, ADD, True, True, "unscorable", "harness", None)
    assert pass_rows([one, lost], 1) == {"p": 1.0}
    assert pass_rows([one, lost], 2) == {}


@pytest.mark.slow  # starts its own process
def test_rouge_loads_the_stemmer_alone_and_leaves_nltk_whole() -> None:
    program = """
import json, sys
from pipeline.evaluation import likelihood
rows = likelihood.rouge_rows(["The cats were running away"], ["A cat is running away"])
assert not {"nltk", "scipy", "sklearn"} & set(sys.modules), "a part of nltk stays, or all of it was imported"
import nltk
assert rows == likelihood.rouge_rows(["The cats were running away"], ["A cat is running away"])
print(json.dumps([rows[0]["rouge1"], nltk.edit_distance("ab", "b")]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [pytest.approx(0.6), 1]


@pytest.mark.slow  # imports take seconds
def test_text_scores_equal_the_libraries() -> None:
    from rouge_score import rouge_scorer

    answers = ["The cat sat on the mat.\nIt slept well.", "A dog ran away quickly from here"]
    references = ["The cat sat on a mat.\nIt was sleeping.", "The dogs ran away from here fast"]
    scores = likelihood.text_scores(answers, references, resamples=200)
    assert scores["bleu"] == sacrebleu.corpus_bleu(answers, [references]).score
    assert scores["chrf"] == sacrebleu.corpus_chrf(answers, [references]).score
    scorer = rouge_scorer.RougeScorer(["rouge1", "rouge2", "rougeL", "rougeLsum"], use_stemmer=True)
    for name in likelihood.ROUGE:
        expected = [scorer.score(r, a)[name].fmeasure for a, r in zip(answers, references)]
        assert [row[name] for row in likelihood.rouge_rows(answers, references)] == pytest.approx(expected)
    assert "version:" in str(scores["bleu_signature"]) and json.loads(json.dumps(scores)) == scores
    for name in ("bleu", "chrf"):
        low, value, high = (float(scores[f"{name}{end}"]) for end in ("_low", "", "_high"))
        assert low <= value <= high and low < high


def test_resamples_without_a_match_have_an_interval_too() -> None:
    scores = likelihood.text_scores(["qqq", "hello there world"], ["zzz", "hello there world"], resamples=100)
    assert (scores["chrf_low"], scores["chrf_high"]) == (pytest.approx(0, abs=25), pytest.approx(100, abs=25))


@pytest.mark.parametrize(("answers", "references"), [(["a"], []), ([], [])])
def test_text_scores_refuse_answers_without_references(answers: list[str], references: list[str]) -> None:
    with pytest.raises(ValueError, match=f"found {len(answers)} and 0"):
        likelihood.text_scores(answers, references, resamples=10)


def test_text_exact_match_collapses_spaces_and_composes() -> None:
    assert likelihood.exact_match("cafe\u0301  au\nlait ", "caf\u00e9 au lait")
    assert not likelihood.exact_match("Cafe", "cafe")


def test_repeat_4_counts_repeated_runs() -> None:
    assert likelihood.repeat_4([1, 2, 3]) == 0.0
    assert likelihood.repeat_4(list(range(20))) == 0.0
    assert likelihood.repeat_4([7] * 10) == pytest.approx(1 - 1 / 7)
    assert likelihood.repeat_4([1, 2, 3, 4, 1, 2, 3, 4]) == pytest.approx(1 - 4 / 5)
