"""An artifact's explain graph, loaded on first use: whole sequences in, attention weights out.

Its session has one thread and its own weights, shared with no graph of the engine. Before it answers, the folder must
still be the served artifact's and the graph must pass its golden cases. Knows no requests, threads or event loop.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from model.spec import artifact, golden_attention
from model.spec.artifact import EXPLAIN, GOLDEN_ATTENTION, PREFILL, ArtifactError, Manifest
from model.spec.golden import Float32
from model.spec.golden_attention import ATTENTION_TOLERANCES
from service.engine.kv.budget import graph_weight_bytes
from service.engine.kv.process_memory import memory_limit, resident_bytes
from service.engine.sessions.session import GraphSession, SessionOptions
from service.errors import NotServing

_LOGGER = logging.getLogger(__name__)

# Unless the process has a shared thread pool.
_OPTIONS = SessionOptions(intra_op_threads=1, allow_spinning=False, map_weights=True, copies_weights=True)


class AttentionGraph:
    """A loaded explain graph.

    Raises:
        StartupError: when the file cannot be loaded or is not the manifest's.
    """

    def __init__(self, folder: Path, manifest: Manifest, *, own_kernels: bool = True) -> None:
        options = dataclasses.replace(_OPTIONS, own_kernels=own_kernels)
        self._session = GraphSession(folder, manifest.graphs[EXPLAIN], options)

    def own_weights(self) -> None:
        """See `GraphSession.own_weights`."""
        self._session.own_weights()

    def run(self, decoder: Sequence[int], source: Sequence[int], outputs: Sequence[str]) -> list[Float32]:
        """Attention weights over one sequence.

        Args:
            decoder: the decoder's tokens.
            source: the encoder's tokens; empty for a decoder-only model.
            outputs: names of the graph's outputs.

        Returns:
            `[H, queries, keys] float32` for each output.

        Raises:
            GraphError: when the run fails.
        """
        feeds = {"input_ids": np.array([decoder], np.int64)}
        if source:
            feeds["source_ids"] = np.array([source], np.int64)
        return self._session.run(feeds, outputs)


def load_attention_graph(folder: Path, manifest: Manifest, *, own_kernels: bool = True) -> AttentionGraph:
    """Loads an artifact's explain graph and proves it.

    Args:
        folder: the artifact, as it is now.
        manifest: as it was when the model was loaded.
        own_kernels: as in `SessionOptions`.

    Raises:
        NotServing: when the artifact has changed, the graph fails its golden cases, or memory is too short.
        StartupError: when the graph cannot be loaded.
        GraphError: when it cannot be run.
    """
    # Until the proof, a copy of the weights' files is in memory too. They belong to the other graphs.
    needed = 2 * sum(graph_weight_bytes(manifest, name) for name in manifest.graphs if name != PREFILL)
    limit = memory_limit()
    if limit is not None and needed > (left := max(0, limit - resident_bytes())):
        raise NotServing(
            f"the explain graph of {folder.name} needs up to {needed} bytes, of {limit} there are {left} left"
        )
    stamp = artifact.stamp(folder, manifest)
    try:
        is_same = artifact.load(folder) == manifest
    except ArtifactError as error:
        _LOGGER.error("%s", error)
        is_same = False
    if not is_same:
        raise NotServing(
            f"{folder.name} has changed on the disk since it was loaded, and so may its explain graph have"
        )
    try:
        cases = golden_attention.load(folder / GOLDEN_ATTENTION, manifest.config)
    except ValueError as error:
        _LOGGER.error("%s: %s", folder, error)
        raise NotServing(f"the explain graph of {folder.name} has no golden cases that can be read") from error
    began, before = time.monotonic(), resident_bytes()
    graph = AttentionGraph(folder, manifest, own_kernels=own_kernels)
    loaded = time.monotonic()
    if stamp != artifact.stamp(folder, manifest):
        raise NotServing(f"{folder.name} has changed on the disk while its explain graph was loaded")
    for case in cases:
        names = list(case.weights)
        weights = dict(zip(names, graph.run(case.sequence.tolist(), case.source.tolist(), names), strict=True))
        result = golden_attention.compare(case, weights, ATTENTION_TOLERANCES[manifest.precision])
        if not result.passed:
            _LOGGER.error("%s: %s", folder.name, result)
            raise NotServing(f"the explain graph of {folder.name} does not answer as its golden cases say")
    graph.own_weights()
    _LOGGER.info(
        "%s: the explain graph was loaded in %.3f s and proven in %.3f s, in %.0f MiB",
        folder.name,
        loaded - began,
        time.monotonic() - loaded,
        (resident_bytes() - before) / (1 << 20),
    )
    return graph
