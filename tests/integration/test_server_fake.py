"""The server end to end, over real gRPC and fake models: streams, limits, cancellation, deadlines, failures, stop."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import os
import signal
import threading
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status

from proto.onward.v1 import generation_pb2 as pb
from proto.onward.v1 import model_pb2
from proto.onward.v1.generation_pb2_grpc import GenerationServiceStub
from service.app import App, Ready, run
from service.engine.batch import ScheduledBatch
from service.errors import StartupError
from tests.fakes import EOS, FakeRunner, expected_tokens, letters, script, spell
from tests.servers import (
    CONFIG,
    MODEL,
    SLOTS,
    Running,
    engine_for,
    eventually,
    generate_request,
    running,
    served_model,
    status_of,
    stream_request,
)

# gRPC's poller holds on to every event loop it has met: one for all.
pytestmark = pytest.mark.asyncio(loop_scope="session")

PROMPT = (1, *spell("ab"))
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Gate:
    """Lets the engine's steps pass, or holds them back."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()

    def __call__(self, batch: ScheduledBatch) -> None:
        self._open.wait()

    @contextmanager
    def closed(self) -> Iterator[None]:
        self._open.clear()
        try:
            yield
        finally:
            self._open.set()


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate._open.set()


def kinds(events: list[pb.GenerateStreamResponse]) -> list[str]:
    return [str(event.WhichOneof("event")) for event in events]


def text_of(events: list[pb.GenerateStreamResponse]) -> str:
    return "".join(event.delta.text for event in events)


def tokens_of(events: list[pb.GenerateStreamResponse]) -> list[int]:
    return [token for event in events for token in event.delta.token_ids]


async def read(call: Any) -> list[pb.GenerateStreamResponse]:
    """The rest of a stream, read as `read_accepted` reads: the two ways of gRPC must not be mixed on one call."""
    events = []
    while (event := await call.read()) is not grpc.aio.EOF:
        events.append(event)
    return events


async def read_accepted(call: Any) -> Any:
    event = await call.read()
    assert event.WhichOneof("event") == "accepted"
    return call


async def health(server: Running, service: str = "") -> int:
    return (await server.health.Check(health_pb2.HealthCheckRequest(service=service))).status


async def test_stream_is_accepted_then_deltas_then_finished_then_summary() -> None:
    async with running() as server:
        events = await read(server.stream(request_id="mine", max_tokens=6))
    first, *deltas, finished, summary = events
    assert first.accepted == pb.GenerateStreamResponse.Accepted(request_id="mine", model=MODEL)
    assert set(kinds(deltas)) == {"delta"}
    assert tokens_of(deltas) == expected_tokens(PROMPT, 6)
    assert text_of(deltas) == letters(expected_tokens(PROMPT, 6))
    assert finished.finished.finish_reason == pb.FINISH_REASON_LENGTH
    assert summary.summary.usage == pb.Usage(prompt_tokens=3, generated_tokens=6)
    timings = summary.summary.timings
    assert timings.total == pytest.approx(timings.queue + timings.prefill + timings.decode)
    assert timings.HasField("time_to_first_token")


async def test_unary_answer_is_the_stream_put_together() -> None:
    fields = {"max_tokens": 9, "response": pb.ResponseOptions(logprobs=2)}
    async with running() as server:
        events = await read(server.stream(**fields))
        answer = await server.generation.Generate(generate_request(**fields))
    (output,) = answer.outputs
    assert (output.text, list(output.token_ids)) == (text_of(events), tokens_of(events))
    assert list(output.logprobs) == [logprobs for event in events for logprobs in event.delta.logprobs]
    assert len(output.logprobs) == 9
    assert all(len(logprobs.top) == 2 and logprobs.logprob <= 0 for logprobs in output.logprobs)
    assert output.finish_reason == events[-2].finished.finish_reason
    assert answer.usage == events[-1].summary.usage
    assert answer.model == MODEL
    assert answer.request_id


async def test_encoder_decoder_answers_by_the_same_wire() -> None:
    async with running([served_model(encoder_decoder=True)]) as server:
        answer = await server.generation.Generate(generate_request("ab", max_tokens=5))
    source = (*spell("ab"), EOS)
    assert list(answer.outputs[0].token_ids) == expected_tokens(source, 5, encoder_decoder=True)
    assert answer.usage.prompt_tokens == len(source)


async def test_end_of_sequence_ends_the_output_and_has_no_text() -> None:
    async with running(runner=FakeRunner(SLOTS, next_token=script("hello", prompt_length=3)), trust=True) as server:
        answer = await server.generation.Generate(generate_request())
    (output,) = answer.outputs
    assert (output.text, output.finish_reason) == ("hello", pb.FINISH_REASON_END_OF_SEQUENCE)
    assert output.token_ids[-1] == EOS


@pytest.mark.parametrize(("include", "text"), [(False, "he"), (True, "hell")])
async def test_stop_text_ends_the_output_and_is_named(include: bool, text: str) -> None:
    fields = {"stop": ["zz", "ll"], "include_stop_in_output": include}
    async with running(runner=FakeRunner(SLOTS, next_token=script("hello", prompt_length=3)), trust=True) as server:
        events = await read(server.stream(**fields))
    assert text_of(events) == text
    assert events[-2].finished.finish_reason == pb.FINISH_REASON_STOP
    assert events[-2].finished.matched_stop.text == "ll"


@pytest.mark.parametrize(("include", "text"), [(False, "he"), (True, "hel")])
async def test_stop_token_ends_the_output_and_is_named(include: bool, text: str) -> None:
    fields = {"stop_token_ids": spell("l"), "include_stop_in_output": include}
    async with running(runner=FakeRunner(SLOTS, next_token=script("hello", prompt_length=3)), trust=True) as server:
        (output,) = (await server.generation.Generate(generate_request(**fields))).outputs
    assert output.text == text
    assert output.finish_reason == pb.FINISH_REASON_STOP
    assert output.matched_stop.token_id == spell("l")[0]


async def test_max_tokens_is_cut_to_the_room_in_the_context() -> None:
    async with running([served_model(context=8)]) as server:
        (output,) = (await server.generation.Generate(generate_request(max_tokens=100))).outputs
    assert len(output.token_ids) == 8 - len(PROMPT)
    assert output.finish_reason == pb.FINISH_REASON_LENGTH


async def test_same_seed_same_tokens_whether_alone_or_in_company() -> None:
    fields: dict[str, Any] = {"sampling": pb.SamplingParams(temperature=1.0, seed=7), "max_tokens": 20}
    async with running() as server:
        alone = await read(server.stream(**fields))
        crowd = await asyncio.gather(*(read(server.stream(**fields)) for _ in range(SLOTS)))
    assert {tuple(tokens_of(events)) for events in crowd} == {tuple(tokens_of(alone))}


async def test_64_concurrent_streams_all_complete_with_their_own_tokens() -> None:
    prompts = ["".join(pair) for pair in itertools.product("abcdefgh", repeat=2)]
    async with running(max_queue_size=64) as server:
        streams = await asyncio.gather(*(read(server.stream(text, max_tokens=12)) for text in prompts))
        await server.until_no_slot_is_taken()
    for text, events in zip(prompts, streams, strict=True):
        assert tokens_of(events) == expected_tokens((1, *spell(text)), 12)
        assert kinds(events)[-1] == "summary"


async def test_cancelling_half_mid_stream_frees_slots_and_leaves_the_others_unchanged() -> None:
    prompts = ["".join(pair) for pair in itertools.product("abcdefgh", repeat=2)]
    async with running([served_model(context=100_000)], max_queue_size=64) as server:
        # The cancelled half would never end by itself: the others only get slots if cancelling gives them back.
        doomed = [server.stream(text, max_tokens=60_000, request_id=f"doomed-{text}") for text in prompts[:32]]
        kept = [asyncio.create_task(read(server.stream(text, max_tokens=12))) for text in prompts[32:]]
        for call in doomed:
            await read_accepted(call)
        deltas = [asyncio.create_task(call.read()) for call in doomed]
        for delta in itertools.islice(asyncio.as_completed(deltas), SLOTS):
            assert (await delta).WhichOneof("event") == "delta"
        for call in doomed:
            call.cancel()
        await asyncio.gather(*deltas, return_exceptions=True)
        for text, events in zip(prompts[32:], await asyncio.gather(*kept), strict=True):
            assert tokens_of(events) == expected_tokens((1, *spell(text)), 12)
        await server.until_no_slot_is_taken()
        handled = {"grpc_method": "GenerateStream", "grpc_code": "CANCELLED"}
        await eventually(lambda: server.metric("grpc_server_handled_total", **handled) == 32)
        assert server.metric("requests_total", model_name=MODEL, finish_reason="cancelled") == 32


async def test_queue_overflow_is_refused_with_a_time_to_retry(gate: Gate) -> None:
    async with running(runner=FakeRunner(SLOTS, before_run=gate), max_queue_size=2) as server:
        with gate.closed():
            admitted = [await read_accepted(server.stream()) for _ in range(SLOTS + 2)]
            error = await status_of(server.stream())
        for call in admitted:
            assert (await read(call))[-1].WhichOneof("event") == "summary"
        (await read(server.stream()))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    retry = error_details_pb2.RetryInfo()
    assert rich_details(error)[0].Unpack(retry)
    assert retry.retry_delay.ToMilliseconds() > 0


def rich_details(error: grpc.aio.AioRpcError) -> Any:
    status = rpc_status.from_call(error)
    assert status is not None
    assert status.code == error.code().value[0]
    return status.details


TOO_MANY = ["x"] * 17
BAD_INPUT: dict[str, tuple[dict[str, Any], grpc.StatusCode, str, str]] = {
    "no prompt": ({"text": None}, grpc.StatusCode.INVALID_ARGUMENT, "prompt", "must be set"),
    "empty text": ({"text": ""}, grpc.StatusCode.INVALID_ARGUMENT, "prompt.text", "must not be empty"),
    "no token ids": ({"token_ids": pb.TokenIds()}, grpc.StatusCode.INVALID_ARGUMENT, "prompt.token_ids", "empty"),
    "token id out of range": (
        {"token_ids": pb.TokenIds(ids=[3, 4, 5, 32])},
        grpc.StatusCode.INVALID_ARGUMENT,
        "prompt.token_ids.ids[3]",
        "below the vocabulary's size 32, got 32",
    ),
    "over-long prompt": ({"text": "a" * 64}, grpc.StatusCode.OUT_OF_RANGE, "prompt.text", "at most 63 tokens, got 65"),
    "over-long ids": (
        {"token_ids": pb.TokenIds(ids=[3] * 64)},
        grpc.StatusCode.OUT_OF_RANGE,
        "prompt.token_ids",
        "at most 63 tokens, got 64",
    ),
    "unknown model": ({"model": "nobody"}, grpc.StatusCode.NOT_FOUND, "", "model: 'nobody' is not served"),
    "long request id": ({"request_id": "x" * 129}, grpc.StatusCode.INVALID_ARGUMENT, "request_id", "128 characters"),
    "control characters": ({"request_id": "a\nb"}, grpc.StatusCode.INVALID_ARGUMENT, "request_id", "printable"),
    "NaN temperature": (
        {"sampling": pb.SamplingParams(temperature=math.nan)},
        grpc.StatusCode.INVALID_ARGUMENT,
        "sampling.temperature",
        "must be finite and at least 0, got nan",
    ),
    "infinite temperature": (
        {"sampling": pb.SamplingParams(temperature=math.inf)},
        grpc.StatusCode.INVALID_ARGUMENT,
        "sampling.temperature",
        "got inf",
    ),
    "negative temperature": (
        {"sampling": pb.SamplingParams(temperature=-0.5)},
        grpc.StatusCode.INVALID_ARGUMENT,
        "sampling.temperature",
        "got -0.5",
    ),
    "top_p 0": (
        {"sampling": pb.SamplingParams(top_p=0.0)},
        grpc.StatusCode.INVALID_ARGUMENT,
        "sampling.top_p",
        "must be above 0 and at most 1, got 0.0",
    ),
    "top_p above 1": (
        {"sampling": pb.SamplingParams(top_p=1.5)},
        grpc.StatusCode.INVALID_ARGUMENT,
        "sampling.top_p",
        "got 1.5",
    ),
    "NaN top_p": (
        {"sampling": pb.SamplingParams(top_p=math.nan)},
        grpc.StatusCode.INVALID_ARGUMENT,
        "sampling.top_p",
        "got nan",
    ),
    "negative top_k": (
        {"sampling": pb.SamplingParams(top_k=-1)},
        grpc.StatusCode.INVALID_ARGUMENT,
        "sampling.top_k",
        "got -1",
    ),
    "min_p above 1": (
        {"sampling": pb.SamplingParams(min_p=1.01)},
        grpc.StatusCode.INVALID_ARGUMENT,
        "sampling.min_p",
        "from 0 to 1",
    ),
    "n 0": ({"sampling": pb.SamplingParams(n=0)}, grpc.StatusCode.INVALID_ARGUMENT, "sampling.n", "at least 1, got 0"),
    "max_tokens 0": ({"max_tokens": 0}, grpc.StatusCode.INVALID_ARGUMENT, "stopping.max_tokens", "got 0"),
    "negative max_tokens": ({"max_tokens": -3}, grpc.StatusCode.INVALID_ARGUMENT, "stopping.max_tokens", "got -3"),
    "absurd max_tokens": (
        {"max_tokens": 2**31 - 1},
        grpc.StatusCode.INVALID_ARGUMENT,
        "stopping.max_tokens",
        "must be from 1 to 65536, got 2147483647",
    ),
    "negative min_tokens": ({"min_tokens": -1}, grpc.StatusCode.INVALID_ARGUMENT, "stopping.min_tokens", "got -1"),
    "too many stops": (
        {"stop": TOO_MANY},
        grpc.StatusCode.INVALID_ARGUMENT,
        "stopping.stop",
        "at most 16 entries, got",
    ),
    "empty stop": ({"stop": ["a", ""]}, grpc.StatusCode.INVALID_ARGUMENT, "stopping.stop[1]", "from 1 to 256"),
    "long stop": ({"stop": ["a" * 257]}, grpc.StatusCode.INVALID_ARGUMENT, "stopping.stop[0]", "from 1 to 256"),
    "stop token out of range": (
        {"stop_token_ids": [3, 32]},
        grpc.StatusCode.INVALID_ARGUMENT,
        "stopping.stop_token_ids",
        "below the vocabulary's size 32, got 32",
    ),
    "too many stop tokens": (
        {"stop_token_ids": [3] * 65},
        grpc.StatusCode.INVALID_ARGUMENT,
        "stopping.stop_token_ids",
        "at most 64 entries",
    ),
    "too many logprobs": (
        {"response": pb.ResponseOptions(logprobs=21)},
        grpc.StatusCode.INVALID_ARGUMENT,
        "response.logprobs",
        "from 0 to 20, got 21",
    ),
    "negative logprobs": (
        {"response": pb.ResponseOptions(logprobs=-1)},
        grpc.StatusCode.INVALID_ARGUMENT,
        "response.logprobs",
        "got -1",
    ),
    "NaN timeout": ({"timeout_seconds": math.nan}, grpc.StatusCode.INVALID_ARGUMENT, "timeout_seconds", "got nan"),
    "negative timeout": ({"timeout_seconds": -1}, grpc.StatusCode.INVALID_ARGUMENT, "timeout_seconds", "got -1.0"),
}


@pytest.mark.parametrize(("fields", "code", "field", "words"), BAD_INPUT.values(), ids=BAD_INPUT.keys())
async def test_bad_input_is_refused_with_path_value_and_limit_and_touches_no_slot(
    fields: dict[str, Any], code: grpc.StatusCode, field: str, words: str
) -> None:
    runner = FakeRunner(SLOTS)
    async with running(runner=runner) as server:
        batches = len(runner.batches)
        text = fields.get("text", "ab")
        message = generate_request(**fields) if text is not None else generate_request(token_ids=None)
        for call in (
            server.generation.Generate(message),
            server.generation.GenerateStream(pb.GenerateStreamRequest.FromString(message.SerializeToString())),
        ):
            error = await status_of(call)
            assert error.code() is code
            assert words in str(error.details())
            if field:
                assert str(error.details()).startswith(f"{field}: ")
                request = error_details_pb2.BadRequest()
                assert rich_details(error)[0].Unpack(request)
                assert [violation.field for violation in request.field_violations] == [field]
        assert len(runner.batches) == batches
        assert (await server.generation.Generate(generate_request(max_tokens=1))).outputs


async def test_model_may_be_left_out_only_where_one_is_served() -> None:
    both = [served_model("one"), served_model("two")]
    async with running(both) as server:
        error = await status_of(server.generation.Generate(generate_request()))
        answers = [await server.generation.Generate(generate_request(model=model.name)) for model in both]
    assert error.code() is grpc.StatusCode.NOT_FOUND
    assert "one, two" in str(error.details())
    assert [answer.model for answer in answers] == ["one", "two"]


async def test_request_id_in_flight_is_refused_and_free_again_afterwards(gate: Gate) -> None:
    async with running(runner=FakeRunner(SLOTS, before_run=gate)) as server:
        with gate.closed():
            first = await read_accepted(server.stream(request_id="same"))
            error = await status_of(server.stream(request_id="same"))
        await read(first)
        assert kinds(await read(server.stream(request_id="same")))[-1] == "summary"
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert str(error.details()).startswith("request_id: ")


async def test_timeout_that_has_passed_in_the_queue_is_deadline_exceeded(gate: Gate) -> None:
    async with running(runner=FakeRunner(SLOTS, before_run=gate)) as server:
        with gate.closed():
            ahead = [await read_accepted(server.stream()) for _ in range(SLOTS)]
            late = await read_accepted(server.stream(timeout_seconds=1e-6))
        error = await status_of(late)
        for call in ahead:
            assert kinds(await read(call))[-1] == "summary"
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_timeout_that_passes_while_decoding_is_deadline_exceeded_after_what_there_was() -> None:
    started = time.monotonic()
    ticks = itertools.count()
    model = served_model(context=512)
    # A minute passes with each look at the clock, so that a few tokens fit into a quarter of an hour.
    engine = engine_for(model, clock=lambda: started + 60.0 * next(ticks))
    async with running([model], {MODEL: engine}) as server:
        call = server.stream(max_tokens=500, timeout_seconds=3600.0)
        events = []
        with contextlib.suppress(grpc.aio.AioRpcError):
            while True:
                events.append(await call.read())
        await server.until_no_slot_is_taken()
    assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    tokens = tokens_of(events)
    assert 0 < len(tokens) < 500
    assert tokens == expected_tokens(PROMPT, len(tokens))
    assert "summary" not in kinds(events)


async def test_deadline_of_the_call_frees_what_it_held(gate: Gate) -> None:
    async with running([served_model(context=512)], runner=FakeRunner(SLOTS, before_run=gate)) as server:
        with gate.closed():
            error = await status_of(server.generation.GenerateStream(stream_request(max_tokens=500), timeout=0.05))
        await server.until_no_slot_is_taken()
        handled = {"grpc_method": "GenerateStream", "grpc_code": "DEADLINE_EXCEEDED"}
        await eventually(lambda: server.metric("grpc_server_handled_total", **handled) == 1)
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_failed_step_ends_its_batch_with_an_opaque_id_and_the_server_lives() -> None:
    fail = threading.Event()

    def before_run(batch: ScheduledBatch) -> None:
        if fail.is_set():
            fail.clear()
            raise RuntimeError("secret of the machine room")

    async with running(runner=FakeRunner(SLOTS, before_run=before_run)) as server:
        fail.set()
        error = await status_of(server.stream())
        answer = await server.generation.Generate(generate_request(max_tokens=3))
        assert server.metric("requests_total", model_name=MODEL, finish_reason="engine_failed") == 1
    assert error.code() is grpc.StatusCode.INTERNAL
    assert str(error.details()).startswith("internal error ")
    assert "secret" not in str(error.details())
    assert list(answer.outputs[0].token_ids) == expected_tokens(PROMPT, 3)


async def test_nan_logits_fail_one_sequence_only(gate: Gate) -> None:
    runner = FakeRunner(SLOTS, before_run=gate)
    runner.poisoned_tokens = {31}
    async with running(runner=runner) as server:
        with gate.closed():
            poisoned = await read_accepted(server.stream(token_ids=pb.TokenIds(ids=[31, 31])))
            healthy = await read_accepted(server.stream(max_tokens=3))
        error, events = await asyncio.gather(status_of(poisoned), read(healthy))
    assert error.code() is grpc.StatusCode.INTERNAL
    assert len(tokens_of(events)) == 3
    assert kinds(events)[-1] == "summary"


class Death(BaseException):
    """What no engine survives."""


async def test_death_of_the_engine_thread_ends_every_stream_and_is_reported() -> None:
    die = threading.Event()

    def before_run(batch: ScheduledBatch) -> None:
        if die.is_set():
            raise Death

    models = [served_model("one", context=512), served_model("two", context=512)]
    engines = {model.name: engine_for(model, FakeRunner(SLOTS, before_run=before_run)) for model in models}
    async with running(models, engines) as server:
        calls = [await read_accepted(server.stream(model=model.name, max_tokens=500)) for model in models]
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
        assert [await health(server, name) for name in names[:2]] == [NOT_SERVING] * 2
        error = await status_of(server.stream())
        await server.app.verify_all()
        assert [await health(server, name) for name in names] == [SERVING] * 3
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
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert described.state == model_pb2.MODEL_STATE_FAILED
    assert not described.parity.passed


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
    assert not described.capabilities.beam_search
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


async def test_tokenize_and_detokenize_are_inverse_and_check_ids() -> None:
    async with running() as server:
        tokens = await server.generation.Tokenize(pb.TokenizeRequest(text="hello"))
        bare = await server.generation.Tokenize(pb.TokenizeRequest(text="hello", add_special_tokens=False))
        text = await server.generation.Detokenize(pb.DetokenizeRequest(token_ids=tokens.token_ids))
        error = await status_of(server.generation.Detokenize(pb.DetokenizeRequest(token_ids=[3, 99])))
    assert list(tokens.token_ids) == [1, *spell("hello")]
    assert list(tokens.tokens) == ["<bos>", *"hello"]
    assert list(bare.token_ids) == list(spell("hello"))
    assert text.text == "hello"
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert str(error.details()).startswith("token_ids[1]: ")


@pytest.mark.parametrize("method", ["Score", "Estimate", "Explain"])
async def test_generation_methods_of_later_versions_are_unimplemented_by_name(method: str) -> None:
    async with running() as server:
        error = await status_of(getattr(server.generation, method)(getattr(pb, f"{method}Request")()))
    assert error.code() is grpc.StatusCode.UNIMPLEMENTED
    assert method in str(error.details())


@pytest.mark.parametrize("method", ["LoadModel", "UnloadModel", "ReloadModel"])
async def test_model_methods_of_later_versions_are_unimplemented_by_name(method: str) -> None:
    async with running() as server:
        error = await status_of(getattr(server.models, method)(getattr(model_pb2, f"{method}Request")()))
    assert error.code() is grpc.StatusCode.UNIMPLEMENTED
    assert method in str(error.details())


async def test_message_over_the_limit_is_refused_and_the_next_request_served() -> None:
    async with running(max_message_bytes=2048) as server:
        error = await status_of(server.generation.Generate(generate_request("a" * 5000)))
        assert (await server.generation.Generate(generate_request())).outputs
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize(
    "garbage",
    [b"\xff\xff\xff", b"\x1a\x05ab", b"\x1a\x02\xc3\x28"],
    ids=["random bytes", "truncated", "text that is no UTF-8"],
)
async def test_garbage_is_refused_and_the_next_request_served(garbage: bytes) -> None:
    async with running() as server:
        for method in (server.channel.unary_unary, server.channel.unary_stream):
            name = "Generate" if method == server.channel.unary_unary else "GenerateStream"
            error = await status_of(method(f"/onward.v1.GenerationService/{name}")(garbage))
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            handled = {"grpc_method": name, "grpc_code": "INVALID_ARGUMENT"}
            assert server.metric("grpc_server_handled_total", **handled) == 1
        assert (await server.generation.Generate(generate_request())).outputs


async def test_unknown_fields_are_ignored() -> None:
    async with running() as server:
        call = server.channel.unary_unary("/onward.v1.GenerationService/Generate")
        data = await call(generate_request(max_tokens=2).SerializeToString() + b"\xf8\x7f\x01")
    assert len(pb.GenerateResponse.FromString(data).outputs[0].token_ids) == 2


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
    }


async def test_stopping_withdraws_health_refuses_new_requests_and_lets_those_in_flight_end(gate: Gate) -> None:
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
            error = await status_of(generate.Generate(generate_request()))
        events = await read(call)
        await stopping
        gone = await status_of(generate.Generate(generate_request()))
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert "draining" in str(error.details())
    assert tokens_of(events) == expected_tokens(PROMPT, 7)
    assert kinds(events)[-1] == "summary"
    assert gone.code() is grpc.StatusCode.UNAVAILABLE


async def test_stream_that_outlives_the_grace_ends_without_summary() -> None:
    held = running([served_model(context=100_000)], drain_grace_seconds=0.0)
    server = await held.__aenter__()
    async with grpc.aio.insecure_channel(f"{server.endpoint.host}:{server.endpoint.port}") as channel:
        call = await read_accepted(type(server.generation)(channel).GenerateStream(stream_request(max_tokens=60_000)))
        stopping = asyncio.create_task(held.__aexit__(None, None, None))
        error = await status_of(call)
        await stopping
    assert error.code() is grpc.StatusCode.UNAVAILABLE


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


async def test_metrics_are_scraped_over_http() -> None:
    async with running(metrics=True, metrics_port=0) as server:
        await read(server.stream(max_tokens=5))
        url = f"http://{server.endpoint.host}:{server.endpoint.metrics_port}/metrics"
        text = await asyncio.to_thread(lambda: urllib.request.urlopen(url).read().decode())
    assert f'onward_generation_tokens_total{{model_name="{MODEL}"}} 5.0' in text
    assert f'onward_prompt_tokens_total{{model_name="{MODEL}"}} 3.0' in text
    assert f'onward_requests_total{{finish_reason="length",model_name="{MODEL}"}} 1.0' in text
    assert 'onward_grpc_server_handled_total{grpc_code="OK",grpc_method="GenerateStream"} 1.0' in text
    assert f'onward_inter_token_latency_seconds_count{{model_name="{MODEL}"}} 4.0' in text
    assert "process_resident_memory_bytes" in text


async def test_port_in_use_stops_the_start() -> None:
    async with running() as server:
        with pytest.raises(StartupError, match="cannot listen"):
            async with running(port=server.endpoint.port):
                pass
