"""Candidates that try to pass without being right; data for `attacks.py`. None may earn anything.

The tests are f(2) == 4, f(3) == 9, f(4) == 16; none of these sources squares. `FORGING`: name -> source. Standard
library only.
"""

# Sends arbitrary messages on the channel; its job's nonce is found in the frames of its callers.
FRAME = r"""
import os, struct, sys
def nonce():
    frame = sys._getframe()
    while frame:
        if "job" in frame.f_locals:
            return frame.f_locals["job"]["nonce"]
        frame = frame.f_back
def send(body):
    os.write(3, struct.pack("<I", len(body)) + body)
def answer(index, value, key=None):
    send(b'{"n":"%s","i":%d,"v":%s}' % ((key or nonce()).encode(), index, value))
"""

# Sent during the call, before a wrong answer; N stands for the nonce
BODIES: dict[str, str] = {
    "a claim to have passed": '{"n":"N","i":0,"v":4,"passed":true}',
    "a verdict": '{"n":"N","verdict":"passed","score":1.0}',
    "an index that is true": '{"n":"N","i":true,"v":4}',
    "an index that is a float": '{"n":"N","i":0.0,"v":4}',
    "an index that is a text": '{"n":"N","i":"0","v":4}',
    "a negative index": '{"n":"N","i":-1,"v":4}',
    "a huge index": '{"n":"N","i":99999999999999999999,"v":4}',
    "no index": '{"n":"N","v":4}',
    "two values": '{"n":"N","i":0,"v":4,"v":4}',
    "two nonces": '{"n":"N","n":"N","i":0,"v":4}',
    "keys in another order": '{"i":0,"n":"N","v":4}',
    "blanks": '{ "n": "N", "i": 0, "v": 4 }',
    "a line": '{"n":"N","i":0,"v":4}\\n',
    "a list": '[{"n":"N","i":0,"v":4}]',
    "a text": '"passed"',
    "nothing": "",
    "no JSON": '{"n":"N",',
    "an unknown tag": '{"n":"N","i":0,"v":{"eq":true}}',
    "an object that equals all": '{"n":"N","i":0,"v":{"o":"int"}}',
    "a NaN": '{"n":"N","i":0,"v":NaN}',
    "an integer with a needless tag": '{"n":"N","i":0,"v":{"i":"0x04"}}',
    "letters beyond ASCII": '{"n":"N","i":0,"v":"\u00e9"}',
    "an end before the answers": '{"n":"N","end":true}',
    "an end that is false": '{"n":"N","end":false}',
    "a load that failed, afterwards": '{"n":"N","load":"run","e":["A",""]}',
    "a load without a fault": '{"n":"N","load":"ok"}',
    "an exception that is none": '{"n":"N","i":0,"e":[]}',
    "all answers in one": '{"n":"N","i":0,"v":4}{"n":"N","i":1,"v":9}{"n":"N","i":2,"v":16}',
    "a nonce of zeros": '{"n":"00000000000000000000000000000000","i":0,"v":4}',
    "an empty nonce": '{"n":"","i":0,"v":4}',
}
# Written as is, without a length
RAW: dict[str, str] = {
    "a length of nothing": r"bytes(4)",
    "a length of 2 GiB": r"b'\xff\xff\xff\x7f' + b'{\"n\":\"'",
    "a length of 4 GiB": r"b'\xff' * 4",
    "half a length": r"b'\x10\0'",
    "a line of text": r"b'passed\n'",
    "the marks of the start": r"b'RA'",
    "the word to go on": r"b'ggg'",
    "half a frame": r"struct.pack('<I', 90) + b'{\"n\":\"' + nonce().encode()",
}
CALLED = FRAME + "def f(x):\n {send}\n return 0"

# What the call returns, or does instead of returning
RETURNED: dict[str, str] = {
    "a subclass that equals all": (
        "class A(int):\n def __eq__(s, o): return True\n __hash__ = int.__hash__\ndef f(x): return A(0)"
    ),
    "a class that lies about itself": (
        "class A:\n __class__ = int\n def __eq__(s, o): return True\ndef f(x): return A()"
    ),
    "a metaclass that lies": (
        "class M(type):\n __name__ = 'int'\n def __eq__(s, o): return True\n __hash__ = type.__hash__\n"
        "class A(metaclass=M): pass\ndef f(x): return A"
    ),
    "a dict that has everything": (
        "class D(dict):\n def __missing__(s, k): return s\n def __eq__(s, o): return True\ndef f(x): return D()"
    ),
    "a mock": (
        "class A:\n def __getattr__(s, n): return s\n def __call__(s, *a): return s\n def __eq__(s, o): return"
        " True\ndef f(x): return A()"
    ),
    "an encoded value": "def f(x): return {'i': '0x4'}",
    "a text of the answer": "def f(x): return '4'",
    "a set of guesses": "def f(x): return {4, 9, 16}",
    "a generator of guesses": "def f(x): yield from range(99)",
    "an exception named passed": "class passed(Exception): pass\ndef f(x): raise passed('passed')",
    "an exception that lies": "class A(Exception):\n def __str__(s): raise SystemExit(0)\ndef f(x): raise A",
    "SystemExit": "def f(x): raise SystemExit",
    "KeyboardInterrupt": "def f(x): raise KeyboardInterrupt",
    "a process that ends": "import os\ndef f(x): os._exit(0)",
    "a process that ends at once": "import os\nos._exit(0)",
}
# What is done to the process first
PATCHED: dict[str, str] = {
    "the encoder": (
        "import sys\nfor m in list(sys.modules.values()):\n if hasattr(m, 'encode') and hasattr(m, 'MAX_NODES'):"
        " m.encode = lambda v: '4'\ndef f(x): return 0"
    ),
    "the frames": (
        "import sys\nfor m in list(sys.modules.values()):\n if hasattr(m, 'write_frame'): m.write_all = lambda *a:"
        " None\ndef f(x): return 0"
    ),
    "the reader of literals": (
        "import ast\nast.literal_eval = ast.parse = compile = lambda *a, **k: [2]\ndef f(x): return 4"
    ),
    "os.write": "import os\nos.write = os.read = lambda *a: b''\ndef f(x): return 0",
    "os._exit": "import os\nos._exit = lambda *a: None\ndef f(x): return 0",
    "json": "import json\njson.dumps = json.loads = lambda *a, **k: 4\ndef f(x): return 0",
    "type": (
        "import builtins\nbuiltins.type = lambda *a: int\nbuiltins.isinstance = lambda *a: True\ndef f(x): return 0"
    ),
    "the arguments": (
        "import gc, sys\ndef f(x):\n frame = sys._getframe()\n while frame and 'arguments' not in frame.f_locals: frame"
        " = frame.f_back\n if frame: frame.f_locals['arguments'][:] = [([2], {})] * 3\n return 4"
    ),
    "the number of tests": (
        "import sys\ndef f(x):\n frame = sys._getframe()\n while frame and 'arguments' not in frame.f_locals: frame ="
        " frame.f_back\n if frame: del frame.f_locals['arguments'][1:]\n return 4"
    ),
    "a variable of the caller": (
        "import ctypes, sys\ndef f(x):\n frame = sys._getframe(1)\n frame.f_locals['index'] = 2\n"
        " ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))\n return 16"
    ),
    "the trace": "import sys\nsys.settrace(lambda *a: None)\nsys.setprofile(lambda *a: None)\ndef f(x): return 0",
    "the integer four": "import ctypes\nctypes.c_long.from_address(id(0) + 24).value = 4\ndef f(x): return 0",
    "its channel, by stdout": "import os\nos.dup2(1, 3)\ndef f(x): return 4",
    "its channel, by a pipe": "import os\nos.dup2(os.pipe()[1], 3)\ndef f(x): return 4",
    "its channel, closed": "import os\nos.close(3)\ndef f(x): return 4",
    "the word to go on": "import os\nos.set_blocking\ndef f(x):\n os.read(3, 9)\n return 0",
}
CODE = "import ctypes\nlibc = ctypes.CDLL(None)\ndef f(x):\n libc.write(3, b'\\x05\\0\\0\\0hello', 9)\n return 0"

FORGING: dict[str, str] = {
    **{
        f"sends {name}": CALLED.replace("{send}", f"send({body!r}.replace('N', nonce()).encode())")
        for name, body in BODIES.items()
    },
    **{f"writes {name}": CALLED.replace("{send}", f"os.write(3, {text})") for name, text in RAW.items()},
    **{f"returns {name}": source for name, source in RETURNED.items()},
    **{f"patches {name}": source for name, source in PATCHED.items()},
    "writes by ctypes": CODE,
}
