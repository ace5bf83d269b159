"""Logits to tokens, on the host, each row by itself.

The order is vLLM's (v1): logprobs from the raw logits; then the request's rules (`service.engine.logits`); then
temperature, min-p, top-k, top-p; then one draw. Each filter is a threshold on the renormalized rest of those before it,
and tokens that tie with the last one kept stay (vLLM breaks such ties in top-p arbitrarily). Draws come from a
counter-based generator (Philox; Salmon et al., 2011) keyed by the request's seed and the output's index, at a counter
that is the token's position. So draws need no state, and are independent of batch composition, interruptions and n.

Arg-max runs over the whole batch; everything else row by row, and sums in float64: a row's arrays fit a cache, and
whole batches were faster only for many rows of a small vocabulary. Knows no requests, no slots' contents and no text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from service.engine.batch import BeamRow, SampleRow, ScoreRow
from service.engine.logits import LogitsRules
from service.engine.sampling.filters import rank_highest, select_index, truncate
from service.engine.sampling.top_logits import MIN_TEMPERATURE, TopLogits
from service.engine.types import TokenLogprobs

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A row's next token; `logprobs` if the request asked for them."""

    token_id: int
    logprobs: TokenLogprobs | None


@dataclass(frozen=True, slots=True, eq=False)
class Expansion:
    """A beam's most probable continuations, best first, ties by lower id: `[C] int64` and `[C] float64`.

    `logprobs` are of the raw logits, so that they add up to the model's probability of the whole output: masked tokens
    are left out, and the others keep their values (as in Hugging Face's `generate`; CTranslate2 renormalizes), unless
    the rules renormalize. The `top_` fields are the alternatives to report, as in `TokenLogprobs`.
    """

    token_ids: Int64
    logprobs: Float64
    top_token_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()

    def describe(self, index: int) -> TokenLogprobs:
        """One continuation's log-probability, and the alternatives."""
        return TokenLogprobs(float(self.logprobs[index]), self.top_token_ids, self.top_logprobs)


class Draws:
    """Uniform draws of a fresh `Philox(key=(seed, output), counter=position)`.

    One generator is reused: setting its state takes a tenth of the time of making one.
    """

    def __init__(self) -> None:
        self._bits = np.random.Philox(0)
        self._generator = np.random.Generator(self._bits)

    def uniform(self, seed: int, output_index: int, position: int) -> float:
        """The draw in [0, 1) for `position` of an output of a request with this seed (uint64)."""
        # The buffer of four words counts as used up, so that the draw depends on this key and counter alone.
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


class Sampler:
    """Chooses tokens. `top` has rows of which the runner provides only the highest logits, as these suffice."""

    def __init__(self, top: TopLogits | None = None) -> None:
        self._draws = Draws()
        self._top = TopLogits() if top is None else top

    def sample(self, logits: Float32, samples: Sequence[SampleRow]) -> tuple[SampledToken | None, ...]:
        """Samples one token for each of `samples`, in their order.

        Args:
            logits: `[slots, V] float32`, indexed by slot; only the rows of `samples` are read, and none that `top` has.
            samples: which rows, and how.

        Returns:
            Tokens; None for a row whose logits are not all finite, for one of which rules leave no token, and for rows
            behind a rejected draft token.
        """
        if any(sample.draft is not None for sample in samples):
            return self._sample_all_drafted(logits, samples)
        if not self._top:
            return self._sample_whole(logits, samples)
        rest = self._sample_whole(logits, [sample for sample in samples if sample.slot not in self._top])
        others = iter(rest)
        return tuple(self._sample_top(each) if each.slot in self._top else next(others) for each in samples)

    def _sample_whole(self, logits: Float32, samples: Sequence[SampleRow]) -> tuple[SampledToken | None, ...]:
        if not samples:
            return ()
        rows = _rows_of(logits, [sample.slot for sample in samples])
        best = rows.argmax(axis=1).tolist()
        return tuple(
            self._sample_row(row, sample, argmax) for row, sample, argmax in zip(rows, samples, best, strict=True)
        )

    def _sample_all_drafted(self, logits: Float32, samples: Sequence[SampleRow]) -> tuple[SampledToken | None, ...]:
        """Output by output: the last sample of each has no draft."""
        sampled: list[SampledToken | None] = []
        first = 0
        for end, sample in enumerate(samples, 1):
            if sample.draft is None:
                sampled += self._sample_drafted(logits, samples[first:end])
                first = end
        return tuple(sampled)

    def _sample_drafted(self, logits: Float32, samples: Sequence[SampleRow]) -> tuple[SampledToken | None, ...]:
        """Samples tokens of one output up to the first that differs from its draft.

        Its rules change when the step is committed: here a fork of them follows the accepted drafts.
        """
        sampled: list[SampledToken | None] = []
        own = samples[0].rules
        rules = None if own is None else own.fork()
        for sample in samples:
            (token,) = self._sample_whole(logits, (replace(sample, rules=rules),))
            sampled.append(token)
            if token is None and own is not None and rules is not None and rules.problem is not None:
                own.report_empty(rules.problem)
            if token is None or token.token_id != sample.draft:
                break
            if rules is not None:
                rules.add(token.token_id)
                if rules.is_complete:
                    break
        return (*sampled, *(None,) * (len(samples) - len(sampled)))

    def score(self, logits: Float32, scores: Sequence[ScoreRow]) -> tuple[tuple[TokenLogprobs, ...] | None, ...]:
        """Log-probabilities of the known tokens of each of `scores`; None where some logits are not finite."""
        return tuple(map(partial(_score_row, logits), scores))

    def expand(self, logits: Float32, beams: Sequence[BeamRow]) -> tuple[tuple[Expansion, ...] | None, ...]:
        """The most probable continuations of each request's beams; None where logits are not finite or a grammar ends.

        Rules may mask tokens, even all, and must not change the others.
        """
        return tuple(map(partial(_expand_beams, logits), beams))

    def _sample_row(self, row: Float32, sample: SampleRow, argmax: int) -> SampledToken | None:
        # The graph's weights have evicted all code from the caches: few calls are faster than vectorized ones. NaN is
        # the arg-max of a row, and infinities are its extremes.
        if not (math.isfinite(row[argmax]) and math.isfinite(np.minimum.reduce(row))):
            return None
        token_ids, chosen_from, rules = None, row, sample.rules
        is_greedy = sample.params.temperature < MIN_TEMPERATURE
        # A grammar answers for one token in a tenth of the time that its mask takes.
        if rules is not None and not (is_greedy and rules.spare(argmax)):
            token_ids, chosen_from = rules.narrow(row)
            if chosen_from is not row:
                argmax = int(chosen_from.argmax())
            if chosen_from[argmax] == -np.inf:
                rules.report_empty()
                return None
        index = argmax if is_greedy else self._draw(chosen_from, sample, chosen_from[argmax])
        token_id = index if token_ids is None else int(token_ids[index])
        logprobs = None if sample.logprobs is None else compute_logprobs(row, token_id, sample.logprobs)
        return SampledToken(token_id, logprobs)

    def _sample_top(self, sample: SampleRow) -> SampledToken:
        """Samples from a row of which only the highest logits are known."""
        if sample.params.temperature < MIN_TEMPERATURE:
            return SampledToken(self._top.best(sample.slot), None)
        row = self._top.row(sample.slot)
        return SampledToken(int(row.token_ids[self._draw(row.values, sample, row.values.max())]), None)

    def _draw(self, row: Float32, sample: SampleRow, highest: np.float32) -> int:
        """Draws an index from what the filters leave of a row."""
        with np.errstate(over="ignore"):
            candidates = truncate(row, sample.params, highest)
        index = select_index(candidates.weights, self._draws.uniform(sample.seed, sample.output_index, sample.position))
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
    expansions = tuple(
        _expand(row, rules, beams.num_candidates, beams.logprobs) for row, rules in zip(rows, beams.rules, strict=True)
    )
    return None if any(rules is not None and rules.problem for rules in beams.rules) else expansions


def _expand(row: Float32, rules: LogitsRules | None, num_candidates: int, num_top: int | None) -> Expansion:
    chosen_from = row if rules is None else rules.apply(row)
    normalizer = _compute_normalizer(row)
    token_ids = rank_highest(chosen_from, num_candidates)
    # Masked tokens come last.
    token_ids = token_ids[: int((chosen_from[token_ids] > -np.inf).sum())]
    renormalizes = rules is not None and rules.renormalizes and len(token_ids)
    own_normalizer = _compute_normalizer(chosen_from) if renormalizes else normalizer
    top = rank_highest(row, num_top or 0)
    return Expansion(
        token_ids,
        chosen_from[token_ids].astype(np.float64) - own_normalizer,
        tuple(top.tolist()),
        tuple((row[top].astype(np.float64) - normalizer).tolist()),
    )


def _is_finite(rows: Float32) -> bool:
    with np.errstate(invalid="ignore"):
        return bool(np.isfinite(rows.max()) and np.isfinite(rows.min()))


def _rows_of(logits: Float32, slots: list[int]) -> Float32:
    """The rows of `slots`; no copy in the usual case that they are the first ones."""
    return logits[: len(slots)] if slots == list(range(len(slots))) else logits[slots]


def compute_logprobs(row: Float32, token_id: int, num_top: int) -> TokenLogprobs:
    """Natural-log probabilities of raw logits `[V] float32`: the token's and the `num_top` best, ties by lower id."""
    normalizer = _compute_normalizer(row)
    top = rank_highest(row, num_top)
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
