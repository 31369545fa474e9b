"""Code hashes: what changes them and what does not. test_graph.py checks that they cover all code that runs."""

import ast
import json
import random
from pathlib import Path

import pytest

from pipeline.run import codehash
from tests.own_code import STAGES, edit, hashes, rerun
from tests.own_code import own_code as own_code

TRAIN = {
    "language",
    "code",
    "tools",
    "reward",
    "rlhf",
    "lora",
    "dpo",
    "kto",
    "grpo",
    "distill",
    "diffusion",
    "diffusion_dpo",
    "diffusion_grpo",
    "memory",
} & set(STAGES)
FILES = {
    "pipeline/__init__.py": "",
    "pipeline/run/workdir.py": "import os\n",
    "pipeline/letters/__init__.py": "from pipeline.letters.chat import render\n",
    "pipeline/letters/chat.py": """
from pipeline.letters import words

STOP = "x"
START = "y"

def render(text: words.Words) -> str:
    return _mark(text)

def _mark(text):
    return STOP + text

def other(text):
    return START

class Turn:
    size: words.Size
    def first(self): return 1
    def second(self): return words.count
""",
    "pipeline/letters/words.py": """
class Words: pass
class Size: pass
def count(x): return x
def spare(x): return x
""",
    "pipeline/serve/__init__.py": "",
    "pipeline/serve/api.py": "PORT = 1\n",
    "stages/__init__.py": "",
    "stages/tools.py": '''"""Doc."""
from pipeline import letters
from pipeline.letters import chat
from pipeline.run.workdir import os

def f(x):
    """D."""
    return letters.render(x)

if __name__ == "__main__":
    f("a")
''',
}


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STAGECOACH_WORK", str(tmp_path / ".work"))
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def closure(repository: Path) -> dict[str, tuple[str, list[str]]]:
    return codehash.closures(repository, ["tools"])["tools"]


def reached(repository: Path) -> dict[str, list[str]]:
    return {module: names for module, (_, names) in closure(repository).items()}


def changed(repository: Path, name: str, old: str, new: str) -> list[str]:
    """The modules whose entry an edit changes."""
    before = closure(repository)
    path = repository / name
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    now = closure(repository)
    return sorted(module for module in before.keys() | now.keys() if before.get(module) != now.get(module))


def test_what_is_reached_is_what_the_stage_uses_also_through_another_module(repository: Path) -> None:
    assert reached(repository) == {"stages.tools": ["*main", "f"], "pipeline.letters.chat": ["STOP", "_mark", "render"]}


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("stages/tools.py", '"""Doc."""', '"""Other."""  # a comment'),
        ("stages/tools.py", '"""D."""', '"""Longer."""'),
        ("stages/tools.py", "return letters.render(x)", "return letters.render(\n        x)"),
        ("pipeline/run/workdir.py", "import os", "import os\nKEEP = 5"),
        ("pipeline/serve/api.py", "1", "2"),
        ("pipeline/letters/chat.py", "return START", "return 5"),
        ("pipeline/letters/chat.py", 'START = "y"', 'START = "z"'),
        ("pipeline/letters/words.py", "def count(x): return x", "def count(x): return 7"),
        ("pipeline/letters/chat.py", "def other", "def another(text):\n    return text\n\ndef other"),
    ],
)
def test_comments_docstrings_layout_the_server_and_what_is_not_reached_change_nothing(
    repository: Path, name: str, old: str, new: str
) -> None:
    assert changed(repository, name, old, new) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('STOP = "x"', 'STOP = "z"'),
        ("return STOP + text", "return text"),
        ("return _mark(text)", "return _mark(text + text)"),
        ("return STOP + text", "return other(text)"),
    ],
)
def test_what_is_reached_changes_its_modules_line_alone(repository: Path, old: str, new: str) -> None:
    assert changed(repository, "pipeline/letters/chat.py", old, new) == ["pipeline.letters.chat"]


@pytest.mark.parametrize(
    ("statement", "names"),
    [
        ("return chat.Turn()", ["Turn"]),  # a class counts as a whole: its field's type, and what its methods use
        ("return [words for words in x]", []),  # a local name hides the module's
        ("chat = x; return chat.Turn", []),
        ("from pipeline.letters.chat import other as another; return another(x)", ["START", "other"]),
        ("import pipeline.letters.chat as c; return c.other(x)", ["START", "other"]),
        ("return getattr(chat, x)", ["START", "STOP", "Turn", "_mark", "other", "render"]),
        ("return chat.what_nobody_defines", ["START", "STOP", "Turn", "_mark", "other", "render"]),
        ("return lambda chat: chat.other", []),
        ("return lambda y: chat.other", ["START", "other"]),
        ("x: chat.Turn = 1; return x", []),
    ],
)
def test_names_are_followed_as_python_does(repository: Path, statement: str, names: list[str]) -> None:
    changed(repository, "stages/tools.py", "return letters.render(x)", statement)
    found = reached(repository)
    assert found.get("pipeline.letters.chat", []) == names
    assert found.get("pipeline.letters.words", []) == (["Size", "count"] if "Turn" in names else [])


@pytest.mark.parametrize(
    ("statement", "names"),
    [
        ("SEEN = []\nfor one in (1, 2): SEEN.append(count(one))", ["*always", "SEEN", "count", "one"]),
        ("TABLE = {1: count(1)}", ["*always", "TABLE", "count"]),  # a call to our own code may do anything
        ("TABLE = {1: count}", []),
        ("TABLE = frozenset((1, 2))", []),
        (
            "def register(f): return f\n@register\ndef spared(): return spare(1)",
            ["*always", "register", "spare", "spared"],
        ),
        ("import functools\n@functools.lru_cache(maxsize=2)\ndef spared(): return spare(1)", []),
        ("from os.path import *", ["Size", "Words", "count", "spare"]),
        ("def __getattr__(name): return 1", ["Size", "Words", "__getattr__", "count", "spare"]),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING: import os", []),
        ("try:\n    import nothing\nexcept ImportError:\n    nothing = None", ["*always", "nothing"]),
    ],
)
def test_statements_with_effects_count_where_the_module_is_imported_at_all(
    repository: Path, statement: str, names: list[str]
) -> None:
    path = repository / "pipeline/letters/words.py"
    path.write_text(f"{path.read_text()}\n{statement}\n")
    assert reached(repository).get("pipeline.letters.words", []) == names


def test_globals_takes_the_module_and_a_file_that_is_started_by_its_place_comes_whole(repository: Path) -> None:
    words, stage = repository / "pipeline/letters/words.py", repository / "stages/tools.py"
    stage.write_text("from pipeline.letters import words\n\nwords.count(1)\n")
    assert reached(repository)["pipeline.letters.words"] == ["count"]
    words.write_text(words.read_text().replace("def count(x): return x", "def count(x): return globals()[x]"))
    assert reached(repository)["pipeline.letters.words"] == ["Size", "Words", "count", "spare"]
    words.write_text('def count(x): return __file__.replace("words.py", "child.py")\n')
    (repository / "pipeline/letters/child.py").write_text(
        'def work(): pass\n\nif __name__ == "__main__":\n    work()\n'
    )
    assert reached(repository)["pipeline.letters.child"] == ["*main", "work"]
    words.write_text("import sys\n\ndef count(x): sys.path.insert(0, __file__)\n")
    assert {"pipeline.letters.child", "pipeline.letters.chat"} <= reached(repository).keys()


@pytest.mark.parametrize(
    ("statement", "names"),
    [
        ('return [offer(x) for offer in wings.each("report")]', ["report"]),
        ('from pipeline.wings import each; return each("engine")', ["engine"]),
        ('return wings.each("what nobody offers")', []),
        ("return wings.each(x)", ["engine", "report"]),
        ("return [*map(wings.each, x)]", ["engine", "report"]),
        ("return wings.names()", []),
    ],
)
def test_what_the_wings_offer_is_followed_by_its_name(repository: Path, statement: str, names: list[str]) -> None:
    (repository / "pipeline/wings.py").write_text("def each(offer): return names()\ndef names(): return ()\n")
    (repository / "pipeline/letters/wing.py").write_text(
        "def report(x):\n    from pipeline.letters import words\n    return words.count(x)\n\ndef engine(): return 1\n"
    )
    stage = repository / "stages/tools.py"
    stage.write_text(f"from pipeline import wings\n\ndef f(x): {statement}\n")
    found = reached(repository)
    assert found.get("pipeline.letters.wing", []) == names
    assert found.get("pipeline.letters.words", []) == (["count"] if "report" in names else [])
    assert ("each" in found["pipeline.wings"]) == ("each" in statement)


def test_a_template_beside_a_module_counts(repository: Path) -> None:
    before = closure(repository)
    (repository / "pipeline/letters/card.html").write_text("<p>")
    assert closure(repository) != before


def test_a_file_counts_with_the_definitions_that_name_it(repository: Path) -> None:
    words = repository / "pipeline/letters/words.py"
    words.write_text(words.read_text() + 'def names(): return count("names.yaml")\n')
    for name in ("names.yaml", "rest.yaml"):
        (repository / "pipeline/letters" / name).write_text("a: 1\n")
    before = closure(repository)
    (repository / "pipeline/letters/names.yaml").write_text("a: 2\n")
    assert closure(repository) == before, "no definition that the stage reaches names it"
    (repository / "pipeline/letters/rest.yaml").write_text("a: 2\n")
    assert closure(repository) != before, "a file that nothing names counts with all"
    edit(repository / "pipeline/letters/chat.py", "return STOP + text", 'return STOP + "names.yaml"')
    before = closure(repository)
    (repository / "pipeline/letters/names.yaml").write_text("a: 3\n")
    assert closure(repository) != before


def test_what_was_read_is_remembered_and_a_damaged_memory_is_read_anew(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = closure(repository)
    memory = repository / ".work/code.json"
    assert json.loads(memory.read_text())
    with monkeypatch.context() as patched:
        patched.setattr(codehash.ast, "parse", lambda *_: pytest.fail("parsed again"))
        assert closure(repository) == first
    (repository / "stages/tools.py").write_text("from pipeline.serve import api\n\napi.PORT\n")
    assert "pipeline.serve.api" in closure(repository)
    memory.write_text(memory.read_text()[:50])
    assert "pipeline.serve.api" in closure(repository)
    assert json.loads(memory.read_text())


def test_constants_that_look_alike_differ() -> None:
    texts = ["x = 1", "x = 1.0", "x = True", "x = '1'", "x = None", "x = b'1'", "x = -1"]
    assert len({codehash.dump(ast.parse(text)) for text in texts}) == len(texts)


def test_every_stage_has_its_out_in_dvc_yaml(in_repository: Path) -> None:
    import yaml

    outs = yaml.safe_load(Path("dvc.yaml").read_text())["stages"]["code_versions"]["outs"]
    named = {Path(next(iter(out))).stem for out in outs}
    assert named == {p.stem for p in Path("stages").glob("*.py")} - {"__init__"}


# -- our own code ------------------------------------------------------------------------------------------------------


def test_a_change_of_a_definition_reaches_the_stages_that_hold_it_and_no_other(own: Path) -> None:
    """For a sample of all functions and classes: a statement added to one changes the hashes of exactly the stages that
    reach it.
    """
    before, draw = hashes(own), random.Random(0)
    every = [
        (path, node)
        for path in sorted((own / "pipeline").rglob("*.py"))
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.body[-1].lineno > node.lineno
    ]

    def holding(path: Path, node: ast.FunctionDef | ast.ClassDef) -> set[str]:
        module = ".".join(path.relative_to(own).with_suffix("").parts)
        return {stage for stage, found in before.items() if node.name in found.get(module, ("", []))[1]}

    outside = [(path, node) for path, node in every if not holding(path, node)]
    inside = [(path, node) for path, node in every if holding(path, node)]
    for path, node in [*draw.sample(outside, 4), *draw.sample(inside, 8)]:
        text = path.read_text()
        lines = text.splitlines(keepends=True)
        last = node.body[-1]
        first_line = min(part.lineno for part in (last, *getattr(last, "decorator_list", [])))
        lines.insert(first_line - 1, f"{' ' * last.col_offset}Ellipsis\n")
        path.write_text("".join(lines))
        assert rerun(own, before) == holding(path, node), f"{path}: {node.name}"
        path.write_text(text)


def test_a_new_pair_loss_reruns_the_stages_that_learn_from_pairs(own: Path) -> None:
    before = hashes(own)
    path = own / "pipeline/learning/pair_losses.py"
    edit(
        path,
        "\n\nLOSSES: dict",
        "\n\ndef _mine(ratios: object, config: object) -> object:\n    return ratios\n\n\nLOSSES: dict",
    )
    assert rerun(own, before) == set(), "nothing names it yet"
    edit(path, "] = {\n", '] = {\n    "mine": _mine,\n')
    assert rerun(own, before) == {"dpo"}


def test_the_loop_reruns_all_that_trains_and_the_server_and_the_doctor_nothing(own: Path) -> None:
    before = hashes(own)
    edit(own / "pipeline/serve/engine.py", "return None", "return 0")
    edit(own / "pipeline/tools/doctor.py", "return None", "return 0")
    edit(own / "pipeline/run/stage.py", "return None, overrides", "return '', overrides")
    assert rerun(own, before) == set()
    edit(own / "pipeline/report/card.py", "card.html", "another.html")
    assert rerun(own, before) == {"report"}
    edit(own / "pipeline/learning/fit.py", "        gates.causal(self.plain)\n", "")
    assert rerun(own, before) == TRAIN | {"report"}


def test_a_wing_reruns_its_stages_and_those_that_ask_for_what_it_offers(own: Path) -> None:
    wing = own / "pipeline/letters"  # instead of an existing one, which may have been removed
    wing.mkdir()
    (wing / "wing.py").write_text(
        "def evaluation():\n    from pipeline.letters import words\n    return words\n\n"
        "def report():\n    from pipeline.letters import words\n    return words.FOLDER\n"
    )
    (wing / "words.py").write_text('FOLDER = "letters"\n\n\ndef opens(folder):\n    return False\n')
    before = hashes(own)
    assert "pipeline.letters.words" not in before["language"]
    edit(wing / "words.py", "return False", "return True")
    assert rerun(own, before) == {"evaluate"}
    edit(wing / "words.py", '"letters"', '"words"')
    assert rerun(own, before) == {"evaluate", "report"}


def test_another_wording_reruns_the_stages_that_read_it(own: Path) -> None:
    before, folder = hashes(own), own / "pipeline/synthetic"
    edit(folder / "programs.yaml", "add {k} to each number", "add {k} to all of the numbers")
    assert rerun(own, before) == {"corpus", "tasks", "evaluate"}
    before = hashes(own)
    edit(folder / "toolbox.yaml", "The result is {result}.", "It is {result}.")
    assert rerun(own, before) == {"corpus", "tasks", "evaluate"}
