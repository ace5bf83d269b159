"""`com.microsoft.PagedAttention` by its documentation, and graphs that use it, interpreted operator by operator."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

Array = npt.NDArray[Any]

# By place: the operator's name for it, and what must stand there in self-attention and in cross-attention.
OPERANDS: tuple[tuple[str, str, str], ...] = (
    ("query", "computed", "computed"),
    ("key", "", "computed"),
    ("value", "", "computed"),
    ("key_cache", "key_cache_{layer}", "key_cache_out_{layer}"),
    ("value_cache", "value_cache_{layer}", "value_cache_out_{layer}"),
    ("cumulative_sequence_length", "cumulative_sequence_length", "cumulative_sequence_length"),
    ("past_seqlens", "past_seqlens", "source_past_seqlens"),
    ("block_table", "block_table", "source_block_table"),
    ("cos_cache", "rotary", ""),
    ("sin_cache", "rotary", ""),
    ("slot_mapping", "slot_mapping", "computed"),
    ("head_sink", "", ""),
    ("q_norm_weight", "", ""),
    ("k_norm_weight", "", ""),
    ("k_scale", "", ""),
    ("v_scale", "", ""),
    ("attention_metadata", "attention_metadata", "source_attention_metadata"),
)


class PagedAttention(OpRun):  # type: ignore[misc]
    """The operator's documentation in NumPy: one row, one head, one query after the other, in float64.

    Source: the operator's schema in ONNX Runtime 1.31.
    """

    op_domain = "com.microsoft"

    def _run(self, *operands: Array | None, **_: Any) -> tuple[Array, ...]:
        given = dict(zip((name for name, _, _ in OPERANDS), operands, strict=False))
        num_heads, num_kv_heads = self._attribute("num_heads", 0), self._attribute("kv_num_heads", 0)
        window, is_causal = self._attribute("local_window_size", -1), self._attribute("is_causal", 1)
        query, caches = given["query"], [given["key_cache"].copy(), given["value_cache"].copy()]
        size, head_dim = caches[0].shape[1], caches[0].shape[3]
        if given["key"] is None:
            widths = np.cumsum([num_heads * head_dim, num_kv_heads * head_dim])
            query, key, value = np.split(query, widths, axis=1)
        else:
            key, value = given["key"], given["value"]
        query, key, value = (part.reshape(len(part), -1, head_dim).astype(np.float64) for part in (query, key, value))
        cumulative, past, table = given["cumulative_sequence_length"], given["past_seqlens"], given["block_table"]
        assert cumulative[-1] == len(query)
        assert (past >= 0).all()
        bound = given["attention_metadata"]
        output = np.zeros_like(query)
        for row, (begin, end) in enumerate(pairwise(cumulative)):
            total = past[row] + end - begin
            assert end - begin <= bound[0]
            assert total <= bound[1]
            assert total <= table.shape[1] * size
            positions = np.arange(past[row], total)
            if self._attribute("do_rotary", 0):
                cos, sin = (given[name][positions] for name in ("cos_cache", "sin_cache"))
                for part in (query, key):
                    part[begin:end] = _turn(part[begin:end], cos, sin)
            for token in range(begin, end):
                place = given["slot_mapping"][token]
                if place >= 0:
                    for cache, part in zip(caches, (key, value), strict=True):
                        cache[place // size, place % size] = part[token]
            rows = [cache[table[row]].reshape(-1, *cache.shape[2:])[:total] for cache in caches]
            keys, values = (found.astype(np.float64) for found in rows)
            for token, position in zip(range(begin, end), positions, strict=True):
                last = position + 1 if is_causal else total
                first = max(0, position + 1 - window) if window > 0 else 0
                for head in range(num_heads):
                    group = head // (num_heads // num_kv_heads)
                    scores = keys[first:last, group] @ query[token, head] / np.sqrt(head_dim)
                    weights = np.exp(scores - scores.max())
                    output[token, head] = weights / weights.sum() @ values[first:last, group]
        answer = output.reshape(len(output), -1).astype(given["query"].dtype)
        return (answer, *caches)[: len(self.onnx_node.output)]

    def _attribute(self, name: str, default: int) -> int:
        return next((each.i for each in self.onnx_node.attribute if each.name == name), default)


class RotaryEmbedding(OpRun):  # type: ignore[misc]
    """`com.microsoft.RotaryEmbedding` over `[B, S, heads * D]` from position 0 on."""

    op_domain = "com.microsoft"

    def _run(self, x: Array, _: Array, cos: Array, sin: Array, **__: Any) -> tuple[Array]:
        heads = next(each.i for each in self.onnx_node.attribute if each.name == "num_heads")
        split = x.reshape(*x.shape[:2], heads, -1)
        turned = np.stack([_turn(row, cos[: x.shape[1]], sin[: x.shape[1]]) for row in split])
        return (turned.reshape(x.shape).astype(x.dtype),)


def _turn(x: Array, cos: Array, sin: Array) -> Array:
    """`[S, heads, D]` by `[S, D / 2]`."""
    cos, sin = cos[:, np.newaxis].astype(np.float64), sin[:, np.newaxis].astype(np.float64)
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)


class Interpreter:
    """Stands in for an ONNX Runtime session: the graph as it is, interpreted operator by operator."""

    def __init__(self, path: Path) -> None:
        self._graph = ReferenceEvaluator(str(path), new_ops=[PagedAttention, RotaryEmbedding])
        self.output_names = list(self._graph.output_names)

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        return dict(zip(self.output_names, self._graph.run(None, dict(inputs)), strict=True))
