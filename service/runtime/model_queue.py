"""One model's lane: how many places it has, what requests in it will take, and how each request ended.

Every request of a known model is counted here exactly once and has one line of the log, under its finish reason or
its error's label, whether it ran or was refused. Lives on the event loop. Knows
nothing of streams and threads.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from service.engine.step_engine import EngineHandle, StepEngine
from service.engine.types import StepOutput
from service.errors import Overloaded
from service.forecasting.admission import DeadlineAdmission
from service.forecasting.prediction import LatencyPredictor
from service.telemetry.metrics import ModelMetrics, RequestRecord

_LOGGER = logging.getLogger(__name__)

_RECENT_REQUESTS = 64
_UNKNOWN_SERVICE_SECONDS = 1.0
_MIN_RETRY_SECONDS = 0.05
_MAX_RETRY_SECONDS = 60.0
# One bad step may be a bad request's; so many in a row are the model's.
_MAX_FAILURES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneLimits:
    """Who gets a place: as many as the engine has slots, `max_batch_size`, and `max_queue_size` besides.

    `admits_by_deadline` says whether a request that is predicted to miss its deadline gets none, and `time_shares`, by
    model, what each gets of the cores while several have work: 1 where nothing is said.
    """

    max_batch_size: int
    max_queue_size: int
    admits_by_deadline: bool = False
    time_shares: Mapping[str, float] = field(default_factory=dict)


class Lane:
    """The places of one model: `max_batch_size` requests run, fewer if some have several outputs, the others wait.

    Args:
        model: its name.
        limits: who gets a place.
        metrics: where its steps and requests are counted.
        predictor: what foretells its requests.
        engine: what serves it; not kept, as a model that is removed must leave its memory.

    Attributes:
        engine: the handle of the engine that serves it now.
        metrics: the same.
        kv_usage_ratio: share of its K/V memory that requests took after the last step.
        predictor: what foretells its requests now.
        admission: what judges them by their deadlines, None where nothing does.
    """

    def __init__(
        self, model: str, limits: LaneLimits, metrics: ModelMetrics, predictor: LatencyPredictor, engine: StepEngine
    ) -> None:
        self.metrics = metrics
        self.kv_usage_ratio = 0.0
        self._model = model
        self._limits = limits
        self.predict_with(predictor)
        self.serve_by(engine)
        # By tenant, and what each weighs.
        self._taken: Counter[str] = Counter()
        self._weights: dict[str, float] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._service_seconds: deque[float] = deque(maxlen=_RECENT_REQUESTS)

    @property
    def retry_after_seconds(self) -> float:
        """When a place should be free: a batch's worth of requests ends within one mean service time."""
        recent = self._service_seconds
        mean = sum(recent) / len(recent) if recent else _UNKNOWN_SERVICE_SECONDS
        return min(max(mean / self._limits.max_batch_size, _MIN_RETRY_SECONDS), _MAX_RETRY_SECONDS)

    async def wait_idle(self) -> None:
        """Waits until no request has a place."""
        await self._idle.wait()

    @property
    def is_alone(self) -> bool:
        """Whether only one place is taken: the caller's."""
        return self._taken.total() == 1

    def serve_by(self, engine: StepEngine) -> None:
        """Has another engine serve the model: how those before it failed is of no use any more."""
        self.engine = EngineHandle(self._model)
        self._num_failures = 0
        self.metrics.kv_memory(engine.kv_memory_bytes)
        self.metrics.max_draft_tokens(engine.max_draft_tokens)

    def fails_by(self, output: StepOutput) -> bool:
        """Counts steps of `engine` that fail one after the other; whether they are as many as make a model fail.

        A step that computes something ends the row, and so does the answer yes.
        """
        if output.is_failed:
            self._num_failures += 1
        elif output.stats.num_tokens:
            self._num_failures = 0
        if self._num_failures < _MAX_FAILURES:
            return False
        self._num_failures = 0
        return True

    def predict_with(self, predictor: LatencyPredictor) -> None:
        """Has another foretell its requests: what was learned with the one before is of no use any more."""
        self.predictor = predictor
        self.admission = DeadlineAdmission(predictor) if self._limits.admits_by_deadline else None

    def take(self, tenant: str = "", weight: float = 1.0) -> None:
        """Takes a place.

        Raises:
            Overloaded: when there is none.
        """
        self.require_place(tenant, weight)
        self._taken[tenant] += 1
        self._weights[tenant] = weight
        self._idle.clear()

    def require_place(self, tenant: str = "", weight: float = 1.0) -> None:
        """Takes none.

        Where all places are taken, a tenant has its share of them none the less, by weight: so that others cannot keep
        it out. With k tenants there are 1 + 1/2 + … + 1/k times as many requests at most.

        Raises:
            Overloaded: when there is none.
        """
        limit, taken = self._limits.max_batch_size + self._limits.max_queue_size, self._taken.total()
        if taken < limit:
            return
        weights = {**self._weights, tenant: weight}
        share = max(1, math.floor(limit * weight / math.fsum(weights.values())))
        if len(weights) == 1 or self._taken[tenant] >= share:
            raise Overloaded(self._model, taken, limit, self.retry_after_seconds)

    def give_back(self, service_seconds: float | None, tenant: str = "") -> None:
        """Gives a place back; `service_seconds` is how long its request held a slot, None if it never did."""
        self._taken[tenant] -= 1
        if not self._taken[tenant]:
            del self._taken[tenant], self._weights[tenant]
        if not self._taken:
            self._idle.set()
        if service_seconds is not None:
            self._service_seconds.append(service_seconds)

    def refused(self, outcome: str, request_id: str | None) -> None:
        """A request ended before the engine had it; `request_id` is None where it is not known to be fit for a log."""
        self.metrics.request_refused(outcome)
        _LOGGER.info("request %s of %s: %s", request_id or "(no id)", self._model, outcome)

    def ended(self, record: RequestRecord, request_id: str, error_id: str | None) -> None:
        """A request that the engine had is over; `error_id` is where the log has more of it."""
        self.metrics.request_done(record)
        self.tell_cost_model()
        timings = record.timings
        scheduled = timings.finished_time if timings.scheduled_time is None else timings.scheduled_time
        _LOGGER.info(
            "request %s of %s: %s%s, %d prompt and %d generated tokens, %.3f s of which %.3f s queued",
            request_id,
            self._model,
            record.outcome,
            f" {error_id}" if error_id else "",
            record.num_prompt_tokens,
            record.num_generated_tokens,
            timings.finished_time - timings.arrival_time,
            scheduled - timings.arrival_time,
        )

    def tell_cost_model(self) -> None:
        """Shows what is known of the model's step times; often enough if done whenever a request has ended."""
        self.metrics.cost_model(self.predictor.coefficients, self.predictor.relative_error)
