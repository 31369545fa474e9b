"""Pairs that people gave on the web page: which of them are trained on.

    feedback/preferences.jsonl --a row at a time--> Pair --accept--> --share--> pairs to train on, counts, rejected rows

Anybody who may ask the server may give pairs, so they are believed with measure. A row that cannot be read is written
down and costs no other. Of the others at most `share` of all training pairs are taken: those that a person reviewed
first, then by turns one of each giver, so that thousands of rows of one key leave room for two of another. Whose turn
it is, and which of their rows, goes by hashes of the ids: a new row displaces one at most.

Not promised: that a kept pair is right. Without API keys all rows are of one giver, and who has many keys has many
turns.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipeline.ingest import files, shapes
from pipeline.ingest.own_files import Intake
from pipeline.ingest.records import Pair
from pipeline.ingest.tool_calls import RowError
from pipeline.run.device import stable_hash
from pipeline.run.tracking import say

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
class Given:
    """A pair, and whether somebody has looked at it since."""

    pair: Pair
    reviewed: bool


def pairs(path: Path, config: FeedbackConfig, others: int, rejected: Path) -> tuple[list[Pair], dict[str, Any]]:
    """The pairs to train on beside `others`, in the order of the file, and what became of every row; none without the
    file.

    `rejected`: the JSONL file for what cannot be read (file, line, field, reason).
    """
    counts: Counter[str] = Counter()
    given = list(_read(path, rejected, counts)) if path.is_file() and path.stat().st_size else []
    accepted = [one for one in given if one.reviewed or config.accept == "all"]
    kept = _chosen(accepted, int(config.share * others / (1 - config.share) + 1e-9))
    by = Counter(pair.given_by or "nobody named" for pair in kept)
    told = {
        "rows": counts.total() + len(given),
        "kept": len(kept),
        "duplicates": counts["duplicates"],
        "rejected": counts["rejected"],
        "not_reviewed": len(given) - len(accepted),
        "over_share": len(accepted) - len(kept),
        "kept_by": dict(sorted(by.items())),
    }
    if told["rows"]:
        say(
            f"feedback: {told['kept']} of {told['rows']} rows are trained on, of {len(by)} givers; {told['rejected']}"
            f" cannot be read, {told['not_reviewed']} are not reviewed, {told['over_share']} are over"
            f" {config.share:.0%} of the pairs"
        )
    return kept, told


def _read(path: Path, rejected: Path, counts: Counter[str]) -> Iterable[Given]:
    """The rows that can be read; what became of the others goes into `counts`."""
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
                    yield Given(replace(record, source=SOURCE), row.get("reviewed") is True)
        counts.update(duplicates=intake.num_duplicates, rejected=intake.num_rejected)


def _chosen(given: list[Given], most: int) -> list[Pair]:
    """At most so many: reviewed ones first, then by turns one of each giver."""
    if len(given) <= most:
        return [one.pair for one in given]
    turns: Counter[tuple[bool, str]] = Counter()
    ranked: list[tuple[bool, int, int, int]] = []  # not reviewed, turn, hash of the giver, place
    for place in sorted(range(len(given)), key=lambda place: stable_hash("feedback", given[place].pair.id)):
        one, giver = given[place], given[place].pair.given_by or ""
        ranked.append((not one.reviewed, turns[one.reviewed, giver], stable_hash("giver", giver), place))
        turns[one.reviewed, giver] += 1
    return [given[place].pair for place in sorted(place for *_, place in sorted(ranked)[:most])]
