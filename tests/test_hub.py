"""Data sets of the hub: mappings, and fetching from a server that fails on demand.

Fetching runs in a child process because huggingface_hub reads HF_ENDPOINT on import; one child serves all tests except
the one that kills it. Those tests are slow: the child imports `datasets`, which takes seconds.
"""

import gzip
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from pipeline.ingest import conversations, hub, mixture, shapes
from pipeline.ingest.entries import FileEntry, HubEntry, HubSet, PackagesEntry
from pipeline.ingest.intake import RowCounts
from pipeline.ingest.own_files import Accepted
from pipeline.ingest.records import Dialogue, Pair, Problem, SourceRecord, Text
from pipeline.ingest.sources import DataConfig
from pipeline.run.errors import DataError
from tests.hubserver import REVISION, HubServer

ROOT = Path(__file__).parents[1]


def config(kind: str, *entries: HubSet, max_rejected: float = 0.0) -> DataConfig:
    return DataConfig(source="hub", hub={kind: list(entries)}, max_rejected=max_rejected)


def hub_yaml() -> DataConfig:
    written = yaml.safe_load((ROOT / "conf/data/hub.yaml").read_text())
    sets = {kind: [HubSet(**entry) for entry in entries] for kind, entries in written.pop("hub").items()}
    return DataConfig(**written, hub=sets)


def lay(parts: Path, kind: str, entry: HubSet, **splits: list[dict[str, Any]]) -> None:
    """Write parts as `fetch` leaves them, so that nothing is fetched."""
    folder = hub.folder_of(entry, kind, parts)
    for split, rows in splits.items():
        (folder / split).mkdir(parents=True, exist_ok=True)
        (folder / split / "num_parts.txt").write_text("1\n")
        pq.write_table(pa.table({"row": [json.dumps(row) for row in rows]}), folder / split / "part-0.parquet")
    (folder / "revision.txt").write_text(REVISION + "\n")


# --- mappings --------------------------------------------------------------------------------------------------------

QUESTION = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]
ULTRA = {"prompt": "Q", "chosen": QUESTION, "rejected": [QUESTION[0], {"role": "assistant", "content": "B"}]}
INFERENCES = [{"model_name": hub.MODELS[0], "completion": "def f(x):\n    return x", "pass_rate": 1.0}]
ROWS: dict[str, dict[str, Any]] = {
    "roneneldan/TinyStories": {"text": "Once."},
    "codeparrot/codeparrot-clean": {"content": "x = 1", "license": "gpl-3.0", "path": "a.py"},
    "bigcode/starcoderdata": {"content": "x = 1", "id": 3},
    "sahil2801/CodeAlpaca-20k": {"instruction": "I", "input": "", "output": "O"},
    "HuggingFaceH4/ultrachat_200k": {"prompt": "Q", "prompt_id": "p", "messages": QUESTION},
    "Team-ACE/ToolACE": {
        "system": 'Use:\n[{"name": "f g", "parameters": {"type": "dict", "properties": {}}}]',
        "conversations": [{"from": "user", "value": "Q"}, {"from": "assistant", "value": "[f g(a=1)]"}],
    },
    "glaiveai/glaive-function-calling-v2": {
        "system": 'SYSTEM: With functions -\n{"name": "f"}',
        "chat": 'USER: Q ASSISTANT: no\n\n\nASSISTANT: <functioncall> {"name": "f", "arguments": \'{"a": 1}\'}',
    },
    "Salesforce/xlam-function-calling-60k": {
        "id": 0,
        "query": "Q",
        "tools": '[{"name": "f", "parameters": {"a": {"type": "int"}}}]',
        "answers": '[{"name": "f", "arguments": {"a": 1}}]',
    },
    "HuggingFaceH4/ultrafeedback_binarized": ULTRA,
    "Anthropic/hh-rlhf": {"chosen": "\n\nHuman: Q\n\nAssistant: A", "rejected": "\n\nHuman: Q\n\nAssistant: B"},
    "TIGER-Lab/AceCode-87K": hub.reduce(
        {"id": "a1", "question": "Give x.", "test_cases": ["assert f(1) == 1"], "inferences": INFERENCES}
    ),
}
KIND_OF_RECORD = {"text": Text, "code": Text, "dialogues": Dialogue, "preferences": Pair, "problems": Problem}


def pairs_of(rows: Iterable[Accepted]) -> list[tuple[str, SourceRecord]]:
    return [(row.split, row.record) for row in rows]


def test_every_set_of_the_config_file_has_a_row_that_becomes_its_kind_of_record(tmp_path: Path) -> None:
    seen = set()
    for kind, entries in hub_yaml().hub.items():
        for written in entries:
            entry = HubSet(**{**asdict(written), "enabled": True})
            lay(tmp_path, kind, entry, **{split: [ROWS[entry.id]] for split in (entry.train, entry.val or entry.train)})
            found = pairs_of(hub.read_hub(config(kind, entry), kind, tmp_path))
            assert found and all(type(record) is KIND_OF_RECORD[kind] for _, record in found), entry.id
            seen.add(entry.id)
    assert seen == set(ROWS)


def test_gated_sets_are_off(tmp_path: Path) -> None:
    off = {entry.id for entries in hub_yaml().hub.values() for entry in entries if not entry.enabled}
    assert off == {"bigcode/starcoderdata", "Salesforce/xlam-function-calling-60k"}
    entry = HubSet(id="a/b", enabled=False)
    assert list(hub.read_hub(config("text", entry), "text", tmp_path)) == []


def test_splits_licenses_and_ids_come_from_the_entry(tmp_path: Path) -> None:
    entry = HubSet(id="a/b", train="tr", val="va", text_field="content", license_field="license", license="unknown")
    lay(tmp_path, "code", entry, tr=[{"content": "x", "license": "MIT", "id": 1}], va=[{"content": "y"}])
    found = pairs_of(hub.read_hub(config("code", entry), "code", tmp_path))
    assert found == [
        ("train", Text(text="x", source="a/b", path="a/b/1", license="MIT")),
        ("val", Text(text="y", source="a/b", path="a/b/va/part-0", license="unknown")),
    ]


def test_columns_of_a_set_are_joined_and_the_last_answers(tmp_path: Path) -> None:
    """CodeAlpaca's form: instruction, input, output."""
    entry = HubSet(id="a/b", shape="columns", text_field=["instruction", "input", "output"])
    row = {"instruction": "Add", "input": "1 2", "output": "3"}
    for kind in ("dialogues", "text"):
        lay(tmp_path / kind, kind, entry, train=[row])
    ((_, dialogue),) = pairs_of(hub.read_hub(config("dialogues", entry), "dialogues", tmp_path / "dialogues"))
    assert isinstance(dialogue, Dialogue)
    assert [message["content"] for message in dialogue.messages] == ["Add\n\n1 2", "3"]
    ((_, text),) = pairs_of(hub.read_hub(config("text", entry), "text", tmp_path / "text"))
    assert isinstance(text, Text) and text.text == "Add\n\n1 2\n\n3"


def test_ids_of_two_sets_never_meet(tmp_path: Path) -> None:
    entries = [HubSet(id=name, shape="question") for name in ("a/b", "a/c")]
    for entry in entries:
        lay(tmp_path, "dialogues", entry, train=[{"id": 1, "question": entry.id, "answer": "A"}])
    found = [row.record for row in hub.read_hub(config("dialogues", *entries), "dialogues", tmp_path)]
    assert [record.id for record in found if isinstance(record, Dialogue)] == ["a/b/1", "a/c/1"]


def test_a_set_is_an_entry_beside_files_and_packages(tmp_path: Path) -> None:
    entry = HubEntry(source="hub", id="a/b", shape="question", weight=3.0)
    lay(tmp_path / "parts/hub", "dialogues", entry, train=[{"question": f"Q{n}", "answer": "A"} for n in range(30)])
    (tmp_path / "own").mkdir()
    (tmp_path / "own/a.jsonl").write_text('{"prompt": "P", "completion": "C"}\n')
    entries = [FileEntry(files="*", weight=1.0), entry, PackagesEntry(source="packages", weight=1.0)]
    data = DataConfig(source="files", dialogues=list(entries), val_share=0.0, test_share=0.0)
    tallies: dict[str, RowCounts] = {}
    lots = mixture.read_lots("dialogues", Dialogue, data, tmp_path / "own", tmp_path / "parts", tallies)
    told = [(lot.name, lot.source, lot.weight, len(lot.splits["train"])) for lot in lots]
    assert told == [("*", "files", 1.0, 1), ("a/b", "hub", 3.0, 30), ("packages", "packages", 1.0, 0)]
    assert tallies["dialogues"].files.keys() == {"a.jsonl", "a/b/train/part-0"}
    assert tallies["dialogues"].totals["accepted"] == 31


def test_rows_that_break_are_rejected_by_place_and_too_many_fail(tmp_path: Path) -> None:
    entry = HubSet(id="a/b", shape="question")
    lay(tmp_path, "dialogues", entry, train=[{"question": f"Q{n}", "answer": "A" if n else ""} for n in range(10)])
    assert len(list(hub.read_hub(config("dialogues", entry, max_rejected=0.1), "dialogues", tmp_path))) == 9
    rejected = json.loads((hub.folder_of(entry, "dialogues", tmp_path) / "rejected.jsonl").read_text())
    assert (rejected["file"], rejected["line"], rejected["field"]) == ("a/b/train/part-0", 1, "answer")
    with pytest.raises(DataError, match="1 of 10 rows"):
        list(hub.read_hub(config("dialogues", entry), "dialogues", tmp_path))


def test_columns_that_no_shape_reads_are_named(tmp_path: Path) -> None:
    entry = HubSet(id="a/b")
    lay(tmp_path, "dialogues", entry, train=[{"utterances": []}])
    with pytest.raises(DataError, match="columns: utterances"):
        list(hub.read_hub(config("dialogues", entry), "dialogues", tmp_path))


def test_a_revision_is_forty_hex_digits(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="40 hex"):
        list(hub.read_hub(config("text", HubSet(id="a/b", revision="main")), "text", tmp_path))


def test_a_set_is_opened_as_its_entry_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=lambda _, **given: asked.update(given)))
    hub._open(HubSet(id="a/b", config="c", data_dir="folder"), "train", "f" * 40)
    assert (asked["name"], asked["data_dir"], asked["split"], asked["revision"]) == ("c", "folder", "train", "f" * 40)
    folders = {hub.folder_of(HubSet(id="a/b", data_dir=name), "text", tmp_path) for name in (None, "one", "two")}
    assert len(folders) == 3


# --- fetching --------------------------------------------------------------------------------------------------------

CHILD = """
import dataclasses, json, sys, time
from pathlib import Path
waits = []
time.sleep = waits.append  # the waits of every retry, theirs and ours
from pipeline.run.errors import DataError
from pipeline.ingest import hub
from pipeline.ingest.entries import HubSet
from pipeline.ingest.sources import DataConfig
for line in sys.stdin:
    kind, entry, parts = json.loads(line)
    config = DataConfig(source="hub", hub={kind: [HubSet(**entry)]}, max_rejected=0.0)
    waits.clear()
    try:
        rows = hub.read_hub(config, kind, Path(parts))
        found = [[row.split, dataclasses.asdict(row.record)] for row in rows]
        reply = {"found": found, "waits": len(waits)}
    except DataError as error:
        reply = {"error": str(error), "waits": len(waits)}
    print("REPLY" + json.dumps(reply), flush=True)
"""


class Child:
    """A process whose hub is `server`."""

    def __init__(self, server: HubServer, home: Path) -> None:
        settings = {
            "HF_ENDPOINT": server.url,
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HOME": str(home),
            "OMP_NUM_THREADS": "1",
        }
        self.process = subprocess.Popen(
            [sys.executable, "-c", CHILD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=ROOT,
            env={**{k: v for k, v in os.environ.items() if not k.startswith("HF_")}, **settings},
        )

    def ask(self, kind: str, entry: HubSet, parts: Path) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([kind, asdict(entry), str(parts)]) + "\n")
        self.process.stdin.flush()

    def read(self, kind: str, entry: HubSet, parts: Path) -> dict[str, Any]:
        self.ask(kind, entry, parts)
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("REPLY"):
                return json.loads(line.removeprefix("REPLY"))
        raise AssertionError("the child ended")

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture(scope="module")
def server() -> Iterator[HubServer]:
    server = HubServer()
    for name in ("me/stories", "me/broken", "me/held", "me/whole"):
        server.files[name] = stories()
    server.files["me/lines"] = {
        "folder/train.jsonl.gz": gzip.compress(
            b"".join(
                b'{"chosen": "\\n\\nHuman: %d\\n\\nAssistant: a", ' % n
                + b'"rejected": "\\n\\nHuman: %d\\n\\nAssistant: b"}\n' % n
                for n in range(30)
            ),
            mtime=0,
        ),
        "folder/test.jsonl.gz": gzip.compress(
            b'{"chosen": "\\n\\nHuman: t\\n\\nAssistant: a", "rejected": "\\n\\nHuman: t\\n\\nAssistant: b"}\n', mtime=0
        ),
    }
    yield server
    server.shutdown()
    server.server_close()


def stories() -> dict[str, bytes]:
    """Three files of training stories and one of held-out ones; about 300 kB each, so that a break falls amid rows."""
    generator = np.random.default_rng(0)
    files = {
        "README.md": (
            b"---\nconfigs:\n- config_name: default\n  data_files:\n  - {split: train, path: data/train-*}\n  - {split:"
            b" validation, path: data/validation-*}\n---\n"
        )
    }
    for name, size in (
        ("train-00000-of-00003", 40),
        ("train-00001-of-00003", 30),
        ("train-00002-of-00003", 20),
        ("validation-00000-of-00001", 3),
    ):
        buffer = io.BytesIO()
        texts = [f"{name} {n} " + generator.bytes(400).hex() for n in range(size)]
        pq.write_table(pa.table({"text": texts}), buffer)
        files[f"data/{name}.parquet"] = buffer.getvalue()
    return files


@pytest.fixture(scope="module")
def child(server: HubServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Child]:
    child = Child(server, tmp_path_factory.mktemp("home"))
    yield child
    child.close()


STORIES = HubSet(id="me/stories", val="validation", shape="text")


def parts_of(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
    }


@pytest.fixture(scope="module")
def whole(server: HubServer, child: Child, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What a fetch without faults leaves."""
    folder = tmp_path_factory.mktemp("whole")
    child.read("text", STORIES, folder)
    return parts_of(folder)


@pytest.mark.slow
@pytest.mark.full
def test_files_become_parts_in_their_order_and_the_revision_is_kept(
    server: HubServer, child: Child, tmp_path: Path
) -> None:
    reply = child.read("text", STORIES, tmp_path)
    assert [split for split, _ in reply["found"]] == ["train"] * 90 + ["val"] * 3
    assert [record["text"].split()[:2] for _, record in reply["found"][39:41]] == [
        ["train-00000-of-00003", "39"],
        ["train-00001-of-00003", "0"],
    ]
    folder = hub.folder_of(STORIES, "text", tmp_path)
    assert (folder / "revision.txt").read_text() == REVISION + "\n"
    assert sorted(path.name for path in (folder / "train").iterdir()) == [
        "num_parts.txt",
        "part-0.parquet",
        "part-1.parquet",
        "part-2.parquet",
    ]


@pytest.mark.slow
@pytest.mark.full
def test_finished_parts_are_read_without_the_network(server: HubServer, child: Child, tmp_path: Path) -> None:
    first = child.read("text", STORIES, tmp_path)
    server.gets.clear()
    files = server.files.pop("me/stories")
    try:
        assert child.read("text", STORIES, tmp_path) == first
    finally:
        server.files["me/stories"] = files
    assert server.gets == []


@pytest.mark.slow
@pytest.mark.full
def test_compressed_lines_in_folders_are_streamed(child: Child, tmp_path: Path) -> None:
    found = child.read("preferences", HubSet(id="me/lines", val="test", shape="pair"), tmp_path)["found"]
    assert [split for split, _ in found] == ["train"] * 30 + ["val"]
    assert found[4][1]["prompt"] == [{"role": "user", "content": "4"}]


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize("faults", [["break"], [500, 429, "break"], [None, "break", None, 503, 500]])
def test_a_server_that_fails_and_recovers_gives_equal_bytes(
    server: HubServer, child: Child, whole: dict[str, bytes], tmp_path: Path, faults: list[int | str | None]
) -> None:
    server.faults[:] = faults
    reply = child.read("text", STORIES, tmp_path)
    assert len(reply["found"]) == 93 and reply["waits"] >= 1 and not server.faults
    assert parts_of(tmp_path) == whole


@pytest.mark.slow
@pytest.mark.full
def test_a_server_that_stays_away_is_an_error_and_the_next_run_goes_on_with_the_missing_part(
    server: HubServer, child: Child, whole: dict[str, bytes], tmp_path: Path
) -> None:
    server.faults[:] = [None, None, None, *[500] * 200]  # the columns, and the first two parts
    reply = child.read("text", STORIES, tmp_path)
    server.faults.clear()
    assert "gave up after 5 retries" in reply["error"] and "rerun to resume" in reply["error"]
    folder = hub.folder_of(STORIES, "text", tmp_path) / "train"
    assert (folder / "part-1.parquet").exists() and not (folder / "part-2.parquet").exists()
    (folder / "part-2.parquet.tmp").write_bytes(b"half a part")
    server.gets.clear()
    assert len(child.read("text", STORIES, tmp_path)["found"]) == 93
    assert "data/train-00001-of-00003.parquet" not in server.gets
    assert parts_of(tmp_path) == whole


@pytest.mark.slow
@pytest.mark.full
def test_row_caps_end_in_the_middle_of_a_file_and_leave_the_rest_unread(
    server: HubServer, child: Child, tmp_path: Path
) -> None:
    server.gets.clear()
    reply = child.read("text", HubSet(id="me/stories", shape="text", max_rows=50), tmp_path)
    assert len(reply["found"]) == 50 and "data/train-00002-of-00003.parquet" not in server.gets


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (HubSet(id="me/nothing", shape="text"), "gated"),
        (HubSet(id="me/stories", train="trian", shape="text"), "trian"),
        (HubSet(id="me/stories", config="fr", shape="text"), "fr"),
        (HubSet(id="me/stories", revision="f" * 40, shape="text"), "gated|revision"),
    ],
)
def test_what_is_not_there_is_an_error_at_once(child: Child, tmp_path: Path, entry: HubSet, message: str) -> None:
    reply = child.read("text", entry, tmp_path)
    assert any(word in reply["error"] for word in message.split("|")) and reply["waits"] == 0


@pytest.mark.slow
@pytest.mark.full
def test_killed_and_resumed_gives_equal_bytes(server: HubServer, whole: dict[str, bytes], tmp_path: Path) -> None:
    first = Child(server, tmp_path / "home")
    server.faults[:] = [None, None, "hold"]
    first.ask("text", STORIES, tmp_path / "parts")
    assert server.holding.wait(60)
    first.process.send_signal(signal.SIGKILL)
    first.process.communicate()
    server.released.set()
    folder = hub.folder_of(STORIES, "text", tmp_path / "parts") / "train"
    assert (folder / "part-0.parquet").exists() and not (folder / "part-1.parquet").exists()
    second = Child(server, tmp_path / "home")
    assert len(second.read("text", STORIES, tmp_path / "parts")["found"]) == 93
    second.close()
    assert parts_of(tmp_path / "parts") == whole


def test_the_shapes_named_in_the_config_file_exist() -> None:
    for kind, entries in hub_yaml().hub.items():
        for entry in entries:
            assert entry.shape in ("auto", "acecode", *shapes.names(kind)), entry.id
    assert conversations.question("Q", "A") == QUESTION
