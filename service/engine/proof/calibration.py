"""Steps that nobody asked for, of a few lengths and batch sizes, so that step times are known before a request comes.

The first step of each size is left out: bindings are made and memory is touched then. Drives an engine as its thread
does; knows nothing of what is made of the steps.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from service.engine.chunks import ChunkRules
from service.engine.types import GenerationRequest, SamplingParams, StepOutput, StepStats, StoppingParams

MAX_SECONDS = 0.5
"""For a model's calibration; what is not learned in it is learned from requests."""

_SHORT_PROMPT = 8
# Of sources, each so many times as long as the one before; the long ones come after all else.
_LADDER = 4
_EARLY_SOURCE = 512
_NUM_DECODES = 4
_NUM_PASSES = 4
_SEED = 1


class Steps(Protocol):
    """What is needed of an engine."""

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""

    def add_request(self, request: GenerationRequest) -> None:
        """Queues a request."""

    def abort(self, request_id: str) -> None:
        """Ends a request at the next step boundary."""

    def step(self) -> StepOutput:
        """Moves every sequence that can move."""


@dataclass(frozen=True, slots=True)
class Round:
    """So many requests at once, each with a prompt, or source, of so many tokens."""

    num_requests: int
    num_prompt_tokens: int
    num_new_tokens: int


def rounds(pieces: ChunkRules, max_batch_size: int, max_prefill_tokens: int) -> Iterator[Round]:
    """What to run, the most telling first, as a slow model does not come far.

    One row, as many rows as there are at most, longer prompts or sources, batches in between, the longest.
    A step starts no more of a batch than `max_prefill_tokens` have room for: the first go on until the last are there.
    """
    longest, chunk = pieces.source_context or pieces.context - _NUM_DECODES - 1, pieces.chunk
    short = max(1, min(_SHORT_PROMPT, longest))
    if pieces.source_context:
        ladder = [short]
        while ladder[-1] * _LADDER < longest:
            ladder.append(ladder[-1] * _LADDER)
        early = [length for length in ladder if length <= _EARLY_SOURCE]
        late = [*ladder[len(early) :], longest]
    else:
        early = [short, *(max(short, min(length, longest)) for length in (chunk // 4, 5 * chunk // 2))]
        late = [max(short, min(6 * chunk, longest))]
    padded = pieces.padded_source_length(short) or pieces.padded_prompt_length(short)

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
    engine: Steps,
    plan: Sequence[Round],
    max_seconds: float,
    goes_on: Callable[[], bool] = lambda: True,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[StepStats, ...]:
    """Runs the rounds on an idle engine, several times if that takes no more than half of `max_seconds`.

    It ends when these are over, or when it goes on no more, with the step in progress. A source is encoded in one step:
    one that may take longer than what is left, if its time goes by the square of its length, is left out.

    Returns:
        The steps, without the first of each size.
    """
    begin = clock()
    source = random.Random(_SEED)  # noqa: S311 (not for secrets)
    seen: set[tuple[int, int, int]] = set()
    steps: list[StepStats] = []
    # The longest source so far, and its seconds.
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
    """A prompt of ids that every vocabulary has; drawn, so that none begins like one before."""
    return GenerationRequest(
        request_id=name,
        model="",
        prompt_token_ids=tuple(source.choices((0, 1), k=each.num_prompt_tokens)),
        sampling=SamplingParams(temperature=0.0),
        stopping=StoppingParams(max_tokens=each.num_new_tokens, ignore_eos=True),
    )
