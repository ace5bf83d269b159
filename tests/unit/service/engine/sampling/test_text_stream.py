"""Text grows by whole characters, ends at stop strings, and adds up to what decoding everything gives."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from service.engine.sampling.text import Decode, TextStream

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def byte_level() -> tuple[Decode, dict[int, int]]:
    """A byte-level tokenizer with one token for each byte; its decoder, and token ids by byte."""
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(ALPHABET)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    # How byte-level BPE names bytes: printable ones by themselves, the rest in order from U+0100 (GPT-2).
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    rest = [byte for byte in range(256) if byte not in printable]
    names = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(rest)}
    ids = {byte: tokenizer.token_to_id(name) for byte, name in names.items()}
    return lambda token_ids: str(tokenizer.decode(list(token_ids), skip_special_tokens=True)), ids


DECODE, BYTE_IDS = byte_level()
SPECIAL_ID = len(ALPHABET)


def ids_of(text: str | bytes) -> list[int]:
    return [BYTE_IDS[byte] for byte in (text.encode() if isinstance(text, str) else text)]


def pieces_of(stream: TextStream, token_ids: Sequence[int]) -> list[str]:
    return [*(stream.push(token_id) for token_id in token_ids), stream.flush()]


def words(token_ids: Sequence[int]) -> str:
    """A decoder for tokens that are words, fixed for the stop-string tests."""
    return "".join(WORDS[i] for i in token_ids)


WORDS = ["a", "b", "ab", "ba", "abc", "\n\n", "x", "bab"]


def test_text_stream_gives_each_character_with_the_token_that_completes_it() -> None:
    assert pieces_of(TextStream(DECODE), ids_of("aé日")) == ["a", "", "é", "", "", "日", ""]


def test_text_stream_incomplete_character_at_the_end_comes_with_flush() -> None:
    assert pieces_of(TextStream(DECODE), ids_of("a日".encode()[:-1])) == ["a", "", "", "\N{REPLACEMENT CHARACTER}"]


@given(st.lists(st.integers(0, 255) | st.just(-1), max_size=60))
def test_text_stream_pieces_add_up_to_decoding_everything(data: list[int]) -> None:
    """Arbitrary bytes, well-formed or not, with special tokens (-1) in between."""
    token_ids = [SPECIAL_ID if byte < 0 else BYTE_IDS[byte] for byte in data]
    assert "".join(pieces_of(TextStream(DECODE), token_ids)) == DECODE(token_ids)


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters=["\N{REPLACEMENT CHARACTER}"])))
def test_text_stream_of_well_formed_text_is_never_behind_by_a_whole_character(text: str) -> None:
    stream = TextStream(DECODE)
    seen = ""
    for index, character in enumerate(text):
        seen += "".join(stream.push(token_id) for token_id in ids_of(character))
        assert seen == text[: index + 1]


def test_text_stream_ill_formed_text_is_not_held_back_for_ever() -> None:
    stream = TextStream(DECODE)
    given_out = sum(len(stream.push(BYTE_IDS[0xFF])) for _ in range(100))
    assert given_out > 80


@given(
    vocabulary=st.lists(
        st.lists(st.sampled_from([0xFF, 0xE6, 0x97, 0xA5, 0xF0, 0x9F, 0x80, 0x61]), max_size=4).map(bytes),
        min_size=2,
        max_size=5,
    ),
    numbers=st.lists(st.integers(0, 4), min_size=20, max_size=90),
)
def test_text_stream_pieces_of_tokens_that_split_characters_anywhere_add_up(
    vocabulary: list[bytes], numbers: list[int]
) -> None:
    def decode(token_ids: Sequence[int]) -> str:
        return b"".join(vocabulary[i] for i in token_ids).decode(errors="replace")

    token_ids = [number % len(vocabulary) for number in numbers]
    assert "".join(pieces_of(TextStream(decode), token_ids)) == decode(token_ids)


@pytest.mark.parametrize("stop", [(), ("never",)])
@pytest.mark.parametrize(
    ("token_ids", "most"),
    [
        (ids_of("日本語 text ") * 50, 16),
        ([SPECIAL_ID] * 1000, 8),
        (ids_of("a") + [SPECIAL_ID] * 1000, 8),
        (ids_of("日".encode()[:2]) + [SPECIAL_ID] * 1000 + ids_of("日".encode()[2:]), 12),
        (ids_of(b"\xff") * 1000, 100),
        (ids_of(b"\x80") * 1000, 100),
        (ids_of(b"\xf0\x9f\x80") * 300, 100),
        (ids_of(b"\xff") + [SPECIAL_ID] * 1000, 8),
        (ids_of("\N{REPLACEMENT CHARACTER}") * 300, 100),
    ],
    ids=["text", "special", "special-after-text", "special-within", "bad", "tails", "heads", "bad-special", "U+FFFD"],
)
def test_text_stream_work_for_a_token_is_bounded_whatever_the_output(
    token_ids: list[int], most: int, stop: tuple[str, ...]
) -> None:
    """Counts the tokens decoded for each token pushed; a client can ask for any of these outputs."""
    num_decoded = 0

    def decode(token_ids: Sequence[int]) -> str:
        nonlocal num_decoded
        num_decoded += len(token_ids)
        return DECODE(token_ids)

    stream = TextStream(decode, stop)
    pieces, work = [], []
    for token_id in token_ids:
        num_decoded = 0
        pieces.append(stream.push(token_id))
        work.append(num_decoded)
    assert max(work) <= most
    assert "".join(pieces) + stream.flush() == DECODE(token_ids)


def test_text_stream_a_space_that_the_decoder_strips_is_no_control_token() -> None:
    tokenizer = Tokenizer(models.BPE(vocab={"▁": 0, "▁a": 1, "b": 2}, merges=[]))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    token_ids = [0, 1, 0, 0, 2, 0, 1]
    pieces = pieces_of(TextStream(lambda ids: str(tokenizer.decode(list(ids)))), token_ids)
    assert "".join(pieces) == tokenizer.decode(token_ids) == " a  b  a"


def test_text_stream_keeps_the_spaces_of_a_decoder_that_joins_words() -> None:
    tokenizer = Tokenizer(models.WordLevel({"to": 0, "be": 1, "or": 2, "<unk>": 3}, unk_token="<unk>"))
    pieces = pieces_of(TextStream(lambda ids: str(tokenizer.decode(list(ids)))), [0, 1, 2, 0, 1])
    assert pieces == ["to", " be", " or", " to", " be", ""]


def test_text_stream_byte_fallback_characters_come_whole() -> None:
    vocab = {"<unk>": 0, "▁a": 1, "b": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    token_ids = [1, *(3 + byte for byte in "日本".encode()), 1, 2]
    pieces = pieces_of(TextStream(lambda ids: str(tokenizer.decode(list(ids)))), token_ids)
    assert pieces == ["a", "", "", "日", "", "", "本", " a", "b", ""]


def test_text_stream_holds_back_only_what_may_begin_a_stop_string() -> None:
    stream = TextStream(words, ["abx", "\n\n"])
    assert [stream.push(i) for i in [2, 0, 1, 1]] == ["", "ab", "", "abb"]
    assert stream.matched_stop is None


@given(st.binary(max_size=40), st.binary(max_size=20))
@example(("a" + 12 * "é").encode(), b"\xa9")
def test_text_stream_continues_a_prefix_without_repeating_it(prefix: bytes, data: bytes) -> None:
    before = ids_of(prefix.decode(errors="ignore"))
    stream = TextStream(DECODE, prefix_token_ids=before)
    text = "".join(pieces_of(stream, ids_of(data)))
    assert DECODE(before) + text == DECODE([*before, *ids_of(data)])


def test_text_stream_after_a_prefix_keeps_the_space_that_a_beginning_would_lose() -> None:
    tokenizer = Tokenizer(models.WordLevel(vocab={"▁an": 0, "▁d": 1, "y": 2}, unk_token="▁an"))
    tokenizer.decoder = decoders.Metaspace()

    def decode(token_ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(token_ids)))

    assert "".join(pieces_of(TextStream(decode), [1, 2, 0])) == "dy an"
    assert "".join(pieces_of(TextStream(decode, prefix_token_ids=[0]), [1, 2, 0])) == " dy an"


def test_text_stream_stop_strings_are_not_looked_for_in_the_prefix() -> None:
    stream = TextStream(words, ["ab"], prefix_token_ids=[2, 0])
    assert "".join(pieces_of(stream, [1, 6])) == "bx"
    assert stream.matched_stop is None


def by_definition(text: str, stops: list[str], *, include: bool, num_exempt: int = 0) -> tuple[str, str | None]:
    """Reads character by character until some stop string is complete, beyond the first `num_exempt`."""
    for end in range(num_exempt + 1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


@given(
    token_ids=st.lists(st.integers(0, len(WORDS) - 1), max_size=20),
    stops=st.lists(st.text("abcx\n", min_size=1, max_size=5), min_size=1, max_size=4),
    include=st.booleans(),
    min_tokens=st.just(0) | st.integers(0, 20),
)
def test_text_stream_ends_at_the_first_stop_string_after_min_tokens(
    token_ids: list[int], stops: list[str], include: bool, min_tokens: int
) -> None:
    stream = TextStream(words, stops, include_stop=include)
    pieces = [stream.push(token_id, may_stop=index >= min_tokens) for index, token_id in enumerate(token_ids)]
    text = "".join([*pieces, stream.flush()])
    num_exempt = len(words(token_ids[:min_tokens]))
    expected = by_definition(words(token_ids), stops, include=include, num_exempt=num_exempt)
    assert (text, stream.matched_stop) == expected
