"""From the configuration to the metrics and the port that serves them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry

from service.config import MetricsCompat, ServeConfig
from service.telemetry.debug import with_debug
from service.telemetry.exposition import exposing, metrics_app
from service.telemetry.metrics import Metrics, Objectives
from service.telemetry.recorder import FlightLog
from service.telemetry.vllm_names import VllmNames


def make_metrics(config: ServeConfig, registry: CollectorRegistry) -> Metrics:
    """The metrics in a registry, with the operator's objectives, under vLLM's names too if wanted."""
    objectives = Objectives(
        time_to_first_token=config.slo_time_to_first_token,
        inter_token_latency=config.slo_inter_token_latency,
        e2e_latency=config.slo_e2e_latency,
    )
    metrics = Metrics(registry, objectives)
    if config.metrics_compat is MetricsCompat.VLLM:
        registry.register(VllmNames(metrics))
    return metrics


@contextmanager
def metrics_server(
    config: ServeConfig, registry: CollectorRegistry, take: Callable[[], FlightLog]
) -> Iterator[int | None]:
    """Serves metrics and the recorder's log for the length of the block; yields the port, None where they are off."""
    if not config.metrics:
        yield None
        return
    app = with_debug(metrics_app(registry), take, is_on=config.recorder_steps > 0)
    with exposing(app, config.host, config.metrics_port) as port:
        yield port
