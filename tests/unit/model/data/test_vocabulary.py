"""Which tokenizers a run uses: made within the model's vocabulary, or brought along and refused where they mismatch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from model.data import vocabulary
from model.data.config import DataConfig, DataConfigError
from model.data.files import DataError
from model.spec.artifact import TARGET_TOKENIZER, TOKENIZER
from model.spec.config import Architecture, ModelConfig
from model.spec.tokenizer import Tokenizer
from model.tokenizer_training import CODE_PATTERN, byte_level_bpe, characters, one_word_per_id, single_bytes, words

ENGLISH = [f"the cat number {index} sat on the mat" for index in range(50)]
GERMAN = [f"die Katze Nummer {index} saß auf der Matte" for index in range(50)]
CHINESE = [chr(0x4E00 + index) for index in range(300)]

any_text = st.text(st.characters(exclude_categories=["Cs"]))


def model(architecture: str = "encoder-decoder", **fields: Any) -> ModelConfig:
    layers = {"num_encoder_layers": 1} if architecture == "encoder-decoder" else {}
    sizes = {"vocab_size": 300, "context": 32, "d_model": 8, "num_layers": 1, "num_heads": 2, "d_ff": 8}
    return ModelConfig.from_dict({"architecture": architecture, **sizes, **layers, **fields})


def data(**fields: Any) -> DataConfig:
    return DataConfig.from_dict({"source": "jsonl", **fields})


def make(config: DataConfig, of: ModelConfig, sources: list[str], targets: list[str]) -> vocabulary.Tokenizers:
    if of.is_encoder_decoder:
        return vocabulary.for_pairs(config, of, sources, targets)
    return vocabulary.for_text(config, of, [*sources, *targets])


def refusal(config: DataConfig, of: ModelConfig, sources: list[str] = ENGLISH, targets: list[str] = GERMAN) -> str:
    with pytest.raises(DataError) as caught:
        make(config, of, sources, targets)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def save(path: Path, tokenizer: Tokenizer) -> str:
    path.write_text(tokenizer.to_json(), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("kind", ["bpe", "bytes", "characters"])
@settings(max_examples=25)
@given(texts=st.lists(any_text, max_size=8))
def test_every_kind_keeps_within_its_vocabulary_and_gives_its_texts_back(kind: str, texts: list[str]) -> None:
    made = vocabulary.for_pairs(data(tokenizer=kind), model(vocab_size=400), texts, ENGLISH)
    assert made.by_file == {TOKENIZER: made.source}
    assert made.source.vocab_size <= 400
    for text in (*texts, *ENGLISH):
        back = made.source.decode(made.source.encode(text))
        assert vocabulary._bare(back) == vocabulary._bare(text)
        assert kind == "characters" or back == text


def test_rare_words_may_be_unknown_within_a_bound() -> None:
    # One token in nine is a number, once on either side.
    made = vocabulary.for_pairs(data(tokenizer="words", min_frequency=3), model(), ENGLISH, GERMAN)
    assert made.source.vocab_size == 4 + len({*ENGLISH[0].split(), *GERMAN[0].split()} - {"0"})
    assert 0.1 < vocabulary.unknown_share(made.source, ENGLISH) < vocabulary.MAX_UNKNOWN_WORDS
    rare = [f"{index} {index + 1000}" for index in range(60)]
    assert refusal(data(tokenizer="words", min_frequency=2), model(), rare).endswith("at most 25% may be")
    assert refusal(data(tokenizer="words", min_frequency=999), model()).startswith("min_frequency is 999, no word")
    with pytest.raises(DataConfigError, match="min_frequency is 2, only tokenizer words has one"):
        data(tokenizer="bpe", min_frequency=2)


def test_two_tokenizers_are_each_made_from_their_own_side() -> None:
    config = data(tokenizer="characters", shared_tokenizer=False)
    made = vocabulary.for_pairs(config, model(source_vocab_size=100), ENGLISH, GERMAN)
    assert list(made.by_file) == [TOKENIZER, TARGET_TOKENIZER]
    assert made.source.encode_plain("ß") == [made.source.unknown_id]
    assert made.target.decode(made.target.encode_plain("ß")) == "ß"


def test_two_tokenizers_have_a_size_each_and_a_shared_one_has_one() -> None:
    apart = data(shared_tokenizer=False)
    made = vocabulary.for_pairs(apart, model(source_vocab_size=270), ENGLISH, GERMAN)
    assert (made.source.vocab_size, made.target.vocab_size) == (270, 300)
    assert refusal(data(), model(source_vocab_size=270)) == (
        "source_vocab_size is 270 and vocab_size 300: a shared tokenizer has one vocabulary "
        "(shared_tokenizer=false makes two)"
    )
    assert refusal(apart, model(source_vocab_size=200)).startswith("source_vocab_size is 200, byte-level tokens need")
    assert refusal(apart, model(vocab_size=200, source_vocab_size=300)).startswith("vocab_size is 200, byte-level")


def test_more_characters_than_fit_are_refused_with_the_share_that_is_unknown() -> None:
    message = refusal(data(tokenizer="characters"), model(vocab_size=154), CHINESE, CHINESE)
    assert message == (
        "characters tokenizer of vocab_size 154 does not match the data: 50.0% of its tokens are unknown, "
        "at most 1% may be"
    )


@pytest.mark.parametrize("architecture", list(Architecture))
@pytest.mark.parametrize("kind", ["bpe", "bytes", "characters", "words"])
def test_a_tokenizer_made_for_such_a_run_is_taken_as_it_is(
    tmp_path: Path, architecture: Architecture, kind: str
) -> None:
    of = model(architecture)
    texts = [*ENGLISH, *GERMAN]
    made = {
        "bpe": lambda: byte_level_bpe(texts, 300, architecture),
        "bytes": lambda: single_bytes(300, architecture),
        "characters": lambda: characters(texts, architecture),
        "words": lambda: words(texts, architecture),
    }[kind]()
    config = data(tokenizer_file=save(tmp_path / "mine.json", made))
    loaded = make(config, of, ENGLISH, GERMAN)
    assert loaded.source is loaded.target
    assert loaded.source.to_json() == made.to_json()


def test_a_second_file_is_for_the_target(tmp_path: Path) -> None:
    files = {
        "tokenizer_file": characters(ENGLISH, Architecture.ENCODER_DECODER),
        "target_tokenizer_file": characters(GERMAN, Architecture.ENCODER_DECODER),
    }
    config = data(shared_tokenizer=False, **{key: save(tmp_path / key, made) for key, made in files.items()})
    loaded = vocabulary.for_pairs(config, model(), ENGLISH, GERMAN)
    assert [each.to_json() for each in (loaded.source, loaded.target)] == [each.to_json() for each in files.values()]


@pytest.mark.parametrize("content", ["", "{}", '{"model": 3}', "\udcff"])
def test_a_file_that_is_missing_or_no_tokenizer_is_refused_by_name(tmp_path: Path, content: str) -> None:
    path = tmp_path / "bad.json"
    assert refusal(data(tokenizer_file=str(path)), model()).startswith(f"{path}: ")
    path.write_bytes(content.encode(errors="surrogateescape"))
    assert refusal(data(tokenizer_file=str(path)), model()).startswith(f"{path}: ")


def test_a_tokenizer_larger_than_the_model_is_refused_and_says_what_to_set(tmp_path: Path) -> None:
    path = save(tmp_path / "big.json", one_word_per_id(500, Architecture.ENCODER_DECODER))
    assert refusal(data(tokenizer_file=path), model()) == (
        f"{path}: 500 tokens, vocab_size is 300 (--set vocab_size=500 makes room)"
    )
    config = data(shared_tokenizer=False, tokenizer_file=path)
    assert "source_vocab_size is 270 (--set source_vocab_size=500" in refusal(config, model(source_vocab_size=270))


@pytest.mark.parametrize(
    ("made_for", "used_for", "found", "wanted"),
    [
        ("decoder-only", "encoder-decoder", "id 1 and the text", "the text and id 2 (end) for an encoder-decoder"),
        ("encoder-decoder", "decoder-only", "the text and id 2", "id 1 (begin) and the text for a decoder-only model"),
    ],
)
def test_a_tokenizer_made_for_the_other_family_is_refused(
    tmp_path: Path, made_for: str, used_for: str, found: str, wanted: str
) -> None:
    path = save(tmp_path / "other.json", single_bytes(300, Architecture(made_for)))
    message = refusal(data(tokenizer_file=path), model(used_for))
    assert message == f"{path}: a prompt becomes {found}, must be {wanted}"


def foreign(special: list[str], words: list[str]) -> tokenizers.Tokenizer:
    vocab = {word: index for index, word in enumerate([*special, *words])}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token=special[-1]))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    inner.add_special_tokens(special)
    return inner


def test_control_tokens_elsewhere_are_refused_by_their_spelling(tmp_path: Path) -> None:
    words = sorted({word for text in (*ENGLISH, *GERMAN) for word in text.split()})
    inner = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="the")
    )
    path = save(tmp_path / "none.json", Tokenizer(inner))
    assert refusal(data(tokenizer_file=path), model()) == (
        f"{path}: ids 0, 1, 2 are '0', '1', '10', must be control tokens for padding, begin and end"
    )
    # As in T5: padding, end, unknown, and the end after a source.
    inner = foreign(["<pad>", "</s>", "<unk>"], words)
    inner.post_processor = tokenizers.processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    path = save(tmp_path / "t5.json", Tokenizer(inner))
    assert refusal(data(tokenizer_file=path), model()) == (
        f"{path}: a prompt becomes the text and id 1, must be the text and id 2 (end) for an encoder-decoder"
    )


def test_a_tokenizer_that_adds_nothing_to_a_prompt_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "bare.json", Tokenizer(foreign(["<pad>", "<s>", "</s>", "<unk>"], ["a"])))
    assert f"{path}: a prompt becomes the text, must be id 1 (begin) and the text" in refusal(
        data(tokenizer_file=path), model("decoder-only")
    )


def test_a_tokenizer_of_another_language_is_refused_with_the_share_it_cannot_read(tmp_path: Path) -> None:
    path = save(tmp_path / "en.json", characters(ENGLISH, Architecture.ENCODER_DECODER))
    message = refusal(data(tokenizer_file=path), model(), CHINESE, CHINESE)
    assert message == f"{path} does not match the data: 100.0% of its tokens are unknown, at most 1% may be"


def test_a_tokenizer_that_drops_what_it_cannot_spell_is_refused(tmp_path: Path) -> None:
    # Byte-level, but with letters for an alphabet only: the library leaves out the rest without a word.
    text = json.loads(single_bytes(300, Architecture.ENCODER_DECODER).to_json())
    text["model"]["vocab"] = {key: index for key, index in text["model"]["vocab"].items() if key != "Ã"}
    path = tmp_path / "partial.json"
    path.write_text(json.dumps(text), encoding="utf-8")
    assert refusal(data(tokenizer_file=str(path)), model()) == (
        f"{path} does not match the data: 100.0% of the texts come back as others, at most 0% may"
    )


def test_a_tokenizer_that_folds_capitals_is_let_pass(tmp_path: Path) -> None:
    path = save(tmp_path / "lower.json", characters([*ENGLISH, *GERMAN], Architecture.ENCODER_DECODER))
    assert vocabulary.for_pairs(data(tokenizer_file=path), model(), ENGLISH, GERMAN)


pieces_of_text = st.lists(st.sampled_from(["word", " ", "\n", "\n\n", "\t", "    ", "é中", "1234", "!?"]), max_size=60)


@given(pieces_of_text.map("".join), st.integers(1, 20))
def test_a_text_in_pieces_has_the_tokens_of_the_whole(text: str, size: int) -> None:
    tokenizer_of = {
        pattern: byte_level_bpe([text], 300, Architecture.DECODER_ONLY, pattern=pattern)
        for pattern in (None, CODE_PATTERN)
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vocabulary, "_PIECE_CHARACTERS", size)
        parts = list(vocabulary.pieces(text))
        assert "".join(parts) == text
        for tokenizer in tokenizer_of.values():
            (ids,) = vocabulary.encode_documents(tokenizer, [text])
            assert ids.tolist() == tokenizer.encode_plain(text)


@given(st.lists(any_text, max_size=10))
def test_documents_keep_their_order_however_many_are_encoded_at_a_time(texts: list[str]) -> None:
    tokenizer = single_bytes(259, Architecture.DECODER_ONLY)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vocabulary, "_PIECES_AT_A_TIME", 3)
        encoded = list(vocabulary.encode_documents(tokenizer, texts))
    assert [ids.tolist() for ids in encoded] == [tokenizer.encode_plain(text) for text in texts]
    assert all(ids.dtype == np.int64 for ids in encoded)
