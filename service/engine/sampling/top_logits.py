"""Rows of which only the highest logits leave a device, where these suffice to choose a token.

A greedy token is decided by the highest logit; one drawn with top-k by the `k` highest and those that tie with the last
of them. From these the same token is drawn as from the whole row, bit for bit: the same numbers in the same order.
Where ties may be missing, as the last logit at hand is no lower than the last needed, or where a logit is not finite,
the whole row is needed.

The runner writes, the sampler reads. Knows neither devices nor graphs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from service.engine.batch import SampleRow, ScheduledBatch

Float32 = npt.NDArray[np.float32]
Int64 = npt.NDArray[np.int64]

# Below this, sampling is greedy, as in vLLM: float32 could not hold the scaled logits.
MIN_TEMPERATURE = 1e-5


@dataclass(frozen=True, slots=True, eq=False)
class TopRow:
    """The highest logits of one row, by ascending id: `[K] int64`, `[K] float32`; and the greedy token."""

    token_ids: Int64
    values: Float32
    best: int


class TopLogits:
    """Rows of the last step by slot, as far as only their highest logits are known."""

    def __init__(self) -> None:
        self._rows: dict[int, tuple[Int64, Float32, int]] = {}

    def __contains__(self, slot: int) -> bool:
        return slot in self._rows

    def __bool__(self) -> bool:
        return bool(self._rows)

    def row(self, slot: int) -> TopRow:
        """A slot's row."""
        token_ids, values, best = self._rows[slot]
        order = token_ids.argsort()
        return TopRow(token_ids[order], values[order], best)

    def best(self, slot: int) -> int:
        """The greedy token of a slot's row."""
        return self._rows[slot][2]

    def clear(self) -> None:
        """Forgets all rows, as a step begins."""
        self._rows.clear()

    def discard(self, slot: int) -> None:
        """Forgets a row, as all of its logits are known."""
        self._rows.pop(slot, None)

    def put(self, slots: Sequence[int], token_ids: Int64, values: Float32) -> None:
        """Adds rows.

        Args:
            slots: of the rows.
            token_ids: `[len(slots), K]`, of the highest logits, highest first; copied.
            values: their logits.
        """
        beyond = np.iinfo(np.int64).max
        best = np.where(values == values[:, :1], token_ids, beyond).min(axis=1).tolist()
        rows = zip(slots, token_ids.copy(), values.copy(), best, strict=True)
        self._rows |= {slot: (ids, logits, token_id) for slot, ids, logits, token_id in rows}


def num_needed(samples: Iterable[SampleRow]) -> int | None:
    """How many of a row's highest logits suffice for these samples; None where they need the whole row."""
    most = 0
    for sample in samples:
        if sample.logprobs is not None or (sample.rules is not None and not sample.rules.is_idle):
            return None
        needed = 1 if sample.params.temperature < MIN_TEMPERATURE else sample.params.top_k
        if not needed:
            return None
        most = max(most, needed)
    return most


def needs_by_slot(batch: ScheduledBatch) -> dict[int, int | None]:
    """`num_needed` of each slot that a batch samples from; None for beams."""
    samples: dict[int, list[SampleRow]] = {}
    for sample in batch.samples:
        samples.setdefault(sample.slot, []).append(sample)
    needs = {slot: num_needed(drawn) for slot, drawn in samples.items()}
    return needs | dict.fromkeys(slot for beams in batch.beams for slot in beams.slots)


def are_decided(needed: Sequence[int], values: Float32, normalizers: Float32, vocab_size: int) -> bool:
    """Whether the highest logits suffice for all rows.

    Args:
        needed: how many of the highest each row needs, at least 1.
        values: `[rows, K]`, highest first.
        normalizers: `[rows]`, not finite where one of a row's logits is not.
        vocab_size: logits of a row.
    """
    if not np.isfinite(normalizers).all():
        return False
    num_rows, num_values = values.shape
    if max(needed) > num_values:
        return False
    if num_values == vocab_size:
        return True
    lowest_needed = values[np.arange(num_rows), np.array(needed) - 1]
    return bool((values[:, -1] < lowest_needed).all())
