"""The lengths of a model's recent outputs: what to expect of one that may end by itself.

Many outputs end far below `max_tokens`. Those that `max_tokens` or a deadline cut short are right-censored: they would
have been longer. The product-limit estimate (Kaplan and Meier, 1958) uses both. Knows no requests and no clock. Event
loop only.
"""

from __future__ import annotations

import bisect
import math
from collections import Counter, deque
from dataclasses import dataclass

_MAX_ANSWERS = 256
_MAX_AGE_SECONDS = 120.0
_MIN_ANSWERS = 8


@dataclass(frozen=True, slots=True)
class _Curve:
    """The share of outputs longer than each of `lengths` (from 0 on), and the mean length if all were cut there."""

    lengths: tuple[int, ...]
    shares: tuple[float, ...]
    means: tuple[float, ...]

    def mean(self, limit: int) -> float:
        last = bisect.bisect_right(self.lengths, limit) - 1
        return self.means[last] + self.shares[last] * (limit - self.lengths[last])


class AnswerLengths:
    """The lengths in tokens of the outputs of the last two minutes, at most the latest 256."""

    def __init__(self) -> None:
        # When an output ended, its tokens, and whether it ended by itself.
        self._answers: deque[tuple[float, int, bool]] = deque(maxlen=_MAX_ANSWERS)
        self._curve: _Curve | None = None

    def note(self, now: float, num_tokens: int, *, is_whole: bool) -> None:
        """Adds an output; one that is not `is_whole` was cut short."""
        self._answers.append((now, num_tokens, is_whole))
        self._curve = None

    def expected(self, now: float, max_tokens: int) -> int | None:
        """The mean length of outputs that may have `max_tokens`; None while too few were seen.

        Nothing is expected beyond the longest that was seen. A length that is too small is noticed, as predictions are
        corrected by what requests took; one that is too large would refuse every request and never be noticed.
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
