"""Greedy decoding of many prompts, each under a grammar of its own: what tool calls are worth when their form cannot be wrong.

    prompts + grammars -> a Completion each

The server holds its answers to grammars in the same way, in its engine; here all rows go step by step together. Log-probabilities are not
kept: a constrained choice has none that means anything.
"""

from collections.abc import Collection, Sequence
from typing import Literal

import torch

from pipeline.generation.constrain import Constraint, Grammar
from pipeline.generation.sampling import Completion, Decoder
from pipeline.model.transformer import Transformer


def guided(
    model: Transformer, prompts: Sequence[list[int]], grammars: Sequence[Grammar], *, max_new_tokens: int, stop: Collection[int],
    batch_rows: int = 32,
) -> list[Completion]:  # fmt: skip
    """The most likely token that the grammar allows, until one of `stop`, `max_new_tokens` or the end of the context.

    Raises ValueError for an empty prompt or one that fills the context, SchemaError where a grammar's shortest output does not fit.
    """
    if len(prompts) != len(grammars):
        raise ValueError(f"expected a grammar for each of the {len(prompts)} prompts, found {len(grammars)}")
    was_training = model.training
    model.train(False)
    try:
        found: list[Completion] = []
        for first in range(0, len(prompts), batch_rows):
            part = slice(first, first + batch_rows)
            found += _together(model, prompts[part], grammars[part], max_new_tokens, frozenset(stop))
        return found
    finally:
        model.train(was_training)


def _together(
    model: Transformer, prompts: Sequence[list[int]], grammars: Sequence[Grammar], most: int, stop: frozenset[int]
) -> list[Completion]:
    budgets = [min(most, model.config.max_context - len(prompt)) for prompt in prompts]
    states = [grammar.constraint(budget) for grammar, budget in zip(grammars, budgets, strict=True)]
    said: list[list[int]] = [[] for _ in prompts]
    ended: list[Literal["stop", "length"]] = ["length"] * len(prompts)
    decoder = Decoder(model, len(prompts))
    live = list(range(len(prompts)))
    logits = decoder.feed(live, prompts)
    while live:
        tokens = _allowed(logits, [states[row] for row in live], [budgets[row] - len(said[row]) for row in live])
        going = []
        for row, sampled in zip(live, tokens, strict=True):
            token = states[row].take(sampled, budgets[row] - len(said[row]))
            if token in stop:
                ended[row] = "stop"
                continue
            said[row].append(token)
            if len(said[row]) < budgets[row]:
                going.append(row)
        live = going
        if live:
            logits = decoder.feed(live, [said[row][-1:] for row in live])
    return [Completion(ids, [], how) for ids, how in zip(said, ended, strict=True)]


def _allowed(logits: torch.Tensor, states: Sequence[Constraint], remaining: Sequence[int]) -> list[int]:
    """The most likely allowed token of each row."""
    masks = torch.stack([state.allowed(left) for state, left in zip(states, remaining, strict=True)])
    return logits.masked_fill(~masks.to(logits.device), float("-inf")).argmax(-1).tolist()
