"""The caller of the call that the running task serves: its tenant, its share, and what its requests hold together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from service.access.keys import ApiKey, Permission
from service.errors import InvalidRequest, RateLimited

RETRY_SECONDS = 1.0
"""Retry delay where a limit of requests at once is reached: nothing predicts when one ends."""

_KEYLESS = ApiKey(name="", digest=b"", permissions=frozenset(Permission), max_priority=2**31 - 1)


@dataclass(slots=True)
class Use:
    """Usage of one key: its token bucket, running requests, and the sequences and tokens in flight."""

    tokens: float = 0.0
    refilled: float = 0.0
    num_running: int = 0
    num_sequences: int = 0
    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Caller:
    """The tenant of a request. Without API keys all requests have one tenant, without limits."""

    key: ApiKey
    use: Use

    @property
    def tenant(self) -> str:
        """The key's name; empty without API keys."""
        return self.key.name

    @property
    def weight(self) -> float:
        """Share beside other callers; above 0."""
        return self.key.weight

    @property
    def default_priority(self) -> int:
        """Priority of requests that name none, which is 0 on the wire; at most 0."""
        return min(0, self.key.max_priority)

    def check(self, priority: int, num_sequences: int, num_tokens: int) -> None:
        """Refuses a request that the caller may never make.

        `num_tokens` are those of its prompt and the most that it may generate, over all rows.

        Raises:
            InvalidRequest: when the priority is above the caller's highest.
            RateLimited: when the request alone is beyond a limit.
        """
        if priority > self.key.max_priority:
            raise InvalidRequest("priority", priority, f"must be at most {self.key.max_priority} with this API key")
        for unit, limit, asked in self._limits(num_sequences, num_tokens):
            if limit is not None and asked > limit:
                refusal = f"the request asks for {asked} {unit}, this API key is good for {limit} at once"
                raise RateLimited(refusal, None)

    def hold(self, num_sequences: int, num_tokens: int) -> None:
        """Counts a request in flight, until `release` with the same numbers.

        Raises:
            RateLimited: when the caller's requests together exceed a limit.
        """
        held = self.use.num_sequences + num_sequences, self.use.num_tokens + num_tokens
        for unit, limit, asked in self._limits(*held):
            if limit is not None and asked > limit:
                refusal = f"with this request {asked} {unit} of this API key would be in flight, the limit is {limit}"
                raise RateLimited(refusal, RETRY_SECONDS)
        self.use.num_sequences, self.use.num_tokens = held

    def release(self, num_sequences: int, num_tokens: int) -> None:
        """Ends what `hold` began."""
        self.use.num_sequences -= num_sequences
        self.use.num_tokens -= num_tokens

    def _limits(self, num_sequences: int, num_tokens: int) -> tuple[tuple[str, int | None, int], ...]:
        return (
            ("sequences", self.key.max_sequences, num_sequences),
            ("tokens", self.key.max_tokens_in_flight, num_tokens),
        )


_CALLER: ContextVar[Caller | None] = ContextVar("onward_caller", default=None)


def current_caller() -> Caller:
    """The caller of the call, or of the request of a call with many, that the running task serves."""
    return _CALLER.get() or Caller(_KEYLESS, Use())


@contextmanager
def serving(caller: Caller) -> Iterator[None]:
    """Makes a caller the current one."""
    token = _CALLER.set(caller)
    try:
        yield
    finally:
        _CALLER.reset(token)
