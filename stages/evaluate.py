"""Stage evaluate: the same measurements for every checkpoint, on held-out data, with confidence intervals.

    models/<model>, data/{raw,dialogues,problems,facts,overlap.json,benchmarks} -> metrics/eval/<model>.{json,jsonl,csv}
    models/reward, data/preferences                                -> the same files

json: the numbers. jsonl: one row per item, with the model's answer. csv: curves. Generated code runs only in the
sandbox; without one, problems are reported as "skipped: no sandbox". The test sets in `benchmarks` (HumanEval, MBPP,
BFCL) are loaded before anything is measured, so that a bad file stops the stage immediately.

A causal model runs the suites that match its purpose (evaluation/suites.py), or all of them with `every_suite`. A wing
adds its own suites: extra ones for a causal model (memory/measure.py), or separate ones for a model that does not
generate left to right (diffusion/measure.py); such a model is not scored on the test sets above. Every model is
measured in its training precision, which `settings` records.

The result of each suite is cached in the work folder under a digest of its inputs: a killed evaluation resumes after
the last finished suite, and after a file is added to `benchmarks`, only that file is scored.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import pyarrow.parquet

from pipeline import wings
from pipeline.evaluation import benchmarks as evaluation_benchmarks
from pipeline.evaluation import cross_file, suites
from pipeline.evaluation import preferences as evaluation_preferences
from pipeline.evaluation import tools as evaluation_tools
from pipeline.evaluation.suites import OwnSuites, Plan, Subject, SuiteSettings, solve
from pipeline.ingest.records import Dialogue, Problem, Text, is_empty, read
from pipeline.learning.performance import load_operators
from pipeline.model import checkpoint
from pipeline.run import device
from pipeline.run.config import block
from pipeline.run.stage import ANY, main
from pipeline.run.tracking import Number, progress, say, write_curve, write_json
from pipeline.run.types import JsonObject
from pipeline.run.workdir import Job
from pipeline.sandbox.judge import Judge, SandboxConfig
from pipeline.synthetic import drills, programs, stories
from pipeline.synthetic import tools as synthetic_tools

FAMILIES = frozenset(stories.FAMILIES)
Item = TypeVar("Item", Dialogue, Problem)
BENCHMARKS = Path("data/benchmarks")
DOCUMENT_CHARACTERS = 8_192
DATA = {
    "text": "data/raw/text",
    "code": "data/raw/code",
    "dialogues": "data/dialogues",
    "problems": "data/problems",
    "facts": "data/facts",
    "overlap": "data/overlap.json",
    "benchmarks": str(BENCHMARKS),
}


KEYS = [offer() for offer in wings.each("evaluation_keys")]


@dataclass(frozen=True, kw_only=True)
class WingSettings(*KEYS):
    """The keys of the `evaluate` block for the wings' own model kinds."""

    def __post_init__(self) -> None:
        for keys in KEYS:
            keys.__post_init__(self)


@dataclass(frozen=True, kw_only=True)
class Params:
    """The `evaluate` block."""

    settings: SuiteSettings
    wings: WingSettings = field(default_factory=WingSettings)
    fresh_seed: int | None = None
    """Seed for newly generated problems, conversations, tools and stories; none: use the ones in data/."""
    every_suite: bool = False
    """Run all suites on each causal model, including those outside its purpose."""
    benchmarks: list[str] = field(default_factory=list)
    """Files in data/benchmarks/ to score: HumanEval, MBPP, BFCL."""
    sandbox: SandboxConfig = block("sandbox")

    def __post_init__(self) -> None:
        names = [evaluation_benchmarks.stem(Path(name)) for name in self.benchmarks]
        for name in self.benchmarks:
            if not Path(name).is_relative_to(BENCHMARKS) or ".." in Path(name).parts:
                raise ValueError(
                    f"benchmarks: expected files in {BENCHMARKS}, which DVC tracks, got {name!r}; for a file from "
                    "elsewhere, run python -m pipeline.evaluation.benchmarks MODEL_DIR FILE"
                )
        if len(set(names)) < len(names):
            raise ValueError(f"benchmarks: expected files with different names, got {', '.join(names)}")


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
    """Measure `model` and write the three output files."""
    hardware = device.hardware(job.runtime.precision)
    load_operators(job.runtime.compile, hardware=hardware, name=job.name)
    plan, settings_used = Plan(), JsonObject()
    if preferences is not None:  # a reward model is measured only on pairs
        pairs = preferences / "test.jsonl"
        if not is_empty(pairs):
            plan["reward"] = lambda: evaluation_preferences.pairs_told(model, pairs, hardware.device)
    elif not (model / "config.json").is_file() and (model / "README.md").is_file():
        say(f"{model}: not measured. {(model / 'README.md').read_text(encoding='utf-8').strip()}")
    else:
        plan, settings_used = measurements(params, job, model, hardware, **data)
    settings_used |= {"precision": hardware.precision, "fresh_seed": params.fresh_seed}
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
    job.report(**numbers)
    write_json(summary, {**numbers, "settings": settings_used | {"data_seed": job.seed}, "lineage": job.lineage})
    items.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    write_curve(curves, curve_rows(numbers))
    job.tracker.store(items)


def measurements(
    params: Params,
    job: Job,
    model: Path,
    hardware: device.Hardware,
    *,
    text: Path,
    code: Path,
    dialogues: Path,
    problems: Path,
    facts: Path,
    overlap: Path,
    benchmarks: Path,
) -> tuple[Plan, JsonObject]:
    """The suites for a model that generates text, and their settings."""
    settings = params.settings
    sets = [evaluation_benchmarks.load(benchmarks / Path(name).relative_to(BENCHMARKS)) for name in params.benchmarks]
    sources, problem_records = held_out(code), clean_items(problems, Problem, overlap)
    if params.fresh_seed is not None:
        problem_records = programs.fresh_problems(problem_records, params.fresh_seed)
    requests = [problem for problem in problem_records if problem.group == programs.REQUEST]
    problem_records = [problem for problem in problem_records if problem.group != programs.REQUEST]
    sandbox = partial(Judge, params.sandbox, job.workers, url=job.runtime.sandbox_url)
    if own := next((own for own in own_suites() if own.opens(model)), None):
        plan, settings_used = own.plan(
            model,
            settings,
            params.wings,
            seed=job.seed,
            hardware=hardware,
            sources=sources,
            problems=problem_records,
            sandbox=sandbox,
        )
        if sets:
            say(
                f"{model.name}: {', '.join(params.benchmarks)} not scored: their prompts need a model that decodes"
                " left to right"
            )
        return plan, settings_used
    loaded, tokenizer = checkpoint.load(model)
    subject = Subject(loaded.to(hardware.device).train(False), tokenizer, settings, job.seed)
    dialogue_records = clean_items(dialogues, Dialogue, overlap)
    told = split_texts(held_out(text))[1]
    if params.fresh_seed is not None:
        dialogue_records = synthetic_tools.fresh_dialogues(dialogue_records, params.fresh_seed)
        told = stories.fresh_records(len(told), params.fresh_seed)
    plan = causal_plan(subject, held_out(text), told, sources, dialogue_records, problem_records, sandbox)
    if requests:  # own problems have none
        plan["requests"] = lambda: solve(subject, requests, sandbox, partial(suites.solved, suite="requests"))
    for offer in wings.each("causal_suites"):
        plan |= offer(subject, facts=facts)
    if not params.every_suite:
        plan = suites.of(model.name, plan)
    completes = model.name in evaluation_benchmarks.COMPLETES
    repositories = cross_file.read(code) if settings.cross_file and (completes or params.every_suite) else []
    if repositories:  # a corpus without repositories has no such suite
        plan["cross_file"] = partial(cross_file.measured, subject, repositories)
    for test_set in sets:  # one suite per test set, so that only an added file is scored
        plan[f"benchmarks {test_set.name}"] = partial(
            evaluation_benchmarks.score, subject, [test_set], completes=completes, sandbox=sandbox
        )
    return plan, asdict(settings)


def causal_plan(
    subject: Subject,
    texts: list[Text],
    told: list[Text],
    sources: list[Text],
    dialogues: list[Dialogue],
    problems: list[Problem],
    sandbox: Callable[[], Judge],
) -> Plan:
    """The suites for a causal model. `told`: stories to continue from their openings."""
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
        "stories sampled": lambda: suites.sampled_stories(subject, told),
        "code": lambda: suites.documents(subject, "code", sources[:num_documents]),
        "code gaps": lambda: suites.gaps(subject, sources),
        "problems": lambda: solve(subject, problems, sandbox),
        "tools": lambda: evaluation_tools.called(subject, [d for d in dialogues if d.kind == "tools"]),
        "answers": lambda: suites.answered(subject, dialogues),
    }


def clean_items(folder: Path, kind: type[Item], overlap: Path) -> list[Item]:
    """The test items of data/dialogues or data/problems that do not occur in the training data."""
    contained = set(json.loads(overlap.read_text(encoding="utf-8"))[folder.name])
    return [item for item in read(folder / "test.jsonl", kind) if item.id not in contained]


def held_out(corpus: Path) -> list[Text]:
    """The validation documents of a corpus, in file order; long ones are truncated so that none dominates."""
    documents = []
    for path in sorted(corpus.glob("val-*.parquet")):
        rows = pyarrow.parquet.read_table(path).to_pylist()
        documents += [Text(**row | {"text": row["text"][:DOCUMENT_CHARACTERS]}) for row in rows]
    return documents


def of_source(texts: list[Text], source: str) -> list[Text]:
    """The documents from one source."""
    return [text for text in texts if text.source == source]


def split_texts(texts: list[Text]) -> tuple[list[Text], list[Text], list[Text]]:
    """Split into prose, stories from families in the training data, and stories from held-out families."""
    prose = [t for t in texts if t.source not in FAMILIES and t.source not in (drills.SOURCE, synthetic_tools.SOURCE)]
    seen = [t for t in texts if t.source in FAMILIES and t.source not in stories.HELD_OUT]
    return prose, seen, [t for t in texts if t.source in stories.HELD_OUT]


def curve_rows(numbers: JsonObject) -> list[dict[str, Number]]:
    """pass@k for each k, if problems were sampled, and the wings' own curves."""
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
    for own in own_suites():
        rows += own.curve_rows(numbers)
    return rows


def own_suites() -> list[OwnSuites]:
    """The wings' measurements for their own model kinds."""
    return [offer() for offer in wings.each("evaluation")]


def inputs_of(model: str) -> tuple[str, ...]:
    """The inputs for measuring the model with this name."""
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
