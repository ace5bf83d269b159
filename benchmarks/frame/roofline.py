"""Rooflines: tokens a second at most. Pure arithmetic.

    decode    B / max(bytes / read bandwidth, operations / GEMM rate): a step reads all weights once, and every
              sequence's keys and values at its mean length
    prefill   tokens / the same, with the causal half of the pairs; what follows the last layer's attention is computed
              at one position only

The read bandwidth is that of the largest piece of memory that is no larger than what a step reads: of caches, where
they hold it. The GEMM rate is that of the precision, or of the nearest faster one measured. A table that is only looked
up is not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.frame.models import KV_BITS
from model.spec import cost
from model.spec.config import ModelConfig, Positions

Place = tuple[str, int, int]
"""Metric, batch, prompt tokens."""
_WEIGHT_BYTES = {"fp32": 4.0, "fp16": 2.0, "bf16": 2.0, "int8": 1.0, "int4": 0.5 + 2 / 32}
_RATES = {
    "fp32": ("fp32",),
    "fp16": ("fp16", "bf16", "fp32"),
    "bf16": ("bf16", "fp32"),
    "int8": ("int8", "bf16", "fp32"),
    "int4": ("int8", "bf16", "fp32"),
}
_FP32_BYTES = 4.0


def roofline(
    config: ModelConfig, limits: Mapping[str, Any] | None, precision: str, place: Place, new: int
) -> float | None:
    """Tokens a second at most; None where limits are unknown.

    Args:
        config: the model.
        limits: as `benchmarks.frame.limits` prints them.
        precision: of weights and products, with `-kv8` for fewer bits of keys and values.
        place: what is measured.
        new: tokens that decoding generates.
    """
    precision, _, kv_bits = precision.partition(KV_BITS)
    if limits is None or precision not in _WEIGHT_BYTES:
        return None
    rates = [limits["gemm"][name] for name in _RATES[precision] if limits["gemm"].get(name)]
    if not rates:
        return None
    metric, batch, prompt = place
    weights = read_parameters(config) * _WEIGHT_BYTES[precision]
    kv_bytes = int(kv_bits) / 8 if kv_bits else max(1.0, _WEIGHT_BYTES[precision])
    if metric == "prefill":
        tokens, length = prompt, prompt
        operations = float(cost.prompt_linear_flops(config, prompt))
        operations += cost.pair_flops(config) * cost.attended_pairs(config, prompt)
        batch = 1
    else:
        tokens, length = batch, prompt + new // 2
        per_sequence = cost.forward_flops(config, length)
        operations = batch * (per_sequence.linear + per_sequence.attention) / length
    num_bytes = weights + batch * cost.kv_bytes(config, length) * kv_bytes / _FP32_BYTES
    return float(tokens / max(num_bytes / _read_rate(limits, num_bytes), operations / (max(rates) * 1e9)))


def _read_rate(limits: Mapping[str, Any], num_bytes: float) -> float:
    """Bytes a second."""
    (_, least), *others = limits["read_gb_per_second"]
    return 1e9 * float(next((rate for size, rate in reversed(others) if size <= num_bytes), least))


def read_parameters(config: ModelConfig) -> int:
    """Parameters that every step reads."""
    looked_up = 0 if config.tie_embeddings else config.d_model * config.vocab_size
    if config.positions is Positions.LEARNED:
        looked_up += config.d_model * config.context
    return cost.num_parameters(config) - looked_up


def best_limits(seen: list[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The most that any measurement saw."""
    if not seen:
        return None
    names = sorted({name for limits in seen for name in limits["gemm"]})
    reads = zip(*(limits["read_gb_per_second"] for limits in seen), strict=True)
    return {
        "read_gb_per_second": [max(of_size) for of_size in reads],
        "gemm": {name: max(limits["gemm"].get(name, 0.0) for limits in seen) for name in names},
    }
