"""Golden cases replayed on the runner that serves: proof that it answers as PyTorch did.

Rows join, leave and move between slots as served sequences do. Drives the runner directly: no single schedule covers
everything that the scheduler may ask of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from model.spec.golden import Feed, GoldenCase, Step
from service.engine.batch import DecodeRow, EncodeRow, KVCopy, PrefillChunk, PrefillRow, ScheduledBatch
from service.engine.chunks import ChunkRules
from service.engine.interfaces import Runner
from service.engine.kv.slots import SlotTable

Float32 = npt.NDArray[np.float32]


def replay(
    runner: Runner, case: GoldenCase, rules: ChunkRules, num_slots: int, rows: Collection[int] | None = None
) -> Float32:
    """The runner's logits for a case, `[feeds, V] float32`: after the feeds that it compares, or after all of `rows`.

    A case of more rows than slots is replayed in groups, as rows are independent of batch composition. The runner must
    be idle: its K/V are overwritten.
    """
    wanted = case.compared_feeds if rows is None else [feed for feed in case.feeds if feed.row in rows]
    logits: dict[Feed, Float32] = {}
    for first in range(0, len(case.sequences), num_slots):
        _Replay(runner, case, rules, range(first, first + num_slots)).run(logits, frozenset(wanted))
    return np.stack([logits[feed] for feed in wanted])


def replay_all(runner: Runner, cases: Sequence[GoldenCase], rules: ChunkRules, num_slots: int) -> list[Float32]:
    """The runner's logits for each case, as by `replay`; cases without sources decode side by side.

    That saves time: a decode step takes about as long for many rows as for one.
    """
    if len(cases) < 2 or any(case.sources for case in cases):
        return [replay(runner, case, rules, num_slots) for case in cases]
    together, origins = _side_by_side(cases)
    logits = replay(runner, together, rules, num_slots)
    return [logits[[origin == number for origin in origins]] for number in range(len(cases))]


def _side_by_side(cases: Sequence[GoldenCase]) -> tuple[GoldenCase, list[int]]:
    """One case of all rows, and the number of the case of each feed that is compared.

    Steps of several tokens go first, by themselves.
    """
    firsts = list(accumulate((len(case.sequences) for case in cases[:-1]), initial=0))

    def moved(feed: Feed, number: int) -> Feed:
        return Feed(firsts[number] + feed.row, feed.start, feed.count)

    waiting = [
        deque(tuple(moved(feed, number) for feed in step) for step in case.steps) for number, case in enumerate(cases)
    ]
    wanted = {moved(feed, number): number for number, case in enumerate(cases) for feed in case.compared_feeds}
    steps: list[Step] = []
    while any(waiting):
        decoding: list[Feed] = []
        for ahead in waiting:
            while ahead and any(feed.count > 1 for feed in ahead[0]):
                steps.append(ahead.popleft())
            if ahead:
                decoding += ahead.popleft()
        if decoding:
            steps.append(tuple(decoding))
    feeds = [feed for step in steps for feed in step]
    compared = tuple(number for number, feed in enumerate(feeds) if feed in wanted)
    sequences = tuple(sequence for case in cases for sequence in case.sequences)
    together = GoldenCase(
        "all", sequences, (), tuple(steps), np.empty((len(compared), 0), np.float32), compared=compared
    )
    return together, [wanted[feeds[number]] for number in compared]


class _Replay:
    """One group of a case's rows, each in a slot from its first feed to its last."""

    def __init__(self, runner: Runner, case: GoldenCase, rules: ChunkRules, group: range) -> None:
        self._runner = runner
        self._case = case
        self._rules = rules
        self._group = group
        self._slots: SlotTable[int] = SlotTable(len(group))
        self._num_computed = [0] * len(case.sequences)

    def run(self, logits: dict[Feed, Float32], wanted: Collection[Feed]) -> None:
        """Runs every step; stores the logits of each feed `wanted`."""
        copies: tuple[KVCopy, ...] = ()
        for step in self._case.steps:
            feeds = [feed for feed in step if feed.row in self._group]
            if not feeds:
                continue
            output = self._runner.run(self._batch(feeds, copies))
            slots = {row: slot for slot, row in enumerate(self._slots)}
            for feed in feeds:
                if feed in wanted:
                    logits[feed] = output[slots[feed.row]].copy()
                self._num_computed[feed.row] += feed.count
            copies = tuple(self._release())

    def _batch(self, feeds: Sequence[Feed], copies: tuple[KVCopy, ...]) -> ScheduledBatch:
        joining = [(self._slots.append(feed.row), feed.row) for feed in feeds if feed.start == 0]
        # As the scheduler does, a source of several rows is encoded once.
        sources: dict[tuple[int, ...], list[int]] = {}
        for slot, row in joining if self._case.sources else ():
            sources.setdefault(tuple(self._case.sources[row].tolist()), []).append(slot)
        slots = {row: slot for slot, row in enumerate(self._slots)}
        decoding = {slots[feed.row] for feed in feeds if feed.count == 1}
        return ScheduledBatch(
            kv_operations=copies,
            encodes=self._rules.group_sources(EncodeRow(tuple(to), source) for source, to in sources.items()),
            decode=tuple(
                self._decode_row(self._slots[slot], is_padding=slot not in decoding)
                for slot in range(max(decoding, default=-1) + 1)
            ),
            prefill_groups=self._rules.group_prompts(
                PrefillRow(slots[feed.row], self._token_ids(feed)) for feed in feeds if self._is_short(feed)
            ),
            prefills=tuple(
                PrefillChunk(slots[feed.row], feed.start, self._token_ids(feed))
                for feed in feeds
                if feed.count > 1 and not self._is_short(feed)
            ),
            wants_all_logits=True,
        )

    def _decode_row(self, row: int, *, is_padding: bool) -> DecodeRow:
        position = self._num_computed[row]
        return DecodeRow(int(self._case.sequences[row][position]), position, self._source_length(row), is_padding)

    def _is_short(self, feed: Feed) -> bool:
        return self._rules.is_short(feed.start, feed.count)

    def _token_ids(self, feed: Feed) -> tuple[int, ...]:
        return tuple(self._case.sequences[feed.row][feed.start : feed.start + feed.count].tolist())

    def _source_length(self, row: int) -> int:
        return len(self._case.sources[row]) if self._case.sources else 0

    def _release(self) -> list[KVCopy]:
        """Frees the slots of rows that are complete, the highest first."""
        copies = []
        for slot in reversed(range(len(self._slots))):
            row = self._slots[slot]
            if self._num_computed[row] < len(self._case.sequences[row]):
                continue
            if move := self._slots.remove(slot):
                moved = self._slots[move.target]
                copies.append(KVCopy(move.source, move.target, self._num_computed[moved], self._source_length(moved)))
        return copies
