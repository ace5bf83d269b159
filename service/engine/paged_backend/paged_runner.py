"""The runner over blocks: a scheduled batch in, logits out, by graphs that take packed tokens.

One run computes prompt chunks and single tokens of any rows together, and skips padding rows. A row has at most one
chunk in a run; its next chunk of the same step is in the next run, so that what a chunk is computed with depends on its
own request alone (batch invariance). Knows nothing of requests or sampling.
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
from service.engine.paged_backend.device_blocks import DeviceBlocks, bind_caches, named_caches
from service.engine.paged_backend.device_logits import DeviceLogits
from service.engine.paged_backend.paged_kv import HostBlocks, PagedKV
from service.engine.sampling.top_logits import TopLogits, are_decided, needs_by_slot
from service.engine.sessions.cuda_provider import require_alive
from service.engine.sessions.device_memory import Array, Bindable, host_array
from service.engine.sessions.session import Binding, GraphSession

Float32 = npt.NDArray[np.float32]
Int32 = npt.NDArray[np.int32]
_NOWHERE = -1


@dataclass(frozen=True, slots=True)
class _Chunk:
    """`token_ids` at positions from `start` on of `slot`; `logits_rows` get the logits after the last of them."""

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
        """Whether it has logits beyond those of the slot's next token."""
        return self.logits_rows != range(self.slot, self.slot + 1)


class PagedRunner:
    """Runs the graphs over blocks of one artifact.

    Args:
        config: the model's sizes.
        kv: the cache, changed by this runner only.
        memory: its blocks.
        decoder: the decoder graph (`model.spec.artifact.paged_decoder_signature`).
        encoder: the encoder graph of an encoder-decoder.
        max_prefill_tokens: prompt tokens of a batch, all of whose logits have memory on this host.
        device: if given, "cpu" or "cuda": decode steps run in buckets that a device can record, and logits stay on the
            device until they are needed. For "cuda" the slots' logits on the host are pinned memory.
        top: if given, receives the highest logits of rows where these decide all that is sampled; `run` leaves the
            logits of these rows undefined.
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
        # Rows of slots, then of prompt tokens.
        self._all_logits = np.zeros(shape, np.float32)
        # Rows of slots only, pinned for a device.
        self._slot_logits: Float32 = self._all_logits
        if device is not None:
            self._slot_logits = host_array((kv.num_slots, config.vocab_size), "float32", device)
        # Whichever of the two this step uses.
        self._logits = self._slot_logits
        # In the order of packed tokens, before they are copied to their rows.
        self._packed_logits = np.zeros(shape, np.float32)
        caches = named_caches(memory.caches)
        self._decoder = bind_caches(decoder, caches)
        # Outputs cannot be unbound: runs whose results stay on the device have their own binding.
        self._decoder_on_device = bind_caches(decoder, caches)
        self._encoder = None if encoder is None else bind_caches(encoder, caches)
        self._on_device: DeviceLogits | None = None
        self._buckets: DecodeBuckets | None = None
        if device is not None:
            self._on_device = DeviceLogits(round_up(kv.num_slots, 1), config.vocab_size, device)
            self._buckets = DecodeBuckets(config, decoder, caches, memory.block_size, self._on_device, device)

    @property
    def num_buckets(self) -> int:
        """Decode buckets in use; 0 without a device."""
        return 0 if self._buckets is None else self._buckets.num_buckets

    def own_weights(self) -> None:
        """See `Runner.own_weights`."""
        for session in self._sessions:
            session.own_weights()

    def run(self, batch: ScheduledBatch) -> Float32:
        """Runs one step; see `Runner.run`. Rows that `top` has are undefined, too.

        Raises:
            DeviceLost: when the step failed and the device does not answer.
        """
        try:
            return self._step(batch)
        except Exception as error:
            require_alive(self._device, error)
            raise

    def warm_up(self) -> None:
        """Runs the largest step, then every decode bucket; does nothing without a device.

        Afterwards the arena has memory for all steps, in blocks that smaller steps fit into, and all buckets are
        recorded. Writes to the scratch block only. Must be called by the stepping thread, as CUDA graphs are recorded
        per thread.

        Raises:
            GraphError: when a run fails.
            DeviceLost: as `run`.
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
        self._logits = self._all_logits if any(chunk.num_scored for chunk in batch.prefills) else self._slot_logits
        needs = needs_by_slot(batch) if self._takes_highest and not batch.wants_all_logits else None
        for operation in batch.kv_operations:
            self.kv.apply(operation)
        for group in batch.encodes:
            self._encode(group)
        for wave in _waves(self._chunks(batch)):
            self._run(wave, needs)
        return self._logits

    def _chunks(self, batch: ScheduledBatch) -> Iterator[_Chunk]:
        """All chunks of a batch, in its order, and the rows of their logits."""
        for slot, row in enumerate(batch.decode):
            if not row.is_padding:
                yield _Chunk(slot, row.position, (row.token_id,), row.source_length, range(slot, slot + 1))
        for group in batch.prefill_groups:
            for beginning in group.rows:
                slot = beginning.slot
                yield _Chunk(slot, 0, beginning.token_ids, 0, range(slot, slot + 1))
        next_logits = self.kv.num_slots
        for chunk in batch.prefills:
            rows = range(chunk.slot, chunk.slot + 1)
            if chunk.num_scored:
                rows = range(next_logits, next_logits + chunk.num_scored)
                next_logits = rows.stop
            yield _Chunk(chunk.slot, chunk.start, chunk.token_ids, 0, rows)

    def _warm_up_prompts(self) -> None:
        """Runs the most prompt tokens of a step and one token in each other row, all at the context's end."""
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
        """Encodes as many full-length sources as a step may have, at least one."""
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

    def _run(self, chunks: Sequence[_Chunk], needs: Mapping[int, int | None] | None) -> None:
        """Computes chunks of different rows together; `needs` is how many top logits slots need, None: all of all."""
        for chunk in chunks:
            self.kv.reserve(chunk.slot, chunk.start, chunk.stop)
        inputs = self._inputs(chunks)
        self.memory.flush()
        rows = [row for chunk in chunks for row in chunk.logits_rows]
        if self._on_device is None or len(rows) > self._on_device.max_rows:
            logits = self._packed_logits[: len(rows)]
            _rerun(self._decoder, inputs, {"logits": logits})
            self._logits[rows] = logits
            self._note_whole(chunks)
            return
        if self._buckets is not None and _are_single(chunks):
            self._buckets.run(inputs)
        else:
            _rerun(self._decoder_on_device, inputs, self._on_device.outputs(len(rows)))
        if needs is None or not self._fetch_highest(chunks, needs, self._on_device):
            self._fetch(rows, self._on_device)
            self._note_whole(chunks)

    def _inputs(self, chunks: Sequence[_Chunk]) -> dict[str, Array]:
        """The graph's inputs for these chunks, without caches."""
        counts, stops = [len(chunk.token_ids) for chunk in chunks], [chunk.stop for chunk in chunks]
        past = np.array([chunk.start for chunk in chunks], np.int32)
        if _are_single(chunks):
            # The hot path: no array per row.
            wanted = np.arange(len(chunks))
            ends = wanted + 1
            positions = past.astype(np.int64)
            places = np.array([self.kv.place(chunk.slot, chunk.start) for chunk in chunks], np.int32)
        else:
            ends = np.cumsum(counts, dtype=np.int64)
            # Packed indices of the tokens whose logits are wanted.
            spans = [np.arange(end - len(chunk.logits_rows), end) for chunk, end in zip(chunks, ends, strict=True)]
            wanted = np.concatenate(spans)
            positions = np.concatenate([np.arange(chunk.start, chunk.stop, dtype=np.int64) for chunk in chunks])
            places = np.concatenate([self.kv.places(chunk.slot, chunk.start, chunk.stop) for chunk in chunks])
        inputs: dict[str, Array] = {
            "input_ids": np.array([token_id for chunk in chunks for token_id in chunk.token_ids], np.int64),
            "cumulative_sequence_length": np.concatenate(([0], ends)).astype(np.int32),
            "past_seqlens": past,
            "block_table": _tables(chunks, self.kv.table, stops),
            "slot_mapping": places,
            "attention_metadata": _bounds(counts, stops),
            "logits_indices": wanted,
        }
        if self._config.positions is not Positions.ROTARY:
            inputs["position_ids"] = positions
        if self._config.is_encoder_decoder:
            lengths = [chunk.source_length for chunk in chunks]
            inputs["source_past_seqlens"] = np.subtract(lengths, counts, dtype=np.int32)
            inputs["source_block_table"] = _tables(chunks, self.kv.source_table, lengths)
            inputs["source_attention_metadata"] = _bounds(counts, lengths)
        return inputs

    def _fetch_highest(self, chunks: Sequence[_Chunk], needs: Mapping[int, int | None], found: DeviceLogits) -> bool:
        """Fetches the top logits of rows that are sampled, if they suffice for all; returns whether they do."""
        if any(chunk.is_scored for chunk in chunks):
            return False
        wanted = [row for row, chunk in enumerate(chunks) if chunk.slot in needs]
        slots = [chunks[row].slot for row in wanted]
        needed = [needs[slot] or found.num_candidates + 1 for slot in slots]
        if not wanted:
            return True
        if max(needed) > found.num_candidates:
            return False
        token_ids, values, normalizers = found.read_highest(len(chunks))
        if not are_decided(needed, values[wanted], normalizers[wanted], self._config.vocab_size):
            return False
        self._top.put(slots, token_ids[wanted], values[wanted])
        return True

    def _fetch(self, rows: list[int], found: DeviceLogits) -> None:
        """Fetches whole logits to their rows."""
        if rows == list(range(len(rows))):
            found.read(self._logits[: len(rows)])
            return
        logits = self._packed_logits[: len(rows)]
        found.read(logits)
        self._logits[rows] = logits

    def _note_whole(self, chunks: Sequence[_Chunk]) -> None:
        """Copies the logits after the last token of scored chunks to the slot's row; whole rows replace `top`."""
        for chunk in chunks:
            self._top.discard(chunk.slot)
            if chunk.is_scored:
                self._logits[chunk.slot] = self._logits[chunk.logits_rows[-1]]


def _waves(chunks: Iterator[_Chunk]) -> list[list[_Chunk]]:
    """Splits chunks into runs with at most one chunk of each row."""
    waves: list[list[_Chunk]] = []
    num_before: dict[int, int] = defaultdict(int)
    for chunk in chunks:
        if num_before[chunk.slot] == len(waves):
            waves.append([])
        waves[num_before[chunk.slot]].append(chunk)
        num_before[chunk.slot] += 1
    return waves


def _are_single(chunks: Sequence[_Chunk]) -> bool:
    """Whether each is one token: a decode step."""
    return all(len(chunk.token_ids) == 1 for chunk in chunks)


def _tables(chunks: Sequence[_Chunk], find: Callable[[int, int], Sequence[int]], lengths: Sequence[int]) -> Int32:
    """Block tables of the rows' first tokens, `[B, M]`, padded with the scratch block."""
    found = [find(chunk.slot, length) for chunk, length in zip(chunks, lengths, strict=True)]
    tables = np.full((len(found), max(map(len, found))), SCRATCH, np.int32)
    for row, blocks in zip(tables, found, strict=True):
        row[: len(blocks)] = blocks
    return tables


def _bounds(num_queries: Sequence[int], num_keys: Sequence[int]) -> Int32:
    """Most queries of a row, most keys of a row, and a lower bound for the latter."""
    return np.array([max(num_queries), max(num_keys), max(num_keys)], np.int32)


def _rerun(binding: Binding, inputs: Mapping[str, Bindable], outputs: Mapping[str, Bindable]) -> None:
    """Rebinds inputs and outputs, then runs."""
    binding.bind_inputs(inputs)
    binding.bind_outputs(outputs)
    binding.run()
