"""Every metric of the server: name, meaning, unit, buckets.

Names are vLLM's suffixes under the prefix `onward_`; the registry is injected, so that tests share no counters. Labels
are bounded: served models, finish reasons and error labels, our own methods, gRPC codes. Knows nothing of who observes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

from service.engine.types import RequestTimings, StepStats

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


# A small model answers in milliseconds: the usual buckets, which begin at 10 ms or more, would tell nothing.
TIME_BUCKETS = geometric_buckets(100e-6, 1.5, 150.0)
TOKEN_BUCKETS = geometric_buckets(1, 2, 131072)
BATCH_BUCKETS = geometric_buckets(1, 2, 1024)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """One request that is over, as the metrics see it. `outcome` is a finish reason or an error's label.

    Generated tokens are those of all its outputs; `seconds_per_token` is their mean time after each output's first,
    None where that means nothing.
    """

    outcome: str
    timings: RequestTimings
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int
    seconds_per_token: float | None


class Metrics:
    """All metrics, registered once in `registry`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def make(kind: type[_Metric], name: str, meaning: str, *labels: str, **options: Any) -> _Metric:
            return kind(name, meaning, labels, namespace=NAMESPACE, registry=registry, **options)

        def seconds(name: str, meaning: str) -> Histogram:
            return make(Histogram, name, meaning, _MODEL, buckets=TIME_BUCKETS)

        def sizes(name: str, meaning: str, buckets: Sequence[float]) -> Histogram:
            return make(Histogram, name, meaning, _MODEL, buckets=buckets)

        ProcessCollector(registry=registry)
        self.running = make(Gauge, "num_requests_running", "Requests that run.", _MODEL)
        self.waiting = make(Gauge, "num_requests_waiting", "Requests that wait for their place.", _MODEL)
        self.kv_usage = make(Gauge, "kv_cache_usage_ratio", "Share of the key-value cache in use, 0 to 1.", _MODEL)
        self.parity = make(
            Gauge, "parity_max_abs_error", "Largest logit difference from PyTorch in the golden cases.", _MODEL
        )
        self.prompt_tokens = make(Counter, "prompt_tokens", "Prompt tokens taken in, cached ones included.", _MODEL)
        self.cached_prompt_tokens = make(
            Counter, "cached_prompt_tokens", "Prompt tokens whose keys and values were at hand.", _MODEL
        )
        self.generation_tokens = make(Counter, "generation_tokens", "Tokens generated and told.", _MODEL)
        self.padding_tokens = make(Counter, "padding_tokens", "Tokens computed in vain, as padding.", _MODEL)
        self.preemptions = make(
            Counter, "preemptions", "Times that a request lost its place to more urgent ones.", _MODEL
        )
        self.requests = make(
            Counter, "requests", "Requests that ended or were refused, by reason or error.", _MODEL, "finish_reason"
        )
        self.handled = make(
            Counter, "grpc_server_handled", "Calls that ended, by method and status code.", "grpc_method", "grpc_code"
        )
        self.first_token = seconds("time_to_first_token_seconds", "From arrival to the first token.")
        self.inter_token = seconds("inter_token_latency_seconds", "Between two tokens of one output.")
        self.per_token = seconds(
            "time_per_output_token_seconds", "Mean time per token after an output's first, per request."
        )
        self.end_to_end = seconds("e2e_request_latency_seconds", "From arrival to the end.")
        self.queue = seconds("request_queue_time_seconds", "From arrival to being scheduled.")
        self.prefill = seconds("request_prefill_time_seconds", "From being scheduled to the first token.")
        self.decode = seconds("request_decode_time_seconds", "From the first token to the end.")
        self.host = seconds("engine_host_seconds", "Time between two runs of graphs while there was work.")
        self.request_prompt = sizes("request_prompt_tokens", "Prompt tokens per request.", TOKEN_BUCKETS)
        self.request_generation = sizes("request_generation_tokens", "Generated tokens per request.", TOKEN_BUCKETS)
        self.step_batch = sizes("step_batch_size", "Rows per step.", BATCH_BUCKETS)
        self.step_tokens = sizes("step_tokens", "Tokens per step.", TOKEN_BUCKETS)

    def for_model(self, model: str) -> ModelMetrics:
        """The metrics of one served model; its gauges and counters show up at zero from now on."""
        return ModelMetrics(self, model)


class ModelMetrics:
    """What happens to one model, written to the metrics that carry its name. Resolves labels once: tokens are many."""

    def __init__(self, metrics: Metrics, model: str) -> None:
        self._model = model
        self._requests = metrics.requests
        self._parity = metrics.parity
        self._running = metrics.running.labels(model)
        self._waiting = metrics.waiting.labels(model)
        self._kv_usage = metrics.kv_usage.labels(model)
        self._prompt_tokens = metrics.prompt_tokens.labels(model)
        self._cached_prompt_tokens = metrics.cached_prompt_tokens.labels(model)
        self._generation_tokens = metrics.generation_tokens.labels(model)
        self._padding_tokens = metrics.padding_tokens.labels(model)
        self._preemptions = metrics.preemptions.labels(model)
        self._first_token = metrics.first_token.labels(model)
        self._inter_token = metrics.inter_token.labels(model)
        self._per_token = metrics.per_token.labels(model)
        self._end_to_end = metrics.end_to_end.labels(model)
        self._queue = metrics.queue.labels(model)
        self._prefill = metrics.prefill.labels(model)
        self._decode = metrics.decode.labels(model)
        self._host = metrics.host.labels(model)
        self._request_prompt = metrics.request_prompt.labels(model)
        self._request_generation = metrics.request_generation.labels(model)
        self._step_batch = metrics.step_batch.labels(model)
        self._step_tokens = metrics.step_tokens.labels(model)

    def idle(self) -> None:
        """The model is gone: nothing of it runs or waits. What was counted stays counted."""
        for gauge in (self._running, self._waiting, self._kv_usage):
            gauge.set(0)

    def parity_checked(self, max_abs_error: float) -> None:
        """The golden cases were replayed."""
        self._parity.labels(self._model).set(max_abs_error)

    def step_done(self, stats: StepStats) -> None:
        """The engine took a step. A step that computed nothing moves the gauges alone."""
        self._running.set(stats.num_running)
        self._waiting.set(stats.num_waiting)
        self._kv_usage.set(stats.kv_usage_ratio)
        self._preemptions.inc(stats.num_preemptions)
        if stats.num_tokens:
            self._step_batch.observe(stats.num_rows)
            self._step_tokens.observe(stats.num_tokens)
            self._padding_tokens.inc(stats.num_padding_tokens)
        if stats.host_seconds is not None:
            self._host.observe(stats.host_seconds)

    def tokens_generated(self, count: int) -> None:
        """A step told so many tokens, over all requests."""
        self._generation_tokens.inc(count)

    def prompt_scored(self, num_prompt_tokens: int) -> None:
        """A request that generates nothing is through."""
        self._prompt_tokens.inc(num_prompt_tokens)

    def first_token(self, num_prompt_tokens: int, seconds: float) -> None:
        """A request got its first token, `seconds` after it arrived."""
        self._prompt_tokens.inc(num_prompt_tokens)
        self._first_token.observe(seconds)

    def next_token(self, seconds: float) -> None:
        """An output got another token, `seconds` after the one before."""
        self._inter_token.observe(seconds)

    def request_refused(self, outcome: str) -> None:
        """A request ended before the engine had it: it is counted, but took no time that would mean anything."""
        self._requests.labels(self._model, outcome).inc()

    def request_done(self, record: RequestRecord) -> None:
        """A request is over. Phases that it never reached are not observed."""
        timings = record.timings
        self._requests.labels(self._model, record.outcome).inc()
        self._end_to_end.observe(timings.finished_time - timings.arrival_time)
        self._cached_prompt_tokens.inc(record.num_cached_tokens)
        self._request_prompt.observe(record.num_prompt_tokens)
        self._request_generation.observe(record.num_generated_tokens)
        if timings.scheduled_time is None:
            return
        self._queue.observe(timings.scheduled_time - timings.arrival_time)
        if timings.first_token_time is None:
            return
        self._prefill.observe(timings.first_token_time - timings.scheduled_time)
        self._decode.observe(timings.finished_time - timings.first_token_time)
        if record.seconds_per_token is not None:
            self._per_token.observe(record.seconds_per_token)
