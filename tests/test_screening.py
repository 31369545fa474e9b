"""Test items in the training data are found in files and in texts, whatever the number of processes."""

from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from pipeline.ingest.duplicates import found_in

ITEMS = [
    ("a", "The pilot counted nineteen green lamps on the long wall before the ferry turned around at noon"),
    ("b", "Return the sum of the squares of all odd numbers in the list, or zero if it is empty, please"),
    ("c", "Nobody had seen the grey cat since the harbour market closed its gates on that windy Monday"),
    ("short", "one two three"),
]


def corpus(folder: Path, **files: list[tuple[str, str]]) -> Path:
    folder.mkdir()
    for name, rows in files.items():
        table = pyarrow.table({"text": [r[0] for r in rows], "source": [r[1] for r in rows]})
        pyarrow.parquet.write_table(table, folder / f"{name.replace('_', '-')}.parquet")
    return folder


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    filler = [("nothing of interest here " * 10, "fill")] * 3
    text = corpus(
        tmp_path / "text",
        train_0=[*filler, (f"before. {ITEMS[0][1].upper()}! after", "book")],
        train_1=[(f"x {ITEMS[1][1]} y", "generated"), ("one two three", "book")],
        val_0=[(ITEMS[2][1], "book")],
    )
    return [text, corpus(tmp_path / "code", train_0=filler)]


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_what_a_training_document_holds_is_found(folders: list[Path], workers: int) -> None:
    """Not found: what only a validation file or only generated code holds, and an item too short to be evidence."""
    assert found_in(ITEMS, folders, [], workers) == {"a"}


def test_what_a_training_conversation_holds_is_found(folders: list[Path]) -> None:
    assert found_in(ITEMS, folders, [f"Please: {ITEMS[2][1]}", "hello"], 1) == {"a", "c"}


def test_thirteen_words_in_a_row_are_a_hit_and_twelve_are_not() -> None:
    words = ITEMS[1][1].split()
    assert found_in(ITEMS, [], [" ".join(words[2:15])], 1) == {"b"}
    assert found_in(ITEMS, [], [" ".join([*words[2:14], "other", *words[15:]])], 1) == set()
