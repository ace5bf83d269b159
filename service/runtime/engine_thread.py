"""The one thread that steps every model's engine, and the inbox through which it is told what to do.

The inbox and the outbox are the only structures that both threads touch. What the engines answer goes back through
`post`, which runs a callback on the event loop: once for each step, and less often while the loop is behind or nobody
waits for what a step has to tell. Knows nothing of streams, admission or gRPC.
"""

from __future__ import annotations

import concurrent.futures
import logging
import queue
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from service.engine.step_engine import EngineHandle, StepEngine
from service.engine.types import GenerationRequest, StepOutput
from service.errors import EngineFailed, NotServing, RequestError, report_failure
from service.runtime.turns import Turns

_LOGGER = logging.getLogger(__name__)

# How old short steps that nobody waits for become, at least, before they are told together, unless something else is to
# be told: all of them then go with it. The event loop and the graphs share the
# cores: what it does for a step of three milliseconds would cost a tenth of it.
_GATHER_SECONDS = 0.01
# What is done of the inbox between two turns: other work waits for no more of it, however much one caller sends.
_MAX_COMMANDS = 32
_MAX_LOOK_UPS = 8

Result = TypeVar("Result")


class Listener(Protocol):
    """Receives what the engines report. All methods run on the event loop."""

    def step_done(self, engine: EngineHandle, output: StepOutput, now: float) -> None:
        """An engine took a step, which ended at `now` (`time.monotonic()` seconds)."""

    def rejected(self, engine: EngineHandle, request_id: str, error: RequestError, now: float) -> None:
        """An engine refused a request; no event of it will follow."""

    def ended(self, error: EngineFailed | None) -> None:
        """The thread is over: by `stop` (None) or by an error. Nothing follows."""


@dataclass(frozen=True, slots=True)
class _Submit:
    engine: EngineHandle
    request: GenerationRequest
    is_streamed: bool


@dataclass(frozen=True, slots=True)
class _Abort:
    engine: EngineHandle
    request_id: str


@dataclass(frozen=True, slots=True)
class _Call:
    engine: EngineHandle
    function: Callable[[StepEngine], Any]
    future: concurrent.futures.Future[Any]
    needs_idle: bool


@dataclass(frozen=True, slots=True)
class _Install:
    handle: EngineHandle
    engine: StepEngine
    gone: Callable[[], object]


@dataclass(frozen=True, slots=True)
class _Remove:
    engine: EngineHandle
    gone: Callable[[], object]


@dataclass(frozen=True, slots=True)
class _ThreadTask:
    function: Callable[[], Any]
    future: concurrent.futures.Future[Any]


@dataclass(frozen=True, slots=True)
class _Stop:
    pass


_Command = _Submit | _Abort | _Call | _Install | _Remove | _ThreadTask | _Stop


class _Outbox:
    """What the event loop is to be told, in order; it is woken once for all that waits.

    Waking it for each would fill the pipe through which a loop is woken, should it be held up for some hundred steps:
    signals that come through the same pipe would be lost.
    """

    def __init__(self, post: Callable[..., object]) -> None:
        self._post = post
        self._calls: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._is_awaited = False
        # When the first of those was left that wait for others.
        self._left_since: float | None = None

    def send(self, callback: Callable[..., object], *arguments: Any) -> None:
        """Has `callback` run on the event loop, after all that was sent before. On the engine thread."""
        self._calls.append((callback, arguments))
        self._wake()

    def leave(self, now: float, callback: Callable[..., object], *arguments: Any) -> None:
        """The same, for what can wait a while for others: `now` is in seconds. On the engine thread.

        It goes with the next that is sent, or left once the first that waits is `_GATHER_SECONDS` old.
        """
        self._calls.append((callback, arguments))
        if self._left_since is None:
            self._left_since = now
        elif now - self._left_since >= _GATHER_SECONDS:
            self._wake()

    def flush(self) -> None:
        """Sends what was left. On the engine thread."""
        if self._left_since is not None:
            self._wake()

    def _wake(self) -> None:
        self._left_since = None
        if not self._is_awaited:
            self._is_awaited = True
            self._post(self._deliver)

    def _deliver(self) -> None:
        # First, so that whatever is sent from now on wakes the loop again. It is left to that turn of the loop: a fast
        # engine must not keep this one from its other work.
        self._is_awaited = False
        num_left = len(self._calls)
        try:
            while num_left:
                num_left -= 1
                callback, arguments = self._calls.popleft()
                callback(*arguments)
        finally:
            if num_left:  # one was at fault, the others have a right to be told
                self._post(self._deliver)


class _Leaver:
    """An engine on its way out: it ends what it has begun, and `gone` is then called on the event loop.

    `kept_bytes` is what its K/V may be. What it gives up is free only when a step has gone by, which frees it.
    """

    def __init__(self, handle: EngineHandle, engine: StepEngine, gone: Callable[[], object], kept_bytes: int) -> None:
        self.handle = handle
        self.engine = engine
        self.gone = gone
        self.kept_bytes = self._limit = kept_bytes

    def step(self) -> StepOutput:
        output = self.engine.step()
        if not output.is_failed:
            self.kept_bytes = self._limit
        return output

    def settle(self, num_free: int) -> int:
        """Gives up what its requests do not need, or takes what they lack of `num_free` bytes; how many it took."""
        self._limit = min(self.engine.kv_needed_bytes, self.kept_bytes + num_free)
        self.engine.limit_kv(self._limit)
        taken = max(0, self._limit - self.kept_bytes)
        self.kept_bytes += taken
        return taken


class _Station:
    """One model on the thread: the engine that serves it, None once it is removed, and those that did before.

    A call waits until the engine is idle and no other engine holds memory of the model: a replay writes all of its
    K/V, whatever the limit. Requests that come after the call are parked till then. Parked requests live on: one that
    is aborted or late goes to the engine all the same, whose next step ends it before it takes a slot, and the others
    are counted as waiting. Calls and parked requests are the serving engine's: no other engine gets them.

    All engines of a model share the K/V memory of the newest. Those on their way out keep what their requests need, and
    what is free goes to the oldest that lacks some; the one that serves has the rest.
    """

    def __init__(self, handle: EngineHandle | None = None, engine: StepEngine | None = None) -> None:
        self.handle = handle
        self.engine = engine
        self.leavers: list[_Leaver] = []
        self._part = self._limit = 0 if engine is None else engine.kv_memory_bytes
        self.calls: deque[_Call] = deque()
        self.parked: dict[str, GenerationRequest] = {}

    @property
    def has_work(self) -> bool:
        serves = self.engine is not None and self.engine.has_work
        return serves or bool(self.leavers) or bool(self.calls) or bool(self.parked)

    def engine_of(self, handle: EngineHandle) -> StepEngine | None:
        """The engine of this identity; None once it is gone."""
        if handle is self.handle:
            return self.engine
        return next((leaver.engine for leaver in self.leavers if leaver.handle is handle), None)

    def replace(self, handle: EngineHandle | None, engine: StepEngine | None, gone: Callable[[], object]) -> None:
        """Has another engine serve from now on, or none; `gone` is called once the engine before is gone."""
        if self.handle is not None and self.engine is not None:
            self.leavers.append(_Leaver(self.handle, self.engine, gone, self._limit))
        self.handle, self.engine = handle, engine
        self._limit = 0
        if engine is not None:
            self._part = engine.kv_memory_bytes
        self.share_memory()

    def let_go(self) -> list[Callable[[], object]]:
        """Lets go of the engines that are done; who is to be told of it."""
        told = [leaver.gone for leaver in self.leavers if not leaver.engine.has_work]
        self.leavers = [leaver for leaver in self.leavers if leaver.engine.has_work]
        self.share_memory()
        return told

    def share_memory(self) -> None:
        """Deals out what engines have given up by now."""
        num_free = max(0, self._part - self._limit - sum(leaver.kept_bytes for leaver in self.leavers))
        for leaver in self.leavers:
            num_free -= leaver.settle(num_free)
        if self.engine is not None:
            self._limit += num_free
            self.engine.limit_kv(self._limit)

    def step(self, engine: StepEngine) -> StepOutput:
        """A step of the engine that serves."""
        output = engine.step()
        if not self.parked:
            return output
        return replace(output, stats=replace(output.stats, num_waiting=output.stats.num_waiting + len(self.parked)))

    def unpark(self, now: float) -> list[GenerationRequest]:
        """Takes out who need not wait any longer: everyone if no call is left, else those whose time is up."""
        while self.calls and self.calls[0].future.cancelled():
            self.calls.popleft()
        ready = [
            request
            for request in self.parked.values()
            if not self.calls or any(moment is not None and now >= moment for moment in _ends(request))
        ]
        for request in ready:
            del self.parked[request.request_id]
        return ready


def _ends(request: GenerationRequest) -> tuple[float | None, ...]:
    """The moments at which an engine would end it in the queue."""
    return request.deadline, request.end_by, request.start_by


class EngineThread:
    """Steps the engines in turns (`service.runtime.turns`) while any has work, and sleeps on the inbox while none has.

    Commands are carried out in order, at most `_MAX_COMMANDS` of them between two turns. Look-ups (`ask`) wait apart,
    as they change nothing: at most `_MAX_LOOK_UPS` of them run between two turns, in order, and no command waits for
    them. Those whose callers have gone do not count.

    Args:
        engines: by their handles, one for each model; the thread owns them from `start` on.
        listener: hears of steps, refusals and the end.
        post: runs a callback with arguments on the event loop, callable from any thread.
        weights: by model name, what each gets of the time while several have work; 1 where nothing is said.
        clock: monotonic seconds; turns, deadlines and the ends of steps are measured by it.
    """

    def __init__(
        self,
        engines: Mapping[EngineHandle, StepEngine],
        listener: Listener,
        post: Callable[..., object],
        weights: Mapping[str, float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stations = {handle.model: _Station(handle, engine) for handle, engine in engines.items()}
        self._turns = Turns(weights)
        self._clock = clock
        self._listener = listener
        self._outbox = _Outbox(post)
        # Requests of whose tokens nobody hears before they are over.
        self._unstreamed: set[str] = set()
        self._inbox: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        # Taken out of the inbox and not run yet, with the engine that serves: it is not replaced before.
        self._look_ups: deque[tuple[_Call, StepEngine]] = deque()
        # A daemon, so that a graph that never returns cannot keep a stopping process alive.
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Starts the thread, once."""
        self._thread.start()

    def submit(self, engine: EngineHandle, request: GenerationRequest, *, is_streamed: bool = True) -> None:
        """Queues a request; its first event comes with a later step, or `Listener.rejected` does.

        Of one that is not streamed the event loop may hear some steps late, but for its end.
        """
        self._inbox.put(_Submit(engine, request, is_streamed))

    def abort(self, engine: EngineHandle, request_id: str) -> None:
        """Ends a request before the next step, or a few later; its terminal event still comes."""
        self._inbox.put(_Abort(engine, request_id))

    def call(self, engine: EngineHandle, function: Callable[[StepEngine], Result]) -> concurrent.futures.Future[Result]:
        """Runs `function` on an engine once that is idle; requests submitted meanwhile wait behind it.

        Cancelling the future before `function` has begun takes the call back. What `function` raises becomes
        EngineFailed, RequestErrors aside; NotServing if the engine was replaced or removed before it ran. The future
        stays undone if the thread ends first: wait for `Listener.ended` too.
        """
        return self._call(engine, function, needs_idle=True)

    def ask(self, engine: EngineHandle, function: Callable[[StepEngine], Result]) -> concurrent.futures.Future[Result]:
        """As `call`, between two of the next steps, however busy the engine is: for quick work that changes nothing."""
        return self._call(engine, function, needs_idle=False)

    def do(self, function: Callable[[], Result]) -> concurrent.futures.Future[Result]:
        """Runs `function` between two turns, while all models wait: for what must not happen beside a step.

        What it raises is the future's; what it held then is let go of on this thread. The future stays undone if the
        thread ends first.
        """
        future: concurrent.futures.Future[Result] = concurrent.futures.Future()
        self._inbox.put(_ThreadTask(function, future))
        return future

    def install(self, handle: EngineHandle, engine: StepEngine, gone: Callable[[], object]) -> None:
        """Gives a model its engine, or another one; the old one ends what was submitted to it, and refuses its calls.

        Until then the two share what K/V may take. `gone` is called on the event loop once the thread has let go of the
        old one; never, if there was none or the thread ends first.
        """
        self._inbox.put(_Install(handle, engine, gone))

    def remove(self, engine: EngineHandle, gone: Callable[[], object]) -> None:
        """Takes a model's engine away, as `install` does, and puts none in its place; `gone` is called as there."""
        self._inbox.put(_Remove(engine, gone))

    def stop(self) -> None:
        """Ends the thread before its next step, or a few later; `Listener.ended` follows."""
        self._inbox.put(_Stop())

    def _call(
        self, engine: EngineHandle, function: Callable[[StepEngine], Result], *, needs_idle: bool
    ) -> concurrent.futures.Future[Result]:
        future: concurrent.futures.Future[Result] = concurrent.futures.Future()
        self._inbox.put(_Call(engine, function, future, needs_idle))
        return future

    def _run(self) -> None:
        error: EngineFailed | None = None
        try:
            while self._drain_inbox():
                self._take_turn()
        except BaseException as cause:  # whatever ends the thread, every stream must hear of it
            error = report_failure("the engine thread died", cause)
        try:
            self._outbox.send(self._listener.ended, error)
        except RuntimeError:
            _LOGGER.exception("the event loop was gone before the engine thread")

    @property
    def _is_idle(self) -> bool:
        """Whether there is nothing to do but to wait for a command."""
        return not self._look_ups and not any(station.has_work for station in self._stations.values())

    def _drain_inbox(self) -> bool:
        """Carries out what is in the inbox, as far as a turn may wait for it; False means stop.

        Waits for a first command only when there is nothing to do.
        """
        block, num_left = self._is_idle, _MAX_COMMANDS
        if block:
            self._outbox.flush()
            self._prepare()
        # Nobody else takes anything out.
        while block or (num_left and not self._inbox.empty()):
            command = self._inbox.get()
            block = False
            if isinstance(command, _Stop):
                return False
            self._apply(command)
            # Calls are only put in a queue here: a flood of them keeps no request waiting.
            num_left -= not isinstance(command, _Call)
        self._run_look_ups(_MAX_LOOK_UPS)
        return True

    def _run_look_ups(self, max_look_ups: int) -> None:
        while self._look_ups and max_look_ups:
            call, engine = self._look_ups.popleft()
            if not call.future.cancelled():
                _run(call, engine)
                max_look_ups -= 1

    def _prepare(self) -> None:
        """Has engines do ahead what they can, until somebody wants something."""
        for station in self._stations.values():
            while station.engine is not None and self._inbox.empty() and station.engine.prepare():
                pass

    def _apply(self, command: _Submit | _Abort | _Call | _Install | _Remove | _ThreadTask) -> None:
        match command:
            case _ThreadTask():
                self._outbox.flush()  # it may take long
                _run_task(command)
            case _Install(handle, engine, gone):
                self._replace(self._stations.setdefault(handle.model, _Station()), handle, engine, gone)
            case _Remove(handle, gone):
                self._replace(self._stations[handle.model], None, None, gone)
            case _Abort(handle, request_id):
                self._abort(handle, request_id)
            case _Call():
                self._arrange(command)
            case _Submit(handle, request, is_streamed):
                if not is_streamed:
                    self._unstreamed.add(request.request_id)
                self._submit(handle, request)

    def _submit(self, handle: EngineHandle, request: GenerationRequest) -> None:
        station = self._stations.get(handle.model)
        if station is None or station.engine is None or station.handle is not handle:
            self._reject(handle, request.request_id, _gone(handle))
        elif station.calls or station.parked:
            # Behind those that wait already, even if what they waited for is just over.
            station.parked[request.request_id] = request
        else:
            self._add(handle, station.engine, request)

    def _arrange(self, call: _Call) -> None:
        """Has a call wait for its turn: for an idle engine, or for the look-ups before it."""
        station = self._stations.get(call.engine.model)
        if station is None or station.engine is None or station.handle is not call.engine:
            _refuse(call)
        elif call.needs_idle:
            station.calls.append(call)
        else:
            self._look_ups.append((call, station.engine))

    def _abort(self, handle: EngineHandle, request_id: str) -> None:
        station = self._stations.get(handle.model)
        engine = None if station is None else station.engine_of(handle)
        if station is None or engine is None:
            return
        if handle is station.handle and (parked := station.parked.pop(request_id, None)):
            self._add(handle, engine, parked)
        engine.abort(request_id)

    def _replace(
        self, station: _Station, handle: EngineHandle | None, engine: StepEngine | None, gone: Callable[[], object]
    ) -> None:
        """Has another engine serve, or none. What waits was meant for the one before: that gets it, or refuses it."""
        self._run_look_ups(len(self._look_ups))
        while station.calls:
            _refuse(station.calls.popleft())
        if station.handle is not None and station.engine is not None:
            for request in station.parked.values():
                self._add(station.handle, station.engine, request)
        station.parked.clear()
        station.replace(handle, engine, gone)

    def _take_turn(self) -> None:
        """One turn of the model that is due: the inbox is read between any two."""
        model = self._turns.next([model for model, station in self._stations.items() if station.has_work])
        if model is None:
            return
        station, began = self._stations[model], self._clock()
        # Those on their way out first, so that what a model's gauges say last is of the engine that serves.
        self._advance_leavers(station)
        self._advance(station)
        self._turns.took(model, self._clock() - began)
        if station.engine is None and not station.leavers:
            del self._stations[model]
            self._turns.forget(model)

    def _advance_leavers(self, station: _Station) -> None:
        """One step of each engine that is on its way out, and away with those that are done."""
        if not station.leavers:
            return
        for leaver in station.leavers:
            if leaver.engine.has_work:
                self._tell(leaver.handle, leaver.step())
        for gone in station.let_go():
            self._outbox.send(gone)

    def _advance(self, station: _Station) -> None:
        """One step, or one call, of the engine that serves."""
        handle, engine = station.handle, station.engine
        if handle is None or engine is None:
            return
        for request in station.unpark(self._clock()):
            self._add(handle, engine, request)
        if engine.has_work:
            self._tell(handle, station.step(engine))
        elif station.calls and not station.leavers:
            self._outbox.flush()
            _run(station.calls.popleft(), engine)

    def _add(self, handle: EngineHandle, engine: StepEngine, request: GenerationRequest) -> None:
        try:
            engine.add_request(request)
        except RequestError as error:
            self._reject(handle, request.request_id, error)
        except Exception as cause:  # one bad request must not end the others
            failure = report_failure(f"request {request.request_id} could not be queued", cause)
            self._reject(handle, request.request_id, failure)

    def _reject(self, handle: EngineHandle, request_id: str, error: RequestError) -> None:
        # Of one whose id is in use, single steps are told from now on: more often than need be, and no harm.
        self._unstreamed.discard(request_id)
        self._outbox.send(self._listener.rejected, handle, request_id, error, self._clock())

    def _tell(self, handle: EngineHandle, output: StepOutput) -> None:
        """Tells of a step: at once if it was long or somebody waits for what it brought."""
        now = self._clock()
        is_awaited = output.is_failed or output.stats.run_seconds >= _GATHER_SECONDS
        for event in output.events:
            if event.is_terminal:
                self._unstreamed.discard(event.request_id)
                is_awaited = True
            elif event.request_id not in self._unstreamed:
                is_awaited = True
        if is_awaited:
            self._outbox.send(self._listener.step_done, handle, output, now)
        else:
            self._outbox.leave(now, self._listener.step_done, handle, output, now)


def _run(call: _Call, engine: StepEngine) -> None:
    """Runs a call on the engine, unless its caller has gone."""
    if not call.future.set_running_or_notify_cancel():
        return
    try:
        result = call.function(engine)
    except RequestError as error:
        call.future.set_exception(error)
    except Exception as cause:  # the caller is told, the engines go on
        call.future.set_exception(report_failure("a call on the engine thread failed", cause))
    else:
        call.future.set_result(result)


def _run_task(task: _ThreadTask) -> None:
    if not task.future.set_running_or_notify_cancel():
        return
    try:
        result = task.function()
    except Exception as error:  # it is the caller's, the engines go on
        _let_go(error)
        task.future.set_exception(error)
    else:
        task.future.set_result(result)


def _let_go(error: BaseException) -> None:
    """Empties the frames that an error has come through, those of all that led to it included."""
    waiting, seen = [error], set[int]()
    while waiting:
        each = waiting.pop()
        if id(each) not in seen:
            seen.add(id(each))
            traceback.clear_frames(each.__traceback__)
            waiting += [other for other in (each.__cause__, each.__context__) if other is not None]


def _refuse(call: _Call) -> None:
    """Raises NotServing to a caller whose engine serves no more."""
    if call.future.set_running_or_notify_cancel():
        call.future.set_exception(_gone(call.engine))


def _gone(engine: EngineHandle) -> NotServing:
    return NotServing(f"this engine of {engine.model} does not serve any more")
