"""Answers that clients do not take, over raw HTTP/2: how many bytes of them the server holds, and for whom."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack, closing

import grpc
import pytest

from onward.v1 import generation_pb2 as pb
from service.transport import places
from tests.faults.http2 import Connection, code, message_header
from tests.servers import running, status_of

# gRPC's poller holds on to every event loop it has met: one for all.
pytestmark = pytest.mark.asyncio(loop_scope="session")

MAX_MESSAGE_BYTES = 16 << 10
# Of which the bound has room for four, in two copies each; and one caller for half of them.
NUM_TOKENS = 15 << 10
NUM_CALLS = 8


def ask(client: Connection, num_begun: int, num_refused: int) -> None:
    """Has a client ask for answers that it does not take: of the others some begin, and some wait."""
    data = pb.DetokenizeRequest(token_ids=[5] * NUM_TOKENS).SerializeToString()
    path = b"/onward.v1.GenerationService/Detokenize"
    for _ in range(NUM_CALLS):
        client.call(path, head=message_header(len(data)) + data, is_complete=True)
    assert client.pump(lambda: (len(client.begun - client.ended.keys()), len(client.ended)) == (num_begun, num_refused))
    assert {code(block) for block in client.ended.values()} == {"RESOURCE_EXHAUSTED"}


async def test_answers_that_are_not_taken_are_bounded_and_half_of_them_is_one_callers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(places, "MAX_ANSWER_BYTES", 0)
    async with running(max_message_bytes=MAX_MESSAGE_BYTES) as server:
        with ExitStack() as stack:
            clients = [stack.enter_context(closing(Connection(server.endpoint.port, 0))) for _ in range(3)]
            # As many wait as may be on their way.
            for client, num in zip(clients, (2, 1, 1), strict=True):
                await asyncio.to_thread(ask, client, num, NUM_CALLS - 2 * num)
            asked = pb.DetokenizeRequest(token_ids=[5] * NUM_TOKENS)
            error = await status_of(server.generation.Detokenize(asked), grpc.StatusCode.RESOURCE_EXHAUSTED)
            assert error.details().startswith("answers that clients did not take yet leave no room for this one")
            refused = {*clients[0].ended}
            for stream in range(1, 2 * NUM_CALLS, 2):
                clients[0].grant(stream, MAX_MESSAGE_BYTES)
            # What the others wait for may go before the last of them.
            assert await asyncio.to_thread(clients[0].pump, lambda: len(clients[0].ended) >= len(refused) + 3)
            for client in clients[1:]:
                client.close()
            assert await asyncio.to_thread(clients[0].pump, lambda: len(clients[0].ended) == NUM_CALLS)
            taken = [code(block) for stream, block in clients[0].ended.items() if stream not in refused]
            assert taken == ["OK"] * 4, "what waited is answered, too"
            assert len((await server.generation.Detokenize(asked)).text) == NUM_TOKENS, "what is taken makes room"
