"""The flight recorder: the last steps and requests of every model.

Written and read on the event loop only, so without locks. Its memory is bounded. It holds numbers, names and ids: no
prompt, no token, no text.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

from service.engine.types import StepOutput, StepStats
from service.telemetry.metrics import RequestRecord
from service.telemetry.ring import Ring, Row, Rows

_LOGGER = logging.getLogger(__name__)

_STEP_FIELDS = {each.name: str(each.type) for each in dataclasses.fields(StepStats)}
_step_values = attrgetter(*_STEP_FIELDS)

# Steps in one log entry.
_MAX_LOGGED_STEPS = 16


class RecordedRequest(NamedTuple):
    """One request. `outcome` is a finish reason or an error label, None while it is open; other Nones mean "never".

    Only the engine knows when an open request was scheduled. Times are `time.monotonic()` seconds.
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


# A step's row: the error id if it failed, its end (`time.monotonic()` seconds), the fields of `StepStats`.
STEP_COLUMNS = ("error_id", "end_time", *_STEP_FIELDS)
_STEP_TYPES = ("float", *_STEP_FIELDS.values())
REQUEST_COLUMNS = RecordedRequest._fields
# Of an ended request, after its two names: four times, three counts.
_REQUEST_TYPES = (*("float",) * 4, *("int",) * 3)


@dataclass(frozen=True, slots=True)
class ModelLog:
    """The log of one model: rows of `STEP_COLUMNS` and `REQUEST_COLUMNS`, oldest first, and open requests."""

    steps: Rows | tuple[Row, ...]
    requests: Rows | tuple[Row, ...]
    open_requests: tuple[Row, ...] = ()


@dataclass(frozen=True, slots=True)
class FlightLog:
    """The log of all models by name, taken at `monotonic_time`, which is `unix_time` on the wall clock."""

    monotonic_time: float
    unix_time: float
    models: Mapping[str, ModelLog]


class ModelRecorder:
    """Keeps one model's last steps and ended requests.

    Args:
        model: its name, for the log.
        num_kept: steps, and requests; 0 keeps nothing.
    """

    def __init__(self, model: str, num_kept: int) -> None:
        self._model = model
        self._num_kept = num_kept
        self._steps = Ring(num_kept, 1, _STEP_TYPES)
        self._requests = Ring(num_kept, 2, _REQUEST_TYPES)
        self._num_logged = 0

    def step_done(self, output: StepOutput, now: float) -> None:
        """An engine of the model took a step, which ended at `now`; a failed one is logged with those before it."""
        self._steps.append((output.error_id,), (now, *_step_values(output.stats)))
        if output.error_id is not None:
            self.log(output.error_id)

    def request_ended(self, request_id: str, record: RequestRecord, num_cached_tokens: int) -> None:
        """A submitted request ended; `num_cached_tokens` are its prompt's cache hits."""
        times = record.timings
        self._requests.append(
            (request_id, record.outcome),
            (
                times.arrival_time,
                times.scheduled_time,
                times.first_token_time,
                times.finished_time,
                record.num_prompt_tokens,
                num_cached_tokens,
                record.num_generated_tokens,
            ),
        )

    def taken(self, open_requests: Iterable[RecordedRequest] = ()) -> ModelLog:
        """A copy of all that is kept, with the requests that are not over; nothing if nothing is to be kept."""
        return ModelLog(self._steps.last(), self._requests.last(), tuple(open_requests) if self._num_kept else ())

    def log(self, error_id: str) -> None:
        """Logs the last steps that no entry had before; the last step comes last."""
        rest = self._steps.last(min(_MAX_LOGGED_STEPS, self._steps.num_added - self._num_logged))
        self._num_logged = self._steps.num_added
        if not rest:
            return
        rows: list[dict[str, Any]] = [dict(zip(STEP_COLUMNS, step, strict=True)) for step in rest]
        lines = [f"{row['end_time'] - rows[-1]['end_time']:+.6f} s: {_line(row)}" for row in rows]
        _LOGGER.error("%s: the last steps of %s\n%s", error_id, self._model, "\n".join(lines))


def flight_log(models: Mapping[str, ModelLog]) -> FlightLog:
    """The log of all models, taken now."""
    return FlightLog(time.monotonic(), time.time(), models)


def _line(step: Mapping[str, Any]) -> str:
    """A step as a log line."""
    host = "-" if step["host_seconds"] is None else f"{step['host_seconds'] * 1e3:.3f} ms"
    work = f"run {step['run_seconds'] * 1e3:.3f} ms" if step["error_id"] is None else "failed"
    return (
        f"{work}, host {host}, rows {step['num_rows']}, prefill {step['num_prefill_tokens']}, "
        f"encoder {step['num_encoder_tokens']}, decode {step['num_decode_rows']}, "
        f"padding {step['num_padding_tokens']}, preempted {step['num_preemptions']}, "
        f"running {step['num_running']}, waiting {step['num_waiting']}, kv {step['kv_usage_ratio']:.3f}"
    )
