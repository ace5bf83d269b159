"""One step under construction: sequences in, a `ScheduledBatch` out.

Tracks how much prefill fits into the step. Changes no sequence and takes no slot.
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
from service.engine.sampling.beam import BeamSearch
from service.engine.sequence import Sequence, SequenceGroup


@dataclass(frozen=True, slots=True)
class Planned:
    """A batch, and the sequences of `batch.samples` and groups of `batch.beams`, in their order."""

    batch: ScheduledBatch
    sampled: tuple[Sequence, ...]
    searched: tuple[SequenceGroup, ...]


class StepPlan:
    """Collects a step's work. The batched run is free; sources and chunks share `max_prefill_tokens`.

    The first chunk or source is always taken, however long. Once one did not fit, nothing that needs the budget is
    taken any more, so that none overtakes.
    """

    def __init__(self, rules: ChunkRules, max_prefill_tokens: int, num_slots: int) -> None:
        self.num_prefill_tokens = 0
        """Tokens taken of `max_prefill_tokens`."""
        self._rules = rules
        self._max_prefill_tokens = max_prefill_tokens
        self._next_logits = num_slots
        self._is_full = False
        self._sources: dict[tuple[int, ...], list[int]] = {}
        self._decode_slots: list[int] = []
        self._short_prompts: list[PrefillRow] = []
        self._prefills: list[PrefillChunk] = []
        self._drafted: list[PrefillChunk] = []
        self._scores: list[ScoreRow] = []
        self._samples: list[SampleRow] = []
        self._sampled: list[Sequence] = []
        self._beam_slots: dict[SequenceGroup, dict[Sequence, int]] = {}

    def can_start(self, group: SequenceGroup, num_cached: int) -> bool:
        """Whether a waiting request, of which `num_cached` tokens are cached, would compute something in this step."""
        source, leader = group.source_token_ids, group.sequences[0]
        if source:
            # A source that another request of the step brings along is free.
            is_there = group.has_source or num_cached or source in self._sources
            return self._fits(0 if is_there else self._rules.padded_source_length(len(source)))
        start = leader.num_computed_tokens + num_cached
        length = self._rules.next_length(leader.num_tokens, start)
        return self._fits(self._cost(group, start, length) if length > 1 else 0)

    def start(self, slots: Iterable[int], group: SequenceGroup) -> None:
        """Takes a request that was just given `slots`: its source, then the first chunks of each row."""
        source = group.source_token_ids
        for slot, sequence in zip(slots, group.rows, strict=True):
            if source and not group.has_source:
                if source not in self._sources:
                    self.num_prefill_tokens += self._rules.padded_source_length(len(source))
                self._sources.setdefault(source, []).append(slot)
            self.feed(slot, sequence)

    def feed(self, slot: int, sequence: Sequence) -> None:
        """Takes the next token of a sequence, or as many of its next chunks as fit."""
        computed = sequence.num_computed_tokens
        length = self._rules.next_length(sequence.num_tokens, computed)
        if length == 1:
            self._decode_slots.append(slot)
            # Nothing else of the row is computed in this step, so its logits stay in row `slot`.
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
            length = self._rules.next_length(sequence.num_tokens, computed)
        if computed == sequence.num_tokens and sequence.group.generates:
            self._sample(slot, sequence)

    def merge_chunks(self, slots: SlotTable[Sequence]) -> None:
        """Computes a prompt's whole chunks in one run, and following ones, if the step computes nothing else.

        A shorter chunk stays a run of its own: what computes a run may depend on its length.
        """
        chunks, whole = self._prefills, self._rules.chunk
        if len({chunk.slot for chunk in chunks}) != 1 or self._sources or self._short_prompts or self._decode_slots:
            return
        slot, start, end = chunks[0].slot, chunks[0].start, chunks[-1].end
        sequence, most = slots[slot], self._rules.long_run
        if sequence.group.request.scoring is not None or any(len(chunk.token_ids) != whole for chunk in chunks):
            return
        if end - start > most:
            return
        num_tokens, was_end = sequence.num_tokens, end == sequence.num_tokens
        while end + whole <= min(num_tokens, start + most):
            end += whole
        token_ids = tuple(sequence.token_ids[start:end])
        self._prefills = [PrefillChunk(slot, start, token_ids, wants_logits=end == num_tokens)]
        if end == num_tokens and not was_end:
            self._sample(slot, sequence)

    @property
    def decoding(self) -> list[Sequence]:
        """The sequences of slots 0, 1, and so on, if the step samples the next token of each and does nothing else."""
        if self._sources or self._short_prompts or self._prefills or self._scores or self._beam_slots:
            return []
        by_slot = {sample.slot: sequence for sample, sequence in zip(self._samples, self._sampled, strict=True)}
        slots = range(len(by_slot))
        is_all = len(self._samples) == len(slots) == len(self._decode_slots) and by_slot.keys() == {*slots}
        return [by_slot[slot] for slot in slots] if is_all else []

    def add_drafts(self, drafts: Iterable[tuple[int, ...]]) -> None:
        """Verifies draft tokens of each slot, some without, together with the step's tokens (`decoding`)."""
        samples, sequences, drafts = {sample.slot: sample for sample in self._samples}, self.decoding, [*drafts]
        self._decode_slots, self._samples, self._sampled = [], [], []
        length = 1 + max(map(len, drafts))
        for slot, (sequence, own) in enumerate(zip(sequences, drafts, strict=True)):
            start = sequence.num_tokens + len(own) - length
            fed = (*sequence.token_ids[start:], *own)
            chunk = PrefillChunk(slot, start, fed, num_scored=1 + len(own), wants_logits=False)
            self._drafted.append(chunk)
            for index, draft in enumerate((*own, None)):
                place, position = self._next_logits + index, samples[slot].position + index
                self._samples.append(dataclasses.replace(samples[slot], slot=place, position=position, draft=draft))
                self._sampled.append(sequence)
            self._next_logits += chunk.num_scored

    def build(self, operations: tuple[KVOperation, ...], slots: SlotTable[Sequence]) -> Planned:
        """The finished batch; `slots` has the rows that pad the batched run between those that decode."""
        decoding = set(self._decode_slots)
        batch = ScheduledBatch(
            kv_operations=operations,
            encodes=self._rules.group_sources(EncodeRow(tuple(rows), source) for source, rows in self._sources.items()),
            decode=tuple(
                _decode_row(slots[slot], is_padding=slot not in decoding)
                for slot in range(max(self._decode_slots, default=-1) + 1)
            ),
            prefill_groups=self._rules.group_prompts(self._short_prompts),
            prefills=tuple(self._prefills),
            drafted=tuple(self._drafted),
            scores=tuple(self._scores),
            samples=tuple(self._samples),
            beams=tuple(
                _beam_row(group, group.beams, rows)
                for group, rows in self._beam_slots.items()
                if group.beams is not None
            ),
        )
        return Planned(batch, tuple(self._sampled), tuple(self._beam_slots))

    def _sample(self, slot: int, sequence: Sequence) -> None:
        """Samples the token after a row, once for each output that shares it, or extends its beam."""
        group = sequence.group
        if group.beams is not None:
            self._beam_slots.setdefault(group, {})[sequence] = slot
            return
        params, logprobs = group.request.sampling, group.request.logprobs
        for output in (sequence,) if group.is_forked else group.sequences:
            self._sampled.append(output)
            self._samples.append(
                SampleRow(slot, output.index, output.num_tokens, params, output.seed, logprobs, output.rules)
            )

    def _score(self, slot: int, sequence: Sequence, start: int, length: int, first_logits: int) -> int:
        """Scores what a chunk scores; returns after how many of its last tokens that takes logits."""
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

    def _is_padded(self, group: SequenceGroup, start: int, length: int) -> bool:
        """Whether a chunk runs in a padded group; one whose tokens are scored does not."""
        scoring = group.request.scoring
        is_scored = scoring is not None and bool(group.scored_by(scoring, start, length)[1])
        return self._rules.is_short(start, length) and not is_scored

    def _cost(self, group: SequenceGroup, start: int, length: int) -> int:
        """Tokens of a chunk, padding included."""
        return self._rules.padded_prompt_length(length) if self._is_padded(group, start, length) else length

    def _fits(self, num_tokens: int) -> bool:
        if self._is_full:
            return False
        return not self.num_prefill_tokens or self.num_prefill_tokens + num_tokens <= self._max_prefill_tokens

    def _take(self, num_tokens: int) -> bool:
        self._is_full = not self._fits(num_tokens)
        if not self._is_full:
            self.num_prefill_tokens += num_tokens
        return not self._is_full


def _decode_row(sequence: Sequence, *, is_padding: bool) -> DecodeRow:
    # A padding row is in its prompt: it feeds the token that is next anyway, and the chunk that computes that token
    # overwrites it.
    position = sequence.num_computed_tokens
    return DecodeRow(sequence.token_ids[position], position, len(sequence.group.source_token_ids), is_padding)


def _beam_row(group: SequenceGroup, search: BeamSearch, slots: Mapping[Sequence, int]) -> BeamRow:
    return BeamRow(
        slots=tuple(slots[beam] for beam in group.rows),
        num_candidates=search.num_candidates,
        rules=tuple(beam.rules for beam in group.rows),
        logprobs=group.request.logprobs,
    )
