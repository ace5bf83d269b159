"""Lesson: positions; the paper's sinusoids, rotations, learned tables, and none at all."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lessons import small
from lessons.frame import Lesson, Page
from lessons.notes import MONEY_POSITION, SHOW_ME
from lessons.tasks import Reversal
from model.evaluate import exact_match
from model.nn.positions import base_frequencies, rotary_tables, rotate, sinusoidal_table
from model.nn.transformer import EncoderDecoder, build

_WIDTH = 32
_LENGTH = 24
_OFFSETS = (0, 1, 2, 4, 8, 16)
_START, _OFFSET = 5, 2
_SHOWN = 6
_STEPS = 200


def shift(table: Tensor, offset: int, frequencies: Tensor) -> Tensor:
    """PE(i) of all i, sines before cosines, turned into PE(i + offset) by one rotation: `[S, d]` → `[S, d]`."""
    cos, sin = rotary_tables(offset + 1, frequencies)
    return rotate(table, cos[offset], -sin[offset])


def fill(page: Page) -> None:
    """Fills the page."""
    page.say(
        "Attention sees a set: it does not know the order of words. So positions are added to the word vectors, or "
        "rotate queries and keys. The paper adds a sine and a cosine for each frequency. Here are the notes' vectors "
        "and both ways to compute the angles."
    )
    _degrees(page)
    frequencies = page.call(base_frequencies, _WIDTH, page.notes.frequency_base)
    angles = torch.outer(torch.arange(_LENGTH), frequencies)
    halves = torch.cat((angles.sin(), angles.cos()), -1)
    rows = [
        (str(offset), *(halves[start] @ halves[start + offset] / halves[start].norm() ** 2 for start in (0, _START)))
        for offset in _OFFSETS
    ]
    page.table(
        "dot product with a later position, relative to its own",
        ("offset", "from the first", f"from position {_START}"),
        rows,
        3,
    )
    page.say("It depends on the offset alone, since the same rotation takes every position to the one δ later:")
    page.code(shift)
    turned = page.call(shift, halves, _OFFSET, frequencies)
    page.show(f"position {_START} turned by {_OFFSET}, first numbers", turned[_START, :_SHOWN], 3)
    page.show(f"position {_START + _OFFSET}, the same", halves[_START + _OFFSET, :_SHOWN], 3)
    learned = _trained(page)
    labels = [str(position) for position in range(_LENGTH)]
    table = page.call(sinusoidal_table, _LENGTH, _WIDTH)
    page.heat("sinusoids", labels, [str(column) for column in range(_WIDTH)], (table + 1) / 2)
    page.heat("their cosines", labels, labels, _cosines(table))
    few = labels[: len(learned)]
    page.heat("learned: cosines", few, few, _cosines(learned))
    page.look(
        "Left: the first columns have the highest frequencies. (The notes say that a smaller i does it; it is a "
        "smaller j, which they call the feature's index and which numbers pairs of columns.) Middle: similarity "
        "depends on the distance alone, so there are bands along the diagonal. Right: learned positions are similar "
        "only where the task makes them so. Shades run from each map's lowest value to its highest."
    )


def _cosines(table: Tensor) -> Tensor:
    """The cosines of all pairs of positions, from the lowest, 0, to the highest, 1."""
    unit = table / table.norm(dim=-1, keepdim=True)
    cosines: Tensor = unit @ unit.T
    return (cosines - cosines.min()) / (cosines.max() - cosines.min())


def _degrees(page: Page) -> None:
    """The notes' table, computed in degrees, beside the paper's."""
    embeddings, base = torch.from_numpy(page.given("show_me_embeddings")), page.given("frequency_base")
    width = embeddings.shape[-1]
    angles = torch.outer(torch.arange(len(SHOW_ME), dtype=torch.float64), page.call(base_frequencies, width, base))
    tables = [torch.stack((each.sin(), each.cos()), -1).flatten(1) for each in (angles, torch.deg2rad(angles))]
    radians, degrees = tables
    page.show("positions in radians, as the paper and our model have them", radians, 3, SHOW_ME)
    page.show(
        "the model's own table, whose base is the paper's", page.call(sinusoidal_table, len(SHOW_ME), width), 3, SHOW_ME
    )
    page.compare("positions_in_degrees", degrees, rows=SHOW_ME)
    page.show("positions in degrees, with more digits", degrees, 4, SHOW_ME)
    page.compare("money_with_position", embeddings[MONEY_POSITION] + degrees[MONEY_POSITION])
    page.show("money with its position in radians", embeddings[MONEY_POSITION] + radians[MONEY_POSITION])
    page.say(
        "The notes computed the sines in degrees. In degrees all positions are nearly the same vector, and a model "
        "could hardly tell them apart: the smallest distance between two is {degrees:.3f}, in radians {radians:.3f}. "
        "(For “the” the notes doubled the rounded sine of “me”, so their last digit is off by one.)",
        degrees=torch.pdist(degrees).min(),
        radians=torch.pdist(radians).min(),
    )


def _trained(page: Page) -> Tensor:
    """The same model with sinusoids, with a learned table, and without positions; returns the learned table."""
    task = Reversal(num_symbols=6, length=6, seed=page.seed)
    rows = []
    learned = torch.empty(0)
    for name, positions in (("sinusoidal", "sinusoidal"), ("learned", "learned"), ("none", "learned")):
        model = build(small.pair_config(task.vocab_size, positions=positions, context=task.length + 2), page.seed)
        if isinstance(model, EncoderDecoder) and name == "none":
            for side in (model.embedding, model.encoder.embedding):
                side.positions = None
        losses = page.call(small.train, model, task.batch, steps=_STEPS, seed=page.seed)
        rows.append((name, losses[-1], page.call(exact_match, model, task.held_out(100))))
        if name == "learned" and isinstance(model, EncoderDecoder):
            positions_module = model.encoder.embedding.positions
            if isinstance(positions_module, nn.Embedding):
                learned = positions_module.weight.detach()
    page.say("Models that differ in their positions alone, trained to reverse {length} symbols:", length=task.length)
    page.table("reversal", ("positions", "nats a symbol", "right"), rows, 3)
    return learned


LESSON = Lesson("positions", "Positions", fill)
