"""Servers behind a real Envoy: answers, refusals, retries, load balancing and servers that stop.

One fault is missing: a server that is killed, which tests/faults/test_replicas.py does in processes of their own.
"""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from google.rpc import error_details_pb2

from onward.inference.open_inference_pb2_grpc import GRPCInferenceServiceStub
from onward.v1 import generation_pb2 as pb
from onward.v1.generation_pb2_grpc import GenerationServiceStub
from service.config import Admission
from service.engine.batch import ScheduledBatch
from service.repository.models import ModelState
from service.routing import ROUTING_KEY, routing_key
from tests.balanced import Balanced, behind, target_of, two
from tests.breaking import Breaking, Fault, breaking
from tests.fakes import FakeRunner, Gate, expected_tokens, spell
from tests.identities import key_table
from tests.servers import (
    MODEL,
    SLOTS,
    eventually,
    expire,
    generate_request,
    infer_request,
    kinds,
    nothing,
    read,
    read_accepted,
    rich_details,
    running,
    served_model,
    status_of,
    stream_request,
    tokens_of,
)

Code = grpc.StatusCode


def shared(name: str, **options: Any) -> Any:
    """A fixture of two servers that all tests of this module share."""

    @pytest_asyncio.fixture(scope="module", loop_scope="session", name=name)
    async def fixture(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Balanced]:
        async with two(tmp_path_factory.mktemp(name), **options) as balanced:
            yield balanced

    return fixture


usual = shared("usual", max_message_bytes=4096, max_metadata_bytes=4096, max_queue_size=60, admission=Admission.OFF)
# Two more than run may wait, and there may be as many calls more: one connection has half of all.
narrow = shared("narrow", max_queue_size=2, max_concurrent_rpcs=2 * (SLOTS + 2))


@pytest.fixture
def balanced(usual: Balanced) -> Balanced:
    return usual.anew()


async def test_answers_and_streams_are_the_direct_servers_and_both_servers_give_them(balanced: Balanced) -> None:
    texts = [f"{one}{other}" for one in "abcdefgh" for other in "xyz"]
    answers = await asyncio.gather(
        *(balanced.generation.Generate(generate_request(text, max_tokens=6)) for text in texts[:8])
    )
    streams = [await read(balanced.generation.GenerateStream(stream_request(text))) for text in texts[8:]]
    assert await balanced.until_ended(len(texts)) == {"length": len(texts)}
    assert all(balanced.ended)
    for text, answer in zip(texts[:8], answers, strict=True):
        assert list(answer.outputs[0].token_ids) == expected_tokens((1, *spell(text)), 6)
    for text, events in zip(texts[8:], streams, strict=True):
        assert tokens_of(events) == expected_tokens((1, *spell(text)), len(tokens_of(events)))
        assert (kinds(events)[0], kinds(events)[-1]) == ("accepted", "summary")


async def test_tokens_come_through_one_by_one(balanced: Balanced) -> None:
    steps = threading.Semaphore(0)
    with balanced.steps.after(lambda _: steps.acquire()):
        try:
            call = await read_accepted(balanced.generation.GenerateStream(stream_request(max_tokens=5)))
            # The next step runs only when the token of the one before has come through.
            for expected in expected_tokens((1, *spell("ab")), 5):
                steps.release()
                assert tokens_of([await call.read()]) == [expected]
            assert kinds(await read(call)) == ["finished", "summary"]
        finally:
            # A server that waits for ever could not be stopped.
            steps.release(100)


def generate(**fields: Any) -> Callable[[grpc.aio.Channel], Any]:
    return lambda channel: GenerationServiceStub(channel).Generate(generate_request(**fields))


def stream(**fields: Any) -> Callable[[grpc.aio.Channel], Any]:
    return lambda channel: GenerationServiceStub(channel).GenerateStream(stream_request(**fields))


def raw(path: str, message: bytes = b"", **options: Any) -> Callable[[grpc.aio.Channel], Any]:
    return lambda channel: channel.unary_unary(path)(message, **options)


_GENERATE = "/onward.v1.GenerationService/Generate"
NO_CHAT = pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(role="user", content="ab")]))
TOO_LARGE = {"max_tokens": 60, "ignore_eos": True, "response": pb.ResponseOptions(logprobs=20)}
# The status of calls that must fail.
REFUSED: Mapping[str, tuple[grpc.StatusCode, Callable[[grpc.aio.Channel], Any]]] = {
    "value beyond its limit": (Code.INVALID_ARGUMENT, generate(max_tokens=0)),
    "value beyond its limit, streamed": (Code.INVALID_ARGUMENT, stream(max_tokens=0)),
    "prompt too long": (Code.OUT_OF_RANGE, generate(text="a" * 100)),
    "unknown model": (Code.NOT_FOUND, generate(model="unknown")),
    "not offered": (Code.UNIMPLEMENTED, lambda channel: GenerationServiceStub(channel).Generate(NO_CHAT)),
    "no such method": (Code.UNIMPLEMENTED, raw("/onward.v1.GenerationService/Nothing")),
    "no message": (Code.INVALID_ARGUMENT, raw(_GENERATE, b"\xff\xff")),
    "message too large": (Code.RESOURCE_EXHAUSTED, generate(text="a" * 10_000)),
    "answer too large": (Code.OUT_OF_RANGE, generate(**TOO_LARGE)),
    "unknown model by the other protocol": (
        Code.NOT_FOUND,
        lambda channel: GRPCInferenceServiceStub(channel).ModelInfer(infer_request(model="unknown")),
    ),
}


@pytest.mark.parametrize(("code", "ask"), REFUSED.values(), ids=REFUSED.keys())
async def test_refusals_have_the_code_the_words_and_the_details_of_the_direct_servers(
    balanced: Balanced, code: grpc.StatusCode, ask: Callable[[grpc.aio.Channel], Any]
) -> None:
    direct = await status_of(ask(balanced.servers[0].channel), code)
    assert as_seen(await status_of(ask(balanced.channel))) == as_seen(direct)


async def test_metadata_too_large_is_refused_whether_or_not_envoy_knows_the_limit_yet(balanced: Balanced) -> None:
    # In gRPC's words once it has acknowledged it, in the server's until then.
    ask = raw(_GENERATE, metadata=[("x-padding", "x" * 8192)])
    for channel in (balanced.servers[0].channel, balanced.channel):
        await status_of(ask(channel), Code.RESOURCE_EXHAUSTED)


def as_seen(error: grpc.aio.AioRpcError) -> tuple[Any, ...]:
    """All of an error that a caller sees."""
    details = [value for name, value in error.trailing_metadata() or () if name == "grpc-status-details-bin"]
    # Envoy packs metadata in its own way, and gRPC says how large it was.
    return error.code(), re.sub(r"value length \d+", "value length", str(error.details())), details


async def test_many_refusals_eject_no_server(balanced: Balanced) -> None:
    # One after the other, so that nothing good comes between: five in a row are what makes Envoy think.
    for _, ask in REFUSED.values():
        for _ in range(12):
            await status_of(ask(balanced.channel))
    assert await asyncio.to_thread(balanced.envoy.healthy) == {target_of(server) for server in balanced.servers}
    counters = await asyncio.to_thread(balanced.envoy.counters)
    assert counters["cluster.onward.outlier_detection.ejections_enforced_total"] == 0


async def test_keys_are_required_and_each_server_counts_separately(tmp_path: Path) -> None:
    key, wrong = (("authorization", "Bearer a-key"),), (("authorization", "Bearer another"),)
    path = tmp_path / "keys.toml"
    path.write_text(key_table("alice", "a-key", rest="requests_per_second = 0.01\nburst = 2"))
    async with two(tmp_path, api_keys=path) as balanced:
        for metadata in ((), wrong):
            await status_of(balanced.generation.Generate(generate_request(), metadata=metadata), Code.UNAUTHENTICATED)
        # Which of the two is asked is chance, until one has no more to give.
        codes: Counter[grpc.StatusCode] = Counter()
        while codes[Code.RESOURCE_EXHAUSTED] < 20:
            call = balanced.generation.Generate(generate_request(max_tokens=1), metadata=key)
            codes[await call.code()] += 1
    assert set(codes) == {Code.OK, Code.RESOURCE_EXHAUSTED}
    assert 2 < codes[Code.OK] <= 4, "twice what one server would have let through"


@pytest.mark.parametrize(
    "path",
    [
        "/onward.v1.ModelService/LoadModel",
        "/onward.v1.ModelService/VerifyParity",
        "/inference.GRPCInferenceService/RepositoryModelUnload",
    ],
)
async def test_calls_for_one_server_are_not_routed(balanced: Balanced, path: str) -> None:
    error = await status_of(raw(path)(balanced.channel))
    assert (error.code(), error.details()) == (
        Code.PERMISSION_DENIED,
        "this is for one replica and not for all behind this address: ask it directly",
    )


async def test_calls_go_where_fewer_are_in_flight(balanced: Balanced) -> None:
    with balanced.steps.held():
        calls = [
            await read_accepted(balanced.generation.GenerateStream(stream_request(max_tokens=2))) for _ in range(60)
        ]
    for call in calls:
        assert kinds(await read(call))[-1] == "summary"
    await balanced.until_ended(60)
    # Chance alone would be so even in a third of all cases, this in all but one of many thousands.
    assert all(27 <= each.total() <= 33 for each in balanced.ended)


async def fill(balanced: Balanced) -> list[Any]:
    """Streams of each server that run or wait, as many as it takes; no step may be taken."""
    return [await read_accepted(server.stream(max_tokens=2)) for server in balanced.servers for _ in range(SLOTS + 2)]


async def test_a_full_queue_refuses_with_a_time_to_retry_and_is_not_asked_again(narrow: Balanced) -> None:
    balanced = narrow.anew()
    with balanced.steps.held():
        held = await fill(balanced)
        error = await status_of(balanced.generation.Generate(generate_request()))
    assert error.code() is Code.RESOURCE_EXHAUSTED
    assert rich_details(error)[0].Unpack(error_details_pb2.RetryInfo())
    for call in held:
        assert kinds(await read(call))[-1] == "summary"
    # Nor is the other one.
    assert await balanced.until_ended(len(held) + 1) == {"length": len(held), "overloaded": 1}


async def test_a_server_that_takes_no_more_calls_is_not_taken_for_a_dead_one(narrow: Balanced) -> None:
    balanced = narrow.anew()
    targets = {target_of(server) for server in balanced.servers}

    async def counters() -> Mapping[str, int]:
        return await asyncio.to_thread(balanced.envoy.counters)

    async with AsyncExitStack() as stack:
        stack.enter_context(balanced.steps.held())
        held = await fill(balanced)
        # The other places that there are, for calls whose requests never come, each of a connection of its own.
        begun = []
        for server in [*balanced.servers] * (SLOTS + 2):
            options = [("grpc.use_local_subchannel_pool", 1)]
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(target_of(server), options))
            begun.append(channel.stream_unary(_GENERATE)(nothing()))
        for server in balanced.servers:
            # They are on their way; until then it is the queue that is full.
            while (await status_of(server.generation.Generate(generate_request()))).details() != FULL:
                pass
        error = await status_of(balanced.generation.Generate(generate_request()))
        assert (error.code(), error.details()) == (Code.RESOURCE_EXHAUSTED, FULL)
        before = await counters()
        names = [f"cluster.{cluster}.health_check" for cluster in ("onward", "onward-by-key")]
        # Each asks each server twice more.
        now = before
        while any(now[f"{name}.success"] < before[f"{name}.success"] + 4 for name in names):
            now = await counters()
        assert [now[f"{name}.failure"] for name in names] == [0, 0]
        assert await asyncio.to_thread(balanced.envoy.healthy) == targets
        for call in begun:
            call.cancel()
    for call in held:
        assert kinds(await read(call))[-1] == "summary"
    # Places are free again once all of that is over.
    while await balanced.generation.Generate(generate_request(max_tokens=1)).code() is not Code.OK:
        pass


FULL = f"{2 * (SLOTS + 2)} calls run, which is the most there may be at once"


async def test_a_call_that_failed_in_a_server_is_not_sent_to_another(balanced: Balanced) -> None:
    def fail(_: ScheduledBatch) -> None:
        raise RuntimeError

    with balanced.steps.after(fail):
        error = await status_of(balanced.generation.Generate(generate_request()))
    assert error.code() is Code.INTERNAL
    assert re.fullmatch(r"internal error [0-9a-f]+", str(error.details()))
    assert await balanced.until_ended(1) == {"engine_failed": 1}


async def test_a_callers_deadline_reaches_the_server(balanced: Balanced) -> None:
    handled = {"grpc_method": "Generate", "grpc_code": "DEADLINE_EXCEEDED"}

    def num_late() -> float:
        return sum(server.metric("grpc_server_handled_total", **handled) for server in balanced.servers)

    before = num_late()
    with balanced.steps.held():
        # It knows that there was one, and does not take the call for one whose caller hung up.
        await expire(
            lambda timeout: balanced.generation.Generate(generate_request(), timeout=timeout),
            lambda: num_late() > before and any(server.num_streams for server in balanced.servers),
        )
    for server in balanced.servers:
        await server.until_idle()
    assert (await balanced.until_ended(1)).keys() <= {"cancelled", "deadline"}


@dataclass(frozen=True, slots=True)
class Beside:
    """A server that breaks calls, and one that answers, behind one Envoy."""

    broken: Breaking
    balanced: Balanced

    async def doing(self, fault: Fault) -> tuple[Breaking, Balanced]:
        """Both, once Envoy takes both for healthy; what was counted before does not count."""
        self.broken.fault, self.broken.num_calls = fault, 0
        balanced = self.balanced.anew()
        await asyncio.to_thread(balanced.envoy.wait_healthy, [self.broken.target, target_of(balanced.servers[0])])
        return self.broken, balanced


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def beside(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Beside]:
    async with (
        breaking(Fault.REFUSED) as broken,
        running() as sound,
        behind(tmp_path_factory.mktemp("beside"), sound, others=[broken.target]) as balanced,
    ):
        yield Beside(broken, balanced)


@pytest.mark.parametrize("fault", [Fault.REFUSED, Fault.GOODBYE])
async def test_what_a_server_has_not_begun_is_retried_on_another(beside: Beside, fault: Fault) -> None:
    expected = expected_tokens((1, *spell("ab")), 3)
    broken, balanced = await beside.doing(fault)
    num_asked = 0
    while not broken.num_calls:
        answer = await balanced.generation.Generate(generate_request(max_tokens=3))
        events = await read(balanced.generation.GenerateStream(stream_request(max_tokens=3)))
        assert list(answer.outputs[0].token_ids) == tokens_of(events) == expected
        assert (kinds(events)[0], kinds(events)[-1]) == ("accepted", "summary")
        num_asked += 2
    assert await balanced.until_ended(num_asked) == {"length": num_asked}


@pytest.mark.parametrize("fault", [Fault.RESET, Fault.CLOSED])
async def test_what_a_server_may_have_begun_is_not_retried(beside: Beside, fault: Fault) -> None:
    broken, balanced = await beside.doing(fault)
    num_answered, error = 0, None
    while not broken.num_calls:
        try:
            await balanced.generation.Generate(generate_request(max_tokens=1))
            num_answered += 1
        except grpc.aio.AioRpcError as lost:
            error = lost
    assert error is not None
    assert error.code() is Code.UNAVAILABLE
    assert broken.num_calls == 1
    assert await balanced.until_ended(num_answered) == Counter(length=num_answered)


async def test_a_stream_that_broke_after_its_first_message_is_not_begun_anew(beside: Beside) -> None:
    broken, balanced = await beside.doing(Fault.RESET_AFTER_A_MESSAGE)
    while not broken.num_calls:
        call = balanced.generation.GenerateStream(stream_request(max_tokens=3))
        events: list[pb.GenerateStreamResponse] = []
        error = None
        try:
            while (event := await call.read()) is not grpc.aio.EOF:
                events.append(event)
                broken.reset()
        except grpc.aio.AioRpcError as broke:
            error = broke
        assert broken.num_calls or kinds(events)[-1] == "summary"
    assert error is not None
    assert error.code() in (Code.INTERNAL, Code.UNAVAILABLE, Code.CANCELLED)
    assert (kinds(events), broken.num_calls) == (["accepted"], 1)


async def test_200_cancelled_streams_leave_nothing_behind_in_any_server(tmp_path: Path) -> None:
    gate = Gate()

    def unhurried(batch: ScheduledBatch) -> None:
        # Steps that take no time at all leave the loop none for health checks: all of this is one process.
        gate(batch)
        time.sleep(0.002)

    # Streams far too long to end.
    async with two(tmp_path, context=100_000, max_queue_size=200) as balanced:
        with balanced.steps.after(unhurried):
            with gate.closed():
                calls = [
                    await read_accepted(balanced.generation.GenerateStream(stream_request(max_tokens=60_000)))
                    for _ in range(200)
                ]
            # Some of them get tokens, the others wait for a slot. Which is Envoy's draw.
            tokens = [
                partial(server.metric, "generation_tokens_total", model_name=MODEL) for server in balanced.servers
            ]
            await eventually(lambda: all(count() >= SLOTS for count in tokens))
            for call in calls:
                call.cancel()
            assert await balanced.until_ended(200) == {"cancelled": 200}
            assert all(each["cancelled"] >= 80 for each in balanced.ended)
            answers = await asyncio.gather(
                *(balanced.generation.Generate(generate_request(max_tokens=3)) for _ in range(4 * SLOTS))
            )
            assert len(answers) == 4 * SLOTS
            await balanced.until_ended(200 + 4 * SLOTS)


async def test_a_client_that_stops_reading_loses_its_place_and_the_others_keep_theirs(tmp_path: Path) -> None:
    # Far more than Envoy and the windows of HTTP/2 hold, all of it with alternatives to every token.
    async with two(tmp_path, context=200_000, max_stall_seconds=0.5) as balanced:
        request = stream_request(max_tokens=50_000, ignore_eos=True)
        request.response.logprobs = 20
        options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65535)]
        async with grpc.aio.insecure_channel(balanced.envoy.target, options) as channel:
            stalled = await read_accepted(GenerationServiceStub(channel).GenerateStream(request))
            ended = {"grpc_method": "GenerateStream", "grpc_code": "ABORTED"}
            while not sum(server.metric("grpc_server_handled_total", **ended) for server in balanced.servers):
                answer = await balanced.generation.Generate(generate_request(max_tokens=2))
                assert len(answer.outputs[0].token_ids) == 2
            await status_of(stalled, Code.ABORTED)


async def test_calls_that_a_stopping_server_refuses_are_retried_on_another(tmp_path: Path) -> None:
    async with two(tmp_path) as balanced:
        one, other = balanced.servers
        # Its health says nothing of it yet, as in the second before Envoy asks again.
        one.app.models.drain()
        for _ in range(20):
            answer = await balanced.generation.Generate(generate_request(max_tokens=3))
            assert list(answer.outputs[0].token_ids) == expected_tokens((1, *spell("ab")), 3)
            assert kinds(await read(balanced.generation.GenerateStream(stream_request(max_tokens=3))))[-1] == "summary"
        assert one.ended()["not_serving"] > 0, "it was asked"
        assert await other.until_ended(40) == {"length": 40}
        assert target_of(one) in await asyncio.to_thread(balanced.envoy.healthy)


async def test_a_server_that_stops_loses_no_call(tmp_path: Path) -> None:
    gate = Gate()
    leaving = running(runner=FakeRunner(SLOTS, before_run=gate))
    one = await leaving.__aenter__()
    async with running() as other, behind(tmp_path, one, other) as balanced:
        with gate.closed():
            # Which keeps it from being gone at once.
            held = await read_accepted(one.stream(max_tokens=2))
            stopping = asyncio.create_task(leaving.__aexit__(None, None, None))
            await eventually(lambda: one.app.models.state(MODEL) is ModelState.DRAINING)
            # Before Envoy has asked after its health, and after.
            answers = [await balanced.generation.Generate(generate_request(max_tokens=3)) for _ in range(40)]
            await asyncio.to_thread(balanced.envoy.wait_healthy, [target_of(other)])
            refused = one.ended().get("not_serving", 0)
            answers += [await balanced.generation.Generate(generate_request(max_tokens=3)) for _ in range(10)]
            assert one.ended().get("not_serving", 0) == refused, "it is not asked any more"
        assert kinds(await read(held))[-1] == "summary"
        await stopping
        answers += [await balanced.generation.Generate(generate_request(max_tokens=3)) for _ in range(10)]
    assert {tuple(answer.outputs[0].token_ids) for answer in answers} == {tuple(expected_tokens((1, *spell("ab")), 3))}


async def test_without_any_server_calls_are_unavailable_at_once_as_without_envoy(tmp_path: Path) -> None:
    async with running(verify=False) as server, behind(tmp_path, server, are_serving=False) as balanced:
        direct = await status_of(server.generation.Generate(generate_request()))
        for call in (
            balanced.generation.Generate(generate_request()),
            balanced.generation.GenerateStream(stream_request()),
        ):
            assert (await status_of(call)).code() is direct.code() is Code.UNAVAILABLE
        await server.app.verify_all()
        await asyncio.to_thread(balanced.envoy.wait_healthy, [target_of(server)])
        await balanced.generation.Generate(generate_request(max_tokens=1))


async def test_a_key_goes_to_one_server_and_keys_go_to_all(tmp_path: Path) -> None:
    leaving = running()
    one = await leaving.__aenter__()
    is_left = False
    try:
        async with running() as other, behind(tmp_path, one, other) as balanced:

            async def ask(key: str) -> int:
                """Which server answers."""
                before = [each.total() for each in balanced.ended]
                await balanced.generation.Generate(generate_request(max_tokens=1), metadata=[(ROUTING_KEY, key)])
                await eventually(lambda: sum(each.total() for each in balanced.ended) > sum(before))
                (index,) = [i for i, each in enumerate(balanced.ended) if each.total() > before[i]]
                return index

            homes = {f"key-{number}": await ask(f"key-{number}") for number in range(30)}
            assert 5 <= sum(homes.values()) <= 25
            for _ in range(2):
                assert {key: await ask(key) for key in homes} == homes
            await leaving.__aexit__(None, None, None)
            is_left = True
            # Whether Envoy knows by now or not.
            for key in homes:
                assert await ask(key) == 1
    finally:
        if not is_left:
            await leaving.__aexit__(None, None, None)


FAMILIES, REQUESTS = 12, 50


@pytest.mark.whole
async def test_requests_with_a_routing_key_have_more_cache_hits(tmp_path: Path) -> None:
    model = {"served": [served_model(context=256)]}

    async def cached_share(channel: grpc.aio.Channel, first: str, *, has_key: bool) -> float:
        """Of all tokens of 50 prompts, of which every twelfth begins alike, those that were not computed again."""
        cached = whole = 0
        for number in range(REQUESTS):
            family = chr(ord("a") + number % FAMILIES)
            # Three chunks of eight tokens are shared, `<bos>` among them.
            text = first + family * 22 + "z" * (number // FAMILIES + 1)
            metadata = [(ROUTING_KEY, routing_key(text, 23))] if has_key else []
            request = generate_request(text, max_tokens=1)
            usage = (await GenerationServiceStub(channel).Generate(request, metadata=metadata)).usage
            cached, whole = cached + usage.cached_tokens, whole + usage.prompt_tokens
        return cached / whole

    async with running(**model) as alone:
        single = await cached_share(alone.channel, "x", has_key=False)
    async with running(**model) as one, running(**model) as other, behind(tmp_path, one, other) as balanced:
        with_key = await cached_share(balanced.channel, "x", has_key=True)
        # Other prompts, or these would find what those left.
        without = await cached_share(balanced.channel, "y", has_key=False)
    assert single > 0.5
    assert with_key >= 0.8 * single
    assert without < 0.85 * single
    assert without < with_key
