"""A client of `onward.v1` for Python: blocking and asyncio, with deadlines, retries and errors that say what is wrong.

    with Client("127.0.0.1:8001") as client:
        print(client.generate("3 May 1977", model="dates").text)

Knows the wire contract and gRPC, and nothing of the server's code. Where an answer has more than one shape, or an
integer stands for a word, it is put into a frozen dataclass (`Generation`, `Output`, `Chunk`). Everything else is the
contract's own message: its stubs are typed, and tell an absent value from a zero, which a copy would have to learn anew
with every field.
"""

from client.answers import Chunk, FinishReason, Generation, Output
from client.asynchronous import AsyncClient, AsyncStream
from client.blocking import Client, Stream
from client.connection import Connection, Tls
from client.errors import (
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
from client.requests import CallOptions, GenerateOptions, Prompt, Target, chat
from client.retries import DEFAULT_RETRIES, NO_RETRIES, RetryPolicy

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
