"""Constrained output: tool calls and JSON that are complete and valid whatever the weights, within their budget of
tokens.

    grammars = Grammars(tokenizer, rows)                      one for a model; threads may share it
    grammar = grammars.tool_calls(tools, choice="required")   or json_schema(schema), json_object(): compiled, and kept
    constraint = grammar.constraint(budget)           a request's own state; SchemaError where the shortest does not fit
    constraint.allowed(remaining) -> mask; constraint.take(sampled, remaining) -> the token to say

llguidance says which tokens the grammar allows (`grammars.py`). Against an answer that runs out of budget stands the
closing plan (`closing.py`): tokens that end the output from here. A sampled token is said if a plan behind it still
fits what remains; if none does, the plan's next token is said instead. So the invariant holds at every token: the rest
of the plan fits the rest of the budget.

Where the grammar gives out on the way (llguidance's limits on hostile patterns), the plan is said to its end. Not
promised: that a number is small enough for a float; that names which the schema does not list are said once.

Greedy decoding of many prompts, each under a grammar of its own: what tool calls are worth when their form cannot be
wrong.

    prompts + grammars -> a Completion each

The server holds its answers to grammars in the same way, in its engine; here all rows go step by step together.
Log-probabilities are not kept: a constrained choice has none that means anything.
"""

import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from llguidance import LLMatcher
from torch import Tensor

from pipeline.generation import grammars as generation_grammars
from pipeline.generation.grammars import Closer, Compiler, Place, Written, bits
from pipeline.generation.sampling import Completion, Decoder
from pipeline.generation.schemas import SchemaError
from pipeline.model.transformer import Transformer
from pipeline.text import chat
from pipeline.text.tokenizer import Tokenizer

CACHE_BYTES = 64 * 1024 * 1024
GRAMMAR_BYTES = 48 * 1024  # what a compiled grammar takes beside its text, and
TEXT_FACTOR = 48  # how much it takes for a byte of that; both measured, generously


@dataclass(frozen=True)
class _Masks:
    """What may stand in free text, (V,) bool each."""

    text: Tensor  # no control token but the ends of a turn
    opening: Tensor  # and the opening tag of a call


@dataclass(frozen=True)
class Grammar:
    """A compiled grammar; each request takes a `constraint` from it."""

    matcher: LLMatcher  # at its beginning; only ever copied
    plan: tuple[int, ...]  # the shortest output
    closer: Closer
    masks: _Masks
    free: bool = False  # free text may stand before it, or instead of it

    def constraint(self, budget: int) -> "Constraint":
        """The state of a request that may say `budget` tokens. Raises SchemaError, its code `budget_too_small`."""
        if not self.free and len(self.plan) > budget:
            raise SchemaError(
                "budget_too_small",
                f"the shortest output takes {len(self.plan)} tokens, the budget is {budget}; raise it",
            )
        return Constraint(self)


class Constraint:
    """What one request may say next. Not for two threads at a time."""

    def __init__(self, grammar: Grammar) -> None:
        self._matcher = grammar.matcher.deep_copy()
        self._closer, self._masks = grammar.closer, grammar.masks
        self._free = grammar.free
        self._plan = list(grammar.plan)
        self._place = Place()

    @property
    def complete(self) -> bool:
        """Whether what was said may stand as the whole answer."""
        return self._free or not self._plan

    def allowed(self, remaining: int) -> Tensor:
        """(V,) bool, True for what may be said now, the ends of a turn where nothing is open. Never empty.

        `remaining` counts the tokens that may still be said, this one with them.
        """
        if self._free:
            return self._masks.opening if remaining >= len(self._plan) else self._masks.text
        found = bits(self._matcher.compute_bitmask())
        mask = np.zeros(len(self._masks.text), dtype=np.bool_)
        if self._matcher.is_error():  # it gave out: from here on the plan alone is said
            mask[self._plan[:1] or self._closer.ends] = True
        else:
            num = min(len(mask), len(found))
            mask[:num] = found[:num]
        return torch.from_numpy(mask)

    def take(self, token: int, remaining: int) -> int:
        """Count a sampled token in; returns the token to say: the same, or the plan's next one where its own end
        would not fit.
        """
        if self._free:
            if token == self._plan[0]:
                self._free = False
                self._say(token, self._plan[1:])
            return token
        if not self._plan and token in self._closer.ends:
            return token
        plan = self._closer.follow(self._matcher, self._place, self._plan, token, remaining)
        if plan is not None and len(plan) < remaining:
            return self._say(token, plan)
        if not self._plan:
            return int(self._closer.ends[0])
        return self._say(self._plan[0], self._plan[1:])

    def _say(self, token: int, plan: list[int]) -> int:
        self._matcher.consume_token(token)
        self._plan = plan
        self._place = self._place.after(self._closer.step(token))
        return token


class Grammars:
    """Compiles grammars for one tokenizer and keeps the most recently used of them, up to CACHE_BYTES."""

    def __init__(self, tokenizer: Tokenizer, rows: int, cache_bytes: int = CACHE_BYTES) -> None:
        """`rows` of the model's embedding: the length of a mask, at least the tokenizer's ids."""
        self.tokenizer = tokenizer
        self._compiler = Compiler(tokenizer)
        text = torch.zeros(rows, dtype=torch.bool)
        spelled = [id_ for id_, piece in enumerate(tokenizer.token_bytes) if piece]
        text[spelled] = True
        text[sorted(tokenizer.control_ids.values())] = False
        text[[tokenizer.turn_end, tokenizer.end_of_text]] = True
        opening = text.clone()
        opening[tokenizer.tool_call] = True
        self._masks = _Masks(text, opening)
        self._kept: OrderedDict[str, tuple[LLMatcher, tuple[int, ...]]] = OrderedDict()
        self._cache_bytes = cache_bytes
        self._lock = threading.Lock()

    def tool_calls(self, tools: Sequence[dict[str, Any]], *, choice: str = "auto", parallel: bool = True) -> Grammar:
        """Calls of the tools, in the form in which `text/chat.py` renders them.

        `choice`: "auto" lets free text stand before the calls or instead of them, "required" demands a call, a tool's
        name a call of that tool. `parallel` lets more calls follow. Raises SchemaError.
        """
        return self.take(generation_grammars.tool_calls(self.tokenizer, tools, choice=choice, parallel=parallel))

    def json_schema(self, schema: dict[str, Any]) -> Grammar:
        """An instance of the schema and nothing else. Raises SchemaError."""
        return self.take(generation_grammars.json_schema(schema))

    def json_object(self) -> Grammar:
        """Any JSON object and nothing else."""
        return self.json_schema(generation_grammars.ANY_OBJECT)

    def take(self, written: Written, plan: tuple[int, ...] | None = None) -> Grammar:
        """Compile a grammar, or find the one that was kept. `plan`: its shortest output, where that is known. Raises
        SchemaError.
        """
        text = written.text
        with self._lock:
            if known := self._kept.get(text):
                self._kept.move_to_end(text)
        if known is None:
            known = self._compile(text, plan)
            with self._lock:
                self._kept[text] = known
                while len(self._kept) > 1 and sum(map(_weight, self._kept)) > self._cache_bytes:
                    self._kept.popitem(last=False)
        return Grammar(*known, self._compiler.closer, self._masks, written.free)

    def _compile(self, text: str, plan: tuple[int, ...] | None = None) -> tuple[LLMatcher, tuple[int, ...]]:
        """A matcher at its beginning, and its shortest plan. Raises SchemaError."""
        matcher = self._compiler.matcher(text)
        return matcher, self._compiler.shortest(matcher) if plan is None else plan


def _weight(text: str) -> int:
    """About the bytes that a compiled grammar takes."""
    return GRAMMAR_BYTES + TEXT_FACTOR * len(text)


def reply(tokenizer: Tokenizer, ids: Sequence[int]) -> chat.Reply:
    """A turn taken apart by its control tokens, so that text which spells a tag stays text (`chat.parse` reads the
    tags).
    """
    content: list[int] = []
    calls: list[dict[str, Any]] = []
    error: str | None = None
    rest = list(ids)
    while tokenizer.tool_call in rest:
        start = rest.index(tokenizer.tool_call)
        end = rest.index(tokenizer.tool_call_end, start) if tokenizer.tool_call_end in rest[start:] else len(rest)
        content += rest[:start]
        found = chat.parse(tokenizer.decode(rest[start : end + 1]))
        calls += found.tool_calls
        error = error or found.error
        rest = rest[end + 1 :]
    return chat.Reply(tokenizer.decode(content + rest).strip(), calls, error)


# -- guided ------------------------------------------------------------------------------------------------------------


def guided(
    model: Transformer,
    prompts: Sequence[list[int]],
    grammars: Sequence[Grammar],
    *,
    max_new_tokens: int,
    stop: Collection[int],
    batch_rows: int = 32,
) -> list[Completion]:
    """The most likely token that the grammar allows, until one of `stop`, `max_new_tokens` or the end of the context.

    Raises ValueError for an empty prompt or one that fills the context, SchemaError where a grammar's shortest output
    does not fit.
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
