"""How much a repository's other files help a model trained on repositories, measured on held-out packages.

    python benchmarks/cross_file.py [--seeds 1 2 3] [--scale demo] [--folder DIR] [--out FILE] [KEY=VALUE ...]

Makes a scratch copy of the repository in which `data.code` lists packages from requirements.lock as repositories, every
sixth held out entirely (`held_out: ["."]`), and `data.text` is the generated text. Builds the corpora, the tokenizer
and the tokens once, then runs stages `language` and `code` for each seed, with the keys set by KEY=VALUE
(`code.steps=2400`, `corpus.stories_mb=1`). The suite of `pipeline/evaluation/cross_file.py` completes the same held-out
lines and functions with and without those other files. Prints a line per seed and one for all seeds: exact match and
edit similarity, their differences and 95% intervals over files. The last line pools the items of all seeds, so its
intervals are for the mean over seeds. Writes the numbers to --out (default: benchmarks/results/cross_file.json).
"""

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from pipeline.evaluation import cross_file
from pipeline.evaluation.intervals import Interval, paired_difference
from pipeline.evaluation.suites import Subject, SuiteSettings
from pipeline.ingest import sources
from pipeline.model import checkpoint
from pipeline.run.config import Settings, stage_params
from pipeline.run.device import generator
from tests.graph import Repository

HELD_OUT_EVERY = 6  # one package in six, by a hash of its name
FEWEST_FILES = 5  # per package: a single file has no other files
MOST_BYTES = {"train": 1_500_000, "held out": 700_000}  # per package, so that no large package dominates
TRAIN_BYTES = 6_000_000  # all training packages together
MEASURES = ("line_exact", "line_similarity", "line_name", "function_exact", "function_similarity")


def main(arguments: list[str]) -> int:
    """Build, train, measure and print. Returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--scale", default="demo")
    parser.add_argument("--items", type=int, default=400, help="number of lines; half as many functions")
    parser.add_argument("--train-bytes", type=int, default=TRAIN_BYTES)
    parser.add_argument("--folder", type=Path, help="folder for the scratch copy; kept (default: a temporary one)")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "cross_file.json")
    parser.add_argument("changes", nargs="*", metavar="KEY=VALUE")
    chosen = parser.parse_args(arguments)
    folder = chosen.folder or Path(tempfile.mkdtemp(prefix="cross-file-"))
    found: list[tuple[dict[str, Any], list[dict[str, Any]]]] = []
    try:
        repository = prepared(folder, chosen.scale, chosen.train_bytes, chosen.changes)
        for seed in chosen.seeds:
            found.append(measured(trained(repository, seed, chosen.changes), chosen.items))
            print(f"seed {seed}: {shown(found[-1][0])}", flush=True)
    finally:
        if chosen.folder is None:
            shutil.rmtree(folder)
    pooled = over_seeds([rows for _, rows in found])
    print(f"over {len(found)} seeds: {shown(pooled)}")
    result = {"seeds": {seed: numbers for seed, (numbers, _) in zip(chosen.seeds, found, strict=True)}, "all": pooled}
    result |= {"scale": chosen.scale, "changes": chosen.changes}
    chosen.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


def packages(train_bytes: int) -> tuple[list[str], list[str]]:
    """The training packages and the held-out packages, from conf/data/packages.yaml."""
    names = stage_params("corpus", Settings(ROOT, [])).package_names
    train, held_out, num_bytes = [], [], 0
    for name in sorted(names, key=sources.digest):
        found = _files(name)
        size = sum(path.stat().st_size for path, _ in found)
        kind = "train" if sources.digest(name) % HELD_OUT_EVERY else "held out"
        if len(found) < FEWEST_FILES or size > MOST_BYTES[kind]:
            continue
        if kind == "held out":
            held_out.append(name)
        elif num_bytes + size <= train_bytes:
            train.append(name)
            num_bytes += size
    return train, held_out


def _files(name: str) -> list[tuple[Path, str]]:
    package = sources.package_of(name)
    return [(package.base / path, path) for path in package.files if path.endswith(".py") and not sources.is_test(path)]


def prepared(folder: Path, scale: str, train_bytes: int, changes: list[str]) -> Repository:
    """The scratch copy with encoded tokens; an existing one is reused."""
    repository = Repository(folder / "repository")
    if (repository.folder / "data/tokens/code/meta.json").is_file():
        return repository
    repository = Repository.copy_of_ours(folder / "repository")
    train, held_out = packages(train_bytes)
    entries = ""
    for name in (*train, *held_out):
        entries += f"  - repository: repos/{name}\n" + ('    held_out: ["."]\n' if name in held_out else "")
        for path, inside in _files(name):
            target = repository.folder / "data/own/repos" / name / inside
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
    repository.edit("params.yaml", "scale: smoke", f"scale: {scale}")
    repository.edit("params.yaml", "data: packages", "data: files")
    repository.edit("conf/data/files.yaml", "text: [text/*]", "text: [packages]")
    repository.edit("conf/data/files.yaml", "code: [code/*]   # sources\n", f"code:\n{entries}")
    for stage in (["corpus"], ["tokenizer"], ["encode", "text"], ["encode", "code"]):
        repository.run("python", "-m", f"stages.{stage[0]}", *stage[1:], *_of(stage[0], changes))
    return repository


def trained(repository: Repository, seed: int, changes: list[str]) -> Path:
    """Train stages `language` and `code` with a seed; returns the repository's folder."""
    for stage in ("language", "code"):
        shutil.rmtree(repository.folder / "models" / stage, ignore_errors=True)
        repository.run("python", "-m", f"stages.{stage}", f"seed={seed}", *_of(stage, changes))
    return repository.folder


def _of(stage: str, changes: list[str]) -> list[str]:
    """The changes that set keys of a stage."""
    return [change for change in changes if change.startswith(f"{stage}.")]


def measured(folder: Path, num_items: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The suite's numbers and rows."""
    written: SuiteSettings = stage_params("evaluate", Settings(folder, [f"evaluate.cross_file={num_items}"])).settings
    model, tokenizer = checkpoint.load(folder / "models/code")
    files = cross_file.read(folder / "data/raw/code")
    result = cross_file.measured(Subject(model.train(False), tokenizer, written, 1), files)
    return result.numbers, result.rows


def over_seeds(rows_of: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Means over the items of all seeds, with intervals over files: all seeds of a file are resampled together."""
    pooled: dict[str, Any] = {}
    for measure in MEASURES:
        kind, name = measure.split("_")
        arms: dict[str, tuple[list[float], list[float]]] = {}
        for arm in ("with", "without"):
            rows = [row for rows in rows_of for row in rows if row["suite"] == f"cross_file {kind} {arm}"]
            files = [row["id"].rpartition(":")[0] for row in rows]
            arms[arm] = cross_file.by_file(files, [row["scores"][name] for row in rows])
            if files:
                pooled[f"{measure}_{arm}"] = sum(arms[arm][0]) / sum(arms[arm][1])
        if len(arms["with"][0]) > 1:
            draws = generator("cross_file", measure)
            found: Interval = paired_difference(arms["without"], arms["with"], generator=draws)
            pooled |= found.named(f"{measure}_difference")
            pooled["files"] = found.n
    return pooled


def shown(numbers: dict[str, Any]) -> str:
    """The numbers in percent, on one line."""
    parts = []
    for measure in MEASURES:
        if f"{measure}_difference" in numbers:
            low, high = (100 * numbers[f"{measure}_difference_{end}"] for end in ("low", "high"))
            parts.append(
                f"{measure} {100 * numbers[f'{measure}_with']:.1f} against {100 * numbers[f'{measure}_without']:.1f}, "
                f"{100 * numbers[f'{measure}_difference']:+.1f} [{low:+.1f}, {high:+.1f}]"
            )
    return "; ".join(parts)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
