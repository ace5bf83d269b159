"""A scheduled batch in, logits out: the graphs of an artifact, run over slots.

`Runner` is all that the engine asks for; `OrtRunner` does it with ONNX Runtime on the CPU. Every tensor is allocated
once: inputs are written through NumPy views, K/V is read and written in place, logits land in the row of their slot.
Knows nothing of requests, of sampling, or of why a batch looks as it does; token ids are checked long before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from model.spec.config import ModelConfig
from service.engine.batch import DecodeRow, EncodeGroup, ScheduledBatch
from service.engine.sessions.session import Binding, GraphSession
from service.engine.slots_backend.decoder import SlotDecoder
from service.engine.slots_backend.kv_cache import SlotKV
from service.engine.slots_backend.prefill import ChunkPrefill, GroupPrefill

Float32 = npt.NDArray[np.float32]


class Runner(Protocol):
    """Computes batches, one after another, each on the K/V that those before it left."""

    def run(self, batch: ScheduledBatch) -> Float32:
        """Runs one step.

        Returns:
            `[slots + R, V] float32`, row `slot` being the logits after the last token that the batch feeds to that
            slot, the R rows behind them what chunks want besides (`PrefillChunk.num_scored`). Rows that were not fed
            are undefined; the array is overwritten by the next call.

        Raises:
            Exception: when the step fails; the K/V of every slot is in doubt then.
        """

    def own_weights(self) -> None:
        """Makes all graphs independent of their files; called when all of them have run.

        Raises:
            StartupError: when the files have changed since the graphs were loaded.
        """


class OrtRunner:
    """Runs the CPU graphs of one artifact.

    Args:
        config: the model's sizes.
        kv: the cache that this runner alone changes.
        decoder: the decoder graph (`model.spec.artifact.decoder_signature`).
        encoder: the encoder graph of an encoder-decoder, None for a decoder-only model.
        max_prefill_tokens: how many tokens of prompts a batch has at most, padding included. Room for the logits and
            the K/V of all of them is reserved, and like that of slots touched only as it is used.
    """

    def __init__(
        self,
        config: ModelConfig,
        kv: SlotKV,
        decoder: GraphSession,
        encoder: GraphSession | None,
        max_prefill_tokens: int = 0,
    ) -> None:
        self.kv = kv
        self._encoder = encoder
        self._sessions = [session for session in (decoder, encoder) if session is not None]
        slots = kv.num_slots
        num_logits = slots + max_prefill_tokens
        self._logits = np.zeros((num_logits, config.vocab_size), np.float32)
        self._decoder = SlotDecoder(config, kv, decoder, self._logits)
        self._input_ids = np.zeros((slots, 1), np.int64)
        self._position_ids = np.zeros((slots, 1), np.int64)
        self._logits_indices = np.arange(slots, dtype=np.int64)
        self._decode_bindings: dict[int, Binding] = {}
        self._group_prefill = GroupPrefill(self._decoder, kv, self._logits, max_prefill_tokens)
        self._chunk_prefill = ChunkPrefill(self._decoder)

    def own_weights(self) -> None:
        """See `Runner.own_weights`."""
        for session in self._sessions:
            session.own_weights()

    def run(self, batch: ScheduledBatch) -> Float32:
        """Runs one step; see `Runner.run`."""
        for operation in batch.kv_operations:
            self.kv.apply(operation)
        for group in batch.encodes:
            self._encode(group)
        if batch.decode:
            self._decode(batch.decode)
        for prompts in batch.prefill_groups:
            self._group_prefill.run(prompts)
        next_logits = self.kv.num_slots
        for chunk in batch.chunks:
            if chunk.num_scored:
                rows = slice(next_logits, next_logits + chunk.num_scored)
                self._chunk_prefill.run(chunk, rows)
                next_logits = rows.stop
                if chunk.wants_logits:
                    self._logits[chunk.slot] = self._logits[next_logits - 1]
            else:
                self._chunk_prefill.run(chunk, slice(chunk.slot, chunk.slot + chunk.num_logits))
        return self._logits

    def _encode(self, group: EncodeGroup) -> None:
        if self._encoder is None:
            raise ValueError("a decoder-only model encodes nothing")
        source_ids = np.zeros((len(group.rows), group.padded_length), np.int64)
        for ids, row in zip(source_ids, group.rows, strict=True):
            ids[: len(row.token_ids)] = row.token_ids
        source_lengths = np.array([len(row.token_ids) for row in group.rows], np.int32)
        tensors = self._encoder.run({"source_ids": source_ids, "source_lengths": source_lengths})
        self.kv.write_cross([row.slots for row in group.rows], tensors)

    def _decode(self, rows: Sequence[DecodeRow]) -> None:
        """One token for each of the slots `0 … n-1`."""
        num_rows = len(rows)
        positions = [row.position for row in rows]
        self._input_ids[:num_rows, 0] = [row.token_id for row in rows]
        self._position_ids[:num_rows, 0] = positions
        self._decoder.seqlens_k[:num_rows] = positions
        self._decoder.total_sequence_length[...] = max(positions) + 1
        self._decoder.source_lengths[:num_rows] = [row.source_length for row in rows]
        if num_rows not in self._decode_bindings:
            binding = self._decode_bindings[num_rows] = self._decoder.bind(slice(num_rows), slice(num_rows))
            self._decoder.bind_tokens(
                binding, self._input_ids[:num_rows], self._position_ids[:num_rows], self._logits_indices[:num_rows]
            )
        self._decode_bindings[num_rows].run()
