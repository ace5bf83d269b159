"""HTTP/2 as bytes, for clients that no library would be: calls that never end, and windows filled to the last byte."""

from __future__ import annotations

import re
import select
import socket
import struct
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import grpc

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
BEGIN = PREFACE + SETTINGS
_HEADER_BYTES = 9
_DATA_BYTES = 16384
_INITIAL_WINDOW = 65535
_TABLE_SETTING, _WINDOW_SETTING = 1, 4
_ACK = _END_STREAM = 1
_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _WINDOW_UPDATE = 0, 1, 3, 4, 6, 8
_WAIT_SECONDS = 60.0
_CHECK = b"/grpc.health.v1.Health/Check"
_STATUS = re.compile(rb"grpc-status[\x01\x02](\d+)")
_CODES = {each.value[0]: each.name for each in grpc.StatusCode}


def frame(kind: int, flags: int, stream: int, payload: bytes, length: int | None = None) -> bytes:
    """An HTTP/2 frame, whose header may lie about its length."""
    size = len(payload) if length is None else length
    return struct.pack(">I", size)[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + payload


def literal(name: bytes, value: bytes) -> bytes:
    """A header, uncompressed (RFC 7541, 6.2.2); names and values of fewer than 127 bytes."""
    return b"\x00" + bytes((len(name),)) + name + bytes((len(value),)) + value


def headers(path: bytes, *more: tuple[bytes, bytes], stream: int = 1) -> bytes:
    """The frame that begins a call."""
    fields = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", path), (b":authority", b"x")]
    fields += [(b"te", b"trailers"), (b"content-type", b"application/grpc"), *more]
    return frame(1, 4, stream, b"".join(literal(*field) for field in fields))


def message_header(size: int) -> bytes:
    """What gRPC puts before an uncompressed message."""
    return b"\x00" + struct.pack(">I", size)


def varint(value: int) -> bytes:
    """A number as protobuf spells it."""
    return bytes((value & 0x7F | 0x80,)) + varint(value >> 7) if value > 0x7F else bytes((value,))


def code(block: bytes) -> str:
    """The name of the status in the last header block of a stream; "reset" where it has none."""
    found = _STATUS.search(block)
    return _CODES[int(found[1])] if found else "reset"


class Connection:
    """A client that sends all that the server's windows take, and reads what it answers.

    `window` is how many bytes of each stream it takes itself, 65,535 unless given.

    `begun` has the streams that the server has begun to answer, `ended` the last header block of each stream that it
    closed, `sent` the bytes sent on each stream. `is_greeted` says whether the server has accepted the connection,
    `num_pongs` how many pings it has answered.
    """

    def __init__(self, port: int, window: int | None = None) -> None:
        self.begun: set[int] = set()
        self.ended: dict[int, bytes] = {}
        self.is_greeted = False
        self.num_pongs = 0
        self.sent = defaultdict[int, int](int)
        self.is_closed = False
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=_WAIT_SECONDS)
        self._read = b""
        self._blocks: dict[int, bytes] = {}
        self._initial = _INITIAL_WINDOW
        self._windows = {0: _INITIAL_WINDOW}
        # Heads, and how many zeros follow each.
        self._unsent: dict[int, deque[tuple[bytes, int]]] = {}
        self._complete: set[int] = set()
        # Bytes that a stream may send for now, where that is not all of them.
        self._allowed: dict[int, int] = {}
        # A frame is sent whole, by whichever thread.
        self._sending = threading.Lock()
        # Without a table every header block says its status in full.
        own = struct.pack(">HI", _TABLE_SETTING, 0)
        if window is not None:
            own += struct.pack(">HI", _WINDOW_SETTING, window)
        self.send(PREFACE + frame(_SETTINGS, 0, 0, own))

    def send(self, data: bytes) -> None:
        """Sends bytes as they are, unless the server hung up."""
        with suppress(ConnectionError), self._sending:
            self._socket.sendall(data)

    def call(
        self,
        path: bytes,
        *more: tuple[bytes, bytes],
        head: bytes,
        num_zeros: int = 0,
        num_times: int = 1,
        is_complete: bool = False,
    ) -> int:
        """Begins a call that sends a head and zeros, so many times; returns its stream.

        It ends its request only if that is complete. One thread alone may begin calls, and pump.
        """
        stream = 2 * len(self._windows) - 1
        self._windows[stream] = self._initial
        self._unsent[stream] = deque([(head, num_zeros)] * num_times)
        if is_complete:
            self._complete.add(stream)
        self.send(headers(path, *more, stream=stream))
        return stream

    def pump(self, until: Callable[[], bool], seconds: float = _WAIT_SECONDS) -> bool:
        """Sends and reads until a condition holds, the server hangs up or time is up; whether it holds."""
        deadline = time.monotonic() + seconds
        while not until() and not self.is_closed:
            has_sent = self._send_data()
            if select.select([self._socket], [], [], 0.0 if has_sent else 0.02)[0]:
                self._receive()
            if time.monotonic() >= deadline:
                break
        return until()

    def has_used_windows(self) -> bool:
        """Whether the server takes no more of any stream that has more to send."""
        return all(self._windows[stream] <= 0 for stream in list(self._unsent))

    def is_healthy(self) -> bool:
        """Checks the server's health, which it answers when it has seen all that was sent, and its event loop has run.

        Pings would do for the former, but a server takes few of them.
        """
        check = self.call(_CHECK, head=message_header(0), is_complete=True)
        self.grant(check, _INITIAL_WINDOW)
        return self.pump(lambda: check in self.ended) and code(self.ended[check]) == "OK"

    def flood(
        self, stream: int, slice_bytes: int, look_seconds: float, between: Callable[[], None] = lambda: None
    ) -> bool:
        """Sends a stream's message until the server ends it: a slice, and the next one once the server has looked.

        A look is due after `look_seconds`, and the event loop has made it by the time that it answers a health check.
        Does something else between slices. Returns whether the server ended it before it was sent in full, or hung up.
        """
        while stream not in self.ended and not self.is_closed:
            self._allowed[stream] = slice_bytes
            if not self.pump(lambda: self._allowed[stream] == 0 or stream in self.ended) or stream not in self._unsent:
                break
            between()
            time.sleep(look_seconds)
            self.is_healthy()
        return stream in self.ended

    @contextmanager
    def pumped(self) -> Iterator[None]:
        """A context in which a thread of its own sends and reads."""
        is_over = threading.Event()
        pumping = threading.Thread(target=self.pump, args=(is_over.is_set, float("inf")))
        pumping.start()
        try:
            yield
        finally:
            is_over.set()
            pumping.join()

    def grant(self, stream: int, num_bytes: int) -> None:
        """Takes so many more bytes of a stream."""
        self.send(frame(_WINDOW_UPDATE, 0, stream, struct.pack(">I", num_bytes)))

    def ping(self) -> None:
        """Asks for a sign of life."""
        self.send(frame(_PING, 0, 0, bytes(8)))

    def close(self) -> None:
        """Hangs up."""
        self._socket.close()

    def _send_data(self) -> bool:
        before = self._windows[0]
        for stream, parts in list(self._unsent.items()):
            room = min(self._windows[0], self._windows[stream], self._allowed.get(stream, _DATA_BYTES), _DATA_BYTES)
            if room <= 0:
                continue
            head, num_zeros = parts.popleft()
            data = head[:room] or bytes(min(room, num_zeros))
            rest = (head[room:], num_zeros) if head else (b"", num_zeros - len(data))
            for each in (0, stream):
                self._windows[each] -= len(data)
            self.sent[stream] += len(data)
            if stream in self._allowed:
                self._allowed[stream] -= len(data)
            if any(rest):
                parts.appendleft(rest)
            is_last = not parts
            if is_last:
                del self._unsent[stream]
            self.send(frame(_DATA, _END_STREAM if is_last and stream in self._complete else 0, stream, data))
        return self._windows[0] < before

    def _receive(self) -> None:
        try:
            data = self._socket.recv(1 << 20)
        except ConnectionError:
            data = b""
        self.is_closed = not data
        self._read += data
        while len(self._read) >= _HEADER_BYTES:
            size = int.from_bytes(self._read[:3]) + _HEADER_BYTES
            if len(self._read) < size:
                return
            head, payload = self._read[:_HEADER_BYTES], self._read[_HEADER_BYTES:size]
            self._read = self._read[size:]
            self._take(head[3], head[4], int.from_bytes(head[5:]) & 0x7FFFFFFF, payload)

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == _SETTINGS and not flags & _ACK:
            for number, value in struct.iter_unpack(">HI", payload):
                if number == _WINDOW_SETTING:
                    for each in self._windows.keys() - {0}:
                        self._windows[each] += value - self._initial
                    self._initial = value
            self.is_greeted = True
            self.send(frame(_SETTINGS, _ACK, 0, b""))
        elif kind == _PING:
            self.num_pongs += flags & _ACK
            if not flags & _ACK:
                self.send(frame(_PING, _ACK, 0, payload))
        elif kind == _WINDOW_UPDATE:
            self._windows[stream] += int.from_bytes(payload)
        elif kind == _HEADERS:
            self.begun.add(stream)
            self._blocks[stream] = payload
            if flags & _END_STREAM:
                self._end(stream)
        elif kind == _RESET:
            self._end(stream)

    def _end(self, stream: int) -> None:
        self.ended[stream] = self._blocks.get(stream, b"")
        self._unsent.pop(stream, None)
