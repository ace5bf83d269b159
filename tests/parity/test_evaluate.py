"""Scores: each is what its definition says, computed the slow way."""

from __future__ import annotations

import lzma
import math
import random

import numpy as np
import pytest
import torch

from model import evaluate, reference
from model.config import Architecture, ModelConfig
from model.data import dates
from model.data.batches import Pair, pad
from model.tokenizer import BOS_ID, EOS_ID
from model.tokenizer_training import byte_level_bpe, characters
from model.training.config import TrainConfig
from model.training.optimizers import make_optimizers
from model.training.trainer import batch_loss
from model.transformer import DecoderOnly, EncoderDecoder, build

TEXTS = ["def f():\n    return 1\n", "", "x = 'é…'\n" * 30]
TOKENIZER = byte_level_bpe(TEXTS, 280, Architecture.DECODER_ONLY)


@pytest.fixture
def language_model() -> DecoderOnly:
    config = ModelConfig(
        architecture=Architecture.DECODER_ONLY,
        vocab_size=TOKENIZER.vocab_size,
        context=16,
        d_model=16,
        num_layers=1,
        num_heads=2,
        d_ff=32,
    )
    model = build(config, seed=0).eval()
    assert isinstance(model, DecoderOnly)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)
    return model


def slow_bits(model: DecoderOnly, ids: list[int]) -> float:
    """Token by token, each from the window that the definition gives it: starts at multiples of half the context."""
    tokens = [BOS_ID, *ids]
    half = model.config.context // 2
    bits = 0.0
    for index in range(1, len(tokens)):
        start = max(0, -(-(index - 2 * half) // half) * half)
        logits = reference.logits(model, tokens[start:index])[-1].double()
        bits -= torch.log_softmax(logits, dim=-1)[tokens[index]].item() / math.log(2.0)
    return bits


def test_bits_per_byte_counts_every_token_of_every_text_once(language_model: DecoderOnly) -> None:
    bits = sum(slow_bits(language_model, TOKENIZER.encode_plain(text)) for text in TEXTS)
    num_bytes = sum(len(text.encode()) for text in TEXTS)
    measured = evaluate.bits_per_byte(language_model, TOKENIZER, TEXTS)
    assert measured == pytest.approx(bits / num_bytes, rel=1e-5)


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 24, 25, 33])
def test_bits_per_byte_is_right_at_every_edge_of_a_window(language_model: DecoderOnly, length: int) -> None:
    text = "".join(random.Random(length).choices("abcdefgh", k=length))
    ids = TOKENIZER.encode_plain(text)
    measured = evaluate.bits_per_byte(language_model, TOKENIZER, [text])
    assert measured == pytest.approx(slow_bits(language_model, ids) / length, rel=1e-5)


def test_a_model_that_knows_nothing_needs_as_many_bits_as_its_vocabulary(language_model: DecoderOnly) -> None:
    with torch.no_grad():
        language_model.embedding.tokens.weight.zero_()
    num_tokens = len(TOKENIZER.encode_plain(TEXTS[2]))
    expected = num_tokens * math.log2(TOKENIZER.vocab_size) / len(TEXTS[2].encode())
    assert evaluate.bits_per_byte(language_model, TOKENIZER, [TEXTS[2]]) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("texts", [[], [""]])
def test_no_text_has_no_score(language_model: DecoderOnly, texts: list[str]) -> None:
    with pytest.raises(ValueError, match="no text"):
        evaluate.bits_per_byte(language_model, TOKENIZER, texts)


def test_exact_match_is_the_share_of_right_greedy_answers() -> None:
    tokenizer = characters(dates.alphabet(), Architecture.ENCODER_DECODER)
    config = ModelConfig(
        architecture=Architecture.ENCODER_DECODER,
        vocab_size=tokenizer.vocab_size,
        context=16,
        source_context=48,
        d_model=32,
        num_layers=1,
        num_encoder_layers=1,
        num_heads=2,
        d_ff=64,
    )
    model = build(config, seed=0)
    assert isinstance(model, EncoderDecoder)
    examples = dates.held_out(12, seed=0)
    pairs = [Pair(tokenizer.encode(example.text), tokenizer.encode_plain(example.iso)) for example in examples]
    # Half of them learned by heart, so that some answers are right and some are wrong.
    optimizers = make_optimizers(model, TrainConfig(steps=1, batch_tokens=1, learning_rate=1e-2))
    for _ in range(60):
        for optimizer in optimizers:
            optimizer.zero_grad()
        batch_loss(model, pad(pairs[:6])).backward()
        for optimizer in optimizers:
            optimizer.step()
    model.eval()
    answers = [
        reference.greedy(model, [], pair.source, max_tokens=11, eos_ids=[EOS_ID], start_id=BOS_ID) for pair in pairs
    ]
    right = np.mean([answer == [*pair.target, EOS_ID] for pair, answer in zip(pairs, answers, strict=True)])
    assert 0.0 < right < 1.0
    assert evaluate.exact_match(model, tokenizer, examples) == right


def test_compressors_are_xz_alone_and_xz_that_has_seen_the_training_text() -> None:
    generator = random.Random(0)
    training, held_out = generator.randbytes(5000), generator.randbytes(500)

    def size(data: bytes) -> int:
        return len(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME))

    found = evaluate.compressors(training, held_out)
    assert found.xz_bits_per_byte == 8 * size(held_out) / 500
    assert found.xz_primed_bits_per_byte == 8 * (size(training + held_out) - size(training)) / 500
    copied = evaluate.compressors(training, training[1000:1500])
    assert copied.xz_primed_bits_per_byte < 2.0 < 8.0 < copied.xz_bits_per_byte


def test_compressing_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="held_out is empty"):
        evaluate.compressors(b"x", b"")
