"""One replica: the server's app in a Ray worker, whose calls Ray accepts.

Ray's context hides a call's deadline: a request carries its own in `timeout_seconds`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry
from ray import serve
from ray.util import get_node_ip_address

from deploy.ray.demand import demands
from deploy.ray.handlers import METHODS, Handlers, Refused
from deploy.ray.targets import announced
from service.app import App
from service.config import ServeConfig, parse_command_line

_ANY_ADDRESS = ("0.0.0.0", "::")  # noqa: S104 (what an operator may have asked for)


class Replica:
    """The app of `python -m service serve`, by the same start-up (`App.load`), without a port for calls.

    Args:
        flags: of `serve`.
        targets: folder where Prometheus finds the addresses of metrics.
    """

    async def __init__(self, flags: Sequence[str], targets: str) -> None:  # type: ignore[misc]
        """Loads and proves the models; Ray sends calls once it is done.

        Raises:
            RuntimeError: when a model does not pass its proof.
        """
        config = parse_command_line(["serve", *flags])
        assert isinstance(config, ServeConfig)  # noqa: S101 (the verb says so)
        self._registry, self._slots = CollectorRegistry(), config.max_batch_size
        self._app = App.load(config, self._registry, self._take)
        async with AsyncExitStack() as running:
            endpoint = await running.enter_async_context(self._app.listening())
            if endpoint.metrics_port is not None:
                host = get_node_ip_address() if endpoint.host in _ANY_ADDRESS else endpoint.host
                running.enter_context(announced(Path(targets), f"{host}:{endpoint.metrics_port}"))
            await self._app.verify_all()
            await self.check_health()
            self._running = running.pop_all()

    def _take(self, *services: Any, **options: Any) -> Handlers:
        self._handlers = Handlers(*services, **options)
        return self._handlers

    async def check_health(self) -> None:
        """Called by Ray every few seconds; a replica that raises three times is replaced.

        Raises:
            RuntimeError: when a model does not answer.
        """
        if not self._handlers.is_serving():
            raise RuntimeError("a model does not answer: it has not passed its proof, or its steps fail")

    async def record_autoscaling_stats(self) -> Mapping[str, float]:
        """Called by Ray for autoscaling; see `deploy.ray.demand`."""
        return demands(self._registry, self._app.models.names, self._slots)

    async def __del__(self) -> None:
        """Drains. Ray awaits it, and has stopped sending calls."""
        await self._running.aclose()


class _Encoded:
    """A message that is serialized already."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def SerializeToString(self) -> bytes:  # noqa: N802 (what a message has)
        """Itself."""
        return self._data


# Refused calls return instead of raising: the context has the status, and Ray sends trailing metadata, which holds the
# details of errors, only with calls that return.


def _unary(name: str) -> Callable[..., Any]:
    async def call(self: Any, request: bytes, grpc_context: Any) -> _Encoded:
        try:
            return _Encoded(await self._handlers.call(name, request, grpc_context))
        except Refused:
            return _Encoded(b"")

    return call


def _stream(name: str) -> Callable[..., Any]:
    async def call(
        self: Any, requests: bytes | AsyncIterator[bytes], grpc_context: Any
    ) -> AsyncGenerator[_Encoded, None]:
        async with aclosing(_encoded(self._handlers.stream(name, requests, grpc_context))) as answers:
            async for answer in answers:
                yield answer

    return call


async def _encoded(answers: AsyncGenerator[bytes, None]) -> AsyncGenerator[_Encoded, None]:
    async with aclosing(answers):
        try:
            async for answer in answers:
                yield _Encoded(answer)
        except Refused:
            return


_CALLS = {name: (_stream if method.server_streaming else _unary)(name) for name, method in METHODS.items()}
Onward = serve.deployment(type("Onward", (Replica,), _CALLS))
"""The deployment; Ray decides how many replicas run."""
