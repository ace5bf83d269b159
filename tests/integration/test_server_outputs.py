"""Several outputs, beams and priorities over real gRPC: as a client sees them of an engine with scripted tokens."""

from __future__ import annotations

import threading
import time
from contextlib import AbstractAsyncContextManager
from typing import Any

import grpc
import pytest

from onward.v1 import generation_pb2 as pb
from onward.v1 import model_pb2
from service.engine.types import FinishReason, GenerationRequest
from tests.fakes import EOS, letters, spell
from tests.scripted import ScriptedEngine, Steps, token
from tests.servers import (
    MODEL,
    SLOTS,
    Running,
    generate_request,
    kinds,
    read,
    read_accepted,
    running,
    served_model,
    status_of,
)

END, LENGTH = FinishReason.END_OF_SEQUENCE, FinishReason.LENGTH
# Three outputs of unlike lengths, which end in another order than they began in.
TEXTS = ("abcd", "e", "fg")
SAMPLES: Steps = [
    [token(spell("a")[0], 0), token(spell("e")[0], 1), token(spell("f")[0], 2)],
    [token(spell("b")[0], 0), token(EOS, 1, END), token(spell("g")[0], 2, LENGTH)],
    [token(spell("c")[0], 0)],
    [token(spell("d")[0], 0, LENGTH)],
]
THREE = pb.SamplingParams(n=3, temperature=1.0, seed=1)
BEAMS = pb.BeamSearchParams(beam_size=3, num_hypotheses=2)


def hypotheses(_: GenerationRequest) -> Steps:
    """Nothing for two steps, then two hypotheses at once."""
    best = [token(spell("h")[0], 0), token(spell("i")[0], 0), token(EOS, 0, END, score=-0.5)]
    second = [token(spell("h")[0], 1), token(spell("o")[0], 1, LENGTH, score=-0.75)]
    return [[], [], [*best, *second]]


def scripted(engine: ScriptedEngine, **changes: Any) -> AbstractAsyncContextManager[Running]:
    return running(engines={MODEL: engine}, trust=True, **changes)


def of_output(events: list[pb.GenerateStreamResponse], index: int) -> list[pb.GenerateStreamResponse]:
    """The deltas of one output and its end."""
    return [
        event
        for event in events
        if (event.HasField("delta") and event.delta.output_index == index)
        or (event.HasField("finished") and event.finished.output_index == index)
    ]


async def test_each_output_has_its_deltas_then_its_end_and_the_summary_is_last() -> None:
    async with scripted(ScriptedEngine(lambda _: SAMPLES)) as server:
        events = await read(server.stream(sampling=THREE))
    assert kinds(events)[0] == "accepted"
    assert kinds(events)[-1] == "summary"
    assert kinds(events).count("summary") == 1
    for index, text in enumerate(TEXTS):
        *deltas, end = of_output(events, index)
        assert set(kinds(deltas)) == {"delta"}
        assert "".join(delta.delta.text for delta in deltas) == text
        assert end.finished.finish_reason in (pb.FINISH_REASON_LENGTH, pb.FINISH_REASON_END_OF_SEQUENCE)
    assert sum(len(of_output(events, index)) for index in range(3)) == len(events) - 2
    assert events[-1].summary.usage == pb.Usage(prompt_tokens=3, generated_tokens=8)


async def test_outputs_of_one_step_are_sent_before_the_next_step() -> None:
    may_step = threading.Semaphore(1)
    async with scripted(ScriptedEngine(lambda _: SAMPLES, before_step=may_step.acquire)) as server:
        call = await read_accepted(server.stream(sampling=THREE))
        first = [await call.read() for _ in range(3)]
        may_step.release(len(SAMPLES) - 1)
        rest = await read(call)
    assert sorted(event.delta.output_index for event in first) == [0, 1, 2]
    assert kinds(rest)[-1] == "summary"


async def test_consumer_that_is_behind_gets_one_delta_per_output_and_every_end() -> None:
    async with scripted(ScriptedEngine(lambda _: [[event for step in SAMPLES for event in step]])) as server:
        events = await read(server.stream(sampling=THREE))
    assert kinds(events) == ["accepted", *["delta", "finished"] * 3, "summary"]
    assert [event.delta.text for event in events if event.HasField("delta")] == list(TEXTS)


async def test_unary_answer_has_the_outputs_by_index() -> None:
    async with scripted(ScriptedEngine(lambda _: SAMPLES)) as server:
        answer = await server.generation.Generate(generate_request(sampling=THREE))
    assert [(output.index, output.text) for output in answer.outputs] == list(enumerate(TEXTS))
    assert [list(output.token_ids) for output in answer.outputs] == [
        list(spell("abcd")), [*spell("e"), EOS], list(spell("fg"))
    ]  # fmt: skip
    assert [output.finish_reason for output in answer.outputs] == [
        pb.FINISH_REASON_LENGTH, pb.FINISH_REASON_END_OF_SEQUENCE, pb.FINISH_REASON_LENGTH
    ]  # fmt: skip
    assert not any(output.HasField("score") for output in answer.outputs)
    assert answer.usage.generated_tokens == 8


async def test_output_without_tokens_is_there_all_the_same() -> None:
    steps = [[token(None, 1, LENGTH), token(5, 0, LENGTH)]]
    async with scripted(ScriptedEngine(lambda _: steps)) as server:
        answer = await server.generation.Generate(generate_request(sampling=pb.SamplingParams(n=2)))
    assert [(output.index, list(output.token_ids)) for output in answer.outputs] == [(0, [5]), (1, [])]
    assert answer.outputs[1].finish_reason == pb.FINISH_REASON_LENGTH


async def test_hypotheses_come_at_the_end_best_first_with_their_scores() -> None:
    engine = ScriptedEngine(hypotheses)
    async with scripted(engine) as server:
        fields: dict[str, Any] = {"sampling": None, "beam_search": BEAMS}
        answer = await server.generation.Generate(generate_request(**fields))
        events = await read(server.stream(**fields))
        assert await server.until_ended(2) == {"length": 2}
        assert server.metric("time_to_first_token_seconds_count", model_name=MODEL) == 2
        for name in ("inter_token_latency_seconds", "time_per_output_token_seconds"):
            assert server.metric(f"{name}_count", model_name=MODEL) == 0
        assert server.metric("generation_tokens_total", model_name=MODEL) == 2 * 5
        assert server.metric("request_generation_tokens_sum", model_name=MODEL) == 2 * 5
    assert [(output.text, output.score) for output in answer.outputs] == [("hi", -0.5), ("ho", -0.75)]
    assert kinds(events) == ["accepted", *["delta", "finished"] * 2, "summary"]
    ends = [event.finished for event in events if event.HasField("finished")]
    assert [(end.output_index, end.score) for end in ends] == [(0, -0.5), (1, -0.75)]
    asked = engine.requests[0].beam_search
    assert asked is not None
    assert (asked.beam_size, asked.num_hypotheses) == (3, 2)


async def test_long_hypotheses_are_sent_in_several_messages_in_order() -> None:
    text = "abcdefghijklmnopqrstuvwxyz" * 20

    def script(_: GenerationRequest) -> Steps:
        *body, last = spell(text)
        return [
            [event for index in range(2) for event in [*(token(i, index) for i in body), token(last, index, LENGTH)]]
        ]

    async with scripted(ScriptedEngine(script)) as server:
        events = await read(server.stream(sampling=None, beam_search=BEAMS))
    for index in range(2):
        *deltas, end = of_output(events, index)
        assert "".join(delta.delta.text for delta in deltas) == letters(spell(text))
        assert len(deltas) > 1
        assert end.HasField("finished")


async def test_running_outputs_end_the_call_at_the_deadline() -> None:
    late = [
        [token(5, 0), token(6, 1, END)],
        [token(None, 0, FinishReason.DEADLINE)],
    ]
    async with scripted(ScriptedEngine(lambda _: late)) as server:
        call = server.stream(sampling=pb.SamplingParams(n=2))
        error = await status_of(call)
        unary = await status_of(server.generation.Generate(generate_request(sampling=pb.SamplingParams(n=2))))
        assert await server.until_ended(2) == {"deadline": 2}
    assert error.code() is unary.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert error.details() == "the deadline passed after 2 tokens"


async def test_leaving_a_stream_of_several_outputs_ends_them_all() -> None:
    def endless(_: GenerationRequest) -> Steps:
        return [[token(5, 0), token(5, 1)] for _ in range(20_000)]

    # Steps that take no time would leave the loop none to hear of it.
    async with scripted(ScriptedEngine(endless, before_step=lambda: time.sleep(0.002))) as server:
        call = await read_accepted(server.stream(sampling=pb.SamplingParams(n=2)))
        await call.read()
        call.cancel()
        assert await server.until_ended(1) == {"cancelled": 1}


async def test_engine_that_forgets_an_output_fails_the_call_and_not_the_server() -> None:
    async with scripted(ScriptedEngine(lambda _: [[token(5, 0, LENGTH)]])) as server:
        error = await status_of(server.stream(sampling=pb.SamplingParams(n=2)))
        assert kinds(await read(server.stream()))[-1] == "summary"
    assert error.code() is grpc.StatusCode.INTERNAL


async def test_time_between_tokens_is_measured_per_output() -> None:
    steps: Steps = [[token(5, index) for index in range(3)] for _ in range(4)]
    steps = [*steps, [token(5, index, LENGTH) for index in range(3)]]
    async with scripted(ScriptedEngine(lambda _: steps)) as server:
        await read(server.stream(sampling=THREE))
        await server.until_ended(1)
        assert server.metric("time_to_first_token_seconds_count", model_name=MODEL) == 1
        assert server.metric("inter_token_latency_seconds_count", model_name=MODEL) == 3 * 4
        assert server.metric("time_per_output_token_seconds_count", model_name=MODEL) == 1
        # Between the tokens of one step, which are others' outputs', there is no time: it would halve the mean.
        total = server.metric("inter_token_latency_seconds_sum", model_name=MODEL)
        mean = server.metric("time_per_output_token_seconds_sum", model_name=MODEL)
        assert mean == pytest.approx(total / 12)
        assert server.metric("request_generation_tokens_sum", model_name=MODEL) == 15


async def test_cached_prompt_tokens_are_reported_and_counted() -> None:
    engine = ScriptedEngine(lambda _: [[token(5, 0, LENGTH)]], num_cached_tokens=2, num_preemptions=1)
    async with scripted(engine) as server:
        answer = await server.generation.Generate(generate_request())
        events = await read(server.stream())
        await server.until_ended(2)
        assert server.metric("prompt_tokens_total", model_name=MODEL) == 6
        assert server.metric("cached_prompt_tokens_total", model_name=MODEL) == 4
        assert server.metric("preemptions_total", model_name=MODEL) == 2
    assert answer.usage == events[-1].summary.usage == pb.Usage(prompt_tokens=3, cached_tokens=2, generated_tokens=1)


async def test_priority_and_prompt_scores_reach_the_engine_beside_several_outputs() -> None:
    engine = ScriptedEngine(lambda _: SAMPLES)
    async with scripted(engine) as server:
        fields = {"priority": -7, "response": pb.ResponseOptions(prompt_logprobs=1), "sampling": THREE}
        await server.generation.Generate(generate_request(**fields))
    (asked,) = engine.requests
    assert (asked.priority, asked.num_outputs, asked.num_rows) == (-7, 3, 3)
    assert asked.scoring is not None


async def test_beams_of_a_request_fit_into_the_batch() -> None:
    async with scripted(ScriptedEngine(lambda _: SAMPLES)) as server:
        request = generate_request(sampling=None, beam_search=pb.BeamSearchParams(beam_size=SLOTS + 1))
        error = await status_of(server.generation.Generate(request), grpc.StatusCode.INVALID_ARGUMENT)
        described = await server.models.GetModel(model_pb2.GetModelRequest())
    assert error.details() == f"beam_search.beam_size: must be from 1 to {SLOTS}, got {SLOTS + 1}"
    assert described.limits.max_outputs == described.limits.max_beam_size == SLOTS


@pytest.mark.parametrize("encoder_decoder", [False, True])
async def test_memory_for_keys_and_values_is_reported(encoder_decoder: bool) -> None:
    model = served_model(context=48, encoder_decoder=encoder_decoder)
    budgets = []
    for changes in ({}, {"kv_memory": 34567}):
        async with running([model], {MODEL: ScriptedEngine(lambda _: SAMPLES)}, trust=True, **changes) as server:
            budgets.append((await server.models.GetModel(model_pb2.GetModelRequest())).limits.kv_memory_bytes)
    # Keys and values of one layer and 8 float32 each, for the output and, where there is one, the source; in pages, of
    # which one holds 128 tokens.
    assert budgets == [SLOTS * 128 * (2 if encoder_decoder else 1) * 2 * 8 * 4, 34567]


async def test_prefill_provider_is_reported() -> None:
    async with running([served_model()], {MODEL: ScriptedEngine(lambda _: SAMPLES)}, trust=True) as server:
        assert (await server.models.GetModel(model_pb2.GetModelRequest())).prefill_provider == "cpu"
