"""Which block of a pool is held, and by how many; in plain ints.

A block is given out to one holder, shared with others, and free again once the last has let it go. Knows nothing of who
holds a block, of tokens or of tensors.
"""

from __future__ import annotations

from collections.abc import Iterable

from service.errors import OnwardError

SCRATCH = 0
"""The block that is nobody's: what is written there is never read, and tables point there where they are empty."""


class PoolExhausted(OnwardError):
    """A block was wanted and none is free: more was admitted than there is room for."""


class BlockPool:
    """Blocks `1 … num_blocks`; block 0 is `SCRATCH`.

    Args:
        num_blocks: how many there are to give out.

    Raises:
        ValueError: when there are none.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks is {num_blocks}, must be at least 1")
        self._num_holders = [0] * (num_blocks + 1)
        # The last one let go is the first to be given out: its memory is there already.
        self._free = list(range(num_blocks, 0, -1))

    @property
    def num_blocks(self) -> int:
        """How many there are in all."""
        return len(self._num_holders) - 1

    @property
    def num_free(self) -> int:
        """How many nobody holds."""
        return len(self._free)

    def take(self) -> int:
        """Gives out a free block.

        Raises:
            PoolExhausted: when there is none.
        """
        if not self._free:
            raise PoolExhausted(f"all {self.num_blocks} blocks of K/V are held")
        block = self._free.pop()
        self._num_holders[block] = 1
        return block

    def share(self, block: int) -> None:
        """Adds a holder to a block.

        Raises:
            ValueError: when nobody holds it.
        """
        self._check_held(block)
        self._num_holders[block] += 1

    def release(self, block: int) -> bool:
        """Takes a holder from a block; whether that was the last.

        Raises:
            ValueError: when nobody holds it.
        """
        self._check_held(block)
        self._num_holders[block] -= 1
        if self._num_holders[block]:
            return False
        self._free.append(block)
        return True

    def is_shared(self, block: int) -> bool:
        """Whether more than one holds a block."""
        return self._num_holders[block] > 1

    def check_invariants(self, held: Iterable[int]) -> None:
        """Asserts that blocks are held exactly as often as they occur in `held`, and all others are free once.

        Raises:
            AssertionError: saying what broke.
        """
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
            raise ValueError(f"nobody holds block {block}")
