"""Incremental detokenization with stop strings.

Knows no tokenizer: it is given a `decode` function. Text is held back in two cases. A character may be spread over
several tokens (decoders write U+FFFD for incomplete bytes), and the end of the text may begin a stop string. Both are
settled by the next tokens, or by `flush`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# Well-formed text settles within the four bytes of a character. Ill-formed text must not be held back, and decoded
# again with every token, forever.
_MAX_HELD_TOKENS = 16
# Tokens of an incomplete character, at most.
_MAX_INCOMPLETE_TOKENS = 3
# A decoder may strip a space from either end; of this many copies of a token it leaves one.
_COPIES_THAT_SHOW_TEXT = 3


class TextStream:
    """The text of one output as it grows.

    What `push` and `flush` return concatenates to `decode` of all tokens pushed, cut at the first stop string; after a
    prefix, to what `decode` of both adds to the prefix's text. That holds for every decoder whose text only grows,
    trailing replacement characters aside: byte-level, character and word-piece decoders. (A byte-fallback decoder may
    replace a character when an invalid byte follows; text already returned stands then.)

    A token costs a few decodes of a bounded number of tokens, however long the output is.

    Args:
        decode: ids to text, special tokens skipped.
        stop: strings that end the output. The match that ends first wins, and the longest of those that end together,
            so that the outcome does not depend on token boundaries.
        include_stop: whether the matched string stays in the text.
        prefix_token_ids: tokens that the output continues. They decide how the first tokens are decoded, as decoders
            may strip a space at the beginning; their text is not returned.
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
        # Decoding restarts at the last settled token, so that the cost of a token is bounded; the tokens before it are
        # context, so that the decoder does not treat the rest as a beginning. `_text` is what both decode to, of which
        # the first `_num_settled` characters were returned.
        self._context = list(prefix_token_ids[-_MAX_HELD_TOKENS:])
        self._recent: list[int] = []
        self._text = decode(self._context) if self._context else ""
        self._context_length = self._num_settled = len(self._text)
        # Settled text in which a stop string may begin; none may end within its first `_num_exempt` characters.
        self._unmatched = ""
        self._num_exempt = 0

    @property
    def matched_stop(self) -> str | None:
        """The stop string that ended the text, if any."""
        return self._matched_stop

    def push(self, token_id: int, *, may_stop: bool = True) -> str:
        """Takes the next token; returns the text that became certain.

        With `may_stop` False, no stop string may end in that text, though one may begin in it.
        """
        if self._matched_stop is not None:
            return ""
        text = self._decode([*self._context, *self._recent, token_id])
        if text == self._text and not self._decode([token_id] * _COPIES_THAT_SHOW_TEXT):
            # A control token: many of them would make every later decode longer.
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
        """Ends the text; returns what was held back, incomplete characters as U+FFFD."""
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
        # Counted from the end, as the rest of the text may begin within a character.
        self._num_settled = len(self._text) - num_unsettled
        self._context_length = len(self._decode(self._context)) if num_kept else len(self._text)

    def _release(self, piece: str, *, may_stop: bool) -> str:
        """Returns text up to where a stop string may begin, or up to the one that matched."""
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
        """Start of the first match that ends outside the exempt text; -1 without one."""
        return self._unmatched.find(stop, max(self._num_exempt - len(stop) + 1, 0))


def _overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
