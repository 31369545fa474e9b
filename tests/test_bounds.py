"""What a schema may ask for is read from its numbers, before anything is compiled."""

from typing import Any

import pytest

from pipeline.generation.schemas import SchemaError, check, written_out


@pytest.mark.parametrize(
    "schema",
    [
        {"multipleOf": 9999991},
        {"multipleOf": 10_001},
        {"multipleOf": 1.00001},
        {"multipleOf": 1e300},
        {"multipleOf": 5e-324},
        {"minimum": -1e300},
        {"exclusiveMaximum": 10**40},
        {"maximum": 1e400},
        {"minimum": -(10**500)},
        {"minimum": 1.5e-300},
        {"minLength": 513},
        {"minItems": 10**30},
        {"minProperties": 1000},
        {"maxItems": 10**9},
        {"maxLength": 1e300},
        {"properties": {f"k{n}": {} for n in range(513)}},
        {"required": [f"k{n}" for n in range(513)]},
        {"pattern": "^(x{1,50}){1,50}$"},
        {"pattern": "^.{1000,2001}$"},
        {"patternProperties": {"(((a{9}){9}){9}){9}": {}}},
        {"pattern": "a{99999999999999999999}"},
    ],
    ids=lambda schema: str(schema)[:50],
)
def test_what_grows_with_a_number_is_refused_wherever_it_stands(schema: dict[str, Any]) -> None:
    for whole in (schema, {"properties": {"a": schema}}, {"anyOf": [{"items": schema}]}, {"$defs": {"a": schema}}):
        with pytest.raises(SchemaError, match=r"expected at most .*, found .*; simplify the schema") as error:
            check(whole)
        assert error.value.code == "schema_too_large"


@pytest.mark.parametrize(
    "schema",
    [
        {"multipleOf": 0.01},
        {"multipleOf": 1000},
        {"multipleOf": 0.125},
        {"multipleOf": 60},
        {"minimum": -(2**63), "maximum": 2**64},
        {"minimum": 0, "exclusiveMaximum": 1e15},
        {"minimum": -273.15},
        {"minLength": 1, "maxLength": 4096},
        {"minItems": 3, "maxItems": 100},
        {"pattern": "^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$"},
        {"pattern": r"^\d{1,3}(\.\d{1,3}){3}$"},
        {"pattern": "^[^]{}]{1,200}$"},
        {"properties": {f"k{n}": {} for n in range(100)}},
    ],
    ids=lambda schema: str(schema)[:50],
)
def test_what_people_ask_for_is_within_the_bounds(schema: dict[str, Any]) -> None:
    check(schema)


@pytest.mark.parametrize(
    ("pattern", "characters"),
    [
        ("", 0),
        ("abc", 3),
        ("a{3}", 3),
        ("a{2,5}b", 6),
        ("a{4,}", 4),
        ("(ab){3}", 6),
        ("((a{2}b){3}c){2}", 20),
        ("[a-z{}]{7}", 7),
        (r"\{3}", 3),
        (r"\\{3}", 3),
        ("[]]{3}", 3),
        ("[^]]{3}", 3),
        (r"[\]]{3}", 3),
        ("a{0}", 1),
        ("{3}", 0),
        ("a)b{2}", 4),
        ("(a", 1),
        ("[", 1),
        ("a{,3}", 5),
        ("\\", 1),
    ],
)
def test_a_pattern_is_counted_as_if_it_were_written_out(pattern: str, characters: int) -> None:
    assert written_out(pattern) == characters


@pytest.mark.parametrize("value", ["5", True, None, [1], {}])
def test_a_number_of_another_type_is_left_to_the_meta_schema(value: Any) -> None:
    for key in ("multipleOf", "minimum", "minLength", "maxItems"):
        with pytest.raises(SchemaError) as error:
            check({key: value})
        assert error.value.code == "schema_invalid"
