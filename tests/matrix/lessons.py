"""Answers that a small model memorizes before the harnesses test it, so that some of its answers are right, some wrong.

    items of all three harnesses -> lessons (prompt, answer) -> a model with 0.2 million weights that repeats them

An untrained model's answers are all wrong, and two harnesses easily agree on those. The answers learned here are right,
wrong in a way that both detect, or chosen because the two are known to differ. Training takes a core about a minute.

`VARIANTS` modify right calls, most with one fault each; both judges get all variants for entire files of BFCL.
"""

import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from pipeline.model.config import ModelConfig
from pipeline.model.transformer import Transformer
from pipeline.run.types import JsonObject
from pipeline.text import chat
from pipeline.text.tokenizer import Tokenizer

VOCABULARY = 1024
STEPS, BATCH, RATE = 700, 8, 4e-3
LEARNED = 0.02  # nats per token, at the end

Calls = list[JsonObject]  # {"name": str, "arguments": dict}


@dataclass(frozen=True)
class Said:
    """An answer to learn, after a text or after a conversation with tools."""

    prompt: str | list[JsonObject]
    answer: str
    tools: tuple[JsonObject, ...] = ()
    calls: tuple[JsonObject, ...] = ()


def rows(file: Path) -> list[JsonObject]:
    """The objects in a JSON Lines file."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]


# -- answers -----------------------------------------------------------------------------------------------------------


def program(problem: JsonObject, number: int) -> str:
    """The answer to a HumanEval+ problem: of every eight, the last four are wrong or judged differently by the two."""
    name, right = problem["entry_point"], problem["prompt"] + problem["canonical_solution"]
    match number % 8:
        case 4:
            right = right.replace("list(dict.fromkeys(items))", "sorted(set(items))")  # passes base, fails plus
        case 5:
            right = right.replace("/ len(numbers)", "/ len(numbers) + 1e-9")  # within EvalPlus's tolerance
        case 6:  # two blocks: we read neither, EvalPlus reads the longest span that parses
            return f"```python\nprint({name}([3]))\n```\nwith\n```python\n{right}```"
        case 7:
            right = right.replace("[0]", "[-1]")
    return f"```python\n{right}```"


def settled(value: object) -> Any:
    """A concrete value for a BFCL reference value, in which an object lists accepted values for each key."""
    if isinstance(value, dict):
        chosen = {key: [entry for entry in accepted if entry != ""] for key, accepted in value.items()}
        return {key: entries[0] for key, entries in chosen.items() if entries}
    return [settled(entry) for entry in value] if isinstance(value, list) else value


def first(accepted: list[Any], number: int = 0) -> Any:
    """The accepted value at index `number`; "" if the parameter can only be omitted."""
    values = [value for value in accepted if value != ""]
    return settled(values[number]) if values else ""


def truth(expected: Sequence[JsonObject], number: int = 0) -> Calls:
    """Right calls: each parameter has its accepted value at index `number`."""
    calls: Calls = []
    for call in expected:
        ((name, parameters),) = call.items()
        chosen = {key: first(accepted, number) for key, accepted in parameters.items()}
        calls.append({"name": name, "arguments": {key: value for key, value in chosen.items() if value != ""}})
    return calls


def _each(change: Callable[[Any], Any]) -> Callable[[Sequence[JsonObject]], Calls]:
    """A variant that changes every value of the right calls, including values in lists and objects."""

    def walk(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: walk(entry) for key, entry in value.items()}
        return [walk(entry) for entry in value] if isinstance(value, list) else change(value)

    return lambda expected: [call | {"arguments": walk(call["arguments"])} for call in truth(expected)]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _without_first(expected: Sequence[JsonObject]) -> Calls:
    calls = copy.deepcopy(truth(expected))
    for call in calls[:1]:
        for key in list(call["arguments"])[:1]:
            del call["arguments"][key]
    return calls


def _required_alone(expected: Sequence[JsonObject]) -> Calls:
    needed = [
        {name: {k: v for k, v in given.items() if "" not in v}} for call in expected for name, given in call.items()
    ]
    return truth(needed)


VARIANTS: dict[str, Callable[[Sequence[JsonObject]], Calls]] = {
    "truth": truth,
    "last-values": lambda expected: truth(expected, -1),
    "required-alone": _required_alone,
    "one-missing": _without_first,
    "one-more": lambda expected: [call | {"arguments": call["arguments"] | {"z": 1}} for call in truth(expected)],
    "other-texts": _each(lambda value: value + "x" if isinstance(value, str) else value),
    "loud-texts": _each(lambda value: f" {value.upper()}. " if isinstance(value, str) else value),
    "other-numbers": _each(lambda value: value + 1 if _is_number(value) else value),
    "whole-numbers": _each(lambda value: int(value) if _is_number(value) and value == int(value) else value),
    "fractions": _each(lambda value: float(value) if _is_number(value) else value),
    "numbers-as-texts": _each(lambda value: str(value) if _is_number(value) else value),
    "nothing": _each(lambda _: None),
    "backwards": lambda expected: truth(expected)[::-1],
    "twice": lambda expected: truth(expected)[:1] * 2 + truth(expected)[1:],
    "one-name": lambda expected: [call | {"name": f"{call['name']}_2"} for call in truth(expected)],
    "no-call": lambda _: [],
}


# -- learning ----------------------------------------------------------------------------------------------------------


def encoded(tokenizer: Tokenizer, lesson: Said) -> tuple[list[int], list[bool]]:
    """Token ids, and which of them are trained on."""
    if isinstance(lesson.prompt, str):
        ids = [*tokenizer.encode(lesson.prompt + lesson.answer), tokenizer.end_of_text]
        start = len(tokenizer.encode(lesson.prompt))
        return ids, [index >= start for index in range(len(ids))]
    calls = [{"type": "function", "function": call} for call in lesson.calls]
    answer = {"role": "assistant", "content": lesson.answer, "tool_calls": calls}
    rendered = chat.render(tokenizer, [*lesson.prompt, answer], list(lesson.tools))
    return rendered.ids, rendered.trained


def tokenizer_of(lessons: Sequence[Said]) -> Tokenizer:
    """A tokenizer trained on the lessons."""
    return Tokenizer.train(
        (f"{lesson.prompt}{lesson.answer}{lesson.tools}{lesson.calls}" for lesson in lessons), VOCABULARY
    )


def learn(tokenizer: Tokenizer, lessons: Sequence[Said]) -> Transformer:
    """A model that repeats the lessons. Raises AssertionError if it has not learned them."""
    config = ModelConfig(
        vocab_size=tokenizer.vocab_size,
        width=64,
        layers=2,
        heads=2,
        kv_heads=1,
        head_dim=32,
        d_ff=128,
        max_context=2048,
        rope_theta=1e4,
        tied=True,
    )
    model = Transformer(config, torch.Generator().manual_seed(0)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=STEPS)
    # sorted by length, so that batches contain little padding
    ready = sorted((encoded(tokenizer, lesson) for lesson in lessons), key=lambda pair: len(pair[0]))
    batches = [_batch(ready[start : start + BATCH], tokenizer.pad) for start in range(0, len(ready), BATCH)]
    loss = torch.tensor(float("inf"))
    recent: list[float] = []
    for step in range(STEPS):
        ids, select = batches[step % len(batches)]
        logits = model(ids[:, :-1], select=select[:, 1:])  # (n, V)
        loss = functional.cross_entropy(logits, ids[:, 1:][select[:, 1:]])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        recent = [*recent, loss.item()][-len(batches) :]
    assert max(recent) < LEARNED, f"the lessons are not learned: {max(recent):.3f} nats per token"
    return model.train(False)


def _batch(pairs: Sequence[tuple[list[int], list[bool]]], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and which are trained on, (B, T) each, right-padded; no trained token attends to the padding."""
    width = max(len(ids) for ids, _ in pairs)
    ids = torch.tensor([ids + [pad] * (width - len(ids)) for ids, _ in pairs])
    select = torch.tensor([trained + [False] * (width - len(trained)) for _, trained in pairs])
    return ids, select
