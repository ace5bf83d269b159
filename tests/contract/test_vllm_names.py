"""vLLM's names for our metrics: dashboards and alerts made for vLLM find theirs, in its units and labels."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from service.engine.types import FinishReason, RequestTimings, StepStats
from service.errors import EngineFailed, Overloaded, PromptTooLong
from service.telemetry.metrics import OUTCOMES, Metrics, ModelMetrics, RequestRecord
from service.telemetry.vllm_names import FINISHED_REASONS, VllmNames

LABELS = {"model_name": "m", "engine": "0"}

# What the dashboards that come with vLLM (Overview, Instances, KV Cache and the older single one) query of a server
# without optional features, by type, and what it counts of speculation; its HTTP server's own metrics and the process's
# aside.
STOCK = {
    "vllm:num_requests_running": "gauge",
    "vllm:num_requests_waiting": "gauge",
    "vllm:num_requests_waiting_by_reason": "gauge",
    "vllm:kv_cache_usage_perc": "gauge",
    "vllm:num_preemptions": "counter",
    "vllm:spec_decode_num_drafts": "counter",
    "vllm:spec_decode_num_draft_tokens": "counter",
    "vllm:spec_decode_num_accepted_tokens": "counter",
    "vllm:prompt_tokens": "counter",
    "vllm:prompt_tokens_cached": "counter",
    "vllm:prefix_cache_queries": "counter",
    "vllm:prefix_cache_hits": "counter",
    "vllm:generation_tokens": "counter",
    "vllm:request_success": "counter",
    "vllm:iteration_tokens_total": "histogram",
    "vllm:time_to_first_token_seconds": "histogram",
    "vllm:inter_token_latency_seconds": "histogram",
    "vllm:request_time_per_output_token_seconds": "histogram",
    "vllm:e2e_request_latency_seconds": "histogram",
    "vllm:request_queue_time_seconds": "histogram",
    "vllm:request_inference_time_seconds": "histogram",
    "vllm:request_prefill_time_seconds": "histogram",
    "vllm:request_decode_time_seconds": "histogram",
    "vllm:request_prompt_tokens": "histogram",
    "vllm:request_generation_tokens": "histogram",
    "vllm:request_max_num_generation_tokens": "histogram",
}


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def model(registry: CollectorRegistry) -> ModelMetrics:
    metrics = Metrics(registry)
    registry.register(VllmNames(metrics))
    return metrics.for_model("m")


def shown(registry: CollectorRegistry) -> Iterator[tuple[str, str]]:
    """Name and type as a scraper reads them."""
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        if family.name.startswith("vllm:") and not family.name.endswith("_created"):
            yield family.name, family.type


def record(outcome: str) -> RequestRecord:
    return RequestRecord(
        outcome=outcome,
        timings=RequestTimings(arrival_time=1.0, scheduled_time=2.0, first_token_time=5.0, finished_time=9.0),
        num_prompt_tokens=11,
        num_generated_tokens=7,
        num_longest_tokens=4,
        seconds_per_token=0.5,
    )


@pytest.mark.usefixtures("model")
def test_all_that_vllms_dashboards_ask_for_is_there(registry: CollectorRegistry) -> None:
    assert dict(shown(registry)) == STOCK


@pytest.mark.usefixtures("model")
def test_labels_are_vllms(registry: CollectorRegistry) -> None:
    extra = {"vllm:request_success": "finished_reason", "vllm:num_requests_waiting_by_reason": "reason"}
    for family in registry.collect():
        if family.name.startswith("vllm:"):
            expected = {*LABELS, *filter(None, [extra.get(family.name)])}
            assert {frozenset(sample.labels) - {"le"} for sample in family.samples} == {frozenset(expected)}
            assert {sample.labels["engine"] for sample in family.samples} == {"0"}


def test_what_was_observed_once_is_shown_under_both_names(registry: CollectorRegistry, model: ModelMetrics) -> None:
    model.step_done(
        StepStats(
            num_rows=2,
            num_tokens=10,
            num_padding_tokens=3,
            run_seconds=0.5,
            host_seconds=0.25,
            num_preemptions=2,
            num_running=3,
            num_waiting=1,
            kv_usage_ratio=0.75,
            num_draft_tokens=4,
            num_accepted_tokens=1,
        )
    )
    model.prompt_done(11, 6)
    model.first_token(0.5)
    model.next_token(0.25)
    model.tokens_generated(7)
    model.request_done(record(FinishReason.STOP))
    values = {
        "num_requests_running": 3,
        "num_requests_waiting": 1,
        "kv_cache_usage_perc": 0.75,
        "num_preemptions_total": 2,
        "spec_decode_num_drafts_total": 1,
        "spec_decode_num_draft_tokens_total": 4,
        "spec_decode_num_accepted_tokens_total": 1,
        "prompt_tokens_total": 11,
        "prompt_tokens_cached_total": 6,
        "prefix_cache_queries_total": 11,
        "prefix_cache_hits_total": 6,
        "generation_tokens_total": 7,
        "iteration_tokens_total_sum": 10,
        "time_to_first_token_seconds_sum": 0.5,
        "inter_token_latency_seconds_sum": 0.25,
        "request_time_per_output_token_seconds_sum": 0.5,
        "e2e_request_latency_seconds_sum": 8,
        "request_queue_time_seconds_sum": 1,
        "request_inference_time_seconds_sum": 7,
        "request_prefill_time_seconds_sum": 3,
        "request_decode_time_seconds_sum": 4,
        "request_prompt_tokens_sum": 11,
        "request_generation_tokens_sum": 7,
        "request_max_num_generation_tokens_sum": 4,
    }
    found = {name: registry.get_sample_value(f"vllm:{name}", LABELS) for name in values}
    assert found == values
    bucket = {**LABELS, "le": "+Inf"}
    assert registry.get_sample_value("vllm:time_to_first_token_seconds_bucket", bucket) == 1
    by_reason = "vllm:num_requests_waiting_by_reason"
    assert registry.get_sample_value(by_reason, {**LABELS, "reason": "capacity"}) == 1
    assert registry.get_sample_value(by_reason, {**LABELS, "reason": "deferred"}) == 0


def test_finish_reasons_have_vllms_names_and_refusals_are_not_counted(
    registry: CollectorRegistry, model: ModelMetrics
) -> None:
    for outcome in (*FinishReason, EngineFailed.label):
        model.request_done(record(outcome))
    for refusal in (Overloaded.label, PromptTooLong.label):
        model.request_refused(refusal)
    found = {
        reason: registry.get_sample_value("vllm:request_success_total", {**LABELS, "finished_reason": reason})
        for reason in ("stop", "length", "abort", "error")
    }
    assert found == {"stop": 2, "length": 1, "abort": 2, "error": 1}


def test_every_finish_reason_of_ours_has_a_word_of_vllms() -> None:
    assert set(FinishReason) <= set(FINISHED_REASONS) <= set(OUTCOMES)
