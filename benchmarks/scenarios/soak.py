"""Leaks under load: growth of the server's memory, descriptors, threads and tasks in minutes of requests with cancels.

Capacity is measured first, closed loop; then requests arrive at random times at a share of it, every fifth of which is
canceled at a random point. The server's resident memory is read from outside, thirty times. Running requests, cached
K/V and freed memory that the C library keeps vary by chance and would hide a leak. So no request runs while memory is
read, the C library has trimmed its heap, and memory mapped for K/V, which is limited anyway, is counted apart. After a
warm-up the slope of the rest is bounded at 95 %, from batch means (`benchmarks.frame.statistics.slope`). At the end
the server must hold no request, no K/V, and no descriptor, thread or task more than before.

The control: a second server leaks `--leak-mb-per-hour` (`infra.leaking_server`), which the same check must find: lower
bound above zero, upper bound above the limit, and the growth over the first server's, with its interval, must hold what
was put in. Exit status 1 if something grew or is held, or if the control fails.
"""

from __future__ import annotations

import asyncio
import math
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from benchmarks.frame.pictures import drawing
from benchmarks.frame.rounds import say
from benchmarks.frame.scenario import Results, Run, Scenario, option
from benchmarks.frame.servers import num_descriptors, read_metrics
from benchmarks.frame.statistics import slope
from benchmarks.infra.leaking_server import TASKS, VARIABLE
from loadtest.serving import Server, wait_served
from onward.v1 import generation_pb2 as pb
from onward.v1 import model_pb2
from onward.v1.generation_pb2_grpc import GenerationServiceStub
from onward.v1.model_pb2_grpc import ModelServiceStub

LIMIT_MB_PER_HOUR = 10.0
_SAMPLE_SECONDS = 1.0
_SAMPLES_PER_LINE = 30
_CAPACITY_SECONDS = 10.0
_CAPACITY_CLIENTS = 32
_NUM_LULLS = 30
_NUM_BATCHES = 12
_SETTLE_SECONDS = 30.0
_NUM_LOOKS = 5
_LOOK_SECONDS = 0.1
_HELD = ("onward_num_requests_running", "onward_num_requests_waiting", "onward_kv_cache_usage_ratio")
_GOOD_ENDS = {"OK": "answered", "CANCELLED": "canceled"}
_MEGABYTE = 1e6
_STOP_SECONDS = 60.0
_CLEAN, _SEEDED = "as it is", "with a leak"


@dataclass(slots=True)
class Samples:
    """The process, second by second."""

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
        self.descriptors.append(num_descriptors(pid))
        self.threads.append(int(fields["Threads"]))


@dataclass(frozen=True, slots=True)
class Resident:
    """A process's resident memory in bytes: what is mapped for K/V, and the rest."""

    kv_bytes: int
    other_bytes: int

    @classmethod
    def of(cls, smaps: str) -> Resident:
        """Sums up `/proc/PID/smaps`.

        K/V is mapped without huge pages (`service.engine.kv.pages`). So are stacks, which are counted with it: there
        are no more of them than threads.
        """
        totals, size = {True: 0, False: 0}, 0
        for line in smaps.splitlines():
            name, _, value = line.partition(":")
            if name == "Rss":
                size = int(value.split()[0]) * 1024
            elif name == "VmFlags":
                totals["nh" in value.split()] += size
        return cls(kv_bytes=totals[True], other_bytes=totals[False])


class Load:
    """Requests to every model of a server, some of which are canceled."""

    def __init__(self, channel: grpc.aio.Channel, models: Sequence[str], cancels: float, seed: int = 0) -> None:
        self._stub = GenerationServiceStub(channel)
        self._models = models
        self._cancels = cancels
        self._source = random.Random(seed)  # noqa: S311 (not for secrets)
        self.ends: Counter[str] = Counter()

    async def one(self) -> None:
        """One request, from its beginning to its end."""
        source = self._source
        max_tokens = source.choice((4, 8, 16, 32))
        request = pb.GenerateStreamRequest(
            model=source.choice(self._models),
            text=f"{source.randrange(1, 29)} May {source.randrange(1900, 2100)}",
            sampling=pb.SamplingParams(temperature=1.0, seed=source.getrandbits(32)),
            stopping=pb.StoppingParams(max_tokens=max_tokens, ignore_eos=True),
        )
        call = self._stub.GenerateStream(request, timeout=120)
        # Tokens until the cancel; -1 is at once, in the queue or during prefill.
        patience = source.randrange(-1, max_tokens) if source.random() < self._cancels else None
        if patience == -1:
            call.cancel()
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
        """Requests a second in a closed loop."""
        until = time.monotonic() + seconds
        before = self.ends.total()

        async def keep_asking() -> None:
            while time.monotonic() < until:
                await self.one()

        began = time.monotonic()
        await asyncio.gather(*(keep_asking() for _ in range(num_clients)))
        return (self.ends.total() - before) / (time.monotonic() - began)

    async def open_loop(self, rate: float, seconds: float) -> None:
        """Poisson arrivals at a rate, whether or not earlier requests have ended."""
        tasks: set[asyncio.Task[None]] = set()
        due, end = time.monotonic(), time.monotonic() + seconds
        while (due := due + self._source.expovariate(rate)) < end:
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            task = asyncio.create_task(self.one())
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        await asyncio.gather(*tasks)


@dataclass(frozen=True, slots=True)
class Watched:
    """A server in a process of ours."""

    process: subprocess.Popen[str]
    address: Server

    def num_tasks(self) -> int:
        """Of its event loop; the server trims its heap first."""
        self.process.send_signal(signal.SIGUSR1)
        assert self.process.stdout is not None  # noqa: S101 (PIPE was asked for; for the type checker)
        return int(self.process.stdout.readline().removeprefix(TASKS))

    def held(self) -> float:
        """Requests that run or wait, and shares of K/V in use; 0 if nothing is held."""
        return float(sum(each.value for each in read_metrics(self.address.metrics) if each.name in _HELD))

    def resident(self) -> Resident:
        """Its memory."""
        return Resident.of(Path(f"/proc/{self.process.pid}/smaps").read_text(encoding="utf-8", errors="replace"))

    def settle(self) -> float:
        """Waits until everything is released, or for a time; what is held then."""
        until = time.monotonic() + _SETTLE_SECONDS
        while (held := self.held()) and time.monotonic() < until:
            time.sleep(_LOOK_SECONDS)
        return held

    def still(self) -> Still:
        """An idle server's resources, once everything is released."""
        held = self.settle()
        samples, tasks = Samples(), []
        for _ in range(_NUM_LOOKS):
            # The least of several: connections of the metrics reader are closing.
            time.sleep(_LOOK_SECONDS)
            samples.take(self.process.pid, 0.0)
            tasks.append(self.num_tasks())
        return Still(held, min(samples.descriptors), min(samples.threads), min(tasks))


@dataclass(frozen=True, slots=True)
class Still:
    """An idle server: what is held, and its resources."""

    held: float
    descriptors: int
    threads: int
    tasks: int


async def soak(
    server: Watched,
    *,
    seconds: float,
    warm_up_seconds: float,
    load: float,
    cancels: float,
    capacity_seconds: float = _CAPACITY_SECONDS,
) -> dict[str, Any]:
    """Loads a server and samples its process; figures, and problems except memory's.

    Args:
        server: without keys.
        seconds: measured, under load except when memory is read.
        warm_up_seconds: under load before.
        load: share of the capacity.
        cancels: share of requests that are canceled.
        capacity_seconds: for measuring the capacity.

    Raises:
        RuntimeError: if canceled requests do not end.
    """
    samples, times, memory = Samples(), list[float](), list[Resident]()
    async with grpc.aio.insecure_channel(server.address.target) as channel:
        about = ModelServiceStub(channel)
        names = [model.name for model in (await about.ListModels(model_pb2.ListModelsRequest())).models]
        asking = Load(channel, names, cancels)
        capacity = await asking.closed_loop(_CAPACITY_CLIENTS, capacity_seconds)
        before = await asyncio.to_thread(server.still)
        asking.ends.clear()
        began, all_seconds = time.monotonic(), warm_up_seconds + seconds
        watching = asyncio.create_task(_watch(server.process.pid, samples, began, all_seconds))
        while (left := all_seconds - (time.monotonic() - began)) > 0:
            await asking.open_loop(load * capacity, min(left, seconds / _NUM_LULLS))
            await asyncio.to_thread(server.settle)
            await asyncio.to_thread(server.num_tasks)
            if time.monotonic() - began > warm_up_seconds:
                times.append(time.monotonic() - began)
                memory.append(server.resident())
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching
        after = await asyncio.to_thread(server.still)
    found = {
        "seconds": seconds,
        "capacity_per_second": capacity,
        "offered_per_second": load * capacity,
        "ends": dict(asking.ends),
        "before": asdict(before),
        "after": asdict(after),
        "most_resident_mb": max(samples.rss_bytes) / _MEGABYTE,
        "most_threads": max(samples.threads),
        "problems": problems(asking.ends, before, after),
    }
    return found | _memory(times, memory)


def _memory(times: Sequence[float], memory: Sequence[Resident]) -> dict[str, Any]:
    """Growth of memory, read at those seconds.

    Raises:
        RuntimeError: if there are too few samples.
    """
    if len(times) < _NUM_BATCHES:
        raise RuntimeError(f"memory was read {len(times)} times, {_NUM_BATCHES} are needed: requests did not end")
    counted, kv = [each.other_bytes for each in memory], [each.kv_bytes for each in memory]
    growth = slope(times, counted)
    return {
        "memory_mb": {"first": counted[0] / _MEGABYTE, "last": counted[-1] / _MEGABYTE},
        "kv_mb": {"least": min(kv) / _MEGABYTE, "most": max(kv) / _MEGABYTE},
        "mb_per_hour": growth.per_hour / _MEGABYTE,
        "mb_per_hour_low": growth.low / _MEGABYTE,
        "mb_per_hour_high": growth.high / _MEGABYTE,
        "samples": {"seconds": [round(each, 1) for each in times], "other_bytes": counted, "kv_bytes": kv},
    }


def problems(ends: Mapping[str, int], before: Still, after: Still) -> list[str]:
    """Unexpected ends, and resources that are held."""
    found = [f"{count} requests ended with {code}" for code, count in sorted(ends.items()) if code not in _GOOD_ENDS]
    found += [f"no request was {what}" for code, what in _GOOD_ENDS.items() if not ends.get(code)]
    found += [f"{after.held:g} of requests and K/V are held at the end"] if after.held else []
    for name in ("descriptors", "threads", "tasks"):
        was, is_now = getattr(before, name), getattr(after, name)
        found += [f"{is_now} {name} at the end, {was} before"] if is_now > was else []
    return found


async def _watch(pid: int, samples: Samples, began: float, seconds: float) -> None:
    while True:
        samples.take(pid, began)
        if len(samples.seconds) % _SAMPLES_PER_LINE == 0:
            say(f"{samples.seconds[-1]:5.0f} of {seconds:.0f} s, {samples.rss_bytes[-1] / _MEGABYTE:.1f} MB")
        await asyncio.sleep(_SAMPLE_SECONDS)


def judge(found: Mapping[str, Any], leak: float) -> tuple[str, bool]:
    """Verdict on memory, and whether the soak passed."""
    may_grow = found["mb_per_hour_high"] >= LIMIT_MB_PER_HOUR
    does_grow = may_grow and found["mb_per_hour_low"] > 0
    verdict = "leaks" if does_grow else "may leak" if may_grow else "bounded"
    is_well = not found["problems"] and not found["exit_status"]
    return verdict, is_well and (does_grow if leak else not may_grow)


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakSettings:
    """How long, and how much load."""

    models: Path = option(Path("build/models"), "folder of artifacts")  # noqa: RUF009 (a field)
    minutes: float = option(10.0, "measured, after the warm-up", above=0.0, quick=0.5)
    warm_up_minutes: float = option(2.0, "of warm-up", least=0.0, quick=0.1)
    load: float = option(0.8, "share of the capacity", above=0.0)
    cancels: float = option(0.2, "share of requests that are canceled", least=0.0)
    leak_mb_per_hour: float = option(20.0, "of the control, which must be found; 0: none", least=0.0)


def measure(settings: SoakSettings, _: Run) -> dict[str, Any]:
    """Soaks a server, then one that leaks."""
    runs = {_CLEAN: _measure_one(settings, 0.0)}
    if not settings.leak_mb_per_hour:
        return {"runs": runs, "recovered": None, "passed": runs[_CLEAN]["passed"]}
    runs[_SEEDED] = _measure_one(settings, settings.leak_mb_per_hour)
    recovered = difference(runs[_SEEDED], runs[_CLEAN])
    holds = recovered["low"] <= settings.leak_mb_per_hour <= recovered["high"]
    return {"runs": runs, "recovered": recovered, "passed": holds and all(run["passed"] for run in runs.values())}


def difference(seeded: Results, clean: Results) -> dict[str, float]:
    """Growth of one run over the other's in MB an hour, with a 95 % interval; their errors are independent."""
    middle = seeded["mb_per_hour"] - clean["mb_per_hour"]
    half = math.hypot(*((run["mb_per_hour_high"] - run["mb_per_hour_low"]) / 2 for run in (seeded, clean)))
    return {"mb_per_hour": middle, "low": middle - half, "high": middle + half}


def _measure_one(settings: SoakSettings, leak: float) -> dict[str, Any]:
    with server_process(settings.models, leak) as server:
        found = asyncio.run(
            soak(
                server,
                seconds=settings.minutes * 60,
                warm_up_seconds=settings.warm_up_minutes * 60,
                load=settings.load,
                cancels=settings.cancels,
            )
        )
        found |= {"leak_mb_per_hour": leak, "exit_status": stop(server.process)}
    found["verdict"], found["passed"] = judge(found, leak)
    say(describe(found))
    return found


def describe(run: Results) -> str:
    """One run's verdict on memory, how its requests ended, and its problems."""
    return (
        f"{run['verdict']}: {run['mb_per_hour']:.1f} MB an hour, 95 % between {run['mb_per_hour_low']:.1f} and "
        f"{run['mb_per_hour_high']:.1f}; {run['ends']}; {'; '.join(run['problems']) or 'nothing is held'}"
    )


@contextmanager
def server_process(models: Path, leak: float = 0.0) -> Iterator[Watched]:
    """A server with a seeded leak in MB an hour; killed at the end of the block if still running."""
    command = [sys.executable, "-m", "benchmarks.infra.leaking_server", "serve", "--models", str(models), "--port", "0"]
    command += ["--metrics-port", "0", "--log-level", "error"]
    with subprocess.Popen(
        ["/usr/bin/env", f"{VARIABLE}={leak}", *command], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield Watched(process, wait_served(process))
        finally:
            process.kill()


def stop(process: subprocess.Popen[str]) -> int:
    """SIGTERM; the exit status."""
    process.send_signal(signal.SIGTERM)
    return process.wait(_STOP_SECONDS)


def render(results: Results) -> str:
    """The document: a paragraph for each run."""
    lines = ["# Soak", "", f"Memory without K/V, on {results['machine']['processor']}."]
    for name, run in results["runs"].items():
        seeded = f"; a leak of {run['leak_mb_per_hour']:g} MB an hour was seeded" if run["leak_mb_per_hour"] else ""
        lines += [
            "",
            f"**{name.capitalize()}**: {run['seconds'] / 60:g} minutes at {run['offered_per_second']:.0f} requests a "
            f"second, of {run['capacity_per_second']:.0f} that the server can answer{seeded}.",
            f"{describe(run)}.",
        ]
    if (more := results["recovered"]) is not None:
        lines += [
            "",
            f"The control grew {more['mb_per_hour']:.1f} MB an hour more ({more['low']:.1f} to {more['high']:.1f}).",
        ]
    return "\n".join(lines)


def draw_picture(results: Results) -> str:
    """Memory over time of every run, and the line through it."""
    with drawing("soak", 7.0, 2.4) as (figure, svg):
        axes = figure.subplots()
        for name, run in results["runs"].items():
            color = {_CLEAN: "#0072B2", _SEEDED: "#D55E00"}[name]
            minutes = np.array(run["samples"]["seconds"]) / 60
            megabytes = np.array(run["samples"]["other_bytes"]) / _MEGABYTE
            seeded = f",\n{run['leak_mb_per_hour']:.0f} MB/h seeded" if run["leak_mb_per_hour"] else ""
            low, high = run["mb_per_hour_low"], run["mb_per_hour_high"]
            label = f"{run['mb_per_hour']:+.1f} MB/h ({low:.1f} to {high:.1f}){seeded}"
            axes.plot(minutes, megabytes, ".", markersize=3, color=color, label=label)
            line = megabytes.mean() + run["mb_per_hour"] / 60 * (minutes - minutes.mean())
            axes.plot(minutes, line, color=color, linewidth=1.0)
        axes.set_xlabel("minutes under load")
        axes.set_ylabel("memory without K/V, MB")
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    return svg.getvalue()


SCENARIO = Scenario(
    __name__,
    SoakSettings,
    measure,
    render,
    draw_picture,
    caption="Memory over time",
    printed=("recovered", "passed"),
    must_hold=True,
)
