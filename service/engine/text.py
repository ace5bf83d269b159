"""Token ids to text, one token at a time, and stop strings in that text.

Knows no tokenizer: it is given a `decode` function. Two things make text wait. A character may be spread over several
tokens, and a decoder writes U+FFFD for bytes that are no character yet; and the end of the text may be the beginning
of a stop string. Both are held back until the next token settles them, or `flush` does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# Well-formed text never holds back this many; ill-formed text must not be held back for ever.
_MAX_HELD_CHARACTERS = 16
# The longest character has four bytes, so that at most three can be waiting for the rest of theirs.
_MAX_INCOMPLETE_CHARACTERS = 3


class TextStream:
    """The text of one output as it grows.

    The pieces returned by `push` and `flush` concatenate to `decode` of all tokens pushed, cut at the first stop
    string. That holds for every decoder whose text only ever grows once its trailing replacement characters are set
    aside: byte-level, character and word pieces do. (A byte-fallback decoder may take a character back when an
    invalid byte follows it; text already returned then stands.)

    Args:
        decode: ids to text, special tokens skipped.
        stop: strings that end the output. The match that ends first wins, the longest of those that end together, so
            that the outcome does not depend on where tokens begin and end.
        include_stop: whether the matched string stays in the text.
    """

    def __init__(self, decode: Decode, stop: Sequence[str] = (), *, include_stop: bool = False) -> None:
        self._decode = decode
        self._stop = tuple(string for string in stop if string)
        self._include_stop = include_stop
        self._matched_stop: str | None = None
        # Decoding restarts at the last settled token rather than at the first, so that a token costs the same however
        # long the output is; the tokens before it are the context which tells a decoder that it is not at the start.
        self._context: list[int] = []
        self._recent: list[int] = []
        self._context_length = 0
        self._num_settled = 0
        self._unmatched = ""

    @property
    def matched_stop(self) -> str | None:
        """The stop string that ended the text, None while there is none."""
        return self._matched_stop

    def push(self, token_id: int) -> str:
        """Takes the next token; the text that is certain because of it, often one word, sometimes nothing."""
        if self._matched_stop is not None:
            return ""
        self._recent.append(token_id)
        text = self._decode(self._context + self._recent)
        settled = text.rstrip(_REPLACEMENT)
        if len(text) - len(settled) > _MAX_HELD_CHARACTERS:
            settled = text[:-_MAX_INCOMPLETE_CHARACTERS]
        piece = settled[self._num_settled :]
        self._num_settled = max(self._num_settled, len(settled))
        if len(settled) == len(text) > self._context_length:
            self._restart()
        return self._release(piece)

    def flush(self) -> str:
        """Ends the text; what was held back, incomplete characters as U+FFFD."""
        if self._matched_stop is not None:
            return ""
        piece = self._decode(self._context + self._recent)[self._num_settled :]
        self._num_settled += len(piece)
        rest, self._unmatched = self._unmatched + piece, ""
        return rest

    def _restart(self) -> None:
        """Makes the recent tokens the context of those to come."""
        self._context, self._recent = self._recent, []
        self._context_length = self._num_settled = len(self._decode(self._context))

    def _release(self, piece: str) -> str:
        """Passes text on as far as no stop string can begin in it, or up to the one that matched."""
        if not self._stop:
            return piece
        self._unmatched += piece
        found = [(at + len(stop), at, stop) for stop in self._stop if (at := self._unmatched.find(stop)) >= 0]
        if found:
            end, start, self._matched_stop = min(found)
            return self._unmatched[: end if self._include_stop else start]
        keep = max(_overlap(self._unmatched, stop) for stop in self._stop)
        certain = len(self._unmatched) - keep
        released, self._unmatched = self._unmatched[:certain], self._unmatched[certain:]
        return released


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
