"""The metrics: values, units and buckets are a contract with dashboards. test_metrics_document.py checks names."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from service.engine.types import FinishReason, RequestTimings, StepStats
from service.errors import DeadlineExceeded, Overloaded, PromptTooLong
from service.telemetry.metrics import TIME_BUCKETS, Metrics, Objectives, RequestRecord


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(f"onward_{name}", {"model_name": "m", **labels})


def test_process_metrics_are_there(registry: CollectorRegistry) -> None:
    Metrics(registry)
    names = {metric.name for metric in registry.collect()}
    assert {"process_resident_memory_bytes", "process_cpu_seconds", "process_open_fds"} <= names


def test_time_buckets_grow_by_half_from_100_microseconds_to_150_seconds() -> None:
    assert TIME_BUCKETS[0] == 100e-6
    assert TIME_BUCKETS[-1] <= 150.0 < TIME_BUCKETS[-1] * 1.5
    for low, high in itertools.pairwise(TIME_BUCKETS):
        assert high / low == pytest.approx(1.5, rel=1e-5)


def test_refusal_is_counted_and_not_timed(registry: CollectorRegistry) -> None:
    Metrics(registry).for_model("m").request_refused("overloaded")
    assert value(registry, "requests_total", finish_reason="overloaded") == 1
    assert value(registry, "e2e_request_latency_seconds_count") == 0


def record(*, scheduled: float | None = 2.0, first: float | None = 5.0, tokens: int = 4) -> RequestRecord:
    return RequestRecord(
        outcome="stop",
        timings=RequestTimings(arrival_time=1.0, scheduled_time=scheduled, first_token_time=first, finished_time=9.0),
        num_prompt_tokens=11,
        num_generated_tokens=tokens,
        num_longest_tokens=tokens - 1,
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
    assert value(registry, "request_inference_time_seconds_sum") == 7.0
    assert value(registry, "request_prompt_tokens_sum") == 11
    assert value(registry, "request_generation_tokens_sum") == 4
    assert value(registry, "request_max_num_generation_tokens_sum") == 3


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        (
            {"scheduled": None, "first": None, "tokens": 0},
            ("request_queue", "request_prefill", "request_decode", "request_inference", "time_per_output_token"),
        ),
        ({"tokens": 1}, ("time_per_output_token",)),
    ],
)
def test_phase_that_was_never_reached_is_not_observed(
    registry: CollectorRegistry, fields: dict[str, Any], names: tuple[str, ...]
) -> None:
    Metrics(registry).for_model("m").request_done(record(**fields))
    assert value(registry, "e2e_request_latency_seconds_count") == 1
    for name in names:
        suffix = "_seconds_count" if name.startswith("time") else "_time_seconds_count"
        assert value(registry, f"{name}{suffix}") == 0


def test_the_cost_model_is_shown_by_term_until_the_model_is_removed(registry: CollectorRegistry) -> None:
    model = Metrics(registry).for_model("m")
    model.serves(is_serving=True)
    model.parity_checked(0.0, passed=True)
    model.cost_model({"prefill_token": 2e-4, "decode_step_1": 0.25}, None)
    assert value(registry, "cost_model_coefficient", term="prefill_token") == 2e-4
    assert value(registry, "cost_model_coefficient", term="decode_step_1") == 0.25
    # Nothing was predicted yet.
    assert value(registry, "cost_model_relative_error") is None
    model.cost_model({"prefill_token": 3e-4}, 0.125)
    assert value(registry, "cost_model_coefficient", term="prefill_token") == 3e-4
    assert value(registry, "cost_model_relative_error") == 0.125
    model.close()
    assert value(registry, "cost_model_coefficient", term="prefill_token") is None
    assert value(registry, "cost_model_relative_error") is None


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
    assert value(registry, "engine_run_seconds_sum") == 0.5


def test_step_without_work_moves_the_gauges_alone(registry: CollectorRegistry) -> None:
    Metrics(registry).for_model("m").step_done(step(0))
    assert value(registry, "num_requests_running") == 2
    assert value(registry, "step_batch_size_count") == 0
    assert value(registry, "engine_run_seconds_count") == 0


def test_tokens_are_counted_and_timed(registry: CollectorRegistry) -> None:
    model = Metrics(registry).for_model("m")
    model.prompt_done(num_prompt_tokens=7, num_cached_tokens=6)
    model.first_token(0.5)
    model.next_token(0.25)
    model.tokens_generated(2)
    assert value(registry, "generation_tokens_total") == 2
    assert value(registry, "prompt_tokens_total") == 7
    assert value(registry, "cached_prompt_tokens_total") == 6
    assert value(registry, "time_to_first_token_seconds_sum") == 0.5
    assert value(registry, "inter_token_latency_seconds_sum") == 0.25


def test_every_way_to_end_is_there_before_the_first_request(registry: CollectorRegistry) -> None:
    # A series that appears at 1 has no increase: an alert would miss the first failure.
    Metrics(registry).for_model("m")
    outcomes = (*FinishReason, Overloaded.label, PromptTooLong.label, DeadlineExceeded.label)
    assert {value(registry, "requests_total", finish_reason=outcome) for outcome in outcomes} == {0.0}


def test_states_of_a_model_are_shown(registry: CollectorRegistry) -> None:
    model = Metrics(registry).for_model("m")
    assert value(registry, "model_serving") == 0
    assert value(registry, "parity_passed") is None, "not asked yet"
    model.parity_checked(0.5, passed=False)
    assert (value(registry, "parity_max_abs_error"), value(registry, "parity_passed")) == (0.5, 0)
    model.parity_checked(1e-5, passed=True)
    model.serves(is_serving=True)
    assert (value(registry, "model_serving"), value(registry, "parity_passed")) == (1, 1)


def test_the_most_draft_tokens_are_shown_even_when_zero(registry: CollectorRegistry) -> None:
    model = Metrics(registry).for_model("m")
    assert value(registry, "spec_decode_max_draft_tokens") is None, "not known yet"
    model.max_draft_tokens(4)
    assert value(registry, "spec_decode_max_draft_tokens") == 4
    model.max_draft_tokens(0)
    assert value(registry, "spec_decode_max_draft_tokens") == 0
    model.close()
    assert value(registry, "spec_decode_max_draft_tokens") is None


def test_batch_invariance_is_shown_where_it_was_checked_and_a_model_without_it_has_no_drafts(
    registry: CollectorRegistry,
) -> None:
    model = Metrics(registry).for_model("m")
    model.max_draft_tokens(4)
    model.batch_invariance_checked(is_invariant=None)
    assert value(registry, "batch_invariant") is None
    model.batch_invariance_checked(is_invariant=True)
    assert (value(registry, "batch_invariant"), value(registry, "spec_decode_max_draft_tokens")) == (1, 4)
    model.batch_invariance_checked(is_invariant=False)
    assert (value(registry, "batch_invariant"), value(registry, "spec_decode_max_draft_tokens")) == (0, 0)
    model.batch_invariance_checked(is_invariant=None)
    assert value(registry, "batch_invariant") is None, "of an engine that was replaced"
    model.batch_invariance_checked(is_invariant=True)
    model.close()
    assert value(registry, "batch_invariant") is None


OBJECTIVES = Objectives(time_to_first_token=(0.2, 1.0), inter_token_latency=(0.03,), e2e_latency=(200.0,))


@pytest.mark.parametrize(
    ("name", "bounds"),
    [
        ("time_to_first_token", (0.2, 1.0)),
        ("inter_token_latency", (0.03,)),
        ("time_per_output_token", (0.03,)),
        ("e2e_request_latency", (200.0,)),
        ("request_queue_time", ()),
    ],
)
def test_objectives_are_bucket_boundaries_of_their_histograms(
    registry: CollectorRegistry, name: str, bounds: tuple[float, ...]
) -> None:
    Metrics(registry, OBJECTIVES).for_model("m")
    found = {
        float(sample.labels["le"])
        for metric in registry.collect()
        for sample in metric.samples
        if sample.name == f"onward_{name}_seconds_bucket"
    }
    assert found == {*TIME_BUCKETS, *bounds, float("inf")}


def test_share_within_an_objective_is_exact(registry: CollectorRegistry) -> None:
    model = Metrics(registry, OBJECTIVES).for_model("m")
    # The nearest boundaries of time buckets are 0.1946 and 0.2919: these two would share a bucket.
    for seconds in (0.2, 0.2001):
        model.first_token(seconds)
    assert value(registry, "time_to_first_token_seconds_bucket", le="0.2") == 1


def test_objectives_are_shown_by_the_name_of_their_bucket(registry: CollectorRegistry) -> None:
    Metrics(registry, OBJECTIVES).for_model("m")
    samples = [sample for metric in registry.collect() for sample in metric.samples]
    shown = {(s.labels["slo"], s.labels["bound"]): s.value for s in samples if s.name == "onward_slo_seconds"}
    assert shown == {
        ("time_to_first_token", "0.2"): 0.2,
        ("time_to_first_token", "1.0"): 1.0,
        ("inter_token_latency", "0.03"): 0.03,
        ("e2e_latency", "200.0"): 200.0,
    }
    buckets = {s.labels["le"] for s in samples if s.name.startswith("onward_") and "le" in s.labels}
    assert {bound for _, bound in shown} <= buckets
