"""The recurrence study's trainings and measurements: networks of about equal size on sources of growing length.

    copy, reverse   random symbols → the same, or backwards: every target token needs one source token
    dates           a written-out date amid random letters → ISO 8601: ten tokens from a long source

A batch has sources of one length. Octaves of lengths are drawn alike, so that short sources, which teach the rule, are
as frequent as long ones. The trainer is the product's (`model.training.loop`); batches are fresh, a function of seed
and index.
"""

from __future__ import annotations

import statistics
import string
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from model.data import dates
from model.data.batches import IGNORED, Batch, Pair, pad
from model.nn.attention import CrossAttention, SelfAttention, attend_fused, join_heads, padding_mask, split_heads
from model.nn.networks import Translator, build
from model.nn.recurrent import RecurrentEncoderDecoder
from model.nn.transformer import DecoderOnly, num_parameters
from model.spec.config import Architecture, ModelConfig, Positions
from model.spec.recurrent import Cell, Context, NetworkConfig, RecurrentConfig
from model.spec.tokenizer import EOS_ID, Tokenizer
from model.tokenizer_training import characters
from model.training.config import OptimizerName, TrainConfig, TrainDevice, TrainPrecision
from model.training.loop import Loop
from model.training.presets import resolve

NUM_SYMBOLS = 32
NUM_TESTS = 32
_FIRST_SYMBOL = 4
_FIRST_OCTAVE = 8
_FIRST_DATES_OCTAVE = 64
_NUM_DATES = 20_000
_NUM_TEST_DATES = 500
_EXTRA = 4
_TEST_SEED = 1 << 20
_TIMED = 5


class Job(StrEnum):
    """What is learned."""

    COPY = "copy"
    REVERSE = "reverse"
    DATES = "dates"

    def octaves(self, longest: int) -> list[int]:
        """Ends of the octaves of source lengths; texts around a date are longer than the date."""
        first = _FIRST_DATES_OCTAVE if self is Job.DATES else _FIRST_OCTAVE
        return [first << step for step in range(longest.bit_length()) if first << step <= longest]


class Network(StrEnum):
    """What learns."""

    FIXED = "fixed"
    ATTENTION = "attention"
    TRANSFORMER = "transformer"
    ROTARY = "rotary"


TIMED = (Network.FIXED, Network.ATTENTION, Network.TRANSFORMER)
"""Rotary positions cost about what sinusoids do."""


@dataclass(frozen=True, slots=True)
class Training:
    """One training; `longest` bounds the sources, `batch_tokens` sources and targets of a batch.

    `rate` is the peak of Muon, which takes the matrices of linear layers; AdamW has a tenth of it for the rest,
    which is most of a recurrent network.
    """

    job: Job
    network: Network
    seed: int
    steps: int
    longest: int
    batch_tokens: int
    cell: Cell = Cell.GRU
    rate: float = 2e-2


def configure(training: Training) -> NetworkConfig:
    """About 230,000 parameters with a GRU, whichever the network."""
    sizes: dict[str, Any] = {
        "vocab_size": vocab_size(training.job),
        "context": training.longest + _EXTRA,
        "d_model": 64,
    }
    if training.network in {Network.TRANSFORMER, Network.ROTARY}:
        shape = {**resolve("dates").transformer.to_dict(), **sizes, "source_vocab_size": 0, "source_context": 0}
        shape["positions"] = Positions.ROTARY if training.network is Network.ROTARY else Positions.SINUSOIDAL
        return ModelConfig.from_dict(shape | {"d_ff": 256, "head_dim": 0, "num_kv_heads": 0})
    hidden, seen = (98, Context.NONE) if training.network is Network.FIXED else (90, Context.ADDITIVE)
    return RecurrentConfig(**sizes, hidden=hidden, cell=training.cell, attention=seen)


def train_config(training: Training) -> TrainConfig:
    """The same for all networks but for `rate`."""
    return TrainConfig(
        steps=training.steps,
        batch_tokens=training.batch_tokens,
        optimizer=OptimizerName.MUON,
        learning_rate=training.rate / 10,
        matrix_learning_rate=training.rate,
        precision=TrainPrecision.FP32,
        device=TrainDevice.CPU,
        seed=training.seed,
    )


def train(training: Training) -> dict[str, Any]:
    """Trains, and scores each octave's longest sources; JSON-ready.

    `accuracy` is the share of target tokens, ends included, that are most likely after the true ones before; `exact`
    the share of whole targets; `loss` the last twentieth's mean, in nats per token.
    """
    began = time.perf_counter()
    model = _fresh(training)
    loop = Loop(model, partial(make_batch, training), train_config(training))
    losses = [loop.update().loss for _ in range(training.steps)]
    model.eval()
    scores = {length: score(model, training.job, length) for length in training.job.octaves(training.longest)}
    return {
        "job": training.job,
        "network": training.network,
        "seed": training.seed,
        "rate": training.rate,
        "loss": statistics.fmean(losses[-max(1, training.steps // 20) :]),
        "accuracy": {str(length): accuracy for length, (accuracy, _) in scores.items()},
        "exact": {str(length): exact for length, (_, exact) in scores.items()},
        "num_parameters": num_parameters(model),
        "seconds": round(time.perf_counter() - began, 2),
    }


def make_batch(training: Training, index: int) -> Batch:
    """A training batch: sources of one length in an octave, as many as the tokens allow."""
    source = np.random.default_rng((training.seed, index))
    octave = int(source.choice(training.job.octaves(training.longest)))
    length = int(source.integers(octave // 2 + 1, octave + 1))
    # A date is ten tokens however long its source: more sources make up for it.
    tokens = (length // 4 if training.job is Job.DATES else 2 * length) + _EXTRA
    return pad(make_pairs(training.job, length, max(1, training.batch_tokens // tokens), source))


def score(model: Translator, job: Job, length: int) -> tuple[float, float]:
    """Shares of right tokens and of right targets among `NUM_TESTS` unseen sources of this length."""
    batch = pad(make_pairs(job, length, NUM_TESTS, np.random.default_rng((_TEST_SEED, length)), is_test=True))
    with torch.inference_mode():
        found = model(*_tensors(batch)).argmax(dim=-1)
    labels = torch.from_numpy(batch.labels)
    right = found == labels
    exact = (right | (labels == IGNORED)).all(dim=1)
    return right[labels != IGNORED].float().mean().item(), exact.float().mean().item()


def vocab_size(job: Job) -> int:
    """Token ids of a job."""
    return _tokenizer().vocab_size if job is Job.DATES else _FIRST_SYMBOL + NUM_SYMBOLS


def make_pairs(job: Job, length: int, rows: int, source: np.random.Generator, *, is_test: bool = False) -> list[Pair]:
    """Examples whose sources have `length` tokens and an end; days of a test are never trained on."""
    if job is Job.DATES:
        return [_bury(length, source, _examples(is_test=is_test)) for _ in range(rows)]
    symbols = source.integers(_FIRST_SYMBOL, _FIRST_SYMBOL + NUM_SYMBOLS, (rows, length)).tolist()
    return [Pair([*row, EOS_ID], row if job is Job.COPY else row[::-1]) for row in symbols]


def gradients(of: str, longest: int, seed: int) -> list[float]:
    """‖∂(u·s_T)/∂x_{T-k}‖ for k = 0…longest-1, over its value at k = 0: fresh weights, u a random unit vector.

    s are the outputs of the encoder's forward cells, or of a transformer's encoder; x are random tokens' vectors. In
    float64, where a gradient of 1e-300 is not yet zero.

    Args:
        of: a `Cell`, or `Network.TRANSFORMER`.
        longest: T.
        seed: of weights, tokens and u.
    """
    is_cell = of in tuple(Cell)
    network, cell = (Network.FIXED, Cell(of)) if is_cell else (Network.TRANSFORMER, Cell.GRU)
    model = _fresh(Training(Job.COPY, network, seed, 1, longest, 1, cell)).double()
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(_FIRST_SYMBOL, vocab_size(Job.COPY), (8, longest), generator=generator)
    leaves: list[Tensor] = []

    def cut(_module: nn.Module, _inputs: object, embedded: Tensor) -> Tensor:
        leaves.append(embedded.detach().requires_grad_())
        return leaves[0]

    embedding: nn.Module
    if isinstance(model, RecurrentEncoderDecoder):
        embedding, width = model.tokens, model.config.hidden
    else:
        embedding, width = model.encoder.embedding, model.config.d_model
    with embedding.register_forward_hook(cut):
        last = model.encode(ids, torch.full((len(ids),), longest))[:, -1, :width]
    unit = nn.functional.normalize(torch.randn(width, generator=generator, dtype=torch.float64), dim=0)
    (gradient,) = torch.autograd.grad((last @ unit).sum(), leaves[0])
    norms = gradient.norm(dim=-1).mean(dim=0).flip(0)
    return [float(norm) for norm in norms / norms[0]]


def update_seconds(network: Network, length: int, batch_tokens: int) -> float:
    """Median time of an update on copying: as many sources of this length as `batch_tokens` allow."""
    training = Training(Job.COPY, network, 0, 1, length, batch_tokens)
    rows = max(1, batch_tokens // (2 * length + _EXTRA))
    batch = pad(make_pairs(Job.COPY, length, rows, np.random.default_rng(0)))
    loop = Loop(_fresh(training), lambda _: batch, train_config(training))
    loop.update()
    return statistics.median(loop.update().seconds for _ in range(_TIMED))


def token_seconds(network: Network, length: int) -> float:
    """Median time of one more target token, after `length` of a source as long: state, keys and values are cached."""
    training = Training(Job.COPY, network, 0, 1, length + 1, 1)
    batch = pad(make_pairs(Job.COPY, length, 1, np.random.default_rng(0)))
    sources, lengths, written = _tensors(batch)
    found = []
    with torch.inference_mode():
        step = stepper(_fresh(training).eval(), sources, lengths, written[:, :length])
        for _ in range(4 * _TIMED):
            began = time.perf_counter()
            step(written[:, :1])
            found.append(time.perf_counter() - began)
    return statistics.median(found)


def stepper(model: Translator, sources: Tensor, lengths: Tensor, written: Tensor) -> Callable[[Tensor], Tensor]:
    """Reads a source and target inputs; returns a function of one more, `[B, 1]`, to its logits `[B, 1, V]`."""
    memory = model.encode(sources, lengths)
    if isinstance(model, RecurrentEncoderDecoder):
        keys = model.key(memory) if model.has_attention else None
        _, state = model.advance(memory, lengths, written, model.begin(memory), keys)
        return lambda token: model.unembed(model.advance(memory, lengths, token, state, keys)[0])
    past: dict[nn.Module, tuple[Tensor, Tensor]] = {}
    mask = padding_mask(lengths, memory.shape[1])

    def attend_self(module: SelfAttention, x: Tensor) -> Tensor:
        q, k, v = module.split(module.project(x))
        if module not in past:
            past[module] = k, v
            return join_heads(attend_fused(q, k, v, is_causal=True))
        before = past[module]
        return join_heads(attend_fused(q, torch.cat((before[0], k), dim=2), torch.cat((before[1], v), dim=2)))

    def attend_cross(module: CrossAttention, x: Tensor) -> Tensor:
        if module not in past:
            past[module] = module.project_memory(memory)
        return join_heads(attend_fused(split_heads(module.project_query(x), module.head_dim), *past[module], mask))

    def read(tokens: Tensor, first: int) -> Tensor:
        hidden = model.embed(tokens, torch.arange(first, first + tokens.shape[1]))
        for layer in model.layers:
            hidden = layer(hidden, attend_self, attend_cross)
        return model.unembed(model.final_norm(hidden))

    read(written, 0)
    return lambda token: read(token, written.shape[1])


def _fresh(training: Training) -> Translator:
    model = build(configure(training), training.seed)
    if isinstance(model, DecoderOnly):
        raise TypeError("sources are read by an encoder-decoder")
    return model


def _tensors(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    sources, lengths, inputs = (
        torch.from_numpy(np.asarray(each)) for each in (batch.source_ids, batch.source_lengths, batch.input_ids)
    )
    return sources, lengths, inputs


@cache
def _tokenizer() -> Tokenizer:
    return characters([*dates.alphabet(), string.ascii_lowercase], Architecture.ENCODER_DECODER)


@cache
def _examples(*, is_test: bool) -> list[tuple[list[int], list[int]]]:
    # The tokenizer strips blanks at the ends of a text.
    blank = _tokenizer().encode_plain("a b")[1]
    return [
        ([blank, *_tokenizer().encode_plain(example.text), blank], _tokenizer().encode_plain(example.iso))
        for example in (dates.held_out(_NUM_TEST_DATES, 0) if is_test else dates.training(_NUM_DATES, 0))
    ]


def _bury(length: int, source: np.random.Generator, examples: list[tuple[list[int], list[int]]]) -> Pair:
    """A date anywhere in random letters; a text longer than the length is drawn again."""
    letters = _tokenizer().encode_plain(string.ascii_lowercase)
    while True:
        text, iso = examples[int(source.integers(len(examples)))]
        if (rest := length - len(text)) >= 0:
            noise, where = source.choice(letters, rest).tolist(), int(source.integers(rest + 1))
            return Pair([*noise[:where], *text, *noise[where:], EOS_ID], iso)
