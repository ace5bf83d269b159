"""The benchmark drives Open Inference Protocol servers with text models, whatever optional parts they implement."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import pytest

from loadtest import bench
from loadtest.bench import BenchSettings
from loadtest.core.clients import WireProtocol
from loadtest.core.figures import Run, summarize
from loadtest.core.records import IN_STREAM, INCOMPLETE, Outcome
from onward.inference import open_inference_pb2 as oip
from onward.inference import open_inference_pb2_grpc
from tests.fakes import FakeRunner, Gate
from tests.load.test_bench import options
from tests.servers import MODEL as OURS
from tests.servers import SLOTS, eventually, running

MODEL = "writer"


class Server(open_inference_pb2_grpc.GRPCInferenceServiceServicer):
    """Streams one word after the other.

    Args:
        marks_end: says of each message whether it is the last, and sends an empty last one.
        raw: lays text out as raw bytes.
        inputs: what the model declares.
        misbehaves: "error" in a message, "status" instead of an answer, "break" before the end, "refuse" at once, or
            "hang" where the answer is a whole one.
    """

    def __init__(self, *, marks_end: bool, raw: bool, inputs: dict[str, str], misbehaves: str = "") -> None:
        self._marks_end = marks_end
        self._raw = raw
        self._inputs = inputs
        self._misbehaves = misbehaves
        self.requests: list[oip.ModelInferRequest] = []
        self.metadata: list[dict[str, str]] = []

    async def ModelMetadata(  # noqa: N802 (the protocol's name)
        self, request: oip.ModelMetadataRequest, context: Any
    ) -> oip.ModelMetadataResponse:
        if request.name != MODEL:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no model {request.name}")
        tensor = oip.ModelMetadataResponse.TensorMetadata
        return oip.ModelMetadataResponse(
            name=MODEL,
            inputs=[tensor(name=name, datatype=datatype, shape=[-1]) for name, datatype in self._inputs.items()],
            outputs=[tensor(name="text_output", datatype="BYTES", shape=[-1])],
        )

    async def ModelStreamInfer(  # noqa: N802
        self, request_iterator: AsyncIterator[oip.ModelInferRequest], context: Any
    ) -> AsyncIterator[oip.ModelStreamInferResponse]:
        self.metadata.append(dict(context.invocation_metadata()))
        async for request in request_iterator:
            self.requests.append(request)
            if self._misbehaves == "refuse":
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
            count = wanted(request)
            for number in range(count):
                await asyncio.sleep(0.005)
                if number == 1 and self._misbehaves == "error":
                    yield oip.ModelStreamInferResponse(error_message="it broke")
                if number == 1 and self._misbehaves == "status":
                    await context.abort(grpc.StatusCode.INTERNAL, "it broke")
                yield self._message(request, b"word ", is_last=False)
            if self._marks_end and self._misbehaves != "break":
                yield self._message(request, b"", is_last=True)

    async def ModelInfer(  # noqa: N802
        self, request: oip.ModelInferRequest, context: Any
    ) -> oip.ModelInferResponse:
        self.requests.append(request)
        if self._misbehaves == "status":
            await context.abort(grpc.StatusCode.INTERNAL, "it broke")
        await asyncio.sleep(60.0 if self._misbehaves == "hang" else 0.005)
        return self._message(request, b"word " * wanted(request), is_last=True).infer_response

    def _message(self, request: oip.ModelInferRequest, text: bytes, *, is_last: bool) -> oip.ModelStreamInferResponse:
        response = oip.ModelInferResponse(model_name=MODEL, id=request.id)
        if self._marks_end:
            response.parameters["triton_final_response"].bool_param = is_last
        if text:
            output = response.outputs.add(name="text_output", datatype="BYTES", shape=[1])
            if self._raw:
                response.raw_output_contents.append(len(text).to_bytes(4, "little") + text)
            else:
                output.contents.bytes_contents.append(text)
        return oip.ModelStreamInferResponse(infer_response=response)


def wanted(request: oip.ModelInferRequest) -> int:
    """The limit, wherever such a server looks for it."""
    tensors = {tensor.name: tensor.contents for tensor in request.inputs}
    if "sampling_parameters" in tensors:
        return int(json.loads(tensors["sampling_parameters"].bytes_contents[0])["max_tokens"])
    if "max_tokens" in tensors:
        return tensors["max_tokens"].int_contents[0]
    return request.parameters["max_tokens"].int64_param


@asynccontextmanager
async def serving(server: Server) -> AsyncIterator[str]:
    listener = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    open_inference_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(server, listener)
    port = listener.add_insecure_port("127.0.0.1:0")
    await listener.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await listener.stop(None)


async def measured(server: Server, *words: str, warmups: int = 0, is_streamed: bool = True) -> Run:
    async with serving(server) as target:
        load = options("--model", MODEL, "--num-prompts", "8", "--max-tokens", "4", "--prompt-tokens", "5", *words)
        settings = BenchSettings(
            target=target,
            protocol=WireProtocol.OIP,
            load=load,
            max_concurrency=3,
            warmups=warmups,
            connections=2,
            is_streamed=is_streamed,
        )
        return (await bench.measure(settings)).run


@pytest.mark.parametrize(
    ("marks_end", "raw", "inputs"),
    [
        (True, True, {"text_input": "BYTES"}),
        (False, False, {"text_input": "BYTES"}),
        (True, False, {"text_input": "BYTES", "max_tokens": "INT32", "stream": "BOOL"}),
        (
            False,
            True,
            {
                "text_input": "BYTES",
                "stream": "BOOL",
                "sampling_parameters": "BYTES",
                "exclude_input_in_output": "BOOL",
            },
        ),
    ],
)
async def test_servers_with_and_without_optional_parts_are_measured(
    *, marks_end: bool, raw: bool, inputs: dict[str, str]
) -> None:
    server = Server(marks_end=marks_end, raw=raw, inputs=inputs)
    run = await measured(server, warmups=1)
    report = summarize(run)
    assert (report["offered"], report["finished"], report["total_output_tokens"]) == (8, 8, 32)
    assert all(len(record.arrivals) == 4 for record in run.records)
    assert report["mean_itl_ms"] > 0.0
    # Only the server can count the tokens of the words.
    assert report["total_input_tokens"] is None
    assert len(server.requests) == 9
    assert len({request.id for request in server.requests}) == 9
    texts = [bytes(request.inputs[0].contents.bytes_contents[0]) for request in server.requests]
    assert [len(text.split()) for text in texts] == [5] * 9
    assert len(set(texts)) == 9
    assert all(each["triton_grpc_error"] == "true" for each in server.metadata)


@pytest.mark.parametrize(
    ("misbehaves", "outcome", "code"),
    [
        ("error", Outcome.FAILED, IN_STREAM),
        ("status", Outcome.FAILED, "INTERNAL"),
        ("break", Outcome.FAILED, INCOMPLETE),
        ("refuse", Outcome.REFUSED, "RESOURCE_EXHAUSTED"),
    ],
)
async def test_every_kind_of_failure_is_counted(misbehaves: str, outcome: Outcome, code: str) -> None:
    run = await measured(Server(marks_end=True, raw=True, inputs={"text_input": "BYTES"}, misbehaves=misbehaves))
    assert [(record.outcome, record.code) for record in run.records] == [(outcome, code)] * 8
    assert run.offered == 8
    report = summarize(run)
    assert report["error_details"] == (
        {} if misbehaves == "break" else {code: "full" if code[0] == "R" else "it broke"}
    )


async def test_our_own_server_is_measured_over_the_protocol() -> None:
    gate = Gate()
    async with running(runner=FakeRunner(SLOTS, before_run=gate), max_queue_size=1) as server:
        target = f"{server.endpoint.host}:{server.endpoint.port}"
        load = options("--model", OURS, "--num-prompts", "8", "--max-tokens", "6", "--prompt-tokens", "2")
        settings = BenchSettings(target=target, protocol=WireProtocol.OIP, load=load, max_concurrency=3)
        run = (await bench.measure(settings)).run
        report = summarize(run)
        assert (report["finished"], report["total_output_tokens"]) == (8, 48)
        # The server reports its token counts.
        assert report["total_input_tokens"] > 8 * 2
        assert server.ended()["length"] == 9
        # All at once, some run, one waits, and the rest is refused.
        with gate.closed():
            crowding = asyncio.create_task(bench.measure(replace(settings, max_concurrency=None, warmups=0)))
            await eventually(lambda: server.ended().get("overloaded") == 8 - SLOTS - 1)
        crowd = (await crowding).run
        ends = [record.outcome for record in crowd.records]
        assert (ends.count(Outcome.FINISHED), ends.count(Outcome.REFUSED)) == (SLOTS + 1, 8 - SLOTS - 1)
        assert {record.code for record in crowd.records} == {"OK", "RESOURCE_EXHAUSTED"}
        assert len(ends) == crowd.offered == 8


async def test_a_server_without_streaming_is_driven_by_unary_calls() -> None:
    server = Server(marks_end=False, raw=True, inputs={"text_input": "BYTES", "stream": "BOOL"})
    run = await measured(server, warmups=1, is_streamed=False)
    report = summarize(run)
    assert (report["offered"], report["finished"], len(server.requests)) == (8, 8, 9)
    # An answer is one message: only the server can count its tokens.
    assert report["total_output_tokens"] == 8
    assert all(len(record.arrivals) == 1 for record in run.records)
    assert report["mean_itl_ms"] is None
    assert server.metadata == []
    broken = await measured(
        Server(marks_end=False, raw=True, inputs=server._inputs, misbehaves="status"), is_streamed=False
    )
    assert [(record.outcome, record.code) for record in broken.records] == [(Outcome.FAILED, "INTERNAL")] * 8
    hanging = Server(marks_end=False, raw=True, inputs=server._inputs, misbehaves="hang")
    given_up = await measured(hanging, "--cancel-share", "1", "--cancel-after", "0.02", is_streamed=False)
    assert [record.outcome for record in given_up.records] == [Outcome.CANCELLED] * 8


@pytest.mark.parametrize("protocol", list(WireProtocol))
async def test_our_own_server_answers_unary_calls(protocol: WireProtocol) -> None:
    async with running(runner=FakeRunner(SLOTS)) as server:
        target = f"{server.endpoint.host}:{server.endpoint.port}"
        load = options("--model", OURS, "--num-prompts", "6", "--max-tokens", "5", "--prompt-tokens", "2")
        settings = BenchSettings(target=target, protocol=protocol, load=load, max_concurrency=2, is_streamed=False)
        report = summarize((await bench.measure(settings)).run)
        assert (report["offered"], report["finished"], report["total_output_tokens"]) == (6, 6, 30)
        assert report["median_ttft_ms"] <= report["median_e2el_ms"]
        assert server.ended()["length"] == 7


async def test_an_unknown_or_non_text_model_is_reported() -> None:
    with pytest.raises(grpc.aio.AioRpcError, match="no model other"):
        await measured(Server(marks_end=True, raw=True, inputs={"text_input": "BYTES"}), "--model", "other")
    with pytest.raises(ValueError, match="writer: no BYTES tensor text_input; it has ids"):
        await measured(Server(marks_end=True, raw=True, inputs={"ids": "INT64"}))
