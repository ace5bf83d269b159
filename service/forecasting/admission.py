"""Admission by deadline: a request that could not be answered in time is refused at once, with the numbers.

A request's finish is predicted when it is about to be queued: the forecast of its time in the queue, its prompt and as
many tokens as it will likely have (`service.forecasting.prediction`, `service.forecasting.lengths`).

A forecast knows the present, but requests are held up by those that come after them, too. So it is multiplied by a
*correction* that is learned from what became of those admitted: it rises a little when one took longer than was
predicted, and falls by a ninth of that when one did not, so that it settles where nine of ten are right (a stochastic
quantile estimate). A refusal lets it fall as well: nothing is learned from it, and no error must refuse for ever. For
the same reason nothing is corrected while no other request is there, and of the requests that an idle server refuses in
a row each sixteenth runs.

Knows no streams, threads or protobuf, and no clock: moments are `time.monotonic()` seconds. On the event loop alone.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Protocol

from service.engine.types import FinishReason, GenerationRequest, RequestTimings
from service.errors import DeadlineUnreachable
from service.forecasting.prediction import Forecast

PATIENCE_SECONDS = 10.0
"""For how long a request may be overtaken by its equals, where early deadlines go first
(`service.engine.queueing.waiting`).

Interactive deadlines are shorter, so that they go before work that has none; and who has waited for so long is not to
wait for newcomers any more.
"""
_RIGHT_SHARE = 0.9
_STEP = 0.1
_LIMIT = math.log(8.0)
_PROBE_EVERY = 16
_MIN_RETRY_SECONDS = 0.05
_MAX_RETRY_SECONDS = 60.0
_CUT_OFF = frozenset({FinishReason.DEADLINE, FinishReason.CANCELLED})


class Foreteller(Protocol):
    """What is needed of a model's `service.forecasting.prediction.Forecaster`."""

    def forecast(self, request: GenerationRequest, cached_tokens: int = 0) -> Forecast | None:
        """For one that is queued now, of which so many tokens are cached; None while too little is known."""

    def forecast_alone(self, request: GenerationRequest, cached_tokens: int = 0) -> Forecast | None:
        """For one that has the model to itself."""

    def likely_tokens(self, request: GenerationRequest) -> int | None:
        """How long its outputs will likely be; None where that is not known."""


@dataclass(frozen=True, slots=True)
class _Weighed:
    """A request against the time that it has: what it is taken to ask for, its forecast, and by how much that errs."""

    foreseen: GenerationRequest
    forecast: Forecast
    service_seconds: float
    factor: float
    is_length_known: bool

    @property
    def needed(self) -> float:
        """Seconds from now on."""
        return self.factor * (self.forecast.queue_seconds + self.service_seconds)


@dataclass(frozen=True, slots=True)
class Prediction:
    """What was foretold of a request when it was queued, uncorrected."""

    moment: float
    service_seconds: float
    finish_seconds: float


class Correction:
    """The factor by which requests take longer than is forecast, so that it holds for nine of ten."""

    def __init__(self) -> None:
        self._log = 0.0

    @property
    def factor(self) -> float:
        """From 1/8 to 8; 1 until something is learned."""
        return math.exp(self._log)

    def rise(self) -> None:
        """A request took longer than the corrected forecast."""
        self._log = min(self._log + _STEP * _RIGHT_SHARE, _LIMIT)

    def fall(self) -> None:
        """A request did not take longer, or it is not known whether it did."""
        self._log = max(self._log - _STEP * (1 - _RIGHT_SHARE), -_LIMIT)


class DeadlineAdmission:
    """Judges one model's requests, and learns from what becomes of them.

    Args:
        forecaster: the model's.
    """

    def __init__(self, forecaster: Foreteller) -> None:
        self._forecaster = forecaster
        self._correction = Correction()
        self._num_refused_idle = 0

    def admits(self, request: GenerationRequest, now: float, answer_by: float, *, is_idle: bool) -> bool:
        """Whether `judge` would let a request in of which nothing is cached; those let in to learn do not count."""
        weighed = self._weigh(request, 0, is_idle=is_idle)
        return weighed is None or weighed.needed <= answer_by - now

    def judge(
        self, request: GenerationRequest, now: float, answer_by: float, *, is_idle: bool, cached_tokens: int = 0
    ) -> tuple[GenerationRequest, Prediction | None]:
        """Lets a request with a deadline in: as the engine is to have it, and what it was foretold.

        Args:
            request: which.
            now: the moment.
            answer_by: when its answer must leave the engine to be in time.
            is_idle: whether it would have the model to itself.
            cached_tokens: of its prompt or source, tokens whose K/V are at hand.

        Raises:
            DeadlineUnreachable: when it could not be over by then or, if it takes what there is, not begin to answer.
        """
        weighed = self._weigh(request, cached_tokens, is_idle=is_idle)
        if weighed is None:
            return request, None
        forecast, service, factor = weighed.forecast, weighed.service_seconds, weighed.factor
        left = answer_by - now
        if weighed.needed > left and not (is_idle and self._probes()):
            if not is_idle:
                self._correction.fall()
            raise DeadlineUnreachable(
                queue_seconds=factor * forecast.queue_seconds,
                prefill_seconds=factor * forecast.prefill_seconds,
                decode_seconds=factor * (service - forecast.prefill_seconds),
                left_seconds=left,
                retry_after_seconds=self._retry_after(weighed, answer_by - request.arrival_time, cached_tokens),
            )
        self._num_refused_idle = 0
        if request.partial_on_deadline:
            return request, None
        prediction = Prediction(now, service, forecast.queue_seconds + service) if weighed.is_length_known else None
        if is_idle:
            return request, prediction
        return replace(request, start_by=answer_by - factor * service), prediction

    def ended(self, prediction: Prediction, timings: RequestTimings, reasons: Collection[FinishReason]) -> None:
        """A request that was predicted is over, with all its outputs."""
        seconds = timings.finished_time - prediction.moment
        if timings.scheduled_time is None:
            # It left the queue unserved, and would have had to be served besides.
            seconds += prediction.service_seconds
        if seconds > self._correction.factor * prediction.finish_seconds:
            self._correction.rise()
        elif not _CUT_OFF.intersection(reasons):
            self._correction.fall()

    def _retry_after(self, weighed: _Weighed, timeout: float, cached_tokens: int) -> float | None:
        """Seconds until such a request should fit, as the work ahead of it shrinks; None where it never will."""
        alone = self._forecaster.forecast_alone(weighed.foreseen, cached_tokens)
        if alone is not None and _service_seconds(alone, weighed.foreseen) > timeout:
            return None
        return min(max(weighed.needed - timeout, _MIN_RETRY_SECONDS), _MAX_RETRY_SECONDS)

    def _weigh(self, request: GenerationRequest, cached_tokens: int, *, is_idle: bool) -> _Weighed | None:
        """What there is to be judged by; None while too few steps were seen."""
        likely = self._forecaster.likely_tokens(request)
        # Where nothing is known of its length, it is refused only if not even its first token would be in time.
        foreseen = _with_max_tokens(request, 1 if likely is None else likely)
        forecast = self._forecaster.forecast(foreseen, cached_tokens)
        if forecast is None:
            return None
        return _Weighed(
            foreseen=foreseen,
            forecast=forecast,
            service_seconds=_service_seconds(forecast, request),
            factor=1.0 if is_idle else self._correction.factor,
            is_length_known=likely is not None,
        )

    def _probes(self) -> bool:
        self._num_refused_idle += 1
        return self._num_refused_idle % _PROBE_EVERY == 0


def _with_max_tokens(request: GenerationRequest, max_tokens: int) -> GenerationRequest:
    stopping = request.stopping
    if max_tokens >= stopping.max_tokens:
        return request
    return replace(request, stopping=replace(stopping, max_tokens=max_tokens, min_tokens=0))


def _service_seconds(forecast: Forecast, request: GenerationRequest) -> float:
    """What a request must have of its place: all of it, or its first token where it takes what there is."""
    return forecast.prefill_seconds + (0.0 if request.partial_on_deadline else forecast.decode_seconds)
