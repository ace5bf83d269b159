"""One step under construction: sequences in, a `ScheduledBatch` out.

Holds how much prefill fits into a step; how a sequence is cut into chunks is `service.engine.chunks`'. Changes no
sequence and takes no slot.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from service.engine.batch import (
    BeamRow,
    DecodeRow,
    EncodeRow,
    KVOperation,
    PrefillChunk,
    PrefillRow,
    SampleRow,
    ScheduledBatch,
    ScoreRow,
)
from service.engine.chunks import ChunkRules
from service.engine.kv.slots import SlotTable
from service.engine.sequence import Sequence, SequenceGroup


@dataclass(frozen=True, slots=True)
class Planned:
    """A batch, and whom its parts are about: `sampled` are whom `batch.samples` are of, `searched` `batch.beams`."""

    batch: ScheduledBatch
    sampled: tuple[Sequence, ...]
    searched: tuple[SequenceGroup, ...]


class StepPlan:
    """Collects a step's work: the batched run is free, encoding and chunks share `max_prefill_tokens`.

    The first piece is always taken, however long. Once a piece did not fit, nothing that needs the budget is taken any
    more, so that none overtakes.
    """

    def __init__(self, pieces: ChunkRules, max_prefill_tokens: int, num_slots: int) -> None:
        self._pieces = pieces
        self._max_prefill_tokens = max_prefill_tokens
        self._next_logits = num_slots
        self._num_prefill_tokens = 0
        self._is_full = False
        self._sources: dict[tuple[int, ...], list[int]] = {}
        self._decode_slots: list[int] = []
        self._short_prompts: list[PrefillRow] = []
        self._prefills: list[PrefillChunk] = []
        self._drafted: PrefillChunk | None = None
        self._scores: list[ScoreRow] = []
        self._samples: list[SampleRow] = []
        self._sampled: list[Sequence] = []
        self._beam_slots: dict[SequenceGroup, dict[Sequence, int]] = {}

    @property
    def num_prefill_tokens(self) -> int:
        """What was taken of `max_prefill_tokens`."""
        return self._num_prefill_tokens

    def can_start(self, group: SequenceGroup, num_at_hand: int) -> bool:
        """Whether a request that waits would compute something in this step.

        `num_at_hand` is how many tokens of its prompt, or of its source, need not be computed.
        """
        return self._fits(self._first_cost(group, num_at_hand))

    def start(self, slots: Iterable[int], group: SequenceGroup) -> None:
        """Takes a request that was just given `slots`: its source, then the first piece of each row."""
        source = group.source_token_ids
        for slot, sequence in zip(slots, group.rows, strict=True):
            if source and not group.has_source:
                if source not in self._sources:
                    self._num_prefill_tokens += self._pieces.padded_source_length(len(source))
                self._sources.setdefault(source, []).append(slot)
            self.feed(slot, sequence)

    def feed(self, slot: int, sequence: Sequence) -> None:
        """Takes the next piece of the sequence in `slot`, and while they are chunks and fit, the pieces after it."""
        computed = sequence.num_computed_tokens
        length = self._pieces.next_length(sequence.num_tokens, computed)
        if length == 1:
            self._decode_slots.append(slot)
            # The only piece of its row in this step, so that its logits stay where they are.
            self._score(slot, sequence, computed, 1, slot)
            computed += 1
        while length > 1 and self._take(self._cost(sequence.group, computed, length)):
            num_scored = self._score(slot, sequence, computed, length, self._next_logits)
            self._next_logits += num_scored
            token_ids = tuple(sequence.token_ids[computed : computed + length])
            if self._is_padded(sequence.group, computed, length):
                self._short_prompts.append(PrefillRow(slot, token_ids))
            else:
                is_end = computed + length == sequence.num_tokens
                self._prefills.append(PrefillChunk(slot, computed, token_ids, num_scored, wants_logits=is_end))
            computed += length
            length = self._pieces.next_length(sequence.num_tokens, computed)
        if computed == sequence.num_tokens and sequence.group.generates:
            self._choose(slot, sequence)

    @property
    def is_one_token(self) -> bool:
        """Whether all that is computed is the next token of one output, which is drawn by no rules from slot 0."""
        is_all = self._decode_slots == [0] and not (self._sources or self._short_prompts or self._prefills)
        return is_all and not self._scores and len(self._samples) == 1 and self._samples[0].rules is None

    def add_drafts(self, drafts: tuple[int, ...]) -> None:
        """Computes what may come after the one token that there is (`is_one_token`) at once with it."""
        (sequence,), (sample,) = self._sampled, self._samples
        self._decode_slots = []
        fed = (sequence.token_ids[-1], *drafts)
        self._drafted = PrefillChunk(0, sequence.num_computed_tokens, fed, num_scored=len(fed), wants_logits=False)
        self._sampled = [sequence] * len(fed)
        self._samples = [
            dataclasses.replace(sample, slot=self._next_logits + index, position=sample.position + index, draft=draft)
            for index, draft in enumerate((*drafts, None))
        ]

    def build(self, operations: tuple[KVOperation, ...], slots: SlotTable[Sequence]) -> Planned:
        """The finished batch; `slots` says who sits between the rows that decode."""
        decoding = set(self._decode_slots)
        batch = ScheduledBatch(
            kv_operations=operations,
            encodes=self._pieces.group_sources(
                EncodeRow(tuple(rows), source) for source, rows in self._sources.items()
            ),
            decode=tuple(
                _decode_row(slots[slot], is_padding=slot not in decoding)
                for slot in range(max(self._decode_slots, default=-1) + 1)
            ),
            prefill_groups=self._pieces.group_prompts(self._short_prompts),
            prefills=tuple(self._prefills),
            drafted=self._drafted,
            scores=tuple(self._scores),
            samples=tuple(self._samples),
            beams=tuple(_beam_row(group, rows) for group, rows in self._beam_slots.items()),
        )
        return Planned(batch, tuple(self._sampled), tuple(self._beam_slots))

    def _choose(self, slot: int, sequence: Sequence) -> None:
        """Notes that what follows a row is to be chosen: by its beam, or once for each output that shares it."""
        group = sequence.group
        if group.beams is not None:
            self._beam_slots.setdefault(group, {})[sequence] = slot
            return
        request = group.request
        for output in (sequence,) if group.is_forked else group.sequences:
            self._sampled.append(output)
            self._samples.append(
                SampleRow(
                    slot, output.index, output.num_tokens, request.sampling, output.seed, request.logprobs, output.rules
                )
            )

    def _score(self, slot: int, sequence: Sequence, start: int, length: int, first_logits: int) -> int:
        """Notes what a piece scores, if anything; of how many of its last tokens that takes the logits."""
        group = sequence.group
        scoring = group.request.scoring
        if scoring is None:
            return 0
        first, token_ids = group.scored_by(scoring, start, length)
        if not token_ids:
            return 0
        is_end = not group.generates and start + length == sequence.num_tokens
        self._scores.append(ScoreRow(slot, first_logits, token_ids, scoring.num_top, is_end))
        return start + length - first

    def _first_cost(self, group: SequenceGroup, num_at_hand: int) -> int:
        """Of a request's first pieces; a source that another one brings along is free."""
        source, leader = group.source_token_ids, group.sequences[0]
        if source:
            is_there = group.has_source or num_at_hand or source in self._sources
            return 0 if is_there else self._pieces.padded_source_length(len(source))
        start = leader.num_computed_tokens + num_at_hand
        length = self._pieces.next_length(leader.num_tokens, start)
        return self._cost(group, start, length) if length > 1 else 0

    def _is_padded(self, group: SequenceGroup, start: int, length: int) -> bool:
        """Whether a piece is computed in a group; one whose tokens are scored is not."""
        scoring = group.request.scoring
        is_scored = scoring is not None and bool(group.scored_by(scoring, start, length)[1])
        return self._pieces.is_short(start, length) and not is_scored

    def _cost(self, group: SequenceGroup, start: int, length: int) -> int:
        """Of a piece of several tokens, padding included."""
        return self._pieces.padded_prompt_length(length) if self._is_padded(group, start, length) else length

    def _fits(self, num_tokens: int) -> bool:
        if self._is_full:
            return False
        return not self._num_prefill_tokens or self._num_prefill_tokens + num_tokens <= self._max_prefill_tokens

    def _take(self, num_tokens: int) -> bool:
        self._is_full = not self._fits(num_tokens)
        if not self._is_full:
            self._num_prefill_tokens += num_tokens
        return not self._is_full


def _decode_row(sequence: Sequence, *, is_padding: bool) -> DecodeRow:
    # A row that only pads is in the middle of its prompt: it feeds the token that is next anyway, and the chunk that
    # computes that token in earnest writes over it.
    position = sequence.num_computed_tokens
    return DecodeRow(sequence.token_ids[position], position, len(sequence.group.source_token_ids), is_padding)


def _beam_row(group: SequenceGroup, slots: Mapping[Sequence, int]) -> BeamRow:
    if group.beams is None:
        raise ValueError(f"request {group.request_id} searches no beams")
    return BeamRow(
        slots=tuple(slots[beam] for beam in group.rows),
        num_candidates=group.beams.num_candidates,
        rules=tuple(beam.rules for beam in group.rows),
        logprobs=group.request.logprobs,
    )
