"""Constrained decoding: tool calls and JSON that are complete and valid whatever the weights, within a token budget.

    grammars = Grammars(tokenizer, rows)                      one for a model; thread-safe
    grammar = grammars.tool_calls(tools, choice="required")   or json_schema(schema): compiled and cached
    constraint = grammar.constraint(budget)           a request's state; SchemaError if the shortest output does not fit
    constraint.allowed(remaining) -> mask; constraint.take(sampled, remaining) -> the token to emit

llguidance computes the tokens that the grammar allows (`grammars.py`). A closing plan, tokens that complete the output
from the current state, prevents answers that exceed the budget. A sampled token is emitted if a plan after it fits the
remaining budget; otherwise the current plan's next token is emitted instead. So the invariant holds at every token: the
rest of the plan fits the rest of the budget. After an error of the matcher (llguidance's limits on hostile patterns)
the plan is emitted to its end.

    guided(model, prompts, grammars) -> a Completion each

decodes many prompts greedily, each under its own grammar, all rows step by step together, to measure tool calls whose
form cannot be wrong. The server's engine constrains its answers in the same way. There are no log-probabilities: those
of a constrained choice have no meaning.

Not promised: that a number is small enough for a float; that names which the schema does not list occur only once.
"""

import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from llguidance import LLMatcher
from torch import Tensor

from pipeline.generation import grammars as generation_grammars
from pipeline.generation.grammars import Closer, Compiler, LexerState, Written, bits
from pipeline.generation.sampling import Completion, Decoder
from pipeline.generation.schemas import SchemaError
from pipeline.model.transformer import Transformer
from pipeline.run.types import JsonObject
from pipeline.text import chat
from pipeline.text.tokenizer import Tokenizer

CACHE_BYTES = 64 * 1024 * 1024
GRAMMAR_BYTES = 48 * 1024  # memory of a compiled grammar besides its text
TEXT_FACTOR = 48  # bytes for each byte of its text; both are generous measurements


@dataclass(frozen=True)
class _Masks:
    """Allowed tokens of free text, (V,) bool each."""

    text: Tensor  # without control tokens except the ends of a turn
    opening: Tensor  # the same with the opening tag of a call


@dataclass(frozen=True)
class Grammar:
    """A compiled grammar; each request gets a `constraint` from it."""

    matcher: LLMatcher  # in its initial state; only ever copied
    plan: tuple[int, ...]  # the shortest output
    closer: Closer
    masks: _Masks
    free: bool = False  # free text is allowed before it, or instead of it

    def constraint(self, budget: int) -> "Constraint":
        """The state of a request with `budget` tokens. Raises SchemaError, its code `budget_too_small`."""
        if not self.free and len(self.plan) > budget:
            raise SchemaError(
                "budget_too_small",
                f"the shortest output takes {len(self.plan)} tokens, the budget is {budget}; raise it",
            )
        return Constraint(self)


class Constraint:
    """The state of one constrained output. Not thread-safe."""

    def __init__(self, grammar: Grammar) -> None:
        self._matcher = grammar.matcher.deep_copy()
        self._closer, self._masks = grammar.closer, grammar.masks
        self._free = grammar.free
        self._plan = list(grammar.plan)
        self._lexer = LexerState()

    @property
    def complete(self) -> bool:
        """Whether the output so far may be the whole answer."""
        return self._free or not self._plan

    def allowed(self, remaining: int) -> Tensor:
        """(V,) bool, True for tokens that are allowed next, including the ends of a complete output. Never empty.

        `remaining` is the rest of the budget, including this token.
        """
        if self._free:
            return self._masks.opening if remaining >= len(self._plan) else self._masks.text
        allowed = bits(self._matcher.compute_bitmask())
        mask = np.zeros(len(self._masks.text), dtype=np.bool_)
        if self._matcher.is_error():  # from here on only the plan is emitted
            mask[self._plan[:1] or self._closer.ends] = True
        else:
            num = min(len(mask), len(allowed))
            mask[:num] = allowed[:num]
        return torch.from_numpy(mask)

    def take(self, token: int, remaining: int) -> int:
        """Advance by a sampled token; returns the token to emit: the same, or the plan's next one if no plan after the
        sampled one fits.
        """
        if self._free:
            if token == self._plan[0]:
                self._free = False
                self._emit(token, self._plan[1:])
            return token
        if not self._plan and token in self._closer.ends:
            return token
        plan = self._closer.follow(self._matcher, self._lexer, self._plan, token, remaining)
        if plan is not None and len(plan) < remaining:
            return self._emit(token, plan)
        if not self._plan:
            return int(self._closer.ends[0])
        return self._emit(self._plan[0], self._plan[1:])

    def _emit(self, token: int, plan: list[int]) -> int:
        self._matcher.consume_token(token)
        self._plan = plan
        self._lexer = self._lexer.after(self._closer.step(token))
        return token


class Grammars:
    """Compiles grammars for one tokenizer and caches the most recently used of them, up to CACHE_BYTES."""

    def __init__(self, tokenizer: Tokenizer, rows: int, cache_bytes: int = CACHE_BYTES) -> None:
        """`rows` of the model's embedding: the length of a mask, at least the number of the tokenizer's ids."""
        self.tokenizer = tokenizer
        self._compiler = Compiler(tokenizer)
        text = torch.zeros(rows, dtype=torch.bool)
        text[[id_ for id_, token_bytes in enumerate(tokenizer.token_bytes) if token_bytes]] = True
        text[sorted(tokenizer.control_ids.values())] = False
        text[[tokenizer.turn_end, tokenizer.end_of_text]] = True
        opening = text.clone()
        opening[tokenizer.tool_call] = True
        self._masks = _Masks(text, opening)
        self._compiled: OrderedDict[str, tuple[LLMatcher, tuple[int, ...]]] = OrderedDict()
        self._cache_bytes = cache_bytes
        self._lock = threading.Lock()

    def tool_calls(self, tools: Sequence[JsonObject], *, choice: str = "auto", parallel: bool = True) -> Grammar:
        """Calls of the tools; see `grammars.tool_calls`. Raises SchemaError."""
        return self.take(generation_grammars.tool_calls(self.tokenizer, tools, choice=choice, parallel=parallel))

    def json_schema(self, schema: JsonObject) -> Grammar:
        """An instance of the schema and nothing else. Raises SchemaError."""
        return self.take(generation_grammars.json_schema(schema))

    def take(self, written: Written, plan: tuple[int, ...] | None = None) -> Grammar:
        """Compile a grammar, or take it from the cache. `plan`: its shortest output, if it is known. Raises
        SchemaError.
        """
        text = written.text
        with self._lock:
            if compiled := self._compiled.get(text):
                self._compiled.move_to_end(text)
        if compiled is None:
            compiled = self._compile(text, plan)
            with self._lock:
                self._compiled[text] = compiled
                while len(self._compiled) > 1 and sum(map(_num_bytes, self._compiled)) > self._cache_bytes:
                    self._compiled.popitem(last=False)
        return Grammar(*compiled, self._compiler.closer, self._masks, written.free)

    def _compile(self, text: str, plan: tuple[int, ...] | None = None) -> tuple[LLMatcher, tuple[int, ...]]:
        """A matcher in its initial state, and its shortest plan. Raises SchemaError."""
        matcher = self._compiler.matcher(text)
        return matcher, self._compiler.shortest(matcher) if plan is None else plan


def _num_bytes(text: str) -> int:
    """Estimated memory of a compiled grammar."""
    return GRAMMAR_BYTES + TEXT_FACTOR * len(text)


def reply(tokenizer: Tokenizer, ids: Sequence[int]) -> chat.Reply:
    """Parse a turn by its control tokens, so that text which spells a tag stays text (`chat.parse` parses the tags)."""
    content: list[int] = []
    calls: list[JsonObject] = []
    error: str | None = None
    rest = list(ids)
    while tokenizer.tool_call in rest:
        start = rest.index(tokenizer.tool_call)
        end = rest.index(tokenizer.tool_call_end, start) if tokenizer.tool_call_end in rest[start:] else len(rest)
        content += rest[:start]
        call = chat.parse(tokenizer.decode(rest[start : end + 1]))
        calls += call.tool_calls
        error = error or call.error
        rest = rest[end + 1 :]
    return chat.Reply(tokenizer.decode(content + rest).strip(), calls, error)


def guided(
    model: Transformer,
    prompts: Sequence[list[int]],
    grammars: Sequence[Grammar],
    *,
    max_new_tokens: int,
    stop: Collection[int],
    batch_rows: int = 32,
) -> list[Completion]:
    """Greedy decoding under a grammar each, until a token of `stop`, `max_new_tokens` or the end of the context.

    Raises ValueError for an empty prompt or one that fills the context, SchemaError if a grammar's shortest output does
    not fit.
    """
    if len(prompts) != len(grammars):
        raise ValueError(f"expected a grammar for each of the {len(prompts)} prompts, found {len(grammars)}")
    was_training = model.training
    model.train(False)
    try:
        completions: list[Completion] = []
        for first in range(0, len(prompts), batch_rows):
            part = slice(first, first + batch_rows)
            completions += _decode(model, prompts[part], grammars[part], max_new_tokens, frozenset(stop))
        return completions
    finally:
        model.train(was_training)


def _decode(
    model: Transformer,
    prompts: Sequence[list[int]],
    grammars: Sequence[Grammar],
    max_new_tokens: int,
    stop: frozenset[int],
) -> list[Completion]:
    budgets = [min(max_new_tokens, model.config.max_context - len(prompt)) for prompt in prompts]
    constraints = [grammar.constraint(budget) for grammar, budget in zip(grammars, budgets, strict=True)]
    outputs: list[list[int]] = [[] for _ in prompts]
    stops: list[Literal["stop", "length"]] = ["length"] * len(prompts)
    decoder = Decoder(model, len(prompts))
    live = list(range(len(prompts)))
    logits = decoder.feed(live, prompts)
    while live:
        remaining = [budgets[row] - len(outputs[row]) for row in live]
        tokens = _most_likely(logits, [constraints[row] for row in live], remaining)
        unfinished = []
        for row, sampled in zip(live, tokens, strict=True):
            token = constraints[row].take(sampled, budgets[row] - len(outputs[row]))
            if token in stop:
                stops[row] = "stop"
                continue
            outputs[row].append(token)
            if len(outputs[row]) < budgets[row]:
                unfinished.append(row)
        live = unfinished
        if live:
            logits = decoder.feed(live, [outputs[row][-1:] for row in live])
    return [Completion(ids, [], stop_reason) for ids, stop_reason in zip(outputs, stops, strict=True)]


def _most_likely(logits: Tensor, constraints: Sequence[Constraint], remaining: Sequence[int]) -> list[int]:
    """The most likely allowed token of each row."""
    masks = torch.stack([constraint.allowed(budget) for constraint, budget in zip(constraints, remaining, strict=True)])
    return logits.masked_fill(~masks.to(logits.device), float("-inf")).argmax(-1).tolist()
