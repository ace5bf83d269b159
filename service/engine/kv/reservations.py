"""KV-cache accounting: rows and bytes that requests hold, and which request fits. Plain ints.

    limit >= reserved by running requests (the worst case of each row)
           + saved of preempted requests (what they had computed)

A request is admitted only if its worst case fits, so that no running request ever runs out of memory. Preemption frees
rows; on a CPU it cannot free more memory than it saves.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from service.engine.chunks import ChunkRules
from service.engine.sequence import SequenceGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class KVBudget:
    """Bytes for all K/V, and the cost of a row in whole pages, as memory is allocated by the page.

    A decoder token takes `token_bytes`, a source token `source_token_bytes`; `page_tokens` and `source_page_tokens` of
    them share a page.
    """

    num_bytes: int
    token_bytes: int = 1
    source_token_bytes: int = 1
    page_tokens: int = 1
    source_page_tokens: int = 1

    def row_bytes(self, num_tokens: int, num_source_tokens: int) -> int:
        """Bytes of a row, or of a copy of one, with these lengths."""
        own = -(-num_tokens // self.page_tokens) * self.page_tokens * self.token_bytes
        source = -(-num_source_tokens // self.source_page_tokens) * self.source_page_tokens * self.source_token_bytes
        return own + source


@dataclass(frozen=True, slots=True)
class KVUsage:
    """Rows and bytes in use, and the most there are."""

    num_rows: int
    num_bytes: int
    max_rows: int
    max_bytes: int

    @property
    def ratio(self) -> float:
        """The larger of both shares."""
        return max(self.num_rows / self.max_rows, self.num_bytes / max(self.max_bytes, 1))

    def less(self, num_rows: int, num_bytes: int) -> KVUsage:
        """The usage after these are freed."""
        return replace(self, num_rows=self.num_rows - num_rows, num_bytes=self.num_bytes - num_bytes)


class KVReservations:
    """Rows and bytes by request and by tenant, out of `max_rows` and a budget."""

    def __init__(self, max_rows: int, budget: KVBudget, rules: ChunkRules) -> None:
        self._max_rows = max_rows
        self._budget = budget
        # Below the budget while other models hold the rest.
        self._limit = budget.num_bytes
        self._rules = rules
        self._num_rows: dict[SequenceGroup, int] = {}
        self._num_saved: dict[SequenceGroup, int] = {}
        self._num_reserved_rows = 0
        self._num_reserved_bytes = 0
        self._num_saved_bytes = 0
        # Rows and bytes, reserved and saved.
        self._by_tenant: dict[str, tuple[int, int]] = {}

    @property
    def running(self) -> Collection[SequenceGroup]:
        """The requests that hold rows."""
        return self._num_rows.keys()

    @property
    def usage_ratio(self) -> float:
        """Share of the budget that running and preempted requests take; the prefix cache counts as free."""
        return self._num_live_bytes / self._budget.num_bytes

    @property
    def limit(self) -> int:
        """Bytes that all K/V may take now."""
        return self._limit

    def num_needed_bytes(self, waiting: Iterable[SequenceGroup]) -> int:
        """The limit in which all running, preempted and waiting requests can end, one after another."""
        needs = (self.worst_case(group) - self._num_saved.get(group, 0) for group in waiting)
        most = max(needs, default=-self._num_saved_bytes)
        return min(self._budget.num_bytes, max(self._num_live_bytes, self._num_saved_bytes + most))

    def worst_case(self, group: SequenceGroup) -> int:
        """Bytes to reserve for all rows of a request."""
        return needed_rows(group) * self._row_bytes(group)

    def room(self, without: Collection[SequenceGroup] = ()) -> tuple[int, int]:
        """Rows and bytes that would be free if the running requests `without` were preempted."""
        num_rows = self._max_rows - self._num_reserved_rows + sum(self._num_rows[each] for each in without)
        num_bytes = sum(self._num_rows[each] * self._row_bytes(each) - self._saved_bytes(each) for each in without)
        return num_rows, self._limit - self._num_live_bytes + num_bytes

    def fits_in(self, group: SequenceGroup, num_rows: int, num_bytes: int) -> bool:
        """Whether a request could be admitted to this `room`."""
        return needed_rows(group) <= num_rows and self.worst_case(group) <= num_bytes + self._num_saved.get(group, 0)

    def fits(self, group: SequenceGroup, without: Collection[SequenceGroup] = ()) -> bool:
        """Whether a request could be admitted if the running requests `without` were preempted."""
        return self.fits_in(group, *self.room(without))

    def fits_beside_saved(self, group: SequenceGroup) -> bool:
        """Whether a request could be admitted if none ran: preempted ones may leave too little."""
        num_others = self._num_saved_bytes - self._num_saved.get(group, 0)
        return self.worst_case(group) <= self._limit - num_others

    def usage(self, tenant: str) -> KVUsage:
        """Usage of a tenant's running and preempted requests."""
        return KVUsage(*self._by_tenant.get(tenant, (0, 0)), self._max_rows, self._limit)

    def usage_with(self, group: SequenceGroup) -> KVUsage:
        """Usage of a waiting request's tenant if it were admitted."""
        num_bytes = self.worst_case(group) - self._num_saved.get(group, 0)
        return self.usage(group.request.tenant).less(-needed_rows(group), -num_bytes)

    def usage_of(self, group: SequenceGroup) -> KVUsage:
        """Usage of a running request."""
        num_rows = self._num_rows[group]
        return KVUsage(num_rows, num_rows * self._row_bytes(group), self._max_rows, self._limit)

    def usage_without(self, usage: KVUsage, group: SequenceGroup) -> KVUsage:
        """A usage that includes a running request, after its preemption."""
        num_rows = self._num_rows[group]
        return usage.less(num_rows, num_rows * self._row_bytes(group) - self._saved_bytes(group))

    def num_whole_rows(self, group: SequenceGroup) -> float:
        """Bytes that preempting a running request saves, in rows of the context's length."""
        whole = self._budget.row_bytes(self._rules.context, self._rules.source_context)
        return self._saved_bytes(group) / whole

    def check_invariants(self) -> None:
        """Asserts that totals and tenants match the requests."""
        if self._num_reserved_rows != sum(self._num_rows.values()) or self._num_reserved_rows > self._max_rows:
            raise AssertionError(f"{self._num_reserved_rows} rows reserved of {self._max_rows}")
        reserved = sum(num_rows * self._row_bytes(group) for group, num_rows in self._num_rows.items())
        if self._num_reserved_bytes != reserved:
            raise AssertionError(f"{self._num_reserved_bytes} bytes counted as reserved, {reserved} are")
        if self._num_saved_bytes != (saved := sum(self._num_saved.values())):
            raise AssertionError(f"{self._num_saved_bytes} bytes counted as saved, {saved} are")
        by_tenant: dict[str, tuple[int, int]] = {}
        for group in self._num_rows.keys() | self._num_saved.keys():
            rows, num_bytes = by_tenant.get(group.request.tenant, (0, 0))
            num_rows = self._num_rows.get(group, 0)
            num_bytes += num_rows * self._row_bytes(group) + self._num_saved.get(group, 0)
            by_tenant[group.request.tenant] = rows + num_rows, num_bytes
        if by_tenant != self._by_tenant:
            raise AssertionError(f"tenants hold {by_tenant}, counted as {self._by_tenant}")

    @property
    def _num_live_bytes(self) -> int:
        return self._num_reserved_bytes + self._num_saved_bytes

    def _row_bytes(self, group: SequenceGroup) -> int:
        source = self._rules.padded_source_length(len(group.source_token_ids))
        return self._budget.row_bytes(group.max_num_tokens, source)

    def _saved_bytes(self, group: SequenceGroup) -> int:
        """Bytes that preempting a request would save."""
        return len(group.rows) * self._budget.row_bytes(group.num_computed_tokens, len(group.source_token_ids))

    def _reserve(self, group: SequenceGroup, num_rows: int) -> None:
        """Sets the rows of a request."""
        change = num_rows - self._num_rows.get(group, 0)
        self._num_reserved_rows += change
        num_bytes = change * self._row_bytes(group)
        self._num_reserved_bytes += num_bytes
        self._count(group, change, num_bytes)
        if num_rows:
            self._num_rows[group] = num_rows
        else:
            del self._num_rows[group]

    def _save(self, group: SequenceGroup, num_bytes: int) -> None:
        """Sets the saved bytes of a request."""
        change = num_bytes - self._num_saved.pop(group, 0)
        self._num_saved_bytes += change
        self._count(group, 0, change)
        if num_bytes:
            self._num_saved[group] = num_bytes

    def _count(self, group: SequenceGroup, num_rows: int, num_bytes: int) -> None:
        tenant = group.request.tenant
        rows, held = self._by_tenant.get(tenant, (0, 0))
        self._by_tenant[tenant] = rows + num_rows, held + num_bytes
        if self._by_tenant[tenant] == (0, 0):
            del self._by_tenant[tenant]


def needed_rows(group: SequenceGroup) -> int:
    """Rows that a request may need from now on: all, while it has no outputs yet."""
    return group.request.num_rows if group.beams is not None else len(group.sequences) or group.request.num_rows
