"""pipeline/generation/constrain.py: greedy decoding under grammars."""

import json
from typing import Any

import pytest
import torch

from pipeline.generation import constrain
from pipeline.generation.constrain import Grammars, guided, reply
from pipeline.generation.sampling import Completion, Decoder, Sampling, generate
from pipeline.generation.schemas import SchemaError
from pipeline.model.transformer import Transformer
from pipeline.text.tokenizer import Tokenizer

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "enum": ["Oslo", "Rome"]}, "days": {"type": "integer"}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
]


@pytest.fixture
def known(tiny_model: Transformer, byte_tokenizer: Tokenizer) -> Grammars:
    return Grammars(byte_tokenizer, tiny_model.config.vocab_size)


def said(
    model: Transformer, tokenizer: Tokenizer, prompts: list[list[int]], grammars: list[Any], **settings: Any
) -> list[Completion]:
    stop = {tokenizer.turn_end, tokenizer.end_of_text}
    return guided(model, prompts, grammars, **{"max_new_tokens": 96, "stop": stop} | settings)


def test_whatever_the_weights_a_required_call_is_whole_and_fits_its_schema(
    tiny_model: Transformer, byte_tokenizer: Tokenizer, known: Grammars
) -> None:
    prompts = [byte_tokenizer.encode(text) for text in ("weather", "what is it like in Oslo?", "a")]
    for budget in (96, len(known.tool_calls(TOOLS, choice="required").plan)):
        grammars = [known.tool_calls(TOOLS, choice="required") for _ in prompts]
        for one in said(tiny_model, byte_tokenizer, prompts, grammars, max_new_tokens=budget):
            calls = reply(byte_tokenizer, one.ids).tool_calls
            assert calls and all(call["name"] == "look" for call in calls)
            arguments = calls[0]["arguments"]
            given = json.loads(arguments) if isinstance(arguments, str) else arguments
            assert given["city"] in ("Oslo", "Rome") and set(given) <= {"city", "days"}


def test_rows_together_are_rows_alone_and_come_back_in_order(
    tiny_model: Transformer, byte_tokenizer: Tokenizer, known: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [byte_tokenizer.encode("x" * n + " in Rome") for n in (1, 7, 3, 12, 5)]
    choices = ["required", "auto", "required", "auto", "required"]
    alone = [
        said(tiny_model, byte_tokenizer, [p], [known.tool_calls(TOOLS, choice=c)])[0]
        for p, c in zip(prompts, choices, strict=True)
    ]
    grammars = [known.tool_calls(TOOLS, choice=c) for c in choices]
    monkeypatch.setattr(constrain, "rows_within", lambda model, length: 3)
    assert said(tiny_model, byte_tokenizer, prompts, grammars) == alone


def test_where_nothing_is_forbidden_it_is_greedy_decoding(
    tiny_model: Transformer, byte_tokenizer: Tokenizer, known: Grammars
) -> None:
    """Free text is allowed instead of a call, and a random model hardly ever opens a call."""
    prompts = [byte_tokenizer.encode(text) for text in ("one", "two words", "three")]
    stop = {byte_tokenizer.turn_end, byte_tokenizer.end_of_text}
    free = generate(tiny_model, prompts, Sampling(12), stop=stop, seeds=[0] * 3)
    controls = set(byte_tokenizer.control_ids.values())
    plain = [n for n, one in enumerate(free) if not controls & set(one.ids)]
    assert plain, "no greedy answer without a control token: nothing was compared"
    grammars = [known.tool_calls(TOOLS) for _ in prompts]
    found = said(tiny_model, byte_tokenizer, prompts, grammars, max_new_tokens=12)
    assert [(found[n].ids, found[n].stop) for n in plain] == [(free[n].ids, free[n].stop) for n in plain]


def test_a_draft_spares_its_tokens_and_changes_no_answer(
    tiny_model: Transformer, byte_tokenizer: Tokenizer, known: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the greedy answers, one ends early, one breaks its grammar at once, and a third follows it to the end."""
    prompts = [byte_tokenizer.encode(text) for text in ("one", "two words", "three", "four")]
    choices = ["auto", "required", "auto", "required"]
    grammars = [known.tool_calls(TOOLS, choice=choice) for choice in choices]
    stop = {byte_tokenizer.turn_end, byte_tokenizer.end_of_text}
    free = generate(tiny_model, prompts, Sampling(96), stop=stop, seeds=[0] * 4)
    whole = said(tiny_model, byte_tokenizer, prompts, grammars)
    drafts = [*free[:3], whole[3]]
    fed: list[int] = []
    feed = Decoder.feed

    def counted(self: Decoder, rows: list[int], tokens: list[list[int]]) -> torch.Tensor:
        fed.append(len(rows))
        return feed(self, rows, tokens)

    monkeypatch.setattr(Decoder, "feed", counted)
    assert said(tiny_model, byte_tokenizer, prompts, grammars, drafts=drafts) == whole
    agrees = [draft.ids == row.ids for draft, row in zip(drafts, whole, strict=True)]
    assert agrees[3] and not agrees[1], "both kinds of drafts"
    assert fed[0] == 4 - sum(agrees)


def test_a_draft_is_followed_up_to_the_first_token_that_is_not_allowed(
    tiny_model: Transformer, byte_tokenizer: Tokenizer, known: Grammars
) -> None:
    prompt, grammar = byte_tokenizer.encode("in Rome"), known.tool_calls(TOOLS, choice="required")
    (right,) = said(tiny_model, byte_tokenizer, [prompt], [grammar])
    half = len(right.ids) // 2
    for broken in (
        Completion([*right.ids[:half], byte_tokenizer.tool_call], [], "stop"),
        Completion(right.ids[:half], [], "stop"),  # ends where the grammar does not allow an end
    ):
        assert said(tiny_model, byte_tokenizer, [prompt], [grammar], drafts=[broken]) == [right]


def test_a_plan_that_was_not_searched_for_is_valid_and_changes_no_answer_with_room(
    tiny_model: Transformer, byte_tokenizer: Tokenizer, known: Grammars
) -> None:
    quick = Grammars(byte_tokenizer, tiny_model.config.vocab_size, search=False)
    prompts = [byte_tokenizer.encode(text) for text in ("one", "two words")]
    shortest, first = (one.tool_calls(TOOLS, choice="required") for one in (known, quick))
    assert len(shortest.plan) <= len(first.plan)
    whole = [*first.plan, byte_tokenizer.turn_end]
    assert first.matcher.deep_copy().try_consume_tokens(whole) == len(whole)
    answers = [said(tiny_model, byte_tokenizer, prompts, [grammar] * 2) for grammar in (shortest, first)]
    assert answers[0] == answers[1]


def test_what_cannot_be_is_refused(tiny_model: Transformer, byte_tokenizer: Tokenizer, known: Grammars) -> None:
    grammar = known.tool_calls(TOOLS, choice="required")
    with pytest.raises(SchemaError, match="the shortest output takes"):
        said(tiny_model, byte_tokenizer, [[5]], [grammar], max_new_tokens=4)
    with pytest.raises(ValueError, match="expected a grammar for each of the 2 prompts"):
        said(tiny_model, byte_tokenizer, [[5], [6]], [grammar])
    with pytest.raises(ValueError, match="expected a draft for each of the 1 prompts"):
        said(tiny_model, byte_tokenizer, [[5]], [grammar], drafts=[Completion([], [], "stop")] * 2)
