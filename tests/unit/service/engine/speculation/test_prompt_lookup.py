"""Guesses by look-up: what is proposed, that answers stay what they are without, and what must be proven before."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.spec.generation import GenerationRules
from model.spec.golden import Feed, GoldenCase, Tolerance
from service.config import ServeConfig
from service.engine.batch import PrefillChunk, SampleRow, ScheduledBatch
from service.engine.engine import Engine
from service.engine.kv.ledger import KVBudget
from service.engine.proof.chunk_proof import describe_foreign, find_difference
from service.engine.sampling.sampler import Sampler
from service.engine.scheduler import EngineLimits
from service.engine.speculation.prompt_lookup import LookUp
from service.engine.types import (
    BeamSearchParams,
    FinishReason,
    GenerationRequest,
    PromptScoring,
    SamplingParams,
    StepOutput,
    StepStats,
    StoppingParams,
)
from service.errors import StartupError
from service.forecasting.step_times import StepTimes
from service.repository import loading
from tests.environment import ROOT
from tests.fakes import (
    CONTEXT,
    EOS,
    GREEDY,
    VOCAB_SIZE,
    FakeRunner,
    Float32,
    drain,
    events_of,
    fake_engine,
    fake_model,
    request,
    script,
    spell,
    tokens_of,
)
from tests.unit.model.spec.test_cost import decoder_only
from tests.unit.service.engine.proof.test_replay import make_case

LIMITS = EngineLimits(max_batch_size=4, prefill_chunk=8, max_prefill_tokens=16, look_up=4)
PROMPT = (5, 6, 7, 8, 5, 6, 7, 8, 5, 6)


def proposals(token_ids: Sequence[int], longest: int = 8, room: int = 8) -> tuple[int, ...]:
    """A proposal of as many tokens as there may be."""
    look_up = LookUp(longest)
    for _ in range(3):
        look_up.judge(1, 1)
    return look_up.propose(token_ids, room)


def test_three_tokens_are_sought_before_two() -> None:
    assert proposals([1, 2, 3, 9, 0, 7, 2, 3, 8, 0, 1, 2, 3], room=2) == (9, 0)
    assert proposals([1, 2, 3, 9, 0, 7, 2, 3, 8, 0, 4, 2, 3], room=2) == (8, 0)


def test_the_latest_place_decides() -> None:
    assert proposals([1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3], room=2) == (5, 1)


@pytest.mark.parametrize("token_ids", [[], [1], [1, 1], [1, 2, 3, 4, 5, 3], [1, 2, 3, 9, 2, 1, 3]])
def test_nothing_is_proposed_where_nothing_returns(token_ids: list[int]) -> None:
    assert proposals(token_ids) == ()


def test_a_proposal_that_runs_into_the_end_goes_on_from_itself() -> None:
    assert proposals([5, 6, 7, 5, 6, 7, 5, 6]) == (7, 5, 6, 7, 5, 6, 7, 5)
    assert proposals([4, 4, 4], room=3) == (4, 4, 4)


@given(st.lists(st.integers(0, 2), max_size=40))
def test_an_index_that_grows_token_by_token_proposes_what_a_new_one_does(token_ids: list[int]) -> None:
    grown = LookUp(8)
    for _ in range(3):
        grown.judge(1, 1)
    for length in range(len(token_ids) + 1):
        assert grown.propose(token_ids[:length], 8) == proposals(token_ids[:length])


def test_a_long_prompt_is_read_in_parts_whose_proposals_come_as_they_are_read() -> None:
    token_ids = [*range(2500), 2000, 2001, 2002]
    look_up = LookUp(8)
    proposed = [look_up.propose(token_ids, 8) for _ in range(4)]
    assert proposed == [(), (2003, 2004), (2003, 2004), (2003, 2004)]
    late = LookUp(8)
    assert [late.propose([*range(2500), 2400, 2401], 8) for _ in range(3)] == [(), (), (2402, 2403)]


def test_proposals_grow_while_they_hold_and_shrink_to_what_held() -> None:
    look_up, token_ids = LookUp(8), [4] * 9
    lengths = []
    for right in (2, 4, 8, 8, 3, 4, 2):
        lengths.append(len(look_up.propose(token_ids, 99)))
        look_up.judge(lengths[-1], right)
    assert lengths == [2, 4, 8, 8, 8, 4, 8]
    assert len(look_up.propose(token_ids, 99)) == 3
    assert len(LookUp(1).propose(token_ids, 99)) == 1


def test_a_sequence_whose_guesses_fail_guesses_one_token_in_so_many_steps() -> None:
    look_up, token_ids = LookUp(16), [4] * 9
    lengths = []
    for _ in range(1000):
        proposed = look_up.propose(token_ids, 99)
        lengths.append(len(proposed))
        if proposed:
            look_up.judge(len(proposed), 0)
    assert lengths[:8] == [2, 0, 1, 0, 0, 1, 0, 0]
    assert sum(lengths) <= 1000 / 33 + 8
    assert max(lengths[1:]) == 1
    while not (proposed := look_up.propose(token_ids, 99)):
        pass
    look_up.judge(1, 1)
    assert len(look_up.propose(token_ids, 99)) == 2, "one that comes true ends the pauses"


def engine_over(runner: FakeRunner, look_up: int, **options: Any) -> Engine:
    engine = fake_engine(runner, limits=dataclasses.replace(LIMITS, look_up=look_up), **options)
    engine._scheduler.let_guess(is_proven=True)
    return engine


def run(
    asked: GenerationRequest, look_up: int, next_token: Callable[..., int] | None = None, memory: int | None = None
) -> tuple[list[StepOutput], FakeRunner]:
    """One request by itself, from its first step to its last."""
    runner = FakeRunner(next_token=next_token, memory=memory)
    engine = engine_over(runner, look_up)
    engine.add_request(asked)
    outputs = []
    while engine.has_work:
        outputs.append(engine.step())
        engine._scheduler.check_invariants()
    return outputs, runner


def told(outputs: Sequence[StepOutput]) -> list[Any]:
    """What a client hears, without times."""
    events = [event for output in outputs for event in output.events]
    return [dataclasses.replace(event, timings=None) for event in events]


def num_accepted(outputs: Sequence[StepOutput]) -> int:
    return sum(output.stats.num_accepted_tokens for output in outputs)


def num_drafted(outputs: Sequence[StepOutput]) -> int:
    return sum(output.stats.num_draft_tokens for output in outputs)


TURNS = "abcdabcdabcdabcdabcd"
STOPPING = {
    "length": StoppingParams(max_tokens=30),
    "a-short-length": StoppingParams(max_tokens=7),
    "two-tokens": StoppingParams(max_tokens=2),
    "a-stop-string": StoppingParams(max_tokens=30, stop=("dabcda", "bcdabcdabcdabc")),
    "a-stop-string-within-a-token's-neighbour": StoppingParams(max_tokens=30, stop=("cdabcdabcdabcdab",)),
    "a-stop-token": StoppingParams(max_tokens=30, stop_token_ids=frozenset(spell("d"))),
    "ignored-end": StoppingParams(max_tokens=40, ignore_eos=True),
}


@pytest.mark.parametrize("stopping", STOPPING.values(), ids=STOPPING)
@pytest.mark.parametrize("look_up", [1, 2, 4, 15])
def test_an_output_that_repeats_is_told_as_without_guesses_whatever_ends_it(
    look_up: int, stopping: StoppingParams
) -> None:
    asked = request("a", spell("x"), stopping=stopping, logprobs=2)
    alone, _ = run(asked, 0, script(TURNS))
    guessed, runner = run(asked, look_up, script(TURNS))
    assert told(guessed) == told(alone)
    if stopping.max_tokens == 30 and not stopping.stop_token_ids:
        assert num_accepted(guessed) > 0
        assert len(guessed) < len(alone)
    ends = {EOS} if not stopping.ignore_eos else set()
    for batch in runner.batches:
        if batch.drafted is not None:
            assert not (ends | stopping.stop_token_ids) & set(batch.drafted.token_ids[1:]), "nothing may come after"


@pytest.mark.parametrize(
    "sampling",
    [GREEDY, SamplingParams(temperature=0.4, seed=3), SamplingParams(temperature=1.0, top_k=5, top_p=0.9, seed=4)],
    ids=["greedy", "cool", "truncated"],
)
@pytest.mark.parametrize("memory", [1, 2, None])
def test_what_is_drawn_is_what_would_be_drawn_one_by_one(sampling: SamplingParams, memory: int | None) -> None:
    asked = request("a", PROMPT, max_tokens=50, sampling=sampling, logprobs=1)
    alone, _ = run(asked, 0, memory=memory)
    guessed, _ = run(asked, 4, memory=memory)
    assert told(guessed) == told(alone)
    assert num_drafted(guessed) > 0
    # Where the last token alone decides, texts return to where they were; where all do, they do not.
    if memory == 1 and sampling is GREEDY:
        assert num_accepted(guessed) > 20
    if memory is None:
        assert num_accepted(guessed) < num_drafted(guessed)


@pytest.mark.parametrize(
    ("stopping", "guess"),
    [
        (StoppingParams(max_tokens=20), (7,)),
        (StoppingParams(max_tokens=20, ignore_eos=True), (7, EOS)),
        (StoppingParams(max_tokens=20, stop_token_ids=frozenset({7})), None),
    ],
    ids=["an-end", "an-end-that-is-none", "a-stop-token"],
)
def test_nothing_is_guessed_from_what_would_end_the_output_on(
    stopping: StoppingParams, guess: tuple[int, ...] | None
) -> None:
    # As in a conversation, whose turns end so.
    prompt = (5, 6, 7, EOS, 8, 5)
    outputs, runner = run(request("a", prompt, stopping=stopping), 4, lambda source, tokens: 6)
    first = runner.batches[1].drafted
    assert (None if first is None else first.token_ids[1:]) == guess
    assert told(outputs) == told(run(request("a", prompt, stopping=stopping), 0, lambda source, tokens: 6)[0])


def test_what_wrong_guesses_have_written_counts_when_the_row_gets_another_owner() -> None:
    prompt, text = spell("abcdefghijklmab"), (*spell("cdefghijk"), EOS)
    budget = KVBudget(num_bytes=40)
    runner = FakeRunner(next_token=lambda source, tokens: text[min(max(len(tokens) - len(prompt), 0), 9)])
    engine = engine_over(runner, 8, kv_budget=budget)
    engine.add_request(request("a", prompt, max_tokens=25))
    drain(engine)
    last = runner.batches[-1].drafted
    assert last is not None
    assert (last.start, last.token_ids[1:]) == (23, spell("lmabcdef")), "of which nothing is said"
    # The first has the row then, and room for more than was said, but not for what was guessed.
    for name, length, max_tokens in (("b", 10, 18), ("c", 3, 9)):
        stopping = StoppingParams(max_tokens=max_tokens, ignore_eos=True)
        engine.add_request(request(name, range(20, 20 + length), stopping=stopping))
    while engine.has_work:
        engine.step()
        assert runner.num_held_bytes(budget) <= budget.num_bytes


def test_the_context_ends_an_output_that_is_guessed() -> None:
    asked = request("a", PROMPT, max_tokens=2 * CONTEXT)
    alone, _ = run(asked, 0, memory=1)
    guessed, runner = run(asked, 15, memory=1)
    assert told(guessed) == told(alone)
    assert len(PROMPT) + len(tokens_of(guessed, "a")) == CONTEXT
    written = [chunk.start + len(chunk.token_ids) for batch in runner.batches for chunk in batch.chunks]
    assert max(written) < CONTEXT, "the last token is never fed"


def test_a_step_with_guesses_tells_what_it_computed_and_what_came_of_it() -> None:
    outputs, runner = run(request("a", PROMPT, max_tokens=20), 4, memory=1)
    steps = [
        (output.stats, batch, len(tokens_of([output], "a")))
        for output, batch in zip(outputs, runner.batches, strict=True)
        if batch.drafted is not None
    ]
    assert steps
    for stats, batch, num_tokens in steps:
        chunk = batch.drafted
        assert chunk is not None
        assert chunk.num_scored == len(chunk.token_ids) == 1 + stats.num_draft_tokens <= 5
        assert num_tokens == 1 + stats.num_accepted_tokens
        assert (stats.num_rows, stats.num_decode_rows, stats.num_tokens) == (1, 1, num_tokens)
        assert (stats.num_prefill_runs, stats.num_prefill_tokens, stats.num_prefill_pairs) == (0, 0, 0)
        assert stats.num_decode_pairs == sum(chunk.start + 1 + index for index in range(num_tokens))
        assert not batch.has_prompts
    assert {stats.num_accepted_tokens for stats, _, _ in steps} >= {2, 4}


@pytest.mark.parametrize(
    "wanted",
    [
        {"sampling": SamplingParams(temperature=0.0, repetition_penalty=1.3)},
        {"stopping": StoppingParams(max_tokens=20, min_tokens=9)},
        {"beam_search": BeamSearchParams(beam_size=1)},
        {"max_tokens": 1},
    ],
    ids=["rules", "min-tokens", "a-search", "one-token"],
)
def test_whose_tokens_hang_on_more_than_logits_is_not_guessed(wanted: dict[str, Any]) -> None:
    asked = request("a", PROMPT, **{"max_tokens": 20, **wanted})
    assert num_drafted(run(asked, 4, memory=1)[0]) == 0


def test_a_prompt_is_scored_and_computed_as_ever() -> None:
    # Nine tokens: the last of them runs by itself.
    sampling = SamplingParams(temperature=0.0, seed=1)
    asked = request("a", PROMPT[:9], max_tokens=20, sampling=sampling, scoring=PromptScoring())
    alone, first = run(asked, 0, memory=1)
    guessed, second = run(asked, 4, memory=1)
    assert told(guessed) == told(alone)
    assert second.batches[:2] == first.batches[:2]
    assert num_accepted(guessed) > 0


def test_nobody_is_guessed_in_company() -> None:
    runner = FakeRunner(memory=1)
    engine = engine_over(runner, 4)
    engine.add_request(request("a", PROMPT, max_tokens=30))
    engine.add_request(request("b", PROMPT[1:], max_tokens=12))
    outputs = drain(engine)
    for batch, output in zip(runner.batches, outputs, strict=True):
        assert batch.drafted is None or output.stats.num_rows == 1
    assert num_accepted(outputs) > 0, "once the other is gone"
    for name, prompt in (("a", PROMPT), ("b", PROMPT[1:])):
        asked = request(name, prompt, max_tokens=30 if name == "a" else 12)
        assert tokens_of(outputs, name) == tokens_of(run(asked, 0, memory=1)[0], name)


def test_the_last_of_several_outputs_is_guessed_when_the_others_are_over() -> None:
    stopping = StoppingParams(max_tokens=40, stop_token_ids=frozenset({9}))
    asked = request("a", PROMPT, sampling=SamplingParams(temperature=0.7, n=3, seed=5), stopping=stopping)
    alone, _ = run(asked, 0, memory=1)
    guessed, _ = run(asked, 4, memory=1)
    for index in range(3):
        assert tokens_of(guessed, "a", index) == tokens_of(alone, "a", index)
    assert num_drafted(guessed) > 0


@pytest.mark.parametrize("at", range(4, 12))
def test_a_preempted_request_goes_on_as_if_nothing_had_happened(at: int) -> None:
    limits = dataclasses.replace(LIMITS, max_batch_size=1)
    engine = fake_engine(FakeRunner(1, memory=1), limits=limits)
    engine._scheduler.let_guess(is_proven=True)
    engine.add_request(request("a", PROMPT, max_tokens=40))
    outputs = [engine.step() for _ in range(at)]
    engine.add_request(request("urgent", PROMPT[::-1], max_tokens=9, priority=1))
    outputs += drain(engine)
    assert engine._scheduler.num_preemptions == 1
    assert tokens_of(outputs, "a") == tokens_of(run(request("a", PROMPT, max_tokens=40), 0, memory=1)[0], "a")


def test_a_request_that_comes_later_shares_what_prompts_left_and_nothing_of_guesses() -> None:
    engine = engine_over(FakeRunner(memory=1), 4)
    prompt = [*PROMPT, *PROMPT]
    for name in "ab":
        engine.add_request(request(name, prompt, max_tokens=20))
        outputs = drain(engine)
        assert num_accepted(outputs) > 0
    assert events_of(outputs, "b")[-1].num_cached_tokens == 16
    # What a decoded, others may ask for: it is computed anew.
    longer = [*prompt, *tokens_of(outputs, "b")[:10]]
    engine.add_request(request("c", longer, max_tokens=5))
    outputs = drain(engine)
    assert events_of(outputs, "c")[-1].num_cached_tokens == 16
    assert tokens_of(outputs, "c") == tokens_of(run(request("c", longer, max_tokens=5), 0, memory=1)[0], "c")


@pytest.mark.parametrize("reason", [FinishReason.CANCELLED, FinishReason.DEADLINE])
def test_a_request_that_is_guessed_ends_between_two_steps(reason: FinishReason) -> None:
    now = 0.0
    engine = engine_over(FakeRunner(memory=1), 4, clock=lambda: now)
    engine.add_request(request("a", PROMPT, max_tokens=50, deadline=900.0))
    outputs = []
    while not num_accepted(outputs):
        now += 1.0
        outputs.append(engine.step())
    now = 900.0 if reason is FinishReason.DEADLINE else now
    if reason is FinishReason.CANCELLED:
        engine.abort("a")
    outputs.append(engine.step())
    assert outputs[-1].events[-1].finish_reason is reason
    whole = tokens_of(run(request("a", PROMPT, max_tokens=50), 0, memory=1)[0], "a")
    assert tokens_of(outputs, "a") == whole[: len(tokens_of(outputs, "a"))]
    assert not engine.has_work
    assert engine._scheduler.kv_usage_ratio == 0


class Poisoned(FakeRunner):
    """Has nothing finite to say after a "z"."""

    def _feed(self, slot: int, start: int, token_ids: tuple[int, ...], source_length: int) -> None:
        super()._feed(slot, start, token_ids, source_length)
        if self._tokens[slot][-1:] == list(spell("z")):
            self._logits[slot] = np.nan


@pytest.mark.parametrize(("text", "said", "is_poisoned"), [("bcdef", "bcdef", False), ("bzdef", "bz", True)])
def test_logits_that_are_not_finite_count_only_behind_what_is_said(text: str, said: str, is_poisoned: bool) -> None:
    prompt = spell("abzxa")
    runner = Poisoned(next_token=script(text, prompt_length=len(prompt)))
    engine = engine_over(runner, 4)
    engine.add_request(request("a", prompt, max_tokens=30))
    outputs = drain(engine)
    guesses = [batch.drafted.token_ids for batch in runner.batches if batch.drafted is not None]
    assert guesses[0] == spell("bzx"), "what followed the same two letters"
    assert tokens_of(outputs, "a")[: len(said)] == list(spell(said))
    assert (outputs[-1].events[-1].error is not None) is is_poisoned


def test_sampler_looks_no_further_than_the_first_guess_that_is_wrong() -> None:
    logits = np.full((3, VOCAB_SIZE), np.nan, np.float32)
    logits[0] = np.arange(VOCAB_SIZE)
    rows = [SampleRow(slot, 0, 10 + slot, GREEDY, 0, None, draft=draft) for slot, draft in enumerate((31, 4, None))]
    right, unknown, unseen = Sampler().sample(logits, rows)
    assert right is not None
    assert (right.token_id, unknown, unseen) == (31, None, None)
    logits[1:] = logits[0]
    right, wrong, unseen = Sampler().sample(logits, rows)
    assert right is not None
    assert wrong is not None
    assert (right.token_id, wrong.token_id, unseen) == (31, 31, None)


def test_limits_refuse_a_negative_number_of_guesses() -> None:
    with pytest.raises(StartupError, match="look_up is -1, must be at least 0"):
        dataclasses.replace(LIMITS, look_up=-1)


class Rounding(FakeRunner):
    """Gives what is computed as one of several tokens at a time another last bit, from some length and position on."""

    def __init__(self, length: int, position: int) -> None:
        super().__init__()
        self._length, self._position = length, position

    def run(self, batch: ScheduledBatch) -> Float32:
        logits = super().run(batch).copy()
        chunk = next(iter(batch.prefills), None)
        if chunk is not None and chunk.num_scored and len(chunk.token_ids) >= self._length:
            index = self._position - chunk.start
            if 0 <= index < len(chunk.token_ids):
                row = logits[4 + index]
                row[7] = np.nextafter(row[7], np.float32(9))
        return logits


def long_case(length: int) -> GoldenCase:
    return make_case((3, length), ((Feed(1, 0, length),),), with_sources=False)


def differs(
    runner: FakeRunner, length: int, longest_chunk: int, max_tokens: int = 16, context: int = CONTEXT
) -> str | None:
    """What the proof says on a sequence of so many tokens."""
    return find_difference(
        runner,
        [long_case(length)],
        num_slots=4,
        longest_chunk=longest_chunk,
        max_tokens=max_tokens,
        context=context,
    )


@pytest.mark.parametrize("length", [1, 2, 9, 16, 17, 40])
@pytest.mark.parametrize("longest_chunk", [2, 5, 16])
def test_proof_passes_where_chunks_change_nothing_and_meets_every_length(length: int, longest_chunk: int) -> None:
    runner = FakeRunner()
    assert differs(runner, length, longest_chunk) is None
    met = {len(chunk.token_ids) for batch in runner.batches for chunk in batch.prefills if chunk.num_scored}
    assert met >= set(range(2, longest_chunk + 1))
    assert max(met) <= 16


def test_proof_needs_no_row_that_is_longer_than_the_context() -> None:
    runner = FakeRunner()
    assert differs(runner, 3, 16, context=5) is None
    chunks = [chunk for batch in runner.batches for chunk in batch.prefills]
    assert {len(chunk.token_ids) for chunk in chunks} == {2, 3, 4, 5}
    assert max(chunk.start + len(chunk.token_ids) for chunk in chunks) == 5


@pytest.mark.parametrize(
    ("longest_chunk", "num_tokens", "num_alone", "num_logits"), [(9, 437, 74, 255), (17, 967, 82, 524)]
)
def test_proof_costs_as_many_tokens_as_is_written(
    longest_chunk: int, num_tokens: int, num_alone: int, num_logits: int
) -> None:
    runner = FakeRunner()
    assert differs(runner, 200, longest_chunk, max_tokens=128, context=512) is None
    chunks = [chunk for batch in runner.batches for chunk in batch.prefills]
    alone = sum(len(batch.decode) for batch in runner.batches)
    assert alone == num_alone
    assert alone + sum(len(chunk.token_ids) for chunk in chunks) == 200 - longest_chunk + num_tokens
    assert alone + sum(chunk.num_logits for chunk in chunks) == num_logits, "none of what is only to lie in the cache"
    document = " ".join((ROOT / "docs" / "engine.md").read_text(encoding="utf-8").split())
    assert f"{num_tokens} tokens with K = {longest_chunk - 1}, {num_alone} of them one by one" in document


@pytest.mark.parametrize(("length", "position"), [(2, 1), (5, 4), (2, 15), (16, 9), (3, 39), (5, 35)])
def test_proof_names_where_a_chunk_has_other_bits(length: int, position: int) -> None:
    found = differs(Rounding(length, position), 40, 5)
    assert found is not None
    assert found.startswith(f"position {position} of golden case case has other bits in a chunk of ")


class Forgetful(FakeRunner):
    """Computes short chunks that nobody finds in the cache afterwards: what was there before is there still."""

    def run(self, batch: ScheduledBatch) -> Float32:
        chunk = next(iter(batch.prefills), None)
        before = list(self._tokens[0])
        logits = super().run(batch)
        if chunk is not None and len(chunk.token_ids) < 8 <= len(before):
            self._tokens[0] = before
        return logits


def test_proof_finds_that_a_chunk_is_not_kept() -> None:
    found = differs(Forgetful(), 12, 3)
    assert found is not None
    # The first chunk of two is right, and what follows is computed upon something else.
    assert found.startswith("position 2 of golden case case has other bits")


@pytest.mark.parametrize("is_honest", [True, False])
def test_an_engine_guesses_only_what_it_has_proven_and_says_so(
    is_honest: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "service.engine.engine")
    # One that says what calibration's prompts are made of.
    runner = FakeRunner(next_token=lambda source, tokens: 1) if is_honest else Rounding(2, 36)
    engine = fake_engine(runner, limits=LIMITS)
    assert engine.max_draft_tokens == 0
    engine.prove_look_up([long_case(40)])
    (record,) = caplog.records
    if is_honest:
        assert record.getMessage() == "a model: up to 4 tokens are guessed by look-up, which changes no bit"
    else:
        assert record.levelno == logging.WARNING
        place = "position 36 of golden case case has other bits in a chunk of 2 tokens than by itself"
        assert record.getMessage() == f"a model: no tokens are guessed by look-up: {place}"
    assert engine.max_draft_tokens == (4 if is_honest else 0)
    engine.calibrate(0.05)
    assert not any(batch.num_draft_tokens for batch in runner.batches), "neither proof nor calibration guesses"
    assert engine.max_draft_tokens == (4 if is_honest else 0)
    engine.add_request(request("a", PROMPT, max_tokens=40))
    assert (num_drafted(drain(engine)) > 0) is is_honest


def test_guesses_are_proven_once_however_often_golden_cases_are_replayed() -> None:
    runner = FakeRunner()
    engine = fake_engine(runner, limits=LIMITS)
    engine.prove_look_up([long_case(40)])
    runner.batches.clear()
    assert all(result.passed for result in engine.verify_golden([long_case(40)], Tolerance(absolute=1e-6)))
    assert sum(batch.num_rows for batch in runner.batches) == 1, "the case's only feed"
    assert engine.max_draft_tokens == 4
    engine.add_request(request("a", PROMPT))
    with pytest.raises(RuntimeError, match="idle"):
        engine.prove_look_up([long_case(40)])


@pytest.mark.parametrize("look_up", [0, 4])
def test_whoever_builds_engines_has_guesses_proven_where_they_are_wanted(
    look_up: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    engine = fake_engine(FakeRunner(), limits=dataclasses.replace(LIMITS, look_up=look_up))
    monkeypatch.setattr(loading, "build_engine", lambda *_: engine)
    model: Any = SimpleNamespace(
        name="m",
        manifest=None,
        output_tokenizer=SimpleNamespace(decode=None),
        prefill_provider=None,
        stamp=None,
        golden_cases=[long_case(40)],
    )
    config = ServeConfig(models=tmp_path, look_up=look_up)
    built = loading.build_engines(tmp_path, [model], config, kv_memory={"m": 1})
    assert built["m"].max_draft_tokens == look_up


def test_a_proof_that_does_not_run_leaves_an_engine_without_guesses(caplog: pytest.LogCaptureFixture) -> None:
    def fail(batch: ScheduledBatch) -> None:
        raise RuntimeError("no graph")

    engine = fake_engine(FakeRunner(before_run=fail), limits=LIMITS)
    engine.prove_look_up([long_case(40)])
    failure, warning = caplog.records
    assert failure.levelno == logging.ERROR
    assert warning.getMessage().startswith("a model: no tokens are guessed by look-up: its proof failed, ")
    assert engine.max_draft_tokens == 0


UNGUESSED: dict[str, dict[str, Any]] = {
    "encoder-decoder": {"encoder_decoder": True},
    "a-forced-beginning": {"generation": GenerationRules(forced_first_id=7)},
    "a-forced-end": {"generation": GenerationRules(forced_last_id=EOS)},
    "suppressed-tokens": {"generation": GenerationRules(suppressed_ids=(7, 8))},
}


@pytest.mark.parametrize("kind", UNGUESSED.values(), ids=UNGUESSED)
def test_models_of_which_nothing_can_be_guessed_are_known_by_their_shape(kind: dict[str, Any]) -> None:
    runner = FakeRunner(memory=1)
    engine = fake_engine(runner, limits=LIMITS, **kind)
    engine.prove_look_up([long_case(40)])
    assert not runner.batches, "nothing to prove"
    engine._scheduler.let_guess(is_proven=True)
    assert engine.max_draft_tokens == 0
    engine.add_request(request("a", PROMPT, max_tokens=40))
    assert num_drafted(drain(engine)) == 0


def test_rules_of_a_models_own_are_named_where_they_hold_for_every_output() -> None:
    rules = GenerationRules(forced_last_id=2, suppressed_ids=(7, 8), renormalize=True)
    assert dataclasses.replace(fake_model(), generation=rules).why_unguessed == (
        "rules of its own (forced_last_id, suppressed_ids) hold for every output, and rules count tokens as they come"
    )
    # Of beam searches, which are never guessed anyway.
    rules = GenerationRules(renormalize=True, patience=2.0)
    engine = fake_engine(FakeRunner(memory=1), limits=LIMITS, generation=rules)
    engine.prove_look_up([long_case(40)])
    assert engine.max_draft_tokens == 4


def test_guesses_have_no_more_tokens_than_there_are_rows_of_logits() -> None:
    limits = dataclasses.replace(LIMITS, prefill_chunk=4, max_prefill_tokens=4, look_up=16)
    runner = FakeRunner(memory=1)
    engine = fake_engine(runner, limits=limits)
    engine.prove_look_up([long_case(9)])
    assert engine.max_draft_tokens == 3
    engine.add_request(request("a", PROMPT, max_tokens=40))
    drain(engine)
    fed = [len(batch.drafted.token_ids) for batch in runner.batches if batch.drafted is not None]
    assert max(fed) == 4


def test_what_standard_operators_compute_is_named() -> None:
    own = {"onward.Linear", "onward.GroupQueryAttention", "Gather", "Add"}
    assert describe_foreign(own) == []
    (problem,) = describe_foreign({*own, "MatMul", "com.microsoft.GroupQueryAttention"})
    assert problem.startswith("the decoder has standard operators for MatMul, com.microsoft.GroupQueryAttention, and ")
    (problem,) = describe_foreign({"Gather"})
    assert "all operators" in problem


def test_step_times_are_those_of_a_token_where_guesses_come_true() -> None:
    times = StepTimes(decoder_only(), 8)
    stats = StepStats(
        num_rows=1, num_tokens=5, num_padding_tokens=0, run_seconds=0.02, host_seconds=0.004, num_preemptions=0,
        num_running=1, num_waiting=0, kv_usage_ratio=0.1, num_decode_rows=1, num_decode_pairs=0, num_draft_tokens=4,
        num_accepted_tokens=3,
    )  # fmt: skip
    for _ in range(400):
        times.learn(stats)
        times.note_batch(stats)
    assert times.rates.step_seconds(1, 0) == pytest.approx((0.02 + 0.004) / 4, rel=0.1)


def test_a_row_with_guesses_decodes_and_is_no_prompt() -> None:
    drafted = PrefillChunk(0, 3, (5, 6, 7), num_scored=3)
    batch = ScheduledBatch(drafted=drafted)
    assert batch.chunks == (drafted,)
    assert not batch.has_prompts
    assert (batch.num_prefill_tokens, batch.num_prefill_runs, batch.num_prefill_pairs) == (0, 0, 0)
    assert (batch.num_rows, batch.num_decode_rows, batch.num_decode_pairs, batch.num_draft_tokens) == (1, 1, 4, 2)
    assert ScheduledBatch(prefills=(drafted,)).num_draft_tokens == 0, "a prompt's chunk, of which all is scored"
