"""Calls written as Python: type names become JSON Schema, bracket calls give back their arguments."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.ingest import tool_calls


@pytest.mark.parametrize(
    ("written", "schema", "optional"),
    [
        ("str", {"type": "string"}, False),
        ("int, optional", {"type": "integer"}, True),
        ("Optional[str]", {"anyOf": [{"type": "string"}, {"type": "null"}]}, True),
        (
            "typing.List[Tuple[int, float]]",
            {"type": "array", "items": {"type": "array", "items": {"type": "number"}}},
            False,
        ),
        ("Dict[str, int]", {"type": "object"}, False),
        ("int | str", {"anyOf": [{"type": "integer"}, {"type": "string"}]}, False),
        ("Literal['a', 'b']", {"enum": ["a", "b"]}, False),
        ("Callable[[float], float]", {}, False),
        ("str or int, optional", {}, True),
        (None, {}, False),
    ],
)
def test_python_types_become_json_schema(written: Any, schema: dict[str, Any], optional: bool) -> None:
    assert tool_calls.python_type(written) == (schema, optional)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=40)
@given(st.dictionaries(st.from_regex(r"[a-z]\w{0,5}", fullmatch=True), json_values, max_size=3))
def test_bracket_calls_give_back_what_was_written(arguments: dict[str, Any]) -> None:
    finite = json.loads(json.dumps(arguments).replace("Infinity", "0"))
    written = ", ".join(f"{name}={value!r}" for name, value in finite.items())
    assert tool_calls.bracket_calls(f"[Do it({written}), g()]", "x") == [
        tool_calls.Call("Do it", finite),
        tool_calls.Call("g", {}),
    ]
