"""Forced tool calls by a trained model: how many are complete and valid within their budget, and the cost per token.

    python benchmarks/constrain.py models/tools data/dialogues/test.jsonl [--requests 500] [--temperature 1.0]

Each request is a user question from the held-out dialogues with its tools and `tool_choice: required`; budgets run from
8 to 256 tokens. Prints how many answers are complete and valid, how many requests are refused (`budget_too_small`) and
how many tokens their budgets lacked, how many tokens the grammar's plan chose instead of the model, and the
microseconds per token for the mask, for `take` and for the model. Goal: every answer is complete and valid, and mask
and `take` together take less than 5% of the model's time per step, at this model size and above.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch

from pipeline.generation.constrain import Grammars, reply
from pipeline.generation.sampling import Decoder, Sampling, choose, uniforms
from pipeline.generation.schemas import SchemaError, mistake
from pipeline.model import checkpoint
from pipeline.text import chat


def questions(path: Path) -> list[tuple[list[dict[str, Any]], list[dict[str, Any]]]]:
    """The messages up to the first answer, and the tools, of each dialogue with tools."""
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    found = []
    for record in records:
        roles = [message["role"] for message in record["messages"]]
        if record.get("tools") and "assistant" in roles:
            found.append((record["messages"][: roles.index("assistant")], record["tools"]))
    return found


def main() -> None:
    """Run the benchmark and print its results."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("model", type=Path)
    parser.add_argument("dialogues", type=Path)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--temperature", type=float, default=1.0)
    arguments = parser.parse_args()
    model, tokenizer = checkpoint.load(arguments.model)
    decoder = Decoder(model.train(False), 1)
    grammars = Grammars(tokenizer, model.config.vocab_size)
    sampling = Sampling(1, arguments.temperature)
    asked = questions(arguments.dialogues)
    if not asked:
        parser.error(f"{arguments.dialogues}: expected dialogues with tools, found none")
    counts = dict.fromkeys(("complete and valid", "wrong", "refused"), 0)
    seconds: dict[str, list[float]] = {"compile": [], "mask": [], "take": [], "model": []}
    tokens = steered = 0
    missing: list[int] = []

    def timed(what: str, since: float) -> float:
        now = time.perf_counter()
        seconds[what].append(now - since)
        return now

    for number in range(arguments.requests):
        messages, tools = asked[number % len(asked)]
        prompt = chat.render(tokenizer, messages, tools, generation_prompt=True).ids
        budget = min(8 + number * 248 // max(1, arguments.requests - 1), model.config.max_context - len(prompt))
        start = time.perf_counter()
        grammar = grammars.tool_calls(tools, choice="required", parallel=number % 2 == 0)
        timed("compile", start)
        try:
            constraint = grammar.constraint(budget)
        except SchemaError:
            counts["refused"] += 1
            missing.append(len(grammar.plan) - budget)
            continue
        decoder.clear(0)
        logits, ids, noise = decoder.feed([0], [prompt]), list[int](), uniforms(number, 0, budget)
        while len(ids) < budget:
            start = time.perf_counter()
            allowed = constraint.allowed(budget - len(ids))
            start = timed("mask", start)
            logits = logits.masked_fill(~allowed, -torch.inf)
            sampled = int(choose(logits, torch.tensor([noise[len(ids)]]), sampling)[0])
            start = time.perf_counter()
            said = constraint.take(sampled, budget - len(ids))
            start = timed("take", start)
            steered += said != sampled
            if said in grammar.closer.ends:
                break
            ids.append(said)
            logits = decoder.feed([0], [[said]])
            timed("model", start)
        tokens += len(ids)
        counts["complete and valid" if constraint.complete and _valid(reply(tokenizer, ids), tools) else "wrong"] += 1
    if not tokens:
        parser.error(f"no question fits into the {model.config.max_context} tokens of {arguments.model}: {counts}")
    sys.stdout.write(f"{counts}; refusals: {min(missing, default=0)} to {max(missing, default=0)} tokens short\n")
    sys.stdout.write(f"{tokens} tokens, {steered} of them chosen by the plan instead of the model\n")
    for what, each in seconds.items():
        microseconds = [1e6 * one for one in each]
        sys.stdout.write(
            f"{what}: median {statistics.median(microseconds):.0f} us, mean {statistics.mean(microseconds):.0f} us, "
            f"longest {max(microseconds) / 1000:.1f} ms\n"
        )


def _valid(found: chat.Reply, tools: list[dict[str, Any]]) -> bool:
    """Whether a turn consists only of calls, each matching its tool's schema."""
    schemas = {tool.get("function", tool)["name"]: tool.get("function", tool).get("parameters", {}) for tool in tools}
    return (
        found.error is None
        and not found.content
        and bool(found.tool_calls)
        and not any(mistake(schemas[call["name"]], json.dumps(call["arguments"])) for call in found.tool_calls)
    )


if __name__ == "__main__":
    main()
