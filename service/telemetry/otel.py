"""Traces and metrics by OpenTelemetry: a server span for each call, with spans below it for its request's phases.

Names follow the semantic conventions for gRPC, HTTP and generative AI. A call's span ends when its handler does, and is
exported once its request has ended too: the engine reports a canceled stream's last numbers after the handler left.
Where a call may have many requests, each has a span of its own between the call's span and its phases'. No work is done
per token. Times are the engine's, moved to the wall clock by one offset per call, so that the spans of a trace fit each
other exactly. Spans hold numbers, names and ids: no prompt, no text.

The SDK reads its own `OTEL_…` environment variables. Needs the extra `otel`.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
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

from service.engine.types import FinishReason, GenerationRequest, StructureKind
from service.errors import EngineFailed
from service.telemetry.lifecycle import phases
from service.telemetry.metrics import TIME_BUCKETS, RequestRecord
from service.telemetry.tracing import NOTHING, CallContext, CallTrace, NoTracer, RequestTrace

Attributes = dict[str, AttributeValue]

_ONWARD = "onward"
_GRPC_STATUS = "rpc.response.status_code"
_GOOD = ("OK", "200")
_HTTP_SERVER_ERRORS = 500
# The convention's server errors; any other code leaves a server span's status unset.
_SERVER_ERRORS = frozenset({"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"})
_SUCCESSES = frozenset({FinishReason.END_OF_SEQUENCE, FinishReason.STOP, FinishReason.LENGTH})
# Attributes are signed 64-bit integers: a larger seed would make the export of its whole batch fail.
_MAX_INTEGER = 2**63 - 1
_NANOSECONDS = 1_000_000_000

_CURRENT_CALL: ContextVar[_Call | None] = ContextVar("onward_current_call", default=None)


def export(endpoint: str | None, *, with_metrics: bool) -> OtelTracer:
    """A tracer that exports by OTLP over gRPC, in the background.

    Args:
        endpoint: `http://host:port` or `https://host:port`; None for the SDK's environment variables.
        with_metrics: whether to export `gen_ai.server.…` metrics, too.
    """
    ours = Resource.create({"service.name": _ONWARD, "service.version": _own_version()})
    # Merged again: the operator's attributes override ours.
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
        tracers: of spans.
        meters: of histograms.
        flushes: each exports the rest and ends, without a time limit.
        aborts: each cancels an export in progress.
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

    def call(
        self, path: str, context: CallContext, *, has_many: bool, attributes: Mapping[str, str] = NOTHING
    ) -> CallTrace:
        """Begins a call's span, below the client's if it sent a `traceparent`."""
        writer = _Writer(self._tracer, self._histograms, time.time_ns() - time.monotonic_ns())
        carrier: defaultdict[str, list[str]] = defaultdict(list)
        for key, value in context.invocation_metadata() or ():
            if isinstance(value, str):
                carrier[key].append(value)
        span = self._tracer.start_span(
            path,
            self._propagator.extract(carrier),
            SpanKind.SERVER,
            {**_route(path), **_peer(context.peer()), **attributes},
            start_time=writer.now(),
        )
        call = _Call(writer, span, has_many=has_many)
        # Of this task and those that it starts. Never reset: the task ends with the call.
        _CURRENT_CALL.set(call)
        return call

    def request(self, model: str) -> RequestTrace:
        """Traces a request below the call of this task; without a call, not at all."""
        call = _CURRENT_CALL.get()
        return NoTracer() if call is None else call.request(model)

    async def close(self, max_wait_seconds: float) -> None:
        """Exports the rest, for at most `max_wait_seconds`."""
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
class _Writer:
    """Writes the spans and metrics of one call; `offset` is from its monotonic to its wall clock, in nanoseconds."""

    tracer: Tracer
    histograms: _Histograms
    offset: int

    def now(self) -> int:
        """Wall clock, in nanoseconds."""
        return self.offset + time.monotonic_ns()

    def at(self, seconds: float) -> int:
        """The engine's seconds as wall-clock nanoseconds."""
        return self.offset + round(seconds * _NANOSECONDS)

    def write(self, span: Span, request: _Request, error: Attributes) -> None:
        """Writes an ended request: attributes of `span`, spans of its phases, metrics."""
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
            # An error belongs to the phase in which it occurred, the last.
            marks = error if part is parts[-1] else {}
            below = self.tracer.start_span(part.name, context, attributes=marks, start_time=self.at(part.start))
            below.end(self.at(part.end))


class _Request:
    """A call's only request, which the call's span describes. Attributes are named by the convention."""

    def __init__(self, call: _Call) -> None:
        self.record: RequestRecord | None = None
        self.identity: Attributes = {}
        self.attributes: Attributes = {}
        self._call = call

    def submitted(self, request: GenerationRequest) -> None:
        """Stores the request's parameters."""
        self.identity = {
            "gen_ai.operation.name": _operation(request),
            "gen_ai.provider.name": _ONWARD,
            "gen_ai.request.model": request.model,
            "gen_ai.response.model": request.model,
        }
        self.attributes = {**self.identity, **_parameters(request)}
        self._begin(request)

    def ended(self, record: RequestRecord, num_cached_tokens: int, finish_reasons: Sequence[FinishReason]) -> None:
        """Stores the request's numbers."""
        self.record = record
        self.attributes |= {
            "gen_ai.usage.input_tokens": record.num_prompt_tokens,
            "gen_ai.usage.output_tokens": record.num_generated_tokens,
            "gen_ai.usage.cache_read.input_tokens": num_cached_tokens,
        }
        if finish_reasons:
            self.attributes["gen_ai.response.finish_reasons"] = [str(reason) for reason in finish_reasons]
        self._end(record)

    def _begin(self, request: GenerationRequest) -> None:  # noqa: ARG002 (the subclass's)
        self._call.wait_for(self)

    def _end(self, record: RequestRecord) -> None:  # noqa: ARG002 (the subclass's)
        self._call.release()


class _OneOfMany(_Request):
    """One of a call's requests, with a span of its own from its arrival to its end."""

    _span: Span | None = None

    def _begin(self, request: GenerationRequest) -> None:
        name, writer = f"{_operation(request)} {request.model}", self._call.writer
        context, arrival = set_span_in_context(self._call.span), writer.at(request.arrival_time)
        self._span = writer.tracer.start_span(name, context, start_time=arrival)

    def _end(self, record: RequestRecord) -> None:
        """Ends the span. The client gets such a request's status as text; the span has its outcome."""
        if self._span is None:
            return
        error: Attributes = {} if record.outcome in _SUCCESSES else {"error.type": record.outcome}
        self._call.writer.write(self._span, self, error)
        self._span.set_attributes(error)
        if record.outcome == EngineFailed.label:
            self._span.set_status(Status(StatusCode.ERROR))
        self._span.end(self._call.writer.at(record.timings.finished_time))


class _Call:
    """A call's span, exported once the handler and the requests that it waits for have ended.

    Args:
        writer: of this call.
        span: the call's.
        has_many: whether requests have spans of their own.
    """

    def __init__(self, writer: _Writer, span: Span, *, has_many: bool) -> None:
        self.writer = writer
        self.span = span
        self._has_many = has_many
        self._requests: list[_Request] = []
        self._num_open = 1
        self._end_time = 0
        self._error: Attributes = {}

    def request(self, model: str) -> RequestTrace:
        """The trace of a request of this call."""
        if self._has_many:
            return _OneOfMany(self)
        self.span.set_attributes({"gen_ai.provider.name": _ONWARD, "gen_ai.request.model": model})
        return _Request(self)

    def ended(self, code: str, message: str) -> None:
        """Sets status and end. The message of a client's error may quote its request and is not exported."""
        self._end_time = self.writer.now()
        is_http = code.isdecimal()
        self.span.set_attributes({"http.response.status_code": int(code)} if is_http else {_GRPC_STATUS: code})
        if code not in _GOOD:
            self._error = {"error.type": code}
        if code in _SERVER_ERRORS or (is_http and int(code) >= _HTTP_SERVER_ERRORS):
            self.span.set_status(Status(StatusCode.ERROR, message))
        self.release()

    def wait_for(self, request: _Request) -> None:
        """Delays the export until a request has ended: the handler's status is an attribute of both."""
        self._requests.append(request)
        self._num_open += 1

    def release(self) -> None:
        """The handler or a request ended; the last one exports the span."""
        self._num_open -= 1
        if self._num_open:
            return
        for request in self._requests:
            self.writer.write(self.span, request, self._error)
        self.span.set_attributes(self._error)
        self.span.end(self._end_time)


class _Histograms:
    """The convention's metrics of a model server, with the buckets of our Prometheus metrics.

    The convention's buckets begin at 10 ms, longer than a whole request of a small model.
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
        """A request ended. Times of tokens are those of successful requests only. `context` is for exemplars."""
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


def _parameters(request: GenerationRequest) -> Attributes:
    """A request's parameters, without its stop strings, which are text."""
    asked: Attributes = {"gen_ai.response.id": request.request_id}
    if not request.stopping.max_tokens:
        return asked
    asked["gen_ai.request.max_tokens"] = request.stopping.max_tokens
    if request.num_outputs != 1:
        asked["gen_ai.request.choice.count"] = request.num_outputs
    if request.structured_output is not None:
        is_json = request.structured_output.kind in (StructureKind.JSON, StructureKind.JSON_SCHEMA)
        asked["gen_ai.output.type"] = "json" if is_json else "text"
    if request.beam_search is not None:
        return asked
    sampling = request.sampling
    asked["gen_ai.request.temperature"] = sampling.temperature
    asked["gen_ai.request.top_p"] = sampling.top_p
    for name in ("top_k", "frequency_penalty", "presence_penalty"):
        if value := getattr(sampling, name):
            asked[f"gen_ai.request.{name}"] = value
    if sampling.seed is not None and sampling.seed <= _MAX_INTEGER:
        asked["gen_ai.request.seed"] = sampling.seed
    return asked


def _route(path: str) -> Attributes:
    """A call's method, gRPC's by its full name, or HTTP's by its route."""
    if path.startswith("/"):
        return {"http.route": path}
    return {"rpc.system.name": "grpc", "rpc.method": path}


def _peer(peer: str) -> Attributes:
    """A client's address, from gRPC's notation: `ipv4:127.0.0.1:5000`, `ipv6:%5B::1%5D:5000`, `unix:…`."""
    kind, _, address = peer.partition(":")
    host, _, port = unquote(address).rpartition(":")
    if kind not in ("ipv4", "ipv6") or not port.isdecimal():
        return {}
    return {"network.peer.address": host.strip("[]"), "network.peer.port": int(port)}
