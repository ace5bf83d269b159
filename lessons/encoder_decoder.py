"""Lesson: encoder and decoder; training and inference, alignment, and what is chosen from a distribution."""

from __future__ import annotations

import torch
from torch import Tensor

from lessons import paper
from lessons.decoding import choices
from lessons.forcing import SHORT, forced_and_free, make_model
from lessons.frame import Lesson, Page
from lessons.maps import three_kinds
from lessons.recurrence import by_length
from lessons.tasks import Dates
from model.data.batches import Pair, pad
from model.nn import reference
from model.nn.attention import padding_mask
from model.nn.transformer import EncoderDecoder
from model.spec.tokenizer import BOS_ID, EOS_ID

_TEXT = "the 03 of may , 1987"
_NUM_DATES = 60


def step_by_step(page: Page, model: EncoderDecoder, source: list[int], limit: int) -> list[list[int]]:
    """Free running: the decoder reads the tokens that it wrote itself, until it writes the end; returns each input."""
    inputs = [[BOS_ID]]
    while len(inputs) <= limit and inputs[-1][-1] != EOS_ID:
        logits = page.call(reference.logits, model, inputs[-1], source)
        inputs.append([*inputs[-1], int(logits[-1].argmax())])
    return inputs


def fill(page: Page) -> None:
    """Fills the page."""
    task = Dates(page.seed)
    pair, held_out = task.pair(_TEXT), task.held_out(_NUM_DATES)
    page.say(
        "An encoder reads the source in both directions; a decoder writes the target from left to right and attends to "
        "the encoder's output."
    )
    by_length(page)
    page.say("From here on, a transformer: the source is a date in words, the target its year, month and day.")
    batch = pad([pair], (len(pair.source), len(pair.target) + 1))
    page.table(
        "teacher forcing: what the decoder reads and what it must predict",
        ("place", "reads", "predicts"),
        [
            (str(place), task.words[read], task.words[label])
            for place, (read, label) in enumerate(zip(batch.input_ids[0], batch.labels[0], strict=True), start=1)
        ],
    )
    model = page.call(forced_and_free, page, task, held_out)
    page.code(step_by_step)
    inputs = step_by_step(page, model, list(pair.source), len(pair.target) + 1)
    rows = [(str(len(each)), " ".join(task.words[token] for token in each)) for each in inputs]
    page.table("free running, step by step", ("tokens", "decoder's input"), rows)
    _padding(page, model, held_out)
    sequence = [BOS_ID, *pair.target]
    found = page.call(reference.attention, model, sequence, pair.source)
    labels = [task.words[token] for token in pair.source], [task.words[token] for token in sequence]
    means = {kind.value: layers[-1].mean(0) for kind, layers in found.items()}
    three_kinds(page, means["cross"], means["encoder"], means["decoder"], *labels)
    alignment = [
        (f"before {task.words[token]}", task.words[pair.source[int(row.argmax())]], row.max())
        for token, row in zip([*pair.target, EOS_ID], means["cross"], strict=True)
    ]
    page.table("alignment: where cross-attention is strongest", ("written next", "looks at", "weight"), alignment)
    choices(page, make_model(task, page.seed, SHORT), task.words, pair)
    paper.figures(page)
    page.look(
        "Cross-attention has a row for each token read by the decoder: the alignment, found without being taught. The "
        "encoder's map is full, the decoder's a triangle: no token sees a later one. The last map has one distribution "
        "per row: all of it, and what each rule of choosing leaves."
    )


def _padding(page: Page, model: EncoderDecoder, pairs: list[Pair]) -> None:
    """A short source alone, and padded beside a longer one."""
    short, long = min(pairs, key=lambda pair: len(pair.source)), max(pairs, key=lambda pair: len(pair.source))
    batch = pad([short, long])
    lengths = torch.tensor([len(short.source), len(long.source)])
    sources = torch.as_tensor(batch.source_ids)
    mask = page.call(padding_mask, lengths, sources.shape[1])
    page.show("padding mask of two sources", mask[:, 0, 0].int(), 0)

    def difference(claimed: Tensor) -> float:
        with torch.no_grad():
            together = model.encode(sources, claimed)[0, : lengths[0]]
            alone = model.encode(sources[:1, : lengths[0]], lengths[:1])[0]
        return float((together - alone).abs().max())

    rows = [("with the mask", difference(lengths)), ("without", difference(torch.full_like(lengths, sources.shape[1])))]
    page.table("what padding changes in the shorter one's encoding, at most", ("encoder", "difference"), rows, 4)


LESSON = Lesson("encoder-decoder", "Encoder and decoder", fill)
