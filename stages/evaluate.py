"""Stage evaluate: the same measurements for every checkpoint, on held-out data, with intervals.

    models/<model>, data/{raw,dialogues,problems,facts,benchmarks} -> metrics/eval/<model>.{json,jsonl,csv}
    models/reward, data/preferences                              -> the same

json: the numbers. jsonl: a row per item with what the model answered. csv: curves. Generated code runs in the sandbox
and nowhere else; where there is none, the problems say "skipped: no sandbox". Test sets that `benchmarks` names
(HumanEval, MBPP, BFCL) are read before anything is measured, so that a wrong file stops the stage at once.

A causal model is measured by the suites that its work asks for (evaluation/suites.py), or with `every_suite` by all of
them.

A suite that is done is kept in the work folder under a digest of what it read: a killed evaluation goes on after it,
and another file in `benchmarks` costs only itself.

A masked-diffusion model answers the same problems on canvases, and has measurements of its own (diffusion/measure.py);
what only decoding from the left can do (stories, tool calls, gaps, the named test sets) it is not asked. A canvas takes
many forward passes over all its places, so this is done in the precision of training, which `settings` tells.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet

from pipeline.diffusion import files
from pipeline.diffusion import measure as diffusion_measure
from pipeline.diffusion.measure import CanvasSettings, CanvasSubject
from pipeline.evaluation import benchmarks as evaluation_benchmarks
from pipeline.evaluation import preferences as evaluation_preferences
from pipeline.evaluation import suites
from pipeline.evaluation import tools as evaluation_tools
from pipeline.evaluation.suites import Settings, Subject, SuiteResult
from pipeline.ingest.records import Dialogue, Problem, Text, read
from pipeline.memory import measure as memory_measure
from pipeline.model import checkpoint
from pipeline.model.config import read_config
from pipeline.run import device
from pipeline.run.config import block, main
from pipeline.run.errors import ConfigError
from pipeline.run.stage import ANY
from pipeline.run.tracking import progress, say, write_curve, write_json
from pipeline.run.workdir import Job
from pipeline.sandbox.judge import Judge, SandboxConfig
from pipeline.synthetic import drills, stories
from pipeline.synthetic import tools as synthetic_tools

FAMILIES = frozenset(stories.FAMILIES)
BENCHMARKS = Path("data/benchmarks")
DATA = {
    "text": "data/raw/text",
    "code": "data/raw/code",
    "dialogues": "data/dialogues",
    "problems": "data/problems",
    "facts": "data/facts",
    "benchmarks": str(BENCHMARKS),
}


@dataclass(frozen=True, kw_only=True)
class Params:
    """The block `evaluate`."""

    settings: Settings
    canvas: CanvasSettings = field(default_factory=CanvasSettings)
    every_suite: bool = False
    """Measure each causal model by all suites, also those that its work does not ask for."""
    benchmarks: list[str] = field(default_factory=list)
    """Files of data/benchmarks/ to score: HumanEval, MBPP, BFCL."""
    sandbox: SandboxConfig = block("sandbox")

    def __post_init__(self) -> None:
        names = [evaluation_benchmarks.stem(Path(name)) for name in self.benchmarks]
        for name in self.benchmarks:
            if not Path(name).is_relative_to(BENCHMARKS) or ".." in Path(name).parts:
                raise ValueError(
                    f"benchmarks: expected files of {BENCHMARKS}, which DVC watches, got {name!r}; for a file from "
                    "elsewhere: python -m pipeline.evaluation.benchmarks MODEL_DIR FILE"
                )
        if len(set(names)) < len(names):
            raise ValueError(f"benchmarks: expected files of different names, got {', '.join(names)}")


def run(
    params: Params,
    job: Job,
    *,
    model: Path,
    summary: Path,
    items: Path,
    curves: Path,
    preferences: Path | None = None,
    **data: Path,
) -> None:
    """Measure `model` and write the three files."""
    if preferences is not None:  # a reward model reads pairs and nothing else
        pairs = preferences / "test.jsonl"
        plan: dict[str, Callable[[], SuiteResult]] = {"reward": lambda: evaluation_preferences.pairs_told(model, pairs)}
        said, hardware = dict[str, Any](), device.hardware("fp32")
    else:
        plan, said, hardware = measurements(params, job, model, **data)
    limits = said | {"sandbox": asdict(params.sandbox)}
    numbers: dict[str, Any] = {}
    rows: list[dict[str, Any]] = []
    with progress(total=len(plan), desc=job.name, unit="suite") as bar:
        for name, suite in plan.items():
            bar.note(name)
            with hardware.autocast():
                result = evaluation_benchmarks.suite(job, name, limits, suite)
            numbers[name.split()[0]] = numbers.get(name.split()[0], {}) | result.numbers
            rows += result.rows
            bar.update()
    write_json(summary, {**numbers, "settings": said | {"data_seed": job.seed}, "lineage": job.lineage})
    items.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    write_curve(curves, curve_rows(numbers))


def measurements(
    params: Params,
    job: Job,
    model: Path,
    *,
    text: Path,
    code: Path,
    dialogues: Path,
    problems: Path,
    facts: Path,
    benchmarks: Path,
) -> tuple[dict[str, Callable[[], SuiteResult]], dict[str, Any], device.Hardware]:
    """The suites of a model that writes, by name; the settings they are taken at; and what on."""
    settings = params.settings
    sets = [evaluation_benchmarks.load(benchmarks / Path(name).relative_to(BENCHMARKS)) for name in params.benchmarks]
    masked = read_config(model).attention != "causal"
    subject = canvas_subject(model, params, job.seed) if masked else causal_subject(model, settings, job.seed)
    texts, sources = held_out(text), held_out(code)
    talks = list(read(dialogues / "test.jsonl", Dialogue))
    asked = list(read(problems / "test.jsonl", Problem))
    sandbox = partial(Judge, params.sandbox, job.workers, url=job.runtime.sandbox_url)
    if isinstance(subject, CanvasSubject):
        hardware = device.hardware(job.runtime.precision)
        subject.denoiser.to(hardware.device)
        said = asdict(subject.settings) | asdict(params.canvas) | {"precision": hardware.precision}
        if sets:
            say(
                f"{model.name}: {', '.join(params.benchmarks)} not scored: their prompts are for a model that decodes"
                " from the left"
            )
        plan = canvas_plan(subject, sources, asked[: params.canvas.canvas_problems], sandbox)
        if model.name not in params.canvas.canvas_curve:
            del plan["quality"]
        return plan, said, hardware
    plan = causal_plan(subject, texts, sources, talks, asked, sandbox)
    plan["facts"] = lambda: memory_measure.known(subject, facts)
    if not params.every_suite:
        plan = suites.of(model.name, plan)
    completes = model.name in evaluation_benchmarks.COMPLETES
    for one in sets:  # each for itself: another file costs no more than itself
        plan[f"benchmarks {one.name}"] = partial(
            evaluation_benchmarks.score, subject, [one], completes=completes, sandbox=sandbox
        )
    return plan, asdict(settings), device.hardware("fp32")


def causal_plan(
    subject: Subject,
    texts: list[Text],
    sources: list[Text],
    talks: list[Dialogue],
    asked: list[Problem],
    sandbox: Callable[[], Judge],
) -> dict[str, Callable[[], SuiteResult]]:
    """What a causal model is measured by. Numbers of suites whose names begin alike stand together."""
    most = subject.settings.documents
    prose, told, unseen = split_texts(texts)
    return {
        "text": lambda: suites.documents(subject, "text", prose[:most]),
        "stories": lambda: suites.documents(subject, "stories", told[:most]),
        "stories_held_out": lambda: suites.documents(subject, "stories_held_out", unseen[:most]),
        "drills": lambda: suites.documents(subject, "drills", of_source(texts, drills.SOURCE)[:most]),
        "transcripts": lambda: suites.documents(
            subject, "transcripts", of_source(texts, synthetic_tools.SOURCE)[:most]
        ),
        "stories sampled": lambda: suites.sampled_stories(subject, told),
        "code": lambda: suites.documents(subject, "code", sources[:most]),
        "code gaps": lambda: suites.gaps(subject, sources),
        "problems": lambda: solve(subject, asked, sandbox),
        "tools": lambda: evaluation_tools.called(subject, [d for d in talks if d.kind == "tools"]),
        "answers": lambda: suites.answered(subject, talks),
    }


def canvas_plan(
    subject: CanvasSubject, sources: list[Text], asked: list[Problem], sandbox: Callable[[], Judge]
) -> dict[str, Callable[[], SuiteResult]]:
    """What a masked-diffusion model is measured by."""
    return {
        "code": lambda: diffusion_measure.documents(subject, sources[: subject.settings.documents]),
        "problems": lambda: diffusion_measure.with_orders(solve(subject, asked, sandbox), subject, asked),
        "quality": lambda: solve(
            subject, asked, sandbox, partial(diffusion_measure.quality, only=diffusion_measure.CURVE)
        ),
    }


def causal_subject(model: Path, settings: Settings, seed: int) -> Subject:
    """A causal model, to be measured."""
    loaded, tokenizer = checkpoint.load(model)
    return Subject(loaded.train(False), tokenizer, settings, seed)


def canvas_subject(model: Path, params: Params, seed: int) -> CanvasSubject:
    """A masked-diffusion model, to be measured."""
    loaded, tokenizer = files.load(model)
    settings = replace(params.settings, samples=params.canvas.canvas_samples)
    return CanvasSubject(loaded.train(False).trunk, tokenizer, settings, seed, denoiser=loaded, canvas=params.canvas)


def solve(
    subject: Any,
    problems: list[Problem],
    sandbox: Callable[[], Judge],
    suite: Callable[[Any, list[Problem], Judge], SuiteResult] | None = None,
) -> SuiteResult:
    """A suite of problems (none: `suites.solved`), or why it was skipped."""
    try:
        with sandbox() as judge:
            return (suite or suites.solved)(subject, problems, judge)
    except ConfigError as error:
        say(f"problems are skipped: {error}")
        return SuiteResult({"skipped": "skipped: no sandbox"})


def held_out(corpus: Path) -> list[Text]:
    """The validation documents of a corpus, in file order."""
    found = []
    for path in sorted(corpus.glob("val-*.parquet")):
        found += [Text(**row) for row in pyarrow.parquet.read_table(path).to_pylist()]
    return found


def of_source(texts: list[Text], source: str) -> list[Text]:
    """The documents of one source."""
    return [text for text in texts if text.source == source]


def split_texts(texts: list[Text]) -> tuple[list[Text], list[Text], list[Text]]:
    """Prose, stories of families that were trained on, stories of families that were not."""
    prose = [t for t in texts if t.source not in FAMILIES and t.source not in (drills.SOURCE, synthetic_tools.SOURCE)]
    told = [t for t in texts if t.source in FAMILIES and t.source not in stories.HELD_OUT]
    return prose, told, [t for t in texts if t.source in stories.HELD_OUT]


def curve_rows(numbers: dict[str, Any]) -> list[dict[str, Any]]:
    """pass@k against k, where there are samples; of a masked-diffusion model pass@1 against forward passes."""
    found = []
    for k in suites.PASS_AT:
        value = numbers.get("problems", {}).get(f"pass_at_{k}")
        if value is not None:
            found.append(
                {
                    "step": k,
                    "curve": "pass_at_k",
                    "value": value,
                    "low": numbers["problems"][f"pass_at_{k}_low"],
                    "high": numbers["problems"][f"pass_at_{k}_high"],
                }
            )
    for name, one in numbers.get("quality", {}).items():
        if isinstance(one, dict):
            found.append(
                {
                    "step": one["forwards"],
                    "curve": f"quality: {name}",
                    "value": one["pass_at_1"],
                    "low": one["pass_at_1_low"],
                    "high": one["pass_at_1_high"],
                }
            )
    return found


def inputs_of(model: str) -> tuple[str, ...]:
    """What a model of this name is measured on."""
    return ("model", "preferences") if model == "reward" else ("model", *DATA)


if __name__ == "__main__":
    main(
        run,
        inputs={"model": "models/{item}", **DATA, "preferences": "data/preferences"},
        outs={
            "summary": "metrics/eval/{item}.json",
            "items": "metrics/eval/{item}.jsonl",
            "curves": "metrics/eval/{item}.csv",
        },
        seed="data_seed",
        items=ANY,
        of_item=inputs_of,
        metrics=None,
    )
