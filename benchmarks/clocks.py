"""Whether clients' clocks and Prometheus agree, and how long a scrape takes of a server that is fully loaded.

    python -m benchmarks.clocks [--model stdlib] [--precision fp32] [--requests 1000] [--slots 16] [--in-flight 24]
                                [--threads N] [--quick] [--docs]

A client streams requests of mixed lengths over gRPC from a process of its own, always so many in flight and more than
the server has slots, so that some wait. A real Prometheus, with the rules that are shipped, scrapes four times a second
meanwhile, vLLM's names included. At the end it is asked for the 50th, 90th and 99th percentile of the time to the first
token, between tokens and of whole requests, over exactly the client's requests (what was counted before them is
subtracted), and the client's own percentiles are laid beside them. The promise:

    each lies in the same bucket of its histogram as the client's percentile, or in the one next to it

A client that is behind gets several tokens in one message. A message of k tokens after a wait of w counts as k waits of
w/k: the client cannot tell when in between each was made, and this keeps their sum and their number, which is what the
server's histogram has. The share of tokens that came so, and the percentiles of the bare waits between messages, are
told beside it. Tokens that came together with the first one have no wait at all on the client's side and are left out.

The last line on stdout is one JSON object; report and picture go to `build/bench`.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import sys
import tempfile
import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc.aio
from matplotlib.ticker import LogLocator, NullFormatter

from benchmarks import scenario
from benchmarks.frame.pictures import drawing
from benchmarks.frame.servers import served
from benchmarks.infra.prometheus import Prometheus, scraping
from benchmarks.peers.onward import artifact
from benchmarks.scenario import draw, milliseconds, percentile
from benchmarks.scenario_options import ScenarioSettings, at_least, new_parser, read_settings
from model.spec.artifact import load
from model.spec.config import ModelConfig
from onward.v1 import generation_pb2 as pb
from onward.v1.generation_pb2_grpc import GenerationServiceStub

if TYPE_CHECKING:
    from onward.v1.generation_pb2_grpc import GenerationServiceAsyncStub

NAME = "clocks"
SHARES = (0.5, 0.9, 0.99)
MOST_BUCKETS_APART = 1
MOST_SCRAPE_SECONDS = 0.1

HISTOGRAMS: Mapping[str, str] = {
    "first token": "onward_time_to_first_token_seconds",
    "between tokens": "onward_inter_token_latency_seconds",
    "request": "onward_e2e_request_latency_seconds",
}
_CURVE_POINTS = 200
# Shares that the picture leaves out at either end.
_TAIL = 0.002


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(ScenarioSettings):
    """What is measured. Lengths of prompts and outputs are drawn evenly between their bounds."""

    model: str = "stdlib"
    precision: str = "fp32"
    requests: int = 1000
    warm_up: int = 50
    slots: int = 16
    in_flight: int = 24
    prompt_least: int = 16
    prompt_most: int = 256
    new_least: int = 16
    new_most: int = 96
    scrape_seconds: float = 0.25


@dataclass(frozen=True, slots=True)
class Stream:
    """One request on the client's clock: when it was sent, when each message came and with how many tokens, its end."""

    sent: float
    messages: tuple[tuple[float, int], ...]
    ended: float

    @property
    def first_token_seconds(self) -> float:
        """From the question to the first token."""
        return self.messages[0][0] - self.sent

    @property
    def seconds(self) -> float:
        """From the question to the end of the stream."""
        return self.ended - self.sent

    @property
    def waits(self) -> list[tuple[float, int]]:
        """The waits between messages, and how many tokens each brought."""
        times = [when for when, _ in self.messages]
        return [(after - before, count) for before, (after, count) in zip(times, self.messages[1:], strict=False)]

    @property
    def token_waits(self) -> list[float]:
        """A wait for every token after the first message's."""
        return [wait / count for wait, count in self.waits for _ in range(count)]


@dataclass(frozen=True, slots=True)
class Histogram:
    """What Prometheus has of a histogram: upper bounds, how many observations lie at or below each, some quantiles."""

    bounds: tuple[float, ...]
    counts: tuple[float, ...]
    quantiles: Mapping[float, float]

    def bucket(self, value: float) -> int:
        """The number of the bucket that a value falls into."""
        return bisect_left(self.bounds, value)


def measure(settings: Settings, build: Path) -> dict[str, Any]:
    """Makes the model, serves it under a Prometheus, and measures."""
    options = scenario.make_artifact(
        settings.model, settings.precision, build=build, max_batch=settings.slots, threads=settings.threads
    )
    config = load(artifact(options)).config
    flags = ["--threads", str(settings.threads), "--max-batch-size", str(settings.slots)]
    flags += ["--metrics-port", "0", "--metrics-compat", "vllm", "--log-level", "warning"]
    source = random.Random(settings.seed)  # noqa: S311 (not for secrets)
    with (
        served(artifact(options).parent, *flags) as server,
        tempfile.TemporaryDirectory(prefix="onward-prometheus-") as folder,
        scraping([server.metrics], Path(folder), interval_seconds=settings.scrape_seconds) as prometheus,
    ):
        asyncio.run(ask(server.target, replace(settings, requests=settings.warm_up), config, source))
        since = _settle(prometheus)
        streams = asyncio.run(ask(server.target, settings, config, source))
        until = _settle(prometheus)
        histograms = {name: read(prometheus, metric, since, until) for name, metric in HISTOGRAMS.items()}
        scrapes = _scrapes(prometheus, since, until)
    return scenario.facts(NAME, settings) | judge(streams, histograms, scrapes)


async def ask(target: str, settings: Settings, config: ModelConfig, source: random.Random) -> list[Stream]:
    """Streams the requests, so many at a time, each sent when another has ended."""
    room = config.context - 1
    asked = []
    for _ in range(settings.requests):
        new = min(source.randint(settings.new_least, settings.new_most), room - 1)
        length = min(source.randint(settings.prompt_least, settings.prompt_most), room - new)
        asked.append((draw(source, config.vocab_size, length), new))
    gate = asyncio.Semaphore(settings.in_flight)

    async def one(stub: GenerationServiceAsyncStub, prompt: Sequence[int], new: int) -> Stream:
        async with gate:
            return await follow(stub, prompt, new)

    async with grpc.aio.insecure_channel(target) as channel:
        stub = GenerationServiceStub(channel)
        return await asyncio.gather(*(one(stub, prompt, new) for prompt, new in asked))


async def follow(stub: GenerationServiceAsyncStub, prompt: Sequence[int], new: int) -> Stream:
    """Asks for so many greedy tokens and notes when each message comes.

    Raises:
        RuntimeError: when the stream ends without all its tokens.
    """
    request = pb.GenerateStreamRequest(
        token_ids=pb.TokenIds(ids=prompt),
        sampling=pb.SamplingParams(temperature=0.0),
        stopping=pb.StoppingParams(max_tokens=new, ignore_eos=True),
    )
    sent = time.perf_counter()
    events = stub.GenerateStream(request)
    messages = [(time.perf_counter(), len(each.delta.token_ids)) async for each in events if each.delta.token_ids]
    ended = time.perf_counter()
    if (count := sum(count for _, count in messages)) != new:
        raise RuntimeError(f"asked for {new} tokens, got {count}")
    return Stream(sent, tuple(messages), ended)


def read(prometheus: Prometheus, metric: str, since: float, until: float) -> Histogram:
    """What a histogram took in between two moments, over all models, as Prometheus has it."""
    buckets = f"sum by (le) ({metric}_bucket - {metric}_bucket @ {since:.3f})"
    found = sorted((float(each.labels["le"]), each.last) for each in prometheus.query(buckets, until))
    quantiles = {share: prometheus.number(f"histogram_quantile({share}, {buckets})", until) for share in SHARES}
    return Histogram(tuple(bound for bound, _ in found), tuple(count for _, count in found), quantiles)


def judge(
    streams: Sequence[Stream], histograms: Mapping[str, Histogram], scrapes: Mapping[str, float]
) -> dict[str, Any]:
    """What came out.

    Args:
        streams: all requests, on the client's clock.
        histograms: by the names of `HISTOGRAMS`, over the same requests.
        scrapes: how long they took.

    Raises:
        RuntimeError: when the server did not count what the client asked for.
    """
    told = sum(count for stream in streams for _, count in stream.messages)
    expected = {"first token": len(streams), "between tokens": told - len(streams), "request": len(streams)}
    for name, count in expected.items():
        if histograms[name].counts[-1] != count:
            raise RuntimeError(f"{HISTOGRAMS[name]} counts {histograms[name].counts[-1]:g}, the client {count}")
    waits = [wait for stream in streams for wait in stream.waits]
    client = {
        "first token": [stream.first_token_seconds for stream in streams],
        "between tokens": [wait for stream in streams for wait in stream.token_waits],
        "request": [stream.seconds for stream in streams],
    }
    compared = {name: _compare(client[name], histograms[name]) for name in HISTOGRAMS}
    apart = max(each["buckets_apart"] for by_share in compared.values() for each in by_share.values())
    together = told - sum(count == 1 for stream in streams for _, count in stream.messages)
    return {
        "percentiles": compared,
        "requests": len(streams),
        "tokens": told,
        "tokens_in_company_share": together / told,
        "tokens_with_the_first": sum(stream.messages[0][1] - 1 for stream in streams),
        "waits_between_messages": {
            f"p{100 * share:g}": percentile([wait for wait, _ in waits], share) for share in SHARES
        },
        "most_buckets_apart": apart,
        "scrapes": dict(scrapes),
        "clocks_agree": apart <= MOST_BUCKETS_APART,
        "scrapes_in_time": scrapes["max"] <= MOST_SCRAPE_SECONDS,
        "curves": {name: _curves(client[name], histograms[name]) for name in HISTOGRAMS},
    }


def _compare(values: Sequence[float], histogram: Histogram) -> dict[str, dict[str, float]]:
    compared = {}
    for share in SHARES:
        ours, theirs = percentile(values, share), histogram.quantiles[share]
        compared[f"p{100 * share:g}"] = {
            "client": ours,
            "prometheus": theirs,
            "buckets_apart": abs(histogram.bucket(ours) - histogram.bucket(theirs)),
        }
    return compared


def _curves(values: Sequence[float], histogram: Histogram) -> dict[str, list[tuple[float, float]]]:
    """For the picture: the client's distribution, and the histogram's at its boundaries."""
    shares = [(number + 0.5) / _CURVE_POINTS for number in range(_CURVE_POINTS)]
    total = histogram.counts[-1]
    return {
        "client": [(percentile(values, share), share) for share in shares],
        "prometheus": [
            (bound, count / total)
            for bound, count in zip(histogram.bounds[:-1], histogram.counts, strict=False)
            if _TAIL < count / total < 1 - _TAIL
        ],
    }


def _settle(prometheus: Prometheus) -> float:
    """Waits for a scrape that begins from now on, while nothing is counted; when that is."""
    return prometheus.wait_scraped(time.time())


def _scrapes(prometheus: Prometheus, since: float, until: float) -> dict[str, float]:
    """How long Prometheus waited for the server's answers, and how busy the server was."""
    window = f"[{max(1, round(until - since))}s]"
    (series,) = prometheus.query(f'scrape_duration_seconds{{job="onward"}}{window}', until)
    seconds = [value for _, value in series.points]
    return {
        "count": len(seconds),
        "median": statistics.median(seconds),
        "p99": percentile(seconds, 0.99),
        "max": max(seconds),
        "samples": prometheus.number('scrape_samples_scraped{job="onward"}', until),
        "mean_running": prometheus.number(f"sum(avg_over_time(onward_num_requests_running{window}))", until),
        "mean_waiting": prometheus.number(f"sum(avg_over_time(onward_num_requests_waiting{window}))", until),
    }


def render(results: Mapping[str, Any]) -> str:
    """The document, in Markdown."""
    settings, scrapes, waits = results["settings"], results["scrapes"], results["waits_between_messages"]
    lines = [
        "# Two clocks",
        "",
        f"{settings['model']} {settings['precision']}, {results['requests']} streamed requests with prompts of "
        f"{settings['prompt_least']} to {settings['prompt_most']} tokens and {settings['new_least']} to "
        f"{settings['new_most']} new ones, {settings['in_flight']} in flight on {settings['slots']} slots, "
        f"{settings['threads']} threads, on {results['machine']['processor']}. The client and a Prometheus run beside "
        "the server; `histogram_quantile` is Prometheus' own.",
        "",
        "| | client | Prometheus | buckets apart |",
        "|---|---:|---:|---:|",
    ]
    lines += [
        f"| {name}, {share} | {milliseconds(each['client'])} | {milliseconds(each['prometheus'])} | "
        f"{each['buckets_apart']} |"
        for name, by_share in results["percentiles"].items()
        for share, each in by_share.items()
    ]
    lines += [
        "",
        f"The promise, one bucket at most, {_verdict(results['clocks_agree'])}. Buckets grow by half.",
        "",
        f"{results['tokens_in_company_share']:.1%} of the {results['tokens']} tokens shared a message with others; a "
        f"message of k tokens after a wait of w counts as k waits of w/k. The bare waits between messages were "
        f"{milliseconds(waits['p50'])}, {milliseconds(waits['p90'])} and {milliseconds(waits['p99'])} (p50, p90, p99). "
        f"{results['tokens_with_the_first']} tokens came together with a first one and have no wait here.",
        "",
        f"Under this load ({scrapes['mean_running']:.1f} requests ran and {scrapes['mean_waiting']:.1f} waited on "
        f"average) {scrapes['count']:.0f} scrapes of {scrapes['samples']:.0f} samples took "
        f"{milliseconds(scrapes['median'])} in the median, {milliseconds(scrapes['p99'])} at the 99th percentile and "
        f"{milliseconds(scrapes['max'])} at most: the promise of {milliseconds(MOST_SCRAPE_SECONDS)} "
        f"{_verdict(results['scrapes_in_time'])}.",
        "",
        f"![Each distribution on the client's clock, and at the boundaries of its histogram]({NAME}.svg)",
        "",
    ]
    return "\n".join(lines)


def _verdict(holds: bool) -> str:  # noqa: FBT001
    return "holds" if holds else "does **not** hold"


def draw_picture(results: Mapping[str, Any]) -> str:
    """The distributions on the client's clock as lines, the histograms at their boundaries as points, as SVG."""
    with drawing(NAME, 9.0, 2.6) as (figure, svg):
        for axes, (name, curves) in zip(figure.subplots(1, len(HISTOGRAMS)), results["curves"].items(), strict=True):
            axes.plot(*_milliseconds(curves["client"]), color="#0072B2", linewidth=1.0, label="client")
            axes.plot(*_milliseconds(curves["prometheus"]), "o", color="#D55E00", markersize=3, label="Prometheus")
            axes.set_xscale("log")
            low, high = axes.get_xlim()
            axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,)))
            axes.xaxis.set_major_formatter("{x:g}")
            axes.xaxis.set_minor_formatter(NullFormatter())
            axes.set_title(name)
            axes.set_xlabel("ms")
        figure.axes[0].set_ylabel("share at or below")
        figure.axes[0].legend(loc="lower right", frameon=False)
    return svg.getvalue()


def _milliseconds(curve: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [1e3 * seconds for seconds, _ in curve], [share for _, share in curve]


def main() -> int:
    """Measures, and says it all on the last line of stdout."""
    settings, folder = _parse(sys.argv[1:])
    return scenario.tell(
        NAME, lambda: measure(settings, scenario.BUILD), render, folder, draw_picture, untold=("curves",)
    )


def _parse(arguments: Sequence[str]) -> tuple[Settings, Path]:
    parser = new_parser(NAME, __doc__, quick="a tenth of the requests")
    parser.add_argument("--requests", type=at_least(1))
    parser.add_argument("--slots", type=at_least(1), help="requests that run at once")
    parser.add_argument("--in-flight", type=at_least(1), help="requests that run or wait")
    # One processor stays for the client, or its clock would tell of its own waiting.
    return read_settings(parser, arguments, Settings(threads=max(1, (os.cpu_count() or 1) - 1)), _shorten)


def _shorten(settings: Settings) -> Settings:
    return replace(settings, requests=max(1, settings.requests // 10))


if __name__ == "__main__":
    sys.exit(main())
