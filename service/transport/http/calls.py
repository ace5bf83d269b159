"""Wraps every HTTP call as `transport.interceptors` wraps gRPC's: places, keys, limits, errors, counts, traces, logs.

    route ──> place ──> key ──> read the body ──> handler, canceled if the client leaves ──> counted ──> last bytes

Errors before the answer's first byte have an HTTP status. Behind it, in a stream, they are an event with `error`.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client import Counter

from service.access import Access
from service.errors import ClientStalled, DeadlineExceeded, InvalidRequest, RateLimited, RequestError, report_failure
from service.generator import within
from service.telemetry.tracing import Tracer
from service.transport.admission import OpenCalls, admitted
from service.transport.call_log import CallLog
from service.transport.http.bodies import Bodies
from service.transport.http.exchange import JSON, Exchange, encode
from service.transport.http.failures import CLIENT_GONE, Failure, Refusal, to_failure
from service.transport.places import REFUSAL_SECONDS, Places
from service.transport.server import TransportLimits
from service.transport.status import forget_frames

DEADLINE = "x-request-timeout"
"""The header of a call's deadline: seconds from its arrival."""
_OTHERS = "/*"
"""Metrics' name for paths that do not exist."""
_OK = 200
_RETRY_SECONDS = 1.0


@dataclass(slots=True)
class Request:
    """A call. `body` is empty for GET, and once it was taken; `name` is what follows a path that ends in a slash."""

    exchange: Exchange
    body: bytes
    name: str
    deadline: float | None

    def take_body(self) -> bytes:
        """The body, which is not kept: a long one must not live as long as its answer."""
        body, self.body = self.body, b""
        return body

    def time_remaining(self) -> float | None:
        """Seconds until the client's deadline, if it has one."""
        return None if self.deadline is None else self.deadline - time.monotonic()


Handler = Callable[[Request], Awaitable[bytes]]
"""Returns the whole answer, or sends events and returns the last bytes behind them."""


@dataclass(frozen=True, slots=True)
class Route:
    """What answers a path. `permission` is the method of gRPC whose permission it needs; None needs no key."""

    method: str
    handler: Handler
    permission: str | None = None


class Calls:
    """Answers requests.

    Args:
        routes: by path; one that ends in a slash takes all that begin with it.
        handled: counts ended calls by route and status.
        access: decides on calls.
        limits: of the transport; HTTP has as many places as gRPC, of its own, and routes without a key as many again.
        max_elements: bound on a body's elements, asked for each body.
        tracer: gets each call's begin and end.
        open_calls: counts calls until their answers are given to their connections.
    """

    def __init__(
        self,
        routes: Mapping[str, Route],
        handled: Counter,
        access: Access,
        limits: TransportLimits,
        max_elements: Callable[[], int],
        tracer: Tracer,
        open_calls: OpenCalls,
    ) -> None:
        self._routes = routes
        self._handled = handled
        self._access = access
        self._max_stall_seconds = limits.max_stall_seconds
        self._max_calls = limits.max_concurrent_rpcs
        self._max_elements = max_elements
        self._tracer = tracer
        self._open_calls = open_calls
        self._bodies = Bodies(limits.max_message_bytes, limits.max_stall_seconds)
        free = [path for path, route in routes.items() if route.permission is None]
        self._places = Places(limits.max_concurrent_rpcs, limits.max_message_bytes, free)
        self._log = CallLog()
        self.is_withdrawn = False

    def withdraw(self) -> None:
        """Every later answer closes its connection: the server is stopping."""
        self.is_withdrawn = True

    async def answer(self, scope: Any, receive: Any, send: Any) -> None:
        """Answers one request, ASGI's."""
        exchange = Exchange(scope, receive, send, self._max_stall_seconds)
        exchange.is_last = self.is_withdrawn
        route_name, route = self._find(exchange.path)
        place = self._places.take(route_name)
        try:
            if place is None:
                limit = f"{self._max_calls} calls run, which is the most there may be at once"
                exchange.is_last = True
                await self._fail(exchange, to_failure(RateLimited(limit, _RETRY_SECONDS)), REFUSAL_SECONDS)
            elif route is not None and route.permission is None and exchange.method == route.method:
                await exchange.answer(*await self._free(route, exchange))
            else:
                await self._watched(exchange, route_name, route)
        except ClientStalled:
            exchange.abort()
        except asyncio.CancelledError:
            # The client is gone, or the server ends what outlived its grace. uvicorn would log a traceback.
            exchange.abort()
        except Exception as error:
            # Of an answer that cannot be sent. uvicorn's own log of it is off.
            report_failure("an unexpected error ended an answer", error)
            exchange.abort()

    def _find(self, path: str) -> tuple[str, Route | None]:
        """The route of a path, with its name in metrics."""
        if (route := self._routes.get(path)) is not None and not path.endswith("/"):
            return path, route
        head = path[: path.rfind("/") + 1]
        return (head, self._routes[head]) if head in self._routes and path != head else (_OTHERS, None)

    async def _free(self, route: Route, exchange: Exchange) -> tuple[int, bytes]:
        """An answer that is neither counted nor logged, as gRPC's health checks are not."""
        try:
            return _OK, await route.handler(Request(exchange, b"", "", None))
        except RequestError as error:
            failure = to_failure(error)
            return failure.status, encode({"error": failure.error})

    async def _watched(self, exchange: Exchange, name: str, route: Route | None) -> None:
        trace = self._tracer.call(name, exchange, has_many=False, attributes=exchange.attributes)
        started, status, last, failure = time.monotonic(), _OK, b"", None
        with self._open_calls.opened():
            try:
                last = await self._handled_by(exchange, name, route, started)
            except (asyncio.CancelledError, KeyboardInterrupt, SystemExit):
                status = CLIENT_GONE
                raise
            except BaseException as error:  # a panic of an extension module is no Exception
                failure = to_failure(error)
                status = failure.status
                forget_frames(error)
            finally:
                # Before the last bytes are sent: a client that has its answer finds it counted.
                self._handled.labels(name, str(status)).inc()
                trace.ended(str(status), str(failure.error["message"]) if failure else "")
                self._log.ended(f"{exchange.method} {name}", str(status), time.monotonic() - started)
            # Within the open call: a server that stops waits until the connection has taken this, too.
            if failure is not None:
                await self._fail(exchange, failure, self._max_stall_seconds)
            elif exchange.has_started:
                await exchange.end(last)
            else:
                await exchange.answer(_OK, last)

    async def _handled_by(self, exchange: Exchange, name: str, route: Route | None, started: float) -> bytes:
        # An unknown path needs a key, too: without one, no answer says which paths exist.
        permission = route.permission if route is not None and route.permission is not None else "ListModels"
        with admitted(self._access, permission, exchange) as (_, caller):
            if route is None:
                raise Refusal(404, "path", f"must be one of {', '.join(self._routes)}")
            if exchange.method != route.method:
                raise Refusal(405, "method", f"must be {route.method}", (("allow", route.method),))
            deadline = _deadline(exchange, started)
            body = b""
            if route.method == "POST":
                _check_headers(exchange)
                try:
                    async with within(deadline):
                        body = await self._bodies.read(exchange, caller, self._max_elements())
                except DeadlineExceeded:
                    exchange.is_last = True  # what is left of the body is not waited for
                    raise
            request = Request(exchange, body, exchange.path[len(name) :], deadline)
            del body
            async with exchange.watched():
                last = await route.handler(request)
                await exchange.make_room(len(last))
                return last

    async def _fail(self, exchange: Exchange, failure: Failure, max_seconds: float) -> None:
        """Sends an error; of a stream that has begun, as its last event."""
        if failure.status == CLIENT_GONE:
            exchange.abort()
            return
        try:
            async with asyncio.timeout(max_seconds):
                if exchange.has_started:
                    await exchange.end_with(failure.error)
                else:
                    await exchange.answer(failure.status, encode({"error": failure.error}), failure.headers)
        except TimeoutError:
            exchange.abort()


def _deadline(exchange: Exchange, started: float) -> float | None:
    text = exchange.header(DEADLINE)
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise InvalidRequest(DEADLINE, text, "must be seconds, finite and above 0")
    return started + seconds


def _check_headers(exchange: Exchange) -> None:
    """Refuses compressed bodies, which could unpack to a thousand times their size, and all but JSON that says so.

    A web page of another origin may send anything but JSON without asking the server first.

    Raises:
        InvalidRequest: naming the header.
    """
    encoding = exchange.header("content-encoding")
    if encoding not in (None, "identity"):
        raise InvalidRequest("content-encoding", encoding, "must be identity")
    kind = exchange.header("content-type")
    if kind is None or kind.partition(";")[0].strip().lower() != JSON:
        raise InvalidRequest("content-type", kind, f"must be {JSON}")
