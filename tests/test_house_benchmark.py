"""benchmarks/house.py on a repository whose figures are counted by hand."""

import subprocess
import sys
from pathlib import Path

from benchmarks import house

FILES = {
    "pipeline/__init__.py": "",
    "pipeline/learning/__init__.py": "",
    "pipeline/learning/fit.py": "from pipeline.model import net\nfrom pipeline.run.config import Key\n",
    "pipeline/model/net.py": "from typing import Any\n\ndef build(a: Any):\n    import pipeline.learning.fit\n\n",
    "pipeline/run/config.py": "class Key:\n    def __init__(self, a, b, c, d, e, f, g, h, i): ...\n",
    "pipeline/run/stage.py": "class Key: ...\n" + "\n" * 600,
    "stages/language.py": "from pipeline.learning.fit import net\nfrom pipeline.run import stage\n# "
    + "x" * 119
    + "\n",
    "data/own/theirs.py": "#" * 200 + "\n",
}


def test_the_figures_of_a_small_repository(tmp_path: Path) -> None:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    figures = {figure.name: figure.value for figure in house.measure(tmp_path)}
    assert figures == {
        "Python files in pipeline/": 6,
        "rooms": 4,  # pipeline itself, learning, model, run
        "arrows between rooms": 3,  # learning to model and run, model to learning
        "circles of files": 1,
        "circles of rooms": 1,
        "lines in pipeline/ and stages/": 2 + 5 + 2 + 601 + 3,
        "lines of more than 120 characters": 1,
        "fmt: skip": 0,
        "Any in pipeline/ and stages/": 2,
        "files above 600 lines": 1,
        "files under 60 lines": 3,
        "names of several classes": 1,
        "constructors of 9 parameters or more": 1,
        "reader's way of language: files": 5,
        "reader's way of language: lines": 3 + 2 + 5 + 2 + 601,
    }


def test_it_prints_each_figure_beside_what_is_wanted() -> None:
    done = subprocess.run([sys.executable, "benchmarks/house.py"], capture_output=True, text=True, check=True)
    assert "Python files in pipeline/" in done.stdout and done.stdout.count("wanted") >= 15
