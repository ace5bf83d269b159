"""A decoder graph whose self-attention K/V is kept in eight bits: scales from what the model computes, then a rewrite.

Each channel of each head has one scale, fixed at export: 1/127 of the largest magnitude that calibration met there. A
number beyond it saturates. Channels that rotary positions turn in pairs share the length of the pair, which no rotation
changes, so that what was met at one position holds at every other.

Calibration needs no data: half of its sequences are drawn evenly from the vocabulary, which shows what rare tokens do,
half are sampled from the model itself, which are as close to what it will see as it knows.

`GroupQueryAttention` rounds what it appends and attends to what it rounded, so a token's K/V depends on its own row
alone, as with float32. It rounds after rotating, and so does calibration look at rotated keys.

Not for an encoder-decoder: most of what its steps read is the source's K/V, which the encoder graph writes in float32,
and a checkpoint has no sources to calibrate with.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

from model.config import AttentionScore, ModelConfig, Positions

Float32 = npt.NDArray[np.float32]

NUM_SEQUENCES = 4
"""Of either kind."""
LENGTH = 256
"""Of a calibration sequence, or the context where that is shorter."""

LIMIT = np.float32(127.0)
LEAST_PEAK = np.float32(1e-30)
"""What a channel's largest magnitude counts as at least."""

_SEED = 20170612
_OPERATOR = "GroupQueryAttention"
# Where the operator takes its scales; positions, biases and sinks, which lie between, are not given.
_SCALES_AT = 12


def unsupported(config: ModelConfig) -> list[str]:
    """Why a model's K/V cannot be kept in eight bits; empty when it can."""
    problems = []
    if config.is_encoder_decoder:
        problems.append(f"int8 K/V is for decoder-only models, this one is {config.architecture}")
    if config.attention_score is not AttentionScore.DOT:
        problems.append(f"int8 K/V is for dot-product attention, this model's score is {config.attention_score}")
    return problems


def calibrate(path: Path, config: ModelConfig) -> tuple[dict[str, Float32], str]:
    """Scales of every layer's keys and values, and in words what they were taken from.

    Args:
        path: the decoder graph in float32.
        config: of its model, decoder-only.

    Returns:
        By name (`key_0`, `value_0`, …) `[Hkv, D]`: what one step of the eight bits is worth.
    """
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    rng = np.random.default_rng(_SEED)
    length = min(LENGTH, config.context)
    drawn = rng.integers(0, config.vocab_size, (NUM_SEQUENCES, length))
    peaks: dict[str, Float32] = {}
    for sampled in (False, True):
        cache = _compute(session, config, drawn, rng if sampled else None)
        for name, values in cache.items():
            met = _magnitudes(values, config, is_key=name.startswith("key")).max(axis=(0, 2))
            peaks[name] = np.maximum(peaks.get(name, LEAST_PEAK), met)
    words = f"{NUM_SEQUENCES} sequences of {length} tokens drawn evenly and {NUM_SEQUENCES} sampled from the model"
    return {name: values / LIMIT for name, values in peaks.items()}, words


def quantize_kv_file(path: Path, scales: Mapping[str, Float32]) -> None:
    """Rewrites an ONNX file and the external data beside it, which is the same name with `.data` added."""
    model = quantize_kv(onnx.load(path), scales)
    data = path.with_name(f"{path.name}.data")
    data.unlink()  # it would be appended to
    onnx.save(model, path, save_as_external_data=True, location=data.name)
    onnx.checker.check_model(path, full_check=True)


def quantize_kv(model: onnx.ModelProto, scales: Mapping[str, Float32]) -> onnx.ModelProto:
    """The decoder with `past_*` and `present_*` in int8 and these scales; all else as it was.

    Args:
        model: with its weights loaded; left as it is.
        scales: `[Hkv, D]` by the name of a buffer without its `past_`.
    """
    quantized = onnx.ModelProto()
    quantized.CopyFrom(model)
    graph = quantized.graph
    buffers = {f"{kind}_{name}" for kind in ("past", "present") for name in scales}
    for value in (*graph.input, *graph.output):
        if value.name in buffers:
            value.type.tensor_type.elem_type = TensorProto.INT8
    for node in graph.node:
        if node.op_type != _OPERATOR:
            continue
        pasts = [name.removeprefix("past_") for name in node.input[3:5]]
        for name in pasts:
            values = np.ascontiguousarray(scales[name][None, :, None, :])
            graph.initializer.append(numpy_helper.from_array(values, f"{name}_scale"))
        node.input.extend([""] * (_SCALES_AT - len(node.input)) + [f"{name}_scale" for name in pasts])
        for part in ("k", "v"):
            node.attribute.append(helper.make_attribute(f"{part}_quant_type", "PER_CHANNEL"))
        node.attribute.append(helper.make_attribute("kv_cache_bit_width", 8))
    return quantized


def _compute(
    session: ort.InferenceSession,
    config: ModelConfig,
    tokens: npt.NDArray[np.int64],
    rng: np.random.Generator | None,
) -> dict[str, Float32]:
    """K/V of rows of tokens.

    Args:
        session: the decoder in float32.
        config: of its model.
        tokens: `[rows, length]`.
        rng: given, each row's tokens but the first are the model's own, sampled.

    Returns:
        `[rows, Hkv, length, D]` by name.
    """
    rows, length = tokens.shape
    names = [f"{part}_{layer}" for layer in range(config.num_layers) for part in ("key", "value")]
    shape = (rows, config.num_kv_heads, length, config.head_dim)
    cache: dict[str, Float32] = {name: np.zeros(shape, np.float32) for name in names}
    fed, start = tokens if rng is None else tokens[:, :1], 0
    while start < length:
        end = start + fed.shape[1]
        inputs: dict[str, npt.NDArray[np.generic]] = {
            "input_ids": fed,
            "seqlens_k": np.full(rows, end - 1, np.int32),
            "total_sequence_length": np.array(end, np.int32),
            "logits_indices": np.arange(1, rows + 1) * fed.shape[1] - 1,
        }
        if config.positions is not Positions.ROTARY:
            inputs["position_ids"] = np.tile(np.arange(start, end), (rows, 1))
        inputs |= {f"past_{name}": values for name, values in cache.items()}
        logits, *present = session.run(["logits", *(f"present_{name}" for name in names)], inputs)
        cache, start = dict(zip(names, present, strict=True)), end
        if rng is not None:  # the largest of logits with Gumbel noise is a sample
            fed = (logits + rng.gumbel(size=logits.shape)).argmax(axis=-1)[:, None]
    return cache


def _magnitudes(values: Float32, config: ModelConfig, *, is_key: bool) -> Float32:
    """How large `[B, Hkv, T, D]` may become, wherever in a sequence its token stands."""
    if not (is_key and config.positions is Positions.ROTARY):
        return np.abs(values)
    first, second = np.split(values, 2, axis=-1)
    return np.tile(np.hypot(first, second), 2)
