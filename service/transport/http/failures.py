"""Errors to HTTP statuses and OpenAI's error objects: one table, total over the error tree.

`code` is OpenAI's where it has one, else the error's label, as in metrics. openai-python retries 408, 409, 429 and 5xx
by itself; `x-should-retry: false` says where that cannot help.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from service.errors import (
    AnswerTooLarge,
    ClientStalled,
    DeadlineExceeded,
    DeadlineUnreachable,
    EngineFailed,
    InvalidRequest,
    ModelUnfit,
    NotServing,
    OnwardError,
    Overloaded,
    PermissionDenied,
    PromptTooLong,
    RateLimited,
    RequestCancelled,
    RequestError,
    RequestTooLarge,
    Unauthenticated,
    UnknownModel,
    UnsupportedFeature,
    report_failure,
)

CLIENT_GONE = 499
"""The client left; this status is in metrics and logs alone."""

STATUSES: Mapping[type[RequestError], int] = {
    InvalidRequest: 400,
    PromptTooLong: 400,
    RequestTooLarge: 400,
    UnknownModel: 404,
    ModelUnfit: 409,
    UnsupportedFeature: 400,
    AnswerTooLarge: 400,
    Unauthenticated: 401,
    PermissionDenied: 403,
    RateLimited: 429,
    ClientStalled: 408,
    Overloaded: 429,
    DeadlineUnreachable: 429,
    NotServing: 503,
    DeadlineExceeded: 504,
    RequestCancelled: CLIENT_GONE,
    EngineFailed: 500,
}
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
_CODES: Mapping[type[RequestError], str] = {
    PromptTooLong: "context_length_exceeded",
    UnknownModel: "model_not_found",
    Unauthenticated: "invalid_api_key",
    RateLimited: "rate_limit_exceeded",
}
_SERVER_ERROR = "server_error"
# LangChain knows such an error by the first words alone, LiteLLM by the last; both can fall back to another model.
_TOO_LONG = "; the prompt is too long: it is longer than the model's context length"
# An error after which the same request may succeed has a delay; of these the client decides.
_RETRIED_AT_WILL = (NotServing, EngineFailed)


@dataclass(frozen=True, slots=True)
class Failure:
    """Status, error object and headers."""

    status: int
    error: Mapping[str, Any]
    headers: tuple[tuple[str, str], ...] = ()


class Refusal(OnwardError):
    """A call that HTTP itself has a status for: no path, no such method, a body that is too large."""

    def __init__(self, status: int, field: str, message: str, headers: tuple[tuple[str, str], ...] = ()) -> None:
        self.status = status
        self.field = field
        self.headers = headers
        super().__init__(f"{field}: {message}")


def to_failure(error: BaseException) -> Failure:
    """The answer to an error that ended a call. Logs an unexpected error, which is logged nowhere else."""
    if isinstance(error, Refusal):
        described: dict[str, str | None] = {
            "message": str(error),
            "type": _TYPES[400],
            "param": error.field,
            "code": "invalid_request",
        }
        return Failure(error.status, described, (("x-should-retry", "false"), *error.headers))
    if not isinstance(error, RequestError):
        error = report_failure("an unexpected error ended a call", error)
    status = STATUSES[type(error)]
    described = {
        "message": f"{error}{_TOO_LONG}" if isinstance(error, PromptTooLong) else str(error),
        "type": _TYPES.get(status, _SERVER_ERROR),
        "param": "model" if isinstance(error, UnknownModel) else getattr(error, "field", None),
        "code": _CODES.get(type(error), error.label),
    }
    return Failure(status, described, tuple(_headers(error)))


def _headers(error: RequestError) -> list[tuple[str, str]]:
    seconds: float | None = getattr(error, "retry_after_seconds", None)
    if seconds is not None:
        return [("retry-after", str(math.ceil(seconds))), ("retry-after-ms", str(math.ceil(seconds * 1000)))]
    headers = [] if isinstance(error, _RETRIED_AT_WILL) else [("x-should-retry", "false")]
    if isinstance(error, Unauthenticated):
        headers.append(("www-authenticate", "Bearer"))
    return headers
