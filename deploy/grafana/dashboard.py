"""Grafana's dashboard: rows of panels, each a title, a unit and queries, written as Grafana's JSON.

    python -m deploy.grafana.dashboard            writes deploy/grafana/dashboards/onward.json
    python -m deploy.grafana.dashboard --check    exits with 1 if that file is out of date

The file is committed, as Grafana reads files; `python -m benchmarks run dashboard` draws it without Grafana. Knows the
names of the metrics (docs/serve/metrics.md) and nothing else of the server.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.builders.common import (
    ScaleDistributionConfig,
    StackingConfig,
    VizLegendOptions,
    VizTooltipOptions,
)
from grafana_foundation_sdk.builders.prometheus import Dataquery
from grafana_foundation_sdk.builders.timeseries import Panel as TimeSeries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import (
    LegendDisplayMode,
    LegendPlacement,
    ScaleDistribution,
    SortOrder,
    StackingMode,
    TooltipDisplayMode,
    VisibilityMode,
)
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DataSourceRef,
    VariableOption,
    VariableRefresh,
    VariableSort,
)

FILE = Path(__file__).parent / "dashboards" / "onward.json"

_HEIGHT = 8
_WIDTH = 8
_DATA_SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")

SECONDS, RATIO, BYTES, NUMBER = "s", "percentunit", "bytes", "short"
"""Grafana's unit names."""


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel. `queries` are expressions by legend, or one whose legend is the model.

    A legend may contain labels, such as `{{model_name}}`.
    """

    title: str
    unit: str
    meaning: str
    queries: Mapping[str, str] | str
    is_stacked: bool = False
    is_logarithmic: bool = False


def _of(metric: str, *more: str) -> str:
    """The series of the selected models and servers."""
    matchers = ", ".join(('model_name=~"$model"', 'instance=~"$instance"', *more))
    return f"onward_{metric}{{{matchers}}}"


def _rate(metric: str, *more: str) -> str:
    return f"rate({_of(metric, *more)}[$__rate_interval])"


def _sum(metric: str, *more: str, by: str = "model_name") -> str:
    return f"sum by ({by}) ({_rate(metric, *more)})"


def _gauge(reduce: str, metric: str) -> str:
    return f"{reduce} by (model_name) ({_of(metric)})"


def _share(part: str, rest: str) -> str:
    """Of two rates, the share of the first in their sum."""
    return f"{_sum(part)} / ({_sum(part)} + {_sum(rest)})"


def _mean(histogram: str) -> str:
    return f"{_sum(f'{histogram}_sum')} / {_sum(f'{histogram}_count')}"


def _quantile(share: float, histogram: str) -> str:
    return f"histogram_quantile({share}, {_sum(f'{histogram}_bucket', by='model_name, le')})"


def _quantiles(histogram: str, shares: Sequence[float] = (0.5, 0.9, 0.99)) -> dict[str, str]:
    return {f"{{{{model_name}}}} p{share * 100:g}": _quantile(share, histogram) for share in shares}


def _within(histogram: str) -> str:
    return f'model_le:onward_{histogram}:within_ratio_rate5m{{model_name=~"$model"}}'


ROWS: Mapping[str, Sequence[Panel]] = {
    "Load": (
        Panel(
            "Requests that ended",
            "reqps",
            "By how they ended, refusals included.",
            {"{{finish_reason}}": f"{_sum('requests_total', by='finish_reason')} > 0"},
            is_stacked=True,
        ),
        Panel(
            "Requests in the server",
            NUMBER,
            "A queue that never empties means a server that is too small.",
            {
                "{{model_name}} running": _gauge("sum", "num_requests_running"),
                "{{model_name}} waiting": _gauge("sum", "num_requests_waiting"),
            },
        ),
        Panel(
            "Tokens a second",
            NUMBER,
            "Prompt tokens, computed or cached, count when their request gets its first token.",
            {
                "{{model_name}} generated": _sum("generation_tokens_total"),
                "{{model_name}} prompt": _sum("prompt_tokens_total"),
            },
        ),
        Panel(
            "Calls that failed",
            "reqps",
            "By gRPC's status code, or HTTP's. A client that hangs up is CANCELLED, or 499.",
            {
                "{{grpc_code}}": "sum by (grpc_code) (rate(onward_grpc_server_handled_total"
                '{instance=~"$instance", grpc_code!="OK"}[$__rate_interval]))',
                "HTTP {{http_status}}": "sum by (http_status) (rate(onward_http_server_handled_total"
                '{instance=~"$instance", http_status!="200"}[$__rate_interval]))',
            },
            is_stacked=True,
        ),
        Panel(
            "Within objectives",
            RATIO,
            "Exact shares over five minutes, for servers with objectives (`--slo-…`).",
            {
                "{{model_name}} first token, {{le}} s": _within("time_to_first_token_seconds"),
                "{{model_name}} between tokens, {{le}} s": _within("inter_token_latency_seconds"),
                "{{model_name}} request, {{le}} s": _within("e2e_request_latency_seconds"),
            },
        ),
        Panel(
            "Alerts",
            NUMBER,
            "Number of firing alerts.",
            {"firing": 'count(ALERTS{alertname=~"Onward.+", alertstate="firing"}) or vector(0)'},
        ),
    ),
    "Latency": (
        Panel(
            "Time to first token",
            SECONDS,
            "From arrival, queueing included.",
            _quantiles("time_to_first_token_seconds"),
        ),
        Panel(
            "Between tokens",
            SECONDS,
            "Every wait between two tokens of one output.",
            _quantiles("inter_token_latency_seconds"),
        ),
        Panel(
            "Time per output token",
            SECONDS,
            "A request's mean after its outputs' first tokens.",
            _quantiles("time_per_output_token_seconds"),
        ),
        Panel("Whole requests", SECONDS, "From arrival to the end.", _quantiles("e2e_request_latency_seconds")),
        Panel("Queue", SECONDS, "From arrival to being scheduled.", _quantiles("request_queue_time_seconds")),
        Panel(
            "Where a request's time goes",
            SECONDS,
            "Means of the three phases.",
            {
                "{{model_name}} queue": _mean("request_queue_time_seconds"),
                "{{model_name}} prefill": _mean("request_prefill_time_seconds"),
                "{{model_name}} decode": _mean("request_decode_time_seconds"),
            },
            is_stacked=True,
        ),
    ),
    "Engine": (
        Panel(
            "Rows of a step",
            NUMBER,
            "Sequences computed together.",
            {
                "{{model_name}} mean": _mean("step_batch_size"),
                "{{model_name}} p99": _quantile(0.99, "step_batch_size"),
            },
        ),
        Panel(
            "Tokens of a step",
            NUMBER,
            "Of prompts, sources and outputs, without padding.",
            {
                "{{model_name}} mean": _mean("step_tokens"),
                "{{model_name}} p99": _quantile(0.99, "step_tokens"),
            },
        ),
        Panel(
            "Padding",
            RATIO,
            "Share of computed tokens that are padding.",
            _share("padding_tokens_total", "step_tokens_sum"),
        ),
        Panel("A step's graphs", SECONDS, "Time of one run.", _quantiles("engine_run_seconds")),
        Panel(
            "Between two runs",
            SECONDS,
            "While there was work: sampling, events, waiting for the interpreter's lock.",
            _quantiles("engine_host_seconds"),
        ),
        Panel(
            "Idle graphs",
            RATIO,
            "Share of the engine's busy time.",
            _share("engine_host_seconds_sum", "engine_run_seconds_sum"),
        ),
    ),
    "Cache": (
        Panel("K/V memory in use", RATIO, "Of the budget for keys and values.", _gauge("max", "kv_cache_usage_ratio")),
        Panel(
            "Prefix cache hits",
            RATIO,
            "Share of prompt tokens found in the prefix cache.",
            f"{_sum('cached_prompt_tokens_total')} / {_sum('prompt_tokens_total')}",
        ),
        Panel("Preemptions a second", NUMBER, "Requests preempted by more urgent ones.", _sum("preemptions_total")),
    ),
    "Cost model": (
        Panel(
            "Predictions off by",
            RATIO,
            "Mean of |predicted - measured| / measured service time of recently ended requests.",
            _gauge("max", "cost_model_relative_error"),
        ),
        Panel(
            "What a step's work costs",
            SECONDS,
            "Seconds by term, fitted to measured steps.",
            {"{{model_name}} {{term}}": f"avg by (model_name, term) ({_of('cost_model_coefficient')}) > 0"},
            is_logarithmic=True,
        ),
    ),
    "Process": (
        Panel(
            "Models that serve",
            NUMBER,
            "1 where a model answers requests, and where its golden cases passed.",
            {
                "{{model_name}} serves": _gauge("min", "model_serving"),
                "{{model_name}} parity": _gauge("min", "parity_passed"),
            },
        ),
        Panel(
            "Parity",
            NUMBER,
            "Largest logit difference from PyTorch in the golden cases.",
            _gauge("max", "parity_max_abs_error"),
        ),
        Panel(
            "Memory",
            BYTES,
            "Resident set of the process.",
            {"{{instance}}": 'process_resident_memory_bytes{job="onward", instance=~"$instance"}'},
        ),
        Panel(
            "Processors in use",
            NUMBER,
            "In cores.",
            {"{{instance}}": 'rate(process_cpu_seconds_total{job="onward", instance=~"$instance"}[$__rate_interval])'},
        ),
        Panel(
            "Scrapes",
            SECONDS,
            "How long the server takes to answer Prometheus.",
            {"{{instance}}": 'scrape_duration_seconds{job="onward", instance=~"$instance"}'},
        ),
    ),
}


def render() -> str:
    """The dashboard as JSON, with a newline at its end."""
    board = (
        builders.Dashboard("Onward")
        .uid("onward")
        .description("Requests, latencies, the engine's steps and the process, for every model of every server.")
        .tags(["onward"])
        .refresh("15s")
        .time("now-30m", "now")
        .timezone("browser")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .with_variable(builders.DatasourceVariable("datasource").label("Data source").type("prometheus"))
        .with_variable(_choice("model", "Model", "label_values(onward_num_requests_running, model_name)"))
        .with_variable(_choice("instance", "Server", 'label_values(up{job="onward"}, instance)'))
    )
    ids = count(1)
    for title, panels in ROWS.items():
        board = board.with_row(builders.Row(title).id(next(ids)))
        for panel in panels:
            board = board.with_panel(_panel(panel).id(next(ids)))
    return str(JSONEncoder(sort_keys=True, indent=1).encode(board.build())) + "\n"


def _choice(name: str, label: str, query: str) -> builders.QueryVariable:
    """A variable: a multiple choice of a label's values, by default all."""
    return (
        builders.QueryVariable(name)
        .label(label)
        .query(query)
        .datasource(_DATA_SOURCE)
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".+")
        .current(VariableOption(selected=True, text="All", value="$__all"))
    )


def _panel(panel: Panel) -> TimeSeries:
    built = (
        TimeSeries()
        .title(panel.title)
        .description(panel.meaning)
        .unit(panel.unit)
        .datasource(_DATA_SOURCE)
        .height(_HEIGHT)
        .span(_WIDTH)
        .line_width(1)
        .fill_opacity(20 if panel.is_stacked else 0)
        .show_points(VisibilityMode.NEVER)
        .legend(
            VizLegendOptions().display_mode(LegendDisplayMode.LIST).placement(LegendPlacement.BOTTOM).show_legend(True)
        )
        .tooltip(VizTooltipOptions().mode(TooltipDisplayMode.MULTI).sort(SortOrder.DESCENDING))
    )
    if panel.is_logarithmic:
        built = built.scale_distribution(ScaleDistributionConfig().type(ScaleDistribution.LOG).log(10))
    else:
        built = built.min(0)
    if panel.is_stacked:
        built = built.stacking(StackingConfig().mode(StackingMode.NORMAL))
    queries = {"{{model_name}}": panel.queries} if isinstance(panel.queries, str) else panel.queries
    for number, (legend, expression) in enumerate(queries.items()):
        built = built.with_target(
            Dataquery().expr(expression).legend_format(legend).ref_id(chr(ord("A") + number)).range()
        )
    return built


def main(arguments: Sequence[str]) -> int:
    """Writes or checks the file; returns the exit status."""
    wanted = render()
    if list(arguments) == ["--check"]:
        if FILE.exists() and FILE.read_text(encoding="utf-8") == wanted:
            return 0
        print(f"{FILE} is out of date: python -m deploy.grafana.dashboard", file=sys.stderr)
        return 1
    if arguments:
        print("python -m deploy.grafana.dashboard [--check]", file=sys.stderr)
        return 2
    FILE.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
