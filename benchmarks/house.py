"""The size of the code: files, rooms, arrows between them, and what a reader of one method has to open.

    python benchmarks/house.py [ROOT] [--json FILE]                      each figure and its limit

A room is a folder in `pipeline/`; an arrow leads from a room to another whose files it imports, even inside functions.
The "reader's way" of a method is its stage; the loop, rollout and streams that the stage imports; and their direct
imports. An empty `__init__.py` is counted, but not as a short file. Every stage has a `Params`, so that name is not
counted as a repeated name.
"""

import argparse
import ast
import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

Node = TypeVar("Node")
WAYS = {"language": (25, 5000), "grpo": (28, 6000), "rlhf": (30, 6500), "diffusion": (28, 6000)}  # limits: files, lines
READ_ON = ("pipeline/learning/fit.py", "pipeline/rl/rollout.py", "pipeline/batches/", "pipeline/diffusion/batches.py")
SKIPPED = {".venv", ".work", ".git", "data", "models", "metrics", "reports", "build", "__pycache__"}
PRAGMA = re.compile(r"\s+# (type|pyright|noqa)\b.*$")  # ignored in the line length, as in ruff
LONGEST_LINE, LONGEST_FILE, SHORTEST_FILE = 120, 600, 60


@dataclass(frozen=True)
class Figure:
    """A measurement: its name, its value and its limit."""

    name: str
    value: int
    wanted: int

    def __str__(self) -> str:
        return (
            f"{self.name:<44} {self.value:>7,}  wanted {self.wanted:>6,}  {'' if self.value <= self.wanted else 'MORE'}"
        )


def main() -> int:
    """Print the figures. Returns the exit code."""
    parser = argparse.ArgumentParser(description="the size of the code")
    parser.add_argument("root", type=Path, nargs="?", default=Path(__file__).resolve().parents[1])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    figures = measure(options.root)
    print("\n".join(map(str, figures)))
    if options.json:
        options.json.write_text(json.dumps({one.name: one.value for one in figures}, indent=1) + "\n")
    return 0


def measure(root: Path) -> list[Figure]:
    """All figures of a repository."""
    pipeline = sorted((root / "pipeline").rglob("*.py"))
    ours = [*pipeline, *sorted((root / "stages").glob("*.py"))]
    texts = {path: path.read_text(encoding="utf-8") for path in python_files(root)}
    trees = {path: ast.parse(texts[path]) for path in ours}
    imports = {path: imported(root, path, trees[path]) for path in ours}
    rooms = {path: room(root, path) for path in ours}
    arrows = {(rooms[path], rooms[other]) for path in pipeline for other in imports[path]}
    arrows = {(one, other) for one, other in arrows if one != other}
    between: dict[str, set[str]] = defaultdict(set)
    for one, other in arrows:
        between[one].add(other)
    lines = {path: texts[path].count("\n") for path in ours}
    classes = Counter(node.name for tree in trees.values() for node in tree.body if isinstance(node, ast.ClassDef))
    figures = [
        Figure("Python files in pipeline/", len(pipeline), 170),
        Figure("rooms", len({rooms[path] for path in pipeline}), 20),
        Figure("arrows between rooms", len(arrows), 110),
        Figure("circles of files", circles({path: imports[path] & set(pipeline) for path in pipeline}), 0),
        Figure("circles of rooms", circles(between), 0),
        Figure("lines in pipeline/ and stages/", sum(lines.values()), 42_000),
        Figure(
            f"lines of more than {LONGEST_LINE} characters",
            sum(len(PRAGMA.sub("", line)) > LONGEST_LINE for text in texts.values() for line in text.splitlines()),
            0,
        ),
        Figure("fmt: skip", sum(text.count("# fmt: " + "skip") for text in texts.values()), 20),
        Figure("Any in pipeline/ and stages/", sum(len(re.findall(r"\bAny\b", texts[path])) for path in ours), 150),
        Figure(f"files above {LONGEST_FILE} lines", sum(lines[path] > LONGEST_FILE for path in pipeline), 0),
        Figure(f"files under {SHORTEST_FILE} lines", sum(0 < lines[path] < SHORTEST_FILE for path in pipeline), 12),
        Figure("names of several classes", sum(n > 1 for name, n in classes.items() if name != "Params"), 0),
        Figure("constructors of 9 parameters or more", sum(map(wide_constructors, trees.values())), 0),
    ]
    for stage, (files, length) in WAYS.items():
        if (first := root / "stages" / f"{stage}.py") in imports:
            way = readers_way(root, imports, first)
            figures.append(Figure(f"reader's way of {stage}: files", len(way), files))
            figures.append(Figure(f"reader's way of {stage}: lines", sum(lines[path] for path in way), length))
    return figures


def python_files(root: Path) -> Iterator[Path]:
    """All Python files of the repository, except built or installed ones."""
    for path in sorted(root.iterdir()):
        if path.is_dir() and path.name not in SKIPPED and not path.name.startswith("."):
            yield from (inner for inner in sorted(path.rglob("*.py")) if not SKIPPED & {*inner.relative_to(root).parts})


def imported(root: Path, path: Path, tree: ast.Module) -> set[Path]:
    """The repository's files that a file imports, including inside functions."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative imports are not followed"
            names |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
    modules = [root.joinpath(*name.split(".")) for name in names if name.startswith("pipeline")]
    candidates = [path for module in modules for path in (module.with_suffix(".py"), module / "__init__.py")]
    return {one for one in candidates if one.is_file() and one.stat().st_size} - {path}


def room(root: Path, path: Path) -> str:
    """The room of a file, such as `model/cpu` for pipeline/model/cpu/native.py."""
    return str(path.parent.relative_to(root / "pipeline")) if (root / "pipeline") in path.parents else "stages"


def wide_constructors(tree: ast.Module) -> int:
    """The number of explicit constructors with 9 or more parameters, not counting `self`."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "__init__"]
    return sum(len(node.args.args) + len(node.args.kwonlyargs) > 9 for node in functions)


def circles(graph: Mapping[Node, set[Node]]) -> int:
    """The number of strongly connected components with more than one node (Tarjan 1972)."""
    number: dict[Node, int] = {}
    lowest: dict[Node, int] = {}
    stack: list[Node] = []
    components: list[list[Node]] = []

    def visit(node: Node) -> None:
        number[node] = lowest[node] = len(number)
        stack.append(node)
        for other in graph.get(node, ()):
            if other not in number:
                visit(other)
                lowest[node] = min(lowest[node], lowest[other])
            elif other in stack:
                lowest[node] = min(lowest[node], number[other])
        if lowest[node] == number[node]:
            components.append([stack.pop()])
            while components[-1][-1] != node:
                components[-1].append(stack.pop())

    for node in graph:
        if node not in number:
            visit(node)
    return sum(len(one) > 1 for one in components)


def readers_way(root: Path, imports: Mapping[Path, set[Path]], stage: Path) -> set[Path]:
    """The files on the reader's way that starts at a stage."""
    first = imports[stage]
    read_on = {path for path in first if str(path.relative_to(root)).startswith(READ_ON)}
    return {stage, *first, *(other for path in read_on for other in imports[path])}


if __name__ == "__main__":
    sys.exit(main())
