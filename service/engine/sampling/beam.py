"""Beam search over one request's outputs: which beams continue, which hypotheses are finished, when it is over.

At each step all continuations of all beams compete by cumulative log-probability (Graves, 2012; Boulanger-Lewandowski
et al., 2013). Of the best `beam_size`, those that end are finished hypotheses; the best `beam_size` that do not end are
the next beams. A hypothesis's score is `sum of log-probabilities / length ** length_penalty`, the simple form of Wu et
al., 2016, equation 14; the length counts generated tokens, the end included. All this is Hugging Face's and
CTranslate2's search (CTranslate2 counts the end only where the hypothesis shows it). At `max_tokens` the best
`beam_size` continuations finish, whatever they are.

The search is over when `beam_size * patience` hypotheses are finished (Kasai et al., 2022; patience 1 is Hugging Face's
`early_stopping=True` and CTranslate2's default), but never before there are as many as were asked for. With patience 0
it is over when `beam_size` are finished and the best beam, if it ended now, would score no better than the worst of the
best `beam_size`: Hugging Face's default, `early_stopping=False`, a heuristic, as a beam's score may still rise. It is
also over when no beam is left, or when none could still beat the hypotheses to be returned, which changes no result:
log-probabilities only fall, so a beam's best possible score is known.

Pure: knows no slots, no K/V, no text and no rules, which are applied in the expansions. Sums are in double precision. A
search depends on its own expansions only, so it is independent of batch composition.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from service.engine.sampling.sampler import Expansion
from service.engine.types import BeamSearchParams, FinishReason, TokenLogprobs

_MAX_LOG = 700.0


@dataclass(frozen=True, slots=True)
class Extension:
    """A next beam: beam `parent` of the step before, and one more token."""

    parent: int
    token_id: int


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished output. Its tokens include its end, if it has one; each token has its log-probabilities."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    score: float
    finish_reason: FinishReason
    matched_stop: int | None = None


@dataclass(frozen=True, slots=True)
class _Beam:
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    total: float = 0.0

    def extend(self, token_id: int, logprobs: TokenLogprobs) -> _Beam:
        return _Beam((*self.token_ids, token_id), (*self.logprobs, logprobs), self.total + logprobs.logprob)


class BeamSearch:
    """One request's search: a single empty beam at first.

    Outputs have at most `max_tokens` (at least 1), and end with any of `eos_ids` (empty where ignored) or
    `stop_token_ids`. `length_penalty` is limited so that powers of `max_tokens` stay within double precision.
    """

    def __init__(
        self, params: BeamSearchParams, max_tokens: int, eos_ids: frozenset[int], stop_token_ids: frozenset[int]
    ) -> None:
        self._params = params
        self._patience = 1.0 if params.patience is None else params.patience
        self._max_tokens = max_tokens
        self._eos_ids = eos_ids
        self._stop_token_ids = stop_token_ids
        limit = _MAX_LOG / max(math.log(max_tokens), 1.0)
        self._length_penalty = min(max(params.length_penalty, -limit), limit)
        self._beams = [_Beam()]
        self._length = 0
        self._hypotheses: list[Hypothesis] = []

    @property
    def num_beams(self) -> int:
        """Beams to expand: one before the first step, none when the search is over."""
        return len(self._beams)

    @property
    def num_steps(self) -> int:
        """Steps so far."""
        return self._length

    @property
    def num_candidates(self) -> int:
        """Continuations wanted of each beam.

        Enough for one beam to provide all of the next ones, even if every ending token is among its best.
        """
        return self._params.beam_size + len(self._eos_ids | self._stop_token_ids)

    @property
    def is_over(self) -> bool:
        """Whether the hypotheses are final."""
        return not self._beams

    def advance(self, expansions: Sequence[Expansion]) -> tuple[Extension, ...]:
        """Takes one step; returns the next beams, best first, and none when the search is over.

        Ties go to the continuation of the better beam, then to the more probable token, then to the lower id.

        Args:
            expansions: one for each beam, in order. A beam without continuations is a dead end.
        """
        totals = [beam.total + expansion.logprobs for beam, expansion in zip(self._beams, expansions, strict=True)]
        parents = np.repeat(np.arange(len(totals)), [len(each) for each in totals])
        firsts = np.cumsum([0, *map(len, totals)])
        self._length += 1
        is_last = self._length == self._max_tokens
        extensions: list[Extension] = []
        beams: list[_Beam] = []
        for rank, index in enumerate(np.argsort(-np.concatenate(totals), kind="stable").tolist()):
            is_among_best = rank < self._params.beam_size
            if not is_among_best and (is_last or len(beams) == self._params.beam_size):
                break
            parent = int(parents[index])
            place = index - int(firsts[parent])
            token_id = int(expansions[parent].token_ids[place])
            is_end = token_id in self._eos_ids or token_id in self._stop_token_ids
            if is_end and not is_among_best:
                continue
            beam = self._beams[parent].extend(token_id, expansions[parent].describe(place))
            if is_end or is_last:
                self._finish(beam)
            elif len(beams) < self._params.beam_size:
                beams.append(beam)
                extensions.append(Extension(parent, token_id))
        if not beams and not self._hypotheses:
            # No beam has a continuation, and no hypothesis is finished: the beams are returned as they are.
            for beam in self._beams:
                self._finish(beam)
        if self._is_decided(beams):
            self._beams = []
            return ()
        self._beams = beams
        return tuple(extensions)

    def stop(self, reason: FinishReason) -> tuple[Hypothesis, ...]:
        """Ends the search: its beams finish for this reason, and compete with the finished hypotheses.

        Returns:
            `hypotheses()`; one without tokens before the first step.
        """
        for beam in self._beams:
            self._finish(beam, reason)
        self._beams = []
        return self.hypotheses()

    def hypotheses(self) -> tuple[Hypothesis, ...]:
        """The best finished hypotheses, best first; of equal scores, the one that finished first comes first.

        When the search is over there are as many as were asked for, or fewer where rules and vocabulary allow no more,
        and at least one, which has no tokens if nothing could be generated.
        """
        ranked = sorted(self._hypotheses, key=lambda hypothesis: -hypothesis.score)
        return tuple(ranked[: self._params.num_hypotheses])

    def _finish(self, beam: _Beam, reason: FinishReason = FinishReason.LENGTH) -> None:
        """Adds a hypothesis; `reason` applies unless its last token is an ending one."""
        matched_stop = None
        last = beam.token_ids[-1] if beam.token_ids else None
        if last in self._eos_ids:
            reason = FinishReason.END_OF_SEQUENCE
        elif last in self._stop_token_ids:
            reason, matched_stop = FinishReason.STOP, last
        score = self._score(beam.total, len(beam.token_ids))
        self._hypotheses.append(Hypothesis(beam.token_ids, beam.logprobs, score, reason, matched_stop))

    def _score(self, total: float, length: int) -> float:
        return total / math.pow(max(length, 1), self._length_penalty)

    def _worst_of_best(self) -> float:
        """Score of the last of the best `beam_size` hypotheses."""
        return sorted((each.score for each in self._hypotheses), reverse=True)[self._params.beam_size - 1]

    def _is_decided(self, beams: Sequence[_Beam]) -> bool:
        params, num_finished = self._params, len(self._hypotheses)
        if not beams:
            return True
        if num_finished < params.num_hypotheses:
            return False
        if self._patience == 0:
            if num_finished >= params.beam_size and self._score(beams[0].total, self._length) <= self._worst_of_best():
                return True
        elif num_finished >= params.beam_size * self._patience:
            return True
        # The sum can only fall, so the best possible score is that of the length that divides it most.
        best_length = self._max_tokens if params.length_penalty > 0 else self._length + 1
        return self._score(beams[0].total, best_length) <= self.hypotheses()[-1].score
