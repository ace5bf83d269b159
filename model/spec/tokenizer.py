"""Tokenizes and detokenizes text, by the `tokenizer.json` of a checkpoint or artifact.

The server and the trainer share this class. `model.tokenizer_training` makes such files.

Text never becomes control tokens: `<bos>` written by a user is five ordinary characters. Control tokens come only from
the file's post-processor (`encode`), from ids, or from marked text (`with_marks`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, TypeVar

import tokenizers
from tokenizers import pre_tokenizers

from model.spec.artifact import MAX_TOKENIZER_BYTES
from model.spec.reading import read_text
from model.spec.token_bytes import Spelling

_Result = TypeVar("_Result")

CONTROL_MARK = "\ufdd0"
"""A noncharacter (The Unicode Standard, section 23.7) that marks the spelling after it as a control token."""

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

LOSSY_TOKEN_BYTES = 256
"""Our limit of bytes per token for tokenizers whose spellings are no bound (`Tokenizer.max_bytes`).

Some tokenizers drop or collapse characters, or replace a word by one unknown token.
"""

PAD_ID = 0
BOS_ID = 1
EOS_ID = 2


class TokenizerError(ValueError):
    """A tokenizer file is missing, damaged or not a tokenizer, or the library fails on a text or on ids."""


class Tokenizer:
    """One `tokenizer.json`. Immutable, thread-safe. Takes ownership of `inner`, the library's tokenizer."""

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        inner.encode_special_tokens = True
        # A file may have truncation or padding for training batches; prompts must not be truncated silently.
        inner.no_truncation()
        inner.no_padding()
        self._inner = inner
        added = inner.get_added_tokens_decoder().values()
        self._added_spellings = frozenset(token.content for token in added)
        self._control_spellings = frozenset(token.content for token in added if token.special)
        self._encoder = inner
        if self._may_spell_control_tokens():
            self._encoder = _mark(inner, self._control_spellings)
            self._encoder.encode_special_tokens = True
        self._spelling = Spelling(None if inner.decoder is None else json.loads(inner.decoder.__getstate__()))
        vocabulary = inner.get_vocab(with_added_tokens=True)
        self._vocab_size = 1 + max(vocabulary.values(), default=-1)
        longest = max((len(spelling.encode()) for spelling in vocabulary), default=0)
        # A template's control tokens are marked.
        longest += len(CONTROL_MARK.encode())
        self._max_token_bytes = longest if _spells_everything(inner) else max(longest, LOSSY_TOKEN_BYTES)

    @classmethod
    def from_json(cls, text: str) -> Tokenizer:
        """Parses the text of a `tokenizer.json`.

        Raises:
            TokenizerError: when it is none.
        """
        try:
            return _guarded(lambda: cls(tokenizers.Tokenizer.from_str(text)))
        except Exception as error:  # The library raises bare Exception for whatever its parser objects to.
            raise TokenizerError(f"not a tokenizer: {error}") from error

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        """Reads a `tokenizer.json`.

        Raises:
            TokenizerError: naming the file, when it cannot be read or is none.
        """
        try:
            return cls.from_json(read_text(path, MAX_TOKENIZER_BYTES))
        except OSError as error:
            raise TokenizerError(f"{path}: {error.strerror or error}") from error
        except ValueError as error:
            raise TokenizerError(f"{path}: {error}") from error

    def to_json(self) -> str:
        """The text of `tokenizer.json`; `from_json` is its inverse."""
        text: str = self._inner.to_str(pretty=True)
        return text + "\n"

    @property
    def vocab_size(self) -> int:
        """The largest id plus one, control tokens included: a file may skip ids."""
        return self._vocab_size

    def max_bytes(self, num_tokens: int) -> int:
        """The most bytes of a text of `num_tokens` tokens; by `LOSSY_TOKEN_BYTES` if spellings are no bound."""
        return num_tokens * self._max_token_bytes

    @property
    def unknown_id(self) -> int | None:
        """The id of the unknown token, if there is one."""
        model = json.loads(self._inner.to_str())["model"]
        index: int | None = model.get("unk_id")
        if index is None and (spelling := model.get("unk_token")) is not None:
            index = self._inner.token_to_id(spelling)
        return index

    @property
    def is_byte_level(self) -> bool:
        """Whether tokens are bytes, so that decoding restores any text."""
        return '"ByteLevel"' in json.dumps(json.loads(self._inner.to_str())["decoder"])

    @property
    def added_spellings(self) -> frozenset[str]:
        """The spellings of added tokens, control tokens included."""
        return self._added_spellings

    @property
    def control_spellings(self) -> frozenset[str]:
        """The spellings of control tokens ("special" in the file), which text never becomes."""
        return self._control_spellings

    def with_marks(self, others: Collection[str] = ()) -> MarkedTokenizer:
        """A tokenizer for marked text; `others` are added tokens, not special, that must be marked as well."""
        return MarkedTokenizer(_mark(self._inner, self._control_spellings.union(others)))

    def encode(self, text: str) -> list[int]:
        """Ids of a prompt or source, with the control tokens of the file's post-processor."""
        return _encode(self._encoder, self._clean(text), add_special_tokens=True)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of many texts, in parallel."""
        return [encoding.ids for encoding in self._encoder.encode_batch_fast([*map(self._clean, texts)])]

    def encode_plain(self, text: str) -> list[int]:
        """Ids of the text without control tokens, as for a target or its prefix."""
        return _encode(self._encoder, self._clean(text), add_special_tokens=False)

    def encode_plain_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode_plain` of many texts, in parallel."""
        cleaned = [*map(self._clean, texts)]
        return [encoding.ids for encoding in self._encoder.encode_batch_fast(cleaned, add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids, without control tokens and ids outside the vocabulary.

        Bytes of an incomplete character become U+FFFD.
        """
        text: str = _guarded(self._inner.decode, list(ids), skip_special_tokens=True)
        return text

    def token(self, token_id: int) -> str | None:
        """The vocabulary's spelling of an id, control tokens and byte symbols included; None if there is no such id."""
        spelling: str | None = self._inner.id_to_token(token_id)
        return spelling

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token by itself, also of a part of a character; none for an id that does not exist.

        A control token, which adds nothing to a text, has those of its spelling.
        """
        spelling = self._inner.id_to_token(token_id) or ""
        return spelling.encode() if spelling in self._control_spellings else self._spelling.to_bytes(spelling)

    @property
    def decoder_steps(self) -> Sequence[dict[str, Any]]:
        """The steps of the decoder, as `tokenizer.json` describes them."""
        return self._spelling.steps

    def _clean(self, text: str) -> str:
        """The text without marks, if the encoder would interpret them."""
        return text if self._encoder is self._inner else text.replace(CONTROL_MARK, _REPLACEMENT)

    def _may_spell_control_tokens(self) -> bool:
        """Whether the model's vocabulary can make a control token from ordinary characters."""
        model = self._inner.model
        listed = [spelling for spelling in self._control_spellings if model.token_to_id(spelling) is not None]
        if not listed or not isinstance(model, tokenizers.models.BPE):
            return bool(listed)
        described = json.loads(self._inner.to_str())["model"]
        products = {_product(merge) for merge in described["merges"]}
        return bool(described.get("ignore_merges")) or not products.isdisjoint(listed)


class MarkedTokenizer:
    """Tokenizes text in which `CONTROL_MARK` and a control token's spelling are the token; made by `with_marks`.

    Callers must remove marks from untrusted text.
    """

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        self._inner = inner

    def encode(self, text: str) -> list[int]:
        """Ids of the text; the post-processor adds nothing."""
        return _encode(self._inner, text, add_special_tokens=False)


def _encode(inner: tokenizers.Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
    """Ids of one text, by the library's batch method: the method for one text holds the GIL."""
    (encoding,) = _guarded(inner.encode_batch_fast, [text], add_special_tokens=add_special_tokens)
    ids: list[int] = encoding.ids
    return ids


def _guarded(function: Callable[..., _Result], *arguments: Any, **options: Any) -> _Result:
    """Calls a function of the library; a panic, which is no `Exception`, becomes a `TokenizerError`."""
    try:
        return function(*arguments, **options)
    except (Exception, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise TokenizerError(f"the tokenizers library panicked: {error}") from error


def _mark(inner: tokenizers.Tokenizer, spellings: Collection[str]) -> tokenizers.Tokenizer:
    """A copy in which these added tokens are spelled with a mark, so that unmarked text cannot be them."""
    described = json.loads(inner.to_str())
    renamed = {spelling: CONTROL_MARK + spelling for spelling in spellings}
    for token in described["added_tokens"]:
        if token["content"] in renamed:
            token |= {"content": renamed[token["content"]], "normalized": False, "single_word": False}
    model = described["model"]
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):
        model["vocab"] = {renamed.get(piece, piece): index for piece, index in vocabulary.items()}
    elif vocabulary is not None:
        model["vocab"] = [[renamed.get(piece, piece), score] for piece, score in vocabulary]
    if "merges" in model:
        model["merges"] = [
            merge
            for merge in model["merges"]
            if _product(merge) not in renamed and renamed.keys().isdisjoint(_parts(merge))
        ]
    if model.get("unk_token") in renamed:
        model["unk_token"] = renamed[model["unk_token"]]
    marked = tokenizers.Tokenizer.from_str(json.dumps(described))
    marked.no_truncation()
    marked.no_padding()
    for spelling, name in renamed.items():
        if marked.token_to_id(name) != inner.token_to_id(spelling):
            raise TokenizerError(f"{spelling} cannot be distinguished from its spelling")
    return marked


def _spells_everything(inner: tokenizers.Tokenizer) -> bool:
    """Whether tokens' spellings cover every byte of any text: nothing is dropped, collapsed or unknown."""
    described = json.loads(inner.to_str())
    model, steps = described["model"], _steps(described["normalizer"]) + _steps(described["pre_tokenizer"])
    kinds = {step["type"] for step in steps}
    alphabet = (
        pre_tokenizers.ByteLevel.alphabet() if "ByteLevel" in kinds else [f"<0x{byte:02X}>" for byte in range(256)]
    )
    return (
        model["type"] == "BPE"
        and ("ByteLevel" in kinds or bool(model["byte_fallback"]))
        and model["vocab"].keys() >= set(alphabet)
        and kinds <= {"ByteLevel", "Metaspace", "Digits", "Prepend", "Split", "Replace"}
        and all(_keeps(step) for step in steps)
        and not any(token["lstrip"] or token["rstrip"] for token in described["added_tokens"])
    )


def _steps(part: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The flattened steps of a normalizer or pre-tokenizer."""
    if part is None:
        return []
    inner = part.get("normalizers", part.get("pretokenizers"))
    return [part] if inner is None else [step for each in inner for step in _steps(each)]


def _keeps(step: dict[str, Any]) -> bool:
    """Whether a splitting step keeps all text, and a replacing one does not shorten it."""
    if step["type"] == "Split":
        return bool(step["behavior"] != "Removed")
    if step["type"] == "Replace":
        pattern = step["pattern"].get("String")
        return pattern is not None and len(pattern.encode()) <= len(step["content"].encode())
    return True


def _parts(merge: str | list[str]) -> list[str]:
    """The two tokens of a BPE merge, in either of the files' notations."""
    return merge.split(" ") if isinstance(merge, str) else merge


def _product(merge: str | list[str]) -> str:
    return "".join(_parts(merge))
