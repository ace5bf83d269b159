"""The bridge between the event loop and the engine thread: admission, streams, abort, the end.

    admit ──> submit ──> inbox ──> engine thread ──> step_done ──> stream ──> the consumer of `events`

A request takes its place with `admit`, before any work is spent on it, and keeps it until the engine has reported its
last event, so that what is counted is what really holds memory. Everything here runs on the event loop, which is why
nothing is locked. Knows nothing of protobuf, gRPC or text.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Self

from service.access import Caller, current_caller
from service.engine.step_engine import EngineHandle, StepEngine
from service.engine.types import FinishReason, GenerationRequest, RequestTimings, StepOutput, StepStats, TokenEvent
from service.errors import EngineFailed, InvalidRequest, NotServing, RequestCancelled, RequestError, report_failure
from service.forecasting.admission import PATIENCE_SECONDS
from service.forecasting.costing import Cost, CostModel
from service.forecasting.deadline_margin import deadline_margin
from service.forecasting.prediction import Estimate, LatencyPredictor
from service.forecasting.sharing import CoreSharing, Rival
from service.runtime.engine_thread import EngineThread, Result
from service.runtime.model_queue import Lane, LaneLimits
from service.runtime.stream import Stream, request_key
from service.telemetry.metrics import Metrics, ModelMetrics, RequestRecord
from service.telemetry.recorder import FlightLog, FlightRecorder
from service.telemetry.tracing import NoTracer, Tracer

# Steps that tell how long the event loop lets an answer wait.
_NUM_HANDED = 64


class Admission:
    """A place in the server: taken before any work is done for a request, kept until the engine is done with it."""

    def __init__(self, engine: AsyncEngine, stream: Stream) -> None:
        self._engine = engine
        self._stream = stream

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._engine._leave(self._stream, error)

    def submit(self, request: GenerationRequest, *, is_streamed: bool = True) -> None:
        """Hands the request to the engine, once; leaving the `with` block aborts it if it is not over by then.

        Args:
            request: with the model and id of this place.
            is_streamed: whether its events are wanted as they come; if not, they come when many wait, and at its end.

        Raises:
            DeadlineUnreachable: when it could not be answered before its deadline.
            RequestError: when the engine has ended since the place was taken.
        """
        self._stream.is_streamed = is_streamed
        self._engine._submit(self._stream, request)

    @property
    def cost(self) -> Cost | None:
        """What the request has cost, once it is over; None if it had no first token."""
        return self._stream.cost

    async def events(self) -> AsyncGenerator[tuple[TokenEvent, ...], None]:
        """Yields whatever events wait, one or more at a time; the terminal event is the last.

        A consumer that is behind finds several events in one batch. Those of one output are in order; those of several
        come as the engine reported them.

        Raises:
            RequestError: when the engine refused or failed the request; the events before that were yielded.
        """
        is_over = False
        while not is_over:
            events = await self._stream.take()
            error = events[-1].error
            if error is not None:
                if len(events) > 1:
                    yield events[:-1]
                raise error if isinstance(error, RequestError) else report_failure("a request failed", error)
            yield events
            is_over = events[-1].is_terminal


class AsyncEngine:
    """All served models' engines, for callers on one event loop.

    Args:
        engines: by model name; the engine thread owns them from `start` on.
        metrics: where steps and requests are counted.
        costs: by model name, what counts its requests; what predicts their times is built on it.
        limits: who gets a place, for each model alike.
        failing: called with a model whose steps fail one after the other.
        recorder: remembers steps and requests; by default nothing.
        tracer: is notified of requests; none by default.
        clock: monotonic seconds; deadlines and arrivals of requests are compared with it.
    """

    def __init__(
        self,
        engines: Mapping[str, StepEngine],
        metrics: Metrics,
        costs: Mapping[str, CostModel],
        limits: LaneLimits,
        *,
        failing: Callable[[str], None] = lambda _: None,
        recorder: FlightRecorder | None = None,
        tracer: Tracer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        # Handed to the thread by `start`, and not kept: a model that is removed must leave its memory.
        self._engines = dict(engines)
        self._metrics = metrics
        self._limits = limits
        self._recorder = recorder or FlightRecorder(0)
        self._tracer = tracer or NoTracer()
        self._sharing = CoreSharing(limits.time_shares)
        self._handing_seconds: deque[float] = deque([0.0], maxlen=_NUM_HANDED)
        self._lanes = {name: self._make_lane(name, costs[name], engine) for name, engine in engines.items()}
        self._failing = failing
        self._streams: dict[str, Stream] = {}
        self._refuse: Callable[[], RequestError] | None = partial(NotServing, "the server is starting")
        self._idle = asyncio.Event()
        self._idle.set()
        # Done once the thread has let go of an engine that was replaced or removed.
        self._leaving: set[asyncio.Future[None]] = set()
        self._ended: asyncio.Future[EngineFailed | None] | None = None
        self._fault: EngineFailed | None = None

    @property
    def num_streams(self) -> int:
        """Requests that hold a place."""
        return len(self._streams)

    def start(self) -> None:
        """Starts the engine thread; from now on requests are admitted. Call once, on the event loop."""
        loop = asyncio.get_running_loop()
        self._ended = loop.create_future()
        engines = {self._lanes[name].engine: engine for name, engine in self._engines.items()}
        self._thread = EngineThread(engines, self, loop.call_soon_threadsafe, self._limits.time_shares, self._clock)
        self._engines = {}
        self._thread.start()
        self._refuse = None

    def admit(self, model: str, request_id: str) -> Admission:
        """Takes a place for a request of a served model; give it back by leaving the `with` block.

        The request is the one's whose call the running task serves (`service.access`).

        Raises:
            InvalidRequest: when its caller uses the id already.
            Overloaded: when the model's queue is full.
            NotServing: while starting, draining or stopped.
            EngineFailed: after the engine thread has died.
        """
        trace = self._tracer.request(model)
        caller = current_caller()
        try:
            lane = self._lane_with_place(model, request_id, caller)
            lane.take(caller.tenant, caller.weight)
        except RequestError as error:
            self.refused(model, error, request_id)
            raise
        stream = Stream(request_id, model, lane, trace, caller)
        self._streams[stream.key] = stream
        self._idle.clear()
        return Admission(self, stream)

    @contextmanager
    def place(self, model: str, request_id: str) -> Iterator[None]:
        """Holds a place for the length of the block, for work before the engine's; counts nothing.

        Raises:
            RequestError: as `admit`.
        """
        caller = current_caller()
        lane = self._lane_with_place(model, request_id, caller)
        lane.take(caller.tenant, caller.weight)
        try:
            yield
        finally:
            lane.give_back(None, caller.tenant)

    async def estimate(self, request: GenerationRequest) -> Estimate:
        """What a request would cost and when it would end, were it submitted now.

        The engine is asked which of its tokens are cached, between two steps.

        Raises:
            RequestError: when the engine would refuse it; EngineFailed or NotServing where the thread is over.
        """
        caller = current_caller()
        request = _of(caller, request)
        caller.check(request.priority, *_held(request))
        # Of the engine that is asked, whatever has replaced it when it answers.
        lane = self._lane(request.model)
        predictor = lane.predictor
        self._end()
        question = self._thread.ask(lane.engine, lambda engine: engine.num_cached_tokens(request))
        return predictor.estimate(request, await self._answer(question))

    async def calibrate(self, model: str, max_seconds: float, max_wait_seconds: float) -> int:
        """Learns step times from steps of its own, on the idle engine; how many there were.

        Raises:
            RequestError: as `call` does; NotServing where the engine was replaced or removed meanwhile.
        """
        lane = self._lane(model)
        engine = lane.engine
        steps = await self.call(model, lambda engine: engine.calibrate(max_seconds), max_wait_seconds)
        if self._lanes.get(model) is not lane or lane.engine is not engine:
            raise NotServing(f"the engine of {model} has changed while it was calibrated")
        self._learn(lane, steps)
        return len(steps)

    def refused(self, model: str, error: RequestError, request_id: str | None = None) -> None:
        """Counts a request that was refused before it took a place; `admit` counts its own refusals."""
        if lane := self._lanes.get(model):
            lane.refused(error.label, request_id)

    def install(
        self, model: str, engine: StepEngine, costs: CostModel, steps: Collection[StepStats] = ()
    ) -> asyncio.Future[None]:
        """Serves a model with this engine from now on; another that it had ends what it has begun.

        What is known of its step times begins anew with `steps`, which it was calibrated by; without any it stays, if
        its work is counted as before. The future is done once the other, if there was one, is gone.
        """
        gone = self._gone()
        lane = self._lanes.get(model)
        if lane is None:
            lane = self._lanes[model] = self._make_lane(model, costs, engine)
            _finish_waiting(gone)
        else:
            lane.serve_by(engine)
            if steps or lane.predictor.costs != costs:
                lane.predict_with(self._make_predictor(model, costs))
        if steps:
            self._learn(lane, steps)
        self._thread.install(lane.engine, engine, partial(_finish_waiting, gone))
        return gone

    async def remove(self, model: str, grace_seconds: float) -> asyncio.Future[None]:
        """Takes a model away once its requests are over; what is not over after the grace ends with NotServing.

        New requests must be kept away before. The future is done once its engine is gone.
        """
        lane = self._lanes[model]
        try:
            await asyncio.wait_for(lane.wait_idle(), grace_seconds)
        except TimeoutError:
            now = self._clock()
            for stream in [stream for stream in self._streams.values() if stream.lane is lane]:
                if stream.engine is not None:
                    self._thread.abort(stream.engine, stream.key)
                self._fail(stream, NotServing(f"{model} is not served any more"), now)
        gone = self._gone()
        self._thread.remove(lane.engine, partial(_finish_waiting, gone))
        lane.metrics.close()
        self._recorder.forget(model)
        self._sharing.forget(model)
        del self._lanes[model]
        return gone

    def kv_usage_ratio(self, model: str) -> float:
        """Share of its K/V memory that a model's running and preempted requests took after its last step."""
        lane = self._lanes.get(model)
        return 0.0 if lane is None else lane.kv_usage_ratio

    def metrics_of(self, model: str) -> ModelMetrics | None:
        """Where a served model's state is shown; None where it is not served."""
        lane = self._lanes.get(model)
        return None if lane is None else lane.metrics

    async def call(
        self, model: str, function: Callable[[StepEngine], Result], max_wait_seconds: float | None
    ) -> Result:
        """Runs `function` on a model's engine once that is idle; the model's new requests wait behind it.

        It runs on the engine that serves the model now, or not at all. Cancelling takes the call back, unless
        `function` has begun: then it runs to its end and its result is dropped.

        Raises:
            RequestError: raised by `function`; EngineFailed for anything else it raised; NotServing if it never ran, as
                the model was not idle for `max_wait_seconds` (None waits without limit), its engine was replaced or
                removed, or the engine thread is over.
        """
        self._end()
        call = self._thread.call(self._lane(model).engine, function)
        complaint = f"{model} was not idle for {max_wait_seconds or 0:g} s; try again"
        return await self._answer(call, max_wait_seconds, complaint)

    async def do(self, function: Callable[[], Result]) -> Result:
        """Runs `function` on the engine thread, between two turns, while all models wait.

        Raises:
            Exception: raised by `function`; EngineFailed or NotServing where the thread is over.
        """
        self._end()
        return await self._answer(self._thread.do(function))

    def flight_log(self) -> FlightLog:
        """What the recorder remembers, and the requests that the engines have."""
        streams = self._streams.values()
        return self._recorder.take((each.model, found) for each in streams if (found := each.recorded()))

    def drain(self) -> None:
        """Refuses new requests from now on; those admitted go on."""
        if self._refuse is None:
            self._refuse = partial(NotServing, "the server is draining")

    async def wait_idle(self) -> None:
        """Waits until no request holds a place."""
        await self._idle.wait()

    async def wait_ended(self) -> EngineFailed | None:
        """Waits until the engine thread is over; the error that ended it, None after `stop`."""
        return await asyncio.shield(self._end())

    async def stop(self) -> None:
        """Ends the engine thread before its next step; streams that are still open get NotServing."""
        self.drain()
        self._thread.stop()
        await self.wait_ended()

    def _make_lane(self, model: str, costs: CostModel, engine: StepEngine) -> Lane:
        self._recorder.begin(model)
        return Lane(model, self._limits, self._metrics.for_model(model), self._make_predictor(model, costs), engine)

    def _make_predictor(self, model: str, costs: CostModel) -> LatencyPredictor:
        patience = PATIENCE_SECONDS if self._limits.admits_by_deadline else None
        return LatencyPredictor(costs, self._limits.max_batch_size, patience, partial(self._rivals_of, model))

    def _rivals_of(self, model: str) -> tuple[Rival, ...]:
        """The other models that share the cores with a request of this one that is handed over now."""
        if len(self._lanes) == 1:
            return ()
        work = {name: lane.predictor.work_seconds for name, lane in self._lanes.items() if name != model}
        return self._sharing.rivals_of(model, work, self._clock())

    def _gone(self) -> asyncio.Future[None]:
        """A future for when an engine is gone, which it is at the thread's end at the latest."""
        gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._end().done():
            gone.set_result(None)
            return gone
        self._leaving.add(gone)
        gone.add_done_callback(self._leaving.discard)
        return gone

    def _learn(self, lane: Lane, steps: Collection[StepStats]) -> None:
        lane.predictor.calibrated(steps)
        lane.tell_cost_model()

    def _lane_with_place(self, model: str, request_id: str, caller: Caller) -> Lane:
        """Where a request may take a place now, or raises why it may not."""
        if self._refuse is not None:
            raise self._refuse()
        if request_key(caller, request_id) in self._streams:
            raise InvalidRequest("request_id", request_id, "must not be in use by another request")
        lane = self._lane(model)
        lane.require_place(caller.tenant, caller.weight)
        return lane

    def _lane(self, model: str) -> Lane:
        lane = self._lanes.get(model)
        if lane is None:
            raise NotServing(f"{model} is not served any more")
        return lane

    async def _answer(
        self, call: concurrent.futures.Future[Result], max_wait_seconds: float | None = None, complaint: str = ""
    ) -> Result:
        """What the engine thread answers; a NotServing with this complaint if it has not begun to for so long."""
        result, ended = asyncio.wrap_future(call), self._end()
        either = (result, ended)
        try:
            done, _ = await asyncio.wait(either, timeout=max_wait_seconds, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                if call.cancel():
                    raise NotServing(complaint)
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if result.done():
                return result.result()
            raise ended.result() or NotServing("the server has stopped")
        finally:
            # Waiting for a future does not cancel it, and what is not cancelled runs.
            result.cancel()

    def step_done(self, engine: EngineHandle, output: StepOutput, now: float) -> None:
        """Hands a step's events to their streams (`Listener`)."""
        with self._faults_are_fatal():
            lane = self._lanes.get(engine.model)
            if lane is None:  # it is on its way out, and so is everybody who asked it
                return
            self._recorder.step_done(engine.model, output, now)
            lane.kv_usage_ratio = output.stats.kv_usage_ratio
            if engine is lane.engine:
                lane.predictor.step_done(output.stats)
            if self._hand_out(lane.metrics, engine, output, now):
                self._handing_seconds.append(self._clock() - now)
            # A replaced engine's failures say nothing of the one that serves, nor does its success.
            if engine is lane.engine and lane.fails_by(output):
                self._failing(engine.model)

    def rejected(self, engine: EngineHandle, request_id: str, error: RequestError, now: float) -> None:
        """Ends the stream of a request that the engine refused (`Listener`)."""
        with self._faults_are_fatal():
            if (stream := self._streams.get(request_id)) is not None and stream.engine is engine:
                self._fail(stream, error, now)

    def ended(self, error: EngineFailed | None) -> None:
        """Ends every stream: the engine thread is over (`Listener`)."""
        error = error or self._fault
        self._refuse_and_fail_all(error)
        self._end().set_result(error)
        for gone in tuple(self._leaving):
            _finish_waiting(gone)
        if error is not None:
            self._recorder.engine_died(error.error_id)

    @contextmanager
    def _faults_are_fatal(self) -> Iterator[None]:
        """A fault of ours between engine and streams is as bad as the engine's death: a missed stream would hang."""
        try:
            yield
        except Exception as cause:
            if self._fault is None:
                self._fault = report_failure("events could not be handed to their streams", cause)
                self._refuse_and_fail_all(self._fault)
                self._thread.stop()

    def _hand_out(self, metrics: ModelMetrics, engine: EngineHandle, output: StepOutput, now: float) -> bool:
        """Gives events to their streams; whether anybody waits for one of them."""
        is_awaited = False
        metrics.step_done(output.stats)
        metrics.tokens_generated(sum(event.token_id is not None for event in output.events))
        for event in output.events:
            stream = self._streams.get(event.request_id)
            if stream is None or stream.engine is not engine:
                continue
            if event.token_id is not None:
                stream.count_token(metrics, event, now)
            elif event.prompt_logprobs and event.is_terminal and stream.request is not None:
                metrics.prompt_done(stream.request.num_prompt_tokens, event.num_cached_tokens)
            if event.finish_reason is not None:
                self._end_output(stream, event.output_index, event.finish_reason, now)
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

    def _end(self) -> asyncio.Future[EngineFailed | None]:
        if self._ended is None:
            raise NotServing("the server is starting")
        return self._ended

    def _submit(self, stream: Stream, request: GenerationRequest) -> None:
        if (request.request_id, request.model) != (stream.request_id, stream.model) or stream.request is not None:
            raise ValueError(f"admission {stream.request_id} does not fit request {request.request_id}")
        if self._streams.get(stream.key) is not stream:
            raise self._refuse() if self._refuse is not None else NotServing("the place was given up")
        shown, request = request, _of(stream.caller, request)
        stream.caller.check(request.priority, *_held(request))
        if request.deadline is not None:
            request = self._judge(stream, request, request.deadline)
        # Whatever of this fails, the engine does not have the request yet, and the place goes back with its block.
        stream.caller.hold(*_held(request))
        stream.held = _held(request)
        stream.predictor, stream.engine = stream.lane.predictor, stream.lane.engine
        self._sharing.begun(stream.model, self._clock())
        stream.quote = stream.predictor.submitted(request)
        stream.trace.submitted(shown)
        stream.request = request
        self._thread.submit(stream.engine, request, is_streamed=stream.is_streamed)

    def _answer_by(self, request: GenerationRequest, deadline: float) -> float:
        """When the last event must leave the engine to reach the client by the deadline."""
        return deadline - deadline_margin(deadline - request.arrival_time) - max(self._handing_seconds)

    def _judge(self, stream: Stream, request: GenerationRequest, deadline: float) -> GenerationRequest:
        """A request with the moments at which it must have begun or ended to be answered before its deadline."""
        answer_by = self._answer_by(request, deadline)
        if request.partial_on_deadline:
            request = replace(request, end_by=answer_by)
        lane = stream.lane
        if lane.admission is not None:
            stream.admission = lane.admission
            request, stream.prediction = lane.admission.judge(request, self._clock(), answer_by, is_idle=lane.is_alone)
        return request

    def _end_output(self, stream: Stream, index: int, reason: FinishReason, now: float) -> None:
        """Notes why an output ended, and for those to come how long it was."""
        stream.reasons[index] = reason
        tokens = stream.tokens.get(index)
        if tokens is not None and stream.request is not None and stream.predictor is not None:
            stream.predictor.output_ended(stream.request, now, tokens.count, reason)

    def _leave(self, stream: Stream, error: BaseException | None) -> None:
        """The consumer is gone. A place in use stays taken until the engine says that the request is over."""
        if stream.request is None or stream.engine is None:
            self._release(stream, None)
            stream.lane.refused(_outcome(error), stream.request_id)
        elif self._streams.get(stream.key) is stream:
            self._thread.abort(stream.engine, stream.key)

    def _fail(self, stream: Stream, error: RequestError, now: float) -> None:
        arrival = stream.request.arrival_time if stream.request else now
        timings = RequestTimings(arrival_time=arrival, scheduled_time=None, first_token_time=None, finished_time=now)
        event = TokenEvent(request_id=stream.request_id, error=error, timings=timings)
        stream.push(event)
        self._finish(stream, event)

    def _finish(self, stream: Stream, event: TokenEvent) -> None:
        """A request got its last event: gives its place back, then counts it by how its last output ended."""
        timings = event.timings
        service_seconds = None
        if timings is not None and timings.scheduled_time is not None:
            service_seconds = timings.finished_time - timings.scheduled_time
        self._release(stream, service_seconds)
        # A request that was never handed to the engine is counted by `_leave`.
        if timings is None or stream.request is None:
            return
        stream.cost = self._settle(stream, event)
        if stream.admission is not None and stream.prediction is not None and event.error is None:
            stream.admission.ended(stream.prediction, timings, stream.reasons.values())
        record = RequestRecord(
            outcome=str(stream.last_reason) if event.error is None else _outcome(event.error),
            timings=timings,
            num_prompt_tokens=stream.request.num_prompt_tokens,
            num_generated_tokens=stream.num_tokens,
            num_longest_tokens=stream.num_longest_tokens,
            seconds_per_token=stream.seconds_per_token,
        )
        error_id = event.error.error_id if isinstance(event.error, EngineFailed) else None
        stream.lane.ended(record, stream.request_id, error_id)
        self._recorder.request_ended(stream.model, stream.request_id, record, event.num_cached_tokens)
        reasons = [reason for _, reason in sorted(stream.reasons.items())]
        stream.trace.ended(record, event.num_cached_tokens, reasons)

    def _settle(self, stream: Stream, event: TokenEvent) -> Cost | None:
        """What a request that is over has cost, if that can be counted."""
        if stream.request is None or stream.predictor is None or stream.quote is None:
            return None
        num_tokens = {index: tokens.count for index, tokens in stream.tokens.items()}
        try:
            return stream.predictor.settle(stream.quote, stream.request, num_tokens, event)
        except Exception as cause:  # accounting must not end requests that run
            report_failure(f"what request {stream.request_id} cost could not be counted", cause)
            return None

    def _release(self, stream: Stream, service_seconds: float | None) -> None:
        if self._streams.get(stream.key) is not stream:
            return
        del self._streams[stream.key]
        stream.lane.give_back(service_seconds, stream.caller.tenant)
        if stream.held is not None:
            stream.caller.release(*stream.held)
        if stream.predictor is not None:
            stream.predictor.ended(stream.key)
            self._sharing.ended(stream.model, self._clock())
        if not self._streams:
            self._idle.set()


def _of(caller: Caller, request: GenerationRequest) -> GenerationRequest:
    """A request as the engine is to have it: the caller's, under an id that no other caller can use."""
    key = request_key(caller, request.request_id)
    priority = request.priority or caller.default_priority
    return replace(request, request_id=key, tenant=caller.tenant, weight=caller.weight, priority=priority)


def _held(request: GenerationRequest) -> tuple[int, int]:
    """Sequences and tokens that a request holds at most."""
    return request.num_rows, request.num_rows * (request.num_prompt_tokens + request.stopping.max_tokens)


def _finish_waiting(gone: asyncio.Future[None]) -> None:
    if not gone.done():
        gone.set_result(None)


def _outcome(error: BaseException | None) -> str:
    """The label of a request that ended so; a caller that left without an error, or was cancelled, cancelled it."""
    if isinstance(error, RequestError):
        return error.label
    return EngineFailed.label if isinstance(error, Exception) else RequestCancelled.label
