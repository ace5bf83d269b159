"""Quantizes weights: int8 with a scale per column, int4 with one per block of a column."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from export.panels import INT4_ZERO

Float32 = npt.NDArray[np.float32]
Int8 = npt.NDArray[np.int8]
UInt8 = npt.NDArray[np.uint8]

BLOCK_SIZES = (32, 16)
"""Block sizes along a weight's input in int4: the first that divides it is used."""

ROW_LIMIT = np.float32(127.0)
"""The largest magnitude of a quantized activation, and of an int8 weight."""

# Candidates for the share of a block's largest magnitude that its scale covers; the least squared error decides.
_INT4_REACHES = np.linspace(1.0, 0.7, 7, dtype=np.float32)
# Quantized at once.
_COLUMNS = 8192


def quantize_columns(weight: Float32) -> tuple[Int8, Float32]:
    """A weight `[K, N]` as bytes `[K, N]` in ±127 and one scale per column `[N]`, its largest magnitude / 127."""
    codes, scales = np.empty(weight.shape, np.int8), np.empty(weight.shape[1], np.float32)
    for columns in _parts(weight.shape[1]):
        part = weight[:, columns]
        peaks = np.abs(part).max(axis=0)
        scales[columns] = np.where(peaks > 0, peaks, 1) / ROW_LIMIT
        codes[:, columns] = np.clip(np.rint(part / scales[columns]), -ROW_LIMIT, ROW_LIMIT)
    return codes, scales


def quantize_blocks(weight: Float32, block_size: int, least: np.floating[Any] | float = 0) -> tuple[UInt8, Float32]:
    """A weight `[K, N]` as nibbles `[N, K/block, block/2]`, low one first, and scales `[N, K/block]`; zero is 8.

    A block's extreme maps to about -8, since four bits reach one step further below zero than above. Several scales are
    tried: clipping the extremes a little gives the other weights a finer scale. None is below `least` in magnitude.
    """
    inner, outer = weight.shape
    packed = np.empty((outer, inner // block_size, block_size // 2), np.uint8)
    scales = np.empty((outer, inner // block_size), np.float32)
    for columns in _parts(outer):
        packed[columns], scales[columns] = _quantize_some_blocks(weight[:, columns], block_size, least)
    return packed, scales


def _quantize_some_blocks(weight: Float32, block_size: int, least: np.floating[Any] | float) -> tuple[UInt8, Float32]:
    inner, outer = weight.shape
    blocks = np.ascontiguousarray(weight.T).reshape(outer, inner // block_size, block_size)
    extremes = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=-1)[..., None], axis=-1)
    extremes = np.where(extremes == 0, np.float32(1), extremes)
    best_scales = np.empty_like(extremes)
    best_errors = np.full_like(extremes, np.inf)
    for reach in _INT4_REACHES:
        scales = (extremes * (-reach / INT4_ZERO)).astype(np.float32)
        errors = np.square(_nibbles(blocks, scales) * scales - blocks).sum(axis=-1, keepdims=True)
        is_better = errors < best_errors
        best_scales, best_errors = np.where(is_better, scales, best_scales), np.where(is_better, errors, best_errors)
    best_scales = np.copysign(np.maximum(np.abs(best_scales), np.float32(least)), best_scales)
    codes: UInt8 = (_nibbles(blocks, best_scales) + INT4_ZERO).astype(np.uint8)
    packed: UInt8 = codes[..., ::2] | np.left_shift(codes[..., 1::2], np.uint8(4))
    return packed, best_scales[..., 0]


def _parts(num_columns: int) -> Iterator[slice]:
    """Columns that are quantized together: intermediate results of a large vocabulary's head are large, too."""
    for start in range(0, num_columns, _COLUMNS):
        yield slice(start, start + _COLUMNS)


def _nibbles(blocks: Float32, scales: Float32) -> Float32:
    nibbles: Float32 = np.clip(np.rint(blocks / scales), -INT4_ZERO, INT4_ZERO - 1)
    return nibbles


def block_size_of(inner: int) -> int | None:
    """The block size for weights with so many inputs; None if there is none."""
    return next((size for size in BLOCK_SIZES if inner % size == 0), None)
