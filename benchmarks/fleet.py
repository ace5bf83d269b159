"""What every further server costs those who stand before and beside it: Envoy and Prometheus, by how many there are.

    python -m benchmarks.fleet [--model llama-110m] [--precision int8] [--servers 2,50,200] [--threads N]
                               [--quick] [--docs]

First one server: how long until it serves, its memory, its files and sockets, its artifact's bytes, and how many
samples its metrics have once it has been asked for something. Then, for each number of servers, a real Envoy in front
of so many addresses of one process that answers health checks (`infra.clock_server`): Envoy's memory, files and
sockets, and the processor time that health checks take, its own and the server's. Then a real Prometheus that scrapes
that server's very metrics at so many addresses: its memory, its processor time, and how long our rules take. At last,
in front of two, what a unary call takes of Envoy's processor time. What one more costs is from the smallest number to
the largest.

`benchmarks.capacity_plan` reckons with them. The last line on stdout is one JSON object; the report goes to
`build/bench`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc.aio

from benchmarks import scenario
from benchmarks.frame.servers import served, wait_ready
from benchmarks.infra.clock_server import addresses
from benchmarks.infra.envoy import CLUSTER, CLUSTER_BY_KEY, Envoy, balancing
from benchmarks.infra.prometheus import Prometheus, scraping
from benchmarks.peers.onward import artifact, version
from benchmarks.scaling_out import cpu_seconds, proportional_bytes
from onward.v1 import generation_pb2 as pb
from onward.v1.generation_pb2_grpc import GenerationServiceStub

if TYPE_CHECKING:
    from onward.v1.generation_pb2_grpc import GenerationServiceAsyncStub

NAME = "fleet"
DOCS = Path("docs")
_MEGABYTE, _KILOBYTE = 1e6, 1e3
_WARM_UP_SCRAPES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is measured."""

    model: str = "llama-110m"
    precision: str = "int8"
    batch: int = 8
    servers: tuple[int, ...] = (2, 50, 200)
    seconds: float = 30.0
    scrape_seconds: float = 5.0
    calls: int = 5000
    callers: int = 16
    threads: int = 1


def measure(settings: Settings, build: Path) -> dict[str, Any]:
    """All of it."""
    server, metrics = measure_server(settings, build)
    envoys = [measure_envoy(number, settings) for number in settings.servers]
    prometheuses = [measure_prometheus(number, metrics, settings) for number in settings.servers]
    facts = {"scenario": NAME, "version": version(), "settings": asdict(settings), "machine": scenario.machine()}
    return facts | judge(server, envoys, prometheuses, measure_calls(settings))


def judge(
    server: Mapping[str, float],
    envoys: Sequence[Mapping[str, float]],
    prometheuses: Sequence[Mapping[str, float]],
    call_cpu_seconds: float,
) -> dict[str, Any]:
    """What one more server costs, by what was found for each number of them, the smallest first."""
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
    """How much of the effect comes with one more of the cause, over all that was measured; below 0 it is noise."""
    first, last = found[0], found[-1]
    return max(0.0, (last[effect] - first[effect]) / (last[cause] - first[cause]))


def measure_server(settings: Settings, build: Path) -> tuple[dict[str, float], bytes]:
    """One server's own figures, and its metrics as it tells them when it has been asked for something."""
    options = scenario.make_artifact(
        settings.model, settings.precision, build=build, max_batch=settings.batch, threads=settings.threads
    )
    flags = ["--threads", str(settings.threads), "--max-batch-size", str(settings.batch)]
    folder = artifact(options)
    began = time.perf_counter()
    with served(folder.parent, *flags, "--metrics-port", "0", "--log-level", "warning") as server:
        start_seconds = time.perf_counter() - began
        asyncio.run(_ask(server.target, 1, 4, pb.StoppingParams(max_tokens=4)))
        with urllib.request.urlopen(f"http://{server.metrics}/metrics", timeout=60) as answer:
            metrics: bytes = answer.read()
        found = {
            "start_seconds": start_seconds,
            "pss_bytes": proportional_bytes(server.pid),
            "descriptors": _num_descriptors(server.pid),
            "artefact_bytes": sum(file.stat().st_size for file in folder.iterdir()),
            "samples": count_samples(metrics),
            "metrics_bytes": len(metrics),
        }
    return found, metrics


def count_samples(metrics: bytes) -> int:
    """Of a page of metrics, in Prometheus' text format."""
    return sum(bool(line) and not line.startswith(b"#") for line in metrics.splitlines())


def measure_envoy(number: int, settings: Settings) -> dict[str, float]:
    """Envoy in front of so many servers of which nobody wants anything."""
    print(f"Envoy before {number} servers", file=sys.stderr, flush=True)
    with healthy_server(number) as (targets, server_pid), _envoy(targets) as envoy:
        checks, began = _num_checks(envoy), time.perf_counter()
        before = [cpu_seconds(pid) for pid in (envoy.pid, server_pid)]
        time.sleep(settings.seconds)
        seconds = time.perf_counter() - began
        shares = [(cpu_seconds(pid) - old) / seconds for pid, old in zip((envoy.pid, server_pid), before, strict=True)]
        return {
            "servers": number,
            "checks_per_second": (_num_checks(envoy) - checks) / seconds,
            "cpu_share": shares[0],
            "server_cpu_share": shares[1],
            "pss_bytes": proportional_bytes(envoy.pid),
            "descriptors": _num_descriptors(envoy.pid),
        }


def measure_calls(settings: Settings) -> float:
    """Envoy's processor seconds for each unary call."""
    print("calls through Envoy", file=sys.stderr, flush=True)
    with healthy_server(2) as (targets, _), _envoy(targets) as envoy:
        asyncio.run(_ask(envoy.target, settings.callers, settings.callers))
        before = cpu_seconds(envoy.pid)
        asyncio.run(_ask(envoy.target, settings.callers, settings.calls))
        return (cpu_seconds(envoy.pid) - before) / settings.calls


def measure_prometheus(number: int, metrics: bytes, settings: Settings) -> dict[str, float]:
    """Prometheus beside so many servers that all tell the same."""
    print(f"Prometheus beside {number} servers", file=sys.stderr, flush=True)
    with (
        exposing(metrics, addresses(number)) as targets,
        tempfile.TemporaryDirectory(prefix="onward-prometheus-") as folder,
        scraping(targets, Path(folder), interval_seconds=settings.scrape_seconds) as prometheus,
    ):
        prometheus.wait_scraped(time.time() + _WARM_UP_SCRAPES * settings.scrape_seconds)
        before, began = cpu_seconds(prometheus.pid), time.perf_counter()
        time.sleep(settings.seconds)
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
    """How long all rules took at their last evaluation, one after the other."""
    return sum(float(rule["evaluationTime"]) for rule in prometheus.rules())


@contextmanager
def healthy_server(number: int) -> Iterator[tuple[list[str], int]]:
    """A `benchmarks.infra.clock_server` at so many addresses, "host:port" each, and its process."""
    command = [sys.executable, "-m", "benchmarks.infra.clock_server", str(number)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            port = wait_ready(process).rpartition(":")[2]
            yield [f"{address}:{port}" for address in addresses(number)], process.pid
        finally:
            process.terminate()


@contextmanager
def exposing(metrics: bytes, hosts: Sequence[str]) -> Iterator[list[str]]:
    """Answers every HTTP request at these addresses with one page for the length of the block; "host:port" each."""
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


def _num_descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


async def _ask(target: str, callers: int, calls: int, stopping: pb.StoppingParams | None = None) -> None:
    """So many unary calls by so many callers, each of whom asks again once it is answered."""
    request = pb.GenerateRequest(text="ab", stopping=stopping)
    async with grpc.aio.insecure_channel(target) as channel:
        stub: GenerationServiceAsyncStub = GenerationServiceStub(channel)

        async def ask(count: int) -> None:
            for _ in range(count):
                await stub.Generate(request)

        await asyncio.gather(*(ask(calls // callers) for _ in range(callers)))


def render(results: Mapping[str, Any]) -> str:
    """The document, in Markdown."""
    settings, server, envoy = results["settings"], results["server"], results["envoy"]
    prometheus = results["prometheus"]
    lines = [
        "# What one more server costs",
        "",
        f"On {results['machine']['processor']}, {results['machine']['cores']} cores for all of it; idle for "
        f"{settings['seconds']:g} s at each number of servers.",
        "",
        f"One server ({settings['model']} {settings['precision']}, {settings['batch']} sequences at once, "
        f"{settings['threads']} threads) serves {server['start_seconds']:.1f} s after its start, of an artefact of "
        f"{server['artefact_bytes'] / _MEGABYTE:.0f} MB, with {server['pss_bytes'] / _MEGABYTE:.0f} MB of memory and "
        f"{server['descriptors']:.0f} files and sockets. It tells {server['samples']:.0f} samples, and spends "
        f"{_micro(server['cpu_seconds_per_check'])} of processor time on each health check.",
        "",
        "## Envoy",
        "",
        "| servers | health checks/s | of a core | of the servers' core | memory | files and sockets |",
        "|---:|---:|---:|---:|---:|---:|",
        *(
            f"| {each['servers']:.0f} | {each['checks_per_second']:.0f} | {each['cpu_share']:.1%} | "
            f"{each['server_cpu_share']:.1%} | {each['pss_bytes'] / _MEGABYTE:.1f} MB | {each['descriptors']:.0f} |"
            for each in envoy["by_servers"]
        ),
        "",
        f"One more server costs {envoy['bytes_per_server'] / _KILOBYTE:.0f} kB and "
        f"{envoy['descriptors_per_server']:.1f} sockets; a health check {_micro(envoy['cpu_seconds_per_check'])} of "
        f"processor time, a unary call {_micro(envoy['cpu_seconds_per_call'])}.",
        "",
        "## Prometheus",
        "",
        f"Scraped, and all rules evaluated, every {settings['scrape_seconds']:g} s.",
        "",
        "| servers | series | samples/s | of a core | memory | all rules, once |",
        "|---:|---:|---:|---:|---:|---:|",
        *(
            f"| {each['servers']:.0f} | {each['series']:,.0f} | {each['samples_per_second']:,.0f} | "
            f"{each['cpu_share']:.1%} | {each['pss_bytes'] / _MEGABYTE:.0f} MB | "
            f"{scenario.milliseconds(each['rule_seconds'])} |"
            for each in prometheus["by_servers"]
        ),
        "",
        f"A series costs {prometheus['bytes_per_series'] / _KILOBYTE:.1f} kB of memory, a sample "
        f"{_micro(prometheus['cpu_seconds_per_sample'])} of processor time with the rules, and one more server "
        f"{scenario.milliseconds(prometheus['rule_seconds_per_server'])} of each evaluation.",
        "",
    ]
    return "\n".join(lines)


def _micro(seconds: float) -> str:
    return f"{1e6 * seconds:,.1f} µs"


def main() -> int:
    """Measures, and says it all on the last line of stdout."""
    settings, folder = _parse(sys.argv[1:])
    return scenario.tell(NAME, lambda: measure(settings, scenario.BUILD), render, folder)


def _parse(arguments: Sequence[str]) -> tuple[Settings, Path]:
    defaults = Settings(threads=os.cpu_count() or 1)
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{NAME}", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default=defaults.model, help="a preset")
    parser.add_argument("--precision", default=defaults.precision, help="fp32, bf16, int8, int4")
    parser.add_argument("--servers", default=",".join(map(str, defaults.servers)), help="how many, rising")
    parser.add_argument("--seconds", type=float, default=defaults.seconds, help="at each number of servers")
    parser.add_argument("--threads", type=int, default=defaults.threads, help="of the one server")
    parser.add_argument("--quick", action="store_true", help="few servers and a short while: to see that it works")
    parser.add_argument("--docs", action="store_true", help="write the report into docs/ and not into build/bench")
    options = parser.parse_args(arguments)
    try:
        servers = tuple(map(int, options.servers.split(",")))
    except ValueError:
        parser.error(f"--servers must be numbers with commas between, got {options.servers}")
    if len(servers) < 2 or servers[0] < 1 or list(servers) != sorted(set(servers)):
        parser.error(f"--servers must be two numbers or more that rise, the first at least 1, got {options.servers}")
    if options.threads < 1 or not options.seconds > 0:
        parser.error("--threads must be at least 1, --seconds above 0")
    settings = replace(
        defaults,
        model=options.model,
        precision=options.precision,
        servers=servers,
        seconds=options.seconds,
        threads=options.threads,
    )
    if options.quick:
        settings = replace(settings, servers=(2, 10), seconds=2.0, scrape_seconds=0.5, calls=160)
    return settings, DOCS if options.docs else scenario.BUILD


if __name__ == "__main__":
    sys.exit(main())
