"""The highest logits of rows, where they are enough to choose a token by: nothing else of such rows leaves a device.

A token that is drawn greedily is decided by the highest logit, one that is drawn among the `k` highest by those and by
whichever tie with the last of them. Where they are all there, whatever is drawn from them is what would be drawn from
the whole row, to the bit: the very same numbers in the same order. Where it cannot be told that they are, as the last
of them is no lower, or where a logit is not finite, the whole row is needed.

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

# Below this sampling is greedy, as in vLLM: float32 could not hold the scaled logits.
MIN_TEMPERATURE = 1e-5


@dataclass(frozen=True, slots=True, eq=False)
class TopRow:
    """The highest logits of one row, by ascending id: `[K] int64` and `[K] float32`; and the id of the highest.

    Of several that are equally high it is the lowest id.
    """

    token_ids: Int64
    values: Float32
    best: int

    @property
    def highest(self) -> np.float32:
        """The highest logit."""
        highest: np.float32 = self.values.max()
        return highest


class TopLogits:
    """The rows of the last step that are known by their highest logits alone, by slot."""

    def __init__(self) -> None:
        self._rows: dict[int, tuple[Int64, Float32, int]] = {}

    def __contains__(self, slot: int) -> bool:
        return slot in self._rows

    def __bool__(self) -> bool:
        return bool(self._rows)

    def row(self, slot: int) -> TopRow:
        """What is known of a slot's row."""
        token_ids, values, best = self._rows[slot]
        order = token_ids.argsort()
        return TopRow(token_ids[order], values[order], best)

    def best(self, slot: int) -> int:
        """The token that a slot's row chooses greedily."""
        return self._rows[slot][2]

    def clear(self) -> None:
        """A step begins: nothing is known."""
        self._rows.clear()

    def discard(self, slot: int) -> None:
        """A slot's row is known whole."""
        self._rows.pop(slot, None)

    def put(self, slots: Sequence[int], token_ids: Int64, values: Float32) -> None:
        """Takes note of rows.

        Args:
            slots: whose.
            token_ids: `[len(slots), K]`, those of the highest logits, highest first; copied.
            values: their logits.
        """
        beyond = np.iinfo(np.int64).max
        best = np.where(values == values[:, :1], token_ids, beyond).min(axis=1).tolist()
        rows = zip(slots, token_ids.copy(), values.copy(), best, strict=True)
        self._rows |= {slot: (ids, logits, token_id) for slot, ids, logits, token_id in rows}


def num_needed(samples: Iterable[SampleRow]) -> int | None:
    """How many of a row's highest logits decide all of these draws from it; None where they need the whole row."""
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
    """For each slot whose logits a batch draws from, `num_needed`; None for those that beams are extended by."""
    samples: dict[int, list[SampleRow]] = {}
    for sample in batch.samples:
        samples.setdefault(sample.slot, []).append(sample)
    needs = {slot: num_needed(drawn) for slot, drawn in samples.items()}
    return needs | dict.fromkeys(slot for beams in batch.beams for slot in beams.slots)


def are_decided(needed: Sequence[int], values: Float32, normalizers: Float32, vocab_size: int) -> bool:
    """Whether rows are decided by the logits that are singled out of them.

    Args:
        needed: how many of the highest each row needs, 1 at least.
        values: `[rows, K]`, highest first.
        normalizers: `[rows]`, not finite where one of a row's logits is not.
        vocab_size: how many logits a row has.
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
