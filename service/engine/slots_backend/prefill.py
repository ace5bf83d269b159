"""Prefill by the decoder graph: chunks of one slot in place, and short prompts of several slots in one run.

Tensor shapes are the chunk's or the group's own. Knows nothing of how prompts are split into chunks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from service.engine.batch import PrefillChunk, PrefillGroup
from service.engine.sessions.device_memory import Array
from service.engine.sessions.session import Binding
from service.engine.slots_backend.decoder import SlotDecoder
from service.engine.slots_backend.kv_cache import Buffers, SlotKV

Float32 = npt.NDArray[np.float32]


class ChunkPrefill:
    """Computes a chunk of a slot in place, or of each of some neighboring slots, after the tokens that they hold.

    Each range of slots has one binding, made on first use. Its logits output is rebound only when the rows change.
    """

    def __init__(self, decoder: SlotDecoder) -> None:
        self._decoder = decoder
        self._bindings: dict[tuple[int, int], Binding] = {}
        self._logits_rows: dict[tuple[int, int], slice] = {}

    def run(self, chunks: Sequence[PrefillChunk], logits_rows: slice) -> None:
        """Writes K/V to the slots, and the logits after each chunk's last `num_logits` tokens to `logits_rows`.

        Args:
            chunks: of consecutive slots, equally long.
            logits_rows: of the output, as many as there are logits.

        Raises:
            GraphError: when the run fails; the slots' K/V are undefined then.
        """
        ends = [chunk.end for chunk in chunks]
        first = chunks[0].slot
        binding = self._binding((first, len(chunks)), logits_rows)
        self._decoder.seqlens_k[first : first + len(chunks)] = [end - 1 for end in ends]
        self._decoder.total_sequence_length[...] = max(ends)
        self._decoder.bind_tokens(binding, **_tokens(chunks))
        binding.run()

    def _binding(self, slots: tuple[int, int], logits_rows: slice) -> Binding:
        if slots not in self._bindings:
            first, count = slots
            self._bindings[slots] = self._decoder.bind(slice(first, first + count), logits_rows)
        elif self._logits_rows[slots] != logits_rows:
            self._decoder.bind_logits(self._bindings[slots], logits_rows)
        self._logits_rows[slots] = logits_rows
        return self._bindings[slots]


@dataclass(frozen=True, slots=True)
class _GroupRun:
    """A binding for one number of rows and one padded length, with its arrays."""

    binding: Binding
    input_ids: Array
    logits_indices: Array
    logits: Float32
    own: Buffers


class GroupPrefill:
    """Computes short first chunks of several slots in one run.

    The run has K/V of its own, as wide as the padded length, so that padding never reaches the slots. Padding tokens
    follow the real ones: attention is causal, and their results are ignored.

    `logits` is the output `[rows, V]`, whose rows behind the slots' are scratch here; `max_tokens` of a group count its
    padding.
    """

    def __init__(self, decoder: SlotDecoder, kv: SlotKV, logits: Float32, max_tokens: int) -> None:
        self._decoder = decoder
        self._kv = kv
        self._logits = logits
        _, self._num_heads, _, self._head_dim = kv.own[0].shape
        shape = (len(kv.own), max_tokens * self._num_heads * self._head_dim)
        self._own: Buffers = np.zeros(shape, kv.own[0].dtype)
        self._runs: dict[tuple[int, int], _GroupRun] = {}

    def run(self, group: PrefillGroup) -> None:
        """Writes K/V to the slots, and the logits after each row's last token to the slot's row.

        Raises:
            GraphError: when the run fails; the slots' K/V are unchanged then.
        """
        lengths = [len(row.token_ids) for row in group.rows]
        slots = [row.slot for row in group.rows]
        key = (len(slots), group.padded_length)
        if key not in self._runs:
            self._runs[key] = self._bind(*key)
        run = self._runs[key]
        run.input_ids[:] = 0
        for ids, row in zip(run.input_ids, group.rows, strict=True):
            ids[: len(row.token_ids)] = row.token_ids
        run.logits_indices[:] = [index * group.padded_length + length - 1 for index, length in enumerate(lengths)]
        run.binding.run()
        self._logits[slots] = run.logits
        self._kv.write_own(slots, lengths, run.own)

    def _bind(self, num_rows: int, padded_length: int) -> _GroupRun:
        shape = (num_rows, self._num_heads, padded_length, self._head_dim)
        own = self._own[:, : math.prod(shape)].reshape(-1, *shape)
        input_ids = np.zeros((num_rows, padded_length), np.int64)
        logits_indices = np.zeros(num_rows, np.int64)
        logits = self._logits[self._kv.num_slots :][:num_rows]
        binding = self._decoder.bind_apart(tuple(own), padded_length, logits)
        positions = np.tile(np.arange(padded_length), (num_rows, 1))
        self._decoder.bind_tokens(binding, input_ids, positions, logits_indices)
        return _GroupRun(binding, input_ids, logits_indices, logits, own)


def _tokens(chunks: Sequence[PrefillChunk]) -> dict[str, Array]:
    """The graph's token inputs: ids, positions, and the indices whose logits are wanted."""
    length = len(chunks[0].token_ids)
    input_ids = np.zeros((len(chunks), length), np.int64)
    position_ids = np.zeros_like(input_ids)
    logits_indices: list[int] = []
    for row, chunk in enumerate(chunks):
        input_ids[row] = chunk.token_ids
        position_ids[row] = range(chunk.start, chunk.end)
        end = (row + 1) * length
        logits_indices += range(end - chunk.num_logits, end)
    return {
        "input_ids": input_ids,
        "position_ids": position_ids,
        "logits_indices": np.array(logits_indices, np.int64),
    }
