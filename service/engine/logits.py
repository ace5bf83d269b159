"""Rules that change a row's logits before a token is chosen: one `LogitsTransform` each.

Names and definitions are vLLM's (v1: `Sampler.forward`, `SamplingParams`), with the repetition penalty of Keskar et
al., 2019 (CTRL, section 4.1) and OpenAI's presence and frequency penalties. The order is bias, repetition, frequency
and presence penalty, then masks; temperature comes later. vLLM masks first; the outcome is the same, and here
arithmetic meets finite numbers only. `no_repeat_ngram_size` is Hugging Face's rule (after Paulus et al., 2017). The
model's own rules (`model.spec.generation`) come after the request's, a grammar's mask among them, and forced tokens
last.

A rule depends on the request and its own tokens only. Knows no slots, no sampling and no text.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from model.spec.generation import GenerationRules
from service.engine.types import BeamSearchParams, SamplingArrays, SamplingParams, StoppingParams

if TYPE_CHECKING:
    from service.engine.sampling.grammar import Matcher

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]

_MAX_LOGIT = float(np.finfo(np.float32).max)
_MIN_CAPACITY = 16
# Ids that numpy converts at once: it holds the interpreter's lock meanwhile, tens of nanoseconds an id.
_MAX_IDS_AT_ONCE = 4096


class NgramIndex:
    """The n-grams of a sequence, by their first n - 1 tokens; a token more costs the same however many there were.

    Forks share the index of the tokens given at first.
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
        """The tokens that would repeat an n-gram."""
        return (*self._given.get(self._context, ()), *self._added.get(self._context, ()))

    def add(self, token_id: int) -> None:
        """Appends a token."""
        if len(self._context) == self._size - 1:
            self._added[self._context] = (*self._added.get(self._context, ()), token_id)
            self._context = (*self._context, token_id)[1:]
        else:
            self._context = (*self._context, token_id)

    def fork(self) -> NgramIndex:
        """An independent copy."""
        copy = NgramIndex(self._size)
        copy._given, copy._added, copy._context = self._given, self._added.copy(), self._context
        return copy


class TokenHistory:
    """What rules know of a sequence's tokens; a token more costs the same however many there were.

    Args:
        seen: tokens that were given rather than generated.
        ngrams: n-grams of the given tokens, where a rule needs them.
        matcher: how far the generated tokens have followed a grammar, where there is one.
    """

    def __init__(
        self, seen: Iterable[int] = (), ngrams: NgramIndex | None = None, matcher: Matcher | None = None
    ) -> None:
        self.ngrams = ngrams
        self.matcher = matcher
        self.num_generated = 0
        self._places = {token_id: place for place, token_id in enumerate(dict.fromkeys(seen))}
        capacity = max(_MIN_CAPACITY, 2 * len(self._places))
        self._token_ids = np.zeros(capacity, np.int64)
        self._token_ids[: len(self._places)] = list(self._places)
        self._counts = np.zeros(capacity, np.float64)

    @property
    def token_ids(self) -> Int64:
        """`[D]`: the distinct tokens, in the order of their first occurrence."""
        return self._token_ids[: len(self._places)]

    @property
    def counts(self) -> Float64:
        """`[D]`: how often each of `token_ids` was generated."""
        return self._counts[: len(self._places)]

    def add(self, token_id: int) -> None:
        """Counts a generated token."""
        place = self._places.setdefault(token_id, len(self._places))
        if place == len(self._token_ids):
            self._token_ids = np.concatenate([self._token_ids, np.zeros_like(self._token_ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._token_ids[place] = token_id
        self._counts[place] += 1
        self.num_generated += 1
        if self.ngrams is not None:
            self.ngrams.add(token_id)
        if self.matcher is not None:
            self.matcher.add(token_id)

    def fork(self) -> TokenHistory:
        """An independent copy."""
        copy = TokenHistory(
            ngrams=None if self.ngrams is None else self.ngrams.fork(),
            matcher=None if self.matcher is None else self.matcher.fork(),
        )
        copy._places = self._places.copy()
        copy._token_ids, copy._counts = self._token_ids.copy(), self._counts.copy()
        copy.num_generated = self.num_generated
        return copy


class LogitsTransform(Protocol):
    """One rule."""

    def is_idle(self, tokens: TokenHistory, /) -> bool:
        """Whether it changes nothing after these tokens."""

    def apply(self, row: Float32, tokens: TokenHistory, /) -> None:
        """Changes the logits `[V] float32` of the token that follows these, in place."""


@dataclass(frozen=True, slots=True, eq=False)
class _LogitBias:
    """Adds `values[i]` to the logit of `token_ids[i]`; ids are distinct."""

    token_ids: Int64
    values: Float32

    def is_idle(self, _tokens: TokenHistory) -> bool:
        return False

    def apply(self, row: Float32, _tokens: TokenHistory) -> None:
        row[self.token_ids] += self.values


@dataclass(frozen=True, slots=True, kw_only=True)
class _Penalties:
    """Makes tokens that occurred less probable, or more where a penalty is below its neutral value.

    `repetition` divides positive logits of all tokens seen and multiplies negative ones; `frequency` is subtracted for
    each time that a token was generated, `presence` once. Logits stay finite.
    """

    repetition: float
    frequency: float
    presence: float

    def is_idle(self, tokens: TokenHistory) -> bool:
        return not len(tokens.token_ids)

    def apply(self, row: Float32, tokens: TokenHistory) -> None:
        token_ids, counts = tokens.token_ids, tokens.counts
        logits = row[token_ids].astype(np.float64)
        with np.errstate(over="ignore"):
            logits = np.where(logits > 0, logits / self.repetition, logits * self.repetition)
        logits -= self.frequency * counts
        logits -= self.presence * (counts > 0)
        row[token_ids] = logits.clip(-_MAX_LOGIT, _MAX_LOGIT)


@dataclass(frozen=True, slots=True, eq=False)
class _AllowedTokens:
    """Masks every token but these."""

    token_ids: Int64

    def is_idle(self, _tokens: TokenHistory) -> bool:
        return False

    def apply(self, row: Float32, _tokens: TokenHistory) -> None:
        allowed = row[self.token_ids]
        row.fill(-np.inf)
        row[self.token_ids] = allowed


@dataclass(frozen=True, slots=True, eq=False)
class _MaskedTokens:
    """Masks these tokens until `until` tokens were generated."""

    token_ids: Int64
    until: float = math.inf

    def is_idle(self, tokens: TokenHistory) -> bool:
        return tokens.num_generated >= self.until

    def apply(self, row: Float32, _tokens: TokenHistory) -> None:
        row[self.token_ids] = -np.inf


class _NoRepeatNgrams:
    """Masks the tokens that would repeat an n-gram; that may be all of them."""

    def is_idle(self, tokens: TokenHistory) -> bool:
        return tokens.ngrams is None or not tokens.ngrams.followers

    def apply(self, row: Float32, tokens: TokenHistory) -> None:
        row[list(tokens.ngrams.followers if tokens.ngrams else ())] = -np.inf


class _GrammarMask:
    """Masks the tokens that the grammar forbids: all of them if it cannot be followed any further."""

    def is_idle(self, tokens: TokenHistory) -> bool:
        return tokens.matcher is None

    def apply(self, row: Float32, tokens: TokenHistory) -> None:
        if tokens.matcher is not None:
            tokens.matcher.mask(row)


@dataclass(frozen=True, slots=True)
class _ForcedToken:
    """Masks all tokens but one, which may have been masked itself, after `place` generated tokens."""

    place: int
    token_id: int

    def is_idle(self, tokens: TokenHistory) -> bool:
        return tokens.num_generated != self.place

    def apply(self, row: Float32, _tokens: TokenHistory) -> None:
        row.fill(-np.inf)
        row[self.token_id] = 0.0


class LogitsRules:
    """One sequence's rules, and the tokens that they depend on.

    Args:
        transforms: in the order in which they apply. Without a grammar they must leave a token to a row that is
            sampled; a beam may be left with none.
        tokens: what the sequence begins with.
        renormalize: whether a beam search takes log-probabilities from what the rules leave.
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
        forced = (each for each in self._transforms if isinstance(each, _ForcedToken))
        return self._renormalize or any(not each.is_idle(self._tokens) for each in forced)

    @property
    def is_idle(self) -> bool:
        """Whether no rule changes the next token's logits."""
        return all(transform.is_idle(self._tokens) for transform in self._transforms)

    @property
    def is_complete(self) -> bool:
        """Whether a grammar allows no more text."""
        return self._tokens.matcher is not None and self._tokens.matcher.is_complete

    @property
    def problem(self) -> str | None:
        """Why a grammar cannot be followed any further; None where it can, and without one."""
        return None if self._tokens.matcher is None else self._tokens.matcher.problem

    @property
    def forced_tokens(self) -> tuple[int, ...]:
        """The tokens that a grammar forces next, as far as it knows; another rule may choose otherwise."""
        return () if self._tokens.matcher is None else self._tokens.matcher.forced()

    def report_empty(self, problem: str | None = None) -> None:
        """Notes that the rules left no token to choose, now or, by the `problem` of a fork, after draft tokens."""
        if self._tokens.matcher is not None:
            other = "leaves no token that the model and the other rules allow"
            self._tokens.matcher.problem = self.problem or problem or other

    def add(self, token_id: int) -> None:
        """Counts a generated token."""
        self._tokens.add(token_id)

    def spare(self, token_id: int) -> bool:
        """Whether the rules leave a row's highest logit to this token; False, too, where saying so takes long."""
        return all(each.is_idle(self._tokens) or self._spares(each, token_id) for each in self._transforms)

    def _spares(self, transform: LogitsTransform, token_id: int) -> bool:
        if isinstance(transform, _MaskedTokens):
            return token_id not in transform.token_ids
        matcher = self._tokens.matcher
        return isinstance(transform, _GrammarMask) and matcher is not None and matcher.allows(token_id)

    def apply(self, row: Float32) -> Float32:
        """The logits by which the next token is chosen.

        Args:
            row: `[V] float32` finite logits, left as they are.

        Returns:
            `[V] float32`, -inf where a token must not be chosen; `row` itself where no rule changes anything.
        """
        if not (active := [each for each in self._transforms if not each.is_idle(self._tokens)]):
            return row
        changed = row.copy()
        for transform in active:
            transform.apply(changed, self._tokens)
        return changed

    def narrow(self, row: Float32) -> tuple[Int64 | None, Float32]:
        """As `apply`, but of the tokens left alone where a grammar leaves few, ascending, before their logits."""
        others = (each for each in self._transforms if not isinstance(each, _GrammarMask))
        matcher = self._tokens.matcher if all(each.is_idle(self._tokens) for each in others) else None
        return (None, self.apply(row)) if matcher is None else matcher.narrow(row)

    def fork(self) -> LogitsRules:
        """An independent copy, for a fork of the sequence."""
        return LogitsRules(self._transforms, self._tokens.fork(), renormalize=self._renormalize)


def make_sampling_arrays(sampling: SamplingParams) -> SamplingArrays | None:
    """The tokens that `sampling` names as arrays, None if it names none; not for the engine's thread or the loop.

    There may be as many as the vocabulary has. It releases the interpreter's lock often.
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
    model_rules: Iterable[LogitsTransform] = (),
    arrays: SamplingArrays | None = None,
    matcher: Matcher | None = None,
) -> LogitsRules | None:
    """The rules of a sampled request, None if there are none.

    Args:
        sampling: penalties, bias, allowed tokens.
        stopping: the least length, and the tokens that would end the output before it.
        eos_ids: the model's; masked before the least length even with `ignore_eos`, as in vLLM.
        decoder_prompt: tokens that count as seen: a decoder-only model's prompt, an encoder-decoder's target prefix.
            Neither the source counts nor the start token. (Hugging Face's `generate` counts the start token, and so
            penalizes the end of sequence of models that start with it.)
        model_rules: the model's own (`make_model_rules`).
        arrays: `make_sampling_arrays(sampling)`, if that was called before.
        matcher: of the grammar that the output must follow.
    """
    transforms: list[LogitsTransform] = []
    arrays = arrays or make_sampling_arrays(sampling)
    if arrays is not None and len(arrays.biased_token_ids):
        transforms.append(_LogitBias(arrays.biased_token_ids, arrays.biases))
    has_repetition = sampling.repetition_penalty != 1
    if has_repetition or sampling.frequency_penalty or sampling.presence_penalty:
        transforms.append(
            _Penalties(
                repetition=sampling.repetition_penalty,
                frequency=sampling.frequency_penalty,
                presence=sampling.presence_penalty,
            )
        )
    if arrays is not None and len(arrays.allowed_token_ids):
        transforms.append(_AllowedTokens(arrays.allowed_token_ids))
    transforms.extend([*_make_min_tokens(stopping, eos_ids), *([_GrammarMask()] if matcher else ()), *model_rules])
    if not transforms:
        return None
    # Only the repetition penalty depends on the prompt.
    return LogitsRules(tuple(transforms), TokenHistory(decoder_prompt if has_repetition else (), matcher=matcher))


def make_beam_rules(
    beam_search: BeamSearchParams,
    stopping: StoppingParams,
    eos_ids: Iterable[int],
    decoder_prompt: Iterable[int],
    model_rules: Iterable[LogitsTransform] = (),
    matcher: Matcher | None = None,
    *,
    renormalize: bool = False,
) -> LogitsRules | None:
    """The rules of a beam search, None if there are none; each beam has a fork. They only mask.

    Args are those of `make_rules` and `LogitsRules`. N-grams of the decoder prompt count, as with Hugging Face's
    `generate` (which includes the start token) and, for a target prefix, with CTranslate2.
    """
    transforms: list[LogitsTransform] = [*_make_min_tokens(stopping, eos_ids), *([_GrammarMask()] if matcher else ())]
    ngrams = None
    if beam_search.no_repeat_ngram_size:
        ngrams = NgramIndex(beam_search.no_repeat_ngram_size, decoder_prompt)
        transforms.append(_NoRepeatNgrams())
    transforms.extend(model_rules)
    if not transforms:
        return None
    return LogitsRules(tuple(transforms), TokenHistory(ngrams=ngrams, matcher=matcher), renormalize=renormalize)


def make_model_rules(rules: GenerationRules, *, max_tokens: int, has_prefix: bool) -> tuple[LogitsTransform, ...]:
    """The model's own rules for an output.

    Args:
        rules: the model's.
        max_tokens: of the output.
        has_prefix: whether the request gave a target prefix, and so the first token that would be forced.
    """
    transforms: list[LogitsTransform] = []
    if rules.suppressed_ids:
        transforms.append(_MaskedTokens(np.array(rules.suppressed_ids, np.int64)))
    if rules.forced_first_id is not None and not has_prefix:
        transforms.append(_ForcedToken(0, rules.forced_first_id))
    if rules.forced_last_id is not None:
        transforms.append(_ForcedToken(max_tokens - 1, rules.forced_last_id))
    return tuple(transforms)


def _make_min_tokens(stopping: StoppingParams, eos_ids: Iterable[int]) -> list[LogitsTransform]:
    ends = stopping.stop_token_ids.union(eos_ids)
    return (
        [_MaskedTokens(np.array(sorted(ends), np.int64), stopping.min_tokens)] if stopping.min_tokens and ends else []
    )
