"""The KV ledger: which row belongs to which sequence, what is cached, and the operations that move K/V.

    budget >= reserved by running requests + saved of preempted ones (`service.engine.kv.reservations`)
            + the prefix cache, evicted for these two
            + memory left in unused rows, freed when the rest needs it, as touching new memory takes time

Decides in plain ints and emits operations (`service.engine.batch`) in an order in which they can be carried out one by
one. Copies to the prefix cache can wait: one a step or while the engine is idle, but before their row is written anew
and before any other operation. Knows no tensors and no queue.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Collection, Iterable, Iterator

from service.engine.batch import KVCopy, KVDrop, KVFree, KVOperation, KVRestore, KVRetain, KVSave
from service.engine.chunks import CachedChunk, ChunkRules, TokenIds
from service.engine.kv.prefix_cache import PrefixCache
from service.engine.kv.reservations import KVBudget, KVReservations, needed_rows
from service.engine.kv.slots import SlotTable
from service.engine.sequence import Sequence, SequenceGroup

# Copies to the prefix cache that wait, at most.
_MAX_LATE_SAVES = 8


class KVLedger(KVReservations):
    """Rows, the prefix cache and saved copies."""

    def __init__(self, num_slots: int, budget: KVBudget, rules: ChunkRules) -> None:
        super().__init__(num_slots, budget, rules)
        self._slots: SlotTable[Sequence] = SlotTable(num_slots)
        self._cache = PrefixCache()
        self._handles = itertools.count(1)
        # Copies of an earlier scheduler are dropped.
        self._operations: list[KVOperation] = [KVRetain(frozenset())]
        # Of these the first ones, which the next run needs.
        self._num_urgent = 1
        # Tokens and source tokens written to each row since it was last freed, without its present owner's.
        self._touched = [(0, 0)] * num_slots
        self._in_flight: tuple[KVOperation, ...] = ()

    @property
    def slots(self) -> SlotTable[Sequence]:
        """The owner of each row; read only."""
        return self._slots

    @property
    def num_cached_bytes(self) -> int:
        """Bytes of the prefix cache."""
        return self._cache.num_bytes

    def set_limit(self, num_bytes: int) -> None:
        """Limits all K/V to `num_bytes`, at most the budget; frees unused rows and evicts the prefix cache for it.

        Raises:
            ValueError: when running and preempted requests hold more.
        """
        if num_bytes < self._num_live_bytes:
            raise ValueError(f"requests hold {self._num_live_bytes} bytes, the limit cannot be {num_bytes}")
        self._limit = min(num_bytes, self._budget.num_bytes)
        self._make_room(0)

    def num_cached_tokens(self, group: SequenceGroup) -> int:
        """Cached tokens that a waiting request's prompt, or source, would get if it were admitted now."""
        return sum(len(chunk.token_ids) for chunk in self._cache_hits(group))

    def admit(self, group: SequenceGroup) -> list[int]:
        """Gives a request that fits its rows, with its saved K/V or its cache hits; returns the slots, by row."""
        hits = self._cache_hits(group)
        if hits:
            self._cache.use(hits[-1])
        self._save(group, 0)
        self._reserve(group, needed_rows(group))
        slots = [self._append(sequence) for sequence in group.rows]
        self._make_room(0)
        if group.handles:
            for handle, slot in zip(group.handles, slots, strict=True):
                self._queue(KVRestore(handle, slot), KVDrop(handle))
            group.handles = ()
            return slots
        leader = group.rows[0]
        for chunk in hits:
            self._queue(KVRestore(chunk.handle, slots[0]))
            group.num_cached_tokens += len(chunk.token_ids)
            if group.source_token_ids:
                group.has_source = True
            else:
                leader.num_computed_tokens += len(chunk.token_ids)
                group.kept = chunk
        return slots

    def fork(self, leader: Sequence, heirs: Collection[Sequence]) -> None:
        """Gives each heir a row with the leader's K/V; the first gets the leader's own row, if the leader is none."""
        source = self._slots.slot_of(leader)
        others = deque(heir for heir in heirs if heir is not leader)
        for heir in others:
            heir.num_computed_tokens = leader.num_computed_tokens
        if others and leader not in heirs:
            self._slots.replace(source, others.popleft())
        for heir in others:
            self._copy(source, self._append(heir), heir)

    def rearrange(self, births: Iterable[tuple[Sequence, Sequence]], dead: Iterable[Sequence]) -> None:
        """Gives each child its parent's K/V, in the row of a dead sequence if there is one.

        Children have not been extended yet, and parents live on.
        """
        left = list(dead)
        for child, parent in births:
            source = self._slots.slot_of(parent)
            if not left:
                self._copy(source, self._append(child), child)
                continue
            # K/V of their common prefix are equal, wherever computed; so are those of their source.
            last = left.pop()
            target, start = self._slots.slot_of(last), last.num_tokens_shared_with(parent)
            self._slots.replace(target, child)
            if start < parent.num_computed_tokens:
                self._queue(KVCopy(source, target, parent.num_computed_tokens, 0, start))

    def release(self, groups: Collection[SequenceGroup]) -> None:
        """Frees the rows of ended sequences; no row moves twice.

        A request without `sequences` has ended; one with fewer than before keeps these only.
        """
        freed = self._noted(
            slot
            for slot, sequence in enumerate(self._slots)
            if sequence.group in groups and sequence not in sequence.group.rows
        )
        while freed:
            self._remove(self._next_freed(freed))
        for group in groups:
            if group in self._num_rows:
                self._reserve(group, needed_rows(group) if group.sequences else 0)
        # Moved rows may leave more memory behind than the ended ones had reserved.
        self._make_room(0)

    def preempt(self, group: SequenceGroup) -> None:
        """Saves the rows of a running request and frees them."""
        row_bytes = self._budget.row_bytes(group.num_computed_tokens, len(group.source_token_ids))
        handles: dict[Sequence, int] = {}
        # Row by row, so that at most one is in memory twice.
        freed = self._noted(self._slots.slot_of(sequence) for sequence in group.rows)
        while freed:
            slot = self._next_freed(freed)
            sequence = self._slots[slot]
            handles[sequence] = handle = next(self._handles)
            self._queue(KVSave(slot, handle, sequence.num_computed_tokens, len(group.source_token_ids)))
            self._remove(slot)
            self._save(group, self._num_saved.get(group, 0) + row_bytes)
            self._reserve(group, len(freed))
            self._make_room(0)
        group.handles = tuple(handles[sequence] for sequence in group.rows)

    def forget(self, group: SequenceGroup) -> None:
        """Drops the saved rows of a preempted request that has ended."""
        self._queue(*map(KVDrop, group.handles))
        group.handles = ()
        self._save(group, 0)

    def cache_chunks(self, slot: int, start: int, stop: int) -> None:
        """Caches the chunks of a prefill run that are whole, whose predecessors are cached, and that fit."""
        while start < stop:
            length = self._rules.next_length(stop, start)
            self._cache_chunk(slot, start, length)
            start += length

    def _cache_chunk(self, slot: int, start: int, num_tokens: int) -> None:
        sequence = self._slots[slot]
        group = sequence.group
        if num_tokens < self._rules.chunk or (start > 0 and (group.kept is None or group.kept not in self._cache)):
            return
        token_ids = tuple(sequence.token_ids[start : start + num_tokens])
        parent = group.kept if start else None
        if (chunk := self._insert(token_ids, parent, self._budget.row_bytes(num_tokens, 0))) is not None:
            self._operations.append(KVSave(slot, chunk.handle, start + num_tokens, 0, start))
        group.kept = self._cache.get(parent, token_ids)

    def cache_source(self, slot: int) -> None:
        """Caches a source after its encoding, if it fits."""
        token_ids = self._slots[slot].group.source_token_ids
        if (chunk := self._insert(token_ids, None, self._budget.row_bytes(0, len(token_ids)))) is not None:
            self._operations.append(KVSave(slot, chunk.handle, 0, len(token_ids)))

    def note_written(self, slot: int, num_tokens: int) -> None:
        """Notes that a row was written up to `num_tokens`, beyond its computed tokens."""
        num_before, num_source_tokens = self._touched[slot]
        self._touched[slot] = max(num_before, num_tokens), num_source_tokens

    def take_operations(self) -> tuple[KVOperation, ...]:
        """Operations to carry out before the next run, in this order: one copy that can wait, more if many do."""
        saves = [
            index
            for index, operation in enumerate(self._operations[self._num_urgent :], self._num_urgent)
            if isinstance(operation, KVSave)
        ]
        count = saves[max(0, len(saves) - _MAX_LATE_SAVES - 1)] + 1 if saves else len(self._operations)
        self._in_flight, self._operations = tuple(self._operations[:count]), self._operations[count:]
        self._num_urgent = 0
        return self._in_flight

    def take_late_operations(self) -> tuple[KVOperation, ...]:
        """As `take_operations`, but nothing where the next run needs some, which come first."""
        return () if self._num_urgent else self.take_operations()

    def fail(self) -> list[SequenceGroup]:
        """Empties all rows and the prefix cache after a failed run; returns the requests whose K/V are lost.

        These are the running ones, and those preempted in that very run. Copies saved earlier are sound.
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
        saved = frozenset(handle for group in self._num_saved for handle in group.handles)
        self._operations = []
        self._queue(KVRetain(saved), *map(KVFree, range(num_slots)))
        self._in_flight = ()
        return lost

    def check_invariants(self) -> None:
        """Asserts that nothing is owned twice, lost or beyond the limit."""
        super().check_invariants()
        self._slots.check_invariants()
        self._cache.check_invariants()
        owners = {sequence for group in self._num_rows for sequence in group.rows}
        if owners != set(self._slots):
            raise AssertionError("rows are held by other sequences than those of running requests")
        if any(len(group.rows) > num_rows for group, num_rows in self._num_rows.items()):
            raise AssertionError("a request holds more rows than it reserved")
        if self._num_live_bytes + self._num_spare_bytes > self._limit:
            raise AssertionError(f"beyond the limit of {self._limit} bytes")
        if any(bool(group.handles) != (group in self._num_saved) for group in (*self._num_rows, *self._num_saved)):
            raise AssertionError("a request runs and is saved, or neither")

    @property
    def _num_spare_bytes(self) -> int:
        """Bytes that can be freed at once: the prefix cache, and what is left in unused rows."""
        unused = self._touched[len(self._slots) :]
        return self._cache.num_bytes + sum(self._budget.row_bytes(*touched) for touched in unused if any(touched))

    def _append(self, sequence: Sequence) -> int:
        slot = self._slots.append(sequence)
        if any(isinstance(operation, KVSave) and operation.slot == slot for operation in self._operations):
            self._queue()
        self._trim(slot)
        return slot

    def _noted(self, slots: Iterable[int]) -> deque[int]:
        """The slots in order, after noting what each has written."""
        freed = deque(sorted(slots))
        for slot in freed:
            self._note_touched(slot)
        return freed

    def _next_freed(self, freed: deque[int]) -> int:
        """Takes out the slot to free next, so that no row moves to a slot that is freed later."""
        return freed.pop() if freed[-1] == len(self._slots) - 1 else freed.popleft()

    def _remove(self, slot: int) -> None:
        """Frees a row and moves the last one to its place."""
        self._note_touched(len(self._slots) - 1)
        if move := self._slots.remove(slot):
            self._trim(move.target)
            self._copy(move.source, move.target, self._slots[move.target])

    def _note_touched(self, slot: int) -> None:
        """Notes what a row's owner has written, with the padding token that may follow its last one."""
        sequence = self._slots[slot]
        source = self._rules.padded_source_length(len(sequence.group.source_token_ids))
        written = min(sequence.num_computed_tokens + 1, sequence.group.max_num_tokens)
        num_tokens, num_source_tokens = self._touched[slot]
        self._touched[slot] = max(num_tokens, written), max(num_source_tokens, source)

    def _trim(self, slot: int) -> None:
        """Frees a row's memory beyond its new owner's reach, where both could exceed the owner's reservation."""
        group = self._slots[slot].group
        source = self._rules.padded_source_length(len(group.source_token_ids))
        num_tokens, num_source_tokens = self._touched[slot]
        most = self._budget.row_bytes(max(num_tokens, group.max_num_tokens), max(num_source_tokens, source))
        if most > self._row_bytes(group):
            self._empty(slot, min(num_tokens, group.max_num_tokens), min(num_source_tokens, source))

    def _empty(self, slot: int, num_tokens: int = 0, num_source_tokens: int = 0) -> None:
        """Frees a row's memory except under its first tokens."""
        self._queue(KVFree(slot, num_tokens, num_source_tokens))
        self._touched[slot] = num_tokens, num_source_tokens

    def _make_room(self, num_bytes: int) -> bool:
        """Frees unused rows, then evicts cached chunks, until `num_bytes` more fit; False if they cannot."""
        room = self._limit - self._num_live_bytes - num_bytes
        if room < 0:
            return False
        for slot in range(len(self._slots), self._slots.capacity):
            if self._num_spare_bytes <= room:
                return True
            if any(self._touched[slot]):
                self._empty(slot)
        num_before = self._cache.num_bytes
        while self._cache.num_bytes > room:
            self._evict()
        if num_before - self._cache.num_bytes > num_bytes:  # else they wait with the copy that takes their memory
            self._queue()
        return True

    def _evict(self) -> None:
        """Evicts a cached chunk; its copy is dropped or, if it waits, not made at all."""
        handle = self._cache.evict().handle
        for index, operation in enumerate(self._operations[self._num_urgent :], self._num_urgent):
            if isinstance(operation, KVSave) and operation.handle == handle:
                del self._operations[index]
                return
        self._operations.append(KVDrop(handle))

    def _insert(self, token_ids: TokenIds, parent: CachedChunk | None, num_bytes: int) -> CachedChunk | None:
        """A new chunk of the prefix cache, to be filled; None if it is cached already or does not fit."""
        if (found := self._cache.get(parent, token_ids)) is not None:
            self._cache.use(found)
            return None
        if parent is not None:
            self._cache.use(parent)
        if not self._make_room(num_bytes) or (parent is not None and parent not in self._cache):
            return None
        chunk = CachedChunk(next(self._handles), token_ids, num_bytes, parent)
        self._cache.add(chunk)
        return chunk

    def _cache_hits(self, group: SequenceGroup) -> list[CachedChunk]:
        """Cached chunks of a waiting request that its own reservation would not evict."""
        if group.handles:
            return []
        found = self._cache.find(self._cacheable(group))
        room = self._limit - self._num_live_bytes - self.worst_case(group)
        totals = itertools.accumulate(chunk.num_bytes for chunk in found)
        return [chunk for chunk, total in zip(found, totals, strict=True) if total <= room]

    def _cacheable(self, group: SequenceGroup) -> Iterator[TokenIds]:
        """What may be found of a request: its source, or the chunks of its prompt whose logits are not wanted."""
        if group.source_token_ids:
            yield group.source_token_ids
            return
        prompt, scoring = group.prompt_token_ids, group.request.scoring
        # The last token of a prompt that is only scored is never fed.
        end = len(prompt) - (1 if group.generates else 2)
        if scoring is not None:
            end = min(end, scoring.start - 1)
        chunk = self._rules.chunk
        for start in range(0, end - chunk + 1, chunk):
            yield prompt[start : start + chunk]

    def _copy(self, source: int, target: int, owner: Sequence) -> None:
        self._queue(KVCopy(source, target, owner.num_computed_tokens, len(owner.group.source_token_ids)))

    def _queue(self, *operations: KVOperation) -> None:
        """Queues operations that the next run needs, and so all that wait; without arguments these alone."""
        self._operations += operations
        self._num_urgent = len(self._operations)
