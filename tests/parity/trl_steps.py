"""Real training steps of trl 1.12.0's trainers, for `test_steps.py`: their inputs, losses and weights.

    python tests/parity/trl_steps.py dpo|grpo FOLDER

FOLDER has `model/` (a Hugging Face directory) and `rows.json`. The script adds `steps.pt`, a list of the inputs to each
call of the trainer's loss and the loss that it returned, and `after.pt`, the weights after the last step. The trainers
run unchanged, with their own samplers, collators and AdamW; only their losses are recorded.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset  # pyright: ignore[reportAttributeAccessIssue]
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

STEPS, RATE = 5, 2e-3
COMMON: dict[str, Any] = {
    "max_steps": STEPS,
    "learning_rate": RATE,
    "lr_scheduler_type": "constant",
    "weight_decay": 0.0,
    "max_grad_norm": 0.5,
    "bf16": False,
    "gradient_checkpointing": False,
    "use_cpu": True,
    "report_to": [],
    "save_strategy": "no",
    "seed": 3,
    "logging_steps": 1,
    "disable_tqdm": True,
    "adam_epsilon": 1e-6,
}
HEARD = ("input_ids", "attention_mask", "completion_mask", "prompt_ids", "prompt_mask", "completion_ids", "advantages")
steps: list[dict[str, Any]] = []


def listening(trainer: type) -> type:
    """The trainer, recording each loss with its inputs."""

    class Listening(trainer):
        def _compute_loss(self, model: Any, inputs: dict[str, Any], *rest: Any, **named: Any) -> Any:
            loss = super()._compute_loss(model, inputs, *rest, **named)
            value = loss[0] if isinstance(loss, tuple) else loss
            steps.append(
                {name: inputs[name].clone() for name in HEARD if name in inputs} | {"loss": float(value.detach())}
            )
            return loss

    return Listening


def reward(completion_ids: list[list[int]], **_: object) -> list[float]:
    """How many of an answer's tokens are even."""
    return [float(sum(token % 2 == 0 for token in ids)) for ids in completion_ids]


def main(method: str, folder: Path) -> None:
    """Train, and write what was recorded."""
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    rows = Dataset.from_list(json.loads((folder / "rows.json").read_text(encoding="utf-8")))
    if method == "dpo":
        config = DPOConfig(folder / "out", per_device_train_batch_size=4, beta=0.3, **COMMON)
        trainer = listening(DPOTrainer)(model, args=config, train_dataset=rows, processing_class=tokenizer)
    else:
        config = GRPOConfig(
            folder / "out",
            per_device_train_batch_size=8,
            num_generations=4,
            max_completion_length=12,
            temperature=0.8,
            beta=0.05,
            num_iterations=2,
            loss_type="grpo",
            epsilon=0.05,
            mask_truncated_completions=False,
            use_bias_correction_kl=False,  # the KL of GRPO's paper (eq. 4); trl's own is DeepSeek-V3.2's
            **COMMON,
        )
        trainer = listening(GRPOTrainer)(
            model, reward_funcs=reward, args=config, train_dataset=rows, processing_class=tokenizer
        )
    trainer.train()
    torch.save(steps, folder / "steps.pt")
    torch.save({name: tensor.detach().clone() for name, tensor in model.state_dict().items()}, folder / "after.pt")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
