"""Preference pairs that people gave on the web page: selects those to train on.

    feedback/preferences.jsonl --a row at a time--> Pair --accept--> --share--> pairs to train on, counts, rejected rows

Anybody who may ask the server may give pairs, so they are trusted only so far. A row that cannot be read is written to
the rejected rows and costs no other row. Of the others at most `share` of all training pairs are taken: those that a
person reviewed first, then one of each giver in turn, so that thousands of rows of one key leave room for two of
another. Hashes of the ids decide whose turn it is, and which of their rows: a new row displaces one at most.

Not promised: that a selected pair is right. Without API keys all rows are of one giver, and who has many keys has many
turns.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline.ingest import files, shapes
from pipeline.ingest.own_files import Intake
from pipeline.ingest.records import Pair
from pipeline.ingest.tool_calls import RowError
from pipeline.run.device import stable_hash
from pipeline.run.tracking import say
from pipeline.run.types import JsonObject

ACCEPT = ("all", "reviewed")
SOURCE = "feedback"  # the `source` of these pairs


@dataclass(frozen=True, kw_only=True)
class FeedbackConfig:
    """`tasks.feedback`: how far what people gave on the web page is believed."""

    accept: str = "all"
    """all; reviewed: only rows to which somebody has added `"reviewed": true`."""
    share: float = 0.2
    """Of the training pairs that may come from there."""

    def __post_init__(self) -> None:
        if self.accept not in ACCEPT:
            raise ValueError(f"accept: expected {' or '.join(ACCEPT)}, got {self.accept!r}")
        if not 0 <= self.share < 1:
            raise ValueError(f"share: expected a share in [0, 1), got {self.share}")


@dataclass(frozen=True)
class FeedbackPair:
    """A pair, and whether somebody has reviewed it."""

    pair: Pair
    reviewed: bool


def pairs(path: Path, config: FeedbackConfig, others: int, rejected: Path) -> tuple[list[Pair], JsonObject]:
    """The pairs to train on beside `others` other pairs, in the order of the file, and the counts of all rows.

    Without the file there are none. `rejected`: the JSONL file for what cannot be read (file, line, field, reason).
    """
    counts: Counter[str] = Counter()
    rows = list(_read(path, rejected, counts)) if path.is_file() and path.stat().st_size else []
    accepted = [row for row in rows if row.reviewed or config.accept == "all"]
    selected = _select(accepted, int(config.share * others / (1 - config.share) + 1e-9))
    by_giver = Counter(pair.given_by or "nobody named" for pair in selected)
    summary = {
        "rows": counts.total() + len(rows),
        "kept": len(selected),
        "duplicates": counts["duplicates"],
        "rejected": counts["rejected"],
        "not_reviewed": len(rows) - len(accepted),
        "over_share": len(accepted) - len(selected),
        "kept_by": dict(sorted(by_giver.items())),
    }
    if summary["rows"]:
        say(
            f"feedback: {summary['kept']} of {summary['rows']} rows are trained on, of {len(by_giver)} givers; "
            f"{summary['rejected']} cannot be read, {summary['not_reviewed']} are not reviewed, "
            f"{summary['over_share']} are over {config.share:.0%} of the pairs"
        )
    return selected, summary


def _read(path: Path, rejected: Path, counts: Counter[str]) -> Iterable[FeedbackPair]:
    """The rows that can be read; adds the numbers of the others to `counts`."""
    (pair_shape,) = (shape for shape in shapes.SHAPES if "preferences" in shape.kinds)
    with Intake(rejected, None, f"{SOURCE} of {path}", has_val=True) as intake:
        for line, row in files.rows(path, "utf-8"):
            try:
                if isinstance(row, RowError):
                    raise row
                pair = shapes.convert(pair_shape, row, shapes.Columns())
                accepted = intake.accept(pair, path.name, line, "train")
            except RowError as error:
                intake.reject(path.name, line, error)
            else:
                for _, record in accepted:
                    assert isinstance(record, Pair)
                    yield FeedbackPair(
                        replace(record, source=SOURCE), isinstance(row, Mapping) and row.get("reviewed") is True
                    )
        counts.update(duplicates=intake.num_duplicates, rejected=intake.num_rejected)


def _select(rows: list[FeedbackPair], limit: int) -> list[Pair]:
    """At most `limit` pairs: reviewed ones first, then one of each giver in turn."""
    if len(rows) <= limit:
        return [row.pair for row in rows]
    turns: Counter[tuple[bool, str]] = Counter()
    ranked: list[tuple[bool, int, int, int]] = []  # not reviewed, turn, hash of the giver, index
    for index in sorted(range(len(rows)), key=lambda index: stable_hash("feedback", rows[index].pair.id)):
        row, giver = rows[index], rows[index].pair.given_by or ""
        ranked.append((not row.reviewed, turns[row.reviewed, giver], stable_hash("giver", giver), index))
        turns[row.reviewed, giver] += 1
    return [rows[index].pair for index in sorted(index for *_, index in sorted(ranked)[:limit])]
