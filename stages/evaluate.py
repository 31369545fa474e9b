"""Stage evaluate: the same measurements for every checkpoint, on held-out data, with intervals.

    models/<model>, data/{raw,dialogues,problems,facts,benchmarks} -> metrics/eval/<model>.{json,jsonl,csv}
    models/reward, data/preferences                                -> the same

json: the numbers. jsonl: a row for each item, with the model's answer. csv: curves. Generated code runs only in the
sandbox; without one the problems are "skipped: no sandbox". Test sets named in `benchmarks` (HumanEval, MBPP, BFCL) are
read before anything is measured, so that a wrong file stops the stage at once.

A causal model is measured by the suites of its purpose (evaluation/suites.py), or with `every_suite` by all of them. A
masked-diffusion model answers the same problems on canvases, and has measurements of its own (diffusion/measure.py);
suites that need decoding from the left (stories, tool calls, gaps, the named test sets) are left out. A canvas takes
many forward passes over all its positions, so this model is measured in the precision of training, which `settings`
records.

The result of each suite is cached in the work folder under a digest of its inputs: a killed evaluation resumes after
the last suite, and another file in `benchmarks` costs only its own time.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

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
from pipeline.run.tracking import Number, progress, say, write_curve, write_json
from pipeline.run.types import JsonObject
from pipeline.run.workdir import Job
from pipeline.sandbox.judge import Judge, SandboxConfig
from pipeline.synthetic import drills, stories
from pipeline.synthetic import tools as synthetic_tools

S = TypeVar("S", bound=Subject)
Plan = dict[str, Callable[[], SuiteResult]]  # numbers of suites with the same first word are merged
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
    """Measure each causal model by all suites, also those that are not for its purpose."""
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
        plan: Plan = {"reward": lambda: evaluation_preferences.pairs_told(model, pairs)}
        settings_used, hardware = JsonObject(), device.hardware("fp32")
    else:
        plan, settings_used, hardware = measurements(params, job, model, **data)
    limits = settings_used | {"sandbox": asdict(params.sandbox)}
    numbers: JsonObject = {}
    rows: list[JsonObject] = []
    with progress(total=len(plan), desc=job.name, unit="suite") as bar:
        for name, suite in plan.items():
            bar.note(name)
            with hardware.autocast():
                result = evaluation_benchmarks.suite(job, name, limits, suite)
            numbers[name.split()[0]] = numbers.get(name.split()[0], {}) | result.numbers
            rows += result.rows
            bar.update()
    write_json(summary, {**numbers, "settings": settings_used | {"data_seed": job.seed}, "lineage": job.lineage})
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
) -> tuple[Plan, JsonObject, device.Hardware]:
    """The suites of a model that generates text, their settings, and the hardware they run on."""
    settings = params.settings
    sets = [evaluation_benchmarks.load(benchmarks / Path(name).relative_to(BENCHMARKS)) for name in params.benchmarks]
    masked = read_config(model).attention != "causal"
    subject = canvas_subject(model, params, job.seed) if masked else causal_subject(model, settings, job.seed)
    texts, sources = held_out(text), held_out(code)
    dialogue_records = list(read(dialogues / "test.jsonl", Dialogue))
    problem_records = list(read(problems / "test.jsonl", Problem))
    sandbox = partial(Judge, params.sandbox, job.workers, url=job.runtime.sandbox_url)
    if isinstance(subject, CanvasSubject):
        hardware = device.hardware(job.runtime.precision)
        subject.denoiser.to(hardware.device)
        settings_used = asdict(subject.settings) | asdict(params.canvas) | {"precision": hardware.precision}
        if sets:
            say(
                f"{model.name}: {', '.join(params.benchmarks)} not scored: their prompts are for a model that decodes"
                " from the left"
            )
        plan = canvas_plan(subject, sources, problem_records[: params.canvas.canvas_problems], sandbox)
        if model.name not in params.canvas.canvas_curve:
            del plan["quality"]
        return plan, settings_used, hardware
    plan = causal_plan(subject, texts, sources, dialogue_records, problem_records, sandbox)
    plan["facts"] = lambda: memory_measure.known(subject, facts)
    if not params.every_suite:
        plan = suites.of(model.name, plan)
    completes = model.name in evaluation_benchmarks.COMPLETES
    for test_set in sets:  # a suite each: another file costs only its own time
        plan[f"benchmarks {test_set.name}"] = partial(
            evaluation_benchmarks.score, subject, [test_set], completes=completes, sandbox=sandbox
        )
    return plan, asdict(settings), device.hardware("fp32")


def causal_plan(
    subject: Subject,
    texts: list[Text],
    sources: list[Text],
    dialogues: list[Dialogue],
    problems: list[Problem],
    sandbox: Callable[[], Judge],
) -> Plan:
    """The suites of a causal model."""
    num_documents = subject.settings.documents
    prose, seen, unseen = split_texts(texts)
    return {
        "text": lambda: suites.documents(subject, "text", prose[:num_documents]),
        "stories": lambda: suites.documents(subject, "stories", seen[:num_documents]),
        "stories_held_out": lambda: suites.documents(subject, "stories_held_out", unseen[:num_documents]),
        "drills": lambda: suites.documents(subject, "drills", of_source(texts, drills.SOURCE)[:num_documents]),
        "transcripts": lambda: suites.documents(
            subject, "transcripts", of_source(texts, synthetic_tools.SOURCE)[:num_documents]
        ),
        "stories sampled": lambda: suites.sampled_stories(subject, seen),
        "code": lambda: suites.documents(subject, "code", sources[:num_documents]),
        "code gaps": lambda: suites.gaps(subject, sources),
        "problems": lambda: solve(subject, problems, sandbox),
        "tools": lambda: evaluation_tools.called(subject, [d for d in dialogues if d.kind == "tools"]),
        "answers": lambda: suites.answered(subject, dialogues),
    }


def canvas_plan(
    subject: CanvasSubject, sources: list[Text], problems: list[Problem], sandbox: Callable[[], Judge]
) -> Plan:
    """The suites of a masked-diffusion model."""
    return {
        "code": lambda: diffusion_measure.documents(subject, sources[: subject.settings.documents]),
        "problems": lambda: diffusion_measure.with_orders(solve(subject, problems, sandbox), subject, problems),
        "quality": lambda: solve(
            subject, problems, sandbox, partial(diffusion_measure.quality, only=diffusion_measure.CURVE)
        ),
    }


def causal_subject(model: Path, settings: Settings, seed: int) -> Subject:
    """A causal model as the subject of suites."""
    loaded, tokenizer = checkpoint.load(model)
    return Subject(loaded.train(False), tokenizer, settings, seed)


def canvas_subject(model: Path, params: Params, seed: int) -> CanvasSubject:
    """A masked-diffusion model as the subject of suites."""
    loaded, tokenizer = files.load(model)
    settings = replace(params.settings, samples=params.canvas.canvas_samples)
    return CanvasSubject(loaded.train(False).trunk, tokenizer, settings, seed, denoiser=loaded, canvas=params.canvas)


def solve(
    subject: S,
    problems: list[Problem],
    sandbox: Callable[[], Judge],
    suite: Callable[[S, list[Problem], Judge], SuiteResult] | None = None,
) -> SuiteResult:
    """The result of a suite of problems (None: `suites.solved`), or the reason it was skipped."""
    try:
        with sandbox() as judge:
            return (suite or suites.solved)(subject, problems, judge)
    except ConfigError as error:
        say(f"problems are skipped: {error}")
        return SuiteResult({"skipped": "skipped: no sandbox"})


def held_out(corpus: Path) -> list[Text]:
    """The validation documents of a corpus, in file order."""
    documents = []
    for path in sorted(corpus.glob("val-*.parquet")):
        documents += [Text(**row) for row in pyarrow.parquet.read_table(path).to_pylist()]
    return documents


def of_source(texts: list[Text], source: str) -> list[Text]:
    """The documents of one source."""
    return [text for text in texts if text.source == source]


def split_texts(texts: list[Text]) -> tuple[list[Text], list[Text], list[Text]]:
    """Prose, stories of families in the training data, stories of families that are held out."""
    prose = [t for t in texts if t.source not in FAMILIES and t.source not in (drills.SOURCE, synthetic_tools.SOURCE)]
    seen = [t for t in texts if t.source in FAMILIES and t.source not in stories.HELD_OUT]
    return prose, seen, [t for t in texts if t.source in stories.HELD_OUT]


def curve_rows(numbers: JsonObject) -> list[dict[str, Number]]:
    """pass@k against k, where there are samples; for a masked-diffusion model pass@1 against forward passes."""
    rows: list[dict[str, Number]] = []
    for k in suites.PASS_AT:
        value = numbers.get("problems", {}).get(f"pass_at_{k}")
        if value is not None:
            rows.append(
                {
                    "step": k,
                    "curve": "pass_at_k",
                    "value": value,
                    "low": numbers["problems"][f"pass_at_{k}_low"],
                    "high": numbers["problems"][f"pass_at_{k}_high"],
                }
            )
    for name, values in numbers.get("quality", {}).items():
        if isinstance(values, dict):
            rows.append(
                {
                    "step": values["forwards"],
                    "curve": f"quality: {name}",
                    "value": values["pass_at_1"],
                    "low": values["pass_at_1_low"],
                    "high": values["pass_at_1_high"],
                }
            )
    return rows


def inputs_of(model: str) -> tuple[str, ...]:
    """The inputs that a model of this name is measured on."""
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
