"""How near an answer's text is to a reference: BLEU, chrF, ROUGE, exact match; and how much a text repeats itself.

BLEU and chrF are sacrebleu's corpus scores (Post 2018, arXiv:1804.08771) with their signatures; ROUGE is rouge-score's
F1 (Lin 2004) with its stemmer, a sentence per line. Overlap with one reference is a weak sign of quality: these are
for comparing models on the same items.
"""

import unicodedata
from collections.abc import Sequence

import sacrebleu

ROUGE = ("rouge1", "rouge2", "rougeL", "rougeLsum")


def text_scores(answers: Sequence[str], references: Sequence[str]) -> dict[str, float | str]:
    """`bleu`, `chrf` (0 to 100, as sacrebleu prints them), `rouge*`, `exact_match` (0 to 1), and signatures.

    One reference an answer, in the same order. Raises ValueError where there are none or the numbers differ.
    """
    if not answers or len(answers) != len(references):
        raise ValueError(f"expected an answer for each reference, found {len(answers)} and {len(references)}")
    bleu, chrf = sacrebleu.BLEU(), sacrebleu.CHRF()
    scores: dict[str, float | str] = {
        "bleu": bleu.corpus_score(list(answers), [list(references)]).score,
        "chrf": chrf.corpus_score(list(answers), [list(references)]).score,
    }
    rows = rouge_rows(answers, references)
    for name in ROUGE:
        scores[name] = sum(row[name] for row in rows) / len(rows)
    scores["exact_match"] = sum(map(exact_match, answers, references)) / len(answers)
    scores["bleu_signature"] = str(bleu.get_signature())
    scores["chrf_signature"] = str(chrf.get_signature())
    return scores


def rouge_rows(answers: Sequence[str], references: Sequence[str]) -> list[dict[str, float]]:
    """ROUGE F1 of each answer, 0 to 1: what the bootstrap resamples."""
    from rouge_score import rouge_scorer  # here: it brings nltk, scipy and sklearn, which take seconds to import

    scorer = rouge_scorer.RougeScorer(list(ROUGE), use_stemmer=True)
    rows = []
    for answer, reference in zip(answers, references, strict=True):
        scores = scorer.score(reference, answer)
        rows.append({name: float(scores[name].fmeasure) for name in ROUGE})
    return rows


def exact_match(answer: str, reference: str) -> bool:
    """Equal after Unicode's NFC and with runs of white space as one space."""
    return _plain(answer) == _plain(reference)


def _plain(text: str) -> str:
    return " ".join(unicodedata.normalize("NFC", text).split())


def repeat_4(ids: Sequence[int]) -> float:
    """1 - distinct / all runs of four tokens: 0 never repeats, near 1 is a loop; 0 below four tokens."""
    runs = [tuple(ids[i : i + 4]) for i in range(len(ids) - 3)]
    return 1 - len(set(runs)) / len(runs) if runs else 0.0
