"""The three kinds of attention in one picture: of a lesson's model, or of a served one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lessons.frame import Page


def three_kinds(
    page: Page,
    cross: Any,
    encoder: Any,
    decoder: Any,
    source: Sequence[str],
    target: Sequence[str],
    written: Sequence[str] | None = None,
) -> None:
    """Cross-attention, the encoder's self-attention and the decoder's causal triangle, each `[queries, keys]`.

    `source` and `target` are tokens; `written` labels the rows of cross-attention if they are not `target`'s.
    """
    page.heat("cross-attention", written or target, source, cross)
    page.heat("encoder", source, source, encoder)
    page.heat("decoder, causal", target, target, decoder)
