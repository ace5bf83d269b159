"""Tokens are drawn from exactly the distribution that the rules define: chi-square against brute force.

Every distribution is computed here, in double precision and by definition alone. Seeds are fixed, so that a test gives
the same statistic each time. A sampler that is right fails one of these tests with probability `SIGNIFICANCE`; and each
must find a sampler that ignores the rule in question wrong beyond all doubt.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import pytest
from scipy.stats import chi2

from service.engine.batch import SampleRow
from service.engine.logits import make_rules
from service.engine.sampling.sampler import Sampler
from service.engine.types import SamplingParams, StoppingParams

Float32 = npt.NDArray[np.float32]
Tokens = tuple[int, ...]

SIGNIFICANCE = 1e-4
BEYOND_DOUBT = 1e-12
NUM_DRAWS = 4000
EOS_IDS = frozenset({0})
NO_RULES = SamplingParams()
NO_STOPS = StoppingParams()


def probabilities(
    row: Sequence[float], sampling: SamplingParams, stopping: StoppingParams, prompt: Tokens = (), output: Tokens = ()
) -> dict[int, float]:
    """The next token's distribution; what is not in it is impossible. No two logits may tie."""
    logits = dict(enumerate(map(float, row)))
    for token_id, bias in sampling.logit_bias:
        logits[token_id] += bias
    for token_id in {*prompt, *output}:
        penalty = sampling.repetition_penalty
        logits[token_id] = logits[token_id] / penalty if logits[token_id] > 0 else logits[token_id] * penalty
    for token_id, count in Counter(output).items():
        logits[token_id] -= sampling.frequency_penalty * count + sampling.presence_penalty
    allowed = set(sampling.allowed_token_ids or logits)
    if len(output) < stopping.min_tokens:
        allowed -= EOS_IDS | stopping.stop_token_ids
    left = normalized({i: math.exp(logits[i] / sampling.temperature) for i in logits if i in allowed})
    left = {i: share for i, share in left.items() if share >= sampling.min_p * max(left.values())}
    ranked = sorted(left, key=lambda i: -left[i])
    if sampling.top_k:
        ranked = ranked[: sampling.top_k]
    left = normalized({i: left[i] for i in ranked})
    if sampling.top_p < 1:
        totals = itertools.accumulate(left[i] for i in ranked)
        ranked = ranked[: next(size for size, total in enumerate(totals, 1) if total >= sampling.top_p)]
    return normalized({i: left[i] for i in ranked})


def normalized(weights: dict[int, float]) -> dict[int, float]:
    total = math.fsum(weights.values())
    return {i: weight / total for i, weight in weights.items()}


def chi_square_p_value(observed: Mapping[Hashable, int], expected: Mapping[Hashable, float]) -> float:
    """The probability of a statistic (Pearson, 1900) no less than this one where `expected` is the truth.

    Cells that expect fewer than five are taken together.
    """
    if observed.keys() - expected.keys():
        return 0.0
    num_draws = sum(observed.values())
    cells = [(observed.get(key, 0), num_draws * share) for key, share in expected.items()]
    rare = [cell for cell in cells if cell[1] < 5]
    cells = [cell for cell in cells if cell[1] >= 5]
    if math.fsum(want for _, want in rare) >= 5:
        cells.append((sum(got for got, _ in rare), math.fsum(want for _, want in rare)))
    statistic = math.fsum((got - want) ** 2 / want for got, want in cells)
    return float(chi2.sf(statistic, len(cells) - 1))


def draw(
    row: Float32, sampling: SamplingParams, stopping: StoppingParams, prompt: Tokens = (), output: Tokens = ()
) -> Counter[int]:
    rules = make_rules(sampling, stopping, EOS_IDS, prompt)
    if rules is not None:
        for token_id in output:
            rules.add(token_id)
    rows = [SampleRow(0, 0, position, sampling, 11, None, rules) for position in range(NUM_DRAWS)]
    results = Sampler().sample(row[np.newaxis], rows)
    return Counter(result.token_id for result in results if result is not None)


ROW = np.array([0.5, 1.0, -0.5, 0.1, 1.5, 0.25, -1.0, 0.75, 0.0, 0.6, -0.25, 1.1], np.float32)
PROMPT, OUTPUT = (1, 1, 3, 6), (4, 4, 4, 1, 9)
CASES = {
    "min_tokens": (NO_RULES, StoppingParams(min_tokens=9, stop_token_ids=frozenset({4}))),
    "top_k and top_p": (SamplingParams(temperature=1.7, top_k=9, top_p=0.85), NO_STOPS),
    "min_p and top_p": (SamplingParams(temperature=0.6, min_p=0.2, top_p=0.8), NO_STOPS),
    "penalties": (
        SamplingParams(repetition_penalty=1.5, presence_penalty=-0.5, frequency_penalty=0.25, temperature=0.6),
        NO_STOPS,
    ),
    "everything": (
        SamplingParams(
            temperature=0.7,
            top_p=0.9,
            top_k=5,
            repetition_penalty=1.5,
            presence_penalty=-0.5,
            frequency_penalty=0.25,
            logit_bias=((2, 1.0), (7, -0.8)),
            allowed_token_ids=(0, 1, 2, 4, 7, 8, 10),
        ),
        StoppingParams(min_tokens=9),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_tokens_are_drawn_from_the_distribution_that_the_rules_define(name: str) -> None:
    """And leaving out any one rule of a combination is noticed, so that none hides behind the others."""
    sampling, stopping = CASES[name]
    counts = draw(ROW, sampling, stopping, PROMPT, OUTPUT)
    assert counts.total() == NUM_DRAWS
    assert chi_square_p_value(counts, probabilities(ROW, sampling, stopping, PROMPT, OUTPUT)) > SIGNIFICANCE
    for field in dataclasses.fields(sampling):
        if getattr(sampling, field.name) != field.default:
            without = dataclasses.replace(sampling, **{field.name: field.default})
            expected = probabilities(ROW, without, stopping, PROMPT, OUTPUT)
            assert chi_square_p_value(counts, expected) < BEYOND_DOUBT, field.name


@pytest.mark.parametrize(
    "sampling",
    [NO_RULES, SamplingParams(top_k=60, top_p=0.8, min_p=0.01)],
    ids=["plain", "all"],
)
def test_tokens_of_a_larger_vocabulary_are_drawn_as_defined(sampling: SamplingParams) -> None:
    """Long enough that rows are folded and summed up in blocks."""
    row = np.random.default_rng(3).standard_normal(2100, dtype=np.float32) * 2
    counts = draw(row, sampling, NO_STOPS)
    assert chi_square_p_value(counts, probabilities(row, sampling, NO_STOPS)) > SIGNIFICANCE


def logits_after(prefix: Tokens) -> Float32:
    """A model of four tokens, two of which end an output: logits of its own for every prefix."""
    return np.random.default_rng([5, *prefix]).standard_normal(4, dtype=np.float32)


def is_over(tokens: Tokens) -> bool:
    return len(tokens) == 4 or tokens[-1:] in {(0,), (2,)}


SEQUENCE_SAMPLING = SamplingParams(
    temperature=1.3, top_p=0.97, repetition_penalty=1.4, presence_penalty=0.3, frequency_penalty=0.4
)
SEQUENCE_STOPPING = StoppingParams(min_tokens=1, stop_token_ids=frozenset({2}))


def test_whole_outputs_are_drawn_as_the_rules_define() -> None:
    """Rules that change with every token, positions and seeds: the law of all outputs together."""
    expected: dict[Tokens, float] = {}

    def visit(prefix: Tokens, share: float) -> None:
        if is_over(prefix):
            expected[prefix] = share
            return
        row = logits_after(prefix)
        for token_id, more in probabilities(row, SEQUENCE_SAMPLING, SEQUENCE_STOPPING, (1,), prefix).items():
            visit((*prefix, token_id), share * more)

    visit((), 1.0)
    assert math.fsum(expected.values()) == pytest.approx(1)

    sampler, counts = Sampler(), Counter[Tokens]()
    for seed in range(NUM_DRAWS // 2):
        rules = make_rules(SEQUENCE_SAMPLING, SEQUENCE_STOPPING, EOS_IDS, (1,))
        assert rules is not None
        tokens: Tokens = ()
        while not is_over(tokens):
            row = SampleRow(0, 0, 1 + len(tokens), SEQUENCE_SAMPLING, seed, None, rules)
            (result,) = sampler.sample(logits_after(tokens)[np.newaxis], [row])
            assert result is not None
            rules.add(result.token_id)
            tokens = (*tokens, result.token_id)
        counts[tokens] += 1
    assert len(counts) > 10
    assert chi_square_p_value(counts, expected) > SIGNIFICANCE
