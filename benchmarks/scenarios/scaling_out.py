"""What a proxy between callers and several servers costs, and how many cache hits a routing key saves.

First the transport, on two servers without a model (`infra.clock_server`): called directly, half of the calls each,
through Envoy with the configuration of `deploy/envoy`, and with `--ray` as replicas on Ray Serve with the ingress of
`deploy/ray` (`make ray` installs it). In every round, in random order:

    call        unary calls one after the other: seconds from request to response
    message     streams with a message every few milliseconds: seconds from the server's clock to the reader's
    throughput  streams at full speed: messages a second, and the proxy's processor time for each

and besides the proxy's start, its memory afterwards and its processor time when idle. Then the prefix cache, on real
servers: requests with a few shared prefixes, one after the other; the share of cached prompt tokens on one server, on
two with `onward-routing-key` and on two without. Promise: with the key at least 0.8 of the single server's.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc.aio

from benchmarks.frame.models import NUM_SPECIAL, QUIET, draw
from benchmarks.frame.rounds import interleaved
from benchmarks.frame.scenario import ModelSettings, Results, Run, Scenario, cores, option
from benchmarks.frame.servers import cpu_seconds, proportional_bytes
from benchmarks.frame.statistics import percentiles
from benchmarks.frame.streams import connected, greedy
from benchmarks.frame.tables import microseconds, milliseconds, subject, table, verdict
from benchmarks.infra.clock_server import clock_server
from benchmarks.infra.envoy import balancing
from benchmarks.infra.ray_serve import on_ray
from onward.v1 import generation_pb2 as pb
from onward.v1.generation_pb2_grpc import GenerationServiceStub
from service.routing import ROUTING_KEY, routing_key

if TYPE_CHECKING:
    from onward.v1.generation_pb2_grpc import GenerationServiceAsyncStub

DIRECT, ENVOY, RAY = "direct", "envoy", "ray"
NUM_SERVERS = 2
LIMIT = 0.8
"""Share of the single server's cached tokens that two with a routing key must reach."""
_NANOSECONDS = 1e9
_MEGABYTE = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingOutSettings(ModelSettings):
    """What is measured; lengths in tokens."""

    threads: int = option(max(1, cores() // NUM_SERVERS), "of each server", least=1)
    rounds: int = option(5, "of all ways", least=1, quick=1)
    calls: int = option(500, quick=50)
    paced_streams: int = option(8)
    paced_messages: int = option(200)
    pace_seconds: float = option(0.005)
    full_streams: int = option(32)
    full_messages: int = option(1000, quick=100)
    idle_seconds: float = option(5.0, quick=0.5)
    families: int = option(12, quick=3)
    requests: int = option(50, quick=9)
    prefix: int = option(256)
    suffix: int = option(24)
    ray: bool = option(False, "measure Ray Serve too; make ray installs it")  # noqa: FBT003


@dataclass(frozen=True, slots=True)
class Way:
    """How servers are called.

    Args:
        targets: where, "host:port" each.
        between: process ids of the proxy.
        start_seconds: until it was ready, with Ray including the servers.
    """

    targets: Sequence[str]
    between: Callable[[], Sequence[int]]
    start_seconds: float


@dataclass(frozen=True, slots=True)
class Round:
    """One way to ask, once.

    Args:
        calls: seconds of each unary call.
        delays: seconds that each message of the paced streams took.
        rate: messages a second at full speed.
        cpu_seconds: the proxy's processor time at full speed; None without a proxy.
    """

    calls: Sequence[float]
    delays: Sequence[float]
    rate: float
    cpu_seconds: float | None


def measure(settings: ScalingOutSettings, run: Run) -> dict[str, Any]:
    """The transport, then the prefix cache."""
    return measure_transport(settings) | judge_shares(measure_shares(settings, run))


def measure_transport(settings: ScalingOutSettings) -> dict[str, Any]:
    """Costs of each way."""
    with ExitStack() as stack:
        ways = _ways(settings, stack)
        rounds: dict[str, list[Round]] = {name: [] for name in ways}
        for way in ways.values():
            asyncio.run(_ask(way, replace(settings, calls=20, paced_messages=5, full_messages=5)))
        for _, name in interleaved(settings.rounds, ways, settings.seed):
            rounds[name].append(asyncio.run(_ask(ways[name], settings)))
        found = judge_transport(rounds, settings.full_streams * settings.full_messages)
        for name, way in ways.items():
            if pids := way.between():
                found["ways"][name] |= {
                    "start_seconds": way.start_seconds,
                    "pss_bytes": sum(map(proportional_bytes, pids)),
                    "idle_cpu_share": _idle_share(way, settings.idle_seconds),
                }
    return found


def _ways(settings: ScalingOutSettings, stack: ExitStack) -> dict[str, Way]:
    targets = [stack.enter_context(clock_server()).target for _ in range(NUM_SERVERS)]
    ways = {DIRECT: Way(targets, tuple, 0.0)}
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    began = time.perf_counter()
    envoy = stack.enter_context(balancing(targets, folder))
    ways[ENVOY] = Way([envoy.target], lambda: [envoy.pid], time.perf_counter() - began)
    if settings.ray:
        began = time.perf_counter()
        ray = stack.enter_context(on_ray("benchmarks.infra.ray_clock", f"--replicas={NUM_SERVERS}"))
        ways[RAY] = Way([ray.target], ray.others, time.perf_counter() - began)
    return ways


def _idle_share(way: Way, seconds: float) -> float:
    """The proxy's share of a core when idle."""
    before = _cpu_seconds(way.between())
    time.sleep(seconds)
    return _since(before) / seconds


def judge_transport(rounds: Mapping[str, Sequence[Round]], num_messages: int) -> dict[str, Any]:
    """By way: figures over all rounds, and what each adds to the direct way."""
    ways = {way: _describe(each, num_messages) for way, each in rounds.items()}
    direct = ways[DIRECT]
    for found in ways.values():
        found["added_call_seconds"] = found["call_seconds"]["p50"] - direct["call_seconds"]["p50"]
        found["added_message_seconds"] = found["message_seconds"]["p50"] - direct["message_seconds"]["p50"]
        found["throughput_share"] = found["messages_per_second"] / direct["messages_per_second"]
    return {"ways": ways}


def _describe(rounds: Sequence[Round], num_messages: int) -> dict[str, Any]:
    def shares(values: Sequence[Sequence[float]]) -> dict[str, float]:
        return percentiles([each for one in values for each in one], 50, 90, 99)

    cpu = [each.cpu_seconds for each in rounds if each.cpu_seconds is not None]
    return {
        "call_seconds": shares([each.calls for each in rounds]),
        "message_seconds": shares([each.delays for each in rounds]),
        "messages_per_second": statistics.median(each.rate for each in rounds),
        "cpu_seconds_per_message": statistics.median(cpu) / num_messages if cpu else None,
    }


async def _ask(way: Way, settings: ScalingOutSettings) -> Round:
    """One round of everything over one connection to each of the targets."""
    async with _connected(way.targets) as stubs:
        calls = []
        for number in range(settings.calls):
            began = time.perf_counter()
            await stubs[number % len(stubs)].Generate(pb.GenerateRequest(text="ab"))
            calls.append(time.perf_counter() - began)
        paced = _stream_request(settings.paced_messages, settings.pace_seconds)
        delays = await asyncio.gather(
            *(_follow(stubs[number % len(stubs)], paced) for number in range(settings.paced_streams))
        )
        pids = way.between()
        before = _cpu_seconds(pids)
        began = time.perf_counter()
        full = _stream_request(settings.full_messages, 0.0)
        await asyncio.gather(*(_follow(stubs[number % len(stubs)], full) for number in range(settings.full_streams)))
        seconds = time.perf_counter() - began
        spent = _since(before) if pids else None
    rate = settings.full_streams * settings.full_messages / seconds
    return Round(calls, [delay for each in delays for delay in each], rate, spent)


@asynccontextmanager
async def _connected(targets: Sequence[str]) -> AsyncIterator[list[GenerationServiceAsyncStub]]:
    """A connection of its own to each."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with AsyncExitStack() as stack:
        channels = [await stack.enter_async_context(grpc.aio.insecure_channel(each, options)) for each in targets]
        yield [GenerationServiceStub(channel) for channel in channels]


def _stream_request(num_messages: int, pace_seconds: float) -> pb.GenerateStreamRequest:
    stopping = pb.StoppingParams(max_tokens=num_messages)
    return pb.GenerateStreamRequest(text="ab", stopping=stopping, timeout_seconds=pace_seconds)


async def _follow(stub: GenerationServiceAsyncStub, request: pb.GenerateStreamRequest) -> list[float]:
    """Seconds that each message took.

    Raises:
        RuntimeError: if messages are missing.
    """
    delays = []
    is_whole = False
    async for event in stub.GenerateStream(request):
        if event.HasField("delta"):
            delays.append((time.monotonic_ns() - int(event.delta.text)) / _NANOSECONDS)
        is_whole = event.HasField("summary")
    if not is_whole or len(delays) != request.stopping.max_tokens:
        raise RuntimeError(f"asked for {request.stopping.max_tokens} messages, got {len(delays)}")
    return delays


def _cpu_seconds(pids: Sequence[int]) -> dict[int, float]:
    """Of several processes, without those that are gone."""
    found = {}
    for pid in pids:
        with suppress(FileNotFoundError, ProcessLookupError):
            found[pid] = cpu_seconds(pid)
    return found


def _since(before: Mapping[int, float]) -> float:
    """Total since then."""
    return sum(seconds - before[pid] for pid, seconds in _cpu_seconds(tuple(before)).items())


def measure_shares(settings: ScalingOutSettings, run: Run) -> dict[str, float]:
    """Share of cached prompt tokens: on one server, on two with keys, on two without."""
    model = run.subject(settings, settings.families)
    vocab_size, source = model.config.vocab_size, random.Random(settings.seed)  # noqa: S311 (not for secrets)

    def share(target: str, *, has_keys: bool) -> float:
        # New prompts each time, or these would hit what others left in the cache.
        return asyncio.run(_cached_share(target, prompts(settings, vocab_size, source), has_keys=has_keys))

    with model.served(*QUIET) as alone:
        shares = {"single": share(alone.target, has_keys=False)}
    with ExitStack() as stack:
        targets = [stack.enter_context(model.served(*QUIET)).target for _ in range(NUM_SERVERS)]
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        envoy = stack.enter_context(balancing(targets, folder))
        shares |= {"with_key": share(envoy.target, has_keys=True), "without_key": share(envoy.target, has_keys=False)}
    if settings.ray:
        flags = ("--threads", str(settings.threads), "--max-batch-size", str(settings.families), *QUIET)
        words = ("--models", str(model.folder.parent), "--replicas", str(NUM_SERVERS), "--cores", "0.5", "--by-key")
        with on_ray("deploy.ray", *words, "--", *flags) as ray:
            shares["ray_with_key"] = share(ray.target, has_keys=True)
            shares["ray_without_key"] = share(ray.target, has_keys=False)
    return shares


def prompts(settings: ScalingOutSettings, vocab_size: int, source: random.Random) -> list[list[int]]:
    """In random order, evenly from each family: a shared prefix, and suffixes that all differ."""
    prefixes = [draw(source, vocab_size, settings.prefix) for _ in range(settings.families)]
    # Suffixes begin with different tokens, so that only the prefix is shared.
    firsts = source.sample(range(NUM_SPECIAL, vocab_size), settings.requests)
    asked = [
        [*prefixes[number % settings.families], first, *draw(source, vocab_size, settings.suffix - 1)]
        for number, first in enumerate(firsts)
    ]
    source.shuffle(asked)
    return asked


async def _cached_share(target: str, asked: Sequence[Sequence[int]], *, has_keys: bool) -> float:
    cached = 0
    async with connected(target) as stub:
        for prompt in asked:
            metadata = [(ROUTING_KEY, routing_key(prompt))] if has_keys else []
            answer = await stub.Generate(greedy(pb.GenerateRequest, prompt, 1), metadata=metadata)
            cached += answer.usage.cached_tokens
    return cached / sum(map(len, asked))


def judge_shares(shares: Mapping[str, float]) -> dict[str, Any]:
    """Whether the key keeps enough cache hits."""
    kept = {name: share / shares["single"] if shares["single"] else 0.0 for name, share in shares.items()}
    passed = all(share >= LIMIT for name, share in kept.items() if name.endswith("with_key"))
    return {"cached": dict(shares), "kept": kept, "limit": LIMIT, "passed": passed}


def render(results: Results) -> str:
    """The document."""
    settings, cached, kept, rows = results["settings"], results["cached"], results["kept"], []
    for way, each in results["ways"].items():
        call, message = each["call_seconds"], each["message_seconds"]
        seconds = [call["p50"], call["p99"], each["added_call_seconds"]]
        seconds += [message["p50"], message["p99"], each["added_message_seconds"]]
        rate = f"{each['messages_per_second']:,.0f}", f"{each['throughput_share']:.0%}"
        rows.append([way, *map(microseconds, seconds), *rate])
    names = {"single": "one server", "with_key": f"two, with `{ROUTING_KEY}`", "without_key": "two, without"}
    names |= {"ray_with_key": f"two on Ray, with `{ROUTING_KEY}`", "ray_without_key": "two on Ray, without"}
    shares = [
        [names[name], f"{share:.1%}", "" if name == "single" else f"{kept[name]:.0%}"] for name, share in cached.items()
    ]
    lines = [
        "# What scaling out costs",
        "",
        f"{NUM_SERVERS} servers without a model on {results['machine']['processor']}, {results['machine']['cores']} "
        f"cores for servers, proxy and client together; {settings['rounds']} rounds of {settings['calls']} calls, "
        f"{settings['paced_streams']} streams at {milliseconds(settings['pace_seconds'])} a message, "
        f"{settings['full_streams']} at full speed. Percentiles over all rounds, throughput their median.",
        "",
        *table("asked|call, p50|p99|added|message, p50|p99|added|messages/s|of direct", rows),
        "",
        *(_cost(name, each) for name, each in results["ways"].items() if "start_seconds" in each),
        "",
        f"{settings['requests']} requests to {subject(results)}, one after the other, with {settings['families']} "
        f"shared prefixes of {settings['prefix']} tokens and {settings['suffix']} tokens of their own:",
        "",
        *table("asked|cached prompt tokens|of one server's", shares),
        "",
        f"The promise, {results['limit']:.0%} of one server's with the key, {verdict(results['passed'])}.",
    ]
    return "\n".join(lines)


def _cost(way: str, found: Mapping[str, Any]) -> str:
    return (
        f"- {way}: {found['start_seconds']:.2f} s from its start until it has found both servers"
        f"{' and started them' if way == RAY else ''}, {found['pss_bytes'] / _MEGABYTE:.0f} MB afterwards, "
        f"{microseconds(found['cpu_seconds_per_message'])} of processor time a message, and "
        f"{found['idle_cpu_share']:.1%} of a core when idle."
    )


SCENARIO = Scenario(__name__, ScalingOutSettings, measure, render)
