"""Settings from flat keys, as a block of params.yaml has them."""

import typing
from dataclasses import fields
from typing import Any, TypeVar

from pipeline.run.config import is_flat

T = TypeVar("T")


def flat(kind: type[T], **values: Any) -> T:
    """Build a dataclass; each of its flat fields takes the `values` that belong to it."""
    for name, inner in parts(kind).items():
        if name in values:
            continue
        own = keys(inner) & values.keys()
        values[name] = flat(inner, **{key: values.pop(key) for key in own})
    return kind(**values)


def keys(kind: type) -> set[str]:
    """The names of all fields, with each flat field replaced by the names of its fields."""
    inner = parts(kind)
    own = {field.name for field in fields(kind)} - inner.keys()
    return own.union(*(keys(part) for part in inner.values()))


def parts(kind: type) -> dict[str, type]:
    """The flat fields and their types."""
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind) if is_flat(hints[field.name])}
