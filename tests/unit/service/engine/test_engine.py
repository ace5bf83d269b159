"""The engine over a fake model: tokens, text, ends, failures and statistics of requests."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from model.spec.golden import Tolerance
from service.engine.batch import PrefillChunk, ScheduledBatch
from service.engine.logits import LogitsRules, make_rules
from service.engine.sampling.text import TextStream
from service.engine.scheduler import EngineLimits
from service.engine.types import FinishReason, SamplingParams, StepStats, StoppingParams
from service.errors import EngineFailed, InvalidRequest, PromptTooLong
from tests.fakes import (
    BOS,
    CONTEXT,
    EOS,
    NUM_SPECIAL,
    VOCAB_SIZE,
    FakeRunner,
    drain,
    events_of,
    expected_tokens,
    fake_engine,
    letters,
    noise,
    request,
    script,
    spell,
    tokens_of,
)

FAMILIES = pytest.mark.parametrize("encoder_decoder", [False, True], ids=["decoder-only", "encoder-decoder"])


@pytest.mark.parametrize("prefix_length", [1, 2, 9, CONTEXT - 2])
def test_engine_output_continues_its_target_prefix(prefix_length: int) -> None:
    prefix = [3 + i % 20 for i in range(prefix_length)]
    engine = fake_engine(encoder_decoder=True)
    engine.add_request(request("a", [7, 8], max_tokens=5, target_prefix=prefix))
    outputs = drain(engine)
    count = min(5, CONTEXT - 1 - prefix_length)
    assert tokens_of(outputs, "a") == expected_tokens([7, 8], count, encoder_decoder=True, target_prefix=prefix)
    assert events_of(outputs, "a")[-1].finish_reason is FinishReason.LENGTH


def test_engine_refuses_target_prefixes_that_leave_no_room_or_have_no_place() -> None:
    with pytest.raises(PromptTooLong, match=f"target_prefix: must have at most {CONTEXT - 2} tokens"):
        fake_engine(encoder_decoder=True).add_request(request("a", target_prefix=[5] * (CONTEXT - 1)))
    with pytest.raises(InvalidRequest, match="target_prefix: must be empty"):
        fake_engine().add_request(request("a", target_prefix=[5]))


def test_engine_target_prefix_is_no_part_of_the_output_to_stops_and_min_tokens() -> None:
    runner = FakeRunner(next_token=script("abcab", prompt_length=4))
    engine = fake_engine(runner, encoder_decoder=True)
    stopping = StoppingParams(max_tokens=9, min_tokens=3, stop=("ba", "ab"))
    engine.add_request(request("a", stopping=stopping, target_prefix=spell("xab")))
    events = events_of(drain(engine), "a")
    assert "".join(event.text or "" for event in events) == "abc"
    assert (events[-1].finish_reason, events[-1].matched_stop) == (FinishReason.STOP, "ab")


def test_engine_repetition_penalty_counts_the_target_prefix_and_the_others_do_not() -> None:
    # After this prefix the model's favourite is one of its tokens: seen, but not generated.
    prefix, favourite = next(
        (prefix, best)
        for prefix in itertools.product(range(NUM_SPECIAL, VOCAB_SIZE), repeat=2)
        if (best := expected_tokens([5], 1, encoder_decoder=True, target_prefix=prefix))[0] in prefix
    )
    tokens = {}
    for penalty in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        engine = fake_engine(encoder_decoder=True)
        sampling = SamplingParams(temperature=0.0, **{penalty: 2.0})
        engine.add_request(request("a", [5], max_tokens=1, sampling=sampling, target_prefix=prefix))
        tokens[penalty] = tokens_of(drain(engine), "a")
    assert tokens["presence_penalty"] == tokens["frequency_penalty"] == favourite
    assert tokens["repetition_penalty"] != favourite


def test_engine_unseeded_requests_differ() -> None:
    engine = fake_engine()
    for name in "ab":
        engine.add_request(request(name, [5], max_tokens=20, sampling=SamplingParams()))
    outputs = drain(engine)
    assert tokens_of(outputs, "a") != tokens_of(outputs, "b")


@pytest.mark.parametrize(("include", "text"), [(False, "on"), (True, "onward")])
def test_engine_stop_string_ends_the_output(include: bool, text: str) -> None:
    engine = fake_engine(FakeRunner(next_token=script("onwardandup")))
    stopping = StoppingParams(max_tokens=30, stop=("up", "ward"), include_stop_in_output=include)
    engine.add_request(request("a", stopping=stopping))
    events = events_of(drain(engine), "a")
    assert "".join(event.text or "" for event in events) == text
    assert (events[-1].finish_reason, events[-1].matched_stop) == (FinishReason.STOP, "ward")


@FAMILIES
@pytest.mark.parametrize("ignore_eos", [False, True])
def test_engine_no_end_of_sequence_and_no_stop_token_comes_before_min_tokens(
    encoder_decoder: bool, ignore_eos: bool
) -> None:
    (stop_id,) = spell("i")
    stopping = StoppingParams(max_tokens=9, min_tokens=5, stop_token_ids=frozenset({stop_id}), ignore_eos=ignore_eos)
    # A model that wants to end from its second token on.
    runner = FakeRunner(next_token=script("h"))
    engine = fake_engine(runner, encoder_decoder=encoder_decoder)
    engine.add_request(request("a", stopping=stopping))
    outputs = drain(engine)
    tokens = tokens_of(outputs, "a")
    assert not {EOS, stop_id} & set(tokens[:5])
    assert tokens[5] == EOS
    reason = FinishReason.LENGTH if ignore_eos else FinishReason.END_OF_SEQUENCE
    assert (len(tokens), events_of(outputs, "a")[-1].finish_reason) == (9 if ignore_eos else 6, reason)


@pytest.mark.parametrize(
    ("min_tokens", "text"), [(0, "on"), (5, "on"), (6, "onwardand"), (12, "onwardand"), (13, "onwardandwardup")]
)
def test_engine_stop_string_counts_when_it_ends_after_min_tokens(min_tokens: int, text: str) -> None:
    engine = fake_engine(FakeRunner(next_token=script("onwardandwardup")))
    engine.add_request(request("a", stopping=StoppingParams(max_tokens=15, min_tokens=min_tokens, stop=("ward",))))
    events = events_of(drain(engine), "a")
    assert "".join(event.text or "" for event in events) == text


def test_engine_min_tokens_beyond_the_context_end_with_it() -> None:
    engine = fake_engine(FakeRunner(next_token=script("h")))
    engine.add_request(request("a", range(3, 23), stopping=StoppingParams(max_tokens=1000, min_tokens=1000)))
    outputs = drain(engine)
    assert len(tokens_of(outputs, "a")) == CONTEXT - 20
    assert events_of(outputs, "a")[-1].finish_reason is FinishReason.LENGTH


@FAMILIES
def test_engine_tokens_under_rules_do_not_depend_on_company(encoder_decoder: bool) -> None:
    """Greedy and sampled, each rule by itself and all together."""
    rules: list[dict[str, Any]] = [
        {"repetition_penalty": 1.5},
        {"presence_penalty": 1.5},
        {"frequency_penalty": -0.5},
        {"logit_bias": ((3, 2.0), (9, -3.0))},
        {"allowed_token_ids": (2, 5, 7, 11)},
        {"repetition_penalty": 0.8, "frequency_penalty": 0.5, "allowed_token_ids": tuple(range(2, 20))},
        {},
    ]
    stopping = StoppingParams(max_tokens=12, min_tokens=6, stop_token_ids=frozenset({7}))
    wanted = [
        request(f"r{i}", range(3, 5 + 3 * i), sampling=sampling, stopping=stopping)
        for i, rule in enumerate(rules)
        for sampling in (SamplingParams(temperature=1.3, seed=i, **rule),)
    ]
    wanted += [
        replace(each, request_id=f"greedy-{each.request_id}", sampling=replace(each.sampling, temperature=0.0))
        for each in wanted
    ]
    alone = {}
    for each in wanted:
        engine = fake_engine(encoder_decoder=encoder_decoder)
        engine.add_request(each)
        alone[each.request_id] = tokens_of(drain(engine), each.request_id)
    crowded = fake_engine(encoder_decoder=encoder_decoder)
    outputs = []
    for each in wanted:
        crowded.add_request(each)
        outputs.append(crowded.step())
    outputs += drain(crowded)
    assert {each.request_id: tokens_of(outputs, each.request_id) for each in wanted} == alone
    assert len({tuple(tokens) for tokens in alone.values()}) > len(rules)


def test_engine_rules_are_made_once_for_all_outputs_and_not_to_look_up_what_is_cached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They may name all of a vocabulary and of a prompt, and the engine thread holds every other request up with it."""
    made: list[LogitsRules | None] = []

    def make(*arguments: Any) -> LogitsRules | None:
        made.append(make_rules(*arguments))
        return made[-1]

    monkeypatch.setattr("service.engine.queueing.intake.make_rules", make)
    engine, prompt = fake_engine(), range(3, 23)
    sampling = SamplingParams(
        seed=3, n=4, repetition_penalty=1.5, presence_penalty=1.0, allowed_token_ids=tuple(range(3, 30))
    )
    engine.add_request(request("four", prompt, max_tokens=12, sampling=sampling))
    assert len(made) == 1
    four = drain(engine)
    asked = request("three", prompt, max_tokens=12, sampling=replace(sampling, n=3))
    assert engine.num_cached_tokens(asked) == 16
    assert len(made) == 1
    # Each output has a history of its own: it is the same whatever the others say.
    engine.add_request(asked)
    three = drain(engine)
    of_four = [tokens_of(four, "four", index) for index in range(4)]
    assert [tokens_of(three, "three", index) for index in range(3)] == of_four[:3]
    assert len(set(map(tuple, of_four))) == 4


@pytest.mark.parametrize("penalty", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
@FAMILIES
def test_engine_penalties_see_the_output_and_repetition_the_prompt_too(encoder_decoder: bool, penalty: str) -> None:
    """A source is no prompt in this sense, nor is the start token that precedes an encoder-decoder's output."""
    prompt = [20, 21, 21]
    source, tokens = (prompt, [BOS]) if encoder_decoder else ([], list(prompt))
    seen = set(prompt) if penalty == "repetition_penalty" and not encoder_decoder else set()
    generated: list[int] = []
    for _ in range(20):
        logits = noise(source, tokens).astype(np.float64)
        for token_id in seen | set(generated):
            if penalty == "repetition_penalty":
                logits[token_id] *= 0.5 if logits[token_id] > 0 else 2
            else:
                logits[token_id] -= 2 * (generated.count(token_id) if penalty == "frequency_penalty" else 1)
        generated.append(int(logits.argmax()))
        tokens.append(generated[-1])
    engine = fake_engine(encoder_decoder=encoder_decoder)
    sampling = SamplingParams(temperature=0.0, **{penalty: 2.0})
    engine.add_request(request("a", prompt, max_tokens=20, sampling=sampling))
    assert tokens_of(drain(engine), "a") == generated
    assert generated != expected_tokens(prompt, 20, encoder_decoder=encoder_decoder)


@pytest.mark.parametrize(("include", "text"), [(False, "on"), (True, "onw")])
def test_engine_stop_token_ends_the_output_and_its_text_is_optional(include: bool, text: str) -> None:
    (stop_id,) = spell("w")
    engine = fake_engine(FakeRunner(next_token=script("onward")))
    stopping = StoppingParams(stop=("zzz",), stop_token_ids=frozenset({stop_id}), include_stop_in_output=include)
    engine.add_request(request("a", stopping=stopping))
    events = events_of(drain(engine), "a")
    assert "".join(event.text or "" for event in events) == text
    assert (events[-1].finish_reason, events[-1].matched_stop) == (FinishReason.STOP, stop_id)
    assert events[-1].token_id == stop_id


def test_engine_text_held_back_for_a_stop_string_comes_with_the_last_token() -> None:
    engine = fake_engine(FakeRunner(next_token=script("abcd")))
    engine.add_request(request("a", stopping=StoppingParams(max_tokens=3, stop=("cx",))))
    assert [event.text for event in events_of(drain(engine), "a")] == ["a", "b", "c"]


def test_engine_logprobs_come_with_every_token_where_asked() -> None:
    engine = fake_engine()
    engine.add_request(request("a", logprobs=2))
    engine.add_request(request("b"))
    outputs = drain(engine)
    for event in events_of(outputs, "a"):
        assert event.logprobs is not None
        assert event.logprobs.top_token_ids[0] == event.token_id
        assert event.logprobs.top_logprobs[0] == event.logprobs.logprob
        assert len(event.logprobs.top_token_ids) == 2
    assert all(event.logprobs is None for event in events_of(outputs, "b"))


def test_engine_aborted_while_waiting_never_runs() -> None:
    engine = fake_engine()
    engine.add_request(request("a"))
    engine.abort("a")
    (event,) = engine.step().events
    assert event.finish_reason is FinishReason.CANCELLED
    assert event.timings is not None
    assert event.timings.scheduled_time is None
    assert not engine.has_work


def test_engine_abort_of_an_unknown_or_finished_request_is_ignored() -> None:
    engine = fake_engine()
    engine.abort("unknown")
    assert not engine.has_work
    engine.add_request(request("a", max_tokens=1))
    engine.step()
    engine.abort("a")
    idle = engine.step()
    assert (idle.events, idle.stats.num_tokens) == ((), 0)


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_engine_deadline_ends_a_request_at_the_next_step(steps: int) -> None:
    now = 10.0
    engine = fake_engine(clock=lambda: now)
    engine.add_request(request("a", range(3, 23), max_tokens=30, deadline=11.0))
    for _ in range(steps):
        engine.step()
    now = 11.0
    (event,) = engine.step().events
    assert event.finish_reason is FinishReason.DEADLINE
    assert event.timings is not None
    assert event.timings.finished_time == 11.0
    assert engine.num_running == 0


@pytest.mark.parametrize(
    ("prompt", "kind"), [((), InvalidRequest), (range(3, 3 + CONTEXT), PromptTooLong)], ids=["empty", "whole-context"]
)
def test_engine_refuses_prompts_that_leave_no_room(prompt: range, kind: type[Exception]) -> None:
    engine = fake_engine()
    with pytest.raises(kind):
        engine.add_request(request("a", prompt))
    assert not engine.has_work


def test_engine_refuses_an_id_in_use_until_it_is_free() -> None:
    engine = fake_engine()
    engine.add_request(request("a", max_tokens=1))
    with pytest.raises(InvalidRequest, match="request_id"):
        engine.add_request(request("a"))
    engine.step()
    engine.add_request(request("a"))


def test_engine_failed_step_ends_its_requests_and_the_next_ones_are_right(caplog: pytest.LogCaptureFixture) -> None:
    failing = True

    def fail(batch: ScheduledBatch) -> None:
        if failing and batch.samples:
            raise RuntimeError("secret detail")

    engine = fake_engine(
        FakeRunner(2, before_run=fail), limits=EngineLimits(max_batch_size=2, prefill_chunk=8, max_prefill_tokens=8)
    )
    for name in "abc":
        engine.add_request(request(name, max_tokens=3))
    with caplog.at_level(logging.ERROR):
        output = engine.step()
    events, stats = output.events, output.stats
    assert [event.request_id for event in events] == ["a", "b"]
    errors = [event.error for event in events]
    assert all(isinstance(error, EngineFailed) for error in errors)
    assert errors[0] is not errors[1], "raised twice, one error would carry both tracebacks"
    assert str(errors[0]) == str(errors[1])
    assert str(errors[0]) == f"internal error {output.error_id}"
    assert "a step failed with requests a, b" in caplog.text
    assert (stats.num_rows, stats.num_tokens, stats.num_padding_tokens, stats.run_seconds) == (0, 0, 0, 0.0)
    assert stats.host_seconds is None
    assert (stats.num_running, stats.num_waiting) == (0, 1)
    assert "secret" not in str(errors[0])
    assert str(errors[0]).split()[-1] in caplog.text
    assert "secret detail" in caplog.text
    failing = False
    engine.add_request(request("d", max_tokens=3))
    outputs = drain(engine)
    assert tokens_of(outputs, "c") == tokens_of(outputs, "d") == expected_tokens([5], 3)


@FAMILIES
def test_engine_text_that_cannot_be_made_fails_only_its_request(
    encoder_decoder: bool, caplog: pytest.LogCaptureFixture
) -> None:
    prompts = {name: range(3, 3 + length) for name, length in {"a": 2, "bad": 5, "c": 11, "d": 1}.items()}
    expected = {name: expected_tokens(prompt, 6, encoder_decoder=encoder_decoder) for name, prompt in prompts.items()}
    num_decodes = 0

    def decode(token_ids: Sequence[int]) -> str:
        nonlocal num_decodes
        num_decodes += 1
        if num_decodes > 4:
            raise ValueError("cannot decode")
        return letters(token_ids)

    engine = fake_engine(encoder_decoder=encoder_decoder, decode=decode)
    for name, prompt in prompts.items():
        stop = ("never",) if name == "bad" else ()
        engine.add_request(request(name, prompt, stopping=StoppingParams(max_tokens=6, stop=stop)))
    outputs = drain(engine)
    *sound, failed = events_of(outputs, "bad")
    assert isinstance(failed.error, EngineFailed)
    assert failed.timings is not None
    assert sound
    assert [event.token_id for event in sound] == expected["bad"][: len(sound)]
    assert f"{failed.error.error_id}: request bad:" in caplog.text
    assert "cannot decode" in caplog.text
    for name in prompts.keys() - {"bad"}:
        assert tokens_of(outputs, name) == expected[name]


def test_engine_text_that_cannot_be_flushed_fails_the_request_that_leaves_and_nobody_else() -> None:
    class Broken(TextStream):
        def flush(self) -> str:
            raise ValueError("cannot flush")

    engine = fake_engine()
    engine.add_request(request("a", stopping=StoppingParams(stop=("never",))))
    engine.add_request(request("b", max_tokens=5))
    (group, _) = engine._scheduler._tenants
    group.sequences[0].text = Broken(letters, ("never",))
    outputs = [engine.step()]
    engine.abort("a")
    outputs += drain(engine)
    assert isinstance(events_of(outputs, "a")[-1].error, EngineFailed)
    assert tokens_of(outputs, "b") == expected_tokens([5], 5)


def test_engine_non_finite_logits_fail_only_their_sequence(caplog: pytest.LogCaptureFixture) -> None:
    runner = FakeRunner()
    runner.poisoned_tokens = {9}
    engine = fake_engine(runner)
    engine.add_request(request("a", [4, 5], max_tokens=1))
    engine.add_request(request("bad", [9, 5], max_tokens=1))
    engine.add_request(request("c", [6, 5], max_tokens=1))
    outputs = drain(engine)
    (failed,) = events_of(outputs, "bad")
    assert isinstance(failed.error, EngineFailed)
    assert f"{failed.error.error_id}: request bad: its logits are not finite" in caplog.text
    assert failed.finish_reason is None
    assert failed.timings is not None
    for name, prompt in {"a": [4, 5], "c": [6, 5]}.items():
        assert tokens_of(outputs, name) == expected_tokens(prompt, 1)


def test_engine_stats_count_work_and_padding() -> None:
    ticks = iter(float(i) for i in range(1000))
    engine = fake_engine(encoder_decoder=True, clock=lambda: next(ticks))
    engine.add_request(request("a", range(3, 8)))
    stats = engine.step().stats
    assert (stats.num_rows, stats.num_tokens, stats.num_padding_tokens) == (1, 5 + 1, 16 - 5)
    # Spoken for are the padded source, the start token and four to generate, of four slots with two contexts each.
    assert (stats.num_running, stats.num_waiting, stats.kv_usage_ratio) == (1, 0, (16 + 1 + 4) / (4 * 2 * CONTEXT))
    assert stats.run_seconds == 1.0


def lower_triangle(queries: range) -> int:
    return sum(1 for query in queries for key in range(queries.stop) if key <= query)


@FAMILIES
def test_engine_stats_count_every_pair_that_a_mask_lets_meet(encoder_decoder: bool) -> None:
    runner = FakeRunner()
    limits = EngineLimits(max_batch_size=4, prefill_chunk=8, max_prefill_tokens=32)
    engine = fake_engine(runner, encoder_decoder=encoder_decoder, limits=limits)
    outputs = []
    # Beginnings of 2 to 8 tokens are computed in groups, whole chunks and what follows them alone, single tokens with
    # those that decode; the last two prompts have a beginning in common.
    for index, length in enumerate([6, 5, 20, 3, 1, 9, 5, 40, 40]):
        prompt, sampling = range(3, 3 + length), SamplingParams(temperature=0.0, n=1 + index % 2)
        engine.add_request(request(f"r{index}", prompt, max_tokens=2 + index % 4, sampling=sampling))
        if index % 3 == 2:
            outputs.append(engine.step())
    outputs += drain(engine)
    assert len(runner.batches) == len(outputs)
    for output, batch in zip(outputs, runner.batches, strict=True):
        stats = output.stats
        prompts = [range(len(row.token_ids)) for group in batch.prefill_groups for row in group.rows]
        prompts += [range(chunk.start, chunk.start + len(chunk.token_ids)) for chunk in batch.prefills]
        assert stats.num_prefill_runs == len(batch.prefill_groups) + len(batch.prefills)
        assert stats.num_prefill_tokens == sum(map(len, prompts))
        assert stats.num_prefill_pairs == sum(map(lower_triangle, prompts))
        rows = [row for row in batch.decode if not row.is_padding]
        assert stats.num_decode_rows == len(rows)
        fed = [(range(row.position, row.position + 1), row.source_length) for row in rows]
        assert stats.num_decode_pairs == sum(lower_triangle(queries) + length for queries, length in fed)
        sources = [row.token_ids for group in batch.encodes for row in group.rows]
        assert stats.num_encoder_runs == len(batch.encodes)
        assert stats.num_encoder_tokens == sum(map(len, sources))
        assert stats.num_encoder_pairs == sum(1 for source in sources for _ in source for _ in source)
        work = stats.num_prefill_tokens + stats.num_decode_rows + stats.num_encoder_tokens
        assert work == stats.num_tokens
    kinds = {name for name in StepStats.__slots__ if any(getattr(output.stats, name) for output in outputs)}
    absent = {f"num_{'prefill' if encoder_decoder else 'encoder'}_{each}" for each in ("runs", "tokens", "pairs")}
    assert kinds & absent == set()
    assert any(len(group.rows) > 1 for batch in runner.batches for group in (*batch.prefill_groups, *batch.encodes))


@pytest.mark.parametrize("include", [False, True])
def test_engine_reports_which_token_has_no_text(include: bool) -> None:
    (stop_id,) = spell("w")
    engine = fake_engine(FakeRunner(next_token=script("onward")))
    stopping = StoppingParams(stop_token_ids=frozenset({stop_id}), include_stop_in_output=include)
    engine.add_request(request("a", stopping=stopping))
    assert [event.is_mute for event in events_of(drain(engine), "a")] == [False, False, not include]
    engine = fake_engine(FakeRunner(next_token=script("o")))
    engine.add_request(request("a"))
    assert [event.is_mute for event in events_of(drain(engine), "a")] == [False, True]


def test_engine_golden_replay_needs_an_idle_engine() -> None:
    engine = fake_engine()
    engine.add_request(request("a"))
    with pytest.raises(RuntimeError, match="idle"):
        engine.verify_golden((), Tolerance())


def test_engine_golden_replay_leaves_nothing_that_was_kept_before() -> None:
    """A chunk that is still to be saved would be saved from a row that the replay has written to."""
    runner = FakeRunner()
    engine = fake_engine(runner)
    prompt = range(3, 3 + 20)
    engine.add_request(request("a", prompt, max_tokens=1))
    drain(engine)
    engine.verify_golden((), Tolerance())
    runner.run(ScheduledBatch(prefills=(PrefillChunk(0, 0, (9,) * 24),)))
    engine.add_request(request("b", prompt, max_tokens=3))
    outputs = drain(engine)
    assert tokens_of(outputs, "b") == expected_tokens(prompt, 3)
    assert events_of(outputs, "b")[-1].num_cached_tokens == 0
