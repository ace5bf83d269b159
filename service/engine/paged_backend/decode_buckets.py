"""Single tokens of many rows in runs of a few sizes, at addresses that never change: runs that a device can record.

A CUDA graph repeats what it saw, on the same memory, for the same number of rows. So rows are filled up to the next
power of two with rows of nobody: their token is written nowhere, and what they attend to is nobody's block. What the
operator must know of lengths on the host is said for a whole class of them, between one power of two and the next
(`service.engine.kv.decode_sizes`). On a CPU nothing is recorded and everything else is the same.

All inputs of a run go to the device in one copy.

Knows the inputs of a decoder graph over blocks by name (`model.spec.artifact.paged_decoder_signature`), and neither
rows nor whose tokens they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from model.spec.config import ModelConfig
from service.engine.kv.blocks import SCRATCH
from service.engine.kv.decode_sizes import SHORTEST, decode_size, decode_sizes
from service.engine.paged_backend.device_logits import DeviceLogits
from service.engine.sessions.device_memory import Array, Bindable, DevicePack, DeviceTensor
from service.engine.sessions.session import Binding, GraphSession


@dataclass(frozen=True, slots=True)
class _Bucket:
    """A run of so many rows and lengths: what it reads, and by which number a device remembers it."""

    inputs: DevicePack
    binding: Binding
    number: int

    def run(self) -> None:
        """Sends what is in the inputs' arrays and computes it."""
        self.inputs.write()
        self.binding.run(self.number)


class DecodeBuckets:
    """The decoder graph for one token in each row.

    Args:
        config: the model's sizes.
        session: the decoder graph.
        caches: its K/V by input name.
        block_size: tokens in a block.
        logits: where results go; it has room for as many rows as the next power of two.
        device: where inputs lie, "cpu" or "cuda".
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
        """How many runs there have been of sizes of their own; each keeps its memory."""
        return len(self._buckets)

    def run(self, inputs: Mapping[str, Array]) -> None:
        """Computes one token for each row; rows of nobody come behind them.

        Args:
            inputs: what the graph would be given for these rows alone, caches aside.

        Raises:
            GraphError: when the run fails; the rows' K/V are in doubt then.
        """
        past = inputs["past_seqlens"]
        bucket = self._bucket(decode_size(len(past), int(past.max()) + 1))
        for name, filling in _FILLING.items():
            if name in bucket.inputs.arrays:
                array = bucket.inputs.arrays[name]
                array.fill(filling)
                array[tuple(map(slice, inputs[name].shape))] = inputs[name]
        bucket.run()

    def warm_up(self, max_rows: int) -> None:
        """Computes one token in every size that up to `max_rows` rows come to, the largest first, for rows of nobody.

        A device has recorded all of them then, and none has to be while somebody waits.

        Raises:
            GraphError: when a run fails.
        """
        for size in decode_sizes(max_rows, self._config.context):
            bucket = self._bucket(size)
            # As long as what is said of lengths on the host, and not beyond what there are positions for.
            last = min(size[1], self._config.context) - 1
            for name, filling in {**_FILLING, "position_ids": last, "past_seqlens": last}.items():
                if name in bucket.inputs.arrays:
                    bucket.inputs.arrays[name].fill(filling)
            bucket.run()

    def _bucket(self, size: tuple[int, int]) -> _Bucket:
        if size not in self._buckets:
            self._buckets[size] = self._make(*size)
        return self._buckets[size]

    def _make(self, num_rows: int, length: int) -> _Bucket:
        config = self._config
        # What is the same in every run is sent with the rest all the same: it is one copy either way.
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
        outputs = {name.replace("_cache_", "_cache_out_"): cache for name, cache in self._caches.items()}
        binding = self._session.bind({**inputs, **self._caches}, {**self._logits.outputs(num_rows), **outputs})
        return _Bucket(pack, binding, len(self._buckets) + 1)


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


def _bounds(most: int, least: int) -> Array:
    """One query in each row, at most so many keys, and so many at least in some row; on the host."""
    return np.array([1, most, least], np.int32)
