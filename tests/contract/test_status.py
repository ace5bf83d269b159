"""Errors to statuses: nothing is left out, nothing leaks."""

from __future__ import annotations

import logging
import tracemalloc
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from onward.v1.generation_pb2 import TokenIds
from service.errors import (
    DeadlineUnreachable,
    EngineFailed,
    InvalidRequest,
    ModelUnfit,
    NotServing,
    Overloaded,
    PromptTooLong,
    RequestError,
)
from service.transport.http.failures import STATUSES
from service.transport.status import STATUS_CODES, cancelled_code, to_status


def descendants(error: type[RequestError]) -> set[type[RequestError]]:
    return {each for child in error.__subclasses__() for each in {child, *descendants(child)}}


def rich(metadata: tuple[tuple[str, bytes], ...]) -> status_pb2.Status:
    ((key, value),) = metadata
    assert key == "grpc-status-details-bin"
    return status_pb2.Status.FromString(value)


def test_table_is_total_over_the_error_tree() -> None:
    assert set(STATUS_CODES) == descendants(RequestError)
    assert set(STATUSES) == descendants(RequestError)


def test_labels_of_errors_are_distinct() -> None:
    labels = [error.label for error in descendants(RequestError)]
    assert len(set(labels)) == len(labels)


def test_many_problems_of_a_model_fit_into_a_status() -> None:
    assert to_status(ModelUnfit("m", ["one", "two"])).message == "'m' cannot be served: one; two"
    message = to_status(ModelUnfit("m", ["x" * 1_000_000] * 20)).message
    assert 4000 < len(message) < 8 << 10
    assert message.startswith("'m' cannot be served: xxx")
    assert message.endswith("x…")


@pytest.mark.parametrize("kind", [InvalidRequest, PromptTooLong])
def test_invalid_field_is_named_in_a_bad_request(kind: type[InvalidRequest]) -> None:
    status = to_status(kind("sampling.top_p", 0.0, "must be above 0"))
    assert status.message == "sampling.top_p: must be above 0, got 0.0"
    details = rich(status.trailing_metadata)
    request = error_details_pb2.BadRequest()
    assert details.details[0].Unpack(request)
    assert (details.code, details.message) == (status.code.value[0], status.message)
    (violation,) = request.field_violations
    assert (violation.field, violation.description) == ("sampling.top_p", status.message)


class Counted:
    """Counts how often it is rendered."""

    rendered = 0

    def __repr__(self) -> str:
        Counted.rendered += 1
        return "x"


LARGE: dict[str, Any] = {
    "text": "x" * (4 << 20),
    "wide text": "😀" * (1 << 20),
    "bytes": b"\xff" * (4 << 20),
    "list of texts": ["x" * (1 << 16)] * 64,
    "list": [Counted()] * 1_000_000,
    "tuple": (Counted(),) * 1_000_000,
    "nested lists": [[Counted()] * 1000] * 1000,
    "ids": range(1_000_000),
    "set": frozenset(range(1_000_000)),
    "map": dict.fromkeys(range(1_000_000)),
    "message's list": TokenIds(ids=[3] * 1_000_000).ids,
}


@pytest.mark.parametrize("value", LARGE.values(), ids=LARGE.keys())
def test_error_looks_at_the_beginning_of_a_value_and_no_further(value: Any) -> None:
    Counted.rendered = 0
    tracemalloc.start()
    try:
        error = InvalidRequest("field", value, "must be small")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert str(error).startswith("field: must be small, got ")
    assert len(str(error)) < 120
    assert Counted.rendered <= 81 * 81
    assert peak < 1 << 19, "all of it was rendered"


def test_error_cuts_a_path_that_a_client_chose() -> None:
    error = InvalidRequest(f"parameters.{'x' * 1_000_000}", 1, "is not known")
    assert error.field == f"parameters.{'x' * 188}…"
    assert str(error) == f"{error.field}: is not known, got 1"


def test_overload_carries_a_retry_delay() -> None:
    status = to_status(Overloaded("m", 8, 8, 1.25))
    assert status.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    retry = error_details_pb2.RetryInfo()
    assert rich(status.trailing_metadata).details[0].Unpack(retry)
    assert retry.retry_delay.ToMilliseconds() == 1250


@pytest.mark.parametrize("retry_after", [1.25, None])
def test_unreachable_deadline_carries_the_predicted_times_and_a_retry_delay_if_any(
    retry_after: float | None,
) -> None:
    error = DeadlineUnreachable(
        queue_seconds=2.0, prefill_seconds=0.5, decode_seconds=1.0, left_seconds=1.5, retry_after_seconds=retry_after
    )
    status = to_status(error)
    assert status.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    expected = (
        "the answer is predicted to take 3.500 s (queue 2.000, prefill 0.500, decode 1.000), 1.500 s are left until"
    )
    assert status.message.startswith(expected)
    first, *others = rich(status.trailing_metadata).details
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    assert first.Unpack(info)
    assert (info.reason, info.domain) == ("DEADLINE_UNREACHABLE", "onward")
    assert {name: float(value) for name, value in info.metadata.items()} == {
        "predicted_queue_seconds": 2.0,
        "predicted_prefill_seconds": 0.5,
        "predicted_decode_seconds": 1.0,
        "left_seconds": 1.5,
    }
    if retry_after is None:
        assert others == []
        assert status.message.endswith("not even an idle server could answer in time")
    else:
        assert others[0].Unpack(retry)
        assert retry.retry_delay.ToMilliseconds() == 1250
        assert status.message.endswith("retry in 1.250 s")


def test_other_errors_have_no_details() -> None:
    assert to_status(NotServing("draining")).trailing_metadata == ()


def test_failure_of_the_engine_shows_its_id_and_nothing_else() -> None:
    status = to_status(EngineFailed("abc"))
    assert (status.code, status.message) == (grpc.StatusCode.INTERNAL, "internal error abc")


def test_unforeseen_error_shows_an_id_that_the_log_explains(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        status = to_status(KeyError("/secret/path"))
    assert status.code is grpc.StatusCode.INTERNAL
    error_id = status.message.removeprefix("internal error ")
    assert "secret" not in status.message
    assert error_id in caplog.text
    assert "/secret/path" in caplog.text


@pytest.mark.parametrize(
    ("elapsed", "timeout", "code"),
    [
        (5.0, None, grpc.StatusCode.CANCELLED),
        (0.02, 0.05, grpc.StatusCode.CANCELLED),
        (20.0, 30.0, grpc.StatusCode.CANCELLED),
        (0.045, 0.05, grpc.StatusCode.DEADLINE_EXCEEDED),
        (29.7, 30.0, grpc.StatusCode.DEADLINE_EXCEEDED),
        (31.0, 30.0, grpc.StatusCode.DEADLINE_EXCEEDED),
    ],
)
def test_a_call_cancelled_at_its_deadline_is_deadline_exceeded(
    elapsed: float, timeout: float | None, code: grpc.StatusCode
) -> None:
    assert cancelled_code(elapsed, timeout) is code
