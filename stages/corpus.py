"""Stage corpus: collect, clean, deduplicate, decontaminate, split.

    the source selected by `data` + data/own + data/benchmarks -> data/raw/{text,code}

`data=packages` yields text (stories, drills and transcripts from generators; prose from READMEs and docstrings) and
code (Python, generated functions), each up to its quota, byte-identical on every machine. `machine` reads installed
packages instead, plus shell scripts. `files` and `hub` yield everything they contain; a `packages` entry in `files`
(`ingest/entries.py`) adds what `data=packages` yields. If entries have weights, each gets its share of the training
bytes. Files kept from a repository become documents that include their context (`ingest/repository_documents.py`). A
corpus with an empty list of entries has no documents. Worker processes read and clean batches; the main process
consumes the results in order (`ingest/selection.py`). On machines with the same packages, the corpus therefore does not
depend on the number of workers, the locale or the hash seed.

Held-out data: packages by blake2b(name) mod 20; generated files by blake2b(path) mod 50; stories by index mod 50, plus
every tenth story of three held-out families; rows of user files and Hub data sets, as their readers decide.
"""

import itertools
import math
import platform
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pipeline.ingest import hub, mixture, own_files, repository_documents, sources
from pipeline.ingest import selection as ingest_selection
from pipeline.ingest.cleaning import Document, Origin, SuppliedText, made_record
from pipeline.ingest.duplicates import Index, benchmark_files, benchmark_items
from pipeline.ingest.entries import Entry, HubSet, PackagesEntry, RepositoryEntry, weight_of
from pipeline.ingest.intake import RowCounts
from pipeline.ingest.records import Text
from pipeline.ingest.selection import FileBatch, RecordBatch, Selection, WeightedParts
from pipeline.run.config import group, key_of
from pipeline.run.device import stable_hash
from pipeline.run.processes import pool_map
from pipeline.run.stage import main
from pipeline.run.tracking import progress, say, write_json
from pipeline.run.types import JsonObject
from pipeline.run.workdir import Job, remove, sha256
from pipeline.synthetic import drills, programs, stories, tools

# corpus -> its parts, for data=packages and data=machine
PARTS = {"text": ("prose", "stories", "drills", "transcripts"), "code": ("python", "shell", "generated")}
HARVESTED = ("prose", "python", "shell")  # parts with a size cap per package; generators have no packages
BATCH_NUMBERS = 10  # stories per family in a batch
BATCH_RECORDS = {"drills": 200, "transcripts": 40}
BATCH_CODE_BYTES = 60_000  # generated code per batch
WRITERS = {"drills": drills, "transcripts": tools}
WRITTEN_HELD_OUT_EVERY = 50  # drills and transcripts whose index is a multiple of this are validation data
HELD_OUT_EVERY = 10  # stride through a held-out story family: yields enough to measure on but uses little quota
GENERATED_VAL = 50  # one in this many generated files is held out


@dataclass(frozen=True, kw_only=True)
class Params:
    """The `corpus` block of params.yaml, and the files in conf/data/."""

    stories_mb: float
    """10^6 bytes of generated stories to keep, train and val combined (`data=packages`, `data=machine`)."""
    prose_mb: float
    """10^6 bytes of English from READMEs and docstrings."""
    drills_mb: float
    """10^6 bytes of copying exercises."""
    transcripts_mb: float
    """10^6 bytes of tool conversations as text."""
    python_mb: float
    """10^6 bytes of Python from packages (`data=machine`: also from the standard library)."""
    shell_mb: float
    """10^6 bytes of shell scripts (`data=machine`)."""
    generated_mb: float
    """10^6 bytes of generated functions."""
    cap_mb: float
    """Cap per package and part, in 10^6 bytes (`data=packages`, `data=machine`)."""
    near_duplicates: float
    """Estimated Jaccard similarity at or above which the later document is dropped."""
    document_bytes: int = 6000
    """Size of a repository file's chunk with context: at 3 bytes per token, about the context length of stage code."""
    package_names: list[str] = key_of("conf/data/packages.yaml", "packages")
    """Packages harvested by a `packages` entry."""
    data: sources.DataConfig = group("data")

    def __post_init__(self) -> None:
        for name in ("stories_mb", "prose_mb", "drills_mb", "transcripts_mb", "python_mb", "shell_mb", "generated_mb"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: expected 0 or more, got {getattr(self, name)}")
        if self.document_bytes < 400:
            raise ValueError(f"document_bytes: expected at least 400, got {self.document_bytes}")
        if self.cap_mb <= 0 or not 0 < self.near_duplicates <= 1:
            raise ValueError(
                f"cap_mb, near_duplicates: expected cap_mb > 0 and near_duplicates in (0, 1], "
                f"got {self.cap_mb}, {self.near_duplicates}"
            )

    def preflight(self, root: Path) -> list[str]:
        """Problems found before reading anything: text and code globs that match nothing, and repositories that are not
        folders.
        """
        own = root / "data/own"
        return [
            *own_files.missing_globs(own, self.data, sources.TEXT_KINDS),
            *repository_documents.missing(own, self.data),
        ]


@dataclass(frozen=True)
class StoryBatch:
    """A batch of stories to generate: in each family, the stories with the indices in `numbers`."""

    numbers: range


@dataclass(frozen=True)
class WrittenBatch:
    """A batch of drills or transcripts to generate: those with the indices in `numbers`, from `seed`."""

    part: str
    numbers: range
    seed: int


@dataclass(frozen=True)
class CodeBatch:
    """A batch of functions to generate: about `num_bytes`, from `seed`."""

    num_bytes: int
    seed: int


Batch = FileBatch | RecordBatch | StoryBatch | WrittenBatch | CodeBatch


def run(params: Params, job: Job, *, own: Path, benchmarks: Path, text: Path, code: Path) -> None:
    """Build both corpora. Raises DataError for unreadable files, and for a corpus that has entries but no
    documents."""
    parts = job.folder / "parts"
    shutil.rmtree(parts / "kept", ignore_errors=True)  # but not Hub data that a killed run fetched
    index = Index(benchmark_items(benchmarks))
    corpora = {name: _selection(name, params, index, parts / "kept" / name) for name in PARTS}
    versions = {} if params.data.source == "packages" else {"python": platform.python_version()}
    tallies = {name: RowCounts() for name in PARTS}  # filled only for data=files and data=hub
    batches = itertools.chain(
        _supplied_batches(params.data, own, parts, versions, tallies),
        _harvest_batches(params, job.seed, corpora, versions),
    )
    selections = {part: selection for selection in corpora.values() for part in selection.quotas}
    total = sum(quota for selection in corpora.values() for quota in selection.quotas.values())
    with progress(total=None if math.isinf(total) else total, desc="corpus", unit="B") as bar:
        for document in itertools.chain.from_iterable(pool_map(prepare, batches, job.workers)):
            bar.update(selections[document.part].offer(document))
    for name, out in (("text", text), ("code", code)):
        manifest = _write_corpus(name, corpora[name], params, own, job.seed, out) | {
            "data": params.data.source,
            "versions": versions,
        }
        if params.data.source not in sources.HARVESTS:
            for file, num_rows in corpora[name].dropped_rows.items():
                tallies[name].drop(file, num_rows)
            if tallies[name].files:
                say(tallies[name].shown(name))
            manifest |= {"rows": tallies[name].totals, "rows_by_file": tallies[name].files}
            _write_rejected(params.data, name, parts, out)
            if corpora[name].dropped_file.is_file():
                shutil.copy(corpora[name].dropped_file, out)
        manifest["benchmarks"] = {
            "items": len(index),
            "files": {path.relative_to(benchmarks).as_posix(): sha256(path) for path in benchmark_files(benchmarks)},
        }
        write_json(out / "manifest.json", manifest)
        job.report(**{name: {key: manifest[key] for key in ("documents", "bytes", "dropped")}})
    remove(parts)


def prepare(batch: Batch) -> list[Document]:
    """Return the cleaned documents of a batch; runs in a worker process."""
    if isinstance(batch, StoryBatch):
        return [_story_document(path) for path in _story_paths(batch.numbers)]
    if isinstance(batch, WrittenBatch):
        writer = WRITERS[batch.part]
        return [
            made_record(writer.record(batch.seed, n), batch.part, "train" if n % WRITTEN_HELD_OUT_EVERY else "val")
            for n in batch.numbers
        ]
    if isinstance(batch, CodeBatch):
        records = programs.sources(batch.num_bytes, batch.seed)
        return [made_record(record, "generated", sources.split_of(record.path, GENERATED_VAL)) for record in records]
    return ingest_selection.clean(batch)


def _story_paths(numbers: range) -> list[str]:
    """Paths of the stories with these indices, cycling through the families; only every tenth for held-out families."""
    return [
        f"stories/{family}/{number}"
        for number in numbers
        for family in stories.FAMILIES
        if family not in stories.HELD_OUT or number % HELD_OUT_EVERY == 0
    ]


def _story_document(path: str) -> Document:
    family = path.split("/")[1]
    record = Text(text=stories.story(path), source=family, path=path, license=stories.LICENSE)
    return made_record(record, "stories", "val" if stories.is_held_out(path) else "train")


def _selection(name: str, params: Params, index: Index, folder: Path) -> Selection:
    """An empty corpus with the quotas and caps of its parts."""
    quotas: dict[str, float] = {}
    for parts in _parts_of_entries(name, params.data):
        quotas |= {part: getattr(params, f"{part}_mb") * 1e6 if part in PARTS[name] else math.inf for part in parts}
    return Selection(
        quotas=quotas,
        caps=dict.fromkeys(HARVESTED, params.cap_mb * 1e6),
        threshold=params.near_duplicates,
        min_bytes=params.data.min_bytes,
        benchmarks=index,
        folder=folder,
    )


def _parts_of_entries(name: str, data: sources.DataConfig) -> list[tuple[str, ...]]:
    """For each entry, the corpus parts that receive its documents. Weighted entries and repositories have parts of
    their own.
    """
    harvested = tuple(part for part in PARTS[name] if part != "shell" or data.source == "machine")
    return [  # `packages` has no shell scripts: no package in the lock file contains any
        harvested if isinstance(entry, PackagesEntry) else (_own_part(name, number, entry),)
        for number, entry in enumerate(data.entries(name), start=1)
    ]


def _own_part(name: str, number: int, entry: Entry) -> str:
    alone = weight_of(entry) is not None or isinstance(entry, RepositoryEntry)
    return f"own {name} {number}" if alone else f"own {name}"


def _harvest_batches(
    params: Params, seed: int, corpora: dict[str, Selection], versions: dict[str, str]
) -> Iterator[Batch]:
    """Yield batches until every quota is met. Files come first, because they may run out."""
    text, code, data = corpora["text"], corpora["code"], params.data
    if not any(part in corpora[name].quotas for name in PARTS for part in PARTS[name]):
        return
    if data.source != "machine":
        packages = sources.packages(data.packages or params.package_names)
        readmes, python = (sources.checked(of(packages)) for of in (sources.readmes, sources.package_files))
    else:
        packages = sources.closure(Path("pyproject.toml"))
        readmes, python = sources.readmes(packages), sources.python_files(packages)
    versions |= {package.name: package.version for package in packages}
    yield from ingest_selection.file_batches(sources.ordered(readmes), {"prose": text}, data)
    yield from ingest_selection.file_batches(sources.ordered(python), {"python": code, "prose": text}, data)
    if data.source == "machine" and code.is_open("shell"):
        yield from ingest_selection.file_batches(sources.ordered(sources.shell_scripts(Path())), {"shell": code}, data)
    # Bounded, so that the stage does not hang when a generator runs out of new samples.
    for number in range(_max_batches(params.generated_mb)):
        if not code.is_open("generated"):
            break
        yield CodeBatch(BATCH_CODE_BYTES, stable_hash("generated", seed, number) % 2**31)
    for number in range(_max_batches(params.stories_mb)):
        if not text.is_open("stories"):
            break
        yield StoryBatch(range(number * BATCH_NUMBERS, (number + 1) * BATCH_NUMBERS))
    for part, size in BATCH_RECORDS.items():
        for number in range(_max_batches(getattr(params, f"{part}_mb"))):
            if not text.is_open(part):
                break
            # Stage tasks draws from `seed` and `seed + 1`, so transcripts use `seed + 2`.
            yield WrittenBatch(part, range(number * size, (number + 1) * size), seed + (part == "transcripts") * 2)


def _max_batches(quota_mb: float) -> int:
    """Number of batches that make up four times a generator's quota; after that, it only repeats itself."""
    return 4 + int(4 * quota_mb * 1e6 / BATCH_CODE_BYTES)


def _supplied_batches(
    data: sources.DataConfig, own: Path, parts: Path, versions: dict[str, str], tallies: dict[str, RowCounts]
) -> Iterator[Batch]:
    """Yield everything in the user's files or the Hub data sets, in order, and add the row counts to `tallies`."""
    for kind in PARTS:
        entries, parts_of = data.entries(kind), _parts_of_entries(kind, data)
        versions |= hub.revisions(data, kind, parts / "hub")
        rows_read = itertools.chain(
            own_files.read_files(own, data, kind, parts / f"{kind}-rejected.jsonl", tallies[kind]),
            hub.read_hub(data, kind, parts / "hub", tallies[kind]),
            repository_documents.read_files(own, data, parts, tallies[kind]) if kind == "code" else (),
        )
        texts = (
            SuppliedText(
                part=parts_of[row.entry][0],
                split=row.split,
                record=row.record,
                origin=Origin(row.file, row.line, row.number),
                foreign=isinstance(entries[row.entry], HubSet),
            )
            for row in rows_read
            if isinstance(row.record, Text)
        )
        yield from ingest_selection.record_batches(texts, kind, data)


def _write_rejected(data: sources.DataConfig, kind: str, parts: Path, out: Path) -> None:
    """Write the rejected rows next to the corpus."""
    files = [parts / f"{kind}-rejected.jsonl", *hub.rejected_files(data, kind, parts / "hub")]
    files += [repository_documents.rejected_file(parts, n) for n in repository_documents.entries_of(data, kind)]
    rejected = [path.read_bytes() for path in files if path.is_file()]
    if any(rejected):
        (out / hub.REJECTED).write_bytes(b"".join(rejected))


def _write_corpus(name: str, selection: Selection, params: Params, own: Path, seed: int, out: Path) -> JsonObject:
    """Assemble a corpus from its parts, write it, and return its manifest, which `run` completes."""
    data = params.data
    parts, entries = selection.close(), data.entries(name)
    part_of = {n: _own_part(name, n + 1, entries[n]) for n in repository_documents.entries_of(data, name)}
    if part_of:
        parts = repository_documents.rewrite(parts, own, data, part_of, params.document_bytes)
    weighted = [
        WeightedParts(entry.name, weight, of_entry)
        for entry, of_entry in zip(entries, _parts_of_entries(name, data), strict=True)
        if (weight := weight_of(entry)) is not None
    ]
    table: list[JsonObject] = []
    if not entries:
        files = ingest_selection.write_empty(out)
    elif weighted:
        draws, table = ingest_selection.drawn(name, parts, weighted, seed)
        files = ingest_selection.mix(parts, out, draws, contexts=bool(part_of))
        say(mixture.shown(name, table))
    else:
        files = ingest_selection.mix(parts, out, contexts=bool(part_of))
    totals = {
        key: {split: sum(file[key] for file in files[split]) for split in files} for key in ("documents", "bytes")
    }
    manifest = {"corpus": name, **totals, "files": files, **selection.books()}
    if table:
        manifest["mixture"] = table
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
