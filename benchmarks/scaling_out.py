"""What stands between callers and several servers costs, and what a routing key saves them.

    python -m benchmarks.scaling_out [--model llama-110m] [--precision int8] [--rounds 5] [--threads N]
                                     [--ray] [--quick] [--docs]

First the transport, on two servers that have no model (`infra.clock_server`), asked directly, half of the calls
each, through Envoy with the configuration of `deploy/envoy`, and with `--ray` as replicas on Ray Serve with the ingress
of `deploy/ray` (`make ray` installs it). In every round, in random order:

    call        unary calls one after the other: seconds from question to answer
    message     streams that send a message every few milliseconds: seconds from its server's clock to its reader's
    throughput  streams that send as fast as they are read: messages a second, and the processor time that what stands
                between takes for each

and besides, how long that takes to start, its memory after all of this and how busy it is with nothing to do. Then
what is kept of prompts, on real servers: requests whose prompts begin in a few ways, one after the other; the share of
prompt tokens that need not be computed on one server alone, on two with `onward-routing-key` and on two without. The
promise is that with the key it is at least 0.8 of the single server's.

The last line on stdout is one JSON object; the report goes to `build/bench`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc.aio

from benchmarks import scenario
from benchmarks.frame.servers import serving, wait_ready
from benchmarks.infra.envoy import balancing
from benchmarks.infra.ray_serve import on_ray
from benchmarks.peers.onward import artifact, version
from benchmarks.scenario import draw, milliseconds, percentile
from model.spec.artifact import load
from onward.v1 import generation_pb2 as pb
from onward.v1.generation_pb2_grpc import GenerationServiceStub
from service.routing import ROUTING_KEY, routing_key

if TYPE_CHECKING:
    from onward.v1.generation_pb2_grpc import GenerationServiceAsyncStub

NAME = "scaling-out-cost"
DOCS = Path("docs")
DIRECT, ENVOY, RAY = "direct", "envoy", "ray"
WAYS = (DIRECT, ENVOY)
"""Those that are always measured; Ray is too large for everybody's environment."""
NUM_SERVERS = 2
LIMIT = 0.8
"""Share of the single server's cached tokens that two with a routing key must reach."""
_NANOSECONDS = 1e9
_MEGABYTE = 1e6
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is measured; lengths in tokens."""

    model: str = "llama-110m"
    precision: str = "int8"
    rounds: int = 5
    calls: int = 500
    paced_streams: int = 8
    paced_messages: int = 200
    pace_seconds: float = 0.005
    full_streams: int = 32
    full_messages: int = 1000
    idle_seconds: float = 5.0
    families: int = 12
    requests: int = 50
    prefix: int = 256
    suffix: int = 24
    threads: int = 1
    seed: int = 0
    ray: bool = False


@dataclass(frozen=True, slots=True)
class Way:
    """How servers are asked.

    Args:
        targets: where, "host:port" each.
        between: process ids of what stands between callers and servers.
        start_seconds: until it did, the servers' own start included with Ray.
    """

    targets: Sequence[str]
    between: Callable[[], Sequence[int]]
    start_seconds: float


@dataclass(frozen=True, slots=True)
class Round:
    """One way to ask, once.

    Args:
        calls: seconds of each unary call.
        delays: seconds that each message of the paced streams was under way.
        rate: messages a second of the streams at full speed.
        cpu_seconds: processor time of what stands between, in the streams at full speed; None where nothing does.
    """

    calls: Sequence[float]
    delays: Sequence[float]
    rate: float
    cpu_seconds: float | None


def measure(settings: Settings, build: Path) -> dict[str, Any]:
    """Measures the transport, then what is kept of prompts."""
    transport = measure_transport(settings)
    facts = {"scenario": NAME, "version": version(), "settings": asdict(settings), "machine": scenario.machine()}
    return facts | transport | judge_shares(measure_shares(settings, build))


def measure_transport(settings: Settings) -> dict[str, Any]:
    """Costs of asking in each way."""
    source = random.Random(settings.seed)  # noqa: S311 (not for secrets)
    with ExitStack() as stack:
        ways = _ways(settings, stack)
        rounds: dict[str, list[Round]] = {name: [] for name in ways}
        for way in ways.values():
            asyncio.run(_ask(way, replace(settings, calls=20, paced_messages=5, full_messages=5)))
        for number in range(settings.rounds):
            print(f"round {number + 1}/{settings.rounds}", file=sys.stderr, flush=True)
            order = list(ways)
            source.shuffle(order)
            for name in order:
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


def _ways(settings: Settings, stack: ExitStack) -> dict[str, Way]:
    targets = [stack.enter_context(clock_server()) for _ in range(NUM_SERVERS)]
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
    """How much of a core what stands between takes while nobody asks."""
    before = _cpu_seconds(way.between())
    time.sleep(seconds)
    return _since(before) / seconds


def judge_transport(rounds: Mapping[str, Sequence[Round]], num_messages: int) -> dict[str, Any]:
    """Medians over all rounds, and what is added to the direct way's."""
    ways = {way: _describe(each, num_messages) for way, each in rounds.items()}
    direct = ways[DIRECT]
    for found in ways.values():
        found["added_call_seconds"] = found["call_seconds"]["p50"] - direct["call_seconds"]["p50"]
        found["added_message_seconds"] = found["message_seconds"]["p50"] - direct["message_seconds"]["p50"]
        found["throughput_share"] = found["messages_per_second"] / direct["messages_per_second"]
    return {"ways": ways}


def _describe(rounds: Sequence[Round], num_messages: int) -> dict[str, Any]:
    def shares(values: Sequence[Sequence[float]]) -> dict[str, float]:
        together = [each for one in values for each in one]
        return {name: percentile(together, share) for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))}

    cpu = [each.cpu_seconds for each in rounds if each.cpu_seconds is not None]
    return {
        "call_seconds": shares([each.calls for each in rounds]),
        "message_seconds": shares([each.delays for each in rounds]),
        "messages_per_second": statistics.median(each.rate for each in rounds),
        "cpu_seconds_per_message": statistics.median(cpu) / num_messages if cpu else None,
    }


async def _ask(way: Way, settings: Settings) -> Round:
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
    """Seconds that each message was under way.

    Raises:
        RuntimeError: when messages are missing.
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


@contextmanager
def clock_server() -> Iterator[str]:
    """A `benchmarks.infra.clock_server` for the length of the block; its "host:port"."""
    command = [sys.executable, "-m", "benchmarks.infra.clock_server"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield wait_ready(process)
        finally:
            process.terminate()


def _cpu_seconds(pids: Sequence[int]) -> dict[int, float]:
    """That of several processes, but for those that are gone."""
    found = {}
    for pid in pids:
        with suppress(FileNotFoundError, ProcessLookupError):
            found[pid] = cpu_seconds(pid)
    return found


def _since(before: Mapping[int, float]) -> float:
    """What they have had since, together."""
    return sum(seconds - before[pid] for pid, seconds in _cpu_seconds(tuple(before)).items())


def cpu_seconds(pid: int) -> float:
    """Processor time that a process has had, to a hundredth of a second."""
    # The second field is its name in brackets, which may have spaces.
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    user, system = int(fields[11]), int(fields[12])
    return (user + system) / _TICKS_PER_SECOND


def proportional_bytes(pid: int) -> int:
    """A process's memory, of what it shares with others its part."""
    lines: list[str] = []
    with suppress(FileNotFoundError, ProcessLookupError):  # it is gone
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
    kibibytes = sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return kibibytes * 1024


def measure_shares(settings: Settings, build: Path) -> dict[str, float]:
    """Share of the prompt tokens that need not be computed: on one server, on two with keys, on two without."""
    options = scenario.make_artifact(
        settings.model, settings.precision, build=build, max_batch=settings.families, threads=settings.threads
    )
    vocab_size = load(artifact(options)).config.vocab_size
    source = random.Random(settings.seed)  # noqa: S311 (not for secrets)
    models = artifact(options).parent
    flags = ["--threads", str(settings.threads), "--max-batch-size", str(settings.families), *scenario.QUIET]
    with serving(models, *flags) as alone:
        shares = {"single": asyncio.run(_cached_share(alone, prompts(settings, vocab_size, source), has_keys=False))}
    with ExitStack() as stack:
        targets = [stack.enter_context(serving(models, *flags)) for _ in range(NUM_SERVERS)]
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        envoy = stack.enter_context(balancing(targets, folder))
        for name, has_keys in (("with_key", True), ("without_key", False)):
            # New prompts each time, or these would find what those left.
            asked = prompts(settings, vocab_size, source)
            shares[name] = asyncio.run(_cached_share(envoy.target, asked, has_keys=has_keys))
    if settings.ray:
        words = ("--models", str(models), "--replicas", str(NUM_SERVERS), "--cores", "0.5", "--by-key", "--", *flags)
        with on_ray("deploy.ray", *words) as ray:
            for name, has_keys in (("ray_with_key", True), ("ray_without_key", False)):
                asked = prompts(settings, vocab_size, source)
                shares[name] = asyncio.run(_cached_share(ray.target, asked, has_keys=has_keys))
    return shares


def prompts(settings: Settings, vocab_size: int, source: random.Random) -> list[list[int]]:
    """In random order, as evenly as can be of each family: a beginning of its own, and ends that all differ."""
    prefixes = [draw(source, vocab_size, settings.prefix) for _ in range(settings.families)]
    # The first token of an end is another each time, so that nothing but the beginning is shared.
    firsts = source.sample(range(scenario.NUM_SPECIAL, vocab_size), settings.requests)
    asked = [
        [*prefixes[number % settings.families], first, *draw(source, vocab_size, settings.suffix - 1)]
        for number, first in enumerate(firsts)
    ]
    source.shuffle(asked)
    return asked


async def _cached_share(target: str, asked: Sequence[Sequence[int]], *, has_keys: bool) -> float:
    cached = 0
    async with grpc.aio.insecure_channel(target) as channel:
        stub: GenerationServiceAsyncStub = GenerationServiceStub(channel)
        for prompt in asked:
            request = pb.GenerateRequest(
                token_ids=pb.TokenIds(ids=prompt),
                sampling=pb.SamplingParams(temperature=0.0),
                stopping=pb.StoppingParams(max_tokens=1),
            )
            metadata = [(ROUTING_KEY, routing_key(prompt))] if has_keys else []
            cached += (await stub.Generate(request, metadata=metadata)).usage.cached_tokens
    return cached / sum(map(len, asked))


def judge_shares(shares: Mapping[str, float]) -> dict[str, Any]:
    """Whether the key keeps enough of what one server has."""
    kept = {name: share / shares["single"] if shares["single"] else 0.0 for name, share in shares.items()}
    passed = all(share >= LIMIT for name, share in kept.items() if name.endswith("with_key"))
    return {"cached": dict(shares), "kept": kept, "limit": LIMIT, "passed": passed}


def render(results: Mapping[str, Any]) -> str:
    """The document, in Markdown."""
    settings = results["settings"]
    lines = [
        "# What scaling out costs",
        "",
        f"{NUM_SERVERS} servers without a model on {results['machine']['processor']}, {results['machine']['cores']} "
        f"cores for servers, what stands before them and client together; {settings['rounds']} rounds of "
        f"{settings['calls']} calls, {settings['paced_streams']} streams at "
        f"{milliseconds(settings['pace_seconds'])} a message, "
        f"{settings['full_streams']} at full speed. Percentiles over all rounds, throughput the median of them.",
        "",
        "| asked | call, p50 | p99 | added | message, p50 | p99 | added | messages/s | of direct |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for way, each in results["ways"].items():
        call, message = each["call_seconds"], each["message_seconds"]
        lines.append(
            f"| {way} | {_fine(call['p50'])} | {_fine(call['p99'])} | {_fine(each['added_call_seconds'])} | "
            f"{_fine(message['p50'])} | {_fine(message['p99'])} | {_fine(each['added_message_seconds'])} | "
            f"{each['messages_per_second']:,.0f} | {each['throughput_share']:.0%} |"
        )
    cached, kept = results["cached"], results["kept"]
    verdict = "holds" if results["passed"] else "does **not** hold"
    lines += [
        "",
        *(_cost(name, each) for name, each in results["ways"].items() if "start_seconds" in each),
        "",
        f"{settings['requests']} requests to {settings['model']} {settings['precision']}, one after the other; their "
        f"prompts begin in {settings['families']} ways with {settings['prefix']} tokens and end in "
        f"{settings['suffix']} of their own:",
        "",
        "| asked | prompt tokens not computed again | of one server's |",
        "|---|---:|---:|",
        f"| one server | {cached['single']:.1%} | |",
        f"| two, with `{ROUTING_KEY}` | {cached['with_key']:.1%} | {kept['with_key']:.0%} |",
        f"| two, without | {cached['without_key']:.1%} | {kept['without_key']:.0%} |",
        *(
            f"| two on Ray, {words} | {cached[name]:.1%} | {kept[name]:.0%} |"
            for name, words in (("ray_with_key", f"with `{ROUTING_KEY}`"), ("ray_without_key", "without"))
            if name in cached
        ),
        "",
        f"The promise, {results['limit']:.0%} of one server's with the key, {verdict}.",
        "",
    ]
    return "\n".join(lines)


def _cost(way: str, found: Mapping[str, Any]) -> str:
    return (
        f"- {way}: {found['start_seconds']:.2f} s from its start until it has found both servers"
        f"{' and started them' if way == RAY else ''}, {found['pss_bytes'] / _MEGABYTE:.0f} MB after all of this, "
        f"{_fine(found['cpu_seconds_per_message'])} of processor time a message, and "
        f"{found['idle_cpu_share']:.1%} of a core with nothing to do."
    )


def _fine(seconds: float) -> str:
    return f"{1e6 * seconds:,.0f} µs"


def main() -> int:
    """Measures, and says it all on the last line of stdout."""
    settings, folder = _parse(sys.argv[1:])
    return scenario.tell(NAME, lambda: measure(settings, scenario.BUILD), render, folder, module="scaling_out")


def _parse(arguments: Sequence[str]) -> tuple[Settings, Path]:
    defaults = Settings(threads=max(1, (os.cpu_count() or 1) // NUM_SERVERS))
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scaling_out", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--model", default=defaults.model, help="a preset, of which prompts are kept")
    parser.add_argument("--precision", default=defaults.precision, help="fp32, bf16, int8, int4")
    parser.add_argument("--rounds", type=int, default=defaults.rounds)
    parser.add_argument("--threads", type=int, default=defaults.threads, help="of each server")
    parser.add_argument("--seed", type=int, default=defaults.seed)
    parser.add_argument("--ray", action="store_true", help="measure Ray Serve besides; make ray installs it")
    parser.add_argument("--quick", action="store_true", help="one short round and few requests: to see that it works")
    parser.add_argument("--docs", action="store_true", help="write the report into docs/ and not into build/bench")
    options = parser.parse_args(arguments)
    for name in ("rounds", "threads"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1")
    settings = replace(
        defaults,
        model=options.model,
        precision=options.precision,
        rounds=options.rounds,
        threads=options.threads,
        seed=options.seed,
        ray=options.ray,
    )
    if options.quick:
        settings = replace(settings, rounds=1, calls=50, full_messages=100, idle_seconds=0.5, families=3, requests=9)
    return settings, DOCS if options.docs else scenario.BUILD


if __name__ == "__main__":
    sys.exit(main())
