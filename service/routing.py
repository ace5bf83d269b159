"""Which requests belong on the same replica: those whose prompts begin alike, as one that computed it keeps the K/V.

A balancer that knows the metadata `onward-routing-key` (`deploy/envoy`) sends equal keys to the same replica as long as
that is there and not busier than the others. Any text is a good key that requests share exactly when their prompts
share a beginning: a conversation's id, the name of a system prompt, or what `routing_key` makes of the prompt itself.
Servers ignore it. Knows nothing of gRPC.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

ROUTING_KEY = "onward-routing-key"
"""The metadata's name."""
PREFIX_TOKENS = 128
"""As many as the server computes, and keeps, in one piece: what is shorter is never found again."""
PREFIX_CHARACTERS = 512
"""About as much, in text: a token of English is some four characters."""
_DIGEST_BYTES = 8


def routing_key(prompt: str | Sequence[int], length: int | None = None) -> str:
    """A key that prompts share when they begin alike: 16 hexadecimal digits.

    Args:
        prompt: text or token ids; the two have different keys, even where they mean the same.
        length: how much of its beginning counts, in characters or tokens; `PREFIX_CHARACTERS` or `PREFIX_TOKENS` unless
            given. Shared beginnings that are shorter are not recognised, those of different prompts that agree for so
            long are taken for one.

    Raises:
        ValueError: when `length` is below 1.
    """
    if length is None:
        length = PREFIX_CHARACTERS if isinstance(prompt, str) else PREFIX_TOKENS
    if length < 1:
        raise ValueError(f"length: must be at least 1, got {length}")
    beginning = prompt[:length]
    data = beginning.encode() if isinstance(beginning, str) else b",".join(b"%d" % token for token in beginning)
    kind = b"text:" if isinstance(prompt, str) else b"ids:"
    return hashlib.blake2b(kind + data, digest_size=_DIGEST_BYTES).hexdigest()
