"""A type for free-form JSON objects."""

from typing import Any

JsonObject = dict[str, Any]  # an object whose keys and values come from a file or a client
