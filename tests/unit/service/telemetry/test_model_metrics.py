"""The metrics of a model that is unloaded."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from service.telemetry.metrics import Metrics


def test_gauges_of_an_unloaded_model_are_gone_and_stay_so_and_its_counters_stay() -> None:
    registry = CollectorRegistry()
    model = Metrics(registry).for_model("m")
    model.kv_memory(5)
    model.tokens_generated(3)
    model.close()
    model.kv_memory(6)
    model.serves(is_serving=True)
    for gauge in ("kv_memory_bytes", "model_serving", "num_requests_running"):
        assert registry.get_sample_value(f"onward_{gauge}", {"model_name": "m"}) is None
    assert registry.get_sample_value("onward_generation_tokens_total", {"model_name": "m"}) == 3
