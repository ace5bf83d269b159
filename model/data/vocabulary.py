"""The tokenizers of a run: trained on its training texts, or loaded from a file and checked against model and data.

A tokenizer that does not match would train without an error and produce nonsense. Checked are its control tokens, its
framing of a prompt, its size, and whether the data survive encoding and decoding. Needs no torch.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from model.data.config import DataConfig, TokenizerKind
from model.data.corpus import share_of
from model.data.files import DataError
from model.spec.artifact import TARGET_TOKENIZER, TOKENIZER
from model.spec.config import Architecture
from model.spec.recurrent import NetworkConfig
from model.spec.tokenizer import BOS_ID, EOS_ID, PAD_ID, Tokenizer, TokenizerError
from model.tokenizer_training import byte_level_bpe, characters, single_bytes, words

MAX_UNKNOWN_SHARE = 0.01
"""Maximum share of unknown tokens in the training texts."""

MAX_UNKNOWN_WORDS = 0.25
"""The same for a tokenizer of words, where rare ones are meant to be unknown."""

MAX_CHANGED_SHARE = 0.05
"""Maximum share of texts that decode to other texts, apart from case, whitespace and Unicode composition."""

_SAMPLE_TEXTS = 1000
_SAMPLE_CHARACTERS = 1000
_PIECE_CHARACTERS = 1 << 16
_PIECES_AT_A_TIME = 512


@dataclass(frozen=True, slots=True)
class Tokenizers:
    """The tokenizer of the source, or of the text, and that of the target; one object if they share."""

    source: Tokenizer
    target: Tokenizer

    @property
    def by_file(self) -> Mapping[str, Tokenizer]:
        """By file name in a checkpoint."""
        if self.source is self.target:
            return {TOKENIZER: self.source}
        return {TOKENIZER: self.source, TARGET_TOKENIZER: self.target}


def for_pairs(
    config: DataConfig,
    model: NetworkConfig,
    sources: Sequence[str],
    targets: Sequence[str],
    alphabet: Sequence[str] | None = None,
) -> Tokenizers:
    """The tokenizers of an encoder-decoder, for texts of the training side.

    With an `alphabet`, texts with every possible character, characters are case-folded.

    Raises:
        DataError: when a vocabulary is too small, or a given tokenizer does not match.
    """
    if not config.shared_tokenizer:
        source = _one(config, config.tokenizer_file, "source_vocab_size", model, [sources], alphabet)
        target = _one(config, config.target_tokenizer_file, "vocab_size", model, [targets], alphabet and targets)
        return Tokenizers(source, target)
    if model.source_vocab_size != model.vocab_size:
        raise DataError(
            f"source_vocab_size is {model.source_vocab_size} and vocab_size {model.vocab_size}: a shared tokenizer has "
            "one vocabulary (shared_tokenizer=false makes two)"
        )
    both = _one(config, config.tokenizer_file, "vocab_size", model, [sources, targets], alphabet)
    return Tokenizers(both, both)


def for_text(config: DataConfig, model: NetworkConfig, texts: Sequence[str], pattern: str | None = None) -> Tokenizers:
    """The tokenizer of a decoder-only model; `pattern` bounds its merges, None for natural language.

    Raises:
        DataError: as `for_pairs`.
    """
    tokenizer = _one(config, config.tokenizer_file, "vocab_size", model, [texts], None, pattern)
    return Tokenizers(tokenizer, tokenizer)


def unknown_share(tokenizer: Tokenizer, texts: Sequence[str]) -> float:
    """Share of unknown tokens in the texts."""
    if (unknown := tokenizer.unknown_id) is None:
        return 0.0
    encoded = tokenizer.encode_plain_batch(texts)
    return sum(ids.count(unknown) for ids in encoded) / max(1, sum(map(len, encoded)))


def pieces(text: str) -> Iterator[str]:
    """A long text in parts that tokenize to the same tokens as the whole, in bounded memory.

    A cut is before a line break that follows a visible character, where no pre-tokenizer joins the two sides. A text
    without such a place stays whole.
    """
    start = 0
    while len(text) - start > _PIECE_CHARACTERS:
        end = text.find("\n", start + _PIECE_CHARACTERS)
        while end > 0 and text[end - 1].isspace():
            end = text.find("\n", end + 1)
        if end < 0:
            break
        yield text[start:end]
        start = end
    yield text[start:]


def encode_documents(tokenizer: Tokenizer, texts: Sequence[str]) -> Iterator[npt.NDArray[np.int64]]:
    """The ids of each text without control tokens, `[N] int64`; encodes in groups of bounded size."""
    waiting: list[list[str]] = []
    for number, text in enumerate(texts, start=1):
        waiting.append(list(pieces(text)))
        if sum(map(len, waiting)) < _PIECES_AT_A_TIME and number < len(texts):
            continue
        encoded = iter(tokenizer.encode_plain_batch([piece for parts in waiting for piece in parts]))
        for parts in waiting:
            yield np.concatenate([np.asarray(next(encoded), dtype=np.int64) for _ in parts])
        waiting = []


def _one(
    config: DataConfig,
    file: str,
    size_field: str,
    model: NetworkConfig,
    texts: Sequence[Sequence[str]],
    alphabet: Sequence[str] | None,
    pattern: str | None = None,
) -> Tokenizer:
    vocab_size: int = getattr(model, size_field)
    if file:
        tokenizer = _load(file, vocab_size, size_field, model.family)
        name = file
    else:
        tokenizer = _make(config, vocab_size, size_field, model.family, texts, alphabet, pattern)
        name = f"{config.tokenizer} tokenizer of {size_field} {vocab_size}"
    most = MAX_UNKNOWN_WORDS if config.tokenizer is TokenizerKind.WORDS else MAX_UNKNOWN_SHARE
    for group in texts:
        if problem := _misfit(tokenizer, _sample(group), most):
            raise DataError(f"{name} does not match the data: {problem}")
    return tokenizer


def _make(
    config: DataConfig,
    vocab_size: int,
    size_field: str,
    architecture: Architecture,
    texts: Sequence[Sequence[str]],
    alphabet: Sequence[str] | None,
    pattern: str | None,
) -> Tokenizer:
    kind = config.tokenizer
    every = (piece for group in texts for text in group for piece in pieces(text))
    try:
        if kind is TokenizerKind.BPE:
            return byte_level_bpe(every, vocab_size, architecture, pattern=pattern)
        if kind is TokenizerKind.BYTES:
            return single_bytes(vocab_size, architecture)
        if kind is TokenizerKind.WORDS:
            return words(every, architecture, vocab_size=vocab_size, min_frequency=config.min_frequency)
        if alphabet is None:
            return characters(every, architecture, vocab_size=vocab_size, fold=False)
        tokenizer = characters(alphabet, architecture)
    except ValueError as error:
        raise DataError(str(error).replace("vocab_size", size_field, 1)) from error
    if tokenizer.vocab_size > vocab_size:
        raise DataError(f"{size_field} is {vocab_size}, the characters of these data need {tokenizer.vocab_size}")
    return tokenizer


def _load(file: str, vocab_size: int, size_field: str, architecture: Architecture) -> Tokenizer:
    """Loads a tokenizer file and checks it.

    Raises:
        DataError: naming the file and what is wrong with it.
    """
    try:
        tokenizer = Tokenizer.load(Path(file))
    except TokenizerError as error:
        raise DataError(str(error)) from error
    if tokenizer.vocab_size > vocab_size:
        raise DataError(
            f"{file}: {tokenizer.vocab_size} tokens, {size_field} is {vocab_size} "
            f"(--set {size_field}={tokenizer.vocab_size} makes room)"
        )
    spellings = [tokenizer.token(index) for index in (PAD_ID, BOS_ID, EOS_ID)]
    if None in spellings or tokenizer.decode([PAD_ID, BOS_ID, EOS_ID]):
        raise DataError(
            f"{file}: ids {PAD_ID}, {BOS_ID}, {EOS_ID} are {', '.join(map(repr, spellings))}, "
            "must be control tokens for padding, begin and end"
        )
    plain = tokenizer.encode_plain(_FRAMED)
    if architecture is Architecture.ENCODER_DECODER:
        wanted, words = [*plain, EOS_ID], f"the text and id {EOS_ID} (end) for an encoder-decoder"
    else:
        wanted, words = [BOS_ID, *plain], f"id {BOS_ID} (begin) and the text for a decoder-only model"
    if not plain or tokenizer.encode(_FRAMED) != wanted:
        raise DataError(f"{file}: a prompt becomes {_frame(tokenizer, plain)}, must be {words}")
    return tokenizer


_FRAMED = "a 1"


def _frame(tokenizer: Tokenizer, plain: Sequence[int]) -> str:
    """A tokenizer's framing of a prompt, in words."""
    ids = tokenizer.encode(_FRAMED)
    for start in range(len(ids) - len(plain) + 1):
        if plain and ids[start : start + len(plain)] == list(plain):
            before, after = ids[:start], ids[start + len(plain) :]
            parts = [*(f"id {index}" for index in before), "the text", *(f"id {index}" for index in after)]
            return " and ".join(parts)
    return f"ids {ids}"


def _sample(texts: Sequence[str]) -> list[str]:
    """Beginnings of texts, sampled by hash."""
    chosen = texts if len(texts) <= _SAMPLE_TEXTS else sorted(texts, key=share_of)[:_SAMPLE_TEXTS]
    return [text[:_SAMPLE_CHARACTERS] for text in chosen]


def _misfit(tokenizer: Tokenizer, texts: Sequence[str], most_unknown: float) -> str:
    """The problem if encoding and decoding lose too much of the texts, else empty."""
    if (share := unknown_share(tokenizer, texts)) > most_unknown:
        return f"{share:.1%} of its tokens are unknown, at most {most_unknown:.0%} may be"
    unknown, exact = tokenizer.unknown_id, tokenizer.is_byte_level
    changed = 0
    for text, ids in zip(texts, tokenizer.encode_plain_batch(texts), strict=True):
        # Texts with unknown tokens count in the share above.
        if unknown is not None and unknown in ids:
            continue
        back = tokenizer.decode(ids)
        changed += back != text if exact else _bare(back) != _bare(text)
    share = changed / max(1, len(texts))
    bound = 0.0 if exact else MAX_CHANGED_SHARE
    if share > bound:
        return f"{share:.1%} of the texts come back as others, at most {bound:.0%} may"
    return ""


def _bare(text: str) -> str:
    """A text without what a normalizer may change: whitespace, case, composition of accents."""
    return "".join(unicodedata.normalize("NFKC", text).casefold().split())
