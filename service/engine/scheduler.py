"""Continuous batching over slots: which sequences the next step computes, for both model families by the same code.

There are no phases. `num_computed_tokens` of every sequence catches up with its `num_tokens` in chunks that end at
absolute multiples of the chunk size (of 1 for an encoder-decoder, whose decoder graph computes token by token). A chunk
of one token joins the batched decode run; a longer one is a prefill run of its own, except that short prompts are
padded and those of one padded length run together. So the shapes that a request meets are a function of that request
alone (batch invariance); only how many rows share a run depends on the batch.

Rows go by priority, then by tenants' shares (`queueing.tenants`), then by due time (`queueing.waiting`). Every sequence
in a slot advances in every step, but prompts of several tenants take turns. What the head of the queue needs is
reserved for it; if less urgent requests hold it, they are preempted, and resume bit for bit. Ended requests lose their
slots before the next step is planned. Every accepted request gets exactly one terminal event. docs/serve/engine.md has
the promises in full; a state machine in the tests checks them.

Runs on the engine thread alone. Knows no tensors, no clock (callers pass the time) and no transport.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import secrets
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from service.engine.batch import ScheduledBatch
from service.engine.chunks import MERGED_CHUNKS, ChunkRules
from service.engine.kv.ledger import KVLedger
from service.engine.kv.reservations import KVBudget
from service.engine.outputs.outputs import Outputs
from service.engine.plan import Planned, StepPlan
from service.engine.queueing.contention import Preemption, StepOrder
from service.engine.queueing.deadlines import Deadlines
from service.engine.queueing.intake import Intake, ModelShape
from service.engine.queueing.tenants import Tenants
from service.engine.sampling.sampler import Expansion, SampledToken
from service.engine.sampling.text import Decode
from service.engine.sequence import Sequence, SequenceGroup
from service.engine.speculation.drafting import Drafter
from service.engine.types import FinishReason, GenerationRequest, TokenEvent, TokenLogprobs
from service.errors import EngineFailed, InvalidRequest, RequestTooLarge, StartupError


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """How much runs at once.

    `max_batch_size` is the number of slots, `prefill_chunk` the prompt tokens of one run, `max_prefill_tokens` those of
    one step, which bounds how long running streams wait. Prompts of at most `short_prompt` tokens are padded to a
    multiple of `prompt_padding`, sources to one of `source_padding`. `kv_memory_bytes` bounds all K/V, the prefix cache
    included; None is a whole context for each slot. `patience_seconds` is how long equals with earlier deadlines may
    overtake a request; None lets none overtake. `look_up` is the number of draft tokens, where these are proven to
    change no bit. At most `merged_chunks` of a prompt are one run, where nothing else is computed and that is proven to
    change no bit.

    Raises:
        StartupError: listing every value out of range.
    """

    max_batch_size: int = 32
    prefill_chunk: int = 128
    max_prefill_tokens: int = 128
    prompt_padding: int = 4
    short_prompt: int = 32
    source_padding: int = 16
    kv_memory_bytes: int | None = None
    patience_seconds: float | None = None
    look_up: int = 0
    merged_chunks: int = MERGED_CHUNKS

    def __post_init__(self) -> None:
        problems = [
            f"{name} is {value}, must be at least 1"
            for name in (
                "max_batch_size",
                "prefill_chunk",
                "max_prefill_tokens",
                "prompt_padding",
                "source_padding",
                "merged_chunks",
            )
            if (value := getattr(self, name)) < 1
        ]
        if self.max_prefill_tokens < self.prefill_chunk:
            problems.append(
                f"max_prefill_tokens is {self.max_prefill_tokens}, must hold a prefill_chunk of {self.prefill_chunk}"
            )
        if self.look_up < 0:
            problems.append(f"look_up is {self.look_up}, must be at least 0")
        if self.patience_seconds is not None and not 0 <= self.patience_seconds < math.inf:
            problems.append(f"patience_seconds is {self.patience_seconds}, must be finite and at least 0")
        if problems:
            raise StartupError(problems)


class Scheduler:
    """Owns every sequence, the waiting queue and the slots.

    `decode` makes text for requests with stop strings; `kv_budget` defaults to a whole context in each slot;
    `draw_seed` returns a fresh uint64 for each request without a seed.
    """

    def __init__(
        self,
        limits: EngineLimits,
        model: ModelShape,
        decode: Decode,
        kv_budget: KVBudget | None = None,
        draw_seed: Callable[[], int] = lambda: secrets.randbits(64),
    ) -> None:
        source_context = model.source_context or 0
        self.limits = limits
        self.chunk_rules = ChunkRules(
            chunk=1 if model.is_encoder_decoder else limits.prefill_chunk,
            context=model.context,
            prompt_padding=limits.prompt_padding,
            short_prompt=limits.short_prompt,
            source_padding=limits.source_padding,
            source_context=source_context,
        )
        # The runner has `max_prefill_tokens` rows of logits besides the slots'.
        max_drafts = min(limits.look_up, limits.max_prefill_tokens - 1)
        self.drafter = Drafter(
            0 if model.speculation_obstacle is not None else max_drafts, max_fed=limits.max_prefill_tokens
        )
        self.num_preemptions = 0
        self._intake = Intake(model, decode, draw_seed, limits.patience_seconds)
        self._budget = kv_budget or KVBudget(num_bytes=limits.max_batch_size * (model.context + source_context))
        self._ledger = KVLedger(limits.max_batch_size, self._budget, self.chunk_rules)
        self._tenants = Tenants(self._ledger, limits.max_prefill_tokens)
        self._deadlines = Deadlines()
        self._outputs = Outputs(self._ledger, self._tenants, self._deadlines)
        self._live = self._outputs.live
        self._aborted: list[str] = []
        self._planned: Planned | None = None

    @property
    def has_work(self) -> bool:
        """Whether any request lives here."""
        return bool(self._live)

    @property
    def num_running(self) -> int:
        """Requests that hold slots."""
        return len(self._ledger.running)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for slots."""
        return len(self._tenants)

    @property
    def kv_usage_ratio(self) -> float:
        """Share of the K/V memory that requests have reserved; the prefix cache counts as free."""
        return self._ledger.usage_ratio

    @property
    def kv_memory_bytes(self) -> int:
        """K/V memory, whether or not `limit_kv` leaves all of it."""
        return self._budget.num_bytes

    @property
    def kv_needed_bytes(self) -> int:
        """K/V memory in which all live requests can finish, if no more come."""
        return self._ledger.num_needed_bytes(self._tenants)

    @property
    def num_whole_rows(self) -> int:
        """Sequences of full length that fit into the K/V memory, at least 1."""
        return self.num_rows_of(self.chunk_rules.context, self.chunk_rules.source_context)

    def num_rows_of(self, num_tokens: int, num_source_tokens: int) -> int:
        """Sequences of this length that fit into the K/V memory, at least 1."""
        return max(1, self._budget.num_bytes // self._budget.row_bytes(num_tokens, num_source_tokens))

    def limit_kv(self, num_bytes: int) -> None:
        """Limits K/V to `num_bytes` of `kv_memory_bytes`; requests that do not fit wait.

        Raises:
            ValueError: when running and preempted requests hold more.
        """
        if num_bytes != self._ledger.limit:
            self._ledger.set_limit(num_bytes)

    def add(self, request: GenerationRequest) -> None:
        """Queues a request.

        Raises:
            InvalidRequest: when the id is in use or something is out of range; nothing was queued then.
        """
        group = self._measure(request)
        self._intake.add_outputs(group)
        self._live[request.request_id] = group
        self._tenants.begin(group)
        self._deadlines.add(group)

    def num_cached_tokens(self, request: GenerationRequest) -> int:
        """Tokens of a request's prompt, or source, that the prefix cache would provide if it were admitted now.

        Raises:
            InvalidRequest: when `add` would refuse it.
        """
        return self._ledger.num_cached_tokens(self._measure(request))

    def abort(self, request_id: str) -> None:
        """Ends a request at the next step boundary; unknown and finished ones are ignored."""
        if request_id in self._live:
            self._aborted.append(request_id)

    def schedule(self, now: float, *, is_alone: bool = True) -> ScheduledBatch:
        """Reaps ended requests, admits waiting ones, plans one step.

        `now` is in `time.monotonic()` seconds; `is_alone` says that no other engine waits for the step. Every call must
        be followed by one of `commit` or `fail_running`.
        """
        self._reap(now)
        self._tenants.begin_step()
        plan, prompts = self._plan_running()
        order = StepOrder(self._tenants, self._ledger, prompts)
        if (found := Preemption(self._tenants, self._ledger, order, plan).find()) is not None:
            self._preempt(*found)
            plan, prompts = self._plan_running()
            order = StepOrder(self._tenants, self._ledger, prompts, claimant=found[0])
        self._fill_step(plan, prompts, order, now)
        self._tenants.end_step()
        is_alone = is_alone and not self._tenants.are_several and not self._deadlines.need_short_steps
        if is_alone and self.chunk_rules.long_run:
            plan.merge_chunks(self._ledger.slots)
        if self.drafter.max_tokens and any(drafts := self.drafter.draft(plan.decoding)):
            plan.add_drafts(drafts)
        self._planned = plan.build(self._ledger.take_operations(), self._ledger.slots)
        return self._planned.batch

    def schedule_idle(self) -> ScheduledBatch:
        """The copy that has waited longest, to be made while no request lives; nothing if there is none."""
        return ScheduledBatch(kv_operations=self._ledger.take_late_operations())

    def commit(
        self,
        batch: ScheduledBatch,
        sampled: Collection[SampledToken | None],
        now: float,
        scored: Collection[tuple[TokenLogprobs, ...] | None] = (),
        expanded: Collection[tuple[Expansion, ...] | None] = (),
    ) -> tuple[TokenEvent, ...]:
        """Moves every sequence of `batch` forward: the only place where that happens.

        `sampled` answers `batch.samples` one by one, `scored` answers `batch.scores` and `expanded` `batch.beams`; None
        fails the request, as does text that cannot be decoded. Returns all events since the last call, in schedule
        order.
        """
        planned, outputs = self._planned, self._outputs
        if planned is None or planned.batch is not batch:
            raise ValueError("only the batch that was scheduled last can be committed, and only once")
        self._planned = None
        self._count_computed(batch)
        for score, logprobs in zip(batch.scores, scored, strict=True):
            outputs.report_scores(self._ledger.slots[score.slot].group, logprobs, now, is_end=score.is_end)
        if not batch.drafted:
            outputs.append_all(planned.sampled, sampled, now)
        else:
            results = iter(zip(batch.samples, sampled, strict=True))
            sequences = dict.fromkeys(planned.sampled)
            for chunk, sequence in zip(batch.drafted, sequences, strict=True):
                own = [*itertools.islice(results, chunk.num_scored)]
                self.drafter.report(sequence, chunk, outputs.append_drafts(sequence, own, now))
        for group, expansions in zip(planned.searched, expanded, strict=True):
            outputs.extend_beams(group, expansions, now)
        num_chunks = max([1, *(len(chunk.token_ids) // self.chunk_rules.chunk for chunk in batch.prefills)])
        for group in self._deadlines.end_step(now, has_prompts=batch.has_prompts, num_chunks=num_chunks):
            outputs.finish_early(group, FinishReason.DEADLINE, now)
        outputs.release()
        if not self._live:
            self._deadlines.pause()
        return outputs.take_events()

    def fail_running(self, error_id: str, now: float) -> tuple[TokenEvent, ...]:
        """Fails every request that holds a slot, or lost it in this step: the step failed, their K/V are undefined.

        Each gets an `EngineFailed` of its own under the one id: an error is raised once, in one request's stream.
        """
        self._planned = None
        self._deadlines.pause()
        for group in self._ledger.fail():
            self._outputs.fail(group, EngineFailed(error_id), now)
        self._outputs.release()
        return self._outputs.take_events()

    def merge_chunks(self, *, is_proven: bool) -> None:
        """Allows runs of several chunks if they are proven to change no bit, else forbids them."""
        most = self.limits.merged_chunks
        long_run = most * self.chunk_rules.chunk if is_proven and most > 1 else 0
        self.chunk_rules = dataclasses.replace(self.chunk_rules, long_run=long_run)

    def forget_kv(self) -> None:
        """Empties the rows and the prefix cache, as runs outside the schedule have written to the rows.

        Raises:
            RuntimeError: when requests live here.
        """
        if self._live:
            raise RuntimeError(f"{len(self._live)} requests live")
        self._ledger.fail()

    @property
    def running_ids(self) -> tuple[str, ...]:
        """The requests that hold slots."""
        return tuple(group.request_id for group in self._ledger.running)

    @property
    def waiting_ids(self) -> tuple[str, ...]:
        """The requests that wait, by tenant, each tenant's in the order of its queue."""
        return tuple(group.request_id for group in self._tenants)

    def check_invariants(self) -> None:
        """Asserts what holds between steps: every live request is in one place, and every resident one has K/V.

        Raises:
            AssertionError: saying what broke.
        """
        self._ledger.check_invariants()
        homes = [*self._tenants, *self._ledger.running]
        if len(homes) != len(self._live) or set(homes) != set(self._live.values()):
            raise AssertionError(f"{len(self._live)} live requests, {len(homes)} in the queue and in slots")
        for slot, sequence in enumerate(self._ledger.slots):
            if not 0 < sequence.num_computed_tokens < sequence.num_tokens < sequence.group.max_num_tokens:
                raise AssertionError(f"slot {slot}: {sequence.num_computed_tokens} of {sequence.num_tokens} computed")
        if any(bool(group.num_computed_tokens) != bool(group.handles) for group in self._tenants):
            raise AssertionError("a waiting request has K/V that are not saved")

    def _measure(self, request: GenerationRequest) -> SequenceGroup:
        """Checks a request; returns its group without outputs, not queued."""
        if request.request_id in self._live:
            raise InvalidRequest("request_id", request.request_id, "must not be in use by another request")
        group = self._intake.measure(request)
        num_rows, max_rows, max_bytes = request.num_rows, self.limits.max_batch_size, self._budget.num_bytes
        field = "sampling.n" if group.beams is None else "beam_search.beam_size"
        if num_rows > max_rows:
            raise InvalidRequest(field, num_rows, f"must be at most {max_rows}, the sequences that run at once")
        if (needed := self._ledger.worst_case(group)) > max_bytes:
            limit = f"needs {needed} bytes of K/V with this prompt and max_tokens, there are {max_bytes}"
            raise RequestTooLarge(field, num_rows, limit)
        return group

    def _reap(self, now: float) -> None:
        """Ends expired and aborted requests.

        A request that is both ends as expired: a transport's deadline cancels the call at the same moment.
        """
        for group in self._deadlines.begin_step(now):
            self._outputs.finish_early(group, FinishReason.DEADLINE, now)
        for request_id in self._aborted:
            if request_id in self._live:
                self._outputs.finish_early(self._live[request_id], FinishReason.CANCELLED, now)
        self._aborted.clear()
        self._outputs.release()

    def _plan_running(self) -> tuple[StepPlan, dict[SequenceGroup, Sequence]]:
        """Plans a step of the sequences in slots, without the prompts that take turns among tenants: these second."""
        plan = StepPlan(self.chunk_rules, self.limits.max_prefill_tokens, self.limits.max_batch_size)
        prompts = {}
        for slot, sequence in enumerate(self._ledger.slots):
            num_left = self.chunk_rules.next_length(sequence.num_tokens, sequence.num_computed_tokens)
            if self._tenants.are_several and num_left > 1:
                prompts[sequence.group] = sequence
            else:
                plan.feed(slot, sequence)
        return plan, prompts

    def _preempt(self, head: SequenceGroup, victims: Collection[SequenceGroup]) -> None:
        """Preempts requests for one that can start then."""
        self._tenants.spare(head)
        for group in victims:
            self._tenants.charge_copy(group, head)
            self._ledger.preempt(group)
            self._tenants.of(group).waiting.add(group)
            self.num_preemptions += 1

    def _fill_step(
        self, plan: StepPlan, prompts: Mapping[SequenceGroup, Sequence], order: StepOrder, now: float
    ) -> None:
        """Continues prompts and admits requests in the order of turns, until the step is full."""
        while (group := order.take()) is not None:
            used = plan.num_prefill_tokens
            if sequence := prompts.get(group):
                plan.feed(self._ledger.slots.slot_of(sequence), sequence)
                if plan.num_prefill_tokens > used:
                    self._tenants.charge(group, plan.num_prefill_tokens - used)
            elif not self._ledger.fits(group):
                order.block(group)
            elif not plan.can_start(group, self._ledger.num_cached_tokens(group)):
                return
            else:
                self._tenants.discard(group)
                if group.scheduled_time is None:
                    group.scheduled_time = now
                    self._deadlines.mark_started(group)
                plan.start(self._ledger.admit(group), group)
                self._tenants.charge(group, plan.num_prefill_tokens - used)

    def _count_computed(self, batch: ScheduledBatch) -> None:
        """Counts computed tokens, and adds whole chunks and sources to the prefix cache."""
        slots = self._ledger.slots
        for slot, fed in enumerate(batch.decode):
            if not fed.is_padding:
                slots[slot].num_computed_tokens += 1
        for group in batch.prefill_groups:
            for row in group.rows:
                slots[row.slot].num_computed_tokens += len(row.token_ids)
                self._ledger.cache_chunks(row.slot, 0, len(row.token_ids))
        for chunk in batch.prefills:
            slots[chunk.slot].num_computed_tokens += len(chunk.token_ids)
            self._ledger.cache_chunks(chunk.slot, chunk.start, chunk.end)
        for chunk in batch.drafted:
            # Accepted drafts are counted one by one, as they are appended.
            slots[chunk.slot].num_computed_tokens += 1
            self._ledger.note_written(chunk.slot, chunk.end)
        for encoded in batch.encodes:
            for source in encoded.rows:
                for slot in source.slots:
                    slots[slot].group.has_source = True
                self._ledger.cache_source(source.slots[0])
