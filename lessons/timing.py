"""Times of a whole prompt and of one more token with a cache, by length."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lessons.frame import Page
from model.nn.attention import SelfAttention, attend_fused, join_heads
from model.nn.transformer import DecoderOnly, Transformer, build
from model.spec import cost
from model.spec.config import ModelConfig

LENGTHS = (128, 256, 512, 1024, 2048, 4096)
_ROUNDS = 7
_MIB = 2.0**20


def seconds_of(run: Callable[[], object]) -> float:
    """The time of one run."""
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def measure(page: Page, config: ModelConfig) -> list[tuple[Any, ...]]:
    """For each length: prompt and cached token in milliseconds, their exponents, memory of the scores, share of n².

    Each time is the fastest of interleaved rounds: what else runs on the machine only adds.
    """
    model = build(config, page.seed).eval()
    if not isinstance(model, DecoderOnly):
        raise TypeError("a model of one family is expected")
    runs = {length: (_whole(page, model, length), _token(page, model, length)) for length in LENGTHS}
    fastest = dict.fromkeys(LENGTHS, (math.inf, math.inf))
    with torch.inference_mode():
        for _ in range(_ROUNDS):
            for length, (whole, token) in runs.items():
                best = fastest[length]
                fastest[length] = min(best[0], seconds_of(whole)), min(best[1], seconds_of(token))
    rows: list[tuple[Any, ...]] = []
    for length in LENGTHS:
        half = fastest.get(length // 2)
        now = fastest[length]
        slopes = ["-", "-"] if half is None else [f"{math.log2(a / b):.2f}" for a, b in zip(now, half, strict=True)]
        flops = page.call(cost.forward_flops, config, length)
        memory = config.num_layers * config.num_heads * length**2 * 4 / _MIB
        milliseconds = [1e3 * each for each in now]
        share = flops.attention / flops.total
        rows.append((length, milliseconds[0], slopes[0], milliseconds[1], slopes[1], memory, share))
    return rows


def _whole(page: Page, model: Transformer, length: int) -> Callable[[], object]:
    """A whole prompt."""
    generator = torch.Generator().manual_seed(page.seed)
    ids = torch.randint(model.config.vocab_size, (1, length), generator=generator)
    return lambda: page.call(model, ids)


def _token(page: Page, model: DecoderOnly, length: int) -> Callable[[], object]:
    """The last of so many tokens through all layers: its keys and values join those cached of the tokens before it."""
    ids = torch.randint(model.config.vocab_size, (1, length), generator=torch.Generator().manual_seed(page.seed))
    cached: dict[nn.Module, tuple[Tensor, Tensor]] = {}

    def attend_self(module: SelfAttention, x: Tensor) -> Tensor:
        q, k, v = module.split(page.call(module.project, x))
        if module not in cached:
            cached[module] = k, v
            return join_heads(attend_fused(q, k, v, is_causal=True))
        keys, values = cached[module]
        keys[:, :, -1:], values[:, :, -1:] = k, v
        return join_heads(page.call(attend_fused, q, keys, values))

    def read(first: int) -> Tensor:
        hidden = model.embed(ids[:, first:], torch.arange(first, length))
        for layer in model.layers:
            hidden = layer(hidden, attend_self)
        return model.unembed(model.final_norm(hidden[:, -1:]))

    with torch.inference_mode():
        read(0)
    return lambda: read(length - 1)
