"""Ours behind gRPC in unary calls: what `onward` is slower by is the cost of streams."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.peers.onward import Onward
from benchmarks.peers.protocol import main


class OnwardUnary(Onward):
    """One unary call for each prompt."""

    def generate(self, prompts: Sequence[Sequence[int]], new: int) -> list[list[int]]:
        """All calls at once."""
        return self.translate(prompts, [new] * len(prompts), {}, len(prompts))


if __name__ == "__main__":
    main(OnwardUnary)
