"""What the device does at most, by torch: bytes read and written a second, and products of large matrices.

The bandwidth is the best of three ways to move gigabytes: a copy, counted twice as it reads and writes; a sum; a
matrix times a vector, which is what decoding is made of. The rate of products is the best over the sides, of random
numbers, as zeros cost less power and so less time.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.clock import best_seconds
from benchmarks.gpu.results import Scribe
from benchmarks.gpu.roofline import Ceilings
from model.spec.artifact import Precision

NAME = "ceilings"
DTYPES = {Precision.FP32: torch.float32, Precision.FP16: torch.float16, Precision.BF16: torch.bfloat16}
_TRIES = 10


def run(bench: Bench, scribe: Scribe) -> None:
    """Measures, and leaves the figures for whoever compares with them."""
    plan, device = bench.plan, bench.device
    dtype = DTYPES[plan.timed_precision]
    moved = {name: size / best_seconds(call, device, _TRIES) for name, (call, size) in _moves(bench, dtype).items()}
    scribe.note("bytes_per_second", moved)
    scribe.say(", ".join(f"{name} {rate / 1e9:.0f} GB/s" for name, rate in moved.items()))
    rates: dict[str, dict[str, float]] = {}
    for precision in dict.fromkeys((*plan.precisions, plan.timed_precision)):
        found = rates[str(precision)] = {}
        for side in plan.gemm_sides:
            first, second = (torch.randn(side, side, device=device, dtype=DTYPES[precision]) for _ in range(2))
            out = torch.empty_like(first)
            seconds = best_seconds(_product(first, second, out), device, _TRIES)
            found[str(side)] = 2 * side**3 / seconds
        scribe.say(", ".join(f"{precision} {side}: {rate / 1e12:.2f} TFLOP/s" for side, rate in found.items()))
    scribe.note("flops_per_second", rates)


def ceilings_of(bench: Bench) -> Ceilings:
    """What the part found, for the precision whose speed is measured.

    Raises:
        RuntimeError: when it found nothing.
    """
    part = bench.journal.stages.get(NAME)
    if part is None or not part["is_complete"]:
        raise RuntimeError("the ceilings are not known: their part was not run to its end")
    figures = part["figures"]
    moved, rates = figures["bytes_per_second"], figures["flops_per_second"][str(bench.plan.timed_precision)]
    return Ceilings(max(moved.values()), max(rates.values()))


def _moves(bench: Bench, dtype: torch.dtype) -> dict[str, tuple[Callable[[], object], int]]:
    """Ways to move memory, and the bytes that each moves."""
    num = bench.plan.copy_bytes // dtype.itemsize
    source = torch.randn(num, device=bench.device, dtype=dtype)
    target = torch.empty_like(source)
    width = 1 << (num.bit_length() // 2)
    matrix = source[: num // width * width].view(-1, width)
    vector = torch.randn(width, device=bench.device, dtype=dtype)
    return {
        "copy": (lambda: target.copy_(source), 2 * source.nbytes),
        "sum": (source.sum, source.nbytes),
        "matrix times vector": (lambda: torch.mv(matrix, vector), matrix.nbytes),
    }


def _product(first: Tensor, second: Tensor, out: Tensor) -> Callable[[], object]:
    return lambda: torch.mm(first, second, out=out)
