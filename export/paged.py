"""The torch modules that become the graphs over blocks: packed tokens of all rows, K/V found through tables.

    decoder, to itself      PagedAttention (`com.microsoft`, CUDA): rotates, writes to the pool in place, attends
    decoder, to the source  PagedAttention again, bidirectional over the source's blocks, writing nothing
    encoder                 Attention (opset 24) with a length for each row; then ScatterND writes its K/V to the pool,
                            in place where input and output are bound to one buffer
    copies                  Gather and ScatterND, from slot to slot in the pool

PagedAttention has kernels for CUDA alone. `STAND_IN` computes the same with standard operators on any provider. It
tests everything around the operator without a GPU and is slow: every query is scored against every row's keys, and a
mask keeps the rows apart.

Cross-attention by the same operator needs no second kind of memory, and its cost follows the source's length. It
requires FlashAttention, the operator's only bidirectional kernel. A step may not have more queries than the source has
tokens, because the operator counts queries into the length of what they attend to.

After the last layer's attention only tokens with requested logits are computed. The graph returns what sampling needs
(`model.spec.artifact.paged_decoder_signature`).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.onnx.ops import symbolic, symbolic_multi_out

from export.backend import Buffers, Feeds, Graph
from export.dot import rotary_embedding
from model.nn.attention import CrossAttention, SelfAttention
from model.nn.positions import rotate
from model.nn.transformer import Decoder, EncoderDecoder
from model.spec.artifact import (
    KVPrecision,
    paged_decoder_signature,
    paged_encoder_signature,
    paged_move_signature,
)
from model.spec.config import ModelConfig

DTYPES = {KVPrecision.FP32: torch.float32, KVPrecision.FP16: torch.float16, KVPrecision.BF16: torch.bfloat16}
"""PyTorch's type of the weights of a graph over blocks, which is that of its K/V."""


class PagedAttention(Protocol):
    """The attention of one step over packed tokens; what all layers share is computed once, in the constructor."""

    def attend_self(self, module: SelfAttention, x: Tensor, cache: Buffers) -> tuple[Tensor, Buffers]:
        """New tokens `[T, d]` and the pool → joined heads `[T, H * D]` and the pool with their K/V written."""
        ...

    def attend_cross(self, module: CrossAttention, x: Tensor, cache: Buffers) -> Tensor:
        """The same over the sources' blocks, without writing to them."""
        ...


MakePagedAttention = Callable[[Decoder, Feeds], PagedAttention]


class PagedDecoderGraph(Graph):
    """One step over packed tokens: chunks of prompts and single tokens of any rows, in any mix.

    `model` is in the graph's precision; `attention` is `CONTRIB` or `STAND_IN`.
    """

    def __init__(self, model: Decoder, attention: MakePagedAttention, precision: KVPrecision, block_size: int) -> None:
        super().__init__(paged_decoder_signature(model.config, precision, block_size))
        self.model = model
        self.attention = attention

    def compute(self, feeds: Feeds) -> Mapping[str, Tensor]:
        """See `Graph`."""
        fetches: dict[str, Tensor] = {}
        hidden = self.model.embed(feeds["input_ids"], feeds.get("position_ids"))
        attention = self.attention(self.model, feeds)
        config = self.model.config

        def wanted(x: Tensor) -> Tensor:
            return x.index_select(0, feeds["logits_indices"])

        for index, layer in enumerate(self.model.layers):
            pool = _Pool(attention, index, feeds, fetches)
            attend_cross = pool.attend_cross if config.is_encoder_decoder else None
            select = wanted if index + 1 == config.num_layers else None
            hidden = layer(hidden, pool.attend_self, attend_cross, select)
        fetches |= _candidates(self.model.unembed(self.model.final_norm(hidden)).float(), self.outputs[1].shape[1])
        return fetches


@dataclass(frozen=True, slots=True)
class _Pool:
    """One layer's caches: which inputs its attention reads, and which outputs they become."""

    attention: PagedAttention
    index: int
    feeds: Feeds
    fetches: dict[str, Tensor]

    def attend_self(self, module: SelfAttention, x: Tensor) -> Tensor:
        cache = self.feeds[f"key_cache_{self.index}"], self.feeds[f"value_cache_{self.index}"]
        y, (key, value) = self.attention.attend_self(module, x, cache)
        self.fetches[f"key_cache_out_{self.index}"], self.fetches[f"value_cache_out_{self.index}"] = key, value
        return y

    def attend_cross(self, module: CrossAttention, x: Tensor) -> Tensor:
        # The previous operator's output is the same buffer; reading it orders the two.
        cache = self.fetches[f"key_cache_out_{self.index}"], self.fetches[f"value_cache_out_{self.index}"]
        return self.attention.attend_cross(module, x, cache)


class PagedEncoderGraph(Graph):
    """The whole encoder; writes every decoder layer's keys and values of its memory to the pool."""

    def __init__(self, model: EncoderDecoder, precision: KVPrecision, block_size: int) -> None:
        super().__init__(paged_encoder_signature(model.config, precision, block_size))
        self.model = model

    def compute(self, feeds: Feeds) -> Mapping[str, Tensor]:
        """See `Graph`."""
        encoder = self.model.encoder
        attention = EncoderAttention(self.model, feeds)
        memory = encoder.embedding(feeds["source_ids"])
        for layer in encoder.layers:
            memory = layer(memory, attention.attend)
        memory = encoder.final_norm(memory)
        places = feeds["slot_mapping"].reshape(-1)
        fetches: dict[str, Tensor] = {}
        readers = (module for module in self.model.layers.modules() if isinstance(module, CrossAttention))
        for index, reader in enumerate(readers):
            for part, tensor in zip(("key", "value"), reader.project_memory(memory), strict=True):
                values = tensor.transpose(1, 2).flatten(0, 1)
                fetches[f"{part}_cache_out_{index}"] = scatter(feeds[f"{part}_cache_{index}"], places, values)
        return fetches


class EncoderAttention:
    """Encoder self-attention by ONNX `Attention` with a length for each row; an `export.backend.EncoderAttention`.

    Over slots, an extra dimension of the heads carries a penalty, which 16 bits cannot represent.
    """

    def __init__(self, model: EncoderDecoder, feeds: Feeds) -> None:
        self._config = model.config
        self._rotary = model.encoder.rotary
        self._lengths = feeds["source_lengths"].long()

    def attend(self, module: SelfAttention, x: Tensor) -> Tensor:
        """See `export.backend.EncoderAttention`."""
        config = self._config
        q, k, v = module.unpack(module.project(x))
        if self._rotary is not None:
            q = rotary_embedding(q, self._rotary, config.num_heads)
            k = rotary_embedding(k, self._rotary, config.num_kv_heads)
        (y,) = symbolic_multi_out(
            "Attention",
            (q, k, v, None, None, None, self._lengths),
            {"q_num_heads": config.num_heads, "kv_num_heads": config.num_kv_heads},
            dtypes=(q.dtype,),
            shapes=(q.shape,),
            version=24,
        )
        return y


class MoveGraph(Graph):
    """Copies tokens' K/V from slot to slot in the pool: no weights, no arithmetic."""

    def __init__(self, config: ModelConfig, precision: KVPrecision, block_size: int) -> None:
        super().__init__(paged_move_signature(config, precision, block_size))

    def compute(self, feeds: Feeds) -> Mapping[str, Tensor]:
        """See `Graph`."""
        caches = {name: cache for name, cache in feeds.items() if "_cache_" in name}
        sources, targets = feeds["sources"], feeds["targets"]
        return {
            name.replace("_cache_", "_cache_out_"): scatter(
                cache, targets, cache.flatten(0, 1).index_select(0, sources)
            )
            for name, cache in caches.items()
        }


class ContribAttention:
    """`com.microsoft.PagedAttention`; a `PagedAttention`."""

    def __init__(self, model: Decoder, feeds: Feeds) -> None:
        self._config = model.config
        self._rotary = model.rotary
        self._feeds = feeds
        # Derived without a Shape node, which runs on the CPU and complicates capture as a CUDA graph.
        self._nowhere = feeds["slot_mapping"] * 0 - 1

    def attend_self(self, module: SelfAttention, x: Tensor, cache: Buffers) -> tuple[Tensor, Buffers]:
        """See `PagedAttention`."""
        packed = module.project(x)
        operands = (packed, None, None) if module.query_norm is None else module.unpack(packed)
        feeds, rotary = self._feeds, self._rotary
        tables: list[Tensor | None] = [
            feeds["past_seqlens"],
            feeds["block_table"],
            None if rotary is None else rotary.cos,
            None if rotary is None else rotary.sin,
            feeds["slot_mapping"],
        ]
        attributes = {"do_rotary": int(rotary is not None)}
        if module.window:
            attributes["local_window_size"] = module.window
        y, key, value = self._call(operands, cache, tables, feeds["attention_metadata"], attributes, num_outputs=3)
        return y, (key, value)

    def attend_cross(self, module: CrossAttention, x: Tensor, cache: Buffers) -> Tensor:
        """See `PagedAttention`."""
        query = module.project_query(x)
        # The operator requires new keys and values but writes them nowhere: any tensor of that shape will do.
        unused = query[:, : self._config.num_kv_heads * self._config.head_dim]
        feeds = self._feeds
        past, table = feeds["source_past_seqlens"], feeds["source_block_table"]
        tables: list[Tensor | None] = [past, table, None, None, self._nowhere]
        metadata = feeds["source_attention_metadata"]
        (y,) = self._call((query, unused, unused), cache, tables, metadata, {"is_causal": 0}, num_outputs=1)
        return y

    def _call(
        self,
        operands: tuple[Tensor, Tensor | None, Tensor | None],
        cache: Buffers,
        tables: list[Tensor | None],
        metadata: Tensor,
        attributes: dict[str, Any],
        num_outputs: int,
    ) -> tuple[Tensor, ...]:
        """The node. `tables` are inputs 6 to 10: past lengths, block table, cosines, sines, slots to write to."""
        config, query = self._config, operands[0]
        cumulative = self._feeds["cumulative_sequence_length"]
        # The inputs left out are sinks, norm weights and scales of quantized caches.
        inputs = [*operands, *cache, cumulative, *tables, None, None, None, None, None, metadata]
        shapes = ((query.shape[0], config.num_heads * config.head_dim), cache[0].shape, cache[1].shape)
        return tuple(
            symbolic_multi_out(
                "com.microsoft::PagedAttention",
                inputs,
                {"num_heads": config.num_heads, "kv_num_heads": config.num_kv_heads, **attributes},
                dtypes=(query.dtype, cache[0].dtype, cache[1].dtype)[:num_outputs],
                shapes=shapes[:num_outputs],
                version=1,
            )
        )


class StandInAttention:
    """The same with standard operators in float32; a `PagedAttention`.

    Past a row's length, blocks hold stale values, possibly NaN. A mask removes them from the scores, zeros from the
    weighted sum.
    """

    def __init__(self, model: Decoder, feeds: Feeds) -> None:
        self._config = model.config
        self._rotary = model.rotary
        self._places = feeds["slot_mapping"]
        past = feeds["past_seqlens"].long()
        cumulative = feeds["cumulative_sequence_length"].long()
        rows = torch.arange(past.shape[0])
        tokens = torch.arange(feeds["input_ids"].shape[0])
        ends = cumulative.index_select(0, rows + 1)
        is_behind = tokens[:, None] >= ends
        row_of_token = is_behind.long().sum(1)
        self._is_own = row_of_token[:, None] == rows
        starts = cumulative.index_select(0, row_of_token)
        self._positions = past.index_select(0, row_of_token) + tokens - starts
        num_fed = ends - cumulative.index_select(0, rows)
        self._own = _Keys(feeds["block_table"], past + num_fed)
        if model.config.is_encoder_decoder:
            self._source = _Keys(feeds["source_block_table"], feeds["source_past_seqlens"].long() + num_fed)

    def attend_self(self, module: SelfAttention, x: Tensor, cache: Buffers) -> tuple[Tensor, Buffers]:
        """See `PagedAttention`."""
        config = self._config
        q, k, v = (
            part.reshape(part.shape[0], -1, config.head_dim).float() for part in module.unpack(module.project(x))
        )
        if self._rotary is not None:
            cos, sin = (
                F.embedding(self._positions, table.float())[:, None] for table in (self._rotary.cos, self._rotary.sin)
            )
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        key = scatter(cache[0], self._places, k.to(cache[0].dtype))
        value = scatter(cache[1], self._places, v.to(cache[1].dtype))
        distances = self._positions[:, None] - torch.arange(self._own.capacity(key))
        is_visible = distances >= 0
        if module.window:
            is_visible = is_visible & (distances < module.window)
        y = self._attend(q, (key, value), self._own, is_visible)
        return y.to(x.dtype), (key, value)

    def attend_cross(self, module: CrossAttention, x: Tensor, cache: Buffers) -> Tensor:
        """See `PagedAttention`."""
        q = module.project_query(x).reshape(x.shape[0], -1, self._config.head_dim).float()
        is_visible = torch.ones(x.shape[0], self._source.capacity(cache[0]), dtype=torch.bool)
        return self._attend(q, cache, self._source, is_visible).to(x.dtype)

    def _attend(self, q: Tensor, cache: Buffers, keys: _Keys, is_visible: Tensor) -> Tensor:
        """Queries `[T, H, D]` to the keys that `keys` finds, where `is_visible` `[T, L]` → `[T, H * D]`."""
        config, num_tokens = self._config, q.shape[0]
        is_written = keys.is_written(cache[0])
        mask = (self._is_own[:, :, None] & is_visible[:, None] & is_written).reshape(num_tokens, -1)
        key, value = (keys.gather(blocks) for blocks in cache)
        value = torch.where(is_written.reshape(-1)[:, None, None], value, 0.0)
        grouped = q.reshape(num_tokens, config.num_kv_heads, -1, config.head_dim).permute(1, 2, 0, 3)
        scores = grouped @ key.permute(1, 2, 0)[:, None] * (1.0 / math.sqrt(config.head_dim))
        weights = scores.masked_fill(~mask, float("-inf")).softmax(dim=-1)
        y = weights @ value.permute(1, 0, 2)[:, None]
        return y.permute(2, 0, 1, 3).reshape(num_tokens, config.num_heads * config.head_dim)


@dataclass(frozen=True, slots=True)
class _Keys:
    """Which blocks hold the keys of which row, `[B, M] int32`, and how many of them, `[B] int64`."""

    table: Tensor
    lengths: Tensor

    def capacity(self, blocks: Tensor) -> int:
        """How many keys a row's blocks can hold."""
        return self.table.shape[1] * blocks.shape[1]

    def is_written(self, blocks: Tensor) -> Tensor:
        """`[B, L]` boolean, True where a row has a key; the null block 0 has none."""
        size = blocks.shape[1]
        is_block = (self.table != 0)[:, :, None].expand(-1, -1, size).reshape(self.table.shape[0], -1)
        return is_block & (torch.arange(self.capacity(blocks)) < self.lengths[:, None])

    def gather(self, blocks: Tensor) -> Tensor:
        """`[num_blocks, block_size, Hkv, D]` → `[B * L, Hkv, D] float32`."""
        found = blocks.index_select(0, self.table.reshape(-1).long())
        return found.reshape(-1, *blocks.shape[2:]).float()


def scatter(blocks: Tensor, places: Tensor, values: Tensor) -> Tensor:
    """ONNX `ScatterND`: the pool with `values` written; values without a slot go to the null block 0.

    ONNX Runtime writes in place where pool and result are bound to the same memory; otherwise it copies.

    Args:
        blocks: `[num_blocks, block_size, Hkv, D]`.
        places: `[N]` integers, `block * block_size + offset`, or -1.
        values: `[N, Hkv, D]`.
    """
    flat, size = places.long().clamp(min=0), blocks.shape[1]
    # Torch exports integer division through float32.
    block: Tensor = symbolic("Div", (flat, torch.tensor(size)), {}, dtype=flat.dtype, shape=flat.shape, version=14)
    indices = torch.stack((block, flat - block * size), dim=-1)
    written: Tensor = symbolic(
        "ScatterND", (blocks, indices, values), {}, dtype=blocks.dtype, shape=blocks.shape, version=18
    )
    return written


def in_precision(model: Decoder, precision: KVPrecision) -> Decoder:
    """The model itself for float32, otherwise a copy with rounded weights and tables."""
    return model if precision is KVPrecision.FP32 else copy.deepcopy(model).to(DTYPES[precision])


def _candidates(logits: Tensor, num_candidates: int | str) -> dict[str, Tensor]:
    values, ids = torch.topk(logits, int(num_candidates), dim=-1)
    highest = values[:, :1]
    normalizer = (logits - highest).exp().sum(-1).log() + highest[:, 0]
    # Minus infinity vanishes in the sum; a NaN normalizer reports it where only the top logits are read.
    is_finite = logits.amin(-1) > float("-inf")
    normalizer = torch.where(is_finite, normalizer, float("nan"))
    return {"logits": logits, "candidate_ids": ids, "candidate_logits": values, "log_normalizer": normalizer}


CONTRIB: MakePagedAttention = ContribAttention
"""ONNX Runtime's operator, for CUDA."""
STAND_IN: MakePagedAttention = StandInAttention
"""Standard operators, for tests on any provider."""
