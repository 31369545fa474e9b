"""The shape of a tool: its JSON schema, the function behind it, and how people ask for it.

A `Tool` carries everything that a conversation needs. Wordings are imperative and hold `{parameter}` places (for nested
objects the names of the leaves); the last of the five wordings belongs to the held-out template families. A parameter is
optional exactly when its schema has a default.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from random import Random
from string import Formatter
from typing import Any

from jsonschema import Draft202012Validator

from pipeline.synthesis.tool_values import Kind, Value, shown
from pipeline.synthesis.tool_world import Result, World, chance

Schema = dict[str, Any]


@dataclass(frozen=True)
class Param:
    """One parameter: its JSON schema and the values that requests give it."""

    schema: Schema
    kind: Kind | dict[str, Kind]  # a dict for a nested object: leaf name -> kind


@dataclass(frozen=True, kw_only=True)
class Tool:
    """One tool with its wordings."""

    name: str
    domain: str
    description: str
    params: dict[str, Param]
    wordings: tuple[str, ...]
    run: Callable[..., Result] | None = None  # (World, <the parameters>) -> result; None: an invented tool
    missing: tuple[tuple[str, str], ...] = ()  # (required parameter, wording without it)
    answer: str = "Done."  # the assistant's closing words, with {places} of arguments and result
    fragile: str | None = None  # the parameter that a slip of the pen makes fail
    old_names: dict[str, str] = field(default_factory=dict)  # of a renamed tool: name -> the name that `answer` uses


def param(type_: str | list[str], kind: Kind, about: str = "", enum: tuple[str, ...] = ()) -> Param:
    """A required parameter of a simple type."""
    schema: Schema = {"type": type_}
    if enum:
        schema["enum"] = list(enum)
    if about:
        schema["description"] = about
    return Param(schema, kind)


def optional(required: Param, default: Value) -> Param:
    """The same parameter with a default."""
    return Param({**required.schema, "default": default}, required.kind)


def array(item_type: str, kind: Kind, about: str = "") -> Param:
    """A list of simple values; `kind` draws the whole list."""
    schema: Schema = {"type": "array", "items": {"type": item_type}}
    return Param({**schema, "description": about} if about else schema, kind)


def nested(leaves: dict[str, tuple[str, Kind]]) -> Param:
    """An object whose leaves are all required: name -> (type, kind)."""
    properties = {name: {"type": type_} for name, (type_, _) in leaves.items()}
    schema: Schema = {"type": "object", "properties": properties, "required": list(leaves)}
    return Param(schema, {name: kind for name, (_, kind) in leaves.items()})


def function(tool: Tool) -> dict[str, Any]:
    """The tool in the OpenAI form."""
    properties = {name: parameter.schema for name, parameter in tool.params.items()}
    required = [name for name, schema in properties.items() if "default" not in schema]
    parameters = {"type": "object", "properties": properties, "required": required}
    described = {"name": tool.name, "description": tool.description, "parameters": parameters}
    return {"type": "function", "function": described}


def problems(parameters: Schema, arguments: Any) -> list[str]:
    """What is wrong with the arguments: JSON schema's complaints, and parameters that the schema does not know."""
    found = [error.message for error in Draft202012Validator(parameters).iter_errors(arguments)]
    if isinstance(arguments, dict):
        found += [f"unknown parameter {key!r}" for key in arguments if key not in parameters.get("properties", {})]
    return found


@cache
def places(wording: str) -> tuple[str, ...]:
    """The names in braces, in order."""
    return tuple(name for _, name, _, _ in Formatter().parse(wording) if name)


def draw(tool: Tool, rng: Random) -> dict[str, Value]:
    """A value for every parameter; texts and numbers of one request differ from each other."""
    while True:
        values: dict[str, Value] = {}
        for name, parameter in tool.params.items():
            kind = parameter.kind
            if isinstance(kind, dict):
                values[name] = {leaf: leaf_kind.draw(rng) for leaf, leaf_kind in kind.items()}
            else:
                values[name] = kind.draw(rng)
        leaves = [leaf for value in values.values() for leaf in leaf_values(value) if not isinstance(leaf, bool)]
        if len({str(leaf) for leaf in leaves}) == len(leaves):
            return values


def told(tool: Tool, wording: str, values: dict[str, Value]) -> dict[str, Value]:
    """The arguments that a wording states, in the schema's order; what it leaves out takes its default."""
    named = places(wording)
    return {
        name: values[name]
        for name, parameter in tool.params.items()
        if name in named or (isinstance(parameter.kind, dict) and set(parameter.kind) & set(named))
    }


def words(tool: Tool, wording: str, values: dict[str, Value], rng: Random) -> str:
    """The wording with its places filled."""
    filled: dict[str, str] = {}
    for name, value in values.items():
        kind = tool.params[name].kind
        if isinstance(kind, dict):
            filled |= {leaf: shown(kind[leaf], item, rng) for leaf, item in value.items()}
        else:
            filled[name] = shown(kind, value, rng)
    return wording.format_map(filled)


def leaf_values(value: Value) -> list[Value]:
    """The scalars in a JSON value, in order."""
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in leaf_values(item)]
    if isinstance(value, list):
        return [leaf for item in value for leaf in leaf_values(item)]
    return [value]


def execute(tool: Tool, world: World, arguments: dict[str, Value]) -> Result:
    """Run the tool; an invented one writes into the ledger. `arguments` must fit the schema. Raises ToolError."""
    arguments = {tool.old_names.get(name, name): value for name, value in arguments.items()}
    if tool.run is not None:
        return tool.run(world, **arguments)
    world.ledger.append({"tool": tool.domain, "arguments": arguments})
    noun = tool.domain.split(" ")[1]
    return {f"{noun}_id": f"{noun[0].upper()}{chance(tool.domain, sorted(arguments.items())) % 90000 + 1000}"}
