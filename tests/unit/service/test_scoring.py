"""Scoring given text: the engine's answers on a fake model, requests as tasks, totals of scores."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from service.engine.sampling.sampler import compute_logprobs
from service.engine.types import FinishReason, PromptScoring, StepOutput, StoppingParams, TokenLogprobs
from service.errors import EngineFailed, InvalidRequest, PromptTooLong
from service.scoring import Score, Text, make_task
from tests.fakes import (
    BOS,
    CONTEXT,
    EOS,
    FakeRunner,
    drain,
    events_of,
    expected_tokens,
    fake_engine,
    noise,
    request,
    spell,
    tokens_of,
)
from tests.servers import served_model

FAMILIES = pytest.mark.parametrize("encoder_decoder", [False, True], ids=["decoder-only", "encoder-decoder"])
NOTHING = StoppingParams(max_tokens=0)
SOURCE = (7, 8, 9)
# Lengths, and where scoring starts: at both sides of the edges of chunks of eight.
EDGES = (
    *((2, (1,)), (3, (2,)), (8, (1, 7)), (9, (8,)), (10, (9,)), (16, (8,)), (17, (1, 15, 16)), (18, (8, 17))),
    *((40, (1, 9, 16, 17)), (CONTEXT, (1, 15))),
)


def some_tokens(count: int, salt: int = 0) -> list[int]:
    return [3 + (salt + 7 * i + i * i) % 29 for i in range(count)]


def scores_of(outputs: Sequence[StepOutput], request_id: str) -> list[TokenLogprobs]:
    return [each for event in events_of(outputs, request_id) for each in event.prompt_logprobs]


def by_definition(source: Sequence[int], tokens: Sequence[int], scoring: PromptScoring) -> list[TokenLogprobs]:
    """Each token after the logits of all before it, computed one by one."""
    return [
        compute_logprobs(noise(source, tokens[:at]), tokens[at], scoring.num_top)
        for at in range(scoring.start, len(tokens))
    ]


@FAMILIES
@pytest.mark.parametrize(("length", "start"), [(length, each) for length, starts in EDGES for each in starts])
def test_scores_are_the_models_independent_of_chunks(encoder_decoder: bool, length: int, start: int) -> None:
    """`length` counts all that the decoder is given: its start token, too."""
    scoring = PromptScoring(num_top=2, start=start)
    tokens = [BOS, *some_tokens(length - 1)]
    engine = fake_engine(encoder_decoder=encoder_decoder)
    if encoder_decoder:
        engine.add_request(request("a", SOURCE, stopping=NOTHING, target_prefix=tokens[1:], scoring=scoring))
    else:
        engine.add_request(request("a", tokens, stopping=NOTHING, scoring=scoring))
    outputs = drain(engine)
    assert scores_of(outputs, "a") == by_definition(SOURCE if encoder_decoder else (), tokens, scoring)
    *_, last = events_of(outputs, "a")
    assert (last.finish_reason, last.token_id) == (FinishReason.LENGTH, None)
    assert last.timings is not None
    assert last.timings.first_token_time is None
    assert engine.num_running == 0


@FAMILIES
@pytest.mark.parametrize("length", [1, 2, 8, 9, 17, 30])
def test_scored_prompt_comes_before_its_continuation_which_is_the_same(encoder_decoder: bool, length: int) -> None:
    given = some_tokens(length)
    scoring = PromptScoring(num_top=1)
    engine = fake_engine(encoder_decoder=encoder_decoder)
    prompt, prefix, tokens = (SOURCE, given, [BOS, *given]) if encoder_decoder else (given, (), given)
    engine.add_request(request("a", prompt, max_tokens=5, target_prefix=prefix, scoring=scoring))
    outputs = drain(engine)
    assert scores_of(outputs, "a") == by_definition(SOURCE if encoder_decoder else (), tokens, scoring)
    assert tokens_of(outputs, "a") == expected_tokens(prompt, 5, encoder_decoder=encoder_decoder, target_prefix=prefix)
    kinds = [event.token_id is not None for event in events_of(outputs, "a")]
    assert kinds == sorted(kinds)


@pytest.mark.parametrize("max_tokens", [0, 3])
@pytest.mark.parametrize("bad", [[*some_tokens(10), 9, *some_tokens(10)], [4, 9, 5]], ids=["long", "in one step"])
def test_scores_of_logits_that_are_not_finite_fail_their_request_alone(max_tokens: int, bad: list[int]) -> None:
    runner = FakeRunner()
    runner.poisoned_tokens = {9}
    engine = fake_engine(runner)
    stopping = StoppingParams(max_tokens=max_tokens)
    for name, prompt in {"bad": bad, "good": [4, 5, 6]}.items():
        engine.add_request(request(name, prompt, stopping=stopping, scoring=PromptScoring()))
    outputs = drain(engine)
    *sound, failed = events_of(outputs, "bad")
    assert isinstance(failed.error, EngineFailed)
    assert not any(event.is_terminal for event in sound)
    assert scores_of(outputs, "good") == by_definition((), [4, 5, 6], PromptScoring())
    assert events_of(outputs, "good")[-1].finish_reason is FinishReason.LENGTH


def test_scoring_can_be_aborted_between_chunks() -> None:
    engine = fake_engine()
    engine.add_request(request("a", some_tokens(40), stopping=NOTHING, scoring=PromptScoring()))
    outputs = [engine.step()]
    engine.abort("a")
    outputs += drain(engine)
    assert 0 < len(scores_of(outputs, "a")) < 39
    assert [event.finish_reason for event in events_of(outputs, "a")] == [None, None, FinishReason.CANCELLED]


@pytest.mark.parametrize(
    ("prompt", "stopping", "scoring", "field"),
    [
        ([5, 6], NOTHING, None, "stopping.max_tokens"),
        ([5], NOTHING, PromptScoring(), "scoring.start"),
        ([5, 6], NOTHING, PromptScoring(start=0), "scoring.start"),
        ([5, 6], NOTHING, PromptScoring(start=2), "scoring.start"),
        ([5] * (CONTEXT + 1), NOTHING, PromptScoring(), "prompt"),
        ([5] * CONTEXT, StoppingParams(max_tokens=1), PromptScoring(), "prompt"),
    ],
)
def test_engine_refuses_to_score_nothing_and_what_has_no_room(
    prompt: list[int], stopping: StoppingParams, scoring: PromptScoring | None, field: str
) -> None:
    engine = fake_engine()
    with pytest.raises(InvalidRequest) as refusal:
        engine.add_request(request("a", prompt, stopping=stopping, scoring=scoring))
    assert refusal.value.field == field
    assert not engine.has_work


@pytest.mark.parametrize(
    ("prompt", "target", "given", "start", "scored", "num_bytes"),
    [
        ("abc", None, (BOS, *spell("abc")), 1, spell("abc"), 3),
        ((5, 6, 7), None, (5, 6, 7), 1, (6, 7), 2),
        ("ab", "cd", (BOS, *spell("abcd")), 3, spell("cd"), 2),
        ("ab", (*spell("cd"), EOS), (BOS, *spell("abcd"), EOS), 3, (*spell("cd"), EOS), 2),
        # Read as "z" by a tokenizer that knows no more; its two bytes count all the same.
        ("ab", "é", (BOS, *spell("abz")), 3, spell("z"), 2),
    ],
)
def test_task_of_a_decoder_only_model_is_its_prompt_and_target_in_one(
    prompt: Text, target: Text | None, given: tuple[int, ...], start: int, scored: tuple[int, ...], num_bytes: int
) -> None:
    task = make_task(served_model(), prompt, target)
    assert (task.prompt_token_ids, task.target_prefix_token_ids) == (given, ())
    assert (task.start, task.scored_token_ids, task.num_bytes) == (start, scored, num_bytes)


def test_task_of_an_encoder_decoder_is_a_source_and_a_target() -> None:
    task = make_task(served_model(encoder_decoder=True), "ab", "cd")
    assert (task.prompt_token_ids, task.target_prefix_token_ids) == ((*spell("ab"), EOS), spell("cd"))
    assert (task.start, task.scored_token_ids, task.num_bytes) == (1, spell("cd"), 2)


@pytest.mark.parametrize(
    ("encoder_decoder", "prompt", "target", "field", "kind"),
    [
        (True, "ab", None, "target", InvalidRequest),
        (True, "ab", (5,) * CONTEXT, "target.target_token_ids.ids", PromptTooLong),
        (False, (5,), None, "prompt.token_ids.ids", InvalidRequest),
        (False, "a" * CONTEXT, None, "prompt.text", PromptTooLong),
        (False, "ab", "c" * (CONTEXT - 2), "target.target_text", PromptTooLong),
        (False, "ab", (5, 99), "target.target_token_ids.ids[1]", InvalidRequest),
        (False, "a" * CONTEXT, "b", "prompt.text", PromptTooLong),
    ],
)
def test_task_that_cannot_be_done_is_refused_by_its_field(
    encoder_decoder: bool, prompt: Text, target: Text | None, field: str, kind: type[InvalidRequest]
) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        make_task(served_model(encoder_decoder=encoder_decoder), prompt, target)
    assert (refusal.value.field, type(refusal.value)) == (field, kind)


@pytest.mark.parametrize(
    ("encoder_decoder", "prompt", "target", "num_scores"),
    [
        (False, "ab", "c" * (CONTEXT - 3), CONTEXT - 3),
        (True, "ab", "c" * (CONTEXT - 1), CONTEXT - 1),
        # A prompt that is scored itself may fill the context.
        (False, "a" * (CONTEXT - 1), None, CONTEXT - 1),
    ],
)
def test_longest_task_fits_the_engine(encoder_decoder: bool, prompt: str, target: str | None, num_scores: int) -> None:
    task = make_task(served_model(encoder_decoder=encoder_decoder), prompt, target)
    engine = fake_engine(encoder_decoder=encoder_decoder)
    prefix, scoring = task.target_prefix_token_ids, PromptScoring(start=task.start)
    engine.add_request(request("a", task.prompt_token_ids, stopping=NOTHING, target_prefix=prefix, scoring=scoring))
    assert len(scores_of(drain(engine), "a")) == num_scores


def test_score_adds_up() -> None:
    score = Score((1, 2, 3, 4), (math.log(0.5), math.log(0.25), 0.0, math.log(0.5)), num_bytes=8)
    assert score.total_logprob == pytest.approx(math.log(1 / 16))
    assert score.perplexity == pytest.approx(2.0)
    assert score.bits_per_byte == pytest.approx(0.5)
    assert Score((2,), (-1.0,), num_bytes=0).bits_per_byte is None
    assert Score((2,), (-1e6,), num_bytes=1).perplexity == math.inf
