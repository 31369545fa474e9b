"""The numbers that stand at the top of the report and in the table at the end of `make`."""

from dataclasses import dataclass, field
from typing import Any

Row = dict[str, Any]


@dataclass(frozen=True)
class Headline:
    """One number of metrics/eval/<model>.json, with its `_low` and `_high` beside it."""

    path: tuple[str, ...]
    title: str
    axis: str
    unit: str  # "share" is shown in per cent
    higher_is_better: bool
    key: str  # its name in reports/headlines/, which `dvc metrics show` and `dvc exp show` print
    chart: bool = False
    rows: tuple[str, str] | None = None  # of metrics/eval/<model>.jsonl: the suite, and what each item counts
    group: str | None = None  # of these rows
    asked: dict[str, str | int] = field(
        default_factory=dict, hash=False
    )  # of a number that no row counts: which rows it is over

    def show(self, value: float) -> str:
        """The value as people read it."""
        return f"{100 * value:.1f} %" if self.unit == "share" else f"{value:.3f}"

    def show_change(self, difference: float) -> str:
        """A difference of two values; of shares in percentage points."""
        sign = "+" if difference >= 0 else "−"
        amount = abs(difference)
        return f"{sign}{100 * amount:.1f} points" if self.unit == "share" else f"{sign}{amount:.3f}"

    @property
    def suite(self) -> str:
        """Whose items it is measured over."""
        return self.rows[0] if self.rows else self.path[0]

    def items(self, rows: list[Row]) -> dict[str, Row]:
        """The rows that it is measured over, by what makes an item: its id, and the hash of what was asked where a row has it."""
        wanted = {"suite": self.suite} | self.asked | ({"group": self.group} if self.group else {})
        mine = (r for r in rows if wanted.items() <= r.items())
        if self.rows:
            mine = (r for r in mine if isinstance(r.get(self.rows[1]), int | float))
        return {f"{r['id']} {r['item']}" if "item" in r else str(r["id"]): r for r in mine}

    def counted(self, row: Row) -> tuple[float, float]:
        """What an item adds above and below the line: bits and bytes, or right and 1."""
        assert self.rows, "only a number that rows count is a sum over them"
        key = self.rows[1]
        return float(row[key]), float(row["bytes"]) if key.endswith("bits") else 1.0


BITS = "bits per byte, lower is better"
STORIES, SOLVED = "share of sampled stories", "share of problems solved"
HEADLINES = (
    Headline(("text", "bpb"), "Running text", BITS, "bits per byte", False, "text_bpb", True, rows=("text", "bits")),
    Headline(("stories", "bpb"), "Stories", BITS, "bits per byte", False, "stories_bpb", rows=("stories", "bits")),
    Headline(("stories", "story_rate"), "Stories that pass every clause", STORIES, "share", True, "stories_pass",
             rows=("stories", "right")),
    Headline(("stories", "end_rate"), "Stories that end", STORIES, "share", True, "stories_end", rows=("stories", "ended")),
    Headline(("code", "bpb"), "Source code", BITS, "bits per byte", False, "code_bpb", True, rows=("code", "bits")),
    Headline(("code", "bpb_bound"), "Source code, upper bound", BITS, "bits per byte", False, "code_bpb_bound",
             rows=("code", "bound_bits")),
    Headline(("problems", "parse_rate"), "Answers whose code parses", "share of problems", "share", True, "parse",
             rows=("problems", "parses")),
    Headline(("problems", "easy", "pass_at_1"), "Easy problems, pass@1", SOLVED, "share", True, "easy", True,
             rows=("problems", "sampled"), group="easy"),
    Headline(("problems", "medium", "pass_at_1"), "Unseen compositions, pass@1", SOLVED, "share", True, "medium",
             rows=("problems", "sampled"), group="medium"),
    Headline(("tools", "ast"), "Tool calls right (AST)", "share of calls right", "share", True, "ast", True,
             asked={"wanted": "call"}),
    Headline(("tools", "ast_constrained"), "The same under the tools' grammar", "share of calls right", "share", True, "ast_grammar",
             asked={"wanted": "call", "constrained": 1}),
    Headline(("tools", "ast_unseen_tool"), "Calls of unseen tools right", "share of calls right", "share", True, "ast_unseen",
             asked={"wanted": "call", "tool": "unseen"}),
    Headline(("tools", "false_call_rate"), "False calls", "share of prompts without a fitting tool", "share", False, "false_calls",
             asked={"wanted": "nothing"}),
    Headline(("facts", "exact_match"), "Facts by heart", "share of questions answered right", "share", True, "facts",
             rows=("facts", "right")),
    Headline(("reward", "accuracy"), "The better of two answers", "share of pairs told right", "share", True, "pairs",
             rows=("reward", "right")),
)  # fmt: skip


def short(numbers: dict[str, Any]) -> dict[str, float]:
    """key -> value of the headlines that a model has: a file that people read as one line of a table."""
    found = ((headline.key, lookup(numbers, headline)) for headline in HEADLINES)
    return {key: round(measured["value"], 4) for key, measured in found if measured is not None}


def lookup(numbers: dict[str, Any], headline: Headline) -> dict[str, float] | None:
    """{"value"} of a headline, with {"low", "high"} where it has an interval; None where the model has no such number."""
    place: Any = numbers
    for key in headline.path[:-1]:
        place = place.get(key) if isinstance(place, dict) else None
    last = headline.path[-1]
    if not isinstance(place, dict) or not isinstance(place.get(last), int | float):
        return None
    low, high = (place.get(f"{last}_{side}") for side in ("low", "high"))  # may be "not finite"
    interval = {"low": low, "high": high} if isinstance(low, int | float) and isinstance(high, int | float) else {}
    return {name: float(number) for name, number in ({"value": place[last]} | interval).items()}
