"""The code blocks of docs/clients.md, run as a reader would run them, except for the address."""

import re
import subprocess
import sys
from pathlib import Path

from tests.server import ROOT

DOCUMENT = ROOT / "docs" / "clients.md"
ADDRESS = "http://127.0.0.1:8000"
MODEL = "deploy"  # the model name in the document's blocks
CLIENTS = ROOT / ".work" / "clients"
NODE = CLIENTS / "node"  # a virtual environment with Node and the packages that npm installed
PYTHONS = {name: CLIENTS / name / "bin" / "python" for name in ("langchain", "litellm")}
# section -> the command that runs its block; {file} is the block as a file, next to the packages it imports
COMMANDS = {
    "curl": ["bash", "-eu", "{file}"],
    "openai for Python": [sys.executable, "{file}"],
    "openai for JavaScript": [str(NODE / "bin" / "node"), "{file}"],
    "ai (Vercel)": [str(NODE / "bin" / "node"), "{file}"],
    "langchain-openai": [str(PYTHONS["langchain"]), "{file}"],
    "litellm": [str(PYTHONS["litellm"]), "{file}"],
}


def blocks(document: str) -> dict[str, str]:
    """Each section's code block, by heading. Raises ValueError unless each section of COMMANDS has exactly one."""
    found = {}
    for section in re.split(r"^## ", document, flags=re.MULTILINE)[1:]:
        heading, _, rest = section.partition("\n")
        if heading in COMMANDS:
            code = re.findall(r"^```\w+\n(.*?)^```$", rest, re.MULTILINE | re.DOTALL)
            if len(code) != 1 or ADDRESS not in code[0]:
                raise ValueError(f"{heading}: expected one code block that asks {ADDRESS}, found {len(code)}")
            found[heading] = code[0]
    if missing := set(COMMANDS) - set(found):
        raise ValueError(f"expected a section for {sorted(missing)}")
    return found


def run(heading: str, code: str, url: str, folder: Path) -> str:
    """Run a block and return what it prints. Raises AssertionError if it fails or prints nothing."""
    file = folder / "block.mjs"  # Node needs this suffix; the other programs ignore it
    file.write_text(code.replace(ADDRESS, url), encoding="utf-8")
    command = [part.format(file=file) for part in COMMANDS[heading]]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0 and ended.stdout.strip() and '"error"' not in ended.stdout, (
        f"{heading}: {ended.stdout}{ended.stderr}"
    )
    return ended.stdout
