"""A golden record: sha256 of everything the graph builds, to verify that a refactoring changed no bit.

    python benchmarks/golden.py record REPOSITORY OUT.json        a built repository, with its server's answers
    python benchmarks/golden.py demo REPOSITORY OUT.json          four stages after 50 steps at demo scale, in a copy
    python benchmarks/golden.py compare BEFORE.json AFTER.json    lists differences; exit code 1 if there are any

Code hashes, run keys and times in JSON files are ignored, and so are files that list other files' hashes (SHA256SUMS):
all of these are expected to change when code moves.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.server import serving

FOLDERS = (
    "data/raw",
    "data/tokens",
    "data/tokenizer",
    "data/dialogues",
    "data/problems",
    "data/preferences",
    "data/facts",
    "models",
    "metrics",
)
LEFT_OUT = {"lineage", "versions", "code", "key"}
LISTS = ("SHA256SUMS", "lineage.json", "README.md")
STAGES = ("language", "tools", "dpo", "grpo")
STEPS = 50
QUESTIONS = (
    {
        "messages": [{"role": "user", "content": "Write a function that adds two numbers."}],
        "max_tokens": 48,
        "temperature": 0,
    },
    {"messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 48, "temperature": 0.8, "seed": 7},
)


def main() -> int:
    """Record or compare hashes. Returns the exit code."""
    parser = argparse.ArgumentParser(description="hashes of what a graph built")
    parser.add_argument("what", choices=("record", "demo", "compare"))
    parser.add_argument("first", type=Path)
    parser.add_argument("second", type=Path)
    asked = parser.parse_args()
    if asked.what == "compare":
        return compare(json.loads(asked.first.read_text()), json.loads(asked.second.read_text()))
    found = record(asked.first) | answers(asked.first) if asked.what == "record" else demo(asked.first)
    asked.second.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    print(f"{len(found)} hashes in {asked.second}")
    return 0


def record(repository: Path, folders: tuple[str, ...] = FOLDERS) -> dict[str, str]:
    """path -> sha256 of its content."""
    files = [path for name in folders for path in sorted((repository / name).rglob("*")) if path.is_file()]
    files = [path for path in files if path.name not in LISTS and not path.name.startswith(".")]
    return {str(path.relative_to(repository)): digest(path) for path in files}


def digest(path: Path) -> str:
    """sha256 of a file; for JSON, ignoring keys that identify code and runs."""
    if path.suffix == ".json":
        return hashlib.sha256(json.dumps(without(json.loads(path.read_text())), sort_keys=True).encode()).hexdigest()
    return hashlib.sha256(path.read_bytes()).hexdigest()


def without(value: Any) -> Any:
    """JSON without the keys in LEFT_OUT."""
    if isinstance(value, dict):
        return {key: without(inner) for key, inner in value.items() if key not in LEFT_OUT}
    return [without(inner) for inner in value] if isinstance(value, list) else value


def answers(repository: Path) -> dict[str, str]:
    """Hashes of a server's answers to fixed requests, for three models."""
    models = [repository / "models" / name for name in ("tools", "rlhf", "diffusion")]
    found = {}
    with (
        tempfile.NamedTemporaryFile() as log,
        serving(models, log=Path(log.name), environment={"PYTHONPATH": ""}, folder=repository) as server,
    ):
        for model in models:
            for number, question in enumerate(QUESTIONS):
                answer = httpx.post(
                    f"{server.url}/v1/chat/completions", json=question | {"model": model.name}, timeout=120
                )
                text = json.dumps(answer.raise_for_status().json()["choices"], sort_keys=True)
                found[f"answer {number} of {model.name}"] = hashlib.sha256(text.encode()).hexdigest()
    return found


def demo(repository: Path) -> dict[str, str]:
    """Hashes of the weights and curves of STAGES after STEPS steps, starting from a built demo repository."""
    with tempfile.TemporaryDirectory(prefix="golden-") as folder:
        copy = Path(folder) / "repository"
        shutil.copytree(
            repository, copy, symlinks=True, ignore=shutil.ignore_patterns(".git", ".venv", "cache", ".work")
        )
        for stage in STAGES:
            steps = "iterations" if stage == "grpo" else "steps"
            command = [sys.executable, "-m", f"stages.{stage}", f"{stage}.{steps}={STEPS}"]
            command += ["dpo.epochs=none"] if stage == "dpo" else []  # the scale file sets the length in epochs
            subprocess.run(command, cwd=copy, env=alone(), check=True)
        folders = tuple(f"models/{stage}" for stage in STAGES)
        found = {f"{STEPS} steps: {name}": value for name, value in record(copy, folders).items()}
        return found | {f"{STEPS} steps: {stage}.csv": digest(copy / f"metrics/{stage}.csv") for stage in STAGES}


def alone() -> dict[str, str]:
    """Environment variables for running the repository's own code, with one thread and without MLflow."""
    return os.environ | {"PYTHONPATH": "", "OMP_NUM_THREADS": "1", "STAGECOACH_MLFLOW": "off"}


def compare(before: dict[str, str], after: dict[str, str]) -> int:
    """Print the differences. Returns 1 if there are any."""
    lines = [
        f"{'gone' if name not in after else 'new' if name not in before else 'other'}: {name}"
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name)
    ]
    print("\n".join(lines) or f"equal: {len(before)} hashes")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
