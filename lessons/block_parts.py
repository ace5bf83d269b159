"""The parts of a block: the norm, the feed-forward network and the residual branches, on two vectors."""

from __future__ import annotations

import torch
from torch import nn

from lessons import small
from lessons.frame import Page
from model.nn.layers import FeedForward, Residual, make_norm


def parts(page: Page) -> None:
    """The norm, the feed-forward network and the two residuals, on two vectors."""
    width = 8
    x = 3.0 * small.normal(page.seed, 2, width) + 1.0
    post, pre = (small.config(d_model=width, num_heads=1, norm_placement=place) for place in ("post", "pre"))
    with torch.no_grad():
        normed = page.call(make_norm(post), x)
        rows = [
            (name, *(each for row in values for each in (row.mean(), row.std(correction=0))))
            for name, values in (("x", x), ("LayerNorm(x)", normed))
        ]
        page.table("mean μ and deviation σ of two words", ("vector", "μ", "σ", "μ, second", "σ, second"), rows, 3)
        network = _random(FeedForward(post), page.seed)
        for name, config in (("after: norm(x + f(x))", post), ("before: x + f(norm(x))", pre)):
            out = page.call(Residual(config), x[None], network)
            page.show(f"the first word, norm {name}", out[0, 0], 3)


def _random(module: nn.Module, seed: int) -> nn.Module:
    for shift, parameter in enumerate(module.parameters()):
        parameter.copy_(small.normal(seed + shift + 1, *parameter.shape, deviation=0.3))
    return module
