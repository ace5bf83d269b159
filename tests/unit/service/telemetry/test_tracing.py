"""Which tracer an operator gets, and what is said when it cannot be had; clocks; the end."""

from __future__ import annotations

import contextvars
import subprocess
import sys
import threading
from types import SimpleNamespace

import grpc
import pytest
from opentelemetry.metrics import NoOpMeterProvider
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import NoOpTracerProvider, StatusCode

from service.config import Telemetry
from service.engine.types import FinishReason, RequestTimings
from service.errors import StartupError
from service.telemetry.exporting import open_tracer
from service.telemetry.metrics import RequestRecord
from service.telemetry.otel import OtelTracer
from service.telemetry.tracing import NoTracer
from tests.fakes import request


def test_telemetry_that_is_off_is_no_tracer_and_loads_nothing() -> None:
    assert isinstance(open_tracer(Telemetry.OFF, "http://127.0.0.1:1"), NoTracer)
    look = "import sys, service.app, service.__main__; print([m for m in sys.modules if 'opentelemetry' in m])"
    loaded = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True, timeout=60)
    assert loaded.stdout == "[]\n"


def test_telemetry_without_its_extra_is_refused_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "service.telemetry.otel", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk", None)
    monkeypatch.delitem(sys.modules, "opentelemetry.sdk.trace", raising=False)
    with pytest.raises(StartupError, match="--otel needs the extra `otel`, which is not installed"):
        open_tracer(Telemetry.ALL, None)


def test_environment_that_the_sdk_cannot_use_is_refused_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "soon")
    with pytest.raises(StartupError, match=r"OpenTelemetry cannot be set up: .*soon"):
        open_tracer(Telemetry.TRACES, "http://127.0.0.1:1")


def exporting() -> tuple[TracerProvider, InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    tracers = TracerProvider(shutdown_on_exit=False)
    tracers.add_span_processor(SimpleSpanProcessor(exporter))
    return tracers, exporter


def ended(outcome: str) -> RequestRecord:
    return RequestRecord(
        outcome=outcome,
        timings=RequestTimings(arrival_time=2.25, scheduled_time=2.5, first_token_time=3.0, finished_time=8.0),
        num_prompt_tokens=1,
        num_generated_tokens=4,
        num_longest_tokens=4,
        seconds_per_token=None,
    )


def context(peer: str) -> SimpleNamespace:
    """A call's, as gRPC gives it."""
    return SimpleNamespace(invocation_metadata=lambda: None, peer=lambda: peer)


def test_engines_times_are_put_on_the_wall_clock_by_the_offset_of_the_calls_begin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tracers, exporter = exporting()
    tracer = OtelTracer(tracers, NoOpMeterProvider())
    # The wall clock is set back by an hour while the call runs: the spans of the call stay together.
    walls = iter([5_000_000_000_000, 1_400_000_000_000])
    ticks = iter([2_000_000_000, 2_000_000_500, 9_000_000_000])
    monkeypatch.setattr(
        "service.telemetry.otel.time", SimpleNamespace(time_ns=walls.__next__, monotonic_ns=ticks.__next__)
    )
    record = ended("length")
    call = tracer.call("s/M", context("ipv4:127.0.0.1:5"), has_many=False)
    asked = tracer.request("fake")
    asked.submitted(request())
    asked.ended(record, 0, (FinishReason.LENGTH,))
    assert not exporter.get_finished_spans()
    call.ended("OK", "")
    second = 1_000_000_000
    zero = 4998 * second
    assert {span.name: (span.start_time, span.end_time) for span in exporter.get_finished_spans()} == {
        "queue": (zero + second * 9 // 4, zero + second * 5 // 2),
        "prefill": (zero + second * 5 // 2, zero + second * 3),
        "decode": (zero + second * 3, zero + second * 8),
        "s/M": (zero + second * 2 + 500, zero + second * 9),
    }


def test_status_is_an_error_of_the_span_only_if_the_server_is_at_fault() -> None:
    tracers, exporter = exporting()
    for code in grpc.StatusCode:
        OtelTracer(tracers, NoOpMeterProvider()).call("s/M", context(""), has_many=False).ended(code.name, "words")
    spans = {dict(span.attributes or {})["rpc.response.status_code"]: span for span in exporter.get_finished_spans()}
    failed = {code for code, span in spans.items() if span.status.status_code is StatusCode.ERROR}
    at_fault = {"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"}
    assert failed == at_fault, "as the semantic conventions for gRPC have it"
    assert {code for code, span in spans.items() if "error.type" in (span.attributes or {})} == set(spans) - {"OK"}


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:10.0.0.7:50123", {"network.peer.address": "10.0.0.7", "network.peer.port": 50123}),
        ("ipv6:%5B::1%5D:50123", {"network.peer.address": "::1", "network.peer.port": 50123}),
        ("unix:/run/onward.sock", {}),
        ("unix:", {}),
        ("", {}),
    ],
)
def test_peer_is_an_address_and_a_port(peer: str, address: dict[str, object]) -> None:
    tracers, exporter = exporting()
    OtelTracer(tracers, NoOpMeterProvider()).call("s/M", context(peer), has_many=False).ended("OK", "")
    (span,) = exporter.get_finished_spans()
    assert {name: value for name, value in (span.attributes or {}).items() if name.startswith("network.")} == address


async def test_slow_export_is_aborted_at_the_end() -> None:
    given_up, is_over, is_quick = threading.Event(), threading.Event(), threading.Event()

    def export() -> None:
        given_up.wait(60)
        is_over.set()

    tracer = OtelTracer(NoOpTracerProvider(), NoOpMeterProvider(), [export, is_quick.set], [given_up.set])
    await tracer.close(0.01)
    assert given_up.is_set()
    assert is_over.wait(10)
    assert is_quick.wait(10)


async def test_export_that_is_done_in_time_is_left_alone() -> None:
    done: list[str] = []
    exports = [lambda: done.append("spans"), lambda: done.append("metrics")]
    tracer = OtelTracer(NoOpTracerProvider(), NoOpMeterProvider(), exports, [lambda: done.append("aborted")])
    await tracer.close(30.0)
    assert sorted(done) == ["metrics", "spans"]


def test_request_that_no_call_asked_for_is_not_traced() -> None:
    tracer = OtelTracer(NoOpTracerProvider(), NoOpMeterProvider())
    trace = contextvars.Context().run(tracer.request, "fake")
    assert isinstance(trace, NoTracer)


def test_only_an_engine_failure_is_an_error_of_the_span_of_one_request_of_many() -> None:
    tracers, exporter = exporting()
    tracer = OtelTracer(tracers, NoOpMeterProvider())
    tracer.call("s/M", context(""), has_many=True)
    for outcome in ("engine_failed", "cancelled", "length"):
        trace = tracer.request("fake")
        trace.submitted(request())
        trace.ended(ended(outcome), 0, ())
    spans = [span for span in exporter.get_finished_spans() if span.name == "text_completion fake"]
    assert [span.status.status_code is StatusCode.ERROR for span in spans] == [True, False, False]
    types = [(span.attributes or {}).get("error.type") for span in spans]
    assert types == ["engine_failed", "cancelled", None]
