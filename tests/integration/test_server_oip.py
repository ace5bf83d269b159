"""The Open Inference Protocol: an unmodified client of it, and what it says when something is wrong."""

from __future__ import annotations

import asyncio
import json
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest

from benchmarks.infra.envoy import balancing
from onward.inference import open_inference_pb2 as oip
from onward.inference.open_inference_pb2_grpc import GRPCInferenceServiceStub
from onward.v1.generation_pb2_grpc import GenerationServiceStub
from service.config import RequestLimits
from service.errors import InvalidRequest
from service.transport.oip import _InFlight
from service.transport.oip_codec import decode_infer
from tests.fakes import FakeRunner, Gate
from tests.faults.http2 import varint
from tests.faults.process import DECODER, MODELS, ServerProcess, greedy, serving
from tests.identities import key_table
from tests.servers import SLOTS, Running, eventually, generate_request, infer_request, running, status_of

CLIENT = Path(__file__).with_name("triton_client.py")
INVALID, NOT_FOUND = "StatusCode.INVALID_ARGUMENT", "StatusCode.NOT_FOUND"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with serving(tmp_path_factory.mktemp("models")) as server:
        yield server
        assert server.stop() == 0


@pytest.fixture(scope="module", params=["direct", pytest.param("envoy", marks=pytest.mark.whole)])
def target(
    request: pytest.FixtureRequest, server: ServerProcess, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """Where the client is sent: to the server, or to an Envoy before it and another one."""
    if request.param == "direct":
        yield server.target
        return
    with (
        serving(tmp_path_factory.mktemp("models")) as other,
        balancing([server.target, other.target], tmp_path_factory.mktemp("envoy")) as envoy,
    ):
        yield envoy.target
        assert other.stop() == 0


@pytest.fixture(scope="module")
def seen(target: str) -> dict[str, Any]:
    """What the client saw."""
    done = subprocess.run(
        [sys.executable, CLIENT, target, DECODER], capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.strip().rpartition("\n")[2])
    return found


@pytest.fixture(scope="module")
def expected(server: ServerProcess, seen: dict[str, Any]) -> str:
    """The answer over our own wire; after the client, which must not depend on it."""
    with server.channel() as channel:
        return GenerationServiceStub(channel).Generate(greedy(DECODER, max_tokens=12)).outputs[0].text


def test_tritonclient_lists_and_reads_metadata(seen: dict[str, Any]) -> None:
    assert [seen[each] for each in ("live", "ready", "model_ready", "unknown_ready")] == [True, True, True, False]
    assert seen["server"][0] == "onward"
    assert seen["inputs"] == [["text_input", "BYTES", [1]]]
    assert seen["outputs"] == [["text_output", "BYTES", [-1]]]
    assert seen["index"] == [[model, "READY"] for model in sorted(MODELS)]


def test_tritonclient_gets_the_same_answer_as_our_own_protocol(seen: dict[str, Any], expected: str) -> None:
    assert seen["text"] == [expected]
    assert seen["id"] == "one"
    assert seen["usage"]["generated_tokens"] == 12
    assert seen["usage"]["finish_reason"] == "length"
    assert len(seen["several"]) == 3


@pytest.mark.parametrize("name", ["plain", "empty"])
def test_tritonclient_streams_pieces_and_a_marked_end(seen: dict[str, Any], expected: str, name: str) -> None:
    answer = seen["stream"][name]
    assert "".join(answer["pieces"]) == expected
    assert len(answer["finals"]) > 1
    assert answer["finals"] == [False] * (len(answer["finals"]) - 1) + [True]
    assert answer["outputs_of_last"] == (0 if name == "empty" else 1)
    assert answer["finish_reason"] == "length"
    assert answer["errors"] == []


def test_an_error_in_a_stream_is_tritonclients_and_other_requests_continue(seen: dict[str, Any]) -> None:
    (words,) = seen["stream"]["bad"]["errors"]
    assert "INVALID_ARGUMENT" in words
    assert "parameters.top_p" in words


@pytest.mark.parametrize(
    ("case", "code", "words"),
    [
        ("unknown model", NOT_FOUND, "'unknown' is not served"),
        ("unknown version", INVALID, "model_version: the only version is 1, got '2'"),
        ("wrong dtype", INVALID, "text_input.datatype: must be BYTES, got 'FP32'"),
        ("wrong shape", INVALID, "text_input.shape: must be [1]: one text a request, got [2]"),
        ("missing input", INVALID, "inputs: must have text_input once, got ['text']"),
        ("unknown output", INVALID, "outputs: the only output is text_output, got 'logits'"),
        ("unknown parameter", INVALID, "parameters.warmth: is none of "),
        ("parameter beyond its limit", INVALID, "parameters.top_p: must be "),
        ("parameter of another type", INVALID, "parameters.max_tokens: must be an integer, got 'many'"),
        ("no such method", "StatusCode.UNIMPLEMENTED", ""),
    ],
)
def test_tritonclient_gets_the_reason_of_a_refusal(seen: dict[str, Any], case: str, code: str, words: str) -> None:
    found_code, found_words = seen["refusals"][case]
    assert found_code == code
    assert words in found_words


def test_tritonclient_unloads_and_loads_a_server_s_models_and_not_those_of_several(
    seen: dict[str, Any], target: str, server: ServerProcess
) -> None:
    if target == server.target:
        assert (seen["unload"], seen["load"]) == (False, True)
    else:
        assert [seen[name][0] for name in ("unload", "load")] == ["StatusCode.PERMISSION_DENIED"] * 2
    assert seen["text_again"] == seen["text"]


def raw(*chunks: bytes) -> oip.ModelInferRequest:
    request = infer_request()
    request.inputs[0].ClearField("contents")
    request.raw_input_contents.extend(chunks)
    return request


def twice(request: oip.ModelInferRequest) -> oip.ModelInferRequest:
    request.inputs.append(request.inputs[0])
    return request


def stub_of(server: Running) -> Any:
    return GRPCInferenceServiceStub(server.channel)


def packed(size: int, data: bytes) -> oip.ModelInferRequest:
    """A request with one text behind its length, which may be wrong."""
    return raw(struct.pack("<I", size) + data)


ONE_TEXT = "raw_input_contents: must be one text behind its length"
BAD_REQUESTS = [
    (raw(), "text_input.contents: "),
    (raw(b"ab"), ONE_TEXT),
    (packed(9, b"ab"), ONE_TEXT),
    (packed(1, b"ab"), ONE_TEXT),
    (raw(struct.pack("<I", 1) + b"a", b""), "raw_input_contents: must have one entry for each input"),
    (packed(2, b"\xff\xfe"), "text_input: must be UTF-8"),
    (packed(0, b""), "text_input: must not be empty"),
    (twice(infer_request()), "inputs: must have text_input once"),
    (infer_request(max_tokens=2**40), "parameters.max_tokens: is out of its type's range"),
    (infer_request(stop="[1, 2]"), "parameters.stop: must be a JSON list of its type's entries"),
    (infer_request(logit_bias="[]"), "parameters.logit_bias: must be a JSON object"),
    (
        infer_request(logit_bias='{"1": 1' + "0" * 400 + "}"),
        "parameters.logit_bias: must be a JSON object of its type's",
    ),
    (infer_request(stop_token_ids="7"), "parameters.stop_token_ids: must be a JSON list"),
    (infer_request(ignore_eos="yes"), "parameters.ignore_eos: must be a truth value"),
    (infer_request(timeout="soon"), "parameters.timeout: must be a number of microseconds"),
    (infer_request(stop_token_ids=f"[{'3,' * 1_900_000}3]"), "parameters.stop_token_ids: must have at most 32768 as"),
    (infer_request(allowed_token_ids=f"[{'3,' * 16_384}3]"), "parameters.allowed_token_ids: must have at most 32768"),
    (
        infer_request(stop_token_ids=f"[{'3,' * 64}3]"),
        "parameters.stop_token_ids: must have at most 64 entries, got 65",
    ),
    (infer_request(**{"x" * 3_000_000: "y" * 1_000_000}), f"parameters.{'x' * 100}"),
    (infer_request(request_id="x" * 129), "id: must have at most 128 characters, got 'xxx"),
    (infer_request(beam_size=3), "parameters.temperature: must not be set with beam_search"),
]


async def test_a_bad_request_is_refused_by_its_tensor_or_parameter() -> None:
    async with running() as server:
        for number, (request, words) in enumerate(BAD_REQUESTS, 1):
            error = await status_of(stub_of(server).ModelInfer(request), grpc.StatusCode.INVALID_ARGUMENT)
            assert words in str(error.details())
            assert sum(server.ended().values()) == number


@pytest.mark.parametrize("name", ["stop", "stop_token_ids", "logit_bias", "allowed_token_ids"])
def test_no_parameter_in_json_is_read_that_has_more_bytes_than_entries_can_take(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    read: list[int] = []
    monkeypatch.setattr("service.transport.oip_codec.json.loads", lambda text: read.append(len(text)))
    for size in (10, 1000, 30_000, 100_000, 4_000_000):
        with suppress(InvalidRequest):
            decode_infer(infer_request(**{name: "1" * size}), RequestLimits())
    # Sixteen stop texts of 256 characters, each of them spelled as two escapes, are the longest.
    assert max(read) <= 16 * 256 * 12


async def test_a_stream_sends_tokens_as_they_are_generated() -> None:
    steps = threading.Semaphore(1)
    runner = FakeRunner(SLOTS, before_run=lambda _: steps.acquire())
    async with running(runner=runner, verify=False, trust=True) as server:
        call = stub_of(server).ModelStreamInfer()
        await call.write(infer_request(request_id="a", max_tokens=6, ignore_eos=True))
        await call.done_writing()
        answers = []
        while (response := await call.read()) is not grpc.aio.EOF:
            answers.append(response.infer_response)
            texts = [answer.raw_output_contents[0][4:].decode() for answer in answers]
            if "".join(texts):
                # The next steps run only when the first token has come.
                steps.release(100)
        own = await server.generation.Generate(generate_request("ab", max_tokens=6, ignore_eos=True))
    assert "".join(texts) == own.outputs[0].text
    assert len([text for text in texts if text]) > 1
    assert {answer.id for answer in answers} == {"a"}


async def test_a_time_limit_in_microseconds_is_a_deadline() -> None:
    gate = Gate()
    async with running(runner=FakeRunner(SLOTS, before_run=gate)) as server:
        with gate.closed():
            call = stub_of(server).ModelInfer(infer_request(timeout=50_000))
            # On a busy machine it is over before its first step.
            await eventually(lambda: gate.entered.is_set() or call.done())
            await asyncio.sleep(0.1)
        await status_of(call, grpc.StatusCode.DEADLINE_EXCEEDED)
        await server.until_ended(1)


async def test_leaving_a_stream_cancels_all_its_requests() -> None:
    gate = Gate()
    async with running(runner=FakeRunner(SLOTS, before_run=gate)) as server:
        call = stub_of(server).ModelStreamInfer()
        with gate.closed():
            for number in range(SLOTS + 2):
                await call.write(infer_request(request_id=str(number), max_tokens=50, ignore_eos=True))
            await gate.until_entered()
            await eventually(lambda: server.app._engine.num_streams == SLOTS + 2)  # what holds a place
            call.cancel()
            await server.until_handled("ModelStreamInfer", "CANCELLED")
        assert await server.until_ended(SLOTS + 2) == {"cancelled": SLOTS + 2}


async def test_more_requests_than_a_stream_may_have_in_flight_wait_and_are_answered() -> None:
    async with running(max_queue_size=1000) as server:
        call = stub_of(server).ModelStreamInfer()

        async def ask() -> None:
            for number in range(150):
                await call.write(infer_request(request_id=str(number), max_tokens=2, ignore_eos=True))
            await call.done_writing()

        asking = asyncio.create_task(ask())
        finals = [
            response.infer_response.id
            async for response in call
            if response.infer_response.parameters["triton_final_response"].bool_param
        ]
        await asking
        assert sorted(finals, key=int) == [str(number) for number in range(150)]
        assert server.ended() == {"length": 150}


async def test_requests_of_a_stream_are_read_while_those_unanswered_hold_less_than_a_message_may(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate, servers, num_running, waiting = Gate(), list[Running](), list[int](), list[_InFlight]()
    wait_for_room = _InFlight.wait_for_room

    async def noted(in_flight: _InFlight) -> None:
        # An unneeded wait ends before another task runs.
        waiting.append(in_flight)
        await wait_for_room(in_flight)
        waiting.pop()

    def before_run(batch: Any) -> None:
        gate(batch)
        num_running.extend(each.app._engine.num_streams for each in servers)

    monkeypatch.setattr(_InFlight, "wait_for_room", noted)
    async with running(runner=FakeRunner(SLOTS, before_run=before_run), max_queue_size=16) as server:
        request = infer_request(max_tokens=2, ignore_eos=True)
        servers.append(server)
        # A field that the protocol does not have.
        data = request.SerializeToString() + varint(1000 << 3 | 2) + varint(3 << 20) + bytes(3 << 20)
        call = server.channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")()

        async def ask() -> None:
            for _ in range(8):
                await call.write(data)
            await call.done_writing()

        with gate.closed():
            asking = asyncio.create_task(ask())
            await eventually(lambda: bool(waiting) or asking.done())
            assert waiting
            await eventually(lambda: server.app._engine.num_streams == 2)
        num_answers = len([answer async for answer in call])
        await asking
    assert num_answers >= 8
    assert server.ended() == {"length": 8}
    assert max(num_running) == 2


async def test_names_that_an_error_s_answer_carries_are_cut() -> None:
    async with running() as server:
        call = stub_of(server).ModelStreamInfer()
        request = infer_request(request_id="x" * 1000)
        request.model_name = "y" * 1000
        await call.write(request)
        answer = await call.read()
        assert answer.error_message.startswith("[INVALID_ARGUMENT] id: must have at most 128 characters")
        assert (answer.infer_response.model_name, answer.infer_response.id) == ("y" * 128, "x" * 128)
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF


async def test_requests_of_a_stream_count_against_their_key(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    limits = "requests_per_second = 0.001\nburst = 3\nmax_concurrent_requests = 2"
    keys.write_text(key_table("alice", "a key", rest=limits))
    gate = Gate()
    async with running(api_keys=keys, runner=FakeRunner(SLOTS, before_run=gate)) as server:
        call = stub_of(server).ModelStreamInfer(metadata=(("authorization", "Bearer a key"),))
        with gate.closed():
            for number in range(3):
                await call.write(infer_request(request_id=str(number), max_tokens=1))
            refused = await call.read()
            assert refused.infer_response.id == "2"
            assert refused.error_message.startswith("[RESOURCE_EXHAUSTED] 2 requests of this API key run already")
        finals: list[str] = []
        while len(finals) < 2:
            answer = (await call.read()).infer_response
            finals += [answer.id] if answer.parameters["triton_final_response"].bool_param else []
        assert sorted(finals) == ["0", "1"]
        # The third that the key is good for, and one more.
        for number in (3, 4):
            await call.write(infer_request(request_id=str(number), max_tokens=1))
            answers = [await call.read()]
            while not answers[-1].infer_response.parameters["triton_final_response"].bool_param:
                answers.append(await call.read())
            assert answers[-1].error_message.startswith("[RESOURCE_EXHAUSTED]") is (number == 4)
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
        assert server.ended() == {"length": 3}


async def test_garbage_in_a_stream_ends_it_as_such_after_the_requests_before_it() -> None:
    async with running() as server:
        call = server.channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")()
        await call.write(infer_request(max_tokens=3, ignore_eos=True).SerializeToString())
        await call.write(b"\xff\xff")
        is_over = False
        while not is_over:
            answer = oip.ModelStreamInferResponse.FromString(await call.read()).infer_response
            is_over = answer.parameters["triton_final_response"].bool_param
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert server.ended() == {"length": 1}
