"""The rules on floors, import cycles, file sizes and the one-place table. Change them only together with the design."""

import ast
import re
from functools import cache
from pathlib import Path

from benchmarks import house

ROOT = Path(__file__).parents[1]
FILES = sorted(p for folder in ("pipeline", "stages") for p in (ROOT / folder).rglob("*.py"))

# bottom up; a package may import from its own floor and those before it
FLOORS = [
    {"run"},
    {"text"},
    {"model", "memory"},
    {"batches", "ingest", "synthetic"},
    {"generation", "learning", "sandbox"},
    {"rl", "diffusion", "export"},
    {"evaluation"},
    {"report", "tools"},
    {"serve", "stages"},
]
WINGS = {"diffusion", "memory"}
MOST_FILES = 194  # Python files in pipeline/: 179, plus those of repositories, turns, distillation, a hub and MLflow
SHORT = {  # files of fewer than 60 lines, and why each is a separate file
    "pipeline/__init__.py": "what torch reads when it is loaded",
    "pipeline/run/types.py": "a type that every room uses",
    "pipeline/run/errors.py": "the exit codes of all commands",
    "pipeline/text/literals.py": "standard library only, for the sandbox's judge",
    "pipeline/sandbox/__init__.py": "what the room is",
    "pipeline/diffusion/wing.py": "what the wing offers",
    "pipeline/wings.py": "the rule of wings",
    "pipeline/export/pyfunc.py": "the module that MLflow loads by its name",
}
LEVEL = {name: level for level, names in enumerate(FLOORS) for name in names}

# what -> (pattern, where it may occur)
ONE_PLACE = {
    "losses": (
        r"\bcross_entropy\b|\blogsigmoid\b",
        (
            "pipeline/learning/losses.py",
            "pipeline/learning/pair_losses.py",
            "pipeline/learning/policy_losses.py",
            "pipeline/diffusion/training.py",
            "pipeline/memory/training.py",
        ),
    ),
    "the one-token shift": (r"\[[^\]]*:, ?:-1\]|\[[^\]]*:, ?1:\]", ("pipeline/batches/batch.py",)),
    "special tokens": (r"<\|[a-z_]+\|>", ("pipeline/text/", "pipeline/diffusion/model.py")),
    "the optimizer step": (
        r"\.backward\(\)|optimi[sz]ers?\.step\(",
        ("pipeline/learning/fit.py", "pipeline/learning/lr_finder.py", "pipeline/learning/optim.py"),
    ),
    "weights on disk": (r"torch\.save\(|torch\.load\(|import pickle|\bpickle\.", ()),
    "reported numbers": (r"\bmlflow\.|^\s*print\(", ("pipeline/run/tracking.py", "pipeline/run/mlflow_store.py")),
    "untrusted code": (
        r"(?<![\w.])(exec|eval)\(",
        ("pipeline/sandbox/", "pipeline/ingest/functions.py"),  # the second writes programs that run in the first
    ),
    "starting processes": (
        r"\bsubprocess\b|\bos\.exec|\bmultiprocessing\b",
        ("pipeline/run/processes.py", "pipeline/tools/launch.py", "pipeline/model/cpu/native.py", "pipeline/sandbox/"),
    ),
    "sampling": (r"\bmultinomial\b", ("pipeline/generation/",)),
    "devices and seeds": (r"cuda\.is_available|manual_seed", ("pipeline/run/device.py",)),
}


def level_of(parts: tuple[str, ...]) -> int:
    """The floor of a module; a module of a wing is on the floor of the part that it extends."""
    return LEVEL[
        {
            "losses": "diffusion",
            "training": "diffusion",
            "measure": "evaluation",
            "report": "report",
            "serving": "serve",
            "wing": "serve",
        }.get(parts[-1], parts[1])
        if parts[1] in WINGS
        else parts[1]
    ]


@cache
def tree_of(path: Path) -> ast.Module:
    """The file's syntax tree; each file is read once for all rules."""
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    """Every node of the file's syntax tree."""
    return list(ast.walk(tree_of(path)))


def imported(path: Path) -> set[str]:
    """The full names of our modules that a file imports."""
    found = set()
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in found if name.split(".")[0] in ("pipeline", "stages")}


def test_imports_go_down_the_floors_only() -> None:
    """Imports inside functions count."""
    wrong = []
    for path in FILES:
        parts = path.relative_to(ROOT).with_suffix("").parts
        mine = level_of(parts) if len(parts) > 2 else len(FLOORS)
        for module in imported(path):
            other = tuple(module.split("."))
            if other[0] == "stages":
                wrong.append(f"{path}: no stage is imported by anybody")
            elif len(other) > 2 and ROOT.joinpath(*other).with_suffix(".py").exists():
                if level_of(other) > mine:
                    wrong.append(f"{path} imports {module}, which stands above it")
                if parts[0] == "stages" and other[1] == "serve":
                    wrong.append(f"{path}: a stage starts the server, and does not import it")
    assert not wrong, "\n".join(wrong)


def test_no_file_outside_a_wing_and_its_stages_imports_it() -> None:
    wrong = []
    for path in FILES:
        parts = path.relative_to(ROOT).with_suffix("").parts
        for module in imported(path):
            wing = (*module.split("."), "")[1]
            own = parts[1] == wing or (parts[0] == "stages" and parts[1].startswith(wing))
            if wing in WINGS and not own:
                wrong.append(f"{path} imports {module}; ask for it by name (pipeline/wings.py)")
    assert not wrong, "\n".join(wrong)


def test_no_circle_of_files_or_rooms() -> None:
    """Imports inside functions count."""
    figures = {figure.name: figure.value for figure in house.measure(ROOT)}
    assert figures["circles of files"] == figures["circles of rooms"] == 0


def test_each_thing_has_its_one_place() -> None:
    wrong = []
    for thing, (pattern, allowed) in ONE_PLACE.items():
        for path in FILES:
            where = str(path.relative_to(ROOT))
            if where.startswith(allowed) or not re.search(pattern, "\n".join(code_lines(path)), re.MULTILINE):
                continue
            wrong += [
                f"{where}:{number}: {thing} belong in {allowed or 'no file'}: {line.strip()}"
                for number, line in enumerate(code_lines(path), start=1)
                if re.search(pattern, line)
            ]
    assert not wrong, "\n".join(wrong)


@cache
def code_lines(path: Path) -> list[str]:
    """The file's lines with comments and docstrings blanked; other string literals stay."""
    lines = path.read_text(encoding="utf-8").splitlines()
    for node in nodes_of(path):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            for number in range(node.lineno - 1, node.end_lineno or node.lineno):
                lines[number] = ""
    return [re.sub(r"(^|\s)#.*$", "", line) for line in lines]


def test_files_are_short_and_say_what_they_and_their_functions_are() -> None:
    wrong = []
    assert sum(path.is_relative_to(ROOT / "pipeline") for path in FILES) <= MOST_FILES
    for path in FILES:
        length = len(path.read_text(encoding="utf-8").splitlines())
        if length > house.LONGEST_FILE:
            wrong.append(f"{path} is too long; split it by subject")
        where = str(path.relative_to(ROOT))
        if where.startswith("pipeline/") and 0 < length < house.SHORTEST_FILE and where not in SHORT:
            wrong.append(f"{path} is short; it belongs to the file of its subject")
        if path.stem in ("utils", "common", "helpers", "misc"):
            wrong.append(f"{path}: its name says no subject")
        if path.stem != "__init__" and not ast.get_docstring(tree_of(path)):
            wrong.append(f"{path}: no module docstring")
        for node in tree_of(path).body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                if not ast.get_docstring(node):
                    wrong.append(f"{path}: {node.name} has no docstring")
                if node.returns is None:
                    wrong.append(f"{path}: {node.name} has no return annotation")
    assert not wrong, "\n".join(wrong)


def test_data_and_models_hold_no_code() -> None:
    assert not [p for folder in ("data", "models") for p in (ROOT / folder).rglob("*.py")]


def test_oracles_are_never_imported() -> None:
    for path in FILES:
        names = {n.split(".")[0] for n in all_imports(path)}
        assert not names & {"transformers", "peft", "trl"}, path


def test_no_file_imports_a_test_file() -> None:
    """Imports inside functions count; what test files share is in a module named after its subject."""
    wrong = []
    for path in (path for folder in ("tests", "benchmarks") for path in sorted((ROOT / folder).rglob("*.py"))):
        for node in nodes_of(path):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{name}" for name in names]
            for name in names:
                if re.match(r"tests\.(\w+\.)*test_", name):
                    wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not wrong, "\n".join(wrong)


def all_imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found
