"""Merge the entries of a kind into one set of splits, in proportion to their weights.

    entries with weights w_i and N_i training rows each -> N = sum(N_i) rows, a share of w_i / sum(w) from entry i

An entry with more rows than its share is subsampled; one with fewer is repeated in whole passes plus a remainder. The
subset and the remainder are the rows with the smallest keyed hash of their ids, so that new rows displace few others.
Entries are interleaved evenly, each spread over the entire split. For text and code, the unit is the byte, not the row
(`ingest/selection.py`).

A repeated record keeps its split, and its id gets a suffix (`#pass2`), so that ids stay unique. Held-out rows
are neither weighted nor repeated. Without weights, every row appears once.

Not guaranteed: that more passes help. Beyond about four, repeated tokens are worth much less than new ones
(Muennighoff et al. 2023, arXiv:2305.16264); the table shows how often each row is drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from pipeline.ingest import history, hub, own_files
from pipeline.ingest.entries import PACKAGES, Entry, FileEntry, RepositoryEntry, weight_of
from pipeline.ingest.intake import RowCounts
from pipeline.ingest.records import Dialogue, Label, Pair, Problem
from pipeline.ingest.sources import DataConfig
from pipeline.run.device import stable_hash
from pipeline.run.errors import DataError
from pipeline.run.tracking import say
from pipeline.run.types import JsonObject

R = TypeVar("R", Dialogue, Problem, Pair, Label)
T = TypeVar("T")
Splits = dict[str, list[R]]  # train, val, test (and rl) -> records
DRAWN = ("train", "rl")  # the splits that weights apply to
FEWEST = 20  # a smaller test set is meaningless


@dataclass
class Lot(Generic[R]):
    """The records of an entry, or of all entries of one source if there are no weights."""

    name: str
    source: str  # files, hub, packages
    weight: float | None = None
    splits: Splits[R] = field(default_factory=lambda: {"train": [], "val": [], "test": []})
    files: dict[str, str] = field(default_factory=dict)  # id -> the record's file
    entries: list[Entry] = field(default_factory=list)
    lines: dict[str, int] = field(default_factory=dict)  # id -> the record's line in its file


MADE = (PACKAGES, "repository")  # sources whose records the caller generates


def read_lots(
    kind: str, record_type: type[R], data: DataConfig, own: Path, parts: Path, tallies: dict[str, RowCounts]
) -> list[Lot[R]]:
    """The lots of a kind in entry order; those with a source in MADE are empty, for the caller to fill.

    If a lot read here has no test rows, every second held-out row becomes a test row. Adds the row counts to `tallies`.
    """
    lots: dict[int | str, Lot[R]] = {}
    lot_of: list[Lot[R]] = []  # the lot of each entry
    for number, entry in enumerate(data.entries(kind)):
        source = "files" if isinstance(entry, FileEntry) else "hub" if isinstance(entry, hub.HubSet) else PACKAGES
        if isinstance(entry, RepositoryEntry):
            source = "repository" if kind == "problems" else "files"
        weight = weight_of(entry)
        key, name = (source, source) if weight is None else (number, entry.name)
        lot_of.append(lots.setdefault(key, Lot(name, source, weight)))
        lot_of[-1].entries.append(entry)
    if any(lot.source not in MADE for lot in lot_of):
        parts.mkdir(parents=True, exist_ok=True)
        tally = tallies.setdefault(kind, RowCounts())
        supplied = (
            own_files.read_files(own, data, kind, parts / f"{kind}-rejected.jsonl", tally),
            hub.read_hub(data, kind, parts / "hub", tally),
            history.read(own, data, parts, tally) if kind == "dialogues" else (),
        )
        for row in (row for rows in supplied for row in rows):
            assert isinstance(row.record, record_type)
            lot = lot_of[row.entry]
            lot.splits[row.split].append(row.record)
            lot.files[row.record.id], lot.lines[row.record.id] = row.file, row.line
    for lot in lots.values():
        if not lot.splits["test"]:  # the source has no test split of its own
            held_out = lot.splits["val"]
            lot.splits["val"], lot.splits["test"] = held_out[::2], held_out[1::2]
    return list(lots.values())


def hold_out(kind: str, lots: Sequence[Lot[R]], data: DataConfig) -> None:
    """Move one training row to `val` if it is empty, and likewise to `test`, as long as training rows are left.

    For problems, all versions of a key move together. A split with a share of 0 gets no row.
    """
    supplied = [lot for lot in lots if lot.source != PACKAGES]
    if not supplied:
        return
    for split, share in (("val", data.val_share), ("test", data.test_share)):
        if share == 0 or any(lot.splits[split] or lot.source == PACKAGES for lot in lots):
            continue
        groups = {_group(record): lot for lot in supplied for record in lot.splits["train"]}
        if len(groups) > 1:  # the row is chosen by id, so that new rows rarely change the choice
            group = min(groups, key=lambda name: (stable_hash("held out", name), name))
            records = groups[group].splits["train"]
            groups[group].splits[split] = [record for record in records if _group(record) == group]
            groups[group].splits["train"] = [record for record in records if _group(record) != group]


def tell_small(kind: str, lots: Sequence[Lot[R]], num_test: int) -> None:
    """Print a warning if a test set consisting only of supplied rows is too small to be meaningful."""
    if lots and num_test < FEWEST and all(lot.source != PACKAGES for lot in lots):
        say(
            f"{kind}: the test set has only {num_test} rows; meaningful results need at least {FEWEST}: "
            "add more rows, or raise test_share"
        )


def _group(record: Dialogue | Problem | Pair | Label) -> str:
    """The unit that stays in one split: all versions of a problem, else the record."""
    return record.key if isinstance(record, Problem) else record.id


def join(lots: Sequence[Lot[R]]) -> Splits[R]:
    """The records of all lots, each once, evenly interleaved."""
    names = dict.fromkeys(split for lot in lots for split in lot.splits) or dict.fromkeys(("train", "val", "test"))
    return {split: interleaved([lot.splits.get(split, []) for lot in lots]) for split in names}


def combine(
    kind: str, lots: Sequence[Lot[R]], seed: int, tallies: Mapping[str, RowCounts]
) -> tuple[Splits[R], list[JsonObject]]:
    """The splits of a kind, with training rows in proportion to the weights, and a table with one row per entry.

    Rows shared by two entries are counted as dropped in `tallies`.
    Raises DataError for a weighted entry with nothing to train on.
    """
    _make_unique(kind, lots, tallies)
    splits = join(lots)
    if not lots or lots[0].weight is None:
        return splits, []
    table: list[JsonObject] = []
    for split in DRAWN:
        present = [lot for lot in lots if lot.splits.get(split)]
        if split == "train":
            check_filled(kind, [(lot.name, sum(len(lot.splits.get(s, [])) for s in DRAWN)) for lot in lots])
        if not present:
            continue
        keys = [[stable_hash("mixture", seed, record.id) for record in lot.splits[split]] for lot in present]
        stocks = [
            Stock(lot.name, lot.weight or 0.0, np.ones(len(k), np.int64), np.array(k, np.uint64))
            for lot, k in zip(present, keys, strict=True)
        ]
        copies = draw(stocks)
        splits[split] = interleaved(
            [passes(lot.splits[split], c, _again) for lot, c in zip(present, copies, strict=True)]
        )
        table += [{"split": split, **row} for row in summary(stocks, copies)]
    return splits, table


def check_filled(kind: str, entries: Iterable[tuple[str, int]]) -> None:
    """Raise DataError for the first (name, rows to train on) pair with no rows."""
    for name, count in entries:
        if not count:
            raise DataError(
                f"{kind}: {name}: nothing to train on: all rows are rejected, dropped or held out; a weighted "
                "entry needs rows, so add some or remove the entry"
            )


def _make_unique(kind: str, lots: Sequence[Lot[R]], tallies: Mapping[str, RowCounts]) -> None:
    """Drop records that also occur in an earlier lot; if an id is taken by another record, prefix it with the lot name.

    Within a lot, `Intake` and the generators ensure unique ids.
    """
    seen: dict[str, R] = {}
    for lot in lots:
        earlier, num_dropped = dict(seen), 0
        for split, records in lot.splits.items():
            kept: list[R] = []
            for record in records:
                other = earlier.get(record.id)
                if other == record:
                    num_dropped += 1
                    if record.id in lot.files:
                        tallies[kind].drop(lot.files[record.id])
                    continue
                kept.append(record if other is None else replace(record, id=f"{lot.name}/{record.id}"))
                seen[kept[-1].id] = kept[-1]
            lot.splits[split] = kept
        if num_dropped:
            say(f"{kind}: {num_dropped} rows of {lot.name} also occur in an earlier entry and are dropped")


def _again(record: R, number: int) -> R:
    return replace(record, id=f"{record.id}{pass_mark(number)}")


def pass_mark(number: int) -> str:
    """The suffix of an id in the second and later passes."""
    return f"#pass{number}"


# --- drawing ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stock:
    """The rows available in an entry."""

    name: str
    weight: float
    sizes: NDArray[np.int64]  # (n,) 1 for rows, or bytes
    keys: NDArray[np.uint64]  # (n,) hashes that determine which rows are drawn once more than others

    @property
    def total(self) -> int:
        """The sum of all sizes."""
        return int(self.sizes.sum())


def draw(stocks: Sequence[Stock]) -> list[NDArray[np.int64]]:
    """How often each row is drawn, (n,) for each stock, so that the drawn sizes match the weights and the total stays
    the same. Rows are not split, so a share is off by at most half the largest row.
    """
    total, weights = sum(stock.total for stock in stocks), sum(stock.weight for stock in stocks)
    targets = [stock.weight / weights * total for stock in stocks]
    # Rounded by largest remainder, so that the integers add up to the total.
    whole = [int(target) for target in targets]
    order = sorted(range(len(stocks)), key=lambda number: (whole[number] - targets[number], number))
    for number in order[: total - sum(whole)]:
        whole[number] += 1
    return [_copies(stock, target) for stock, target in zip(stocks, whole, strict=True)]


def _copies(stock: Stock, target: int) -> NDArray[np.int64]:
    num_passes, rest = divmod(target, stock.total)
    order = np.argsort(stock.keys, kind="stable")
    ends = np.cumsum(stock.sizes[order])
    copies = np.full(len(stock.sizes), num_passes, np.int64)
    copies[order[2 * ends - stock.sizes[order] <= 2 * rest - 1]] += 1  # a row is drawn if more than half of it fits
    return copies


def summary(stocks: Sequence[Stock], copies: Sequence[NDArray[np.int64]]) -> list[JsonObject]:
    """For each entry: rows, shares wanted and drawn, average draws per row, and rows never drawn."""
    drawn = [int((stock.sizes * times).sum()) for stock, times in zip(stocks, copies, strict=True)]
    weights = sum(stock.weight for stock in stocks)
    return [
        {
            "entry": stock.name,
            "rows": len(stock.sizes),
            "wanted": stock.weight / weights,
            "drawn": size / max(1, sum(drawn)),
            "times": float(times.mean()),
            "left_out": int((times == 0).sum()),
        }
        for stock, times, size in zip(stocks, copies, drawn, strict=True)
    ]


def shown(kind: str, table: Sequence[Mapping[str, object]]) -> str:
    """Format the table of a mixture as text."""
    head = [f"mixture of {kind}", "rows", "wanted", "drawn", "times", "left out"]
    rows = [head]
    for row in table:
        name = f"{row['entry']} ({row['split']})" if row.get("split", "train") != "train" else str(row["entry"])
        cells = [f"{row['rows']:,}", f"{row['wanted']:.1%}", f"{row['drawn']:.1%}", f"{row['times']:.2f}"]
        rows.append([name, *cells, f"{row['left_out']:,}"])
    width = max(len(row[0]) for row in rows)
    return "\n".join("  ".join([row[0].ljust(width), *(cell.rjust(10) for cell in row[1:])]) for row in rows)


def passes(rows: Sequence[T], copies: NDArray[np.int64], again: Callable[[T, int], T]) -> list[T]:
    """The rows in order, pass by pass; `again` marks rows of pass 2 and later with the pass number."""
    drawn: list[T] = []
    for number in range(1, int(copies.max(initial=0)) + 1):
        chosen = (rows[index] for index in np.flatnonzero(copies >= number).tolist())
        drawn += chosen if number == 1 else (again(row, number) for row in chosen)
    return drawn


def interleaved(lists: Sequence[Sequence[T]]) -> list[T]:
    """All elements, with each list in order and spread evenly over the result."""
    positioned = [((n + 0.5) / len(rows), k, row) for k, rows in enumerate(lists) for n, row in enumerate(rows)]
    return [row for *_, row in sorted(positioned, key=lambda entry: entry[:2])]
