"""Steps that nobody asked for, of a few lengths and batch sizes, so that step times are known before a request comes.

The first step of each size is left out: bindings are made and memory is touched then. Drives an engine as its thread
does; knows nothing of what is made of the steps.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from service.engine.plan import Pieces
from service.engine.types import GenerationRequest, SamplingParams, StepOutput, StepStats, StoppingParams

_SHORT_PROMPT = 8
_NUM_DECODES = 5
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


def rounds(pieces: Pieces, max_batch_size: int, max_prefill_tokens: int) -> Iterator[Round]:
    """What to run, the most telling first: one row, batches up to the largest, then the longest prompts.

    A step starts no more of a batch than `max_prefill_tokens` have room for: the first go on until the last are there.
    """
    longest, chunk = pieces.source_context or pieces.context - _NUM_DECODES - 1, pieces.chunk
    short = max(1, min(_SHORT_PROMPT, longest))
    lengths = (longest // 4, longest // 2) if pieces.source_context else (chunk // 4, 5 * chunk // 2)
    for length in (short, *lengths):
        yield Round(1, max(short, min(length, longest)), _NUM_DECODES + 1)
    padded = pieces.padded_source_length(short) or pieces.padded_prompt_length(short)
    for rows in (min(1 << power, max_batch_size) for power in range(1, (max_batch_size - 1).bit_length() + 1)):
        yield Round(rows, short, _NUM_DECODES + rows * padded // max_prefill_tokens)
    yield Round(1, max(short, longest if pieces.source_context else min(6 * chunk, longest)), 2)


def calibrate(
    engine: Steps,
    pieces: Pieces,
    max_batch_size: int,
    max_prefill_tokens: int,
    max_seconds: float,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[StepStats, ...]:
    """Runs the rounds on an idle engine, several times if that takes no more than half of `max_seconds`.

    It ends when these are over, with the step in progress.

    Returns:
        The steps, without the first of each size.
    """
    begin = clock()
    source = random.Random(_SEED)  # noqa: S311 (not for secrets)
    seen: set[tuple[int, int, int]] = set()
    steps: list[StepStats] = []
    for number in range(_NUM_PASSES):
        if clock() - begin >= (max_seconds if number == 0 else max_seconds / 2):
            break
        for each in rounds(pieces, max_batch_size, max_prefill_tokens):
            if clock() - begin >= max_seconds:
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
                if clock() - begin >= max_seconds:
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
