"""One step's work, immutable: all that the runner and the sampler need, and nothing else.

The scheduler writes it, the runner turns it into tensors, the sampler reads `scores`, `samples` and `beams`,
`Scheduler.commit` moves the sequences forward by it. The order within a step is the order of the fields: operations on
K/V, encoding, the batched one-token run, prefill in groups, prefill chunks, the row that is guessed. A row is fed
either by the one-token run or by what computes several tokens of it in a step, never by both, so that its last logits
have one place: row `slot` of the runner's output. Logits that are wanted besides lie behind the slots'.
"""

from __future__ import annotations

from dataclasses import dataclass

from model.spec.cost import causal_pairs
from service.engine.logits import LogitsRules
from service.engine.types import SamplingParams


@dataclass(frozen=True, slots=True)
class KVCopy:
    """Copies a part of row `source` to the same places of row `target`.

    That is the self positions `[start, num_tokens)` and the first `num_source_tokens` cross positions. What the target
    held before `start` stays; what it held after what is copied is undefined.
    """

    source: int
    target: int
    num_tokens: int
    num_source_tokens: int
    start: int = 0


@dataclass(frozen=True, slots=True)
class KVSave:
    """Keeps a compact copy of a part of row `slot` under `handle`, a number not in use.

    The part is the self positions `[start, num_tokens)` and the first `num_source_tokens` cross positions.
    """

    slot: int
    handle: int
    num_tokens: int
    num_source_tokens: int
    start: int = 0


@dataclass(frozen=True, slots=True)
class KVRestore:
    """Writes what is kept under `handle` to the same places of row `slot`, bit for bit; the copy is kept.

    What the row held before these places stays; what it held after them is undefined.
    """

    handle: int
    slot: int


@dataclass(frozen=True, slots=True)
class KVDrop:
    """Forgets what is kept under `handle`, and gives its memory back."""

    handle: int


@dataclass(frozen=True, slots=True)
class KVFree:
    """Row `slot` holds nothing that anybody wants; its memory goes back to the system.

    What lies under the first `num_tokens` self and `num_source_tokens` cross positions may stay: it is wanted next.
    """

    slot: int
    num_tokens: int = 0
    num_source_tokens: int = 0


@dataclass(frozen=True, slots=True)
class KVRetain:
    """Forgets everything kept but what is under these handles; which of the others there are need not be known."""

    handles: frozenset[int]


KVOperation = KVCopy | KVSave | KVRestore | KVDrop | KVFree | KVRetain


@dataclass(frozen=True, slots=True)
class EncodeRow:
    """One source to encode; its cross-attention K/V go to all of `slots`."""

    slots: tuple[int, ...]
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EncodeGroup:
    """Sources of one padded length, encoded together. The length follows from each row alone, never from the others."""

    padded_length: int
    rows: tuple[EncodeRow, ...]


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """One token of the batched run; its place in `ScheduledBatch.decode` is its slot.

    `position` is how many tokens the row already has in the cache. A padding row has nothing to feed: its token is a
    dummy, written at the first free position, where the row's next real token replaces it.
    """

    token_id: int
    position: int
    source_length: int
    is_padding: bool


@dataclass(frozen=True, slots=True)
class PrefillRow:
    """The beginning of one row: `token_ids` go to positions `[0, len)` of `slot`."""

    slot: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PrefillGroup:
    """Beginnings of one padded length, computed together. The length follows from each row alone, as for sources."""

    padded_length: int
    rows: tuple[PrefillRow, ...]


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Several tokens of one row: `token_ids` go to positions `[start, start + len)` of `slot`.

    The logits after the last `num_scored` of them, where there are any, are the next rows behind the slots' in the
    runner's output, in the order of chunks and tokens. Row `slot` has the logits after the last one as always, until
    the next chunk of the slot, but where nobody `wants_logits` there: before a prompt's end, and of guesses.
    """

    slot: int
    start: int
    token_ids: tuple[int, ...]
    num_scored: int = 0
    wants_logits: bool = True

    @property
    def num_logits(self) -> int:
        """After how many of its last tokens logits are computed."""
        return self.num_scored or int(self.wants_logits)


@dataclass(frozen=True, slots=True)
class SampleRow:
    """A token that is chosen in this step from the logits of row `slot`: it will stand at `position` of its sequence.

    Several outputs of a request choose their first tokens from one row, each by its own draws, which `output_index`
    tells apart. `rules` are the sequence's own, None where it has none: what they count changes when the step is
    committed.

    What comes behind a row with a `draft`, in the same output, is of use only if that very token is chosen. The logits
    of such rows lie behind the slots'.
    """

    slot: int
    output_index: int
    position: int
    params: SamplingParams
    seed: int
    logprobs: int | None
    rules: LogitsRules | None = None
    draft: int | None = None


@dataclass(frozen=True, slots=True)
class ScoreRow:
    """Tokens of one row that are known already: `token_ids[i]` follows logits `first_logits + i` of the output.

    `is_end` says that the sequence is over with them: nothing is to be generated.
    """

    slot: int
    first_logits: int
    token_ids: tuple[int, ...]
    num_top: int
    is_end: bool


@dataclass(frozen=True, slots=True)
class BeamRow:
    """The beams of one request that are all extended in this step: `slots[i]` has the logits of beam i.

    The `num_candidates` most probable tokens of each are wanted, by its `rules`. `logprobs` is how many alternatives to
    report with each, None for none.
    """

    slots: tuple[int, ...]
    num_candidates: int
    rules: tuple[LogitsRules | None, ...]
    logprobs: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledBatch:
    """One step. An empty batch is valid and runs nothing.

    `kv_operations` are carried out one after the other, before anything is computed. `wants_all_logits` says that all
    rows which are fed are looked at, and not those alone that are drawn from, scored or extended: golden cases do so.

    `drafted` is the only row that computes anything, where it is guessed what that says next: it decodes, its next
    token first and behind it the guesses, with logits after each. As many guesses stay as come true, and what is
    computed of the others is written over.
    """

    kv_operations: tuple[KVOperation, ...] = ()
    encodes: tuple[EncodeGroup, ...] = ()
    decode: tuple[DecodeRow, ...] = ()
    prefill_groups: tuple[PrefillGroup, ...] = ()
    prefills: tuple[PrefillChunk, ...] = ()
    drafted: PrefillChunk | None = None
    scores: tuple[ScoreRow, ...] = ()
    samples: tuple[SampleRow, ...] = ()
    beams: tuple[BeamRow, ...] = ()
    wants_all_logits: bool = False

    @property
    def num_rows(self) -> int:
        """Rows that compute something."""
        prefilled = {row.slot for group in self.prefill_groups for row in group.rows}
        prefilled.update(chunk.slot for chunk in self.prefills)
        return self.num_decode_rows + len(prefilled)

    @property
    def chunks(self) -> tuple[PrefillChunk, ...]:
        """All that is computed by itself, several tokens at once: chunks of prompts, or the row with guesses."""
        return self.prefills if self.drafted is None else (*self.prefills, self.drafted)

    @property
    def num_draft_tokens(self) -> int:
        """Tokens that are guessed: all of that row's but the first."""
        return 0 if self.drafted is None else len(self.drafted.token_ids) - 1

    @property
    def has_prompts(self) -> bool:
        """Whether it computes more than rows that decode: sources, or prompts."""
        return bool(self.encodes or self.prefill_groups or self.prefills)

    @property
    def num_tokens(self) -> int:
        """Tokens that do work: sources encoded, prompts prefilled, one for each decoding row; guesses aside."""
        return self.num_encoder_tokens + self.num_decode_rows + self.num_prefill_tokens

    @property
    def num_padding_tokens(self) -> int:
        """Tokens that fill up a tensor and do no work."""
        groups: tuple[EncodeGroup | PrefillGroup, ...] = (*self.encodes, *self.prefill_groups)
        grouped = sum(group.padded_length - len(row.token_ids) for group in groups for row in group.rows)
        return grouped + sum(row.is_padding for row in self.decode)

    @property
    def num_prefill_runs(self) -> int:
        """Runs of a graph that compute prompts: one for each group and each chunk."""
        return len(self.prefill_groups) + len(self.prefills)

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens of prompts computed by them, padding aside."""
        grouped = sum(len(row.token_ids) for group in self.prefill_groups for row in group.rows)
        return grouped + sum(len(chunk.token_ids) for chunk in self.prefills)

    @property
    def num_prefill_pairs(self) -> int:
        """Pairs of a query and a key that the mask lets meet for these tokens, in one layer, for each head."""
        grouped = sum(causal_pairs(len(row.token_ids)) for group in self.prefill_groups for row in group.rows)
        return grouped + sum(causal_pairs(len(chunk.token_ids), chunk.start) for chunk in self.prefills)

    @property
    def num_decode_rows(self) -> int:
        """Rows that decode: those of the one-token run, padding aside, or the one with tokens that are guessed."""
        return sum(not row.is_padding for row in self.decode) + (self.drafted is not None)

    @property
    def num_decode_pairs(self) -> int:
        """Pairs of these rows, one token each: with all tokens that a row then has, and with those of its source."""
        alone = 0 if self.drafted is None else self.drafted.start + 1
        return alone + sum(row.position + 1 + row.source_length for row in self.decode if not row.is_padding)

    @property
    def num_encoder_runs(self) -> int:
        """Runs of the encoder."""
        return len(self.encodes)

    @property
    def num_encoder_tokens(self) -> int:
        """Tokens of sources encoded, padding aside."""
        return sum(len(row.token_ids) for group in self.encodes for row in group.rows)

    @property
    def num_encoder_pairs(self) -> int:
        """Pairs of these tokens, each with all of its source."""
        return sum(len(row.token_ids) ** 2 for group in self.encodes for row in group.rows)
