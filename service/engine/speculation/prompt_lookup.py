"""Prompt-lookup decoding (Saxena, 2023): draft tokens copied from an earlier place of the same sequence.

The last three tokens of a sequence, or else the last two, are looked up in its own prompt and output. What followed
their latest earlier occurrence is the draft. Drafts cost only their verification, and where an output repeats its
prompt, as a correction or a summary does, most are accepted.

The number of draft tokens adapts to acceptance, counted in tokens and never timed. All accepted: it doubles, up to the
limit. Some accepted: it is one more than were. None accepted: it halves, and drafting pauses for a number of steps that
doubles up to `_LONGEST_PAUSE`. So a sequence that never repeats itself pays for one verification in that many steps.
Output tokens do not depend on drafts: verification stops at the first wrong one.

Knows token ids only; each sequence has an instance of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

_NGRAM_SIZES = (3, 2)
# Verifying few tokens takes little longer than a step, and shows whether more are worth it.
_FIRST = 2
_LONGEST_PAUSE = 32
# Indexing a whole long prompt at the first draft would delay all requests of the thread.
_MAX_INDEXED_AT_ONCE = 1024

TokenIds = tuple[int, ...]


class PromptLookup:
    """Draft tokens of one sequence.

    Args:
        longest: draft tokens at once, at most; at least 1.
    """

    def __init__(self, longest: int) -> None:
        self._longest = longest
        # From an n-gram to the position after its latest occurrence.
        self._followers: dict[TokenIds, int] = {}
        self._num_indexed = 0
        self._num_wanted = min(_FIRST, longest)
        self._pause = 0
        self._next_pause = 1

    def propose(self, token_ids: Sequence[int], room: int) -> TokenIds:
        """Draft tokens to follow a sequence; none where its end occurs nowhere earlier, or in a pause.

        Costs time in proportion to the tokens added since the last call. Of those, at most `_MAX_INDEXED_AT_ONCE` are
        indexed in one call, so the first drafts of a long prompt come from its beginning.

        Args:
            token_ids: the sequence; extends the one of the last call.
            room: draft tokens that fit, at least 1.
        """
        self._index(token_ids)
        if (start := self._find(token_ids)) is None:
            return ()
        if self._pause:
            self._pause -= 1
            return ()
        return _continue(token_ids, start, min(self._num_wanted, room))

    def report(self, num_drafted: int, num_accepted: int) -> None:
        """Adapts to how many of the last draft tokens were accepted."""
        if num_accepted:
            self._next_pause = 1
            wanted = 2 * self._num_wanted if num_accepted == num_drafted else num_accepted + 1
            self._num_wanted = min(wanted, self._longest)
            return
        self._num_wanted = max(1, self._num_wanted // 2)
        self._pause = self._next_pause
        self._next_pause = min(2 * self._next_pause, _LONGEST_PAUSE)

    def _index(self, token_ids: Sequence[int]) -> None:
        """Indexes what precedes each token; nothing follows the sequence's end yet."""
        stop = min(len(token_ids), self._num_indexed + _MAX_INDEXED_AT_ONCE)
        for position in range(self._num_indexed, stop):
            for size in _NGRAM_SIZES:
                if position >= size:
                    self._followers[tuple(token_ids[position - size : position])] = position
        self._num_indexed = stop

    def _find(self, token_ids: Sequence[int]) -> int | None:
        """The position after the latest earlier occurrence of the sequence's end."""
        ends = (tuple(token_ids[-size:]) for size in _NGRAM_SIZES if len(token_ids) >= size)
        return next((self._followers[end] for end in ends if end in self._followers), None)


def _continue(token_ids: Sequence[int], start: int, count: int) -> TokenIds:
    """Copies `count` tokens from a position on; where the sequence ends, the draft continues from itself."""
    distance = len(token_ids) - start
    drafts = list(token_ids[start : start + count])
    while len(drafts) < count:
        drafts.append(drafts[-distance])
    return tuple(drafts)
