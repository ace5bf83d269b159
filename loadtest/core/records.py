"""What became of one request: when it should have been sent, when it was, when its tokens came, how it ended.

Times are seconds since the run began, on the client's monotonic clock. Latencies count from the intended time: a
request that a stalled client or server kept from being sent has waited all the same. Knows no wire and no loop.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

INCOMPLETE = "INCOMPLETE"
"""Stands where a gRPC code would: the stream ended with OK, but without the message that says it is whole."""
IN_STREAM = "ERROR_IN_STREAM"
"""The same where the protocol tells of an error in a message of a stream that goes on."""
_REFUSAL = "RESOURCE_EXHAUSTED"
_CANCELLED = "CANCELLED"


class Outcome(StrEnum):
    """How a request ended; every offered one ends in exactly one way."""

    FINISHED = "finished"
    """Whole: the stream's last message came, and its status was OK."""
    REFUSED = "refused"
    """The server would not take it: RESOURCE_EXHAUSTED before the first token."""
    FAILED = "failed"
    """Any other status, or a stream that ended early."""
    CANCELLED = "cancelled"
    """This client gave it up."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What one message of a stream says.

    Args:
        tokens: how many it brings.
        is_last: whether it says that the stream is whole.
        error: what it says went wrong; empty if nothing.
        prompt_tokens: the server's count of them, where it tells.
        generated_tokens: the same of the whole answer's.
    """

    tokens: int
    is_last: bool = False
    error: str = ""
    prompt_tokens: int | None = None
    generated_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One request that is over.

    Args:
        number: its number in the run.
        request_id: what the server was told to call it.
        stage: the part of the run it was sent in, as in "8 users"; empty where there is one only.
        intended: when it should have been sent.
        sent: when it was.
        arrivals: when each message with tokens came.
        counts: how many tokens each of them had.
        told_tokens: how many the server says there were in all; None where it says nothing.
        ended: when the stream was over.
        outcome: how it ended.
        code: the gRPC status by name, `INCOMPLETE` or `IN_STREAM`.
        detail: what the server said beside the code.
        prompt_tokens: by the server's count, or by ours where it tells none; None where neither is known.
    """

    number: int
    request_id: str
    stage: str
    intended: float
    sent: float
    arrivals: tuple[float, ...]
    counts: tuple[int, ...]
    ended: float
    outcome: Outcome
    code: str
    prompt_tokens: int | None
    told_tokens: int | None = None
    detail: str = ""

    @property
    def generated_tokens(self) -> int:
        """Tokens that came, whatever the end: by the server's count where it tells, as messages may say less."""
        return sum(self.counts) if self.told_tokens is None else self.told_tokens

    @property
    def lateness(self) -> float:
        """Seconds from the intended time to the sending: this client's part of the waiting."""
        return self.sent - self.intended

    @property
    def first_token_seconds(self) -> float | None:
        """TTFT: from the intended time to the first token. None without tokens."""
        return self.arrivals[0] - self.intended if self.arrivals else None

    @property
    def end_to_end_seconds(self) -> float:
        """E2E: from the intended time to the end of the stream."""
        return self.ended - self.intended

    @property
    def seconds_per_token(self) -> float | None:
        """TPOT: (E2E - TTFT) / (tokens - 1). None with fewer than two tokens."""
        first = self.first_token_seconds
        if first is None or self.generated_tokens < 2:
            return None
        return (self.end_to_end_seconds - first) / (self.generated_tokens - 1)

    @property
    def gaps(self) -> list[float]:
        """ITL: seconds between one message with tokens and the next, as a reader sees them."""
        return [later - earlier for earlier, later in itertools.pairwise(self.arrivals)]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for a message or a file."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Record:
        """What `to_dict` gave, also after a journey that made lists of tuples."""
        return cls(
            **{
                **values,
                "arrivals": tuple(values["arrivals"]),
                "counts": tuple(values["counts"]),
                "outcome": Outcome(values["outcome"]),
            }
        )


@dataclass(slots=True, kw_only=True)
class Watch:
    """A request under way; becomes a `Record` when it ends. Its methods take the time now, since the run began."""

    number: int
    request_id: str
    stage: str
    intended: float
    sent: float
    prompt_tokens: int | None
    told_tokens: int | None = None
    is_whole: bool = False
    """Whether the stream's last message came."""
    is_given_up: bool = False
    """Whether this client cancelled it."""
    _arrivals: list[float] = field(default_factory=list)
    _counts: list[int] = field(default_factory=list)

    def saw(self, piece: Piece, now: float) -> None:
        """A message came; one without tokens is no arrival."""
        if piece.tokens:
            self._arrivals.append(now)
            self._counts.append(piece.tokens)
        self.is_whole |= piece.is_last
        if piece.prompt_tokens is not None:
            self.prompt_tokens = piece.prompt_tokens
        if piece.generated_tokens is not None:
            self.told_tokens = piece.generated_tokens

    def over(self, code: str, now: float, detail: str = "") -> Record:
        """The stream ended with this status."""
        outcome = self._outcome(code)
        return Record(
            number=self.number,
            request_id=self.request_id,
            stage=self.stage,
            intended=self.intended,
            sent=self.sent,
            arrivals=tuple(self._arrivals),
            counts=tuple(self._counts),
            ended=now,
            outcome=outcome,
            code=INCOMPLETE if code == "OK" and outcome is Outcome.FAILED else code,
            prompt_tokens=self.prompt_tokens,
            told_tokens=self.told_tokens,
            detail=detail,
        )

    def _outcome(self, code: str) -> Outcome:
        if code == "OK":
            return Outcome.FINISHED if self.is_whole else Outcome.FAILED
        # A proxy may answer CANCELLED for a server that died: only what we gave up was cancelled.
        if code == _CANCELLED and self.is_given_up:
            return Outcome.CANCELLED
        return Outcome.REFUSED if code == _REFUSAL and not self._arrivals else Outcome.FAILED
