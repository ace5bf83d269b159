"""A scheduled batch in, logits out: the graphs over blocks of an artifact.

A `Runner` beside `OrtRunner`, for graphs that take packed tokens (`model.spec.artifact.paged_decoder_signature`). One
run computes chunks of prompts, their beginnings and single tokens of any rows beside each other, and nothing for rows
that a batch has in it as padding. A row is in a run with one piece: what follows in the same step follows in the next
run, so that what a piece is computed with depends on its own request alone.

Knows nothing of requests, of sampling, or of why a batch looks as it does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from model.spec.config import ModelConfig, Positions
from service.engine.batch import EncodeGroup, ScheduledBatch
from service.engine.kv.blocks import SCRATCH
from service.engine.kv.decode_sizes import round_up
from service.engine.paged_backend.decode_buckets import DecodeBuckets
from service.engine.paged_backend.device_blocks import DeviceBlocks
from service.engine.paged_backend.device_logits import DeviceLogits
from service.engine.paged_backend.paged_kv import HostBlocks, PagedKV
from service.engine.sampling.top_logits import TopLogits, are_decided, needs_by_slot
from service.engine.sessions.cuda_provider import require_alive
from service.engine.sessions.device_memory import Array, Bindable, DeviceTensor, host_array
from service.engine.sessions.session import Binding, GraphSession

Float32 = npt.NDArray[np.float32]
Int32 = npt.NDArray[np.int32]
_NOWHERE = -1


@dataclass(frozen=True, slots=True)
class _Piece:
    """`token_ids` go to positions from `start` on of `slot`; `logits_rows` get the logits after the last of them."""

    slot: int
    start: int
    token_ids: tuple[int, ...]
    source_length: int
    logits_rows: range

    @property
    def stop(self) -> int:
        return self.start + len(self.token_ids)

    @property
    def is_scored(self) -> bool:
        """Whether its logits are wanted for more than the slot's next token."""
        return self.logits_rows != range(self.slot, self.slot + 1)


class PagedRunner:
    """Runs the graphs over blocks of one artifact.

    Args:
        config: the model's sizes.
        kv: the cache that this runner alone changes.
        memory: its blocks.
        decoder: the decoder graph (`model.spec.artifact.paged_decoder_signature`).
        encoder: the encoder graph of an encoder-decoder, None for a decoder-only model.
        max_prefill_tokens: how many tokens of prompts a batch has at most. Room for the logits of all of them is
            reserved on this host.
        device: given, "cpu" or "cuda", steps without prompts run in sizes that a device can record, and logits stay
            there until they are wanted. For "cuda" slots have their logits in memory that cannot be lent to anybody.
        top: given, is told what is singled out of rows where that decides all that is drawn from them, and the device
            has them; `run` leaves their logits undefined.
    """

    def __init__(
        self,
        config: ModelConfig,
        kv: PagedKV,
        memory: HostBlocks | DeviceBlocks,
        decoder: GraphSession,
        encoder: GraphSession | None,
        max_prefill_tokens: int = 0,
        device: str | None = None,
        top: TopLogits | None = None,
    ) -> None:
        self.kv = kv
        self.memory = memory
        self._sessions = [session for session in (decoder, encoder) if session is not None]
        self._config = config
        self._device = device or "cpu"
        self._max_prefill_tokens = max_prefill_tokens
        self._top = TopLogits() if top is None else top
        self._takes_highest = top is not None
        shape = (kv.num_slots + max_prefill_tokens, config.vocab_size)
        # Of slots, and of prompts' tokens behind them.
        self._all_logits = np.zeros(shape, np.float32)
        # Of slots alone, where a device reaches them without a detour.
        self._slot_logits: Float32 = self._all_logits
        if device is not None:
            self._slot_logits = host_array((kv.num_slots, config.vocab_size), "float32", device)
        # Which of the two this step's go to.
        self._logits = self._slot_logits
        # In the order of packed tokens, from where they go to their rows.
        self._packed_logits = np.zeros(shape, np.float32)
        names = [f"{part}_cache_{layer}" for layer in range(config.num_layers) for part in ("key", "value")]
        caches: dict[str, Array | DeviceTensor] = dict(zip(names, memory.caches, strict=True))
        self._decoder = _bind_caches(caches, decoder)
        # An output once tied stays tied: runs that leave theirs on a device have a binding of their own.
        self._decoder_on_device = _bind_caches(caches, decoder)
        self._encoder = None if encoder is None else _bind_caches(caches, encoder)
        self._on_device: DeviceLogits | None = None
        self._buckets: DecodeBuckets | None = None
        if device is not None:
            self._on_device = DeviceLogits(round_up(kv.num_slots, 1), config.vocab_size, device)
            self._buckets = DecodeBuckets(config, decoder, caches, memory.block_size, self._on_device, device)

    @property
    def num_buckets(self) -> int:
        """Sizes in which steps without prompts have run on a device; 0 where they run in their own."""
        return 0 if self._buckets is None else self._buckets.num_buckets

    def own_weights(self) -> None:
        """See `Runner.own_weights`."""
        for session in self._sessions:
            session.own_weights()

    def run(self, batch: ScheduledBatch) -> Float32:
        """Runs one step; see `Runner.run`. Rows that `top` knows are undefined, too.

        Raises:
            DeviceLost: when it failed and the device computes nothing any more.
        """
        try:
            return self._step(batch)
        except Exception as error:
            require_alive(self._device, error)
            raise

    def warm_up(self) -> None:
        """Runs the largest step there can be, then every size that a device records; does nothing where none is given.

        Memory for all steps is there afterwards, in pieces that the smaller ones fit into, and none waits for a
        recording. Nothing is written but to the block that is nobody's. To be called by the thread that steps: a device
        records for the thread that asks.

        Raises:
            GraphError: when a run fails.
            DeviceLost: as `run` does.
        """
        if self._buckets is None:
            return
        try:
            if self._encoder is None:
                self._warm_up_prompts()
            else:
                self._warm_up_sources()
            self._buckets.warm_up(self.kv.num_slots)
        except Exception as error:
            require_alive(self._device, error)
            raise

    def _step(self, batch: ScheduledBatch) -> Float32:
        self._top.clear()
        self._logits = self._all_logits if any(chunk.num_scored for chunk in batch.chunks) else self._slot_logits
        needs = needs_by_slot(batch) if self._takes_highest and not batch.wants_all_logits else None
        for operation in batch.kv_operations:
            self.kv.apply(operation)
        for group in batch.encodes:
            self._encode(group)
        for wave in _waves(self._pieces(batch)):
            self._run(wave, needs)
        return self._logits

    def _pieces(self, batch: ScheduledBatch) -> Iterator[_Piece]:
        """All that a batch computes, in its order, and where the logits go."""
        for slot, row in enumerate(batch.decode):
            if not row.is_padding:
                yield _Piece(slot, row.position, (row.token_id,), row.source_length, range(slot, slot + 1))
        for group in batch.prefill_groups:
            for beginning in group.rows:
                slot = beginning.slot
                yield _Piece(slot, 0, beginning.token_ids, 0, range(slot, slot + 1))
        next_logits = self.kv.num_slots
        for chunk in batch.chunks:
            rows = range(chunk.slot, chunk.slot + 1)
            if chunk.num_scored:
                rows = range(next_logits, next_logits + chunk.num_scored)
                next_logits = rows.stop
            yield _Piece(chunk.slot, chunk.start, chunk.token_ids, 0, rows)

    def _warm_up_prompts(self) -> None:
        """As many tokens of prompts as a step may have and a token in each row besides, at a full context's end."""
        context, left = self._config.context, self._max_prefill_tokens
        counts: list[int] = []
        for _ in range(self.kv.num_slots):
            counts.append(max(1, min(context, left)))
            left -= counts[-1]
        ends = np.cumsum(counts)
        num_tokens = int(ends[-1])
        width = -(-context // self.memory.block_size)
        inputs: dict[str, Array] = {
            "input_ids": np.zeros(num_tokens, np.int64),
            "cumulative_sequence_length": np.concatenate(([0], ends)).astype(np.int32),
            "past_seqlens": np.subtract(context, counts, dtype=np.int32),
            "block_table": np.full((len(counts), width), SCRATCH, np.int32),
            "slot_mapping": np.full(num_tokens, _NOWHERE, np.int32),
            "attention_metadata": _bounds(counts, [context]),
            "logits_indices": np.arange(num_tokens),
        }
        if self._config.positions is not Positions.ROTARY:
            inputs["position_ids"] = np.concatenate([np.arange(context - count, context) for count in counts])
        _rerun(self._decoder, inputs, {"logits": self._packed_logits[:num_tokens]})

    def _warm_up_sources(self) -> None:
        """As many sources of full length as a step may have, at least one."""
        length = self._config.source_context
        num_rows = min(self.kv.num_slots, max(1, self._max_prefill_tokens // length))
        shape = (num_rows, length)
        self._run_encoder(
            np.zeros(shape, np.int64), np.full(num_rows, length, np.int32), np.full(shape, _NOWHERE, np.int32)
        )

    def _encode(self, group: EncodeGroup) -> None:
        shape = (len(group.rows), group.padded_length)
        source_ids, slot_mapping = np.zeros(shape, np.int64), np.full(shape, _NOWHERE, np.int32)
        for ids, places, row in zip(source_ids, slot_mapping, group.rows, strict=True):
            length = len(row.token_ids)
            ids[:length] = row.token_ids
            places[:length] = self.kv.reserve_source(row.slots, length)
        source_lengths = np.array([len(row.token_ids) for row in group.rows], np.int32)
        self.memory.flush()
        self._run_encoder(source_ids, source_lengths, slot_mapping)

    def _run_encoder(self, source_ids: Array, source_lengths: Array, slot_mapping: Array) -> None:
        if self._encoder is None:
            raise ValueError("a decoder-only model encodes nothing")
        self._encoder.bind_inputs(
            {"source_ids": source_ids, "source_lengths": source_lengths, "slot_mapping": slot_mapping}
        )
        self._encoder.run()

    def _run(self, pieces: Sequence[_Piece], needs: Mapping[int, int | None] | None) -> None:
        """Computes pieces of different rows together; `needs` is what slots need of their logits, None: all of them."""
        for piece in pieces:
            self.kv.reserve(piece.slot, piece.start, piece.stop)
        inputs = self._inputs(pieces)
        self.memory.flush()
        rows = [row for piece in pieces for row in piece.logits_rows]
        if self._on_device is None or len(rows) > self._on_device.max_rows:
            logits = self._packed_logits[: len(rows)]
            _rerun(self._decoder, inputs, {"logits": logits})
            self._logits[rows] = logits
            self._note_whole(pieces)
            return
        if self._buckets is not None and _are_single(pieces):
            self._buckets.run(inputs)
        else:
            _rerun(self._decoder_on_device, inputs, self._on_device.outputs(len(rows)))
        if needs is None or not self._fetch_highest(pieces, needs, self._on_device):
            self._fetch(rows, self._on_device)
            self._note_whole(pieces)

    def _inputs(self, pieces: Sequence[_Piece]) -> dict[str, Array]:
        """What the graph is given for them, caches aside."""
        counts, stops = [len(piece.token_ids) for piece in pieces], [piece.stop for piece in pieces]
        past = np.array([piece.start for piece in pieces], np.int32)
        if _are_single(pieces):
            # The step that is hurried most: no array for each of its rows.
            wanted = np.arange(len(pieces))
            ends = wanted + 1
            positions = past.astype(np.int64)
            places = np.array([self.kv.place(piece.slot, piece.start) for piece in pieces], np.int32)
        else:
            ends = np.cumsum(counts, dtype=np.int64)
            # Of each piece the last tokens whose logits are wanted, by their place among all that are packed.
            spans = [np.arange(end - len(piece.logits_rows), end) for piece, end in zip(pieces, ends, strict=True)]
            wanted = np.concatenate(spans)
            positions = np.concatenate([np.arange(piece.start, piece.stop, dtype=np.int64) for piece in pieces])
            places = np.concatenate([self.kv.places(piece.slot, piece.start, piece.stop) for piece in pieces])
        inputs: dict[str, Array] = {
            "input_ids": np.array([token_id for piece in pieces for token_id in piece.token_ids], np.int64),
            "cumulative_sequence_length": np.concatenate(([0], ends)).astype(np.int32),
            "past_seqlens": past,
            "block_table": _tables(pieces, self.kv.table, stops),
            "slot_mapping": places,
            "attention_metadata": _bounds(counts, stops),
            "logits_indices": wanted,
        }
        if self._config.positions is not Positions.ROTARY:
            inputs["position_ids"] = positions
        if self._config.is_encoder_decoder:
            lengths = [piece.source_length for piece in pieces]
            inputs["source_past_seqlens"] = np.subtract(lengths, counts, dtype=np.int32)
            inputs["source_block_table"] = _tables(pieces, self.kv.source_table, lengths)
            inputs["source_attention_metadata"] = _bounds(counts, lengths)
        return inputs

    def _fetch_highest(self, pieces: Sequence[_Piece], needs: Mapping[int, int | None], found: DeviceLogits) -> bool:
        """Fetches what is singled out of rows that somebody wants, if that is all that they need; whether it is."""
        if any(piece.is_scored for piece in pieces):
            return False
        wanted = [row for row, piece in enumerate(pieces) if piece.slot in needs]
        slots = [pieces[row].slot for row in wanted]
        needed = [needs[slot] or found.num_candidates + 1 for slot in slots]
        if not wanted:
            return True
        if max(needed) > found.num_candidates:
            return False
        token_ids, values, normalizers = found.read_highest(len(pieces))
        if not are_decided(needed, values[wanted], normalizers[wanted], self._config.vocab_size):
            return False
        self._top.put(slots, token_ids[wanted], values[wanted])
        return True

    def _fetch(self, rows: list[int], found: DeviceLogits) -> None:
        """Fetches whole rows to their places."""
        if rows == list(range(len(rows))):
            found.read(self._logits[: len(rows)])
            return
        logits = self._packed_logits[: len(rows)]
        found.read(logits)
        self._logits[rows] = logits

    def _note_whole(self, pieces: Sequence[_Piece]) -> None:
        """The logits of pieces are in their rows: those after the last token belong to the slot, too."""
        for piece in pieces:
            self._top.discard(piece.slot)
            if piece.is_scored:
                self._logits[piece.slot] = self._logits[piece.logits_rows[-1]]


def _waves(pieces: Iterator[_Piece]) -> list[list[_Piece]]:
    """Pieces by how many of their row go before them."""
    waves: list[list[_Piece]] = []
    num_before: dict[int, int] = defaultdict(int)
    for piece in pieces:
        if num_before[piece.slot] == len(waves):
            waves.append([])
        waves[num_before[piece.slot]].append(piece)
        num_before[piece.slot] += 1
    return waves


def _are_single(pieces: Sequence[_Piece]) -> bool:
    """Whether each is one token: a step without prompts."""
    return all(len(piece.token_ids) == 1 for piece in pieces)


def _tables(pieces: Sequence[_Piece], find: Callable[[int, int], Sequence[int]], lengths: Sequence[int]) -> Int32:
    """The blocks under each row's first tokens, `[B, M]`, as wide as the longest; what others lack is nobody's."""
    found = [find(piece.slot, length) for piece, length in zip(pieces, lengths, strict=True)]
    tables = np.full((len(found), max(map(len, found))), SCRATCH, np.int32)
    for row, blocks in zip(tables, found, strict=True):
        row[: len(blocks)] = blocks
    return tables


def _bounds(num_queries: Sequence[int], num_keys: Sequence[int]) -> Int32:
    """The most queries a row has, the most keys, and as many at least as some row has keys."""
    return np.array([max(num_queries), max(num_keys), max(num_keys)], np.int32)


def _rerun(binding: Binding, inputs: Mapping[str, Bindable], outputs: Mapping[str, Bindable]) -> None:
    """Runs with other tokens than the last time, in its own sizes."""
    binding.bind_inputs(inputs)
    binding.bind_outputs(outputs)
    binding.run()


def _bind_caches(caches: Mapping[str, Array | DeviceTensor], session: GraphSession) -> Binding:
    """A graph tied to all blocks, in place; what is missing are the inputs and outputs of each run."""
    return session.bind(caches, {name.replace("_cache_", "_cache_out_"): array for name, array in caches.items()})
