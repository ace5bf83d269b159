"""Traces and metrics by OpenTelemetry: a server span for each call, with spans below it for its request's phases.

Names are those of the semantic conventions for gRPC and for generative AI. A call's span ends when its handler does,
but is exported only when its request is over, too: a cancelled stream has left before the engine says how far it came.
Where a call may bring many requests, each has a span of its own between the call's and its phases'. Nothing is made for
a token. Times are the engine's, put on the wall clock by one offset for each call, so that the spans of a trace fit
each other exactly. Spans hold numbers, names and ids: no prompt, no text.

The SDK reads its own `OTEL_…` environment variables, which is its contract with operators. Needs the extra `otel`.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Protocol
from urllib.parse import unquote

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.metrics import Histogram, MeterProvider, NoOpMeterProvider
from opentelemetry.sdk import metrics as sdk_metrics
from opentelemetry.sdk import trace as sdk_trace
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, TracerProvider, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from service.engine.types import FinishReason, GenerationRequest
from service.errors import EngineFailed
from service.telemetry.lifecycle import phases
from service.telemetry.metrics import TIME_BUCKETS, RequestRecord
from service.telemetry.tracing import CallContext, CallTrace, NoTracer, RequestTrace

Attributes = dict[str, AttributeValue]

_ONWARD = "onward"
_OK = "OK"
# What the convention counts as the server's errors; with any other code a server span's status is left alone.
_SERVER_ERRORS = frozenset({"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"})
_SUCCESSES = frozenset({FinishReason.END_OF_SEQUENCE, FinishReason.STOP, FinishReason.LENGTH})
# Attributes are signed 64-bit numbers, seeds are not: one that does not fit would cost the whole batch of spans.
_MAX_INTEGER = 2**63 - 1
_NANOSECONDS = 1_000_000_000

_CURRENT_CALL: ContextVar[_Call | None] = ContextVar("onward_current_call", default=None)


def export(endpoint: str | None, *, with_metrics: bool) -> OtelTracer:
    """A tracer that exports by OTLP over gRPC, in the background.

    Args:
        endpoint: `http://host:port` or `https://host:port`; None leaves it to the SDK's environment variables.
        with_metrics: whether `gen_ai.server.…` metrics are exported besides.
    """
    ours = Resource.create({"service.name": _ONWARD, "service.version": _own_version()})
    # Once more, on top: what an operator says of the service goes before what we say.
    resource = ours.merge(OTELResourceDetector().detect())
    spans = OTLPSpanExporter(endpoint=endpoint)
    tracers = sdk_trace.TracerProvider(resource=resource, shutdown_on_exit=False)
    tracers.add_span_processor(BatchSpanProcessor(spans))
    if not with_metrics:
        return OtelTracer(tracers, NoOpMeterProvider(), [tracers.shutdown], [spans.shutdown])
    values = OTLPMetricExporter(endpoint=endpoint)
    meters = sdk_metrics.MeterProvider([PeriodicExportingMetricReader(values)], resource, shutdown_on_exit=False)
    return OtelTracer(tracers, meters, [tracers.shutdown, meters.shutdown], [spans.shutdown, values.shutdown])


class OtelTracer:
    """A `Tracer` over OpenTelemetry's providers.

    Args:
        tracers: makes spans.
        meters: makes histograms.
        flushes: each exports what is left and ends, however long that takes.
        aborts: each gives up an export that is going on.
    """

    def __init__(
        self,
        tracers: TracerProvider,
        meters: MeterProvider,
        flushes: Collection[Callable[[], object]] = (),
        aborts: Collection[Callable[[], object]] = (),
    ) -> None:
        self._tracer = tracers.get_tracer(_ONWARD, _own_version())
        self._histograms = _Histograms(meters)
        self._propagator = TraceContextTextMapPropagator()
        self._flushes = flushes
        self._aborts = aborts

    def call(self, path: str, context: CallContext, *, has_many: bool) -> CallTrace:
        """Begins a call's span, below the client's if it sent a `traceparent`."""
        scribe = _Scribe(self._tracer, self._histograms, time.time_ns() - time.monotonic_ns())
        carrier: defaultdict[str, list[str]] = defaultdict(list)
        for key, value in context.invocation_metadata() or ():
            if isinstance(value, str):
                carrier[key].append(value)
        span = self._tracer.start_span(
            path,
            self._propagator.extract(carrier),
            SpanKind.SERVER,
            {"rpc.system.name": "grpc", "rpc.method": path, **_peer(context.peer())},
            start_time=scribe.now(),
        )
        call = _Call(scribe, span, has_many=has_many)
        # For this task and whatever it awaits. Never reset: the task ends with the call.
        _CURRENT_CALL.set(call)
        return call

    def request(self, model: str) -> RequestTrace:
        """Ties a request to the call of this task; one that no call asked for is not traced."""
        call = _CURRENT_CALL.get()
        return NoTracer().request(model) if call is None else call.request(model)

    async def close(self, max_wait_seconds: float) -> None:
        """Exports what is left, if it can be done in time."""
        await asyncio.to_thread(self._close, max_wait_seconds)

    def _close(self, max_wait_seconds: float) -> None:
        # Without a collector, an export retries for many seconds.
        threads = [threading.Thread(target=flush, name="telemetry", daemon=True) for flush in self._flushes]
        for thread in threads:
            thread.start()
        until = time.monotonic() + max_wait_seconds
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))
        if any(thread.is_alive() for thread in threads):
            for abort in self._aborts:
                abort()


@dataclass(frozen=True, slots=True)
class _Scribe:
    """Writes the spans and metrics of one call, by one clock."""

    tracer: Tracer
    histograms: _Histograms
    offset: int

    def now(self) -> int:
        """The wall clock's nanoseconds, as the call counts them."""
        return self.offset + time.monotonic_ns()

    def at(self, seconds: float) -> int:
        """The engine's seconds as the wall clock's nanoseconds."""
        return self.offset + round(seconds * _NANOSECONDS)

    def tell(self, span: Span, request: _Request, error: Attributes) -> None:
        """What became of a request: on a span, as its phases below that, and as metrics."""
        record = request.record
        if record is None:
            return
        context = set_span_in_context(span)
        self.histograms.observe(record, request.identity, error, context)
        if not span.is_recording():
            return
        span.set_attributes(request.attributes)
        parts = phases(record.timings, record.outcome)
        for part in parts:
            # An error ends the phase that it meets.
            marks = error if part is parts[-1] else {}
            below = self.tracer.start_span(part.name, context, attributes=marks, start_time=self.at(part.start))
            below.end(self.at(part.end))


class _Owner(Protocol):
    """Whose span tells what became of a request."""

    def begun(self, request: _Request) -> None:
        """The engine will have it."""

    def done(self, request: _Request) -> None:
        """It is over."""


class _Request:
    """What a request asked for and what became of it, by the names of the convention; None while that is open."""

    def __init__(self, owner: _Owner) -> None:
        self.asked: GenerationRequest | None = None
        self.record: RequestRecord | None = None
        self.identity: Attributes = {}
        self.attributes: Attributes = {}
        self._owner = owner

    def submitted(self, request: GenerationRequest) -> None:
        """Keeps what it asks for."""
        self.asked = request
        self.identity = {
            "gen_ai.operation.name": _operation(request),
            "gen_ai.provider.name": _ONWARD,
            "gen_ai.request.model": request.model,
            "gen_ai.response.model": request.model,
        }
        self.attributes = {**self.identity, **_asked(request)}
        self._owner.begun(self)

    def ended(self, record: RequestRecord, num_cached_tokens: int, finish_reasons: Sequence[FinishReason]) -> None:
        """Keeps what became of it."""
        self.record = record
        self.attributes |= {
            "gen_ai.usage.input_tokens": record.num_prompt_tokens,
            "gen_ai.usage.output_tokens": record.num_generated_tokens,
            "gen_ai.usage.cache_read.input_tokens": num_cached_tokens,
        }
        if finish_reasons:
            self.attributes["gen_ai.response.finish_reasons"] = [str(reason) for reason in finish_reasons]
        self._owner.done(self)


class _Call:
    """A call's span, exported once the handler is over and so is its request, if the engine had it.

    Args:
        scribe: writes.
        span: the call's.
        has_many: whether requests have spans of their own.
    """

    def __init__(self, scribe: _Scribe, span: Span, *, has_many: bool) -> None:
        self._scribe = scribe
        self._span = span
        self._has_many = has_many
        self._requests: list[_Request] = []
        self._num_open = 1
        self._end_time = 0
        self._error: Attributes = {}

    def request(self, model: str) -> RequestTrace:
        """A request of this call asks for a place."""
        if self._has_many:
            return _Request(_Part(self._scribe, self._span))
        self._span.set_attributes({"gen_ai.provider.name": _ONWARD, "gen_ai.request.model": model})
        return _Request(self)

    def ended(self, code: str, message: str) -> None:
        """Keeps status and time. The messages of errors that are the client's may quote it, and are not exported."""
        self._end_time = self._scribe.now()
        self._span.set_attribute("rpc.response.status_code", code)
        if code != _OK:
            self._error = {"error.type": code}
        if code in _SERVER_ERRORS:
            self._span.set_status(Status(StatusCode.ERROR, message))
        self._release()

    def begun(self, request: _Request) -> None:
        """The span waits for it."""
        self._requests.append(request)
        self._num_open += 1

    def done(self, request: _Request) -> None:  # noqa: ARG002 — all are exported together, when the status is known
        """The span waits for one less."""
        self._release()

    def _release(self) -> None:
        self._num_open -= 1
        if self._num_open:
            return
        for request in self._requests:
            self._scribe.tell(self._span, request, self._error)
        self._span.set_attributes(self._error)
        self._span.end(self._end_time)


class _Part:
    """The span of one request among the many of a call, from its arrival to its end."""

    def __init__(self, scribe: _Scribe, above: Span) -> None:
        self._scribe = scribe
        self._above = above
        self._span: Span | None = None

    def begun(self, request: _Request) -> None:
        """The span begins."""
        if request.asked is not None:
            name = f"{_operation(request.asked)} {request.asked.model}"
            context, arrival = set_span_in_context(self._above), self._scribe.at(request.asked.arrival_time)
            self._span = self._scribe.tracer.start_span(name, context, start_time=arrival)

    def done(self, request: _Request) -> None:
        """The span ends. The status of its own that such a request has is text for the client: ours is its outcome."""
        if self._span is None or request.record is None:
            return
        outcome = request.record.outcome
        error: Attributes = {} if outcome in _SUCCESSES else {"error.type": outcome}
        self._scribe.tell(self._span, request, error)
        self._span.set_attributes(error)
        if outcome == EngineFailed.label:
            self._span.set_status(Status(StatusCode.ERROR))
        self._span.end(self._scribe.at(request.record.timings.finished_time))


class _Histograms:
    """The metrics of a model server, in the buckets of our Prometheus metrics.

    The convention's begin at 10 ms, which is longer than many a small model takes for all of it.
    """

    def __init__(self, meters: MeterProvider) -> None:
        meter = meters.get_meter(_ONWARD, _own_version())

        def seconds(name: str, meaning: str) -> Histogram:
            return meter.create_histogram(name, "s", meaning, explicit_bucket_boundaries_advisory=TIME_BUCKETS)

        self._duration = seconds("gen_ai.server.request.duration", "From a request's arrival to its end.")
        self._first_token = seconds("gen_ai.server.time_to_first_token", "From arrival to the first token.")
        self._per_token = seconds(
            "gen_ai.server.time_per_output_token", "Mean time per token after an output's first, per request."
        )

    def observe(self, record: RequestRecord, identity: Attributes, error: Attributes, context: Context) -> None:
        """A request is over; the times of tokens are those of requests that succeeded. `context` is for exemplars."""
        timings = record.timings
        self._duration.record(timings.finished_time - timings.arrival_time, identity | error, context)
        if error:
            return
        if timings.first_token_time is not None:
            self._first_token.record(timings.first_token_time - timings.arrival_time, identity, context)
        if record.seconds_per_token is not None:
            self._per_token.record(record.seconds_per_token, identity, context)


def _own_version() -> str:
    try:
        return version(_ONWARD)
    except PackageNotFoundError:  # run from a source tree that was never installed
        return "uninstalled"


def _operation(request: GenerationRequest) -> str:
    return "text_completion" if request.stopping.max_tokens else "score"


def _asked(request: GenerationRequest) -> Attributes:
    """What a request asked for. Stop strings are left out: they are text."""
    asked: Attributes = {"gen_ai.response.id": request.request_id}
    if not request.stopping.max_tokens:
        return asked
    asked["gen_ai.request.max_tokens"] = request.stopping.max_tokens
    if request.num_outputs != 1:
        asked["gen_ai.request.choice.count"] = request.num_outputs
    if request.beam_search is not None:
        return asked
    sampling = request.sampling
    asked["gen_ai.request.temperature"] = sampling.temperature
    asked["gen_ai.request.top_p"] = sampling.top_p
    if sampling.top_k:
        asked["gen_ai.request.top_k"] = sampling.top_k
    if sampling.frequency_penalty:
        asked["gen_ai.request.frequency_penalty"] = sampling.frequency_penalty
    if sampling.presence_penalty:
        asked["gen_ai.request.presence_penalty"] = sampling.presence_penalty
    if sampling.seed is not None and sampling.seed <= _MAX_INTEGER:
        asked["gen_ai.request.seed"] = sampling.seed
    return asked


def _peer(peer: str) -> Attributes:
    """A client's address from gRPC's own notation: `ipv4:127.0.0.1:5000`, `ipv6:%5B::1%5D:5000`, `unix:…`."""
    kind, _, address = peer.partition(":")
    host, _, port = unquote(address).rpartition(":")
    if kind not in ("ipv4", "ipv6") or not port.isdecimal():
        return {}
    return {"network.peer.address": host.strip("[]"), "network.peer.port": int(port)}
