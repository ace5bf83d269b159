"""From the configuration to the HTTP server. The server itself needs the extra `http`, so it is imported late."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from prometheus_client import Counter

from service.access import Access
from service.config import ServeConfig
from service.errors import StartupError
from service.generator import Generator
from service.process.text_pool import TextPool
from service.repository.entry import Models
from service.telemetry.tracing import Tracer
from service.transport.admission import OpenCalls
from service.transport.http.calls import Calls
from service.transport.http.completions import Completions
from service.transport.http.endpoints import make_routes, max_elements
from service.transport.setup import transport_limits

if TYPE_CHECKING:
    from service.transport.http.server import HttpServer


def require_http() -> None:
    """Checks that what HTTP needs is installed.

    Raises:
        StartupError: naming the extra.
    """
    try:
        import_module("service.transport.http.server")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("uvicorn", "httptools", "h11", "click"):
            raise
        raise StartupError(["--http-port needs the extra `http`, which is not installed"]) from error


def make_http(
    config: ServeConfig,
    generator: Generator,
    models: Models,
    texts: TextPool,
    *,
    handled: Counter,
    access: Access,
    tracer: Tracer,
    open_calls: OpenCalls,
) -> HttpServer:
    """The HTTP server over the generator that gRPC has.

    Raises:
        StartupError: when the extra is not installed, or the certificates cannot be used.
    """
    require_http()
    from service.transport.http.server import HttpServer

    limits = config.request_limits
    completions = Completions(generator, models, limits, texts, config.max_message_bytes)
    calls = Calls(
        make_routes(completions, models, limits, texts),
        handled,
        access,
        transport_limits(config),
        lambda: max_elements(models, limits),
        tracer,
        open_calls,
    )
    return HttpServer(calls, config)
