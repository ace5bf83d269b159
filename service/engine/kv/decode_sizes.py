"""In which sizes steps of single tokens run on a device, which records each of them once and for all.

Rows and lengths are rounded up to powers of two, so that there are few. Knows numbers only.
"""

from __future__ import annotations

SHORTEST = 512
"""Up to here rows are of one class: the operator gains nothing by dividing the work on so few keys."""


def round_up(number: int, least: int) -> int:
    """The next power of two, `least` at the least."""
    return max(least, 1 << (number - 1).bit_length())


def decode_size(num_rows: int, length: int) -> tuple[int, int]:
    """The size in which so many rows run, of which the longest comes to `length` tokens: rows and tokens at most."""
    return round_up(num_rows, 1), round_up(length, SHORTEST)


def decode_sizes(max_rows: int, context: int) -> tuple[tuple[int, int], ...]:
    """All sizes that `decode_size` gives for up to `max_rows` rows within a context, the largest first."""
    most_rows, most_tokens = decode_size(max_rows, context)
    rows = [1 << power for power in range(most_rows.bit_length())]
    lengths = [length for length in (1 << power for power in range(most_tokens.bit_length())) if length >= SHORTEST]
    return tuple((num_rows, length) for length in reversed(lengths) for num_rows in reversed(rows))
