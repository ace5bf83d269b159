"""Logits to tokens, on the host, each row by itself.

The order is vLLM's (v1): logprobs from the raw logits; then the request's rules (`service.engine.logits`); then
temperature, min-p, top-k, top-p; then one draw. Each filter is a threshold on what the filters before it left,
renormalised, and tokens that tie with the last one kept stay too (vLLM breaks such ties in top-p arbitrarily). A
request's draws come from a counter-based generator (Philox; Salmon et al., 2011) keyed by its seed and the output's
index, at a counter that is the token's position: no state, hence the same draws in any company and after any
interruption, and of an output whatever the number of others.

Arg-max runs over the whole batch at once. Everything else goes row by row, and everything that adds up in float64: a
row by itself cannot feel its company, each array fits a cache, and measured over whole batches the rest was faster only
for many rows of a small vocabulary. Knows nothing of requests, slots' contents or text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from service.engine.batch import BeamRow, SampleRow, ScoreRow
from service.engine.logits import LogitsRules
from service.engine.sampling.top_logits import MIN_TEMPERATURE, TopLogits
from service.engine.types import SamplingParams, TokenLogprobs

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]

# From here on all tokens are equally likely, and it is finite in float32, so that what is masked stays masked.
_MAX_TEMPERATURE = 1e30
_BLOCK = 256
_FOLDS = 32


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A row's next token; `logprobs` where the request asked."""

    token_id: int
    logprobs: TokenLogprobs | None


@dataclass(frozen=True, slots=True, eq=False)
class Expansion:
    """A beam's most probable continuations, best first, ties by lower id: `[C] int64` and `[C] float64`.

    `logprobs` are of the raw logits, so that they add up to what the model makes of the whole output: what rules forbid
    is left out, and the rest keep their values (as in Hugging Face's `generate`; CTranslate2 renormalises), unless the
    rules say otherwise. The `top_` fields are the alternatives reported with any of them, as in `TokenLogprobs`.
    """

    token_ids: Int64
    logprobs: Float64
    top_token_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()

    def describe(self, index: int) -> TokenLogprobs:
        """One continuation's log-probability, beside the alternatives'."""
        return TokenLogprobs(float(self.logprobs[index]), self.top_token_ids, self.top_logprobs)


class Draws:
    """Uniform draws by seed, output and position: those of a fresh `Philox(key=(seed, output), counter=position)`.

    Making one takes ten times as long as setting the state of one that is there.
    """

    def __init__(self) -> None:
        self._bits = np.random.Philox(0)
        self._generator = np.random.Generator(self._bits)

    def uniform(self, seed: int, output_index: int, position: int) -> float:
        """The draw in [0, 1) of the token at `position` of one of the outputs of a request with this seed (uint64)."""
        # The buffer of four words counts as used up, so that the draw comes from this key and counter alone.
        state: Any = {
            "bit_generator": "Philox",
            "state": {"key": (seed, output_index), "counter": (position, 0, 0, 0)},
            "buffer": (0, 0, 0, 0),
            "buffer_pos": 4,
            "has_uint32": 0,
            "uinteger": 0,
        }
        self._bits.state = state
        return self._generator.random()


@dataclass(frozen=True, slots=True)
class Candidates:
    """The tokens left of a row, by ascending id, and their weights: in proportion to probability, the best one's is 1.

    `token_ids` is None where the whole vocabulary is left, so that `weights[i]` is token i's.
    """

    token_ids: Int64 | None
    weights: Float32

    def keep(self, indices: Int64) -> Candidates:
        """Those at the given places."""
        token_ids = indices if self.token_ids is None else self.token_ids[indices]
        return Candidates(token_ids, self.weights[indices])


class Sampler:
    """Chooses the next token of every row that wants one.

    Args:
        top: rows of which the runner gives the highest logits alone, as they decide all that is drawn from them.
    """

    def __init__(self, top: TopLogits | None = None) -> None:
        self._draws = Draws()
        self._top = TopLogits() if top is None else top

    def sample(self, logits: Float32, samples: Sequence[SampleRow]) -> tuple[SampledToken | None, ...]:
        """One result for each of `samples`, in their order.

        Args:
            logits: `[slots, V] float32`, indexed by slot; other rows are not looked at, nor those that `top` knows.
            samples: which rows, and how.

        Returns:
            Tokens; None for a row whose logits are not all finite, and for those of no use behind one that is not the
            draft that it was to be.
        """
        if samples and samples[0].draft is not None:
            return self._sample_drafted(logits, samples)
        if not self._top:
            return self._sample_whole(logits, samples)
        rest = self._sample_whole(logits, [sample for sample in samples if sample.slot not in self._top])
        others = iter(rest)
        return tuple(self._sample_top(each) if each.slot in self._top else next(others) for each in samples)

    def _sample_whole(self, logits: Float32, samples: Sequence[SampleRow]) -> tuple[SampledToken | None, ...]:
        if not samples:
            return ()
        rows = _select(logits, [sample.slot for sample in samples])
        best = rows.argmax(axis=1).tolist()
        return tuple(
            self._sample_row(row, sample, argmax) for row, sample, argmax in zip(rows, samples, best, strict=True)
        )

    def _sample_drafted(self, logits: Float32, samples: Sequence[SampleRow]) -> tuple[SampledToken | None, ...]:
        """Tokens of one output, one after the other, up to the first that is not the draft."""
        sampled: list[SampledToken | None] = []
        for sample in samples:
            sampled += self._sample_whole(logits, (sample,))
            if sampled[-1] is None or sampled[-1].token_id != sample.draft:
                break
        return (*sampled, *(None,) * (len(samples) - len(sampled)))

    def score(self, logits: Float32, scores: Sequence[ScoreRow]) -> tuple[tuple[TokenLogprobs, ...] | None, ...]:
        """How probable tokens are that nobody has to choose any more: one result for each of `scores`.

        Args:
            logits: `[rows, V] float32`.
            scores: which of them, and the tokens that follow.

        Returns:
            A token's log-probabilities for each; None where the logits of any are not all finite.
        """
        return tuple(map(partial(_score_row, logits), scores))

    def expand(self, logits: Float32, beams: Sequence[BeamRow]) -> tuple[tuple[Expansion, ...] | None, ...]:
        """The most probable continuations of every beam: one result for each of `beams`, in their order.

        Args:
            logits: `[slots, V] float32`, indexed by slot; other rows are not looked at.
            beams: which rows, by request, and how many continuations. Rules may mask tokens, all of them even, and
                must leave the others as they are.

        Returns:
            An expansion for each slot of a request; None for a request with a row whose logits are not all finite.
        """
        return tuple(map(partial(_expand_beams, logits), beams))

    def _sample_row(self, row: Float32, sample: SampleRow, argmax: int) -> SampledToken | None:
        # Between two steps of a graph that reads its weights, no code is in any cache: few functions are faster than
        # vectors. Extremes carry a NaN, which is the largest then, or an infinity out of any row.
        if not (math.isfinite(row[argmax]) and math.isfinite(np.minimum.reduce(row))):
            return None
        chosen_from = row
        if sample.rules is not None and (chosen_from := sample.rules.apply(row)) is not row:
            argmax = int(chosen_from.argmax())
        is_greedy = sample.params.temperature < MIN_TEMPERATURE
        token_id = argmax if is_greedy else self._draw(chosen_from, sample, chosen_from[argmax])
        logprobs = None if sample.logprobs is None else compute_logprobs(row, token_id, sample.logprobs)
        return SampledToken(token_id, logprobs)

    def _sample_top(self, sample: SampleRow) -> SampledToken:
        """A token of a row that is known by its highest logits, which are all that can be chosen."""
        if sample.params.temperature < MIN_TEMPERATURE:
            return SampledToken(self._top.best(sample.slot), None)
        row = self._top.row(sample.slot)
        return SampledToken(int(row.token_ids[self._draw(row.values, sample, row.highest)]), None)

    def _draw(self, row: Float32, sample: SampleRow, highest: np.float32) -> int:
        """A place in a row, drawn from what its request leaves of it."""
        with np.errstate(over="ignore"):
            candidates = truncate(row, sample.params, highest)
        index = _invert(candidates.weights, self._draws.uniform(sample.seed, sample.output_index, sample.position))
        return index if candidates.token_ids is None else int(candidates.token_ids[index])


def _score_row(logits: Float32, score: ScoreRow) -> tuple[TokenLogprobs, ...] | None:
    rows = logits[score.first_logits : score.first_logits + len(score.token_ids)]
    if not _is_finite(rows):
        return None
    return tuple(
        compute_logprobs(row, token_id, score.num_top) for row, token_id in zip(rows, score.token_ids, strict=True)
    )


def _expand_beams(logits: Float32, beams: BeamRow) -> tuple[Expansion, ...] | None:
    rows = [logits[slot] for slot in beams.slots]
    if not all(_is_finite(row) for row in rows):
        return None
    return tuple(
        _expand(row, rules, beams.num_candidates, beams.logprobs) for row, rules in zip(rows, beams.rules, strict=True)
    )


def _expand(row: Float32, rules: LogitsRules | None, num_candidates: int, num_top: int | None) -> Expansion:
    chosen_from = row if rules is None else rules.apply(row)
    normalizer = _compute_normalizer(row)
    token_ids = _rank_highest(chosen_from, num_candidates)
    # What is masked comes last, if at all.
    token_ids = token_ids[: int((chosen_from[token_ids] > -np.inf).sum())]
    renormalizes = rules is not None and rules.renormalizes and len(token_ids)
    own_normalizer = _compute_normalizer(chosen_from) if renormalizes else normalizer
    top = _rank_highest(row, num_top or 0)
    return Expansion(
        token_ids,
        chosen_from[token_ids].astype(np.float64) - own_normalizer,
        tuple(top.tolist()),
        tuple((row[top].astype(np.float64) - normalizer).tolist()),
    )


def _is_finite(rows: Float32) -> bool:
    with np.errstate(invalid="ignore"):
        return bool(np.isfinite(rows.max()) and np.isfinite(rows.min()))


def _select(logits: Float32, slots: list[int]) -> Float32:
    """The wanted rows, without a copy in the usual case that they are the first ones."""
    return logits[: len(slots)] if slots == list(range(len(slots))) else logits[slots]


def truncate(row: Float32, params: SamplingParams, highest: np.float32) -> Candidates:
    """What temperature, min-p, top-k and top-p leave of a row.

    Args:
        row: `[V] float32` logits, finite or -inf, which never survives.
        params: temperature 1e-5 or more.
        highest: the row's maximum.
    """
    token_ids = _find_highest(row, params.top_k) if 0 < params.top_k < len(row) else None
    # Shifted before it is scaled, so that the best token's value is 0 and whatever overflows is as unlikely as it gets.
    scaled: Float32 = (row if token_ids is None else row[token_ids]) - highest
    if params.temperature != 1:
        scaled /= min(params.temperature, _MAX_TEMPERATURE)
    if params.min_p > 0:
        # Before the exponential, of which few are needed then.
        kept = (scaled >= math.log(params.min_p)).nonzero()[0]
        token_ids = kept if token_ids is None else token_ids[kept]
        scaled = scaled[kept]
    candidates = Candidates(token_ids, np.exp(scaled, out=scaled))
    return candidates if params.top_p >= 1 else _keep_nucleus(candidates, params.top_p)


def _keep_nucleus(candidates: Candidates, top_p: float) -> Candidates:
    """The smallest set of tokens that holds `top_p` of the mass (Holtzman et al., 2020), and those that tie with it."""
    total = float(candidates.weights.sum(dtype=np.float64))
    # The tokens below this share hold less than 1 - top_p together, so that none of them is needed; leaving them out
    # of the sort makes a peaked distribution over a large vocabulary cheap.
    least = (1 - top_p) * total / len(candidates.weights)
    candidates = candidates.keep((candidates.weights >= least).nonzero()[0])
    descending = np.sort(candidates.weights)[::-1]
    last = _locate(descending, _running_totals(descending), top_p * total, "left")
    return candidates.keep((candidates.weights >= descending[last]).nonzero()[0])


def _invert(weights: Float32, draw: float) -> int:
    """The index at which the running total of `weights` first exceeds `draw`, a share of the whole in [0, 1)."""
    totals = _running_totals(weights)
    return _locate(weights, totals, draw * float(totals[-1]), "right")


def _running_totals(weights: Float32) -> Float64:
    """Running totals of whole blocks: one of every weight would cost more than all the rest of sampling."""
    return np.add.reduceat(weights, np.arange(0, len(weights), _BLOCK), dtype=np.float64).cumsum()


def _locate(weights: Float32, totals: Float64, target: float, side: Literal["left", "right"]) -> int:
    """The index at which the running total of `weights` first reaches `target` (left) or exceeds it (right)."""
    block = min(int(totals.searchsorted(target, side=side)), len(totals) - 1)
    members = weights[block * _BLOCK : (block + 1) * _BLOCK]
    before = totals[block - 1] if block else 0.0
    index = int((before + members.cumsum(dtype=np.float64)).searchsorted(target, side=side))
    # A block's members, added one by one, can fall short of its total by a rounding error.
    return block * _BLOCK + (index if index < len(members) else int(members.nonzero()[0][-1]))


def compute_logprobs(row: Float32, token_id: int, num_top: int) -> TokenLogprobs:
    """Natural-log probabilities of raw logits `[V] float32`: the token's and the `num_top` best, ties by lower id."""
    normalizer = _compute_normalizer(row)
    top = _rank_highest(row, num_top)
    return TokenLogprobs(
        logprob=float(row[token_id]) - normalizer,
        top_token_ids=tuple(top.tolist()),
        top_logprobs=tuple((row[top].astype(np.float64) - normalizer).tolist()),
    )


def _compute_normalizer(row: Float32) -> float:
    """The logarithm of the sum of exponentials."""
    highest = row.max()
    with np.errstate(over="ignore"):
        weights = row - highest
    np.exp(weights, out=weights)
    return float(highest) + math.log(float(weights.sum(dtype=np.float64)))


def _rank_highest(row: Float32, count: int) -> Int64:
    """The places of the `count` highest values, or of all if there are fewer: highest first, ties by lower place."""
    count = min(count, len(row))
    if not count:
        return np.empty(0, np.int64)
    places = _find_highest(row, count)
    return places[np.argsort(-row[places], kind="stable")[:count]]


def _find_highest(row: Float32, count: int) -> Int64:
    """The places of the `count` highest values (1 to all of them) and of those that tie with the last, ascending.

    Selecting among all values would cost more than all the rest of sampling. So the row is folded into columns: the
    `count` columns with the highest maxima hold that many values that are no lower than the last of those maxima, and
    whatever is lower cannot be among the highest. Few others are left to select from.
    """
    places = None
    if count < (width := len(row) // _FOLDS):
        maxima = row[: width * _FOLDS].reshape(_FOLDS, width).max(axis=0)
        places = (row >= np.partition(maxima, width - count)[width - count]).nonzero()[0]
    values = row if places is None else row[places]
    kept: Int64 = (values >= np.partition(values, len(values) - count)[len(values) - count]).nonzero()[0]
    return kept if places is None else places[kept]
