"""The sandbox contains what a model wrote: every attack in `attacks.py` fails, as root and as nobody, and leaves no
processes and leaks no secrets.
"""

import ast
import json
import os
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pipeline.run.errors import ConfigError
from pipeline.sandbox import kernel as sandbox_kernel
from pipeline.sandbox import servers as sandbox_servers
from pipeline.sandbox.judge import Candidate, Judge, Limits, SandboxConfig
from pipeline.sandbox.pool import CandidateJob, Pool
from tests import attacks
from tests.sandbox import ROOT, SANDBOX, WHO, unprivileged_python

NEIGHBOURS = ("jail", "child", "kernel", "messages", "watch")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")
ADD = Candidate(source="def add(a, b): return a + b", entry_point="add", tests=[{"args": "[1, 2]", "expected": "3"}])


def servers_of(judge: Judge) -> list[sandbox_servers.Server]:
    """The fork servers of this machine."""
    assert isinstance(judge.pool.host, sandbox_servers.Servers)
    return judge.pool.host.running


def judged_as_nobody() -> dict[str, Any]:
    python = unprivileged_python()
    if python is None:
        pytest.skip("no Python 3.11 that another user may execute")
    script = [python, "-B", str(ROOT / "tests" / "attacks.py")]
    return json.loads(subprocess.check_output(script, user=65534, group=65534, extra_groups=[], cwd="/"))


@pytest.fixture(scope="module", params=WHO)
def outcomes(request: pytest.FixtureRequest) -> dict[str, Any]:
    """What became of every attack."""
    return judged_as_nobody() if request.param == "nobody" else attacks.judge_all()


@pytest.mark.slow
@pytest.mark.parametrize("row", attacks.ROWS)
def test_no_attack_of_the_row_succeeds(row: str, outcomes: dict[str, Any]):
    expected, wrong = attacks.expected(), {}
    for name in attacks.ROWS[row]:
        verdicts, reasons = expected[name]
        verdict, reason, _ = outcomes[name]
        if verdict not in verdicts or (reasons is not None and reason not in reasons):
            wrong[name] = outcomes[name]
    assert not wrong


def test_the_table_has_its_54_rows_and_every_attack_stands_in_one():
    listed = {name for names in attacks.ROWS.values() for name in names}
    assert len(attacks.ROWS) == 54
    assert set(attacks.expected()) == listed
    assert len(attacks.FORGING) >= 60 and len(attacks.REFUSED) >= 60 and len(attacks.EXHAUSTING) >= 40


@pytest.mark.slow
def test_forgeries_score_nothing(outcomes: dict[str, Any]):
    scores = [outcome[2] for outcome in outcomes.values() if outcome[0] == "unsafe"]
    assert scores and not any(scores)


def test_the_jail_imports_nothing_of_the_project():
    for name in NEIGHBOURS:
        tree = ast.parse((SANDBOX / f"{name}.py").read_text(encoding="utf-8"))
        imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert not {top for top in imported if top.split(".")[0] in ("pipeline", "stages")}
        assert {top.split(".")[0] for top in imported} <= {*sys.stdlib_module_names, *NEIGHBOURS}


def decision(program: list, number: int, arch: int, arguments: tuple[int, ...] = ()) -> int:
    """What a seccomp filter answers, from running its classic BPF one instruction at a time."""
    data = struct.pack("<IIQ6Q", number, arch, 0, *(*arguments, *[0] * 6)[:6])
    word, at = 0, 0
    while True:
        code, if_true, if_false, constant = program[at]
        at += 1
        if code == sandbox_kernel.RETURN:
            return constant
        if code == sandbox_kernel.LOAD:
            word = struct.unpack_from("<I", data, constant)[0]
        elif code == sandbox_kernel.JUMP:
            at += constant
        else:
            tests = {
                sandbox_kernel.JUMP_EQ: word == constant,
                sandbox_kernel.JUMP_GE: word >= constant,
                sandbox_kernel.JUMP_SET: word & constant,
            }
            at += if_true if tests[code] else if_false


@pytest.mark.parametrize("name", sandbox_kernel.ARCHITECTURES)
def test_the_filter_allows_the_listed_calls_and_no_other(name: str):
    machine = sandbox_kernel.ARCHITECTURES[name]
    program = sandbox_kernel.filter_program(machine)
    allowed = {numbers[machine.column] for numbers in sandbox_kernel.ALLOWED.values()}
    eperm, enosys = sandbox_kernel.ERRNO | sandbox_kernel.EPERM, sandbox_kernel.ERRNO | sandbox_kernel.ENOSYS
    checked = {numbers[machine.column] for numbers in sandbox_kernel.CHECKED.values()}
    for number in {*range(600), 4000, 1 << 29} - checked:
        expected = enosys if number == sandbox_kernel.CLONE3 or number > sandbox_kernel.LAST_KNOWN else eperm
        assert decision(program, number, machine.audit) == (sandbox_kernel.ALLOW if number in allowed else expected), (
            number
        )
    assert decision(program, 1, 0x40000003) == decision(program, 1, 0x40000028) == sandbox_kernel.KILL  # i386, arm
    if name == "x86_64":
        assert decision(program, 0x40000000 | 39, machine.audit) == sandbox_kernel.KILL


@pytest.mark.parametrize("name", sandbox_kernel.ARCHITECTURES)
def test_arguments_decide_about_the_checked_calls(name: str):
    machine = sandbox_kernel.ARCHITECTURES[name]
    program = sandbox_kernel.filter_program(machine)
    thread = 0x3D0F00
    cases = {
        "clone": (
            [(thread,), (0x7D0F00,)],
            [
                *[(17,), (0x11200,), (thread | 0x10000000,), (0x20000 | thread,), (0,), (0x8011,), (thread | 0x8000,)],
                *[(thread & ~(1 << bit),) for bit in range(32) if thread >> bit & 1],
            ],
        ),
        "fcntl": ([(1, 0), (1, 3), (1, 1030)], [(1, 4), (1, 8), (1, 10), (1, 1024), (1, 1033)]),
        "ioctl": ([(1, 0x5401), (1, 0x5451)], [(1, 0x5412), (1, 0x5452), (1, 0x8901)]),
        "prlimit64": ([(0, 7, 0, 99)], [(0, 7, 99, 0), (0, 7, 1 << 32, 0), (5, 7, 0, 99)]),
        "sched_getaffinity": ([(0, 8, 99)], [(7, 8, 99)]),
    }
    assert set(cases) == set(sandbox_kernel.CHECKED)
    for call, (good, bad) in cases.items():
        number = sandbox_kernel.CHECKED[call][machine.column]
        assert all(decision(program, number, machine.audit, arguments) == sandbox_kernel.ALLOW for arguments in good), (
            call
        )
        refused = [decision(program, number, machine.audit, arguments) for arguments in bad]
        assert refused == [sandbox_kernel.ERRNO | sandbox_kernel.EPERM] * len(bad), call


def test_a_machine_without_a_sandbox_is_refused_with_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setattr(sandbox_servers, "JAIL", _broken_jail(tmp_path))
    with (
        pytest.raises(ConfigError, match=r"needs Linux with seccomp.*allow_unsafe.*no seccomp here"),
        Judge(SandboxConfig(), 1),
    ):
        pass


def test_allow_unsafe_runs_and_marks_the_verdicts(monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(sandbox_servers, "JAIL", _broken_jail(tmp_path))
    with Judge(SandboxConfig(allow_unsafe=True), 1) as judge:
        (verdict,) = judge.judge([ADD])
    assert (verdict.verdict, verdict.profile) == ("passed", "unsafe")
    assert "resource limits only" in caplog.text


def _broken_jail(folder: Path) -> Path:
    """A copy of the server that cannot install the filter."""
    for name in NEIGHBOURS:
        shutil.copy(SANDBOX / f"{name}.py", folder)
    folder.chmod(0o755)
    kernel = folder / "kernel.py"
    text = kernel.read_text(encoding="utf-8")
    changed = re.sub(r"(def filter_code\(.*?:\n)", r'\1    raise Refused("no seccomp here")\n', text, count=1)
    assert changed != text
    kernel.write_text(changed, encoding="utf-8")
    return folder / "jail.py"


def slow_child(seconds: float) -> dict[str, Any]:
    """The server's answer to a job whose child takes `seconds` of CPU and as long again to isolate itself."""
    limits = {"cpu": 0.2, "wall": 1.0, "job_cpu": 0.3, "job_wall": 1.1, "memory": 1 << 28, "results": 4096}
    limits |= {"stdout": 4096, "stderr": 4096}
    job = {"id": "a", "nonce": "0" * 32, "source": ADD.source, "entry": "add", "limits": limits}
    job["tests"] = [{"args": "[1, 2]", "kwargs": "{}"}]
    code = f"""
import json, os, sys, time
sys.path.insert(0, {str(SANDBOX)!r})
import child, jail, watch
never, channel = os.open(os.devnull, os.O_RDWR), os.dup(1)
for fd in (0, 1, 2, 3): os.dup2(never, fd)
memory = jail.prepare([], [], "sealed")["memory"]
watch.Watch.start_seconds, enter = 6.0, child.enter
def late(*given):
    while time.process_time() < {seconds}: pass
    time.sleep({seconds})
    enter(*given)
child.enter = late
answer = jail.run({job!r}, jail.Zygote(child.Cell(child.LAYERS["sealed"], memory, os.getpid(), False)), never)
os.write(channel, json.dumps(answer).encode())
"""
    return json.loads(subprocess.check_output([sys.executable, "-c", code], timeout=60))


def test_a_child_that_is_slow_to_close_itself_off_costs_no_server_and_no_verdict():
    answer = slow_child(1.2)
    assert answer["cut"] is None and len(answer["frames"]) == 1, answer
    assert answer["wall_ms"] < 1100  # the candidate's own time
    assert "could not isolate itself" in slow_child(4.0)["fault"]


@pytest.mark.parametrize("said", [b"RA", b""])
def test_a_candidate_that_writes_too_much_before_anybody_looked_is_no_fault_of_the_server(said: bytes):
    limits = {
        "cpu": 1,
        "wall": 2,
        "job_cpu": 1,
        "job_wall": 2,
        "memory": 1 << 28,
        "results": 4096,
        "stdout": 99,
        "stderr": 99,
    }
    job = {"id": "a", "nonce": "0" * 32, "source": "", "entry": None, "limits": limits, "tests": [{"stdin": ""}]}
    code = f"""
import json, os, socket, subprocess, sys
sys.path.insert(0, {str(SANDBOX)!r})
from watch import Watch
outside, inside = socket.socketpair()
inside.send({said!r})
(out, _), (err, flood), (reading, stdin), (jobs, held) = (os.pipe() for _ in range(4))
os.write(flood, bytes(999))
watch = Watch({job!r}, subprocess.Popen(["sleep", "60"], start_new_session=True).pid, outside.detach(), out, err, stdin)
watch.until_done(jobs)
watch.reap()
print(json.dumps(watch.answer()))
"""
    answer = json.loads(subprocess.check_output([sys.executable, "-c", code], timeout=60))
    assert answer.get("cut") == "output", answer


@pytest.mark.parametrize("victim", ["watcher", "zygote"])
def test_nothing_outlives_a_watcher_and_a_zygote_that_is_gone_costs_no_job(victim: str):
    sleeper = CandidateJob("import time\ntime.sleep(60)", "f", [{"args": "[]", "kwargs": "{}"}], 0.5)
    with Pool(SandboxConfig(limits=Limits(wall_extra_seconds=0.1)), 1) as pool, ThreadPoolExecutor(1) as other_thread:
        assert isinstance(pool.host, sandbox_servers.Servers) and pool.host.running[0].process is not None
        watcher = pool.host.running[0].process.pid
        (zygote,) = _children(watcher)
        if victim == "zygote":
            os.kill(zygote, signal.SIGKILL)
        reports = other_thread.submit(pool.run, sleeper)
        if victim == "watcher":
            while len(_children(watcher)) < 2:
                time.sleep(0.001)
            watched = [os.pidfd_open(pid) for pid in (watcher, *_children(watcher))]
            os.kill(watcher, signal.SIGKILL)
            assert all(select.select([fd], [], [], 5.0)[0] for fd in watched)
            for fd in watched:
                os.close(fd)
        found = reports.result()
        assert found is not None and [report.cut for report in found] == ["wall"] and pool.host.num_restarts == 1


@pytest.mark.slow
def test_a_killed_server_loses_no_job():
    with Judge(SandboxConfig(), 2) as judge:

        def programs():
            for number in range(30):
                if number == 10:
                    server = servers_of(judge)[0].process
                    assert server is not None
                    server.kill()
                yield ADD

        assert [v.verdict for v in judge.judge(programs())] == ["passed"] * 30
        assert judge.pool.host.num_restarts >= 1


def test_a_server_that_dies_twice_makes_the_candidate_unscorable(monkeypatch, caplog):
    with Judge(SandboxConfig(), 1) as judge:

        def fail(self, job, seconds):
            raise sandbox_servers.HarnessError("gone")

        monkeypatch.setattr(sandbox_servers.Server, "call", fail)
        (verdict,) = judge.judge([ADD])
    assert (verdict.verdict, verdict.reason, verdict.score) == ("unscorable", "harness", None)
    assert "unscorable" in caplog.text


@pytest.mark.skipif(os.getuid() != 0, reason="only root may read the memory of others")
def test_no_secret_of_the_trainer_is_in_the_memory_of_server_or_child(monkeypatch):
    monkeypatch.setenv("STAGECOACH_SECRET", "environment-5a7c0ffee")
    expected = "expected-" + os.urandom(8).hex()
    program = Candidate(
        source="import time\ndef f(x): time.sleep(x)",
        entry_point="f",
        tests=[{"args": "[60]", "expected": repr(expected)}],
    )
    with (
        Judge(SandboxConfig(limits=Limits(cpu_seconds=0.2, wall_extra_seconds=0.5)), 1) as judge,
        ThreadPoolExecutor(1) as other_thread,
    ):
        server = servers_of(judge)[0].process
        assert server is not None
        verdicts = judge.judge([program])
        future = other_thread.submit(next, verdicts)
        children: list[int] = []
        while len(children) < 2:  # the zygote and the candidate
            children = _children(server.pid)
        memory = b"".join(map(_memory, (server.pid, *children)))
        environment = Path(f"/proc/{server.pid}/environ").read_bytes()
        assert future.result().verdict == "timeout"
    assert b"time.sleep(x)" in memory  # we did read the right memory
    assert expected.encode() not in memory and b"environment-5a7c0ffee" not in memory
    assert environment.replace(b"\0", b"").startswith(b"PYTHONHASHSEED=0") or not environment.strip(b"\0")


def _children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.skipif(os.getuid() != 0, reason="only root may read the memory of others")
def test_nothing_of_a_job_is_ever_in_the_memory_of_the_zygote():
    words = [os.urandom(8).hex() for _ in range(5)]
    source, stdin, argument, value, error = words
    asked = [
        Candidate(
            source=f"NAME_{source} = 1\nprint(input())", entry_point="", tests=[{"stdin": stdin, "stdout": stdin}]
        ),
        Candidate(source="def f(x): return x", entry_point="f", tests=[{"args": f"['{argument}']", "expected": "1"}]),
        Candidate(source=f"def f(): return '{value}'", entry_point="f", tests=[{"args": "[]", "expected": "1"}]),
        Candidate(
            source=f"def f(): raise ValueError('{error}')", entry_point="f", tests=[{"args": "[]", "expected": "1"}]
        ),
        Candidate(source="import sys\nsys.exit(97)", entry_point="", tests=[{"stdin": "", "stdout": ""}]),
    ]
    with Judge(SandboxConfig(), 1) as judge:
        process = servers_of(judge)[0].process
        assert process is not None
        (zygote,) = _children(process.pid)
        before = _memory(zygote)
        assert [v.verdict for v in judge.judge(asked * 20)] == ["passed", "wrong", "wrong", "error", "error"] * 20
        watcher, after = _memory(process.pid), _memory(zygote)
        lines = Path(f"/proc/{zygote}/maps").read_text().splitlines()
        shared = [line for line in lines if line.split()[1] in ("rw-s", "rwxs", "-w-s")]
    assert any(word.encode() in watcher for word in words)  # we did read the right memory
    assert not [word for word in words if word.encode() in after or word.encode("utf-16-le") in after]
    assert not shared and abs(len(after) - len(before)) < 1 << 16


def _memory(pid: int) -> bytes:
    found = bytearray()
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            span, rights, *_ = line.split()
            if "rw" in rights and "[v" not in line:
                start, end = (int(part, 16) for part in span.split("-"))
                try:
                    memory.seek(start)
                    found += memory.read(end - start)
                except OSError:
                    continue
    return bytes(found)


def test_a_program_reads_its_stdin_and_its_time_out_stops_no_other_test():
    source = "import sys\nn = int(input())\nwhile n < 0: pass\nprint(sum(map(int, sys.stdin.read().split())) + n)"
    tests = [
        {"stdin": "1\n2 3\n", "stdout": "6\n"},
        {"stdin": "-1\n", "stdout": "0"},
        {"stdin": "1\n" + "1 " * 100_000, "stdout": "100001  \n\n"},
        {"stdin": "", "stdout": ""},
    ]
    with Judge(SandboxConfig(limits=Limits(cpu_seconds=0.4)), 1) as judge:
        (verdict,) = judge.judge([Candidate(source=source, entry_point="", tests=tests)])
    assert [r.verdict for r in verdict.results] == ["passed", "timeout", "passed", "error"]
    assert verdict.results[3].message == "EOFError: EOF when reading a line"


def test_exit_and_quit_end_a_program_as_in_any_script():
    programs = [
        Candidate(source=f"print(1)\n{s}\nprint(2)", entry_point="", tests=[{"stdin": "", "stdout": "1"}])
        for s in ("exit()", "quit(0)", "exit(1)")
    ]
    with Judge(SandboxConfig(), 1) as judge:
        assert [(v.verdict, v.reason) for v in judge.judge(programs)] == [("passed", "")] * 2 + [("error", "exit")]


@pytest.mark.slow
def test_a_fresh_child_goes_on_after_a_time_out_and_the_rest_time_out_after_three():
    source = "seen = []\ndef f(x):\n seen.append(x)\n while x in BAD: pass\n return len(seen)"
    config = SandboxConfig(limits=Limits(cpu_seconds=0.1))
    tests = [{"args": f"[{n}]", "expected": e} for n, e in zip(range(6), ["1", "2", "0", "1", "2", "3"], strict=True)]
    with Judge(config, 2) as judge:
        bad = ("BAD = {2}\n", "BAD = {0, 1, 3}\n")
        one, three = judge.judge(Candidate(source=b + source, entry_point="f", tests=tests) for b in bad)
    assert [r.verdict for r in one.results] == ["passed", "passed", "timeout", "passed", "passed", "passed"]
    assert [r.verdict for r in three.results] == ["timeout", "timeout", "wrong", "timeout", "timeout", "timeout"]


def test_runs_are_alike_whatever_the_hash_seed_and_the_time_zone(monkeypatch):
    source = (
        "import random, time\ndef f(): return [random.random(), list({'a', 'b', 'c', 'd'}), time.localtime(0).tm_hour]"
    )
    frames = []
    for seed, zone in (("1", "Asia/Tokyo"), ("2", "America/Lima")):
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        monkeypatch.setenv("TZ", zone)
        with Pool(SandboxConfig(), 1) as pool:
            reports = pool.run(CandidateJob(source, "f", [{"args": "[]", "kwargs": "{}"}], 0.5))
        assert reports is not None
        frames.append([json.loads(frame)["v"] for frame in reports[0].frames])
    assert frames[0] == frames[1] and frames[0][0][2] == 0


def test_threads_locks_and_chance_work_in_a_child_though_no_handler_runs_at_its_fork():
    source = (
        "import concurrent.futures, logging, os, random, threading\ndef f():\n   "
        " logging.getLogger('a').warning('said')\n    with concurrent.futures.ThreadPoolExecutor(2) as pool: doubled ="
        " list(pool.map(lambda n: 2 * n, range(4)))\n    main = threading.main_thread()\n    alone ="
        " threading.current_thread() is main and main.is_alive() and threading.active_count() == 1\n    return"
        " [doubled, alone, random.random() == random.Random(0).random()]"
    )
    program = Candidate(
        source=source, entry_point="f", tests=[{"args": "[]", "expected": "[[0, 2, 4, 6], True, True]"}]
    )
    with Judge(SandboxConfig(), 1) as judge:
        assert [verdict.verdict for verdict in judge.judge([program] * 2)] == ["passed", "passed"]


@pytest.mark.slow
def test_a_preloaded_module_can_be_imported_and_another_cannot():
    source = "import jinja2\ndef f(): return jinja2.Template('{{ a }}').render(a=3)"
    program = Candidate(source=source, entry_point="f", tests=[{"args": "[]", "expected": "'3'"}])
    verdicts = []
    for preload in ((), ("jinja2",)):
        with Judge(SandboxConfig(preload=preload), 1) as judge:
            verdicts += judge.judge([program])
    assert [v.verdict for v in verdicts] == ["error", "passed"]
    assert "ModuleNotFoundError" in verdicts[0].results[0].message


def test_a_preloaded_module_that_is_not_there_is_named():
    config = SandboxConfig(preload=("no_such_module",), allow_unsafe=True)
    with pytest.raises(ConfigError, match=r"sandbox\.preload: No module named 'no_such_module'"), Judge(config, 1):
        pass


@pytest.mark.slow
def test_a_thousand_jobs_leave_no_process_descriptor_or_server_memory():
    with Judge(SandboxConfig(), 2) as judge:

        def servers() -> list[int]:
            return [server.process.pid for server in servers_of(judge) if server.process is not None]

        def state() -> list[int]:
            pids = [*servers(), *(pid for one in children() for pid in one)] if os.getuid() == 0 else []
            return [len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in pids]

        def children() -> list[list[int]]:
            return [_children(pid) for pid in servers()]

        assert all(v.verdict == "passed" for v in judge.judge([ADD] * 20))
        before, zygotes = state(), children()
        assert all(v.verdict == "passed" for v in judge.judge([ADD] * 1000))
        assert state() == before and children() == zygotes and [len(one) for one in zygotes] == [1, 1]
        assert judge.pool.host.num_restarts <= 1  # a machine that stalls may cost a server, never a job
