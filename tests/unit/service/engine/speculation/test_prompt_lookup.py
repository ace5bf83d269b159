"""Prompt-lookup speculation: what is drafted, that outputs do not depend on it, and that it is proven first."""

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
from model.spec.golden import Tolerance
from service.config import ServeConfig
from service.engine.batch import SampleRow, ScheduledBatch
from service.engine.engine import Engine
from service.engine.kv.reservations import KVBudget
from service.engine.sampling.sampler import Sampler
from service.engine.scheduler import EngineLimits
from service.engine.speculation.drafting import MOST_FED, _best_length
from service.engine.speculation.prompt_lookup import PromptLookup
from service.engine.types import (
    BeamSearchParams,
    GenerationRequest,
    PromptScoring,
    SamplingParams,
    StepOutput,
    StepStats,
    StoppingParams,
)
from service.forecasting.step_times import StepTimes
from service.repository import loading
from tests.fakes import (
    CONTEXT,
    EOS,
    GREEDY,
    VOCAB_SIZE,
    FakeRunner,
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
from tests.unit.service.engine.proof.test_chunk_proof import Rounding, long_case

LIMITS = EngineLimits(max_batch_size=4, prefill_chunk=8, max_prefill_tokens=16, look_up=4)
PROMPT = (5, 6, 7, 8, 5, 6, 7, 8, 5, 6)


def drafts_of(token_ids: Sequence[int], longest: int = 8, room: int = 8) -> tuple[int, ...]:
    """Drafts of a lookup whose drafts have been accepted so far."""
    lookup = PromptLookup(longest)
    for _ in range(3):
        lookup.report(1, 1)
    return lookup.propose(token_ids, room)


def test_three_tokens_are_looked_up_before_two() -> None:
    assert drafts_of([1, 2, 3, 9, 0, 7, 2, 3, 8, 0, 1, 2, 3], room=2) == (9, 0)
    assert drafts_of([1, 2, 3, 9, 0, 7, 2, 3, 8, 0, 4, 2, 3], room=2) == (8, 0)


def test_the_latest_occurrence_decides() -> None:
    assert drafts_of([1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3], room=2) == (5, 1)


@pytest.mark.parametrize("token_ids", [[], [1], [1, 1], [1, 2, 3, 4, 5, 3], [1, 2, 3, 9, 2, 1, 3]])
def test_nothing_is_drafted_where_nothing_recurs(token_ids: list[int]) -> None:
    assert drafts_of(token_ids) == ()


def test_a_draft_that_reaches_the_end_continues_from_itself() -> None:
    assert drafts_of([5, 6, 7, 5, 6, 7, 5, 6]) == (7, 5, 6, 7, 5, 6, 7, 5)
    assert drafts_of([4, 4, 4], room=3) == (4, 4, 4)


@given(st.lists(st.integers(0, 2), max_size=40))
def test_an_index_that_grows_drafts_what_a_new_one_does(token_ids: list[int]) -> None:
    grown = PromptLookup(8)
    for _ in range(3):
        grown.report(1, 1)
    for length in range(len(token_ids) + 1):
        assert grown.propose(token_ids[:length], 8) == drafts_of(token_ids[:length])


def test_a_long_prompt_is_indexed_in_parts() -> None:
    token_ids = [*range(2500), 2000, 2001, 2002]
    lookup = PromptLookup(8)
    proposed = [lookup.propose(token_ids, 8) for _ in range(4)]
    assert proposed == [(), (2003, 2004), (2003, 2004), (2003, 2004)]
    late = PromptLookup(8)
    assert [late.propose([*range(2500), 2400, 2401], 8) for _ in range(3)] == [(), (), (2402, 2403)]


def test_drafts_grow_while_accepted_and_shrink_to_what_was() -> None:
    lookup, token_ids = PromptLookup(8), [4] * 9
    lengths = []
    for right in (2, 4, 8, 8, 3, 4, 2):
        lengths.append(len(lookup.propose(token_ids, 99)))
        lookup.report(lengths[-1], right)
    assert lengths == [2, 4, 8, 8, 8, 4, 8]
    assert len(lookup.propose(token_ids, 99)) == 3
    assert len(PromptLookup(1).propose(token_ids, 99)) == 1


def test_a_sequence_whose_drafts_fail_pauses_for_more_and_more_steps() -> None:
    lookup, token_ids = PromptLookup(16), [4] * 9
    lengths = []
    for _ in range(1000):
        proposed = lookup.propose(token_ids, 99)
        lengths.append(len(proposed))
        if proposed:
            lookup.report(len(proposed), 0)
    assert lengths[:8] == [2, 0, 1, 0, 0, 1, 0, 0]
    assert sum(lengths) <= 1000 / 33 + 8
    assert max(lengths[1:]) == 1
    while not (proposed := lookup.propose(token_ids, 99)):
        pass
    lookup.report(1, 1)
    assert len(lookup.propose(token_ids, 99)) == 2, "one that comes true ends the pauses"


def engine_over(runner: FakeRunner, look_up: int, **options: Any) -> Engine:
    engine = fake_engine(runner, limits=dataclasses.replace(LIMITS, look_up=look_up), **options)
    engine._scheduler.drafter.enable()
    return engine


def run(
    asked: GenerationRequest,
    look_up: int,
    next_token: Callable[..., int] | None = None,
    memory: int | None = None,
    vocab_size: int = VOCAB_SIZE,
) -> tuple[list[StepOutput], FakeRunner]:
    """One request by itself, from its first step to its last."""
    runner = FakeRunner(next_token=next_token, memory=memory, vocab_size=vocab_size)
    engine = engine_over(runner, look_up, context=CONTEXT if vocab_size == VOCAB_SIZE else 400)
    engine.add_request(asked)
    outputs = []
    while engine.has_work:
        outputs.append(engine.step())
        engine._scheduler.check_invariants()
    return outputs, runner


def reported(outputs: Sequence[StepOutput]) -> list[Any]:
    """All events, without times."""
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
    "a-long-stop-string": StoppingParams(max_tokens=30, stop=("cdabcdabcdabcdab",)),
    "a-stop-token": StoppingParams(max_tokens=30, stop_token_ids=frozenset(spell("d"))),
    "ignored-end": StoppingParams(max_tokens=40, ignore_eos=True),
}


@pytest.mark.parametrize("stopping", STOPPING.values(), ids=STOPPING)
@pytest.mark.parametrize("look_up", [1, 2, 4, 15])
def test_events_are_those_without_speculation_whatever_ends_the_output(look_up: int, stopping: StoppingParams) -> None:
    asked = request("a", spell("x"), stopping=stopping, logprobs=2)
    alone, _ = run(asked, 0, script(TURNS))
    drafted, runner = run(asked, look_up, script(TURNS))
    assert reported(drafted) == reported(alone)
    if stopping.max_tokens == 30 and not stopping.stop_token_ids:
        assert num_accepted(drafted) > 0
        assert len(drafted) < len(alone)
    ends = {EOS} if not stopping.ignore_eos else set()
    for batch in runner.batches:
        for chunk in batch.drafted:
            assert not (ends | stopping.stop_token_ids) & set(chunk.token_ids[1:]), "an output ends there"


@pytest.mark.parametrize(
    "sampling",
    [GREEDY, SamplingParams(temperature=0.4, seed=3), SamplingParams(temperature=1.0, top_k=5, top_p=0.9, seed=4)],
    ids=["greedy", "cool", "truncated"],
)
@pytest.mark.parametrize("memory", [1, 2, None])
def test_sampled_tokens_are_those_without_speculation(sampling: SamplingParams, memory: int | None) -> None:
    asked = request("a", PROMPT, max_tokens=50, sampling=sampling, logprobs=1)
    alone, _ = run(asked, 0, memory=memory)
    drafted, _ = run(asked, 4, memory=memory)
    assert reported(drafted) == reported(alone)
    assert num_drafted(drafted) > 0
    # With a memory of one token, texts recur; with all tokens, they do not.
    if memory == 1 and sampling is GREEDY:
        assert num_accepted(drafted) > 20
    if memory is None:
        assert num_accepted(drafted) < num_drafted(drafted)


@pytest.mark.parametrize(
    "rules",
    [
        {"repetition_penalty": 1.05},
        {"presence_penalty": -0.5, "frequency_penalty": 0.1},
        {"logit_bias": ((7, 3.0), (9, -2.0))},
        {"allowed_token_ids": (5, 6, 7, EOS)},
    ],
    ids=lambda rules: next(iter(rules)),
)
def test_rules_count_drafted_tokens_as_they_would_others(rules: dict[str, Any]) -> None:
    asked = request("a", PROMPT, max_tokens=50, sampling=SamplingParams(temperature=0.4, seed=3, **rules), logprobs=1)
    alone, _ = run(asked, 0, memory=1)
    drafted, _ = run(asked, 4, memory=1)
    assert reported(drafted) == reported(alone)
    assert num_accepted(drafted) > 0


@pytest.mark.parametrize(
    ("stopping", "draft"),
    [
        (StoppingParams(max_tokens=20), (7,)),
        (StoppingParams(max_tokens=20, ignore_eos=True), (7, EOS)),
        (StoppingParams(max_tokens=20, stop_token_ids=frozenset({7})), None),
    ],
    ids=["an-end", "an-end-that-is-none", "a-stop-token"],
)
def test_drafts_stop_before_a_token_that_would_end_the_output(
    stopping: StoppingParams, draft: tuple[int, ...] | None
) -> None:
    prompt = (5, 6, 7, EOS, 8, 5)
    outputs, runner = run(request("a", prompt, stopping=stopping), 4, lambda source, tokens: 6)
    first = runner.batches[1].drafted
    assert (first[0].token_ids[1:] if first else None) == draft
    assert reported(outputs) == reported(run(request("a", prompt, stopping=stopping), 0, lambda source, tokens: 6)[0])


def test_rejected_drafts_count_as_written_when_the_row_gets_another_owner() -> None:
    prompt, text = spell("abcdefghijklmab"), (*spell("cdefghijk"), EOS)
    budget = KVBudget(num_bytes=40)
    runner = FakeRunner(next_token=lambda source, tokens: text[min(max(len(tokens) - len(prompt), 0), 9)])
    engine = engine_over(runner, 8, kv_budget=budget)
    engine.add_request(request("a", prompt, max_tokens=25))
    drain(engine)
    (last,) = runner.batches[-1].drafted
    assert (last.start, last.token_ids[1:]) == (23, spell("lmabcdef")), "all of them wrong"
    # The next owner's reservation has room for what was accepted, but not for what was drafted.
    for name, length, max_tokens in (("b", 10, 18), ("c", 3, 9)):
        stopping = StoppingParams(max_tokens=max_tokens, ignore_eos=True)
        engine.add_request(request(name, range(20, 20 + length), stopping=stopping))
    while engine.has_work:
        engine.step()
        assert runner.num_held_bytes(budget) <= budget.num_bytes


def test_the_context_ends_an_output_with_drafts() -> None:
    asked = request("a", PROMPT, max_tokens=2 * CONTEXT)
    alone, _ = run(asked, 0, memory=1)
    drafted, runner = run(asked, 15, memory=1)
    assert reported(drafted) == reported(alone)
    assert len(PROMPT) + len(tokens_of(drafted, "a")) == CONTEXT
    written = [chunk.end for batch in runner.batches for chunk in (*batch.prefills, *batch.drafted)]
    assert max(written) < CONTEXT, "the last token is never fed"


def test_a_step_with_drafts_reports_what_it_computed_and_accepted() -> None:
    outputs, runner = run(request("a", PROMPT, max_tokens=20), 4, memory=1)
    steps = [
        (output.stats, batch, len(tokens_of([output], "a")))
        for output, batch in zip(outputs, runner.batches, strict=True)
        if batch.drafted
    ]
    assert steps
    for stats, batch, num_tokens in steps:
        (chunk,) = batch.drafted
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
        {"beam_search": BeamSearchParams(beam_size=1)},
        {"max_tokens": 1},
    ],
    ids=["a-search", "one-token"],
)
def test_requests_with_beams_or_one_token_get_no_drafts(wanted: dict[str, Any]) -> None:
    asked = request("a", PROMPT, **{"max_tokens": 20, **wanted})
    assert num_drafted(run(asked, 4, memory=1)[0]) == 0


def test_a_step_that_scores_a_prompt_gets_no_drafts() -> None:
    # Nine tokens: the last of them runs by itself.
    sampling = SamplingParams(temperature=0.0, seed=1)
    asked = request("a", PROMPT[:9], max_tokens=20, sampling=sampling, scoring=PromptScoring())
    alone, first = run(asked, 0, memory=1)
    drafted, second = run(asked, 4, memory=1)
    assert reported(drafted) == reported(alone)
    assert second.batches[:2] == first.batches[:2]
    assert num_accepted(drafted) > 0


@pytest.mark.parametrize("num_rows", [2, 4, 12, 20])
def test_rows_that_decode_together_get_drafts_while_they_are_few(num_rows: int) -> None:
    limits = dataclasses.replace(LIMITS, max_batch_size=num_rows, max_prefill_tokens=MOST_FED)
    runner = FakeRunner(num_rows, memory=1)
    engine = fake_engine(runner, limits=limits)
    engine._scheduler.drafter.enable()
    asked = [request(f"r{row}", PROMPT[row % 7 :], max_tokens=30 + 3 * row) for row in range(num_rows)]
    for each in asked:
        engine.add_request(each)
    outputs = drain(engine)
    together = 0
    for batch, output in zip(runner.batches, outputs, strict=True):
        stats, rows = output.stats, batch.drafted
        if not rows:
            continue
        together = max(together, len(rows))
        events = [event for event in output.events if event.token_id is not None]
        assert len(events) == len(rows) + stats.num_accepted_tokens == stats.num_tokens
        assert stats.num_draft_tokens == sum(chunk.num_scored - 1 for chunk in rows)
        longest = max(len(chunk.token_ids) for chunk in rows)
        assert len(rows) == 1 or len(rows) * longest <= MOST_FED
        assert stats.num_padding_tokens == len(rows) * longest - len(rows) - stats.num_draft_tokens
        pairs = sum(chunk.end - chunk.num_scored + 1 for chunk in rows)
        assert stats.num_decode_pairs - pairs >= stats.num_accepted_tokens * (stats.num_decode_pairs > pairs)
        assert (stats.num_decode_pairs > pairs) == (stats.num_accepted_tokens > 0)
    assert together >= min(num_rows, MOST_FED // 2), "as many as leave room for a draft each"
    for each in asked:
        assert tokens_of(outputs, each.request_id) == tokens_of(run(each, 0, memory=1)[0], each.request_id)


@pytest.mark.parametrize(
    ("lengths", "shares", "best"),
    [
        ([3, 3], 1.0, 3),
        ([8, 0], 1.0, 8),
        ([3] * 8, 1.0, 3),
        ([3] * 8, 0.8, 3),
        ([3] * 8, 0.5, 0),
        ([3, 3, 3, 3, 3, 0, 0, 0], 0.8, 0),
        ([3, 3, 3, 3, 3, 3, 3, 1], 1.0, 3),
        ([1] * 16, 1.0, 1),
        ([1] * 8 + [0] * 8, 1.0, 0),
        ([0] * 4, 1.0, 0),
    ],
)
def test_a_step_of_several_rows_has_drafts_where_they_give_more_tokens_for_its_time(
    lengths: list[int], shares: float, best: int
) -> None:
    assert _best_length([(7,) * length for length in lengths], [shares] * len(lengths)) == best


def test_the_last_of_several_outputs_gets_drafts_when_the_others_are_over() -> None:
    stopping = StoppingParams(max_tokens=40, stop_token_ids=frozenset({9}))
    asked = request("a", PROMPT, sampling=SamplingParams(temperature=0.7, n=3, seed=5), stopping=stopping)
    alone, _ = run(asked, 0, memory=1)
    drafted, _ = run(asked, 4, memory=1)
    for index in range(3):
        assert tokens_of(drafted, "a", index) == tokens_of(alone, "a", index)
    assert num_drafted(drafted) > 0


def test_the_prefix_cache_holds_prompts_and_no_drafts() -> None:
    engine = engine_over(FakeRunner(memory=1), 4)
    prompt = [*PROMPT, *PROMPT]
    for name in "ab":
        engine.add_request(request(name, prompt, max_tokens=20))
        outputs = drain(engine)
        assert num_accepted(outputs) > 0
    assert events_of(outputs, "b")[-1].num_cached_tokens == 16
    # Decoded tokens are not cached: they are computed again.
    longer = [*prompt, *tokens_of(outputs, "b")[:10]]
    engine.add_request(request("c", longer, max_tokens=5))
    outputs = drain(engine)
    assert events_of(outputs, "c")[-1].num_cached_tokens == 16
    assert tokens_of(outputs, "c") == tokens_of(run(request("c", longer, max_tokens=5), 0, memory=1)[0], "c")


class Poisoned(FakeRunner):
    """Its logits are not finite after a "z"."""

    def _feed(self, slot: int, start: int, token_ids: tuple[int, ...], source_length: int) -> None:
        super()._feed(slot, start, token_ids, source_length)
        if self._tokens[slot][-1:] == list(spell("z")):
            self._logits[slot] = np.nan


@pytest.mark.parametrize(("text", "said", "is_poisoned"), [("bcdef", "bcdef", False), ("bzdef", "bz", True)])
def test_logits_that_are_not_finite_fail_only_behind_accepted_tokens(text: str, said: str, is_poisoned: bool) -> None:
    prompt = spell("abzxa")
    runner = Poisoned(next_token=script(text, prompt_length=len(prompt)))
    engine = engine_over(runner, 4)
    engine.add_request(request("a", prompt, max_tokens=30))
    outputs = drain(engine)
    drafts = [chunk.token_ids for batch in runner.batches for chunk in batch.drafted]
    assert drafts[0] == spell("bzx"), "what followed the same two letters"
    assert tokens_of(outputs, "a")[: len(said)] == list(spell(said))
    assert (outputs[-1].events[-1].error is not None) is is_poisoned


def test_sampler_stops_at_the_first_rejected_draft() -> None:
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


@pytest.mark.parametrize("is_honest", [True, False])
def test_speculation_needs_its_proof_and_the_log_says_which(is_honest: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "service.engine.engine")
    # Token 1 is one of those that calibration's prompts are made of.
    runner = FakeRunner(next_token=lambda source, tokens: 1) if is_honest else Rounding(2, 36)
    engine = fake_engine(runner, limits=LIMITS)
    assert engine.max_draft_tokens == 0
    engine.prove_speculation([long_case(40)])
    (record,) = caplog.records
    if is_honest:
        assert record.getMessage() == "engine: prompt-lookup speculation with up to 4 draft tokens changes no bit"
    else:
        assert record.levelno == logging.WARNING
        place = "position 36 of golden case case has other bits in a chunk of 2 tokens than by itself"
        assert record.getMessage() == f"engine: no prompt-lookup speculation: {place}"
    assert engine.max_draft_tokens == (4 if is_honest else 0)
    runner.batches.clear()
    engine.calibrate(0.05)
    assert not any(batch.num_draft_tokens for batch in runner.batches), "a calibration drafts nothing"
    assert engine.max_draft_tokens == (4 if is_honest else 0)
    engine.add_request(request("a", PROMPT, max_tokens=40))
    assert (num_drafted(drain(engine)) > 0) is is_honest


def test_golden_replay_does_not_prove_speculation_again() -> None:
    runner = FakeRunner()
    engine = fake_engine(runner, limits=LIMITS)
    engine.prove_speculation([long_case(40)])
    runner.batches.clear()
    assert all(result.passed for result in engine.verify_golden([long_case(40)], Tolerance(absolute=1e-6)))
    assert sum(batch.num_rows for batch in runner.batches) == 1, "the case's only feed"
    assert engine.max_draft_tokens == 4
    engine.add_request(request("a", PROMPT))
    with pytest.raises(RuntimeError, match="idle"):
        engine.prove_speculation([long_case(40)])


@pytest.mark.parametrize("look_up", [0, 4])
def test_built_engines_have_speculation_proven_where_it_is_wanted(
    look_up: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    engine = fake_engine(FakeRunner(), limits=dataclasses.replace(LIMITS, look_up=look_up))
    monkeypatch.setattr(loading, "build_engine", lambda *_: engine)
    model: Any = SimpleNamespace(
        name="m",
        manifest=None,
        output_tokenizer=SimpleNamespace(decode=None),
        stamp=None,
        golden_cases=[long_case(40)],
    )
    config = ServeConfig(models=tmp_path, look_up=look_up)
    built = loading.build_engines(tmp_path, [model], config, kv_memory={"m": 1})
    assert built["m"].max_draft_tokens == look_up


def test_a_proof_that_fails_to_run_leaves_an_engine_without_speculation(caplog: pytest.LogCaptureFixture) -> None:
    def fail(batch: ScheduledBatch) -> None:
        raise RuntimeError("no graph")

    engine = fake_engine(FakeRunner(before_run=fail), limits=LIMITS)
    engine.prove_speculation([long_case(40)])
    failure, warning = caplog.records
    assert failure.levelno == logging.ERROR
    assert warning.getMessage().startswith("engine: no prompt-lookup speculation: the proof failed, ")
    assert engine.max_draft_tokens == 0


NO_DRAFTS: dict[str, dict[str, Any]] = {
    "encoder-decoder": {"encoder_decoder": True},
    "a-forced-beginning": {"generation": GenerationRules(forced_first_id=7)},
    "a-forced-end": {"generation": GenerationRules(forced_last_id=EOS)},
    "suppressed-tokens": {"generation": GenerationRules(suppressed_ids=(7, 8))},
}


@pytest.mark.parametrize("kind", NO_DRAFTS.values(), ids=NO_DRAFTS)
def test_models_that_forbid_drafts_are_not_proven(kind: dict[str, Any]) -> None:
    runner = FakeRunner(memory=1)
    engine = fake_engine(runner, limits=LIMITS, **kind)
    engine.prove_speculation([long_case(40)])
    assert not runner.batches, "nothing to prove"
    engine._scheduler.drafter.enable()
    assert engine.max_draft_tokens == 0
    engine.add_request(request("a", PROMPT, max_tokens=40))
    assert num_drafted(drain(engine)) == 0


def test_rules_of_a_models_own_are_named_where_they_hold_for_every_output() -> None:
    rules = GenerationRules(forced_last_id=2, suppressed_ids=(7, 8), renormalize=True)
    assert dataclasses.replace(fake_model(), generation=rules).speculation_obstacle == (
        "rules of its own (forced_last_id, suppressed_ids) hold for every output, and rules count tokens as they come"
    )
    # Rules of beam searches, which get no drafts anyway.
    rules = GenerationRules(renormalize=True, patience=2.0)
    engine = fake_engine(FakeRunner(memory=1), limits=LIMITS, generation=rules)
    engine.prove_speculation([long_case(40)])
    assert engine.max_draft_tokens == 4


def test_drafts_have_no_more_tokens_than_there_are_rows_of_logits() -> None:
    limits = dataclasses.replace(LIMITS, prefill_chunk=4, max_prefill_tokens=4, look_up=16)
    runner = FakeRunner(memory=1)
    engine = fake_engine(runner, limits=limits)
    engine.prove_speculation([long_case(9)])
    assert engine.max_draft_tokens == 3
    engine.add_request(request("a", PROMPT, max_tokens=40))
    drain(engine)
    fed = [len(chunk.token_ids) for batch in runner.batches for chunk in batch.drafted]
    assert max(fed) == 4


def test_step_times_are_per_token_where_drafts_are_accepted() -> None:
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
