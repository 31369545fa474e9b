"""Hooks of MkDocs: pages of the site that are files elsewhere in the repository, and the docstrings of our modules.

    README.md, CONTRIBUTING.md, ...       -> PAGES, with their links changed to the site's
    docstrings of pipeline/* and stages/  -> API/<package>.md, one page each

Nothing is written into docs/.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
PAGES = {  # of the site -> in the repository
    "index.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "own-data.md": "data/own/README.md",
    "feedback.md": "feedback/README.md",
    "benchmarks.md": "benchmarks/README.md",
}
PLACES = {source: page for page, source in PAGES.items()}
LINK = re.compile(r"\]\((?!https?:|#|mailto:)([^)#\s]+)")
API = "api"


def packages() -> dict[str, list[str]]:
    """Package -> its modules, of pipeline and stages."""
    folders = [ROOT / "stages", *sorted(path.parent for path in (ROOT / "pipeline").glob("*/__init__.py"))]
    return {
        ".".join(folder.relative_to(ROOT).parts): sorted(
            path.stem for path in folder.glob("*.py") if not path.stem.startswith("__")
        )
        for folder in folders
    }


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """The pages of the docstrings in the navigation."""
    assert isinstance(config.nav, list)
    config.nav.append({"API": [{name: f"{API}/{name}.md"} for name in packages()]})
    return config


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages that are no files of docs/."""
    for page, source in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    for package, modules in packages().items():
        text = "\n\n".join([f"# {package}", *(f"::: {package}.{module}" for module in modules)])
        files.append(File.generated(config, f"{API}/{package}.md", content=text))
    return files


def on_page_markdown(markdown: str, *, page: Page, **_: Any) -> str:
    """Change links between files of the repository to links between pages."""
    source = PAGES.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def change(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[1]))
        name = PLACES.get(target) or (target.removeprefix("docs/") if target.startswith("docs/") else "")
        return f"]({name}" if name else match[0]

    return markdown if page.file.src_uri.startswith(API) else LINK.sub(change, markdown)
