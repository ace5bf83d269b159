"""Times of a whole prompt and of one more token with a cache, by length."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch

from lessons import small
from lessons.frame import Page
from model.nn.attention import attend_fused
from model.nn.transformer import build
from model.spec import cost
from model.spec.config import ModelConfig

LENGTHS = (128, 256, 512, 1024, 2048, 4096)
_ROUNDS = 5
_MIB = 2.0**20


def fastest(run: Callable[[], object]) -> float:
    """Milliseconds of the fastest of a few runs: what else runs here only adds."""
    seconds = []
    for _ in range(_ROUNDS):
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    return 1e3 * min(seconds)


def measure(page: Page, config: ModelConfig) -> list[tuple[Any, ...]]:
    """For each length: prompt and cached token in milliseconds, their exponents, memory of the scores, share of n²."""
    model = build(config, page.seed).eval()
    rows: list[tuple[Any, ...]] = []
    before: tuple[float, float] | None = None
    for length in LENGTHS:
        ids = torch.randint(config.vocab_size, (1, length), generator=torch.Generator().manual_seed(page.seed))
        q = small.normal(page.seed, 1, config.num_heads, 1, config.head_dim)
        k = small.normal(page.seed + 1, 1, config.num_heads, length, config.head_dim)

        def token(q: torch.Tensor = q, k: torch.Tensor = k) -> None:
            """One token through all layers; attention reads the cached keys and values."""
            model(torch.zeros(1, 1, dtype=torch.int64))
            for _ in range(config.num_layers):
                page.call(attend_fused, q, k, k)

        with torch.inference_mode():
            whole = fastest(lambda ids=ids: page.call(model, ids))  # type: ignore[misc]
            one = fastest(token)
        slopes = ["-", "-"]
        if before is not None:
            slopes = [f"{math.log2(now / then):.2f}" for now, then in zip((whole, one), before, strict=True)]
        before = whole, one
        flops = page.call(cost.forward_flops, config, length)
        memory = config.num_layers * config.num_heads * length**2 * 4 / _MIB
        rows.append((length, whole, slopes[0], one, slopes[1], memory, flops.attention / flops.total))
    return rows
