"""A schema's limits, what closing its objects forbids, and the check of an instance."""

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from llguidance import LLMatcher

from pipeline.generation.constrain import Grammars
from pipeline.generation.grammars import FORM
from pipeline.generation.schemas import MAX_DEPTH, SchemaError, check, mistake, strict
from pipeline.text.tokenizer import Tokenizer
from tests.schemas import ROWS, answer

A = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
B = {"properties": {"b": {"type": "integer"}}}


def nested(depth: int) -> dict[str, Any]:
    """A schema of `depth` schemas, one in another."""
    return {"type": "integer"} if depth == 1 else {"type": "array", "items": nested(depth - 1)}


def boxed(depth: int) -> Any:
    return [] if depth == 1 else [boxed(depth - 1)]


@pytest.mark.parametrize(
    ("fits", "too_much"),
    [
        (nested(16), nested(17)),
        ({"const": boxed(15)}, {"const": boxed(16)}),
        ({"default": boxed(15)}, {"default": boxed(16)}),
        ({"enum": [*range(256)]}, {"enum": [*range(257)]}),
        (
            {"anyOf": [{"enum": [*range(100)]}, {"oneOf": [{"enum": [*range(153)]}]}]},
            {"anyOf": [{"enum": [*range(100)]}, {"oneOf": [{"enum": [*range(154)]}]}]},
        ),
        ({"pattern": "é" * 256}, {"pattern": "é" * 256 + "x"}),
        ({"patternProperties": {"x" * 512: True}}, {"patternProperties": {"x" * 513: True}}),
        ({"title": "x" * (64 * 1024 - 13)}, {"title": "x" * (64 * 1024 - 12)}),
    ],
)
def test_each_limit_is_where_it_is_said_to_be(fits: dict[str, Any], too_much: dict[str, Any]) -> None:
    check(fits)
    with pytest.raises(SchemaError, match=r"expected at most .*, found .*; simplify the schema") as error:
        check(too_much)
    assert error.value.code == "schema_too_large"


def test_the_schemas_of_a_request_share_its_limits() -> None:
    half = {"enum": [*range(128)]}
    check(half, half)
    with pytest.raises(SchemaError, match="found 257"):
        check(half, half, {"enum": [1]})


@pytest.mark.parametrize(
    "schema",
    [
        [],
        True,
        {"type": "strin"},
        {"required": "a"},
        {"properties": []},
        {"items": [{"type": "integer"}]},
        {"minLength": float("nan")},
        {"const": "\ud800"},
        {"patternProperties": 3},
        {"anyOf": {}},
    ],
)
def test_what_is_no_schema_is_refused(schema: Any) -> None:
    with pytest.raises(SchemaError) as error:
        check(schema)
    assert error.value.code == "schema_invalid"


def test_a_literal_without_a_bottom_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(SchemaError, match=f"expected at most {MAX_DEPTH}, found"):
        check({"default": endless})


@pytest.mark.parametrize(
    ("exact", "inexact"),
    [
        (2**62, 2**62 + 1),
        (-(2**62), -(2**63)),  # the least 64-bit number ends llguidance's process
        (3.141592653589793, 1.6938038750374633),
        (1e300, 6.64e52),
        (1e22, 588068114235711.2),  # .25, which may be written .2 or .3
        (5e-324, 7.267525502e-292),
        (-0.5, 2**64),
    ],
)
def test_a_literal_number_is_written_as_it_was_asked_for_or_refused(
    byte_tokenizer: Tokenizer, exact: float, inexact: float
) -> None:
    grammar = Grammars(byte_tokenizer, ROWS).json_schema({"enum": [exact]})
    assert mistake({"const": exact}, byte_tokenizer.decode(answer(grammar, 400, seed=1).ids)) is None
    with pytest.raises(SchemaError, match="const or enum") as error:
        check({"enum": [{"a": [inexact]}]})
    assert error.value.code == "schema_refused"


@pytest.mark.parametrize("key", ["minimum", "exclusiveMinimum"])
def test_a_bound_beyond_64_bits_is_the_widest_that_is_kept_or_refused(key: str) -> None:
    assert strict({"type": "integer", key: -(2**63)}) == strict({"type": "integer"})
    with pytest.raises(SchemaError, match="distance from 0"):
        strict({"type": "integer", key: 2**63})


# schema, answers it allows (in its order), and answers that it allows but `strict` does not
CLOSED: list[tuple[dict[str, Any], list[str], list[str]]] = [
    (A, ['{"a": 1}'], ['{"a": 1, "z": 1}']),
    ({"type": "object"}, ["{}", '{"z": 1}'], []),
    (A | {"additionalProperties": {"type": "null"}}, ['{"a": 1, "z": null}'], []),
    (A | {"patternProperties": {"^x": {"type": "null"}}}, ['{"a": 1, "xy": null}'], ['{"a": 1, "z": 1}']),
    ({"type": "array", "items": A}, ['[{"a": 1}]'], ['[{"a": 1, "z": 1}]']),
    ({"properties": {"deep": A}}, ['{"deep": {"a": 1}}'], ['{"deep": {"a": 1, "z": 1}}']),
    ({"required": ["q"], "type": "object"}, ['{"q": 1}'], ['{"q": 1, "z": 1}']),
    ({"allOf": [A]}, ['{"a": 1}'], ['{"a": 1, "z": 1}']),
    ({"allOf": [A, B]}, ['{"a": 1}', '{"a": 1, "b": 2}'], ['{"a": 1, "z": 1}']),
    ({"type": "object", "anyOf": [A, B]}, ['{"a": 1}', '{"b": 2}'], ['{"a": 1, "z": 1}']),
    (
        {"properties": {"k": {"const": 1}}, "required": ["k"], "anyOf": [A, B]},
        ['{"k": 1, "a": 1}', '{"k": 1, "b": 2}'],
        ['{"k": 1, "a": 1, "z": 1}'],
    ),
    (
        {"properties": {"b": True, "a": True}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        ['{"b": 1}'],
        ['{"b": 1, "z": 1}'],
    ),
    ({"$ref": "#/$defs/A", "$defs": {"A": A}}, ['{"a": 1}'], ['{"a": 1, "z": 1}']),
    (
        {"$ref": "#/$defs/A", "$defs": {"A": A, "open": {}}, "properties": {"c": {"$ref": "#/$defs/A"}}},
        ['{"c": {"a": 1}, "a": 1}', '{"a": 1}'],
        ['{"a": 1, "z": 1}', '{"c": {"a": 1, "z": 1}, "a": 1}'],
    ),
    (
        {
            "$ref": "#/$defs/T",
            "$defs": {
                "T": {"allOf": [{"properties": {"t": {"$ref": "#/$defs/T"}}}, {"properties": {"u": {"const": 1}}}]}
            },
        },
        ['{"t": {"t": {}, "u": 1}}'],
        ['{"t": {"z": 1}}'],
    ),
    ({"allOf": [{"type": "string", "minLength": 2}, {"type": "string", "maxLength": 3}]}, ['"ab"'], []),
    ({"type": "number"}, ["0", "-1.5", "9007199254740991", "0.000001"], ["1e999", "9007199254740992", "1" * 40]),
    ({"type": ["integer", "null"], "minimum": 3}, ["3", "9007199254740991", "null"], ["9007199254740992"]),
    ({"type": "integer", "minimum": 2**55}, [str(2**55 + 1)], []),
    ({"enum": [1e300, 2**60]}, [str(2**60)], []),
    ({"type": ["object", "null"], "properties": {"a": {"const": 1}}}, ["null", '{"a": 1}'], ['{"z": 1}']),
]


@pytest.mark.parametrize(("schema", "said", "forbidden"), CLOSED, ids=lambda value: json.dumps(value)[:40])
def test_objects_are_closed_and_nothing_else_is(
    byte_tokenizer: Tokenizer, schema: dict[str, Any], said: list[str], forbidden: list[str]
) -> None:
    check(schema)
    matcher = Grammars(byte_tokenizer, ROWS).json_schema(schema).matcher
    for texts, expected in ((said, True), (forbidden, False)):
        for text in texts:
            assert mistake(schema, text) is None
            state, ids = matcher.deep_copy(), [byte_tokenizer.byte_ids[byte] for byte in text.encode()]
            assert (state.try_consume_tokens(ids) == len(ids) and state.is_accepting()) is expected, text


def test_closing_changes_no_schema_in_place() -> None:
    for schema, _, _ in CLOSED:
        before = json.dumps(schema)
        strict(schema)
        assert json.dumps(schema) == before


@pytest.mark.parametrize("pointer", ["#/$defs/nobody", "https://example.org/a.json", "other.json#/a", "#/type/0"])
def test_a_reference_that_leads_nowhere_is_refused(byte_tokenizer: Tokenizer, pointer: str) -> None:
    for schema in ({"$ref": pointer}, {"properties": {"a": {"$ref": pointer}}}, A | {"$ref": pointer}):
        with pytest.raises(SchemaError) as error:
            Grammars(byte_tokenizer, ROWS).json_schema(schema)
        assert error.value.code == "schema_refused"


def test_a_count_of_names_that_may_repeat_is_refused(byte_tokenizer: Tokenizer) -> None:
    """The grammar would count {"": 0, "": 0} as two properties."""
    grammars = Grammars(byte_tokenizer, ROWS)
    integers = {"type": "object", "additionalProperties": {"type": "integer"}}
    grammars.json_schema(integers | {"minProperties": 1})
    with pytest.raises(SchemaError, match="minProperties 2"):
        grammars.json_schema(integers | {"minProperties": 2})


def test_patterns_that_meet_are_few(byte_tokenizer: Tokenizer) -> None:
    """Nine patterns for one text are refused, however they meet; nine for nine texts are not."""
    grammars = Grammars(byte_tokenizer, ROWS)
    parts = [{"type": "string", "pattern": f"^a{{{n},}}"} for n in range(9)]
    grammars.json_schema({"allOf": parts[:8]})
    grammars.json_schema({"anyOf": parts})
    grammars.json_schema({"properties": {f"p{n}": part for n, part in enumerate(parts)}})
    defs = {"$defs": {"four": {"allOf": parts[:4]}, "five": {"anyOf": [parts[0], {"allOf": parts[4:]}]}}}
    for meeting in (
        {"allOf": parts},
        {"allOf": [{"properties": {"p": part}} for part in parts]},
        {"allOf": [{"$ref": "#/$defs/four"}, {"$ref": "#/$defs/five"}]} | defs,
    ):
        with pytest.raises(SchemaError, match="expected at most 8, found 9") as error:
            grammars.json_schema(meeting)
        assert error.value.code == "schema_too_large"


def test_references_that_lead_too_deep_are_refused(byte_tokenizer: Tokenizer) -> None:
    chain = {f"d{n}": {"$ref": f"#/$defs/d{n + 1}", "required": []} for n in range(900)} | {"d900": A}
    with pytest.raises(SchemaError) as error:
        Grammars(byte_tokenizer, ROWS).json_schema({"$ref": "#/$defs/d0", "$defs": chain})
    assert error.value.code in ("schema_too_large", "schema_refused")


def test_branches_that_only_closing_keeps_apart_are_refused(byte_tokenizer: Tokenizer) -> None:
    """As written, both branches allow {"a": 1}; with a tag in each, the branches exclude each other."""
    grammars = Grammars(byte_tokenizer, ROWS)
    with pytest.raises(SchemaError, match="oneOf") as error:
        grammars.json_schema({"oneOf": [A, {"type": "object", "properties": {"b": {"type": "integer"}}}]})
    assert error.value.code == "schema_refused" and "Enable" not in str(error.value)
    tagged = [A | {"properties": {"a": {"const": tag}, tag: {"type": "null"}}} for tag in ("x", "y")]
    state = grammars.json_schema({"oneOf": tagged}).matcher.deep_copy()
    ids = [byte_tokenizer.byte_ids[byte] for byte in b'{"a": "y", "y"']
    assert state.try_consume_tokens(ids) == len(ids)


@pytest.mark.parametrize("literal", [{"const": {"k": [1]}}, {"enum": [3, {"k": [1]}]}], ids=["const", "enum"])
def test_names_of_a_literal_object_beside_properties_may_stand(
    byte_tokenizer: Tokenizer, literal: dict[str, Any]
) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}, "anyOf": [literal]}
    grammar = Grammars(byte_tokenizer, ROWS).json_schema(schema)
    assert json.loads(byte_tokenizer.decode(answer(grammar, 40, 0).ids)) == {"k": [1]}


LEAVES = st.sampled_from(
    [
        {"type": "string"},
        {"type": "integer"},
        {"type": "number", "minimum": 0, "maximum": 9},
        {"type": "boolean"},
        {"type": "null"},
        {"enum": ["é", 1, None]},
        {"const": {"k": [1]}},
        {"type": "string", "pattern": "^[ab]{2,4}$"},
        {"type": "string", "maxLength": 3},
        {"type": ["integer", "null"]},
        {"type": "object"},
        {"$ref": "#/$defs/A"},
        {"type": "integer", "multipleOf": 3},
    ]
)


def objects(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    """Objects with up to three of the names a to d, some required; open, closed or silent about other names."""
    properties = st.dictionaries(st.sampled_from("abcd"), inner, max_size=3)
    others = st.sampled_from([{}, {}, {"additionalProperties": False}, {"additionalProperties": {"type": "null"}}])
    return st.builds(
        lambda named, required, other: {"type": "object", "properties": named, "required": required, **other},
        properties,
        st.lists(st.sampled_from("abcd"), max_size=2, unique=True),
        others,
    )


def combined(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    lists = st.lists(inner, min_size=1, max_size=3)
    return st.one_of(
        objects(inner),
        st.builds(lambda items, least: {"type": "array", "items": items, "minItems": least}, inner, st.integers(0, 2)),
        st.builds(lambda key, parts: {key: parts}, st.sampled_from(["anyOf", "allOf", "oneOf"]), lists),
        st.builds(
            lambda whole, key, parts: {**whole, key: parts}, objects(inner), st.sampled_from(["anyOf", "allOf"]), lists
        ),
        st.builds(lambda whole: {**whole, "$ref": "#/$defs/A"}, objects(inner)),
    )


SCHEMAS = st.recursive(LEAVES, combined, max_leaves=6)
SLOWLY = [HealthCheck.too_slow, HealthCheck.data_too_large]


def answered_or_refused(tokenizer: Tokenizer, schema: dict[str, Any], seed: int) -> None:
    """Both an answer of the shortest length and one with more room are instances, or the schema is refused, as it is by
    llguidance.
    """
    schema = {**schema, "$defs": {"A": A}}
    try:
        grammar = Grammars(tokenizer, ROWS).json_schema(schema)
    except SchemaError as refusal:
        form = json.dumps({**schema, "x-guidance": FORM})
        assert refusal.code == "schema_refused"  # noqa: PT017
        assert LLMatcher.validate_grammar_with_warnings(f"start: %json {form}")[0]
        return
    for budget in (len(grammar.plan), len(grammar.plan) + 30):
        text = tokenizer.decode(answer(grammar, budget, seed).ids)
        Draft202012Validator(schema).validate(json.loads(text))
        assert mistake(schema, text) is None


@settings(max_examples=30, deadline=None, suppress_health_check=SLOWLY)
@given(schema=SCHEMAS, seed=st.integers(0, 1000))
def test_any_schema_is_answered_by_an_instance_or_refused(
    schema: dict[str, Any], seed: int, byte_tokenizer: Tokenizer
) -> None:
    answered_or_refused(byte_tokenizer, schema, seed)


@pytest.mark.slow
@pytest.mark.full
@settings(max_examples=500, deadline=None, suppress_health_check=SLOWLY)
@given(schema=SCHEMAS, seed=st.integers(0, 1000))
def test_500_schemas_are_answered_by_an_instance_or_refused(
    schema: dict[str, Any], seed: int, byte_tokenizer: Tokenizer
) -> None:
    answered_or_refused(byte_tokenizer, schema, seed)


def test_numbers_are_checked_as_they_are_written() -> None:
    """As floats, 0.07 is not a multiple of 0.01, 9.99999999999999999999 is 10, and 1e999 is infinite."""
    assert mistake({"type": "number", "multipleOf": 0.01}, "0.07") is None
    assert mistake({"type": "number", "multipleOf": 0.01}, "0.075") is not None
    assert mistake({"type": "number", "multipleOf": 0.01}, "1e40") is None
    assert mistake({"type": "number", "exclusiveMaximum": 10}, "9.99999999999999999999") is None
    assert mistake({"type": "number", "exclusiveMaximum": 10}, "10.0") is not None
    assert mistake({"type": "number"}, "1e999") is None
    assert mistake({"maximum": 10}, "1e6232232559869548930") is not None
    assert mistake({"type": "integer"}, "1.5") is not None
    assert mistake({"enum": [1.5]}, "1.5") is None


def test_mistakes_are_told_and_patterns_are_not_tried() -> None:
    assert "not JSON" in (mistake(A, '{"a": 1') or "")
    assert "required" in (mistake(A, "{}") or "")
    assert mistake(A | {"additionalProperties": False}, '{"a": 1, "b": 1}') is not None
    assert mistake({"type": "string", "pattern": "^(x+x+)+y$"}, '"' + "x" * 60 + '"') is None  # `re` would take years
    closed = {"patternProperties": {"^(x+x+)+y$": {"type": "null"}}, "additionalProperties": False}
    assert mistake(closed, '{"' + "x" * 60 + '": 1}') is None


def test_a_schema_that_doubles_is_answered_and_checked_in_time(byte_tokenizer: Tokenizer) -> None:
    """Forty definitions, each referring to the next twice, so 2^40 paths lead to the last."""
    for key in ("allOf", "anyOf"):
        chain = {f"d{n}": {key: [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(40)} | {"d40": A}
        schema = {"$ref": "#/$defs/d0", "$defs": chain}
        check(schema)
        assert mistake(schema, '{"a": 1}') is None
        try:
            text = byte_tokenizer.decode(answer(Grammars(byte_tokenizer, ROWS).json_schema(schema), 30, 1).ids)
        except SchemaError as refusal:
            assert refusal.code == "schema_refused"  # noqa: PT017
        else:
            Draft202012Validator(A).validate(json.loads(text))


def test_an_answer_deeper_than_the_stack_is_no_mistake_of_the_schema() -> None:
    tree = {"type": "array", "items": {"$ref": "#"}}
    assert mistake(tree, "[" * 300 + "]" * 300) is None
    assert mistake(tree, "[[1]]") is not None
    assert "not JSON" in (mistake(tree, "[" * 100_000) or "")
