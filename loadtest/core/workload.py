"""What is asked: seeded requests of random tokens, whose lengths follow a law and whose beginnings may be shared.

Request k is a function of the seed and of k alone: whoever sends it, in whatever order, sends the same. Knows no server
and no wire.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np

FIRST_TOKEN_ID = 4
"""Ids below are control tokens by this project's tokenizers; random prompts have none."""
_SEED_MASK = (1 << 64) - 1


class Lengths(Protocol):
    """A law of lengths."""

    def draw(self, source: np.random.Generator, row: float) -> int:
        """A length, at least 1. `row`, from 0 to 1, is drawn once a request, so that laws from files agree on it."""
        ...


@dataclass(frozen=True, slots=True)
class Fixed:
    """Always the same."""

    tokens: int

    def draw(self, source: np.random.Generator, row: float) -> int:  # noqa: ARG002 (nothing to draw)
        """The length."""
        return self.tokens


@dataclass(frozen=True, slots=True)
class Uniform:
    """Every length from least to most alike."""

    least: int
    most: int

    def draw(self, source: np.random.Generator, row: float) -> int:  # noqa: ARG002
        """A length from `least` to `most`, both included."""
        return int(source.integers(self.least, self.most, endpoint=True))


@dataclass(frozen=True, slots=True)
class Geometric:
    """Ends after every token with the same probability: many short, a long tail. At least 1, in the mean `mean`."""

    mean: float

    def draw(self, source: np.random.Generator, row: float) -> int:  # noqa: ARG002
        """A length."""
        return int(source.geometric(1.0 / self.mean))


@dataclass(frozen=True, slots=True)
class Empirical:
    """Lengths that were seen: each request takes one of them by its row."""

    tokens: tuple[int, ...]

    def draw(self, source: np.random.Generator, row: float) -> int:  # noqa: ARG002
        """The length at the request's row."""
        return self.tokens[min(int(row * len(self.tokens)), len(self.tokens) - 1)]


def parse_lengths(text: str, name: str, column: int = 0) -> Lengths:
    """A law from its notation: `128`, `uniform:16:512`, `geometric:256` or `file:PATH`.

    Args:
        text: the notation.
        name: what to call it in errors, as in "--prompt-tokens".
        column: of a file's lines, the number to take; a line with too few has it from its last.

    Raises:
        ValueError: naming the text and what is wrong with it.
        OSError: when the file cannot be read.
    """
    kind, _, rest = text.partition(":")
    try:
        if not rest:
            return Fixed(_at_least_one(kind))
        if kind == "uniform":
            least, most = (_at_least_one(each) for each in rest.split(":"))
            if most < least:
                raise ValueError(f"{most} is below {least}")
            return Uniform(least, most)
        if kind == "geometric":
            mean = float(rest)
            if not (math.isfinite(mean) and mean >= 1.0):
                raise ValueError(f"a mean of {rest} is below 1")
            return Geometric(mean)
        if kind == "file":
            return Empirical(_read_lengths(Path(rest), column))
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
    """One request, before any wire: what is asked, how much may be answered, and how long the client waits for it."""

    token_ids: tuple[int, ...]
    max_tokens: int
    patience_seconds: float | None = None
    """After so long the client gives up; None waits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests by number.

    Args:
        prompt_tokens: the law of the prompts' lengths, the shared beginning included.
        max_tokens: the law of the answers' lengths.
        vocab_size: token ids are below it.
        first_token_id: and not below this.
        prefix_tokens: length of the one beginning that prompts may share. A prompt always has at least one token of
            its own, so a shorter one shares less.
        prefix_share: the share of prompts that have it, from 0 to 1.
        cancel_share: the share of requests whose client gives up, from 0 to 1.
        cancel_after_seconds: when it does.
        seed: same seed, same requests.
        stream: which of the seed's streams of requests, from 0: no two have a prompt in common.

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
        # Requests are numbered from 1 here: 0 is the prefix.
        object.__setattr__(self, "_prefix", self._tokens(self._source(0), self.prefix_tokens))

    def _source(self, number: int) -> np.random.Generator:
        return np.random.default_rng([self.seed & _SEED_MASK, self.stream, number])

    def _tokens(self, source: np.random.Generator, count: int) -> tuple[int, ...]:
        return tuple(source.integers(self.first_token_id, self.vocab_size, count).tolist())

    def prompt(self, number: int, prompt_tokens: int | None = None) -> Prompt:
        """Request `number`, from 0; `prompt_tokens` takes the place of the drawn length."""
        source = self._source(number + 1)
        row, shares, gives_up = source.random(3).tolist()
        length = self.prompt_tokens.draw(source, row)
        max_tokens = self.max_tokens.draw(source, row)
        length = length if prompt_tokens is None else prompt_tokens
        prefix = self._prefix[: length - 1] if shares < self.prefix_share else ()
        return Prompt(
            token_ids=prefix + self._tokens(source, length - len(prefix)),
            max_tokens=max_tokens,
            patience_seconds=self.cancel_after_seconds if gives_up < self.cancel_share else None,
        )
