"""Lesson: the block; residual, norm and feed-forward network, and why post-norm needs a warm-up."""

from __future__ import annotations

import math

import numpy as np
import torch
from matplotlib.figure import Figure

from lessons import small
from lessons.block_parts import parts
from lessons.frame import Lesson, Page
from lessons.tasks import FIRST_ID
from loadtest import style
from model.data.batches import Batch
from model.nn.transformer import Transformer, build
from model.training.loop import batch_loss

_SYMBOLS, _PERIOD, _LENGTH = 8, 4, 16
_DEPTH, _STEPS, _RATE = 10, 100, 1e-2
_HELD_OUT = 1 << 30
# Name, norm placement, share of the steps with a rising rate.
_RUNS = (
    ("post-norm, no warm-up", "post", 0.0),
    ("post-norm, warm-up", "post", 0.5),
    ("pre-norm, no warm-up", "pre", 0.0),
)


def gradient_norms(model: Transformer, batch: Batch) -> list[float]:
    """The norm of the loss's gradient in each layer's weights."""
    model.zero_grad()
    batch_loss(model, batch).backward()  # type: ignore[no-untyped-call]
    layers = [[each.grad for each in layer.parameters() if each.grad is not None] for layer in model.layers]
    return [float(torch.stack([gradient.norm() for gradient in layer]).norm()) for layer in layers]


def fill(page: Page) -> None:
    """Fills the page."""
    page.say(
        "A block is attention and a feed-forward network, each in a residual branch with a norm. The residual is a "
        "way around the branch, for the input and for the gradient."
    )
    parts(page)
    page.say(
        "The paper normalizes after the sum, so no plain way leads through all layers; most later models normalize "
        "before the branch. Here {layers} layers train on symbols that repeat, for {steps} steps, all with the same "
        "peak rate. The loss of guessing is ln {symbols} = {floor:.3f} nats.",
        layers=_DEPTH,
        steps=_STEPS,
        symbols=_SYMBOLS,
        floor=math.log(_SYMBOLS),
    )
    page.code(gradient_norms)
    curves: dict[str, list[float]] = {}
    norms: dict[str, list[float]] = {}
    for name, placement, warmup in _RUNS:
        config = small.config(vocab_size=FIRST_ID + _SYMBOLS, num_layers=_DEPTH, norm_placement=placement)
        model = build(config, page.seed)
        norms.setdefault(f"{placement}-norm, untrained", page.call(gradient_norms, model, _batch(page.seed, _HELD_OUT)))
        curves[name] = page.call(
            small.train,
            model,
            lambda index: _batch(page.seed, index),
            steps=_STEPS,
            seed=page.seed,
            optimizer="adamw",
            learning_rate=_RATE,
            warmup_fraction=warmup,
            schedule="constant",
            gradient_clip=1e6,
        )
        norms[name] = page.call(gradient_norms, model, _batch(page.seed, _HELD_OUT))
    rows = [(name, *(losses[step] for step in (0, _STEPS // 10, _STEPS // 2, -1))) for name, losses in curves.items()]
    page.table("loss", ("training", "first", "a tenth", "half", "last"), rows, 3)
    rows = [(name, *(values[layer] for layer in (0, _DEPTH // 2, -1))) for name, values in norms.items()]
    page.table("gradient norm by layer", ("model", "lowest layer", "middle", "highest"), rows, 4)
    page.picture = style.to_svg(lambda: _draw(curves, norms), LESSON.name).decode()
    page.look(
        "Untrained, post-norm has its largest gradients in the highest layers. Without a warm-up the first steps are "
        "too large for these: the loss stays at that of guessing, and no gradient reaches the lower layers any more. A "
        "warm-up avoids that; pre-norm needs none."
    )


def _batch(seed: int, index: int) -> Batch:
    """Rows that repeat a random beginning."""
    start = np.random.default_rng((seed, index)).integers(_SYMBOLS, size=(32, _PERIOD))
    ids = FIRST_ID + np.tile(start, (1, _LENGTH // _PERIOD + 1))[:, : _LENGTH + 1]
    return Batch(ids[:, :-1], ids[:, 1:])


def _draw(curves: dict[str, list[float]], norms: dict[str, list[float]]) -> Figure:
    figure, (left, right) = style.new_figure(2)
    colors = dict(zip(curves, (style.RED, style.BLUE, style.GREEN), strict=True))
    untrained = {"post-norm, untrained": style.BLUE, "pre-norm, untrained": style.GREEN}
    for name, losses in curves.items():
        left.plot(losses, color=colors[name], label=name)
    for name, values in norms.items():
        layers = range(1, len(values) + 1)
        shown = [max(value, 1e-6) for value in values]
        if name in colors:
            right.plot(layers, shown, color=colors[name], marker="o")
        else:
            right.plot(layers, shown, color=untrained[name], linestyle="--", label=name)
    right.legend()
    left.set_xlabel("step")
    left.set_ylabel("loss in nats")
    right.set_xlabel("layer")
    style.logarithmic_axis(right, "norm of the gradient")
    left.legend()
    return figure


LESSON = Lesson("block", "The block", fill)
