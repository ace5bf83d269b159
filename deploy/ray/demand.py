"""How many replicas it takes: each says how much of itself its models want, and Ray's autoscaler asks for the sum.

A model wants of a replica the share of its places that are taken or the share of its K/V memory, whichever is larger,
and besides the places that its waiting requests would take; 1 is a replica that is full and has nobody waiting. Models
of one replica run side by side, so it is the model that wants most of all replicas together that counts. Ray's own
autoscaler knows of calls alone, and would take one that lists models for one that generates. Knows nothing of when
replicas are started and stopped: that is Ray's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

TARGET = 0.8
"""How much of its replicas a model may want before there is one more: they take seconds to start, requests come now."""
_METRIC = "demand:"


def demands(registry: Any, models: Iterable[str], slots: int) -> dict[str, float]:
    """What each model wants of a replica, by a name of its own.

    Args:
        registry: the replica's `prometheus_client.CollectorRegistry`.
        models: that it serves.
        slots: sequences that run at once, per model.
    """

    def sample(name: str, model: str) -> float:
        return registry.get_sample_value(f"onward_{name}", {"model_name": model}) or 0.0

    return {
        _METRIC + model: max(sample("num_requests_running", model) / slots, sample("kv_cache_usage_ratio", model))
        + sample("num_requests_waiting", model) / slots
        for model in models
    }


def needed(reports: Mapping[str, Mapping[Any, float]]) -> int | None:
    """Replicas that it takes, at least one, or None while nobody has reported.

    Args:
        reports: what each replica reported, by the names of `demands`; others are ignored.
    """
    wanted = [sum(each.values()) for name, each in reports.items() if name.startswith(_METRIC)]
    return max(1, math.ceil(max(wanted) / TARGET)) if wanted else None


def replicas(context: Any) -> tuple[int, dict[str, Any]]:
    """Ray's autoscaling policy (`ray.serve.config.AutoscalingContext` to a number); its delays and bounds apply."""
    found = needed(context.aggregated_metrics or {})
    return context.target_num_replicas if found is None else found, {}
