"""Tokenizers: what comes back, what never becomes a control token, and which ids frame a prompt."""

from __future__ import annotations

import itertools
import json
import threading
import time
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.spec.config import Architecture
from model.spec.tokenizer import BOS_ID, EOS_ID, LOSSY_TOKEN_BYTES, PAD_ID, Tokenizer, TokenizerError
from model.tokenizer_training import (
    BOS,
    EOS,
    PAD,
    UNKNOWN,
    byte_level_bpe,
    characters,
    one_word_per_id,
    single_bytes,
    words,
)

SOURCE = """def add(a, b):
    return a + b


class Counter:
    def __init__(self):
        self.n = 0
"""
BPE = byte_level_bpe([SOURCE] * 4, 320, Architecture.DECODER_ONLY)
CHARACTERS = characters(
    ["vendredi 20 novembre 2026", "pátek 3. června 2026", "0123456789-"], Architecture.ENCODER_DECODER
)
NATURAL = byte_level_bpe(["the cat sat on the mat, the end"] * 4, 300, Architecture.DECODER_ONLY, pattern=None)
BYTES = single_bytes(259, Architecture.ENCODER_DECODER)
LETTERS = characters(["Über den Wolken,\n\tüber ALLEM"], Architecture.ENCODER_DECODER, fold=False)
WORDS = one_word_per_id(300, Architecture.DECODER_ONLY)

BANK = words(
    ["Money bank grows.", "River bank,\n\tbank  flows.Money . bank"] * 2 + ["once"],
    Architecture.DECODER_ONLY,
    min_frequency=2,
)

any_text = st.text(st.characters(exclude_categories=["Cs"]))


@pytest.mark.parametrize("tokenizer", [BPE, NATURAL, BYTES], ids=["code", "natural", "bytes"])
@given(text=any_text)
def test_byte_level_tokens_give_any_text_back(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode(tokenizer.encode_plain(text)) == text


@pytest.mark.parametrize("tokenizer", [BPE, NATURAL, BYTES], ids=["code", "natural", "bytes"])
@given(text=any_text)
def test_text_of_so_many_tokens_has_no_more_bytes_than_they_hold(tokenizer: Tokenizer, text: str) -> None:
    """Long runs besides: those are what tokens of many bytes are made for."""
    for each in (text, text * 50, SOURCE + text):
        num_tokens = len(tokenizer.encode_plain(each))
        assert len(each.encode()) <= tokenizer.max_bytes(num_tokens)
    assert tokenizer.max_bytes(1) < LOSSY_TOKEN_BYTES


@given(st.lists(st.sampled_from([".Money", " Money", " bank", ".", " ", "  ", "\n", "\t"])).map("".join))
def test_lines_of_known_words_come_back_whatever_their_blanks(text: str) -> None:
    ids = BANK.encode_plain(text)
    assert {BANK.token(index) for index in ids} <= {"Money", " Money", "bank", " bank", ".", " .", " ", "\n", "\t"}
    assert BANK.decode(ids) == text
    # As a stream of tokens, text only grows.
    parts = [BANK.decode(ids[:count]) for count in range(len(ids) + 1)]
    assert all(after.startswith(before) for before, after in itertools.pairwise(parts))


def test_a_word_has_one_token_wherever_in_a_line() -> None:
    ids = BANK.encode_plain("bank bank.\nbank\n\n bank")
    assert [BANK.token(index) for index in ids] == [" bank", " bank", ".", "\n", " bank", "\n", "\n", " ", " bank"]


def test_rarer_words_than_the_cut_are_unknown_and_control_tokens_are_never_spelled() -> None:
    assert [BANK.token(index) for index in BANK.encode("Money bank once")] == [BOS, " Money", " bank", UNKNOWN]
    assert set(BANK.encode_plain("<bos><unk>")) == {BANK.unknown_id}
    assert BANK.decode(BANK.encode("Money once bank")) == "Money bank"
    two = words(["b b a a c"], Architecture.ENCODER_DECODER, vocab_size=6)
    assert [two.token(index) for index in two.encode("a b c")] == [" a", " b", UNKNOWN, EOS]
    with pytest.raises(ValueError, match="vocab_size is 4, words need at least 5"):
        words(["a"], Architecture.DECODER_ONLY, vocab_size=4)
    with pytest.raises(ValueError, match="min_frequency is 3, no word of the texts is as frequent"):
        words(["a a"], Architecture.DECODER_ONLY, min_frequency=3)


def changed(**parts: Any) -> Tokenizer:
    """`BPE` with other parts."""
    described = json.loads(BPE.to_json())
    described["model"] |= parts.pop("model", {})
    return Tokenizer.from_json(json.dumps(described | parts))


ADDED = {"id": 320, "content": "<a>", "single_word": False, "normalized": False, "special": False}
LOSSY: dict[str, dict[str, Any]] = {
    "normalizer that strips": {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}},
    "normalizer that composes": {
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": " "}, {"type": "NFKC"}]}
    },
    "normalizer that shortens": {
        "normalizer": {"type": "Replace", "pattern": {"String": "  "}, "content": " "},
    },
    "normalizer by pattern": {"normalizer": {"type": "Replace", "pattern": {"Regex": " +"}, "content": " "}},
    "split that removes": {
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"String": " "}, "behavior": "Removed", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
            ],
        }
    },
    "white space": {"pre_tokenizer": {"type": "WhitespaceSplit"}},
    "no pre-tokenizer": {"pre_tokenizer": None},
    "added token that takes spaces along": {"added_tokens": [{**ADDED, "lstrip": True, "rstrip": False}]},
    "symbol that is missing": {
        "model": {"vocab": {"a": 0, "b": 1}, "merges": []},
        "added_tokens": [],
        "post_processor": None,
    },
}


@pytest.mark.parametrize("parts", LOSSY.values(), ids=LOSSY.keys())
def test_where_text_may_get_lost_a_token_holds_what_is_documented(parts: dict[str, Any]) -> None:
    assert changed(**parts).max_bytes(3) == 3 * LOSSY_TOKEN_BYTES
    assert CHARACTERS.max_bytes(1) == WORDS.max_bytes(1) == LOSSY_TOKEN_BYTES


def test_parts_that_keep_all_text_leave_spellings_as_the_bound() -> None:
    split = {"type": "Split", "pattern": {"Regex": r"\\p{L}+"}, "behavior": "Isolated", "invert": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    like_llama = changed(pre_tokenizer={"type": "Sequence", "pretokenizers": [split, byte_level]})
    assert like_llama.max_bytes(1) == BPE.max_bytes(1) < LOSSY_TOKEN_BYTES
    longer = {"normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}}
    assert changed(**longer).max_bytes(1) == BPE.max_bytes(1)


def test_other_threads_go_on_while_a_text_is_tokenized() -> None:
    began, ended = threading.Event(), threading.Event()

    def tokenize() -> None:
        began.set()
        BPE.encode("import os " * 60_000)
        ended.set()

    thread = threading.Thread(target=tokenize)
    thread.start()
    began.wait()
    num_turns = 0
    while not ended.is_set():
        time.sleep(0.001)
        num_turns += 1
    thread.join()
    # One that waits for the interpreter's lock has a turn before it and one behind it.
    assert num_turns > 5


def test_panic_of_the_library_is_an_error_like_others() -> None:
    """The library's own: a decoder that strips more than a token has, a pre-tokenizer that cuts nothing off."""
    with pytest.raises(TokenizerError, match="the tokenizers library panicked: index out of bounds"):
        changed(decoder={"type": "Strip", "content": "a", "start": 0, "stop": 2}).decode(BPE.encode_plain("a"))
    without_length = changed(pre_tokenizer={"type": "FixedLength", "length": 0})
    for encode in (without_length.encode, without_length.encode_plain, without_length.with_marks().encode):
        with pytest.raises(TokenizerError, match="the tokenizers library panicked: chunk size must be non-zero"):
            encode("a")


@given(any_text)
def test_single_bytes_are_one_token_each(text: str) -> None:
    assert len(BYTES.encode_plain(text)) == len(text.encode())


@given(st.text(st.sampled_from("Übernd Wolk,\n\tALEMü\N{COMBINING DIAERESIS}")))
def test_characters_of_general_text_come_back_composed_and_otherwise_as_they_were(text: str) -> None:
    composed = unicodedata.normalize("NFC", text)
    known = {LETTERS.token(index) for index in range(LETTERS.vocab_size)}
    if set(composed) <= known:
        assert LETTERS.decode(LETTERS.encode(text)) == composed
    assert len(LETTERS.encode_plain(text)) == len(composed)


@given(st.lists(any_text, max_size=20))
def test_many_texts_at_a_time_are_encoded_as_one_by_one(texts: list[str]) -> None:
    for tokenizer in (BPE, BYTES, LETTERS):
        assert tokenizer.encode_batch(texts) == [tokenizer.encode(text) for text in texts]
        assert tokenizer.encode_plain_batch(texts) == [tokenizer.encode_plain(text) for text in texts]


def test_byte_level_bpe_learns_merges_from_its_texts() -> None:
    assert len(BPE.encode_plain(SOURCE)) < len(SOURCE) / 2
    assert len(BPE.encode_plain("\n    ")) == 1
    assert BYTES.vocab_size == single_bytes(5000, Architecture.DECODER_ONLY).vocab_size == 259
    assert BPE.vocab_size <= 320


def test_byte_level_bpe_is_the_same_each_time() -> None:
    assert byte_level_bpe([SOURCE] * 4, 320, Architecture.DECODER_ONLY).to_json() == BPE.to_json()


def test_a_vocabulary_too_small_for_bytes_is_refused() -> None:
    for make in (
        lambda: byte_level_bpe([SOURCE], 258, Architecture.DECODER_ONLY),
        lambda: single_bytes(258, Architecture.DECODER_ONLY),
    ):
        with pytest.raises(ValueError, match="vocab_size is 258, byte-level tokens need at least 259"):
            make()


def test_a_vocabulary_takes_the_most_frequent_characters() -> None:
    tokenizer = characters(["aaabbc"], Architecture.ENCODER_DECODER, vocab_size=6, fold=False)
    assert [tokenizer.token(index) for index in range(tokenizer.vocab_size)] == [PAD, BOS, EOS, UNKNOWN, "a", "b"]
    assert tokenizer.encode_plain("abc") == [4, 5, tokenizer.unknown_id]
    with pytest.raises(ValueError, match="vocab_size is 4, characters need at least 5"):
        characters(["a"], Architecture.ENCODER_DECODER, vocab_size=4)


def test_merges_of_natural_text_keep_to_words() -> None:
    spellings = [NATURAL.token(index) or "" for index in range(NATURAL.vocab_size)]
    assert "Ġthe" in spellings
    assert not any("Ġ" in spelling[1:] for spelling in spellings)


def test_what_a_tokenizer_cannot_spell_has_an_id_or_does_not_occur() -> None:
    assert [tokenizer.unknown_id for tokenizer in (BPE, BYTES, CHARACTERS, WORDS)] == [None, None, 3, 3]
    assert [tokenizer.is_byte_level for tokenizer in (BPE, BYTES, CHARACTERS, WORDS)] == [True, True, False, False]


@pytest.mark.parametrize(
    "tokenizer", [BPE, BYTES, CHARACTERS, LETTERS, WORDS], ids=["bpe", "bytes", "characters", "letters", "words"]
)
def test_control_tokens_written_out_are_ordinary_characters(tokenizer: Tokenizer) -> None:
    plain = tokenizer.encode_plain(f"{BOS} {EOS} {PAD}")
    assert len(plain) > 3
    assert [tokenizer.token(index) for index in (PAD_ID, BOS_ID, EOS_ID)] == [PAD, BOS, EOS]
    assert not {PAD_ID, BOS_ID, EOS_ID} & set(plain)


def test_a_text_to_continue_begins_with_bos_and_a_source_ends_with_eos() -> None:
    assert BPE.encode("x = 1") == [BOS_ID, *BPE.encode_plain("x = 1")]
    assert CHARACTERS.encode("20") == [*CHARACTERS.encode_plain("20"), EOS_ID]
    assert BPE.encode("") == [BOS_ID]
    assert CHARACTERS.encode("") == [EOS_ID]
    assert BPE.encode_plain("") == []
    assert BPE.with_marks().encode("x = 1") == BPE.encode_plain("x = 1")


def test_decoding_leaves_control_tokens_out() -> None:
    ids = BPE.encode_plain("x = 1")
    assert BPE.decode([PAD_ID, BOS_ID, *ids, EOS_ID, PAD_ID]) == "x = 1"


def test_part_of_a_character_decodes_to_the_replacement_character() -> None:
    ids = BPE.encode_plain("…")
    assert len(ids) == 3
    assert BPE.decode(ids[:2]) == "\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize(
    "text",
    [
        "VENDREDI 20 NOVEMBRE 2026",
        "  vendredi\t20  novembre 2026\n",
        "vendredi\N{NO-BREAK SPACE}20\N{NARROW NO-BREAK SPACE}novembre 2026",
        "vendredi 20 novembre 2026",
    ],
)
def test_other_ways_to_type_the_same_characters_are_the_same_input(text: str) -> None:
    assert CHARACTERS.encode(text) == CHARACTERS.encode("vendredi 20 novembre 2026")
    assert CHARACTERS.encode("pa\N{COMBINING ACUTE ACCENT}tek") == CHARACTERS.encode("pátek")


def test_every_id_of_the_stand_in_is_a_word_of_its_own() -> None:
    words = [WORDS.decode([index]) for index in range(4, 300)]
    assert len(set(words)) == 296
    assert WORDS.encode_plain(" ".join(words)) == list(range(4, 300))
    assert WORDS.vocab_size == 300


def test_a_stand_in_without_room_for_control_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="vocab_size is 3"):
        one_word_per_id(3, Architecture.DECODER_ONLY)


@pytest.mark.parametrize(
    "tokenizer", [BPE, BYTES, CHARACTERS, LETTERS, WORDS], ids=["bpe", "bytes", "characters", "letters", "words"]
)
def test_a_tokenizer_survives_its_file(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(tokenizer.to_json(), encoding="utf-8")
    loaded = Tokenizer.load(path)
    assert loaded.to_json() == tokenizer.to_json()
    for text in (SOURCE, "vendredi 20 novembre", "w17 w4", f"{BOS} x {EOS}"):
        assert loaded.encode(text) == tokenizer.encode(text)


def test_truncation_and_padding_in_a_file_are_ignored(tmp_path: Path) -> None:
    text = BPE.to_json()
    padded = text.replace(
        '"truncation": null',
        '"truncation": {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}',
    )
    assert padded != text
    assert Tokenizer.from_json(padded).encode(SOURCE) == BPE.encode(SOURCE)


@pytest.mark.parametrize("content", [b"", b"{}", b"[1, 2]", b"\xff\xfe"])
def test_a_file_that_is_no_tokenizer_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "tokenizer.json"
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        Tokenizer.load(path)
    path.write_bytes(content)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        Tokenizer.load(path)
