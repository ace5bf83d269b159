"""Blocks of K/V in a device's memory, copied by a graph.

Copies are collected and carried out in one run before anything else is computed. Works on a CPU too, for tests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from model.spec.config import ModelConfig
from service.engine.sessions.device_memory import Array, Bindable, DeviceTensor
from service.engine.sessions.session import Binding, GraphSession


def named_caches(caches: Sequence[Array | DeviceTensor]) -> dict[str, Array | DeviceTensor]:
    """Caches of all layers, K then V, by input name."""
    return {f"{('key', 'value')[index % 2]}_cache_{index // 2}": cache for index, cache in enumerate(caches)}


def bind_caches(session: GraphSession, caches: Mapping[str, Array | DeviceTensor]) -> Binding:
    """Binds a graph to all blocks, in place, without the inputs and outputs of a run."""
    return session.bind(caches, cache_outputs(caches))


def cache_outputs(caches: Mapping[str, Array | DeviceTensor]) -> dict[str, Bindable]:
    """The outputs that are the updated caches, by name."""
    return {name.replace("_cache_", "_cache_out_"): cache for name, cache in caches.items()}


class DeviceBlocks:
    """A `BlockMemory` on a device ("cpu" or "cuda"), allocated at once.

    `move` is the graph that copies (`model.spec.artifact.paged_move_signature`).

    Attributes:
        caches: for each layer K then V: `[num_blocks + 1, block_size, kv_heads, head_dim]`; valid after `flush`.

    Raises:
        StartupError: when the device has too little memory.
    """

    def __init__(
        self, config: ModelConfig, num_blocks: int, block_size: int, dtype: str, device: str, move: GraphSession
    ) -> None:
        shape = (num_blocks + 1, block_size, config.num_kv_heads, config.head_dim)
        self.num_blocks, self.block_size = num_blocks, block_size
        self.caches = tuple(DeviceTensor(shape, dtype, device) for _ in range(2 * config.num_layers))
        self._move = bind_caches(move, named_caches(self.caches))
        self._sources: list[Array] = []
        self._targets: list[Array] = []
        self._target_blocks: set[int] = set()

    def copy(self, source: int, target: int, start: int, stop: int) -> None:
        """See `BlockMemory`; carried out by `flush` at the latest."""
        # Collected copies are read before any is written, so a copy that depends on another must wait for it.
        if self._target_blocks & {source, target}:
            self.flush()
        offsets = np.arange(start, stop)
        self._sources.append(source * self.block_size + offsets)
        self._targets.append(target * self.block_size + offsets)
        self._target_blocks.add(target)

    def release(self, block: int) -> None:
        """See `BlockMemory`: a device's memory is not returned."""

    def flush(self) -> None:
        """Carries out the collected copies.

        Raises:
            GraphError: when the run fails; the caches are undefined then.
        """
        if not self._sources:
            return
        places = {"sources": np.concatenate(self._sources), "targets": np.concatenate(self._targets)}
        self._sources, self._targets = [], []
        self._target_blocks.clear()
        self._move.bind_inputs(places)
        self._move.run()
