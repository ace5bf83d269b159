"""Weighted fair sharing between tenants: rows, K/V memory and prompt tokens.

A tenant's *share* is its weight over the weights of all tenants with live requests; a tenant alone has a share of 1.
Its *usage* is its fraction of the rows or of the K/V memory, saved K/V included, whichever is larger: dominant resource
fairness (Ghodsi et al., 2011). Requests without a tenant's name share one tenant.

* **Work conserving.** A tenant may use what no other claims within its share. It is taken back by preemption.
* **Rows and memory.** A request that keeps its tenant within its share is *due*: other tenants' usage beyond their
  shares is preempted for it at once. A tenant within its share is not preempted for that.
* **Requests beyond a share.** If a tenant without rows has a next request that needs u times its share, that is due
  after (`SLICE_STEPS` + c) * (u - 1) steps without rows. It may then preempt any tenant, and keeps its own rows for
  `SLICE_STEPS`: so it has its share of the time, and tenants do not preempt each other with every step.
* **Copies.** c is what preemption copied for the tenant's last such requests, in steps. The tenant whose request
  exceeds its share pays: the victim's, or else the head's. Saving and restoring a row as long as the context counts as
  one step: its K/V are about a quarter of the weights' bytes, and are read and written twice.
* **Prompts.** The tenant with the fewest prompt tokens computed, over its weight, goes first (stride scheduling). An
  idle tenant falls behind by one step's tokens at most: unused shares are not saved up.

Fairness holds among requests of one priority; a higher priority of any tenant goes first. Runs on the engine thread;
reads no clock.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from service.engine.kv.ledger import KVLedger
from service.engine.queueing.waiting import WaitingQueue
from service.engine.sequence import SequenceGroup

SLICE_STEPS = 4
"""Steps for which a request beyond its tenant's share keeps its rows. More: fewer copies, and later first tokens."""
Turn = tuple[int, bool, float, int]
"""A request's turn, smaller is sooner: negated priority, whether it is beyond its tenant's share, the tenant's weighted
prompt tokens, the tenant's last turn."""

# Shares are sums of floats.
_TOLERANCE = 1e-9


@dataclass(slots=True, eq=False)
class Tenant:
    """One tenant's queue and account.

    `prompt_tokens` were computed for it, over its weight; `last_turn` is when. `num_steps_out` are the steps that it
    has waited without a row; `copy_steps` are the copies to pay for, in steps.
    """

    weight: float
    waiting: WaitingQueue = field(default_factory=WaitingQueue)
    num_live: int = 0
    prompt_tokens: float = 0.0
    last_turn: int = -1
    num_steps_out: int = 0
    copy_steps: float = 0.0


class Tenants:
    """All tenants with live requests, and those whose account still counts."""

    def __init__(self, ledger: KVLedger, max_prefill_tokens: int) -> None:
        self._ledger = ledger
        self._max_prefill_tokens = max_prefill_tokens
        self._tenants: dict[str, Tenant] = {}
        # Of those with live requests.
        self._num_live = 0
        self._total_weight = 0.0
        self._num_steps = 0
        self._num_turns = 0

    def __iter__(self) -> Iterator[SequenceGroup]:
        """All waiting requests, by tenant, each tenant's in the order of its queue."""
        for tenant in self._tenants.values():
            yield from tenant.waiting

    def __len__(self) -> int:
        return sum(len(tenant.waiting) for tenant in self._tenants.values())

    def of(self, group: SequenceGroup) -> Tenant:
        """The tenant of a live request."""
        return self._tenants[group.request.tenant]

    @property
    def are_several(self) -> bool:
        """Whether more than one tenant has live requests."""
        return self._num_live > 1

    def begin(self, group: SequenceGroup) -> None:
        """Adds and queues a new request."""
        request = group.request
        tenant = self._tenants.setdefault(request.tenant, Tenant(request.weight))
        tenant.weight = request.weight
        tenant.num_live += 1
        tenant.waiting.add(group)
        self._count()

    def end(self, group: SequenceGroup) -> None:
        """Removes an ended request, which waits no longer."""
        tenant = self.of(group)
        tenant.num_live -= 1
        if not tenant.num_live:
            tenant.num_steps_out = 0  # waiting is not saved up for later requests
            self._count()

    def discard(self, group: SequenceGroup) -> bool:
        """Takes a live request out of its queue; returns whether it waited."""
        return self.of(group).waiting.discard(group)

    def begin_step(self) -> None:
        """Drops what tenants left unused beyond a step's prompt tokens."""
        self._num_steps += 1
        if len(self._tenants) < 2:
            return
        lag = self._max_prefill_tokens / min(tenant.weight for tenant in self._tenants.values())
        least = max(tenant.prompt_tokens for tenant in self._tenants.values()) - lag
        for name, tenant in list(self._tenants.items()):
            if tenant.prompt_tokens <= least:
                tenant.prompt_tokens = least
                if not tenant.num_live:
                    del self._tenants[name]

    def end_step(self) -> None:
        """Counts the steps that tenants wait without a row."""
        if self.are_several:
            running = {group.request.tenant for group in self._ledger.running}
            for name, tenant in self._tenants.items():
                tenant.num_steps_out += name not in running and len(tenant.waiting) > 0

    def charge(self, group: SequenceGroup, num_tokens: int) -> None:
        """Charges a request's tenant for prompt tokens, or at least 1 for rows."""
        tenant = self.of(group)
        tenant.prompt_tokens += max(1, num_tokens) / tenant.weight
        tenant.last_turn = self._num_turns
        tenant.num_steps_out = 0
        self._num_turns += 1

    @property
    def all(self) -> Collection[Tenant]:
        """Every tenant, in the order of arrival."""
        return self._tenants.values()

    @property
    def is_short(self) -> bool:
        """Whether saved K/V leave too little memory for some tenant's first request."""
        firsts = (tenant.waiting.first for tenant in self._tenants.values())
        return not all(first is None or self._ledger.fits_beside_saved(first) for first in firsts)

    def head(self, tenant: Tenant, *, is_short: bool) -> SequenceGroup | None:
        """A tenant's next request.

        Where memory `is_short`, it is freed only when saved requests end, so these go first. The one saved last always
        fits beside the others, as it ran beside them with all its memory reserved.
        """
        return (self._first_saved(tenant) if is_short else None) or tenant.waiting.first

    def _first_saved(self, tenant: Tenant) -> SequenceGroup | None:
        saved = (group for group in tenant.waiting if group.handles)
        return next((group for group in saved if self._ledger.fits_beside_saved(group)), None)

    def is_beyond_share(self, head: SequenceGroup) -> bool:
        """Whether a waiting request would take its tenant beyond its share."""
        return self.are_several and self._need(head) > 1 + _TOLERANCE

    def is_due(self, head: SequenceGroup) -> bool:
        """Whether other tenants' requests may be preempted for a waiting one: see the module."""
        tenant, need = self.of(head), self._need(head)
        if need <= 1 + _TOLERANCE:
            return True
        return 0 < tenant.num_steps_out >= (SLICE_STEPS + tenant.copy_steps) * (need - 1)

    def turn(self, group: SequenceGroup) -> Turn:
        """A request's turn: the more urgent first, then those within their tenants' shares."""
        tenant = self.of(group)
        is_beyond = group not in self._ledger.running and self.is_beyond_share(group)
        return -group.request.priority, is_beyond, tenant.prompt_tokens, tenant.last_turn

    def spare(self, head: SequenceGroup) -> None:
        """Lets a request beyond its tenant's share keep preempted rows for `SLICE_STEPS`."""
        if self.is_beyond_share(head):
            head.spared_until = self._num_steps + SLICE_STEPS
            self.of(head).copy_steps = 0.0

    def charge_copy(self, victim: SequenceGroup, head: SequenceGroup) -> None:
        """Charges a preemption's copies to the tenant whose request is beyond its share.

        Between different priorities neither pays, as a higher priority goes before any share.
        """
        if victim.request.priority != head.request.priority:
            return
        is_beyond_itself = self._ledger.usage_of(victim).ratio > self._share(self.of(victim)) + _TOLERANCE
        if is_beyond_itself or self.is_beyond_share(head):
            payer = self.of(victim if is_beyond_itself else head)
            payer.copy_steps += self._ledger.num_whole_rows(victim)

    def preemptible(self, priority: int) -> list[SequenceGroup]:
        """Running requests of a priority that may be preempted for equals, by rank."""
        running = (group for group in self._ledger.running if group.request.priority == priority)
        return sorted((group for group in running if group.spared_until <= self._num_steps), key=lambda each: each.rank)

    def choose_victims(self, head: SequenceGroup, without: Collection[SequenceGroup]) -> Iterator[SequenceGroup]:
        """Yields running requests to preempt for `head`, which is due, besides those of `without`.

        The tenant furthest beyond its share goes first, with its least urgent and most recent request. Tenants within
        their shares lose nothing to one within its own.
        """
        usages = {name: self._ledger.usage(name) for name in self._tenants}
        for group in without:
            usages[group.request.tenant] = self._ledger.usage_without(usages[group.request.tenant], group)
        candidates: dict[str, list[SequenceGroup]] = {}
        for group in self.preemptible(head.request.priority):
            if self.of(group) is not self.of(head) and group not in without:
                candidates.setdefault(group.request.tenant, []).append(group)
        is_within_share = not self.is_beyond_share(head)
        while candidates:
            shares = {name: usages[name].ratio / self._share(self._tenants[name]) for name in candidates}
            name = max(candidates, key=shares.__getitem__)
            if is_within_share and shares[name] <= 1 + _TOLERANCE:
                return
            group = candidates[name].pop()
            if not candidates[name]:
                del candidates[name]
            usages[name] = self._ledger.usage_without(usages[name], group)
            yield group

    def _count(self) -> None:
        """Recounts tenants with live requests, and their weights."""
        weights = [tenant.weight for tenant in self._tenants.values() if tenant.num_live]
        self._num_live, self._total_weight = len(weights), math.fsum(weights)
        if not weights:
            self._tenants.clear()

    def _share(self, tenant: Tenant) -> float:
        return tenant.weight / self._total_weight

    def _need(self, head: SequenceGroup) -> float:
        """The tenant's usage if its next request ran, in shares."""
        return self._ledger.usage_with(head).ratio / self._share(self.of(head))
