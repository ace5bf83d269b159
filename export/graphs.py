"""The torch modules that become decoder.onnx and encoder.onnx: the model's own layers around ONNX Runtime's attention.

Each takes and returns tensors in the order of the artefact's signature. Embeddings, projections, norms and feed-forward
networks are the trained modules themselves; only the way from queries, keys and values to an output is replaced:

    decoder, to itself      GroupQueryAttention on packed Q, K, V: rotates, appends to the cache in place, attends. One
                            operator for prefill, for chunks of it and for ragged decoding
    decoder, to the source  GroupQueryAttention again, given no new keys and the source's K/V as its past
    encoder, to itself      Attention (opset 24) with a length for each row, so that no mask is ever built

The operators are symbolic: they exist in the exported graph, and running these modules in torch yields zeros where they
stand. What a graph computes is proven by replaying golden cases on ONNX Runtime.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.onnx.ops import symbolic_multi_out

from model.artifact import TensorSpec, decoder_signature, encoder_signature
from model.attention import CrossAttention, SelfAttention
from model.config import ModelConfig, Positions
from model.positions import RotaryPositions
from model.transformer import Decoder, EncoderDecoder

OPSET = 24

_HEAD_DIM_MULTIPLE = 8
_ROTARY_HEAD_DIM_MULTIPLE = 16


def unsupported(config: ModelConfig) -> list[str]:
    """Why the operators cannot compute this model; empty when they can."""
    rotary = config.positions is Positions.ROTARY
    multiple = _ROTARY_HEAD_DIM_MULTIPLE if rotary else _HEAD_DIM_MULTIPLE
    if config.head_dim % multiple:
        kind = " with rotary positions" if rotary else ""
        return [f"head_dim is {config.head_dim}, must be a multiple of {multiple}{kind}: GroupQueryAttention needs it"]
    return []


class DecoderGraph(nn.Module):
    """One step of cached decoding: new tokens and K/V buffers in, the wanted logits out, the buffers extended in place.

    Only the positions that `logits_indices` names reach the final norm and the head, which for a large vocabulary cost
    more than all layers together.
    """

    def __init__(self, model: Decoder) -> None:
        super().__init__()
        self.model = model
        self.inputs, self.outputs = decoder_signature(model.config)

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Tensors as `decoder_signature` lists its inputs → tensors as it lists its outputs."""
        feeds = _by_name(self.inputs, tensors)
        fetches: dict[str, Tensor] = {}
        hidden = self.model.embed(feeds["input_ids"], feeds.get("position_ids"))
        source = _Source.of(feeds, hidden, self.model.config) if self.model.config.is_encoder_decoder else None
        for index, layer in enumerate(self.model.layers):
            attend_self = partial(self._attend_self, index=index, feeds=feeds, fetches=fetches)
            attend_cross = (
                partial(self._attend_cross, source=source, index=index, feeds=feeds, fetches=fetches)
                if source is not None
                else None
            )
            hidden = layer(hidden, attend_self, attend_cross)
        wanted = hidden.flatten(0, 1).index_select(0, feeds["logits_indices"])
        fetches["logits"] = self.model.unembed(self.model.final_norm(wanted))
        return tuple(fetches[spec.name] for spec in self.outputs)

    def _attend_self(
        self, module: SelfAttention, x: Tensor, *, index: int, feeds: Mapping[str, Tensor], fetches: dict[str, Tensor]
    ) -> Tensor:
        y, fetches[f"present_key_{index}"], fetches[f"present_value_{index}"] = group_query_attention(
            self.model.config,
            module.project(x),
            None,
            (feeds[f"past_key_{index}"], feeds[f"past_value_{index}"]),
            feeds["seqlens_k"],
            feeds["total_sequence_length"],
            self.model.rotary,
        )
        return module.merge(y)

    def _attend_cross(
        self,
        module: CrossAttention,
        x: Tensor,
        *,
        source: _Source,
        index: int,
        feeds: Mapping[str, Tensor],
        fetches: dict[str, Tensor],
    ) -> Tensor:
        y, fetches[f"cross_key_out_{index}"], fetches[f"cross_value_out_{index}"] = group_query_attention(
            self.model.config,
            module.project_query(x),
            source.no_keys,
            (feeds[f"cross_key_{index}"], feeds[f"cross_value_{index}"]),
            source.last_position,
            source.longest,
            None,
        )
        return module.merge(y)


class EncoderGraph(nn.Module):
    """The whole encoder and every decoder layer's keys and values of its memory, computed once per source."""

    def __init__(self, model: EncoderDecoder) -> None:
        super().__init__()
        self.model = model
        self.inputs, self.outputs = encoder_signature(model.config)

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Tensors as `encoder_signature` lists its inputs → tensors as it lists its outputs."""
        feeds = _by_name(self.inputs, tensors)
        encoder = self.model.encoder
        lengths = feeds["source_lengths"].long()
        memory = encoder.embedding(feeds["source_ids"])
        for layer in encoder.layers:
            memory = layer(memory, partial(self._attend, lengths=lengths))
        memory = encoder.final_norm(memory)
        fetches: dict[str, Tensor] = {}
        readers = (module for module in self.model.layers.modules() if isinstance(module, CrossAttention))
        for index, reader in enumerate(readers):
            fetches[f"cross_key_{index}"], fetches[f"cross_value_{index}"] = reader.project_memory(memory)
        return tuple(fetches[spec.name] for spec in self.outputs)

    def _attend(self, module: SelfAttention, x: Tensor, *, lengths: Tensor) -> Tensor:
        config, rotary = self.model.config, self.model.encoder.rotary
        q, k, v = torch.split(module.project(x), [module.query_width, module.kv_width, module.kv_width], dim=-1)
        if rotary is not None:
            q = rotary_embedding(q, rotary, config.num_heads)
            k = rotary_embedding(k, rotary, config.num_kv_heads)
        return module.merge(padded_attention(config, q, k, v, lengths))


@dataclass(frozen=True, slots=True)
class _Source:
    """What every layer's cross-attention needs beside its cache, derived once for each step.

    `last_position` `[B] int32` and `longest` `[] int32` take the places of the operator's `seqlens_k` and
    `total_sequence_length`; `no_keys` `[B, 0, Hkv * D]` says that nothing is appended.
    """

    last_position: Tensor
    longest: Tensor
    no_keys: Tensor

    @classmethod
    def of(cls, feeds: Mapping[str, Tensor], hidden: Tensor, config: ModelConfig) -> _Source:
        lengths = feeds["source_lengths"]
        no_keys = hidden.new_zeros(hidden.shape[0], 0, config.num_kv_heads * config.head_dim)
        return cls(lengths - 1, lengths.max(), no_keys)


def group_query_attention(
    config: ModelConfig,
    query: Tensor,
    key_value: Tensor | None,
    past: tuple[Tensor, Tensor],
    seqlens_k: Tensor,
    total_sequence_length: Tensor,
    rotary: RotaryPositions | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`com.microsoft.GroupQueryAttention`: causal attention over a cache that it extends in place.

    Args:
        config: head counts and sizes.
        query: `[B, S, (H + 2 Hkv) * D]`, packed Q, K, V; or `[B, S, H * D]` with `key_value`.
        key_value: what to append as keys and as values, `[B, 0, Hkv * D]` to append nothing; None when packed.
        past: key and value buffers `[B, Hkv, capacity, D]`.
        seqlens_k: `[B] int32`, each row's cached and new tokens together, minus one.
        total_sequence_length: `[] int32`, the largest of those plus one.
        rotary: turns queries and new keys; None where positions were added to the embeddings or keys are not turned.

    Returns:
        The output `[B, S, H * D]` and the two buffers.
    """
    inputs = [query, key_value, key_value, *past, seqlens_k, total_sequence_length]
    if rotary is not None:
        inputs += [rotary.cos, rotary.sin]
    output, key, value = symbolic_multi_out(
        "com.microsoft::GroupQueryAttention",
        inputs,
        {"num_heads": config.num_heads, "kv_num_heads": config.num_kv_heads, "do_rotary": int(rotary is not None)},
        dtypes=(query.dtype,) * 3,
        shapes=((*query.shape[:2], config.num_heads * config.head_dim), past[0].shape, past[1].shape),
        version=1,
    )
    return output, key, value


def padded_attention(config: ModelConfig, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    """ONNX `Attention`, both ways, over right-padded rows.

    Args:
        config: head counts.
        q: `[B, S, H * D]`.
        k: `[B, S, Hkv * D]`.
        v: as `k`.
        lengths: `[B] int64`; keys at and after a row's length are not attended to.

    Returns:
        `[B, S, H * D]`, meaningless past each length.
    """
    (output,) = symbolic_multi_out(
        "Attention",
        (q, k, v, None, None, None, lengths),
        {"q_num_heads": config.num_heads, "kv_num_heads": config.num_kv_heads},
        dtypes=(q.dtype,),
        shapes=(q.shape,),
        version=24,
    )
    return output


def rotary_embedding(x: Tensor, rotary: RotaryPositions, num_heads: int) -> Tensor:
    """`com.microsoft.RotaryEmbedding`: `[B, S, num_heads * D]` turned by positions 0…S-1."""
    first_position = torch.zeros(1, dtype=torch.int64)
    (output,) = symbolic_multi_out(
        "com.microsoft::RotaryEmbedding",
        (x, first_position, rotary.cos, rotary.sin),
        {"num_heads": num_heads},
        dtypes=(x.dtype,),
        shapes=(x.shape,),
        version=1,
    )
    return output


def _by_name(specs: Sequence[TensorSpec], tensors: Sequence[Tensor]) -> dict[str, Tensor]:
    return {spec.name: tensor for spec, tensor in zip(specs, tensors, strict=True)}
