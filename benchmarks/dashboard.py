"""The dashboard on a live server: every panel's queries answered by a real Prometheus, and drawn into one picture.

    python -m benchmarks.dashboard [--model stdlib] [--precision fp32] [--seconds 90] [--threads N] [--quick] [--docs]

A server of its own is asked now for little and now for too much, with all that clients do: prompts that share a
beginning, urgent requests, several outputs, clients that hang up or are out of patience, and nonsense. The panels are
those of `deploy/grafana/dashboards/onward.json`, the file that Grafana reads, with its variables set to everything.
A panel of which any query has no data, a recording rule that has none, or a rule that cannot be evaluated is a failure.

The last line on stdout is one JSON object; the picture goes to `build/bench`, or to `docs` with `--docs`.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import itertools
import json
import os
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc.aio
import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from benchmarks import scenario
from benchmarks.frame.servers import served
from benchmarks.infra.prometheus import Prometheus, Series, scraping
from benchmarks.peers.onward import artifact, version
from benchmarks.scenario import draw
from model.spec.artifact import load
from model.spec.config import ModelConfig
from onward.v1 import generation_pb2 as pb
from onward.v1.generation_pb2_grpc import GenerationServiceStub

if TYPE_CHECKING:
    from onward.v1.generation_pb2_grpc import GenerationServiceAsyncStub

NAME = "dashboard"
DOCS = Path("docs")
DASHBOARD = Path(__file__).resolve().parents[1] / "deploy" / "grafana" / "dashboards" / "onward.json"

_COLUMNS = 4
_MOST_POINTS = 160
# Okabe and Ito's colours.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#F0E442", "#000000")
_LABEL = re.compile(r"\{\{(\w+)\}\}")
# Who is refused comes again, and not at once.
_PAUSE_SECONDS = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is asked. In each phase so many clients ask one request after the other."""

    model: str = "stdlib"
    precision: str = "fp32"
    clients: tuple[int, ...] = (2, 6, 12, 40, 12, 4)
    seconds: float = 90.0
    slots: int = 8
    queue: int = 16
    prompt_least: int = 16
    prompt_most: int = 192
    shared: int = 128
    new_least: int = 8
    new_most: int = 64
    scrape_seconds: float = 1.0
    threads: int = 1
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel as Grafana reads it. `queries` are expressions by legend."""

    title: str
    unit: str
    is_stacked: bool
    is_logarithmic: bool
    queries: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Answered:
    """A panel and what Prometheus answered, by the legends of its queries."""

    panel: Panel
    answers: Mapping[str, tuple[Series, ...]]

    @property
    def without_data(self) -> list[str]:
        """The queries that nothing came of."""
        return [
            self.panel.queries[legend]
            for legend, answer in self.answers.items()
            if not any(series.has_data for series in answer)
        ]

    @property
    def lines(self) -> dict[str, Series]:
        """What there is to draw, by legend with its labels filled in."""
        return {
            _LABEL.sub(lambda label, of=series.labels: of.get(label[1], ""), legend): series  # type: ignore[misc]
            for legend, answer in self.answers.items()
            for series in answer
            if series.has_data
        }


def measure(settings: Settings, build: Path) -> dict[str, Any]:
    """Makes the model, serves it under load and a Prometheus, and asks for every panel and every rule.

    Raises:
        RuntimeError: naming all that has no data.
    """
    options = scenario.make_artifact(
        settings.model, settings.precision, build=build, max_batch=settings.slots, threads=settings.threads
    )
    config = load(artifact(options)).config
    flags = ["--threads", str(settings.threads), "--max-batch-size", str(settings.slots)]
    flags += ["--max-queue-size", str(settings.queue), "--metrics-port", "0", "--log-level", "error"]
    flags += ["--slo-time-to-first-token", "0.2,1", "--slo-inter-token-latency", "0.02", "--slo-e2e-latency", "2"]
    with (
        served(artifact(options).parent, *flags) as server,
        tempfile.TemporaryDirectory(prefix="onward-prometheus-") as folder,
        scraping([server.metrics], Path(folder), interval_seconds=settings.scrape_seconds) as prometheus,
    ):
        prometheus.wait_scraped(time.time())
        start = time.time()
        asked = asyncio.run(press(server.target, settings, config))
        prometheus.wait_scraped(time.time())
        end = time.time()
        answered = evaluate(prometheus, read_panels(DASHBOARD), start, end, settings.scrape_seconds)
        rules = check_rules(prometheus, end)
    require_data(answered, rules.pop("problems"))
    facts = {"scenario": NAME, "version": version(), "settings": asdict(settings), "machine": scenario.machine()}
    panels = [{"title": each.panel.title, "series": len(each.lines)} for each in answered]
    return facts | {"asked": asked, "panels": panels, "rules": rules, "answered": answered, "start": start}


def read_panels(file: Path) -> list[Panel]:
    """The panels of a dashboard, in order."""
    board = json.loads(file.read_text(encoding="utf-8"))
    return [
        Panel(
            title=panel["title"],
            unit=panel["fieldConfig"]["defaults"]["unit"],
            is_stacked="stacking" in panel["fieldConfig"]["defaults"]["custom"],
            is_logarithmic="scaleDistribution" in panel["fieldConfig"]["defaults"]["custom"],
            queries={target["legendFormat"]: target["expr"] for target in panel["targets"]},
        )
        for panel in board["panels"]
        if panel["type"] != "row"
    ]


def evaluate(
    prometheus: Prometheus, panels: Sequence[Panel], start: float, end: float, scrape_seconds: float
) -> list[Answered]:
    """Asks for every panel over a time, as Grafana would with every variable set to everything."""
    step = max(scrape_seconds, (end - start) / _MOST_POINTS)
    # Grafana's own rule for the interval of rates.
    interval = max(4 * scrape_seconds, step + scrape_seconds)

    def ask(query: str) -> tuple[Series, ...]:
        return tuple(prometheus.query_range(fill(query, interval), start, end, step))

    return [Answered(panel, {legend: ask(query) for legend, query in panel.queries.items()}) for panel in panels]


def fill(query: str, interval_seconds: float, instance: str = ".+") -> str:
    """A panel's query with values for Grafana's variables: every model, and servers whose address fits a pattern."""
    variables = {"$__rate_interval": f"{round(1000 * interval_seconds)}ms", "$model": ".+", "$instance": instance}
    pattern = re.compile("|".join(map(re.escape, variables)))
    return pattern.sub(lambda name: variables[name[0]], query)


def require_data(answered: Sequence[Answered], problems: Sequence[str]) -> None:
    """Refuses a dashboard with gaps.

    Args:
        answered: its panels.
        problems: what is wrong besides.

    Raises:
        RuntimeError: naming all that is wrong.
    """
    empty = [f"panel {each.panel.title}: no data for {query}" for each in answered for query in each.without_data]
    if empty or problems:
        raise RuntimeError("; ".join([*empty, *problems]))


def check_rules(prometheus: Prometheus, at: float) -> dict[str, Any]:
    """How many rules there are, and what is wrong with any: all can be evaluated, and all that record have recorded."""
    rules = prometheus.rules()
    sick = [rule for rule in rules if rule["health"] != "ok"]
    problems = [f"rule {rule['name']}: {rule.get('lastError', rule['health'])}" for rule in sick]
    names = sorted({rule["name"] for rule in rules if rule["type"] == "recording"})
    recorded = {name: any(series.has_data for series in prometheus.query(name, at)) for name in names}
    problems += [f"rule {name} recorded nothing" for name, has_data in recorded.items() if not has_data]
    counts = Counter(rule["type"] for rule in rules)
    return {"recording": counts["recording"], "alerting": counts["alerting"], "problems": problems}


async def press(target: str, settings: Settings, config: ModelConfig) -> dict[str, int]:
    """Asks for as long as was wanted, phase by phase; how many requests ended in which way, by status code."""
    ended: Counter[str] = Counter()
    source = random.Random(settings.seed)  # noqa: S311 (not for secrets)
    shared = draw(source, config.vocab_size, min(settings.shared, config.context // 2))
    async with grpc.aio.insecure_channel(target) as channel:
        stub = GenerationServiceStub(channel)
        for clients in settings.clients:
            until = time.monotonic() + settings.seconds / len(settings.clients)
            async with asyncio.TaskGroup() as group:
                for number in range(clients):
                    wishes = _Wishes(settings, config, shared, random.Random(f"{settings.seed} {clients} {number}"))  # noqa: S311
                    group.create_task(_ask_until(stub, wishes, until, ended))
    return dict(sorted(ended.items()))


@dataclass(frozen=True, slots=True)
class _Wish:
    """One request, how many seconds its client gives it, and after how many messages it hangs up; None is for ever."""

    request: pb.GenerateStreamRequest
    seconds: float | None = None
    messages: int | None = None


class _Wishes:
    """What one client asks for, request by request: mostly sense."""

    def __init__(self, settings: Settings, config: ModelConfig, shared: Sequence[int], source: random.Random) -> None:
        self._settings = settings
        self._config = config
        self._shared = shared
        self._source = source

    def next(self) -> _Wish:
        chance = self._source.random()
        request = self._sense()
        if chance < 0.04:
            request.sampling.temperature = -1.0
        elif chance < 0.07:
            request.token_ids.ids[:] = draw(self._source, self._config.vocab_size, self._config.context)
        elif chance < 0.12:
            return _Wish(request, seconds=0.02)
        elif chance < 0.18:
            return _Wish(request, messages=3)
        elif chance < 0.28:
            request.priority = 5
        elif chance < 0.32:
            request.sampling.n = 2
        return _Wish(request)

    def _sense(self) -> pb.GenerateStreamRequest:
        settings, source = self._settings, self._source
        new = min(source.randint(settings.new_least, settings.new_most), self._config.context // 4)
        length = min(source.randint(settings.prompt_least, settings.prompt_most), self._config.context // 4)
        prompt = draw(source, self._config.vocab_size, length)
        if source.random() < 0.5:
            prompt = [*self._shared, *prompt]
        return pb.GenerateStreamRequest(
            token_ids=pb.TokenIds(ids=prompt),
            sampling=pb.SamplingParams(temperature=0.0),
            stopping=pb.StoppingParams(max_tokens=new, ignore_eos=True),
        )


async def _ask_until(stub: GenerationServiceAsyncStub, wishes: _Wishes, until: float, ended: Counter[str]) -> None:
    """One client: a request after the other."""
    while time.monotonic() < until:
        wish = wishes.next()
        try:
            ended[await _ask(stub, wish)] += 1
        except grpc.aio.AioRpcError as error:
            ended[error.code().name] += 1
            await asyncio.sleep(_PAUSE_SECONDS)


async def _ask(stub: GenerationServiceAsyncStub, wish: _Wish) -> str:
    call = stub.GenerateStream(wish.request, timeout=wish.seconds)
    messages = 0
    async for _ in call:
        messages += 1
        if messages == wish.messages:
            call.cancel()
            return grpc.StatusCode.CANCELLED.name
    return grpc.StatusCode.OK.name


def render(results: Mapping[str, Any]) -> str:
    """The document, in Markdown."""
    settings, rules = results["settings"], results["rules"]
    asked = ", ".join(f"{count} {code}" for code, count in results["asked"].items())
    return "\n".join(
        [
            "# The dashboard",
            "",
            f"{settings['model']} {settings['precision']} on {settings['slots']} slots and {settings['threads']} "
            f"threads, on {results['machine']['processor']}; {settings['seconds']:g} s in {len(settings['clients'])} "
            f"phases of {', '.join(map(str, settings['clients']))} clients. Requests ended as: {asked}.",
            "",
            f"All {len(results['panels'])} panels have data, all {rules['recording']} recording rules have recorded, "
            f"and all {rules['alerting']} alert rules can be evaluated.",
            "",
            f"![Every panel of the dashboard under that load]({NAME}.svg)",
            "",
        ]
    )


def draw_picture(results: Mapping[str, Any]) -> str:
    """Every panel over time, as SVG."""
    answered: Sequence[Answered] = results["answered"]
    stream = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": NAME, "font.size": 7, "axes.titlesize": 8}):
        lines = -(-len(answered) // _COLUMNS)
        figure = Figure(figsize=(3.0 * _COLUMNS, 1.75 * lines), layout="constrained")
        grid = figure.subplots(lines, _COLUMNS, squeeze=False, sharex=True)
        for axes, each in itertools.zip_longest(grid.flat, answered):
            if each is None:
                axes.set_visible(False)
            else:
                _draw_panel(axes, each, results["start"])
        for axes in [column[: len(answered[place::_COLUMNS])][-1] for place, column in enumerate(grid.T)]:
            axes.tick_params(labelbottom=True)
            axes.set_xlabel("s")
        figure.savefig(stream, format="svg", facecolor="white", metadata={"Date": None})
    return stream.getvalue()


def _draw_panel(axes: Axes, answered: Answered, start: float) -> None:
    panel, lines = answered.panel, answered.lines
    names = list(lines)
    for label in ("model_name", "instance"):
        # One model, or one server, needs no name.
        values = {series.labels.get(label, "") for series in lines.values()}
        if len(values) == 1:
            names = [name.removeprefix(next(iter(values))).strip() for name in names]
    times = sorted({when for series in lines.values() for when, _ in series.points})
    heights = np.full((len(lines), len(times)), np.nan)
    places = {when: place for place, when in enumerate(times)}
    for row, series in zip(heights, lines.values(), strict=True):
        for when, value in series.points:
            row[places[when]] = value
    scale, unit = _scale(panel.unit, float(np.nanmax(heights)))
    axes.set_title(f"{panel.title}{unit and f', {unit}'}", loc="left")
    seconds, colours = np.array(times) - start, itertools.cycle(_COLOURS)
    if panel.is_stacked:
        axes.stackplot(seconds, np.nan_to_num(heights) / scale, labels=names, colors=_COLOURS, linewidth=0)
    else:
        for row, name in zip(heights, names, strict=True):
            axes.plot(seconds, row / scale, color=next(colours), linewidth=0.9, label=name)
    if panel.is_logarithmic:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    if panel.unit == "percentunit":
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.3g} %"))
    axes.spines[["top", "right"]].set_visible(False)
    if any(names):
        axes.legend(fontsize=5.5, frameon=False, loc="best", ncols=1 + (len(names) > 4), handlelength=1.0)


def _scale(unit: str, most: float) -> tuple[float, str]:
    """What values are divided by for people, and the unit then."""
    match unit:
        case "s" if most < 1:
            return 1e-3, "ms"
        case "s":
            return 1.0, "s"
        case "bytes":
            return float(1 << 20), "MiB"
        case "reqps":
            return 1.0, "1/s"
    return 1.0, ""


def main() -> int:
    """Measures, and says it all on the last line of stdout."""
    settings, folder = _parse(sys.argv[1:])
    return scenario.tell(
        NAME, lambda: measure(settings, scenario.BUILD), render, folder, draw_picture, untold=("answered", "start")
    )


def _parse(arguments: Sequence[str]) -> tuple[Settings, Path]:
    defaults = Settings(threads=max(1, (os.cpu_count() or 1) - 1))
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{NAME}", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default=defaults.model, help="a preset")
    parser.add_argument("--precision", default=defaults.precision, help="fp32, bf16, int8, int4")
    parser.add_argument("--seconds", type=float, default=defaults.seconds, help="of load")
    parser.add_argument("--slots", type=int, default=defaults.slots, help="requests that run at once")
    parser.add_argument("--threads", type=int, default=defaults.threads)
    parser.add_argument("--seed", type=int, default=defaults.seed)
    parser.add_argument("--quick", action="store_true", help="a tenth of the time: to see that it works")
    parser.add_argument("--docs", action="store_true", help="write the report into docs/ and not into build/bench")
    options = parser.parse_args(arguments)
    for name, least in (("seconds", 10.0), ("slots", 1), ("threads", 1)):
        if getattr(options, name) < least:
            parser.error(f"--{name} must be at least {least:g}")
    settings = replace(
        defaults,
        model=options.model,
        precision=options.precision,
        seconds=options.seconds / 10 if options.quick else options.seconds,
        scrape_seconds=0.25 if options.quick else defaults.scrape_seconds,
        slots=options.slots,
        threads=options.threads,
        seed=options.seed,
    )
    return settings, DOCS if options.docs else scenario.BUILD


if __name__ == "__main__":
    sys.exit(main())
