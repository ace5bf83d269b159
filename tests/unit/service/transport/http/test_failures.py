"""What clients of HTTP are told of an error."""

from __future__ import annotations

import pytest

from service.errors import DeadlineUnreachable, InvalidRequest, NotServing, RateLimited, RequestError, UnknownModel
from service.transport.http.failures import Refusal, to_failure

NEVER = DeadlineUnreachable(
    queue_seconds=1.0, prefill_seconds=1.0, decode_seconds=1.0, left_seconds=0.5, retry_after_seconds=None
)


@pytest.mark.parametrize(
    ("error", "status", "param", "headers"),
    [
        (InvalidRequest("stop[1]", 3, "must be a string"), 400, "stop[1]", {"x-should-retry": "false"}),
        (UnknownModel("a", ["b"]), 404, "model", {"x-should-retry": "false"}),
        (RateLimited("too much", 1.2501), 429, None, {"retry-after": "2", "retry-after-ms": "1251"}),
        (RateLimited("never", None), 429, None, {"x-should-retry": "false"}),
        (NEVER, 429, None, {"x-should-retry": "false"}),
        (NotServing("stopping"), 503, None, {}),
        (Refusal(413, "body", "is too large"), 413, "body", {"x-should-retry": "false"}),
    ],
    ids=lambda each: type(each).__name__,
)
def test_an_error_has_status_field_and_advice(
    error: RequestError, status: int, param: str | None, headers: dict[str, str]
) -> None:
    failure = to_failure(error)
    assert (failure.status, failure.error["param"], dict(failure.headers)) == (status, param, headers)
    assert failure.error["message"] == str(error)
