"""The errors of a client: `CallError` with one subclass per gRPC status that the server uses, and `IncompleteStream`.

Decodes gRPC's standard error details; makes no calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

_NANOSECONDS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """A field outside its limit: its full path, such as `sampling.top_p`, and what is wrong."""

    field: str
    description: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Details:
    """A status's machine-readable details, all optional.

    Attributes:
        violations: fields outside their limits.
        retry_after_seconds: when to retry; None where a retry would not help or the time is unknown.
        reason: stable name of the cause, in capitals.
        facts: the reason's numbers, by name.
    """

    violations: tuple[FieldViolation, ...] = ()
    retry_after_seconds: float | None = None
    reason: str | None = None
    facts: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))


NO_DETAILS = Details()


class ClientError(Exception):
    """Root of the client's errors."""


class IncompleteStream(ClientError):
    """A stream ended with OK but without its summary: chunks may be missing."""

    def __init__(self, request_id: str | None) -> None:
        self.request_id = request_id
        super().__init__("the stream ended before the answer did")


class CallError(ClientError):
    """A call ended with a status other than OK.

    Args:
        code: the status.
        message: from the server or from gRPC.
        request_id: of a generation, if known; the server logs it too.
        details: of the status.
    """

    def __init__(
        self, code: grpc.StatusCode, message: str, *, request_id: str | None = None, details: Details = NO_DETAILS
    ) -> None:
        self.code = code
        self.message = message
        self.request_id = request_id
        self.violations = details.violations
        self.retry_after_seconds = details.retry_after_seconds
        self.reason = details.reason
        self.facts = details.facts
        super().__init__(f"{code.name}: {message}")


class InvalidArgument(CallError):
    """A field is outside its limit; `violations` name it."""


class OutOfRange(CallError):
    """The prompt is too long for the context, or the answer too large for a message."""


class NotFound(CallError):
    """The model is not served."""


class FailedPrecondition(CallError):
    """The artifact cannot be served; the message lists every problem."""


class Unimplemented(CallError):
    """The model or the server does not support what is requested."""


class Unauthenticated(CallError):
    """The API key is missing or unknown."""


class PermissionDenied(CallError):
    """The caller may not use the method."""


class ResourceExhausted(CallError):
    """Overloaded, over quota, or the deadline is out of reach. Retrying helps only with `retry_after_seconds`."""


class Unavailable(CallError):
    """The server is unreachable, starting or draining."""


class DeadlineExceeded(CallError):
    """The deadline passed before the answer."""


class Cancelled(CallError):
    """The call was canceled; for a stream that was not closed here, by the server or a proxy."""


class Aborted(CallError):
    """The stream was read so slowly that the server ended it."""


class Internal(CallError):
    """A fault of the server, which logs the details under the id in the message."""


# By status, as in INVALID_ARGUMENT: InvalidArgument.
_KINDS: Mapping[grpc.StatusCode, type[CallError]] = {
    code: kind
    for kind in CallError.__subclasses__()
    for code in grpc.StatusCode
    if code.name.replace("_", "").lower() == kind.__name__.lower()
}


def call_error(error: grpc.RpcError, request_id: str | None) -> CallError:
    """The `CallError` of a gRPC error, blocking or asyncio, which becomes its cause."""
    code = error.code()
    failed = _KINDS.get(code, CallError)(
        code, error.details() or "", request_id=request_id, details=_details(_rich_status(error))
    )
    failed.__cause__ = error
    return failed


def _rich_status(error: grpc.RpcError) -> status_pb2.Status | None:
    """The status with details; None without one, or if a proxy replaced the status and kept its details."""
    try:
        return rpc_status.from_call(error)
    except (ValueError, DecodeError):
        return None


def _details(status: status_pb2.Status | None) -> Details:
    if status is None:
        return NO_DETAILS
    bad, retry, info = error_details_pb2.BadRequest(), error_details_pb2.RetryInfo(), error_details_pb2.ErrorInfo()
    has_retry = False
    try:
        for packed in status.details:
            packed.Unpack(bad)
            has_retry |= packed.Unpack(retry)
            packed.Unpack(info)
    except DecodeError:
        return NO_DETAILS
    return Details(
        violations=tuple(FieldViolation(each.field, each.description) for each in bad.field_violations),
        retry_after_seconds=max(0.0, retry.retry_delay.ToNanoseconds() / _NANOSECONDS) if has_retry else None,
        reason=info.reason or None,
        facts=MappingProxyType(dict(info.metadata)),
    )
