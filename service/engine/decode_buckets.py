"""Single tokens of many rows in runs of a few sizes, at addresses that never change: runs that a device can record.

A CUDA graph repeats what it saw, on the same memory, for the same number of rows. So rows are filled up to the next
power of two with rows of nobody: their token is written nowhere, and what they attend to is nobody's block. What the
operator must know of lengths on the host is said for a whole class of them, between one power of two and the next. On a
CPU nothing is recorded and everything else is the same.

Knows the inputs of a decoder graph over blocks by name (`model.artifact.paged_decoder_signature`), and neither rows nor
whose tokens they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from model.config import ModelConfig
from service.engine.blocks import SCRATCH
from service.engine.session import Array, Binding, DeviceTensor, GraphSession

Float32 = npt.NDArray[np.float32]

_SHORTEST = 512
"""Up to here rows are of one class: the operator gains nothing by dividing the work on so few keys."""


@dataclass(frozen=True, slots=True)
class _Bucket:
    """A run of so many rows and lengths: what it reads and writes, and by which number a device remembers it."""

    inputs: Mapping[str, DeviceTensor]
    logits: DeviceTensor
    binding: Binding
    number: int


class DecodeBuckets:
    """The decoder graph for one token in each row.

    Args:
        config: the model's sizes.
        session: the decoder graph.
        caches: its K/V by input name.
        block_size: tokens in a block.
        device: where inputs and outputs lie, "cpu" or "cuda".
    """

    def __init__(
        self,
        config: ModelConfig,
        session: GraphSession,
        caches: Mapping[str, Array | DeviceTensor],
        block_size: int,
        device: str,
    ) -> None:
        self._config = config
        self._session = session
        self._caches = caches
        self._block_size = block_size
        self._device = device
        self._buckets: dict[tuple[int, int], _Bucket] = {}

    @property
    def num_buckets(self) -> int:
        """How many runs there have been of sizes of their own; each keeps its memory."""
        return len(self._buckets)

    def run(self, inputs: Mapping[str, Array]) -> Float32:
        """Computes one token for each row.

        Args:
            inputs: what the graph would be given for these rows alone, caches aside.

        Returns:
            `[rows, V]`, a copy.

        Raises:
            GraphError: when the run fails; the rows' K/V are in doubt then.
        """
        num_rows = len(inputs["past_seqlens"])
        key = _round_up(num_rows, 1), _round_up(int(inputs["past_seqlens"].max()) + 1, _SHORTEST)
        if key not in self._buckets:
            self._buckets[key] = self._make(*key)
        bucket = self._buckets[key]
        for name, tensor in bucket.inputs.items():
            if name in _FILLING:
                tensor.write(_fill(inputs[name], tensor.shape, _FILLING[name]))
        bucket.binding.run(bucket.number)
        logits: Float32 = bucket.logits.read()[:num_rows]
        return logits

    def _make(self, num_rows: int, length: int) -> _Bucket:
        config, device = self._config, self._device
        inputs = {
            "input_ids": DeviceTensor([num_rows], "int64", device),
            "position_ids": DeviceTensor([num_rows], "int64", device),
            "cumulative_sequence_length": _constant(np.arange(num_rows + 1, dtype=np.int32), device),
            "past_seqlens": DeviceTensor([num_rows], "int32", device),
            "block_table": DeviceTensor([num_rows, -(-length // self._block_size)], "int32", device),
            "slot_mapping": DeviceTensor([num_rows], "int32", device),
            "attention_metadata": _bounds(length, 0 if length == _SHORTEST else length // 2 + 1),
            "logits_indices": _constant(np.arange(num_rows), device),
        }
        if config.is_encoder_decoder:
            longest = config.source_context
            inputs["source_past_seqlens"] = DeviceTensor([num_rows], "int32", device)
            inputs["source_block_table"] = DeviceTensor([num_rows, -(-longest // self._block_size)], "int32", device)
            inputs["source_attention_metadata"] = _bounds(longest, 0)
        inputs = {name: tensor for name, tensor in inputs.items() if name in self._session.input_names}
        logits = DeviceTensor([num_rows, config.vocab_size], "float32", device)
        outputs = {name.replace("_cache_", "_cache_out_"): cache for name, cache in self._caches.items()}
        binding = self._session.bind({**inputs, **self._caches}, {"logits": logits, **outputs})
        return _Bucket(inputs, logits, binding, len(self._buckets) + 1)


# What rows of nobody are given; inputs that are not here are the same in every run.
_FILLING = {
    "input_ids": 0,
    "position_ids": 0,
    "past_seqlens": 0,
    "block_table": SCRATCH,
    "slot_mapping": -1,
    "source_past_seqlens": 0,
    "source_block_table": SCRATCH,
}


def _fill(values: Array, shape: Sequence[int], filling: int) -> Array:
    filled = np.full(shape, filling, values.dtype)
    filled[tuple(slice(size) for size in values.shape)] = values
    return filled


def _constant(values: Array, device: str) -> DeviceTensor:
    tensor = DeviceTensor(values.shape, values.dtype.name, device)
    tensor.write(values)
    return tensor


def _bounds(most: int, least: int) -> DeviceTensor:
    """One query in each row, at most so many keys, and so many at least in some row; on the host."""
    return _constant(np.array([1, most, least], np.int32), "cpu")


def _round_up(number: int, least: int) -> int:
    """The next power of two, `least` at the least."""
    return max(least, 1 << (number - 1).bit_length())
