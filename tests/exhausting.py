"""Candidates that try to use up the machine; data for `attacks.py`. None may pass, and all must end in time and leave
nothing behind.

The one call is f(2), three times. `EXHAUSTING`: name -> source. Standard library only.
"""

from tests import bomb

LIBC = "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\nlibc.mmap.restype = ctypes.c_void_p\n"
MAP = "libc.mmap(None, ctypes.c_size_t({size}), 3, {flags}, -1, ctypes.c_long(0))"

EXHAUSTING: dict[str, str] = {
    # time
    "a loop that catches everything": "def f(x):\n while True:\n  try:\n   while True: pass\n  except: pass",
    "a power": "def f(x): return pow(7, 10 ** 9)",
    "a factorial": "import math\ndef f(x): return math.factorial(10 ** 7)",
    "a remainder of a large power": "def f(x): return (1 << 300000) ** 99 % 7",
    "digits of a large number": "import sys\nsys.set_int_max_str_digits(0)\ndef f(x): return str(1 << 9000000)",
    "a regular expression": "import re\ndef f(x): return re.match(r'(a+)+$', 'a' * 99 + 'b')",
    "sorting for ever": "import itertools\ndef f(x): return sorted(itertools.count())",
    "an endless generator": "def f(x): return sum(1 for _ in iter(int, 1))",
    "permutations": "import itertools\ndef f(x): return max(itertools.permutations(range(13)))",
    "colliding keys of its own": "def f(x): return len({n * (2**61 - 1) for n in range(1, 90000)})",
    "an endless __del__": "class A:\n def __del__(s):\n  while True: pass\ndef f(x):\n A()\n return 1",
    "an endless __repr__": "class A(Exception):\n def __str__(s):\n  while True: pass\ndef f(x): raise A",
    "an endless property of the module": "def f(x):\n while True: globals()[str(len(globals()))] = 1",
    "a storm of signals": (
        "import signal\nsignal.signal(14, lambda *a: None)\nsignal.setitimer(0, 1e-6, 1e-6)\ndef f(x):\n while True:"
        " pass"
    ),
    "threads that spin": (
        "import threading\ndef spin():\n while True: pass\ndef f(x):\n"
        " for _ in range(8): threading.Thread(target=spin, daemon=True).start()\n spin()"
    ),
    "import for ever": "import importlib, sys\ndef f(x):\n while True: importlib.reload(sys.modules['json'])",
    "compiling for ever": "def f(x):\n while True: compile('x = 1\\n' * 9999, 'a', 'exec')",
    # sleep
    "sleep in C": LIBC + "def f(x): return libc.sleep(3600)",
    "a lock that nobody opens": (
        "import threading\nlock = threading.Lock()\nlock.acquire()\ndef f(x): return lock.acquire()"
    ),
    "waiting for its input": "import os\ndef f(x):\n while True: os.read(3, 1)",
    "poll for ever": "import select\ndef f(x): return select.poll().poll()",
    "the main thread ends, another one goes on": (
        LIBC + "import threading, time\ndef go():\n while True: time.sleep(1)\nthreading.Thread(target=go).start()\ndef"
        " f(x): return libc.syscall(60 if ctypes.sizeof(ctypes.c_long) == 8 else 1, 0)"
    ),
    "sleep at exit": "import atexit, time\natexit.register(time.sleep, 3600)\ndef f(x): raise SystemExit",
    # memory
    "a doubling text": "def f(x):\n a = 'a'\n while True: a += a",
    "a growing dict": "def f(x):\n d = {}\n while True: d[len(d)] = bytearray(9999)",
    "a list of a million million": "def f(x): return [0] * 10 ** 12",
    "a range made a list": "def f(x): return list(range(10 ** 12))",
    "classes": "def f(x):\n a = []\n while True: a.append(type('A' * 99999, (), {}))",
    "a packed bomb": (
        "import zlib\nDATA = zlib.compress(bytes(1 << 26), 9)\ndef f(x): return len(zlib.decompress(DATA) * 9)"
    ),
    "pages mapped one by one": (
        LIBC
        + "def f(x):\n while True:\n  if "
        + MAP.format(size=4096, flags="0x22")
        + " in (None, 2 ** 64 - 1): raise MemoryError"
    ),
    "shared pages": (
        LIBC
        + "def f(x):\n place = "
        + MAP.format(size="1 << 30", flags="0x21")
        + "\n if place == 2 ** 64 - 1: raise MemoryError\n ctypes.memset(place, 1, 1 << 30)"
    ),
    "a reservation": (
        LIBC
        + "def f(x):\n if "
        + MAP.format(size="1 << 46", flags="0x4022")
        + " == 2 ** 64 - 1: raise MemoryError\n return 1"
    ),
    "the break": (
        LIBC + "libc.sbrk.restype = ctypes.c_void_p\ndef f(x):\n while libc.sbrk(1 << 20) != 2 ** 64 - 1: pass\n raise"
        " MemoryError"
    ),
    "locked pages": LIBC + "def f(x): return libc.mlockall(3)",
    "a long message": "def f(x): raise ValueError('a' * (1 << 27))",
    "a chain of exceptions": (
        "def f(x):\n e = None\n while True:\n  n = ValueError(bytearray(9999))\n  n.__context__ = e\n  e = n"
    ),
    # stack
    "recursion in a thread": (
        "import sys, threading\nsys.setrecursionlimit(10 ** 9)\ndef go(): go()\n"
        "def f(x):\n t = threading.Thread(target=go)\n t.start()\n t.join()\n return 1"
    ),
    "recursion of a comparison": (
        "import sys\nsys.setrecursionlimit(10 ** 9)\na = []\na.append(a)\nb = []\nb.append(b)\ndef f(x): return a == b"
    ),
    "a deep source": (
        "SOURCE = '(' * 150 + ')' * 150\ndef f(x):\n while True:\n  try: compile(SOURCE * 99, 'a', 'eval')\n  except"
        " Exception: pass"
    ),
    # descriptors, threads, output
    "all descriptors": "import os\ndef f(x):\n a = []\n while True: a.append(os.pipe())",
    "all descriptors, full": (
        "import os\ndef f(x):\n while True:\n  r, w = os.pipe()\n  os.set_blocking\n  os.write(w, bytes(65536))"
    ),
    "epolls in epolls": (
        "import select\ndef f(x):\n a = [select.epoll()]\n while True:\n  a.append(select.epoll())\n "
        " a[-1].register(a[-2])"
    ),
    "events": LIBC + "def f(x):\n while libc.eventfd(0, 0) >= 0: pass\n raise OSError",
    "threads with small stacks": (
        "import threading, time\nthreading.stack_size(32768)\ndef f(x):\n"
        " while True: threading.Thread(target=time.sleep, args=(99,), daemon=True).start()"
    ),
    "output without an end of line": "import os\ndef f(x):\n while True: os.write(1, bytes(99))",
    "errors by ctypes": LIBC + "def f(x):\n while True: libc.write(2, b'a' * 999, 999)",
    "a long answer": "def f(x): return ['a' * 99] * 99999",
    "an answer that repeats itself": "a = [0] * 99\nfor _ in range(9): a = [a] * 99\ndef f(x): return a",
    "answers without a question": "import os\ndef f(x):\n while True: os.write(3, b'x' * 4096)",
}
if bomb.AVAILABLE:
    subsets = [bomb.PTHREAD & ~(1 << bit) for bit in range(32) if bomb.PTHREAD >> bit & 1]
    EXHAUSTING |= {
        "threads by clone": (
            bomb.START + f"def f(x):\n made = start({bomb.PTHREAD}, 20000)\n return made if made < 65 else 4"
        ),
        "threads by a subset of the flags": (
            bomb.START + f"def f(x): return 4 if any(start(s, 1) for s in {subsets}) else 0"
        ),
    }
