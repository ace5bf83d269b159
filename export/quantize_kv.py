"""Int8 K/V: calibrates scales with the float32 graphs, then rewrites the graphs.

Each channel of each head has one scale, fixed at export: 1/127 of the largest magnitude in calibration. Larger values
saturate. Channels that rotary positions rotate in pairs share a scale from the pair's norm, which no rotation changes,
so that it holds at every position.

Calibration needs no data: half of its sequences are drawn uniformly from the vocabulary, to cover rare tokens, half are
sampled from the model itself, to resemble real text. An encoder-decoder's sources are all drawn uniformly. Their
lengths differ widely, because short sources have larger keys and values: attention averages over fewer tokens.

`GroupQueryAttention` quantizes what it appends and attends to the quantized values, so a token's K/V depends on its own
row alone. It quantizes rotated keys, and so calibration looks at rotated keys. A source's K/V are quantized once, by
the encoder graph, with the scales that the decoder graph reads them with.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

from export.operators import CONTRIB
from export.quantize import save
from export.replay import continuation, run_in_place
from model.spec.config import AttentionScore, ModelConfig, Positions

Float32 = npt.NDArray[np.float32]
Int64 = npt.NDArray[np.int64]

NUM_SEQUENCES = 4
"""Sequences of either kind."""
LENGTH = 256
"""Tokens of a calibration sequence, or the context if that is shorter."""
SOURCE_STEP = 4
"""Ratio of successive lengths of calibration sources; there are as many lengths as sequences."""

LIMIT = np.float32(127.0)
LEAST_PEAK = np.float32(1e-30)
"""Lower bound of a channel's largest magnitude."""

_SEED = 20170612
_OPERATOR = "GroupQueryAttention"
_CROSS = "cross_"
# The operator's inputs for sinks and scales; positions and biases before them are not given.
_SINKS_AT, _SCALES_AT = 11, 12
# A score whose weight is exactly zero beside any other, without an infinity.
_NEVER = np.float32(-1e30)


def unsupported(config: ModelConfig) -> list[str]:
    """Why a model's K/V cannot be stored in int8; empty if they can."""
    if config.attention_score is not AttentionScore.DOT:
        return [f"int8 K/V is for dot-product attention, this model's score is {config.attention_score}"]
    return []


def calibrate(path: Path, config: ModelConfig, encoder: Path | None = None) -> tuple[dict[str, Float32], str]:
    """Scales of every layer's keys and values, and a description of the calibration.

    Args:
        path: the decoder graph in float32.
        config: of its model.
        encoder: the encoder graph in float32, of an encoder-decoder.

    Returns:
        By name (`key_0`, `value_0`, …, and for a source `cross_key_0`, …) `[Hkv, D]`: the size of one int8 step.
    """
    session = _open(path)
    rng = np.random.default_rng(_SEED)
    length = min(LENGTH, config.context)
    drawn = rng.integers(0, config.vocab_size, (NUM_SEQUENCES, length))
    words = f"{NUM_SEQUENCES} sequences of {length} tokens drawn evenly and {NUM_SEQUENCES} sampled from the model"
    peaks: dict[str, Float32] = {}
    sources: _Sources | None = None
    if encoder is not None:
        drawn[:, 0] = config.bos_id
        lengths = _source_lengths(config)
        sources = _Sources(lengths, {})
        for row, tensors in enumerate(_encode(_open(encoder), config, lengths, rng)):
            for name, values in tensors.items():
                peaks[name] = np.maximum(peaks.get(name, LEAST_PEAK), np.abs(values).max(axis=(0, 2)))
                sources.add(row, name, values[0])
        words += f", sources of {', '.join(map(str, lengths))} tokens drawn evenly"
    for sampled in (False, True):
        cache = _compute(session, config, drawn, rng if sampled else None, sources)
        for name, values in cache.items():
            met = _magnitudes(values, config, is_key=name.startswith("key")).max(axis=(0, 2))
            peaks[name] = np.maximum(peaks.get(name, LEAST_PEAK), met)
    return {name: values / LIMIT for name, values in peaks.items()}, words


def quantize_kv_file(path: Path, scales: Mapping[str, Float32]) -> None:
    """Rewrites a decoder's file and the external data beside it, which has the same name with `.data` added."""
    save(path, quantize_kv(onnx.load(path), scales))


def quantize_sources_file(path: Path, scales: Mapping[str, Float32]) -> None:
    """Rewrites an encoder's file likewise."""
    save(path, quantize_sources(onnx.load(path), scales))


def quantize_kv(model: onnx.ModelProto, scales: Mapping[str, Float32]) -> onnx.ModelProto:
    """The decoder with int8 K/V buffers and these scales; everything else unchanged.

    The decoder of an encoder-decoder also gets sinks of weight zero. ONNX Runtime has two algorithms for int8 K/V. One
    processes rows of different lengths one by one, and splits a lone row's keys over idle threads, which breaks batch
    invariance. The other processes all rows and heads together and stores a row of scores for each, which suits single
    tokens; only it supports sinks, so sinks select it.

    Args:
        model: with its weights loaded; it is not modified.
        scales: `[Hkv, D]` by the name of a buffer, without `past_`.
    """
    quantized = onnx.ModelProto()
    quantized.CopyFrom(model)
    graph = quantized.graph
    inputs = [name if name.startswith(_CROSS) else f"past_{name}" for name in scales]
    buffers = {*inputs, *map(continuation, inputs)}
    for value in (*graph.input, *graph.output):
        if value.name in buffers:
            value.type.tensor_type.elem_type = TensorProto.INT8
    has_sources = any(name.startswith(_CROSS) for name in scales)
    for node in graph.node:
        if node.op_type != _OPERATOR:
            continue
        node.domain = CONTRIB  # the project's own operator takes float32 K/V alone
        names = [name.removeprefix("past_") for name in node.input[3:5]]
        for name in names:
            values = np.ascontiguousarray(scales[name][None, :, None, :])
            graph.initializer.append(numpy_helper.from_array(values, f"{name}_scale"))
        node.input.extend([""] * (_SCALES_AT - len(node.input)) + [f"{name}_scale" for name in names])
        if has_sources:
            node.input[_SINKS_AT] = "no_sinks"
        for part in ("k", "v"):
            node.attribute.append(helper.make_attribute(f"{part}_quant_type", "PER_CHANNEL"))
        node.attribute.append(helper.make_attribute("kv_cache_bit_width", 8))
    if has_sources:
        graph.initializer.append(numpy_helper.from_array(np.full(_num_heads(graph), _NEVER), "no_sinks"))
    return quantized


def quantize_sources(model: onnx.ModelProto, scales: Mapping[str, Float32]) -> onnx.ModelProto:
    """The encoder with int8 K/V outputs in these scales; everything else unchanged.

    Args:
        model: with its weights loaded; it is not modified.
        scales: as in `quantize_kv`.
    """
    quantized = onnx.ModelProto()
    quantized.CopyFrom(model)
    graph = quantized.graph
    written = {output.name: output for output in graph.output if output.name in scales}
    for node in graph.node:
        for names in (node.input, node.output):
            for index, name in enumerate(names):
                if name in written:
                    names[index] = f"{name}.whole"
    # In steps of one: per channel, the operator processes one number at a time.
    graph.initializer.append(numpy_helper.from_array(np.array(1, np.float32), "int8_kv.step"))
    graph.initializer.append(numpy_helper.from_array(np.array(0, np.int8), "int8_kv.zero"))
    for name, output in written.items():
        inverse = np.ascontiguousarray(1 / scales[name][None, :, None, :])
        graph.initializer.append(numpy_helper.from_array(inverse, f"{name}.steps_in_one"))
        graph.node.append(
            helper.make_node("Mul", [f"{name}.whole", f"{name}.steps_in_one"], [f"{name}.steps"], name=f"{name}/Mul")
        )
        rounded = [f"{name}.steps", "int8_kv.step", "int8_kv.zero"]
        graph.node.append(helper.make_node("QuantizeLinear", rounded, [name], name=f"{name}/QuantizeLinear"))
        output.type.tensor_type.elem_type = TensorProto.INT8
    return quantized


@dataclass(frozen=True, slots=True)
class _Sources:
    """Encoded sources, one per row: lengths, and K/V `[rows, Hkv, longest, D]` by the decoder's input, zero-padded."""

    lengths: list[int]
    buffers: dict[str, Float32]

    def add(self, row: int, name: str, values: Float32) -> None:
        """Writes a source's K/V `[Hkv, length, D]` to a row."""
        if name not in self.buffers:
            num_heads, _, head_dim = values.shape
            self.buffers[name] = np.zeros((len(self.lengths), num_heads, max(self.lengths), head_dim), np.float32)
        self.buffers[name][row, :, : values.shape[1]] = values


def _source_lengths(config: ModelConfig) -> list[int]:
    longest = min(LENGTH, config.source_context)
    return [max(1, longest // SOURCE_STEP**row) for row in range(NUM_SEQUENCES)]


def _encode(
    session: ort.InferenceSession, config: ModelConfig, lengths: list[int], rng: np.random.Generator
) -> Iterator[dict[str, Float32]]:
    """K/V of sources of each length, `[sources, Hkv, length, D]` by name, unpadded; more sources of short lengths."""
    names = [output.name for output in session.get_outputs()]
    for length in lengths:
        count = NUM_SEQUENCES * max(lengths) // length
        inputs = {
            "source_ids": rng.integers(0, config.source_vocab_size, (count, length)),
            "source_lengths": np.full(count, length, np.int32),
        }
        yield dict(zip(names, session.run(names, inputs), strict=True))


def _compute(
    session: ort.InferenceSession,
    config: ModelConfig,
    tokens: Int64,
    rng: np.random.Generator | None,
    sources: _Sources | None,
) -> dict[str, Float32]:
    """The decoder's own K/V of rows of tokens `[rows, length]`, by name `[rows, Hkv, length, D]`.

    With `rng`, all tokens of a row but the first are sampled from the model. With `sources`, the decoder is an encoder-
    decoder's, which is fed single tokens.
    """
    rows, length = tokens.shape
    names = [f"past_{part}_{layer}" for layer in range(config.num_layers) for part in ("key", "value")]
    shape = (rows, config.num_kv_heads, length, config.head_dim)
    cache: dict[str, Float32] = {name: np.zeros(shape, np.float32) for name in names}
    count = length if rng is None and sources is None else 1
    fed = tokens[:, :count]
    for start in range(0, length, count):
        end = start + count
        inputs: dict[str, npt.NDArray[np.generic]] = {
            "input_ids": np.ascontiguousarray(fed),
            "seqlens_k": np.full(rows, end - 1, np.int32),
            "total_sequence_length": np.array(end, np.int32),
            "logits_indices": np.arange(1, rows + 1) * count - 1,
        }
        if config.positions is not Positions.ROTARY:
            inputs["position_ids"] = np.tile(np.arange(start, end), (rows, 1))
        buffers = dict(cache)
        if sources is not None:
            inputs["source_lengths"] = np.array(sources.lengths, np.int32)
            buffers |= sources.buffers
        logits = run_in_place(session, inputs, buffers)
        if rng is None:
            fed = tokens[:, end : end + count]
        else:  # the argmax of logits plus Gumbel noise is a sample
            fed = (logits + rng.gumbel(size=logits.shape)).argmax(axis=-1)[:, None]
    return {name.removeprefix("past_"): values for name, values in cache.items()}


def _num_heads(graph: onnx.GraphProto) -> int:
    node = next(node for node in graph.node if node.op_type == _OPERATOR)
    return int(next(helper.get_attribute_value(entry) for entry in node.attribute if entry.name == "num_heads"))


def _magnitudes(values: Float32, config: ModelConfig, *, is_key: bool) -> Float32:
    """Upper bound of the magnitudes of `[B, Hkv, T, D]` at any position of its token."""
    if not (is_key and config.positions is Positions.ROTARY):
        return np.abs(values)
    first, second = np.split(values, 2, axis=-1)
    return np.tile(np.hypot(first, second), 2)


def _open(path: Path) -> ort.InferenceSession:
    return ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
