"""User-supplied JSON schemas, before they become grammars: limits, closed objects, and the validation of an answer.

    check(schema) -> None        raises SchemaError naming the exceeded limit
    strict(schema) -> schema     objects with named properties are closed, numbers without bounds get bounds
    refuse(schema, closed)       raises SchemaError for anything the closed schema's grammar cannot guarantee
    mistake(schema, text)        the first error in a JSON text, comparing numbers exactly; None if it is valid

**Limits.** A grammar is compiled into automata, and a few bytes from a client can make them huge: `multipleOf` has a
state for each remainder (9,999,991 took 38 s and 851 MiB), a range of numbers has one for each digit, and a repetition
has one for each repeat. `measures` computes these sizes before compilation. It ignores values of the wrong type: the
meta-schema rejects them.

**Closing.** `strict` only narrows: the original schema also allows everything that the result allows. If a schema is an
intersection (`allOf`, or `anyOf` or `$ref` next to properties), closing each part would forbid the other parts' names,
so the intersection is closed over the names of all parts, and the parts stay open. An object without named properties
may have any properties, as in JSON Schema. Unbounded numbers are limited to the range that all parsers agree on (RFC
8259, section 6): a model could write 1e999, which the program reading it cannot represent.

Not guaranteed: that a schema within the limits compiles in time, as its total size is known only after compiling (the
server compiles in a process that it can kill, `serve/workshop.py`); that `strict` separates the branches of an `anyOf`
intersection (a name from one branch may occur in another); that `mistake` checks patterns (the grammar enforces them,
and `re` can be made to hang).
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal, localcontext
from itertools import count
from typing import TypeGuard
from urllib.parse import unquote

from jsonschema import Draft202012Validator, exceptions, validators
from llguidance import LLMatcher

from pipeline.run.errors import InputError
from pipeline.run.types import JsonObject

MAX_BYTES = 64 * 1024  # of a request's schemas as JSON
MAX_DEPTH = 16  # of nested subschemas, including nested containers in a literal
MAX_ALTERNATIVES = 256  # of enum, anyOf and oneOf, in total
MAX_PATTERN = 512  # bytes

MAPS = ("properties", "patternProperties", "$defs", "definitions")  # name -> schema
SINGLES = ("items", "additionalProperties", "additionalItems")  # a schema
LISTS = ("prefixItems", "allOf", "anyOf", "oneOf")  # schemas
LITERALS = ("const", "enum", "default", "examples")
SHAPING = {"properties", "required", "patternProperties", "additionalProperties", "minProperties", "maxProperties"}
LARGEST = 2**53 - 1  # a double represents every integer up to this one
WIDEST = 2**62  # largest integer passed to llguidance, which parses 64-bit integers and crashes on the smallest ones
EXACT = Context(prec=5000, Emax=MAX_EMAX, Emin=MIN_EMIN, traps=[])  # for parsing numbers; enough digits for any answer

MAX_TOGETHER = 8  # patterns that one text must match: llguidance takes minutes to decide whether twenty are satisfiable
MAX_LOOKS = 10_000  # maximum number of references and combinations that `mistake` follows

LOCATION = re.compile(r"^at \d+\(\d+\): failed to compile JSON schema: ")

Schema = JsonObject | bool


class SchemaError(InputError):
    """A request for output in a form that cannot be guaranteed. `code` is a machine-readable reason."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def check(*schemas: Schema) -> None:
    """Check the limits on all schemas of a request. Raises SchemaError with code `schema_too_large` or
    `schema_invalid`.
    """
    alternatives = 0
    for schema in schemas:
        if not isinstance(schema, dict):
            raise SchemaError("schema_invalid", f"a schema must be a JSON object, found {type(schema).__name__}")
        for node in subschemas(schema):
            alternatives += sum(len(node[key]) for key in ("enum", "anyOf", "oneOf") if isinstance(node.get(key), list))
            by_pattern = node.get("patternProperties")
            for pattern in (node.get("pattern"), *(by_pattern if isinstance(by_pattern, dict) else ())):
                _limit("a pattern, in bytes", len(str(pattern).encode(errors="replace")), MAX_PATTERN)
            for what, size, most in measures(node):
                _limit(what, size, most)
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
            path = "/".join(map(str, error.absolute_path))
            message = f"not a valid JSON Schema (draft 2020-12) at /{path}: {error.message:.200}"
            raise SchemaError("schema_invalid", message) from error
        for node in subschemas(schema):
            for number in filter(misread, _numbers([node.get("const"), node.get("enum")])):
                message = (
                    f"const or enum: {str(number)[:40]} cannot be guaranteed to its last digit; use an integer "
                    "within 2^62, a number of at most 15 digits, or a string"
                )
                raise SchemaError("schema_refused", message)


def _limit(what: str, size: int, most: int) -> None:
    if size > most:
        raise SchemaError("schema_too_large", f"{what}: expected at most {most}, found {size}; simplify the schema")


def subschemas(schema: Schema) -> Iterator[JsonObject]:
    """A schema and every schema inside it, without the values of `enum` or `default`. Raises SchemaError beyond
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
        stack += [(inner, depth + 1) for inner in _children(node)]


def _children(node: JsonObject) -> Iterator[Schema]:
    """The schemas directly inside a schema; values of a wrong type are ignored."""
    for key in MAPS:
        yield from node[key].values() if isinstance(node.get(key), dict) else ()
    for key in LISTS:
        yield from node[key] if isinstance(node.get(key), list) else ()
    yield from (node[key] for key in SINGLES if key in node)


def _depth(value: object) -> int:
    """The depth of nested containers in a literal, counted up to the limit."""
    layer, depth = [value], 0
    while depth <= MAX_DEPTH and (containers := [item for item in layer if isinstance(item, dict | list)]):
        layer = [inner for item in containers for inner in (item.values() if isinstance(item, dict) else item)]
        depth += 1
    return depth


# -- sizes of a schema -------------------------------------------------------------------------------------------------

MAX_DIGITS = 40  # in a bound, written out
MAX_REMAINDERS = 10_000  # of multipleOf: the number times the power of ten that makes it an integer
MAX_MINIMUM = 512  # of minLength, minItems, minProperties, which an answer must reach
MAX_COUNT = 1_000_000  # of maxLength, maxItems, maxProperties
MAX_NAMES = 512  # of an object's properties
MAX_WRITTEN = 2_000  # characters of a pattern with its repetitions written out
RANGES = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
REPEATED = re.compile(r"\{(\d+)(?:,(\d*))?\}")


def measures(schema: JsonObject) -> Iterator[tuple[str, int, int]]:
    """(what is measured, its size, the limit) for a schema, without the schemas inside it."""
    for key in RANGES:
        if _is_number(value := schema.get(key)):
            yield f"the digits of {key}", _digits(value), MAX_DIGITS
    if _is_number(multiple := schema.get("multipleOf")) and _digits(multiple) <= MAX_DIGITS:
        yield "the remainders of multipleOf", _remainders(multiple), MAX_REMAINDERS
    for key, value in schema.items():
        if key in ("minLength", "minItems", "minProperties") and _is_number(value):
            yield key, int(min(value, 10**18)), MAX_MINIMUM
        if key in ("maxLength", "maxItems", "maxProperties") and _is_number(value):
            yield key, int(min(value, 10**18)), MAX_COUNT
        if key in ("properties", "patternProperties", "required") and isinstance(value, dict | list):
            yield f"the names in {key}", len(value), MAX_NAMES
    by_pattern = schema.get("patternProperties")
    for pattern in (schema.get("pattern"), *(by_pattern if isinstance(by_pattern, dict) else ())):
        if isinstance(pattern, str):
            yield "a pattern with its repetitions written out, in characters", written_out(pattern), MAX_WRITTEN


def _numbers(literal: object) -> Iterator[float]:
    """All numbers in a literal, at any depth; the depth is known to be bounded."""
    if isinstance(literal, dict | list):
        for inner in literal.values() if isinstance(literal, dict) else literal:
            yield from _numbers(inner)
    elif _is_number(literal):
        yield literal


def misread(value: float) -> bool:
    """Whether llguidance parses a different number than JSON specifies, or writes it differently: integers beyond 64
    bits; fractions, which it computes from their digits and a power of ten with one rounding each; and numbers halfway
    between two numbers with the same number of digits.
    """
    if isinstance(value, int) or value in (math.inf, -math.inf):
        return abs(value) > WIDEST
    _, digits, exponent = Decimal(repr(value)).as_tuple()
    assert isinstance(exponent, int)
    significand, steps = float(int("".join(map(str, digits)))), abs(exponent)
    while exponent < 0 and steps > 308:
        significand, steps = significand / 1e308, steps - 308
    power = float(f"1e{steps}")
    halfway = 2 * abs(EXACT.subtract(Decimal(value), Decimal(repr(value)))) == EXACT.scaleb(Decimal(1), exponent)
    return halfway or (significand * power if exponent > 0 else significand / power) != abs(value)


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value


def _digits(value: float) -> int:
    """Number of digits of a value written without an exponent, on both sides of the decimal point."""
    parts = Decimal(str(value)).as_tuple() if abs(value) < 10**400 else None
    if parts is None or not isinstance(parts.exponent, int):  # infinite, or an integer that is slow to write out
        return 10**6
    return max(1, len(parts.digits) + parts.exponent) + max(0, -parts.exponent)


def _remainders(value: float) -> int:
    number = abs(Decimal(str(value))).normalize()
    _, digits, exponent = number.as_tuple()
    assert isinstance(exponent, int)
    whole = int("".join(map(str, digits)))
    return whole * 10 ** max(0, exponent)


def written_out(pattern: str) -> int:
    """Approximate length of a pattern with its counted repetitions written out; unbounded ones are counted once."""
    totals, last, index = [0], 0, 0
    while index < len(pattern):
        repetition = REPEATED.match(pattern, index)
        if repetition:
            times = max(1, int(repetition[1][:9]), int((repetition[2] or "1")[:9]))
            totals[-1] += last * (times - 1)
            last, index = last * times, repetition.end()
            continue
        character = pattern[index]
        if character == "(":
            totals.append(0)
        elif character == ")" and len(totals) > 1:
            last = totals.pop()
            totals[-1] += last
        else:
            index = _end_of_set(pattern, index) if character == "[" else index + (character == "\\")
            last = 1
            totals[-1] += 1
        index += 1
    return sum(totals)


def _end_of_set(pattern: str, index: int) -> int:
    """The index of the bracket that closes the one at `index`, or of the last character if there is none."""
    index += 1 + pattern.startswith("[^", index)
    first = index
    while index < len(pattern) and (pattern[index] != "]" or index == first):
        index += 1 + (pattern[index] == "\\")
    return min(index, len(pattern) - 1)


# -- closing objects ---------------------------------------------------------------------------------------------------


def strict(schema: JsonObject) -> JsonObject:
    """The schema with its objects closed (see "Closing" above). Raises SchemaError for a `$ref` without a target."""
    return _Closing(schema).closed_root()


class _Closing:
    """Closes one schema; a `$ref` inside an intersection is replaced by one to an open copy of its target."""

    def __init__(self, root: JsonObject) -> None:
        self.root = {key: value for key, value in root.items() if key != "x-guidance"}  # the grammar's own options
        self.copies: dict[str, Schema | None] = {}  # pointer -> the open target; None while it is being copied
        self.label = "open"  # prefix of the copies' names
        while any(name.startswith(self.label) for name in root.get("$defs", {})):
            self.label += "_"

    def closed_root(self) -> JsonObject:
        """The closed root, with the open copies added to its definitions."""
        closed = self.close(self.root)
        assert isinstance(closed, dict)
        if self.copies:
            copies = {f"{self.label}{number}": copy for number, copy in enumerate(self.copies.values())}
            closed["$defs"] = closed.get("$defs", {}) | copies
        return closed

    def close(self, node: Schema, part: bool = False) -> Schema:
        """Close one schema; a `part` of an intersection stays open, since the intersection itself is closed instead."""
        if not isinstance(node, dict):
            return node
        parts = len(node.get("allOf", ())) + sum(key in node for key in ("anyOf", "oneOf", "$ref"))
        open_parts = part or parts + bool(SHAPING & set(node)) > 1
        out = _bounded({key: self._close_value(node, key, open_parts) for key in node})
        if part or "additionalProperties" in node or (parts == 1 and not open_parts):
            return out
        names = self.names(node, set())
        if names is None or not (names or {"properties", "patternProperties"} & set(node)):
            return out
        properties = out.get("properties", {})
        properties = properties | {name: True for name in names if name not in properties}
        rest = {key: value for key, value in out.items() if key != "properties"}
        return {"properties": properties, "additionalProperties": False, **rest}

    def _close_value(self, node: JsonObject, key: str, open_parts: bool) -> object:
        """The value of a key, with the schemas inside it closed."""
        value = node[key]
        if key in MAPS:
            return {name: self.close(inner) for name, inner in value.items()}
        if key in SINGLES:
            return self.close(value)
        if key in LISTS:
            return [self.close(inner, open_parts and key != "prefixItems") for inner in value]
        if key == "$ref" and open_parts:
            if value not in self.copies:
                self.copies[value] = None  # so that a self-referencing schema terminates
                self.copies[value] = self.close(self.target(value), part=True)
            return f"#/$defs/{self.label}{[*self.copies].index(value)}"
        return value

    def names(self, node: Schema, seen: set[str]) -> dict[str, None] | None:
        """The property names in a schema and its parts, in order; None if a part defines which other names are allowed.

        `seen` contains the references already followed. Each is followed only once: otherwise, chains of schemas that
        each refer to the next one twice would take exponential time.
        """
        if not isinstance(node, dict):
            return {}
        result: dict[str, None] = dict.fromkeys([*node.get("properties", {}), *node.get("required", ())])
        for literal in (node.get("const"), *node.get("enum", ())):
            result |= dict.fromkeys(literal if isinstance(literal, dict) else ())
        parts = [part for key in ("allOf", "anyOf", "oneOf") for part in node.get(key, ())]
        if (pointer := node.get("$ref")) is not None and pointer not in seen:
            seen.add(pointer)
            parts.append(self.target(pointer))
        for part in parts:
            names = self.names(part, seen)
            if names is None or (isinstance(part, dict) and {"patternProperties", "additionalProperties"} & set(part)):
                return None
            result |= names
        return result

    def target(self, pointer: str) -> Schema:
        """The target of a `$ref`. Raises SchemaError."""
        node: Schema | None = self.root
        steps = unquote(pointer.removeprefix("#")).split("/")
        if not pointer.startswith("#") or steps[0]:
            raise SchemaError("schema_refused", f"$ref {pointer!r}: expected a JSON pointer into the schema (#/...)")
        for step in steps[1:]:
            key = step.replace("~1", "/").replace("~0", "~")
            node = node.get(key) if isinstance(node, Mapping) else None
            if node is None:
                raise SchemaError("schema_refused", f"$ref {pointer!r} has no target: there is no {key!r}")
        return node


def _bounded(node: JsonObject) -> JsonObject:
    """A number schema with missing bounds added, if its own bounds leave room for them."""
    types = node.get("type", ())
    if not {"number", "integer"} & set([types] if isinstance(types, str) else types) or {"const", "enum"} & set(node):
        return node
    lower = max(node.get("minimum", -LARGEST), node.get("exclusiveMinimum", -LARGEST))
    upper = min(node.get("maximum", LARGEST), node.get("exclusiveMaximum", LARGEST))
    _limit("a number's distance from 0", max(lower, -upper), WIDEST)
    bounded = {key: value for key, value in node.items() if key not in RANGES[:4] or abs(value) <= WIDEST}
    missing = {}
    if not {"minimum", "exclusiveMinimum"} & set(bounded) and upper > -LARGEST:
        missing["minimum"] = -LARGEST
    if not {"maximum", "exclusiveMaximum"} & set(bounded) and lower < LARGEST:
        missing["maximum"] = LARGEST
    return {**bounded, **missing}


# -- refusals ----------------------------------------------------------------------------------------------------------


def refuse(schema: JsonObject, closed: JsonObject) -> None:
    """Raise SchemaError `schema_refused` for anything that the grammar of `closed` cannot guarantee.

    The grammar lets unlisted names repeat, although a repeated name is only one property. The branches of `oneOf` must
    exclude each other as the user wrote them: closed branches may do so even if an instance of one original branch is
    also an instance of another.
    """
    counts: dict[str, int] = {}
    for node in subschemas(closed):
        least = node.get("minProperties", 0)
        if least > 1 + len(node.get("required", ())) and node.get("additionalProperties") is not False:
            raise SchemaError("schema_refused", f"minProperties {least} is not supported with unlisted properties")
        if "$ref" in node and not node["$ref"].startswith("#"):
            raise SchemaError(
                "schema_refused", f"$ref {node['$ref']!r}: expected a JSON pointer into the schema (#/...)"
            )
        _limit("the patterns that may apply to one string", _count_patterns(closed, node, counts), MAX_TOGETHER)
    if any("oneOf" in node for node in subschemas(closed)):
        bare = {key: value for key, value in schema.items() if key != "x-guidance"}
        grammar = LLMatcher.grammar_from_json_schema(json.dumps(bare))
        wrong, problems = LLMatcher.validate_grammar_with_warnings(grammar)
        if wrong:
            raise SchemaError("schema_refused", f"the schema cannot be enforced: {reason(problems[0])}")


def _count_patterns(root: JsonObject, node: Schema | None, counts: dict[str, int]) -> int:
    """Upper bound on the number of patterns and formats that may apply to one string, whichever branches it takes.

    `counts` caches results for references.
    """
    if not isinstance(node, dict):
        return 0
    values = [value for key in MAPS[:2] for value in node.get(key, {}).values()] + [node.get(key) for key in SINGLES]
    values += node.get("prefixItems", [])
    total = ("pattern" in node) + ("format" in node)
    total += max((_count_patterns(root, value, counts) for value in values), default=0)
    total += sum(_count_patterns(root, part, counts) for part in node.get("allOf", ()))
    total += sum(
        max((_count_patterns(root, part, counts) for part in node.get(key, ())), default=0)
        for key in ("anyOf", "oneOf")
    )
    if (pointer := node.get("$ref")) is not None:
        if pointer not in counts:
            counts[pointer] = 0
            counts[pointer] = _count_patterns(root, _Closing(root).target(pointer), counts)
        total += counts[pointer]
    return total


def reason(problem: str) -> str:
    """The first line of llguidance's message, without the location in our grammar or hints about its options."""
    line = problem.strip().split("\n")[0]
    return LOCATION.sub("", line).split(". Enable ")[0][:300]


# -- validating an answer ----------------------------------------------------------------------------------------------

Keyword = Callable[..., Iterable[exceptions.ValidationError] | None]  # jsonschema's check of a keyword


def mistake(schema: JsonObject, text: str) -> str | None:
    """The first error in `text` as an instance of the schema, or None. Numbers are compared exactly, not as floats.

    This only double-checks the grammar, so it stops after MAX_LOOKS subschemas or at Python's stack limit: even a small
    schema can take more than a lifetime to check.
    """
    with localcontext(EXACT) as context:
        try:
            value = json.loads(text, parse_float=context.create_decimal)
            exact = json.loads(json.dumps(schema), parse_float=context.create_decimal)
        except (ValueError, RecursionError) as error:
            return f"not JSON: {error}"
        looks = count()
        counted = {
            key: _count_looks(Draft202012Validator.VALIDATORS[key], looks)
            for key in ("$ref", "allOf", "anyOf", "oneOf")
        }
        validator = validators.extend(Draft202012Validator, counted | WITHOUT_PATTERNS)(exact)
        try:
            error = next(validator.iter_errors(value), None)
        except (_LooksExhausted, RecursionError):
            return None
    return error and error.message


class _LooksExhausted(Exception):
    """MAX_LOOKS subschemas were checked."""


def _count_looks(keyword: Keyword, looks: Iterator[int]) -> Keyword:
    """Wrap a keyword's check so that it raises `_LooksExhausted` once `looks` is exhausted."""

    def look(*arguments: object) -> Iterator[exceptions.ValidationError]:
        if next(looks) >= MAX_LOOKS:
            raise _LooksExhausted
        yield from keyword(*arguments) or ()

    return look


def _check_additional(
    validator: object, allowed: object, instance: object, schema: JsonObject
) -> Iterator[exceptions.ValidationError]:
    """Check `additionalProperties`, unless patterns define the other names."""
    if "patternProperties" not in schema:
        yield from Draft202012Validator.VALIDATORS["additionalProperties"](validator, allowed, instance, schema)


def _skip(*_: object) -> tuple[()]:
    return ()


WITHOUT_PATTERNS = {"pattern": _skip, "patternProperties": _skip, "additionalProperties": _check_additional}
