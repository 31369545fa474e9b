"""Public test sets supplied by path: HumanEval, MBPP and BFCL.

    HumanEval   JSON lines, plain or gzip                     pass@k of programs, judged in the sandbox
    MBPP        JSON lines, or the sanitized JSON list        the same
    BFCL        JSON lines of one category, v3 or v4          accuracy of calls; ground truth in possible_answer/

`evaluate.benchmarks` lists files in data/benchmarks/; their scores are in the metrics under `benchmarks.<file stem>`.
`python -m pipeline.evaluation.benchmarks MODEL_DIR FILE...` scores any file, prints the scores and logs them to MLflow.
The format is detected from the content. All problems in a file are scored, except that in MBPP, only ids 11-510, the
paper's test split, are scored if the file has any of these ids. Fields used:

    HumanEval  task_id, prompt, entry_point, canonical_solution, test with `def check(candidate)`     (arXiv:2107.03374)
    MBPP       task_id, text, code, test_list, test_setup_code; sanitized: prompt, test_imports       (arXiv:2108.07732)

`challenge_test_list` is not used. An exercise has two forms; `form` in the metrics shows which one was used.

    completion   for models in COMPLETES, which were never trained on conversations. HumanEval: the prompt as is,
                 completed up to the first of STOPS. MBPP: three worked examples (ids 2-4 of the file), then the text
                 and the tests, completed up to `[DONE]`
    chat         for all other models: the task is a user turn; the only code block in the answer is judged

BFCL always uses the chat format.

The reference solutions are judged first. Problems whose reference fails, or that have no assert that can be judged
safely, are excluded and counted (`reference_fails`, `unjudged`). If only some asserts cannot be judged, the others
decide (`partly_judged`). All three kinds of problems are listed among the items.

Results of finished suites are cached, so no suite is evaluated twice:

    .work/evaluate@<model>/suites/<digest>.json        numbers and rows of one suite

The digest covers the suite's name, model, data, settings and code; within `data/benchmarks`, it covers only the file
being scored. If a cache file is damaged, the suite is evaluated again. Cache files unused for 30 days are deleted.

Not guaranteed: that scores can be compared between the two forms, or with other harnesses, whose time limits, prompts
and answer lengths differ.
"""

import ast
import contextlib
import dataclasses
import json
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from pipeline.evaluation import bfcl, code, suites
from pipeline.evaluation.bfcl import FileRow, Questions
from pipeline.evaluation.code import CPU_SECONDS, Check
from pipeline.evaluation.intervals import wilson
from pipeline.evaluation.suites import CUT, Subject, SuiteResult, SuiteSettings
from pipeline.generation.sampling import Completion
from pipeline.ingest import shapes
from pipeline.ingest.records import Problem
from pipeline.ingest.tool_calls import RowError
from pipeline.learning.performance import load_operators
from pipeline.model import checkpoint
from pipeline.run import config, device, workdir
from pipeline.run.errors import ConfigError, DataError, StagecoachError
from pipeline.run.tracking import Tracker, clean, say
from pipeline.run.types import JsonObject
from pipeline.sandbox.judge import Candidate, Judge, SandboxConfig
from pipeline.text import chat

STOPS = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")  # from the HumanEval paper, section 3.1
BEGIN, DONE = "[BEGIN]", "[DONE]"
SHOTS, SCORED = range(2, 5), range(11, 511)  # MBPP ids
COMPLETES = ("language", "code", "memory")  # folders in models/ of models trained only on documents
HUMANEVAL = ("task_id", "prompt", "entry_point", "canonical_solution", "test")  # required fields
MBPP = ("task_id", "code", "test_list")
BENCHMARKS = "data/benchmarks"


@dataclass(frozen=True, kw_only=True)
class Exercise:
    """One problem in a file. Either form, chat or completion, yields a program, which the tests of `check` judge."""

    id: str
    entry_point: str
    asked: str  # the user turn in the chat form
    continued: str  # the prompt in the completion form
    stops: tuple[str, ...]  # the completion ends before the first of these
    before: str  # the part of the program before the completion
    reference: str  # a complete program that passes
    check: Check

    def completed(self, completion: str) -> str:
        """The program for a completion: `before` plus the completion up to the first stop."""
        ends = [end for stop in self.stops if (end := completion.find(stop)) >= 0]
        return self.before + completion[: min(ends, default=len(completion))]

    def answered(self, answer: str) -> str | None:
        """The program for a chat answer; None if the answer has no code.

        A complete function is appended to `before` as a redefinition; a bare body continues `before`.
        """
        source = chat.extract(answer)
        if source is None:
            return None
        module = chat.tree(source)
        defined = {node.name for node in module.body if isinstance(node, ast.FunctionDef)} if module else set()
        return self.before + ("\n\n" if self.entry_point in defined else "") + source


@dataclass(frozen=True)
class TestSet:
    """A parsed and validated test-set file."""

    __test__ = False  # not a test class, despite its name

    name: str  # the key of its metrics
    kind: str  # humaneval, mbpp, bfcl
    exercises: list[Exercise] = field(default_factory=list)
    questions: Questions | None = None  # BFCL only


def stem(path: Path) -> str:
    """The key of a file's metrics: its name without suffixes or dots, which DVC would parse as a path."""
    return re.sub(r"\.jsonl?$", "", path.name.removesuffix(".gz")).replace(".", "_")


def load(path: Path) -> TestSet:
    """Read and validate a file. Raises DataError for an unknown kind of file or a malformed row."""
    rows = bfcl.read(path)
    kind = _kind(rows[0])
    for row in rows:
        if _kind(row) != kind:
            raise DataError(f"{row.where}: expected a {kind} row like the first one, found the keys {_keys(row)}")
    if kind == "bfcl":
        return TestSet(stem(path), kind, questions=bfcl.load(path, rows))
    parse = humaneval if kind == "humaneval" else mbpp
    return TestSet(stem(path), kind, exercises=parse(rows))


def _kind(row: FileRow) -> str:
    if row.has(*HUMANEVAL):
        return "humaneval"
    if row.has(*MBPP) and (row.has("text") or row.has("prompt")):
        return "mbpp"
    if bfcl.is_question(row):
        return "bfcl"
    raise DataError(
        f"{row.where}: expected a row of HumanEval ({', '.join(HUMANEVAL)}), MBPP ({', '.join(MBPP)}, text or prompt)"
        f" or BFCL (id, question, function), found the keys {_keys(row)}; remove the file from evaluate.benchmarks"
    )


def _keys(row: FileRow) -> str:
    return ", ".join(map(str, row.fields))[:200]


def score(subject: Subject, sets: Sequence[TestSet], *, completes: bool, sandbox: Callable[[], Judge]) -> SuiteResult:
    """The metrics of each file by name, and all items. Without a sandbox, HumanEval and MBPP are "skipped"."""
    result = SuiteResult()
    with contextlib.ExitStack() as stack:
        judge = None
        if any(test_set.exercises for test_set in sets):
            try:
                judge = stack.enter_context(sandbox())
            except ConfigError as error:
                say(f"skipping HumanEval and MBPP: {error}")
        for test_set in sets:
            suite = f"benchmarks/{test_set.name}"
            if test_set.questions is not None:
                part = bfcl.score(subject, suite, test_set.questions)
            elif judge is None:
                part = SuiteResult({"skipped": "skipped: no sandbox"})
            else:
                part = solved(subject, suite, test_set.exercises, judge, completes=completes)
            result.numbers[test_set.name] = {"kind": test_set.kind} | part.numbers
            result.rows += part.rows
    return result


def solved(subject: Subject, suite: str, asked: Sequence[Exercise], judge: Judge, *, completes: bool) -> SuiteResult:
    """pass@k of the judgeable exercises, the counts of the others, and a row for each exercise."""
    result = SuiteResult({"form": "completion" if completes else "chat", "problems": len(asked)})
    problems = _judgeable_problems(result, suite, asked, judge)
    exercises = [exercise for exercise in asked if exercise.id in problems]
    prompts = {exercise.id: _prompt(subject, exercise, completes) for exercise in exercises}
    attempts = suites.attempt(subject, suite, prompts)
    result.numbers["left_out"] = len(prompts) - len(attempts.greedy)
    exercises = [exercise for exercise in exercises if exercise.id in attempts.greedy]
    if not exercises:
        return result

    def judge_completions(completions: list[dict[str, Completion]], first: int) -> list[code.Judged]:
        programs = []
        for exercise in exercises:
            for sample, by_id in enumerate(completions, start=first):
                text = subject.tokenizer.decode(by_id[exercise.id].ids)
                program = Candidate(
                    source=exercise.completed(text) if completes else exercise.answered(text),
                    entry_point=exercise.entry_point,
                    tests=problems[exercise.id].tests,
                    cpu_seconds=CPU_SECONDS,
                )
                programs.append((exercise.id, sample, text, program))
        return code.judge_sources(judge, programs)

    greedy, sampled = judge_completions([attempts.greedy], 0), judge_completions(attempts.drawn, 1)
    result.numbers |= code.rates(greedy)
    result.measure("parse_rate", wilson(sum(j.parses for j in greedy), len(greedy)))
    if completes:
        del result.numbers["format_rate"]  # a completion has no code block
    result.numbers |= suites.pass_rates(subject, greedy, sampled).numbers
    for exercise, judged in zip(exercises, greedy, strict=True):
        completion = attempts.greedy[exercise.id]
        result.item(
            suite,
            exercise.id,
            completion,
            subject.tokenizer.decode(completion.ids),
            asked=[exercise.asked, exercise.continued, exercise.reference],
            prompt=(exercise.continued if completes else exercise.asked)[-CUT:],
            verdict=judged.verdict,
            score=judged.score,
        )
    return result


def _judgeable_problems(
    result: SuiteResult, suite: str, exercises: Sequence[Exercise], judge: Judge
) -> dict[str, Problem]:
    """Judgeable exercises with a passing reference, by id; the others are counted and listed in `result`."""
    protected = code.protect(judge, [exercise.check for exercise in exercises])
    problems = [
        Problem(
            id=exercise.id,
            level=3,
            group="benchmark",
            key=exercise.id,
            question=exercise.asked,
            entry_point=exercise.entry_point,
            signature="",
            tests=tests.tests,
            answer=exercise.reference,
        )
        for exercise, tests in zip(exercises, protected, strict=True)
    ]
    faults = code.faults(judge, ((problem, problem.answer) for problem in problems), CPU_SECONDS)
    counts = {"unjudged": 0, "reference_fails": 0, "partly_judged": 0}
    judgeable = {}
    for problem, tests, (fault, reason) in zip(problems, protected, faults, strict=True):
        if not reason:
            judgeable[problem.id] = problem
        if tests.unprotected and not reason:
            fault, reason = "partly", f"{len(tests.unprotected)} of its asserts cannot be judged safely"
        if reason:
            counts[{"tests": "unjudged", "answer": "reference_fails", "partly": "partly_judged"}[fault]] += 1
            result.rows.append(
                {
                    "suite": f"{suite}/tests",
                    "id": problem.id,
                    "output": "\n".join(tests.unprotected)[:CUT],
                    "stop": "",
                    "tokens": 0,
                    "verdict": reason,
                }
            )
    result.numbers |= counts | {
        "asserts": sum(len(tests.tests) + len(tests.unprotected) for tests in protected),
        "asserts_unprotected": sum(len(tests.unprotected) for tests in protected),
    }
    return judgeable


def _prompt(subject: Subject, exercise: Exercise, completes: bool) -> list[int]:
    if completes:
        return [subject.tokenizer.end_of_text, *subject.tokenizer.encode(exercise.continued)]
    return suites.user(subject.tokenizer, exercise.asked)


# -- exercises ---------------------------------------------------------------------------------------------------------


def humaneval(rows: Sequence[FileRow]) -> list[Exercise]:
    """The exercises of a HumanEval file. Raises DataError."""
    exercises = []
    for row in rows:
        prompt, name = row.text("prompt"), row.text("entry_point")
        reference = prompt + row.text("canonical_solution")
        module = code.parse(reference, f"{row.where}: canonical_solution")
        if name not in {node.name for node in module.body if isinstance(node, ast.FunctionDef)}:
            raise row.wrong("entry_point", "the name of a function that `prompt` and `canonical_solution` define")
        exercises.append(
            Exercise(
                id=row.text("task_id"),
                entry_point=name,
                asked=f"Complete this function. Answer with the whole function.\n\n```python\n{prompt.strip()}\n```",
                continued=prompt,
                stops=STOPS,
                before=prompt,
                reference=reference,
                check=code.function(row.text("test"), name, reference, row.where),
            )
        )
    return _check_distinct_ids(rows, exercises)


def mbpp(rows: Sequence[FileRow]) -> list[Exercise]:
    """The scored exercises of an MBPP file, original or sanitized. Raises DataError."""
    ids = [_task_id(row) for row in rows]
    shots = "".join(
        f"{_task(row)}\n{BEGIN}\n{_code(row)}\n{DONE}\n\n"
        for number, row in zip(ids, rows, strict=True)
        if number in SHOTS
    )
    scored = [(number, row) for number, row in zip(ids, rows, strict=True) if number in SCORED]
    chosen = scored or list(zip(ids, rows, strict=True))
    return _check_distinct_ids([row for _, row in chosen], [_mbpp(number, row, shots) for number, row in chosen])


def _mbpp(number: int, row: FileRow, shots: str) -> Exercise:
    tests = row.texts("test_list")
    body = [node for test in tests for node in code.parse(test, f"{row.where}: test_list").body]
    if not any(isinstance(node, ast.Assert) for statement in body for node in ast.walk(statement)):
        raise row.wrong("test_list", "a list of asserts")
    try:
        name = shapes.most_called(tests)
    except RowError as error:
        raise row.wrong("test_list", "asserts that call the function under test") from error
    if not name:
        raise row.wrong("test_list", "asserts that call the function under test")
    setup = "\n".join([*row.texts("test_imports"), str(row.fields.get("test_setup_code") or "")]).strip()
    before = f"{setup}\n\n" if setup else ""
    reference = before + _code(row)
    code.parse(reference, f"{row.where}: code")
    return Exercise(
        id=f"MBPP/{number}",
        entry_point=name,
        asked=f"{_task(row)}\n",
        continued=f"{shots}{_task(row)}\n{BEGIN}\n",
        stops=(DONE,),
        before=before,
        reference=reference,
        check=Check(entry_point=name, context=reference, body=body),
    )


def _task(row: FileRow) -> str:
    """The prompt for a task and its tests, in the paper's wording."""
    text = row.text("text" if row.has("text") else "prompt").strip()
    tests = "\n".join(test.strip() for test in row.texts("test_list"))
    return (
        f"You are an expert Python programmer, and here is your task: {text} Your code should pass these"
        f" tests:\n\n{tests}"
    )


def _code(row: FileRow) -> str:
    return row.text("code").replace("\r\n", "\n").strip()


def _task_id(row: FileRow) -> int:
    number = row.fields.get("task_id")
    if isinstance(number, bool) or not isinstance(number, int):
        raise row.wrong("task_id", "a whole number")
    return number


def _check_distinct_ids(rows: Sequence[FileRow], exercises: list[Exercise]) -> list[Exercise]:
    seen: dict[str, str] = {}
    for row, exercise in zip(rows, exercises, strict=True):
        if exercise.id in seen:
            raise row.wrong("task_id", f"a unique id ({seen[exercise.id]} has the same id)")
        seen[exercise.id] = row.where
    return exercises


# -- cache -------------------------------------------------------------------------------------------------------------


def suite(job: workdir.Job, name: str, settings: JsonObject, measure: Callable[[], SuiteResult]) -> SuiteResult:
    """The cached result of a suite, or the result of `measure`, which is then cached."""
    path = job.folder.parent / "suites" / f"{_digest(job, name, settings)}.json"
    try:
        cached = json.loads(path.read_text(encoding="utf-8"))
        result = SuiteResult(cached["numbers"], cached["rows"])
        os.utime(path)
    except (OSError, ValueError, KeyError, TypeError):
        measured = measure()
        result = SuiteResult(clean(measured.numbers), measured.rows)
        if not _is_skipped(result.numbers):  # a skipped suite had no sandbox; there may be one next time
            path.parent.mkdir(parents=True, exist_ok=True)
            _remove_unused(path.parent)
            workdir.write_atomically(path, json.dumps({"numbers": result.numbers, "rows": result.rows}))
    return result


def _is_skipped(numbers: JsonObject) -> bool:
    return "skipped" in numbers or any(_is_skipped(part) for part in numbers.values() if isinstance(part, dict))


def _digest(job: workdir.Job, name: str, settings: JsonObject) -> str:
    """A hash of everything the result of a suite depends on."""
    inputs = {path: value for path, value in job.lineage.get("inputs", {}).items() if path != BENCHMARKS}
    contents = {}
    if name.startswith("benchmarks "):
        file_stem = name.partition(" ")[2]
        files = sorted(p for p in Path(BENCHMARKS).rglob("*") if p.is_file() and stem(p) == file_stem)
        contents = {str(p.relative_to(BENCHMARKS)): workdir.digest(p) for p in files}
    return workdir.canonical_hash([name, inputs, contents, settings, job.seed, job.lineage.get("code", job.key)])


def _remove_unused(folder: Path) -> None:
    for path in folder.glob("*.json"):
        if time.time() - path.stat().st_mtime > workdir.KEEP_SECONDS:
            path.unlink(missing_ok=True)


# -- command line ------------------------------------------------------------------------------------------------------


def main(arguments: list[str]) -> int:
    """Score a model directory on files, with the settings in the `evaluate` block of params.yaml; print the scores."""
    if len(arguments) < 2:
        sys.stderr.write("usage: python -m pipeline.evaluation.benchmarks MODEL_DIR FILE...\n")
        return ConfigError.exit_code
    try:
        values = config.Settings(Path(), [])
        names = {f.name for f in dataclasses.fields(SuiteSettings)}
        layers = {name: value for name, value in values.layers("evaluate").items() if name in names}
        settings = config.build(SuiteSettings, layers, "evaluate")
        limits = config.build(SandboxConfig, values.layers("sandbox"), "sandbox")
        runtime = config.build(config.Runtime, values.layers("runtime"), "runtime")
        test_sets = [load(Path(name)) for name in arguments[1:]]
        model, tokenizer = checkpoint.load(Path(arguments[0]))
        hardware = device.hardware(runtime.precision)
        load_operators(runtime.compile, hardware=hardware, name="benchmarks")
        subject = Subject(model.to(hardware.device).train(False), tokenizer, settings, values.seed("data_seed"))
        completes = Path(arguments[0]).resolve().name in COMPLETES
        sandbox = partial(Judge, limits, 1, url=runtime.sandbox_url)
        with hardware.autocast():
            result = score(subject, test_sets, completes=completes, sandbox=sandbox)
    except StagecoachError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    sys.stdout.write(json.dumps(result.numbers, indent=2) + "\n")
    used = dataclasses.asdict(settings) | {"precision": hardware.precision}
    _log_to_mlflow(Path(arguments[0]), [Path(name) for name in arguments[1:]], used, result)
    return 0


def _log_to_mlflow(model: Path, files: Sequence[Path], settings: JsonObject, result: SuiteResult) -> None:
    """Log the scores under `final/` of an MLflow run tagged with the model's work key."""
    identity = [model.name, *(workdir.sha256(path) for path in files), settings]
    folder = workdir.root() / "benchmarks" / workdir.canonical_hash(identity)
    folder.mkdir(parents=True, exist_ok=True)
    tags = {
        "stage": "benchmarks",
        "model": model.name,
        "work.key": str(checkpoint.lineage(model).get("key", "elsewhere")),
    }
    tracker = Tracker(
        f"benchmarks@{model.name}", folder, tags, {"files": [path.name for path in files]} | settings, quiet=False
    )
    tracker.report(**result.numbers)
    tracker.finish()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
