"""The report's part on masked-diffusion models: how an answer came to be, and what fewer forward passes cost.

metrics/traces/<model>.json   -> each token of a canvas with the step that uncovered it, and a few moments between
metrics/eval/<model>.json     -> pass@1 against forward passes
"""

from typing import Any

from pipeline.report import charts

SHADES = 5
FRAMES = 4  # moments that are shown of a canvas
MASK = "░"
MOST = 2  # prompts of a model


def shown(model: str, trace: dict[str, Any]) -> dict[str, Any]:
    """A model's trace as the page shows it."""
    return {"model": model, "prompts": [canvas(one) for one in trace["prompts"][:MOST]]}


def canvas(one: dict[str, Any]) -> dict[str, Any]:
    """One prompt: its tokens with their steps, up to the end of the answer, and moments of the whole canvas."""
    when: dict[int, tuple[int, float]] = {}
    for number, step in enumerate(one["steps"], start=1):
        when |= {place: (number, sure) for place, _, _, sure in step["committed"]}
    last = max((step for step, _ in when.values()), default=1)
    tokens = []
    for place in range(min(len(one["canvas"]), one["length"] + 1)):
        text = one["canvas"][place]
        step, sure = when.get(place, (last, 0.0))
        shade = min(SHADES - 1, SHADES * (step - 1) // last)
        tokens.append(
            {"text": text.replace("\n", "⏎"), "line": "\n" in text, "step": step, "sure": f"{sure:.2f}", "shade": shade}
        )
    frames = [frame(one, round(last * (n + 1) / FRAMES)) for n in range(FRAMES)]
    return {"id": one["id"], "prompt": one["prompt"], "tokens": tokens, "frames": frames}


def frame(one: dict[str, Any], step: int) -> dict[str, Any]:
    """The canvas after a step; what is masked still is a shade."""
    open_: dict[int, str] = {}
    for done in one["steps"][:step]:
        for place in done["remasked"]:
            open_.pop(place, None)
        open_ |= {place: text for place, _, text, _ in done["committed"]}
    return {"step": step, "text": "".join(open_.get(place, MASK) for place in range(one["length"] + 1))}


def figures(evaluations: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """pass@1 against forward passes of each masked-diffusion model: a fixed number of tokens a step, and thresholds."""
    found = []
    for model, numbers in evaluations.items():
        told = {name: one for name, one in numbers.get("quality", {}).items() if isinstance(one, dict)}
        kinds = {"tokens a step": " a step", "thresholds": "threshold"}
        series = []
        for title, sign in kinds.items():
            points = sorted(
                (one["forwards"], one["pass_at_1"])
                for name, one in told.items()
                if sign in name and "cache" not in name
            )
            if points:
                series.append(charts.Series(title, points))
        if not series:
            continue
        rows = [
            [
                name,
                f"{one['forwards']:.1f}",
                f"{one['pass_at_1']:.3f}",
                f"{one['pass_at_1_low']:.3f} to {one['pass_at_1_high']:.3f}",
            ]
            for name, one in told.items()
        ]
        title = f"Quality against forward passes: {model}"
        svg = charts.lines(title, series, x="forward passes an answer", y="pass@1")
        found.append({"title": title, "svg": svg, "head": ["", "passes", "pass@1", "95 %"], "rows": rows})
    return found
