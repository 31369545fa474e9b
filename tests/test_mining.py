"""A repository's tests become tasks: slices of modules, calls recorded from its tests, what is kept and why, traps."""

import ast
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from benchmarks import mining as benchmark
from pipeline.evaluation import code, mining
from pipeline.ingest import repository
from pipeline.ingest.functions import ParsedFiles, Unsliceable, mutants
from pipeline.ingest.records import Problem, dumps, read, write
from pipeline.run.errors import DataError
from pipeline.sandbox import recording
from pipeline.sandbox.judge import Candidate, Judge, SandboxConfig
from tests.workspace import command

FILES = {
    "shop/__init__.py": "from .prices import total\nfrom shop import words as w\n",
    "shop/base.py": 'RATES = {"low": 5}\nRATES["high"] = 20\nUNUSED = open\ndef rate(kind):\n    return RATES[kind]\n',
    "shop/words.py": "import re\n\n\ndef split(text):\n    return re.split(r'[ ,]+', text)\n",
    "shop/prices.py": '''"""Prices."""
from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING
from . import words
from .base import RATES, rate as rate_of

if TYPE_CHECKING:
    from nobody import Gone
LIMIT = 1000
for number in range(3):
    LIMIT += number


def clip(value: Gone, low: int = 0) -> int:
    """Within limits."""
    if value < low:
        return low
    return min(value, LIMIT)


def total(prices: Sequence[int], kind: str = "low") -> int:
    """The sum of prices with tax, in whole cents.

    >>> total([100, 200])
    315
    """
    result = 0
    for price in prices:
        result += clip(price)
    return result + result * rate_of(kind) // 100


@functools.lru_cache
def count(text: str) -> dict:
    found = {}
    for word in words.split(text):
        if word and word != "and":
            found[word] = found.get(word, 0) + 1
    return dict(sorted(found.items()))


def constant(x):
    if x > 3:
        return 1
    return 1 if x else 1


def untested(a, b):
    return [a + b, a - b, a * b]


class Basket:
    pass


def filled(basket):
    return Basket()


def each(x):
    yield x


async def later(x):
    return x


def changing(x):
    changing.n = getattr(changing, "n", 0) + 1
    return changing.n + x
''',
    "tests/test_prices.py": """import os, socket, unittest
import shop
from shop import prices


TRAPS = []


class PricesTest(unittest.TestCase):
    def test_totals(self):
        for many in ([], [1], [10, 20, 30], [-5, 2000], [100, 200], [7] * 9, [999], [1000, 1]):
            self.assertGreaterEqual(shop.total(many), 0)
            shop.total(many, kind="high")
            prices.clip(sum(many), low=3)

    def test_words(self):
        for text in ("a", "a b", "a, a and b", "b b b", ""):
            prices.count(text)
        prices.constant(1), prices.constant(5), prices.constant(0)
        prices.filled(prices.Basket())
        [prices.changing(1) for _ in range(4)]

    def test_deletes_files(self):
        for path in TRAPS:
            try:
                os.unlink(path)
            except OSError:
                continue
        os.unlink("README")

    def test_network(self):
        with self.assertRaises(OSError):
            socket.create_connection(("127.0.0.1", 9), timeout=1)
        with self.assertRaises(OSError):
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM)

    def test_fails(self):
        self.assertEqual(prices.clip(5), 6)
""",
    "old/broken.py": "print 'two'\n",
    "README": "hello\n",
}


@pytest.fixture(scope="module")
def judge() -> Iterator[Judge]:
    with Judge(SandboxConfig(), 1) as opened:
        yield opened


@pytest.fixture
def traps(tmp_path: Path) -> list[Path]:
    """Files that the repository's tests try to delete."""
    paths = [tmp_path / "precious", Path.home() / "precious", Path("/tmp") / f"precious-{os.getpid()}"]
    for path in paths:
        path.write_text("mine")
    return paths


@pytest.fixture
def shop(tmp_path: Path, traps: list[Path]) -> Path:
    root = tmp_path / "shop-1.0"
    for name, text in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text.replace("TRAPS = []", f"TRAPS = {list(map(str, traps))}"))
    return root


def source() -> ParsedFiles:
    return ParsedFiles({path: text for path, text in FILES.items() if path.endswith(".py")}, "shop-1.0")


def judged(judge: Judge, program: str, entry: str, args: str, expected: str) -> str:
    tests = [{"args": args, "expected": expected, "visible": False}]
    (verdict,) = judge.judge([Candidate(source=program, entry_point=entry, tests=tests)])
    return verdict.verdict


# -- slices ------------------------------------------------------------------------------------------------------------


def test_functions_are_sorted_with_the_reason_of_the_others() -> None:
    tasks, others = source().functions("shop/prices.py")
    assert [task.name for task in tasks] == [
        "clip", "total", "count", "constant", "untested", "filled", "changing",
    ]  # fmt: skip
    assert others == {"each": "is a generator", "later": "is asynchronous"}
    assert tasks[0].signature == "clip(value, low=0)" and tasks[0].docstring == "Within limits."
    assert tasks[2].source.startswith("def count(text: str)")
    assert list(source().broken) == ["old/broken.py"]
    assert source().broken["old/broken.py"].startswith("is not valid Python for this version: Missing parentheses")


def test_a_context_has_what_the_function_needs_and_not_its_body(judge: Judge) -> None:
    context = source().context("shop/prices.py", "total")
    assert "result * rate_of" not in context and "raise NotImplementedError" in context
    assert "UNUSED" not in context and "count" not in context and "Gone" not in context and "Within" not in context
    assert "RATES['high'] = 20" in context and "LIMIT += number" in context
    body = source().functions("shop/prices.py")[0][1].source
    assert judged(judge, context + body, "total", "[[100, 200], 'high']", "360") == "passed"
    assert judged(judge, context + body, "total", "[[5000]]", "1053") == "passed"  # LIMIT is 1003
    assert judged(judge, context, "total", "[[]]", "0") == "error"


def test_a_module_that_is_imported_whole_is_sliced_by_what_is_used(judge: Judge) -> None:
    context = source().context("shop/prices.py", "count")
    assert "shop.words" in context and "shop.base" not in context
    body = source().functions("shop/prices.py")[0][2].source
    assert judged(judge, context + body, "count", "['a, a and b']", "{'a': 2, 'b': 1}") == "passed"


def test_what_a_function_calls_finds_the_candidate(judge: Judge) -> None:
    """A helper that calls the task's function back calls the answer, not the stub."""
    files = {"a.py": "def f(n):\n    return 1 if n < 1 else g(n)\n\n\ndef g(n):\n    return n * f(n - 1)\n"}
    context = ParsedFiles(files, "r").context("a.py", "f")
    assert judged(judge, context + "def f(n):\n    return 1 if n < 1 else g(n)\n", "f", "[4]", "24") == "passed"
    assert judged(judge, context + "def f(n):\n    return 2 if n < 1 else g(n)\n", "f", "[4]", "48") == "passed"


@pytest.mark.parametrize(
    "files",
    [
        {"a.py": "from b import *\ndef f(x):\n    return h(x)\n", "b.py": "def h(x):\n    return x + k\nk = 4\n"},
        {"a.py": "import b as c\ndef f(x):\n    return c.h(x)\n", "b.py": "k = 4\ndef h(x):\n    return x + k\n"},
        {
            "p/__init__.py": "",
            "p/a.py": "from ..p.q import b\ndef f(x):\n    return b.h(x)\n",
            "p/q/__init__.py": "from p.q import b\n",
            "p/q/b.py": "from p import a\nk = 4\ndef h(x):\n    return x + k\n",
        },
        {
            "p/__init__.py": "k = 4\n",
            "p/a.py": "from . import k\nfrom .b import h\ndef f(x):\n    return h(x)\n",
            "p/b.py": "import p\ndef h(x):\n    return x + p.k\n",
        },
        {
            "a.py": "try:\n    import nobody\nexcept ImportError:\n    nobody = 4\n"
            "def f(x):\n    return x + nobody\n"
        },
        {
            "a.py": "class K:\n    n = 1\n    def m(self):\n        return three() + self.n\n"
            "def three():\n    return 3\ndef f(x):\n    return x + K().m()\n"
        },
        {"a.py": "k = 1\nk += 3\ndef f(x):\n    def inner():\n        return k\n    return x + inner()\n"},
    ],
)  # fmt: skip
def test_slices_of_many_kinds_compute_what_the_module_does(files: dict[str, str], judge: Judge) -> None:
    made = ParsedFiles(files, "p")
    path = "p/a.py" if "p/a.py" in files else "a.py"
    (task,) = [task for task in made.functions(path)[0] if task.name == "f"]
    context = made.context(path, "f")
    assert judged(judge, context + task.source, "f", "[3]", "7") == "passed", context


def test_what_does_not_parse_cannot_be_needed() -> None:
    files = {"a.py": "from b import h\ndef f(x):\n    return h(x)\n", "b.py": "print 2\n"}
    with pytest.raises(Unsliceable, match=r"needs b\.py, which is not valid Python for this version"):
        ParsedFiles(files, "r").context("a.py", "f")
    star = {"a.py": "from b import *\ndef f(x):\n    return h(x)\n", "b.py": "print 2\n"}
    assert "raise NotImplementedError" in ParsedFiles(star, "r").context(
        "a.py", "f"
    )  # its own body then fails, so it is dropped


def test_mutants_differ_in_one_place_and_are_the_same_each_time() -> None:
    node = ast.parse("def f(a, b=2):\n    'doc'\n    if a < b and a:\n        return a + 1\n    return [a, b]\n").body[
        0
    ]
    assert isinstance(node, ast.FunctionDef)
    made = mutants(node, 50)
    assert made == mutants(node, 50) and len(set(made)) == len(made) > 8 and mutants(node, 3) == made[:3]
    whole = "def f(a, b=2):\n    if a < b and a:\n        return a + 1\n    return [a, b]"
    assert whole not in made
    assert whole.replace("<", "<=") in made and whole.replace("and", "or") in made
    assert whole.replace("a + 1", "a - 1") in made and whole.replace("return [a, b]", "return None") in made


# -- recording ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def mined(shop: Path, traps: list[Path], judge: Judge) -> mining.Mined:
    found = mining.mine(repository.read(shop, 10**6), judge)
    assert [path.read_text() for path in traps] == ["mine"] * 3 and (shop / "README").exists()
    return found


def test_functions_with_tests_become_tasks_and_the_others_say_why(mined: mining.Mined, judge: Judge) -> None:
    assert mined.tests["passed"] >= 4 and mined.tests["failed"] == 1
    by_name = {problem.entry_point: problem for problem in mined.problems}
    assert set(by_name) == {"clip", "total", "count"}
    assert all(mined.strengths[problem.id] >= 0.5 for problem in mined.problems)
    reasons = {name.rpartition("::")[2]: reason for name, reason in mined.dropped.items()}
    assert reasons["constant"] == "a stub passes its tests"
    assert reasons["untested"] == reasons["filled"] == "fewer than 2 calls with plain values"
    assert reasons["changing"].startswith("fewer than 2 calls")  # equal arguments gave different results
    assert reasons["old/broken.py"].startswith("is not valid Python for this version")
    total = by_name["total"]
    assert total.question.startswith(
        "Write the Python function `total(prices, kind='low')` of the file shop/prices.py."
    )
    assert ">>> total([100, 200])" in total.question and not any(test["visible"] for test in total.tests)
    assert any("assert" in test for test in total.tests) and any("args" in test for test in total.tests)
    assert "assert count(" in by_name["count"].question and any(test["visible"] for test in by_name["count"].tests)
    solutions = [(problem, code.solution(problem)) for problem in mined.problems]
    assert [fault[1] for fault in code.faults(judge, iter(solutions))] == [""] * 3
    assert mined.summary()["tasks"] == 3 and "3 tasks; skipped: " in mined.shown("shop")


def test_no_attack_on_the_oracle_succeeds(shop: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert benchmark.main([str(shop)]) == 0
    printed = capsys.readouterr().out
    assert "own body 3 of 3; stubs 0" in printed and printed.count(": 0 of 3") == len(benchmark.ATTACKS)


def test_the_attacks_succeed_where_nothing_holds_them(mined: mining.Mined, shop: Path) -> None:
    """Otherwise the test above would prove nothing."""
    (problem,) = [problem for problem in mined.problems if problem.entry_point == "total"]
    outside = (
        "import sys\nsys.path.append({folder!r})\nimport shop.prices\nroom = {{}}\nexec({source!r}, room)\n"
        "def call(f):\n    expected = 315\n    return f([100, 200]) == expected\nprint(call(room['total']))\n"
    )
    succeeded = set()
    for name, attack in benchmark.ATTACKS.items():
        if name == "any file of that name":
            continue  # it reads the whole disk
        source = problem.program(benchmark.attacking(attack, problem, shop))
        line = [sys.executable, "-c", outside.format(folder=str(shop), source=source)]
        if subprocess.run(line, capture_output=True, text=True).stdout == "True\n":
            succeeded.add(name)
    assert succeeded >= set(list(benchmark.ATTACKS)[:10]) - {"any file of that name"}, succeeded


def test_tasks_of_a_file_stay_together_and_those_to_train_on_show_no_answer(mined: mining.Mined) -> None:
    held_out = mining.apart(mined.problems, {"shop/prices.py": "val"}, 0.0)
    assert not held_out["train"] and sorted(map(len, held_out.values())) == [0, 0, 3]
    assert all(problem.answer for problem in held_out["val"] + held_out["test"])
    trained = mining.apart(mined.problems, {"shop/prices.py": "train"}, 0.0)
    assert len(trained["train"]) == 3 and all(problem.answer is None for problem in trained["train"])
    flat = mining.apart(mined.problems, {"shop/prices.py": "train"}, 0.1)  # no folder to hold out, so single tasks are
    assert [len(flat[split]) for split in ("train", "val", "test")] == [1, 1, 1]
    assert flat["val"][0].answer and flat["train"][0].answer is None
    table = mining.table([mined]).splitlines()
    assert table[0] == "function,kept,tests,strength,reason" and sum(",yes," in row for row in table) == 3


def test_a_test_that_hangs_ends_and_what_was_found_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "slow"
    root.mkdir()
    (root / "a.py").write_text("def f(x):\n    return x + 1\n")
    (root / "test_a.py").write_text(
        "import a, time\n\n\ndef test_one():\n    a.f(1)\n    a.f(2)\n    time.sleep(1.1)\n\n\ndef test_two():\n"
        "    try:\n        while True:\n            time.sleep(1)\n    except Exception:\n        pass\n"
        "\n\ndef test_z():\n    a.f(3)\n"
    )
    began = time.monotonic()
    found = recording.record(root, ["a.py", "test_a.py"], ["."], {"a.py": ["f"]}, 6)
    assert found.timed_out and time.monotonic() - began < 60
    assert [call[:1] for call in found.calls["a.py::f"]] == [("[1]",), ("[2]",)]


def test_what_a_test_leaves_running_is_ended_and_not_waited_for(tmp_path: Path) -> None:
    """The leftover process keeps the output open from a separate session."""
    root = tmp_path / "left"
    root.mkdir()
    (root / "a.py").write_text("def f(x):\n    return x + 1\n")
    (root / "test_a.py").write_text(
        "import a, subprocess\n\n\ndef test_one():\n    a.f(1)\n"
        "    left = subprocess.Popen(['sleep', '300'], start_new_session=True)\n    a.f(left.pid)\n"
    )
    began = time.monotonic()
    found = recording.record(root, ["a.py", "test_a.py"], ["."], {"a.py": ["f"]}, 60)
    (first, second) = found.calls["a.py::f"]
    assert first[0] == "[1]" and time.monotonic() - began < 50
    assert not psutil.pid_exists(int(second[0].strip("[]"))) or (
        psutil.Process(int(second[0].strip("[]"))).status() == psutil.STATUS_ZOMBIE
    )


def test_a_repository_whose_tests_cannot_start_says_why(tmp_path: Path, judge: Judge) -> None:
    root = tmp_path / "none"
    root.mkdir()
    (root / "a.py").write_text("def f(x):\n    return x + 1\n")
    (root / "conftest.py").write_text("import nobody_has_this\n")
    found = mining.mine(repository.read(root, 10**6), judge)
    assert not found.problems and "none ran" in found.reasons() and "nobody_has_this" in found.reasons()


def test_without_landlock_nothing_runs(shop: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "recorder.py"
    text = recording.RECORDER.read_text().replace(
        "kernel.write_only_below(folder)", "raise kernel.Refused('no Landlock')"
    )
    broken.write_text(text.replace("Path(__file__).parent", f"Path({str(recording.RECORDER.parent)!r})"))
    monkeypatch.setattr(recording, "RECORDER", broken)
    with pytest.raises(recording.NoSandboxError, match="no Landlock"):
        recording.record(shop, [], ["."], {}, 30)


# -- records and the stage ---------------------------------------------------------------------------------------------


def test_a_problem_without_a_context_has_the_bytes_it_had(tmp_path: Path) -> None:
    given = {
        "id": "a",
        "level": 1,
        "group": "easy",
        "key": "a",
        "question": "Q",
        "entry_point": "f",
        "signature": "f()",
    }
    plain = Problem(**given, tests=[])
    assert "context" not in json.loads(dumps(plain)) and plain.program("x") == "x" and plain.program(None) is None
    whole = Problem(**given, tests=[], context="c\n")
    assert whole.program("x") == "c\nx"
    write(tmp_path / "a.jsonl", [plain, whole])
    assert list(read(tmp_path / "a.jsonl", Problem)) == [plain, whole]


@pytest.mark.slow
@pytest.mark.full
def test_the_stage_makes_tasks_of_a_repository(workspace: object, shop: Path) -> None:
    own = Path("data/own/shop-1.0")
    own.parent.mkdir(parents=True, exist_ok=True)
    shop.rename(own)
    for name in ("dialogues", "problems", "preferences", "labels", "facts", "skill"):
        for path in Path("data", name).glob("*"):
            path.unlink()
    Path("feedback").mkdir(exist_ok=True)
    few = ["tasks.dialogues=20", "tasks.pairs=6", "tasks.test_items=4", "tasks.skill=4", "tasks.services=4"]
    given = ["data.source=files", 'data.problems=[{"repository": "shop-1.0"}]', *few]
    ended = command("tasks", given)
    assert ended.code == 0, ended.said
    rl, val, test = (list(read(Path(f"data/problems/{split}.jsonl"), Problem)) for split in ("rl", "val", "test"))
    assert len(rl) == len(val) == len(test) == 1 and {p.entry_point for p in rl + val + test} == {
        "clip",
        "total",
        "count",
    }
    assert rl[0].answer is None and rl[0].context and val[0].answer and val[0].context
    assert Path("data/problems/mined.csv").read_text().count(",yes,") == 3


def test_a_repository_without_tasks_stops_the_stage(workspace: object) -> None:
    own = Path("data/own/bare")
    own.mkdir(parents=True)
    (own / "a.py").write_text("def f(x):\n    return x\n")
    Path("feedback").mkdir(exist_ok=True)
    ended = command("tasks", ["data.source=files", 'data.problems=[{"repository": "bare"}]'])
    assert ended.code != 0 and "bare: none of its functions can be used as a task" in ended.said, ended.said


def test_an_absent_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="expected a folder, found nothing"):
        repository.find(tmp_path, "nobody")
