"""What can go wrong, as one tree: a class for each status that the server answers with.

    ClientError
    ├── CallError                 the call ended with another status than OK; `code` says which
    │   ├── InvalidArgument       a field has a value outside its limit; `violations` name it
    │   ├── OutOfRange            the prompt leaves no room, or no message can hold the answer
    │   ├── NotFound              no such model is served
    │   ├── FailedPrecondition    an artifact that cannot be served
    │   ├── Unimplemented         this model or server does not offer it
    │   ├── Unauthenticated       no API key, or an unknown one
    │   ├── PermissionDenied      the key, or the server, is not for this method
    │   ├── ResourceExhausted     no place, no allowance, or no time; `retry_after_seconds` says when to come again
    │   ├── Unavailable           nobody there, starting, draining
    │   ├── DeadlineExceeded      the deadline passed
    │   ├── Cancelled             given up, by either side
    │   ├── Aborted               read too slowly
    │   └── Internal              the server's fault; its log has the rest under the id in the message
    └── IncompleteStream          a stream ended as if all were well, but before its summary

Knows gRPC's two kinds of calls and the standard details that come with a status; makes no calls.
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
    """One field that breaks a limit: its full path, as in `sampling.top_p`, and what is wrong with it."""

    field: str
    description: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Details:
    """What a status says for programs to read, all of it optional.

    Attributes:
        violations: fields that break a limit.
        retry_after_seconds: when to come again; None where that would not help, or nobody knows.
        reason: stable name of what happened, in capitals.
        facts: numbers that belong to the reason, by name.
    """

    violations: tuple[FieldViolation, ...] = ()
    retry_after_seconds: float | None = None
    reason: str | None = None
    facts: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))


NO_DETAILS = Details()


class ClientError(Exception):
    """Root of what a client raises of itself."""


class IncompleteStream(ClientError):
    """A stream ended with OK and without its summary: what was read may not be all."""

    def __init__(self, request_id: str | None) -> None:
        self.request_id = request_id
        super().__init__("the stream ended before the answer did")


class CallError(ClientError):
    """A call that ended with another status than OK.

    Args:
        code: the status.
        message: the server's words, or gRPC's.
        request_id: of a generation, where it was given or the stream had told it; the server's log has it too.
        details: what comes with the status.
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
    """A field has a value outside its limit; `violations` name it."""


class OutOfRange(CallError):
    """The prompt leaves no room in the context, or no message can hold the answer."""


class NotFound(CallError):
    """No such model is served."""


class FailedPrecondition(CallError):
    """An artifact that cannot be served; the message lists all that is wrong with it."""


class Unimplemented(CallError):
    """The request asks for something that this model or server does not offer."""


class Unauthenticated(CallError):
    """The call shows no API key, or one that is not known."""


class PermissionDenied(CallError):
    """The caller may not use this method."""


class ResourceExhausted(CallError):
    """No place, no allowance, or no time. Without `retry_after_seconds`, coming again is no help."""


class Unavailable(CallError):
    """Nobody is there, or the server is starting or draining."""


class DeadlineExceeded(CallError):
    """The deadline passed before the answer."""


class Cancelled(CallError):
    """The call was given up; not by this process, where it is a stream that nobody closed."""


class Aborted(CallError):
    """The stream was read so slowly that the server gave it up."""


class Internal(CallError):
    """The server's fault. The message has an id, under which the server's log has the rest."""


_KINDS: Mapping[grpc.StatusCode, type[CallError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidArgument,
    grpc.StatusCode.OUT_OF_RANGE: OutOfRange,
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.FAILED_PRECONDITION: FailedPrecondition,
    grpc.StatusCode.UNIMPLEMENTED: Unimplemented,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDenied,
    grpc.StatusCode.RESOURCE_EXHAUSTED: ResourceExhausted,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.CANCELLED: Cancelled,
    grpc.StatusCode.ABORTED: Aborted,
    grpc.StatusCode.INTERNAL: Internal,
}


def call_error(error: grpc.RpcError, request_id: str | None) -> CallError:
    """The error of our tree for one of gRPC's, which becomes its cause. Either kind of gRPC's calls will do."""
    code = error.code()
    failed = _KINDS.get(code, CallError)(
        code, error.details() or "", request_id=request_id, details=_details(_rich_status(error))
    )
    failed.__cause__ = error
    return failed


def _rich_status(error: grpc.RpcError) -> status_pb2.Status | None:
    """None where there is none, or one that belongs to another status: a proxy may have put its own in front."""
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
