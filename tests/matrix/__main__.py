"""`make clients`: the 49 rows through every client against a real server with untrained models, and three harnesses
against a server with a small trained model; writes docs/clients.md.

Exits with 1 if a row or a block of the document fails, or if a harness and we differ without a known reason.
"""

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from pipeline.model import checkpoint
from pipeline.text.tokenizer import Tokenizer
from tests.conftest import SENTENCES
from tests.matrix import agreement, harnesses, report, snippets
from tests.matrix.report import Column
from tests.matrix.snippets import DOCUMENT, NODE, PYTHONS
from tests.server import ROOT, random_model, save_models, serving

HERE = Path(__file__).parent
KEY = "a-key-that-nobody-guesses"
SECONDS = 600  # for a client's rows on a slow machine


def main() -> int:
    """Run everything; returns 1 if anything failed."""
    rows = report.titles()
    tokenizer = Tokenizer.train(iter(SENTENCES), 320)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        columns = [openai_for_python(list(rows), folder), *others(list(rows), tokenizer, folder)]
        broken = documents_blocks(tokenizer, folder)
        comparisons = harnesses.measure(folder)
    found = report.failures(columns) + broken + agreement.failures(comparisons)
    section = report.table(columns, rows) + f"\nThe code blocks above, run verbatim: {'FAIL' if broken else 'pass'}.\n"
    text = report.put(DOCUMENT.read_text(encoding="utf-8"), section)
    text = report.put(text, agreement.section(comparisons), report.HARNESSES_BEGIN)
    DOCUMENT.write_text(text, encoding="utf-8")
    print("\n".join([*agreement.told(comparisons), *found]))
    print(f"{len(found)} failed; {DOCUMENT.relative_to(ROOT)} has the tables")
    return 1 if found else 0


def openai_for_python(rows: list[int], folder: Path) -> Column:
    """Outcomes from pytest's report on the tests that `make test` runs."""
    file = folder / "junit.xml"
    subprocess.run(
        [sys.executable, "-m", "pytest", *map(str, report.PYTHON_TESTS), f"--junitxml={file}"],
        cwd=ROOT,
        timeout=SECONDS,
    )
    return Column(
        "openai, Python", f"openai {version('openai')}, Python {platform.python_version()}", report.junit(file, rows)
    )


def others(rows: list[int], tokenizer: Tokenizer, folder: Path) -> list[Column]:
    """Run the other clients, one after another, since they count the server's rows."""
    control = {name: getattr(tokenizer, name) for name in ("tool_call", "fim_prefix", "fim_suffix", "fim_middle")}
    log, environment = folder / "log", {"STAGECOACH_API_KEYS": KEY}
    with serving(save_models(folder / "models", tokenizer), log=log, environment=environment) as server:
        facts = json.dumps({"url": server.url, "key": KEY, "control": control})

        def column(client: str, versions: str, command: list[str]) -> Column:
            ended = subprocess.run([*command, facts], stdout=subprocess.PIPE, text=True, timeout=SECONDS)
            return Column(client, versions, report.heard(ended.stdout, rows))

        columns = [
            column("openai, JS", npm_versions("openai"), javascript("with_openai.mjs")),
            column("ai", npm_versions("ai", "@ai-sdk/openai-compatible"), javascript("with_ai.mjs")),
            column("langchain-openai", pip_versions("langchain", "langchain-openai", "openai"), python("langchain")),
            column("litellm", pip_versions("litellm", "litellm", "openai"), python("litellm")),
        ]
    assert KEY not in log.read_text(), "the server's log contains its key"
    return columns


def documents_blocks(tokenizer: Tokenizer, folder: Path) -> list[str]:
    """One line for each code block of docs/clients.md that fails."""
    checkpoint.save(folder / snippets.MODEL, random_model(tokenizer), tokenizer, {})
    broken = []
    with serving([folder / snippets.MODEL], log=folder / "blocks.log") as server:
        for heading, code in snippets.blocks(DOCUMENT.read_text(encoding="utf-8")).items():
            try:
                snippets.run(heading, code, server.url, NODE)
            except (AssertionError, subprocess.TimeoutExpired) as error:
                broken.append(f"block {error}")
    return broken


def javascript(script: str) -> list[str]:
    """The command for a script, copied next to the packages, where Node looks for imports."""
    for file in HERE.glob("*.mjs"):
        shutil.copy(file, NODE)
    return [str(NODE / "bin" / "node"), str(NODE / script)]


def python(client: str) -> list[str]:
    """The command for a client's script in the client's environment."""
    return [str(PYTHONS[client]), str(HERE / f"with_{client}.py")]


def npm_versions(*packages: str) -> str:
    """Versions of packages that npm installed."""
    found = [json.loads((NODE / "node_modules" / name / "package.json").read_text())["version"] for name in packages]
    node = subprocess.run(
        [str(NODE / "bin" / "node"), "--version"], stdout=subprocess.PIPE, text=True, check=True
    ).stdout.strip()
    return ", ".join([*(f"{name} {number}" for name, number in zip(packages, found)), f"Node {node}"])


def pip_versions(client: str, *packages: str) -> str:
    """Versions of packages in a client's environment."""
    code = "import importlib.metadata, sys; print(*map(importlib.metadata.version, sys.argv[1:]))"
    told = subprocess.run(
        [str(PYTHONS[client]), "-c", code, *packages], stdout=subprocess.PIPE, text=True, check=True
    ).stdout.split()
    return ", ".join(f"{name} {number}" for name, number in zip(packages, told))


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(main())
