"""Whether clients' clocks and Prometheus agree, and how long a scrape of a fully loaded server takes.

A client in a process of its own streams requests of mixed lengths over gRPC, always more in flight than the server has
slots, so that some wait. A real Prometheus with the shipped rules scrapes four times a second, vLLM's metric names
included. At the end its 50th, 90th and 99th percentile of the time to first token, between tokens and of whole requests
are compared with the client's, over exactly the client's requests. Promise:

    each lies in the same bucket of its histogram as the client's percentile, or in the next one

A slow client gets several tokens in one message. A message of k tokens after a wait of w counts as k waits of w/k,
which keeps their sum and number, as the server's histogram does. Tokens in the message of the first one have no wait
on the client's side and are left out.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import tempfile
import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.ticker import LogLocator, NullFormatter

from benchmarks.frame.models import METRICS, draw
from benchmarks.frame.pictures import drawing
from benchmarks.frame.scenario import ModelSettings, Results, Run, Scenario, cores, option
from benchmarks.frame.statistics import percentile
from benchmarks.frame.streams import connected, gathered, greedy
from benchmarks.frame.tables import conditions, milliseconds, subject, table, verdict
from benchmarks.infra.prometheus import Prometheus, scraping
from model.spec.config import ModelConfig
from onward.v1 import generation_pb2 as pb

if TYPE_CHECKING:
    from onward.v1.generation_pb2_grpc import GenerationServiceAsyncStub

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
class ClockSettings(ModelSettings):
    """What is measured. Lengths are drawn uniformly between their bounds."""

    model: str = option("stdlib", "a preset")
    precision: str = option("fp32", "fp32, bf16, int8, int4")
    # One core stays for the client, or its clock would measure its own waiting.
    threads: int = option(cores(spare=1), "of the server", least=1)
    requests: int = option(1000, "streamed", least=1, quick=100)
    warm_up: int = option(50)
    slots: int = option(16, "requests that run at once", least=1)
    in_flight: int = option(24, "requests that run or wait", least=1)
    prompt_least: int = option(16)
    prompt_most: int = option(256)
    new_least: int = option(16)
    new_most: int = option(96)
    scrape_seconds: float = option(0.25)


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


def measure(settings: ClockSettings, run: Run) -> dict[str, Any]:
    """Serves the model beside a Prometheus."""
    model = run.subject(settings, settings.slots)
    config = model.config
    source = random.Random(settings.seed)  # noqa: S311 (not for secrets)
    with (
        model.served(*METRICS, "--metrics-compat", "vllm") as server,
        tempfile.TemporaryDirectory(prefix="onward-prometheus-") as folder,
        scraping([server.metrics], Path(folder), interval_seconds=settings.scrape_seconds) as prometheus,
    ):
        asyncio.run(ask(server.target, replace(settings, requests=settings.warm_up), config, source))
        since = _settle(prometheus)
        streams = asyncio.run(ask(server.target, settings, config, source))
        until = _settle(prometheus)
        histograms = {name: read(prometheus, metric, since, until) for name, metric in HISTOGRAMS.items()}
        scrapes = _scrapes(prometheus, since, until)
    return judge(streams, histograms, scrapes)


async def ask(target: str, settings: ClockSettings, config: ModelConfig, source: random.Random) -> list[Stream]:
    """Streams the requests, so many at a time, each sent when another has ended."""
    room = config.context - 1
    asked = []
    for _ in range(settings.requests):
        new = min(source.randint(settings.new_least, settings.new_most), room - 1)
        length = min(source.randint(settings.prompt_least, settings.prompt_most), room - new)
        asked.append((draw(source, config.vocab_size, length), new))
    async with connected(target) as stub:
        return await gathered((follow(stub, prompt, new) for prompt, new in asked), settings.in_flight)


async def follow(stub: GenerationServiceAsyncStub, prompt: Sequence[int], new: int) -> Stream:
    """Asks for so many greedy tokens and notes when each message comes.

    Raises:
        RuntimeError: when the stream ends without all its tokens.
    """
    request = greedy(pb.GenerateStreamRequest, prompt, new)
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
    """Compares the client's streams with the histograms of the same requests.

    Raises:
        RuntimeError: if the server counted other requests than the client sent.
    """
    tokens = sum(count for stream in streams for _, count in stream.messages)
    expected = {"first token": len(streams), "between tokens": tokens - len(streams), "request": len(streams)}
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
    together = tokens - sum(count == 1 for stream in streams for _, count in stream.messages)
    return {
        "percentiles": compared,
        "requests": len(streams),
        "tokens": tokens,
        "tokens_in_company_share": together / tokens,
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


def render(results: Results) -> str:
    """The document."""
    settings, scrapes, waits = results["settings"], results["scrapes"], results["waits_between_messages"]
    rows = [
        [f"{name}, {share}", milliseconds(each["client"]), milliseconds(each["prometheus"]), each["buckets_apart"]]
        for name, by_share in results["percentiles"].items()
        for share, each in by_share.items()
    ]
    lines = [
        "# Two clocks",
        "",
        f"{subject(results)}, {results['requests']} streamed requests with prompts of {settings['prompt_least']} to "
        f"{settings['prompt_most']} tokens and {settings['new_least']} to {settings['new_most']} new ones, "
        f"{settings['in_flight']} in flight on {settings['slots']} slots, {conditions(results)}. The client and a "
        "Prometheus run beside the server; `histogram_quantile` is Prometheus' own.",
        "",
        *table("|client|Prometheus|buckets apart", rows),
        "",
        f"The promise, one bucket at most, {verdict(results['clocks_agree'])}. Buckets grow by half.",
        "",
        f"{results['tokens_in_company_share']:.1%} of the {results['tokens']} tokens shared a message with others. The "
        f"waits between messages were {', '.join(map(milliseconds, waits.values()))} ({', '.join(waits)}). "
        f"{results['tokens_with_the_first']} tokens came together with a first one and have no wait here.",
        "",
        f"Under this load ({scrapes['mean_running']:.1f} requests ran and {scrapes['mean_waiting']:.1f} waited on "
        f"average) {scrapes['count']:.0f} scrapes of {scrapes['samples']:.0f} samples took "
        f"{milliseconds(scrapes['median'])} in the median, {milliseconds(scrapes['p99'])} at the 99th percentile and "
        f"{milliseconds(scrapes['max'])} at most: the promise of {milliseconds(MOST_SCRAPE_SECONDS)} "
        f"{verdict(results['scrapes_in_time'])}.",
    ]
    return "\n".join(lines)


def draw_picture(results: Results) -> str:
    """The distributions on the client's clock as lines, the histograms at their boundaries as points, as SVG."""
    with drawing("clocks", 9.0, 2.6) as (figure, svg):
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


SCENARIO = Scenario(
    __name__,
    ClockSettings,
    measure,
    render,
    draw_picture,
    caption="Each distribution on the client's clock, and at the boundaries of its histogram",
    picture_only=("curves",),
)
