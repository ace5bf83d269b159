"""Making tokenizers: characters, byte-level BPE, and a vocabulary of as many words as wanted.

Each is one self-contained `tokenizer.json`: normaliser, splitter, vocabulary, post-processor, decoder. Ids 0, 1 and 2
are pad, bos and eos everywhere. Needs no torch; knows nothing of models beyond which family a prompt is for.

Source of BPE on words: Sennrich et al. (2016); on bytes: Radford et al., "Language Models are Unsupervised Multitask
Learners" (2019).
"""

from __future__ import annotations

from collections.abc import Iterable

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from model.config import Architecture
from model.tokenizer import BOS_ID, EOS_ID, Tokenizer

PAD = "<pad>"
BOS = "<bos>"
EOS = "<eos>"
UNKNOWN = "<unk>"

# One token may hold a line break with the indentation that follows it, a word with the blank before it, digits by
# threes, or a run of punctuation: Python's own rhythm. Every character falls into exactly one alternative.
CODE_PATTERN = r"\n[ \t]*|[ ]?[\p{L}_][\p{L}\p{M}\p{N}_]*|[ ]?\p{N}{1,3}|[ ]?[^\s\p{L}\p{N}_]+|[^\S\n]+"


def characters(texts: Iterable[str], architecture: Architecture) -> Tokenizer:
    """One token per character of the normalised text; those that do not occur in `texts` become `<unk>`.

    People write the same date with other capitals, other blanks and composed or decomposed accents. Normalising all of
    that away (NFKC, lower case, single blanks, none at the ends) costs nothing and makes them one input.
    """
    inner = tokenizers.Tokenizer(models.WordLevel({}, unk_token=UNKNOWN))
    inner.normalizer = normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.Lowercase(),
            normalizers.Replace(tokenizers.Regex(r"\s+"), " "),
            normalizers.Strip(),
        ]
    )
    alphabet = sorted({character for text in texts for character in inner.normalizer.normalize_str(text)})
    vocabulary = {token: index for index, token in enumerate([PAD, BOS, EOS, UNKNOWN, *alphabet])}
    inner.model = models.WordLevel(vocabulary, unk_token=UNKNOWN)
    inner.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), behavior="isolated")
    inner.decoder = decoders.Fuse()
    return _finish(inner, architecture, [PAD, BOS, EOS, UNKNOWN])


def byte_level_bpe(texts: Iterable[str], vocab_size: int, architecture: Architecture) -> Tokenizer:
    """Byte-pair merges learned from `texts`, inside the pieces of `CODE_PATTERN`; any text comes back unchanged.

    Raises:
        ValueError: when the vocabulary is too small for the control tokens and the 256 bytes.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    smallest = len(alphabet) + 3
    if vocab_size < smallest:
        raise ValueError(f"vocab_size is {vocab_size}, byte-level BPE needs at least {smallest}")
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(CODE_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[PAD, BOS, EOS], initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator(texts, trainer)
    return _finish(inner, architecture, [PAD, BOS, EOS])


def one_word_per_id(vocab_size: int, architecture: Architecture) -> Tokenizer:
    """A stand-in for models with random weights: id i is the word `w<i>`, so that whatever they say can be read.

    Raises:
        ValueError: when there is no room for the control tokens.
    """
    special = [PAD, BOS, EOS, UNKNOWN]
    if vocab_size < len(special):
        raise ValueError(f"vocab_size is {vocab_size}, the control tokens alone need {len(special)}")
    words = [*special, *(f"w{index}" for index in range(len(special), vocab_size))]
    inner = tokenizers.Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token=UNKNOWN))
    # Punctuation stands alone, or the word `<bos>` would be found in the vocabulary.
    inner.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation()])
    return _finish(inner, architecture, special)


def _finish(inner: tokenizers.Tokenizer, architecture: Architecture, special: list[str]) -> Tokenizer:
    """Declares the control tokens and how a prompt is framed: bos before a text to continue, eos after a source."""
    inner.add_special_tokens(special)
    if architecture is Architecture.ENCODER_DECODER:
        frame = processors.TemplateProcessing(single=f"$A {EOS}", special_tokens=[(EOS, EOS_ID)])
    else:
        frame = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, BOS_ID)])
    inner.post_processor = frame
    return Tokenizer(inner)
