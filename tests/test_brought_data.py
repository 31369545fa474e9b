"""`data: files` and `data: hub` through the stages: rows of every shape and with every fault, a hub that breaks off,
and a kill.
"""

import csv
import gzip
import io
import json
import os
import shutil
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.synthetic import stories
from tests.graph import ROOT, Repository
from tests.hubserver import HubServer
from tests.ownfiles import BROKEN, GLAIVE, TOOLACE, XLAM

pytestmark = [pytest.mark.full, pytest.mark.slow, pytest.mark.timeout(1200)]

TALK = [{"role": "user", "content": "How many legs has a spider?"}, {"role": "assistant", "content": "Eight."}]
TOLD = [stories.story(f"stories/{family}/{n}") for n in range(1, 16) for family in stories.FAMILIES[:8]]
GOOD: dict[str, list[dict[str, Any]]] = {
    "dialogues/messages.jsonl": [{"messages": TALK}, {"messages": [{"role": "system", "content": "Be brief."}, *TALK]}],
    "dialogues/sharegpt.json": [
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello."}]}
    ],
    "dialogues/questions.jsonl": [{"question": "Two and two?", "answer": "Four."}, {"question": "One?", "answer": "1"}],
    "dialogues/val.jsonl": [{"messages": [{"role": "user", "content": f"Say {n}."}, TALK[1]]} for n in range(4)],
    "dialogues/alpaca.csv": [{"instruction": "Add.", "input": "1 and 2", "output": "3"}],
    "dialogues/xlam.jsonl": [XLAM],
    "dialogues/glaive.jsonl": [GLAIVE],
    "dialogues/toolace.parquet": [TOOLACE],
    "problems/problems.jsonl": [
        {
            "question": "Write f that adds one.",
            "entry_point": "f",
            "answer": "def f(x):\n    return x + 1",
            "tests": [{"args": f"[{n}]", "expected": str(n + 1)} for n in range(4)],
        },
        {"question": "Write g that doubles.", "tests": ["assert g(2) == 4", "assert g(0) == 0"]},
    ],
    "preferences/pairs.jsonl": [
        {"prompt": "Say hello.", "chosen": "Hello!", "rejected": "No."},
        {"prompt": TALK[:1], "chosen": [TALK[1]], "rejected": [{"role": "assistant", "content": "Six."}]},
    ],
}


def write_table(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write the rows in the format that the suffix names."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def fill(own: Path) -> Counter[str]:
    """Write good rows in every format and shape, and each fault once; return how many rows of each kind are broken."""
    third = len(TOLD) // 3
    write_table(own / "text/told.jsonl", [{"text": text} for text in TOLD[:third]])
    write_table(own / "text/more.csv", [{"text": text} for text in TOLD[third : 2 * third]])
    write_table(own / "text/most.parquet", [{"text": text} for text in TOLD[2 * third :]])
    (own / "text/wide.txt").write_text(stories.story("stories/gift/77"), encoding="utf-16")
    (own / "text/val.txt").write_text("\n\n".join(stories.story(f"stories/gift/{n}") for n in range(50, 60)))
    (own / "text/empty.jsonl").write_text("")
    (own / "text/damaged.parquet").write_bytes((own / "text/most.parquet").read_bytes()[:500])
    with (own / "text/told.jsonl").open("ab") as file:
        file.write(b'{"text": "cut off\n[1, 2]\n{"text": "\xff\xfe"}\n')
        file.write(json.dumps({"text": TOLD[0]}).encode() + b"\n")  # a duplicate
    with (own / "text/more.csv").open("a") as file:
        file.write("one,two,three\n")
    shutil.copytree(ROOT / "pipeline", own / "code/project", ignore=shutil.ignore_patterns("__pycache__"))
    (own / "code/project/logo.bin").write_bytes(bytes(range(256)))
    (own / "code/val.py").write_text((ROOT / "stages/tasks.py").read_text())
    for name, rows in GOOD.items():
        write_table(own / name, rows)
    broken = Counter({"text": 5})
    for kind in ("text", "dialogues", "problems", "preferences"):
        bad = [row for one, row, _ in BROKEN if one == kind]
        if kind == "problems":  # most rows decide a table's shape, so the bad ones join the good ones
            with (own / "problems/problems.jsonl").open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in bad)
        elif kind == "preferences":
            with (own / "preferences/pairs.jsonl").open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in bad)
        else:
            for number, row in enumerate(bad):
                with (own / kind / ("told.jsonl" if kind == "text" else f"broken-{number:02d}.jsonl")).open(
                    "a"
                ) as file:
                    file.write(json.dumps(row) + "\n")
        broken[kind] += len(bad)
    return broken


def kept_books(folder: Path) -> list[dict[str, Any]]:
    """The rows of a `rejected.jsonl`."""
    return [json.loads(line) for line in (folder / "rejected.jsonl").read_text().splitlines()]


def test_own_files_of_every_shape_with_every_fault_go_through_the_graph(tmp_path: Path) -> None:
    repository = Repository.copy_of_ours(tmp_path / "repository")
    broken = fill(repository.folder / "data/own")
    repository.edit("params.yaml", "data: packages", "data: files")
    refused = repository.dvc("repro", "stage_corpus", check=False)
    assert "max_rejected" in refused and "told.jsonl:" in refused
    assert not (repository.folder / "data/raw/text").exists()

    repository.edit("conf/data/files.yaml", "max_rejected: 0.01", "max_rejected: 0.95")
    for stage in ("language", "code", "tools"):
        repository.edit("params.yaml", f"{stage}:\n", f"{stage}:\n  tokens_per_step: 256\n  context: 256\n")
        repository.edit("params.yaml", "steps:\n", "steps: 4\n")
    repository.dvc("repro", "stage_tools")

    raw = repository.folder / "data/raw"
    for kind in ("text", "code"):
        manifest = json.loads((raw / kind / "manifest.json").read_text())
        rows = manifest["rows"]
        assert rows["accepted"] > 30 and manifest["documents"]["train"] > 30 and manifest["documents"]["val"] > 0, kind
        if kind == "text":
            assert rows["duplicates"] == 1 and rows["rejected"] == broken["text"]
            assert len(kept_books(raw / kind)) == rows["rejected"]
            assert all(row["reason"] and row["file"] for row in kept_books(raw / kind))
    report = json.loads((repository.folder / "metrics/tasks.json").read_text())
    for kind, folder in (("dialogues", "dialogues"), ("problems", "problems"), ("preferences", "preferences")):
        rows = report["rows"][kind]
        assert rows["rejected"] == broken[kind] == len(kept_books(repository.folder / "data" / folder)), kind
        good = sum(len(table) for name, table in GOOD.items() if name.startswith(kind))
        assert rows["accepted"] == good, kind
    assert (repository.folder / "models/tools/model.safetensors").is_file()


def hub_files() -> dict[str, dict[str, bytes]]:
    """Four small data sets, in parquet and in compressed lines."""
    card = (
        b"---\nconfigs:\n- config_name: default\n  data_files:\n  - {split: train, path: data/train-*}\n  - {split:"
        b" test, path: data/test-*}\n---\n"
    )

    def parquet(rows: list[dict[str, Any]]) -> bytes:
        buffer = io.BytesIO()
        pq.write_table(pa.Table.from_pylist(rows), buffer)
        return buffer.getvalue()

    sources = [path.read_text() for path in sorted((ROOT / "pipeline").rglob("*.py")) if path.stat().st_size > 500]
    told = [{"text": text} for text in TOLD]
    lines = "".join(json.dumps({"prompt": f"Say {n}.", "chosen": f"{n}!", "rejected": "No."}) + "\n" for n in range(40))
    talks = [{"messages": [{"role": "user", "content": f"Count to {n}."}, TALK[1]]} for n in range(40)]
    return {
        "me/told": {
            "README.md": card,
            "data/train-0.parquet": parquet(told[:50]),
            "data/train-1.parquet": parquet(told[50:110]),
            "data/test-0.parquet": parquet(told[110:]),
        },
        "me/code": {
            "README.md": card,
            "data/train-0.parquet": parquet([{"text": s} for s in sources[5:]]),
            "data/test-0.parquet": parquet([{"text": s} for s in sources[:5]]),
        },
        "me/talks": {
            "README.md": card,
            "data/train-0.parquet": parquet(talks[:30]),
            "data/test-0.parquet": parquet(talks[30:]),
        },
        "me/pairs": {"train.jsonl.gz": gzip.compress(lines.encode(), mtime=0)},
    }


HUB = """source: hub
licenses: any
min_bytes: 200
max_bytes: 1000000
max_rejected: 0.05
hub:
  text: [{id: me/told, val: test, shape: text, license: MIT}]
  code: [{id: me/code, val: test, shape: text, license: MIT}]
  dialogues: [{id: me/talks, val: test, shape: messages, license: MIT}]
  preferences: [{id: me/pairs, shape: pair, license: MIT}]
"""


def contents(folder: Path) -> dict[str, bytes]:
    """The bytes of every file under a folder."""
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_a_hub_that_breaks_off_and_a_kill_cost_no_row_of_the_stages(tmp_path: Path) -> None:
    server = HubServer()
    server.files.update(hub_files())
    try:
        repository = Repository.copy_of_ours(tmp_path / "repository")
        (repository.folder / "conf/data/hub.yaml").write_text(HUB)
        repository.edit("params.yaml", "data: packages", "data: hub")
        home = {"HF_ENDPOINT": server.url, "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(tmp_path / "home")}
        corpus = ("python", "-m", "stages.corpus")
        repository.run(*corpus, check=True, **home)
        whole = contents(repository.folder / "data/raw")
        assert any(name.startswith("text/val") for name in whole) and any(name.startswith("code/val") for name in whole)

        work = {"STAGECOACH_WORK": str(tmp_path / "work")}
        server.faults[:] = ["break", None, "hold"]
        process = repository.start(*corpus, **home, **work)
        assert server.holding.wait(120)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        server.released.set()
        server.gets.clear()
        repository.run(*corpus, check=True, **home, **work)
        assert contents(repository.folder / "data/raw") == whole
        assert server.gets, "the second run had nothing left to fetch: the kill came too late to say anything"

        repository.run("python", "-m", "stages.tasks", check=True, **home)
        report = json.loads((repository.folder / "metrics/tasks.json").read_text())
        assert report["rows"]["dialogues"]["accepted"] == report["rows"]["preferences"]["accepted"] == 40
        for encoded in ("tokenizer", "encode"):
            for item in ["text", "code"] if encoded == "encode" else [""]:
                repository.run("python", "-m", f"stages.{encoded}", *filter(None, [item]))
        assert (
            json.loads((repository.folder / "data/tokens/text/meta.json").read_text())["splits"]["train"]["tokens"]
            > 9999
        )
    finally:
        server.shutdown()
        server.server_close()
