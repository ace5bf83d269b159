"""Reference-counted blocks of a pool, in plain ints. Knows no holders, tokens or tensors."""

from __future__ import annotations

from collections.abc import Iterable

from service.errors import OnwardError

SCRATCH = 0
"""The scratch block: padding is written there, and empty table entries point there. Never read."""


class PoolExhausted(OnwardError):
    """No block is free: more was admitted than fits."""


class BlockPool:
    """Blocks `1 … num_blocks`; block 0 is `SCRATCH`.

    Raises:
        ValueError: when there are none.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks is {num_blocks}, must be at least 1")
        self._num_holders = [0] * (num_blocks + 1)
        # Last in, first out: the memory of a released block is touched already.
        self._free = list(range(num_blocks, 0, -1))

    @property
    def num_blocks(self) -> int:
        """Blocks in all."""
        return len(self._num_holders) - 1

    @property
    def num_free(self) -> int:
        """Free blocks."""
        return len(self._free)

    def take(self) -> int:
        """Allocates a block with one holder.

        Raises:
            PoolExhausted: when none is free.
        """
        if not self._free:
            raise PoolExhausted(f"all {self.num_blocks} blocks of K/V are held")
        block = self._free.pop()
        self._num_holders[block] = 1
        return block

    def share(self, block: int) -> None:
        """Adds a holder to a block.

        Raises:
            ValueError: when the block is free.
        """
        self._check_held(block)
        self._num_holders[block] += 1

    def release(self, block: int) -> bool:
        """Removes a holder from a block; returns whether it was the last.

        Raises:
            ValueError: when the block is free.
        """
        self._check_held(block)
        self._num_holders[block] -= 1
        if self._num_holders[block]:
            return False
        self._free.append(block)
        return True

    def is_shared(self, block: int) -> bool:
        """Whether a block has several holders."""
        return self._num_holders[block] > 1

    def check_invariants(self, held: Iterable[int]) -> None:
        """Asserts that each block has as many holders as it occurs in `held`, and that all others are free."""
        counts = [0] * len(self._num_holders)
        for block in held:
            counts[block] += 1
        if counts[SCRATCH]:
            raise AssertionError("the scratch block is held")
        wrong = [block for block, count in enumerate(counts) if count != self._num_holders[block]]
        if wrong:
            counted = [self._num_holders[block] for block in wrong]
            raise AssertionError(f"blocks {wrong} are counted as held {counted} times")
        free = [block for block, count in enumerate(counts) if not count and block != SCRATCH]
        if sorted(self._free) != free:
            raise AssertionError(f"{len(self._free)} blocks are listed as free, {len(free)} are")

    def _check_held(self, block: int) -> None:
        if not self._num_holders[block]:
            raise ValueError(f"block {block} is free")
