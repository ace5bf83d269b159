"""How long a model's answers lately were: what to expect of one that may end by itself.

`max_tokens` is the most that an answer may have, and many have far fewer. Some answers were cut short, by their own
`max_tokens` or by a deadline, and tell only that they were longer than that: the product-limit estimate (Kaplan and
Meier, 1958) makes use of both. Knows no requests and no clock; used on the event loop alone.
"""

from __future__ import annotations

import bisect
import math
from collections import Counter, deque
from dataclasses import dataclass

_MAX_ANSWERS = 256
_MAX_AGE_SECONDS = 120.0
# With fewer, nothing is said.
_MIN_ANSWERS = 8


@dataclass(frozen=True, slots=True)
class _Curve:
    """The share of answers that go beyond each of `lengths`, and the mean length of all, were they cut there.

    Both begin with no tokens at all.
    """

    lengths: tuple[int, ...]
    shares: tuple[float, ...]
    means: tuple[float, ...]

    def mean(self, limit: int) -> float:
        last = bisect.bisect_right(self.lengths, limit) - 1
        return self.means[last] + self.shares[last] * (limit - self.lengths[last])


class AnswerLengths:
    """The lengths in tokens of the answers of the last two minutes, the latest 256 at most."""

    def __init__(self) -> None:
        # When an answer ended, its tokens, and whether it came to its own end.
        self._answers: deque[tuple[float, int, bool]] = deque(maxlen=_MAX_ANSWERS)
        self._curve: _Curve | None = None

    def note(self, now: float, num_tokens: int, *, is_whole: bool) -> None:
        """An answer is over; one that is not `is_whole` would have gone on."""
        self._answers.append((now, num_tokens, is_whole))
        self._curve = None

    def expected(self, now: float, max_tokens: int) -> int | None:
        """The mean length of answers that may have `max_tokens` at most; None where too few were seen lately.

        What went beyond the longest that was seen is not known, and is taken not to exist. Expecting too little is
        found out, as predictions are corrected by what became of them. Expecting too much would refuse every request
        and never be found out.
        """
        answers = self._answers
        while answers and answers[0][0] < now - _MAX_AGE_SECONDS:
            answers.popleft()
            self._curve = None
        if len(answers) < _MIN_ANSWERS:
            return None
        if self._curve is None:
            self._curve = self._estimate()
        return min(math.ceil(self._curve.mean(max_tokens)), max_tokens)

    def _estimate(self) -> _Curve:
        seen = Counter(num_tokens for _, num_tokens, _ in self._answers)
        ended = Counter(num_tokens for _, num_tokens, is_whole in self._answers if is_whole)
        lengths, shares, means, num_left = [0], [1.0], [0.0], len(self._answers)
        for num_tokens in sorted(seen):
            means.append(means[-1] + shares[-1] * (num_tokens - lengths[-1]))
            lengths.append(num_tokens)
            shares.append(shares[-1] * (1 - ended[num_tokens] / num_left))
            num_left -= seen[num_tokens]
        shares[-1] = 0.0
        return _Curve(tuple(lengths), tuple(shares), tuple(means))
