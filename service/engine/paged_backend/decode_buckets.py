"""Decode steps in buckets of a few sizes, at fixed addresses: runs that a device records as CUDA graphs.

A CUDA graph replays the same memory and shapes. So rows are padded to the next power of two with padding rows, which
write no K/V and attend to the scratch block, and the lengths that the attention operator reads on the host are those of
a length class (`service.engine.kv.decode_sizes`). On a CPU nothing is recorded; all else is equal. One copy sends all
inputs of a run.

Knows the inputs of a decoder graph over blocks by name (`model.spec.artifact.paged_decoder_signature`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from model.spec.config import ModelConfig
from service.engine.kv.blocks import SCRATCH
from service.engine.kv.decode_sizes import SHORTEST, decode_size, decode_sizes
from service.engine.paged_backend.device_blocks import cache_outputs
from service.engine.paged_backend.device_logits import DeviceLogits
from service.engine.sessions.device_memory import Array, Bindable, DevicePack, DeviceTensor
from service.engine.sessions.session import Binding, GraphSession


@dataclass(frozen=True, slots=True)
class _Bucket:
    """A run of one size: its inputs, and its number among the recorded ones."""

    inputs: DevicePack
    binding: Binding
    number: int

    def run(self) -> None:
        """Sends the inputs and computes."""
        self.inputs.write()
        self.binding.run(self.number)


class DecodeBuckets:
    """The decoder graph for one token in each row.

    `caches` are its K/V by input name; `logits` has room for the padding rows; `device` of the inputs is "cpu" or
    "cuda".
    """

    def __init__(
        self,
        config: ModelConfig,
        session: GraphSession,
        caches: Mapping[str, Array | DeviceTensor],
        block_size: int,
        logits: DeviceLogits,
        device: str,
    ) -> None:
        self._config = config
        self._session = session
        self._caches = caches
        self._block_size = block_size
        self._logits = logits
        self._device = device
        self._buckets: dict[tuple[int, int], _Bucket] = {}

    @property
    def num_buckets(self) -> int:
        """Buckets in use; each has its own memory."""
        return len(self._buckets)

    def run(self, inputs: Mapping[str, Array]) -> None:
        """Computes one token for each row, with padding rows behind them.

        Args:
            inputs: the graph's inputs for these rows alone, without caches.

        Raises:
            GraphError: when the run fails; the rows' K/V are undefined then.
        """
        past = inputs["past_seqlens"]
        bucket = self._bucket(decode_size(len(past), int(past.max()) + 1))
        for name, padding in _PADDING.items():
            if name in bucket.inputs.arrays:
                array = bucket.inputs.arrays[name]
                array.fill(padding)
                array[tuple(map(slice, inputs[name].shape))] = inputs[name]
        bucket.run()

    def warm_up(self, max_rows: int) -> None:
        """Runs every size for up to `max_rows` rows with padding rows only, largest first, so that all are recorded.

        Raises:
            GraphError: when a run fails.
        """
        for size in decode_sizes(max_rows, self._config.context):
            bucket = self._bucket(size)
            # The length class's maximum, but no position beyond the context.
            last = min(size[1], self._config.context) - 1
            for name, padding in {**_PADDING, "position_ids": last, "past_seqlens": last}.items():
                if name in bucket.inputs.arrays:
                    bucket.inputs.arrays[name].fill(padding)
            bucket.run()

    def _bucket(self, size: tuple[int, int]) -> _Bucket:
        if size not in self._buckets:
            self._buckets[size] = self._make(*size)
        return self._buckets[size]

    def _make(self, num_rows: int, length: int) -> _Bucket:
        config = self._config
        # Constants are sent with the rest: it is one copy either way.
        specs: dict[str, tuple[tuple[int, ...], str]] = {
            "input_ids": ((num_rows,), "int64"),
            "position_ids": ((num_rows,), "int64"),
            "cumulative_sequence_length": ((num_rows + 1,), "int32"),
            "past_seqlens": ((num_rows,), "int32"),
            "block_table": ((num_rows, -(-length // self._block_size)), "int32"),
            "slot_mapping": ((num_rows,), "int32"),
            "logits_indices": ((num_rows,), "int64"),
            "source_past_seqlens": ((num_rows,), "int32"),
            "source_block_table": ((num_rows, -(-config.source_context // self._block_size)), "int32"),
        }
        names = self._session.input_names
        pack = DevicePack({name: spec for name, spec in specs.items() if name in names}, self._device)
        pack.arrays["cumulative_sequence_length"][:] = np.arange(num_rows + 1)
        pack.arrays["logits_indices"][:] = np.arange(num_rows)
        bounds: dict[str, Array] = {
            "attention_metadata": _bounds(length, 0 if length == SHORTEST else length // 2 + 1),
            "source_attention_metadata": _bounds(config.source_context, 0),
        }
        inputs: dict[str, Bindable] = {**pack.views, **{name: bounds[name] for name in names if name in bounds}}
        outputs = {**self._logits.outputs(num_rows), **cache_outputs(self._caches)}
        binding = self._session.bind({**inputs, **self._caches}, outputs)
        return _Bucket(pack, binding, len(self._buckets) + 1)


# Inputs of padding rows; those that are missing here are constant.
_PADDING = {
    "input_ids": 0,
    "position_ids": 0,
    "past_seqlens": 0,
    "block_table": SCRATCH,
    "slot_mapping": -1,
    "source_past_seqlens": 0,
    "source_block_table": SCRATCH,
}


def _bounds(most: int, least: int) -> Array:
    """Queries per row, most keys, and least keys of the longest row; on the host."""
    return np.array([1, most, least], np.int32)
