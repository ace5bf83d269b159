"""Tenants share the engine by weight: whatever one of them asks for, another's share is there with the next step."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import event as note
from hypothesis import settings

from service.engine.batch import KVSave, ScheduledBatch
from service.engine.kv.ledger import KVLedger
from service.engine.kv.reservations import KVBudget
from service.engine.plan import StepPlan
from service.engine.queueing.tenants import SLICE_STEPS
from service.engine.scheduler import EngineLimits, Scheduler
from service.engine.sequence import SequenceGroup
from service.engine.types import BeamSearchParams, GenerationRequest, SamplingParams
from tests.engine_life import BUDGET, PAGED_BUDGET, Life, chunks_of
from tests.engine_life import LIMITS as LIFE_LIMITS
from tests.fakes import CONTEXT, FakeRunner, fake_engine, fake_model, letters, request
from tests.paged import PagedFakeRunner
from tests.unit.service.engine.test_scheduler import commit, step

ROWS = 8
LIMITS = EngineLimits(max_batch_size=ROWS, prefill_chunk=8, max_prefill_tokens=8)
LONG = range(3, 51)
"""A prompt of six chunks, each a step's budget."""


def make_scheduler(limits: EngineLimits = LIMITS, kv_budget: KVBudget | None = None) -> Scheduler:
    return Scheduler(limits, fake_model(), letters, kv_budget)


def sampled(n: int) -> SamplingParams:
    return SamplingParams(n=n, seed=1)


def rows_of(scheduler: Scheduler, *tenants: str) -> list[int]:
    """Rows that running requests of each tenant have, or have reserved."""
    rows = scheduler._ledger._num_rows
    return [sum(count for group, count in rows.items() if group.request.tenant == tenant) for tenant in tenants]


def test_a_tenant_below_its_share_gets_a_row_with_the_next_step_until_it_has_its_share() -> None:
    scheduler = make_scheduler()
    for index in range(ROWS):
        scheduler.add(request(f"a{index}", max_tokens=40, tenant="a"))
    step(scheduler)
    for index in range(ROWS):
        scheduler.add(request(f"b{index}", max_tokens=30, tenant="b"))
    seen = []
    for _ in range(ROWS):
        step(scheduler)
        seen.append(rows_of(scheduler, "a", "b"))
    assert seen == [[7, 1], [6, 2], [5, 3], [4, 4], [4, 4], [4, 4], [4, 4], [4, 4]]
    assert scheduler.num_preemptions == 4
    assert scheduler.running_ids == ("a0", "a1", "a2", "a3", "b0", "b1", "b2", "b3"), "the most recent ones left"


def test_a_prompt_of_one_tenant_does_not_wait_for_the_end_of_anothers() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a", LONG, tenant="a"))
    step(scheduler)
    scheduler.add(request("b", range(4, 20), tenant="b"))
    seen = [chunks_of(step(scheduler)) for _ in range(6)]
    assert seen == [[(1, 0, 8)], [(0, 8, 8)], [(1, 8, 8)], [(0, 16, 8)], [(0, 24, 8)], [(0, 32, 8)]]
    assert scheduler.num_preemptions == 0, "a prompt that waits for its turn keeps its row"


def test_prompt_tokens_are_shared_by_weight() -> None:
    scheduler = make_scheduler()
    for tenant, weight in (("a", 1.0), ("b", 2.0)):
        # No chunk of the one is found in the cache for the other.
        scheduler.add(request(tenant, [3 + int(weight), *LONG][: len(LONG)], tenant=tenant, weight=weight))
    slots = [slot for _ in range(9) for slot, _, _ in chunks_of(step(scheduler))]
    assert sorted((slots.count(0), slots.count(1))) == [3, 6]


def test_prompts_that_hold_no_row_for_long_do_not_starve_a_tenant_that_holds_rows() -> None:
    """A row that one tenant has does not put its next request behind another's prompts."""
    scheduler = make_scheduler()
    scheduler.add(request("b", max_tokens=50, tenant="b"))
    step(scheduler)
    for index in range(50):
        scheduler.add(request(f"a{index}", [3 + index % 20, *range(3, 10)], max_tokens=1, tenant="a"))
    scheduler.add(request("b0", range(4, 12), max_tokens=1, tenant="b"))
    seen = [event.request_id for _ in range(2) for event in commit(scheduler, scheduler.schedule(0.0))]
    assert "b0" in seen


def test_a_request_that_needs_saved_memory_waits_no_longer_than_its_own_length() -> None:
    """What is saved gives nothing back before its end: what is left to be computed then is less than is missing."""
    scheduler = make_scheduler(kv_budget=KVBudget(num_bytes=2 * CONTEXT))
    for index in range(2):
        scheduler.add(request(f"a{index}", [5] * 4, max_tokens=CONTEXT, tenant="a"))
    for _ in range(52):
        step(scheduler)
    assert scheduler.num_running == 2
    scheduler.add(request("b", [5] * 4, max_tokens=20, tenant="b"))
    for index in range(2, 9):
        scheduler.add(request(f"a{index}", [5] * 4, max_tokens=CONTEXT, tenant="a"))
    steps = 0
    while "b" not in scheduler.running_ids:
        step(scheduler)
        steps += 1
    assert steps <= 24


def test_nothing_beyond_a_share_starts_while_another_tenant_waits_for_memory() -> None:
    """One of these ends with every step, too few for the other tenant; saved they would take what they took."""
    limits = dataclasses.replace(LIMITS, max_prefill_tokens=24)
    scheduler = make_scheduler(limits, KVBudget(num_bytes=2 * CONTEXT))
    for index in range(60):
        scheduler.add(request(f"a{index}", [3 + index % 20, 3 + index // 20] * 9, max_tokens=6, tenant="a"))
    for _ in range(10):
        step(scheduler)
    scheduler.add(request("b", [5] * 4, max_tokens=56, tenant="b"))
    for _ in range(4):
        step(scheduler)
    assert "b" in scheduler.running_ids


@pytest.mark.parametrize("has_more", [False, True])
def test_saved_requests_of_one_tenant_go_on_where_they_leave_another_no_memory(*, has_more: bool) -> None:
    """Each would wait for the other: the one for the memory, the other for its share."""
    scheduler = make_scheduler(kv_budget=KVBudget(num_bytes=2 * CONTEXT))
    for index in range(2):
        scheduler.add(request(f"a{index}", [5] * 4, max_tokens=CONTEXT, tenant="a", priority=-has_more))
    for _ in range(50):
        step(scheduler)
    scheduler.add(request("b0", [5] * 4, max_tokens=18, tenant="b"))
    step(scheduler)
    assert scheduler.running_ids == ("b0",)
    if has_more:
        scheduler.add(request("a2", [5], max_tokens=1, tenant="a"))
    scheduler.abort("b0")
    scheduler.add(request("b1", [5] * 4, max_tokens=36, tenant="b"))
    for _ in range(3 * CONTEXT):
        step(scheduler)
    assert not scheduler.has_work


def test_a_priority_goes_before_any_share() -> None:
    scheduler = make_scheduler()
    for index in range(ROWS):
        scheduler.add(request(f"a{index}", max_tokens=40, priority=1, tenant="a"))
    step(scheduler)
    scheduler.add(request("b", max_tokens=4, tenant="b"))
    for _ in range(5):
        step(scheduler)
    assert rows_of(scheduler, "a", "b") == [ROWS, 0]
    scheduler.add(request("c", max_tokens=4, priority=2, tenant="c"))
    step(scheduler)
    assert "c" in scheduler.running_ids


def test_tenants_share_rows_though_a_more_urgent_request_waits_for_its_tenants_share() -> None:
    """It wants every row, and others of its priority have one: a key with such a request ends no sharing below it."""
    scheduler = make_scheduler()
    scheduler.add(request("u", max_tokens=60, tenant="u"))
    for index in range(ROWS - 1):
        scheduler.add(request(f"a{index}", max_tokens=60, priority=-1, tenant="a"))
    step(scheduler)
    scheduler.add(request("v", max_tokens=4, sampling=sampled(ROWS), tenant="v"))
    scheduler.add(request("b", max_tokens=60, priority=-1, tenant="b"))
    step(scheduler)
    assert rows_of(scheduler, *"uvab") == [1, 0, ROWS - 2, 1]
    # A row is a quarter of what it may have: it wants four shares, and is due after so many steps.
    for _ in range(3 * SLICE_STEPS):
        assert rows_of(scheduler, "v") == [0]
        step(scheduler)
    assert rows_of(scheduler, *"uvab") == [0, ROWS, 0, 0]


def test_a_less_urgent_request_takes_no_room_that_a_more_urgent_one_fits_into() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("u", max_tokens=60, tenant="u"))
    for index in range(ROWS - 3):
        scheduler.add(request(f"a{index}", max_tokens=60, priority=-1, tenant="a"))
    step(scheduler)
    scheduler.add(request("v", max_tokens=60, sampling=sampled(2), tenant="v"))
    scheduler.add(request("b", max_tokens=60, sampling=sampled(3), priority=-1, tenant="b", weight=2.0))
    step(scheduler)
    assert rows_of(scheduler, *"uvab") == [1, 2, ROWS - 3, 0]
    step(scheduler)
    assert rows_of(scheduler, *"uvab") == [1, 2, ROWS - 6, 3]


def test_nobody_is_preempted_for_an_equal_that_cannot_start_in_that_step(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = make_scheduler()
    for index in range(ROWS):
        scheduler.add(request(f"a{index}", max_tokens=40, tenant="a"))
    step(scheduler)
    scheduler.add(request("b", max_tokens=4, tenant="b"))
    with monkeypatch.context() as patch:
        patch.setattr(StepPlan, "can_start", lambda *_: False)
        step(scheduler)
    assert scheduler.num_preemptions == 0
    step(scheduler)
    assert rows_of(scheduler, "a", "b") == [ROWS - 1, 1]


def test_steps_for_which_a_tenant_waited_count_no_more_once_it_has_no_request() -> None:
    """Else requests that end while they wait would save up for one that need not wait, whatever its size."""
    scheduler = make_scheduler()
    for index in range(ROWS):
        scheduler.add(request(f"a{index}", max_tokens=CONTEXT, tenant="a"))
    # Its account is kept for as long as it has had more prompt tokens than others.
    scheduler.add(request("long", LONG, max_tokens=1, tenant="b"))
    while "long" in (*scheduler.running_ids, *scheduler.waiting_ids):
        step(scheduler)
    num_preemptions = scheduler.num_preemptions
    # Twice its share: due after so many steps.
    for number in range(SLICE_STEPS):
        scheduler.add(request(f"b{number}", max_tokens=4, sampling=sampled(ROWS), tenant="b"))
        step(scheduler)
        assert scheduler.num_preemptions == num_preemptions
        scheduler.abort(f"b{number}")
        step(scheduler)
    scheduler.add(request("b", max_tokens=4, sampling=sampled(ROWS), tenant="b"))
    for _ in range(SLICE_STEPS):
        step(scheduler)
        assert scheduler.num_preemptions == num_preemptions
    step(scheduler)
    assert rows_of(scheduler, "a", "b") == [0, ROWS]


def test_a_request_beyond_its_tenants_share_has_its_time_and_no_more_than_its_share_of_that() -> None:
    """Two tenants that each want every row: the rows change hands, and not with every step.

    Each waits for a slice and for the copies of its own rows, a step for each that is as long as the context.
    """
    scheduler = make_scheduler(kv_budget=KVBudget(num_bytes=2 * ROWS * CONTEXT))
    for tenant in "ab":
        scheduler.add(request(tenant, max_tokens=60, sampling=sampled(ROWS), tenant=tenant))
    owners = []
    for _ in range(80):
        if not scheduler.has_work:
            break
        scheduler.check_invariants()
        batch = scheduler.schedule(0.0)
        owners.append("".join(scheduler.running_ids))
        commit(scheduler, batch)
    assert set(owners) == {"a", "b"}
    stretches = [len(list(stretch)) for stretch in _stretches(owners)]
    assert min(stretches[:-1]) >= SLICE_STEPS, stretches
    longest = SLICE_STEPS + ROWS + 1
    assert max(stretches[1:-1]) <= longest, stretches
    first = owners[:64]
    assert abs(first.count("a") - first.count("b")) <= longest


def test_a_request_of_all_rows_pays_for_its_copies_with_its_tenants_time() -> None:
    """Its rows are saved and restored with every slice: the time of that is its own tenant's, as are its steps."""
    scheduler = make_scheduler(kv_budget=KVBudget(num_bytes=3 * ROWS * CONTEXT))
    prompt, num_steps = range(3, 3 + CONTEXT // 2), 400
    is_saved: list[bool] = []
    for number in range(num_steps):
        if not scheduler.num_waiting:
            scheduler.add(request(f"a{number}", prompt, max_tokens=CONTEXT, sampling=sampled(ROWS), tenant="attacker"))
        if not any(each.startswith("v") for each in (*scheduler.running_ids, *scheduler.waiting_ids)):
            scheduler.add(request(f"v{number}", [5], max_tokens=40, tenant="victim"))
        operations = step(scheduler).kv_operations
        # Rows with an answer: chunks that are kept for later requests end with the prompt.
        is_saved.append(any(isinstance(each, KVSave) and each.num_tokens > len(prompt) for each in operations))
    swaps = 100 * sum(is_saved) / num_steps
    # A slice, then the victim's steps: a slice's and one for each whole row, of which all have half at least.
    assert swaps <= 100 / (SLICE_STEPS + SLICE_STEPS + ROWS * len(prompt) / CONTEXT), swaps


def test_more_tenants_than_rows_all_have_their_time() -> None:
    scheduler = make_scheduler(dataclasses.replace(LIMITS, max_batch_size=2), KVBudget(num_bytes=6 * CONTEXT))
    names = "abcde"
    for name in names:
        scheduler.add(request(name, max_tokens=CONTEXT, tenant=name))
    seen: dict[str, int] = dict.fromkeys(names, 0)
    for _ in range(60):
        for event in commit(scheduler, scheduler.schedule(0.0)):
            seen[event.request_id] += 1
        scheduler.check_invariants()
    assert min(seen.values()) >= 60 * 2 / 5 * 0.6, seen


def num_look_ups(num_tenants: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """How often the ledger is asked what requests need or tenants have, while so many tenants wait behind full rows.

    Counted while none of them is due, and again when all are and rows change hands.
    """
    calls = 0

    def counted(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            nonlocal calls
            calls += 1
            return original(*args)

        return call

    scheduler = make_scheduler(kv_budget=KVBudget(num_bytes=10 * ROWS * CONTEXT))
    for index in range(ROWS + num_tenants):
        scheduler.add(request(f"{index}", max_tokens=CONTEXT - 1, tenant=f"{index}"))
    step(scheduler)
    assert (scheduler.num_running, scheduler.num_waiting) == (ROWS, num_tenants)
    # A request of one row needs (ROWS + num_tenants) / ROWS shares, and is due after so many steps.
    due = SLICE_STEPS * num_tenants // ROWS
    for number in range(due + 2 * SLICE_STEPS):
        with monkeypatch.context() as patch:
            if number < SLICE_STEPS or number >= due:
                for name in ("worst_case", "usage"):
                    patch.setattr(KVLedger, name, counted(getattr(KVLedger, name)))
            step(scheduler)
    assert scheduler.num_preemptions, "none was due"
    return calls


def test_planning_is_linear_in_the_tenants_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = num_look_ups(32, monkeypatch), num_look_ups(64, monkeypatch)
    # a + bk with a >= 0 at most doubles with k; a term in k * k makes four times as many of it.
    assert many <= 2 * few, (few, many)


def _stretches(values: Sequence[str]) -> Iterator[list[str]]:
    """Runs of equal values."""
    current: list[str] = []
    for value in values:
        if current and value != current[-1]:
            yield current
            current = []
        current.append(value)
    yield current


Load = Callable[[int], list[GenerationRequest]]
"""What a tenant adds before a step, by the step's number."""


def attack(**fields: Any) -> Load:
    """Four requests before every step, so that a queue builds up behind the rows."""

    def load(number: int) -> list[GenerationRequest]:
        return [
            request(f"attack{number}-{index}", **{"max_tokens": 50, **fields}, tenant="attacker") for index in range(4)
        ]

    return load


def fair_competitor(number: int) -> list[GenerationRequest]:
    """A tenant that always has as many requests as its share has rows, each with a prompt of a step."""
    return [] if number % 4 else [request(f"fair{number}", [3 + number % 20, *range(3, 10)], max_tokens=16, tenant="c")]


ATTACKS: Mapping[str, Load] = {
    "outputs": attack(sampling=sampled(ROWS)),
    "beams": attack(beam_search=BeamSearchParams(beam_size=ROWS)),
    "long prompts": attack(prompt=LONG, max_tokens=1),
    "long prompts with outputs": attack(prompt=LONG, max_tokens=10, sampling=sampled(ROWS)),
    "single tokens": attack(max_tokens=1),
    "long answers": attack(max_tokens=CONTEXT),
    "a flood": lambda number: [each for index in range(4) for each in ATTACKS["single tokens"](4 * number + index)],
    "everything": lambda number: ATTACKS[list(ATTACKS)[number % 5]](number),
}


@functools.cache
def longest_wait(load: Load, length: int) -> int:
    """Steps from a victim's request to its first token, at most: one request after another beside a load."""
    engine = fake_engine(limits=LIMITS, runner=FakeRunner(ROWS))
    found: list[int] = []
    asked: int | None = None
    pause = 10
    for number in range(1, 250):
        for each in load(number):
            # As many as a queue has places.
            if engine.num_waiting < 32:
                engine.add_request(each)
        pause -= 1
        if pause == 0:
            prompt = [3 + (number + index) % 29 for index in range(length)]
            engine.add_request(request(f"victim{number}", prompt, max_tokens=6, tenant="victim"))
            asked = number
        for event in engine.step().events:
            if not event.request_id.startswith("victim"):
                continue
            if event.token_id is not None and asked is not None:
                found.append(number - asked + 1)
                asked = None
            if event.is_terminal:
                pause = 1 + number % 4
    assert len(found) >= 10, f"the victim starves: {len(found)} of its requests came to a token in {number} steps"
    return max(found)


@pytest.mark.parametrize("length", [8, 20, 45])
@pytest.mark.parametrize("name", ATTACKS)
def test_no_attack_makes_a_first_token_wait_more_than_twice_as_long_as_a_fair_competitor(
    name: str, length: int
) -> None:
    fair, attacked = longest_wait(fair_competitor, length), longest_wait(ATTACKS[name], length)
    assert attacked <= 2 * fair, f"{attacked} steps, {fair} beside a fair competitor"


class TenantLife(Life):
    """The same life with several tenants of one priority: whatever they do, each has its share."""

    tenants: Mapping[str, float] = {"a": 1.0, "b": 1.0, "c": 2.0}
    num_priorities = 1

    def __init__(self) -> None:
        super().__init__()
        self.before: set[SequenceGroup] = set()
        self.num_computed: dict[SequenceGroup, int] = {}
        self.num_steps_due: Counter[SequenceGroup] = Counter()

    @property
    def ledger(self) -> KVLedger:
        return self.scheduler._ledger

    def observe(self) -> None:
        self.before = set(self.ledger.running)
        super().observe()

    def check_fed(self, busy: list[int], batch: ScheduledBatch) -> None:
        """Prompts take turns, in their rows: one that is not fed waits for those of others."""
        assert len(busy) == len(set(busy))
        left = [sequence for slot, sequence in enumerate(self.ledger.slots) if slot not in busy]
        assert all(sequence.group.is_in_prompt for sequence in left)
        assert not left or (self.scheduler._tenants.are_several and chunks_of(batch))
        preempted = [group for group in self.before if group in list(self.scheduler._tenants)]
        started = [group for group in self.ledger.running if group not in self.before]
        tenants = self.scheduler._tenants
        found = (tenants.head(tenant, is_short=tenants.is_short) for tenant in tenants.all)
        heads = [head for head in found if head is not None]
        self.check_preempted(preempted, started)
        self.check_waiting(heads, has_prompts=bool(batch.encodes or chunks_of(batch)))

    def check_preempted(self, preempted: list[SequenceGroup], started: list[SequenceGroup]) -> None:
        """A tenant that loses rows had more than its share, unless they go to one that was kept out."""
        takes_time = any(group.spared_until > self.num_steps for group in started)
        for tenant in {group.request.tenant for group in preempted}:
            own = [group for group in preempted if group.request.tenant == tenant]
            note(f"preempted for {'some time' if takes_time else 'a share'}")
            assert takes_time or any(self.shares(tenant, [group]) > 1 for group in own), "a share was taken"
        for group in preempted:
            assert group.spared_until <= self.num_steps, "rows were given for some time, and taken"
            assert group.num_computed_tokens > self.num_computed[group], "nothing was gained by starting it"
        self.num_computed |= {group: group.num_computed_tokens for group in started}

    def check_waiting(self, heads: list[SequenceGroup], *, has_prompts: bool) -> None:
        """A request within its share gets its rows soon, and none waits beside free room."""
        within = [head for head in heads if self.shares(head.request.tenant, [head]) <= 1]
        stuck = [head for head in within if not self.ledger.fits(head)]
        assert has_prompts or stuck or not any(map(self.ledger.fits, heads)), "work is left undone"
        in_prompt = {group.request.tenant for group in self.ledger.running if group.is_in_prompt}
        due = {head for head in stuck if head.request.tenant not in in_prompt and self.could_fit(head)}
        self.num_steps_due = Counter({head: self.num_steps_due[head] + 1 for head in due})
        assert max(self.num_steps_due.values(), default=0) <= len(self.tenants), "a tenant is kept from its share"
        out = [tenant.num_steps_out for tenant in self.scheduler._tenants._tenants.values()]
        assert max(out, default=0) <= 3 * CONTEXT, "a tenant starves"

    def could_fit(self, head: SequenceGroup) -> bool:
        """Whether what others have beyond their shares, and need not be spared, is enough for a request."""
        taken: list[SequenceGroup] = []
        for group in sorted(self.ledger.running, key=lambda each: each.rank, reverse=True):
            name = group.request.tenant
            left = [each for each in taken if each.request.tenant == name]
            is_free = name != head.request.tenant and group.spared_until <= self.num_steps
            if is_free and self.shares(name, [], left) > 1:
                taken.append(group)
        return bool(taken) and self.ledger.fits(head, taken)

    @property
    def num_steps(self) -> int:
        return self.scheduler._tenants._num_steps

    def shares(self, tenant: str, extra: Collection[SequenceGroup], less: Collection[SequenceGroup] = ()) -> float:
        """How many shares a tenant uses, with `extra` running and `less` saved: reckoned anew from all that live."""
        live = self.scheduler._live.values()
        rows = num_bytes = 0
        for group in live:
            if group.request.tenant == tenant:
                is_running = (group in self.ledger.running or group in extra) and group not in less
                num_rows = self.ledger._num_rows.get(group) or self.ledger.worst_case(group) // self.ledger._row_bytes(
                    group
                )
                rows += num_rows if is_running else 0
                saved = self.ledger._saved_bytes(group) if group.num_computed_tokens else 0
                num_bytes += num_rows * self.ledger._row_bytes(group) if is_running else saved
        weights = {group.request.tenant: group.request.weight for group in live}
        used = max(rows / LIFE_LIMITS.max_batch_size, num_bytes / self.ledger.limit)
        return used * sum(weights.values()) / weights[tenant] - 1e-6


class RowLife(TenantLife):
    """The same with memory enough, so that rows alone are short."""

    budget = dataclasses.replace(BUDGET, num_bytes=20 * BUDGET.num_bytes)


class EncoderDecoderTenantLife(TenantLife):
    """The same for the other family."""

    encoder_decoder = True


class PagedTenantLife(TenantLife):
    """The same over blocks."""

    budget = PAGED_BUDGET

    def make_runner(self) -> FakeRunner:
        return PagedFakeRunner(self.budget, LIFE_LIMITS.max_batch_size, before_run=self.on_batch)


class UrgentLife(Life):
    """Priorities and tenants together: exactly one end each, and the tokens that each would have alone."""

    tenants = TenantLife.tenants

    def check_fed(self, busy: list[int], batch: ScheduledBatch) -> None:
        assert len(busy) == len(set(busy))


TenantLife.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
for _life in (RowLife, EncoderDecoderTenantLife, PagedTenantLife, UrgentLife):
    _life.TestCase.settings = settings(max_examples=30, stateful_step_count=30)
TestTenantLife = TenantLife.TestCase
TestRowLife = RowLife.TestCase
TestEncoderDecoderTenantLife = EncoderDecoderTenantLife.TestCase
TestPagedTenantLife = PagedTenantLife.TestCase
TestUrgentLife = UrgentLife.TestCase
