"""OpenTelemetry over real calls: spans, their names, times and parents, how calls end, metrics, a collector."""

from __future__ import annotations

import asyncio
import queue
import time
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import HistogramDataPoint, InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from onward.inference.open_inference_pb2_grpc import GRPCInferenceServiceStub
from onward.v1 import generation_pb2 as pb
from service.config import Telemetry
from service.engine.batch import ScheduledBatch
from service.telemetry.exporting import open_tracer
from service.telemetry.metrics import TIME_BUCKETS
from service.telemetry.otel import OtelTracer
from tests.fakes import FakeRunner, Gate, script
from tests.http_calls import ask
from tests.servers import (
    MODEL,
    SLOTS,
    eventually,
    generate_request,
    infer_request,
    read,
    read_accepted,
    running,
    served_model,
    status_of,
)

GENERATE = "onward.v1.GenerationService/Generate"
STREAM = "onward.v1.GenerationService/GenerateStream"
TRACE_ID, PARENT_ID = 0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331
SAMPLED, UNSAMPLED = (f"00-{TRACE_ID:032x}-{PARENT_ID:016x}-{flags}" for flags in ("01", "00"))


@dataclass(frozen=True, slots=True)
class Kept:
    """A tracer that keeps what it makes."""

    tracer: OtelTracer
    exporter: InMemorySpanExporter
    reader: InMemoryMetricReader

    def below(self, span: ReadableSpan) -> list[ReadableSpan]:
        """The spans whose parent it is."""
        return [each for each in self.spans if each.parent and each.parent.span_id == span.context.span_id]

    @property
    def spans(self) -> tuple[ReadableSpan, ...]:
        """In the order in which they ended for us."""
        return self.exporter.get_finished_spans()

    async def call(self) -> tuple[ReadableSpan, dict[str, ReadableSpan]]:
        """The one call's span, when it is there, and those below it by name."""
        await eventually(lambda: any(span.kind is SpanKind.SERVER for span in self.spans))
        (call,) = [span for span in self.spans if span.kind is SpanKind.SERVER]
        parts = [span for span in self.spans if span is not call]
        for part in parts:
            assert part.parent is not None
            assert part.parent.span_id == call.context.span_id
            assert part.context.trace_id == call.context.trace_id
            assert part.kind is SpanKind.INTERNAL
        return call, {part.name: part for part in parts}

    def metrics(self) -> dict[str, list[HistogramDataPoint]]:
        """The points of each histogram."""
        data = self.reader.get_metrics_data()
        if data is None:
            return {}
        found = [
            each for resource in data.resource_metrics for scope in resource.scope_metrics for each in scope.metrics
        ]
        assert {each.unit for each in found} <= {"s"}
        return {each.name: list(each.data.data_points) for each in found}


@pytest.fixture
def kept() -> Iterator[Kept]:
    exporter, reader = InMemorySpanExporter(), InMemoryMetricReader()
    tracers = TracerProvider(shutdown_on_exit=False)
    tracers.add_span_processor(SimpleSpanProcessor(exporter))
    meters = MeterProvider([reader], shutdown_on_exit=False)
    yield Kept(OtelTracer(tracers, meters), exporter, reader)
    tracers.shutdown()
    meters.shutdown()


def attrs(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def times(span: ReadableSpan) -> tuple[int, int]:
    assert span.start_time is not None
    assert span.end_time is not None
    return span.start_time, span.end_time


def seconds(span: ReadableSpan) -> float:
    start, end = times(span)
    return (end - start) / 1e9


async def test_unary_call_is_one_server_span_around_queue_prefill_and_decode(kept: Kept) -> None:
    before = time.time_ns()
    async with running(tracer=kept.tracer) as server:
        sampling = pb.SamplingParams(temperature=0.5, top_p=0.9, top_k=7, seed=11, frequency_penalty=0.25)
        asked = generate_request("abc", request_id="mine", max_tokens=6, min_tokens=6, sampling=sampling)
        answer = await server.generation.Generate(asked)
    call, parts = await kept.call()
    assert call.name == GENERATE
    assert call.parent is None
    assert call.status.status_code is StatusCode.UNSET
    attributes = attrs(call)
    assert attributes.pop("network.peer.port") > 0
    assert attributes == {
        "rpc.system.name": "grpc",
        "rpc.method": GENERATE,
        "rpc.response.status_code": "OK",
        "network.peer.address": "127.0.0.1",
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "onward",
        "gen_ai.request.model": MODEL,
        "gen_ai.response.model": MODEL,
        "gen_ai.response.id": "mine",
        "gen_ai.request.max_tokens": 6,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": pytest.approx(0.9),
        "gen_ai.request.top_k": 7,
        "gen_ai.request.seed": 11,
        "gen_ai.request.frequency_penalty": 0.25,
        "gen_ai.usage.input_tokens": 4,
        "gen_ai.usage.output_tokens": 6,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.response.finish_reasons": ("length",),
    }
    assert list(parts) == ["queue", "prefill", "decode"]
    # Exactly the answer's times, back to back, inside the call, on the wall clock.
    for name, part in parts.items():
        assert seconds(part) == pytest.approx(getattr(answer.timings, name), abs=2e-9)
    (arrival, scheduled), (prefill_start, first), (decode_start, finished) = map(times, parts.values())
    assert (scheduled, first) == (prefill_start, decode_start)
    start, end = times(call)
    assert before <= start <= arrival <= scheduled <= first <= finished <= end <= time.time_ns()


async def test_a_call_over_http_is_a_span_below_its_clients(kept: Kept) -> None:
    async with running(tracer=kept.tracer, http_port=0) as server:
        parent = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
        answer = await ask(server, "/v1/completions", {"prompt": "abc", "max_tokens": 3, "request_id": "mine"}, parent)
        assert answer.status == 200
    call, parts = await kept.call()
    assert call.name == "/v1/completions"
    assert call.parent is not None
    assert f"{call.parent.span_id:x}" == "b7ad6b7169203331"
    attributes = attrs(call)
    assert (attributes["http.route"], attributes["http.response.status_code"]) == ("/v1/completions", 200)
    request = [attributes[name] for name in ("http.request.method", "url.path", "url.scheme")]
    assert request == ["POST", "/v1/completions", "http"]
    assert (attributes["gen_ai.response.id"], attributes["gen_ai.usage.output_tokens"]) == ("mine", 3)
    assert "error.type" not in attributes
    assert not any(name.startswith("rpc.") for name in attributes)
    assert list(parts) == ["queue", "prefill", "decode"]


async def test_several_outputs_have_a_finish_reason_each(kept: Kept) -> None:
    async with running(
        runner=FakeRunner(SLOTS, next_token=script("hello", prompt_length=3)), trust=True, tracer=kept.tracer
    ) as server:
        await server.generation.Generate(
            generate_request(sampling=pb.SamplingParams(n=2, temperature=0.0), max_tokens=9)
        )
    call, _ = await kept.call()
    assert attrs(call)["gen_ai.response.finish_reasons"] == ("end_of_sequence", "end_of_sequence")
    assert attrs(call)["gen_ai.request.choice.count"] == 2
    assert attrs(call)["gen_ai.usage.output_tokens"] == 12


async def test_canceled_stream_is_recorded_with_its_tokens_so_far(kept: Kept) -> None:
    async with running([served_model(context=100_000)], tracer=kept.tracer) as server:
        call_of_client = await read_accepted(server.stream(max_tokens=60_000))
        await call_of_client.read()
        call_of_client.cancel()
        await server.until_ended(1)
    call, parts = await kept.call()
    assert attrs(call)["rpc.response.status_code"] == "CANCELLED"
    assert attrs(call)["error.type"] == "CANCELLED"
    # The client's choice and no error of the server: the convention leaves the span's status alone.
    assert call.status.status_code is StatusCode.UNSET
    assert attrs(call)["gen_ai.response.finish_reasons"] == ("cancelled",)
    assert attrs(call)["gen_ai.usage.output_tokens"] == server.metric("generation_tokens_total", model_name=MODEL)
    assert list(parts) == ["queue", "prefill", "decode"]
    assert [attrs(part).get("error.type") for part in parts.values()] == [None, None, "CANCELLED"]
    (duration,) = kept.metrics()["gen_ai.server.request.duration"]
    assert duration.attributes["error.type"] == "CANCELLED"
    assert "gen_ai.server.time_to_first_token" not in kept.metrics()


async def test_call_ends_with_its_handler_and_its_request_with_the_engines_word(kept: Kept) -> None:
    gate = Gate()
    async with running(runner=FakeRunner(SLOTS, before_run=gate), tracer=kept.tracer) as server:
        with gate.closed():
            call_of_client = await read_accepted(server.stream(max_tokens=2))
            await gate.until_entered()
            call_of_client.cancel()
            await server.until_handled("GenerateStream", "CANCELLED")
            assert not kept.spans
            await asyncio.sleep(0.05)
        await server.until_ended(1)
    call, parts = await kept.call()
    # The engine was held for twice as long after the handler had ended.
    assert times(list(parts.values())[-1])[1] - times(call)[1] >= 25_000_000


async def test_failed_step_is_an_error_with_the_id_that_the_log_has(kept: Kept) -> None:
    def before_run(batch: ScheduledBatch) -> None:
        raise RuntimeError("secret")

    async with running(runner=FakeRunner(SLOTS, before_run=before_run), trust=True, tracer=kept.tracer) as server:
        error = await status_of(server.stream())
    call, parts = await kept.call()
    assert attrs(call)["rpc.response.status_code"] == attrs(call)["error.type"] == "INTERNAL"
    assert call.status.status_code is StatusCode.ERROR
    assert call.status.description == error.details()
    assert attrs(parts["prefill"])["error.type"] == "INTERNAL"
    assert "secret" not in "".join(span.to_json() for span in kept.spans)


async def test_refused_calls_are_spans_without_phases(kept: Kept) -> None:
    gate = Gate()
    async with running(runner=FakeRunner(SLOTS, before_run=gate), tracer=kept.tracer, max_queue_size=0) as server:
        with gate.closed():
            held = [await read_accepted(server.stream(max_tokens=2)) for _ in range(SLOTS)]
            refused = await status_of(server.generation.Generate(generate_request()))
            unknown = await status_of(server.generation.Generate(generate_request(model="unknown")))
            invalid = await status_of(server.generation.Generate(generate_request("private text", max_tokens=0)))
        for call in held:
            await read(call)
        await eventually(lambda: sum(span.kind is SpanKind.SERVER for span in kept.spans) == SLOTS + 3)
    codes = [grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.NOT_FOUND, grpc.StatusCode.INVALID_ARGUMENT]
    assert [error.code() for error in (refused, unknown, invalid)] == codes
    found = {attrs(span)["rpc.response.status_code"]: span for span in kept.spans if span.name == GENERATE}
    assert set(found) == {code.name for code in codes}
    for code, span in found.items():
        assert attrs(span)["error.type"] == code
        assert span.status.status_code is StatusCode.UNSET
        assert span.status.description is None
        assert not kept.below(span)
    assert attrs(found["RESOURCE_EXHAUSTED"])["gen_ai.request.model"] == MODEL
    # Refused requests have no duration.
    (duration,) = kept.metrics()["gen_ai.server.request.duration"]
    assert duration.count == SLOTS


async def test_calls_without_generation_have_their_own_attributes(kept: Kept) -> None:
    async with running(tracer=kept.tracer) as server:
        await server.generation.Tokenize(pb.TokenizeRequest(text="ab"))
        await server.generation.Score(pb.ScoreRequest(text="abc"))
    calls = {span.name.rpartition("/")[2]: attrs(span) for span in kept.spans if span.parent is None}
    assert set(calls) == {"Tokenize", "Score"}
    assert not [name for name in calls["Tokenize"] if name.startswith("gen_ai.")]
    assert calls["Score"]["gen_ai.operation.name"] == "score"
    assert "gen_ai.request.temperature" not in calls["Score"]


@pytest.mark.parametrize(
    ("form", "kind"),
    [({"json": True}, "json"), ({"json_schema": '{"type": "null"}'}, "json"), ({"regex": "ab"}, "text")],
)
async def test_structured_output_has_its_type(kept: Kept, form: dict[str, Any], kind: str) -> None:
    async with running(tracer=kept.tracer) as server:
        asked = generate_request(structured_output=pb.StructuredOutput(**form), max_tokens=3)
        await server.generation.Generate(asked)
    call, _ = await kept.call()
    assert attrs(call)["gen_ai.output.type"] == kind


async def test_call_that_its_client_does_not_trace_is_not_traced_but_measured(kept: Kept) -> None:
    async with running(tracer=kept.tracer) as server:
        await server.generation.Generate(generate_request(max_tokens=2), metadata=(("traceparent", UNSAMPLED),))
        await server.generation.Generate(generate_request(max_tokens=3))
    call, _ = await kept.call()
    assert attrs(call)["gen_ai.usage.output_tokens"] == 3
    (duration,) = kept.metrics()["gen_ai.server.request.duration"]
    assert duration.count == 2


@pytest.mark.parametrize("garbage", ["00-nonsense", "00-" + "0" * 32 + "-0-01"])
async def test_traceparent_that_is_none_begins_a_trace(kept: Kept, garbage: str) -> None:
    async with running(tracer=kept.tracer) as server:
        await server.generation.Generate(generate_request(max_tokens=2), metadata=(("traceparent", garbage),))
    call, _ = await kept.call()
    assert call.parent is None


async def test_traces_of_concurrent_calls_do_not_mix(kept: Kept) -> None:
    async with running(tracer=kept.tracer) as server:
        calls = [
            server.stream(request_id=f"r{number}", max_tokens=number + 1).__aiter__() for number in range(2 * SLOTS)
        ]

        async def drain(call: Any) -> None:
            async for _ in call:
                pass

        await asyncio.gather(*map(drain, calls))
    roots = [span for span in kept.spans if span.parent is None]
    assert len({span.context.trace_id for span in roots}) == 2 * SLOTS
    for root in roots:
        attributes = attrs(root)
        assert attributes["gen_ai.response.id"] == f"r{int(str(attributes['gen_ai.usage.output_tokens'])) - 1}"
        assert [span.name for span in kept.below(root)] == ["queue", "prefill", "decode"]


async def test_each_request_of_a_stream_of_many_has_a_span_of_its_own(kept: Kept) -> None:
    async with running(tracer=kept.tracer) as server:
        stub: Any = GRPCInferenceServiceStub(server.channel)
        await stub.ModelInfer(infer_request(max_tokens=2))
        call = stub.ModelStreamInfer()
        for max_tokens in (3, 0, 5):
            await call.write(infer_request(max_tokens=max_tokens))
        await call.done_writing()
        assert [each async for each in call]
    unary, stream = [span for span in kept.spans if span.kind is SpanKind.SERVER]
    assert unary.name == "inference.GRPCInferenceService/ModelInfer"
    assert [span.name for span in kept.below(unary)] == ["queue", "prefill", "decode"]
    assert stream.name == "inference.GRPCInferenceService/ModelStreamInfer"
    assert attrs(stream)["rpc.response.status_code"] == "OK"
    assert not [name for name in attrs(stream) if name.startswith("gen_ai.")]
    # The second was refused before it was a request of the engine.
    requests = kept.below(stream)
    assert {span.name for span in requests} == {f"text_completion {MODEL}"}
    tokens = sorted(attrs(span)["gen_ai.usage.output_tokens"] for span in requests)
    assert tokens == [3, 5]
    for span in requests:
        assert span.kind is SpanKind.INTERNAL
        queue_span, prefill, decode = kept.below(span)
        assert [queue_span.name, prefill.name, decode.name] == ["queue", "prefill", "decode"]
        assert times(span) == (times(queue_span)[0], times(decode)[1])
        assert times(stream)[0] <= times(span)[0]
        assert "error.type" not in attrs(span)
    (duration,) = kept.metrics()["gen_ai.server.request.duration"]
    assert duration.count == 3


async def test_requests_of_a_stream_that_was_left_are_cancelled_each(kept: Kept) -> None:
    async with running([served_model(context=100_000)], tracer=kept.tracer) as server:
        stub: Any = GRPCInferenceServiceStub(server.channel)
        call = stub.ModelStreamInfer()
        for _ in range(2):
            await call.write(infer_request(max_tokens=60_000))
        await eventually(lambda: server.metric("num_requests_running", model_name=MODEL) == 2)
        call.cancel()
        await server.until_ended(2)
    (stream,) = [span for span in kept.spans if span.kind is SpanKind.SERVER]
    assert attrs(stream)["error.type"] == "CANCELLED"
    assert [attrs(span)["error.type"] for span in kept.below(stream)] == ["cancelled"] * 2


async def test_seed_beyond_signed_numbers_is_left_out(kept: Kept) -> None:
    async with running(tracer=kept.tracer) as server:
        for seed in (2**63 - 1, 2**63):
            sampling = pb.SamplingParams(temperature=1.0, seed=seed)
            await server.generation.Generate(generate_request(max_tokens=2, sampling=sampling))
    seeds = [attrs(span).get("gen_ai.request.seed") for span in kept.spans if span.parent is None]
    assert seeds == [2**63 - 1, None]


async def test_metrics_of_a_model_server_are_those_of_prometheus(kept: Kept) -> None:
    async with running(tracer=kept.tracer) as server:
        for count in (1, 5, 9):
            await server.generation.Generate(generate_request(max_tokens=count))
        ours = {
            name: server.metric(f"{name}_seconds_sum", model_name=MODEL)
            for name in ("e2e_request_latency", "time_to_first_token", "time_per_output_token")
        }
    points = {name: point for name, (point,) in kept.metrics().items()}
    identity = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "onward",
        "gen_ai.request.model": MODEL,
        "gen_ai.response.model": MODEL,
    }
    assert {name: (point.count, attrs(point)) for name, point in points.items()} == {
        "gen_ai.server.request.duration": (3, identity),
        "gen_ai.server.time_to_first_token": (3, identity),
        "gen_ai.server.time_per_output_token": (2, identity),
    }
    assert points["gen_ai.server.request.duration"].sum == pytest.approx(ours["e2e_request_latency"])
    assert points["gen_ai.server.time_per_output_token"].sum == pytest.approx(ours["time_per_output_token"])
    # Ours looks at its clock when the whole step is over, this one when the token was chosen.
    assert 0 < points["gen_ai.server.time_to_first_token"].sum <= ours["time_to_first_token"]
    for point in points.values():
        assert tuple(point.explicit_bounds) == TIME_BUCKETS


class Collector(trace_service_pb2_grpc.TraceServiceServicer, metrics_service_pb2_grpc.MetricsServiceServicer):
    """Takes what an exporter sends."""

    def __init__(self) -> None:
        self.traces: queue.SimpleQueue[trace_service_pb2.ExportTraceServiceRequest] = queue.SimpleQueue()
        self.metrics: queue.SimpleQueue[metrics_service_pb2.ExportMetricsServiceRequest] = queue.SimpleQueue()

    def Export(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802 — the protocol's name
        if isinstance(request, trace_service_pb2.ExportTraceServiceRequest):
            self.traces.put(request)
            return trace_service_pb2.ExportTraceServiceResponse()
        self.metrics.put(request)
        return metrics_service_pb2.ExportMetricsServiceResponse()


@contextmanager
def collector() -> Iterator[tuple[Collector, str]]:
    """A collector that listens, and its endpoint."""
    taken = Collector()
    server = grpc.server(futures.ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(taken, server)
    metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(taken, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield taken, f"http://127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


def attributes_of(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}


@pytest.mark.parametrize("by_environment", [False, True], ids=["by flag", "by environment"])
async def test_collector_receives_spans_and_metrics_before_the_server_is_gone(
    by_environment: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
    # A busy machine may take longer than the second that the server has for it.
    monkeypatch.setattr("service.app._CLOSING_SECONDS", 60.0)
    with collector() as (taken, endpoint):
        if by_environment:
            monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
            monkeypatch.setenv("OTEL_SERVICE_NAME", "renamed")
        tracer = open_tracer(Telemetry.ALL, None if by_environment else endpoint)
        async with running(tracer=tracer) as server:
            metadata = (("traceparent", SAMPLED), ("tracestate", "vendor=1"))
            await server.generation.Generate(generate_request(max_tokens=4), metadata=metadata)
        (resource_spans,) = taken.traces.get(timeout=30).resource_spans
        (resource_metrics,) = taken.metrics.get(timeout=30).resource_metrics
    resource = attributes_of(resource_spans.resource.attributes)
    assert resource["service.name"] == ("renamed" if by_environment else "onward")
    assert resource["deployment.environment.name"] == "test"
    assert attributes_of(resource_metrics.resource.attributes) == resource
    (scope,) = resource_spans.scope_spans
    assert [span.name for span in scope.spans] == ["queue", "prefill", "decode", GENERATE]
    assert {span.trace_id for span in scope.spans} == {TRACE_ID.to_bytes(16, "big")}
    call = scope.spans[-1]
    assert (call.parent_span_id, call.trace_state) == (PARENT_ID.to_bytes(8, "big"), "vendor=1")
    assert {span.parent_span_id for span in scope.spans[:-1]} == {call.span_id}
    assert attributes_of(call.attributes)["gen_ai.usage.output_tokens"] == 4
    names = {metric.name for scope in resource_metrics.scope_metrics for metric in scope.metrics}
    assert names >= {"gen_ai.server.request.duration", "gen_ai.server.time_to_first_token"}


async def test_traces_alone_send_no_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.app._CLOSING_SECONDS", 60.0)
    with collector() as (taken, endpoint):
        async with running(tracer=open_tracer(Telemetry.TRACES, endpoint)) as server:
            await server.generation.Generate(generate_request(max_tokens=2))
        assert taken.traces.get(timeout=30)
        assert taken.metrics.empty()


async def test_collector_that_is_not_there_harms_no_call() -> None:
    with collector() as (_, endpoint):
        pass
    async with running(tracer=open_tracer(Telemetry.ALL, endpoint)) as server:
        answer = await server.generation.Generate(generate_request(max_tokens=2))
    assert answer.usage.generated_tokens == 2
