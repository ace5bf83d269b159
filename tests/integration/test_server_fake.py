"""Requests over real gRPC on fake models: streams, sampling, stops, company, cancellation, deadlines."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import grpc
import pytest
import tokenizers

from model.spec.tokenizer import Tokenizer
from onward.v1 import generation_pb2 as pb
from onward.v1 import model_pb2
from service.config import Admission, RequestLimits
from service.engine import logits
from service.engine.sampling.sampler import compute_logprobs
from tests.fakes import CONTEXT, EOS, VOCAB_SIZE, FakeRunner, Gate, expected_tokens, letters, noise, script, spell
from tests.servers import (
    MODEL,
    PROMPT,
    SLOTS,
    engine_for,
    eventually,
    expire,
    generate_request,
    kinds,
    read,
    read_accepted,
    running,
    served_model,
    status_of,
    stream_request,
    text_of,
    tokens_of,
)

# gRPC's poller holds on to every event loop it has met: one for all.
pytestmark = pytest.mark.asyncio(loop_scope="session")


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


async def test_target_prefix_is_continued_not_repeated_and_counted_as_given() -> None:
    model = served_model(encoder_decoder=True)
    async with running([model]) as server:
        answer = await server.generation.Generate(generate_request("ab", max_tokens=5, target_prefix="xyz"))
        described = await server.models.GetModel(model_pb2.GetModelRequest())
    source = (*spell("ab"), EOS)
    expected = expected_tokens(source, 5, encoder_decoder=True, target_prefix=spell("xyz"))
    (output,) = answer.outputs
    assert (list(output.token_ids), output.text) == (expected, model.output_tokenizer.decode(expected))
    assert answer.usage == pb.Usage(prompt_tokens=len(source) + 3, generated_tokens=5)
    assert described.capabilities.target_prefix
    assert described.limits.max_target_prefix_tokens == CONTEXT - 2


@pytest.mark.parametrize("stop", [[], ["never"]], ids=["", "with stops"])
async def test_output_reads_as_the_continuation_of_its_target_prefix(stop: list[str]) -> None:
    """Words after the prefix keep the space that a decoder takes away at a beginning, whoever makes the text."""
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"▁w{i}": i for i in range(32)}, unk_token="▁w0"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    inner.decoder = tokenizers.decoders.Metaspace()
    model = replace(served_model(encoder_decoder=True), output_tokenizer=Tokenizer(inner))
    texts = {}
    async with running([model]) as server:
        for prefix in ("", "w7 w8"):
            request = generate_request("ab", max_tokens=3, stop=stop, target_prefix=prefix)
            texts[prefix] = (await server.generation.Generate(request)).outputs[0].text
    for prefix, given in {"": (), "w7 w8": (7, 8)}.items():
        tokens = expected_tokens((*spell("ab"), EOS), 3, encoder_decoder=True, target_prefix=given)
        assert (prefix + texts[prefix]).split(" ") == [*prefix.split(), *(f"w{token_id}" for token_id in tokens)]


@pytest.mark.parametrize("encoder_decoder", [False, True])
async def test_score_tells_how_probable_a_target_is(encoder_decoder: bool) -> None:
    model = served_model(encoder_decoder=encoder_decoder)
    source, given = ((*spell("ab"), EOS), [1]) if encoder_decoder else ((), list(PROMPT))
    target = spell("cdefghijkl")
    expected = []
    for index, token_id in enumerate(target):
        expected.append(compute_logprobs(noise(source, [*given, *target[:index]]), token_id, 0).logprob)
    async with running([model]) as server:
        busy = [await read_accepted(server.stream(max_tokens=30)) for _ in range(SLOTS - 1)]
        score = await server.generation.Score(pb.ScoreRequest(text="ab", target_text="cdefghijkl"))
        for call in busy:
            await read(call)
        assert await server.until_ended(SLOTS) == {"length": SLOTS}
        computed = sum(len(source) or len(given) for _ in range(SLOTS)) + len(target)
        assert server.metric("prompt_tokens_total", model_name=MODEL) == computed
    assert [token.token_id for token in score.tokens] == list(target)
    assert [token.logprob for token in score.tokens] == expected
    assert score.total_logprob == pytest.approx(sum(expected))
    assert score.perplexity == pytest.approx(math.exp(-sum(expected) / 10))
    assert score.bits_per_byte == pytest.approx(-sum(expected) / math.log(2) / 10)


async def test_score_of_a_prompt_begins_with_its_second_token() -> None:
    async with running() as server:
        score = await server.generation.Score(pb.ScoreRequest(text="abc"))
        same = await server.generation.Score(pb.ScoreRequest(token_ids=pb.TokenIds(ids=[1]), target_text="abc"))
    assert [token.token_id for token in score.tokens] == list(spell("abc"))
    assert score == same


async def test_score_ends_with_its_call() -> None:
    gate = Gate()
    # Longer than a step can compute.
    request = pb.ScoreRequest(text="a" * 60)
    async with running(runner=FakeRunner(SLOTS, before_run=gate), admission=Admission.OFF) as server:
        handled = {"grpc_method": "Score", "grpc_code": "DEADLINE_EXCEEDED"}
        with gate.closed():
            await expire(
                lambda timeout: server.generation.Score(request, timeout=timeout),
                lambda: server.metric("grpc_server_handled_total", **handled) > 0 and server.num_streams > 0,
            )
        ended = await server.until_idle()
    assert ended
    assert set(ended) <= {"cancelled", "deadline"}


async def test_prompt_logprobs_come_before_the_output_and_leave_it_as_it_is() -> None:
    fields = {"max_tokens": 4, "response": pb.ResponseOptions(prompt_logprobs=2)}
    text = "abcdefghijklmnopqrstuvwxyz"
    async with running() as server:
        events = await read(server.stream(text, **fields))
        answer = await server.generation.Generate(generate_request(text, **fields))
        plain = await server.generation.Generate(generate_request(text, max_tokens=4))
        score = await server.generation.Score(pb.ScoreRequest(text=text))
    told = [kind for kind in kinds(events) if kind in ("prompt", "delta")]
    assert told == sorted(told, key=["prompt", "delta"].index)
    assert told.count("prompt") > 1, "as it happens, not all at the end"
    logprobs = [each for event in events for each in event.prompt.logprobs]
    assert logprobs == list(answer.prompt_logprobs)
    assert [each.logprob for each in logprobs] == [token.logprob for token in score.tokens]
    assert {len(each.top) for each in logprobs} == {2}
    assert tokens_of(events) == list(answer.outputs[0].token_ids) == list(plain.outputs[0].token_ids)
    assert not plain.prompt_logprobs


async def test_end_of_sequence_ends_the_output_and_has_no_text() -> None:
    async with running(runner=FakeRunner(SLOTS, next_token=script("hello", prompt_length=3)), trust=True) as server:
        answer = await server.generation.Generate(generate_request())
    (output,) = answer.outputs
    assert (output.text, output.finish_reason) == ("hello", pb.FINISH_REASON_END_OF_SEQUENCE)
    assert output.token_ids[-1] == EOS


@pytest.mark.parametrize(
    ("stopping", "text", "matched"),
    [
        ({"stop": ["zz", "ll"]}, "he", pb.MatchedStop(text="ll")),
        ({"stop": ["ll"], "include_stop_in_output": True}, "hell", pb.MatchedStop(text="ll")),
        ({"stop_token_ids": spell("l")}, "he", pb.MatchedStop(token_id=spell("l")[0])),
    ],
)
async def test_stop_ends_the_output_and_is_named(stopping: dict[str, Any], text: str, matched: pb.MatchedStop) -> None:
    async with running(runner=FakeRunner(SLOTS, next_token=script("hello", prompt_length=3)), trust=True) as server:
        events = await read(server.stream(**stopping))
    assert text_of(events) == text
    assert events[-2].finished.finish_reason == pb.FINISH_REASON_STOP
    assert events[-2].finished.matched_stop == matched


async def test_max_tokens_is_cut_to_the_room_in_the_context() -> None:
    async with running([served_model(context=8)]) as server:
        (output,) = (await server.generation.Generate(generate_request(max_tokens=100))).outputs
    assert len(output.token_ids) == 8 - len(PROMPT)
    assert output.finish_reason == pb.FINISH_REASON_LENGTH


async def test_rules_hold_over_the_wire_and_leave_logprobs_as_they_are() -> None:
    allowed = [EOS, *spell("abcde")]
    rules = {"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.25, "logit_bias": {5: -100.0}}
    sampling = pb.SamplingParams(temperature=1.0, seed=3, allowed_token_ids=allowed, **rules)
    fields: dict[str, Any] = {"sampling": sampling, "max_tokens": 12, "response": pb.ResponseOptions(logprobs=1)}
    async with running() as server:
        alone = await read(server.stream(min_tokens=12, **fields))
        crowd = await asyncio.gather(*(read(server.stream(min_tokens=12, **fields)) for _ in range(SLOTS)))
    tokens = tokens_of(alone)
    assert len(tokens) == 12
    assert set(tokens) <= set(allowed) - {5, EOS}
    assert {tuple(tokens_of(events)) for events in crowd} == {tuple(tokens)}
    logprobs = [each for event in alone for each in event.delta.logprobs]
    # The model's own favourite, which the rules may not allow.
    favourites = [int(noise((), [*PROMPT, *tokens[:count]]).argmax()) for count in range(12)]
    assert [each.top[0].token_id for each in logprobs] == favourites
    assert set(favourites) - set(allowed)


async def test_arrays_of_a_requests_rules_are_made_once_and_on_no_thread_that_others_wait_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They may be as long as the vocabulary: neither the engine thread makes them nor the event loop."""
    makers: list[str] = []

    def int64s(token_ids: Sequence[int]) -> logits.Int64:
        if len(token_ids) == VOCAB_SIZE:
            makers.append(threading.current_thread().name)
        return make(token_ids)

    make = logits._int64s
    monkeypatch.setattr(logits, "_int64s", int64s)
    sampling = pb.SamplingParams(temperature=1.0, seed=3, n=SLOTS, allowed_token_ids=range(VOCAB_SIZE))
    async with running() as server:
        await server.generation.Generate(generate_request(sampling=sampling, max_tokens=4))
    assert len(makers) == 1
    assert makers[0] not in ("engine", threading.main_thread().name)


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
        assert await server.until_ended(64) == {"cancelled": 32, "length": 32}
        handled = {"grpc_method": "GenerateStream", "grpc_code": "CANCELLED"}
        await eventually(lambda: server.metric("grpc_server_handled_total", **handled) == 32)


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
        assert await server.until_ended(1) == {"deadline": 1}
    assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    tokens = tokens_of(events)
    assert 0 < len(tokens) < 500
    assert tokens == expected_tokens(PROMPT, len(tokens))
    assert "summary" not in kinds(events)


async def test_deadline_of_the_call_frees_what_it_held() -> None:
    gate = Gate()
    runner = FakeRunner(SLOTS, before_run=gate)
    async with running([served_model(context=512)], runner=runner, admission=Admission.OFF) as server:
        handled = {"grpc_method": "GenerateStream", "grpc_code": "DEADLINE_EXCEEDED"}
        with gate.closed():
            await expire(
                lambda timeout: server.generation.GenerateStream(stream_request(max_tokens=500), timeout=timeout),
                lambda: server.metric("grpc_server_handled_total", **handled) > 0 and server.num_streams > 0,
            )
        ended = await server.until_idle()
    # Whichever comes first: the handler that lets go of it, or the engine that looks at the clock.
    assert ended
    assert set(ended) <= {"cancelled", "deadline"}


async def test_request_is_queued_before_it_is_accepted() -> None:
    gate = Gate()
    runner = FakeRunner(SLOTS, before_run=gate)
    async with running(runner=runner) as server:
        with gate.closed():
            verified = len(runner.batches)
            # Nobody reads: what runs was not waiting for that.
            call = server.stream(max_tokens=2)
            await eventually(lambda: len(runner.batches) > verified)
        assert kinds(await read(call))[-1] == "summary"


async def test_refusals_are_counted_once_under_their_errors_label() -> None:
    gate = Gate()
    async with running(runner=FakeRunner(SLOTS, before_run=gate), max_queue_size=0) as server:
        for fields in (
            {"text": ""},
            {"max_tokens": 0},
            {"text": "a" * 64},
            {"text": None, "chat": pb.Chat(messages=[pb.ChatMessage(role="user", content="a")])},
            {"model": "nobody"},
        ):
            await status_of(server.stream(**fields))
        with gate.closed():
            held = [await read_accepted(server.stream(max_tokens=2)) for _ in range(SLOTS)]
            await status_of(server.stream())
        for call in held:
            await read(call)
        ended = server.ended()
    assert ended == {
        "invalid_request": 2, "prompt_too_long": 1, "unsupported_feature": 1, "overloaded": 1, "length": SLOTS
    }  # fmt: skip


async def test_every_request_ends_with_one_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "service.runtime.model_queue"):
        async with running() as server:
            await read(server.stream(request_id="mine", max_tokens=5))
            await status_of(server.stream("a" * 64, request_id="too long"))
    lines = [record.getMessage() for record in caplog.records if record.name == "service.runtime.model_queue"]
    assert lines[0].startswith(f"request mine of {MODEL}: length, 3 prompt and 5 generated tokens, ")
    assert lines[1:] == [f"request too long of {MODEL}: prompt_too_long"]


async def test_answer_that_no_message_can_hold_is_refused_and_counted_so() -> None:
    async with running([served_model(context=2000)], max_message_bytes=1024) as server:
        request = generate_request(max_tokens=1000)
        error = await status_of(server.generation.Generate(request))
        handled = {"grpc_method": "Generate", "grpc_code": "OUT_OF_RANGE"}
        assert server.metric("grpc_server_handled_total", **handled) == 1
        assert kinds(await read(server.stream(max_tokens=1000)))[-1] == "summary"
    assert error.code() is grpc.StatusCode.OUT_OF_RANGE
    assert "at most 1024; ask for less or stream it" in str(error.details())


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


async def test_tokenize_and_detokenize_are_bounded() -> None:
    limits = RequestLimits(max_tokenize_bytes=5, max_detokenize_tokens=2)
    async with running(limits=limits) as server:
        text = await status_of(server.generation.Tokenize(pb.TokenizeRequest(text="aaaaé")))
        ids = await status_of(server.generation.Detokenize(pb.DetokenizeRequest(token_ids=[3, 4, 5])))
    assert text.code() is ids.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert text.details() == "text: must have at most 5 bytes, got 6"
    assert ids.details() == "token_ids: must have at most 2 entries, got 3"
