"""Keys and values of the sequences that hold a slot.

`KVCache` is what every backend promises, `SlotKV` the backend of the CPU graph: for each layer one buffer over all
slots, bound to the graph as past and as present, so that a step writes in place and the active rows are a prefix
view. Changed by the runner alone. Knows no sequences: rows are slots, lengths come with the call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from model.config import ModelConfig
from service.engine.batch import KVCopy
from service.errors import StartupError

Float32 = npt.NDArray[np.float32]


class KVCache(Protocol):
    """A self-attention cache and, for an encoder-decoder, a cross-attention cache."""

    @property
    def num_slots(self) -> int:
        """How many sequences fit."""

    @property
    def reserved_bytes(self) -> int:
        """Memory set aside, used or not."""

    def move(self, move: KVCopy) -> None:
        """Copies the valid part of one row over another; the rest of the target is undefined afterwards."""

    def write_cross(self, slots: Sequence[int], tensors: Sequence[Float32]) -> None:
        """Stores encoded sources.

        Args:
            slots: which row each source belongs to.
            tensors: for each layer K then V, `[len(slots), kv_heads, source, head_dim] float32`.
        """


class SlotKV:
    """K/V of a fixed number of rows, each with room for a whole context.

    Memory is reserved at once and touched as it is used: a row that nobody has filled costs address space only.

    Args:
        config: the model's sizes.
        num_slots: how many rows.
        memory_limit: bytes that there are, None where that is not known.

    Raises:
        StartupError: when all rows together need more.
    """

    def __init__(self, config: ModelConfig, num_slots: int, memory_limit: int | None) -> None:
        positions = config.context + (config.source_context if config.is_encoder_decoder else 0)
        needed = num_slots * positions * config.kv_bytes_per_token
        if memory_limit is not None and needed > memory_limit:
            raise StartupError([f"K/V of {num_slots} slots needs {needed} bytes, there are {memory_limit}"])
        num_tensors = 2 * config.num_layers
        row = (config.num_kv_heads, config.context, config.head_dim)
        cross_row = (config.num_kv_heads, config.source_context, config.head_dim)
        self._own = np.zeros((num_tensors, num_slots, *row), np.float32)
        self._cross = np.zeros((num_tensors if config.is_encoder_decoder else 0, num_slots, *cross_row), np.float32)

    @property
    def num_slots(self) -> int:
        """How many sequences fit."""
        return int(self._own.shape[1])

    @property
    def reserved_bytes(self) -> int:
        """Memory set aside, used or not."""
        return self._own.nbytes + self._cross.nbytes

    @property
    def own(self) -> tuple[Float32, ...]:
        """For each layer K then V of self-attention: `[slots, kv_heads, context, head_dim] float32`, live."""
        return tuple(self._own)

    @property
    def cross(self) -> tuple[Float32, ...]:
        """For each layer K then V of the sources: `[slots, kv_heads, source_context, head_dim] float32`, live."""
        return tuple(self._cross)

    def move(self, move: KVCopy) -> None:
        """Copies the valid part of one row over another, all layers at once."""
        own, cross = slice(move.num_tokens), slice(move.num_source_tokens)
        self._own[:, move.target, :, own] = self._own[:, move.source, :, own]
        self._cross[:, move.target, :, cross] = self._cross[:, move.source, :, cross]

    def write_cross(self, slots: Sequence[int], tensors: Sequence[Float32]) -> None:
        """Stores encoded sources, padding included: it is never attended to."""
        for buffer, tensor in zip(self._cross, tensors, strict=True):
            buffer[list(slots), :, : tensor.shape[2]] = tensor
