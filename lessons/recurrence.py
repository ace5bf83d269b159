"""What the transformer replaced: recurrent networks whose decoder has one vector of the source, or attends to all."""

from __future__ import annotations

import torch

from lessons import small
from lessons.frame import Page
from lessons.tasks import Reversal
from model.data.batches import IGNORED, Batch, pad
from model.nn.networks import Translator
from model.nn.recurrent import build_recurrent
from model.nn.transformer import EncoderDecoder, build, num_parameters
from model.spec.recurrent import Cell, Context, RecurrentConfig

_LENGTHS = (4, 8, 16)
_NUM_SYMBOLS = 10
_STEPS = 300
_HELD_OUT = 60


def make_recurrent(seed: int, cell: Cell, context: Context) -> Translator:
    """An encoder in both directions and a decoder, one layer of cells each."""
    vocab_size = _task(_LENGTHS[0], seed).vocab_size
    config = RecurrentConfig(
        vocab_size=vocab_size, context=_LENGTHS[-1] + 2, d_model=32, hidden=32, cell=cell, attention=context
    )
    return build_recurrent(config, seed)


def make_transformer(seed: int) -> Translator:
    """As wide, one layer on each side."""
    model = build(small.pair_config(_task(_LENGTHS[0], seed).vocab_size), seed)
    if not isinstance(model, EncoderDecoder):
        raise TypeError("a model of one family is expected")
    return model


def by_length(page: Page) -> None:
    """Trains each network on sources of three lengths, and adds the share of right tokens by length to the page."""
    page.say(
        "Before the transformer, encoder and decoder were recurrent: a cell reads one token after another into a state "
        "(RNN; an LSTM adds gates that decide what to keep). The first ones passed only the last state on, one vector "
        "of fixed size for a source of any length; ours has the last states of both directions. Attention then let the "
        "decoder look at every state; the transformer dropped the recurrence. Each of them learns to write random "
        "symbols backwards, in {updates} updates; a token is right if it is the likeliest after the true ones before.",
        updates=_STEPS,
    )
    rows = []
    for name, model in (
        ("RNN, one vector", page.call(make_recurrent, page.seed, Cell.RNN, Context.NONE)),
        ("LSTM, one vector", page.call(make_recurrent, page.seed, Cell.LSTM, Context.NONE)),
        ("LSTM, attention", page.call(make_recurrent, page.seed, Cell.LSTM, Context.ADDITIVE)),
        ("transformer", page.call(make_transformer, page.seed)),
    ):
        small.train(model, lambda index: _batch(index, page.seed), steps=_STEPS, seed=page.seed)
        shares = (_accuracy(model, _task(length, page.seed)) for length in _LENGTHS)
        rows.append((name, num_parameters(model), *shares))
    header = ("network", "parameters", *map(str, _LENGTHS))
    page.table("share of right tokens, by symbols in the source", header, rows, 3)
    page.say("Accuracy, gradients and times up to sources of five hundred tokens are in docs/results/recurrence.md.")


def _task(length: int, seed: int) -> Reversal:
    return Reversal(_NUM_SYMBOLS, length, seed)


def _batch(index: int, seed: int) -> Batch:
    """Lengths take turns."""
    return _task(_LENGTHS[index % len(_LENGTHS)], seed).batch(index)


def _accuracy(model: Translator, task: Reversal) -> float:
    """After the true tokens before each."""
    batch = pad(task.held_out(_HELD_OUT))
    sources, lengths, inputs, labels = map(
        torch.as_tensor, (batch.source_ids, batch.source_lengths, batch.input_ids, batch.labels)
    )
    with torch.no_grad():
        found = model(sources, lengths, inputs).argmax(-1)
    return float((found == labels)[labels != IGNORED].float().mean())
