"""Trains tokenizers: byte-level BPE, bytes, characters, words, and placeholder words.

Each is one self-contained `tokenizer.json`: normalizer, splitter, vocabulary, post-processor, decoder. Ids 0, 1 and 2
are pad, bos and eos. Needs no torch.

Source of BPE on words: Sennrich et al. (2016); on bytes: Radford et al., "Language Models are Unsupervised Multitask
Learners" (2019).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from model.spec.config import Architecture
from model.spec.tokenizer import BOS_ID, EOS_ID, Tokenizer

PAD = "<pad>"
BOS = "<bos>"
EOS = "<eos>"
UNKNOWN = "<unk>"

# A word or one other visible character, each with the blank before it; or one white space.
_LETTERS = r"\p{L}\p{M}\p{N}_"
_WORD_PATTERN = rf"[ ]?[{_LETTERS}]+|[ ]?[^\s{_LETTERS}]|\s"

_ALL_WORDS = 1 << 30
_BYTE_SYMBOLS = sorted(pre_tokenizers.ByteLevel.alphabet())

# For source code. A token may hold a line break with its indentation, a word with the blank before it, up to three
# digits, or a run of punctuation. Every character matches exactly one alternative.
CODE_PATTERN = r"\n[ \t]*|[ ]?[\p{L}_][\p{L}\p{M}\p{N}_]*|[ ]?\p{N}{1,3}|[ ]?[^\s\p{L}\p{N}_]+|[^\S\n]+"


def characters(
    texts: Iterable[str], architecture: Architecture, *, vocab_size: int | None = None, fold: bool = True
) -> Tokenizer:
    """One token per character of the normalized text; characters outside the vocabulary become `<unk>`.

    The vocabulary has the characters of `texts`, the most frequent ones if `vocab_size` (control tokens included)
    limits them. `fold` normalizes case, blanks and compatibility characters (NFKC, lower case, single blanks, none at
    the ends), so that variants of one date are one input; without it only accents are composed (NFC), as targets need.

    Raises:
        ValueError: when `vocab_size` leaves no room for a character.
    """
    special = [PAD, BOS, EOS, UNKNOWN]
    if vocab_size is not None and vocab_size <= len(special):
        raise ValueError(f"vocab_size is {vocab_size}, characters need at least {len(special) + 1}")
    inner = tokenizers.Tokenizer(models.WordLevel({}, unk_token=UNKNOWN))
    folding = [
        normalizers.NFKC(),
        normalizers.Lowercase(),
        normalizers.Replace(tokenizers.Regex(r"\s+"), " "),
        normalizers.Strip(),
    ]
    inner.normalizer = normalizers.Sequence(folding if fold else [normalizers.NFC()])
    counts = Counter(character for text in texts for character in inner.normalizer.normalize_str(text))
    most = None if vocab_size is None else vocab_size - len(special)
    # Ties are broken by code point, for a deterministic choice.
    alphabet = sorted(sorted(counts, key=lambda character: (-counts[character], character))[:most])
    vocabulary = {token: index for index, token in enumerate([*special, *alphabet])}
    inner.model = models.WordLevel(vocabulary, unk_token=UNKNOWN)
    inner.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), behavior="isolated")
    inner.decoder = decoders.Fuse()
    return _finish(inner, architecture, special)


def words(
    texts: Iterable[str], architecture: Architecture, *, vocab_size: int | None = None, min_frequency: int = 1
) -> Tokenizer:
    """One token per word, punctuation mark or line break; rarer words than the cut become `<unk>`.

    The vocabulary has what occurs `min_frequency` times in `texts`, the most frequent if `vocab_size` (control tokens
    included) limits it, ties by code point. Accents are composed (NFC), case stays. A token has the blank before it,
    and a line begins as if after one, so that a word has one token. Decoding restores lines of known words, indented
    or not.

    Raises:
        ValueError: when `vocab_size` leaves no room for a word, or none is frequent enough.
    """
    special = [PAD, BOS, EOS, UNKNOWN]
    if vocab_size is not None and vocab_size <= len(special):
        raise ValueError(f"vocab_size is {vocab_size}, words need at least {len(special) + 1}")
    inner = tokenizers.Tokenizer(models.WordLevel({}, unk_token=UNKNOWN))
    first_blank = normalizers.Replace(tokenizers.Regex(r"(?:\A|(?<=\n))(?=\S| )"), " ")
    inner.normalizer = normalizers.Sequence([normalizers.NFC(), first_blank])
    inner.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(_WORD_PATTERN), behavior="isolated")
    inner.decoder = decoders.Sequence([decoders.Fuse(), decoders.Replace("\n ", "\n"), decoders.Strip(" ", 1, 0)])
    trainer = trainers.WordLevelTrainer(
        vocab_size=_ALL_WORDS if vocab_size is None else vocab_size,
        min_frequency=min_frequency,
        special_tokens=special,
        show_progress=False,
    )
    inner.train_from_iterator(texts, trainer)
    if inner.get_vocab_size() <= len(special):
        raise ValueError(f"min_frequency is {min_frequency}, no word of the texts is as frequent")
    return _finish(inner, architecture, special)


def byte_level_bpe(
    texts: Iterable[str], vocab_size: int, architecture: Architecture, *, pattern: str | None = CODE_PATTERN
) -> Tokenizer:
    """Byte-pair merges learned from `texts`; decoding restores any text exactly.

    `vocab_size` includes control tokens. No merge crosses the matches of `pattern`; None is GPT-2's, for natural
    languages.

    Raises:
        ValueError: when the vocabulary is too small for the control tokens and the 256 bytes.
    """
    inner = _byte_level(vocab_size, pattern)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, BOS, EOS],
        initial_alphabet=_BYTE_SYMBOLS,
        show_progress=False,
    )
    inner.train_from_iterator(texts, trainer)
    return _finish(inner, architecture, [PAD, BOS, EOS])


def single_bytes(vocab_size: int, architecture: Architecture) -> Tokenizer:
    """One token per byte of the UTF-8 text: byte-level BPE without merges; decoding restores any text exactly.

    Raises:
        ValueError: when the vocabulary is too small for the control tokens and the 256 bytes.
    """
    inner = _byte_level(vocab_size, None)
    vocabulary = {token: index for index, token in enumerate([PAD, BOS, EOS, *_BYTE_SYMBOLS])}
    inner.model = models.BPE(vocab=vocabulary, merges=[])
    return _finish(inner, architecture, [PAD, BOS, EOS])


def _byte_level(vocab_size: int, pattern: str | None) -> tokenizers.Tokenizer:
    """An empty BPE model with splitter and decoder of byte symbols."""
    smallest = len(_BYTE_SYMBOLS) + len((PAD, BOS, EOS))
    if vocab_size < smallest:
        raise ValueError(f"vocab_size is {vocab_size}, byte-level tokens need at least {smallest}")
    inner = tokenizers.Tokenizer(models.BPE())
    if pattern is None:
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    else:
        inner.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    inner.decoder = decoders.ByteLevel()
    return inner


def one_word_per_id(vocab_size: int, architecture: Architecture) -> Tokenizer:
    """A placeholder for models with random weights: id i is the word `w<i>`.

    Raises:
        ValueError: when there is no room for the control tokens.
    """
    special = [PAD, BOS, EOS, UNKNOWN]
    if vocab_size < len(special):
        raise ValueError(f"vocab_size is {vocab_size}, the control tokens alone need {len(special)}")
    words = [*special, *(f"w{index}" for index in range(len(special), vocab_size))]
    inner = tokenizers.Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token=UNKNOWN))
    # Splits off punctuation: otherwise the text `<bos>` would be a word of the vocabulary.
    inner.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation()])
    return _finish(inner, architecture, special)


def _finish(inner: tokenizers.Tokenizer, architecture: Architecture, special: list[str]) -> Tokenizer:
    """Declares the control tokens and the frame of a prompt: bos before a text to continue, eos after a source."""
    inner.add_special_tokens(special)
    if architecture is Architecture.ENCODER_DECODER:
        frame = processors.TemplateProcessing(single=f"$A {EOS}", special_tokens=[(EOS, EOS_ID)])
    else:
        frame = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, BOS_ID)])
    inner.post_processor = frame
    return Tokenizer(inner)
