"""The package's exports: the client's classes, options, answers and errors."""

from onward.answers import Chunk, FinishReason, Generation, Output
from onward.asynchronous import AsyncClient, AsyncStream
from onward.blocking import Client, Stream
from onward.connection import Connection, Tls
from onward.errors import (
    Aborted,
    CallError,
    Cancelled,
    ClientError,
    DeadlineExceeded,
    FailedPrecondition,
    FieldViolation,
    IncompleteStream,
    Internal,
    InvalidArgument,
    NotFound,
    OutOfRange,
    PermissionDenied,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
    Unimplemented,
)
from onward.requests import CallOptions, GenerateOptions, Prompt, Target, chat
from onward.retries import DEFAULT_RETRIES, NO_RETRIES, RetryPolicy

__all__ = [
    "DEFAULT_RETRIES",
    "NO_RETRIES",
    "Aborted",
    "AsyncClient",
    "AsyncStream",
    "CallError",
    "CallOptions",
    "Cancelled",
    "Chunk",
    "Client",
    "ClientError",
    "Connection",
    "DeadlineExceeded",
    "FailedPrecondition",
    "FieldViolation",
    "FinishReason",
    "GenerateOptions",
    "Generation",
    "IncompleteStream",
    "Internal",
    "InvalidArgument",
    "NotFound",
    "OutOfRange",
    "Output",
    "PermissionDenied",
    "Prompt",
    "ResourceExhausted",
    "RetryPolicy",
    "Stream",
    "Target",
    "Tls",
    "Unauthenticated",
    "Unavailable",
    "Unimplemented",
    "chat",
]
