"""A healthy server that breaks calls in ways that no real server of ours can: HTTP/2, frame by frame.

Knows as much of HTTP/2 (RFC 9113) as Envoy needs to take it for a gRPC server: it answers health checks, and does to
every other call what it was made for, once the whole request has come.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import Enum, auto

from google.protobuf.message import Message
from grpc_health.v1 import health_pb2

from onward.v1 import generation_pb2 as pb

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _GOAWAY = 0, 1, 3, 4, 6, 7
_ACK = _END_STREAM = 1
_END_HEADERS = 4
_INTERNAL_ERROR, _REFUSED_STREAM = 2, 7
_EMPTY = b"\0\0\0\0\0"
"""The request of a health check of everything, as gRPC frames it; no request of ours is empty."""
FIRST = pb.GenerateStreamResponse(accepted=pb.GenerateStreamResponse.Accepted(request_id="r", model="m"))


class Fault(Enum):
    """What becomes of a call."""

    REFUSED = auto()
    """RST_STREAM, with the one reason that says that nothing was begun."""
    GOODBYE = auto()
    """GOAWAY that names a stream before it as the last to be looked at."""
    RESET = auto()
    """RST_STREAM with an internal error."""
    CLOSED = auto()
    """The connection ends."""
    RESET_AFTER_A_MESSAGE = auto()
    """The first message of a stream, and RST_STREAM when `reset` is called: sooner, it might overtake the message."""


@dataclass(slots=True)
class Breaking:
    """A server that runs: its "host:port", and how many calls it has been asked for, health checks aside."""

    fault: Fault
    target: str = ""
    num_calls: int = 0
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)
    _begun: list[tuple[asyncio.StreamWriter, int]] = field(default_factory=list)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        self._writers.add(writer)
        requests: dict[int, bytes] = {}
        try:
            await reader.readexactly(len(_PREFACE))
            _send(writer, _SETTINGS)
            while True:
                head = await reader.readexactly(9)
                kind, flags, stream = head[3], head[4], struct.unpack(">I", head[5:])[0]
                payload = await reader.readexactly(int.from_bytes(head[:3]))
                if kind in (_SETTINGS, _PING) and not flags & _ACK:
                    _send(writer, kind, _ACK, 0, payload if kind == _PING else b"")
                if kind == _DATA:
                    requests[stream] = requests.get(stream, b"") + payload
                if kind in (_DATA, _HEADERS) and flags & _END_STREAM:
                    self._handle(writer, stream, requests.pop(stream, b""))
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    def reset(self) -> None:
        """Breaks the streams that have had their first message."""
        for writer, stream in self._begun:
            _send(writer, _RST_STREAM, 0, stream, struct.pack(">I", _INTERNAL_ERROR))
        self._begun.clear()

    def close(self) -> None:
        """Ends every connection."""
        for writer in self._writers:
            writer.close()

    def _handle(self, writer: asyncio.StreamWriter, stream: int, request: bytes) -> None:
        if request == _EMPTY:
            _begin(writer, stream, health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING))
            _send(writer, _HEADERS, _END_HEADERS | _END_STREAM, stream, _header("grpc-status", "0"))
            return
        self.num_calls += 1
        match self.fault:
            case Fault.REFUSED:
                _send(writer, _RST_STREAM, 0, stream, struct.pack(">I", _REFUSED_STREAM))
            case Fault.GOODBYE:
                _send(writer, _GOAWAY, 0, 0, struct.pack(">II", max(0, stream - 2), 0))
            case Fault.RESET:
                _send(writer, _RST_STREAM, 0, stream, struct.pack(">I", _INTERNAL_ERROR))
            case Fault.CLOSED:
                writer.close()
            case Fault.RESET_AFTER_A_MESSAGE:
                _begin(writer, stream, FIRST)
                self._begun.append((writer, stream))


@asynccontextmanager
async def breaking(fault: Fault) -> AsyncIterator[Breaking]:
    """Serves on a free loopback port."""
    broken = Breaking(fault)
    server = await asyncio.start_server(broken.serve, "127.0.0.1", 0)
    broken.target = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield broken
    finally:
        server.close()
        broken.close()
        await server.wait_closed()


def _begin(writer: asyncio.StreamWriter, stream: int, message: Message) -> None:
    """Headers and a first message."""
    status_200 = b"\x88"  # in the table that all know
    _send(writer, _HEADERS, _END_HEADERS, stream, status_200 + _header("content-type", "application/grpc"))
    data = message.SerializeToString()
    _send(writer, _DATA, 0, stream, struct.pack(">BI", 0, len(data)) + data)


def _header(name: str, value: str) -> bytes:
    """As HPACK (RFC 7541) writes what is in no table: both as they are, each after its length."""
    return b"\0" + b"".join(bytes([len(text)]) + text.encode() for text in (name, value))


def _send(writer: asyncio.StreamWriter, kind: int, flags: int = 0, stream: int = 0, payload: bytes = b"") -> None:
    writer.write(len(payload).to_bytes(3) + struct.pack(">BBI", kind, flags, stream) + payload)
