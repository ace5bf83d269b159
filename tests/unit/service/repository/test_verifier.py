"""Who shares a replay of golden cases."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

from service.repository.entry import ModelEntry, Models
from service.repository.models import Parity
from service.repository.verifier import Verifier


class _Replays:
    """An engine on which replays end in turn, each when it is let go."""

    def __init__(self) -> None:
        self.outcomes: list[Parity] = []
        self.let_go = asyncio.Event()
        self.ended: Callable[[], object] = lambda: None

    async def call(self, *_: object) -> Parity:
        outcome = Parity(())
        self.outcomes.append(outcome)
        await self.let_go.wait()
        asyncio.get_running_loop().call_soon(self.ended)
        return outcome


def _verifier(engine: _Replays) -> Verifier:
    model = SimpleNamespace(name="m", golden_cases=(), manifest=Mock())
    entry = ModelEntry(cast(Any, model), Mock(), None)
    models = Models()
    models.insert(entry)
    return Verifier(cast(Any, engine), models)


async def test_who_asks_between_a_replays_end_and_its_waiters_waking_gets_a_new_one() -> None:
    engine = _Replays()
    verifier = _verifier(engine)
    late: list[asyncio.Future[Parity]] = []
    first = asyncio.ensure_future(verifier.verify("m"))
    await asyncio.sleep(0)

    def ask() -> None:
        engine.ended = lambda: None
        late.append(asyncio.ensure_future(verifier.verify("m")))

    engine.ended = ask
    engine.let_go.set()
    assert await first is engine.outcomes[0]
    assert await late[0] is engine.outcomes[1]
