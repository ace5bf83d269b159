"""Golden attention: the weights that PyTorch computed, so that whoever runs an explain graph can check its own.

A case is one sequence, with a source where the model reads one, and every attention matrix of every layer. The exporter
makes the cases, `export.verify` and the server replay them. NumPy only.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from model.spec.arrays import ArrayFile
from model.spec.artifact import MAX_ARRAYS_BYTES, AttentionKind, Precision, attention_layers, attention_output
from model.spec.config import ModelConfig

Float32 = npt.NDArray[np.float32]
Int64 = npt.NDArray[np.int64]

ROW_SUM_TOLERANCE = 1e-5
"""How far the sum of a row of weights may be from one, in any precision: softmax is float32 in all of them."""


@dataclass(frozen=True, slots=True)
class AttentionTolerance:
    """How far weights may be off and pass: one by itself, and rows on average.

    `absolute` bounds every weight. `relative` bounds the mean, over all rows of a case, of the total variation distance
    ½Σ|p - q|, the share of attention that lies on other keys than it should: it is a part of the same distance of the
    golden rows from even ones, which is what there is to tell.
    """

    absolute: float
    relative: float


ATTENTION_TOLERANCES: Mapping[Precision, AttentionTolerance] = {
    Precision.FP32: AttentionTolerance(absolute=1e-5, relative=1e-4),
    Precision.INT8: AttentionTolerance(absolute=1.0, relative=0.1),
    Precision.INT4: AttentionTolerance(absolute=1.0, relative=0.5),
}
"""What each precision that is served is held to; one that is not here has no proof.

Float32 comes to 1.5e-6. Rounding may swap two keys that are scored almost alike, so that a single
weight says nothing there and only what becomes of all rows does: the presets' trained models come to 0.02 at most in
int8 and 0.09 in int4, twelve layers of random weights, which look almost evenly at everything, to 0.06 and 0.37. Even
rows come to 1 by definition, and heads that were taken for one another to 0.7 and more.
"""


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """`sequence` is decoder tokens, `source` encoder tokens (empty for a decoder-only model).

    `weights` are PyTorch's, by the name of the explain graph's output: `[H, queries, keys] float32`.
    """

    name: str
    sequence: Int64
    source: Int64
    weights: Mapping[str, Float32]

    @property
    def spread(self) -> float:
        """Mean distance of its rows from even ones, whatever a causal mask forbids aside."""
        return _mean_distance(self.weights, {name: _even(name, matrix) for name, matrix in self.weights.items()})

    @property
    def inputs(self) -> dict[str, Int64]:
        """What the explain graph is fed."""
        inputs = {"input_ids": self.sequence[np.newaxis]}
        return inputs | {"source_ids": self.source[np.newaxis]} if self.source.size else inputs


@dataclass(frozen=True, slots=True)
class AttentionResult:
    """How one case compared, over all its matrices.

    `relative_distance` is the mean distance of rows divided by the case's spread, and 0 where both are: one token has
    but itself to look at. `max_row_sum_error` is the largest distance of a row's sum from one; `looks_ahead` says that
    a query of the decoder gave a later key any weight at all.
    """

    name: str
    max_abs_error: float
    relative_distance: float
    max_row_sum_error: float
    looks_ahead: bool
    tolerance: AttentionTolerance
    passed: bool


def compare(case: AttentionCase, weights: Mapping[str, Float32], tolerance: AttentionTolerance) -> AttentionResult:
    """Judges an explain graph's answer to a case; a missing matrix, a wrong shape or a NaN fails."""
    if any(
        name not in weights or weights[name].shape != golden.shape or not np.isfinite(weights[name]).all()
        for name, golden in case.weights.items()
    ):
        worst = float("inf")
        return AttentionResult(case.name, worst, worst, worst, looks_ahead=False, tolerance=tolerance, passed=False)
    error = max(float(np.abs(weights[name] - golden).max()) for name, golden in case.weights.items())
    distance, spread = _mean_distance(weights, case.weights), case.spread
    relative = distance / spread if spread else float(distance > 0)
    sums = max(
        float(np.abs(weights[name].sum(axis=-1, dtype=np.float64) - 1.0).max(initial=0.0)) for name in case.weights
    )
    own = (weights[name] for name in case.weights if name.startswith(f"{AttentionKind.DECODER}_"))
    looks_ahead = any(bool(np.triu(matrix, k=1).any()) for matrix in own)
    return AttentionResult(
        case.name,
        max_abs_error=error,
        relative_distance=relative,
        max_row_sum_error=sums,
        looks_ahead=looks_ahead,
        tolerance=tolerance,
        passed=error <= tolerance.absolute
        and relative <= tolerance.relative
        and sums <= ROW_SUM_TOLERANCE
        and not looks_ahead,
    )


def _mean_distance(weights: Mapping[str, Float32], others: Mapping[str, Float32]) -> float:
    """Of all rows of all matrices of `others`, in total variation."""
    rows = [np.abs(weights[name].astype(np.float64) - matrix).sum(axis=-1).ravel() for name, matrix in others.items()]
    return 0.5 * float(np.concatenate(rows).mean())


def _even(name: str, matrix: Float32) -> Float32:
    """Rows that give the same to every key that they may look at."""
    is_causal = name.startswith(f"{AttentionKind.DECODER}_")
    even = np.tri(*matrix.shape[1:]) if is_causal else np.ones(matrix.shape[1:])
    return np.broadcast_to(even / even.sum(axis=-1, keepdims=True), matrix.shape).astype(np.float32)


def save(path: Path, cases: Iterable[AttentionCase]) -> None:
    """Writes attention.npz: flat arrays and one JSON list of names, nothing pickled."""
    arrays: dict[str, npt.NDArray[np.generic]] = {}
    names = []
    for number, case in enumerate(cases):
        names.append(case.name)
        arrays |= {f"{number}/sequence": case.sequence, f"{number}/source": case.source}
        arrays |= {f"{number}/{name}": matrix for name, matrix in case.weights.items()}
    arrays["index"] = np.frombuffer(json.dumps(names).encode(), dtype=np.uint8)
    with path.open("wb") as stream:
        np.savez_compressed(stream, allow_pickle=False, **arrays)


def load(path: Path, config: ModelConfig) -> tuple[AttentionCase, ...]:
    """Reads attention.npz.

    Args:
        path: the file.
        config: of the model that is to answer.

    Raises:
        ValueError: when it is not a well-formed set of cases, is empty, or holds some that such a model cannot be
            asked.
    """
    try:
        with ArrayFile(path, MAX_ARRAYS_BYTES) as arrays:
            cases = tuple(
                _read_case(arrays, number, str(name), config) for number, name in enumerate(arrays.read_index())
            )
    except Exception as error:  # archive, decompressors, NumPy and JSON each object in a way of their own
        raise ValueError(f"{path.name} is not a set of golden attention: {error}") from error
    if not cases:
        raise ValueError(f"{path.name}: it holds no case")
    return cases


def _read_case(arrays: ArrayFile, number: int, name: str, config: ModelConfig) -> AttentionCase:
    """Unpacks tokens and matrices, each only if its size is the model's."""
    limits = {
        "sequence": (config.context, config.vocab_size),
        "source": (config.source_context, config.source_vocab_size),
    }
    ids = {}
    for rows, (longest, vocab_size) in limits.items():
        (length,) = arrays.shape(f"{number}/{rows}", np.integer, 1)
        if rows == "source" and not config.is_encoder_decoder:
            if length:
                raise ValueError(f"{name}: has a source, the model is {config.architecture}")
        elif not 1 <= length <= longest:
            raise ValueError(f"{name}: {rows} is of shape [{length}], must have 1 to {longest} tokens")
        ids[rows] = arrays.read(f"{number}/{rows}", np.integer, 1).astype(np.int64)
        if length and not 0 <= ids[rows].min() <= ids[rows].max() < vocab_size:
            raise ValueError(f"{name}: {rows} has ids outside [0, {vocab_size})")
    sequence, source = len(ids["sequence"]), len(ids["source"])
    lengths = {
        AttentionKind.ENCODER: (source, source),
        AttentionKind.DECODER: (sequence, sequence),
        AttentionKind.CROSS: (sequence, source),
    }
    weights = {}
    for kind, num_layers in attention_layers(config).items():
        wanted = (config.num_heads, *lengths[kind])
        for output in (attention_output(kind, layer) for layer in range(num_layers)):
            member = f"{number}/{output}"
            if (shape := arrays.shape(member, np.floating, 3)) != wanted:
                raise ValueError(f"{name}: {output} has shape {list(shape)}, must have {list(wanted)}")
            weights[output] = arrays.read(member, np.floating, 3).astype(np.float32)
    return AttentionCase(name, ids["sequence"], ids["source"], weights)
