"""Compares every weight that an artifact's files store with the checkpoint's.

The files are read back, and quantized matrices dequantized (`export.stored_matrix`). Floats must be equal, weights in
bfloat16 the checkpoint's as PyTorch rounds them. A quantized weight must be as near as rounding leaves it: half a step
of its own scale, or beyond the end of the range where int4 clips a block's extremes.

Not compared: scales of int8 K/V, which are calibrated and have no counterpart in the checkpoint, and small constants of
the graph's own arithmetic.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import torch
from onnx import numpy_helper
from torch import Tensor

from export.operators import DOMAIN
from export.panels import INT4_BLOCK, INT4_ZERO
from export.stored_matrix import QUANTIZED, layout, unpack
from model.nn.transformer import Transformer
from model.spec.artifact import Precision

Array = npt.NDArray[Any]
Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]

_SCALE = "_scale"
_TOKENS = "tokens.weight"
_MATRIX_DIMENSIONS = 2
# Endings that tell a rearranged copy of a weight from the weight.
REARRANGED = re.compile(r"_(transposed|rows)$")
_SCORE_VECTOR = re.compile(r"_residual\.score_vector$")
_OF_INT8_KV = re.compile(r"^((cross_)?(key|value)_\d+(_scale|\.steps_in_one)|no_sinks)$")
# A graph's own constants (shapes, axes, epsilons) have few values.
_MOST_CONSTANTS = 8
# In steps. Codes are rounded with a float32 scale, of which int4 stores the nearest float16.
_HALF_STEP = 0.505
# The coarsest scale of int4 covers 0.7 of a block's extreme: 8 / 0.7 - 7 steps are cut off at most.
_MOST_CLIPPED = 4.5
# Of a matrix's largest weight: rows below it have scales that float32 or float16 cannot represent well.
_NEGLIGIBLE = 1e-20


class StoredWeightsError(Exception):
    """Stored weights are not the checkpoint's; `problems` lists each."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(problems))


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """What was compared: `num_tensors` stored tensors, and the quantized one that lost the most.

    `max_relative_rms` is the root mean square of its errors, divided by that of its values; 0 without quantized ones.
    """

    num_tensors: int
    max_relative_rms: float = 0.0
    worst: str = ""


def compare(
    folder: Path,
    files: Sequence[str],
    model: Transformer,
    dtype: torch.dtype = torch.float32,
    precision: Precision = Precision.FP32,
) -> StoredWeights:
    """Compares all tensors of the graphs `files` in `folder` with the weights of `model`.

    `dtype` is that of all weights which are not quantized, which a CUDA graph's are not; `precision` that of matrices.

    One tensor is in memory at a time, and dequantized in part. Every weight of the model must be in at least one graph,
    but for biases of zeros.

    Raises:
        StoredWeightsError: naming each tensor that differs, is unknown, or is missing.
    """
    problems: list[str] = []
    known = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    found: dict[int, Tensor] = {}
    losses: dict[str, float] = {}
    num_tensors = 0
    for file in files:
        graph = onnx.load(folder / file, load_external_data=False).graph
        stored = _Stored(folder, {tensor.name: tensor for tensor in graph.initializer}, graph.node)
        for name, weight, tensor_problem, loss in stored.compare(known, dtype, precision):
            num_tensors += 1
            problems += [f"{file}: {name}: {tensor_problem}"] if tensor_problem else []
            found |= {} if weight is None else {weight.data_ptr(): weight}
            losses[name] = max(loss, losses.get(name, 0.0))
    missing = (
        (name, weight)
        for name, weight in model.named_parameters()
        # The exporter leaves out a sum with zeros, as with a published translation model's bias of the logits.
        if weight.data_ptr() not in found and not (name.endswith("bias") and not weight.any())
    )
    # The exporter stores equal tensors once, as the norms of a fresh model.
    problems += [f"{name} is in no graph" for name, weight in missing if not _is_among(weight, found.values())]
    if problems:
        raise StoredWeightsError(problems)
    worst = max(losses, key=lambda name: losses[name], default="")
    return StoredWeights(num_tensors, losses.get(worst, 0.0), worst if losses.get(worst) else "")


@dataclass(frozen=True, slots=True)
class _Stored:
    """A graph's stored tensors, whose values are read from `folder` one by one."""

    folder: Path
    tensors: Mapping[str, onnx.TensorProto]
    nodes: Sequence[onnx.NodeProto]

    def compare(
        self, known: Mapping[str, Tensor], dtype: torch.dtype, precision: Precision
    ) -> Iterator[tuple[str, Tensor | None, str, float]]:
        """Each tensor's name, the checkpoint's weight, what is wrong with it, and the relative RMS of its errors."""
        for name in self.tensors:
            if _OF_INT8_KV.search(name) or (name.endswith(_SCALE) and self._codes_of(name)):
                continue
            quantized = QUANTIZED.search(name)
            stem = _SCORE_VECTOR.sub(".score.vector", REARRANGED.sub("", QUANTIZED.sub("", name)))
            weight = known.get(stem)
            if weight is None:
                if int(np.prod(self.tensors[name].dims)) > _MOST_CONSTANTS:
                    yield name, None, "the checkpoint has no weight of this name", 0.0
                continue
            if quantized:
                is_bf16 = quantized[1] == "bf16"
                problem, loss = (self._compare_bf16 if is_bf16 else self._compare_quantized)(name, weight.detach())
                yield stem, weight, problem, loss
            elif precision is not Precision.FP32 and _is_matrix(stem, weight, precision):
                yield stem, weight, f"is not in {precision}", 0.0
            else:
                yield stem, weight, self._compare_floats(name, weight.detach().to(dtype)), 0.0

    def _codes_of(self, scale: str) -> list[str]:
        """The quantized matrix that a tensor is the scales of, if it is."""
        stem = scale.removesuffix(_SCALE)
        return [name for name in (f"{stem}_int8", f"{stem}_int4") if name in self.tensors]

    def _values(self, name: str) -> Array:
        return numpy_helper.to_array(self.tensors[name], base_dir=str(self.folder))

    def _compare_floats(self, name: str, weight: Tensor) -> str:
        values, wanted = self._values(name).astype(np.float32), _float32(weight)
        if name.endswith("_transposed"):
            values = values.T
        if values.size != wanted.size or (values.ndim == wanted.ndim and values.shape != wanted.shape):
            return f"has shape {list(values.shape)}, the checkpoint's {list(wanted.shape)}"
        num_wrong = int((values.reshape(wanted.shape) != wanted).sum())
        return f"{num_wrong} of {wanted.size} values are not the checkpoint's" if num_wrong else ""

    def _compare_bf16(self, name: str, weight: Tensor) -> tuple[str, float]:
        """What is wrong with a matrix in bfloat16, and the relative RMS of its rounding."""
        rounded = weight.to(torch.bfloat16)
        loss = float(torch.linalg.norm(weight - rounded) / torch.linalg.norm(weight)) if weight.any() else 0.0
        return self._compare_floats(name, rounded), loss

    def _compare_quantized(self, name: str, tensor: Tensor) -> tuple[str, float]:
        """What is wrong with a matrix `[N, K]` in codes and scales, and the relative RMS of its errors."""
        weight = _float32(tensor)
        kind, scale = name[-4:], QUANTIZED.sub(_SCALE, name)
        if scale not in self.tensors:
            return f"there is no {scale}", 0.0
        if any(list(node.input[1:3]) != [name, scale] for node in self.nodes if {name, scale} & set(node.input)):
            return f"a node reads it without {scale}", 0.0
        codes, scales = self._values(name), self._values(scale).astype(np.float32)
        is_own = all(node.domain == DOMAIN for node in self.nodes if name in node.input)
        if len(codes) != -(-len(weight) // layout(name, is_own=is_own)[0]):
            return f"has the layout {list(codes.shape)}, the checkpoint's is {list(weight.shape)}", 0.0
        floor = max(_NEGLIGIBLE * float(np.abs(weight).max(initial=0)), float(np.finfo(np.float32).tiny))
        num_wrong, squares = 0, np.zeros(2)
        try:
            for rows, integers, steps in unpack(name, is_own=is_own, codes=codes, scales=scales, shape=weight.shape):
                # In float64, so that the comparison itself rounds nothing.
                part = weight[rows].astype(np.float64)
                errors = part - integers * steps
                allowed = np.full_like(errors, _HALF_STEP)
                if kind == "int4":
                    is_end = (integers == -INT4_ZERO) | (integers == INT4_ZERO - 1)
                    allowed[is_end & (np.sign(errors) == np.sign(integers * steps))] = _MOST_CLIPPED
                # Written so that a NaN is wrong.
                num_wrong += int((~(np.abs(errors) <= allowed * np.abs(steps) + floor)).sum())
                squares += np.square(errors).sum(), np.square(part).sum()
        except ValueError as error:
            return f"has another layout: {error}", 0.0
        loss = float(np.sqrt(squares[0] / squares[1])) if squares[1] else 0.0
        if not num_wrong:
            return "", loss
        return f"{num_wrong} of {weight.size} values are further from the checkpoint's than rounding", loss


def _is_matrix(name: str, weight: Tensor, precision: Precision) -> bool:
    """Whether a weight is one that an export in fewer bits rewrites."""
    if weight.ndim != _MATRIX_DIMENSIONS or not name.endswith(".weight") or "positions" in name:
        return False
    # The table of a head that `MatMulNBits` computes stays as it is.
    return precision is not Precision.INT4 or not name.endswith(_TOKENS) or weight.shape[1] % INT4_BLOCK == 0


def _is_among(weight: Tensor, others: Iterable[Tensor]) -> bool:
    return any(weight.shape == other.shape and torch.equal(weight, other) for other in others)


def _float32(weight: Tensor) -> Float32:
    values: Float32 = weight.detach().float().cpu().numpy()
    return values
