"""A repository's files as documents: parts, context worked out by hand in examples, splits, and token shards."""

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.batches.corpus import CorpusStream, FillInMiddle
from pipeline.ingest.entries import RepositoryEntry
from pipeline.ingest.records import Text
from pipeline.ingest.repository import Repository, SourceFile, read
from pipeline.ingest.repository_documents import Library, documents, parts_of
from pipeline.ingest.sources import DataConfig
from pipeline.run.errors import DataError, ModelError
from pipeline.text import repositories
from pipeline.text.repositories import Context
from pipeline.text.tokenizer import Tokenizer
from stages import encode
from stages import tokenizer as stage_tokenizer
from tests.data_stages import Machine, manifest, rows, source
from tests.data_stages import planted_machine as planted_machine

SHAPES = {
    "shop/__init__.py": "",
    "shop/money.py": (
        "class Money:\n    cents: int\n\n"
        "    def plus(self, other):\n        return Money(self.cents + other.cents)\n\n\n"
        "def euros(amount):\n    return Money(amount * 100)\n"
    ),
    "shop/api.py": "from shop.money import euros as of_euros, Money\n",
    "shop/cart.py": (
        "import json\nfrom . import stock\nfrom .api import of_euros\n\n\n"
        "def total(items):\n    return of_euros(len(items))\n\n\ndef left(item):\n    return stock.count(item)\n"
    ),
    "shop/stock.py": "LIMIT = 9\n\n\ndef count(item):\n    return LIMIT - len(item)\n",
}


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")


def found_of(files: dict[str, str]) -> Repository:
    return Repository("mine", Path(), tuple(SourceFile(path, text) for path, text in sorted(files.items())), ())


def texts_of(files: dict[str, str]) -> dict[str, Text]:
    return {path: Text(text=text, source="mine", path=path, license="own") for path, text in files.items() if text}


def library(files: dict[str, str]) -> Library:
    return Library(found_of(files), texts_of(files))


def contexts_of(files: dict[str, str], most: int, held_out: tuple[str, ...] = ()) -> dict[str, tuple[str, Context]]:
    kept = {"train": {}, "val": {}}
    for path, text in texts_of(files).items():
        kept["val" if path in held_out else "train"][path] = text
    made = documents(found_of(files), kept, most)
    return {text.path: (split, Context.from_json(text.context)) for split, text in made}


# --- context ---------------------------------------------------------------------------------------------------------


def test_a_name_is_followed_through_the_files_that_pass_it_on() -> None:
    names = library(SHAPES).imported("shop/cart.py")
    assert {written: (name.path, name.name) for written, name in names.items()} == {
        "of_euros": ("shop/money.py", "euros"),
        "stock.LIMIT": ("shop/stock.py", "LIMIT"),
        "stock.count": ("shop/stock.py", "count"),
    }


def test_with_room_a_file_stands_after_all_that_it_imports_whole_and_in_order() -> None:
    _, context = contexts_of(SHAPES, 4000)["shop/cart.py"]
    paths = ["shop/money.py", "shop/api.py", "shop/stock.py"]
    assert context == Context(
        "mine", tuple((path, SHAPES[path]) for path in sorted(paths, key=paths.index)), "shop/cart.py"
    )


def test_with_little_room_the_names_that_the_part_uses_come_first_as_outlines() -> None:
    cart = SHAPES["shop/cart.py"]
    files = SHAPES | {"shop/cart.py": cart.partition("\n\n\ndef left")[0] + "\n"}  # does not use stock
    shown = library(files).context("shop/cart.py", 35, frozenset(files), frozenset({"of_euros"}))
    assert shown.files == (("shop/money.py", "def euros(amount):\n"),)
    other = library(SHAPES).context("shop/cart.py", 35, frozenset(files), frozenset({"stock.count"}))
    assert other.files == (("shop/stock.py", "def count(item):\n"),)


def test_training_reads_first_what_a_part_uses_and_a_held_out_part_what_was_not_used_before_it() -> None:
    """The last part of cart.py uses stock.count, and an earlier part uses of_euros."""
    files = contexts_of(SHAPES, 150)["shop/cart.py#3"][1].files
    assert dict(files)["shop/stock.py"] == "def count(item):\n"  # of the two names, only the one that is used
    _, context = contexts_of(SHAPES, 150, held_out=("shop/cart.py",))["shop/cart.py#3"]
    assert dict(context.files) == {"shop/stock.py": "LIMIT = 9\ndef count(item):\n"}  # of_euros was used before
    assert context.names == ("stock.count",)


def test_an_outline_of_a_class_has_its_fields_and_the_heads_of_its_methods() -> None:
    assert library(SHAPES).defined("shop/money.py")["Money"].outline == (
        "class Money:\n    cents: int\n    def plus(self, other):\n"
    )


def test_training_never_reads_what_is_held_out_and_the_held_out_may_read_training() -> None:
    made = contexts_of(SHAPES, 4000, held_out=("shop/money.py",))
    assert made["shop/money.py"][0] == "val"
    assert "shop/money.py" not in dict(made["shop/cart.py"][1].files)
    other = contexts_of(SHAPES, 4000, held_out=("shop/cart.py",))
    assert "shop/money.py" in dict(other["shop/cart.py"][1].files)


def test_a_held_out_part_s_context_does_not_depend_on_the_part() -> None:
    changed = SHAPES | {"shop/cart.py": SHAPES["shop/cart.py"].replace("stock.count", "stock.LIMIT")}
    one, two = (contexts_of(files, 420, held_out=("shop/cart.py",))["shop/cart.py"][1] for files in (SHAPES, changed))
    assert one.files == two.files and one.files


def test_a_file_that_does_not_parse_and_star_imports_in_a_circle_end() -> None:
    files = {
        "a.py": "from b import *\nx = 1\n",
        "b.py": "from a import *\ny = 2\n",
        "c.py": "def (:\n",
        "d.py": "import c\n",
    }
    assert {written: name.path for written, name in library(files).imported("a.py").items()} == {"y": "b.py"}
    assert [text.path for _, text in documents(found_of(files), {"train": texts_of(files), "val": {}}, 400)]


# --- parts -----------------------------------------------------------------------------------------------------------

FILES = st.lists(
    st.sampled_from(
        [
            "x = 1\n",
            "def f():\n    return 1\n",
            "\n",
            "# a\n",
            "class C:\n    a = 1\n\n    def m(self):\n        pass\n",
            "\x0c\n",
            "é = '\u2028'\n",
        ]
    ),
    max_size=30,
).map("".join)


@given(FILES, st.integers(8, 120))
def test_parts_join_to_the_file(text: str, most: int) -> None:
    made = list(documents(found_of({"a.py": text}), {"train": texts_of({"a.py": text}), "val": {}}, 2 * most))
    assert "".join(part.text for _, part in made) == text
    assert len({part.path for _, part in made}) == len(made)
    longest = max((len(line.encode()) for line in text.split("\n")), default=0) + 1
    assert all(len(part.text.encode()) <= max(most, longest) for _, part in made)


def test_a_file_is_cut_before_a_statement_with_its_comment_and_decorator() -> None:
    text = "import os\n\n\ndef first():\n    return os\n\n\n# of the second\n@cached\ndef second():\n    return 2\n"
    assert parts_of(text, 80) == [(0, 7), (7, 11)]
    assert parts_of(text, len(text)) == [(0, 11)]


def test_a_long_class_is_cut_between_its_methods() -> None:
    text = "class C:\n" + "".join(f"    def m{n}(self):\n        return {n}\n\n" for n in range(4))
    assert parts_of(text, 90) == [(0, 7), (7, 13)]


# --- format ----------------------------------------------------------------------------------------------------------


def test_a_context_is_written_as_qwen_coder_reads_it_and_no_text_spells_its_tokens() -> None:
    tokenizer = Tokenizer.train(iter(["def f(x): return x\n" * 9]), 320, repositories=True)
    context = Context("mine", (("a.py", "x = '<|file_sep|>'\n"),), "b.py", "import a\n")
    assert Context.from_json(context.to_json()) == context
    (ids,) = repositories.encode(tokenizer, [context])
    assert tokenizer.decode(ids, skip_special=False) == (
        "<|repo_name|>mine\n<|file_sep|>a.py\nx = '<|file_sep|>'\n<|file_sep|>b.py\nimport a\n"
    )
    assert ids.count(tokenizer.file_sep) == 2 and ids[0] == tokenizer.repo_name
    assert (tokenizer.repo_name, tokenizer.file_sep) == (15, 16)


def test_a_tokenizer_without_the_tokens_is_refused_with_what_to_do(byte_tokenizer: Tokenizer) -> None:
    with pytest.raises(ModelError, match="has no control tokens for repositories"):
        repositories.encode(byte_tokenizer, [Context("mine", (), "a.py")])


# --- the stages ------------------------------------------------------------------------------------------------------


def scratch(own: Path, name: str, seed: int) -> None:
    files = {f"{name}/{folder}/__init__.py": "" for folder in "abc"} | {f"{name}/__init__.py": ""}
    for place, folder in enumerate("abc"):
        files[f"{name}/{folder}/base.py"] = source(seed + 10 * place, 6)
        first = files[f"{name}/{folder}/base.py"].split("(")[0].removeprefix("def ")
        files[f"{name}/{folder}/use.py"] = (
            f"from {name}.{folder}.base import {first}\n\n\n"
            + source(seed + 10 * place + 1, 5)
            + f"\n\nlast = {first}(1, 2)\n"
        )
    write(own / name, files)


def config(*entries: Any) -> DataConfig:
    return DataConfig(source="files", code=list(entries), val_share=0.2)


def encoded(out: Path, tokenizer: Tokenizer) -> Path:
    tokenizer.save(out / "tokenizer")
    job: Any = SimpleNamespace(folder=out / "work", workers=1, report=lambda **numbers: None)
    encode.run(encode.Params(), job, tokenizer=out / "tokenizer", corpus=out / "code", out=out / "tokens")
    return out / "tokens"


def test_a_repository_goes_through_the_corpus_to_rows_that_are_trained_on_once(machine: Machine) -> None:
    scratch(machine.tmp / "own", "mine", 500)
    write(
        machine.tmp / "own" / "mine", {"mine/a/broken.py": source(7) + "print 1\n", "mine/c/huge.py": "#" * 2_000_000}
    )
    out = machine.build("out", data=config(RepositoryEntry(repository="mine")), document_bytes=1200)
    made = rows(out / "code")
    kept = read(machine.tmp / "own" / "mine", 10**6).files
    for file in kept:
        parts = sorted(
            (row for row in made if row["path"].split("#")[0] == file.path),
            key=lambda row: int(row["path"].partition("#")[2] or 1),
        )
        expected = "" if "broken" in file.path or not file.text else file.text
        assert "".join(row["text"] for row in parts) == expected
    folders = {split: {row["path"].split("/")[1] for row in rows(out / "code", split)} for split in ("train", "val")}
    assert folders["train"] | folders["val"] == set("abc") and not folders["train"] & folders["val"] and folders["val"]
    used = [Context.from_json(row["context"]) for row in made if "use.py" in row["path"]]
    assert all(any("base.py" in path for path, _ in context.files) for context in used)
    assert manifest(out, "code")["dropped"] == {"syntax": {"files": 1, "bytes": len(source(7)) + 8}}
    assert [json.loads(line)["reason"] for line in (out / "code/rejected.jsonl").read_text().splitlines()] == [
        *["is blank"] * 4,
        "size",
    ]

    params = stage_tokenizer.Params(vocab_size=640, sample_mb=1.0, text_share=0.0, base="scratch")
    tokenizer = stage_tokenizer.learnt(params, out / "text", out / "code")
    assert tokenizer.repo_name is not None and tokenizer.vocab_size == 640
    tokens = encoded(out, tokenizer)
    stream = CorpusStream(tokens, tokenizer, context=512, tokens_per_step=512, seed=1, cache=out / "cache")
    batch = stream.batch(0, 512, stream.at(np.arange(stream.rows_per_epoch), 512))
    trained = batch.targets[batch.targets >= 0].tolist()
    texts = [row["text"] for row in rows(out / "code", "train")]
    assert len(trained) == sum(len(tokenizer.encode(text)) + 1 for text in texts)
    assert tokenizer.file_sep in batch.input_ids and tokenizer.file_sep not in trained


def test_infilling_leaves_the_context_before_the_prefix_and_the_bytes_as_they_are(machine: Machine) -> None:
    scratch(machine.tmp / "own", "mine", 500)
    out = machine.build("out", data=config(RepositoryEntry(repository="mine")), document_bytes=800)
    texts = [row["text"] for row in rows(out / "code", "train")]
    tokenizer = Tokenizer.train(iter(texts), 1024, repositories=True)
    tokens = encoded(out, tokenizer)
    stream = CorpusStream(
        tokens, tokenizer, context=512, tokens_per_step=512, seed=1, fim=FillInMiddle(1.0), cache=out / "cache"
    )
    batch = stream.batch(0, 512, stream.at(np.arange(stream.rows_per_epoch), 512))
    found, infilled = [], 0
    for ids, documents_, targets in zip(
        batch.input_ids.tolist(), batch.documents.tolist(), batch.targets.tolist(), strict=True
    ):
        for _, group in itertools.groupby(zip(documents_, ids, targets, strict=True), key=lambda entry: entry[0]):
            members = list(group)
            if members[0][0] < 0 or tokenizer.fim_prefix not in [id_ for _, id_, _ in members]:
                continue
            infilled += 1
            own = [id_ for _, id_, _ in members]
            start = own.index(tokenizer.fim_prefix)
            assert tokenizer.repo_name in own[:start] or tokenizer.file_sep in own[:start]
            assert all(target == -100 for _, _, target in members[: start - 1]) and members[start - 1][2] == own[start]
            body = own[start + 1 :]
            suffix_at, middle_at = body.index(tokenizer.fim_suffix), body.index(tokenizer.fim_middle)
            parts = body[:suffix_at], body[suffix_at + 1 : middle_at], body[middle_at + 1 :]
            found.append("".join(tokenizer.decode(part) for part in (parts[0], parts[2], parts[1])))
    assert infilled > len(texts) / 2 and set(found) <= set(texts)


@pytest.mark.parametrize(
    "entries", [[RepositoryEntry(repository="flat")], [RepositoryEntry(repository="flat", held_out=[])]]
)
def test_a_repository_without_a_second_folder_needs_something_held_out(machine: Machine, entries: list[Any]) -> None:
    write(machine.tmp / "own" / "flat", {f"f{n}.py": source(600 + n) for n in range(3)})
    with pytest.raises(DataError, match="nothing is held out"):
        machine.build("out", data=config(*entries))
    scratch(machine.tmp / "own", "other", 700)
    second = RepositoryEntry(repository="other", held_out=["."])
    made = rows(machine.build("two", data=config(*entries, second)) / "code", "val")
    assert {row["source"] for row in made} == {"other"}


def test_near_duplicates_across_repositories_leave_and_weights_draw_documents(machine: Machine) -> None:
    scratch(machine.tmp / "own", "mine", 500)
    scratch(machine.tmp / "own", "copy", 500)
    write(machine.tmp / "own" / "copy", {"copy/d/new.py": source(900), "copy/e/new.py": source(901)})
    entries = [RepositoryEntry(repository=name, weight=weight) for name, weight in (("mine", 3.0), ("copy", 1.0))]
    out = machine.build("out", data=config(*entries))
    dropped = manifest(out, "code")["dropped"]
    assert dropped["near duplicate"]["files"] + dropped["duplicate"]["files"] == 6
    bytes_of = {
        name: sum(len(row["text"]) for row in rows(out / "code", "train") if row["source"] == name)
        for name in ("mine", "copy")
    }
    assert 0.6 < bytes_of["mine"] / sum(bytes_of.values()) < 0.9


def test_without_a_repository_a_corpus_has_no_column_of_contexts(machine: Machine) -> None:
    write(machine.tmp / "own" / "code", {f"f{n}.py": source(n) for n in range(3)})
    out = machine.build("out", data=config("code/*"))
    assert all(set(row) == {"text", "source", "path", "license"} for row in rows(out / "code"))
    assert not (encoded(out, Tokenizer.train(iter([source(1)]), 320)) / "train.ctx").exists()
