"""Convert tools and tool calls from the formats of public datasets to the OpenAI form of `records`.

In: tool lists (OpenAI, bare functions, xLAM's flat `{"city": {"type": "str, optional"}}`, BFCL's `"type": "dict"`), and
calls as JSON, as Glaive's `{"name": "f", "arguments": '{"a": 1}'}` (an object in single quotes), or as ToolACE's
`[Name of it(a=1, b=[True]), g()]`. Out: JSON Schema and (name, arguments) pairs. Python is only parsed, never run.
Unreadable input raises `RowError`, which names the field.

Not guaranteed: that arguments match the tool's schema. Public datasets often violate their own schemas; a caller that
needs valid arguments must check them.
"""

import ast
import json
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn

from pipeline.run.errors import DataError
from pipeline.run.types import JsonObject


class RowError(DataError):
    """A row that cannot be read: `field` is the location, `reason` says what was expected and found."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason


@dataclass(frozen=True)
class Call:
    """One tool call: the name as written, the arguments as a JSON object."""

    name: str
    arguments: JsonObject


def from_json(text: str, field: str) -> object:
    """Parse strict JSON: no NaN or Infinity, which other parsers reject."""
    try:
        return json.loads(text, parse_constant=refuse_constant)
    except RecursionError as error:
        raise RowError(field, "JSON nested too deeply") from error
    except ValueError as error:  # JSONDecodeError, and integers of more than 4,300 digits
        raise RowError(field, f"not JSON ({error})") from error


def to_json(value: object, field: str) -> str:
    """JSON text in the chat format's style: `", "`, `": "`, no ASCII escapes."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RowError(field, f"not JSON ({error})") from error


def refuse_constant(name: str) -> NoReturn:
    """Raise ValueError for NaN and Infinity: the `parse_constant` of a strict JSON parser."""
    raise ValueError(f"{name} is not JSON")


# --- tools -----------------------------------------------------------------------------------------------------------

_JSON_TYPES = {
    **dict.fromkeys(("str", "string", "text", "char"), "string"),
    **dict.fromkeys(("int", "integer", "long"), "integer"),
    **dict.fromkeys(("float", "number", "double"), "number"),
    **dict.fromkeys(("bool", "boolean"), "boolean"),
    **dict.fromkeys(("list", "array", "tuple", "set", "sequence", "iterable", "arraylist"), "array"),
    **dict.fromkeys(("dict", "object", "mapping", "hashmap"), "object"),
    **dict.fromkeys(("none", "null", "nonetype"), "null"),
}


def tools(value: object, field: str = "tools") -> list[JsonObject]:
    """A tool list (or its JSON text, or one tool) as `[{"type": "function", "function": {...}}]`; [] for no value."""
    if isinstance(value, str):
        value = from_json(value, field) if value.strip() else []
    if value is None:
        return []
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, list):
        raise RowError(field, f"expected a list of tools, found {type(value).__name__}")
    return [_tool(entry, f"{field}[{index}]") for index, entry in enumerate(value)]


def _tool(entry: object, field: str) -> JsonObject:
    if isinstance(entry, str):
        entry = from_json(entry, field)
    if isinstance(entry, dict) and isinstance(entry.get("function"), dict):
        entry = entry["function"]
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str) or not entry["name"].strip():
        raise RowError(field, "expected an object with a `name`")
    description = entry.get("description")
    parameters = entry.get("parameters")
    if not isinstance(parameters, dict):
        parameters = {}
    return {
        "type": "function",
        "function": {
            "name": entry["name"],
            "description": description if isinstance(description, str) else "",
            "parameters": object_schema(parameters),
        },
    }


def object_schema(parameters: JsonObject) -> JsonObject:
    """Parameters in any dialect -> a JSON Schema of type object."""
    is_schema = isinstance(parameters.get("properties"), dict) or isinstance(parameters.get("type"), str)
    if is_schema or not parameters:
        return {**_schema(parameters), "type": "object", "properties": _properties(parameters.get("properties"))}
    # xLAM: parameter -> {type: "str, optional", description, default}; a default also makes a parameter optional,
    # because the dataset's answers omit such parameters.
    properties: JsonObject = {}
    required: list[str] = []
    for name, parameter in parameters.items():
        parameter = parameter if isinstance(parameter, dict) else {"type": parameter}
        schema, optional = python_type(parameter.get("type"))
        if isinstance(parameter.get("description"), str):
            schema["description"] = parameter["description"]
        if parameter.get("default") not in (None, ""):
            schema["default"] = parameter["default"]
        properties[name] = schema
        if not optional and "default" not in parameter:
            required.append(name)
    schema = {"type": "object", "properties": properties}
    return {**schema, "required": required} if required else schema


def _properties(value: object) -> JsonObject:
    if not isinstance(value, dict):
        return {}
    return {name: _schema(schema) if isinstance(schema, dict) else {} for name, schema in value.items()}


def _schema(schema: JsonObject) -> JsonObject:
    """A JSON Schema with the type names of BFCL and ToolACE (`dict`, `float`, `tuple`, `any`) replaced at any depth."""
    clean: JsonObject = {}
    for key, value in schema.items():
        if key == "type":
            if isinstance(value, str):
                clean.update(python_type(value)[0])
            elif isinstance(value, list) and all(isinstance(word, str) for word in value):
                clean["type"] = [_JSON_TYPES.get(word.lower(), "string") for word in value]
        elif key == "properties":
            clean[key] = _properties(value)
        elif key in ("items", "additionalProperties") and isinstance(value, dict):
            clean[key] = _schema(value)
        elif key in ("anyOf", "oneOf", "allOf") and isinstance(value, list):
            clean[key] = [_schema(option) for option in value if isinstance(option, dict)]
        elif key == "required":  # some datasets have null, true or lists of non-strings here
            if isinstance(value, list) and value and all(isinstance(name, str) for name in value):
                clean[key] = value
        elif value is not None:
            clean[key] = value
    return clean


def python_type(text: object) -> tuple[JsonObject, bool]:
    """`"List[int], optional"` -> `({"type": "array", "items": {"type": "integer"}}, True)`; unknown types give {}."""
    if not isinstance(text, str) or not text.strip():
        return {}, False
    try:
        node = _expression(text.strip())
    except RowError:
        return {}, "optional" in text
    optional = False
    if isinstance(node, ast.Tuple):  # "str, optional"
        optional = any(isinstance(part, ast.Name) and part.id == "optional" for part in node.elts[1:])
        node = node.elts[0] if node.elts else node
    return _type_schema(node), optional or _base_name(node) == "optional"


def _base_name(node: ast.expr) -> str:
    if isinstance(node, ast.Subscript):
        node = node.value
    if isinstance(node, ast.Attribute):  # typing.List
        return node.attr.lower()
    return node.id.lower() if isinstance(node, ast.Name) else ""


def _type_schema(node: ast.expr) -> JsonObject:
    if isinstance(node, ast.Constant) and node.value is None:
        return {"type": "null"}
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):  # int | str
        return _union([_type_schema(node.left), _type_schema(node.right)])
    base = _base_name(node)
    parts: list[ast.expr] = []
    if isinstance(node, ast.Subscript):
        parts = list(node.slice.elts) if isinstance(node.slice, ast.Tuple) else [node.slice]
    if base == "union":
        return _union([_type_schema(part) for part in parts])
    if base == "optional":
        return _union([*map(_type_schema, parts), {"type": "null"}])
    if base == "literal":
        return {"enum": [part.value for part in parts if isinstance(part, ast.Constant)]}
    if base not in _JSON_TYPES:
        return {}
    schema: JsonObject = {"type": _JSON_TYPES[base]}
    if schema["type"] == "array" and parts:
        items = _union([_type_schema(part) for part in parts if not isinstance(part, ast.Constant)])
        return {**schema, "items": items} if items else schema
    return schema


def _union(options: list[JsonObject]) -> JsonObject:
    """One schema that accepts any of the options; `integer` is omitted if `number` is present."""
    if any(not option for option in options):
        return {}
    distinct = [option for index, option in enumerate(options) if option not in options[:index]]
    if {"type": "number"} in distinct:
        distinct = [option for option in distinct if option != {"type": "integer"}]
    if not distinct:
        return {}
    return distinct[0] if len(distinct) == 1 else {"anyOf": distinct}


# --- calls -----------------------------------------------------------------------------------------------------------


def json_calls(value: object, field: str) -> list[Call]:
    """One call or a list, as JSON text or values: `{"name", "arguments" | "parameters"}`, optionally OpenAI-wrapped."""
    if isinstance(value, str):
        value = from_json(value, field)
    entries = value if isinstance(value, list) else [value]
    return [
        _json_call(entry, f"{field}[{index}]" if len(entries) > 1 else field) for index, entry in enumerate(entries)
    ]


def _json_call(entry: object, field: str) -> Call:
    if isinstance(entry, dict) and isinstance(entry.get("function"), dict):
        entry = entry["function"]
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str) or not entry["name"].strip():
        raise RowError(field, 'expected a call {"name": ..., "arguments": {...}}')
    arguments = entry.get("arguments", entry.get("parameters"))
    if isinstance(arguments, str):
        arguments = from_json(arguments, f"{field}.arguments") if arguments.strip() else {}
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise RowError(f"{field}.arguments", f"expected an object, found {type(arguments).__name__}")
    return Call(entry["name"], arguments)


_SINGLE_QUOTED = re.compile(r"""\{\s*"name"\s*:\s*"([^"]+)"\s*,\s*"arguments"\s*:\s*'(.*)'\s*\}""", re.DOTALL)


def glaive_call(text: str, field: str) -> Call:
    """The JSON after `<functioncall>`; its arguments may be a JSON object in single quotes, which is not JSON."""
    text = text.strip()
    match = _SINGLE_QUOTED.fullmatch(text)
    if match is None:
        return _json_call(from_json(text, field), field)
    arguments = match.group(2)
    try:
        value = from_json(arguments, f"{field}.arguments")
    except RowError:  # an inner apostrophe was escaped for the outer quotes: \'
        value = from_json(arguments.replace("\\'", "'"), f"{field}.arguments")
    return _json_call({"name": match.group(1), "arguments": value}, field)


_BRACKETED = re.compile(r"""\[\s*[^\[\](){}'"=,]+\(.*\)\s*\]""", re.DOTALL)


def bracket_calls(text: str, field: str) -> list[Call]:
    """ToolACE's `[f(a=1), Market Trends API(x="y")]`; [] if the text has a different form. Names may contain spaces."""
    text = text.strip()
    if not _BRACKETED.fullmatch(text):
        return []
    calls: list[Call] = []
    position = 1
    while True:
        parenthesis = text.find("(", position)
        name = text[position:parenthesis].strip(" ,\n\t\r")
        if parenthesis < 0 or not name:
            break
        arguments, position = _arguments(text, parenthesis + 1, field)
        calls.append(Call(name, arguments))
    if text[position:].strip() != "]":
        raise RowError(
            field, f"expected `[name(key=value), ...]`, found {text[position : position + 40]!r} after a call"
        )
    return calls


def _arguments(text: str, start: int, field: str) -> tuple[JsonObject, int]:
    """`key=value, ...)` from `start` -> the arguments and the position after the closing parenthesis."""
    arguments: JsonObject = {}
    piece_start = start
    for position, character, depth in _top_level(text, start):
        if depth < 0 or (depth == 0 and character == ","):
            piece = text[piece_start:position]
            if piece.strip():
                key, equals, value = piece.partition("=")
                if not equals or not key.strip():
                    raise RowError(field, f"expected key=value, found {piece.strip()[:40]!r}")
                arguments[key.strip().strip("'\"")] = python_value(value, field)
            piece_start = position + 1
        if depth < 0:
            return arguments, position + 1
    raise RowError(field, "unclosed call: `)` is missing")


def _top_level(text: str, start: int) -> Iterator[tuple[int, str, int]]:
    """Each character outside quotes with the bracket depth after it; an unmatched closing bracket has depth -1."""
    depth, quote, position = 0, "", start
    while position < len(text):
        character = text[position]
        if quote:
            if character == "\\":
                position += 1
            elif character == quote:
                quote = ""
        elif character in "'\"":
            quote = character
        else:
            depth += (character in "([{") - (character in ")]}")
            yield position, character, depth
        position += 1


def python_value(text: str, field: str) -> object:
    """A Python literal as a JSON value; also accepts `true`, `false`, `null`; tuples and sets become lists."""
    return _json_value(_expression(text.strip()), field)


def _json_value(node: ast.expr, field: str) -> object:
    match node:
        case ast.Constant(value=value) if value is None or isinstance(value, str | int | float):
            return value
        case ast.List(elts=parts) | ast.Tuple(elts=parts) | ast.Set(elts=parts):
            return [_json_value(part, field) for part in parts]
        case ast.Dict(keys=keys, values=values) if all(isinstance(key, ast.Constant) for key in keys):
            names = [key.value for key in keys if isinstance(key, ast.Constant)]
            return {str(name): _json_value(value, field) for name, value in zip(names, values, strict=True)}
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=value)) if isinstance(value, int | float):
            return -value
        case ast.Name(id=name) if name in ("true", "false", "null"):
            return {"true": True, "false": False, "null": None}[name]
    raise RowError(field, f"expected a literal value, found {ast.dump(node)[:60]}")


def _expression(text: str) -> ast.expr:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the data may contain invalid escapes such as "\d"
            return ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise RowError("value", f"expected a Python literal, found {text[:40]!r}") from error
