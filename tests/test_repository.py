"""The user's repositories: what is read from them, module names, and the graph and order of imports."""

import ast
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.ingest import repository
from pipeline.ingest.entries import RepositoryEntry, check_list
from pipeline.ingest.repository import Import, Modules, find, import_graph, import_order, imports_of, read
from pipeline.run.errors import DataError


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8", newline="")
    return root


def graph_of(files: dict[str, str], *, at_import: bool = False) -> dict[str, tuple[str, ...]]:
    return import_graph({path: imports_of(ast.parse(text)) for path, text in files.items()}, at_import=at_import)


def order_of(files: dict[str, str]) -> list[str]:
    return import_order(graph_of(files), graph_of(files, at_import=True))


# --- reading ---------------------------------------------------------------------------------------------------------


def test_only_python_outside_hidden_and_installed_folders_is_read(tmp_path: Path) -> None:
    files = {
        "b.py": "x = 1\r\n",
        "pkg/a.py": "y = 2\n",
        ".git/hooks/h.py": "",
        "venv/pyvenv.cfg": "",
        "venv/lib/z.py": "",
        "node_modules/n.py": "",
        "pkg/__pycache__/a.py": "",
        "pkg/_speedups.c": "int x;",
        "README.md": "read me",
    }
    found = read(write(tmp_path / "mine", files), 100)
    assert [(file.path, file.text) for file in found.files] == [("b.py", "x = 1\n"), ("pkg/a.py", "y = 2\n")]
    assert (found.name, found.skipped) == ("mine", ())


def test_what_is_skipped_has_a_reason(tmp_path: Path) -> None:
    write(tmp_path, {"a.py": "x = 1\n", "huge.py": "#" * 101, "python2.py": "print 1\n"})
    (tmp_path / "binary.py").write_bytes(b"\x00\x01")
    (tmp_path / "latin.py").write_bytes(b"# \xe9\n")
    (tmp_path / "link.py").symlink_to("a.py")
    os.mkfifo(tmp_path / "pipe.py")
    found = read(tmp_path, 100)
    assert [file.path for file in found.files] == ["a.py", "python2.py"]
    assert {one.path: one.reason for one in found.skipped} == {
        "huge.py": "size",
        "binary.py": "encoding",
        "latin.py": "encoding",
        "link.py": "link",
        "pipe.py": "unreadable",
    }


@pytest.mark.parametrize("name", ["out", "out.py"])
def test_a_link_that_leaves_the_repository_is_refused(tmp_path: Path, name: str) -> None:
    write(tmp_path, {"mine/a.py": "x = 1\n", "secret/key.py": "key = 1\n"})
    (tmp_path / "mine" / name).symlink_to(tmp_path / "secret" / ("" if name == "out" else "key.py"))
    with pytest.raises(DataError, match="is a link that leads out of"):
        read(tmp_path / "mine", 100)


def test_a_folder_without_python_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no Python file"):
        read(write(tmp_path, {"main.go": "package main"}), 100)


@pytest.mark.parametrize(
    ("limit", "value", "message"),
    [
        ("MOST_ENTRIES", 2, "2 files and folders"),
        ("MOST_FILES", 2, "2 Python files"),
        ("MOST_BYTES", 12, "12 bytes of Python"),
    ],
)
def test_a_walk_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, value: int, message: str
) -> None:
    write(tmp_path, {f"{name}.py": "x = 1\n" for name in "abc"})
    monkeypatch.setattr(repository, limit, value)
    with pytest.raises(DataError, match=f"has more than {message}; name one of its subfolders"):
        read(tmp_path, 100)


@pytest.mark.parametrize("folder", ["/etc", "../x", "none", "file.py"])
def test_a_path_that_is_no_folder_below_data_own_is_an_error(tmp_path: Path, folder: str) -> None:
    write(tmp_path, {"file.py": ""})
    with pytest.raises(DataError, match="repository: "):
        find(tmp_path, folder)


def test_a_linked_repository_is_refused_and_data_own_may_be_a_link(tmp_path: Path) -> None:
    write(tmp_path, {"real/repos/mine/a.py": "", "elsewhere/a.py": ""})
    (tmp_path / "own").symlink_to(tmp_path / "real")
    (tmp_path / "real/repos/linked").symlink_to(tmp_path / "elsewhere")
    assert find(tmp_path / "own", "repos/mine") == tmp_path / "own/repos/mine"
    with pytest.raises(DataError, match="is a link that leads out of"):
        find(tmp_path / "own", "repos/linked")


def test_an_entry_is_of_code_or_problems_and_lies_below_data_own() -> None:
    entry = RepositoryEntry(repository="repos/mine", held_out=["tests"])
    check_list("code", [entry])
    check_list("problems", [entry])
    with pytest.raises(ValueError, match="a repository provides only code, problems, dialogues"):
        check_list("text", [entry])
    for path in ("/srv/mine", "../mine", ""):
        with pytest.raises(ValueError, match="expected a path below data/own/"):
            RepositoryEntry(repository=path)


# --- imports ---------------------------------------------------------------------------------------------------------


def test_imports_are_listed_with_what_they_bind_and_when_they_run() -> None:
    source = (
        "import a.b, c as d\nfrom ..e import f as g\n"
        "if TYPE_CHECKING:\n    from h import i\nelse:\n    import j\n"
        "def k():\n    from l import *\ntry:\n    import m\nexcept ImportError:\n    m = None\n"
    )
    assert imports_of(ast.parse(source)) == [
        Import("a.b", 0, None, "a", True),
        Import("c", 0, None, "d", True),
        Import("e", 2, "f", "g", True),
        Import("h", 0, "i", "i", False),
        Import("j", 0, None, "j", True),
        Import("l", 0, "*", "*", False),
        Import("m", 0, None, "m", True),
    ]


def test_modules_are_named_from_the_folder_above_their_package() -> None:
    modules = Modules(["src/p/__init__.py", "src/p/q/__init__.py", "src/p/q/r.py", "tools/t.py"])
    assert modules.name_of("src/p/q/r.py") == "p.q.r"
    assert modules.name_of("src/p/q/__init__.py") == "p.q"
    assert modules.name_of("tools/t.py") == "t"
    assert modules.root_of("src/p/q/r.py") == "src"


def test_an_import_means_the_submodule_before_the_package_and_nothing_outside() -> None:
    files = {
        "src/p/__init__.py": "from .q import Q\n",
        "src/p/q.py": "import os\nimport numpy as np\n",
        "src/p/s/__init__.py": "",
        "src/p/s/t.py": "from .. import q\nfrom ..s import nothing\nfrom ... import x\n",
        "scripts/run.py": "import helper\nimport p.s.t\nfrom p import q, Q\n",
        "scripts/helper.py": "import run\n",
    }
    assert graph_of(files) == {
        "src/p/__init__.py": ("src/p/q.py",),
        "src/p/q.py": (),
        "src/p/s/__init__.py": (),
        "src/p/s/t.py": ("src/p/q.py", "src/p/s/__init__.py"),
        "scripts/run.py": ("scripts/helper.py", "src/p/s/t.py", "src/p/q.py", "src/p/__init__.py"),
        "scripts/helper.py": ("scripts/run.py",),
    }


def test_imports_stand_before_their_users() -> None:
    files = {
        "p/__init__.py": "",
        "p/a.py": "from p import b, c\n",
        "p/b.py": "from p.d import x\n",
        "p/c.py": "from . import d\n",
        "p/d.py": "x = 1\n",
    }
    assert order_of(files) == ["p/__init__.py", "p/d.py", "p/b.py", "p/c.py", "p/a.py"]


def test_a_cycle_is_broken_by_what_runs_at_import() -> None:
    """`a` needs `b` at import, `b` needs `a` only when called, so `b` comes first."""
    files = {"a.py": "import b\n", "b.py": "def f():\n    import a\n", "c.py": "import a\n"}
    assert order_of(files) == ["b.py", "a.py", "c.py"]
    both = {"a.py": "import b\n", "b.py": "import a\n"}
    assert order_of(both) == order_of(dict(reversed(both.items()))) == ["b.py", "a.py"]


edges = st.dictionaries(st.integers(0, 12), st.lists(st.integers(0, 12), max_size=4), max_size=13)


@given(edges)
def test_every_path_stands_once_and_only_a_cycle_puts_a_user_first(drawn: dict[int, list[int]]) -> None:
    graph = {str(n): tuple(str(m) for m in drawn.get(n, []) if m != n) for n in range(13)}
    order = import_order(graph, graph)
    assert sorted(order) == sorted(graph)
    assert order == import_order(dict(reversed(graph.items())), graph)
    reach = {node: reachable(graph, node) for node in graph}
    for user, targets in graph.items():
        for target in targets:
            assert order.index(target) < order.index(user) or user in reach[target]


def reachable(graph: dict[str, tuple[str, ...]], start: str) -> set[str]:
    seen: set[str] = set()
    pending = [start]
    while pending:
        for target in graph[pending.pop()]:
            if target not in seen:
                seen.add(target)
                pending.append(target)
    return seen


def test_a_very_long_chain_of_imports_is_ordered_without_recursion() -> None:
    graph = {f"{n:05}": (f"{n + 1:05}",) if n < 19_999 else () for n in range(20_000)}
    assert import_order(graph, graph) == sorted(graph, reverse=True)


# --- splits ----------------------------------------------------------------------------------------------------------


def split_of(entry: RepositoryEntry, files: list[str], val_share: float) -> dict[str, str]:
    texts = tuple(repository.SourceFile(path, "x = 1\n" * 9) for path in sorted(files))
    found = repository.Repository("mine", Path(), texts, ())
    return repository.splits(found, repository.held_out(entry, found, val_share))


def test_folders_are_held_out_whole_and_the_one_that_holds_most_counts_as_its_folders() -> None:
    files = [f"src/p/{name}/f{n}.py" for name in "abcdef" for n in range(3)]
    made = split_of(RepositoryEntry(repository="mine"), [*files, "src/p/top.py"], 0.2)
    folders = {path.split("/")[2]: split for path, split in made.items()}
    assert all(made[path] == folders[path.split("/")[2]] for path in made)
    assert sum(split == "val" for split in folders.values()) == 2 and made["src/p/top.py"] == "train"


def test_named_folders_are_held_out_and_an_unknown_one_is_an_error() -> None:
    files = ["a.py", "shop/b.py", "shopping/c.py"]
    made = split_of(RepositoryEntry(repository="mine", held_out=["shop"]), files, 0.02)
    assert made == {"a.py": "train", "shop/b.py": "val", "shopping/c.py": "train"}
    assert set(split_of(RepositoryEntry(repository="mine", held_out=["."]), files, 0.0).values()) == {"val"}
    with pytest.raises(DataError, match="held_out: sho has no Python file"):
        split_of(RepositoryEntry(repository="mine", held_out=["sho"]), files, 0.02)
