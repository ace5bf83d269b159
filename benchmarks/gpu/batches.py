"""Whether company changes an answer: the same requests alone and in batches of every kind that a server makes.

    ragged      all at once, prompts of many lengths
    mixed       one after the other, so that prompts are computed beside rows that decode
    preempted   urgent ones take the places of others, which go on later from what was saved of them
    shared      prompts that begin alike: what one has computed, the next one takes over

On a CPU, and where a library's products do not depend on how many rows they have, every token is the same. A GPU's may
round otherwise in larger batches; so where two answers part, float32 is asked whether that was a tie
(`benchmarks.gpu.oracle`). It never is where a row has read what belongs to another.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.engines import Answers, draw_prompt, forget, greedy, make_engine, serve
from benchmarks.gpu.oracle import Oracle
from benchmarks.gpu.parity import limits
from benchmarks.gpu.plan import Plan
from benchmarks.gpu.results import Scribe
from model.spec.config import ModelConfig
from model.spec.golden import Tolerance, tolerance_of
from service.engine.engine import Engine
from service.engine.types import GenerationRequest

NAME = "batches"
Arrivals = list[tuple[int, GenerationRequest]]
_NEW = 24
_STAGGER = 3


@dataclass(frozen=True, slots=True)
class Company:
    """A kind of batch: who comes when, and what must have happened for it to be one of its kind."""

    name: str
    arrivals: Arrivals
    happened: Callable[[Answers], bool]


def run(bench: Bench, scribe: Scribe) -> None:
    """The model in every precision."""
    plan, name, config = bench.plan, bench.stage.model, bench.proven
    oracle = Oracle(bench.workshop.on_device(name, config))
    for precision in plan.precisions:
        graphs = bench.workshop.graphs(name, config, precision)
        tolerance = tolerance_of(precision, graphs.manifest.kv_cache.precision)
        engine = make_engine(graphs, limits(plan))
        for company in companies(config, plan):
            found = compare(engine, company, oracle, tolerance)
            scribe.add("batches", {"model": name, "precision": precision, "kind": company.name, **found})
            text = f"{found['same']} of {found['requests']} the same to the token, {found['ties']} part at a tie"
            if not found["happened"]:
                text += "; but what makes it such a batch did not happen"
            holds = bool(found["happened"]) and found["same"] + found["ties"] == found["requests"]
            what = f"{name} {precision}, {company.name}: answers are those of requests alone, ties aside"
            scribe.claim(what, text, holds=holds)
        del engine
        gc.collect()


def compare(engine: Engine, company: Company, oracle: Oracle, tolerance: Tolerance) -> dict[str, int | bool]:
    """Each request alone, then all in company."""
    alone: dict[str, list[int]] = {}
    for _, request in company.arrivals:
        forget(engine)
        alone |= serve(engine, [(0, request)]).tokens
    forget(engine)
    together = serve(engine, company.arrivals)
    same = ties = 0
    for _, request in company.arrivals:
        mine, theirs = alone[request.request_id], together.tokens[request.request_id]
        if mine == theirs:
            same += 1
        else:
            ties += oracle.is_tie(request.prompt_token_ids, mine, theirs, tolerance)
    return {
        "requests": len(company.arrivals),
        "same": same,
        "ties": ties,
        "preemptions": together.num_preemptions,
        "cached_tokens": sum(together.num_cached.values()),
        "happened": company.happened(together),
    }


def companies(config: ModelConfig, plan: Plan) -> list[Company]:
    """Every kind, for a model."""
    num, size = 2 * plan.rows, plan.block_size
    new = min(_NEW, config.context // 4)
    ragged = _requests(config, _lengths(config, num, size), new)
    urgent = [
        greedy(f"urgent-{number}", _prompt(config, size + 1, 90 + number), new, priority=1) for number in range(2)
    ]
    shared = _shared(config, plan.rows, size, new)
    return [
        Company("ragged", [(0, request) for request in ragged], lambda answers: _largest(answers) == plan.rows),
        Company("mixed", [(_STAGGER, request) for request in ragged[:num]], _has_mixed_steps),
        Company(
            "preempted",
            [*((0, request) for request in ragged[: plan.rows]), (_STAGGER, urgent[0]), (1, urgent[1])],
            lambda answers: answers.num_preemptions > 0,
        ),
        Company(
            "shared",
            # The first one's prompt is known before the others ask.
            [(0, shared[0]), *((_STAGGER if number else 2 * new, each) for number, each in enumerate(shared[1:]))],
            lambda answers: sum(answers.num_cached.values()) > 0,
        ),
    ]


def _largest(answers: Answers) -> int:
    return max(step.num_decode_rows for step in answers.steps)


def _has_mixed_steps(answers: Answers) -> bool:
    """Whether a step computed a prompt, or a source, beside rows that decode: one of them may be the source's own."""
    return any(step.num_decode_rows > 1 and step.num_prefill_tokens + step.num_encoder_tokens for step in answers.steps)


def _lengths(config: ModelConfig, num: int, size: int) -> Sequence[int]:
    """From one token over several blocks, in no order."""
    longest = config.source_context if config.is_encoder_decoder else min(3 * size + 1, config.context // 2)
    lengths = np.geomspace(1, longest, num).round().astype(int)
    ordered: list[int] = np.random.default_rng(31).permutation(lengths).tolist()
    return ordered


def _requests(config: ModelConfig, lengths: Sequence[int], new: int) -> list[GenerationRequest]:
    return [
        greedy(f"r{number}", _prompt(config, length, number), new - number % 5) for number, length in enumerate(lengths)
    ]


def _shared(config: ModelConfig, num: int, size: int, new: int) -> list[GenerationRequest]:
    """Prompts that have one or two blocks in common; sources, which are known whole or not at all, are one source."""
    first = _prompt(config, 2 * size + size // 2, 70)
    if config.is_encoder_decoder:
        return [greedy(f"s{number}", first, new - number % 3) for number in range(num)]
    return [
        greedy(f"s{number}", [*first[: size * (1 + number % 2)], *_prompt(config, 5 + number, 80 + number)], new)
        for number in range(num)
    ]


def _prompt(config: ModelConfig, length: int, seed: int) -> list[int]:
    limit, vocab_size = (
        (config.source_context, config.source_vocab_size)
        if config.is_encoder_decoder
        else (config.context - _NEW - 1, config.vocab_size)
    )
    return draw_prompt(vocab_size, min(length, limit), seed)
