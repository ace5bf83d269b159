"""Bytes of single tokens: joined, they are the text, wherever a character is split."""

from __future__ import annotations

from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from model.spec.config import Architecture
from model.spec.token_bytes import Spelling
from model.spec.tokenizer import Tokenizer
from model.tokenizer_training import byte_level_bpe
from service.engine.types import TokenLogprobs
from service.transport.http.answers import content_logprobs

BPE = byte_level_bpe(["naïve café, naïve Straße"] * 4, 300, Architecture.DECODER_ONLY)


@given(st.text(st.characters(exclude_categories=("Cs",)), max_size=30))
def test_bytes_of_tokens_are_the_texts(text: str) -> None:
    assert b"".join(map(BPE.token_bytes, BPE.encode_plain(text))) == text.encode()


def test_a_control_token_is_spelled_as_it_is_and_an_unknown_id_has_no_bytes() -> None:
    (first, *_) = BPE.encode("a")
    assert BPE.token_bytes(first) == (BPE.token(first) or "").encode() != b""
    assert BPE.token_bytes(10**6) == b""


def test_logprobs_have_the_bytes_of_a_part_of_a_character() -> None:
    """vllm-project/vllm#19177, ollama/ollama#13497: U+FFFD in the place of the bytes."""
    token_ids = BPE.encode_plain("€")
    assert len(token_ids) == 3
    described = content_logprobs(BPE, token_ids, [TokenLogprobs(-1.0, (each,), (float("-inf"),)) for each in token_ids])
    assert [each["bytes"] for each in described] == [[0xE2], [0x82], [0xAC]]
    assert [each["top_logprobs"][0]["bytes"] for each in described] == [[0xE2], [0x82], [0xAC]]
    assert described[0]["top_logprobs"][0]["logprob"] == -9999.0  # JSON has no infinity


@pytest.mark.parametrize(
    ("decoder", "spelling", "wanted"),
    [
        ({"type": "ByteFallback"}, "<0xE2>", b"\xe2"),
        ({"type": "ByteFallback"}, "<0xE2", b"<0xE2"),
        (
            {"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}]},
            "▁a",
            b" a",
        ),
        ({"type": "Metaspace", "replacement": "▁"}, "▁a", b" a"),
        ({"type": "WordPiece", "prefix": "##"}, "##a", b"a"),
        ({"type": "BPEDecoder", "suffix": "</w>"}, "a</w>", b"a "),
        ({"type": "Strip"}, " a", b" a"),
        (None, "a", b"a"),
    ],
)
def test_each_decoder_has_its_spelling(decoder: dict[str, Any] | None, spelling: str, wanted: bytes) -> None:
    assert Spelling(decoder).to_bytes(spelling) == wanted


def test_llamas_spellings_joined_are_its_text() -> None:
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁": 256, "a": 257}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    inner.normalizer = tokenizers.normalizers.Replace(" ", "▁")
    inner.decoder = tokenizers.decoders.Sequence(
        [tokenizers.decoders.Replace("▁", " "), tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()]
    )
    tokenizer = Tokenizer(inner)
    assert b"".join(map(tokenizer.token_bytes, tokenizer.encode_plain("a € a"))) == "a € a".encode()
