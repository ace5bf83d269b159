"""`docs/serve/metrics.md` lists what the server exposes: each metric with its type, labels and meaning."""

from __future__ import annotations

from collections import defaultdict

from prometheus_client import CollectorRegistry

from service.telemetry.metrics import Metrics, Objectives
from service.telemetry.vllm_names import VllmNames
from tests.environment import ROOT

DOCUMENT = ROOT / "docs" / "serve" / "metrics.md"
UNITS = {"seconds": "s", "bytes": "bytes", "ratio": "0 to 1", "tokens": "tokens"}
# What is not the same samples under another name.
DERIVED = {
    "onward_requests_total": ["vllm:request_success_total"],
    "onward_num_requests_waiting": ["vllm:num_requests_waiting_by_reason"],
}


def table(heading: str) -> list[tuple[str, ...]]:
    """The rows below a heading, without the table's head."""
    section = DOCUMENT.read_text(encoding="utf-8").split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines[2:]]


def shown() -> list[tuple[str, ...]]:
    """Name, type, labels, meaning and vLLM's name of everything that a server shows."""
    registry, theirs = CollectorRegistry(), CollectorRegistry()
    metrics = Metrics(registry, Objectives(e2e_latency=(1.0,)))
    theirs.register(VllmNames(metrics))
    metrics.for_model("m").parity_checked(0.0, passed=True)
    metrics.for_model("m").batch_invariance_checked(is_invariant=True)
    metrics.for_model("m").kv_memory(1)
    metrics.for_model("m").max_draft_tokens(4)
    metrics.for_model("m").cost_model({"decode_pair": 1e-6}, 0.1)
    metrics.handled.labels("Generate", "OK")
    metrics.http_handled.labels("/v1/completions", "200")
    names = defaultdict(list)
    for family in theirs.collect():
        names[family.documentation].append(_on_the_wire(family.name, family.type))
    rows = []
    for family in registry.collect():
        name = _on_the_wire(family.name, family.type)
        labels = sorted({label for sample in family.samples for label in sample.labels} - {"le"})
        other = names[family.documentation] + DERIVED.get(name, [])
        rows.append(
            (
                f"`{name}`",
                family.type,
                ", ".join(f"`{label}`" for label in labels) or "-",
                family.documentation,
                ", ".join(f"`{each}`" for each in sorted(other)) or "-",
            )
        )
    return sorted(rows)


def _on_the_wire(name: str, kind: str) -> str:
    return f"{name}_total" if kind == "counter" else name


def test_every_metric_has_its_row() -> None:
    documented = [(name, kind, *rest) for name, kind, _, *rest in table("Every metric")]
    wanted = shown()
    assert documented == wanted, "\n".join("| " + " | ".join(row) + " |" for row in wanted)


def test_units_are_those_that_names_end_in() -> None:
    for name, _, unit, *_ in table("Every metric"):
        parts = name.strip("`").removesuffix("_total").split("_")
        expected = next((UNITS[part] for part in reversed(parts) if part in UNITS), None)
        assert unit == expected or (expected is None and unit), name
