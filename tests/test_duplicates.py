"""ingest/duplicates.py against slow, obvious versions."""

import gzip
import json
import random
from pathlib import Path

import numpy as np
import pytest

from pipeline.ingest import duplicates
from pipeline.ingest.duplicates import Index, NearDuplicates, benchmark_items, fingerprint, signature
from pipeline.run.errors import DataError


def similarity(a: bytes, b: bytes) -> float:
    return float(duplicates._estimate(np.frombuffer(a, np.uint8)[None], np.frombuffer(b, np.uint8))[0])


VOCABULARY = [f"word{number}" for number in range(5000)]


def words(seed: int, count: int) -> list[str]:
    return random.Random(seed).choices(VOCABULARY, k=count)


def changed(text: list[str], seed: int, edits: int) -> list[str]:
    draw = random.Random(seed)
    copy = list(text)
    for place in draw.sample(range(len(copy)), edits):
        copy[place] = draw.choice(VOCABULARY)
    return copy


def jaccard(a: list[str], b: list[str]) -> float:
    first, second = ({tuple(t[i : i + 5]) for i in range(len(t) - 4)} for t in (a, b))
    return len(first & second) / len(first | second)


def test_the_fingerprint_ignores_whitespace_and_nothing_else() -> None:
    assert fingerprint("a = 1\n\n  b") == fingerprint("a=1 b\t")
    assert fingerprint("a = 1") != fingerprint("A = 1")


def test_shingle_hashes_are_those_of_each_window() -> None:
    tokens = [b"a", b"b", b"c", b"a", b"b", b"c", b"d"]
    hashes = duplicates.shingle_hashes(tokens, 3)
    alone = [duplicates.shingle_hashes(tokens[i : i + 3], 3)[0] for i in range(5)]
    assert hashes.tolist() == [int(h) for h in alone] and hashes[0] == hashes[3]
    assert len(duplicates.shingle_hashes(tokens, 8)) == 0


@pytest.mark.parametrize("edits", [0, 5, 15, 40, 120])
def test_the_estimate_is_the_jaccard_similarity_within_four_standard_errors(edits: int) -> None:
    errors = []
    for seed in range(12):
        text = words(seed, 800)
        other = changed(text, seed + 1000, edits)
        true = jaccard(text, other)
        errors.append(similarity(signature(" ".join(text)), signature(" ".join(other))) - true)
        assert abs(errors[-1]) <= 4 * max(0.004, (true * (1 - true) / 256) ** 0.5)
    assert abs(np.mean(errors)) < 0.03


def test_unrelated_and_equal_texts_estimate_zero_and_one() -> None:
    a, b = (signature(" ".join(words(seed, 500))) for seed in (1, 2))
    assert similarity(a, a) == 1 and similarity(a, b) < 0.1


def test_short_texts_have_a_signature_of_their_own() -> None:
    assert signature("one two") == signature("one  two") != signature("two one")
    assert len(signature("")) == len(signature("x")) == 256


def test_near_duplicates_finds_what_comparing_with_all_signatures_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the slow version: the first earlier signature with an equal band and an estimate above the threshold."""
    near, kept = NearDuplicates(0.7), []
    near._table = np.full(400, duplicates.EMPTY, np.uint32)  # small, so that the table is rebuilt many times
    near._words.resize((4, 32), refcheck=False)
    found_any = 0
    for number in range(150):
        text = words(number // 5, 300)
        sketch = signature(" ".join(changed(text, number, 3 * (number % 5))))
        bands = np.frombuffer(sketch, np.uint64)
        slow = next(
            (
                i
                for i, s in enumerate(kept)
                if (np.frombuffer(s, np.uint64) == bands).any() and similarity(s, sketch) >= 0.7
            ),
            None,
        )
        assert near.find(sketch) == slow
        found_any += slow is not None
        if slow is None:
            assert near.add(sketch) == len(kept)
            kept.append(sketch)
    assert found_any > 40 and len(kept) > 30


def test_a_band_that_everyone_shares_fills_no_endless_chain() -> None:
    near = NearDuplicates(0.7)
    for number in range(300):
        sketch = bytearray(np.random.default_rng(number).bytes(256))
        sketch[:8] = b"license!"
        near.add(bytes(sketch))
    key = np.frombuffer(b"license!", np.uint64)
    holders = [n for n in near._table[near._table != duplicates.EMPTY] if near._words[n, 0] == key]
    assert len(holders) < 300 * 32
    assert near.find(bytes(sketch)) == 299


# --- decontamination
# ---------------------------------------------------------------------------------------------------


def slow_hits(items: dict[str, str], text: str) -> list[str]:
    def plain(value: str) -> list[str]:
        import re
        import unicodedata

        return re.findall(r"\w+", unicodedata.normalize("NFKC", value).lower())

    document, hits = plain(text), []
    windows = {n: {tuple(document[i : i + n]) for i in range(len(document) - n + 1)} for n in range(1, 14)}
    for name, item in items.items():
        found = plain(item)
        whole = len(found) < 13 and len(" ".join(found)) >= 40 and tuple(found) in windows[len(found)]
        long = any(tuple(found[i : i + 13]) in windows[13] for i in range(len(found) - 12))
        if whole or long:
            hits.append(name)
    return hits


def test_hits_are_those_of_the_slow_version() -> None:
    draw = random.Random(0)
    items = {
        f"i{n}": " ".join(draw.choices(VOCABULARY, k=draw.choice([3, 6, 9, 12, 13, 20, 40, 60]))) for n in range(80)
    }
    index = Index(items.items())
    total = 0
    for _ in range(120):
        cut = draw.choice(list(items.values())).split()
        start = draw.choice([0, 0, draw.randrange(len(cut))])
        piece = cut[start : start + draw.choice([5, 12, 13, 40])]
        text = " ".join([*draw.choices(VOCABULARY, k=30), *piece, *draw.choices(VOCABULARY, k=30)])
        assert index.hits(text) == slow_hits(items, text)
        total += bool(index.hits(text))
    assert 20 < total < 110


def test_a_hit_survives_case_layout_and_compatibility_forms() -> None:
    item = "Return the indices of the two numbers such that they add up to a target value."
    index = Index([("a", item)])
    assert index.hits("xx " + item.upper().replace(" ", "\n  ") + " yy") == ["a"]
    assert index.hits(item.replace("fi", "ﬁ").replace("t", "ｔ")) == ["a"]
    assert index.hits(item.replace("two", "three")) == []


def test_short_items_are_no_evidence_and_boundaries_are_words() -> None:
    assert len(Index([("a", "def f(x):")])) == 0
    index = Index([("a", "solve_the_travelling_salesman_problem_exactly now")])
    assert index.hits("solve_the_travelling_salesman_problem_exactly nowhere") == []
    assert index.hits("go solve_the_travelling_salesman_problem_exactly, now!") == ["a"]


def test_every_kind_of_benchmark_file_gives_its_strings(tmp_path: Path) -> None:
    long = "write a function that returns the largest number in a list of numbers please now"
    row = {"task_id": 1, "prompt": long, "tests": [{"assert": "assert f([1]) == 1"}]}
    (tmp_path / "README.md").write_text(long)
    (tmp_path / ".hidden.json").write_text("{")
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(json.dumps(row).encode()))
    (tmp_path / "c.json").write_text(json.dumps([row, row]))
    (tmp_path / "d.json").write_text(json.dumps(row) + "\n" + json.dumps(row) + "\n")  # JSON lines, as BFCL writes them
    (tmp_path / "e.csv").write_text(f'id,text\n1,"{long}"\n')
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "f.txt").write_text(f"one\n\n{long}\n")
    names = {name for name, text in benchmark_items(tmp_path) if text.strip() == long}
    assert names == {
        "a.jsonl:1",
        "b.jsonl.gz:1",
        "c.json:1",
        "c.json:2",
        "d.json:1",
        "d.json:2",
        "e.csv:2",
        "sub/f.txt:3",
    }
    assert Index(benchmark_items(tmp_path)).hits(long)[0] == "a.jsonl:1"


def test_a_broken_benchmark_file_names_its_line(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n{"a": \n')
    with pytest.raises(DataError, match=r"a\.jsonl:2: not JSON"):
        list(benchmark_items(tmp_path))
    (tmp_path / "a.jsonl").unlink()
    (tmp_path / "b.zip").write_bytes(b"PK")
    with pytest.raises(DataError, match=r"expected \.jsonl"):
        list(benchmark_items(tmp_path))


def test_no_benchmarks_hit_nothing(tmp_path: Path) -> None:
    assert Index(benchmark_items(tmp_path / "absent")).hits("anything") == []
