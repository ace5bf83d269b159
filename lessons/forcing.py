"""Teacher forcing against free running: the same model, given the true tokens and given its own."""

from __future__ import annotations

import torch

from lessons import small
from lessons.frame import Page
from lessons.tasks import Dates
from model.data.batches import Pair, pad
from model.evaluate import exact_match, greedy
from model.nn import reference
from model.nn.transformer import EncoderDecoder, build
from model.spec.tokenizer import BOS_ID
from model.training.loop import batch_loss

SHORT = 60
"""Steps of a model that is still unsure."""
_LONG = 200


def make_model(task: Dates, seed: int, steps: int) -> EncoderDecoder:
    """A model of one layer on each side, trained for so many steps."""
    model = build(small.pair_config(len(task.words), num_heads=2), seed)
    if not isinstance(model, EncoderDecoder):
        raise TypeError("a model of one family is expected")
    small.train(model, task.batch, steps=steps, seed=seed)
    return model


def forced_and_free(page: Page, task: Dates, held_out: list[Pair]) -> EncoderDecoder:
    """Trains briefly and longer, adds the comparison to a page, and returns the better model."""
    page.say(
        "Under teacher forcing every position reads the true tokens before it, so one pass trains all positions; the "
        "loss is the cross-entropy -ln p(token), averaged. Running free, the decoder reads what it wrote itself."
    )
    models = {name: page.call(make_model, task, page.seed, steps) for name, steps in _runs().items()}
    rows = []
    for (name, steps), model in zip(_runs().items(), models.values(), strict=True):
        with torch.no_grad():
            loss = page.call(batch_loss, model, pad(held_out))
        shares = _token_accuracy(page, model, held_out)
        rows.append((name, steps, loss, *shares, page.call(exact_match, model, held_out)))
    header = ("model", "steps", "cross-entropy", "tokens right, forced", "tokens right, free", "whole dates right")
    page.table("held-out dates", header, rows, 3)
    page.say(
        "Running free is hardly worse here, since each token of a date is read from the source. What a mistake does "
        "shows where one is put in: the probability of the right month after the right year, and after a day instead."
    )
    mistakes = [(name, *(_after(model, held_out, place) for place in (0, 2))) for name, model in models.items()]
    page.table("probability of the right month", ("model", "after the year", "after a mistake"), mistakes, 3)
    return list(models.values())[-1]


def _runs() -> dict[str, int]:
    return {"briefly trained": SHORT, "trained": _LONG}


def _after(model: EncoderDecoder, pairs: list[Pair], place: int) -> float:
    """The mean probability of the second target token when the decoder has read the one at `place` of the target."""
    shares = []
    for pair in pairs:
        logits = reference.logits(model, [BOS_ID, pair.target[place]], pair.source)
        shares.append(logits[-1].softmax(-1)[pair.target[1]])
    return float(torch.stack(shares).mean())


def _token_accuracy(page: Page, model: EncoderDecoder, pairs: list[Pair]) -> tuple[float, float]:
    """The share of target tokens that are right, given the true tokens before them, and given the model's own."""
    forced = free = total = 0
    written = page.call(greedy, model, [pair.source for pair in pairs], len(pairs[0].target))
    for pair, own in zip(pairs, written, strict=True):
        logits = page.call(reference.logits, model, [BOS_ID, *pair.target[:-1]], pair.source)
        forced += int((logits.argmax(-1) == torch.tensor(pair.target)).sum())
        free += sum(a == b for a, b in zip(own, pair.target, strict=False))
        total += len(pair.target)
    return forced / total, free / total
