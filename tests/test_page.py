"""The page's files: small, our own, without a build step, and with only one place that makes HTML from a string."""

import gzip
import re
from pathlib import Path

import pytest

from pipeline.serve import worker

PAGE = Path(worker.__file__).parent / "page"
FILES = sorted(PAGE.iterdir())
MODULES = [path for path in FILES if path.suffix == ".js"]


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def test_the_page_is_small() -> None:
    assert {path.suffix for path in FILES} == {".css", ".html", ".js", ".svg"}
    assert sum(len(read(path).splitlines()) for path in FILES) <= 2000
    assert sum(len(gzip.compress(path.read_bytes())) for path in FILES) <= 60_000


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.name)
def test_a_module_says_what_it_is_and_imports_its_neighbors_alone(path: Path) -> None:
    text = read(path)
    assert text.startswith("// ") and len(text.splitlines()) <= 400
    names = re.findall(r"""(?:\bfrom|\bimport) *\(?["']([^"']+)["']""", text)
    assert all(name.startswith("./") and (PAGE / name).is_file() for name in names), names


def test_only_one_file_makes_html_of_a_string_and_none_runs_one() -> None:
    makes = re.compile(
        r"\b(innerHTML|outerHTML|insertAdjacentHTML|document\.write|"
        r"DOMParser|createContextualFragment|setHTMLUnsafe|srcdoc)\b"
    )
    assert [path.name for path in MODULES if makes.search(read(path))] == ["markdown.js"]
    assert len(makes.findall(read(PAGE / "markdown.js"))) == 1
    runs = re.compile(r"\beval\(|\bnew Function\b|setTimeout\(['\"]|javascript:|\.setAttribute\(['\"]style")
    assert [path.name for path in MODULES if runs.search(read(path))] == []


def test_the_document_has_no_inline_script_style_or_handler_and_names_only_its_own_files() -> None:
    text = read(PAGE / "index.html")
    assert not re.search(r"<style|\sstyle=|\son[a-z]+=|<script(?![^>]*\ssrc=)", text)
    addresses = re.findall(r'(?:src|href)="([^"]+)"', text)
    assert addresses and all(one.startswith("#") or (PAGE / one.removeprefix("/page/")).is_file() for one in addresses)


def test_nothing_names_another_host() -> None:
    found = {path.name: re.findall(r"(?:https?:)?//[a-z0-9.-]+\.[a-z]{2,}", read(path)) for path in FILES}
    assert {name: hosts for name, hosts in found.items() if hosts} == {"favicon.svg": ["http://www.w3.org"]}
