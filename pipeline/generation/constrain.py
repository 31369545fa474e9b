"""Constrained decoding: tool calls and JSON that are always complete and valid, within a token budget.

    grammars = Grammars(tokenizer, rows)                      one per model; thread-safe
    grammar = grammars.tool_calls(tools, choice="required")   or json_schema(schema): compiled and cached
    constraint = grammar.constraint(budget)           a request's state; SchemaError if the shortest output does not fit
    constraint.allowed(remaining) -> mask; constraint.take(sampled, remaining) -> the token to emit

llguidance computes the tokens allowed by the grammar (`grammars.py`). A closing plan, a sequence of tokens that
completes the output from the current state, keeps answers within the budget. A sampled token is emitted if some plan
after it fits the remaining budget; otherwise the current plan's next token is emitted instead. So the rest of the plan
fits the remaining budget at every token. After a matcher error (llguidance's limits on hostile patterns), the rest of
the plan is emitted.

    guided(model, prompts, grammars, drafts) -> a Completion for each prompt

`guided` decodes many prompts greedily and in parallel, each under its own grammar, to evaluate a model whose tool calls
are always well-formed. A draft is the greedy completion without the grammar: up to the first token that the grammar
forbids, it is also the constrained completion, and only the rest is decoded. The server's engine constrains its answers
in the same way. There are no log-probabilities: they would be meaningless for a constrained choice.

Not guaranteed: that a number is small enough for a float; that names not listed in the schema occur only once.
"""

import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from llguidance import LLMatcher
from torch import Tensor

from pipeline.generation import grammars as generation_grammars
from pipeline.generation.grammars import Closer, Compiler, LexerState, Written, bits
from pipeline.generation.sampling import Completion, Decoder, rows_within
from pipeline.generation.schemas import SchemaError
from pipeline.model.transformer import Transformer
from pipeline.run.types import JsonObject
from pipeline.text import chat
from pipeline.text.tokenizer import Tokenizer

CACHE_BYTES = 64 * 1024 * 1024
GRAMMAR_BYTES = 48 * 1024  # memory of a compiled grammar, not counting its text
TEXT_FACTOR = 48  # memory per byte of its text; both values are measured and rounded up generously


@dataclass(frozen=True)
class _Masks:
    """Tokens allowed in free text, (V,) bool each."""

    text: Tensor  # no control tokens except the ends of a turn
    opening: Tensor  # the same tokens plus the opening tag of a call


@dataclass(frozen=True)
class Grammar:
    """A compiled grammar; each request gets a `constraint` from it."""

    matcher: LLMatcher  # in its initial state; always copied, never modified
    plan: tuple[int, ...]  # an output; the shortest one found, if there was a search
    closer: Closer
    masks: _Masks
    free: bool = False  # whether free text is allowed before or instead of the constrained output

    def constraint(self, budget: int) -> "Constraint":
        """The state of a request with `budget` tokens. Raises SchemaError with code `budget_too_small`."""
        if not self.free and len(self.plan) > budget:
            raise SchemaError(
                "budget_too_small",
                f"the shortest output takes {len(self.plan)} tokens, but the budget is {budget}; raise the budget",
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
        """Whether the output so far may be the complete answer."""
        return self._free or not self._plan

    def allowed(self, remaining: int) -> Tensor:
        """(V,) bool, True for tokens allowed next, including end tokens after a complete output. At least one is True.

        `remaining` is the rest of the budget, including this token.
        """
        if self._free:
            return self._masks.opening if remaining >= len(self._plan) else self._masks.text
        allowed = bits(self._matcher.compute_bitmask())
        mask = np.zeros(len(self._masks.text), dtype=np.bool_)
        if self._matcher.is_error():  # from here on, only the plan is emitted
            mask[self._plan[:1] or self._closer.ends] = True
        else:
            num = min(len(mask), len(allowed))
            mask[:num] = allowed[:num]
        return torch.from_numpy(mask)

    def take(self, token: int, remaining: int) -> int:
        """Advance by a sampled token; returns the token to emit: the sampled one, or the plan's next one if no plan
        after the sampled one fits.
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
    """Compiles grammars for one tokenizer and caches the most recently used ones, up to CACHE_BYTES."""

    def __init__(self, tokenizer: Tokenizer, rows: int, cache_bytes: int = CACHE_BYTES, *, search: bool = True) -> None:
        """`rows`: the number of rows in the model's embedding, which is the length of a mask; at least one per id.

        With `search`, looks for the shortest output of each grammar, which takes 40 ms and allows smaller budgets;
        otherwise, the plan is the first output found.
        """
        self.tokenizer, self._search = tokenizer, search
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
        """Compile a grammar, or get it from the cache. `plan` is its shortest output, if known. Raises
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
        """A matcher in its initial state, and its plan. Raises SchemaError."""
        matcher = self._compiler.matcher(text)
        if plan is None:
            plan = self._compiler.shortest(matcher) if self._search else self._compiler.first(matcher)
        return matcher, plan


def _num_bytes(text: str) -> int:
    """Estimated memory of a compiled grammar."""
    return GRAMMAR_BYTES + TEXT_FACTOR * len(text)


def reply(tokenizer: Tokenizer, ids: Sequence[int]) -> chat.Reply:
    """Parse a turn by its control tokens, so that text that spells a tag stays text (`chat.parse` parses text)."""
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
    drafts: Sequence[Completion] = (),
) -> list[Completion]:
    """Decode each prompt greedily under its grammar, until a `stop` token, `max_new_tokens` or the end of the context.

    `drafts` are the prompts' greedy completions without a grammar and with the same limits, if known. Raises ValueError
    for an empty prompt or one that fills the context, and SchemaError if a grammar's shortest output does not fit.
    """
    if len(prompts) != len(grammars):
        raise ValueError(f"expected a grammar for each of the {len(prompts)} prompts, found {len(grammars)}")
    if drafts and len(drafts) != len(prompts):
        raise ValueError(f"expected a draft for each of the {len(prompts)} prompts or no drafts, found {len(drafts)}")
    was_training = model.training
    model.train(False)
    try:
        ends = frozenset(stop)
        budgets = [min(max_new_tokens, model.config.max_context - len(prompt)) for prompt in prompts]
        rows = [_Row(grammar.constraint(budget), budget) for grammar, budget in zip(grammars, budgets, strict=True)]
        for row, draft in zip(rows, drafts, strict=False):
            row.follow(draft, ends)
        starts = [(row, [*prompt, *row.ids]) for row, prompt in zip(rows, prompts, strict=True) if row.stop is None]
        size = rows_within(model, max((len(ids) for _, ids in starts), default=0) + max_new_tokens)
        for first in range(0, len(starts), size):
            _decode(model, starts[first : first + size], ends)
        return [row.completion for row in rows]
    finally:
        model.train(was_training)


@dataclass
class _Row:
    """A constrained output that is being decoded."""

    constraint: Constraint
    budget: int
    ids: list[int] = field(default_factory=list)
    stop: Literal["stop", "length"] | None = None

    @property
    def remaining(self) -> int:
        """The remaining budget."""
        return self.budget - len(self.ids)

    @property
    def completion(self) -> Completion:
        assert self.stop is not None
        return Completion(self.ids, [], self.stop)

    def take(self, sampled: int, ends: frozenset[int]) -> bool:
        """Emit a sampled token, or the plan's token instead. Returns whether the sampled token was emitted."""
        token = self.constraint.take(sampled, self.remaining)
        if token in ends:
            self.stop = "stop"
        else:
            self.ids.append(token)
            self.stop = None if self.remaining else "length"
        return token == sampled

    def follow(self, draft: Completion, ends: frozenset[int]) -> None:
        """Take the tokens of a draft up to the first one that the grammar forbids or replaces."""
        for token in draft.ids:
            allowed = bool(self.constraint.allowed(self.remaining)[token])
            if not allowed or not self.take(token, ends) or self.stop is not None:
                return
        if draft.stop == "stop" and self.constraint.complete:
            self.stop = "stop"


def _decode(model: Transformer, starts: Sequence[tuple[_Row, list[int]]], ends: frozenset[int]) -> None:
    """Decode each row to its end, from its prompt and its tokens so far."""
    decoder = Decoder(model, len(starts))
    rows = [row for row, _ in starts]
    live = list(range(len(rows)))
    logits = decoder.feed(live, [ids for _, ids in starts])
    while True:
        tokens = _most_likely(logits, [rows[index] for index in live])
        for index, token in zip(live, tokens, strict=True):
            rows[index].take(token, ends)
        live = [index for index in live if rows[index].stop is None]
        if not live:
            return
        logits = decoder.feed(live, [rows[index].ids[-1:] for index in live])


def _most_likely(logits: Tensor, rows: Sequence[_Row]) -> list[int]:
    """The most likely allowed token of each row."""
    masks = torch.stack([row.constraint.allowed(row.remaining) for row in rows])
    return logits.masked_fill(~masks.to(logits.device), float("-inf")).argmax(-1).tolist()
