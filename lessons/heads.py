"""Lesson: several heads; concat and W^O, and heads that look at different things."""

from __future__ import annotations

import torch
from torch import Tensor

from lessons import small
from lessons.frame import Lesson, Page
from lessons.tasks import Mirror
from model.evaluate import exact_match
from model.nn import reference
from model.nn.attention import SelfAttention, attend, join_heads
from model.nn.transformer import build
from model.spec.artifact import AttentionKind
from model.spec.tokenizer import BOS_ID

_STEPS = 250
_NUM_SOURCES = 40
_SHOWN = 6


def sum_of_heads(module: SelfAttention, heads: Tensor) -> Tensor:
    """Σᵢ headᵢ Wᵢ^O, each head with its own rows of W^O: `[1, H, S, D]` → `[S, d]`."""
    rows = torch.split(module.output.weight.T, module.head_dim)
    return torch.stack([head @ row for head, row in zip(heads[0], rows, strict=True)]).sum(0)


def fill(page: Page) -> None:
    """Fills the page."""
    page.say("Several heads share the width of one. In the notes' example one head has this width:")
    width = page.given("head_width")
    config = small.config(d_model=width, num_heads=4)
    module = SelfAttention(config)
    with torch.no_grad():
        for shift, linear in enumerate((module.qkv, module.output)):
            linear.weight.copy_(small.normal(page.seed + shift, *linear.weight.shape, deviation=width**-0.5))
        x = small.normal(page.seed + 2, 1, 5, width)
        heads = page.call(attend, *module.split(page.call(module.project, x)))
        joined = page.call(join_heads, heads)
        merged = page.call(module.merge, joined)
    page.say(
        "Here {heads} heads of {head} numbers, each with its own W^q, W^k and W^v, cost together what one of {width} "
        "costs. Their outputs are concatenated to {joined} numbers, and W^O mixes them.",
        heads=config.num_heads,
        head=config.head_dim,
        width=width,
        joined=joined.shape[-1],
    )
    page.show("Concat(heads) W^O, the first word, first numbers", merged[0, 0, :_SHOWN], 4)
    page.show("the sum of each head's share, the same", sum_of_heads(module, heads)[0, :_SHOWN], 4)
    page.code(sum_of_heads)
    _trained(page)
    page.look(
        "One head divides its weight between both places, and hands over one mixture of both symbols. Of two heads "
        "one follows the diagonal and the other the mirrored one. Training found these roles by itself, with this "
        "seed; with another, both may share both places."
    )


def _trained(page: Page) -> None:
    """Cross-attention of models with one head and with two."""
    task = Mirror(num_symbols=4, length=6, seed=page.seed)
    sources = task.held_out(_NUM_SOURCES)
    places = [str(place) for place in range(1, task.length + 1)]
    rows = []
    for num_heads in (1, 2):
        model = build(small.pair_config(task.vocab_size, num_heads=num_heads), page.seed)
        losses = page.call(small.train, model, task.batch, steps=_STEPS, seed=page.seed)
        found = torch.stack(
            [
                page.call(reference.attention, model, [BOS_ID, *pair.target], pair.source)[AttentionKind.CROSS][0]
                for pair in sources
            ]
        ).mean(0)[:, : task.length, : task.length]
        right = page.call(exact_match, model, sources)
        for head, weights in enumerate(found, start=1):
            name = f"head {head} of {num_heads}"
            own, mirrored = weights.diagonal().mean(), weights.flip(-1).diagonal().mean()
            rows.append((name, own, mirrored, losses[_STEPS // 2], losses[-1], right))
            page.heat(name, places, places, weights)
    page.say(
        "What are several heads good for? Each output here must name two symbols of the source: the one at its own "
        "place and the one at the mirrored place. Models with one head and with two, equal in size, trained alike:"
    )
    header = ("cross-attention", "at its place", "mirrored", "loss half-way", "loss at the end", "right")
    page.table("trained", header, rows, 3)


LESSON = Lesson("heads", "Many heads", fill)
