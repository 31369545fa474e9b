"""Seconds per step and peak memory of our training stages vs. trl 1.12.0's trainers: same weights, rows, lengths,
precision.

    pip install trl==1.12.0
    python benchmarks/rl_step.py [grpo rloo ppo dpo reward lora tools] [--steps 6] [--repeats 3]

Run from the root of a built repository. Each side of each method runs in its own process, and the sides take turns. A
step is the time between two batch draws; in reinforcement learning, an entire iteration: sampling, scoring, reference
and update. The first step is a warm-up and is not counted. Both sides: float32, AdamW, one micro-batch, 64 answers of
at most 64 tokens, 8 pairs, or 4 rows of 512 packed tokens; rewards need no sandbox. Goals: at most half of trl's time
per step in reinforcement learning, and never more memory.

Our side is the stage as run by `dvc repro`, so its peak includes reading the data, the evaluations and the export.
"""

import argparse
import importlib.util
import json
import os
import resource
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

METHODS = ("grpo", "rloo", "ppo", "dpo", "reward", "lora", "tools")
ROLLING = ("grpo", "rloo", "ppo")
ANSWERS, TOKENS, PAIRS, ROWS, CONTEXT, RATE = 64, 64, 8, 4, 512, 1e-5
ROLLOUTS = {
    "max_prompt": 256,
    "max_new_tokens": TOKENS,
    "epochs": 1,
    "minibatches": 1,
    "optimizer": "adamw",
    "learning_rate": RATE,
}
STAGES: dict[str, tuple[str, dict[str, Any]]] = {  # method -> stage, its keys
    "grpo": ("grpo", ROLLOUTS | {"method": "grpo", "prompts": 8, "samples": 8, "eval_problems": 8}),
    "rloo": ("grpo", ROLLOUTS | {"method": "rloo", "prompts": 8, "samples": 8, "eval_problems": 8}),
    "ppo": (
        "rlhf",
        ROLLOUTS
        | {
            "prompts": 64,
            "samples": 1,
            "kinds": "[code]",
            "rewards": "{learned: 1.0}",
            "eval_prompts": 8,
            "best_of": 2,
            "best_of_prompts": 2,
            "report_samples": 1,
        },
    ),
    "dpo": ("dpo", {"pairs": PAIRS, "precompute_reference": "false"}),
    "reward": ("reward", {"pairs": PAIRS, "extra_layers": 0, "likelihood_weight": 0.0, "own_prompts": 8}),
    "lora": (
        "lora",
        {"tokens_per_step": ROWS * CONTEXT, "context": CONTEXT, "rank": 16, "alpha": 32, "dropout": 0.0}
        | {"base": "code", "dialogues": "dialogues", "control_rate": "none"},
    ),
    "tools": (
        "tools",
        {"tokens_per_step": ROWS * CONTEXT, "context": CONTEXT, "optimizer": "adamw", "learning_rate": RATE}
        | {"rehearse": "none"},
    ),
}


def lines(path: Path, keep: Callable[[dict[str, Any]], bool], count: int) -> list[dict[str, Any]]:
    """The first `count` records for which `keep` is true."""
    with path.open(encoding="utf-8") as file:
        return list(islice((record for line in file if keep(record := json.loads(line))), count))


def scratch(folder: Path, built: Path) -> None:
    """Fill a folder with some records (code pairs, problems, dialogues without tools) and links to the models."""
    sources = {
        "preferences": lambda record: record["kind"] == "code",
        "dialogues": lambda record: all(
            isinstance(m["content"], str) and "tool_calls" not in m for m in record["messages"]
        ),
        "problems": lambda record: True,
    }
    for name, keep in sources.items():
        for file in (built / "data" / name).glob("*.jsonl"):
            to = folder / "data" / name / file.name
            to.parent.mkdir(parents=True, exist_ok=True)
            found = lines(file, keep, 16 if file.stem in ("val", "test") else 400)
            to.write_text("".join(json.dumps(record) + "\n" for record in found), encoding="utf-8")
    (folder / "models").mkdir()
    for model in ("code", "tools", "reward"):
        (folder / "models" / model).symlink_to(built / "models" / model)
    for corpus in ("text", "code"):
        (folder / "data/none" / corpus).mkdir(parents=True)
    for name in ("conf", "params.yaml", "pipeline", "stages"):
        (folder / name).symlink_to(ROOT / name)


def stamped(cls: type, name: str, stamps: list[float]) -> None:
    """Record the time of each call to a method."""
    method = getattr(cls, name)

    def listening(*given: Any, **named: Any) -> Any:
        stamps.append(time.perf_counter())
        return method(*given, **named)

    setattr(cls, name, listening)


def ours(method: str, steps: int) -> list[float]:
    """Run the stage in the working directory; returns the times of its batch draws."""
    from pipeline.batches.packing import PackedStream
    from pipeline.batches.pairs import PairStream
    from pipeline.rl.rollout import RolloutStream

    stamps: list[float] = []
    for cls in (RolloutStream, PackedStream, PairStream):
        stamped(cls, "rows", stamps)
    stage, keys = STAGES[method]
    keys |= {"iterations" if method in ROLLING else "steps": steps, "eval_steps": steps}
    rows = ANSWERS if method in ROLLING else PAIRS if method in ("dpo", "reward") else ROWS
    runtime = {"precision": "fp32", "micro_batch": rows, "save_minutes": 1000.0, "logging_steps": steps}
    sys.argv = [
        stage,
        "scale=smoke",
        *(f"{stage}.{key}={value}" for key, value in keys.items()),
        *(f"runtime.{key}={value}" for key, value in runtime.items()),
    ]
    try:
        runpy.run_module(f"stages.{stage}", run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        if ended.code:
            raise
    return stamps[-steps:]


def theirs(method: str, steps: int) -> list[float]:
    """Run trl's trainer; returns the times at which its steps ended."""
    from transformers import AutoTokenizer, TrainerCallback

    stamps: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: object, **__: object) -> None:
            stamps.append(time.perf_counter())

    common: dict[str, Any] = {
        "output_dir": "out",
        "learning_rate": RATE,
        "lr_scheduler_type": "constant",
        "bf16": False,
        "report_to": [],
        "gradient_checkpointing": False,
        "use_cpu": True,
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    tokenizer = AutoTokenizer.from_pretrained("models/tools")
    given: dict[str, Any] = {"processing_class": tokenizer, "callbacks": [Clock()]}
    makers = {
        "grpo": group_trainer,
        "rloo": group_trainer,
        "ppo": ppo_trainer,
        "dpo": pair_trainer,
        "reward": pair_trainer,
    }
    makers.get(method, fine_tuner)(method, steps, common, given).train()
    return stamps


def model_of(name: str, *, reward: bool = False) -> Any:
    """Load a model directory in float32, with a reward head or a language model head."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    kind, named = (AutoModelForSequenceClassification, {"num_labels": 1}) if reward else (AutoModelForCausalLM, {})
    return kind.from_pretrained(f"models/{name}", dtype=torch.float32, **named)


def dataset(name: str, row: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """Records from `data/` in trl's format."""
    from datasets import Dataset  # pyright: ignore[reportAttributeAccessIssue]

    return Dataset.from_list([row(record) for record in lines(Path("data") / name, bool, 400)])


def group_trainer(method: str, steps: int, common: dict[str, Any], given: dict[str, Any]) -> Any:
    """A trainer for GRPO or RLOO on problems."""
    import trl

    config = getattr(trl, f"{method.upper()}Config")(
        per_device_train_batch_size=ANSWERS,
        num_generations=8,
        max_completion_length=TOKENS,
        max_steps=steps,
        beta=0.01 if method == "grpo" else 0.05,
        **common,
    )
    asked = dataset("problems/rl.jsonl", lambda record: {"prompt": [{"role": "user", "content": record["question"]}]})
    trainer = getattr(trl, f"{method.upper()}Trainer")
    return trainer(model_of("tools"), reward_funcs=reward, args=config, train_dataset=asked, **given)


def ppo_trainer(method: str, steps: int, common: dict[str, Any], given: dict[str, Any]) -> Any:
    """A trainer for PPO on the prompts of code pairs."""
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    tokenizer = given["processing_class"]
    tokenizer.padding_side = "left"

    def rendered(record: dict[str, Any]) -> dict[str, Any]:
        return {
            "input_ids": tokenizer.apply_chat_template(record["prompt"], add_generation_prompt=True, return_dict=False)
        }

    data = dataset("preferences/train.jsonl", rendered).filter(lambda row: len(row["input_ids"]) <= 256)
    config = PPOConfig(
        per_device_train_batch_size=ANSWERS,
        gradient_accumulation_steps=1,
        num_mini_batches=1,
        num_ppo_epochs=1,
        total_episodes=ANSWERS * steps,
        local_rollout_forward_batch_size=ANSWERS,
        response_length=TOKENS,
        num_sample_generations=0,
        stop_token="eos",
        kl_coef=0.05,
        **common,
    )
    judge, critic = (model_of("reward", reward=True) for _ in range(2))
    return PPOTrainer(
        config,
        model=model_of("tools"),
        ref_model=model_of("tools"),
        reward_model=judge,
        value_model=critic,
        train_dataset=data,
        eval_dataset=data,
        **given,
    )


def pair_trainer(method: str, steps: int, common: dict[str, Any], given: dict[str, Any]) -> Any:
    """A trainer for DPO or a reward model on code pairs."""
    import trl

    name = {"dpo": "DPO", "reward": "Reward"}[method]
    config = getattr(trl, f"{name}Config")(per_device_train_batch_size=PAIRS, max_steps=steps, **common)
    pairs = dataset("preferences/train.jsonl", lambda record: {k: record[k] for k in ("prompt", "chosen", "rejected")})
    start = model_of("tools", reward=method == "reward")
    return getattr(trl, f"{name}Trainer")(start, args=config, train_dataset=pairs, **given)


def fine_tuner(method: str, steps: int, common: dict[str, Any], given: dict[str, Any]) -> Any:
    """A trainer for fine-tuning on dialogues, with an adapter for `lora`."""
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    config = SFTConfig(
        per_device_train_batch_size=ROWS,
        max_length=CONTEXT,
        packing=True,
        packing_strategy="wrapped",
        max_steps=steps,
        **common,
    )
    adapter = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear") if method == "lora" else None
    rows = dataset("dialogues/train.jsonl", lambda record: {"messages": record["messages"]})
    return SFTTrainer(model_of("code"), args=config, train_dataset=rows, peft_config=adapter, **given)


def reward(completions: list[Any], **_: object) -> list[float]:
    """A reward based on length, so that no sandbox is needed."""
    return [-len(str(completion)) / 100 for completion in completions]


def side(who: str, method: str, steps: int) -> None:
    """Run one side in this process and in the working directory; prints one line of JSON."""
    stamps = {"ours": ours, "theirs": theirs}[who](method, steps)
    taken = [later - earlier for earlier, later in pairwise(stamps)]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    sys.stdout.write(json.dumps({"seconds": statistics.median(taken[1:]), "peak_mib": round(peak)}) + "\n")


def measured(who: str, method: str, steps: int, built: Path) -> dict[str, float]:
    """Run one side once, in a separate process."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        scratch(folder, built)
        environment = os.environ | {"STAGECOACH_WORK": str(folder / ".work"), "STAGECOACH_MLFLOW": "off"}
        command = [sys.executable, __file__, method, "--steps", str(steps), "--side", who]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{method}, {who}: {done.stderr[-3000:]}")
        return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    """Print a line per method: medians of both sides, their ratio, and peak memory."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("methods", nargs="*", default=METHODS)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--side", choices=["ours", "theirs"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if unknown := set(arguments.methods) - set(METHODS):
        parser.error(f"expected any of {', '.join(METHODS)}, found {', '.join(sorted(unknown))}")
    if arguments.steps < 3:
        parser.error("expected at least 3 steps: the first one is a warm-up")
    if arguments.side:
        side(arguments.side, arguments.methods[0], arguments.steps)
        return
    if importlib.util.find_spec("trl") is None:
        parser.error("expected trl 1.12.0 in this environment, found none; run pip install trl==1.12.0")
    for method in arguments.methods:
        runs = [
            {who: measured(who, method, arguments.steps, Path.cwd()) for who in ("ours", "theirs")}
            for _ in range(arguments.repeats)
        ]
        middle = {
            who: {key: statistics.median(run[who][key] for run in runs) for key in ("seconds", "peak_mib")}
            for who in ("ours", "theirs")
        }
        ratios = [run["ours"]["seconds"] / run["theirs"]["seconds"] for run in runs]
        sys.stdout.write(
            json.dumps(
                {
                    "method": method,
                    **middle,
                    "time_ratio": round(statistics.median(ratios), 3),
                    "ratios": [round(ratio, 3) for ratio in ratios],
                }
            )
            + "\n"
        )
        sys.stdout.flush()


if __name__ == "__main__":
    main()
