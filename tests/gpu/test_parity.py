"""A card answers as PyTorch does in float32 on the same card: golden cases, and greedy choices.

Promised of fp16, ten bits of fraction: logits within 2e-2 of their spread, 99 % of greedy choices float32's own. bf16
has seven bits: eight times as much of the spread, and choices that agree as often as PyTorch's own in bf16, to half a
percent.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks.frame.engine import greedy_request, serve
from export.golden_cases import make_cases
from model.nn import reference
from model.nn.transformer import build
from model.spec.artifact import Precision
from model.spec.golden import Tolerance
from tests.artifacts import tiny_config
from tests.gpu.subjects import Choices, Oracle, Subject, stirred

AGREEMENT = 0.99
MARGIN = 0.005
EXACT = Tolerance(absolute=1e-4)


def test_golden_cases_are_within_the_tolerance(subject: Subject) -> None:
    results = subject.engine().verify_golden(make_cases(subject.torch_model()), subject.tolerance)
    assert results
    assert [(result.name, result.max_relative_error) for result in results if not result.passed] == []


def test_greedy_choices_are_float32s_and_the_others_ties(subject: Subject) -> None:
    config, (num_tokens, new) = subject.config, (60, 20) if subject.is_tiny else (5000, 200)
    longest = min(64, config.source_context if config.is_encoder_decoder else config.context // 4)
    new = min(new, config.context - (1 if config.is_encoder_decoder else longest))
    rng = np.random.default_rng(17)
    numbers = range(math.ceil(num_tokens / new))
    prompts = {f"g{each}": subject.prompt(int(rng.integers(4, longest + 1)), each) for each in numbers}
    answers = serve(subject.engine(), ((0, greedy_request(name, ids, new)) for name, ids in prompts.items()))
    oracle, rounded = Oracle(subject.torch_model()), subject.torch_model(subject.precision)
    ours, theirs = Choices(), Choices()
    for name, prompt in prompts.items():
        ours += oracle.judge(prompt, answers.tokens[name], subject.tolerance)
        theirs += oracle.judge_model(rounded, prompt, answers.tokens[name], subject.tolerance)
    assert ours.num >= num_tokens
    assert ours.num_wrong == 0
    assert ours.agreement >= least_agreement(subject.precision, theirs)


def least_agreement(precision: Precision, by_torch: Choices) -> float:
    return min(AGREEMENT, by_torch.agreement - MARGIN) if precision is Precision.BF16 else AGREEMENT


# What these checks refuse.


def tiny_oracle() -> tuple[Oracle, list[int], list[int]]:
    """An oracle, a prompt, and its own answer."""
    model = stirred(build(tiny_config("decoder-only"), 3))
    prompt = np.random.default_rng(1).integers(3, 288, 9).tolist()
    return Oracle(model), prompt, reference.greedy(model, prompt, max_tokens=12)


def test_a_greedy_choice_that_is_not_float32s_is_wrong_unless_it_is_a_tie() -> None:
    oracle, prompt, chosen = tiny_oracle()
    assert oracle.judge(prompt, chosen, EXACT) == Choices(12, 12, 0)
    changed = [*chosen[:11], (chosen[11] + 1) % 288]
    assert oracle.judge(prompt, changed, EXACT) == Choices(12, 11, 1)
    assert oracle.judge(prompt, changed, Tolerance(absolute=100.0)) == Choices(12, 11, 0)
    same, other = (stirred(build(tiny_config("decoder-only", tie_embeddings=tied), 3)) for tied in (True, False))
    assert oracle.judge_model(same, prompt, changed, EXACT) == Choices(12, 12, 0)
    assert oracle.judge_model(other, prompt, changed, EXACT).num_wrong > 6


def test_answers_may_part_at_a_tie_and_nowhere_else() -> None:
    oracle, prompt, chosen = tiny_oracle()
    other = [*chosen[:5], (chosen[5] + 1) % 288, *chosen[6:]]
    assert oracle.is_tie(prompt, chosen, chosen, EXACT)
    assert not oracle.is_tie(prompt, chosen, other, EXACT)
    assert not oracle.is_tie(prompt, other, chosen, EXACT)
    assert not oracle.is_tie(prompt, chosen, chosen[:-1], EXACT)
    assert oracle.is_tie(prompt, chosen, other, Tolerance(absolute=100.0))


@pytest.mark.parametrize(
    ("precision", "theirs", "least"),
    [(Precision.FP16, 4800, 0.99), (Precision.BF16, 5000, 0.99), (Precision.BF16, 4900, 0.975)],
)
def test_fp16_agrees_with_float32_and_bf16_as_often_as_pytorch_does(
    precision: Precision, theirs: int, least: float
) -> None:
    assert least_agreement(precision, Choices(5000, theirs, 0)) == pytest.approx(least)
