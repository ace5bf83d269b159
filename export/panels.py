"""Matrices as the panels of the project's own operators, whose layouts `export.operators` describes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from onnx import TensorProto, helper

PANEL_COLUMNS = 32
GROUP_ROWS = 4
INT4_PANEL_COLUMNS = 16
INT4_BLOCK = 32
INT4_ZERO = 8
"""The code of an int4 weight of zero."""
BFLOAT16 = helper.tensor_dtype_to_np_dtype(TensorProto.BFLOAT16)


def pack_panels(weight: npt.NDArray[np.int8]) -> npt.NDArray[np.int8]:
    """A matrix `[K, N]` as the panels of `Int8Linear`, `[⌈N / 32⌉, ⌈K / 4⌉, 32, 4]`."""
    inner, outer = weight.shape
    padded = np.pad(weight, [(0, -inner % GROUP_ROWS), (0, -outer % PANEL_COLUMNS)])
    groups = padded.reshape(-1, GROUP_ROWS, padded.shape[1] // PANEL_COLUMNS, PANEL_COLUMNS)
    return np.ascontiguousarray(groups.transpose(2, 0, 3, 1))


def pack_int4_panels(codes: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Codes `[N, K / 32, 32]` of 0 to 15 as the panels of `Int4Linear`, `[⌈N / 16⌉, K / 32, 4, 16, 4]`."""
    outer, num_blocks, _ = codes.shape
    padded = np.pad(codes, [(0, -outer % INT4_PANEL_COLUMNS), (0, 0), (0, 0)])
    pairs = padded.reshape(-1, INT4_PANEL_COLUMNS, num_blocks, 4, 2, 4)
    both: npt.NDArray[np.uint8] = pairs[..., 0, :] | np.left_shift(pairs[..., 1, :], np.uint8(4))
    return np.ascontiguousarray(both.transpose(0, 2, 3, 1, 4))


def pack_int4_scales(scales: npt.NDArray[np.float32]) -> npt.NDArray[np.float16]:
    """Scales `[N, K / 32]` as those of `Int4Linear`, `[⌈N / 16⌉, K / 32, 16]`."""
    outer, num_blocks = scales.shape
    padded = np.pad(scales, [(0, -outer % INT4_PANEL_COLUMNS), (0, 0)])
    panels = padded.reshape(-1, INT4_PANEL_COLUMNS, num_blocks).transpose(0, 2, 1)
    return np.ascontiguousarray(panels).astype(np.float16)
