"""Minutes of load with cancels, and what grows in the server meanwhile: memory, descriptors, threads, tasks.

    python -m benchmarks.soak [--models DIR] [--minutes 10] [--warm-up-minutes 2] [--load 0.8] [--cancels 0.2]
        [--leak-mb-per-hour N] [--docs]

Capacity is measured first, closed loop; then requests arrive at random times at a share of it, of which every fifth is
cancelled, anywhere between its being sent and its end. The server's resident memory is read from outside, thirty times.
Requests take some for a while, those that are over leave K/V to those that begin like them, and the C library keeps
some of what was freed: more or less by chance, which would hide what is never given back. So no request arrives while
it is read, the C library has given back what it can, and what is mapped for K/V, which has its limit anyway, is counted
apart. After a warm-up the slope of the rest has a bound, at 95 %. Samples next to each other are alike, and pretending
otherwise would make any slope look certain: the bound comes from means over batches, see `slope`. When all is over
nothing may be held: no request, no K/V, and no descriptor, thread or task more than before.

With `--leak-mb-per-hour` the server leaks that much (`infra.leaking_server`), and the same check must find it: the
lower bound above zero, the upper above the limit. Exit status 1 when something grew or is held, or when a leak that was
put in is not found. The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import signal
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from prometheus_client.parser import text_string_to_metric_families
from scipy import stats

from benchmarks.frame.pictures import drawing
from benchmarks.infra.leaking_server import TASKS, VARIABLE
from loadtest.serving import Server, wait_served
from onward.v1 import generation_pb2 as pb
from onward.v1 import model_pb2
from onward.v1.generation_pb2_grpc import GenerationServiceStub
from onward.v1.model_pb2_grpc import ModelServiceStub

LIMIT_MB_PER_HOUR = 10.0
_SAMPLE_SECONDS = 1.0
_CAPACITY_SECONDS = 10.0
_CAPACITY_CLIENTS = 32
_NUM_LULLS = 30
_NUM_BATCHES = 12
_SETTLE_SECONDS = 30.0
_NUM_LOOKS = 5
_LOOK_SECONDS = 0.1
_HELD = ("onward_num_requests_running", "onward_num_requests_waiting", "onward_kv_cache_usage_ratio")
_GOOD_ENDS = {"OK": "answered", "CANCELLED": "cancelled"}
_DOCUMENT = Path("docs/soak.json")
_MEGABYTE = 1e6
_HOUR = 3600.0
_STOP_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Slope:
    """How fast something grows, in units an hour, and the bounds of a 95 % interval."""

    per_hour: float
    low: float
    high: float


def slope(seconds: Sequence[float], values: Sequence[float], num_batches: int = _NUM_BATCHES) -> Slope:
    """The least-squares slope of samples in time, with a 95 % interval by Student's t over the means of batches.

    Means over batches that are much longer than samples stay alike are nearly independent, whatever the samples are:
    what their residuals scatter by is what a slope may be off by, and there are so few of them that t makes room for
    not knowing that well. Where even they are alike, as memory is that grows by steps and stays there, their first
    autocorrelation widens the interval by as much as it would that of an autoregression.

    Args:
        seconds: when each sample was taken, rising.
        values: the samples.
        num_batches: how many batches; at least 4.

    Source: Law, "Simulation Modeling and Analysis", on batch means.
    """
    batches = [part for part in np.array_split(np.arange(len(values)), num_batches) if len(part)]
    times = np.array([np.mean(np.asarray(seconds, np.float64)[part]) for part in batches]) / _HOUR
    means = np.array([np.mean(np.asarray(values, np.float64)[part]) for part in batches])
    centred = times - times.mean()
    spread = float(centred @ centred)
    per_hour = float(centred @ means) / spread
    residuals = means - means.mean() - per_hour * centred
    freedom = len(batches) - 2
    scatter = float(residuals @ residuals)
    likeness = max(0.0, float(residuals[1:] @ residuals[:-1]) / scatter) if scatter else 0.0
    error = math.sqrt(scatter / freedom / spread * (1 + likeness) / (1 - likeness))
    half = float(stats.t.ppf(0.975, freedom)) * error
    return Slope(per_hour, per_hour - half, per_hour + half)


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


@dataclass(frozen=True, slots=True)
class Resident:
    """A process's resident memory in bytes: what is mapped for K/V, and the rest."""

    kv_bytes: int
    other_bytes: int

    @classmethod
    def of(cls, smaps: str) -> Resident:
        """Sums up what Linux tells in `/proc/PID/smaps`.

        K/V are known by being what must not come in huge pages (`service.engine.kv.pages`). Nor must stacks, which are
        counted with them: there are no more of them than threads.
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
        max_tokens = source.choice((4, 8, 16, 32))
        request = pb.GenerateStreamRequest(
            model=source.choice(self._models),
            text=f"{source.randrange(1, 29)} May {source.randrange(1900, 2100)}",
            sampling=pb.SamplingParams(temperature=1.0, seed=source.getrandbits(32)),
            stopping=pb.StoppingParams(max_tokens=max_tokens, ignore_eos=True),
        )
        call = self._stub.GenerateStream(request, timeout=120)
        # Tokens that it waits for before it is cancelled; -1 is at once, in the queue or in its prompt.
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


@dataclass(frozen=True, slots=True)
class Watched:
    """A server in a process of ours."""

    process: subprocess.Popen[str]
    address: Server

    def num_tasks(self) -> int:
        """Of its event loop; what its C library kept free has been given back then."""
        self.process.send_signal(signal.SIGUSR1)
        assert self.process.stdout is not None  # noqa: S101 (PIPE was asked for; this tells the type checker)
        return int(self.process.stdout.readline().removeprefix(TASKS))

    def held(self) -> float:
        """Requests that run or wait, and shares of K/V in use; 0 when nothing is held."""
        with urllib.request.urlopen(f"http://{self.address.metrics}/metrics", timeout=30) as answer:
            text = answer.read().decode()
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name in _HELD
        )

    def resident(self) -> Resident:
        """Its memory."""
        return Resident.of(Path(f"/proc/{self.process.pid}/smaps").read_text(encoding="utf-8", errors="replace"))

    def settle(self) -> float:
        """Waits while something is held that will be given back, as nobody asks; what is held after that."""
        until = time.monotonic() + _SETTLE_SECONDS
        while (held := self.held()) and time.monotonic() < until:
            time.sleep(_LOOK_SECONDS)
        return held

    def still(self) -> Still:
        """What it has while nobody asks, once all is given back that will be."""
        held = self.settle()
        samples, tasks = Samples(), []
        for _ in range(_NUM_LOOKS):
            # What ends just now, as the asking above does, is nothing that is kept.
            time.sleep(_LOOK_SECONDS)
            samples.take(self.process.pid, 0.0)
            tasks.append(self.num_tasks())
        return Still(held, min(samples.descriptors), min(samples.threads), min(tasks))


@dataclass(frozen=True, slots=True)
class Still:
    """A server that nobody asks: what is held all the same, and what it lives on."""

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
    """Puts load on a server and watches its process; figures, and what is wrong with them but for memory.

    Args:
        server: without keys.
        seconds: how long it is watched, under load but for the moments when its memory is read.
        warm_up_seconds: how long it is under load before.
        load: share of the capacity that requests arrive at.
        cancels: share of requests that are cancelled.
        capacity_seconds: how long capacity is measured before.

    Raises:
        RuntimeError: when requests that nobody waits for any more did not end.
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
    """What became of memory, read at those seconds.

    Raises:
        RuntimeError: when it was read too seldom to tell.
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
    """What must not be, whatever memory does."""
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
        if sys.stderr.isatty() or len(samples.seconds) % 30 == 0:
            told = f"{samples.seconds[-1]:5.0f} of {seconds:.0f} s, {samples.rss_bytes[-1] / _MEGABYTE:.1f} MB"
            sys.stderr.write(f"\r{told} " if sys.stderr.isatty() else f"{told}\n")
            sys.stderr.flush()
        await asyncio.sleep(_SAMPLE_SECONDS)


def judge(found: Mapping[str, Any], leak: float) -> tuple[str, bool]:
    """In words what memory does, and whether all is as it should be."""
    may_grow = found["mb_per_hour_high"] >= LIMIT_MB_PER_HOUR
    does_grow = may_grow and found["mb_per_hour_low"] > 0
    verdict = "leaks" if does_grow else "may leak" if may_grow else "bounded"
    is_well = not found["problems"] and not found["exit_status"]
    return verdict, is_well and (does_grow if leak else not may_grow)


def main(arguments: Sequence[str]) -> int:
    """Soaks, prints, and says whether memory is bounded."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", type=Path, default=Path("build/models"), metavar="DIR")
    parser.add_argument("--minutes", type=float, default=10.0, help="how long it is watched, after the warm-up")
    parser.add_argument("--warm-up-minutes", type=float, default=2.0)
    parser.add_argument("--load", type=float, default=0.8, help="share of capacity that is offered")
    parser.add_argument("--cancels", type=float, default=0.2, help="share of requests that are cancelled")
    parser.add_argument("--leak-mb-per-hour", type=float, default=0.0, help="put a leak in, which must be found")
    parser.add_argument("--docs", action="store_true", help="write figures and picture to docs/soak.json and .svg too")
    given = parser.parse_args(arguments)
    # By which the server in the child process is ended, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with server_process(given.models, given.leak_mb_per_hour) as server:
        found = asyncio.run(
            soak(
                server,
                seconds=given.minutes * 60,
                warm_up_seconds=given.warm_up_minutes * 60,
                load=given.load,
                cancels=given.cancels,
            )
        )
        found["leak_mb_per_hour"] = given.leak_mb_per_hour
        found["exit_status"] = stop(server.process)
    found["verdict"], is_as_it_should_be = judge(found, given.leak_mb_per_hour)
    _report(found, docs=given.docs)
    return 0 if is_as_it_should_be else 1


@contextmanager
def server_process(models: Path, leak: float = 0.0) -> Iterator[Watched]:
    """A server that leaks so many megabytes an hour; killed at the end of the block if it has not been stopped."""
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
    """Ends a server as an operator does; its exit status."""
    process.send_signal(signal.SIGTERM)
    return process.wait(_STOP_SECONDS)


def draw_picture(told: Mapping[str, Any]) -> str:
    """Memory in time of each run, and the line through it, as SVG."""
    colours = {"as it is": "#0072B2", "with a leak": "#D55E00"}
    with drawing("soak", 7.0, 2.4) as (figure, svg):
        axes = figure.subplots()
        for name, run in told.items():
            minutes = np.array(run["samples"]["seconds"]) / 60
            megabytes = np.array(run["samples"]["other_bytes"]) / _MEGABYTE
            put_in = f",\n{run['leak_mb_per_hour']:.0f} MB/h put in" if run["leak_mb_per_hour"] else ""
            low, high = run["mb_per_hour_low"], run["mb_per_hour_high"]
            label = f"{run['mb_per_hour']:+.1f} MB/h ({low:.1f} to {high:.1f}){put_in}"
            axes.plot(minutes, megabytes, ".", markersize=3, color=colours[name], label=label)
            line = megabytes.mean() + run["mb_per_hour"] / 60 * (minutes - minutes.mean())
            axes.plot(minutes, line, color=colours[name], linewidth=1.0)
        axes.set_xlabel("minutes under load")
        axes.set_ylabel("memory but K/V, MB")
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    return svg.getvalue()


def _report(found: dict[str, Any], *, docs: bool) -> None:
    samples = found.pop("samples")
    line = json.dumps(found)
    if docs:
        told = json.loads(_DOCUMENT.read_text(encoding="utf-8")) if _DOCUMENT.exists() else {}
        told["with a leak" if found["leak_mb_per_hour"] else "as it is"] = {**found, "samples": samples}
        _DOCUMENT.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
        _DOCUMENT.with_suffix(".svg").write_text(draw_picture(told), encoding="utf-8")
    sys.stderr.write(
        f"{found['verdict']}: {found['mb_per_hour']:.1f} MB/h, 95 % between {found['mb_per_hour_low']:.1f} and "
        f"{found['mb_per_hour_high']:.1f}; {found['ends']}; {'; '.join(found['problems']) or 'nothing is held'}\n"
    )
    sys.stdout.write(line + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
