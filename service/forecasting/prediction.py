"""Predicts the latency of a request: its work at the recent rates of steps, behind the requests before it.

    prediction  =  queue    until rows are free, given the requests that run and those that wait before it
                +  prefill  until its first token
                +  decode   until its last one, outputs taken to be as long as they may be

One predictor per model, on the event loop. It learns from every step (`service.forecasting.step_times`), knows the
requests that the engine has, and compares each request's prediction with what it then took.

The queue is modeled simply. Every step takes as long as with all rows that there are and will be. A running request
ends at the length that such requests had lately (at its limit, if nothing can stop it before). A waiting request takes
the first free rows in the order of admission, and prompts are computed one after another. A tenant beside others has
its share of rows and prompts, and no more (`service.engine.queueing.tenants`). All of it is stretched by what other
models take of the cores meanwhile (`service.forecasting.sharing`). Not predicted: requests to come, cache hits on
prompts that are still in the queue, K/V memory where that is scarcer than rows.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from model.spec.cost import RequestShape, RequestWork, request_work
from service.engine.queueing.waiting import due_time
from service.engine.types import FinishReason, GenerationRequest, StepStats, TokenEvent
from service.forecasting.costing import Cost, CostModel
from service.forecasting.lengths import AnswerLengths
from service.forecasting.sharing import Rival, stretched
from service.forecasting.step_times import ALONE, BatchLoad, Rates, StepTimes

# The largest standard deviation, as a share of the predicted seconds; beyond it nothing is predicted.
_MOST_UNKNOWN = 0.5
# Of the moving average of requests' errors.
_REQUEST_RATE = 0.05
# Reasons of outputs that ended by themselves and were not cut off.
_WHOLE = frozenset({FinishReason.END_OF_SEQUENCE, FinishReason.STOP})


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Seconds that a request is predicted to spend in each part; outputs are as long as they may be.

    `sharing_factor` is by how much other models that share the cores lengthen all of it.
    """

    queue_seconds: float
    prefill_seconds: float
    decode_seconds: float
    sharing_factor: float = 1.0

    @property
    def service_seconds(self) -> float:
        """From being scheduled to its end."""
        return self.prefill_seconds + self.decode_seconds

    @property
    def finish_seconds(self) -> float:
        """From now to its end."""
        return self.queue_seconds + self.service_seconds


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a request would cost, and its prediction; None while too few steps were seen."""

    cost: Cost
    prediction: Prediction | None


@dataclass(frozen=True, slots=True)
class Quote:
    """What was known when a request was handed over: what is needed to predict as of then."""

    rates: Rates
    batch: BatchLoad
    rivals: tuple[Rival, ...] = ()

    def phases(self, work: RequestWork) -> tuple[float, float] | None:
        """Seconds of the cores until the first token, and from there to the end; None if too little was known."""
        prefill = self.rates.seconds(work.prefill, self.batch, wakes=not self.batch.num_rows)
        decode = self.rates.seconds(work.decode, self.batch)
        unknown = self.rates.deviation(work.prefill, work.decode)
        return (prefill, decode) if unknown < _MOST_UNKNOWN * (prefill + decode) else None

    def seconds(self, work: RequestWork) -> float | None:
        """Both phases together, with what other models take meanwhile."""
        phases = self.phases(work)
        return None if phases is None else stretched(sum(phases), self.rivals)


@dataclass(slots=True)
class _Outstanding:
    """A request that the engine has: `num_tokens` of all rows so far, of likely `likely_tokens` in each row."""

    turn: tuple[int, float]
    tenant: str
    weight: float
    num_rows: int
    likely_tokens: int
    prefill_seconds: float
    num_tokens: int = 0


class LatencyPredictor:
    """Predicts one model's requests.

    Args:
        costs: counts their work.
        max_batch_size: rows of the engine.
        patience: seconds for which the engine lets earlier deadlines overtake (`service.engine.queueing.waiting`).
        rivals: returns the other models that share the cores now.
    """

    def __init__(
        self,
        costs: CostModel,
        max_batch_size: int,
        patience: float | None = None,
        rivals: Callable[[], tuple[Rival, ...]] = tuple,
    ) -> None:
        self.costs = costs
        self._max_rows = max_batch_size
        self._patience = patience
        self._rivals = rivals
        self._lengths = AnswerLengths()
        self._times = StepTimes(costs.config, max_batch_size)
        self._outstanding: dict[str, _Outstanding] = {}
        self._relative_error: float | None = None

    @property
    def coefficients(self) -> Mapping[str, float]:
        """Seconds by term (`service.forecasting.step_times`)."""
        return self._times.coefficients()

    @property
    def relative_error(self) -> float | None:
        """Mean of |predicted - measured| / measured of the requests lately ended; None before the first."""
        return self._relative_error

    def work_seconds(self) -> float:
        """Seconds of the cores that the engine's requests will likely take; 0 while no step was seen.

        The prompts that are not computed, and as many steps as the longest request has tokens to come, or as all
        requests need in the rows of the engine.
        """
        known = self._outstanding.values()
        if not known:
            return 0.0
        left = [(_tokens_left(each), each.num_rows) for each in known]
        num_row_steps = sum(tokens * num_rows for tokens, num_rows in left)
        num_steps = max(*(tokens for tokens, _ in left), num_row_steps / self._max_rows)
        rows = num_row_steps / num_steps
        prompts = sum(each.prefill_seconds for each in known if not each.num_tokens)
        return prompts + num_steps * self._times.rates.step_seconds(rows, rows * self._times.pairs_per_row)

    def step_done(self, stats: StepStats) -> None:
        """Learns from a step of the engine that serves."""
        self._times.learn(stats)
        self._times.note_batch(stats)

    def token_sent(self, request_id: str) -> None:
        """Counts a token of a request; unknown ones are ignored."""
        if known := self._outstanding.get(request_id):
            known.num_tokens += 1

    def calibrated(self, steps: Iterable[StepStats]) -> None:
        """Learns from each step of a calibration, however short."""
        for stats in steps:
            self._times.learn(stats, is_calibration=True)

    def submitted(self, request: GenerationRequest) -> Quote:
        """Adds a request that is handed to the engine now; returns what is known."""
        quote, work, likely_tokens = self._quote(request), self.costs.work(request), self.likely_tokens(request)
        self._outstanding[request.request_id] = _Outstanding(
            turn=self._turn(request),
            tenant=request.tenant,
            weight=request.weight,
            num_rows=request.num_rows,
            likely_tokens=self.costs.most_tokens(request) if likely_tokens is None else likely_tokens,
            prefill_seconds=quote.rates.seconds(work.prefill),
        )
        return quote

    def ended(self, request_id: str) -> None:
        """Drops a request that is over; unknown ones are ignored."""
        self._outstanding.pop(request_id, None)

    def predict(self, request: GenerationRequest, cached_tokens: int = 0) -> Prediction | None:
        """The latency of a request that is handed over now; None while too few steps were seen."""
        quote = self._quote(request)
        return self._predict(request, quote, self._queue_seconds(request, quote), cached_tokens)

    def predict_alone(self, request: GenerationRequest, cached_tokens: int = 0) -> Prediction | None:
        """As `predict`, if the request had the model to itself."""
        return self._predict(request, Quote(self._times.rates, ALONE), 0.0, cached_tokens)

    def likely_tokens(self, request: GenerationRequest) -> int | None:
        """How long each output will likely be, as of `arrival_time`; None if that is not known.

        At its limit if nothing can stop it before, else as long as recent outputs.
        """
        most_tokens = self.costs.most_tokens(request)
        if _has_known_length(request):
            return most_tokens
        expected = self._lengths.expected(request.arrival_time, most_tokens)
        return None if expected is None else min(max(expected, request.stopping.min_tokens), most_tokens)

    def output_ended(self, request: GenerationRequest, now: float, num_tokens: int, reason: FinishReason) -> None:
        """Learns the length of an output that is over."""
        if num_tokens and not _has_known_length(request):
            self._lengths.note(now, num_tokens, is_whole=reason in _WHOLE)

    def estimate(self, request: GenerationRequest, cached_tokens: int = 0) -> Estimate:
        """What a request would cost, were it handed over now; arguments as for `predict`."""
        prediction = self.predict(request, cached_tokens)
        counts = self.costs.count(self.costs.shape(request, cached_tokens))
        predicted_seconds = None if prediction is None else prediction.service_seconds
        return Estimate(Cost(counts=counts, predicted_seconds=predicted_seconds), prediction)

    def settle(self, quote: Quote, request: GenerationRequest, sent: Mapping[int, int], end: TokenEvent) -> Cost | None:
        """What a request has cost; None if it ended before its first token, or by an error.

        Its prediction is made as of `quote`, with the tokens that were cached and outputs as long as they may be.
        `relative_error` takes in the error for their true lengths.

        `sent` has the number of tokens of each output; `end` is the terminal event.
        """
        timings = end.timings
        if timings is None or timings.scheduled_time is None or timings.first_token_time is None or end.error:
            return None
        lengths = tuple(sent.values()) if request.beam_search is None else (end.num_search_steps,) * request.num_rows
        shape = self.costs.shape(request, end.num_cached_tokens, lengths)
        measured = timings.finished_time - timings.scheduled_time
        if (predicted := quote.seconds(self._work(request, shape, quote))) is not None and measured > 0:
            self._note_error(abs(predicted - measured) / measured)
        return Cost(
            counts=self.costs.count(shape),
            predicted_seconds=quote.seconds(
                self._work(request, self.costs.shape(request, end.num_cached_tokens), quote)
            ),
            measured_seconds=measured,
        )

    def _note_error(self, error: float) -> None:
        known = self._relative_error
        self._relative_error = error if known is None else known + _REQUEST_RATE * (error - known)

    def _quote(self, request: GenerationRequest) -> Quote:
        """What is known now, for a request that shares its steps with all that the engine has."""
        others = sum(known.num_rows for known in self._outstanding.values())
        rows = max(0, min(others, self._max_rows - request.num_rows))
        batch = BatchLoad(rows, self._times.pairs_per_row, self._times.stretch) if rows else ALONE
        return Quote(self._times.rates, batch, self._rivals())

    def _predict(
        self, request: GenerationRequest, quote: Quote, queue_seconds: float, cached_tokens: int
    ) -> Prediction | None:
        phases = quote.phases(self._work(request, self.costs.shape(request, cached_tokens), quote))
        if phases is None:
            return None
        alone = tuple(itertools.accumulate((queue_seconds, *phases)))
        begins, first, ends = (stretched(seconds, quote.rivals) for seconds in alone)
        return Prediction(
            queue_seconds=begins,
            prefill_seconds=first - begins,
            decode_seconds=ends - first,
            sharing_factor=ends / alone[-1] if alone[-1] > 0 else 1.0,
        )

    def _work(self, request: GenerationRequest, shape: RequestShape, quote: Quote) -> RequestWork:
        """A request's work with what the engine, and others on its thread, had as of `quote`."""
        is_alone = not quote.batch.num_rows and not quote.rivals and request.end_by is None
        return request_work(self.costs.alone(shape) if is_alone else shape)

    def _turn(self, request: GenerationRequest) -> tuple[int, float]:
        """The order of admission, smaller first."""
        return -request.priority, due_time(request, self._patience)

    def _queue_seconds(self, request: GenerationRequest, quote: Quote) -> float:
        """Seconds until rows are free for a request that is handed over now, and the prompts before it are computed."""
        rows = min(request.num_rows + quote.batch.num_rows, self._max_rows)
        step = quote.rates.step_seconds(rows, rows * self._times.pairs_per_row) * quote.batch.stretch
        # Less urgent requests are preempted.
        turn = self._turn(request)
        known = self._outstanding.values()
        # Equals of other tenants keep no request from its own tenant's share of rows and prompts.
        weights = {request.tenant: request.weight} | {each.tenant: each.weight for each in known}
        share = request.weight / math.fsum(weights.values()) if len(weights) > 1 else 1.0
        max_rows = max(request.num_rows, math.floor(share * self._max_rows))
        rivals = [
            each
            for each in known
            if each.turn[0] < turn[0] or (each.turn[0] == turn[0] and each.tenant == request.tenant)
        ]
        running = [each for each in rivals if each.num_tokens]
        ahead = [each for each in rivals if not each.num_tokens and each.turn <= turn]
        ahead.sort(key=lambda each: each.turn)
        free = max_rows - sum(each.num_rows for each in running)
        ends = [(_tokens_left(each) * step, each.num_rows) for each in running]
        heapq.heapify(ends)
        now = computed = 0.0
        for each in (*ahead, None):
            wanted = request.num_rows if each is None else each.num_rows
            while free < wanted and ends:
                end, num_rows = heapq.heappop(ends)
                now, free = max(now, end), free + num_rows
            if each is not None:
                computed = max(now, computed) + each.prefill_seconds / share
                heapq.heappush(ends, (computed + _tokens_left(each) * step, wanted))
                free -= wanted
        return max(now, computed)


def _tokens_left(known: _Outstanding) -> float:
    """Steps that a request will likely decode for, at least one."""
    return max(known.likely_tokens - known.num_tokens / known.num_rows, 1.0)


def _has_known_length(request: GenerationRequest) -> bool:
    """Whether nothing can end a request's outputs before their limit."""
    stopping = request.stopping
    can_stop = stopping.stop or stopping.stop_token_ids or not stopping.ignore_eos
    return stopping.max_tokens <= 1 or stopping.min_tokens == stopping.max_tokens or not can_stop
