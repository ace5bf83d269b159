"""The one thread that steps every model's engine, and the inbox through which it is told what to do.

The inbox is the only structure that both threads touch; what the engines answer goes back through `post`, one call per
step, which runs a callback on the event loop. Knows nothing of streams, admission or gRPC.
"""

from __future__ import annotations

import concurrent.futures
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from model.golden import CaseResult, GoldenCase
from service.engine.failure import report_failure
from service.engine.types import GenerationRequest, StepOutput
from service.errors import EngineFailed, RequestError

_LOGGER = logging.getLogger(__name__)

Result = TypeVar("Result")


class StepEngine(Protocol):
    """What the thread needs of an engine. After `start`, only the thread calls it."""

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""

    def add_request(self, request: GenerationRequest) -> None:
        """Queues a request, or raises RequestError and leaves no trace of it."""

    def abort(self, request_id: str) -> None:
        """Ends a request at the next step boundary; unknown ids are ignored."""

    def step(self) -> StepOutput:
        """Moves every sequence that can move."""

    def verify_golden(self, cases: Sequence[GoldenCase], tolerance: float) -> Sequence[CaseResult]:
        """Replays golden cases on the provider in use; only while it has no work."""


class Listener(Protocol):
    """Who hears of it. All methods run on the event loop."""

    def step_done(self, model: str, output: StepOutput, now: float) -> None:
        """An engine took a step, which ended at `now` (`time.monotonic()` seconds)."""

    def rejected(self, request_id: str, error: RequestError, now: float) -> None:
        """An engine refused a request; no event of it will follow."""

    def ended(self, error: EngineFailed | None) -> None:
        """The thread is over: by `stop` (None) or by an error. Nothing follows."""


@dataclass(frozen=True, slots=True)
class _Submit:
    model: str
    request: GenerationRequest


@dataclass(frozen=True, slots=True)
class _Abort:
    model: str
    request_id: str


@dataclass(frozen=True, slots=True)
class _Call:
    model: str
    function: Callable[[StepEngine], Any]
    future: concurrent.futures.Future[Any]


@dataclass(frozen=True, slots=True)
class _Stop:
    pass


_Command = _Submit | _Abort | _Call | _Stop


class _Station:
    """One engine on the thread. A call waits until the engine is idle; what arrives after it is parked until then."""

    def __init__(self, engine: StepEngine) -> None:
        self.engine = engine
        self.calls: deque[_Call] = deque()
        self.parked: list[_Submit | _Abort] = []

    @property
    def has_work(self) -> bool:
        return self.engine.has_work or bool(self.calls)

    def run_calls(self) -> list[_Submit | _Abort]:
        """Runs the waiting calls on the idle engine; returns what was parked behind them."""
        while self.calls:
            call = self.calls.popleft()
            if call.future.set_running_or_notify_cancel():
                self._run(call)
        parked, self.parked = self.parked, []
        return parked

    def _run(self, call: _Call) -> None:
        try:
            result = call.function(self.engine)
        except RequestError as error:
            call.future.set_exception(error)
        except Exception as cause:  # the caller is told, the engines go on
            call.future.set_exception(report_failure("a call on the engine thread failed", cause))
        else:
            call.future.set_result(result)


class EngineThread:
    """Steps the engines in turn while any has work, and sleeps on the inbox while none has.

    Args:
        engines: by model name; the thread owns them from `start` on.
        listener: hears of steps, refusals and the end.
        post: runs a callback with arguments on the event loop, callable from any thread.
    """

    def __init__(self, engines: Mapping[str, StepEngine], listener: Listener, post: Callable[..., object]) -> None:
        self._stations = {model: _Station(engine) for model, engine in engines.items()}
        self._listener = listener
        self._post = post
        self._inbox: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        # A daemon, so that a graph that never returns cannot keep a stopping process alive.
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Starts the thread, once."""
        self._thread.start()

    def submit(self, model: str, request: GenerationRequest) -> None:
        """Queues a request; its first event comes with a later step, or `Listener.rejected` does."""
        self._inbox.put(_Submit(model, request))

    def abort(self, model: str, request_id: str) -> None:
        """Ends a request before the next step; its terminal event still comes."""
        self._inbox.put(_Abort(model, request_id))

    def call(self, model: str, function: Callable[[StepEngine], Result]) -> concurrent.futures.Future[Result]:
        """Runs `function` on an engine once that is idle; requests submitted meanwhile wait behind it.

        What `function` raises becomes EngineFailed, RequestErrors aside. The future stays undone if the thread ends
        first: wait for `Listener.ended` too.
        """
        future: concurrent.futures.Future[Result] = concurrent.futures.Future()
        self._inbox.put(_Call(model, function, future))
        return future

    def stop(self) -> None:
        """Ends the thread before its next step; `Listener.ended` follows."""
        self._inbox.put(_Stop())

    def _run(self) -> None:
        error: EngineFailed | None = None
        try:
            while self._obey():
                for model, station in self._stations.items():
                    self._advance(model, station)
        except BaseException as cause:  # whatever ends the thread, every stream must hear of it
            error = report_failure("the engine thread died", cause)
        try:
            self._post(self._listener.ended, error)
        except RuntimeError:
            _LOGGER.exception("the event loop was gone before the engine thread")

    def _obey(self) -> bool:
        """Empties the inbox, waiting for a first command only when there is nothing to do; False means stop."""
        block = not any(station.has_work for station in self._stations.values())
        while True:
            try:
                command = self._inbox.get(block=block)
            except queue.Empty:
                return True
            block = False
            if isinstance(command, _Stop):
                return False
            self._apply(command)

    def _apply(self, command: _Submit | _Abort | _Call) -> None:
        station = self._stations[command.model]
        match command:
            case _Call():
                station.calls.append(command)
            case _Abort(_, request_id):
                station.engine.abort(request_id)
                if station.calls:
                    station.parked.append(command)
            case _Submit(_, request):
                if station.calls:
                    station.parked.append(command)
                else:
                    self._add(station.engine, request)

    def _advance(self, model: str, station: _Station) -> None:
        if station.engine.has_work:
            output = station.engine.step()
            self._post(self._listener.step_done, model, output, time.monotonic())
        elif station.calls:
            for command in station.run_calls():
                self._apply(command)

    def _add(self, engine: StepEngine, request: GenerationRequest) -> None:
        try:
            engine.add_request(request)
        except RequestError as error:
            self._post(self._listener.rejected, request.request_id, error, time.monotonic())
        except Exception as cause:  # one bad request must not end the others
            failure = report_failure(f"request {request.request_id} could not be queued", cause)
            self._post(self._listener.rejected, request.request_id, failure, time.monotonic())
