"""The closing plan is as short as exhaustive enumeration finds possible, and its tokens spell what it says."""

import json
import random
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.generation.constrain import Grammar, Grammars
from pipeline.generation.grammars import Cutter, LexerState, bits
from pipeline.text.tokenizer import Tokenizer
from tests.conftest import SENTENCES
from tests.schemas import EXAMPLES, ROWS

FINITE: list[dict[str, Any]] = [
    {"const": {"a": [1, None, "x"]}},
    {"enum": ["the girl told", "zq", "pilot", "x1"]},  # the longest text may need the fewest tokens
    {"enum": ["ab1", "cb2", "the", "then"]},
    {"enum": [100, 7, "seven", True, [], {}]},
    {"type": "integer", "minimum": 95, "maximum": 105},
    {"type": "integer", "minimum": -3, "maximum": 40, "multipleOf": 13},
    {"type": "string", "pattern": "^(a[0-Z]b|c[0-Z]d)$"},
    {"type": "string", "pattern": "^[a-d]{1,2}$"},
    {"type": "string", "pattern": "^(pilot |rope){1,2}!$"},
    {"type": "boolean"},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2},
    {"type": "array", "prefixItems": [{"enum": ["the", "a"]}, {"const": "was wet"}], "items": False, "minItems": 1},
    {
        "type": "object",
        "properties": {"the": {"enum": [1, 22]}, "b": {"type": "boolean"}, "c": {"type": "null"}},
        "required": ["b"],
    },
    {"type": "object", "properties": {"a": {"enum": ["ferry", "q"]}, "b": {"enum": [True, "x"]}}, "minProperties": 1},
    {
        "anyOf": [
            {"type": "object", "properties": {"girl": {"enum": ["wet", "zzzz"]}}, "required": ["girl"]},
            {"type": "array", "items": {"const": "girl"}, "minItems": 3, "maxItems": 3},
        ]
    },
    {
        "anyOf": [  # the branch that looks shorter at first is the longer one
            {"type": "object", "properties": {"a": {"const": "xxxxxxxxxxxx"}}, "required": ["a"]},
            {"type": "object", "properties": {"abc": {"enum": ["yyyyyyyyyyyyyyyy", "z"]}}, "required": ["abc"]},
        ]
    },
]


@cache
def grammars(vocabulary: int) -> Grammars:
    """Grammars for the byte tokenizer, or for one whose merges come from these very sentences."""
    return Grammars(Tokenizer.train(iter(SENTENCES * 3), vocabulary), ROWS if vocabulary < ROWS else vocabulary)


def shortest_by_enumeration(grammar: Grammar, tokenizer: Tokenizer) -> int:
    """The true minimum, breadth first over every allowed token; prefixes with equal bytes are visited once."""
    layer, seen, length = [((), grammar.matcher.deep_copy())], {b""}, 0
    while layer:
        following = []
        for ids, matcher in layer:
            if matcher.is_accepting():
                return length
            for id_, allowed in enumerate(bits(matcher.compute_bitmask())):
                text = b"".join(tokenizer._literal[one] for one in (*ids, id_)) if allowed else b""
                if allowed and text not in seen and id_ not in grammar.closer.ends:
                    seen.add(text)
                    after = matcher.deep_copy()
                    assert after.consume_token(id_)
                    following.append(((*ids, id_), after))
        layer, length = following, length + 1
    raise AssertionError("no output ends")


@pytest.mark.parametrize("vocabulary", [320, 448])
@pytest.mark.parametrize("schema", FINITE, ids=lambda schema: json.dumps(schema)[:40])
def test_the_shortest_plan_is_the_shortest_there_is(schema: dict[str, Any], vocabulary: int) -> None:
    grammar = grammars(vocabulary).json_schema(schema)
    assert len(grammar.plan) == shortest_by_enumeration(grammar, grammars(vocabulary).tokenizer)


@pytest.mark.parametrize("vocabulary", [320, 448])
def test_the_shortest_call_of_several_tools_is_the_shortest_there_is(vocabulary: int) -> None:
    tools = [
        {"name": "a", "parameters": {"properties": {"ferry": {"enum": ["girl", "z"]}}, "required": ["ferry"]}},
        {"name": "the_pilot", "parameters": {"properties": {"x": {"const": 1}}}},
        {"name": "abcdefghijklmnop"},
    ]
    grammar = grammars(vocabulary).tool_calls(tools, choice="required", parallel=False)
    assert len(grammar.plan) == shortest_by_enumeration(grammar, grammars(vocabulary).tokenizer)


def fewest(text: bytes, spelled: set[bytes]) -> int:
    """The fewest tokens that spell a text, straight from the definition."""

    @cache
    def rest(start: int) -> int:
        ends = (end for end in range(start + 1, len(text) + 1) if text[start:end] in spelled)
        return 0 if start == len(text) else 1 + min(rest(end) for end in ends)

    return rest(0)


@pytest.mark.parametrize("name", EXAMPLES)
def test_no_shorter_instance_is_found_by_hand(name: str) -> None:
    for vocabulary in (320, 448):
        tokenizer = grammars(vocabulary).tokenizer
        spelled = {
            text for id_, text in enumerate(tokenizer.token_bytes) if text and id_ not in tokenizer.control_ids.values()
        }
        plan = grammars(vocabulary).json_schema(EXAMPLES[name].schema).plan
        assert len(plan) <= fewest(EXAMPLES[name].shortest.encode(), spelled)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(EXAMPLES)), st.integers(0, 10**6))
def test_a_greedy_plan_closes_every_prefix(name: str, seed: int) -> None:
    """From wherever a random walk stops, every token of the plan is allowed and the plan ends where the grammar may
    end; the matcher stays as it was.
    """
    grammar = grammars(320).json_schema(EXAMPLES[name].schema)
    matcher, lexer, generator = grammar.matcher.deep_copy(), LexerState(), random.Random(seed)
    for _ in range(generator.randrange(60)):
        allowed = [
            id_ for id_, may in enumerate(bits(matcher.compute_bitmask())) if may and id_ not in grammar.closer.ends
        ]
        if not allowed:
            break
        id_ = generator.choice(allowed)
        assert matcher.consume_token(id_)
        lexer = lexer.after(grammar.closer.step(id_))
    before = matcher.compute_bitmask()
    plan = grammar.closer.close(matcher, lexer, 500)
    assert plan is not None and matcher.compute_bitmask() == before
    assert matcher.try_consume_tokens(plan) == len(plan) and matcher.is_accepting()


def test_where_a_text_stands() -> None:
    for text, lexer in {
        b"": LexerState(),
        b'{"a': LexerState(quoted=True),
        b'{"a\\': LexerState(quoted=True, escaped=True),
        b'{"a\\"': LexerState(quoted=True),
        b'{"a\\\\"': LexerState(),
        b'{"a1': LexerState(quoted=True),
        b'{"a": 1': LexerState(digit=True),
        b'{"a": 1,': LexerState(),
    }.items():
        assert LexerState().after(text) == lexer
        halves = LexerState().after(text[: len(text) // 2]).after(text[len(text) // 2 :])
        assert halves == lexer
    assert LexerState(quoted=True).after(9) == LexerState()


@given(st.lists(st.sampled_from([b"a", b"ab", b"b", b"aba", b"ca", 7]), max_size=12))
def test_a_text_is_cut_into_the_fewest_tokens(said: list[bytes | int]) -> None:
    ids = {b"a": 0, b"b": 1, b"c": 2, b"ab": 3, b"ba": 4, b"aba": 5, b"cab": 6}
    spelled = {id_: text for text, id_ in ids.items()}
    cutter = Cutter(ids)
    cut = cutter.cut(said)
    assert b"|".join(spelled.get(id_, b"<7>") for id_ in cut).replace(b"|", b"") == b"".join(
        b"<7>" if step == 7 else bytes(step) for step in said
    )
    texts = b"".join(b"<" if step == 7 else bytes(step) for step in said).split(b"<")
    assert len(cut) == sum(fewest(text, set(ids)) for text in texts) + len(texts) - 1
    longer = [[*said, rest] for rest in (b"", b"a", b"b", b"ab", b"ba")]
    assert cutter.cover(said) == min(len(cutter.cut(one)) for one in longer)
