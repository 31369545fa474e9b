"""Writes down which functions of the working directory a stage runs, for test_codehash.py: put this folder on
PYTHONPATH.

    STAGECOACH_TRACED=FOLDER    each process of a stage appends `stage, file, line` of a function's first call to
                                FOLDER/<pid>

At once and in every process, forked ones too, since a worker ends without a word. Left out are calls that come from
around the stage (its lifecycle, its tracking), not from its own code.
"""

import os
import sys
import threading
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import CodeType, FrameType

FOLDER, HERE = os.environ.get("STAGECOACH_TRACED"), f"{Path.cwd()}{os.sep}"
STAGE = next((word.removeprefix("stages.") for word in sys.orig_argv if word.startswith("stages.")), "")
AROUND = tuple(f"{HERE}pipeline{os.sep}{name}.py" for name in os.environ.get("STAGECOACH_AROUND", "").split(","))
_SEEN: dict[int, CodeType] = {}  # the code itself is held, so that its id stays its own


def _call(frame: FrameType, event: str, _: object) -> None:
    code = frame.f_code
    if id(code) in _SEEN:
        return
    path = code.co_filename
    if not path.startswith(HERE) or not code.co_flags & CO_OPTIMIZED:  # others', or the body of a module or class
        _SEEN[id(code)] = code
    elif path not in AROUND and not _from_around(frame):
        _SEEN[id(code)] = code
        with Path(f"{FOLDER}/{os.getpid()}").open("a", encoding="utf-8") as file:
            file.write(f"{STAGE}\t{path[len(HERE) :]}\t{code.co_firstlineno}\n")


def _from_around(frame: FrameType | None) -> bool:
    while frame := frame and frame.f_back:
        path = frame.f_code.co_filename
        if path in AROUND:
            return True
        if path.startswith(f"{HERE}stages") and frame.f_code.co_name != "<module>":
            return False
    return False


if FOLDER and STAGE:
    threading.settrace(_call)
    sys.settrace(_call)
