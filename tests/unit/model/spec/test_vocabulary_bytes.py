"""The bytes of single tokens: in a row they are what the library decodes, for every decoder that is not refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models

from model.spec.tokenizer import Tokenizer, TokenizerError
from model.spec.vocabulary_bytes import spell_tokens
from tests.structured import tokenizer as byte_level

_SPACE = "▁"
_PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), _SPACE, f"{_SPACE}a", "a", "b", "é"]
_LLAMA = decoders.Sequence(
    [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
)


def pieces(decoder: Any) -> Tokenizer:
    """A tokenizer of these pieces: a space's mark, words, bytes, three control tokens."""
    inner = tokenizers.Tokenizer(models.BPE(vocab={piece: at for at, piece in enumerate(_PIECES)}, merges=[]))
    inner.add_special_tokens(_PIECES[:3])
    inner.decoder = decoder
    return Tokenizer(inner)


SPELLABLE = {
    "byte-level": byte_level,
    "byte fallback": lambda: pieces(_LLAMA),
    "metaspace": lambda: pieces(decoders.Metaspace()),
    "metaspace without a prefix": lambda: pieces(decoders.Metaspace(prepend_scheme="never")),
    "fuse": lambda: pieces(decoders.Fuse()),
}


@pytest.mark.parametrize("name", SPELLABLE)
@given(data=st.data())
def test_bytes_in_a_row_are_the_decoded_text(name: str, data: st.DataObject) -> None:
    tokenizer = SPELLABLE[name]()
    spelled = spell_tokens(tokenizer)
    ids = [token_id for token_id in range(tokenizer.vocab_size) if spelled.later[token_id]]
    drawn = data.draw(st.lists(st.sampled_from(ids[-8:] + ids[40:120]), min_size=1, max_size=8))
    joined = spelled.first[drawn[0]] + b"".join(spelled.later[token_id] for token_id in drawn[1:])
    try:
        text = joined.decode()
    except UnicodeDecodeError:
        return  # what is no text is decoded otherwise
    assert tokenizer.decode(drawn) == text


def test_a_character_of_several_tokens_is_spelled_byte_by_byte() -> None:
    tokenizer = byte_level()
    later = spell_tokens(tokenizer).later
    assert [later[token_id] for token_id in tokenizer.encode_plain("é")] == ["é".encode()[:1], "é".encode()[1:]]


def test_control_tokens_have_no_bytes() -> None:
    assert spell_tokens(pieces(_LLAMA)).later[:4] == (b"", b"", b"", b"\x00")


@pytest.mark.parametrize(
    "decoder",
    [decoders.WordPiece(), decoders.BPEDecoder(), decoders.CTC(), decoders.Strip(" ", 1, 0), None],
    ids=["WordPiece", "BPEDecoder", "CTC", "Strip of each token", "none"],
)
def test_decoder_that_does_more_is_refused(decoder: Any) -> None:
    with pytest.raises(TokenizerError, match="the bytes of single tokens are unknown"):
        spell_tokens(Tokenizer.from_json(_without(decoder)))


def _without(decoder: Any) -> str:
    described = json.loads(pieces(decoders.Fuse()).to_json())
    if decoder is None:
        return json.dumps(described | {"decoder": None})
    inner = tokenizers.Tokenizer.from_str(json.dumps(described))
    inner.decoder = decoder
    return str(inner.to_str())
