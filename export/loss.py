"""What quantization costs: a graph's logits beside PyTorch's in float32, over all positions of the golden cases.

Whether a graph is the one that was meant is another question: `export.stored_weights` and the proof of the float32
graph, before it is quantized, answer that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from model.spec.artifact import KVPrecision, Precision

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]

CLEAR_LEAD = 0.5
"""In standard deviations of the logits: greedy choices that lead by less may well differ."""
_MAX_RMS = {Precision.BF16: 0.02, Precision.INT8: 0.07, Precision.INT4: 0.48}
_MAX_KV_RMS = {KVPrecision.FP32: 0.0, KVPrecision.INT8: 0.05}


def max_relative_rms(precision: Precision, kv_precision: KVPrecision) -> float | None:
    """The largest `Loss.relative_rms` that an artifact may have; None for graphs that are not quantized.

    Above what twelve layers of random weights lose, 0.008 in bf16, 0.05 in int8 and 0.39 in int4 (`llama-110m`,
    2026-11-29), as for single logits (`model.spec.golden.TOLERANCES`).
    """
    if kv_precision not in _MAX_KV_RMS:  # a CUDA graph's
        return None
    limit = _MAX_RMS.get(precision, 0.0) + _MAX_KV_RMS[kv_precision]
    return limit if limit else None


@dataclass(frozen=True, slots=True)
class Loss:
    """Averages over `num_positions` positions.

    Attributes:
        num_positions: of all cases.
        relative_rms: root mean square of the logits' errors, in standard deviations of the logits of a case.
        kl: mean Kullback-Leibler divergence of the graph's distribution from PyTorch's, in nats.
        agreement: share of positions with the same greedy token.
        num_clear: positions at which PyTorch's best logit leads by `CLEAR_LEAD` or more.
        clear_agreement: `agreement` at these; 1 if there are none.
        limit: largest `relative_rms` that passes.
    """

    num_positions: int
    relative_rms: float
    kl: float
    agreement: float
    num_clear: int
    clear_agreement: float
    limit: float

    @property
    def passed(self) -> bool:
        """Whether the loss is within its limit."""
        return self.relative_rms <= self.limit


class LossMeter:
    """Adds up the loss case by case."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._num_positions = self._num_alike = self._num_clear = self._num_clear_alike = 0
        self._error = self._spread = self._kl = 0.0

    def add(self, golden: Float32, found: Float32) -> None:
        """Adds the logits `[N, V]` of a case, PyTorch's and the graph's; what is not finite loses everything."""
        if found.shape != golden.shape or not np.isfinite(found).all():
            self._num_positions += len(golden)
            self._error = self._kl = math.inf
            return
        wanted, have = golden.astype(np.float64), found.astype(np.float64)
        # A constant added to all logits of a position changes nothing.
        wanted -= wanted.mean(-1, keepdims=True)
        have -= have.mean(-1, keepdims=True)
        self._num_positions += len(wanted)
        self._error += float(np.square(have - wanted).sum())
        self._spread += float(np.square(wanted).sum())
        logs = _log_softmax(wanted)
        self._kl += float((np.exp(logs) * (logs - _log_softmax(have))).sum())
        alike = wanted.argmax(-1) == have.argmax(-1)
        best_two = np.partition(wanted, -2, axis=-1)[:, -2:]
        clear = best_two[:, 1] - best_two[:, 0] >= CLEAR_LEAD * wanted.std()
        self._num_alike += int(alike.sum())
        self._num_clear += int(clear.sum())
        self._num_clear_alike += int((alike & clear).sum())

    def read(self) -> Loss | None:
        """The loss so far; None before the first case."""
        if not self._num_positions:
            return None
        return Loss(
            num_positions=self._num_positions,
            relative_rms=math.sqrt(self._error / self._spread) if self._spread else math.inf if self._error else 0.0,
            kl=self._kl / self._num_positions,
            agreement=self._num_alike / self._num_positions,
            num_clear=self._num_clear,
            clear_agreement=self._num_clear_alike / self._num_clear if self._num_clear else 1.0,
            limit=self._limit,
        )


def _log_softmax(logits: Float64) -> Float64:
    shifted = logits - logits.max(-1, keepdims=True)
    logs: Float64 = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return logs
