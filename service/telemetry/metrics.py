"""Every metric of the server: name, meaning, unit, buckets; `docs/metrics.md` lists them for people.

Names are vLLM's suffixes under the prefix `onward_`; the registry is injected, so that tests share no counters. Labels
are bounded: served models, finish reasons and error labels, our own methods, gRPC codes, objectives, terms of the cost
model. Knows nothing of who observes.
"""

from __future__ import annotations

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


# A small model answers in milliseconds: the usual buckets, which begin at 10 ms or more, would tell nothing.
TIME_BUCKETS = geometric_buckets(100e-6, 1.5, 150.0)
TOKEN_BUCKETS = geometric_buckets(1, 2, 131072)
BATCH_BUCKETS = geometric_buckets(1, 2, 1024)


OUTCOMES = tuple(sorted({*map(str, FinishReason), *error_labels()}))
"""How a request can end, as a label. Each is there from the start: what appears at 1 has no rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Objectives:
    """Seconds that an operator promises. Each becomes a bucket boundary, so that the share within it is exact."""

    time_to_first_token: tuple[float, ...] = ()
    inter_token_latency: tuple[float, ...] = ()
    e2e_latency: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """One request that is over, as the metrics see it. `outcome` is a finish reason or an error's label.

    Generated tokens are those of all its outputs, `num_longest_tokens` those of the longest; `seconds_per_token` is
    their mean time after each output's first, None where that means nothing.
    """

    outcome: str
    timings: RequestTimings
    num_prompt_tokens: int
    num_generated_tokens: int
    num_longest_tokens: int
    seconds_per_token: float | None


_NO_OBJECTIVES = Objectives()


class Metrics:
    """All metrics, registered once in `registry`; `objectives` are boundaries of the histograms they speak of."""

    def __init__(self, registry: CollectorRegistry, objectives: Objectives = _NO_OBJECTIVES) -> None:
        def make(kind: type[_Metric], name: str, meaning: str, *labels: str, **options: Any) -> _Metric:
            return kind(name, meaning, labels, namespace=NAMESPACE, registry=registry, **options)

        def seconds(name: str, meaning: str, bounds: Sequence[float] = ()) -> Histogram:
            return make(Histogram, name, meaning, _MODEL, buckets=sorted({*TIME_BUCKETS, *bounds}))

        def sizes(name: str, meaning: str, buckets: Sequence[float]) -> Histogram:
            return make(Histogram, name, meaning, _MODEL, buckets=buckets)

        ProcessCollector(registry=registry)
        self.running = make(Gauge, "num_requests_running", "Requests that run.", _MODEL)
        self.waiting = make(Gauge, "num_requests_waiting", "Requests that wait for their place.", _MODEL)
        self.kv_usage = make(Gauge, "kv_cache_usage_ratio", "Share of the key-value cache in use, 0 to 1.", _MODEL)
        self.kv_memory = make(Gauge, "kv_memory_bytes", "What the model's keys and values may take.", _MODEL)
        self.serving = make(Gauge, "model_serving", "Whether the model answers requests, 1 or 0.", _MODEL)
        self.parity = make(
            Gauge, "parity_max_abs_error", "Largest logit difference from PyTorch in the golden cases.", _MODEL
        )
        self.parity_passed = make(Gauge, "parity_passed", "Whether every golden case passed, 1 or 0.", _MODEL)
        self.coefficient = make(
            Gauge, "cost_model_coefficient", "Seconds of a step by term, learned from the steps.", _MODEL, "term"
        )
        self.relative_error = make(
            Gauge,
            "cost_model_relative_error",
            "By how much of it service times lately differed from what was predicted.",
            _MODEL,
        )
        slo = make(Gauge, "slo_seconds", "Objectives that were given; each is a bucket boundary.", "slo", "bound")
        self.prompt_tokens = make(Counter, "prompt_tokens", "Prompt tokens taken in, cached ones included.", _MODEL)
        self.cached_prompt_tokens = make(
            Counter, "cached_prompt_tokens", "Prompt tokens whose keys and values were at hand.", _MODEL
        )
        self.generation_tokens = make(Counter, "generation_tokens", "Tokens generated and told.", _MODEL)
        self.padding_tokens = make(Counter, "padding_tokens", "Tokens computed in vain, as padding.", _MODEL)
        self.preemptions = make(
            Counter, "preemptions", "Times that a request lost its place to more urgent ones.", _MODEL
        )
        self.max_draft_tokens = make(
            Gauge, "spec_decode_max_draft_tokens", "Tokens that are guessed at once at most; 0: none ever are.", _MODEL
        )
        self.drafts = make(Counter, "spec_decode_num_drafts", "Steps in which tokens were guessed ahead.", _MODEL)
        self.draft_tokens = make(Counter, "spec_decode_num_draft_tokens", "Tokens that were guessed.", _MODEL)
        self.accepted_tokens = make(
            Counter, "spec_decode_num_accepted_tokens", "Tokens that were guessed and came true.", _MODEL
        )
        self.requests = make(
            Counter, "requests", "Requests that ended or were refused, by reason or error.", _MODEL, "finish_reason"
        )
        self.handled = make(
            Counter, "grpc_server_handled", "Calls that ended, by method and status code.", "grpc_method", "grpc_code"
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
        self.step_tokens = sizes(
            "step_tokens", "Tokens per step, padding and guesses that were wrong aside.", TOKEN_BUCKETS
        )
        for field in dataclasses.fields(objectives):
            for bound in getattr(objectives, field.name):
                slo.labels(field.name, repr(bound)).set(bound)

    def for_model(self, model: str) -> ModelMetrics:
        """The metrics of one served model, until they are closed; gauges and counters show up at zero from now on.

        Made once for each time that the model is loaded.
        """
        return ModelMetrics(self, model)


class ModelMetrics:
    """What happens to one model, written to the metrics that carry its name. Resolves labels once: tokens are many."""

    def __init__(self, metrics: Metrics, model: str) -> None:
        self._model = model
        self._requests = {outcome: metrics.requests.labels(model, outcome) for outcome in OUTCOMES}
        self._serving = metrics.serving
        self._parity = metrics.parity
        self._parity_passed = metrics.parity_passed
        self._kv_memory = metrics.kv_memory
        self._max_draft_tokens = metrics.max_draft_tokens
        self._coefficient = metrics.coefficient
        self._relative_error = metrics.relative_error
        self._gauges = (
            metrics.running,
            metrics.waiting,
            metrics.kv_usage,
            metrics.kv_memory,
            metrics.serving,
            metrics.parity,
            metrics.parity_passed,
            metrics.max_draft_tokens,
            metrics.coefficient,
            metrics.relative_error,
        )
        self._is_open = True
        self.serves(is_serving=False)
        self._running = metrics.running.labels(model)
        self._waiting = metrics.waiting.labels(model)
        self._kv_usage = metrics.kv_usage.labels(model)
        self._prompt_tokens = metrics.prompt_tokens.labels(model)
        self._cached_prompt_tokens = metrics.cached_prompt_tokens.labels(model)
        self._generation_tokens = metrics.generation_tokens.labels(model)
        self._padding_tokens = metrics.padding_tokens.labels(model)
        self._preemptions = metrics.preemptions.labels(model)
        self._drafts = metrics.drafts.labels(model)
        self._draft_tokens = metrics.draft_tokens.labels(model)
        self._accepted_tokens = metrics.accepted_tokens.labels(model)
        self._first_token = metrics.first_token.labels(model)
        self._inter_token = metrics.inter_token.labels(model)
        self._per_token = metrics.per_token.labels(model)
        self._end_to_end = metrics.end_to_end.labels(model)
        self._queue = metrics.queue.labels(model)
        self._prefill = metrics.prefill.labels(model)
        self._decode = metrics.decode.labels(model)
        self._inference = metrics.inference.labels(model)
        self._run = metrics.run.labels(model)
        self._host = metrics.host.labels(model)
        self._request_prompt = metrics.request_prompt.labels(model)
        self._request_generation = metrics.request_generation.labels(model)
        self._request_longest = metrics.request_longest.labels(model)
        self._step_batch = metrics.step_batch.labels(model)
        self._step_tokens = metrics.step_tokens.labels(model)

    def close(self) -> None:
        """The model is not served any more: its gauges are gone, and what is set later is dropped. Counters stay."""
        self._is_open = False
        for gauge in self._gauges:
            gauge.remove_by_labels({_MODEL: self._model})

    def _set(self, gauge: Gauge, value: float, *labels: str) -> None:
        if self._is_open:
            gauge.labels(self._model, *labels).set(value)

    def serves(self, *, is_serving: bool) -> None:
        """The model answers from now on, or does not."""
        self._set(self._serving, is_serving)

    def kv_memory(self, num_bytes: int) -> None:
        """What its keys and values may take from now on."""
        self._set(self._kv_memory, num_bytes)

    def max_draft_tokens(self, num_tokens: int) -> None:
        """How many of its tokens are guessed at once from now on, at most."""
        self._set(self._max_draft_tokens, num_tokens)

    def parity_checked(self, max_abs_error: float, *, passed: bool) -> None:
        """The golden cases were replayed."""
        self._set(self._parity, max_abs_error)
        self._set(self._parity_passed, passed)

    def cost_model(self, coefficients: Mapping[str, float], relative_error: float | None) -> None:
        """What is known of the model's step times, in seconds by term, and how far off predictions were."""
        for term, seconds in coefficients.items():
            self._set(self._coefficient, seconds, term)
        if relative_error is not None:
            self._set(self._relative_error, relative_error)

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
            self._run.observe(stats.run_seconds)
        if stats.num_draft_tokens:
            self._drafts.inc()
            self._draft_tokens.inc(stats.num_draft_tokens)
            self._accepted_tokens.inc(stats.num_accepted_tokens)
        if stats.host_seconds is not None:
            self._host.observe(stats.host_seconds)

    def tokens_generated(self, count: int) -> None:
        """A step generated so many tokens, over all requests."""
        self._generation_tokens.inc(count)

    def prompt_done(self, num_prompt_tokens: int, num_cached_tokens: int) -> None:
        """A request's prompt is through, of which so many tokens needed no work."""
        self._prompt_tokens.inc(num_prompt_tokens)
        self._cached_prompt_tokens.inc(num_cached_tokens)

    def first_token(self, seconds: float) -> None:
        """A request got its first token, `seconds` after it arrived."""
        self._first_token.observe(seconds)

    def next_token(self, seconds: float) -> None:
        """An output got another token, `seconds` after the one before."""
        self._inter_token.observe(seconds)

    def request_refused(self, outcome: str) -> None:
        """A request ended before the engine had it: it is counted, but took no time that would mean anything."""
        self._requests[outcome].inc()

    def request_done(self, record: RequestRecord) -> None:
        """A request is over. Phases that it never reached are not observed."""
        timings = record.timings
        self._requests[record.outcome].inc()
        self._end_to_end.observe(timings.finished_time - timings.arrival_time)
        self._request_prompt.observe(record.num_prompt_tokens)
        self._request_generation.observe(record.num_generated_tokens)
        self._request_longest.observe(record.num_longest_tokens)
        if timings.scheduled_time is None:
            return
        self._queue.observe(timings.scheduled_time - timings.arrival_time)
        self._inference.observe(timings.finished_time - timings.scheduled_time)
        if timings.first_token_time is None:
            return
        self._prefill.observe(timings.first_token_time - timings.scheduled_time)
        self._decode.observe(timings.finished_time - timings.first_token_time)
        if record.seconds_per_token is not None:
            self._per_token.observe(record.seconds_per_token)
