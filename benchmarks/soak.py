"""A server under load for a long time, and what grows in it: memory, descriptors, threads.

    python -m benchmarks.soak [--models DIR] [--minutes 10] [--warm-up-minutes 2] [--load 0.8] [--cancels 0.2]
        [--leak-mb-per-hour N] [--docs]

Capacity is measured first, closed loop; then requests arrive at random times at a share of it, of which every fifth is
cancelled at a random moment. The server's resident memory is read every second from outside. Its slope has a bound, at
95 %, from a block bootstrap: samples next to each other are alike, and pretending otherwise would make any slope look
certain. With `--leak-mb-per-hour` the server leaks that much (`benchmarks.leaky_server`), and the same check must find
it.

Exit status 1 when memory may grow by more than the limit, or when a leak that was put in is not found. The last line of
stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from benchmarks.leaky_server import VARIABLE
from benchmarks.serving import wait_ready
from proto.onward.v1 import generation_pb2 as pb
from proto.onward.v1 import model_pb2
from proto.onward.v1.generation_pb2_grpc import GenerationServiceStub
from proto.onward.v1.model_pb2_grpc import ModelServiceStub

LIMIT_MB_PER_HOUR = 10.0
_SAMPLE_SECONDS = 1.0
_CAPACITY_SECONDS = 10.0
_CAPACITY_CLIENTS = 32
_BLOCK_SECONDS = 45
_NUM_RESAMPLES = 2000
_MEGABYTE = 1e6
_HOUR = 3600.0
_STOP_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Slope:
    """How fast something grows, in units an hour, and the bounds of a 95 % interval."""

    per_hour: float
    low: float
    high: float


def slope(
    seconds: Sequence[float], values: Sequence[float], block_seconds: float = _BLOCK_SECONDS, seed: int = 0
) -> Slope:
    """The least-squares slope of samples in time, with an interval from a moving-block bootstrap of its residuals.

    Args:
        seconds: when each sample was taken, rising.
        values: the samples.
        block_seconds: how long neighbouring samples are alike; blocks of residuals are drawn as long as that.
        seed: of the draws.

    Source: Künsch, "The Jackknife and the Bootstrap for General Stationary Observations" (1989).
    """
    times = np.asarray(seconds, np.float64) / _HOUR
    observed = np.asarray(values, np.float64)
    line = np.polynomial.polynomial.polyfit(times, observed, 1)
    fitted = line[0] + line[1] * times
    residuals = observed - fitted
    step = float(np.median(np.diff(times))) * _HOUR
    size = int(min(max(1, round(block_seconds / step)), len(residuals) // 2))
    source = np.random.default_rng(seed)
    num_blocks = -(-len(residuals) // size)
    starts = source.integers(0, len(residuals) - size + 1, (_NUM_RESAMPLES, num_blocks))
    drawn = residuals[(starts[..., None] + np.arange(size)).reshape(_NUM_RESAMPLES, -1)[:, : len(residuals)]]
    centred = times - times.mean()
    slopes = line[1] + (drawn - drawn.mean(axis=1, keepdims=True)) @ centred / (centred @ centred)
    low, high = np.percentile(slopes, (2.5, 97.5))
    return Slope(float(line[1]), float(low), float(high))


@dataclass(slots=True)
class Samples:
    """What the process looked like, second by second."""

    seconds: list[float] = field(default_factory=list)
    rss_bytes: list[int] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)

    def take(self, pid: int, began: float) -> None:
        """Reads /proc."""
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
        fields = {
            name: value.split()[0]
            for name, _, value in (line.partition(":") for line in status.splitlines())
            if value.strip()
        }
        self.seconds.append(time.monotonic() - began)
        self.rss_bytes.append(int(fields["VmRSS"]) * 1024)
        self.descriptors.append(len(list(Path(f"/proc/{pid}/fd").iterdir())))
        self.threads.append(int(fields["Threads"]))

    def after(self, seconds: float) -> Samples:
        """Those that were taken later than that."""
        first = next((index for index, each in enumerate(self.seconds) if each >= seconds), len(self.seconds))
        return Samples(self.seconds[first:], self.rss_bytes[first:], self.descriptors[first:], self.threads[first:])


class Load:
    """Requests to every model of a server, some of which are cancelled."""

    def __init__(self, channel: grpc.aio.Channel, models: Sequence[str], cancels: float, seed: int = 0) -> None:
        self._stub = GenerationServiceStub(channel)
        self._models = models
        self._cancels = cancels
        self._source = random.Random(seed)  # noqa: S311 (not for secrets)
        self.ends: Counter[str] = Counter()

    async def one(self) -> None:
        """One request, from its beginning to its end."""
        source = self._source
        request = pb.GenerateStreamRequest(
            model=source.choice(self._models),
            text=f"{source.randrange(1, 29)} May {source.randrange(1900, 2100)}",
            sampling=pb.SamplingParams(temperature=1.0, seed=source.getrandbits(32)),
            stopping=pb.StoppingParams(max_tokens=source.choice((4, 8, 16, 32)), ignore_eos=True),
        )
        call = self._stub.GenerateStream(request, timeout=120)
        patience = source.randrange(12) if source.random() < self._cancels else None
        try:
            count = 0
            async for _ in call:
                if patience is not None and count >= patience:
                    call.cancel()
                count += 1
        except asyncio.CancelledError:
            self.ends["CANCELLED"] += 1
        except grpc.aio.AioRpcError as error:
            self.ends[error.code().name] += 1
        else:
            self.ends["OK"] += 1

    async def closed_loop(self, num_clients: int, seconds: float) -> float:
        """Requests that end in a second when so many clients ask on and on."""
        until = time.monotonic() + seconds
        before = self.ends.total()

        async def ask_on() -> None:
            while time.monotonic() < until:
                await self.one()

        began = time.monotonic()
        await asyncio.gather(*(ask_on() for _ in range(num_clients)))
        return (self.ends.total() - before) / (time.monotonic() - began)

    async def open_loop(self, rate: float, seconds: float) -> None:
        """Requests at random times, so many a second on average, whether or not those before them are over."""
        tasks: set[asyncio.Task[None]] = set()
        due, end = time.monotonic(), time.monotonic() + seconds
        while (due := due + self._source.expovariate(rate)) < end:
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            task = asyncio.create_task(self.one())
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        await asyncio.gather(*tasks)


async def soak(
    target: str,
    pid: int,
    *,
    seconds: float,
    warm_up_seconds: float,
    load: float,
    cancels: float,
    capacity_seconds: float = _CAPACITY_SECONDS,
) -> dict[str, Any]:
    """Puts load on a server and watches its process; figures, without a verdict.

    Args:
        target: "host:port" of a server without keys.
        pid: of its process.
        seconds: how long it is watched, warm-up included.
        warm_up_seconds: how much of that does not count.
        load: share of the capacity that requests arrive at.
        cancels: share of requests that are cancelled.
        capacity_seconds: how long capacity is measured before.
    """
    async with grpc.aio.insecure_channel(target) as channel:
        listed = await ModelServiceStub(channel).ListModels(model_pb2.ListModelsRequest())
        asking = Load(channel, [model.name for model in listed.models], cancels)
        capacity = await asking.closed_loop(_CAPACITY_CLIENTS, capacity_seconds)
        samples, began = Samples(), time.monotonic()
        before = Samples()
        before.take(pid, began)
        asking.ends.clear()

        async def watch() -> None:
            while True:
                samples.take(pid, began)
                if sys.stderr.isatty() or len(samples.seconds) % 30 == 0:
                    sys.stderr.write(
                        f"\r{samples.seconds[-1]:5.0f} of {seconds:.0f} s, {samples.rss_bytes[-1] / _MEGABYTE:.1f} MB "
                    )
                    sys.stderr.flush()
                await asyncio.sleep(_SAMPLE_SECONDS)

        watching = asyncio.create_task(watch())
        await asking.open_loop(load * capacity, seconds)
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching
        sys.stderr.write("\n")
    after = Samples()
    after.take(pid, began)
    counted = samples.after(warm_up_seconds)
    growth = slope(counted.seconds, counted.rss_bytes)
    return {
        "seconds": seconds,
        "capacity_per_second": capacity,
        "offered_per_second": load * capacity,
        "ends": dict(asking.ends),
        "rss_mb": {"first": counted.rss_bytes[0] / _MEGABYTE, "last": counted.rss_bytes[-1] / _MEGABYTE},
        "rss_mb_per_hour": growth.per_hour / _MEGABYTE,
        "rss_mb_per_hour_low": growth.low / _MEGABYTE,
        "rss_mb_per_hour_high": growth.high / _MEGABYTE,
        "descriptors": {"before": before.descriptors[0], "after": after.descriptors[0]},
        "threads": {"before": before.threads[0], "after": after.threads[0], "most": max(samples.threads)},
        "samples": [counted.seconds, counted.rss_bytes],
    }


def main(arguments: Sequence[str]) -> int:
    """Soaks, prints, and says whether memory is bounded."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", type=Path, default=Path("build/models"), metavar="DIR")
    parser.add_argument("--minutes", type=float, default=10.0, help="warm-up included")
    parser.add_argument("--warm-up-minutes", type=float, default=2.0)
    parser.add_argument("--load", type=float, default=0.8, help="share of capacity that is offered")
    parser.add_argument("--cancels", type=float, default=0.2, help="share of requests that are cancelled")
    parser.add_argument("--leak-mb-per-hour", type=float, default=0.0, help="put a leak in, which must be found")
    parser.add_argument("--docs", action="store_true", help="write the report to docs/soak.json too")
    given = parser.parse_args(arguments)
    module, environment = "service", None
    if given.leak_mb_per_hour:
        module = "benchmarks.leaky_server"
        environment = {VARIABLE: str(given.leak_mb_per_hour)}
    with server_process(given.models, module, environment) as (process, target):
        found = asyncio.run(
            soak(
                target,
                process.pid,
                seconds=given.minutes * 60,
                warm_up_seconds=given.warm_up_minutes * 60,
                load=given.load,
                cancels=given.cancels,
            )
        )
        found["leak_mb_per_hour"] = given.leak_mb_per_hour
        found["exit_status"] = stop(process)
    has_grown = found["rss_mb_per_hour_high"] >= LIMIT_MB_PER_HOUR
    is_found = found["rss_mb_per_hour_low"] > 0 and has_grown
    found["verdict"] = "leaks" if is_found else "may leak" if has_grown else "bounded"
    _report(found, docs=given.docs)
    if given.leak_mb_per_hour:
        return 0 if has_grown else 1
    return 1 if has_grown or found["exit_status"] else 0


@contextmanager
def server_process(
    models: Path, module: str, environment: Mapping[str, str] | None
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server and its "host:port"; killed at the end of the block if it has not been stopped."""
    command = [sys.executable, "-m", module, "serve", "--models", str(models), "--port", "0"]
    command += ["--no-metrics", "--log-level", "error"]
    settings = [f"{name}={value}" for name, value in (environment or {}).items()]
    with subprocess.Popen(["/usr/bin/env", *settings, *command], stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process, wait_ready(process)
        finally:
            process.kill()


def stop(process: subprocess.Popen[str]) -> int:
    """Ends a server as an operator does; its exit status."""
    process.send_signal(signal.SIGTERM)
    return process.wait(_STOP_SECONDS)


def _report(found: dict[str, Any], *, docs: bool) -> None:
    seconds, values = found.pop("samples")
    line = json.dumps(found)
    if docs:
        # A sample in ten seconds is enough to see, or to refit.
        kept = {"seconds": [round(each, 1) for each in seconds[::10]], "rss_bytes": values[::10]}
        Path("docs/soak.json").write_text(json.dumps({**found, "samples": kept}, indent=1) + "\n", encoding="utf-8")
    sys.stderr.write(
        f"{found['verdict']}: {found['rss_mb_per_hour']:.1f} MB/h, 95 % between {found['rss_mb_per_hour_low']:.1f} and "
        f"{found['rss_mb_per_hour_high']:.1f}; {found['ends']}\n"
    )
    sys.stdout.write(line + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
