"""Twenty schemas like those of tools and response formats, and a stand-in for a model, with random logits, that answers
in their form.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    from pipeline.generation.constrain import Grammar

ROWS = 352  # rows of an embedding larger than the tokenizer's 320 ids


class Example(NamedTuple):
    schema: dict[str, Any]
    shortest: str  # the shortest instance found manually, as the grammar writes it


class Answer(NamedTuple):
    ids: list[int]  # without the token that ended it
    ended: bool  # by an end token; else by its budget
    steered: int  # tokens that were not the sampled ones


def answer(grammar: Grammar, budget: int, seed: int, wish: int | None = None) -> Answer:
    """The answer of a model with random logits, but for a preferred token; the mask must always allow some token."""
    constraint = grammar.constraint(budget)
    generator = np.random.default_rng(seed)
    ids: list[int] = []
    steered = 0
    while len(ids) < budget:
        allowed = constraint.allowed(budget - len(ids))
        assert allowed.shape == (ROWS,) and allowed.dtype == torch.bool and allowed.any()
        logits = generator.normal(scale=4.0, size=ROWS)
        if wish is not None:
            logits[wish] += 8.0
        logits[~allowed.numpy()] = -np.inf
        sampled = int((logits + generator.gumbel(size=ROWS)).argmax())  # a sample of the softmax (Gumbel 1954)
        said = constraint.take(sampled, budget - len(ids))
        steered += said != sampled
        if said in grammar.closer.ends:
            assert constraint.complete
            return Answer(ids, True, steered)
        ids.append(said)
    return Answer(ids, False, steered)


def _object(required: list[str] | None = None, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties) if required is None else required}


TEXT, INTEGER, NUMBER = {"type": "string"}, {"type": "integer"}, {"type": "number"}
NODE = _object(["value"], value=INTEGER, children={"type": "array", "items": {"$ref": "#/$defs/node"}})
LIST = _object(head=TEXT, tail={"anyOf": [{"$ref": "#/$defs/list"}, {"type": "null"}]})
EVERY_WEEK = _object(kind={"const": "weekly"}, day={"enum": ["monday", "tuesday", "sunday"]})
EVERY_DAY = _object(kind={"const": "daily"}, hour={"type": "integer", "minimum": 0, "maximum": 23})

EXAMPLES: dict[str, Example] = {
    "empty": Example({"type": "object", "properties": {}}, "{}"),
    "one text": Example(_object(city=TEXT), '{"city": ""}'),
    "flat": Example(
        _object(name=TEXT, age=INTEGER, height=NUMBER, member={"type": "boolean"}),
        '{"name": "", "age": 0, "height": 0, "member": true}',
    ),
    "optional": Example(_object(["path"], path=TEXT, mode={"enum": ["r", "w"]}, limit=INTEGER), '{"path": ""}'),
    "all optional": Example(_object([], first=TEXT, second=INTEGER, third={"type": "boolean"}), "{}"),
    "enum": Example(_object(unit={"enum": ["fahrenheit", "celsius", "kelvin", "K"]}), '{"unit": "K"}'),
    "mixed enum": Example(
        _object(value={"enum": ["long text", 1000000, None, True, 7, {"deep": [1, 2]}]}), '{"value": 7}'
    ),
    "unicode enum": Example(_object(mot={"enum": ["naïveté", "日本語", "🚂🚃", "Ünïcödé"]}), '{"mot": "日本語"}'),
    "const": Example(
        _object(version={"const": 2}, tag={"const": 'a "quoted" \\ tag\n'}),
        '{"version": 2, "tag": "a \\"quoted\\" \\\\ tag\\n"}',
    ),
    "nested": Example(
        _object(user=_object(name=TEXT, address=_object(street=TEXT, number=INTEGER, planet={"const": "earth"}))),
        '{"user": {"name": "", "address": {"street": "", "number": 0, "planet": "earth"}}}',
    ),
    "array": Example(
        _object(tags={"type": "array", "items": TEXT, "minItems": 2, "maxItems": 4}), '{"tags": ["", ""]}'
    ),
    "matrix": Example(
        _object(
            rows={
                "type": "array",
                "minItems": 1,
                "items": {"type": "array", "items": NUMBER, "minItems": 2, "maxItems": 2},
            }
        ),
        '{"rows": [[0, 0]]}',
    ),
    "tuple": Example(
        _object(point={"type": "array", "prefixItems": [INTEGER, TEXT], "items": False, "minItems": 2}),
        '{"point": [0, ""]}',
    ),
    "pattern": Example(
        _object(
            id={"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"}, size={"type": "string", "pattern": "^(small|l)$"}
        ),
        '{"id": "AA-0000", "size": "l"}',
    ),
    "bounds": Example(
        _object(
            share={"type": "number", "minimum": 0, "maximum": 1},
            count={"type": "integer", "minimum": 10, "maximum": 99},
            even={"type": "integer", "multipleOf": 2, "minimum": 3},
            text={"type": "string", "minLength": 3, "maxLength": 20},
        ),
        '{"share": 0, "count": 10, "even": 4, "text": "the"}',
    ),
    "formats": Example(
        _object(day={"type": "string", "format": "date"}, host={"type": "string", "format": "ipv4"}),
        '{"day": "2000-01-01", "host": "0.0.0.0"}',
    ),
    "nullable": Example(
        _object(note={"type": ["string", "null"]}, parent={"anyOf": [_object(id=INTEGER), {"type": "null"}]}),
        '{"note": "", "parent": null}',
    ),
    "either": Example(
        _object(rule={"oneOf": [EVERY_WEEK, EVERY_DAY]}, extra={"anyOf": [{"type": "array", "items": INTEGER}, TEXT]}),
        '{"rule": {"kind": "daily", "hour": 0}, "extra": ""}',
    ),
    "recursive": Example(
        _object(tree={"$ref": "#/$defs/node"}, list={"$ref": "#/$defs/list"}) | {"$defs": {"node": NODE, "list": LIST}},
        '{"tree": {"value": 0}, "list": {"head": "", "tail": null}}',
    ),
    "long names": Example(
        _object(
            ["the_name_of_the_first_argument_of_the_function"],
            the_name_of_the_first_argument_of_the_function={"$ref": "#/$defs/Person"},
            the_name_of_the_second_argument_of_the_function={"type": "object", "additionalProperties": INTEGER},
        )
        | {
            "$defs": {
                "Person": {
                    "allOf": [
                        _object(name=TEXT),
                        {"properties": {"pet": {"enum": ["cat", "dog"]}}, "required": ["pet"]},
                    ]
                }
            }
        },
        '{"the_name_of_the_first_argument_of_the_function": {"name": "", "pet": "cat"}}',
    ),
}
