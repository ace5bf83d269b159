"""The metrics: their names, units and buckets are a contract with dashboards."""

from __future__ import annotations

import itertools

import pytest
from prometheus_client import CollectorRegistry

from service.engine.types import RequestTimings, StepStats
from service.metrics import TIME_BUCKETS, Metrics, RequestRecord

GAUGES = {"num_requests_running", "num_requests_waiting", "kv_cache_usage_ratio", "parity_max_abs_error"}
COUNTERS = {
    "prompt_tokens",
    "cached_prompt_tokens",
    "generation_tokens",
    "padding_tokens",
    "preemptions",
    "requests",
    "grpc_server_handled",
}
SECONDS = {
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "time_per_output_token_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "engine_host_seconds",
}
SIZES = {"request_prompt_tokens", "request_generation_tokens", "step_batch_size", "step_tokens"}


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(f"onward_{name}", {"model_name": "m", **labels})


def test_names_and_kinds_are_the_documented_ones(registry: CollectorRegistry) -> None:
    Metrics(registry)
    kinds = {
        metric.name.removeprefix("onward_"): metric.type
        for metric in registry.collect()
        if not metric.name.startswith("process_")
    }
    expected = {**dict.fromkeys(GAUGES, "gauge"), **dict.fromkeys(COUNTERS, "counter")}
    assert kinds == {**expected, **dict.fromkeys(SECONDS | SIZES, "histogram")}


def test_process_metrics_are_there(registry: CollectorRegistry) -> None:
    Metrics(registry)
    names = {metric.name for metric in registry.collect()}
    assert {"process_resident_memory_bytes", "process_cpu_seconds", "process_open_fds"} <= names


def test_time_buckets_grow_by_half_from_100_microseconds_to_150_seconds() -> None:
    assert TIME_BUCKETS[0] == 100e-6
    assert TIME_BUCKETS[-1] <= 150.0 < TIME_BUCKETS[-1] * 1.5
    for low, high in itertools.pairwise(TIME_BUCKETS):
        assert high / low == pytest.approx(1.5, rel=1e-5)


def test_every_metric_of_a_model_carries_its_name_alone_but_for_the_finish_reason(registry: CollectorRegistry) -> None:
    model = Metrics(registry).for_model("m")
    model.request_done(record())
    model.parity_checked(0.0)
    labels = {
        metric.name.removeprefix("onward_"): frozenset(sample.labels) - {"le"}
        for metric in registry.collect()
        for sample in metric.samples
    }
    expected = {name: {"model_name"} for name in (GAUGES | COUNTERS | SECONDS | SIZES) - {"grpc_server_handled"}}
    expected["requests"] = {"model_name", "finish_reason"}
    assert {name: names for name, names in labels.items() if not name.startswith("process_")} == expected


def test_refusal_is_counted_and_not_timed(registry: CollectorRegistry) -> None:
    Metrics(registry).for_model("m").request_refused("overloaded")
    assert value(registry, "requests_total", finish_reason="overloaded") == 1
    assert value(registry, "e2e_request_latency_seconds_count") == 0


def record(*, scheduled: float | None = 2.0, first: float | None = 5.0, tokens: int = 4) -> RequestRecord:
    return RequestRecord(
        outcome="stop",
        timings=RequestTimings(arrival_time=1.0, scheduled_time=scheduled, first_token_time=first, finished_time=9.0),
        num_prompt_tokens=11,
        num_cached_tokens=6,
        num_generated_tokens=tokens,
        seconds_per_token=1.5 if tokens > 1 else None,
    )


def test_finished_request_is_observed_phase_by_phase(registry: CollectorRegistry) -> None:
    Metrics(registry).for_model("m").request_done(record())
    assert value(registry, "requests_total", finish_reason="stop") == 1
    assert value(registry, "e2e_request_latency_seconds_sum") == 8.0
    assert value(registry, "request_queue_time_seconds_sum") == 1.0
    assert value(registry, "request_prefill_time_seconds_sum") == 3.0
    assert value(registry, "request_decode_time_seconds_sum") == 4.0
    assert value(registry, "time_per_output_token_seconds_sum") == 1.5
    assert value(registry, "cached_prompt_tokens_total") == 6
    assert value(registry, "request_prompt_tokens_sum") == 11
    assert value(registry, "request_generation_tokens_sum") == 4


def test_phase_that_was_never_reached_is_not_observed(registry: CollectorRegistry) -> None:
    Metrics(registry).for_model("m").request_done(record(scheduled=None, first=None, tokens=0))
    assert value(registry, "e2e_request_latency_seconds_count") == 1
    for name in ("request_queue_time", "request_prefill_time", "request_decode_time", "time_per_output_token"):
        assert value(registry, f"{name}_seconds_count") == 0


def test_single_token_has_no_time_per_output_token(registry: CollectorRegistry) -> None:
    Metrics(registry).for_model("m").request_done(record(tokens=1))
    assert value(registry, "time_per_output_token_seconds_count") == 0


def step(num_tokens: int) -> StepStats:
    return StepStats(
        num_rows=min(num_tokens, 2),
        num_tokens=num_tokens,
        num_padding_tokens=3,
        run_seconds=0.5,
        host_seconds=0.25,
        num_preemptions=2,
        num_running=2,
        num_waiting=1,
        kv_usage_ratio=0.75,
    )


def test_step_sets_gauges_and_counts_work_and_waste(registry: CollectorRegistry) -> None:
    Metrics(registry).for_model("m").step_done(step(10))
    assert value(registry, "num_requests_running") == 2
    assert value(registry, "num_requests_waiting") == 1
    assert value(registry, "kv_cache_usage_ratio") == 0.75
    assert value(registry, "padding_tokens_total") == 3
    assert value(registry, "preemptions_total") == 2
    assert value(registry, "step_batch_size_sum") == 2
    assert value(registry, "step_tokens_sum") == 10
    assert value(registry, "engine_host_seconds_sum") == 0.25


def test_step_without_work_moves_the_gauges_alone(registry: CollectorRegistry) -> None:
    Metrics(registry).for_model("m").step_done(step(0))
    assert value(registry, "num_requests_running") == 2
    assert value(registry, "step_batch_size_count") == 0


def test_tokens_are_counted_and_timed(registry: CollectorRegistry) -> None:
    model = Metrics(registry).for_model("m")
    model.first_token(num_prompt_tokens=7, seconds=0.5)
    model.next_token(0.25)
    model.tokens_generated(2)
    assert value(registry, "generation_tokens_total") == 2
    assert value(registry, "prompt_tokens_total") == 7
    assert value(registry, "time_to_first_token_seconds_sum") == 0.5
    assert value(registry, "inter_token_latency_seconds_sum") == 0.25
