"""What every transport does around a call: finds its API key, admits it, and counts it until its handler has ended."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from service.access import Access, Allowance
from service.errors import RateLimited
from service.telemetry.tracing import CallContext
from service.transport.places import claim

_AUTHORIZATION = "authorization"
_BEARER = "bearer"


class OpenCalls:
    """Counts the calls whose handlers run. Event loop only."""

    def __init__(self) -> None:
        self.num_open = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Counts a call inside the block."""
        self.num_open += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.num_open -= 1
            if not self.num_open:
                self._idle.set()

    async def wait_idle(self) -> None:
        """Waits until no handler runs; a canceled one runs until its `finally` is done."""
        await self._idle.wait()


@contextmanager
def admitted(access: Access, method: str, context: CallContext) -> Iterator[tuple[Allowance, str]]:
    """A context for a call that its key allows and its caller has a place for; yields its allowance and caller.

    The caller is the key, or the connection where no key is needed. An address may be a proxy's, with many clients.

    Raises:
        Unauthenticated, PermissionDenied, RateLimited: as `access` and `places` do.
    """
    with access.admitted(method, api_key(context)) as allowance:
        caller = allowance.owner or context.peer()
        try:
            claim(caller, context.peer())
        except RateLimited:
            allowance.refund()
            raise
        yield allowance, caller


def api_key(context: CallContext) -> str | None:
    """The key of `authorization: Bearer KEY`; None for several such headers."""
    shown = [value for name, value in context.invocation_metadata() or () if name == _AUTHORIZATION]
    if len(shown) != 1 or not isinstance(shown[0], str):
        return None
    scheme, _, key = shown[0].partition(" ")
    return key.strip() if scheme.lower() == _BEARER else None
