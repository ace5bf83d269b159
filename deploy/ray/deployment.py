"""One replica: an app whose calls Ray takes. Needs Ray, and the address space of one of its workers.

Ray's context hides a call's deadline: a request carries its own in `timeout_seconds`. Methods whose clients stream
(`ModelStreamInfer`) are not offered.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any

from google.protobuf.message import Message
from prometheus_client import disable_created_metrics
from ray import serve

from deploy.ray.handlers import METHODS, Handlers
from service.app import App
from service.config import ServeConfig, parse_command_line
from service.engine.engine import LastRun
from service.loading import build_engines, load_models, settle_device, share_memory


class Replica:
    """The app of `python -m service serve` with the same flags, but that nobody listens."""

    async def __init__(self, flags: Sequence[str]) -> None:  # type: ignore[misc]
        """Loads the models and proves them; Ray sends calls once it is done."""
        disable_created_metrics()  # type: ignore[no-untyped-call]
        config = parse_command_line(["serve", *flags])
        assert isinstance(config, ServeConfig)  # noqa: S101 (the verb says so)
        config = settle_device(config)
        models, last_run = load_models(config.models, config.prefill_provider, config.device), LastRun()
        pool = share_memory(models, config)
        engines = build_engines(config.models, models, config, last_run, pool.parts)
        self._app = App(config, models, engines, last_run=last_run, pool=pool, make_server=self._take)
        self._listening = self._app.listening()
        await self._listening.__aenter__()
        await self._app.verify_all()

    def _take(self, *services: Any, **options: Any) -> Handlers:
        self._handlers = Handlers(*services, **options)
        return self._handlers

    def check_health(self) -> None:
        """Ray asks every few seconds, and replaces a replica that raises.

        Raises:
            RuntimeError: when a model does not answer.
        """
        if not self._handlers.health():
            raise RuntimeError("a model does not answer")

    async def __del__(self) -> None:
        """Drains; Ray waits for it."""
        await self._listening.__aexit__(None, None, None)


def _unary(name: str) -> Callable[..., Any]:
    async def call(self: Any, request: Message, grpc_context: Any) -> Message:
        answer: Message = await self._handlers.call(name, request, grpc_context)
        return answer

    return call


def _stream(name: str) -> Callable[..., Any]:
    async def call(self: Any, request: Message, grpc_context: Any) -> AsyncGenerator[Message, None]:
        async with aclosing(self._handlers.stream(name, request, grpc_context)) as answers:
            async for answer in answers:
                yield answer

    return call


_CALLS = {
    name: (_stream if method.server_streaming else _unary)(name)
    for name, method in METHODS.items()
    if not method.client_streaming
}
Onward = serve.deployment(type("Onward", (Replica,), _CALLS))
"""What Ray starts as often as it is told to."""
