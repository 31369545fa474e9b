"""What goes wrong, as a client hears it: OpenAI's error object with the status that its SDKs expect.

    {"error": {"message": str, "type": str, "param": str | null, "code": str | null}}

A message says what was expected, found, and what to do; it never holds what our own code raised: a 500 carries a request id alone,
by which the log is searched.
"""

import json
from typing import Any

from starlette.responses import Response

TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error", 500: "server_error", 503: "server_error"}  # fmt: skip


class ApiFault(Exception):
    """An answer that is an error."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None, retry: int | None = None) -> None:  # fmt: skip
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.retry = status, message, param, code, retry

    @property
    def body(self) -> dict[str, Any]:
        """The error object."""
        kind = TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """With its status and, where it is worth trying again, when."""
        headers = {} if self.retry is None else {"Retry-After": str(self.retry)}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return JsonResponse(self.body, self.status, headers)


class JsonResponse(Response):
    """JSON as UTF-8; what UTF-8 cannot carry becomes a question mark instead of a failure. Bytes are JSON already."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return content if isinstance(content, bytes) else dumps(content)


def dumps(content: Any) -> bytes:
    """Compact JSON in UTF-8. Raises ValueError for numbers that JSON has not."""
    return json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode("utf-8", "replace")


def internal(identity: str) -> ApiFault:
    """Our own failure; what it was stands in the log, under the request's id."""
    return ApiFault(500, f"the server failed; look for request {identity} in its log", code="internal_error")
