"""A user whose Python is not the environment's can judge programs with the standard library alone."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
# -S: no site-packages. Of our own code, the judge loads only its own room, `run` and `text`.
LOADED = """
import sys
sys.path.insert(0, ".")
import pipeline.sandbox.judge
known = {*sys.stdlib_module_names, "pipeline", "__main__"}
foreign = [name for name in sys.modules if name.partition(".")[0] not in known]
ours = {name for name in sys.modules if name.startswith("pipeline.")}
assert not foreign, foreign
assert not [name for name in ours if name.split(".")[1] not in ("sandbox", "run", "text")], ours
"""


def test_the_judge_loads_nothing_but_the_standard_library() -> None:
    done = subprocess.run([sys.executable, "-S", "-c", LOADED], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
