"""Requests on the engines: admission, streams of events, abort, and the end by failure.

    admit ──> submit ──> inbox ──> engine thread ──> step_done ──> stream ──> the consumer of `events`

A request takes its place with `admit`, before any work is spent on it, and keeps it until the engine has reported its
last event, so that places count what really holds memory. Everything here runs on the event loop, without locks. Knows
nothing of protobuf, gRPC or text.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Protocol

from service.access import Caller, current_caller
from service.engine.interfaces import EngineHandle, StepEngine
from service.engine.types import GenerationRequest, RequestTimings, StepOutput, StepStats, TokenEvent
from service.errors import EngineFailed, InvalidRequest, NotServing, RequestCancelled, RequestError, report_failure
from service.forecasting.costing import CostModel
from service.forecasting.deadline_margin import deadline_margin
from service.forecasting.prediction import Estimate
from service.forecasting.sharing import Rival
from service.runtime.engine_thread import EngineThread
from service.runtime.model_queue import ModelQueue, QueueLimits
from service.runtime.stream import Place, Stream, held_by, owned_request, request_key
from service.runtime.thread_client import ThreadClient, finish
from service.telemetry.metrics import Metrics
from service.telemetry.recorder import FlightLog, ModelRecorder, RecordedRequest, flight_log
from service.telemetry.tracing import NoTracer, Tracer

# Steps from which the delay between engine and stream is taken.
_NUM_DELAYS = 64


class Entry(Protocol):
    """A served model as it is seen here; `service.repository.entry.ModelEntry` is one."""

    @property
    def queue(self) -> ModelQueue:
        """Its places."""
        ...


class AsyncEngine(ThreadClient):
    """The engines of all served models, for callers on one event loop.

    Args:
        entries: the table of served models by name; its owner inserts and removes.
        metrics: of steps and requests.
        limits: of each model's places.
        failing: called with a model whose steps fail one after the other.
        num_recorded: steps and requests that each model's recorder keeps.
        tracer: is notified of requests.
        clock: monotonic seconds; deadlines and arrivals of requests are compared with it.
    """

    def __init__(
        self,
        entries: Mapping[str, Entry],
        metrics: Metrics,
        limits: QueueLimits,
        *,
        failing: Callable[[str], None] = lambda _: None,
        num_recorded: int = 0,
        tracer: Tracer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self._entries = entries
        self._clock = clock
        self._metrics = metrics
        self._limits = limits
        self._failing = failing
        self._num_recorded = num_recorded
        self._tracer = tracer or NoTracer()
        # Handed to the thread by `start`, and not kept: a removed model must leave its memory.
        self._not_started: dict[EngineHandle, StepEngine] = {}
        self._delays: deque[float] = deque([0.0], maxlen=_NUM_DELAYS)
        self._streams: dict[str, Stream] = {}
        self._refuse: Callable[[], RequestError] | None = partial(NotServing, "the server is starting")
        self._idle = asyncio.Event()
        self._idle.set()
        self._fault: EngineFailed | None = None

    @property
    def num_streams(self) -> int:
        """Requests that hold a place."""
        return len(self._streams)

    def start(self) -> None:
        """Starts the engine thread; from now on requests are admitted. Call once, on the event loop."""
        loop = asyncio.get_running_loop()
        self._ended = loop.create_future()
        self._thread = EngineThread(
            self._not_started, self, loop.call_soon_threadsafe, self._limits.time_shares, self._clock
        )
        self._not_started = {}
        self._thread.start()
        self._refuse = None

    # Models.

    def open(self, model: str, engine: StepEngine, costs: CostModel, steps: Collection[StepStats] = ()) -> ModelQueue:
        """Makes the queue of a model, for its entry; `engine` serves it from now on and was calibrated by `steps`."""
        recorder = ModelRecorder(model, self._num_recorded)
        queue = ModelQueue(
            model, self._limits, self._metrics.for_model(model), recorder, engine, costs, self._rivals_of
        )
        if steps:
            queue.learn(steps)
        if self._thread is None:
            self._not_started[queue.engine] = engine
        else:
            self._thread.install(queue.engine, engine, lambda: None)
        return queue

    def replace(
        self, queue: ModelQueue, engine: StepEngine, costs: CostModel, steps: Collection[StepStats] = ()
    ) -> asyncio.Future[None]:
        """Serves a model by another engine; the former one ends what it has begun, and then the future is done."""
        former, released = queue.engine, self._release()
        queue.serve_by(engine, costs, steps)
        released.add_done_callback(lambda _: queue.release(former))
        self._running.install(queue.engine, engine, partial(finish, released))
        return released

    async def remove(self, queue: ModelQueue, grace_seconds: float) -> asyncio.Future[None]:
        """Takes a model's engine away once its requests are over; what outlives the grace ends with NotServing.

        Keep new requests away before. The future is done once the engine is released.
        """
        try:
            await asyncio.wait_for(queue.wait_idle(), grace_seconds)
        except TimeoutError:
            now = self._clock()
            for stream in [stream for stream in self._streams.values() if stream.queue is queue]:
                if stream.engine is not None:
                    self._running.abort(stream.engine, stream.key)
                self._fail(stream, NotServing(f"{queue.model} is not served any more"), now)
        released = self._release()
        self._running.remove(queue.engine, partial(finish, released))
        queue.metrics.close()
        return released

    async def calibrate(self, queue: ModelQueue, max_seconds: float, max_wait_seconds: float) -> int:
        """Learns step times from steps of its own, on the idle engine; returns how many.

        Raises:
            RequestError: as `call` does; NotServing if the engine was replaced or removed meanwhile.
        """
        engine = queue.engine
        steps = await self.call(engine, lambda idle: idle.calibrate(max_seconds), max_wait_seconds)
        if engine is not queue.engine or self._queue(queue.model) is not queue:
            raise NotServing(f"the engine of {queue.model} has changed while it was calibrated")
        queue.learn(steps)
        return len(steps)

    # Requests.

    def admit(self, model: str, request_id: str) -> Place:
        """Takes a place for a request; leave the `with` block to give it back.

        The caller is the one whose call the running task serves (`service.access`).

        Raises:
            InvalidRequest: when its caller uses the id already.
            Overloaded: when the model's queue is full.
            NotServing: while starting, draining or stopped.
            EngineFailed: after the engine thread has died.
        """
        trace = self._tracer.request(model)
        caller = current_caller()
        try:
            queue = self._queue_with_place(model, request_id, caller)
            queue.take(caller.tenant, caller.weight)
        except RequestError as error:
            self.refused(model, error, request_id)
            raise
        stream = Stream(request_id, queue, trace, caller)
        self._streams[stream.key] = stream
        self._idle.clear()
        return Place(stream, partial(self._submit, stream), partial(self._leave, stream))

    @contextmanager
    def place(self, model: str, request_id: str) -> Iterator[None]:
        """Holds a place for the length of the block, for work before the engine's; counts nothing.

        Raises:
            RequestError: as `admit`.
        """
        caller = current_caller()
        queue = self._queue_with_place(model, request_id, caller)
        queue.take(caller.tenant, caller.weight)
        try:
            yield
        finally:
            queue.give_back(None, caller.tenant)

    async def estimate(self, request: GenerationRequest) -> Estimate:
        """What a request would cost and when it would end, were it submitted now.

        The engine is asked between two steps how many of its tokens are cached.

        Raises:
            RequestError: when the engine would refuse it; EngineFailed or NotServing if the thread is over.
        """
        caller = current_caller()
        request = owned_request(caller, request)
        caller.check(request.priority, *held_by(request))
        queue = self._queue(request.model)
        # The predictor of the engine that is asked, even if that is replaced before it answers.
        predictor = queue.predictor
        question = self._running.ask(queue.engine, lambda engine: engine.num_cached_tokens(request))
        return predictor.estimate(request, await self._answer(question))

    def refused(self, model: str, error: RequestError, request_id: str | None = None) -> None:
        """Counts a request that was refused before it took a place; `admit` counts its own refusals."""
        if entry := self._entries.get(model):
            entry.queue.refused(error.label, request_id)

    def flight_log(self) -> FlightLog:
        """What the recorders keep, and the requests that the engines have."""
        open_requests: defaultdict[ModelQueue, list[RecordedRequest]] = defaultdict(list)
        for stream in self._streams.values():
            if found := stream.recorded():
                open_requests[stream.queue].append(found)
        queues = [entry.queue for entry in self._entries.values()]
        return flight_log({queue.model: queue.recorder.taken(open_requests[queue]) for queue in queues})

    def drain(self) -> None:
        """Refuses new requests from now on; those admitted go on."""
        if self._refuse is None:
            self._refuse = partial(NotServing, "the server is draining")

    async def wait_idle(self) -> None:
        """Waits until no request holds a place."""
        await self._idle.wait()

    async def stop(self) -> None:
        """Ends the engine thread before its next step; streams that are still open get NotServing."""
        self.drain()
        self._running.stop()
        await self.wait_ended()

    # What the engine thread reports (`Listener`).

    def step_done(self, engine: EngineHandle, output: StepOutput, now: float) -> None:
        """Hands a step's events to their streams. Steps of an engine that was removed are dropped."""
        with self._faults_are_fatal():
            entry = self._entries.get(engine.model)
            if entry is None or not (queue := entry.queue).owns(engine):
                return
            queue.step_done(engine, output, now)
            if self._hand_out(engine, output, now):
                self._delays.append(self._clock() - now)
            if queue.is_failing_by(engine, output):
                self._failing(engine.model)

    def rejected(self, engine: EngineHandle, request_id: str, error: RequestError, now: float) -> None:
        """Ends the stream of a request that the engine refused."""
        with self._faults_are_fatal():
            if (stream := self._streams.get(request_id)) is not None and stream.engine is engine:
                self._fail(stream, error, now)

    def ended(self, error: EngineFailed | None) -> None:
        """Ends every stream: the engine thread is over."""
        error = error or self._fault
        self._refuse_and_fail_all(error)
        self._thread_ended(error)
        if error is not None:
            for entry in self._entries.values():
                entry.queue.recorder.log(error.error_id)

    @contextmanager
    def _faults_are_fatal(self) -> Iterator[None]:
        """Ends the engine thread on an error between engine and streams: a stream that missed an event would hang."""
        try:
            yield
        except Exception as cause:
            if self._fault is None:
                self._fault = report_failure("events could not be handed to their streams", cause)
                self._refuse_and_fail_all(self._fault)
                self._running.stop()

    def _hand_out(self, engine: EngineHandle, output: StepOutput, now: float) -> bool:
        """Gives events to their streams; whether a consumer waits for one of them."""
        is_awaited = False
        for event in output.events:
            stream = self._streams.get(event.request_id)
            if stream is None or stream.engine is not engine:
                continue
            if event.token_id is not None:
                stream.count_token(event, now)
            elif event.prompt_logprobs and event.is_terminal and stream.request is not None:
                stream.queue.metrics.prompt_done(stream.request.num_prompt_tokens, event.num_cached_tokens)
            if event.finish_reason is not None:
                stream.output_ended(event.output_index, event.finish_reason, now)
            is_awaited = is_awaited or stream.is_streamed or event.is_terminal
            stream.push(event)
            if event.is_terminal:
                self._finish(stream, event)
        return is_awaited

    def _refuse_and_fail_all(self, error: EngineFailed | None) -> None:
        stopped = partial(NotServing, "the server has stopped")
        self._refuse = stopped if error is None else partial(EngineFailed, error.error_id)
        now = self._clock()
        for stream in list(self._streams.values()):
            try:
                self._fail(stream, self._refuse(), now)
            except Exception as cause:  # the stream was notified before anything could fail
                report_failure(f"the end of request {stream.request_id} could not be counted", cause)

    def _rivals_of(self, queue: ModelQueue) -> tuple[Rival, ...]:
        """The other models that share the cores with a request that is handed over now."""
        if len(self._entries) == 1:
            return ()
        now = self._clock()
        others = [entry.queue for entry in self._entries.values() if entry.queue is not queue]
        return tuple(rival for other in others if (rival := other.as_rival(queue, now)) is not None)

    def _queue_with_place(self, model: str, request_id: str, caller: Caller) -> ModelQueue:
        """The queue in which a request may take a place now; raises why it may not."""
        if self._refuse is not None:
            raise self._refuse()
        if request_key(caller, request_id) in self._streams:
            raise InvalidRequest("request_id", request_id, "must not be in use by another request")
        queue = self._queue(model)
        queue.require_place(caller.tenant, caller.weight)
        return queue

    def _queue(self, model: str) -> ModelQueue:
        entry = self._entries.get(model)
        if entry is None:
            raise NotServing(f"{model} is not served any more")
        return entry.queue

    def _submit(self, stream: Stream, request: GenerationRequest) -> None:
        queue = stream.queue
        if (request.request_id, request.model) != (stream.request_id, queue.model) or stream.request is not None:
            raise ValueError(f"place {stream.request_id} does not fit request {request.request_id}")
        if self._streams.get(stream.key) is not stream:
            raise self._refuse() if self._refuse is not None else NotServing("the place was given up")
        traced, request = request, owned_request(stream.caller, request)
        held = held_by(request)
        stream.caller.check(request.priority, *held)
        if request.deadline is not None:
            request = self._judge(stream, request, request.deadline)
        # Until the last line the engine does not have the request: if one fails, the place is given back as unused.
        stream.caller.hold(*held)
        stream.held = held
        stream.predictor, stream.engine = queue.predictor, queue.engine
        queue.use.begun(self._clock())
        stream.quote = stream.predictor.submitted(request)
        stream.trace.submitted(traced)
        stream.request = request
        self._running.submit(stream.engine, request, is_streamed=stream.is_streamed)

    def _judge(self, stream: Stream, request: GenerationRequest, deadline: float) -> GenerationRequest:
        """The request with the moments by which it must have begun or ended to reach the client by its deadline."""
        queue = stream.queue
        answer_by = deadline - deadline_margin(deadline - request.arrival_time) - max(self._delays)
        if request.partial_on_deadline:
            request = replace(request, end_by=answer_by)
        if queue.admission is not None:
            stream.admission = queue.admission
            request, stream.predicted = queue.admission.judge(request, self._clock(), answer_by, is_idle=queue.is_alone)
        return request

    def _leave(self, stream: Stream, error: BaseException | None) -> None:
        """The consumer is gone. A request that the engine has keeps its place until the engine has ended it."""
        if stream.request is None or stream.engine is None:
            self._free(stream, None)
            stream.queue.refused(_outcome(error), stream.request_id)
        elif self._streams.get(stream.key) is stream:
            self._running.abort(stream.engine, stream.key)

    def _fail(self, stream: Stream, error: RequestError, now: float) -> None:
        arrival = stream.request.arrival_time if stream.request else now
        timings = RequestTimings(arrival_time=arrival, scheduled_time=None, first_token_time=None, finished_time=now)
        event = TokenEvent(request_id=stream.request_id, error=error, timings=timings)
        stream.push(event)
        self._finish(stream, event)

    def _finish(self, stream: Stream, event: TokenEvent) -> None:
        """Gives back the place of a request that got its last event, and counts the request."""
        timings, service_seconds = event.timings, None
        if timings is not None and timings.scheduled_time is not None:
            service_seconds = timings.finished_time - timings.scheduled_time
        self._free(stream, service_seconds)
        record = stream.ended(event, str(stream.last_reason) if event.error is None else _outcome(event.error))
        if record is None:  # never handed to the engine: `_leave` counts it
            return
        stream.settle(event)
        if stream.admission is not None and stream.predicted is not None and event.error is None:
            stream.admission.ended(stream.predicted, record.timings, stream.reasons.values())
        error_id = event.error.error_id if isinstance(event.error, EngineFailed) else None
        stream.queue.ended(record, stream.request_id, event.num_cached_tokens, error_id)
        reasons = [reason for _, reason in sorted(stream.reasons.items())]
        stream.trace.ended(record, event.num_cached_tokens, reasons)

    def _free(self, stream: Stream, service_seconds: float | None) -> None:
        if self._streams.get(stream.key) is not stream:
            return
        del self._streams[stream.key]
        stream.queue.give_back(service_seconds, stream.caller.tenant)
        if stream.held is not None:
            stream.caller.release(*stream.held)
        if stream.predictor is not None:
            stream.predictor.ended(stream.key)
            stream.queue.use.ended(self._clock())
        if not self._streams:
            self._idle.set()


def _outcome(error: BaseException | None) -> str:
    """The label of a request that ended so; without an error, or with a cancellation, its caller cancelled it."""
    if isinstance(error, RequestError):
        return error.label
    return EngineFailed.label if isinstance(error, Exception) else RequestCancelled.label
