"""Compares every weight that an artifact's files store with the checkpoint's.

The files are read back, and quantized matrices dequantized, from the layouts that `export.operators` documents; nothing
is shared with the code that quantized them. Floats must be equal. A quantized weight must be as near as rounding leaves
it: half a step of its own scale, or beyond the end of the range where int4 clips a block's extremes.

Not compared: scales of int8 K/V, which are calibrated and have no counterpart in the checkpoint, and small constants of
the graph's own arithmetic.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import torch
from onnx import numpy_helper
from torch import Tensor

from export.operators import DOMAIN, INT4_PANEL_COLUMNS, PANEL_COLUMNS
from model.nn.transformer import Transformer
from model.spec.artifact import Precision

Array = npt.NDArray[Any]
Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]

_ROUNDED = {Precision.FP16: torch.float16, Precision.BF16: torch.bfloat16}
QUANTIZED = re.compile(r"_(int8|int4)$")
_SCALE = "_scale"
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
_INT8_LIMIT = 127
_INT4_ZERO = 8
# Of a matrix's largest weight: rows below it have scales that float32 or float16 cannot represent well.
_NEGLIGIBLE = 1e-20
# Compared at once; whole panels of 16 and of 32.
_ROWS = 1024


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


def compare(folder: Path, files: Sequence[str], model: Transformer, precision: Precision) -> StoredWeights:
    """Compares all tensors of the graphs `files` in `folder` with the weights of `model`.

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
        for name, weight, tensor_problem, loss in stored.compare(known, _ROUNDED.get(precision, torch.float32)):
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
        self, known: Mapping[str, Tensor], dtype: torch.dtype
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
                problem, loss = self._compare_quantized(name, _float32(weight))
                yield stem, weight, problem, loss
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

    def _compare_quantized(self, name: str, weight: Float32) -> tuple[str, float]:
        """What is wrong with a matrix `[N, K]` in codes and scales, and the relative RMS of its errors."""
        kind, scale = name[-4:], QUANTIZED.sub(_SCALE, name)
        if scale not in self.tensors:
            return f"there is no {scale}", 0.0
        if any(list(node.input[1:3]) != [name, scale] for node in self.nodes if {name, scale} & set(node.input)):
            return f"a node reads it without {scale}", 0.0
        codes, scales = self._values(name), self._values(scale).astype(np.float32)
        is_own = all(node.domain == DOMAIN for node in self.nodes if name in node.input)
        if len(codes) != -(-len(weight) // _layout(name, is_own=is_own)[0]):
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
                    is_end = (integers == -_INT4_ZERO) | (integers == _INT4_ZERO - 1)
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


def unpack(
    name: str, *, is_own: bool, codes: Array, scales: Float32, shape: tuple[int, ...]
) -> Iterator[tuple[slice, Float64, Float64]]:
    """Codes and steps of a stored matrix `[N, K]`, whose product is the weight, for some rows after others.

    `is_own`: by our own operators.

    Raises:
        ValueError: if they are of another matrix.
    """
    (columns, unpack_rows), (outer, inner) = _layout(name, is_own=is_own), shape
    for start in range(0, outer, _ROWS):
        rows = slice(start, min(start + _ROWS, outer))
        panels = slice(start // columns, -(-rows.stop // columns))
        some_scales = scales[rows if name.endswith("int8") else panels]
        yield rows, *unpack_rows(codes[panels], some_scales, (rows.stop - start, inner))


def _layout(name: str, *, is_own: bool) -> tuple[int, Callable[..., tuple[Float64, Float64]]]:
    """Columns of a panel, and what unpacks them."""
    if name.endswith("int8"):
        return PANEL_COLUMNS, _int8_codes
    return (INT4_PANEL_COLUMNS, _int4_codes) if is_own else (1, _nibbles)


def _is_among(weight: Tensor, others: Iterable[Tensor]) -> bool:
    return any(weight.shape == other.shape and torch.equal(weight, other) for other in others)


def _float32(weight: Tensor) -> Float32:
    values: Float32 = weight.detach().float().cpu().numpy()
    return values


def _int8_codes(panels: Array, scales: Float32, shape: tuple[int, ...]) -> tuple[Float64, Float64]:
    """Codes and steps `[N, K]` from panels `[⌈N / 32⌉, ⌈K / 4⌉, 32, 4]` and scales `[N]`.

    Raises:
        ValueError: if the panels are of another matrix, or their padding is not zero.
    """
    outer, inner = shape
    codes = panels.transpose(0, 2, 1, 3).reshape(panels.shape[0] * panels.shape[2], -1)
    found = codes[:outer, :inner].astype(np.float64)
    is_padded = not codes[outer:].any() and not codes[:, inner:].any()
    if found.shape != shape or not is_padded or np.abs(found).max(initial=0) > _INT8_LIMIT:
        raise ValueError(f"panels {list(panels.shape)} hold no matrix {list(shape)}")
    return found, scales[:, None].astype(np.float64)


def _int4_codes(panels: Array, scales: Float32, shape: tuple[int, ...]) -> tuple[Float64, Float64]:
    """Codes and steps `[N, K]` from panels `[⌈N / 16⌉, K / 32, 4, 16, 4]` and scales `[⌈N / 16⌉, K / 32, 16]`.

    Raises:
        ValueError: if they are of another matrix.
    """
    outer, inner = shape
    num_panels, num_blocks, _, columns, _ = panels.shape
    both = np.stack([panels & 15, panels >> 4], axis=3)  # [panel, block, group of eight, half, column, k]
    codes = both.transpose(0, 4, 1, 2, 3, 5).reshape(num_panels * columns, -1)[:outer]
    if codes.shape != shape:
        raise ValueError(f"panels {list(panels.shape)} hold no matrix {list(shape)}")
    steps = scales.transpose(0, 2, 1).reshape(num_panels * columns, num_blocks)[:outer].astype(np.float64)
    return codes.astype(np.float64) - _INT4_ZERO, np.repeat(steps, inner // num_blocks, axis=1)


def _nibbles(packed: Array, scales: Float32, shape: tuple[int, ...]) -> tuple[Float64, Float64]:
    """Codes and steps `[N, K]` from `MatMulNBits`' bytes `[N, K / block, block / 2]` and scales `[N, K / block]`.

    Raises:
        ValueError: if they are of another matrix.
    """
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)
    if codes.shape != shape:
        raise ValueError(f"bytes {list(packed.shape)} hold no matrix {list(shape)}")
    steps = scales.reshape(len(packed), -1).astype(np.float64)
    return codes.astype(np.float64) - _INT4_ZERO, np.repeat(steps, shape[1] // packed.shape[1], axis=1)
