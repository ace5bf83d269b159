"""The rules of the JSON Trace Event Format that a viewer relies on, as far as our files use it."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

# Microseconds; what adding two of them in floating point may cost.
ROUNDING = 1e-3


def check_trace(trace: Mapping[str, Any]) -> None:
    """Fails the test that calls it unless the file keeps every rule."""
    json.dumps(trace, allow_nan=False)
    assert trace["displayTimeUnit"] in ("ms", "ns")
    open_spans: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    track_ends: defaultdict[tuple[int, int], float] = defaultdict(float)
    last = 0.0
    for event in trace["traceEvents"]:
        kind, ts = event["ph"], event["ts"]
        assert isinstance(ts, int | float)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert isinstance(event["name"], str)
        assert event["name"]
        assert isinstance(event.get("args", {}), dict)
        if kind == "M":
            assert event["name"] in ("process_name", "thread_name")
            assert event["args"]["name"]
            continue
        assert ts >= last, "events are in order of time"
        last = ts
        match kind:
            case "X":
                assert event["dur"] >= 0
                track = (event["pid"], event["tid"])
                assert ts >= track_ends[track] - ROUNDING, f"{event['name']} begins before the slice before it ends"
                track_ends[track] = ts + event["dur"]
            case "b" | "n" | "e":
                spans = open_spans[event["cat"], event["id"]]
                if kind == "b":
                    spans.append(event["name"])
                elif kind == "e":
                    assert spans, f"{event['name']} ends, and never began"
                    assert spans.pop() == event["name"], "spans of one id are nested"
                else:
                    assert spans, f"{event['name']} lies in no span"
            case "C":
                assert event["args"]
                assert all(isinstance(value, int | float) for value in event["args"].values())
            case _:
                raise AssertionError(f"no event of ours has the phase {kind}")
    left = {key: names for key, names in open_spans.items() if names}
    assert not left, f"spans without an end: {left}"


def slices(trace: Mapping[str, Any], pid: int = 1) -> list[tuple[str, float, float]]:
    """Name, start and duration of one model's slices, in milliseconds."""
    return [
        (event["name"], round(event["ts"] / 1e3, 6), round(event["dur"] / 1e3, 6))
        for event in trace["traceEvents"]
        if event["ph"] == "X" and event["pid"] == pid
    ]


def spans(trace: Mapping[str, Any], number: str) -> list[tuple[str, float, float]]:
    """Name, start and end of the spans of one id, in milliseconds, in order of their ends."""
    begun: dict[str, float] = {}
    found = []
    for event in trace["traceEvents"]:
        if event.get("id") == number and event["ph"] == "b":
            begun[event["name"]] = event["ts"]
        elif event.get("id") == number and event["ph"] == "e":
            found.append((event["name"], round(begun[event["name"]] / 1e3, 6), round(event["ts"] / 1e3, 6)))
    return found


def counter(trace: Mapping[str, Any], name: str, pid: int = 1) -> list[tuple[float, dict[str, float]]]:
    """What a counter showed from when on, in milliseconds."""
    return [
        (round(event["ts"] / 1e3, 6), event["args"])
        for event in trace["traceEvents"]
        if event["ph"] == "C" and event["name"] == name and event["pid"] == pid
    ]
