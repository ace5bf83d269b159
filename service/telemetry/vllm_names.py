"""Our metrics under vLLM's names, so that dashboards and alerts made for vLLM load on us.

A collector: it renames our samples at each scrape and does nothing in between. Labels and units are vLLM's, buckets are
ours; a server is vLLM's engine 0. Left out are metrics without a counterpart: request parameters, KV blocks, LoRA,
multi-modal inputs, draft tokens by position, sleep mode and the HTTP server's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from prometheus_client import Counter, Gauge, Histogram, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from service.engine.types import FinishReason
from service.errors import ClientStalled, DeadlineExceeded, EngineFailed, RequestCancelled
from service.telemetry.metrics import Metrics

FINISHED_REASONS: Mapping[str, str] = {
    FinishReason.END_OF_SEQUENCE: "stop",
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.DEADLINE: "abort",
    FinishReason.CANCELLED: "abort",
    DeadlineExceeded.label: "abort",
    RequestCancelled.label: "abort",
    ClientStalled.label: "abort",
    EngineFailed.label: "error",
}
"""vLLM's finish reason by ours. vLLM does not count refused requests."""

_PREFIX = "vllm:"
_MODEL = "model_name"  # vLLM's name and ours
_ENGINE = {"engine": "0"}


class VllmNames(Collector):
    """Exports `metrics` under vLLM's names."""

    def __init__(self, metrics: Metrics) -> None:
        self._requests = metrics.requests
        self._waiting = metrics.waiting
        self._renamed: Mapping[str, Gauge | Counter | Histogram] = {
            "num_requests_running": metrics.running,
            "num_requests_waiting": metrics.waiting,
            "kv_cache_usage_perc": metrics.kv_usage,
            "num_preemptions": metrics.preemptions,
            "spec_decode_num_drafts": metrics.drafts,
            "spec_decode_num_draft_tokens": metrics.draft_tokens,
            "spec_decode_num_accepted_tokens": metrics.accepted_tokens,
            "prompt_tokens": metrics.prompt_tokens,
            "prompt_tokens_cached": metrics.cached_prompt_tokens,
            "prefix_cache_queries": metrics.prompt_tokens,
            "prefix_cache_hits": metrics.cached_prompt_tokens,
            "generation_tokens": metrics.generation_tokens,
            "iteration_tokens_total": metrics.step_tokens,
            "time_to_first_token_seconds": metrics.first_token,
            "inter_token_latency_seconds": metrics.inter_token,
            "request_time_per_output_token_seconds": metrics.per_token,
            "e2e_request_latency_seconds": metrics.end_to_end,
            "request_queue_time_seconds": metrics.queue,
            "request_inference_time_seconds": metrics.inference,
            "request_prefill_time_seconds": metrics.prefill,
            "request_decode_time_seconds": metrics.decode,
            "request_prompt_tokens": metrics.request_prompt,
            "request_generation_tokens": metrics.request_generation,
            "request_max_num_generation_tokens": metrics.request_longest,
        }

    def collect(self) -> Iterator[Metric]:
        """The renamed metrics."""
        for name, metric in self._renamed.items():
            yield _renamed(metric, f"{_PREFIX}{name}")
        yield self._request_success()
        yield self._waiting_by_reason()

    def _request_success(self) -> Metric:
        """Requests by vLLM's finish reason, which may sum several of ours."""
        shown = Metric(
            f"{_PREFIX}request_success", "Requests that the engine had and that ended, by reason.", "counter"
        )
        counts: defaultdict[tuple[str, str], float] = defaultdict(float)
        for sample in _family(self._requests).samples:
            reason = FINISHED_REASONS.get(sample.labels["finish_reason"])
            if reason is not None and sample.name.endswith("_total"):
                counts[sample.labels[_MODEL], reason] += sample.value
        shown.samples = [
            Sample(f"{shown.name}_total", {_MODEL: model, **_ENGINE, "finished_reason": reason}, count)
            for (model, reason), count in counts.items()
        ]
        return shown

    def _waiting_by_reason(self) -> Metric:
        """Waiting requests by reason: ours always wait for capacity."""
        shown = Metric(f"{_PREFIX}num_requests_waiting_by_reason", "Requests that wait, by what for.", "gauge")
        shown.samples = [
            Sample(shown.name, {**sample.labels, **_ENGINE, "reason": reason}, value)
            for sample in _family(self._waiting).samples
            for reason, value in (("capacity", sample.value), ("deferred", 0.0))
        ]
        return shown


def _family(metric: Gauge | Counter | Histogram) -> Metric:
    (family,) = metric.collect()
    return family


def _renamed(metric: Gauge | Counter | Histogram, name: str) -> Metric:
    """The same samples under another name, each with its own suffix, such as `_bucket`."""
    family = _family(metric)
    shown = Metric(name, family.documentation, family.type)
    shown.samples = [
        Sample(name + sample.name.removeprefix(family.name), {**sample.labels, **_ENGINE}, sample.value)
        for sample in family.samples
    ]
    return shown
