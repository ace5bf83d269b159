"""Cost of observability: a step for the flight recorder, taking its log, a traced call beside an untraced one.

Only the recorder and tracer run; steps and requests are made up. A traced call is sampled, with all spans and metrics,
as far as the event loop pays for it; another thread exports. Seconds are the least of the repeats.
"""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider

from benchmarks.frame.scenario import Run, Scenario, option
from service.engine.types import FinishReason, GenerationRequest, RequestTimings, StepOutput, StepStats
from service.telemetry.debug import encode
from service.telemetry.metrics import RequestRecord
from service.telemetry.otel import OtelTracer
from service.telemetry.recorder import FlightRecorder
from service.telemetry.tracing import NoTracer, Tracer

_MODEL = "watched"
_REQUEST = GenerationRequest(request_id="0" * 32, model=_MODEL, prompt_token_ids=(1, 2, 3))
_CALLS = 2000


class _Context:
    """A call with a trace context."""

    def invocation_metadata(self) -> Iterable[tuple[str, str | bytes]]:
        """Its metadata."""
        return (("user-agent", "grpc-c/51"), ("traceparent", f"00-{1:032x}-{1:016x}-01"))

    def peer(self) -> str:
        """Its address."""
        return "ipv4:127.0.0.1:50000"


@dataclass(frozen=True, slots=True, kw_only=True)
class ObserveSettings:
    """What is measured."""

    steps: int = option(8192, "steps and requests that the recorder keeps", least=1, quick=256)
    repeats: int = option(7, "the least counts", least=1, quick=2)


def measure(settings: ObserveSettings, _: Run) -> dict[str, Any]:
    """The recorder, then calls."""
    found = measure_recorder(settings.steps, settings.repeats)
    meters = MeterProvider([InMemoryMetricReader()], shutdown_on_exit=False)
    traced = OtelTracer(TracerProvider(shutdown_on_exit=False), meters)
    found["untraced_call_seconds"] = measure_calls(NoTracer(), settings.repeats)
    found["traced_call_seconds"] = measure_calls(traced, settings.repeats)
    return {"steps": settings.steps, **found}


def measure_recorder(num_steps: int, repeats: int) -> dict[str, float]:
    """Seconds of a step, of taking a full log, of the longest stretch of encoding it; bytes of both."""
    outputs = [StepOutput((), _stats(number)) for number in range(num_steps)]
    records = [_record(float(number)) for number in range(num_steps)]
    tracemalloc.start()
    recorder = FlightRecorder(num_steps)
    recorder.begin(_MODEL)
    for number in range(num_steps):
        recorder.step_done(_MODEL, StepOutput((), _stats(number)), number * 0.01)
        recorder.request_ended(_MODEL, f"{number:032x}", _record(float(number)), 512)
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    def steps() -> None:
        for output in outputs:
            recorder.step_done(_MODEL, output, 1.0)

    def requests() -> None:
        for record in records:
            recorder.request_ended(_MODEL, "0" * 32, record, 512)

    log = recorder.take(())
    stretches, num_bytes = [], 0
    for _ in range(repeats):
        pieces, num_bytes, longest = encode(log), 0, 0.0
        began = time.perf_counter()
        for piece in pieces:
            longest, num_bytes = max(longest, time.perf_counter() - began), num_bytes + len(piece)
            began = time.perf_counter()
        stretches.append(longest)
    return {
        "step_seconds": _least(steps, repeats) / num_steps,
        "request_seconds": _least(requests, repeats) / num_steps,
        "take_seconds": _least(lambda: recorder.take(()), repeats),
        "encode_stretch_seconds": min(stretches),
        "kept_bytes": kept,
        "json_bytes": num_bytes,
    }


def measure_calls(tracer: Tracer, repeats: int) -> float:
    """A tracer's seconds for a call with one request."""
    context, record = _Context(), _record(time.monotonic())

    def calls() -> None:
        for _ in range(_CALLS):
            call = tracer.call("onward.v1.GenerationService/Generate", context, has_many=False)
            request = tracer.request(_MODEL)
            request.submitted(_REQUEST)
            request.ended(record, 512, (FinishReason.LENGTH,))
            call.ended("OK", "")

    return _least(calls, repeats) / _CALLS


def _least(function: Callable[[], object], repeats: int) -> float:
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def _stats(number: int) -> StepStats:
    step = StepStats(
        start_time=number * 0.01,
        num_rows=8,
        num_tokens=1000 + number,
        num_padding_tokens=0,
        run_seconds=0.003 + number * 1e-9,
        host_seconds=0.0003 + number * 1e-9,
        num_preemptions=0,
        num_running=8,
        num_waiting=0,
        kv_usage_ratio=0.3 + number * 1e-9,
    )
    return replace(step, num_decode_rows=8, num_decode_pairs=9000 + number)


def _record(arrival: float) -> RequestRecord:
    timings = RequestTimings(
        arrival_time=arrival,
        scheduled_time=arrival + 0.1,
        first_token_time=arrival + 0.2,
        finished_time=arrival + 0.3,
    )
    return RequestRecord(
        outcome="length",
        timings=timings,
        num_prompt_tokens=1000,
        num_generated_tokens=1000,
        num_longest_tokens=1000,
        seconds_per_token=0.01,
    )


SCENARIO = Scenario(__name__, ObserveSettings, measure)
