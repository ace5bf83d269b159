"""Upper limits of a device, for rooflines: read bandwidth and rates of matrix products, by torch.

    python -m benchmarks.frame.limits [--device cpu|cuda] [--threads N] [--quick]

The best of several tries of several ways to read memory and several sizes of products, since a limit is no median.
Random numbers: zeros draw less power on a GPU. Printed is one JSON object, `{"read_gb_per_second": [[bytes, rate], …],
"gemm": {precision: 10⁹ operations a second}}`; precisions that torch cannot multiply here are left out. Caches hold the
weights of small models, so memory is read in pieces of many sizes, again and again.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable

import torch

# Bytes that are read, in ascending order, and sides of matrices.
_CPU_SIZES = (tuple(1 << bits for bits in range(24, 30)), (4096,))
_CUDA_SIZES = ((2 << 30,), (4096, 8192))
_QUICK_SIZES = ((1 << 25,), (512,))
_WARM_UPS = 3
_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def measure(device: str, threads: int, *, is_quick: bool) -> dict[str, object]:
    """The limits of a device."""
    torch.set_num_threads(threads)
    sizes, sides = _QUICK_SIZES if is_quick else _CUDA_SIZES if device == "cuda" else _CPU_SIZES
    tries = 2 if is_quick else 7
    numbers = torch.randn(sizes[-1] // 4, device=device)
    reads = [[num_bytes, _read_rate(numbers[: num_bytes // 4], device, tries) / 1e9] for num_bytes in sizes]
    rates: dict[str, float] = {}
    for side in sides:
        for name, multiply in _products(device, side).items():
            try:
                rate = 2 * side**3 / _best(multiply, device, tries) / 1e9
            except RuntimeError:
                continue
            rates[name] = max(rate, rates.get(name, 0.0))
    return {"read_gb_per_second": reads, "gemm": rates}


def _read_rate(numbers: torch.Tensor, device: str, tries: int) -> float:
    """Bytes a second."""
    target, rows, vector = torch.empty_like(numbers), numbers.view(-1, 1024), torch.randn(1024, device=device)
    ways: list[tuple[Callable[[], object], int]] = [(numbers.sum, 1), (lambda: rows @ vector, 1)]
    if device == "cuda":
        ways.append((lambda: target.copy_(numbers), 2))
    return max(factor * numbers.nbytes / _best(call, device, tries) for call, factor in ways)


def _products(device: str, side: int) -> dict[str, Callable[[], object]]:
    first, second = (torch.randn(side, side, device=device) for _ in range(2))
    found: dict[str, Callable[[], object]] = {}
    for name, dtype in _DTYPES.items():
        if device == "cuda" or name != "fp16":
            halves = first.to(dtype), second.to(dtype)
            found[name] = lambda halves=halves: torch.mm(*halves)  # type: ignore[misc]
    if device == "cpu":
        whole = [torch.randint(-128, 127, (side, side), dtype=torch.int8) for _ in range(2)]
        found["int8"] = lambda: torch._int_mm(*whole)
    return found


def _best(call: Callable[[], object], device: str, tries: int) -> float:
    """Least seconds, after warm-ups."""
    seconds = []
    for _ in range(_WARM_UPS + tries):
        began = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return min(seconds[_WARM_UPS:])


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.frame.limits", description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--quick", action="store_true", help="small sizes: to see that it works")
    options = parser.parse_args()
    print(json.dumps(measure(options.device, options.threads, is_quick=options.quick)))


if __name__ == "__main__":
    main()
