"""Golden attention: PyTorch's attention weights, which an explain graph must reproduce.

A case is one sequence, with a source for encoder-decoders, and the attention matrices of all layers. The exporter makes
the cases; `export.verify` and the server replay them. NumPy only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from model.spec.arrays import ArrayFile, save_arrays
from model.spec.artifact import MAX_ARRAYS_BYTES, AttentionKind, Precision, attention_layers, attention_output
from model.spec.config import ModelConfig
from model.spec.golden import read_ids

Float32 = npt.NDArray[np.float32]
Int64 = npt.NDArray[np.int64]

ROW_SUM_TOLERANCE = 1e-5
"""The largest error of a row's sum, in any precision: softmax is always float32."""


@dataclass(frozen=True, slots=True)
class AttentionTolerance:
    """The largest error of a weight and of rows on average.

    `absolute` bounds every weight. `relative` bounds the mean total variation distance ½Σ|p - q| of a case's rows, as a
    fraction of the golden rows' mean distance from uniform ones.
    """

    absolute: float
    relative: float


ATTENTION_TOLERANCES: Mapping[Precision, AttentionTolerance] = {
    Precision.FP32: AttentionTolerance(absolute=1e-5, relative=1e-4),
    Precision.BF16: AttentionTolerance(absolute=1.0, relative=0.03),
    Precision.INT8: AttentionTolerance(absolute=1.0, relative=0.1),
    Precision.INT4: AttentionTolerance(absolute=1.0, relative=0.5),
}
"""The tolerance of each precision that can be served.

Float32 reaches 1.5e-6. Quantization may swap two keys with nearly equal scores, so single weights are not bounded. The
presets' trained models reach at most 0.02 in int8 and 0.09 in int4, twelve layers of random weights, whose rows are
almost uniform, 0.06 and 0.37. Uniform rows have 1 by definition, swapped heads 0.7 and more.
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
        """Mean distance of the rows from uniform ones over the visible keys."""
        return _mean_distance(self.weights, {name: _uniform(name, matrix) for name, matrix in self.weights.items()})

    @property
    def inputs(self) -> dict[str, Int64]:
        """The explain graph's inputs."""
        inputs = {"input_ids": self.sequence[np.newaxis]}
        return inputs | {"source_ids": self.source[np.newaxis]} if self.source.size else inputs


@dataclass(frozen=True, slots=True)
class AttentionResult:
    """The comparison of one case, over all its matrices.

    `relative_distance` is the mean distance of rows divided by the case's spread, or 0 if both are 0, as with one
    token. `looks_ahead` means that a decoder query has weight on a later key.
    """

    name: str
    max_abs_error: float
    relative_distance: float
    max_row_sum_error: float
    looks_ahead: bool
    tolerance: AttentionTolerance
    passed: bool


def compare(case: AttentionCase, weights: Mapping[str, Float32], tolerance: AttentionTolerance) -> AttentionResult:
    """Compares an explain graph's weights with a case's; a missing matrix, a wrong shape or a NaN fails."""
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
    """Mean total variation distance of all rows of all matrices of `others`."""
    rows = [np.abs(weights[name].astype(np.float64) - matrix).sum(axis=-1).ravel() for name, matrix in others.items()]
    return 0.5 * float(np.concatenate(rows).mean())


def _uniform(name: str, matrix: Float32) -> Float32:
    """Rows with equal weights on all visible keys."""
    is_causal = name.startswith(f"{AttentionKind.DECODER}_")
    visible = np.tri(*matrix.shape[1:]) if is_causal else np.ones(matrix.shape[1:])
    return np.broadcast_to(visible / visible.sum(axis=-1, keepdims=True), matrix.shape).astype(np.float32)


def save(path: Path, cases: Iterable[AttentionCase]) -> None:
    """Writes attention.npz: flat arrays and a JSON list of names."""
    arrays: dict[str, npt.NDArray[np.generic]] = {}
    names = []
    for number, case in enumerate(cases):
        names.append(case.name)
        arrays |= {f"{number}/sequence": case.sequence, f"{number}/source": case.source}
        arrays |= {f"{number}/{name}": matrix for name, matrix in case.weights.items()}
    save_arrays(path, arrays, names)


def load(path: Path, config: ModelConfig) -> tuple[AttentionCase, ...]:
    """Reads attention.npz, and checks that its cases fit the model `config`.

    Raises:
        ValueError: when it is not a well-formed set of cases, is empty, or a case does not fit.
    """
    try:
        with ArrayFile(path, MAX_ARRAYS_BYTES) as arrays:
            cases = tuple(
                _read_case(arrays, number, str(name), config) for number, name in enumerate(arrays.read_index())
            )
    except Exception as error:  # archive, decompressors, NumPy and JSON raise various errors
        raise ValueError(f"{path.name} is not a set of golden attention: {error}") from error
    if not cases:
        raise ValueError(f"{path.name}: it holds no case")
    return cases


def _read_case(arrays: ArrayFile, number: int, name: str, config: ModelConfig) -> AttentionCase:
    """Unpacks tokens and matrices, each only if its size fits the model."""
    limits: dict[str, tuple[int, int] | None] = {
        "sequence": (config.context, config.vocab_size),
        "source": (config.source_context, config.source_vocab_size),
    }
    if not config.is_encoder_decoder:
        limits["source"] = None
        if arrays.shape(f"{number}/source", np.integer, 1) != (0,):
            raise ValueError(f"{name}: has a source, the model is {config.architecture}")
    ids = {rows: read_ids(arrays, f"{number}/{rows}", f"{name}: {rows}", limit) for rows, limit in limits.items()}
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
