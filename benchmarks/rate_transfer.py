"""Whether a learning rate tuned on a small model transfers to a wider one (`rate_width`).

    python benchmarks/rate_transfer.py DATA [--optimizer muon] [--sizes nano tiny small] [--steps 100] [--json FILE]

DATA is a checkout with stage_encode@text built at `model: nano`: all sizes use its tokenizer and tokens, so only width,
depth and heads differ. Each size trains `language` from scratch at five rates, each twice the previous one, with
`rate_width` set to nano's width. Prints each validation loss and, for each size, the excess loss of nano's best rate
over the best of the five, in percent. Goal: at most 1%.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

from pipeline.text.tokenizer import Tokenizer

RATES = {"muon": (3e-3, 6e-3, 1.2e-2, 2.4e-2, 4.8e-2), "adamw": (5e-4, 1e-3, 2e-3, 4e-3, 8e-3)}
ROOT = Path(__file__).resolve().parents[1]
MOST = 1.0  # percent


def losses(data: Path, size: str, optimizer: str, steps: int, carried: bool) -> dict[float, float]:
    """Train at each rate; returns rate -> validation loss."""
    found = {}
    width = yaml.safe_load((ROOT / "conf/model/nano.yaml").read_text(encoding="utf-8"))["width"]
    vocabulary = Tokenizer.load(data / "data/tokenizer").vocab_size
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in ("pipeline", "stages"):
            (folder / part).symlink_to(ROOT / part)
        (folder / "conf").mkdir()
        for path in (ROOT / "conf").iterdir():
            if path.name != "model":
                (folder / "conf" / path.name).symlink_to(path)
        (folder / "conf/model").mkdir()
        shape = yaml.safe_load((ROOT / f"conf/model/{size}.yaml").read_text(encoding="utf-8"))
        (folder / f"conf/model/{size}.yaml").write_text(yaml.safe_dump(shape | {"vocab_size": vocabulary}))
        (folder / "params.yaml").write_text(f"seed: 42\ndata_seed: 42\nmodel: {size}\nscale: demo\ndata: machine\n")
        (folder / "data").symlink_to(data.resolve() / "data")
        (folder / "models").mkdir()
        (folder / "models/scratch").symlink_to(ROOT / "models/scratch")
        for rate in RATES[optimizer]:
            keys = {
                "optimizer": optimizer,
                "learning_rate": rate,
                "learning_rates": json.dumps({"embedding": 4 * rate if optimizer == "muon" else rate}),
                "rate_width": width if carried else "null",
                "steps": steps,
                "tokens_per_step": 2048,
                "context": 256,
                "warmup_steps": steps // 10,
                "eval_steps": steps,
                "eval_tokens": 32768,
            }
            line = [f"language.{key}={value}" for key, value in keys.items()]
            environment = os.environ | {"PYTHONPATH": str(folder), "STAGECOACH_MLFLOW": "off"}
            command = [sys.executable, "-m", "stages.language", *line, "runtime.fresh=true"]
            done = subprocess.run(command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True)
            if done.returncode:
                raise SystemExit(f"{size} at {rate:g}: {done.stderr[-2000:]}")
            metrics = json.loads((folder / "metrics/language.json").read_text(encoding="utf-8"))
            found[rate] = metrics["best"]["val_loss"]
            sys.stderr.write(f"{size} {optimizer} {rate:g}: {found[rate]:.4f}\n")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Whether a rate tuned on a small model transfers to a wider one.")
    parser.add_argument("data", type=Path)
    parser.add_argument("--optimizer", choices=sorted(RATES), default="muon")
    parser.add_argument("--sizes", nargs="+", default=["nano", "tiny", "small"])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--plain", action="store_true", help="without rate_width, for comparison")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    table, best = {}, None
    for size in arguments.sizes:
        found = losses(arguments.data, size, arguments.optimizer, arguments.steps, not arguments.plain)
        own = min(found, key=found.__getitem__)
        best = best or own
        behind = 100 * (found[best] / found[own] - 1)
        table[size] = {"losses": found, "best": own, "behind": behind}
        sys.stdout.write(
            f"{size}: best at {own:g} ({found[own]:.4f}); nano's best rate {best:g} is {behind:.2f}% behind\n"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")
    raise SystemExit(max(row["behind"] for row in table.values()) > MOST)


if __name__ == "__main__":
    main()
