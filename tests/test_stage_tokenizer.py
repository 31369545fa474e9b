"""Keys of stage tokenizer: how much text the merges are counted on, from which corpus, and how many ids result."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from pipeline.ingest import selection
from pipeline.run.errors import DataError
from pipeline.text.tokenizer import Tokenizer
from stages import tokenizer


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """1,000 documents of 100 bytes each per corpus: words in the text, sums in the code."""
    folder, found = tmp_path_factory.mktemp("raw"), {}
    for name, mark in (("text", "word"), ("code", "1+1=")):
        documents = [f"{n:04}" + mark * 24 for n in range(1000)]
        columns = {"text": documents, "source": ["s"] * 1000, "path": [str(n) for n in range(1000)]}
        found[name] = folder / name
        found[name].mkdir()
        for split, count in (("train", 1000), ("val", 10)):
            table = pyarrow.table({key: values[:count] for key, values in columns.items()})
            pyarrow.parquet.write_table(table, found[name] / f"{split}-0.parquet")
    return found


def params(**changes: Any) -> tokenizer.Params:
    return tokenizer.Params(**({"vocab_size": 320, "sample_mb": 0.04, "text_share": 0.5, "base": "scratch"} | changes))


@pytest.mark.parametrize(
    ("megabytes", "share", "text", "code"),
    [(0.04, 0.5, 20_000, 20_000), (0.08, 0.5, 40_000, 40_000), (0.04, 0.25, 10_000, 30_000), (0.04, 1.0, 40_000, 0)],
)
def test_the_sample_is_so_large_and_so_much_of_it_text(
    megabytes: float, share: float, text: int, code: int, corpora: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[str] = []

    def train(texts: Iterator[str], vocab_size: int, *, repositories: bool) -> None:
        assert not repositories
        given.extend(texts)

    monkeypatch.setattr(Tokenizer, "train", train)
    tokenizer.learnt(params(sample_mb=megabytes, text_share=share), **corpora)
    held = {mark: sum(len(one) for one in given if mark in one) for mark in ("word", "1+1=")}
    assert held["word"] == pytest.approx(text, rel=0.15)  # documents are chosen by a hash
    assert held["1+1="] == pytest.approx(code, rel=0.15)


@pytest.mark.parametrize("size", [320, 384])
def test_the_tokenizer_has_so_many_ids(size: int, corpora: dict[str, Path]) -> None:
    assert tokenizer.learnt(params(vocab_size=size), **corpora).vocab_size == size


def test_without_any_text_there_is_no_tokenizer_and_of_an_empty_corpus_no_ratio(
    tmp_path: Path, corpora: dict[str, Path]
) -> None:
    for name in ("text", "code"):
        selection.write_empty(tmp_path / name)
    with pytest.raises(DataError, match=r"no text to train a tokenizer on: text and code are both empty"):
        tokenizer.learnt(params(), text=tmp_path / "text", code=tmp_path / "code")
    made = tokenizer.learnt(params(), text=corpora["text"], code=tmp_path / "code")
    assert tokenizer.bytes_per_token(made, tmp_path / "code") is None
    assert (tokenizer.bytes_per_token(made, corpora["text"]) or 0) > 1
