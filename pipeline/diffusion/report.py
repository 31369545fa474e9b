"""The report section on masked-diffusion models: how canvases were denoised, and the cost of fewer forward passes.

metrics/traces/<model>.json   -> each canvas token with the step that committed it, and a few snapshots in between
metrics/eval/<model>.json     -> pass@1 vs. forward passes
"""

from pipeline.report import card
from pipeline.report.metrics import MetricsRun
from pipeline.run.types import JsonObject

SHADES = 5
FRAMES = 4  # snapshots of a canvas
MASK = "░"
MAX_PROMPTS = 2  # per model
BETTER: tuple[tuple[str, str, str, str], ...] = ()
ABOVE: tuple[tuple[str, str, tuple[str, ...], float], ...] = (
    ("Diffusion-DPO ranks more held-out pairs correctly than its start", "diffusion_dpo", ("test", "gain"), 0.0),
    ("Coupled-GRPO raises pass@1 on held-out problems", "diffusion_grpo", ("held_out", "gain"), 0.0),
)
FOLDER: str = "traces"
TEMPLATE: str = (
    '{% if traces %}<h2 id="denoising">How the diffusion models write</h2>\n'
    "<p>At each step, the most confident masked token of a canvas is uncovered. Darker tokens were uncovered "
    "earlier; the number is the step. All answers are at temperature 0.</p>\n"
    "{% for trace in traces %}<h3>{{ trace.model }}</h3>\n"
    '{% for canvas in trace.prompts %}<div class="answers"><details><summary><code>{{ canvas.id }}</code>'
    "</summary><pre>{{ canvas.prompt }}</pre></details>\n"
    '<pre class="canvas">{% for token in canvas.tokens %}<span class="s{{ token.shade }}" title="step {{ '
    'token.step }}, {{ token.sure }}">{{ token.text }}<sub>{{ token.step }}</sub></span>{% if token.line %}\n'
    "{% endif %}{% endfor %}</pre>\n"
    '<ol class="frames">{% for frame in canvas.frames %}<li><small>after step {{ frame.step }}</small>'
    "<pre>{{ frame.text }}</pre></li>\n"
    "{% endfor %}</ol></div>\n"
    "{% endfor %}{% endfor %}{% endif %}"
)


def values(files: dict[str, JsonObject]) -> JsonObject:
    """The models' traces for the page."""
    return {
        "traces": [
            {"model": model, "prompts": [canvas(prompt) for prompt in trace["prompts"][:MAX_PROMPTS]]}
            for model, trace in files.items()
        ]
    }


def canvas(prompt: JsonObject) -> JsonObject:
    """One prompt: its tokens with their steps, up to the end of the answer, and snapshots of the entire canvas."""
    commits: dict[int, tuple[int, float]] = {}  # position -> step, probability
    for number, step in enumerate(prompt["steps"], start=1):
        commits |= {position: (number, probability) for position, _, _, probability in step["committed"]}
    last = max((step for step, _ in commits.values()), default=1)
    tokens = []
    for position in range(min(len(prompt["canvas"]), prompt["length"] + 1)):
        text = prompt["canvas"][position]
        step, probability = commits.get(position, (last, 0.0))
        tokens.append(
            {
                "text": text.replace("\n", "⏎"),
                "line": "\n" in text,
                "step": step,
                "sure": f"{probability:.2f}",
                "shade": min(SHADES - 1, SHADES * (step - 1) // last),
            }
        )
    frames = [frame(prompt, round(last * (n + 1) / FRAMES)) for n in range(FRAMES)]
    return {"id": prompt["id"], "prompt": prompt["prompt"], "tokens": tokens, "frames": frames}


def frame(prompt: JsonObject, step: int) -> JsonObject:
    """The canvas after a step, with `MASK` for masked tokens."""
    texts: dict[int, str] = {}
    for done in prompt["steps"][:step]:
        for position in done["remasked"]:
            texts.pop(position, None)
        texts |= {position: text for position, _, text, _ in done["committed"]}
    return {"step": step, "text": "".join(texts.get(position, MASK) for position in range(prompt["length"] + 1))}


def figures(run: MetricsRun) -> list[JsonObject]:
    """pass@1 vs. forward passes for each masked-diffusion model: fixed numbers of tokens per step, and thresholds."""
    results = []
    for model, numbers in run.evaluations.items():
        quality = {name: metrics for name, metrics in numbers.get("quality", {}).items() if isinstance(metrics, dict)}
        series = []
        for title, part in {"tokens a step": " a step", "thresholds": "threshold"}.items():
            points = sorted(
                (metrics["forwards"], metrics["pass_at_1"])
                for name, metrics in quality.items()
                if part in name and "cache" not in name
            )
            if points:
                series.append(card.Series(title, points))
        if not series:
            continue
        rows = [
            [
                name,
                f"{metrics['forwards']:.1f}",
                f"{metrics['pass_at_1']:.3f}",
                f"{metrics['pass_at_1_low']:.3f} to {metrics['pass_at_1_high']:.3f}",
            ]
            for name, metrics in quality.items()
        ]
        title = f"Quality vs. forward passes: {model}"
        svg = card.lines(title, series, x="forward passes per answer", y="pass@1")
        results.append({"title": title, "svg": svg, "head": ["", "passes", "pass@1", "95%"], "rows": rows})
    return results
