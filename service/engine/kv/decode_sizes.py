"""Sizes of decode steps on a device, each recorded as a CUDA graph: rows and lengths in powers of two."""

from __future__ import annotations

SHORTEST = 512
"""The smallest length class: splitting attention over fewer keys gains nothing."""


def round_up(number: int, least: int) -> int:
    """The next power of two, at least `least`."""
    return max(least, 1 << (number - 1).bit_length())


def decode_size(num_rows: int, length: int) -> tuple[int, int]:
    """Rows and longest length of a step, rounded up."""
    return round_up(num_rows, 1), round_up(length, SHORTEST)


def decode_sizes(max_rows: int, context: int) -> tuple[tuple[int, int], ...]:
    """All sizes of `decode_size` for up to `max_rows` rows within a context, largest first."""
    most_rows, most_tokens = decode_size(max_rows, context)
    rows = [1 << power for power in range(most_rows.bit_length())]
    lengths = [length for length in (1 << power for power in range(most_tokens.bit_length())) if length >= SHORTEST]
    return tuple((num_rows, length) for length in reversed(lengths) for num_rows in reversed(rows))
