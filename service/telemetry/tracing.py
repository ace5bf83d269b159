"""What the server reports to a tracer of its calls and requests, and the tracer that keeps none of it.

    interceptor ── call() ──────────────────────────────> CallTrace.ended(status)
    admission   ── request() ─> submitted(request) ─────> RequestTrace.ended(record)

A tracer's `request` belongs to the `call` in whose task it is asked for. What reports never asks whether there is an
exporter. Knows none: `service.telemetry.otel` is the tracer that exports, and `exporting` imports it where it is
wanted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from service.engine.types import FinishReason, GenerationRequest
from service.telemetry.metrics import RequestRecord


class CallContext(Protocol):
    """What a tracer needs of gRPC's own context of a call."""

    def invocation_metadata(self) -> Iterable[tuple[str, str | bytes]] | None:
        """What the client sent along."""

    def peer(self) -> str:
        """Where the client is, as in `ipv4:127.0.0.1:5000`."""


class CallTrace(Protocol):
    """One call of a method of ours."""

    def ended(self, code: str, message: str) -> None:
        """Its handler is over, with this status. Called once; a request of the call may outlive it."""


class RequestTrace(Protocol):
    """One request of a call."""

    def submitted(self, request: GenerationRequest) -> None:
        """The engine will have it, so that `ended` follows."""

    def ended(self, record: RequestRecord, num_cached_tokens: int, finish_reasons: Sequence[FinishReason]) -> None:
        """It is over.

        Args:
            record: what became of it.
            num_cached_tokens: tokens given whose keys and values were at hand.
            finish_reasons: those of its outputs, by index, as far as they had one.
        """


class Tracer(Protocol):
    """Is notified of calls and requests, on the event loop."""

    def call(self, path: str, context: CallContext, *, has_many: bool) -> CallTrace:
        """A call of a method begins in this task.

        Args:
            path: the method's full name, as in `onward.v1.GenerationService/Generate`.
            context: gRPC's.
            has_many: whether it may bring several requests, each of which is a matter of its own.
        """

    def request(self, model: str) -> RequestTrace:
        """A request of a served model asks for a place, in the task of its call."""

    async def close(self, max_wait_seconds: float) -> None:
        """Nothing follows; what is not yet exported has so long to be."""


class NoTracer:
    """Keeps nothing, and is its own trace of everything."""

    def call(self, path: str, context: CallContext, *, has_many: bool) -> CallTrace:
        """Nothing."""
        return _NO_TRACE

    def request(self, model: str) -> RequestTrace:
        """Nothing."""
        return _NO_TRACE

    async def close(self, max_wait_seconds: float) -> None:
        """Nothing."""


class _NoTrace:
    def ended(self, *_: object) -> None:
        """Nothing."""

    def submitted(self, request: GenerationRequest) -> None:
        """Nothing."""


_NO_TRACE = _NoTrace()
