"""Text to token ids and back, as the `tokenizer.json` of a checkpoint or artefact says.

The server and the trainer read text through this one class, so that what was learned is what is served. It knows the
`tokenizers` library and nothing of models, training or the wire. How such a file is made: `model.tokenizer_training`.

Text never turns into control tokens: `<bos>` written by a user is five ordinary characters. Control tokens come only
from the file's own post-processor (`encode`) or from whoever puts ids together by hand.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import tokenizers

PAD_ID = 0
BOS_ID = 1
EOS_ID = 2


class TokenizerError(ValueError):
    """A tokenizer file is missing, damaged or not a tokenizer."""


class Tokenizer:
    """One `tokenizer.json`, ready to use; immutable, and safe to use from several threads.

    Args:
        inner: the library's tokenizer, which this one takes over.
    """

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        inner.encode_special_tokens = True
        # A file may carry truncation or padding for somebody's training batches; a prompt is never cut in silence.
        inner.no_truncation()
        inner.no_padding()
        self._inner = inner
        self._vocab_size = 1 + max(inner.get_vocab(with_added_tokens=True).values(), default=-1)

    @classmethod
    def from_json(cls, text: str) -> Tokenizer:
        """Parses the text of a `tokenizer.json`.

        Raises:
            TokenizerError: when it is none.
        """
        try:
            return cls(tokenizers.Tokenizer.from_str(text))
        except Exception as error:  # The library raises bare Exception for whatever its parser objects to.
            raise TokenizerError(f"not a tokenizer: {error}") from error

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        """Reads a `tokenizer.json`.

        Raises:
            TokenizerError: naming the file, when it cannot be read or is none.
        """
        try:
            return cls.from_json(path.read_text(encoding="utf-8"))
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
        """How many ids a model must embed: one more than the largest, control tokens included.

        A file may leave ids out, so that it has fewer tokens than this.
        """
        return self._vocab_size

    @property
    def unknown_id(self) -> int | None:
        """The id that stands for whatever the vocabulary cannot spell; None where there is none."""
        model = json.loads(self._inner.to_str())["model"]
        index: int | None = model.get("unk_id")
        if index is None and (spelling := model.get("unk_token")) is not None:
            index = self._inner.token_to_id(spelling)
        return index

    @property
    def is_byte_level(self) -> bool:
        """Whether tokens are bytes, so that any text whatever should come back unchanged."""
        return '"ByteLevel"' in json.dumps(json.loads(self._inner.to_str())["decoder"])

    def encode(self, text: str) -> list[int]:
        """Ids of a prompt or source, with the control tokens that the file's post-processor adds."""
        ids: list[int] = self._inner.encode(text).ids
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of many texts, in parallel."""
        return [encoding.ids for encoding in self._inner.encode_batch_fast(texts)]

    def encode_plain(self, text: str) -> list[int]:
        """Ids of the text alone: no control tokens, as for a target or its forced beginning."""
        ids: list[int] = self._inner.encode(text, add_special_tokens=False).ids
        return ids

    def encode_plain_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode_plain` of many texts, in parallel."""
        return [encoding.ids for encoding in self._inner.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids, control tokens left out.

        Bytes that are no whole character yet come out as U+FFFD. Ids outside the vocabulary are left out.
        """
        text: str = self._inner.decode(list(ids), skip_special_tokens=True)
        return text

    def token(self, token_id: int) -> str | None:
        """The vocabulary's own spelling of an id, control tokens and byte symbols included; None for no id of ours."""
        spelling: str | None = self._inner.id_to_token(token_id)
        return spelling
