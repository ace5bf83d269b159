"""Logits to tokens, on the host, each row by itself.

The order is vLLM's (v1): logprobs from the raw logits; then temperature, min-p, top-k, top-p; then one draw. Each filter
is a threshold on what the filters before it left, renormalised, and tokens that tie with the last one kept stay too
(vLLM breaks such ties in top-p arbitrarily). A request's draws come from a counter-based generator (Philox; Salmon et
al., 2011) keyed by its seed, at a counter that is the token's position: no state, hence the same draws in any company
and after any interruption.

Only what cannot change a row's bits runs over the whole batch: arg-max, maxima, minima. Everything that adds up goes
row by row, in float64. Knows nothing of sequences, slots' contents or text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from service.engine.batch import SampleRow
from service.engine.failure import report_failure
from service.engine.types import SamplingParams, TokenLogprobs
from service.errors import EngineFailed

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A row's next token; `logprobs` where the request asked."""

    token_id: int
    logprobs: TokenLogprobs | None


class Sampler:
    """Chooses the next token of every row that wants one."""

    def sample(self, logits: Float32, samples: Sequence[SampleRow]) -> tuple[SampledToken | EngineFailed, ...]:
        """One result for each of `samples`, in their order.

        Args:
            logits: `[slots, V] float32`, indexed by slot; other rows are not looked at.
            samples: which rows, and how.

        Returns:
            Tokens; a row whose logits are not all finite fails alone, and the reason goes to the log.
        """
        if not samples:
            return ()
        rows = _select(logits, [sample.slot for sample in samples])
        greedy = rows.argmax(axis=1).tolist()
        # Extremes carry a NaN or an infinity out of any row, at a fraction of the cost of looking at every value.
        with np.errstate(invalid="ignore"):
            finite = (np.isfinite(rows.max(axis=1)) & np.isfinite(rows.min(axis=1))).tolist()
        return tuple(
            _sample_row(row, sample, argmax) if is_finite else report_failure(f"non-finite logits in slot {sample.slot}")
            for row, sample, argmax, is_finite in zip(rows, samples, greedy, finite, strict=True)
        )


def _select(logits: Float32, slots: list[int]) -> Float32:
    """The wanted rows, without a copy in the usual case that they are the first ones."""
    return logits[: len(slots)] if slots == list(range(len(slots))) else logits[slots]


def _sample_row(row: Float32, sample: SampleRow, argmax: int) -> SampledToken:
    token_id = argmax if sample.params.temperature == 0 else _draw(row, sample)
    logprobs = None if sample.logprobs is None else compute_logprobs(row, token_id, sample.logprobs)
    return SampledToken(token_id, logprobs)


def _draw(row: Float32, sample: SampleRow) -> int:
    token_ids, weights = truncated_distribution(row, sample.params)
    cumulative = np.cumsum(weights)
    # Tokens of zero weight are stepped over; the minimum guards against a product that rounds up to the total.
    index = np.searchsorted(cumulative, uniform(sample.seed, sample.position) * cumulative[-1], side="right")
    return int(token_ids[min(int(index), len(token_ids) - 1)])


def uniform(seed: int, position: int) -> float:
    """The draw in [0, 1) that belongs to the token at `position` of a request with this seed (uint64)."""
    return float(np.random.Generator(np.random.Philox(key=seed, counter=position)).random())


def truncated_distribution(row: Float32, params: SamplingParams) -> tuple[Int64, Float64]:
    """What temperature, min-p, top-k and top-p leave of a row.

    Args:
        row: `[V] float32` finite logits.
        params: temperature above 0.

    Returns:
        Token ids `[K] int64`, ascending, and their weights `[K] float64`, positive up to underflow and not normalised.
    """
    # Shifted before it is scaled: however small the temperature, the best token's value is 0 and nothing is NaN.
    with np.errstate(over="ignore"):
        scaled = (row.astype(np.float64) - float(row.max())) / params.temperature
    threshold = math.log(params.min_p) if params.min_p > 0 else -math.inf
    if 0 < params.top_k < len(scaled):
        threshold = max(threshold, float(np.partition(scaled, -params.top_k)[-params.top_k]))
    token_ids = np.flatnonzero(scaled >= threshold)
    weights = np.exp(scaled[token_ids])
    if params.top_p < 1:
        nucleus = weights >= _nucleus_threshold(weights, params.top_p)
        token_ids, weights = token_ids[nucleus], weights[nucleus]
    return token_ids, weights


def _nucleus_threshold(weights: Float64, top_p: float) -> float:
    """The least weight of the smallest set of heaviest tokens that holds `top_p` of the mass (Holtzman et al., 2020)."""
    total = float(weights.sum())
    # The tokens below this share hold less than 1 - top_p together, so that none of them is needed; leaving them out
    # of the sort makes a peaked distribution over a large vocabulary cheap.
    candidates = weights[weights >= (1 - top_p) * total / len(weights)]
    descending = np.sort(candidates)[::-1]
    last = int(np.searchsorted(np.cumsum(descending), top_p * total, side="left"))
    return float(descending[min(last, len(descending) - 1)])


def compute_logprobs(row: Float32, token_id: int, num_top: int) -> TokenLogprobs:
    """Natural-log probabilities of the raw logits `[V] float32`: the token's and the `num_top` best, ties by lower id."""
    values = row.astype(np.float64)
    highest = float(values.max())
    normalizer = highest + math.log(float(np.exp(values - highest).sum()))
    num_top = min(num_top, len(values))
    top: list[int] = []
    if num_top:
        candidates = np.flatnonzero(values >= np.partition(values, -num_top)[-num_top])
        top = candidates[np.argsort(-values[candidates], kind="stable")][:num_top].tolist()
    return TokenLogprobs(
        logprob=float(values[token_id]) - normalizer,
        top_token_ids=tuple(top),
        top_logprobs=tuple(float(values[i]) - normalizer for i in top),
    )
