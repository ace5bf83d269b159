"""The server from start to stop: health, parity, failures of the engine, drain, metrics."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from model.spec.artifact import Precision
from model.spec.golden import TOLERANCES
from onward.v1 import generation_pb2 as pb
from onward.v1 import model_pb2
from onward.v1.generation_pb2_grpc import GenerationServiceStub
from service.app import App, Ready, run
from service.commands.ask import health as probe
from service.config import HealthConfig
from service.engine.batch import ScheduledBatch
from service.engine.engine import Engine
from service.engine.scheduler import EngineLimits
from service.errors import StartupError
from service.repository.models import ModelState
from tests.fakes import Death, FakeRunner, Gate, expected_tokens, fake_engine
from tests.servers import (
    CONFIG,
    MODEL,
    PROMPT,
    SLOTS,
    Running,
    engine_for,
    eventually,
    generate_request,
    kinds,
    read,
    read_accepted,
    running,
    served_model,
    status_of,
    stream_request,
    tokens_of,
)
from tests.unit.service.engine.proof.test_batch_proof import Dependent, dependent

# gRPC's poller holds on to every event loop it has met: one for all.
pytestmark = pytest.mark.asyncio(loop_scope="session")

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def health(server: Running, service: str = "") -> int:
    return (await server.health.Check(health_pb2.HealthCheckRequest(service=service))).status


@pytest.mark.parametrize(
    ("service", "is_proven", "code", "said"),
    [
        ("", True, 0, "SERVING\n"),
        (MODEL, True, 0, "SERVING\n"),
        ("", False, 1, "NOT_SERVING\n"),
        ("nobody", True, 1, "NOT_FOUND: "),
    ],
)
async def test_a_probe_tells_by_its_exit_status_whether_the_server_answers(
    service: str, is_proven: bool, code: int, said: str
) -> None:
    async with running(verify=is_proven) as server:
        out, err = io.StringIO(), io.StringIO()
        config = HealthConfig(
            target=f"{server.endpoint.host}:{server.endpoint.port}", service=service, timeout_seconds=10
        )
        assert await asyncio.to_thread(probe, config, out, err) == code
        assert (out.getvalue() or err.getvalue()).startswith(said)


async def test_a_probe_of_nobody_fails() -> None:
    config = HealthConfig(target="127.0.0.1:1", timeout_seconds=10)
    out, err = io.StringIO(), io.StringIO()
    assert await asyncio.to_thread(probe, config, out, err) == 1
    assert err.getvalue().startswith("UNAVAILABLE: ")


async def test_death_of_the_engine_thread_ends_every_stream_and_is_reported() -> None:
    die = threading.Event()

    def before_run(batch: ScheduledBatch) -> None:
        if die.is_set():
            raise Death

    # Longer than anybody takes to let it die.
    models = [served_model("one", context=100_000), served_model("two", context=100_000)]
    engines = {model.name: engine_for(model, FakeRunner(SLOTS, before_run=before_run)) for model in models}
    async with running(models, engines) as server:
        calls = [await read_accepted(server.stream(model=model.name, max_tokens=60_000)) for model in models]
        die.set()
        errors = [await status_of(call) for call in calls]
        end = await server.app.wait(asyncio.Event())
        afterwards = await status_of(server.stream(model="one"))
    assert end is not None
    assert [error.code() for error in (*errors, afterwards)] == [grpc.StatusCode.INTERNAL] * 3
    assert {error.details() for error in errors} == {f"internal error {end.error_id}"}


async def test_unexpected_error_of_a_handler_is_internal_and_told_to_the_log_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with running() as server:
        monkeypatch.setattr(server.app.models, "resolve", lambda name: 1 / 0)
        error = await status_of(server.generation.Tokenize(pb.TokenizeRequest(text="a")))
    assert error.code() is grpc.StatusCode.INTERNAL
    assert "division" not in str(error.details())
    assert "ZeroDivisionError" in caplog.text
    assert str(error.details()).removeprefix("internal error ") in caplog.text


async def test_health_follows_start_and_golden_cases() -> None:
    names = ["", "onward.v1.GenerationService", MODEL]
    async with running(verify=False) as server:
        assert [await health(server, name) for name in names] == [NOT_SERVING] * 3
        error = await status_of(server.stream())
        assert server.metric("model_serving", model_name=MODEL) == 0
        await server.app.verify_all()
        assert [await health(server, name) for name in names] == [SERVING] * 3
        assert server.metric("model_serving", model_name=MODEL) == 1
        assert await health(server, "onward.v1.ModelService") == SERVING
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await health(server, "nobody")
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert "starting" in str(error.details())
    assert unknown.value.code() is grpc.StatusCode.NOT_FOUND


async def test_model_that_fails_its_golden_cases_does_not_serve_and_others_do() -> None:
    models = [served_model("good"), served_model("wrong", golden_error=0.5)]
    async with running(models) as server:
        assert [await health(server, name) for name in ("good", "wrong", "")] == [SERVING, NOT_SERVING, NOT_SERVING]
        error = await status_of(server.stream(model="wrong"))
        assert (await server.generation.Generate(generate_request(model="good"))).outputs
        described = await server.models.GetModel(model_pb2.GetModelRequest(model="wrong"))
        assert server.metric("parity_max_abs_error", model_name="wrong") == pytest.approx(0.5)
        for name in ("model_serving", "parity_passed"):
            assert [server.metric(name, model_name=model) for model in ("good", "wrong")] == [1, 0]
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert described.state == model_pb2.MODEL_STATE_FAILED
    assert not described.parity.passed


def guessing_engine(runner: FakeRunner) -> Engine:
    """An engine whose speculation is proven, as `build_engines` makes it."""
    limits = EngineLimits(max_batch_size=SLOTS, prefill_chunk=8, max_prefill_tokens=16, look_up=4)
    engine = fake_engine(runner, limits=limits)
    engine.prove_speculation(served_model().golden_cases)
    return engine


async def test_model_whose_bits_depend_on_the_batch_serves_says_so_and_drafts_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    runners = {"even": FakeRunner(SLOTS), "odd": Dependent(SLOTS, dependent)}
    engines = {name: guessing_engine(runner) for name, runner in runners.items()}
    async with running([served_model(name) for name in runners], engines, verify=False) as server:
        drafts = partial(server.metric, "spec_decode_max_draft_tokens")
        assert [drafts(model_name=name) for name in runners] == [4, 4]
        await server.app.verify_all()
        assert [await health(server, name) for name in runners] == [SERVING] * 2
        assert [drafts(model_name=name) for name in runners] == [4, 0]
        samples = [server.registry.get_sample_value("onward_batch_invariant", {"model_name": name}) for name in runners]
        described = [(await server.models.GetModel(model_pb2.GetModelRequest(model=name))).parity for name in runners]
        verified = (await server.models.VerifyParity(model_pb2.VerifyParityRequest(model="odd"))).parity
    assert samples == [1, 0]
    assert all(parity.HasField("batch_invariant") for parity in described)
    assert [parity.batch_invariant for parity in described] == [True, False]
    assert all(parity.passed for parity in described)
    assert verified == described[1]
    lines = [record.getMessage() for record in caplog.records if "batch-invariant" in record.getMessage()]
    (place,) = set(lines)
    assert len(lines) == 2, "one for each check"
    assert place.startswith("engine: not batch-invariant, no prompt-lookup speculation: step 1, row ")


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.INT8])
async def test_model_is_held_to_the_tolerance_of_its_own_precision(precision: Precision) -> None:
    (case,) = served_model().golden_cases
    allowed = TOLERANCES[precision].of(case.logits)
    models = [
        served_model(name, precision=precision, golden_error=share * allowed)
        for name, share in (("within", 0.9), ("beyond", 1.1))
    ]
    async with running(models) as server:
        assert [await health(server, name) for name in ("within", "beyond")] == [SERVING, NOT_SERVING]


async def test_models_are_listed_and_described() -> None:
    both = [served_model("b", encoder_decoder=True), served_model("a", context=48)]
    async with running(both) as server:
        listed = (await server.models.ListModels(model_pb2.ListModelsRequest())).models
        described = await server.models.GetModel(model_pb2.GetModelRequest(model="a"))
    assert [(model.name, model.family) for model in listed] == [
        ("a", model_pb2.MODEL_FAMILY_DECODER_ONLY),
        ("b", model_pb2.MODEL_FAMILY_ENCODER_DECODER),
    ]
    assert described.state == model_pb2.MODEL_STATE_SERVING
    assert (described.architecture.context, described.limits.max_prompt_tokens) == (48, 47)
    assert described.limits.max_batch_size == SLOTS
    assert described.capabilities.streaming
    assert described.capabilities.beam_search
    assert not described.capabilities.chat
    assert described.parity.passed
    assert described.parity.num_cases == 1
    assert (described.device, described.precision) == ("cpu", "fp32")


async def test_parity_can_be_verified_while_requests_run() -> None:
    async with running([served_model(context=512)]) as server:
        streams = [asyncio.create_task(read(server.stream(max_tokens=40))) for _ in range(SLOTS)]
        report = await server.models.VerifyParity(model_pb2.VerifyParityRequest())
        events = [*await asyncio.gather(*streams), await read(server.stream(max_tokens=40))]
    assert report.parity.passed
    assert [case.name for case in report.cases] == ["noise"]
    assert {tuple(tokens_of(each)) for each in events} == {tuple(expected_tokens(PROMPT, 40))}


async def test_reflection_lists_the_services() -> None:
    async with running() as server:
        stub = reflection_pb2_grpc.ServerReflectionStub(server.channel)
        requests = [reflection_pb2.ServerReflectionRequest(list_services="")]
        (answer,) = [each async for each in stub.ServerReflectionInfo(iter(requests))]
    names = {service.name for service in answer.list_services_response.service}
    assert names == {
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
        "onward.v1.GenerationService",
        "onward.v1.ModelService",
        "inference.GRPCInferenceService",
    }


async def test_stopping_withdraws_health_refuses_new_requests_and_lets_those_in_flight_end() -> None:
    gate = Gate()
    held = running(runner=FakeRunner(SLOTS, before_run=gate))
    server = await held.__aenter__()
    async with grpc.aio.insecure_channel(f"{server.endpoint.host}:{server.endpoint.port}") as channel:
        watch = type(server.health)(channel).Watch(health_pb2.HealthCheckRequest(service=MODEL))
        assert (await watch.read()).status == SERVING
        generate = type(server.generation)(channel)
        with gate.closed():
            call = await read_accepted(generate.GenerateStream(stream_request(max_tokens=7)))
            stopping = asyncio.create_task(held.__aexit__(None, None, None))
            assert (await watch.read()).status == NOT_SERVING
            assert server.metric("model_serving", model_name=MODEL) == 0
            error = await status_of(generate.Generate(generate_request()))
        events = await read(call)
        await stopping
        gone = await status_of(generate.Generate(generate_request()))
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert "draining" in str(error.details())
    assert tokens_of(events) == expected_tokens(PROMPT, 7)
    assert kinds(events)[-1] == "summary"
    assert gone.code() is grpc.StatusCode.UNAVAILABLE


async def test_idle_server_that_stops_refuses_for_the_length_of_the_pause_before_it_is_gone() -> None:
    async with running(drain_pause_seconds=0.5) as server:
        await server.generation.Generate(generate_request(max_tokens=1))
        began = time.monotonic()
    assert time.monotonic() - began >= 0.5
    # A pause that nobody can be late for, which a second signal ends.
    model = served_model()
    app = App(replace(CONFIG, drain_pause_seconds=3600.0), [model], {MODEL: engine_for(model)})
    ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
    process = asyncio.create_task(run(app, ready.set_result))
    endpoint = (await ready).endpoint
    async with grpc.aio.insecure_channel(f"{endpoint.host}:{endpoint.port}") as channel:
        generate = GenerationServiceStub(channel)
        await generate.Generate(generate_request(max_tokens=1))
        os.kill(os.getpid(), signal.SIGTERM)
        await eventually(lambda: app.models.state(MODEL) is ModelState.DRAINING)
        error = await status_of(generate.Generate(generate_request()))
        assert not process.done()
        os.kill(os.getpid(), signal.SIGINT)
        assert await process == 0
    assert "draining" in str(error.details())


async def test_stream_that_outlives_the_grace_is_told_that_the_server_stops(
    caplog: pytest.LogCaptureFixture,
) -> None:
    held = running([served_model(context=100_000)], drain_grace_seconds=0.0)
    server = await held.__aenter__()
    async with grpc.aio.insecure_channel(f"{server.endpoint.host}:{server.endpoint.port}") as channel:
        generate = type(server.generation)(channel)
        calls = [await read_accepted(generate.GenerateStream(stream_request(max_tokens=60_000))) for _ in range(2)]
        stopping = asyncio.create_task(held.__aexit__(None, None, None))
        # Both are read all the while: one that was not would look as if it had stopped reading.
        errors = await asyncio.gather(*map(status_of, calls))
        await stopping
    handled = {"grpc_method": "GenerateStream", "grpc_code": "UNAVAILABLE"}
    assert server.metric("grpc_server_handled_total", **handled) == 2
    assert server.ended() == {"not_serving": 2}
    assert [(error.code(), error.details()) for error in errors] == [
        (grpc.StatusCode.UNAVAILABLE, "the server has stopped")
    ] * 2
    assert "2 calls outlived the grace" in caplog.text


async def test_stopping_with_nothing_in_flight_warns_of_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async with running(drain_grace_seconds=0.0):
        pass
    assert "outlived" not in caplog.text


async def test_process_ends_with_0_when_told_to_and_with_1_when_its_engine_dies() -> None:
    die = threading.Event()

    def before_run(batch: ScheduledBatch) -> None:
        if die.is_set():
            raise Death

    async def serve_until(act: Callable[[grpc.aio.Channel], Awaitable[None]]) -> int:
        model = served_model()
        engines = {MODEL: engine_for(model, FakeRunner(SLOTS, before_run=before_run))}
        ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        process = asyncio.create_task(run(App(CONFIG, [model], engines), ready.set_result))
        endpoint = (await ready).endpoint
        async with grpc.aio.insecure_channel(f"{endpoint.host}:{endpoint.port}") as channel:
            await act(channel)
        return await process

    async def kill(channel: grpc.aio.Channel) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    async def break_engine(channel: grpc.aio.Channel) -> None:
        die.set()
        await status_of(GenerationServiceStub(channel).Generate(generate_request()))

    assert await serve_until(kill) == 0
    assert await serve_until(break_engine) == 1


async def test_signal_during_the_start_stops_it_before_anything_is_announced() -> None:
    gate = Gate()
    app = App(CONFIG, [served_model()], {MODEL: engine_for(served_model(), FakeRunner(SLOTS, before_run=gate))})
    announced: list[Ready] = []
    with gate.closed():
        process = asyncio.create_task(run(app, announced.append))
        await gate.until_entered()
        os.kill(os.getpid(), signal.SIGTERM)
        await eventually(lambda: app.models.state(MODEL) is ModelState.DRAINING)
    assert await process == 0
    assert announced == []


async def test_second_signal_ends_the_grace() -> None:
    model = served_model(context=100_000)
    app = App(replace(CONFIG, drain_grace_seconds=3600.0), [model], {MODEL: engine_for(model)})
    ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
    process = asyncio.create_task(run(app, ready.set_result))
    endpoint = (await ready).endpoint
    async with grpc.aio.insecure_channel(f"{endpoint.host}:{endpoint.port}") as channel:
        call = await read_accepted(GenerationServiceStub(channel).GenerateStream(stream_request(max_tokens=60_000)))
        os.kill(os.getpid(), signal.SIGTERM)
        await eventually(lambda: app.models.state(MODEL) is ModelState.DRAINING)
        assert (await call.read()).WhichOneof("event") == "delta"
        os.kill(os.getpid(), signal.SIGINT)
        error = await status_of(call)
    assert await process == 0
    assert error.code() is grpc.StatusCode.UNAVAILABLE


async def test_replays_that_nobody_waits_for_do_not_run_and_those_asked_together_are_one() -> None:
    gate = Gate()
    runner = FakeRunner(SLOTS, before_run=gate)
    async with running(runner=runner) as server:
        one_replay = len(runner.batches)
        verify = partial(server.models.VerifyParity, model_pb2.VerifyParityRequest())
        with gate.closed():
            ahead = await read_accepted(server.stream(max_tokens=1))
            await eventually(lambda: len(runner.batches) == one_replay + 1)
            cancelled = [verify() for _ in range(30)]
            await eventually(lambda: server.app._calls.num_open == 31)
            for call in cancelled:
                call.cancel()
            await eventually(lambda: server.app._calls.num_open == 1)
            kept = [verify() for _ in range(5)]
            await eventually(lambda: server.app._calls.num_open == 6)
        assert all([(await call).parity.passed for call in kept])
        await read(ahead)
    assert len(runner.batches) == 2 * one_replay + 1


async def test_port_in_use_stops_the_start() -> None:
    async with running() as server:
        with pytest.raises(StartupError, match="cannot listen"):
            async with running(port=server.endpoint.port):
                pass
