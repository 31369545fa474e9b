"""Runs a repository's own tests in a process that can change only a copy of it, and records function calls.

    python -P -B recorder.py   <- {"folder", "paths": [to import from], "functions": {file: [names]}, "out", ...}
                               -> {"tests": {passed, failed, ...}, "calls": {file::name: [[args, kwargs, result], ...]}}

Started by `sandbox/recording.py`. A call is kept if its arguments, serialized before the call, and its result are plain
data (numbers, strings, None, lists, tuples, dicts, sets of these). Written as Python literals, they become the tests of
a task. Calls that returned different results for equal arguments are dropped. The tests, including doctests, run with
pytest if it is installed, otherwise with unittest and doctest. Results are written repeatedly, so a killed run loses
little.

The repository's tests are the user's code: they may read what the user may read. They have no network access and
cannot change files outside their copy or signal other processes; each has a time limit. Standard library only, no
project imports.
"""

import ast
import contextlib
import doctest
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import io
import json
import os
import resource
import signal
import sys
import threading
import time
import types
import unittest
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import kernel

sys.path.pop(0)
RECORD = "_stagecoach_record"
MOST_CALLS = 32  # per function
MOST_TRIES = 1000  # calls to inspect, so that a hot function stays fast
LONGEST = 2000  # characters of arguments, and of a result
DEEPEST = 6
TEST_SECONDS = 10  # per test
MEMORY = 4 << 30
FILE_BYTES = 100 << 20
PLAIN = (type(None), bool, int, float, complex, str, bytes)
TABLE: dict[str, "FunctionCalls"] = {}


class TooLong(BaseException):
    """A test timed out. Not an Exception, so that a test's own `except` does not catch it."""


class FunctionCalls:
    """The calls to one function."""

    def __init__(self) -> None:
        self.calls: dict[tuple[str, str], str] = {}
        self.tries = 0
        self.unequal: set[tuple[str, str]] = set()
        self.inside = threading.local()


def literal(value: Any, depth: int = 0) -> str:
    """The value as a Python literal. Raises ValueError if it is not plain data."""
    kind = type(value)
    if kind in PLAIN:
        if kind in (float, complex) and value - value != 0:
            raise ValueError("not finite")
        return repr(value)
    if depth > DEEPEST or kind not in (list, tuple, dict, set, frozenset) or len(value) > LONGEST:
        raise ValueError(kind.__name__)
    if kind is dict:
        return "{" + ", ".join(f"{literal(k, depth + 1)}: {literal(v, depth + 1)}" for k, v in value.items()) + "}"
    items = [literal(item, depth + 1) for item in value]
    if kind is list:
        return f"[{', '.join(items)}]"
    if kind is tuple:
        return f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})"
    if kind is frozenset:
        raise ValueError("frozenset")
    return "{" + ", ".join(sorted(items)) + "}" if items else "set()"


def recorder(key: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator that records the calls to one function."""

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        seen = TABLE.setdefault(key, FunctionCalls())

        @functools.wraps(function)
        def recorded(*args: object, **kwargs: object) -> object:
            if getattr(seen.inside, "on", False) or len(seen.calls) >= MOST_CALLS or seen.tries >= MOST_TRIES:
                return function(*args, **kwargs)
            seen.tries += 1
            asked = None
            with contextlib.suppress(Exception):
                asked = literal(list(args)), literal(kwargs)
                if len(asked[0]) + len(asked[1]) > LONGEST:
                    asked = None
            if asked is None:
                return function(*args, **kwargs)
            seen.inside.on = True
            try:
                result = function(*args, **kwargs)
            finally:
                seen.inside.on = False
            with contextlib.suppress(Exception):
                text = literal(result)
                if len(text) <= LONGEST and seen.calls.setdefault(asked, text) != text:
                    seen.unequal.add(asked)
            return result

        return recorded

    return wrap


class Loader(importlib.machinery.SourceFileLoader):
    """Loads a file so that calls to its functions are recorded; reads and writes no bytecode."""

    def __init__(self, name: str, path: str, file: str, names: Sequence[str]) -> None:
        super().__init__(name, path)
        self.file, self.names = file, set(names)

    def path_stats(self, path: object) -> Mapping[str, object]:
        """Never use bytecode."""
        raise OSError

    def set_data(self, *_: object, **__: object) -> None:
        """Never write bytecode."""

    def source_to_code(self, data: bytes, path: str, **_: object) -> types.CodeType:
        """Compile with a recording decorator on each function."""
        tree = ast.parse(data)
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and node.name in self.names:
                call = ast.Call(ast.Name(RECORD, ast.Load()), [ast.Constant(f"{self.file}::{node.name}")], [])
                node.decorator_list.append(ast.copy_location(call, node))
        return compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)


class Finder(importlib.abc.MetaPathFinder):
    """Finds the repository's files and loads them with `Loader`."""

    def __init__(self, folder: Path, functions: dict[str, list[str]]) -> None:
        self.functions = {str(folder / file): (file, names) for file, names in functions.items()}

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Like PathFinder, with our loader for files whose functions are recorded."""
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.origin not in self.functions:
            return None
        file, names = self.functions[spec.origin]
        spec.loader = Loader(name, spec.origin, file, names)
        return spec


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """Raise TooLong if the body takes longer than `seconds`."""

    def stop(*_: object) -> None:
        raise TooLong(f"{seconds:g} seconds")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class OutcomeCounter:
    """Counts tests, and writes the results so far."""

    def __init__(self, out: Path) -> None:
        self.out, self.counts, self.written = out, dict[str, int](), 0.0

    def count(self, outcome: str) -> None:
        """Count one test."""
        self.counts[outcome] = self.counts.get(outcome, 0) + 1
        if time.monotonic() - self.written > 1:
            self.write()

    def write(self) -> None:
        """Write all results atomically."""
        calls = {
            key: [[*asked, result] for asked, result in seen.calls.items() if asked not in seen.unequal]
            for key, seen in sorted(TABLE.items())
        }
        part = self.out.with_suffix(".part")
        part.write_text(json.dumps({"tests": self.counts, "calls": calls}), encoding="utf-8")
        part.replace(self.out)
        self.written = time.monotonic()


class Plugin:
    """A pytest plugin that limits the time of each test and counts its outcome."""

    def __init__(self, report: OutcomeCounter) -> None:
        self.report = report

    def pytest_runtest_call(self, item: Any) -> Any:
        """Start the time limit before the test itself."""
        signal.signal(signal.SIGALRM, self._stop)
        signal.setitimer(signal.ITIMER_REAL, TEST_SECONDS)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Stop the time limit after each phase of a test, and count the outcome."""
        signal.setitimer(signal.ITIMER_REAL, 0)
        if report.when == "call" or report.outcome != "passed":
            self.report.count(report.outcome)

    def pytest_collectreport(self, report: Any) -> None:
        """Count a file that cannot be collected."""
        if report.failed:
            self.report.count("not collected")

    def _stop(self, *_: object) -> None:
        raise TooLong(f"{TEST_SECONDS} seconds")


def by_pytest(folder: Path, report: OutcomeCounter) -> bool:
    """Run all tests with pytest; returns whether it is installed."""
    if importlib.util.find_spec("pytest") is None:
        return False
    import pytest

    options = ["-q", "--no-header", "--no-summary", "-p", "no:cacheprovider", "-p", "no:xdist", "-o", "addopts="]
    options += ["--continue-on-collection-errors", "--doctest-modules", "--doctest-continue-on-failure"]
    options += ["--doctest-ignore-import-errors", "-W", "ignore", "--tb=no", "--import-mode=importlib", str(folder)]
    pytest.main(options, plugins=[Plugin(report)])
    return True


class Outcomes(unittest.TestResult):
    """Like `Plugin`, for unittest."""

    report: OutcomeCounter

    def startTest(self, test: unittest.TestCase) -> None:
        """Start the time limit before each test."""
        super().startTest(test)
        signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(TooLong()))
        signal.setitimer(signal.ITIMER_REAL, TEST_SECONDS)

    def stopTest(self, test: unittest.TestCase) -> None:
        """Stop the time limit after each test, and count the outcome."""
        signal.setitimer(signal.ITIMER_REAL, 0)
        failed = any(one is test for one, _ in (*self.failures, *self.errors))
        self.report.count("failed" if failed else "passed")
        super().stopTest(test)


def by_unittest(folder: Path, files: Sequence[str], report: OutcomeCounter) -> None:
    """Run the tests with unittest, file by file, and the doctests."""
    result = Outcomes()
    result.report = report
    for file in files:
        with contextlib.suppress(BaseException), within(TEST_SECONDS):
            name = file.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
            module = importlib.import_module(name)
            suite = unittest.defaultTestLoader.loadTestsFromModule(module)
            with contextlib.suppress(ValueError):
                suite.addTests(doctest.DocTestSuite(module))
            signal.setitimer(signal.ITIMER_REAL, 0)
            suite.run(result)


def main() -> None:
    """Read the task from stdin, run the tests and write the results."""
    task = json.load(sys.stdin)
    folder = Path(task["folder"])
    out = folder / task["out"]
    os.chdir(folder)
    for which, value in ((resource.RLIMIT_FSIZE, FILE_BYTES), (resource.RLIMIT_CORE, 0), (resource.RLIMIT_AS, MEMORY)):
        kernel.limit(which, value)
    kernel.die_with(task["parent"])
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    kernel.write_only_below(folder)
    kernel.install_no_network()
    sys.dont_write_bytecode = True
    sys.path[:0] = task["paths"]
    import builtins

    setattr(builtins, RECORD, recorder)
    sys.meta_path.insert(0, Finder(folder, task["functions"]))
    report = OutcomeCounter(out)
    sys.stdin = io.StringIO()
    try:
        if not by_pytest(folder, report):
            by_unittest(folder, task["files"], report)
    finally:
        report.write()
    os._exit(0)


if __name__ == "__main__":
    main()
