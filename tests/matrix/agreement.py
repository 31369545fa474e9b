"""Our scores next to those of another harness, item by item, with the reason for each item that differs.

    both results for each item -> `Item` -> `Comparison` for a task -> the section of docs/clients.md, and failures

A difference has a reason if a known cause is shown to hold for that item: another way to extract code from an answer,
a tolerance, the tools' grammar. A difference without a reason is a failure. The report also shows the prompts, where
answers end and how they are decoded, since these explain most differences between published scores.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

CLOSE = 1e-3  # nats, between two sums of log-probabilities in float32
SHOWN = 160  # characters of a prompt, and of the result for an item


@dataclass(frozen=True)
class Item:
    """Both results for one item. `reason` is "" if they agree or if nothing explains the difference."""

    id: str
    ours: str
    theirs: str
    right_ours: bool
    right_theirs: bool
    agrees: bool
    reason: str = ""


@dataclass(frozen=True)
class Protocol:
    """How the questions were asked and answered."""

    prompt: str  # of one item, as text
    stop: str
    decoding: str


@dataclass(frozen=True)
class Comparison:
    """A task of a harness. `absent`: why it did not run, and what to do; `failed`: the error that ended it."""

    harness: str
    task: str
    versions: str = ""
    items: Sequence[Item] = ()
    ours: Protocol | None = None
    theirs: Protocol | None = None
    absent: str = ""
    failed: str = ""

    @property
    def differing(self) -> list[Item]:
        return [item for item in self.items if not item.agrees]

    @property
    def unexplained(self) -> list[Item]:
        return [item for item in self.differing if not item.reason]


def failures(comparisons: Sequence[Comparison]) -> list[str]:
    """A line for each difference without a reason, and for each task without items that should have run."""
    found = []
    for comparison in comparisons:
        name = f"{comparison.harness}, {comparison.task}"
        if not comparison.items and not comparison.absent:
            found.append(f"{name}: {comparison.failed or 'no items'}")
        found += [f"{name}, {item.id}: ours {item.ours}; theirs {item.theirs}" for item in comparison.unexplained]
    return found


def told(comparisons: Sequence[Comparison]) -> list[str]:
    """A run's summary for a reader: one line for each task, and each item that differs, with its reason."""
    lines = []
    for comparison in comparisons:
        name = f"{comparison.harness}, {comparison.task}"
        if comparison.absent or comparison.failed:
            lines.append(f"{name}: {comparison.absent or comparison.failed}")
            continue
        agreeing = sum(item.agrees for item in comparison.items)
        lines.append(
            f"{name}: {agreeing} of {len(comparison.items)} items agree; correct: ours"
            f" {_right(comparison, ours=True)}, theirs {_right(comparison, ours=False)}"
        )
        shown = comparison.differing if len(comparison.differing) <= 20 else comparison.unexplained
        for item in shown:
            lines.append(f"  {item.id}: ours {item.ours}; theirs {item.theirs}: {item.reason or 'NO REASON FOUND'}")
        if shown != comparison.differing:
            counts = Counter(item.reason for item in comparison.differing if item.reason)
            lines += [f"  {count} items: {reason}" for reason, count in counts.most_common()]
    return lines


# -- items -------------------------------------------------------------------------------------------------------------


def choices(ours: Sequence[dict[str, Any]], theirs: Sequence[dict[str, Any]]) -> list[Item]:
    """Items of a multiple-choice task: {id, logprobs, acc, acc_norm} each. All log-probabilities must agree too."""
    items = []
    for own, other in _pairs(ours, theirs):
        far = max(abs(a - b) for a, b in zip(own["logprobs"], other["logprobs"], strict=True))
        same = own["acc"] == other["acc"] and own["acc_norm"] == other["acc_norm"]
        items.append(
            Item(own["id"], _scored(own), _scored(other), own["acc"] == 1, other["acc"] == 1, same and far <= CLOSE)
        )
    return items


def texts(ours: Sequence[dict[str, Any]], theirs: Sequence[dict[str, Any]]) -> list[Item]:
    """Items of a task that generates: {id, text, exact_match} each. The texts must be equal."""
    return [
        Item(
            own["id"],
            repr(own["text"])[:SHOWN],
            repr(other["text"])[:SHOWN],
            own["exact_match"] == 1,
            other["exact_match"] == 1,
            own["text"] == other["text"] and own["exact_match"] == other["exact_match"],
        )
        for own, other in _pairs(ours, theirs)
    ]


def verdicts(ours: Sequence[dict[str, Any]], theirs: Sequence[dict[str, Any]]) -> list[Item]:
    """Items that are right or wrong: {id, right, found} each. `ours` also has `causes`: (reason, whether it holds);
    the first reason that holds explains a difference.
    """
    items = []
    for own, other in _pairs(ours, theirs):
        agrees = own["right"] == other["right"]
        reason = "" if agrees else next((reason for reason, holds in own["causes"] if holds), "")
        items.append(
            Item(own["id"], own["found"][:SHOWN], other["found"][:SHOWN], own["right"], other["right"], agrees, reason)
        )
    return items


def _pairs(ours: Sequence[dict[str, Any]], theirs: Sequence[dict[str, Any]]) -> list[tuple[dict[str, Any], Any]]:
    by_id = {row["id"]: row for row in theirs}
    if len(by_id) != len(theirs) or set(by_id) != {row["id"] for row in ours}:
        raise ValueError(
            f"expected the same items on both sides, found {len(ours)} of ours and {len(theirs)} of theirs;"
            f" on one side only: {sorted(set(by_id) ^ {row['id'] for row in ours})[:5]}"
        )
    return [(row, by_id[row["id"]]) for row in ours]


def _scored(row: dict[str, Any]) -> str:
    values = ", ".join(f"{value:.4f}" for value in row["logprobs"])
    return f"acc {row['acc']:g}, acc_norm {row['acc_norm']:g}, log-probabilities {values}"


# -- report ------------------------------------------------------------------------------------------------------------


def section(comparisons: Sequence[Comparison]) -> str:
    """Tables of the tasks' scores and of the protocols, and a list of the items that differ."""
    lines = [
        "| harness | task | items | agree | ours correct | theirs correct | differ, explained | differ, unexplained |",
        "|---" * 8 + "|",
    ]
    for comparison in comparisons:
        name = f"{comparison.harness} {comparison.versions}".strip()
        if comparison.absent or comparison.failed:
            what = f"not run: {comparison.absent}" if comparison.absent else "FAIL"
            lines.append(f"| {name} | {comparison.task} | {what} | | | | | |")
            continue
        unexplained = len(comparison.unexplained)
        lines.append(
            f"| {name} | {comparison.task} | {len(comparison.items)}"
            f" | {sum(item.agrees for item in comparison.items)} | {_right(comparison, ours=True)}"
            f" | {_right(comparison, ours=False)} | {len(comparison.differing) - unexplained} | {unexplained} |"
        )
    lines += ["", "| task | whose | example prompt | stop | decoding |", "|---|---|---|---|---|"]
    for comparison in comparisons:
        asked = comparison.theirs.prompt if comparison.theirs is not None else ""
        for whose, protocol in (("theirs", comparison.theirs), ("ours", comparison.ours)):
            if protocol is not None:
                prompt = "the same" if whose == "ours" and protocol.prompt == asked else _cell(protocol.prompt)
                stop = protocol.stop.replace("|", "\\|")
                cells = (comparison.task, whose, prompt, stop, protocol.decoding)
                lines.append(f"| {' | '.join(cells)} |")
    reasons = Counter(
        (comparison.task, item.reason or "**no reason found**")
        for comparison in comparisons
        for item in comparison.differing
    )
    if reasons:
        lines += ["", "Items that differ (task, number of items, reason):", ""]
        for (task, reason), count in reasons.items():
            first = next(
                item
                for comparison in comparisons
                if comparison.task == task
                for item in comparison.differing
                if (item.reason or "**no reason found**") == reason
            )
            verdicts = ", theirs ".join(
                "correct" if right else "incorrect" for right in (first.right_ours, first.right_theirs)
            )
            lines.append(f"- {task}, {count}: {reason} (for example `{first.id}`: ours {verdicts})")
    return "\n".join(lines) + "\n"


def _right(comparison: Comparison, *, ours: bool) -> str:
    right = sum(item.right_ours if ours else item.right_theirs for item in comparison.items)
    return f"{right} ({right / len(comparison.items):.1%})" if comparison.items else "0"


def _cell(text: str) -> str:
    """A string as code in a table cell: one line, with its middle cut out, since prompts differ at both ends."""
    line = text.replace("\n", "\\n").replace("|", "\\|").replace("`", "'")
    half = SHOWN // 2
    return f"`{line if len(line) <= SHOWN else line[:half] + ' ... ' + line[-half:]}`"
