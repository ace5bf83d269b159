"""Beam search against searching everything, and against the textbook written out the slow way."""

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
from service.engine.beam import BeamSearch, Hypothesis
from service.engine.logits import LogitsRules, make_beam_rules
from service.engine.sampler import Expansion, Sampler
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
        return total / len(tokens) ** self.params.length_penalty


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


def search_everything(task: Task) -> list[Tokens]:
    """All outputs that the rules allow, best first."""
    outputs = []

    def visit(prefix: Tokens) -> None:
        for token_id in range(task.model.vocab_size):
            if task.allows(prefix, token_id):
                tokens = (*prefix, token_id)
                if token_id in task.ends or len(tokens) == task.max_tokens:
                    outputs.append(tokens)
                else:
                    visit(tokens)

    visit(())
    return sorted(outputs, key=task.score, reverse=True)


def search_by_the_book(task: Task) -> list[Tokens]:
    """Every continuation of every beam, sorted; no end before its time."""
    size = task.params.beam_size
    beams: list[tuple[float, Tokens]] = [(0.0, ())]
    finished: list[Tokens] = []
    for step in range(task.max_tokens):
        candidates = []
        for rank, (total, prefix) in enumerate(beams):
            for token_id, logprob in enumerate(task.model.logprobs(prefix)):
                if task.allows(prefix, token_id):
                    candidates.append((-(total + logprob), rank, -logprob, token_id, prefix))
        candidates.sort()
        is_last = step == task.max_tokens - 1
        finished += [
            (*prefix, token_id) for *_, token_id, prefix in candidates[:size] if token_id in task.ends or is_last
        ]
        if len(finished) >= max(size * task.params.patience, task.params.num_hypotheses):
            break
        beams = [
            (-cost, (*prefix, token_id)) for cost, _, _, token_id, prefix in candidates if token_id not in task.ends
        ][:size]
    return sorted(finished, key=task.score, reverse=True)[: task.params.num_hypotheses]


def reason_of(task: Task, tokens: Tokens) -> FinishReason:
    if tokens[-1] in task.eos_ids:
        return FinishReason.END_OF_SEQUENCE
    return FinishReason.STOP if tokens[-1] in task.stop_token_ids else FinishReason.LENGTH


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
    model=st.builds(Model, seed=st.integers(0, 10**6), vocab_size=st.integers(2, 5)),
    params=st.builds(
        BeamSearchParams,
        beam_size=st.integers(1, 5),
        length_penalty=st.sampled_from([-1.0, 0.0, 0.6, 1.0, 2.0]),
        patience=st.sampled_from([0.2, 1.0, 1.5, 3.0]),
        no_repeat_ngram_size=st.integers(0, 3),
    ),
    max_tokens=st.integers(1, 5),
    min_tokens=st.integers(0, 3),
    eos_ids=st.frozensets(st.integers(0, 1)),
    stop_token_ids=st.frozensets(st.integers(1, 4), max_size=2),
    prompt=st.lists(st.integers(0, 4), max_size=4).map(tuple),
)


@given(TASKS, st.integers(1, 5))
def test_search_is_that_of_the_book(task: Task, num_hypotheses: int) -> None:
    params = dataclasses.replace(task.params, num_hypotheses=min(num_hypotheses, task.params.beam_size))
    task = dataclasses.replace(task, params=params)
    expected = search_by_the_book(task)
    if expected:
        check(task, search(task), expected)


@given(TASKS, st.sampled_from([1, 3, 1000]))
def test_search_with_room_for_all_finds_the_best_of_all(task: Task, num_hypotheses: int) -> None:
    params = dataclasses.replace(task.params, beam_size=1000, num_hypotheses=num_hypotheses, patience=5.0)
    task = dataclasses.replace(task, params=params, max_tokens=min(task.max_tokens, 4))
    if expected := search_everything(task):
        check(task, search(task), expected[:num_hypotheses])
