"""Profiles files and shell, verdicts under load and through the service, forgeries that pass elsewhere, leftovers."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from pipeline.errors import DataError
from pipeline.sandbox import scratch, servers
from pipeline.sandbox.judge import Judge, Limits, NoSandboxError, Program, SandboxConfig
from pipeline.sandbox.pool import job_limits
from pipeline.synthesis import mistakes, programs
from tests.test_service import ended, started

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")


def bash(source: str, stdin: str = "", stdout: str = "") -> Program:
    return Program(
        source=source, entry_point="", tests=[{"stdin": stdin, "stdout": stdout}], profile="shell", cpu_seconds=2
    )


def on_files(body: str, expected: str) -> Program:
    tests = [{"args": "[]", "expected": expected}]
    return Program(source=f"def f():\n {body}", entry_point="f", tests=tests, profile="files", cpu_seconds=2)


@pytest.fixture(scope="module")
def judge() -> Iterator[Judge]:
    with Judge(SandboxConfig(), 2) as judge:
        yield judge


def here(judge: Judge, profile: str) -> None:
    if (why := judge.missing(profile)) is not None:
        pytest.skip(f"profile {profile}: {why}")


def test_files_are_written_read_listed_and_moved_in_a_fresh_directory_for_each_job(judge: Judge):
    here(judge, "files")
    asked = [
        on_files(
            "import os; open('a', 'w').write('1'); os.mkdir('d'); os.rename('a', 'd/a'); return os.listdir('d')",
            "['a']",
        ),
        on_files("import os; return os.listdir('.')", "[]"),
        on_files("import tempfile\n with tempfile.TemporaryFile() as t: return t.write(b'abc')", "3"),
        on_files("import shutil; open('a', 'w').write('1'); shutil.copyfile('a', 'b'); return open('b').read()", "'1'"),
        on_files("import zipfile; z = zipfile.ZipFile('z', 'w'); z.writestr('a', 'b'); return z.namelist()", "['a']"),
        on_files(
            "from pathlib import Path; Path('x').write_text('é'); return [p.name for p in Path().iterdir()]", "['x']"
        ),
    ]
    found = list(judge.judge(asked))
    assert [(v.verdict, v.profile) for v in found] == [("passed", "files")] * len(asked), found


def test_a_script_is_judged_by_its_output_and_its_exit_status(judge: Judge):
    here(judge, "shell")
    asked = [
        (bash("read -r a; echo $((a * a))", "12", "144"), "passed", ""),
        (bash("seq 3 | sort -r | head -n 1", "", "3"), "passed", ""),
        (bash("echo 3; exit 4", "", "3"), "error", "exit"),
        (bash("echo 4", "", "3"), "wrong", "value"),
        (bash("if", "", ""), "error", "exit"),
        (
            bash("pwd; echo $HOME; id -u; hostname; env | wc -l | tr -d ' '", "", "/tmp\n/tmp\n65534\nsandbox\n6"),
            "passed",
            "",
        ),
        (bash("yes", "", ""), "error", "output"),
        (bash("x=$(head -c 1000000000 /dev/zero | tr '\\0' a)", "", ""), "memory error timeout", None),
    ]
    for (_, verdicts, reason), found in zip(asked, judge.judge(program for program, *_ in asked), strict=True):
        assert found.verdict in verdicts.split() and reason in (None, found.reason), found
        assert found.profile == "shell"


def test_profile_shell_judges_no_function(judge: Judge):
    here(judge, "shell")
    program = Program(source="f", entry_point="f", tests=[{"args": "[]", "expected": "1"}], profile="shell")
    with pytest.raises(DataError, match="profile shell: expected tests with stdin and stdout"):
        list(judge.judge([program]))


def test_programs_without_their_profile_are_counted_out_and_none_left_is_an_error(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    right = Program(source="print(1)", entry_point="", tests=[{"stdin": "", "stdout": "1"}])
    with Judge(SandboxConfig(), 1) as judge:
        host = judge.pool.host
        assert isinstance(host, servers.Servers)
        host._refused["shell"] = "bubblewrap (bwrap) is not installed"
        found = list(judge.judge([bash("echo 1", "", "1"), right]))
        assert [(v.verdict, v.reason, v.score) for v in found] == [("unscorable", "profile", None), ("passed", "", 1.0)]
        assert found[0].results[0].message == "bubblewrap (bwrap) is not installed"
        with pytest.raises(NoSandboxError, match=r"none of 2 programs.*bubblewrap"):
            list(judge.judge([bash("echo 1")] * 2))


def test_nothing_of_a_script_outlives_its_server(judge: Judge):
    here(judge, "shell")
    server = servers.Server(SandboxConfig(), "shell")
    server.launch()
    server.greet()
    assert server.process is not None
    limits = job_limits(Limits(), 9.0, 9.0, 60.0) | {"wall": 60.0}
    source = "(setsid sleep 59.125 &); sleep 59.125"
    job = {"id": "a", "nonce": "0" * 32, "profile": "shell", "source": source, "entry": None, "tests": [{"stdin": ""}]}
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(server.call, job | {"limits": limits}, 60.0)
        deadline = time.monotonic() + 30
        while len(_running(b"59.125")) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(_running(b"59.125")) == 2
        server.process.kill()
        with pytest.raises(servers.HarnessError):
            answer.result()
    deadline = time.monotonic() + 5
    while _running(b"59.125") and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not _running(b"59.125")


def _running(word: bytes) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if word in command.split(b"\0"):
            found.append(int(folder.name))
    return found


def test_what_a_killed_server_left_is_removed_by_the_next_however_deep(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    ghost = subprocess.Popen(["true"])
    ghost.wait()
    left = tmp_path / f"{scratch.PREFIX}{ghost.pid}-x"
    mine = tmp_path / f"{scratch.PREFIX}{os.getpid()}-x"
    mine.mkdir()
    (tmp_path / "other-1-x").mkdir()
    left.mkdir()
    code = "import os, sys\nos.chdir(sys.argv[1])\nfor n in range(3000):\n os.mkdir('d' * 90); os.chdir('d' * 90)\n open('a', 'w')"
    subprocess.run([sys.executable, "-c", code, str(left)], check=True)
    (left / "hidden").mkdir(mode=0o300)
    assert scratch.exceeds(str(left), 1e9, 256) and scratch.exceeds(str(left), 1e9, 1e9)
    base = Path(scratch.base())
    assert sorted(tmp_path.iterdir()) == sorted([mine, tmp_path / "other-1-x", base])


def test_no_answer_counts_of_a_candidate_that_stored_too_much_before_the_first_look():
    body = "for n in range(k): open(str(n), 'wb').write(bytes(1 << 19))\n return k"
    tests = {k: [{"args": f"[{k}]", "expected": str(k)}, {"args": "[0]", "expected": "0"}] for k in (1, 3)}
    wrong = [{"args": "[3]", "expected": "1"}, {"args": "[0]", "expected": "0"}]
    asked = [
        Program(source=f"def f(k):\n {body}", entry_point="f", tests=asked, profile="files", cpu_seconds=2)
        for asked in (wrong, tests[3], tests[1])
    ]
    with Judge(SandboxConfig(limits=Limits(scratch_mib=1)), 1) as judge:
        here(judge, "files")
        verdicts = [(v.verdict, v.reason) for v in judge.judge(asked)]
    assert verdicts == [("error", "output"), ("error", "output"), ("passed", "")]


def test_a_scratch_directory_is_measured_by_size_and_count(tmp_path):
    (tmp_path / "d").mkdir()
    with (tmp_path / "d" / "sparse").open("wb") as file:
        file.truncate(1000)
    assert not scratch.exceeds(str(tmp_path), 4096, 2)
    assert scratch.exceeds(str(tmp_path), 999, 2) and scratch.exceeds(str(tmp_path), 4096, 1)


# Three candidates that know no answer, and how public checkers judge them.
WALK = "import sys\ndef f(x): return [c for c in sys._getframe(1).f_code.co_consts if isinstance(c, str)][-1]"
EQUAL = "class Any:\n def __eq__(s, o): return True\ndef f(x): return Any()"
FIRST_LINE = "print(1, end='')"
CHECK = "def check(candidate):\n    assert candidate(3) == 'the answer'\ncheck(f)"


@pytest.mark.parametrize("source", [WALK, EQUAL])
def test_a_forgery_that_passes_where_the_test_runs_beside_the_candidate_scores_nothing(judge: Judge, source: str):
    beside = f"exec({source + chr(10) + CHECK!r}, {{}})"  # openai/human-eval: one namespace, and no exception is a pass
    assert subprocess.run([sys.executable, "-c", beside]).returncode == 0
    (found,) = judge.judge(
        [Program(source=source, entry_point="f", tests=[{"args": "[3]", "expected": "'the answer'"}])]
    )
    assert found.score == 0


def test_a_program_that_prints_only_the_first_line_scores_nothing(judge: Judge):
    expected = "1\n2\n3\n"
    output = subprocess.check_output([sys.executable, "-c", FIRST_LINE], text=True)
    pairs = zip(
        output.split("\n"), expected.split("\n"), strict=False
    )  # huggingface/open-r1: as many lines as there are
    assert all(mine.strip() == theirs.strip() for mine, theirs in pairs)
    (found,) = judge.judge([Program(source=FIRST_LINE, entry_point="", tests=[{"stdin": "", "stdout": expected}])])
    assert (found.verdict, found.score) == ("wrong", 0)


def stored() -> list[Program]:
    """500 programs: right answers and typical mistakes, a few that fail otherwise."""
    found = []
    for problem in programs.problems("train", 200, 1):
        assert problem.answer is not None
        for source in [problem.answer, *(wrong for _, wrong in mistakes.distractors(problem, 1)[:2])]:
            found.append(Program(source=source, entry_point=problem.entry_point, tests=problem.tests[:6]))
    name, tests = found[0].entry_point, found[0].tests[:2]
    bodies = ["raise ValueError('x')", "raise SystemExit", "return iter([])", "return [0] * 10**9", "while True: pass"]
    odd = [Program(source=f"def {name}(*a):\n {body}", entry_point=name, tests=tests) for body in bodies]
    return [*found[: 500 - len(odd)], *odd]


@contextmanager
def load(factor: int) -> Iterator[None]:
    """`factor` endless loops for every core."""
    count = factor * len(os.sched_getaffinity(0))
    spinning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


@pytest.mark.slow
@pytest.mark.full
def test_verdicts_are_the_same_quiet_under_fourfold_load_and_through_the_service():
    asked = stored()
    assert len(asked) == 500

    def outcomes(url: str | None) -> list[tuple]:
        with Judge(SandboxConfig(limits=Limits(wall_extra_seconds=20)), 2, url=url) as judge:
            return [(v.verdict, v.reason, v.passed, v.results) for v in judge.judge(asked)]

    process, url = started()
    try:
        quiet, through = outcomes(None), outcomes(url)
    finally:
        ended(process)
    with load(4):
        loaded = outcomes(None)
    kinds = {verdict for verdict, *_ in quiet}
    assert {"passed", "wrong", "error", "memory", "timeout", "syntax"} <= kinds
    assert through == quiet
    assert loaded == quiet


@pytest.mark.slow
def test_jobs_of_files_and_shell_leave_no_directory_process_or_descriptor():
    with Judge(SandboxConfig(), 2) as judge:
        here(judge, "files")
        here(judge, "shell")
        host = judge.pool.host
        assert isinstance(host, servers.Servers)
        pids = [s.process.pid for name in ("files", "shell") for s in host.running[name] if s.process is not None]
        some = [on_files("open('a', 'w').write('1'); return 1", "1"), bash("(setsid sleep 58.25 &); echo 1", "", "1")]

        def state() -> tuple[list[int], list[str], int]:
            fds = [len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in pids if os.getuid() == 0]
            children = [Path(f"/proc/{pid}/task/{pid}/children").read_text() for pid in pids]
            folders = [
                f
                for f in Path(tempfile.gettempdir()).glob(f"{scratch.PREFIX}*-*")
                if f.name.split("-")[1] in map(str, pids)
            ]
            left = sum(len(list(folder.iterdir())) for folder in folders) if os.getuid() == 0 else 0
            return fds, children, left

        assert {v.verdict for v in judge.judge(some * 5)} == {"passed"}
        before = state()
        assert {v.verdict for v in judge.judge(some * 100)} == {"passed"}
        assert state() == before and before[1:] == ([""] * len(pids), 0) and not _running(b"58.25")
        assert host.num_restarts == 0
    assert not [
        f for f in Path(tempfile.gettempdir()).glob(f"{scratch.PREFIX}*-*") if f.name.split("-")[1] in map(str, pids)
    ]
