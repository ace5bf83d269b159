"""Blocks of K/V on a device, where no array of this host reaches them: what moves is moved by a graph.

A `BlockMemory` beside `HostBlocks`. Copies are collected and carried out together, before anything else is computed, so
that many small ones cost one run. On a CPU it does the same, which is how it is tested.
"""

from __future__ import annotations

import numpy as np

from model.spec.config import ModelConfig
from service.engine.sessions.device_memory import Array, DeviceTensor
from service.engine.sessions.session import Binding, GraphSession


class DeviceBlocks:
    """Blocks in a device's memory, all of which is taken at once.

    Args:
        config: the model's sizes.
        num_blocks: how many may be given out.
        block_size: tokens in each.
        dtype: of what they hold.
        device: where they are, "cpu" or "cuda".
        move: the graph that copies within them (`model.spec.artifact.paged_move_signature`).

    Raises:
        StartupError: when the device does not have so much memory.
    """

    def __init__(
        self, config: ModelConfig, num_blocks: int, block_size: int, dtype: str, device: str, move: GraphSession
    ) -> None:
        shape = (num_blocks + 1, block_size, config.num_kv_heads, config.head_dim)
        self._num_blocks, self._block_size = num_blocks, block_size
        self._caches = tuple(DeviceTensor(shape, dtype, device) for _ in range(2 * config.num_layers))
        itemsize = 4 if dtype == "float32" else 2
        self._block_bytes = len(self._caches) * block_size * config.num_kv_heads * config.head_dim * itemsize
        names = [f"{part}_cache_{layer}" for layer in range(config.num_layers) for part in ("key", "value")]
        caches = dict(zip(names, self._caches, strict=True))
        outputs = {name.replace("_cache_", "_cache_out_"): cache for name, cache in caches.items()}
        self._move: Binding = move.bind(caches, outputs)
        self._sources: list[Array] = []
        self._targets: list[Array] = []
        self._target_blocks: set[int] = set()

    @property
    def caches(self) -> tuple[DeviceTensor, ...]:
        """For each layer K then V: `[num_blocks + 1, block_size, kv_heads, head_dim]`; right once all is flushed."""
        return self._caches

    @property
    def num_blocks(self) -> int:
        """See `BlockMemory`."""
        return self._num_blocks

    @property
    def block_size(self) -> int:
        """See `BlockMemory`."""
        return self._block_size

    @property
    def block_bytes(self) -> int:
        """See `BlockMemory`."""
        return self._block_bytes

    def copy(self, source: int, target: int, start: int, stop: int) -> None:
        """See `BlockMemory`; carried out by `flush` at the latest."""
        # All that is collected is read before any of it is written: what was to be written first must have been.
        if self._target_blocks & {source, target}:
            self.flush()
        offsets = np.arange(start, stop)
        self._sources.append(source * self._block_size + offsets)
        self._targets.append(target * self._block_size + offsets)
        self._target_blocks.add(target)

    def release(self, block: int) -> None:
        """See `BlockMemory`: a device's memory is not given back."""

    def flush(self) -> None:
        """Carries out the copies that were asked for.

        Raises:
            GraphError: when the run fails; the caches are in doubt then.
        """
        if not self._sources:
            return
        places = {"sources": np.concatenate(self._sources), "targets": np.concatenate(self._targets)}
        self._sources, self._targets = [], []
        self._target_blocks.clear()
        self._move.bind_inputs(places)
        self._move.run()
