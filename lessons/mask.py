"""Lesson: the mask; what a decoder learns that may look at the token it is to predict."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor, nn

from lessons import small
from lessons.frame import Lesson, Page
from lessons.notes import ON_YOUR_LIFE
from lessons.tasks import FIRST_ID
from model.data.batches import Batch
from model.nn.attention import Attend, Score, attention_weights, causal_mask, dot_scores
from model.nn.transformer import Transformer, build
from model.training.loop import batch_loss

_SYMBOLS = 8
_LENGTH = 12
_STEPS = 200


class Cheating(nn.Module):
    """A decoder without its mask: every position attends to all, the token that it is to predict included."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attend: Attend) -> Tensor:
        """`[B, T] int64` → logits `[B, T, V]`."""

        def unmasked(
            q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, score: Score = dot_scores, **_: bool
        ) -> Tensor:
            return attend(q, k, v, mask, is_causal=False, score=score)

        logits: Tensor = self.model(input_ids, unmasked)
        return logits


def fill(page: Page) -> None:
    """Fills the page."""
    page.say(
        "In training a decoder reads the whole target at once. The mask sets the scores above the diagonal to -∞ "
        "before the softmax: a word attends to itself and to those before it. The notes print -∞ there, the mask's "
        "result; the scores in its place are ours, the largest of all, so that the mask has something to remove. They "
        "name no width; we take their other example's."
    )
    scores, width = torch.from_numpy(page.given("on_your_life_scores")), page.given("head_width")
    q, k = torch.zeros(1, 1, len(scores), width, dtype=torch.float64), torch.eye(len(scores), width)[None, None]
    q[..., : len(scores)] = scores
    scaled = page.call(dot_scores, q, k.double())
    mask = page.call(causal_mask, len(scores))
    page.say("The notes add the mask before the division by √d_k, we add it behind: -∞ stays -∞.")
    page.show("masked scores / √d_k", scaled[0, 0].masked_fill(~mask, -math.inf), rows=ON_YOUR_LIFE)
    for name, used in (("before", None), ("after", mask)):
        weights = page.call(attention_weights, scaled, used)[0, 0]
        page.show(f"weights {name} the mask", weights, 3, ON_YOUR_LIFE)
        page.heat(f"{name} the mask", ON_YOUR_LIFE, ON_YOUR_LIFE, weights)
    page.say("And without it? Two decoders train on random symbols, which cannot be predicted:")
    page.code(Cheating)
    _cheat(page)
    page.look(
        "After the mask every weight above the diagonal is exactly zero: “on” cannot see “your”, “life” and “<end>”. "
        "The decoder without a mask has a low loss because it copies the answer. When it must predict, there is no "
        "answer to copy, and it is worse than a blind guess."
    )


def _cheat(page: Page) -> None:
    """Losses of an honest and a cheating decoder, in training and when they must predict."""

    def batch(index: int) -> Batch:
        shape = (32, _LENGTH + 1)
        ids = FIRST_ID + np.random.default_rng((page.seed, index)).integers(_SYMBOLS, size=shape)
        return Batch(ids[:, :-1], ids[:, 1:])

    config = small.config(vocab_size=FIRST_ID + _SYMBOLS, num_layers=1)
    rows = []
    for name, wrap in (("with the mask", lambda model: model), ("without", Cheating)):
        model = build(config, page.seed)
        wrapped = wrap(model)
        losses = page.call(small.train, wrapped, batch, steps=_STEPS, seed=page.seed)
        with torch.no_grad():
            honest = page.call(batch_loss, model, batch(_STEPS + 1))
        rows.append((name, losses[0], losses[-1], honest))
    header = ("decoder", "loss at first", "loss at the end", "loss when it must predict")
    page.table("nats a symbol", header, rows, 3)
    page.say(
        "The best honest loss is ln {symbols} = {floor:.3f} nats, since all symbols are equally likely.",
        symbols=_SYMBOLS,
        floor=math.log(_SYMBOLS),
    )


LESSON = Lesson("mask", "The mask", fill)
