"""Autoscaling: each replica reports the demand of its models, and Ray's policy computes the number of replicas.

A model's demand is the share of a replica that it uses, by slots or by K/V memory, whichever is larger, plus the slots
that its waiting requests would take; 1 is a full replica without a queue. Models of one replica run side by side, so
the largest demand over all replicas counts. Ray's own autoscaler counts calls, and treats one that lists models like
one that generates.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

TARGET = 0.8
"""The demand per replica from which one more is started: replicas take seconds to start."""
_METRIC = "demand:"


def demands(registry: Any, models: Iterable[str], slots: int) -> dict[str, float]:
    """The demand of each model of a replica, of so many slots per model, by a metric name of its own."""

    def sample(name: str, model: str) -> float:
        return registry.get_sample_value(f"onward_{name}", {"model_name": model}) or 0.0

    return {
        _METRIC + model: max(sample("num_requests_running", model) / slots, sample("kv_cache_usage_ratio", model))
        + sample("num_requests_waiting", model) / slots
        for model in models
    }


def needed(reports: Mapping[str, Mapping[Any, float]]) -> int | None:
    """The number of replicas, at least one, from their `demands`; None before the first report."""
    wanted = [sum(each.values()) for name, each in reports.items() if name.startswith(_METRIC)]
    return max(1, math.ceil(max(wanted) / TARGET)) if wanted else None


def replicas(context: Any) -> tuple[int, dict[str, Any]]:
    """Ray's autoscaling policy (`ray.serve.config.AutoscalingContext` to a number); its delays and bounds apply."""
    found = needed(context.aggregated_metrics or {})
    return context.target_num_replicas if found is None else found, {}
