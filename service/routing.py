"""Routing keys: requests whose prompts begin alike go to the replica that has their prefix cached.

A balancer that reads the metadata `onward-routing-key` (`deploy/envoy`) sends equal keys to the same replica, unless it
is gone or busier than the others. A good key is any text that requests share exactly when their prompts share a
beginning: a conversation's id, the name of a system prompt, or `routing_key` of the prompt. Servers ignore it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

ROUTING_KEY = "onward-routing-key"
"""The metadata's name."""
PREFIX_TOKENS = 128
"""The default chunk of prefill, and so of the prefix cache: a shorter prefix is never a cache hit."""
PREFIX_CHARACTERS = 512
"""About as much text: an English token has some four characters."""
_DIGEST_BYTES = 8


def routing_key(prompt: str | Sequence[int], length: int | None = None) -> str:
    """A key that prompts share when they begin alike: 16 hexadecimal digits.

    Args:
        prompt: text or token ids, whose keys differ even for the same text.
        length: characters or tokens that count; `PREFIX_CHARACTERS` or `PREFIX_TOKENS` by default. Shorter shared
            beginnings get different keys; different prompts that agree for so long get the same.

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
