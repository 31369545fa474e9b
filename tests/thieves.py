"""Candidates that look for another candidate's answer; data for `test_theft.py`.

A problem asks for `answer-<x>-<16 hexadecimal digits>`, which nobody can guess; an honest candidate computes it from a
salt in its own source. A thief searches whatever it can reach for that answer and for the salt; x says which problem
it has, so any leak is enough. `HUNTS`: name -> generator `hunt()` of bytes that may hold either. Standard library only:
`python thieves.py ROOT GROUPS WORKERS [URL]` judges groups of 8 as whoever runs it and prints JSON.
"""

import hashlib
import json
import random
import sys
from typing import Any

HONEST = """
import hashlib
SALT = "salt-{problem}-{salt}"
def f(x):
    return f"answer-{{x}}-" + hashlib.sha256(f"{{SALT}}-{{x}}".encode()).hexdigest()[:16]
"""
WRONG = """
def f(x):
    return f"answer-{x}-0123456789abcdef"
"""

# What the hunts share: `texts` of any value, and `f`, which returns what the hunt finds.
COMMON = """
import ctypes, gc, hashlib, os, re, select, sys
SEEN = {}
def texts(*found):
    # nearest first; what was seen is kept, so that no id comes twice
    found = list(found)
    for value in found:
        if isinstance(value, str): yield value.encode("utf-8", "replace")
        elif isinstance(value, (bytes, bytearray)): yield bytes(value)
        elif id(value) not in SEEN and len(SEEN) < 400_000:
            SEEN[id(value)] = value
            try: found += gc.get_referents(value)
            except Exception: pass
libc = ctypes.CDLL(None, use_errno=True)
libc.write.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t)
libc.sbrk.restype = libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = (ctypes.c_size_t,)
libc.sbrk.argtypes = (ctypes.c_long,)
def f(x):
    for text in hunt():
        found = re.search(rb"answer-%d-([0-9a-f]{16})" % x, text)
        if found and found.group(1) != b"0123456789abcdef":
            return f"answer-{x}-" + found.group(1).decode()
        found = re.search(rb"salt-%d-[0-9a-f]{16}" % (x // 1000), text)
        if found:
            return f"answer-{x}-" + hashlib.sha256(found.group() + b"-%d" % x).hexdigest()[:16]
    return f"answer-{x}-0123456789abcdef"
"""
# Mapped memory without /proc: write(2) on a pipe answers EFAULT where nothing is mapped.
SCAN = """
source, sink = os.pipe()
def at(address, size):
    done = libc.write(sink, address, size)
    return os.read(source, done) if done > 0 else b""
def region(start, size):
    end, kept = start + size, b""
    while start < end:
        piece = at(start, 32768)
        if piece: yield kept + piece
        kept = piece[-64:]
        start += len(piece) or 4096
"""

HUNTS: dict[str, str] = {
    "frames": """
def hunt():
    frame = sys._getframe()
    while frame:
        yield from texts(*frame.f_locals.values(), frame.f_globals)
        frame = frame.f_back
""",
    "frames of every thread": """
def hunt():
    for frame in sys._current_frames().values():
        while frame:
            yield from texts(*frame.f_locals.values(), frame.f_code)
            frame = frame.f_back
""",
    "gc": """
def hunt():
    gc.unfreeze()
    yield from texts(*gc.get_objects())
""",
    "modules": """
def hunt():
    yield from texts(*sys.modules.values())
""",
    "exceptions and callbacks": """
def hunt():
    import atexit, linecache, threading, traceback
    yield from texts(sys.exc_info(), vars(sys).get("last_value"), linecache.cache, threading._active, vars(atexit))
    try: raise KeyError
    except KeyError as error:
        trace = error.__traceback__
        frame = trace.tb_frame
        while frame:
            yield from texts(frame.f_locals, frame.f_builtins)
            frame = frame.f_back
""",
    "heap by a write oracle": SCAN
    + """
def hunt():
    top = libc.sbrk(0)
    yield from region(top - (96 << 20) & ~4095, 96 << 20)
""",
    "arenas by a write oracle": SCAN
    + """
def hunt():
    gc.unfreeze()
    places = {id(one) >> 20 for one in gc.get_objects()} | {id(one) >> 20 for one in (texts, "a", 1 << 99, b"b")}
    for place in sorted({place + d for place in places for d in (-1, 0, 1)}): yield from region(place << 20, 1 << 20)
""",
    "mapped blocks by a write oracle": SCAN
    + """
def hunt():
    block = bytearray(1 << 20)
    here = ctypes.addressof(ctypes.c_char.from_buffer(block)) & ~4095
    yield from region(here - (48 << 20), 96 << 20)
""",
    "stack by a write oracle": SCAN
    + """
def hunt():
    here = ctypes.c_void_p.in_dll(libc, "environ").value & ~4095
    yield from region(here - (4 << 20), 5 << 20)
""",
    "freed memory": """
def hunt():
    for size in (*range(24, 1032, 16), *(1 << n for n in range(10, 22))):
        for _ in range(64 if size < 70000 else 4):
            place = libc.malloc(size)
            yield ctypes.string_at(place, size)
""",
    "freed objects": """
def hunt():
    for size in range(1, 512):
        for _ in range(20):
            block = ctypes.create_string_buffer(0)
            raw = b"".join([bytes([size % 256]) * size])
            yield ctypes.string_at(id(raw) - 512, 1024)
""",
    "own memory by /proc": """
def hunt():
    for name in ("maps", "smaps", "mem", "environ", "cmdline", "stack", "fd/0"):
        for who in ("self", "thread-self", os.getpid()):
            try: yield open(f"/proc/{who}/{name}", "rb").read(1 << 20)
            except OSError: pass
""",
    "others' memory by /proc": """
def hunt():
    here = os.getppid()
    for who in range(max(2, here - 40), here + 40):
        for name in ("mem", "environ", "maps"):
            try: yield open(f"/proc/{who}/{name}", "rb").read(1 << 20)
            except OSError: pass
""",
    "others' memory by process_vm_readv": SCAN
    + """
def hunt():
    room = ctypes.create_string_buffer(1 << 16)
    top = libc.sbrk(0) - (8 << 20) & ~65535
    for who in range(max(2, os.getppid() - 8), os.getppid() + 8):
        for step in range(128):
            mine = (ctypes.c_void_p * 2)(ctypes.addressof(room), 1 << 16)
            theirs = (ctypes.c_void_p * 2)(top + (step << 16), 1 << 16)
            if libc.process_vm_readv(who, mine, 1, theirs, 1, 0) > 0: yield room.raw
""",
    "environment": """
def hunt():
    yield from texts(os.environ, sys.argv, sys.orig_argv, vars(sys))
    place = ctypes.c_void_p.in_dll(libc, "environ").value
    pointers = (ctypes.c_char_p * 64).from_address(place) if place else ()
    for one in pointers:
        if one is None: break
        yield one
""",
    "descriptors": """
def hunt():
    for fd in range(256):
        try:
            if select.select([fd], [], [], 0)[0] and fd != 3: yield os.read(fd, 1 << 16)
        except (OSError, ValueError): pass
        for place in (0, 4096):
            try: yield os.pread(fd, 1 << 16, place)
            except OSError: pass
""",
    "its own channel": """
def hunt():
    for fd in (3, 0, 1, 2):
        for call in ("recv", "pread"):
            room = ctypes.create_string_buffer(4096)
            if getattr(libc, call)(fd, room, 4096, 0x42) > 0: yield room.raw
""",
    "streams": """
def hunt():
    for stream in (sys.stdin, sys.stdout, sys.stderr, sys.__stdin__, sys.__stdout__, sys.__stderr__):
        yield from texts(stream, stream.buffer, getattr(stream.buffer, "raw", None))
        for one in (stream, stream.buffer): yield ctypes.string_at(id(one), 256)
    try: yield sys.stdout.buffer.getvalue()
    except AttributeError: pass
""",
    "shared memory": """
def hunt():
    import mmap
    for number in range(64):
        place = libc.shmat(number, None, 4096)
        if place not in (-1, None): yield ctypes.string_at(place, 4096)
        room = ctypes.create_string_buffer(4096)
        if libc.msgrcv(number, room, 4000, 0, 0x800) > 0: yield room.raw
    for path in ("/dev/shm", "/dev/mqueue", "/tmp", "/run"):
        try: yield repr(os.listdir(path)).encode()
        except OSError: pass
    yield mmap.mmap(-1, 1 << 16).read()
""",
    "timing": """
import time
LAST, GAPS = [0.0], []
def hunt():
    now = time.perf_counter()
    GAPS.append(now - LAST[0])
    LAST[0] = now
    yield b"answer-%d-" % 0 + hashlib.sha256(repr(min(GAPS) < GAPS[-1]).encode()).hexdigest()[:16].encode()
""",
}


def problem(number: int, draw: random.Random) -> dict[str, Any]:
    """The honest source of a problem, the two tests of a function, and the one of a program on stdin."""
    salt = f"{draw.getrandbits(64):016x}"
    key = 100_000 + number
    asked = [key * 1000 + draw.randrange(500), key * 1000 + 500 + draw.randrange(500)]
    answers = [f"answer-{x}-{hashlib.sha256(f'salt-{key}-{salt}-{x}'.encode()).hexdigest()[:16]}" for x in asked]
    pairs = list(zip(asked, answers, strict=True))
    return {
        "honest": HONEST.format(problem=key, salt=salt),
        "function": [{"args": f"[{x}]", "expected": repr(answer), "visible": False} for x, answer in pairs],
        "program": [{"stdin": f"{x}\n", "stdout": answer, "visible": False} for x, answer in pairs[:1]],
    }


def group(number: int, draw: random.Random) -> list[dict[str, Any]]:
    """Eight candidates for one problem: three pairs of an honest one and a thief, then a wrong one and a thief."""
    asked, kind = problem(number, draw), "program" if number % 3 == 2 else "function"
    names = list(HUNTS)
    thieves = [(name, COMMON + HUNTS[name]) for name in (names[(4 * number + i) % len(names)] for i in range(4))]
    draw.shuffle(thieves)
    honest, wrong = ("honest", asked["honest"]), ("wrong", WRONG)
    chosen = [honest, thieves[0], honest, thieves[1], honest, thieves[2], wrong, thieves[3]]
    tail = "\nprint(f(int(input())))\n" if kind == "program" else ""
    return [{"name": name, "kind": kind, "source": source + tail, "tests": asked[kind]} for name, source in chosen]


def judged(groups: int, workers: int, url: str | None = None, seed: int = 0) -> list[tuple[str, str, float | None]]:
    """(name, function or program, score) of every candidate in `groups` groups."""
    from pipeline.sandbox.judge import Candidate, Judge, Limits, SandboxConfig

    draw = random.Random(seed)
    asked = [one for number in range(groups) for one in group(number, draw)]
    config = SandboxConfig(limits=Limits(cpu_seconds=5.0, job_cpu_seconds=20.0))
    with Judge(config, workers, url=url) as judge:
        programs = (Candidate(source=one["source"], entry_point="f", tests=one["tests"]) for one in asked)
        verdicts = list(judge.judge(programs))
    return [(one["name"], one["kind"], verdict.score) for one, verdict in zip(asked, verdicts, strict=True)]


if __name__ == "__main__":
    sys.path.insert(0, sys.argv[1])
    sys.stdout.write(json.dumps(judged(int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:5])))
