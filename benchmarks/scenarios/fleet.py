"""What each further server costs Envoy and Prometheus: memory, processor time, descriptors, by number of servers.

First one server: time until it serves, its memory, its descriptors, its artifact's size, and the samples of its
metrics. Then, for each number of servers, a real Envoy in front of so many addresses of one process that answers
health checks (`infra.clock_server`), and a real Prometheus that scrapes the server's metrics at as many addresses. At
last, in front of two, Envoy's processor time for a unary call. The cost of one more server is the slope from the
smallest number to the largest.
"""

from __future__ import annotations

import asyncio
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.frame.errors import ArgumentError
from benchmarks.frame.models import METRICS
from benchmarks.frame.rounds import say
from benchmarks.frame.scenario import ModelSettings, Results, Run, Scenario, option
from benchmarks.frame.servers import cpu_seconds, fetch_metrics, num_descriptors, proportional_bytes
from benchmarks.frame.streams import connected
from benchmarks.frame.tables import microseconds, milliseconds, subject, table
from benchmarks.infra.clock_server import addresses, clock_server
from benchmarks.infra.envoy import CLUSTER, CLUSTER_BY_KEY, Envoy, balancing
from benchmarks.infra.prometheus import Prometheus, scraping
from onward.v1 import generation_pb2 as pb

_MEGABYTE, _KILOBYTE = 1e6, 1e3
_WARM_UP_SCRAPES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSettings(ModelSettings):
    """What is measured."""

    batch: int = option(8)
    servers: tuple[int, ...] = option((2, 50, 200), "numbers of servers, rising", least=1, quick=(2, 10))
    duration: float = option(30.0, "seconds at each number of servers", flag="seconds", above=0.0, quick=2.0)
    scrape_seconds: float = option(5.0, quick=0.5)
    calls: int = option(5000, quick=160)
    callers: int = option(16)


def measure(settings: FleetSettings, run: Run) -> dict[str, Any]:
    """All of it.

    Raises:
        ArgumentError: if the numbers of servers are fewer than two, or do not rise.
    """
    if len(settings.servers) < 2 or list(settings.servers) != sorted(set(settings.servers)):
        raise ArgumentError(f"--servers must be two rising numbers or more, got {settings.servers}")
    server, metrics = measure_server(settings, run)
    envoys = [measure_envoy(number, settings) for number in settings.servers]
    prometheuses = [measure_prometheus(number, metrics, settings) for number in settings.servers]
    return judge(server, envoys, prometheuses, measure_calls(settings))


def judge(
    server: Mapping[str, float],
    envoys: Sequence[Mapping[str, float]],
    prometheuses: Sequence[Mapping[str, float]],
    call_cpu_seconds: float,
) -> dict[str, Any]:
    """Costs of one more server, from figures for each number of them, the smallest first."""
    return {
        "server": {**server, "cpu_seconds_per_check": _slope(envoys, "checks_per_second", "server_cpu_share")},
        "envoy": {
            "by_servers": list(envoys),
            "base_bytes": envoys[0]["pss_bytes"],
            "bytes_per_server": _slope(envoys, "servers", "pss_bytes"),
            "descriptors_per_server": _slope(envoys, "servers", "descriptors"),
            "cpu_seconds_per_check": _slope(envoys, "checks_per_second", "cpu_share"),
            "cpu_seconds_per_call": call_cpu_seconds,
        },
        "prometheus": {
            "by_servers": list(prometheuses),
            "base_bytes": prometheuses[0]["pss_bytes"],
            "bytes_per_series": _slope(prometheuses, "series", "pss_bytes"),
            "cpu_seconds_per_sample": _slope(prometheuses, "samples_per_second", "cpu_share"),
            "rule_seconds_per_server": _slope(prometheuses, "servers", "rule_seconds"),
        },
    }


def _slope(found: Sequence[Mapping[str, float]], cause: str, effect: str) -> float:
    """Effect of one more of the cause, from first to last; below 0 it is noise."""
    first, last = found[0], found[-1]
    return max(0.0, (last[effect] - first[effect]) / (last[cause] - first[cause]))


def measure_server(settings: FleetSettings, run: Run) -> tuple[dict[str, float], bytes]:
    """One server's figures, and its metrics page after a request."""
    model = run.subject(settings, settings.batch)
    began = time.perf_counter()
    with model.served(*METRICS) as server:
        start_seconds = time.perf_counter() - began
        asyncio.run(_ask(server.target, 1, 4, pb.StoppingParams(max_tokens=4)))
        metrics = fetch_metrics(server.metrics)
        found = {
            "start_seconds": start_seconds,
            "pss_bytes": proportional_bytes(server.pid),
            "descriptors": num_descriptors(server.pid),
            "artefact_bytes": sum(file.stat().st_size for file in model.folder.iterdir()),
            "samples": count_samples(metrics),
            "metrics_bytes": len(metrics),
        }
    return found, metrics


def count_samples(metrics: bytes) -> int:
    """In a metrics page."""
    return sum(bool(line) and not line.startswith(b"#") for line in metrics.splitlines())


def measure_envoy(number: int, settings: FleetSettings) -> dict[str, float]:
    """Envoy in front of so many idle servers."""
    say(f"Envoy before {number} servers")
    with healthy_server(number) as (targets, server_pid), _envoy(targets) as envoy:
        checks, began = _num_checks(envoy), time.perf_counter()
        before = [cpu_seconds(pid) for pid in (envoy.pid, server_pid)]
        time.sleep(settings.duration)
        seconds = time.perf_counter() - began
        shares = [(cpu_seconds(pid) - old) / seconds for pid, old in zip((envoy.pid, server_pid), before, strict=True)]
        return {
            "servers": number,
            "checks_per_second": (_num_checks(envoy) - checks) / seconds,
            "cpu_share": shares[0],
            "server_cpu_share": shares[1],
            "pss_bytes": proportional_bytes(envoy.pid),
            "descriptors": num_descriptors(envoy.pid),
        }


def measure_calls(settings: FleetSettings) -> float:
    """Envoy's processor seconds for each unary call."""
    say("calls through Envoy")
    with healthy_server(2) as (targets, _), _envoy(targets) as envoy:
        asyncio.run(_ask(envoy.target, settings.callers, settings.callers))
        before = cpu_seconds(envoy.pid)
        asyncio.run(_ask(envoy.target, settings.callers, settings.calls))
        return (cpu_seconds(envoy.pid) - before) / settings.calls


def measure_prometheus(number: int, metrics: bytes, settings: FleetSettings) -> dict[str, float]:
    """Prometheus beside so many servers with the same metrics."""
    say(f"Prometheus beside {number} servers")
    with (
        exposing(metrics, addresses(number)) as targets,
        tempfile.TemporaryDirectory(prefix="onward-prometheus-") as folder,
        scraping(targets, Path(folder), interval_seconds=settings.scrape_seconds) as prometheus,
    ):
        prometheus.wait_scraped(time.time() + _WARM_UP_SCRAPES * settings.scrape_seconds)
        before, began = cpu_seconds(prometheus.pid), time.perf_counter()
        time.sleep(settings.duration)
        cpu_share = (cpu_seconds(prometheus.pid) - before) / (time.perf_counter() - began)
        series = prometheus.number('sum(scrape_samples_scraped{job="onward"})')
        return {
            "servers": number,
            "series": series,
            "samples_per_second": series / settings.scrape_seconds,
            "cpu_share": cpu_share,
            "pss_bytes": proportional_bytes(prometheus.pid),
            "rule_seconds": rule_seconds(prometheus),
        }


def rule_seconds(prometheus: Prometheus) -> float:
    """Seconds of all rules' last evaluation, one after the other."""
    return sum(float(rule["evaluationTime"]) for rule in prometheus.rules())


@contextmanager
def healthy_server(number: int) -> Iterator[tuple[list[str], int]]:
    """A `benchmarks.infra.clock_server` at so many addresses, "host:port" each, and its process."""
    with clock_server(number) as server:
        port = server.target.rpartition(":")[2]
        yield [f"{address}:{port}" for address in addresses(number)], server.pid


@contextmanager
def exposing(metrics: bytes, hosts: Sequence[str]) -> Iterator[list[str]]:
    """Answers every HTTP request at these addresses with one page until the block ends; yields "host:port" each."""
    head = f"HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4\r\nContent-Length: {len(metrics)}\r\n\r\n"
    page = head.encode() + metrics

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await reader.readuntil(b"\r\n\r\n"):
                writer.write(page)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def listen() -> tuple[asyncio.Server, int]:
        first = await asyncio.start_server(answer, hosts[0], 0)
        port = int(first.sockets[0].getsockname()[1])
        if len(hosts) > 1:
            others.append(await asyncio.start_server(answer, hosts[1:], port))
        return first, port

    async def close() -> None:
        for each in (server, *others):
            each.close()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    others: list[asyncio.Server] = []
    try:
        server, port = asyncio.run_coroutine_threadsafe(listen(), loop).result()
        try:
            yield [f"{host}:{port}" for host in hosts]
        finally:
            asyncio.run_coroutine_threadsafe(close(), loop).result()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@contextmanager
def _envoy(targets: Sequence[str]) -> Iterator[Envoy]:
    with tempfile.TemporaryDirectory(prefix="onward-envoy-") as folder, balancing(targets, Path(folder)) as envoy:
        yield envoy


def _num_checks(envoy: Envoy) -> int:
    counters = envoy.counters()
    return sum(counters[f"cluster.{cluster}.health_check.attempt"] for cluster in (CLUSTER, CLUSTER_BY_KEY))


async def _ask(target: str, callers: int, calls: int, stopping: pb.StoppingParams | None = None) -> None:
    """Unary calls by concurrent callers, one after the other each."""
    request = pb.GenerateRequest(text="ab", stopping=stopping)
    async with connected(target) as stub:

        async def ask(count: int) -> None:
            for _ in range(count):
                await stub.Generate(request)

        await asyncio.gather(*(ask(calls // callers) for _ in range(callers)))


def render(results: Results) -> str:
    """The document."""
    settings, server, envoy = results["settings"], results["server"], results["envoy"]
    prometheus = results["prometheus"]
    envoys = [
        [
            each["servers"],
            f"{each['checks_per_second']:.0f}",
            f"{each['cpu_share']:.1%}",
            f"{each['server_cpu_share']:.1%}",
            f"{each['pss_bytes'] / _MEGABYTE:.1f} MB",
            each["descriptors"],
        ]
        for each in envoy["by_servers"]
    ]
    prometheuses = [
        [
            each["servers"],
            f"{each['series']:,.0f}",
            f"{each['samples_per_second']:,.0f}",
            f"{each['cpu_share']:.1%}",
            f"{each['pss_bytes'] / _MEGABYTE:.0f} MB",
            milliseconds(each["rule_seconds"]),
        ]
        for each in prometheus["by_servers"]
    ]
    lines = [
        "# What one more server costs",
        "",
        f"On {results['machine']['processor']}, {results['machine']['cores']} cores for all of it; idle for "
        f"{settings['duration']:g} s at each number of servers.",
        "",
        f"One server ({subject(results)}, {settings['batch']} sequences at once, {settings['threads']} threads) serves "
        f"{server['start_seconds']:.1f} s after its start, an artifact of "
        f"{server['artefact_bytes'] / _MEGABYTE:.0f} MB, with {server['pss_bytes'] / _MEGABYTE:.0f} MB of memory and "
        f"{server['descriptors']:.0f} descriptors. Its metrics have {server['samples']:.0f} samples, and a health "
        f"check takes {microseconds(server['cpu_seconds_per_check'], 1)} of processor time.",
        "",
        "## Envoy",
        "",
        *table("servers|health checks/s|of a core|of the servers' core|memory|descriptors", envoys),
        "",
        f"One more server costs {envoy['bytes_per_server'] / _KILOBYTE:.0f} kB and "
        f"{envoy['descriptors_per_server']:.1f} sockets; a health check "
        f"{microseconds(envoy['cpu_seconds_per_check'], 1)} of processor time, a unary call "
        f"{microseconds(envoy['cpu_seconds_per_call'], 1)}.",
        "",
        "## Prometheus",
        "",
        f"Scraped, and all rules evaluated, every {settings['scrape_seconds']:g} s.",
        "",
        *table("servers|series|samples/s|of a core|memory|all rules, once", prometheuses),
        "",
        f"A series costs {prometheus['bytes_per_series'] / _KILOBYTE:.1f} kB of memory, a sample "
        f"{microseconds(prometheus['cpu_seconds_per_sample'], 1)} of processor time with the rules, and one more "
        f"server {milliseconds(prometheus['rule_seconds_per_server'])} of each evaluation.",
    ]
    return "\n".join(lines)


SCENARIO = Scenario(__name__, FleetSettings, measure, render)
