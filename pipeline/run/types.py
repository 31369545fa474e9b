"""The one name for free-form JSON, so that an annotation says what it is and not that anything goes."""

from typing import Any

JsonObject = dict[str, Any]  # an object whose keys and values a file or a client decides
