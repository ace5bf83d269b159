"""Coordinated omission, drawn from a real run: a server that stalls for a second, measured by two clients.

    python -m tests.load.omission --out docs/results/data

One client runs an open loop. The other is a closed loop of one user: during the stall it sends nothing, so nearly all
of its answers are quick. The last line on stdout is the figures as JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.frame.pictures import drawing
from loadtest.core.arrivals import Arrivals, Pattern
from loadtest.core.clients import WireProtocol, connect
from loadtest.core.drive import Driver
from loadtest.core.figures import Run
from loadtest.core.records import Record
from loadtest.core.wire import Sampling
from loadtest.core.workload import Workload, parse_lengths
from tests.load.fake_server import VOCAB_SIZE, fake_server

RATE = 20.0
SERVICE_SECONDS = 0.05
HALF = 0.5
PERCENTILE = 90.0
_BLUE, _ORANGE, _GREY = "#0072B2", "#E69F00", "#555555"


@dataclass(frozen=True, slots=True)
class Seen:
    """Due times and latencies of both clients; `stall` is its begin and its length."""

    stall: tuple[float, float]
    open: list[tuple[float, float]]
    closed: list[tuple[float, float]]

    def num_slow(self, points: list[tuple[float, float]]) -> int:
        """Requests that waited longer than half the stall."""
        return sum(wait > HALF * self.stall[1] for _, wait in points)


def percentile(points: list[tuple[float, float]]) -> float:
    return float(np.percentile([wait for _, wait in points], PERCENTILE))


async def observe(*, seconds: float, stall_at: float, stall_seconds: float) -> Seen:
    """Runs both clients at once, each on its own server; both servers stall at the same time."""
    schedule = Arrivals(pattern=Pattern.CONSTANT, rate=RATE).schedule(seconds=seconds)
    plan = {"ttft": (SERVICE_SECONDS, SERVICE_SECONDS), "stall_at": stall_at, "stall_seconds": stall_seconds}
    with fake_server(**plan) as one, fake_server(**plan) as other:
        points = await asyncio.gather(
            _points(one, lambda driver: driver.open_loop(schedule)),
            _points(other, lambda driver: driver.closed_loop(1, seconds=seconds)),
        )
    return Seen((stall_at, stall_seconds), *points)


async def _points(target: str, drive: Callable[[Driver], Awaitable[Run]]) -> list[tuple[float, float]]:
    prompt, answer = (parse_lengths(text, "") for text in ("8", "1"))
    workload = Workload(prompt_tokens=prompt, max_tokens=answer, vocab_size=VOCAB_SIZE)
    async with connect(WireProtocol.ONWARD, target, "", Sampling()) as client:
        run = await drive(Driver(client, workload))
    return sorted((record.intended, _wait(record)) for record in run.records)


def _wait(record: Record) -> float:
    assert record.code == "OK", record
    return record.end_to_end_seconds


def draw_picture(seen: Seen) -> str:
    """Every request at the time it was due, and the percentiles of both clients, as SVG."""
    with drawing("omission", 7.0, 2.6) as (figure, svg):
        left, right = figure.subplots(1, 2)
        begin, length = seen.stall
        left.axvspan(begin, begin + length, color=_GREY, alpha=0.15, linewidth=0)
        shares = np.linspace(0.0, 100.0, 400)
        for points, color, mark, label in (
            (seen.open, _BLUE, "o", "open loop"),
            (seen.closed, _ORANGE, "x", "closed loop, one user"),
        ):
            waits = [1e3 * wait for _, wait in points]
            left.plot([at for at, _ in points], waits, mark, color=color, markersize=3, label=label)
            right.plot(shares, np.percentile(waits, shares), color=color)
        left.set_xlabel("seconds; grey: the server stalls")
        left.set_ylabel("latency, ms")
        left.legend(frameon=False, loc="upper left")
        right.set_xlabel("percentile")
        right.set_xlim(50.0, 100.5)
        right.set_ylabel("latency, ms")
    return svg.getvalue()


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.load.omission", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("build/load"))
    out: Path = parser.parse_args(arguments).out
    seen = asyncio.run(observe(seconds=8.0, stall_at=4.0, stall_seconds=1.0))
    out.mkdir(parents=True, exist_ok=True)
    (out / "omission.svg").write_text(draw_picture(seen), encoding="utf-8")
    figures = {
        name: {
            f"p{share:g}_ms": 1e3 * float(np.percentile([wait for _, wait in points], share)) for share in (50, 90, 99)
        }
        | {"requests": len(points), "longest_ms": 1e3 * max((wait for _, wait in points), default=math.nan)}
        for name, points in (("by_schedule", seen.open), ("one_after_the_other", seen.closed))
    }
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
