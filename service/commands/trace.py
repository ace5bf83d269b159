"""`python -m service trace`: a server's flight recorder as a file for Perfetto or chrome://tracing.

The file is in the JSON Trace Event Format. Each model is a process with one track for its steps, whose slices never
overlap: `host` (there is work, but the graphs do not run), the run, named by what it computes, and `sample` (until the
tokens are reported). Each request is an asynchronous slice that contains its phases.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TextIO
from urllib.parse import urlsplit

from service.config import TraceConfig
from service.engine.types import RequestTimings
from service.errors import OnwardError
from service.telemetry import debug
from service.telemetry.lifecycle import phases

_FAILED = 1
_TIMEOUT_SECONDS = 30.0
_TRACK = 1
_NANOSECONDS = 1_000_000_000

Event = dict[str, Any]
Row = Mapping[str, Any]


class _Refused(OnwardError):
    """The server did not send its log; the message says why."""


def trace(config: TraceConfig, out: TextIO, err: TextIO) -> int:
    """Writes the file and reports it on `out`, or an error on `err`; returns the exit status."""
    try:
        written = trace_events(_fetch(config.metrics_target))
        config.out.write_text(json.dumps(written, separators=(",", ":"), allow_nan=False), encoding="utf-8")
    except (_Refused, OSError, http.client.HTTPException) as error:
        err.write(f"no trace from {config.metrics_target} to {config.out}: {error}\n")
        return _FAILED
    counted = written["otherData"]
    out.write(
        f"{config.out}: {counted['steps']} steps and {counted['requests']} requests of {counted['models']}; "
        "open it in https://ui.perfetto.dev or chrome://tracing\n"
    )
    return 0


def trace_events(log: Mapping[str, Any]) -> dict[str, Any]:
    """The file's content: `traceEvents` in order of time, which begins with the first one.

    Args:
        log: the JSON of `service.telemetry.debug`.
    """
    steps = {name: _rows(model["steps"]) for name, model in log["models"].items()}
    requests = {name: _rows(model["requests"]) for name, model in log["models"].items()}
    now = log["monotonic_time"]
    starts = [row["start_time"] - (row["host_seconds"] or 0.0) for rows in steps.values() for row in rows]
    starts += [row["arrival_time"] for rows in requests.values() for row in rows]
    clock = _Clock(min(starts, default=now))
    names: list[Event] = []
    events: list[Event] = []
    for pid, name in enumerate(steps, start=1):
        names += [_named("process_name", pid, name), _named("thread_name", pid, "steps")]
        events += _step_events(steps[name], pid, clock)
        for index, row in enumerate(requests[name]):
            events += _request_events(row, pid, f"{pid}.{index}", clock, now)
    # Stable: events of one moment keep their order, in which begin and end are nested.
    events.sort(key=lambda event: event["ts"])
    return {
        "traceEvents": names + events,
        "displayTimeUnit": "ms",
        "otherData": {
            "models": ", ".join(steps),
            "steps": sum(map(len, steps.values())),
            "requests": sum(map(len, requests.values())),
            "unix_time_of_ts_0": log["unix_time"] - now + clock.origin,
        },
    }


@dataclass(frozen=True, slots=True)
class _Clock:
    """Converts the server's seconds to microseconds since `origin`, rounded to nanoseconds so that ends meet starts."""

    origin: float

    def nanoseconds(self, seconds: float) -> int:
        return round((seconds - self.origin) * _NANOSECONDS)

    def ts(self, seconds: float) -> float:
        return self.nanoseconds(seconds) / 1000

    def span(self, start: float, end: float) -> tuple[float, float]:
        first = self.nanoseconds(start)
        return first / 1000, max(0, self.nanoseconds(end) - first) / 1000


def _fetch(target: str) -> dict[str, Any]:
    """The log of the server whose metrics are at `target`.

    Raises:
        _Refused: the server has no log.
        OSError, http.client.HTTPException: no answer, or not a metrics server's.
    """
    address = urlsplit(f"//{target}")
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=_TIMEOUT_SECONDS)
    try:
        connection.request("GET", debug.PATH)
        response = connection.getresponse()
        body = response.read()
    finally:
        connection.close()
    if response.status != http.client.OK:
        raise _Refused(f"{response.status} {response.reason}: {body[:200].decode('utf-8', 'replace').strip()}")
    try:
        log = json.loads(body)
        if log["format"] == debug.FORMAT:
            return dict(log)
    except (ValueError, KeyError, TypeError):
        pass
    raise _Refused(f"{debug.PATH} is not a flight recorder's log of format {debug.FORMAT}")


def _rows(table: Mapping[str, Any]) -> list[Row]:
    return [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]


def _named(kind: str, pid: int, name: str) -> Event:
    return {"ph": "M", "name": kind, "pid": pid, "tid": _TRACK, "ts": 0, "args": {"name": name}}


def _step_events(rows: list[Row], pid: int, clock: _Clock) -> Iterator[Event]:
    """Slices and counters of one model's steps."""
    last_end = float("-inf")
    for row in rows:
        start, end = row["start_time"], row["end_time"]
        if row["host_seconds"] is not None:
            # Host time before the end of the model's last step is part of that step's slice.
            yield _slice("host", pid, clock.span(max(start - row["host_seconds"], last_end), start), {})
        run_end = start + row["run_seconds"]
        numbers = {name: value for name, value in row.items() if name not in ("start_time", "end_time")}
        yield _slice(_work(row), pid, clock.span(start, run_end), numbers)
        yield _slice("sample", pid, clock.span(run_end, end), {})
        rows_now = {"prefill": row["num_rows"] - row["num_decode_rows"], "decode": row["num_decode_rows"]}
        yield _counter("rows", pid, clock.ts(start), rows_now)
        yield _counter("padding tokens", pid, clock.ts(start), {"tokens": row["num_padding_tokens"]})
        yield _counter("requests", pid, clock.ts(end), {"running": row["num_running"], "waiting": row["num_waiting"]})
        yield _counter("KV use", pid, clock.ts(end), {"ratio": row["kv_usage_ratio"]})
        if not row["num_running"] and not row["num_waiting"]:
            yield _counter("rows", pid, clock.ts(end), {"prefill": 0, "decode": 0})
            yield _counter("padding tokens", pid, clock.ts(end), {"tokens": 0})
        last_end = end


def _work(row: Row) -> str:
    """What a step's run computed: few names, as a viewer colors slices by name."""
    if row["error_id"] is not None:
        return "failed"
    kinds = {"encode": "num_encoder_tokens", "prefill": "num_prefill_tokens", "decode": "num_decode_rows"}
    return " + ".join(kind for kind, column in kinds.items() if row[column]) or "nothing"


def _request_events(row: Row, pid: int, number: str, clock: _Clock, now: float) -> Iterator[Event]:
    """One request and its phases. An open request lasts until now; its phases are unknown."""
    numbers = {name: value for name, value in row.items() if not name.endswith("_time")}
    finished = now if row["finished_time"] is None else row["finished_time"]
    name = f"request {row['request_id']}"

    def edge(ph: str, of: str, seconds: float, args: Mapping[str, Any]) -> Event:
        return {
            "ph": ph, "cat": "request", "name": of, "id": number, "pid": pid, "tid": _TRACK, "ts": clock.ts(seconds),
            "args": args,
        }  # fmt: skip

    yield edge("b", name, row["arrival_time"], {**numbers, "outcome": row["outcome"] or "open"})
    if row["outcome"] is not None:
        times = ("arrival_time", "scheduled_time", "first_token_time", "finished_time")
        for phase in phases(RequestTimings(**{each: row[each] for each in times}), row["outcome"]):
            yield edge("b", phase.name, phase.start, {})
            yield edge("e", phase.name, phase.end, {})
    elif row["first_token_time"] is not None:
        yield edge("n", "first token", row["first_token_time"], {})
    yield edge("e", name, finished, {})


def _slice(name: str, pid: int, span: tuple[float, float], args: Mapping[str, Any]) -> Event:
    ts, dur = span
    return {"ph": "X", "name": name, "pid": pid, "tid": _TRACK, "ts": ts, "dur": dur, "args": args}


def _counter(name: str, pid: int, ts: float, values: Mapping[str, float]) -> Event:
    return {"ph": "C", "name": name, "pid": pid, "tid": _TRACK, "ts": ts, "args": values}
