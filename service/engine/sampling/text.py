"""Token ids to text, one token at a time, and stop strings in that text.

Knows no tokenizer: it is given a `decode` function. Two things make text wait. A character may be spread over several
tokens, and a decoder writes U+FFFD for bytes that are no character yet; and the end of the text may be the beginning
of a stop string. Both are held back until the next token settles them, or `flush` does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# Well-formed text settles within the four bytes of a character; ill-formed text must not be held back, and decoded
# again with every token, for ever.
_MAX_HELD_TOKENS = 16
# Tokens of a character that still lacks its last byte, at most.
_MAX_INCOMPLETE_TOKENS = 3
# One may hide a space that a decoder strips from either end; so many cannot.
_COPIES_THAT_SHOW_TEXT = 3


class TextStream:
    """The text of one output as it grows.

    The pieces returned by `push` and `flush` concatenate to `decode` of all tokens pushed, cut at the first stop
    string; after a prefix, to what `decode` of both has beyond the prefix's own text. That holds for every decoder
    whose text only ever grows once its trailing replacement characters are set aside: byte-level, character and word
    pieces do. (A byte-fallback decoder may take a character back when an invalid byte follows it; text already returned
    then stands.)

    A token costs a few decodes of a bounded number of tokens, however long the output is and whatever it says.

    Args:
        decode: ids to text, special tokens skipped.
        stop: strings that end the output. The match that ends first wins, the longest of those that end together, so
            that the outcome does not depend on where tokens begin and end.
        include_stop: whether the matched string stays in the text.
        prefix_token_ids: tokens that the output continues. Their text is not part of it, though it decides how the
            first tokens read: a decoder that strips a space at the beginning must not do so here.
    """

    def __init__(
        self,
        decode: Decode,
        stop: Sequence[str] = (),
        *,
        include_stop: bool = False,
        prefix_token_ids: Sequence[int] = (),
    ) -> None:
        self._decode = decode
        self._stop = tuple(string for string in stop if string)
        self._include_stop = include_stop
        self._matched_stop: str | None = None
        # Decoding restarts at the last settled token rather than at the first, so that a token costs the same however
        # long the output is; the tokens before it are the context which tells a decoder that it is not at the start.
        # `_text` is what both decode to; of it, the first `_num_settled` characters are given out.
        self._context = list(prefix_token_ids[-_MAX_HELD_TOKENS:])
        self._recent: list[int] = []
        self._text = decode(self._context) if self._context else ""
        self._context_length = self._num_settled = len(self._text)
        # Settled, but a stop string may begin in it. None may end within its first `_num_exempt` characters.
        self._unmatched = ""
        self._num_exempt = 0

    @property
    def matched_stop(self) -> str | None:
        """The stop string that ended the text, None while there is none."""
        return self._matched_stop

    def push(self, token_id: int, *, may_stop: bool = True) -> str:
        """Takes the next token; the text that is certain because of it, often one word, sometimes nothing.

        Text that becomes certain while it may not stop ends no stop string, though one may begin in it.
        """
        if self._matched_stop is not None:
            return ""
        text = self._decode([*self._context, *self._recent, token_id])
        if text == self._text and not self._decode([token_id] * _COPIES_THAT_SHOW_TEXT):
            # A control token: kept, many of them would make every later decode longer.
            return ""
        self._recent.append(token_id)
        self._text = text
        settled = len(text.rstrip(_REPLACEMENT))
        is_overdue = len(self._recent) > _MAX_HELD_TOKENS
        num_kept = 0
        if is_overdue and settled < len(text):
            num_kept = _MAX_INCOMPLETE_TOKENS
            settled = max(settled, len(self._decode(self._context + self._recent[:-num_kept])))
        piece = text[self._num_settled : settled]
        self._num_settled = max(self._num_settled, settled)
        if is_overdue or settled == len(text) > self._context_length:
            self._restart(num_kept)
        return self._release(piece, may_stop=may_stop)

    def flush(self) -> str:
        """Ends the text; what was held back, incomplete characters as U+FFFD."""
        if self._matched_stop is not None:
            return ""
        piece = self._text[self._num_settled :]
        self._num_settled += len(piece)
        rest, self._unmatched = self._unmatched + piece, ""
        return rest

    def _restart(self, num_kept: int) -> None:
        """Makes the recent tokens, but for the last `num_kept`, the context of those to come."""
        num_unsettled = len(self._text) - self._num_settled
        num_context = len(self._recent) - num_kept
        self._context, self._recent = self._recent[:num_context], self._recent[num_context:]
        self._text = self._decode(self._context + self._recent)
        # From the end, since what is left of the text may begin within a character.
        self._num_settled = len(self._text) - num_unsettled
        self._context_length = len(self._decode(self._context)) if num_kept else len(self._text)

    def _release(self, piece: str, *, may_stop: bool) -> str:
        """Passes text on as far as no stop string can begin in it, or up to the one that matched."""
        if not self._stop:
            return piece
        self._unmatched += piece
        if not may_stop:
            self._num_exempt = len(self._unmatched)
        found = [(at + len(stop), at, stop) for stop in self._stop if (at := self._find(stop)) >= 0]
        if found:
            end, start, self._matched_stop = min(found)
            return self._unmatched[: end if self._include_stop else start]
        keep = max(_overlap(self._unmatched, stop) for stop in self._stop)
        certain = len(self._unmatched) - keep
        released, self._unmatched = self._unmatched[:certain], self._unmatched[certain:]
        self._num_exempt = max(self._num_exempt - certain, 0)
        return released

    def _find(self, stop: str) -> int:
        """Where the first match begins that ends outside the exempt text; -1 if there is none."""
        return self._unmatched.find(stop, max(self._num_exempt - len(stop) + 1, 0))


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
