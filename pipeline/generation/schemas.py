"""A user's JSON schema, before it becomes a grammar: its limits, the objects that it leaves open, a check of what was
said.

    check(schema) -> None        the limits below and those of bounds.py, each a SchemaError that says which
    strict(schema) -> schema     objects that name their properties are closed, numbers without bounds get some
    mistake(schema, text)        what is wrong with a JSON text, numbers read exactly; None for an instance

`strict` only narrows: whatever it allows, the schema allows. Where a schema is an intersection (`allOf`, or `anyOf` or
`$ref` beside properties), closing each part would forbid the other part's names, so the whole is closed over all their
names and the parts stay open. An object that names no property at all may hold any, as JSON Schema says. Unbounded
numbers stay where every reader reads them alike (RFC 8259, 6): a model can say 1e999, which is no number to the program
that reads it.

Not promised: that `strict` keeps every instance of an `anyOf` intersection apart (a name of one branch may stand in
another); that `mistake` tries patterns: the grammar holds them, and `re` can be made to hang.

What one JSON schema may ask for: the sizes from which a small schema becomes a large automaton, read before it is
compiled.

    measures(schema) -> (what, found, most), ...        of the schema itself, not of those inside it

A grammar is compiled to automata, and their size follows numbers that cost a client a few bytes: `multipleOf` has a
state for each remainder (9,999,991 took 38 s and 851 MiB), a range of numbers one for each digit, a repetition one for
each time. Values of a wrong type are passed over here: the meta-schema refuses them.

Not promised: that a schema within these bounds compiles in time. What several of them make together is only known by
compiling (the server does so in a process that it can end, `serve/workshop.py`).
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal, localcontext
from itertools import count
from typing import Any, TypeGuard
from urllib.parse import unquote

from jsonschema import Draft202012Validator, exceptions, validators
from llguidance import LLMatcher

from pipeline.run.errors import InputError

MOST_DIGITS = 40  # of a number that bounds others, written out
MOST_REMAINDERS = 10_000  # of multipleOf: the number times the power of ten that makes it whole
MOST_LEAST = 512  # of minLength, minItems, minProperties: an answer must have so many
MOST_COUNT = 1_000_000  # of maxLength, maxItems, maxProperties
MOST_NAMES = 512  # of an object's properties
MOST_WRITTEN = 2_000  # characters of a pattern whose repetitions are written out

RANGES = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
REPEATED = re.compile(r"\{(\d+)(?:,(\d*))?\}")


def measures(schema: dict[str, Any]) -> Iterator[tuple[str, int, int]]:
    """What is counted, how many there are, and the most that may be."""
    for key in RANGES:
        if _is_number(value := schema.get(key)):
            yield f"the digits of {key}", _digits(value), MOST_DIGITS
    if _is_number(multiple := schema.get("multipleOf")) and _digits(multiple) <= MOST_DIGITS:
        yield "the remainders of multipleOf", _remainders(multiple), MOST_REMAINDERS
    for key, value in schema.items():
        if key in ("minLength", "minItems", "minProperties") and _is_number(value):
            yield key, int(min(value, 10**18)), MOST_LEAST
        if key in ("maxLength", "maxItems", "maxProperties") and _is_number(value):
            yield key, int(min(value, 10**18)), MOST_COUNT
        if key in ("properties", "patternProperties", "required") and isinstance(value, dict | list):
            yield f"the names in {key}", len(value), MOST_NAMES
    named = schema.get("patternProperties")
    for pattern in (schema.get("pattern"), *(named if isinstance(named, dict) else ())):
        if isinstance(pattern, str):
            yield "a pattern with its repetitions written out, in characters", written_out(pattern), MOST_WRITTEN


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value


def _digits(value: float) -> int:
    """Digits of a number without an exponent, of both sides of its point."""
    parts = Decimal(str(value)).as_tuple() if abs(value) < 10**400 else None
    if parts is None or not isinstance(parts.exponent, int):  # infinite, or an integer that takes long to write
        return 10**6
    return max(1, len(parts.digits) + parts.exponent) + max(0, -parts.exponent)


def _remainders(value: float) -> int:
    number = abs(Decimal(str(value))).normalize()
    _, digits, exponent = number.as_tuple()
    assert isinstance(exponent, int)
    whole = int("".join(map(str, digits)))
    return whole * 10 ** max(0, exponent)


def written_out(pattern: str) -> int:
    """About the characters of a pattern whose counted repetitions are written out; those without an end count once."""
    totals, last, place = [0], 0, 0
    while place < len(pattern):
        found = REPEATED.match(pattern, place)
        if found:
            times = max(1, int(found[1][:9]), int((found[2] or "1")[:9]))
            totals[-1] += last * (times - 1)
            last, place = last * times, found.end()
            continue
        character = pattern[place]
        if character == "(":
            totals.append(0)
        elif character == ")" and len(totals) > 1:
            last = totals.pop()
            totals[-1] += last
        else:
            place = _end_of_set(pattern, place) if character == "[" else place + (character == "\\")
            last = 1
            totals[-1] += 1
        place += 1
    return sum(totals)


def _end_of_set(pattern: str, place: int) -> int:
    """The place of the bracket that closes the one at `place`; the last character where none does."""
    place += 1 + pattern.startswith("[^", place)
    first = place
    while place < len(pattern) and (pattern[place] != "]" or place == first):
        place += 1 + (pattern[place] == "\\")
    return min(place, len(pattern) - 1)


# -- schemas -----------------------------------------------------------------------------------------------------------


MAX_BYTES = 64 * 1024  # of a request's schemas as JSON
MAX_DEPTH = 16  # subschemas in subschemas, and containers in a literal
MAX_ALTERNATIVES = 256  # of enum, anyOf and oneOf, in all
MAX_PATTERN = 512  # bytes

MAPS = ("properties", "patternProperties", "$defs", "definitions")  # name -> schema
SINGLES = ("items", "additionalProperties", "additionalItems")  # a schema
LISTS = ("prefixItems", "allOf", "anyOf", "oneOf")  # schemas
LITERALS = ("const", "enum", "default", "examples")
SHAPING = {"properties", "required", "patternProperties", "additionalProperties", "minProperties", "maxProperties"}
LARGEST = 2**53 - 1  # of the integers that a double holds with all before them
EXACT = Context(prec=5000, Emax=MAX_EMAX, Emin=MIN_EMIN, traps=[])  # how a number is read: digits for any answer

MAX_TOGETHER = 8  # patterns that one text must match: llguidance takes minutes to see whether twenty leave anything
MAX_LOOKS = 10_000  # of `mistake`, at references and combinations

PLACE = re.compile(r"^at \d+\(\d+\): failed to compile JSON schema: ")

Schema = Any  # a dict, or true or false
Keyword = Callable[..., Iterable[Any] | None]  # how jsonschema checks one


class SchemaError(InputError):
    """A request asks for output of a form that cannot be promised. `code` says why, in a word for programs."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def check(*schemas: Schema) -> None:
    """The limits on the schemas of one request together. Raises SchemaError, its code `schema_too_large` or
    `schema_invalid`.
    """
    alternatives = 0
    for schema in schemas:
        if not isinstance(schema, dict):
            raise SchemaError("schema_invalid", f"a schema must be a JSON object, found {type(schema).__name__}")
        for node in subschemas(schema):
            alternatives += sum(len(node[key]) for key in ("enum", "anyOf", "oneOf") if isinstance(node.get(key), list))
            named = node.get("patternProperties")
            for pattern in (node.get("pattern"), *(named if isinstance(named, dict) else ())):
                _limit("a pattern, in bytes", len(str(pattern).encode(errors="replace")), MAX_PATTERN)
            for what, found, most in measures(node):
                _limit(what, found, most)
    _limit("the alternatives of enum, anyOf and oneOf", alternatives, MAX_ALTERNATIVES)
    try:
        size = sum(len(json.dumps(schema, ensure_ascii=False, allow_nan=False).encode()) for schema in schemas)
    except (ValueError, TypeError, RecursionError) as error:
        raise SchemaError("schema_invalid", f"a schema must be strict JSON: {error}") from error
    _limit("the size of the schemas, in bytes", size, MAX_BYTES)
    for schema in schemas:
        try:
            Draft202012Validator.check_schema(schema)
        except exceptions.SchemaError as error:
            place = "/".join(map(str, error.absolute_path))
            message = f"not a JSON schema of draft 2020-12, at /{place}: {error.message:.200}"
            raise SchemaError("schema_invalid", message) from error


def _limit(what: str, found: int, most: int) -> None:
    if found > most:
        raise SchemaError("schema_too_large", f"{what}: found {found}, the limit is {most}; simplify the schema")


def subschemas(schema: Schema) -> Iterator[dict[str, Any]]:
    """Every schema inside a schema, itself first; not what `enum` or `default` hold. Raises SchemaError beyond
    MAX_DEPTH.
    """
    stack: list[tuple[Schema, int]] = [(schema, 1)]
    while stack:
        node, depth = stack.pop()
        if not isinstance(node, dict):
            continue
        _limit("the depth of the schema", depth, MAX_DEPTH)
        for key in LITERALS:
            _limit(f"the depth of the schema and its {key}", depth + _depth(node.get(key)), MAX_DEPTH)
        yield node
        stack += [(inner, depth + 1) for inner in _inside(node)]


def _inside(node: dict[str, Any]) -> Iterator[Schema]:
    """The schemas directly inside a schema; what is of the wrong type holds none."""
    for key in MAPS:
        yield from node[key].values() if isinstance(node.get(key), dict) else ()
    for key in LISTS:
        yield from node[key] if isinstance(node.get(key), list) else ()
    yield from (node[key] for key in SINGLES if key in node)


def _depth(value: Any) -> int:
    """How deep containers stand in a literal, counted no further than the limit."""
    layer, depth = [value], 0
    while depth <= MAX_DEPTH and (layer := [one for one in layer if isinstance(one, dict | list)]):
        layer = [inner for one in layer for inner in (one.values() if isinstance(one, dict) else one)]
        depth += 1
    return depth


def strict(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with its objects closed (see the module). Raises SchemaError for a `$ref` that leads nowhere."""
    return _Closing(schema).whole()


class _Closing:
    """One schema being closed; a `$ref` inside an intersection leads to a copy of its target that stays open."""

    def __init__(self, root: dict[str, Any]) -> None:
        self.root = {key: value for key, value in root.items() if key != "x-guidance"}  # the grammar's own options
        self.copies: dict[str, Schema] = {}  # pointer -> the target, open
        self.label = "open"  # of their names
        while any(name.startswith(self.label) for name in root.get("$defs", {})):
            self.label += "_"

    def whole(self) -> dict[str, Any]:
        """The root closed, with the open copies that it needs among its definitions."""
        closed = self.close(self.root)
        if self.copies:
            copies = {f"{self.label}{number}": copy for number, copy in enumerate(self.copies.values())}
            closed["$defs"] = closed.get("$defs", {}) | copies
        return closed

    def close(self, node: Schema, part: bool = False) -> Schema:
        """One schema; `part` says that it is a part of an intersection, whose whole is closed instead."""
        if not isinstance(node, dict):
            return node
        parts = len(node.get("allOf", ())) + sum(key in node for key in ("anyOf", "oneOf", "$ref"))
        open_parts = part or parts + bool(SHAPING & set(node)) > 1
        out = _bounded({key: self._value(key, value, open_parts) for key, value in node.items()})
        if part or "additionalProperties" in node or (parts == 1 and not open_parts):
            return out
        names = self.names(node, set())
        if names is None or not (names or {"properties", "patternProperties"} & set(node)):
            return out
        properties = out.get("properties", {})
        first = {"properties": properties | {name: True for name in names if name not in properties}}
        return {**first, "additionalProperties": False, **{k: v for k, v in out.items() if k != "properties"}}

    def _value(self, key: str, value: Any, open_parts: bool) -> Any:
        if key in MAPS:
            return {name: self.close(inner) for name, inner in value.items()}
        if key in SINGLES:
            return self.close(value)
        if key in LISTS:
            return [self.close(inner, open_parts and key != "prefixItems") for inner in value]
        if key == "$ref" and open_parts:
            if value not in self.copies:
                self.copies[value] = None  # so that a schema that refers to itself comes to an end
                self.copies[value] = self.close(self.target(value), part=True)
            return f"#/$defs/{self.label}{[*self.copies].index(value)}"
        return value

    def names(self, node: Schema, seen: set[str]) -> dict[str, None] | None:
        """The names that a schema and its parts give to properties, in order; None where a part says itself what else
        may stand.

        `seen` holds the references that were followed: each once, or a chain of doubled ones would take for ever.
        """
        if not isinstance(node, dict):
            return {}
        found = dict.fromkeys([*node.get("properties", {}), *node.get("required", ())])
        for literal in (node.get("const"), *node.get("enum", ())):
            found |= dict.fromkeys(literal if isinstance(literal, dict) else ())
        parts = [part for key in ("allOf", "anyOf", "oneOf") for part in node.get(key, ())]
        if (pointer := node.get("$ref")) is not None and pointer not in seen:
            seen.add(pointer)
            parts.append(self.target(pointer))
        for part in parts:
            names = self.names(part, seen)
            if names is None or (isinstance(part, dict) and {"patternProperties", "additionalProperties"} & set(part)):
                return None
            found |= names
        return found

    def target(self, pointer: str) -> Schema:
        """What a `$ref` leads to. Raises SchemaError."""
        node: Any = self.root
        steps = unquote(pointer.removeprefix("#")).split("/")
        if not pointer.startswith("#") or steps[0]:
            raise SchemaError("schema_refused", f"$ref {pointer!r}: only a JSON pointer inside the schema, #/...")
        for step in steps[1:]:
            key = step.replace("~1", "/").replace("~0", "~")
            node = node.get(key) if isinstance(node, Mapping) else None
            if node is None:
                raise SchemaError("schema_refused", f"$ref {pointer!r} leads nowhere: there is no {key!r}")
        return node


def _bounded(node: dict[str, Any]) -> dict[str, Any]:
    """A schema of numbers with the bounds that it lacks, as far as its own leave room for them."""
    kinds = node.get("type", ())
    if not {"number", "integer"} & set([kinds] if isinstance(kinds, str) else kinds) or {"const", "enum"} & set(node):
        return node
    lower = max(node.get("minimum", -LARGEST), node.get("exclusiveMinimum", -LARGEST))
    upper = min(node.get("maximum", LARGEST), node.get("exclusiveMaximum", LARGEST))
    missing = {}
    if not {"minimum", "exclusiveMinimum"} & set(node) and upper > -LARGEST:
        missing["minimum"] = -LARGEST
    if not {"maximum", "exclusiveMaximum"} & set(node) and lower < LARGEST:
        missing["maximum"] = LARGEST
    return {**node, **missing}


def refuse(schema: dict[str, Any], closed: dict[str, Any]) -> None:
    """What the grammar of `closed` would take and could not hold. Raises SchemaError `schema_refused`.

    Names that are not listed may repeat in the grammar's objects, and a repeated name counts once. The branches of
    `oneOf` must exclude each other as the user wrote them: closed ones may do so where an instance of one is an
    instance of both.
    """
    known: dict[str, int] = {}
    for node in subschemas(closed):
        least = node.get("minProperties", 0)
        if least > 1 + len(node.get("required", ())) and node.get("additionalProperties") is not False:
            raise SchemaError("schema_refused", f"minProperties {least} is not supported for names that are not listed")
        if "$ref" in node and not node["$ref"].startswith("#"):
            raise SchemaError("schema_refused", f"$ref {node['$ref']!r}: only a JSON pointer inside the schema, #/...")
        _limit("the patterns that may meet in one text", _together(closed, node, known), MAX_TOGETHER)
    if any("oneOf" in node for node in subschemas(closed)):
        bare = {key: value for key, value in schema.items() if key != "x-guidance"}
        grammar = LLMatcher.grammar_from_json_schema(json.dumps(bare))
        wrong, problems = LLMatcher.validate_grammar_with_warnings(grammar)
        if wrong:
            raise SchemaError("schema_refused", f"the schema cannot be promised: {reason(problems[0])}")


def _together(root: dict[str, Any], node: Schema, known: dict[str, int]) -> int:
    """How many patterns and formats may meet in one text, counted generously: any of one part with any of another.

    `known` holds what was found behind references.
    """
    if not isinstance(node, dict):
        return 0
    values = [one for key in MAPS[:2] for one in node.get(key, {}).values()] + [node.get(key) for key in SINGLES]
    values += node.get("prefixItems", [])
    most = ("pattern" in node) + ("format" in node) + max((_together(root, one, known) for one in values), default=0)
    most += sum(_together(root, part, known) for part in node.get("allOf", ()))
    most += sum(
        max((_together(root, part, known) for part in node.get(key, ())), default=0) for key in ("anyOf", "oneOf")
    )
    if (pointer := node.get("$ref")) is not None:
        if pointer not in known:
            known[pointer] = 0
            known[pointer] = _together(root, _Closing(root).target(pointer), known)
        most += known[pointer]
    return most


def reason(problem: str) -> str:
    """The first line of what llguidance says, without the place in our own grammar and the switches of its own."""
    line = problem.strip().split("\n")[0]
    return PLACE.sub("", line).split(". Enable ")[0][:300]


def mistake(schema: dict[str, Any], text: str) -> str | None:
    """What is wrong with `text` as an instance of the schema, or None. Numbers are compared as written, not as floats.

    A second opinion on what the grammar held, and no more: it looks at MAX_LOOKS subschemas, since a small schema can
    ask for more than a lifetime of them, and no deeper than Python's stack.
    """
    with localcontext(EXACT) as context:
        try:
            value = json.loads(text, parse_float=context.create_decimal)
            exact = json.loads(json.dumps(schema), parse_float=context.create_decimal)
        except (ValueError, RecursionError) as error:
            return f"not JSON: {error}"
        looks = count()
        counted = {
            key: _counted(Draft202012Validator.VALIDATORS[key], looks) for key in ("$ref", "allOf", "anyOf", "oneOf")
        }
        validator = validators.extend(Draft202012Validator, counted | UNTRIED)(exact)
        try:
            found = next(validator.iter_errors(value), None)
        except (_Enough, RecursionError):
            return None
    return found and found.message


class _Enough(Exception):
    """MAX_LOOKS are done."""


def _counted(keyword: Keyword, looks: Iterator[int]) -> Keyword:
    """A keyword's check that gives up with the last of the looks."""

    def look(*arguments: Any) -> Iterator[Any]:
        if next(looks) >= MAX_LOOKS:
            raise _Enough
        yield from keyword(*arguments) or ()

    return look


def _unlisted(validator: Any, allowed: Any, instance: Any, schema: dict[str, Any]) -> Iterator[Any]:
    """`additionalProperties`, where no pattern says which names are meant."""
    if "patternProperties" not in schema:
        yield from Draft202012Validator.VALIDATORS["additionalProperties"](validator, allowed, instance, schema)


def _untried(*_: Any) -> tuple[()]:
    return ()


UNTRIED = {"pattern": _untried, "patternProperties": _untried, "additionalProperties": _unlisted}
