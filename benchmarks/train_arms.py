"""One side of `train_speed.py`, as a process: trains, counting each step as it begins.

    python benchmarks/train_arms.py ours '{"size": {...}, "rows": 8, "context": 256, ...}'

Prints `ready` after the warm-up. Each input line is a number of steps to train; the reply gives their wall seconds, the
CPU seconds of all threads and the peak GPU memory (0 without a GPU). An empty line ends the process. Every side sees
the same rows, each a document of random tokens that depend only on the step. All sides use torch's fused AdamW,
gradients clipped to norm 1 and a constant rate, without saving or evaluating in the measured time. `litgpt` runs in a
separate environment, so this file has no top-level imports from this project.
"""

import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

RATE, BETAS, DECAY = 1e-3, (0.9, 0.95), 0.1


class Metronome:
    """Counts steps as they begin; after the requested number, reports their time and waits for the next request."""

    def __init__(self, warmup: int) -> None:
        self.left, self.ready = warmup, False
        self.began, self.worked = 0.0, 0.0

    def tick(self) -> None:
        """Count a step as it begins. Ends the process if no more steps are requested."""
        if self.left:
            self.left -= 1
            return
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
        seconds, worked = time.perf_counter() - self.began, time.process_time() - self.worked
        say({"seconds": seconds, "cpu_seconds": worked, "gpu": peak} if self.ready else {"ready": True})
        asked = sys.stdin.readline().strip()
        if not asked:
            os._exit(0)
        self.ready, self.left = True, int(asked) - 1
        self.began, self.worked = time.perf_counter(), time.process_time()


def say(what: dict[str, Any]) -> None:
    """Send a line of JSON to the caller."""
    os.write(3 if "TRAIN_ARMS_FD" in os.environ else 1, (json.dumps(what) + "\n").encode())


def tokens_of(step: int, spec: dict[str, Any]) -> Tensor:
    """The rows of a step, each with its next token, (B, T + 1)."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, spec["size"]["vocab_size"], (spec["rows"], spec["context"] + 1), generator=generator)


def shifted(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs and targets, (B, T) each."""
    return rows.narrow(1, 0, rows.shape[1] - 1).contiguous(), rows.narrow(1, 1, rows.shape[1] - 1).contiguous()


def device_of() -> torch.device:
    """The device on which all sides train."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def autocast(spec: dict[str, Any]) -> contextlib.AbstractContextManager[Any]:
    """Autocast to bf16, or none."""
    return torch.autocast(device_of().type, torch.bfloat16, enabled=spec["precision"] == "bf16")


def adamw(model: Any) -> torch.optim.Optimizer:
    """The optimizer of all sides."""
    return torch.optim.AdamW(model.parameters(), lr=RATE, betas=BETAS, weight_decay=DECAY, fused=True)


# ours


def our_model(spec: dict[str, Any]) -> Any:
    """Our transformer with fresh weights."""
    from pipeline.model.config import ModelConfig
    from pipeline.model.transformer import Transformer

    config = ModelConfig(**spec["size"], max_context=max(spec["context"], 256), rope_theta=1e4, tied=True)
    return Transformer(config, torch.Generator().manual_seed(0))


def ours(spec: dict[str, Any], metronome: Metronome, *, compiled: bool) -> None:
    """`fit` as called by stage language; on a CPU in bf16, only the pieces between matrix products are compiled."""
    from pipeline.learning import losses
    from pipeline.learning.fit import Watchers, fit
    from pipeline.learning.losses import Loss, Term
    from pipeline.learning.settings import FitConfig
    from pipeline.run.config import Runtime
    from pipeline.run.tracking import Tracker
    from pipeline.run.workdir import Job, StopRequest

    folder = Path(tempfile.mkdtemp())
    config = FitConfig(
        steps=10**6,
        tokens_per_step=spec["rows"] * spec["context"],
        context=spec["context"],
        learning_rate=RATE,
        betas=BETAS,
        weight_decay=DECAY,
        schedule="constant",
        eval_steps=10**6,
    )
    given = {"precision": spec["precision"], "micro_batch": spec["rows"], "compile": compiled} | spec.get("runtime", {})
    runtime = Runtime(save_steps=10**6, save_minutes=1e6, **given)
    job = Job(
        stage="speed",
        item=None,
        key="k",
        seed=1,
        folder=folder,
        workers=1,
        runtime=runtime,
        tracker=Tracker("speed", folder, {}, {}, quiet=True),
        lineage={},
        stop=StopRequest(),
    )

    def loss(model: Any, batch: Any) -> Loss:
        return Loss([Term("loss", losses.read_out(model, batch, losses.next_token))])

    fit(our_model(spec), full_rows(spec, metronome), loss, config, job, from_scratch=True, watchers=Watchers())


def full_rows(spec: dict[str, Any], metronome: Metronome) -> Any:
    """The rows of `tokens_of` as a stream laid out like a corpus: pieces, shift, segments, positions."""
    import numpy as np

    from pipeline.batches.batch import Piece, TokenBatch, token_batch

    class FullRows:
        fingerprint, tokens_per_epoch = "full", 2**40
        lengths = np.ones(spec["size"]["vocab_size"], dtype=np.int64)

        def rows(self, step: int, context: int) -> Any:
            if step:  # the checks before the first step draw the first batch once more
                metronome.tick()
            return np.arange(spec["rows"])

        def batch(self, step: int, context: int, rows: Any) -> TokenBatch:
            ids = tokens_of(step, spec).numpy()
            return token_batch(
                [[Piece(ids[row], True)] for row in rows],
                np.arange(len(rows)),
                packed=context,
                context=context,
                pad=0,
                byte_lengths=self.lengths,
            )

        def evaluation(self, tokens: int) -> Iterator[TokenBatch]:
            return iter(())

    return FullRows()


# theirs


def hf_model(spec: dict[str, Any]) -> Any:
    """transformers' Qwen3 with the same shape."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from pipeline.model.config import ModelConfig

    config = ModelConfig(**spec["size"], max_context=max(spec["context"], 256), rope_theta=1e4, tied=True)
    return Qwen3ForCausalLM(Qwen3Config(**config.to_hf()))


def trainer(spec: dict[str, Any], metronome: Metronome, *, compiled: bool) -> None:
    """Hugging Face's Trainer: bf16, fused AdamW, no workers (a batch costs microseconds), with or without
    torch_compile.
    """
    from torch.utils.data import Dataset
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Rows(Dataset[dict[str, Tensor]]):
        def __len__(self) -> int:
            return 2**20 * spec["rows"]

        def __getitem__(self, place: int) -> dict[str, Tensor]:
            step, row = divmod(place, spec["rows"])
            ids = tokens_of(step, spec)[row]
            return {"input_ids": ids[:-1], "labels": ids[:-1]}  # the model shifts the labels

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: object, **__: object) -> None:
            metronome.tick()

    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        max_steps=10**6,
        per_device_train_batch_size=spec["rows"],
        learning_rate=RATE,
        lr_scheduler_type="constant",
        weight_decay=DECAY,
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        max_grad_norm=1.0,
        optim="adamw_torch_fused",
        bf16=spec["precision"] == "bf16",
        use_cpu=device_of().type == "cpu",
        torch_compile=compiled,
        report_to=[],
        save_strategy="no",
        logging_steps=10,
        disable_tqdm=True,
        dataloader_num_workers=0,
        dataloader_pin_memory=device_of().type == "cuda",
    )

    class InOrder(Trainer):
        def _get_train_sampler(self, *_: object, **__: object) -> Any:
            return torch.utils.data.SequentialSampler(Rows())

    InOrder(hf_model(spec), args=arguments, train_dataset=Rows(), callbacks=[Clock()]).train()


def bare(spec: dict[str, Any], metronome: Metronome, *, which: str) -> None:
    """The shortest possible loop that trains a compiled model."""
    where = device_of()
    model = (hf_model if which == "hf" else our_model)(spec).to(where).train()
    run = torch.compile(model)
    optimizer = adamw(model)
    for step in range(10**6):
        metronome.tick()
        inputs, targets = (x.to(where) for x in shifted(tokens_of(step, spec)))
        with autocast(spec):
            out = run(inputs)
            logits = (out.logits if which == "hf" else out).flatten(0, 1).float()
            loss = torch.nn.functional.cross_entropy(logits, targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def litgpt(spec: dict[str, Any], metronome: Metronome) -> None:
    """The steps of litgpt's `pretrain` (0.5.13): a compiled model set up by Fabric, and its chunked cross-entropy."""
    import lightning  # pyright: ignore[reportMissingImports]
    from litgpt.config import Config  # pyright: ignore[reportMissingImports]
    from litgpt.model import GPT  # pyright: ignore[reportMissingImports]
    from litgpt.pretrain import initialize_weights  # pyright: ignore[reportMissingImports]
    from litgpt.utils import chunked_cross_entropy  # pyright: ignore[reportMissingImports]

    size = spec["size"]
    config = Config(
        name="qwen3",
        block_size=max(spec["context"], 256),
        vocab_size=size["vocab_size"],
        padded_vocab_size=size["vocab_size"],
        n_layer=size["layers"],
        n_head=size["heads"],
        n_embd=size["width"],
        n_query_groups=size["kv_heads"],
        rotary_percentage=1.0,
        parallel_residual=False,
        bias=False,
        norm_class_name="RMSNorm",
        mlp_class_name="LLaMAMLP",
        intermediate_size=size["d_ff"],
        norm_eps=1e-6,
        rope_base=10000,
        head_size=size["head_dim"],
        norm_qk=True,
    )
    fabric = lightning.Fabric(devices=1, precision="bf16-mixed" if spec["precision"] == "bf16" else "32-true")
    fabric.launch()
    with fabric.init_module(empty_init=True):
        model = GPT(config)
    initialize_weights(fabric, model, n_layer=config.n_layer, n_embd=config.n_embd)
    model.transformer.wte.weight = model.lm_head.weight
    model.max_seq_length = spec["context"]
    model = fabric.setup(torch.compile(model))
    optimizer = fabric.setup_optimizers(adamw(model))
    for step in range(10**6):
        metronome.tick()
        inputs, targets = (x.to(fabric.device) for x in shifted(tokens_of(step, spec)))
        loss = chunked_cross_entropy(model(inputs), targets)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()


ARMS = {
    "ours": lambda spec, metronome: ours(spec, metronome, compiled=False),
    "ours compiled": lambda spec, metronome: ours(spec, metronome, compiled=True),
    "trainer": lambda spec, metronome: trainer(spec, metronome, compiled=False),
    "trainer compiled": lambda spec, metronome: trainer(spec, metronome, compiled=True),
    "litgpt": litgpt,
    "bare, transformers": lambda spec, metronome: bare(spec, metronome, which="hf"),
    "bare, our model": lambda spec, metronome: bare(spec, metronome, which="ours"),
}


def main() -> None:
    """Train until no more steps are requested."""
    name, spec = sys.argv[1], json.loads(sys.argv[2])
    torch.set_num_threads(spec["threads"])
    os.dup2(1, 3)  # libraries may print to stdout; the caller reads from descriptor 3
    os.dup2(2, 1)
    os.environ["TRAIN_ARMS_FD"] = "3"
    ARMS[name](spec, Metronome(spec["warmup"]))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    main()
