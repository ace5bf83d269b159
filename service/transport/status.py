"""Errors to gRPC statuses: one table, total over the error tree, with machine-readable details.

Clients read them with `grpc_status.rpc_status`: `google.rpc.BadRequest` for an invalid field, `google.rpc.RetryInfo`
for an overload or a used-up allowance, `google.rpc.ErrorInfo` with the predicted times of an unreachable deadline. Any
error that is no `RequestError` becomes INTERNAL with an opaque id, which the log explains.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType

import grpc
from google.protobuf import duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from service.errors import (
    AnswerTooLarge,
    ClientStalled,
    DeadlineExceeded,
    DeadlineUnreachable,
    EngineFailed,
    InvalidRequest,
    ModelUnfit,
    NotServing,
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
from service.forecasting.deadline_margin import deadline_margin

STATUS_CODES: Mapping[type[RequestError], grpc.StatusCode] = {
    InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    PromptTooLong: grpc.StatusCode.OUT_OF_RANGE,
    RequestTooLarge: grpc.StatusCode.RESOURCE_EXHAUSTED,
    UnknownModel: grpc.StatusCode.NOT_FOUND,
    ModelUnfit: grpc.StatusCode.FAILED_PRECONDITION,
    UnsupportedFeature: grpc.StatusCode.UNIMPLEMENTED,
    AnswerTooLarge: grpc.StatusCode.OUT_OF_RANGE,
    Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    PermissionDenied: grpc.StatusCode.PERMISSION_DENIED,
    RateLimited: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ClientStalled: grpc.StatusCode.ABORTED,
    Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    DeadlineUnreachable: grpc.StatusCode.RESOURCE_EXHAUSTED,
    NotServing: grpc.StatusCode.UNAVAILABLE,
    DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    RequestCancelled: grpc.StatusCode.CANCELLED,
    EngineFailed: grpc.StatusCode.INTERNAL,
}

_DETAILS_KEY = "grpc-status-details-bin"
_NANOSECONDS = 1_000_000_000
_DOMAIN = "onward"


@dataclass(frozen=True, slots=True)
class Status:
    """Code, message, and details as trailing metadata."""

    code: grpc.StatusCode
    message: str
    trailing_metadata: tuple[tuple[str, bytes], ...] = ()


def to_status(error: BaseException) -> Status:
    """The status of an error that ended a call. Logs an unexpected error, which is logged nowhere else."""
    if not isinstance(error, RequestError):
        error = report_failure("an unexpected error ended a call", error)
    code, message = STATUS_CODES[type(error)], str(error)
    details = _details(error)
    if not details:
        return Status(code, message)
    rich = status_pb2.Status(code=code.value[0], message=message)
    for each in details:
        rich.details.add().Pack(each)
    return Status(code, message, ((_DETAILS_KEY, rich.SerializeToString()),))


def cancelled_code(elapsed: float, timeout: float | None) -> grpc.StatusCode:
    """Whether a cancelled call's deadline passed or its client left: only the time distinguishes them."""
    is_late = timeout is not None and elapsed >= timeout - deadline_margin(timeout)
    return grpc.StatusCode.DEADLINE_EXCEEDED if is_late else grpc.StatusCode.CANCELLED


def forget_frames(error: BaseException) -> None:
    """Clears an error's tracebacks, whose frames would hold requests until its status is sent."""
    errors: list[BaseException | None] = [error]
    while errors:
        if (each := errors.pop()) is None or each.__traceback__ is None:
            continue
        errors += [each.__cause__, each.__context__]
        at: TracebackType | None = each.__traceback__
        each.__traceback__ = None
        # Entry by entry: the context manager that caught the error holds the first.
        while at is not None:
            at.tb_next, at = None, at.tb_next


def _details(error: RequestError) -> tuple[Message, ...]:
    match error:
        case InvalidRequest():
            violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=str(error))
            return (error_details_pb2.BadRequest(field_violations=[violation]),)
        case Overloaded() | RateLimited():
            return () if error.retry_after_seconds is None else (_retry_info(error.retry_after_seconds),)
        case DeadlineUnreachable():
            info = error_details_pb2.ErrorInfo(
                reason=error.label.upper(),
                domain=_DOMAIN,
                metadata={
                    "predicted_queue_seconds": f"{error.queue_seconds:.6f}",
                    "predicted_prefill_seconds": f"{error.prefill_seconds:.6f}",
                    "predicted_decode_seconds": f"{error.decode_seconds:.6f}",
                    "left_seconds": f"{error.left_seconds:.6f}",
                },
            )
            retry = error.retry_after_seconds
            return (info,) if retry is None else (info, _retry_info(retry))
        case _:
            return ()


def _retry_info(seconds: float) -> Message:
    delay = duration_pb2.Duration()
    delay.FromNanoseconds(round(seconds * _NANOSECONDS))
    info: Message = error_details_pb2.RetryInfo(retry_delay=delay)
    return info
