"""Every metric of the server: name, meaning, unit, buckets. `docs/serve/metrics.md` lists them.

Names are vLLM's suffixes under the prefix `onward_`. Label values are bounded: served models, finish reasons and error
labels, our own methods, gRPC codes, objectives, terms of the cost model.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

from service.engine.types import FinishReason, RequestTimings, StepStats
from service.errors import error_labels

NAMESPACE = "onward"
_MODEL = "model_name"
_Metric = TypeVar("_Metric", Counter, Gauge, Histogram)


def geometric_buckets(first: float, factor: float, last: float) -> tuple[float, ...]:
    """`first` × `factor`^k up to `last`, to six digits so that the labels stay readable."""
    buckets = []
    bound = first
    while bound <= last:
        buckets.append(float(f"{bound:.6g}"))
        bound *= factor
    return tuple(buckets)


# A small model answers in milliseconds: prometheus_client's default buckets would put it into the first two.
TIME_BUCKETS = geometric_buckets(100e-6, 1.5, 150.0)
TOKEN_BUCKETS = geometric_buckets(1, 2, 131072)
BATCH_BUCKETS = geometric_buckets(1, 2, 1024)


OUTCOMES = tuple(sorted({*map(str, FinishReason), *error_labels()}))
"""Values of the label `finish_reason`. Each is exported from the start: a series that begins at 1 has no rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Objectives:
    """Latency objectives in seconds. Each becomes a bucket boundary, so that the share within it is exact."""

    time_to_first_token: tuple[float, ...] = ()
    inter_token_latency: tuple[float, ...] = ()
    e2e_latency: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """An ended request.

    Attributes:
        outcome: finish reason or error label.
        timings: of its phases.
        num_prompt_tokens: cached ones included.
        num_generated_tokens: of all outputs.
        num_longest_tokens: of the longest output.
        seconds_per_token: mean time of a token after an output's first; None if no output has two tokens.
    """

    outcome: str
    timings: RequestTimings
    num_prompt_tokens: int
    num_generated_tokens: int
    num_longest_tokens: int
    seconds_per_token: float | None


_NO_OBJECTIVES = Objectives()


class Metrics:
    """All metrics, registered in `registry`.

    Args:
        registry: must have none of them.
        objectives: bucket boundaries of their histograms.
    """

    def __init__(self, registry: CollectorRegistry, objectives: Objectives = _NO_OBJECTIVES) -> None:
        def make(kind: type[_Metric], name: str, meaning: str, *labels: str, **options: Any) -> _Metric:
            return kind(name, meaning, labels, namespace=NAMESPACE, registry=registry, **options)

        def gauge(name: str, meaning: str, *labels: str) -> Gauge:
            return make(Gauge, name, meaning, _MODEL, *labels)

        def count(name: str, meaning: str) -> Counter:
            return make(Counter, name, meaning, _MODEL)

        def sizes(name: str, meaning: str, buckets: Sequence[float]) -> Histogram:
            return make(Histogram, name, meaning, _MODEL, buckets=buckets)

        def seconds(name: str, meaning: str, bounds: Sequence[float] = ()) -> Histogram:
            return sizes(name, meaning, sorted({*TIME_BUCKETS, *bounds}))

        ProcessCollector(registry=registry)
        self.running = gauge("num_requests_running", "Requests that run.")
        self.waiting = gauge("num_requests_waiting", "Requests that wait to be scheduled.")
        self.admitted = gauge("num_requests_admitted", "Requests that were admitted and have not ended.")
        self.kv_usage = gauge("kv_cache_usage_ratio", "Share of the key-value cache in use, 0 to 1.")
        self.kv_memory = gauge("kv_memory_bytes", "Budget of the model's keys and values.")
        self.serving = gauge("model_serving", "Whether the model answers requests, 1 or 0.")
        self.parity = gauge("parity_max_abs_error", "Largest logit difference from PyTorch in the golden cases.")
        self.parity_passed = gauge("parity_passed", "Whether every golden case passed, 1 or 0.")
        self.batch_invariant = gauge(
            "batch_invariant", "Whether a golden case has the same bits alone and in a batch, 1 or 0."
        )
        self.coefficient = gauge(
            "cost_model_coefficient", "Seconds of a step by term, fitted to measured steps.", "term"
        )
        self.relative_error = gauge(
            "cost_model_relative_error", "Recent mean error of predicted service times, relative to the measured."
        )
        self.max_draft_tokens = gauge("spec_decode_max_draft_tokens", "Most draft tokens of a step; 0: no speculation.")
        slo = make(Gauge, "slo_seconds", "Configured objectives; each is a bucket boundary.", "slo", "bound")
        self.prompt_tokens = count("prompt_tokens", "Prompt tokens after prefill, cached ones included.")
        self.cached_prompt_tokens = count("cached_prompt_tokens", "Prompt tokens found in the prefix cache.")
        self.generation_tokens = count("generation_tokens", "Tokens generated and sent.")
        self.padding_tokens = count("padding_tokens", "Tokens computed as padding.")
        self.preemptions = count("preemptions", "Times that a request was preempted by a more urgent one.")
        self.drafts = count("spec_decode_num_drafts", "Steps with draft tokens.")
        self.draft_tokens = count("spec_decode_num_draft_tokens", "Draft tokens.")
        self.accepted_tokens = count("spec_decode_num_accepted_tokens", "Draft tokens that were accepted.")
        self.requests = make(
            Counter, "requests", "Requests that ended or were refused, by reason or error.", _MODEL, "finish_reason"
        )
        self.handled = make(
            Counter, "grpc_server_handled", "Calls that ended, by method and status code.", "grpc_method", "grpc_code"
        )
        self.http_handled = make(
            Counter,
            "http_server_handled",
            "HTTP requests that ended, by route and status.",
            "http_route",
            "http_status",
        )
        self.first_token = seconds(
            "time_to_first_token_seconds", "From arrival to the first token.", objectives.time_to_first_token
        )
        self.inter_token = seconds(
            "inter_token_latency_seconds", "Between two tokens of one output.", objectives.inter_token_latency
        )
        self.per_token = seconds(
            "time_per_output_token_seconds",
            "Mean time per token after an output's first, per request.",
            objectives.inter_token_latency,
        )
        self.end_to_end = seconds("e2e_request_latency_seconds", "From arrival to the end.", objectives.e2e_latency)
        self.queue = seconds("request_queue_time_seconds", "From arrival to being scheduled.")
        self.prefill = seconds("request_prefill_time_seconds", "From being scheduled to the first token.")
        self.decode = seconds("request_decode_time_seconds", "From the first token to the end.")
        self.inference = seconds("request_inference_time_seconds", "From being scheduled to the end.")
        self.run = seconds("engine_run_seconds", "Time of a step in its graphs.")
        self.host = seconds("engine_host_seconds", "Time between two runs of graphs while there was work.")
        self.request_prompt = sizes("request_prompt_tokens", "Prompt tokens per request.", TOKEN_BUCKETS)
        self.request_generation = sizes("request_generation_tokens", "Generated tokens per request.", TOKEN_BUCKETS)
        self.request_longest = sizes(
            "request_max_num_generation_tokens", "Generated tokens of a request's longest output.", TOKEN_BUCKETS
        )
        self.step_batch = sizes("step_batch_size", "Rows per step.", BATCH_BUCKETS)
        self.step_tokens = sizes("step_tokens", "Tokens per step, without padding and rejected drafts.", TOKEN_BUCKETS)
        for field in dataclasses.fields(objectives):
            for bound in getattr(objectives, field.name):
                slo.labels(field.name, repr(bound)).set(bound)

    def for_model(self, model: str) -> ModelMetrics:
        """The metrics of one loaded model, until they are closed. Its step gauges and its counters begin at zero."""
        return ModelMetrics(self, model)

    def resolved(self, model: str) -> Metrics:
        """A copy in which the metrics of every step, token and request are the model's own series."""
        series = copy.copy(self)
        step_gauges = (self.running, self.waiting, self.kv_usage)
        with_more_labels = (self.requests, self.handled, self.http_handled)
        for name, metric in vars(self).items():
            if metric in step_gauges or not (isinstance(metric, Gauge) or metric in with_more_labels):
                setattr(series, name, metric.labels(model))
        return series


class ModelMetrics:
    """The metrics of one model. Labels are resolved once, not for each token."""

    def __init__(self, metrics: Metrics, model: str) -> None:
        self._model = model
        self._metrics = metrics
        self._is_open = True
        self._requests = {outcome: metrics.requests.labels(model, outcome) for outcome in OUTCOMES}
        self.serves(is_serving=False)
        self.requests_admitted(0)
        self._series = metrics.resolved(model)

    def close(self) -> None:
        """Removes the gauges of an unloaded model and ignores later values of them. Counters stay."""
        self._is_open = False
        for metric in vars(self._metrics).values():
            if isinstance(metric, Gauge):
                metric.remove_by_labels({_MODEL: self._model})

    def _set(self, gauge: Gauge, value: float, *labels: str) -> None:
        if self._is_open:
            gauge.labels(self._model, *labels).set(value)

    def serves(self, *, is_serving: bool) -> None:
        """The model began or stopped answering."""
        self._set(self._metrics.serving, is_serving)

    def requests_admitted(self, count: int) -> None:
        """So many were admitted and have not ended, whether the engine takes steps or not."""
        self._set(self._metrics.admitted, count)

    def kv_memory(self, num_bytes: int) -> None:
        """The budget of its keys and values changed."""
        self._set(self._metrics.kv_memory, num_bytes)

    def max_draft_tokens(self, num_tokens: int) -> None:
        """The largest number of its draft tokens changed."""
        self._set(self._metrics.max_draft_tokens, num_tokens)

    def parity_checked(self, max_abs_error: float, *, passed: bool) -> None:
        """The golden cases were replayed."""
        self._set(self._metrics.parity, max_abs_error)
        self._set(self._metrics.parity_passed, passed)

    def batch_invariance_checked(self, *, is_invariant: bool | None) -> None:
        """Batch invariance was checked, None: was not; a model that fails has no speculation from then on."""
        if is_invariant is None:
            self._metrics.batch_invariant.remove_by_labels({_MODEL: self._model})
            return
        self._set(self._metrics.batch_invariant, is_invariant)
        if not is_invariant:
            self.max_draft_tokens(0)

    def cost_model(self, coefficients: Mapping[str, float], relative_error: float | None) -> None:
        """The cost model was fitted anew: seconds of a step by term, and the predictions' recent error."""
        for term, seconds in coefficients.items():
            self._set(self._metrics.coefficient, seconds, term)
        if relative_error is not None:
            self._set(self._metrics.relative_error, relative_error)

    def step_done(self, stats: StepStats) -> None:
        """The engine took a step. One that computed nothing changes only the gauges."""
        self._series.running.set(stats.num_running)
        self._series.waiting.set(stats.num_waiting)
        self._series.kv_usage.set(stats.kv_usage_ratio)
        self._series.preemptions.inc(stats.num_preemptions)
        if stats.num_tokens:
            self._series.step_batch.observe(stats.num_rows)
            self._series.step_tokens.observe(stats.num_tokens)
            self._series.padding_tokens.inc(stats.num_padding_tokens)
            self._series.run.observe(stats.run_seconds)
        if stats.num_draft_tokens:
            self._series.drafts.inc()
            self._series.draft_tokens.inc(stats.num_draft_tokens)
            self._series.accepted_tokens.inc(stats.num_accepted_tokens)
        if stats.host_seconds is not None:
            self._series.host.observe(stats.host_seconds)

    def tokens_generated(self, count: int) -> None:
        """A step generated tokens, over all requests."""
        self._series.generation_tokens.inc(count)

    def prompt_done(self, num_prompt_tokens: int, num_cached_tokens: int) -> None:
        """A request's prompt was prefilled, except for its cached tokens."""
        self._series.prompt_tokens.inc(num_prompt_tokens)
        self._series.cached_prompt_tokens.inc(num_cached_tokens)

    def first_token(self, seconds: float) -> None:
        """A request got its first token, `seconds` after its arrival."""
        self._series.first_token.observe(seconds)

    def next_token(self, seconds: float) -> None:
        """An output got another token, `seconds` after the one before."""
        self._series.inter_token.observe(seconds)

    def request_refused(self, outcome: str) -> None:
        """A request ended before its submission to the engine: counted, without times."""
        self._requests[outcome].inc()

    def request_done(self, record: RequestRecord) -> None:
        """A request ended. Phases that it did not reach are not observed."""
        timings = record.timings
        self._requests[record.outcome].inc()
        self._series.end_to_end.observe(timings.finished_time - timings.arrival_time)
        self._series.request_prompt.observe(record.num_prompt_tokens)
        self._series.request_generation.observe(record.num_generated_tokens)
        self._series.request_longest.observe(record.num_longest_tokens)
        if timings.scheduled_time is None:
            return
        self._series.queue.observe(timings.scheduled_time - timings.arrival_time)
        self._series.inference.observe(timings.finished_time - timings.scheduled_time)
        if timings.first_token_time is None:
            return
        self._series.prefill.observe(timings.first_token_time - timings.scheduled_time)
        self._series.decode.observe(timings.finished_time - timings.first_token_time)
        if record.seconds_per_token is not None:
            self._series.per_token.observe(record.seconds_per_token)
