"""The claims of the scaling study: the power of the length with which each series grows, and what reports call it."""

from __future__ import annotations

from dataclasses import dataclass

from loadtest.scaling.fit import TOLERANCE

ENOUGH_REACH = 5.0
"""The longest length must be this many times n*: there the quadratic term is 5/6 of the time."""
CACHE_TOLERANCE = 0.20
"""The tolerance of a cached token: a step of a fraction of a millisecond scatters more than a prompt."""


@dataclass(frozen=True, slots=True)
class Claim:
    """One claim: a series grows with the length to the power of `degree`.

    `name` is its row in a table, `words` the claim in words. `reach` and `tolerance` are those of `fit.examine`. With
    `by_regime` the leading coefficient may change where keys and values outgrow one of the processor's caches.
    """

    series: str
    degree: int
    name: str
    words: str
    reach: float = 0.0
    by_regime: bool = False
    tolerance: float = TOLERANCE


CLAIMS = (
    Claim(
        "prefill",
        2,
        "prefill, whole prompt",
        "prefill of a whole prompt is quadratic in its length",
        reach=ENOUGH_REACH,
        by_regime=True,
    ),
    Claim(
        "prefill_chunked",
        2,
        "prefill, in chunks",
        "prefill in chunks is quadratic in the prompt's length",
        by_regime=True,
    ),
    Claim(
        "no_cache",
        2,
        "a token without the cache",
        "a token without the cache is quadratic in its context",
        by_regime=True,
    ),
    Claim("encoder", 2, "encoding a source", "encoding is quadratic in the source's length"),
    Claim(
        "decode",
        1,
        "a token with the cache",
        "a token with the cache is linear in its context",
        by_regime=True,
        tolerance=CACHE_TOLERANCE,
    ),
    Claim(
        "cross_attention",
        1,
        "a token's cross-attention",
        "a token's cross-attention is linear in the source's length",
        by_regime=True,
        tolerance=CACHE_TOLERANCE,
    ),
)
"""The claims that decide."""

WITNESSES = (
    Claim(
        "end_to_end",
        2,
        "first token, by a plain client",
        "a first token is quadratic in the prompt's length",
        by_regime=True,
    ),
    Claim(
        "locust",
        2,
        "first token, by Locust's user",
        "a first token is quadratic in the prompt's length",
        by_regime=True,
    ),
)
"""Reported, but not decisive: the clients' times include the server's, so they are not independent of it."""

BASELINES = (
    Claim("gru", 1, "recurrent model, in chunks", "a recurrent model that reads in chunks is linear"),
    Claim("gru_whole", 1, "recurrent model, whole text", "a recurrent model that reads a text in one run is linear"),
)
"""Linear baselines: the same procedure must refuse the claim that they are quadratic."""
