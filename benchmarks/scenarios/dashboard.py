"""The Grafana dashboard on a live server: a real Prometheus answers every panel's queries, drawn into one picture.

A server of its own is loaded now lightly and now beyond capacity, with everything that clients do: shared prefixes,
urgent requests, several outputs, disconnects, timeouts and invalid requests. The panels are those of
`deploy/grafana/dashboards/onward.json` with all variables set to everything. A panel with a query without data, a
recording rule without data, or a rule that cannot be evaluated is a failure.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import re
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc.aio
import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from benchmarks.frame.models import draw
from benchmarks.frame.pictures import drawing
from benchmarks.frame.scenario import ModelSettings, Results, Run, Scenario, cores, option
from benchmarks.frame.streams import connected, greedy
from benchmarks.frame.tables import conditions, subject
from benchmarks.infra.prometheus import Prometheus, Series, scraping
from model.spec.config import ModelConfig
from onward.v1 import generation_pb2 as pb

if TYPE_CHECKING:
    from onward.v1.generation_pb2_grpc import GenerationServiceAsyncStub

DASHBOARD = Path(__file__).resolve().parents[2] / "deploy" / "grafana" / "dashboards" / "onward.json"

_COLUMNS = 4
_MOST_POINTS = 160
# More would hide the lines.
_MOST_NAMES = 11
# Okabe and Ito's colors.
_COLORS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#F0E442", "#000000")
_LABEL = re.compile(r"\{\{(\w+)\}\}")
# After a refusal.
_PAUSE_SECONDS = 0.25
_SLO = ("--slo-time-to-first-token", "0.2,1", "--slo-inter-token-latency", "0.02", "--slo-e2e-latency", "2")


@dataclass(frozen=True, slots=True, kw_only=True)
class DashboardSettings(ModelSettings):
    """What is asked. In each phase so many clients send one request after the other."""

    model: str = option("stdlib", "a preset")
    precision: str = option("fp32", "fp32, bf16, int8, int4")
    threads: int = option(cores(spare=1), "of the server", least=1)
    clients: tuple[int, ...] = option((2, 6, 12, 40, 12, 4))
    seconds: float = option(90.0, "of load", least=1.0, quick=9.0)
    slots: int = option(8, "requests that run at once", least=1)
    queue: int = option(16)
    prompt_least: int = option(16)
    prompt_most: int = option(192)
    shared: int = option(128)
    new_least: int = option(8)
    new_most: int = option(64)
    scrape_seconds: float = option(1.0, quick=0.25)


@dataclass(frozen=True, slots=True)
class Panel:
    """A panel; `queries` are expressions by legend."""

    title: str
    unit: str
    is_stacked: bool
    is_logarithmic: bool
    is_heat_map: bool
    queries: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Answered:
    """A panel and Prometheus' answers, by the legends of its queries."""

    panel: Panel
    answers: Mapping[str, tuple[Series, ...]]

    @property
    def without_data(self) -> list[str]:
        """Queries without data."""
        return [
            self.panel.queries[legend]
            for legend, answer in self.answers.items()
            if not any(series.has_data for series in answer)
        ]

    @property
    def lines(self) -> dict[str, Series]:
        """Series with data, by legend with its labels filled in."""
        return {
            _LABEL.sub(lambda label, of=series.labels: of.get(label[1], ""), legend): series  # type: ignore[misc]
            for legend, answer in self.answers.items()
            for series in answer
            if series.has_data
        }


def measure(settings: DashboardSettings, run: Run) -> dict[str, Any]:
    """Queries every panel and every rule after the load.

    Raises:
        RuntimeError: naming everything without data.
    """
    model = run.subject(settings, settings.slots)
    flags = ("--max-queue-size", str(settings.queue), "--metrics-port", "0", "--log-level", "error", *_SLO)
    with (
        model.served(*flags) as server,
        tempfile.TemporaryDirectory(prefix="onward-prometheus-") as folder,
        scraping([server.metrics], Path(folder), interval_seconds=settings.scrape_seconds) as prometheus,
    ):
        prometheus.wait_scraped(time.time())
        start = time.time()
        asked = asyncio.run(press(server.target, settings, model.config))
        prometheus.wait_scraped(time.time())
        end = time.time()
        answered = evaluate(prometheus, read_panels(DASHBOARD), start, end, settings.scrape_seconds)
        rules = check_rules(prometheus, end)
    require_data(answered, rules.pop("problems"))
    panels = [{"title": each.panel.title, "series": len(each.lines)} for each in answered]
    return {"asked": asked, "panels": panels, "rules": rules, "answered": answered, "start": start}


def read_panels(file: Path) -> list[Panel]:
    """The panels of a dashboard, in order."""
    board = json.loads(file.read_text(encoding="utf-8"))
    return [
        Panel(
            title=panel["title"],
            unit=panel["fieldConfig"]["defaults"]["unit"],
            is_stacked="stacking" in panel["fieldConfig"]["defaults"].get("custom", {}),
            is_logarithmic="scaleDistribution" in panel["fieldConfig"]["defaults"].get("custom", {}),
            is_heat_map=panel["type"] == "heatmap",
            queries={target["legendFormat"]: target["expr"] for target in panel["targets"]},
        )
        for panel in board["panels"]
        if panel["type"] != "row"
    ]


def evaluate(
    prometheus: Prometheus, panels: Sequence[Panel], start: float, end: float, scrape_seconds: float
) -> list[Answered]:
    """Queries every panel over a time, as Grafana does with all variables set to everything."""
    step = max(scrape_seconds, (end - start) / _MOST_POINTS)
    # Grafana's own rule for the interval of rates.
    interval = max(4 * scrape_seconds, step + scrape_seconds)

    def ask(query: str) -> tuple[Series, ...]:
        return tuple(prometheus.query_range(fill(query, interval), start, end, step))

    return [Answered(panel, {legend: ask(query) for legend, query in panel.queries.items()}) for panel in panels]


def fill(query: str, interval_seconds: float, instance: str = ".+") -> str:
    """A panel's query with Grafana's variables filled in: every model, and servers by a pattern."""
    variables = {"$__rate_interval": f"{round(1000 * interval_seconds)}ms", "$model": ".+", "$instance": instance}
    pattern = re.compile("|".join(map(re.escape, variables)))
    return pattern.sub(lambda name: variables[name[0]], query)


def require_data(answered: Sequence[Answered], problems: Sequence[str]) -> None:
    """Refuses a dashboard with gaps or other problems.

    Raises:
        RuntimeError: naming all of them.
    """
    empty = [f"panel {each.panel.title}: no data for {query}" for each in answered for query in each.without_data]
    if empty or problems:
        raise RuntimeError("; ".join([*empty, *problems]))


def check_rules(prometheus: Prometheus, at: float) -> dict[str, Any]:
    """Counts of rules, and problems: rules that fail, recording rules without data."""
    rules = prometheus.rules()
    sick = [rule for rule in rules if rule["health"] != "ok"]
    problems = [f"rule {rule['name']}: {rule.get('lastError', rule['health'])}" for rule in sick]
    names = sorted({rule["name"] for rule in rules if rule["type"] == "recording"})
    recorded = {name: any(series.has_data for series in prometheus.query(name, at)) for name in names}
    problems += [f"rule {name} recorded nothing" for name, has_data in recorded.items() if not has_data]
    counts = Counter(rule["type"] for rule in rules)
    return {"recording": counts["recording"], "alerting": counts["alerting"], "problems": problems}


async def press(target: str, settings: DashboardSettings, config: ModelConfig) -> dict[str, int]:
    """Loads the server phase by phase; requests by status code."""
    ended: Counter[str] = Counter()
    source = random.Random(settings.seed)  # noqa: S311 (not for secrets)
    shared = draw(source, config.vocab_size, min(settings.shared, config.context // 2))
    async with connected(target) as stub:
        for clients in settings.clients:
            until = time.monotonic() + settings.seconds / len(settings.clients)
            async with asyncio.TaskGroup() as group:
                for number in range(clients):
                    wishes = _Wishes(settings, config, shared, random.Random(f"{settings.seed} {clients} {number}"))  # noqa: S311
                    group.create_task(_ask_until(stub, wishes, until, ended))
    return dict(sorted(ended.items()))


@dataclass(frozen=True, slots=True)
class _Wish:
    """A request, its timeout in seconds, and after how many messages the client cancels."""

    request: pb.GenerateStreamRequest
    seconds: float | None = None
    messages: int | None = None


class _Wishes:
    """One client's requests, mostly valid."""

    def __init__(
        self, settings: DashboardSettings, config: ModelConfig, shared: Sequence[int], source: random.Random
    ) -> None:
        self._settings = settings
        self._config = config
        self._shared = shared
        self._source = source

    def next(self) -> _Wish:
        chance = self._source.random()
        request = self._valid()
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

    def _valid(self) -> pb.GenerateStreamRequest:
        settings, source = self._settings, self._source
        new = min(source.randint(settings.new_least, settings.new_most), self._config.context // 4)
        length = min(source.randint(settings.prompt_least, settings.prompt_most), self._config.context // 4)
        prompt = draw(source, self._config.vocab_size, length)
        if source.random() < 0.5:
            prompt = [*self._shared, *prompt]
        return greedy(pb.GenerateStreamRequest, prompt, new)


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


def render(results: Results) -> str:
    """The document."""
    settings, rules = results["settings"], results["rules"]
    asked = ", ".join(f"{count} {code}" for code, count in results["asked"].items())
    lines = [
        "# The dashboard",
        "",
        f"{subject(results)} on {settings['slots']} slots, {conditions(results)}; {settings['seconds']:g} s in "
        f"{len(settings['clients'])} phases of {', '.join(map(str, settings['clients']))} clients. Requests ended as: "
        f"{asked}.",
        "",
        f"All {len(results['panels'])} panels have data, all {rules['recording']} recording rules have recorded, and "
        f"all {rules['alerting']} alert rules can be evaluated.",
    ]
    return "\n".join(lines)


def draw_picture(results: Results) -> str:
    """Every panel over time, as SVG."""
    answered: Sequence[Answered] = results["answered"]
    lines = -(-len(answered) // _COLUMNS)
    with drawing("dashboard", 3.0 * _COLUMNS, 1.75 * lines, font_size=7) as (figure, svg):
        grid = figure.subplots(lines, _COLUMNS, squeeze=False, sharex=True)
        for axes, each in itertools.zip_longest(grid.flat, answered):
            if each is None:
                axes.set_visible(False)
            else:
                _draw_panel(axes, each, results["start"])
        for axes in [column[: len(answered[place::_COLUMNS])][-1] for place, column in enumerate(grid.T)]:
            axes.tick_params(labelbottom=True)
            axes.set_xlabel("s")
    return svg.getvalue()


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
    scale, unit = (1.0, "s") if panel.is_heat_map else _scale(panel.unit, float(np.nanmax(heights)))
    axes.set_title(f"{panel.title}{unit and f', {unit}'}", loc="left", fontsize=8)
    seconds, colors = np.array(times) - start, itertools.cycle(_COLORS)
    if panel.is_heat_map:
        _draw_heat_map(axes, seconds, {float(name): row for name, row in zip(names, heights, strict=True)})
        return
    if panel.is_stacked:
        axes.stackplot(seconds, np.nan_to_num(heights) / scale, labels=names, colors=_COLORS, linewidth=0)
    else:
        for row, name in zip(heights, names, strict=True):
            axes.plot(seconds, row / scale, color=next(colors), linewidth=0.9, label=name)
    if panel.is_logarithmic:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=min(0, np.nanmin(heights) / scale))
    if panel.unit == "percentunit":
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.3g} %"))
    axes.spines[["top", "right"]].set_visible(False)
    if any(names) and names != [panel.title] and len(names) <= _MOST_NAMES:
        axes.legend(fontsize=5.5, frameon=False, loc="best", ncols=1 + (len(names) > 4), handlelength=1.0)


def _draw_heat_map(axes: Axes, seconds: np.ndarray, cumulative: Mapping[float, np.ndarray]) -> None:
    """A histogram over time: rates by bucket, up to the last one that is not empty."""
    bounds = sorted(cumulative)
    rates = np.diff(np.nan_to_num([cumulative[bound] for bound in bounds]), axis=0, prepend=0)
    filled = np.flatnonzero(rates[:-1].max(axis=1) > 0)
    if not len(filled):
        return
    first, last = filled[0], filled[-1] + 1
    edges = [bounds[first] / 1.5, *bounds[first:last]]
    width = np.median(np.diff(seconds)) if len(seconds) > 1 else 1.0
    times, shown = np.append(seconds, seconds[-1] + width), np.sqrt(rates[first:last])
    axes.pcolormesh(times, edges, shown, cmap="Oranges", vmin=0, rasterized=True)
    axes.set_yscale("log")


def _scale(unit: str, most: float) -> tuple[float, str]:
    """What values are divided by, and the unit then."""
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


SCENARIO = Scenario(
    __name__,
    DashboardSettings,
    measure,
    render,
    draw_picture,
    caption="Every panel of the dashboard under that load",
    picture_only=("answered", "start"),
)
