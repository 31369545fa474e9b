"""pipeline/generation/constrain.py: greedy decoding under grammars."""

import json
from typing import Any

import pytest

from pipeline.generation.constrain import Grammars, guided, reply
from pipeline.generation.sampling import Completion, Sampling, generate
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
    tiny_model: Transformer, byte_tokenizer: Tokenizer, known: Grammars
) -> None:
    prompts = [byte_tokenizer.encode("x" * n + " in Rome") for n in (1, 7, 3, 12, 5)]
    choices = ["required", "auto", "required", "auto", "required"]
    alone = [
        said(tiny_model, byte_tokenizer, [p], [known.tool_calls(TOOLS, choice=c)])[0]
        for p, c in zip(prompts, choices, strict=True)
    ]
    grammars = [known.tool_calls(TOOLS, choice=c) for c in choices]
    assert said(tiny_model, byte_tokenizer, prompts, grammars, batch_rows=3) == alone


def test_where_nothing_is_forbidden_it_is_greedy_decoding(
    tiny_model: Transformer, byte_tokenizer: Tokenizer, known: Grammars
) -> None:
    """Free text may stand instead of a call; a random model hardly ever opens one."""
    prompts = [byte_tokenizer.encode(text) for text in ("one", "two words", "three")]
    stop = {byte_tokenizer.turn_end, byte_tokenizer.end_of_text}
    free = generate(tiny_model, prompts, Sampling(12), stop=stop, seeds=[0] * 3)
    controls = set(byte_tokenizer.control_ids.values())
    plain = [n for n, one in enumerate(free) if not controls & set(one.ids)]
    assert plain, "no greedy answer without a control token: nothing was compared"
    grammars = [known.tool_calls(TOOLS) for _ in prompts]
    found = said(tiny_model, byte_tokenizer, prompts, grammars, max_new_tokens=12)
    assert [(found[n].ids, found[n].stop) for n in plain] == [(free[n].ids, free[n].stop) for n in plain]


def test_what_cannot_be_is_refused(tiny_model: Transformer, byte_tokenizer: Tokenizer, known: Grammars) -> None:
    grammar = known.tool_calls(TOOLS, choice="required")
    with pytest.raises(SchemaError, match="the shortest output takes"):
        said(tiny_model, byte_tokenizer, [[5]], [grammar], max_new_tokens=4)
    with pytest.raises(ValueError, match="expected a grammar for each of the 2 prompts"):
        said(tiny_model, byte_tokenizer, [[5], [6]], [grammar])
