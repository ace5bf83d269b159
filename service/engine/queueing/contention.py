"""Order of requests within a step, and the choice of requests to preempt.

Decides, and changes no request. A tenant is looked up once a step, and again after a turn of its own, as turns do not
change other tenants' accounts: planning is linear in the number of tenants.
"""

from __future__ import annotations

import heapq
import itertools
import sys
from collections.abc import Collection, Iterable, Iterator

from service.engine.kv.ledger import KVLedger
from service.engine.plan import StepPlan
from service.engine.queueing.tenants import Tenant, Tenants, Turn
from service.engine.sequence import SequenceGroup


class StepOrder:
    """The order of work in one step: running prompts, and waiting requests to admit. A tenant's prompts come first.

    `prompts` are running requests whose prompts' next chunks are not in the step yet, by slot. `claimant` is the
    request that others were preempted for; it comes first.
    """

    def __init__(
        self,
        tenants: Tenants,
        ledger: KVLedger,
        prompts: Iterable[SequenceGroup],
        claimant: SequenceGroup | None = None,
    ) -> None:
        self._tenants = tenants
        self._ledger = ledger
        self._claimant = claimant
        self._places = {tenant: place for place, tenant in enumerate(tenants.all)}
        self._prompts: dict[Tenant, list[tuple[int, SequenceGroup]]] = {}
        for index, group in enumerate(prompts):
            self._prompts.setdefault(tenants.of(group), []).append((index, group))
        for own in self._prompts.values():
            # The next one last, where it is popped: the most urgent, and of equals that in the lowest slot.
            own.sort(key=lambda each: (each[1].request.priority, -each[0]))
        # Once a request waits for rows or memory, no request of this turn or a later one is admitted, except saved ones
        # where they leave too little memory.
        self._barrier, self._admits_saved = (sys.maxsize, False), False
        self._blocked: set[Tenant] = set()
        # The request whose turn it is, and whether its K/V were saved.
        self._current: tuple[SequenceGroup, bool] | None = None
        self._look_up_all()

    @property
    def heads(self) -> list[SequenceGroup]:
        """The next waiting request of each tenant, in the order of turns."""
        return [head for *_, head in sorted(self._heads.values(), key=lambda each: each[:2])]

    @property
    def prompts(self) -> Iterator[SequenceGroup]:
        """The prompts that had no turn yet."""
        return (group for own in self._prompts.values() for _, group in own)

    def take(self) -> SequenceGroup | None:
        """The next request, or None. What the last one received must be charged by now."""
        if self._current is not None:
            self._refresh(*self._current)
        group, self._claimant = self._claimant or self._pop(), None
        self._current = None if group is None else (group, bool(group.handles))
        return group

    def block(self, head: SequenceGroup) -> None:
        """Makes a request that does not fit wait, with its tenant's others and all later turns."""
        urgency, is_beyond, *_ = self._tenants.turn(head)
        self._blocked.add(self._tenants.of(head))
        self._barrier = min(self._barrier, (urgency + is_beyond, not is_beyond))
        self._admits_saved = self._admits_saved or not self._ledger.fits_beside_saved(head)

    def _pop(self) -> SequenceGroup | None:
        while self._queue:
            turn, is_head, _, group = heapq.heappop(self._queue)
            tenant = self._tenants.of(group)
            if not is_head:
                self._prompts[tenant].pop()
                return group
            if turn[:2] < self._barrier or (self._admits_saved and group.handles):
                return group
            self._blocked.add(tenant)
            self._look_up(tenant)
        return None

    def _refresh(self, group: SequenceGroup, was_saved: bool) -> None:  # noqa: FBT001
        """Looks up the tenant that had a turn; all tenants if that may change which saved requests go first."""
        tenant = self._tenants.of(group)
        if self._is_short:
            is_changed = was_saved and not group.handles
        else:
            first = tenant.waiting.first
            is_changed = first is not None and not self._ledger.fits_beside_saved(first)
        if is_changed:
            self._look_up_all()
        else:
            self._look_up(tenant)

    def _look_up_all(self) -> None:
        self._is_short = self._tenants.is_short
        self._heads: dict[Tenant, tuple[Turn, int, SequenceGroup]] = {}
        self._queue: list[tuple[Turn, bool, int, SequenceGroup]] = []
        for tenant in self._places:
            # The claimant's tenant is looked up after the claimant's turn.
            if self._claimant is None or tenant is not self._tenants.of(self._claimant):
                self._look_up(tenant)

    def _look_up(self, tenant: Tenant) -> None:
        """Finds the tenant's next request, and queues that or a prompt that goes before it."""
        self._heads.pop(tenant, None)
        found = []
        if own := self._prompts.get(tenant):
            found.append((self._tenants.turn(own[-1][1]), False, *own[-1]))
        head = None if tenant in self._blocked else self._tenants.head(tenant, is_short=self._is_short)
        if head is not None:
            turn, place = self._tenants.turn(head), self._places[tenant]
            self._heads[tenant] = turn, place, head
            found.append((turn, True, place, head))
        if found:
            heapq.heappush(self._queue, min(found, key=lambda each: each[:3]))


class Preemption:
    """Finds the first waiting request that can start if others are preempted, and these others.

    Victims are less urgent, or equals of other tenants where the request is due. A lower priority preempts only while
    all more urgent waiting requests wait for their tenants' shares.
    `plan` is the step so far, without waiting requests.
    """

    def __init__(self, tenants: Tenants, ledger: KVLedger, order: StepOrder, plan: StepPlan) -> None:
        self._tenants = tenants
        self._ledger = ledger
        self._plan = plan
        self._heads = order.heads
        self._prompts = list(order.prompts)
        self._lesser: list[SequenceGroup] = []

    def find(self) -> tuple[SequenceGroup, list[SequenceGroup]] | None:
        """The request and its victims; None if preemption helps none."""
        for priority, heads in itertools.groupby(self._heads, key=lambda head: head.request.priority):
            urgent = list(heads)
            if (found := self._find(priority, urgent)) is not None:
                return found
            # What is free now, or will be freed, is reserved for them.
            if any(self._ledger.fits(head) or self._tenants.is_due(head) for head in urgent):
                return None
        return None

    def _find(self, priority: int, heads: Iterable[SequenceGroup]) -> tuple[SequenceGroup, list[SequenceGroup]] | None:
        """The same among waiting requests of one priority."""
        # A tenant's own prompts go before its waiting requests.
        busy = {group.request.tenant for group in self._prompts if group.request.priority >= priority}
        claimants = [head for head in heads if head.request.tenant not in busy]
        if not claimants:
            return None
        self._lesser = [group for group in self._ledger.running if group.request.priority < priority]
        self._lesser.sort(key=lambda group: group.rank, reverse=True)
        room = self._ledger.room([*self._lesser, *self._tenants.preemptible(priority)])
        for head in claimants:
            if self._tenants.are_several and self._ledger.fits(head):
                continue
            # Most do not fit even so: found without looking at every running request.
            if self._ledger.fits_in(head, *room) and (victims := self._victims(head)):
                return head, victims
            if not self._tenants.is_beyond_share(head):
                break
        return None

    def _victims(self, head: SequenceGroup) -> list[SequenceGroup]:
        """Requests to preempt for one that can start then and only then; else none."""
        victims: list[SequenceGroup] = []
        if not self._plan.can_start(head, self._ledger.num_cached_tokens(head)):
            # At most one less urgent request in its prompt has the prefill budget.
            victims = [group for group in self._lesser if group.is_in_prompt]
            if not victims:
                return []
        for group in self._lesser:
            if self._ledger.fits(head, victims):
                break
            if group not in victims:
                victims.append(group)
        if self._tenants.are_several and not self._ledger.fits(head, victims) and self._tenants.is_due(head):
            victims += self._equals(head, victims)
        return victims if self._ledger.fits(head, victims) else []

    def _equals(self, head: SequenceGroup, victims: Collection[SequenceGroup]) -> list[SequenceGroup]:
        """A minimal set of other tenants' requests to preempt besides `victims`, so that one that is due fits."""
        found: list[SequenceGroup] = []
        for group in self._tenants.choose_victims(head, victims):
            found.append(group)
            if self._ledger.fits(head, [*victims, *found]):
                break
        for group in tuple(found):
            others = [each for each in found if each is not group]
            if self._ledger.fits(head, [*victims, *others]):
                found = others
        return found
