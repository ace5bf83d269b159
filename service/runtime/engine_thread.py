"""The one thread that steps every model's engine, and its inbox of commands.

Inbox and outbox are the only structures that both threads touch. Reports go to the event loop through `post`: once for
each step, or for several at a time while the loop is behind or only unary requests wait. Knows nothing of streams,
admission or gRPC.
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
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

from service.engine.interfaces import EngineHandle, StepEngine
from service.engine.types import GenerationRequest, StepOutput
from service.errors import EngineFailed, NotServing, RequestError, report_failure
from service.runtime.engine_entry import EngineCall, EngineEntry
from service.runtime.outbox import GATHER_SECONDS, Outbox
from service.runtime.weighted_fair import WeightedFairScheduler

_LOGGER = logging.getLogger(__name__)

# The most commands, and questions, between two steps: a flood of them must not delay other work.
_MAX_COMMANDS = 32
_MAX_QUESTIONS = 8

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
class _Command:
    """What the thread is to do; `cost` is what it counts of the commands between two steps."""

    run: Callable[[], None]
    cost: int = 1


class EngineThread:
    """Steps the engines by weighted fair scheduling while any has work, and blocks on the inbox while none has.

    Commands are carried out in order, at most `_MAX_COMMANDS` between two steps. Questions (`ask`) change nothing and
    have a queue of their own, of which at most `_MAX_QUESTIONS` run between two steps: no command waits for them.

    Args:
        engines: by their identities, one for each model; owned by the thread from `start` on.
        listener: is notified of steps, refusals and the end.
        post: runs a callback with arguments on the event loop, callable from any thread.
        weights: by model name, its share of the time while several have work; 1 if not given.
        clock: monotonic seconds of turns, deadlines and the ends of steps.
    """

    def __init__(
        self,
        engines: Mapping[EngineHandle, StepEngine],
        listener: Listener,
        post: Callable[..., object],
        weights: Mapping[str, float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._entries = {handle.model: EngineEntry(handle, engine) for handle, engine in engines.items()}
        self._scheduler = WeightedFairScheduler(weights)
        self._clock = clock
        self._listener = listener
        self._outbox = Outbox(post)
        # Requests whose tokens may be reported late.
        self._unstreamed: set[str] = set()
        self._inbox: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._is_stopped = False
        # With the engine that served when they came: it is not replaced before they ran.
        self._questions: deque[tuple[EngineCall, StepEngine]] = deque()
        # A daemon, so that a graph that never returns cannot keep a stopping process alive.
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Starts the thread, once."""
        self._thread.start()

    def submit(self, engine: EngineHandle, request: GenerationRequest, *, is_streamed: bool = True) -> None:
        """Queues a request; its first event comes with a later step, or `Listener.rejected` does.

        Events of unary requests (`is_streamed` False) may be batched; the terminal event never is.
        """
        self._put(partial(self._submit, engine, request, is_streamed=is_streamed))

    def abort(self, engine: EngineHandle, request_id: str) -> None:
        """Ends a request before the next step, or a few later; its terminal event still comes."""
        self._put(partial(self._abort, engine, request_id))

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
        """Runs `function` between two steps, while all models wait: for what must not happen beside a step.

        The future gets what it raises; objects that the error's frames hold are released on this thread. The future
        stays undone if the thread ends first.
        """
        future: concurrent.futures.Future[Result] = concurrent.futures.Future()
        self._put(partial(self._run_task, function, future))
        return future

    def install(self, handle: EngineHandle, engine: StepEngine, released: Callable[[], object]) -> None:
        """Gives a model its engine, or another one: the former then drains, and refuses its calls.

        Meanwhile the two share the K/V memory. `released` runs on the event loop once the thread has released the
        former engine; never, if there was none or the thread ends first.
        """
        self._put(partial(self._install, handle, engine, released))

    def remove(self, engine: EngineHandle, released: Callable[[], object]) -> None:
        """Takes a model's engine away, as `install` does, and puts none in its place; `released` runs as there."""
        self._put(partial(self._remove, engine, released))

    def stop(self) -> None:
        """Ends the thread before its next step, or a few later; `Listener.ended` follows."""
        self._put(self._set_stopped)

    def _call(
        self, engine: EngineHandle, function: Callable[[StepEngine], Result], *, needs_idle: bool
    ) -> concurrent.futures.Future[Result]:
        future: concurrent.futures.Future[Result] = concurrent.futures.Future()
        # Only queued by the thread: a flood of calls delays no request.
        self._put(partial(self._arrange, EngineCall(engine, function, future, needs_idle)), cost=0)
        return future

    def _put(self, run: Callable[[], None], cost: int = 1) -> None:
        self._inbox.put(_Command(run, cost))

    # All that follows runs on the engine thread.

    def _run(self) -> None:
        error: EngineFailed | None = None
        try:
            while self._drain_inbox():
                self._take_turn()
        except BaseException as cause:  # whatever ends the thread must end every stream
            error = report_failure("the engine thread died", cause)
        try:
            self._outbox.send(self._listener.ended, error)
        except RuntimeError:
            _LOGGER.exception("the event loop was closed before the engine thread ended")

    @property
    def _is_idle(self) -> bool:
        """Whether there is nothing to do but to wait for a command."""
        return not self._questions and not any(entry.has_work for entry in self._entries.values())

    def _drain_inbox(self) -> bool:
        """Carries out commands, as many as a step may wait for; blocks for the first if idle. False means stop."""
        block, num_left = self._is_idle, _MAX_COMMANDS
        if block:
            self._outbox.flush()
            self._prepare()
        # No other thread takes anything out.
        while block or (num_left and not self._inbox.empty()):
            command = self._inbox.get()
            command.run()
            if self._is_stopped:
                return False
            block = False
            num_left -= command.cost
        self._answer_questions(_MAX_QUESTIONS)
        return True

    def _answer_questions(self, max_questions: int) -> None:
        while self._questions and max_questions:
            call, engine = self._questions.popleft()
            if not call.future.cancelled():
                _run_call(call, engine)
                max_questions -= 1

    def _prepare(self) -> None:
        """Lets engines do background work until a command comes."""
        for entry in self._entries.values():
            while entry.engine is not None and self._inbox.empty() and entry.engine.prepare():
                pass

    def _set_stopped(self) -> None:
        self._is_stopped = True

    def _run_task(self, function: Callable[[], Result], future: concurrent.futures.Future[Result]) -> None:
        self._outbox.flush()  # it may take long
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = function()
        except Exception as error:  # the caller gets it, the engines go on
            _clear_frames(error)
            future.set_exception(error)
        else:
            future.set_result(result)

    def _install(self, handle: EngineHandle, engine: StepEngine, released: Callable[[], object]) -> None:
        self._replace(self._entries.setdefault(handle.model, EngineEntry()), handle, engine, released)

    def _remove(self, handle: EngineHandle, released: Callable[[], object]) -> None:
        self._replace(self._entries[handle.model], None, None, released)

    def _submit(self, handle: EngineHandle, request: GenerationRequest, *, is_streamed: bool) -> None:
        if not is_streamed:
            self._unstreamed.add(request.request_id)
        entry = self._entries.get(handle.model)
        if entry is None or entry.engine is None or entry.handle is not handle:
            self._reject(handle, request.request_id, _replaced(handle))
        elif entry.calls or entry.parked:
            # Behind the requests that wait already, even if the call they waited for is just over.
            entry.parked[request.request_id] = request
        else:
            self._add(handle, entry.engine, request)

    def _arrange(self, call: EngineCall) -> None:
        """Queues a call until the engine is idle, or behind the questions before it."""
        entry = self._entries.get(call.engine.model)
        if entry is None or entry.engine is None or entry.handle is not call.engine:
            _refuse(call)
        elif call.needs_idle:
            entry.calls.append(call)
        else:
            self._questions.append((call, entry.engine))

    def _abort(self, handle: EngineHandle, request_id: str) -> None:
        entry = self._entries.get(handle.model)
        engine = None if entry is None else entry.engine_of(handle)
        if entry is None or engine is None:
            return
        if handle is entry.handle and (parked := entry.parked.pop(request_id, None)):
            self._add(handle, engine, parked)
        engine.abort(request_id)

    def _replace(
        self,
        entry: EngineEntry,
        handle: EngineHandle | None,
        engine: StepEngine | None,
        released: Callable[[], object],
    ) -> None:
        """Has another engine serve, or none. The former engine gets the parked requests and refuses the calls."""
        self._answer_questions(len(self._questions))
        while entry.calls:
            _refuse(entry.calls.popleft())
        if entry.handle is not None and entry.engine is not None:
            for request in entry.parked.values():
                self._add(entry.handle, entry.engine, request)
        entry.parked.clear()
        entry.replace(handle, engine, released)

    def _take_turn(self) -> None:
        """One turn of the model that is due: the inbox is read between any two."""
        model = self._scheduler.next([model for model, entry in self._entries.items() if entry.has_work])
        if model is None:
            return
        entry, began = self._entries[model], self._clock()
        self._advance_draining(entry)
        self._advance(entry)
        self._scheduler.charge(model, self._clock() - began)
        if entry.engine is None and not entry.draining:
            del self._entries[model]
            self._scheduler.forget(model)

    def _advance_draining(self, entry: EngineEntry) -> None:
        """One step of each draining engine; releases those that are done."""
        if not entry.draining:
            return
        for each in entry.draining:
            if each.engine.has_work:
                self._report(each.handle, each.step())
        del each  # an engine's memory is free before its release is reported
        for released in entry.release():
            self._outbox.send(released)

    def _advance(self, entry: EngineEntry) -> None:
        """One step, or one call, of the engine that serves."""
        handle, engine = entry.handle, entry.engine
        if handle is None or engine is None:
            return
        for request in entry.unpark(self._clock()):
            self._add(handle, engine, request)
        if engine.has_work:
            self._report(handle, entry.step(engine))
        elif entry.calls and not entry.draining:
            self._outbox.flush()
            _run_call(entry.calls.popleft(), engine)

    def _add(self, handle: EngineHandle, engine: StepEngine, request: GenerationRequest) -> None:
        try:
            engine.add_request(request)
        except RequestError as error:
            self._reject(handle, request.request_id, error)
        except Exception as cause:  # one bad request must not end the others
            failure = report_failure(f"request {request.request_id} could not be queued", cause)
            self._reject(handle, request.request_id, failure)

    def _reject(self, handle: EngineHandle, request_id: str, error: RequestError) -> None:
        # If the id is in use, the other request's steps are reported one by one from now on, which harms nothing.
        self._unstreamed.discard(request_id)
        self._outbox.send(self._listener.rejected, handle, request_id, error, self._clock())

    def _report(self, handle: EngineHandle, output: StepOutput) -> None:
        """Reports a step: at once if it was long, failed, or has an event that a consumer waits for."""
        now = self._clock()
        is_awaited = output.is_failed or output.stats.run_seconds >= GATHER_SECONDS
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


def _run_call(call: EngineCall, engine: StepEngine) -> None:
    """Runs a call on the engine, unless it was cancelled."""
    if not call.future.set_running_or_notify_cancel():
        return
    try:
        result = call.function(engine)
    except RequestError as error:
        call.future.set_exception(error)
    except Exception as cause:  # the caller gets it, the engines go on
        call.future.set_exception(report_failure("a call on the engine thread failed", cause))
    else:
        call.future.set_result(result)


def _clear_frames(error: BaseException) -> None:
    """Empties the frames that an error has come through, those of its causes included."""
    waiting, seen = [error], set[int]()
    while waiting:
        each = waiting.pop()
        if id(each) not in seen:
            seen.add(id(each))
            traceback.clear_frames(each.__traceback__)
            waiting += [other for other in (each.__cause__, each.__context__) if other is not None]


def _refuse(call: EngineCall) -> None:
    """Ends a call whose engine serves no more with NotServing."""
    if call.future.set_running_or_notify_cancel():
        call.future.set_exception(_replaced(call.engine))


def _replaced(engine: EngineHandle) -> NotServing:
    return NotServing(f"this engine of {engine.model} does not serve any more")
