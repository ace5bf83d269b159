"""The flight recorder: the last steps and requests of every model, for whoever asks what has just happened.

It is fed where steps and ends of requests reach the event loop and read there too, so nothing is locked. What it keeps
is bounded and holds numbers, names and ids: no prompt, no token, no text. Knows nothing of files, HTTP or engines.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

from service.engine.types import StepOutput, StepStats
from service.metrics import RequestRecord

_LOGGER = logging.getLogger(__name__)

# Numbers, text and None in a plain tuple: what is kept for long must be nothing that the garbage collector looks at
# again and again, or thousands of steps would bring nearer, and lengthen, the pauses of its full collections.
Row = tuple[float | int | str | None, ...]

_STEP_FIELDS = tuple(each.name for each in dataclasses.fields(StepStats))
_step_values = attrgetter(*_STEP_FIELDS)

# As many steps as a log entry tells of.
_MAX_LOGGED_STEPS = 16


class RecordedRequest(NamedTuple):
    """One request. `outcome` is a finish reason or an error's label, None while it is open; other Nones are "never".

    When an open request was scheduled is known to the engine alone. Times are `time.monotonic()` seconds.
    """

    request_id: str
    outcome: str | None
    arrival_time: float
    scheduled_time: float | None
    first_token_time: float | None
    finished_time: float | None
    num_prompt_tokens: int
    num_cached_tokens: int | None
    num_generated_tokens: int


# A step's row: when all of it was over (`time.monotonic()` seconds), the log's id if it failed, then its numbers.
STEP_COLUMNS = ("end_time", "error_id", *_STEP_FIELDS)
REQUEST_COLUMNS = RecordedRequest._fields


@dataclass(frozen=True, slots=True)
class ModelLog:
    """What is kept of one model: rows of `STEP_COLUMNS` and `REQUEST_COLUMNS`, oldest first, open requests last."""

    steps: tuple[Row, ...]
    requests: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class FlightLog:
    """What is kept, taken at `monotonic_time`, which `time.time()` called `unix_time`; models by name."""

    monotonic_time: float
    unix_time: float
    models: Mapping[str, ModelLog]


class FlightRecorder:
    """Remembers for each model as many steps and as many ended requests as it is told, and forgets the oldest.

    Args:
        num_kept: steps, and requests, per model; 0 remembers nothing.
    """

    def __init__(self, num_kept: int) -> None:
        self._num_kept = num_kept
        self._steps: dict[str, deque[Row]] = {}
        self._requests: dict[str, deque[Row]] = {}
        self._last_logged: dict[str, Row] = {}

    def begin(self, model: str) -> None:
        """A model is served from now on."""
        self._steps[model] = deque(maxlen=self._num_kept)
        self._requests[model] = deque(maxlen=self._num_kept)

    def forget(self, model: str) -> None:
        """A model is not served any more, and leaves its memory."""
        del self._steps[model], self._requests[model]
        self._last_logged.pop(model, None)

    def step_done(self, model: str, output: StepOutput, now: float) -> None:
        """A model's engine took a step, which was over at `now`; one that failed is logged with those before it."""
        self._steps[model].append((now, output.error_id, *_step_values(output.stats)))
        if output.error_id is not None:
            self._log(model, output.error_id)

    def request_ended(self, model: str, request_id: str, record: RequestRecord, num_cached_tokens: int) -> None:
        """A request that the engine had is over; of the tokens given so many had their keys and values at hand."""
        timings = record.timings
        ended = RecordedRequest(
            request_id=request_id,
            outcome=record.outcome,
            arrival_time=timings.arrival_time,
            scheduled_time=timings.scheduled_time,
            first_token_time=timings.first_token_time,
            finished_time=timings.finished_time,
            num_prompt_tokens=record.num_prompt_tokens,
            num_cached_tokens=num_cached_tokens,
            num_generated_tokens=record.num_generated_tokens,
        )
        self._requests[model].append(tuple(ended))

    def engine_died(self, error_id: str) -> None:
        """The engine thread is over by an error: what every model did last goes to the log."""
        for model in self._steps:
            self._log(model, error_id)

    def take(self, open_requests: Iterable[tuple[str, RecordedRequest]]) -> FlightLog:
        """All that is kept.

        Args:
            open_requests: requests that are not over, each with its model's name; none if nothing is to be remembered.
        """
        is_open: defaultdict[str, list[Row]] = defaultdict(list)
        for model, request in open_requests if self._num_kept else ():
            is_open[model].append(request)
        models = {
            model: ModelLog(tuple(steps), (*self._requests[model], *is_open[model]))
            for model, steps in self._steps.items()
        }
        return FlightLog(time.monotonic(), time.time(), models)

    def _log(self, model: str, error_id: str) -> None:
        """One entry with a model's last steps, none of which an entry before has told of; the last is told last."""
        steps = self._steps[model]
        news = itertools.takewhile(lambda step: step is not self._last_logged.get(model), reversed(steps))
        told = list(itertools.islice(news, _MAX_LOGGED_STEPS))
        if not told:
            return
        self._last_logged[model] = told[0]
        rows: list[dict[str, Any]] = [dict(zip(STEP_COLUMNS, step, strict=True)) for step in reversed(told)]
        lines = [f"{row['end_time'] - rows[-1]['end_time']:+.6f} s: {_line(row)}" for row in rows]
        _LOGGER.error("%s: the last steps of %s\n%s", error_id, model, "\n".join(lines))


def _line(step: Mapping[str, Any]) -> str:
    """A step in words."""
    host = "-" if step["host_seconds"] is None else f"{step['host_seconds'] * 1e3:.3f} ms"
    work = f"run {step['run_seconds'] * 1e3:.3f} ms" if step["error_id"] is None else "failed"
    return (
        f"{work}, host {host}, rows {step['num_rows']}, prefill {step['num_prefill_tokens']}, "
        f"encoder {step['num_encoder_tokens']}, decode {step['num_decode_rows']}, "
        f"padding {step['num_padding_tokens']}, preempted {step['num_preemptions']}, "
        f"running {step['num_running']}, waiting {step['num_waiting']}, kv {step['kv_usage_ratio']:.3f}"
    )
