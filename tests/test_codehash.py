"""Code hashes: what changes them and what does not."""

import ast
import json
from pathlib import Path

import pytest

from pipeline import codehash


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STAGECOACH_WORK", str(tmp_path / ".work"))
    files = {
        "pipeline/__init__.py": "",
        "pipeline/work.py": "import os\n",
        "pipeline/text/__init__.py": "",
        "pipeline/text/chat.py": 'STOP = "x"\n',
        "pipeline/serve/__init__.py": "",
        "pipeline/serve/api.py": "PORT = 1\n",
        "stages/__init__.py": "",
        "stages/tools.py": '"""Doc."""\nfrom pipeline.text import chat\nfrom pipeline.work import os\n\ndef f(x):\n    """D."""\n    return chat.STOP + x\n',
    }  # fmt: skip
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def after(repository: Path, name: str, old: str, new: str) -> tuple[dict[str, str], dict[str, str]]:
    before = codehash.closure(repository, "tools")
    path = repository / name
    path.write_text(path.read_text().replace(old, new))
    return before, codehash.closure(repository, "tools")


def test_the_closure_is_what_the_stage_imports(repository: Path) -> None:
    found = set(codehash.closure(repository, "tools"))
    assert found == {"stages", "stages.tools", "pipeline", "pipeline.text", "pipeline.text.chat"}


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("stages/tools.py", '"""Doc."""', '"""Other."""  # a comment'),
        ("stages/tools.py", '"""D."""', '"""Longer."""'),
        ("stages/tools.py", "return chat.STOP + x", "return (chat.STOP +\n        x)"),
        ("pipeline/work.py", "import os", "import os\nKEEP = 5"),
        ("pipeline/serve/api.py", "1", "2"),
    ],
)
def test_comments_docstrings_layout_and_the_server_change_nothing(
    repository: Path, name: str, old: str, new: str
) -> None:
    before, now = after(repository, name, old, new)
    assert before == now


def test_a_constant_in_a_shared_module_changes_its_line_alone(repository: Path) -> None:
    before, now = after(repository, "pipeline/text/chat.py", "x", "y")
    assert [m for m in now if now[m] != before[m]] == ["pipeline.text.chat"]


def test_a_template_beside_a_module_counts(repository: Path) -> None:
    before = codehash.closure(repository, "tools")
    (repository / "pipeline/text/card.html").write_text("<p>")
    assert codehash.closure(repository, "tools") != before


def test_what_was_read_is_remembered_and_a_damaged_memory_is_read_anew(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = codehash.closure(repository, "tools")
    memory = repository / ".work/code.json"
    known = json.loads(memory.read_text())
    assert len(known) == len(set(first.values()))  # empty files are one
    with monkeypatch.context() as patched:
        patched.setattr(codehash.ast, "parse", lambda *_: pytest.fail("parsed again"))
        assert codehash.closure(repository, "tools") == first
    (repository / "stages/tools.py").write_text("from pipeline.serve import api\n")
    assert "pipeline.serve.api" in codehash.closure(repository, "tools")
    memory.write_text(memory.read_text()[:50])
    assert "pipeline.serve.api" in codehash.closure(repository, "tools")
    assert json.loads(memory.read_text())


def test_constants_that_look_alike_differ() -> None:
    texts = ["x = 1", "x = 1.0", "x = True", "x = '1'", "x = None", "x = b'1'", "x = -1"]
    assert len({codehash.dump(ast.parse(text)) for text in texts}) == len(texts)


def test_every_stage_has_its_out_in_dvc_yaml(in_repository: Path) -> None:
    import yaml

    outs = yaml.safe_load(Path("dvc.yaml").read_text())["stages"]["code_versions"]["outs"]
    named = {Path(next(iter(out))).stem for out in outs}
    assert named == {p.stem for p in Path("stages").glob("*.py")} - {"__init__"}
