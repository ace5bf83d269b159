"""Who computes what in the next step: continuous batching over slots, for both families by the same code.

There are no phases. Every sequence has `num_computed_tokens`, which catches up with `num_tokens` in *pieces* that end
at absolute multiples of the chunk (one for an encoder-decoder, whose graph decodes token by token). A piece of one
token joins the batched run, a longer one is a prefill chunk of its own. So the shapes that a request meets are a
function of that request alone; only how many rows share the batched run depends on the company.

Requests get slots first come, first served. What is promised, and checked by the tests:

* Every sequence in a slot advances by a piece or more in every step.
* Chunks are computed in the order of arrival, and one that does not fit into a step comes first in the next: while
  slots are free, a prompt of c pieces behind prompts of m pieces in all is computed after at most m + c steps.
* Running rows wait, per step, for `max_prefill_tokens` of prompts at most, or for one source that is longer than that.
* A new request starts in the first step that finds it with a free slot and prefill budget. Aborted, expired and
  finished sequences lose their slot before the next step is planned.
* Every request that `add` accepted gets exactly one terminal event.

Runs on the engine thread alone; knows no tensors, no clock (it is told the time) and no transport.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from service.engine.batch import KVCopy, ScheduledBatch
from service.engine.deadlines import Deadlines
from service.engine.failure import report_failure
from service.engine.logits import make_rules
from service.engine.plan import Pieces, StepPlan
from service.engine.sampler import SampledToken
from service.engine.sequence import Sequence
from service.engine.slots import SlotTable
from service.engine.text import Decode, TextStream
from service.engine.types import FinishReason, GenerationRequest, TokenEvent, TokenLogprobs
from service.errors import EngineFailed, InvalidRequest, PromptTooLong, StartupError


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """How much runs at once.

    The operator chooses `max_batch_size`, the number of slots, each with K/V memory for a whole context, and
    `prefill_chunk`, how many prompt tokens one run computes. Whoever builds the engine sets the rest:
    `max_prefill_tokens`, how many a step computes at most, and so how long running streams can be held up;
    `source_padding`, the multiple to which sources are padded.

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
        limits: how much runs at once.
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
        self.pieces = Pieces(
            chunk=1 if model.is_encoder_decoder else limits.prefill_chunk,
            source_padding=limits.source_padding,
            source_context=model.source_context or 0,
        )
        self._waiting: OrderedDict[str, Sequence] = OrderedDict()
        self._slots: SlotTable[Sequence] = SlotTable(limits.max_batch_size)
        self._live: dict[str, Sequence] = {}
        self._deadlines = Deadlines()
        self._aborted: list[str] = []
        self._moves: list[KVCopy] = []
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
    def max_batch_size(self) -> int:
        """How many sequences can hold a slot."""
        return self._limits.max_batch_size

    @property
    def kv_usage_ratio(self) -> float:
        """Share of the K/V memory that is taken; a slot is taken whole."""
        return len(self._slots) / self._slots.capacity

    def add(self, request: GenerationRequest) -> None:
        """Queues a request.

        Raises:
            InvalidRequest: when the id is in use or a length is out of range; nothing was queued then.
        """
        if request.request_id in self._live:
            raise InvalidRequest("request_id", request.request_id, "must not be in use by another request")
        sequence = self._new_sequence(request)
        self._live[request.request_id] = self._waiting[request.request_id] = sequence
        self._deadlines.add(sequence)

    def abort(self, request_id: str) -> None:
        """Ends a request at the next step boundary; one that is over already is left alone."""
        if request_id in self._live:
            self._aborted.append(request_id)

    def schedule(self, now: float) -> ScheduledBatch:
        """Lets go of who must leave, admits who can start, and plans one step.

        `now` is in `time.monotonic()` seconds. Every call must be followed by one of `commit` or `fail_running`.
        """
        self._reap(now)
        plan = StepPlan(self.pieces, self._limits.max_prefill_tokens, self._slots.capacity)
        for slot, sequence in enumerate(self._slots):
            plan.feed(slot, sequence)
        while self._waiting and self._slots.num_free and plan.can_start(next(iter(self._waiting.values()))):
            _, sequence = self._waiting.popitem(last=False)
            sequence.scheduled_time = now
            plan.start(self._slots.append(sequence), sequence)
        moves, self._moves = tuple(self._moves), []
        return plan.build(moves, self._slots)

    def commit(
        self,
        batch: ScheduledBatch,
        sampled: Collection[SampledToken | None],
        now: float,
        scored: Collection[tuple[TokenLogprobs, ...] | None] = (),
    ) -> tuple[TokenEvent, ...]:
        """Moves every sequence of `batch` forward: the only place where that happens.

        `sampled` answers `batch.samples` one by one, `scored` answers `batch.scores`; None ends the sequence as failed,
        as does text that cannot be made. Returns all events since the last call, in schedule order.
        """
        for slot, row in enumerate(batch.decode):
            if not row.is_padding:
                self._slots[slot].num_computed_tokens += 1
        for chunk in batch.prefills:
            self._slots[chunk.slot].num_computed_tokens += len(chunk.token_ids)
        finished = {
            score.slot
            for score, logprobs in zip(batch.scores, scored, strict=True)
            if self._tell_scores(self._slots[score.slot], logprobs, now, is_end=score.is_end)
        }
        finished |= {
            row.slot
            for row, result in zip(batch.samples, sampled, strict=True)
            if row.slot not in finished and self._advance(self._slots[row.slot], result, now)
        }
        self._release(finished)
        return self._take_events()

    def fail_running(self, error_id: str, now: float) -> tuple[TokenEvent, ...]:
        """Ends every sequence that holds a slot, because a step failed and their K/V is in doubt.

        Each gets an `EngineFailed` of its own under the one id: an error is raised once, in one request's stream.
        """
        for sequence in self._slots:
            if sequence.request.request_id in self._live:
                self._fail(sequence, EngineFailed(error_id), now)
        self._slots = SlotTable(self._limits.max_batch_size)
        self._moves.clear()
        return self._take_events()

    @property
    def running_ids(self) -> tuple[str, ...]:
        """The requests that hold a slot."""
        return tuple(sequence.request.request_id for sequence in self._slots)

    def check_invariants(self) -> None:
        """Asserts what holds between steps: every live sequence is in one place, and every resident one has K/V.

        Raises:
            AssertionError: saying what broke.
        """
        self._slots.check_invariants()
        homes = [*self._waiting.values(), *self._slots]
        if len(homes) != len(self._live) or set(homes) != set(self._live.values()):
            raise AssertionError(f"{len(self._live)} live sequences, {len(homes)} in the queue and in slots")
        for slot, sequence in enumerate(self._slots):
            if not 0 < sequence.num_computed_tokens < sequence.num_tokens < sequence.max_num_tokens:
                raise AssertionError(f"slot {slot}: {sequence.num_computed_tokens} of {sequence.num_tokens} computed")
        if any(sequence.num_computed_tokens for sequence in self._waiting.values()):
            raise AssertionError("a waiting sequence has K/V")

    def _new_sequence(self, request: GenerationRequest) -> Sequence:
        self._check(request)
        prompt, prefix, stopping = request.prompt_token_ids, request.target_prefix_token_ids, request.stopping
        decoder_prompt = prefix if self._model.is_encoder_decoder else prompt
        given = (self._model.decoder_start_id, *prefix) if self._model.is_encoder_decoder else prompt
        # Nothing comes after the last token of a prompt that is only scored.
        token_ids = list(given if stopping.max_tokens else given[:-1])
        return Sequence(
            request=request,
            token_ids=token_ids,
            source_token_ids=prompt if self._model.is_encoder_decoder else (),
            prompt_token_ids=given,
            max_num_tokens=min(self._model.context, len(given) + stopping.max_tokens),
            eos_ids=frozenset() if stopping.ignore_eos else self._model.eos_ids,
            seed=self._draw_seed() if request.sampling.seed is None else request.sampling.seed,
            text=TextStream(
                self._decode, stopping.stop, include_stop=stopping.include_stop_in_output, prefix_token_ids=prefix
            )
            if stopping.stop
            else None,
            rules=make_rules(request.sampling, stopping, self._model.eos_ids, decoder_prompt),
        )

    def _check(self, request: GenerationRequest) -> None:
        """Refuses lengths out of range: something must be given, and there must be room to generate or to score."""
        prompt, prefix, scoring = request.prompt_token_ids, request.target_prefix_token_ids, request.scoring
        max_tokens = request.stopping.max_tokens
        if max_tokens < 1 and (max_tokens < 0 or scoring is None):
            raise InvalidRequest("stopping.max_tokens", max_tokens, "must be at least 1")
        num_reserved = min(max_tokens, 1)
        room = self._model.context - num_reserved
        longest = room if self._model.source_context is None else self._model.source_context
        if not prompt:
            raise InvalidRequest("prompt", prompt, "must have at least 1 token")
        if len(prompt) > longest:
            raise PromptTooLong("prompt", len(prompt), f"must have at most {longest} tokens")
        if prefix and not self._model.is_encoder_decoder:
            raise InvalidRequest("target_prefix", prefix, "must be empty for a decoder-only model")
        if prefix and len(prefix) >= room:
            raise PromptTooLong("target_prefix", len(prefix), f"must have at most {room - 1} tokens")
        num_given = 1 + len(prefix) if self._model.is_encoder_decoder else len(prompt)
        # Without a token to generate, one to score must be the sequence's end.
        most = num_given - 1 + num_reserved
        if scoring is not None and not 1 <= scoring.start <= most:
            raise InvalidRequest("scoring.start", scoring.start, f"must be from 1 to {most}")

    def _reap(self, now: float) -> None:
        """Ends expired and aborted sequences, wherever they are.

        An expired one is told so even if it was aborted: a transport's deadline cancels the call at the same moment.
        """
        num_live = len(self._live)
        for sequence in self._deadlines.take_expired(now):
            self._leave(sequence, FinishReason.DEADLINE, now)
        for request_id in self._aborted:
            if request_id in self._live:
                self._leave(self._live[request_id], FinishReason.CANCELLED, now)
        self._aborted.clear()
        if len(self._live) < num_live:
            self._release(
                slot for slot, sequence in enumerate(self._slots) if sequence.request.request_id not in self._live
            )

    def _leave(self, sequence: Sequence, reason: FinishReason, now: float) -> None:
        """Ends a sequence between two tokens, with the text that was held back."""
        request_id = sequence.request.request_id
        self._waiting.pop(request_id, None)
        try:
            text = sequence.flush_text()
        except Exception as cause:  # a decoder's own: nobody else is concerned
            self._fail(sequence, report_failure(f"request {request_id}: no text could be made", cause), now)
        else:
            self._end(sequence, TokenEvent(request_id=request_id, text=text, finish_reason=reason), now)

    def _tell_scores(
        self, sequence: Sequence, logprobs: tuple[TokenLogprobs, ...] | None, now: float, *, is_end: bool
    ) -> bool:
        """Tells of a prompt's scores; whether the sequence is over, with them or before them."""
        request_id = sequence.request.request_id
        if request_id not in self._live:
            return True
        if logprobs is None:
            self._fail(sequence, report_failure(f"request {request_id}: its logits are not finite"), now)
            return True
        event = TokenEvent(request_id=request_id, prompt_logprobs=logprobs)
        if is_end:
            self._end(sequence, dataclasses.replace(event, finish_reason=FinishReason.LENGTH), now)
        else:
            self._events.append(event)
        return is_end

    def _advance(self, sequence: Sequence, result: SampledToken | None, now: float) -> bool:
        """Appends a sampled token and tells of it; whether the sequence is over."""
        request_id = sequence.request.request_id
        if result is None:
            self._fail(sequence, report_failure(f"request {request_id}: its logits are not finite"), now)
            return True
        try:
            appended = sequence.append(result.token_id, now)
        except Exception as cause:  # a decoder's own: the neighbours' K/V and tokens are sound
            self._fail(sequence, report_failure(f"request {request_id}: no text could be made", cause), now)
            return True
        event = TokenEvent(
            request_id=request_id,
            token_id=result.token_id,
            is_mute=appended.is_mute,
            text=appended.text,
            logprobs=result.logprobs,
            finish_reason=appended.finish_reason,
            matched_stop=appended.matched_stop,
        )
        if not event.is_terminal:
            self._events.append(event)
            return False
        self._end(sequence, event, now)
        return True

    def _fail(self, sequence: Sequence, error: EngineFailed, now: float) -> None:
        self._end(sequence, TokenEvent(request_id=sequence.request.request_id, error=error), now)

    def _end(self, sequence: Sequence, event: TokenEvent, now: float) -> None:
        """Makes `event` the sequence's terminal one; its slot is still its own."""
        del self._live[sequence.request.request_id]
        self._deadlines.discard(sequence)
        self._events.append(dataclasses.replace(event, timings=sequence.timings(now)))

    def _release(self, slots: Iterable[int]) -> None:
        """Frees slots and notes the moves; nobody who stays moves twice, for K/V may be megabytes."""
        freed = deque(sorted(slots))
        while freed:
            is_last = freed[-1] == len(self._slots) - 1
            if move := self._slots.remove(freed.pop() if is_last else freed.popleft()):
                moved = self._slots[move.target]
                self._moves.append(
                    KVCopy(move.source, move.target, moved.num_computed_tokens, len(moved.source_token_ids))
                )

    def _take_events(self) -> tuple[TokenEvent, ...]:
        events, self._events = tuple(self._events), []
        return events
