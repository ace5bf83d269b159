"""`/debug/steps` on the metrics port: the flight recorder's log as JSON, for `python -m service trace`.

    {"format": 1, "monotonic_time": …, "unix_time": …, "models": {NAME: {"steps": TABLE, "requests": TABLE}}}

A table is `{"columns": [name, …], "rows": [[value, …], …]}`, oldest row first. Times are the server's
`time.monotonic()` seconds; `service.telemetry.recorder` defines the columns. Every other path is answered by the
metrics' application.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from service.telemetry.recorder import REQUEST_COLUMNS, STEP_COLUMNS, FlightLog
from service.telemetry.ring import Row

PATH = "/debug/steps"
FORMAT = 1

# Rows encoded at a time: the encoder holds the interpreter's lock, for which the engine's step waits.
_ROWS_AT_ONCE = 64
_LOOP_SECONDS = 5.0
_PLAIN = ("Content-Type", "text/plain; charset=utf-8")


def with_debug(app: WSGIApplication, take: Callable[[], FlightLog], *, is_on: bool) -> WSGIApplication:
    """An application that answers `PATH`, and every other path by `app`.

    Args:
        app: answers the other paths.
        take: returns the recorder's log; called on the HTTP request's thread.
        is_on: whether the recorder is on.
    """

    def debug_app(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        if environ.get("PATH_INFO") != PATH:
            return app(environ, start_response)
        if environ["REQUEST_METHOD"] != "GET":
            start_response("405 Method Not Allowed", [("Allow", "GET"), _PLAIN])
            return [b"only GET\n"]
        if not is_on:
            start_response("404 Not Found", [_PLAIN])
            return [b"nothing is recorded: the server runs with --recorder-steps 0\n"]
        try:
            log = take()
        except (TimeoutError, RuntimeError):
            start_response("503 Service Unavailable", [_PLAIN])
            return [b"the event loop does not answer\n"]
        start_response("200 OK", [("Content-Type", "application/json"), ("Cache-Control", "no-store")])
        return encode(log)

    return debug_app


def from_loop(loop: asyncio.AbstractEventLoop, take: Callable[[], FlightLog]) -> Callable[[], FlightLog]:
    """`take` for other threads: runs it on the event loop, which owns the recorder.

    The returned function raises TimeoutError if the loop does not answer, RuntimeError if it is closed.
    """

    def ask() -> FlightLog:
        answer: concurrent.futures.Future[FlightLog] = concurrent.futures.Future()
        loop.call_soon_threadsafe(lambda: answer.set_result(take()))
        return answer.result(_LOOP_SECONDS)

    return ask


def encode(log: FlightLog) -> Iterator[bytes]:
    """The log as JSON, in chunks."""
    head = {"format": FORMAT, "monotonic_time": log.monotonic_time, "unix_time": log.unix_time}
    yield f'{json.dumps(head)[:-1]}, "models": {{'.encode()
    for index, (name, model) in enumerate(log.models.items()):
        yield f"{', ' if index else ''}{json.dumps(name)}: {{".encode()
        yield from _table("steps", STEP_COLUMNS, model.steps)
        yield b", "
        yield from _table("requests", REQUEST_COLUMNS, itertools.chain(model.requests, model.open_requests))
        yield b"}"
    yield b"}}\n"


def _table(name: str, columns: Sequence[str], rows: Iterable[Row]) -> Iterator[bytes]:
    yield f'"{name}": {{"columns": {json.dumps(columns)}, "rows": ['.encode()
    separator = ""
    remaining = iter(rows)
    while some := list(itertools.islice(remaining, _ROWS_AT_ONCE)):
        yield (separator + json.dumps(some, allow_nan=False)[1:-1]).encode()
        separator = ", "
    yield b"]}"
