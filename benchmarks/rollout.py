"""Rollout speed vs. `transformers.generate` as called by TRL's GRPOTrainer: same weights, prompts, lengths, sampling.

    python benchmarks/rollout.py models/tools data/problems/rl.jsonl [--prompts 64] [--samples 8] [--tokens 128]
    [--repeats 5]

Interleaved on one machine, in float32 and without stop tokens, so both generate prompts * samples * tokens tokens. TRL
repeats each prompt `samples` times, pads on the left and samples the entire batch at once (trl 1.12.0,
`GRPOTrainer._generate_single_turn`). Our engine prefills each prompt once per group and also returns the
log-probabilities; TRL would need another forward pass for them. Peak memory is measured in fresh processes, one per
side. Goal: three times TRL's tokens per second.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch

from pipeline.generation.sampling import Sampling, generate
from pipeline.ingest.records import Problem, read
from pipeline.model import checkpoint
from pipeline.run import device
from pipeline.text import chat


def prompts_of(arguments: argparse.Namespace) -> tuple[list[list[int]], int]:
    """Rendered prompts and the pad id."""
    _, tokenizer = checkpoint.load(arguments.model)
    asked = list(read(arguments.problems, Problem))[: arguments.prompts]
    found = [
        chat.render(tokenizer, [{"role": "user", "content": problem.question}], generation_prompt=True).ids
        for problem in asked
    ]
    return found, tokenizer.pad


def ours(arguments: argparse.Namespace, prompts: list[list[int]]) -> Callable[[], int]:
    """A function that makes one rollout with our engine and returns the number of tokens generated."""
    model, _ = checkpoint.load(arguments.model)
    model.train(False)
    sampling = Sampling(arguments.tokens, temperature=1.0)
    repeated = [prompt for prompt in prompts for _ in range(arguments.samples)]

    def once() -> int:
        done = generate(model, repeated, sampling, stop=(), seeds=list(range(len(repeated))), batch_rows=len(repeated))
        return sum(len(one.ids) for one in done)

    return once


def theirs(arguments: argparse.Namespace, prompts: list[list[int]], pad: int) -> Callable[[], int]:
    """A function that runs `transformers.generate` once over the entire padded batch."""
    from transformers import AutoModelForCausalLM, GenerationConfig

    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).eval()
    repeated = [prompt for prompt in prompts for _ in range(arguments.samples)]
    longest = max(map(len, repeated))
    ids = torch.tensor([[pad] * (longest - len(prompt)) + prompt for prompt in repeated])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in repeated])
    config = GenerationConfig(
        max_new_tokens=arguments.tokens,
        min_new_tokens=arguments.tokens,
        do_sample=True,
        pad_token_id=pad,
        eos_token_id=None,
        temperature=1.0,
        top_p=1.0,
        top_k=None,
        cache_implementation=None,
    )

    @torch.no_grad()
    def once() -> int:
        made = model.generate(input_ids=ids, attention_mask=mask, generation_config=config, disable_compile=True)
        return int((made.shape[1] - longest) * made.shape[0])

    return once


def main() -> None:
    """Print tokens per second of both sides, their ratio, and peak memory."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("problems", type=Path)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", choices=["ours", "theirs"], help="run one rollout of one side, print peak memory")
    arguments = parser.parse_args()
    device.keep_freed_memory()
    prompts, pad = prompts_of(arguments)
    make = {"ours": lambda: ours(arguments, prompts), "theirs": lambda: theirs(arguments, prompts, pad)}
    if arguments.only:
        make[arguments.only]()()
        sys.stdout.write(f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f}\n")
        return
    sides = {name: build() for name, build in make.items()}
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(arguments.repeats):
        for name, once in sides.items():
            start = time.perf_counter()
            tokens = once()
            rates[name].append(tokens / (time.perf_counter() - start))
    memory = {
        name: int(
            subprocess.run(
                [sys.executable, __file__, *sys.argv[1:], "--only", name], check=True, text=True, capture_output=True
            ).stdout.split()[-1]
        )
        for name in sides
    }
    ratios = [a / b for a, b in zip(rates["ours"], rates["theirs"], strict=True)]
    sys.stdout.write(
        json.dumps(
            {
                "prompts": len(prompts),
                "samples": arguments.samples,
                "tokens": arguments.tokens,
                "threads": torch.get_num_threads(),
                "tokens_per_second": {name: round(statistics.median(values)) for name, values in rates.items()},
                "ratio": round(statistics.median(ratios), 2),
                "ratios": [round(r, 2) for r in ratios],
                "peak_mib": memory,
            }
        )
        + "\n"
    )


if __name__ == "__main__":
    main()
