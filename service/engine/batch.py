"""One step's work, immutable: all that the runner and the sampler need.

The scheduler builds it, the runner turns it into tensors, the sampler reads `scores`, `samples` and `beams`, and
`Scheduler.commit` moves the sequences forward by it. Fields stand in the order in which they are carried out: K/V
operations, encoding, the batched one-token run, grouped prefill, prefill chunks, the rows with draft tokens. A row is
fed either by the one-token run or by runs of several tokens, so its last logits have one place: row `slot` of the
runner's output. Other logits that are wanted follow the slots'.
"""

from __future__ import annotations

from dataclasses import dataclass

from model.spec.cost import causal_pairs
from service.engine.logits import LogitsRules
from service.engine.types import SamplingParams


@dataclass(frozen=True, slots=True)
class KVCopy:
    """Copies self positions `[start, num_tokens)` and the first `num_source_tokens` cross positions of a row.

    What the target held before `start` stays; what it held behind the copied positions is undefined.
    """

    source: int
    target: int
    num_tokens: int
    num_source_tokens: int
    start: int = 0


@dataclass(frozen=True, slots=True)
class KVSave:
    """Saves a compact copy of the positions that `KVCopy` would copy, under an unused handle."""

    slot: int
    handle: int
    num_tokens: int
    num_source_tokens: int
    start: int = 0


@dataclass(frozen=True, slots=True)
class KVRestore:
    """Writes a saved copy to the same positions of row `slot`, bit for bit; the copy stays.

    What the row held before these positions stays; what it held behind them is undefined.
    """

    handle: int
    slot: int


@dataclass(frozen=True, slots=True)
class KVDrop:
    """Drops a saved copy and frees its memory."""

    handle: int


@dataclass(frozen=True, slots=True)
class KVFree:
    """Returns the memory of row `slot` to the system; its contents are no longer needed.

    Memory under the first `num_tokens` self and `num_source_tokens` cross positions may stay: it is written next.
    """

    slot: int
    num_tokens: int = 0
    num_source_tokens: int = 0


@dataclass(frozen=True, slots=True)
class KVRetain:
    """Drops every saved copy but those under these handles."""

    handles: frozenset[int]


KVOperation = KVCopy | KVSave | KVRestore | KVDrop | KVFree | KVRetain


@dataclass(frozen=True, slots=True)
class EncodeRow:
    """One source to encode; its cross-attention K/V go to all of `slots`."""

    slots: tuple[int, ...]
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EncodeGroup:
    """Sources of one padded length, encoded together; the length follows from each row alone."""

    padded_length: int
    rows: tuple[EncodeRow, ...]


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """One token of the batched run; its index in `ScheduledBatch.decode` is its slot.

    `position` is the number of tokens that the row has in the cache. A padding row's token is a dummy, written at the
    first free position, where the row's next real token overwrites it.
    """

    token_id: int
    position: int
    source_length: int
    is_padding: bool


@dataclass(frozen=True, slots=True)
class PrefillRow:
    """First chunk of a row: `token_ids` go to positions `[0, len)` of `slot`."""

    slot: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PrefillGroup:
    """First chunks of one padded length, computed together; the length follows from each row alone."""

    padded_length: int
    rows: tuple[PrefillRow, ...]


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Several tokens of one row: `token_ids` go to positions `[start, start + len)` of `slot`.

    Logits after the last `num_scored` of them are the next rows behind the slots' in the runner's output, in the order
    of chunks and tokens. With `wants_logits`, row `slot` has the logits after the last token, until the slot's next
    chunk; not wanted before a prompt's end, and of draft tokens.
    """

    slot: int
    start: int
    token_ids: tuple[int, ...]
    num_scored: int = 0
    wants_logits: bool = True

    @property
    def num_logits(self) -> int:
        """Number of last tokens after which logits are computed."""
        return self.num_scored or int(self.wants_logits)

    @property
    def end(self) -> int:
        """The position behind the last token."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class SampleRow:
    """A token to choose from the logits of row `slot`, for `position` of its sequence.

    Several outputs of a request choose their first tokens from one row, each by draws of its own (`output_index`).
    `rules` are the sequence's own, and change when the step is committed.

    Rows that follow one with a `draft` count only if that token is chosen. Their logits lie behind the slots'.
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
    """Known tokens to score: `token_ids[i]` by row `first_logits + i` of the runner's output.

    `is_end`: the request ends with them, as it generates nothing.
    """

    slot: int
    first_logits: int
    token_ids: tuple[int, ...]
    num_top: int
    is_end: bool


@dataclass(frozen=True, slots=True)
class BeamRow:
    """One request's beams to extend: `slots[i]` has the logits of beam i, `rules[i]` its rules.

    The `num_candidates` most probable tokens of each are wanted, with `logprobs` alternatives; None for no logprobs.
    """

    slots: tuple[int, ...]
    num_candidates: int
    rules: tuple[LogitsRules | None, ...]
    logprobs: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledBatch:
    """One step. An empty batch is valid and runs nothing.

    `drafted` are all rows that are computed, slots 0, 1, and so on, where any has draft tokens: the next token of each,
    then its drafts, with logits after each of these (`num_scored`), in one run. All are equally long: rows with fewer
    drafts begin with tokens behind their prompts that they computed before, and compute again to the same bits.
    Positions of rejected drafts are overwritten later. `wants_all_logits` asks for the logits of all rows that are fed,
    not only of those that are sampled, scored or extended: for golden cases.
    """

    kv_operations: tuple[KVOperation, ...] = ()
    encodes: tuple[EncodeGroup, ...] = ()
    decode: tuple[DecodeRow, ...] = ()
    prefill_groups: tuple[PrefillGroup, ...] = ()
    prefills: tuple[PrefillChunk, ...] = ()
    drafted: tuple[PrefillChunk, ...] = ()
    scores: tuple[ScoreRow, ...] = ()
    samples: tuple[SampleRow, ...] = ()
    beams: tuple[BeamRow, ...] = ()
    wants_all_logits: bool = False

    @property
    def has_prompts(self) -> bool:
        """Whether it computes sources or prompts."""
        return bool(self.encodes or self.prefill_groups or self.prefills)

    @property
    def num_rows(self) -> int:
        """Rows that compute something."""
        prefilled = {row.slot for group in self.prefill_groups for row in group.rows}
        prefilled.update(chunk.slot for chunk in self.prefills)
        return self.num_decode_rows + len(prefilled)

    @property
    def num_tokens(self) -> int:
        """Tokens that do work: of sources, of prompts, one for each decoding row; draft tokens aside."""
        return self.num_encoder_tokens + self.num_decode_rows + self.num_prefill_tokens

    @property
    def num_padding_tokens(self) -> int:
        """Tokens that fill up a tensor and do no work."""
        groups: tuple[EncodeGroup | PrefillGroup, ...] = (*self.encodes, *self.prefill_groups)
        grouped = sum(group.padded_length - len(row.token_ids) for group in groups for row in group.rows)
        length = max((len(chunk.token_ids) for chunk in self.drafted), default=0)
        repeated = sum(length - chunk.num_scored for chunk in self.drafted)
        return grouped + repeated + sum(row.is_padding for row in self.decode)

    @property
    def num_draft_tokens(self) -> int:
        """Draft tokens to verify."""
        return sum(chunk.num_scored - 1 for chunk in self.drafted)

    @property
    def num_prefill_runs(self) -> int:
        """Graph runs that compute prompts."""
        return len(self.prefill_groups) + len(self.prefills)

    @property
    def num_prefill_tokens(self) -> int:
        """Prompt tokens, padding aside."""
        return sum(length for length, _ in self._prompts())

    @property
    def num_prefill_pairs(self) -> int:
        """Pairs of a query and a key that the mask lets meet for prompt tokens, per layer and head."""
        return sum(causal_pairs(length, start) for length, start in self._prompts())

    @property
    def num_decode_rows(self) -> int:
        """Rows that decode, padding aside."""
        return sum(not row.is_padding for row in self.decode) + len(self.drafted)

    @property
    def num_decode_pairs(self) -> int:
        """Pairs of decoding rows, one token each: with all tokens that a row then has, and with those of its source."""
        drafted = sum(chunk.end - chunk.num_scored + 1 for chunk in self.drafted)
        return drafted + sum(row.position + 1 + row.source_length for row in self.decode if not row.is_padding)

    @property
    def num_encoder_runs(self) -> int:
        """Runs of the encoder."""
        return len(self.encodes)

    @property
    def num_encoder_tokens(self) -> int:
        """Source tokens, padding aside."""
        return sum(len(row.token_ids) for group in self.encodes for row in group.rows)

    @property
    def num_encoder_pairs(self) -> int:
        """Pairs of source tokens, each with all of its source."""
        return sum(len(row.token_ids) ** 2 for group in self.encodes for row in group.rows)

    def _prompts(self) -> list[tuple[int, int]]:
        """Length and start of everything that is prefilled."""
        grouped = [(len(row.token_ids), 0) for group in self.prefill_groups for row in group.rows]
        return grouped + [(len(chunk.token_ids), chunk.start) for chunk in self.prefills]
