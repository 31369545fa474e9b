"""A folder in which the stages of alignment run for real within a second: tiny models, a handful of pairs and problems.

    models/{code,tools,teacher,reward}   data/{preferences,labels,dialogues,problems,facts,taught}
    params.yaml   conf -> ours

`Workspace.command` is `python -m stages.<stage> key=value ...` in this process: the same parsing, keys, gates, exit
codes and files.
"""

import copy
import csv
import json
import runpy
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.ingest import records
from pipeline.ingest.records import Dialogue, Pair, Problem
from pipeline.model import checkpoint
from pipeline.model.config import ModelConfig
from pipeline.model.heads import RewardModel
from pipeline.model.transformer import Transformer
from pipeline.rl import answers, teaching
from pipeline.run import device, workdir
from pipeline.synthetic import drills
from pipeline.text.tokenizer import Tokenizer
from tests.conftest import ROOT
from tests.corpora import write_corpus

TRAINING = {"optimizer": "adamw", "warmup_steps": 0, "eval_steps": 100}
PAIRS = TRAINING | {
    "steps": 4,
    "pairs": 4,
    "max_prompt": 60,
    "max_length": 120,
    "eval_tokens": 64,
    "learning_rate": 1e-2,
}
ROLLOUTS = TRAINING | {
    "iterations": 2,
    "epochs": 1,
    "minibatches": 2,
    "max_prompt": 60,
    "max_new_tokens": 24,
    "learning_rate": 1e-3,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "reward": PAIRS | {"calibration_answers": 4, "answer_tokens": 24, "own_prompts": 0},
    "dpo": PAIRS,
    "kto": {key: value for key, value in PAIRS.items() if key != "pairs"} | {"answers": 6},
    "rlhf": ROLLOUTS | {"prompts": 6, "kinds": [], "eval_prompts": 2, "best_of_prompts": 0, "rehearse": "none"},
    "grpo": ROLLOUTS | {"prompts": 3, "samples": 4, "rewards": {"length": 1.0, "code_format": 0.5}, "eval_problems": 2},
    "distill": ROLLOUTS
    | {"teacher": "teacher", "prompts": 3, "samples": 2, "on_policy": 0.5, "beta": 0.3, "eval_problems": 2},
    "lora": TRAINING
    | {"steps": 4, "tokens_per_step": 256, "context": 128, "eval_tokens": 64, "learning_rate": 1e-2}
    | {"dialogues": "dialogues", "control_rate": "none"},
}


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    said: str  # on stderr


@dataclass(frozen=True)
class Workspace:
    """The folder, which is the working directory."""

    folder: Path
    tokenizer: Tokenizer

    def command(self, stage: str, **changes: Any) -> Ended:
        """Run a stage with SETTINGS and `changes`; a key of another block is written `runtime.save_steps`."""
        return command(stage, arguments(stage, changes))

    def weights(self, name: str) -> dict[str, Tensor]:
        """The parameters of a published model directory."""
        model = (
            checkpoint.load_reward(Path("models") / name)[0]
            if name == "reward"
            else checkpoint.load(Path("models") / name)[0]
        )
        return {key: value.detach() for key, value in model.named_parameters()}

    def states(self, stage: str) -> list[str]:
        """Names of the resumable states that the stage has left."""
        return sorted(path.name for path in self.folder.glob(f".work/{stage}/*/step-*"))

    def numbers(self, stage: str) -> dict[str, Any]:
        """metrics/<stage>.json."""
        return json.loads((self.folder / f"metrics/{stage}.json").read_text())

    def curve(self, stage: str) -> list[dict[str, str]]:
        """The rows of metrics/<stage>.csv."""
        with (self.folder / f"metrics/{stage}.csv").open(encoding="utf-8") as file:
            return list(csv.DictReader(file))

    def published(self) -> dict[str, str]:
        """Every file under models/ and metrics/, with its hash."""
        files = (path for top in ("models", "metrics") for path in (self.folder / top).rglob("*") if path.is_file())
        return {str(path.relative_to(self.folder)): workdir.sha256(path) for path in files}


def command(stage: str, argv: list[str]) -> Ended:
    """`python -m stages.<stage> <argv>` in this process and in the working directory."""
    before, stderr, handlers = sys.argv, sys.stderr, {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)}
    with Path("stderr").open("w+", encoding="utf-8") as said:
        sys.argv, sys.stderr = [stage, *argv], said
        loaded = sys.modules.pop(f"stages.{stage}", None)  # another test imported it; runpy warns about loaded modules
        try:
            runpy.run_module(f"stages.{stage}", run_name="__main__", alter_sys=True)
            raise AssertionError("a command ends in SystemExit")
        except SystemExit as done:
            said.seek(0)
            return Ended(int(done.code or 0), said.read())
        finally:
            sys.argv, sys.stderr = before, stderr
            if loaded is not None:
                sys.modules[f"stages.{stage}"] = loaded
            for number, handler in handlers.items():
                signal.signal(number, handler)


def arguments(stage: str, changes: dict[str, Any]) -> list[str]:
    """The command line."""
    values = SETTINGS[stage] | {"runtime.precision": "fp32"} | changes
    return [
        f"{key if '.' in key and not key.startswith('adapter.') else f'{stage}.{key}'}={json.dumps(value)}"
        for key, value in values.items()
    ]


def make(folder: Path, tokenizer: Tokenizer, model: Transformer) -> Workspace:
    """Write everything. `model` is the policy; the reward model has its shape but other weights."""
    for name in ("conf", "stages", "pipeline"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "params.yaml").write_text("seed: 1\ndata_seed: 1\nmodel: nano\nscale: smoke\ndata: machine\n")
    ready_to_end(model, tokenizer)
    for name in ("code", "tools"):
        checkpoint.save(folder / "models" / name, model, tokenizer, {})
    checkpoint.save(folder / "models/teacher", other(model), tokenizer, {})
    save_reward(folder / "models/reward", model.config, tokenizer)
    for split, first, count in (("train", 0, 20), ("val", 100, 4), ("test", 200, 6)):
        made = [pair(number) for number in range(first, first + count)]
        records.write(folder / f"data/preferences/{split}.jsonl", made)
        records.write(folder / f"data/labels/{split}.jsonl", records.unpaired(made))
        records.write(folder / f"data/dialogues/{split}.jsonl", map(dialogue, range(first, first + count)))
    (folder / "data/tokens").mkdir()
    for corpus in ("text", "code"):
        (folder / "data/none" / corpus).mkdir(parents=True)  # what is rehearsed
    for split, known in drills.facts(12, 1).items():
        records.write(folder / f"data/facts/{split}.jsonl", known)
    for split, first, count in (("rl", 0, 8), ("val", 100, 3)):
        records.write(folder / f"data/problems/{split}.jsonl", map(problem, range(first, first + count)))
    write_taught(folder, tokenizer)
    return Workspace(folder, tokenizer)


def other(model: Transformer) -> Transformer:
    """A model of the same shape that gives other probabilities."""
    moved, generator = copy.deepcopy(model), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in moved.parameters():
            parameter.add_(0.3 * parameter.std() * torch.randn(parameter.shape, generator=generator))
    return moved


def write_taught(folder: Path, tokenizer: Tokenizer) -> None:
    """Two answers of models/teacher to each training problem, with its four most likely tokens at each position."""
    teacher, _ = checkpoint.load(folder / "models/teacher")
    prompts = answers.problem_prompts(list(map(problem, range(8))), tokenizer, 60)
    fp32 = device.hardware("fp32")
    knobs: dict[str, Any] = {"temperature": 1.0, "hardware": fp32}
    given = teaching.said_by(teacher, tokenizer, prompts, samples=2, max_new_tokens=24, seed=1, **knobs)
    top = teaching.most_likely(teacher, given, pad=tokenizer.pad, k=4, **knobs)
    digest = checkpoint.weights_digest(teacher)
    teaching.write(folder / "data/taught", given, top, tokenizer=tokenizer, temperature=1.0, teacher=digest)


def write_code(folder: Path, tokenizer: Tokenizer) -> None:
    """Write tokens of code."""
    code = [f"def f{n}(x):\n    return x + {n}\n" * 3 for n in range(60)]
    write_corpus(folder / "corpus", code[8:], code[:8], tokenizer)
    (folder / "corpus/tokens").rename(folder / "data/tokens/code")


def ready_to_end(model: Transformer, tokenizer: Tokenizer) -> None:
    """Let some of the answers end: the turn end's embedding points along the mean of the hidden states."""
    with torch.no_grad():
        mean = model.hidden(torch.arange(20, 220)[None]).mean((0, 1))
        model.model.embed_tokens.weight[tokenizer.turn_end] = 4.0 * mean / mean.norm()


def save_reward(folder: Path, shape: ModelConfig, tokenizer: Tokenizer) -> None:
    """A reward model with a random head."""
    reward = RewardModel(Transformer(shape, torch.Generator().manual_seed(1)))
    with torch.no_grad():
        reward.score.weight.normal_(generator=torch.Generator().manual_seed(2))
    reward.reward_mean, reward.reward_std = 0.1, 0.5
    checkpoint.save_reward(folder, reward, tokenizer, {})


def said(role: str, text: str) -> dict[str, Any]:
    """A message."""
    return {"role": role, "content": text}


def pair(number: int, **changes: Any) -> Pair:
    """Answers of unequal lengths, the better one within 24 tokens."""
    values: dict[str, Any] = {
        "id": str(number),
        "source": "made",
        "kind": "story",
        "prompt": [said("user", f"Way {number}?")],
        "chosen": [said("assistant", "left " * (1 + number % 3))],
        "rejected": [said("assistant", "right" + "." * (number % 7))],
        "truth": {},
    }
    return Pair(**(values | changes))


def dialogue(number: int) -> Dialogue:
    """One exchange."""
    return Dialogue(
        id=str(number),
        kind="chat",
        category="talk",
        messages=[said("user", f"Way {number}?"), said("assistant", "left " * (1 + number % 5))],
    )


def problem(number: int, **changes: Any) -> Problem:
    """Add a number."""
    tests = [{"args": "[1]", "expected": str(1 + number), "visible": False}]
    values: dict[str, Any] = {
        "id": str(number),
        "level": 1,
        "group": "easy",
        "key": str(number),
        "question": f"Add {number}.",
        "entry_point": "f",
        "signature": "f(x)",
        "tests": tests,
    }
    return Problem(**(values | changes))
