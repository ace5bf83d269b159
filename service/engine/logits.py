"""Rules that change a row's logits before anything is drawn from it: one `LogitsTransform` for each.

Names and definitions are vLLM's (v1: `Sampler.forward`, `SamplingParams`), which took the repetition penalty from
Keskar et al., 2019 (CTRL, section 4.1) and the presence and frequency penalties from OpenAI's API: bias, then
repetition, frequency and presence penalty, all of it before temperature. Masks come last here, so that arithmetic meets
finite numbers only; what is masked stays masked, so the outcome is the same as with vLLM's, which come first. That no
n-gram may occur twice is Hugging Face's rule (after Paulus et al., 2017), which vLLM does not have.

What the model itself wants (`model.spec.generation`) comes after what the request asks for, and what it forces last.

A rule reads the request and the request's own tokens and nothing else. Knows no slots, no sampling and no text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from model.spec.generation import GenerationRules
from service.engine.types import BeamSearchParams, SamplingArrays, SamplingParams, StoppingParams

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]

_MAX_LOGIT = float(np.finfo(np.float32).max)
_MIN_CAPACITY = 16
# Ids that numpy reads at once: it holds the interpreter's lock meanwhile, tens of nanoseconds an id.
_MAX_IDS_AT_ONCE = 4096


class NgramIndex:
    """Which tokens followed which: the n-grams of a sequence, never read again when a token comes.

    Args:
        size: n.
        token_ids: what the sequence begins with. Forks share it, however long it is.
    """

    def __init__(self, size: int, token_ids: Iterable[int] = ()) -> None:
        self._size = size
        given = tuple(token_ids)
        followers: dict[tuple[int, ...], list[int]] = {}
        for start in range(len(given) - size + 1):
            followers.setdefault(given[start : start + size - 1], []).append(given[start + size - 1])
        self._given = {context: tuple(dict.fromkeys(token_ids)) for context, token_ids in followers.items()}
        self._added: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._context = given[max(len(given) - size + 1, 0) :]

    @property
    def followers(self) -> tuple[int, ...]:
        """The tokens that would complete an n-gram that is there."""
        return (*self._given.get(self._context, ()), *self._added.get(self._context, ()))

    def add(self, token_id: int) -> None:
        """Goes on by a token."""
        if len(self._context) == self._size - 1:
            self._added[self._context] = (*self._added.get(self._context, ()), token_id)
            self._context = (*self._context, token_id)[1:]
        else:
            self._context = (*self._context, token_id)

    def fork(self) -> NgramIndex:
        """A copy that goes on by itself."""
        copy = NgramIndex(self._size)
        copy._given, copy._added, copy._context = self._given, self._added.copy(), self._context
        return copy


class TokenHistory:
    """What rules know of a sequence's tokens: which it has seen, how often it generated each, and its n-grams.

    A token more costs the same however many there were.

    Args:
        seen: tokens that were given rather than generated.
        ngrams: where a rule asks for them, those of the given tokens.
    """

    def __init__(self, seen: Iterable[int] = (), ngrams: NgramIndex | None = None) -> None:
        self.ngrams = ngrams
        self._places = {token_id: place for place, token_id in enumerate(dict.fromkeys(seen))}
        capacity = max(_MIN_CAPACITY, 2 * len(self._places))
        self._token_ids = np.zeros(capacity, np.int64)
        self._token_ids[: len(self._places)] = list(self._places)
        self._counts = np.zeros(capacity, np.float64)
        self._num_generated = 0

    @property
    def token_ids(self) -> Int64:
        """`[D]`: the distinct tokens, in the order in which they were first seen."""
        return self._token_ids[: len(self._places)]

    @property
    def counts(self) -> Float64:
        """`[D]`: how often each of `token_ids` was generated; 0 for what was only given."""
        return self._counts[: len(self._places)]

    @property
    def num_generated(self) -> int:
        """Tokens generated so far."""
        return self._num_generated

    def add(self, token_id: int) -> None:
        """Counts a generated token."""
        place = self._places.setdefault(token_id, len(self._places))
        if place == len(self._token_ids):
            self._token_ids = np.concatenate([self._token_ids, np.zeros_like(self._token_ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._token_ids[place] = token_id
        self._counts[place] += 1
        self._num_generated += 1
        if self.ngrams is not None:
            self.ngrams.add(token_id)

    def fork(self) -> TokenHistory:
        """A copy that goes on by itself."""
        copy = TokenHistory(ngrams=None if self.ngrams is None else self.ngrams.fork())
        copy._places = self._places.copy()
        copy._token_ids, copy._counts = self._token_ids.copy(), self._counts.copy()
        copy._num_generated = self._num_generated
        return copy


class LogitsTransform(Protocol):
    """One rule."""

    def is_idle(self, tokens: TokenHistory, /) -> bool:
        """Whether it would change nothing after these tokens."""

    def apply(self, row: Float32, tokens: TokenHistory, /) -> None:
        """Changes the logits `[V] float32` of the token that follows these, in place."""


@dataclass(frozen=True, slots=True, eq=False)
class LogitBias:
    """Adds `values[i]` to the logit of `token_ids[i]`; ids are distinct."""

    token_ids: Int64
    values: Float32

    def is_idle(self, _tokens: TokenHistory) -> bool:
        """Never."""
        return False

    def apply(self, row: Float32, _tokens: TokenHistory) -> None:
        """Adds."""
        row[self.token_ids] += self.values


@dataclass(frozen=True, slots=True, kw_only=True)
class Penalties:
    """Makes tokens that occurred less probable (or more, where a penalty is below its neutral value).

    `repetition` divides positive logits of all tokens seen and multiplies negative ones; `frequency` is subtracted for
    each time that a token was generated, `presence` once.
    """

    repetition: float
    frequency: float
    presence: float

    def is_idle(self, tokens: TokenHistory) -> bool:
        """Before there are tokens."""
        return not len(tokens.token_ids)

    def apply(self, row: Float32, tokens: TokenHistory) -> None:
        """Penalises; logits stay finite."""
        token_ids, counts = tokens.token_ids, tokens.counts
        logits = row[token_ids].astype(np.float64)
        with np.errstate(over="ignore"):
            logits = np.where(logits > 0, logits / self.repetition, logits * self.repetition)
        logits -= self.frequency * counts
        logits -= self.presence * (counts > 0)
        row[token_ids] = logits.clip(-_MAX_LOGIT, _MAX_LOGIT)


@dataclass(frozen=True, slots=True, eq=False)
class AllowedTokens:
    """Masks every token but these."""

    token_ids: Int64

    def is_idle(self, _tokens: TokenHistory) -> bool:
        """Never."""
        return False

    def apply(self, row: Float32, _tokens: TokenHistory) -> None:
        """Masks."""
        kept = row[self.token_ids]
        row.fill(-np.inf)
        row[self.token_ids] = kept


@dataclass(frozen=True, slots=True, eq=False)
class MinTokens:
    """Masks the tokens that would end the output, until `min_tokens` were generated."""

    min_tokens: int
    token_ids: Int64

    def is_idle(self, tokens: TokenHistory) -> bool:
        """Once there are enough tokens."""
        return tokens.num_generated >= self.min_tokens

    def apply(self, row: Float32, _tokens: TokenHistory) -> None:
        """Masks."""
        row[self.token_ids] = -np.inf


class NoRepeatNgrams:
    """Masks the tokens that would complete an n-gram that is there already: all of them, if need be."""

    def is_idle(self, tokens: TokenHistory) -> bool:
        """Where the last tokens stand for the first time."""
        return tokens.ngrams is None or not tokens.ngrams.followers

    def apply(self, row: Float32, tokens: TokenHistory) -> None:
        """Masks."""
        if tokens.ngrams is not None:
            row[list(tokens.ngrams.followers)] = -np.inf


@dataclass(frozen=True, slots=True, eq=False)
class SuppressedTokens:
    """Masks these tokens, always."""

    token_ids: Int64

    def is_idle(self, _tokens: TokenHistory) -> bool:
        """Never."""
        return False

    def apply(self, row: Float32, _tokens: TokenHistory) -> None:
        """Masks."""
        row[self.token_ids] = -np.inf


@dataclass(frozen=True, slots=True)
class ForcedToken:
    """Leaves nothing but one token, where `place` tokens were generated."""

    place: int
    token_id: int

    def is_idle(self, tokens: TokenHistory) -> bool:
        """Anywhere else."""
        return tokens.num_generated != self.place

    def apply(self, row: Float32, _tokens: TokenHistory) -> None:
        """Masks all others; the one may have been masked itself."""
        row.fill(-np.inf)
        row[self.token_id] = 0.0


class LogitsRules:
    """One sequence's rules, and what they know of its tokens.

    Args:
        transforms: in the order in which they apply. Together they must leave a token to a row that is sampled; a beam
            may be left with none.
        tokens: what the sequence begins with.
        renormalize: whether what is left of a row is a distribution of its own to a beam search.
    """

    def __init__(
        self, transforms: tuple[LogitsTransform, ...], tokens: TokenHistory, *, renormalize: bool = False
    ) -> None:
        self._transforms = transforms
        self._tokens = tokens
        self._renormalize = renormalize

    @property
    def renormalizes(self) -> bool:
        """Whether the next token's log-probabilities are of what the rules leave rather than of the raw logits."""
        return self._renormalize or any(
            isinstance(transform, ForcedToken) and not transform.is_idle(self._tokens) for transform in self._transforms
        )

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to be changed in the next token's logits."""
        return all(transform.is_idle(self._tokens) for transform in self._transforms)

    def add(self, token_id: int) -> None:
        """Counts a generated token."""
        self._tokens.add(token_id)

    def apply(self, row: Float32) -> Float32:
        """The logits by which the next token is chosen.

        Args:
            row: `[V] float32` finite logits, left as they are.

        Returns:
            `[V] float32`, -inf where a token must not be chosen; `row` itself where no rule has anything to change.
        """
        active = [transform for transform in self._transforms if not transform.is_idle(self._tokens)]
        if not active:
            return row
        changed = row.copy()
        for transform in active:
            transform.apply(changed, self._tokens)
        return changed

    def fork(self) -> LogitsRules:
        """The same rules for a copy of the sequence that goes on by itself."""
        return LogitsRules(self._transforms, self._tokens.fork(), renormalize=self._renormalize)


def make_sampling_arrays(sampling: SamplingParams) -> SamplingArrays | None:
    """The tokens that `sampling` names as arrays, None if it names none.

    There may be as many as the vocabulary has: call this off the engine thread and off the event loop. No other thread
    waits for it for long.
    """
    if not sampling.logit_bias and not sampling.allowed_token_ids:
        return None
    return SamplingArrays(
        biased_token_ids=_int64s([token_id for token_id, _ in sampling.logit_bias]),
        biases=np.array([bias for _, bias in sampling.logit_bias], np.float32),
        allowed_token_ids=_int64s(sampling.allowed_token_ids),
    )


def _int64s(token_ids: Sequence[int]) -> Int64:
    array = np.empty(len(token_ids), np.int64)
    for start in range(0, len(token_ids), _MAX_IDS_AT_ONCE):
        array[start : start + _MAX_IDS_AT_ONCE] = token_ids[start : start + _MAX_IDS_AT_ONCE]
    return array


def make_rules(
    sampling: SamplingParams,
    stopping: StoppingParams,
    eos_ids: Iterable[int],
    decoder_prompt: Iterable[int],
    wishes: Iterable[LogitsTransform] = (),
    arrays: SamplingArrays | None = None,
) -> LogitsRules | None:
    """The rules that a request asks for, None if it asks for none.

    Args:
        sampling: penalties, bias, allowed tokens.
        stopping: the least length, and the tokens that would end the output before it.
        eos_ids: the model's; masked before the least length even if they are to be ignored, as in vLLM.
        decoder_prompt: tokens that precede the output and count as seen: the prompt of a decoder-only model, the forced
            beginning of an encoder-decoder's output. (Hugging Face's `generate` counts the start token, too, and with
            it punishes the end of sequence of models that start with that; neither counts the source.)
        wishes: the model's own (`make_wishes`).
        arrays: those of `sampling` (`make_sampling_arrays`), which are made here where there are none.
    """
    transforms: list[LogitsTransform] = []
    arrays = arrays or make_sampling_arrays(sampling)
    if arrays is not None and len(arrays.biased_token_ids):
        transforms.append(LogitBias(arrays.biased_token_ids, arrays.biases))
    repeats = sampling.repetition_penalty != 1
    if repeats or sampling.frequency_penalty or sampling.presence_penalty:
        transforms.append(
            Penalties(
                repetition=sampling.repetition_penalty,
                frequency=sampling.frequency_penalty,
                presence=sampling.presence_penalty,
            )
        )
    if arrays is not None and len(arrays.allowed_token_ids):
        transforms.append(AllowedTokens(arrays.allowed_token_ids))
    transforms.extend([*_make_min_tokens(stopping, eos_ids), *wishes])
    if not transforms:
        return None
    # No other rule asks what the prompt was.
    return LogitsRules(tuple(transforms), TokenHistory(decoder_prompt if repeats else ()))


def make_beam_rules(
    beam_search: BeamSearchParams,
    stopping: StoppingParams,
    eos_ids: Iterable[int],
    decoder_prompt: Iterable[int],
    wishes: Iterable[LogitsTransform] = (),
    *,
    renormalize: bool = False,
) -> LogitsRules | None:
    """The rules that a beam search asks for, None if it asks for none; each beam has a fork of its own.

    They only mask: beam search excludes sampling, and with it all else.

    Args:
        beam_search: the size of n-grams that may occur but once.
        stopping: as for `make_rules`.
        eos_ids: as for `make_rules`.
        decoder_prompt: as for `make_rules`. Its n-grams count, as with Hugging Face's `generate` (which counts those
            with the start token, too) and, for a target prefix, with CTranslate2.
        wishes: as for `make_rules`.
        renormalize: as for `LogitsRules`.
    """
    transforms: list[LogitsTransform] = [*_make_min_tokens(stopping, eos_ids)]
    ngrams = None
    if beam_search.no_repeat_ngram_size:
        ngrams = NgramIndex(beam_search.no_repeat_ngram_size, decoder_prompt)
        transforms.append(NoRepeatNgrams())
    transforms.extend(wishes)
    if not transforms:
        return None
    return LogitsRules(tuple(transforms), TokenHistory(ngrams=ngrams), renormalize=renormalize)


def make_wishes(rules: GenerationRules, *, max_tokens: int, is_begun: bool) -> tuple[LogitsTransform, ...]:
    """What the model itself wants of an output.

    Args:
        rules: its wishes.
        max_tokens: how many tokens the output may have.
        is_begun: whether the request has given its beginning, and with it what would be forced.
    """
    wishes: list[LogitsTransform] = []
    if rules.suppressed_ids:
        wishes.append(SuppressedTokens(np.array(rules.suppressed_ids, np.int64)))
    if rules.forced_first_id is not None and not is_begun:
        wishes.append(ForcedToken(0, rules.forced_first_id))
    if rules.forced_last_id is not None:
        wishes.append(ForcedToken(max_tokens - 1, rules.forced_last_id))
    return tuple(wishes)


def _make_min_tokens(stopping: StoppingParams, eos_ids: Iterable[int]) -> list[MinTokens]:
    ends = stopping.stop_token_ids.union(eos_ids)
    return [MinTokens(stopping.min_tokens, np.array(sorted(ends), np.int64))] if stopping.min_tokens and ends else []
