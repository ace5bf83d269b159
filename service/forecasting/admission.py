"""Admission by deadline: refuses a request at once, with the numbers, if it is predicted to miss its deadline.

The finish of a request is predicted when it is about to be queued: queue, prompt and as many tokens as it will likely
generate (`service.forecasting.prediction`, `service.forecasting.lengths`). No part of its prompt counts as cached.

Later requests delay those that were admitted. So each prediction is multiplied by a *correction*: it rises when a
request took longer than predicted and falls by a ninth of that when it did not, which settles where nine of ten
predictions hold (a stochastic quantile estimate). A refusal lowers it too: refused requests teach nothing, and no error
may refuse forever. For the same reason an idle model uses no correction, and every sixteenth request that an idle model
would refuse in a row runs.

Knows no streams, threads or protobuf, and no clock: moments are `time.monotonic()` seconds. Event loop only.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace

from service.engine.types import FinishReason, GenerationRequest, RequestTimings
from service.errors import DeadlineUnreachable
from service.forecasting.prediction import LatencyPredictor, Prediction

PATIENCE_SECONDS = 10.0
"""For how long requests of the same priority may overtake one that waits (`service.engine.queueing.waiting`).

Interactive deadlines are shorter, so they go before work without a deadline; a request that has waited for this long
is overtaken no more.
"""
_RIGHT_SHARE = 0.9
_STEP = 0.1
_LIMIT = math.log(8.0)
_PROBE_EVERY = 16
_MIN_RETRY_SECONDS = 0.05
_MAX_RETRY_SECONDS = 60.0
_CUT_OFF = frozenset({FinishReason.DEADLINE, FinishReason.CANCELLED})


@dataclass(frozen=True, slots=True)
class PredictedFinish:
    """What was predicted when a request was queued, uncorrected; `moment` is when."""

    moment: float
    service_seconds: float
    finish_seconds: float


class Correction:
    """The factor by which requests take longer than predicted; nine of ten corrected predictions hold."""

    def __init__(self) -> None:
        self._log = 0.0

    @property
    def factor(self) -> float:
        """From 1/8 to 8; 1 at first."""
        return math.exp(self._log)

    def rise(self) -> None:
        """A request took longer than the corrected prediction."""
        self._log = min(self._log + _STEP * _RIGHT_SHARE, _LIMIT)

    def fall(self) -> None:
        """A request did not take longer, or was refused."""
        self._log = max(self._log - _STEP * (1 - _RIGHT_SHARE), -_LIMIT)


class DeadlineAdmission:
    """Admits or refuses one model's requests, and learns from how long the admitted ones took."""

    def __init__(self, predictor: LatencyPredictor) -> None:
        self._predictor = predictor
        self._correction = Correction()
        self._num_refused_idle = 0

    def judge(
        self, request: GenerationRequest, now: float, answer_by: float, *, is_idle: bool
    ) -> tuple[GenerationRequest, PredictedFinish | None]:
        """Admits a request: returns it with `start_by`, and what was predicted; None while too few steps were seen.

        The last event must leave the engine by `answer_by`; an `is_idle` model would serve the request alone.

        Raises:
            DeadlineUnreachable: when its end or, with `partial_on_deadline`, its first token would come later.
        """
        likely = self._predictor.likely_tokens(request)
        # Of unknown length: refused only if not even the first token would be in time.
        expected = _with_max_tokens(request, 1 if likely is None else likely)
        prediction = self._predictor.predict(expected)
        if prediction is None:
            return request, None
        factor = 1.0 if is_idle else self._correction.factor
        service, left = _service_seconds(prediction, request), answer_by - now
        needed = factor * (prediction.queue_seconds + service)
        if needed > left and not (is_idle and self._probes()):
            if not is_idle:
                self._correction.fall()
            raise DeadlineUnreachable(
                queue_seconds=factor * prediction.queue_seconds,
                prefill_seconds=factor * prediction.prefill_seconds,
                decode_seconds=factor * (service - prediction.prefill_seconds),
                left_seconds=left,
                retry_after_seconds=self._retry_after(expected, needed, answer_by - request.arrival_time),
            )
        self._num_refused_idle = 0
        if request.partial_on_deadline:
            return request, None
        finish = None if likely is None else PredictedFinish(now, service, prediction.queue_seconds + service)
        return (request if is_idle else replace(request, start_by=answer_by - factor * service)), finish

    def ended(self, predicted: PredictedFinish, timings: RequestTimings, reasons: Collection[FinishReason]) -> None:
        """Learns from an admitted request that is over; `reasons` are those of its outputs."""
        seconds = timings.finished_time - predicted.moment
        if timings.scheduled_time is None:
            # It left the queue unserved, and would have had to be served besides.
            seconds += predicted.service_seconds
        if seconds > self._correction.factor * predicted.finish_seconds:
            self._correction.rise()
        elif not _CUT_OFF.intersection(reasons):
            self._correction.fall()

    def _retry_after(self, expected: GenerationRequest, needed: float, timeout: float) -> float | None:
        """Seconds until such a request should fit, as the work ahead of it shrinks; None if it never will."""
        alone = self._predictor.predict_alone(expected)
        if alone is not None and _service_seconds(alone, expected) > timeout:
            return None
        return min(max(needed - timeout, _MIN_RETRY_SECONDS), _MAX_RETRY_SECONDS)

    def _probes(self) -> bool:
        self._num_refused_idle += 1
        return self._num_refused_idle % _PROBE_EVERY == 0


def _with_max_tokens(request: GenerationRequest, max_tokens: int) -> GenerationRequest:
    stopping = request.stopping
    if max_tokens >= stopping.max_tokens:
        return request
    return replace(request, stopping=replace(stopping, max_tokens=max_tokens, min_tokens=0))


def _service_seconds(prediction: Prediction, request: GenerationRequest) -> float:
    """What a request needs of its slot: all of it, or its first token with `partial_on_deadline`."""
    return prediction.prefill_seconds + (0.0 if request.partial_on_deadline else prediction.decode_seconds)
