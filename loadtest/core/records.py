"""The record of one request: its due time, sending time, token arrivals and outcome.

Times are seconds since the run began, on the client's monotonic clock. Latencies count from the due time, so that a
stalled client or server cannot hide waiting.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

INCOMPLETE = "INCOMPLETE"
"""In place of a gRPC code: the stream ended with OK, but without its final message."""
IN_STREAM = "ERROR_IN_STREAM"
"""In place of a gRPC code: an error in a message that names no status."""
_REFUSAL = "RESOURCE_EXHAUSTED"
_CANCELLED = "CANCELLED"


class Outcome(StrEnum):
    """How a request ended; every offered request has exactly one outcome."""

    FINISHED = "finished"
    """The final message arrived, and the status was OK."""
    REFUSED = "refused"
    """RESOURCE_EXHAUSTED before the first token."""
    FAILED = "failed"
    """Any other status, or a stream without its final message."""
    CANCELLED = "cancelled"
    """This client cancelled it."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One decoded message of a stream: its number of tokens, whether it is the final message, its error.

    `prompt_tokens` and `generated_tokens` are the server's counts for the whole request, if the message has them.
    """

    tokens: int
    is_last: bool = False
    error: str = ""
    prompt_tokens: int | None = None
    generated_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One finished request.

    Args:
        number: its number in the run.
        request_id: its id on the wire.
        stage: the stage of the run, as in "8 users"; empty if the run has only one.
        intended: when it was due.
        sent: when it was sent.
        arrivals: when each message with tokens arrived.
        counts: the number of tokens in each of them.
        ended: when the stream ended.
        outcome: how it ended.
        code: the gRPC status by name, `INCOMPLETE` or `IN_STREAM`.
        prompt_tokens: the server's count, else this client's; None if both are unknown.
        reported_tokens: the server's count of generated tokens; None if it reports none.
        detail: the server's error message.
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
    reported_tokens: int | None = None
    detail: str = ""

    @property
    def generated_tokens(self) -> int:
        """Generated tokens, whatever the outcome: the server's count if it reports one, else the sum over messages."""
        return sum(self.counts) if self.reported_tokens is None else self.reported_tokens

    @property
    def lateness(self) -> float:
        """Seconds from the due time to the sending: this client's part of the latency."""
        return self.sent - self.intended

    @property
    def first_token_seconds(self) -> float | None:
        """TTFT: from the due time to the first token. None without tokens."""
        return self.arrivals[0] - self.intended if self.arrivals else None

    @property
    def end_to_end_seconds(self) -> float:
        """E2E: from the due time to the end of the stream."""
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
        """ITL: seconds between consecutive messages with tokens."""
        return [later - earlier for earlier, later in itertools.pairwise(self.arrivals)]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for a message or a file."""
        values = asdict(self)
        # The name of the field in stored reports.
        values["told_tokens"] = values.pop("reported_tokens")
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Record:
        """Reverses `to_dict`, also after a serialization that turned tuples into lists."""
        own: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in values.items()
        }
        own["reported_tokens"] = own.pop("told_tokens")
        return cls(**{**own, "outcome": Outcome(own["outcome"])})


@dataclass(slots=True, kw_only=True)
class Watch:
    """A request in flight; becomes a `Record` when it ends. Its methods take the current time since the run began."""

    number: int
    request_id: str
    stage: str
    intended: float
    sent: float
    prompt_tokens: int | None
    reported_tokens: int | None = None
    is_whole: bool = False
    """Whether the final message arrived."""
    is_cancelled: bool = False
    """Whether this client cancelled it."""
    _arrivals: list[float] = field(default_factory=list)
    _counts: list[int] = field(default_factory=list)

    def saw(self, piece: Piece, now: float) -> None:
        """Adds a message; one without tokens is no arrival."""
        if piece.tokens:
            self._arrivals.append(now)
            self._counts.append(piece.tokens)
        self.is_whole |= piece.is_last
        if piece.prompt_tokens is not None:
            self.prompt_tokens = piece.prompt_tokens
        if piece.generated_tokens is not None:
            self.reported_tokens = piece.generated_tokens

    def over(self, code: str, now: float, detail: str = "") -> Record:
        """Ends the request with this status."""
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
            reported_tokens=self.reported_tokens,
            detail=detail,
        )

    def _outcome(self, code: str) -> Outcome:
        if code == "OK":
            return Outcome.FINISHED if self.is_whole else Outcome.FAILED
        # A proxy may answer CANCELLED for a server that died: only our own cancellations count.
        if code == _CANCELLED and self.is_cancelled:
            return Outcome.CANCELLED
        return Outcome.REFUSED if code == _REFUSAL and not self._arrivals else Outcome.FAILED
