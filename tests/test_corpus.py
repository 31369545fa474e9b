"""stages/corpus.py on a mock machine: what is dropped and why, the bookkeeping, and the same bytes for any number of
workers.
"""

import dataclasses
import json
import os
import random
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline.ingest import selection as ingest_selection
from pipeline.ingest import sources
from pipeline.ingest.cleaning import Document
from pipeline.ingest.duplicates import Index, fingerprint, signature
from pipeline.ingest.entries import FileEntry, PackagesEntry
from pipeline.ingest.records import Text
from pipeline.ingest.selection import PartWriter, Selection
from pipeline.ingest.sources import DataConfig
from pipeline.run.errors import DataError
from pipeline.synthetic import stories
from stages import corpus
from tests.data_stages import LIKENESS, PLANTED, QUOTAS, Machine, manifest, rows, source
from tests.data_stages import planted_machine as planted_machine

ROOT = Path(__file__).parents[1]


REASONS = {"duplicate": 1, "near duplicate": 1, "secret": 1, "benchmark": 1, "generated": 1, "syntax": 1, "size": 1}


def contents(out: Path) -> dict[str, bytes]:
    return {f"{p.parent.name}/{p.name}": p.read_bytes() for name in ("text", "code") for p in (out / name).iterdir()}


def test_what_was_planted_leaves_by_its_reason_and_the_books_balance(machine: Machine) -> None:
    out = machine.build("out")
    code = manifest(out, "code")
    assert {reason: entry["files"] for reason, entry in code["parts"]["python"]["dropped"].items()} == REASONS
    assert code["benchmark_items_hit"] == {"test.jsonl:1": 1}
    for name in ("text", "code"):
        books = manifest(out, name)
        for part in books["parts"].values():
            kept = sum(split["files"] for split in part["kept"].values())
            assert kept + sum(entry["files"] for entry in part["dropped"].values()) == part["found"]["files"]
        read = {split: rows(out / name, split) for split in ("train", "val")}
        assert {split: len(entries) for split, entries in read.items()} == books["documents"]
        assert {s: sum(len(r["text"].encode()) for r in entries) for s, entries in read.items()} == books["bytes"]
        everything = [row for entries in read.values() for row in entries]
        for column, key in (("source", "sources"), ("license", "licenses")):
            counted = {value: entry["files"] for value, entry in books[key].items()}
            assert counted == {v: sum(row[column] == v for row in everything) for v in counted}
            assert sum(counted.values()) == len(everything)


def test_kept_files_are_whole_and_in_the_split_of_their_package(machine: Machine) -> None:
    out = machine.build("out")
    read = {row["path"]: row for row in rows(out / "code")}
    assert read["plain/f07.py"]["text"] == source(107)
    assert {"aa/first.py", "s0.sh"} <= set(read) and not {f"planted/{name}" for name in PLANTED} & set(read)
    for split in ("train", "val"):
        packages = {row["source"] for row in rows(out / "code", split) if row["source"] != "generated"}
        assert packages and all(sources.split_of(package) == split for package in packages)


def test_held_out_stories_are_in_val_and_reported_apart(machine: Machine) -> None:
    out = machine.build("out", stories_mb=0.1)
    for split in ("train", "val"):
        told = [row["path"] for row in rows(out / "text", split) if row["path"].startswith("stories/")]
        assert told and all(stories.is_held_out(path) == (split == "val") for path in told)
    apart = manifest(out, "text")["held_out_families"]
    assert set(apart) == set(stories.HELD_OUT)


def test_every_fiftieth_drill_and_transcript_is_held_out() -> None:
    for part in ("drills", "transcripts"):
        made = corpus.prepare(corpus.WrittenBatch(part, range(45, 105), 3))
        assert [number for number, document in zip(range(45, 105), made, strict=True) if document.split == "val"] == [
            50,
            100,
        ]


@pytest.mark.slow
@pytest.mark.full
def test_two_workers_write_the_bytes_of_one_also_with_full_packages(machine: Machine) -> None:
    """The cap of 3 kB fills within a batch, so the two runs differ in which files they read at all."""
    one, two = (machine.build(f"w{n}", n, cap_mb=0.003, python_mb=0.01) for n in (1, 2))
    assert contents(one) == contents(two)
    assert manifest(one, "code")["parts"]["python"]["dropped"]["cap"]["files"] > 0


def test_a_quota_ends_its_part_and_a_quota_of_nothing_leaves_it_out(machine: Machine) -> None:
    out = machine.build("out", python_mb=0.004, shell_mb=0, prose_mb=0, drills_mb=0, transcripts_mb=0)
    kept = manifest(out, "code")["parts"]["python"]["kept"]
    largest = max(len(source(seed)) for seed in range(100, 120))
    assert 4000 <= sum(entry["bytes"] for entry in kept.values()) < 4000 + largest
    assert manifest(out, "code")["parts"]["shell"]["found"]["files"] == 0
    assert {row["path"].split("/")[0] for row in rows(out / "text")} == {"stories"}


def dropped(out: Path, part: str = "python", name: str = "code") -> dict[str, int]:
    """Drop reason -> number of documents that a part dropped."""
    return {reason: entry["files"] for reason, entry in manifest(out, name)["parts"][part]["dropped"].items()}


def test_documents_leave_by_the_likeness_and_sizes_and_licenses_of_the_settings(machine: Machine) -> None:
    def data(**changes: Any) -> DataConfig:
        return DataConfig(source="machine", **changes)

    less: dict[str, Any] = {
        "stories_mb": 0.01,
        "drills_mb": 0.0,
        "transcripts_mb": 0.0,
        "generated_mb": 0.0,
        "prose_mb": 0.01,
    }
    usual = machine.build("usual", **less)
    assert dropped(usual) == REASONS and dropped(usual, "shell") == {}
    unlike = machine.build("unlike", near_duplicates=1.0, **less)
    assert "near duplicate" not in dropped(unlike) and paths(unlike) - paths(usual) == {"planted/near.py"}
    small = machine.build("small", data=data(min_bytes=1), **less)
    assert "size" not in dropped(small) and paths(small) - paths(usual) == {"planted/small.py"}
    large = machine.build("large", data=data(max_bytes=len(source(100)) - 200), **less)
    assert dropped(large)["size"] > 20 and not paths(large) & {f"plain/f{n:02}.py" for n in range(20)}
    free = machine.build("free", data=data(licenses="permissive"), **less)
    assert dropped(free, "shell") == {"license": 2} and dropped(free) == REASONS


def paths(out: Path) -> set[str]:
    return {row["path"] for row in rows(out / "code")}


def test_a_package_gives_no_more_than_its_cap(machine: Machine) -> None:
    """`plain` has 20 files of the same size; a part that no package feeds has no cap."""
    each = len(source(100))
    for cap in (2.5, 4.5):
        out = machine.build(f"cap{cap}", cap_mb=cap * each / 1e6, stories_mb=0.02)
        assert sum(row["source"] == "plain" for row in rows(out / "code")) == int(cap)
        assert dropped(out)["cap"] >= 20 - int(cap)
        assert sum(len(row["text"]) for row in rows(out / "text") if row["path"].startswith("stories/")) >= 20_000


def test_every_part_has_the_quota_of_its_key(tmp_path: Path) -> None:
    quotas: dict[str, Any] = {name: (n + 1) / 100 for n, name in enumerate(QUOTAS)}
    params = corpus.Params(**quotas, **LIKENESS, data=DataConfig(source="machine"))
    found: dict[str, float] = {}
    for name in corpus.PARTS:
        found |= corpus._selection(name, params, Index([]), tmp_path).quotas
    assert found == pytest.approx({name.removesuffix("_mb"): quota * 1e6 for name, quota in quotas.items()})


def test_prose_repeats_no_paragraph(machine: Machine) -> None:
    out = machine.build("out")
    spoken = [p for row in rows(out / "text") if row["path"].endswith(".py") for p in row["text"].split("\n\n")]
    assert len(spoken) > 100 and len(spoken) == len(set(spoken))


def test_own_files_become_the_corpus_and_a_single_document_is_an_error(machine: Machine) -> None:
    own = machine.tmp / "own"
    (own / "code").mkdir()
    (own / "text").mkdir()
    for number in range(6):
        (own / "code" / f"f{number}.py").write_text(source(300 + number))
        (own / "text" / f"t{number}.txt").write_text(f"{number}: " + source(400 + number))
    (own / "text" / "broken.txt").write_bytes(b"caf\xe9")
    (own / "code" / "short.py").write_text("x = 1\n")
    (own / "code" / "odd.py").write_text(source(306) + "def broken(:\n")
    data = DataConfig(source="files", text=["text/*"], code=["code/*"], max_rejected=0.5)
    out = machine.build("out", data=data)
    assert sorted(row["text"] for row in rows(out / "code")) == sorted(source(300 + n) for n in range(6))
    assert manifest(out, "text")["documents"]["val"] >= 1  # even if the random split would hold none out
    assert manifest(out, "code")["data"] == "files"
    num_bytes = sum((own / "text" / f"t{number}.txt").stat().st_size for number in range(6))
    told = {"accepted": 6, "duplicates": 0, "rejected": 1, "dropped": 0, "bytes": num_bytes}
    assert manifest(out, "text")["rows"] == told
    assert manifest(out, "code")["rows"]["dropped"] == 2
    told = {"accepted": 0, "duplicates": 0, "rejected": 0, "dropped": 1, "bytes": 6}
    assert manifest(out, "code")["rows_by_file"]["code/short.py"] == told
    dropped = [json.loads(line) for line in (out / "code" / "dropped.jsonl").read_text().splitlines()]
    named = {(row["path"], row["reason"]) for row in dropped}
    assert {path for path, _ in named} == {"code/short.py", "code/odd.py"} and len(dropped) == 2
    assert ("code/short.py", "size") in named and not (out / "text" / "dropped.jsonl").exists()
    assert {reason for _, reason in named} == manifest(out, "code")["dropped"].keys()
    (rejected,) = map(json.loads, (out / "text" / "rejected.jsonl").read_text().splitlines())
    assert rejected["file"] == "text/broken.txt" and not (out / "code" / "rejected.jsonl").exists()
    (own / "one").mkdir()
    (own / "one" / "a.py").write_text(source(500))
    with pytest.raises(DataError, match="code: expected at least two documents"):
        machine.build("few", data=dataclasses.replace(data, code=["one/*"]))


def test_a_kind_without_entries_is_a_corpus_without_documents(machine: Machine) -> None:
    (machine.tmp / "own" / "t.jsonl").write_text("".join(json.dumps({"text": source(n)}) + "\n" for n in range(9)))
    out = machine.build("out", data=DataConfig(source="files", text=["t.jsonl"]))
    empty = manifest(out, "code")
    assert empty["documents"] == empty["bytes"] == {"train": 0, "val": 0} and empty["rows"] == {}
    none = machine.build("none", data=DataConfig(source="files"))
    assert [manifest(none, corpus)["documents"]["train"] for corpus in ("text", "code")] == [0, 0]
    assert rows(out / "code") == [] and {p.name for p in (out / "code").glob("*.parquet")} == {
        "train-00000.parquet",
        "val-00000.parquet",
    }
    assert manifest(out, "text")["documents"]["train"] == 8


def weighted(machine: Machine, *weights: float) -> DataConfig:
    """Code entries a/*, b/*, ... with 4, 8, 12, ... documents."""
    for number in range(len(weights)):
        folder = machine.tmp / "own" / "abc"[number]
        folder.mkdir(exist_ok=True)
        for n in range(4 * (number + 1)):
            (folder / f"f{n}.py").write_text(source(1000 * number + 700 + n))
    entries = [FileEntry(files=f"{name}/*", weight=weight) for name, weight in zip("abc", weights, strict=False)]
    return DataConfig(source="files", code=list(entries))


def test_weights_give_each_entry_its_share_of_the_training_bytes_and_no_text_is_in_both_splits(
    machine: Machine,
) -> None:
    data = weighted(machine, 3.0, 1.0)
    out = machine.build("out", data=data)
    train, val = rows(out / "code", "train"), rows(out / "code", "val")
    assert len(val) == 1 and not {row["text"] for row in val} & {row["text"] for row in train}
    by_entry = {name: sum(len(row["text"]) for row in train if row["path"].startswith(name)) for name in "ab"}
    largest = max(len(row["text"]) for row in train)
    assert abs(by_entry["a"] - 0.75 * sum(by_entry.values())) < largest
    whole = manifest(out, "code")["rows"]["bytes"] - sum(len(row["text"]) for row in val)
    assert abs(whole - sum(by_entry.values())) < largest, "what is drawn is as much as there is"
    assert len({row["path"] for row in train}) == len(train) and any("#pass2" in row["path"] for row in train)
    told = manifest(out, "code")["mixture"]
    assert [row["entry"] for row in told] == ["a/*", "b/*"] and told[0]["times"] > 1 > told[1]["times"]
    assert told[0]["wanted"] == 0.75 and told[0]["drawn"] == pytest.approx(0.75, abs=0.05)
    assert manifest(out, "code")["documents"] == {"train": len(train), "val": 1}
    assert contents(out) == contents(machine.build("again", workers=2, data=data))


def test_packages_and_files_are_entries_of_one_corpus(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "packages", lambda names: [])
    monkeypatch.setattr(sources, "checked", lambda files: files)
    monkeypatch.setattr(sources, "package_files", lambda packages: machine.files)
    own = machine.tmp / "own"
    for number in range(6):
        (own / f"t{number}.txt").write_text(f"{number}: " + source(400 + number))
    mixed = [FileEntry(files="*.txt", weight=1.0), PackagesEntry(source="packages", weight=1.0)]
    out = machine.build("out", data=DataConfig(source="files", text=list(mixed), code=["packages"]))
    assert set(manifest(out, "code")["parts"]) == {"python", "generated"}
    assert set(manifest(out, "text")["parts"]) == {"own text 1", "prose", "stories", "drills", "transcripts"}
    assert {row["source"] for row in rows(out / "code")} >= {"plain", "aa"}
    train = rows(out / "text", "train")
    mine = sum(len(row["text"].encode()) for row in train if ".txt" in row["path"])
    assert mine / sum(len(row["text"].encode()) for row in train) == pytest.approx(0.5, abs=0.02)
    assert not any("#pass" in row["path"] for row in rows(out / "text", "val"))


def test_a_weight_for_documents_that_cleaning_drops_is_an_error(machine: Machine) -> None:
    data = weighted(machine, 1.0, 1.0)
    for path in (machine.tmp / "own/a").iterdir():
        path.write_text("x = 1\n")
    with pytest.raises(DataError, match=r"code: a/\*: nothing to train on"):
        machine.build("out", data=data)


def test_wrong_parameters_name_their_key() -> None:
    base: dict[str, Any] = {**QUOTAS, **LIKENESS, "data": DataConfig(source="machine")}
    for change, message in (({"shell_mb": -1.0}, "shell_mb"), ({"near_duplicates": 0.0}, "near_duplicates")):
        with pytest.raises(ValueError, match=message):
            corpus.Params(**(base | change))


# --- parquet
# -----------------------------------------------------------------------------------------------------------


def part(path: Path, documents: list[Text]) -> dict[Path, ingest_selection.Size]:
    writer = PartWriter(path)
    for document in documents:
        writer.add(document)
    writer.close()
    return {path: writer.size}


def document(number: int, size: int, name: str) -> Text:
    return Text(text=f"{number} " + "x" * size, source=name, path=f"{name}/{number}", license="MIT")


def test_parts_are_spread_evenly_and_lose_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingest_selection, "FILE_BYTES", 20_000)
    monkeypatch.setattr(ingest_selection, "GROUP_BYTES", 3_000)
    a = [document(n, 400, "a") for n in range(200)]
    b = [document(n, 100, "b") for n in range(100)]
    train = part(tmp_path / "a.parquet", a) | part(tmp_path / "b.parquet", b)
    held = part(tmp_path / "c.parquet", [document(0, 10, "c")])
    files = ingest_selection.mix({"train": train, "val": held}, tmp_path / "out")
    read = rows(tmp_path / "out", "train")
    assert [r["path"] for r in read if r["source"] == "a"] == [d.path for d in a]
    assert [r["path"] for r in read if r["source"] == "b"] == [d.path for d in b]
    for upto in range(30, 300, 30):  # every prefix has the two in the right proportion
        assert abs(sum(r["source"] == "b" for r in read[:upto]) - upto / 3) <= 2
    assert len(files["train"]) == 5 and all(entry["bytes"] < 21_000 for entry in files["train"])


def test_a_corpus_without_val_gives_every_fiftieth_and_one_without_train_all_but_one(tmp_path: Path) -> None:
    documents = [document(n, 10, "a") for n in range(120)]
    ingest_selection.mix({"train": part(tmp_path / "t.parquet", documents), "val": {}}, tmp_path / "x")
    assert [r["path"] for r in rows(tmp_path / "x", "val")] == ["a/49", "a/99", "a/119"]
    ingest_selection.mix({"train": {}, "val": part(tmp_path / "v.parquet", documents)}, tmp_path / "y")
    assert [r["path"] for r in rows(tmp_path / "y", "val")] == ["a/119"]
    assert len(rows(tmp_path / "y", "train")) == 119
    with pytest.raises(DataError, match="at least two documents"):
        ingest_selection.mix({"train": part(tmp_path / "o.parquet", documents[:1]), "val": {}}, tmp_path / "z")


# --- slow
# --------------------------------------------------------------------------------------------------------------


def collect(folder: Path, num_bytes: int) -> None:
    """Send generated documents of 2 kB through selection, parts and mix."""
    selection = Selection(
        quotas={"own text": float("inf")},
        caps={},
        threshold=0.7,
        min_bytes=0,
        benchmarks=Index([]),
        folder=folder / "parts",
    )
    draw = random.Random(0)
    for number in range(num_bytes // 2000):
        text = "".join(draw.choices("abcdefghij \n", k=2000))
        selection.offer(
            Document(
                part="own text",
                split="val" if number % 50 == 0 else "train",
                num_bytes=2000,
                fingerprint=fingerprint(text),
                record=Text(text=text, source="s", path=str(number), license="own"),
                signature=signature(text),
            )
        )
    ingest_selection.mix(selection.close(), folder / "out")


def peak_mb(tmp_path: Path, num_mb: int) -> float:
    code = (
        "import sys; from pathlib import Path; import test_corpus as t; t.collect(Path(sys.argv[1]),"
        " int(sys.argv[2])); "
    )
    code += "print(t.resource.getrusage(t.resource.RUSAGE_SELF).ru_maxrss / 1e3)"
    folder = tmp_path / str(num_mb)
    folder.mkdir()
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    command = [sys.executable, "-c", code, str(folder), str(num_mb * 1_000_000)]
    return float(subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, check=True, capture_output=True).stdout)


@pytest.mark.slow
@pytest.mark.full
def test_memory_grows_by_hashes_and_not_by_texts(tmp_path: Path) -> None:
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > 0
    small, large = peak_mb(tmp_path, 10), peak_mb(tmp_path, 60)
    assert large - small < 0.7 * 50  # 25,000 more documents at 0.7 kB would be 18 MB; their texts are 50 MB


@pytest.mark.slow
@pytest.mark.full
def test_locale_and_hash_seed_change_no_byte(tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
from pipeline.ingest.sources import DataConfig
from tests.data_stages import LIKENESS, QUOTAS, FakeJob, corpus
if __name__ == "__main__":
    out = Path(sys.argv[1])
    params = corpus.Params(**QUOTAS, **LIKENESS, data=DataConfig(source="machine"))
    corpus.run(params, FakeJob(out / "work", 2), own=out, benchmarks=out / "none", text=out / "text", code=out / "code")
"""
    script = tmp_path / "script.py"
    script.write_text(code)
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    for name, variables in (
        ("a", {"LC_ALL": "C", "PYTHONHASHSEED": "1"}),
        ("b", {"LC_ALL": "C.UTF-8", "PYTHONUTF8": "1"}),
    ):
        (tmp_path / name).mkdir()
        environment = os.environ | {"PYTHONPATH": path} | variables
        command = [sys.executable, str(script), str(tmp_path / name)]
        subprocess.run(command, env=environment, cwd=ROOT, check=True, capture_output=True)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
