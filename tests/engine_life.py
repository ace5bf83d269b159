"""A state machine that holds any engine to its promises: whole lives of requests, whatever comes in any order.

Runs the real engine over a fake runner whose logits are a function of a row's tokens, so that every token is known.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import event as note
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from service.engine.batch import BeamRow, SampleRow, ScheduledBatch
from service.engine.engine import Engine, LastRun
from service.engine.kv.reservations import KVBudget
from service.engine.sampling.beam import BeamSearch
from service.engine.sampling.sampler import Sampler, compute_logprobs
from service.engine.scheduler import EngineLimits, Scheduler
from service.engine.speculation.drafting import MOST_FED
from service.engine.types import (
    BeamSearchParams,
    FinishReason,
    GenerationRequest,
    PromptScoring,
    SamplingParams,
    StoppingParams,
    TokenEvent,
    TokenLogprobs,
)
from service.errors import InvalidRequest
from tests.fakes import CONTEXT, EOS, GREEDY, FakeRunner, fake_model, letters, noise, request

LIMITS = EngineLimits(max_batch_size=4, prefill_chunk=8, max_prefill_tokens=16)


BUDGET = KVBudget(num_bytes=3 * (2 * 2 * CONTEXT + 24), token_bytes=3, source_token_bytes=3, page_tokens=4)
"""Two requests of either family at their longest, and a little: less than four slots could hold."""
PAGED_BUDGET = dataclasses.replace(BUDGET, source_page_tokens=4)
PATIENCE = 8.0
SAMPLED = SamplingParams(temperature=1.5, seed=7)


class Life(RuleBasedStateMachine):
    """Requests arrive, end, expire and fail in any order; the model is a dict from id to what must come next."""

    encoder_decoder = False
    budget = BUDGET
    # A row's last tokens that decide what follows, None for all; and draft tokens of one step, at most.
    memory: int | None = None
    look_up = 0
    merges_chunks = False
    # By name, their weights; and how many priorities there are.
    tenants: Mapping[str, float] = {"": 1.0}
    num_priorities = 3

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.last_failure = 0.0
        self.fails = False
        self.was_run = False
        self.runner = self.make_runner()
        model = fake_model(encoder_decoder=self.encoder_decoder)
        limits = dataclasses.replace(LIMITS, patience_seconds=PATIENCE, look_up=self.look_up)
        self.scheduler = Scheduler(limits, model, letters, self.budget)
        self.scheduler.drafter.enable()
        self.scheduler.merge_chunks(is_proven=self.merges_chunks)
        self.engine = Engine(self.scheduler, self.runner, Sampler(), LastRun(), lambda: self.now)
        self.requests: dict[str, GenerationRequest] = {}
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.reasons: dict[tuple[str, int], FinishReason] = {}
        self.scores: dict[str, list[TokenLogprobs]] = {}
        self.terminal: Counter[str] = Counter()
        self.doomed: set[str] = set()
        self.begun: set[str] = set()
        self.last_end: float | None = None
        self.durations: dict[bool, list[float]] = {False: [], True: []}
        self.has_prompts, self.num_chunks = False, 1

    def make_runner(self) -> FakeRunner:
        return FakeRunner(LIMITS.max_batch_size, before_run=self.on_batch, memory=self.memory)

    def on_batch(self, batch: ScheduledBatch) -> None:
        """Asserts what holds of every batch."""
        busy = [slot for slot, row in enumerate(batch.decode) if not row.is_padding]
        busy += {slot for slot, _, _ in chunks_of(batch)}
        if batch.drafted:
            assert not busy, "rows with drafts are computed in one run, and nothing else is"
            lengths = [len(chunk.token_ids) for chunk in batch.drafted]
            assert len(lengths) == 1 or len(lengths) * max(lengths) <= min(MOST_FED, LIMITS.max_prefill_tokens)
            note(f"rows with drafts: {len(lengths)}")
        for slot, chunk in enumerate(batch.drafted):
            busy.append(chunk.slot)
            assert chunk.slot == slot
            assert 1 <= chunk.num_scored <= self.look_up + 1
            assert len(chunk.token_ids) == max(lengths)
            prompt = self.scheduler._ledger.slots[slot].group.prompt_token_ids
            assert chunk.start >= len(prompt), "a prompt's K/V are never written again"
            assert chunk.end < self.scheduler._ledger.slots[slot].group.max_num_tokens
        self.check_fed(sorted(busy), batch)
        groups = (*batch.encodes, *batch.prefill_groups)
        costs = [group.padded_length for group in groups for _ in group.rows]
        costs += [len(chunk.token_ids) for chunk in batch.prefills]
        self.num_chunks = (
            max((len(chunk.token_ids) // LIMITS.prefill_chunk for chunk in batch.prefills), default=1) or 1
        )
        if self.num_chunks > 1:
            assert self.merges_chunks
            assert len(costs) == batch.num_rows == 1, "only a prompt alone has long runs"
            assert costs[0] <= LIMITS.merged_chunks * LIMITS.prefill_chunk
            assert costs[0] % LIMITS.prefill_chunk == 0, "a shorter chunk is a run of its own"
            assert not any(group.request.end_by for group in self.scheduler._live.values())
            note(f"tokens of a long run: {costs[0]}")
        assert sum(costs) <= LIMITS.max_prefill_tokens or len(costs) == 1
        assert all(start % LIMITS.prefill_chunk == 0 for _, start, _ in chunks_of(batch))
        assert all(group.padded_length <= LIMITS.prefill_chunk for group in batch.prefill_groups)
        assert sum(chunk.num_scored for chunk in batch.prefills) <= LIMITS.max_prefill_tokens
        if self.fails:
            raise RuntimeError("the runner fails")
        self.was_run = True
        self.has_prompts = bool(batch.encodes or chunks_of(batch))
        for operation in batch.kv_operations:
            note(f"{type(operation).__name__}{' behind what is shared' if getattr(operation, 'start', 0) else ''}")

    def check_fed(self, busy: list[int], batch: ScheduledBatch) -> None:
        assert busy == list(range(len(self.scheduler._ledger.slots))), "every resident row is fed, and fed once"

    @rule(
        # Few lengths, so that sources return.
        length=st.sampled_from([1, 2, 7, 8, 9, 16, 17, 25, 40, CONTEXT - 1]),
        kind=st.integers(0, 1),
        max_tokens=st.integers(0, 20),
        lifetime=st.none() | st.integers(2, 30),
        # How long before its deadline it takes a partial answer.
        margin=st.none() | st.integers(0, 6),
        start_within=st.none() | st.integers(0, 15),
        prefix_length=st.integers(0, 5),
        is_scored=st.booleans(),
        num_rows=st.integers(1, 3),
        is_search=st.booleans(),
        priority=st.integers(0, 2),
        tenant=st.integers(0, 2),
        # Some of the outputs end early, the first or all of them at once, too.
        stops=st.sampled_from([(), range(3, 14)]),
    )
    def add(
        self,
        length: int,
        kind: int,
        max_tokens: int,
        lifetime: int | None,
        margin: int | None,
        start_within: int | None,
        prefix_length: int,
        is_scored: bool,
        num_rows: int,
        is_search: bool,
        priority: int,
        tenant: int,
        stops: Sequence[int],
    ) -> None:
        name = f"r{len(self.requests)}"
        # Prompts of one kind begin alike.
        prompt = [3 + (length + kind * i if self.encoder_decoder else kind * i) % 29 for i in range(length)]
        deadline = None if lifetime is None else self.now + lifetime
        prefix = range(4, 4 + prefix_length) if self.encoder_decoder else ()
        num_given = 1 + prefix_length if self.encoder_decoder else length
        # Without a token that could be scored there must be one to generate.
        may_only_score = is_scored and num_given > 1 and num_rows == 1 and not is_search
        one = request(
            name,
            prompt,
            stopping=StoppingParams(
                max_tokens=max_tokens if may_only_score else max(max_tokens, 1), stop_token_ids=frozenset(stops)
            ),
            sampling=GREEDY if is_search or num_rows == 1 else dataclasses.replace(SAMPLED, n=num_rows),
            beam_search=BeamSearchParams(beam_size=num_rows, num_hypotheses=1 + num_rows // 2) if is_search else None,
            deadline=deadline,
            target_prefix=prefix,
            scoring=PromptScoring() if is_scored else None,
            priority=priority % self.num_priorities,
            tenant=(owner := list(self.tenants)[tenant % len(self.tenants)]),
            weight=self.tenants[owner],
            arrival_time=self.now,
            partial_on_deadline=margin is not None,
            end_by=None if deadline is None or margin is None else deadline - margin,
            start_by=None if start_within is None else self.now + start_within,
        )
        source, given = self.given(one)
        longest = min(CONTEXT, len(given) + one.stopping.max_tokens)
        padded = -(-len(source) // LIMITS.source_padding) * LIMITS.source_padding
        if one.num_rows * self.budget.row_bytes(longest, padded) > self.budget.num_bytes:
            with pytest.raises(InvalidRequest, match=r"(sampling\.n|beam_search\.beam_size)"):
                self.engine.add_request(one)
        else:
            self.submit(one)

    def submit(self, one: GenerationRequest) -> None:
        self.requests[one.request_id], self.scores[one.request_id] = one, []
        self.tokens |= {(one.request_id, index): [] for index in range(one.num_outputs)}
        self.engine.add_request(one)

    @rule(lifetime=st.integers(1, 12), max_tokens=st.integers(1, 6))
    @precondition(lambda self: self.scheduler.num_waiting)
    def add_in_a_hurry(self, lifetime: int, max_tokens: int) -> None:
        """A later request that may be due sooner than one that waits."""
        first = self.requests[self.scheduler.waiting_ids[0]]
        self.step(1)
        one = request(
            f"r{len(self.requests)}",
            [5],
            max_tokens=max_tokens,
            deadline=self.now + lifetime,
            arrival_time=self.now,
            priority=first.priority,
            tenant=first.tenant,
            weight=first.weight,
        )
        self.submit(one)

    @rule(data=st.data())
    @precondition(lambda self: self.scheduler.has_work)
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from([name for name in self.requests if not self.terminal[name]]))
        self.engine.abort(name)
        self.doomed.add(name)

    @rule(count=st.integers(1, 4))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.now += 1.0
            if self.engine.has_work:
                self.observe()

    @rule(count=st.integers(1, 3))
    @precondition(lambda self: not self.scheduler.has_work)
    def rest(self, count: int) -> None:
        """Copies that have waited."""
        for _ in range(count):
            self.engine.prepare()
        self.scheduler.check_invariants()

    @rule()
    @precondition(lambda self: self.scheduler.num_running and self.now >= self.last_failure + 10)
    def fail(self) -> None:
        """Rarely: everything cached is lost."""
        self.last_failure = self.now
        self.fails = True
        running = self.engine.num_running
        self.observe()
        self.fails = False
        assert self.engine.num_running == 0, f"of {running} requests some survived a failed step"

    def observe(self) -> None:
        expired = {
            name
            for name, one in self.requests.items()
            if not self.terminal[name] and one.deadline is not None and one.deadline <= self.now
        }
        too_late = {
            name
            for name, one in self.requests.items()
            if not self.terminal[name] and name not in self.begun and one.start_by is not None
            if one.start_by <= self.now
        }
        self.was_run = False
        before = set(self.scheduler.running_ids)
        output = self.engine.step()
        if output.stats.num_draft_tokens:
            note(f"drafts accepted: {output.stats.num_accepted_tokens}")
        assert self.was_run or self.fails, "the runner refused the batch"
        if not self.fails:
            assert self.runner.num_held_bytes(self.budget) <= self.budget.num_bytes
        longest = self.longest_step()
        for event in output.events:
            self.take(event, expired | too_late)
            one = self.requests[event.request_id]
            if event.finish_reason is FinishReason.DEADLINE and one.request_id not in expired | too_late:
                assert one.end_by is not None, "it had time"
                assert one.end_by <= self.now + longest, "it had time for another step"
        gone = expired | too_late | self.doomed
        assert all(self.terminal[name] == 1 for name in gone), "they end at the next step boundary"
        self.doomed.clear()
        for name, one in self.requests.items():
            if not self.terminal[name] and not self.fails:
                assert one.end_by is None or one.end_by > self.now + longest, "another step may end too late"
        waiting, running = output.stats.num_waiting, output.stats.num_running
        assert waiting + running == sum(not self.terminal[name] for name in self.requests)
        ranks = {name: self.rank(one) for name, one in self.requests.items()}
        started = set(self.scheduler.running_ids) - before
        # Only a preempted request may overtake one that has not begun: its saved K/V may leave the other no room.
        passed_by = [
            (self.requests[name], self.requests[other])
            for name in started
            for other in self.scheduler.waiting_ids
            if name not in self.begun or other in self.begun
            if self.requests[name].tenant == self.requests[other].tenant
        ]
        for one, other in passed_by:
            assert ranks[one.request_id] < ranks[other.request_id]
            if one.priority == other.priority and one.arrival_time > other.arrival_time:
                note("overtaken by an earlier deadline")
                assert one.arrival_time <= other.arrival_time + PATIENCE
        self.begun |= started

    def rank(self, one: GenerationRequest) -> tuple[int, float, int]:
        """Place in the queue, smallest first."""
        bound = one.arrival_time + PATIENCE
        return -one.priority, bound if one.deadline is None else min(bound, one.deadline), int(one.request_id[1:])

    def longest_step(self) -> float:
        """Duration of the longest recent step, by the steps so far and this one."""
        if self.fails:
            self.last_end = None
        else:
            began = self.now if self.last_end is None else self.last_end
            self.durations[self.has_prompts].append((self.now - began) / self.num_chunks)
            self.last_end = self.now if self.engine.has_work else None
        return max((each for kind in self.durations.values() for each in kind[-16:]), default=0.0)

    def logits(self, source: Sequence[int], tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        """The runner's logits for a row."""
        return noise(source, tokens[-(self.memory or 0) :])

    def take(self, event: TokenEvent, expired: set[str]) -> None:
        name, output = event.request_id, (event.request_id, event.output_index)
        one = self.requests[name]
        assert not self.terminal[name], "an event after the terminal one"
        assert event.error is None or self.fails, "the batch was refused while it ran"
        # A failure ends all outputs at once: its event is the request's, not one output's.
        assert output not in self.reasons or event.error is not None, "an event after an output's last one"
        assert event.num_cached_tokens <= one.num_prompt_tokens
        self.terminal[name] += event.is_terminal
        self.scores[name] += event.prompt_logprobs
        if event.token_id is not None:
            # A search with `partial_on_deadline` still delivers tokens when its time is up.
            assert name not in expired or (one.beam_search is not None and one.partial_on_deadline)
            assert name not in self.doomed or name in expired
            if one.beam_search is None:
                assert event.token_id == self.expected(one, event.output_index)
            self.tokens[output].append(event.token_id)
        if event.finish_reason is not None:
            self.reasons[output] = event.finish_reason
        if event.finish_reason is FinishReason.LENGTH:
            assert self.scores[name] == self.expected_scores(one)
        if event.timings is not None and event.error is None:
            indices = [index for index in range(one.num_outputs) if (name, index) in self.reasons]
            # A search that is stopped may not have found as many hypotheses.
            assert len(indices) == one.num_outputs or event.score is not None, "an output without an end"
            has_tokens = any(self.tokens[name, index] for index in range(one.num_outputs))
            assert (event.timings.first_token_time is not None) == has_tokens
            if one.beam_search is not None and event.score is not None:
                self.check_search(one, len(indices))

    def given(self, one: GenerationRequest) -> tuple[tuple[int, ...], list[int]]:
        prompt, prefix = one.prompt_token_ids, one.target_prefix_token_ids
        return (prompt, [1, *prefix]) if self.encoder_decoder else ((), list(prompt))

    def expected(self, one: GenerationRequest, index: int) -> int:
        source, given = self.given(one)
        tokens = given + self.tokens[one.request_id, index]
        row = self.logits(source, tokens)
        if one.sampling.n == 1:
            return int(row.argmax())
        sample = SampleRow(0, index, len(tokens), one.sampling, 7, None)
        (sampled,) = Sampler().sample(row[np.newaxis], [sample])
        assert sampled is not None
        return sampled.token_id

    def check_search(self, one: GenerationRequest, num_reported: int) -> None:
        """Repeats a search by itself; a stopped one must equal the search after some number of steps."""
        reported = [tuple(self.tokens[one.request_id, index]) for index in range(num_reported)]
        if not one.partial_on_deadline:
            assert reported == list(self.searches(one))[-1]
            return
        if FinishReason.DEADLINE in {self.reasons[one.request_id, index] for index in range(num_reported)}:
            note(f"a search is stopped {'with' if any(reported) else 'without'} tokens")
        assert reported in self.searches(one)

    def searches(self, one: GenerationRequest) -> Iterator[list[tuple[int, ...]]]:
        """Yields what a search reports when it is stopped after 0, 1, … steps, and last when it is over."""
        assert one.beam_search is not None
        source, given = self.given(one)
        max_tokens = min(CONTEXT - len(given), one.stopping.max_tokens)
        search = BeamSearch(one.beam_search, max_tokens, frozenset({EOS}), one.stopping.stop_token_ids)
        beams = [given]
        while not search.is_over:
            yield [hypothesis.token_ids for hypothesis in copy.deepcopy(search).stop(FinishReason.DEADLINE)]
            logits = np.stack([self.logits(source, beam) for beam in beams])
            row = BeamRow(tuple(range(len(beams))), search.num_candidates, (None,) * len(beams), None)
            (expansions,) = Sampler().expand(logits, [row])
            assert expansions is not None
            beams = [[*beams[each.parent], each.token_id] for each in search.advance(expansions)]
        yield [hypothesis.token_ids for hypothesis in search.hypotheses()]

    def expected_scores(self, one: GenerationRequest) -> list[TokenLogprobs]:
        source, tokens = self.given(one)
        if one.scoring is None:
            return []
        return [compute_logprobs(self.logits(source, tokens[:at]), tokens[at], 0) for at in range(1, len(tokens))]

    @invariant()
    def is_consistent(self) -> None:
        self.scheduler.check_invariants()

    def teardown(self) -> None:
        for _ in range(2000):
            if not self.engine.has_work:
                break
            self.now += 1.0
            self.observe()
        assert all(self.terminal[name] == 1 for name in self.requests), "exactly one terminal event each"
        assert self.engine.num_running == self.engine.num_waiting == 0
        assert self.scheduler.kv_usage_ratio == 0, "memory of requests that are over"


def chunks_of(batch: ScheduledBatch) -> list[tuple[int, int, int]]:
    """Slot, start and length of everything that is prefilled, in a group or not."""
    beginnings = [(row.slot, 0, len(row.token_ids)) for group in batch.prefill_groups for row in group.rows]
    return sorted([*beginnings, *((chunk.slot, chunk.start, len(chunk.token_ids)) for chunk in batch.prefills)])
