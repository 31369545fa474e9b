"""Mine a repository's tests for programming problems with hidden tests.

    data/own/<repository> --record its tests--> calls to its functions --judge--> Problem, ...

A task consists of a function's signature and docstring and the surrounding module, without the body. Its hidden tests
are calls made by the repository's own tests, with the returned values (`sandbox/recording.py`). The expected values
stay with the judge, so a candidate can neither read nor forge them, and neither the body nor any file in the repository
is present where a candidate runs (`ingest/functions.py`).

A function is kept if its own body passes in the sandbox (tests it fails there are dropped; LEAST_TESTS must remain), if
none of three stubs passes (raise, return None, return the most frequent result), and if it has at least LEAST_MUTANTS
mutants, at least half of which fail. The fraction that fails is the strength of its tests. All other functions are
counted by reason.

Not guaranteed: that the docstring specifies everything the tests require. Not supported: functions with objects as
arguments or results, methods, coroutines, generators, decorated functions.
"""

import ast
import csv
import io
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from pipeline.ingest import sources
from pipeline.ingest.functions import MinedTask, ParsedFiles, Unsliceable, mutants
from pipeline.ingest.records import Problem
from pipeline.ingest.repository import Repository
from pipeline.run.types import JsonObject
from pipeline.sandbox import recording
from pipeline.sandbox.judge import Candidate, Judge, Verdict

TEST_SECONDS = 240.0  # for all tests of a repository
LEAST_TESTS, MOST_TESTS = 2, 16
LEAST_MUTANTS = 5
LEAST_STRENGTH = 0.5
SHOWN = 2  # calls shown in the question if the docstring has no example
LEVEL = 4
STUB = "raise NotImplementedError"


@dataclass(frozen=True)
class Mined:
    """The tasks of a repository, and the reasons why the other functions were dropped."""

    name: str
    problems: list[Problem]  # with the function's own source as the answer
    strengths: dict[str, float]  # id -> fraction of mutants caught by its tests
    dropped: dict[str, str]  # file::function -> reason
    tests: dict[str, int]  # counts of the repository's tests: passed, failed, ...
    timed_out: bool
    said: str  # the tail of the test output

    def summary(self) -> JsonObject:
        """Metrics to report."""
        reasons = Counter(reason.split(":")[0] for reason in self.dropped.values())
        strength = sum(self.strengths.values()) / len(self.strengths) if self.strengths else None
        return {
            "tasks": len(self.problems),
            "strength": strength,
            "dropped": dict(reasons.most_common()),
            "tests": self.tests,
            "timed_out": self.timed_out,
        }

    def reasons(self) -> str:
        """The reasons why functions were dropped, most frequent first, and the test results."""
        reasons = ", ".join(f"{count} {reason}" for reason, count in self.summary()["dropped"].items())
        tests = ", ".join(f"{count} {outcome}" for outcome, count in self.tests.items()) or f"none ran: {self.said}"
        late = f"; stopped after {TEST_SECONDS:g} seconds" if self.timed_out else ""
        return f"functions: {reasons or 'none'}; tests: {tests}{late}"

    def shown(self, name: str) -> str:
        """A human-readable summary in one line."""
        return f"{name}: {len(self.problems)} tasks; skipped: {self.reasons()}"


@dataclass(frozen=True)
class _Trial:
    """A candidate task: a function with its tests."""

    task: MinedTask
    context: str
    tests: list[JsonObject]
    mutants: list[str]  # their sources

    def candidate(self, source: str) -> Candidate:
        """A version of the function, to be judged by the task's tests."""
        return Candidate(source=self.context + source, entry_point=self.task.name, tests=self.tests)


def mine(repository: Repository, judge: Judge, seconds: float = TEST_SECONDS) -> Mined:
    """Mine the tasks of a repository; its tests may run for up to `seconds`. Same errors as `recording.record`."""
    texts = {file.path: file.text for file in repository.files}
    source = ParsedFiles(texts, repository.name)
    tasks: dict[str, MinedTask] = {}
    dropped = {f"{path}": reason for path, reason in source.broken.items()}
    for path in texts:
        if sources.is_test(path):
            continue
        found, others = source.functions(path)
        tasks |= {f"{path}::{task.name}": task for task in found}
        dropped |= {f"{path}::{name}": reason for name, reason in others.items()}
    functions: dict[str, list[str]] = {}
    for task in tasks.values():
        functions.setdefault(task.path, []).append(task.name)
    paths = sorted({source.modules.root_of(path) for path in texts} | {".", "src"})
    recorded = recording.record(repository.root, sorted(texts), paths, functions, seconds)
    trials: dict[str, _Trial] = {}
    limit = (judge.config.limits.source_kib << 10) * 3 // 4
    for key, task in tasks.items():
        tests = _tests(task, recorded.calls.get(key, []))
        if len(tests) < LEAST_TESTS:
            dropped[key] = f"fewer than {LEAST_TESTS} calls with plain values"
            continue
        try:
            context = source.context(task.path, task.name)
            versions = mutants(task.node)
        except Unsliceable as error:
            dropped[key] = f"context: {error}"
            continue
        except RecursionError:
            dropped[key] = "context: too deep"
            continue
        if len(context.encode()) > limit:
            dropped[key] = "context: too long"
            continue
        if len(versions) < LEAST_MUTANTS:
            dropped[key] = f"fewer than {LEAST_MUTANTS} mutants"
            continue
        trials[key] = _Trial(task, context, tests, versions)
    trials = _own_body_passes(trials, judge, dropped)
    trials = _stubs_fail(trials, judge, dropped)
    strengths = _strengths(trials, judge, dropped)
    problems = {key: _problem(repository.name, key, trials[key]) for key in strengths}
    return Mined(
        repository.name,
        list(problems.values()),
        {problems[key].id: strength for key, strength in strengths.items()},
        dropped,
        recorded.tests,
        recorded.timed_out,
        recorded.said,
    )


def _tests(task: MinedTask, calls: Sequence[tuple[str, str, str]]) -> list[JsonObject]:
    """Convert calls to tests: positional arguments if possible, else an assert."""
    tests: list[JsonObject] = []
    for args, kwargs, result in calls[:MOST_TESTS]:
        if kwargs == "{}":
            tests.append({"args": args, "expected": result, "visible": False})
            continue
        given = ast.parse(kwargs, mode="eval").body
        assert isinstance(given, ast.Dict)
        named = [f"{ast.literal_eval(k)}={ast.unparse(v)}" for k, v in zip(given.keys, given.values, strict=True) if k]
        inner = ", ".join(part for part in (args[1:-1], *named) if part)
        tests.append({"assert": f"assert {task.name}({inner}) == {result}", "visible": False})
    return tests


def _own_body_passes(trials: dict[str, _Trial], judge: Judge, dropped: dict[str, str]) -> dict[str, _Trial]:
    """The functions whose own body passes, each with the tests it passes."""
    kept: dict[str, _Trial] = {}
    verdicts = judge.judge([trial.candidate(trial.task.source) for trial in trials.values()])
    for (key, trial), verdict in zip(trials.items(), verdicts, strict=True):
        if verdict.total < len(trial.tests):  # the judge skipped an assert that needs more than values
            dropped[key] = "a test cannot be judged"
            continue
        pairs = zip(trial.tests, verdict.results, strict=True)
        passed = [test for test, result in pairs if result.verdict == "passed"]
        if len(passed) < LEAST_TESTS:
            dropped[key] = f"its own body fails in the sandbox: {_reason(verdict)}"
        else:
            kept[key] = replace(trial, tests=passed)
    return kept


def _reason(verdict: Verdict) -> str:
    messages = [result.message or result.verdict for result in verdict.results if result.verdict != "passed"]
    return messages[0] if messages else verdict.verdict


def _stubs_fail(trials: dict[str, _Trial], judge: Judge, dropped: dict[str, str]) -> dict[str, _Trial]:
    """The functions whose tests no stub passes."""
    bodies = {key: stubs(trial.task.signature, trial.tests) for key, trial in trials.items()}
    verdicts = judge.judge([trials[key].candidate(body) for key, three in bodies.items() for body in three])
    kept: dict[str, _Trial] = {}
    for key, trial in trials.items():
        passed = [next(verdicts).verdict == "passed" for _ in range(3)]
        if any(passed):
            dropped[key] = "a stub passes its tests"
        else:
            kept[key] = trial
    return kept


def stubs(signature: str, tests: Sequence[JsonObject]) -> list[str]:
    """Three trivial versions of the function: raise, return None, return the most frequent result."""
    results = [test["expected"] if "expected" in test else test["assert"].rpartition(" == ")[2] for test in tests]
    ((common, _),) = Counter(results).most_common(1)
    return [f"def {signature}:\n    {body}\n" for body in (STUB, "return None", f"return {common}")]


def _strengths(trials: dict[str, _Trial], judge: Judge, dropped: dict[str, str]) -> dict[str, float]:
    """The fraction of mutants caught by each function's tests, if high enough."""
    verdicts = judge.judge([trial.candidate(version) for trial in trials.values() for version in trial.mutants])
    strengths: dict[str, float] = {}
    for key, trial in trials.items():
        failed = [next(verdicts).verdict != "passed" for _ in trial.mutants]
        if (strength := sum(failed) / len(failed)) >= LEAST_STRENGTH:
            strengths[key] = strength
        else:
            dropped[key] = f"weak tests: they find {sum(failed)} of {len(failed)} mutants"
    return strengths


def _problem(name: str, key: str, trial: _Trial) -> Problem:
    task = trial.task
    tests = list(trial.tests)
    short = sorted(tests, key=lambda test: len(_example(task, test)))
    shown = [] if ">>>" in task.docstring else short[: min(SHOWN, len(tests) - LEAST_TESTS + 1)]
    examples = [_example(task, test) for test in shown]
    tests = [test | {"visible": test in shown} for test in tests]
    return Problem(
        id=f"{name}/{key}",
        level=LEVEL,
        group=name,
        key=f"{name}/{key}",
        question=_question(task, examples),
        entry_point=task.name,
        signature=task.signature,
        tests=tests,
        answer=f"```python\n{task.source}\n```",
        context=trial.context,
    )


def _example(task: MinedTask, test: JsonObject) -> str:
    if "assert" in test:
        return str(test["assert"])
    return f"assert {task.name}({test['args'][1:-1]}) == {test['expected']}"


def _question(task: MinedTask, examples: Sequence[str]) -> str:
    head = f"Write the Python function `{task.signature}` of the file {task.path}."
    about = [task.docstring] if task.docstring else []
    code = ["```python\n" + "\n".join(examples) + "\n```"] if examples else []
    return "\n\n".join([head, *about, *code])


# --- splits and tables ------------------------------------------------------------------------------------------------


def apart(problems: Sequence[Problem], split_of: Mapping[str, str], share: float) -> dict[str, list[Problem]]:
    """The problems by split. `split_of` maps files to train or val; a hash of the file divides val into val and test.

    If that leaves val or test empty (as for a repository without folders), `share` / 2 of all tasks are moved there.
    Training problems have no answer, since they are for RL.
    """
    splits: dict[str, list[Problem]] = {"train": [], "val": [], "test": []}
    for problem in problems:
        path = problem.id.partition("/")[2].partition("::")[0]
        split = split_of[path] if split_of[path] == "train" else ("val", "test")[sources.digest(path) % 2]
        splits[split].append(problem)
    for split in ("val", "test"):
        count = max(1, round(share / 2 * len(problems)))
        if share and not splits[split] and len(splits["train"]) > count:
            ordered = sorted(splits["train"], key=lambda problem: sources.digest(problem.id))
            splits[split], splits["train"] = ordered[:count], ordered[count:]
    splits["train"] = [replace(problem, answer=None) for problem in splits["train"]]
    return splits


def table(mined: Iterable[Mined]) -> str:
    """A CSV row for each function: whether it is a task, and the number and strength of its tests, or why it is not."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["function", "kept", "tests", "strength", "reason"])
    for one in mined:
        for problem in one.problems:
            writer.writerow([problem.id, "yes", len(problem.tests), f"{one.strengths[problem.id]:.2f}", ""])
        for name, reason in sorted(one.dropped.items()):
            writer.writerow([f"{one.name}/{name}", "no", "", "", reason])
    return out.getvalue()
