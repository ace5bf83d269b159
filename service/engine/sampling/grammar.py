"""Structured output: a compiled grammar, and for each output a matcher that masks the tokens that would leave it.

llguidance computes the masks over the bytes of the model's tokens (extra `structured`). A matcher advances by accepted
tokens only. Control tokens are never allowed, whatever the grammar says, and the end of sequence only where the text so
far is complete. Grammars come from clients: `service.process.grammar_check` tries them first, and a matcher that meets
a limit reports a problem, which ends its request.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from model.spec.tokenizer import Tokenizer
from model.spec.vocabulary_bytes import spell_tokens
from service.process.grammar_check import LIMITS, shorten_error

Float32 = npt.NDArray[np.float32]
Int64 = npt.NDArray[np.int64]
UInt8 = npt.NDArray[np.uint8]

# For each byte of a mask, the highest that 8 logits may be: infinity for a set bit, the lowest bit first. To take these
# and the minima is several times as fast as to assign by a mask of booleans.
_HIGHEST: Float32 = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, np.newaxis], axis=1, bitorder="little"), np.inf, -np.inf
).astype(np.float32)
# To draw among such a part of the vocabulary takes less than to mask the rest.
_FEW = 0.25
# Of a longer text the beginning is split at the longest tokens, as the model's tokenizer takes microseconds per byte.
# llguidance asks at each mask for the tokens of all text that is forced, and uses the first.
_MAX_CANONICAL_BYTES = 256
_MAX_KNOWN_TEXTS = 1024


class GrammarError(ValueError):
    """A grammar that cannot be compiled; the text says why."""


class Vocabulary:
    """A model's tokens as llguidance knows them. Immutable, thread-safe. Takes some microseconds per token to make.

    Raises:
        TokenizerError: when the bytes of the tokenizer's tokens are unknown.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Iterable[int]) -> None:
        from llguidance import LLTokenizer  # an extra

        spelled = spell_tokens(tokenizer)
        missing = (b"",) * (vocab_size - len(spelled.later))
        later, first = (*spelled.later, *missing), (*spelled.first, *missing)
        self.eos_ids = np.array(sorted(eos_ids), np.int64)
        # Byte 0xFF is in no text, and marks control tokens in llguidance.
        self.has_text = np.array([bool(token) and b"\xff" not in token for token in later])
        self.has_text[self.eos_ids] = False
        # A token that has other bytes at the beginning of a text counts as another token there, behind the vocabulary.
        differing = [token for token in range(vocab_size) if first[token] != later[token]]
        self.first_ids = np.arange(vocab_size)
        self.first_ids[differing] = np.arange(vocab_size, vocab_size + len(differing))
        self.begins_text = self.has_text & np.array([bool(token) for token in first])
        tokens = [*later, *(first[token] for token in differing)]
        special = np.flatnonzero(~self.has_text).tolist()
        words: Any = _Words(tokenizer, later, tokens, special, self.eos_ids.tolist())
        self.tokens = LLTokenizer(words, eos_token=self.eos_ids.tolist() or None)
        self.num_words = (self.tokens.vocab_size + 31) // 32
        # As llguidance's masks: a bit for each token, the lowest first.
        self.text_mask = np.packbits(self.has_text, bitorder="little")
        self.eos_mask = np.packbits(np.isin(np.arange(vocab_size), self.eos_ids), bitorder="little")

    def compile(self, grammar: str) -> Grammar:
        """Compiles what `describe_grammar` wrote. The interpreter's lock is free meanwhile.

        Raises:
            GrammarError: with llguidance's message.
        """
        from llguidance import LLMatcher, LLParserLimits

        matcher = LLMatcher(self.tokens, grammar, log_level=0, limits=LLParserLimits(**LIMITS))
        if matcher.is_error():
            raise GrammarError(shorten_error(matcher.get_error()))
        # Over a large vocabulary the first mask may take more than over the bytes that the grammar was tried with.
        trial = matcher.deep_copy()
        trial.compute_bitmask()
        # Text that no token spells is no fault where another token has it: masks decide.
        if trial.is_error() and "NoExtensionBias" not in trial.get_error():
            raise GrammarError(f"is too complex: {shorten_error(trial.get_error())}")
        return Grammar(self, matcher)


class _Words:
    """A vocabulary in the shape that llguidance asks for; called, it tokenizes text that a grammar forces."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(
        self,
        tokenizer: Tokenizer,
        spelled: tuple[bytes, ...],
        tokens: list[bytes],
        special_ids: list[int],
        eos_ids: list[int],
    ) -> None:
        self.tokens = tokens
        self.special_token_ids = special_ids
        self.eos_token_id = eos_ids[0] if eos_ids else 0
        self._tokenizer = tokenizer
        self._spelled = spelled
        self._ids: dict[bytes, int] = {}
        for token_id, token in enumerate(spelled):
            if token and token_id not in eos_ids:
                self._ids.setdefault(token, token_id)
        # Of tokens of several bytes, by the first two: the longest first.
        lengths: dict[bytes, set[int]] = {}
        for token in self._ids:
            lengths.setdefault(token[:2], set()).add(len(token))
        self._lengths = {begin: sorted(each, reverse=True) for begin, each in lengths.items()}
        # What a grammar forces, it forces again and again, within a step.
        self._known: dict[bytes, list[int]] = {}

    def __call__(self, text: bytes | str) -> list[int]:
        data = text.encode() if isinstance(text, str) else text
        if len(data) > _MAX_CANONICAL_BYTES:
            return self._split(data[:_MAX_CANONICAL_BYTES])
        if (ids := self._known.get(data)) is None:
            if len(self._known) >= _MAX_KNOWN_TEXTS:
                self._known.clear()
            ids = self._known[data] = self._tokenize(data)
        return ids

    def _tokenize(self, data: bytes) -> list[int]:
        ids = self._tokenizer.encode_plain(data.decode())
        return ids if b"".join(self._spelled[token_id] for token_id in ids) == data else self._split(data)

    def _split(self, data: bytes) -> list[int]:
        """The longest tokens from left to right, up to where there is none."""
        ids, at = [], 0
        while at < len(data):
            ends = [at + length for length in (*self._lengths.get(data[at : at + 2], ()), 1)]
            end = next((end for end in ends if data[at:end] in self._ids), None)
            if end is None:
                break
            ids.append(self._ids[data[at:end]])
            at = end
        return ids


class Grammar:
    """A compiled grammar of one vocabulary. Thread-safe.

    Its matchers share a lexer, whose states and errors are those of all outputs so far.

    Attributes:
        is_spent: whether a matcher met a limit or an error, so that later ones may meet it at once.
    """

    def __init__(self, vocabulary: Vocabulary, matcher: Any) -> None:
        self.vocabulary = vocabulary
        self._matcher = matcher
        self.is_spent = False

    def start(self, *, may_end: bool = True, is_beginning: bool = True) -> Matcher:
        """A matcher of a new output.

        Args:
            may_end: whether the end of sequence ends the output, so that it may be chosen.
            is_beginning: whether the output's text begins a text, and continues no target prefix.
        """
        return Matcher(self, self._matcher.deep_copy(), may_end=may_end, is_beginning=is_beginning)


class Matcher:
    """How far one output has followed its grammar.

    Attributes:
        is_complete: whether no text can follow.
        problem: why the grammar cannot be followed any further, None where it can.
    """

    def __init__(self, grammar: Grammar, inner: Any, *, may_end: bool, is_beginning: bool) -> None:
        self._grammar = grammar
        self._vocabulary = vocabulary = grammar.vocabulary
        self._inner = inner
        self._may_end = may_end
        self._is_beginning = is_beginning
        self._words = np.zeros(vocabulary.num_words, np.int32)
        self._address = self._words.ctypes.data
        self.is_complete = False
        self.problem: str | None = None

    def add(self, token_id: int) -> None:
        """Advances by a token of the output; those without text, as an end or a forced beginning, are no part of it."""
        vocabulary = self._vocabulary
        if self.problem is not None or not vocabulary.has_text[token_id]:
            return
        self._inner.consume_token(int(vocabulary.first_ids[token_id]) if self._is_beginning else token_id)
        self._is_beginning = False
        if not self._has_failed():
            self.is_complete = self._inner.is_stopped() and self._inner.is_accepting()

    def allows(self, token_id: int) -> bool:
        """Whether `mask` leaves this token, which takes a tenth of its time; False for an end and for a beginning."""
        if self._is_beginning or self.problem is not None or not self._vocabulary.has_text[token_id]:
            return False
        return self._inner.validate_tokens([token_id]) == 1 and not self._has_failed()

    def mask(self, row: Float32) -> None:
        """Masks the logits `[V] float32` of tokens that the grammar forbids, in place: all where it has a problem."""
        np.minimum(row, _find_highest(self._find_allowed(), len(row)), out=row)

    def narrow(self, row: Float32) -> tuple[Int64 | None, Float32]:
        """The few tokens that `mask` would leave, ascending, and their logits; None and all logits if not few."""
        allowed = self._find_allowed()
        if 0 < np.bitwise_count(allowed).sum() <= len(row) * _FEW:
            token_ids = np.unpackbits(allowed, bitorder="little").view(np.bool_).nonzero()[0]
            return token_ids, row[token_ids]
        highest = _find_highest(allowed, len(row))
        return None, np.minimum(row, highest, out=highest)

    def _find_allowed(self) -> UInt8:
        """A bit for each token, the lowest first: 0 for all where the grammar has a problem."""
        vocabulary, words = self._vocabulary, self._words
        self._inner.unsafe_compute_mask_ptr(self._address, words.nbytes)
        if self._has_failed():
            return np.zeros_like(vocabulary.text_mask)
        allowed = words.view(np.uint8)
        if self._is_beginning:
            bits = np.unpackbits(allowed, bitorder="little").view(np.bool_)
            allowed = np.packbits(bits[vocabulary.first_ids] & vocabulary.begins_text, bitorder="little")
        else:
            allowed = allowed[: len(vocabulary.text_mask)] & vocabulary.text_mask
        if self._may_end and self._inner.is_accepting():
            allowed |= vocabulary.eos_mask
        return allowed

    def forced(self) -> tuple[int, ...]:
        """The tokens that must follow, by the model's tokenizer; none at the beginning of a text."""
        if self._is_beginning or self.problem is not None or self.is_complete:
            return ()
        has_text = self._vocabulary.has_text
        token_ids: list[int] = self._inner.compute_ff_tokens()
        count = next((at for at, each in enumerate(token_ids) if each >= len(has_text) or not has_text[each]), None)
        return tuple(token_ids[:count])

    def fork(self) -> Matcher:
        """An independent copy."""
        copy = Matcher(self._grammar, self._inner.deep_copy(), may_end=self._may_end, is_beginning=self._is_beginning)
        copy.is_complete, copy.problem = self.is_complete, self.problem
        return copy

    def _has_failed(self) -> bool:
        if self._inner.is_error():
            error = self._inner.get_error()
            self.problem = f"cannot be followed: {shorten_error(error)}"
            # A dead end is this output's alone.
            self._grammar.is_spent |= "NoExtensionBias" not in error
        return self.problem is not None


def _find_highest(allowed: UInt8, vocab_size: int) -> Float32:
    """By token, infinity where it is allowed, else its negative."""
    return _HIGHEST.take(allowed, axis=0).reshape(-1)[:vocab_size]
