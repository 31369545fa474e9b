"""The entries of each kind: sources of the text, code, dialogues, problems, preferences and labels of `data: files`.

    dialogues:                                            one list per kind; [] means no data of this kind
      - chats/*.jsonl                                     a glob below data/own/                      FileEntry
      - packages                                          the `data: packages` records of this kind   PackagesEntry
      - files: support/*.csv                              a glob with its own options                 FileEntry
        columns: {question: prompt, reply: completion}
        weight: 0.7
      - source: hub                                       a hub dataset, with the keys of HubSet      HubEntry
        id: owner/name
        weight: 0.3
      - repository: repos/mine                            a repository below data/own/                RepositoryEntry

A mapping's keys determine the type of the entry. Weights define a mixture (`ingest/mixture.py`): either all entries of
a kind have a weight or none do.

The checks here need no file access. Whether a glob matches, whether an option applies to the files it matches, and
whether the columns exist are checked when the files are read (`ingest/own_files.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from pipeline.ingest import shapes
from pipeline.ingest.tool_calls import RowError

COLUMNS = "columns"  # the shape that reads text_field
PACKAGES = "packages"  # the entry for our own generators and harvested packages


def check_weight(weight: float | None) -> None:
    """Raise ValueError unless the weight is None or a positive number."""
    if weight is not None and not (weight > 0 and math.isfinite(weight)):
        raise ValueError(f"weight: expected more than 0, got {weight:g}; to leave the entry out, remove it")


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """Files below data/own/ and how to read them. An option that is None takes the top-level key's value."""

    files: str
    """A glob below data/own/."""
    columns: dict[str, str] = field(default_factory=dict)
    """Tables only: column in the files -> our column name."""
    shape: str | None = None
    """Tables only: one of the shapes in ingest/shapes.py."""
    encoding: str | None = None
    """Encoding of files that are neither UTF-8 nor marked as UTF-16."""
    text_field: list[str] | None = None
    """Tables only: columns (our names) joined into the text; in dialogues, the last one is the answer."""
    weight: float | None = None
    """Share of the training rows (bytes for text and code), relative to the other entries."""

    def __post_init__(self) -> None:
        check_weight(self.weight)
        if self.files == PACKAGES:
            raise ValueError("files: `packages` is not a glob; write `source: packages` or `files: packages/*`")
        taken = [name for name in self.columns.values() if list(self.columns.values()).count(name) > 1]
        if taken:
            raise ValueError(f"columns: two columns cannot both become {taken[0]!r}")
        if idle := [name for name, ours in self.columns.items() if name == ours]:
            raise ValueError(f"columns: {idle[0]!r} is mapped to itself; remove this entry")

    @property
    def name(self) -> str:
        """The entry's name in tables and messages."""
        return self.files

    @property
    def table_keys(self) -> list[str]:
        """The keys set here that apply to tables only."""
        given = {"columns": self.columns, "shape": self.shape, "text_field": self.text_field}
        return [key for key, value in given.items() if value]


@dataclass(frozen=True, kw_only=True)
class PackagesEntry:
    """The `data: packages` records of a kind: generated ones, plus harvested packages for text and code."""

    source: Literal["packages"]
    """Always `packages`."""
    weight: float | None = None
    """As in an entry with `files`."""

    def __post_init__(self) -> None:
        check_weight(self.weight)

    @property
    def name(self) -> str:
        """The entry's name in tables and messages."""
        return PACKAGES


@dataclass(frozen=True, kw_only=True)
class HubSet:
    """One Hugging Face hub dataset, for one kind of record."""

    id: str
    """The dataset's owner/name."""
    config: str | None = None
    """The dataset's configuration, if it has several."""
    data_dir: str | None = None
    """Folder inside the dataset."""
    revision: str | None = None
    """A commit (40 hex digits); none: `main`, resolved once, printed and recorded."""
    train: str = "train"
    """The split to train on."""
    val: str | None = None
    """The held-out split; none: val_share of the rows."""
    shape: str = "auto"
    """One of the shapes in ingest/shapes.py."""
    text_field: str | list[str] = "text"
    """The text column, or a list of columns to join; in dialogues, the last one is the answer."""
    license: str = "unknown"
    """The license of every row."""
    license_field: str | None = None
    """The column with each row's license; rows without one get `license`."""
    level: str | None = None
    """With shape acecode: easy, medium or hard; none: all difficulties."""
    max_rows: int | None = None
    """Maximum number of rows per split."""
    enabled: bool = True
    """False skips the dataset; conf/data/hub.yaml sets this for gated datasets."""

    @property
    def name(self) -> str:
        """The dataset's name in tables and messages."""
        return "/".join(part for part in (self.id, self.config, self.data_dir) if part)


@dataclass(frozen=True, kw_only=True)
class HubEntry(HubSet):
    """A hub dataset as an entry of a kind."""

    source: Literal["hub"]
    """Always `hub`."""
    weight: float | None = None
    """As in an entry with `files`."""

    def __post_init__(self) -> None:
        check_weight(self.weight)


@dataclass(frozen=True, kw_only=True)
class RepositoryEntry:
    """A repository (`ingest/repository.py`): its Python files for code, its tested functions for problems, its commits
    for dialogues.
    """

    repository: str
    """A folder below data/own/."""
    held_out: list[str] = field(default_factory=list)
    """Folders to hold out of training (".": all of them); []: some top-level ones, chosen by a hash of their names."""
    weight: float | None = None
    """As in an entry with `files`."""

    def __post_init__(self) -> None:
        check_weight(self.weight)
        for folder in (self.repository, *self.held_out):
            if not folder or folder.startswith("/") or ".." in folder.split("/"):
                raise ValueError(
                    f"repository, held_out: expected a path below data/own/ and folders in that path, got {folder!r}; "
                    "clone or copy the repository to data/own/, so that changes to it are noticed"
                )

    @property
    def name(self) -> str:
        """The entry's name in tables and messages."""
        return self.repository


Written = str | FileEntry | PackagesEntry | HubEntry | RepositoryEntry  # as written in conf/data/<name>.yaml
Entry = FileEntry | PackagesEntry | HubSet | RepositoryEntry
REPOSITORY_KINDS = ("code", "problems", "dialogues")


def resolved(written: Sequence[Written]) -> list[Entry]:
    """The enabled entries of a list; strings become entries without options."""
    entries: list[Entry] = []
    for one in written:
        if one == PACKAGES:
            entries.append(PackagesEntry(source="packages"))
        elif isinstance(one, str):
            entries.append(FileEntry(files=one))
        elif not isinstance(one, HubSet) or one.enabled:
            entries.append(one)
    return entries


def weight_of(entry: Entry) -> float | None:
    """The entry's weight; datasets of `data: hub` have none."""
    return None if isinstance(entry, HubSet) and not isinstance(entry, HubEntry) else entry.weight


def check_list(kind: str, written: Sequence[Written]) -> None:
    """Raise ValueError if an entry does not suit the kind or is listed twice, or if only some entries have weights."""
    entries = resolved(written)
    for entry in entries:
        if isinstance(entry, FileEntry):
            _check_reading(kind, entry)
        if isinstance(entry, RepositoryEntry) and kind not in REPOSITORY_KINDS:
            raise ValueError(f"{kind}: {entry.name}: a repository provides only {', '.join(REPOSITORY_KINDS)}")
    names = [entry.name for entry in entries]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"{kind}: {twice} is listed twice")
    bare = [entry.name for entry in entries if weight_of(entry) is None]
    if bare and len(bare) < len(entries):
        raise ValueError(
            f"{kind}: {bare[0]} has no weight, but another entry does; give all entries a weight, or none of them"
        )


def _check_reading(kind: str, entry: FileEntry) -> None:
    """Raise ValueError for a shape of another kind, or for a key that no shape of this kind uses."""
    where = f"{kind}: {entry.files}"
    try:
        shape = shapes.named(entry.shape or "auto", kind)
    except RowError as error:
        raise ValueError(f"{where}: {error}") from error
    if entry.shape not in (None, "auto") and shape is None:
        raise ValueError(f"{where}: shape: {entry.shape} produces no {kind}; expected {', '.join(shapes.names(kind))}")
    if entry.text_field and COLUMNS not in shapes.names(kind):
        raise ValueError(f"{where}: `text_field` is not used for {kind}; rename columns with `columns`")
