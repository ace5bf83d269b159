"""Answers are independent of batch composition: the same requests alone and in every kind of batch that a server makes.

On a CPU every token is the same. A card's library may round otherwise in larger batches; so where two answers part,
float32 must see a tie there. It never does where a row has read what belongs to another.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from benchmarks.frame.engine import Answers, greedy_request, serve
from model.spec.golden import Tolerance
from service.engine.types import GenerationRequest
from tests.gpu.subjects import Oracle, Subject

Arrivals = list[tuple[int, GenerationRequest]]
_STAGGER = 3


def ragged_requests(subject: Subject) -> list[GenerationRequest]:
    """Prompts from one token over several blocks, in no order."""
    config, num, size = subject.config, 2 * subject.rows, subject.block_size
    longest = config.source_context if config.is_encoder_decoder else min(3 * size + 1, config.context // 2)
    lengths = np.random.default_rng(31).permutation(np.geomspace(1, longest, num).round().astype(int))
    return [
        greedy_request(f"r{number}", subject.prompt(int(length), number), _new(subject) - number % 5)
        for number, length in enumerate(lengths)
    ]


def _new(subject: Subject) -> int:
    return min(24, subject.config.context // 4)


def ragged(subject: Subject) -> tuple[Arrivals, Callable[[Answers], bool]]:
    """All at once."""
    arrivals = [(0, request) for request in ragged_requests(subject)]
    return arrivals, lambda answers: max(step.num_decode_rows for step in answers.steps) == subject.rows


def mixed(subject: Subject) -> tuple[Arrivals, Callable[[Answers], bool]]:
    """One after the other, so that prompts are computed beside rows that decode."""
    arrivals = [(_STAGGER, request) for request in ragged_requests(subject)]
    return arrivals, lambda answers: any(
        step.num_decode_rows > 1 and step.num_prefill_tokens + step.num_encoder_tokens for step in answers.steps
    )


def preempted(subject: Subject) -> tuple[Arrivals, Callable[[Answers], bool]]:
    """Urgent requests take the rows of others, which continue from their saved K/V."""
    urgent = [
        greedy_request(f"u{number}", subject.prompt(subject.block_size + 1, 90 + number), _new(subject), priority=1)
        for number in range(2)
    ]
    first = [(0, request) for request in ragged_requests(subject)[: subject.rows]]
    return [*first, (_STAGGER, urgent[0]), (1, urgent[1])], lambda answers: answers.num_preemptions > 0


def shared(subject: Subject) -> tuple[Arrivals, Callable[[Answers], bool]]:
    """Shared prefixes, or one source: the first request fills the cache, the others hit it."""
    size, new, source = subject.block_size, _new(subject), subject.prompt(5 * subject.block_size // 2, 70)
    requests = [
        greedy_request(f"s{number}", source, new - number % 3)
        if subject.config.is_encoder_decoder
        else greedy_request(
            f"s{number}", [*source[: size * (1 + number % 2)], *subject.prompt(5 + number, 80 + number)], new
        )
        for number in range(subject.rows)
    ]
    delays = [0, 2 * new, *[_STAGGER] * (len(requests) - 2)]
    return list(zip(delays, requests, strict=True)), lambda answers: sum(answers.num_cached.values()) > 0


@pytest.mark.parametrize("kind", [ragged, mixed, preempted, shared], ids=lambda kind: kind.__name__)
def test_answers_in_a_batch_are_those_of_requests_alone(
    subject: Subject, kind: Callable[[Subject], tuple[Arrivals, Callable[[Answers], bool]]]
) -> None:
    arrivals, happened = kind(subject)
    engine, alone = subject.engine(), dict[str, list[int]]()
    for _, request in arrivals:
        engine.verify_golden((), Tolerance())  # empties the prefix cache
        alone |= serve(engine, [(0, request)]).tokens
    engine.verify_golden((), Tolerance())
    together = serve(engine, arrivals)
    assert happened(together)
    oracle = Oracle(subject.torch_model())
    for _, request in arrivals:
        mine, theirs = alone[request.request_id], together.tokens[request.request_id]
        assert mine == theirs or oracle.is_tie(request.prompt_token_ids, mine, theirs, subject.tolerance)
