"""Entries of a kind: where the text, code, dialogues, problems, preferences or labels of `data: files` come from.

    dialogues:                                            one list for each kind; [] means no data of this kind
      - chats/*.jsonl                                     a glob below data/own/                      FileEntry
      - packages                                          what `data: packages` gives of this kind    PackagesEntry
      - files: support/*.csv                              a glob with options of its own              FileEntry
        columns: {question: prompt, reply: completion}
        weight: 0.7
      - source: hub                                       a set of the hub, with the keys of HubSet   HubEntry
        id: owner/name
        weight: 0.3
      - repository: repos/mine                            a repository below data/own/                RepositoryEntry

The keys of a mapping decide which of the four it is. Weights make a mixture (`ingest/mixture.py`): every entry of a
kind has one, or none has.

Checked here is what needs no file. Whether a glob matches, whether an option has an effect on the files it matches, and
whether the columns exist is checked where the files are read (`ingest/own_files.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from pipeline.ingest import shapes
from pipeline.ingest.tool_calls import RowError

COLUMNS = "columns"  # the shape that reads text_field
PACKAGES = "packages"  # the entry that stands for our own generators and harvested packages


def check_weight(weight: float | None) -> None:
    """Raise ValueError for a weight that is no positive number."""
    if weight is not None and not (weight > 0 and math.isfinite(weight)):
        raise ValueError(f"weight: expected more than 0, got {weight:g}; take the entry away to leave it out")


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """Files below data/own/, and how to read them. None: as the key of that name says for all entries."""

    files: str
    """A glob."""
    columns: dict[str, str] = field(default_factory=dict)
    """Of tables: the files' column -> ours."""
    shape: str | None = None
    """Of tables: one of ingest/shapes.py."""
    encoding: str | None = None
    """Of what is neither UTF-8 nor marked as UTF-16."""
    text_field: list[str] | None = None
    """Of tables: columns (ours) that make the text; in dialogues the last answers the rest."""
    weight: float | None = None
    """Share of the training rows (of text and code: bytes), relative to the other entries."""

    def __post_init__(self) -> None:
        check_weight(self.weight)
        if self.files == PACKAGES:
            raise ValueError("files: packages is no glob; write `source: packages`, or `files: packages/*`")
        taken = [name for name in self.columns.values() if list(self.columns.values()).count(name) > 1]
        if taken:
            raise ValueError(f"columns: two columns cannot both become {taken[0]!r}")
        if idle := [name for name, ours in self.columns.items() if name == ours]:
            raise ValueError(f"columns: {idle[0]!r} already has this name; take it away")

    @property
    def name(self) -> str:
        """The entry in tables and messages."""
        return self.files

    @property
    def table_keys(self) -> list[str]:
        """The keys set here that only a table can have."""
        given = {"columns": self.columns, "shape": self.shape, "text_field": self.text_field}
        return [key for key, value in given.items() if value]


@dataclass(frozen=True, kw_only=True)
class PackagesEntry:
    """What `data: packages` gives of a kind: generated records; of text and code the harvested packages too."""

    source: Literal["packages"]
    """packages."""
    weight: float | None = None
    """As of files."""

    def __post_init__(self) -> None:
        check_weight(self.weight)

    @property
    def name(self) -> str:
        """The entry in tables and messages."""
        return PACKAGES


@dataclass(frozen=True, kw_only=True)
class HubSet:
    """One data set of the Hugging Face hub, for one kind of record."""

    id: str
    """Owner/name."""
    config: str | None = None
    """The data set's configuration, where it has several."""
    data_dir: str | None = None
    """Folder inside the data set."""
    revision: str | None = None
    """40 hex digits; none: resolved once, printed and recorded."""
    train: str = "train"
    """The split that is trained on."""
    val: str | None = None
    """The split that is held out; none: val_share of the rows."""
    shape: str = "auto"
    """One of ingest/shapes.py."""
    text_field: str | list[str] = "text"
    """The column of the text; a list: columns that are joined, of which in dialogues the last answers the rest."""
    licence: str = "unknown"
    """The licence of every row."""
    licence_field: str | None = None
    """The column that names the licence of each row, instead."""
    level: str | None = None
    """For AceCode: easy, medium, hard."""
    max_rows: int | None = None
    """At most so many rows of each split."""
    enabled: bool = True
    """Gated sets stand here switched off."""

    @property
    def name(self) -> str:
        """The data set in tables and messages."""
        return "/".join(part for part in (self.id, self.config, self.data_dir) if part)


@dataclass(frozen=True, kw_only=True)
class HubEntry(HubSet):
    """A data set of the hub among the entries of a kind."""

    source: Literal["hub"]
    """hub."""
    weight: float | None = None
    """As of files."""

    def __post_init__(self) -> None:
        check_weight(self.weight)


@dataclass(frozen=True, kw_only=True)
class RepositoryEntry:
    """A repository (`ingest/repository.py`): of code its Python files, of problems its functions with tests, of
    dialogues its commits.
    """

    repository: str
    """A folder below data/own/."""
    held_out: list[str] = field(default_factory=list)
    """Folders in it that are not trained on (".": all of it); []: some of its top folders, by a hash of their names."""
    weight: float | None = None
    """As of files."""

    def __post_init__(self) -> None:
        check_weight(self.weight)
        for folder in (self.repository, *self.held_out):
            if not folder or folder.startswith("/") or ".." in folder.split("/"):
                raise ValueError(
                    f"repository, held_out: expected a path below data/own/ and folders in it, got {folder!r}; a "
                    "repository that lies elsewhere is cloned or copied there, so that a change of it is noticed"
                )

    @property
    def name(self) -> str:
        """The entry in tables and messages."""
        return self.repository


Written = str | FileEntry | PackagesEntry | HubEntry | RepositoryEntry  # as conf/data/<name>.yaml has it
Entry = FileEntry | PackagesEntry | HubSet | RepositoryEntry
REPOSITORY_KINDS = ("code", "problems", "dialogues")


def resolved(written: Sequence[Written]) -> list[Entry]:
    """The entries that a list means, without those that are switched off: strings become entries without options."""
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
    """The entry's weight; the sets of `data: hub` have none."""
    return None if isinstance(entry, HubSet) and not isinstance(entry, HubEntry) else entry.weight


def check_list(kind: str, written: Sequence[Written]) -> None:
    """Raise ValueError where some entries have weights and others none, and where one stands twice."""
    entries = resolved(written)
    for entry in entries:
        if isinstance(entry, FileEntry):
            _check_reading(kind, entry)
        if isinstance(entry, RepositoryEntry) and kind not in REPOSITORY_KINDS:
            raise ValueError(f"{kind}: {entry.name}: a repository gives {', '.join(REPOSITORY_KINDS)} alone")
    names = [entry.name for entry in entries]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"{kind}: {twice} stands there twice")
    bare = [entry.name for entry in entries if weight_of(entry) is None]
    if bare and len(bare) < len(entries):
        raise ValueError(
            f"{kind}: {bare[0]} has no weight and another entry has one; give every entry a weight, or none"
        )


def _check_reading(kind: str, entry: FileEntry) -> None:
    """Raise ValueError for a shape that is none of the kind, and for a key that no shape of the kind reads."""
    where = f"{kind}: {entry.files}"
    try:
        shape = shapes.named(entry.shape or "auto", kind)
    except RowError as error:
        raise ValueError(f"{where}: {error}") from error
    if entry.shape not in (None, "auto") and shape is None:
        raise ValueError(f"{where}: shape: {entry.shape} makes no {kind}; expected {', '.join(shapes.names(kind))}")
    if entry.text_field and COLUMNS not in shapes.names(kind):
        raise ValueError(f"{where}: text_field: is not read for {kind}; rename columns with `columns`")
