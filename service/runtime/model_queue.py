"""One model as the event loop runs it: its places, its predictor, its engine's identity, its metrics and its recorder.

Every request of the model is counted and logged here exactly once, by its finish reason or its error's label, whether
it ran or was refused. Event loop only. Knows nothing of streams and threads.
"""

from __future__ import annotations

import asyncio
import logging
import math
import weakref
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

from service.engine.interfaces import EngineHandle, StepEngine
from service.engine.types import StepOutput, StepStats
from service.errors import Overloaded
from service.forecasting.admission import PATIENCE_SECONDS, DeadlineAdmission
from service.forecasting.costing import CostModel
from service.forecasting.prediction import LatencyPredictor
from service.forecasting.sharing import CoreUse, Rival
from service.telemetry.metrics import ModelMetrics, RequestRecord
from service.telemetry.recorder import ModelRecorder

_LOGGER = logging.getLogger(__name__)

_RECENT_REQUESTS = 64
_UNKNOWN_SERVICE_SECONDS = 1.0
_MIN_RETRY_SECONDS = 0.05
_MAX_RETRY_SECONDS = 60.0
# One failed step may be a request's fault; so many in a row are the model's.
_MAX_FAILURES = 3
# Running and waiting requests, and the bytes of K/V that they hold.
_Load = tuple[int, int, float]
_IDLE: _Load = (0, 0, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLimits:
    """A model's places: `max_batch_size`, as many as its engine has slots, and `max_queue_size` besides.

    With `admits_by_deadline`, requests that are predicted to miss their deadline are refused. `time_shares` are weights
    of models that share the cores, 1 for a model that is not named.
    """

    max_batch_size: int
    max_queue_size: int
    admits_by_deadline: bool = False
    time_shares: Mapping[str, float] = field(default_factory=dict)


class ModelQueue:
    """One model's places and what its requests need.

    Args:
        engine: not kept, so that a removed model leaves its memory.
        rivals: returns the other models that share the cores now.

    Attributes:
        engine: the identity of the engine that serves the model now.
        predictor: predicts how long requests take.
        admission: refuses requests by their deadlines; None if that is off.
        use: of the cores.
    """

    def __init__(
        self,
        model: str,
        limits: QueueLimits,
        metrics: ModelMetrics,
        recorder: ModelRecorder,
        engine: StepEngine,
        costs: CostModel,
        rivals: Callable[[ModelQueue], tuple[Rival, ...]],
    ) -> None:
        self.model = model
        self.metrics = metrics
        self.recorder = recorder
        self.use = CoreUse(limits.time_shares.get(model, 1.0))
        self._limits = limits
        self._rivals = rivals
        # By engine: the one that serves the model, and replaced ones until they are released.
        self._loads: dict[EngineHandle, _Load] = {}
        self._kv_bytes: dict[EngineHandle, int] = {}
        self._predict_by(costs)
        self.serve_by(engine, costs)
        self._taken: Counter[str] = Counter()
        self._weights: dict[str, float] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._service_seconds: deque[float] = deque(maxlen=_RECENT_REQUESTS)

    def serve_by(self, engine: StepEngine, costs: CostModel, steps: Collection[StepStats] = ()) -> None:
        """Has another engine serve the model; `steps` are of its calibration.

        What the predictor knows is kept if there are no such steps and requests cost what they did.
        """
        self.engine = EngineHandle(self.model)
        self._loads[self.engine] = _IDLE
        self._kv_bytes[self.engine] = engine.kv_memory_bytes
        self._num_failures = 0
        self.metrics.kv_memory(engine.kv_memory_bytes)
        self.metrics.max_draft_tokens(engine.max_draft_tokens)
        if steps or self.predictor.costs != costs:
            self._predict_by(costs)
        if steps:
            self.learn(steps)

    def release(self, engine: EngineHandle) -> None:
        """A replaced engine has ended what it had."""
        self._loads.pop(engine, None)
        self._kv_bytes.pop(engine, None)

    def owns(self, engine: EngineHandle) -> bool:
        """Whether an engine serves the model, or was replaced and still has requests of it."""
        return engine in self._loads

    def learn(self, steps: Collection[StepStats]) -> None:
        """Takes in a calibration of the engine that serves."""
        self.predictor.calibrated(steps)
        self._show_cost_model()

    def step_done(self, engine: EngineHandle, output: StepOutput, now: float) -> None:
        """Counts and records a step of one of the model's engines; the predictor learns from the one that serves."""
        stats = output.stats
        self.recorder.step_done(output, now)
        self._loads[engine] = (stats.num_running, stats.num_waiting, stats.kv_usage_ratio * self._kv_bytes[engine])
        if engine is self.engine:
            self.predictor.step_done(stats)
        if len(self._loads) > 1:
            running, waiting, _ = zip(*self._loads.values(), strict=True)
            stats = replace(
                stats, num_running=sum(running), num_waiting=sum(waiting), kv_usage_ratio=self.kv_usage_ratio
            )
        self.metrics.step_done(stats)
        self.metrics.tokens_generated(sum(event.token_id is not None for event in output.events))

    def is_failing_by(self, engine: EngineHandle, output: StepOutput) -> bool:
        """Counts failed steps in a row; True once there are enough to fail the model, then the count begins anew.

        Steps of replaced engines do not count, neither as failures nor as successes.
        """
        if engine is not self.engine:
            return False
        if output.is_failed:
            self._num_failures += 1
        elif output.stats.num_tokens:
            self._num_failures = 0
        if self._num_failures < _MAX_FAILURES:
            return False
        self._num_failures = 0
        return True

    @property
    def kv_usage_ratio(self) -> float:
        """Share of the model's K/V memory that running and preempted requests held after the last steps."""
        part = self._kv_bytes[self.engine]
        return min(1.0, sum(held for _, _, held in self._loads.values()) / part) if part else 0.0

    @property
    def retry_after_seconds(self) -> float:
        """When a place should be free: a batch of requests ends within one mean service time."""
        recent = self._service_seconds
        mean = sum(recent) / len(recent) if recent else _UNKNOWN_SERVICE_SECONDS
        return min(max(mean / self._limits.max_batch_size, _MIN_RETRY_SECONDS), _MAX_RETRY_SECONDS)

    @property
    def is_alone(self) -> bool:
        """Whether only one place is taken: the caller's."""
        return self._taken.total() == 1

    async def wait_idle(self) -> None:
        """Waits until no place is taken."""
        await self._idle.wait()

    def require_place(self, tenant: str = "", weight: float = 1.0) -> None:
        """Checks for a free place without taking it.

        If all places are taken, a tenant still gets its share of them by weight, so that others cannot keep it out.
        With k tenants there are at most 1 + 1/2 + … + 1/k times as many requests.

        Raises:
            Overloaded: when there is none.
        """
        limit, taken = self._limits.max_batch_size + self._limits.max_queue_size, self._taken.total()
        if taken < limit:
            return
        weights = {**self._weights, tenant: weight}
        share = max(1, math.floor(limit * weight / math.fsum(weights.values())))
        if len(weights) == 1 or self._taken[tenant] >= share:
            raise Overloaded(self.model, taken, limit, self.retry_after_seconds)

    def take(self, tenant: str = "", weight: float = 1.0) -> None:
        """Takes a place.

        Raises:
            Overloaded: when there is none.
        """
        self.require_place(tenant, weight)
        self._taken[tenant] += 1
        self._weights[tenant] = weight
        self._idle.clear()
        self.metrics.requests_admitted(self._taken.total())

    def give_back(self, service_seconds: float | None, tenant: str = "") -> None:
        """Gives a place back; `service_seconds` is how long its request held a slot, None if it never did."""
        self._taken[tenant] -= 1
        if not self._taken[tenant]:
            del self._taken[tenant], self._weights[tenant]
        if not self._taken:
            self._idle.set()
        self.metrics.requests_admitted(self._taken.total())
        if service_seconds is not None:
            self._service_seconds.append(service_seconds)

    def refused(self, outcome: str, request_id: str | None) -> None:
        """Counts a request that ended before the engine had it; `request_id` is None if it is not fit for a log."""
        self.metrics.request_refused(outcome)
        _LOGGER.info("request %s of %s: %s", request_id or "(no id)", self.model, outcome)

    def ended(self, record: RequestRecord, request_id: str, num_cached_tokens: int, error_id: str | None) -> None:
        """Counts a request of the engine that is over; `error_id` leads to more in the log."""
        self.metrics.request_done(record)
        self._show_cost_model()
        timings = record.timings
        scheduled = timings.finished_time if timings.scheduled_time is None else timings.scheduled_time
        _LOGGER.info(
            "request %s of %s: %s%s, %d prompt and %d generated tokens, %.3f s of which %.3f s queued",
            request_id,
            self.model,
            record.outcome,
            f" {error_id}" if error_id else "",
            record.num_prompt_tokens,
            record.num_generated_tokens,
            timings.finished_time - timings.arrival_time,
            scheduled - timings.arrival_time,
        )
        self.recorder.request_ended(request_id, record, num_cached_tokens)

    def as_rival(self, of: ModelQueue, now: float) -> Rival | None:
        """This model as a request of another model meets it now; None if it was idle for long."""
        return self.use.as_rival(of.use.weight, self.predictor.work_seconds, now)

    def _predict_by(self, costs: CostModel) -> None:
        # Without a reference of its own to the queue: a removed model's memory must not wait for garbage collection.
        rivals, own = self._rivals, weakref.ref(self)
        patience = PATIENCE_SECONDS if self._limits.admits_by_deadline else None
        self.predictor = LatencyPredictor(
            costs, self._limits.max_batch_size, patience, lambda: () if (queue := own()) is None else rivals(queue)
        )
        self.admission = DeadlineAdmission(self.predictor) if self._limits.admits_by_deadline else None

    def _show_cost_model(self) -> None:
        """Writes what is known of step times to the metrics; whenever a request has ended is often enough."""
        self.metrics.cost_model(self.predictor.coefficients, self.predictor.relative_error)
