"""Stage corpus: collect, clean, deduplicate, decontaminate, split.

    the source named by `data` + data/own + data/benchmarks -> data/raw/{text,code}

`data=packages` gives text (stories, drills and transcripts from generators; prose from READMEs and docstrings) and code
(Python, generated functions), each until its quota is met, the same bytes on every machine; `machine` takes what is
installed and shell scripts too; `files` and `hub` give all that they hold. Worker processes read and clean batches;
this process takes the results in order (`ingest/selection.py`), so the corpus is the same for any number of workers,
any locale and any hash seed, on machines with the same packages.

Held out: packages by blake2b(name) mod 20, generated files by blake2b(path) mod 50, stories by number mod 50 and three
families, of which only every tenth number is told; the user's files and the hub as their readers say.
"""

import itertools
import math
import platform
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.ingest import hub, own_files, sources
from pipeline.ingest import packages as ingest_packages
from pipeline.ingest import selection as ingest_selection
from pipeline.ingest.cleaning import Document, made_record
from pipeline.ingest.duplicates import Index, benchmark_files, benchmark_items
from pipeline.ingest.records import Text
from pipeline.ingest.selection import FileBatch, RecordBatch, Selection
from pipeline.run.config import group, main
from pipeline.run.device import stable_hash
from pipeline.run.processes import pool_map
from pipeline.run.tracking import progress, write_json
from pipeline.run.workdir import Job, sha256
from pipeline.synthetic import drills, programs, stories, tools

PARTS = {
    "text": ("prose", "stories", "drills", "transcripts"),
    "code": ("python", "shell", "generated"),
}  # of data=packages and data=machine
HARVESTED = ("prose", "python", "shell")  # by package; a generator has no package that could take over
# numbers of each story family, of drills and transcripts, bytes of generated code
BATCH_NUMBERS, BATCH_RECORDS, BATCH_CODE_BYTES = 10, {"drills": 200, "transcripts": 40}, 60_000
WRITERS = {"drills": drills, "transcripts": tools}
WRITTEN_HELD_OUT_EVERY = 50  # drills and transcripts whose number this divides are validation data
HELD_OUT_EVERY = 10  # of the numbers of a held-out story family: enough to measure with, little of the quota
GENERATED_VAL = 50  # one generated file in so many is held out


@dataclass(frozen=True, kw_only=True)
class Params:
    """Block `corpus` of params.yaml, and the files of conf/data/."""

    stories_mb: float
    """packages, machine: 10^6 bytes kept of generated stories, train and val together; the next six likewise."""
    prose_mb: float
    """Of English from READMEs and docstrings."""
    drills_mb: float
    """Of exercises in copying."""
    transcripts_mb: float
    """Of tool conversations as text."""
    python_mb: float
    """Of Python from packages (machine: and from the standard library)."""
    shell_mb: float
    """machine: of shell scripts."""
    generated_mb: float
    """Of generated functions."""
    cap_mb: float
    """packages, machine: at most so much of one package in each of these."""
    near_duplicates: float
    """Estimated Jaccard similarity from which the later document is dropped."""
    data: sources.DataConfig = group("data")

    def __post_init__(self) -> None:
        """Refuse sizes and a similarity that cannot be."""
        for name in ("stories_mb", "prose_mb", "drills_mb", "transcripts_mb", "python_mb", "shell_mb", "generated_mb"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: expected 0 or more, got {getattr(self, name)}")
        if self.cap_mb <= 0 or not 0 < self.near_duplicates <= 1:
            raise ValueError(
                f"cap_mb, near_duplicates: expected more than 0 (and at most 1 for the second), "
                f"got {self.cap_mb}, {self.near_duplicates}"
            )


@dataclass(frozen=True)
class StoryBatch:
    """Stories to tell: these numbers of every family."""

    numbers: range


@dataclass(frozen=True)
class WrittenBatch:
    """Drills or transcripts to write: these numbers, from this seed."""

    part: str
    numbers: range
    seed: int


@dataclass(frozen=True)
class CodeBatch:
    """Functions to generate: about this much, from this seed."""

    num_bytes: int
    seed: int


Batch = FileBatch | RecordBatch | StoryBatch | WrittenBatch | CodeBatch


def run(params: Params, job: Job, *, own: Path, benchmarks: Path, text: Path, code: Path) -> None:
    """Build both corpora; raises DataError for files that cannot be read and for a corpus with nothing in it."""
    parts = job.folder / "parts"
    shutil.rmtree(parts / "kept", ignore_errors=True)  # what a killed run fetched from the hub stays
    index = Index(benchmark_items(benchmarks))
    corpora = {name: _selection(name, params, index, parts / "kept" / name) for name in PARTS}
    versions = {} if params.data.source == "packages" else {"python": platform.python_version()}
    rows: dict[str, dict[str, int]] = {name: {} for name in PARTS}  # of data=files and data=hub
    if params.data.source in sources.HARVESTS:
        batches = _harvest(params, job.seed, corpora, versions)
    else:
        batches = _brought(params.data, own, parts, versions, rows)
    taker = {part: selection for selection in corpora.values() for part in selection.quotas}
    wanted = sum(quota for selection in corpora.values() for quota in selection.quotas.values())
    with progress(total=None if math.isinf(wanted) else wanted, desc="corpus", unit="B") as bar:
        for document in itertools.chain.from_iterable(pool_map(prepare, batches, job.workers)):
            bar.update(taker[document.part].offer(document))
    for name, out in (("text", text), ("code", code)):
        manifest = _finish(name, corpora[name], out) | {"data": params.data.source, "versions": versions}
        if params.data.source not in sources.HARVESTS:
            manifest["rows"] = rows[name]
            _keep_rejected(params.data, name, parts, out)
        manifest["benchmarks"] = {
            "items": len(index),
            "files": {path.relative_to(benchmarks).as_posix(): sha256(path) for path in benchmark_files(benchmarks)},
        }
        write_json(out / "manifest.json", manifest)
        job.report(**{name: {key: manifest[key] for key in ("documents", "bytes", "dropped")}})
    shutil.rmtree(parts)


def prepare(batch: Batch) -> list[Document]:
    """What a worker process does with a batch."""
    if isinstance(batch, StoryBatch):
        return [_told(path) for path in _story_paths(batch.numbers)]
    if isinstance(batch, WrittenBatch):
        maker = WRITERS[batch.part]
        return [
            made_record(maker.record(batch.seed, n), batch.part, "train" if n % WRITTEN_HELD_OUT_EVERY else "val")
            for n in batch.numbers
        ]
    if isinstance(batch, CodeBatch):
        written = programs.sources(batch.num_bytes, batch.seed)
        return [made_record(record, "generated", sources.split_of(record.path, GENERATED_VAL)) for record in written]
    return ingest_selection.clean(batch)


def _story_paths(numbers: range) -> list[str]:
    """The stories of these numbers, family by turns; of the held-out families every tenth only."""
    return [
        f"stories/{family}/{number}"
        for number in numbers
        for family in stories.FAMILIES
        if family not in stories.HELD_OUT or number % HELD_OUT_EVERY == 0
    ]


def _told(path: str) -> Document:
    family = path.split("/")[1]
    record = Text(text=stories.story(path), source=family, path=path, licence=stories.LICENCE)
    return made_record(record, "stories", "val" if stories.is_held_out(path) else "train")


def _selection(name: str, params: Params, index: Index, folder: Path) -> Selection:
    """An empty corpus: what it takes, and from when on it takes no more."""
    quotas = {f"own {name}": math.inf}
    if params.data.source in sources.HARVESTS:
        quotas = {part: getattr(params, f"{part}_mb") * 1e6 for part in PARTS[name]}
    if params.data.source == "packages":
        quotas.pop("shell", None)  # no package of the lock holds any
    return Selection(
        quotas=quotas,
        caps=dict.fromkeys(HARVESTED, params.cap_mb * 1e6),
        threshold=params.near_duplicates,
        min_bytes=params.data.min_bytes,
        benchmarks=index,
        folder=folder,
    )


def _harvest(params: Params, seed: int, corpora: dict[str, Selection], versions: dict[str, str]) -> Iterator[Batch]:
    """Work until every quota is met. Files first: they are what may run out."""
    text, code, data = corpora["text"], corpora["code"], params.data
    if data.source == "packages":
        packages = ingest_packages.packages(data.packages)
        readmes, python = (ingest_packages.checked(of(packages)) for of in (sources.readmes, sources.package_files))
    else:
        packages = sources.closure(Path("pyproject.toml"))
        readmes, python = sources.readmes(packages), sources.python_files(packages)
    versions |= {package.name: package.version for package in packages}
    yield from ingest_selection.file_batches(sources.ordered(readmes), {"prose": text}, data)
    yield from ingest_selection.file_batches(sources.ordered(python), {"python": code, "prose": text}, data)
    if data.source == "machine" and code.is_open("shell"):
        yield from ingest_selection.file_batches(sources.ordered(sources.shell_scripts(Path())), {"shell": code}, data)
    # Bounded, so that a generator that runs out of new things ends the stage and does not hang it.
    for number in range(_most(params.generated_mb)):
        if not code.is_open("generated"):
            break
        yield CodeBatch(BATCH_CODE_BYTES, stable_hash("generated", seed, number) % 2**31)
    for number in range(_most(params.stories_mb)):
        if not text.is_open("stories"):
            break
        yield StoryBatch(range(number * BATCH_NUMBERS, (number + 1) * BATCH_NUMBERS))
    for part, size in BATCH_RECORDS.items():
        for number in range(_most(getattr(params, f"{part}_mb"))):
            if not text.is_open(part):
                break
            # Stage tasks draws from `seed` and `seed + 1`.
            yield WrittenBatch(part, range(number * size, (number + 1) * size), seed + (part == "transcripts") * 2)


def _most(quota_mb: float) -> int:
    """Batches after which a generator has given four times its quota: it is repeating itself."""
    return 4 + int(4 * quota_mb * 1e6 / BATCH_CODE_BYTES)


def _brought(
    data: sources.DataConfig, own: Path, parts: Path, versions: dict[str, str], rows: dict[str, dict[str, int]]
) -> Iterator[Batch]:
    """All that the user's files or the hub's data sets hold, in their order; `rows` counts what became of it."""
    for kind in PARTS:
        if data.source == "files":
            found = own_files.read_files(own, data, kind, parts / f"{kind}-rejected.jsonl", rows[kind])
        else:
            versions |= hub.revisions(data, kind, parts / "hub")
            found = hub.read_hub(data, kind, parts / "hub", rows[kind])
        records = ((split, record) for split, record in found if isinstance(record, Text))
        yield from ingest_selection.record_batches(records, kind, data)


def _keep_rejected(data: sources.DataConfig, kind: str, parts: Path, out: Path) -> None:
    """The rows that were not read, beside what was made of the others."""
    own = parts / f"{kind}-rejected.jsonl"
    files = [own] if data.source == "files" else hub.rejected_files(data, kind, parts / "hub")
    found = [path.read_bytes() for path in files if path.is_file()]
    if any(found):
        (out / hub.REJECTED).write_bytes(b"".join(found))


def _finish(name: str, selection: Selection, out: Path) -> dict[str, Any]:
    """Write a corpus from its parts; returns its manifest so far."""
    files = ingest_selection.mix(selection.close(), out)
    totals = {
        key: {split: sum(file[key] for file in files[split]) for split in files} for key in ("documents", "bytes")
    }
    manifest = {"corpus": name, **totals, "files": files, **selection.books()}
    if name == "text":
        held_out = {family: manifest["sources"][family] for family in stories.HELD_OUT if family in manifest["sources"]}
        manifest["held_out_families"] = held_out
    return manifest


if __name__ == "__main__":
    main(
        run,
        inputs={"own": "data/own", "benchmarks": "data/benchmarks"},
        outs={"text": "data/raw/text", "code": "data/raw/code"},
        seed="data_seed",
    )
