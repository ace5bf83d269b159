"""Seeded prompts of random tokens, with a distribution of lengths and an optional shared prefix.

Request k is a function of the seed and of k alone, independent of the sending process and of the order.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import numpy as np

FIRST_TOKEN_ID = 4
"""This project's tokenizers use lower ids for control tokens; random prompts contain none."""
_SEED_MASK = (1 << 64) - 1


Lengths: TypeAlias = Callable[[np.random.Generator, float], int]
"""Draws a length, at least 1. The number, from 0 to 1, selects a file's line; a request's lengths share it."""


def parse_lengths(text: str, name: str, column: int = 0) -> Lengths:
    """Parses `128`, `uniform:16:512`, `geometric:256` or `file:PATH`.

    Args:
        text: the notation.
        name: the option in error messages, as in "--prompt-tokens".
        column: the number to take from each line of a file; the last one if the line has fewer.

    Raises:
        ValueError: naming the text and what is wrong with it.
        OSError: when the file cannot be read.
    """
    kind, _, rest = text.partition(":")
    try:
        if not rest:
            tokens = _at_least_one(kind)
            return lambda _, __: tokens
        if kind == "uniform":
            least, most = (_at_least_one(each) for each in rest.split(":"))
            if most < least:
                raise ValueError(f"{most} is below {least}")
            return lambda source, _: int(source.integers(least, most, endpoint=True))
        if kind == "geometric":
            mean = float(rest)
            if not (math.isfinite(mean) and mean >= 1.0):
                raise ValueError(f"a mean of {rest} is below 1")
            return lambda source, _: int(source.geometric(1.0 / mean))
        if kind == "file":
            seen = _read_lengths(Path(rest), column)
            return lambda _, row: seen[min(int(row * len(seen)), len(seen) - 1)]
    except ValueError as error:
        raise ValueError(f"{name}: {text!r}: {error}") from None
    raise ValueError(f"{name}: {text!r} is none of N, uniform:LEAST:MOST, geometric:MEAN, file:PATH")


def _at_least_one(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError(f"{value} is below 1")
    return value


def _read_lengths(path: Path, column: int) -> tuple[int, ...]:
    lengths = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if words := line.partition("#")[0].split():
            try:
                lengths.append(_at_least_one(words[min(column, len(words) - 1)]))
            except ValueError as error:
                raise ValueError(f"{path}:{number}: {error}") from None
    if not lengths:
        raise ValueError(f"{path}: no lengths in it")
    return tuple(lengths)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request, independent of the protocol."""

    token_ids: tuple[int, ...]
    max_tokens: int
    patience_seconds: float | None = None
    """The client cancels after this time; None never."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests by number.

    Args:
        prompt_tokens: distribution of the prompts' lengths, shared prefix included.
        max_tokens: distribution of the answers' lengths.
        vocab_size: token ids are below this,
        first_token_id: and not below this.
        prefix_tokens: length of the shared prefix. A prompt has at least one token of its own, so a short prompt
            shares less.
        prefix_share: the share of prompts with the prefix, from 0 to 1.
        cancel_share: the share of requests that the client cancels, from 0 to 1.
        cancel_after_seconds: when it cancels them.
        seed: equal seeds give equal requests.
        stream: the seed's stream of requests, from 0; different streams have different prompts.

    Raises:
        ValueError: naming every field that does not fit.
    """

    prompt_tokens: Lengths
    max_tokens: Lengths
    vocab_size: int
    first_token_id: int = FIRST_TOKEN_ID
    prefix_tokens: int = 0
    prefix_share: float = 1.0
    cancel_share: float = 0.0
    cancel_after_seconds: float = 1.0
    seed: int = 0
    stream: int = 0
    _prefix: tuple[int, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        problems = []
        if not 0 <= self.first_token_id < self.vocab_size:
            problems.append(f"vocab_size: {self.vocab_size} leaves no id from {self.first_token_id} on")
        if self.prefix_tokens < 0:
            problems.append(f"prefix_tokens: {self.prefix_tokens} is below 0")
        problems += [
            f"{name}: {share} is not from 0 to 1"
            for name, share in (("prefix_share", self.prefix_share), ("cancel_share", self.cancel_share))
            if not 0.0 <= share <= 1.0
        ]
        if not self.cancel_after_seconds > 0.0:
            problems.append(f"cancel_after_seconds: {self.cancel_after_seconds} is not above 0")
        if problems:
            raise ValueError("; ".join(problems))
        # Number 0 is the prefix: requests start at 1.
        object.__setattr__(self, "_prefix", self._tokens(self._source(0), self.prefix_tokens))

    def _source(self, number: int) -> np.random.Generator:
        return np.random.default_rng([self.seed & _SEED_MASK, self.stream, number])

    def _tokens(self, source: np.random.Generator, count: int) -> tuple[int, ...]:
        return tuple(source.integers(self.first_token_id, self.vocab_size, count).tolist())

    def prompt(self, number: int, prompt_tokens: int | None = None) -> Prompt:
        """Request `number`, from 0; `prompt_tokens` overrides the drawn length."""
        source = self._source(number + 1)
        row, shares, cancels = source.random(3).tolist()
        length = self.prompt_tokens(source, row)
        max_tokens = self.max_tokens(source, row)
        length = length if prompt_tokens is None else prompt_tokens
        prefix = self._prefix[: length - 1] if shares < self.prefix_share else ()
        return Prompt(
            token_ids=prefix + self._tokens(source, length - len(prefix)),
            max_tokens=max_tokens,
            patience_seconds=self.cancel_after_seconds if cancels < self.cancel_share else None,
        )
