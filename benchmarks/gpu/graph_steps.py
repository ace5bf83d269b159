"""Decoding steps of a graph by itself, at addresses that never change: what a device can capture, nothing around it.

A few rows with blocks of their own, each fed one token a step. Knows the inputs of a decoder over blocks by name
(`model.spec.artifact.paged_decoder_signature`), and no engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from benchmarks.gpu.engines import load_session
from benchmarks.gpu.workshop import Graphs
from model.spec.artifact import DECODER, ENCODER
from service.engine.sessions.device_memory import Array, DeviceTensor
from service.engine.sessions.session import Binding

Int64 = npt.NDArray[np.int64]


class GraphSteps:
    """So many rows of a model.

    Args:
        graphs: the model's.
        num_rows: how many.
        capacity: how many tokens each may come to.
        sources: of an encoder-decoder, one for each row, all of one length; they are encoded at once.

    Raises:
        StartupError: when the device is not to be had, or has too little memory.
        GraphError: when a source cannot be encoded.
    """

    def __init__(self, graphs: Graphs, num_rows: int, capacity: int, sources: Int64 | None = None) -> None:
        config, kv = graphs.config, graphs.manifest.kv_cache
        self._device = str(graphs.manifest.device)
        self._size, self._capacity, self._num_rows = kv.block_size, capacity, num_rows
        session = load_session(graphs, DECODER, records=True)
        tables = _Tables(self._size)
        self._table = tables.take(num_rows, capacity)
        source_length = 0 if sources is None else sources.shape[1]
        source_table = tables.take(num_rows, source_length)
        shape = (tables.num_blocks, self._size, config.num_kv_heads, config.head_dim)
        self._caches = {
            f"{part}_cache_{layer}": DeviceTensor(shape, kv.precision.dtype, self._device)
            for layer in range(config.num_layers)
            for part in ("key", "value")
        }
        if sources is not None:
            self._encode(graphs, sources, source_table)
        constants: dict[str, tuple[Array, str]] = {
            "cumulative_sequence_length": (np.arange(num_rows + 1, dtype=np.int32), self._device),
            "block_table": (self._table, self._device),
            "attention_metadata": (np.array([1, capacity, 0], np.int32), "cpu"),
            "logits_indices": (np.arange(num_rows), self._device),
            "source_past_seqlens": (np.full(num_rows, source_length - 1, np.int32), self._device),
            "source_block_table": (source_table, self._device),
            "source_attention_metadata": (np.array([1, source_length, 0], np.int32), "cpu"),
        }
        self._fed = {
            name: DeviceTensor([num_rows], dtype, self._device)
            for name, dtype in (
                *(("input_ids", "int64"), ("position_ids", "int64")),
                *(("past_seqlens", "int32"), ("slot_mapping", "int32")),
            )
            if name in session.input_names
        }
        given = {name: _constant(*where) for name, where in constants.items() if name in session.input_names}
        self._outputs = {
            spec.name: DeviceTensor([num_rows, *(int(size) for size in spec.shape[1:])], spec.dtype, self._device)
            for spec in graphs.manifest.graphs[DECODER].outputs
            if "_cache_out_" not in spec.name
        }
        inputs = {**given, **self._fed, **self._caches}
        self._binding: Binding = session.bind(inputs, {**self._outputs, **_continued(self._caches)})

    def feed(self, tokens: Sequence[int], position: int) -> None:
        """Says what the next run computes: a token for each row, behind `position` others."""
        if not 0 <= position < self._capacity:
            raise ValueError(f"position is {position}, must be in [0, {self._capacity})")
        blocks = self._table[:, position // self._size]
        values: dict[str, Array] = {
            "input_ids": np.array(tokens, np.int64),
            "position_ids": np.full(self._num_rows, position, np.int64),
            "past_seqlens": np.full(self._num_rows, position, np.int32),
            "slot_mapping": (blocks * self._size + position % self._size).astype(np.int32),
        }
        for name, tensor in self._fed.items():
            tensor.write(values[name])

    def run(self, number: int | None = None) -> None:
        """Computes what was fed; by a number, the device captures the first such run and repeats it from then on."""
        self._binding.run(number)

    def read(self) -> dict[str, Array]:
        """What the last run put out."""
        return {name: tensor.read() for name, tensor in self._outputs.items()}

    def _encode(self, graphs: Graphs, sources: Int64, table: Array) -> None:
        places = np.arange(sources.shape[1])
        slots = table[:, places // self._size] * self._size + places % self._size
        inputs: Mapping[str, Array | DeviceTensor] = {
            "source_ids": np.ascontiguousarray(sources),
            "source_lengths": np.full(len(sources), sources.shape[1], np.int32),
            "slot_mapping": np.ascontiguousarray(slots.astype(np.int32)),
            **self._caches,
        }
        load_session(graphs, ENCODER, records=False).bind(inputs, _continued(self._caches)).run()


class _Tables:
    """Deals out blocks; the first is nobody's."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self.num_blocks = 1

    def take(self, num_rows: int, length: int) -> npt.NDArray[np.int32]:
        """As many for each row as `length` tokens need, `[num_rows, blocks]`."""
        width = -(-length // self._block_size)
        first = self.num_blocks
        self.num_blocks += num_rows * width
        return np.arange(first, self.num_blocks, dtype=np.int32).reshape(num_rows, width)


def _continued(caches: Mapping[str, DeviceTensor]) -> dict[str, DeviceTensor]:
    """Each cache under the name that it has as an output: read and written in place."""
    return {name.replace("_cache_", "_cache_out_"): tensor for name, tensor in caches.items()}


def _constant(values: Array, device: str) -> DeviceTensor:
    tensor = DeviceTensor(values.shape, values.dtype.name, device)
    tensor.write(values)
    return tensor
