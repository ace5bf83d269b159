"""Each rule against its definition, written out the slow way."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from service.engine.batch import SampleRow
from service.engine.logits import LogitsRules, NgramIndex, TokenHistory, make_beam_rules, make_rules
from service.engine.sampling.sampler import SampledToken, Sampler, compute_logprobs
from service.engine.types import BeamSearchParams, SamplingParams, StoppingParams

Float32 = npt.NDArray[np.float32]

VOCAB_SIZE = 12
EOS_IDS = frozenset({0, 5})
TOKENS = st.integers(0, VOCAB_SIZE - 1)
LARGEST = float(np.finfo(np.float32).max)

ROWS = hnp.arrays(np.float32, VOCAB_SIZE, elements=st.sampled_from([-30.0, -1.5, -0.0, 0.0, 0.25, 1.0, 9.0]))
SAMPLING = st.builds(
    SamplingParams,
    repetition_penalty=st.sampled_from([0.5, 1.0, 1.25, 2.0]),
    presence_penalty=st.sampled_from([-2.0, 0.0, 0.75]),
    frequency_penalty=st.sampled_from([-0.25, 0.0, 2.0]),
    logit_bias=st.dictionaries(TOKENS, st.sampled_from([-100.0, -0.5, 0.0, 3.0, 100.0])).map(lambda d: (*d.items(),)),
    allowed_token_ids=st.lists(TOKENS).map(tuple),
)
STOPPING = st.builds(StoppingParams, min_tokens=st.integers(0, 6), stop_token_ids=st.frozensets(TOKENS, max_size=3))


def rules_after(
    sampling: SamplingParams, stopping: StoppingParams, prompt: list[int], output: list[int]
) -> LogitsRules | None:
    rules = make_rules(sampling, stopping, EOS_IDS, prompt)
    if rules is not None:
        for token_id in output:
            rules.add(token_id)
    return rules


def by_definition(
    row: Float32, sampling: SamplingParams, stopping: StoppingParams, prompt: list[int], output: list[int]
) -> list[float]:
    """In vLLM's own order: masks, bias, repetition, frequency, presence."""
    allowed = set(sampling.allowed_token_ids or range(VOCAB_SIZE))
    if len(output) < stopping.min_tokens:
        allowed -= EOS_IDS | stopping.stop_token_ids
    logits = [float(logit) if token_id in allowed else -math.inf for token_id, logit in enumerate(row)]
    for token_id, bias in sampling.logit_bias:
        logits[token_id] += bias
    for token_id in {*prompt, *output}:
        penalty = sampling.repetition_penalty
        logits[token_id] = logits[token_id] / penalty if logits[token_id] > 0 else logits[token_id] * penalty
    for token_id, count in Counter(output).items():
        logits[token_id] -= sampling.frequency_penalty * count
        logits[token_id] -= sampling.presence_penalty
    return logits


@given(ROWS, SAMPLING, STOPPING, st.lists(TOKENS), st.lists(TOKENS))
@example(np.ones(VOCAB_SIZE, np.float32), SamplingParams(repetition_penalty=2.0), StoppingParams(), [1, 1], [2, 2])
def test_rules_give_what_their_definitions_give(
    row: Float32, sampling: SamplingParams, stopping: StoppingParams, prompt: list[int], output: list[int]
) -> None:
    before = row.copy()
    rules = rules_after(sampling, stopping, prompt, output)
    logits = row if rules is None else rules.apply(row)
    expected = by_definition(row, sampling, stopping, prompt, output)
    np.testing.assert_allclose(logits, np.array(expected, np.float32), rtol=1e-6, atol=1e-6)
    assert row.tobytes() == before.tobytes(), "logprobs are taken from the raw logits"


def test_counts_outgrow_any_capacity() -> None:
    counts = TokenHistory(range(100, 150))
    for token_id in [*range(1000), *range(1000)]:
        counts.add(token_id)
    assert dict(zip(counts.token_ids.tolist(), counts.counts.tolist(), strict=True)) == dict.fromkeys(range(1000), 2.0)


def followers_by_definition(size: int, tokens: list[int]) -> set[int]:
    return {
        tokens[end]
        for end in range(size - 1, len(tokens))
        if len(tokens) >= size - 1 and tokens[end - size + 1 : end] == tokens[len(tokens) - size + 1 :]
    }


@given(st.integers(1, 4), st.lists(st.integers(0, 2), max_size=12), st.lists(st.integers(0, 2), max_size=12))
def test_followers_are_the_tokens_that_would_repeat_an_ngram(size: int, given: list[int], added: list[int]) -> None:
    index = NgramIndex(size, given)
    for count in range(len(added) + 1):
        tokens = [*given, *added[:count]]
        assert set(index.followers) == followers_by_definition(size, tokens)
        if count < len(added):
            index.add(added[count])


@given(ROWS, STOPPING, st.integers(0, 3), st.lists(TOKENS, max_size=8), st.lists(TOKENS, max_size=8))
def test_beam_rules_mask_early_ends_and_repeated_ngrams_and_nothing_else(
    row: Float32, stopping: StoppingParams, size: int, prompt: list[int], output: list[int]
) -> None:
    params = BeamSearchParams(beam_size=2, no_repeat_ngram_size=size)
    rules = make_beam_rules(params, stopping, EOS_IDS, prompt)
    masked = followers_by_definition(size, [*prompt, *output]) if size else set()
    if len(output) < stopping.min_tokens:
        masked |= EOS_IDS | stopping.stop_token_ids
    if rules is not None:
        for token_id in output:
            rules.add(token_id)
    result = row if rules is None else rules.apply(row)
    assert result.tolist() == [-math.inf if token_id in masked else row[token_id] for token_id in range(VOCAB_SIZE)]


@given(ROWS, SAMPLING, STOPPING, st.lists(TOKENS), st.lists(TOKENS), st.lists(TOKENS), st.lists(TOKENS))
def test_fork_goes_on_by_itself(
    row: Float32,
    sampling: SamplingParams,
    stopping: StoppingParams,
    prompt: list[int],
    common: list[int],
    one: list[int],
    other: list[int],
) -> None:
    """Whichever of the two goes on first, each is what it would be had there been no other."""
    makers = [
        lambda: make_rules(sampling, stopping, EOS_IDS, prompt),
        lambda: make_beam_rules(BeamSearchParams(beam_size=2, no_repeat_ngram_size=2), stopping, EOS_IDS, prompt),
    ]
    for make in makers:
        if (rules := make()) is None:
            continue
        for token_id in common:
            rules.add(token_id)
        fork = rules.fork()
        for token_id in one:
            rules.add(token_id)
        for token_id in other:
            fork.add(token_id)
        for result, rest in ((rules, one), (fork, other)):
            alone = make()
            assert alone is not None
            for token_id in [*common, *rest]:
                alone.add(token_id)
            assert result.apply(row).tolist() == alone.apply(row).tolist()


def test_request_without_rules_has_none() -> None:
    assert make_beam_rules(BeamSearchParams(beam_size=4), StoppingParams(), EOS_IDS, [1, 2]) is None
    assert make_rules(SamplingParams(temperature=0.5, top_k=3), StoppingParams(), EOS_IDS, [1, 2]) is None
    assert make_rules(SamplingParams(), StoppingParams(min_tokens=3), frozenset(), [1, 2]) is None


def test_rules_with_nothing_to_change_do_not_copy() -> None:
    row = np.zeros(VOCAB_SIZE, np.float32)
    stopping = StoppingParams(min_tokens=2)
    assert (met := rules_after(SamplingParams(), stopping, [], [1, 2])) is not None
    assert met.apply(row) is row
    assert (unmet := rules_after(SamplingParams(), stopping, [], [1])) is not None
    assert unmet.apply(row) is not row
    assert (unseen := rules_after(SamplingParams(presence_penalty=1.0), StoppingParams(), [1], [])) is not None
    assert unseen.apply(row) is row


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rules_keep_extreme_logits_finite_and_the_row_alive(temperature: float) -> None:
    row = np.array([LARGEST, -LARGEST, 0.0, -1.0], np.float32)
    for sampling in (
        SamplingParams(repetition_penalty=1e-300),
        SamplingParams(repetition_penalty=2.0, presence_penalty=2.0),
        SamplingParams(logit_bias=((0, 100.0), (1, -100.0))),
    ):
        rules = rules_after(sampling, StoppingParams(), [0, 1, 2, 3], [0, 1])
        assert rules is not None
        assert np.isfinite(rules.apply(row)).all()
        params = dataclasses.replace(sampling, temperature=temperature)
        (result,) = Sampler().sample(row[np.newaxis], [SampleRow(0, 0, 3, params, 1, None, rules)])
        assert result == SampledToken(0, None)


def test_logprobs_do_not_feel_the_rules() -> None:
    row = np.array([[5.0, 4.0, 3.0, 2.0]], np.float32)
    params = SamplingParams(temperature=0.0, repetition_penalty=2.0, allowed_token_ids=(2, 3))
    rules = make_rules(params, StoppingParams(), (), [2])
    (result,) = Sampler().sample(row, [SampleRow(0, 0, 1, params, 0, 2, rules)])
    assert result == SampledToken(3, compute_logprobs(row[0], 3, 2))


def test_row_that_is_not_finite_fails_whatever_its_rules() -> None:
    row = np.array([[np.nan, 1.0, np.inf]], np.float32)
    rules = make_rules(SamplingParams(allowed_token_ids=(1,)), StoppingParams(), (), ())
    assert Sampler().sample(row, [SampleRow(0, 0, 1, SamplingParams(), 0, None, rules)]) == (None,)
