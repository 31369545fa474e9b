"""What users see when they make a mistake: makes each one in a copy of the repository and prints its message.

    python benchmarks/mistakes.py [WORDS]     all mistakes, or those whose description contains WORDS

Prints a Markdown table with the last line of each output. A mistake passes if the command exits with a code other than
0 (or with 0 and a warning, where that is expected), and if the output has the expected words and no traceback. The exit
code is 1 if any mistake does not pass.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests import checkpoints
from tests.graph import Repository

PROBLEM = {"question": "Add.", "entry_point": "f", "tests": [{"args": "[1]", "expected": "2"}]}
NO_DATA = tuple(f"conf/data/files.yaml:{kind}=[]" for kind in ("text", "code", "dialogues", "problems", "preferences"))


@dataclass(frozen=True)
class Mistake:
    """A command, and what to break before it runs."""

    what: str
    command: str
    words: str  # that the output must contain
    before: Callable[[Path], object] = lambda folder: None
    code: int | None = None  # the exit code; None: anything but 0
    environment: tuple[tuple[str, str], ...] = ()


def edited(name: str, old: str, new: str) -> Callable[[Path], None]:
    """Replace a string in a file."""

    def edit(folder: Path) -> None:
        text = (folder / name).read_text()
        assert old in text, f"{name} has no {old!r}"
        (folder / name).write_text(text.replace(old, new, 1))

    return edit


def written(name: str, content: str | bytes) -> Callable[[Path], None]:
    """Write a file."""

    def write(folder: Path) -> None:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())

    return write


def removed(name: str) -> Callable[[Path], None]:
    """Remove a file."""
    return lambda folder: (folder / name).unlink()


def linked(name: str, target: str) -> Callable[[Path], None]:
    """Make a symbolic link."""

    def link(folder: Path) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to(target)

    return link


def checkpoint(change: Callable[[Path], object] = lambda folder: None) -> Callable[[Path], None]:
    """Write a small checkpoint to data/pretrained, then change it."""

    def make(folder: Path) -> None:
        made = folder / "data/pretrained"
        checkpoints.write(made, "qwen3")
        change(made)

    return make


def damaged(folder: Path) -> None:
    """Put NaN into the weights."""
    path = folder / "model.safetensors"
    weights = load_file(path)
    first = next(iter(weights))
    weights[first] = torch.full_like(weights[first], float("nan"))
    save_file(weights, path, metadata={"format": "pt"})


def truncated(folder: Path) -> None:
    """Cut the weights file in half."""
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


OWN = "dvc exp run -S data=files " + " ".join(f"-S '{text}'" for text in NO_DATA)
TAKE = "python -m stages.base"
MISTAKES = (
    Mistake("a key that does not exist", "python -m stages.code code.stepz=5", "unknown key"),
    Mistake("a word instead of a number", "python -m stages.code code.steps=many", "expected"),
    Mistake("a negative number of steps", "python -m stages.code code.steps=-1", "steps"),
    Mistake("a learning rate that is not a number", "python -m stages.code code.learning_rate=fast", "learning_rate"),
    Mistake("a key without a value", "python -m stages.code code.steps", "usage"),
    Mistake("an unknown scale", "python -m stages.code scale=huge", "options"),
    Mistake("an unknown model size", "python -m stages.language model=giant", "options"),
    Mistake("an unknown data source", "python -m stages.corpus data=web", "options"),
    Mistake("an unknown method", "python -m stages.grpo grpo.method=magic", "method"),
    Mistake("an unknown loss", "python -m stages.dpo dpo.loss=best", "loss"),
    Mistake(
        "a duplicate key in params.yaml",
        "python -m pipeline.run.config",
        "seed",
        edited("params.yaml", "seed: 42", "seed: 1\nseed: 42"),
    ),
    Mistake(
        "a duplicate key in conf/scale",
        "python -m pipeline.run.config",
        "conf/scale/smoke.yaml",
        edited("conf/scale/smoke.yaml", "\ncode:\n", "\ncode:\n  steps: 1\n  steps: 2\n"),
    ),
    Mistake(
        "a tab in params.yaml",
        "python -m pipeline.run.config",
        "params.yaml",
        edited("params.yaml", "corpus:\n  ", "corpus:\n\t"),
    ),
    Mistake(
        "an open bracket in params.yaml",
        "python -m pipeline.run.config",
        "params.yaml",
        edited("params.yaml", "seed: 42", "seed: [42"),
    ),
    Mistake("params.yaml is missing", "python -m pipeline.run.config", "params.yaml", removed("params.yaml")),
    Mistake("params.yaml is empty", "python -m pipeline.run.config", "params.yaml", written("params.yaml", "")),
    Mistake(
        "params.yaml is in another encoding",
        "python -m pipeline.run.config",
        "params.yaml",
        written("params.yaml", b"seed: \xff\xfe\n"),
    ),
    Mistake(
        "a block that does not exist",
        "python -m pipeline.run.config",
        "unknown key",
        edited("params.yaml", "\ncode:\n", "\ncodes:\n"),
    ),
    Mistake("a gate on an unknown measure", "python -m stages.report 'report.gate={beauty: 1}'", "unknown measure"),
    Mistake("a baseline given by name", "python -m stages.report report.baseline=main", "full hash"),
    Mistake("a stage that does not exist", "python -m stages.nosuch", "No module named"),
    Mistake("a stage that is not in dvc.yaml", "python -m pipeline.tools.launch stage_nosuch", "no stage"),
    Mistake("no jobs", "python -m pipeline.tools.launch -j 0", "at least 1"),
    Mistake("evaluate without a model", "python -m stages.evaluate", "usage"),
    Mistake("a model that does not exist", "python -m stages.evaluate nosuch", "does not exist"),
    Mistake("encode an unknown corpus", "python -m stages.encode prose", "usage"),
    Mistake("resume without a step", "python -m stages.code --resume", "usage"),
    Mistake("resume at a step that is not a number", "python -m stages.code --resume ten", "usage"),
    Mistake("resume a stage that does not train", "python -m stages.corpus --resume 5", "usage"),
    Mistake("a stage whose inputs are missing", "python -m stages.code", "make it with: dvc repro"),
    Mistake("an unknown precision", "python -m stages.corpus runtime.precision=fp8", "precision"),
    Mistake("a negative number of workers", "python -m stages.corpus runtime.workers=-3", "workers"),
    Mistake(
        "a learning-rate search in a stage that does not train",
        "python -m stages.corpus runtime.find_lr=true",
        "trains nothing",
    ),
    Mistake("an export in an unknown type", "python -m stages.deploy deploy.gguf=[q3]", "expected types"),
    Mistake("deploy a folder outside models/", "python -m stages.deploy deploy.model=../other", "name of a folder"),
    Mistake(
        "a benchmark file outside its folder",
        "python -m stages.evaluate tools evaluate.benchmarks=[/etc/passwd]",
        "expected files in",
    ),
    Mistake("a report with fewer than 0 samples", "python -m stages.report report.samples=-1", "samples"),
    Mistake("a model that does not fit into memory", "python -m stages.language model=xlarge scale=cluster", ""),
    Mistake(
        "serve a folder that does not exist", "python -m pipeline.serve models/nosuch", "expected a model directory"
    ),
    Mistake("serve a file", "python -m pipeline.serve README.md", "expected a model directory"),
    Mistake("serve a folder without a model", "python -m pipeline.serve conf", "config.json"),
    Mistake("an invalid port", "python -m pipeline.serve data/pretrained --port 80000", "80000", checkpoint()),
    Mistake("a public address without keys", "python -m pipeline.serve models/x --host 0.0.0.0", "key"),
    Mistake(
        "chat with a folder that does not exist",
        "python -m pipeline.serve.chat models/nosuch",
        "expected a model directory",
    ),
    Mistake("compare with an unknown revision", "python -m pipeline.report.compare nosuch", "expected a commit"),
    Mistake("compare with a commit that has no results", "python -m pipeline.report.compare HEAD", "has no metrics"),
    Mistake("pin an unknown revision", "python -m pipeline.report.baseline pin nosuch", "expected a commit"),
    Mistake("crown before anything is deployed", "python -m pipeline.report.champion crown", "dvc repro stage_deploy"),
    Mistake("validate a file that is missing", "python -m pipeline.tools.validate no.jsonl", "no.jsonl"),
    Mistake(
        "validate rows that are not JSON",
        "python -m pipeline.tools.validate rows.jsonl",
        "rows.jsonl",
        written("rows.jsonl", "hello\n" * 9),
    ),
    Mistake("plan an unknown size", "python -m pipeline.tools.plan model=giant", "options"),
    Mistake("publish an undeployed model", "python -m pipeline.tools.publish models/deploy --to me/x", "models/deploy"),
    Mistake("prune with an unknown option", "python -m pipeline.run.workdir prune --all-of-it", "--all-of-it"),
    Mistake(
        "own data without files",
        "python -m pipeline.run.config",
        "matches",
        edited("params.yaml", "data: packages", "data: files"),
    ),
    Mistake(
        "a problem whose answer fails its tests",
        f"{OWN} -S 'conf/data/files.yaml:problems=[\"problems/*\"]' stage_tasks",
        "problems/p.jsonl:1",
        written("data/own/problems/p.jsonl", json.dumps(PROBLEM | {"answer": "def f(x):\n    return x"}) + "\n"),
    ),
    Mistake(
        "rows of an unknown shape",
        f"{OWN} -S 'conf/data/files.yaml:dialogues=[\"dialogues/*\"]' stage_tasks",
        "d.jsonl",
        written("data/own/dialogues/d.jsonl", '{"colour": "red"}\n' * 30),
    ),
    Mistake(
        "a link that leads out of the folder",
        f"{OWN} -S 'conf/data/files.yaml:text=[\"text/*\"]' stage_corpus",
        "link",
        linked("data/own/text/link.txt", "/etc/passwd"),
    ),
    Mistake("an unknown model, through DVC", "dvc exp run -S model=giant stage_language", "giant"),
    Mistake("an unknown base, through DVC", "dvc exp run -S lora.base=nosuch stage_lora", "nosuch"),
    Mistake("a base that does not exist", f"{TAKE} base.folder=data/nosuch", "data/nosuch"),
    Mistake("a model from the hub without a network", f"{TAKE} base.hub=owner/name", "could not be reached"),
    Mistake(
        "a base without its configuration",
        TAKE,
        "config.json",
        checkpoint(lambda made: (made / "config.json").unlink()),
    ),
    Mistake("a base whose weights are cut short", TAKE, "model.safetensors", checkpoint(truncated)),
    Mistake("a base with NaN in its weights", TAKE, "finite", checkpoint(damaged)),
    Mistake("a work folder that is a file", "python -m stages.corpus", ".work", written(".work", "")),
    Mistake(
        "a metrics folder that is a file",
        "python -m stages.corpus",
        "metrics",
        lambda folder: (shutil.rmtree(folder / "metrics", ignore_errors=True), (folder / "metrics").write_text("")),
    ),
    Mistake(
        "an MLflow server that is not running",
        "python -m stages.tokenizer",
        "dvc repro",
        environment=(("MLFLOW_TRACKING_URI", "http://127.0.0.1:9"), ("STAGECOACH_MLFLOW", "on")),
    ),
    Mistake(
        "a syntax error in a stage",
        "python -m pipeline.run.codehash",
        "stages/code.py",
        edited("stages/code.py", "def run(", "def run(("),
    ),
    Mistake("an invalid port for the sandbox service", "python -m pipeline.sandbox.service --port 80000", "80000"),
)


def made(mistake: Mistake, original: Path, scratch: Path) -> tuple[bool, int, str]:
    """Whether a mistake passes, its exit code, and the last line of its output."""
    folder = scratch / "copy"
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run(["cp", "-a", str(original), str(folder)], check=True)
    mistake.before(folder)
    repository = Repository(folder)
    variables = dict(mistake.environment) | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    done = repository.run("bash", "-c", f"exec timeout 120 {mistake.command}", check=False, **variables)
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    is_code_right = done.returncode != 0 if mistake.code is None else done.returncode == mistake.code
    passes = (
        is_code_right and "Traceback" not in done.stdout and mistake.words in done.stdout and done.returncode != 124
    )
    if not passes and "-v" in os.environ.get("MISTAKES", ""):
        sys.stderr.write(done.stdout + "\n")
    return passes, done.returncode, lines[-1] if lines else ""


def main() -> int:
    """Make the mistakes and print the table. Returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("words", nargs="?", default="", help="only mistakes whose description contains these words")
    chosen = [mistake for mistake in MISTAKES if parser.parse_args().words in mistake.what]
    failed = 0
    sys.stdout.write("| mistake | command | exit | last line | |\n|---|---|---|---|---|\n")
    with tempfile.TemporaryDirectory(prefix="stagecoach-mistakes-") as scratch:
        original = Path(scratch) / "original"
        Repository.copy_of_ours(original)
        for mistake in tqdm(chosen, unit="mistake", disable=None):
            passes, code, line = made(mistake, original, Path(scratch))
            failed += not passes
            cells = (
                mistake.what,
                f"`{mistake.command[:60]}`",
                str(code),
                line[:200].replace("|", "\\|"),
                "" if passes else "FAILS",
            )
            sys.stdout.write("| " + " | ".join(cells) + " |\n")
            sys.stdout.flush()
    sys.stdout.write(f"\n{len(chosen) - failed} of {len(chosen)} mistakes end with a clear message.\n")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
