"""Filters of one row's logits: temperature, min-p, top-k and top-p, and the index that a draw selects.

Rows are long and peaked: values are folded or summed in blocks, so that few of them are sorted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from service.engine.types import SamplingParams

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]

# All tokens are equally likely from here on. Finite in float32, so that masked tokens stay masked.
_MAX_TEMPERATURE = 1e30
_BLOCK = 256
_FOLDS = 32


@dataclass(frozen=True, slots=True)
class Candidates:
    """Tokens left of a row, by ascending id, and weights in proportion to probability, the highest 1.

    `token_ids` None is the whole vocabulary: `weights[i]` is token i's.
    """

    token_ids: Int64 | None
    weights: Float32

    def keep(self, indices: Int64) -> Candidates:
        """The candidates at the given indices."""
        token_ids = indices if self.token_ids is None else self.token_ids[indices]
        return Candidates(token_ids, self.weights[indices])


def truncate(row: Float32, params: SamplingParams, highest: np.float32) -> Candidates:
    """What temperature, min-p, top-k and top-p leave of a row.

    Args:
        row: `[V] float32` logits, finite or -inf, which is never left.
        params: temperature 1e-5 or more.
        highest: the row's maximum.
    """
    token_ids = _find_highest(row, params.top_k) if 0 < params.top_k < len(row) else None
    # Shifted before it is scaled: the highest is 0, and only values of no weight overflow.
    scaled: Float32 = (row if token_ids is None else row[token_ids]) - highest
    if params.temperature != 1:
        scaled /= min(params.temperature, _MAX_TEMPERATURE)
    if params.min_p > 0:
        # Before the exponential, which few tokens need then.
        kept = (scaled >= math.log(params.min_p)).nonzero()[0]
        token_ids = kept if token_ids is None else token_ids[kept]
        scaled = scaled[kept]
    candidates = Candidates(token_ids, np.exp(scaled, out=scaled))
    return candidates if params.top_p >= 1 else _keep_nucleus(candidates, params.top_p)


def _keep_nucleus(candidates: Candidates, top_p: float) -> Candidates:
    """The smallest set of tokens that holds `top_p` of the mass (Holtzman et al., 2020), and those that tie with it."""
    total = float(candidates.weights.sum(dtype=np.float64))
    # Tokens below this share hold less than 1 - top_p together: none is needed. Without them the sort is cheap for a
    # peaked distribution over a large vocabulary.
    least = (1 - top_p) * total / len(candidates.weights)
    candidates = candidates.keep((candidates.weights >= least).nonzero()[0])
    descending = np.sort(candidates.weights)[::-1]
    last = _locate(descending, _running_totals(descending), top_p * total, "left")
    return candidates.keep((candidates.weights >= descending[last]).nonzero()[0])


def select_index(weights: Float32, draw: float) -> int:
    """The index at which the running total of `weights` first exceeds `draw`, a share of the whole in [0, 1)."""
    totals = _running_totals(weights)
    return _locate(weights, totals, draw * float(totals[-1]), "right")


def _running_totals(weights: Float32) -> Float64:
    """Running totals of whole blocks: totals of every weight would cost more than the rest of sampling."""
    return np.add.reduceat(weights, np.arange(0, len(weights), _BLOCK), dtype=np.float64).cumsum()


def _locate(weights: Float32, totals: Float64, target: float, side: Literal["left", "right"]) -> int:
    """The index at which the running total of `weights` first reaches `target` (left) or exceeds it (right)."""
    block = min(int(totals.searchsorted(target, side=side)), len(totals) - 1)
    members = weights[block * _BLOCK : (block + 1) * _BLOCK]
    before = totals[block - 1] if block else 0.0
    index = int((before + members.cumsum(dtype=np.float64)).searchsorted(target, side=side))
    # A block's members, added one by one, can fall short of its total by a rounding error.
    return block * _BLOCK + (index if index < len(members) else int(members.nonzero()[0][-1]))


def rank_highest(row: Float32, count: int) -> Int64:
    """Indices of the `count` highest values, or of all if there are fewer: highest first, ties by lower index."""
    count = min(count, len(row))
    if not count:
        return np.empty(0, np.int64)
    places = _find_highest(row, count)
    return places[np.argsort(-row[places], kind="stable")[:count]]


def _find_highest(row: Float32, count: int) -> Int64:
    """Ascending indices of the `count` highest values (1 to all of them), and of those that tie with the last.

    Partitioning the whole row would cost more than the rest of sampling. So the row is folded into columns: the
    `count` columns with the highest maxima hold as many values that are no lower than the last of these maxima, so
    lower values are not among the highest.
    """
    places = None
    if count < (width := len(row) // _FOLDS):
        maxima = row[: width * _FOLDS].reshape(_FOLDS, width).max(axis=0)
        places = (row >= np.partition(maxima, width - count)[width - count]).nonzero()[0]
    values = row if places is None else row[places]
    kept: Int64 = (values >= np.partition(values, len(values) - count)[len(values) - count]).nonzero()[0]
    return kept if places is None else places[kept]
