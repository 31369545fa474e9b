"""The type of free-form JSON, so that `Any` is used for nothing else."""

from typing import Any

JsonObject = dict[str, Any]  # an object whose keys and values come from a file or a client
