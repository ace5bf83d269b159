"""Matrices in fewer bits, read back from a graph's files, from the layouts that `export.operators` documents.

Of the code that wrote them only the sizes of panels are shared.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import torch
from onnx import helper, numpy_helper
from torch import Tensor

from export.operators import DOMAIN
from export.panels import INT4_PANEL_COLUMNS, INT4_ZERO, PANEL_COLUMNS
from model.spec.artifact import Precision

Array = npt.NDArray[Any]
Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]

QUANTIZED = re.compile(r"_(int8|int4|bf16)$")
_INT8_LIMIT = 127
# Unpacked at once; whole panels of 16 and of 32.
_ROWS = 1024


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """A matrix `[N, K]` that a node multiplies rows by, or looks up rows in. `scales` are empty in bfloat16."""

    node: onnx.NodeProto
    tensor: onnx.TensorProto
    scales: Float32
    shape: tuple[int, int]
    folder: Path

    @property
    def precision(self) -> Precision:
        """That of its numbers."""
        return Precision(self.tensor.name.rpartition("_")[2])

    @property
    def stem(self) -> str:
        """The weight's name."""
        return QUANTIZED.sub("", self.tensor.name)

    @property
    def is_looked_up(self) -> bool:
        """Whether the node looks rows up; else it multiplies."""
        return str(self.node.op_type).endswith("Gather")

    @property
    def is_own(self) -> bool:
        """Whether an operator of our own reads it."""
        return bool(self.node.domain == DOMAIN)

    def parts(self) -> Iterator[tuple[slice, Float32]]:
        """Its rows in float32, some at a time."""
        codes = numpy_helper.to_array(self.tensor, base_dir=str(self.folder))
        if not self.scales.size:
            yield slice(0, self.shape[0]), codes.astype(np.float32)
            return
        name, scales = self.tensor.name, self.scales
        for rows, integers, steps in unpack(name, is_own=self.is_own, codes=codes, scales=scales, shape=self.shape):
            yield rows, (integers * steps).astype(np.float32)

    def read(self) -> Tensor:
        """All rows."""
        found = np.empty(self.shape, np.float32)
        for rows, values in self.parts():
            found[rows] = values
        return torch.from_numpy(found)

    def look_up(self, ids: Tensor) -> Tensor:
        """Rows `ids` `[...]` as `[..., K]`."""
        found = torch.empty(*ids.shape, self.shape[1])
        for rows, values in self.parts():
            is_here = (ids >= rows.start) & (ids < rows.stop)
            found[is_here] = torch.from_numpy(values)[ids[is_here] - rows.start]
        return found


def stored_matrices(folder: Path, file: str) -> Iterator[StoredMatrix]:
    """The matrices in fewer bits of a graph in `folder`, for each node that reads one."""
    graph = onnx.load(folder / file, load_external_data=False).graph
    stored = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        name = next((name for name in node.input if name in stored and QUANTIZED.search(name)), "")
        if not name:
            continue
        given = {entry.name: helper.get_attribute_value(entry) for entry in node.attribute}
        scales = np.empty(0, np.float32)
        if not name.endswith("bf16"):
            scales = numpy_helper.to_array(stored[node.input[2]], base_dir=str(folder)).astype(np.float32)
        outer, inner = (given.get("N", len(scales)), given["K"]) if scales.size else stored[name].dims
        yield StoredMatrix(node, stored[name], scales, (outer, inner), folder)


def unpack(
    name: str, *, is_own: bool, codes: Array, scales: Float32, shape: tuple[int, ...]
) -> Iterator[tuple[slice, Float64, Float64]]:
    """Codes and steps of a stored matrix `[N, K]`, whose product is the weight, for some rows after others.

    `is_own`: by our own operators.

    Raises:
        ValueError: if they are of another matrix.
    """
    (columns, unpack_rows), (outer, inner) = layout(name, is_own=is_own), shape
    for start in range(0, outer, _ROWS):
        rows = slice(start, min(start + _ROWS, outer))
        panels = slice(start // columns, -(-rows.stop // columns))
        some_scales = scales[rows if name.endswith("int8") else panels]
        yield rows, *unpack_rows(codes[panels], some_scales, (rows.stop - start, inner))


def layout(name: str, *, is_own: bool) -> tuple[int, Callable[..., tuple[Float64, Float64]]]:
    """Columns of a panel of codes, and what unpacks them."""
    if name.endswith("int8"):
        return PANEL_COLUMNS, _int8_codes
    return (INT4_PANEL_COLUMNS, _int4_codes) if is_own else (1, _nibbles)


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
    return codes.astype(np.float64) - INT4_ZERO, np.repeat(steps, inner // num_blocks, axis=1)


def _nibbles(packed: Array, scales: Float32, shape: tuple[int, ...]) -> tuple[Float64, Float64]:
    """Codes and steps `[N, K]` from `MatMulNBits`' bytes `[N, K / block, block / 2]` and scales `[N, K / block]`.

    Raises:
        ValueError: if they are of another matrix.
    """
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)
    if codes.shape != shape:
        raise ValueError(f"bytes {list(packed.shape)} hold no matrix {list(shape)}")
    steps = scales.reshape(len(packed), -1).astype(np.float64)
    return codes.astype(np.float64) - INT4_ZERO, np.repeat(steps, shape[1] // packed.shape[1], axis=1)
