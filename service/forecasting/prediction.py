"""How long a request will take: its work at the rates at which steps have run lately, behind those that came before it.

    prediction  =  queue    until rows are free, given who runs and who waits before it
              +  prefill  until its first token
              +  decode   until its last one, outputs taken to be as long as they may

One predictor a model, on the event loop alone. It learns from every step (`service.forecasting.step_times`), knows the
requests that were handed to the engine and have not ended, and compares each request's prediction with what it then
took.

The queue is foretold simply. Steps take what they would with all rows that there are and will be; who runs ends when it
has as many tokens as such requests have come to lately (as many as it may have, if nothing can stop it before); a
request that waits takes the first rows that are free, in the order of turns, and prompts are computed one after
another. A tenant beside others has its share of rows and prompts, and no more (`service.engine.queueing.tenants`). All
of it takes longer where other models have work: by what they take of the cores meanwhile
(`service.forecasting.sharing`). Not predicted: requests to come, prefixes that a request before it will leave behind,
K/V memory where that is scarcer than rows.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from model.spec.cost import RequestWork, request_work
from service.engine.queueing.waiting import due_time
from service.engine.types import FinishReason, GenerationRequest, StepStats, TokenEvent
from service.forecasting.costing import Cost, CostModel
from service.forecasting.lengths import AnswerLengths
from service.forecasting.sharing import Rival, stretched
from service.forecasting.step_times import ALONE, Company, Rates, StepTimes

# Of the seconds that are predicted: what is not known yet may make so much of them, or nothing is predicted.
_MOST_UNKNOWN = 0.5
# How fast the average of requests follows.
_REQUEST_RATE = 0.05
# The ends that an output comes to by itself, as opposed to being cut off.
_WHOLE = frozenset({FinishReason.END_OF_SEQUENCE, FinishReason.STOP})


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Seconds that a request is predicted to spend, each part on its own; its outputs become as long as they may.

    `sharing_factor` is by how many times all of it is longer for the sake of other models that share the cores.
    """

    queue_seconds: float
    prefill_seconds: float
    decode_seconds: float
    sharing_factor: float = 1.0

    @property
    def service_seconds(self) -> float:
        """From its place to its end."""
        return self.prefill_seconds + self.decode_seconds

    @property
    def finish_seconds(self) -> float:
        """From now to its end."""
        return self.queue_seconds + self.service_seconds


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a request would cost, and its prediction; None while too few steps were seen to tell."""

    cost: Cost
    prediction: Prediction | None


@dataclass(frozen=True, slots=True)
class Quote:
    """What was known when a request was handed over: enough to say later what would have been predicted then."""

    rates: Rates
    company: Company
    rivals: tuple[Rival, ...] = ()

    def phases(self, work: RequestWork) -> tuple[float, float] | None:
        """Seconds of the cores until the first token of this work, and from there to its end.

        None where too little was known.
        """
        prefill = self.rates.seconds(work.prefill, self.company, wakes=not self.company.num_rows)
        decode = self.rates.seconds(work.decode, self.company)
        unknown = self.rates.deviation(work.prefill, work.decode)
        return (prefill, decode) if unknown < _MOST_UNKNOWN * (prefill + decode) else None

    def seconds(self, work: RequestWork) -> float | None:
        """Both together, with what other models take meanwhile if it starts at once."""
        phases = self.phases(work)
        return None if phases is None else stretched(sum(phases), self.rivals)


@dataclass(slots=True)
class _Outstanding:
    """A request that the engine has: `num_tokens` were reported over all rows, of likely `likely_tokens` in each."""

    turn: tuple[int, float]
    tenant: str
    weight: float
    num_rows: int
    likely_tokens: int
    prefill_seconds: float
    num_tokens: int = 0


class LatencyPredictor:
    """Foretells one model's requests.

    Args:
        costs: counts their work.
        max_batch_size: rows that its engine has.
        patience: seconds for which its engine lets earlier deadlines overtake (`service.engine.queueing.waiting`).
        rivals: asked for the other models that share the cores with a request that is handed over now.
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
        """Seconds of the cores that all requests here will likely take yet; 0 where nothing is known of steps.

        As many steps as the longest of them has tokens to come, or as all of them need in the rows that there are, and
        the prompts that have not been read.
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
        """Learns from a step of the engine whose requests are predicted; from no other engine's."""
        self._times.learn(stats)
        self._times.note_company(stats)

    def token_sent(self, request_id: str) -> None:
        """A request has one token more; unknown ones are ignored."""
        if known := self._outstanding.get(request_id):
            known.num_tokens += 1

    def calibrated(self, steps: Iterable[StepStats]) -> None:
        """Learns from steps of no request: from each, however quick."""
        for stats in steps:
            self._times.learn(stats, is_calibration=True)

    def submitted(self, request: GenerationRequest) -> Quote:
        """A request was handed to the engine: outstanding work grows. What is known now."""
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
        """A request is over, however it ended; unknown ones are ignored."""
        self._outstanding.pop(request_id, None)

    def predict(self, request: GenerationRequest, cached_tokens: int = 0) -> Prediction | None:
        """What a request that is handed over now will take; None while too few steps were seen to tell.

        Args:
            request: one whose lengths fit the model.
            cached_tokens: of its prompt or source, tokens whose K/V are at hand.
        """
        quote = self._quote(request)
        return self._predict(request, quote, self._queue_seconds(request, quote), cached_tokens)

    def predict_alone(self, request: GenerationRequest, cached_tokens: int = 0) -> Prediction | None:
        """What a request would take if it were alone; arguments and None as for `prediction`."""
        return self._predict(request, Quote(self._times.rates, ALONE), 0.0, cached_tokens)

    def likely_tokens(self, request: GenerationRequest) -> int | None:
        """How long each output will likely be, `arrival_time` taken as now.

        As long as it may where nothing can stop it before, else as answers lately were; None where that is not known.
        """
        most_tokens = self.costs.most_tokens(request)
        if _has_known_length(request):
            return most_tokens
        expected = self._lengths.expected(request.arrival_time, most_tokens)
        return None if expected is None else min(max(expected, request.stopping.min_tokens), most_tokens)

    def output_ended(self, request: GenerationRequest, now: float, num_tokens: int, reason: FinishReason) -> None:
        """One of a request's outputs is over: what that tells of the lengths of others."""
        if num_tokens and not _has_known_length(request):
            self._lengths.note(now, num_tokens, is_whole=reason in _WHOLE)

    def estimate(self, request: GenerationRequest, cached_tokens: int = 0) -> Estimate:
        """What a request would cost, were it handed over now; arguments as for `prediction`."""
        prediction = self.predict(request, cached_tokens)
        counts = self.costs.count(self.costs.shape(request, cached_tokens))
        predicted_seconds = None if prediction is None else prediction.service_seconds
        return Estimate(Cost(counts=counts, predicted_seconds=predicted_seconds), prediction)

    def settle(self, quote: Quote, request: GenerationRequest, sent: Mapping[int, int], end: TokenEvent) -> Cost | None:
        """What a request has cost; None where it ended before its first token, or by an error.

        Its prediction is what was known when it was handed over, with the tokens that turned out to be cached and
        outputs as long as they may be. The error that goes into `relative_error` is that for their true lengths.

        Args:
            quote: what was known then.
            request: the request.
            sent: how many tokens each output had.
            end: its terminal event.
        """
        timings = end.timings
        if timings is None or timings.scheduled_time is None or timings.first_token_time is None or end.error:
            return None
        lengths = tuple(sent.values()) if request.beam_search is None else (end.num_search_steps,) * request.num_rows
        shape = self.costs.shape(request, end.num_cached_tokens, lengths)
        measured = timings.finished_time - timings.scheduled_time
        if (predicted := quote.seconds(request_work(shape))) is not None and measured > 0:
            self._note_error(abs(predicted - measured) / measured)
        return Cost(
            counts=self.costs.count(shape),
            predicted_seconds=quote.seconds(self.costs.work(request, end.num_cached_tokens)),
            measured_seconds=measured,
        )

    def _note_error(self, error: float) -> None:
        known = self._relative_error
        self._relative_error = error if known is None else known + _REQUEST_RATE * (error - known)

    def _quote(self, request: GenerationRequest) -> Quote:
        """What is known now, for a request that would share its steps with all that is outstanding."""
        others = sum(known.num_rows for known in self._outstanding.values())
        rows = max(0, min(others, self._max_rows - request.num_rows))
        company = Company(rows, self._times.pairs_per_row, self._times.stretch) if rows else ALONE
        return Quote(self._times.rates, company, self._rivals())

    def _predict(
        self, request: GenerationRequest, quote: Quote, queue_seconds: float, cached_tokens: int
    ) -> Prediction | None:
        phases = quote.phases(self.costs.work(request, cached_tokens))
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

    def _turn(self, request: GenerationRequest) -> tuple[int, float]:
        """Who goes first, smaller is sooner; among equals, who came first."""
        return -request.priority, due_time(request, self._patience)

    def _queue_seconds(self, request: GenerationRequest, quote: Quote) -> float:
        """Until rows are free for a request that is handed over now, and no prompt is left before its own."""
        rows = min(request.num_rows + quote.company.num_rows, self._max_rows)
        step = quote.rates.step_seconds(rows, rows * self._times.pairs_per_row) * quote.company.stretch
        # Less urgent ones make way.
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
    """Steps that a request will likely decode for: one at least, as it has not ended."""
    return max(known.likely_tokens - known.num_tokens / known.num_rows, 1.0)


def _has_known_length(request: GenerationRequest) -> bool:
    """Whether nothing can end a request's outputs before they are as long as they may be."""
    stopping = request.stopping
    can_stop = stopping.stop or stopping.stop_token_ids or not stopping.ignore_eos
    return stopping.max_tokens <= 1 or stopping.min_tokens == stopping.max_tokens or not can_stop
