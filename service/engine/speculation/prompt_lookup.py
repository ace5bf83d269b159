"""Guessing what a sequence says next by looking up where it said the same before: speculation by prompt look-up.

The last tokens of a sequence, three of them or else two, are sought in its own prompt and output. What followed them at
the latest earlier place is proposed to follow again (Saxena, 2023: prompt lookup decoding). Proposals cost nothing but
the time to check them, and where an output repeats its prompt, as a correction or a summary does, most come true.

How many are proposed goes by how the last ones did, counted in tokens and never timed. All that came true doubles the
next proposal, up to what is allowed; some leave as many and one more; none halves it, and lets pauses follow that
double up to `_LONGEST_PAUSE`. So who never repeats itself pays for one check in so many steps. A wrong proposal changes
no token: whoever checks it stops there. Which proposals there are hangs on when they are asked for, and a sequence in
company is not asked: tokens are the same everywhere, proposals are not.

Knows token ids. Knows no logits, no slots and no model; each sequence has one of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

_LENGTHS = (3, 2)
# Two at first: a check of few tokens takes little longer than a step, and says whether more are worth it.
_FIRST = 2
_LONGEST_PAUSE = 32
# Of a long prompt, or the first proposal would hold up whoever shares the thread: this takes a fraction of a step.
_MOST_INDEXED_AT_ONCE = 1024

TokenIds = tuple[int, ...]


class LookUp:
    """The proposals of one sequence: an index of what its tokens were followed by, and how proposals have done.

    Args:
        longest: how many tokens a proposal has at most, 1 at least.
    """

    def __init__(self, longest: int) -> None:
        self._longest = longest
        # By some tokens in a row, where what last followed them begins.
        self._followers: dict[TokenIds, int] = {}
        self._num_indexed = 0
        self._wanted = min(_FIRST, longest)
        self._pause = 0
        self._next_pause = 1

    def propose(self, token_ids: Sequence[int], room: int) -> TokenIds:
        """What may come after these tokens; nothing where nothing is known, or it is no time to guess.

        Takes time in proportion to the tokens that are new since the last call, of which it reads so many at most: with
        a long prompt, the first proposals are of its beginning.

        Args:
            token_ids: the sequence's, those of the last call and more.
            room: for how many more tokens there is room, 1 at least.
        """
        self._index(token_ids)
        if (start := self._find(token_ids)) is None:
            return ()
        if self._pause:
            self._pause -= 1
            return ()
        return _continue(token_ids, start, min(self._wanted, room))

    def judge(self, num_proposed: int, num_right: int) -> None:
        """Learns how many of the last proposal's tokens came true, from the first on."""
        if num_right:
            self._next_pause = 1
            wanted = 2 * self._wanted if num_right == num_proposed else num_right + 1
            self._wanted = min(wanted, self._longest)
            return
        self._wanted = max(1, self._wanted // 2)
        self._pause = self._next_pause
        self._next_pause = min(2 * self._next_pause, _LONGEST_PAUSE)

    def _index(self, token_ids: Sequence[int]) -> None:
        """Notes what each token follows; the sequence's end is followed by nothing yet."""
        stop = min(len(token_ids), self._num_indexed + _MOST_INDEXED_AT_ONCE)
        for at in range(self._num_indexed, stop):
            for length in _LENGTHS:
                if at >= length:
                    self._followers[tuple(token_ids[at - length : at])] = at
        self._num_indexed = stop

    def _find(self, token_ids: Sequence[int]) -> int | None:
        """Where what last followed the sequence's end begins."""
        ends = (tuple(token_ids[-length:]) for length in _LENGTHS if len(token_ids) >= length)
        return next((self._followers[end] for end in ends if end in self._followers), None)


def _continue(token_ids: Sequence[int], start: int, count: int) -> TokenIds:
    """So many tokens from a place on; where that runs into the sequence's end, the proposal goes on from itself."""
    distance = len(token_ids) - start
    proposed = list(token_ids[start : start + count])
    while len(proposed) < count:
        proposed.append(proposed[-distance])  # as far back as the place was
    return tuple(proposed)
