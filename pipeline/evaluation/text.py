"""How near an answer's text is to a reference: BLEU, chrF, ROUGE, exact match; and how much a text repeats itself.

BLEU and chrF are sacrebleu's corpus scores (Post 2018, arXiv:1804.08771) with their signatures; ROUGE is rouge-score's
F1 (Lin 2004) with its stemmer, a sentence per line. Overlap with one reference is a weak sign of quality: these are
for comparing models on the same items.
"""

import json
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import sacrebleu

from pipeline.errors import ConfigError

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


def bertscore(
    answers: Sequence[str], references: Sequence[str], folder: str | None, layer: int | None
) -> dict[str, float | str]:
    """`bertscore_f1` (Zhang et al. 2020, arXiv:1904.09675), the mean over answers of the bert-score package with the BERT in `folder`.

    Comparable between equal weights and layers alone. Without a folder it says "skipped: no local weights". Raises ConfigError for a folder
    that holds no model, and where the package is missing.
    """
    if folder is None:
        return {"bertscore_f1": "skipped: no local weights"}
    path = Path(folder)
    if not (path / "config.json").is_file():
        raise ConfigError(
            f"evaluate.bertscore: expected a directory with config.json, weights and tokenizer of a BERT, found {path}"
        )
    try:
        from bert_score import BERTScorer  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        raise ConfigError(
            "evaluate.bertscore needs the package bert-score: pip install '.[bertscore]', or set it to none"
        ) from error
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    scorer = BERTScorer(model_type=str(path), num_layers=layer or int(config["num_hidden_layers"]))
    tokenizer, room = (
        scorer._tokenizer,
        int(config.get("max_position_embeddings", 514)) - 2,
    )  # RoBERTa begins at place 2
    tokenizer.model_max_length = min(
        tokenizer.model_max_length, room
    )  # one that was saved without it has 10^30, which cuts nothing
    scores: Any = scorer.score(list(answers), list(references))  # precision, recall, F1 of each answer
    return {"bertscore_f1": float(scores[2].mean())}


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
