"""Beam search against the textbook written out the slow way."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.engine.batch import BeamRow
from service.engine.logits import LogitsRules, make_beam_rules
from service.engine.sampling.beam import BeamSearch, Extension, Hypothesis
from service.engine.sampling.sampler import Expansion, Sampler, compute_logprobs
from service.engine.types import BeamSearchParams, FinishReason, StoppingParams

Float32 = npt.NDArray[np.float32]
Tokens = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A language model that is a table: logits of its own for every prefix, few distinct ones if they may tie."""

    seed: int
    vocab_size: int
    ties: bool = False

    def logits(self, prefix: Tokens) -> Float32:
        rng = np.random.default_rng([self.seed, len(prefix), *prefix])
        if self.ties:
            return rng.choice(np.array([-1.0, 0.0, 2.0], np.float32), self.vocab_size)
        return rng.standard_normal(self.vocab_size, dtype=np.float32) * 2

    def logprobs(self, prefix: Tokens) -> list[float]:
        return _logprobs(self, prefix)


@functools.cache
def _logprobs(model: Model, prefix: Tokens) -> list[float]:
    logits = [float(logit) for logit in model.logits(prefix)]
    normalizer = max(logits) + math.log(math.fsum(math.exp(logit - max(logits)) for logit in logits))
    return [logit - normalizer for logit in logits]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A model and all that a search is asked for."""

    model: Model
    params: BeamSearchParams
    max_tokens: int
    min_tokens: int = 0
    eos_ids: frozenset[int] = frozenset({0})
    stop_token_ids: frozenset[int] = frozenset()
    prompt: Tokens = ()

    @property
    def ends(self) -> frozenset[int]:
        return self.eos_ids | self.stop_token_ids

    def allows(self, prefix: Tokens, token_id: int) -> bool:
        """Rules by their definition."""
        if len(prefix) < self.min_tokens and token_id in self.ends:
            return False
        size, tokens = self.params.no_repeat_ngram_size, (*self.prompt, *prefix, token_id)
        ngrams = [tokens[i : i + size] for i in range(len(tokens) - size + 1)] if size else []
        return not ngrams or ngrams[-1] not in ngrams[:-1]

    def score(self, tokens: Tokens) -> float:
        total = 0.0
        for i, token_id in enumerate(tokens):
            total += self.model.logprobs(tokens[:i])[token_id]
        return total / max(len(tokens), 1) ** self.params.length_penalty


def expand_by_definition(task: Task, prefix: Tokens, count: int) -> Expansion:
    logprobs = task.model.logprobs(prefix)
    token_ids = [token_id for token_id in range(task.model.vocab_size) if task.allows(prefix, token_id)]
    token_ids = sorted(token_ids, key=lambda token_id: -logprobs[token_id])[:count]
    return Expansion(np.array(token_ids, np.int64), np.array([logprobs[token_id] for token_id in token_ids]))


def search(task: Task) -> tuple[Hypothesis, ...]:
    """The state machine alone, on the model's exact log-probabilities."""
    beams = BeamSearch(task.params, task.max_tokens, task.eos_ids, task.stop_token_ids)
    prefixes: list[Tokens] = [()]
    while not beams.is_over:
        assert beams.num_beams == len(prefixes) <= task.params.beam_size
        extensions = beams.advance([expand_by_definition(task, prefix, beams.num_candidates) for prefix in prefixes])
        prefixes = [(*prefixes[each.parent], each.token_id) for each in extensions]
    assert not prefixes
    return beams.hypotheses()


def search_with_sampler_and_rules(task: Task) -> tuple[Hypothesis, ...]:
    """As it is served: float32 logits, rules that fork."""
    stopping = StoppingParams(min_tokens=task.min_tokens, stop_token_ids=task.stop_token_ids)
    beams = BeamSearch(task.params, task.max_tokens, task.eos_ids, task.stop_token_ids)
    prefixes: list[Tokens] = [()]
    rules = [make_beam_rules(task.params, stopping, task.eos_ids, task.prompt)]
    while not beams.is_over:
        logits = np.stack([task.model.logits(prefix) for prefix in prefixes])
        row = BeamRow(tuple(range(len(prefixes))), beams.num_candidates, tuple(rules), logprobs=2)
        (expansions,) = Sampler().expand(logits, [row])
        assert expansions is not None
        extensions = beams.advance(expansions)
        prefixes = [(*prefixes[each.parent], each.token_id) for each in extensions]
        rules = [extended(rules[each.parent], each.token_id) for each in extensions]
    return beams.hypotheses()


def extended(rules: LogitsRules | None, token_id: int) -> LogitsRules | None:
    if rules is None:
        return None
    fork = rules.fork()
    fork.add(token_id)
    return fork


def search_by_the_book(task: Task, num_steps: int = 1000) -> list[Tokens]:
    """Every continuation of every beam, sorted; after `num_steps`, the beams as they are compete with the finished."""
    size = task.params.beam_size
    beams: list[tuple[float, Tokens]] = [(0.0, ())]
    finished: list[Tokens] = []
    for step in range(min(task.max_tokens, num_steps)):
        candidates = []
        for rank, (total, prefix) in enumerate(beams):
            for token_id, logprob in enumerate(task.model.logprobs(prefix)):
                if task.allows(prefix, token_id):
                    candidates.append((-(total + logprob), rank, -logprob, token_id, prefix))
        if not candidates:
            finished = finished or [prefix for _, prefix in beams]
            break
        candidates.sort()
        is_last = step == task.max_tokens - 1
        finished += [
            (*prefix, token_id) for *_, token_id, prefix in candidates[:size] if token_id in task.ends or is_last
        ]
        beams = [
            (-cost, (*prefix, token_id)) for cost, _, _, token_id, prefix in candidates if token_id not in task.ends
        ][:size]
        if task.params.patience == 0:
            kept = sorted(map(task.score, finished), reverse=True)[:size]
            if len(kept) == size and (not beams or task.score(beams[0][1]) <= kept[-1]):
                break
        elif len(finished) >= max(size * task.params.patience, task.params.num_hypotheses):
            break
    else:
        finished += [prefix for _, prefix in beams] if num_steps < task.max_tokens else []
    return sorted(finished, key=task.score, reverse=True)[: task.params.num_hypotheses]


def reason_of(task: Task, tokens: Tokens) -> FinishReason:
    if task.eos_ids.intersection(tokens[-1:]):
        return FinishReason.END_OF_SEQUENCE
    return FinishReason.STOP if task.stop_token_ids.intersection(tokens[-1:]) else FinishReason.LENGTH


def check(task: Task, found: Sequence[Hypothesis], expected: Sequence[Tokens], tolerance: float = 1e-15) -> None:
    assert [each.token_ids for each in found] == list(expected)
    for each in found:
        assert each.score == pytest.approx(task.score(each.token_ids), rel=tolerance)
        assert [logprobs.logprob for logprobs in each.logprobs] == pytest.approx(
            [task.model.logprobs(each.token_ids[:i])[token_id] for i, token_id in enumerate(each.token_ids)],
            abs=tolerance,
        )
        assert each.finish_reason is reason_of(task, each.token_ids)
        assert each.matched_stop == (each.token_ids[-1] if each.finish_reason is FinishReason.STOP else None)


TASKS = st.builds(
    Task,
    model=st.builds(Model, seed=st.integers(0, 10**6), vocab_size=st.integers(2, 5), ties=st.booleans()),
    params=st.builds(
        BeamSearchParams,
        beam_size=st.integers(1, 5),
        num_hypotheses=st.integers(1, 5),
        length_penalty=st.sampled_from([-1.0, 0.0, 0.6, 1.0, 2.0]),
        patience=st.sampled_from([0.0, 0.2, 1.0, 1.5, 3.0]),
        no_repeat_ngram_size=st.integers(0, 3),
    ).map(lambda params: dataclasses.replace(params, num_hypotheses=min(params.num_hypotheses, params.beam_size))),
    max_tokens=st.integers(1, 5),
    min_tokens=st.integers(0, 3),
    eos_ids=st.frozensets(st.integers(0, 1)),
    stop_token_ids=st.frozensets(st.integers(1, 4), max_size=2),
    prompt=st.lists(st.integers(0, 4), max_size=4).map(tuple),
)


@given(TASKS)
def test_search_is_that_of_the_book(task: Task) -> None:
    """Ties and all, whatever is asked for; that it may end earlier than the book's makes no difference."""
    check(task, search(task), search_by_the_book(task))


@pytest.mark.parametrize("seed", range(60))
def test_search_by_sampler_and_rules_is_that_of_the_book(seed: int) -> None:
    """Seeds are fixed: a float32 softmax could turn the order of two sums that differ by less than it is good for."""
    rng = np.random.default_rng(seed)
    params = BeamSearchParams(
        beam_size=int(rng.integers(1, 6)),
        length_penalty=float(rng.choice([-0.5, 0.0, 1.0, 1.5])),
        patience=float(rng.choice([0.0, 0.5, 1.0, 2.0])),
        no_repeat_ngram_size=int(rng.integers(0, 4)),
    )
    task = Task(
        model=Model(seed=seed, vocab_size=int(rng.choice([7, 50]))),
        params=dataclasses.replace(params, num_hypotheses=int(rng.integers(1, params.beam_size + 1))),
        max_tokens=7,
        min_tokens=int(rng.integers(0, 4)),
        stop_token_ids=frozenset({0, 3}) if seed % 2 else frozenset(),
        prompt=tuple(rng.integers(0, 7, 6).tolist()),
    )
    check(task, search_with_sampler_and_rules(task), search_by_the_book(task), tolerance=1e-6)


@given(TASKS, st.integers(0, 4))
def test_search_that_is_stopped_tells_the_best_of_what_was_finished_and_what_was_not(
    task: Task, num_steps: int
) -> None:
    beams = BeamSearch(task.params, task.max_tokens, task.eos_ids, task.stop_token_ids)
    prefixes: list[Tokens] = [()]
    for _ in range(num_steps):
        if not beams.is_over:
            extensions = beams.advance([expand_by_definition(task, each, beams.num_candidates) for each in prefixes])
            prefixes = [(*prefixes[each.parent], each.token_id) for each in extensions]
    was_over = beams.is_over
    found = beams.stop(FinishReason.DEADLINE)
    assert beams.is_over
    assert found == beams.hypotheses()
    if was_over:
        assert found == search(task)
        return
    assert [each.token_ids for each in found] == search_by_the_book(task, num_steps)
    for each in found:
        assert (each.finish_reason is FinishReason.DEADLINE) == (each.token_ids in prefixes)
        assert each.score == pytest.approx(task.score(each.token_ids), rel=1e-15)


def expansion(*candidates: tuple[int, float]) -> Expansion:
    token_ids, logprobs = zip(*candidates, strict=True) if candidates else ((), ())
    return Expansion(np.array(token_ids, np.int64), np.array(logprobs, np.float64))


def search_of(
    beam_size: int, *, max_tokens: int = 9, stop_token_ids: frozenset[int] = frozenset(), **params: float
) -> BeamSearch:
    """Token 0 ends a sequence."""
    return BeamSearch(
        BeamSearchParams(beam_size=beam_size, **params),  # type: ignore[arg-type]
        max_tokens,
        frozenset({0}),
        stop_token_ids,
    )


def test_ties_go_to_the_better_beam_then_to_the_more_probable_token_then_to_the_lower_id() -> None:
    beams = search_of(3)
    assert beams.advance([expansion((7, -1.0), (8, -1.0), (3, -2.0), (9, -2.0))]) == (
        Extension(0, 7),
        Extension(0, 8),
        Extension(0, 3),
    )
    assert beams.advance([expansion((5, -3.0), (6, -3.0)), expansion((1, -3.0)), expansion((2, -2.0))]) == (
        Extension(0, 5),
        Extension(0, 6),
        Extension(1, 1),
    )


def test_many_ties_keep_their_order() -> None:
    beams = search_of(40)
    first = beams.advance([expansion(*((token_id, -1.0) for token_id in range(1, 41)))])
    assert [each.token_id for each in first] == list(range(1, 41))
    second = beams.advance([expansion((1, -1.0), (2, -2.0)) for _ in first])
    assert second == tuple(Extension(parent, 1) for parent in range(40))


def test_hypotheses_with_equal_scores_stand_in_the_order_in_which_they_finished() -> None:
    beams = search_of(2, num_hypotheses=2, length_penalty=0.0, max_tokens=2)
    beams.advance([expansion((0, -2.0), (4, -1.0))])
    beams.advance([expansion((5, -1.0), (6, -3.0))])
    assert [each.token_ids for each in beams.hypotheses()] == [(0,), (4, 5)]


def test_candidates_suffice_though_every_end_is_among_the_best() -> None:
    beams = search_of(2, stop_token_ids=frozenset({0, 1}), num_hypotheses=2, patience=2.0)
    assert (beams.num_beams, beams.num_candidates) == (1, 4)
    assert beams.advance([expansion((0, -1.0), (1, -2.0), (2, -3.0), (3, -4.0))]) == (Extension(0, 2), Extension(0, 3))
    assert [each.finish_reason for each in beams.hypotheses()] == [FinishReason.END_OF_SEQUENCE, FinishReason.STOP]
    assert [each.matched_stop for each in beams.hypotheses()] == [None, 1]


def test_search_without_patience_ends_at_a_guess() -> None:
    """With the length to divide by, a beam at -1.5 could still become better than a hypothesis at -1."""
    for best, is_over in [(-1.5, True), (-0.5, False)]:
        beams = search_of(1, max_tokens=9, patience=0.0)
        beams.advance([expansion((0, -1.0), (2, best))])
        assert beams.is_over is is_over
    patient = search_of(1, max_tokens=9, patience=1000.0)
    patient.advance([expansion((0, -1.0), (2, -1.5))])
    assert not patient.is_over
    two = search_of(2, max_tokens=9, patience=0.0)
    two.advance([expansion((0, -1.0), (2, -1.5))])
    assert not two.is_over, "one of two has ended"


def test_search_ends_when_no_beam_can_still_win() -> None:
    """At max_tokens 9 a sum of -8 could still become a score of -8/9."""
    for best, is_over in [(-0.875, True), (-0.9, False)]:
        beams = search_of(2, max_tokens=9)
        beams.advance([expansion((0, best), (2, -8.0))])
        assert beams.is_over is is_over
        assert beams.num_beams == (not is_over)


@pytest.mark.parametrize("length_penalty", [1e300, -1e300, 200.0, -200.0])
@pytest.mark.parametrize("max_tokens", [1, 2, 100_000])
def test_search_survives_any_length_penalty(length_penalty: float, max_tokens: int) -> None:
    beams = search_of(2, num_hypotheses=2, length_penalty=length_penalty, patience=1e300, max_tokens=max_tokens)
    for _ in range(min(max_tokens, 40)):
        if not beams.is_over:
            beams.advance([expansion((3, -1.0), (0, -1.5), (4, -2.0))] * beams.num_beams)
    assert not any(math.isnan(each.score) for each in beams.hypotheses())


def test_search_that_nothing_may_follow_keeps_what_there_is() -> None:
    beams = search_of(2, num_hypotheses=2)
    beams.advance([expansion((3, -1.0), (4, -2.0))])
    assert beams.advance([expansion(), expansion()]) == ()
    found = [(each.token_ids, each.finish_reason, each.score) for each in beams.hypotheses()]
    assert found == [((3,), FinishReason.LENGTH, -1.0), ((4,), FinishReason.LENGTH, -2.0)]
    nothing = search_of(2)
    nothing.advance([expansion()])
    assert nothing.hypotheses() == (Hypothesis((), (), 0.0, FinishReason.LENGTH),)


def test_hypothesis_tells_the_alternatives_of_each_token() -> None:
    task = Task(model=Model(seed=1, vocab_size=6), params=BeamSearchParams(beam_size=3), max_tokens=5)
    (found,) = search_with_sampler_and_rules(task)
    for i, (token_id, logprobs) in enumerate(zip(found.token_ids, found.logprobs, strict=True)):
        row = task.model.logits(found.token_ids[:i])
        assert logprobs == compute_logprobs(row, token_id, 2)
