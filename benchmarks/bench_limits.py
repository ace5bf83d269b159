"""What this machine can do at most, for the rooflines of `benchmarks.bench`: read bandwidth and GEMM rates.

    python -m benchmarks.bench_limits [--threads N] [--quick]

The best of several tries, since a limit is not a median; the last line on stdout is
`{"read_gb_per_second", "gemm": {"fp32", "bf16", "int8"} in 10⁹ operations a second}`. A type that this torch cannot
multiply on this processor is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable

import torch
from torch import Tensor


def measure(threads: int, *, is_quick: bool) -> dict[str, object]:
    """The limits on so many threads."""
    torch.set_num_threads(threads)
    size, side, tries = (2**25, 512, 2) if is_quick else (2**27, 4096, 7)
    numbers = torch.ones(size)
    rows = numbers.view(-1, 1024)
    vector = torch.ones(1024)
    reads = min(_best(numbers.sum, tries), _best(lambda: rows @ vector, tries))
    rates = {}
    for name, multiply in _products(side).items():
        try:
            rates[name] = 2 * side**3 / _best(multiply, tries) / 1e9
        except RuntimeError:
            continue
    return {"read_gb_per_second": numbers.nbytes / reads / 1e9, "gemm": rates}


def _products(side: int) -> dict[str, Callable[[], Tensor]]:
    first, second = torch.randn(side, side), torch.randn(side, side)
    half_first, half_second = first.bfloat16(), second.bfloat16()
    whole_first, whole_second = (torch.randint(-128, 127, (side, side), dtype=torch.int8) for _ in range(2))
    return {
        "fp32": lambda: first @ second,
        "bf16": lambda: half_first @ half_second,
        "int8": lambda: torch._int_mm(whole_first, whole_second),
    }


def _best(call: Callable[[], object], tries: int) -> float:
    """Least seconds of some calls after one that does not count."""
    call()
    seconds = []
    for _ in range(tries):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_limits", description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--quick", action="store_true", help="small sizes: to see that it works")
    options = parser.parse_args()
    print(json.dumps(measure(options.threads, is_quick=options.quick)))


if __name__ == "__main__":
    main()
