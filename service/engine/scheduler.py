"""Which sequences the next step computes: continuous batching over slots, for both families by the same code.

There are no phases. Every sequence has `num_computed_tokens`, which catches up with `num_tokens` in *pieces* that end
at absolute multiples of the chunk (one for an encoder-decoder, whose graph decodes token by token). A piece of one
token joins the batched run, a longer one is a prefill chunk of its own, but for short prompts: they are padded, and
those of one padded length run together. So the shapes that a request meets are a function of that request alone; only
how many rows share a run depends on the company.

Requests get rows by priority. Among equals each tenant has its share (`service.engine.queueing.tenants`), and a
tenant's own go by when they are due, which is first come, first served unless `patience_seconds` lets earlier deadlines
overtake. What is promised, and checked by the tests, with one tenant:

* Every sequence in a slot advances by a piece or more in every step.
* Chunks are computed in the order of arrival, and one that does not fit into a step comes first in the next: while
  slots are free, a prompt of c pieces behind prompts of m pieces in all is computed after at most m + c steps.
* Running rows wait, per step, for `max_prefill_tokens` of prompts at most, or for one source that is longer than that.
* A new request starts in the first step that finds it at the head of the queue with its rows, the K/V memory of its
  worst case and prefill budget free. No request of the queue starts before its head: among equals, each comes to its
  turn, as only those that arrive within its patience can still be put ahead of it (`service.engine.queueing.waiting`).
  Only where what is saved of preempted requests leaves no room for it, these go on first.
* If what the head waits for is held by less urgent requests that run, it starts at once: the least urgent of them go,
  or the one that is being prefilled; their K/V are saved, and they go on later as if nothing had happened.

With several tenants, each has a queue of its own, and of these promises:

* The first, but for a prompt: it keeps its row, and may wait for the prompts of tenants that had fewer tokens computed.
* The second and the fourth, within each tenant.
* The last, and a head that keeps its tenant within its share starts at once if what it waits for is held by equals of
  tenants beyond theirs: one head a step. No tenant loses what is within its share to another's share.
* A head that its tenant's share does not hold waits while others use theirs, and gets its share of the time.

And with any number of them:

* Aborted, expired and finished sequences lose their slot before the next step is planned; a waiting request that
  cannot be over in time any more (`start_by`) never gets one.
* A request that wants what there is (`end_by`) ends with a step, as soon as another one that takes as long as the
  longest of the recent ones would end too late for it.
* A row that decodes alone may have draft tokens (`service.engine.speculation.prompt_lookup`). It gets the tokens that
  it would get one by one, and no draft goes past its end, so that it writes no further than it has reserved.
* Every output of a request has one last event, and every request that `add` accepted exactly one terminal event.

Runs on the engine thread alone; knows no tensors, no clock (callers pass the time) and no transport.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from service.engine.batch import ScheduledBatch
from service.engine.chunks import ChunkRules
from service.engine.intake import Intake, ModelShape
from service.engine.kv.ledger import KVLedger
from service.engine.kv.reservations import KVBudget
from service.engine.plan import Planned, StepPlan
from service.engine.queueing.contention import Preemption, StepOrder
from service.engine.queueing.deadlines import Deadlines
from service.engine.queueing.step_timing import Pace
from service.engine.queueing.tenants import Tenants
from service.engine.sampling.beam import Hypothesis
from service.engine.sampling.sampler import Expansion, SampledToken
from service.engine.sampling.text import Decode
from service.engine.sequence import Sequence, SequenceGroup
from service.engine.speculation.prompt_lookup import LookUp
from service.engine.types import FinishReason, GenerationRequest, TokenEvent, TokenLogprobs
from service.errors import EngineFailed, InvalidRequest, RequestTooLarge, StartupError, report_failure


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """How much runs at once.

    The operator chooses `max_batch_size`, the number of slots; `prefill_chunk`, how many prompt tokens one run
    computes; `kv_memory_bytes`, what all K/V together may take, those kept for later requests included: None is a
    whole context for each slot; `patience_seconds`, for how long a request may be overtaken by equals with earlier
    deadlines: None lets none overtake; and `look_up`, how many tokens of a row that computes alone may be guessed
    ahead, where it is proven that this changes no bit. The engine's builder sets the rest:
    `max_prefill_tokens`, how many a step computes at most, and so how long running streams can be held up;
    `prompt_padding`, the multiple to which prompts of at most `short_prompt` tokens are padded; `source_padding`, the
    same for sources.

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

    def __post_init__(self) -> None:
        problems = [
            f"{name} is {value}, must be at least 1"
            for name in ("max_batch_size", "prefill_chunk", "max_prefill_tokens", "prompt_padding", "source_padding")
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

    @property
    def max_drafts(self) -> int:
        """Tokens that may be guessed at once: `look_up`, as far as the runner has rows of logits besides the slots'."""
        return min(self.look_up, self.max_prefill_tokens - 1)


class Scheduler:
    """Owns every sequence, the waiting queue and the slots.

    Args:
        limits: how much runs at once.
        model: what the model dictates.
        decode: ids to text, for requests with stop strings.
        kv_budget: what K/V may take; None for a whole context in each slot.
        draw_seed: a fresh uint64 for each request that brings no seed.
    """

    def __init__(
        self,
        limits: EngineLimits,
        model: ModelShape,
        decode: Decode,
        kv_budget: KVBudget | None = None,
        draw_seed: Callable[[], int] = lambda: secrets.randbits(64),
    ) -> None:
        self._context, self._source_context = model.context, model.source_context or 0
        self._limits = limits
        self._intake = Intake(model, decode, draw_seed, limits.patience_seconds)
        self.pieces = ChunkRules(
            chunk=1 if model.is_encoder_decoder else limits.prefill_chunk,
            context=model.context,
            prompt_padding=limits.prompt_padding,
            short_prompt=limits.short_prompt,
            source_padding=limits.source_padding,
            source_context=model.source_context or 0,
        )
        whole = limits.max_batch_size * (model.context + (model.source_context or 0))
        self._budget = kv_budget or KVBudget(num_bytes=whole)
        self._ledger = KVLedger(limits.max_batch_size, self._budget, self.pieces)
        self._tenants = Tenants(self._ledger, limits.max_prefill_tokens)
        self._live: dict[str, SequenceGroup] = {}
        self._deadlines = Deadlines()
        self._starts = Deadlines()
        self._ends = Deadlines()
        self._pace = Pace()
        self._aborted: list[str] = []
        self._events: list[TokenEvent] = []
        # Requests of which an output, or all, ended: their rows are to be freed. In order, for the sake of the moves.
        self._changed: dict[SequenceGroup, None] = {}
        self._planned: Planned | None = None
        self._num_preemptions = 0
        self._num_accepted_drafts = 0
        self._is_unguessable = model.why_unguessed is not None
        # Tokens that may be guessed at once: none before that is proven to change nothing.
        self._most_drafts = 0

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._live)

    @property
    def num_running(self) -> int:
        """Requests that hold a slot."""
        return len(self._ledger.running)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for one."""
        return len(self._tenants)

    @property
    def num_rows(self) -> int:
        """Slots that are taken."""
        return len(self._ledger.slots)

    @property
    def num_preemptions(self) -> int:
        """How often a request lost its slots to a more urgent one."""
        return self._num_preemptions

    @property
    def num_accepted_drafts(self) -> int:
        """How many tokens that were guessed came true."""
        return self._num_accepted_drafts

    @property
    def provable_draft_tokens(self) -> int:
        """How many tokens may be guessed at once if that is proven to change nothing; 0 where nothing can be."""
        return 0 if self._is_unguessable else self._limits.max_drafts

    @property
    def max_draft_tokens(self) -> int:
        """How many tokens of a row that computes alone are guessed at once, at most."""
        return self._most_drafts

    def let_guess(self, *, is_proven: bool) -> None:
        """Says whether a token has the same bits computed by itself and as one of a chunk.

        If so, what a row that computes alone says next is guessed by look-up from now on (`EngineLimits.max_drafts`),
        where the model is one of which something can be guessed (`ModelShape.why_unguessed`); else it is not.
        """
        self._most_drafts = self.provable_draft_tokens if is_proven else 0

    @property
    def limits(self) -> EngineLimits:
        """How much runs at once."""
        return self._limits

    @property
    def kv_usage_ratio(self) -> float:
        """Share of the K/V memory that is spoken for; what is kept for requests to come counts as free."""
        return self._ledger.usage_ratio

    @property
    def kv_memory_bytes(self) -> int:
        """What K/V may take."""
        return self._budget.num_bytes

    @property
    def num_whole_rows(self) -> int:
        """How many sequences of full length K/V may hold at once, 1 at least."""
        row = self._budget.row_bytes(self._context, self._source_context)
        return max(1, self._budget.num_bytes // row)

    def limit_kv(self, num_bytes: int) -> None:
        """Keeps K/V within so many bytes of `kv_memory_bytes` from now on; what does not fit into them waits.

        Raises:
            ValueError: when running and preempted requests hold more.
        """
        if num_bytes != self._ledger.limit:
            self._ledger.set_limit(num_bytes)

    @property
    def kv_needed_bytes(self) -> int:
        """What K/V must be able to take for all requests to end, if no more come."""
        return self._ledger.num_needed_bytes(self._tenants)

    def add(self, request: GenerationRequest) -> None:
        """Queues a request.

        Raises:
            InvalidRequest: when the id is in use or something is out of range; nothing was queued then.
        """
        group = self._measure(request)
        self._intake.add_outputs(group)
        self._live[request.request_id] = group
        self._tenants.begin(group)
        self._deadlines.add(group, request.deadline)
        self._starts.add(group, request.start_by)
        self._ends.add(group, request.end_by)

    def num_cached_tokens(self, request: GenerationRequest) -> int:
        """How many tokens of a request's prompt, or of its source, it would find computed if it were admitted now.

        Reads its tokens and lengths alone: nothing is made for its outputs or its rules.

        Raises:
            InvalidRequest: when `add` would refuse it.
        """
        return self._ledger.num_cached_tokens(self._measure(request))

    def abort(self, request_id: str) -> None:
        """Ends a request at the next step boundary; one that is over already is left alone."""
        if request_id in self._live:
            self._aborted.append(request_id)

    def schedule(self, now: float) -> ScheduledBatch:
        """Reaps ended requests, admits waiting ones, plans one step.

        `now` is in `time.monotonic()` seconds. Every call must be followed by one of `commit` or `fail_running`.
        """
        self._pace.begin(now)
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
        if self._most_drafts and plan.is_one_token and (drafts := self._guess(self._ledger.slots[0])):
            plan.guess(drafts)
        self._planned = plan.build(self._ledger.take_operations(), self._ledger.slots)
        return self._planned.batch

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
        ends the request as failed, as does text that cannot be made. Returns all events since the last call, in
        schedule order.
        """
        planned = self._planned
        if planned is None or planned.batch is not batch:
            raise ValueError("only the batch that was scheduled last can be committed, and only once")
        self._planned = None
        self._note_computed(batch)
        slots = self._ledger.slots
        for score, logprobs in zip(batch.scores, scored, strict=True):
            self._report_scores(slots[score.slot].group, logprobs, now, is_end=score.is_end)
        if batch.drafted is None:
            self._advance_all(planned.sampled, sampled, now)
        else:
            self._advance_by_drafts(planned.sampled[0], batch, sampled, now)
        for group, expansions in zip(planned.searched, expanded, strict=True):
            self._search(group, expansions, now)
        self._pace.end(now, has_prompts=batch.has_prompts)
        self._end_in_time(now)
        self._release()
        if not self._live:
            self._pace.pause()
        return self._take_events()

    def fail_running(self, error_id: str, now: float) -> tuple[TokenEvent, ...]:
        """Ends every request that holds a slot, or lost it in this step: the step failed and their K/V is in doubt.

        Each gets an `EngineFailed` of its own under the one id: an error is raised once, in one request's stream.
        """
        self._planned = None
        self._pace.pause()
        for group in self._ledger.fail():
            if group.request_id in self._live:
                if group in self._tenants:
                    self._tenants.of(group).waiting.remove(group)
                self._fail(group, EngineFailed(error_id), now)
        self._changed = {}
        return self._take_events()

    def forget_kv(self) -> None:
        """Forgets all that is kept in rows and besides, for others have written to the rows; no request may hold one.

        Raises:
            RuntimeError: when one does.
        """
        if self._live:
            raise RuntimeError(f"{len(self._live)} requests live")
        self._ledger.fail()

    @property
    def running_ids(self) -> tuple[str, ...]:
        """The requests that hold a slot."""
        return tuple(group.request_id for group in self._ledger.running)

    @property
    def waiting_ids(self) -> tuple[str, ...]:
        """The requests that wait for one, tenant by tenant, each one's in the order of their turns."""
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
        """A request that could run, without outputs; nothing is queued yet."""
        if request.request_id in self._live:
            raise InvalidRequest("request_id", request.request_id, "must not be in use by another request")
        group = self._intake.measure(request)
        self._check_size(group)
        return group

    def _check_size(self, group: SequenceGroup) -> None:
        """Refuses a request that could not run even alone."""
        num_rows = group.request.num_rows
        field = "sampling.n" if group.beams is None else "beam_search.beam_size"
        if num_rows > self._limits.max_batch_size:
            limit = f"must be at most {self._limits.max_batch_size}, the sequences that run at once"
            raise InvalidRequest(field, num_rows, limit)
        if (needed := self._ledger.worst_case(group)) > self._budget.num_bytes:
            limit = f"needs {needed} bytes of K/V with this prompt and max_tokens, there are {self._budget.num_bytes}"
            raise RequestTooLarge(field, num_rows, limit)

    def _reap(self, now: float) -> None:
        """Ends expired and aborted requests, wherever they are, and those that could not end in time any more.

        An expired one ends as such even if it was aborted: a transport's deadline cancels the call at the same moment.
        """
        for group in self._deadlines.take_expired(now):
            self._finish_early(group, FinishReason.DEADLINE, now)
        for group in self._starts.take_expired(now):
            self._finish_early(group, FinishReason.DEADLINE, now)
        for request_id in self._aborted:
            if request_id in self._live:
                self._finish_early(self._live[request_id], FinishReason.CANCELLED, now)
        self._aborted.clear()
        self._release()

    def _end_in_time(self, now: float) -> None:
        """Finishes `partial_on_deadline` requests that cannot afford another step."""
        if self._ends:
            for group in self._ends.take_expired(now + self._pace.longest):
                self._finish_early(group, FinishReason.DEADLINE, now)

    def _plan_running(self) -> tuple[StepPlan, dict[SequenceGroup, Sequence]]:
        """A step of the sequences that hold slots; and the prompts that take turns with other tenants'."""
        plan = StepPlan(self.pieces, self._limits.max_prefill_tokens, self._limits.max_batch_size)
        prompts = {}
        for slot, sequence in enumerate(self._ledger.slots):
            num_left = self.pieces.next_length(sequence.num_tokens, sequence.num_computed_tokens)
            if self._tenants.are_several and num_left > 1:
                prompts[sequence.group] = sequence
            else:
                plan.feed(slot, sequence)
        return plan, prompts

    def _preempt(self, head: SequenceGroup, victims: Collection[SequenceGroup]) -> None:
        """Saves the victims' rows for a request that can start then."""
        self._tenants.spare(head)
        for group in victims:
            self._tenants.charge_copy(group, head)
            self._ledger.preempt(group)
            self._tenants.of(group).waiting.add(group)
            self._num_preemptions += 1

    def _fill_step(
        self, plan: StepPlan, prompts: Mapping[SequenceGroup, Sequence], order: StepOrder, now: float
    ) -> None:
        """Goes on with prompts and admits requests, each tenant in its turn, until the step is full."""
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
                self._tenants.of(group).waiting.remove(group)
                if group.scheduled_time is None:
                    group.scheduled_time = now
                    self._starts.discard(group)
                plan.start(self._ledger.admit(group), group)
                self._tenants.charge(group, plan.num_prefill_tokens - used)

    def _note_computed(self, batch: ScheduledBatch) -> None:
        """Counts what a batch has computed, and keeps what later requests may want."""
        slots = self._ledger.slots
        for slot, fed in enumerate(batch.decode):
            if not fed.is_padding:
                slots[slot].num_computed_tokens += 1
        for group in batch.prefill_groups:
            for row in group.rows:
                slots[row.slot].num_computed_tokens += len(row.token_ids)
                self._ledger.cache_chunk(row.slot, 0, len(row.token_ids))
        for chunk in batch.prefills:
            slots[chunk.slot].num_computed_tokens += len(chunk.token_ids)
            self._ledger.cache_chunk(chunk.slot, chunk.start, len(chunk.token_ids))
        if (drafted := batch.drafted) is not None:
            # Whether the guesses are the row's is not known yet.
            slots[drafted.slot].num_computed_tokens += 1
            self._ledger.note_written(drafted.slot, drafted.start + len(drafted.token_ids))
        for encoded in batch.encodes:
            for source in encoded.rows:
                for slot in source.slots:
                    slots[slot].group.has_source = True
                self._ledger.cache_source(source.slots[0])

    def _advance_all(self, sequences: Iterable[Sequence], sampled: Collection[SampledToken | None], now: float) -> None:
        """Appends every sampled token, and gives outputs that shared a row until now their own."""
        leaders: dict[SequenceGroup, Sequence] = {}
        for sequence, result in zip(sequences, sampled, strict=True):
            if not sequence.group.is_forked:
                leaders.setdefault(sequence.group, sequence)
            self._advance(sequence, result, now)
        for group, leader in leaders.items():
            group.is_forked = True
            if group.sequences:
                self._ledger.fork(leader, group.sequences)

    def _guess(self, sequence: Sequence) -> tuple[int, ...]:
        """What a sequence may say next, short of its end; nothing within its prompt."""
        group = sequence.group
        # Behind the last one that comes true there is a token to choose.
        room = group.max_num_tokens - sequence.num_tokens - 1
        if room < 1 or sequence.num_tokens == len(group.prompt_token_ids):
            return ()
        if sequence.look_up is None:
            sequence.look_up = LookUp(self._most_drafts)
        drafts = sequence.look_up.propose(sequence.token_ids, min(room, self._most_drafts))
        ends = group.eos_ids | group.request.stopping.stop_token_ids
        return tuple(itertools.takewhile(lambda token_id: token_id not in ends, drafts))

    def _advance_by_drafts(
        self, sequence: Sequence, batch: ScheduledBatch, sampled: Collection[SampledToken | None], now: float
    ) -> None:
        """Appends the tokens of a row that was guessed ahead: all that came true, and the first that did not."""
        num_right = 0
        for sample, result in zip(batch.samples, sampled, strict=True):
            self._advance(sequence, result, now)
            if result is None or result.token_id != sample.draft:
                break
            num_right += 1
            if sequence not in sequence.group.sequences:
                break
            sequence.num_computed_tokens += 1
        self._num_accepted_drafts += num_right
        if sequence.look_up is not None:
            sequence.look_up.judge(batch.num_draft_tokens, num_right)

    def _search(self, group: SequenceGroup, expansions: tuple[Expansion, ...] | None, now: float) -> None:
        """Extends a request's beams, or ends it."""
        if group.beams is None or group.request_id not in self._live:
            return
        if expansions is None:
            self._fail(group, report_failure(f"request {group.request_id}: its logits are not finite"), now)
            return
        extensions = group.beams.advance(expansions)
        if not extensions:
            self._report_hypotheses(group, group.beams.hypotheses(), now)
            return
        parents, beams = group.sequences, []
        births: list[tuple[Sequence, Sequence]] = []
        for extension in extensions:
            parent = parents[extension.parent]
            if parent in beams:
                beams.append(parent.fork())
                births.append((beams[-1], parent))
            else:
                beams.append(parent)
        self._ledger.rearrange(births, [parent for parent in parents if parent not in beams])
        for beam, extension in zip(beams, extensions, strict=True):
            beam.extend(extension.token_id)
        if len(beams) < len(parents):
            self._changed[group] = None
        group.sequences = beams

    def _report_hypotheses(self, group: SequenceGroup, hypotheses: Collection[Hypothesis], now: float) -> None:
        """Reports the outputs of a search that is over, token by token."""
        if any(hypothesis.token_ids for hypothesis in hypotheses):
            group.first_token_time = now
        for index, hypothesis in enumerate(hypotheses):
            events = [
                TokenEvent(
                    request_id=group.request_id,
                    output_index=index,
                    token_id=token_id,
                    logprobs=None if group.request.logprobs is None else logprobs,
                    num_cached_tokens=group.num_cached_tokens,
                )
                for token_id, logprobs in zip(hypothesis.token_ids, hypothesis.logprobs, strict=True)
            ]
            # Where the rules leave nothing to choose at all, there is not even one token.
            last = events.pop() if events else TokenEvent(request_id=group.request_id, output_index=index)
            self._events += events
            self._events.append(
                dataclasses.replace(
                    last,
                    is_mute=group.is_mute(hypothesis.finish_reason),
                    finish_reason=hypothesis.finish_reason,
                    matched_stop=hypothesis.matched_stop,
                    score=hypothesis.score,
                )
            )
        self._end(group, now)

    def _finish_early(self, group: SequenceGroup, reason: FinishReason, now: float) -> None:
        """Ends a request between two tokens, each output with the text that was held back.

        A search reports its best so far where a deadline leaves that as the answer, and otherwise nothing.
        """
        if group in self._tenants:
            self._tenants.of(group).waiting.remove(group)
            self._ledger.forget(group)
        request_id = group.request_id
        if group.beams is not None and group.request.partial_on_deadline and reason is FinishReason.DEADLINE:
            self._report_hypotheses(group, group.beams.stop(reason), now)
            return
        try:
            if group.beams is None:
                ends = [(sequence.index, sequence.flush_text()) for sequence in group.sequences]
            else:
                ends = [(index, None) for index in range(group.request.num_outputs)]
        except Exception as cause:  # a decoder's own: no other request is concerned
            self._fail(group, report_failure(f"request {request_id}: no text could be made", cause), now)
            return
        for index, text in ends:
            self._events.append(TokenEvent(request_id=request_id, output_index=index, text=text, finish_reason=reason))
        self._end(group, now)

    def _report_scores(
        self, group: SequenceGroup, logprobs: tuple[TokenLogprobs, ...] | None, now: float, *, is_end: bool
    ) -> None:
        """Reports a prompt's scores, and ends a request that wanted nothing else."""
        if group.request_id not in self._live:
            return
        if logprobs is None:
            self._fail(group, report_failure(f"request {group.request_id}: its logits are not finite"), now)
            return
        reason = FinishReason.LENGTH if is_end else None
        self._events.append(TokenEvent(request_id=group.request_id, prompt_logprobs=logprobs, finish_reason=reason))
        if is_end:
            self._end(group, now)

    def _advance(self, sequence: Sequence, result: SampledToken | None, now: float) -> None:
        """Appends a sampled token and reports it."""
        group = sequence.group
        request_id = group.request_id
        if request_id not in self._live:
            return
        if result is None:
            self._fail(group, report_failure(f"request {request_id}: its logits are not finite"), now)
            return
        try:
            appended = sequence.append(result.token_id, now)
        except Exception as cause:  # a decoder's own: the neighbours' K/V and tokens are sound
            self._fail(group, report_failure(f"request {request_id}: no text could be made", cause), now)
            return
        self._events.append(
            TokenEvent(
                request_id=request_id,
                output_index=sequence.index,
                token_id=result.token_id,
                is_mute=appended.is_mute,
                text=appended.text,
                logprobs=result.logprobs,
                finish_reason=appended.finish_reason,
                matched_stop=appended.matched_stop,
                num_cached_tokens=group.num_cached_tokens,
            )
        )
        if appended.finish_reason is None:
            return
        group.sequences.remove(sequence)
        self._changed[group] = None
        if not group.sequences:
            self._end(group, now)

    def _fail(self, group: SequenceGroup, error: EngineFailed, now: float) -> None:
        self._events.append(TokenEvent(request_id=group.request_id, error=error))
        self._end(group, now)

    def _end(self, group: SequenceGroup, now: float) -> None:
        """Makes the last event the request's terminal one; `_release` takes its rows."""
        del self._live[group.request_id]
        self._tenants.end(group)
        for moments in (self._deadlines, self._starts, self._ends):
            moments.discard(group)
        self._changed[group] = None
        group.sequences = []
        self._events[-1] = dataclasses.replace(
            self._events[-1],
            timings=group.timings(now),
            num_cached_tokens=group.num_cached_tokens,
            num_search_steps=0 if group.beams is None else group.beams.num_steps,
        )

    def _release(self) -> None:
        """Frees the rows of all that ended since the last time."""
        if self._changed:
            self._ledger.release(self._changed)
            self._changed = {}

    def _take_events(self) -> tuple[TokenEvent, ...]:
        events, self._events = tuple(self._events), []
        return events
