"""Is a call right? The rules of the Berkeley Function Calling Leaderboard (its AST checker for Python, v3).

After ShishirPatil/gorilla, bfcl_eval/eval_checker/ast_eval/ast_checker.py. Truth is a list of {name: {parameter:
[accepted values]}}, where "" says that the parameter may be absent; a nested object is a dict of such lists. Rules:
equal number of calls; equal name; required parameters present, none unknown; types match (an int passes for a float,
nested one level deep); a value of another type passes where the truth has that type; strings are compared in lower
case without spaces and `,./-_*^`, with one kind of quote; lists in order, objects by key; parallel calls in any order.

Two deviations, both in favour of right answers: parallel calls are matched by maximum bipartite matching (the original
takes the first that fits, in order; `Check.greedy` says what it would have found), and an int passes for a float inside
a list too. Not promised: types deeper than one level; Java and JavaScript.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Value = Any
Call = dict[str, Any]  # {"name": str, "arguments": dict}
Truth = dict[str, dict[str, list[Value]]]
TYPES: dict[str, type] = {
    "string": str,
    "integer": int,
    "number": float,
    "boolean": bool,
    "array": list,
    "object": dict,
}
BFCL_TYPES = {"dict": "object", "float": "number", "tuple": "array"}  # "any" becomes the empty schema


@dataclass(frozen=True)
class Check:
    """The verdict on one turn; `error` is "" or the first rule broken, `detail` says it in words."""

    valid: bool
    error: str = ""
    detail: str = ""
    greedy: bool = True  # what the original's order of matching finds

    @property
    def greedy_disagrees(self) -> bool:
        return self.valid != self.greedy


RIGHT = Check(True)


def check(functions: Sequence[dict[str, Any]], calls: Sequence[Call], truth: Sequence[Truth]) -> Check:
    """Judge the calls of one turn. `functions` hold {name, parameters} (JSON schema, or BFCL's own type names)."""
    if len(calls) != len(truth):
        return _wrong("wrong_count", f"expected {len(truth)} calls, found {len(calls)}")
    named = {function["name"]: function for function in functions}
    verdicts = [[_call(named, call, right) for call in calls] for right in truth]
    fits = [[verdict.valid for verdict in row] for row in verdicts]
    greedy = _greedy(fits)
    if matching(fits) == len(truth):
        return Check(True, greedy=greedy)
    if len(truth) == 1:
        return verdicts[0][0]
    return _wrong("cannot_find_match", "; ".join(row[0].detail for row in verdicts if not any(v.valid for v in row)))


def matching(fits: list[list[bool]]) -> int:
    """Size of a maximum matching between rows and columns (Kuhn's augmenting paths)."""
    row_of: dict[int, int] = {}

    def place(row: int, tried: set[int]) -> bool:
        for column, fit in enumerate(fits[row]):
            if fit and column not in tried:
                tried.add(column)
                if column not in row_of or place(row_of[column], tried):
                    row_of[column] = row
                    return True
        return False

    return sum(place(row, set()) for row in range(len(fits)))


def _greedy(fits: list[list[bool]]) -> bool:
    """The original: each truth in turn takes the first free call that fits."""
    taken: set[int] = set()
    for row in fits:
        free = next((column for column, fit in enumerate(row) if fit and column not in taken), None)
        if free is None:
            return False
        taken.add(free)
    return True


def check_call(function: dict[str, Any], arguments: dict[str, Value], accepted: dict[str, list[Value]]) -> Check:
    """The arguments of a call with the right name."""
    parameters = function.get("parameters", {})
    properties = parameters.get("properties", {})
    for name in parameters.get("required", []):
        if name not in arguments:
            return _wrong("missing_required", f"required parameter {name!r} is missing")
    for name, value in arguments.items():
        if name not in properties or name not in accepted:
            return _wrong("unexpected_param", f"parameter {name!r} is unknown")
        verdict = _parameter(name, value, properties[name], accepted[name])
        if not verdict.valid:
            return verdict
    for name, values in accepted.items():
        if name not in arguments and "" not in values:
            return _wrong("missing_optional", f"parameter {name!r} is missing")
    return RIGHT


def standardize(text: str) -> str:
    """What is left of a string to compare: no spaces, no `,./-_*^`, lower case, double quotes."""
    return re.sub(r"[ \,\.\/\-\_\*\^]", "", text).lower().replace("'", '"')


def _wrong(error: str, detail: str) -> Check:
    return Check(False, error, detail, greedy=False)


def _call(named: dict[str, dict[str, Any]], call: Call, right: Truth) -> Check:
    name = next(iter(right))
    if call["name"] != name:
        return _wrong("wrong_func_name", f"expected {name}, found {call['name']}")
    if not isinstance(call["arguments"], dict):
        return _wrong("wrong_type", f"the arguments of {name} are no object")
    return check_call(named.get(name, {}), call["arguments"], right[name])


def _type(schema: dict[str, Any]) -> str | None:
    """The JSON type of a schema, the first one that is not null; None for any."""
    types = schema.get("type")
    name = next((t for t in types if t != "null"), None) if isinstance(types, list) else types
    return BFCL_TYPES.get(name, name) if name in TYPES or name in BFCL_TYPES else None


def _parameter(name: str, value: Value, schema: dict[str, Any], accepted: list[Value]) -> Check:
    type_ = _type(schema)
    nested = _type(schema.get("items", {})) if type_ == "array" else None
    if value is None:
        return RIGHT if None in accepted else _value_error("null", name, value, accepted)
    if type_ is None:  # any type: compare by what was given
        type_ = next((t for t, python in TYPES.items() if type(value) is python), "string")
    if type_ == "number" and type(value) is int:
        value = float(value)
    fits, is_variable = _check_type(value, accepted, TYPES[type_], TYPES[nested] if nested else None)
    if not fits:
        return _wrong("wrong_type", f"parameter {name!r}: expected {schema.get('type')}, found {value!r}")
    if not is_variable:
        if type_ == "object":
            return _object(name, value, accepted)
        if type_ == "array" and nested == "object":
            return _objects(name, value, accepted)
        if type_ == "string":
            right = standardize(value) in [standardize(a) for a in accepted if isinstance(a, str)]
            return RIGHT if right else _value_error("string", name, value, accepted)
        if type_ == "array":
            # As in the original, "" among the accepted lists stands for the empty list.
            right = _standard_list(value) in [_standard_list(a) for a in accepted if isinstance(a, list | str)]
            return RIGHT if right else _value_error("list", name, value, accepted)
    return RIGHT if value in accepted else _value_error("other", name, value, accepted)


def _check_type(value: Value, accepted: list[Value], expected: type, nested: type | None) -> tuple[bool, bool]:
    """(does the type fit, is it another type than the schema's: a "variable" in the original's words)."""
    answer = next((type(a) for a in accepted if a != "" and a is not None), None)
    if type(value) is expected:
        if nested is None:
            return True, answer is not None and answer is not expected
        for option in accepted:
            if not isinstance(option, list) or all(_nested_type(v, option, nested) for v in value):
                return True, answer is not None and answer is not expected
        return False, False
    return answer is not None and type(value) is answer, True


def _nested_type(value: Value, option: list[Value], nested: type) -> bool:
    value = float(value) if nested is float and type(value) is int else value
    return _check_type(value, option, nested, None)[0]


def _standard_list(values: list[Value] | str) -> list[Value]:
    return [standardize(value) if isinstance(value, str) else value for value in values]


def _object(name: str, value: dict[str, Value], accepted: list[Value]) -> Check:
    verdict = _value_error("object", name, value, accepted)
    for option in accepted:
        if not isinstance(option, dict):  # "" or null
            continue
        verdict = _object_fits(name, value, option)
        if verdict.valid:
            return verdict
    return verdict


def _object_fits(name: str, value: Value, option: dict[str, list[Value]]) -> Check:
    if not isinstance(value, dict):
        return _value_error("object", name, value, [option])
    for key, item in value.items():
        if key not in option:
            return _wrong("value_error:dict_key", f"parameter {name!r}: unknown key {key!r}")
        standard = standardize(item) if isinstance(item, str) else item
        if standard not in [standardize(a) if isinstance(a, str) else a for a in option[key]]:
            return _wrong("value_error:dict_value", f"parameter {name!r}, key {key!r}: found {item!r}")
    for key, values in option.items():
        if key not in value and "" not in values:
            return _wrong("value_error:dict_key", f"parameter {name!r}: key {key!r} is missing")
    return RIGHT


def _objects(name: str, value: list[Value], accepted: list[Value]) -> Check:
    verdict = _value_error("list_dict", name, value, accepted)
    for option in accepted:
        if not isinstance(option, list | str):
            continue
        if len(value) != len(option):  # as in the original, "" stands for the empty list
            verdict = _wrong("value_error:list_dict_count", f"parameter {name!r}: expected {len(option)} objects")
            continue
        verdicts = [_object(name, item, [right]) for item, right in zip(value, option, strict=True)]
        verdict = next((v for v in verdicts if not v.valid), RIGHT)
        if verdict.valid:
            return verdict
    return verdict


def _value_error(kind: str, name: str, value: Value, accepted: list[Value]) -> Check:
    return _wrong(f"value_error:{kind}", f"parameter {name!r}: found {value!r}, accepted {accepted!r:.200}")
