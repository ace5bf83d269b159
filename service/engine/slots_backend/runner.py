"""The runner over slots: a scheduled batch in, logits out, by ONNX Runtime on the CPU.

Tensors are allocated once: inputs are written through NumPy views, K/V are read and written in place, logits go to the
row of their slot. Knows nothing of requests or sampling.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from model.spec.config import ModelConfig
from service.engine.batch import DecodeRow, EncodeGroup, ScheduledBatch
from service.engine.sessions.session import Binding, GraphSession
from service.engine.slots_backend.decoder import SlotDecoder
from service.engine.slots_backend.kv_cache import SlotKV
from service.engine.slots_backend.prefill import ChunkPrefill, GroupPrefill

Float32 = npt.NDArray[np.float32]


class OrtRunner:
    """Runs the CPU graphs of one artifact.

    Args:
        config: the model's sizes.
        kv: the cache, changed by this runner only.
        decoder: the decoder graph (`model.spec.artifact.decoder_signature`), which records its operators.
        encoder: the encoder graph of an encoder-decoder.
        max_prefill_tokens: prompt tokens of a batch, padding included. Their logits and K/V are reserved, and touched
            only as used.

    Attributes:
        operators: of the decoder graph (`GraphSession.operators`).
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
        self.operators = decoder.operators
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
        for chunk in batch.prefills:
            if chunk.num_scored:
                rows = slice(next_logits, next_logits + chunk.num_scored)
                self._chunk_prefill.run((chunk,), rows)
                next_logits = rows.stop
                if chunk.wants_logits:
                    self._logits[chunk.slot] = self._logits[next_logits - 1]
            else:
                self._chunk_prefill.run((chunk,), slice(chunk.slot, chunk.slot + chunk.num_logits))
        if batch.drafted:
            num_scored = sum(chunk.num_scored for chunk in batch.drafted)
            self._chunk_prefill.run(batch.drafted, slice(next_logits, next_logits + num_scored))
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
        """Computes one token for each of the slots `0 … n-1`."""
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
