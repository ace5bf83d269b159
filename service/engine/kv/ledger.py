"""Where K/V are, and whose: rows, one budget for all that lives and all that is kept, and what has to be copied for it.

    budget = reserved by requests that run (their longest possible end, for each of their rows)
           + kept of requests that were preempted (what they had computed)
           + kept for later requests: the prefix cache, which is evicted for the other two
           + left in rows that no request uses: freed when the rest wants it, as touching memory anew takes time

A request is admitted only if its worst case fits, so that none that runs is ever ended for want of memory. Preempting
cannot get more out of a CPU's memory than that: what is saved lies in the memory that was to be won. It takes places
from requests for more urgent ones, and is undone bit for bit.

Everything is decided here in plain ints and written down as operations, in an order in which they can be carried out
one by one. Knows no tensors and no queue.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace

from service.engine.batch import KVCopy, KVDrop, KVFree, KVOperation, KVRestore, KVRetain, KVSave
from service.engine.chunks import CachedChunk, ChunkRules, TokenIds
from service.engine.kv.prefix_cache import PrefixCache
from service.engine.kv.slots import SlotTable
from service.engine.sequence import Sequence, SequenceGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class KVBudget:
    """How many bytes all K/V may take, and what a row takes: whole pages, as memory is given by the page.

    A token of the decoder takes `token_bytes`, one of a source `source_token_bytes`; so many of each share a page.
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
    """Rows and bytes in use, of so many."""

    num_rows: int
    num_bytes: int
    max_rows: int
    max_bytes: int

    @property
    def ratio(self) -> float:
        """The larger one of both shares."""
        return max(self.num_rows / self.max_rows, self.num_bytes / max(self.max_bytes, 1))

    def less(self, num_rows: int, num_bytes: int) -> KVUsage:
        """Without so many."""
        return replace(self, num_rows=self.num_rows - num_rows, num_bytes=self.num_bytes - num_bytes)


class KVLedger:
    """Rows, reservations and kept copies.

    Args:
        num_slots: rows that there are.
        budget: bytes that there may be.
        pieces: how prompts are cut, and so how they are kept.
    """

    def __init__(self, num_slots: int, budget: KVBudget, pieces: ChunkRules) -> None:
        self._slots: SlotTable[Sequence] = SlotTable(num_slots)
        self._budget = budget
        # What there is of it now: others may hold the rest.
        self._limit = budget.num_bytes
        self._pieces = pieces
        self._cache = PrefixCache()
        self._num_rows: dict[SequenceGroup, int] = {}
        self._num_saved: dict[SequenceGroup, int] = {}
        self._num_reserved_rows = 0
        self._num_reserved_bytes = 0
        self._num_saved_bytes = 0
        # Rows and bytes by tenant, reserved and saved ones.
        self._held: dict[str, tuple[int, int]] = {}
        self._handles = itertools.count(1)
        # What a former scheduler kept is dropped.
        self._operations: list[KVOperation] = [KVRetain(frozenset())]
        # Tokens and source tokens written to a row since it was last freed, by its owners up to the last one.
        self._touched = [(0, 0)] * num_slots
        self._in_flight: tuple[KVOperation, ...] = ()

    @property
    def slots(self) -> SlotTable[Sequence]:
        """Which row is whose; changed here alone."""
        return self._slots

    @property
    def running(self) -> Collection[SequenceGroup]:
        """The requests that hold rows."""
        return self._num_rows.keys()

    @property
    def usage_ratio(self) -> float:
        """Share of the budget that running and preempted requests take; the prefix cache can be evicted: it is free."""
        return self._num_live_bytes / self._budget.num_bytes

    @property
    def limit(self) -> int:
        """Bytes that all K/V may take now: the budget, or less while others hold the rest of it."""
        return self._limit

    def set_limit(self, num_bytes: int) -> None:
        """Keeps all K/V within so many bytes of the budget from now on: unused memory is freed.

        Raises:
            ValueError: when running and preempted requests hold more.
        """
        if num_bytes < self._num_live_bytes:
            raise ValueError(f"requests hold {self._num_live_bytes} bytes, the limit cannot be {num_bytes}")
        self._limit = min(num_bytes, self._budget.num_bytes)
        self._make_room(0)

    def num_needed_bytes(self, waiting: Iterable[SequenceGroup]) -> int:
        """What the limit must be for all requests to end: those that run, were preempted, or wait.

        Within it, every waiting request fits an empty engine at the latest: beside all that is saved, as far as it
        would within the budget.
        """
        needs = (self.worst_case(group) - self._num_saved.get(group, 0) for group in waiting)
        most = max(needs, default=-self._num_saved_bytes)
        return min(self._budget.num_bytes, max(self._num_live_bytes, self._num_saved_bytes + most))

    @property
    def num_kept_bytes(self) -> int:
        """Bytes that the prefix cache holds."""
        return self._cache.num_bytes

    def worst_case(self, group: SequenceGroup) -> int:
        """Bytes to be reserved for all rows of a request."""
        return _num_rows(group) * self._row_bytes(group)

    def room(self, without: Collection[SequenceGroup] = ()) -> tuple[int, int]:
        """Rows and bytes that would be free, were those of `without` preempted."""
        num_rows = self._slots.capacity - self._num_reserved_rows + sum(self._num_rows[each] for each in without)
        num_bytes = sum(self._num_rows[each] * self._row_bytes(each) - self._saved_bytes(each) for each in without)
        return num_rows, self._limit - self._num_live_bytes + num_bytes

    def fits_in(self, group: SequenceGroup, num_rows: int, num_bytes: int) -> bool:
        """Whether a request could be admitted, were so much `room` free."""
        return _num_rows(group) <= num_rows and self.worst_case(group) <= num_bytes + self._num_saved.get(group, 0)

    def fits(self, group: SequenceGroup, without: Collection[SequenceGroup] = ()) -> bool:
        """Whether a request could be admitted, were those of `without` preempted first."""
        return self.fits_in(group, *self.room(without))

    def fits_beside_saved(self, group: SequenceGroup) -> bool:
        """Whether a request could be admitted if none ran: what is saved of others may leave too little."""
        num_others = self._num_saved_bytes - self._num_saved.get(group, 0)
        return self.worst_case(group) <= self._limit - num_others

    def usage(self, tenant: str) -> KVUsage:
        """What a tenant's running and preempted requests have."""
        return KVUsage(*self._held.get(tenant, (0, 0)), self._slots.capacity, self._limit)

    def usage_with(self, group: SequenceGroup) -> KVUsage:
        """What the tenant of a request that waits would have, were that admitted."""
        num_bytes = self.worst_case(group) - self._num_saved.get(group, 0)
        return self.usage(group.request.tenant).less(-_num_rows(group), -num_bytes)

    def usage_of(self, group: SequenceGroup) -> KVUsage:
        """What a running request has."""
        num_rows = self._num_rows[group]
        return KVUsage(num_rows, num_rows * self._row_bytes(group), self._slots.capacity, self._limit)

    def num_whole_rows(self, group: SequenceGroup) -> float:
        """Bytes that preempting a running request saves, in rows as long as the context."""
        whole = self._budget.row_bytes(self._pieces.context, self._pieces.source_context)
        return self._saved_bytes(group) / whole

    def usage_without(self, usage: KVUsage, group: SequenceGroup) -> KVUsage:
        """What is left of a usage that a running request is part of, were that preempted."""
        num_rows = self._num_rows[group]
        return usage.less(num_rows, num_rows * self._row_bytes(group) - self._saved_bytes(group))

    def num_tokens_at_hand(self, group: SequenceGroup) -> int:
        """Tokens of a waiting request's prompt, or of its source, that it need not compute if it is admitted now."""
        return sum(len(piece.token_ids) for piece in self._at_hand(group))

    def admit(self, group: SequenceGroup) -> list[int]:
        """Gives a request that fits its rows, with all of its K/V that are cached; the slots, by row."""
        at_hand = self._at_hand(group)
        if at_hand:
            self._cache.use(at_hand[-1])
        self._save(group, 0)
        self._reserve(group, _num_rows(group))
        slots = [self._append(sequence) for sequence in group.rows]
        self._make_room(0)
        if group.handles:
            for handle, slot in zip(group.handles, slots, strict=True):
                self._operations += [KVRestore(handle, slot), KVDrop(handle)]
            group.handles = ()
            return slots
        leader = group.rows[0]
        for piece in at_hand:
            self._operations.append(KVRestore(piece.handle, slots[0]))
            group.num_cached_tokens += len(piece.token_ids)
            if group.source_token_ids:
                group.has_source = True
            else:
                leader.num_computed_tokens += len(piece.token_ids)
                group.kept = piece
        return slots

    def fork(self, leader: Sequence, heirs: Collection[Sequence]) -> None:
        """Gives each of the heirs a row with the leader's K/V; the leader's own row to the first, if it is not one."""
        source = self._slots.slot_of(leader)
        others = deque(heir for heir in heirs if heir is not leader)
        for heir in others:
            heir.num_computed_tokens = leader.num_computed_tokens
        if others and leader not in heirs:
            self._slots.replace(source, others.popleft())
        for heir in others:
            self._copy(source, self._append(heir), heir)

    def rearrange(self, births: Iterable[tuple[Sequence, Sequence]], dead: Iterable[Sequence]) -> None:
        """Gives each child its parent's K/V, in the row of one of the dead where there is one.

        Children have not been extended yet, and parents live on.
        """
        left = list(dead)
        for child, parent in births:
            source = self._slots.slot_of(parent)
            if not left:
                self._copy(source, self._append(child), child)
                continue
            # What both begin with has the same K/V, wherever it was computed; and so has their source.
            last = left.pop()
            target, start = self._slots.slot_of(last), last.num_tokens_shared_with(parent)
            self._slots.replace(target, child)
            if start < parent.num_computed_tokens:
                self._operations.append(KVCopy(source, target, parent.num_computed_tokens, 0, start))

    def release(self, groups: Collection[SequenceGroup]) -> None:
        """Frees the rows of requests whose sequences have left them; none that stays moves twice.

        A request with no `sequences` is over, and one with fewer than before needs no more than these.
        """
        self._free(
            slot
            for slot, sequence in enumerate(self._slots)
            if sequence.group in groups and sequence not in sequence.group.rows
        )
        for group in groups:
            if group in self._num_rows:
                self._reserve(group, _num_rows(group) if group.sequences else 0)
        # Rows that moved leave more behind, perhaps, than those that ended had reserved.
        self._make_room(0)

    def preempt(self, group: SequenceGroup) -> None:
        """Saves the rows of a running request and takes them away."""
        row_bytes = self._budget.row_bytes(group.num_computed_tokens, len(group.source_token_ids))
        handles: dict[Sequence, int] = {}
        # Row by row, so that no more than one lies in memory twice.
        freed = self._noted(self._slots.slot_of(sequence) for sequence in group.rows)
        while freed:
            slot = self._next_freed(freed)
            sequence = self._slots[slot]
            handles[sequence] = handle = next(self._handles)
            self._operations.append(KVSave(slot, handle, sequence.num_computed_tokens, len(group.source_token_ids)))
            self._remove(slot)
            self._save(group, self._num_saved.get(group, 0) + row_bytes)
            self._reserve(group, len(freed))
            self._make_room(0)
        group.handles = tuple(handles[sequence] for sequence in group.rows)

    def forget(self, group: SequenceGroup) -> None:
        """Drops what is saved of a request that will not come back."""
        self._operations += map(KVDrop, group.handles)
        group.handles = ()
        self._save(group, 0)

    def keep_chunk(self, slot: int, start: int, num_tokens: int) -> None:
        """Keeps a chunk that a prefill has just computed, if it is a whole one, all before it is kept, and it fits."""
        sequence = self._slots[slot]
        group = sequence.group
        if num_tokens < self._pieces.chunk or (start > 0 and (group.kept is None or group.kept not in self._cache)):
            return
        token_ids = tuple(sequence.token_ids[start : start + num_tokens])
        parent = group.kept if start else None
        if (piece := self._keep(token_ids, parent, self._budget.row_bytes(num_tokens, 0))) is not None:
            self._operations.append(KVSave(slot, piece.handle, start + num_tokens, 0, start))
        group.kept = self._cache.get(parent, token_ids)

    def keep_source(self, slot: int) -> None:
        """Keeps a source that has just been encoded, if it fits."""
        token_ids = self._slots[slot].group.source_token_ids
        if (piece := self._keep(token_ids, None, self._budget.row_bytes(0, len(token_ids)))) is not None:
            self._operations.append(KVSave(slot, piece.handle, 0, len(token_ids)))

    def note_written(self, slot: int, num_tokens: int) -> None:
        """Takes note of how far a row was written, where that is further than what it has computed."""
        num_before, num_source_tokens = self._touched[slot]
        self._touched[slot] = max(num_before, num_tokens), num_source_tokens

    def take_operations(self) -> tuple[KVOperation, ...]:
        """What is to be carried out before the next run, in this order."""
        self._in_flight, self._operations = tuple(self._operations), []
        return self._in_flight

    def fail(self) -> list[SequenceGroup]:
        """A run failed, so that no row is to be trusted: empties all rows and the cache; whose K/V are lost.

        Lost, too, is who was to be saved in that run. What others saved before is sound.
        """
        unsaved = {operation.handle for operation in self._in_flight if isinstance(operation, KVSave)}
        lost = [*self._num_rows, *(group for group in self._num_saved if unsaved.intersection(group.handles))]
        for group in lost:
            self._save(group, 0)
            if group in self._num_rows:
                self._reserve(group, 0)
            group.handles = ()
        num_slots = self._slots.capacity
        self._slots = SlotTable(num_slots)
        self._cache = PrefixCache()
        self._touched = [(0, 0)] * num_slots
        kept = frozenset(handle for group in self._num_saved for handle in group.handles)
        self._operations = [KVRetain(kept), *map(KVFree, range(num_slots))]
        self._in_flight = ()
        return lost

    def check_invariants(self) -> None:
        """Asserts that nothing is owned twice, lost or beyond the budget.

        Raises:
            AssertionError: saying what broke.
        """
        self._slots.check_invariants()
        self._cache.check_invariants()
        owners = {sequence for group in self._num_rows for sequence in group.rows}
        if owners != set(self._slots):
            raise AssertionError("rows are held by other sequences than those of running requests")
        if any(len(group.rows) > num_rows for group, num_rows in self._num_rows.items()):
            raise AssertionError("a request holds more rows than it reserved")
        if self._num_reserved_rows != sum(self._num_rows.values()) or self._num_reserved_rows > self._slots.capacity:
            raise AssertionError(f"{self._num_reserved_rows} rows reserved of {self._slots.capacity}")
        reserved = sum(num_rows * self._row_bytes(group) for group, num_rows in self._num_rows.items())
        if self._num_reserved_bytes != reserved:
            raise AssertionError(f"{self._num_reserved_bytes} bytes counted as reserved, {reserved} are")
        if self._num_saved_bytes != (saved := sum(self._num_saved.values())):
            raise AssertionError(f"{self._num_saved_bytes} bytes counted as saved, {saved} are")
        held: dict[str, tuple[int, int]] = {}
        for group in self._num_rows.keys() | self._num_saved.keys():
            rows, num_bytes = held.get(group.request.tenant, (0, 0))
            num_rows = self._num_rows.get(group, 0)
            num_bytes += num_rows * self._row_bytes(group) + self._num_saved.get(group, 0)
            held[group.request.tenant] = rows + num_rows, num_bytes
        if held != self._held:
            raise AssertionError(f"tenants hold {held}, counted as {self._held}")
        if self._num_live_bytes + self._num_spare_bytes > self._limit:
            raise AssertionError(f"beyond the limit of {self._limit} bytes")
        if any(bool(group.handles) != (group in self._num_saved) for group in (*self._num_rows, *self._num_saved)):
            raise AssertionError("a request runs and is saved, or neither")

    @property
    def _num_live_bytes(self) -> int:
        return self._num_reserved_bytes + self._num_saved_bytes

    def _row_bytes(self, group: SequenceGroup) -> int:
        source = self._pieces.padded_source_length(len(group.source_token_ids))
        return self._budget.row_bytes(group.max_num_tokens, source)

    def _saved_bytes(self, group: SequenceGroup) -> int:
        return len(group.rows) * self._budget.row_bytes(group.num_computed_tokens, len(group.source_token_ids))

    @property
    def _num_spare_bytes(self) -> int:
        """What can be freed at once: the prefix cache, and what is left in rows that no request uses."""
        unused = self._touched[len(self._slots) :]
        return self._cache.num_bytes + sum(self._budget.row_bytes(*touched) for touched in unused if any(touched))

    def _append(self, sequence: Sequence) -> int:
        slot = self._slots.append(sequence)
        self._trim(slot)
        return slot

    def _free(self, slots: Iterable[int]) -> None:
        freed = self._noted(slots)
        while freed:
            self._remove(self._next_freed(freed))

    def _noted(self, slots: Iterable[int]) -> deque[int]:
        """The slots in their order, each with a note of what it holds."""
        freed = deque(sorted(slots))
        for slot in freed:
            self._note_touched(slot)
        return freed

    def _next_freed(self, freed: deque[int]) -> int:
        """Takes out which is to be freed next, so that no row is moved to a place that is freed later."""
        return freed.pop() if freed[-1] == len(self._slots) - 1 else freed.popleft()

    def _remove(self, slot: int) -> None:
        """Frees a row and moves the last one to its place."""
        self._note_touched(len(self._slots) - 1)
        if move := self._slots.remove(slot):
            self._trim(move.target)
            self._copy(move.source, move.target, self._slots[move.target])

    def _note_touched(self, slot: int) -> None:
        """Takes note of what a row's owner has written: also where a padding row wrote, behind its last token."""
        sequence = self._slots[slot]
        source = self._pieces.padded_source_length(len(sequence.group.source_token_ids))
        written = min(sequence.num_computed_tokens + 1, sequence.group.max_num_tokens)
        num_tokens, num_source_tokens = self._touched[slot]
        self._touched[slot] = max(num_tokens, written), max(num_source_tokens, source)

    def _trim(self, slot: int) -> None:
        """Frees what a row has beyond its new owner's reach, if both could come to more than that has reserved."""
        group = self._slots[slot].group
        source = self._pieces.padded_source_length(len(group.source_token_ids))
        num_tokens, num_source_tokens = self._touched[slot]
        most = self._budget.row_bytes(max(num_tokens, group.max_num_tokens), max(num_source_tokens, source))
        if most > self._row_bytes(group):
            self._empty(slot, min(num_tokens, group.max_num_tokens), min(num_source_tokens, source))

    def _empty(self, slot: int, num_tokens: int = 0, num_source_tokens: int = 0) -> None:
        """Frees a row but the memory under so many of its first tokens, which would take time to touch anew."""
        self._operations.append(KVFree(slot, num_tokens, num_source_tokens))
        self._touched[slot] = num_tokens, num_source_tokens

    def _reserve(self, group: SequenceGroup, num_rows: int) -> None:
        change = num_rows - self._num_rows.get(group, 0)
        self._num_reserved_rows += change
        num_bytes = change * self._row_bytes(group)
        self._num_reserved_bytes += num_bytes
        self._hold(group, change, num_bytes)
        if num_rows:
            self._num_rows[group] = num_rows
        else:
            del self._num_rows[group]

    def _save(self, group: SequenceGroup, num_bytes: int) -> None:
        """Takes note of how much is saved of a request."""
        change = num_bytes - self._num_saved.pop(group, 0)
        self._num_saved_bytes += change
        self._hold(group, 0, change)
        if num_bytes:
            self._num_saved[group] = num_bytes

    def _hold(self, group: SequenceGroup, num_rows: int, num_bytes: int) -> None:
        tenant = group.request.tenant
        rows, held = self._held.get(tenant, (0, 0))
        self._held[tenant] = rows + num_rows, held + num_bytes
        if self._held[tenant] == (0, 0):
            del self._held[tenant]

    def _make_room(self, num_bytes: int) -> bool:
        """Frees unused rows, then drops kept pieces, until `num_bytes` more fit; does nothing if they cannot."""
        room = self._limit - self._num_live_bytes - num_bytes
        if room < 0:
            return False
        for slot in range(len(self._slots), self._slots.capacity):
            if self._num_spare_bytes <= room:
                return True
            if any(self._touched[slot]):
                self._empty(slot)
        while self._cache.num_bytes > room:
            self._operations.append(KVDrop(self._cache.take_oldest().handle))
        return True

    def _keep(self, token_ids: TokenIds, parent: CachedChunk | None, num_bytes: int) -> CachedChunk | None:
        """A new piece to be filled, unless it is kept already or has no room."""
        if (found := self._cache.get(parent, token_ids)) is not None:
            self._cache.use(found)
            return None
        if parent is not None:
            self._cache.use(parent)
        if not self._make_room(num_bytes) or (parent is not None and parent not in self._cache):
            return None
        piece = CachedChunk(next(self._handles), token_ids, num_bytes, parent)
        self._cache.add(piece)
        return piece

    def _at_hand(self, group: SequenceGroup) -> list[CachedChunk]:
        """What is kept of a waiting request and will not have to make room for its reservation: the last to do so."""
        if group.handles:
            return []
        found = self._cache.find(self._pieces_of(group))
        room = self._limit - self._num_live_bytes - self.worst_case(group)
        totals = itertools.accumulate(piece.num_bytes for piece in found)
        return [piece for piece, total in zip(found, totals, strict=True) if total <= room]

    def _pieces_of(self, group: SequenceGroup) -> Iterator[TokenIds]:
        """What may be found of a request: its source, or the chunks of its prompt whose logits are not wanted."""
        if group.source_token_ids:
            yield group.source_token_ids
            return
        prompt, scoring = group.prompt_token_ids, group.request.scoring
        # The last token of a prompt that is only scored is never fed.
        end = len(prompt) - (1 if group.generates else 2)
        if scoring is not None:
            end = min(end, scoring.start - 1)
        chunk = self._pieces.chunk
        for start in range(0, end - chunk + 1, chunk):
            yield prompt[start : start + chunk]

    def _copy(self, source: int, target: int, owner: Sequence) -> None:
        copy = KVCopy(source, target, owner.num_computed_tokens, len(owner.group.source_token_ids))
        self._operations.append(copy)


def _num_rows(group: SequenceGroup) -> int:
    """Rows that a request may come to hold from now on: all, while it has no outputs yet."""
    return group.request.num_rows if group.beams is not None else len(group.sequences) or group.request.num_rows
