"""The interface of a tracer of calls and requests, and the tracer that discards them.

    interceptor ── call() ──────────────────────────────> CallTrace.ended(status)
    admission   ── request() ─> submitted(request) ─────> RequestTrace.ended(record)

A tracer's `request` belongs to the `call` of the task that requests it. Callers report always, with or without an
exporter. `service.telemetry.otel` is the tracer that exports; `exporting` imports it when it is configured.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

from service.engine.types import FinishReason, GenerationRequest
from service.telemetry.metrics import RequestRecord

NOTHING: Mapping[str, str] = MappingProxyType({})


class CallContext(Protocol):
    """The part of a call's context that tracers and admission use: gRPC's, or HTTP's in the same shape."""

    def invocation_metadata(self) -> Iterable[tuple[str, str | bytes]] | None:
        """The client's metadata or headers, names in lower case."""

    def peer(self) -> str:
        """The client's address, such as `ipv4:127.0.0.1:5000`."""


class CallTrace(Protocol):
    """The trace of one call of our methods."""

    def ended(self, code: str, message: str) -> None:
        """The handler ended with this status. Called once; a request of the call may end later."""


class RequestTrace(Protocol):
    """The trace of one request of a call."""

    def submitted(self, request: GenerationRequest) -> None:
        """The request goes to the engine: `ended` follows."""

    def ended(self, record: RequestRecord, num_cached_tokens: int, finish_reasons: Sequence[FinishReason]) -> None:
        """The request ended.

        Args:
            record: its numbers.
            num_cached_tokens: its prompt's cache hits.
            finish_reasons: of its outputs that had one, by index.
        """


class Tracer(Protocol):
    """Is notified of calls and requests on the event loop."""

    def call(
        self, path: str, context: CallContext, *, has_many: bool, attributes: Mapping[str, str] = NOTHING
    ) -> CallTrace:
        """A call begins in this task.

        Args:
            path: the method's full name, such as `onward.v1.GenerationService/Generate`, or HTTP's route.
            context: the call's.
            has_many: whether the call may have several requests, each with a span of its own.
            attributes: what else its transport knows of it, by OpenTelemetry's names.
        """

    def request(self, model: str) -> RequestTrace:
        """A request of a served model begins, in the task of its call."""

    async def close(self, max_wait_seconds: float) -> None:
        """Exports the rest, for at most `max_wait_seconds`. Nothing may be reported afterwards."""


class NoTracer:
    """Discards everything. It is its own trace of every call and request."""

    def call(
        self, path: str, context: CallContext, *, has_many: bool, attributes: Mapping[str, str] = NOTHING
    ) -> CallTrace:
        """Nothing."""
        return self

    def request(self, model: str) -> RequestTrace:
        """Nothing."""
        return self

    def submitted(self, request: GenerationRequest) -> None:
        """Nothing."""

    def ended(self, *_: object) -> None:
        """Nothing."""

    async def close(self, max_wait_seconds: float) -> None:
        """Nothing."""
