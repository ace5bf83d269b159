"""The fake runner over a paged cache: what it remembers of its rows must be what their blocks hold, at every step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from model.spec.config import Architecture, ModelConfig, Positions
from service.engine.batch import KVOperation, ScheduledBatch
from service.engine.kv.reservations import KVBudget
from service.engine.paged_backend.paged_kv import HostBlocks, PagedKV
from tests.fakes import FakeRunner, Float32

# Each place holds the one number that says which token is there.
_ONE_NUMBER = ModelConfig(
    architecture=Architecture.DECODER_ONLY,
    vocab_size=8,
    context=64,
    d_model=1,
    num_layers=1,
    num_heads=1,
    d_ff=1,
    positions=Positions.LEARNED,
)


class SpoiledBlocks(HostBlocks):
    """Blocks that are overwritten when they are freed."""

    def release(self, block: int) -> None:
        for blocks in self.caches:
            blocks[block] = np.float32(-1.0)


class PagedFakeRunner(FakeRunner):
    """A `FakeRunner` whose tokens are in blocks besides, as K/V would be: as many as the budget has room for.

    Whoever reads a block that is not its own any more, or writes to one that others hold, finds other tokens there than
    it should.
    """

    def __init__(
        self, budget: KVBudget, num_slots: int, before_run: Callable[[ScheduledBatch], None] | None = None
    ) -> None:
        super().__init__(num_slots, before_run=before_run)
        num_blocks = budget.num_bytes // (budget.page_tokens * budget.token_bytes)
        self._memory = SpoiledBlocks(_ONE_NUMBER, num_blocks, budget.page_tokens)
        self.kv = PagedKV(self._memory, num_slots)

    def run(self, batch: ScheduledBatch) -> Float32:
        """See `FakeRunner.run`; afterwards every row is read back."""
        logits = super().run(batch)
        self.kv.check_invariants()
        for slot, tokens in enumerate(self._tokens):
            assert self._read_blocks(self.kv.table(slot, len(tokens)), len(tokens)) == tokens, f"slot {slot}"
        return logits

    def _apply(self, operation: KVOperation) -> None:
        super()._apply(operation)
        self.kv.apply(operation)

    def _encode(self, slots: tuple[int, ...], token_ids: tuple[int, ...], padded_length: int) -> None:
        super()._encode(slots, token_ids, padded_length)
        self._write_blocks(self.kv.reserve_source(slots, len(token_ids)), token_ids)

    def _feed(self, slot: int, start: int, token_ids: tuple[int, ...], source_length: int) -> None:
        stop = start + len(token_ids)
        self.kv.reserve(slot, start, stop)
        self._write_blocks(self.kv.places(slot, start, stop), token_ids)
        source = self._read_blocks(self.kv.source_table(slot, source_length), source_length)
        assert source == list(self._sources[slot][:source_length])
        super()._feed(slot, start, token_ids, source_length)

    def _write_blocks(self, places: npt.NDArray[np.int32], token_ids: Sequence[int]) -> None:
        for blocks in self._memory.caches:
            blocks.reshape(-1)[places] = token_ids

    def _read_blocks(self, table: Sequence[int], length: int) -> list[int]:
        keys, values = (blocks[list(table)].reshape(-1)[:length].tolist() for blocks in self._memory.caches)
        assert keys == values
        return [int(token) for token in keys]
