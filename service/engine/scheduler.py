"""Who computes what in the next step: continuous batching over slots, for both families by the same code.

There are no phases. Every sequence has `num_computed_tokens`, which catches up with `num_tokens` in *pieces* that end at
absolute multiples of the chunk (one for an encoder-decoder, whose graph decodes token by token). A piece of one token
joins the batched run, a longer one is a prefill chunk of its own. So the shapes that a request meets are a function of
that request alone; only how many rows share the batched run depends on the company.

Requests get slots first come, first served. What is promised, and checked by the tests:

* Every sequence in a slot advances in every step. At most one of them can be in the middle of its prompt between two
  steps, and its next chunk comes before anybody is admitted: behind prompts of m chunks in all, a prompt of c chunks is
  computed after at most m + c steps.
* Running rows wait, per step, for `max_prefill_tokens` of prompts at most, or for one source that is longer than that.
* A new request starts in the first step that finds it with a free slot and prefill budget. Aborted, expired and finished
  sequences lose their slot before the next step is planned.
* Every request that `add` accepted gets exactly one terminal event.

Runs on the engine thread alone; knows no tensors, no clock (it is told the time) and no transport.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict, abc
from collections.abc import Callable
from dataclasses import dataclass

from service.engine.batch import DecodeRow, EncodeGroup, EncodeRow, KVMove, PrefillChunk, SampleRow, ScheduledBatch
from service.engine.sampler import SampledToken
from service.engine.sequence import Sequence
from service.engine.slots import SlotTable
from service.engine.text import Decode, TextStream
from service.engine.types import FinishReason, GenerationRequest, StoppingParams, TokenEvent
from service.errors import EngineFailed, InvalidRequest, PromptTooLong, StartupError


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """What an operator may choose.

    `max_batch_size` is the number of slots, each with K/V memory for a whole context; `prefill_chunk` how many prompt
    tokens one run computes; `max_prefill_tokens` how many a step computes at most, and so how long running streams can
    be held up; `source_padding` the multiple to which sources are padded.

    Raises:
        StartupError: listing every value out of range.
    """

    max_batch_size: int = 32
    prefill_chunk: int = 256
    max_prefill_tokens: int = 256
    source_padding: int = 16

    def __post_init__(self) -> None:
        problems = [
            f"{name} is {value}, must be at least 1"
            for name in ("max_batch_size", "prefill_chunk", "max_prefill_tokens", "source_padding")
            if (value := getattr(self, name)) < 1
        ]
        if self.max_prefill_tokens < self.prefill_chunk:
            problems.append(
                f"max_prefill_tokens is {self.max_prefill_tokens}, must hold a prefill_chunk of {self.prefill_chunk}"
            )
        if problems:
            raise StartupError(problems)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What scheduling must know of a model: `source_context` and `decoder_start_id` make it an encoder-decoder."""

    context: int
    eos_ids: frozenset[int]
    source_context: int | None = None
    decoder_start_id: int = 0

    @property
    def is_encoder_decoder(self) -> bool:
        """Whether prompts are sources, encoded once."""
        return self.source_context is not None


class Scheduler:
    """Owns every sequence, the waiting queue and the slots.

    Args:
        limits: what the operator chose.
        model: what the model dictates.
        decode: ids to text, for requests with stop strings.
        draw_seed: a fresh uint64 for each request that brings no seed.
    """

    def __init__(
        self,
        limits: EngineLimits,
        model: ModelShape,
        decode: Decode,
        draw_seed: Callable[[], int] = lambda: secrets.randbits(64),
    ) -> None:
        self._limits = limits
        self._model = model
        self._decode = decode
        self._draw_seed = draw_seed
        self._chunk = 1 if model.is_encoder_decoder else limits.prefill_chunk
        self._waiting: OrderedDict[str, Sequence] = OrderedDict()
        self._slots: SlotTable[Sequence] = SlotTable(limits.max_batch_size)
        self._live: dict[str, Sequence] = {}
        self._aborted: set[str] = set()
        self._moves: list[KVMove] = []
        self._events: list[TokenEvent] = []

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._live)

    @property
    def num_running(self) -> int:
        """Sequences that hold a slot."""
        return len(self._slots)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for one."""
        return len(self._waiting)

    @property
    def kv_usage_ratio(self) -> float:
        """Share of the K/V memory that is taken; a slot is taken whole."""
        return len(self._slots) / self._slots.capacity

    def add(self, request: GenerationRequest) -> None:
        """Queues a request.

        Raises:
            InvalidRequest: when the id is in use, or the prompt empty or too long; nothing was queued then.
        """
        if request.request_id in self._live:
            raise InvalidRequest("request_id", request.request_id, "must not be in use by another request")
        sequence = self._new_sequence(request)
        self._live[request.request_id] = self._waiting[request.request_id] = sequence

    def abort(self, request_id: str) -> None:
        """Ends a request at the next step boundary; one that is over already is left alone."""
        if request_id in self._live:
            self._aborted.add(request_id)

    def schedule(self, now: float) -> ScheduledBatch:
        """Lets go of who must leave, admits who can start, and plans one step.

        `now` is in `time.monotonic()` seconds. Every call must be followed by one of `commit` or `fail_running`.
        """
        self._reap(now)
        decode_slots: list[int] = []
        prefills: list[PrefillChunk] = []
        encodes: list[EncodeRow] = []
        budget = self._limits.max_prefill_tokens
        for slot, sequence in enumerate(self._slots):
            budget -= self._plan(slot, sequence, budget, decode_slots, prefills)
        while self._waiting and self._slots.num_free and self._can_start(next(iter(self._waiting.values())), budget):
            ...
        raise NotImplementedError
