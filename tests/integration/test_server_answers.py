"""Answers that clients do not take, over raw HTTP/2: how many bytes of them the server holds, and for whom."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import ExitStack, closing

import grpc
import pytest

from proto.onward.v1 import generation_pb2 as pb
from service.transport import places
from tests.faults.http2 import Connection, code, message_header
from tests.servers import running, status_of

# gRPC's poller holds on to every event loop it has met: one for all.
pytestmark = pytest.mark.asyncio(loop_scope="session")

MAX_MESSAGE_BYTES = 16 << 10
# Of which the bound has room for four, in two copies each; and one caller for half of them.
NUM_TOKENS = 15 << 10
NUM_CALLS = 8


def ask(client: Connection) -> dict[int, str]:
    """Has a client ask for answers that it does not take; how each ended that did."""
    data = pb.DetokenizeRequest(token_ids=[5] * NUM_TOKENS).SerializeToString()
    path = b"/onward.v1.GenerationService/Detokenize"
    streams = {client.call(path, head=message_header(len(data)) + data, is_complete=True) for _ in range(NUM_CALLS)}
    assert client.pump(lambda: streams <= client.begun | client.ended.keys())
    return {stream: code(block) for stream, block in client.ended.items()}


async def test_answers_that_are_not_taken_are_bounded_and_half_of_them_is_one_callers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(places, "MAX_ANSWER_BYTES", 0)
    async with running(max_message_bytes=MAX_MESSAGE_BYTES) as server:
        with ExitStack() as stack:
            clients = [stack.enter_context(closing(Connection(server.endpoint.port, 0))) for _ in range(3)]
            ended = [Counter((await asyncio.to_thread(ask, client)).values()) for client in clients]
            assert ended == [{"RESOURCE_EXHAUSTED": NUM_CALLS - num} for num in (2, 1, 1)]
            asked = pb.DetokenizeRequest(token_ids=[5] * NUM_TOKENS)
            error = await status_of(server.generation.Detokenize(asked))
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "answers to this caller are on their way" in error.details()
            clients[0].grant(1, MAX_MESSAGE_BYTES)
            assert await asyncio.to_thread(clients[0].pump, lambda: 1 in clients[0].ended)
            assert code(clients[0].ended[1]) == "OK"
            assert len((await server.generation.Detokenize(asked)).text) == NUM_TOKENS, "what is taken makes room"
