"""One step under construction: sequences in, a `ScheduledBatch` out.

Holds the two rules that the scheduler's promises rest on: how a sequence is cut into pieces (`Pieces`, a function of
the sequence alone) and how much prefill fits into a step (`StepPlan`). Changes no sequence and takes no slot.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from service.engine.batch import (
    DecodeRow,
    EncodeGroup,
    EncodeRow,
    KVCopy,
    PrefillChunk,
    SampleRow,
    ScheduledBatch,
    ScoreRow,
)
from service.engine.sequence import Sequence
from service.engine.slots import SlotTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """How work is cut, in tokens: prompts at multiples of `chunk`, sources padded to multiples of `source_padding`."""

    chunk: int
    source_padding: int
    source_context: int

    def next_length(self, sequence: Sequence, num_computed: int) -> int:
        """Tokens of the piece that follows the first `num_computed`; 0 when nothing is left."""
        boundary = (num_computed // self.chunk + 1) * self.chunk
        return min(boundary, sequence.num_tokens) - num_computed

    def padded_source_length(self, length: int) -> int:
        """Length that the encoder sees for a source of `length` tokens; 0 where there is no source."""
        padded = -(-length // self.source_padding) * self.source_padding
        return min(padded, self.source_context)

    def group_sources(self, rows: Iterable[EncodeRow]) -> tuple[EncodeGroup, ...]:
        """Sources by padded length, so that each is encoded in the shape that it would have alone."""
        groups: dict[int, list[EncodeRow]] = {}
        for row in rows:
            groups.setdefault(self.padded_source_length(len(row.token_ids)), []).append(row)
        return tuple(EncodeGroup(length, tuple(members)) for length, members in groups.items())


class StepPlan:
    """Collects a step's work: the batched run is free, encoding and chunks share `max_prefill_tokens`.

    The first piece is always taken, however long. Once a piece did not fit, nothing that needs the budget is taken any
    more, so that nobody overtakes.
    """

    def __init__(self, pieces: Pieces, max_prefill_tokens: int, num_slots: int) -> None:
        self._pieces = pieces
        self._max_prefill_tokens = max_prefill_tokens
        self._next_logits = num_slots
        self._num_prefill_tokens = 0
        self._is_full = False
        self._encodes: list[EncodeRow] = []
        self._decode_slots: list[int] = []
        self._prefills: list[PrefillChunk] = []
        self._scores: list[ScoreRow] = []
        self._sampled_slots: list[int] = []

    def can_start(self, sequence: Sequence) -> bool:
        """Whether a sequence that waits would compute something in this step."""
        return self._fits(self._first_cost(sequence))

    def start(self, slot: int, sequence: Sequence) -> None:
        """Takes a sequence that was just given `slot`: its source, then its first piece."""
        if sequence.source_token_ids:
            self._num_prefill_tokens += self._pieces.padded_source_length(len(sequence.source_token_ids))
            self._encodes.append(EncodeRow(slot, sequence.source_token_ids))
        self.feed(slot, sequence)

    def feed(self, slot: int, sequence: Sequence) -> None:
        """Takes the next piece of the sequence in `slot`, and while they are chunks and fit, the pieces after it."""
        computed = sequence.num_computed_tokens
        length = self._pieces.next_length(sequence, computed)
        if length == 1:
            self._decode_slots.append(slot)
            # The only piece of its row in this step, so that its logits stay where they are.
            self._score(slot, sequence, computed, 1, slot)
            computed += 1
        while length > 1 and self._take(length):
            num_scored = self._score(slot, sequence, computed, length, self._next_logits)
            self._next_logits += num_scored
            token_ids = tuple(sequence.token_ids[computed : computed + length])
            self._prefills.append(PrefillChunk(slot, computed, token_ids, num_scored))
            computed += length
            length = self._pieces.next_length(sequence, computed)
        if computed == sequence.num_tokens and sequence.generates:
            self._sampled_slots.append(slot)

    def build(self, moves: tuple[KVCopy, ...], slots: SlotTable[Sequence]) -> ScheduledBatch:
        """The finished batch; `slots` says who sits between the rows that decode."""
        decoding = set(self._decode_slots)
        return ScheduledBatch(
            moves=moves,
            encodes=self._pieces.group_sources(self._encodes),
            decode=tuple(
                _decode_row(slots[slot], is_padding=slot not in decoding)
                for slot in range(max(self._decode_slots, default=-1) + 1)
            ),
            prefills=tuple(self._prefills),
            scores=tuple(self._scores),
            samples=tuple(_sample_row(slot, slots[slot]) for slot in self._sampled_slots),
        )

    def _score(self, slot: int, sequence: Sequence, start: int, length: int, first_logits: int) -> int:
        """Notes what a piece scores, if anything; of how many of its last tokens that takes the logits."""
        scoring = sequence.request.scoring
        if scoring is None:
            return 0
        first, token_ids = sequence.scored_by(scoring, start, length)
        if not token_ids:
            return 0
        is_end = not sequence.generates and start + length == sequence.num_tokens
        self._scores.append(ScoreRow(slot, first_logits, token_ids, scoring.num_top, is_end))
        return start + length - first

    def _first_cost(self, sequence: Sequence) -> int:
        length = self._pieces.next_length(sequence, sequence.num_computed_tokens)
        return self._pieces.padded_source_length(len(sequence.source_token_ids)) + (length if length > 1 else 0)

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
    return DecodeRow(sequence.token_ids[position], position, len(sequence.source_token_ids), is_padding)


def _sample_row(slot: int, sequence: Sequence) -> SampleRow:
    request = sequence.request
    return SampleRow(slot, sequence.num_tokens, request.sampling, sequence.seed, request.logprobs, sequence.rules)
