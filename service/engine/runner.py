"""A scheduled batch in, logits out: the graphs of an artefact, run over slots.

`Runner` is all that the engine asks for; `OrtRunner` does it with ONNX Runtime on the CPU. Every tensor is allocated
once: inputs are written through NumPy views, K/V is read and written in place, logits land in the row of their slot.
Knows nothing of requests, of sampling, or of why a batch looks as it does; token ids are checked long before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from model.config import ModelConfig, Positions
from service.engine.batch import DecodeRow, EncodeGroup, PrefillChunk, ScheduledBatch
from service.engine.kv_cache import SlotKV
from service.engine.session import Array, Binding, GraphSession

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


class OrtRunner:
    """Runs the CPU graphs of one artefact.

    Args:
        config: the model's sizes.
        kv: the cache that this runner alone changes.
        decoder: the decoder graph (`model.artifact.decoder_signature`).
        encoder: the encoder graph of an encoder-decoder, None for a decoder-only model.
        max_prefill_tokens: how many tokens of chunks a batch has at most. Room for the logits of all of them is
            reserved, and like that of K/V touched only as it is used.
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
        self._decoder = decoder
        self._encoder = encoder
        self._has_position_ids = config.positions is not Positions.ROTARY
        slots = kv.num_slots
        num_logits = slots + max_prefill_tokens
        self._logits = np.zeros((num_logits, config.vocab_size), np.float32)
        self._input_ids = np.zeros((slots, 1), np.int64)
        self._position_ids = np.zeros((slots, 1), np.int64)
        self._seqlens_k = np.zeros(slots, np.int32)
        self._total_sequence_length = np.zeros((), np.int32)
        self._logits_indices = np.arange(slots, dtype=np.int64)
        self._source_lengths = np.zeros(slots, np.int32)
        self._decode_bindings: dict[int, Binding] = {}
        self._prefill_bindings: dict[int, Binding] = {}
        self._names = [f"{part}_{layer}" for layer in range(config.num_layers) for part in ("key", "value")]

    def run(self, batch: ScheduledBatch) -> Float32:
        """Runs one step; see `Runner.run`."""
        for operation in batch.kv_operations:
            self.kv.apply(operation)
        for group in batch.encodes:
            self._encode(group)
        if batch.decode:
            self._decode(batch.decode)
        next_logits = self.kv.num_slots
        for chunk in batch.prefills:
            if chunk.num_scored:
                rows = slice(next_logits, next_logits + chunk.num_scored)
                self._prefill(chunk, self._bind(slice(chunk.slot, chunk.slot + 1), rows))
                next_logits = rows.stop
                self._logits[chunk.slot] = self._logits[next_logits - 1]
            else:
                self._prefill(chunk, self._prefill_binding(chunk.slot))
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
        self._seqlens_k[:num_rows] = positions
        self._total_sequence_length[...] = max(positions) + 1
        self._source_lengths[:num_rows] = [row.source_length for row in rows]
        if num_rows not in self._decode_bindings:
            binding = self._decode_bindings[num_rows] = self._bind(slice(num_rows), slice(num_rows))
            binding.bind_inputs(
                self._token_inputs(
                    self._input_ids[:num_rows], self._position_ids[:num_rows], self._logits_indices[:num_rows]
                )
            )
        self._decode_bindings[num_rows].run()

    def _prefill_binding(self, slot: int) -> Binding:
        if slot not in self._prefill_bindings:
            self._prefill_bindings[slot] = self._bind(slice(slot, slot + 1), slice(slot, slot + 1))
        return self._prefill_bindings[slot]

    def _prefill(self, chunk: PrefillChunk, binding: Binding) -> None:
        """Several tokens of one slot."""
        length = len(chunk.token_ids)
        row = slice(chunk.slot, chunk.slot + 1)
        input_ids = np.array([chunk.token_ids], np.int64)
        position_ids = np.arange(chunk.start, chunk.start + length, dtype=np.int64)[np.newaxis]
        wanted = np.arange(length - max(chunk.num_scored, 1), length, dtype=np.int64)
        self._seqlens_k[row] = chunk.start + length - 1
        self._total_sequence_length[...] = chunk.start + length
        binding.bind_inputs(self._token_inputs(input_ids, position_ids, wanted))
        binding.run()

    def _token_inputs(self, input_ids: Array, position_ids: Array, logits_indices: Array) -> dict[str, Array]:
        inputs = {"input_ids": input_ids, "logits_indices": logits_indices}
        if self._has_position_ids:
            inputs["position_ids"] = position_ids
        return inputs

    def _bind(self, rows: slice, logits_rows: slice) -> Binding:
        """Ties the decoder to the given slots, all but the tokens.

        A binding is made once for each slot and each number of rows, and lasts as long as the runner; only for a chunk
        with logits of its own is it made anew, which is rare and cheap beside computing them.
        """
        inputs: dict[str, Array] = {
            "seqlens_k": self._seqlens_k[rows],
            "total_sequence_length": self._total_sequence_length,
        }
        outputs: dict[str, Array] = {"logits": self._logits[logits_rows]}
        for name, buffer in zip(self._names, self.kv.own, strict=True):
            inputs[f"past_{name}"] = outputs[f"present_{name}"] = buffer[rows]
        if self._encoder is not None:
            inputs["source_lengths"] = self._source_lengths[rows]
            for name, buffer in zip(self._names, self.kv.cross, strict=True):
                part, layer = name.split("_")
                inputs[f"cross_{name}"] = outputs[f"cross_{part}_out_{layer}"] = buffer[rows]
        return self._decoder.bind(inputs, outputs)
