"""The options of `plan`; those that `serve` has, too, mean the same and have the same environment twins."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated

from model.spec.artifact import CPU_PRECISIONS, KVPrecision, Precision
from service.config.options import Option, choice, integer, num_bytes
from service.config.serve import CHUNK_ON_CPU

_memory = partial(Option, "memory")
_limits = partial(Option, "limits")
_export = partial(Option, "a checkpoint's export")


def _precision(text: str) -> Precision:
    precision = choice(Precision)(text)
    if precision not in CPU_PRECISIONS:
        raise ValueError(f"must be one of {', '.join(CPU_PRECISIONS)}")
    return precision


def _kv_precision(text: str) -> KVPrecision:
    precision = choice(KVPrecision)(text)
    if precision not in (KVPrecision.FP32, KVPrecision.INT8):
        raise ValueError(f"must be {KVPrecision.FP32} or {KVPrecision.INT8}")
    return precision


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanConfig:
    """The options of `plan`. `folder` is an artifact, a folder of artifacts, or a checkpoint."""

    folder: str
    memory: Annotated[int | None, _memory("bytes for the server, as in 4GiB; default: those available", num_bytes)] = (
        None
    )
    kv_memory: Annotated[int | None, _memory("bytes of K/V; default: what `serve` would choose", num_bytes)] = None
    max_batch_size: Annotated[int, _limits("sequences that run at once, per model", integer(1, 1024))] = 32
    prefill_chunk: Annotated[int, _limits("prompt tokens per step", integer(1, 65536))] = CHUNK_ON_CPU
    precision: Annotated[Precision, _export(", ".join(CPU_PRECISIONS), _precision)] = Precision.INT8
    kv_cache: Annotated[KVPrecision, _export("precision of K/V: fp32 or int8", _kv_precision)] = KVPrecision.FP32
