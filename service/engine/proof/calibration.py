"""Calibration: steps of a few lengths and batch sizes, timed before the first request.

The first step of each size is left out, as bindings are made and memory is touched then. Drives an engine as its thread
does; knows nothing of how the times are used.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from service.engine.chunks import ChunkRules
from service.engine.interfaces import StepEngine
from service.engine.types import GenerationRequest, SamplingParams, StepStats, StoppingParams

MAX_SECONDS = 0.5
"""For a model's calibration; other sizes are learned from requests."""

_SHORT_PROMPT = 8
# Sources: each this many times as long as the one before; those beyond `_EARLY_SOURCE` come last.
_LADDER = 4
_EARLY_SOURCE = 512
_NUM_DECODES = 4
_NUM_PASSES = 4
_SEED = 1


@dataclass(frozen=True, slots=True)
class Round:
    """Equal requests at once: their number, and tokens of each prompt or source and output."""

    num_requests: int
    num_prompt_tokens: int
    num_new_tokens: int


def rounds(rules: ChunkRules, max_batch_size: int, max_prefill_tokens: int) -> Iterator[Round]:
    """Yields rounds, the most informative first, as a slow model completes only few.

    One row, the largest batch, longer prompts or sources, batches in between, the longest prompt or source. As a step
    admits no more than `max_prefill_tokens`, the first rows of a batch generate until the last are admitted.
    """
    longest, chunk = rules.source_context or rules.context - _NUM_DECODES - 1, rules.chunk
    short = max(1, min(_SHORT_PROMPT, longest))
    if rules.source_context:
        ladder = [short]
        while ladder[-1] * _LADDER < longest:
            ladder.append(ladder[-1] * _LADDER)
        early = [length for length in ladder if length <= _EARLY_SOURCE]
        late = [*ladder[len(early) :], longest]
    else:
        early = [short, *(max(short, min(length, longest)) for length in (chunk // 4, 5 * chunk // 2))]
        late = [max(short, min(6 * chunk, longest))]
    padded = rules.padded_source_length(short) or rules.padded_prompt_length(short)

    def batch(rows: int) -> Round:
        return Round(rows, short, _NUM_DECODES + 1 + rows * padded // max_prefill_tokens)

    yield batch(1)
    if max_batch_size > 1:
        yield batch(max_batch_size)
    for length in early:
        if length != short:
            yield Round(1, length, 2)
    for power in range(1, (max_batch_size - 1).bit_length()):
        yield batch(1 << power)
    for length in late:
        yield Round(1, length, 2)


def calibrate(
    engine: StepEngine,
    plan: Sequence[Round],
    max_seconds: float,
    goes_on: Callable[[], bool] = lambda: True,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[StepStats, ...]:
    """Runs the rounds on an idle engine, repeatedly while half of `max_seconds` is left; ends with a whole step.

    A source is encoded in one step, so one that may take longer than the time left, by the square of its length, is
    skipped.

    Returns:
        The steps, without the first of each size.
    """
    begin = clock()
    source = random.Random(_SEED)  # noqa: S311 (not for secrets)
    seen: set[tuple[int, int, int]] = set()
    steps: list[StepStats] = []
    # Length and seconds of the longest source so far.
    longest: tuple[int, float] | None = None

    def left() -> float:
        return max_seconds - (clock() - begin) if goes_on() else 0.0

    for number in range(_NUM_PASSES):
        if left() <= (0.0 if number == 0 else max_seconds / 2):
            break
        for each in plan:
            if longest is not None and longest[1] * (each.num_prompt_tokens / longest[0]) ** 2 > left():
                continue
            if left() <= 0:
                break
            names = [f"calibration-{index}" for index in range(each.num_requests)]
            for name in names:
                engine.add_request(_request(name, each, source))
            while engine.has_work:
                stats = engine.step().stats
                size = (stats.num_prefill_tokens, stats.num_encoder_tokens, stats.num_decode_rows)
                if size in seen and stats.num_tokens:
                    steps.append(stats)
                seen.add(size)
                if stats.num_encoder_runs and each.num_requests == 1:
                    longest = max(longest or (0, 0.0), (stats.num_encoder_tokens, stats.run_seconds))
                if left() <= 0:
                    for name in names:
                        engine.abort(name)
    return tuple(steps)


def _request(name: str, each: Round, source: random.Random) -> GenerationRequest:
    """A random prompt of ids that every vocabulary has; random, so that it finds no cached prefix."""
    return GenerationRequest(
        request_id=name,
        model="",
        prompt_token_ids=tuple(source.choices((0, 1), k=each.num_prompt_tokens)),
        sampling=SamplingParams(temperature=0.0),
        stopping=StoppingParams(max_tokens=each.num_new_tokens, ignore_eos=True),
    )
