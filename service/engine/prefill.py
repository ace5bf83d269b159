"""How a chunk of a prompt is computed: several tokens of one slot, after those that are there already.

`DecoderPrefill` has the decoder graph do it, in place; `GraphPrefill` has a graph made for it, which may run on another
provider: the K/V of the tokens before are copied into it and those of the new ones out of it, to where the decoder
finds them. Either way the shapes that are computed are the chunk's own. Knows nothing of why a prompt is cut as it is.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from service.engine.batch import PrefillChunk
from service.engine.decoder import SlotDecoder
from service.engine.kv_cache import SlotKV
from service.engine.session import Array, Binding, GraphSession

Float32 = npt.NDArray[np.float32]


class Prefill(Protocol):
    """Computes chunks, each on the K/V that those before it left in its slot."""

    def run(self, chunk: PrefillChunk, logits_rows: slice) -> None:
        """Computes a chunk: its K/V go to its slot, the logits after its last tokens to these rows of the output.

        There are as many rows as the chunk scores, or one.

        Raises:
            GraphError: when the run fails; the slot's K/V are in doubt then.
        """


class DecoderPrefill:
    """By the decoder graph, on the slot's own buffers.

    A binding is made once for each slot, and lasts; only for a chunk with logits of its own is it made anew, which is
    rare and cheap beside computing them.
    """

    def __init__(self, decoder: SlotDecoder) -> None:
        self._decoder = decoder
        self._bindings: dict[int, Binding] = {}

    def run(self, chunk: PrefillChunk, logits_rows: slice) -> None:
        """Computes a chunk; see `Prefill.run`."""
        binding = self._binding(slice(chunk.slot, chunk.slot + 1), logits_rows)
        end = chunk.start + len(chunk.token_ids)
        self._decoder.seqlens_k[chunk.slot] = end - 1
        self._decoder.total_sequence_length[...] = end
        self._decoder.bind_tokens(binding, **_tokens(chunk))
        binding.run()

    def _binding(self, row: slice, logits_rows: slice) -> Binding:
        if logits_rows != row:
            return self._decoder.bind(row, logits_rows)
        if row.start not in self._bindings:
            self._bindings[row.start] = self._decoder.bind(row, row)
        return self._bindings[row.start]


class GraphPrefill:
    """By a prefill graph (`model.artifact.prefill_signature`), by value.

    Args:
        session: the graph.
        kv: where its K/V come from and go to, float32.
        logits: `[rows, V]`, where its logits go.
    """

    def __init__(self, session: GraphSession, kv: SlotKV, logits: Float32) -> None:
        self._session = session
        self._kv = kv
        self._logits = logits
        self._past_names = [f"past_{part}_{layer}" for layer in range(len(kv.own) // 2) for part in ("key", "value")]

    def run(self, chunk: PrefillChunk, logits_rows: slice) -> None:
        """Computes a chunk; see `Prefill.run`."""
        feeds = _tokens(chunk)
        for name, buffer in zip(self._past_names, self._kv.own, strict=True):
            feeds[name] = np.ascontiguousarray(buffer[chunk.slot : chunk.slot + 1, :, : chunk.start])
        logits, *new = self._session.run(feeds)
        end = chunk.start + len(chunk.token_ids)
        for buffer, computed in zip(self._kv.own, new, strict=True):
            buffer[chunk.slot, :, chunk.start : end] = computed[0]
        self._logits[logits_rows] = logits


def _tokens(chunk: PrefillChunk) -> dict[str, Array]:
    """What either graph is told of the tokens: ids, positions, and after which of them logits are wanted."""
    length = len(chunk.token_ids)
    return {
        "input_ids": np.array([chunk.token_ids], np.int64),
        "position_ids": np.arange(chunk.start, chunk.start + length, dtype=np.int64)[np.newaxis],
        "logits_indices": np.arange(length - max(chunk.num_scored, 1), length, dtype=np.int64),
    }
