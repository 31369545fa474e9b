"""The cost of DVC with big models: seconds for a no-op `dvc repro`, bytes on disk, space freed by `prune`.

    python benchmarks/big_outs.py [--gigabytes 30] [--folder /tmp]

In a temporary folder, stages publish 1 GB files as this project's stages do: from their work folder, with the
repository's DVC settings. The files differ only in their first bytes, but their disk space is fully allocated.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GB = 10**9
STAGES = 6
GRAPH = """stages:
  big:
    matrix: {number: [%s]}
    cmd: %s stage.py ${item.number} %d
    deps: [stage.py]
    outs: ["models/big-${item.number}"]
"""
STAGE = """import os
import sys
from pathlib import Path

from pipeline.run import workdir

number, size = sys.argv[1], int(sys.argv[2])
key = Path(".work/big", number)
weights = key / "out/models" / f"big-{number}"
weights.mkdir(parents=True)
(key / "lock").touch()
for part, start in enumerate(range(0, size, 10**9)):
    with (weights / f"model-{part}.safetensors").open("wb") as file:
        file.write(f"{number} {part}".encode())
        os.posix_fallocate(file.fileno(), 0, min(10**9, size - start))
(key / "finished.json").write_text("{}")
workdir.publish(weights, Path("models") / weights.name)
"""


def main() -> int:
    """Run the benchmark and print its results."""
    parser = argparse.ArgumentParser(description="DVC with big models")
    parser.add_argument("--gigabytes", type=float, default=30.0)
    parser.add_argument("--folder", type=Path, default=None)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        size = int(options.gigabytes * GB / STAGES)
        (folder / "dvc.yaml").write_text(GRAPH % (", ".join(map(str, range(STAGES))), sys.executable, size))
        (folder / "stage.py").write_text(STAGE)
        environment = os.environ | {"PYTHONPATH": str(ROOT), "DVC_SITE_CACHE_DIR": str(folder / "site")}
        environment |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}

        def run(*command: str) -> tuple[float, str]:
            start = time.perf_counter()
            done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(f"{' '.join(command)} exited with code {done.returncode}:\n{done.stdout}{done.stderr}")
            return time.perf_counter() - start, done.stdout

        run("dvc", "init", "-q", "--no-scm")
        settings = (ROOT / ".dvc/config").read_text()
        (folder / ".dvc/config").write_text(settings.replace("[core]", "[core]\n    no_scm = true"))
        seconds, _ = run("dvc", "repro")
        print(f"first repro, with hashing: {seconds:.1f} s; {used(folder) / GB:.2f} GB on disk")
        for _ in range(3):
            seconds, said = run("dvc", "repro")
            assert "up to date" in said, said
            print(f"repro with nothing to do: {seconds:.1f} s")
        before = used(folder)
        prune = [sys.executable, "-m", "pipeline.run.workdir", "prune", "--finished"]
        print(f"prune --finished: {run(*prune)[1].splitlines()[-1]}; freed {(before - used(folder)) / 1e6:.1f} MB")
        for file in folder.glob("models/big-0/*"):
            file.unlink()
        seconds, _ = run("dvc", "checkout", "big@0")
        print(f"checkout of a stage's outs: {seconds:.1f} s; {used(folder) / GB:.2f} GB on disk")
    return 0


def used(folder: Path) -> int:
    """Bytes on disk; a hard-linked file counts once."""
    status = {one.st_ino: one for one in (path.lstat() for path in folder.rglob("*") if path.is_file())}
    return sum(512 * one.st_blocks for one in status.values())


if __name__ == "__main__":
    sys.exit(main())
