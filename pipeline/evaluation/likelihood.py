"""Bits per byte and perplexity of held-out documents under autoregressive models; similarity of answers to references.

    texts -> a `Scored` per text (nats, tokens, bytes) -> bits_per_byte, perplexity
    answers, references -> BLEU, chrF, ROUGE, BERTScore, exact match

All text tokens are scored; the separator before the first token is only context. Long documents are split into windows
of L tokens: the first window scores all of its tokens; each later window advances by L/2 and scores its second half, so
every token is scored once, with at least L/2 tokens of context. Windows are packed into rows as long as the model's
context. Byte counts come from the tokens' own bytes, never from decoding tokens one by one (part of a character would
decode to the three bytes of U+FFFD). Sums are in float64, so a uniform model gets exactly log2(V) * tokens / bytes;
under autocast, the softmax is in float32.

BLEU and chrF are sacrebleu's corpus scores (Post 2018, arXiv:1804.08771) with their signatures; ROUGE is rouge-score's
F1 (Lin 2004) with its stemmer, one sentence per line. `repeat_4` measures repetition within a text.

Not guaranteed: that overlap with a single reference measures quality; it is a weak signal, for comparing models on the
same items. The bound for masked-diffusion models is in `diffusion/measure.py`.
"""

import importlib.util
import json
import sys
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import exp, fsum, log
from pathlib import Path
from types import ModuleType

import sacrebleu
import torch
from sacrebleu.metrics.chrf import CHRFScore
from torch import Tensor

from pipeline.model.transformer import Transformer
from pipeline.run.errors import ConfigError, ModelError
from pipeline.text.tokenizer import Tokenizer

BATCH_TOKENS = 8192  # tokens in one forward pass
HEAD_ROWS = 512  # positions whose logits are in memory at once
PADDING = -1


@dataclass(frozen=True)
class Scored:
    nats: float  # sum of -ln p over the tokens
    tokens: int
    bytes: int  # of the text in UTF-8


@dataclass(frozen=True)
class Likelihood:
    """Scored documents, in order. `left_out` counts texts altered by the tokenizer's normalizer."""

    documents: list[Scored]
    left_out: int
    places: list[int]  # index of each document among the texts

    @property
    def bits_per_byte(self) -> float:
        """Bits per byte, comparable across tokenizers."""
        return fsum(d.nats for d in self.documents) / log(2) / sum(d.bytes for d in self.documents)

    @property
    def perplexity(self) -> float:
        """exp(nats per token), comparable only between models with the same tokenizer."""
        return exp(fsum(d.nats for d in self.documents) / sum(d.tokens for d in self.documents))


@dataclass(frozen=True)
class Window:
    """A window of a document: `ids[i]`, at position i, predicts `targets[i]`; scored from position `scored` onward."""

    document: int
    ids: list[int]
    targets: list[int]
    scored: int


def likelihood(model: Transformer, tokenizer: Tokenizer, texts: Iterable[str], *, context: int) -> Likelihood:
    """Score documents with windows of `context` tokens.

    Empty texts are skipped and not counted. Raises ValueError if `context` is odd, below 2 or above the model's, and
    ModelError if the tokens' bytes differ from the bytes of the decoded text.
    """
    if context < 2 or context % 2 or context > model.config.max_context:
        raise ValueError(f"context: expected an even number from 2 to {model.config.max_context}, found {context}")
    nonempty = [(index, text) for index, text in enumerate(texts) if text]
    encoded, left_out, indices = [], 0, []
    for (index, text), ids in zip(nonempty, tokenizer.encode_batch([text for _, text in nonempty])):
        if _has_same_bytes(tokenizer, text, ids):
            encoded.append((ids, len(text.encode())))
            indices.append(index)
        else:
            left_out += 1
    nats = token_nats(model, [ids for ids, _ in encoded], start=tokenizer.end_of_text, context=context)
    scored = [Scored(fsum(n), len(ids), size) for n, (ids, size) in zip(nats, encoded)]
    return Likelihood(scored, left_out, indices)


def _has_same_bytes(tokenizer: Tokenizer, text: str, ids: list[int]) -> bool:
    """Whether the tokens spell the text; False if a normalizer changed it. Raises ModelError if the bytes differ."""
    spelling = b"".join(tokenizer.token_bytes[i] for i in ids)
    if spelling == text.encode():
        return True
    if tokenizer.decode(ids, skip_special=False) == text:
        raise ModelError(
            f"the tokenizer's bytes for {text[:40]!r} are {spelling[:40]!r}, so bits per byte would be wrong"
        )
    return False


def token_nats(model: Transformer, documents: Sequence[list[int]], *, start: int, context: int) -> list[list[float]]:
    """-ln p of every token of every document; each document's context begins with the token `start`."""
    nats: list[list[float]] = [[0.0] * len(ids) for ids in documents]
    filled = [0] * len(documents)
    was_training = model.training
    model.train(False)
    try:
        cut = [window for number, ids in enumerate(documents) for window in windows(number, ids, start, context)]
        for rows in _batches(cut, model.config.max_context):
            for window, values in zip((window for row in rows for window in row), _nats_of_batch(model, rows)):
                nats[window.document][filled[window.document] : filled[window.document] + len(values)] = values
                filled[window.document] += len(values)
    finally:
        model.train(was_training)
    assert filled == [len(ids) for ids in documents], "every token is scored once"
    return nats


def windows(document: int, ids: list[int], start: int, context: int) -> Iterator[Window]:
    """The windows of one document, whose scored parts cover the document without gaps or overlaps."""
    inputs = [start, *ids]  # inputs[i] predicts ids[i]
    half = context // 2
    if ids:
        yield Window(document, inputs[:context] if len(ids) >= context else inputs[: len(ids)], ids[:context], 0)
    num_scored = context
    while num_scored < len(ids):
        begin = num_scored - half
        end = min(begin + context, len(ids))
        yield Window(document, inputs[begin:end], ids[begin:end], half)
        num_scored = end


def _batches(windows: list[Window], length: int) -> Iterator[list[list[Window]]]:
    """Rows of consecutive windows, at most `length` tokens each, in batches of BATCH_TOKENS tokens or a single row."""
    rows: list[list[Window]] = []
    room = 0  # in the last row
    for window in windows:
        if len(window.ids) > room:
            if rows and (len(rows) + 1) * length > BATCH_TOKENS:
                yield rows
                rows = []
            rows.append([])
            room = length
        rows[-1].append(window)
        room -= len(window.ids)
    if rows:
        yield rows


@torch.no_grad()
def _nats_of_batch(model: Transformer, rows: list[list[Window]]) -> list[list[float]]:
    """-ln p of the scored targets of each window, row by row, in one forward pass."""
    device = next(model.parameters()).device
    width = max(sum(len(window.ids) for window in row) for row in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    documents = torch.full((len(rows), width), PADDING, dtype=torch.int32)
    select = torch.zeros(len(rows), width, dtype=torch.bool)
    for index, row in enumerate(rows):
        begin = 0
        for number, window in enumerate(row):
            end = begin + len(window.ids)
            ids[index, begin:end] = torch.tensor(window.ids)
            documents[index, begin:end] = number
            select[index, begin + window.scored : end] = True
            begin = end
    windows = [window for row in rows for window in row]
    targets = torch.tensor([target for window in windows for target in window.targets[window.scored :]])
    hidden = model.hidden(ids.to(device), documents=documents.to(device))[select.to(device)]  # (n, D)
    values = torch.cat([_nats(model.logits(h), t) for h, t in zip(hidden.split(HEAD_ROWS), targets.split(HEAD_ROWS))])
    counts = [len(window.ids) - window.scored for window in windows]
    return [part.tolist() for part in values.split(counts)]


def _nats(logits: Tensor, targets: Tensor) -> Tensor:
    """-ln p (n,) of `targets` (n,) under `logits` (n, V): in float64, or in float32 for half-precision logits."""
    wide = (logits.double() if logits.itemsize > 2 else logits.float()).cpu()
    return wide.logsumexp(-1) - wide.gather(1, targets[:, None]).squeeze(1)


# -- similarity --------------------------------------------------------------------------------------------------------


ROUGE = ("rouge1", "rouge2", "rougeL", "rougeLsum")


class _Chrf(sacrebleu.CHRF):
    """chrF whose scores are always floats: sacrebleu's own bootstrap fails if some resamples match nothing."""

    def _compute_score_from_stats(self, statistics: list[int]) -> CHRFScore:
        found = super()._compute_score_from_stats(statistics)
        found.score = float(found.score)
        return found


def text_scores(answers: Sequence[str], references: Sequence[str], *, resamples: int) -> dict[str, float | str]:
    """`bleu` and `chrf` (0 to 100, as printed by sacrebleu) with sacrebleu's bootstrap intervals, and their signatures.

    One reference per answer, in the same order. Raises ValueError if there are no answers or the numbers differ.
    """
    if not answers or len(answers) != len(references):
        raise ValueError(f"expected one answer per reference, found {len(answers)} and {len(references)}")
    bleu, chrf = sacrebleu.BLEU(), _Chrf()
    scores: dict[str, float | str] = {}
    for name, metric in (("bleu", bleu), ("chrf", chrf)):
        found = metric.corpus_score(list(answers), [list(references)], n_bootstrap=resamples)
        mean, half_width = float(found._mean), float(found._ci)
        scores |= {name: found.score, f"{name}_low": mean - half_width, f"{name}_high": mean + half_width}
    scores["bleu_signature"] = str(bleu.get_signature())
    scores["chrf_signature"] = str(chrf.get_signature())
    return scores


def bertscore(answers: Sequence[str], references: Sequence[str], folder: str, layer: int | None) -> list[float]:
    """BERTScore F1 (Zhang et al. 2020, arXiv:1904.09675) of each answer, using the bert-score package with the BERT
    model in `folder`.

    Scores are comparable only for the same weights and layer. Raises ConfigError if the folder has no model or the
    package is missing.
    """
    path = Path(folder)
    if not (path / "config.json").is_file():
        raise ConfigError(
            f"evaluate.bertscore: expected a BERT model directory (config.json, weights, tokenizer), found {path}"
        )
    try:
        from bert_score import BERTScorer  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        raise ConfigError(
            "evaluate.bertscore needs the package bert-score; run pip install '.[bertscore]', or set the key to none"
        ) from error
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    scorer = BERTScorer(model_type=str(path), num_layers=layer or int(config["num_hidden_layers"]))
    tokenizer = scorer._tokenizer
    limit = int(config.get("max_position_embeddings", 514)) - 2  # RoBERTa's positions begin at 2
    # a tokenizer saved without a limit gets 10^30, so it would never truncate
    tokenizer.model_max_length = min(tokenizer.model_max_length, limit)
    *_, f1 = scorer.score(list(answers), list(references))  # precision, recall, F1 of each answer
    assert isinstance(f1, Tensor)
    return f1.tolist()


def rouge_rows(answers: Sequence[str], references: Sequence[str]) -> list[dict[str, float]]:
    """ROUGE F1 of each answer, from 0 to 1."""
    with _parts_of_nltk():
        from rouge_score import rouge_scorer
    scorer = rouge_scorer.RougeScorer(list(ROUGE), use_stemmer=True)
    rows = []
    for answer, reference in zip(answers, references, strict=True):
        scores = scorer.score(reference, answer)
        rows.append({name: float(scores[name].fmeasure) for name in ROUGE})
    return rows


@contextmanager
def _parts_of_nltk() -> Iterator[None]:
    """Allow importing individual nltk modules without the parent packages: rouge-score only needs the stemmer, but
    `import nltk` also imports scipy and sklearn, which takes two seconds.
    """
    names = ("nltk", "nltk.stem")
    if "nltk" in sys.modules:
        yield
        return
    spec = importlib.util.find_spec("nltk")
    assert spec is not None and spec.origin is not None, "rouge-score needs nltk"
    folder = Path(spec.origin).parent
    for name, path in zip(names, (folder, folder / "stem"), strict=True):
        package = ModuleType(name)
        package.__path__ = [str(path)]
        sys.modules[name] = package
    try:
        yield
    finally:  # a later `import nltk` gets the complete package
        for name in [name for name in sys.modules if name.partition(".")[0] == "nltk"]:
            del sys.modules[name]


def exact_match(answer: str, reference: str) -> bool:
    """Whether two texts are equal after NFC normalization, with runs of whitespace collapsed to one space."""
    return _normalize(answer) == _normalize(reference)


def _normalize(text: str) -> str:
    return " ".join(unicodedata.normalize("NFC", text).split())


def repeat_4(ids: Sequence[int]) -> float:
    """1 - distinct / total 4-grams of tokens: 0 without repetition, near 1 in a loop; 0 for fewer than four tokens."""
    runs = [tuple(ids[i : i + 4]) for i in range(len(ids) - 3)]
    return 1 - len(set(runs)) / len(runs) if runs else 0.0
