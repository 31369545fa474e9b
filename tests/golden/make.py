"""Make the golden numbers of the alignment objectives: tests/golden/<method>.json, read by tests that need no oracle.

    python tests/golden/make.py a        by trl 1.12.0: reward, dpo, kto, grpo, rloo
    python tests/golden/make.py b        by trl 0.11.4: ppo, and the parts of dpo that 1.12.0 lacks
    python tests/golden/make.py hand     reinforce_pp, worked out in by_hand.py

A second argument names another folder to write to. The two versions conflict, so each needs its own environment.
Install torch first and pinned, because with a range pip could fetch another build of several gigabytes:

    python -m venv a && a/bin/pip install torch==2.13.0 && a/bin/pip install trl==1.12.0
    python -m venv b && b/bin/pip install torch==2.13.0 && b/bin/pip install trl==0.11.4 transformers==4.46.3 \
        'accelerate<1.2' 'huggingface_hub<1' rich

CPU, float32, one thread, fixed seeds; no trainer is built, so bf16 and checkpointing are off. A case is replaced only
by the oracle that made it. Not guaranteed: the ninth digit on another processor (tests/parity allows 1e-6).
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import torch
from case import write

MODULES = {"a": "trl_1_12", "b": "trl_0_11", "hand": "by_hand"}


def main(oracle: str, folder: Path) -> None:
    """Write the oracle's cases into the folder; refuse any version of trl but the oracle's."""
    if oracle != "hand":
        wanted, found = {"a": "1.12.0", "b": "0.11.4"}[oracle], importlib.import_module("trl").__version__
        if wanted != found:
            raise SystemExit(
                f"oracle {oracle} is trl {wanted}; found {found}; the docstring of {__file__} says how to install it"
            )
    torch.set_num_threads(1)
    for method, cases in importlib.import_module(MODULES[oracle]).cases().items():
        path = write(folder, method, cases)
        print(f"{path.name}: {len(cases)} cases of oracle {oracle}, {path.stat().st_size} bytes")


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3) or sys.argv[1] not in MODULES:
        raise SystemExit(f"usage: python {sys.argv[0]} {'|'.join(MODULES)} [FOLDER]")
    main(sys.argv[1], Path(sys.argv[2]) if len(sys.argv) == 3 else Path(__file__).parent)
