"""The first figure of the report: the chain from corpus to deployed model.

    metrics of a run, costs -> `steps`: a row for each stage of the chain that was built: its result on held-out data
                                        with an interval, the change from the previous model, and its time
                            -> `kept`: how well each model in the chain retains what the others learned

A stage's own result is the metric it exists to improve (MEASURES). A change is colored only if it is statistically
significant (report/claims.py). Shades compare the models within a row.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.report import claims
from pipeline.report.metrics import HEADLINES, Cost, Headline, MetricsRun, lookup
from pipeline.run.types import JsonObject

CHAIN = ("corpus", "tokenizer", "language", "code", "tools", "reward", "rlhf", "deploy")
MEASURES = {"language": "stories_pass", "code": "code_bpb", "tools": "medium", "reward": "pairs"}  # keys of HEADLINES
KEPT = ("text_bpb", "stories_pass", "code_bpb", "easy", "medium", "requests", "ast")
SHADES = (0.5, 0.85, 0.97)  # cells get darker at these fractions of the row's best: classes h1 to h4 of the page
BAR, THICK = 120, 10  # width and height of the bars, pixels


@dataclass(frozen=True)
class ChainStage:
    """One stage of the chain, as text for the page."""

    stage: str
    title: str = ""  # of the result
    value: str = ""
    interval: str = ""
    bar: str = ""  # an `<svg>` with a share and its interval
    change: str = ""
    against: str = ""  # the interval of the change, and the model that it is measured against
    kind: str = ""  # better, worse: the color of the change
    seconds: float | None = None  # None: built elsewhere
    spent: str = ""  # an `<svg>`: the time relative to the longest stage's


def steps(run: MetricsRun, costs: list[Cost]) -> list[ChainStage]:
    """The stages of the chain that were built, in order."""
    seconds = {cost.stage: cost.speed["seconds"] for cost in costs if "seconds" in cost.speed}
    longest = max((seconds.get(name, 0.0) for name in CHAIN), default=0.0)
    found = []
    for number, name in enumerate(CHAIN):
        if name not in run.stages:
            continue
        took = seconds.get(name)
        bar = _bar(0.0, took / longest) if took and longest else ""
        found.append(ChainStage(stage=name, **_result(run, name, CHAIN[:number]), seconds=took, spent=bar))
    return found


def _result(run: MetricsRun, name: str, before: tuple[str, ...]) -> dict[str, str]:
    """Title, value, interval, bar, change and kind of a stage's result."""
    numbers = run.stages[name]
    match name:
        case "corpus":
            megabytes = {kind: numbers[kind]["bytes"]["train"] / 1e6 for kind in ("text", "code") if kind in numbers}
            return {"title": "Data", "value": ", ".join(f"{size:.1f} MB of {kind}" for kind, size in megabytes.items())}
        case "tokenizer":
            rates = numbers.get("bytes_per_token", {})
            return {
                "title": "Bytes per token",
                "value": ", ".join(f"{kind} {rate:.2f}" for kind, rate in rates.items()),
            }
        case "rlhf":
            return _gain(numbers.get("held_out", {}))
        case "deploy":
            kinds = ", ".join(numbers.get("parity", {}))
            return {"title": f"Exports verified against {numbers.get('model')}", "value": kinds}
    headline = next((h for h in HEADLINES if h.key == MEASURES.get(name)), None)
    measured = headline and lookup(run.evaluations.get(name, {}), headline)
    if headline is None or not measured:
        return {}
    shown = {"title": headline.title, "value": headline.show(measured["value"])}
    if "low" in measured:
        shown["interval"] = f"{headline.show(measured['low'])} to {headline.show(measured['high'])}"
        if headline.unit == "share":
            shown["bar"] = _bar(measured["low"], measured["high"], measured["value"])
    return shown | _change(run, headline, name, before)


def _gain(held_out: Mapping[str, float]) -> dict[str, str]:
    """The gain from reinforcement learning in the true score that the reward model approximates."""
    numbers = [held_out.get(f"gain{end}") for end in ("", "_low", "_high")]
    if not all(isinstance(number, int | float) for number in numbers):
        return {}
    value, low, high = (f"{number:+.3f}" for number in numbers)
    return {"title": "Gain in true score over the initial policy", "value": value, "interval": f"{low} to {high}"}


def _change(run: MetricsRun, headline: Headline, name: str, before: tuple[str, ...]) -> dict[str, str]:
    """The change from the nearest previous model that has the measure."""
    for base in reversed(before):
        if lookup(run.evaluations.get(base, {}), headline) is None:
            continue
        old, new = claims.of_model(run, base), claims.of_model(run, name)
        change = claims.change(headline, old, new) if old and new else None
        if change is not None:
            shown = headline.show_change(change.after - change.before)
            interval = "" if change.low is None else change.shown.removeprefix(shown).strip()
            return {"change": shown, "against": f"{interval} vs. {base}".strip(), "kind": change.kind}
    return {}


def kept(run: MetricsRun) -> JsonObject:
    """`models`, and `rows` with a title and a cell (text, shade) per model, for measures of at least two models."""
    models = [name for name in CHAIN if name != "reward" and name in run.evaluations]
    rows = []
    for headline in (h for h in HEADLINES if h.key in KEPT):
        values = [(lookup(run.evaluations[name], headline) or {}).get("value") for name in models]
        known = [value for value in values if value is not None]
        if len(known) < 2:
            continue
        cells = [{"text": "–" if v is None else headline.show(v), "shade": _shade(headline, v, known)} for v in values]
        rows.append({"title": headline.title, "axis": headline.axis, "cells": cells})
    return {"models": models, "rows": rows}


def _shade(headline: Headline, value: float | None, known: list[float]) -> int:
    """A shade from 1 to 4, by how close a value is to the best in its row; 0 if there is no value."""
    if value is None:
        return 0
    best = max(known) if headline.higher_is_better else min(known)
    part = (value / best if headline.higher_is_better else best / value) if best and value else float(value == best)
    return 1 + sum(part >= least for least in SHADES)


def _bar(low: float, high: float, value: float | None = None) -> str:
    """A bar from `low` to `high`, as fractions of the width, with a mark at `value`."""
    left, width = BAR * low, max(1.0, BAR * (high - low))
    mark = "" if value is None else f'<circle cx="{BAR * value:.1f}" cy="{THICK / 2:g}" r="3.5"/>'
    return (
        f'<svg class="bar" viewBox="-4 0 {BAR + 8} {THICK}" width="{BAR + 8}" height="{THICK}" aria-hidden="true">'
        f'<path d="M0 {THICK / 2:g}H{BAR}"/>'
        f'<rect x="{left:.1f}" y="2" width="{width:.1f}" height="{THICK - 4}" rx="2"/>{mark}</svg>'
    )
