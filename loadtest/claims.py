"""The laws that the scaling study is about: which series grow with which power of the length, and what to call them.

Nothing is measured or judged here: `loadtest.study` takes the series, `loadtest.scaling` judges them by these.
"""

from __future__ import annotations

from dataclasses import dataclass

from loadtest.fit import TOLERANCE

ENOUGH_REACH = 5.0
"""To how many times n* the lengths must go for the law to be seen, not guessed: there the square is 5/6 of the time."""
CACHE_TOLERANCE = 0.20
"""Where keys and values leave the processor's caches on the way to the longest length: memory is slower than they are,
and bends what would be straight."""


@dataclass(frozen=True, slots=True)
class Claim:
    """One law.

    Args:
        series: the samples it is about.
        degree: the power of the length that they grow with.
        name: what a table calls them.
        words: the claim.
        tolerance: see `loadtest.fit.TOLERANCE`.
        reach: to how many crossovers (n* where the degree is 2) the lengths must go; 0 where wherever they go will do.
    """

    series: str
    degree: int
    name: str
    words: str
    tolerance: float = TOLERANCE
    reach: float = 0.0


CLAIMS = (
    Claim(
        "prefill",
        2,
        "prefill, whole prompt",
        "prefill of a whole prompt is quadratic in its length",
        reach=ENOUGH_REACH,
    ),
    Claim("prefill_chunked", 2, "prefill, in chunks", "prefill in chunks is quadratic in the prompt's length"),
    Claim("no_cache", 2, "a token without the cache", "a token without the cache is quadratic in its context"),
    Claim("encoder", 2, "encoding a source", "encoding is quadratic in the source's length"),
    Claim("decode", 1, "a token with the cache", "a token with the cache is linear in its context", CACHE_TOLERANCE),
    Claim(
        "cross_attention",
        1,
        "a token's cross-attention",
        "a token's cross-attention is linear in the source's length",
        CACHE_TOLERANCE,
    ),
)
"""What decides."""

WITNESSES = (
    Claim("end_to_end", 2, "first token, by a plain client", "a first token is quadratic in the prompt's length"),
    Claim("locust", 2, "first token, by Locust's user", "a first token is quadratic in the prompt's length"),
)
"""What clients see: it confirms, and is no second witness, for the server's time is in it."""

BASELINES = (
    Claim("gru", 1, "recurrent model, in chunks", "a recurrent model that reads in chunks is linear"),
    Claim("gru_whole", 1, "recurrent model, whole text", "a recurrent model that reads a text in one run is linear"),
)
"""What must not be quadratic: the claim that they are is put to the same judge."""
