"""Peak memory of the data stages on a large user corpus.

    python benchmarks/corpus_memory.py [--mb 1000] [--folder DIR] [--out FILE]

Makes a scratch copy of the repository with `data: files` and --mb MB of text in `data/own/text` (Zipf's law over
made-up words, JSON lines, no two documents alike), then runs stage_corpus, stage_tokenizer and stage_encode there.
Prints a line per stage: seconds, and peak RssAnon + RssShmem summed over all processes of the stage (private memory;
pages of mapped files, which the kernel can drop, are not counted). Writes the results to --out (default:
benchmarks/results/corpus_memory.json).
"""

import argparse
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from random import Random

import numpy as np
import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from pipeline.synthetic.wording import made_up
from tests.graph import Repository

STAGES = (["corpus"], ["tokenizer"], ["encode", "text"])
WORDS, DOCUMENT, FILE = 30_000, 300, 100_000_000  # vocabulary, words per document, bytes per file


def main(arguments: list[str]) -> int:
    """Build the copy, run the stages, print the results. Returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mb", type=int, default=1000)
    parser.add_argument("--folder", type=Path, help="folder for the scratch copy; kept (default: a temporary one)")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "corpus_memory.json")
    chosen = parser.parse_args(arguments)
    folder = chosen.folder or Path(tempfile.mkdtemp(prefix="corpus-memory-"))
    try:
        repository = Repository.copy_of_ours(folder / "repository")
        own = repository.folder / "data" / "own"
        (own / "text").mkdir(parents=True, exist_ok=True)
        for number in range(-(-chosen.mb * 1_000_000 // FILE)):
            write(own / "text" / f"{number:03d}.jsonl", min(FILE, chosen.mb * 1_000_000 - number * FILE), number)
        shutil.copytree(ROOT / "pipeline", own / "code" / "project", ignore=shutil.ignore_patterns("__pycache__"))
        repository.edit("params.yaml", "data: packages", "data: files")
        results = {}
        for stage in STAGES:
            seconds, peak = measured(repository, stage)
            results[" ".join(stage)] = {"seconds": round(seconds, 1), "peak_mb": round(peak / 1e6)}
            print(f"{' '.join(stage)}: {seconds:.0f} s, {peak / 1e6:.0f} MB", flush=True)
        size = sum(path.stat().st_size for path in (own / "text").iterdir())
        chosen.out.write_text(json.dumps({"text_mb": size // 10**6, "stages": results}, indent=2) + "\n")
    finally:
        if chosen.folder is None:
            shutil.rmtree(folder)
    return 0


def write(path: Path, num_bytes: int, seed: int) -> None:
    """Write documents of sentences until the file is full."""
    draws, rng = np.random.default_rng(seed), Random(0)
    words = np.array(
        [
            *["the", "of", "and", "to", "a", "in", "is", "that", "it", "for", "as", "with", "by", "on", "are"],
            *(made_up(rng) for _ in range(WORDS)),
        ]
    )
    shares = 1 / np.arange(1, len(words) + 1)
    shares /= shares.sum()
    written = 0
    with path.open("w", encoding="utf-8") as file:
        while written < num_bytes:
            drawn = words[draws.choice(len(words), size=(200, DOCUMENT), p=shares)]
            for row in drawn:
                sentences = (" ".join(row[i : i + 8]).capitalize() + "." for i in range(0, DOCUMENT, 8))
                line = json.dumps({"text": "\n".join(sentences)}) + "\n"
                file.write(line)
                written += len(line)


def measured(repository: Repository, stage: list[str]) -> tuple[float, int]:
    """Run one stage; returns its seconds and the peak bytes summed over all its processes."""
    began = time.monotonic()
    process = repository.start("python", "-m", f"stages.{stage[0]}", *stage[1:])
    peak = 0
    while process.poll() is None:
        peak = max(peak, own_memory(process.pid))
        time.sleep(0.1)
    said = process.communicate()[0]
    if process.returncode:
        raise SystemExit(f"stage {' '.join(stage)} failed:\n{said[-3000:]}")
    return time.monotonic() - began, peak


def own_memory(pid: int) -> int:
    """RssAnon + RssShmem of a process and its descendants, in bytes."""
    try:
        parent = psutil.Process(pid)
        family = [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0
    total = 0
    for member in family:
        try:
            lines = Path(f"/proc/{member.pid}/status").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon:", "RssShmem:")))
    return total


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
