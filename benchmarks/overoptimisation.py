"""How far a reward model can be trusted: PPO without a divergence penalty, until the true score falls while the proxy
rises.

    python benchmarks/overoptimisation.py [--root .] [--out results/overoptimisation.json] [rlhf.iterations=60 ...]

Runs stage rlhf with `beta` 0 on the models and pairs under --root (requires models/tools, models/reward,
data/preferences) in a separate folder, so that nothing in the graph changes, and prints the curve of proxy and gold
scores over the divergence (Gao et al. 2022, arXiv:2210.10760), the best gold score, the final one, and whether gold
fell while the proxy rose. Extra arguments are passed to the stage. Takes as long as stage rlhf, scaled by the number of
iterations.
"""

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NEEDED = ("models/tools", "models/reward", "data/preferences")


def curve(path: Path) -> list[dict[str, float]]:
    """The evaluation rows in the stage's curve: step, proxy, gold, kl."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    names = ("step", "proxy", "gold", "kl")
    return [{name: float(row[name]) for name in names} for row in rows if row.get("gold") and row.get("proxy")]


def verdict(rows: list[dict[str, float]]) -> dict[str, object]:
    """Where gold is best, and whether it then fell while the proxy rose."""
    best = max(rows, key=lambda row: row["gold"])
    last = rows[-1]
    return {
        "best": best,
        "last": last,
        "gold_lost": best["gold"] - last["gold"],
        "overoptimised": last["gold"] < best["gold"] and last["proxy"] > best["proxy"],
    }


def main() -> None:
    """Run the stage in a folder of links, then print and write the curve."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--root", type=Path, default=ROOT)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "overoptimisation.json")
    arguments, more = parser.parse_known_args()
    root = arguments.root.resolve()
    if missing := [name for name in NEEDED if not (root / name).exists()]:
        sys.exit(
            f"expected {', '.join(NEEDED)} in {root}, but {', '.join(missing)} is missing; run dvc repro stage_reward"
        )
    with tempfile.TemporaryDirectory(prefix="overoptimisation-") as scratch:
        folder = Path(scratch)
        for name in ("pipeline", "stages", "conf", "params.yaml", "pyproject.toml", *NEEDED):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).symlink_to(root / name)
        command = [
            sys.executable,
            "-m",
            "stages.rlhf",
            "rlhf.method=ppo",
            "rlhf.beta=0",
            "rlhf.best_of_prompts=0",
            *more,
        ]
        subprocess.run(command, cwd=folder, check=True, env=os.environ | {"PYTHONPATH": str(folder)})
        rows = curve(next(folder.glob("metrics/**/rlhf.csv")))
    if not rows:
        sys.exit("the run has no evaluations; increase `rlhf.iterations` or lower `rlhf.eval_steps`")
    for row in rows:
        sys.stdout.write("  ".join(f"{name} {value:.3f}" for name, value in row.items()) + "\n")
    told = verdict(rows) | {"curve": rows, "arguments": more}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
    sys.stdout.write(json.dumps({name: told[name] for name in ("best", "last", "overoptimised")}) + "\n")


if __name__ == "__main__":
    main()
