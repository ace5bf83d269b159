"""The Python client against real servers, blocking and asyncio: answers, streams, retries, deadlines, cancellation."""

from __future__ import annotations

import asyncio
import gc
import itertools
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import grpc
import pytest

from onward import (
    NO_RETRIES,
    Aborted,
    AsyncClient,
    CallError,
    Cancelled,
    Chunk,
    Client,
    Connection,
    DeadlineExceeded,
    FinishReason,
    IncompleteStream,
    InvalidArgument,
    ResourceExhausted,
    RetryPolicy,
    Tls,
    Unauthenticated,
    Unavailable,
)
from onward.v1 import generation_pb2 as pb
from onward.v1 import model_pb2
from service.errors import (
    ClientStalled,
    DeadlineUnreachable,
    InvalidRequest,
    NotServing,
    Overloaded,
    RequestCancelled,
)
from tests.fakes import FakeRunner, Gate, expected_tokens, letters
from tests.identities import HOST, Identities
from tests.refusing import refusing
from tests.servers import (
    MODEL,
    PROMPT,
    SLOTS,
    Running,
    generate_request,
    running,
    served_model,
)

# Quick ones, so that tests need not wait.
QUICK = RetryPolicy(initial_backoff_seconds=0.001, max_backoff_seconds=0.01)
LONG = served_model(context=1 << 16)
ENDLESS = 60_000


class Asker(Protocol):
    """Either client, behind one face."""

    async def call(self, method: str, *args: Any, **options: Any) -> Any: ...

    async def read(self, *args: Any, most: int | None = None, **options: Any) -> tuple[list[Chunk], Any]:
        """The first `most` chunks of a stream, which is left then, and the stream."""
        ...

    async def glance(self, *args: Any, **options: Any) -> None:
        """Leaves the loop over a stream without a name at its first chunk."""
        ...


class Blocking:
    """`Client`, on threads."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def call(self, method: str, *args: Any, **options: Any) -> Any:
        return await asyncio.to_thread(getattr(self._client, method), *args, **options)

    async def read(self, *args: Any, most: int | None = None, **options: Any) -> tuple[list[Chunk], Any]:
        def work() -> tuple[list[Chunk], Any]:
            chunks = []
            with self._client.stream(*args, **options) as stream:
                for chunk in itertools.islice(stream, most):
                    chunks.append(chunk)  # noqa: PERF402 (what came before an error is kept)
            return chunks, stream

        return await asyncio.to_thread(work)

    async def glance(self, *args: Any, **options: Any) -> None:
        def work() -> None:
            for _ in self._client.stream(*args, **options):
                break

        await asyncio.to_thread(work)


class Asyncio:
    """`AsyncClient`."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def call(self, method: str, *args: Any, **options: Any) -> Any:
        return await getattr(self._client, method)(*args, **options)

    async def read(self, *args: Any, most: int | None = None, **options: Any) -> tuple[list[Chunk], Any]:
        chunks: list[Chunk] = []
        async with self._client.stream(*args, **options) as stream:
            async for chunk in stream:
                chunks.append(chunk)
                if len(chunks) == most:
                    break
        return chunks, stream

    async def glance(self, *args: Any, **options: Any) -> None:
        async for _ in self._client.stream(*args, **options):
            break


@pytest.fixture(params=["blocking", "asyncio"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@asynccontextmanager
async def asking(kind: str, connection: Connection | str, **settings: Any) -> AsyncIterator[Asker]:
    settings = {"retries": QUICK, **settings}
    if kind == "asyncio":
        async with AsyncClient(connection, **settings) as asynchronous:
            yield Asyncio(asynchronous)
    else:
        with Client(connection, **settings) as client:
            yield Blocking(client)


def target(server: Running) -> str:
    return f"{server.endpoint.host}:{server.endpoint.port}"


async def test_generation_is_the_servers_answer(kind: str) -> None:
    expected = expected_tokens(PROMPT, 6)
    async with running() as server, asking(kind, target(server)) as asker:
        answer = await asker.call("generate", "ab", temperature=0, max_tokens=6, request_id="mine", cost=True)
        raw = await server.generation.Generate(generate_request(max_tokens=6))
        drawn = await asker.call("generate", [*PROMPT], temperature=0, max_tokens=6)
    (output,) = answer.outputs
    assert (output.token_ids, answer.text) == (tuple(expected), letters(expected))
    assert answer.text == raw.outputs[0].text == drawn.text
    assert (answer.request_id, answer.model, answer.finish_reason) == ("mine", MODEL, FinishReason.LENGTH)
    assert answer.usage == raw.usage
    assert answer.cost.attended_pairs > 0
    assert drawn.cost is None
    assert drawn.request_id not in ("", "mine")


async def test_stream_has_the_answer_in_chunks(kind: str) -> None:
    async with running() as server, asking(kind, target(server)) as asker:
        chunks, stream = await asker.read("ab", temperature=0, max_tokens=6, n=1, logprobs=1, request_id="mine")
    expected = expected_tokens(PROMPT, 6)
    assert [token for chunk in chunks for token in chunk.token_ids] == expected
    assert "".join(chunk.text for chunk in chunks) == letters(expected)
    assert sum(len(chunk.logprobs) for chunk in chunks) == 6
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + [FinishReason.LENGTH]
    assert (stream.request_id, stream.model, stream.is_complete) == ("mine", MODEL, True)
    assert stream.usage == pb.Usage(prompt_tokens=3, generated_tokens=6)
    assert stream.timings.HasField("time_to_first_token")
    assert stream.cost is None


async def test_other_methods_answer_as_the_contract_does(kind: str) -> None:
    generation = generate_request("ab", max_tokens=5)
    async with running() as server, asking(kind, target(server)) as asker:
        raw = server.generation
        assert await asker.call("score", "ab", "cd") == await raw.Score(pb.ScoreRequest(text="ab", target_text="cd"))
        assert await asker.call("tokenize", "ab", model=MODEL) == await raw.Tokenize(pb.TokenizeRequest(text="ab"))
        bare = pb.TokenizeRequest(text="ab", add_special_tokens=False)
        assert await asker.call("tokenize", "ab", add_special_tokens=False) == await raw.Tokenize(bare)
        assert await asker.call("detokenize", [*PROMPT]) == "ab"
        estimate = await asker.call("estimate", "ab", temperature=0, max_tokens=5)
        estimated = await raw.Estimate(pb.EstimateRequest(request=generation))
        assert estimate.cost.attended_pairs == estimated.cost.attended_pairs > 0
        (listed,) = await asker.call("models")
        assert (listed.name, listed.state) == (MODEL, model_pb2.MODEL_STATE_SERVING)
        assert await asker.call("model") == await server.models.GetModel(model_pb2.GetModelRequest())
        assert (await asker.call("verify_parity", MODEL)).parity.passed
        with pytest.raises(CallError) as caught:
            await asker.call("explain", "ab", layers=[0])
        # The fake has no graph for it.
        assert caught.value.code is grpc.StatusCode.UNIMPLEMENTED


async def test_bad_field_is_named_and_not_retried(kind: str) -> None:
    async with running() as server, asking(kind, target(server)) as asker:
        with pytest.raises(InvalidArgument) as caught:
            await asker.call("generate", "ab", top_p=2.0, request_id="mine")
        assert [violation.field for violation in caught.value.violations] == ["sampling.top_p"]
        assert caught.value.request_id == "mine"
        with pytest.raises(InvalidArgument, match=r"INVALID_ARGUMENT: sampling\.top_p: "):
            await asker.read("ab", top_p=2.0)
        assert server.metric("grpc_server_handled_total", grpc_method="Generate", grpc_code="INVALID_ARGUMENT") == 1


async def test_leaving_a_stream_frees_its_place(kind: str) -> None:
    async with running([LONG]) as server, asking(kind, target(server), timeout_seconds=None) as asker:
        chunks, stream = await asker.read("ab", most=3, max_tokens=ENDLESS, ignore_eos=True)
        assert await server.until_ended(1) == {"cancelled": 1}
    assert len(chunks) == 3
    assert not stream.is_complete


async def test_dropping_a_stream_without_a_name_frees_its_place(kind: str) -> None:
    async with running([LONG]) as server, asking(kind, target(server), timeout_seconds=None) as asker:
        gc.disable()  # The place must be free when the last reference goes, and not when the collector comes.
        try:
            await asker.glance("ab", max_tokens=ENDLESS, ignore_eos=True)
            assert await server.until_ended(1) == {"cancelled": 1}
        finally:
            gc.enable()


async def test_canceled_task_cancels_its_stream() -> None:
    async with running([LONG]) as server, AsyncClient(target(server), timeout_seconds=None) as client:
        begun = asyncio.Event()

        async def read() -> None:
            async for _ in client.stream("ab", max_tokens=ENDLESS, ignore_eos=True):
                begun.set()

        task = asyncio.create_task(read())
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await server.until_ended(1) == {"cancelled": 1}


async def test_stream_closed_by_another_thread_ends_for_its_reader() -> None:
    gate = Gate()
    async with running([LONG], runner=FakeRunner(SLOTS, before_run=gate)) as server:
        with Client(target(server), timeout_seconds=None) as client, gate.closed():
            # Without an end of its own: the gate may open before the server has heard of the reader's leaving.
            stream = client.stream("ab", max_tokens=ENDLESS, ignore_eos=True)
            reader = asyncio.create_task(asyncio.to_thread(list, stream))
            await gate.until_entered()
            stream.close()
            assert await reader == []
        assert await server.until_ended(1) == {"cancelled": 1}


async def test_stream_closed_by_another_task_ends_for_its_reader() -> None:
    gate = Gate()
    async with running([LONG], runner=FakeRunner(SLOTS, before_run=gate)) as server:
        async with AsyncClient(target(server), timeout_seconds=None) as client:
            with gate.closed():
                stream = client.stream("ab", max_tokens=ENDLESS, ignore_eos=True)

                async def read() -> list[Chunk]:
                    return [chunk async for chunk in stream]

                reader = asyncio.create_task(read())
                await gate.until_entered()
                await stream.aclose()
                assert await reader == []
        assert await server.until_ended(1) == {"cancelled": 1}


async def test_stream_that_is_closed_unread_makes_no_call() -> None:
    async with refusing() as server:
        with Client(server.target) as client, client.stream("ab") as stream:
            pass
        assert list(stream) == []
        assert server.heard == []


@pytest.mark.parametrize("whose", ["the call's", "the client's"])
async def test_deadline_ends_a_call_and_frees_its_place(kind: str, whose: str) -> None:
    gate = Gate()
    async with running(runner=FakeRunner(SLOTS, before_run=gate)) as server:

        async def ask(method: str, seconds: float) -> None:
            own, default = ({"timeout_seconds": seconds}, None) if whose == "the call's" else ({}, seconds)
            async with asking(kind, target(server), timeout_seconds=default) as asker:
                await (asker.read("ab", **own) if method == "read" else asker.call(method, "ab", **own))

        with gate.closed():
            for method in ("generate", "read"):
                seconds, num_before = 0.1, server.num_streams
                while True:
                    with pytest.raises(DeadlineExceeded):
                        await ask(method, seconds)
                    # On a busy machine a deadline may pass on the way, and the server never hears of the call.
                    if server.num_streams > num_before:
                        break
                    seconds *= 2
        ended = await server.until_ended(2)
    assert set(ended) <= {"deadline", "cancelled"}


DELAY = 0.02


@pytest.mark.parametrize("method", ["generate", "stream"])
async def test_refused_call_is_retried_after_the_servers_delay(kind: str, method: str) -> None:
    refusals = [Overloaded("m", 8, 8, DELAY) for _ in range(3)]
    async with refusing(*refusals) as server, asking(kind, server.target, timeout_seconds=30) as asker:
        if method == "generate":
            assert (await asker.call("generate", "ab", request_id="mine")).text == "done"
        else:
            chunks, stream = await asker.read("ab", request_id="mine")
            assert "".join(chunk.text for chunk in chunks) == "done"
            assert stream.is_complete
    assert len(server.heard) == 4
    pauses = [later.at - sooner.at for sooner, later in itertools.pairwise(server.heard)]
    assert min(pauses) >= DELAY
    # All attempts share one deadline, sent as the call's and in the request.
    for heard in server.heard:
        assert isinstance(heard.request, pb.GenerateRequest | pb.GenerateStreamRequest)
        assert heard.request.request_id == "mine"
        assert heard.left_seconds is not None
        assert heard.request.timeout_seconds == pytest.approx(heard.left_seconds, abs=5)
    timeouts = [heard.request.timeout_seconds for heard in server.heard]  # type: ignore[attr-defined]
    assert all(later <= sooner - DELAY for sooner, later in itertools.pairwise(timeouts))


@pytest.mark.parametrize("num_events", [1, 2])
async def test_stream_is_not_retried_after_its_first_event(kind: str, num_events: int) -> None:
    refusal = Overloaded("m", 8, 8, 0.0)
    async with refusing(refusal, num_events=num_events) as server, asking(kind, server.target) as asker:
        with pytest.raises(ResourceExhausted) as caught:
            await asker.read("ab")
    # From the stream's first event.
    assert caught.value.request_id == "drawn"
    assert len(server.heard) == 1


@pytest.mark.parametrize(
    ("refusal", "error"),
    [
        (InvalidRequest("sampling.n", 0, "must be at least 1"), InvalidArgument),
        (ClientStalled(1.0), Aborted),
        (RequestCancelled("gone"), Cancelled),
        (
            DeadlineUnreachable(
                queue_seconds=1, prefill_seconds=1, decode_seconds=1, left_seconds=1, retry_after_seconds=None
            ),
            ResourceExhausted,
        ),
    ],
)
async def test_other_refusals_are_not_retried(kind: str, refusal: Any, error: type[CallError]) -> None:
    async with refusing(refusal, refusal) as server, asking(kind, server.target) as asker:
        with pytest.raises(error):
            await asker.call("generate", "ab")
        with pytest.raises(error):
            await asker.read("ab")
    assert len(server.heard) == 2


async def test_unavailable_is_retried_unless_the_call_changes_something(kind: str) -> None:
    starting = NotServing("starting")
    async with refusing(starting, starting) as server, asking(kind, server.target) as asker:
        assert [model.name for model in await asker.call("models")] == ["m"]
        assert len(server.heard) == 3
        for method in ("load_model", "unload_model", "reload_model", "verify_parity"):
            server.refusals.append(starting)
            server.heard.clear()
            with pytest.raises(Unavailable):
                await asker.call(method, "m")
            assert len(server.heard) == 1
            # A refusal with a delay means that nothing was done.
            server.refusals.append(Overloaded("m", 8, 8, 0.0))
            await asker.call(method, "m")
            assert len(server.heard) == 3


async def test_server_that_comes_later_is_found(kind: str) -> None:
    policy = RetryPolicy(max_attempts=1000, initial_backoff_seconds=0.1, max_backoff_seconds=0.1)
    with socket.socket() as place:
        # Reserved and not listening; the server will share the port.
        place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        place.bind(("127.0.0.1", 0))
        port = place.getsockname()[1]
        async with asking(kind, f"127.0.0.1:{port}", retries=policy) as asker:
            with pytest.raises(Unavailable):
                async with asking(kind, f"127.0.0.1:{port}", retries=NO_RETRIES) as hasty:
                    await hasty.call("generate", "ab")
            waiting = asyncio.create_task(asker.call("generate", "ab"))
            await asyncio.sleep(0.3)
            assert not waiting.done()
            async with refusing(port=port):
                assert (await waiting).text == "done"


async def test_channel_reconnects_no_later_than_the_client_tries_again(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = "aio_channel" if kind == "asyncio" else "channel"
    original, given = getattr(Connection, method), []

    def open_channel(self: Connection, *options: Any) -> Any:
        given.append(options)
        return original(self, *options)

    monkeypatch.setattr(Connection, method, open_channel)
    async with asking(kind, "127.0.0.1:1"):
        assert given == [QUICK.channel_options]


async def test_stream_without_summary_is_incomplete(kind: str) -> None:
    async with refusing(has_summary=False) as server, asking(kind, server.target) as asker:
        with pytest.raises(IncompleteStream) as caught:
            await asker.read("ab")
    assert caught.value.request_id == "drawn"


async def test_key_and_trace_are_sent_with_every_call(kind: str) -> None:
    trace = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "tracestate": "vendor=1"}
    async with refusing() as server, asking(kind, Connection(server.target, api_key="key")) as asker:
        await asker.call("generate", "ab", **trace)
        await asker.read("ab", **trace)
        await asker.call("models", **trace)
        await asker.call("models")
    *traced, untraced = (heard.metadata for heard in server.heard)
    for metadata in traced:
        assert metadata.items() >= {**trace, "authorization": "Bearer key"}.items()
    assert untraced["authorization"] == "Bearer key"
    assert "traceparent" not in untraced
    assert "tracestate" not in untraced


async def test_mutual_tls_and_api_key(kind: str, tmp_path: Path) -> None:
    who = Identities.issue(tmp_path)
    tls = Tls(
        ca_certificate=who.read("ca.pem"),
        client_certificate=who.read("client.pem"),
        client_key=who.read("client.key"),
        server_name=HOST,
    )
    async with running(**who.server(is_mutual=True)) as server:
        at = f"127.0.0.1:{server.endpoint.port}"
        async with asking(kind, Connection(at, tls, who.api_key)) as asker:
            assert (await asker.call("generate", "ab", max_tokens=2)).usage.generated_tokens == 2
        async with asking(kind, Connection(at, tls, "wrong")) as asker:
            with pytest.raises(Unauthenticated):
                await asker.call("generate", "ab")
        anonymous = Tls(ca_certificate=who.read("ca.pem"), server_name=HOST)
        for stranger in (Connection(at, anonymous, who.api_key), Connection(at, api_key=who.api_key)):
            async with asking(kind, stranger, retries=NO_RETRIES) as asker:
                with pytest.raises(Unavailable):
                    await asker.call("generate", "ab")


async def test_large_answer_is_accepted_if_configured(kind: str) -> None:
    async with running() as server:
        async with asking(kind, Connection(target(server), max_answer_bytes=40)) as asker:
            with pytest.raises(ResourceExhausted) as caught:
                await asker.call("generate", "ab", max_tokens=30)
        # It is the client's own limit: coming again is no help.
        assert caught.value.retry_after_seconds is None
        async with asking(kind, Connection(target(server), max_answer_bytes=-1)) as asker:
            assert (await asker.call("generate", "ab", max_tokens=30, ignore_eos=True)).usage.generated_tokens == 30


async def test_one_client_serves_many_threads() -> None:
    async with running() as server:
        with Client(target(server), retries=RetryPolicy(max_attempts=100)) as client:
            gate = threading.Barrier(4)

            def ask() -> str:
                gate.wait()
                return client.generate("ab", temperature=0, max_tokens=5).text

            texts = await asyncio.gather(*(asyncio.to_thread(ask) for _ in range(4)))
    assert set(texts) == {letters(expected_tokens(PROMPT, 5))}
