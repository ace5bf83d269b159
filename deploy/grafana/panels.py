"""What the dashboard shows: rows of panels, each a title, a unit, a meaning and queries.

Knows the names of the metrics (docs/serve/metrics.md) and of the recording rules, and nothing of Grafana's JSON.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

SECONDS, RATIO, BYTES, NUMBER = "s", "percentunit", "bytes", "short"
"""Grafana's unit names."""


class Kind(StrEnum):
    """How a panel draws: lines over time, the newest values as numbers, or a histogram over time."""

    LINES = "timeseries"
    NUMBERS = "stat"
    HEAT_MAP = "heatmap"


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel. `queries` are expressions by legend, or one whose legend is the model.

    A legend may contain labels, such as `{{model_name}}`. `colors` are those of values from a bound on; lines have
    a dashed one at each bound. The dashboard is 24 wide.
    """

    title: str
    unit: str
    meaning: str
    queries: Mapping[str, str] | str
    is_stacked: bool = False
    is_logarithmic: bool = False
    kind: Kind = Kind.LINES
    colors: Mapping[float, str] = field(default_factory=dict)
    width: int = 8
    height: int = 8


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


def _slo(what: str) -> str:
    """A recorded value of the selected models' objectives, of all servers together."""
    return f'slo:onward_{what}{{model_name=~"$model"}}'


def _burns(*windows: str) -> dict[str, str]:
    return {
        f"{{{{model_name}}}} {each} {{{{slo}}}} {{{{le}}}}": _slo(f"error_budget_burn:rate{each}") for each in windows
    }


_SLO_LEGEND = "{{model_name}} {{slo}} {{le}}"
_BUDGET_LEFT = (
    f"1 - sum_over_time({_slo('bad:rate5m')}[30d]) / sum_over_time({_slo('all:rate5m')}[30d])"
    " / on (slo) group_left slo:onward_error_budget:ratio"
)
_LOW_BUDGET = {-math.inf: "red", 0.0: "orange", 0.25: "green"}
_FAILED = 'finish_reason=~"engine_failed|not_serving|overloaded"'
_OWN_P99 = f"histogram_quantile(0.99, {_sum('time_to_first_token_seconds_bucket', by='instance, model_name, le')})"
_OWN_OBJECTIVE = 'min by (instance) (onward_slo_seconds{slo="time_to_first_token", instance=~"$instance"})'


def _number(title: str, unit: str, meaning: str, query: str, colors: Mapping[float, str]) -> Panel:
    return Panel(title, unit, meaning, {title: query}, kind=Kind.NUMBERS, colors=colors, width=4, height=4)


def _heat_map(title: str, meaning: str, histogram: str) -> Panel:
    return Panel(title, SECONDS, meaning, {"{{le}}": _sum(f"{histogram}_bucket", by="le")}, kind=Kind.HEAT_MAP)


ROWS: Mapping[str, Sequence[Panel]] = {
    "Overview": (
        _number(
            "Serving",
            RATIO,
            "Share of the models, over all servers, that answer requests.",
            f"avg({_of('model_serving')})",
            {-math.inf: "red", 1.0: "green"},
        ),
        _number("Requests a second", "reqps", "Refused ones included.", f"sum({_rate('requests_total')})", {}),
        _number(
            "Errors",
            RATIO,
            "Share of requests that failed internally or were refused for a full queue or a model that does not serve.",
            f"sum({_rate('requests_total', _FAILED)}) / sum({_rate('requests_total')})",
            {-math.inf: "green", 0.001: "orange", 0.01: "red"},
        ),
        _number(
            "First token, p99",
            SECONDS,
            "Of the slowest model.",
            f"max({_quantile(0.99, 'time_to_first_token_seconds')})",
            {},
        ),
        _number(
            "First token, p99 of objective",
            RATIO,
            "Of the server that is worst against its strictest objective (`--slo-time-to-first-token`).",
            f"max({_OWN_P99} / on (instance) group_left {_OWN_OBJECTIVE})",
            {-math.inf: "green", 0.8: "orange", 1.0: "red"},
        ),
        _number("Error budget left", RATIO, "Of 30 days, of the worst objective.", f"min({_BUDGET_LEFT})", _LOW_BUDGET),
    ),
    "Objectives": (
        Panel(
            "Within objectives",
            RATIO,
            "Exact shares over five minutes. Latencies need objectives (`--slo-…`).",
            {_SLO_LEGEND: _slo("good:ratio_rate5m")},
            width=6,
        ),
        Panel(
            "Budgets left",
            RATIO,
            "Of 30 days' error budget; below 0 the objective is missed.",
            {_SLO_LEGEND: _BUDGET_LEFT},
            kind=Kind.NUMBERS,
            colors=_LOW_BUDGET,
            width=6,
        ),
        Panel(
            "Budget burn, fast",
            NUMBER,
            "How many times faster than allowed. Both windows above 14.4 page: a month's budget would last two days.",
            _burns("5m", "1h"),
            colors={14.4: "red"},
            width=6,
        ),
        Panel(
            "Budget burn, slow",
            NUMBER,
            "30 m and 6 h above 6 page: five days. 6 h and 3 d above 1 are a ticket.",
            _burns("30m", "6h", "3d"),
            colors={1.0: "orange", 6.0: "red"},
            width=6,
        ),
    ),
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
                # One query, as a server without HTTP has none of its series.
                "{{grpc_code}}{{http_status}}": "sum by (grpc_code) (rate(onward_grpc_server_handled_total"
                '{instance=~"$instance", grpc_code!="OK"}[$__rate_interval])) or sum by (http_status) '
                '(rate(onward_http_server_handled_total{instance=~"$instance", http_status!="200"}[$__rate_interval]))',
            },
            is_stacked=True,
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
    "Distributions": (
        _heat_map("Times to first token", "Requests a second by their time.", "time_to_first_token_seconds"),
        _heat_map("Times between tokens", "Tokens a second by their time.", "inter_token_latency_seconds"),
        _heat_map("Times in the queue", "Requests a second by their time.", "request_queue_time_seconds"),
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
