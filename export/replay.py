"""Golden cases replayed on the exported graphs through plain ONNX Runtime sessions.

Deliberately independent of the server's runner, so that an error in either shows as a disagreement. Buffers are bound
as past and present at once, as the graphs expect.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from model import kernels
from model.spec.artifact import DECODER, ENCODER, EXPLAIN, ArtifactError, GraphSpec, Manifest, TensorSpec
from model.spec.config import Positions
from model.spec.golden import Float32, GoldenCase, Step
from model.spec.golden_attention import AttentionCase

PROVIDER = "CPUExecutionProvider"

_SOURCE_MULTIPLE = 16
_ORT_DTYPES = {
    "tensor(int64)": "int64",
    "tensor(int32)": "int32",
    "tensor(float)": "float32",
    "tensor(int8)": "int8",
    "tensor(float16)": "float16",
}

Array = npt.NDArray[np.generic]
RunGraph = Callable[[str, Mapping[str, Array], Mapping[str, Array]], Mapping[str, Float32]]
"""Runs a graph over blocks: its name, its inputs, and its caches, updated in place → its other outputs."""


class ReplayError(Exception):
    """ONNX Runtime could not run a graph."""


@dataclass(frozen=True, slots=True)
class _Row:
    """One row's buffers by decoder input name, `[1, Hkv, capacity, D]`, and its source's length in tokens."""

    buffers: Mapping[str, Array]
    source_length: int


class Replayer:
    """Sessions over one artifact's graphs."""

    def __init__(
        self, manifest: Manifest, decoder: ort.InferenceSession, encoder: ort.InferenceSession | None = None
    ) -> None:
        self._config = manifest.config
        self._kv_dtype = np.dtype(manifest.kv_cache.precision.dtype)
        self._decoder = decoder
        self._encoder = encoder

    @classmethod
    def open(cls, folder: Path, manifest: Manifest) -> Replayer:
        """Sessions over the graphs in `folder`.

        Raises:
            ArtifactError: when ONNX Runtime rejects a graph, or its signature differs from the manifest's.
        """
        sessions = [_open(folder, manifest.graphs[name]) for name in (DECODER, ENCODER) if name in manifest.graphs]
        return cls(manifest, *sessions)

    def run(self, case: GoldenCase) -> Float32:
        """Logits `[feeds, V]` in the order of the case's own.

        Raises:
            ReplayError: when ONNX Runtime fails in a step.
        """
        rows = self._rows(case)
        return case.select(self._step(case, step, rows) for step in case.steps)

    def prefill(self, token_ids: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> Float32:
        """Logits `[P, V]` of a decoder-only model at these positions of one row `[N]`, read in a single step.

        Raises:
            ReplayError: when ONNX Runtime fails.
        """
        length = len(token_ids)
        inputs: dict[str, Array] = {
            "input_ids": token_ids[None],
            "seqlens_k": np.array([length - 1], np.int32),
            "total_sequence_length": np.array(length, np.int32),
            "logits_indices": positions,
        }
        if self._config.positions is not Positions.ROTARY:
            inputs["position_ids"] = np.arange(length)[None]
        return self._run_in_place(inputs, self._zeroed(length))

    def _zeroed(self, capacity: int) -> dict[str, Array]:
        """A row's own K/V."""
        config = self._config
        names = [f"past_{part}_{layer}" for layer in range(config.num_layers) for part in ("key", "value")]
        shape = (1, config.num_kv_heads, capacity, config.head_dim)
        return {name: np.zeros(shape, self._kv_dtype) for name in names}

    def _rows(self, case: GoldenCase) -> list[_Row]:
        """Zeroed K/V for every row, and its source's K/V if there is one."""
        capacity = max(len(sequence) for sequence in case.sequences)
        cross = self._encode(case.sources) or [{} for _ in case.sequences]
        lengths = [len(source) for source in case.sources] or [0] * len(case.sequences)
        return [_Row(self._zeroed(capacity) | memory, length) for memory, length in zip(cross, lengths, strict=True)]

    def _encode(self, sources: Sequence[npt.NDArray[np.int64]]) -> list[dict[str, Array]]:
        """Each source's cross-attention K/V, padded to one length; sources of equal padded length share a batch."""
        if self._encoder is None:
            return []
        limit = self._config.source_context
        batches: dict[int, list[int]] = defaultdict(list)
        for row, source in enumerate(sources):
            batches[min(-(-len(source) // _SOURCE_MULTIPLE) * _SOURCE_MULTIPLE, limit)].append(row)
        names = self._outputs()
        encoded: list[dict[str, Array]] = [{} for _ in sources]
        for padded, rows in batches.items():
            source_ids = np.full((len(rows), padded), self._config.pad_id, np.int64)
            for index, row in enumerate(rows):
                source_ids[index, : len(sources[row])] = sources[row]
            lengths = np.array([len(sources[row]) for row in rows], np.int32)
            with _naming_failures():
                outputs = self._encoder.run(names, {"source_ids": source_ids, "source_lengths": lengths})
            for name, values in zip(names, outputs, strict=True):
                for index, row in enumerate(rows):
                    width = [(0, 0), (0, max(batches) - padded), (0, 0)]
                    encoded[row][name] = np.pad(values[index], width)[np.newaxis]
        return encoded

    def _outputs(self) -> list[str]:
        """The encoder's."""
        return [output.name for output in self._encoder.get_outputs()] if self._encoder is not None else []

    def _step(self, case: GoldenCase, step: Step, rows: Sequence[_Row]) -> Float32:
        """Runs one step and writes the new K/V to the rows that it fed."""
        fed = [rows[feed.row] for feed in step]
        buffers = {name: np.concatenate([row.buffers[name] for row in fed]) for name in fed[0].buffers}
        ends = [feed.start + feed.count for feed in step]
        inputs: dict[str, Array] = {
            "input_ids": np.stack([case.sequences[feed.row][feed.start : feed.start + feed.count] for feed in step]),
            "seqlens_k": np.array(ends, np.int32) - np.int32(1),
            "total_sequence_length": np.array(max(ends), np.int32),
            # The last position of every row, flattened: a step is one row of many tokens or many rows of one.
            "logits_indices": np.cumsum([feed.count for feed in step], dtype=np.int64) - 1,
        }
        if self._config.positions is not Positions.ROTARY:
            inputs["position_ids"] = np.stack([np.arange(feed.start, feed.start + feed.count) for feed in step])
        if self._encoder is not None:
            inputs["source_lengths"] = np.array([row.source_length for row in fed], np.int32)
        logits = self._run_in_place(inputs, buffers)
        for index, row in enumerate(fed):
            for name, values in buffers.items():
                row.buffers[name][0] = values[index]
        return logits

    def _run_in_place(self, inputs: Mapping[str, Array], buffers: Mapping[str, Array]) -> Float32:
        with _naming_failures():
            return run_in_place(self._decoder, inputs, buffers)


class PagedReplayer:
    """Sessions over one artifact's graphs over blocks; the CPU provider's alone.

    Every row has separate blocks, which are NaN until they are written: a read past a row's length or in another row's
    blocks shows. `run` runs a graph by name, in place on caches; None is ONNX Runtime.

    Raises:
        ArtifactError: as `Replayer`.
    """

    def __init__(self, folder: Path, manifest: Manifest, run: RunGraph | None = None) -> None:
        self._config = manifest.config
        self._block_size = manifest.kv_cache.block_size
        self._dtype = np.dtype(manifest.kv_cache.precision.dtype)
        if run is None:
            sessions = {name: _open(folder, graph) for name, graph in manifest.graphs.items()}
            run = partial(_run_over_blocks, sessions)
        self._run = run

    def run(self, case: GoldenCase) -> Float32:
        """Logits `[feeds, V]` in the order of the case's own.

        Raises:
            ReplayError: when ONNX Runtime fails in a step.
        """
        lengths = [len(row) for row in (*case.sequences, *case.sources)]
        tables = self._tables(lengths)
        shape = (1 + sum(map(len, tables)), self._block_size, self._config.num_kv_heads, self._config.head_dim)
        caches = {
            f"{part}_cache_{layer}": np.full(shape, np.nan, self._dtype)
            for layer in range(self._config.num_layers)
            for part in ("key", "value")
        }
        own, sources = tables[: len(case.sequences)], tables[len(case.sequences) :]
        for source, table in zip(case.sources, sources, strict=True):
            self._encode(source, table, caches)
        return case.select(self._step(case, step, own, sources, caches) for step in case.steps)

    def _tables(self, lengths: Sequence[int]) -> list[list[int]]:
        """Blocks for rows of these lengths, assigned round-robin from last to first; block 0 is the null block."""
        needed = [-(-length // self._block_size) for length in lengths]
        tables: list[list[int]] = [[] for _ in lengths]
        free = list(range(1, sum(needed) + 1))
        while free:
            for table, count in zip(tables, needed, strict=True):
                if len(table) < count:
                    table.append(free.pop())
        return tables

    def _places(self, table: Sequence[int], start: int, stop: int) -> list[int]:
        size = self._block_size
        return [table[position // size] * size + position % size for position in range(start, stop)]

    def _encode(self, source: npt.NDArray[np.int64], table: Sequence[int], caches: Mapping[str, Array]) -> None:
        """Runs the encoder, which writes a source's K/V to its blocks."""
        limit = self._config.source_context
        padded = min(-(-len(source) // _SOURCE_MULTIPLE) * _SOURCE_MULTIPLE, limit)
        source_ids = np.full((1, padded), self._config.pad_id, np.int64)
        source_ids[0, : len(source)] = source
        slot_mapping = np.full((1, padded), -1, np.int32)
        slot_mapping[0, : len(source)] = self._places(table, 0, len(source))
        lengths = np.array([len(source)], np.int32)
        inputs: dict[str, Array] = {"source_ids": source_ids, "source_lengths": lengths, "slot_mapping": slot_mapping}
        self._run(ENCODER, inputs, caches)

    def _step(
        self,
        case: GoldenCase,
        step: Step,
        own: Sequence[Sequence[int]],
        sources: Sequence[Sequence[int]],
        caches: Mapping[str, Array],
    ) -> Float32:
        counts = [feed.count for feed in step]
        ends = [feed.start + feed.count for feed in step]
        spans = [slice(feed.start, feed.start + feed.count) for feed in step]
        tables = [own[feed.row][: -(-end // self._block_size)] for feed, end in zip(step, ends, strict=True)]
        places = [self._places(table, span.start, span.stop) for table, span in zip(tables, spans, strict=True)]
        fed = [case.sequences[feed.row][span] for feed, span in zip(step, spans, strict=True)]
        inputs: dict[str, Array] = {
            "input_ids": np.concatenate(fed),
            "cumulative_sequence_length": np.cumsum([0, *counts], dtype=np.int32),
            "past_seqlens": np.array([feed.start for feed in step], np.int32),
            "block_table": _padded(tables),
            "slot_mapping": np.concatenate(places).astype(np.int32),
            "attention_metadata": np.array([max(counts), max(ends), max(ends)], np.int32),
            "logits_indices": np.cumsum(counts, dtype=np.int64) - 1,
        }
        if self._config.positions is not Positions.ROTARY:
            inputs["position_ids"] = np.concatenate([np.arange(span.start, span.stop) for span in spans])
        if case.sources:
            lengths = [len(case.sources[feed.row]) for feed in step]
            inputs["source_past_seqlens"] = np.array(lengths, np.int32) - np.array(counts, np.int32)
            inputs["source_block_table"] = _padded([sources[feed.row] for feed in step])
            inputs["source_attention_metadata"] = np.array([max(counts), max(lengths), max(lengths)], np.int32)
        return self._run(DECODER, inputs, caches)["logits"]


def _padded(tables: Sequence[Sequence[int]]) -> npt.NDArray[np.int32]:
    """Block tables of one width, `[B, M]`, padded with the null block."""
    padded = np.zeros((len(tables), max(map(len, tables))), np.int32)
    for row, table in zip(padded, tables, strict=True):
        row[: len(table)] = table
    return padded


def _run_over_blocks(
    sessions: Mapping[str, ort.InferenceSession], name: str, inputs: Mapping[str, Array], caches: Mapping[str, Array]
) -> dict[str, Float32]:
    """Binds every cache as input and as the output that continues it; returns the other outputs by name."""
    session = sessions[name]
    binding = session.io_binding()
    for given, values in inputs.items():
        binding.bind_cpu_input(given, np.ascontiguousarray(values))
    for cache, values in caches.items():
        shared = ort.OrtValue.ortvalue_from_numpy(values)
        binding.bind_ortvalue_input(cache, shared)
        binding.bind_ortvalue_output(cache.replace("_cache_", "_cache_out_"), shared)
    others = [output.name for output in session.get_outputs() if "_cache_out_" not in output.name]
    for other in others:
        binding.bind_output(other)
    with _naming_failures():
        session.run_with_iobinding(binding)
    found = binding.get_outputs()[len(caches) :]
    return {other: value.numpy() for other, value in zip(others, found, strict=True)}


class AttentionReplayer:
    """A session over one artifact's explain graph.

    Raises:
        ArtifactError: as `Replayer`.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._session = _open(folder, manifest.graphs[EXPLAIN])

    def run(self, case: AttentionCase) -> dict[str, Float32]:
        """Attention weights by the name of the graph's output.

        Raises:
            ReplayError: when ONNX Runtime fails.
        """
        names = list(case.weights)
        with _naming_failures():
            return dict(zip(names, self._session.run(names, case.inputs), strict=True))


@contextmanager
def _naming_failures() -> Iterator[None]:
    """Wraps ONNX Runtime's exceptions, which share no base class, in `ReplayError`."""
    try:
        yield
    except Exception as error:
        raise ReplayError(str(error)) from error


def run_in_place(decoder: ort.InferenceSession, inputs: Mapping[str, Array], buffers: Mapping[str, Array]) -> Float32:
    """Runs a decoder over slots with every buffer bound as input and as the output that continues it; its logits."""
    (logits,) = fetch_in_place(decoder, inputs, buffers, ["logits"])
    return logits


def fetch_in_place(
    decoder: ort.InferenceSession, inputs: Mapping[str, Array], buffers: Mapping[str, Array], names: Sequence[str]
) -> list[Float32]:
    """The same; the outputs of these names."""
    binding = decoder.io_binding()
    for name in names:
        binding.bind_output(name)
    for name, values in inputs.items():
        binding.bind_cpu_input(name, values)
    for name, values in buffers.items():
        shared = ort.OrtValue.ortvalue_from_numpy(values)
        binding.bind_ortvalue_input(name, shared)
        binding.bind_ortvalue_output(continuation(name), shared)
    decoder.run_with_iobinding(binding)
    return [value.numpy() for value in binding.get_outputs()[: len(names)]]


def continuation(name: str) -> str:
    """The output that continues an input: past_key_3 → present_key_3, cross_key_3 → cross_key_out_3."""
    kind, part, layer = name.split("_")
    return f"present_{part}_{layer}" if kind == "past" else f"{kind}_{part}_out_{layer}"


def _open(folder: Path, graph: GraphSpec) -> ort.InferenceSession:
    try:
        settings = ort.SessionOptions()
        if (library := kernels.library()) is not None:  # as a server does
            settings.register_custom_ops_library(str(library))
        session = ort.InferenceSession(str(folder / graph.file), settings, providers=[PROVIDER])
    except Exception as error:  # ONNX Runtime's exceptions share no base class
        raise ArtifactError(folder, [f"{graph.file}: {error}"]) from error
    problems = [
        f"{graph.file} {kind} are {_names(found)}, the manifest says {_names(wanted)}"
        for kind, found, wanted in (
            ("inputs", tuple(map(_spec, session.get_inputs())), graph.inputs),
            ("outputs", tuple(map(_spec, session.get_outputs())), graph.outputs),
        )
        if found != wanted
    ]
    if problems:
        raise ArtifactError(folder, problems)
    return session


def _spec(argument: ort.NodeArg) -> TensorSpec:
    return TensorSpec(argument.name, _ORT_DTYPES.get(argument.type, argument.type), tuple(argument.shape))


def _names(specs: Sequence[TensorSpec]) -> str:
    return ", ".join(f"{spec.name} {spec.dtype}{list(spec.shape)}" for spec in specs)
