"""Beam search over one request's outputs: which beams live on, which have ended, and when the search is over.

At each step all continuations of all beams compete by their cumulative log-probability (Graves, 2012;
Boulanger-Lewandowski et al., 2013). Those among the best `beam_size` that end are finished hypotheses; the best
`beam_size` that do not end are the next step's beams. That is Hugging Face's and CTranslate2's search, too, as is a
hypothesis's score, `sum of log-probabilities / length ** length_penalty`, the simple form of Wu et al., 2016, equation
14. The length counts generated tokens, the end among them, as with Hugging Face (CTranslate2 counts it only where the
hypothesis shows it). At `max_tokens` the best `beam_size` continuations finish, whatever they are.

The search is over when `beam_size * patience` hypotheses have finished (Kasai et al., 2022; Hugging Face's
`early_stopping=True` and CTranslate2's default are patience 1), but never before there are as many as were asked for.
With patience 0 it is over when `beam_size` have finished and the best beam, were it to end as it is, would score no
better than the worst of the best `beam_size`: a guess, as a beam's score may still rise, and Hugging Face's default,
`early_stopping=False`. It is also over when no beam is left, or when no beam could still beat the hypotheses to be
returned, which changes nothing but the time that it takes (nothing adds to a log-probability, so that a beam's best
possible score is known).

Pure: knows no slots, no K/V, no text and no rules, which have had their say in the expansions. A search is a function
of its own expansions alone, added up in double precision, so that a request's company cannot change it.
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
    """A beam that lives on: beam `parent` of the step before, and one more token."""

    parent: int
    token_id: int


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished output. Its end, if it has one, is among its tokens, and each token has its log-probabilities."""

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

    Args:
        params: a `length_penalty` is cut to what double precision can hold of the powers of `max_tokens`.
        max_tokens: how long an output may be, at least 1: what the request asks for or the context has left.
        eos_ids: tokens that end an output; none where they are to be ignored.
        stop_token_ids: further tokens that do, by the request's wish.
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
        """Steps so far: how often the beams were extended."""
        return self._length

    @property
    def num_candidates(self) -> int:
        """How many continuations of each beam are wanted, or all there are if fewer.

        Enough for one beam to provide all of the next ones, though every end is among its best.
        """
        return self._params.beam_size + len(self._eos_ids | self._stop_token_ids)

    @property
    def is_over(self) -> bool:
        """Whether the hypotheses are final."""
        return not self._beams

    def advance(self, expansions: Sequence[Expansion]) -> tuple[Extension, ...]:
        """One step.

        Ties go to the continuation of the better beam, then to the more probable token, then to the lower id.

        Args:
            expansions: one for each beam, in order. A beam without continuations is a dead end.

        Returns:
            The next beams, best first; none when the search is over.
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
            # Nothing may follow any beam, and none has ended: better what there is than nothing.
            for beam in self._beams:
                self._finish(beam)
        if self._is_decided(beams):
            self._beams = []
            return ()
        self._beams = beams
        return tuple(extensions)

    def stop(self, reason: FinishReason) -> tuple[Hypothesis, ...]:
        """Ends the search where it is: its beams finish for this reason, and compete with those that have ended.

        Returns:
            What `hypotheses` does from now on; one without tokens where nothing was searched yet.
        """
        for beam in self._beams:
            self._finish(beam, reason)
        self._beams = []
        return self.hypotheses()

    def hypotheses(self) -> tuple[Hypothesis, ...]:
        """The best of those finished, best first; the one that finished first where scores are equal.

        As many as were asked for when the search is over, or all there are: fewer only where rules and vocabulary allow
        no more, and one at least, which has no tokens if nothing could be generated at all.
        """
        ranked = sorted(self._hypotheses, key=lambda hypothesis: -hypothesis.score)
        return tuple(ranked[: self._params.num_hypotheses])

    def _finish(self, beam: _Beam, reason: FinishReason = FinishReason.LENGTH) -> None:
        """Adds a hypothesis; `reason` is why, unless its last token says so."""
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

    def _worst_kept(self) -> float:
        """The score of the last of the best `beam_size` hypotheses."""
        return sorted((each.score for each in self._hypotheses), reverse=True)[self._params.beam_size - 1]

    def _is_decided(self, beams: Sequence[_Beam]) -> bool:
        params, num_finished = self._params, len(self._hypotheses)
        if not beams:
            return True
        if num_finished < params.num_hypotheses:
            return False
        if self._patience == 0:
            if num_finished >= params.beam_size and self._score(beams[0].total, self._length) <= self._worst_kept():
                return True
        elif num_finished >= params.beam_size * self._patience:
            return True
        # A score is best where its length divides it most, and by then the sum can only be less.
        best_length = self._max_tokens if params.length_penalty > 0 else self._length + 1
        return self._score(beams[0].total, best_length) <= self.hypotheses()[-1].score
