"""Scores: each is what its definition says, computed the slow way."""

from __future__ import annotations

import lzma
import math
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sacrebleu import corpus_bleu, corpus_chrf

from model import evaluate
from model.data.batches import IGNORED, Pair, pad
from model.nn import reference
from model.nn.transformer import DecoderOnly, EncoderDecoder, build
from model.spec.config import Architecture, ModelConfig, Positions
from model.spec.tokenizer import BOS_ID, EOS_ID
from model.tokenizer_training import byte_level_bpe

TEXTS = ["def f():\n    return 1\n", "", "x = 'é…'\n" * 30]
TOKENIZER = byte_level_bpe(TEXTS, 280, Architecture.DECODER_ONLY)
BOS = torch.tensor([[BOS_ID]])


def ragged_pairs(count: int, seed: int) -> list[Pair]:
    """Of ten ids; sources up to 9 long, end included, and targets up to 10."""
    draw = random.Random(seed)
    return [
        Pair(
            [*draw.choices(range(3, 10), k=draw.randint(0, 8)), EOS_ID],
            draw.choices(range(3, 10), k=draw.choice((0, 1, 3, 5, 7, 10))),
        )
        for _ in range(count)
    ]


PAIRS = ragged_pairs(24, seed=0)


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


@pytest.fixture(scope="module")
def translator() -> EncoderDecoder:
    """Ten ids, and half of `PAIRS` learned by heart, so that some answers are right, some wrong and some endless."""
    config = ModelConfig(
        architecture=Architecture.ENCODER_DECODER,
        vocab_size=10,
        # Not multiples of four, which is what training pads to, and learned, so that there is no position after them.
        context=11,
        source_context=9,
        d_model=32,
        num_layers=1,
        num_encoder_layers=1,
        num_heads=2,
        d_ff=64,
        positions=Positions.LEARNED,
    )
    model = build(config, seed=0)
    assert isinstance(model, EncoderDecoder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batch = pad([pair for pair in PAIRS if len(pair.source) <= 8 and len(pair.target) <= 7][:6])
    assert batch.source_ids is not None
    assert batch.source_lengths is not None
    sources, lengths, inputs, labels = map(
        torch.from_numpy, (batch.source_ids, batch.source_lengths, batch.input_ids, batch.labels)
    )
    for _ in range(80):
        optimizer.zero_grad()
        logits = model(sources, lengths, inputs)
        F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED).backward()
        optimizer.step()
    return model.eval()


def slow_nats(model: DecoderOnly, ids: list[int]) -> float:
    """Token by token, each from the window that the definition gives it: starts at multiples of half the context."""
    tokens = [BOS_ID, *ids]
    half = model.config.context // 2
    nats = 0.0
    for index in range(1, len(tokens)):
        start = max(0, -(-(index - 2 * half) // half) * half)
        logits = reference.logits(model, tokens[start:index])[-1].double()
        nats -= torch.log_softmax(logits, dim=-1)[tokens[index]].item()
    return nats


def test_text_likelihood_counts_every_token_of_every_text_once(language_model: DecoderOnly) -> None:
    ids = [TOKENIZER.encode_plain(text) for text in TEXTS]
    measured = evaluate.text_likelihood(language_model, TOKENIZER, TEXTS)
    assert measured.nats == pytest.approx(sum(slow_nats(language_model, tokens) for tokens in ids), rel=1e-5)
    assert measured.num_tokens == sum(map(len, ids))
    assert measured.num_bytes == sum(len(text.encode()) for text in TEXTS)


@pytest.mark.parametrize("length", [1, 16, 17, 24, 25])
def test_text_likelihood_is_right_at_every_edge_of_a_window(language_model: DecoderOnly, length: int) -> None:
    text = "".join(random.Random(length).choices("abcdefgh", k=length))
    ids = TOKENIZER.encode_plain(text)
    measured = evaluate.text_likelihood(language_model, TOKENIZER, [text])
    assert measured.nats == pytest.approx(slow_nats(language_model, ids), rel=1e-5)
    assert measured.num_tokens == len(ids)


def test_a_model_that_knows_nothing_is_as_perplexed_as_its_vocabulary_is_large(language_model: DecoderOnly) -> None:
    with torch.no_grad():
        language_model.embedding.tokens.weight.zero_()
    num_tokens = len(TOKENIZER.encode_plain(TEXTS[2]))
    measured = evaluate.text_likelihood(language_model, TOKENIZER, [TEXTS[2]])
    bits = num_tokens * math.log2(TOKENIZER.vocab_size)
    assert measured.bits_per_byte == pytest.approx(bits / len(TEXTS[2].encode()), rel=1e-6)
    assert measured.perplexity == pytest.approx(TOKENIZER.vocab_size, rel=1e-6)
    assert measured.loss == pytest.approx(math.log(TOKENIZER.vocab_size), rel=1e-6)


@pytest.mark.parametrize("texts", [[], [""]])
def test_no_text_has_no_score(language_model: DecoderOnly, texts: list[str]) -> None:
    with pytest.raises(ValueError, match="no text"):
        evaluate.text_likelihood(language_model, TOKENIZER, texts)


def test_a_perplexity_past_every_float_is_infinite_and_uncounted_bytes_have_no_bits() -> None:
    assert evaluate.Likelihood(nats=1e6, num_tokens=10).perplexity == math.inf
    with pytest.raises(ValueError, match="no bytes"):
        _ = evaluate.Likelihood(nats=1.0, num_tokens=1).bits_per_byte


def test_pair_loss_is_the_mean_over_all_targets_and_their_ends(
    translator: EncoderDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    nats = 0.0
    for pair in PAIRS:
        logits = reference.logits(translator, [BOS_ID, *pair.target], pair.source).double()
        tokens = [*pair.target, EOS_ID]
        nats -= torch.log_softmax(logits, dim=-1)[range(len(tokens)), tokens].sum().item()
    for batch_tokens in (1, 16, 4096):
        monkeypatch.setattr(evaluate, "_BATCH_TOKENS", batch_tokens)
        measured = evaluate.pair_loss(translator, PAIRS)
        assert measured.nats == pytest.approx(nats, rel=1e-5)
        assert measured.num_tokens == sum(len(pair.target) + 1 for pair in PAIRS)
    assert measured.loss == pytest.approx(nats / measured.num_tokens)
    assert measured.perplexity == pytest.approx(math.exp(measured.loss))


def answers(model: EncoderDecoder, pairs: list[Pair], max_tokens: int) -> list[list[int]]:
    """By the oracle, their ends included."""
    return [
        reference.greedy(model, [], pair.source, max_tokens=max_tokens, eos_ids=[EOS_ID], start_id=BOS_ID)
        for pair in pairs
    ]


@pytest.mark.parametrize(("rows", "max_tokens"), [(5, 1), (1, 10), (5, 10), (128, 10), (5, 99)])
def test_greedy_writes_what_the_oracle_writes(
    translator: EncoderDecoder, monkeypatch: pytest.MonkeyPatch, rows: int, max_tokens: int
) -> None:
    monkeypatch.setattr(evaluate, "_BATCH_ROWS", rows)
    expected = answers(translator, PAIRS, max_tokens)
    if max_tokens == 10:
        # Some rows leave their batch early, some never end.
        assert 0 < sum(answer[-1] == EOS_ID for answer in expected) < len(expected)
        assert len({len(answer) for answer in expected}) > 2
    without_end = [answer[:-1] if answer[-1] == EOS_ID else answer for answer in expected]
    assert evaluate.greedy(translator, [pair.source for pair in PAIRS], max_tokens) == without_end
    assert evaluate.greedy(translator, [], max_tokens) == []


def test_greedy_ends_each_output_at_its_own_bound(translator: EncoderDecoder) -> None:
    sources = [pair.source for pair in PAIRS]
    bounds = [1 + index % 7 for index in range(len(sources))]
    whole = evaluate.greedy(translator, sources, 10)
    assert evaluate.greedy(translator, sources, bounds) == [
        output[:bound] for output, bound in zip(whole, bounds, strict=True)
    ]


def test_greedy_takes_the_lowest_of_equal_tokens() -> None:
    model = build(
        ModelConfig(
            architecture=Architecture.ENCODER_DECODER,
            vocab_size=6,
            context=8,
            d_model=8,
            num_layers=1,
            num_encoder_layers=1,
            num_heads=1,
            d_ff=8,
            tie_embeddings=False,
        ),
        seed=0,
    ).eval()
    assert isinstance(model, EncoderDecoder)
    assert model.head is not None
    with torch.no_grad():
        # Ids 3 and 4 tie far above the rest.
        model.head.weight.zero_()
        hidden = model.decode_hidden(model.encode(torch.tensor([[5]]), torch.tensor([1])), torch.tensor([1]), BOS)
        model.head.weight[3:5] = hidden[0, 0]
    assert evaluate.greedy(model, [[5]], 1) == [[3]]


@pytest.mark.parametrize(
    ("sources", "max_tokens", "words"),
    [
        ([[5], []], 3, "source 1 has 0 tokens, must have 1 to 9"),
        ([[5] * 10], 3, "source 0 has 10 tokens, must have 1 to 9"),
        ([[5]], 0, "max_tokens is 0"),
        ([[5], [6]], [1, -2], "max_tokens is -2"),
        ([[5], [6]], [3], "2 sources have 1 max_tokens"),
    ],
)
def test_greedy_names_what_it_cannot_decode(
    translator: EncoderDecoder, sources: list[list[int]], max_tokens: int | list[int], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        evaluate.greedy(translator, sources, max_tokens)


def test_exact_match_is_the_share_of_right_greedy_answers(translator: EncoderDecoder) -> None:
    found = answers(translator, PAIRS, 10)
    right = np.mean([answer == [*pair.target, EOS_ID] for pair, answer in zip(PAIRS, found, strict=True)])
    assert 0.0 < right < 1.0
    assert evaluate.exact_match(translator, PAIRS) == right


@pytest.mark.parametrize("score", [evaluate.exact_match, evaluate.pair_loss])
def test_no_pairs_have_no_score(translator: EncoderDecoder, score: Callable[..., object]) -> None:
    with pytest.raises(ValueError, match="no pairs"):
        score(translator, [])


def test_translation_scores_are_sacrebleus_with_their_signatures() -> None:
    hypotheses = ["Die Katze sitzt auf der Matte.", "Es regnet heute sehr stark."]
    references = ["Die Katze sitzt auf der Matte.", "Heute regnet es sehr stark."]
    scores = evaluate.translation_scores(hypotheses, references)
    assert scores["bleu"] == corpus_bleu(hypotheses, [references]).score
    assert scores["chrf"] == corpus_chrf(hypotheses, [references]).score
    # By hand: 11 of 13 words, 8 of 11 pairs, 6 of 9 triples and 4 of 7 quadruples are the reference's; equal lengths.
    by_hand = 100 * (11 / 13 * 8 / 11 * 6 / 9 * 4 / 7) ** 0.25
    assert scores["bleu"] == pytest.approx(by_hand)
    assert str(scores["bleu_signature"]).startswith("nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:")
    assert str(scores["chrf_signature"]).startswith("nrefs:1|case:mixed|eff:yes|nc:6|nw:0|space:no|version:")


def test_translations_without_references_are_refused() -> None:
    with pytest.raises(ValueError, match="no translations"):
        evaluate.translation_scores([], [])
    with pytest.raises(ValueError, match="2 translations have 1 references"):
        evaluate.translation_scores(["a", "b"], ["a"])


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
    with pytest.raises(ValueError, match="held_out is empty"):
        evaluate.compressors(b"x", b"")
