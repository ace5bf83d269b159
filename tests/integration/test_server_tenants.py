"""API keys share a server: what one asks for leaves another its share, its ids and its places."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import grpc
from google.rpc import error_details_pb2

from onward.inference.open_inference_pb2_grpc import GRPCInferenceServiceStub
from onward.v1 import generation_pb2 as pb
from tests.fakes import FakeRunner, Gate
from tests.identities import by, keys_file
from tests.servers import (
    CONFIG,
    SLOTS,
    Running,
    generate_request,
    infer_request,
    read,
    read_accepted,
    rich_details,
    running,
    status_of,
    stream_request,
    tokens_of,
)

PLACES = SLOTS + CONFIG.max_queue_size
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED


async def hold(server: Running, name: str, **fields: Any) -> Any:
    """A stream of a key's that is let in."""
    asked = stream_request("ab", ignore_eos=True, **{"max_tokens": 40, **fields})
    return await read_accepted(server.generation.GenerateStream(asked, **by(name)))


async def test_a_priority_above_the_keys_is_refused_by_name_and_one_below_is_not(tmp_path: Path) -> None:
    async with running(api_keys=keys_file(tmp_path, a="", b="max_priority = 5", c="max_priority = -5")) as server:
        for name, most in {"a": 0, "b": 5, "c": -5}.items():
            for priority in (most, -(2**31)):
                asked = generate_request("ab", max_tokens=1, priority=priority)
                assert (await server.generation.Generate(asked, **by(name))).outputs
            asked = generate_request("ab", max_tokens=1, priority=most + 1)
            estimate = pb.EstimateRequest(request=asked)
            for ask, what in ((server.generation.Generate, asked), (server.generation.Estimate, estimate)):
                error = await status_of(ask(what, **by(name)), grpc.StatusCode.INVALID_ARGUMENT)
                assert error.details() == f"priority: must be at most {most} with this API key, got {most + 1}"
    async with running() as server:
        assert (await server.generation.Generate(generate_request("ab", max_tokens=1, priority=2**31 - 1))).outputs


async def test_a_key_below_priority_0_is_served_at_its_own_where_a_request_asks_for_none(tmp_path: Path) -> None:
    async with running(api_keys=keys_file(tmp_path, a="max_priority = -1")) as server:
        asked = generate_request("ab", max_tokens=1)
        assert (await server.generation.Generate(asked, **by("a"))).outputs
        assert (await server.generation.Score(pb.ScoreRequest(text="abc"), **by("a"))).tokens
        assert (await server.generation.Estimate(pb.EstimateRequest(request=asked), **by("a"))).HasField("cost")


async def test_sequences_in_flight_are_bounded_whatever_method_brings_them(tmp_path: Path) -> None:
    gate = Gate()
    path = keys_file(tmp_path, a="max_sequences = 3", b="")
    async with running(api_keys=path, runner=FakeRunner(SLOTS, before_run=gate)) as server:
        with gate.closed():
            held = await hold(server, "a", sampling=pb.SamplingParams(n=2))
            search = pb.BeamSearchParams(beam_size=2)
            infer = infer_request(n=2)
            stub = GRPCInferenceServiceStub(server.channel)
            for call in (
                server.generation.Generate(generate_request("ab", sampling=pb.SamplingParams(n=2)), **by("a")),
                server.generation.Generate(pb.GenerateRequest(text="ab", beam_search=search), **by("a")),
                stub.ModelInfer(infer, **by("a")),
            ):
                error = await status_of(call, EXHAUSTED)
                assert error.details() == (
                    "with this request 4 sequences of this API key would be in flight, the limit is 3; retry later"
                )
                assert rich_details(error)[0].Unpack(error_details_pb2.RetryInfo())
            (streamed,) = [each async for each in stub.ModelStreamInfer(iter([infer]), **by("a"))]
            assert streamed.error_message.startswith("[RESOURCE_EXHAUSTED] with this request 4 sequences")
            await hold(server, "b", sampling=pb.SamplingParams(n=4))
            # There is room for one more sequence, and no second one.
            scores = [server.generation.Score(pb.ScoreRequest(text="abc"), **by("a")) for _ in range(2)]
            done, _ = await asyncio.wait(map(asyncio.ensure_future, scores), return_when=asyncio.FIRST_COMPLETED)
            (refused,) = done
            assert isinstance(refused.exception(), grpc.aio.AioRpcError)
            held.cancel()
        await server.until_idle()
        asked = generate_request("ab", max_tokens=1, sampling=pb.SamplingParams(n=3))
        assert len((await server.generation.Generate(asked, **by("a"))).outputs) == 3, "all was given back"


async def test_tokens_in_flight_are_bounded_and_come_back(tmp_path: Path) -> None:
    gate = Gate()
    path = keys_file(tmp_path, a="max_tokens_in_flight = 100")
    async with running(api_keys=path, runner=FakeRunner(SLOTS, before_run=gate)) as server:
        with gate.closed():
            held = await hold(server, "a", max_tokens=40, sampling=pb.SamplingParams(n=2))
            asked = generate_request("ab", max_tokens=12)
            error = await status_of(server.generation.Generate(asked, **by("a")), EXHAUSTED)
            words = "with this request 101 tokens of this API key would be in flight, the limit is 100"
            assert words in error.details()
            await hold(server, "a", max_tokens=11)
            held.cancel()
        await server.until_idle()
        assert (await server.generation.Generate(generate_request("ab", max_tokens=40), **by("a"))).outputs


async def test_one_key_that_fills_the_queue_leaves_another_its_share_of_places(tmp_path: Path) -> None:
    gate = Gate()
    path = keys_file(tmp_path, a="", b="")
    async with running(api_keys=path, runner=FakeRunner(SLOTS, before_run=gate)) as server:
        with gate.closed():
            for _ in range(PLACES):
                await hold(server, "a")
            refused = [await status_of(hold(server, "a"))]
            for _ in range(PLACES // 2):
                await hold(server, "b")
            refused += [await status_of(hold(server, name)) for name in "ab"]
            assert {error.code() for error in refused} == {EXHAUSTED}
            assert server.num_streams == PLACES + PLACES // 2


async def test_a_new_key_begins_while_another_holds_every_row(tmp_path: Path) -> None:
    path = keys_file(tmp_path, a="", b="")
    steps, is_held = threading.Semaphore(0), threading.Event()

    def step(_: object) -> None:
        if is_held.is_set():
            assert steps.acquire(timeout=60)

    async with running(api_keys=path, runner=FakeRunner(SLOTS, before_run=step)) as server:
        is_held.set()
        try:
            streams = [await hold(server, "a", sampling=pb.SamplingParams(n=SLOTS)) for _ in range(4)]
            another = await hold(server, "b", max_tokens=3)
            # All five are with the engine, which may now do fewer steps than an answer of the first key has tokens.
            steps.release(39)
            assert len(tokens_of(await read(another))) == 3
            assert server.ended() == {"length": 1}, "an answer of another key ended before"
        finally:
            is_held.clear()
            steps.release()
        alone = [await read(stream) for stream in streams]
        assert all(len(tokens_of(events)) for events in alone)


async def test_a_call_beyond_its_callers_share_costs_nothing_of_its_rate(tmp_path: Path) -> None:
    gate = Gate()
    path = keys_file(tmp_path, a="requests_per_second = 0.001\nburst = 4")
    async with running(api_keys=path, max_concurrent_rpcs=5, runner=FakeRunner(SLOTS, before_run=gate)) as server:
        with gate.closed():
            held = [await hold(server, "a", max_tokens=3) for _ in range(3)]
            error = await status_of(server.generation.Generate(generate_request("ab"), **by("a")))
            assert "share of 5" in str(error.details())
        for stream in held:
            await read(stream)
        await server.until_idle()
        assert (await server.generation.Generate(generate_request("ab", max_tokens=1), **by("a"))).outputs
        error = await status_of(server.generation.Generate(generate_request("ab"), **by("a")))
        assert "requests a second" in str(error.details())


async def test_two_keys_use_one_request_id_at_once_and_neither_fails(tmp_path: Path) -> None:
    gate = Gate()
    path = keys_file(tmp_path, a="", b="")
    async with running(api_keys=path, runner=FakeRunner(SLOTS, before_run=gate)) as server:
        with gate.closed():
            streams = [await hold(server, name, request_id="same", max_tokens=3) for name in "ab"]
            asked = generate_request("ab", max_tokens=3)
            asked.request_id = "same"
            for name in "ab":
                error = await status_of(server.generation.Generate(asked, **by(name)))
                assert error.details() == "request_id: must not be in use by another request, got 'same'"
            streams[0].cancel()
            await server.until_handled("GenerateStream", "CANCELLED")
        events = await read(streams[1])
        assert len(tokens_of(events)) == 3, "the abort of the one does not end the other"
        answer = await server.generation.Generate(asked, **by("a"))
        assert answer.request_id == "same"
        assert await server.until_ended(3) == {"cancelled": 1, "length": 2, "invalid_request": 2}
