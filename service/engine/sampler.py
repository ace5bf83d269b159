"""Logits to tokens, on the host, each row by itself.

The order is vLLM's (v1): logprobs from the raw logits; then temperature, min-p, top-k, top-p; then one draw. Each
filter is a threshold on what the filters before it left, renormalised, and tokens that tie with the last one kept
stay too (vLLM breaks such ties in top-p arbitrarily). A request's draws come from a counter-based generator (Philox;
Salmon et al., 2011) keyed by its seed, at a counter that is the token's position: no state, hence the same draws in
any company and after any interruption.

Only what cannot change a row's bits runs over the whole batch: arg-max, maxima, minima. Everything else goes row by
row, and everything that adds up in float64. Knows nothing of sequences, slots' contents or text.
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

# Below this sampling is greedy, as in vLLM: float32 could not hold the scaled logits.
_MIN_TEMPERATURE = 1e-5
_BLOCK = 256


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
            _sample_row(row, sample, argmax)
            if is_finite
            else report_failure(f"non-finite logits in slot {sample.slot}")
            for row, sample, argmax, is_finite in zip(rows, samples, greedy, finite, strict=True)
        )


def _select(logits: Float32, slots: list[int]) -> Float32:
    """The wanted rows, without a copy in the usual case that they are the first ones."""
    return logits[: len(slots)] if slots == list(range(len(slots))) else logits[slots]


def _sample_row(row: Float32, sample: SampleRow, argmax: int) -> SampledToken:
    if sample.params.temperature < _MIN_TEMPERATURE:
        token_id = argmax
    else:
        token_id = _invert(truncated_weights(row, sample.params), uniform(sample.seed, sample.position))
    logprobs = None if sample.logprobs is None else compute_logprobs(row, token_id, sample.logprobs)
    return SampledToken(token_id, logprobs)


def uniform(seed: int, position: int) -> float:
    """The draw in [0, 1) that belongs to the token at `position` of a request with this seed (uint64)."""
    return float(np.random.Generator(np.random.Philox(key=seed, counter=position)).random())


def truncated_weights(row: Float32, params: SamplingParams) -> Float32:
    """What temperature, min-p, top-k and top-p leave of a row.

    Args:
        row: `[V] float32` finite logits.
        params: temperature 1e-5 or more.

    Returns:
        `[V] float32`, proportional to the probabilities; the best token's is 1, those left out have 0.
    """
    # Shifted before it is scaled, so that the best token's value is 0 and whatever overflows is as unlikely as it gets.
    with np.errstate(over="ignore"):
        scaled: Float32 = (row - row.max()) / params.temperature
    weights: Float32 = np.exp(scaled)
    threshold = math.log(params.min_p) if params.min_p > 0 else -math.inf
    if 0 < params.top_k < len(scaled):
        threshold = max(threshold, float(np.partition(scaled, -params.top_k)[-params.top_k]))
    if threshold > -math.inf:
        weights = np.where(scaled >= threshold, weights, np.float32(0))
    if params.top_p < 1:
        weights = np.where(weights >= _nucleus_threshold(weights, params.top_p), weights, np.float32(0))
    return weights


def _nucleus_threshold(weights: Float32, top_p: float) -> float:
    """The least weight in the smallest set of tokens that holds `top_p` of the mass (Holtzman et al., 2020)."""
    total = float(weights.sum(dtype=np.float64))
    # The tokens below this share hold less than 1 - top_p together, so that none of them is needed; leaving them out
    # of the sort makes a peaked distribution over a large vocabulary cheap.
    candidates = weights[np.flatnonzero(weights >= (1 - top_p) * total / len(weights))]
    descending = np.sort(candidates)[::-1]
    last = int(np.searchsorted(np.cumsum(descending, dtype=np.float64), top_p * total, side="left"))
    return float(descending[min(last, len(descending) - 1)])


def _invert(weights: Float32, draw: float) -> int:
    """The index at which the running total of `weights` first exceeds `draw`, a share of the whole in [0, 1).

    Goes by blocks first: a running total over a whole vocabulary costs more than all the rest of sampling.
    """
    starts = np.arange(0, len(weights), _BLOCK)
    totals = np.cumsum(np.add.reduceat(weights, starts, dtype=np.float64))
    target = draw * totals[-1]
    block = int(np.searchsorted(totals, target, side="right"))
    members = weights[block * _BLOCK : (block + 1) * _BLOCK]
    before = totals[block - 1] if block else 0.0
    index = int(np.searchsorted(before + np.cumsum(members, dtype=np.float64), target, side="right"))
    # A block's members, added one by one, can fall short of its total by a rounding error.
    return block * _BLOCK + (index if index < len(members) else int(np.flatnonzero(members)[-1]))


def compute_logprobs(row: Float32, token_id: int, num_top: int) -> TokenLogprobs:
    """Natural-log probabilities of raw logits `[V] float32`: the token's and the `num_top` best, ties by lower id."""
    highest = row.max()
    with np.errstate(over="ignore"):
        normalizer = float(highest) + math.log(float(np.exp(row - highest).sum(dtype=np.float64)))
    num_top = min(num_top, len(row))
    top: list[int] = []
    if num_top:
        candidates = np.flatnonzero(row >= np.partition(row, -num_top)[-num_top])
        top = candidates[np.argsort(-row[candidates], kind="stable")][:num_top].tolist()
    return TokenLogprobs(
        logprob=float(row[token_id]) - normalizer,
        top_token_ids=tuple(top),
        top_logprobs=tuple(float(row[i]) - normalizer for i in top),
    )
